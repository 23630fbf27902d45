"""What can be done to data without changing a metric: the words of `tracer.Subscriber.invariances`, as functions.

Each function takes an array and a random generator and returns an array that a metric of this invariance cannot tell
from the first, up to rounding. So a class declares its invariances as data. The tests of each family hold its classes
to them; `test_every_declared_invariance_is_tested` in `test_catalogue.py` finds a class that no family's list names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import analyze

Change: TypeAlias = Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]


def _rotation(size: int, random: np.random.Generator) -> NDArray[Any]:
    return np.linalg.qr(random.standard_normal((size, size)))[0]


def _invertible(x: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    """A map of condition 10 at most, so that rounding stays rounding."""
    left, right = _rotation(x.shape[-1], random), _rotation(x.shape[-1], random)
    mapped: NDArray[Any] = x @ (left * random.uniform(1, 10, x.shape[-1])) @ right
    return mapped


INVARIANCES: Mapping[str, Change] = {
    # any permutation of the elements
    "order": lambda x, random: random.permutation(x.reshape(-1)).reshape(x.shape),
    # a permutation of the first axis: datapoints, or output neurons
    "rows": lambda x, random: random.permutation(x, axis=0),
    # a permutation of the second axis: neurons, or inputs
    "columns": lambda x, random: random.permutation(x, axis=1),
    # multiplication by -1
    "sign": lambda x, _: -x,
    # multiplication by a positive number
    "scale": lambda x, random: x * float(2.0 ** random.integers(-8, 9)),
    # one number added to all elements
    "shift": lambda x, random: x + float(random.integers(-8, 9)),
    # a vector added to all rows: another mean of each neuron
    "offset": lambda x, random: x + random.integers(-8, 9, size=x.shape[1:]),
    # a rotation or reflection of the last axis
    "orthogonal": lambda x, random: x @ _rotation(x.shape[-1], random),
    # any invertible linear map of the last axis
    "invertible": _invertible,
}
"""Word → function. Of metrics that compare two sets of datapoints, ``rows`` permutes both alike; others change one."""

FAMILY = (
    "activation_rate",
    "adam_moments",
    "alpha",
    "churn",
    "classification_report",
    "descent_cosine",
    "distance",
    "forgetting",
    "gradient_geometry",
    "path_length",
    "ratio",
    "sample_norm",
    "test_accuracy",
    "total_norm",
    "train_accuracy",
)
"""Metrics that `test_dynamics.py` holds to their invariances."""

SUMS = ("mean", "sum", "variance", "std", "norm1", "norm2", "rms", "absmean", "skewness", "kurtosis")
ELEMENTWISE = [
    analyze.Mean("weights"),
    analyze.Sum("weights"),
    analyze.Variance("weights"),
    *(analyze.Norm(order=order) for order in (1, 2, float("inf"), 3)),
    analyze.Statistics(which=(*SUMS, "min", "max", "median", "sparsity")),
    analyze.Quantiles(),
    analyze.Histogram(),
    analyze.Histogram(method="sketch"),
    analyze.Aggregate("weights", which="mean+std+median+iqr"),
]
"""Metrics that `test_statistics.py` holds to their invariances."""
