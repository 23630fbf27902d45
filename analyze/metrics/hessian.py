"""The trace and the extreme eigenvalues of the Hessian of a loss."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple, TypeAlias, final

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.metric import PerMessage
from analyze.metrics.spectral_norm import generator_of, seeded
from tracer.errors import CaptureError
from tracer.messaging.messages import DEFAULT_TAG, Message
from tracer.messaging.receiver import Objective

Products: TypeAlias = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Maps k vectors, the rows of (k, P), to their products with a symmetric matrix (P, P)."""

AT_ONCE = 64
"""The most vectors that are multiplied in one call."""

BYTES = 1 << 28
"""The most bytes of vectors in one call; one vector is always allowed."""

_found: weakref.WeakKeyDictionary[Objective, dict[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()
"""Results by loss, shared between metrics; an entry disappears with its loss, after the delivery of its message."""


class Block:
    """A loss as a function of the parameters of some modules; the others are constants.

    Parameters
    ----------
    objective : Objective
    modules : tuple of str or None
        Globs over dotted paths of modules; None means all.

    Raises
    ------
    CaptureError
        If none of these modules has trained parameters.
    """

    def __init__(self, objective: Objective, modules: tuple[str, ...] | None = None) -> None:
        self.objective = objective
        self.modules = modules
        sizes = objective.parameters
        of = {path: path.rpartition(".")[0] for path in sizes}
        taken = [modules is None or any(fnmatchcase(of[path], one) for one in modules) for path in sizes]
        self._mask_p = np.repeat(np.array(taken, np.bool_), np.array([*sizes.values()], np.int64))
        self.size = int(self._mask_p.sum())
        if not self.size:
            there = ", ".join(dict.fromkeys(of.values())) or "none"
            asked = "" if modules is None else f" of modules {', '.join(modules)}"
            raise CaptureError(f"no parameters{asked} are trained; modules with such are {there}")

    @property
    def rows(self) -> int:
        """N, the rows of the network's output."""
        return self.objective.rows

    def products(self, vectors_kp: NDArray[np.float64]) -> NDArray[np.float64]:
        """The products of the block's Hessian with k vectors."""
        if self._mask_p.all():
            return self.objective.hessian_products(vectors_kp)
        whole = np.zeros((len(vectors_kp), len(self._mask_p)))
        whole[:, self._mask_p] = vectors_kp
        return self.objective.hessian_products(whole)[:, self._mask_p]

    def row_gradients(self, weights_kn: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weighted sums of the rows' contributions to the gradient by the block's parameters, (k, P)."""
        found = self.objective.row_gradients(weights_kn)
        return found if self._mask_p.all() else found[:, self._mask_p]

    # -- shared ---------------------------------------------------------------------------------------------

    def hessian(self) -> NDArray[np.float64]:
        """The Hessian (P, P), by P products."""
        return self._once("hessian", lambda: np.concatenate([*by_unit_vectors(self.products, self.size)]))

    def diagonal(self) -> NDArray[np.float64]:
        """The diagonal of the Hessian (P,), by P products."""

        def diagonal() -> NDArray[np.float64]:
            known = self._known().get(("hessian", self.modules))
            return np.diagonal(known).copy() if known is not None else diagonal_of(self.products, self.size)

        return self._once("diagonal", diagonal)

    def second_moments(self) -> NDArray[np.float64]:
        """The mean square (P,) of the rows' gradients; a row's gradient is N times its contribution to the gradient."""

        def second_moments() -> NDArray[np.float64]:
            found = np.zeros(self.size)
            for rows_kp in by_unit_vectors(self.row_gradients, self.rows, at_once(self.size)):
                found += np.square(rows_kp).sum(0)
            return self.rows * found

        return self._once("second moments", second_moments)

    def _known(self) -> dict[tuple[Any, ...], Any]:
        return _found.setdefault(self.objective, {})

    def _once(self, what: str, find: Callable[[], NDArray[np.float64]]) -> NDArray[np.float64]:
        known, key = self._known(), (what, self.modules)
        if key not in known:
            known[key] = find()
        found: NDArray[np.float64] = known[key]
        return found


def at_once(size: int) -> int:
    """How many vectors of `size` elements are multiplied in one call."""
    return max(1, min(AT_ONCE, BYTES // (8 * size)))


def by_unit_vectors(products: Products, size: int, count: int = 0) -> Iterator[NDArray[np.float64]]:
    """The rows of a matrix, `count` at a time, as its products with the unit vectors."""
    count = count or at_once(size)
    for first in range(0, size, count):
        yield products(np.eye(min(count, size - first), size, first))


def diagonal_of(products: Products, size: int) -> NDArray[np.float64]:
    """The diagonal (P,) of a matrix that is given by its products.

    Examples
    --------
    >>> diagonal_of(lambda v_kp: v_kp @ np.array([[4.0, 1.0], [1.0, 2.0]]), 2)
    array([4., 2.])
    """
    found, first = np.empty(size), 0
    for rows_kp in by_unit_vectors(products, size):
        found[first : first + len(rows_kp)] = np.diagonal(rows_kp, first)
        first += len(rows_kp)
    return found


def check_exact(exact: object) -> None:
    """Raise `MessageError` unless `exact` is a valid limit of parameters up to which a metric computes exactly."""
    check(is_whole(exact, 0), "exact is a number of parameters, an integer from 0", exact)


class OfLoss(PerMessage):
    """Answers each training loss with numbers computed from its derivatives, at the weights of the step.

    Parameters
    ----------
    produces : iterable of str
        The kinds of its answers.
    exact : int
        See `check_exact`.
    subsample : int
        As in `tracer.Subscription`.
    modules : str, iterable of str, or None
        Globs over dotted paths: the loss is differentiated by the parameters of these modules only. None means all.
    """

    needs_model = True
    checks: ClassVar[tuple[Callable[..., object], ...]] = (check_exact,)

    kind = "loss"
    _: KW_ONLY
    exact: int = 512
    subsample: int = 1
    modules: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        modules = self.modules
        self._globs = (modules,) if isinstance(modules, str) else None if modules is None else tuple(modules)
        self._objective: Objective | None = None

    def where(self) -> tuple[str, int, None]:
        """Every loss of the training; `modules` choose parameters, not messages."""
        return DEFAULT_TAG, self.subsample, None

    def know_objective(self, objective: Objective | None) -> None:
        """Keep the objective of the next loss; None after its message was delivered."""
        self._objective = objective

    def measure(self, message: Message) -> Iterable[float | Tensor]:
        """The numbers of a loss.

        Raises
        ------
        CaptureError
            If the loss cannot be differentiated, or no longer.
        """
        if self._objective is None:
            raise CaptureError(
                f"{self.name} cannot differentiate the loss of step {message.global_step}: only one on which backward "
                "is called next, not what is logged, and not those of several optimizers, which are told apart when "
                "the step ends"
            )
        return self.of(Block(self._objective, self._globs), generator_of(message))

    @abstractmethod
    def of(self, block: Block, random: np.random.Generator) -> Iterable[float | Tensor]:
        """The numbers of a loss, as a function of the block's parameters."""


PROBES = 60
"""The default number of products for an estimate."""
LEAST = 6
"""The fewest products from which an interval can be estimated."""
_CONFIDENCE = 0.99
"""The probability, over the random vectors, that the interval contains the exact value."""


class Estimated(NamedTuple):
    """A number and the ends of its interval; both ends are the number itself if it is exact."""

    value: float
    low: float
    high: float

    def __float__(self) -> float:
        return self.value


def hessian_trace(
    products: Products,
    size: int,
    *,
    exact: int = 512,
    probes: int = PROBES,
    random: np.random.Generator | None = None,
) -> Estimated:
    """The trace of a symmetric matrix that is known by its products with vectors.

    Parameters
    ----------
    products : callable
        Takes k vectors (k, P), each a row, to the products of the matrix with each, (k, P).
    size : int
        P.
    exact : int
        Up to so many parameters the trace is the sum of P elements, each of its own product.
    probes : int
        Beyond, so many products are taken, 6 at least.
    random : numpy.random.Generator, optional
        What the vectors are drawn from; by default the same for each call.

    Returns
    -------
    Estimated
        NaN where products have NaN or infinity.

    Raises
    ------
    MessageError
        If `exact` or `probes` is out of its range.

    Examples
    --------
    >>> matrix = np.diag(np.arange(4.0))
    >>> hessian_trace(lambda v_kp: v_kp @ matrix, 4)
    Estimated(value=6.0, low=6.0, high=6.0)
    >>> wide = np.diag(np.linspace(0, 1, 2000) ** 20)
    >>> found = hessian_trace(lambda v_kp: v_kp @ wide, 2000)
    >>> found.low < float(np.trace(wide)) < found.high
    True
    """
    check_exact(exact)
    check_probes(probes)
    with np.errstate(invalid="ignore", over="ignore"):
        if size <= exact:
            value = float(diagonal_of(products, size).sum())
            return Estimated(value, value, value)
        return _estimated(products, size, probes, random if random is not None else seeded("hessian_trace"))


def check_probes(probes: object) -> None:
    """Raise `MessageError` unless `probes` products are enough for an estimate."""
    check(is_whole(probes, LEAST), f"probes is a number of products, an integer of {LEAST} at least", probes)


def _estimated(products: Products, size: int, probes: int, random: np.random.Generator) -> Estimated:
    """The trace by Hutch++; `BYTES` limits the vectors of its basis."""
    k = min(probes // 3, size, BYTES // (8 * size))
    image_kp = products(signs(random, k, size)) if k else np.zeros((0, size))
    if not np.isfinite(image_kp).all():
        return Estimated(math.nan, math.nan, math.nan)
    basis_kp = np.ascontiguousarray(np.linalg.qr(image_kp.T)[0].T)
    known = float(np.einsum("kp,kp->", basis_kp, products(basis_kp))) if k else 0.0
    drawn: list[float] = []
    while len(drawn) < probes - 2 * k:
        rest_kp = signs(random, min(at_once(size), probes - 2 * k - len(drawn)), size)
        rest_kp -= (rest_kp @ basis_kp.T) @ basis_kp
        drawn += np.einsum("kp,kp->k", rest_kp, products(rest_kp)).tolist()
    found = mean_of(np.array(drawn))
    return Estimated(known + found.value, known + found.low, known + found.high)


def signs(random: np.random.Generator, count: int, size: int) -> NDArray[np.float64]:
    """Vectors (count, size) of random signs."""
    return 2.0 * random.integers(0, 2, (count, size)).astype(np.float64) - 1.0


def mean_of(drawn_k: NDArray[np.float64]) -> Estimated:
    """The mean of independently drawn numbers, with Student's interval for the expected value."""
    value = float(drawn_k.mean())
    reach = float(scipy.stats.t.ppf(0.5 + _CONFIDENCE / 2, len(drawn_k) - 1) * drawn_k.std(ddof=1))
    reach /= math.sqrt(len(drawn_k))
    return Estimated(value, value - reach, value + reach)


def trace_of(block: Block, exact: int, probes: int, random: np.random.Generator) -> Estimated:
    """The trace of a block's Hessian; up to `exact` parameters, from the diagonal that the metrics share."""
    if block.size <= exact:
        value = float(block.diagonal().sum())
        return Estimated(value, value, value)
    return hessian_trace(block.products, block.size, exact=0, probes=probes, random=random)


@final
class HessianTrace(OfLoss):
    r"""Trace of the Hessian of the loss: :math:`\mathrm{tr}\,H = \sum_j \partial^2 L / \partial w_j^2`.

    Answers ``loss_hessian_trace``: a float64 scalar, in the unit of the loss over that of a squared parameter, for each
    loss of the training; beside it ``loss_hessian_trace_low`` and ``loss_hessian_trace_high``, the ends of its
    interval, which are the number itself where that is exact.

    Parameters
    ----------
    exact : int
        Up to so many parameters the trace is exact, by as many Hessian-vector products; beyond it is estimated.
    probes : int
        How many Hessian-vector products an estimate takes, 6 at least.
    subsample : int
        As in `tracer.Subscription`.
    modules : str, iterable of str, or None
        Globs over dotted paths: only the parameters of these modules vary, the others are constants. None means all.

    Raises
    ------
    MessageError
        If `exact` or `probes` is out of its range.
    CaptureError
        Live, if the loss has no second derivatives (fused attention kernels and compiled regions have none), was
        logged, or is one of several optimizers. The training then goes on without this metric.

    Notes
    -----
    *Formula*: :math:`\sum_j e_j' H e_j`; beyond `exact` parameters Hutch++: with a third of the products an orthonormal
    basis Q of the image of random signs, with a third :math:`\mathrm{tr}\,Q'HQ`, with the rest the mean of
    :math:`g'(I-QQ')H(I-QQ')g` over vectors g of random signs. Q has as many vectors as 256 MiB hold.
    *Needs*: the model: it runs live (``receivers=[...]``) and in re-enactments, and a replay refuses it.
    *Cost*: each Hessian-vector product is about two backwards of the step; an exact diagonal is shared with the other
    metrics of curvature of the same loss.
    *Invariant to* the order of parameters and of datapoints; scales with the loss.
    *Edge values*: the Hessian is that of each loss on which ``backward`` is called, a micro-batch's where gradients are
    accumulated, with the masks of dropout and the batch statistics of its forward. 0 for a loss that is linear in the
    parameters; NaN where NaN or infinity occurs in it.
    *Numerics*: derivatives in the dtype of the training, sums in float64. The interval holds the exact value with a
    probability of 99 %, over the random signs (Student's, of what Q leaves), but for the rounding of the products.
    *Found by*: sharpness, flat minima, curvature.
    *Source*: R. A. Meyer, C. Musco, C. Musco, D. P. Woodruff, "Hutch++: Optimal Stochastic Trace Estimation" (2021);
    B. A. Pearlmutter, "Fast Exact Multiplication by the Hessian" (1994).
    *Formerly*: cockpit's ``HessTrace`` (which is a number for each parameter; see `modules`).

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer, heard = torch.optim.SGD(model.parameters(), lr=0.1), tracer.Collect("loss_hessian_trace")
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with tracer.record(path, model, optimizer, receivers=[HessianTrace(), heard]):
    ...     (model(torch.tensor([[3.0, 4.0]])) ** 2).sum().backward()
    ...     optimizer.step()
    >>> [float(message.data) for message in heard]
    [50.0]
    """

    name = "hessian_trace"

    checks = (check_exact, check_probes)
    gives = ("loss_hessian_trace", "loss_hessian_trace_low", "loss_hessian_trace_high")
    _: KW_ONLY
    exact: int = 512
    probes: int = PROBES

    def of(self, block: Block, random: np.random.Generator) -> Estimated:
        """The trace and its interval."""
        return trace_of(block, self.exact, self.probes, random)


_FIRST, _NEXT = 8, 1.2
"""The products before the first test of convergence, and the factor on their number before each further test."""

_BYTES, _LEAST_HELD = 1 << 30, 8
"""The most bytes of basis vectors, and the fewest vectors that are allowed. A full basis ends the iteration."""


class Extremes(NamedTuple):
    """The result of `hessian_eigen`.

    Attributes
    ----------
    values : array
        The k eigenvalues that are largest in magnitude, the largest first; fewer for a smaller matrix.
    greatest, least : float
        The greatest and the least eigenvalue.
    residual : float
        Each of these numbers is within this distance of an eigenvalue; 0 if they are exact.
    products : int
        The number of products with a vector.
    """

    values: NDArray[np.float64]
    greatest: float
    least: float
    residual: float
    products: int


def hessian_eigen(
    products: Products,
    size: int,
    *,
    k: int = 1,
    exact: int = 512,
    tolerance: float = 1e-6,
    steps: int = 100,
    random: np.random.Generator | None = None,
) -> Extremes:
    """The extreme eigenvalues of a symmetric matrix that is known by its products with vectors.

    Parameters
    ----------
    products : callable
        Takes vectors (1, P) or more, each a row, to the products of the matrix with each.
    size : int
        P.
    k : int
        How many eigenvalues, of the largest magnitude.
    exact : int
        Up to so many parameters the whole matrix is made, by P products, and LAPACK finds its eigenvalues.
    tolerance : float
        Beyond, the residual to stop at, relative to the largest magnitude.
    steps : int
        And the most products; after these the residual says how good the numbers are. There are no more than 1 GiB
        of vectors, but 8 at least.
    random : numpy.random.Generator, optional
        What the first vector is drawn from; by default the same for each call.

    Returns
    -------
    Extremes
        NaN where products have NaN or infinity.

    Raises
    ------
    MessageError
        If a parameter is out of its range.

    Examples
    --------
    >>> matrix = np.diag([1.0, -5.0, 4.0, 0.5])
    >>> hessian_eigen(lambda v_kp: v_kp @ matrix, 4, k=2)[:3]
    (array([-5.,  4.]), 4.0, -5.0)
    >>> wide = np.diag(np.linspace(-1, 1, 3000) ** 31 * 10)
    >>> found = hessian_eigen(lambda v_kp: v_kp @ wide, 3000)
    >>> round(found.greatest, 9), round(found.least, 9), found.residual < 1e-5, found.products < 100
    (10.0, -10.0, True, True)
    """
    _check(k, exact, tolerance, steps)
    if size <= exact:
        return of_matrix(np.concatenate([*by_unit_vectors(products, size)]), k)
    return _lanczos(products, size, k, tolerance, steps, random if random is not None else seeded("hessian_eigen"))


def _check(k: object, exact: object, tolerance: object, steps: object) -> None:
    check(is_whole(k, 1), "k is a positive number of eigenvalues", k)
    check_exact(exact)
    check(is_number(tolerance) and 0 < tolerance < 1, "tolerance is a relative residual between 0 and 1", tolerance)
    check(is_whole(steps, 2), "steps is a number of products, an integer of 2 at least", steps)


def of_matrix(matrix_pp: NDArray[np.float64], k: int) -> Extremes:
    """The extreme eigenvalues of a matrix that is symmetric except for rounding, by LAPACK."""
    if not np.isfinite(matrix_pp).all():
        return _nothing(k, len(matrix_pp))
    values = scipy.linalg.eigvalsh((matrix_pp + matrix_pp.T) / 2)
    return Extremes(values[_largest(values, k)], float(values[-1]), float(values[0]), 0.0, len(matrix_pp))


def _largest(values: NDArray[np.float64], k: int) -> NDArray[np.intp]:
    """The indices of the k largest magnitudes, largest first; of two equal magnitudes, the positive value first."""
    return np.lexsort((-values, -np.abs(values)))[:k]


def _nothing(k: int, products: int) -> Extremes:
    return Extremes(np.full(k, math.nan), math.nan, math.nan, math.nan, products)


def _lanczos(
    products: Products, size: int, k: int, tolerance: float, steps: int, random: np.random.Generator
) -> Extremes:
    basis = np.empty((min(steps, size, max(_LEAST_HELD, _BYTES // (8 * size))), size))
    diagonal: list[float] = []
    beside: list[float] = []
    vector_p = random.standard_normal(size)
    vector_p /= np.linalg.norm(vector_p)
    look = max(_FIRST, k + 2)
    while True:
        done = len(diagonal)
        basis[done] = vector_p
        rest_p = products(vector_p[None])[0]
        if not np.isfinite(rest_p).all():
            return _nothing(k, done + 1)
        diagonal.append(float(vector_p @ rest_p))
        length = float(np.linalg.norm(rest_p))
        known = basis[: done + 1]
        for _ in range(2):  # the second pass removes what rounding left of the first
            rest_p = rest_p - (known @ rest_p) @ known
        off = float(np.linalg.norm(rest_p))
        if off <= 1e-14 * length:
            off = 0.0  # nothing but rounding
        done += 1
        last = off == 0 or done == len(basis)
        if last or done >= look:
            look = math.ceil(done * _NEXT)
            found = _ritz(diagonal, beside, off, k)
            if last or found.residual <= tolerance * abs(found.values[0]):
                return found
        beside.append(off)
        vector_p = rest_p / off


def _ritz(diagonal: list[float], beside: list[float], off: float, k: int) -> Extremes:
    """The Ritz values: eigenvalues of the tridiagonal projection, as estimates of those of the matrix."""
    values, vectors = scipy.linalg.eigh_tridiagonal(diagonal, beside)
    residuals = off * np.abs(vectors[-1])
    order = _largest(values, k)
    asked = [*order, 0, len(values) - 1]
    return Extremes(values[order], float(values[-1]), float(values[0]), float(residuals[asked].max()), len(values))


@final
class HessianEigen(OfLoss):
    r"""Largest eigenvalues of the Hessian of the loss in magnitude: :math:`|\lambda_1| \ge |\lambda_2| \ge \dots`.

    Answers ``loss_hessian_eigen``: a float64 vector (k,), in the unit of the loss over that of a squared parameter, for
    each loss of the training; beside it ``loss_hessian_eigen_max`` and ``loss_hessian_eigen_min``, the greatest and the
    least eigenvalue, and ``loss_hessian_eigen_residual``: each of these numbers has an eigenvalue within this distance.

    Parameters
    ----------
    k : int
        How many eigenvalues.
    exact : int
        Up to so many parameters the whole Hessian is made, by as many Hessian-vector products.
    tolerance : float
        Beyond, the residual to stop at, relative to the largest magnitude.
    steps : int
        And the most Hessian-vector products. For each a vector is held in float64, so there are no more than 1 GiB
        holds, but 8 at least.
    subsample : int
        As in `tracer.Subscription`.
    modules : str, iterable of str, or None
        Globs over dotted paths: only the parameters of these modules vary, the others are constants. None means all.

    Raises
    ------
    MessageError
        If a parameter is out of its range.
    CaptureError
        Live, if the loss has no second derivatives (fused attention kernels and compiled regions have none), was
        logged, or is one of several optimizers. The training then goes on without this metric.

    Notes
    -----
    *Formula*: LAPACK's eigenvalues of H; beyond `exact` parameters Lanczos from a random vector, with full
    orthogonalisation, until all the numbers that are answered have a residual :math:`|Hv-\lambda v|` of `tolerance`
    times the largest magnitude at most. Where :math:`\lambda` is apart from the others by d, its error is at most the
    squared residual over d.
    *Needs*: the model: it runs live (``receivers=[...]``) and in re-enactments, and a replay refuses it.
    *Cost*: each Hessian-vector product is about two backwards of the step; beyond `exact` parameters mostly 20 to 100
    of them. An exact Hessian is shared with the other metrics of curvature of the same loss.
    *Invariant to* the order of parameters and of datapoints; scales with the loss.
    *Edge values*: the Hessian is that of each loss on which ``backward`` is called, a micro-batch's where gradients are
    accumulated, with the masks of dropout and the batch statistics of its forward. 0 for a loss that is linear in the
    parameters; NaN where NaN or infinity occurs in it. Beyond `exact` parameters an eigenvalue that occurs several
    times is found once.
    *Numerics*: derivatives in the dtype of the training, which bounds the residual from below; all else in float64.
    *Found by*: sharpness, edge of stability, curvature, negative curvature, saddle points.
    *Source*: B. N. Parlett, "The Symmetric Eigenvalue Problem" (1998), chapters 11 and 13; B. A. Pearlmutter, "Fast
    Exact Multiplication by the Hessian" (1994).
    *Formerly*: ikkuna's ``HessianEigenSubscriber`` (power iterations, which stop early where eigenvalues are close);
    cockpit's ``HessMaxEV``.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer, heard = torch.optim.SGD(model.parameters(), lr=0.1), tracer.Collect("loss_hessian_eigen")
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with tracer.record(path, model, optimizer, receivers=[HessianEigen(k=2), heard]):
    ...     (model(torch.tensor([[3.0, 4.0], [4.0, -3.0]])) ** 2).mean().backward()
    ...     optimizer.step()
    >>> [message.data.tolist() for message in heard]
    [[25.0, 25.0]]
    """

    name = "hessian_eigen"

    checks = (_check,)
    gives = tuple(f"loss_hessian_eigen{what}" for what in ("", "_max", "_min", "_residual"))
    _: KW_ONLY
    k: int = 1
    exact: int = 512
    tolerance: float = 1e-6
    steps: int = 100

    def of(self, block: Block, random: np.random.Generator) -> Iterable[float | Tensor]:
        """The largest eigenvalues in magnitude, the greatest, the least, and the residual."""
        if block.size <= self.exact:
            found = of_matrix(block.hessian(), self.k)
        else:
            found = _lanczos(block.products, block.size, self.k, self.tolerance, self.steps, random)
        values = torch.from_numpy(np.ascontiguousarray(found.values))
        return values, found.greatest, found.least, found.residual
