"""Hashes and statistics of CUDA tensors, computed on the device without making the training wait.

Tensors are noted in a table, and read together: a launch of a Triton kernel reads all of a dtype, each once for its
hash and its statistics. If Triton is missing or fails, statistics are computed by torch operations, and hashes of a
copy on the host, for which the training waits; a single warning says so.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tracer.errors import raised_by_signal, warn_only
from tracer.observing.device.launching import BYTES, LIKE, KernelLauncher, StoredRows, statistics_by_operations
from tracer.observing.reductions import hash_of, text_of


class WatchedTensor(NamedTuple):
    """A tensor that may be changed in place.

    Attributes
    ----------
    tensor : torch.Tensor
    version, address : int
        Of the tensor when it was first seen.
    key : hashable
        What it has in common with tensors of other steps.
    number : int
        By which the owner knows it.
    """

    tensor: Tensor
    version: int
    address: int
    key: Hashable
    number: int

    @property
    def changed(self) -> bool:
        """Whether the tensor has been changed."""
        return version_of(self.tensor) != self.version or self.tensor.data_ptr() != self.address


class InPlaceChanges:
    """Observes the first tensor of each key, to know whether its tensors are changed in place.

    Parameters
    ----------
    most_bytes : int
        A tensor is observed until the others that are observed after it have this many bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._calm: dict[Hashable, bool] = {}
        self._observed: deque[WatchedTensor] = deque()
        self._bytes = 0

    def calm(self, key: Hashable) -> bool | None:
        """Whether no tensor of the key was changed; None if none has been observed to the end."""
        return self._calm.get(key)

    def observe(self, one: WatchedTensor) -> None:
        """Begin to observe a tensor."""
        self._observed.append(one)
        self._bytes += one.tensor.nbytes
        while self._bytes - self._observed[0].tensor.nbytes > self._most:
            self._judge()

    def found(self, one: WatchedTensor) -> None:
        """Note that a tensor was changed."""
        self._calm[one.key] = False

    def finish(self) -> None:
        """End all observations."""
        while self._observed:
            self._judge()
        self._bytes = 0

    def _judge(self) -> None:
        one = self._observed.popleft()
        self._bytes -= one.tensor.nbytes
        self._calm[one.key] = self._calm.get(one.key, True) and not one.changed


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 of an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


TYPES: Final = {"cuda"}
"""The types of the devices whose tensors are read there; in tests that of the CPU."""
_SHARE: Final = 7
"""Tensors are kept for reading up to 2**-7 of the device's memory."""
_CHUNK: Final = 1024
"""Rows whose memory is allocated together."""
_CONVERTED: Final = {
    **{getattr(torch, name): torch.float32 for name in dir(torch) if name.startswith("float8_")},
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.float64,
}
"""The other dtypes whose statistics the kernels compute, and what they are converted to."""

_launchers: dict[torch.device, KernelLauncher | None] = {}


def stays(tensor: Tensor) -> bool:
    """Whether a tensor is read on its device, because copying it would make the training wait."""
    return (
        tensor.device.type in TYPES
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not tensor.is_quantized
    )


def hash_on_device(tensor: Tensor) -> Tensor:
    """The hash of a tensor that `stays` on its device, as `tracer.observing.reductions.hash_of`; int64 ()."""
    found = _asked(tensor, "hash")
    return torch.tensor(hash_of(tensor)) if found is None else found


def statistics_on_device(tensor: Tensor) -> Tensor:
    """The entries of `tracer.numbers.statistics.statistics_of` of a tensor that `stays` on its device.

    Accurate to about 1e-13; float64 (16,).
    """
    found = None if tensor.is_complex() else _asked(tensor, "statistics")
    return statistics_by_operations(tensor) if found is None else found


class _AskedTensor(NamedTuple):
    """The table with the reading of the tensor that was asked for last."""

    tensor: weakref.ref[Tensor]
    version: int
    table: DeviceTable


_last: list[_AskedTensor] = []


def _asked(tensor: Tensor, what: str) -> Tensor | None:
    """The hash or the statistics, one after the other with one reading; None if there are no kernels."""
    version = version_of(tensor)
    last = _last.pop() if _last else None  # used again only once: memory may change without a new version
    if last is not None and last.tensor() is tensor and last.version == version:
        return last.table.made(what, [0])[0]
    table = DeviceTable(tensor.device, most_bytes=0)
    if table.read(tensor) is None:
        return None
    _last.append(_AskedTensor(weakref.ref(tensor), version, table))
    return table.made(what, [0])[0]


class Noted(NamedTuple):
    """A tensor that is read later: the number of its reading in a table."""

    table: DeviceTable
    number: int


class _DeviceReading(NamedTuple):
    """What is known of a tensor that was noted: the text of its hash, and the rows for hash and statistics."""

    text: bytes
    hashed: StoredRows
    counted: StoredRows


class _Waiting(NamedTuple):
    """A tensor that is to be read: its reading, where it lies, and what hashes and statistics are of.

    If there is an `earlier` one, what is read is the difference to it.
    """

    number: int
    plain: Tensor
    flat: Tensor
    rows: StoredRows
    earlier: Tensor | None = None


class DeviceTable:
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
        self._most = most_bytes if most_bytes is not None else memory_of(device) >> _SHARE
        self._readings: list[_DeviceReading] = []
        self._answers: dict[int, tuple[Tensor, Tensor]] = {}  # hash and statistics of what the kernels failed at
        self._lost: dict[int, str] = {}
        # what waits, by dtype, and how many bytes; what has a key; the copies to make
        self._waiting: dict[str, list[_Waiting]] = {}
        self._bytes = 0
        self._deferred: list[WatchedTensor] = []
        self._copies: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        self._changes = InPlaceChanges(self._most)
        # the memory for rows, the address of the next, how many are left, and the streams that write to them
        self._chunks: list[Tensor] = []
        self._next = self._left = 0
        self._streams: list[Any] = []
        self._stream: tuple[int, ...] = ()

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
        plain = tensor.detach() if tensor.requires_grad else tensor
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        flat = plain if plain.is_contiguous() else plain.contiguous()
        address = flat.data_ptr()
        if address % 16:
            flat = flat.clone()
        number, dtype = len(self._readings), plain.dtype
        hashed = counted = self._note(launcher, number, plain, flat, LIKE.get(dtype, BYTES))
        if dtype in _CONVERTED:
            wide = _CONVERTED[dtype]
            counted = self._note(launcher, number, plain, flat.to(wide), LIKE[wide])
        self._readings.append(_DeviceReading(text_of(dtype, plain.shape), hashed, counted))
        if key is not None and flat is plain:
            self._watch(plain, address, key, number)
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
        rows = self._note(launcher, number, now.detach(), before, like, before)
        self._readings.append(_DeviceReading(text_of(now.dtype, now.shape), rows, rows))
        if self._bytes > self._most:
            self.flush()
        return number

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy in C order of a tensor that does not change before the next `flush`, which makes it."""
        self._follow_stream()
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._copies.setdefault(tensor.dtype, []).append((copied, tensor.detach()))
        return copied

    def _note(
        self,
        launcher: KernelLauncher,
        number: int,
        plain: Tensor,
        flat: Tensor,
        like: str,
        earlier: Tensor | None = None,
    ) -> StoredRows:
        """Let a tensor wait; returns the rows that are made for it."""
        nbytes = flat.nbytes
        count = -(-nbytes // launcher.piece_bytes)
        if count > self._left:
            self._left = max(count, _CHUNK)
            self._chunks.append(launcher.space(self._left))
            self._next = self._chunks[-1].data_ptr()
        rows = StoredRows(self._next, count)
        self._next += count * launcher.row_bytes
        self._left -= count
        self._waiting.setdefault(like, []).append(_Waiting(number, plain, flat, rows, earlier))
        self._bytes += nbytes
        return rows

    def _watch(self, tensor: Tensor, address: int, key: Hashable, number: int) -> None:
        """Let a tensor wait, or read it at once."""
        calm = self._changes.calm(key)
        if calm and not tensor.is_inference():  # which has no version
            self._deferred.append(WatchedTensor(tensor, tensor._version, address, key, number))
            return
        self.flush()
        if calm is None:
            self._changes.observe(WatchedTensor(tensor, version_of(tensor), address, key, number))

    # -- reading --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Launch the reading of the tensors that wait, and the copies; not while a CUDA graph is captured."""
        if not (self._waiting or self._copies) or (self._streams and torch.cuda.is_current_stream_capturing()):
            return
        copies, waiting = self._copies, self._waiting
        changed = [one for one in self._deferred if one.changed]
        if changed:  # their memory may be gone
            lost = {one.number for one in changed}
            self._lose(lost, "it was changed in place before the device read it, for the first time")
            for one in changed:
                self._changes.found(one)
            kept = {like: [each for each in noted if each.number not in lost] for like, noted in waiting.items()}
            waiting = {like: noted for like, noted in kept.items() if noted}
        self._copies, self._waiting, self._deferred, self._bytes = {}, {}, [], 0
        try:
            with self._on_stream():
                for pairs in copies.values():
                    torch._foreach_copy_([copied for copied, _ in pairs], [source for _, source in pairs])
                for like, noted in waiting.items():
                    self._launch(like, _with_differences(noted))
        except torch.OutOfMemoryError:  # the training may need no more
            numbers = {one.number for noted in waiting.values() for one in noted}
            self._lose(numbers, "the device had no memory left to read it")

    def _launch(self, like: str, noted: list[_Waiting]) -> None:
        launcher = launcher_of(self.device)
        try:
            if launcher is not None:
                columns = [(flat.data_ptr(), flat.nbytes, *rows) for _, _, flat, rows, _ in noted]
                launcher.read(like, noted[0].flat.itemsize, columns)
                if self._streams:
                    for one in noted:  # the memory of a tensor of another stream must not be reused before
                        one.flat.record_stream(self._streams[-1])
                return
        except Exception as error:  # from Triton, a compiler or a driver
            if not _is_theirs(error):
                raise
            _do_without(self.device, error)
            self._lose(set(range(len(self._readings))).difference(self._answers), "Triton failed after reading it")
        for one in noted:
            self._answers[one.number] = torch.tensor(hash_of(one.plain)), statistics_by_operations(one.plain)
            self._lost.pop(one.number, None)

    def _lose(self, numbers: Iterable[int], why: str) -> None:
        self._lost.update((number, why) for number in numbers)

    def lost(self) -> Mapping[int, str]:
        """The readings without rows, and why: above all those of tensors that were changed before they were read."""
        self.flush()
        return self._lost

    def made(self, what: str, numbers: Sequence[int]) -> Tensor:
        """The hashes or the statistics of readings that are not lost.

        Parameters
        ----------
        what : str
            ``"hash"``: as `tracer.observing.reductions.hash_of` defines it, int64 (readings,).
            ``"statistics"``: the entries of `tracer.numbers.statistics.statistics_of`, float64 (readings, 16).
        numbers : sequence of int
        """
        launcher = self._ready()
        if launcher is None:
            return torch.stack([self._answers[one][what == "statistics"] for one in numbers])
        readings = [self._readings[one] for one in numbers]
        if what == "statistics":
            return launcher.statistics([one.counted for one in readings])
        return launcher.hashes([(one.text, one.hashed) for one in readings])

    def clear(self) -> None:
        """Forget all readings; their numbers are used again."""
        self.flush()
        self._changes.finish()
        self._readings, self._answers, self._lost = [], {}, {}
        self._chunks, self._streams, self._left = [], [], 0

    # -- streams --------------------------------------------------------------------------------------------

    def _follow_stream(self) -> None:
        """What waits is read on the CUDA stream that was the current one when it was noted."""
        if self.device.type == "cuda":
            current = torch._C._cuda_getCurrentStream(self.device.index)  # faster than `torch.cuda.current_stream`
            if current != self._stream or not self._streams:
                self.flush()
                self._stream = current
                self._streams.append(torch.cuda.current_stream(self.device))
                self._left = 0

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        last = self._streams[-1] if self._streams else None
        elsewhere = last is not None and last != torch.cuda.current_stream(self.device)
        return torch.cuda.stream(last) if elsewhere else contextlib.nullcontext()

    def _ready(self) -> KernelLauncher | None:
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


def memory_of(device: torch.device) -> int:
    """The bytes of a device's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def launcher_of(device: torch.device) -> KernelLauncher | None:
    """The launcher of a device; None if there are no kernels, which a warning has said."""
    if device not in _launchers:
        try:
            _launchers[device] = KernelLauncher(device)
        except Exception as error:  # from Triton, a compiler or a driver
            if not _is_theirs(error):
                raise
            _do_without(device, error)
    return _launchers[device]


def _is_theirs(error: Exception) -> bool:
    """Whether the kernels are the cause of an error."""
    return not isinstance(error, torch.OutOfMemoryError) and not raised_by_signal(error)


def _do_without(device: torch.device, error: Exception) -> None:
    """Do without the kernels on a device."""
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
