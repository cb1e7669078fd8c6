"""Run benchmarks: `python -m benchmarks [suite ...] [options]`; `--help` names them."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch

from benchmarks import (
    capture_cost,
    compiling,
    cuda,
    cuda_quantization,
    decoder_cache,
    import_time,
    operators,
    partitioning,
    passes,
    precision,
    quantization,
    rewriting,
    training,
    types,
)
from benchmarks.constructs import table as constructs
from benchmarks.fusion import table as fusion
from fxkit.timing import machine

SUITES: dict[str, Callable[[argparse.Namespace], str]] = {
    "kernels": lambda options: fusion.run(
        options.rounds, with_peer=options.peer, family=options.family, case=options.case
    ),
    "cuda": lambda options: cuda.run(options.rounds, with_peer=options.peer),
    "cuda_quantization": lambda options: cuda_quantization.run(
        options.rounds, with_peer=options.peer
    ),
    "compiling": lambda options: compiling.run(with_peer=options.peer),
    "capture": lambda options: capture_cost.run(options.rounds, with_peer=options.peer),
    "rewriting": lambda options: rewriting.run(
        options.rounds, with_peer=options.peer, nodes=options.nodes
    ),
    "partitioning": lambda options: partitioning.run(options.rounds, with_peer=options.peer),
    "passes": lambda options: passes.run(options.rounds, with_peer=options.peer),
    "types": lambda options: types.run(options.rounds, with_peer=options.peer),
    "constructs": lambda options: constructs.run(with_peer=options.peer),
    "training": lambda options: training.run(options.rounds, with_peer=options.peer),
    "precision": lambda options: precision.run(options.rounds),
    "operators": lambda options: operators.run(options.rounds),
    "quantization": lambda options: quantization.run(
        options.rounds, with_peer=options.peer, case=options.case
    ),
    "decoder_cache": lambda options: decoder_cache.run(options.rounds),
    "import": lambda options: import_time.run(options.rounds),
}


def main() -> None:
    """Run the suites that are named, or all, and print a table for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], metavar="suite")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each (20)")
    parser.add_argument("--nodes", type=int, default=100_000, help="largest chain to rewrite")
    parser.add_argument(
        "--no-peer", dest="peer", action="store_false", help="leave out torch's own tools"
    )
    parser.add_argument("--threads", type=int, help="threads of torch; its own choice if left out")
    parser.add_argument("--family", choices=fusion.FAMILIES, help="the only family of kernels")
    parser.add_argument(
        "--case", help="the only case of kernels or quantization to run, by its first word"
    )
    parser.add_argument("--bare", action="store_true", help="leave out the headings")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", module="torch")
    if not options.bare:
        print(f"{machine()}, torch {torch.__version__}, calls in turn")
    for name in options.suites or SUITES:
        heading = "" if options.bare else f"\n{name}\n"
        print(f"{heading}{SUITES[name](options)}", flush=True)


if __name__ == "__main__":
    main()
