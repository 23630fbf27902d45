"""Knows which tensors a training changes in place soon after it has made them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor


class Watched(NamedTuple):
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


class Changes:
    """Observes the first tensor of each key, to know whether its tensors are changed in place.

    Parameters
    ----------
    most_bytes : int
        A tensor is observed until the others that are observed after it have this many bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._calm: dict[Hashable, bool] = {}
        self._observed: deque[Watched] = deque()
        self._bytes = 0

    def calm(self, key: Hashable) -> bool | None:
        """Whether no tensor of the key was changed; None if none has been observed to the end."""
        return self._calm.get(key)

    def observe(self, one: Watched) -> None:
        """Begin to observe a tensor."""
        self._observed.append(one)
        self._bytes += one.tensor.nbytes
        while self._bytes - self._observed[0].tensor.nbytes > self._most:
            self._judge()

    def found(self, one: Watched) -> None:
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
