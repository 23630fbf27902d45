"""`Filters`: which messages of a trace are replayed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tracer.errors import UnknownNameError, did_you_mean
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG, KINDS
from tracer.messaging.subscription import passes
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Selection, Steps
from tracer.trace.streams import StreamInfo


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of `tracer.replay`; a filter that is None lets all messages pass.

    Examples
    --------
    >>> Filters.of(kinds="loss", steps=(0, 10)).kinds
    ('loss',)
    """

    kinds: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    steps: Steps | None = None

    @classmethod
    def of(
        cls,
        kinds: str | Iterable[str] | None = None,
        modules: str | Iterable[str] | None = None,
        steps: Steps | None = None,
        tags: str | Iterable[str] | None = None,
    ) -> Filters:
        """Make filters from single names or several names."""
        return cls(_tuple(kinds), _tuple(modules), _tuple(tags), steps)

    def part_of(self, reader: TraceReader) -> TraceReader:
        """A reader of the steps that pass and of the step after them, which a derived update needs.

        Raises
        ------
        CaptureError
            If the steps are no range.
        """
        chosen = Selection.of(steps=self.steps)
        return reader.within(chosen.start, None if chosen.stop is None else chosen.stop + 1)

    @property
    def narrow(self) -> bool:
        """Whether there is a filter on streams."""
        return (self.kinds, self.modules, self.tags) != (None, None, None)

    def let_through(self, stream: StreamInfo) -> bool:
        """Whether a stream passes."""
        return passes(stream, self.kinds, self.modules, self.tags)

    def let_through_as(self, kind: str, stream: StreamInfo) -> bool:
        """Whether messages of `kind` pass if they are derived from a stream of another kind."""
        return (self.kinds is None or kind in self.kinds) and passes(stream, None, self.modules, self.tags)

    def check(self, reader: TraceReader) -> None:
        """Refuse kinds and tags that are neither in the trace nor known; a tag with a wildcard may match nothing.

        Raises
        ------
        UnknownNameError
            If there is such a kind or tag.
        """
        if not self.kinds and not self.tags:
            return
        recorded_kinds, recorded_tags = reader.names
        if self.kinds:
            known = {*KINDS, *recorded_kinds}
            for kind in self.kinds:
                if kind not in known:
                    raise UnknownNameError.of("kind", kind, known)
        if self.tags:
            known = {DEFAULT_TAG, EVAL_TAG, *recorded_tags}
            for tag in self.tags:
                if tag not in known and not set("!*?[").intersection(tag):
                    raise UnknownNameError.of("tag", tag, known)

    def meant_modules(self, streams: Iterable[StreamInfo]) -> str:
        """Suggestions for module patterns that match no module, as the end of a sentence."""
        known = {stream.module for stream in streams if stream.module is not None} if self.modules else set()
        return "".join(
            did_you_mean(pattern, known).replace("did you mean", f"for module {pattern!r}, did you mean")
            for pattern in self.modules or ()
            if not any(fnmatchcase(module, pattern) for module in known)
        )


def _tuple(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return None if value is None else (value,) if isinstance(value, str) else tuple(value)
