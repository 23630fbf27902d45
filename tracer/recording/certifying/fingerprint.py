"""Hashes of everything in a training that a recorder could change."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tracer import walking
from tracer.observing.pytorch.tensors import bytes_of


def generators() -> dict[str, Any]:
    """The states of all global random generators."""
    numpy_state = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state(), "cuda": cuda}


def set_generators(states: Mapping[str, Any]) -> None:
    """Restore the states of `generators`; CUDA devices that were not in use then are seeded as torch seeds them."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(torch.initial_seed())


def fingerprint(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Hashes of everything that a recorder could change, by name; causes, such as generators, come first.

    Examples
    --------
    >>> list(fingerprint({"": torch.nn.Linear(3, 2)}, []))[-3:]
    ['modes', "parameter 'weight'", "parameter 'bias'"]
    """
    states = generators()
    found = {f"random generator of {name}": _hash(states[name]) for name in ("python", "numpy", "torch")}
    found |= {f"random generator of cuda:{number}": _hash(state) for number, state in enumerate(states["cuda"])}
    names: dict[int, str] = {}
    found["modes"] = _hash([[one.training for one in walking.modules(model)] for model in models.values()])
    for prefix, model in models.items():
        for name, parameter in walking.named_parameters(model, prefix):
            names[id(parameter)] = name
            found[f"parameter {name!r}"] = _hash(parameter)
        found |= {f"buffer {name!r}": _hash(buffer) for name, buffer in walking.named_buffers(model, prefix)}
    for number, optimizer in enumerate(optimizers):
        which = "optimizer" if len(optimizers) == 1 else f"optimizer {number}"
        settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        found[f"settings of the {which}"] = _hash(settings)
        found |= {
            f"tensor {place} that the {which} trains": _hash(one)
            for place, one in enumerate(walking.trained(optimizer))
            if id(one) not in names
        }
        for place, (owner, state) in enumerate(optimizer.state.items()):
            name = names.get(id(owner), str(place))
            for key, value in state.items() if isinstance(state, Mapping) else ():
                found[f"{key} of {name!r} in the {which}"] = _hash(value)
    return found


def _hash(value: Any) -> str:
    made = hashlib.blake2b(digest_size=16)
    _feed(made, value)
    return made.hexdigest()


def _feed(made: Any, value: Any) -> None:
    """Update a hash with a value: tensors and arrays by their bits, structures by their parts."""
    if isinstance(value, Tensor):
        tensor = value.detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's local shard
        if not tensor.is_meta and not tensor.is_nested and not tensor.is_quantized:
            dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
            there = bytes_of(dense.resolve_conj().resolve_neg().cpu())
            made.update(there.numpy().data if len(there) else b"")
        made.update(f"{value.dtype}{tuple(tensor.shape)}".encode())
    elif isinstance(value, np.ndarray):
        made.update(np.ascontiguousarray(value).tobytes())
        made.update(f"{value.dtype}{value.shape}".encode())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            made.update(f"{key!r}:".encode() if isinstance(key, str | int) else b"key:")
            _feed(made, part)
    elif isinstance(value, tuple | list):
        made.update(f"[{len(value)}".encode())
        for part in value:
            _feed(made, part)
    elif isinstance(value, str | int | float | complex | bool | bytes | None):
        made.update(repr(value).encode())
    else:  # functions and other objects: by type only, because their repr may have an address
        made.update(type(value).__qualname__.encode())
