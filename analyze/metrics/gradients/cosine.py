"""The cosine of the angle between two tensors of one shape: exact for the smallest norms, without an epsilon."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.inputs import blocks
from tracer.errors import MessageError
from tracer.numbers.arrays import Array, as_array


def cosine(a: Array, b: Array) -> float:
    r"""The cosine of the angle between two tensors: :math:`\langle a, b\rangle / (\|a\|\,\|b\|)`.

    Parameters
    ----------
    a, b : arrays of one shape
        For complex numbers, the real part of the inner product counts.

    Returns
    -------
    float
        From -1 to 1; NaN if one of the norms is 0, and where NaN or infinity occurs.

    Raises
    ------
    MessageError
        If the shapes differ.

    Examples
    --------
    >>> cosine([3e-6, 0.0], [6e-6, 0.0]), cosine([1.0, 0.0], [0.0, 2.0]), cosine([0.0], [1.0])
    (1.0, 0.0, nan)
    """
    one, other = as_array(a), as_array(b)
    if one.shape != other.shape:
        raise MessageError(f"a cosine needs two tensors of one shape, not {one.shape} and {other.shape}")
    if (one.dtype.kind == "c") != (other.dtype.kind == "c"):
        one, other = one.astype(np.complex128), other.astype(np.complex128)
    with np.errstate(all="ignore"):
        scales = _scale(one), _scale(other)
        if not all(scale > 0 and math.isfinite(scale) for scale in scales):
            return math.nan
        sums = np.zeros(3)
        for left, right in zip(blocks(one), blocks(other), strict=True):
            left, right = left / scales[0], right / scales[1]
            if left.dtype != right.dtype:  # one is real, one complex: compare real and imaginary parts of both
                left, right = left.astype(np.complex128), right.astype(np.complex128)
            left, right = _real(left), _real(right)
            sums += (left * right).sum(), np.square(left).sum(), np.square(right).sum()
        product, left_square, right_square = sums.tolist()
        # one root of the product, so that equal tensors give exactly 1
        return max(-1.0, min(1.0, product / math.sqrt(left_square * right_square)))


def _scale(x: NDArray[Any]) -> float:
    """The largest power of two up to the largest modulus; the modulus itself if it is 0, infinite or NaN."""
    largest = float(np.max([np.abs(block).max() for block in blocks(x)], initial=0.0))
    return 2.0 ** (math.frexp(largest)[1] - 1) if largest > 0 and math.isfinite(largest) else largest


def _real(block: NDArray[Any]) -> NDArray[np.float64]:
    return block.view(np.float64) if block.dtype.kind == "c" else block
