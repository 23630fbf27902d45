"""What of PyTorch is changed while an exporter is there: ``torch.jit.script``, GradScaler, ``backward``.

Each stands as it was as soon as no exporter needs it any more.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_dynamo_compiling

from tracer import walking
from tracer.observing.pytorch.compiled import run_uncompiled
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hooks import Hook
from tracer.observing.pytorch.loss_functions import LossFunction
from tracer.observing.pytorch.tensors import leaves


class Watcher(Protocol):
    """Who is told of what PyTorch does while it is watched."""

    @property
    def gate(self) -> Gate:
        """What the watcher's hooks go through."""

    @property
    def optimizer_calls(self) -> int:
        """How many steps of its optimizers it has seen."""

    def has_optimizer(self, optimizer: object) -> bool:
        """Whether an optimizer is one of its own."""

    def loss_scaled(self, scaled: Tensor, loss: Tensor, scale: Tensor) -> None:
        """Take what a GradScaler has made of a loss, and by which factor."""

    def step_skipped(self, optimizer: Any) -> None:
        """Take note of an optimizer's step that a GradScaler skipped."""

    def differentiates(self, *tensors: Tensor) -> None:
        """Take what ``backward`` is called on."""

    def grad_called(self, tensor: Tensor, inputs: Iterable[Any], *, derivable: bool) -> None:
        """Take what ``autograd.grad`` differentiates by which inputs, and whether it can be differentiated again."""

    def compile_called(self) -> None:
        """Take note that ``compile()`` was called on some module."""


class Patch:
    """Something of PyTorch's that stands otherwise while anybody watches it.

    Parameters
    ----------
    put : callable
        Changes it, unless it is changed already.
    take_back : callable
        Lets it stand as it was.
    """

    def __init__(self, put: Callable[[], None], take_back: Callable[[], None]) -> None:
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._put = put
        self._take_back = take_back

    def watch(self, watcher: Watcher) -> None:
        """Tell a watcher, as long as it is there, until `unwatch`."""
        if watcher not in self.watchers:
            self.watchers.add(watcher)
            weakref.finalize(watcher, self._settle).atexit = False  # one that is dropped leaves nothing, either
        self._put()

    def unwatch(self, watcher: Watcher) -> None:
        """Tell a watcher nothing any more."""
        self.watchers.discard(watcher)
        self._settle()

    def _settle(self) -> None:
        if not [*self.watchers]:
            self._take_back()


_script: Any = None
_compile: Any = None


def _put_scripting() -> None:
    global _script
    original = getattr(torch.jit._script, "_script_impl", None)
    if _script is None and original is not None:
        _script = _as_unwatched(original)
        vars(torch.jit._script)["_script_impl"] = _script


def _take_scripting_back() -> None:
    global _script
    if _script is not None:
        if vars(torch.jit._script)["_script_impl"] is _script:  # else another has put its own around it, which may stay
            vars(torch.jit._script)["_script_impl"] = _script.__wrapped__
        _script = None


def _put_compiling() -> None:
    global _compile
    if _compile is None:
        _compile = _telling(nn.Module.compile)
        nn.Module.compile = _compile  # type: ignore[method-assign]


def _take_compiling_back() -> None:
    global _compile
    if _compile is not None:
        if vars(nn.Module)["compile"] is _compile:  # else another has put its own around it, which may stay
            nn.Module.compile = _compile.__wrapped__  # type: ignore[method-assign]
        _compile = None


SCRIPTING = Patch(_put_scripting, _take_scripting_back)
"""``torch.jit.script``, which compiles what it finds, finds no hooks and stand-ins."""
COMPILING = Patch(_put_compiling, _take_compiling_back)
"""Each ``compile()`` of a module, which decides what may have hooks, is told."""


def _telling(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: A001 - as torch calls it
        result = original(self, *args, **kwargs)
        for watcher in [*COMPILING.watchers]:
            watcher.compile_called()
        return result

    return compile


def _as_unwatched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def script(obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:  # as torch calls its own: by name
        functional = vars(torch.nn.functional)
        stand_ins = {name: one for name, one in functional.items() if isinstance(one, LossFunction)}
        hooked: list[tuple[dict[str, Any], str, dict[int, Any]]] = []
        for one in walking.modules(obj) if isinstance(obj, nn.Module) else ():
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                hooks = vars(one).get(name)
                if hooks and any(isinstance(hook, Hook) for hook in hooks.values()):
                    hooked.append((vars(one), name, hooks))
        try:
            for name, stand_in in stand_ins.items():
                function: Any = stand_in
                while isinstance(function, LossFunction):
                    function = function.__wrapped__
                functional[name] = function
            for attributes, name, hooks in hooked:
                others = ((key, hook) for key, hook in hooks.items() if not isinstance(hook, Hook))
                attributes[name] = type(hooks)(others)
            # names are looked up so many frames further up, and this is one more
            return original(obj, *args, _frames_up=_frames_up + 1, **kwargs)
        finally:
            for attributes, name, hooks in hooked:  # the same dictionaries, which the handles of the hooks know
                attributes[name] = hooks
            functional.update(stand_ins)

    return script


_scaler_methods: dict[tuple[type[GradScaler], str], Callable[..., Any]] = {}
_in_scaler: set[tuple[int, str]] = set()  # scalers and methods that run, because one may call that of its parent


def _put_scalers() -> None:
    if not _scaler_methods:
        _observe_scalers(GradScaler)
        setattr(GradScaler, "__init_subclass__", classmethod(_new_scaler))  # noqa: B010 - a type checker calls it wrong


def _take_scalers_back() -> None:
    if _scaler_methods:
        for (owner, name), method in _scaler_methods.items():
            setattr(owner, name, method)
        _scaler_methods.clear()
        del GradScaler.__init_subclass__


SCALERS = Patch(_put_scalers, _take_scalers_back)
"""Losses that a GradScaler multiplies, and steps that it skips, are told: in these torch calls no optimizer's hooks.

Subclasses may have methods of their own, as that of FSDP has.
"""


def _observe_scalers(owner: type[GradScaler]) -> None:
    for name, observed in (("scale", _observed_scale), ("step", _observed_step)):
        method = vars(owner).get(name)
        if isinstance(method, FunctionType):
            _scaler_methods[owner, name] = method
            setattr(owner, name, observed(method))
    for one in owner.__subclasses__():
        _observe_scalers(one)


def _new_scaler(owner: type[Any], /, **kwargs: Any) -> None:
    super(GradScaler, owner).__init_subclass__(**kwargs)
    _observe_scalers(owner)


def _observed_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(scaler: GradScaler, outputs: Any) -> Any:
        key = id(scaler), "scale"
        if key in _in_scaler:
            return original(scaler, outputs)
        _in_scaler.add(key)
        try:
            result = original(scaler, outputs)
        finally:
            _in_scaler.discard(key)
        watching = [one for one in SCALERS.watchers if one.gate.open] if scaler.is_enabled() else []
        factor = scaler._scale if watching else None  # a scaler that is not enabled has none
        if factor is not None:
            factor = factor.detach().clone()  # which the scaler changes in place
            for (_, tensor), (_, loss) in zip(leaves(result), leaves(outputs), strict=False):
                if tensor.requires_grad:
                    for one in watching:
                        one.gate.guard("the loss scale", functools.partial(one.loss_scaled, tensor, loss, factor))
        return result

    return scale


def _observed_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        key = id(scaler), "step"
        if key in _in_scaler:
            return original(scaler, optimizer, *args, **kwargs)
        watching = [one for one in SCALERS.watchers if one.has_optimizer(optimizer)]
        before = [one.optimizer_calls for one in watching]
        _in_scaler.add(key)
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            _in_scaler.discard(key)
        for one, calls in zip(watching, before, strict=True):
            if one.optimizer_calls == calls and one.gate.open:
                one.gate.guard("skipped_step", functools.partial(one.step_skipped, optimizer))
        return result

    return step


# what stands in the place of torch's functions, by where these are
_backward: dict[tuple[Any, str], Callable[..., Any]] = {}


class Differentiating(threading.local):
    """Whether this thread is in a function that differentiates: torch's call each other, and some call themselves."""

    now: bool = False


_differentiating = Differentiating()


def _put_backward() -> None:
    if not _backward:
        for owner, name, tell in (
            (torch.autograd, "backward", _tell_of_backward),  # which `Tensor.backward` calls
            (torch.autograd, "grad", _tell_of_grad),
        ):
            _backward[owner, name] = _observed(getattr(owner, name), tell)
            setattr(owner, name, _backward[owner, name])


def _take_backward_back() -> None:
    for (owner, name), ours in _backward.items():
        if vars(owner)[name] is ours:  # else another program has put its own around it, which may stay
            setattr(owner, name, ours.__wrapped__)
    _backward.clear()


BACKWARD = Patch(_put_backward, _take_backward_back)
"""On what ``backward`` is called, and what ``autograd.grad`` differentiates, is told."""


def _observed(original: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or _differentiating.now or not BACKWARD.watchers:
            return original(*args, **kwargs)
        # what can be gone through only once, as `model.parameters()`, is gone through here
        args = tuple(tuple(one) if isinstance(one, Iterator) else one for one in args)
        kwargs = {name: tuple(one) if isinstance(one, Iterator) else one for name, one in kwargs.items()}
        _tell(tell, args, kwargs)
        _differentiating.now = True
        try:
            return original(*args, **kwargs)
        finally:
            _differentiating.now = False

    run_uncompiled(differentiate, with_callees=False)
    return differentiate


def _tell(tell: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for one in list(BACKWARD.watchers):
        if not one.gate.held:  # what a receiver or a condition of the user's differentiates is no loss of the training
            one.gate.guard("loss", functools.partial(tell, one, *args, **kwargs))


run_uncompiled(_tell)


def _tell_of_backward(watcher: Watcher, tensors: Any, *args: Any, **kwargs: Any) -> None:
    roots = _as_tuple(tensors)
    if roots and all(isinstance(one, Tensor) for one in roots):  # edges of the graph have no values
        watcher.differentiates(*roots)


def _tell_of_grad(watcher: Watcher, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
    roots = _as_tuple(outputs)
    if len(roots) == 1 and isinstance(roots[0], Tensor):
        derivable = bool(args[2] if len(args) > 2 else kwargs.get("create_graph"))
        watcher.grad_called(roots[0], _as_tuple(inputs), derivable=derivable)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if isinstance(given, Mapping):
        return tuple(given.values())
    return tuple(given) if isinstance(given, Sequence) else (given,)
