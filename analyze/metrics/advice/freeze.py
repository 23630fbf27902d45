"""The rule of freeze training: layers that have converged, from the bottom up, need no more training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, final

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.inputs import single_number
from analyze.metrics.metric import OneNumber, Within
from tracer.messaging.messages import Message


def freeze(similarities: Sequence[Sequence[float]], *, threshold: float = 0.99, patience: int = 1) -> list[int | None]:
    """At which probe each layer would be frozen, from the bottom up.

    Parameters
    ----------
    similarities : sequence of sequences of float
        For each probe, for each layer from the input on, how similar it is to itself at the probe before.
    threshold, patience
        As in `Freeze`.

    Returns
    -------
    list of int or None
        For each layer the index of the probe at which it would be frozen; None for never.

    Raises
    ------
    MessageError
        If a parameter is out of its range.

    Examples
    --------
    >>> freeze([[0.5, 0.995], [0.999, 0.99], [1.0, 0.8]])
    [1, 1]
    >>> freeze([[0.5, 0.995], [0.999, 0.99], [1.0, 0.8]], patience=2)
    [2, None]
    """
    _check(threshold, patience)
    when: list[int | None] = [None] * max(map(len, similarities), default=0)
    streaks = [0] * len(when)
    for probe, values in enumerate(similarities):
        below = True
        for layer, value in enumerate(values):
            streaks[layer] = streaks[layer] + 1 if value >= threshold else 0
            if when[layer] is None and below and streaks[layer] >= patience:
                when[layer] = probe
            below = below and when[layer] is not None
    return when


def _check(threshold: object, patience: object) -> None:
    check(is_number(threshold) and threshold > 0, "the threshold of freezing is a positive number", threshold)
    check(is_whole(patience, 1), "the patience of freezing is a positive integer", patience)


@final
class Freeze(OneNumber):
    r"""Freezing rule of SVCCA: a layer whose similarity to itself stays at or above `threshold` would be frozen.

    From the bottom up: a layer is frozen only after all that were heard of before it in a pass. Answers
    ``{kind}_freeze``: a float64 scalar for each message, 1 if this layer would be frozen by now, else 0. In a replay it
    says what the rule would have done; in a live run a `tracer.Actor` freezes the layer's own parameters.

    Parameters
    ----------
    kind : str
        A kind whose messages carry one similarity each, of a layer to its own past, such as the answers of `SVCCA`.
    threshold : float
        From which similarity on a layer counts as converged.
    patience : int
        For how many probes one after another it has to.
    bottom_up : bool
        Whether a layer waits for those before it.
    tag, subsample, modules
        As in `tracer.Subscription`; with `modules`, layers that do not match are neither frozen nor waited for.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: layer l is frozen at the first probe at which :math:`\rho_l \ge` `threshold` for the `patience`-th time
    in a row and all layers before l are frozen.
    *Needs*: the answers of another subscriber, by default those of `SVCCA`: ask for both.
    *Cost*: O(1) for each message.
    *Invariant to* nothing: it is a rule about numbers, and their order in a pass is the order of the layers.
    *Edge values*: NaN is not converged, so a dead layer holds up those above it. Of a module that is called several
    times the first call counts; data that is not one number is not converged. Never raises during a replay.
    *Memory*: for each layer how often it was converged, and whether it is frozen; part of `state_dict`.
    *Source*: M. Raghu, J. Gilmer, J. Yosinski, J. Sohl-Dickstein, "SVCCA", arXiv:1706.05806, section 4 ("Freeze
    Training"), which freezes from the bottom up along a schedule; the rule by threshold is ikkuna's.
    *Formerly*: ikkuna ``SVCCASubscriber(freeze_at=...)`` and ``Exporter.freeze_module``, which froze nothing.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> rule, said = Freeze(), []
    >>> for step, values in enumerate([(0.5, 0.995), (0.999, 0.99)]):
    ...     for module, value in zip(("conv", "fc"), values):
    ...         where = dict(module=module, global_step=step, train_step=step, epoch=0, tag="probe")
    ...         data = torch.tensor(value, dtype=torch.float64)
    ...         said += rule.compute(ModuleMessage(kind="activations_svcca", data=data, **where))
    >>> [(one.module, one.global_step, float(one.data)) for one in said]
    [('conv', 0, 0.0), ('fc', 0, 0.0), ('conv', 1, 1.0), ('fc', 1, 1.0)]
    """

    name = "freeze"
    scope = "everything"

    def __init__(
        self,
        kind: str = "activations_svcca",
        *,
        threshold: float = 0.99,
        patience: int = 1,
        bottom_up: bool = True,
        tag: str | None = "probe",
        **within: Unpack[Within],
    ) -> None:
        _check(threshold, patience)
        super().__init__(kind, f"{kind}_freeze", tag=tag, **within)
        self.threshold, self.patience, self.bottom_up = threshold, patience, bottom_up
        # tag → module, in the order of a pass → [consecutive converged probes, whether frozen]
        self._layers: dict[str, dict[str | None, list[int]]] = {}

    def value(self, message: Message) -> float:
        """Whether the layer would be frozen by now, after this similarity: 1 or 0."""
        layers = self._layers.setdefault(message.tag, {})
        layer = layers.setdefault(message.key, [0, 0])
        if message.call == 0 and message.leaf in ("", "0"):  # the only output, or the first of several
            similarity = single_number(message.data)
            converged = similarity is not None and similarity >= self.threshold
            layer[0] = layer[0] + 1 if converged else 0
            before = itertools.takewhile(lambda one: one is not layer, layers.values())
            if layer[0] >= self.patience and (not self.bottom_up or all(frozen for _, frozen in before)):
                layer[1] = 1
        return layer[1]

    def state_dict(self) -> dict[str, Any]:
        """For each tag the layers in the order of a pass: how many probes in a row converged, and whether frozen."""
        return {
            "tags": {
                tag: [{"module": key, "streak": streak, "frozen": frozen} for key, (streak, frozen) in layers.items()]
                for tag, layers in self._layers.items()
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._layers = {
            tag: {one["module"]: [one["streak"], one["frozen"]] for one in layers}
            for tag, layers in state["tags"].items()
        }
