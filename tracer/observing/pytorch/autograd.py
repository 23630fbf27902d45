"""Where in a forward or backward of PyTorch's the program is, and what of PyTorch's modes is in its way."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch._C import (
    _current_graph_task_id,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

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


def frames() -> Iterator[FrameType]:
    """The calls of this thread that have not returned, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _running(function: Any) -> FrameType | None:
    """The innermost call of a function that has not returned."""
    return next((frame for frame in frames() if frame.f_code is function.__code__), None)


def calls_running(module: nn.Module) -> int:
    """How many calls of a module in this thread have not returned."""
    return sum(frame.f_code is _CALL and frame.f_locals.get("self") is module for frame in frames())


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
