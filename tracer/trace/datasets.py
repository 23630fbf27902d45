"""`TraceDataset`: activations and other data of a trace for PyTorch's DataLoader: shuffled, shared out, resumable."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from tracer.errors import CaptureError
from tracer.format.encodings import ENCODINGS, decode, readable
from tracer.format.journal import Column
from tracer.memory import Memory
from tracer.trace.aligned import IDENTITY, Aligned, Journaled
from tracer.trace.arrow import write_folder
from tracer.trace.streams import Selection

BUFFER_BYTES: Final = 128 << 20
"""Bytes of datapoints that are shuffled together, unless the user gives a number of datapoints."""
BLOCK_BYTES: Final = 8 << 20
"""Bytes of consecutive messages that one worker reads, at most; a small trace has shorter blocks."""
BLOCKS: Final = 64
"""Blocks of each rank, at least, so that its workers have about equal shares."""
SLAB_ROWS: Final = 512
"""Datapoints that are put together in memory of their own, at least; a larger batch has its own."""

_T = TypeVar("_T")


@final
class TraceDataset(IterableDataset[Any]):
    """Datapoints of a trace, each once in an epoch; made by `TraceReader.dataset`, which describes its parameters.

    A pickled or forked dataset opens the trace again in its process.

    Attributes
    ----------
    datapoints : int
        The number of datapoints in an epoch, over all ranks and workers.
    left_out : int
        The number of selected messages that are not in the dataset, because another kind or module, with which they
        would be aligned, has no message of the same call.
    names : list of str
        The names of the tensors of a batch: modules, or kinds of the network.
    """

    def __init__(
        self,
        reader: Journaled,
        selection: Selection,
        features: int | None,
        batch_size: int | None,
        shuffle: bool | int,
        seed: int,
        drop_last: bool,
        numbered: bool,
        share: tuple[int, int] | None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise CaptureError(f"batch_size is a positive number of datapoints, or None, not {batch_size}")
        if (shuffle is not True and shuffle < 0) or seed < 0:
            raise CaptureError(f"shuffle is a number of datapoints, and seed a number, from 0, not {shuffle}, {seed}")
        if share is not None and not 0 <= share[0] < share[1]:
            raise CaptureError(f"share is (rank, world size), and ranks begin at 0: not {share}")
        self._aligned = Aligned(reader, selection, features)
        self._path = reader.path
        self._again: tuple[Callable[..., Journaled], tuple[Any, ...]] = reader.__reduce__()  # type: ignore[assignment]
        self._reader: tuple[int, Journaled] | None = None
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._drop_last, self._numbered, self._ranks = drop_last, numbered, share
        # in shared memory, so that workers that live on hear of it
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._done = 0
        self._state: Mapping[str, Any] | None = None

    @property
    def datapoints(self) -> int:
        """The number of datapoints in an epoch, over all ranks and workers."""
        return int(self._aligned.counts.sum())

    @property
    def left_out(self) -> int:
        """The number of selected messages that have no partner."""
        return self._aligned.left_out

    @property
    def names(self) -> list[str]:
        """The names of the tensors of a batch."""
        return self._aligned.names

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epochs, as for a `DistributedSampler`; it does nothing without `shuffle`."""
        self._epoch.fill_(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this process is in its epoch; torchdata's `StatefulDataLoader` asks each worker."""
        return {"epoch": int(self._epoch), "batches": self._done, **self._facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on behind the batches that had been given when `state` was taken."""
        self._state = state
        self.set_epoch(state["epoch"])

    def _facts(self) -> dict[str, Any]:
        """What must be the same where a state is loaded."""
        names = ("trace", "batch_size", "shuffle", "seed", "share")
        share = list(self._share())
        return dict(
            zip(names, (self._aligned.identity, self._batch_size, self._shuffle, self._seed, share), strict=True)
        )

    def _share(self) -> tuple[int, int, int, int]:
        """The rank, the number of ranks, the number of this worker in its rank, and of its workers."""
        worker = get_worker_info()
        return (*self._rank(), *((0, 1) if worker is None else (worker.id, worker.num_workers)))

    def _rank(self) -> tuple[int, int]:
        if self._ranks is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return self._ranks or (0, 1)

    def __getstate__(self) -> dict[str, Any]:
        # a worker that is spawned does not know the rank of its parent
        return {**self.__dict__, "_reader": None, "_ranks": self._rank()}

    def _open(self) -> Journaled:
        """The reader of this process."""
        if self._reader is None or self._reader[0] != os.getpid():
            opens, arguments = self._again
            reader = opens(*arguments)
            if self._aligned.identity_in(reader) != self._aligned.identity:
                raise CaptureError(f"{self._path} has changed since this dataset was made; make the dataset again")
            self._reader = os.getpid(), reader
        return self._reader[1]

    def __iter__(self) -> Iterator[Any]:
        share, state = self._share(), self._state
        self._state, self._done = None, 0
        if state is not None:
            differs = ", ".join(name for name, value in self._facts().items() if state.get(name) != value)
            if differs:
                raise CaptureError(f"{self._path}: this state is of a dataset with another {differs}")
            self._done = int(state["batches"])
        return self._batches(share, self._done)

    def _batches(self, share: tuple[int, int, int, int], done: int) -> Iterator[Any]:
        size = self._batch_size or 1
        alone = len(self.names) == 1 and not self._numbered
        for begin, arrays in self._slabs(share, size, done * size):
            tensors = self._tensors(arrays)
            for at in range(max(0, done * size - begin), len(arrays[0]), size):
                self._done += 1  # before the batch is given, because the state is asked for behind it
                chosen = at if self._batch_size is None else slice(at, at + size)
                yield tensors[self.names[0]][chosen] if alone else {key: one[chosen] for key, one in tensors.items()}
            del tensors, arrays

    def _tensors(self, arrays: list[NDArray[Any]]) -> dict[str, torch.Tensor]:
        names, dtypes = [*self.names, *IDENTITY], [*self._aligned.dtypes, *("int64" for _ in IDENTITY)]
        # without identity, there are fewer arrays
        return {key: decode(one, dtype, one.shape) for key, dtype, one in zip(names, dtypes, arrays, strict=False)}

    def _order(self, rank: int, ranks: int, worker: int, workers: int) -> NDArray[np.int64]:
        """The rows of `Aligned.table` that one worker reads, in order."""
        nbytes = self._aligned.nbytes
        most = max(1, min(BLOCK_BYTES, int(nbytes.sum()) // (BLOCKS * ranks)))
        wanted = np.flatnonzero(np.diff((np.cumsum(nbytes) - nbytes) // most)) + 1
        allowed = np.flatnonzero(self._aligned.splits)
        places = np.searchsorted(allowed, wanted)
        cuts = np.unique(allowed[places[places < len(allowed)]])
        blocks = np.split(np.arange(len(nbytes)), cuts[cuts > 0])
        turns = np.arange(len(blocks))
        if self._shuffle:
            turns = np.random.default_rng([self._seed, int(self._epoch)]).permutation(turns)
        mine = [blocks[turn] for turn in turns[rank::ranks][worker::workers].tolist()]
        return np.concatenate(mine) if mine else np.zeros(0, np.int64)

    def _slabs(
        self, share: tuple[int, int, int, int], size: int, start: int
    ) -> Iterator[tuple[int, list[NDArray[Any]]]]:
        """Arrays of datapoints for whole batches: of each column, and of `IDENTITY`; and their place in the epoch.

        Datapoint `start` is in the first slab.
        """
        aligned = self._aligned
        order = self._order(*share)
        ends = np.cumsum(aligned.counts[order])
        total = int(ends[-1]) if len(ends) else 0
        total -= total % size if self._drop_last else 0
        slab = size * -(-SLAB_ROWS // size)
        window = slab
        if self._shuffle:
            rows = BUFFER_BYTES // aligned.row_bytes if self._shuffle is True else self._shuffle
            window = slab * max(1, rows // slab)
        begin = start // window * window
        if begin >= total:
            return
        first = int(np.searchsorted(ends, begin, side="right"))
        before = int(ends[first - 1]) if first else 0
        pieces = _ahead(aligned.pieces(self._open(), order[first:]))
        waiting: list[tuple[int, NDArray[np.int64], NDArray[Any]]] = []
        memory = Memory(2 * window * aligned.row_bytes)
        for at in range(begin, total, window):
            count = min(window, total - at)
            drawn = np.random.default_rng([self._seed, int(self._epoch), *share, at])
            generator = drawn if self._shuffle else None
            slots, origins = _dealt(count, slab, generator)
            slabs = deque(self._empty(memory, min(slab, count - row)) for row in range(0, count, slab))
            missing = count * len(self.names)
            later = []
            while missing:
                column, places, data = waiting.pop() if waiting else next(pieces)
                here = places + before - at
                inside = (here >= 0) & (here < count)
                if not inside.all():
                    if (here >= count).any():
                        later.append((column, places[here >= count], data[here >= count]))
                    here, data = here[inside], data[inside]
                missing -= len(here)
                _deal(slots[here], data, [one[column] for one in slabs], slab)
            waiting += later
            for row in range(at, at + count, slab):
                arrays = slabs.popleft()
                origin = origins[row - at : row - at + slab]
                if generator is not None and slab > size:  # batches of a slab must not be of different blocks
                    mixed = generator.permutation(len(origin))
                    arrays, origin = [one[mixed] for one in arrays], origin[mixed]
                if self._numbered:
                    arrays += self._identity(order, ends, origin + at)
                if row + slab > start:
                    yield row, arrays

    def _empty(self, memory: Memory, rows: int) -> list[NDArray[Any]]:
        """An array for each column, with undefined content."""
        found = []
        for dtype, item in zip(self._aligned.dtypes, self._aligned.items, strict=True):
            shape, storage = (rows, *item), np.dtype(ENCODINGS[dtype].storage)
            nbytes = int(np.prod(shape)) * storage.itemsize
            taken = memory.take(nbytes)
            found.append(np.empty(shape, storage) if taken is None else taken[:nbytes].view(storage).reshape(shape))
        return found

    def _identity(
        self, order: NDArray[np.int64], ends: NDArray[np.int64], places: NDArray[np.int64]
    ) -> list[NDArray[Any]]:
        """The columns of `IDENTITY` of datapoints by their places."""
        batches = np.searchsorted(ends, places, side="right")
        messages = self._aligned.table[order[batches], 0]
        rows = places - (ends - self._aligned.counts[order])[batches]
        return [self._open().journal[messages, Column.GLOBAL_STEP], messages, rows]

    def to_datasets(self, folder: str | os.PathLike[str]) -> Path:
        """Write all datapoints of an epoch to a folder that `datasets.load_from_disk` of Hugging Face opens.

        The folder holds Arrow files, ``data-00000-of-00002.arrow`` and so on, which `pyarrow.ipc.open_stream` reads
        too. Each name of `names` is a column, of lists of fixed length if a datapoint has several numbers; the columns
        `global_step`, `message` and `row` say where a datapoint is from, as with `numbered`. bfloat16 and 8-bit floats
        become float32, which represents them exactly. Memory for some megabytes of datapoints, or the buffer of
        `shuffle`, is enough. The folder appears when it is complete. It needs pyarrow.

        Returns
        -------
        pathlib.Path
            The folder.

        Raises
        ------
        TraceExistsError
            If something is at `folder`.
        CaptureError
            If the data is of a dtype that Arrow does not have, or pyarrow is not installed.
        TraceError
            If the folder cannot be written.
        """
        whole = TraceDataset.__new__(TraceDataset)
        whole.__dict__.update(self.__dict__, _numbered=True, _drop_last=False)
        size = max(1, BLOCK_BYTES // self._aligned.row_bytes)
        dtypes = [*self._aligned.dtypes, *("int64" for _ in IDENTITY)]
        slabs = (
            [readable(one, dtype) for one, dtype in zip(arrays, dtypes, strict=True)]
            for _, arrays in whole._slabs((*self._rank(), 0, 1), size, 0)
        )
        return write_folder(Path(folder), [*self.names, *IDENTITY], slabs, repr(self._facts()))

    def __repr__(self) -> str:
        rest = f", {self.left_out:,} messages without a partner left out" if self.left_out else ""
        return f"TraceDataset({str(self._path)!r}: {self.datapoints:,} datapoints of {', '.join(self.names)}{rest})"


def _dealt(count: int, slab: int, generator: np.random.Generator | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The place in the slabs of each of `count` datapoints, and its inverse; a slab gets a random sample of them.

    Within a slab datapoints keep their order, so that consecutive ones are copied together.
    """
    origins = np.arange(count)
    if generator is None:
        return origins, origins
    drawn = generator.permutation(count) // slab
    # of few bits, because numpy sorts those by their digits
    origins = np.argsort(drawn.astype(np.min_scalar_type(count // slab)), kind="stable")
    slots = np.empty(count, np.int64)
    slots[origins] = np.arange(count)
    return slots, origins


def _deal(slots: NDArray[np.int64], data: NDArray[Any], slabs: list[NDArray[Any]], slab: int) -> None:
    """Copy datapoints to their slots, of which each of `slabs` has `slab`."""
    order = np.argsort(slots)
    slots = slots[order]
    bounds = np.searchsorted(slots, np.arange(len(slabs) + 1) * slab).tolist()
    for number, array in enumerate(slabs):
        begin, end = bounds[number : number + 2]
        if begin == end:
            continue
        first, last = (slots[[begin, end - 1]] - number * slab).tolist()
        if last - first == end - begin - 1:
            # numpy copies whole rows, and other threads run meanwhile, only with a `mode` that raises nothing
            np.take(data, order[begin:end], axis=0, out=array[first : last + 1], mode="clip")
        else:
            array[slots[begin:end] - number * slab] = data[order[begin:end]]


def _ahead(items: Iterator[_T]) -> Iterator[_T]:
    """The same items; a thread makes the next one while the last is used."""
    with ThreadPoolExecutor(1, "trace-dataset") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item
