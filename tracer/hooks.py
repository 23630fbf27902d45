"""What PyTorch calls, and what is done to the tensors that it hands over: hooks, pytree leaves, wrappers, copies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pkgutil
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import (
    _current_graph_task_id,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from tracer.compiled import name_hook, observe_in_graph, run_uncompiled
from tracer.errors import raised_by_signal
from tracer.memory import SMALLEST, Memory

if TYPE_CHECKING:
    from tracer.exporter import Exporter


_NO_MODES = contextlib.nullcontext()
_NEAREST = 256
"""How many nodes of a graph are looked at."""


def without_modes() -> AbstractContextManager[Any]:
    """Let modes of the program's see only what the program does: those of dispatch and of ``__torch_function__``."""
    if not (_len_torch_dispatch_stack() or _len_torch_function_stack()):
        return _NO_MODES
    return _without_modes()


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class Hook:
    """A hook of an exporter; in a copy or a pickle of what it hangs on, a function that does nothing."""

    __slots__ = (
        "__weakref__",
        "_exporter",
        "_idle",
        "_inner",
        "_of_optimizer",
        "fired",
        "gradients",
        "method",
        "name",
        "off",
        "site",
    )

    def __init__(self, exporter: Exporter, method: str, name: str, gradients: bool = False) -> None:
        self._exporter = weakref.ref(exporter)
        self._idle: Callable[[Exporter, tuple[Any, ...]], bool] | None = getattr(type(exporter), f"_idle{method}", None)
        self._inner = method in ("_before_forward", "_after_forward")
        self._of_optimizer = method in ("_before_optimizer", "_after_optimizer")
        self.method = method
        self.name = name
        self.gradients = gradients  # whether they may be wanted of what this hook sees
        self.fired = False
        self.off = False
        self.site = name_hook(self, exporter.number)

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():  # state that changes would recompile the graph at every step
            if self.site:
                return observe_in_graph(self, *args)
            if self._of_optimizer:
                # Runs this between graphs. A step is never one graph: it has breaks of torch's own.
                torch._dynamo.graph_break()
            return None
        exporter = self._exporter()
        if exporter is None:
            return None
        if self.fired and self._inner:
            running = exporter._pass
            if running.depth and not running.listening:  # a step that nobody records: no more than this
                return None
        self._tell(exporter, args)
        return None

    def tell(self, *args: Any) -> None:
        """Tell the exporter what this hook saw; what fails there does not reach the training."""
        exporter = self._exporter()
        if exporter is None:
            return
        running = exporter._pass
        if not (self.fired and self._inner and running.depth and not running.listening):
            self._tell(exporter, args)

    def _tell(self, exporter: Exporter, args: tuple[Any, ...]) -> None:
        if self.off or not (exporter._attached and exporter._enabled):
            return
        try:
            if self.fired and self._idle is not None and self._idle(exporter, args):
                return
            if is_compiling():  # which an export may do without Dynamo
                return
            self.fired = True
            if _get_tracing_state() is not None:  # torch.jit.trace would record our copies
                return
            with exporter._lock, without_modes():
                getattr(exporter, self.method)(self.name, *args)
        except Exception as error:
            if exporter.strict or raised_by_signal(error):
                raise
            self.off = not (self._of_optimizer or self.method in ("_before_root", "_after_root"))
            what = f"module {self.name!r}" if self.name else self.method.strip("_").replace("_", " ")
            exporter._problem(what, f"{type(error).__name__}: {error}")

    def gradient_of(self, kind: str, leaf: str, call: int, tag: str, at: tuple[int, int, int]) -> GradientHook | None:
        """The hook for the gradient of what this hook saw."""
        exporter = self._exporter()
        return None if exporter is None else GradientHook(exporter, kind, self.name, leaf, call, tag, at)

    def __reduce__(self) -> tuple[Any, ...]:
        # a callable of the standard library that takes anything and returns None: what is loaded needs no tracer
        return getattr, (contextlib.nullcontext(), "__exit__")


run_uncompiled(Hook.__call__)


class GradientHook:
    """Sees the gradient of one tensor of one forward pass."""

    __slots__ = ("_exporter", "at", "call", "handle", "kind", "leaf", "path", "scale", "tag")

    def __init__(
        self,
        exporter: Exporter,
        kind: str,
        path: str,
        leaf: str,
        call: int,
        tag: str,
        at: tuple[int, int, int],
        scale: Tensor | None = None,
    ) -> None:
        self._exporter = weakref.ref(exporter)
        self.kind = kind
        self.path = path
        self.leaf = leaf
        self.call = call
        self.tag = tag
        self.at = at
        self.scale = scale  # of the backward in which the forward was computed again
        self.handle: Any = None

    def __call__(self, gradient: Tensor | None) -> None:
        if self.handle is not None:
            self.handle.remove()
        exporter = self._exporter()
        if gradient is None:  # the node has several outputs, and no gradient came back to this one
            return
        if exporter is None or not (exporter._attached and exporter._enabled):
            return
        try:
            with exporter._lock, without_modes():
                exporter._gradient(self, gradient)
        except Exception as error:
            if exporter.strict or raised_by_signal(error):
                raise
            exporter._give_up(self.kind, self.path, error)


class ScaleHook:
    """Sits on a loss that a GradScaler has multiplied, and tells an exporter when a backward begins there."""

    __slots__ = ("_exporter", "scale")

    def __init__(self, exporter: Exporter, scale: Tensor) -> None:
        self._exporter = weakref.ref(exporter)
        self.scale = scale

    def __call__(self, gradient: Tensor) -> None:
        exporter = self._exporter()
        if exporter is not None:
            with exporter._lock:
                exporter._scales[_current_graph_task_id()] = self.scale


class LossFunction:
    """Stands in for a function of ``torch.nn.functional`` while it is observed."""

    __wrapped__: Callable[..., Any]
    __name__: str

    def __init__(self, exporter: Exporter, original: Callable[..., Any]) -> None:
        self._exporter = weakref.ref(exporter)
        functools.update_wrapper(self, original, updated=())

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)  # as functions are in a class

    def __reduce__(self) -> tuple[Any, ...]:
        # what holds the function, such as a model, can be copied and pickled, and finds torch's own where it is loaded
        return pkgutil.resolve_name, (f"torch.nn.functional:{self.__name__}",)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        exporter = self._exporter()
        if exporter is None or exporter._pass.in_loss or traced():
            return self.__wrapped__(*args, **kwargs)
        exporter._pass.in_loss = True  # some losses are made of others
        try:
            output = self.__wrapped__(*args, **kwargs)
        finally:
            exporter._pass.in_loss = False
        if exporter._attached and exporter._enabled:
            exporter._guard("loss", lambda: exporter._loss_seen(self.__wrapped__, args, kwargs, output))
        return output


_unscripted: weakref.WeakSet[Exporter] = weakref.WeakSet()
_script: Any = None


def watch_scripting(exporter: Exporter) -> None:
    """Let ``torch.jit.script``, which compiles what it finds, find nothing of this exporter's, nor of others'."""
    global _script
    if exporter not in _unscripted:
        _unscripted.add(exporter)
        weakref.finalize(exporter, _settle_scripting).atexit = False
    original = getattr(torch.jit._script, "_script_impl", None)
    if _script is None and original is not None:
        _script = _as_unwatched(original)
        vars(torch.jit._script)["_script_impl"] = _script


def unwatch_scripting(exporter: Exporter) -> None:
    """Undo `watch_scripting`; without any, torch's own function is back."""
    _unscripted.discard(exporter)
    _settle_scripting()


def _settle_scripting() -> None:
    global _script
    if _script is not None and not [*_unscripted]:
        if vars(torch.jit._script)["_script_impl"] is _script:  # else another has put its own around it, which may stay
            vars(torch.jit._script)["_script_impl"] = _script.__wrapped__
        _script = None


def _as_unwatched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def script(obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:  # as torch calls its own: by name
        functional = vars(torch.nn.functional)
        stand_ins = {name: one for name, one in functional.items() if isinstance(one, LossFunction)}
        hooked: list[tuple[dict[str, Any], str, dict[int, Any]]] = []
        for one in nn.Module.modules(obj) if isinstance(obj, nn.Module) else ():
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


_scaled: weakref.WeakSet[Exporter] = weakref.WeakSet()
_scaler_methods: dict[tuple[type[GradScaler], str], Callable[..., Any]] = {}
_in_scaler: set[tuple[int, str]] = set()  # scalers and methods that run, because one may call that of its parent


def watch_scalers(exporter: Exporter) -> None:
    """Let an exporter know of losses that a GradScaler multiplies, and of steps that it skips.

    In these torch calls none of the optimizer's hooks. Subclasses may have methods of their own, as that of FSDP has.
    """
    if exporter not in _scaled:
        _scaled.add(exporter)
        weakref.finalize(exporter, _settle_scalers).atexit = False  # one that is dropped leaves nothing, either
    if not _scaler_methods:
        _observe_scalers(GradScaler)
        setattr(GradScaler, "__init_subclass__", classmethod(_new_scaler))  # noqa: B010 - a type checker calls it wrong


def unwatch_scalers(exporter: Exporter) -> None:
    """No longer let an exporter know; without any, torch's own methods are back."""
    _scaled.discard(exporter)
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


_told_of_backward: weakref.WeakSet[Exporter] = weakref.WeakSet()
_backward: Callable[..., None] | None = None  # what stands in the place of torch's


def watch_backward(exporter: Exporter) -> None:
    """Let an exporter know on what ``backward`` is called, for a loss that a library computes."""
    global _backward
    if exporter not in _told_of_backward:
        _told_of_backward.add(exporter)
        weakref.finalize(exporter, _settle_backward).atexit = False
    if _backward is None:
        _backward = _observed_backward(Tensor.backward)
        setattr(Tensor, "backward", _backward)  # noqa: B010 - mypy forbids to assign it


def unwatch_backward(exporter: Exporter) -> None:
    """No longer let an exporter know; without any, the method is as it was."""
    _told_of_backward.discard(exporter)
    _settle_backward()


def _settle_backward() -> None:
    global _backward
    if _backward is not None and not [*_told_of_backward]:
        if Tensor.backward is _backward:  # else another program has put its own around it, which may stay
            setattr(Tensor, "backward", _backward.__wrapped__)  # type: ignore[attr-defined]  # noqa: B010
        _backward = None


def _observed_backward(original: Callable[..., None]) -> Callable[..., None]:
    running = Backward()

    @functools.wraps(original)
    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        for one in list(_told_of_backward) if _backward is backward and not running.of(tensor) else ():
            one._guard("loss", functools.partial(one.backward_called, tensor))
        running.call(original, tensor, *args, **kwargs)

    return backward


class Backward(threading.local):
    """Of which tensor a thread is in the ``backward``.

    Torch calls the method anew, of the same tensor, for subclasses of tensors, and while there is a default device.
    """

    _tensor: Tensor | None = None

    def of(self, tensor: Tensor) -> bool:
        """Whether this thread is in the ``backward`` of this tensor."""
        return self._tensor is tensor

    def call(self, original: Callable[..., None], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call the method."""
        before, self._tensor = self._tensor, tensor
        try:
            original(tensor, *args, **kwargs)
        finally:
            self._tensor = before


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
        watching = [one for one in _scaled if one._attached and one._enabled] if scaler.is_enabled() else []
        factor = scaler._scale if watching else None  # a scaler that is not enabled has none
        if factor is not None:
            factor = factor.detach().clone()  # which the scaler changes in place
            for (_, tensor), (_, loss) in zip(leaves(result), leaves(outputs), strict=False):
                if tensor.requires_grad:
                    for one in watching:
                        one._guard("the loss scale", functools.partial(one._loss_scaled, tensor, loss, factor))
        return result

    return scale


def _observed_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        key = id(scaler), "step"
        if key in _in_scaler:
            return original(scaler, optimizer, *args, **kwargs)
        watching = [one for one in _scaled if any(known is optimizer for known in one._optimizers)]
        before = [one.optimizer_calls for one in watching]
        _in_scaler.add(key)
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            _in_scaler.discard(key)
        for one, calls in zip(watching, before, strict=True):
            if one.optimizer_calls == calls and one._attached and one._enabled:
                one._guard("skipped_step", functools.partial(one._skipped_step, optimizer))
        return result

    return step


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients or autocast; afterwards modes, buffers and random generators are as before."""
    modes = [(one, one.training) for one in model.modules()]
    buffers = [
        (one, name, buffer, buffer.detach().clone(), buffer._version)
        for one in model.modules()
        for name, buffer in one._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.autocast(device_type, enabled=False):
            model.eval()
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for one, mode in modes:
            one.training = mode
        with torch.no_grad():
            for one, name, buffer, content, version in buffers:
                if buffer._version != version:
                    buffer.copy_(content)
                if one._buffers.get(name) is not buffer:
                    one._buffers[name] = buffer


def leaves(value: Any) -> list[tuple[str, Tensor]]:
    """The tensors in a structure, each with its path; a tensor that is alone has the empty path.

    Knows tuples, named tuples, lists, mappings and dataclasses (which ``torch.utils._pytree`` does not flatten),
    nested;
    everything else is no tensor and is left out.

    Examples
    --------
    >>> x = torch.zeros(1)
    >>> [path for path, _ in leaves((x, (x, x), None, {"logits": x}))]
    ['0', '1.0', '1.1', '3.logits']
    >>> [path for path, _ in leaves((x, None))]
    ['']
    """
    if type(value) is Tensor:  # what nearly all modules return
        return [("", value)]
    found: list[tuple[str, Tensor]] = []
    _walk(value, "", found)
    return [("", found[0][1])] if len(found) == 1 else found


def _walk(value: Any, path: str, found: list[tuple[str, Tensor]]) -> None:
    if isinstance(value, Tensor):
        found.append((path, value))
        return
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        return
    for name, part in parts:
        _walk(part, f"{path}.{name}" if path else str(name), found)


def rows_of(part: slice, tensor: Tensor) -> Tensor:
    """Some rows of a tensor; the whole of a scalar."""
    return tensor[part] if tensor.ndim else tensor


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure of a probe's inputs (tuples, lists, mappings) with the function's results for its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(part, function) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map_tensors(part, function) for part in value)
    return [map_tensors(part, function) for part in value] if isinstance(value, list) else value


def arguments_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A call's arguments as one structure: positional ones by their numbers, the others by their names."""
    if not kwargs:
        return args
    return {**{str(index): value for index, value in enumerate(args)}, **kwargs}


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    # looked up at every loss; of the function below a bound method, so that no module is kept alive
    return inspect.signature(function)


def output_and_labels(
    loss: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Which arguments of a call of a loss are the network's output and the labels, whatever their order.

    Labels are the parameter called ``target`` or ``targets``, or in a loss of the user's own the second tensor; a loss
    such as ``triplet_margin_loss`` has none.

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


def is_part_of_a_loss(loss: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a loss function was asked for a sum, or for each datapoint's loss: the caller makes the loss of it.

    Examples
    --------
    >>> x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    >>> function = torch.nn.functional.cross_entropy
    >>> is_part_of_a_loss(function, (x, y), {"reduction": "sum"}), is_part_of_a_loss(function, (x, y), {})
    (True, False)
    """
    try:
        given = _signature(loss).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return False
    means = given.get("size_average") is not False and given.get("reduce") is not False  # torch's older names
    return given.get("reduction", "mean") in ("sum", "none") or not means


def unobservable(tensor: Tensor) -> str | None:
    """Why a tensor's values cannot be copied, or None if they can."""
    if type(tensor) is not Tensor and is_lazy(tensor):
        return "a lazy parameter has no values before the first forward"
    if tensor.is_meta or (type(tensor) is not Tensor and isinstance(tensor, FakeTensor)):
        return "a meta tensor has no values"
    if tensor.is_quantized:
        return "a quantized tensor is not supported"
    if tensor.is_nested:
        return "a nested tensor is not supported"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return "while a CUDA graph is captured nothing is computed"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside vmap or grad of torch.func a tensor has no values of its own"
    return None


def skipped_inside(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer, which a GradScaler does not call off, has found infinities and not moved.

    On a CUDA device this waits for the answer, without which the steps cannot be counted; while a CUDA graph is
    captured there is none.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if not isinstance(found_inf, Tensor) or (found_inf.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(found_inf.item())


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    return one is other or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def checkpointing() -> bool:
    """Whether a forward without gradients is the first one of a reentrant checkpoint, so part of a training."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass: a checkpoint's second forward."""
    return _current_graph_task_id() != -1


def traced() -> bool:
    """Whether a forward only serves to find out what it does: torch.jit.trace, or an export without Dynamo.

    Our copies would become a part of what is found.
    """
    return _get_tracing_state() is not None or is_compiling()


def node_of(tensor: Tensor) -> int | None:
    """The number of a tensor's node in its graph, which no other node of its thread has; None without one."""
    return None if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def made_of(tensor: Tensor, nodes: Collection[int]) -> bool:
    """Whether one of these nodes is a tensor's own, or one of the nearest that it is made of."""
    if not nodes or tensor.grad_fn is None:
        return False
    waiting: deque[Any] = deque([tensor.grad_fn])
    for _ in range(_NEAREST):
        if not waiting:
            break
        node = waiting.popleft()
        if node._sequence_nr() in nodes:
            return True
        waiting.extend(one for one, _ in node.next_functions if one is not None)
    return False


def next_node() -> int:
    """The number that the next node of this thread's graph gets."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def backward_node() -> int | None:
    """The number of the checkpoint (or other function written in Python) whose backward runs."""
    node: Any = torch._C._current_autograd_node()
    return int(node._sequence_nr()) if isinstance(node, BackwardCFunction) else None


_STEP = Optimizer.profile_hook_step(len).__code__
"""What torch puts around `step` of every optimizer, to run the hooks."""


def steps_nest(optimizer: Optimizer) -> bool:
    """Whether an optimizer's class has a `step` that may call that of a parent, which has one, too."""
    return _calls_parent(type(optimizer))  # type: ignore[arg-type]  # mypy asks the instances whether they can be hashed


@functools.lru_cache(maxsize=64)
def _calls_parent(one: Any) -> bool:
    return sum("step" in vars(parent) for parent in one.__mro__) > 2  # one is Optimizer's own


def steps_within(optimizer: Optimizer) -> bool:
    """Whether the hooks run of a step inside a step: a subclass that calls its parent's `step` has them run for both.

    Looked for among the calls, because a count would be wrong for ever after a step that raised; but only where a class
    and a parent of it both have a `step`.
    """
    if not steps_nest(optimizer):
        return False
    running = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None and running < 2:
        if frame.f_code is _STEP and frame.f_locals.get("self") is optimizer:
            running += 1
        frame = frame.f_back
    return running > 1


def opaque(output: Any) -> bool:
    """Whether a module's output may hold tensors that `leaves` does not find."""
    return not isinstance(output, type(None) | bool | int | float | str | Mapping | tuple | list) and not (
        dataclasses.is_dataclass(output)
    )


def ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one, which can be copied, with nothing special to it that a copy of it would keep."""
    return (
        type(tensor) is Tensor
        and (tensor.is_cpu or (tensor.is_cuda and not torch.cuda.is_current_stream_capturing()))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def copied(tensor: Tensor, memory: Memory) -> Tensor:
    """A dense copy of an observable tensor that needs no gradient, in memory that was used before where that pays.

    What is only marked as conjugated or negated is so in the copy.
    """
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    target = space_for(tensor, memory) if tensor.nbytes >= SMALLEST else None
    if target is not None:
        return target.copy_(tensor)
    # to name a memory format takes a third as long as a small copy
    return tensor.clone() if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def space_for(like: Tensor, memory: Memory) -> Tensor | None:
    """A tensor of the dtype and shape of a dense tensor of the processor; None where new memory is as good."""
    if not like.is_cpu or type(like) is not Tensor:
        return None
    block = memory.take(like.nbytes)
    if block is None:
        return None
    dtype = _NUMPY.get(like.dtype)
    if dtype is None:
        return torch.from_numpy(block[: like.nbytes]).view(like.dtype).view(like.shape)
    return torch.from_numpy(block[: like.nbytes].view(dtype).reshape(like.shape))


_NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
}


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """A gradient without what its loss was multiplied with; of float16 in float32, because it may be too small."""
    wide = gradient.float() if gradient.dtype is torch.float16 else gradient
    return wide / scale.to(wide.device)
