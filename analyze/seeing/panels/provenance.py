"""Panel of the provenance of a run, and of what was not recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from analyze.seeing.gathered import Gathered
from analyze.seeing.panels.panel import Panel
from analyze.seeing.words import text

_TOLD = (
    *("run_id", "created", "model", "models", "certificate", "kinds"),
    *("process", "ranks", "attempt", "first_step", "launch"),
)
"""Header entries that are shown elsewhere or say nothing about provenance."""
LONG = 400
"""A longer value is cut at this many characters, and can be opened."""


def panel(found: Gathered) -> Panel:
    """The panel of a run's provenance."""
    rows = "".join(f"<dt>{text(name)}</dt><dd>{_cut(value)}</dd>" for name, value in facts(found.info))
    return Panel(name="provenance", title="Provenance", before=f"<dl>{rows}</dl>")


def facts(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) for each line about `TraceReader.info`. Header values may have any type."""
    header = info.get("header")
    header = dict(header) if isinstance(header, Mapping) else {}
    yield "trace", f"{info['path']} ({info['store']}, format version {info['version']})"
    yield "status", str(info["status"])
    ended = f", ended {info['ended']}" if info.get("ended") else ""
    yield "run", f"{info['run_id']}, started {info['created']}{ended}"
    if header.get("argv"):
        yield "command", _words(header.pop("argv"))
    for name in ("versions", "seeds", "seed", "arguments", "config"):
        if header.get(name) not in (None, "", [], {}):
            yield name, _words(header.pop(name))
    yield "holds", f"{info['messages']:,} messages in {info['streams']:,} streams, {info['bytes'] / 1e6:,.1f} MB"
    yield from _captures(header.pop("capture", None))
    if len(info["attempts"]) > 1:
        for one in info["attempts"]:
            yield f"attempt {one['attempt']}", f"from step {one['first_step']}: {one['status']}"
    yield from _certificates(info["attempts"])
    if info["dropped"]:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in info["dropped"].items())
        yield "dropped", f"{counts}: observed, and not recorded because too much waited for the disk"
    else:
        yield "dropped", "nothing"
    for problem in info["problems"]:
        yield "problem", problem
    yield from _notes(info["notes"])
    for name, value in header.items():
        if name not in _TOLD and value not in (None, "", [], {}):
            yield name, _words(value)


def _captures(captures: Any) -> Iterator[tuple[str, str]]:
    for one in captures if isinstance(captures, list) else [captures]:
        if isinstance(one, Mapping):
            told = [f"{name} {_words(value)}" for name, value in one.items() if value not in (None, "", [], {})]
            yield "sampling", "; ".join(told) or "everything"


def _certificates(attempts: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    any_of_them = False
    for attempt in attempts:
        certificate = attempt.get("certificate")
        if isinstance(certificate, Mapping):
            any_of_them = True
            yield "certificate", f"{certificate.get('verdict')}: {certificate.get('reason')}"
    if not any_of_them:
        yield "certificate", "none: it was not asked whether the recording changed the training"


def _notes(notes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for note in notes:
        for what, about in note.items():
            if what not in ("indices", "dropped"):
                yield f"noted: {what}", _words(about)


def _words(value: Any) -> str:
    """A JSON value on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    return str(value)


def _cut(value: str) -> str:
    """A value as HTML; the end of a very long one is folded."""
    if len(value) <= LONG:
        return text(value)
    return f"<details><summary>{text(value[:LONG])} …</summary>{text(value[LONG:])}</details>"
