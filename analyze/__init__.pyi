"""Made by `make docs` from the public names of the package, for type checkers and editors."""

from analyze.asking import analyze
from analyze.batching.batch import BatchResults, batch
from analyze.comparing.compare import compare
from analyze.comparing.diff import diff
from analyze.comparing.difference import Difference
from analyze.comparing.over_time import statistics_over_time
from analyze.comparing.pairs import pairs
from analyze.metrics.advice.freeze import Freeze, freeze
from analyze.metrics.advice.learning_rate_from_ratio import LearningRateFromRatio, learning_rate_from_ratio
from analyze.metrics.curvature.hessian_eigen import HessianEigen, hessian_eigen
from analyze.metrics.curvature.hessian_trace import HessianTrace, hessian_trace
from analyze.metrics.curvature.ticdiag import TICDiag, ticdiag
from analyze.metrics.curvature.tictrace import TICTrace, tictrace
from analyze.metrics.elementwise.activation_rate import ActivationRate, activation_rate
from analyze.metrics.elementwise.distance import Distance, distance
from analyze.metrics.elementwise.histogram import Histogram, histogram
from analyze.metrics.elementwise.mean import Mean, mean
from analyze.metrics.elementwise.norm import Norm, norm
from analyze.metrics.elementwise.quantiles import Quantiles, quantiles
from analyze.metrics.elementwise.sample_norm import SampleNorm, sample_norm
from analyze.metrics.elementwise.statistics import Statistics, statistics, statistics_of_tensors
from analyze.metrics.elementwise.sum import Sum, sum
from analyze.metrics.elementwise.variance import Variance, variance
from analyze.metrics.gradients.adam_moments import AdamMoments, adam_moments
from analyze.metrics.gradients.alpha import Alpha, alpha
from analyze.metrics.gradients.descent_cosine import DescentCosine, descent_cosine
from analyze.metrics.gradients.gradient_geometry import GradientGeometry, gradient_geometry
from analyze.metrics.gradients.gradient_noise import GradientNoise, gradient_noise
from analyze.metrics.gradients.path_length import PathLength, path_length
from analyze.metrics.gradients.ratio import Ratio, ratio
from analyze.metrics.gradients.total_norm import TotalNorm, total_norm
from analyze.metrics.predictions.accuracy import accuracy
from analyze.metrics.predictions.churn import Churn, churn
from analyze.metrics.predictions.classification_report import ClassificationReport, classification_report
from analyze.metrics.predictions.forgetting import Forgetting, forgetting
from analyze.metrics.predictions.pooled_accuracy import TestAccuracy, test_accuracy
from analyze.metrics.predictions.train_accuracy import TrainAccuracy, train_accuracy
from analyze.metrics.reducing.aggregate import Aggregate, aggregate
from analyze.metrics.reducing.ema import EMA, ema
from analyze.metrics.reducing.loss import Loss, loss
from analyze.metrics.reducing.message_mean import MessageMean, message_mean
from analyze.metrics.similarity.cca import CCA, PWCCA, R2CCA, cca, pwcca, r2_cca
from analyze.metrics.similarity.cka import CKA, cka
from analyze.metrics.similarity.procrustes import Angular, Procrustes, angular, procrustes
from analyze.metrics.similarity.sketched_cka import SketchedCKA, sketched_cka
from analyze.metrics.similarity.sketched_svcca import SketchedSVCCA, sketched_svcca
from analyze.metrics.similarity.svcca import SVCCA, svcca
from analyze.metrics.spectra.effective_rank import (
    EffectiveRank,
    ParticipationRatio,
    StableRank,
    effective_rank,
    participation_ratio,
    stable_rank,
)
from analyze.metrics.spectra.operator_norm import OperatorNorm, operator_norm
from analyze.metrics.spectra.power_law import PowerLaw, WeightWatcher, power_law, weightwatcher
from analyze.metrics.spectra.saturation import Saturation, saturation
from analyze.metrics.spectra.singular_values import ConditionNumber, SingularValues, condition_number, singular_values
from analyze.metrics.spectra.sketched_rank import SketchedRank, sketched_rank
from analyze.metrics.spectra.spectral_norm import SpectralNorm, spectral_norm
from analyze.registry import describe, parse, subscribers
from analyze.rules.finding import Finding
from analyze.seeing.blame import blame
from analyze.seeing.check import check
from analyze.seeing.findings import Checked
from analyze.seeing.report import report
from analyze.seeing.viewing.server import view
from analyze.seeing.watch import TrainingStopped, Watch
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
