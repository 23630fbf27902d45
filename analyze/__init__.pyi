"""Made by `make docs` from the public names of the package, for type checkers and editors."""

from analyze.asking import analyze
from analyze.batching.batch import BatchResults, batch
from analyze.comparing.diff import diff
from analyze.comparing.difference import Difference
from analyze.comparing.over_time import statistics_over_time
from analyze.comparing.pairs import pairs
from analyze.comparing.similarities import compare
from analyze.metrics.accuracy import Churn, TestAccuracy, TrainAccuracy, accuracy, churn, test_accuracy, train_accuracy
from analyze.metrics.advice import Freeze, LearningRateFromRatio, freeze, learning_rate_from_ratio
from analyze.metrics.aggregate import Aggregate, aggregate
from analyze.metrics.averages import EMA, AdamMoments, MessageMean, adam_moments, ema, message_mean
from analyze.metrics.classification_report import ClassificationReport, Forgetting, classification_report, forgetting
from analyze.metrics.counts import ActivationRate, Histogram, activation_rate, histogram
from analyze.metrics.directions import Alpha, DescentCosine, GradientGeometry, alpha, descent_cosine, gradient_geometry
from analyze.metrics.gradient_noise import GradientNoise, gradient_noise
from analyze.metrics.hessian import HessianEigen, HessianTrace, hessian_eigen, hessian_trace
from analyze.metrics.lengths import (
    Distance,
    PathLength,
    Ratio,
    SampleNorm,
    TotalNorm,
    distance,
    path_length,
    ratio,
    sample_norm,
    total_norm,
)
from analyze.metrics.moments import Loss, Mean, Sum, Variance, loss, mean, sum, variance
from analyze.metrics.norm import Norm, norm
from analyze.metrics.operator_norm import OperatorNorm, operator_norm
from analyze.metrics.power_law import PowerLaw, WeightWatcher, power_law, weightwatcher
from analyze.metrics.ranks import (
    ConditionNumber,
    EffectiveRank,
    ParticipationRatio,
    SingularValues,
    StableRank,
    condition_number,
    effective_rank,
    participation_ratio,
    singular_values,
    stable_rank,
)
from analyze.metrics.similarity.cka import CKA, cka
from analyze.metrics.similarity.correlations import CCA, PWCCA, R2CCA, SVCCA, cca, pwcca, r2_cca, svcca
from analyze.metrics.similarity.estimates import SketchedRank, sketched_rank
from analyze.metrics.similarity.procrustes import Angular, Procrustes, angular, procrustes
from analyze.metrics.similarity.sketched import SketchedCKA, SketchedSVCCA, sketched_cka, sketched_svcca
from analyze.metrics.spectra import Saturation, saturation
from analyze.metrics.spectral_norm import SpectralNorm, spectral_norm
from analyze.metrics.statistics import Quantiles, Statistics, quantiles, statistics, statistics_of_tensors
from analyze.metrics.takeuchi import TICDiag, TICTrace, ticdiag, tictrace
from analyze.registry import describe, parse, subscribers
from analyze.rules.finding import Finding
from analyze.seeing.blame import blame
from analyze.seeing.check import Checked, TrainingStopped, Watch, check
from analyze.seeing.report import report
from analyze.seeing.runs import runs
from analyze.seeing.server import view
from analyze.tables.results import Results

HOMES: dict[str, str]
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
    "Checked",
    "Churn",
    "ClassificationReport",
    "ConditionNumber",
    "DescentCosine",
    "Difference",
    "Distance",
    "EffectiveRank",
    "Finding",
    "Forgetting",
    "Freeze",
    "GradientGeometry",
    "GradientNoise",
    "HessianEigen",
    "HessianTrace",
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
    "SketchedCKA",
    "SketchedRank",
    "SketchedSVCCA",
    "SpectralNorm",
    "StableRank",
    "Statistics",
    "Sum",
    "TICDiag",
    "TICTrace",
    "TestAccuracy",
    "TotalNorm",
    "TrainAccuracy",
    "TrainingStopped",
    "Variance",
    "Watch",
    "WeightWatcher",
    "accuracy",
    "activation_rate",
    "adam_moments",
    "aggregate",
    "alpha",
    "analyze",
    "angular",
    "batch",
    "blame",
    "cca",
    "check",
    "churn",
    "cka",
    "classification_report",
    "compare",
    "condition_number",
    "descent_cosine",
    "describe",
    "diff",
    "distance",
    "effective_rank",
    "ema",
    "forgetting",
    "freeze",
    "gradient_geometry",
    "gradient_noise",
    "hessian_eigen",
    "hessian_trace",
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
    "report",
    "runs",
    "sample_norm",
    "saturation",
    "singular_values",
    "sketched_cka",
    "sketched_rank",
    "sketched_svcca",
    "spectral_norm",
    "stable_rank",
    "statistics",
    "statistics_of_tensors",
    "statistics_over_time",
    "subscribers",
    "sum",
    "svcca",
    "test_accuracy",
    "ticdiag",
    "tictrace",
    "total_norm",
    "train_accuracy",
    "variance",
    "view",
    "weightwatcher",
]
