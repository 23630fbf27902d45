"""Copies tensors from CUDA devices to the host, many at once. Only the writer waits for the copies."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

TOGETHER_BYTES: Final = 256 << 10
"""Tensors up to this size are joined on the device and copied together, because each copy has a fixed cost.

So are the statistics of up to 2,048 streams, of all steps since the writer was last awake.
"""
MOST_BYTES: Final = 16 << 20
"""If more bytes wait on the device, the thread that asks for copies begins them itself."""
PER_MESSAGE: Final = 512
"""Bytes that a message takes besides its data, so that a bound also holds for a million empty messages."""
ELSEWHERE: Final = torch.empty(0, device="cpu")
"""Stands in a message for data that is still on a device."""
_ALIKE: Final = 16
"""At least this many tensors of the same shape are stacked, which takes the host less time than concatenation."""
_PUT_TOGETHER: Final = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)


class Copy:
    """Data that `Transfers` copies to the host.

    Attributes
    ----------
    source : Tensor or None
        The data on the device, until it is copied.
    event, stream : CUDA event and stream
        The point of the training's stream at which the data was complete, and that stream.
    host : Tensor or None
        The data on the host, once the copy has begun.
    batch : _Batch or None
        The copies that began together with this copy.
    intact : bool
        Whether the data was unchanged until it was copied.
    device : int
    nbytes : int
    """

    __slots__ = ("_version", "batch", "device", "event", "host", "intact", "nbytes", "source", "stream")

    def __init__(self, source: Tensor, device: int, event: Any, stream: Any) -> None:
        self.device = device
        self.nbytes = source.nbytes
        self.source: Tensor | None = source
        self._version = _version(source)
        self.event = event
        self.stream = stream
        self.host: Tensor | None = None
        self.batch: _Batch | None = None
        self.intact = True

    @classmethod
    def made(cls, host: Tensor) -> Copy:
        """A finished copy, of data that is already on the host."""
        one = cls(host, -1, None, None)
        one.source, one.host = None, host
        one.batch = _Batch()
        one.batch.settled = True
        return one

    def settle(self) -> None:
        """Release the device data after the copy. Both threads may call this."""
        source = self.source
        if source is not None:
            self.intact = _version(source) == self._version
            self.source = None


class Transfers:
    """Copies to the host, from the request to the result.

    `start` only notes the tensor, and records an event on the training's CUDA stream. `wait`, or `start` if too much
    waits, later begins all copies at once. They go into pinned memory, on a separate CUDA stream, which waits for the
    training's events; the training never waits for it. Small tensors are joined first: a model has hundreds of message
    streams, and launching a copy for each would take longer than launching the training's own kernels.

    Examples
    --------
    >>> transfers = Transfers()
    >>> transfers.wait(transfers.start(torch.ones(2)))  # what is on the host already is passed on
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}
        self._of_training: dict[Any, Any] = {}
        self._waiting: deque[Copy] = deque()
        self._under_way: deque[_Batch] = deque()
        self._spare: dict[int, deque[Any]] = {}  # each device's events for reuse
        self._lock = threading.Lock()  # held while copies are begun
        self._asked = 0  # bytes; only one thread at a time changes each counter
        self._begun = 0

    def start(self, data: Tensor) -> Copy:
        """Request a copy of data to the host. Only one thread at a time may call this.

        Parameters
        ----------
        data : Tensor
            It should not change any more.
        """
        if not data.is_cuda:
            return Copy.made(data if data.is_cpu else data.cpu())  # other devices have no such streams
        self._settle()
        device = data.get_device()
        stream = self._current(device)
        spare = self._spare.setdefault(device, deque())
        event = spare.popleft() if spare else torch.cuda.Event()
        event.record(stream)
        copy = Copy(data, device, event, stream)
        self._asked += copy.nbytes
        self._waiting.append(copy)
        if self._asked - self._begun > MOST_BYTES:
            self._begin()
        return copy

    def wait(self, copy: Copy) -> Tensor | None:
        """Wait for the data on the host and return it; None if the tensor was changed before the copy.

        Raises
        ------
        RuntimeError
            If the device has failed.
        """
        if copy.batch is None:
            self._begin()
        assert copy.batch is not None  # `_begin` gives each copy a batch or raises
        copy.batch.wait(copy.device)
        copy.settle()
        host, copy.host = copy.host, None
        return host if copy.intact else None

    def forget(self) -> None:
        """Drop all copies. Only for the thread that requests copies, once no thread waits for them."""
        self._waiting.clear()
        self._under_way.clear()  # reuse of their memory during a copy spoils only dropped copies

    def _settle(self) -> None:
        """Release the device memory of finished copies, even if nobody has waited for them yet."""
        while self._under_way and (self._under_way[0].settled or self._under_way[0].done.query()):
            self._under_way.popleft().settle()

    def _begin(self) -> None:
        """Begin all waiting copies. Copies that an error or an interrupt leaves out keep waiting."""
        with self._lock:
            count = len(self._waiting)
            copies = [one for one in (self._waiting[index] for index in range(count)) if one.batch is None]
            by_device = attrgetter("device")
            for device, of_device in groupby(sorted(copies, key=by_device), by_device):
                self._begin_on(device, list(of_device))
            for _ in range(count):
                self._waiting.popleft()

    def _begin_on(self, device: int, copies: list[Copy]) -> None:
        """Begin all copies from one device."""
        last = {id(one.stream): one.event for one in copies}  # a stream's last event implies its earlier events
        batch = _Batch()
        hosts: list[tuple[Copy, Tensor]] = []
        # Without `device`, leaving the stream would switch this thread to device 0 and initialize it. Under autocast,
        # float16 and bfloat16 tensors could not be joined.
        with torch.cuda.device(device), torch.autocast("cuda", enabled=False):
            beside = self._beside(device)
            with torch.cuda.stream(beside):
                for event in last.values():
                    beside.wait_event(event)
                for together in _groups(copies):
                    hosts += _copied(together)
                batch.done = torch.cuda.Event(blocking=True)  # waiting for it then takes no CPU time
                batch.done.record(beside)
        events = [one.event for one in copies]
        for copy, host in hosts:
            copy.event, copy.host = None, host
            batch.copies.append(copy)
            self._begun += copy.nbytes
            copy.batch = batch  # last, because it tells the other thread that the copy has begun
        self._under_way.append(batch)
        self._spare[device].extend(events)

    def _current(self, device: int) -> Any:
        """This thread's current CUDA stream."""
        number = torch._C._cuda_getCurrentStream(device)  # a tenth of the time of `torch.cuda.current_stream`
        stream = self._of_training.get(number)
        if stream is None:
            stream = self._of_training[number] = torch.cuda.current_stream(device)
        return stream

    def _beside(self, device: int) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Batch:
    """Copies that began together."""

    __slots__ = ("copies", "done", "settled")

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.done: Any = None
        self.settled = False

    def wait(self, device: int) -> None:
        if not self.settled:
            with torch.cuda.device(device):
                self.done.synchronize()
            self.settle()

    def settle(self) -> None:
        for copy in self.copies:
            copy.settle()
        self.settled = True
        self.copies = []


def _groups(copies: list[Copy]) -> Iterable[list[Copy]]:
    """Group the copies that can be joined; every other copy is its own group."""
    alike: dict[tuple[torch.dtype, torch.Size], list[Copy]] = {}
    for copy in copies:
        source = copy.source
        assert source is not None  # `settle` releases it only after the copy
        if copy.nbytes > TOGETHER_BYTES or source.dtype not in _PUT_TOGETHER:
            yield [copy]
        else:
            alike.setdefault((source.dtype, source.shape), []).append(copy)
    others: dict[torch.dtype, list[Copy]] = {}
    for (dtype, _), group in alike.items():
        if len(group) < _ALIKE:
            others.setdefault(dtype, []).extend(group)
        else:
            yield group
    yield from others.values()


def _copied(copies: list[Copy]) -> list[tuple[Copy, Tensor]]:
    """Begin to copy tensors of one dtype on the current stream; returns each copy with its host tensor."""
    sources = [copy.source for copy in copies if copy.source is not None]
    if len(sources) == 1:
        return [(copies[0], _to_host(sources[0]))]
    shape = sources[0].shape
    alike = all(one.shape == shape for one in sources)
    try:
        whole = torch.stack(sources) if alike else torch.cat([one.reshape(-1) for one in sources])
    except torch.OutOfMemoryError:  # on the device
        return [(one, _to_host(source)) for one, source in zip(copies, sources, strict=True)]
    host = _to_host(whole)
    if alike:
        return list(zip(copies, host.unbind(), strict=True))
    parts = host.split([one.numel() for one in sources])
    return [(one, part.view(source.shape)) for one, source, part in zip(copies, sources, parts, strict=True)]


def _to_host(source: Tensor) -> Tensor:
    try:
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory can be pinned, so copy without pinning, which is slower
        return source.cpu()
    return host.copy_(source, non_blocking=True)


def _version(data: Tensor) -> int:
    return 0 if data.is_inference() else data._version
