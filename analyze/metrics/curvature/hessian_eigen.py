"""The extreme eigenvalues of the Hessian of the loss: the curvature where it is largest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Unpack, final

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.curvature.block import Block, Products, by_unit_vectors
from analyze.metrics.curvature.of_loss import OfLoss, check_exact
from analyze.metrics.metric import Within
from analyze.metrics.spectra.lanczos import seeded

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

    def __init__(
        self, *, k: int = 1, exact: int = 512, tolerance: float = 1e-6, steps: int = 100, **within: Unpack[Within]
    ) -> None:
        _check(k, exact, tolerance, steps)
        answers = ("", "_max", "_min", "_residual")
        super().__init__((f"loss_hessian_eigen{one}" for one in answers), exact=exact, **within)
        self.k, self.tolerance, self.steps = k, tolerance, steps

    def of(self, block: Block, random: np.random.Generator) -> Iterable[float | Tensor]:
        """The largest eigenvalues in magnitude, the greatest, the least, and the residual."""
        if block.size <= self.exact:
            found = of_matrix(block.hessian(), self.k)
        else:
            found = _lanczos(block.products, block.size, self.k, self.tolerance, self.steps, random)
        values = torch.from_numpy(np.ascontiguousarray(found.values))
        return values, found.greatest, found.least, found.residual
