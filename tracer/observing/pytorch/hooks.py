"""The hooks that PyTorch calls, in its dictionaries: hung, checked, removed, and left out of copies and pickles.

The dictionaries are attributes of modules, optimizers and tensors, so copies and pickles of these include their hooks.
Our hooks have negative numbers of their own, so that the user's hooks have the same numbers as without us. While any of
our hooks hangs, every `OrderedDict` is copied and pickled without them.
"""

from __future__ import annotations

import contextlib
import copyreg
import enum
import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from tracer.observing.pytorch.autograd import traced
from tracer.observing.pytorch.compiled import NOBODY, Ticket, name_hook, observe_in_graph, run_uncompiled
from tracer.observing.pytorch.gate import Gate

_Hooks: TypeAlias = "MutableMapping[int, Any]"

_NUMBERS = itertools.count(-(2**62))
"""Negative, as torch's own numbers never are, and far from any other keys."""
next_number: Callable[[], int] = _NUMBERS.__next__

_hung: set[int] = set()  # the numbers of all hooks that hang somewhere
_pickled_before: Any = None  # the previous reducer of OrderedDict; None if there was none


class Hanging:
    """One of our hooks in a dictionary of PyTorch.

    Parameters
    ----------
    owner : Module, Optimizer, Tensor or module of Python
        The owner of the dictionary. It is not kept alive.
    place : str
        The attribute that is the dictionary, which exists.
    hook : callable
        Called by torch.
    marks : tuple of str
        Attributes that are dictionaries in which torch notes how to call the hook.
    first : bool
        Whether the hook is put before existing hooks.
    """

    __slots__ = ("_dictionaries", "_first", "_marks", "_unnoted", "hook", "number", "place")

    def __init__(
        self, owner: Any, place: str, hook: Callable[..., Any], marks: tuple[str, ...] = (), *, first: bool = False
    ) -> None:
        self.place = place
        self.number = next(_NUMBERS)
        """Its key in the dictionary."""
        self.hook = hook
        self._marks = marks
        self._first = first
        _note(self.number)
        self._unnoted = weakref.finalize(hook, _forget, self.number)  # also if the owner is dropped with its hooks
        self._unnoted.atexit = False
        self._dictionaries = self._put(owner)

    def _put(self, owner: Any) -> list[Callable[[], _Hooks | None]]:
        hooks, *noted = (_dictionary(owner, name) for name in (self.place, *self._marks))
        hooks[self.number] = self.hook
        if self._first and isinstance(hooks, OrderedDict):
            hooks.move_to_end(self.number, last=False)
        for one in noted:
            one[self.number] = True
        return [_reference(one) for one in (hooks, *noted)]

    def hang_again(self, owner: Any) -> bool:
        """Put the hook back if somebody else removed it; whether that was so."""
        if self.hangs_on(owner):
            return False
        self._dictionaries = self._put(owner)
        return True

    def hangs_on(self, owner: Any) -> bool:
        """Whether the hook is in its owner's current dictionary."""
        return self.number in _dictionary(owner, self.place)

    def remove(self) -> None:
        """Remove the hook for good."""
        self.take_off()
        self._unnoted()

    def take_off(self) -> None:
        """Remove the hook until `hang_again`."""
        for reference in self._dictionaries:
            one = reference()
            if one is not None:
                one.pop(self.number, None)


class Rest:
    """Takes hooks off for the time of a forward whose inside nobody records: a module with a hook is called slowly.

    A hook stays if others hang beside it, so that the order of hooks never changes.

    Parameters
    ----------
    hung : iterable of (owner, Hanging)
        The owners are kept alive.
    """

    def __init__(self, hung: Iterable[tuple[Any, Hanging]] = ()) -> None:
        self._spots = [(_dictionary(owner, one.place), one.number, one.hook) for owner, one in hung]
        self._resting: list[tuple[_Hooks, int, Any]] = []

    def begin(self) -> None:
        """Take the hooks off."""
        for spot in self._spots:
            hooks, number, _ = spot
            if len(hooks) == 1 and number in hooks:
                del hooks[number]
                self._resting.append(spot)

    def end(self) -> None:
        """Put the hooks back, before those that were hung meanwhile."""
        for hooks, number, hook in self._resting:
            hooks[number] = hook
            if len(hooks) > 1 and isinstance(hooks, OrderedDict):
                hooks.move_to_end(number, last=False)
        self._resting.clear()


class Checklist:
    """Checks whether hooks hang on modules and optimizers, at a few nanoseconds each.

    Parameters
    ----------
    hung : iterable of (owner, Hanging)
        The owners are kept alive.
    """

    def __init__(self, hung: Iterable[tuple[Any, Hanging]] = ()) -> None:
        spots = ((vars(owner), one) for owner, one in hung if not isinstance(owner, Tensor))
        self._spots = [(held, one.place, one.number) for held, one in spots if one.place in held]

    def is_complete(self) -> bool:
        """Whether all hooks hang."""
        for held, place, number in self._spots:  # noqa: SIM110 - a generator takes twice as long
            if number not in held[place]:
                return False
        return True


def before_forward(module: nn.Module, hook: Callable[..., Any], *, first: bool = False) -> Hanging:
    """Have a hook called with a module and its positional and keyword arguments before its forward."""
    return Hanging(module, "_forward_pre_hooks", hook, ("_forward_pre_hooks_with_kwargs",), first=first)


def after_forward(module: nn.Module, hook: Callable[..., Any], *, always: bool = False, first: bool = False) -> Hanging:
    """Have a hook called with module, arguments and output after the forward; `always`: even if it raised."""
    called = ("_forward_hooks_always_called",) if always else ()
    return Hanging(module, "_forward_hooks", hook, ("_forward_hooks_with_kwargs", *called), first=first)


def before_step(optimizer: Optimizer, hook: Callable[..., Any]) -> Hanging:
    """Have a hook called before an optimizer's step, with the optimizer and the step's arguments."""
    return Hanging(optimizer, "_optimizer_step_pre_hooks", hook)


def after_step(optimizer: Optimizer, hook: Callable[..., Any]) -> Hanging:
    """Have a hook called after an optimizer's step, with the optimizer and the step's arguments."""
    return Hanging(optimizer, "_optimizer_step_post_hooks", hook)


def before_any_step(hook: Callable[..., Any]) -> Hanging:
    """Have a hook called before each step of any optimizer, with the optimizer and the step's arguments."""
    return Hanging(sys.modules[Optimizer.__module__], "_global_optimizer_pre_hooks", hook)


def after_accumulation(tensor: Tensor, hook: Callable[..., Any]) -> Hanging:
    """Have a hook called with a leaf tensor whenever its gradient has been accumulated."""
    held: Any = tensor  # torch does not declare the attribute's type
    if held._post_accumulate_grad_hooks is None:
        held._post_accumulate_grad_hooks = OrderedDict()
    return Hanging(tensor, "_post_accumulate_grad_hooks", hook)


def on_gradient(tensor: Tensor, hook: Callable[..., Any]) -> Hanging:
    """Have a hook called with the gradient of a tensor."""
    gradient_hooks(tensor)
    return Hanging(tensor, "_backward_hooks", hook)


def on_gradient_once(tensor: Tensor, hook: Callable[..., Any]) -> None:
    """Have a hook called with the gradient of a tensor in this step's graph; it is dropped with the tensor."""
    gradient_hooks(tensor)[next_number()] = hook


class Told:
    """A hook on a tensor that calls a bound method with the gradient. Does not keep the method's object alive.

    Parameters
    ----------
    method : callable
        Called with `about`, and then the gradient.
    *about
    """

    __slots__ = ("__weakref__", "_about", "_method")

    __torch_unserializable__ = True  # otherwise torch warns when a tensor with the hook is pickled

    def __init__(self, method: Callable[..., object], *about: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self._about = about

    def __call__(self, gradient: Tensor | None) -> None:
        method = self._method()
        if gradient is not None and method is not None:  # None: this output of its node got no gradient
            method(*self._about, gradient)


def gradient_hooks(tensor: Tensor) -> _Hooks:
    """The hooks of a tensor that requires gradients, created as by `Tensor.register_hook`."""
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        if tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)
    return hooks  # type: ignore[no-any-return]


def _dictionary(owner: Any, place: str) -> _Hooks:
    """An owner's current dictionary of hooks; for a module, bypassing attributes that its class defines."""
    found: _Hooks = vars(owner)[place] if isinstance(owner, nn.Module) else getattr(owner, place)
    return found


def _reference(hooks: _Hooks) -> Callable[[], _Hooks | None]:
    # a plain dict, which a program may have put there, cannot be weakly referenced
    return weakref.ref(hooks) if isinstance(hooks, OrderedDict) else lambda: hooks


def _note(number: int) -> None:
    """Leave a hook out of copies and pickles from now on."""
    global _pickled_before
    if not _hung:
        _pickled_before = copyreg.dispatch_table.get(OrderedDict)
        copyreg.dispatch_table[OrderedDict] = _reduced
    _hung.add(number)


def _forget(number: int) -> None:
    """Undo `_note`; after the last hook, restore the previous reducer."""
    global _pickled_before
    _hung.discard(number)
    if not _hung and copyreg.dispatch_table.get(OrderedDict) is _reduced:
        if _pickled_before is None:
            del copyreg.dispatch_table[OrderedDict]
        else:
            copyreg.dispatch_table[OrderedDict] = _pickled_before
        _pickled_before = None


def _reduced(one: OrderedDict[Any, Any]) -> Any:
    """How `copy` and `pickle` reduce an OrderedDict: without our hooks."""
    ours = any(key in _hung for key in one)
    if _pickled_before is not None:
        left = OrderedDict((key, value) for key, value in one.items() if key not in _hung) if ours else one
        return _pickled_before(left)
    made, arguments, state, listed, pairs = cast("tuple[Any, ...]", one.__reduce__())
    return made, arguments, state, listed, (pair for pair in pairs if pair[0] not in _hung) if ours else pairs


class Role(enum.Enum):
    """The purpose of a hook; the values are names in problems."""

    BEFORE_ROOT = "before root"
    AFTER_ROOT = "after root"
    BEFORE_TOP = "before top"
    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    BEFORE_LAYER = "before layer"
    AFTER_PARAMETRIZATION = "after parametrization"
    AFTER_REPLACED = "after replaced"
    AFTER_ACCUMULATION = "after accumulation"
    AFTER_LOSS = "after loss"
    BEFORE_OPTIMIZER = "before optimizer"
    AFTER_OPTIMIZER = "after optimizer"


_OF_ROOT = (Role.BEFORE_ROOT, Role.AFTER_ROOT)
_OF_OPTIMIZER = (Role.BEFORE_OPTIMIZER, Role.AFTER_OPTIMIZER)
_IN_GRAPHS = (*_OF_ROOT, Role.BEFORE_FORWARD, Role.AFTER_FORWARD)
INNER = (Role.BEFORE_FORWARD, Role.AFTER_FORWARD, Role.AFTER_PARAMETRIZATION, Role.AFTER_REPLACED)
"""Hooks inside the model, which have no work in a pass whose inside nobody records."""


class Site(NamedTuple):
    """A place to hang a hook, and the method that the hook calls.

    Attributes
    ----------
    on : Module, Optimizer or Tensor
    role : Role
    name : str
        The path of the module or parameter; ``""`` where only one thing is meant.
    put : callable
        Hangs a hook on it.
    call : callable
        A bound method that takes the name and the hook's arguments. Its object is not kept alive.
    quiet : callable or None
        A bound method of the same object, called before the lock is taken. Takes the hook's arguments, and returns
        whether the hook has no more work.
    gradients : bool
        Whether gradients of the observed tensors may be wanted.
    """

    on: Any
    role: Role
    name: str
    put: Callable[[Any, Hook], Hanging]
    call: Callable[..., object]
    quiet: Callable[[tuple[Any, ...]], bool] | None = None
    gradients: bool = False


class Hook:
    """A hook of an exporter: goes through the gate, and calls its site's method.

    Parameters
    ----------
    gate : Gate
    site : Site
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_gate",
        "_inner",
        "_on",
        "_owner",
        "_quiet",
        "fired",
        "gradients",
        "graph_name",
        "name",
        "of_optimizer",
        "of_root",
        "off",
        "role",
        "sees_inputs",
    )

    def __init__(self, gate: Gate, site: Site) -> None:
        call: Any = site.call
        quiet: Any = site.quiet
        self._gate = gate
        self._owner = weakref.ref(call.__self__)
        self._call = call.__func__
        self._quiet = None if quiet is None else quiet.__func__
        self._on = weakref.ref(site.on)
        self._inner = site.role in INNER
        self.of_optimizer = site.role in _OF_OPTIMIZER
        self.of_root = site.role in _OF_ROOT
        self.sees_inputs = site.role in (Role.BEFORE_ROOT, Role.BEFORE_TOP, Role.BEFORE_FORWARD)
        self.role = site.role
        self.name = site.name
        self.gradients = site.gradients
        self.fired = False
        self.off = False
        self.graph_name = (
            name_hook(self, f"{gate.number}:{site.role.value}:{site.name}") if site.role in _IN_GRAPHS else ""
        )

    def __call__(self, *args: Any) -> Any:
        """Report what the hook observed; an error in the exporter does not reach the training."""
        if is_dynamo_compiling():  # changing state would recompile the graph at every step
            if self.graph_name:
                return observe_in_graph(self, *args)
            if self.of_optimizer:
                # Runs this hook between graphs. A step is never a single graph, because torch's code breaks it anyway.
                torch._dynamo.graph_break()
            return None
        owner, gate = self._owner(), self._gate
        if owner is None:
            return None
        if self._inner and self.fired:
            running = gate.passes.now
            if running.depth and not running.inside:  # a pass whose inside nobody records
                if running.counts is not None and self.role is Role.AFTER_FORWARD:
                    running.count(self.name)
                return None
        if self.off or not gate.open:
            return None
        try:
            if self.fired and self._quiet is not None and self._quiet(owner, args):
                return None
            if traced():
                return None
            self.fired = True
            gate.lock.run(self._call, owner, self.name, *args)
        except Exception as error:  # noqa: BLE001 - under strict it is raised again
            gate.problems.failed(f"module {self.name!r}" if self.name else self.role.value, error)
            self.off = not (self.of_optimizer or self.of_root)
        return None

    @property
    def lasts(self) -> bool:
        """Whether it hangs as long as its owner is observed."""
        return self.of_optimizer or self.role is Role.BEFORE_ROOT

    # -- for compiled graphs --------------------------------------------------------------------------------

    @property
    def on(self) -> Any:
        """The object that it hangs on; None if it is gone."""
        return self._on()

    def ticket(self) -> Ticket:
        """The ticket of the call that this hook has just observed after the forward."""
        owner: Any = self._owner()
        return NOBODY if owner is None or self.role is not Role.AFTER_FORWARD else owner.ticket(self.name)

    def gradient_seen(self, leaf: str, gradient: Tensor, ticket: Ticket) -> None:
        """Take the gradient of a tensor that this hook observed in a call."""
        owner: Any = self._owner()
        if owner is not None and not self.off:
            owner.gradient_seen(self.name, leaf, gradient, ticket)

    def lacks(self, kind: str, why: str) -> None:
        """Note that messages of a kind are missing, if anybody listens."""
        gate = self._gate
        if self._owner() is not None and gate.passes.now.listening:
            gate.guard(kind, lambda: gate.problems.note(f"{kind} of {self.name!r}", why))

    def __reduce__(self) -> tuple[Any, ...]:
        # for picklers that do not leave hooks out (see `_reduced`): a callable of the standard library that accepts any
        # arguments and returns None
        return getattr, (contextlib.nullcontext(), "__exit__")


run_uncompiled(Hook.__call__)


def leaves_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step leaves gradients unchanged, as those of torch do.

    The exceptions are SGD with Nesterov momentum, if it updates many parameters at once, and hooks of others that come
    before an exporter's.
    """
    first = next(iter(optimizer._optimizer_step_post_hooks.values()), None)
    return (
        type(optimizer).__module__.partition(".")[0] == "torch"
        and isinstance(first, Hook)
        and not any(group.get("nesterov") for group in optimizer.param_groups)
    )


def is_heard_last(optimizer: Optimizer) -> bool:
    """Whether the last of the hooks before its step is an exporter's."""
    last = next(reversed(optimizer._optimizer_step_pre_hooks.values()), None)
    return isinstance(last, Hook) and last.role is Role.BEFORE_OPTIMIZER
