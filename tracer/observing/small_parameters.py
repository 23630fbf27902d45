"""Reads small parameters of which only hashes and statistics are kept: those of a kind together.

A call of NumPy or torch takes as long as the arithmetic of a small parameter, so that there is one call for all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn

from tracer.observing.demand import OfParameters
from tracer.observing.publisher import Publisher
from tracer.observing.wanted_parameters import Small, Wanted


class SmallParameters:
    """What was read in a step of small parameters, of which only hashes and statistics are kept.

    Parameters
    ----------
    publisher : Publisher

    Attributes
    ----------
    read : dict
        By path, how the parameter is read, and the numbers by which the pulses know its weights, its gradient and its
        update; None of what was not read.
    asked : OfParameters or None
        Who wanted what when the weights were read.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.read: dict[str, tuple[Small, list[int | None]]] = {}
        self.asked: OfParameters | None = None
        self._before: dict[str, Tensor] = {}  # the weights from which updates are computed

    def forget(self) -> None:
        """Drop all data of the step."""
        self.read, self._before, self.asked = {}, {}, None

    def read_weights(self, parameters: Iterable[Small], asked: OfParameters) -> list[Wanted]:
        """Read weights before they change, at most once per step; returns the parameters that are to be kept alone."""
        self.asked = asked
        fit, tensors, left = list[Small](), list[nn.Parameter](), list[Wanted]()
        for one in parameters:
            if one.path not in self.read:
                tensor = one.wanted.parameter.owner._parameters.get(one.wanted.parameter.attribute)
                if tensor is not None and tensor.dtype is one.dtype and tensor.dim() == one.axes:
                    fit.append(one)
                    tensors.append(tensor)
                else:
                    left.append(one.wanted)
        for one, tensor, read in zip(fit, tensors, self._publisher.pulses.read(tensors), strict=True):
            if read is None:
                left.append(one.wanted)
                continue
            self.read[one.path] = one, [read.number, None, None]
            if one.wanted.updates:
                self._before[one.path] = torch.from_numpy(read.copy).view(tensor.shape)
        return left

    def read_gradients(self, parameters: Iterable[Small], final: Container[str]) -> list[Wanted]:
        """Read gradients that are not `final` yet; returns the parameters whose gradients are to be kept alone."""
        fit, gradients, left = list[Small](), list[Tensor](), list[Wanted]()
        for one in parameters:
            if one.rows[1] is not None and one.path in self.read and one.path not in final:
                tensor = one.wanted.parameter.owner._parameters.get(one.wanted.parameter.attribute)
                gradient = None if tensor is None else tensor.grad
                if gradient is not None and gradient.dtype is one.dtype:
                    fit.append(one)
                    gradients.append(gradient)
                elif gradient is not None:
                    left.append(one.wanted)
        for one, read in zip(fit, self._publisher.pulses.read(gradients), strict=True):
            if read is None:
                left.append(one.wanted)
            else:
                self.read[one.path][1][1] = read.number
        return left

    def read_updates(self, parameters: Iterable[Small]) -> None:
        """Read how the weights have changed since `read_weights`."""
        fit, now, before = list[Small](), list[Tensor](), list[Tensor]()
        for one in parameters:
            base = self._before.get(one.path)
            tensor = one.wanted.parameter.owner._parameters.get(one.wanted.parameter.attribute)
            if base is not None and tensor is not None and tensor.dtype is base.dtype and tensor.shape == base.shape:
                fit.append(one)
                now.append(tensor.detach())
                before.append(base)
        moved = torch._foreach_sub(now, before) if now else ()
        for one, read in zip(fit, self._publisher.pulses.read(moved), strict=True):
            self.read[one.path][1][2] = None if read is None else read.number
