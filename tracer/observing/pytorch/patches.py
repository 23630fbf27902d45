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


_unscripted: weakref.WeakSet[Watcher] = weakref.WeakSet()
_script: Any = None
_told_of_compiling: weakref.WeakSet[Watcher] = weakref.WeakSet()
_compile: Any = None


def watch_scripting(watcher: Watcher) -> None:
    """Let ``torch.jit.script``, which compiles what it finds, find no hooks and stand-ins."""
    global _script
    if watcher not in _unscripted:
        _unscripted.add(watcher)
        weakref.finalize(watcher, _settle_scripting).atexit = False
    original = getattr(torch.jit._script, "_script_impl", None)
    if _script is None and original is not None:
        _script = _as_unwatched(original)
        vars(torch.jit._script)["_script_impl"] = _script


def unwatch_scripting(watcher: Watcher) -> None:
    """Undo `watch_scripting`; without any, torch's own function is back."""
    _unscripted.discard(watcher)
    _settle_scripting()


def _settle_scripting() -> None:
    global _script
    if _script is not None and not [*_unscripted]:
        if vars(torch.jit._script)["_script_impl"] is _script:  # else another has put its own around it, which may stay
            vars(torch.jit._script)["_script_impl"] = _script.__wrapped__
        _script = None


def watch_compiling(watcher: Watcher) -> None:
    """Tell a watcher of each ``compile()`` of a module, which decides what may have hooks."""
    global _compile
    if watcher not in _told_of_compiling:
        _told_of_compiling.add(watcher)
        weakref.finalize(watcher, _settle_compiling).atexit = False
    if _compile is None:
        _compile = _telling(nn.Module.compile)
        nn.Module.compile = _compile  # type: ignore[method-assign]


def unwatch_compiling(watcher: Watcher) -> None:
    """Undo `watch_compiling`; without any, torch's own method is back."""
    _told_of_compiling.discard(watcher)
    _settle_compiling()


def _settle_compiling() -> None:
    global _compile
    if _compile is not None and not [*_told_of_compiling]:
        if vars(nn.Module)["compile"] is _compile:  # else another has put its own around it, which may stay
            nn.Module.compile = _compile.__wrapped__  # type: ignore[method-assign]
        _compile = None


def _telling(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: A001 - as torch calls it
        result = original(self, *args, **kwargs)
        for watcher in [*_told_of_compiling]:
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


_scaled: weakref.WeakSet[Watcher] = weakref.WeakSet()
_scaler_methods: dict[tuple[type[GradScaler], str], Callable[..., Any]] = {}
_in_scaler: set[tuple[int, str]] = set()  # scalers and methods that run, because one may call that of its parent


def watch_scalers(watcher: Watcher) -> None:
    """Let a watcher know of losses that a GradScaler multiplies, and of steps that it skips.

    In these torch calls none of the optimizer's hooks. Subclasses may have methods of their own, as that of FSDP has.
    """
    if watcher not in _scaled:
        _scaled.add(watcher)
        weakref.finalize(watcher, _settle_scalers).atexit = False  # one that is dropped leaves nothing, either
    if not _scaler_methods:
        _observe_scalers(GradScaler)
        setattr(GradScaler, "__init_subclass__", classmethod(_new_scaler))  # noqa: B010 - a type checker calls it wrong


def unwatch_scalers(watcher: Watcher) -> None:
    """No longer let a watcher know; without any, torch's own methods are back."""
    _scaled.discard(watcher)
    _settle_scalers()


def _settle_scalers() -> None:
    if _scaler_methods and not [*_scaled]:
        for (owner, name), method in _scaler_methods.items():
            setattr(owner, name, method)
        _scaler_methods.clear()
        del GradScaler.__init_subclass__


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
        watching = [one for one in _scaled if one.gate.open] if scaler.is_enabled() else []
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
        watching = [one for one in _scaled if one.has_optimizer(optimizer)]
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


_told_of_backward: weakref.WeakSet[Watcher] = weakref.WeakSet()
# what stands in the place of torch's functions, by where these are
_backward: dict[tuple[Any, str], Callable[..., Any]] = {}


class Differentiating(threading.local):
    """Whether this thread is in a function that differentiates: torch's call each other, and some call themselves."""

    now: bool = False


_differentiating = Differentiating()


def watch_backward(watcher: Watcher) -> None:
    """Let a watcher know on what ``backward`` is called, and what ``autograd.grad`` differentiates."""
    if watcher not in _told_of_backward:
        _told_of_backward.add(watcher)
        weakref.finalize(watcher, _settle_backward).atexit = False
    if not _backward:
        for owner, name, tell in (
            (torch.autograd, "backward", _tell_of_backward),  # which `Tensor.backward` calls
            (torch.autograd, "grad", _tell_of_grad),
        ):
            _backward[owner, name] = _observed(getattr(owner, name), tell)
            setattr(owner, name, _backward[owner, name])


def unwatch_backward(watcher: Watcher) -> None:
    """No longer let a watcher know; without any, torch's own functions are back."""
    _told_of_backward.discard(watcher)
    _settle_backward()


def _settle_backward() -> None:
    if _backward and not [*_told_of_backward]:
        for (owner, name), ours in _backward.items():
            if vars(owner)[name] is ours:  # else another program has put its own around it, which may stay
                setattr(owner, name, ours.__wrapped__)
        _backward.clear()


def _observed(original: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or _differentiating.now or not _told_of_backward:
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
    for one in list(_told_of_backward):
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
