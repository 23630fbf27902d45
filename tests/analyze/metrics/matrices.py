"""Matrices of known spectra, and what a metric says of a message, for the tests of spectra."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import analyze
from tracer import ModuleMessage, Subscriber

INF, NAN = float("inf"), float("nan")


NAMES = {
    "condition_number": analyze.ConditionNumber,
    "effective_rank": analyze.EffectiveRank,
    "operator_norm": analyze.OperatorNorm,
    "participation_ratio": analyze.ParticipationRatio,
    "power_law": analyze.PowerLaw,
    "saturation": analyze.Saturation,
    "singular_values": analyze.SingularValues,
    "spectral_norm": analyze.SpectralNorm,
    "stable_rank": analyze.StableRank,
    "weightwatcher": analyze.WeightWatcher,
}


def message(data: Any, kind: str = "weights", step: int = 0, module: str = "m", **more: Any) -> ModuleMessage:
    """A message of a module."""
    data = data if isinstance(data, torch.Tensor) else torch.tensor(np.asarray(data))
    where = {"global_step": step, "train_step": step, "epoch": 0} | more
    return ModuleMessage(kind=kind, module=module, data=data, **where)


def said(metric: Subscriber, one: ModuleMessage) -> dict[str, Any]:
    """The answers to a message, without the kind that they begin with."""
    short = metric.produces[0].removesuffix("_alpha")
    return {
        answer.kind.removeprefix(short).removeprefix("_") or "value": (
            float(answer.data) if answer.data.ndim == 0 else answer.data.tolist()  # type: ignore[union-attr]
        )
        for answer in metric.receive(one)
    }


def orthogonal(n: int, rng: np.random.Generator) -> Any:
    """A random orthogonal matrix."""
    return np.linalg.qr(rng.standard_normal((n, n)))[0]


def with_spectrum(values: Any, rng: np.random.Generator, rows: int | None = None) -> Any:
    """A matrix with these singular values."""
    n = len(values)
    left = np.linalg.qr(rng.standard_normal((rows or n, n)))[0]
    return (left * np.asarray(values)) @ orthogonal(n, rng).T


def overtaken(step: int, how: str) -> Any:
    """The singular values of a flat spectrum with one on top, and of another one that has overtaken it or does so."""
    new = {"suddenly": 0.5 if step < 4 else 1.02, "by 0.01 a step": 0.95 + 0.01 * step, "and falls": 1.06 - 0.01 * step}
    return np.r_[1.0, new[how], np.linspace(0, 0.95, 598)]
