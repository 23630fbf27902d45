"""The states of the process's random generators, as tensors: reading and restoring."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.errors import CaptureError

_WORDS = 624
"""32-bit words in the state of a Mersenne Twister, which both NumPy and Python use."""


def states() -> list[tuple[str, Tensor]]:
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
    found = [("torch", torch.get_rng_state())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += [(f"cuda.{number}", state) for number, state in enumerate(torch.cuda.get_rng_state_all())]
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - what programs draw from
    if numpy["bit_generator"] == "MT19937":  # else the program has replaced it by one of another kind
        words, position = numpy["state"]["key"], numpy["state"]["pos"]
        found.append(("numpy", _packed(words, position, float(numpy["gauss"]) if numpy["has_gauss"] else None)))
    _, numbers, normal = random.getstate()
    found.append(("python", _packed(np.array(numbers[:_WORDS], np.int64), numbers[_WORDS], normal)))
    return found


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


def _set_numpy(state: Tensor) -> None:
    words, position, normal = _unpacked(state)
    np.random.set_state(("MT19937", words.astype(np.uint32), position, int(normal is not None), normal or 0.0))  # noqa: NPY002


def _set_python(state: Tensor) -> None:
    words, position, normal = _unpacked(state)
    random.setstate((3, (*words.tolist(), position), normal))


def _packed(words: NDArray[Any], position: int, normal: float | None) -> Tensor:
    state = np.zeros(_WORDS + 3, np.int64)
    state[:_WORDS] = words
    state[_WORDS] = position
    if normal is not None:
        state[_WORDS + 1] = 1
        state[_WORDS + 2] = np.float64(normal).view(np.int64)
    return torch.from_numpy(state)


def _unpacked(state: Tensor) -> tuple[NDArray[np.int64], int, float | None]:
    array = state.cpu().numpy()
    if array.dtype != np.int64 or array.shape != (_WORDS + 3,):
        raise ValueError(f"it is {array.dtype} of shape {array.shape}, not int64 of ({_WORDS + 3},)")
    words, (position, reserved, bits) = array[:_WORDS], array[_WORDS:].tolist()
    normal = float(np.int64(bits).view(np.float64)) if reserved else None
    return words, position, normal
