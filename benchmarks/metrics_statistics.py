"""How fast statistics, histograms and quantiles are, beside reading the data and beside calls of torch and NumPy.

For each row, on one core: GB of input per CPU second, the time as a multiple of that of ``np.dot(x, x)`` of the same
data (which reads it once), and how many times as fast as the reference it is. References are eight naive calls of torch
(norm, mean, var, abs().mean(), min, max, zero fraction, isfinite().all()), or what the row says. The bar is that of the
goals of this project, in GB/s of a core whose np.dot reads 24; what is compared with it is measured GB/s times 24 over
those of np.dot in the same rounds, since other work on the machine slows all alike.

All of a group take turns, several rounds in one process; what is printed is the median of the rounds, and multiples are
formed within a round. Times are CPU time of the process.

    python benchmarks/metrics_statistics.py [--rounds 7] [--full] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import analyze
from analyze.metrics.counts import sketch

NOMINAL = 24.0
"""GB/s of np.dot for which the bars are stated."""


def naive(x: torch.Tensor) -> list[Any]:
    """Eight statistics as one writes them."""
    return [
        x.norm(),
        x.mean(),
        x.var(),
        x.abs().mean(),
        x.min(),
        x.max(),
        (x == 0).float().mean(),
        torch.isfinite(x).all(),
    ]


def clocked(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(rows: Mapping[str, Callable[[], object]], rounds: int, repeats: int = 1) -> dict[str, list[float]]:
    """CPU seconds of each row in each round."""

    def repeated(work: Callable[[], object]) -> None:
        for _ in range(repeats):
            work()

    for work in rows.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, work in rows.items():
            times[name].append(clocked(lambda work=work: repeated(work)) / repeats)  # type: ignore[misc]
    return times


def compared(one: list[float], other: list[float]) -> float:
    """How many times as long one takes as the other."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


FIVE = ("mean", "variance", "norm2", "min", "max")


def large(rounds: int, exponent: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**exponent, generator=generator)
    array, shifted = x.numpy(), x + 1e4
    channels = x.view(-1, 64, 32, 32)
    rows: dict[str, tuple[Callable[[], object], str, float | None]] = {
        "np.dot(x, x)": (lambda: np.dot(array, array), "", None),
        "np.sum": (lambda: np.sum(array), "", None),
        "8 naive torch calls": (lambda: naive(x), "", None),
        "np.histogram": (lambda: np.histogram(array, 50), "", None),
        "np.quantile of 5": (lambda: np.quantile(array, (0, 0.25, 0.5, 0.75, 1)), "", None),
        "mean": (lambda: analyze.mean(x), "8 naive torch calls", None),
        "five": (lambda: analyze.statistics(x, FIVE), "8 naive torch calls", 6.0),
        "five, single": (lambda: analyze.statistics(x, FIVE, precision="single"), "8 naive torch calls", 6.0),
        "five, offset 1e4": (lambda: analyze.statistics(shifted, FIVE), "8 naive torch calls", None),
        "seven": (lambda: analyze.statistics(x), "8 naive torch calls", 2.5),
        "seven, single": (lambda: analyze.statistics(x, precision="single"), "8 naive torch calls", 2.5),
        "seven, of 64 channels": (
            lambda: analyze.statistics(channels, per="channel", axis=1),
            "8 naive torch calls",
            None,
        ),
        "seven and two higher": (
            lambda: analyze.statistics(x, (*FIVE, "norm1", "sparsity", "skewness", "kurtosis")),
            "8 naive torch calls",
            None,
        ),
        "sketch": (lambda: sketch(x), "np.histogram", 1.5),
        "histogram, sketch": (lambda: analyze.histogram(x, method="sketch"), "np.histogram", 1.5),
        "histogram, exact": (lambda: analyze.histogram(x), "np.histogram", None),
        "quantiles, 5": (lambda: analyze.quantiles(x), "np.quantile of 5", None),
    }
    times = measure({name: work for name, (work, _, _) in rows.items()}, rounds)
    dot = times["np.dot(x, x)"]
    found = []
    for name, (_, reference, bar) in rows.items():
        multiple = compared(times[name], dot)
        found.append(
            {
                "row": name,
                "GB/s": array.nbytes / statistics.median(times[name]) / 1e9,
                "of np.dot": multiple,
                "as fast as": reference,
                "times": compared(times[reference], times[name]) if reference else None,
                "bar": bar,
                "at np.dot of 24 GB/s": NOMINAL / multiple,
            }
        )
    return found


def small(rounds: int) -> list[dict[str, Any]]:
    """Tensors of 256 elements, 4096 of them: microseconds each, one by one and all at once."""
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    some, array = x[:512], x.numpy()
    rows: dict[str, tuple[Callable[[], object], int]] = {
        "np.dot of as much": (lambda: np.dot(array.reshape(-1), array.reshape(-1)), len(x)),
        "torch vector_norm, one by one": (lambda: [torch.linalg.vector_norm(one) for one in some], len(some)),
        "torch foreach_norm": (lambda: torch._foreach_norm(list(some)), len(some)),
        "norm2, one by one": (lambda: [analyze.norm(one) for one in some], len(some)),
        "seven, one by one": (lambda: [analyze.statistics(one) for one in some], len(some)),
        "norm2, all at once": (lambda: analyze.statistics_of_tensors(x, "norm2"), len(x)),
        "norm2, all at once, single": (
            lambda: analyze.statistics_of_tensors(x, "norm2", precision="single"),
            len(x),
        ),
        "seven, all at once": (lambda: analyze.statistics_of_tensors(x), len(x)),
        "seven, all at once, single": (lambda: analyze.statistics_of_tensors(x, precision="single"), len(x)),
    }
    times = measure({name: work for name, (work, _) in rows.items()}, rounds, repeats=5)
    dot = times["np.dot of as much"]
    return [
        {
            "row": name,
            "us each": statistics.median(times[name]) / count * 1e6,
            "of np.dot": compared(times[name], dot) * len(x) / count,
            "bar": 0.1 if "all at once" in name else None,
        }
        for name, (_, count) in rows.items()
    ]


def accuracy() -> list[dict[str, Any]]:
    """The largest relative error of the statistics against float64, beside those of torch's float32."""
    found = []
    generator = torch.Generator().manual_seed(1)
    for name, x in {
        "randn, 2^24": torch.randn(2**24, generator=generator),
        "0.1, 2^24": torch.full((2**24,), 0.1),
        "randn + 1e4, 2^22": torch.randn(2**22, generator=generator) + 1e4,
        "randn * 1e-20, 2^22": torch.randn(2**22, generator=generator) * 1e-20,
    }.items():
        exact = x.double().numpy()
        norm = float(np.sqrt(np.sum(np.square(exact))))
        variance = float(np.var(exact, ddof=1))
        row: dict[str, Any] = {"data": name}
        for precision in ("double", "single"):
            told = analyze.statistics(x, "norm2+variance", precision=precision)  # type: ignore[arg-type]
            row[f"norm2 {precision}"] = abs(told.norm2 / norm - 1)
            row[f"variance {precision}"] = abs(told.variance / variance - 1) if variance > 1e-25 * norm else None
        row["torch norm"] = abs(float(x.norm()) / norm - 1)
        found.append(row)
    return found


def told(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2g}" if value < 0.01 else f"{value:.3g}"
    return "" if value is None else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--full", action="store_true", help="also 2^26 elements (268 MB)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {"2^24 float32 (67 MB)": large(arguments.rounds, 24)}
    if arguments.full:
        result["2^26 float32 (268 MB)"] = large(arguments.rounds, 26)
    result["4096 tensors of 256 float32"] = small(arguments.rounds)
    result["relative errors"] = accuracy()
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    for title, table in result.items():
        print(f"\n{title}\n\n| {' | '.join(table[0])} |\n|{'---|' * len(table[0])}")
        for row in table:
            print(f"| {' | '.join(map(told, row.values()))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
