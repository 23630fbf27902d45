"""Renders a run as one self-contained HTML file, and its panels of words: layers, rules, provenance, what to ask."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.models import Range1d
from bokeh.resources import Resources
from markupsafe import Markup

from analyze.rules.coverage import in_table
from analyze.seeing.check import Checked
from analyze.seeing.commands import next_commands
from analyze.seeing.curves import SELECTED, arrays_panel, curves_panel, lines_of, loss_panel, losses, rates_panel
from analyze.seeing.gathered import Gathered, Layer, layers
from analyze.seeing.heat import heat_panel, zoom_panel
from analyze.seeing.panel import SLOTS, Panel, number, part, sentences, text
from analyze.seeing.runs import RunFacts, Runs, facts_of_losses
from analyze.seeing.similarity import similarity_panel
from tracer.shown import printable

POLICY = (
    "default-src 'none'; script-src 'unsafe-eval' {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; connect-src {connects}; base-uri 'none'; form-action 'none'"
)
"""Only scripts with these digests run, and only `connects` may be contacted. Bokeh needs eval for its callbacks."""


def page(found: Gathered, references: Sequence[Gathered] = ()) -> str:
    """The self-contained page of a run.

    Parameters
    ----------
    found : Gathered
    references : sequence of Gathered
        Runs to compare with: the losses of all are drawn, and the heat map compares with the first.

    Returns
    -------
    str
        HTML.

    Raises
    ------
    TracerError
        If Bokeh is not installed.
    """
    # a page with a server may be asked for histograms later, this page may not
    panels = [
        one for one in panels_of(found, references, steps_of(found)) if one.name != "arrays" or one.picture is not None
    ]
    pictures = {one.name: one.picture for one in panels if one.picture is not None}
    script, places = components(pictures, wrap_script=False) if pictures else ("", {})
    return html_of(found, references, panels, places, script)


def steps_of(found: Gathered) -> Range1d:
    """The range of steps that all pictures over the whole run share, so that a zoom moves all of them."""
    start, end = bounds_of(found)
    return Range1d(start, end, bounds=(start, end), name="steps")


def bounds_of(found: Gathered) -> tuple[float, float]:
    """The first and last step of a run, with a margin."""
    first, last = found.span or (0, 0)
    margin = max(0.5, (last - first) * 0.01)
    return first - margin, last + margin


def panels_of(
    found: Gathered, references: Sequence[Gathered], steps: Range1d, closer: Gathered | None = None
) -> list[Panel]:
    """The panels of a run.

    Parameters
    ----------
    found : Gathered
    references : sequence of Gathered
    steps : bokeh.models.Range1d
        See `steps_of`.
    closer : Gathered, optional
        A part of the run in more detail, which the pictures over the steps show instead of `found`.
    """
    order = layers(found)
    listed = [one for one in order if any(text for text, _, kind in _cells(one) if kind != "name")]
    shown = found if closer is None else closer
    packs, known = lines_of(shown, order)
    return [
        loss_panel(shown, references, steps),
        *([runs_panel([found, *references])] if references else []),
        rates_panel(shown, steps),
        heat_panel(shown, references[0] if references else None, order, steps),
        zoom_panel(found, order),
        layers_panel(listed or order, set(known), known[:SELECTED]),
        rules_panel(found.checked),
        curves_panel(shown, packs, steps),
        arrays_panel(shown, order, steps),
        similarity_panel(shown, order),
        provenance_panel(found),
    ]


def data_of(panels: Iterable[Panel]) -> dict[str, Any]:
    """The panels' data for the page's script; names are escaped as in the page's text."""
    return {one.name: _printable(one.data) for one in panels if one.data}


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {key: _printable(one) for key, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list | tuple) else value


def html_of(
    found: Gathered,
    references: Sequence[Gathered],
    panels: Sequence[Panel],
    places: Mapping[str, str],
    script: str,
    *,
    connects: str = "'none'",
) -> str:
    """Assemble the HTML of a page.

    Parameters
    ----------
    found : Gathered
    references : sequence of Gathered
    panels : sequence of Panel
    places : mapping of str to str
        For each panel with a picture, the HTML element that holds the picture.
    script : str
        The script that draws the pictures.
    connects : str
        The ``connect-src`` of the content security policy.
    """
    own = files("analyze.seeing")
    library = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw) if places else ""
    scripts = [_inert(one) for one in (library, script, own.joinpath("page.js").read_text("utf-8")) if one]
    document = part(
        "document",
        name=_name(found),
        verdict=found.checked.verdict,
        policy=POLICY.format(scripts=" ".join(map(_digest, scripts)), connects=connects),
        css=own.joinpath("page.css").read_text("utf-8"),
        header=header_of(found, references),
        panels=panels,
        places=places,
        span=found.span or (0, 0),
        live=connects != "'none'",
        data=inert_json(data_of(panels)),
        scripts=scripts,
    )
    return f"<!DOCTYPE html>\n{document}\n"


def _name(found: Gathered) -> str:
    return Path(found.checked.trace).name


def header_of(found: Gathered, references: Sequence[Gathered]) -> str:
    """The verdict, problems of the trace, and the extent of the run, as HTML."""
    severity = found.checked.severity
    lines = [f"{_name(found)}: {_extent(found)}; the run is {found.info['status']}"]
    if references:
        lines.append(f"Compared with {', '.join(map(_name, references))}")
    warnings = [*([found.damage] if found.damage else []), *found.info["problems"]]
    warnings += [f"{_name(one)}: {one.damage}" for one in references if one.damage]
    if found.damage:
        warnings.append("This page shows what could be read")
    verdict = found.checked.verdict.removeprefix(f"{severity}: ")
    return part("heading", severity, verdict, warnings, [*lines, *found.remarks], next_commands(found.checked))


def _extent(found: Gathered) -> str:
    if found.span is None or found.checked.span is None:
        return "it holds no step of training"
    first, last = found.checked.span
    if first == last:
        return f"step {first}, which was recorded; {len(found.layers):,} layers"
    recorded = found.checked.steps
    told = "all of them recorded" if recorded == last - first + 1 else f"of which {recorded:,} were recorded"
    return f"steps {first} to {last}, {told}; {len(found.layers):,} layers"


def _inert(script: str) -> str:
    """A script that cannot end its ``<script>`` element early."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def inert_json(value: Any) -> str:
    """JSON that contains no HTML markup."""
    return (
        json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


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


def runs_panel(runs: Sequence[Gathered]) -> Panel:
    """The panel of several runs: their settings that differ, and what came of them."""
    rows = Runs(map(_facts_of, runs)).rows()
    shown = [[number(cell) if isinstance(cell, float) else text(cell) for cell in row.values()] for row in rows]
    return Panel(name="runs", title="Runs", before=part("table_of", list(rows[0]), shown))


def _facts_of(run: Gathered) -> RunFacts:
    course = next(iter(losses(run).values()), None)
    known = {} if course is None else dict(zip(*(of.tolist() for of in course.points()[:2]), strict=True))
    return facts_of_losses(run.checked.trace, run.info, known)


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
