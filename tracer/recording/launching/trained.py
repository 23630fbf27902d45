"""The models that a script's optimizers train: found among the objects of the process, and watched by its exporter."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import CaptureError
from tracer.observing.callers import variables_of
from tracer.observing.exporter import Exporter
from tracer.observing.pytorch.autograd import frames
from tracer.observing.pytorch.identity import WeakIdentitySet
from tracer.observing.pytorch.wrappers import unwrap

_FEW = 8
"""Optimizers at each of which, as they are made, models are looked for."""
_MANY = 8
"""Of so many models at once some may be garbage that Python has not collected; then of twice as many as are left."""


class TrainedModels:
    """The models that a script's optimizers train, as an exporter watches them.

    Parameters
    ----------
    exporter : Exporter
        It is given the models, and the optimizers that end a step.

    Attributes
    ----------
    optimizers : WeakIdentitySet
        All that were added.
    any_optimizer : bool
        Whether one was added.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self.optimizers = WeakIdentitySet()
        self.any_optimizer = False
        self._tensors: dict[int, Tensors] = {}  # of optimizers that train no module, while all of them are there
        self._beside = WeakIdentitySet()  # the optimizers that trained nothing that was watched when they were added
        self._looked = 0  # how many optimizers there were when models were looked for
        self._many = 1  # the first one may lie in the garbage that torch leaves when it imports what it needs

    def add(self, optimizer: Optimizer) -> CaptureError | None:
        """Find the model, or the models, now that there is one more optimizer, or that one trains more.

        Returns
        -------
        CaptureError or None
            Says that the captures match nothing of these models. Another optimizer, of another model, may mend that.
        """
        exporter = self._exporter
        self.optimizers.add(optimizer)
        self.any_optimizer = True
        if exporter.steps_seen:  # what the script is done with is not kept, nor recorded at each further step
            many = len(exporter.parts.models.tops) >= self._many and gc.isenabled()
            exporter.parts.let_go(collect=many)
            if many:
                self._many = max(_MANY, 2 * len(exporter.parts.models.tops))
        alive = self.optimizers.alive()
        known = bool(exporter.parts.models.tops) and trains_no_module(optimizer)
        found = known or self._is_watched(optimizer, len(alive)) or self._look_for_models(alive)
        if exporter.parts.optimizers.trains(optimizer):
            self._beside.discard(optimizer)
        else:
            self._beside.add(optimizer)
        enders = tuple(self._that_end_steps(alive))
        if enders != exporter.parts.optimizers.all:  # else what is known of their order still holds
            exporter.set_optimizer(enders)
        if not found:  # it trains tensors that are no module's; another optimizer may have a model
            exporter.train(False)
            return None
        refusal: CaptureError | None = None
        try:
            exporter.check()
        except CaptureError as error:
            refusal = error
        exporter.train(refusal is None)
        return refusal

    def watches_last_group(self, optimizer: Optimizer) -> bool:
        """Whether all that was added to an optimizer last is watched already."""
        return self._watches(optimizer.param_groups[-1:])

    def not_trained(self) -> Mapping[str, nn.Module]:
        """The models in the script's variables that no optimizer trains: target networks, teachers, averages."""
        own = self._watched()
        others = {
            name: unwrap(one)
            for name, one in named_modules().items()
            if (parameters := [*walking.parameters(one)]) and not any(id(each) in own for each in parameters)
        }
        inner = {id(part) for one in others.values() for part in walking.modules(one) if part is not one}
        return {name: one for name, one in others.items() if id(one) not in inner}

    def _watched(self) -> set[int]:
        """The ids of all parameters that are watched."""
        return {id(p) for _, top in self._exporter.parts.models.tops for p in walking.parameters(top)}

    def _watches(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        watched = self._watched()
        return all(id(p) in watched for group in groups for p in group["params"])

    def _that_end_steps(self, alive: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """The optimizers that may end a step.

        Once the training has begun, an optimizer of something that is not watched, such as an adversarial input, ends
        none as long as there are others. What one does that is there from the beginning, such as the optimizer of a
        temperature, the exporter learns from its steps.
        """
        others = [one for one in alive if one not in self._beside]
        if len(others) in (0, len(alive)) or not (self._exporter.steps_seen or self._exporter.parts.clock.open):
            return alive
        if self._exporter.parts.optimizers.ender in self._beside:
            self._exporter.parts.steps.finish()
        return others

    def _is_watched(self, optimizer: Optimizer, count: int) -> bool:
        """Whether one more optimizer of many trains only what is watched already.

        A search for models goes through all objects of the process, and some programs make an optimizer for each
        parameter. So the search, which may also find a module around the known models, takes place for the first few
        optimizers, and again whenever their number has doubled.
        """
        if count <= _FEW or count >= 2 * self._looked:
            return False
        return self._watches(optimizer.param_groups)

    def _look_for_models(self, alive: Sequence[Optimizer]) -> bool:
        """Watch the models of all optimizers; whether there are any."""
        self._looked = len(alive)
        untrained = self._exporter.steps_seen == 0 and not self._exporter.parts.clock.open
        models = models_of(alive) or self._tensors_of(alive, untrained)
        if untrained:
            self._exporter.parts.forget_models()
        outermost = self._exporter.parts.models.outermost
        if len(models) == 1 and not outermost:
            self._exporter.set_model(models[0])
        else:  # the model of a second training in one script joins the first
            watched = {id(one) for _, top in outermost for one in walking.modules(top)}
            for name, one in names_of([one for one in models if id(one) not in watched]).items():
                self._exporter.add_modules((name, one))
        return bool(models)

    def _tensors_of(self, alive: Sequence[Optimizer], untrained: bool) -> list[nn.Module]:
        """What holds the tensors of optimizers that train no module, under the names ``parameters.N``."""
        watched = set() if untrained else self._watched()
        holder = Tensors(alive, watched)
        if not holder._parameters:
            return []
        # the exporter keeps no model that nobody else has
        key = id(holder)
        self._tensors[key] = holder
        for one in alive:
            weakref.finalize(one, self._tensors.pop, key, None).atexit = False
        why = "no module holds what its optimizers train; it is recorded as parameters.0, parameters.1 and so on"
        self._exporter.parts.problems.note("the model", why, warn=False)
        return [holder]


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
        mine: dict[int, Any] = {id(one): one for one in walking.trained(*optimizers) if id(one) not in others}
        # they need not be parameters
        self._parameters.update({f"parameters.{number}": one for number, one in enumerate(mine.values())})


def trains_no_module(optimizer: Optimizer) -> bool:
    """Whether an optimizer trains nothing that a module could have as a parameter, but an input, say."""
    return not any(isinstance(one, nn.Parameter) for one in walking.trained(optimizer))


def models_of(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """The outermost modules that own the optimizers' parameters: the largest first, else in the parameters' order."""
    tensors = map(id, walking.trained(*optimizers))
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
    chosen: list[nn.Module] = []
    covered: set[int] = set()
    for one, places in sorted(owned, key=lambda found: (-len(found[1]), found[1])):
        if not covered.issuperset(places):
            chosen.append(one)
            covered.update(places)
    return chosen


def named_modules() -> dict[str, nn.Module]:
    """The modules in variables of the script's running functions, and in those of the objects there; each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for frame in frames():
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("tracer", "torch"):
            for name, value in variables_of(frame).items():
                inside = [] if isinstance(value, ModuleType | type | nn.Module) else [*_attributes(value).items()]
                for called, one in ((name, value), *inside):
                    # type(), because isinstance() would ask lazy objects of the script for their class
                    if issubclass(type(one), nn.Module):
                        found.setdefault(id(one), (called, one))
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
    for frame in frames():
        found += [*variables_of(frame).values(), *frame.f_globals.values()]
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
