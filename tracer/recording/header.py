"""What a trace says of the run that it is of: its header when it begins, and notes when it ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from tracer.errors import plain
from tracer.messaging.bus import describe
from tracer.messaging.messages import KINDS
from tracer.observing.exporter import Exporter
from tracer.recording.options import Options

NO_EPOCHS = (
    "no epoch was seen to end, so all steps are of one: run.epoch_finished() ends an epoch; under `trace record` "
    "a DataLoader does so that feeds the training and comes to its end"
)


def header(exporter: Exporter, options: Options) -> dict[str, Any]:
    """What is known of a run before its first message."""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    for package in ("tracereel", "zarr", "h5py"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "versions": versions,
        **({"argv": list(sys.argv)} if options.command else {}),
        "seeds": dict(options.seeds) if options.seeds is not None else {"torch": torch.initial_seed()},
        "capture": [capture.describe() for capture in exporter.captures],
        "kinds": sorted(KINDS),
        "model": exporter.structure(),
        "models": exporter.models(),
        "optimizers": exporter.trainers(),
    }


def notes(exporter: Exporter) -> Iterator[Mapping[str, Any]]:
    """What a reader of the trace should know about how the run was observed."""
    for problem in exporter.problems:
        yield {"problem": {**problem, "why": plain(problem["why"])}}
    for overflow in exporter.publisher.overflows.told():
        yield {"overflowed": overflow}
    for receiver, error in exporter.message_bus.failures:
        why = plain(f"{type(error).__name__}: {error}")
        yield {"problem": {"what": f"subscriber {describe(receiver)}", "why": why, "count": 1}}
    if exporter.loss_is_silent:
        yield {"problem": {"what": "loss", "why": "it was never called by the name it was given by", "count": 1}}
    if exporter.steps_seen > 1 and not exporter.epochs_seen:
        yield {"epochs": NO_EPOCHS}
    if exporter.unended is not None:
        yield {"unended": exporter.unended}
    silent = exporter.silent
    if silent:
        yield {"silent": silent}
