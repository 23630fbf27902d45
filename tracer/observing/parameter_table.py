"""The parameters of the observed modules, their places, and whether these have changed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tracer import walking
from tracer.messaging.messages import KINDS
from tracer.observing.capture import Capture
from tracer.observing.pytorch.tensors import freed
from tracer.observing.pytorch.wrappers import named_parts

Asked: TypeAlias = "Callable[[str, str], bool]"
"""Whether somebody asks for messages of a kind about a parameter, given the kind and the stream."""

PARAMETER_KINDS = frozenset(
    kind for kind, entry in KINDS.items() if not (entry.network or entry.per_call or entry.state)
)
"""The kinds of messages about parameters."""


@dataclasses.dataclass
class Parameter:
    """A parameter of a module, known by its place, so that a replaced tensor is followed."""

    owner_path: str
    owner: nn.Module
    attribute: str
    computed: bool = False  # by a parametrization or a hook: it has a value and a gradient, but no update
    by_hook: bool = False  # by a hook of the program, or in a forward

    def __post_init__(self) -> None:
        self.path = f"{self.owner_path}.{self.attribute}" if self.owner_path else self.attribute
        named = self.attribute in ("weight", "bias")
        self.bias = "bias" in self.attribute or self.owner_path.endswith("parametrizations.bias")
        self.stream = self.owner_path if named else self.path
        own = "bias" if self.bias else "weight"
        self.values = "biases" if self.bias else "weights"
        self.gradients, self.updates = f"{own}_gradients", f"{own}_updates"
        self.kinds = self.values, self.gradients, self.updates
        """The kinds of messages about it: of its values, its gradients and its updates."""

    @property
    def tensor(self) -> Tensor | None:
        """The tensor in its place; None if it is computed, or nothing is there any more."""
        parameters = self.owner._parameters
        if self.by_hook:
            there = self.in_place
            return there if there is not None and there.requires_grad and there.is_leaf else None
        return parameters[self.attribute] if self.attribute in parameters else None  # noqa: SIM401 - ScriptModule has no get

    @property
    def in_place(self) -> Tensor | None:
        """The tensor in its place if that is not a parameter of the module."""
        there = vars(self.owner).get(self.attribute)
        if there is None:
            there = self.owner._buffers.get(self.attribute)
        if not isinstance(there, Tensor) or freed(there):
            return None
        try:
            _ = there.is_leaf
        except RuntimeError:  # a view that cannot be used any more, because its base was written to
            return None
        return there

    @property
    def computed_by(self) -> nn.Module:
        """The module in whose forward it is computed."""
        return self.owner if self.by_hook else _parametrizations(self.owner)[self.attribute]

    @property
    def originals(self) -> list[Tensor]:
        """The parameters of its module that it seems to be computed from."""
        if self.by_hook:
            found = (one for name, one in self.owner._parameters.items() if name.startswith(f"{self.attribute}_"))
            return [one for one in found if one is not None]
        if not self.computed:
            return []
        return [one for one in self.computed_by._parameters.values() if one is not None]


class _Held:
    """The modules that a module held at some time, compared by identity."""

    __slots__ = ("_ids", "_modules", "names")

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self.names = list(modules)
        self._modules = list(modules.values())  # kept, so that no other module gets the id of one
        self._ids = list(map(id, self._modules))

    def differ_from(self, modules: Mapping[str, Any]) -> bool:
        """Whether there are other modules now, or other names, or another order."""
        return list(map(id, modules.values())) != self._ids or list(modules) != self.names


class ParameterTable:
    """The parameters that an exporter watches.

    Attributes
    ----------
    all : list of Parameter
    by_path : dict
        The same, by path.
    owners : list of (str, Module)
        The modules and all below them, by path, of which each has its buffers.
    """

    def __init__(self) -> None:
        self.all: list[Parameter] = []
        self.owners: list[tuple[str, nn.Module]] = []
        self.by_path: dict[str, Parameter] = {}
        self._by_stream: dict[tuple[str, str], Parameter] = {}
        # the modules and parameters at the time of `note`
        self._built: list[tuple[Mapping[str, Any], _Held, Mapping[str, Any], list[str]]] = []
        self._placed: list[tuple[Mapping[str, Any], str, Tensor | None, bool]] = []

    def find(self, tops: Iterable[tuple[str, nn.Module]]) -> None:
        """Find the parameters of modules and all below these, each once and by its first name."""
        self.all, self.owners = [], []
        seen: set[int] = set()
        for prefix, top in tops:
            for owner_path, owner in named_parts(top, prefix):
                self.owners.append((owner_path, owner))
                for name, tensor in owner._parameters.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        self.all.append(Parameter(owner_path, owner, name))
                computed = [Parameter(owner_path, owner, name, computed=True) for name in _parametrizations(owner)]
                by_hook = [Parameter(owner_path, owner, name, True, by_hook=True) for name in _replaced(owner)]
                self.all += computed + by_hook
        self._by_stream = {(p.stream, kind): p for p in self.all for kind in p.kinds}
        self.by_path = {p.path: p for p in self.all}

    def streams(self, kind: str) -> list[str]:
        """The streams of messages of one of `PARAMETER_KINDS`."""
        return [p.stream for p in self.all if kind in p.kinds and not (p.computed and kind == p.updates)]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers as they are now, by path, each once and by its first name."""
        seen: set[int] = set()
        for owner_path, owner in self.owners:
            for name, tensor in owner._buffers.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{owner_path}.{name}".lstrip("."), tensor

    def states(self, kind: str) -> list[str]:
        """The paths of buffers, or of the parameters that an optimizer may have a state of."""
        if kind == "buffers":
            return [path for path, _ in self.buffers()]
        return [one.path for one in self.all if not one.computed]

    def taken(self, capture: Capture, kind: str, stream: str) -> bool:
        """Whether a capture takes the parameter of a stream, by itself or with its module."""
        parameter = self._by_stream.get((stream, kind))
        return parameter is not None and (
            capture.takes_module(parameter.owner_path, parameter.owner) or capture.takes_parameter(parameter.path)
        )

    def trained(self, asked: Asked) -> Iterator[tuple[str, Tensor]]:
        """The parameters that are trained and whose gradients somebody asks for, by path."""
        for parameter in self.all:
            tensor = parameter.tensor
            if (
                tensor is not None
                and not is_lazy(tensor)
                and tensor.requires_grad
                and tensor.is_leaf  # as what `functional_call` puts there need not be
                and asked(parameter.gradients, parameter.stream)
            ):
                yield parameter.path, tensor

    def computed(self, asked: Asked) -> Iterator[Parameter]:
        """The computed parameters whose values or gradients somebody asks for."""
        for parameter in self.all:
            kinds = (parameter.values, parameter.gradients) if parameter.computed else ()
            if any(asked(kind, parameter.stream) for kind in kinds):
                yield parameter

    def of(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> list[Parameter]:
        """The parameters that an optimizer changes. The last one's include those that no optimizer changes."""
        if len(optimizers) == 1:
            return self.all
        own = set(map(id, walking.trained(optimizer)))
        if optimizer is optimizers[-1]:
            others = set(map(id, walking.trained(*optimizers[:-1])))
            return [p for p in self.all if not own.isdisjoint(_made_of(p)) or others.isdisjoint(_made_of(p))]
        return [p for p in self.all if not own.isdisjoint(_made_of(p))]

    def note(self, tops: Iterable[tuple[str, nn.Module]], hooked: bool) -> None:
        """Note modules and parameters, for `changed`; `hooked`: whether trained parameters may have hooks."""
        self._built, self._placed = [], []
        modules = [
            one for _, top in tops for one in walking.modules(top) if not isinstance(one, torch.jit.ScriptModule)
        ]
        places = collections.Counter(id(tensor) for one in modules for tensor in one._parameters.values())
        for one in modules:
            self._built.append((one._modules, _Held(one._modules), one._parameters, list(one._parameters)))
            for name, tensor in one._parameters.items():
                # which other tensor is in a place does not matter, as it is looked up when it is needed
                if tensor is None or hooked or places[id(tensor)] > 1:
                    self._placed.append((one._parameters, name, tensor, tensor is not None and tensor.requires_grad))

    def changed(self, hooked: bool) -> bool:
        """Whether modules or parameters have come, gone or been replaced since `note`, or hooks have to be."""
        for modules, held, parameters, names in self._built:
            if list(parameters) != names or ((modules or held.names) and held.differ_from(modules)):
                return True
        for parameters, name, tensor, trained in self._placed:
            now = parameters.get(name)
            if now is not tensor or (hooked and now is not None and now.requires_grad != trained):
                return True
        return False


def _made_of(parameter: Parameter) -> set[int]:
    """The ids of the tensors that an optimizer changes in order to change this parameter."""
    tensor = parameter.tensor
    if tensor is not None:
        return {id(tensor)}
    return set(map(id, parameter.originals))


def _parametrizations(module: nn.Module) -> Mapping[str, nn.Module]:
    """The modules that compute attributes of a module, by the attribute."""
    held = module._modules
    own = held["parametrizations"] if "parametrizations" in held else None  # noqa: SIM401 - a ScriptModule has no get
    return cast("Mapping[str, nn.Module]", own._modules) if isinstance(own, nn.ModuleDict) else {}


_WEIGHTED = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
"""Layers that cannot do without a weight."""


def _replaced(module: nn.Module) -> list[str]:
    """The attributes of a module where a forward finds something else than a parameter in a parameter's place.

    Hooks put it there before each forward, as those of `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` do;
    other code may, too. Where nothing is there yet, a weight is expected of a module that needs one, or that has a hook
    and a parameter with such a name.
    """
    if isinstance(module, torch.jit.ScriptModule) or "_is_fsdp_managed_module" in vars(module):
        return []  # sharding puts there what it gathers for a forward, and takes it away
    parameters, there = module._parameters, vars(module)
    original = {name: any(one.startswith(f"{name}_") for one in parameters) for name in ("weight", "bias")}
    found = [
        name
        for name, value in there.items()
        if isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and name not in parameters
        and (name in original or any(one.startswith(f"{name}_") for one in parameters))
    ]
    computed = _parametrizations(module)
    hooked = bool(module._forward_pre_hooks)
    for name, has_original in original.items():
        if name in parameters or name in found or name in computed:
            continue
        buffer = name in module._buffers
        if (has_original and (hooked or buffer)) or (not buffer and isinstance(module, _WEIGHTED)):
            found.append(name)
    return found
