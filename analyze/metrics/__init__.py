"""The table of the metrics' names; each metric is a pure function and a thin final class in a file of its own.

A new metric needs its file and a line in this table. From both, `make docs` writes the types of `analyze.NAME`
(``analyze/__init__.pyi``), the output of `trace subscribers` (``analyze/descriptions.json``) and ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {
    "activation_rate": "analyze.metrics.counts:ActivationRate",
    "adam_moments": "analyze.metrics.averages:AdamMoments",
    "aggregate": "analyze.metrics.aggregate:Aggregate",
    "alpha": "analyze.metrics.directions:Alpha",
    "angular": "analyze.metrics.similarity.procrustes:Angular",
    "cca": "analyze.metrics.similarity.correlations:CCA",
    "churn": "analyze.metrics.accuracy:Churn",
    "cka": "analyze.metrics.similarity.cka:CKA",
    "classification_report": "analyze.metrics.classification_report:ClassificationReport",
    "condition_number": "analyze.metrics.ranks:ConditionNumber",
    "descent_cosine": "analyze.metrics.directions:DescentCosine",
    "distance": "analyze.metrics.lengths:Distance",
    "effective_rank": "analyze.metrics.ranks:EffectiveRank",
    "ema": "analyze.metrics.averages:EMA",
    "forgetting": "analyze.metrics.classification_report:Forgetting",
    "freeze": "analyze.metrics.advice:Freeze",
    "gradient_geometry": "analyze.metrics.directions:GradientGeometry",
    "gradient_noise": "analyze.metrics.gradient_noise:GradientNoise",
    "hessian_eigen": "analyze.metrics.hessian:HessianEigen",
    "hessian_trace": "analyze.metrics.hessian:HessianTrace",
    "histogram": "analyze.metrics.counts:Histogram",
    "learning_rate_from_ratio": "analyze.metrics.advice:LearningRateFromRatio",
    "loss": "analyze.metrics.moments:Loss",
    "mean": "analyze.metrics.moments:Mean",
    "message_mean": "analyze.metrics.averages:MessageMean",
    "norm": "analyze.metrics.norm:Norm",
    "operator_norm": "analyze.metrics.operator_norm:OperatorNorm",
    "participation_ratio": "analyze.metrics.ranks:ParticipationRatio",
    "path_length": "analyze.metrics.lengths:PathLength",
    "power_law": "analyze.metrics.power_law:PowerLaw",
    "procrustes": "analyze.metrics.similarity.procrustes:Procrustes",
    "pwcca": "analyze.metrics.similarity.correlations:PWCCA",
    "quantiles": "analyze.metrics.statistics:Quantiles",
    "r2_cca": "analyze.metrics.similarity.correlations:R2CCA",
    "ratio": "analyze.metrics.lengths:Ratio",
    "sample_norm": "analyze.metrics.lengths:SampleNorm",
    "saturation": "analyze.metrics.spectra:Saturation",
    "singular_values": "analyze.metrics.ranks:SingularValues",
    "sketched_cka": "analyze.metrics.similarity.sketched:SketchedCKA",
    "sketched_rank": "analyze.metrics.similarity.estimates:SketchedRank",
    "sketched_svcca": "analyze.metrics.similarity.sketched:SketchedSVCCA",
    "spectral_norm": "analyze.metrics.spectral_norm:SpectralNorm",
    "stable_rank": "analyze.metrics.ranks:StableRank",
    "statistics": "analyze.metrics.statistics:Statistics",
    "sum": "analyze.metrics.moments:Sum",
    "svcca": "analyze.metrics.similarity.correlations:SVCCA",
    "test_accuracy": "analyze.metrics.accuracy:TestAccuracy",
    "ticdiag": "analyze.metrics.takeuchi:TICDiag",
    "tictrace": "analyze.metrics.takeuchi:TICTrace",
    "total_norm": "analyze.metrics.lengths:TotalNorm",
    "train_accuracy": "analyze.metrics.accuracy:TrainAccuracy",
    "variance": "analyze.metrics.moments:Variance",
    "weightwatcher": "analyze.metrics.power_law:WeightWatcher",
}
"""Registry name → ``module:class``. The same module defines the pure function, under the registry name."""
