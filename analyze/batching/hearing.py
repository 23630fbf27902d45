"""Receivers of a worker: one keeps what a subscriber answers, one how long it takes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, Final, final

from analyze.batching.folder import Folder
from analyze.batching.part_files import COMPLETE, DAMAGED, DETAILS, parquet, part_table, write_arrays
from analyze.batching.units import Task, Unit
from analyze.tables.results import Results
from tracer.messaging.bus import Receiver, describe
from tracer.messaging.messages import Message
from tracer.messaging.subscriber import Subscriber
from tracer.stores import Url

ARRAY_NUMBERS: Final = 4096
"""Answers of more numbers than this go to a results trace of their own, and not number by number into the table."""


@final
class Timed:
    """A subscriber, and how long it took; bus and plan see the subscriber."""

    def __init__(self, inner: Receiver) -> None:
        self.inner = inner
        self.name = describe(inner)
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return self.inner.wants(kind, module, tag, step)

    def receive(self, message: Message) -> Iterable[Message]:
        began = time.perf_counter()
        answers = tuple(self.inner.receive(message) or ())
        self.seconds += time.perf_counter() - began
        return answers

    def finish(self) -> Iterable[Message]:
        began = time.perf_counter()
        answers = tuple(self.inner.finish() or ())
        self.seconds += time.perf_counter() - began
        return answers

    def close(self) -> None:
        self.inner.close()


@final
class Heard:
    """A receiver that keeps what the subscriber of a unit answers, and writes it."""

    passive = True
    name = "results"

    def __init__(self, unit: Unit, subscriber: Subscriber, timed: Timed | None) -> None:
        self.unit = unit
        self.results = Results()
        self.arrays: list[Message] = []
        self._heard = 0
        self._at: list[int] = []
        self._timed = timed
        self._kinds = frozenset(subscriber.produces)
        self._called = describe(subscriber)

    @property
    def seconds(self) -> float:
        """How long the subscriber took."""
        return 0.0 if self._timed is None else self._timed.seconds

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return kind in self._kinds

    def receive(self, message: Message) -> Iterable[Message]:
        if message.data is not None and message.data.numel() > ARRAY_NUMBERS:
            self.arrays.append(message)
            self._at.append(self._heard)
        else:
            self.results.add(message, self.unit.title, self._called)
        self._heard += 1
        return ()

    def finish(self) -> Iterable[Message]:
        return ()

    def close(self) -> None:
        """Nothing to let go of."""

    def extend(self, other: Heard) -> None:
        """Append what another one heard."""
        self.results.extend(other.results)
        self.arrays += other.arrays
        self._at += [self._heard + at for at in other._at]
        self._heard += other._heard

    def write(self, folder: Folder, task: Task, unit: Unit, seconds: float, *, complete: bool, replace: bool) -> int:
        """Write the answers; how many rows they are."""
        place = write_arrays(folder, unit, self.arrays) if self.arrays else ""
        table = part_table(self.results, self.arrays, self._called, task, unit, place)
        details = {
            "unit": unit.id,
            "spec": unit.spec,
            "trace": unit.title,
            "rank": unit.rank,
            "modules": unit.modules,
            "steps": unit.steps,
            "messages": unit.messages,
            "bytes": unit.bytes,
            "rows": table.num_rows,
            "numbers": len(self.results) + sum(one.data.numel() for one in self.arrays if one.data is not None),
            "arrays": self._at,
            "structure": self.results.structure(),
            "seconds": round(seconds, 6),
            "complete": complete,
        }
        data = parquet(table.replace_schema_metadata({DETAILS: json.dumps(details).encode()}))
        if complete:
            folder.write(f"parts/{unit.id}{COMPLETE}", data, replace=replace)
            if not isinstance(folder.path, Url):  # on an object store that is a request, and waits for the end
                folder.remove([f"parts/{unit.id}{DAMAGED}"])
        else:
            folder.write(f"parts/{unit.id}{DAMAGED}", data)
        return int(table.num_rows)
