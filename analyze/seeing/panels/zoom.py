"""Panel of the steps around a finding, layer by layer, each value at its own step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyze.seeing.course import Course
from analyze.seeing.gathered import Gathered
from analyze.seeing.layers import Layer
from analyze.seeing.listeners import AROUND
from analyze.seeing.panels.heat import colours_of, measure_of
from analyze.seeing.panels.panel import Panel, drawing, height_of, mark_layers, name_rows, packed, tell
from analyze.seeing.words import listed, plain, text, times

PLACES = 8
"""How many places the user can choose from, at most."""
ROWS = 48
"""How many layers are shown, at most: the most anomalous."""


@dataclass(frozen=True)
class _Place:
    """A step to look at, and why."""

    step: int
    why: str


def places(found: Gathered, order: Sequence[Layer]) -> list[_Place]:
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
    return [_Place(step, why) for step, why in list(chosen.items())[:PLACES]]


def panel(found: Gathered, order: Sequence[Layer]) -> Panel:
    """The panel of the steps around a finding."""
    from bokeh.models import ColumnDataSource, Range1d

    what = measure_of(found)
    looked = places(found, order)
    title = f"{AROUND} steps before and after"
    if what is None or not looked:
        return Panel(name="zoom", title=title, before="<p>There is nothing of layers to look at closely.</p>")
    courses = found.of(what)
    best = {layer.name: number for number, layer in enumerate(order)}
    names = sorted(courses, key=lambda name: best.get(name, len(best)))[:ROWS]
    shown = [name for name in found.layers if name in set(names)][::-1]
    views = [_view(one, shown, courses) for one in looked]
    start = looked[0].step
    picture = drawing(
        Range1d(start - AROUND - 0.5, start + AROUND + 0.5, name="zoom-steps"),
        height_of(len(shown)),
        y_range=(-0.5, len(shown) - 0.5),
    )
    name_rows(picture, shown, [shown.index(name) for name in names[:6]])
    source = ColumnDataSource(
        {name: [] for name in ("step", "row", "name", "value", "shift", "shade")}, name="zoom-cells"
    )
    mapper = colours_of("zoom", np.empty(0))
    marks = picture.rect(
        "step", "row", _stride(courses, shown), 0.92, source=source, line_color=None,
        fill_color={"field": "shade", "transform": mapper}, name="zoom-rects",
    )  # fmt: skip
    picture.vspan(x=[float(start)], name="zoom-step", line_dash="dashed", line_color="#888888", line_width=1.5)
    mark_layers(picture, found.checked.findings, {name: row for row, name in enumerate(shown)}, "zoom")
    told = [("layer", "@name"), ("step", "@step"), (what, "@value{%.6g}")]
    tell(picture, [marks], [*told, ("powers of two from its past", "@shift{%.3g}")])
    options = "".join(
        f'<option value="{number}">step {one.step}: {text(one.why)}</option>' for number, one in enumerate(looked)
    )
    return Panel(
        name="zoom",
        title=title,
        before=f'<label>Around <select id="zoom-place">{options}</select></label>'
        f'<p class="note">Each recorded {text(what)}, coloured by its distance from the layer\'s own past; layers in '
        f"recorded order; what is not finite is pink{_left_out(len(courses), len(shown))}.</p>",
        picture=picture,
        alternative=_in_words(looked[0], what, shown, courses),
        data={"rows": shown, "names": [plain(name) for name in shown], "views": views},
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


def _view(place: _Place, shown: Sequence[str], courses: dict[str, Course]) -> dict[str, Any]:
    """The cells around a place, for the page's script."""
    parts = [_near(courses[name], place.step) for name in shown]
    rows = np.concatenate([np.full(len(steps), row, np.int64) for row, (steps, _, _) in enumerate(parts)])
    steps, values, shifts = (np.concatenate([part[number] for part in parts]) for number in range(3))
    offsets = np.asarray(steps, np.int64) - place.step
    return {
        "step": place.step,
        "rows": packed(rows),
        "offsets": packed(offsets),
        "values": packed(values),
        "shifts": packed(shifts),
    }


def _in_words(place: _Place, what: str, shown: Sequence[str], courses: dict[str, Course]) -> str:
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
        f"At that step: {listed(told)}." if told else "At that step nothing can be compared with its past."
    )
