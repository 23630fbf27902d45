"""The subscribers that a batch asks of every trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from analyze import registry
from tracer.errors import CaptureError, MessageError
from tracer.messaging.objective import refusal
from tracer.messaging.receiver import Scope, describe
from tracer.messaging.subscriber import Subscriber

KNOWN_SCOPES: Final = ("message", "stream", "step")
"""The scopes that let the work on a trace be cut."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A subscriber that is asked of every trace, with the subscribers whose answers it takes.

    Attributes
    ----------
    spec : str
    chain : tuple of str
        Producers first, itself last.
    scope : Scope
        The widest in the chain.
    identity : list
        Which classes answer, and in which version.
    receivers : tuple of Subscriber
        The subscribers of the chain, for planning only: they receive no messages.
    """

    spec: str
    chain: tuple[str, ...]
    scope: Scope
    identity: list[list[str]]
    receivers: tuple[Subscriber, ...]

    def document(self) -> dict[str, Any]:
        """The question as JSON values, for manifests."""
        return {"spec": self.spec, "chain": list(self.chain), "scope": self.scope, "identity": self.identity}


def questions(specs: Iterable[str]) -> list[Question]:
    """The questions, one for each subscriber; its chain has those of the others whose answers it takes.

    Raises
    ------
    MessageError
        If a subscriber is not given as text: each part of the work makes its own instance.
    UnknownNameError, TracerError
        What `analyze.parse` raises.
    CaptureError
        If there is no subscriber, if one needs the model, if subscribers need each other in a circle, or if two produce
        what a third needs.
    """
    made: dict[str, Subscriber] = {}
    for spec in specs:
        if not isinstance(spec, str):
            raise MessageError(
                "a batch takes subscribers as text, because each part of the work makes its own: write 'norm:order=1' "
                f"or 'path/to/file.py:{type(spec).__name__}', and not an instance"
            )
        made.setdefault(registry.canonical(spec), registry.parse(spec))
    if not made:
        raise CaptureError("a batch needs at least one subscriber, but got none")
    refused = [refusal(describe(one)) for one in made.values() if one.needs_model]
    if refused:
        raise CaptureError("; ".join(refused))
    asked = []
    for spec in made:
        chain = _chain(spec, made, ())
        asked.append(
            Question(
                spec=spec,
                chain=chain,
                scope=_widest(made[one].scope for one in chain),
                identity=[[one, *registry.origin(one)] for one in chain],
                receivers=tuple(made[one] for one in chain),
            )
        )
    return asked


def _chain(spec: str, made: Mapping[str, Subscriber], consumers: tuple[str, ...]) -> tuple[str, ...]:
    """A subscriber, after those whose answers it takes; `consumers` are those that take its answers."""
    if spec in consumers:
        circle = ", ".join(consumers[consumers.index(spec) :])
        raise CaptureError(f"these need each other's answers in a circle: {circle}")
    chain: dict[str, None] = {}
    for kind in sorted(made[spec].needs):
        producers = [other for other, one in made.items() if other != spec and kind in one.produces]
        if len(producers) > 1:
            raise CaptureError(f"{spec} needs {kind}, which {' and '.join(producers)} produce: ask one of them")
        for producer in producers:
            chain.update(dict.fromkeys(_chain(producer, made, (*consumers, spec))))
    return (*chain, spec)


def _widest(scopes: Iterable[str]) -> Scope:
    """The narrowest scope that includes all those of a chain."""
    found = {scope if scope in KNOWN_SCOPES else "everything" for scope in scopes} - {"message"}
    if not found:
        return "message"
    return "stream" if found == {"stream"} else "step" if found == {"step"} else "everything"
