"""The largest singular value of a weight, by Lanczos' iteration or exactly."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, final

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.inputs import as_float64, power_of_two
from analyze.metrics.metric import PerMessage, Selected, stream_of
from analyze.metrics.spectra import code, matrix
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array

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


Status = Literal["converged", "exact", "certified", "corrected", "nonfinite", "unconverged", "unknown_size", "guessed"]

STATUSES: tuple[Status, ...] = (
    "converged",  # 0: by iteration; the probability of a larger singular value is below 1e-9
    "exact",  # 1: by the eigenvalues of the Gram matrix
    "certified",  # 2: by iteration, and a Cholesky factorisation proves that no singular value is larger
    "corrected",  # 3: the exact value, because the factorisation failed for the value of the iteration
    "nonfinite",  # 4: NaN or infinity among the elements, as in other metrics
    "unconverged",  # 5: the steps ran out: a lower bound, which may be too small by more than the tolerance
    "unknown_size",  # 6: (operator norms) the size of the input is unknown
    "guessed",  # 7: (operator norms) several strides and paddings fit the recorded sizes; the likeliest was taken
)
"""A status is published as its index in this tuple."""

SMALL = 128
"""Up to this many rows or columns, the exact computation is faster than the iteration."""

SINGLE = 5e-7
"""Below this tolerance, float32 rounds too coarsely."""


class SpectralNormResult(float):
    """The largest singular value, as a float with attributes.

    Attributes
    ----------
    residual : float
        r = |W'u - value v| plus a bound on rounding: some singular value is within r of the value.
    status : str
        A word of `STATUSES`.
    steps : int
        How often the iteration applied the map; 0 if the value is exact.
    """

    residual: float
    status: Status
    steps: int

    def __new__(cls, value: float, residual: float, status: Status, steps: int = 0) -> SpectralNormResult:
        self = super().__new__(cls, value)
        self.residual, self.status, self.steps = residual, status, steps
        return self


def spectral_norm(
    w: Array,
    *,
    exact: bool = False,
    certify: bool = False,
    tolerance: float = 1e-6,
    random: np.random.Generator | None = None,
) -> SpectralNormResult:
    """The largest singular value of a weight, seen as a matrix of its outputs by everything else.

    Parameters
    ----------
    w : array (o, ...)
        Flattened to (o, i), as ``torch.nn.utils.spectral_norm(dim=0)`` does. A vector is one column, a number is
        itself.
    exact : bool
        Whether to take the eigenvalues of the Gram matrix in float64, whatever it costs. Matrices with a side of 128
        or less are always done so.
    certify : bool
        Whether to prove that no singular value exceeds ``(1 + tolerance)`` times the value, and to take the exact one
        if that fails.
    tolerance : float
        The relative error of the iteration.
    random : numpy.random.Generator, optional
        What the iteration's first vector is drawn from; by default a fixed one.

    Returns
    -------
    SpectralNormResult
        A float: 0 for an empty weight; NaN if there is a NaN, else infinity if there is an infinity.

    Raises
    ------
    MessageError
        If `tolerance` is not between 0 and 1.

    Examples
    --------
    >>> spectral_norm([[3.0, 0.0], [0.0, -8.0]])
    8.0
    >>> spectral_norm([3e300, 4e300])
    5e+300
    >>> import numpy as np
    >>> found = spectral_norm(np.diag(np.arange(300.0)), certify=True)
    >>> round(found, 4), found.status
    (299.0, 'certified')
    """
    check_tolerance(tolerance)
    a_mn = matrix(as_array(w))
    if a_mn.shape[1] > a_mn.shape[0]:
        a_mn = a_mn.T
    if a_mn.dtype.kind in "biu":
        a_mn = a_mn.astype(np.float64)
    elif a_mn.dtype == np.float16:
        a_mn = a_mn.astype(np.float32)
    if tolerance < SINGLE and a_mn.dtype.itemsize < (16 if a_mn.dtype.kind == "c" else 8):
        a_mn = as_float64(a_mn)
    if a_mn.size == 0:
        return SpectralNormResult(0.0, 0.0, "exact")
    if exact or a_mn.shape[1] <= SMALL:
        return _exact(a_mn)
    found = _iterate(a_mn, random, tolerance)
    scale = 1.0
    # squares may have left the range of the dtype, or the weight may be zero or not finite
    if not 1e-12 < found.value < 1e15:
        size = float(np.max(np.abs(a_mn)))
        if (result := trivial(size)) is not None:
            return result
        scale = power_of_two(size)
        a_mn = (a_mn / a_mn.real.dtype.type(scale)) if scale > 1e-30 else (a_mn.astype(np.float64) / scale)
        found = _iterate(a_mn, random, tolerance)
    status: Status = "converged"
    if certify or not found.converged:
        if not _certified(a_mn, found.value, tolerance):
            right = _exact(a_mn)
            return SpectralNormResult(right * scale, right.residual * scale, "corrected", found.steps)
        status = "certified"
    return SpectralNormResult(found.value * scale, found.residual * scale, status, found.steps)


def trivial(largest: float) -> SpectralNormResult | None:
    """The result for a weight whose largest modulus is 0 or not finite; None for other weights."""
    if largest == 0:
        return SpectralNormResult(largest, largest, "exact")
    return None if math.isfinite(largest) else SpectralNormResult(largest, largest, "nonfinite")


def check_tolerance(tolerance: object) -> None:
    """Raise `MessageError` unless `tolerance` is a number above 0 and below 1."""
    check(is_number(tolerance) and 0 < tolerance < 1, "tolerance is a relative error above 0 and below 1", tolerance)


def check_certify(certify: object) -> None:
    """Raise `MessageError` unless `certify`, the steps between two certificates, is an integer from 0 on."""
    check(is_whole(certify, 0), "certify is 0 or a positive number of steps", certify)


def _iterate(a_mn: NDArray[Any], random: np.random.Generator | None, tolerance: float) -> Extreme:
    generator = seeded("spectral_norm") if random is None else random
    with np.errstate(all="ignore"):
        return largest(product(a_mn), a_mn.shape[1], a_mn.dtype, generator, tolerance=tolerance)


def _gram(a_mn: NDArray[Any]) -> NDArray[Any]:
    a_mn = a_mn.astype(np.complex128 if a_mn.dtype.kind == "c" else np.float64, copy=False)
    gram: NDArray[Any] = a_mn.conj().T @ a_mn if a_mn.dtype.kind == "c" else a_mn.T @ a_mn
    return gram


def _exact(a_mn: NDArray[Any]) -> SpectralNormResult:
    """The largest singular value from the largest eigenvalue of the Gram matrix in float64; relative error 1e-13."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = float(np.max(np.abs(a_mn)))
    if (result := trivial(size)) is not None:
        return result
    # an exact power of two keeps the squares of the Gram matrix in range, whatever the scale of the weight
    scale = power_of_two(size)
    a_mn = as_float64(a_mn) / scale
    last = a_mn.shape[1] - 1
    wanted = (last, last)
    squares, vectors = scipy.linalg.eigh(_gram(a_mn), subset_by_index=wanted, overwrite_a=True, check_finite=False)
    if len(squares) != 1:
        # on some processors LAPACK silently returns no eigenvalue if all differ in their last bits only, as those of a
        # scaled Hadamard matrix do
        squares, vectors = scipy.linalg.eigh(_gram(a_mn), overwrite_a=True, check_finite=False, driver="evd")
    value, q_n = math.sqrt(max(float(squares[-1]), 0.0)), vectors[:, -1]
    residual = float(np.linalg.norm(a_mn.conj().T @ (a_mn @ q_n) - value**2 * q_n)) / value
    return SpectralNormResult(value * scale, residual * scale, "exact")


def _certified(a_mn: NDArray[Any], value: float, tolerance: float) -> bool:
    """Whether no singular value exceeds s = (1 + tolerance) value: whether s² I - A'A has a Cholesky factorisation."""
    gram = -_gram(a_mn)
    gram[np.diag_indices_from(gram)] += (value * (1 + tolerance)) ** 2
    try:
        scipy.linalg.cholesky(gram, lower=True, overwrite_a=True, check_finite=False)
    except scipy.linalg.LinAlgError:
        return False
    return True


@final
class SpectralNorm(PerMessage, Selected):
    r"""Spectral norm of each tensor of a kind: :math:`\sigma_1(W) = \max_{|v|=1} |Wv|`, W with one row for each output.

    Answers ``{kind}_spectral_norm``: a float64 scalar, in the unit of the data, for each message; beside it
    ``{kind}_spectral_norm_residual``, r = |W'u − σv| in the same unit: some singular value lies within r of σ; and
    ``{kind}_spectral_norm_status``: 0 converged, 1 exact, 2 certified, 3 corrected by the certificate, 4 NaN or
    infinity in the data.

    Parameters
    ----------
    kind : str
        A kind with data of shape (o, ...), such as a linear (o, i) or a convolutional (o, c, h, w) weight, flattened to
        (o, c·h·w). A vector is one column.
    exact : bool
        Whether to take the largest eigenvalue of the Gram matrix in float64 at every step.
    tolerance : float
        The relative error of the iteration.
    certify : int
        At global steps that are multiples of this it is proved that no singular value exceeds (1 + tolerance) σ; where
        the proof fails, the exact value is given. 1 proves every step, 0 none.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: Lanczos for W'W, from a random vector that is drawn by a generator seeded by stream and step, until the
    Lanczos polynomials show that a larger singular value (by more than `tolerance`) could be hidden only by a vector
    that has nearly nothing of its direction; one in :math:`10^9` has. Each step begins anew, so nothing that a
    singular value did before, such as growing past another, can hide it. Where 300 steps do not show it, the
    certificate decides.
    *Cost*: 20 to 150 products with W and its transpose, for which a large W is read from memory once each; a
    certificate one Gram matrix and one Cholesky factorisation in float64; exact :math:`O(\min(o,i)^3)`.
    *Invariant to* orthogonal maps of inputs and outputs, so to their order; scales with the data. For a convolution it
    is the norm of the reshaped kernel, which the norm of the convolution as a map exceeds by up to :math:`\sqrt{hw}`:
    see ``operator_norm``.
    *Edge values*: 0 for an empty or zero weight; NaN where NaN occurs, else infinity where infinity occurs. Never
    raises during a replay.
    *Numerics*: relative error below 1e-6, but for one random vector in :math:`10^9`; with a certificate, always. The
    value is never above the truth but for rounding. Data in float32 and smaller are multiplied in float32, all others
    in float64. Where the shorter side is 128 or less, and with `exact`, the error is below 1e-13. A few power
    iterations are wrong by percents just where people look, after initialisation.
    *Source*: T. Miyato et al., "Spectral Normalization for Generative Adversarial Networks", arXiv:1802.05957, section
    2.1; B. N. Parlett, "The Symmetric Eigenvalue Problem" (1998), chapters 7 and 13.
    *Formerly*: ikkuna's ``SpectralNormSubscriber`` (three power iterations, 3-13 % low); weightwatcher's
    ``spectral_norm`` is its square.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([[3.0, 0.0], [0.0, -8.0]]), **where)
    >>> [(said.kind, float(said.data)) for said in SpectralNorm().compute(message)][0]
    ('weights_spectral_norm', 8.0)
    """

    name = "spectral_norm"
    spoiled_by = ("elements", "reduce")
    version = 4
    invariances = ("rows", "sign", "orthogonal")
    checks = (check_tolerance, check_certify)

    gives = ("{kind}_spectral_norm", "{kind}_spectral_norm_residual", "{kind}_spectral_norm_status")
    kind: str = "weights"
    _: KW_ONLY
    exact: bool = False
    tolerance: float = 1e-6
    certify: int = 100

    def measure(self, message: Message) -> tuple[float, float, float]:
        """Answer one message with its spectral norm, its residual and its status."""
        found = spectral_norm(
            as_array(message.data),
            exact=self.exact,
            certify=bool(self.certify) and message.global_step % self.certify == 0,
            tolerance=self.tolerance,
            random=generator_of(message),
        )
        return found, found.residual, code(found.status, STATUSES)
