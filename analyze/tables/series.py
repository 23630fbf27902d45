"""Summaries of series of answers, with a line of block characters, and the tables of them for a terminal."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from analyze.tables.columns import AnswerColumns, Row
from analyze.tables.layout import shortened
from tracer.shown import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

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


Shown: TypeAlias = Row | Series

_WIDE_LABEL: Final = 24
"""With less room than this for module paths, a table puts numbers below each other instead."""
_LEAST_LABEL: Final = 8
"""The minimum width of a module path."""


def number(value: float) -> str:
    """A number in four significant digits.

    Examples
    --------
    >>> number(0.33333333), number(-123456.0), number(2e-7), number(float("inf"))
    ('0.3333', '-1.235e5', '2e-7', 'inf')
    """
    return re.sub(r"e([+-])0*", lambda found: "e-" if found[1] == "-" else "e", f"{value + 0.0:.4g}")


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table: the lines of its heading, and a function that gives the lines of a row's cell."""

    heading: tuple[str, ...]
    cell: Callable[[Any], tuple[str, ...]]
    left: bool = False


@final
class ResultsTable:
    """Rows or series of results for `rich`: one table per kind, in the order of the kinds.

    Series have three layouts; the first that leaves enough room for the module paths is taken: (1) one line per series;
    (2) the steps of minimum and maximum below their values; (3) as (2), with the last value below the first and the
    count below the path. Paths that are longer than their room are shortened in the middle.

    Parameters
    ----------
    shown : list of Row or list of Series
    """

    def __init__(self, shown: Sequence[Shown]) -> None:
        self._shown = shown
        self._traces = len({one.trace for one in shown}) > 1
        self._ranks = any(one.rank for one in shown)

    @property
    def row_count(self) -> int:
        """How many rows or series it shows."""
        return len(self._shown)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.style import Style
        from rich.text import Text

        bold = Style(bold=True)
        for place, (heading, lines) in enumerate(self.lines(options.max_width)):
            if place:
                yield Text()
            yield Text(heading, style=bold, no_wrap=True, overflow="ignore")
            yield from (Text(line, no_wrap=True, overflow="ignore") for line in lines)

    def __str__(self) -> str:
        """The tables as text, as wide as the terminal."""
        return self.plain(shutil.get_terminal_size().columns)

    def plain(self, width: int = 100_000) -> str:
        """The tables as text, in lines of at most `width` characters; by default, nothing is shortened."""
        return "\n\n".join("\n".join((heading, *lines)) for heading, lines in self.lines(width))

    def lines(self, width: int) -> Iterator[tuple[str, list[str]]]:
        """The heading of each kind, and the lines of its table, in at most `width` columns."""
        if not self._shown:
            return
        forms = _FORMS if isinstance(self._shown[0], Series) else (_ROWS,)
        room = max(map(len, map(self._label, self._shown)))
        for form, gap in itertools.product(forms, (2, 1)):
            columns = self._columns(form)
            widths = [max(len(text) for one in column for text in one) for column in self._cells(columns, self._shown)]
            left = width - sum(widths) - gap * len(widths)
            if left >= min(room, _WIDE_LABEL):
                break
        label = max(min(room, left), _LEAST_LABEL)
        for (kind, trace), these in self._by_kind().items():
            heading = printable(kind) + (f" of {printable(trace)}" if trace else "")
            yield shortened(heading, width), self._table(columns, widths, these, label, " " * gap)

    def _by_kind(self) -> dict[tuple[str, str], list[Shown]]:
        """The rows or series of each table, by kind and, if there are several traces, by trace."""
        groups: dict[tuple[str, str], list[Shown]] = {}
        for one in self._shown:
            groups.setdefault((one.kind, one.trace if self._traces else ""), []).append(one)
        return groups

    def _label(self, one: Shown) -> str:
        """The label of a row: the module, with tag, rank and call unless they are the default."""
        words = [printable(one.module)] if one.module else []
        words += [f"@{printable(one.tag)}"] if one.tag != "default" else []
        words += [f"rank {one.rank}"] if self._ranks else []
        words += [f"call {one.call}"] if isinstance(one, Row) and one.call else []
        return " ".join(words)

    def _columns(self, form: Sequence[_Column]) -> list[_Column]:
        """The columns of a layout, without rare columns whose cells are all empty."""
        return [
            one for one in form if one.heading[0] not in _RARE or any("".join(one.cell(row)) for row in self._shown)
        ]

    @staticmethod
    def _cells(columns: Sequence[_Column], shown: Sequence[Shown]) -> list[list[tuple[str, ...]]]:
        """The heading of each column, and its cells."""
        return [[column.heading, *map(column.cell, shown)] for column in columns]

    def _table(
        self, columns: Sequence[_Column], widths: Sequence[int], shown: Sequence[Shown], label: int, gap: str
    ) -> list[str]:
        counts = isinstance(shown[0], Series) and _N not in columns
        labels = [("module" if any(map(self._label, shown)) else "", *(["n"] if counts else []))]
        labels += [(shortened(self._label(one), label), *([_N.cell(one)[0]] if counts else [])) for one in shown]
        lines: list[str] = []
        for row in zip(labels, *self._cells(columns, shown), strict=True):
            for at in range(max(map(len, row))):
                cells = [cell[at] if at < len(cell) else "" for cell in row]
                words = [f"{cells[0]:<{label}}"]
                for column, width, text in zip(columns, widths, cells[1:], strict=True):
                    words.append(f"{text:<{width}}" if column.left else f"{text:>{width}}")
                lines.append(gap.join(words).rstrip())
        return lines


def _strange(one: Series) -> tuple[str, ...]:
    """How many numbers are not finite, and the first step with one."""
    counts = [f"{count:,} {what}" for count, what in ((one.nans, "NaN"), (one.infs, "inf")) if count]
    return (*counts, f"from {_at(one.first_strange)}") if counts else ()


_RARE: Final = ("not finite", "index")
"""Columns that are left out where all their cells are empty."""


_N: Final = _Column(("n",), lambda one: (str(one.n),))
_FIRST: Final = _Column(("first",), lambda one: (number(one.first),))
_LAST: Final = _Column(("last",), lambda one: (number(one.last),))
_MIN: Final = _Column(("min", "at"), lambda one: (number(one.min), _at(one.min_step)))
_MAX: Final = _Column(("max", "at"), lambda one: (number(one.max), _at(one.max_step)))
_TREND: Final = _Column(("trend",), lambda one: (one.trend,), left=True)
_STRANGE: Final = _Column(
    ("not finite",), lambda one: (", ".join(_strange(one)).replace(", from", " from"),), left=True
)
_TREND_AND_STRANGE: Final = _Column(("trend",), lambda one: (one.trend, *_strange(one)), left=True)


def _line(column: _Column, line: int) -> _Column:
    """One line of a two-line column, as a column of its own."""
    return _Column((column.heading[line],), lambda one: (column.cell(one)[line],))


_FORMS: Final[tuple[tuple[_Column, ...], ...]] = (
    (_N, _FIRST, _LAST, *(_line(column, line) for column in (_MIN, _MAX) for line in (0, 1)), _TREND, _STRANGE),
    (_N, _FIRST, _LAST, _MIN, _MAX, _TREND_AND_STRANGE),
    (
        _Column(("first", "last"), lambda one: (number(one.first), number(one.last))),
        *(_MIN, _MAX, _TREND_AND_STRANGE),
    ),
)
_ROWS: Final = (
    _Column(("epoch",), lambda one: (str(one.epoch),)),
    _Column(("step",), lambda one: (str(one.global_step),)),
    _Column(("index",), lambda one: (one.index,)),
    _Column(("value",), lambda one: (number(one.value),)),
)


def _at(step: int | None) -> str:
    return "" if step is None else f"@{step}"
