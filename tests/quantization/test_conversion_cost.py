"""What it takes to quantise a transformer beside its weights: memory, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, threading, time, warnings
warnings.simplefilter("ignore")
import torch
from transformers import BertConfig, BertModel
from fxkit import quantization as q

def encoder(layers, width):
    size = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 99}
    return BertModel(BertConfig(num_hidden_layers=layers, num_attention_heads=4, **size)).eval()

def quantized(model):
    inputs = {"input_ids": torch.arange(32).reshape(2, 16)}
    prepared = q.prepare(model, config=q.int8_static(), kwargs=inputs)
    q.calibrate(prepared, [inputs])
    return q.convert(prepared)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def watch():
    while True:
        peak[0] = max(peak[0], resident())
        time.sleep(0.002)

with torch.no_grad():
    kept = quantized(encoder(1, 64))  # what is imported and allocated once
    model = encoder(6, 512)
    weights = sum(one.nbytes for one in model.parameters())
    peak, before = [0], resident()
    threading.Thread(target=watch, daemon=True).start()
    result = quantized(model)
print(json.dumps({"weights": weights, "more": peak[0] - before}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_less_than_two_and_a_half_times_the_weights() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights"] + found["more"] < 2.5 * found["weights"]
