"""The parts of a panel, and the common style of the pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from analyze.rules.finding import Finding
from analyze.seeing.decimate import compact
from analyze.seeing.gathered import layer_of
from analyze.seeing.words import plain, short

if TYPE_CHECKING:
    from bokeh.models import ColorMapper
    from bokeh.plotting import figure

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
    from bokeh.models import BoxZoomTool
    from bokeh.plotting import figure

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
    from bokeh.models import HoverTool

    formats = {column.partition("{")[0]: "printf" for _, column in told if "{%" in column}
    drawn.add_tools(
        HoverTool(renderers=list(marks), tooltips=list(told), visible=False, **({"formatters": formats} | options))
    )


def legend(drawn: figure, mapper: ColorMapper, **options: Any) -> None:
    """Add a colour bar at the right of a picture."""
    from bokeh.models import ColorBar

    bar = ColorBar(color_mapper=mapper, width=10, padding=4, background_fill_color=None, **options)
    drawn.add_layout(bar, "right")


def name_rows(drawn: figure, names: Sequence[str], marked: Sequence[int] = ()) -> None:
    """Label the rows of a heat map: all if there is room, otherwise some, and the first of the marked rows."""
    from bokeh.models import FixedTicker, NoOverlap

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
    from bokeh.events import Tap
    from bokeh.models import ColumnDataSource, CustomJS

    code = "document.dispatchEvent(new CustomEvent('layer-tap', {detail: {panel, y: cb_obj.y}}))"
    drawn.js_on_event(Tap, CustomJS(args={"panel": panel}, code=code))
    _mark_findings(drawn, findings, rows, panel)
    selected = ColumnDataSource({"y0": [], "y1": [], "colour": []})
    drawn.hstrip("y0", "y1", name=f"{panel}-selected", fill_alpha=0, line_width=2, line_color="colour", source=selected)


def _mark_findings(drawn: figure, findings: Iterable[Finding], rows: Mapping[str, int], name: str) -> None:
    """Mark each finding at its first step in the row of its layer."""
    from bokeh.models import ColumnDataSource

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
