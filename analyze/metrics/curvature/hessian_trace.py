"""The trace of the Hessian of the loss: the sum of its curvatures over all directions."""

from __future__ import annotations

import math
from typing import NamedTuple, Unpack, final

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_whole
from analyze.metrics.curvature.block import BYTES, Block, Products, at_once, diagonal_of
from analyze.metrics.curvature.of_loss import OfLoss, check_exact
from analyze.metrics.metric import Within
from analyze.metrics.spectra.lanczos import seeded

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

    def __init__(self, *, exact: int = 512, probes: int = PROBES, **within: Unpack[Within]) -> None:
        check_probes(probes)
        ends = ("", "_low", "_high")
        super().__init__((f"loss_hessian_trace{end}" for end in ends), exact=exact, **within)
        self.probes = probes

    def of(self, block: Block, random: np.random.Generator) -> Estimated:
        """The trace and its interval."""
        return trace_of(block, self.exact, self.probes, random)
