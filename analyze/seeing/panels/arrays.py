"""Panel of answers that are arrays, such as histograms and spectra, over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyze.seeing.gathered import NETWORK, Frames, Gathered, Key
from analyze.seeing.layers import Layer
from analyze.seeing.panels.panel import Panel, drawing, legend, packed, tell
from analyze.seeing.words import text, titled

NUMBERS = 45_000
"""How many numbers all arrays in the page have together, at most."""


def arrays_of(found: Gathered, order: Sequence[Layer]) -> list[dict[str, Any]]:
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
            "what": titled(key.what, key.tag),
            "layer": key.layer if key.layer is not None else NETWORK,
            "steps": packed(steps),
            "width": table.shape[1],
            "cells": packed(table),
        }
        with_edges = edges.get(key._replace(what=f"{key.what}_edges"))
        if with_edges is not None:
            pack |= _edges(with_edges, key, frames)
        packs.append(pack)
    return packs


def _series(found: Gathered) -> dict[Key, Frames]:
    return {key: one for key, one in found.frames.items() if isinstance(one, Frames)}


def _edges(edges: Frames, key: Key, frames: Frames) -> dict[str, Any]:
    """The lowest and the highest edge of each histogram."""
    _, table = edges.points()
    if len(table) != len(frames.steps) or not table.size:
        return {}
    return {"low": packed(table[:, 0]), "high": packed(table[:, -1])}


def panel(found: Gathered, order: Sequence[Layer], steps: Any) -> Panel:
    """The panel of histograms and spectra."""
    from bokeh.models import ColumnDataSource, LinearColorMapper
    from bokeh.palettes import Viridis256

    packs = arrays_of(found, order)
    title = "Histograms and spectra over the steps"
    if not packs:
        none = "No metric was asked whose answers are arrays, such as histogram or singular_values."
        return Panel(name="arrays", title=title, before=f"<p>{none}</p>")
    kinds = list(dict.fromkeys(str(one["what"]) for one in packs))
    options = "".join(f"<option>{text(kind)}</option>" for kind in kinds)
    picture = drawing(steps, 340, name="arrays")
    names = ("left", "right", "bottom", "top", "value", "step", "at")
    source = ColumnDataSource({name: [] for name in names}, name="array-cells")
    mapper = LinearColorMapper(palette=Viridis256, low=0, high=1, name="array-colours")
    marks = picture.quad(
        "left", "right", "bottom", "top", source=source, line_color=None,
        fill_color={"field": "value", "transform": mapper},
    )  # fmt: skip
    tell(picture, [marks], [("step", "@step"), ("at", "@at"), ("value", "@value{%.6g}")])
    legend(picture, mapper)
    there = sum(not key.what.endswith("_edges") for key in _series(found))
    left_out = f" Of {there:,} series, {len(packs):,} have room in the page." if there > len(packs) else ""
    return Panel(
        name="arrays",
        title=title,
        before=f'<label>Show <select id="array-what">{options}</select></label> '
        f'<label>of <select id="array-layer"></select></label><p class="note">A column is an answer: of a histogram '
        f"its bins, between their edges; of other arrays their numbers in order.{left_out}</p>",
        picture=picture,
        alternative=_in_words(packs),
        data={"packs": packs},
    )


def _in_words(packs: Sequence[Mapping[str, Any]]) -> str:
    shown = ", ".join(dict.fromkeys(f"{one['what']} of {one['layer']}" for one in packs[:6]))
    return f"Heat maps of arrays over the steps: {shown}{' and others' if len(packs) > 6 else ''}."
