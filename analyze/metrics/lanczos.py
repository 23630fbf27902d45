"""The largest singular value of a linear map, by Lanczos from a random vector or from what was known before.

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
Maps = Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]

KEPT = 3
"""How many singular vectors are remembered: with one, a direction that overtakes it by little is not seen for long."""

_RESTART = 6
_BYTES = 1 << 28
"""When so many bytes of vectors are held, the iteration begins again with the best few of them."""

_CACHED, _PART = 1 << 21, 1 << 19
"""The second level of a processor's cache, of which a part of a matrix takes a quarter."""

_SEARCH = 4
"""How many steps a warm start takes from its random vector, before it may stop: a direction that is new on top is found
by them. Without them the old direction would be confirmed at once."""

_CAUTION = 0.5
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
    vectors : array (k, n)
        q and the next right singular vectors, as well as they are known, each of norm 1; at most `KEPT`.
    steps : int
        To how many vectors the map was applied.
    converged : bool
        Whether the stopping rule was met before the steps ran out.
    """

    value: float
    residual: float
    vectors: NDArray[Any]
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


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What the iteration begins with.

    Attributes
    ----------
    vectors : array (k, n)
        Orthonormal rows.
    known : int
        How many of them, the first, come from a similar map; the others are random.
    """

    vectors: NDArray[Any]
    known: int


def started(previous: NDArray[Any] | None, size: int, dtype: np.dtype[Any], random: np.random.Generator) -> Start:
    """The previous vectors and a random one; or, where there are none that fit, `KEPT` random ones."""
    known_kn = np.empty((0, size)) if previous is None else previous.reshape(-1, previous.shape[-1])
    if known_kn.shape[1] != size or len(known_kn) >= size:
        known_kn = np.empty((0, size))
    shape = min(1 if len(known_kn) else KEPT, size), size
    random_kn = random.standard_normal(shape)
    if dtype.kind == "c":
        random_kn = random_kn + 1j * random.standard_normal(shape)
    orthonormal, _ = np.linalg.qr(np.concatenate([known_kn, random_kn]).T)
    return Start(np.ascontiguousarray(orthonormal.T, dtype=dtype), len(known_kn))


@dataclass(frozen=True, slots=True, eq=False)
class LinearMap:
    """A linear map W, known by what it does to vectors, which are the rows of a matrix.

    Attributes
    ----------
    forward : callable
        Takes rows (k, n) to W's (k, m), in their dtype.
    both : callable
        Takes rows (k, n) to W's (k, m), and to what the (conjugate) transpose of W makes of those (k, n).
    together : int
        How many rows `both` takes in about the time of one.
    """

    forward: Map
    both: Maps
    together: int = 1


def composed(forward: Map, adjoint: Map) -> LinearMap:
    """A map that is known by what it and its (conjugate) transpose make of one vector."""

    def each(one: Map, rows: NDArray[Any]) -> NDArray[Any]:
        return one(rows[0])[None] if len(rows) == 1 else np.stack([one(row) for row in rows])

    def both(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        forth = each(forward, rows)
        return forth, each(adjoint, forth)

    return LinearMap(lambda rows: each(forward, rows), both)


def product(a_mn: NDArray[Any]) -> LinearMap:
    """The map of a matrix; of a large real one each part is read from memory once, for it and its transpose.

    Notes
    -----
    A matrix that the second level of the cache holds, or whose rows do not lie one behind the other, is read as often
    as it is multiplied, by one vector after the other: parts of it, or all vectors together, would take longer.
    """
    if a_mn.nbytes <= _CACHED or not a_mn.flags.c_contiguous or a_mn.dtype.kind == "c":
        a_nm = a_mn.conj().T if a_mn.dtype.kind == "c" else a_mn.T
        return composed(lambda q_n: a_mn @ q_n, lambda p_m: a_nm @ p_m)
    height = max(1, _PART // (a_mn.shape[1] * a_mn.itemsize))

    def both(q_kn: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        p_km = np.empty((len(q_kn), len(a_mn)), q_kn.dtype)
        back_kn = np.zeros_like(q_kn)
        for first in range(0, len(a_mn), height):
            part_ln = a_mn[first : first + height]
            if len(q_kn) == 1:
                p_l = part_ln @ q_kn[0]
                p_km[0, first : first + height] = p_l
                back_kn[0] += p_l @ part_ln
            else:
                p_kl = q_kn @ part_ln.T
                p_km[:, first : first + height] = p_kl
                back_kn += p_kl @ part_ln
        return p_km, back_kn

    return LinearMap(lambda q_kn: q_kn @ a_mn.T, both, together=2)


def largest(w: LinearMap, start: Start, *, tolerance: float = 1e-6, steps: int = 300, rows: int = 0) -> Extreme:
    """The largest singular value of a linear map that is known by what it does to vectors.

    Parameters
    ----------
    w : LinearMap
        W, see `composed` and `product`.
    start : Start
        See `started`. Where nothing is known, that is a cold start.
    tolerance : float
        The relative error to stop at.
    steps : int
        To how many vectors the map is applied at most.
    rows : int
        How many vectors are held at most, before it goes on with the best of them; 0 for as many as 256 MiB hold.

    Notes
    -----
    *Formula*: Rayleigh-Ritz for W'W on the vectors of the start, enlarged by a few Lanczos steps from the random one,
    which look for a direction that is new on top, then by the residual of the largest Ritz value, with full
    orthogonalisation (two passes of Gram-Schmidt). A map that takes some vectors in the time of one is given residuals
    of the next Ritz values, too, and already beside the Lanczos steps. A cold start begins with `KEPT` random vectors
    and takes as many residuals: what one vector has of two singular vectors whose values nearly tie stays a mixture for
    long, and says nothing of it. It stops when the residual r is below ``sqrt(tolerance)`` of the spread of the Ritz
    values (from a cold start a hundredth of that, so that near ties come apart), and either r is below `tolerance` or
    the estimate of Kato and Temple, r² over the gap to the next Ritz value, is below half of it (half, because few
    steps see the gap too wide). Ritz values that tie within that count as one.
    *Source*: B. N. Parlett, "The Symmetric Eigenvalue Problem" (1998), chapters 10-13; E. R. Davidson, "The iterative
    calculation of a few of the lowest eigenvalues" (1975), without preconditioning.
    """
    (k, size), dtype = start.vectors.shape, start.vectors.dtype
    precision = float(np.finfo(dtype).eps)
    reach = math.sqrt(tolerance) * (1 if start.known else 1e-2)
    together = w.together if start.known else max(w.together, k)
    steps = max(k, min(steps, size))
    searches, newest = _SEARCH if 0 < start.known < k else 0, k - 1
    # each vector is held with what the map and its transpose make of it
    rows = max(rows or _BYTES // (2 * size * dtype.itemsize), k + _SEARCH * together + 2, 2 * _RESTART)
    room = min(steps, rows, k + 16)
    basis_kn, back_kn = _grown(start.vectors, room), np.empty((room, size), dtype)
    first_km, back_kn[:k] = w.both(start.vectors)
    squares = np.empty((room, room), np.complex128 if dtype.kind == "c" else np.float64)
    squares[:k, :k] = first_km.conj() @ first_km.T
    applied = k
    del first_km
    while True:
        squares_kk = squares[:k, :k]
        if not np.isfinite(squares_kk).all():
            return Extreme(math.nan, math.nan, start.vectors, applied, False)
        searching = searches > 0 and applied < steps
        more: list[NDArray[Any]] = [back_kn[newest]] if searching else []
        top = float(squares_kk.diagonal().real.max())
        if len(more) < together or not searching:
            values_k, vectors_kk = np.linalg.eigh(squares_kk)
            top = float(values_k[-1])
            ritz_jk = vectors_kk[:, : -1 - together + len(more) : -1].T.astype(dtype)
            rest_jn = ritz_jk @ back_kn[:k]
            rest_jn -= values_k[: -1 - len(ritz_jk) : -1, None].astype(dtype) * (ritz_jk @ basis_kn[:k])
            residuals = [math.sqrt(_square(rest_n)) for rest_n in rest_jn]
            if not searching:
                converged = _met(values_k, residuals[0], reach, tolerance)
                if converged or applied == steps:
                    break
            more += [rest_n for rest_n, length in zip(rest_jn, residuals, strict=True) if length > tolerance * top]
        more = more[: steps - applied]
        if k + len(more) > rows:
            # no more memory: go on with the best
            best = np.ascontiguousarray(vectors_kk[:, ::-1][:, :_RESTART].T.astype(dtype))
            k = len(best)
            basis_kn[:k], back_kn[:k] = best @ basis_kn[: len(squares_kk)], best @ back_kn[: len(squares_kk)]
            squares[:k, :k] = np.diag(values_k[::-1][:k])
        if k + len(more) > room:
            room = min(max(2 * room, k + len(more)), steps, rows)
            basis_kn, back_kn = _grown(basis_kn, room), _grown(back_kn, room)
            squares = np.pad(squares, (0, room - len(squares)))
        end = k
        for number, rest_n in enumerate(more):
            for _ in range(2):
                rest_n = rest_n - (basis_kn[:end].conj() @ rest_n) @ basis_kn[:end]
            length = math.sqrt(_square(rest_n))
            if length > 4 * precision * max(top, 0.0):
                basis_kn[end] = rest_n / rest_n.real.dtype.type(length)
                end += 1
            elif searching and number == 0:  # an invariant subspace: the random vector finds nothing more
                searches = 0
        if searches > 0:
            searches, newest = searches - 1, k
        if end == k:
            if searching:
                continue
            converged = True
            break
        p_jm, back_kn[k:end] = w.both(basis_kn[k:end])
        beside = _wide(basis_kn[:k].conj() @ back_kn[k:end].T)
        squares[:k, k:end], squares[k:end, :k] = beside, beside.conj().T
        p_jm = _wide(p_jm)
        squares[k:end, k:end] = p_jm.conj() @ p_jm.T
        applied += end - k
        k = end
    kept = np.ascontiguousarray(vectors_kk[:, ::-1][:, :KEPT].T.astype(dtype))
    q_jn = kept @ basis_kn[:k]
    length = math.sqrt(_square(q_jn[0]))
    # measured once more: in float32 the Ritz value has gathered the rounding of all products
    value = math.sqrt(_square(w.forward(q_jn[:1]))) / length
    if value == 0:
        return Extreme(0.0, 0.0, q_jn, applied, True)
    off_n = kept[0] @ back_kn[:k] - dtype.type(value * value) * q_jn[0]
    return Extreme(value, math.sqrt(_square(off_n)) / (value * length), q_jn, applied, converged)


def _wide(x: NDArray[Any]) -> NDArray[Any]:
    """The same in float64 or complex128."""
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _square(x: NDArray[Any]) -> float:
    """The squared norm, in float64."""
    exact = _wide(x)
    return float(np.vdot(exact, exact).real)


def _grown(rows: NDArray[Any], room: int) -> NDArray[Any]:
    more = np.empty((room, rows.shape[1]), rows.dtype)
    more[: len(rows)] = rows
    return more


def _met(values_k: NDArray[np.float64], residual: float, reach: float, tolerance: float) -> bool:
    """The stopping rule, on Ritz values of W'W (rising) and the residual there, which is r times the singular value."""
    top = float(values_k[-1])
    if top <= 0:
        return False
    if residual <= tolerance * top:
        return True
    gaps = top - values_k[-2::-1]
    # of the spread, not of the size: what is nearly orthogonal has all its singular values near one another
    if not len(gaps) or residual > reach * gaps[-1]:
        return False
    # ties: the first j Ritz values are one, up to their spread, and the gap that counts is the next
    spread = np.concatenate(([0.0], gaps[:-1]))
    with np.errstate(divide="ignore"):
        errors = spread + residual**2 / gaps
    return bool(errors.min() <= _CAUTION * tolerance * top)
