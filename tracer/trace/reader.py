"""`TraceReader`: the messages of a trace, in their order, filtered, and read in blocks."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError, TraceError
from tracer.format.journal import NONE, Column
from tracer.format.version import FORMAT
from tracer.messaging.messages import DEFAULT_TAG, Message
from tracer.shown import table
from tracer.stores.locations import Anywhere, location
from tracer.stores.opening import STORES
from tracer.trace.assembly import WHOLE
from tracer.trace.blocks import Blocks
from tracer.trace.data import Data
from tracer.trace.merging import Parts, listed, merged
from tracer.trace.selection import Selection, Steps
from tracer.trace.streams import Batch, StreamInfo, called, described


@final
class TraceReader:
    """A trace, as it was when it was opened; a trace that is being written can be opened too, and followed.

    Of a distributed run the messages of all ranks are there, ordered by the global step, then by the rank. What cannot
    be read of such a trace, or of one of several attempts, is told in `problems`, and the rest is read.

    Parameters
    ----------
    path : path or URL
    ranks : iterable of int, optional
        Read the messages of these ranks only. What they hold as other ranks do (weights of DistributedDataParallel) is
        theirs, whichever of them recorded it.
    assemble : bool
        Whether tensors that are distributed over ranks (FSDP) are put together from their parts. False: every message
        as its rank recorded it, and nothing else.
    verify : bool
        Whether data is compared with its checksums as it is read. False is for a trace that was just verified and is
        read again and again: large messages are read a third faster, and what has been damaged since is not noticed.
        The journal is verified all the same, and so is what is compressed, on an object store or not finished.

    Attributes
    ----------
    problems : list of str
        A sentence for each part of the trace that is missing or cannot be read.
    journal : numpy.ndarray of int64, (messages, columns)
        The committed journal; see `tracer.format.journal.Column`. Not to be changed.
    rank : numpy.ndarray of int64, (messages,)
        The rank that each row of `journal` is of.
    unreadable : dict of int to TraceError
        Why not, for each rank that has a part that is there and cannot be read.

    Raises
    ------
    TraceNotFoundError
        If nothing is at `path`.
    TraceFormatError
        If it is not a trace, of a version that this release does not read, or has parts that are not safe to read.
    TraceCorruptError
        If it is damaged where every message needs it.
    CaptureError
        If it has nothing of these ranks.
    TraceUnreadableError
        If a file may not be opened, or an object store does not answer.
    """

    def __init__(
        self, path: Anywhere, *, ranks: Iterable[int] | None = None, assemble: bool = True, verify: bool = True
    ) -> None:
        self.path = location(path)
        """Where the trace is."""
        self._parts = Parts.open(self.path, None if ranks is None else {int(rank) for rank in ranks}, assemble)
        try:
            # a chunk may be rewritten while it is read, and only a checksum tells
            self._verify = verify or not self.status.startswith(("finished", "failed"))
            for store in self._parts.stores:
                store.verifies = self._verify
            self._merge()
        except BaseException:
            self.close()
            raise

    def _merge(self) -> None:
        """Make one journal of those of the parts, as far as these were read."""
        self._extent = self._parts.extent
        self._merged = merged(self._parts)
        self.problems = [*self._parts.problems, *(f"{self.path}: {problem}" for problem in self._merged.problems)]
        self.journal: NDArray[np.int64] = self._merged.journal
        self.journal.flags.writeable = False
        ranks = np.array([stream.rank for stream in self._merged.streams] or [0], np.int64)
        self.rank: NDArray[np.int64] = ranks[self.journal[:, Column.STREAM]]
        self._data = Data(self.path, self._merged, self._parts.stores, self._verify)
        self._blocks = Blocks(self._data)
        self._infos: list[StreamInfo] | None = None

    def refresh(self) -> bool:
        """Read what was committed since the trace was opened, or since the last time; whether there was anything.

        `journal` and `streams` are then longer. Of a single rank, rows keep their places; those of several ranks are
        put together anew.

        Raises
        ------
        TraceCorruptError
            If it is damaged.
        """
        self._parts.refresh()
        if self._parts.extent == self._extent:
            return False
        self._merge()
        return True

    def of_rank(self, rank: int, *, assemble: bool | None = None) -> TraceReader:
        """A reader of one rank of this trace, which shares the open files and ends when this one is closed.

        It is this one itself if that has no other ranks, and assembles as this one does if that is not said.

        Raises
        ------
        CaptureError
            If there is nothing of this rank.
        TraceError
            If what there is of it cannot be read.
        """
        if rank not in self.ranks:
            has = f"it has {listed(self.ranks)}"
            raise self.unreadable.get(rank) or CaptureError(f"{self.path} has nothing of rank {rank}; {has}")
        parts = self._parts
        assemble = parts.assemble if assemble is None else assemble
        if self.ranks == [rank] and (assemble is parts.assemble or not parts.lending):
            return self
        return self._view(parts.of_rank(rank, assemble))

    def until_attempt(self, attempt: int) -> TraceReader:
        """A reader of this trace as one of its attempts left it, which shares the open files.

        What later attempts trained again is as it was before them. It ends when this reader is closed.

        Raises
        ------
        CaptureError
            If there is no such attempt.
        """
        there = [one["attempt"] for one in self.attempts]
        if attempt not in there:
            raise CaptureError(f"{self.path} has no attempt {attempt}; it has {', '.join(map(str, there))}")
        return self._view(self._parts.until(attempt))

    def _view(self, parts: Parts) -> TraceReader:
        """Another reader of the same open files."""
        view = object.__new__(TraceReader)
        view.path, view._verify, view._parts = self.path, self._verify, parts
        view._merge()
        return view

    @property
    def unreadable(self) -> dict[int, TraceError]:
        """Why not, for each rank that has a part that is there and cannot be read."""
        return self._parts.unreadable

    @property
    def names(self) -> tuple[set[str], set[str]]:
        """The kinds and the tags of all messages, also of ranks that this reader was not asked for."""
        streams = [stream for part in self._parts.all for stream in part.streams]
        return {stream.kind for stream in streams}, {stream.tag for stream in streams}

    @property
    def header(self) -> dict[str, Any]:
        """What was known of the run before it started; of several attempts, before the last."""
        return self._parts.last_attempt[0].header

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Remarks that were made during the run; not that an attempt ended before a step that a later one recorded."""
        return self._parts.notes

    @property
    def ranks(self) -> list[int]:
        """The ranks that there are messages of, ascending."""
        of_streams = {stream.rank for stream in self._merged.streams}
        found = of_streams | {part.rank for part in self._parts.shown if not part.streams}
        return sorted(found if self._parts.only is None else found & self._parts.only)

    @property
    def status(self) -> str:
        """``"finished"``, ``"failed: …"``, ``"recording"``, or ``"interrupted"``: the writer is gone without a word.

        Of several attempts it is that of the last, and of several ranks the worst. A trace that another machine writes
        counts as interrupted when it did not change for a minute.
        """
        return self._parts.status

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Each attempt of the run, as JSON values: its first step, status and ranks, its messages and how many count.

        Messages of steps that a later attempt trained again do not count, and are read by nothing. ``certificate`` is
        what `tracer.certify` said of the attempt, of several ranks the worst; None where it was not asked.
        """
        return self._parts.attempts

    @property
    def dropped(self) -> dict[str, int]:
        """How many messages of which kind were not recorded because the queue was full, as far as was noted."""
        return self._parts.dropped

    @property
    def streams(self) -> list[StreamInfo]:
        """Every stream, in the order in which they first occurred."""
        if self._infos is None:
            self._infos = described(self._merged, self._data.itemsizes)
        return list(self._infos)

    @property
    def info(self) -> dict[str, Any]:
        """The trace in a few JSON values: what it is, of what run, how far it got, how much it holds."""
        trained = self.journal[~self._unended()]

        def span(column: Column) -> list[int] | None:
            values = trained[:, column]
            return [int(values.min()), int(values.max())] if len(values) else None

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
            "messages": len(self.journal),
            "bytes": int(self._data.sizes(np.arange(len(self.journal))).sum()),
            "stored_bytes": sum(store.nbytes for store in self._parts.stores),
            "steps": span(Column.GLOBAL_STEP),
            "epochs": span(Column.EPOCH),
            "streams": len(self._merged.streams),
            "dropped": self.dropped,
            "ranks": self.ranks,
            "attempts": self.attempts,
            "problems": self.problems,
            "header": self.header,
            "notes": self.notes,
        }

    def _unended(self) -> NDArray[np.bool_]:
        """Which rows of `journal` are of training passes that no step of an optimizer followed."""
        steps = [note["unended"].get("global_step") for note in self.notes if isinstance(note.get("unended"), Mapping)]
        training = [number for number, one in enumerate(self._merged.streams) if one.tag == DEFAULT_TAG]
        late = np.isin(self.journal[:, Column.GLOBAL_STEP], [one for one in steps if type(one) is int])
        return late & np.isin(self.journal[:, Column.STREAM], training)

    def __len__(self) -> int:
        return len(self.journal)

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    def select(
        self,
        kinds: str | Iterable[str] | None = None,
        modules: str | Iterable[str] | None = None,
        steps: Steps | None = None,
        tags: str | Iterable[str] | None = None,
        streams: Iterable[int] | None = None,
        where: NDArray[np.bool_] | None = None,
        ranks: int | Iterable[int] | None = None,
    ) -> NDArray[np.int64]:
        """The rows of the journal whose messages pass all filters, ascending; see `messages`.

        Raises
        ------
        CaptureError
            If the steps are no range, a stream id is unknown, or the mask has another length than the journal.
        """
        selection = Selection.of(kinds, modules, steps, tags, ranks)
        wanted = None if streams is None else set(streams)
        if wanted is not None and not wanted <= set(range(len(self._merged.streams))):
            raise CaptureError(
                f"{self.path} has the streams 0 to {len(self._merged.streams) - 1}, and not all of {sorted(wanted)}"
            )
        mask = selection.rows(self.journal, self._merged.streams, wanted)
        if where is not None:
            if where.shape != mask.shape or where.dtype != np.bool_:
                raise CaptureError(
                    f"a mask over this trace is {len(mask)} bools, not {where.dtype} of shape {where.shape}"
                )
            mask &= where
        return np.flatnonzero(mask)

    def messages(
        self,
        kinds: str | Iterable[str] | None = None,
        modules: str | Iterable[str] | None = None,
        steps: Steps | None = None,
        tags: str | Iterable[str] | None = None,
        streams: Iterable[int] | None = None,
        where: NDArray[np.bool_] | None = None,
        ranks: int | Iterable[int] | None = None,
        mapped: bool = False,
    ) -> Iterator[Message]:
        """The messages that pass all filters, in the order in which they were recorded.

        Only what is wanted is read, in blocks of some 8 MiB. The memory of a message's data is nobody else's, or is
        a part of a block that is never used again: it may be kept and changed.

        Parameters
        ----------
        kinds : str or iterable of str, optional
        modules : str or iterable of str, optional
            Glob patterns of dotted paths (``"layer1.*"``; a dot is a character like others). Messages of the network
            have no module, and pass only without this filter.
        steps : tuple, optional
            ``(start, stop)`` or ``(start, stop, stride)`` of the global step, start inclusive and stop exclusive; None
            for an open end.
        tags : str or iterable of str, optional
            Glob patterns; ``"!eval"`` means every tag but that.
        streams : iterable of int, optional
            Ids of `streams`.
        where : numpy.ndarray of bool, optional
            A mask over the rows of `journal`.
        ranks : int or iterable of int, optional
            With what others of their replicas recorded for them; each message says who did.
        mapped : bool
            Whether data may lie where the system has it in memory already, instead of in a copy, which for large
            messages takes a third of the time, and with ``verify=False`` nearly all of it. While such a message is in
            use, its file must not be cut or written over: the system ends a process that looks at what is gone.

        Raises
        ------
        CaptureError
            If the steps are no range, a stream id is unknown, or the mask has another length than the journal.
        TraceCorruptError
            If what is read is damaged. What came before is right.
        """
        return self._blocks.messages(self.select(kinds, modules, steps, tags, streams, where, ranks), mapped)

    def arrays(
        self,
        kinds: str | Iterable[str] | None = None,
        modules: str | Iterable[str] | None = None,
        steps: Steps | None = None,
        tags: str | Iterable[str] | None = None,
        streams: Iterable[int] | None = None,
        where: NDArray[np.bool_] | None = None,
        ranks: int | Iterable[int] | None = None,
    ) -> Iterator[Batch]:
        """The data of the messages that pass all filters, in batches of one shape; for much data in small messages.

        Batches come in the order of the recording, some 8 MiB at a time; within that, messages are grouped by how they
        are stored. `Batch.rows` says which messages they are. Parameters and errors are those of `messages`.

        Examples
        --------
        >>> import tempfile, torch
        >>> from tracer import ModuleMessage, TraceWriter
        >>> path = tempfile.mkdtemp() + "/run.zarr"
        >>> with TraceWriter(path) as writer:
        ...     for step in range(3):
        ...         where = {"global_step": step, "train_step": step, "epoch": 0}
        ...         writer.write(ModuleMessage(kind="biases", module="fc", data=torch.full((2,), step), **where))
        >>> trace = TraceReader(path)
        >>> for batch in trace.arrays("biases"):
        ...     print(trace.journal[batch.rows, Column.GLOBAL_STEP], batch.data.sum(axis=1))
        [0 1 2] [0 2 4]
        """
        return self._blocks.arrays(self.select(kinds, modules, steps, tags, streams, where, ranks))

    def values(
        self,
        kinds: str | Iterable[str] | None = None,
        modules: str | Iterable[str] | None = None,
        steps: Steps | None = None,
        tags: str | Iterable[str] | None = None,
        streams: Iterable[int] | None = None,
        where: NDArray[np.bool_] | None = None,
        ranks: int | Iterable[int] | None = None,
    ) -> Iterator[tuple[int, NDArray[Any] | None]]:
        """The messages that pass all filters in their order, without torch: a row of the journal, and its data.

        Data is as in `Batch`, and None for events. Parameters and errors are those of `messages`.
        """
        return self._blocks.values(self.select(kinds, modules, steps, tags, streams, where, ranks))

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of the data of each of some rows of `journal`."""
        return self._data.sizes(rows)

    def begins_chunk(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of some rows of `journal`, those in whose data a chunk of the store begins: good places to cut a reading.

        Raises
        ------
        TraceCorruptError
            If the arrays that hold the data are not as they were declared.
        """
        return self._data.begins_chunk(rows)

    def fingerprint(self, rows: NDArray[np.int64]) -> str:
        """A digest of what some rows of `journal` say: it changes whenever a replay of them may give other messages.

        It knows the runs that were recorded, the streams and shapes, and each row with the checksum of its data where
        there is one; no data is read. Rows that are appended later do not change it.

        Examples
        --------
        >>> import tempfile, torch
        >>> from tracer import NetworkMessage, TraceWriter
        >>> path = tempfile.mkdtemp() + "/run.zarr"
        >>> with TraceWriter(path) as writer:
        ...     for k in range(3):
        ...         writer.write(NetworkMessage(kind="epoch_started", global_step=k, train_step=0, epoch=k))
        >>> trace = TraceReader(path)
        >>> trace.fingerprint(np.array([0, 1])) == trace.fingerprint(np.array([0, 2]))
        False
        """
        journal = self.journal[rows]
        digest = hashlib.sha256()
        attempts = [[part.name, part.header.get("run_id"), part.header.get("created")] for part in self._parts.shown]
        streams = [
            [number, repr(self._merged.streams[number])] for number in np.unique(journal[:, Column.STREAM]).tolist()
        ]
        shapes = [
            [number, *self._merged.shapes[number]]
            for number in np.unique(journal[:, Column.SHAPE]).tolist()
            if number != NONE
        ]
        digest.update(json.dumps([attempts, streams, shapes], default=str).encode())
        digest.update(np.ascontiguousarray(journal).tobytes())
        if (journal[:, Column.POOL] == WHOLE).any():  # such rows refer to the recorded rows of the parts
            digest.update(np.ascontiguousarray(self._merged.recorded).tobytes())
        return digest.hexdigest()

    def array(
        self,
        kind: str,
        module: str | None = None,
        tag: str = DEFAULT_TAG,
        steps: Steps | None = None,
        leaf: str = "",
        rank: int | None = None,
        call: int | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[Any] | list[NDArray[Any]]]:
        """All data of one stream, as numpy arrays, in the order of the recording.

        A step has several messages where several ranks recorded it, and where a module was called several times.

        Parameters
        ----------
        kind : str
        module : str, optional
            Dotted path. None is the network; where there is no such stream of the network, the root module.
        tag : str
        steps : tuple, optional
            As in `messages`.
        leaf : str
        rank : int, optional
            Only what this rank recorded, or another for it; else what any did, ranks in their order in each step.
        call : int, optional
            Only the calls of this number, from 0, in each step.

        Returns
        -------
        global_steps : numpy.ndarray of int64, (n,)
        data : numpy.ndarray (n, ...), or list of n numpy.ndarray
            A list where messages differ in shape or dtype. Numbers that numpy lacks (bfloat16, 8 bit floats) come as
            float32, which holds each of them exactly.

        Raises
        ------
        CaptureError
            If there is no such stream, if it carries no data, or if the steps are no range.
        TraceCorruptError
            If what is read is damaged.
        """
        streams = self._merged.streams
        found = called(self.path, streams, kind, module, tag, leaf, rank)
        if all(streams[number].dtype is None for number in found):
            raise CaptureError(f"{self.path}: {kind} messages are events, and carry no data")
        selected = self.select(steps=steps, streams=found)
        if call is not None:
            selected = selected[self.journal[selected, Column.CALL] == call]
        rows, data = self._blocks.together(selected)
        return self.journal[rows, Column.GLOBAL_STEP], data

    def __copy__(self) -> TraceReader:
        same = object.__new__(TraceReader)
        same.__dict__.update(self.__dict__)
        return same

    def __reduce__(self) -> Any:
        # a copy opens the files again, so that it can be used in another process, too
        again = functools.partial(
            TraceReader, ranks=self._parts.only, assemble=self._parts.assemble, verify=self._verify
        )
        return again, (self.path,)

    def close(self) -> None:
        """Close the files. Closing again does nothing."""
        self._parts.close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TraceReader({str(self.path)!r}: {len(self)} messages, {self.status})"

    def _repr_html_(self) -> str:
        """What the trace holds of each kind, for notebooks."""
        found: dict[str, list[int]] = {}
        for stream in self.streams:
            row = found.setdefault(stream.kind, [0, 0, 0])
            row[:] = row[0] + 1, row[1] + stream.count, row[2] + stream.bytes
        rows = [(kind, *(f"{number:,}" for number in row)) for kind, row in found.items()]
        return table(("kind", "streams", "messages", "bytes"), rows, repr(self))
