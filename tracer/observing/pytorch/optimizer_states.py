"""The states of an optimizer and a GradScaler as named tensors: reading and restoring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tracer.errors import CaptureError

SCALE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "growth_tracker")
"""The entries of a GradScaler's state."""

Number = bool | int | float


def flat(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors and numbers in an optimizer's state of a parameter, by name.

    Names of nested parts are joined by dots. A number is a float64 or int64 scalar, and its name ends in ``<float>``,
    ``<int>`` or ``<bool>``. The parts of a list are numbered, as in ``old_dirs.<list>.0``. Strings, None and functions
    are left out, because a new optimizer has them already.

    Examples
    --------
    >>> [(name, value.tolist()) for name, value in flat({"step": 3, "past": [torch.ones(2)]})]
    [('step.<int>', 3), ('past.<list>.0', [1.0, 1.0])]
    """
    if isinstance(state, Tensor):
        yield name, state.detach()
    elif isinstance(state, Number):
        kind = type(state).__name__
        made = torch.tensor(state, dtype=torch.float64 if isinstance(state, float) else torch.int64, device="cpu")
        yield _below(name, f"<{kind}>"), made
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from flat(value, _below(name, str(key)))
    elif isinstance(state, list | tuple):
        for key, value in enumerate(state):
            yield from flat(value, _below(name, f"<{type(state).__name__}>.{key}"))


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def deep(found: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state that `flat` has flattened.

    Examples
    --------
    >>> deep({"step.<int>": torch.tensor(3), "past.<list>.0": torch.ones(1)})
    {'step': 3, 'past': [tensor([1.])]}
    """
    root: dict[str, Any] = {}
    for name, value in found.items():
        parts = name.split(".")
        place = root
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    return {name: _made(value) for name, value in root.items()}


def _made(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for name, make in (("<int>", int), ("<float>", float), ("<bool>", bool)):
        if name in value:
            return make(value[name].item())
    for name, several in (("<list>", list), ("<tuple>", tuple)):
        if name in value:
            return several(_made(one) for _, one in sorted(value[name].items(), key=lambda item: int(item[0])))
    return {name: _made(one) for name, one in value.items()}


def put_state(optimizer: Optimizer, parameter: Tensor, found: Mapping[str, Tensor]) -> None:
    """Restore an optimizer's state of a parameter. Tensors are copied to the parameter's device.

    Parameters
    ----------
    optimizer : Optimizer
    parameter : torch.Tensor
        One of its parameters.
    found : mapping of str to Tensor
        As from `flat`; empty if there was no state of the parameter.
    """
    before = optimizer.state.pop(parameter, {})
    if not found:
        return
    state = deep({name: value.clone() for name, value in found.items()})
    for name, value in state.items():
        # a step counter may be on the CPU although the parameter is on a device
        like = before.get(name) if isinstance(before, Mapping) else None
        if isinstance(value, Tensor):
            device = like.device if isinstance(like, Tensor) else value.device if not value.ndim else parameter.device
            state[name] = value.to(device)
    optimizer.state[parameter] = state


def hyperparameters(group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a parameter group, such as the learning rate, by name.

    Examples
    --------
    >>> hyperparameters({"params": [], "lr": 0.1, "betas": (0.9, 0.99), "fused": None, "amsgrad": False})
    {'lr': 0.1, 'betas.0': 0.9, 'betas.1': 0.99, 'amsgrad': 0.0}
    """
    found: dict[str, float] = {}
    for name, value in group.items():
        if name == "params":
            continue
        several = isinstance(value, tuple | list)
        for part, one in enumerate(value) if several else [(0, value)]:
            if isinstance(one, Number) or (isinstance(one, Tensor) and one.numel() == 1):
                found[f"{name}.{part}" if several else name] = float(one)
    return found


def set_hyperparameters(group: dict[str, Any], numbers: Mapping[str, float]) -> None:
    """Put numbers from `hyperparameters` back into a group. Each keeps its type in the group.

    Raises
    ------
    CaptureError
        If the group has no such number.
    """
    now = hyperparameters(group)
    for name, number in numbers.items():
        if name not in now:
            raise CaptureError(f"the optimizer has no hyperparameter {name!r}; it has {', '.join(now)}")
        if number == now[name] or (math.isnan(number) and math.isnan(now[name])):
            continue
        base, _, part = name.rpartition(".") if name not in group else (name, "", "")
        if not part:
            group[name] = _of_type(group[name], number)
            continue
        several = list(group[base])
        several[int(part)] = _of_type(several[int(part)], number)
        group[base] = type(group[base])(several)


def _of_type(old: Any, number: float) -> Any:
    if isinstance(old, Tensor):
        old.fill_(number)
        return old
    return type(old)(number)


def scale_of(scaler: GradScaler) -> Tensor | None:
    """The state of a GradScaler as a float64 vector with the entries `SCALE`; None if the scaler is disabled."""
    state = {key.lstrip("_"): value for key, value in scaler.state_dict().items()}
    if not state:
        return None
    return torch.tensor([float(state[name]) for name in SCALE], dtype=torch.float64, device="cpu")


def set_scale(scaler: GradScaler, numbers: Sequence[float]) -> None:
    """Restore a state from `scale_of`."""
    state = scaler.state_dict()
    given = dict(zip(SCALE, numbers, strict=True))
    scaler.load_state_dict({key: type(state[key])(given[key.lstrip("_")]) for key in state})
