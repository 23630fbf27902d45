"""Summaries of series of answers, with a line of block characters, and the tables of them for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from analyze.tables.columns import AnswerColumns, Row
from analyze.tables.layout import TextTable
from tracer.shown import printable

BLOCKS: Final = "▁▂▃▄▅▆▇█"


_FLAT: Final = BLOCKS[3]


def sparkline(values: Sequence[float] | NDArray[np.float64], width: int = 12) -> str:
    """A series as a line of block characters; a space where no value is finite.

    Each block stands for a part of the series. It shows the value of that part which is farthest from the median of the
    whole series, so that a single outlier is visible. Values that are equal up to rounding give a flat line.

    Examples
    --------
    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'
    >>> sparkline([1, float("nan"), 1])
    '▄ ▄'
    >>> sparkline([1.0] * 500 + [9.0] + [1.0] * 499)
    '▁▁▁▁▁█▁▁▁▁▁▁'
    """
    course = np.asarray(values, dtype=np.float64)
    finite = course[np.isfinite(course)]
    parts = np.array_split(course, min(width, len(course))) if len(course) else []
    if not finite.size:
        return " " * len(parts)
    # halved, because the difference of two float64 may overflow
    low, high, median = (float(function(finite / 2)) for function in (np.min, np.max, np.median))
    if high - low <= 4 * np.finfo(np.float64).eps * max(abs(low), abs(high)):
        low = high
    line = ""
    for part in parts:
        halves = part[np.isfinite(part)] / 2
        if not halves.size:
            line += " "
        elif low == high:
            line += _FLAT
        else:
            value = float(halves[np.abs(halves - median).argmax()])
            line += BLOCKS[min(int((value - low) / (high - low) * 8), 7)]
    return line


def mean_of(values: NDArray[np.float64]) -> float:
    """The mean of the finite values; of a single value, itself.

    Examples
    --------
    >>> mean_of(np.array([1.0, 3.0, np.inf])), mean_of(np.array([np.inf])), mean_of(np.full(2, 1.5e308))
    (2.0, inf, 1.5e+308)
    """
    if len(values) == 1:
        return float(values[0])
    finite = values[np.isfinite(values)]
    if not finite.size:
        return math.nan
    with np.errstate(over="ignore"):
        mean = float(finite.mean())
    return mean if math.isfinite(mean) else float(np.sum(finite / len(finite)))


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


def series_of(answers: AnswerColumns) -> list[Series]:
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


def number(value: float) -> str:
    """A number in four significant digits.

    Examples
    --------
    >>> number(0.33333333), number(-123456.0), number(2e-7), number(float("inf"))
    ('0.3333', '-1.235e5', '2e-7', 'inf')
    """
    return re.sub(r"e([+-])0*", lambda found: "e-" if found[1] == "-" else "e", f"{value + 0.0:.4g}")


def table_of(shown: Sequence[Row] | Sequence[Series], told: Mapping[tuple[Any, ...], str] | None = None) -> TextTable:
    """A table for a terminal: a line per row or series, by kind, and if there are several traces, by trace.

    Parameters
    ----------
    shown : sequence of Row or Series
    told : mapping, optional
        The words for statuses, as `analyze.tables.companions.statuses_of` returns them.
    """
    several, ranks = len({one.trace for one in shown}) > 1, any(one.rank for one in shown)
    groups: dict[str, list[Row | Series]] = {}
    for one in shown:
        of = f" of {printable(one.trace)}" if several else ""
        groups.setdefault(printable(one.kind) + of, []).append(one)
    form = _ROWS if isinstance(next(iter(shown), None), Row) else _SERIES
    rows = [
        (kind, _label(one, ranks), *(cell(one) for _, cell in form), (told or {}).get(place_of(one), ""))
        for kind, ones in groups.items()
        for one in ones
    ]
    columns = ("kind", "module", *(heading for heading, _ in form), "status")
    kept = [at for at, name in enumerate(columns) if name not in _RARE or any(row[at] for row in rows)]
    return TextTable(
        [columns[at] for at in kept], [[row[at] for at in kept] for row in rows],
        right=_NUMBERS, names=("module",), prose=("not finite", "status"), group="kind",
    )  # fmt: skip


def place_of(one: Row | Series) -> tuple[Any, ...]:
    """What identifies a series, or an answer of it, among statuses."""
    place = (one.trace, one.kind, one.module, one.tag, one.rank)
    return (place, one.global_step, one.call) if isinstance(one, Row) else place


def _label(one: Row | Series, ranks: bool) -> str:
    """The module, with tag, rank and call unless they are the default."""
    words = [printable(one.module)] if one.module else []
    words += [f"@{printable(one.tag)}"] if one.tag != "default" else []
    words += [f"rank {one.rank}"] if ranks else []
    words += [f"call {one.call}"] if isinstance(one, Row) and one.call else []
    return " ".join(words)


def _strange(one: Series) -> str:
    """How many numbers are not finite, and the first step with one."""
    counts = [f"{count:,} {what}" for count, what in ((one.nans, "NaN"), (one.infs, "inf")) if count]
    return f"{', '.join(counts)} from {_at(one.first_strange)}" if counts else ""


def _at(step: int | None) -> str:
    return "" if step is None else f"@{step}"


_RARE: Final = ("module", "index", "not finite", "status")
"""Columns that are left out where all their cells are empty."""
_NUMBERS: Final = ("n", "first", "last", "min", "max", "at", "epoch", "step", "value")
"""Columns that are aligned to the right."""
_Form: TypeAlias = tuple[tuple[str, Callable[[Any], str]], ...]
_SERIES: Final[_Form] = (
    ("n", lambda one: str(one.n)),
    ("first", lambda one: number(one.first)),
    ("last", lambda one: number(one.last)),
    ("min", lambda one: number(one.min)),
    ("at", lambda one: _at(one.min_step)),
    ("max", lambda one: number(one.max)),
    ("at", lambda one: _at(one.max_step)),
    ("trend", lambda one: one.trend),
    ("not finite", _strange),
)
_ROWS: Final[_Form] = (
    ("epoch", lambda one: str(one.epoch)),
    ("step", lambda one: str(one.global_step)),
    ("index", lambda one: one.index),
    ("value", lambda one: number(one.value)),
)
