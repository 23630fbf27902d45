"""`Fingerprint`: a digest of what some messages of a trace say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import NONE, Column
from tracer.format.tables import Stream
from tracer.trace.assembly import WHOLE


@final
class Fingerprint:
    """A digest that changes whenever a replay of some rows of a journal may give other messages.

    It knows the runs that were recorded, the streams and shapes, and each row with the checksum of its data where there
    is one. Rows that are not added do not change it.

    Parameters
    ----------
    runs : sequence
        What tells the recorded runs from others, as JSON values.
    streams : sequence of Stream
    shapes : sequence of tuple of int
    recorded : ndarray of int64, (rows, columns)
        The journals before distributed tensors were put together.
    """

    def __init__(
        self,
        runs: Sequence[Any],
        streams: Sequence[Stream],
        shapes: Sequence[tuple[int, ...]],
        recorded: NDArray[np.int64],
    ) -> None:
        self._runs, self._streams, self._shapes, self._recorded = runs, streams, shapes, recorded
        self._digest = hashlib.sha256()
        # which streams and shapes the rows are of, and whether some were put together of recorded ones
        self._met: tuple[set[int], set[int]] = set(), set()
        self._whole = False

    def add(self, rows: NDArray[np.int64]) -> None:
        """Add rows of the journal, (rows, columns)."""
        for met, column in zip(self._met, (Column.STREAM, Column.SHAPE), strict=True):
            met.update(np.unique(rows[:, column]).tolist())
        self._whole |= bool((rows[:, Column.POOL] == WHOLE).any())
        self._digest.update(np.ascontiguousarray(rows).tobytes())

    def hexdigest(self) -> str:
        """The digest, in hexadecimal digits."""
        streams = [[number, repr(self._streams[number])] for number in sorted(self._met[0])]
        shapes = [[number, *self._shapes[number]] for number in sorted(self._met[1] - {NONE})]
        digest = self._digest.copy()
        digest.update(json.dumps([self._runs, streams, shapes], default=str).encode())
        if self._whole:
            digest.update(np.ascontiguousarray(self._recorded).tobytes())
        return digest.hexdigest()
