"""Panel of the loss over the steps, with findings marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analyze.rules.finding import Finding
from analyze.seeing.course import Course
from analyze.seeing.decimate import compact
from analyze.seeing.gathered import Gathered
from analyze.seeing.panels.panel import FINDING, LINES, MARKERS, MARKS, SHADES, Panel, drawing, in_columns, tell
from analyze.seeing.words import course_in_words, listed, plain, short, text
from tracer.messaging.messages import DEFAULT_TAG

if TYPE_CHECKING:
    from bokeh.plotting import figure

COLUMNS = 600
"""A curve is thinned to the extremes of this many columns."""
COURSES = 6
"""How many losses of a run are drawn, at most."""


def losses(found: Gathered) -> dict[str, Course]:
    """The losses of a run by label, that of the training first; loss terms only if there is no whole loss."""
    whole = {tag: course for (name, tag), course in found.losses.items() if name == "loss"}
    chosen = whole or {f"{name} {tag}": course for (name, tag), course in found.losses.items()}
    named = {"loss" if tag == DEFAULT_TAG else f"loss {tag}" if whole else tag: one for tag, one in chosen.items()}
    return dict(sorted(named.items(), key=lambda item: item[0] != "loss")[:COURSES])


def panel(found: Gathered, references: Sequence[Gathered], steps: Any) -> Panel:
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
        return Panel(
            name="loss", title="Loss", before="<p>No loss was recorded, so there is no curve of it.</p>" + _marks(found)
        )
    runs = [("", own), *((short(Path(one.checked.trace).name, 30), losses(one)) for one in references)]
    everything = np.concatenate([course.points()[1] for _, kinds in runs for course in kinds.values()])
    finite = everything[np.isfinite(everything)]
    if not len(finite):
        return Panel(
            name="loss", title="Loss", before=f"<p>All {len(everything):,} losses are not finite.</p>" + _marks(found)
        )
    log = bool((finite > 0).all())
    drawn = drawing(steps, 300, y_axis_type="log" if log else "linear", y_axis_label="loss")
    _draw(drawn, runs[::-1])  # the run's own curves are drawn last, above the others
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
    scale = "" if log else "<p>The axis is linear, because some losses are not positive.</p>"
    return Panel(name="loss", title="Loss", before=scale, picture=drawn, alternative=_in_words(own, found))


def _draw(drawn: figure, runs: Sequence[tuple[str, Mapping[str, Course]]]) -> None:
    from bokeh.models import ColumnDataSource

    dashes = ("solid", "dashed", "dotted", "dotdash", "dashdot", "dashed")
    for number_of_run, (run, kinds) in zip(range(len(runs))[::-1], runs, strict=True):
        for number_of_kind, (name, course) in enumerate(kinds.items()):
            steps, values = course.outline(COLUMNS)
            label = plain(f"{name} of {run}" if run else name)
            columns = {"step": compact(steps), "loss": values, "name": [label] * len(steps)}
            source = ColumnDataSource(columns, name=f"loss-{number_of_run}-{number_of_kind}")
            colour = LINES[number_of_run % len(LINES)]
            style: dict[str, Any] = {"source": source, "color": colour, "legend_label": label}
            width = 2 if number_of_run == 0 else 4  # a reference with the same values stays visible below
            line = drawn.line("step", "loss", line_width=width, line_dash=dashes[number_of_kind % len(dashes)], **style)
            if len(steps) < 3 or number_of_kind:
                drawn.scatter("step", "loss", size=6, **style)
            mode = "vline" if not number_of_run and not number_of_kind else "mouse"
            tell(drawn, [line], [("", "@name"), ("step", "@step"), ("loss", "@loss{%.6g}")], mode=mode)


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
    from bokeh.models import ColumnDataSource

    at, values, _ = next(iter(own.values())).points()
    finite = np.isfinite(values)
    at, values = at[finite], values[finite]
    marked = sorted(findings, key=lambda one: -one.severity)[:MARKS]
    for severity in sorted({one.severity for one in marked}):
        these = [one for one in marked if one.severity == severity]
        heights = [float(np.interp(one.first, at, values)) if len(at) else floor for one in these]
        source = ColumnDataSource(
            {
                "step": compact(np.array([one.first for one in these])),
                "loss": heights,
                **in_columns(these),
            },
            name=f"findings-{severity}",
        )
        drawn.vspan(x="step", source=source, line_color=SHADES[severity], line_alpha=0.5, line_dash="dotted")
        marks = drawn.scatter(
            "step", "loss", source=source, marker=MARKERS[severity], size=12, color=SHADES[severity],
            line_color="#444444", legend_label=str(severity),
        )  # fmt: skip
        tell(drawn, [marks], FINDING)


def _marks(found: Gathered) -> str:
    steps = [f"step {one.first}" for one in found.checked.findings]
    return f"<p>There are findings at {text(listed(steps, 8))}.</p>" if steps else ""


def _in_words(own: Mapping[str, Course], found: Gathered) -> str:
    name, course = next(iter(own.items()))
    steps, values, _ = course.points()
    finite = np.isfinite(values)
    told = f"{name} at {course.count:,} steps"
    if finite.any():
        told += f": {course_in_words(steps[finite], values[finite])}"
    if course.bad:
        told += f"; {course.bad:,} are not finite"
    marks = list(dict.fromkeys(f"{one.rule} at step {one.first}" for one in found.checked.findings))
    return f"{told}. " + (f"Marked: {listed(marks, 5)}." if marks else "No finding is marked.")
