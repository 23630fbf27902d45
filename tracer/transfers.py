"""From a CUDA device to the host, without the training waiting: the copy is begun here, and the writer waits for it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


class Transfers:
    """Copies to the host that are under way.

    Each is made into pinned memory, on a stream of its own beside the training's, which goes on at once: that stream
    waits for the training's to have made the data, never the other way round. An event on it tells when the copy is
    there. Begun by one thread (`start`) and waited for by another (`wait`).

    Examples
    --------
    >>> transfers = Transfers()
    >>> data = transfers.start(torch.ones(2))  # what is on the host already is passed on
    >>> transfers.wait(data), data
    (True, tensor([1., 1.]))
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        # by the number of the tensor on the host, which is alive as long as it stands here
        self._under_way: dict[int, _Copy] = {}
        self._unsettled: deque[_Copy] = deque()  # of the thread that begins them

    def start(self, data: Tensor) -> Tensor:
        """The same data on the host: all there after `wait`, and not before.

        Parameters
        ----------
        data : Tensor
            That nobody should change any more, such as the data of a message.
        """
        if data.is_cpu:
            return data
        if not data.is_cuda:  # other devices have no such streams
            return data.cpu()
        while self._unsettled and self._unsettled[0].event.query():  # give their memory on the device back
            self._unsettled.popleft().settle()
        try:
            host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        except RuntimeError:  # no more memory can be pinned: slower, but right
            return data.cpu()
        beside = self._beside(data.device)
        beside.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(beside):
            host.copy_(data, non_blocking=True)
        data.record_stream(beside)  # or its memory would be given away before it is copied
        copy = self._under_way[id(host)] = _Copy(host, data, beside.record_event())
        self._unsettled.append(copy)
        return host

    def wait(self, data: Tensor) -> bool:
        """Return when what `start` gave holds what was copied; False if that was changed before the copy was made.

        Of any other tensor, True at once.
        """
        copy = self._under_way.pop(id(data), None) if self._under_way else None
        if copy is None:
            return True
        copy.event.synchronize()
        return copy.settle()

    def _beside(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Copy:
    """A copy that is under way, and what is copied, until it is done."""

    __slots__ = ("_intact", "_source", "_version", "event", "host")

    def __init__(self, host: Tensor, source: Tensor, event: Any) -> None:
        self.host = host
        self.event = event
        self._source: Tensor | None = source
        self._version = _version(source)
        self._intact = True

    def settle(self) -> bool:
        """Let go of what was copied, now that it is; whether nobody changed it meanwhile. For both threads."""
        source = self._source
        if source is not None:
            self._intact = _version(source) == self._version
            self._source = None
        return self._intact


def _version(data: Tensor) -> int:
    return 0 if data.is_inference() else data._version
