"""The largest singular value of a linear map, by Lanczos from a random vector, with a bound on the chance of error.

Shapes: ``q_n`` is a vector of the map's domain (n numbers), ``p_m`` a vector of its range (m numbers).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.inputs import as_float64
from analyze.metrics.streams import stream_of
from tracer.messaging.messages import Message

Map = Callable[[NDArray[Any]], NDArray[Any]]
"""Maps a vector q (n,) to W'W q (n,) in the same dtype; W' is the (conjugate) transpose."""

CHANCE = 1e-9
"""The largest probability, over the random vector, that a larger singular value is missed."""

_BYTES = 1 << 28
"""The most bytes of basis vectors; beyond this, new vectors are kept orthogonal to the latest ones only."""

_CACHED, _PART = 1 << 21, 1 << 19
"""Bytes of a processor's second-level cache, and of the part of a matrix that is read at a time."""

_FIRST, _NEXT = 8, 1.1
"""The steps before the first test of convergence, and the factor on their number before each further test."""


@dataclass(frozen=True, slots=True)
class Extreme:
    """The result of `largest`.

    Attributes
    ----------
    value : float
        A lower bound of the largest singular value, except for rounding; NaN if the map gave NaN or infinity.
    residual : float
        r = |W'u - value q| for the best q: some singular value is within r of `value`. It includes rounding.
    steps : int
        How often the map was applied.
    converged : bool
        Whether, except with probability `CHANCE`, no singular value exceeds ``(1 + tolerance) value``.
    """

    value: float
    residual: float
    steps: int
    converged: bool


def seeded(*words: object) -> np.random.Generator:
    """A generator of random numbers that depends on the words only: the same in every process.

    Examples
    --------
    >>> bool(seeded("weights", "fc", 3).random() == seeded("weights", "fc", 3).random())
    True
    """
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def generator_of(message: Message) -> np.random.Generator:
    """The random generator of a message, seeded by its stream and step, so live and replay draw the same numbers."""
    return seeded(message.kind, *stream_of(message), message.global_step)


def product(a_mn: NDArray[Any]) -> Map:
    """The map q → A'A q of a matrix A.

    Notes
    -----
    Each part of a large real matrix is read from memory once, for A and for its transpose. A matrix that fits into the
    second-level cache, or is not in C order, is multiplied as a whole.
    """
    if a_mn.dtype.kind == "c":
        return lambda q_n: ((a_mn @ q_n).conj() @ a_mn).conj()
    if a_mn.nbytes <= _CACHED or not a_mn.flags.c_contiguous:
        return lambda q_n: (a_mn @ q_n) @ a_mn
    height = max(1, _PART // (a_mn.shape[1] * a_mn.itemsize))

    def by_parts(q_n: NDArray[Any]) -> NDArray[Any]:
        back_n = np.zeros_like(q_n)
        for first in range(0, len(a_mn), height):
            part_ln = a_mn[first : first + height]
            back_n += (part_ln @ q_n) @ part_ln
        return back_n

    return by_parts


def largest(
    w: Map,
    size: int,
    dtype: np.dtype[Any],
    random: np.random.Generator,
    *,
    tolerance: float = 1e-6,
    steps: int = 300,
) -> Extreme:
    r"""The largest singular value of a linear map W that is given by its product W'W with vectors.

    Parameters
    ----------
    w : Map
        W'W, see `product`.
    size : int
        n, the number of elements of a vector.
    dtype : dtype
        Of the vectors: float32, float64 or complex.
    random : numpy.random.Generator
        The source of the first vector.
    tolerance : float
        The relative error at which to stop.
    steps : int
        The most applications of the map.

    Notes
    -----
    *Formula*: Lanczos for W'W from a normally distributed vector x, with full orthogonalisation. Let
    :math:`\pi_k` be the k-th Lanczos polynomial, :math:`\theta` its largest zero, the square of the value that is
    returned. A singular vector u with :math:`\sigma^2\ge\lambda>\theta` has the part
    :math:`u'q_k=\pi_k(\sigma^2)\,u'x/|x|` in the k-th vector :math:`q_k`. This is at most 1, and :math:`\pi_k` rises
    beyond :math:`\theta`, so :math:`|u'x|\le|x|/\pi_k(\lambda)`. The probability that a normally distributed number is
    this small is at most :math:`\sqrt{2/\pi}\,|x|/\pi_k(\lambda)`. The iteration stops when it is below `CHANCE` at
    :math:`\lambda=(1+\mathrm{tolerance}/2)^2\theta`; the other half of the tolerance is for rounding.
    None of this depends on the gap between singular values.
    *Source*: B. N. Parlett, "The Symmetric Eigenvalue Problem" (1998), chapters 7 and 13, for the polynomials;
    J. Kuczyński, H. Woźniakowski, "Estimating the largest eigenvalue by the power and Lanczos algorithms with a random
    start" (1992), for random starts.
    """
    precision = float(np.finfo(dtype).eps)
    rows = max(2, min(_BYTES // (size * dtype.itemsize), steps + 1, size))
    x_n = random.standard_normal(size)
    if dtype.kind == "c":
        x_n = x_n + 1j * random.standard_normal(size)
    length = math.sqrt(_square(x_n))
    enough = math.log(math.sqrt(2 / math.pi) * length / CHANCE)
    basis_kn = np.empty((min(rows, 2 * _FIRST), size), dtype)
    basis_kn[0] = x_n / length
    diagonal: list[float] = []
    beside: list[float] = []
    look = _FIRST
    while True:
        k = len(diagonal)
        held_kn = basis_kn[: min(k + 1, rows)]
        q_n = basis_kn[k % rows]
        rest_n = w(q_n)
        diagonal.append(float(np.vdot(as_float64(q_n), as_float64(rest_n)).real))
        if not math.isfinite(diagonal[-1]):
            return Extreme(math.nan, math.nan, k + 1, False)
        rest_n, off = _orthogonal(rest_n, held_kn)
        beside.append(off)
        k += 1
        ended = off == 0 or k == size
        if k >= look or ended or k == steps:
            look = math.ceil(k * _NEXT)
            square, last = _top(diagonal, beside)
            shown = ended or _growth(diagonal, beside, (1 + tolerance / 2) ** 2 * square) >= enough
            if shown or k == steps:
                value = math.sqrt(max(square, 0.0))
                residual = off * last / value if value else 0.0
                return Extreme(value, residual + 4 * precision * value, k, shown)
        if k == len(basis_kn) < rows:
            basis_kn = _grown(basis_kn, min(2 * k, rows))
        basis_kn[k % rows] = rest_n / rest_n.real.dtype.type(off)


def _orthogonal(rest_n: NDArray[Any], basis_kn: NDArray[Any]) -> tuple[NDArray[Any], float]:
    """The part of a vector orthogonal to an orthonormal basis, and its length: 0 if only rounding is left."""
    length = before = math.sqrt(_square(rest_n))
    for _ in range(4):
        rest_n = rest_n - (basis_kn.conj() @ rest_n) @ basis_kn
        length, before = math.sqrt(_square(rest_n)), length
        if length > 0.7 * before:
            return rest_n, length
    return rest_n, 0.0


def _top(diagonal: Sequence[float], beside: Sequence[float]) -> tuple[float, float]:
    """The largest eigenvalue of a tridiagonal matrix, and the modulus of the last element of its eigenvector."""
    last = len(diagonal) - 1
    if not last:
        return diagonal[0], 1.0
    values, vectors = scipy.linalg.eigh_tridiagonal(
        diagonal, beside[:last], select="i", select_range=(last, last), check_finite=False, lapack_driver="stebz"
    )
    return float(values[-1]), abs(float(vectors[-1, -1]))


def _growth(diagonal: Sequence[float], beside: Sequence[float], at: float) -> float:
    """The logarithm of the last Lanczos polynomial at a number above all its zeros; -inf if the number is not."""
    total, pivot, before = 0.0, 1.0, 0.0
    for here, off in zip(diagonal, beside, strict=True):
        pivot = at - here - before / pivot
        if pivot <= 0:
            return -math.inf
        total += math.log(pivot / off)
        before = off * off
    return total


def _square(x: NDArray[Any]) -> float:
    """The squared norm, in float64."""
    exact = as_float64(x)
    return float(np.vdot(exact, exact).real)


def _grown(rows: NDArray[Any], room: int) -> NDArray[Any]:
    more = np.empty((room, rows.shape[1]), rows.dtype)
    more[: len(rows)] = rows
    return more
