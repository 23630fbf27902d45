"""Patches of PyTorch while an exporter needs them: ``torch.jit.script``, GradScaler, ``backward``.

Each is undone when no exporter needs it any more.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_dynamo_compiling

from tracer import walking
from tracer.observing.pytorch.autograd import traced
from tracer.observing.pytorch.compiled import run_uncompiled
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hooks import Hook
from tracer.observing.pytorch.tensors import leaves

LOSS_FUNCTIONS: tuple[str, ...] = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "ctc_loss",
    "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss",
    "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
)  # fmt: skip
"""The loss functions of ``torch.nn.functional``; the modules of ``torch.nn`` call these."""


class LossFunction:
    """Stands in for a function of ``torch.nn.functional`` while it is observed.

    Parameters
    ----------
    gate : Gate
    seen : callable
        A bound method that takes the function's name, the function, its arguments and its result. Its object is not
        kept alive.
    original : callable
        The function.
    """

    __wrapped__: Callable[..., Any]
    __name__: str

    def __init__(self, gate: Gate, seen: Callable[..., None], original: Callable[..., Any]) -> None:
        self._gate = gate
        self._owner = weakref.ref(cast("types.MethodType", seen).__self__)
        self._seen = cast("types.MethodType", seen).__func__
        functools.update_wrapper(self, original, updated=())

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)  # binds as functions do in a class

    def __reduce__(self) -> str | tuple[Any, ...]:
        # objects that hold the function, such as a model, are copied and pickled with its name, as torch's own
        name: str = self.__name__
        if getattr(torch.nn.functional, name) is self:
            return name
        return pkgutil.resolve_name, (f"torch.nn.functional:{name}",)  # pickle refuses a name of another object

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner: Any = self._owner()
        gate = self._gate
        if owner is None or gate.passes.now.in_loss or traced():
            return self.__wrapped__(*args, **kwargs)
        gate.passes.now.in_loss = True  # some losses call others
        try:
            if owner.fed is not None:
                owner.fed(self.__wrapped__, args, kwargs)
            output = self.__wrapped__(*args, **kwargs)
        finally:
            gate.passes.now.in_loss = False
        if gate.open:
            gate.guard("loss", lambda: self._seen(owner, self.__name__, self.__wrapped__, args, kwargs, output))
        return output


class ModelLoss(torch.nn.Module):
    """Represents the loss that a model computes itself: calling it shows an exporter output, labels and loss.

    This is the loss of an evaluation whatever the training's loss is made of, because the model returns it as its loss.
    """

    def forward(self, input: Tensor, target: Tensor, loss: Tensor) -> Tensor:  # noqa: A002 - torch's names
        """Return the loss."""
        return loss


def unpatch(patched: dict[str, LossFunction]) -> None:
    """Remove stand-ins for torch's functions, even if another exporter has since wrapped them."""
    for name, wrapper in patched.items():
        outer = getattr(torch.nn.functional, name)
        if outer is wrapper:
            setattr(torch.nn.functional, name, wrapper.__wrapped__)
            continue
        while isinstance(outer, LossFunction):
            if outer.__wrapped__ is wrapper:
                outer.__wrapped__ = wrapper.__wrapped__
            outer = outer.__wrapped__
    patched.clear()


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    # cached for use at every loss, by the function of a bound method, so that no module is kept alive
    return inspect.signature(function)


def output_and_labels(
    loss: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """The network's output and the labels among the arguments of a loss's call, in any order.

    Labels are the parameter called ``target`` or ``targets``, or for other losses the second tensor. A loss such as
    ``triplet_margin_loss`` has no labels.

    Examples
    --------
    >>> x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    >>> found = output_and_labels(torch.nn.functional.cross_entropy, (), {"target": y, "input": x})
    >>> found[0] is x, found[1] is y
    (True, True)
    """
    try:
        signature = _signature(getattr(loss, "__func__", loss))
        owner = (None,) if hasattr(loss, "__func__") else ()
        given = signature.bind_partial(*owner, *args, **kwargs).arguments
        ordered = [given[name] for name in signature.parameters if name in given]
    except (TypeError, ValueError):  # builtins have no signature
        given, ordered = dict(kwargs), [*args, *kwargs.values()]
    tensors = [one for one in ordered if isinstance(one, Tensor)]
    labels = next((given[name] for name in ("target", "targets") if isinstance(given.get(name), Tensor)), None)
    if labels is None and "anchor" not in given:
        labels = tensors[1] if len(tensors) > 1 else None
    output = next((one for one in tensors if one is not labels), None)
    return output, labels


class DifferentiationWatcher(Protocol):
    """A watcher of `BACKWARD`."""

    gate: Gate

    @property
    def waits(self) -> bool:
        """Whether to call `over` when the backward that was just told of is over."""

    def over(self) -> None:
        """Note that a backward is over, and has brought the parameters their gradients."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that is differentiated now is of interest."""

    def backward(self, *tensors: Tensor) -> None:
        """Take the tensors that ``backward`` is called on."""

    def grad(self, tensor: Tensor, inputs: Iterable[Any], *, derivable: bool) -> None:
        """Take a tensor that ``autograd.grad`` differentiates, the inputs, and whether the result is differentiable."""


class ScalerWatcher(Protocol):
    """A watcher of `SCALERS`."""

    gate: Gate
    calls: int
    """How many optimizer steps were seen."""

    def knows(self, optimizer: object) -> bool:
        """Whether an optimizer is observed."""

    def scales(self, scaler: GradScaler) -> None:
        """Note that a GradScaler multiplies losses."""

    def scaled(self, scaled: Tensor, loss: Tensor, scale: Tensor) -> None:
        """Take a loss before and after scaling by a GradScaler, and the factor."""

    def skip(self, optimizer: Any) -> None:
        """Note that a GradScaler skipped an optimizer's step."""


Watcher = TypeVar("Watcher")


class Patch(Generic[Watcher]):
    """A part of PyTorch that is replaced while there are watchers.

    Parameters
    ----------
    begin : callable
        Replaces PyTorch's functions by stand-ins, with `replace`.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._begin = begin
        # by owner and name: the stand-in, and the original (None if the attribute did not exist)
        self._replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def watch(self, watcher: Watcher) -> None:
        """Inform a watcher, as long as it exists, until `unwatch`."""
        if watcher not in self.watchers:
            self.watchers.add(watcher)
            weakref.finalize(watcher, self._settle).atexit = False  # a dropped watcher leaves no patches behind either
        if not self._replaced:
            self._begin()

    def unwatch(self, watcher: Watcher) -> None:
        """Stop informing a watcher."""
        self.watchers.discard(watcher)
        self._settle()

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Replace an attribute until there are no watchers."""
        self._replaced[owner, name] = ours, vars(owner).get(name)
        setattr(owner, name, ours)

    def _settle(self) -> None:
        if [*self.watchers]:
            return
        for (owner, name), (ours, original) in self._replaced.items():
            if vars(owner).get(name) is not ours:  # somebody else has wrapped it, and the wrapper may stay
                continue
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._replaced.clear()


def _replace_scripting() -> None:
    original = getattr(torch.jit._script, "_script_impl", None)
    if original is not None:
        SCRIPTING.replace(torch.jit._script, "_script_impl", _as_unwatched(original))


def _replace_compiling() -> None:
    COMPILING.replace(nn.Module, "compile", _telling(nn.Module.compile))


def _replace_scalers() -> None:
    _observe_scalers(GradScaler)
    SCALERS.replace(GradScaler, "__init_subclass__", classmethod(_new_scaler))


def _replace_backward() -> None:
    # `Tensor.backward` calls `torch.autograd.backward`
    for name, tell in (("backward", _tell_of_backward), ("grad", _tell_of_grad)):
        BACKWARD.replace(torch.autograd, name, _observed(getattr(torch.autograd, name), tell))


SCRIPTING: Patch[object] = Patch(_replace_scripting)
"""Hides hooks and stand-ins from ``torch.jit.script``, which compiles everything that it finds."""
COMPILING: Patch[Any] = Patch(_replace_compiling)
"""Calls `compile_called` of its watchers at each ``compile()`` of a module: it decides which modules may have hooks."""
SCALERS: Patch[ScalerWatcher] = Patch(_replace_scalers)
"""Reports losses that a GradScaler multiplies, and steps that it skips, for which torch calls no optimizer hooks.

Subclasses may override the methods, as FSDP's does.
"""
BACKWARD: Patch[DifferentiationWatcher] = Patch(_replace_backward)
"""Reports the tensors that ``backward`` is called on and that ``autograd.grad`` differentiates."""


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
    def script(obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:  # torch passes `_frames_up` by name
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
            # names are looked up this many frames up, and this function adds one
            return original(obj, *args, _frames_up=_frames_up + 1, **kwargs)
        finally:
            for attributes, name, hooks in hooked:  # the same dictionaries, which the hooks' handles refer to
                attributes[name] = hooks
            functional.update(stand_ins)

    return script


# by thread, the scalers and their methods that are running, because a method may call its parent's
_in_scaler: set[tuple[int, int, str]] = set()


def _observe_scalers(owner: type[GradScaler]) -> None:
    for name, observed in (("scale", _observed_scale), ("step", _observed_step)):
        method = vars(owner).get(name)
        if isinstance(method, FunctionType):
            SCALERS.replace(owner, name, observed(method))
    for one in owner.__subclasses__():
        _observe_scalers(one)


def _new_scaler(owner: type[Any], /, **kwargs: Any) -> None:
    super(GradScaler, owner).__init_subclass__(**kwargs)
    _observe_scalers(owner)


@contextlib.contextmanager
def _inside(scaler: GradScaler, method: str) -> Iterator[bool]:
    """Mark a scaler's method as running; yields whether it was not called by the same method of a subclass."""
    key = threading.get_ident(), id(scaler), method
    outermost = key not in _in_scaler
    _in_scaler.add(key)
    try:
        yield outermost
    finally:
        if outermost:
            _in_scaler.discard(key)


def _observed_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(scaler: GradScaler, outputs: Any) -> Any:
        with _inside(scaler, "scale") as outermost:
            result = original(scaler, outputs)
        watching = [one for one in SCALERS.watchers if one.gate.open] if outermost and scaler.is_enabled() else []
        factor = scaler._scale if watching else None  # a disabled scaler has no factor
        if factor is not None:
            factor = factor.detach().clone()  # the scaler changes it in place
            for one in watching:
                one.gate.guard("the state of a GradScaler", functools.partial(one.scales, scaler))
            for (_, tensor), (_, loss) in zip(leaves(result), leaves(outputs), strict=False):
                if tensor.requires_grad:
                    for one in watching:
                        one.gate.guard("the loss scale", functools.partial(one.scaled, tensor, loss, factor))
        return result

    return scale


def _observed_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        watching = [one for one in SCALERS.watchers if one.knows(optimizer)]
        before = [one.calls for one in watching]
        with _inside(scaler, "step") as outermost:
            result = original(scaler, optimizer, *args, **kwargs)
        for one, calls in zip(watching, before, strict=True) if outermost else ():
            if one.calls == calls and one.gate.open:
                one.gate.guard("skipped_step", functools.partial(one.skip, optimizer))
        return result

    return step


class Differentiating(threading.local):
    """Whether this thread is in a differentiating function; torch's functions call each other and themselves."""

    now: bool = False


_differentiating = Differentiating()


def _observed(original: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or _differentiating.now or _nobody_listens():
            return original(*args, **kwargs)
        # iterators such as `model.parameters()` can be consumed only once
        args = tuple(tuple(one) if isinstance(one, Iterator) else one for one in args)
        kwargs = {name: tuple(one) if isinstance(one, Iterator) else one for name, one in kwargs.items()}
        waiting = _tell(tell, args, kwargs)
        _differentiating.now = True
        try:
            result = original(*args, **kwargs)
        finally:
            _differentiating.now = False
        for one in waiting:
            one.gate.guard("gradient_norms", one.over)
        return result

    run_uncompiled(differentiate, with_callees=False)
    return differentiate


def _nobody_listens() -> bool:
    for one in list(BACKWARD.watchers):  # noqa: SIM110 - a generator takes twice as long
        if not one.is_quiet:
            return False
    return True


run_uncompiled(_nobody_listens)


def _tell(tell: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DifferentiationWatcher]:
    """Tell all watchers of a backward; returns those that wait for its end."""
    waiting = []
    for one in list(BACKWARD.watchers):
        # what a receiver or a user's condition differentiates is no loss of the training
        if not one.is_quiet and not one.gate.held:
            one.gate.guard("loss", functools.partial(tell, one, *args, **kwargs))
            if one.waits and tell is _tell_of_backward:
                waiting.append(one)
    return waiting


run_uncompiled(_tell)


def _tell_of_backward(watcher: DifferentiationWatcher, tensors: Any, *args: Any, **kwargs: Any) -> None:
    roots = _as_tuple(tensors)
    if roots and all(isinstance(one, Tensor) for one in roots):  # graph edges have no values
        watcher.backward(*roots)


def _tell_of_grad(watcher: DifferentiationWatcher, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
    roots = _as_tuple(outputs)
    if len(roots) == 1 and isinstance(roots[0], Tensor):
        derivable = bool(args[2] if len(args) > 2 else kwargs.get("create_graph"))
        watcher.grad(roots[0], _as_tuple(inputs), derivable=derivable)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if isinstance(given, Mapping):
        return tuple(given.values())
    return tuple(given) if isinstance(given, Sequence) else (given,)
