"""What PyTorch calls: the hooks of an exporter, and where in a forward or backward of PyTorch's they run."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._C import (
    _current_graph_task_id,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from tracer.errors import raised_by_signal
from tracer.observing.pytorch.compiled import name_hook, observe_in_graph, run_uncompiled
from tracer.observing.pytorch.hanging import on_gradient, on_gradient_once

if TYPE_CHECKING:
    from tracer.observing.exporter import Exporter

_CALL = nn.Module._call_impl.__code__
"""What torch runs for each call of a module, with its hooks."""


def without_modes() -> AbstractContextManager[Any]:
    """Let what the program has in torch's way see only what the program does.

    Those are modes of dispatch and of ``__torch_function__``, and that method of subclasses of tensors.
    """
    if _len_torch_dispatch_stack() or _len_torch_function_stack():
        return _without_modes()
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


def with_subclasses() -> AbstractContextManager[Any]:
    """Let subclasses of tensors do what they do, for a forward of the program's within `without_modes`."""
    if _len_torch_function_stack():  # whose modes would see it, too
        return contextlib.nullcontext()
    return cast("AbstractContextManager[Any]", torch._C._EnableTorchFunction())


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class Hook:
    """A hook of an exporter."""

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
        self._inner = method in ("_before_forward", "_after_forward", "_after_parametrization", "_after_replaced")
        self._of_optimizer = method in ("_before_optimizer", "_after_optimizer")
        self.method = method
        self.name = name
        self.gradients = gradients  # whether they may be wanted of what this hook sees
        self.fired = False
        self.off = False
        self.site = name_hook(self, exporter.number)

    def __call__(self, *args: Any) -> Any:
        """Tell the exporter what this hook saw; what fails there does not reach the training."""
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
        if self._inner and self.fired:
            running = exporter.passes.now
            if running.depth and not running.listening:  # a step that nobody records: no more than this
                return None
        if self.off or not (exporter._attached and exporter._problems.enabled):
            return None
        try:
            if self.fired and self._idle is not None and self._idle(exporter, args):
                return None
            if traced():
                return None
            self.fired = True
            with exporter._lock, without_modes():
                getattr(exporter, self.method)(self.name, *args)
        except Exception as error:
            if exporter.strict or raised_by_signal(error):
                raise
            self.off = not (self._of_optimizer or self.method in ("_before_root", "_after_root"))
            what = f"module {self.name!r}" if self.name else self.method.strip("_").replace("_", " ")
            exporter._problems.note(what, f"{type(error).__name__}: {error}")
        return None

    def gradient_of(self, kind: str, leaf: str, call: int, tag: str, at: Any) -> GradientHook | None:
        """The hook for the gradient of what this hook saw."""
        exporter = self._exporter()
        return None if exporter is None else GradientHook(exporter, kind, self.name, leaf, call, tag, at)

    def __reduce__(self) -> tuple[Any, ...]:
        # for a pickler that does not leave hooks out as `hanging` has it: a callable of the library, which takes
        # anything and returns None
        return getattr, (contextlib.nullcontext(), "__exit__")


run_uncompiled(Hook.__call__)


class GradientHook:
    """Sees the gradient of one tensor of one forward pass."""

    __slots__ = ("_exporter", "at", "call", "kind", "leaf", "path", "scale", "tag")

    __torch_unserializable__ = True  # torch warns of every other hook on a tensor that is pickled

    def __init__(
        self,
        exporter: Exporter,
        kind: str,
        path: str,
        leaf: str,
        call: int,
        tag: str,
        at: Any,
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

    def __call__(self, gradient: Tensor | None) -> None:
        exporter = self._exporter()
        if gradient is None:  # the node has several outputs, and no gradient came back to this one
            return
        if exporter is None or not (exporter._attached and exporter._problems.enabled):
            return
        try:
            with exporter._lock, without_modes():
                exporter._gradient(self, gradient)
        except Exception as error:
            if exporter.strict or raised_by_signal(error):
                raise
            exporter.demand.give_up(self.kind, self.path, error)

    def tell_shared(self) -> None:
        """Say that this gradient may be another forward's."""
        exporter = self._exporter()
        if exporter is not None:
            why = "it is of a tensor that several forwards used before a backward, and is recorded for each of them"
            exporter._problems.note(f"which forward {self.kind} of {self.path!r} belongs to", why)


class ComputedHook:
    """Sees the gradient of a weight that was computed for a forward."""

    __slots__ = ("__weakref__", "_exporter", "path")

    __torch_unserializable__ = True

    def __init__(self, exporter: Exporter, path: str) -> None:
        self._exporter = weakref.ref(exporter)
        self.path = path

    def __call__(self, gradient: Tensor | None) -> None:
        exporter = self._exporter()
        if gradient is None or exporter is None or not (exporter._attached and exporter._problems.enabled):
            return
        try:
            with exporter._lock, without_modes():
                exporter._gradient_of_computed(self.path, gradient)
        except Exception as error:
            if exporter.strict or raised_by_signal(error):
                raise
            exporter._problems.note(f"the gradient of {self.path!r}", f"{type(error).__name__}: {error}")


class Undifferentiated:
    """How many training passes of a step no backward has gone through yet."""

    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = 0

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Count a pass with these outputs, until a gradient comes to one of them."""
        hook = PassHook(self)
        for one in outputs:
            if one.grad_fn is not None:
                on_gradient_once(one, hook)
                hook.waits = True
        self.passes += hook.waits


class PassHook:
    """Sees whether a backward goes through a pass."""

    __slots__ = ("__weakref__", "_counted", "waits")

    __torch_unserializable__ = True

    def __init__(self, counted: Undifferentiated) -> None:
        self._counted = counted
        self.waits = False

    def __call__(self, gradient: Tensor | None) -> None:
        if self.waits and gradient is not None:
            self.waits = False
            self._counted.passes -= 1


class LeafHook:
    """Sees the gradients of a tensor that is there for more than one call: a parameter that a module returns.

    What a backward brings is of the calls since the last one; if there are none, it went through the same once more.
    """

    __slots__ = ("__weakref__", "_latest", "_tensor", "_waiting", "handle")

    __torch_unserializable__ = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._waiting: list[tuple[int, GradientHook]] = []
        self._latest: list[tuple[int, GradientHook]] = []
        self.handle = on_gradient(tensor, self)

    def of(self, tensor: Tensor) -> bool:
        """Whether it is this tensor's."""
        return self._tensor() is tensor

    def wait(self, forward: int, hook: GradientHook) -> None:
        """Have another call, in a forward of this number, get what the next backward brings."""
        self._waiting.append((forward, hook))

    def __call__(self, gradient: Tensor | None) -> None:
        if self._waiting:
            self._latest, self._waiting = self._waiting, []
        if len({forward for forward, _ in self._latest}) > 1:
            self._latest[0][1].tell_shared()
        for _, hook in self._latest:
            hook(gradient)


class ScaleHook:
    """Sits on a loss that a GradScaler has multiplied, and tells an exporter when a backward begins there."""

    __slots__ = ("_exporter", "scale")

    __torch_unserializable__ = True

    def __init__(self, exporter: Exporter, scale: Tensor) -> None:
        self._exporter = weakref.ref(exporter)
        self.scale = scale

    def __call__(self, gradient: Tensor) -> None:
        exporter = self._exporter()
        if exporter is not None:
            with exporter._lock:
                exporter._scales[_current_graph_task_id()] = self.scale


def _running(function: Any) -> FrameType | None:
    """The innermost call of a function that has not returned."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame


def calls_running(module: nn.Module) -> int:
    """How many calls of a module in this thread have not returned."""
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count


def checkpointing() -> bool:
    """Whether a forward without gradients is the first one of a reentrant checkpoint, so part of a training."""
    return _running(CheckpointFunction.forward) is not None


def checkpointed_inputs() -> tuple[Any, ...] | None:
    """What a reentrant checkpoint gets whose first forward runs; None if none does."""
    frame = _running(CheckpointFunction.forward)
    return None if frame is None else tuple(frame.f_locals.get("args", ()))


def recomputing_reentrant() -> bool:
    """Whether this is the second forward of a reentrant checkpoint."""
    return _running(CheckpointFunction.backward) is not None


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass: a checkpoint's second forward."""
    return _current_graph_task_id() != -1


def traced() -> bool:
    """Whether a forward only serves to find out what it does, and is none of the training.

    As under ``torch.jit.trace``, ``torch.fx.symbolic_trace``, ``make_fx`` and an export without Dynamo. Our copies
    would become a part of what is found.
    """
    if _get_tracing_state() is not None or is_compiling() or _traces_symbolically():
        return True
    return _len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(_PROXY) is not None


_PROXY = torch._C._TorchDispatchModeKey.PROXY
# its older name warns in newer versions
_traces_symbolically: Callable[[], bool] = getattr(
    _symbolic_trace, "is_fx_symbolic_tracing", _symbolic_trace.is_fx_tracing
)


next_node: Callable[[], int] = _get_sequence_nr
"""The number that the next node of this thread's graph gets."""


def backward_node() -> int | None:
    """The number of the checkpoint (or other function written in Python) whose backward runs."""
    node: Any = torch._C._current_autograd_node()
    return int(node._sequence_nr()) if isinstance(node, BackwardCFunction) else None
