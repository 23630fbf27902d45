"""`TraceReader`: reads the messages of a trace in order, filtered, in blocks."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError
from tracer.format.journal import COLUMNS, Column
from tracer.messaging.messages import DEFAULT_TAG, Message
from tracer.messaging.stacks import Stretch
from tracer.stores.locations import Anywhere, location
from tracer.trace.attempts import PartSpan, ahead, clock_before, listed
from tracer.trace.columns import Columns, Group
from tracer.trace.described import Described, Position
from tracer.trace.header import Fingerprint
from tracer.trace.merging import Parts
from tracer.trace.streams import Selection, Steps, called

if TYPE_CHECKING:
    from tracer.trace.datasets import TraceDataset

WINDOW_ROWS: Final = 1 << 18
"""The default number of messages of a window."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _by(
    of: Callable[_P, Selection],
) -> Callable[[Callable[[TraceReader, Selection], _T]], Callable[Concatenate[TraceReader, _P], _T]]:
    """Let a method of `TraceReader` take the parameters of `of`, which makes a `Selection` of them."""

    def taking(method: Callable[[TraceReader, Selection], _T]) -> Callable[Concatenate[TraceReader, _P], _T]:
        @functools.wraps(method)
        def by_names(self: TraceReader, /, *names: _P.args, **filters: _P.kwargs) -> _T:
            return method(self, of(*names, **filters))

        both = inspect.signature(method), inspect.signature(of)
        parameters = [both[0].parameters["self"], *both[1].parameters.values()]
        by_names.__signature__ = both[0].replace(parameters=parameters)  # type: ignore[attr-defined] # for `help`
        return by_names

    return taking


@final
class TraceReader(Described):
    """A trace as of its opening, or of the last `refresh` if it is still being written.

    A distributed run has the messages of all ranks, ordered by global step, then by rank. If a trace has several ranks
    or attempts, `problems` lists the parts that cannot be read; all other parts are read.

    Parameters
    ----------
    path : path or URL
    ranks : iterable of int, optional
        Read only the messages of these ranks. Replicated values (weights of DistributedDataParallel) belong to every
        rank that holds them, whichever rank recorded them.
    assemble : bool
        Whether distributed tensors (FSDP) are assembled from their shards. False: only the messages that each rank
        recorded, unchanged.
    verify : bool
        Whether data is compared with its checksums when it is read. False is for repeated reading of a trace that was
        just verified: large messages are read a third faster, but later damage goes unnoticed. The journal, compressed
        data, object stores and unfinished traces are always verified.

    Attributes
    ----------
    unreadable : dict of int to TraceError
        For each rank with an unreadable part, the error.

    Raises
    ------
    TraceNotFoundError
        If nothing is at `path`.
    TraceFormatError
        If it is not a trace, has a version that this release does not read, or has parts that are not safe to read.
    TraceCorruptError
        If data that all messages need is damaged.
    CaptureError
        If it has no messages of these ranks.
    TraceUnreadableError
        If a file may not be opened, or an object store does not respond.
    """

    def __init__(
        self, path: Anywhere, *, ranks: Iterable[int] | None = None, assemble: bool = True, verify: bool = True
    ) -> None:
        self.path = location(path)
        """Where the trace is."""
        self._parts = Parts.open(self.path, None if ranks is None else {int(rank) for rank in ranks}, assemble)
        try:
            # a running writer may rewrite a chunk while it is read; only a checksum shows that
            self._verify = verify or not self.status.startswith(("finished", "failed"))
            for store in self._parts.stores:
                store.verifies = self._verify
            self._merge()
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, parts: Parts) -> TraceReader:
        """A reader of parts that are open already."""
        reader = object.__new__(cls)
        reader.path, reader._parts, reader._verify = parts.path, parts, True
        reader._merge()
        return reader

    def within(self, start: int, stop: int | None) -> TraceReader:
        """A reader of a section of this trace that has all messages of a range of global steps, and few others.

        Its `journal`, and so everything that it selects and reads, covers the section; its description of the trace and
        the streams covers the whole trace. It shares the open files, and is closed together with this reader. It cannot
        be refreshed or pickled, and has no `until_attempt`.

        Parameters
        ----------
        start, stop : int, int or None
            The first step, and the step after the last; None for an open end.
        """
        if self._read is not None or self._spans is not None or self._tables.assembles:
            return self
        spans = []
        for read, counts in zip(self._tables.parts, self._tables.counting, strict=True):
            first, last = (min(row, read.stop) for row in read.part.rows.holding(start, stop))
            clock = 0 if self._tables.alone else clock_before(read.part, first, counts)
            spans.append(PartSpan(read.part, first, last, clock, counts))
        return self._part_of(spans)

    def window(
        self, starts: Position | None = None, rows: int | None = None, ends: Position | None = None
    ) -> TraceReader:
        """A reader, as from `within`, of about `rows` messages from `starts` on, up to the end of a step.

        Parameters
        ----------
        starts, ends : sequence of PartSpan or None
            The positions between which the messages are, from `after` or `end`; None: the whole trace.
        rows : int, optional
            The approximate number of messages. If tensors are assembled, the window is always the whole trace.
        """
        tables = self._tables
        if tables.assembles:
            return self
        # rows after the last counting row of a part are not read
        last = [min(one.start, end) for one, end in zip(ends or self.end, tables.ends, strict=True)]
        rows = max(1, (rows or WINDOW_ROWS) // tables.messages_a_row)
        found = ahead(starts or self.begin, tables.counting, last, rows, alone=tables.alone)
        return self._part_of(found, last)

    def windows(self, rows: int | None = None) -> Iterator[TraceReader]:
        """Readers of consecutive windows of all messages, so that a long trace does not fill the memory."""
        # a copy, because a refresh in the meantime would change tables and stream numbers
        return _windows(copy(self), rows)

    @property
    def begin(self) -> Position:
        """The position before the first message."""
        return [span.until(span.start) for span in self._spans or self._tables.parts]

    @property
    def end(self) -> Position:
        """The position after the last message."""
        return [PartSpan(span.part, span.stop, span.stop) for span in self._spans or self._tables.parts]

    def after(self, count: int) -> Position:
        """The position after the first `count` messages of this reader; not within a pulse, see `before`."""
        return self._rows().after(count)

    @property
    def is_last(self) -> bool:
        """Whether no messages follow this window, up to the `ends` that it was made with."""
        return self._ends is None or all(end.start >= last for end, last in zip(self.end, self._ends, strict=True))

    def _part_of(self, spans: list[PartSpan], ends: list[int] | None = None) -> TraceReader:
        view = copy(self)
        view._spans, view._read, view._whole, view._ends = spans, None, self._whole or self, ends
        return view

    def refresh(self) -> bool:
        """Read what was committed since the trace was opened or last refreshed; returns whether there was anything.

        `journal` and `streams` grow. With a single rank, rows keep their numbers; with several ranks, all rows are
        merged again.

        Raises
        ------
        TraceCorruptError
            If the trace is damaged.
        CaptureError
            If this is a reader of a section of a trace, as from `within`.
        """
        self._refuse_part("is not refreshed")
        self._parts.refresh()
        if self._parts.extent == self._extent:
            return False
        self._merge()
        return True

    def of_rank(self, rank: int, *, assemble: bool | None = None) -> TraceReader:
        """A reader of one rank of this trace, which shares the open files and is closed together with this reader.

        Returns this reader itself if it has no other ranks. `assemble` is by default that of this reader. The reader of
        a section of a trace, as from `within`, gives a reader of the same section.

        Raises
        ------
        CaptureError
            If there is nothing of this rank, or if tensors were to be assembled in a section of a trace.
        TraceError
            If the rank's part cannot be read.
        """
        if rank not in self.ranks:
            has = f"it has {listed(self.ranks)}"
            raise self.unreadable.get(rank) or CaptureError(f"{self.path} has nothing of rank {rank}; {has}")
        parts = self._parts
        assemble = parts.assemble if assemble is None else assemble
        if self.ranks == [rank] and (assemble is parts.assemble or not (parts.lending or self._tables.assembles)):
            return self
        found = self._view(parts.of_rank(rank, assemble))
        if self._spans is None:
            return found
        if found._tables.assembles:
            self._refuse_part("has not all parts of the tensors that are to be put together")
        spans = {span.part: span for span in self._spans}
        ends = dict(zip(spans, self._ends or [span.stop for span in self._spans], strict=True))
        there = [read.part for read in found._tables.parts]
        return found._part_of([spans[part] for part in there], [ends[part] for part in there])

    def folded(self) -> TraceReader:
        """A reader to which a pulse (statistics or hashes of a step) is one message; it shares the open files."""
        self._refuse_part("does not fold pulses")
        return self._view(self._parts.as_written())

    def until_attempt(self, attempt: int) -> TraceReader:
        """A reader of this trace as an attempt left it, without later attempts.

        It shares the open files, and is closed together with this reader.

        Raises
        ------
        CaptureError
            If there is no such attempt, or if this is a reader of a section of a trace, as from `within`.
        """
        self._refuse_part("does not go back to an attempt")
        there = [one["attempt"] for one in self.attempts]
        if attempt not in there:
            raise CaptureError(f"{self.path} has no attempt {attempt}; it has {', '.join(map(str, there))}")
        return self._view(self._parts.until(attempt))

    def _refuse_part(self, why: str) -> None:
        """Raise `CaptureError` if this is a reader of a section: the operation needs the whole trace."""
        if self._spans is not None:
            raise CaptureError(f"{self.path}: a reader of a part of the trace {why}; take the reader of the whole")

    def _view(self, parts: Parts) -> TraceReader:
        """Another reader, of these parts, that shares the open files."""
        view = copy(self)
        view._parts = parts
        view._merge()
        return view

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    @_by(Selection.of)
    def select(self, selection: Selection) -> NDArray[np.int64]:
        """The rows of the journal whose messages pass all filters, ascending; see `messages`.

        Raises
        ------
        CaptureError
            If the steps are no range, a stream id is unknown, or the mask has another length than the journal.
        """
        selection.check(self.path, len(self._streams))
        return selection.rows(self.journal, self._streams)

    @_by(Selection.of)
    def messages(self, selection: Selection) -> Iterator[Message]:
        """The messages that pass all filters, in the order in which they were recorded.

        Reads only these messages, in blocks of about 8 MiB. The data of a message may be kept and changed: its memory
        is not used for anything else.

        Parameters
        ----------
        kinds : str or iterable of str, optional
        modules : str or iterable of str, optional
            Glob patterns of dotted paths (``"layer1.*"``; the dot has no special meaning). Messages of the network have
            no module, and pass only without this filter.
        steps : tuple, optional
            ``(start, stop)`` or ``(start, stop, stride)`` of the global step, start inclusive and stop exclusive; None
            for an open end.
        tags : str or iterable of str, optional
            Glob patterns; ``"!eval"`` means every tag except ``"eval"``.
        streams : iterable of int, optional
            Ids of entries of `streams`.
        where : numpy.ndarray of bool, optional
            A mask over the rows of `journal`.
        ranks : int or iterable of int, optional
            Includes what other ranks recorded for these ranks; `Message.rank` is the rank that recorded it.
        at : numpy.ndarray of int64, optional
            Rows of `journal`; the messages come in this order.

        Raises
        ------
        CaptureError
            If the steps are no range, a stream id is unknown, or the mask has another length than the journal.
        TraceCorruptError
            If data that is read is damaged. All messages before it are correct.
        """
        if selection.where is not None or selection.at is not None or self._read is not None:
            blocks = self._columns(selection)
        else:
            selection.check(self.path, len(self._streams))
            windows = self._holding(selection).windows()
            blocks = itertools.chain.from_iterable(window._columns(selection) for window in windows)
        return (message for columns in blocks for message in columns.messages())

    def _columns(self, selection: Selection) -> Iterator[Columns]:
        """The selected messages block by block; the data of a block is dropped before the next is read."""
        selection.check(self.path, len(self._streams))
        return self._rows().blocks.columns(selection.rows(self.journal, self._streams))

    def _holding(self, selection: Selection) -> TraceReader:
        """A reader of a section that has all messages of the selected steps."""
        whole = selection.start == 0 and selection.stop is None
        return self if whole else self.within(selection.start, selection.stop)

    def stretches(self, where: NDArray[np.bool_]) -> Iterator[Stretch | Iterator[Message]]:
        """The messages of some rows of `journal`, in order, as a replay takes them: small messages as a `Stretch`.

        Parameters and errors are those of `messages`. Each yielded iterator must be used up before the next.
        """
        blocks = self._rows().blocks
        for columns in blocks.columns(self.select(where=where)):
            part: Stretch | Iterator[Message] | None = blocks.stretch(columns)
            yield columns.messages() if part is None else part
            del part  # frees the memory for the next block

    @_by(Selection.of)
    def arrays(self, selection: Selection) -> Iterator[Group]:
        """The data of the messages that pass all filters, in groups of one shape; fast for many small messages.

        Blocks of about 8 MiB come in recorded order; within a block, messages are grouped by how they are stored.
        `Group.rows` identifies the messages. Parameters and errors are those of `messages`.

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
        return itertools.chain.from_iterable(columns.arrays() for columns in self._columns(selection))

    @_by(Selection.of)
    def columns(self, selection: Selection) -> Iterator[Columns]:
        """The messages that pass all filters, in order, as columns for `TraceWriter.write_columns`.

        Data is in its storage dtype. Parameters and errors are those of `messages`.
        """
        return (replace(columns, data=[*columns.data]) for columns in self._columns(selection))

    @_by(Selection.of)
    def values(self, selection: Selection) -> Iterator[tuple[int, NDArray[Any] | None]]:
        """The messages that pass all filters, in order, without torch: the number of the journal row, and the data.

        Data is as in `Group`; None for events. Parameters and errors are those of `messages`.
        """
        return itertools.chain.from_iterable(columns.values() for columns in self._columns(selection))

    def fingerprint(self) -> Fingerprint:
        """An empty digest, to which rows of the `journal` of this reader or of its windows can be added.

        Reads no data. Rows that are appended to the trace later do not change it.

        Examples
        --------
        >>> import tempfile, torch
        >>> from tracer import NetworkMessage, TraceWriter
        >>> path = tempfile.mkdtemp() + "/run.zarr"
        >>> with TraceWriter(path) as writer:
        ...     for k in range(3):
        ...         writer.write(NetworkMessage(kind="epoch_started", global_step=k, train_step=0, epoch=k))
        >>> trace = TraceReader(path)
        >>> some, others = trace.fingerprint(), trace.fingerprint()
        >>> some.add(trace.journal[[0, 1]])
        >>> others.add(trace.journal[[0, 2]])
        >>> some.hexdigest() == others.hexdigest()
        False
        """
        runs = [[part.name, part.header.get("run_id"), part.header.get("created")] for part in self._parts.shown]
        if not self._tables.assembles:
            return Fingerprint(runs, self._tables.streams, self._tables.shapes, np.zeros((0, COLUMNS), np.int64))
        read = self._rows().data.merged
        return Fingerprint(runs, read.streams, read.shapes, read.recorded)

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
        """All data of one stream, as numpy arrays, in recorded order.

        A step has several messages if several ranks recorded it, or if a module was called several times.

        Parameters
        ----------
        kind : str
        module : str, optional
            Dotted path. None is the network or, if the network has no such stream, the root module.
        tag : str
        steps : tuple, optional
            As in `messages`.
        leaf : str
        rank : int, optional
            Only what this rank recorded, or another rank for it. None: all ranks, in order within each step.
        call : int, optional
            Only this call, counted from 0, in each step.

        Returns
        -------
        global_steps : numpy.ndarray of int64, (n,)
        data : numpy.ndarray (n, ...), or list of n numpy.ndarray
            A list if messages differ in shape or dtype. Types that numpy lacks (bfloat16, 8-bit floats) come as
            float32, which represents them exactly.

        Raises
        ------
        CaptureError
            If there is no such stream, if it carries no data, or if the steps are no range.
        TraceCorruptError
            If data that is read is damaged.
        """
        streams = self._streams
        found = called(self.path, streams, kind, module, tag, leaf, rank)
        if all(streams[number].dtype is None for number in found):
            raise CaptureError(f"{self.path}: {kind} messages are events, and carry no data")
        selection = Selection.of(steps=steps, streams=found)
        reader = self._holding(selection)
        selected = selection.rows(reader.journal, reader._streams)
        if call is not None:
            selected = selected[reader.journal[selected, Column.CALL] == call]
        rows, data = reader._rows().blocks.together(selected)
        return reader.journal[rows, Column.GLOBAL_STEP], data

    def dataset(
        self,
        kinds: str | Iterable[str],
        modules: str | Iterable[str] | None = None,
        *,
        steps: Steps | None = None,
        tags: str | Iterable[str] = DEFAULT_TAG,
        ranks: int | Iterable[int] | None = None,
        features: int | None = None,
        batch_size: int | None = None,
        shuffle: bool | int = False,
        seed: int = 0,
        drop_last: bool = False,
        numbered: bool = False,
        share: tuple[int, int] | None = None,
    ) -> TraceDataset:
        """Recorded data as a `torch.utils.data.IterableDataset`; each datapoint comes once in an epoch.

        Data of one kind of one module is a tensor, other data a dict of tensors of the same datapoints: by module, or
        by kind for data of the network such as ``input_labels``. It is aligned by step, call, tag and rank.

        Parameters
        ----------
        kinds : str or iterable of str
        modules : str or iterable of str, optional
            Glob patterns, as in `messages`; data of the network passes always.
        steps, tags, ranks : optional
            As in `messages`.
        features : int, optional
            The axis of the features, which makes each other position a datapoint: -1 for sequences (batch, time,
            features), 1 for convolutions. Data with fewer axes, such as labels of tokens, has a number for each
            position. None: a datapoint is an entry of the batch.
        batch_size : int, optional
            Datapoints of an item. None: an item is a single datapoint without an axis for the batch, which is slow.
        shuffle, seed : bool or int, int
            Whether blocks of up to 8 MiB come in a random order, and are mixed in a buffer of 128 MiB, or of this
            number of datapoints. A batch is a random sample of it; in large batches, blocks lie one after the other.
            The order follows from `seed` and `TraceDataset.set_epoch`.
        drop_last, numbered : bool
            Whether each worker leaves out a smaller last batch; whether an item also has `global_step`, `message` (its
            row in `journal`) and `row` of each datapoint.
        share : tuple of int, optional
            The rank and the number of ranks, each of which reads other blocks. None: those of torch.distributed, if it
            is initialized. The workers of a DataLoader share the blocks of their rank.

        Raises
        ------
        CaptureError
            If nothing is selected, the data cannot be rows of one table, or this is a reader of a section.
        UnknownNameError
            If the trace has no data of a kind or of a module.
        """
        from tracer.trace.datasets import TraceDataset

        selection = Selection.of(kinds, modules, steps, tags, ranks=ranks)
        return TraceDataset(self, selection, features, batch_size, shuffle, seed, drop_last, numbered, share)

    def __copy__(self) -> TraceReader:
        same = object.__new__(TraceReader)
        same.__dict__.update(self.__dict__)
        return same

    def __reduce__(self) -> Any:
        self._refuse_part("is not pickled")
        if self._parts.folded:
            raise CaptureError(f"{self.path}: a folded reader is not pickled; pickle the reader that it was made from")
        # the unpickled reader opens the files again, so that it works in another process
        again = functools.partial(
            TraceReader, ranks=self._parts.only, assemble=self._parts.assemble, verify=self._verify
        )
        return again, (self.path,)

    def close(self) -> None:
        """Close the files. A second call does nothing."""
        self._parts.close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TraceReader({str(self.path)!r}: {len(self)} messages, {self.status})"


def _windows(reader: TraceReader, rows: int | None) -> Iterator[TraceReader]:
    """Implement `TraceReader.windows` for a reader that is never refreshed."""
    ends = reader.end
    window = reader.window(rows=rows, ends=ends)
    yield window
    while not window.is_last:
        window = reader.window(window.after(len(window.journal)), rows, ends)
        yield window
