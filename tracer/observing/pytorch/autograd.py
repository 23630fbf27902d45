"""Determines which PyTorch forward or backward is running."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

_CALL = nn.Module._call_impl.__code__
"""The code that torch runs for each call of a module, including its hooks."""


def frames() -> Iterator[FrameType]:
    """The running calls of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _running(function: Any) -> FrameType | None:
    """The innermost running call of a function."""
    return next((frame for frame in frames() if frame.f_code is function.__code__), None)


def calls_running(module: nn.Module) -> int:
    """How many calls of a module are running in this thread."""
    return sum(frame.f_code is _CALL and frame.f_locals.get("self") is module for frame in frames())


def checkpointing() -> bool:
    """Whether a forward without gradients is the first forward of a reentrant checkpoint, thus part of a training."""
    return _running(CheckpointFunction.forward) is not None


def checkpointed_inputs() -> tuple[Any, ...] | None:
    """The arguments of a reentrant checkpoint whose first forward is running; None if there is none."""
    frame = _running(CheckpointFunction.forward)
    return None if frame is None else tuple(frame.f_locals.get("args", ()))


def recomputing_reentrant() -> bool:
    """Whether the second forward of a reentrant checkpoint is running."""
    return _running(CheckpointFunction.backward) is not None


backward_running: Callable[[], int] = _current_graph_task_id
"""The number of the backward that runs in this thread; `NO_BACKWARD` if there is none."""
NO_BACKWARD = -1


def recomputing() -> bool:
    """Whether this forward runs inside a backward: a checkpoint's second forward."""
    return backward_running() != NO_BACKWARD


next_node: Callable[[], int] = _get_sequence_nr
"""The number that the next node in this thread's graph gets."""


def backward_node() -> int | None:
    """The number of the checkpoint (or other function written in Python) whose backward is running."""
    node: Any = _current_autograd_node()
    return int(node._sequence_nr()) if isinstance(node, BackwardCFunction) else None
