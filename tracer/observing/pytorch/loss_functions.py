"""Loss functions: which there are, what their arguments are, what is made of them, and what stands in for them."""

from __future__ import annotations

import functools
import inspect
import itertools
import pkgutil
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional
from torch import Tensor

from tracer.observing.pytorch.hooks import next_node, traced

if TYPE_CHECKING:
    from tracer.observing.exporter import Exporter


LOSS_FUNCTIONS: tuple[str, ...] = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "ctc_loss",
    "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss",
    "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
)  # fmt: skip
"""The loss functions of ``torch.nn.functional``; the modules of ``torch.nn`` call these."""
_NEAREST = 1024
"""How many nodes of a graph are looked at for what is near."""
_WHOLE = 100_000
"""And at most for what may be anywhere."""

Node = tuple[int, int]


class LossFunction:
    """Stands in for a function of ``torch.nn.functional`` while it is observed."""

    __wrapped__: Callable[..., Any]
    __name__: str

    def __init__(self, exporter: Exporter, original: Callable[..., Any]) -> None:
        self._exporter = weakref.ref(exporter)
        functools.update_wrapper(self, original, updated=())

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)  # as functions are in a class

    def __reduce__(self) -> str | tuple[Any, ...]:
        # what holds the function, such as a model, is copied and pickled as with torch's own, by its name
        name: str = self.__name__
        if getattr(torch.nn.functional, name) is self:
            return name
        return pkgutil.resolve_name, (f"torch.nn.functional:{name}",)  # pickle refuses the name of something else

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        exporter = self._exporter()
        if exporter is None or exporter.passes.now.in_loss or traced():
            return self.__wrapped__(*args, **kwargs)
        exporter.passes.now.in_loss = True  # some losses are made of others
        try:
            output = self.__wrapped__(*args, **kwargs)
        finally:
            exporter.passes.now.in_loss = False
        if exporter._attached and exporter._problems.enabled:
            exporter._guard("loss", lambda: exporter._loss_seen(self.__name__, self.__wrapped__, args, kwargs, output))
        return output


class ModelLoss(torch.nn.Module):
    """Stands for the loss that a model computes itself: called with it, it shows an exporter output, labels and loss.

    That is the loss of an evaluation whatever the training makes of it, because the model calls it so.
    """

    def forward(self, input: Tensor, target: Tensor, loss: Tensor) -> Tensor:  # noqa: A002 - torch's names
        """Give the loss back."""
        return loss


def unpatch(patched: dict[str, LossFunction]) -> None:
    """Take stand-ins for functions of torch away, even if another exporter has put its own around them since."""
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
    if since is None or since[0] != _thread.number or tensor.grad_fn is None:
        return False
    waiting, seen = [tensor.grad_fn], {tensor.grad_fn}
    found = False
    while waiting and len(seen) <= _NEAREST:
        node = waiting.pop()
        if not node.next_functions:
            return False
        if node._sequence_nr() < since[1]:
            found = True
            continue
        for one, _ in node.next_functions:
            if one is not None and one not in seen:
                seen.add(one)
                waiting.append(one)
    return found and not waiting


def is_made_of(tensor: Tensor, nodes: Collection[Node]) -> bool:
    """Whether one of some nodes is among the nearest that a tensor was made of."""
    thread = _thread.number
    first = min((number for one, number in nodes if one == thread), default=None)
    if first is None or tensor.grad_fn is None:
        return False
    waiting: deque[Any] = deque([tensor.grad_fn])
    # nodes are kept, so that no other gets the id of one
    seen = {id(tensor.grad_fn): tensor.grad_fn}
    for _ in range(_NEAREST):
        if not waiting:
            return False
        node = waiting.popleft()
        if (thread, node._sequence_nr()) in nodes:
            return True
        for one, _ in node.next_functions:
            # leaves are made of nothing, and a node has a higher number than those that it was made of
            if one is not None and id(one) not in seen and one.next_functions and one._sequence_nr() >= first:
                seen[id(one)] = one
                waiting.append(one)
    return False


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
        inner = [one for one, _ in node.next_functions if one is not None]
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
    if tensor.grad_fn is None:
        return False
    waiting: deque[Any] = deque([tensor.grad_fn])
    seen = {id(tensor.grad_fn): tensor.grad_fn}
    others = False
    while waiting and len(seen) <= _WHOLE:
        node = waiting.popleft()
        if not node.next_functions:
            parameter = getattr(node, "variable", None)
            if id(parameter) in own:
                return False
            others = others or isinstance(parameter, torch.nn.Parameter)
        for one, _ in node.next_functions:
            if one is not None and id(one) not in seen:
                seen[id(one)] = one
                waiting.append(one)
    return others
