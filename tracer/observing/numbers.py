"""Numbers the calls of modules, and the messages of streams, within each step."""

from __future__ import annotations

from typing import NamedTuple

from tracer.messaging.messages import DEFAULT_TAG


class StreamKey(NamedTuple):
    """Identifies a stream of messages; each tensor of a structure has its own leaf."""

    kind: str
    module: str | None
    tag: str
    leaf: str


class Numbers:
    """Counts the calls of modules and the messages of streams, in each step."""

    def __init__(self) -> None:
        self._messages: dict[StreamKey, int] = {}
        self._passes: dict[str, int] = {}  # passes outside the training, by tag
        self._calls: dict[str, dict[str, int]] = {}  # by tag and path

    @property
    def counted(self) -> bool:
        """Whether anything was counted."""
        return bool(self._calls or self._messages or self._passes)

    # -- steps ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Reset the counts of the training."""
        if self._calls or self._messages:
            self.forget(DEFAULT_TAG)

    def end_step(self) -> None:
        """Reset all counts except those of training messages, because a value may still be logged for this step."""
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
        """Number a stream's message in its step: `call`, or if None the last number plus one."""
        number = call if call is not None else self._messages.get(stream, 0)
        self._messages[stream] = number + 1
        return number

    def next_message(self, stream: StreamKey) -> int:
        """The number of the stream's next message."""
        return self._messages.get(stream, 0)

    # -- passes and calls -----------------------------------------------------------------------------------

    def count_pass(self, tag: str) -> int:
        """Count a pass outside the training; returns its number within its tag and step."""
        number = self._passes.get(tag, 0)
        self._passes[tag] = number + 1
        return number

    def calls_of(self, tag: str) -> dict[str, int]:
        """How many calls of each module were counted in passes of a tag. The caller may count on in the dictionary."""
        return self._calls.setdefault(tag, {})

    def take_calls(self, tag: str) -> dict[str, int]:
        """How many calls of each module were counted in passes of a tag, which are forgotten here."""
        return self._calls.pop(tag, {})

    def call(self, path: str, tag: str) -> int:
        """The number of the next call of a module. Calls are numbered when they end."""
        calls = self._calls.get(tag)
        return 0 if calls is None else calls.get(path, 0)

    def count_call(self, path: str, tag: str) -> int:
        """Count a call that has ended; returns its number."""
        calls = self._calls.get(tag)
        if calls is None:
            calls = self._calls[tag] = {}
        call = calls.get(path, 0)
        calls[path] = call + 1
        return call
