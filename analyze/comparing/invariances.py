"""What can be done to data without changing a metric: the words of `tracer.Subscriber.invariances`, as functions.

Each function takes an array and a random generator and returns an array that a metric of this invariance cannot tell
from the first, up to rounding. So a class declares its invariances as data, the documentation prints them, and one test
holds all classes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Change: TypeAlias = Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]


def _order(x: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    return random.permutation(x.reshape(-1)).reshape(x.shape)


def _rows(x: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    return random.permutation(x, axis=0)


def _columns(x: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    return random.permutation(x, axis=1)


def _sign(x: NDArray[Any], _: np.random.Generator) -> NDArray[Any]:
    return -x


def _scale(x: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    return x * float(2.0 ** random.integers(-8, 9))


def _shift(x: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    return x + float(random.integers(-8, 9))


def _offset(x: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    return x + random.integers(-8, 9, size=x.shape[1:])


def _orthogonal(x: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    turned: NDArray[Any] = x @ _rotation(x.shape[-1], random)
    return turned


def _rotation(size: int, random: np.random.Generator) -> NDArray[Any]:
    return np.linalg.qr(random.standard_normal((size, size)))[0]


def _invertible(x: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    """A map of condition 10 at most, so that rounding stays rounding."""
    left, right = _rotation(x.shape[-1], random), _rotation(x.shape[-1], random)
    mapped: NDArray[Any] = x @ (left * random.uniform(1, 10, x.shape[-1])) @ right
    return mapped


INVARIANCES: Mapping[str, Change] = {
    "order": _order,  # any permutation of the elements
    "rows": _rows,  # a permutation of the first axis: datapoints, or output neurons
    "columns": _columns,  # a permutation of the second axis: neurons, or inputs
    "sign": _sign,  # multiplication by -1
    "scale": _scale,  # multiplication by a positive number
    "shift": _shift,  # one number added to all elements
    "offset": _offset,  # a vector added to all rows: another mean of each neuron
    "orthogonal": _orthogonal,  # a rotation or reflection of the last axis
    "invertible": _invertible,  # any invertible linear map of the last axis
}
"""Word → function. Of metrics that compare two sets of datapoints, ``rows`` permutes both alike; others change one."""
