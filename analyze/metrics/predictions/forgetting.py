"""Forgetting events: a datapoint that was classified correctly no longer is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.predictions.accuracy import IGNORED
from analyze.metrics.predictions.classification_report import Per, check_per, correctness
from analyze.metrics.steps import OfSteps
from analyze.metrics.streams import At, restored, stored
from tracer.errors import MessageError
from tracer.messaging.messages import Message, MessageBundle
from tracer.numbers.arrays import Array, as_array


class Forgotten(NamedTuple):
    """The result of `forgetting`; as a number it is the mean number of forgetting events."""

    events: NDArray[np.int64]
    unforgettable: float
    unlearned: float

    def __float__(self) -> float:
        return float(self.events.mean()) if self.events.size else math.nan


def forgetting(correct: Array) -> Forgotten:
    """How often each datapoint was forgotten.

    Parameters
    ----------
    correct : array (t, n)
        Whether each of n datapoints was classified correctly, at t presentations one after another; 1, 0, or -1 for
        one that was not presented.

    Returns
    -------
    Forgotten
        ``events`` (n,), how often correct was followed by incorrect; ``unforgettable``, the share of datapoints that
        were learned and never forgotten; ``unlearned``, the share that never were correct. Shares are of those that
        were presented.

    Raises
    ------
    MessageError
        If `correct` has not two axes.

    Examples
    --------
    >>> found = forgetting([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 0]])
    >>> found.events.tolist(), found.unforgettable, found.unlearned, float(found)
    ([2, 0, 0, 0], 0.5, 0.25, 0.5)
    """
    correct_tn = as_array(correct)
    if correct_tn.ndim != 2:
        raise MessageError(f"forgetting needs correctness of shape (t, n), not {correct_tn.shape}")
    learning = _Learning(correct_tn.shape[1])
    slots = np.arange(correct_tn.shape[1])
    for correct_n in correct_tn:
        learning.present(slots, correct_n.astype(np.int8))
    unforgettable, unlearned = _shares([learning])
    return Forgotten(learning.events, unforgettable, unlearned)


class _Learning:
    """For each datapoint, by slot: the last correctness (-1: none), whether it was ever correct, its events."""

    def __init__(self, size: int = 0) -> None:
        self.last = np.full(size, -1, np.int8)
        self.learned = np.zeros(size, np.bool_)
        self.events = np.zeros(size, np.int64)

    def grow(self, size: int) -> None:
        more = size - len(self.last)
        if more > 0:
            self.last = np.concatenate([self.last, np.full(more, -1, np.int8)])
            self.learned = np.concatenate([self.learned, np.zeros(more, np.bool_)])
            self.events = np.concatenate([self.events, np.zeros(more, np.int64)])

    def present(self, slots: NDArray[np.int64], correct: NDArray[np.int8]) -> int:
        """Record one presentation; return how many datapoints were forgotten."""
        seen = correct >= 0
        slots, correct = slots[seen], correct[seen]
        forgotten = (self.last[slots] == 1) & (correct == 0)
        self.events[slots[forgotten]] += 1
        self.learned[slots[correct == 1]] = True
        self.last[slots] = correct
        return int(np.count_nonzero(forgotten))

    def counts(self, order: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.int64]:
        """The events of each datapoint that was presented, by slot or in `order`; -1 if it never was correct."""
        return np.where(self.learned, self.events, -1)[order][self.last[order] >= 0]


def _shares(learnings: list[_Learning]) -> tuple[float, float]:
    counts = np.concatenate([np.zeros(0, np.int64), *(one.counts() for one in learnings)])
    if not counts.size:
        return math.nan, math.nan
    return float(np.count_nonzero(counts == 0) / counts.size), float(np.count_nonzero(counts < 0) / counts.size)


@dataclass
class _Tag(At):
    """The datapoints of one tag, and the forgetting events of its current pass."""

    forgotten: int = 0
    fits: bool = True
    batches: dict[tuple[int, str], _Learning] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)


@final
class Forgetting(OfSteps[_Tag]):
    r"""Forgetting events: :math:`\sum_i [\mathrm{correct}_i^{(t-1)}]\,[\neg\,\mathrm{correct}_i^{(t)}]`.

    Answers for each pass, as soon as a later pass of that tag begins or the run ends, float64 scalars:
    ``{kind}_forgotten``, how many datapoints this pass showed to be forgotten; ``{kind}_forgetting_events``, the mean
    number of forgetting events of a datapoint so far; ``{kind}_unforgettable`` and ``{kind}_unlearned``, the shares of
    the datapoints that were learned and never forgotten, and that never were correct, so far. At the end
    ``{kind}_forgetting_counts``, int64 (n,): the events of each datapoint, -1 if it was never learned.

    Parameters
    ----------
    kind : str
        The kind of the outputs, of shape (n, c) or any other that `accuracy` takes.
    labels : str
        The kind of the labels.
    ids : str or None
        A kind with an integer for each datapoint of a batch: ``"sample_ids"``, or one that the training loop logs once
        after each batch (``run.log("rows", rows)``). None knows a datapoint by its batch and its row, which is right
        for passes over the same datapoints in the same order: a probe's, or an evaluation that does not shuffle.
    per : {"pass", "epoch"}
        What one answer covers: all forward passes of one tag at one global step, or of one tag in one epoch (for
        ``tag=default,ids=sample_ids``, which is how Toneva et al. count).
    ignore_index : int
        The class index that is not counted.
    tag, subsample
        As in `tracer.Subscription`; by default every tag but that of training passes.

    Raises
    ------
    MessageError
        If two of the kinds are the same, or a parameter is out of its range.

    Notes
    -----
    *Formula*: an event is a presentation of a datapoint that is classified incorrectly after one that was correct.
    *Needs*: outputs and labels of the same pass; and to know which datapoint is which, see `ids`.
    *Cost*: O(n c) for n datapoints and c classes.
    *Invariant to* an order of the datapoints that is the same at every pass (any order, with `ids`), up to the order of
    the counts at the end.
    *Edge values*: NaN if outputs, labels and ids of a batch do not fit each other. A batch of another size than before
    begins anew. Never raises during a replay.
    *Memory*: for each datapoint whether it was correct, ever correct, and the number of its events; part of
    `state_dict`.
    *Source*: M. Toneva et al., "An Empirical Study of Example Forgetting during Deep Neural Network Learning",
    arXiv:1812.05159, section 3.

    Examples
    --------
    >>> import torch
    >>> from tracer import MessageBundle, NetworkMessage
    >>> forgetting, said = Forgetting(), []
    >>> for step, output in enumerate([[[2.0, 0.0], [0.0, 2.0]], [[0.0, 2.0], [0.0, 2.0]]]):
    ...     bundle = MessageBundle(["network_output", "input_labels"])
    ...     where = dict(global_step=step, train_step=step, epoch=0, tag="probe")
    ...     bundle.add(NetworkMessage(kind="network_output", data=torch.tensor(output), **where))
    ...     bundle.add(NetworkMessage(kind="input_labels", data=torch.tensor([0, 1]), **where))
    ...     said += forgetting.compute(bundle)
    >>> [(one.kind, one.data.tolist()) for one in forgetting.conclude()][:2]
    [('network_output_forgotten', 1.0), ('network_output_forgetting_events', 0.5)]
    """

    name = "forgetting"
    gathered = _Tag
    stored_as = "tags"
    scope = "stream"
    same_inputs = True
    invariances = ("rows",)

    def __init__(
        self,
        kind: str = "network_output",
        *,
        labels: str = "input_labels",
        ids: str | None = None,
        per: Per = "pass",
        ignore_index: int = IGNORED,
        tag: str | None = "!default",
        subsample: int = 1,
    ) -> None:
        check_per(per)
        whats = ("forgotten", "forgetting_events", "unforgettable", "unlearned", "forgetting_counts")
        kinds = (kind, labels) if ids is None else (kind, labels, ids)
        super().__init__(kinds, [f"{kind}_{what}" for what in whats], tag=tag, subsample=subsample)
        self.kind, self.labels, self.ids, self.per, self.ignore_index = kind, labels, ids, per, ignore_index

    def is_over(self, now: _Tag, bundle: MessageBundle) -> bool:
        """Whether a batch begins another pass (or epoch, by `per`)."""
        return now.epoch != bundle.epoch if self.per == "epoch" else super().is_over(now, bundle)

    def following(self, over: _Tag, bundle: MessageBundle) -> _Tag:
        """The same record, with its datapoints, but without events of the new pass."""
        over.forgotten, over.fits = 0, True
        return over

    def hear(self, now: _Tag, bundle: MessageBundle) -> None:
        """Record one batch."""
        now.move_to(bundle)
        try:
            now.forgotten += self._present(now, bundle)
        except MessageError:  # the shapes do not fit: this pass has NaN for answers, and the replay goes on
            now.fits = False

    def _present(self, one: _Tag, bundle: MessageBundle) -> int:
        correct = correctness(bundle[self.kind], bundle[self.labels], self.ignore_index)
        if self.ids is None:
            batch = bundle.call, bundle.leaf
            learning = one.batches.get(batch)
            if learning is None or len(learning.last) != len(correct):
                learning = one.batches[batch] = _Learning(len(correct))
            return learning.present(np.arange(len(correct)), correct)
        ids = as_array(bundle[self.ids]).reshape(-1)
        if ids.shape != correct.shape or ids.dtype.kind not in "biu":
            raise MessageError(f"{len(correct)} labels need as many integers as ids, not {ids.dtype} {ids.shape}")
        slots = np.array([one.slots.setdefault(known, len(one.slots)) for known in ids.tolist()], dtype=np.int64)
        learning = one.batches.setdefault((0, ""), _Learning())
        learning.grow(len(one.slots))
        return learning.present(slots, correct)

    def conclude(self) -> Iterator[Message]:
        """Answer for the last pass of each tag, and with the counts of every datapoint."""
        tags, self.steps = self.steps, {}
        for tag, last in tags.items():
            yield from self.answers(tag, last)
            counts = [learning.counts() for _, learning in sorted(last.batches.items())]
            if last.slots and counts:  # order by id; slots are in the order of first presentation
                counts = [last.batches[0, ""].counts(np.argsort(np.array(list(last.slots)), kind="stable"))]
            all_counts = np.concatenate([np.zeros(0, np.int64), *counts])
            yield last.network_message(self.produces[4], tag, torch.from_numpy(all_counts))

    def pack(self, now: _Tag) -> dict[str, Any]:
        """The record of a tag as plain values and tensors."""
        batches = [
            {"call": call, "leaf": leaf, **stored(vars(learning))} for (call, leaf), learning in now.batches.items()
        ]
        told = {"forgotten": now.forgotten, "fits": now.fits, "ids": list(now.slots), "batches": batches}
        return {"at": now.counters(), **told}

    def unpack(self, told: Mapping[str, Any]) -> _Tag:
        """The inverse of `pack`."""
        one = _Tag(*told["at"])
        one.forgotten, one.fits = told["forgotten"], told["fits"]
        one.slots = {known: slot for slot, known in enumerate(told["ids"])}
        for batch in restored(told["batches"]):
            learning = one.batches[batch.pop("call"), batch.pop("leaf")] = _Learning()
            vars(learning).update(batch)
        return one

    def numbers(self, over: _Tag) -> list[float]:
        """The answers for a pass."""
        learnings = list(over.batches.values())
        counts = np.concatenate([np.zeros(0, np.int64), *(one.events[one.last >= 0] for one in learnings)])
        values = over.forgotten, float(counts.mean()) if counts.size else math.nan, *_shares(learnings)
        return [value if over.fits else math.nan for value in values]
