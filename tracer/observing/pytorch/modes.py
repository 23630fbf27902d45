"""Keeps observing out of reach of what intercepts PyTorch's operations: modes, tensor subclasses and tracers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch.compiler import is_compiling
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import _disable_current_modes

from tracer.observing.pytorch.autograd import frames


def without_modes() -> AbstractContextManager[Any]:
    """Hide our operations from whatever the program uses to intercept operations.

    These are modes of dispatch and of ``__torch_function__``, and the ``__torch_function__`` of tensor subclasses.
    """
    if _len_torch_dispatch_stack() or _len_torch_function_stack():
        return _without_modes()
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


def with_subclasses() -> AbstractContextManager[Any]:
    """Enable tensor subclasses again, for a forward of the program within `without_modes`."""
    if _len_torch_function_stack():  # its modes would see the forward too
        return contextlib.nullcontext()
    return cast("AbstractContextManager[Any]", torch._C._EnableTorchFunction())


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def traced() -> bool:
    """Whether a forward only serves to trace the model, and is no pass of the training.

    This is the case under ``torch.jit.trace``, ``torch.fx.symbolic_trace``, ``make_fx``, and an export without Dynamo.
    Our copies would become a part of the traced graph.
    """
    if _get_tracing_state() is not None or is_compiling() or _traces_symbolically():
        return True
    return _len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(_PROXY) is not None


def inspected() -> bool:
    """Whether a forward runs inside code that only finds out what a model is, and throws the result away."""
    for frame in frames():
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(_INSPECTORS) or (name == _STAGE and frame.f_code.co_name in _INFERENCES):
            return True
    return False


_INSPECTORS = (
    "torch.jit._trace", "torch.onnx", "torch.utils.tensorboard", "torch.export", "torchinfo", "torchsummary",
    "torchview", "thop", "fvcore.nn", "ptflops", "calflops", "lightning.pytorch.utilities.model_summary",
    "pytorch_lightning.utilities.model_summary",
)  # fmt: skip
"""Modules of torch, and of libraries that print summaries or count operations, which call models for nothing else."""
_STAGE = "torch.distributed.pipelining.stage"
_INFERENCES = ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")
"""Functions of `_STAGE` by which stages of a pipeline learn the shapes of each other's tensors."""

_PROXY = torch._C._TorchDispatchModeKey.PROXY
# the older name gives a warning in newer versions
_traces_symbolically: Callable[[], bool] = getattr(
    _symbolic_trace, "is_fx_symbolic_tracing", _symbolic_trace.is_fx_tracing
)
