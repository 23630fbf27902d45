"""The length of the path that a weight has travelled, with all its turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack, final

from analyze.metrics.elementwise.norm import norm
from analyze.metrics.metric import OneNumber, Where
from analyze.metrics.streams import Stream, packed, stream_of, unpacked
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array


def path_length(updates: Iterable[Array]) -> float:
    """The sum of the Euclidean norms of updates.

    Parameters
    ----------
    updates : iterable of arrays

    Returns
    -------
    float
        In the unit of the data; 0 without updates.

    Examples
    --------
    >>> path_length([[3.0, 4.0], [0.0, -2.0]])
    7.0
    """
    length = 0.0
    for update in updates:
        length += norm(update)
    return length


@final
class PathLength(OneNumber):
    r"""Length of the path of each weight so far: :math:`\sum_{s \le t} \|W_{s+1} - W_s\|_2`.

    Answers ``{kind}_path_length``: a float64 scalar, in the unit of the data, for each message. Over the distance from
    initialisation it says how straight the training goes: 1 is a straight line.

    Parameters
    ----------
    kind : str
        The kind of the updates, with data of any shape.
    tag, subsample, modules
        As in `tracer.Subscription`; with `subsample` it is the sum of the updates that were taken, not of all.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`L_t = L_{t-1} + \|u_t\|_2`.
    *Needs*: the updates of every step; a replay derives them from consecutive weights.
    *Cost*: one pass over the data, O(n).
    *Invariant to* the order and signs of the elements; scales with the data.
    *Edge values*: NaN from the first NaN on, infinity from the first infinity on. Never raises during a replay.
    *Memory*: one number for each stream; part of `state_dict`, and two of them can be merged: the length of a path is
    that of its parts.
    *Source*: M. Raghu et al., "On the Expressive Power of Deep Neural Networks", arXiv:1606.05336, section 2.1, and
    others measure lengths of paths so.
    *Formerly*: the running sum of cockpit ``UpdateSize``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> path, said = PathLength(), []
    >>> for step, update in enumerate([[3.0, 4.0], [0.0, -2.0]]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0)
    ...     said += path.compute(ModuleMessage(kind="weight_updates", data=torch.tensor(update), **where))
    >>> [(one.kind, one.global_step, float(one.data)) for one in said]
    [('weight_updates_path_length', 0, 5.0), ('weight_updates_path_length', 1, 7.0)]
    """

    name = "path_length"
    scope = "stream"
    spoiled_by = ("elements", "reduce")
    mergeable = True
    invariances = ("order", "sign")

    def __init__(self, kind: str = "weight_updates", **where: Unpack[Where]) -> None:
        super().__init__(kind, f"{kind}_path_length", **where)
        self._lengths: dict[Stream, float] = {}

    def value(self, message: Message) -> float:
        """The length of the stream's path so far."""
        stream = stream_of(message)
        length = self._lengths[stream] = self._lengths.get(stream, 0.0) + norm(as_array(message.data))
        return length

    def state_dict(self) -> dict[str, Any]:
        """The length of each stream's path so far."""
        return {"lengths": packed({stream: {"length": length} for stream, length in self._lengths.items()})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._lengths = {stream: one["length"] for stream, one in unpacked(state["lengths"]).items()}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the paths of another metric's state."""
        for stream, one in unpacked(state["lengths"]).items():
            self._lengths[stream] = self._lengths.get(stream, 0.0) + one["length"]
