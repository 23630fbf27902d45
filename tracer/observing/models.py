"""The observed modules: the model, and modules that were added beside it or chosen within it."""

from __future__ import annotations

import collections
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import CaptureError
from tracer.format.placement import is_distributed
from tracer.messaging.messages import KINDS
from tracer.observing.capture import Capture
from tracer.observing.pytorch.autograd import belongs_to_others
from tracer.observing.pytorch.structure import named_parts, paths_of, structure_of, summary_of, unwrap
from tracer.observing.pytorch.tensors import freed


class Models:
    """The tops of the observed modules (the model, and modules added beside it), and the names of all modules in them.

    Attributes
    ----------
    root : Module or None
        The model, without wrappers.
    several : bool
        Whether several tops can be called.
    looked_at : callable
        Returns the program's models that are not observed, by name.
    """

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        self.several = False
        self.looked_at: Callable[[], Mapping[str, nn.Module]] = dict
        self._added: list[tuple[str, nn.Module, bool]] = []
        self._named: dict[str, weakref.ref[nn.Module]] = {}  # the modules that had each name, which may be gone
        self._trained: list[set[int]] = []  # for each optimizer, the ids of its parameters
        # caches until `changed`: by path, the top of a module; the ids of all parameters; by optimizer id, the name of
        # what it trains
        self._top_of: dict[str, weakref.ref[nn.Module]] = {}
        self._own: frozenset[int] = frozenset()
        self._trained_names: dict[int, str] = {}
        self._trained_models: dict[int, str | None] = {}  # by optimizer id, the name of the only model that it trains

    @property
    def tops(self) -> list[tuple[str, nn.Module]]:
        """The modules that are called in training: the outermost modules by name, or their parts (see `_apart`)."""
        return [found for name, top in self.outermost for found in _apart(name, top, self._trained)]

    @property
    def called(self) -> list[tuple[str, nn.Module]]:
        """The tops, without those that only hold tensors of no module."""
        return [(name, top) for name, top in self.tops if not isinstance(top, Tensors)]

    @property
    def outermost(self) -> list[tuple[str, nn.Module]]:
        """The model, and the added modules that are not part of it, by name."""
        below = set() if self.root is None else {id(one) for one in walking.modules(self.root)}
        root = [] if self.root is None else [("", self.root)]
        return root + [(name, top) for name, top, _ in self._added if id(top) not in below]

    def changed(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Drop the caches, because modules or optimizers have changed."""
        self._trained = [set(map(id, walking.trained(one))) for one in optimizers]
        self.several, self._top_of = len(self.called) > 1, {}
        self._own, self._trained_names, self._trained_models = frozenset(), {}, {}

    # -- adding and dropping modules ------------------------------------------------------------------------

    def add(self, name: str, module: nn.Module, recursive: bool) -> None:
        """Observe a module by this name, and if `recursive` all modules below it."""
        name = self._free_name(name, module)
        self._named[name] = weakref.ref(module)
        self._added.append((name, module, recursive))

    def set_root(self, root: nn.Module) -> None:
        """Make a module the model."""
        self.root = root
        added, self._added = self._added, []
        anew = {id(one) for _, one, _ in added}  # whose names may change
        self._named = {name: module for name, module in self._named.items() if id(module()) not in anew}
        for name, one, recursive in added:
            self.add(name, one, recursive)

    def forget(self) -> None:
        """Observe nothing."""
        self.root, self._added, self._named = None, [], {}

    def let_go(self) -> Callable[[], None]:
        """Drop all modules; the returned function restores those that the program still has."""
        root = None if self.root is None else weakref.ref(self.root)
        added = [(name, weakref.ref(one), recursive) for name, one, recursive in self._added]
        named = self._named
        self.forget()

        def back() -> None:
            self.root = None if root is None else root()
            self._named = named
            self._added = [(name, top, recursive) for name, was, recursive in added if (top := was()) is not None]

        return back

    def _free_name(self, name: str, added: nn.Module) -> str:
        """A name for a module beside the model, so that none of its paths is already taken."""
        tops = self.tops
        if any(one is added for _, top in tops for _, one in named_parts(top)):
            return name  # parts of an observed module keep their paths
        if not tops:
            self._named = {}
        taken = {path for prefix, top in tops for path in paths_of(top, prefix)}
        others = {known for known, module in self._named.items() if known and module() is not added}
        while name in others or not taken.isdisjoint(paths_of(added, name)):
            name = f"{name}_" if name else type(added).__name__.lower()
        return name

    # -- modules and their paths ----------------------------------------------------------------------------

    def candidates(self) -> list[tuple[str, nn.Module]]:
        """Every module that may be observed, by path, except those of parametrizations, which have no forward."""
        below_root = {} if self.root is None else {id(one): name for name, one in named_parts(self.root)}
        found: dict[int, tuple[str, nn.Module]] = {}
        # added modules of the model restrict the observation to them; other added modules are additional
        chosen = [one for one in self._added if id(one[1]) in below_root]
        beside = [one for one in self._added if id(one[1]) not in below_root]
        sources = chosen + beside if chosen or self.root is None else [("", self.root, True), *beside]
        for prefix, top, recursive in sources:
            for inner, one in named_parts(top) if recursive else [("", top)]:
                name = ".".join(part for part in (prefix, inner) if part)
                found.setdefault(id(one), (below_root.get(id(one), name), one))
        names: dict[str, nn.Module] = {}
        for name, one in found.values():
            if ".parametrizations." in f".{name}." or isinstance(one, ParametrizationList):
                continue
            while name in names:  # the path was taken by a module that was added to the model later
                name = f"{name or type(one).__name__.lower()}_"
            names[name] = one
        return list(names.items())

    def parts(self) -> list[tuple[str, nn.Module]]:
        """The tops and every module in them, by path."""
        return [found for prefix, top in self.tops for found in named_parts(top, prefix)]

    def top_of(self, path: str, module: nn.Module) -> nn.Module:
        """The top that a module is part of. The top's mode decides whether a pass is a training pass.

        The mode of a single layer, such as a frozen batch norm, may differ.
        """
        if not self._top_of:
            self._top_of = {inner: weakref.ref(top) for name, top in self.tops for inner, _ in named_parts(top, name)}
        known = self._top_of.get(path)
        top = None if known is None else known()
        return module if top is None else top

    def path_of(self, module: nn.Module, observed: Mapping[str, nn.Module]) -> str:
        """The path of a module that is or may be observed."""
        for path, one in [*observed.items(), *self.candidates()]:
            if one is module:
                return path
        raise CaptureError(f"this {type(module).__name__} was not added to the exporter; call add_modules first")

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are distributed, so that a forward needs all ranks."""
        return self.root is not None and any(map(is_distributed, walking.parameters(self.root)))

    def freeze(self, module: nn.Module | str, observed: Mapping[str, nn.Module]) -> list[str]:
        """Stop training a module of the model or an observed one; returns the names of the frozen parameters."""
        if isinstance(module, str):
            everything = dict(named_parts(self.root)) if self.root is not None else dict(observed)
            if module not in everything:
                raise CaptureError(f"there is no module {module!r}; there are {', '.join(everything)}")
            module = everything[module]
        frozen = []
        for name, parameter in walking.named_parameters(module):
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                parameter.grad = None
                frozen.append(name)
        return frozen

    # -- optimizers and parameters --------------------------------------------------------------------------

    @property
    def parameter_ids(self) -> frozenset[int]:
        """The ids of all parameters. Empty if some are distributed, because a forward then uses other tensors."""
        parameters = [one for _, top in self.tops for one in walking.parameters(top)]
        return frozenset() if any(map(is_distributed, parameters)) else frozenset(map(id, parameters))

    def made_by_others(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from parameters, none of which is observed."""
        if not self._own:
            self._own = self.parameter_ids
        if not self._own or not belongs_to_others(tensor, self._own):
            return False
        known, self._own = self._own, self.parameter_ids  # a parameter may have been replaced
        return known == self._own or belongs_to_others(tensor, self._own)

    def trained_by(self, optimizer: Optimizer) -> str:
        """The path of the smallest module with all of an optimizer's observed parameters; "" if there is none."""
        known = self._trained_names.get(id(optimizer))
        if known is not None:
            return known
        own = set(map(id, walking.trained(optimizer)))
        name, size = "", sys.maxsize
        parts = self.parts()
        trained = {id(one) for _, top in self.tops for one in walking.parameters(top)} & own
        for path, one in parts if trained else ():
            inside = [id(parameter) for parameter in walking.parameters(one)]
            if path and len(inside) < size and trained.issubset(inside):
                name, size = path, len(inside)
        self._trained_names[id(optimizer)] = name
        return name

    def model_of(self, optimizer: Optimizer) -> str | None:
        """The name of the only outermost module that an optimizer trains; None if there is none, or several."""
        key = id(optimizer)
        if key not in self._trained_models:
            own = set(map(id, walking.trained(optimizer)))
            tops = [(name, top) for name, top in self.outermost if not isinstance(top, Tensors)]
            names = [name for name, top in tops if not own.isdisjoint(_ids(top))]
            self._trained_models[key] = names[0] if len(names) == 1 else None
        return self._trained_models[key]

    def structure(self) -> dict[str, Any]:
        """The model as JSON; of several tops without a root, the modules and parameters of each, below its name."""
        if self.root is not None:
            return structure_of(self.root)
        each = [(name, structure_of(top)) for name, top in self.tops if name]
        if not each:
            return {}
        found: dict[str, Any] = {
            part: [{**one, "name": f"{name}.{one['name']}".rstrip(".")} for name, told in each for one in told[part]]
            for part in ("modules", "parameters")
        }
        found["tied"] = [[f"{name}.{one}" for one in names] for name, told in each for names in told["tied"]]
        return found

    def summaries(self, optimizers: tuple[Optimizer, ...]) -> list[dict[str, Any]]:
        """The models that are observed or only looked at, as JSON.

        Each has its name, class, number of parameters, and `trained`: whether one of the optimizers trains it. A model
        without a name is the root of the network.
        """
        trained = set(map(id, walking.trained(*optimizers)))
        told = [
            summary_of(name, top) | {"trained": any(id(one) in trained for one in walking.parameters(top))}
            for name, top in self.tops
        ]
        return told + [summary_of(name, one) | {"trained": False} for name, one in self.looked_at().items()]


class Tensors(nn.Module):
    """Stands in as the module of tensors that optimizers train and that belong to no module.

    Parameters
    ----------
    tensors : iterable of Tensor
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        mine: dict[int, Any] = {id(one): one for one in tensors}
        # not by `register_parameter`, as the tensors need not be `nn.Parameter`
        self._parameters.update({f"parameters.{number}": one for number, one in enumerate(mine.values())})


def _apart(name: str, module: nn.Module, optimizers: Sequence[Set[int]]) -> list[tuple[str, nn.Module]]:
    """The parts of a module that has no forward, if each optimizer trains one of them; else the module.

    Parameters
    ----------
    name : str
    module : nn.Module
    optimizers : sequence of set of int
        For each optimizer, the ids of its parameters.
    """
    if len(optimizers) < 2 or has_forward(module) or module._parameters or module._buffers:
        return [(name, module)]
    own = _ids(module)
    inside = [trained for trained in optimizers if not own.isdisjoint(trained)]
    parts = [(f"{name}.{path}".lstrip("."), unwrap(one)) for path, one in module._modules.items() if one is not None]
    of_parts = [_ids(one) for _, one in parts]
    if len(inside) < 2 or any(sum(not one.isdisjoint(trained) for one in of_parts) > 1 for trained in inside):
        return [(name, module)]
    return [found for path, one in parts for found in _apart(path, one, inside)]


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. A mere list of parameters has no forward."""
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return True
    return type(module).forward is not nn.Module.forward


def _ids(module: nn.Module) -> set[int]:
    """The ids of all parameters of a module."""
    return set(map(id, walking.parameters(module)))


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
