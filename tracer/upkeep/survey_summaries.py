"""`SummaryCheck`: compares the declared summaries with the rows of the journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from tracer.format.summaries import RowsChecksum, Summary, summarized, united


@final
class SummaryCheck:
    """Compares summaries with rows that are added window by window, in order.

    A summary of a damaged row is not checked, because the damage to the row is reported already. Summaries that overlap
    an earlier one are not compared, because a damaged trace may have any number of them.

    Parameters
    ----------
    summaries : sequence of Summary

    Attributes
    ----------
    again : list of Summary
        The summaries that overlap an earlier one.
    """

    def __init__(self, summaries: Sequence[Summary]) -> None:
        self.again: list[Summary] = []
        # the summaries still to be compared, in reverse order of their rows
        self._left: list[Summary] = []
        stop = 0
        for one in summaries:
            if one.start >= stop:
                self._left.append(one)
                stop = one.stop
            else:
                self.again.append(one)
        self._left.reverse()
        self._parts: list[Summary] = []
        self._checksum = RowsChecksum()
        self._is_certain = True

    def add(self, start: int, rows: NDArray[np.int64], certain: NDArray[np.bool_]) -> Iterator[Summary]:
        """Add the next window; yields the summaries that end in it and do not match the rows.

        Parameters
        ----------
        start : int
            The number of the first row.
        rows : numpy.ndarray of int64, (rows, columns)
        certain : numpy.ndarray of bool, (rows,)
            Which rows can be read and pass their checksum.
        """
        stop = start + len(rows)
        while self._left and self._left[-1].start < stop:
            summary = self._left[-1]
            low, high = max(summary.start, start), min(summary.stop, stop)
            part = slice(low - start, high - start)
            self._parts.append(summarized(rows[part], low, checksum=False))
            self._checksum.add(rows[part])
            self._is_certain &= bool(certain[part].all())
            if high < summary.stop:
                return
            if self._is_certain and not summary.says(united(self._parts), self._checksum.value):
                yield summary
            self._left.pop()
            self._parts.clear()
            self._checksum, self._is_certain = RowsChecksum(), True

    @property
    def beyond(self) -> Sequence[Summary]:
        """After all windows were added: the summaries that reach beyond the last row."""
        return self._left[::-1]
