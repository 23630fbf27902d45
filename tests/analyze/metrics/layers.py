"""Layers, messages of them, and the similarities of layers as functions, for the tests of similarities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import analyze
from analyze.metrics.similarity.cka import ByLinear
from analyze.metrics.similarity.procrustes import ByNuclear
from analyze.metrics.similarity.similarity import ByMoments, ByTriangle, Gathering, Similarity
from tracer import ModuleMessage

INF, NAN = float("inf"), float("nan")


NAMES = ("svcca", "cca", "r2_cca", "pwcca", "cka", "procrustes", "angular")


SKETCHED = ("sketched_cka", "sketched_svcca", "sketched_rank")
"""The estimates of wide layers, which `test_sketched.py` holds to their invariances."""


FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(analyze, name) for name in NAMES}


def message(data: Any, module: str = "fc", step: int = 0, **more: Any) -> ModuleMessage:
    """Activations of a module under the tag of a probe."""
    tensor = data if isinstance(data, torch.Tensor) else torch.from_numpy(np.asarray(data))
    fields = {"kind": "activations", "tag": "probe", "train_step": step, "epoch": 0, **more}
    return ModuleMessage(module=module, data=tensor, global_step=step, **fields)


def said(metric: Similarity, messages: list[ModuleMessage], *, end: bool = True) -> list[tuple[Any, ...]]:
    """What a metric says to messages: kind, module, step, call, and the bytes of the value."""
    answers = [answer for one in messages for answer in metric.receive(one)]
    if end:
        answers += metric.finish()
    return [
        (a.kind, a.key, a.global_step, a.call, a.leaf, a.data.numpy().tobytes()) for a in answers if a.data is not None
    ]


def value_of(answer: tuple[Any, ...]) -> float:
    """The number in an answer of `said`."""
    return float(np.frombuffer(answer[-1], np.float64)[0])


def layers(seed: int, n: int = 120, d: int = 7, e: int = 5) -> tuple[Any, Any]:
    """Two related layers with gaps in their spectra."""
    random = np.random.default_rng(seed)
    z = random.standard_normal((n, max(d, e)))
    return z[:, :d] * 0.6 ** np.arange(d), (z[:, :e] + 0.7 * random.standard_normal((n, e))) * 0.7 ** np.arange(e)


def centred(x: Any) -> Any:
    """Activations less their means."""
    x = np.asarray(x, np.float64)
    return x - x.mean(0)


def images(seed: int, channels: int, size: tuple[int, ...] = (12, 10), n: int = 90) -> Any:
    """Images with some structure."""
    random = np.random.default_rng(seed)
    return np.random.default_rng(1).standard_normal((n, 1, *size)) + random.standard_normal((n, channels, *size))


def chunks(x: Any, y: Any, size: int = 37) -> Iterator[list[Any]]:
    """Two layers, some datapoints at a time."""
    for start in range(0, len(x), size):
        yield [x[start : start + size].T, y[start : start + size].T]


STREAMS: dict[str, tuple[Callable[[], Gathering], Callable[..., Any]]] = {
    "svcca": (lambda: ByMoments(0.99), analyze.svcca),
    "cca": (lambda: ByTriangle(1.0, "mean"), analyze.cca),
    "pwcca": (lambda: ByTriangle(1.0, "weighted"), analyze.pwcca),
    "cka": (lambda: ByLinear(False), analyze.cka),
    "debiased": (lambda: ByLinear(True), lambda x, y: analyze.cka(x, y, estimator="debiased")),
    "procrustes": (lambda: ByNuclear(True, False), analyze.procrustes),
}
