"""What the spectral metrics cost beside the functions that people would call, and how far each is from the truth.

A matrix changes as a weight does in training: by a thousandth of its norm each step. It begins as a uniform
initialisation, whose largest singular values lie close together, or with eight spikes above the bulk, as after
training. Rows:

- spectral norm: one step, against ``torch.linalg.matrix_norm(W, 2)`` in float32, NumPy's norm, the largest eigenvalue
  of the Gram matrix in float64, and ikkuna's three power iterations from the vector before, re-implemented from their
  description. The error is against that eigenvalue.
- operator norm of a 256x256x3x3 convolution of a 16x16 input with zero padding: seconds for a step, beside the exact
  norm with circular padding by Fourier transform (every frequency's matrix).
- all spectral metrics of one weight in one run, against each by itself: what sharing the singular values saves.
- power law of 2048 eigenvalues, against a loop over all tails in NumPy, as WeightWatcher's ``WWFit`` has it.

Times are CPU time of the process on one thread, medians of the steps; the candidates take turns step by step.

    OMP_NUM_THREADS=1 python benchmarks/metrics_spectra.py [--full] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import torch
from numpy.typing import NDArray

import analyze
from analyze.metrics.spectral_norm import seeded
from tracer import ModuleMessage


def clocked(action: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    result = action()
    return time.process_time() - begin, result


def weight(n: int, form: str, generator: torch.Generator) -> torch.Tensor:
    """An initialisation, or a bulk with eight spikes."""
    if form == "init":
        return torch.nn.init.kaiming_uniform_(torch.empty(n, n), a=math.sqrt(5), generator=generator)
    left, right = (torch.linalg.qr(torch.randn(n, 8, generator=generator))[0] for _ in range(2))
    return torch.randn(n, n, generator=generator) / math.sqrt(n) + (left * torch.linspace(5, 2.5, 8)) @ right.T


def moved(w: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The weight after a step: a thousandth of its norm further."""
    step = torch.randn(w.shape, generator=generator)
    return w + step * (1e-3 * w.norm() / step.norm())


def gram(w: NDArray[Any]) -> float:
    wide = w.astype(np.float64)
    last = len(wide) - 1
    return math.sqrt(scipy.linalg.eigh(wide @ wide.T, eigvals_only=True, subset_by_index=(last, last))[0])


def power_iterations(w: NDArray[Any], u: NDArray[Any]) -> tuple[float, NDArray[Any]]:
    """Three iterations from the left vector of the step before."""
    for _ in range(3):
        v = w.T @ u
        v /= np.linalg.norm(v)
        u = w @ v
        u /= np.linalg.norm(u)
    return float(u @ w @ v), u


def spectral(n: int, form: str, steps: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    w = weight(n, form, generator)
    u = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    times: dict[str, list[float]] = {}
    errors, low, applied = [], [], []
    for step in range(1, steps + 1):
        w = moved(w, generator)
        array = w.numpy()
        taken: dict[str, Any] = {}
        for name, action in {
            "here": lambda w=w, step=step: analyze.spectral_norm(w, random=seeded(step)),
            "torch": lambda w=w: float(torch.linalg.matrix_norm(w, 2)),
            "numpy": lambda array=array: float(np.linalg.norm(array, 2)),
            "gram": lambda array=array: gram(array),
            "power": lambda array=array, u=u: power_iterations(array, u),
        }.items():
            seconds, taken[name] = clocked(action)
            times.setdefault(name, []).append(seconds)
        found = taken["here"]
        low_value, u = taken["power"]
        errors.append(abs(found / taken["gram"] - 1))
        low.append(abs(low_value / taken["gram"] - 1))
        applied.append(found.steps)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "metric": f"spectral norm {n} {form}",
        "seconds": middle["here"],
        "ratio": statistics.median(b / a for a, b in zip(times["here"], times["torch"], strict=True)),
        "error": max(errors),
        "steps": statistics.median(applied),
        **{f"{name} seconds": middle[name] for name in ("torch", "numpy", "gram", "power")},
        "error of three power iterations": max(low),
    }


def operator(n: int, size: int, steps: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    w = torch.nn.init.kaiming_uniform_(torch.empty(n, n, 3, 3), a=math.sqrt(5), generator=generator)
    times, applied = [], []
    for step in range(1, steps + 1):
        w = moved(w, generator)
        seconds, found = clocked(lambda w=w, step=step: analyze.operator_norm(w, size, random=seeded(step)))
        times.append(seconds)
        applied.append(found.steps)
    closer = analyze.operator_norm(w.double(), size, tolerance=1e-10, random=seeded("closer"))
    circular, _ = clocked(lambda: analyze.operator_norm(w, size, padding="circular"))
    return {
        "metric": f"operator norm {n}x{n}x3x3 at {size}x{size}",
        "seconds": statistics.median(times),
        "error": abs(float(found) / float(closer) - 1),
        "steps": statistics.median(applied),
        "circular, exact": circular,
        "over the reshaped kernel's": float(found) / float(analyze.spectral_norm(w)),
    }


def board(n: int, rounds: int) -> dict[str, Any]:
    names = ("singular_values", "condition_number", "stable_rank", "participation_ratio", "effective_rank", "power_law")
    w = weight(n, "trained", torch.Generator().manual_seed(0))
    together, apart = [], []
    for _ in range(rounds):
        metrics = [analyze.parse(name) for name in (*names, "weightwatcher")]
        for times, copies in ((together, False), (apart, True)):
            data = w.clone()
            total = 0.0
            for metric in metrics:
                message = ModuleMessage(
                    kind="weights",
                    module="m",
                    data=data.clone() if copies else data,
                    global_step=0,
                    train_step=0,
                    epoch=0,
                )
                total += clocked(lambda metric=metric, message=message: list(metric.receive(message)))[0]
            times.append(total)
    return {
        "metric": f"seven spectral metrics of one weight, {n}",
        "seconds": statistics.median(together),
        "apart": statistics.median(apart),
        "ratio": statistics.median(b / a for a, b in zip(together, apart, strict=True)),
    }


def loop_fit(values: NDArray[np.float64]) -> float:
    """A power law by a loop over all tails, with powers."""
    values = np.sort(values)
    logs, count = np.log(values), len(values)
    alphas, distances = np.zeros(count - 1), np.ones(count - 1)
    for i, xmin in enumerate(values[:-1]):
        n = float(count - i)
        alphas[i] = 1 + n / (np.sum(logs[i:]) - n * logs[i])
        distances[i] = np.max(np.abs(1 - (values[i:] / xmin) ** (1 - alphas[i]) - np.arange(n) / n))
    return float(alphas[np.argmin(distances)])


def tail(count: int, rounds: int) -> dict[str, Any]:
    values = np.random.default_rng(0).pareto(2.0, count) + 1
    ours, loop = [], []
    for _ in range(rounds):
        seconds, found = clocked(lambda: analyze.power_law(values))
        ours.append(seconds)
        seconds, alpha = clocked(lambda: loop_fit(values))
        loop.append(seconds)
    return {
        "metric": f"power law of {count} eigenvalues",
        "seconds": statistics.median(ours),
        "loop": statistics.median(loop),
        "ratio": statistics.median(b / a for a, b in zip(ours, loop, strict=True)),
        "error": abs(float(found) / alpha - 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="also 4096 x 4096, and more steps of 2048 x 2048")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    todo: list[Callable[[], dict[str, Any]]] = [
        *(lambda form=form: spectral(512, form, 15) for form in ("init", "trained")),
        *(lambda form=form: spectral(2048, form, 5 if options.full else 2) for form in ("init", "trained")),
        lambda: operator(256, 16, 8),
        lambda: board(512, 3),
        lambda: tail(2048, 3),
    ]
    if options.full:
        todo[4:4] = [lambda form=form: spectral(4096, form, 1) for form in ("init", "trained")]
    rows = []
    for measure in todo:
        row = measure()
        rows.append(row)
        if not options.json:
            print(row["metric"])
            for key, value in row.items():
                if key != "metric":
                    print(f"    {key:32} {value:.4g}")
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
