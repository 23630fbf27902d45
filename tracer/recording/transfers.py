"""From a CUDA device to the host, without the training waiting: copies are made together, and the writer waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor

TOGETHER_BYTES: Final = 64 << 10
"""Up to so many bytes, tensors of a dtype are put together on the device and copied as one: each copy takes as long."""
MOST_BYTES: Final = 16 << 20
"""So much may wait on the device; then the thread that asks begins the copies itself."""
_ALIKE: Final = 16
"""So many tensors of one shape are stacked, which takes less time here than to put them in a row."""
_PUT_TOGETHER: Final = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)


class Copy:
    """What `Transfers.start` promises: data that will be on the host.

    Attributes
    ----------
    source : Tensor or None
        The data on the device, until it is copied.
    event, stream : CUDA event and stream
        When, and where, the training made the data.
    host : Tensor or None
        The data on the host, once the copy was begun.
    batch : _Batch or None
        With which other copies it was begun.
    intact : bool
        Whether nobody changed the data before it was copied.
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
        """Data that is on the host already."""
        one = cls(host, -1, None, None)
        one.source, one.host = None, host
        one.batch = _Batch()
        one.batch.settled = True
        return one

    def settle(self) -> None:
        """Let go of what was copied, now that it is; for both threads."""
        source = self.source
        if source is not None:
            self.intact = _version(source) == self._version
            self.source = None


class Transfers:
    """Copies to the host that are asked for and under way.

    The thread that asks (`start`) only notes what and when: an event on the training's stream. Whoever comes first,
    the thread that wants the data (`wait`), or the one that asks for too much, begins all copies that were asked for:
    into pinned memory, on a stream of its own beside the training's, which goes on at once; that stream waits for the
    training's events, never the other way round. What is small is put together first: a model has hundreds of streams,
    and to copy each by itself would take a multiple of the training's own launches.

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
        self._spare: dict[int, deque[Any]] = {}  # events of each device, which are used again
        self._lock = threading.Lock()  # of those who begin copies
        self._asked = 0  # bytes; each counter is of one thread at a time
        self._begun = 0

    def start(self, data: Tensor) -> Copy:
        """Ask for the data on the host. One thread at a time may ask.

        Parameters
        ----------
        data : Tensor
            That nobody should change any more, such as the data of a message.
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
        """The data on the host, once it is there; None if somebody changed it before the copy was made.

        Raises
        ------
        RuntimeError
            If the device has failed.
        """
        if copy.batch is None:
            self._begin()
        assert copy.batch is not None  # or an exception had said why
        copy.batch.wait(copy.device)
        copy.settle()
        host, copy.host = copy.host, None
        return host if copy.intact else None

    def forget(self) -> None:
        """Let go of everything, because nobody will wait for it; for the thread that asks, once no other waits."""
        self._waiting.clear()
        self._under_way.clear()  # what is still read on the device may hold anything then

    def _settle(self) -> None:
        """Give the memory of what is copied back, though nobody has asked for it yet."""
        while self._under_way and (self._under_way[0].settled or self._under_way[0].done.query()):
            self._under_way.popleft().settle()

    def _begin(self) -> None:
        """Begin all copies that wait; those that an error or an interrupt leaves out wait on."""
        with self._lock:
            count = len(self._waiting)
            copies = [one for one in (self._waiting[index] for index in range(count)) if one.batch is None]
            for device, of_device in groupby(sorted(copies, key=_device), _device):
                self._begin_on(device, list(of_device))
            for _ in range(count):
                self._waiting.popleft()

    def _begin_on(self, device: int, copies: list[Copy]) -> None:
        """Begin all copies from one device."""
        last = {id(one.stream): one.event for one in copies}  # each follows those before it on its stream
        batch = _Batch()
        hosts: list[tuple[Copy, Tensor]] = []
        # the device, because a thread that only enters a stream of it goes back to the first device, and begins to use
        # it; and as it is: under autocast, tensors of the other half precision cannot be put together
        with torch.cuda.device(device), torch.autocast("cuda", enabled=False):
            beside = self._beside(device)
            with torch.cuda.stream(beside):
                for event in last.values():
                    beside.wait_event(event)
                for together in _groups(copies):
                    hosts += _copied(together)
                batch.done = torch.cuda.Event(blocking=True)  # who waits for it should not take a processor meanwhile
                batch.done.record(beside)
        events = [one.event for one in copies]
        for copy, host in hosts:
            copy.event, copy.host = None, host
            batch.copies.append(copy)
            self._begun += copy.nbytes
            copy.batch = batch  # last, because it tells the other thread that it is begun
        self._under_way.append(batch)
        self._spare[device].extend(events)

    def _current(self, device: int) -> Any:
        """The stream on which this thread works."""
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
    """Copies that were begun together."""

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
        for one in self.copies:
            one.settle()
        self.settled = True
        self.copies = []


def _groups(copies: list[Copy]) -> Iterable[list[Copy]]:
    """Those that are put together, and each of the others alone."""
    alike: dict[tuple[torch.dtype, torch.Size], list[Copy]] = {}
    for one in copies:
        source = one.source
        assert source is not None  # it is kept until the copy is made
        if one.nbytes > TOGETHER_BYTES or source.dtype not in _PUT_TOGETHER:
            yield [one]
        else:
            alike.setdefault((source.dtype, source.shape), []).append(one)
    others: dict[torch.dtype, list[Copy]] = {}
    for (dtype, _), group in alike.items():
        if len(group) < _ALIKE:
            others.setdefault(dtype, []).extend(group)
        else:
            yield group
    yield from others.values()


def _copied(copies: list[Copy]) -> list[tuple[Copy, Tensor]]:
    """Begin to copy tensors of one dtype, on the current stream; where each will be."""
    sources = [one.source for one in copies if one.source is not None]
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
    except RuntimeError:  # no more memory can be pinned: slower, but right
        return source.cpu()
    return host.copy_(source, non_blocking=True)


def _device(copy: Copy) -> int:
    return copy.device


def _version(data: Tensor) -> int:
    return 0 if data.is_inference() else data._version
