"""Which messages a replay reads: those that pass the filters, for its audience."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tracer.errors import CaptureError, UnknownNameError, did_you_mean
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG, KINDS
from tracer.messaging.receiver import Receiver, Scope, describe, refusal
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import passes
from tracer.trace.reader import TraceReader
from tracer.trace.rerun import rerun_of
from tracer.trace.streams import Selection, Steps, StreamInfo


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


class Audience:
    """The receivers of a replay.

    Parameters
    ----------
    receivers : sequence of Receiver

    Attributes
    ----------
    receivers : tuple of Receiver
        All of them.
    active : tuple of Receiver
        The receivers that ask for messages; passive ones only get what others ask for.
    asking : tuple of Receiver
        The receivers that decide what is read: the active ones, or all if none is active.
    produced, needed : set of str
        The kinds that the receivers answer with, and the kinds that they cannot work without.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self.receivers = tuple(receivers)
        self.active = tuple(one for one in self.receivers if not one.passive)
        self.asking = self.active or self.receivers
        self.produced = {kind for one in self.receivers for kind in one.produces}
        self.needed = {kind for one in self.receivers for kind in one.needs}

    def check(self, reader: TraceReader, streams: Iterable[StreamInfo]) -> None:
        """Refuse a trace that already holds a kind that a receiver produces.

        Raises
        ------
        CaptureError
            If the trace holds such a kind.
        """
        present = {stream.kind for stream in streams}
        for one in self.receivers:
            for kind in present.intersection(one.produces):
                raise CaptureError(
                    f"{describe(one)} produces {kind}, which {reader.path} already holds: read one or the other"
                )

    def refusals(self, reader: TraceReader, steps: Steps | None) -> list[str]:
        """A sentence, with what to type instead, about the receivers that need the model, which no replay has."""
        names = [describe(one) for one in self.receivers if one.needs_model]
        return [refusal(names, rerun_of(reader, steps))] if names else []

    def memories(self) -> dict[str, Scope]:
        """The scope of each subscriber that has a memory, by name.

        If subscribers of the same name differ in scope, the kind of the answers is appended to the name.
        """
        memory: dict[str, Scope] = {}
        for one in self.receivers:
            if isinstance(one, Subscriber) and one.scope != "message" and one.produces:
                name = describe(one)
                differs = memory.get(name, one.scope) != one.scope
                memory[f"{name} ({one.produces[0]})" if differs else name] = one.scope
        return memory

    def spoiled(self, streams: Sequence[StreamInfo]) -> list[str]:
        """A sentence for each subscriber that is made for whole tensors, but gets only parts of them."""
        sentences: list[str] = []
        for receiver in self.receivers:
            kept: dict[str, list[str]] = {}
            for stream in streams:
                if receiver.wants(stream.kind, stream.module, stream.tag, None) and not _for_data(
                    receiver, stream.kind
                ):
                    where = "the network" if stream.module is None else stream.module or "the root"
                    for how in sorted(set(stream.sampling or ()) & set(receiver.spoiled_by)):
                        reduction = (stream.sampling or {})[how] if how == "reduce" else None
                        if reduction is None:
                            kept.setdefault(f"only some elements of {stream.kind}", []).append(where)
                        elif reduction not in (describe(receiver), receiver.reduction):  # not a reduction made for it
                            kept.setdefault(f"only the {reduction} of {stream.kind}", []).append(where)
            sentences += [
                f"{describe(receiver)} is about whole tensors, but the trace holds {what} "
                f"({_several(list(dict.fromkeys(modules)))}): the answers are about what it holds"
                for what, modules in kept.items()
            ]
        return sentences


def _for_data(receiver: Receiver, kind: str) -> bool:
    """Whether a receiver takes messages of `kind`, a kind of statistics, in place of the data."""
    return any(one.stands_for(kind) not in (None, kind) for one in receiver.subscriptions)


def _several(modules: list[str]) -> str:
    """The names of the first three modules, and the number of the others."""
    names = ", ".join(modules[:3])
    return names if len(modules) <= 3 else f"{names} and {len(modules) - 3} more"
