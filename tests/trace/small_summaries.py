"""Summaries and windows of a few rows, so that small traces are read as long ones are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tracer.format.summaries
import tracer.replaying.wanted
import tracer.trace.reader
import tracer.trace.rows
from tracer.trace.rows import Rows


def small_summaries(monkeypatch: pytest.MonkeyPatch, rows: int = 5) -> None:
    """Let summaries be of so many rows or a few more, and windows of as many."""
    monkeypatch.setattr(tracer.format.summaries, "SUMMARY_ROWS", rows)
    monkeypatch.setattr(tracer.format.summaries, "ROWS_A_STREAM", 0)
    monkeypatch.setattr(tracer.trace.rows, "KEPT_ROWS", 2 * rows)
    monkeypatch.setattr(tracer.trace.rows, "PIECE_ROWS", max(1, rows - 2))
    monkeypatch.setattr(tracer.trace.reader, "WINDOW_ROWS", rows)
    monkeypatch.setattr(tracer.replaying.wanted, "WINDOW_ROWS", rows)


def copy_journal(source: Path, target: Path) -> None:
    """Put the rows of one trace's journal, in one shard, over those of another: an interrupted copy may leave that."""
    shards = [path / "rank0/journal/c/0/0" for path in (source, target)]
    assert [len(list(shard.parent.parent.rglob("*"))) for shard in shards] == [2, 2]
    shutil.copyfile(*shards)


def rows_looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of journals are looked at from now on, each time that some are."""
    found: list[int] = []
    check = Rows._check

    def counting(self: Rows, start: int, rows: Any) -> None:
        found.append(len(rows))
        check(self, start, rows)

    monkeypatch.setattr(Rows, "_check", counting)
    return found
