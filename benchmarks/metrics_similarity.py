"""What comparing layers costs: this project's similarities against google/svcca's published recipe.

The recipe is written here anew from its description (the tutorial of google/svcca, Apache-2.0): the singular value
decomposition of both centred layers, cut at 99 % of the variance; then the covariance of the cut layers, divided by its
largest entry, 1e-10 added to its diagonal, pseudo-inverse, square root by eigenvectors, and the singular values of the
whitened cross-covariance. It is timed without the coefficients and directions that the original returns too, so that
nothing is charged to it that is not needed for the number.

Activations are ReLU of random mixtures, 5 % of the neurons dead: "flat" spectra as near initialisation, "decayed" ones
as in trained networks. Both sides take turns in one process, on one core; what is printed is the median of the rounds'
ratios, and beside it the least ratio that this project wants.

    OMP_NUM_THREADS=1 python benchmarks/metrics_similarity.py [--rounds 3] [--full]

Without ``--full`` the large sizes are left out (5000 x 2048, n = 80000).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import analyze
from analyze.comparing.pairs import Bases

torch.set_num_threads(1)
Matrix = NDArray[Any]


def activations(n: int, p: int, decay: float, seed: int) -> tuple[Matrix, Matrix]:
    """Two layers of one hidden state, float32."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((n, p)).astype(np.float32) * np.arange(1, p + 1, dtype=np.float32) ** -decay
    layers = []
    for _ in range(2):
        weights = random.standard_normal((p, p)).astype(np.float32) / np.float32(np.sqrt(p))
        mixed = hidden @ weights
        mixed += 0.3 * np.float32(mixed.std()) * random.standard_normal(p).astype(np.float32)
        layer = np.maximum(mixed, 0)
        layer[:, random.random(p) < 0.05] = 0
        layers.append(layer)
    return layers[0], layers[1]


def google_cca(x: Matrix, y: Matrix, epsilon: float = 1e-10) -> float:
    """The mean canonical correlation of neurons by datapoints, by covariances and pseudo-inverses."""
    d = len(x)
    covariance = np.cov(x, y)
    parts = []
    for block in (covariance[:d, :d], covariance[d:, d:]):
        scaled = block / np.abs(block).max() + epsilon * np.eye(len(block))
        values, vectors = np.linalg.eigh(np.linalg.pinv(scaled))
        parts.append(vectors @ np.diag(np.sqrt(np.abs(values))) @ vectors.T)
    xmax, ymax = np.abs(covariance[:d, :d]).max(), np.abs(covariance[d:, d:]).max()
    cross = covariance[:d, d:] / np.sqrt(xmax * ymax)
    return float(np.linalg.svd(parts[0] @ cross @ parts[1])[1].mean())


def google_svcca(x_nd: Matrix, y_ne: Matrix) -> float:
    """The tutorial's SVCCA: both layers cut by their singular values, then CCA of what is left."""
    cut = []
    for data in (x_nd, y_ne):
        centred = data.T.astype(np.float64)
        centred = centred - centred.mean(axis=1, keepdims=True)
        _, singular, right = np.linalg.svd(centred, full_matrices=False)
        share = np.cumsum(singular**2) / np.sum(singular**2)
        k = int(np.argmax(share >= 0.99)) + 1
        cut.append(singular[:k, None] * right[:k])
    return google_cca(cut[0], cut[1])


def turns(rounds: int, ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[float, float, float, Any, Any]:
    """Median seconds of both, and median of the ratios within a round."""
    mine, other = [], []
    found = reference = None
    for _ in range(rounds):
        began = time.process_time()
        found = ours()
        between = time.process_time()
        reference = theirs()
        mine.append(between - began)
        other.append(time.process_time() - between)
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    return statistics.median(mine), statistics.median(other), statistics.median(ratios), found, reference


def show(what: str, wanted: float, took: tuple[float, float, float, Any, Any]) -> None:
    mine, other, ratio, found, reference = took
    difference = abs(float(found) - float(reference))
    print(f"{what:44} {mine:9.3f} {other:9.3f} {ratio:8.1f}x {wanted:6.1f}x   {difference:.0e}", flush=True)


def fresh(n: int, p: int, decay: float, rounds: int, wanted: float) -> None:
    x, y = activations(n, p, decay, 0)
    took = turns(rounds, lambda: analyze.svcca(x, y), lambda: google_svcca(x, y))
    kind = "decayed" if decay > 1 else "flat"
    show(f"one fresh pair, {n} x {p}, {kind} (k = {took[3].k})", wanted, took)


def convolution(rounds: int) -> None:
    random = np.random.default_rng(0)
    images = random.standard_normal((256, 64, 32, 32)).astype(np.float32)
    mix = random.standard_normal((64, 64)).astype(np.float32) / 8
    other = np.maximum(np.einsum("ncij,cd->ndij", images, mix, optimize=True), 0)

    def flat(layer: Matrix) -> Matrix:
        return layer.transpose(0, 2, 3, 1).reshape(-1, 64)

    took = turns(rounds, lambda: analyze.svcca(images, other), lambda: google_svcca(flat(images), flat(other)))
    show("convolutions 256 x 64 x 32 x 32, channels", 30, took)


def trained(items: int) -> list[Matrix]:
    """The activations of six hidden layers of 256 and of the logits, in steps of a training on handwritten digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for width in (64, 256, 256, 256, 256, 256):
        layers += [torch.nn.Linear(width, 256), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept: list[Matrix] = []
    while len(kept) < items:
        with torch.no_grad():
            hidden = x
            for layer in model:
                hidden = layer(hidden)
                if not isinstance(layer, torch.nn.Linear) or layer.out_features == 10:
                    kept.append(hidden.numpy().copy())
        for _ in range(10):
            batch = torch.randint(len(x), (64,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return kept[:items]


def all_pairs(items: int) -> None:
    layers = trained(items)
    for word in ("float64", "float32"):
        began = time.process_time()
        bases = Bases(0.99, dtype=word)  # type: ignore[arg-type] # a word of two
        for number, layer in enumerate(layers):
            bases.add(("layer", number), layer)
        middle = time.process_time()
        found = bases.similarities(quick=word == "float32")
        ended = time.process_time()
        times = []
        for i, j in ((0, 7), (2, 142), (1, 246)):  # layers of 256 in different steps
            started = time.process_time()
            reference = google_svcca(layers[i], layers[j])
            times.append(time.process_time() - started)
        pairs = items * (items + 1) // 2
        mine, other = (ended - began) / pairs, statistics.median(times)
        show(f"all pairs of {items}, 1797 x 256, {word} bases", 150, (
            mine, other, other / mine, found.values[1, 246], reference,
        ))  # fmt: skip
        print(
            f"    bases {middle - began:.1f} s, pairs {ended - middle:.1f} s, {1e3 * (ended - middle) / pairs:.2f} ms"
        )


STREAM = """
import sys, time
import numpy as np
from analyze.metrics.similarity.similarity import ByMoments

def megabytes(which):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(which)) / 1024

path, n, p = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
small = np.random.default_rng(0).standard_normal((200, 180))
warm = ByMoments(0.99)
warm.update([small.T, small.T])
warm.result(0, 1)
before = megabytes("VmRSS")
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
began = time.process_time()
added = ByMoments(0.99)
with open(f"{path}/x", "rb") as x, open(f"{path}/y", "rb") as y:
    for start in range(0, n, 512):
        wanted = 4 * p * min(512, n - start)
        added.update([np.frombuffer(file.read(wanted), np.float32).reshape(-1, p).T for file in (x, y)])
value = float(added.result(0, 1))
print(time.process_time() - began, value, megabytes("VmHWM") - before)
"""


def stream(n: int, p: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        x, y = activations(n, p, 0.75, 0)
        for name, layer in (("x", x), ("y", y)):
            layer.tofile(Path(folder) / name)
        done = subprocess.run(
            [sys.executable, "-c", STREAM, folder, str(n), str(p)], capture_output=True, text=True, check=True
        )
    took, value, megabytes = map(float, done.stdout.split())
    began = time.process_time()
    reference = google_svcca(x, y)
    other = time.process_time() - began
    show(f"a stream of {n} x {p} in chunks of 512", 8, (took, other, other / took, value, reference))
    print(f"    peak memory {megabytes:.0f} MB, wanted <= 100 MB")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--full", action="store_true")
    given = options.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        sys.exit("this measures one core: set OMP_NUM_THREADS=1")
    print(f"{'':44} {'here, s':>9} {'google, s':>9} {'ratio':>9} {'want':>7}   difference")
    fresh(1000, 512, 0.75, given.rounds, 3)
    fresh(1000, 512, 1.15, given.rounds, 3)
    convolution(1)
    all_pairs(252)
    if given.full:
        fresh(5000, 2048, 0.75, 1, 3.5)
        fresh(5000, 2048, 1.15, 1, 5)
        stream(80000, 1024)


if __name__ == "__main__":
    main()
