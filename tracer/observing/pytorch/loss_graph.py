"""Inspects the autograd graph behind a tensor, to determine what a loss is made of."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from tracer.observing.pytorch.autograd import next_node

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
