"""Reductions published as kinds of their own, such as ``weights_hash``, beside the data's kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tracer.numbers.statistics import statistics_of
from tracer.observing.device.reading import hash_on_device, statistics_on_device, stays
from tracer.observing.hashes import hash_of


def _hashed(tensor: Tensor) -> Tensor:
    return hash_on_device(tensor) if stays(tensor) else torch.tensor(hash_of(tensor))


def _statistics(tensor: Tensor) -> Tensor:
    return statistics_on_device(tensor) if stays(tensor) else statistics_of(tensor)


BESIDE: Mapping[str, Callable[[Tensor], Tensor]] = {"hash": _hashed, "statistics": _statistics}
