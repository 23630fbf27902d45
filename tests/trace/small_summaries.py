"""Summaries and windows of a few rows, so that small traces are read as long ones are."""

from __future__ import annotations

import pytest

import tracer.format.summaries
import tracer.replaying.due
import tracer.trace.reader
import tracer.trace.rows


def small_summaries(monkeypatch: pytest.MonkeyPatch, rows: int = 5) -> None:
    """Let summaries be of so many rows or a few more, and windows of as many."""
    monkeypatch.setattr(tracer.format.summaries, "SUMMARY_ROWS", rows)
    monkeypatch.setattr(tracer.format.summaries, "ROWS_A_STREAM", 0)
    monkeypatch.setattr(tracer.trace.rows, "KEPT_ROWS", 2 * rows)
    monkeypatch.setattr(tracer.trace.rows, "PIECE_ROWS", max(1, rows - 2))
    monkeypatch.setattr(tracer.trace.reader, "WINDOW_ROWS", rows)
    monkeypatch.setattr(tracer.replaying.due, "WINDOW_ROWS", rows)
