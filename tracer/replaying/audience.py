"""`Audience`: the receivers of a replay, and what they ask for, need and produce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracer.errors import CaptureError
from tracer.messaging.objective import refusal
from tracer.messaging.receiver import Receiver, Scope, describe
from tracer.messaging.subscriber import Subscriber
from tracer.trace.reader import TraceReader
from tracer.trace.streams import StreamInfo


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

    def refusals(self, trace: object) -> list[str]:
        """A sentence, with the name of the trace, for each receiver that needs the model, which no replay has."""
        return [refusal(describe(one), trace) for one in self.receivers if one.needs_model]

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
