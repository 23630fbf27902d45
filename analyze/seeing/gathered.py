"""What one replay of a trace brings, as plain arrays: series by measure and layer, losses, findings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from analyze.seeing.course import Course, Grid
from analyze.seeing.findings import Checked
from analyze.seeing.matrices import Matrices
from tracer.messaging.messages import DEFAULT_TAG, Message

LONGEST = 8192
"""So many values of one series are kept, at most."""
FRAMES = 160
"""So many answers of a series of arrays."""

RATIO, GRADIENT, WEIGHT, SIGNAL, DEAD, BAD = (
    *("update/weight ratio", "gradient norm of weights", "norm of weights", "gradient norm of outputs"),
    *("dead share", "numbers not finite"),
)
"""What is measured of each layer, whatever is asked."""
NETWORK = "the network"
"""What a series is of that is of no layer."""
LEARNING_RATE = "learning rate"
"""What hyperparameters tell of each group of an optimizer's parameters."""


class Key(NamedTuple):
    """What a series is of."""

    what: str
    layer: str | None
    tag: str
    rank: int

    @classmethod
    def of(cls, what: str, message: Message) -> Key:
        """That of a measure or a kind of answer, of the layer of a message."""
        return cls(what, layer_of(message.key, message.leaf), message.tag, message.rank)


def layer_of(module: str | None, leaf: str) -> str | None:
    """The layer that is a module; its other parameters and outputs are layers of their own, as in `Results`."""
    return module if not leaf or module is None else f"{module}#{leaf}"


@final
class Frames:
    """A series of arrays: so many of its answers that they can be drawn, evenly over the run.

    Examples
    --------
    >>> frames = Frames()
    >>> for step in range(1000):
    ...     frames.add(step, np.array([step, 1.0]))
    >>> steps, rows = frames.points()
    >>> len(steps) <= FRAMES, steps[:3].tolist(), rows.shape[1]
    (True, [0, 8, 16], 2)
    """

    def __init__(self) -> None:
        self.stride, self.count = 1, 0
        self.steps: list[int] = []
        self.rows: list[NDArray[np.float64]] = []

    def add(self, step: int, row: NDArray[np.float64]) -> None:
        """Append an answer, if it is one of those that are kept."""
        if self.count % self.stride == 0:
            self.steps.append(step)
            self.rows.append(row)
            if len(self.steps) > FRAMES:
                self.stride *= 2
                del self.steps[1::2], self.rows[1::2]
        self.count += 1

    def cut(self, first: int, last: int) -> Frames:
        """Those of some steps, both inclusive."""
        found = Frames()
        for step, row in zip(self.steps, self.rows, strict=True):
            if first <= step <= last:
                found.add(step, row)
        return found

    def points(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps, and a row of numbers for each; shorter ones are filled with NaN."""
        table = np.full((len(self.rows), max(map(len, self.rows), default=0)), np.nan)
        for number, row in enumerate(self.rows):
            table[number, : len(row)] = row
        return np.array(self.steps, np.int64), table


@dataclass
class Gathered:
    """What one replay has brought.

    Attributes
    ----------
    checked : Checked
        What the rules say.
    courses : mapping of Key to Course
        None is empty. Of the layers: what is measured of each, and the answers of metrics that are numbers.
    losses : mapping of (kind, tag) to Course
        None is empty.
    frames : mapping of Key to Frames or Matrices
        The answers of metrics that are arrays, and of those that compare each two layers; see `subscribers`.
    subscribers : mapping of str to str
        For the kind of each answer, the metric that gave it.
    layers : list of str
        In recorded order.
    span : tuple of int or None
        The first and the last recorded step of training.
    grid : Grid
        The columns of heat maps.
    limit : int
        How many values of a series are kept.
    info : mapping
        `TraceReader.info`.
    remarks : list of str
        A sentence for each thing that could not be had.
    damage : str
        Why the replay ended early; empty if it did not.
    windows : list of (first, last)
        Steps around findings of which all values are there.
    grows : bool
        Whether the run may go on, beyond the columns that there are.
    rank : int
    reached : int
        The last step that was heard of.
    """

    checked: Checked
    info: Mapping[str, Any]
    rank: int
    span: tuple[int, int] | None
    grid: Grid
    limit: int = LONGEST
    layers: list[str] = field(default_factory=list)
    courses: dict[Key, Course] = field(default_factory=dict)
    losses: dict[tuple[str, str], Course] = field(default_factory=dict)
    frames: dict[Key, Frames | Matrices] = field(default_factory=dict)
    subscribers: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    damage: str = ""
    windows: list[tuple[int, int]] = field(default_factory=list)
    reached: int = -1
    grows: bool = False

    def course(self) -> Course:
        """A new series of this run."""
        return Course(self.limit, self.windows, self.grid, grows=self.grows)

    def add(self, key: Key, step: int, value: float) -> None:
        """Append a value to a series, which begins with the first."""
        if key not in self.courses:
            self.courses[key] = self.course()
        self.courses[key].add(step, value)

    def bound(self, limit: int) -> None:
        """Keep so many values of each series from now on."""
        self.limit = limit
        for course in (*self.courses.values(), *self.losses.values()):
            course.limit = limit

    def forget(self, kinds: Collection[str]) -> None:
        """Drop the answers of these kinds."""
        for series in (self.courses, self.frames):
            for key in [key for key in series if key.what in kinds]:
                del series[key]
        for kind in kinds:
            self.subscribers.pop(kind, None)

    @property
    def thinned(self) -> bool:
        """Whether something was left out of a series, which a replay of fewer steps would keep."""
        series = (*self.courses.values(), *self.losses.values())
        return any(course.thinned for course in series) or any(one.stride > 1 for one in self.frames.values())

    def cut(self, first: int, last: int) -> Gathered:
        """What is there of some steps, both inclusive."""

        def part_of(series: Mapping[Any, Any]) -> dict[Any, Any]:
            parts = {key: one.cut(first, last) for key, one in series.items()}
            return {key: one for key, one in parts.items() if one.count}

        return replace(
            self,
            grid=Grid.over(first, last),
            courses=part_of(self.courses),
            losses=part_of(self.losses),
            frames=part_of(self.frames),
        )

    def of(self, what: str, tag: str = DEFAULT_TAG) -> dict[str, Course]:
        """The series of one measure or kind of answer, by layer."""
        return {
            key.layer: course
            for key, course in self.courses.items()
            if key.what == what and key.tag == tag and key.layer is not None
        }
