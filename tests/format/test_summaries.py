"""Summaries: they say what the rows say, however the rows are cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.format.journal import NONE, Column, row_checksums
from tracer.format.summaries import NOTHING, Fact, RowsChecksum, Summarizing, Summary, summarized, united


def rows_of(seed: int, count: int) -> NDArray[np.int64]:
    """Rows of a few streams, of which one has no data and another has several shapes."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 50, (count, len(Column)))
    rows[:, Column.STREAM] = rng.integers(0, 5, count)
    rows[:, Column.SHAPE] = np.where(rows[:, Column.STREAM] == 2, NONE, rng.integers(0, 3, count))
    return rows


def told(rows: NDArray[np.int64]) -> tuple[list[list[int]], dict[int, list[int]]]:
    """What a summary should say, in plain Python."""
    facts, shapes = [], {}
    for stream in sorted(set(rows[:, Column.STREAM].tolist())):
        mine = rows[rows[:, Column.STREAM] == stream]
        steps, epochs = mine[:, Column.GLOBAL_STEP].tolist(), mine[:, Column.EPOCH].tolist()
        calls = max(mine[:, Column.CALL].tolist()) + 1
        elements = sum(mine[:, Column.COUNT].tolist())
        facts.append([stream, len(mine), elements, calls, min(steps), max(steps), min(epochs), max(epochs)])
        found = [shape for shape in dict.fromkeys(mine[:, Column.SHAPE].tolist()) if shape != NONE]
        if found:
            shapes[stream] = found
    return facts, shapes


def checksum_of(rows: NDArray[np.int64]) -> int:
    """The CRC-32C of the bytes of the rows and, behind them, those of their own checksums, by another library."""
    checks = b"".join(int(row[-1]).to_bytes(8, "little") for row in rows)
    return int(google_crc32c.value(rows.astype("<i8").tobytes() + checks))


@given(st.integers(0, 1000), st.integers(1, 60), st.lists(st.integers(1, 59), max_size=4))
def test_a_summary_says_what_the_rows_say(seed: int, count: int, cuts: list[int]) -> None:
    """Of all rows at once, and of summaries of their parts put together; and it survives JSON."""
    rows = rows_of(seed, count)
    whole = summarized(rows, 7)
    assert (whole.facts.tolist(), whole.shapes) == told(rows)
    assert (whole.start, whole.stop, whole.messages) == (7, 7 + count, count)
    assert whole.crc32c == checksum_of(rows)
    assert whole.steps == (rows[:, Column.GLOBAL_STEP].min(), rows[:, Column.GLOBAL_STEP].max())
    bounds = sorted({0, count, *(cut for cut in cuts if cut < count)})
    parts = [summarized(rows[low:high], 7 + low) for low, high in itertools.pairwise(bounds)]
    together = united([NOTHING, *parts])
    assert (together.facts.tolist(), together.shapes) == told(rows)
    again = Summary.parse(json.loads(json.dumps(whole.declared())))
    assert again.says(whole, whole.crc32c)
    turned = summarized(rows[::-1], 7)
    assert not again.says(turned, turned.crc32c) or (rows == rows[::-1]).all()


@given(st.integers(0, 1000), st.integers(0, 60), st.lists(st.integers(0, 60), max_size=4))
def test_the_checksum_of_rows_in_pieces(seed: int, count: int, cuts: list[int]) -> None:
    """It is that of all rows at once, also of pieces without rows."""
    rows = rows_of(seed, count)
    found = RowsChecksum()
    for piece in np.split(rows, sorted(cuts)):
        found.add(piece)
    assert found.value == RowsChecksum.of(rows) == checksum_of(rows)


def test_rows_that_are_right_have_different_checksums() -> None:
    """Though each ends in its own checksum, after which that of their bytes is the same whatever they say."""
    journals = [rows_of(seed, 50) for seed in range(20)]
    for rows in journals:
        rows[:, Column.CHECK] = row_checksums(rows, 7)
    assert len({google_crc32c.value(rows.astype("<i8").tobytes()) for rows in journals}) == 1
    assert len({summarized(rows, 7).crc32c for rows in journals}) == 20


@given(st.integers(0, 1000), st.integers(1, 40))
def test_streams_of_several_parts_are_one(seed: int, count: int) -> None:
    """With the numbers that streams and shapes have in another table, where two may be one."""
    rows = rows_of(seed, count)
    streams, shapes = np.array([3, 0, 2, 0, 9]), np.array([1, 1, 0])
    moved = rows.copy()
    moved[:, Column.STREAM] = streams[rows[:, Column.STREAM]]
    carries = rows[:, Column.SHAPE] != NONE
    moved[carries, Column.SHAPE] = shapes[rows[carries, Column.SHAPE]]
    found = summarized(rows, 0).numbered(streams, shapes)
    facts, sets = told(moved)
    assert found.facts.tolist() == facts
    assert {stream: set(ids) for stream, ids in found.shapes.items()} == {
        stream: {*ids} for stream, ids in sets.items()
    }
    chosen = summarized(rows, 0).of_streams(np.array([1, 4]))
    assert chosen.facts.tolist() == [row for row in told(rows)[0] if row[Fact.STREAM] in (1, 4)]


WRONG: list[dict[str, Any]] = [
    {"rows": [3, 3]},
    {"rows": [0, 9]},
    {"crc32c": 2**32},
    {"crc32c": -1},
    {"crc32c": True},
    {"streams": []},
    {"streams": [[1, 1, 1, 1, 0, 0, 0, 0, [0]], [0, 2, 1, 1, 0, 0, 0, 0, [0]]]},
    {"streams": [[0, 3, 1, 1, 5, 4, 0, 0, [0]]]},
    {"streams": [[0, 3, 1, 1, 4, 4, 6, 5, [0]]]},
    {"streams": [[0, 3, 1, 1, 4, 4, 5, 5, [-1]]]},
    {"streams": [[0, 3, 1.0, 1, 4, 4, 5, 5, [0]]]},
    {"streams": [[0, 3, 1, 1, 4, 4, 5, 5]]},
    {"streams": 3},
    {"rows": None},
]


@pytest.mark.parametrize("change", WRONG)
def test_a_summary_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    """Whatever it says: a damaged index never becomes a wrong answer, nor an error that a reader does not expect."""
    right = {"rows": [0, 3], "crc32c": 5, "streams": [[0, 3, 3, 1, 0, 2, 0, 0, [0]]]}
    assert Summary.parse(right).messages == 3
    with pytest.raises((TraceError, KeyError, TypeError, ValueError)):
        Summary.parse(right | change)


def test_a_writer_summarizes_what_it_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there are enough rows, more of them where there are many streams, and each row once."""
    monkeypatch.setattr("tracer.format.summaries.SUMMARY_ROWS", 10)
    monkeypatch.setattr("tracer.format.summaries.ROWS_A_STREAM", 4)
    rows = rows_of(1, 60)
    rows[0, Column.STREAM] = 4
    summarizing, found = Summarizing(), []
    for begin in range(0, 60, 6):
        summarizing.add(rows[begin : begin + 6])
        summary = summarizing.due()
        if summary is not None:
            found.append(summary)
    assert [(one.start, one.stop) for one in found] == [(0, 24), (24, 48)]
    for one in found:
        right = summarized(rows[one.start : one.stop], one.start)
        assert one.says(right, right.crc32c)
