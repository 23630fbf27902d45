"""The table of the metrics' names; each metric is a pure function and a thin final class in a file of its own.

A new metric needs its file and a line in this table. From both, `make docs` writes the types of `analyze.NAME`
(``analyze/__init__.pyi``), the output of `trace subscribers` (``analyze/descriptions.json``) and ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {
    "activation_rate": "analyze.metrics.elementwise.activation_rate:ActivationRate",
    "adam_moments": "analyze.metrics.gradients.adam_moments:AdamMoments",
    "aggregate": "analyze.metrics.reducing.aggregate:Aggregate",
    "alpha": "analyze.metrics.gradients.alpha:Alpha",
    "angular": "analyze.metrics.similarity.procrustes:Angular",
    "cca": "analyze.metrics.similarity.cca:CCA",
    "churn": "analyze.metrics.predictions.churn:Churn",
    "cka": "analyze.metrics.similarity.cka:CKA",
    "classification_report": "analyze.metrics.predictions.classification_report:ClassificationReport",
    "condition_number": "analyze.metrics.spectra.singular_values:ConditionNumber",
    "descent_cosine": "analyze.metrics.gradients.descent_cosine:DescentCosine",
    "distance": "analyze.metrics.elementwise.distance:Distance",
    "effective_rank": "analyze.metrics.spectra.effective_rank:EffectiveRank",
    "ema": "analyze.metrics.reducing.ema:EMA",
    "forgetting": "analyze.metrics.predictions.forgetting:Forgetting",
    "freeze": "analyze.metrics.advice.freeze:Freeze",
    "gradient_geometry": "analyze.metrics.gradients.gradient_geometry:GradientGeometry",
    "gradient_noise": "analyze.metrics.gradients.gradient_noise:GradientNoise",
    "hessian_eigen": "analyze.metrics.curvature.hessian_eigen:HessianEigen",
    "hessian_trace": "analyze.metrics.curvature.hessian_trace:HessianTrace",
    "histogram": "analyze.metrics.elementwise.histogram:Histogram",
    "learning_rate_from_ratio": "analyze.metrics.advice.learning_rate_from_ratio:LearningRateFromRatio",
    "loss": "analyze.metrics.reducing.loss:Loss",
    "mean": "analyze.metrics.elementwise.mean:Mean",
    "message_mean": "analyze.metrics.reducing.message_mean:MessageMean",
    "norm": "analyze.metrics.elementwise.norm:Norm",
    "operator_norm": "analyze.metrics.spectra.operator_norm:OperatorNorm",
    "participation_ratio": "analyze.metrics.spectra.effective_rank:ParticipationRatio",
    "path_length": "analyze.metrics.gradients.path_length:PathLength",
    "power_law": "analyze.metrics.spectra.power_law:PowerLaw",
    "procrustes": "analyze.metrics.similarity.procrustes:Procrustes",
    "pwcca": "analyze.metrics.similarity.cca:PWCCA",
    "quantiles": "analyze.metrics.elementwise.quantiles:Quantiles",
    "r2_cca": "analyze.metrics.similarity.cca:R2CCA",
    "ratio": "analyze.metrics.gradients.ratio:Ratio",
    "sample_norm": "analyze.metrics.elementwise.sample_norm:SampleNorm",
    "saturation": "analyze.metrics.spectra.saturation:Saturation",
    "singular_values": "analyze.metrics.spectra.singular_values:SingularValues",
    "sketched_cka": "analyze.metrics.similarity.sketched_cka:SketchedCKA",
    "sketched_rank": "analyze.metrics.spectra.sketched_rank:SketchedRank",
    "sketched_svcca": "analyze.metrics.similarity.sketched_svcca:SketchedSVCCA",
    "spectral_norm": "analyze.metrics.spectra.spectral_norm:SpectralNorm",
    "stable_rank": "analyze.metrics.spectra.effective_rank:StableRank",
    "statistics": "analyze.metrics.elementwise.statistics:Statistics",
    "sum": "analyze.metrics.elementwise.sum:Sum",
    "svcca": "analyze.metrics.similarity.svcca:SVCCA",
    "test_accuracy": "analyze.metrics.predictions.pooled_accuracy:TestAccuracy",
    "ticdiag": "analyze.metrics.curvature.ticdiag:TICDiag",
    "tictrace": "analyze.metrics.curvature.tictrace:TICTrace",
    "total_norm": "analyze.metrics.gradients.total_norm:TotalNorm",
    "train_accuracy": "analyze.metrics.predictions.train_accuracy:TrainAccuracy",
    "variance": "analyze.metrics.elementwise.variance:Variance",
    "weightwatcher": "analyze.metrics.spectra.power_law:WeightWatcher",
}
"""Registry name → ``module:class``. The same module defines the pure function, under the registry name."""
