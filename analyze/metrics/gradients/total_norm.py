"""The norm of all gradients together, before clipping and after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Unpack, final

from analyze.metrics.elementwise.norm import norm, norm_of
from analyze.metrics.inputs import answer, real_numbers
from analyze.metrics.metric import Where
from analyze.metrics.steps import OfSteps
from analyze.metrics.streams import At
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array

_WHEN = ("before", "after")


def total_norm(tensors: Iterable[Array]) -> float:
    """The 2-norm of all elements of tensors together, as of one vector.

    Parameters
    ----------
    tensors : iterable of arrays
        Of any shapes and dtypes.

    Returns
    -------
    float
        In the unit of the data; 0 without tensors.

    Examples
    --------
    >>> total_norm([[[3.0, 0.0]], [-4.0]])
    5.0
    """
    return math.hypot(*map(norm, tensors))


@dataclass
class _Step(At):
    """The recorded norms of a step, by model; and the norms of its gradients."""

    recorded: dict[str, dict[str, float]] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)


@final
class TotalNorm(OfSteps[_Step]):
    r"""Norm of all gradients of a model together, before clipping and after it: :math:`\sqrt{\sum_l \|g_l\|_2^2}`.

    Answers ``total_norm_before`` and ``total_norm_after``: float64 scalars, in the unit of the gradients, for the whole
    network and each step, as soon as a later step begins or the run ends. Where several models are trained, each has
    answers of its own, with its name as their leaf.

    Parameters
    ----------
    kind : str
        The kind of the recorded norms.
    weights, biases : str
        The kinds of the gradients from which the norm after clipping is computed where no norms were recorded.
    tag, subsample, modules
        As in `tracer.Subscription`; with `modules`, the norm is computed from the gradients of these modules.

    Raises
    ------
    MessageError
        If messages of a kind carry no data.

    Notes
    -----
    *Formula*: :math:`\sqrt{\sum_l \sum_i g_{l,i}^2}`, as ``torch.nn.utils.clip_grad_norm_`` returns it. Before
    clipping, g is what has accumulated when the last ``backward`` before the optimizer's step is over, without the
    factor of a ``GradScaler``; after it, what the optimizer uses.
    *Needs*: ``gradient_norms``; or gradients, or their statistics, of all parameters, which tell only the norm after
    clipping. Gradients of weights that a parametrisation computes then count too.
    *Cost*: O(1) a step; from gradients one pass over them, O(n).
    *Invariant to* the order, shape and signs of the elements; scales with the data.
    *Edge values*: NaN where a gradient has NaN, else infinity where one has infinity. No answer of a step that a
    ``GradScaler`` skipped, and none before clipping where no ``backward`` was seen (``torch.autograd.grad``). Never
    raises during a replay.
    *Memory*: the norms of the step that is going on; part of `state_dict`.
    *Numerics*: recorded norms have a relative error of about 1e-6 for float32 and narrower gradients, and are infinite
    where squares leave float32; norms from gradients are float64 throughout.
    *Found by*: exploding gradients, vanishing gradients.
    *Source*: R. Pascanu et al., "On the difficulty of training recurrent neural networks", arXiv:1211.5063,
    algorithm 1.

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> total, told = TotalNorm(), {"entries": ["before", "after"]}
    >>> norms = torch.tensor([45.2, 0.967], dtype=torch.float64)
    >>> where = dict(kind="gradient_norms", global_step=0, train_step=0, epoch=0)
    >>> assert not list(total.compute(NetworkMessage(data=norms, sampling=told, **where)))
    >>> [(said.kind, float(said.data)) for said in total.conclude()]
    [('total_norm_before', 45.2), ('total_norm_after', 0.967)]
    """

    name = "total_norm"
    gathered = _Step
    scope = "step"
    bundled = False
    either = True
    takes_statistics = True
    spoiled_by = ("elements", "reduce")
    invariances = ("order", "sign")

    def __init__(
        self,
        kind: str = "gradient_norms",
        *,
        weights: str = "weight_gradients",
        biases: str = "bias_gradients",
        **where: Unpack[Where],
    ) -> None:
        recorded = (kind,) if where.get("modules") is None else ()
        super().__init__((*recorded, weights, biases), [f"total_norm_{when}" for when in _WHEN], **where)
        self.kind = kind

    def hear(self, now: _Step, message: Message) -> None:
        """Keep the recorded norms, or the norm of a gradient."""
        if message.kind != self.kind:
            now.norms.append(norm_of(message, 2))
        else:
            names = (message.sampling or {}).get("entries", _WHEN)
            now.recorded[message.leaf] = dict(zip(names, real_numbers(message.data).ravel().tolist(), strict=False))

    def numbers(self, over: _Step) -> tuple[float]:
        """The norm after clipping, from the gradients."""
        return (math.hypot(*over.norms),)

    def answers(self, tag: str, over: _Step) -> Iterator[Message]:
        """The recorded norms of each model; without any, the norm from the gradients."""
        (after,) = self.numbers(over)
        found = over.recorded or {"": {"after": after}}
        for model, norms in found.items():
            for when, kind in zip(_WHEN, self.produces, strict=True):
                if when in norms:
                    yield over.message(kind, (None, tag, model, over.rank), answer(norms[when]))
