"""Numbers the calls of modules, and the messages of streams, within each step."""

from __future__ import annotations

from typing import NamedTuple

from torch._C import _current_graph_task_id

from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.pytorch.autograd import backward_node, next_node

_RECOMPUTED = "recomputed"
"""Used in the place of a tag for calls that a compiled graph computes again, because it has a checkpoint of its own."""


class StreamKey(NamedTuple):
    """What the messages of a stream have in common, one tensor of an output apart from another."""

    kind: str
    module: str | None
    tag: str
    leaf: str


class Numbers:
    """Counts the calls of modules and the messages of streams, in each step.

    Calls without gradients may be the first forwards of reentrant checkpoints: their gradients come from the second
    forward, in the backward, and have the number of the first.
    """

    def __init__(self) -> None:
        self._messages: dict[StreamKey, int] = {}
        self._passes: dict[str, int] = {}  # aside, by tag
        self._calls: dict[str, dict[str, int]] = {}  # by tag and path
        # calls of this step without gradients, by path: torch's number of their place in the order of autograd, and
        # their own; which of them were computed again in a backward; and which one a module computed again last
        self._ungraded: dict[str, list[tuple[int, int]]] = {}
        self._recomputed: dict[tuple[int, int, str], int] = {}
        self._recalled: dict[str, int] = {}

    @property
    def counted(self) -> bool:
        """Whether anything was counted."""
        return bool(self._calls or self._messages)

    # -- steps ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Reset the counts of the training."""
        if self._calls or self._messages:
            self.forget(DEFAULT_TAG)

    def end_step(self) -> None:
        """Reset all counts except those of the training's messages, as a value may still be logged for this step."""
        if self._ungraded or self._recomputed:
            self._ungraded, self._recomputed = {}, {}
        if self._calls or self._passes:
            self._calls, self._passes = {}, {}
        if self._messages:
            self._messages = {stream: count for stream, count in self._messages.items() if stream.tag == DEFAULT_TAG}

    def forget(self, tag: str) -> None:
        """Reset the counts of a tag."""
        self._calls.pop(tag, None)
        self._passes.pop(tag, None)
        self._messages = {stream: count for stream, count in self._messages.items() if stream.tag != tag}

    # -- messages -------------------------------------------------------------------------------------------

    def message(self, stream: StreamKey, call: int | None) -> int:
        """The number of a stream's message in its step: `call`, or if that is None one more than the last number."""
        number = call if call is not None else self._messages.get(stream, 0)
        self._messages[stream] = number + 1
        return number

    def next_message(self, stream: StreamKey) -> int:
        """The number of the stream's next message."""
        return self._messages.get(stream, 0)

    # -- passes and calls -----------------------------------------------------------------------------------

    def count_pass(self, tag: str) -> int:
        """Count a pass aside that begins; returns its number among those of this tag in this step."""
        number = self._passes.get(tag, 0)
        self._passes[tag] = number + 1
        return number

    def calls_of(self, tag: str) -> dict[str, int]:
        """How many calls of each module were counted in passes of a tag, to go on counting in."""
        return self._calls.setdefault(tag, {})

    def call(self, path: str, tag: str) -> int:
        """The number of the next call of a module. Calls are numbered when they end."""
        calls = self._calls.get(tag)
        return 0 if calls is None else calls.get(path, 0)

    def count_call(self, path: str, tag: str) -> int:
        """Count a call that has ended; returns its number."""
        calls = self.calls_of(tag)
        call = calls.get(path, 0)
        calls[path] = call + 1
        return call

    def note_ungraded(self, path: str, call: int) -> None:
        """Note a call without gradients, which may be the first forward of a reentrant checkpoint."""
        self._ungraded.setdefault(path, []).append((next_node(), call))

    def first_call(self, path: str) -> int | None:
        """In the second forward of a reentrant checkpoint: which call of this step is computed again.

        Only this one's gradients will be seen. None in every other forward inside a backward. A checkpoint's node in
        the graph was numbered just before its first forward; the calls of that forward follow it.
        """
        first = self._ungraded.get(path)
        node = None if first is None else backward_node()
        if first is None or node is None:
            return None
        seen = self._recomputed.get((node, _current_graph_task_id(), path), 0)
        calls = [call for number, call in first if number > node]
        return calls[seen] if seen < len(calls) else None

    def recompute(self, path: str, first: int | None) -> None:
        """Note that a module has computed a call again; None: none that is of this step."""
        if first is None:
            self._recalled.pop(path, None)
            return
        key = backward_node() or 0, _current_graph_task_id(), path
        self._recomputed[key] = self._recomputed.get(key, 0) + 1
        self._recalled[path] = first

    def recalled(self, path: str) -> int:
        """The call that a module has just computed again.

        If it is none of this step, it is one of a graph's own checkpoint, which computes them again in their order.
        """
        first = self._recalled.get(path)
        return self.count_call(path, _RECOMPUTED) if first is None else first
