"""Panel of the heat map: the update/weight ratio of all layers over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from analyze.seeing.gathered import GRADIENT, RATIO, SIGNAL, Gathered
from analyze.seeing.layers import Layer
from analyze.seeing.maps import Map, compared, drawn
from analyze.seeing.panels.panel import (
    AWAY,
    FARTHEST,
    NOT_FINITE,
    Panel,
    blend,
    drawing,
    height_of,
    legend,
    mark_layers,
    name_rows,
    tell,
)
from analyze.seeing.words import number, plain, text, times

if TYPE_CHECKING:
    from bokeh.models import ColorMapper
    from bokeh.plotting import figure

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


APART = (
    '<p class="note">The reference run has no layer with the same steps, or was recorded at others, so the two are not '
    "compared here.</p>"
)


def measure_of(found: Gathered) -> str | None:
    """The measure that the heat map shows: the ratio, or else the best recorded substitute."""
    return next((what for what in (RATIO, GRADIENT, SIGNAL) if found.of(what)), None)


def panel(found: Gathered, reference: Gathered | None, order: Sequence[Layer], steps: Any) -> Panel:
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
        return Panel(name="heat", title="Layers over the steps", before=f"<p>{lacking}</p>")
    maps = _maps(found, reference, what)
    first = maps["value"]
    rows = len(first.layers)
    picture = drawing(steps, height_of(rows), y_range=(-0.5, rows - 0.5))
    anomalous = {one.name: number_of for number_of, one in enumerate(order)}
    best = [min(anomalous.get(name, len(order)) for name in group) for group in first.layers]
    name_rows(picture, first.names, [int(row) for row in np.argsort(best, kind="stable")])
    for mode, one in maps.items():
        _draw(picture, mode, one, what, visible=mode == "past")
    _draw_bad(picture, first)
    places = {name: row for row, group in enumerate(first.layers) for name in group}
    mark_layers(picture, found.checked.findings, places, "heat")
    return Panel(
        name="heat",
        title=f"{what[0].upper()}{what[1:]} of each layer",
        before=_controls(maps, what) + ("" if reference is None or "reference" in maps else APART),
        picture=picture,
        alternative=_in_words(what, order, first),
        data={
            "modes": list(maps),
            "rows": [list(group) for group in first.layers],
            "away": {mode: blend(colours) for mode, colours in AWAY.items()},
        },
    )


def _maps(found: Gathered, reference: Gathered | None, what: str) -> dict[str, Map]:
    own = found.of(what)
    value, past = drawn(own, found.layers, CELLS), drawn(own, found.layers, CELLS, shifts=True)
    assert value is not None
    assert past is not None
    maps = {"value": value, "past": past}
    other = drawn(reference.of(what), found.layers, CELLS) if reference is not None else None
    both = None if other is None else compared(value, other)
    if both is not None and not np.isnan(both.cells).all():
        maps["reference"] = both
    return maps


def colours_of(mode: str, cells: np.ndarray) -> ColorMapper:
    """The colour mapper of a map."""
    from bokeh.models import LinearColorMapper, LogColorMapper
    from bokeh.palettes import Viridis256

    if mode != "value":
        return LinearColorMapper(
            palette=blend(AWAY["light"]),
            low=-FARTHEST,
            high=FARTHEST,
            nan_color="rgba(0, 0, 0, 0)",
            name=f"away-{mode}",
            # in the heat map, values beyond the scale have its last colour; `_draw_bad` covers non-finite cells
            **({"high_color": NOT_FINITE} if mode == "zoom" else {}),
        )
    finite = cells[np.isfinite(cells)]
    positive = finite[finite > 0]
    plainly = {"palette": Viridis256, "nan_color": "rgba(0, 0, 0, 0)", "high_color": NOT_FINITE}
    if len(positive) and (finite >= 0).all():
        low, high = float(np.quantile(positive, 0.01)), float(positive.max())
        return LogColorMapper(low=low, high=max(high, low * 1.001), low_color=Viridis256[0], **plainly)
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    return LinearColorMapper(low=low, high=max(high, low + 1e-12), **plainly)


def _draw(picture: figure, mode: str, one: Map, what: str, *, visible: bool) -> None:
    from bokeh.models import ColumnDataSource, CustomJSHover

    width = float(one.last - one.grid.first)
    source = ColumnDataSource(
        {"image": [one.cells], "x": [one.grid.first - 0.5], "y": [-0.5], "dw": [width], "dh": [len(one.layers)]}
    )
    mapper = colours_of(mode, one.cells)
    image = picture.image(
        "image", "x", "y", "dw", "dh", source=source, color_mapper=mapper, name=f"heat-{mode}", visible=visible
    )
    names = [plain(name) for name in one.names]
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
    tell(picture, [image], told, formatters=formats, name=f"heat-hover-{mode}")
    legend(
        picture, mapper, margin=0, visible=visible, name=f"heat-bar-{mode}", major_label_text_font_size="11px",
        height=int(picture.height * 0.55),
    )  # fmt: skip


def _draw_bad(picture: figure, one: Map) -> None:
    """Cover the cells with non-finite values; in comparisons such cells have no colour of their own."""
    from bokeh.models import LinearColorMapper

    bad = np.isinf(one.cells)
    if bad.any():
        picture.image(
            [bad.astype(np.uint8)], one.grid.first - 0.5, -0.5, one.last - one.grid.first, len(one.layers),
            color_mapper=LinearColorMapper(palette=["rgba(0, 0, 0, 0)", NOT_FINITE], low=0, high=1), name="heat-bad",
        )  # fmt: skip


def _controls(maps: dict[str, Map], what: str) -> str:
    """The radio buttons that switch between the maps."""
    options = []
    for mode in ("past", "value", "reference"):
        if mode in maps:
            checked = " checked" if mode == "past" else ""
            options.append(
                f'<label><input type="radio" name="heat-mode" value="{mode}"{checked}> {text(MODES[mode][0])}</label>'
            )
    notes = [
        f'<p class="note" data-mode="{mode}"{"" if mode == "past" else " hidden"}>'
        f"{text(MODES[mode][1].format(what=what))}</p>"
        for mode in maps
    ]
    shared = max(len(group) for group in maps["value"].layers)
    width = maps["value"].grid.width
    cells = [f"a column is {width} steps" if width > 1 else "", f"a row is {shared} layers" if shared > 1 else ""]
    told = " and ".join(one for one in cells if one)
    remark = f'<p class="note">In this map {told}; of what they share the greatest is shown.</p>' if told else ""
    if np.isinf(maps["value"].cells).any():
        sign = f'<span style="color:{NOT_FINITE}">■</span>'
        remark += f'<p class="note">{sign} holds something that is not finite.</p>'
    return f"<fieldset><legend>Show it</legend>{''.join(options)}</fieldset>{''.join(notes)}{remark}"


def _in_words(what: str, order: Sequence[Layer], one: Map) -> str:
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
