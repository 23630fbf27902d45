"""Streams: the messages of a kind about one module or parameter, and who asks for them."""

from __future__ import annotations

from typing import NamedTuple

from tracer.messaging.bus import Receiver
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.observing.capture import Capture

_BY_EPOCH = frozenset(kind for kind, entry in KINDS.items() if entry.clock == "epoch")


class StreamKey(NamedTuple):
    """What the messages of a stream have in common, one tensor of an output apart from another."""

    kind: str
    module: str | None
    tag: str
    leaf: str


class Stream:
    """Who asks for the messages of a kind about one module or parameter, and by which capture it is observed.

    Attributes
    ----------
    asked : bool
        Whether somebody asks for it in some step, and a capture allows it.
    by_epoch : bool
        Whether its clock is that of epochs.
    """

    __slots__ = ("_answer", "_asking", "_capture", "_clock", "_dated", "_name", "asked", "by_epoch")

    def __init__(self, kind: str, path: str | None, tag: str, capture: Capture | None, asking: list[Receiver]) -> None:
        self._name = kind, path, tag
        self._capture = capture
        self._asking = asking
        self._dated = kind in KINDS and KINDS[kind].clock == "global_step" and tag == DEFAULT_TAG
        self._clock = -1  # the last step (or epoch) for which it was asked whether it is wanted
        self._answer: Capture | None = None
        self.asked = capture is not None and bool(asking)
        self.by_epoch = kind in _BY_EPOCH

    def wanted(self, clock: int) -> Capture | None:
        """The capture by which to observe it in this step (or epoch); None if nobody wants it."""
        if clock != self._clock:  # asked several times in each step
            answer, capture = None, self._capture
            if capture is not None and not (self._dated and capture.next_step(clock) != clock):
                for one in self._asking:
                    if one.wants(*self._name, clock):
                        answer = capture
                        break
            self._clock, self._answer = clock, answer  # together, because the question may be interrupted
        return self._answer
