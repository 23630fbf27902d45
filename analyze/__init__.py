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

_HOMES = {
    "metrics.accuracy": ("accuracy",),
    "metrics.histogram": ("Histogram", "histogram"),
    "metrics.loss": ("Loss", "loss"),
    "metrics.mean": ("Mean", "mean"),
    "metrics.message_mean": ("MessageMean", "message_mean"),
    "metrics.norm": ("Norm", "norm"),
    "metrics.ratio": ("Ratio", "ratio"),
    "metrics.spectral_norm": ("SpectralNorm", "spectral_norm"),
    "metrics.sum": ("Sum", "sum"),
    "metrics.svcca": ("SVCCA", "svcca"),
    "metrics.pooled_accuracy": ("TestAccuracy", "test_accuracy"),
    "metrics.train_accuracy": ("TrainAccuracy", "train_accuracy"),
    "metrics.variance": ("Variance", "variance"),
    "registry": ("describe", "parse", "subscribers"),
    "results": ("Results", "analyze"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "SVCCA",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'analyze' has no attribute {name!r}")
    value = getattr(import_module(f"analyze.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps a public name its function: importing a submodule of that name would else bind the module there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOME_OF.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
