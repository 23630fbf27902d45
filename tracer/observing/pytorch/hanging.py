"""Hooks in PyTorch's dictionaries: hung, checked, removed, and left out of copies and pickles.

The dictionaries are attributes of modules, optimizers and tensors, so copies and pickles of these include their hooks.
Our hooks have negative numbers of their own, so that the user's hooks have the same numbers as without us. While any of
our hooks hangs, every `OrderedDict` is copied and pickled without them.
"""

from __future__ import annotations

import copyreg
import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.optim import Optimizer

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
