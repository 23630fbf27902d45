"""Launches the Triton kernels of a device with tables of addresses; the same statistics by torch operations alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.numbers.statistics import ENTRIES
from tracer.observing.reductions import power_of_two

LIKE: Final = {
    torch.bool: "uint8",
    torch.uint8: "uint8",
    **{getattr(torch, name): name for name in ("int8", "int16", "int32", "int64")},
    **{getattr(torch, name): name for name in ("float16", "bfloat16", "float32", "float64")},
}
"""The dtypes whose statistics the kernels compute, and how the kernels call them."""
BYTES: Final = "bytes"
"""How the kernels call any dtype of which they make a hash alone."""
_WARPS: Final = 4
_PROGRAMS: Final = 8
"""The most programs for each multiprocessor of the device."""
_MOST_SENT: Final = 16 << 20
"""The bytes of tables that are kept on the device."""


class StoredRows(NamedTuple):
    """The rows that `KernelLauncher.read` stores of a tensor's pieces: the first address, and how many there are."""

    address: int
    pieces: int


class KernelLauncher:
    """Launches the kernels on one device.

    Parameters
    ----------
    device : torch.device
        In tests the CPU.

    Attributes
    ----------
    row_bytes, piece_bytes : int
        The size of a row, and of the piece of a tensor that a row is of.

    Raises
    ------
    ImportError
        If Triton is missing. Other errors come from Triton, a compiler or a driver.
    """

    def __init__(self, device: torch.device) -> None:
        from tracer.observing.device import kernels

        self._kernels: Any = kernels
        self._device = device
        self.row_bytes = 8 * int(kernels.ROW.value)
        self.piece_bytes = int(kernels.PIECE.value)
        words = [word - (1 << 64 if word >> 63 else 0) for word in kernels.TABLE]
        self._secret = torch.tensor(words, device=device).view(torch.uint64)
        self._compiled: dict[Any, Any] = {}
        self._sent: dict[Any, Tensor] = {}
        self._sent_bytes = 0
        of_cuda = device.type == "cuda"
        units = torch.cuda.get_device_properties(device).multi_processor_count if of_cuda else 1
        self._programs = units * _PROGRAMS
        self._try()

    def _try(self) -> None:
        """Compile the kernels that all need, so that what fails does it here."""
        one, row = torch.zeros(1, device=self._device), self.space(1)
        rows = StoredRows(row.data_ptr(), 1)
        self.read("float32", 4, [(one.data_ptr(), 4, *rows)])
        self.statistics([rows])
        self.hashes([(b"", rows)])

    def space(self, count: int) -> Tensor:
        """Memory for a number of rows."""
        return torch.empty((count, self.row_bytes // 8), dtype=torch.float64, device=self._device)

    def read(self, like: str, itemsize: int, columns: list[tuple[int, int, int, int]]) -> None:
        """Store the rows of tensors of a dtype, in one launch.

        Parameters
        ----------
        like : str
            A value of `LIKE`, or `BYTES`.
        itemsize : int
            The bytes of an element.
        columns : list of (int, int, int, int)
            Of each tensor, whose elements lie in C order: the address, which is a multiple of 16, the number of bytes,
            and its `StoredRows`.
        """
        pieces = sum(count for _, _, _, count in columns)
        table = self._table((like, *columns), lambda: _of_tensors(columns))
        programs = min(pieces, self._programs)
        work = self._words(programs * int(self._kernels.SUMS.value))
        parts = 8 if like == BYTES else 8 // itemsize
        self._run(self._kernels.read, programs, (table, len(columns), pieces, work, self._secret), (like, parts))

    def statistics(self, all_rows: Sequence[StoredRows]) -> Tensor:
        """The entries of `tracer.numbers.statistics` of tensors whose rows are stored; float64 (tensors, 16)."""
        entries = torch.empty((len(all_rows), len(ENTRIES)), dtype=torch.float64, device=self._device)
        table = self._table(("statistics", *all_rows), lambda: np.array(all_rows, np.int64).reshape(-1))
        self._run(self._kernels.unite_statistics, len(all_rows), (table, entries))
        return entries

    def hashes(self, tensors: Sequence[tuple[bytes, StoredRows]]) -> Tensor:
        """The hashes of tensors whose rows are stored, given with the texts they begin with; int64 (tensors,)."""
        sizes = [len(text) + 8 * rows.pieces for text, rows in tensors]
        # a message is followed by the sums of its blocks, of which a whole piece is stored at a time
        words = [-(-size // 16) * 2 + (-(-size // self.piece_bytes) * 512 if size > 240 else 512) for size in sizes]
        ends = np.cumsum(words)
        hashed = torch.empty(len(tensors), dtype=torch.int64, device=self._device)
        table = self._table(("hashes", *tensors), lambda: _of_texts(tensors, ends - np.array(words)))
        work = self._words(int(ends[-1]))
        self._run(self._kernels.unite_hashes, len(tensors), (table, len(tensors), work, self._secret, hashed))
        return hashed

    def _words(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint64, device=self._device)

    def _table(self, key: tuple[Any, ...], make: Callable[[], NDArray[np.int64]]) -> Tensor:
        """A table on the device. The addresses of a training's steps recur, so that few tables are sent twice."""
        of_cuda = self._device.type == "cuda"
        key = (*key, torch._C._cuda_getCurrentStream(self._device.index)[0]) if of_cuda else key
        found = self._sent.get(key)
        if found is None:
            host = torch.from_numpy(make())
            # pinned memory is reused by torch only after the copy
            found = host.pin_memory().to(self._device, non_blocking=True) if of_cuda else host
            if self._sent_bytes + found.nbytes > _MOST_SENT:
                self._sent, self._sent_bytes = {}, 0
            self._sent[key] = found
            self._sent_bytes += found.nbytes
        return found

    def _run(self, kernel: Any, programs: int, given: tuple[Any, ...], constants: tuple[Any, ...] = ()) -> None:
        """Launch a kernel. A compiled kernel is launched directly, because Triton's lookup is slow."""
        variant = id(kernel), *constants
        compiled = self._compiled.get(variant)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            if compiled is not None:
                compiled[programs, 1, 1](*given, *constants)
            else:
                self._compiled[variant] = kernel[programs, 1, 1](*given, *constants, num_warps=_WARPS)


def _of_tensors(columns: list[tuple[int, int, int, int]]) -> NDArray[np.int64]:
    """The table of the kernel `read`."""
    each = np.array(columns, np.int64)
    owners = np.repeat(np.arange(len(each)), each[:, 3])
    each[:, 3] = np.cumsum(each[:, 3]) - each[:, 3]
    return np.concatenate([each.reshape(-1), owners])


def _of_texts(tensors: Sequence[tuple[bytes, StoredRows]], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The table of the kernel `unite_hashes`."""
    lengths = [len(text) for text, _ in tensors]
    begins = np.cumsum(lengths) - lengths
    rows = np.array([rows for _, rows in tensors], np.int64)
    texts = b"".join(text for text, _ in tensors)
    letters = np.frombuffer(texts.ljust(-(-len(texts) // 8) * 8, b"\0"), np.int64)
    return np.concatenate([np.column_stack([rows, begins, lengths, places]).reshape(-1), letters])


PART: Final = 1 << 24
"""How many numbers are converted to float64 at once, to limit memory."""
_NAN, _INF, _ZERO, _COUNT, _TOTAL, _SQUARES, _ABSOLUTE, _SECOND, _CENTRE, _REST, _LOW, _HIGH = range(12)


def statistics_by_operations(tensor: Tensor) -> Tensor:
    """`tracer.numbers.statistics.statistics_of`, accurate to about 1e-13; float64 (16,), on the tensor's device.

    Takes about fifty kernel launches, and thirty more for each further `PART`.

    Parameters
    ----------
    tensor : torch.Tensor
        Dense, of any dtype; not empty.

    Examples
    --------
    >>> statistics_by_operations(torch.tensor([3.0, 0.0, -4.0]))[:5].tolist()[2:]
    [5.0, -4.0, 3.0]
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        return _counts_of_complex(flat)
    exponent = exponent_of(flat) if flat.dtype is torch.float64 else None
    rows = torch.stack([_moments(part, exponent) for part in flat.split(PART)])
    row = rows[0] if len(rows) == 1 else _united(rows)
    spread = row[_SECOND] / (len(flat) - 1) if len(flat) > 1 else torch.full_like(row[_SECOND], torch.nan)
    values = torch.stack([row[_TOTAL] / len(flat), spread.sqrt(), row[_SQUARES].sqrt(), row[_LOW], row[_HIGH]])
    if exponent is None:
        exponent = torch.zeros_like(spread)
    else:
        values = _raised(values, exponent)
    return torch.cat([values, row[_NAN : _SECOND + 1], exponent.reshape(1), row[_CENTRE : _REST + 1]])


def exponent_of(flat: Tensor) -> Tensor:
    """The exponent of the power of two by which `tracer.numbers.moments` divides float64 numbers; float64 ().

    Parameters
    ----------
    flat : torch.Tensor
        Float64, not empty.
    """
    low, high = flat.aminmax()
    largest = torch.maximum(low.abs(), high.abs())
    outside = largest.isfinite() & (largest != 0) & ((largest > 1e60) | (largest < 1e-60))
    return (torch.frexp(largest).exponent * outside).double()


def _raised(values: Tensor, exponent: Tensor) -> Tensor:
    """Return values * 2**exponent, where 2**exponent itself may overflow."""
    half = (exponent / 2).floor()
    return values * power_of_two(half) * power_of_two(exponent - half)


def _moments(part: Tensor, exponent: Tensor | None) -> Tensor:
    """The moments of some numbers, divided by 2**exponent; float64 (12,)."""
    x = part.double() if exponent is None else _raised(part, -exponent)
    low, high = x.aminmax()
    total = x.sum()
    centre = total / len(x)
    deviations = x - centre
    rest = deviations.sum()
    second = torch.linalg.vector_norm(deviations).square() - rest * rest / len(x)
    return torch.stack(
        [
            x.isnan().sum(dtype=torch.float64),
            x.isinf().sum(dtype=torch.float64),
            ((x if exponent is None else part) == 0).sum(dtype=torch.float64),
            torch.full_like(total, len(x)),
            total,
            torch.linalg.vector_norm(x).square(),
            torch.linalg.vector_norm(x, 1),
            second.clamp(min=0),
            centre,
            rest,
            low + 0.0,
            high + 0.0,
        ]
    )


def _united(rows: Tensor) -> Tensor:
    """The moments of the union of several groups, by the formulas of `tracer.numbers.moments`; (groups, 12) → (12,)."""
    counts, centres = rows[:, _COUNT], rows[:, _CENTRE]
    means = centres - centres[0] + rows[:, _REST] / counts
    mean = (counts * means).sum() / counts.sum()
    centre = centres[0] + mean
    rest = counts.sum() * (mean - (centre - centres[0]))
    second = (rows[:, _SECOND] + counts * (means - mean).square()).sum()
    found = [*rows[:, :_SECOND].sum(0), second, centre, rest, rows[:, _LOW].amin(), rows[:, _HIGH].amax()]
    return torch.stack(found)


def _counts_of_complex(flat: Tensor) -> Tensor:
    """The counts; all other entries are NaN."""
    found = flat.isnan().sum(), flat.isinf().sum(), (flat == 0).sum(), torch.full_like(flat.real[0], flat.numel())
    counts = torch.stack([one.double() for one in found])
    return torch.cat([torch.full_like(counts[:1], torch.nan).expand(5), counts, counts.new_full((7,), torch.nan)])
