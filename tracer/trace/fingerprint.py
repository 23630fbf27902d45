"""`Fingerprint`: a digest of some messages of a trace."""

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

    It covers the recorded runs, the streams and shapes, and each added row, which includes the checksum of its data if
    there is one. Rows that are not added do not change it.

    Parameters
    ----------
    runs : sequence
        JSON values that identify the recorded runs.
    streams : sequence of Stream
    shapes : sequence of tuple of int
    recorded : ndarray of int64, (rows, columns)
        The journal before distributed tensors were assembled.
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
        # the streams and shapes of the added rows, and whether some rows stand for assembled tensors
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
