"""`TraceReader`: the messages of a trace, in their order, filtered, and read in blocks."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import math
import operator
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError, TraceCorruptError, TraceError, did_you_mean
from tracer.format import journal
from tracer.format.checksum import crc32c
from tracer.format.encodings import ENCODINGS, readable
from tracer.format.journal import NONE, Column
from tracer.format.names import part_of
from tracer.format.version import FORMAT
from tracer.memory import SMALLEST, Memory
from tracer.messaging.messages import DEFAULT_TAG, Message, checked
from tracer.messaging.subscription import passes
from tracer.stores.disk.mapped import MappedFiles
from tracer.stores.locations import Anywhere, location, part_in
from tracer.stores.opening import STORES, open_parts
from tracer.stores.protocols import Place, ReadStore
from tracer.trace.assembly import WHOLE, Block, assembled
from tracer.trace.part import (
    Part,
    Stream,
    counting,
    foreign_parts,
    is_empty,
    merged,
    missing,
    restarted,
    unreadable_part,
    worst,
    worst_certificate,
)

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_BYTES: Final = 8 << 20
"""Bytes of data that `TraceReader.messages` reads at a time."""
LARGE_ROWS: Final = 64
"""Where no more messages than these are in `BLOCK_BYTES`, each is read into memory of its own, which is used again."""
TOGETHER: Final = 4
TOGETHER_BYTES: Final = 4 << 20
"""So many of them, of so many bytes at most, are read one right after the other: what is done between two readings of a
megabyte finds nothing of itself in the processor's cache. More would have left that cache before they are delivered.
"""
BLOCK_ROWS: Final = 16384
"""Messages that it reads at a time, at most."""
GAP_BYTES: Final = 65536
"""Parts of a pool that are closer than this are read at once, with what lies between: a chunk is read as a whole."""
AHEAD: Final = 3
"""Blocks that a thread reads ahead where the store is slow."""
SLOW_SECONDS: Final = 0.002
SLOW_BLOCKS: Final = 3
"""It is slow if so many blocks in a row had to be waited for so long (half as long for one message by itself); one may
be because others had the processor.
"""
_KEPT: Final = 64
"""A message that is kept keeps at most so many times its size."""
_FIELDS: Final = [Column.STREAM, Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH, Column.CALL]
_fields_of = operator.itemgetter(*_FIELDS)
_place_of = operator.itemgetter(Column.STREAM, Column.POOL, Column.OFFSET, Column.COUNT, Column.SHAPE, Column.CRC32C)
_PLACES: Final = np.arange(TOGETHER)[:, None]
_T = TypeVar("_T")

Steps = tuple[int | None, int | None] | tuple[int | None, int | None, int | None]
"""``(start, stop)`` or ``(start, stop, stride)`` of the global step; start is inclusive, stop exclusive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo:
    """What a trace holds of one stream.

    Attributes
    ----------
    id : int
        Its number in the journal.
    rank : int
        Of the process that recorded it.
    kind : str
    network : bool
        Whether its messages are of the network, and not of a module.
    module : str or None
        Dotted path; None for the network.
    tag, leaf : str
    dtype : str or None
        The logical dtype, torch's name without ``torch.``; None for events.
    sampling : dict or None
        How the data was made from what was observed, as the recorder said.
    count : int
        Messages.
    bytes : int
        Bytes of their data.
    calls : int
        Calls in a step, at most.
    shapes : list of tuple of int
        In the order in which the trace first had them.
    steps : tuple of int or None
        First and last global step; None without messages.
    """

    id: int
    kind: str
    network: bool
    module: str | None
    tag: str
    leaf: str
    dtype: str | None
    sampling: dict[str, Any] | None
    count: int
    bytes: int
    calls: int
    shapes: list[tuple[int, ...]]
    steps: tuple[int, int] | None
    rank: int = 0

    def __str__(self) -> str:
        return _stream_name(self.kind, self.module, self.tag, self.leaf)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The data of some messages of one shape, as `TraceReader.arrays` gives it.

    Attributes
    ----------
    rows : numpy.ndarray of int64, (n,)
        Their rows in the journal (`TraceReader.journal`), which says their stream, step and so on.
    data : numpy.ndarray (n, ...)
        Numbers that numpy lacks (bfloat16, 8 bit floats) come as float32, which holds each of them exactly.
    """

    rows: NDArray[np.int64]
    data: NDArray[Any]


@dataclass(slots=True, eq=False)
class _Group:
    """Messages of one dtype and shape that were read together."""

    places: NDArray[np.int64]
    data: NDArray[Any]
    dtype: str
    whole_nbytes: int
    row: list[int] | None = None
    """Of the journal, where one message was read by itself."""


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
        self._only = None if ranks is None else {int(rank) for rank in ranks}
        self._assemble = assemble
        self._verify = verify
        self._stores: list[ReadStore] = []
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        stores, broken = open_parts(self.path)
        self._stores = list({id(store): store for _, store in stores}.values())
        self._told: list[str] = []
        self._parts: list[Part] = []
        # parts of other ranks, whose messages may be of those that are looked at, too
        self._others: list[Part] = []
        # and those of which only counts what their attempts take the place of
        self._later: list[Part] = []
        unread: list[tuple[str, ReadStore | None, TraceError]] = [
            (part_in(file), None, error) for file, error in broken.items()
        ]
        for name, store in stores:
            try:
                part = Part(self.path, name, store)
            except TraceError as error:
                unread.append((name, store, error))
                continue
            if self._only is None or self._only & {part.rank, *(stream.rank for stream in part.streams)}:
                self._parts.append(part)
            elif self._assemble:
                self._others.append(part)
            else:
                self._later.append(part)
        if len(unread) == 1 and len(stores) + len(broken) == 1:
            raise unread[0][2]
        unread.sort(key=lambda one: _attempt_and_rank(one[0]))
        unread = [(name, store, unreadable_part(self.path, name, error)) for name, store, error in unread]
        self.unreadable: dict[int, TraceError] = {
            _attempt_and_rank(name)[1]: error for name, _, error in reversed(unread)
        }
        if not self._parts:
            asked = self.unreadable.keys() if self._only is None else self.unreadable.keys() & self._only
            if asked:
                raise self.unreadable[min(asked)]
            rest = (*self._others, *self._later)
            there = {part.rank for part in rest} | {stream.rank for part in rest for stream in part.streams}
            raise CaptureError(
                f"{self.path} has no messages of rank {_list(self._only)}; it has {_list(there) or 'none'}"
            )
        foreign = foreign_parts(self.path, (*self._parts, *self._others, *self._later))
        self._told += foreign.values()
        for parts in (self._parts, self._others, self._later) if foreign else ():
            parts[:] = [part for part in parts if part.name not in foreign]
        again = restarted((*self._parts, *self._others, *self._later))
        # an attempt that was killed as it began, where the next one began with the first step, is as good as none
        empty = [part.name for part in self._parts if not part.header and _in_vain(part.name, part.store, again)]
        self._parts = sorted((part for part in self._parts if part.name not in empty), key=_by_attempt)
        self._told += [part.broken_off for part in self._parts if part.broken_off]
        self._told += [str(error) for name, store, error in unread if store is None or not _in_vain(name, store, again)]
        if self._only is None:
            names = [*empty, *(name for name, _, _ in unread), *(part.name for part in self._parts)]
            self._told += missing(self.path, names, [part.header for part in self._parts])
        # what is being written may be in two states at once, which only a checksum tells
        self._verify = self._verify or not self.status.startswith(("finished", "failed"))
        for store in self._stores:
            store.verifies = self._verify
        self._merge()

    def refresh(self) -> bool:
        """Read what was committed since the trace was opened, or since the last time; whether there was anything.

        `journal` and `streams` are then longer. Of a single rank, rows keep their places; those of several ranks are
        put together anew.

        Raises
        ------
        TraceCorruptError
            If it is damaged.
        """
        for part in (*self._parts, *self._others):
            part.refresh()
        if self._state() == self._merged:
            return False
        self._merge()
        return True

    def _state(self) -> list[tuple[int, ...]]:
        """How far each part was read: another reader of the same parts may have read on."""
        return [
            (len(part.journal), len(part.streams), len(part.notes), len(part.ending))
            for part in (*self._parts, *self._others)
        ]

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
            has = f"it has {_list(self.ranks)}"
            raise self.unreadable.get(rank) or CaptureError(f"{self.path} has nothing of rank {rank}; {has}")
        assemble = self._assemble if assemble is None else assemble
        if self.ranks == [rank] and (assemble is self._assemble or not self._others):
            return self
        view = object.__new__(TraceReader)
        view.path, view._only, view._assemble, view._stores = self.path, {rank}, assemble, self._stores
        view._told, view._verify, view.unreadable = self._told, self._verify, self.unreadable
        everything = sorted([*self._parts, *self._others, *self._later], key=_by_attempt)
        view._parts = [part for part in everything if rank in {part.rank, *(one.rank for one in part.streams)}]
        others = [part for part in everything if part not in view._parts]
        view._others, view._later = (others, []) if assemble else ([], others)
        view._merge()
        return view

    @property
    def names(self) -> tuple[set[str], set[str]]:
        """The kinds and the tags of all messages, also of ranks that this reader was not asked for."""
        streams = [stream for part in (*self._parts, *self._others, *self._later) for stream in part.streams]
        return {stream.kind for stream in streams}, {stream.tag for stream in streams}

    def _merge(self) -> None:
        """Make one journal, and one table of streams, shapes and pools, of those of the parts."""
        self._merged = self._state()
        # those of other ranks only if they can have anything for these
        lent = any(stream.placement is not None for part in self._others for stream in part.streams)
        parts = sorted([*self._parts, *self._others], key=_by_attempt) if lent else self._parts
        self._pools = [pool for part in parts for pool in part.pools]
        self._store_of = [part.store for part in parts for _ in part.pools]
        rest = [part for part in (*self._parts, *self._others, *self._later) if part not in parts]
        if len(parts) == 1 and all(part.attempt <= parts[0].attempt for part in rest):
            self._streams: list[Stream] = list(parts[0].streams)
            self._shapes: list[tuple[int, ...]] = list(parts[0].shapes)
            journal = parts[0].journal.view()
        else:
            number, row = merged(parts, rest)
            # what several attempts declare is one stream
            self._streams, streams = _united([part.streams for part in parts])
            self._shapes, shapes = _united([part.shapes for part in parts])
            pools = [np.arange(len(part.pools)) for part in parts]
            begins = np.cumsum([0, *(len(one) for one in pools[:-1])])
            pools = [ids + begin for ids, begin in zip(pools, begins, strict=True)]
            begins = np.cumsum([0, *(len(part.journal) for part in parts)])
            journal = np.concatenate([part.journal for part in parts])[begins[number] + row]
            for column, ids in ((Column.STREAM, streams), (Column.SHAPE, shapes), (Column.POOL, pools)):
                begins = np.cumsum([0, *map(len, ids)])
                there = journal[:, column] != NONE
                journal[there, column] = np.concatenate(ids)[(journal[:, column] + begins[number])[there]]
        self.problems: list[str] = list(self._told)
        self._recorded = journal
        self._wholes: list[Block] = []
        if self._assemble and any(stream.placement is not None for stream in self._streams):
            found = assembled(journal, self._streams, self._shapes, self._only)
            journal, self._recorded, self._wholes = found.journal, found.recorded, found.blocks
            self._streams, self._shapes = found.streams, found.shapes
            if self.status != "recording":
                self.problems += [f"{self.path}: {problem}" for problem in found.problems]
        elif self._only is not None and not self._only.issuperset(self._ranks_of_streams()):
            ranks = np.array([stream.rank for stream in self._streams], np.int64)
            journal = journal[np.isin(ranks[journal[:, Column.STREAM]], list(self._only))]
        self.journal: NDArray[np.int64] = journal
        """The committed journal, (messages, columns); see `tracer.format.journal.Column`. Not to be changed."""
        self.journal.flags.writeable = False
        ranks = np.array([stream.rank for stream in self._streams] or [0], np.int64)
        self.rank: NDArray[np.int64] = ranks[journal[:, Column.STREAM]]
        """The rank that each row of `journal` is of, (messages,)."""
        dtypes = [ENCODINGS[s.dtype].storage if s.dtype else "uint8" for s in self._streams]
        self._itemsizes = np.array([np.dtype(dtype).itemsize for dtype in dtypes], np.int64)
        names = {name: number for number, name in enumerate(ENCODINGS)}
        self._dtype_ids = np.array([names.get(stream.dtype or "", 0) for stream in self._streams], np.int64)
        self._storages = np.array([ENCODINGS[s.dtype].storage if s.dtype else "" for s in self._streams])
        # by stream, for messages that are read by themselves: the dtype, and the one in which it is stored
        self._kept_as: list[tuple[str, str, np.dtype[Any]]] = [
            (stream.dtype or "", str(storage), np.dtype(dtype))
            for stream, storage, dtype in zip(self._streams, self._storages, dtypes, strict=True)
        ]
        # of the pools that were read: elements in a row, and rows
        self._sizes_of: dict[int, tuple[int, int]] = {}
        self._infos: list[StreamInfo] | None = None

    @property
    def header(self) -> dict[str, Any]:
        """What was known of the run before it started; of several attempts, before the last."""
        return self._parts_of_last_attempt()[0].header

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Remarks that were made during the run; not that an attempt ended before a step that a later one recorded."""
        return [note for part in self._parts for note in part.notes if not self._overtaken(part, note)]

    def _overtaken(self, part: Part, note: Mapping[str, Any]) -> bool:
        about = note.get("stopped", note.get("unended"))
        step = about.get("global_step") if isinstance(about, Mapping) else None
        later = [one.first_step for one in self._parts if one.attempt > part.attempt and len(one.journal)]
        return type(step) is int and any(first <= step for first in later)

    @property
    def ranks(self) -> list[int]:
        """The ranks that there are messages of, ascending."""
        found = self._ranks_of_streams() | {part.rank for part in self._parts if not part.streams}
        return sorted(found if self._only is None else found & self._only)

    def _ranks_of_streams(self) -> set[int]:
        return {stream.rank for stream in self._streams}

    def _parts_of_last_attempt(self) -> list[Part]:
        last = max(part.attempt for part in self._parts)
        return [part for part in self._parts if part.attempt == last]

    @property
    def status(self) -> str:
        """``"finished"``, ``"failed: …"``, ``"recording"``, or ``"interrupted"``: the writer is gone without a word.

        Of several attempts it is that of the last, and of several ranks the worst. A trace that another machine writes
        counts as interrupted when it did not change for a minute.
        """
        return worst([part.status for part in self._parts_of_last_attempt()])

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Each attempt of the run, as JSON values: its first step, status and ranks, its messages and how many count.

        Messages of steps that a later attempt trained again do not count, and are read by nothing. ``certificate`` is
        what `tracer.certify` said of the attempt, of several ranks the worst; None where it was not asked.
        """
        found: dict[int, dict[str, Any]] = {}
        for part, counts in zip(self._parts, counting(self._parts), strict=True):
            told = found.setdefault(
                part.attempt,
                {
                    "attempt": part.attempt,
                    "first_step": part.first_step,
                    "created": part.header.get("created"),
                    "status": part.status,
                    "ranks": [],
                    "messages": 0,
                    "superseded": 0,
                    "certificate": None,
                },
            )
            told["ranks"].append(part.rank)
            told["messages"] += len(counts)
            told["superseded"] += int((~counts).sum())
            if told["status"] == "finished":
                told["status"] = part.status
            told["certificate"] = worst_certificate([told["certificate"], part.header.get("certificate")])
        return list(found.values())

    @property
    def dropped(self) -> dict[str, int]:
        """How many messages of which kind were not recorded because the queue was full, as far as was noted."""
        found: dict[str, int] = {}
        for note in self.notes:
            counts = note.get("dropped")
            if isinstance(counts, Mapping):
                for kind, count in counts.items():
                    if isinstance(count, int):
                        found[str(kind)] = found.get(str(kind), 0) + count
        return found

    @property
    def streams(self) -> list[StreamInfo]:
        """Every stream, in the order in which they first occurred."""
        if self._infos is None:
            self._infos = self._describe()
        return list(self._infos)

    def _describe(self) -> list[StreamInfo]:
        journal = self.journal
        order = np.argsort(journal[:, Column.STREAM], kind="stable")
        ids = np.arange(len(self._streams) + 1)
        bounds = np.searchsorted(journal[order, Column.STREAM], ids).tolist()
        infos = []
        for number, stream in enumerate(self._streams):
            rows = journal[order[bounds[number] : bounds[number + 1]]]
            shape_ids, first = np.unique(rows[:, Column.SHAPE], return_index=True)
            shape_ids = shape_ids[np.argsort(first)]
            steps = rows[:, Column.GLOBAL_STEP]
            infos.append(
                StreamInfo(
                    id=number,
                    kind=stream.kind,
                    network=stream.network,
                    module=stream.module,
                    tag=stream.tag,
                    leaf=stream.leaf,
                    dtype=stream.dtype,
                    sampling=stream.sampling,
                    count=len(rows),
                    bytes=int(rows[:, Column.COUNT].sum() * self._itemsizes[number]),
                    calls=int(rows[:, Column.CALL].max(initial=-1)) + 1,
                    shapes=[self._shapes[shape] for shape in shape_ids.tolist() if shape != NONE],
                    steps=(int(steps.min()), int(steps.max())) if len(rows) else None,
                    rank=stream.rank,
                )
            )
        return infos

    @property
    def info(self) -> dict[str, Any]:
        """The trace in a few JSON values: what it is, of what run, how far it got, how much it holds."""
        journal = self.journal
        trained = journal[~self._unended()]

        def span(column: Column) -> list[int] | None:
            values = trained[:, column]
            return [int(values.min()), int(values.max())] if len(values) else None

        first = self._parts[0]
        return {
            "path": str(self.path),
            "format": FORMAT,
            "version": self._parts[0].attributes["format_version"],
            "store": STORES[self.path.suffix.lower()],
            "run_id": first.header.get("run_id", first.attributes.get("run_id")),
            "created": first.header.get("created", first.attributes.get("created")),
            "status": self.status,
            "ended": self._parts_of_last_attempt()[0].ending.get("ended"),
            "messages": len(journal),
            "bytes": int((journal[:, Column.COUNT] * self._itemsizes[journal[:, Column.STREAM]]).sum())
            if len(journal)
            else 0,
            "stored_bytes": sum(store.nbytes for store in self._stores),
            "steps": span(Column.GLOBAL_STEP),
            "epochs": span(Column.EPOCH),
            "streams": len(self._streams),
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
        training = [number for number, one in enumerate(self._streams) if one.tag == DEFAULT_TAG]
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
        start, stop, stride = _check_steps(steps)
        kinds, modules, tags = _names(kinds), _names(modules), _names(tags)
        wanted = None if streams is None else set(streams)
        of_ranks = None if ranks is None else {ranks} if isinstance(ranks, int) else set(ranks)
        if wanted is not None and not wanted <= set(range(len(self._streams))):
            raise CaptureError(
                f"{self.path} has the streams 0 to {len(self._streams) - 1}, and not all of {sorted(wanted)}"
            )
        chosen = np.array(
            [
                (wanted is None or number in wanted)
                and (of_ranks is None or _is_of(stream, of_ranks))
                and passes(stream, kinds, modules, tags)
                for number, stream in enumerate(self._streams)
            ]
            or [False]
        )
        mask = chosen[self.journal[:, Column.STREAM]]
        step = self.journal[:, Column.GLOBAL_STEP]
        if start > 0:
            mask &= step >= start
        if stop is not None:
            mask &= step < stop
        if stride > 1:
            mask &= (step - start) % stride == 0
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
        return self._as_it_is()._iterate(self.select(kinds, modules, steps, tags, streams, where, ranks), mapped)

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
        return self._as_it_is()._arrays(self.select(kinds, modules, steps, tags, streams, where, ranks))

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
        return self._as_it_is()._values(self.select(kinds, modules, steps, tags, streams, where, ranks))

    def _values(self, selected: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[Any] | None]]:
        for rows, groups in self._blocks(selected):
            data: dict[int, NDArray[Any]] = {}
            for group in groups:
                data |= zip(group.places.tolist(), readable(group.data, group.dtype), strict=True)
            for place, row in enumerate(rows.tolist()):
                yield row, data.pop(place, None)

    def _as_it_is(self) -> TraceReader:
        """This reader as it is now, for what is read little by little: `refresh` gives rows other numbers."""
        return copy.copy(self)

    def _arrays(self, selected: NDArray[np.int64]) -> Iterator[Batch]:
        for rows, groups in self._blocks(selected):
            for group in groups:
                yield Batch(rows[group.places], readable(group.data, group.dtype))

    def _iterate(self, selected: NDArray[np.int64], mapped: bool) -> Iterator[Message]:
        streams = self._streams
        for rows, groups in self._blocks(selected, mapped):
            if groups and groups[0].row is not None:
                groups.reverse()
                while groups:  # the memory of each can be used again as soon as its message is gone
                    yield self._single(groups.pop())
                continue
            owners, tensors = _in_order(groups, len(rows))
            groups.clear()  # so that the memory can be used for another block as soon as the messages are gone
            fields = self.journal[rows][:, _FIELDS].tolist()
            for owner, (number, global_step, train_step, epoch, call) in zip(owners, fields, strict=True):
                stream = streams[number]
                data = next(tensors[owner])
                yield checked(
                    stream.kind,
                    stream.module,
                    global_step,
                    train_step,
                    epoch,
                    stream.tag,
                    call,
                    stream.leaf,
                    stream.rank,
                    data,
                )
            tensors.clear()

    def _single(self, group: _Group) -> Message:
        """A message that was read by itself."""
        assert group.row is not None
        number, global_step, train_step, epoch, call = _fields_of(group.row)
        stream = self._streams[number]
        return checked(
            stream.kind,
            stream.module,
            global_step,
            train_step,
            epoch,
            stream.tag,
            call,
            stream.leaf,
            stream.rank,
            _tensor(group),
        )

    def _blocks(
        self, selected: NDArray[np.int64], mapped: bool = False
    ) -> Iterator[tuple[NDArray[np.int64], list[_Group]]]:
        """Rows of the journal, cut into blocks, with their data; a thread reads ahead where the store is slow.

        The list of groups is emptied when the next block is asked for.
        """
        nbytes = self.journal[selected, Column.COUNT] * self._itemsizes[self.journal[selected, Column.STREAM]]
        readers = max((store.readers for store in self._stores), default=1)
        # what several threads fetch at once comes into memory of its own
        memory = Memory() if readers == 1 else None
        files = MappedFiles() if mapped else None
        ends = np.cumsum(nbytes)
        blocks = []
        first = 0
        while first < len(selected):
            before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, before + BLOCK_BYTES, side="right"))
            last = min(max(last, first + 1), first + BLOCK_ROWS)
            step = last - first
            large = memory is not None and step <= LARGE_ROWS and bool(nbytes[first:last].min() >= SMALLEST)
            if large:
                step = max(1, min(TOGETHER, TOGETHER_BYTES // int(nbytes[first:last].max())))
            blocks += [(selected[begin : min(begin + step, last)], large) for begin in range(first, last, step)]
            first = last
        left = iter(blocks)
        slow = 0
        # Without a thread as long as the data is there at once: two threads would only get into each other's way, and
        # one block of memory, used again and again, stays in the processor's cache.
        for rows, large in left if readers == 1 or len(blocks) == 1 else ():
            # how long it worked, which takes a system call, is of interest only after a block that took long
            worked = time.thread_time() if slow else None
            began = time.perf_counter()
            groups = self._read_groups(rows, memory, large, files)
            waited = time.perf_counter() - began
            if worked is not None:
                waited -= time.thread_time() - worked
            yield rows, groups
            groups.clear()  # before the next block is read, so that it can have the memory
            slow = slow + 1 if waited > SLOW_SECONDS / (2 if len(rows) == 1 else 1) else 0
            if slow == SLOW_BLOCKS:
                break
        with ThreadPoolExecutor(readers, "trace-reader") as thread:
            waiting: deque[tuple[NDArray[np.int64], Future[list[_Group]]]] = deque()
            try:
                for rows, large in left:
                    waiting.append((rows, thread.submit(self._read_groups, rows, memory, large, files)))
                    if len(waiting) > AHEAD:
                        ready, future = waiting.popleft()
                        yield ready, future.result()
                        del future
                while waiting:
                    ready, future = waiting.popleft()
                    yield ready, future.result()
                    del future
            finally:
                for _, future in waiting:
                    future.cancel()

    def _read_groups(
        self, selected: NDArray[np.int64], memory: Memory | None, large: bool, files: MappedFiles | None
    ) -> list[_Group]:
        """The data of rows of the journal, verified, in groups of one pool, dtype and shape; each alone if `large`."""
        rows = self.journal[selected]
        if memory is not None and (large or len(rows) == 1):
            alone = rows.tolist()
            if all(row[Column.POOL] >= 0 for row in alone):
                return self._read_apart(alone, memory, files)
        whole = rows[:, Column.POOL] == WHOLE
        if whole.any():
            places = np.flatnonzero(~whole)
            groups = self._read_rows(rows[places], memory)
            for group in groups:
                group.places = places[group.places]
            return [*groups, *(self._put_together(rows[place], place) for place in np.flatnonzero(whole).tolist())]
        return self._read_rows(rows, memory)

    def _put_together(self, row: NDArray[np.int64], place: int) -> _Group:
        """A tensor of which several ranks recorded parts."""
        block = self._wholes[int(row[Column.OFFSET])]
        shape = self._shapes[int(row[Column.SHAPE])]
        dtype = self._streams[int(row[Column.STREAM])].dtype
        assert dtype is not None
        parts = self._recorded[block.rows[int(row[Column.CRC32C])]]
        ordered = parts[np.lexsort((parts[:, Column.OFFSET], parts[:, Column.POOL]))]
        ends = ordered[:-1, Column.OFFSET] + ordered[:-1, Column.COUNT]
        if ((ordered[1:, Column.POOL] == ordered[:-1, Column.POOL]) & (ordered[1:, Column.OFFSET] < ends)).any():
            raise TraceCorruptError(
                f"{self.path}: parts of a distributed tensor in global step {int(row[Column.GLOBAL_STEP])} lie in the "
                "same place of a pool"
            )
        found: dict[int, NDArray[Any]] = {}
        for group in self._read_rows(parts, None):
            found |= zip(group.places.tolist(), group.data, strict=True)
        # read before there is memory for all of it: what the parts say of their size may not be true
        data = np.empty((1, *shape), ENCODINGS[dtype].storage)
        for number, (offsets, sizes) in enumerate(zip(block.offsets, block.sizes, strict=True)):
            at = [slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
            data[0][tuple(at)] = found[number]
        return _Group(np.array([place]), data, dtype, data.nbytes)

    def _read_rows(self, rows: NDArray[np.int64], memory: Memory | None) -> list[_Group]:
        groups: list[_Group] = []
        to_read = []
        pools = rows[:, Column.POOL]
        used = np.unique(pools).tolist()
        for store in self._stores:
            mine = (pool for pool in used if pool >= 0 and pool not in self._sizes_of and self._store_of[pool] is store)
            store.will_open([self._pools[pool][0] for pool in mine])
        for pool in used:
            places = np.flatnonzero(pools == pool)
            if pool == NONE:
                continue
            offsets, counts = rows[places, Column.OFFSET], rows[places, Column.COUNT]
            if len(places) > 1:
                order = np.argsort(offsets, kind="stable")
                places, offsets, counts = places[order], offsets[order], counts[order]
            ends = offsets + counts
            row_size = self._check_pool(pool, places, ends, rows)
            name, dtype = self._pools[pool]
            item = np.dtype(dtype).itemsize
            ranges: Iterable[tuple[int, int]] = ((0, 1),)
            if len(places) > 1:
                before = np.maximum.accumulate(ends)[:-1]
                # a chunk that none of them lies in need not be there
                height = self._store_of[pool].chunk_rows(name) * row_size
                apart = offsets[1:] // height > (before - 1) // height + 1
                cuts = np.flatnonzero(apart | (offsets[1:] > before + GAP_BYTES // item)) + 1
                ranges = _shorter(itertools.pairwise([0, *cuts.tolist(), len(places)]), offsets, BLOCK_BYTES // item)
            for begin, end in ranges:
                low = int(offsets[begin]) // row_size
                high = -(-int(ends[begin:end].max()) // row_size)
                part = slice(begin, end)
                found = (places[part], offsets[part], counts[part])
                to_read.append((self._store_of[pool], name, low, high, row_size, item, *found))
        for store in self._stores:
            store.will_read([(name, low, high) for one, name, low, high, *_ in to_read if one is store])
        for store, name, low, high, row_size, item, places, offsets, counts in to_read:
            out = None if memory is None else memory.take((high - low) * row_size * item)
            # the messages' own checksums do, where each has one; what is wrong, the store knows
            own = bool((rows[places, Column.CRC32C] != NONE).all())
            offsets = offsets - low * row_size
            whole = store.read(name, low, high, out, verify=not own).reshape(-1)
            try:
                groups += list(self._group(rows, places, offsets, counts, whole))
            except TraceCorruptError:
                if not own:
                    raise
                whole = store.read(name, low, high, out).reshape(-1)
                groups += self._group(rows, places, offsets, counts, whole)
        return groups

    def _read_apart(self, rows: list[list[int]], memory: Memory, files: MappedFiles | None) -> list[_Group]:
        """The data of a few messages, each mapped or in memory of its own, with as few steps as possible between two.

        Where all of them lie is found out first. What cannot be read as it lies there, or is not what it should be, is
        read by `_read_one`, which knows what is wrong.
        """
        groups: list[_Group | None] = []
        reads: list[tuple[int, Place | None, NDArray[np.uint8], int]] = []
        verify, shapes = self._verify, self._shapes
        for row in rows:
            number, pool, offset, count, shape, checksum = _place_of(row)
            dtype, storage, kept_as = self._kept_as[number]
            name, stored = self._pools[pool]
            size, length = self._sizes_of.get(pool) or self._size_of(pool)
            nbytes = count * kept_as.itemsize
            place = None
            if count == size and offset % size == 0 and offset < length * size and storage == stored:
                place = self._store_of[pool].place(name, offset // size) if nbytes >= SMALLEST else None
            if place is None:
                groups.append(None)
                continue
            there = None if files is None else files.take(place, nbytes)
            if there is not None:
                target, found = there
                if checksum == NONE and place.checksummed:
                    checksum = found
                reads.append((len(groups), None, target, checksum))
            else:
                block = memory.take(nbytes)
                if block is None:
                    groups.append(None)
                    continue
                target = block[:nbytes]
                reads.append((len(groups), place, target, checksum))
            data = target.view(kept_as).reshape(1, *shapes[shape])
            groups.append(_Group(_PLACES[len(groups)], data, dtype, nbytes, row))
        trailer = bytearray(4)
        for one, at, to, checksum in reads:
            if at is None:
                right = not verify or checksum == NONE or crc32c(to) == checksum
            else:
                right = _read_at(at, to.data, trailer, checksum, verify)
            if not right:
                groups[one] = None
        return [group or self._read_one(row, memory, at) for group, row, at in zip(groups, rows, _PLACES, strict=False)]

    def _read_one(self, row: list[int], memory: Memory, at: NDArray[np.int64]) -> _Group:
        """The data of one message, which is the one `at` this place in its block."""
        number, pool, offset, count, shape, checksum = _place_of(row)
        dtype, storage, kept_as = self._kept_as[number]
        name, stored = self._pools[pool]
        size, length = self._sizes_of.get(pool) or self._size_of(pool)
        if offset + count > length * size or storage != stored:
            raise self._misplaced(row)
        low, high = offset // size, -(-(offset + count) // size)
        nbytes = (high - low) * size * kept_as.itemsize
        begin = offset - low * size
        # a row of its own has the checksum that its chunks make up; of others, its own is compared first
        own_row = begin == 0 and count == size
        for verify in (True,) if own_row or checksum == NONE else (False, True):
            found: list[int] = []
            out = memory.take(nbytes)
            whole = self._store_of[pool].read(name, low, high, out, checksums=found, verify=verify).reshape(-1)
            data = whole[begin : begin + count].reshape(1, *self._shapes[shape])
            if not self._verify or checksum == NONE or (found[0] if own_row and found else crc32c(data)) == checksum:
                return _Group(at, data, dtype, nbytes, row)
        raise self._damaged(row)

    def _group(
        self,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        whole: NDArray[Any],
    ) -> Iterator[_Group]:
        """Group messages that lie in one array, by dtype and shape, and verify their checksums."""
        if len(places) == 1:
            first = int(starts[0])
            yield self._verified(rows, places, whole[first : first + int(counts[0])], whole.nbytes)
            return
        # dtype and shape in one number
        like = self._dtype_ids[rows[places, Column.STREAM]] * len(self._shapes) + rows[places, Column.SHAPE]
        for what in np.unique(like).tolist():
            chosen = np.flatnonzero(like == what) if (like != what).any() else slice(None)
            mine, begins, count = places[chosen], starts[chosen], int(counts[chosen][0])
            first = int(begins[0])
            if (begins == first + count * np.arange(len(begins))).all():
                data = whole[first : first + count * len(begins)].reshape(len(begins), count)
            elif count <= 16:
                data = whole[begins[:, None] + np.arange(count)]
            else:
                data = np.stack([whole[begin : begin + count] for begin in begins.tolist()])
            yield self._verified(rows, mine, data, whole.nbytes)

    def _verified(
        self, rows: NDArray[np.int64], places: NDArray[np.int64], data: NDArray[Any], whole_nbytes: int
    ) -> _Group:
        """Messages of one dtype and shape, if all of them have the checksum that the journal says."""
        dtype = self._streams[int(rows[places[0], Column.STREAM])].dtype
        assert dtype is not None
        checksums = rows[places, Column.CRC32C]
        if self._verify and (checksums != NONE).any():
            found = journal.checksums(np.ascontiguousarray(data).reshape(len(places), -1 if data.size else 0))
            wrong = (found != checksums) & (checksums != NONE)
            if wrong.any():
                raise self._damaged(rows[places[int(wrong.argmax())]].tolist())
        shape = self._shapes[int(rows[places[0], Column.SHAPE])]
        return _Group(places, data.reshape(len(places), *shape), dtype, whole_nbytes)

    def _check_pool(
        self, pool: int, places: NDArray[np.int64], ends: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> int:
        """Elements in a row of a pool; raises `TraceCorruptError` if some messages lie beyond its end."""
        size, length = self._size_of(pool)
        wrong: NDArray[np.bool_] = np.asarray(ends > length * size)
        wrong |= self._storages[rows[places, Column.STREAM]] != self._pools[pool][1]
        if wrong.any():
            raise self._misplaced(rows[int(places[int(wrong.argmax())])].tolist())
        return size

    def _size_of(self, pool: int) -> tuple[int, int]:
        """Elements in a row of a pool, and its rows."""
        size, length = self._sizes_of.get(pool, (0, 0))
        if not size:
            name, dtype = self._pools[pool]
            store = self._store_of[pool]
            length, size = store.length(name), math.prod(store.row_shape(name))  # the length is looked up anew
            if store.dtype(name) != dtype or size < 1:
                raise TraceCorruptError(f"{self.path}: pool {name!r} is not of the dtype {dtype} that was declared")
            self._sizes_of[pool] = size, length
        return size, length

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of the data of each of some rows of `journal`."""
        nbytes: NDArray[np.int64] = (
            self.journal[rows, Column.COUNT] * self._itemsizes[self.journal[rows, Column.STREAM]]
        )
        return nbytes

    def begins_chunk(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of some rows of `journal`, those in whose data a chunk of the store begins: good places to cut a reading.

        Raises
        ------
        TraceCorruptError
            If the arrays that hold the data are not as they were declared.
        """
        begins = np.zeros(len(rows), np.bool_)
        pools = self.journal[rows, Column.POOL]
        for pool in np.unique(pools[pools >= 0]).tolist():
            mine = np.flatnonzero(pools == pool)
            chunk = self._size_of(pool)[0] * self._store_of[pool].chunk_rows(self._pools[pool][0])
            offsets, counts = self.journal[rows[mine], Column.OFFSET], self.journal[rows[mine], Column.COUNT]
            begins[mine] = -offsets % chunk < np.maximum(counts, 1)
        return begins

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
        attempts = [[part.name, part.header.get("run_id"), part.header.get("created")] for part in self._parts]
        streams = [[number, repr(self._streams[number])] for number in np.unique(journal[:, Column.STREAM]).tolist()]
        shapes = [
            [number, *self._shapes[number]] for number in np.unique(journal[:, Column.SHAPE]).tolist() if number != NONE
        ]
        digest.update(json.dumps([attempts, streams, shapes], default=str).encode())
        digest.update(np.ascontiguousarray(journal).tobytes())
        if (journal[:, Column.POOL] == WHOLE).any():  # such rows point to those of the parts
            digest.update(np.ascontiguousarray(self._recorded).tobytes())
        return digest.hexdigest()

    def _name_of(self, row: list[int]) -> str:
        stream = self._streams[row[Column.STREAM]]
        return _stream_name(stream.kind, stream.module, stream.tag, stream.leaf)

    def _misplaced(self, row: list[int]) -> TraceCorruptError:
        name = self._pools[row[Column.POOL]][0]
        return TraceCorruptError(
            f"{self.path}: the data of {self._name_of(row)} in global step {row[Column.GLOBAL_STEP]} "
            f"is not in pool {name!r} where the journal says"
        )

    def _damaged(self, row: list[int]) -> TraceCorruptError:
        return TraceCorruptError(
            f"{self.path}: the data of {self._name_of(row)} in global step {row[Column.GLOBAL_STEP]}, "
            f"call {row[Column.CALL]}, fails its checksum"
        )

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
        keys = (module,) if module else (None, "") if module is None else ("", None)
        for key in keys:
            found = [
                number
                for number, s in enumerate(self._streams)
                if (s.kind, s.module, s.tag, s.leaf) == (kind, key, tag, leaf) and (rank is None or _is_of(s, {rank}))
            ]
            if found:
                break
        if not found:
            names = sorted({_stream_name(s.kind, s.module, s.tag, s.leaf) for s in self._streams})
            shown = ", ".join(names[:20]) + (f", and {len(names) - 20} more" if len(names) > 20 else "")
            what = _stream_name(kind, module, tag, leaf) + ("" if rank is None else f" of rank {rank}")
            has = f"it has {shown or 'no streams'}{self._meant(kind, module, tag, leaf)}"
            raise CaptureError(f"{self.path} has no {what}; {has}")
        if all(self._streams[number].dtype is None for number in found):
            raise CaptureError(f"{self.path}: {kind} messages are events, and carry no data")
        selected = self.select(steps=steps, streams=found)
        if call is not None:
            selected = selected[self.journal[selected, Column.CALL] == call]
        global_steps = self.journal[selected, Column.GLOBAL_STEP]
        shapes = set(self.journal[selected, Column.SHAPE].tolist())
        chosen = [self._streams[number].dtype for number in np.unique(self.journal[selected, Column.STREAM]).tolist()]
        dtypes = {ENCODINGS[dtype].readable if dtype else None for dtype in chosen}
        whole: NDArray[Any] | None = None
        if len(shapes) == 1 and len(dtypes) == 1 and None not in dtypes:
            whole = np.empty((len(selected), *self._shapes[shapes.pop()]), dtypes.pop())
        arrays: dict[int, NDArray[Any]] = {}
        for batch in self._arrays(selected):
            if whole is not None:
                whole[np.searchsorted(selected, batch.rows)] = batch.data
            else:
                # copies, because an array that is kept should not keep what was read with it
                arrays |= zip(batch.rows.tolist(), map(np.array, batch.data), strict=True)
        if whole is not None:
            return global_steps, whole
        carrying = [row for row in selected.tolist() if row in arrays]
        return self.journal[carrying, Column.GLOBAL_STEP], [arrays[row] for row in carrying]

    def _meant(self, kind: str, module: str | None, tag: str, leaf: str) -> str:
        """What may be meant by the first of the names of a stream that is not there, among those that go with it."""
        found = self._streams
        for name, wanted in (("kind", kind), ("module", module or ""), ("tag", tag), ("leaf", leaf)):
            there = {getattr(stream, name) or "" for stream in found}
            if wanted not in there:
                return did_you_mean(wanted, there)
            found = [stream for stream in found if (getattr(stream, name) or "") == wanted]
        return ""

    def __copy__(self) -> TraceReader:
        same = object.__new__(TraceReader)
        same.__dict__.update(self.__dict__)
        return same

    def __reduce__(self) -> Any:
        # a deep copy has files of its own, also in another process
        again = functools.partial(TraceReader, ranks=self._only, assemble=self._assemble, verify=self._verify)
        return again, (self.path,)

    def close(self) -> None:
        """Close the files. Closing again does nothing."""
        for store in self._stores:
            store.close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TraceReader({str(self.path)!r}: {len(self)} messages, {self.status})"


def _read_at(place: Place, target: memoryview, trailer: bytearray, checksum: int, verify: bool) -> bool:
    """Fill `target` with what lies at a place; whether it is there, and is what was written."""
    try:
        if place.checksummed and checksum == NONE:
            whole = os.preadv(place.file, (target, trailer), place.offset) == len(target) + 4
            checksum = int.from_bytes(trailer, "little")
        else:
            whole = os.preadv(place.file, (target,), place.offset) == len(target)
    except (OSError, OverflowError):
        return False
    return whole and (not verify or checksum == NONE or crc32c(target) == checksum)


def _is_of(stream: Stream, ranks: set[int]) -> bool:
    """Whether one of some ranks recorded a stream, or another rank did so for it."""
    replicas = () if stream.placement is None else stream.placement.replicas
    return stream.rank in ranks or not ranks.isdisjoint(replicas)


def _attempt_and_rank(name: str) -> tuple[int, int]:
    """Attempt and rank of a part."""
    where = part_of(name)
    assert where is not None
    return where[1], where[0]


def _in_vain(name: str, store: ReadStore, again: Mapping[int, int]) -> bool:
    """Whether nothing is in a part, and nothing that could be would count; `again` is what `restarted` says."""
    where = part_of(name)
    return where is not None and where[1] < again.get(where[0], 0) and is_empty(store, name)


def _in_order(groups: list[_Group], count: int) -> tuple[list[int], list[Iterator[Tensor | None]]]:
    """To which group each message of a block belongs, and the data of each group, in the order of the messages.

    Tensors are made one by one, as the messages are: thousands at once would leave the processor's cache before they
    are used. The last of the iterators is for messages without data.
    """
    owners = np.full(count, len(groups), np.int64)
    tensors: list[Iterator[Tensor | None]] = []
    for number, group in enumerate(groups):
        places = group.places
        owners[places] = number
        if (places[1:] < places[:-1]).any():
            order = np.argsort(places)
            group = _Group(places[order], group.data[order], group.dtype, group.whole_nbytes)
        tensors.append(_tensors(group))
    tensors.append(itertools.repeat(None))
    return owners.tolist(), tensors


def _tensor(group: _Group) -> Tensor:
    """The only message of a group that was read for it alone."""
    import torch

    if group.whole_nbytes > _KEPT * group.data.nbytes:
        return next(_tensors(group))
    encoding = ENCODINGS[group.dtype]
    tensor = torch.from_numpy(group.data[0, ...])
    return tensor if encoding.bits is None else tensor.view(encoding.dtype)


def _tensors(group: _Group) -> Iterator[Tensor]:
    """The messages of a group, each in memory of its own or in a part of a block that is not many times its size."""
    import torch

    data, encoding = group.data, ENCODINGS[group.dtype]
    if not data.size:
        for _ in range(len(data)):
            yield torch.empty(data.shape[1:], dtype=encoding.dtype, device="cpu")
        return
    few = group.whole_nbytes * len(data) <= _KEPT * data.nbytes
    from_numpy = torch.from_numpy
    for begin in range(0, len(data), _KEPT):
        # a message that is kept should not keep a block that is many times its size
        part = data[begin : begin + _KEPT] if few else data[begin : begin + _KEPT].copy()
        # an index with an ellipsis gives arrays of scalars, too
        rows = part if part.ndim > 1 else [part[number, ...] for number in range(len(part))]
        if encoding.bits is None:
            yield from map(from_numpy, rows)
        else:
            for row in rows:
                yield from_numpy(row).view(encoding.dtype)


def _shorter(ranges: Iterable[tuple[int, int]], offsets: NDArray[np.int64], longest: int) -> Iterator[tuple[int, int]]:
    """Cut ranges of ascending offsets where they span more than `longest`: gaps that are read add up, too."""
    for begin, end in ranges:
        while begin < end:
            cut = int(np.searchsorted(offsets[begin:end], offsets[begin] + longest, side="right"))
            yield begin, begin + cut
            begin += cut


def _united(tables: list[list[_T]]) -> tuple[list[_T], list[NDArray[np.int64]]]:
    """One table of what is in several, and for each of them the numbers that its entries have in it."""
    numbers: dict[str, int] = {}
    table: list[_T] = []
    ids = []
    for one in tables:
        mine = np.zeros(len(one), np.int64)
        for place, entry in enumerate(one):
            # a sampling is a dictionary, which cannot be a key
            mine[place] = numbers.setdefault(repr(entry), len(table))
            if mine[place] == len(table):
                table.append(entry)
        ids.append(mine)
    return table, ids


def _by_attempt(part: Part) -> tuple[int, int]:
    return part.attempt, part.rank


def _list(ranks: Iterable[int] | None) -> str:
    return ", ".join(map(str, sorted(ranks or ())))


def _names(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


def _check_steps(steps: Steps | None) -> tuple[int, int | None, int]:
    if steps is None:
        return 0, None, 1
    parts = tuple(steps)
    if len(parts) not in (2, 3):
        raise CaptureError(f"steps are (start, stop) or (start, stop, stride), not {steps!r}")
    if any(part is not None and (isinstance(part, bool) or not isinstance(part, (int, np.integer))) for part in parts):
        raise CaptureError(f"steps are whole numbers or None, not {steps!r}")
    start, stop = parts[0], parts[1]
    stride = parts[2] if len(parts) == 3 else None
    start, stride = 0 if start is None else int(start), 1 if stride is None else int(stride)
    stop = None if stop is None else int(stop)
    if start < 0 or (stop is not None and stop < start) or stride < 1:
        raise CaptureError(f"steps go up from 0: {steps!r} has a negative, reversed or standing part")
    return start, stop, min(stride, np.iinfo(np.int64).max)


def _stream_name(kind: str, module: str | None, tag: str, leaf: str) -> str:
    name = kind if module is None else f"{kind} of {module or 'the root module'}"
    name += f", leaf {leaf}" if leaf else ""
    return name if tag == DEFAULT_TAG else f"{name}, tag {tag}"
