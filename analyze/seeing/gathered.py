"""The results of one replay as plain arrays: series by measure and layer, losses, findings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from analyze.seeing.course import Course, Grid
from analyze.seeing.decimate import Steps, Values
from analyze.seeing.findings import Checked
from analyze.seeing.matrices import Matrices
from tracer.messaging.messages import DEFAULT_TAG, Message

LONGEST = 8192
"""How many values of one series are kept, at most."""
FRAMES = 160
"""How many answers of a series of arrays are kept, at most."""

RATIO, GRADIENT, WEIGHT, SIGNAL, DEAD, BAD = (
    *("update/weight ratio", "gradient norm of weights", "norm of weights", "gradient norm of outputs"),
    *("dead share", "numbers not finite"),
)
"""What is measured of each layer in every report."""
TOTAL = "norm of all gradients"
"""What is measured of each model begins so."""
NETWORK = "the network"
"""The label of a series that belongs to no layer."""
LEARNING_RATE = "learning rate"
"""The learning rate of each parameter group of the optimizer, from the hyperparameters."""


class Key(NamedTuple):
    """Identifies a series."""

    what: str
    layer: str | None
    tag: str
    rank: int

    @classmethod
    def of(cls, what: str, message: Message) -> Key:
        """The key of measure or answer `what` for the layer of a message."""
        return cls(what, layer_of(message.key, message.leaf), message.tag, message.rank)


def layer_of(module: str | None, leaf: str) -> str | None:
    """The layer of a module; its other parameters and outputs (leaves) are layers of their own, as in `Results`."""
    return module if not leaf or module is None else f"{module}#{leaf}"


@final
class Frames:
    """A series of arrays, thinned to at most `FRAMES` answers, evenly over the run.

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
        """Append an answer, unless thinning skips it."""
        if self.count % self.stride == 0:
            self.steps.append(step)
            self.rows.append(row)
            if len(self.steps) > FRAMES:
                self.stride *= 2
                del self.steps[1::2], self.rows[1::2]
        self.count += 1

    def cut(self, first: int, last: int) -> Frames:
        """The part between two steps, both inclusive."""
        found = Frames()
        for step, row in zip(self.steps, self.rows, strict=True):
            if first <= step <= last:
                found.add(step, row)
        return found

    def points(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps, and one row of numbers per step; shorter rows are padded with NaN."""
        table = np.full((len(self.rows), max(map(len, self.rows), default=0)), np.nan)
        for number, row in enumerate(self.rows):
            table[number, : len(row)] = row
        return np.array(self.steps, np.int64), table


@dataclass
class Gathered:
    """The results of one replay.

    Attributes
    ----------
    checked : Checked
        The verdict of the rules.
    courses : mapping of Key to Course
        The measures of each layer, and the metric answers that are numbers. No course is empty.
    losses : mapping of (kind, tag) to Course
        No course is empty.
    frames : mapping of Key to Frames or Matrices
        The metric answers that are arrays, and those that compare pairs of layers; see `subscribers`.
    subscribers : mapping of str to str
        Kind of answer → the metric that produces it.
    layers : list of str
        In recorded order.
    span : tuple of int or None
        The first and the last recorded step of training.
    grid : Grid
        The columns of heat maps.
    limit : int
        How many values of a series are kept, at most.
    info : mapping
        `TraceReader.info`.
    remarks : list of str
        A sentence for each thing that could not be computed.
    damage : str
        Why the replay ended early; empty if it did not.
    windows : list of (first, last)
        Steps around findings, in which all values are kept.
    grows : bool
        Whether the run may go on, beyond the present columns.
    rank : int
    reached : int
        The last step that the replay has reached.
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
        """A new, empty series with the limits of this run."""
        return Course(self.limit, self.windows, self.grid, grows=self.grows)

    def add(self, key: Key, step: int, value: float) -> None:
        """Append a value to a series; the first value creates it."""
        if key not in self.courses:
            self.courses[key] = self.course()
        self.courses[key].add(step, value)

    def add_many(self, key: Key, steps: Steps, values: Values) -> None:
        """Append values to a series, as `add` does one."""
        if key not in self.courses:
            self.courses[key] = self.course()
        self.courses[key].add_many(steps, values)

    def bound(self, limit: int) -> None:
        """Keep at most `limit` values of each series from now on."""
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
        """Whether values were left out of a series that a replay of fewer steps would keep."""
        series = (*self.courses.values(), *self.losses.values())
        return any(course.thinned for course in series) or any(one.stride > 1 for one in self.frames.values())

    def cut(self, first: int, last: int) -> Gathered:
        """The part between two steps, both inclusive."""

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
