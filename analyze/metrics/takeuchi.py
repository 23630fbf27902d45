"""The Takeuchi information criterion: the gradients' second moments over the curvature."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number
from analyze.metrics.hessian import (
    PROBES,
    Block,
    Estimated,
    OfLoss,
    check_exact,
    check_probes,
    mean_of,
    signs,
    trace_of,
)
from tracer.errors import CaptureError
from tracer.numbers.arrays import Array, as_array

EPSILON = 1e-7
"""Added to the curvature in the denominator, as in cockpit."""


def tictrace(gradients_np: Array, trace: float, *, epsilon: float = EPSILON) -> float:
    """The trace of the gradients' second moment over the trace of the Hessian.

    Parameters
    ----------
    gradients_np : array
        The gradients (N, P) of the loss of each datapoint.
    trace : float
        Of the Hessian of the mean loss.
    epsilon : float
        Added to it.

    Returns
    -------
    float
        Infinity or NaN where the divisor is 0.

    Raises
    ------
    MessageError
        If `epsilon` is no number from 0.

    Examples
    --------
    >>> tictrace([[3.0, 0.0], [0.0, 4.0]], 5.0, epsilon=0)
    2.5
    """
    check_epsilon(epsilon)
    squares = np.square(as_array(gradients_np).astype(np.float64))
    with np.errstate(all="ignore"):
        return float(squares.sum() / np.float64(len(squares)) / (trace + epsilon))


def check_epsilon(epsilon: object) -> None:
    """Raise `MessageError` unless `epsilon` is a finite number from 0 on."""
    check(is_number(epsilon) and 0 <= epsilon < math.inf, "epsilon is a number from 0", epsilon)


def _quotient(dividend: Estimated, divisor: Estimated) -> Estimated:
    """A quotient with the interval that follows from the intervals of dividend and divisor."""
    with np.errstate(all="ignore"):
        value = float(np.float64(dividend.value) / divisor.value)
        if divisor.low <= 0 <= divisor.high and divisor.low < divisor.high:
            return Estimated(value, -math.inf, math.inf)
        ends = [float(np.float64(a) / b) for a in dividend[1:] for b in divisor[1:]]
    return Estimated(value, min(ends), max(ends))


@final
class TICTrace(OfLoss):
    r"""Takeuchi information criterion from traces: :math:`\mathrm{tr}\,C / (\mathrm{tr}\,H + \epsilon)`.

    Answers ``loss_tictrace``: a float64 scalar, in the unit of the loss, for each loss of the training; beside it
    ``loss_tictrace_low`` and ``loss_tictrace_high``, the ends of its interval, which are the number itself where that
    is exact.

    Parameters
    ----------
    exact : int
        Up to so many parameters the trace of the Hessian is exact, by as many Hessian-vector products; and up to so
        many datapoints that of the second moment, by as many backwards. Beyond they are estimated.
    probes : int
        How many products, or backwards, an estimate takes, 6 at least.
    epsilon : float
        Added to the trace of the Hessian.
    subsample : int
        As in `tracer.Subscription`.
    modules : str, iterable of str, or None
        Globs over dotted paths: only the parameters of these modules vary, the others are constants. None means all.

    Raises
    ------
    MessageError
        If a parameter is out of its range.
    CaptureError
        Live, if the loss has no second derivatives or was logged, as ``hessian_trace`` says; or if it is no loss of the
        rows of what one named loss function gets. The training then goes on without this metric.

    Notes
    -----
    *Formula*: :math:`C = \frac1N \sum_n g_n g_n'`, not centred, where :math:`g_n` is N times the part of the n-th row
    of the network's output in the gradient of the loss: the gradient of a datapoint, where the loss is a mean over
    them and the network treats each by itself. Beyond `exact` rows :math:`\mathrm{tr}\,C` is N times the mean of
    :math:`|\sum_n s_n g_n / N|^2` over random signs. :math:`\mathrm{tr}\,H` is that of ``hessian_trace``.
    *Needs*: the model: it runs live (``receivers=[...]``, with ``loss=...``) and in re-enactments, and a replay refuses
    it.
    *Cost*: that of ``hessian_trace``, and a backward for each datapoint.
    *Invariant to* the order of parameters and of datapoints; scales with the loss.
    *Edge values*: negative where the trace of the Hessian is; infinite ends where its interval has 0; NaN where NaN or
    infinity occurs in the loss.
    *Numerics*: derivatives in the dtype of the training, sums in float64. Each of the two intervals holds its exact
    value with a probability of 99 %, and what follows from both is answered.
    *Found by*: generalisation gap, noise and curvature.
    *Source*: V. Thomas et al., "On the interplay between noise and curvature and its effect on optimization and
    generalization" (2020); K. Takeuchi (1976); F. Schneider, F. Dangel, P. Hennig, "Cockpit" (2021).
    *Formerly*: cockpit's ``TICTrace``.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> model, loss = torch.nn.Linear(1, 1, bias=False), torch.nn.MSELoss()
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> optimizer, heard = torch.optim.SGD(model.parameters(), lr=0.1), tracer.Collect("loss_tictrace")
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with tracer.record(path, model, optimizer, loss=loss, receivers=[TICTrace(epsilon=0), heard]):
    ...     loss(model(torch.tensor([[1.0], [2.0]])), torch.tensor([[1.0], [1.0]])).backward()
    ...     optimizer.step()
    >>> [float(message.data) for message in heard]  # gradients -2 and -4, second derivative 5
    [2.0]
    """

    name = "tictrace"

    checks = (check_exact, check_probes, check_epsilon)
    gives = ("loss_tictrace", "loss_tictrace_low", "loss_tictrace_high")
    _: KW_ONLY
    exact: int = 512
    probes: int = PROBES
    epsilon: float = EPSILON

    def of(self, block: Block, random: np.random.Generator) -> Estimated:
        """The quotient of the traces and its interval."""
        trace = trace_of(block, self.exact, self.probes, random)
        divisor = Estimated(*(end + self.epsilon for end in trace))
        return _quotient(self._noise(block, random), divisor)

    def _noise(self, block: Block, random: np.random.Generator) -> Estimated:
        if block.rows <= self.exact:
            value = float(block.second_moments().sum())
            return Estimated(value, value, value)
        sums_kp = block.row_gradients(signs(random, self.probes, block.rows))
        found = mean_of(block.rows * np.square(sums_kp).sum(1))
        return Estimated(found.value, max(found.low, 0.0), found.high)


def ticdiag(gradients_np: Array, diagonal_p: Array, *, epsilon: float = EPSILON) -> float:
    """The sum over parameters of the gradients' mean square over the second derivative.

    Parameters
    ----------
    gradients_np : array
        The gradients (N, P) of the loss of each datapoint.
    diagonal_p : array
        Of the Hessian of the mean loss, (P,).
    epsilon : float
        Added to each of its elements.

    Returns
    -------
    float
        Infinity or NaN where a divisor is 0.

    Raises
    ------
    MessageError
        If `epsilon` is no number from 0.

    Examples
    --------
    >>> ticdiag([[3.0, 0.0], [0.0, 4.0]], [1.0, 4.0], epsilon=0)
    6.5
    """
    check_epsilon(epsilon)
    second_p = np.square(as_array(gradients_np).astype(np.float64)).mean(0)
    return _sum(second_p, as_array(diagonal_p).astype(np.float64), epsilon)


def _sum(second_p: NDArray[np.float64], diagonal_p: NDArray[np.float64], epsilon: float) -> float:
    with np.errstate(all="ignore"):
        return float((second_p / (diagonal_p + epsilon)).sum())


@final
class TICDiag(OfLoss):
    r"""Takeuchi information criterion from diagonals: :math:`\sum_j C_{jj} / (H_{jj} + \epsilon)`.

    Answers ``loss_ticdiag``: a float64 scalar, in the unit of the loss, for each loss of the training.

    Parameters
    ----------
    exact : int
        The most parameters, and the most datapoints, that are taken: each costs a Hessian-vector product, or a
        backward.
    epsilon : float
        Added to the diagonal of the Hessian.
    subsample : int
        As in `tracer.Subscription`.
    modules : str, iterable of str, or None
        Globs over dotted paths: only the parameters of these modules vary, the others are constants. None means all.

    Raises
    ------
    MessageError
        If a parameter is out of its range.
    CaptureError
        Live, if there are more parameters or datapoints than `exact`; if the loss has no second derivatives or was
        logged, as ``hessian_trace`` says; or if it is no loss of the rows of what one named loss function gets. The
        training then goes on without this metric.

    Notes
    -----
    *Formula*: :math:`C_{jj} = \frac1N \sum_n g_{nj}^2`, not centred, where :math:`g_n` is N times the part of the n-th
    row of the network's output in the gradient of the loss: the gradient of a datapoint, where the loss is a mean over
    them and the network treats each by itself.
    *Needs*: the model: it runs live (``receivers=[...]``, with ``loss=...``) and in re-enactments, and a replay refuses
    it.
    *Cost*: a Hessian-vector product for each parameter, which the other metrics of curvature share, and a backward for
    each datapoint. An estimated diagonal would not do: its elements are divided by, and some are near 0.
    *Invariant to* the order of parameters and of datapoints; scales with the loss.
    *Edge values*: what a parameter adds is negative where its second derivative is; 0 where its gradients are; NaN
    where NaN or infinity occurs in the loss.
    *Numerics*: derivatives in the dtype of the training, sums in float64. Second derivatives near 0 make it large, of
    either sign, whatever `epsilon` is.
    *Found by*: generalisation gap, noise and curvature.
    *Source*: V. Thomas et al., "On the interplay between noise and curvature and its effect on optimization and
    generalization" (2020); K. Takeuchi (1976); F. Schneider, F. Dangel, P. Hennig, "Cockpit" (2021).
    *Formerly*: cockpit's ``TICDiag``.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> model, loss = torch.nn.Linear(1, 1, bias=False), torch.nn.MSELoss()
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> optimizer, heard = torch.optim.SGD(model.parameters(), lr=0.1), tracer.Collect("loss_ticdiag")
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with tracer.record(path, model, optimizer, loss=loss, receivers=[TICDiag(epsilon=0), heard]):
    ...     loss(model(torch.tensor([[1.0], [2.0]])), torch.tensor([[1.0], [1.0]])).backward()
    ...     optimizer.step()
    >>> [float(message.data) for message in heard]  # gradients -2 and -4, second derivative 5
    [2.0]
    """

    name = "ticdiag"

    checks = (check_exact, check_epsilon)
    gives = ("loss_ticdiag",)
    _: KW_ONLY
    exact: int = 4096
    epsilon: float = EPSILON

    def of(self, block: Block, random: np.random.Generator) -> tuple[float]:
        """The sum."""
        for what, count in (("parameters", block.size), ("datapoints", block.rows)):
            if count > self.exact:
                raise CaptureError(
                    f"ticdiag differentiates once for each of {count:,} {what}, which is more than exact={self.exact}: "
                    "allow more, choose modules=..., or take tictrace, which estimates"
                )
        return (_sum(block.second_moments(), block.diagonal(), self.epsilon),)
