"""Wrappers of modules, and paths of inner modules that do not depend on the wrappers.

``DDP(torch.compile(model))`` calls the weights of ``model`` ``module._orig_mod.0.weight``. A wrapper's name says
nothing of the network, and a trace with such paths could not be compared with a trace of the bare model.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

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
