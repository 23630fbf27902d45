"""Matches the messages of two traces, from their journals alone, and the rows of their batches by their samples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError, did_you_mean
from tracer.format.journal import NONE, Column
from tracer.messaging.messages import kept_of
from tracer.replaying.filters import Filters
from tracer.trace.reader import TraceReader
from tracer.trace.streams import StreamInfo, stream_name


def both_ranks(one: Iterable[int], other: Iterable[int]) -> list[tuple[int, int]]:
    """The pairs of ranks to compare: ranks of the same number, or the only rank of each run, whatever its number."""
    mine, theirs = list(one), list(other)
    if len(mine) == len(theirs) == 1:
        return [(mine[0], theirs[0])]
    return [(rank, rank) for rank in mine if rank in theirs]


def none_in_both(one: object, mine: Iterable[int], other: object, theirs: Iterable[int]) -> str:
    """The reason why two runs without a common rank cannot be compared; `mine` and `theirs` are their ranks."""
    ranks = [", ".join(map(str, some)) for some in (mine, theirs)]
    return f"what is compared is in {one} of the ranks {ranks[0]}, in {other} of {ranks[1]}: none is in both"


@final
@dataclass(frozen=True)
class Renaming:
    """Maps the names of modules in the first run to those in the second.

    Parameters
    ----------
    rules : tuple of (str, str)
        ``(old, new)``: dotted paths, or beginnings of dotted paths. ``*`` in `old` matches anything; the n-th ``*`` of
        `new` stands for what the n-th ``*`` of `old` matched. The first rule that matches counts. An empty path is the
        root, so ``("", "model")`` moves everything below `model`, and ``("model", "")`` undoes that.

    Examples
    --------
    >>> renaming = Renaming((("blocks.*.attn", "layers.*.attention"), ("head", "classifier")))
    >>> renaming("blocks.3.attn.query"), renaming("head"), renaming("headless")
    ('layers.3.attention.query', 'classifier', 'headless')
    """

    rules: tuple[tuple[str, str], ...] = ()
    _compiled: list[tuple[re.Pattern[str], str]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for old, new in self.rules:
            if new.count("*") > old.count("*"):
                raise CaptureError(f"{old}={new} cannot rename: {new!r} has more * than {old!r}")
            wild = "(.*)".join(map(re.escape, old.split("*")))
            pattern = rf"{wild}(?P<rest>\..*)?" if old else r"(?P<rest>.*)"
            self._compiled.append((re.compile(pattern, re.DOTALL), new))

    @classmethod
    def of(cls, rename: Renaming | Mapping[str, str] | Iterable[str] | str | None) -> Renaming:
        """A renaming from a mapping of old to new names, or from ``old=new`` texts.

        Raises
        ------
        CaptureError
            If a text has no ``=``, or a rule has more ``*`` in its new name than in the old.
        """
        if rename is None:
            return cls()
        if isinstance(rename, Renaming):
            return rename
        if isinstance(rename, Mapping):
            return cls(tuple(rename.items()))
        rules = []
        for text in [rename] if isinstance(rename, str) else rename:
            old, equals, new = text.partition("=")
            if not equals:
                raise CaptureError(f"a renaming is OLD=NEW, such as encoder=enc or blocks.*=layers.*, not {text!r}")
            rules.append((old, new))
        return cls(tuple(rules))

    def __call__(self, name: str) -> str:
        """The name in the second run of a module of the first run."""
        for pattern, new in self._compiled:
            found = pattern.fullmatch(name)
            if found is not None:
                return _renamed(found, new)
        return name

    def check(self, names: Iterable[str]) -> None:
        """Check that each rule matches a module of the first run, and that no two modules get the same name.

        Raises
        ------
        CaptureError
            If not.
        """
        known = sorted(set(names))
        for (old, new), (pattern, _) in zip(self.rules, self._compiled, strict=True):
            if not any(pattern.fullmatch(name) for name in known):
                raise CaptureError(
                    f"{old}={new} renames nothing: no module is called {old!r}{did_you_mean(old, known)}"
                )
        taken: dict[str, str] = {}
        for name in known:
            if name == "":  # another module may replace the root
                continue
            new = self(name)
            if new in taken:
                raise CaptureError(f"{taken[new]!r} and {name!r} would both be called {new!r} in the other run")
            taken[new] = name


def _renamed(found: re.Match[str], new: str) -> str:
    *stood, rest = found.groups()
    pieces = new.split("*")
    path = pieces[0] + "".join(part + piece for part, piece in zip(stood, pieces[1:], strict=False))
    rest = (rest or "").removeprefix(".")
    return ".".join(part for part in (path, rest) if part)


KEPT: Final = ("data", "hash", "statistics")
"""What a trace may hold of a message, in the order of the columns of `Matched.kept`."""
GENERATORS: Final = "generators"
_LAST: Final = np.iinfo(np.int64).max
Rows: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows of the journals of two traces."""
Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
"""The data of a message in two traces."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a stream in both traces: kind, module, tag, leaf and rank.

    Attributes
    ----------
    kind, tag, leaf : str
    module : str or None
        The dotted path in the first trace; None for the network.
    rank : int
    """

    kind: str
    module: str | None
    tag: str
    leaf: str
    rank: int

    def __str__(self) -> str:
        return stream_name(self.kind, self.module, self.tag, self.leaf)


@dataclass(eq=False)
class Matched:
    """The matched messages of two traces.

    A trace may hold the data, a hash and statistics of a message, in up to three rows of its journal. The first of
    these that exists, in this order, represents the message.

    Attributes
    ----------
    names : list of Name
        The names of all streams of both traces.
    name_of : pair of ndarray of int64
        For each row of each journal, the index of its name; -1 if a filter excludes the row, or if another row
        represents the message.
    rows : pair of ndarray of int64, (n,)
        The rows of the messages that both traces have, in the first trace's order of observation.
    kept : pair of ndarray of int64, (n, 1 or 3)
        For the same messages, the rows with the data, the hash and the statistics; -1 if the trace has none.
    alone : pair of ndarray of int64
        The rows of messages that the other trace lacks, ascending.
    streams : pair of list of StreamInfo
        The streams of both traces.
    strangers : pair of list of int
        The ids of streams that pass the filters, but belong to ranks that are not compared.
    filters : Filters
    of_a_rank : bool
        As given to `matched`.
    """

    names: list[Name]
    name_of: Rows
    rows: Rows
    kept: Rows
    alone: Rows
    streams: tuple[list[StreamInfo], list[StreamInfo]]
    strangers: tuple[list[int], list[int]]
    filters: Filters
    of_a_rank: bool


def matched(one: TraceReader, other: TraceReader, filters: Filters, *, renaming: Renaming, of_a_rank: bool) -> Matched:
    """Match the messages of two traces by kind, module, tag, leaf, rank, step and call.

    Parameters
    ----------
    one, other : TraceReader
    filters : Filters
        Modules by their names in `one`. A kind includes its hashes and statistics. Without kinds, the states of random
        generators are left out; see `generator_differences`.
    renaming : Renaming
        From the modules of `one` to those of `other`.
    of_a_rank : bool
        Whether each reader is of one rank, so that the rank that recorded shared data does not matter.
    """
    ranks = both_ranks(one.ranks, other.ranks)
    mine, theirs = one.streams, other.streams
    # the root comes first, so that another module may replace it
    back = {renaming(module): module for module in sorted({stream.module or "" for stream in mine})}
    of_rank: tuple[dict[int, int], dict[int, int]] = ({a: a for a, _ in ranks}, {b: a for a, b in ranks})
    names: dict[tuple[Any, ...], int] = {}
    shown: list[Name] = []
    name_of = []
    held = []
    strangers: tuple[list[int], list[int]] = ([], [])
    for side, (reader, streams) in enumerate(((one, mine), (other, theirs))):
        found: list[int] = []
        for stream in streams:
            # streams are matched by the module's name in the second trace, and shown by that in the first
            module = stream.module
            there = module if module is None or side else renaming(module)
            displaced = not side and module == "" and back.get(there or "") != ""
            here = module if module is None or not side else back.get(module, module)
            rank = 0 if of_a_rank else of_rank[side].get(stream.rank)
            wanted = _passes(replace(stream, module=here), filters)
            if rank is None or not wanted:
                strangers[side].extend([stream.id] if wanted else [])
                found.append(NONE)
                continue
            kind = kept_of(stream.kind)[0]
            key = (kind, there, stream.tag, stream.leaf, rank, displaced)
            if key not in names:
                names[key] = len(names)
                shown.append(Name(kind, here, stream.tag, stream.leaf, stream.rank if of_a_rank else rank))
            found.append(names[key])
        held.append(np.array([*(KEPT.index(kept_of(stream.kind)[1]) for stream in streams), 0], np.int64))
        of_row = np.array([*found, NONE], np.int64)[reader.journal[:, Column.STREAM]]
        within = np.zeros(len(of_row), np.bool_)
        within[reader.select(steps=filters.steps)] = True
        name_of.append(np.where(within, of_row, NONE))
    rows, kept, alone = _pairs((one, other), name_of, held)
    for side in (0, 1):
        standing = np.full(len(name_of[side]), NONE)
        chosen = np.concatenate([rows[side], alone[side]])
        standing[chosen] = name_of[side][chosen]
        name_of[side] = standing
    of_rows = (name_of[0], name_of[1])
    return Matched(shown, of_rows, rows, kept, alone, (mine, theirs), strangers, filters, of_a_rank)


def _passes(stream: StreamInfo, filters: Filters) -> bool:
    """Whether a stream passes the filters by its kind, or by the kind that its hashes or statistics are of."""
    if filters.kinds is None:
        return stream.kind != GENERATORS and filters.let_through(stream)
    return any(filters.let_through_as(kind, stream) for kind in (stream.kind, kept_of(stream.kind)[0]))


def _pairs(
    readers: tuple[TraceReader, TraceReader], name_of: Sequence[NDArray[np.int64]], held: Sequence[NDArray[np.int64]]
) -> tuple[Rows, Rows, Rows]:
    """`Matched.rows`, `Matched.kept` and `Matched.alone`: rows match by name, step and call."""
    rows, keys, what = [], [], []
    for reader, names, of_stream in zip(readers, name_of, held, strict=True):
        chosen = np.flatnonzero(names != NONE)
        lines = reader.journal[chosen]
        kept = of_stream[lines[:, Column.STREAM]]
        key = np.stack([names[chosen], lines[:, Column.GLOBAL_STEP], lines[:, Column.CALL]], axis=1)
        rows.append(chosen)
        keys.append(np.column_stack([key, _repeated(np.column_stack([key, kept]))]))
        what.append(kept)
    joined = np.concatenate(keys)
    order, begins = _groups(joined)
    message = np.empty(len(order), np.int64)
    message[order] = np.cumsum(begins) - 1
    wide = len(KEPT) if any(one.any() for one in what) else 1
    table = np.full((int(begins.sum()), 2, wide), NONE)
    side = np.repeat([0, 1], [len(rows[0]), len(rows[1])])
    table[message, side, np.concatenate(what)] = np.concatenate(rows)
    has = (table != NONE).any(axis=2)
    # the first that exists: the data, else the hash, else the statistics
    standing = np.take_along_axis(table, (table != NONE).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    both = np.flatnonzero(has.all(axis=1))
    steps = readers[0].journal[standing[both, 0], Column.GLOBAL_STEP]
    both = both[np.lexsort((first_of(table[both, 0]), steps))]
    alone = [np.sort(standing[has[:, side] & ~has[:, 1 - side], side]) for side in (0, 1)]
    return (standing[both, 0], standing[both, 1]), (table[both, 0], table[both, 1]), (alone[0], alone[1])


def first_of(kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each message, its first row in the journal."""
    found: NDArray[np.int64] = np.where(kept == NONE, _LAST, kept).min(axis=1, initial=_LAST)
    return found


def _repeated(key: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row, the number of equal rows before it."""
    order, is_first = _groups(key)
    begins = np.flatnonzero(is_first)
    length = np.diff(begins, append=len(key))
    found = np.empty(len(key), np.int64)
    found[order] = np.arange(len(key)) - np.repeat(begins, length)
    return found


def _groups(key: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """An order that groups equal rows, and which of the ordered rows begin a group."""
    order = np.lexsort(key.T[::-1])
    begins = np.ones(len(key), np.bool_)
    begins[1:] = (key[order[1:]] != key[order[:-1]]).any(axis=1)
    return order, begins


def values_of_pairs(readers: tuple[TraceReader, TraceReader], rows: Rows) -> Iterator[tuple[int, Arrays]]:
    """Yield the row of the first trace and both arrays, for each pair of rows, in the order of the first journal.

    Each trace is read once, in its own order. Data of the second trace is held in memory only where its order differs
    from that of the first.
    """
    ascending = np.argsort(rows[0])
    rows = (rows[0][ascending], rows[1][ascending])
    masks = []
    for reader, chosen in zip(readers, rows, strict=True):
        mask = np.zeros(len(reader.journal), np.bool_)
        mask[chosen] = True
        masks.append(mask)
    theirs = readers[1].values(where=masks[1])
    waiting: dict[int, NDArray[Any]] = {}
    for (row, mine), partner in zip(readers[0].values(where=masks[0]), rows[1].tolist(), strict=True):
        found = waiting.pop(partner, None)
        while found is None:
            number, data = next(theirs)
            assert data is not None
            if number == partner:
                found = data
            else:
                waiting[number] = data.copy()  # a view would keep the whole block in memory
        assert mine is not None
        yield row, (mine, found)


INPUT: Final = "input_data"
_FORWARD: Final = (INPUT, "input_labels", "network_output", "activations", "layer_inputs")
_BACKWARD: Final = ("layer_gradients", "input_gradients")
HAVE_SAMPLES: Final = (*_FORWARD, *_BACKWARD)
"""The kinds whose first axis is the samples of a batch."""
_FLATTENED: Final = ("network_output", "input_labels")
"""Kinds whose first axis may be the samples and their positions, flattened for a loss."""


@dataclass(frozen=True, slots=True)
class _SameRows:
    """The rows of two batches that are of the same samples; `sizes` has the sizes of both batches."""

    one: NDArray[np.int64]
    other: NDArray[np.int64]
    sizes: tuple[int, int]

    @property
    def same(self) -> bool:
        """Whether both batches have the same samples in the same order."""
        n = len(self.one)
        return self.sizes == (n, n) and bool((self.other == np.arange(n)).all())


@final
@dataclass
class Samples:
    """Aligns the data of two runs by samples: rows of a batch whose `input_data` is bitwise equal.

    It must receive the pairs of messages in their order of observation. Samples that occur several times in a batch are
    matched in their order.

    Attributes
    ----------
    left_out : list of int, two numbers
        For each trace, the number of rows of its batches that the batches of the other trace lack.
    """

    left_out: list[int] = field(default_factory=lambda: [0, 0])
    _batches: dict[tuple[int, str], list[_SameRows]] = field(default_factory=dict)
    _step: int = -1

    def aligned(
        self, name: Name, step: int, one: NDArray[Any], other: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]] | str:
        """The rows of two arrays that are of the same samples, in the same order; or why they cannot be aligned."""
        if name.kind not in HAVE_SAMPLES:
            return one, other
        if step != self._step:
            self._batches.clear()
            self._step = step
        batches = self._batches.setdefault((name.rank, name.tag), [])
        if name.kind == INPUT and name.leaf in ("", "0") and one.ndim and other.ndim:
            batches.append(_same_rows(one, other))
            for side, n in enumerate(batches[-1].sizes):
                self.left_out[side] += n - len(batches[-1].one)
        if not batches:
            return "no input_data came before it in its step"
        rows = batches[-1]
        if name.kind in _BACKWARD and len(batches) > 1 and not all(batch.same for batch in batches):
            return "it is a gradient of a step with several batches"
        if not len(rows.one):
            return "the batches have no sample in common"
        found = (_rows_taken(name, one, rows.one, rows.sizes[0]), _rows_taken(name, other, rows.other, rows.sizes[1]))
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
        return (one, other) if rows.same else "its first axis is not that of the batch"


def _rows_taken(name: Name, array: NDArray[Any], rows: NDArray[np.int64], size: int) -> NDArray[Any] | None:
    """The given rows of a batch; None if the first axis of the array is not that of the batch."""
    if not array.ndim or not size:
        return None
    if array.shape[0] == size:
        return array[rows]
    if name.kind in _FLATTENED and array.shape[0] % size == 0:
        return array.reshape(size, -1, *array.shape[1:])[rows]
    return None


def _same_rows(one: NDArray[Any], other: NDArray[Any]) -> _SameRows:
    sizes = (one.shape[0], other.shape[0])
    first: list[int] = []
    second: list[int] = []
    if one.dtype == other.dtype and one.shape[1:] == other.shape[1:]:
        there: dict[bytes, list[int]] = {}
        for number in range(sizes[1] - 1, -1, -1):
            there.setdefault(other[number].tobytes(), []).append(number)
        for number in range(sizes[0]):
            places = there.get(one[number].tobytes())
            if places:
                first.append(number)
                second.append(places.pop())
    return _SameRows(np.array(first, np.int64), np.array(second, np.int64), sizes)
