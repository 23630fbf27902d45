"""Do networks converge from the bottom up? The learning dynamics of Raghu et al. 2017, on scikit-learn's digits.

M. Raghu, J. Gilmer, J. Yosinski, J. Sohl-Dickstein, "SVCCA", arXiv:1706.05806, section 4, found that layers near the
input reach their final representation first. This trains a small convolutional network from several seeds, records
what each layer says of 500 fixed test images at 31 times, and replays the traces: SVCCA of each layer at each time
with itself at the end. The score of a layer is its mean similarity over the recorded times, the area under its curve;
the claim is that scores fall with depth.

It also shows what speaks against the claim: the logits, which converge early; a plain perceptron; a constant learning
rate; and the progress of each layer, its mean similarity over the recorded times as a share of the way from where it
began to 1, which tells a layer that converges first from one that begins near its end. Beside the curves stands what
they must be judged by: the directions kept, k, and the null baseline, which unrelated activations would reach.

``python examples/bottom_up_convergence.py`` takes about two minutes on one core; the exit code is 1 if the claim does
not hold. With ``--folder runs`` the traces stay, and the next time are asked instead of trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau
from sklearn.datasets import load_digits
from torch import nn

import tracereel
from analyze.metrics.similarity.datapoints import STATUSES
from tracereel import analyze

TRAINED_ON, BATCH, RECORDED = 1297, 64, 30
REACHED = 0.9
LEAST_TAU, LEAST_FIRST = 0.8, 7 / 8
TIMES = (0.0, 0.1, 0.3, 1.0)  # of the matrices of all layers


def convolutional() -> nn.Module:
    """Four convolutions of 16 channels, and a linear layer."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, kernel_size=3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 16, kernel_size=3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            conv3=nn.Conv2d(16, 16, kernel_size=3, padding=1),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(16, 16, kernel_size=3, padding=1),
            relu4=nn.ReLU(),
            flatten=nn.Flatten(),
            logits=nn.Linear(16 * 4 * 4, 10),
        )
    )


def perceptron() -> nn.Module:
    """Three hidden layers of 64 neurons, and a linear layer."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(64, 64),
            relu1=nn.ReLU(),
            fc2=nn.Linear(64, 64),
            relu2=nn.ReLU(),
            fc3=nn.Linear(64, 64),
            relu3=nn.ReLU(),
            logits=nn.Linear(64, 10),
        )
    )


@dataclass(frozen=True)
class Setup:
    """One way to train: a network, the layers that are ranked (the logits come after them), and the learning rate."""

    name: str
    title: str
    network: Callable[[], nn.Module]
    layers: tuple[str, ...]
    cosine: bool = True

    @property
    def asked(self) -> tuple[str, ...]:
        """The ranked layers, and the logits."""
        return (*self.layers, "logits")


CLAIM = Setup("conv", "Convolutional network", convolutional, ("relu1", "relu2", "relu3", "relu4"))
NEGATIVES = (
    Setup("mlp", "Perceptron", perceptron, ("relu1", "relu2", "relu3")),
    Setup("constant", "Convolutional, constant learning rate", convolutional, CLAIM.layers, cosine=False),
)


@dataclass
class Found:
    """What the replays of one set-up say.

    Attributes
    ----------
    times : array (times,)
        When was recorded, in fractions of the training.
    similarity, k, null : dict of arrays (seeds, times)
        Of each layer: with itself at the end, directions kept, and the value to expect of unrelated layers.
    accuracy : list of float
        On the test images at the end, of each seed.
    matrices : array (seeds, len(TIMES), layers, layers)
        Of each layer at a time (rows) with each layer at the end (columns), the mean over the positions taken first.
    flags : dict
        How many values came with another status than ``ok``, by status.
    """

    setup: Setup
    times: NDArray[np.float64]
    similarity: dict[str, NDArray[np.float64]]
    k: dict[str, NDArray[np.float64]]
    null: dict[str, NDArray[np.float64]]
    accuracy: list[float]
    matrices: NDArray[np.float64]
    flags: dict[str, int]

    def scores(self, layer: str) -> NDArray[np.float64]:
        """The mean similarity over the recorded times, of each seed."""
        return np.array([course.mean() for course in self.similarity[layer]])

    def progress(self, layer: str) -> NDArray[np.float64]:
        """The same as a share of the way from the similarity at the start to 1, of each seed."""
        return np.array([(course.mean() - course[0]) / (1 - course[0]) for course in self.similarity[layer]])

    def reached(self, layer: str) -> NDArray[np.float64]:
        """The first recorded time at which the similarity is at least 0.9, of each seed; NaN if there is none."""
        return np.array([next(iter(self.times[row >= REACHED]), math.nan) for row in self.similarity[layer]])

    def taus(self, *, logits: bool = False, progress: bool = False) -> list[float]:
        """Kendall's rank correlation of depth and score, of each seed: 1 if each layer scores below the one before."""
        layers = self.setup.asked if logits else self.setup.layers
        scores = np.array([self.progress(layer) if progress else self.scores(layer) for layer in layers])
        depths = np.arange(len(layers))
        return [float(kendalltau(depths, -column).statistic) for column in scores.T]

    def first(self) -> list[bool]:
        """Whether the lowest layer has the best score of the ranked ones, of each seed."""
        scores = np.array([self.scores(layer) for layer in self.setup.layers])
        return [bool((column[0] > column[1:]).all()) for column in scores.T]


def train(setup: Setup, seed: int, epochs: int, path: Path) -> None:
    """Train a network, and record what its layers say of the test images before, during and after it."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    torch.manual_seed(seed)
    model, criterion = setup.network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total = steps(epochs)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total) if setup.cosine else None
    capture = (
        # rounding activations to float16 moves SVCCA by less than 1e-5, and halves the trace
        tracereel.Capture(kinds=["activations"], modules=setup.asked, tags=["probe"], dtype="float16"),
        tracereel.Capture(kinds=["network_output", "input_labels"], tags=["probe"]),
    )
    with tracereel.record(path, model, optimizer, loss=criterion, capture=capture, overwrite=True) as run:
        run.probe("probe", images[TRAINED_ON:], labels[TRAINED_ON:], every=math.ceil(total / RECORDED))
        for _ in range(epochs):
            for batch in torch.randperm(TRAINED_ON).split(BATCH):
                optimizer.zero_grad()
                criterion(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            run.epoch_finished()


def steps(epochs: int) -> int:
    """How many optimizer steps there are."""
    return epochs * math.ceil(TRAINED_ON / BATCH)


def ask(setup: Setup, paths: Iterable[Path], epochs: int) -> Found:
    """Replay the traces of a set-up, one of each seed."""
    series: dict[str, dict[str, list[list[float]]]] = {
        kind: {layer: [] for layer in setup.asked} for kind in ("", "_k", "_null")
    }
    accuracy, matrices = [], []
    flags: dict[str, int] = dict.fromkeys(STATUSES[1:], 0)
    times: list[int] = []
    for path in paths:
        results = analyze.analyze(path, ["svcca:against=final", "test_accuracy"])
        table: dict[tuple[str, str], list[float]] = {}
        for row in results:
            table.setdefault((row.kind, row.module), []).append(row.value)
        for kind, of_layer in series.items():
            for layer, courses in of_layer.items():
                courses.append(table[f"activations_svcca{kind}", layer])
        for layer in setup.asked:
            for status in table["activations_svcca_status", layer]:
                if status:
                    flags[STATUSES[int(status)]] += 1
        accuracy.append(table["test_accuracy", ""][-1])
        times = sorted({row.global_step for row in results})
        matrices.append(all_layers(setup, path, times))
    similarity, k, null = ({layer: np.array(of[layer]) for layer in setup.asked} for of in series.values())
    fractions = np.array(times) / steps(epochs)
    return Found(setup, fractions, similarity, k, null, accuracy, np.array(matrices), flags)


def all_layers(setup: Setup, path: Path, times: Sequence[int]) -> NDArray[np.float64]:
    """The similarity of each layer at some of the recorded times with each layer at the end: (times, layers, layers).

    Layers of different sizes have no positions in common, so the mean over the positions is compared.
    """
    measure = analyze.SVCCA(modules=setup.asked, positions="pooled")
    recorded = np.array(times)
    chosen = [int(recorded[np.abs(recorded - share * recorded[-1]).argmin()]) for share in TIMES]
    found = analyze.pairs(path, measure, steps=(0, times[-1] + 1, math.gcd(*chosen) or 1))
    place = {(item.module, item.global_step): number for number, item in enumerate(found.items)}
    final = [place[layer, times[-1]] for layer in setup.asked]
    return np.array([found.values[np.ix_([place[layer, step] for layer in setup.asked], final)] for step in chosen])


def verdict(found: Found) -> dict[str, Any]:
    """Whether the claim holds: Kendall's tau, and how often the lowest layer is first."""
    taus, first = found.taus(), found.first()
    tau, share = float(np.mean(taus)), sum(first) / len(first)
    return {
        "mean_tau": tau,
        "least_mean_tau": LEAST_TAU,
        "first": sum(first),
        "seeds": len(first),
        "least_share_first": LEAST_FIRST,
        "holds": tau >= LEAST_TAU and share >= LEAST_FIRST,
    }


def as_json(found: Found) -> dict[str, Any]:
    """The numbers of a set-up, for each layer and seed."""
    layers = {}
    for layer in found.setup.asked:
        scores = found.scores(layer)
        layers[layer] = {
            "score_mean": float(scores.mean()),
            "score_sd": deviation(scores),
            "scores": scores.tolist(),
            "progress_mean": float(found.progress(layer).mean()),
            "progress": found.progress(layer).tolist(),
            "reached": found.reached(layer).tolist(),
            "similarity_mean": found.similarity[layer].mean(axis=0).tolist(),
            "k_mean": found.k[layer].mean(axis=0).tolist(),
            "null_mean": found.null[layer].mean(axis=0).tolist(),
        }
    return {
        "times": found.times.tolist(),
        "layers": layers,
        "tau": found.taus(),
        "tau_with_logits": found.taus(logits=True),
        "tau_of_progress": found.taus(progress=True),
        "first": found.first(),
        "test_accuracy": found.accuracy,
        "matrix_times": TIMES,
        "matrices_mean": found.matrices.mean(axis=0).tolist(),
        "flags": {name: count for name, count in found.flags.items() if count},
    }


def plain(value: Any) -> Any:
    """The same for JSON, which has no word for NaN: null."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def deviation(values: NDArray[np.float64]) -> float:
    """The standard deviation over the seeds; 0 of a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def report(found: Found) -> str:
    """The numbers of a set-up, for reading."""
    lines = [
        f"{found.setup.title}: test accuracy {np.mean(found.accuracy):.1%}",
        "  layer   score  sd     first at .9  similarity at the start  progress  k at the start, end  null at the end",
    ]
    for layer in found.setup.asked:
        scores, reached, similarity = found.scores(layer), found.reached(layer), found.similarity[layer]
        when = f"{np.nanmean(reached):.3f}" if not np.isnan(reached).all() else "never"
        k = found.k[layer].mean(axis=0)
        lines.append(
            f"  {layer:<6}  {scores.mean():.3f}  {deviation(scores):.3f}  {when:<11}  "
            f"{similarity[:, 0].mean():<23.3f}  {found.progress(layer).mean():.3f}     "
            f"{f'{k[0]:.1f}, {k[-1]:.1f}':<19}  {found.null[layer][:, -1].mean():.3f}"
        )
    for words, taus in (
        ("tau", found.taus()),
        ("tau with the logits", found.taus(logits=True)),
        ("tau of the progress", found.taus(progress=True)),
    ):
        lines.append(f"  {words}: mean {np.mean(taus):.3f}; by seed {' '.join(f'{tau:.2f}' for tau in taus)}")
    lines.append(f"  lowest layer first: {sum(found.first())} of {len(found.first())} seeds")
    flags = ", ".join(f"{count} {name}" for name, count in found.flags.items() if count)
    if flags:
        lines.append(f"  values to doubt: {flags} (see docs/similarity.md)")
    return "\n".join(lines)


def draw(claim: Found, negatives: Sequence[Found], path: Path) -> None:
    """Draw the curves with their spread, the scores and k, the matrices of all layers, and what speaks against it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # not pyplot, which would keep the figure and pick a window system
    figure = Figure(figsize=(12, 8.2), layout="constrained")
    FigureCanvasAgg(figure)
    seeds = len(claim.accuracy)
    figure.suptitle(
        "Do representations converge from the bottom up? SVCCA of each layer with its final state\n"
        f"scikit-learn digits, {seeds} seed{'s' * (seeds > 1)}; lines: mean, bands: lowest to highest, "
        "dotted: null baseline",
        fontsize=11,
    )
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    top, bottom = halves
    curves, scores, kept = top.subplots(1, 3, width_ratios=[2.0, 1, 1])
    _curves(curves, claim)
    curves.legend(loc="lower right", bbox_to_anchor=(1.0, 0.12), frameon=False, title="layer")
    _scores(scores, claim)
    for place, layer in enumerate(claim.setup.asked):
        kept.plot(claim.times, claim.k[layer].mean(axis=0), **_style(claim.setup, place))
    kept.set_title("Directions kept (k)\nmean over the seeds", fontsize=10)
    kept.set_ylim(0, None)
    kept.set_xlabel("fraction of the training")
    if not negatives:
        _matrices(bottom, claim, 1)
    else:
        left, right = bottom.subfigures(1, 2, width_ratios=[2, 1.25])
        panels = left.subplots(1, len(negatives), sharey=True, squeeze=False)[0]
        for axes, found in zip(panels, negatives, strict=True):
            _curves(axes, found)
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.28), frameon=False, fontsize=8)
        for axes in panels[1:]:
            axes.set_ylabel("")
        _matrices(right, claim, 2)
    for axes in (curves, scores, kept):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=100, format="png")


def _style(setup: Setup, place: int) -> dict[str, Any]:
    """The deeper, the lighter; the logits, which are not ranked, are dashed."""
    from matplotlib import colormaps

    layer = setup.asked[place]
    if layer == "logits":
        return {"color": "0.35", "linestyle": "--", "linewidth": 1.4, "label": layer}
    shade = colormaps["plasma"](0.05 + 0.75 * place / (len(setup.layers) - 1))
    return {
        "color": shade,
        "linewidth": 1.8,
        "marker": "osD^"[place % 4],
        "markevery": 3,
        "markersize": 4,
        "label": layer,
    }


def _curves(axes: Any, found: Found) -> None:
    for place, layer in enumerate(found.setup.asked):
        values, style = found.similarity[layer], _style(found.setup, place)
        axes.plot(found.times, values.mean(axis=0), **style)
        if layer != "logits":
            axes.fill_between(
                found.times, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.13, linewidth=0
            )
        null = found.null[layer].mean(axis=0)
        axes.plot(found.times, null, color=style["color"], linestyle=":", linewidth=1.3)
    axes.set_title(f"{found.setup.title}\nmean tau {np.mean(found.taus()):.2f}", fontsize=10)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, 1)
    axes.set_xlabel("fraction of the training")
    axes.set_ylabel("SVCCA with the final state")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _scores(axes: Any, found: Found) -> None:
    names = found.setup.asked
    for place, layer in enumerate(names):
        colour = _style(found.setup, place)["color"]
        seeds = [place] * len(found.accuracy)
        axes.scatter(seeds, found.scores(layer), s=16, color=[colour], zorder=2)
        axes.scatter(seeds, found.progress(layer), s=16, facecolors="none", edgecolors=[colour], zorder=2)
    for scores in (found.scores, found.progress):
        per_seed = np.array([scores(layer) for layer in found.setup.layers])
        axes.plot(range(len(per_seed)), per_seed, color="0.8", linewidth=0.8, zorder=1)
    axes.set_xticks(range(len(names)), names, rotation=45)
    axes.set_ylabel("mean over the recorded times")
    axes.set_title("Score of each seed: area under the curve\nhollow: progress, relative to the start", fontsize=10)


def _matrices(figure: Any, found: Found, rows: int) -> None:
    panes = np.atleast_1d(figure.subplots(rows, len(TIMES) // rows, sharex=True, sharey=True)).ravel()
    names = [layer.removeprefix("relu") for layer in found.setup.asked]
    names[-1] = "out"
    for axes, share, matrix in zip(panes, TIMES, found.matrices.mean(axis=0), strict=True):
        image = axes.imshow(matrix, vmin=0, vmax=1, cmap="magma", origin="lower")
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(names)), names)
        axes.set_title(f"at {share:.0%}", fontsize=9)
    figure.suptitle("Each layer (rows) with each layer\nat the end (columns), positions pooled", fontsize=10)
    figure.colorbar(image, ax=panes.tolist(), shrink=0.85)


def natural(text: str) -> int:
    """A number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or take the traces that are there; ask, print and draw. 0 if the claim holds, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=natural, default=8, help="how many networks of each kind (8)")
    parser.add_argument("--epochs", type=natural, default=40, help="how long each is trained (40)")
    parser.add_argument("--folder", type=Path, help="keep the traces here (80 MB each), and use those that are there")
    parser.add_argument("--out", type=Path, default=Path("bottom_up_convergence.png"), help="the figure, a PNG")
    parser.add_argument("--overwrite", action="store_true", help="replace the figure if it is there")
    parser.add_argument("--json", action="store_true", help="all numbers as one JSON object")
    parser.add_argument(
        "--negatives", action=argparse.BooleanOptionalAction, default=True,
        help="also train a perceptron, and with a constant learning rate",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    if args.out.exists() and not args.overwrite:
        parser.error(f"{args.out} is already there; --overwrite replaces it, --out FILE spares it")
    if not args.out.parent.is_dir():
        parser.error(f"there is no folder {args.out.parent} to write {args.out.name} into")
    if args.folder is not None and args.folder.exists() and not args.folder.is_dir():
        parser.error(f"{args.folder} is not a folder, which --folder is to name")
    if find_spec("matplotlib") is None:
        parser.error("the figure needs matplotlib; get it with: pip install 'tracereel[demo]'")
    try:
        found = [
            ask(setup, traces(setup, args.seeds, args.epochs, args.folder), args.epochs)
            for setup in (CLAIM, *(NEGATIVES if args.negatives else ()))
        ]
    except tracereel.TracerError as error:
        parser.error(str(error))
    claim, negatives = found[0], found[1:]
    draw(claim, negatives, args.out)
    held = verdict(claim)
    if args.json:
        setups = {one.setup.name: as_json(one) for one in found}
        answer = plain({"epochs": args.epochs, "acceptance": held, "setups": setups})
        print(json.dumps(answer, indent=1, allow_nan=False))
    else:
        for one in found:
            print(report(one), end="\n\n")
        print(
            f"Bottom-up convergence {'holds' if held['holds'] else 'does NOT hold'}: mean tau {held['mean_tau']:.3f} "
            f"(at least {LEAST_TAU}), lowest layer first in {held['first']} of {held['seeds']} seeds (at least 7 of 8)"
        )
        print(f"The figure is {args.out}")
    return 0 if held["holds"] else 1


def traces(setup: Setup, seeds: int, epochs: int, folder: Path | None) -> Iterator[Path]:
    """A trace of each seed; without a folder there is only one at a time."""
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as temporary:
            path = (folder or Path(temporary)) / f"{setup.name}_{epochs}_epochs_seed_{seed}.zarr"
            if finished(path):
                say(f"{setup.title}, seed {seed}: asking {path}")
            else:
                say(f"{setup.title}, seed {seed}: training")
                path.parent.mkdir(parents=True, exist_ok=True)
                train(setup, seed, epochs, path)
            yield path


def finished(path: Path) -> bool:
    """Whether there is a trace of a training that went to its end."""
    if not path.exists():
        return False
    with tracereel.open(path) as reader:
        return reader.status == "finished"


def say(words: str) -> None:
    """Progress, beside what is printed."""
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
