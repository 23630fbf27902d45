"""Which parameters are wanted in a step, by which captures and on which rank; small ones are read together."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from tracer import walking
from tracer.format.placement import local
from tracer.messaging.messages import DEFAULT_TAG
from tracer.numbers.gathered import SMALL
from tracer.observing.clock import Problems, StreamKey
from tracer.observing.demand import Captures, OfParameters
from tracer.observing.models import Parameter
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.publisher import Publisher
from tracer.observing.pulses import PulseRows
from tracer.observing.pytorch.structure import wrapped_by


class Ranks(ExporterPart):
    """Determines what other ranks hold when the first step ends, because a model may be wrapped after `set_model`.

    Attributes
    ----------
    around : WeakSet of Module
        DistributedDataParallel wrappers of the model.
    recorded : collection of int or None
        The ranks that record; None if each records for itself.
    elsewhere : set of (str, str)
        Kinds and streams that another rank records with the same data.
    replicas : dict
        By path, the placement of a parameter that other ranks hold too.
    surveyed : bool
        Whether `survey` is up to date.
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.around: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.recorded: Collection[int] | None = None
        self.elsewhere: set[tuple[str, str | None]] = set()
        self.replicas: dict[str, dict[str, Any]] = {}
        self.surveyed = False

    def note(self, wrapper: nn.Module) -> None:
        """Note a wrapper around the model, if it is a DistributedDataParallel, whose ranks hold equal parameters."""
        if isinstance(wrapper, DistributedDataParallel) and wrapper not in self.around:
            self.around.add(wrapper)
            self.surveyed = False

    def note_around(self, root: nn.Module, wrapper: nn.Module) -> None:
        """Note all wrappers from the outermost inwards to the model."""
        outer: nn.Module | None = wrapper
        while outer is not None and outer is not root:
            self.note(outer)
            outer = wrapped_by(outer)

    def survey(self) -> None:
        """Find the parameters that other ranks hold, and those that another rank records."""
        self.surveyed = True
        ranks_of: dict[int, list[int]] = {}
        inside = (one for _, top in self.models.tops for one in walking.modules(top))
        for one in (*self.around, *inside):
            if isinstance(one, DistributedDataParallel):
                ranks = sorted(torch.distributed.get_process_group_ranks(one.process_group))
                for tensor in getattr(one, "_module_parameters", None) or walking.parameters(one):
                    ranks_of[id(tensor)] = ranks
        self.replicas.clear()
        rank, recorded = self.publisher.rank, self.recorded
        elsewhere: set[tuple[str, str | None]] = set()
        for parameter in self.table.all:
            tensors = [parameter.tensor] if parameter.tensor is not None else parameter.originals
            placement = self.publisher.place(tensors[0]) if tensors and not parameter.computed else None
            ranks = ranks_of.get(id(tensors[0]), []) if tensors else []
            if placement is None and len(ranks) > 1:
                placement = self.replicas[parameter.path] = {"replicas": ranks}
            holders = placement["replicas"] if placement else [rank]
            if recorded is not None and min({*holders} & {*recorded}, default=rank) != rank:
                # the gradient of a computed weight comes from this rank's own loss
                same = (parameter.values,) if parameter.computed else parameter.kinds
                elsewhere |= {(kind, parameter.stream) for kind in same}
        if elsewhere != self.elsewhere:
            self.elsewhere.clear()
            self.elsewhere |= elsewhere
            self.demand.ask_anew()


class Candidate(NamedTuple):
    """A parameter whose update is wanted in a step.

    Attributes
    ----------
    path : str
    nbytes : int
        The size of its weights, which are kept through the step.
    copied : bool
        Whether the step also copies its weights for a message.
    """

    path: str
    nbytes: int
    copied: bool


class UpdateTurns:
    """Lets parameters take turns, the longest-waiting first, so that no step keeps more than a limit.

    A parameter above the limit is alone in its step, and has no turn in a step that also copies its weights for a
    message.

    Parameters
    ----------
    bound : int
        The most bytes of weights that a step keeps.
    problems : Problems
        Gets a note that parameters take turns.
    """

    def __init__(self, bound: int, problems: Problems) -> None:
        self._bound = bound
        self._problems = problems
        self._step = -1
        self._chosen: frozenset[str] = frozenset()
        self._turns = 0
        self._last: dict[str, int] = {}  # by path: the number of the last turn

    def all_fit(self, nbytes: int) -> bool:
        """Whether weights of this many bytes are within the limit."""
        return nbytes <= self._bound

    def of(self, step: int, candidates: Callable[[], Iterable[Candidate]]) -> frozenset[str]:
        """The paths of the parameters whose turn it is in a step; chosen at the first call of a step."""
        if step != self._step:
            self._step, self._chosen = step, self._choose(list(candidates()))
        return self._chosen

    def _choose(self, candidates: list[Candidate]) -> frozenset[str]:
        whole = sum(one.nbytes for one in candidates)
        if whole <= self._bound:
            return frozenset(one.path for one in candidates)
        self._problems.note(
            "updates",
            f"they are made from a copy of the weights before the step, which take {whole:,} bytes; as at most "
            f"{self._bound:,} are kept, the parameters take turns",
            warn=False,
        )
        self._turns += 1
        chosen, left = set[str](), self._bound
        for one in sorted(candidates, key=lambda one: self._last.get(one.path, 0)):
            alone = not chosen and not one.copied
            if one.nbytes <= left or alone:
                chosen.add(one.path)
                self._last[one.path] = self._turns
                left -= one.nbytes
        return frozenset(chosen)


_FLOATING = (torch.float32, torch.float16)
"""The dtypes of parameters that are read together."""


class WantedParameter(NamedTuple):
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
    wanted : WantedParameter
    rows : tuple of (PulseRows or None)
        The rows of its values, gradients and updates.
    dtype, axes
        Of its tensor, for which the rows hold.
    """

    path: str
    wanted: WantedParameter
    rows: tuple[PulseRows | None, ...]
    dtype: torch.dtype
    axes: int


class Listed(NamedTuple):
    """The parameters that are wanted in a step: those that are read together, and the others."""

    together: list[Small]
    alone: list[WantedParameter]


class WantedParameters(ExporterPart):
    """Knows which parameters are wanted in a step.

    Attributes
    ----------
    turns : UpdateTurns or None
        Chooses the parameters that have updates in a step; None: all of them.
    """

    def __init__(self, ground: Ground, ranks: Ranks) -> None:
        super().__init__(ground)
        self.turns: UpdateTurns | None = None
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

    def _now(self, parameters: Iterable[Parameter], asked: OfParameters, step: int) -> Iterator[WantedParameter]:
        for parameter in parameters:
            value, gradient, update = asked[parameter.path]
            values = () if value is None else value.wanted(step)
            gradients = () if gradient is None else gradient.wanted(step)
            updates = () if update is None else update.wanted(step)
            if updates and not self._has_turn(parameter.path, step):
                updates = ()
            if values or gradients or updates:
                yield WantedParameter(parameter, values, gradients, updates)

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

    def _small(self, one: WantedParameter) -> Small | None:
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

    def read_weights(self, parameters: Iterable[Small], asked: OfParameters) -> list[WantedParameter]:
        """Read weights before they change, at most once per step; returns the parameters that are to be kept alone."""
        self.asked = asked
        fit, tensors, left = list[Small](), list[nn.Parameter](), list[WantedParameter]()
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

    def read_gradients(self, parameters: Iterable[Small], final: Container[str]) -> list[WantedParameter]:
        """Read gradients that are not `final` yet; returns the parameters whose gradients are to be kept alone."""
        fit, gradients, left = list[Small](), list[Tensor](), list[WantedParameter]()
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
