"""The states of the process's random generators, as tensors: reading and restoring."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.errors import CaptureError

_WORDS = 624
"""32-bit words in the state of a Mersenne Twister, which both NumPy and Python use."""


def states() -> Iterator[tuple[str, Tensor]]:
    """The state of each generator by name, for `restore`.

    ``torch`` and ``cuda.0`` (for each device in use) are bytes from PyTorch. ``numpy`` and ``python`` are 627 int64:
    the 624 words of the Mersenne Twister, the position in them, whether a normal number is in reserve, and that
    number's bits.

    Examples
    --------
    >>> found = dict(states())
    >>> _ = restore("python", found["python"])
    >>> first = random.random()
    >>> _ = restore("python", found["python"])
    >>> random.random() == first
    True
    """
    yield "torch", torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            yield f"cuda.{number}", state
    for name, read in (("numpy", _numpy), ("python", _python)):
        words = read()
        if words is not None:
            yield name, torch.from_numpy(words)


def restore(name: str, state: Tensor) -> None:
    """Restore a generator's state from `states`.

    Raises
    ------
    CaptureError
        If there is no such generator here, or the state does not fit it.
    """
    place, _, number = name.partition(".")
    known: dict[str, Callable[[Tensor], None]] = {
        "torch": torch.set_rng_state,
        "numpy": _set_numpy,
        "python": _set_python,
    }
    if place == "cuda" and number.isdigit():
        if not torch.cuda.is_available() or int(number) >= torch.cuda.device_count():
            raise CaptureError(
                f"the generator of CUDA device {number} cannot be put back: this machine has no such device"
            )
        torch.cuda.set_rng_state(state, int(number))
        return
    if name not in known:
        raise CaptureError(f"there is no random generator {name!r}; there are {', '.join(known)} and cuda.0, cuda.1, …")
    try:
        known[name](state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CaptureError(f"the random generator {name!r} does not take this state: {error}") from error


def _numpy() -> NDArray[np.int64] | None:
    """The state of NumPy's global generator; None if the program has replaced the generator by one of another kind."""
    found = np.random.get_state(legacy=False)  # noqa: NPY002 - what programs draw from
    if found["bit_generator"] != "MT19937":
        return None
    twister = found["state"]
    return _packed(twister["key"], twister["pos"], float(found["gauss"]) if found["has_gauss"] else None)


def _set_numpy(state: Tensor) -> None:
    words, position, normal = _unpacked(state)
    np.random.set_state(("MT19937", words.astype(np.uint32), position, int(normal is not None), normal or 0.0))  # noqa: NPY002


def _python() -> NDArray[np.int64]:
    _, words, normal = random.getstate()
    return _packed(np.array(words[:_WORDS], np.int64), words[_WORDS], normal)


def _set_python(state: Tensor) -> None:
    words, position, normal = _unpacked(state)
    random.setstate((3, (*words.tolist(), position), normal))


def _packed(words: NDArray[Any], position: int, normal: float | None) -> NDArray[np.int64]:
    state = np.zeros(_WORDS + 3, np.int64)
    state[:_WORDS] = words
    state[_WORDS] = position
    if normal is not None:
        state[_WORDS + 1] = 1
        state[_WORDS + 2] = np.float64(normal).view(np.int64)
    return state


def _unpacked(state: Tensor) -> tuple[NDArray[np.int64], int, float | None]:
    array = state.cpu().numpy()
    if array.dtype != np.int64 or array.shape != (_WORDS + 3,):
        raise ValueError(f"it is {array.dtype} of shape {array.shape}, not int64 of ({_WORDS + 3},)")
    words, (position, reserved, bits) = array[:_WORDS], array[_WORDS:].tolist()
    normal = float(np.int64(bits).view(np.float64)) if reserved else None
    return words, position, normal
