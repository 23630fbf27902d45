"""Looks into the graph behind a tensor, to find out what a loss is made of."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tracer.observing.pytorch.autograd import next_node

_NEAREST = 1024
"""How many nodes of a graph are looked at for what is near."""
_WHOLE = 100_000
"""And at most for what may be anywhere."""

Node: TypeAlias = "tuple[int, int]"
"""A node of a graph: the number of its thread, and its own number there."""


class _Thread(threading.local):
    """A number that no other thread has, or had: torch numbers the nodes of each thread anew."""

    def __init__(self) -> None:
        self.number = next(_THREADS)


_THREADS = itertools.count()
_thread = _Thread()


def node_of(tensor: Tensor) -> Node | None:
    """A tensor's node in its graph, as the thread and the number that no other node of it has; None without one."""
    function = tensor.grad_fn  # each look at it makes an object
    return None if function is None else (_thread.number, function._sequence_nr())


def next_of_thread() -> Node:
    """The node that this thread's graph gets next."""
    return _thread.number, next_node()


def behind(tensor: Tensor, inner_of: Callable[[Any], Iterable[Any]] | None = None) -> Iterator[Any]:
    """The nodes of the graph behind a tensor, each once, the nearest first.

    Parameters
    ----------
    tensor : Tensor
    inner_of : callable, optional
        Gives the nodes behind a node that are looked at; by default all.
    """
    inner_of = inner_of or _inner_of
    waiting: deque[Any] = deque([] if tensor.grad_fn is None else [tensor.grad_fn])
    seen = {*waiting}  # which keeps them, so that torch makes no other objects of them
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
    """Whether a tensor was made of others that there were before some node of this thread, and of nothing else.

    As a metric that is asked for after a step, of what the network gave in it. A new forward begins with parameters.

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
    """Whether one of some nodes is among the nearest that a tensor was made of."""
    thread = _thread.number
    first = min((number for one, number in nodes if one == thread), default=None)
    if first is None:
        return False
    # leaves are made of nothing, and a node has a higher number than those that it was made of
    near = behind(
        tensor, lambda node: [one for one in _inner_of(node) if one.next_functions and one._sequence_nr() >= first]
    )
    return any((thread, node._sequence_nr()) in nodes for node in itertools.islice(near, _NEAREST))


_SAME_BUT_FOR_A_FACTOR = (
    "Mul", "Div", "Mean", "Sum", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias",
    "ToCopy",
)  # fmt: skip
"""Operations whose result is what they got, or its sum or mean, multiplied with a number."""


def multiple_of(tensor: Tensor, nodes: Container[Node]) -> Node | None:
    """The one of some nodes that a tensor is, or is a sum, a mean or a multiple of, and of nothing else.

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
    """Whether a product or quotient of something that has a graph is one with a single number, which has none."""
    at = next(place for place, (one, _) in enumerate(node.next_functions) if one is not None)
    try:
        factor = getattr(node, "_saved_self" if at else "_saved_other", None)
    except RuntimeError:  # a backward has freed what the node kept
        return False
    return not isinstance(factor, Tensor) or factor.numel() == 1


def belongs_to_others(tensor: Tensor, own: Container[int]) -> bool:
    """Whether a tensor was made of parameters, and of none of those with these ids.

    A tensor of which no parameters are found, as one that came through a reentrant checkpoint, belongs to nobody else.

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
