"""What comparing layers costs as they grow: against the plain formulas, and from sketches; one run, ratios.

    OMP_NUM_THREADS=1 python benchmarks/scale_similarity.py [--rounds 9] [--pairs] [--trials 1000]

- Linear CKA against four lines of NumPy (centre, X'Y, norms) on the same float64 activations, and against the same
  lines in float32, which are twice as fast and good to six digits.
- PWCCA against SVCCA.
- ``--pairs``: linear CKA of all pairs of 32 layers at 50 steps of width 4,096 from sketches in a trace, in a process of
  its own with two threads: seconds and peak memory, all included (also the imports).
- ``--trials N``: how many of so many projections, made as a recording makes them, have the exact value in their
  interval, for CKA, the participation ratio, the stable rank and (of fewer projections) SVCCA at 0.9 and at 0.99, of
  layers with several kinds of spectra. Beside it stands how many intervals say something: those of SVCCA may be all
  from 0 to 1, and then they are right, of course.

Variants take turns in random order; what is printed are medians of the rounds and of the rounds' ratios. It ends with
the status 1 where a bar is missed: a ratio of CKA above 1.0 (3 % are left for noise) or of PWCCA above 1.2, all pairs
in more than 600 s or 2 GB, intervals of which less than 99 of 100 have the exact value.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import analyze
import tracer
from tracer.observing.reductions import SketchReduction, projection

Matrix = NDArray[Any]

LAYERS, STEPS, WIDTH, DATAPOINTS, COLUMNS = 32, 50, 4096, 512, 128


def naive(x: Matrix, y: Matrix) -> float:
    """Linear CKA as one writes it."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    return float(np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)))


def layers(n: int, d: int, seed: int = 0) -> tuple[Matrix, Matrix]:
    """Two related layers in float64."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((n, d))
    return x, np.maximum(x @ random.standard_normal((d, d)) / np.sqrt(d), 0)


def turns(rounds: int, *variants: Callable[[], Any]) -> tuple[list[float], list[float], list[float]]:
    """The median CPU seconds of each variant, the median ratios of the first to each, and the values."""
    times: list[list[float]] = [[] for _ in variants]
    values = [0.0 for _ in variants]
    order = random.Random(0)
    for _ in range(rounds):
        # a variant is quicker or slower by what came before: which memory is at hand, what the cache holds
        for place in order.sample(range(len(variants)), len(variants)):
            began = time.process_time()
            values[place] = float(variants[place]())
            times[place].append(time.process_time() - began)
    ratios = [statistics.median(a / b for a, b in zip(times[0], one, strict=True)) for one in times]
    return [statistics.median(one) for one in times], ratios, values


class Bars:
    """Notes what is above or below what is wanted.

    Attributes
    ----------
    missed : list of str
        A sentence for each bar that was missed.
    """

    def __init__(self) -> None:
        self.missed: list[str] = []

    def at_most(self, what: str, found: float, most: float, noise: float = 0.0) -> None:
        """A number that may be so large."""
        if not found <= most * (1 + noise):
            self.missed.append(f"{what}: {found:.4g}, wanted <= {most:g}")

    def right(self, what: str, hits: int, of: int) -> None:
        """So many intervals that have the exact value: 99 of 100, rounded down where they are fewer."""
        if hits < math.floor(0.99 * of):
            self.missed.append(f"{what}: {hits} of {of} intervals are right, wanted >= 99 %")


def cka(rounds: int, bars: Bars) -> None:
    print(f"{'linear CKA':20} {'here, s':>9} {'NumPy, s':>9} {'ratio':>7} {'want':>6}   float32 NumPy, s   its error")
    for n, d in ((1797, 256), (4000, 1024), (8000, 2048), (2000, 1024), (1000, 4096)):
        x, y = layers(n, d)
        a, b = x.astype(np.float32), y.astype(np.float32)
        few = max(3, rounds if n * d < 2e6 else rounds // 2)
        took, ratios, values = turns(
            few * 5 if n * d < 1e6 else few, partial(analyze.cka, x, y), partial(naive, x, y), partial(naive, a, b)
        )
        assert abs(values[0] - values[1]) < 1e-10
        bars.at_most(f"linear CKA of {n} x {d}", ratios[1], 1.0, noise=0.03)
        print(f"{n:>9} x {d:<8} {took[0]:9.4f} {took[1]:9.4f} {ratios[1]:6.2f}x {'<= 1.0':>6}   {took[2]:16.4f}"
              f"   {abs(values[2] - values[1]):.0e}", flush=True)  # fmt: skip


def pwcca(rounds: int, bars: Bars) -> None:
    print(f"{'PWCCA':20} {'here, s':>9} {'SVCCA, s':>9} {'ratio':>7} {'want':>6}")
    for n, d in ((1797, 256), (4000, 1024), (1000, 1024)):
        x, y = layers(n, d)
        took, ratios, _ = turns(max(3, rounds // 3), partial(analyze.pwcca, x, y), partial(analyze.svcca, x, y))
        bars.at_most(f"PWCCA of {n} x {d}", ratios[1], 1.2)
        print(f"{n:>9} x {d:<8} {took[0]:9.3f} {took[1]:9.3f} {ratios[1]:6.2f}x {'<= 1.2':>6}", flush=True)


PAIRS = """
import sys, time
began, cpu = time.perf_counter(), time.process_time()
import analyze
found = analyze.pairs(sys.argv[1], f"sketched_cka:k={sys.argv[2]}")
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e6
print(time.perf_counter() - began, time.process_time() - cpu, peak, found.values[0, 1], found.lows[0, 1],
      found.highs[0, 1])
"""


def pairs(bars: Bars) -> None:
    """All pairs from a trace of sketches; the first pair is compared with the exact value."""
    random = np.random.default_rng(0)
    exact: list[Matrix] = []
    projected = torch.from_numpy(projection(WIDTH, COLUMNS, 0)).to(torch.float32)
    weights = torch.from_numpy(random.standard_normal((64, WIDTH)).astype(np.float32))
    hidden = torch.from_numpy(random.standard_normal((DATAPOINTS, 64)).astype(np.float32))
    sketch = SketchReduction(COLUMNS)
    told = {"reduce": str(sketch), "sketch": sketch.told(WIDTH, 1)}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run.zarr"
        with tracer.TraceWriter(path) as writer:
            for step in range(STEPS):
                where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "tag": "probe"}
                layer = hidden
                for number in range(LAYERS):
                    torch.manual_seed(100 * step + number)
                    layer = torch.tanh(layer + 0.1 * step / STEPS * torch.randn(DATAPOINTS, 64))
                    wide = torch.relu(layer @ weights + 0.5 * torch.randn(DATAPOINTS, WIDTH))
                    if len(exact) < 2:
                        exact.append(wide.numpy())
                    message = tracer.ModuleMessage(
                        kind="activations", module=f"layer{number}", data=wide @ projected, sampling=told, **where
                    )
                    writer.write(message)
        done = subprocess.run(
            [sys.executable, "-c", PAIRS, path, str(COLUMNS)],
            capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"},
        )  # fmt: skip
    seconds, cpu, peak, value, low, high = map(float, done.stdout.split())
    count = LAYERS * STEPS
    bars.at_most("seconds of all pairs", seconds, 600)
    bars.at_most("GB of all pairs", peak, 2)
    print(f"all {count * (count + 1) // 2:,} pairs of {LAYERS} layers x {STEPS} steps, width {WIDTH:,}, "
          f"n = {DATAPOINTS}, k = {COLUMNS}:\n    {seconds:.0f} s ({cpu:.0f} s of CPU), wanted <= 600; "
          f"peak {peak:.2f} GB, wanted <= 2; "
          f"CKA of the first pair {value:.4f} in [{low:.4f}, {high:.4f}], exactly {float(analyze.cka(*exact)):.4f}",
          flush=True)  # fmt: skip


def families(n: int, d: int) -> Iterator[tuple[str, Matrix, Matrix]]:
    """Pairs of layers with spectra of several kinds, alike and not."""
    random = np.random.default_rng(1)

    def wide(rows: int) -> Matrix:
        return random.standard_normal((rows, d)) / np.sqrt(rows)

    def relu(hidden: Matrix) -> Matrix:
        mixed = hidden @ wide(hidden.shape[1])
        return np.maximum(mixed + 0.3 * mixed.std() * random.standard_normal(d), 0)

    flat, decayed = (random.standard_normal((n, d)) * np.arange(1, d + 1) ** -power for power in (0.75, 1.15))
    one = relu(decayed)
    yield "flat spectra, alike", relu(flat), relu(flat)
    yield "decayed spectra, alike", one, relu(decayed)
    yield "unrelated", relu(flat), relu(random.standard_normal((n, d)) * np.arange(1, d + 1) ** -1.0)
    yield "noise, unrelated", random.standard_normal((n, d)), random.standard_normal((n, d))
    yield "the next step", one, one + 0.05 * one.std() * random.standard_normal((n, d))
    few = random.standard_normal((n, 10))
    yield "ten directions", few @ wide(10), (few + 0.5 * random.standard_normal((n, 10))) @ wide(10)
    heavy = np.exp(2 * random.standard_normal((n, 1))) * random.standard_normal((n, d))
    yield "outliers", heavy, np.maximum(heavy @ wide(d), 0)
    # what single columns tell of these cancels; all their other neurons are dead
    two = np.linalg.qr(np.column_stack([np.ones(n), random.standard_normal((n, 2))]))[0][:, 1:]
    swapped = np.zeros((2, n, d))
    swapped[0, :, :2], swapped[1, :, :2] = two * [1, 0.3], two * [0.3, 1]
    yield "strong and weak swapped", swapped[0], swapped[1]
    equal = np.zeros((n, d))
    equal[:, :2] = two
    yield "two equal directions", equal, swapped[0]


THRESHOLDS = (0.9, 0.99)
ESTIMATED = ("CKA", "PR", "stable", *(f"SVCCA {threshold}" for threshold in THRESHOLDS))


def trials(count: int, bars: Bars, n: int = 200, d: int = 512, k: int = 64, few: int = 5) -> None:
    """How many of so many projections have the exact value in their interval; of SVCCA one in `few` of these."""
    print(f"intervals of {count} projections that have the exact value, n = {n}, width {d}, k = {k}; wanted: 99 %; "
          f"in brackets, how many say something, if not all; median widths")  # fmt: skip
    print(f"{'':24} " + " ".join(f"{what:>18}" for what in ESTIMATED))
    for name, *both in families(n, d):
        x, y = (layer.astype(np.float32) for layer in both)
        exact = [
            float(analyze.cka(x, y)),
            analyze.participation_ratio(x, centre=True),
            analyze.stable_rank(x, centre=True),
            *(float(analyze.svcca(x, y, threshold)) for threshold in THRESHOLDS),
        ]
        found: list[list[tuple[float, float]]] = [[] for _ in exact]
        for seed in range(count):
            # as a recording makes them
            a, b = (SketchReduction(k, seed).of(torch.from_numpy(layer), 1).numpy() for layer in (x, y))
            rank = analyze.sketched_rank(a, k=k, sketches=True)
            similar = [analyze.sketched_cka(a, b, k=k, sketches=True)]
            if seed < max(count // few, 1):  # which takes longer than all else
                similar += [analyze.sketched_svcca(a, b, one, k=k, sketches=True) for one in THRESHOLDS]
            ends = [(one.low, one.high) for one in similar]
            ends[1:1] = [(rank.low, rank.high), (rank.stable_low, rank.stable_high)]
            for intervals, one in zip(found, ends, strict=False):
                intervals.append(one)
        told = []
        for what, value, intervals in zip(ESTIMATED, exact, found, strict=True):
            hits = sum(low - 1e-9 <= value <= high + 1e-9 for low, high in intervals)
            saying = sum((low, high) != (0.0, 1.0) for low, high in intervals)
            bars.right(f"{what} of {name}, k = {k}", hits, len(intervals))
            share = "" if saying == len(intervals) else f" ({100 * saying / len(intervals):.0f}%)"
            width = statistics.median(high - low for low, high in intervals)
            told.append(f"{100 * hits / len(intervals):.1f}%{share} {width:6.2g}")
        print(f"{name:24} " + " ".join(f"{one:>18}" for one in told), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--pairs", action="store_true")
    options.add_argument("--trials", type=int, default=0)
    given = options.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        sys.exit("this measures one core: set OMP_NUM_THREADS=1")
    torch.set_num_threads(1)
    bars = Bars()
    cka(given.rounds, bars)
    pwcca(given.rounds, bars)
    if given.pairs:
        pairs(bars)
    if given.trials:
        trials(given.trials, bars)
        trials(given.trials, bars, k=256, few=20)
    if bars.missed:
        sys.exit("\n".join(["bars that were missed:", *bars.missed]))


if __name__ == "__main__":
    main()
