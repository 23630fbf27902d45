"""Loss functions: their names, the meaning of their arguments, and stand-ins for them."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional
from torch import Tensor

from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.modes import traced

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
