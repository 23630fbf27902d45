"""The parameters of the observed modules, and whether modules or parameters have changed."""

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
"""Whether somebody wants messages of a kind about a parameter; called with the kind and the stream."""

PARAMETER_KINDS = frozenset(
    kind for kind, entry in KINDS.items() if not (entry.network or entry.per_call or entry.state)
)
"""The kinds of messages about parameters."""


@dataclasses.dataclass
class Parameter:
    """A parameter of a module, identified by its place, so that a replaced tensor is followed."""

    owner_path: str
    owner: nn.Module
    attribute: str
    computed: bool = False  # by a parametrization or a hook: has a value and a gradient, but no update
    by_hook: bool = False  # computed by a hook of the program, or within a forward

    def __post_init__(self) -> None:
        self.path = f"{self.owner_path}.{self.attribute}" if self.owner_path else self.attribute
        named = self.attribute in ("weight", "bias")
        self.bias = "bias" in self.attribute or self.owner_path.endswith("parametrizations.bias")
        self.stream = self.owner_path if named else self.path
        own = "bias" if self.bias else "weight"
        self.values = "biases" if self.bias else "weights"
        self.gradients, self.updates = f"{own}_gradients", f"{own}_updates"
        self.kinds = self.values, self.gradients, self.updates
        """The kinds of messages about its values, gradients and updates."""

    @property
    def tensor(self) -> Tensor | None:
        """The parameter's tensor; None if it is computed or was removed."""
        parameters = self.owner._parameters
        if self.by_hook:
            there = self.in_place
            return there if there is not None and there.requires_grad and there.is_leaf else None
        return parameters[self.attribute] if self.attribute in parameters else None  # noqa: SIM401 - ScriptModule has no get

    @property
    def in_place(self) -> Tensor | None:
        """The tensor in the parameter's place that is not registered as a parameter of the module."""
        there = vars(self.owner).get(self.attribute)
        if there is None:
            there = self.owner._buffers.get(self.attribute)
        if not isinstance(there, Tensor) or freed(there):
            return None
        try:
            _ = there.is_leaf
        except RuntimeError:  # a view that became unusable because its base was overwritten
            return None
        return there

    @property
    def computed_by(self) -> nn.Module:
        """The module whose forward computes the parameter."""
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


class ParameterTable:
    """The parameters that an exporter watches.

    Attributes
    ----------
    all : list of Parameter
    by_path : dict
        All parameters, by path.
    owners : list of (str, Module)
        The observed modules and all modules below them, by path; for buffers.
    """

    def __init__(self) -> None:
        self.all: list[Parameter] = []
        self.owners: list[tuple[str, nn.Module]] = []
        self.by_path: dict[str, Parameter] = {}
        self._by_stream: dict[tuple[str, str], Parameter] = {}
        # the modules and parameters at the time of `note`
        self._built: list[tuple[Mapping[str, Any], dict[str, Any], Mapping[str, Any], list[str]]] = []
        self._placed: list[tuple[Mapping[str, Any], str, Tensor | None, bool]] = []

    def find(self, tops: Iterable[tuple[str, nn.Module]]) -> None:
        """Find the parameters of modules and of all modules below them, each once under its first name."""
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
        """The streams of messages of a kind in `PARAMETER_KINDS`."""
        return [p.stream for p in self.all if kind in p.kinds and not (p.computed and kind == p.updates)]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The current buffers by path, each once under its first name."""
        seen: set[int] = set()
        for owner_path, owner in self.owners:
            for name, tensor in owner._buffers.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{owner_path}.{name}".lstrip("."), tensor

    def states(self, kind: str) -> list[str]:
        """The paths of buffers, or of the parameters that can have an optimizer state."""
        if kind == "buffers":
            return [path for path, _ in self.buffers()]
        return [one.path for one in self.all if not one.computed]

    def taken(self, capture: Capture, kind: str, stream: str) -> bool:
        """Whether a capture takes a stream's parameter, by its own name or with its module."""
        parameter = self._by_stream.get((stream, kind))
        return parameter is not None and (
            capture.takes_module(parameter.owner_path, parameter.owner) or capture.takes_parameter(parameter.path)
        )

    def trained(self, asked: Asked) -> Iterator[tuple[str, Tensor]]:
        """The trained parameters whose gradients somebody wants, by path."""
        for parameter in self.all:
            tensor = parameter.tensor
            if (
                tensor is not None
                and not is_lazy(tensor)
                and tensor.requires_grad
                and tensor.is_leaf  # a tensor that `functional_call` puts there may not be
                and asked(parameter.gradients, parameter.stream)
            ):
                yield parameter.path, tensor

    def computed(self, asked: Asked) -> Iterator[Parameter]:
        """The computed parameters whose values or gradients somebody wants."""
        for parameter in self.all:
            kinds = (parameter.values, parameter.gradients) if parameter.computed else ()
            if any(asked(kind, parameter.stream) for kind in kinds):
                yield parameter

    def of(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> list[Parameter]:
        """The parameters that an optimizer changes. The last optimizer's include those that no optimizer changes."""
        if len(optimizers) == 1:
            return self.all
        own = set(map(id, walking.trained(optimizer)))
        if optimizer is optimizers[-1]:
            others = set(map(id, walking.trained(*optimizers[:-1])))
            return [p for p in self.all if not own.isdisjoint(_made_of(p)) or others.isdisjoint(_made_of(p))]
        return [p for p in self.all if not own.isdisjoint(_made_of(p))]

    def note(self, tops: Iterable[tuple[str, nn.Module]], hooked: bool) -> None:
        """Remember modules and parameters, for `changed`; `hooked`: whether trained parameters may have hooks."""
        self._built, self._placed = [], []
        modules = [
            one for _, top in tops for one in walking.modules(top) if not isinstance(one, torch.jit.ScriptModule)
        ]
        places = collections.Counter(id(tensor) for one in modules for tensor in one._parameters.values())
        for one in modules:
            self._built.append((one._modules, dict(one._modules), one._parameters, list(one._parameters)))
            for name, tensor in one._parameters.items():
                # a replaced tensor does not matter, because it is looked up when it is needed
                if tensor is None or hooked or places[id(tensor)] > 1:
                    self._placed.append((one._parameters, name, tensor, tensor is not None and tensor.requires_grad))

    def changed(self, hooked: bool) -> bool:
        """Whether modules or parameters were added, removed or replaced since `note`, so that hooks must change."""
        for modules, before, parameters, names in self._built:
            if list(parameters) != names or len(modules) != len(before):
                return True
            # by identity, as modules may define what is equal
            if modules and list(map(id, modules.values())) != list(map(id, before.values())):
                return True
            if modules and list(modules) != list(before):
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
    """The modules that compute attributes of a module, by attribute."""
    held = module._modules
    own = held["parametrizations"] if "parametrizations" in held else None  # noqa: SIM401 - a ScriptModule has no get
    return cast("Mapping[str, nn.Module]", own._modules) if isinstance(own, nn.ModuleDict) else {}


_WEIGHTED = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
"""Layers that always need a weight."""


def _replaced(module: nn.Module) -> list[str]:
    """The attributes of a module where a forward finds a computed tensor instead of a parameter.

    Hooks put it there before each forward, as those of `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` do;
    other code may do so too. Before the first forward, a weight is expected of a module that always needs one, or of
    a module with a hook and a parameter whose name begins with ``weight_`` or ``bias_``.
    """
    if isinstance(module, torch.jit.ScriptModule) or "_is_fsdp_managed_module" in vars(module):
        return []  # sharding puts gathered parameters there for each forward
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
