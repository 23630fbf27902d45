"""Panel of the learning rates over the steps, from the recorded hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analyze.seeing.course import Course
from analyze.seeing.decimate import compact
from analyze.seeing.gathered import LEARNING_RATE, Gathered
from analyze.seeing.panels.panel import DASHES, LINES, SLOTS, Panel, drawing, tell
from analyze.seeing.words import course_in_words, plain
from tracer.messaging.messages import DEFAULT_TAG

COLUMNS = 400
"""A curve is thinned to the extremes of this many columns."""


def panel(found: Gathered, steps: Any) -> Panel:
    """The panel of the learning rates: a curve per parameter group of the optimizer.

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
    from bokeh.models import ColumnDataSource

    greatest = max((float(course.points()[1].max()) for course in rates.values()), default=0.0)
    if math.isfinite(greatest) and greatest > 0:
        picture.y_range.default_span = 2 * greatest  # a constant rate lies in the middle of an axis that begins at zero
    for place, (name, course) in enumerate(rates.items()):
        steps, values = course.outline(COLUMNS)
        columns = {"step": compact(steps), "rate": values, "name": [plain(name)] * len(steps)}
        source = ColumnDataSource(columns, name=f"rate-{place}")
        line = picture.line(
            "step", "rate", source=source, line_width=2, line_dash=DASHES[place], color=LINES[place % len(LINES)]
        )
        if len(steps) < 3:
            picture.scatter("step", "rate", source=source, size=6, color=LINES[place % len(LINES)])
        tell(picture, [line], [("", "@name"), ("step", "@step"), ("learning rate", "@rate{%.6g}")])


def _in_words(rates: Mapping[str, Course]) -> str:
    told = [f"{name}: {course_in_words(*course.points()[:2])}" for name, course in rates.items()]
    return f"The learning rate of each group of an optimizer's parameters. {'. '.join(told)}."
