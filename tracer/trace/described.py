"""`Described`: describes an open trace: its run, its parts, its streams and its journal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.format.journal import Column
from tracer.format.names import FORMAT
from tracer.format.summaries import Fact, Summary, summarized
from tracer.format.tables import Stream
from tracer.memory import collector_waits
from tracer.messaging.messages import DEFAULT_TAG
from tracer.shown import table
from tracer.stores.locations import Location
from tracer.stores.opening import STORES
from tracer.trace.attempts import Counting, PartSpan
from tracer.trace.data import Blocks, Data, itemsizes
from tracer.trace.holes import Hole, holes_of, noted, sentences
from tracer.trace.merging import Parts, joint, merged
from tracer.trace.streams import StreamInfo, Streams, described

Position = Sequence[PartSpan]
"""A position between messages of a trace: an empty span of each part."""


@final
class Reading:
    """A journal in memory, and the objects that read the data of its rows.

    Parameters
    ----------
    data : Data
    spans : sequence of PartSpan
        The rows that were read of each part.
    counts : sequence of Counting or None
        Which rows of each part count; None if that does not matter.
    """

    def __init__(self, data: Data, spans: Sequence[PartSpan], counts: Sequence[Counting] | None) -> None:
        data.merged.journal.flags.writeable = False
        self.data = data
        self.blocks = Blocks(data)
        self._spans = spans
        self._counts: Sequence[Counting | None] = counts or [None] * len(spans)

    @cached_property
    def rank(self) -> NDArray[np.int64]:
        """The rank of each row."""
        return self.data.merged.rank

    def before(self, count: int) -> int:
        """See `Described.before`."""
        read = self.data.merged
        if read.origin is None or not 0 < count < len(read.journal):
            return count
        parts, rows = read.origin
        while count and parts[count] == parts[count - 1] and rows[count] == rows[count - 1]:
            count -= 1
        return count

    def after(self, count: int) -> Position:
        """See `TraceReader.after`."""
        read = self.data.merged
        if count == len(read.journal):
            ends = [span.stop for span in self._spans]
        elif read.origin is None:
            ends = [span.start + count for span in self._spans]
        else:
            parts, rows = read.origin[0][:count], read.origin[1][:count]
            firsts = [span.start - 1 for span in self._spans]
            ends = [int(rows[parts == number].max(initial=first)) + 1 for number, first in enumerate(firsts)]
        return [span.after(end, counts) for span, end, counts in zip(self._spans, ends, self._counts, strict=True)]


class Described:
    """The base of `TraceReader`: describes an open trace.

    Attributes
    ----------
    path : path
    """

    path: Location
    _parts: Parts
    _verify: bool

    def _merge(self) -> None:
        """Merge the tables of the parts, as far as these were read."""
        self._extent = self._parts.extent
        self._tables = joint(self._parts)
        self._spans: list[PartSpan] | None = None
        self._read: Reading | None = None
        self._infos: list[StreamInfo] | None = None
        self._whole: Described | None = None
        self._ends: list[int] | None = None
        self._holes: list[Hole] | None = None

    def _rows(self) -> Reading:
        """The journal, read on first use."""
        if self._read is None:
            spans = self._spans
            if spans is None:
                spans = [read.kept() for read in self._tables.parts]
            found = merged(self._parts, self._tables, spans)
            ordered = not (self._tables.alone or self._tables.assembles)
            data = self._parts.data(self.path, found, self._parts.stores, self._verify)
            self._read = Reading(data, spans, self._tables.counting if ordered else None)
        return self._read

    @property
    def journal(self) -> NDArray[np.int64]:
        """The committed journal, (messages, columns); see `tracer.format.journal.Column`. Read-only."""
        return self._rows().data.merged.journal

    @property
    def rank(self) -> NDArray[np.int64]:
        """The rank of each row of `journal`, (messages,)."""
        return self._rows().rank

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes that the column SHAPE of `journal` numbers."""
        return self._rows().data.merged.shapes

    def before(self, count: int) -> int:
        """The number of messages before the pulse that has the message `count`; `count` itself outside of pulses."""
        return self._rows().before(count)

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of the data of each given row of `journal`."""
        return self._rows().data.sizes(rows)

    def begins_chunk(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the given rows of `journal` have a chunk that begins in their data: good places to split reading.

        Raises
        ------
        TraceCorruptError
            If the arrays that hold the data differ from their declarations.
        """
        return self._rows().data.begins_chunk(rows)

    @property
    def problems(self) -> list[str]:
        """A sentence for each part of the trace that is missing or cannot be read, and for each of the `holes`."""
        assembling = self._rows().data.merged.problems if self._tables.assembles else []
        return [
            *self._parts.problems,
            *sentences(self.path, self.holes, len(self.ranks)),
            *(f"{self.path}: {problem}" for problem in assembling),
        ]

    @property
    def holes(self) -> list[Hole]:
        """Steps between two attempts of the run of which there is nothing, although they record such steps.

        A run that was killed loses the steps that were not committed; if it is resumed at a later step, they are
        missing. Metrics with a memory run across a hole.
        """
        if self._holes is None:
            only = self._parts.only
            of_copies = [hole for hole in noted(self.notes) if only is None or hole.rank in only]
            self._holes = [*of_copies, *holes_of(self._parts.shown)]
        return self._holes

    @property
    def _streams(self) -> list[Stream]:
        return self._rows().data.merged.streams if self._tables.assembles else self._tables.streams

    @property
    def unreadable(self) -> dict[int, TraceError]:
        """For each rank with an unreadable part, the error."""
        return self._parts.unreadable

    @property
    def names(self) -> tuple[set[str], set[str]]:
        """The kinds and the tags of all messages, including those of ranks that this reader does not read."""
        streams = [stream for part in self._parts.all for stream in part.streams]
        return {stream.kind for stream in streams}, {stream.tag for stream in streams}

    @property
    def header(self) -> dict[str, Any]:
        """What was known of the run when it started; of several attempts, the header of the last."""
        return self._parts.last_attempt[0].header

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Remarks from the run, except that an attempt stopped at a step that a later attempt recorded."""
        return self._parts.notes

    @property
    def ranks(self) -> list[int]:
        """The ranks that have messages, ascending."""
        of_streams = {stream.rank for stream in self._streams}
        found = of_streams | {part.rank for part in self._parts.shown if not part.streams}
        return sorted(found if self._parts.only is None else found & self._parts.only)

    @property
    def status(self) -> str:
        """``"finished"``, ``"failed: …"``, ``"recording"``, or ``"interrupted"`` if the writer died without a status.

        Of several attempts, that of the last; of several ranks, the worst. A trace that another machine writes counts
        as interrupted when it has not changed for a minute.
        """
        return self._parts.status

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Each attempt of the run, as JSON values, with its first step, status, ranks and messages.

        Messages of steps that a later attempt trained again are superseded: they are counted in ``superseded``, and are
        not read. ``certificate`` is the result of `tracer.certify`, of several ranks the worst; None without a result.
        """
        return self._parts.attempts

    @property
    def dropped(self) -> dict[str, int]:
        """By kind, how many messages were not recorded because the queue was full, as far as was noted."""
        return self._parts.dropped

    @property
    def streams(self) -> list[StreamInfo]:
        """All streams, in the order of their first messages."""
        if self._whole is not None:
            return self._whole.streams
        if self._infos is None:
            self._infos = self._described()
        return Streams(self._infos)

    @collector_waits()
    def _described(self) -> list[StreamInfo]:
        shapes = self._rows().data.merged.shapes if self._tables.assembles else self._tables.shapes
        return described(self._streams, shapes, self._total(), itemsizes(self._streams))

    @property
    def _of_training(self) -> list[int]:
        """The numbers of the streams of the training."""
        return [number for number, one in enumerate(self._streams) if one.tag == DEFAULT_TAG]

    def _total(self, without: Collection[int] = ()) -> Summary:
        """The summary of all messages except those of training in the steps `without`."""
        if not self._tables.assembles:
            return self._tables.total(self._parts.only, without)
        journal = self.journal
        if without:
            left_out = np.isin(journal[:, Column.GLOBAL_STEP], list(without))
            left_out &= np.isin(journal[:, Column.STREAM], self._of_training)
            journal = journal[~left_out]
        return summarized(journal, 0, checksum=False)

    @property
    def info(self) -> dict[str, Any]:
        """A summary of the trace as JSON values: format, run, progress and size."""
        steps, epochs = self._trained()
        streams = self.streams
        first = self._parts.shown[0]
        return {
            "path": str(self.path),
            "format": FORMAT,
            "version": first.attributes["format_version"],
            "store": STORES[self.path.suffix.lower()],
            "run_id": first.header.get("run_id", first.attributes.get("run_id")),
            "created": first.header.get("created", first.attributes.get("created")),
            "status": self.status,
            "ended": self._parts.last_attempt[0].tables.ending.get("ended"),
            "messages": sum(stream.count for stream in streams),
            "bytes": sum(stream.bytes for stream in streams),
            "stored_bytes": sum(store.nbytes for store in self._parts.stores),
            "steps": steps,
            "epochs": epochs,
            "streams": len(streams),
            "dropped": self.dropped,
            "ranks": self.ranks,
            "attempts": self.attempts,
            "problems": self.problems,
            "header": self.header,
            "notes": self.notes,
        }

    def _trained(self) -> tuple[list[int] | None, list[int] | None]:
        """The first and the last global step and epoch, without training that no optimizer step followed.

        If there are training messages, others do not count: what is computed after the last step has the number of
        the step that would follow.
        """
        steps = [note["unended"].get("global_step") for note in self.notes if isinstance(note.get("unended"), Mapping)]
        facts = self._total(without=[one for one in steps if type(one) is int]).facts
        if not len(facts):
            return None, None
        among = np.isin(facts[:, Fact.STREAM], self._of_training)
        facts = facts[among] if among.any() else facts
        return (
            [int(facts[:, Fact.FIRST_STEP].min()), int(facts[:, Fact.LAST_STEP].max())],
            [int(facts[:, Fact.FIRST_EPOCH].min()), int(facts[:, Fact.LAST_EPOCH].max())],
        )

    def __len__(self) -> int:
        if self._spans is None and self._read is None:
            return sum(stream.count for stream in self.streams)
        return len(self.journal)

    def _repr_html_(self) -> str:
        """A table of the kinds, for notebooks."""
        found: dict[str, list[int]] = {}
        for stream in self.streams:
            row = found.setdefault(stream.kind, [0, 0, 0])
            row[:] = row[0] + 1, row[1] + stream.count, row[2] + stream.bytes
        rows = [(kind, *(f"{number:,}" for number in row)) for kind, row in found.items()]
        return table(("kind", "streams", "messages", "bytes"), rows, repr(self))
