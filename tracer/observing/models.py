"""The observed modules: the model, and modules that were added beside it or chosen within it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import CaptureError
from tracer.format.placement import is_distributed
from tracer.observing.pytorch.loss_graph import belongs_to_others
from tracer.observing.pytorch.structure import structure_of, summary_of
from tracer.observing.pytorch.wrappers import named_parts, paths_of, unwrap


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
