"""A power law fitted to the tail of a weight's spectrum, and WeightWatcher's numbers.

Shapes: ``w_oc`` is a matrix of o outputs by c inputs; N and M are its longer and its shorter side; λ are the
eigenvalues of W'W, its squared singular values.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, final, get_args

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.checks import check, check_word
from analyze.metrics.inputs import power_of_two
from analyze.metrics.metric import PerMessage, Selected
from analyze.metrics.spectra import (
    SpectrumOfWeights,
    Status,
    code,
    once,
    pieces,
    singular,
    singular_of_matrix,
)
from analyze.metrics.spectral_norm import generator_of, seeded
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array

Conv = Literal["slices", "reshape"]


@dataclass(frozen=True, slots=True, eq=False)
class PowerLawResult:
    """A power law fitted to a tail; ``float()`` gives alpha.

    Attributes
    ----------
    alpha : float
        The exponent of the density; NaN if there is no fit.
    xmin : float
        Where the tail begins.
    D : float
        The Kolmogorov-Smirnov distance of the tail from the law.
    sigma : float
        The standard error of alpha: (alpha - 1) / sqrt(num_spikes).
    num_spikes : int
        How many numbers the tail has, xmin included.
    status : str
        ``"ok"``; or why there is no fit: ``"too_few"`` (fewer than two different positive numbers), ``"empty"``,
        ``"zero"``, ``"nonfinite"``.
    """

    alpha: float
    xmin: float
    D: float
    sigma: float
    num_spikes: int
    status: Status

    def __float__(self) -> float:
        return self.alpha


def power_law(x: Array) -> PowerLawResult:
    """A power law fitted to the tail of positive numbers: density proportional to x to the power of -alpha.

    Parameters
    ----------
    x : array of any shape
        Such as the squared `singular_values` of a weight. Numbers that are not positive are left out.

    Returns
    -------
    PowerLawResult

    Notes
    -----
    For each possible beginning of the tail the maximum-likelihood exponent; the beginning with the smallest
    Kolmogorov-Smirnov distance is taken, the first of equals. A. Clauset, C. R. Shalizi, M. E. J. Newman, "Power-law
    distributions in empirical data", arXiv:0706.1062, sections 3.1 and 3.3. As in WeightWatcher the distance is from
    the empirical distribution below each number. (For fewer than 20 numbers WeightWatcher 0.7.7 uses a rule of its
    own.)

    Examples
    --------
    >>> import numpy as np
    >>> found = power_law((1 - np.arange(1000) / 1000) ** (-1 / 1.5))
    >>> round(found.alpha, 2), found.xmin, found.num_spikes
    (2.51, 1.0, 1000)
    """
    array = as_array(x)
    if array.dtype.kind == "c":
        raise MessageError("a power law is fitted to real numbers, not to complex ones")
    values = np.sort(array.astype(np.float64).reshape(-1))
    if not values.size:
        return _no_fit("empty")
    if not np.isfinite(values).all():
        return _no_fit("nonfinite")
    values = values[values > 0]
    if not len(values):
        return _no_fit("zero")
    fit = _fitted(np.log(values))
    return replace(fit, xmin=float(values[-fit.num_spikes])) if fit.num_spikes else fit


def _no_fit(status: Status) -> PowerLawResult:
    return PowerLawResult(math.nan, math.nan, math.nan, math.nan, 0, status)


def _fitted(logs: NDArray[np.float64]) -> PowerLawResult:
    """The fit to numbers, given their logarithms in ascending order."""
    count = len(logs)
    if count < 2 or logs[0] == logs[-1]:
        return _no_fit("too_few")
    sizes = count - np.arange(count)
    sums = np.cumsum(logs[::-1])[::-1] - sizes * logs
    begins = np.flatnonzero(np.concatenate(([True], logs[1:] > logs[:-1])) & (logs < logs[-1]))
    steps, best, place = np.arange(count), math.inf, -1
    for begin in begins:
        size, total = int(sizes[begin]), float(sums[begin])
        if not total > 0:
            continue
        law = np.exp((logs[begin:] - logs[begin]) * (-size / total))
        law += steps[:size] / size  # now 1 - (the law's distribution function) + (the empirical one)
        law -= 1
        distance = max(float(law.max()), -float(law.min()))
        if distance < best:
            best, place = distance, int(begin)
    if place < 0:
        return _no_fit("too_few")
    size = int(sizes[place])
    alpha = 1 + size / float(sums[place])
    with np.errstate(over="ignore", under="ignore"):
        xmin = float(np.exp(logs[place]))
    return PowerLawResult(alpha, xmin, best, (alpha - 1) / math.sqrt(size), size, "ok")


@dataclass(frozen=True, slots=True, eq=False)
class _Esd:
    """The nonzero eigenvalues of a weight's matrices, together, as base-10 logarithms in ascending order.

    `shares` are the eigenvalues over the largest; `rank` is the sum of the matrices' ranks.
    """

    logs: NDArray[np.float64]
    shares: NDArray[np.float64]
    rows: int
    columns: int
    matrices: int
    rank: int
    status: Status


def _esd(w: Array | None, conv: Conv) -> _Esd:
    return once(w, ("esd", conv), lambda: _collected(_spectra(w, conv)))


def _spectra(w: Array | None, conv: Conv) -> list[SpectrumOfWeights]:
    array = as_array(w)
    if conv == "reshape" or array.ndim < 3:
        return [singular(w)]
    return [singular_of_matrix(w_oc) for w_oc in pieces(array)]


def _collected(spectra: list[SpectrumOfWeights]) -> _Esd:
    none = np.zeros(0)
    bad: tuple[Status, ...] = ("nonfinite", "empty")
    for status in bad:
        if not spectra or any(one.status == status for one in spectra):
            return _Esd(none, none, 0, 0, len(spectra), 0, status if spectra else "empty")
    rows, columns = max(spectra[0].rows, spectra[0].columns), min(spectra[0].rows, spectra[0].columns)
    if all(one.status == "zero" for one in spectra):
        return _Esd(none, none, rows, columns, len(spectra), 0, "zero")
    logs = np.sort(np.concatenate([2 * (np.log10(one.values[: one.rank]) + math.log10(one.scale)) for one in spectra]))
    shares = 10 ** (logs - logs[-1])
    return _Esd(logs, shares, rows, columns, len(spectra), sum(one.rank for one in spectra), "ok")


@dataclass(frozen=True, slots=True, eq=False)
class WeightWatcherResult:
    """WeightWatcher's numbers of a weight, under WeightWatcher's names; ``float()`` gives alpha.

    Attributes
    ----------
    alpha, xmin, D, sigma, num_spikes
        The power law of the eigenvalues λ of W'W, see `PowerLawResult`; WeightWatcher calls the last ``num_pl_spikes``.
    alpha_weighted : float
        alpha · log10 of the largest λ.
    log_alpha_norm : float
        log10 of the sum of all λ to the power of alpha.
    log_norm, log_spectral_norm : float
        log10 of the sum of all λ (the squared Frobenius norm), and of the largest (the squared spectral norm).
    stable_rank : float
        The sum of all λ over the largest.
    entropy : float
        The entropy of the shares λ / sum λ, divided by the logarithm of the rank; from 0 to 1.
    matrix_rank, rank_loss : int
        The numerical rank, and full rank minus it; for a convolution, the sums over its matrices.
    mp_softrank : float
        The upper edge of the Marchenko-Pastur law over the largest λ.
    mp_spikes : int
        How many λ are above that edge.
    status : str
        ``"ok"``; ``"too_few"`` without a fit; ``"zero"``, ``"empty"`` or ``"nonfinite"``.
    """

    alpha: float
    xmin: float
    D: float
    sigma: float
    num_spikes: int
    alpha_weighted: float
    log_alpha_norm: float
    log_norm: float
    log_spectral_norm: float
    stable_rank: float
    entropy: float
    matrix_rank: int
    rank_loss: int
    mp_softrank: float
    mp_spikes: int
    status: Status

    def __float__(self) -> float:
        return self.alpha


BOARD = tuple(name for name in WeightWatcherResult.__dataclass_fields__ if name != "status")
"""The names of WeightWatcher's numbers, in the order of the answers."""


def weightwatcher(w: Array, *, conv: Conv = "slices") -> WeightWatcherResult:
    """WeightWatcher's numbers of a weight.

    Parameters
    ----------
    w : array (o, ...)
    conv : {"slices", "reshape"}
        A kernel of three or more axes is a matrix (o, c) for each of its positions, the eigenvalues of all together
        (WeightWatcher's rule); or one matrix of its outputs by everything else.

    Returns
    -------
    WeightWatcherResult

    Raises
    ------
    MessageError
        If `conv` is another word.

    Examples
    --------
    >>> import numpy as np
    >>> found = weightwatcher(np.diag(np.sqrt([4.0, 2.0, 1.0, 1.0])))
    >>> round(found.stable_rank, 6), found.matrix_rank, found.rank_loss, round(found.log_norm, 6)
    (2.0, 4, 0, 0.90309)
    """
    check_conv(conv)
    return _watched(_esd(as_array(w), conv))


def check_conv(conv: object) -> None:
    """Raise `MessageError` unless `conv` is one of its words."""
    check_word("conv", conv, get_args(Conv))


def fit_of(esd: _Esd) -> PowerLawResult:
    """The power law of a weight's eigenvalues."""
    return _no_fit(esd.status) if esd.status != "ok" else _fitted(esd.logs * math.log(10))


def _watched(esd: _Esd) -> WeightWatcherResult:
    fit, nan = fit_of(esd), math.nan
    full = esd.columns * esd.matrices
    begin = (fit.alpha, fit.xmin, fit.D, fit.sigma, fit.num_spikes)
    if esd.status != "ok":
        numbers = (nan,) * 6
        return WeightWatcherResult(*begin, *numbers, 0, full, nan, 0, esd.status)
    top, shares = float(esd.logs[-1]), esd.shares
    total = float(shares.sum())
    with np.errstate(under="ignore"):
        log_alpha_norm = fit.alpha * top + float(np.log10(np.sum(shares**fit.alpha)))
        p = shares / total
        entropy = -float(np.sum(p * np.log(p, where=p > 0, out=np.zeros_like(p))))
    edge = marchenko_pastur_edge(np.concatenate([np.zeros(full - len(shares)), shares]), esd.rows, esd.columns)
    return WeightWatcherResult(
        *begin,
        alpha_weighted=fit.alpha * top,
        log_alpha_norm=log_alpha_norm,
        log_norm=top + math.log10(total),
        log_spectral_norm=top,
        stable_rank=total,
        entropy=entropy / math.log(esd.rank) if esd.rank > 1 else 0.0,
        matrix_rank=esd.rank,
        rank_loss=full - esd.rank,
        mp_softrank=edge,
        mp_spikes=int(np.count_nonzero(shares > edge)),
        status=fit.status,
    )


def marchenko_pastur_edge(eigenvalues: Array, rows: int, columns: int) -> float:
    r"""The upper edge of the Marchenko-Pastur law for the bulk of eigenvalues of W'W.

    Parameters
    ----------
    eigenvalues : array (k,)
        All eigenvalues, zeros included; those of several matrices of one shape may be given together.
    rows, columns : int
        The sides of W.

    Returns
    -------
    float
        :math:`s^2 (\sqrt N + \sqrt M)^2`, where s² is the variance of the elements as the eigenvalues up to the edge
        give it. The edge is lowered until no more eigenvalues leave the bulk.

    Notes
    -----
    V. A. Marchenko, L. A. Pastur, "Distribution of eigenvalues for some sets of random matrices" (1967). WeightWatcher
    instead fits s to a smoothed density, on a grid of 1 %, and counts spikes above the edge plus a Tracy-Widom margin.

    Examples
    --------
    >>> import numpy as np
    >>> w = np.random.default_rng(0).standard_normal((400, 100))
    >>> round(marchenko_pastur_edge(np.linalg.svd(w)[1] ** 2, 400, 100) / (20 + 10) ** 2, 2)
    1.0
    """
    values = np.sort(as_array(eigenvalues).astype(np.float64).reshape(-1))
    long, short = max(rows, columns), min(rows, columns)
    if not len(values) or not short:
        return math.nan
    sums, bulk = np.cumsum(values), len(values)
    while True:
        edge = float(sums[bulk - 1]) / (bulk * long) * (math.sqrt(long) + math.sqrt(short)) ** 2
        inside = int(np.searchsorted(values, edge, side="right"))
        if inside >= bulk or inside == 0:
            return edge
        bulk = inside


@dataclass(frozen=True, slots=True, eq=False)
class Randomized:
    """A weight compared with itself after its elements were shuffled.

    Attributes
    ----------
    distance : float
        The Jensen-Shannon distance of the two normalised spectra (WeightWatcher's ``rand_distance``).
    softrank : float
        The largest eigenvalue of the shuffled weight over that of the weight (WeightWatcher's ``ww_softrank``).
    traps : int
        How many eigenvalues of the shuffled weight are above its Marchenko-Pastur edge plus a Tracy-Widom margin. They
        come from single large elements, not from correlations (WeightWatcher's ``rand_num_spikes``).
    """

    distance: float
    softrank: float
    traps: int


def randomized(w: Array | None, *, conv: Conv = "slices", random: np.random.Generator | None = None) -> Randomized:
    """Compare a weight with itself after its elements are shuffled.

    Parameters
    ----------
    w : array (o, ...)
    conv
        As in `weightwatcher`.
    random : numpy.random.Generator, optional
        By default, one with a fixed seed.

    Examples
    --------
    >>> import numpy as np
    >>> w = np.random.default_rng(0).standard_normal((60, 40))
    >>> w[3, 7] = 100
    >>> randomized(w).traps
    1
    """
    array, esd = as_array(w), _esd(w, conv)
    if esd.status != "ok":
        return Randomized(math.nan, math.nan, 0)
    generator = seeded("randomized") if random is None else random
    largest = float(np.max(np.abs(array)))
    scaled = (array.astype(np.float64) if array.dtype.kind != "c" else array) / power_of_two(largest)
    shuffled = generator.permutation(scaled.reshape(-1)).reshape(array.shape)
    other = _collected(_spectra(shuffled, conv))
    shift = 2 * math.log10(power_of_two(largest))
    full = esd.columns * esd.matrices
    ours, theirs = (np.concatenate([np.zeros(full - len(one.shares)), one.shares]) for one in (esd, other))
    edge = marchenko_pastur_edge(theirs, esd.rows, esd.columns)
    # three times the fluctuation of the largest eigenvalue of a random matrix (I. M. Johnstone, 2001)
    long, short = math.sqrt(esd.rows), math.sqrt(esd.columns)
    margin = 3 * edge / (long + short) * (1 / long + 1 / short) ** (1 / 3)
    return Randomized(
        float(scipy.spatial.distance.jensenshannon(ours, theirs)),
        float(10 ** (other.logs[-1] + shift - esd.logs[-1])),
        int(np.count_nonzero(theirs > edge + margin)),
    )


@final
class PowerLaw(PerMessage, Selected):
    r"""Power law in the spectrum of each weight: :math:`\rho(\lambda) \sim \lambda^{-\alpha}` from :math:`x_{min}` on.

    :math:`\lambda` are the eigenvalues of W'W. Answers ``{kind}_power_law_alpha``, without unit; ``_xmin``, where the
    tail begins, in the unit of the data squared; ``_D``, the Kolmogorov-Smirnov distance; ``_sigma``, the standard
    error of alpha; ``_num_spikes``, the size of the tail; and ``_status``: 0 as it should be, 3 zero, 4 NaN or
    infinity in the data, 6 empty, 8 fewer than two different eigenvalues. All are float64 scalars, for each message.

    Parameters
    ----------
    kind : str
        A kind with data of shape (o, ...).
    conv : {"slices", "reshape"}
        A kernel of three or more axes is a matrix (o, c) for each of its positions, the eigenvalues of all together
        (WeightWatcher's rule); or one matrix of its outputs by everything else.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or `conv` is another word.

    Notes
    -----
    *Formula*: :math:`\alpha = 1 + n / \sum_i \ln(\lambda_i / x_{min})` over the n eigenvalues from :math:`x_{min}` on,
    which is the one with the smallest Kolmogorov-Smirnov distance.
    *Cost*: all singular values in float64, shared with the other spectral metrics of the same weight in the same run,
    and a pass over each possible tail.
    *Invariant to* orthogonal maps of inputs and outputs, so to their order, and (but for xmin) to the scale.
    *Edge values*: NaN without two different positive eigenvalues, and where NaN or infinity occurs. Eigenvalues that
    are zero within rounding are left out (WeightWatcher leaves out those below 1e-5, whatever the scale). Never raises
    during a replay.
    *Source*: A. Clauset, C. R. Shalizi, M. E. J. Newman, "Power-law distributions in empirical data", arXiv:0706.1062,
    section 3; C. H. Martin, M. W. Mahoney, "Implicit Self-Regularization in Deep Neural Networks", arXiv:1810.01075.
    *Formerly*: weightwatcher's ``alpha``, ``xmin``, ``D``, ``sigma``, ``num_pl_spikes``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> tail = (1 - torch.arange(100, dtype=torch.float64) / 100) ** (-1 / 3)
    >>> message = ModuleMessage(kind="weights", data=torch.diag(tail), **where)
    >>> [(said.kind, round(float(said.data), 3)) for said in PowerLaw().compute(message)][0]
    ('weights_power_law_alpha', 2.55)
    """

    name = "power_law"
    version = 2
    spoiled_by = ("elements", "reduce")
    invariances = ("rows", "sign", "orthogonal")

    checks = (check_conv,)
    gives = tuple(f"{{kind}}_power_law_{what}" for what in ("alpha", "xmin", "D", "sigma", "num_spikes", "status"))
    kind: str = "weights"
    _: KW_ONLY
    conv: Conv = "slices"

    def measure(self, message: Message) -> tuple[float, ...]:
        """Answer one message with the power law of its spectrum."""
        fit = once(message.data, ("fit", self.conv), lambda: fit_of(_esd(message.data, self.conv)))
        return fit.alpha, fit.xmin, fit.D, fit.sigma, fit.num_spikes, code(fit.status)


@final
class WeightWatcher(PerMessage, Selected):
    r"""WeightWatcher's board for each weight: alpha, norms, ranks and entropy of its spectrum :math:`\lambda(W'W)`.

    Answers ``{kind}_weightwatcher_alpha`` and the same with ``_xmin``, ``_D``, ``_sigma``, ``_num_spikes``,
    ``_alpha_weighted``, ``_log_alpha_norm``, ``_log_norm``, ``_log_spectral_norm``, ``_stable_rank``, ``_entropy``,
    ``_matrix_rank``, ``_rank_loss``, ``_mp_softrank`` and ``_mp_spikes``, as `WeightWatcherResult` says; and
    ``_status``: 0 as it should be, 3 zero, 4 NaN or infinity in the data, 6 empty, 8 too few eigenvalues for a power
    law. With `randomize` also ``_rand_distance``, ``_ww_softrank`` and ``_traps``. All are float64 scalars, for each
    message.

    Parameters
    ----------
    kind : str
        A kind with data of shape (o, ...).
    conv : {"slices", "reshape"}
        A kernel of three or more axes is a matrix (o, c) for each of its positions, the eigenvalues of all together
        (WeightWatcher's rule); or one matrix of its outputs by everything else.
    randomize : bool
        Whether to compare each weight with itself with its elements shuffled, by a generator that is seeded by stream
        and step.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: with λ the eigenvalues of W'W, alpha as in ``power_law``: :math:`\alpha \log_{10} \lambda_{max}`,
    :math:`\log_{10} \sum \lambda^\alpha`, :math:`\log_{10} \sum \lambda`, :math:`-\sum p \ln p / \ln rank`, and the
    edge of the Marchenko-Pastur law of the bulk over :math:`\lambda_{max}`.
    *Cost*: all singular values in float64, shared with the other spectral metrics of the same weight in the same run;
    with `randomize` as much again.
    *Invariant to* orthogonal maps of inputs and outputs, so to their order; the logarithms shift with the scale.
    *Edge values*: NaN where there is no spectrum, or no power law; rank 0 for a zero weight. Never raises during a
    replay.
    *Numerics*: in logarithms, so no scale overflows.
    *Source*: C. H. Martin, T. Peng, M. W. Mahoney, "Predicting trends in the quality of state-of-the-art neural
    networks without access to training or testing data", arXiv:2002.06716; names and rules of weightwatcher 0.7. (Its
    ``spectral_norm`` is the squared one; and it multiplies the k slices of a convolution by the root of k/2, which
    shifts the logarithms by the log10 of k/2.)
    *Formerly*: weightwatcher's ``analyze``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0]).sqrt()), **where)
    >>> said = {one.kind: round(float(one.data), 4) for one in WeightWatcher().compute(message)}
    >>> said["weights_weightwatcher_stable_rank"], said["weights_weightwatcher_log_spectral_norm"]
    (2.0, 0.6021)
    """

    name = "weightwatcher"
    version = 2
    spoiled_by = ("elements", "reduce")
    invariances = ("rows", "sign", "orthogonal")

    kind: str = "weights"
    _: KW_ONLY
    conv: Conv = "slices"
    randomize: bool = False

    def check(self) -> None:
        """Raise `MessageError` unless `conv` is known and `randomize` is a truth value."""
        check_conv(self.conv)
        check(isinstance(self.randomize, bool), "randomize is True or False", self.randomize)

    def produced(self) -> list[str]:
        """A kind for each number of the board, and of the randomized weight."""
        names = (*BOARD, "status", *(("rand_distance", "ww_softrank", "traps") if self.randomize else ()))
        return [f"{self.kind}_weightwatcher_{name}" for name in names]

    def measure(self, message: Message) -> list[float]:
        """Answer one message with the numbers of its spectrum."""
        found = _watched(_esd(message.data, self.conv))
        numbers: list[float] = [*(getattr(found, one) for one in BOARD), code(found.status)]
        if self.randomize:
            other = randomized(message.data, conv=self.conv, random=generator_of(message))
            numbers += [other.distance, other.softrank, other.traps]
        return numbers
