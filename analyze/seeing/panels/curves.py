"""Panel of any measure or answer on demand: curves of the selected layers, or a heat map of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analyze.seeing.course import Course
from analyze.seeing.gathered import DEAD, GRADIENT, NETWORK, RATIO, SIGNAL, TOTAL, WEIGHT, Gathered
from analyze.seeing.layers import Layer
from analyze.seeing.maps import drawn
from analyze.seeing.panels.panel import (
    DASHES,
    LINES,
    NOT_FINITE,
    SLOTS,
    Panel,
    drawing,
    legend,
    name_rows,
    packed,
    tell,
)
from analyze.seeing.words import plain, text, titled

POINTS = 45_000
"""How many points all curves have together, at most."""
COLUMNS = 400
"""A curve is thinned to the extremes of this many columns."""
CELLS = 60_000
"""How many cells all heat maps have together, at most."""
MEASURES = 12
"""How many measures the user can choose from, at most."""
SELECTED = 5
"""How many layers are selected at first."""

ALWAYS = (RATIO, GRADIENT, WEIGHT, SIGNAL, DEAD)


def _measures(found: Gathered) -> dict[tuple[str, str], dict[str, Course]]:
    """The courses of each measure and tag, by layer: the ratio, answers of metrics, norms of all gradients, others."""
    measures: dict[tuple[str, str], dict[str, Course]] = {}
    for key, course in found.courses.items():
        if key.what in ALWAYS or key.what in found.subscribers or key.what.startswith(TOTAL):
            measures.setdefault((key.what, key.tag), {})[key.layer if key.layer is not None else NETWORK] = course
    place = {what: number for number, what in enumerate(ALWAYS)}
    # answers of metrics precede measures of layers, since the user requested them; only the ratio stays first
    return dict(sorted(measures.items(), key=lambda one: place.get(one[0][0], 0.5))[:MEASURES])


def lines_of(found: Gathered, order: Sequence[Layer]) -> tuple[list[dict[str, Any]], list[str]]:
    """The measures for the page's script, and the layers whose curves are in the page."""
    measures = _measures(found)
    if not measures:
        return [], []
    best = {layer.name: number for number, layer in enumerate(order)}
    budget = POINTS // len(measures)
    kept: set[str] = set()
    packs = []
    cells = CELLS // len(measures)
    for (what, tag), courses in measures.items():
        names = sorted(courses, key=lambda name: best.get(name, -1))
        lines: list[dict[str, str]] = []
        spent = 0
        for name in names:
            steps, values = courses[name].outline(COLUMNS)
            if lines and spent + len(steps) > budget:
                break
            spent += len(steps)
            lines.append({"layer": name, "x": packed(steps), "y": packed(values)})
            kept.add(name)
        rows = [name for name in found.layers if name in courses] or [NETWORK]
        one = drawn(courses, rows, cells)
        pack: dict[str, Any] = {
            "title": titled(what, tag),
            "by": found.subscribers.get(what, ""),
            "lines": lines,
            "left_out": len(names) - len(lines),
            "log": _is_logarithmic(courses),
        }
        if one is not None and len(one.layers) > 1:
            pack["map"] = {
                "names": [plain(name) for name in one.names],
                "first": one.grid.first,
                "width": one.grid.width,
                "columns": one.cells.shape[1],
                "cells": packed(one.cells),
            }
        packs.append(pack)
    return packs, [layer.name for layer in order if layer.name in kept]


def _is_logarithmic(courses: Mapping[str, Course]) -> bool:
    """Whether all values are positive and differ by more than a factor of 20."""
    values = np.concatenate([course.points()[1] for course in courses.values()])
    values = values[np.isfinite(values)]
    return bool(len(values)) and bool(values.min() > 0) and bool(values.max() > 20 * values.min())


def panel(found: Gathered, packs: Sequence[Mapping[str, Any]], steps: Any) -> Panel:
    """The panel of curves and heat maps on demand."""
    if not packs:
        return Panel(name="curves", title="Curves", before="<p>Nothing was measured of any layer.</p>")
    options = "".join(f'<option value="{at}">{text(pack["title"])}</option>' for at, pack in enumerate(packs))
    return Panel(
        name="curves",
        title="Curves and maps on demand",
        before=f'<label>Show <select id="curve-measure">{options}</select></label> '
        "<fieldset><legend>as</legend>"
        '<label><input type="radio" name="curve-view" value="lines" checked> curves of the ticked layers</label>'
        '<label><input type="radio" name="curve-view" value="map"> heat map of all layers</label></fieldset>'
        '<p id="curve-legend" class="legend"></p><p id="curve-note" class="note" aria-live="polite"></p>',
        picture=_picture(steps),
        alternative=_in_words(packs),
        data={"measures": list(packs), "colours": list(LINES), "slots": SLOTS},
    )


def _in_words(packs: Sequence[Mapping[str, Any]]) -> str:
    titles = ", ".join(str(pack["title"]) for pack in packs)
    return f"Curves of the ticked layers over the steps. There are: {titles}. The table of layers has their extremes."


def _picture(steps: Any) -> Any:
    """Linear curves, logarithmic curves and a heat map; the page shows one of them at a time."""
    from bokeh.layouts import column
    from bokeh.models import ColumnDataSource

    pictures = []
    for scale in ("linear", "log"):
        picture = drawing(steps, 340, y_axis_type=scale, name=f"curves-{scale}", visible=scale == "log")
        lines = []
        for slot in range(SLOTS):
            source = ColumnDataSource({"x": [], "y": [], "name": []}, name=f"curve-{scale}-{slot}")
            colour = LINES[slot % len(LINES)]
            lines.append(picture.line("x", "y", source=source, line_width=2, line_color=colour, line_dash=DASHES[slot]))
        tell(picture, lines, [("", "@name"), ("step", "@x{0}"), ("value", "@y{%.6g}")])
        pictures.append(picture)
    return column(*pictures, _map_picture(steps), sizing_mode="stretch_width")


def _map_picture(steps: Any) -> Any:
    """An empty heat map, to be filled by the page's script."""
    from bokeh.models import ColumnDataSource, LinearColorMapper
    from bokeh.palettes import Viridis256

    picture = drawing(steps, 340, y_range=(-0.5, 0.5), name="curve-map", visible=False)
    name_rows(picture, [])
    cells = {"image": [np.zeros((1, 1), np.float32)], "x": [0.0], "y": [-0.5], "dw": [0.0], "dh": [0.0]}
    source = ColumnDataSource(cells, name="curve-map-cells")
    mapper = LinearColorMapper(
        palette=Viridis256, low=0, high=1, nan_color="rgba(0, 0, 0, 0)", high_color=NOT_FINITE, name="curve-map-colours"
    )
    image = picture.image("image", "x", "y", "dw", "dh", source=source, color_mapper=mapper)
    tell(picture, [image], [("step", "$x{0}"), ("row", "$y{0}"), ("value", "@image{0.0000e+0}")])
    legend(picture, mapper)
    return picture
