"""Reductions published as kinds of their own, such as ``weights_hash``, beside the data's kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tracer.numbers.statistics import statistics_of
from tracer.observing.hashes import hash_of


def _hashed(tensor: Tensor) -> Tensor:
    if _stays(tensor):
        from tracer.observing.device.reading import hash_on_device

        return hash_on_device(tensor)
    return torch.tensor(hash_of(tensor))


def _statistics(tensor: Tensor) -> Tensor:
    if _stays(tensor):
        from tracer.observing.device.reading import statistics_on_device

        return statistics_on_device(tensor)
    return statistics_of(tensor)


def _stays(tensor: Tensor) -> bool:
    """Whether the numbers stay on their device, because copying them would make the training wait."""
    return tensor.is_cuda and tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_quantized


BESIDE: Mapping[str, Callable[[Tensor], Tensor]] = {"hash": _hashed, "statistics": _statistics}
