"""The rules: subscribers that each look for one fault of trainings; and the table of their names.

A new rule needs a class and a line in this table. The table is ordered by cause: of two findings that begin at the
same step, that of the earlier rule is named first.
"""

from __future__ import annotations

from collections.abc import Mapping

RULES: Mapping[str, str] = {
    "not_finite": "analyze.rules.not_finite:NotFinite",
    "learning_rate": "analyze.rules.settings:LearningRate",
    "loss_broadcasts": "analyze.rules.settings:LossBroadcasts",
    "softmax_before_loss": "analyze.rules.settings:SoftmaxBeforeLoss",
    "relu_before_loss": "analyze.rules.settings:ReluBeforeLoss",
    "evaluation_mode": "analyze.rules.settings:EvaluationMode",
    "accumulated_gradients": "analyze.rules.gradients:AccumulatedGradients",
    "input_not_normalised": "analyze.rules.beginning:InputNotNormalised",
    "poor_initialisation": "analyze.rules.beginning:PoorInitialisation",
    "dead_units": "analyze.rules.activations:DeadUnits",
    "saturated_activations": "analyze.rules.activations:SaturatedActivations",
    "changed_between_steps": "analyze.rules.weights:ChangedBetweenSteps",
    "loss_spike": "analyze.rules.losses:LossSpike",
    "exploding_gradient": "analyze.rules.gradients:ExplodingGradient",
    "vanishing_gradient": "analyze.rules.gradients:VanishingGradient",
    "update_ratio": "analyze.rules.weights:UpdateRatio",
    "unchanged": "analyze.rules.weights:Unchanged",
    "never_stepped": "analyze.rules.weights:NeverStepped",
    "all_zeros": "analyze.rules.activations:AllZeros",
    "rank_collapse": "analyze.rules.activations:RankCollapse",
    "norm_drift": "analyze.rules.norm_drift:NormDrift",
    "class_imbalance": "analyze.rules.beginning:ClassImbalance",
    "loss_not_falling": "analyze.rules.losses:LossNotFalling",
    "overfitting": "analyze.rules.losses:Overfitting",
    "noisy_gradient": "analyze.rules.gradients:NoisyGradient",
}
"""Registry name → module and class."""

RESULTS = frozenset({"loss_not_falling"})
"""The rules about what other faults lead to: of equally severe findings, theirs are named last."""
