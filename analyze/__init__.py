"""Ask a recorded training run: metrics, the registry that names them, and tables of their answers.

The names below are imported when they are first used, so that ``import analyze`` costs nothing. Each metric's pure
function stands here under its registry name (`analyze.svcca`), its subscriber beside it (`analyze.SVCCA`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analyze.batch import BatchResults, batch
    from analyze.metrics.accuracy import accuracy
    from analyze.metrics.histogram import Histogram, histogram
    from analyze.metrics.loss import Loss, loss
    from analyze.metrics.mean import Mean, mean
    from analyze.metrics.message_mean import MessageMean, message_mean
    from analyze.metrics.norm import Norm, norm
    from analyze.metrics.pooled_accuracy import TestAccuracy, test_accuracy
    from analyze.metrics.ratio import Ratio, ratio
    from analyze.metrics.spectral_norm import SpectralNorm, spectral_norm
    from analyze.metrics.sum import Sum, sum  # noqa: A004 - analyze.sum, as in numpy.sum
    from analyze.metrics.svcca import SVCCA, svcca
    from analyze.metrics.train_accuracy import TrainAccuracy, train_accuracy
    from analyze.metrics.variance import Variance, variance
    from analyze.registry import describe, parse, subscribers
    from analyze.results import Results, analyze

_OTHERS = {"accuracy": "metrics.accuracy", "analyze": "results", "Results": "results"} | dict.fromkeys(
    ("describe", "parse", "subscribers"), "registry"
)
_OTHERS |= {"batch": "batch", "BatchResults": "batch"}
"""Public name → its home, for the names that no registered metric brings."""

__all__ = [
    "SVCCA",
    "BatchResults",
    "Histogram",
    "Loss",
    "Mean",
    "MessageMean",
    "Norm",
    "Ratio",
    "Results",
    "SpectralNorm",
    "Sum",
    "TestAccuracy",
    "TrainAccuracy",
    "Variance",
    "accuracy",
    "analyze",
    "batch",
    "describe",
    "histogram",
    "loss",
    "mean",
    "message_mean",
    "norm",
    "parse",
    "ratio",
    "spectral_norm",
    "subscribers",
    "sum",
    "svcca",
    "test_accuracy",
    "train_accuracy",
    "variance",
]


def _home(name: str) -> str | None:
    """The module of a public name; a metric's function has the registry name and stands in the class's module."""
    if name not in __all__:
        return None
    if name in _OTHERS:
        return f"analyze.{_OTHERS[name]}"
    registered: dict[str, str] = import_module("analyze.registry").BUILT_IN
    return next(
        module for key, place in registered.items() for module, _, cls in [place.partition(":")] if name in (key, cls)
    )


def __getattr__(name: str) -> Any:
    home = _home(name)
    if home is None:
        raise AttributeError(f"module 'analyze' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps a public name its function: importing a submodule of that name would else bind the module there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _OTHERS.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
