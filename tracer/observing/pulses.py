"""Gathers the hashes and statistics of a training step, and publishes them as the rows of a few messages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from tracer.format.journal import MAX_AXES
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import DEFAULT_TAG, checked
from tracer.messaging.pulses import PULSE, PulseRow, sampling_of
from tracer.numbers.gathered import SMALL, GatheredTensors
from tracer.numbers.statistics import ENTRIES
from tracer.observing.clock import At, Problems, StreamKey
from tracer.observing.device.reading import DeviceTable, Noted, stays
from tracer.observing.pytorch.tensors import ordinary
from tracer.observing.reductions import hashes_of_pieces, text_of

_NUMBERS: Final = {"statistics": ENTRIES, "hash": ()}
"""The names of the elements of a row, by what the rows are."""
_MOST_KNOWN: Final = 256
"""Sets of rows whose declarations are kept; a program whose steps all differ would fill the memory."""
_MOST_SINGLE: Final = 1 << 16
"""Rows made one by one that are kept for the same reason."""
_MANY: Final = 256
"""Copies of small tensors from which on their numbers are computed before others are read: at most 8 MB."""
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_GATHERED: Final = frozenset(
    (torch.float32, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
)
"""The dtypes of tensors that are read together: those of NumPy whose squares do not leave float64."""


class RowKind(NamedTuple):
    """What a row is made of: ``"hash"`` or ``"statistics"``, and the kind and the sampling of its message."""

    what: str
    kind: str
    sampling: Mapping[str, Any] | None


@final
class PulseRows:
    """The rows of a stream's tensors; the same object for all tensors whose rows are declared alike.

    Parameters
    ----------
    stream : StreamKey
    kinds : tuple of RowKind
    """

    __slots__ = ("kinds", "stream")

    def __init__(self, stream: StreamKey, kinds: tuple[RowKind, ...]) -> None:
        self.stream, self.kinds = stream, kinds


class Read(NamedTuple):
    """What was read of a tensor: its number in this step, and a copy (n,) of its numbers in C order."""

    number: int
    copy: NDArray[Any]


class _Taken(NamedTuple):
    """A tensor of which the running step has rows: its call, and its number among those read, or its finished row."""

    rows: PulseRows
    call: int
    data: Tensor | int | Noted

    @property
    def where(self) -> torch.device | DeviceTable | None:
        """Where its rows lie: on a device, in a table of a device, or on the host."""
        if isinstance(self.data, Noted):
            return self.data.table
        return None if isinstance(self.data, int) or self.data.is_cpu else self.data.device


class _Pulse(NamedTuple):
    """A pulse of a step: what its rows are, their declaration, and the places of their tensors among those taken."""

    what: str
    told: dict[str, Any]
    places: list[int]


@final
class Pulses:
    """The rows of the running step, until they are published together.

    Parameters
    ----------
    bus : MessageBus
    problems : Problems
        Gets a note of what a device could not read in time.
    """

    def __init__(self, bus: MessageBus, problems: Problems) -> None:
        self._bus = bus
        self._problems = problems
        self._tables: dict[torch.device, DeviceTable] = {}
        self._at: At | None = None
        self._rank = 0
        self._taken: list[_Taken] = []
        # copies of the small tensors that were read since the last publication, with the texts of their hashes
        self._texts: list[bytes] = []
        self._copies: list[NDArray[Any]] = []
        self._gathered = GatheredTensors()
        self._hashes: list[int] = []  # of all tensors that were read in this step
        self._step, self._calls = -1, dict.fromkeys(_NUMBERS, 0)
        # by the rows of a publication, which are kept as long, so that their ids are theirs
        self._known: dict[tuple[Any, ...], tuple[list[_Pulse], list[PulseRows]]] = {}
        self._single: dict[tuple[str, int, StreamKey], PulseRows] = {}  # of rows that are made one by one

    def read(self, tensors: Sequence[Tensor]) -> list[Read | None]:
        """Read tensors, which may change afterwards; None of one that is not small and ordinary."""
        if len(self._copies) >= _MANY:
            self._compute()
        if sys.byteorder != "little" or peek_interpreter_stack() is not None:
            return [None] * len(tensors)
        found: list[Read | None] = []
        texts, copies, done = self._texts, self._copies, len(self._hashes)
        for data in tensors:
            small = data.dtype in _GATHERED and 0 < data.numel() <= SMALL and data.is_cpu and type(data) in _PLAIN
            if (
                not small
                or data.layout is not torch.strided
                or data.is_neg()
                or data.is_nested
                or data.dim() > MAX_AXES
            ):
                found.append(None)
                continue
            copy = data.detach().numpy().flatten()
            found.append(Read(done + len(copies), copy))
            copies.append(copy)
            texts.append(text_of(data.dtype, data.shape))
        return found

    def take(self, rows: PulseRows, data: Tensor, call: int, at: At, rank: int) -> bool:
        """Take the rows of a tensor, which may change afterwards; False if they must be taken one by one."""
        (read,) = self.read((data,))
        found = self.note(data, rows.stream) if read is None else read.number
        if found is None:
            return False
        if at is not self._at:
            self._turn_to(at, rank)
        self._taken.append(_Taken(rows, call, found))
        return True

    def note(self, data: Tensor, stream: StreamKey | None = None) -> Noted | None:
        """Have a tensor read later on its device; None if it must be read now. See `DeviceTable.read`."""
        table = self._table(data)
        number = None if table is None else table.read(data, stream)
        return None if table is None or number is None else Noted(table, number)

    def note_difference(self, now: Tensor, before: Tensor) -> Noted | None:
        """Have ``now - before`` read later on its device. See `DeviceTable.read_difference`."""
        table = self._table(before)
        number = None if table is None else table.read_difference(now, before)
        return None if table is None or number is None else Noted(table, number)

    def copy(self, data: Tensor) -> Tensor | None:
        """Have a tensor copied on its device at the next `flush`; None if it must be copied now."""
        table = self._table(data)
        return None if table is None else table.copy(data)

    def flush(self) -> None:
        """Have read what waits on devices, because it may change."""
        for table in self._tables.values():
            table.flush()

    def _table(self, data: Tensor) -> DeviceTable | None:
        """The table of a tensor that devices read, and not the host."""
        if not stays(data) or data.is_complex() or not ordinary(data):
            return None
        table = self._tables.get(data.device)
        if table is None:
            table = self._tables[data.device] = DeviceTable(data.device)
        return table

    def take_read(self, read: Iterable[tuple[PulseRows, int]], at: At, rank: int) -> None:
        """Take the rows of tensors that were read in this step and have no call, given with their numbers."""
        if at is not self._at:
            self._turn_to(at, rank)
        self._taken += [_Taken(rows, 0, number) for rows, number in read]

    def add(self, row: RowKind, stream: StreamKey, data: Tensor | Noted, call: int, at: At, rank: int) -> None:
        """Take one row.

        Parameters
        ----------
        row : RowKind
        stream : StreamKey
            Of the tensor.
        data : torch.Tensor or Noted
            The hash or the statistics, or of what they are to be made.
        call, at, rank
            Of the row's message.
        """
        if at is not self._at:
            self._turn_to(at, rank)
        key = row.kind, id(row.sampling), stream
        rows = self._single.get(key)
        if rows is None:
            if len(self._single) >= _MOST_SINGLE:
                self._single.clear()
            rows = self._single[key] = PulseRows(stream, (row,))
        self._taken.append(_Taken(rows, call, data))

    def _turn_to(self, at: At, rank: int) -> None:
        """Publish the rows of other counters, before rows of these are taken."""
        if self._at is not None and at[:3] != self._at[:3]:
            self.publish()
        self._at, self._rank = at, rank

    def publish(self) -> None:
        """Publish the rows so far; waits for no device."""
        at = self._at
        if at is None:
            return
        taken, self._taken, self._at = self._in_time(self._taken), [], None
        if at[0] != self._step:
            self._step, self._calls = at[0], dict.fromkeys(_NUMBERS, 0)
        step, train_step, epoch, _ = at
        for what, told, places in self._pulses(taken):
            call, self._calls[what] = self._calls[what], self._calls[what] + 1
            data = self._rows_of([taken[place].data for place in places], what)
            self._bus.publish(
                checked(PULSE, None, step, train_step, epoch, DEFAULT_TAG, call, what, self._rank, data, told)
            )

    def step_over(self) -> None:
        """Publish the rows of the step, and forget what was read in it."""
        if self._at is not None:
            self.publish()
        if self._hashes or self._copies:
            self._hashes, self._texts, self._copies = [], [], []
            self._gathered.clear()
        for table in self._tables.values():
            table.clear()

    def _in_time(self, taken: list[_Taken]) -> list[_Taken]:
        """The rows without those of tensors that a device could not read in time."""
        if not any(table.lost() for table in self._tables.values()):
            return taken
        found = []
        for one in taken:
            data, stream = one.data, one.rows.stream
            why = data.table.lost().get(data.number) if isinstance(data, Noted) else None
            if why is None:
                found.append(one)
            else:
                self._problems.note(f"{stream.kind} of {stream.module}" if stream.module else stream.kind, why)
        return found

    def _pulses(self, taken: list[_Taken]) -> list[_Pulse]:
        """The pulses of some rows, by what they are and the device on which they lie."""
        key = tuple([(id(one.rows), one.call, None if type(one.data) is int else one.where) for one in taken])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            told = [one for pulses, _ in self._known.values() for one in pulses]
            found = [one._replace(told=_same(one, told)) for one in _declared(taken)]
            known = self._known[key] = found, [one.rows for one in taken]
        return known[0]

    def _rows_of(self, data: list[Tensor | int | Noted], what: str) -> Tensor:
        """The rows (rows, numbers) of tensors, each given by its number or as its finished row."""
        noted = [one for one in data if isinstance(one, Noted)]
        if noted:  # in a table, all are
            return noted[0].table.made(what, [one.number for one in noted])
        if self._copies:
            self._compute()
        numbers = [one for one in data if isinstance(one, int)]
        if what == "statistics":
            read = torch.from_numpy(self._gathered.statistics()[numbers]) if numbers else torch.empty(0)
        else:
            read = torch.from_numpy(np.array([self._hashes[one] for one in numbers], np.int64))
        if len(numbers) == len(data):
            return read
        rows = iter(read)
        return torch.stack([one if isinstance(one, Tensor) else next(rows) for one in data])

    def _compute(self) -> None:
        """Compute the hashes of what was read, and have its statistics computed."""
        self._hashes += hashes_of_pieces(self._texts, self._copies)
        self._gathered.add(*self._copies)
        self._texts, self._copies = [], []


def _declared(taken: Iterable[_Taken]) -> Iterator[_Pulse]:
    """The pulses of some rows, with their declarations."""
    found: dict[tuple[str, torch.device | DeviceTable | None], tuple[list[PulseRow], list[int]]] = {}
    for place, one in enumerate(taken):
        stream, where = one.rows.stream, one.where
        for what, kind, sampling in one.rows.kinds:
            told, places = found.setdefault((what, where), ([], []))
            told.append(PulseRow(kind, stream.module, stream.leaf, one.call, sampling))
            places.append(place)
    for (what, _), (told, places) in found.items():
        yield _Pulse(what, sampling_of(told, _NUMBERS[what]), places)


def _same(pulse: _Pulse, known: Iterable[_Pulse]) -> dict[str, Any]:
    """The declaration of a pulse: the same object as that of an earlier one that says the same."""
    return next((one.told for one in known if one.what == pulse.what and one.told == pulse.told), pulse.told)
