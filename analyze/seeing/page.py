"""A page that shows a run: one file of HTML that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from analyze.seeing.gathered import Gathered
from analyze.seeing.layers import Layer, layers
from analyze.seeing.panels import arrays, curves, heat, loss, provenance, rules, similarity, table, zoom
from analyze.seeing.panels.panel import Panel
from analyze.seeing.words import text

POLICY = (
    "default-src 'none'; script-src 'unsafe-eval' {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; base-uri 'none'; form-action 'none'"
)
"""No request leaves the page, and no script runs but those of these digests; Bokeh makes functions of its callbacks."""


def page(found: Gathered, references: Sequence[Gathered] = ()) -> str:
    """The page of a run.

    Parameters
    ----------
    found : Gathered
    references : sequence of Gathered
        Runs that it is compared with: the losses of all, and the heat map of the first.

    Returns
    -------
    str
        HTML.

    Raises
    ------
    TracerError
        If Bokeh is not installed.
    """
    order = layers(found)
    panels = _panels(found, references, order)
    return _html(found, references, panels, _data(found, order, panels))


def _panels(found: Gathered, references: Sequence[Gathered], order: Sequence[Layer]) -> list[Panel]:
    from bokeh.models import Range1d

    first, last = found.span or (0, 0)
    margin = max(0.5, (last - first) * 0.01)
    # the pictures over all steps share it, so that one zoom moves all
    steps = Range1d(first - margin, last + margin, bounds=(first - margin, last + margin), name="steps")
    packs, known = curves.lines_of(found, order)
    selected = known[: curves.SELECTED]
    asked = arrays.panel(found, order, steps)
    return [
        loss.panel(found, references, steps),
        heat.panel(found, references[0] if references else None, order, steps),
        zoom.panel(found, order),
        table.panel(order, set(known), selected),
        rules.panel(found.checked),
        curves.panel(found, packs, steps),
        *([] if asked is None else [asked]),
        *similarity.panels(found, order),
        provenance.panel(found),
    ]


def _data(found: Gathered, order: Sequence[Layer], panels: Iterable[Panel]) -> dict[str, Any]:
    """What the page's script reads."""
    first, last = found.span or (0, 0)
    return {"steps": [first, last]} | {one.name: one.data for one in panels if one.data}


def _html(found: Gathered, references: Sequence[Gathered], panels: Sequence[Panel], data: Mapping[str, Any]) -> str:
    from bokeh.embed import components
    from bokeh.resources import Resources

    pictures = {one.name: one.picture for one in panels if one.picture is not None}
    script, places = components(pictures, wrap_script=False) if pictures else ("", {})
    own = files("analyze.seeing")
    library = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw) if pictures else ""
    scripts = [_inert(one) for one in (library, script, own.joinpath("page.js").read_text("utf-8")) if one]
    policy = POLICY.format(scripts=" ".join(map(_digest, scripts)))
    name = Path(found.checked.trace).name
    sections = "".join(_section(one, places.get(one.name, "")) for one in panels)
    links = "".join(f'<a href="#{one.name}">{text(one.title)}</a>' for one in panels)
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(name)}: {text(found.checked.verdict)}</title>",
            f"<style>{own.joinpath('page.css').read_text('utf-8')}</style></head><body>",
            _header(found, references, name),
            f'<nav aria-label="Parts of this page">{links}</nav>',
            _steps_bar(found) if pictures else "",
            f"<main>{sections}</main>",
            f'<script type="application/json" id="data">{_inert_json(data)}</script>',
            *(f"<script>{one}</script>" for one in scripts),
            "</body></html>\n",
        ]
    )


def _header(found: Gathered, references: Sequence[Gathered], name: str) -> str:
    severity = found.checked.severity
    badge = "" if severity is None else f'<span class="badge severity-{int(severity)}">{text(severity)}</span> '
    lines = [f"{text(name)}: {_extent(found)}; the run is {text(found.info['status'])}."]
    if references:
        lines.append(f"Compared with {', '.join(text(Path(one.checked.trace).name) for one in references)}.")
    lines += [f"{text(remark)}." for remark in found.remarks]
    warnings = [*([found.damage] if found.damage else []), *map(str, found.info["problems"])]
    warnings += [f"{Path(one.checked.trace).name}: {one.damage}" for one in references if one.damage]
    if found.damage:
        warnings.append("This page shows what could be read")
    told = "".join(f'<p class="problem">{text(one)}.</p>' for one in warnings)
    verdict = text(found.checked.verdict.removeprefix(f"{severity}: "))
    return (
        '<header><button type="button" id="theme" aria-label="Light or dark">◐</button>'
        f"<h1>{badge}{verdict}</h1>{told}{''.join(f'<p>{line}</p>' for line in lines)}</header>"
    )


def _extent(found: Gathered) -> str:
    if found.span is None:
        return "it holds no step of training"
    first, last = found.span
    return f"steps {first} to {last}, of which {found.checked.steps:,} were recorded; {len(found.layers):,} layers"


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
    picture = ""
    if place:
        alternative = text(one.alternative)
        picture = (
            f'<figure><div class="picture" role="img" tabindex="0" aria-label="{alternative}" id="{one.name}-picture">'
            f"{place}</div><figcaption>{alternative}</figcaption></figure>"
        )
    return (
        f'<section id="{one.name}" aria-labelledby="{one.name}-title"><h2 id="{one.name}-title">{text(one.title)}</h2>'
        f"{one.before}{picture}{one.after}</section>"
    )


def _inert(script: str) -> str:
    """A script that does not end the element that it stands in."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _inert_json(value: Any) -> str:
    """JSON that is no markup wherever it stands."""
    return (
        json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
