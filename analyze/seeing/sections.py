"""Panels without a picture: the table of layers, the rules, the provenance of a run, and the request of a metric."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from analyze.rules.coverage import in_table
from analyze.seeing.check import Checked
from analyze.seeing.gathered import Gathered, Layer
from analyze.seeing.panel import SLOTS, Panel, number, part, sentences

LAYERS = 300
"""How many layers the table has, at most: the most anomalous."""

COLUMNS = (
    ("layer", "in recorded order"),
    ("first odd step", "of a finding, else where the ratio was 8 times its past or an eighth of it, after 20 steps"),
    ("why", "the rule, or how far the ratio was from its past"),
    ("max ratio", "the greatest update/weight ratio"),
    ("at step", "where the ratio was greatest"),
    ("dead share", "units that gave zeros for a whole batch as recorded; the least of the last ten batches"),
    ("max gradient norm", "the greatest norm of the gradient of its weights"),
    ("not finite", "how many recorded numbers are NaN or infinite"),
)
"""The headings and their tooltips."""


def layers_panel(order: Sequence[Layer], drawn: Collection[str], selected: Collection[str]) -> Panel:
    """The panel of the table of layers.

    Parameters
    ----------
    order : sequence of Layer
        The most anomalous first.
    drawn : collection of str
        The layers whose curves are in the page.
    selected : collection of str
        The layers that are selected at first.
    """
    if not order:
        return sentences("layers", "Layers", "Nothing was recorded of any layer.")
    rows = [(layer, _tick(layer, drawn, selected), _cells(layer)) for layer in order[:LAYERS]]
    left_out = f"; of {len(order):,} layers the {LAYERS} most anomalous are listed" if len(order) > LAYERS else ""
    return Panel(name="layers", title="Layers", before=part("layers", COLUMNS, rows, SLOTS, left_out))


def _tick(layer: Layer, drawn: Collection[str], selected: Collection[str]) -> Markup:
    """The state of a layer's checkbox."""
    if layer.name not in drawn:
        return Markup(' disabled title="its curves are left out"')
    return Markup(" checked" if layer.name in selected else "")


def _cells(layer: Layer) -> list[tuple[str, object, str]]:
    """The cells of a layer: what is shown, the sort key (empty for a missing value), and the class."""
    return [
        (layer.name, layer.place, "name"),
        ("" if layer.odd is None else str(layer.odd), _key(layer.odd), ""),
        (layer.why, layer.why, "word"),
        (number(layer.ratio), _key(layer.ratio), ""),
        ("" if layer.ratio_step is None else str(layer.ratio_step), _key(layer.ratio_step), ""),
        ("" if layer.dead is None else f"{layer.dead:.0%}", _key(layer.dead), ""),
        (number(layer.gradient), _key(layer.gradient), ""),
        (f"{layer.bad:,}" if layer.bad else "", layer.bad, ""),
    ]


def _key(value: float | None) -> object:
    """The sort key of a number; NaN comes with infinity."""
    if value is None or math.isfinite(value):
        return "" if value is None else value
    return "-Infinity" if value < 0 else "Infinity"


SHOWN = 200
"""How many findings are listed, at most."""


def rules_panel(checked: Checked) -> Panel:
    """The panel of the findings and the rules."""
    columns, coverage = in_table(checked.coverage, (one.rule for one in checked.findings))
    more = len(checked.findings) - SHOWN
    told = part("rules", checked.findings[:SHOWN], more, columns, coverage, checked.unjudged)
    return Panel(name="rules", title="Rules", before=told)


_TOLD = (
    *("run_id", "created", "model", "models", "certificate", "kinds"),
    *("process", "ranks", "attempt", "first_step", "launch"),
)
"""Header entries that are shown elsewhere or say nothing about provenance."""
LONG = 400
"""A longer value is cut at this many characters, and can be opened."""


def provenance_panel(found: Gathered) -> Panel:
    """The panel of a run's provenance."""
    told = part("provenance", list(facts(found.info)), LONG)
    return Panel(name="provenance", title="Provenance", before=told)


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


def asking_panel(metrics: Mapping[str, str]) -> Panel:
    """The panel with which a user requests a metric.

    Parameters
    ----------
    metrics : mapping of str to str
        Name of a metric → what it needs that the trace lacks; empty if nothing.
    """
    return Panel(name="asking", title="Ask for a metric", before=part("asking", metrics))
