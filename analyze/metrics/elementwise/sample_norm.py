"""The mean norm of a layer's output for one datapoint."""

from __future__ import annotations

import math
from typing import NamedTuple, Unpack, final

import numpy as np

from analyze.metrics.inputs import as_float64, axis_of_datapoints, datapoints_first, power_of_two
from analyze.metrics.metric import PerMessage, Where
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array


class SampleNorms(NamedTuple):
    """The result of `sample_norm`; as a number it is the mean norm."""

    norm: float
    rms: float

    def __float__(self) -> float:
        return self.norm


def sample_norm(x: Array) -> SampleNorms:
    """The mean over datapoints of the Euclidean norm of each, and the same per square root of its elements.

    Parameters
    ----------
    x : array (n, ...)

    Returns
    -------
    SampleNorms
        ``norm`` and ``rms`` in the unit of the data; NaN without datapoints or elements.

    Examples
    --------
    >>> sample_norm([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 15.0]])
    SampleNorms(norm=10.0, rms=5.0)
    """
    array = as_array(x)
    if array.size == 0:
        return SampleNorms(math.nan, math.nan)
    rows = array.reshape(len(array), -1) if array.ndim else array.reshape(1, 1)
    norms = []
    with np.errstate(all="ignore"):
        for row in rows:
            values = np.abs(as_float64(row))
            largest = float(values.max())
            if not 0 < largest < math.inf:
                norms.append(largest)
                continue
            scale = power_of_two(largest)
            norms.append(math.sqrt(float(np.square(values / scale).sum())) * scale)
        mean = float((np.array(norms) / len(norms)).sum())
    return SampleNorms(mean, mean / math.sqrt(rows.shape[1]))


@final
class SampleNorm(PerMessage):
    r"""Mean norm of a datapoint: :math:`\frac1n \sum_b \|y_b\|_2`, which does not grow with the batch.

    Answers ``{kind}_sample_norm`` and ``{kind}_sample_rms``, the same over the root of the elements of a datapoint:
    float64 scalars, in the unit of the data, for each message.

    Parameters
    ----------
    kind : str
        A kind with datapoints: they are on the first axis, (n, ...), or on that which the recording tells.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`\frac1n \sum_b \sqrt{\sum_i y_{bi}^2}`, and that over :math:`\sqrt d` for d elements a datapoint.
    *Cost*: one pass over the data, O(n d).
    *Invariant to* the order of the datapoints and the signs of the elements; scales with the data.
    *Edge values*: NaN for empty data and where NaN occurs, else infinity where infinity occurs. Never raises during a
    replay.
    *Numerics*: float64, scaled by a power of two.
    *Source*: monitorch's ``OutputNorm``.
    *Formerly*: monitorch ``OutputNorm``; ``{kind}_sample_rms`` with its ``normalize=True``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> outputs = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 15.0]])
    >>> message = ModuleMessage(kind="activations", data=outputs, **where)
    >>> [(said.kind, float(said.data)) for said in SampleNorm().compute(message)]
    [('activations_sample_norm', 10.0), ('activations_sample_rms', 5.0)]
    """

    name = "sample_norm"
    takes_many = True
    spoiled_by = ("elements", "reduce")
    invariances = ("rows", "sign")

    def __init__(self, kind: str = "activations", **where: Unpack[Where]) -> None:
        super().__init__(kind, (f"{kind}_sample_norm", f"{kind}_sample_rms"), **where)

    def measure(self, message: Message) -> SampleNorms:
        """The mean norm of the datapoints, and the same divided by the root of the elements of a datapoint."""
        data = message.data
        return sample_norm(as_array(data if data is None else datapoints_first(data, axis_of_datapoints(message))))
