"""Which forward or backward of PyTorch is running, what intercepts its operations, and the graph behind a loss."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch._C import (
    _current_autograd_node,
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


_NEAREST = 1024
"""How many nodes of a graph are searched for something near the tensor."""
_WHOLE = 100_000
"""How many nodes are searched for something that may be anywhere."""

Node: TypeAlias = "tuple[int, int]"
"""A node of a graph: the number of its thread, and its sequence number in the thread."""


class _Thread(threading.local):
    """A number that no other thread has or had, because torch numbers nodes within each thread."""

    def __init__(self) -> None:
        self.number = next(_THREADS)


_THREADS = itertools.count()
_thread = _Thread()


def node_of(tensor: Tensor) -> Node | None:
    """A tensor's node in its graph; None if it has no graph."""
    function = tensor.grad_fn  # each access creates an object
    return None if function is None else (_thread.number, function._sequence_nr())


def next_of_thread() -> Node:
    """The next node of this thread's graph."""
    return _thread.number, next_node()


def behind(tensor: Tensor, inner_of: Callable[[Any], Iterable[Any]] | None = None) -> Iterator[Any]:
    """The nodes of the graph behind a tensor, each once, the nearest first.

    Parameters
    ----------
    tensor : Tensor
    inner_of : callable, optional
        Returns the nodes behind a node that are to be visited; by default all.
    """
    inner_of = inner_of or _inner_of
    waiting: deque[Any] = deque([] if tensor.grad_fn is None else [tensor.grad_fn])
    seen = {*waiting}  # keeps the objects alive, so that torch creates no others for the same nodes
    while waiting:
        node = waiting.popleft()
        yield node
        for one in inner_of(node):
            if one not in seen:
                seen.add(one)
                waiting.append(one)


def _inner_of(node: Any) -> list[Any]:
    return [one for one, _ in node.next_functions if one is not None]


def looks_back(tensor: Tensor, since: Node | None) -> bool:
    """Whether a tensor was computed only from tensors created before some node of this thread.

    An example is a metric that is computed after a step from the step's output. A new forward begins with parameters.

    Examples
    --------
    >>> weight = torch.ones(2, requires_grad=True)
    >>> output = weight * 2
    >>> since = next_of_thread()
    >>> looks_back(output.view(1, 2).sum(), since), looks_back((weight * 2).sum(), since), looks_back(output, None)
    (True, False, False)
    """
    if since is None or since[0] != _thread.number:
        return False
    first = since[1]
    found = False
    for count, node in enumerate(behind(tensor, lambda one: _inner_of(one) if one._sequence_nr() >= first else ())):
        if count > _NEAREST or not node.next_functions:
            return False
        found = found or node._sequence_nr() < first
    return found


def is_made_of(tensor: Tensor, nodes: Collection[Node]) -> bool:
    """Whether a tensor was made of one of the nodes, searching only the nearest nodes."""
    thread = _thread.number
    first = min((number for one, number in nodes if one == thread), default=None)
    if first is None:
        return False
    # leaves are made of nothing, and a node has a higher number than those that it was made of
    near = behind(
        tensor, lambda node: [one for one in _inner_of(node) if one.next_functions and one._sequence_nr() >= first]
    )
    return any((thread, node._sequence_nr()) in nodes for node in itertools.islice(near, _NEAREST))


def is_made_within(tensor: Tensor, spans: Collection[tuple[Node, int]]) -> bool:
    """Whether a tensor was made of a node in one of some spans of this thread's graph, searching the nearest nodes.

    A span goes from its first node to before a number. A function written in Python, such as a checkpoint or a compiled
    graph, has the number before those of what it calls, so it is in a span that begins inside it.
    """
    thread = _thread.number
    within = [(number, last) for (one, number), last in spans if one == thread]
    if not within:
        return False
    first = min(number for number, _ in within) - 1
    near = behind(
        tensor, lambda node: [one for one in _inner_of(node) if one.next_functions and one._sequence_nr() >= first]
    )
    for node in itertools.islice(near, _NEAREST):
        number = node._sequence_nr()
        for begin, last in within:
            if begin <= number < last or (number == begin - 1 and isinstance(node, BackwardCFunction)):
                return True
    return False


_SAME_BUT_FOR_A_FACTOR = (
    "Mul", "Div", "Mean", "Sum", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias",
    "ToCopy",
)  # fmt: skip
"""Operations whose result is their input, or its sum or mean, times a number."""


def multiple_of(tensor: Tensor, nodes: Container[Node]) -> Node | None:
    """The node, among some nodes, that a tensor is a multiple, a sum or a mean of, and of nothing else.

    Examples
    --------
    >>> weight = torch.ones(2, requires_grad=True)
    >>> term = (weight * 3).square()
    >>> nodes = {node_of(term)}
    >>> [multiple_of(one, nodes) in nodes for one in (term, term.mean() / 4, term.sum() + weight.sum(), -term.sum())]
    [True, True, False, False]
    """
    node = tensor.grad_fn
    for _ in range(_NEAREST):
        if node is None:
            return None
        place = _thread.number, node._sequence_nr()
        if place in nodes:
            return place
        inner = _inner_of(node)
        name = node.name().partition("Backward")[0]
        if len(inner) != 1 or name not in _SAME_BUT_FOR_A_FACTOR:
            return None
        if name in ("Mul", "Div") and not _is_times_a_number(node):
            return None
        node = inner[0]
    return None


def _is_times_a_number(node: Any) -> bool:
    """Whether a product or quotient has a single number without a graph as its other factor."""
    at = next(place for place, (one, _) in enumerate(node.next_functions) if one is not None)
    try:
        factor = getattr(node, "_saved_self" if at else "_saved_other", None)
    except RuntimeError:  # a backward has freed the node's saved tensors
        return False
    return not isinstance(factor, Tensor) or factor.numel() == 1


def belongs_to_others(tensor: Tensor, own: Container[int]) -> bool:
    """Whether a tensor was computed from parameters, none of which has one of these ids.

    A tensor without known parameters, such as one that came through a reentrant checkpoint, does not belong to others.

    Examples
    --------
    >>> one, other = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    >>> own, output = {id(parameter) for parameter in one.parameters()}, one(torch.ones(3, 2))
    >>> [belongs_to_others(tensor, own) for tensor in (output, other(output), other(output.detach()))]
    [False, False, True]
    """
    others = False
    for node in itertools.islice(behind(tensor), _WHOLE):
        if not node.next_functions:
            parameter = getattr(node, "variable", None)
            if id(parameter) in own:
                return False
            others = others or isinstance(parameter, torch.nn.Parameter)
    return others
