"""Panels of curves over the steps: the loss, the learning rates, and any measure or answer on demand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, LinearColorMapper
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from analyze.rules.finding import Finding
from analyze.seeing import gathered, panel
from analyze.seeing.course import Course, compact
from analyze.seeing.panel import drawn
from analyze.tables.settings import run_names
from tracer.messaging.messages import DEFAULT_TAG

LOSS_COLUMNS = 600
"""A curve is thinned to the extremes of this many columns."""
_FAR = 100.0
"""A run whose highest loss is this many times that of another run does not determine the axis."""
COURSES = 6
"""How many losses of a run are drawn, at most."""


def losses(found: gathered.Gathered) -> dict[str, Course]:
    """The losses of a run by label, that of the training first; loss terms only if there is no whole loss."""
    whole = {tag: course for (name, tag), course in found.losses.items() if name == "loss"}
    chosen = whole or {f"{name} {tag}": course for (name, tag), course in found.losses.items()}
    named = {"loss" if tag == DEFAULT_TAG else f"loss {tag}" if whole else tag: one for tag, one in chosen.items()}
    return dict(sorted(named.items(), key=lambda item: item[0] != "loss")[:COURSES])


def loss_panel(found: gathered.Gathered, references: Sequence[gathered.Gathered], steps: Any) -> panel.Panel:
    """The panel of the loss.

    Parameters
    ----------
    found : Gathered
    references : sequence of Gathered
        Runs whose losses are drawn, too.
    steps : bokeh.models.Range1d
    """
    own = losses(found)
    if not own:
        return _lossless("No loss was recorded, so there is no curve of it.", found)
    called = run_names([one.checked.trace for one in (found, *references)])
    runs = [("", own), *((panel.short(called[one.checked.trace], 30), losses(one)) for one in references)]
    everything = np.concatenate([course.points()[1] for _, kinds in runs for course in kinds.values()])
    finite = everything[np.isfinite(everything)]
    if not len(finite):
        return _lossless(f"All {len(everything):,} losses are not finite.", found)
    log = bool((finite > 0).all())
    drawn = panel.drawing(steps, 300, y_axis_type="log" if log else "linear", y_axis_label="loss")
    beyond = _bound(drawn, runs)
    _draw_losses(drawn, runs[::-1])  # the run's own curves are drawn last, above the others
    floor = float(finite.min())
    _mark_bad(drawn, own, floor)
    _mark(drawn, found.checked.findings, own, floor)
    drawn.legend.background_fill_alpha = 0
    drawn.legend.border_line_color = None
    drawn.legend.padding = drawn.legend.margin = 2
    drawn.legend.label_text_font_size = "12px"
    drawn.legend.orientation = "horizontal"
    drawn.legend.click_policy = "hide"
    drawn.add_layout(drawn.legend[0], "above")
    notes = [*([] if log else ["The axis is linear, because some losses are not positive."]), *beyond]
    scale = panel.part("paragraphs", notes)
    return panel.Panel(name="loss", title="Loss", before=scale, picture=drawn, alternative=_losses_in_words(own, found))


def _bound(drawn: figure, runs: Sequence[tuple[str, Mapping[str, Course]]]) -> list[str]:
    """End the axis where the losses of a run go far beyond those of the others, which it would flatten; tell of it."""
    tops: dict[str, float] = {}
    for name, courses in runs:
        values = np.concatenate([course.points()[1] for course in courses.values()] or [np.empty(0)])
        if np.isfinite(values).any():
            tops[name] = float(values[np.isfinite(values)].max())
    limit = _FAR * abs(min(tops.values()))
    far = [name for name, top in tops.items() if top > limit]
    if not far:
        return []
    drawn.y_range.end = 2 * max(top for name, top in tops.items() if top <= limit)
    return [f"The axis leaves out high losses, up to {panel.number(tops[one])}, of {one or 'this run'}." for one in far]


def _draw_losses(drawn: figure, runs: Sequence[tuple[str, Mapping[str, Course]]]) -> None:
    dashes = ("solid", "dashed", "dotted", "dotdash", "dashdot", "dashed")
    for number_of_run, (run, kinds) in zip(range(len(runs))[::-1], runs, strict=True):
        for number_of_kind, (name, course) in enumerate(kinds.items()):
            steps, values = course.outline(LOSS_COLUMNS)
            label = panel.plain(f"{name} of {run}" if run else name)
            columns = {"step": compact(steps), "loss": values, "name": [label] * len(steps)}
            source = ColumnDataSource(columns, name=f"loss-{number_of_run}-{number_of_kind}")
            colour = panel.LINES[number_of_run % len(panel.LINES)]
            style: dict[str, Any] = {"source": source, "color": colour, "legend_label": label}
            width = 2 if number_of_run == 0 else 4  # a reference with the same values stays visible below
            line = drawn.line("step", "loss", line_width=width, line_dash=dashes[number_of_kind % len(dashes)], **style)
            if len(steps) < 3 or number_of_kind:
                drawn.scatter("step", "loss", size=6, **style)
            mode = "vline" if not number_of_run and not number_of_kind else "mouse"
            panel.tell(drawn, [line], [("", "@name"), ("step", "@step"), ("loss", "@loss{%.6g}")], mode=mode)


def _mark_bad(drawn: figure, own: Mapping[str, Course], floor: float) -> None:
    """Draw crosses at the bottom where a loss is not finite."""
    at = np.concatenate([steps[~np.isfinite(values)] for steps, values, _ in (one.points() for one in own.values())])
    if len(at):
        drawn.scatter(
            compact(at),
            np.full(len(at), floor),
            marker="x",
            size=9,
            line_width=2,
            color="#D55E00",
            legend_label="not finite",
        )


def _mark(drawn: figure, findings: Sequence[Finding], own: Mapping[str, Course], floor: float) -> None:
    """Draw a line and a marker at the first step of each finding."""
    at, values, _ = next(iter(own.values())).points()
    finite = np.isfinite(values)
    at, values = at[finite], values[finite]
    marked = sorted(findings, key=lambda one: -one.severity)[: panel.MARKS]
    for severity in sorted({one.severity for one in marked}):
        these = [one for one in marked if one.severity == severity]
        heights = [float(np.interp(one.first, at, values)) if len(at) else floor for one in these]
        source = ColumnDataSource(
            {
                "step": compact(np.array([one.first for one in these])),
                "loss": heights,
                **panel.in_columns(these),
            },
            name=f"findings-{severity}",
        )
        drawn.vspan(x="step", source=source, line_color=panel.SHADES[severity], line_alpha=0.5, line_dash="dotted")
        marks = drawn.scatter(
            "step", "loss", source=source, marker=panel.MARKERS[severity], size=12, color=panel.SHADES[severity],
            line_color="#444444", legend_label=str(severity),
        )  # fmt: skip
        panel.tell(drawn, [marks], panel.FINDING)


def _lossless(why: str, found: gathered.Gathered) -> panel.Panel:
    """The panel without a curve, which names the steps of the findings."""
    steps = [f"step {one.first}" for one in found.checked.findings]
    marks = [f"There are findings at {panel.listed(steps, 8)}."] if steps else []
    return panel.sentences("loss", "Loss", why, *marks)


def _losses_in_words(own: Mapping[str, Course], found: gathered.Gathered) -> str:
    name, course = next(iter(own.items()))
    steps, values, _ = course.points()
    finite = np.isfinite(values)
    told = f"{name} at {course.count:,} steps"
    if finite.any():
        told += f": {panel.course_in_words(steps[finite], values[finite])}"
    if course.bad:
        told += f"; {course.bad:,} are not finite"
    marks = list(dict.fromkeys(f"{one.rule} at step {one.first}" for one in found.checked.findings))
    return f"{told}. " + (f"Marked: {panel.listed(marks, 5)}." if marks else "No finding is marked.")


CURVE_COLUMNS = 400
"""A curve is thinned to the extremes of this many columns."""


def rates_panel(found: gathered.Gathered, steps: Any) -> panel.Panel:
    """The panel of the learning rates: a curve per parameter group of the optimizer.

    Parameters
    ----------
    found : Gathered
    steps : bokeh.models.Range1d
    """
    rates = dict(list(found.of(gathered.LEARNING_RATE, DEFAULT_TAG).items())[: panel.SLOTS])
    if not rates:
        return panel.sentences(
            "rates", "Learning rate", "No hyperparameters were recorded, so there is no curve of the learning rate."
        )
    picture = panel.drawing(steps, 180, y_axis_label="learning rate")
    _draw_rates(picture, rates)
    return panel.Panel(name="rates", title="Learning rate", picture=picture, alternative=_rates_in_words(rates))


def _draw_rates(picture: Any, rates: Mapping[str, Course]) -> None:
    greatest = max((float(course.points()[1].max()) for course in rates.values()), default=0.0)
    if math.isfinite(greatest) and greatest > 0:
        picture.y_range.default_span = 2 * greatest  # a constant rate lies in the middle of an axis that begins at zero
    for place, (name, course) in enumerate(rates.items()):
        steps, values = course.outline(CURVE_COLUMNS)
        columns = {"step": compact(steps), "rate": values, "name": [panel.plain(name)] * len(steps)}
        source = ColumnDataSource(columns, name=f"rate-{place}")
        style = {"source": source, "color": panel.LINES[place % len(panel.LINES)]}
        line = picture.line("step", "rate", line_width=2, line_dash=panel.DASHES[place], **style)
        if len(steps) < 3:
            picture.scatter("step", "rate", size=6, **style)
        panel.tell(picture, [line], [("", "@name"), ("step", "@step"), ("learning rate", "@rate{%.6g}")])


def _rates_in_words(rates: Mapping[str, Course]) -> str:
    told = [f"{name}: {panel.course_in_words(*course.points()[:2])}" for name, course in rates.items()]
    return f"The learning rate of each group of an optimizer's parameters. {'. '.join(told)}."


POINTS = 45_000
"""How many points all curves have together, at most."""
CELLS = 60_000
"""How many cells all heat maps have together, at most."""
MEASURES = 12
"""How many measures the user can choose from, at most."""
SELECTED = 5
"""How many layers are selected at first."""

ALWAYS = (gathered.RATIO, gathered.GRADIENT, gathered.WEIGHT, gathered.SIGNAL, gathered.DEAD)


def _measures(found: gathered.Gathered) -> dict[tuple[str, str], dict[str, Course]]:
    """The courses of each measure and tag, by layer: the ratio, answers of metrics, norms of all gradients, others."""
    measures: dict[tuple[str, str], dict[str, Course]] = {}
    for key, course in found.courses.items():
        if key.what in ALWAYS or key.what in found.subscribers or key.what.startswith(gathered.TOTAL):
            measures.setdefault((key.what, key.tag), {})[key.layer if key.layer is not None else gathered.NETWORK] = (
                course
            )
    place = {what: number for number, what in enumerate(ALWAYS)}
    # answers of metrics precede measures of layers, since the user requested them; only the ratio stays first
    return dict(sorted(measures.items(), key=lambda one: place.get(one[0][0], 0.5))[:MEASURES])


def lines_of(found: gathered.Gathered, order: Sequence[gathered.Layer]) -> tuple[list[dict[str, Any]], list[str]]:
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
            steps, values = courses[name].outline(CURVE_COLUMNS)
            if lines and spent + len(steps) > budget:
                break
            spent += len(steps)
            lines.append({"layer": name, "x": panel.packed(steps), "y": panel.packed(values)})
            kept.add(name)
        rows = [name for name in found.layers if name in courses] or [gathered.NETWORK]
        one = drawn(courses, rows, cells)
        pack: dict[str, Any] = {
            "title": panel.titled(what, tag),
            "by": found.subscribers.get(what, ""),
            "lines": lines,
            "left_out": len(names) - len(lines),
            "log": _is_logarithmic(courses),
        }
        if one is not None and len(one.layers) > 1:
            pack["map"] = {
                "names": [panel.plain(name) for name in one.names],
                "first": one.grid.first,
                "width": one.grid.width,
                "columns": one.cells.shape[1],
                "cells": panel.packed(one.cells),
            }
        packs.append(pack)
    return packs, [layer.name for layer in order if layer.name in kept]


def _is_logarithmic(courses: Mapping[str, Course]) -> bool:
    """Whether all values are positive and differ by more than a factor of 20."""
    values = np.concatenate([course.points()[1] for course in courses.values()])
    values = values[np.isfinite(values)]
    return bool(len(values)) and bool(values.min() > 0) and bool(values.max() > 20 * values.min())


def curves_panel(found: gathered.Gathered, packs: Sequence[Mapping[str, Any]], steps: Any) -> panel.Panel:
    """The panel of curves and heat maps on demand."""
    if not packs:
        return panel.sentences("curves", "Curves", "Nothing was measured of any layer.")
    return panel.Panel(
        name="curves",
        title="Curves and maps on demand",
        before=panel.part("curves", [pack["title"] for pack in packs]),
        picture=_picture(steps),
        alternative=_curves_in_words(packs),
        data={"measures": list(packs), "colours": list(panel.LINES), "slots": panel.SLOTS},
    )


def _curves_in_words(packs: Sequence[Mapping[str, Any]]) -> str:
    titles = ", ".join(str(pack["title"]) for pack in packs)
    return f"Curves of the ticked layers over the steps. There are: {titles}. The table of layers has their extremes."


def _picture(steps: Any) -> Any:
    """Linear curves, logarithmic curves and a heat map; the page shows one of them at a time."""
    pictures = []
    for scale in ("linear", "log"):
        picture = panel.drawing(steps, 340, y_axis_type=scale, name=f"curves-{scale}", visible=scale == "log")
        lines = []
        for slot in range(panel.SLOTS):
            source = ColumnDataSource({"x": [], "y": [], "name": []}, name=f"curve-{scale}-{slot}")
            style = {"line_color": panel.LINES[slot % len(panel.LINES)], "line_dash": panel.DASHES[slot]}
            lines.append(picture.line("x", "y", source=source, line_width=2, **style))
        panel.tell(picture, lines, [("", "@name"), ("step", "@x{0}"), ("value", "@y{%.6g}")])
        pictures.append(picture)
    return column(*pictures, _map_picture(steps), sizing_mode="stretch_width")


def _map_picture(steps: Any) -> Any:
    """An empty heat map, to be filled by the page's script."""
    picture = panel.drawing(steps, 340, y_range=(-0.5, 0.5), name="curve-map", visible=False)
    panel.name_rows(picture, [])
    cells = {"image": [np.zeros((1, 1), np.float32)], "x": [0.0], "y": [-0.5], "dw": [0.0], "dh": [0.0]}
    source = ColumnDataSource(cells, name="curve-map-cells")
    colours = {"palette": Viridis256, "nan_color": panel.CLEAR, "high_color": panel.NOT_FINITE}
    mapper = LinearColorMapper(low=0, high=1, name="curve-map-colours", **colours)
    image = picture.image("image", "x", "y", "dw", "dh", source=source, color_mapper=mapper)
    panel.tell(picture, [image], [("step", "$x{0}"), ("row", "$y{0}"), ("value", "@image{0.0000e+0}")])
    panel.legend(picture, mapper)
    return picture


NUMBERS = 45_000
"""How many numbers all arrays in the page have together, at most."""


def arrays_of(found: gathered.Gathered, order: Sequence[gathered.Layer]) -> list[dict[str, Any]]:
    """The array answers for the page's script, the most anomalous layers first, as many as `NUMBERS` allows."""
    place = {layer.name: number for number, layer in enumerate(order)}
    series = _series(found)
    ranked = sorted(series.items(), key=lambda one: place.get(one[0].layer or "", -1))
    edges = {key: one for key, one in series.items() if key.what.endswith("_edges")}
    packs: list[dict[str, Any]] = []
    left = NUMBERS
    for key, frames in ranked:
        if key in edges:
            continue
        steps, table = frames.points()
        if table.size > left:
            break
        left -= table.size
        pack = {
            "what": panel.titled(key.what, key.tag),
            "layer": key.layer if key.layer is not None else gathered.NETWORK,
            "steps": panel.packed(steps),
            "width": table.shape[1],
            "cells": panel.packed(table),
        }
        with_edges = edges.get(key._replace(what=f"{key.what}_edges"))
        if with_edges is not None:
            pack |= _edges(with_edges, key, frames)
        packs.append(pack)
    return packs


def _series(found: gathered.Gathered) -> dict[gathered.Key, gathered.Frames]:
    return {key: one for key, one in found.frames.items() if isinstance(one, gathered.Frames)}


def _edges(edges: gathered.Frames, key: gathered.Key, frames: gathered.Frames) -> dict[str, Any]:
    """The lowest and the highest edge of each histogram."""
    _, table = edges.points()
    if len(table) != len(frames.steps) or not table.size:
        return {}
    return {"low": panel.packed(table[:, 0]), "high": panel.packed(table[:, -1])}


def arrays_panel(found: gathered.Gathered, order: Sequence[gathered.Layer], steps: Any) -> panel.Panel:
    """The panel of histograms and spectra."""
    packs = arrays_of(found, order)
    title = "Histograms and spectra over the steps"
    if not packs:
        none = "No metric was asked whose answers are arrays, such as histogram or singular_values."
        return panel.sentences("arrays", title, none)
    kinds = list(dict.fromkeys(str(one["what"]) for one in packs))
    picture = panel.drawing(steps, 340, name="arrays")
    names = ("left", "right", "bottom", "top", "value", "step", "at")
    source = ColumnDataSource({name: [] for name in names}, name="array-cells")
    mapper = LinearColorMapper(palette=Viridis256, low=0, high=1, name="array-colours")
    marks = picture.quad(
        "left", "right", "bottom", "top", source=source, line_color=None,
        fill_color={"field": "value", "transform": mapper},
    )  # fmt: skip
    panel.tell(picture, [marks], [("step", "@step"), ("at", "@at"), ("value", "@value{%.6g}")])
    panel.legend(picture, mapper)
    there = sum(not key.what.endswith("_edges") for key in _series(found))
    left_out = f" Of {there:,} series, {len(packs):,} have room in the page." if there > len(packs) else ""
    return panel.Panel(
        name="arrays",
        title=title,
        before=panel.part("arrays", kinds, left_out),
        picture=picture,
        alternative=_arrays_in_words(packs),
        data={"packs": packs},
    )


def _arrays_in_words(packs: Sequence[Mapping[str, Any]]) -> str:
    shown = ", ".join(dict.fromkeys(f"{one['what']} of {one['layer']}" for one in packs[:6]))
    return f"Heat maps of arrays over the steps: {shown}{' and others' if len(packs) > 6 else ''}."
