"""The spectral norm of a weight: its largest singular value, exactly.

Shapes: ``w_oi`` is a weight with o outputs (its first axis) and i inputs (all other axes, flattened).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import final

import numpy as np
import scipy.linalg

from analyze.metrics.inputs import Array, answer, as_array, as_float64, subscription_to
from tracer.messages import DEFAULT_TAG, Message, derived
from tracer.subscriber import Subscriber


def spectral_norm(w: Array) -> float:
    """The largest singular value of a weight, seen as a matrix of its outputs by everything else.

    Parameters
    ----------
    w : array (o, ...)
        Flattened to (o, i), as ``torch.nn.utils.spectral_norm(dim=0)`` does. A vector is one column, a number is
        itself.

    Returns
    -------
    float
        0 for an empty weight; NaN if there is a NaN, else infinity if there is an infinity.

    Examples
    --------
    >>> spectral_norm([[3.0, 0.0], [0.0, -8.0]])
    8.0
    >>> spectral_norm([3e300, 4e300])
    5e+300
    """
    w_oi = as_float64(w)
    w_oi = w_oi.reshape(w_oi.shape[0], math.prod(w_oi.shape[1:])) if w_oi.ndim else w_oi.reshape(1, 1)
    if w_oi.size == 0:
        return 0.0
    largest = float(np.abs(w_oi).max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    # an exact power of two keeps the squares of the Gram matrix in range, whatever the scale of the weight
    scale = 2.0 ** min(max(math.frexp(largest)[1] - 1, -1000), 1000)
    w_oi /= scale
    gram = w_oi @ w_oi.conj().T if w_oi.shape[0] <= w_oi.shape[1] else w_oi.conj().T @ w_oi
    last = len(gram) - 1
    # in float64 the largest eigenvalue of the Gram matrix is good to 1e-15 of itself, so its root is too
    square = scipy.linalg.eigh(
        gram, eigvals_only=True, subset_by_index=(last, last), overwrite_a=True, check_finite=False
    )
    return math.sqrt(max(float(square[0]), 0.0)) * scale


@final
class SpectralNorm(Subscriber):
    r"""Spectral norm of each tensor of a kind: :math:`\sigma_1(W) = \max_{|v|=1} |Wv|`, W with one row for each output.

    Answers ``{kind}_spectral_norm``: a float64 scalar, in the unit of the data, for each message.

    Parameters
    ----------
    kind : str
        A kind with data of shape (o, ...), such as a linear (o, i) or a convolutional (o, c, h, w) weight, flattened to
        (o, c·h·w). A vector is one column.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Invariant to* orthogonal maps of inputs and outputs, so to their order; scales with the data. For a convolution it
    is the norm of the reshaped kernel, which the norm of the convolution as a map exceeds by up to :math:`\sqrt{hw}`.
    *Edge values*: 0 for an empty or zero weight; NaN where NaN occurs, else infinity where infinity occurs. Never
    raises during a replay.
    *Numerics*: exact (relative error below 1e-13) by the largest eigenvalue of the smaller Gram matrix in float64. A
    few power iterations are wrong by percents just where people look, after initialisation. Costs
    :math:`O(\min(o,i)^3)`.
    *Source*: T. Miyato et al., "Spectral Normalization for Generative Adversarial Networks", arXiv:1802.05957, section
    2.1.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([[3.0, 0.0], [0.0, -8.0]]), **where)
    >>> [(said.kind, float(said.data)) for said in SpectralNorm().compute(message)]
    [('weights_spectral_norm', 8.0)]
    """

    name = "spectral_norm"

    def __init__(
        self,
        kind: str = "weights",
        *,
        tag: str | None = DEFAULT_TAG,
        subsample: int = 1,
        modules: str | Iterable[str] | None = None,
    ) -> None:
        super().__init__(subscription_to(kind, tag, subsample, modules), produces=f"{kind}_spectral_norm")

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        """Answer one message with its spectral norm."""
        message = message_or_bundle
        yield derived(message, self.produces[0], answer(spectral_norm(as_array(message.data))))
