"""Finds a module's parts, parameters and buffers without calling any method that its class may override.

A class may use the names ``parameters`` or ``modules`` for something else, or define its own equality, hash or truth
value, and PyTorch's functions call such methods. Here modules are compared by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

_Held = TypeVar("_Held", bound=Tensor)


def children(module: nn.Module) -> list[nn.Module]:
    """The direct children of a module; children that are None are left out.

    Examples
    --------
    >>> class Odd(nn.Sequential):
    ...     def children(self):
    ...         return 5
    >>> children(Odd(nn.ReLU()))
    [ReLU()]
    """
    return [one for one in module._modules.values() if one is not None]


def named_modules(top: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and all below it, each once and by its first dotted path, in the order of torch's ``named_modules``."""
    return _walk(top, prefix, set())


def _walk(one: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(one) not in seen:
        seen.add(id(one))
        yield path, one
        for name, child in one._modules.items():
            if child is not None:
                yield from _walk(child, f"{path}.{name}" if path else name, seen)


def modules(top: nn.Module) -> Iterator[nn.Module]:
    """A module and all below it, each once."""
    return (one for _, one in named_modules(top))


def named_parameters(top: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module and of all below it, each once and by its first dotted path."""
    return _named(top, prefix, lambda one: one._parameters)


def parameters(top: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and of all below it, each once."""
    return (parameter for _, parameter in named_parameters(top))


def trained(*optimizers: Optimizer) -> list[Tensor]:
    """The tensors that optimizers train, in the order of their groups."""
    return [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]


def named_buffers(top: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The buffers of a module and of all below it, each once and by its first dotted path."""
    return _named(top, prefix, lambda one: one._buffers)


def _named(
    top: nn.Module, prefix: str, held_by: Callable[[nn.Module], Mapping[str, _Held | None]]
) -> Iterator[tuple[str, _Held]]:
    seen: set[int] = set()
    for path, owner in named_modules(top, prefix):
        for name, tensor in held_by(owner).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor
