"""Panel of layer similarities, with their nulls: all pairs at a recorded step, or each layer with itself over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, LinearColorMapper, NoOverlap, Range1d
from bokeh.palettes import Cividis256
from numpy.typing import NDArray

from analyze.metrics import BUILT_IN
from analyze.metrics.similarity.datapoints import STATUSES
from analyze.metrics.similarity.similarity import Similarity
from analyze.registry import find
from analyze.seeing import panel
from analyze.seeing.course import Matrices
from analyze.seeing.gathered import Gathered, Key, Layer
from analyze.seeing.panel import number

NUMBERS = 20_000
"""How many numbers all matrices have together, at most."""
MOST = 60
"""How many layers a matrix has, at most."""
SHEETS = 8
"""How many measures the user can choose from, at most."""
UNKNOWN = "-"
MEANINGS = {
    "few_samples": "so few datapoints that unrelated layers look alike, too",
    "ill_posed": "rounding decides on the value, or sketches cannot tell it, and there is none",
    "zero_variance": "a layer is constant, so there is no value",
    "nonfinite": "a layer has NaN or infinity, so there is no value",
    "mismatch": "not the same datapoints, so there is no value; positions=pooled compares layers of different sizes",
}
"""Explanations of the statuses of similarities."""
NAME = 14
"""Column labels are cut to this many letters by the page's script."""


class SimilaritySheet(NamedTuple):
    """The numbers of one measure: a matrix of pairs of layers per step, or one matrix of layers by steps.

    Attributes
    ----------
    title, measure : str
    is_distance : bool
    steps : ndarray of int64, (n,)
    rows, columns : list of str
        Names of layers; if the columns are steps, the step numbers.
    numbers : mapping of str to ndarray of float64, (frames, rows, columns)
        ``value``, and where the metric answers them ``null`` and ``status``.
    pairs : bool
        Whether rows and columns are the same layers.
    symmetric : bool
    left_out : int
        How many layers were left out.
    """

    title: str
    measure: str
    is_distance: bool
    steps: NDArray[np.int64]
    rows: list[str]
    columns: list[str]
    numbers: Mapping[str, NDArray[np.float64]]
    pairs: bool
    symmetric: bool
    left_out: int

    @property
    def cells(self) -> NDArray[np.bool_]:
        """Which cells of a matrix are in the page: one half if symmetric, and no layer with itself."""
        shape = (len(self.rows), len(self.columns))
        if not self.pairs:
            return np.ones(shape, bool)
        return np.triu(np.ones(shape, bool), 1) if self.symmetric else ~np.eye(len(self.rows), dtype=bool)


def similarity_panel(found: Gathered, order: Sequence[Layer]) -> panel.Panel:
    """The panel of similarities."""
    sheets = _sheets(found, order)
    title = "Similarity of layers"
    if not sheets:
        none = "No metric that compares layers was asked, such as svcca:against=layers or cka:against=final."
        if not found.checked.probed:
            none += f" S{found.checked.to_compare[1:]}."
        return panel.sentences("similarity", title, none)
    last = len(sheets[0].numbers["value"]) - 1
    return panel.Panel(
        name="similarity",
        title=title,
        before=panel.part("similarity", [one.title for one in sheets], last),
        picture=_picture(sheets),
        alternative=_in_words(sheets[0]),
        data={
            "sheets": _packs(sheets),
            "statuses": list(STATUSES),
            "meanings": MEANINGS,
            "letters": NAME,
            "away": {mode: panel.blend(colours) for mode, colours in panel.AWAY.items()},
            "alike": _alike(),
        },
    )


def _sheets(found: Gathered, order: Sequence[Layer]) -> list[SimilaritySheet]:
    sheets = [_of_pairs(found, key, one, order) for key, one in found.frames.items() if isinstance(one, Matrices)]
    sheets += [_of_time(found, kind, tag, order) for kind, tag in _with_itself(found)]
    return [one for one in sheets if one.numbers.get("value") is not None and one.rows][:SHEETS]


def _of_pairs(found: Gathered, key: Key, matrices: Matrices, order: Sequence[Layer]) -> SimilaritySheet:
    steps, layers, numbers = matrices.points()
    chosen = _most_anomalous(layers, order)
    names = [panel.plain(layers[at]) or "the root" for at in chosen]
    cut: dict[str, NDArray[np.float64]] = {role: values[:, chosen][:, :, chosen] for role, values in numbers.items()}
    title = f"{panel.titled(key.what, key.tag)}: each two layers"
    left_out, is_distance = len(layers) - len(chosen), matrices.is_distance
    return SimilaritySheet(
        title, matrices.measure, is_distance, steps, names, names, cut, True, matrices.symmetric, left_out
    )


def _of_time(found: Gathered, kind: str, tag: str, order: Sequence[Layer]) -> SimilaritySheet:
    measure = found.subscribers[kind]
    kinds = {"value": kind, "null": _companion(kind, measure, "_null"), "status": _companion(kind, measure, "_status")}
    courses = {role: found.of(one, tag) for role, one in kinds.items()}
    layers = [name for name in dict.fromkeys([*found.layers, *courses["value"]]) if name in courses["value"]]
    chosen = [layers[at] for at in _most_anomalous(layers, order)]
    steps = np.unique(np.concatenate([courses["value"][name].points()[0] for name in chosen]))
    numbers = {}
    for role, of_layers in courses.items():
        table = np.full((1, len(chosen), len(steps)), np.nan)
        for row, name in enumerate(chosen):
            if name in of_layers:
                at, values, _ = of_layers[name].points()
                known = np.isin(at, steps)
                table[0, row, np.searchsorted(steps, at[known])] = values[known]
        if of_layers:
            numbers[role] = table
    title = f"{panel.titled(kind, tag)}: each layer with itself"
    names = [panel.plain(name) or "the root" for name in chosen]
    columns = [str(step) for step in steps.tolist()]
    left_out, is_distance = len(layers) - len(chosen), _class_of(measure).is_distance
    return SimilaritySheet(title, measure, is_distance, steps, names, columns, numbers, False, True, left_out)


def _with_itself(found: Gathered) -> list[tuple[str, str]]:
    """(kind, tag) of the answers that compare a layer with itself at another step and have a null."""
    kinds = {
        kind
        for kind, measure in found.subscribers.items()
        if measure in BUILT_IN
        and _companion(kind, measure, "_null") in found.subscribers
        and issubclass(find(measure), Similarity)
    }
    return list(
        dict.fromkeys((key.what, key.tag) for key in found.courses if key.what in kinds and key.layer is not None)
    )


def _companion(kind: str, measure: str, suffix: str) -> str:
    """The kind of a companion of a value, such as its null; a label stays at the end of the kind."""
    before, name, label = kind.rpartition(f"_{measure}")
    return f"{before}{name}{suffix}{label}" if name else ""


def _class_of(measure: str) -> type[Similarity]:
    found = find(measure)
    assert issubclass(found, Similarity)
    return found


def _most_anomalous(layers: Sequence[str], order: Sequence[Layer]) -> list[int]:
    """Positions of the `MOST` most anomalous layers, in recorded order."""
    place = {layer.name: number for number, layer in enumerate(order)}
    ranked = sorted(range(len(layers)), key=lambda at: place.get(layers[at], len(place)))
    return sorted(ranked[:MOST])


def _packs(sheets: Sequence[SimilaritySheet]) -> list[dict[str, Any]]:
    """The sheets for the page's script, at as many steps as `NUMBERS` allows: evenly spaced, with first and last."""
    packs = []
    for one in sheets:
        cells = one.cells
        roles = [role for role in ("value", "null") if role in one.numbers]
        frames, room = len(one.numbers["value"]), NUMBERS // len(sheets)
        columns = np.arange(len(one.columns))
        if not one.pairs:  # a single frame, whose columns are steps and may be too many
            columns = _evenly(len(columns), max(1, room // (len(one.rows) * len(roles))))
        shown = _evenly(frames, max(1, room // max(1, int(cells.sum()) * len(roles)))) if one.pairs else [0]
        cells = cells[:, columns]
        pack: dict[str, Any] = {
            "measure": one.measure,
            "distance": one.is_distance,
            "words": _in_words(one),
            "rows": one.rows,
            "columns": [one.columns[at] for at in columns],
            "pairs": one.pairs,
            "symmetric": one.symmetric,
            "left_out": one.left_out,
            "steps_left_out": frames - len(shown) if one.pairs else len(one.columns) - len(columns),
            "frames": [],
        }
        for at in shown:
            frame = {role: panel.packed(one.numbers[role][at][:, columns][cells]) for role in roles}
            if one.pairs:
                frame["step"] = str(int(one.steps[at]))
            if "status" in one.numbers:
                frame["status"] = _digits(one.numbers["status"][at][:, columns][cells])
            pack["frames"].append(frame)
        packs.append(pack)
    return packs


def _evenly(count: int, most: int) -> NDArray[np.int64]:
    """At most `most` evenly spaced indices below `count`; the last is among them, and the first unless `most` is 1.

    Examples
    --------
    >>> _evenly(5, 9).tolist(), _evenly(101, 3).tolist(), _evenly(7, 1).tolist()
    ([0, 1, 2, 3, 4], [0, 50, 100], [6])
    """
    if most == 1 or count < 2:
        return np.array([count - 1] if count else [], np.int64)
    return np.unique(np.rint(np.linspace(0, count - 1, min(count, most))).astype(np.int64))


def _digits(codes: NDArray[np.float64]) -> str:
    """One letter per status code."""
    return "".join(UNKNOWN if np.isnan(code) else str(int(code)) for code in codes.tolist())


def _alike() -> list[str]:
    return list(Cividis256)


def _picture(sheets: Sequence[SimilaritySheet]) -> Any:
    rows = max(len(one.rows) for one in sheets)
    # room for the longest name, so that the matrix does not move when another sheet is shown
    below = 45 + 6 * min(NAME, max(len(name) for one in sheets for name in one.columns))
    columns = Range1d(-0.5, rows - 0.5, name="similarity-columns")
    picture = panel.drawing(columns, panel.height_of(rows) - 70 + below, y_range=(-0.5, rows - 0.5), name="similarity")
    picture.min_border_bottom = below
    picture.toolbar.tools, picture.toolbar.active_drag = [], None  # the columns are not steps: no zoom
    picture.xaxis.major_label_orientation = "vertical"
    picture.xaxis.major_label_policy = NoOverlap(min_distance=2)
    for axis in picture.axis:
        axis.ticker, axis.minor_tick_line_color, axis.major_tick_line_color = FixedTicker(ticks=[]), None, None
    picture.ygrid.grid_line_color = None
    mapper = LinearColorMapper(
        palette=_alike(), low=0, high=1, name="similarity-colours", nan_color="rgba(128,128,128,0.3)"
    )
    names = ("left", "right", "bottom", "top", "row", "column", "value", "null", "beyond", "status", "shade")
    source = ColumnDataSource({name: [] for name in names}, name="similarity-cells")
    marks = picture.quad(
        "left", "right", "bottom", "top", source=source, line_color=None,
        fill_color={"field": "shade", "transform": mapper},
    )  # fmt: skip
    told = [("", "@row"), ("", "@column"), ("value", "@value"), ("null", "@null"), ("beyond its null", "@beyond")]
    panel.tell(picture, [marks], [*told, ("status", "@status")])
    panel.legend(picture, mapper)
    return picture


def _in_words(sheet: SimilaritySheet) -> str:
    """The most and the least similar pair at the last step, in words."""
    values = np.where(sheet.cells, sheet.numbers["value"][-1], np.nan)
    count, steps = f"{len(sheet.rows):,} layers", f"{len(sheet.steps):,} step{'s' if len(sheet.steps) != 1 else ''}"
    told = f"Each of {count} with itself at another step, by {sheet.measure}, at {steps}. "
    if sheet.pairs:
        told = f"Each two of {count}, by {sheet.measure}, at {steps}. "
    if np.isnan(values).all():
        return told + "There is no value."
    ends = [np.unravel_index(int(find_it(values)), values.shape) for find_it in (np.nanargmax, np.nanargmin)]
    for word, (row, column) in zip(("most", "least"), ends[::-1] if sheet.is_distance else ends, strict=True):
        null = sheet.numbers["null"][-1][row, column] if "null" in sheet.numbers else None
        other = f"and {sheet.columns[column]}" if sheet.pairs else f"at step {sheet.columns[column]}"
        beside = "" if null is None else f", beside a null of {number(float(null))}"
        when = f" at step {sheet.steps[-1]}" if sheet.pairs else ""
        value = number(float(values[row, column]))
        told += f"{word.capitalize()} alike{when}: {sheet.rows[row]} {other} ({value}{beside}). "
    return told.rstrip()
