"""The Takeuchi information criterion from diagonals: the noise of each parameter's gradient over its curvature."""

from __future__ import annotations

from typing import Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.curvature.block import Block
from analyze.metrics.curvature.of_loss import OfLoss
from analyze.metrics.curvature.tictrace import EPSILON, check_epsilon
from analyze.metrics.metric import Within
from tracer.errors import CaptureError
from tracer.numbers.arrays import Array, as_array


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

    def __init__(self, *, exact: int = 4096, epsilon: float = EPSILON, **within: Unpack[Within]) -> None:
        check_epsilon(epsilon)
        super().__init__(("loss_ticdiag",), exact=exact, **within)
        self.epsilon = epsilon

    def of(self, block: Block, random: np.random.Generator) -> tuple[float]:
        """The sum."""
        for what, count in (("parameters", block.size), ("datapoints", block.rows)):
            if count > self.exact:
                raise CaptureError(
                    f"ticdiag differentiates once for each of {count:,} {what}, which is more than exact={self.exact}: "
                    "allow more, choose modules=..., or take tictrace, which estimates"
                )
        return (_sum(block.second_moments(), block.diagonal(), self.epsilon),)
