"""Renders a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyze.seeing.gathered import Gathered
from analyze.seeing.layers import layers
from analyze.seeing.panels import arrays, curves, heat, loss, provenance, rates, rules, similarity, table, zoom
from analyze.seeing.panels.panel import Panel
from analyze.seeing.words import text
from tracer.shown import printable

if TYPE_CHECKING:
    from bokeh.models import Range1d

POLICY = (
    "default-src 'none'; script-src 'unsafe-eval' {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; connect-src {connects}; base-uri 'none'; form-action 'none'"
)
"""Only scripts with these digests run, and only `connects` may be contacted. Bokeh needs eval for its callbacks."""

LIVE = (
    '<div class="bar live"><label id="follow-label" hidden><input type="checkbox" id="follow" checked> update'
    '</label> <span id="state" role="status">Connects to its server.</span></div>'
)
"""The bar of a page with a server: update or not, and the state of the connection."""


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
    from bokeh.embed import components

    panels = panels_of(found, references, steps_of(found))
    pictures = {one.name: one.picture for one in panels if one.picture is not None}
    script, places = components(pictures, wrap_script=False) if pictures else ("", {})
    return html_of(found, references, panels, places, script)


def steps_of(found: Gathered) -> Range1d:
    """The range of steps that all pictures over the whole run share, so that a zoom moves all of them."""
    from bokeh.models import Range1d

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
    shown = found if closer is None else closer
    packs, known = curves.lines_of(shown, order)
    return [
        loss.panel(shown, references, steps),
        rates.panel(shown, steps),
        heat.panel(shown, references[0] if references else None, order, steps),
        zoom.panel(found, order),
        table.panel(order, set(known), known[: curves.SELECTED]),
        rules.panel(found.checked),
        curves.panel(shown, packs, steps),
        arrays.panel(shown, order, steps),
        similarity.panel(shown, order),
        provenance.panel(found),
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
    from bokeh.resources import Resources

    own = files("analyze.seeing")
    library = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw) if places else ""
    scripts = [_inert(one) for one in (library, script, own.joinpath("page.js").read_text("utf-8")) if one]
    policy = POLICY.format(scripts=" ".join(map(_digest, scripts)), connects=connects)
    sections = "".join(_section(one, places.get(one.name, "")) for one in panels)
    links = "".join(f'<a href="#{one.name}">{text(one.title)}</a>' for one in panels)
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(_name(found))}: {text(found.checked.verdict)}</title>",
            f"<style>{own.joinpath('page.css').read_text('utf-8')}</style></head><body>",
            '<button type="button" id="theme" aria-label="Light or dark">◐</button>',
            f"<header>{header_of(found, references)}</header>",
            f'<nav aria-label="Parts of this page">{links}</nav>',
            _steps_bar(found) if places else "",
            LIVE if connects != "'none'" else "",
            f"<main>{sections}</main>",
            f'<script type="application/json" id="data">{inert_json(data_of(panels))}</script>',
            *(f"<script>{one}</script>" for one in scripts),
            "</body></html>\n",
        ]
    )


def _name(found: Gathered) -> str:
    return Path(found.checked.trace).name


def header_of(found: Gathered, references: Sequence[Gathered]) -> str:
    """The verdict, problems of the trace, and the extent of the run, as HTML."""
    severity = found.checked.severity
    badge = "" if severity is None else f'<span class="badge severity-{int(severity)}">{text(severity)}</span> '
    lines = [f"{text(_name(found))}: {_extent(found)}; the run is {text(found.info['status'])}."]
    if references:
        lines.append(f"Compared with {', '.join(text(_name(one)) for one in references)}.")
    lines += [f"{text(remark)}." for remark in found.remarks]
    warnings = [*([found.damage] if found.damage else []), *map(str, found.info["problems"])]
    warnings += [f"{_name(one)}: {one.damage}" for one in references if one.damage]
    if found.damage:
        warnings.append("This page shows what could be read")
    told = "".join(f'<p class="problem">{text(one)}.</p>' for one in warnings)
    verdict = text(found.checked.verdict.removeprefix(f"{severity}: "))
    return f"<h1>{badge}{verdict}</h1>{told}{''.join(f'<p>{line}</p>' for line in lines)}"


def _extent(found: Gathered) -> str:
    if found.span is None or found.checked.span is None:
        return "it holds no step of training"
    first, last = found.checked.span
    if first == last:
        return f"step {first}, which was recorded; {len(found.layers):,} layers"
    recorded = found.checked.steps
    told = "all of them recorded" if recorded == last - first + 1 else f"of which {recorded:,} were recorded"
    return f"steps {first} to {last}, {told}; {len(found.layers):,} layers"


def _steps_bar(found: Gathered) -> str:
    first, last = found.span or (0, 0)
    number = f'type="number" min="{first}" max="{last}" step="1"'
    return (
        '<div class="bar" role="group" aria-label="Steps shown in all pictures">'
        f'<label>Steps <input id="from" {number} value="{first}"></label>'
        f'<label>to <input id="to" {number} value="{last}"></label>'
        '<button type="button" id="earlier" aria-label="earlier steps">←</button>'
        '<button type="button" id="later" aria-label="later steps">→</button>'
        '<button type="button" id="closer" aria-label="fewer steps">+</button>'
        '<button type="button" id="farther" aria-label="more steps">−</button>'
        '<button type="button" id="all">all</button></div>'
    )


def _section(one: Panel, place: str) -> str:
    figure = ""
    if place:
        alternative = text(one.alternative)
        figure = (
            f'<figure{"" if one.picture is not None else " hidden"}><div class="picture" role="img" tabindex="0" '
            f'aria-label="{alternative}" id="{one.name}-picture">{place}</div>'
            f"<figcaption>{alternative}</figcaption></figure>"
        )
    return (
        f'<section id="{one.name}" aria-labelledby="{one.name}-title"><h2 id="{one.name}-title">{text(one.title)}</h2>'
        f'<div class="before">{one.before}</div>{figure}</section>'
    )


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
