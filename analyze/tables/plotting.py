"""Answers as a figure: a panel per kind, with a line per series, or a map if there are many series."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analyze.tables.columns import AnswerColumns
from analyze.tables.layout import shortened
from analyze.tables.series import mean_of
from analyze.tables.settings import run_names
from analyze.tables.writing import needed
from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG
from tracer.shown import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS: Final = (".png", ".svg", ".pdf")
"""The supported file suffixes of a figure."""
_LINES: Final = 8
"""With more series than this, a panel is a map with a row per series."""
_PANELS: Final = 12
_CELLS: Final = 600
"""The maximum number of cells in a row of a map; a cell shows the largest of its values."""
_NAME: Final = 40
# the colour-blind palette of Okabe and Ito, from dark to light
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00", "#7F7F00")
_MARKERS: Final = "osD^vPX*"


class _Course(NamedTuple):
    """A series: its name, its ascending steps, and a value at each step."""

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def figure_of(answers: AnswerColumns, *, log: bool | None = None) -> Figure:
    """Draw answers over their global steps.

    Parameters
    ----------
    answers : Columns
    log : bool, optional
        Whether the value axis is logarithmic. By default, if all values are positive and span two decades.

    Returns
    -------
    matplotlib.figure.Figure
        A figure that pyplot does not know: no window is opened.

    Raises
    ------
    MessageError
        If there are no answers.
    TracerError
        If matplotlib is not installed.
    """
    courses = _courses(answers)
    if not courses:
        raise MessageError("there is nothing to draw: there are no answers")
    kinds = list(courses)[:_PANELS]
    heights = [2.6 if len(courses[kind]) <= _LINES else min(1.6 + 0.16 * len(courses[kind]), 9.0) for kind in kinds]
    figure = _figure(8.5, sum(heights) + 0.4)
    axes = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    for kind, one in zip(kinds, axes, strict=True):
        drawn = courses[kind]
        is_log = _spans_decades(drawn) if log is None else log and _has_positive(drawn)
        (_lines if len(drawn) <= _LINES else _map)(one, drawn, is_log)
        left_out = len(courses) - len(kinds)
        more = f"   (and {left_out} more kinds, not drawn)" if left_out and kind == kinds[-1] else ""
        _text(one.set_title(printable(kind) + more, fontsize=10, loc="left"))
        one.set_xlabel("global step", fontsize=9)
        one.tick_params(labelsize=8)
    return figure


class Matrix(NamedTuple):
    """A square matrix to draw.

    Attributes
    ----------
    values : ndarray of float64, (n, n)
        NaN is drawn grey.
    label : str
        The name of the values.
    low, high : float
        The values at both ends of the colour scale.
    colours : str
        A matplotlib colormap; or ``"away"``: blue below the middle, white there, orange above.
    """

    values: NDArray[np.float64]
    label: str
    low: float
    high: float
    colours: str


def matrices_of(drawn: Sequence[Matrix], names: Sequence[str], title: str = "", remarks: str = "") -> Figure:
    """Draw square matrices of the same items beside each other.

    Parameters
    ----------
    drawn : sequence of Matrix
    names : sequence of str
        Names of the rows and columns; if there are many, only some are written.
    title : str
    remarks : str
        Text below the matrices.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    MessageError
        If the matrices are empty.
    TracerError
        If matplotlib is not installed.
    """
    if not len(names):
        raise MessageError("there is nothing to draw: nothing was compared")
    figure = _figure(1.5 + 6.0 * len(drawn), 7.0)
    axes = figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
    places = list(range(0, len(names), max(1, math.ceil(len(names) / 30))))
    written = [shortened(printable(names[place]), _NAME) for place in places]
    for one, matrix in zip(axes, drawn, strict=True):
        one.set_facecolor("0.75")
        image = one.imshow(
            np.ma.masked_invalid(matrix.values), vmin=matrix.low, vmax=matrix.high, cmap=_colours(matrix.colours),
            interpolation="nearest",
        )  # fmt: skip
        one.set_xticks(places)
        one.set_yticks(places)
        for label in one.set_xticklabels(written, fontsize=7, rotation=90) + one.set_yticklabels(written, fontsize=7):
            _text(label)
        _text(one.set_title(printable(matrix.label), fontsize=9, loc="left"))
        figure.colorbar(image, ax=one, pad=0.01, shrink=0.8).ax.tick_params(labelsize=7)
    if title:
        _text(figure.suptitle(printable(title), fontsize=11))
    if remarks:
        lines = textwrap.fill(printable(remarks), 85 * len(drawn))
        text = figure.text(0.5, 0.01, lines, fontsize=8, horizontalalignment="center", verticalalignment="bottom")
        text.set_in_layout(False)
        _text(text)
        below = 0.015 + 0.022 * (1 + lines.count("\n"))
        figure.set_layout_engine("constrained", rect=(0, below, 1, 1 - below))
    return figure


def _colours(name: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("away", ["#0072B2", "#FFFFFF", "#D55E00"]) if name == "away" else name


def _figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that is not registered with pyplot."""
    needed("a figure", "matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure: Figure = _shown_figure()(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@cache
def _shown_figure() -> type[Figure]:
    """A class of figures that notebooks show without ``%matplotlib inline``."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png", dpi=100)
            return data.getvalue()

    return ShownFigure


def _courses(answers: AnswerColumns) -> dict[str, list[_Course]]:
    """The series of each kind; an array answer counts as the mean of its finite numbers."""
    positions: dict[tuple[str, str], list[int]] = {}
    traces = list(dict.fromkeys(stream.trace for stream in answers.streams))
    several = len(traces) > 1
    runs = run_names(traces) if several else {}
    for position, number in enumerate(answers.stream_ids):
        stream = answers.streams[number]
        marks = [stream.tag] if stream.tag != DEFAULT_TAG else []
        marks += [f"rank {stream.rank}"] if stream.rank else []
        marks += [runs[stream.trace]] if several else []
        name = stream.place or "network"
        positions.setdefault((stream.kind, f"{name} ({', '.join(marks)})" if marks else name), []).append(position)
    values = np.array(answers.values, dtype=np.float64)
    steps = answers.counters["global_step"]
    found: dict[str, list[_Course]] = {}
    for (kind, name), these in positions.items():
        at = np.array([steps[one] for one in these], np.int64)
        of_each = np.array([mean_of(values[answers.starts[one] : answers.starts[one + 1]]) for one in these])
        order = np.argsort(at, kind="stable")
        found.setdefault(kind, []).append(_Course(name, at[order], of_each[order]))
    return found


def _has_positive(drawn: Sequence[_Course]) -> bool:
    return any(bool((one.values[np.isfinite(one.values)] > 0).any()) for one in drawn)


def _spans_decades(drawn: Sequence[_Course]) -> bool:
    """Whether all finite values are positive and span more than two decades."""
    values = np.concatenate([one.values[np.isfinite(one.values)] for one in drawn])
    return bool(values.size and values.min() > 0 and values.max() > 100 * values.min())


def _lines(axes: Axes, drawn: Sequence[_Course], is_log: bool) -> None:
    for number, one in enumerate(drawn):
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(
            one.steps,
            np.where(np.isfinite(one.values), one.values, np.nan),
            color=colour,
            marker=_MARKERS[number % len(_MARKERS)],
            markevery=max(1, len(one.steps) // 8),
            markersize=4,
            linewidth=1.4,
            label=f"\u200b{shortened(printable(one.name), _NAME)}",  # matplotlib omits labels that begin with _
        )
        strange = one.steps[~np.isfinite(one.values)]
        if strange.size:
            told: dict[str, Any] = {
                "color": colour,
                "marker": "x",
                "linestyle": "none",
                "markersize": 5,
                "clip_on": False,
            }
            axes.plot(strange, np.zeros(len(strange)), transform=axes.get_xaxis_transform(), **told)
    if is_log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for text in legend.get_texts():
        _text(text)


def _map(axes: Axes, drawn: Sequence[_Course], is_log: bool) -> None:
    """Draw series as rows over step columns; a cell shows its largest finite value, and is grey if it has none."""
    from matplotlib.colors import LogNorm, Normalize

    first = min(int(one.steps[0]) for one in drawn)
    last = max(int(one.steps[-1]) for one in drawn)
    cells = min(_CELLS, last - first + 1)
    grid = np.full((len(drawn), cells), np.nan)
    for row, one in enumerate(drawn):
        finite = np.isfinite(one.values)
        columns = (one.steps[finite] - first) * cells // (last - first + 1)
        np.fmax.at(grid[row], columns, one.values[finite])
    seen = grid[np.isfinite(grid) & ((grid > 0) | (not is_log))]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 1.0)
    norm = LogNorm(low, high) if is_log and seen.size and high > low else Normalize(low, high)
    axes.set_facecolor("0.85")
    edges = np.linspace(first, last + 1, cells + 1)
    drawn_map = axes.pcolormesh(edges, np.arange(len(drawn) + 1), np.ma.masked_invalid(grid), norm=norm, cmap="cividis")
    axes.invert_yaxis()
    every = max(1, math.ceil(len(drawn) / 40))
    axes.set_yticks(np.arange(0, len(drawn), every) + 0.5)
    names = [shortened(printable(one.name), _NAME) for one in drawn[::every]]
    for label in axes.set_yticklabels(names, fontsize=7):
        _text(label)
    figure = axes.get_figure()
    if figure is not None:
        figure.colorbar(drawn_map, ax=axes, pad=0.01).ax.tick_params(labelsize=7)


def _text(text: Any) -> None:
    """Do not parse a text as a formula: names may have dollar signs."""
    text.set_parse_math(False)
