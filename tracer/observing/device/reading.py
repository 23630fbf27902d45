"""Hashes and statistics of CUDA tensors, computed on the device without making the training wait.

Tensors are noted in a table, and read together: a launch of a Triton kernel reads all of a dtype, each once for its
hash and its statistics. If Triton is missing or fails, statistics are computed by torch operations, and hashes of a
copy on the host, for which the training waits; a single warning says so.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tracer.errors import raised_by_signal, warn_only
from tracer.observing.device.launching import BYTES, LIKE, Launcher, Rows, Source
from tracer.observing.device.operations import statistics_by_operations
from tracer.observing.hashes import hash_of, text_of

TYPES: Final = {"cuda"}
"""The types of the devices whose tensors are read there; in tests that of the CPU."""
_SHARE: Final = 7
"""Tensors are kept for reading up to 2**-7 of the device's memory."""
_CHUNK: Final = 1024
"""Rows whose memory is allocated together."""
_CONVERTED: Final = {
    **{getattr(torch, name): torch.float32 for name in dir(torch) if name.startswith("float8_")},
    **{torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.float64},
}
"""The other dtypes whose statistics the kernels compute, and what they are converted to."""

_NOWHERE: Final = Rows(0, 0)
_launchers: dict[torch.device, Launcher | None] = {}


def stays(tensor: Tensor) -> bool:
    """Whether a tensor is read on its device, because copying it would make the training wait."""
    return (
        tensor.device.type in TYPES
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not tensor.is_quantized
    )


def hash_on_device(tensor: Tensor) -> Tensor:
    """The hash of a tensor that `stays` on its device, as `tracer.observing.hashes.hash_of` defines it; int64 ()."""
    found = _asked(tensor, Table.hashes)
    return torch.tensor(hash_of(tensor)) if found is None else found


def statistics_on_device(tensor: Tensor) -> Tensor:
    """The entries of `tracer.numbers.statistics.statistics_of` of a tensor that `stays` on its device.

    Accurate to about 1e-13; float64 (16,).
    """
    found = None if tensor.is_complex() else _asked(tensor, Table.statistics)
    return statistics_by_operations(tensor) if found is None else found


class _Asked(NamedTuple):
    """The table with the reading of the tensor that was asked for last."""

    tensor: weakref.ref[Tensor]
    version: int
    table: Table


_last: list[_Asked] = []


def _asked(tensor: Tensor, question: Callable[[Table, Sequence[int]], Tensor]) -> Tensor | None:
    """Ask for one tensor, with one reading for its hash and its statistics; None if there are no kernels."""
    version = _version(tensor)
    last = _last.pop() if _last else None  # used again only once: memory may change without a new version
    if last is not None and last.tensor() is tensor and last.version == version:
        return question(last.table, [0])[0]
    table = Table(tensor.device, most_bytes=0)
    if table.read(tensor) is None:
        return None
    found = question(table, [0])[0]
    _last.append(_Asked(weakref.ref(tensor), version, table))
    return found


class _Reading(NamedTuple):
    """What is known of a tensor that was noted: the text of its hash, and the rows for hash and statistics."""

    text: bytes
    hashed: Rows
    counted: Rows


class _Waiting(NamedTuple):
    """A tensor that is to be read: its reading, where it lies, and what hashes and statistics are of.

    If there is an `earlier` one, what is read is the difference to it.
    """

    number: int
    plain: Tensor
    flat: Tensor
    rows: Rows
    earlier: Tensor | None = None


class _Watched(NamedTuple):
    """A tensor that may be changed in place, and what it is known by."""

    tensor: Tensor
    version: int
    address: int
    key: Hashable
    number: int

    @property
    def moved(self) -> bool:
        """Whether the tensor has changed."""
        return _version(self.tensor) != self.version or self.tensor.data_ptr() != self.address


class Table:
    """Notes the tensors of a device and reads them together.

    A tensor that is noted is read later, with others. A tensor that the training changes in place before that is read
    at once: the first time that a key occurs, its tensor is read at once, and observed for as long as the reading of a
    tensor may wait. If it has changed by then, all tensors of the key are read at once. Otherwise they wait; if one
    does change while it waits, its reading is `lost`.

    Parameters
    ----------
    device : torch.device
    most_bytes : int, optional
        How many bytes of tensors wait; by default a share of the device's memory.
    """

    def __init__(self, device: torch.device, most_bytes: int | None = None) -> None:
        self.device = device
        if most_bytes is None:
            most_bytes = torch.cuda.get_device_properties(device).total_memory >> _SHARE
        self._most = most_bytes
        self._readings: list[_Reading] = []
        self._answers: dict[int, tuple[Tensor, Tensor]] = {}  # hash and statistics of what the kernels failed at
        self._lost: set[int] = set()
        # what waits, by dtype, and how many bytes; what has a key; the copies to make
        self._waiting: dict[str, list[_Waiting]] = {}
        self._bytes = 0
        self._deferred: list[_Watched] = []
        self._copies: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        # the tensors that are observed, and their bytes; by key, whether its tensors can wait
        self._observed: deque[_Watched] = deque()
        self._observed_bytes = 0
        self._calm: dict[Hashable, bool] = {}
        # the memory for rows, how many of the last part are used, and the streams that write to it
        self._chunks: list[Tensor] = []
        self._used = 0
        self._streams: list[Any] = []

    # -- noting ---------------------------------------------------------------------------------------------

    def read(self, tensor: Tensor, key: Hashable | None = None) -> int | None:
        """Note a tensor; returns the number of its reading, or None if there are no kernels.

        Parameters
        ----------
        tensor : torch.Tensor
            One that `stays` on the device. Of a complex tensor there is only a hash.
        key : hashable, optional
            What the tensor has in common with tensors of other steps, if the training may change it in place. Without
            a key, the tensor must not change before the caller asks for a `flush`.
        """
        launcher = launcher_of(self.device)
        if launcher is None:
            return None
        self._follow_stream()
        plain = tensor.detach().resolve_conj().resolve_neg()
        flat = plain if plain.is_contiguous() else plain.contiguous()
        if flat.data_ptr() % 16:
            flat = flat.clone()
        number = len(self._readings)
        hashed = counted = self._note(launcher, _Waiting(number, plain, flat, _NOWHERE), LIKE.get(plain.dtype, BYTES))
        if plain.dtype not in LIKE:
            wide = _CONVERTED.get(plain.dtype)
            if wide is not None:
                counted = self._note(launcher, _Waiting(number, plain, flat.to(wide), _NOWHERE), LIKE[wide])
        self._readings.append(_Reading(text_of(plain.dtype, plain.shape), hashed, counted))
        if key is not None and flat is plain:
            self._watch(_Watched(plain, _version(plain), plain.data_ptr(), key, number))
        if self._bytes > self._most:
            self.flush()
        return number

    def read_difference(self, now: Tensor, before: Tensor) -> int | None:
        """Note ``now - before``, of tensors that do not change before the next `flush`.

        None if there are no kernels, or torch does not make the difference of many tensors of this dtype at once.
        """
        launcher = launcher_of(self.device)
        like = LIKE.get(now.dtype)
        if launcher is None or like is None or now.itemsize == 1 or now.dtype is not before.dtype:
            return None
        self._follow_stream()
        number = len(self._readings)
        rows = self._note(launcher, _Waiting(number, now.detach(), before, _NOWHERE, before), like)
        self._readings.append(_Reading(text_of(now.dtype, now.shape), rows, rows))
        if self._bytes > self._most:
            self.flush()
        return number

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy in C order of a tensor that does not change before the next `flush`, which makes it."""
        self._follow_stream()
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._copies.setdefault(tensor.dtype, []).append((copied, tensor.detach()))
        return copied

    def _note(self, launcher: Launcher, one: _Waiting, like: str) -> Rows:
        """Let a tensor wait; returns the rows that are made for it."""
        count = -(-one.flat.nbytes // launcher.piece_bytes)
        if not self._chunks or self._used + count > len(self._chunks[-1]):
            self._chunks.append(launcher.space(max(count, _CHUNK)))
            self._used = 0
        rows = Rows(self._chunks[-1].data_ptr() + self._used * launcher.row_bytes, count)
        self._used += count
        self._waiting.setdefault(like, []).append(one._replace(rows=rows))
        self._bytes += one.flat.nbytes
        return rows

    def _watch(self, one: _Watched) -> None:
        """Let a tensor wait, or read it at once."""
        calm = self._calm.get(one.key)
        if calm and not one.tensor.is_inference():  # which has no version
            self._deferred.append(one)
            return
        self.flush()
        if calm is None:
            self._observed.append(one)
            self._observed_bytes += one.tensor.nbytes
            while self._observed_bytes - self._observed[0].tensor.nbytes > self._most:
                self._judge()

    def _judge(self) -> None:
        """Decide whether the tensors of the key that was observed first can wait."""
        one = self._observed.popleft()
        self._observed_bytes -= one.tensor.nbytes
        self._calm[one.key] = self._calm.get(one.key, True) and not one.moved

    # -- reading --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Launch the reading of the tensors that wait, and the copies."""
        if not (self._waiting or self._copies):
            return
        for one in self._deferred:
            if one.moved:
                self._lost.add(one.number)
                self._calm[one.key] = False
        copies, waiting = self._copies, self._waiting
        self._copies, self._waiting, self._deferred, self._bytes = {}, {}, [], 0
        try:
            with self._on_stream():
                for pairs in copies.values():
                    torch._foreach_copy_([copied for copied, _ in pairs], [source for _, source in pairs])
                for like, noted in waiting.items():
                    self._launch(like, _with_differences(noted))
        except BaseException:  # such as of a device without memory
            self._lost.update(one.number for noted in waiting.values() for one in noted)
            raise

    def _launch(self, like: str, noted: list[_Waiting]) -> None:
        launcher = launcher_of(self.device)
        try:
            if launcher is not None:
                launcher.read(like, [Source(one.flat, one.rows) for one in noted])
                if self._streams:
                    for one in noted:  # the memory of a tensor of another stream must not be reused before
                        one.flat.record_stream(self._streams[-1])
                return
        except Exception as error:  # from Triton, a compiler or a driver
            _fail(self.device, error)
            self._lost.update(set(range(len(self._readings))).difference(self._answers))
        for one in noted:
            self._answers[one.number] = torch.tensor(hash_of(one.plain)), statistics_by_operations(one.plain)
            self._lost.discard(one.number)

    def lost(self, numbers: Sequence[int]) -> set[int]:
        """Those of some readings whose tensors were changed in place before they were read."""
        self.flush()
        return self._lost.intersection(numbers)

    def statistics(self, numbers: Sequence[int]) -> Tensor:
        """The entries of `tracer.numbers.statistics.statistics_of` of readings; float64 (readings, 16)."""
        launcher = self._ready()
        if launcher is None:
            return torch.stack([self._answers[one][1] for one in numbers])
        return launcher.statistics([self._readings[one].counted for one in numbers])

    def hashes(self, numbers: Sequence[int]) -> Tensor:
        """The hashes of readings, as `tracer.observing.hashes.hash_of` defines them; int64 (readings,)."""
        launcher = self._ready()
        if launcher is None:
            return torch.stack([self._answers[one][0] for one in numbers])
        return launcher.hashes([(one.text, one.hashed) for one in (self._readings[number] for number in numbers)])

    def clear(self) -> None:
        """Forget all readings; their numbers are used again."""
        self.flush()
        while self._observed:
            self._judge()
        self._readings, self._answers, self._lost = [], {}, set()
        self._chunks, self._streams = [], []

    # -- streams --------------------------------------------------------------------------------------------

    def _follow_stream(self) -> None:
        """What waits is read on the CUDA stream that was the current one when it was noted."""
        if self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device)
            if not self._streams or self._streams[-1] != current:
                self.flush()
                self._streams.append(current)
                self._used = len(self._chunks[-1]) if self._chunks else 0

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        last = self._streams[-1] if self._streams else None
        elsewhere = last is not None and last != torch.cuda.current_stream(self.device)
        return torch.cuda.stream(last) if elsewhere else contextlib.nullcontext()

    def _ready(self) -> Launcher | None:
        """The launcher, when the rows are there for what is launched on the current stream."""
        self.flush()
        if self._streams:
            current = torch.cuda.current_stream(self.device)
            for stream in self._streams:
                if stream != current:
                    current.wait_stream(stream)
            if len(self._streams) > 1 or self._streams[0] != current:
                for chunk in self._chunks:
                    chunk.record_stream(current)
        return None if self._answers else launcher_of(self.device)


def launcher_of(device: torch.device) -> Launcher | None:
    """The launcher of a device; None if there are no kernels, which a warning has said."""
    if device not in _launchers:
        try:
            _launchers[device] = Launcher(device)
        except Exception as error:  # from Triton, a compiler or a driver
            _fail(device, error)
    return _launchers[device]


def _fail(device: torch.device, error: Exception) -> None:
    """Do without the kernels on a device; raise an error that the kernels are not the cause of."""
    if isinstance(error, torch.OutOfMemoryError) or raised_by_signal(error):
        raise error
    _launchers[device] = None
    warn_only(
        f"hashes of tensors on {device} are made on the host, for which the training waits, because Triton fails "
        f"there: {type(error).__name__}: {error}"
    )


def _with_differences(noted: list[_Waiting]) -> list[_Waiting]:
    """Compute the differences that are to be read."""
    pairs = [(one.plain, one.earlier) for one in noted if one.earlier is not None]
    if not pairs:
        return noted
    made = iter(torch._foreach_sub([now for now, _ in pairs], [earlier for _, earlier in pairs]))
    found = []
    for one in noted:
        if one.earlier is not None:
            moved = next(made)
            found.append(one._replace(plain=moved, flat=moved.contiguous(), earlier=None))
        else:
            found.append(one)
    return found


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
