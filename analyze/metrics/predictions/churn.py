"""The share of predictions that change from one evaluation to the next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.steps import OfSteps
from analyze.metrics.streams import At
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array


def churn(one: Array, other: Array, *, class_axis: int = 1) -> float:
    """The share of predictions in which two outputs for the same datapoints differ.

    Parameters
    ----------
    one, other : arrays of one shape
        Scores of classes, as in `predictions`.
    class_axis : int
        The axis that counts classes.

    Returns
    -------
    float
        From 0 to 1; NaN without datapoints.

    Raises
    ------
    MessageError
        If the shapes differ, or have no such axis.

    Examples
    --------
    >>> churn([[2.0, 1.0], [0.0, 1.0]], [[3.0, 1.0], [5.0, 1.0]])
    0.5
    """
    ours, theirs = predictions(one, class_axis), predictions(other, class_axis)
    if ours.shape != theirs.shape:
        raise MessageError(f"churn compares outputs for the same datapoints, not {ours.shape} and {theirs.shape}")
    return int(np.count_nonzero(ours != theirs)) / ours.size if ours.size else math.nan


def predictions(output: Array, class_axis: int = 1) -> NDArray[np.int64]:
    """The predicted class of each datapoint (pixel, token): the first of the largest scores; -1 if a score is NaN.

    A single score, (n,) or (n, 1), answers a yes/no question: above 0 means class 1.

    Raises
    ------
    MessageError
        If the output has no such axis or no classes, or is complex.

    Examples
    --------
    >>> predictions([[2.0, 1.0], [0.0, 1.0]]).tolist(), predictions([-1.0, 3.0]).tolist()
    ([0, 1], [0, 1])
    """
    scores = as_array(output)
    if scores.dtype.kind == "c":
        raise MessageError("a prediction needs real scores, not complex ones")
    nan = np.isnan(scores) if scores.dtype.kind == "f" else np.zeros(scores.shape, dtype=np.bool_)
    inside = -scores.ndim <= class_axis < scores.ndim
    if scores.ndim < 2 or (inside and scores.shape[class_axis] == 1):
        return np.where(nan, -1, scores > 0).reshape(-1).astype(np.int64)
    if not inside or scores.shape[class_axis] == 0:
        raise MessageError(f"an output of shape {scores.shape} has no classes along axis {class_axis}")
    return np.where(nan.any(class_axis), -1, scores.argmax(class_axis)).reshape(-1).astype(np.int64)


@dataclass
class _Pass(At):
    """The predictions of a tag's current pass, and of the pass before."""

    before: dict[tuple[int, str], NDArray[np.int64]] | None = None
    now: dict[tuple[int, str], NDArray[np.int64]] = field(default_factory=dict)


@final
class Churn(OfSteps[_Pass]):
    r"""Prediction churn: the share of datapoints whose predicted class changed since the pass before.

    Answers ``{kind}_churn``: a float64 scalar from 0 to 1, without unit, for each pass (all forward passes of one tag
    at one global step) but the first of each tag, as soon as a later pass of that tag begins or the run ends.

    Parameters
    ----------
    kind : str
        The kind of the outputs, scores of classes.
    class_axis : int
        The axis that counts classes: 1 for (n, c) and (n, c, h, w), -1 for sequences (n, t, c).
    tag, subsample
        As in `tracer.Subscription`; by default every tag but that of training passes.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`\frac1n \sum_i [\hat y_i^{(t)} \ne \hat y_i^{(t-1)}]`.
    *Needs*: passes over the same datapoints in the same order, as a probe's or those of an evaluation that does not
    shuffle: a datapoint is known by its batch and its row.
    *Cost*: O(n c) for n datapoints and c classes.
    *Invariant to* increasing maps of the scores that are common to all classes, and to an order of the datapoints that
    is the same at every pass.
    *Edge values*: NaN if no batch of the pass before has as many datapoints; a NaN among the scores is a class of its
    own. Never raises during a replay.
    *Memory*: the predicted classes of the last pass of each tag; part of `state_dict`.
    *Source*: M. Milani Fard et al., "Launch and Iterate: Reducing Prediction Churn", NeurIPS 2016, definition 1.
    *Formerly*: resi ``Disagreement`` (of two models).

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> churn, said = Churn(), []
    >>> for step, output in enumerate([[[2.0, 1.0], [0.0, 1.0]], [[3.0, 1.0], [5.0, 1.0]]]):
    ...     where = dict(global_step=step, train_step=step, epoch=0, tag="probe")
    ...     said += churn.compute(NetworkMessage(kind="network_output", data=torch.tensor(output), **where))
    >>> [(one.kind, one.global_step, float(one.data)) for one in [*said, *churn.conclude()]]
    [('network_output_churn', 1, 0.5)]
    """

    name = "churn"
    gathered = _Pass
    stored_as = "passes"
    scope = "stream"
    same_inputs = True
    invariances = ("rows",)

    def __init__(
        self,
        kind: str = "network_output",
        *,
        class_axis: int = 1,
        tag: str | None = "!default",
        subsample: int = 1,
    ) -> None:
        super().__init__(kind, f"{kind}_churn", tag=tag, subsample=subsample)
        self.class_axis = class_axis

    def following(self, over: _Pass, message: Message) -> _Pass:
        """The same record, with the predictions of the pass that is over as those of the pass before."""
        over.before, over.now = over.now, {}
        return over

    def hear(self, now: _Pass, message: Message) -> None:
        """Keep the predictions of one batch."""
        now.move_to(message)
        try:
            now.now[message.call, message.leaf] = predictions(as_array(message.data), self.class_axis)
        except MessageError:  # no scores of classes: there is nothing to compare, and the replay goes on
            now.now[message.call, message.leaf] = np.zeros(0, np.int64)

    def pack(self, now: _Pass) -> dict[str, Any]:
        """The predictions of a tag's current pass and of the pass before."""
        before = None if now.before is None else _listed(now.before)
        return {"at": now.counters(), "before": before, "now": _listed(now.now)}

    def unpack(self, told: Mapping[str, Any]) -> _Pass:
        """The inverse of `pack`."""
        one = _Pass(*told["at"])
        one.before = None if told["before"] is None else _by_batch(told["before"])
        one.now = _by_batch(told["now"])
        return one

    def numbers(self, over: _Pass) -> tuple[float, ...]:
        """The churn of a pass; empty for the first pass."""
        if over.before is None:
            return ()
        changed = total = 0
        for batch, classes in over.now.items():
            earlier = over.before.get(batch)
            if earlier is not None and earlier.shape == classes.shape:
                changed, total = changed + int(np.count_nonzero(earlier != classes)), total + classes.size
        return (changed / total if total else math.nan,)


def _listed(batches: Mapping[tuple[int, str], NDArray[np.int64]]) -> list[dict[str, Any]]:
    return [{"call": call, "leaf": leaf, "classes": torch.from_numpy(one)} for (call, leaf), one in batches.items()]


def _by_batch(state: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], NDArray[np.int64]]:
    return {(one["call"], one["leaf"]): one["classes"].numpy() for one in state}
