"""`TraceDataset`: activations and other data of a trace for PyTorch's DataLoader: shuffled, shared out, resumable."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from tracer.errors import CaptureError, TraceExistsError
from tracer.format.encodings import ENCODINGS, decode, readable
from tracer.format.journal import Column
from tracer.memory import Memory
from tracer.stores.errors import write_errors
from tracer.stores.protocols import rows_in
from tracer.trace.aligned import IDENTITY, Aligned, Piece
from tracer.trace.streams import Selection

BUFFER_BYTES: Final = 128 << 20
"""Bytes of datapoints that are shuffled together, unless the user gives a number of datapoints."""
BLOCK_BYTES: Final = 8 << 20
"""Bytes of consecutive messages that one worker reads, at most; a small trace has shorter blocks."""
BLOCKS: Final = 64
"""Blocks of each rank, at least, so that its workers have about equal shares."""
SLAB_ROWS: Final = 512
SLAB_BYTES: Final = 65536
"""Datapoints, and their bytes, that are put together in memory of their own, at least; a larger batch has its own."""

Share = tuple[int, int, int, int]
"""The rank, the number of ranks, the number of a worker in its rank, and of the workers of the rank."""
Slab = tuple[int, list[NDArray[Any]]]
"""The place in the epoch of the first of some datapoints, and arrays of these: of each column, and of `IDENTITY`."""
FILE: Final = "data-00000-of-00001.arrow"
"""The name that Hugging Face gives to an only file."""


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
        reader: Any,
        selection: Selection,
        features: int | None,
        batch_size: int | None,
        shuffle: bool | int,
        seed: int,
        drop_last: bool,
        numbered: bool,
        share: tuple[int, int] | None,
    ) -> None:
        if min(1 if batch_size is None else batch_size, shuffle + 1, seed + 1) < 1:
            found = f"{batch_size}, {shuffle}, {seed}"
            raise CaptureError(f"batch_size is a positive number or None, shuffle and seed are from 0, not {found}")
        if share is not None and not 0 <= share[0] < share[1]:
            raise CaptureError(f"share is (rank, world size), and ranks begin at 0: not {share}")
        self._again = reader.__reduce__()
        self._aligned = Aligned(reader, selection, features)
        self.datapoints = int(self._aligned.counts.sum())
        self.left_out, self.names = self._aligned.left_out, self._aligned.names
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._drop_last, self._numbered, self._ranks = drop_last, numbered, share
        # in shared memory, so that workers that live on hear of it
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._done = 0
        self._state: Mapping[str, Any] | None = None
        self._reader: tuple[int, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epochs, as for a `DistributedSampler`; it does nothing without `shuffle`."""
        self._epoch.fill_(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this process is in its epoch; torchdata's `StatefulDataLoader` asks each worker."""
        return {"epoch": int(self._epoch), "batches": self._done, **self._facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on behind the batches that had been given when `state` was taken."""
        if not isinstance(state, Mapping) or not {"epoch", "batches"} <= set(state):
            raise CaptureError(f"a state of a dataset is what `state_dict` returns, not {state!r:.100}")
        self._state = state
        self.set_epoch(state["epoch"])

    def _facts(self) -> dict[str, Any]:
        """What must be the same where a state is loaded."""
        how = [self._batch_size, self._shuffle, self._seed, self._drop_last, *self._share()]
        return {"trace": self._aligned.identity, "how": how}

    def _share(self) -> Share:
        """What this process reads."""
        ranks, worker = self._ranks, get_worker_info()
        if ranks is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return (*(ranks or (0, 1)), *((0, 1) if worker is None else (worker.id, worker.num_workers)))

    def __getstate__(self) -> dict[str, Any]:
        # a worker that is spawned does not know the rank of its parent
        return {**self.__dict__, "_reader": None, "_ranks": self._share()[:2]}

    def _open(self) -> Any:
        """The reader of this process."""
        if self._reader is None or self._reader[0] != os.getpid():
            opens, arguments = self._again
            reader = opens(*arguments)
            if self._aligned.identity_in(reader) != self._aligned.identity:
                raise CaptureError(
                    f"{self._aligned.path} has changed since this dataset was made; make the dataset again"
                )
            self._reader = os.getpid(), reader
        return self._reader[1]

    def __iter__(self) -> Iterator[Any]:
        state, self._state, self._done = self._state, None, 0
        if state is not None:
            if not self._facts().items() <= state.items():
                what = "trace, batch size, shuffle, seed, rank or number of workers"
                raise CaptureError(f"{self._aligned.path}: this state is of a dataset with another {what}")
            self._done = int(state["batches"])
        return self._batches(self._done)

    def _batches(self, done: int) -> Iterator[Any]:
        size = self._batch_size or 1
        names, dtypes = self._columns(self._numbered)
        for begin, arrays in self._slabs(self._share(), size, done * size, self._numbered):
            tensors = [decode(one, dtype, one.shape) for one, dtype in zip(arrays, dtypes, strict=True)]
            del arrays
            for at in range(max(0, done * size - begin), len(tensors[0]), size):
                if self._drop_last and at + size > len(tensors[0]):
                    return
                self._done += 1  # before the batch is given, because the state is asked for behind it
                chosen = at if self._batch_size is None else slice(at, at + size)
                batch = [one[chosen] for one in tensors]
                yield batch[0] if len(batch) == 1 else dict(zip(names, batch, strict=True))
            del tensors

    def _columns(self, numbered: bool) -> tuple[list[str], list[str]]:
        """The names and the dtypes of the tensors of a batch."""
        more = IDENTITY if numbered else ()
        return [*self.names, *more], [*self._aligned.dtypes, *("int64" for _ in more)]

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

    def _slabs(self, share: Share, size: int, start: int, numbered: bool) -> Iterator[Slab]:
        """Datapoints for whole batches of `size`; datapoint `start` is in the first slab."""
        aligned, order = self._aligned, self._order(*share)
        ends = np.cumsum(aligned.counts[order])
        total = int(ends.max(initial=0))
        slab = size * -(-max(SLAB_ROWS, SLAB_BYTES // aligned.row_bytes) // size)
        rows = (BUFFER_BYTES if self._shuffle else BLOCK_BYTES) // aligned.row_bytes
        window = slab * max(1, (rows if self._shuffle in (False, True) else self._shuffle) // slab)
        begin = start // window * window
        first = int(np.searchsorted(ends, begin, side="right"))
        before = int(ends[first - 1]) if first else 0
        pieces = aligned.pieces(self._open(), order[first:])
        memory, waiting = Memory(2 * window * aligned.row_bytes), list[Piece]()
        for at in range(begin, total, window):
            count, later = min(window, total - at), list[Piece]()
            drawn = np.random.default_rng([self._seed, int(self._epoch), *share, at]) if self._shuffle else None
            slots, origins = _dealt(count, slab, drawn)
            slabs = deque(self._empty(memory, min(slab, count - row)) for row in range(0, count, slab))
            missing = count * len(self.names)
            while missing:
                column, places, data = waiting.pop() if waiting else next(pieces)
                here = places + (before - at)  # ascending
                low, high = np.searchsorted(here, (0, count)).tolist()
                if high < len(here):
                    later.append((column, places[high:], data[high:]))
                here, data = here[low:high], data[low:high]
                missing -= len(here)
                _deal(slots[here], data, slabs, column, slab)
            waiting += later
            for row in range(0, count, slab):
                arrays, origin = slabs.popleft(), origins[row : row + slab]
                if drawn is not None and slab > size:  # batches of a slab must not be of different blocks
                    mixed = drawn.permutation(len(origin))
                    arrays, origin = [one[mixed] for one in arrays], origin[mixed]
                if numbered:
                    batches = np.searchsorted(ends, origin + at, side="right")
                    messages = aligned.table[order[batches], 0]
                    steps = self._open().journal[messages, Column.GLOBAL_STEP]
                    arrays += [steps, messages, origin + at - (ends - aligned.counts[order])[batches]]
                if at + row + slab > start:
                    yield at + row, arrays

    def _empty(self, memory: Memory, rows: int) -> list[NDArray[Any]]:
        """An array for each column, with undefined content."""
        found = []
        for dtype, item in zip(self._aligned.dtypes, self._aligned.items, strict=True):
            shape, storage = (rows, *item), np.dtype(ENCODINGS[dtype].storage)
            found.append(rows_in(memory.take(math.prod(shape) * storage.itemsize), shape, storage))
        return found

    def to_datasets(self, folder: str | os.PathLike[str]) -> Path:
        """Write all datapoints of an epoch to a folder that `datasets.load_from_disk` of Hugging Face opens.

        The folder holds the Arrow file ``data-00000-of-00001.arrow``, which `pyarrow.ipc.open_stream` reads, too. Each
        name of `names` is a column, of lists of fixed length if a datapoint has several numbers; the columns
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
        try:
            import pyarrow as pa
        except ImportError:
            raise CaptureError("an Arrow folder needs pyarrow: pip install 'tracereel[tables]'") from None
        folder, (names, dtypes) = Path(folder), self._columns(True)
        if folder.exists():
            raise TraceExistsError(f"{folder} already exists; give another folder")
        size = max(1, BLOCK_BYTES // self._aligned.row_bytes)
        with write_errors(folder), contextlib.ExitStack() as until_then:
            folder.parent.mkdir(parents=True, exist_ok=True)
            growing = tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent)
            rows = Path(until_then.enter_context(growing), "rows")
            rows.mkdir()
            with contextlib.ExitStack() as file:
                writer = None
                for _, arrays in self._slabs((*self._share()[:2], 0, 1), size, 0, True):
                    batch = pa.record_batch(list(map(_in_arrow, names, dtypes, arrays)), names)
                    writer = writer or file.enter_context(pa.ipc.new_stream(rows / FILE, batch.schema))
                    writer.write_batch(batch)
            state = dict.fromkeys(("_format_columns", "_format_type", "_output_all_columns", "_split"))
            told = {"_data_files": [{"filename": FILE}], "_fingerprint": self._aligned.identity[:16]}
            (rows / "state.json").write_text(json.dumps({**state, **told, "_format_kwargs": {}}, indent=2))
            # without the types, which `datasets` then takes from the file
            (rows / "dataset_info.json").write_text("{}")
            rows.rename(folder)
        return folder

    def __repr__(self) -> str:
        rest = f", {self.left_out:,} messages without a partner left out" if self.left_out else ""
        found = f"{self.datapoints:,} datapoints of {', '.join(self.names)}{rest}"
        return f"TraceDataset({str(self._aligned.path)!r}: {found})"


def _in_arrow(name: str, dtype: str, array: NDArray[Any]) -> Any:
    """A column as an array of Arrow; each axis behind the first is a list of fixed size."""
    import pyarrow as pa

    array = readable(np.ascontiguousarray(array), dtype)
    if array.dtype.kind == "c":
        raise CaptureError(f"{name} is complex, and Arrow has no complex numbers")
    column = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


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


def _deal(
    slots: NDArray[np.int64], data: NDArray[Any], slabs: Sequence[list[NDArray[Any]]], column: int, slab: int
) -> None:
    """Put datapoints of a column into their slots, of which each of `slabs` has `slab`."""
    ordered = bool((slots[1:] > slots[:-1]).all())
    order = np.arange(len(slots)) if ordered else np.argsort(slots)
    slots = slots[order]
    bounds = np.searchsorted(slots, np.arange(len(slabs) + 1) * slab).tolist()
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin == end:
            continue
        array, there = slabs[number][column], slots[begin:end] - number * slab
        if ordered and end - begin == len(array):
            slabs[number][column] = data[begin:end]  # needs no copy
        elif there[-1] - there[0] == end - begin - 1:
            # numpy copies whole rows only with a `mode` that raises nothing
            np.take(data, order[begin:end], axis=0, out=array[there[0] : there[-1] + 1], mode="clip")
        else:
            array[there] = data[order[begin:end]]
