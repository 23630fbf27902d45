"""`Coordinates`: tells other programs the step of each row of an array, which in a trace only the journal says."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import Column
from tracer.stores.protocols import WriteStore
from tracer.trace.columns import grouped

STEP: Final = "step"
"""The name of the axis, and of the array of steps beside it, that most arrays of a group share."""
_NO_STEP: Final = -1
"""The step of a row that holds no message; an object store leaves such rows at commits."""
_ABOUT: Final = {"long_name": "global step: optimizer steps before this one", "units": "1"}


@final
class Coordinates:
    """The global steps of the rows of all pools that hold one message a row."""

    def __init__(self) -> None:
        # of each pool, by id: its name, the elements of a row, and the steps of its rows
        self._pools: dict[int, tuple[str, int, array[int]]] = {}

    def follow(self, pool: int, name: str, elements: int) -> None:
        """Note the steps of a pool from now on; `elements` are those of a row."""
        self._pools[pool] = (name, max(1, elements), array("q"))

    def add(self, rows: NDArray[np.int64]) -> None:
        """Note the steps of committed rows of the journal, (messages, COLUMNS)."""
        for pool, which in grouped(rows[:, Column.POOL]):
            if pool in self._pools:
                _, elements, steps = self._pools[pool]
                places = rows[which, Column.OFFSET] // elements - len(steps)
                new = np.full(int(places.max()) + 1, _NO_STEP, np.int64)
                new[places] = rows[which, Column.GLOBAL_STEP]
                steps.frombytes(new.tobytes())

    def write(self, store: WriteStore[Any]) -> None:
        """Add arrays of steps to the store, and name the first axis of each pool after its array of steps.

        The steps that most pools of a group have are its array ``step``; other pools have arrays of their own.
        """
        groups: dict[str, dict[str, bytes]] = {}
        for name, _, steps in self._pools.values():
            group, _, short = name.rpartition("/")
            groups.setdefault(group, {})[short] = steps.tobytes()
        for group, pools in groups.items():
            shared = Counter(pools.values()).most_common(1)[0][0]
            free = STEP not in (short.casefold() for short in pools)
            written: set[str] = set()
            for short, data in pools.items():
                axis = STEP if free and data == shared else f"{short}@{STEP}"
                name = f"{group}/{axis}"
                if axis not in written:
                    written.add(axis)
                    store.create(name, dtype="int64", shape=(), chunk_bytes=max(8, len(data)), gapless=True)
                    store.append(name, np.frombuffer(data, np.int64))
                    store.set_attrs(name, _ABOUT)
                    store.name_rows(name, axis)
                store.name_rows(f"{group}/{short}", axis)
