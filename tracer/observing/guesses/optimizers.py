"""Which of several optimizers ends a step.

A user passes optimizers in the order in which they step; the last one ends a step. A launcher finds them when they are
created, and learns the order from their steps: the first step waits for all that have work in it. Replaced optimizers
are forgotten. Optimizers that train nothing observed do not end steps.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import CaptureError
from tracer.observing.models import Models
from tracer.observing.pytorch.autograd import frames

ALONE = 128
"""An optimizer counts as alone after this many steps without a step of another that had stepped before."""


_STEP = Optimizer.profile_hook_step(len).__code__
"""The code that torch wraps around the `step` of every optimizer, to call hooks."""


class Optimizers:
    """The optimizers that an exporter observes.

    Parameters
    ----------
    models : Models
        The observed modules.

    Attributes
    ----------
    all : tuple of Optimizer
        In the given order.
    by_hand : bool
        Whether the user ends steps, if there is no optimizer.
    found : bool
        Whether the given order may differ from the order of the steps.
    outdated : bool
        Whether some may have been replaced, see `let_go_of_replaced`.
    nest : bool
        Whether an optimizer's step calls its parent class's step.
    one_each : bool
        Whether there is an optimizer for each parameter.
    moved : bool
        Whether an optimizer has stepped in the open step without ending it.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self.by_hand = False
        self.found = False
        self.moved = False
        self._called = _Called()
        self.take(())

    def take(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Replace the optimizers, and forget everything learned about the old ones."""
        self.all = optimizers
        self.outdated = self.found and len(optimizers) > 1
        self.nest = any(steps_nest(one) for one in optimizers)
        self.one_each = len(optimizers) > 1 and all(len(walking.trained(one)) == 1 for one in optimizers)
        self._place = len(optimizers) - 1
        self._stepped: set[int] = set()  # places of optimizers that have stepped
        self._times: dict[int, int] = {}  # by place: the number of steps in the training's open step
        self._shared: dict[tuple[int, int], bool] = {}  # by ids: whether two optimizers share parameters
        self._trains: dict[tuple[int, int], bool] = {}  # by id and number of parameters: trains, or is trained
        self._late: set[int] = set()  # places of optimizers that have stepped after the supposedly last one

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def ender(self) -> Optimizer | None:
        """The optimizer whose step ends a step of the training."""
        return self.all[self._place] if self.all else None

    @property
    def forwards_end_steps(self) -> bool:
        """Whether each training forward of the model is a step."""
        return not self.all and not self.by_hand

    @property
    def of_unknown_order(self) -> bool:
        """Whether there are several optimizers whose order is not known."""
        return self.found and len(self.all) > 1

    @property
    def in_order(self) -> tuple[Optimizer, ...]:
        """All optimizers, the one that ends a step last."""
        after = self.all[self._place + 1 :]
        return (*self.all[: self._place], *after, self.all[self._place]) if after else self.all

    def is_known_to_end(self, optimizer: Optimizer) -> bool:
        """Whether each step of an optimizer ends a step: the user gave it as the last, or it has been seen to step."""
        if self.nest or not self.all or optimizer is not self.all[self._place]:
            return False
        return not self.found or (self._place in self._stepped and not self.is_beside(optimizer))

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has an observed parameter."""
        key = id(optimizer), len(walking.trained(optimizer))  # parameters may be added
        known = self._trains.get(key)
        if known is None:
            own = set(map(id, walking.trained(optimizer)))
            tops = self._models.called or self._models.tops
            known = self._trains[key] = any(id(one) in own for _, top in tops for one in walking.parameters(top))
        return known

    def train(self, module: nn.Module) -> bool:
        """Whether an optimizer has a parameter of a module; without optimizers, whether it asks for gradients."""
        trained = [parameter for optimizer in self.all for parameter in walking.trained(optimizer)]
        key = id(module), len(trained)
        known = self._trains.get(key)
        if known is None:
            own = set(map(id, trained))
            parameters = walking.parameters(module)
            known = any(id(parameter) in own if self.all else parameter.requires_grad for parameter in parameters)
            self._trains[key] = known
        return known

    def forget_what_they_train(self) -> None:
        """Forget which optimizers train what, because the observed modules have changed."""
        self._trains = {}
        self._called.look_up_anew()

    def is_beside(self, optimizer: Optimizer) -> bool:
        """Whether this is one of several optimizers, and trains nothing observed."""
        return self.of_unknown_order and not self.trains(optimizer)

    def note_forward(self, called: nn.Module) -> None:
        """Note a training forward of a top, or of a part called outside it, if the optimizers' order is not known."""
        if self.of_unknown_order:
            self._called.note(called)

    def comes_after_last(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps after the supposedly last one, for the forwards of the previous step.

        Of two optimizers, the one created first may step last. Then nothing it trains had a forward in the open step,
        but something had a forward in the step that the other optimizer ended.
        """
        now, before = self._called.now, self._called.before
        if not self.of_unknown_order or optimizer is self.ender or self.ender is None or not before:
            return False
        place = self.place_of(optimizer)
        if place is None or place in self._late or self._share(self.ender, optimizer):
            return False
        return bool(_trained(optimizer, before)) and not _trained(optimizer, now)

    def is_last(self, optimizer: Optimizer) -> None:
        """Let an optimizer that stepped after the supposedly last one end steps from now on."""
        place = self.place_of(optimizer)
        if place is not None:
            self._late.add(place)
            self._stepped.add(place)
            self._place = place

    def place_of(self, optimizer: object) -> int | None:
        """The place of an optimizer among all; None if it is unknown."""
        return next((place for place, one in enumerate(self.all) if one is optimizer), None)

    def steps_inside(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps within the step of another optimizer, which then ends steps in its place.

        The outer one may have been created first: a wrapper that calls ``Optimizer.__init__`` before it creates the
        inner.
        """
        if not self.of_unknown_order:
            return False
        for frame in frames():
            if frame.f_code is _STEP and (running := frame.f_locals.get("self")) is not optimizer:
                outer = self.place_of(running)
                if outer is not None and self._share(self.all[outer], optimizer):
                    if optimizer is self.ender:
                        self._place = outer
                    self._stepped.add(outer)
                    return True
        return False

    def _share(self, one: Optimizer, other: Optimizer) -> bool:
        """Whether two optimizers share parameters, as a wrapper and its inner optimizer do."""
        pair = (id(one), id(other))
        known = self._shared.get(pair)
        if known is None:
            mine = set(map(id, walking.trained(one)))
            known = self._shared[pair] = any(id(tensor) in mine for tensor in walking.trained(other))
        return known

    def ends_step(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer has stepped; whether its step ends the training's step, as the last optimizer's does.

        Of found optimizers, the one created last is taken for the last. The first training step waits after it for
        others with work to do: the last of these to step, or the first to step twice, becomes the last.

        Found optimizers may train one after the other. Therefore an optimizer that steps twice before the supposedly
        last one has ever stepped becomes the last, until a later one steps for the first time. So does an optimizer
        that steps `ALONE` times without it. An optimizer that trains nothing observed ends a step if another has
        stepped in it, and never if it steps first.
        """
        beside = self.is_beside(optimizer) and not self.moved
        if not beside and self.steps_inside(optimizer):
            return False
        if not self.found:
            return optimizer is self.ender
        place = self.place_of(optimizer)
        if place is None:
            return False
        times = self._times[place] = self._times.get(place, 0) + 1
        if beside:  # one that steps before the models' does not end steps; that of a temperature, for example
            return False
        if self._place in self._times:  # the supposedly last optimizer has stepped
            ends = times > 1 or not self._waits_for_others(optimizer)
        else:
            enough = ALONE if self._place in self._stepped else 2
            ends = times >= enough or (place not in self._stepped and place > self._place)
        self._stepped.add(place)
        if ends:
            self._place = place
        return ends

    def _waits_for_others(self, optimizer: Optimizer) -> bool:
        """Whether the first step continues after an optimizer's step, because another has yet to step.

        The other one has gradients, or trains other modules, which had a forward in the step.
        """
        if self._called.before is not None:
            return False
        own = _trained(optimizer, self._called.now)
        for place, other in enumerate(self.all):
            if other is optimizer or place in self._stepped or self.is_beside(other) or self._share(optimizer, other):
                continue
            called = _trained(other, self._called.now)
            if called and called.isdisjoint(own):
                return True
            if any(one.grad is not None for one in walking.trained(other)):
                return True
        return False

    def step_ended(self) -> None:
        """Reset the counts for the next step of the training."""
        self.moved = False
        self._called.step_ended()
        if self._times:
            self._times = {}

    def let_go(self) -> Callable[[], None]:
        """Drop all optimizers; the returned function restores those that the program still has."""
        refs = [weakref.ref(one) for one in self.all]
        self.all = ()

        def back() -> None:
            left = tuple(one for ref in refs if (one := ref()) is not None)
            if len(left) == len(refs):
                self.all = left
            else:
                self.take(left)

        return back

    def let_go_of_replaced(self) -> None:
        """Forget optimizers that the program has dropped. A replaced one still exists when its successor is created."""
        self.outdated = False
        self.let_go()()


class _Called:
    """The modules that had training forwards in the open step and in the previous step.

    Attributes
    ----------
    now, before : dict of int to frozenset of int
        For the id of each, the ids of its parameters; `before` is None in the first step.
    """

    def __init__(self) -> None:
        self.now: dict[int, frozenset[int]] = {}
        self.before: dict[int, frozenset[int]] | None = None
        self._known: dict[int, frozenset[int]] = {}  # what was looked up since the observed modules changed

    def note(self, module: nn.Module) -> None:
        """Note a training forward of a module."""
        key = id(module)
        if key not in self._known:
            self._known[key] = frozenset(map(id, walking.parameters(module)))
        self.now[key] = self._known[key]

    def step_ended(self) -> None:
        """Begin the next step."""
        if self.now or self.before is None or self.before:
            self.now, self.before = {}, self.now

    def look_up_anew(self) -> None:
        """Look up the parameters of a module at its next forward, because the observed modules have changed."""
        self._known = {}


def _trained(optimizer: Optimizer, called: Mapping[int, frozenset[int]]) -> set[int]:
    """The ids of the called modules of which an optimizer has a parameter."""
    own = set(map(id, walking.trained(optimizer)))
    return {module for module, parameters in called.items() if not own.isdisjoint(parameters)}


def steps_nest(optimizer: Optimizer) -> bool:
    """Whether an optimizer's class has a `step` that may call a parent class's `step`."""
    return _calls_parent(type(optimizer))  # type: ignore[arg-type]  # mypy asks the instances whether they can be hashed


@functools.lru_cache(maxsize=64)
def _calls_parent(one: Any) -> bool:
    return sum("step" in vars(parent) for parent in one.__mro__) > 2  # `Optimizer.step` counts as well


def steps_within(optimizer: Optimizer) -> bool:
    """Whether the running hook belongs to a step inside a step of the same optimizer.

    If a subclass calls its parent's `step`, the hooks are called for both. This inspects the call stack, because a
    counter would be wrong after a step that raises; and only if both a class and its parent have a `step`.
    """
    if not steps_nest(optimizer):
        return False
    return sum(frame.f_code is _STEP and frame.f_locals.get("self") is optimizer for frame in frames()) > 1


def skipped_inside(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer, whose step a GradScaler always calls, has found infinities and changed nothing.

    On a CUDA device this waits for the result, without which steps cannot be counted. While a CUDA graph is captured,
    the result is False.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if not isinstance(found_inf, Tensor) or (found_inf.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(found_inf.item())


def observable(optimizer: Optimizer | Iterable[Optimizer] | None) -> tuple[Optimizer, ...]:
    """The given optimizers. A wrapper that takes no hooks is replaced by the optimizer that it wraps."""
    if optimizer is None:
        return ()
    given: tuple[Any, ...] = (optimizer,)
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer):
        given = tuple(optimizer)
    for one in given:
        if not isinstance(one, Optimizer):
            raise CaptureError(f"the optimizer is a torch.optim.Optimizer, not {type(one).__name__}")
    return tuple(map(_with_hooks, given))


def _with_hooks(optimizer: Optimizer) -> Optimizer:
    """The optimizer if it takes hooks, else the one that it wraps, as accelerate's does."""
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and hasattr(inner, "_optimizer_step_pre_hooks"):
        return inner
    raise CaptureError(
        f"{type(optimizer).__name__} takes no hooks, because it does not call Optimizer.__init__; give the optimizer "
        "that it wraps, or optimizer=() and call step() of the run"
    )
