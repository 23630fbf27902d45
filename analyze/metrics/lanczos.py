"""The largest singular value of a linear map by the Lanczos iteration, from a warm start.

Shapes: ``q_n`` is a vector of the map's domain (n numbers), ``p_m`` one of its range (m numbers); ``q_kn`` and ``p_km``
are k of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.messages import Message

Map = Callable[[NDArray[Any]], NDArray[Any]]

_RANDOM_PART = 0.1
"""The norm of the random part of a warm start: without it a direction that overtakes the old one is never seen."""

_CAUTION = 0.25
"""Of the tolerance, what the estimate may take: after few steps it is too small by a few times."""


@dataclass(frozen=True, slots=True, eq=False)
class Extreme:
    """What `largest` found.

    Attributes
    ----------
    value : float
        A lower bound of the largest singular value, but for rounding; NaN if the map gave one, or infinity.
    residual : float
        r = |W'u - value q|, measured at the end: some singular value is within r of `value`.
    vector : array (n,)
        q, the right singular vector, of norm 1.
    steps : int
        How often the map was applied.
    converged : bool
        Whether the stopping rule was met before the steps ran out.
    """

    value: float
    residual: float
    vector: NDArray[Any]
    steps: int
    converged: bool


def seeded(*words: object) -> np.random.Generator:
    """A generator of random numbers of its own, the same for the same words in every process.

    Examples
    --------
    >>> bool(seeded("weights", "fc", 3).random() == seeded("weights", "fc", 3).random())
    True
    """
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def stream_of(message: Message) -> tuple[str | None, str, int, str, int]:
    """Which stream a message is of: module, tag, call, leaf and rank. What is remembered is remembered of a stream."""
    return message.key, message.tag, message.call, message.leaf, message.rank


def generator_of(message: Message) -> np.random.Generator:
    """The generator of a message's random part: that of its stream and step, so live and replay draw the same."""
    return seeded(message.kind, *stream_of(message), message.global_step)


def started(
    previous: NDArray[Any] | None, size: int, dtype: np.dtype[Any], random: np.random.Generator
) -> NDArray[Any]:
    """A unit vector to begin with: the previous one with a random part, or a random one."""
    start = random.standard_normal(size)
    if dtype.kind == "c":
        start = start + 1j * random.standard_normal(size)
    if previous is not None and previous.shape == (size,):
        start *= _RANDOM_PART / np.linalg.norm(start)
        start = start + previous
    return np.asarray(start / np.linalg.norm(start), dtype=dtype)


def largest(forward: Map, adjoint: Map, start: NDArray[Any], *, tolerance: float = 1e-6, steps: int = 300) -> Extreme:
    """The largest singular value of a linear map that is known by what it does to vectors.

    Parameters
    ----------
    forward, adjoint : callable
        W and its (conjugate) transpose, on vectors of the dtype of `start`.
    start : array (n,)
        A unit vector, see `started`.
    tolerance : float
        The relative error to stop at.
    steps : int
        How often the map is applied at most.

    Notes
    -----
    *Formula*: Lanczos on W'W with full reorthogonalisation (two passes of Gram-Schmidt). It stops when the residual r
    of the largest Ritz value is below ``sqrt(tolerance)`` of it, and either r is below `tolerance` or the estimate of
    Kato and Temple, r² over the gap to the other Ritz values, is below a quarter of it (a quarter, because few steps
    see the gap too wide). Ritz values that tie within that count as one.
    *Source*: B. N. Parlett, "The Symmetric Eigenvalue Problem" (1998), chapters 10-13.
    """
    size, dtype = len(start), start.dtype
    precision = float(np.finfo(dtype).eps)
    steps = max(1, min(steps, size))
    room = min(steps, 16)
    basis_kn, images_km = np.empty((room, size), dtype), None
    squares, couplings = [], []  # the diagonal of the tridiagonal matrix, and what stands beside it
    q_n, converged, k = start, False, 0
    ritz_k = np.ones(1)
    while True:
        p_m = forward(q_n)
        if images_km is None:
            images_km = np.empty((room, len(p_m)), dtype)
        elif k == room:
            room = min(2 * room, steps)
            basis_kn, images_km = _grown(basis_kn, room), _grown(images_km, room)
        basis_kn[k], images_km[k] = q_n, p_m
        k += 1
        squares.append(_square(p_m))
        if not math.isfinite(squares[-1]):
            return Extreme(math.nan, math.nan, start, k, False)
        z_n = adjoint(p_m)
        seen_kn = basis_kn[:k]
        for _ in range(2):
            z_n = z_n - (seen_kn.conj() @ z_n) @ seen_kn
        couplings.append(math.sqrt(_square(z_n)))
        last = k == steps or couplings[-1] <= 4 * precision * max(squares)
        if last or k < 20 or k % 3 == 0:
            values_k, vectors_kk = np.linalg.eigh(_tridiagonal(squares, couplings))
            ritz_k = vectors_kk[:, -1]
            if couplings[-1] <= 4 * precision * max(squares):
                converged = True  # an invariant subspace: nothing more can come
            else:
                converged = _met(values_k, couplings[-1] * abs(float(ritz_k[-1])), tolerance)
            if converged or last:
                break
        q_n = z_n / z_n.dtype.type(couplings[-1])
    ritz = np.asarray(ritz_k, dtype=dtype)
    q_n, p_m = ritz @ basis_kn[:k], ritz @ images_km[:k]
    length = math.sqrt(_square(q_n))
    value = math.sqrt(_square(p_m)) / length
    q_n = q_n / q_n.dtype.type(length)
    if value == 0:
        return Extreme(0.0, 0.0, q_n, k, True)
    u_m = p_m / p_m.dtype.type(value * length)
    residual = math.sqrt(_square(adjoint(u_m) - q_n.dtype.type(value) * q_n))
    return Extreme(value, residual, q_n, k, converged)


def _square(x: NDArray[Any]) -> float:
    """The squared norm, in float64."""
    exact = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    return float(np.vdot(exact, exact).real)


def _grown(rows: NDArray[Any], room: int) -> NDArray[Any]:
    more = np.empty((room, rows.shape[1]), rows.dtype)
    more[: len(rows)] = rows
    return more


def _tridiagonal(squares: list[float], couplings: list[float]) -> NDArray[np.float64]:
    matrix = np.diag(squares)
    places = np.arange(len(squares) - 1)
    matrix[places, places + 1] = matrix[places + 1, places] = couplings[:-1]
    return matrix


def _met(values_k: NDArray[np.float64], residual: float, tolerance: float) -> bool:
    """The stopping rule, on Ritz values of W'W (rising) and the residual there, which is r times the singular value."""
    top = float(values_k[-1])
    if top <= 0 or residual > math.sqrt(tolerance) * top:
        return False
    if residual <= tolerance * top:
        return True
    gaps = top - values_k[-2::-1]
    if not len(gaps):
        return False
    # ties: the first j Ritz values are one, up to their spread, and the gap that counts is the next
    spread = np.concatenate(([0.0], gaps[:-1]))
    with np.errstate(divide="ignore"):
        errors = spread + residual**2 / gaps
    return bool(errors.min() <= _CAUTION * tolerance * top)
