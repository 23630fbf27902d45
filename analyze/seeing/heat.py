"""Panels of layers over the steps: the heat map of the whole run, and the steps around a finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColorMapper, ColumnDataSource, CustomJSHover, LinearColorMapper, LogColorMapper, Range1d
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from analyze.seeing import panel
from analyze.seeing.course import Course
from analyze.seeing.gathered import AROUND, GRADIENT, RATIO, SIGNAL, Gathered, Layer, times
from analyze.seeing.panel import number, part

CELLS = 36_000
"""How many cells each map has, at most."""
MODES = {
    "value": ("as it is", "The greatest {what} of each cell."),
    "past": (
        "against the layer's own past",
        "How far each {what} is from the median of the 32 values before it, in powers of two; of each cell the "
        "farthest.",
    ),
    "reference": (
        "against the reference run",
        "How far the greatest {what} of each cell is above that of the reference run, in powers of two.",
    ),
}


def measure_of(found: Gathered) -> str | None:
    """The measure that the heat map shows: the ratio, or else the best recorded substitute."""
    return next((what for what in (RATIO, GRADIENT, SIGNAL) if found.of(what)), None)


def heat_panel(found: Gathered, reference: Gathered | None, order: Sequence[Layer], steps: Any) -> panel.Panel:
    """The panel of the heat map.

    Parameters
    ----------
    found : Gathered
    reference : Gathered, optional
        The run to compare with.
    order : sequence of Layer
        The most anomalous first.
    steps : bokeh.models.Range1d
    """
    what = measure_of(found)
    if what is None:
        lacking = "Neither updates of weights nor gradients were recorded of any layer, so there is no map of them."
        return panel.sentences("heat", "Layers over the steps", lacking)
    maps = _maps(found, reference, what)
    first = maps["value"]
    rows = len(first.layers)
    picture = panel.drawing(steps, panel.height_of(rows), y_range=(-0.5, rows - 0.5))
    anomalous = {one.name: number_of for number_of, one in enumerate(order)}
    best = [min(anomalous.get(name, len(order)) for name in group) for group in first.layers]
    panel.name_rows(picture, first.names, [int(row) for row in np.argsort(best, kind="stable")])
    for mode, one in maps.items():
        _draw(picture, mode, one, what, visible=mode == "past")
    _draw_bad(picture, first)
    places = {name: row for row, group in enumerate(first.layers) for name in group}
    panel.mark_layers(picture, found.checked.findings, places, "heat")
    return panel.Panel(
        name="heat",
        title=f"{what[0].upper()}{what[1:]} of each layer",
        before=_controls(maps, what, apart=reference is not None and "reference" not in maps),
        picture=picture,
        alternative=_map_in_words(what, order, first),
        data={
            "modes": list(maps),
            "rows": [list(group) for group in first.layers],
            "away": {mode: panel.blend(colours) for mode, colours in panel.AWAY.items()},
        },
    )


def _maps(found: Gathered, reference: Gathered | None, what: str) -> dict[str, panel.Map]:
    own = found.of(what)
    value, past = panel.drawn(own, found.layers, CELLS), panel.drawn(own, found.layers, CELLS, shifts=True)
    assert value is not None
    assert past is not None
    maps = {"value": value, "past": past}
    other = panel.drawn(reference.of(what), found.layers, CELLS) if reference is not None else None
    both = None if other is None else panel.compared(value, other)
    if both is not None and not np.isnan(both.cells).all():
        maps["reference"] = both
    return maps


def colours_of(mode: str, cells: np.ndarray) -> ColorMapper:
    """The colour mapper of a map."""
    if mode != "value":
        return LinearColorMapper(
            palette=panel.blend(panel.AWAY["light"]),
            low=-panel.FARTHEST,
            high=panel.FARTHEST,
            nan_color=panel.CLEAR,
            name=f"away-{mode}",
            # in the heat map, values beyond the scale have its last colour; `_draw_bad` covers non-finite cells
            **({"high_color": panel.NOT_FINITE} if mode == "zoom" else {}),
        )
    finite = cells[np.isfinite(cells)]
    positive = finite[finite > 0]
    plainly = {"palette": Viridis256, "nan_color": panel.CLEAR, "high_color": panel.NOT_FINITE}
    if len(positive) and (finite >= 0).all():
        low, high = float(np.quantile(positive, 0.01)), float(positive.max())
        return LogColorMapper(low=low, high=max(high, low * 1.001), low_color=Viridis256[0], **plainly)
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    return LinearColorMapper(low=low, high=max(high, low + 1e-12), **plainly)


def _draw(picture: figure, mode: str, one: panel.Map, what: str, *, visible: bool) -> None:
    width = float(one.last - one.grid.first)
    source = ColumnDataSource(
        {"image": [one.cells], "x": [one.grid.first - 0.5], "y": [-0.5], "dw": [width], "dh": [len(one.layers)]}
    )
    mapper = colours_of(mode, one.cells)
    image = picture.image(
        "image", "x", "y", "dw", "dh", source=source, color_mapper=mapper, name=f"heat-{mode}", visible=visible
    )
    names = [panel.plain(name) for name in one.names]
    grid = {"first": float(one.grid.first), "width": float(one.grid.width)}
    row = CustomJSHover(args={"names": names}, code="return names[Math.round(special_vars.y)] ?? ''")
    step = CustomJSHover(
        args=grid,
        code="const at = first + Math.floor((special_vars.x - first + 0.5) / width) * width;"
        "return width > 1 ? `${at} to ${at + width - 1}` : `${at}`",
    )
    shown = CustomJSHover(
        code="return Number.isNaN(value) ? 'nothing recorded' : Number.isFinite(value) ? value.toPrecision(5) : "
        "'not finite'"
    )
    unit = what if mode == "value" else "powers of two"
    told = [("layer", "$y{0}"), ("step", "$x{0}"), (unit, "@image{0}")]
    formats = {"$y": row, "$x": step, "@image": shown}
    panel.tell(picture, [image], told, formatters=formats, name=f"heat-hover-{mode}")
    panel.legend(
        picture, mapper, margin=0, visible=visible, name=f"heat-bar-{mode}", major_label_text_font_size="11px",
        height=int(picture.height * 0.55),
    )  # fmt: skip


def _draw_bad(picture: figure, one: panel.Map) -> None:
    """Cover the cells with non-finite values; in comparisons such cells have no colour of their own."""
    bad = np.isinf(one.cells)
    if bad.any():
        picture.image(
            [bad.astype(np.uint8)], one.grid.first - 0.5, -0.5, one.last - one.grid.first, len(one.layers),
            color_mapper=LinearColorMapper(palette=[panel.CLEAR, panel.NOT_FINITE], low=0, high=1), name="heat-bad",
        )  # fmt: skip


def _controls(maps: dict[str, panel.Map], what: str, *, apart: bool) -> str:
    """The radio buttons that switch between the maps, and notes; `apart`: the reference run cannot be compared."""
    choices = [(mode, MODES[mode][0]) for mode in ("past", "value", "reference") if mode in maps]
    notes = [(mode, MODES[mode][1].format(what=what)) for mode in maps]
    shared = max(len(group) for group in maps["value"].layers)
    width = maps["value"].grid.width
    cells = [f"a column is {width} steps" if width > 1 else "", f"a row is {shared} layers" if shared > 1 else ""]
    not_finite = panel.NOT_FINITE if np.isinf(maps["value"].cells).any() else ""
    return part("heat", choices, notes, " and ".join(filter(None, cells)), not_finite, apart)


def _map_in_words(what: str, order: Sequence[Layer], one: panel.Map) -> str:
    count = sum(map(len, one.layers))
    told = f"A heat map of the {what} of {count:,} layers, in recorded order from the top. "
    if what == RATIO:
        measured = [(layer.ratio, layer) for layer in order if layer.ratio is not None]
        if measured:
            _, top = max(measured, key=lambda one: one[0] if np.isfinite(one[0]) else np.inf)
            _, far = max(measured, key=lambda one: abs(one[1].away))
            told += f"The greatest is {number(top.ratio)}, of {top.name} at step {top.ratio_step}. "
            if far.away_step is not None:
                told += f"Farthest from its own past is {far.name}: {times(far.away)} it, at step {far.away_step}."
    return told


PLACES = 8
"""How many places the user can choose from, at most."""
ZOOM_ROWS = 48
"""How many layers are shown, at most: the most anomalous."""


@dataclass(frozen=True)
class _Spot:
    """A step to look at, and why."""

    step: int
    why: str


def places(found: Gathered, order: Sequence[Layer]) -> list[_Spot]:
    """The findings, worst first; without any, the steps at which ratios left their past; else the end of the run."""
    worst = sorted(found.checked.findings, key=lambda one: (-one.severity, one.first))
    chosen: dict[int, str] = {}
    for one in worst:
        chosen.setdefault(one.first, f"{one.rule}, {one.place}")
    if not chosen:
        for layer in order:
            if layer.odd is not None:
                chosen.setdefault(layer.odd, f"{layer.name}: {layer.why}")
    if not chosen:
        for layer in order[:PLACES]:
            if layer.away_step is not None:
                chosen.setdefault(layer.away_step, f"{layer.name}: the farthest that it went from its past")
    if not chosen and found.span is not None:
        chosen[found.span[1]] = "the end of the run"
    return [_Spot(step, why) for step, why in list(chosen.items())[:PLACES]]


def zoom_panel(found: Gathered, order: Sequence[Layer]) -> panel.Panel:
    """The panel of the steps around a finding."""
    what = measure_of(found)
    looked = places(found, order)
    title = f"{AROUND} steps before and after"
    if what is None or not looked:
        return panel.sentences("zoom", title, "There is nothing of layers to look at closely.")
    courses = found.of(what)
    best = {layer.name: number for number, layer in enumerate(order)}
    names = sorted(courses, key=lambda name: best.get(name, len(best)))[:ZOOM_ROWS]
    shown = [name for name in found.layers if name in set(names)][::-1]
    views = [_view(one, shown, courses) for one in looked]
    start = looked[0].step
    picture = panel.drawing(
        Range1d(start - AROUND - 0.5, start + AROUND + 0.5, name="zoom-steps"),
        panel.height_of(len(shown)),
        y_range=(-0.5, len(shown) - 0.5),
    )
    panel.name_rows(picture, shown, [shown.index(name) for name in names[:6]])
    source = ColumnDataSource(
        {name: [] for name in ("step", "row", "name", "value", "shift", "shade")}, name="zoom-cells"
    )
    mapper = colours_of("zoom", np.empty(0))
    marks = picture.rect(
        "step", "row", _stride(courses, shown), 0.92, source=source, line_color=None,
        fill_color={"field": "shade", "transform": mapper}, name="zoom-rects",
    )  # fmt: skip
    picture.vspan(x=[float(start)], name="zoom-step", line_dash="dashed", line_color="#888888", line_width=1.5)
    panel.mark_layers(picture, found.checked.findings, {name: row for row, name in enumerate(shown)}, "zoom")
    told = [("layer", "@name"), ("step", "@step"), (what, "@value{%.6g}")]
    panel.tell(picture, [marks], [*told, ("powers of two from its past", "@shift{%.3g}")])
    return panel.Panel(
        name="zoom",
        title=title,
        before=part(
            "zoom", [f"step {one.step}: {one.why}" for one in looked], what, _left_out(len(courses), len(shown))
        ),
        picture=picture,
        alternative=_zoom_in_words(looked[0], what, shown, courses),
        data={"rows": shown, "names": [panel.plain(name) for name in shown], "views": views},
    )


def _left_out(there: int, shown: int) -> str:
    return "" if there == shown else f"; of {there:,} layers the {shown} most anomalous are shown"


def _stride(courses: dict[str, Course], shown: Sequence[str]) -> float:
    steps = np.unique(courses[shown[0]].points()[0])
    return 0.94 * float(np.median(np.diff(steps[-64:]))) if len(steps) > 1 else 0.94


def _near(course: Course, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    steps, values, shifts = course.points()
    inside = (steps >= step - AROUND) & (steps <= step + AROUND)
    return steps[inside], values[inside], shifts[inside]


def _view(place: _Spot, shown: Sequence[str], courses: dict[str, Course]) -> dict[str, Any]:
    """The cells around a place, for the page's script."""
    parts = [_near(courses[name], place.step) for name in shown]
    rows = np.concatenate([np.full(len(steps), row, np.int64) for row, (steps, _, _) in enumerate(parts)])
    steps, values, shifts = (np.concatenate([part[number] for part in parts]) for number in range(3))
    offsets = np.asarray(steps, np.int64) - place.step
    return {
        "step": place.step,
        "rows": panel.packed(rows),
        "offsets": panel.packed(offsets),
        "values": panel.packed(values),
        "shifts": panel.packed(shifts),
    }


def _zoom_in_words(place: _Spot, what: str, shown: Sequence[str], courses: dict[str, Course]) -> str:
    """The layers that were farthest from their past at this step, in words."""
    far = []
    for name in shown:
        steps, _, shifts = _near(courses[name], place.step)
        at = np.flatnonzero((steps == place.step) & ~np.isnan(shifts))
        if len(at):
            far.append((abs(float(shifts[at[0]])), name, float(shifts[at[0]])))
    far.sort(key=lambda one: -one[0])
    told = [
        f"{name} {times(shift)} its past" if np.isfinite(shift) else f"{name} not finite" for _, name, shift in far[:3]
    ]
    return f"The {what} around step {place.step} ({place.why}). " + (
        f"At that step: {panel.listed(told)}." if told else "At that step nothing can be compared with its past."
    )
