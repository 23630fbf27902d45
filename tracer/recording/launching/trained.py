"""What a script trains: its models, found among the process's objects, and its epochs, by its DataLoaders."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import CaptureError
from tracer.observing.exporter import Exporter
from tracer.observing.guesses.losses import variables_of
from tracer.observing.models import Tensors
from tracer.observing.pytorch.autograd import frames
from tracer.observing.pytorch.structure import WeakIdentitySet, unwrap

_FEW = 8
"""For each of the first optimizers, up to this many, models are searched."""
_MANY = 8
"""With this many models, some may be uncollected garbage, so it is collected; again at twice as many as remain."""


class TrainedModels:
    """The models that a script's optimizers train, as an exporter watches them.

    Parameters
    ----------
    exporter : Exporter
        It is given the models, and the optimizers that end a step.

    Attributes
    ----------
    optimizers : WeakIdentitySet
        All added optimizers.
    any_optimizer : bool
        Whether an optimizer was ever added.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self.optimizers = WeakIdentitySet()
        self.any_optimizer = False
        self._tensors: dict[int, Tensors] = {}  # keeps each alive until an optimizer of its tensors is gone
        self._beside = WeakIdentitySet()  # optimizers that trained nothing watched when they were added
        self._looked = 0  # the number of optimizers at the last search for models
        self._many = 1  # not `_MANY`: garbage of torch's lazy imports may keep even a first model alive

    def add(self, optimizer: Optimizer) -> CaptureError | None:
        """Find the models again, after an optimizer was made or has got new parameters.

        Returns
        -------
        CaptureError or None
            An error if the captures match nothing in these models. An optimizer of another model may resolve it.
        """
        exporter = self._exporter
        self.optimizers.add(optimizer)
        self.any_optimizer = True
        if exporter.steps_seen:  # drop models that the script no longer uses, so that no step records them
            many = len(exporter.parts.models.tops) >= self._many and gc.isenabled()
            exporter.parts.let_go(collect=many)
            if many:
                self._many = max(_MANY, 2 * len(exporter.parts.models.tops))
        alive = self.optimizers.alive()
        known = bool(exporter.parts.models.tops) and trains_no_module(optimizer)
        if known and self._is_first:
            self._join(self._tensors_of(alive, self._watched(), beside=True))
        found = known or self._is_watched(optimizer, len(alive)) or self._look_for_models(alive)
        if exporter.parts.optimizers.trains(optimizer) or self._watches(optimizer.param_groups):
            self._beside.discard(optimizer)
        else:
            self._beside.add(optimizer)
        enders = tuple(self._that_end_steps(alive))
        if enders != exporter.parts.optimizers.all:  # setting the same again would forget their order
            exporter.set_optimizer(enders)
        if not found:  # it trains tensors of no module; another optimizer may have a model
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
        """Whether all parameters of an optimizer's last group are already watched."""
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
        """The ids of all watched parameters."""
        return {id(p) for _, top in self._exporter.parts.models.tops for p in walking.parameters(top)}

    def _watches(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        watched = self._watched()
        return all(id(p) in watched for group in groups for p in group["params"])

    def _that_end_steps(self, alive: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """The optimizers that may end a step.

        Once the training has begun, an optimizer of unwatched tensors, such as an adversarial input, ends no step as
        long as there are other optimizers. For optimizers that exist from the beginning, such as that of a temperature,
        the exporter learns from their steps whether they end a step.
        """
        others = [one for one in alive if one not in self._beside]
        if len(others) in (0, len(alive)) or not (self._exporter.steps_seen or self._exporter.parts.clock.open):
            return alive
        if self._exporter.parts.optimizers.ender in self._beside:
            self._exporter.parts.steps.finish()
        return others

    def _is_watched(self, optimizer: Optimizer, count: int) -> bool:
        """Whether no search for models is needed, because `optimizer` trains only watched parameters.

        A search goes through all objects of the process, and some programs make an optimizer for each parameter. So a
        search, which may also find a module around the known models, takes place for the first few optimizers, and
        again whenever their number has doubled.
        """
        if count <= _FEW or count >= 2 * self._looked:
            return False
        return self._watches(optimizer.param_groups)

    def _look_for_models(self, alive: Sequence[Optimizer]) -> bool:
        """Search and watch the models of all optimizers; returns whether there are any."""
        self._looked = len(alive)
        models = models_of(alive)
        if self._is_first:
            self._exporter.parts.forget_models()
        outermost = self._exporter.parts.models.outermost
        others = {id(one) for model in models for one in walking.parameters(model)}
        if not self._is_first:
            others |= self._watched()
        tensors = self._tensors_of(alive, others, beside=bool(models)) if self._is_first or not models else []
        first = models or tensors
        if len(first) == 1 and not outermost:
            self._exporter.set_model(first[0])
        self._join([*models, *tensors])  # the model of a second training in one script joins the first
        return bool(first)

    def _join(self, modules: Sequence[nn.Module]) -> None:
        """Watch those of some modules that are not part of what is watched."""
        watched = {id(one) for _, top in self._exporter.parts.models.outermost for one in walking.modules(top)}
        for name, one in names_of([module for module in modules if id(module) not in watched]).items():
            self._exporter.add_modules((name, one))

    @property
    def _is_first(self) -> bool:
        """Whether the training has not begun."""
        return self._exporter.steps_seen == 0 and not self._exporter.parts.clock.open

    def _tensors_of(self, alive: Sequence[Optimizer], others: Set[int], *, beside: bool) -> list[nn.Module]:
        """A list with a module that holds the tensors of optimizers but those with some ids, if there are such tensors.

        `beside`: whether there are models, too.
        """
        holder = Tensors(one for one in walking.trained(*alive) if id(one) not in others)
        if not holder._parameters:
            return []
        # keep the holder alive: the exporter has only weak references to models
        key = id(holder)
        self._tensors[key] = holder
        for one in alive:
            weakref.finalize(one, self._tensors.pop, key, None).atexit = False
        if beside:
            what, names = "some tensors that optimizers train", "tensors.parameters.0, tensors.parameters.1"
        else:
            what, names = "what its optimizers train", "parameters.0, parameters.1"
        why = f"no module holds {what}; it is recorded as {names} and so on"
        self._exporter.parts.problems.note("the model", why, warn=False)
        return [holder]


def trains_no_module(optimizer: Optimizer) -> bool:
    """Whether an optimizer trains no `nn.Parameter`, but for example an input."""
    return not any(isinstance(one, nn.Parameter) for one in walking.trained(optimizer))


def models_of(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """The outermost modules that own the optimizers' parameters, sorted by their number of these, then their order."""
    tensors = map(id, walking.trained(*optimizers))
    trained = {number: place for place, number in reversed(list(enumerate(tensors)))}
    # type(), because isinstance() would evaluate the script's lazy objects; and a set of all subclasses, because
    # a process has so many objects that each slower test takes noticeable time
    classes = _subclasses_of(nn.Module) - {Tensors}
    objects: list[Any] = gc.get_objects() + (_at_hand() if gc.get_freeze_count() else [])
    everything = [one for one in objects if type(one) in classes and "_parameters" in vars(one)]
    # not by methods of the object, because a module may have other attributes named `parameters` or `modules`
    owners = [one for one in everything if any(id(p) in trained for p in walking.parameters(one))]
    inner = {id(child) for one in owners for child in walking.modules(one) if child is not one}
    roots = {id(unwrap(owner)): unwrap(owner) for owner in owners if id(owner) not in inner}
    # a copy, such as an average of the weights, owns none of the parameters; a view of some layers owns fewer
    owned = [(root, [trained[id(p)] for p in walking.parameters(root) if id(p) in trained]) for root in roots.values()]
    chosen: list[nn.Module] = []
    covered: set[int] = set()
    for one, places in sorted(owned, key=lambda found: (-len(found[1]), found[1])):
        if not covered.issuperset(places):
            chosen.append(one)
            covered.update(places)
    return chosen


def named_modules() -> dict[str, nn.Module]:
    """The modules in variables of the script's running functions, and in attributes of objects there; each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for frame in frames():
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("tracer", "torch"):
            for name, value in variables_of(frame).items():
                inside = [] if isinstance(value, ModuleType | type | nn.Module) else [*_attributes(value).items()]
                for called, one in ((name, value), *inside):
                    # type(), because isinstance() would evaluate the script's lazy objects
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
    """The modules in variables of the running functions; after ``gc.freeze``, `gc.get_objects` does not list them."""
    found: list[Any] = []
    for frame in frames():
        found += [*variables_of(frame).values(), *frame.f_globals.values()]
    modules = {id(part): part for one in found if issubclass(type(one), nn.Module) for part in walking.modules(one)}
    return list(modules.values())


def _subclasses_of(cls: type) -> set[type]:
    """A class and all its subclasses."""
    found: set[type] = {cls}
    left = [cls]
    while left:
        below: list[type] = type.__subclasses__(left.pop())
        left += [one for one in below if one not in found]
        found.update(below)
    return found


def names_of(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Unique names for models: those of the script's global variables, else of their classes."""
    names: dict[str, nn.Module] = {}
    for model in models:
        called = [name for name, value in vars(sys.modules["__main__"]).items() if value is model]
        name = called[0] if called else type(model).__name__.lower()
        while name in names:
            name += "_"
        names[name] = model
    return names


@dataclass(slots=True)
class _Leader:
    """The iterator of an epoch's first batch, the step when that was drawn, and the number of batches drawn from it."""

    iterator: weakref.ref[Any]
    began: int
    draws: int = 1


@dataclass(slots=True)
class _LoaderPass:
    """The state of an iterator of a DataLoader."""

    loader: weakref.ref[Any]
    began: int
    """The step at which the iterator was made."""
    seen: int
    """The step at which its last batch was drawn."""
    forwards: int
    """The number of the model's forwards before the iterator was made."""
    given: int = 0
    """The number of batches that the iterator gave."""


class ScriptEpochs:
    """Ends an exporter's epoch when a DataLoader that feeds the training is exhausted or begun again.

    Parameters
    ----------
    exporter : Exporter
        Counts the steps and the epochs.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._passes: weakref.WeakKeyDictionary[Any, _LoaderPass] = weakref.WeakKeyDictionary()
        self._feeding = WeakIdentitySet()
        # the DataLoaders that were begun in this epoch
        self._begun = WeakIdentitySet()
        self._new_amid = False  # whether a DataLoader of `_begun` was first begun after a step of this epoch
        self._leader: _Leader | None = None
        # an exhausted iterator whose last batches the model may not have seen yet, and the forwards after which it has
        self._unused: _LoaderPass | None = None
        self._used_after = 0
        # the DataLoader that was begun last, while its iterator is unknown, because its class wraps another DataLoader
        self._wrapped: weakref.ref[Any] | None = None
        self._began = 0
        self.ended = False
        """Whether a DataLoader ended an epoch."""

    def begins(self, loader: Any) -> None:
        """A DataLoader is begun (``iter(loader)``).

        If a DataLoader that fed the training was left before its end, the epoch is over. Batches of an exhausted
        DataLoader that the model has not seen are no longer waited for, with one exception: a program that makes a
        DataLoader at each step may begin a new DataLoader before it uses the last batch.
        """
        if self._left_early():
            self._end(self._exporter.global_step)
        new = loader not in self._begun
        same = self._unused is not None and self._unused.loader() is loader
        self._used(anyhow=same or (new and not self._new_amid))
        now = self._exporter.global_step
        if loader in self._feeding and now > self._began and not self._is_led(loader):
            self._end(now)
        self._new_amid |= new and now > self._began
        self._begun.add(loader)
        self._wrapped = weakref.ref(loader)

    def begun(self, loader: Any, iterator: Any) -> None:
        """A DataLoader that was just begun has made its iterator."""
        self._wrapped = None
        now = self._exporter.global_step
        self._passes[iterator] = _LoaderPass(weakref.ref(loader), now, now, self._exporter.parts.forwards.seen)

    def drawn(self, iterator: Any) -> None:
        """A batch is drawn. If a step took place since the iterator's last batch, its loader feeds the training."""
        self._used()
        wrapped = None if self._wrapped is None or iterator in self._passes else self._wrapped()
        if wrapped is not None:
            self.begun(wrapped, iterator)
        now = self._exporter.global_step
        leader = None if self._leader is None else self._leader.iterator()
        if leader is None:
            self._leader = _Leader(weakref.ref(iterator), now)
        elif leader is iterator and self._leader is not None:
            self._leader.draws += 1
        known = self._passes.get(iterator)
        if known is None:  # the iterator was made before the script was watched
            return
        loader = known.loader()
        if loader is not None and now > known.seen:
            self._feeding.add(loader)
        known.seen = now

    def given(self, iterator: Any) -> None:
        """An iterator gave a batch."""
        known = self._passes.get(iterator)
        if known is not None:
            known.given += 1

    def exhausted(self, iterator: Any) -> None:
        """An iterator is exhausted. If training steps took place since it was made, the epoch is over.

        Some libraries draw batches ahead. The epoch then ends when the model has had as many forwards as batches.
        """
        exporter, known = self._exporter, self._passes.get(iterator)
        if known is None or self._is_led(known.loader()):
            return
        self._leader = None
        # with several models, it is unknown which model the batches are for
        counted = exporter.model is not None and not exporter.parts.models.several
        told = counted and (exporter.parts.forwards.seen > 0 or exporter.steps_seen == 0)
        self._unused, self._used_after = known, known.forwards + known.given if told else 0
        self._used()

    def _left_early(self) -> bool:
        """Whether the DataLoader that fed this epoch was left before its end: its iterator no longer exists.

        A DataLoader that fed a single step does not count, because some programs make a DataLoader at each step.
        """
        leader = self._leader
        if leader is None or leader.iterator() is not None:
            return False
        return leader.draws > 1 and self._exporter.global_step - leader.began > 1

    def _is_led(self, loader: Any) -> bool:
        """Whether another DataLoader leads this epoch: it has given a batch for every step of the epoch.

        Only the leader's end is the end of the epoch. A DataLoader that ends sooner is begun again, as in
        semi-supervised learning.
        """
        iterator = None if self._leader is None else self._leader.iterator()
        known = None if iterator is None else self._passes.get(iterator)
        if self._leader is None or known is None:
            return False
        steps = self._exporter.global_step - self._leader.began
        return known.loader() is not loader and self._leader.draws >= steps > 0

    def _used(self, *, anyhow: bool = False) -> None:
        """End the epoch if the model has seen all batches of an exhausted DataLoader, or in any case if `anyhow`."""
        if self._unused is not None and (anyhow or self._exporter.parts.forwards.seen >= self._used_after):
            began, self._unused = self._unused.began, None
            now = self._exporter.global_step
            if now > max(began, self._began):
                self._end(now)

    def _end(self, now: int) -> None:
        self.ended = True
        self._leader = self._unused = None
        self._new_amid = False
        self._begun.clear()
        self._exporter.parts.steps.epochs.over = True
        self._began = now
