"""The order of messages that is found window by window is the one that whole journals lead to."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracer.format.journal import COLUMNS, Column
from tracer.messaging.messages import DEFAULT_TAG
from tracer.trace.attempts import counting, in_order
from tracer.upkeep.ordering import Ordering
from tracer.upkeep.survey_journal import Window

TAGS = {0: DEFAULT_TAG, 1: "eval", 2: "probe"}
STREAMS: Any = {number: SimpleNamespace(tag=tag) for number, tag in TAGS.items()}


@dataclass
class Surveyed:
    """What an ordering asks of a survey; rows that are not certain hold anything."""

    rank: int
    attempt: int
    first_step: int
    rows: NDArray[np.int64]
    certain: NDArray[np.bool_]
    sound: NDArray[np.bool_]
    header: dict[str, Any] = field(default_factory=lambda: {"run_id": "x"})
    streams: Any = field(default_factory=lambda: STREAMS)

    @property
    def journal(self) -> Any:
        """Itself."""
        return self

    @property
    def length(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    def windows(self, most: int | None = None) -> Any:
        """Of eight rows each."""
        for start in range(0, len(self.rows), 8):
            part = slice(start, start + 8)
            yield Window(start, self.rows[part], self.certain[part], self.sound[part])


@dataclass
class Whole:
    """The same as `in_order` needs it: a row that cannot be read has the step of the row before it, found plainly."""

    rank: int
    attempt: int
    first_step: int
    journal: NDArray[np.int64]
    start: int = 0
    clock: int = 0

    @classmethod
    def of(cls, one: Surveyed, first_step: int) -> Whole:
        """With the rows put right one by one."""
        journal, step = one.rows.copy(), 0
        for row, is_certain, is_sound in zip(journal, one.certain, one.sound, strict=True):
            step = int(row[Column.GLOBAL_STEP]) if is_certain else step
            if not is_sound:
                row[:] = 0
            row[Column.GLOBAL_STEP] = step
        return cls(one.rank, one.attempt, first_step, journal)

    @property
    def messages(self) -> int:
        """How many rows there are."""
        return len(self.journal)

    def evaluated(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """The rows of evaluations before a step is trained, and their tags, found plainly."""
        rows, tags = [], []
        for number, row in enumerate(self.journal.tolist()):
            tag = TAGS[row[Column.STREAM]]
            if tag == DEFAULT_TAG and row[Column.GLOBAL_STEP] >= step:
                break
            if tag != DEFAULT_TAG and row[Column.GLOBAL_STEP] == step:
                rows.append(number)
                tags.append(tag)
        return np.array(rows, np.int64), np.array(tags, np.str_)


def surveyed(rng: np.random.Generator, rank: int, attempt: int, first: int, damage: float) -> Surveyed:
    """A part: steps that mostly ascend, with evaluations of the state before a step and of earlier steps."""
    count = int(rng.integers(0, 70))
    rows = np.zeros((count, COLUMNS), np.int64)
    rows[:, Column.STREAM] = rng.choice([0, 0, 0, 1, 2], count)
    steps = first + np.cumsum(rng.integers(0, 2, count) * rng.integers(0, 3))
    rows[:, Column.GLOBAL_STEP] = np.maximum(0, steps - (rng.random(count) < 0.1) * 2)
    certain = rng.random(count) >= damage
    sound = certain & (rng.random(count) >= damage)
    rows[~certain] = rng.integers(-5, 99)
    return Surveyed(rank, attempt, first, rows, certain, sound)


@pytest.mark.parametrize("damage", [0.0, 0.2])
@pytest.mark.parametrize("seed", [*range(12), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 200)]])
def test_it_is_the_order_of_whole_journals(seed: int, damage: float) -> None:
    """Of several ranks and attempts, with rows that cannot be read: the same rows, in the same order."""
    rng = np.random.default_rng(seed)
    firsts = [0, int(rng.integers(0, 9)), int(rng.integers(0, 15))][: 1 + seed % 3]
    parts = [
        surveyed(rng, rank, attempt, first, damage)
        for attempt, first in enumerate(firsts)
        for rank in range(1 + seed % 4)
    ]
    ordering = Ordering(parts)  # type: ignore[arg-type]
    found = []
    for batch in ordering.batches():
        assert len(batch.places)
        for number, place in zip(batch.surveys.tolist(), batch.places.tolist(), strict=True):
            found.append((number, batch.windows[number].start + place))
    whole = [Whole.of(one, one.first_step) for one in parts]
    numbers, rows = in_order(whole, counting(whole))
    assert found == list(zip(numbers.tolist(), rows.tolist(), strict=True))
    assert ordering.total == len(found)


def test_an_attempt_whose_header_is_lost_began_where_others_say() -> None:
    """Another rank of the attempt tells where it began; where none does, its first message of training."""
    rng = np.random.default_rng(0)
    first, second, third = (surveyed(rng, rank, attempt, 0, 0) for rank, attempt in ((0, 0), (0, 1), (1, 1)))
    for one, steps in ((first, [0, 1, 2, 3, 4, 5]), (second, [2, 2, 3]), (third, [4])):
        one.rows = np.zeros((len(steps), COLUMNS), np.int64)
        one.rows[:, Column.GLOBAL_STEP] = steps
        one.certain = one.sound = np.ones(len(steps), bool)
    second.rows[0, Column.STREAM] = 1  # an evaluation
    second.first_step, third.first_step = 2, 4

    def of_first(*parts: Surveyed) -> list[int]:
        return [
            place
            for batch in Ordering(parts).batches()  # type: ignore[arg-type]
            for number, place in zip(batch.surveys.tolist(), batch.places.tolist(), strict=True)
            if number == 0
        ]

    assert of_first(first, second) == [0, 1]
    second.header = {}
    second.first_step = 0
    assert of_first(first, second) == [0, 1]
    assert of_first(first, second, third) == [0, 1, 2, 3]
