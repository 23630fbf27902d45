"""Singular values, condition numbers and soft ranks."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, is_whole
from analyze.metrics.metric import PerMessage, Selected
from analyze.metrics.similarity.datapoints import Channels, check_channels
from analyze.metrics.spectra import OfSpectrum, SpectrumOfWeights, Status, of_data, singular
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array


def singular_values(w: Array) -> NDArray[np.float64]:
    """All singular values of a weight, seen as a matrix of its outputs by everything else.

    Parameters
    ----------
    w : array (o, ...)
        Flattened to (o, i). A vector is one column, a number is itself.

    Returns
    -------
    array (min(o, i),)
        Falling; NaN where the weight has NaN or infinity.

    Examples
    --------
    >>> singular_values([[3.0, 0.0], [0.0, -8.0], [0.0, 0.0]]).tolist()
    [8.0, 3.0]
    """
    return _all(singular(as_array(w)))


def _all(found: SpectrumOfWeights) -> NDArray[np.float64]:
    if found.status == "nonfinite":
        return np.full(min(found.rows, found.columns), math.nan)
    with np.errstate(over="ignore", under="ignore"):
        values: NDArray[np.float64] = found.values * found.scale
    return values


def condition_number(w: Array) -> float:
    """The largest singular value of a weight over the smallest.

    Parameters
    ----------
    w : array (o, ...)
        Flattened to (o, i). A vector is one column, a number is itself.

    Returns
    -------
    float
        From 1; infinity if the weight has not full rank within rounding, or is zero; NaN if it is empty or has NaN or
        infinity.

    Examples
    --------
    >>> condition_number([[4.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.5]])
    8.0
    >>> condition_number([[1.0, 2.0], [2.0, 4.0]])
    inf
    """
    return _condition(singular(as_array(w)), min_side=True)[0]


def _condition(found: SpectrumOfWeights, *, min_side: bool) -> tuple[float, Status]:
    if found.status == "zero":
        return math.inf, "zero"
    if found.status != "ok":
        return math.nan, found.status
    full = min(found.rows, found.columns) if min_side else found.columns
    if found.rank < full:
        return math.inf, "rank_deficient"
    return float(found.values[0] / found.values[-1]), "ok"


@final
class SingularValues(PerMessage, Selected):
    r"""Singular values of each tensor of a kind: :math:`\sigma_1 \ge \sigma_2 \ge \dots` of W, a row for each output.

    Answers ``{kind}_singular_values``: a float64 vector (min(o, i),), in the unit of the data, for each message; of the
    first `top` values if that is given.

    Parameters
    ----------
    kind : str
        A kind with data of shape (o, ...), flattened to (o, i). A vector is one column.
    top : int or None
        How many to answer; None for all.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or `top` is not a positive integer.

    Notes
    -----
    *Formula*: LAPACK's SVD in float64, after an exact scaling by a power of two.
    *Cost*: :math:`O(o i \min(o,i))`, shared with the other spectral metrics of the same weight in the same run.
    *Invariant to* orthogonal maps of inputs and outputs, so to their order and sign; scales with the data.
    *Edge values*: no numbers for an empty weight; NaN, all of them, where NaN or infinity occurs. Never raises during
    a replay.
    *Numerics*: the absolute error is about :math:`\sigma_1` times 1e-15, so small ones lose digits.
    *Source*: G. H. Golub, C. F. Van Loan, "Matrix Computations" (2013), section 2.4.
    *Formerly*: weightwatcher's ``get_ESD`` (their squares).

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([[3.0, 0.0], [0.0, -8.0]]), **where)
    >>> [(said.kind, said.data.tolist()) for said in SingularValues().compute(message)]
    [('weights_singular_values', [8.0, 3.0])]
    """

    name = "singular_values"
    spoiled_by = ("elements", "reduce")
    invariances = ("rows", "sign", "orthogonal")

    kind: str = "weights"
    _: KW_ONLY
    top: int | None = None

    def check(self) -> None:
        """Raise `MessageError` unless `top` is a positive number or None."""
        check(
            self.top is None or is_whole(self.top, 1), "top is a positive number of singular values or None", self.top
        )

    def measure(self, message: Message) -> tuple[Tensor]:
        """Answer one message with its singular values."""
        return (torch.from_numpy(_all(singular(message.data))[: self.top].copy()),)


@final
class ConditionNumber(OfSpectrum):
    r"""Condition number of each tensor of a kind: :math:`\sigma_1 / \sigma_{\min(o,i)}`, the true ratio.

    Answers ``{kind}_condition_number``: a float64 scalar from 1, without unit, for each message; beside it
    ``{kind}_condition_number_status``, a number: 0 as it should be, 3 zero, 4 NaN or infinity in the data, 5 no set
    of activations, 6 empty, 7 not of full rank.

    Parameters
    ----------
    kind : str
        A kind with weights (o, ...), flattened to (o, i), or with activations, see `centre`.
    centre : bool or None
        Whether the data are activations: of these it is the condition number of the covariance of the neurons,
        :math:`\lambda_1 / \lambda_d`. None: if messages of this kind are of a batch.
    channels : {"auto", "first", "last"}
        Which axis of activations is the neurons, as in ``svcca``.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: singular values by LAPACK's SVD in float64.
    *Cost*: :math:`O(o i \min(o,i))`, shared with the other spectral metrics of the same weight in the same run.
    *Invariant to* orthogonal maps of inputs and outputs, to their order, and to the scale of the data.
    *Edge values*: infinity where the rank is not full, that is, where the smallest singular value is below
    :math:`\max(o,i)` float64 epsilons of the largest, and for a weight of zeros; NaN for empty data and where NaN or
    infinity occurs. Never raises during a replay.
    *Numerics*: the relative error is about the value times 1e-16.
    *Source*: G. H. Golub, C. F. Van Loan, "Matrix Computations" (2013), section 2.6.2.
    *Formerly*: ikkuna's ``ConditionNumberSubscriber`` (which gives the product of the largest and the smallest),
    monitorch's ``ParameterCond`` (its inverse).

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.diag(torch.tensor([4.0, 2.0, 0.5])), **where)
    >>> [(said.kind, float(said.data)) for said in ConditionNumber().compute(message)]
    [('weights_condition_number', 8.0), ('weights_condition_number_status', 0.0)]
    """

    name = "condition_number"

    def number(self, found: SpectrumOfWeights) -> tuple[float, Status]:
        """The ratio of singular values, or of a covariance's eigenvalues; infinity if the rank is not full."""
        value, status = _condition(found, min_side=not self.centre)
        return value * value if self.centre else value, status


def stable_rank(x: Array, *, centre: bool = False, channels: Channels = "auto") -> float:
    """The sum of the squared singular values over the largest: how many as strong as the first they make.

    Parameters
    ----------
    x : array
        A weight (o, ...), flattened to (o, i); or activations.
    centre : bool
        Whether these are activations (n, d): then it is that of their covariance.
    channels : {"auto", "first", "last"}
        Which axis of activations is the neurons, as in ``svcca``.

    Returns
    -------
    float
        From 1 to min(o, i); NaN if there is no spread, or no number.

    Raises
    ------
    MessageError
        If `channels` is another word.

    Examples
    --------
    >>> round(stable_rank([[2.0, 0.0], [0.0, 1.0]]), 12)
    1.25
    """
    check_channels(channels)
    return StableRank.rank(of_data(as_array(x), centre, channels))


def participation_ratio(x: Array, *, centre: bool = False, channels: Channels = "auto") -> float:
    """The squared sum of the squared singular values over the sum of their squares.

    Parameters
    ----------
    x : array
        A weight (o, ...), flattened to (o, i); or activations.
    centre : bool
        Whether these are activations (n, d): then it is that of their covariance.
    channels : {"auto", "first", "last"}
        Which axis of activations is the neurons, as in ``svcca``.

    Returns
    -------
    float
        From 1 to min(o, i); NaN if there is no spread, or no number.

    Raises
    ------
    MessageError
        If `channels` is another word.

    Examples
    --------
    >>> round(participation_ratio([[2.0, 0.0], [0.0, 1.0]]), 12)
    1.470588235294
    """
    check_channels(channels)
    return ParticipationRatio.rank(of_data(as_array(x), centre, channels))


def effective_rank(x: Array, *, centre: bool = False, channels: Channels = "auto") -> float:
    """The exponential of the entropy of the shares of the squared singular values.

    Parameters
    ----------
    x : array
        A weight (o, ...), flattened to (o, i); or activations.
    centre : bool
        Whether these are activations (n, d): then it is that of their covariance.
    channels : {"auto", "first", "last"}
        Which axis of activations is the neurons, as in ``svcca``.

    Returns
    -------
    float
        From 1 to min(o, i); NaN if there is no spread, or no number.

    Raises
    ------
    MessageError
        If `channels` is another word.

    Examples
    --------
    >>> round(effective_rank([[2.0, 0.0], [0.0, 1.0]]), 12)
    1.649384888466
    """
    check_channels(channels)
    return EffectiveRank.rank(of_data(as_array(x), centre, channels))


class _SoftRank(OfSpectrum):
    """Answers each message with a function of its shares, and with the status of the spectrum."""

    def number(self, found: SpectrumOfWeights) -> tuple[float, Status]:
        """The rank and the status; fewer than 5 datapoints for each neuron make the rank too small."""
        few = self.centre and found.status == "ok" and found.rows < 5 * found.columns
        return self.rank(found), "few_samples" if few else found.status

    @classmethod
    def rank(cls, found: SpectrumOfWeights) -> float:
        """The rank; NaN if the data has no variance or is not finite."""
        if found.status != "ok":
            return math.nan
        squares = found.squares
        return float(cls.of_shares(squares / squares.sum()))

    of_shares: ClassVar[staticmethod[[NDArray[np.float64]], Any]]
    """The rank, from the eigenvalues divided by their sum, largest first."""


@final
class StableRank(_SoftRank):
    r"""Stable rank of each tensor of a kind: :math:`\sum_i \lambda_i / \lambda_1`.

    Answers ``{kind}_stable_rank``: a float64 scalar from 1, without unit, for each message; beside it
    ``{kind}_stable_rank_status``, a number: 0 as it should be, 1 fewer than five datapoints for each
    neuron, 3 zero or constant, 4 NaN or infinity in the data, 5 no set of activations, 6 empty.

    Parameters
    ----------
    kind : str
        A kind with weights (o, ...), flattened to (o, i), or with activations, see `centre`.
    centre : bool or None
        Whether the data are activations, whose covariance is meant. None: if messages of this kind are of a batch.
    channels : {"auto", "first", "last"}
        Which axis of activations is the neurons, as in ``svcca``.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\sum_i \lambda_i / \lambda_1`,
    with :math:`\lambda_i = \sigma_i^2` of a weight or those of a covariance.
    It is never above the rank, and small changes of the data change it little.
    *Cost*: all singular values in float64, :math:`O(o i \min(o,i))`, of activations :math:`O(n d^2 + d^3)`; shared
    with the other spectral metrics of the same data in the same run.
    *Invariant to* orthogonal maps, to the order of neurons and datapoints, and to the scale of the data; of activations
    to offsets too.
    *Edge values*: NaN for empty, zero or constant data, and where NaN or infinity occurs. Never raises during a replay.
    *Source*: M. Rudelson, R. Vershynin, "Sampling from Large Matrices", arXiv:math/0503442, section 1.2.
    *Formerly*: weightwatcher's ``stable_rank``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0]).sqrt()), **where)
    >>> [(said.kind, round(float(said.data), 6)) for said in StableRank().compute(message)]
    [('weights_stable_rank', 2.0), ('weights_stable_rank_status', 0.0)]
    """

    name = "stable_rank"
    of_shares = staticmethod(lambda shares: 1 / shares[0])


@final
class ParticipationRatio(_SoftRank):
    r"""Participation ratio of each tensor: :math:`(\sum_i \lambda_i)^2 / \sum_i \lambda_i^2`.

    Answers ``{kind}_participation_ratio``: a float64 scalar from 1, without unit, for each message; beside it
    ``{kind}_participation_ratio_status``, a number: 0 as it should be, 1 fewer than five datapoints for each
    neuron, 3 zero or constant, 4 NaN or infinity in the data, 5 no set of activations, 6 empty.

    Parameters
    ----------
    kind : str
        A kind with weights (o, ...), flattened to (o, i), or with activations, see `centre`.
    centre : bool or None
        Whether the data are activations, whose covariance is meant. None: if messages of this kind are of a batch.
    channels : {"auto", "first", "last"}
        Which axis of activations is the neurons, as in ``svcca``.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`(\sum_i \lambda_i)^2 / \sum_i \lambda_i^2`,
    with :math:`\lambda_i = \sigma_i^2` of a weight or those of a covariance.
    With k equal eigenvalues and all others zero it is k.
    *Cost*: all singular values in float64, :math:`O(o i \min(o,i))`, of activations :math:`O(n d^2 + d^3)`; shared
    with the other spectral metrics of the same data in the same run.
    *Invariant to* orthogonal maps, to the order of neurons and datapoints, and to the scale of the data; of activations
    to offsets too.
    *Edge values*: NaN for empty, zero or constant data, and where NaN or infinity occurs. Never raises during a replay.
    *Source*: P. Gao et al., "A theory of multineuronal dimensionality, dynamics and measurement", bioRxiv 214262
    (2017).
    *Formerly*: none.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0]).sqrt()), **where)
    >>> [(said.kind, round(float(said.data), 6)) for said in ParticipationRatio().compute(message)]
    [('weights_participation_ratio', 2.909091), ('weights_participation_ratio_status', 0.0)]
    """

    name = "participation_ratio"
    of_shares = staticmethod(lambda shares: 1 / np.square(shares).sum())


def _exponential_entropy(shares: NDArray[np.float64]) -> Any:
    some = shares[shares > 0]
    return np.exp(-np.sum(some * np.log(some)))


@final
class EffectiveRank(_SoftRank):
    r"""Effective rank of each tensor: :math:`\exp(-\sum_i p_i \ln p_i)`.

    Answers ``{kind}_effective_rank``: a float64 scalar from 1, without unit, for each message; beside it
    ``{kind}_effective_rank_status``, a number: 0 as it should be, 1 fewer than five datapoints for each
    neuron, 3 zero or constant, 4 NaN or infinity in the data, 5 no set of activations, 6 empty.

    Parameters
    ----------
    kind : str
        A kind with weights (o, ...), flattened to (o, i), or with activations, see `centre`.
    centre : bool or None
        Whether the data are activations, whose covariance is meant. None: if messages of this kind are of a batch.
    channels : {"auto", "first", "last"}
        Which axis of activations is the neurons, as in ``svcca``.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\exp(-\sum_i p_i \ln p_i)`, :math:`p_i = \lambda_i/\sum_j \lambda_j`,
    with :math:`\lambda_i = \sigma_i^2` of a weight or those of a covariance.
    (Roy and Vetterli take the shares of :math:`\sigma_i`; those of :math:`\lambda_i` are the shares of variance.)
    With k equal eigenvalues and all others zero it is k.
    *Cost*: all singular values in float64, :math:`O(o i \min(o,i))`, of activations :math:`O(n d^2 + d^3)`; shared
    with the other spectral metrics of the same data in the same run.
    *Invariant to* orthogonal maps, to the order of neurons and datapoints, and to the scale of the data; of activations
    to offsets too.
    *Edge values*: NaN for empty, zero or constant data, and where NaN or infinity occurs. Never raises during a replay.
    *Source*: O. Roy, M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    *Formerly*: weightwatcher's ``entropy`` is its logarithm over that of the rank.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0]).sqrt()), **where)
    >>> [(said.kind, round(float(said.data), 6)) for said in EffectiveRank().compute(message)]
    [('weights_effective_rank', 3.363586), ('weights_effective_rank_status', 0.0)]
    """

    name = "effective_rank"
    of_shares = staticmethod(_exponential_entropy)
