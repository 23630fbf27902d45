r"""Three soft ranks of a spectrum: how many directions a weight or a layer's activations effectively use.

All are functions of the shares :math:`p_i = \lambda_i / \sum_j \lambda_j`, where :math:`\lambda_i` are the squared
singular values of a weight, or the eigenvalues of the covariance of activations.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.similarity.datapoints import Channels, check_channels
from analyze.metrics.spectra.spectra import OfSpectrum, Spectrum, Status, of_data
from tracer.numbers.arrays import Array, as_array


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

    def number(self, found: Spectrum) -> tuple[float, Status]:
        """The rank and the status; fewer than 5 datapoints for each neuron make the rank too small."""
        few = self.centre and found.status == "ok" and found.rows < 5 * found.columns
        return self.rank(found), "few_samples" if few else found.status

    @classmethod
    def rank(cls, found: Spectrum) -> float:
        """The rank; NaN if the data has no variance or is not finite."""
        if found.status != "ok":
            return math.nan
        squares = found.squares
        return float(cls.of_shares(squares / squares.sum()))

    @staticmethod
    @abstractmethod
    def of_shares(shares: NDArray[np.float64]) -> Any:
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

    @staticmethod
    def of_shares(shares: NDArray[np.float64]) -> Any:
        """One over the largest share."""
        return 1 / shares[0]


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

    @staticmethod
    def of_shares(shares: NDArray[np.float64]) -> Any:
        """One over the sum of the squared shares."""
        return 1 / np.square(shares).sum()


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

    @staticmethod
    def of_shares(shares: NDArray[np.float64]) -> Any:
        """The exponential of the entropy."""
        some = shares[shares > 0]
        return np.exp(-np.sum(some * np.log(some)))
