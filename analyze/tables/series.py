"""Summaries of series of answers: count, first and last, least and greatest value, and a sparkline."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from analyze.tables.columns import Columns
from analyze.tables.sparkline import mean_of, sparkline


class Series(NamedTuple):
    """The summary of a series of answers.

    ==============  ==============================================================================================
    n               how many answers
    first, last     values; of answers that are arrays, the means of their finite numbers
    min, max        the least and the greatest finite number
    trend           the course of the values, as `sparkline` draws it
    min_step        the first global step with the least number; None if no number is finite
    max_step        the first global step with the greatest number; None if no number is finite
    nans, infs      how many numbers are NaN, and how many infinite
    first_strange   the first global step with a number that is not finite; None if all are
    ==============  ==============================================================================================
    """

    trace: str
    kind: str
    module: str
    tag: str
    rank: int
    n: int
    first: float
    last: float
    min: float
    max: float
    trend: str
    min_step: int | None = None
    max_step: int | None = None
    nans: int = 0
    infs: int = 0
    first_strange: int | None = None


def series_of(answers: Columns) -> list[Series]:
    """A `Series` per series of answers, in order of their first answers."""
    keys: dict[tuple[str, str, str, str, int], int] = {}
    of_stream = [
        keys.setdefault((one.trace, one.kind, one.place, one.tag, one.rank), len(keys)) for one in answers.streams
    ]
    stream_ids = np.array(answers.stream_ids, dtype=np.int64)
    series = np.array(of_stream, dtype=np.int64)[stream_ids]
    # positions of the answers, grouped by series, in order within each
    positions = np.argsort(series, kind="stable")
    numbers, begins = np.unique(series[positions], return_index=True)
    values, starts = np.array(answers.values, dtype=np.float64), np.array(answers.starts, dtype=np.int64)
    sizes, global_steps = np.diff(starts), np.array(answers.counters["global_step"], dtype=np.int64)
    names = list(keys)
    found = []
    these_of = zip(numbers.tolist(), np.split(positions, begins[1:]), strict=False)
    for number, these in sorted(these_of, key=lambda one: int(one[1][0])):
        key: tuple[str, str, str, str, int] = names[number]
        if (sizes[these] == 1).all():
            inside = course = values[starts[these]]
        else:
            of_each = [values[starts[at] : starts[at + 1]] for at in these.tolist()]
            course, inside = np.array([mean_of(one) for one in of_each]), np.concatenate(of_each)
        steps = np.repeat(global_steps[these], sizes[these])
        is_finite = np.isfinite(inside)
        finite, strange = inside[is_finite], steps[~is_finite]
        found.append(
            Series(
                *key,
                n=len(these),
                first=float(course[0]),
                last=float(course[-1]),
                min=float(finite.min()) if finite.size else math.nan,
                max=float(finite.max()) if finite.size else math.nan,
                trend=sparkline(course),
                min_step=int(steps[is_finite][finite.argmin()]) if finite.size else None,
                max_step=int(steps[is_finite][finite.argmax()]) if finite.size else None,
                nans=int(np.isnan(inside).sum()),
                infs=int(np.isinf(inside).sum()),
                first_strange=int(strange[0]) if strange.size else None,
            )
        )
    return found
