"""``trace demo``: train a small network on real images, record it, replay it, show the results."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tracer
from analyze.metrics.accuracy import TestAccuracy
from analyze.metrics.lengths import Ratio
from analyze.metrics.similarity.correlations import SVCCA
from analyze.metrics.spectral_norm import SpectralNorm
from analyze.seeing.report import report
from analyze.tables.layout import TextTable
from analyze.tables.results import Results
from tracer.errors import TracerError
from tracer.messaging.receiver import Collect

TRAINED_ON = 1437
PROBE_EVERY = 10
LAYERS = ("conv1", "conv2", "fc1", "fc2")
OBSERVED = (
    "activations", "layer_gradients", "weights", "biases", "weight_gradients", "bias_gradients", "weight_updates",
    "bias_updates", "input_labels", "network_output", "loss",
)  # fmt: skip


@dataclass
class Shown:
    """What the command shows.

    Attributes
    ----------
    tables : list of (caption, table)
    files : list of (path, what it is)
    commands : list of str
        What to type next.
    checked : dict
        What the rules found, in JSON values, as from `analyze.seeing.check.Checked.as_json`.
    """

    tables: list[tuple[str, TextTable]] = field(default_factory=list)
    files: list[tuple[Path, str]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    checked: dict[str, Any] = field(default_factory=dict)


def run(
    folder: Path,
    *,
    epochs: int = 10,
    seed: int = 0,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Shown:
    """Train, record, replay and plot.

    Parameters
    ----------
    folder : Path
        Where ``digits.zarr``, ``digits.png`` and ``digits.html`` go.
    epochs, seed : int
    overwrite : bool
        Whether an existing trace and page may be replaced; the plot is replaced in any case.
    say : callable
        Gets a sentence at each stage.

    Raises
    ------
    TraceExistsError
        If the trace or the page exists and `overwrite` is false.
    TracerError
        If scikit-learn (images), matplotlib (plot) or Bokeh (report) is not installed.
    """
    _check_installed()
    images, labels = _digits()
    trace, plot, page = (folder / f"digits.{suffix}" for suffix in ("zarr", "png", "html"))
    shown = Shown()

    say(f"Training a small network on {TRAINED_ON} images of handwritten digits, and recording it ...")
    began = time.perf_counter()
    steps = _train(trace, images, labels, epochs, seed, overwrite)
    say(f"  {steps} steps in {time.perf_counter() - began:.1f} s, recorded to {trace}")
    shown.tables.append(_contents(trace))

    say("Replaying the trace through four metrics, without the model and without the images ...")
    began = time.perf_counter()
    heard = Collect("*_spectral_norm", "*_svcca", "*_ratio", "test_accuracy")  # without residuals and the like
    tracer.replay(trace, SpectralNorm("weights"), SVCCA(tag="probe"), Ratio(), TestAccuracy(), heard)
    say(f"  {len(heard)} answers in {time.perf_counter() - began:.1f} s")
    answers, drawn = Results(), Results()
    for message in heard:
        answers.add(message)
        if message.kind.endswith(("_spectral_norm", "_svcca")):
            drawn.add(message)
    shown.tables.append(("What the replay says", answers.to_table()))
    drawn.plot(plot, overwrite=True)

    say("Looking for what went wrong, and writing a report ...")
    began = time.perf_counter()
    found = report(trace, page, metrics=[SVCCA(tag="probe"), TestAccuracy()], overwrite=overwrite)
    shown.checked = found.checked.as_json()
    say(f"  {found.checked.verdict}, in {time.perf_counter() - began:.1f} s")
    shown.files.extend([(trace, "the trace"), (plot, "two of the metrics over the steps")])
    shown.files.append((page, "the report: open it in a browser"))
    shown.commands.extend(
        [
            f"trace info {trace}",
            f"trace ls {trace}",
            f"trace replay {trace} --subscriber spectral_norm --subscriber svcca:threshold=0.9",
            f"trace replay {trace} --subscriber norm:kind=layer_gradients -m 'conv*' --steps 0:50",
        ]
    )
    return shown


def _check_installed() -> None:
    for package, name in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib"), ("bokeh", "bokeh")):
        if find_spec(package) is None:
            raise TracerError(f"the demo needs {name}; get it with: pip install 'tracereel[demo]'")


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(digits.target).long()


def _network() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, kernel_size=3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, kernel_size=3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(128, 64),
            relu3=nn.ReLU(),
            fc2=nn.Linear(64, 10),
        )
    )


def _train(trace: Path, images: Tensor, labels: Tensor, epochs: int, seed: int, overwrite: bool) -> int:
    """Train and record; return the number of steps."""
    torch.manual_seed(seed)
    model, criterion = _network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = TensorDataset(images[:TRAINED_ON], labels[:TRAINED_ON])
    loader = DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(seed))
    captures = (
        tracer.Capture(kinds=OBSERVED, modules=LAYERS, tags=("probe",)),
        # of training batches: every second step, and the first 16 images
        tracer.Capture(kinds=OBSERVED, modules=LAYERS, every=2, rows=16),
    )
    steps = 0
    with tracer.record(trace, model, optimizer, loss=criterion, capture=captures, overwrite=overwrite) as recording:
        recording.probe("probe", images[TRAINED_ON:], labels[TRAINED_ON:], every=PROBE_EVERY)
        for _ in range(epochs):
            for batch, truth in loader:
                optimizer.zero_grad()
                criterion(model(batch), truth).backward()
                optimizer.step()
                steps += 1
            recording.epoch_finished()
    return steps


def _contents(trace: Path) -> tuple[str, TextTable]:
    """What the trace holds, one row per kind."""
    found: dict[str, list[int]] = {}
    with tracer.open(trace) as reader:
        for stream in reader.streams:
            row = found.setdefault(stream.kind, [0, 0, 0])
            row[0] += 1
            row[1] += stream.count
            row[2] += stream.bytes
    rows = [(kind, str(streams), str(count), f"{nbytes / 1e6:.2f}") for kind, (streams, count, nbytes) in found.items()]
    columns = ("kind", "streams", "messages", "MB")
    return "What the trace holds", TextTable(columns, rows, right=columns[1:])
