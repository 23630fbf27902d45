"""Adam's moments, effective learning rates and step, computed from recorded gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number
from analyze.metrics.elementwise.norm import norm
from analyze.metrics.inputs import as_float64
from analyze.metrics.metric import PerMessage, Where
from analyze.metrics.streams import Stream, packed, stream_of, unpacked
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array


class Moments(NamedTuple):
    """The result of `adam_moments`; as a number it is the norm of the step."""

    first_norm: float
    second_norm: float
    rate_mean: float
    rate_median: float
    step_norm: float

    def __float__(self) -> float:
        return self.step_norm


def adam_moments(
    gradients: Iterable[Array],
    *,
    learning_rate: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Moments:
    """Adam's bias-corrected moments after these gradients of one parameter, and the step that it takes then.

    Parameters
    ----------
    gradients : iterable of arrays of one shape
        From the first step on.
    learning_rate, beta1, beta2, eps
        As in ``torch.optim.Adam``.

    Returns
    -------
    Moments
        ``first_norm`` and ``second_norm``, the Euclidean norms of the corrected moments; ``rate_mean`` and
        ``rate_median`` over the elements of the learning rate over the root of the second; ``step_norm``. NaN without
        gradients.

    Raises
    ------
    MessageError
        If the shapes differ, or a parameter is out of its range.

    Examples
    --------
    >>> found = adam_moments([[3.0, -4.0]], learning_rate=0.1, eps=0.0)
    >>> [round(value, 9) for value in found]
    [5.0, 18.357559751, 0.029166667, 0.029166667, 0.141421356]
    """
    _check(learning_rate, beta1, beta2, eps)
    memory: _Memory | None = None
    found = Moments(math.nan, math.nan, math.nan, math.nan, math.nan)
    for gradient in gradients:
        g = as_float64(gradient)
        if memory is None:
            memory = _Memory(np.zeros_like(g), np.zeros(g.shape))
        if memory.first.shape != g.shape:
            raise MessageError(f"gradients of a parameter are of one shape, not {memory.first.shape} and {g.shape}")
        memory.take(g, beta1, beta2)
        found = memory.moments(learning_rate, beta1, beta2, eps)
    return found


class _Memory:
    """The moments of one parameter, before the bias correction."""

    def __init__(self, first: NDArray[Any], second: NDArray[np.float64], steps: int = 0) -> None:
        self.first, self.second, self.steps = first, second, steps

    def take(self, g: NDArray[Any], beta1: float, beta2: float) -> None:
        with np.errstate(all="ignore"):
            self.first = beta1 * self.first + (1 - beta1) * g
            self.second = beta2 * self.second + (1 - beta2) * np.square(np.abs(g))
        self.steps += 1

    def moments(self, learning_rate: float, beta1: float, beta2: float, eps: float) -> Moments:
        with np.errstate(all="ignore"):
            first, second = self.first / (1 - beta1**self.steps), self.second / (1 - beta2**self.steps)
            rates = learning_rate / (np.sqrt(second) + eps)
            mean, median = (float(rates.mean()), float(np.median(rates))) if rates.size else (math.nan, math.nan)
            return Moments(norm(first), norm(second), mean, median, norm(rates * first))


def _check(learning_rate: object, beta1: object, beta2: object, eps: object) -> None:
    for what, number, most in (
        ("learning_rate", learning_rate, math.inf),
        ("beta1", beta1, 1),
        ("beta2", beta2, 1),
        ("eps", eps, math.inf),
    ):
        check(is_number(number) and 0 <= number < most, f"{what} is a number from 0 to below {most}", number)


@final
class AdamMoments(PerMessage):
    r"""Adam's moments of each gradient, :math:`\hat m_t` and :math:`\hat v_t`, whatever optimizer the run had.

    Answers for each message, float64 scalars: ``{kind}_adam_first_norm`` and ``{kind}_adam_second_norm``,
    :math:`\|\hat m_t\|_2` and :math:`\|\hat v_t\|_2`; ``{kind}_adam_rate_mean`` and ``{kind}_adam_rate_median``, over
    the elements, of the effective learning rate :math:`\eta/(\sqrt{\hat v_t}+\epsilon)`; ``{kind}_adam_step_norm``, the
    length of the step that Adam would take.

    Parameters
    ----------
    kind : str
        The kind of the gradients.
    learning_rate, beta1, beta2, eps : float
        As in ``torch.optim.Adam``.
    tag, subsample, modules
        As in `tracer.Subscription`; with `subsample` the gradients that are taken are the steps.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t`, :math:`v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2`,
    :math:`\hat m_t = m_t/(1-\beta_1^t)`, :math:`\hat v_t = v_t/(1-\beta_2^t)`.
    *Needs*: the gradients of every step from the first on; a replay that begins later begins with empty moments.
    *Cost*: O(n), and the median.
    *Invariant to* the order and signs of the elements, if all gradients are changed alike.
    *Edge values*: NaN from the first NaN on, for as long as the moments remember it, which is ever. A parameter whose
    shape changes begins anew. Never raises during a replay.
    *Memory*: two tensors for each stream; part of `state_dict`.
    *Numerics*: float64; agrees with ``torch.optim.Adam`` in float64 to 1e-12.
    *Source*: D. Kingma, J. Ba, "Adam", arXiv:1412.6980, algorithm 1.
    *Formerly*: ``BiasCorrectedMomentsSubscriber`` of ikkuna's experiments.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weight_gradients", data=torch.tensor([3.0, -4.0]), **where)
    >>> said = list(AdamMoments(learning_rate=0.5, eps=0.0).compute(message))
    >>> [(one.kind, round(float(one.data), 6)) for one in said][-1]
    ('weight_gradients_adam_step_norm', 0.707107)
    """

    name = "adam_moments"
    scope = "stream"
    spoiled_by = ("elements", "reduce")
    invariances = ("order", "sign")

    def __init__(
        self,
        kind: str = "weight_gradients",
        *,
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        **where: Unpack[Where],
    ) -> None:
        _check(learning_rate, beta1, beta2, eps)
        super().__init__(kind, [f"{kind}_adam_{what}" for what in Moments._fields], **where)
        self.learning_rate, self.beta1, self.beta2, self.eps = learning_rate, beta1, beta2, eps
        self._memories: dict[Stream, _Memory] = {}

    def measure(self, message: Message) -> Moments:
        """The moments after this gradient, and the step that Adam would take."""
        stream, g = stream_of(message), as_float64(as_array(message.data))
        memory = self._memories.get(stream)
        if memory is None or memory.first.shape != g.shape or memory.first.dtype != g.dtype:
            memory = self._memories[stream] = _Memory(np.zeros_like(g), np.zeros(g.shape))
        memory.take(g, self.beta1, self.beta2)
        return memory.moments(self.learning_rate, self.beta1, self.beta2, self.eps)

    def state_dict(self) -> dict[str, Any]:
        """The moments of each stream, and the number of its gradients."""
        return {"memories": packed({stream: vars(one) for stream, one in self._memories.items()})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._memories = {stream: _Memory(**one) for stream, one in unpacked(state["memories"]).items()}
