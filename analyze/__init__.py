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
    from analyze.compare import compare
    from analyze.metrics.accuracy import accuracy
    from analyze.metrics.activation_rate import ActivationRate, activation_rate
    from analyze.metrics.adam_moments import AdamMoments, adam_moments
    from analyze.metrics.aggregate import Aggregate, aggregate
    from analyze.metrics.alpha import Alpha, alpha
    from analyze.metrics.cca import CCA, PWCCA, R2CCA, cca, pwcca, r2_cca
    from analyze.metrics.churn import Churn, churn
    from analyze.metrics.cka import CKA, cka
    from analyze.metrics.classification_report import ClassificationReport, classification_report
    from analyze.metrics.descent_cosine import DescentCosine, descent_cosine
    from analyze.metrics.distance import Distance, distance
    from analyze.metrics.effective_rank import (
        EffectiveRank,
        ParticipationRatio,
        StableRank,
        effective_rank,
        participation_ratio,
        stable_rank,
    )
    from analyze.metrics.ema import EMA, ema
    from analyze.metrics.forgetting import Forgetting, forgetting
    from analyze.metrics.freeze import Freeze, freeze
    from analyze.metrics.gradient_geometry import GradientGeometry, gradient_geometry
    from analyze.metrics.gradient_noise import GradientNoise, gradient_noise
    from analyze.metrics.histogram import Histogram, histogram
    from analyze.metrics.learning_rate_from_ratio import LearningRateFromRatio, learning_rate_from_ratio
    from analyze.metrics.loss import Loss, loss
    from analyze.metrics.mean import Mean, mean
    from analyze.metrics.message_mean import MessageMean, message_mean
    from analyze.metrics.norm import Norm, norm
    from analyze.metrics.operator_norm import OperatorNorm, operator_norm
    from analyze.metrics.path_length import PathLength, path_length
    from analyze.metrics.pooled_accuracy import TestAccuracy, test_accuracy
    from analyze.metrics.power_law import PowerLaw, WeightWatcher, power_law, weightwatcher
    from analyze.metrics.procrustes import Angular, Procrustes, angular, procrustes
    from analyze.metrics.quantiles import Quantiles, quantiles
    from analyze.metrics.ratio import Ratio, ratio
    from analyze.metrics.sample_norm import SampleNorm, sample_norm
    from analyze.metrics.saturation import Saturation, saturation
    from analyze.metrics.singular_values import (
        ConditionNumber,
        SingularValues,
        condition_number,
        singular_values,
    )
    from analyze.metrics.spectral_norm import SpectralNorm, spectral_norm
    from analyze.metrics.statistics import Statistics, statistics, statistics_of_tensors
    from analyze.metrics.sum import Sum, sum  # noqa: A004 - analyze.sum, as in numpy.sum
    from analyze.metrics.svcca import SVCCA, svcca
    from analyze.metrics.train_accuracy import TrainAccuracy, train_accuracy
    from analyze.metrics.variance import Variance, variance
    from analyze.over_time import statistics_over_time
    from analyze.pairs import pairs
    from analyze.registry import describe, parse, subscribers
    from analyze.results import Results, analyze

_OTHERS = {
    "accuracy": "metrics.accuracy",
    "analyze": "results",
    "Results": "results",
    "statistics_of_tensors": "metrics.statistics",
    "statistics_over_time": "over_time",
    "compare": "compare",
    "pairs": "pairs",
    "batch": "batch",
    "BatchResults": "batch",
} | dict.fromkeys(("describe", "parse", "subscribers"), "registry")
"""Public name → its home, for the names that no registered metric brings."""

__all__ = [
    "CCA",
    "CKA",
    "EMA",
    "PWCCA",
    "R2CCA",
    "SVCCA",
    "ActivationRate",
    "AdamMoments",
    "Aggregate",
    "Alpha",
    "Angular",
    "BatchResults",
    "Churn",
    "ClassificationReport",
    "ConditionNumber",
    "DescentCosine",
    "Distance",
    "EffectiveRank",
    "Forgetting",
    "Freeze",
    "GradientGeometry",
    "GradientNoise",
    "Histogram",
    "LearningRateFromRatio",
    "Loss",
    "Mean",
    "MessageMean",
    "Norm",
    "OperatorNorm",
    "ParticipationRatio",
    "PathLength",
    "PowerLaw",
    "Procrustes",
    "Quantiles",
    "Ratio",
    "Results",
    "SampleNorm",
    "Saturation",
    "SingularValues",
    "SpectralNorm",
    "StableRank",
    "Statistics",
    "Sum",
    "TestAccuracy",
    "TrainAccuracy",
    "Variance",
    "WeightWatcher",
    "accuracy",
    "activation_rate",
    "adam_moments",
    "aggregate",
    "alpha",
    "analyze",
    "angular",
    "batch",
    "cca",
    "churn",
    "cka",
    "classification_report",
    "compare",
    "condition_number",
    "descent_cosine",
    "describe",
    "distance",
    "effective_rank",
    "ema",
    "forgetting",
    "freeze",
    "gradient_geometry",
    "gradient_noise",
    "histogram",
    "learning_rate_from_ratio",
    "loss",
    "mean",
    "message_mean",
    "norm",
    "operator_norm",
    "pairs",
    "parse",
    "participation_ratio",
    "path_length",
    "power_law",
    "procrustes",
    "pwcca",
    "quantiles",
    "r2_cca",
    "ratio",
    "sample_norm",
    "saturation",
    "singular_values",
    "spectral_norm",
    "stable_rank",
    "statistics",
    "statistics_of_tensors",
    "statistics_over_time",
    "subscribers",
    "sum",
    "svcca",
    "test_accuracy",
    "train_accuracy",
    "variance",
    "weightwatcher",
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
