"""The models that a script's optimizers train, found among the objects of the process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence, Set
from types import FrameType, ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tracer import walking
from tracer.observing.callers import variables_of
from tracer.observing.pytorch.wrappers import unwrap


class Tensors(nn.Module):
    """Stands for the module of tensors that optimizers train, and that are no module's.

    Parameters
    ----------
    optimizers : sequence of Optimizer
    others : set of int
        The ids of tensors that are left out.
    """

    def __init__(self, optimizers: Sequence[Optimizer], others: Set[int] = frozenset()) -> None:
        super().__init__()
        tensors = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        mine = {id(one): one for one in tensors if id(one) not in others}
        # they need not be parameters
        self._parameters.update({f"parameters.{number}": one for number, one in enumerate(mine.values())})

    @property
    def held(self) -> int:
        """How many tensors there are."""
        return len(self._parameters)


def trains_no_module(optimizer: Optimizer) -> bool:
    """Whether an optimizer trains nothing that a module could have as a parameter, but an input, say."""
    return not any(isinstance(one, nn.Parameter) for group in optimizer.param_groups for one in group["params"])


def models_of(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """The outermost modules that own the optimizers' parameters: the largest first, else in the parameters' order."""
    tensors = [id(p) for one in optimizers for group in one.param_groups for p in group["params"]]
    trained = {number: place for place, number in reversed(list(enumerate(tensors)))}
    # type(), because isinstance() would ask lazy objects of the script for their class; and in a set of all classes,
    # because there are ten objects for each microsecond that anything else would take
    classes = _subclasses_of(nn.Module) - {Tensors}
    objects: list[Any] = gc.get_objects() + (_at_hand() if gc.get_freeze_count() else [])
    everything = [one for one in objects if type(one) in classes and "_parameters" in vars(one)]
    # by the class, because modules may call something else of theirs `parameters` or `modules`
    owners = [one for one in everything if any(id(p) in trained for p in walking.parameters(one))]
    inner = {id(child) for one in owners for child in walking.modules(one) if child is not one}
    roots = {id(unwrap(one)): unwrap(one) for one in owners if id(one) not in inner}
    # a copy (an average of the weights, say) shares no parameter; a view of some layers does, and owns fewer
    owned = [(one, [trained[id(p)] for p in walking.parameters(one) if id(p) in trained]) for one in roots.values()]
    roots_by_size = [one for one, places in sorted(owned, key=lambda found: (-len(found[1]), found[1]))]
    chosen: list[nn.Module] = []
    covered: set[int] = set()
    for one in roots_by_size:
        own = {id(p) for p in walking.parameters(one) if id(p) in trained}
        if not own <= covered:
            chosen.append(one)
            covered |= own
    return chosen


def named_modules() -> dict[str, nn.Module]:
    """The modules in variables of the script's running functions, and in those of the objects there; each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("tracer", "torch"):
            for name, value in variables_of(frame).items():
                inside = [] if isinstance(value, ModuleType | type | nn.Module) else [*_attributes(value).items()]
                for called, one in ((name, value), *inside):
                    # type(), because isinstance() would ask lazy objects of the script for their class
                    if issubclass(type(one), nn.Module):
                        found.setdefault(id(one), (called, one))
        frame = frame.f_back
    return dict(found.values())


def _attributes(value: Any) -> dict[str, Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(attributes) if type(attributes) is dict else {}


def _at_hand() -> list[nn.Module]:
    """The modules in variables of the running functions: ``gc.freeze`` keeps what was there from being listed."""
    found: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found += [*variables_of(frame).values(), *frame.f_globals.values()]
        frame = frame.f_back
    modules = {id(part): part for one in found if issubclass(type(one), nn.Module) for part in walking.modules(one)}
    return list(modules.values())


def _subclasses_of(cls: type) -> set[type]:
    """A class and all that derive from it."""
    found: set[type] = {cls}
    left = [cls]
    while left:
        below: list[type] = type.__subclasses__(left.pop())
        left += [one for one in below if one not in found]
        found.update(below)
    return found


def names_of(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """What the script calls its models: the names of its global variables, else of their classes; each another."""
    names: dict[str, nn.Module] = {}
    for one in models:
        called = [name for name, value in vars(sys.modules["__main__"]).items() if value is one]
        name = called[0] if called else type(one).__name__.lower()
        while name in names:
            name += "_"
        names[name] = one
    return names
