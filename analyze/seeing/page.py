"""Renders a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.models import Range1d
from bokeh.resources import Resources

from analyze.seeing.curves import SELECTED, arrays_panel, curves_panel, lines_of, loss_panel, rates_panel
from analyze.seeing.gathered import Gathered, layers
from analyze.seeing.heat import heat_panel, zoom_panel
from analyze.seeing.panel import Panel, part
from analyze.seeing.sections import layers_panel, provenance_panel, rules_panel
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
    panels = panels_of(found, references, steps_of(found))
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
    shown = found if closer is None else closer
    packs, known = lines_of(shown, order)
    return [
        loss_panel(shown, references, steps),
        rates_panel(shown, steps),
        heat_panel(shown, references[0] if references else None, order, steps),
        zoom_panel(found, order),
        layers_panel(order, set(known), known[:SELECTED]),
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
    return part("heading", severity, verdict, warnings, [*lines, *found.remarks])


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
