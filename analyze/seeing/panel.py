"""The parts of a panel, and the common style of the pictures and words of a page."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from typing import Any

import numpy as np
from bokeh.events import Tap
from bokeh.models import (
    BoxZoomTool,
    ColorBar,
    ColorMapper,
    ColumnDataSource,
    CustomJS,
    FixedTicker,
    HoverTool,
    NoOverlap,
)
from bokeh.plotting import figure
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from analyze.rules.finding import Finding
from analyze.seeing.course import Course, Grid, Values, coarser, compact, largest
from analyze.seeing.gathered import layer_of
from tracer.shown import printable


def text(value: object) -> str:
    r"""Any value as text for an HTML element or attribute: escaped, on one line, without control characters.

    Examples
    --------
    >>> text("<b>\u202e&\x1b")
    '&lt;b&gt;\\u202e&amp;\\x1b'
    """
    return html.escape(printable(str(value)))


_PARTS = (
    Environment(
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(text(value)),
        undefined=StrictUndefined,
    )
    .from_string("".join(map(str.strip, files("analyze.seeing").joinpath("page.html").read_text("utf-8").splitlines())))
    .module
)


def part(name: str, /, *given: object, **values: object) -> str:
    """A part of the page as HTML: the macro of this name in ``page.html``, with these values, which are escaped."""
    return str(getattr(_PARTS, name)(*given, **values))


def plain(value: str) -> str:
    r"""A name for a drawing, never a formula: Bokeh would load a typesetter for formulas from the network.

    Examples
    --------
    >>> plain("$$x$$"), plain("fc\n")
    ('$ $x$ $', 'fc\\n')
    """
    return printable(value).replace("$$", "$ $").replace("\\(", "\\ (").replace("\\[", "\\ [")


def short(name: str, length: int = 24) -> str:
    """Shorten a long name at its beginning, since names of layers differ at their ends.

    Examples
    --------
    >>> short("encoder.layers.11.attention.query", 16), short("fc1")
    ('…attention.query', 'fc1')
    """
    return name if len(name) <= length else "…" + name[1 - length :]


def titled(what: str, tag: str) -> str:
    """The name of an answer, with its tag unless that is the default.

    Examples
    --------
    >>> titled("loss", "default"), titled("loss", "probe")
    ('loss', 'loss (tag probe)')
    """
    return plain(what if tag == "default" else f"{what} (tag {tag})")


def number(value: float | None, digits: int = 4) -> str:
    """A number for people; empty for None.

    Examples
    --------
    >>> number(0.00012345678), number(float("inf")), number(None), number(1234567.0, 7)
    ('0.0001235', 'infinite', '', '1234567')
    """
    if value is None:
        return ""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return f"{value:.{digits}g}"


def course_in_words(steps: np.ndarray, values: np.ndarray) -> str:
    """The first, last, least and greatest value of a course, in words.

    Examples
    --------
    >>> course_in_words(np.array([0, 5, 9]), np.array([2.0, 0.5, 1.0]))
    '2 at step 0, 1 at step 9; the least is 0.5 at step 5, the greatest 2 at step 0'
    """
    places = (0, -1, np.argmin(values), np.argmax(values))
    first, last, least, greatest = (f"{number(values[at])} at step {steps[at]}" for at in places)
    return f"{first}, {last}; the least is {least}, the greatest {greatest}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names as a list in a sentence; beyond `most`, only their count.

    Examples
    --------
    >>> listed(["a", "b", "c"], 2), listed(["a"])
    ('a, b and 1 more', 'a')
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


ROWS = 120
"""How many rows a heat map has, at most; with more layers, neighbours share a row."""


@dataclass(frozen=True, eq=False)
class Map:
    """A heat map.

    Attributes
    ----------
    cells : ndarray of float32, or of float64 where the range needs it, (rows, columns)
        NaN where nothing was recorded, infinity where a value was not finite.
    layers : tuple of tuple of str
        The layers of each row. The order is reversed: the first recorded layer is last, since Bokeh draws upwards.
    grid : Grid
        The columns.
    """

    cells: np.ndarray
    layers: tuple[tuple[str, ...], ...]
    grid: Grid

    @property
    def names(self) -> list[str]:
        """The label of each row."""
        return [one[0] if len(one) == 1 else f"{one[0]} … {one[-1]}" for one in self.layers]

    @property
    def last(self) -> int:
        """The first step behind the last column."""
        return self.grid.first + self.grid.width * self.grid.columns


def drawn(courses: Mapping[str, Course], order: Sequence[str], budget: int, *, shifts: bool = False) -> Map | None:
    """The heat map of a measure.

    Parameters
    ----------
    courses : mapping of str to Course
        By layer; all begin at the same step.
    order : sequence of str
        The layers in recorded order.
    budget : int
        How many cells the map may have.
    shifts : bool
        Whether to draw the distances from the past instead of the values.

    Returns
    -------
    Map or None
        None without layers.
    """
    names = [name for name in order if name in courses]
    if not names:
        return None
    share = -(-len(names) // ROWS)
    groups = [tuple(names[at : at + share]) for at in range(0, len(names), share)][::-1]
    grid = max((courses[name].grid for name in names), key=lambda one: one.width)  # a series that grew has a wider one
    rows = [largest([_cells(courses[name], grid, shifts) for name in group], by_size=shifts) for group in groups]
    cells = np.array(rows)
    if any(courses[name].grows for name in names):
        cells = _trimmed(cells)
    stride = max(_stride(courses[names[0]]), 1)
    factor = max(-(-stride // grid.width), -(-cells.shape[1] * len(rows) // budget))
    cells = coarser(cells, factor, by_size=shifts)
    return Map(compact(cells), tuple(groups), Grid(grid.first, grid.width * factor, cells.shape[1]))


def _cells(course: Course, grid: Grid, shifts: bool) -> Values:
    """A course's row of cells in the columns of a grid that is as wide as its own, or wider."""
    row = coarser(course.cells[int(shifts)][None], grid.width // course.grid.width, by_size=shifts)[0]
    padded = np.full(grid.columns, np.nan)
    padded[: len(row)] = row[: grid.columns]
    return padded


def _trimmed(cells: Values) -> Values:
    """The cells without the trailing columns that are still empty."""
    recorded = np.flatnonzero(~np.isnan(cells).all(axis=0))
    return cells[:, : int(recorded[-1]) + 1] if len(recorded) else cells[:, :1]


def compared(one: Map, other: Map) -> Map:
    """The base-2 logarithm of the ratio of each cell of `one` to that of `other`, which begins at the same step.

    The columns are those of the wider grid; if its width is no multiple of the other's, all cells are NaN. NaN where a
    map has nothing or is not positive, or where `other` is not finite; infinity where only `one` is not finite.
    """
    known = {group: number for number, group in enumerate(other.layers)}
    width = max(one.grid.width, other.grid.width)
    if one.grid.first != other.grid.first or width % one.grid.width or width % other.grid.width:
        return Map(np.full(one.cells.shape, np.nan, np.float32), one.layers, one.grid)
    ours, theirs = (coarser(each.cells, width // each.grid.width) for each in (one, other))
    cells = np.full(ours.shape, np.nan)
    columns = min(ours.shape[1], theirs.shape[1])
    for number, group in enumerate(one.layers):
        if group in known:
            a, b = ours[number, :columns], theirs[known[group], :columns]
            usable = (a > 0) & (b > 0) & np.isfinite(b)
            cells[number, :columns][usable] = np.log2(a[usable]) - np.log2(b[usable])
    return Map(compact(cells), one.layers, Grid(one.grid.first, width, ours.shape[1]))


def _stride(course: Course) -> int:
    """The median distance between consecutive recorded steps."""
    steps = np.unique(course.points()[0][-64:])
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Colours for the colour-blind: M. Okabe and K. Ito, "Color Universal Design" (2008)."""
SLOTS = 8
"""How many layers can be selected together; the last two repeat the first two colours, with dashes."""
DASHES = ("solid",) * len(LINES) + ("dashed",) * (SLOTS - len(LINES))
AWAY = {"light": ("#0072B2", "#f4f4f4", "#D55E00"), "dark": ("#56B4E9", "#26282e", "#E69F00")}
"""Colours below, at and above the usual value."""
FARTHEST = 4.0
"""The shift, in powers of two, at which the colours of `AWAY` end."""
NOT_FINITE = "#CC79A7"
CLEAR = "rgba(0, 0, 0, 0)"
MARKS = 60
"""How many findings of a severity are marked in a picture, at most."""
MARKERS = {1: "circle", 2: "inverted_triangle", 3: "star"}
SHADES = {1: "#56B4E9", 2: "#E69F00", 3: "#D55E00"}
"""The marker colour of each severity."""
FINDING = (("step", "@step"), ("rule", "@rule"), ("where", "@where"), ("", "@evidence"))
"""The tooltip of a finding."""
LABELS = 26
"""How many rows of a heat map have labels, at most."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A part of the page.

    Attributes
    ----------
    name : str
        The id of the HTML section.
    title : str
    before : str
        Escaped HTML before the picture.
    picture : figure, optional
    alternative : str
        The alternative text of the picture.
    data : mapping
        JSON values for the page's script, under the panel's name.
    """

    name: str
    title: str
    before: str = ""
    picture: figure | None = None
    alternative: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def sentences(name: str, title: str, *lines: str) -> Panel:
    """A panel of a few sentences, for what was not recorded."""
    return Panel(name=name, title=title, before=part("paragraphs", lines))


def drawing(steps: Any, height: int, **options: Any) -> figure:
    """An empty picture over the steps, with the common tools.

    Parameters
    ----------
    steps : bokeh.models.Range1d
        The horizontal range, which pictures may share.
    height : int
    **options
        Options of `bokeh.plotting.figure`.
    """
    zoom = BoxZoomTool(dimensions="width")
    drawn = figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=steps,
        tools=[zoom],
        active_drag=zoom,
        toolbar_location=None,  # the page has its own buttons; a toolbar would cover the picture
        x_axis_label="step",
        **options,
    )
    drawn.background_fill_color = drawn.border_fill_color = None
    for axis in drawn.axis:
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
    drawn.xgrid.grid_line_color = None
    drawn.ygrid.grid_line_alpha = 0.3
    return drawn


def tell(drawn: figure, marks: Sequence[Any], told: Sequence[tuple[str, str]], **options: Any) -> None:
    """Add a tooltip to marks; `told` has pairs of a title and a column with its format."""
    formats = {column.partition("{")[0]: "printf" for _, column in told if "{%" in column}
    drawn.add_tools(
        HoverTool(renderers=list(marks), tooltips=list(told), visible=False, **({"formatters": formats} | options))
    )


def legend(drawn: figure, mapper: ColorMapper, **options: Any) -> None:
    """Add a colour bar at the right of a picture."""
    bar = ColorBar(color_mapper=mapper, width=10, padding=4, background_fill_color=None, **options)
    drawn.add_layout(bar, "right")


def name_rows(drawn: figure, names: Sequence[str], marked: Sequence[int] = ()) -> None:
    """Label the rows of a heat map: all if there is room, otherwise some, and the first of the marked rows."""
    count = len(names)
    ticks = list(range(count))
    if count > LABELS:
        every = -(-count // LABELS)
        near = {row for one in marked[:6] for row in range(one - every + 1, one + every)}
        ticks = sorted({*marked[:6], *(row for row in range(0, count, every) if row not in near)})
    drawn.yaxis.ticker = FixedTicker(ticks=ticks)
    drawn.yaxis.major_label_overrides = {row: short(plain(names[row])) for row in ticks}
    drawn.yaxis.major_label_policy = NoOverlap()
    drawn.yaxis.major_tick_line_color = None
    drawn.ygrid.grid_line_color = None


def height_of(rows: int) -> int:
    """The height of a heat map in pixels."""
    return int(np.clip(18 * rows, 110, 560)) + 70


def blend(colours: Sequence[str], count: int = 255) -> list[str]:
    """`count` colours interpolated between the given ones.

    Examples
    --------
    >>> blend(("#000000", "#808080", "#ffffff"), 5)
    ['#000000', '#404040', '#808080', '#c0c0c0', '#ffffff']
    """
    anchors = np.array([[int(one[at : at + 2], 16) for at in (1, 3, 5)] for one in colours])
    at = np.linspace(0, len(colours) - 1, count)
    mixed = np.stack([np.interp(at, np.arange(len(colours)), anchors[:, channel]) for channel in range(3)], axis=1)
    return ["#" + "".join(f"{channel:02x}" for channel in row) for row in np.rint(mixed).astype(int)]


def packed(values: np.ndarray) -> str:
    """Numbers for the page's script: a letter for the dtype, then base64 of the bytes.

    Examples
    --------
    >>> packed(np.array([1.0])), packed(np.array([1])), packed(np.array([1e300]))[0]
    ('fAACAPw==', 'iAQAAAA==', 'd')
    """
    small = compact(values)
    letter = {"float32": "f", "float64": "d", "int32": "i"}[small.dtype.name]
    return letter + base64.b64encode(np.ascontiguousarray(small, small.dtype.newbyteorder("<")).tobytes()).decode()


def mark_layers(drawn: figure, findings: Iterable[Finding], rows: Mapping[str, int], panel: str) -> None:
    """Make the rows of a heat map selectable by a click, and mark the findings of their layers."""
    code = "document.dispatchEvent(new CustomEvent('layer-tap', {detail: {panel, y: cb_obj.y}}))"
    drawn.js_on_event(Tap, CustomJS(args={"panel": panel}, code=code))
    _mark_findings(drawn, findings, rows, panel)
    selected = ColumnDataSource({"y0": [], "y1": [], "colour": []})
    drawn.hstrip("y0", "y1", name=f"{panel}-selected", fill_alpha=0, line_width=2, line_color="colour", source=selected)


def _mark_findings(drawn: figure, findings: Iterable[Finding], rows: Mapping[str, int], name: str) -> None:
    """Mark each finding at its first step in the row of its layer."""
    for severity, these in groupby(sorted(findings, key=lambda one: one.severity), key=lambda one: one.severity):
        marked = [one for one in these if _layer(one) in rows][:MARKS]
        source = ColumnDataSource(
            {
                "step": compact(np.array([one.first for one in marked], np.int64)),
                "row": [rows[_layer(one) or ""] + 0.4 for one in marked],  # at the edge, so the cell stays visible
                **in_columns(marked),
            },
            name=f"{name}-findings-{severity}",
        )
        marks = drawn.scatter(
            "step", "row", source=source, marker=MARKERS[severity], size=9, color=SHADES[severity],
            line_color="#222222", level="overlay",
        )  # fmt: skip
        tell(drawn, [marks], FINDING)


def _layer(one: Finding) -> str | None:
    return layer_of(one.module, one.leaf)


def in_columns(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """The text columns of `FINDING`."""
    return {
        "rule": [one.rule for one in findings],
        "where": [plain(one.place) for one in findings],
        "evidence": [plain(one.evidence) for one in findings],
    }
