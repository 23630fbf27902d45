"""The subscribers that a batch runs on every trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from analyze import registry
from tracer.errors import CaptureError, MessageError
from tracer.messaging.receiver import Scope, describe, refusal
from tracer.messaging.subscriber import Subscriber

KNOWN_SCOPES: Final = ("message", "stream", "step")
"""The scopes that let the work on a trace be cut."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A subscriber that runs on every trace, with the subscribers whose answers it takes.

    Attributes
    ----------
    spec : str
    chain : tuple of str
        The specs of the producers, and last that of the subscriber itself.
    scope : Scope
        The widest in the chain.
    identity : list
        The classes of the chain and their versions.
    receivers : tuple of Subscriber
        The subscribers of the chain, used for planning only: they receive no messages.
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
    """A question for each subscriber; the chain has the other given subscribers whose answers it takes.

    Raises
    ------
    MessageError
        If a subscriber is not given as text: each part of the work makes its own instance.
    UnknownNameError, TracerError
        What `analyze.parse` raises.
    CaptureError
        If there is no subscriber, if a subscriber needs the model, if subscribers need each other in a circle, or if
        two produce what a third needs.
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
    """A subscriber, preceded by its producers; `consumers` are the subscribers that take its answers."""
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
    """The narrowest scope that includes all scopes of a chain."""
    found = {scope if scope in KNOWN_SCOPES else "everything" for scope in scopes} - {"message"}
    if not found:
        return "message"
    return "stream" if found == {"stream"} else "step" if found == {"step"} else "everything"
