"""Runs of kernels through the C interface alone: a program without Python and without torch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import fxkit.lower
from fxkit.lower.building import toolchain

NATIVE = Path(fxkit.lower.__file__).parent / "runtime" / "native"
PARTS = ("pool.cpp", "kernel_run.cpp")

# y = (2x + 1) - x, where 2x + 1 lies in scratch memory; the second kernel fails where x[0] is 0.
MAIN = r"""
#include <stdio.h>

static long twice(void* const* buffers, long threads) {
  const float* x = (const float*)buffers[0];
  float* y = (float*)buffers[1];
  const float* offset = (const float*)buffers[2];
  for (int i = 0; i < 4; ++i) y[i] = 2 * x[i] + *offset;
  return 0;
}

static long minus(void* const* buffers, long threads) {
  const float *x = (const float*)buffers[0], *y = (const float*)buffers[1];
  float* z = (float*)buffers[2];
  for (int i = 0; i < 4; ++i) z[i] = y[i] - x[i];
  return x[0] == 0;
}

static void count(void* context, const int* slots, int n) { *(int*)context += 10 * n + slots[0]; }

int main() {
  float one = 1, x[4] = {1, 2, 3, 4}, y[4];
  int first[] = {0, 2}, second[] = {0, 2, 1}, freed[] = {7}, homes[] = {-1}, released = 0;
  size_t offsets[] = {64};
  fx_kernel kernels[] = {{(void*)twice, 2, first, false, (const char*)&one, nullptr, 0, -1},
                         {(void*)minus, 3, second, true, nullptr, freed, 1, -1}};
  fx_run run = {kernels, 2, 1, 1, 1, true, 128, offsets, homes, {nullptr, nullptr, 0}};
  printf("%d", fx_run_fits(&run));
  void *values[3] = {x, y}, *memory = fx_pool_take(run.scratch_bytes);
  printf(" %d", fx_run_kernels(&run, values, memory, 1, count, &released));
  printf(" %g %g %g %g %d", y[0], y[1], y[2], y[3], released);
  x[0] = 0;
  printf(" %d", fx_run_kernels(&run, values, memory, 1, nullptr, nullptr));
  fx_pool_give(memory, run.scratch_bytes);
  second[1] = 3;
  printf(" %d", fx_run_fits(&run));
  fx_pool_statistics found;
  fx_pool_read(&found);
  printf(" %llu %llu", found.fresh, found.used);
  printf(" %zu\n", fx_pool_trim());
}
"""


def test_a_program_without_python_runs_kernels(tmp_path: Path) -> None:
    source = "\n".join((NATIVE / part).read_text() for part in PARTS)
    assert not re.search(r"\bPy[A-Z]\w|torch_|aoti_|Handle", source)
    (tmp_path / "main.cpp").write_text(source + MAIN)
    command = [toolchain.current().compiler, "-Wall", "-pthread", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    found = subprocess.run(["./main"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found.stdout == "1 0 2 3 4 5 17 1 0 1 0 128\n"
