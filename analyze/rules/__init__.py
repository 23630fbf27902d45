"""The rules: subscribers that each look for one fault of trainings; and the table of their names.

A new rule needs its file and a line in this table. The table is ordered by cause: of two findings that begin at the
same step, that of the earlier rule is named first.
"""

from __future__ import annotations

from collections.abc import Mapping

RULES: Mapping[str, str] = {
    "not_finite": "analyze.rules.not_finite:NotFinite",
    "learning_rate": "analyze.rules.learning_rate:LearningRate",
    "loss_broadcasts": "analyze.rules.loss_arguments:LossBroadcasts",
    "softmax_before_loss": "analyze.rules.loss_arguments:SoftmaxBeforeLoss",
    "relu_before_loss": "analyze.rules.loss_arguments:ReluBeforeLoss",
    "evaluation_mode": "analyze.rules.evaluation_mode:EvaluationMode",
    "accumulated_gradients": "analyze.rules.accumulated_gradients:AccumulatedGradients",
    "input_not_normalised": "analyze.rules.input_not_normalised:InputNotNormalised",
    "poor_initialisation": "analyze.rules.poor_initialisation:PoorInitialisation",
    "dead_units": "analyze.rules.dead_units:DeadUnits",
    "saturated_activations": "analyze.rules.saturated_activations:SaturatedActivations",
    "changed_between_steps": "analyze.rules.changed_between_steps:ChangedBetweenSteps",
    "loss_spike": "analyze.rules.loss_spike:LossSpike",
    "exploding_gradient": "analyze.rules.gradient_flow:ExplodingGradient",
    "vanishing_gradient": "analyze.rules.gradient_flow:VanishingGradient",
    "update_ratio": "analyze.rules.update_ratio:UpdateRatio",
    "unchanged": "analyze.rules.unchanged:Unchanged",
    "never_stepped": "analyze.rules.never_stepped:NeverStepped",
    "all_zeros": "analyze.rules.all_zeros:AllZeros",
    "rank_collapse": "analyze.rules.rank_collapse:RankCollapse",
    "norm_drift": "analyze.rules.norm_drift:NormDrift",
    "class_imbalance": "analyze.rules.class_imbalance:ClassImbalance",
    "loss_not_falling": "analyze.rules.loss_not_falling:LossNotFalling",
    "overfitting": "analyze.rules.overfitting:Overfitting",
    "noisy_gradient": "analyze.rules.noisy_gradient:NoisyGradient",
}
"""Registry name → module and class."""

RESULTS = frozenset({"loss_not_falling"})
"""The rules about what other faults lead to: of equally severe findings, theirs are named last."""
