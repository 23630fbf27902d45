"""What a dataset gives of a trace in a second, in and out of order, beside reading the same trace in order.

Each way reads all activations of a layer, once in a round and in a new order; what counts is the median over the rounds
of the ratio to the same round's plain reading by `TraceReader.arrays`. That keeps nothing: its block of memory stays in
the processor's cache, where a batch is memory that is written once more. All of the trace lies in the page cache, or
with `--cold` none of it, so that each round reads it from the disk.

    python benchmarks/dataset.py [--rounds 15] [--megabytes 512] [--widths 64,512,2048] [--cold] [--compress] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tracer

BATCH = 4096
TOKENS = 1024
"""Datapoints of a message."""


def record(path: Path, width: int, megabytes: int, compression: str = "none") -> None:
    """Activations of one layer after a ReLU, float32, with some thousand datapoints in a message."""
    with tracer.TraceWriter(path, compression=compression) as writer:
        for step in range(max(4, (megabytes << 20) // (4 * width * TOKENS))):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(
                tracer.ModuleMessage(kind="activations", module="layer", data=torch.randn(TOKENS, width), **where)
            )


def ways(trace: tracer.TraceReader) -> dict[str, Callable[[], int]]:
    """Name → reads everything, and returns the number of datapoints."""
    datasets = {
        "in order": trace.dataset("activations", "layer", batch_size=BATCH),
        "shuffled": trace.dataset("activations", "layer", batch_size=BATCH, shuffle=True),
    }
    found: dict[str, Callable[[], int]] = {
        "arrays": lambda: sum(len(group.data) * TOKENS for group in trace.arrays("activations", "layer")),
        # what nobody can do without who keeps a batch
        "copied": lambda: sum(len(group.data.copy()) * TOKENS for group in trace.arrays("activations", "layer")),
    }
    for name, dataset in datasets.items():
        found[name] = lambda dataset=dataset: sum(len(batch) for batch in dataset)
    return found


def forget(path: Path) -> None:
    """Drop a trace from the page cache."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            number = os.open(file, os.O_RDONLY)
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def measure(options: argparse.Namespace, width: int) -> dict[str, float]:
    """Datapoints a second of plain reading, and the median ratios to it."""
    order = random.Random(0)
    ratios: dict[str, list[float]] = {}
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"run.{options.format}"
        record(path, width, options.megabytes, "lz4" if options.compress else "none")
        with tracer.open(path) as trace:
            each = ways(trace)
            total = {name: way() for name, way in each.items()}  # opens files, and fills the page cache
            if len(set(total.values())) > 1:
                raise SystemExit(f"not all datapoints came once: {total}")
            for _ in range(options.rounds):
                seconds = {}
                for name in order.sample(list(each), len(each)):
                    if options.cold:
                        forget(path)
                    begin = time.perf_counter()
                    each[name]()
                    seconds[name] = time.perf_counter() - begin
                rates.append(total["arrays"] / seconds["arrays"])
                for name, taken in seconds.items():
                    ratios.setdefault(name, []).append(seconds["arrays"] / taken)
    found = {f"{name}_ratio": statistics.median(one) for name, one in ratios.items() if name != "arrays"}
    return {"width": width, "rows_a_second": statistics.median(rates), **found}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=512, help="of activations")
    parser.add_argument("--widths", default="64,512,2048", help="numbers of a datapoint, float32")
    parser.add_argument("--format", choices=["zarr", "h5"], default="zarr")
    parser.add_argument("--cold", action="store_true", help="read from the disk")
    parser.add_argument("--compress", action="store_true", help="with lz4")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    widths = [int(width) for width in options.widths.split(",")]
    found = [measure(options, width) for width in widths]
    if options.json:
        json.dump(found, sys.stdout)
        return
    print(f"{'numbers':>8} {'rows/s by arrays':>17} {'copied':>7} {'dataset in order':>17} {'shuffled':>9}")
    for one in found:
        ratios = f"{one['copied_ratio']:7.2f} {one['in order_ratio']:17.2f} {one['shuffled_ratio']:9.2f}"
        print(f"{one['width']:8} {one['rows_a_second']:17,.0f} {ratios}")


if __name__ == "__main__":
    main()
