"""Which parameters are wanted in a step, and by which captures."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tracer.format.placement import local
from tracer.messaging.messages import DEFAULT_TAG
from tracer.numbers.gathered import SMALL
from tracer.observing.demand import Captures, OfParameters
from tracer.observing.numbers import StreamKey
from tracer.observing.parameter_table import Parameter
from tracer.observing.part import Ground, Part
from tracer.observing.pulses import Rows
from tracer.observing.ranks import Ranks
from tracer.observing.turns import Candidate, Turns

_FLOATING = (torch.float32, torch.float16)
"""The dtypes of parameters that are read together."""


class Wanted(NamedTuple):
    """A parameter that is wanted in a step.

    Attributes
    ----------
    parameter : Parameter
    values, gradients, updates : tuple of Capture
        By which its values, gradients and updates are observed; empty if nobody wants them.
    """

    parameter: Parameter
    values: Captures
    gradients: Captures
    updates: Captures


class Small(NamedTuple):
    """A parameter that is read together with others.

    Attributes
    ----------
    path : str
    wanted : Wanted
    rows : tuple of (Rows or None)
        The rows of its values, gradients and updates.
    dtype, axes
        Of its tensor, for which the rows hold.
    """

    path: str
    wanted: Wanted
    rows: tuple[Rows | None, ...]
    dtype: torch.dtype
    axes: int


class Listed(NamedTuple):
    """The parameters that are wanted in a step: those that are read together, and the others."""

    together: list[Small]
    alone: list[Wanted]


class WantedParameters(Part):
    """Knows which parameters are wanted in a step.

    Attributes
    ----------
    turns : Turns or None
        Chooses the parameters that have updates in a step; None: all of them.
    """

    def __init__(self, ground: Ground, ranks: Ranks) -> None:
        super().__init__(ground)
        self.turns: Turns | None = None
        self._replicas = ranks.replicas
        # the answer of `_is_steady`, and for each mask of due captures the wanted ones of all parameters
        self._steady: tuple[weakref.ref[OfParameters], bool] | None = None
        self._listed: dict[int, Listed] = {}

    def forget(self) -> None:
        """Drop what is remembered of the parameters that somebody wants, and with it their modules."""
        self._steady, self._listed = None, {}

    def of(self, parameters: Sequence[Parameter]) -> Listed:
        """Those of some parameters that are wanted in this step.

        Asked several times in each step. In most trainings the answer depends on the due captures alone.
        """
        asked, step = self.demand.of_parameters(), self.clock.step
        if self._steady is None or self._steady[0]() is not asked:
            self._steady, self._listed = (weakref.ref(asked), self._is_steady(asked)), {}
        if not self._steady[1]:
            return Listed([], list(self._now(parameters, asked, step)))
        dues = self.demand.dues
        mask = dues.mask if step == dues.step else dues.at(step)
        known = self._listed.get(mask)
        if known is None:
            every = [(one, self._small(one)) for one in self._now(self.table.all, asked, step)]
            together = [small for _, small in every if small is not None]
            known = self._listed[mask] = Listed(together, [one for one, small in every if small is None])
        if self._replicas and known.together:  # whose rows tell where they lie
            known = Listed([], list(self._now(self.table.all, asked, step)))
        if parameters is self.table.all:
            return known
        paths = {one.path for one in parameters}
        alone = [one for one in known.alone if one.parameter.path in paths]
        return Listed([one for one in known.together if one.path in paths], alone)

    def _is_steady(self, asked: OfParameters) -> bool:
        """Whether the captures of all parameters depend on the due captures alone, and no parameter waits its turn."""
        streams = [one for of_one in asked.values() for one in of_one if one is not None]
        tensors = [one.tensor for one in self.table.all]
        fit = self.turns is None or (
            not any(one is not None and is_lazy(one) for one in tensors)
            and self.turns.all_fit(sum(_nbytes(one) for one in tensors if one is not None))
        )
        return fit and self.demand.apart is None and all(one.steady for one in streams)

    def _now(self, parameters: Iterable[Parameter], asked: OfParameters, step: int) -> Iterator[Wanted]:
        for parameter in parameters:
            value, gradient, update = asked[parameter.path]
            values = () if value is None else value.wanted(step)
            gradients = () if gradient is None else gradient.wanted(step)
            updates = () if update is None else update.wanted(step)
            if updates and not self._has_turn(parameter.path, step):
                updates = ()
            if values or gradients or updates:
                yield Wanted(parameter, values, gradients, updates)

    def _has_turn(self, path: str, step: int) -> bool:
        """Whether a parameter's weights are kept in this step, to compute its update."""
        if self.turns is None or self.demand.apart is not None:  # the receiver of `Apart` limits memory itself
            return True
        if self._steady is not None and self._steady[1]:
            return True
        return path in self.turns.of(step, functools.partial(self._candidates, step))

    def _candidates(self, step: int) -> Iterator[Candidate]:
        asked = self.demand.of_parameters()
        for parameter in self.table.all:
            values, _, updates = asked[parameter.path]
            tensor = parameter.tensor
            if tensor is not None and not is_lazy(tensor) and updates is not None and updates.wanted(step):
                kept = () if values is None else values.wanted(step)
                copied = any(one.beside(parameter.values) is None for one in kept)
                yield Candidate(parameter.path, _nbytes(tensor), copied)

    def _small(self, one: Wanted) -> Small | None:
        """How a parameter is read together with others; None if it is not small, or if more is kept of it."""
        parameter, publisher = one.parameter, self.publisher
        held = parameter.owner._parameters
        tensor = held.get(parameter.attribute) if isinstance(held, dict) else None
        if not one.values or parameter.computed or type(tensor) is not nn.Parameter:
            return None
        if not (tensor.dtype in _FLOATING and 0 < tensor.numel() <= SMALL and tensor.is_cpu):
            return None
        kinds = list(zip(parameter.kinds, (one.values, one.gradients, one.updates), strict=True))
        if not all(publisher.keeps_rows(kind, captures) for kind, captures in kinds):
            return None
        rows = tuple(
            publisher.rows(captures, StreamKey(kind, parameter.stream, DEFAULT_TAG, ""), tensor) if captures else None
            for kind, captures in kinds
        )
        return Small(parameter.path, one, rows, tensor.dtype, tensor.dim())


def _nbytes(tensor: Tensor) -> int:
    """The bytes of this process's share of a tensor."""
    own = local(tensor)
    return own.numel() * own.element_size()
