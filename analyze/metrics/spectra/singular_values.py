"""Singular values of weights, and the condition number: the ratio of the first to the last."""

from __future__ import annotations

import math
from typing import Unpack, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, is_whole
from analyze.metrics.metric import PerMessage, Where
from analyze.metrics.spectra.spectra import OfSpectrum, Spectrum, Status, singular
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


def _all(found: Spectrum) -> NDArray[np.float64]:
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


def _condition(found: Spectrum, *, min_side: bool) -> tuple[float, Status]:
    if found.status == "zero":
        return math.inf, "zero"
    if found.status != "ok":
        return math.nan, found.status
    full = min(found.rows, found.columns) if min_side else found.columns
    if found.rank < full:
        return math.inf, "rank_deficient"
    return float(found.values[0] / found.values[-1]), "ok"


@final
class SingularValues(PerMessage):
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

    def __init__(self, kind: str = "weights", *, top: int | None = None, **where: Unpack[Where]) -> None:
        check(top is None or is_whole(top, 1), "top is a positive number of singular values or None", top)
        super().__init__(kind, f"{kind}_singular_values", **where)
        self.top = top

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

    def number(self, found: Spectrum) -> tuple[float, Status]:
        """The ratio of singular values, or of a covariance's eigenvalues; infinity if the rank is not full."""
        value, status = _condition(found, min_side=not self.centre)
        return value * value if self.centre else value, status
