"""Names of modules without wrappers, a model as JSON, and sets of objects compared by identity."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tracer import walking

_AROUND = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The names of the inner module in torch's checkpoint wrapper and the first FSDP."""
_INNER = ("_orig_mod", *_AROUND)
"""These names, and that of torch.compile."""


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper that only forwards calls; None for other modules.

    Examples
    --------
    >>> inner = nn.Linear(2, 2)
    >>> wrapped_by(nn.DataParallel(inner)) is inner, wrapped_by(nn.Sequential(inner)) is None
    (True, True)
    """
    children = module._modules
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return children["module"]
    if not isinstance(module, nn.Module) or not children:
        return None
    return next((children[name] for name in _INNER if name in children and children[name] is not None), None)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside wrappers that call it once per call: compiled, DistributedDataParallel, DataParallel.

    Checkpoint wrappers stay, because the inner forward runs a second time.
    """
    while (inner := wrapped_by(model)) is not None and not set(_AROUND).intersection(model._modules):
        model = inner
    return model


def named_parts(top: nn.Module, prefix: str = "", *, repeat: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Every module once with its dotted path, as by ``named_modules``, without wrappers.

    The module inside a wrapper has the wrapper's path. If two modules would share a path, an underscore is appended to
    the later one's. A wrapper with parameters of its own is listed after its inner module. `repeat`: modules in several
    places are listed once for each.

    Examples
    --------
    >>> model = nn.Sequential(nn.DataParallel(nn.Sequential(nn.Linear(2, 2))))
    >>> [path for path, _ in named_parts(model)]
    ['', '0', '0.0']
    """
    taken: set[str] = set()
    for path, one, wrapper in _walk(top, prefix, None if repeat else set()):
        if wrapper and not one._parameters:
            continue
        while path in taken:
            path += "_"
        taken.add(path)
        yield path, one


def paths_of(top: nn.Module, prefix: str = "") -> Iterator[str]:
    """The dotted paths of a module, of all modules below it, and of their parameters."""
    for path, one in named_parts(top, prefix):
        yield path
        for name in one._parameters.keys():  # noqa: SIM118 - those of a ScriptModule are no dict
            yield f"{path}.{name}" if path else name


def compiled_parts(root: nn.Module) -> list[str]:
    """The paths of the modules below the root that are compiled separately."""
    found = []
    for path, one, _ in _walk(root, "", set()):
        if path and path not in found and ("_orig_mod" in one._modules or getattr(one, "_compiled_call_impl", None)):
            found.append(path)
    return found


def _walk(one: nn.Module, path: str, seen: set[int] | None) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module, and whether it is a wrapper (listed after its inner module); each once, if `seen` is a set."""
    if seen is not None:
        if id(one) in seen:
            return
        seen.add(id(one))
    inner = wrapped_by(one)
    if inner is None:
        yield path, one, False
    else:
        yield from _walk(inner, path, seen)
        yield path, one, True
    for name, child in one._modules.items():
        if child is not None and child is not inner:
            yield from _walk(child, f"{path}.{name}" if path else name, seen)


def summary_of(name: str, model: nn.Module) -> dict[str, Any]:
    """A short description of a model as JSON: its name, class and number of parameters.

    Examples
    --------
    >>> summary_of("head", nn.Linear(3, 2))
    {'name': 'head', 'class': 'torch.nn.modules.linear.Linear', 'parameters': 8}
    """
    counted = sum(0 if is_lazy(one) else one.numel() for one in walking.parameters(model))
    return {"name": name, "class": class_name(model), "parameters": counted}


def structure_of(root: nn.Module) -> dict[str, Any]:
    """The model as JSON: names and classes of modules, settings of convolutions, parameters, tied aliases."""
    names_of: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for path, one in named_parts(root, repeat=True):
        for name, parameter in one._parameters.items():
            if parameter is not None:
                parameters[id(parameter)] = parameter
                names_of.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    return {
        "class": class_name(root),
        "modules": [{"name": name, "class": class_name(one), **_settings(one)} for name, one in named_parts(root)],
        "parameters": [
            {
                "name": names_of[key][0],
                "shape": None if is_lazy(parameter) or parameter.is_nested else list(parameter.shape),
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "requires_grad": parameter.requires_grad,
            }
            for key, parameter in parameters.items()
        ],
        "tied": [names for names in names_of.values() if len(names) > 1],
    }


def class_name(one: nn.Module) -> str:
    """The dotted name of a module's class."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _settings(one: nn.Module) -> dict[str, Any]:
    """Settings of a convolution or dropout that neither its class nor its weights show, as JSON."""
    if isinstance(one, nn.modules.dropout._DropoutNd):
        return {"probability": one.p}
    if not isinstance(one, nn.modules.conv._ConvNd):
        return {}
    said: dict[str, Any] = {name: list(getattr(one, name)) for name in ("stride", "dilation", "output_padding")}
    said["padding"] = one.padding if isinstance(one.padding, str) else list(one.padding)
    return {"convolution": said | {name: getattr(one, name) for name in ("groups", "padding_mode", "transposed")}}


class WeakIdentitySet:
    """A set of objects that are compared by identity and not kept alive. They need not be hashable.

    Examples
    --------
    >>> class Alike:
    ...     __hash__ = None
    ...     def __eq__(self, other):
    ...         return True
    >>> one, another = Alike(), Alike()
    >>> known = WeakIdentitySet()
    >>> known.add(one)
    >>> one in known, another in known, known.alive() == [one]
    (True, False, True)
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, one: object) -> bool:
        known = self._refs.get(id(one))
        return known is not None and known() is one

    def add(self, one: object) -> None:
        """Add an object at the end."""
        if one not in self:
            self._refs = {key: known for key, known in self._refs.items() if known() is not None}
            self._refs[id(one)] = weakref.ref(one)

    def alive(self) -> list[Any]:
        """The objects that still exist, in the order in which they were added."""
        return [one for one in (known() for known in self._refs.values()) if one is not None]

    def discard(self, one: object) -> None:
        """Remove an object, if it is there."""
        self._refs.pop(id(one), None)

    def clear(self) -> None:
        """Remove all objects."""
        self._refs = {}
