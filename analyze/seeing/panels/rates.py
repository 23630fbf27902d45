"""The learning rates over the steps, as the optimizers' hyperparameters tell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from analyze.seeing.course import Course
from analyze.seeing.decimate import compact, extremes, width_for
from analyze.seeing.gathered import LEARNING_RATE, Gathered
from analyze.seeing.panels.panel import DASHES, LINES, SLOTS, Panel, drawing
from analyze.seeing.words import number, plain
from tracer.messaging.messages import DEFAULT_TAG

COLUMNS = 400
"""Of so many columns of a curve the extremes are drawn."""


def panel(found: Gathered, steps: Any) -> Panel:
    """The panel of the learning rates, a curve for each group of an optimizer's parameters.

    Parameters
    ----------
    found : Gathered
    steps : bokeh.models.Range1d
    """
    rates = dict(list(found.of(LEARNING_RATE, DEFAULT_TAG).items())[:SLOTS])
    if not rates:
        before = "<p>No hyperparameters were recorded, so there is no curve of the learning rate.</p>"
        return Panel(name="rates", title="Learning rate", before=before)
    picture = drawing(steps, 180, y_axis_label="learning rate")
    _draw(picture, rates)
    return Panel(name="rates", title="Learning rate", picture=picture, alternative=_in_words(rates))


def _draw(picture: Any, rates: Mapping[str, Course]) -> None:
    from bokeh.models import ColumnDataSource, HoverTool

    for place, (name, course) in enumerate(rates.items()):
        at, values, _ = course.points()
        chosen = extremes(at, values, width_for(int(at[0]), int(at[-1]), COLUMNS))
        source = ColumnDataSource(
            {"step": compact(at[chosen]), "rate": values[chosen], "name": [plain(name)] * len(chosen)},
            name=f"rate-{place}",
        )
        line = picture.line(
            "step", "rate", source=source, line_width=2, line_dash=DASHES[place], color=LINES[place % len(LINES)]
        )
        if len(chosen) < 3:
            picture.scatter("step", "rate", source=source, size=6, color=LINES[place % len(LINES)])
        told = [("", "@name"), ("step", "@step"), ("learning rate", "@rate{%.6g}")]
        picture.add_tools(HoverTool(renderers=[line], tooltips=told, formatters={"@rate": "printf"}, visible=False))


def _in_words(rates: Mapping[str, Course]) -> str:
    told = []
    for name, course in rates.items():
        at, values, _ = course.points()
        low, high = int(np.argmin(values)), int(np.argmax(values))
        told.append(
            f"{name}: {number(values[0])} at step {at[0]}, {number(values[-1])} at step {at[-1]}; the least is "
            f"{number(values[low])} at step {at[low]}, the greatest {number(values[high])} at step {at[high]}"
        )
    return f"The learning rate of each group of an optimizer's parameters. {'. '.join(told)}."
