"""Metrics made of norms: of samples, of all gradients together, ratios, distances, and lengths of paths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.inputs import (
    answer,
    as_float64,
    axis_of_datapoints,
    datapoints_first,
    power_of_two,
    real_numbers,
)
from analyze.metrics.metric import (
    AtStep,
    OfWindows,
    OneNumber,
    PerMessage,
    Selected,
    Stream,
    memory,
    stream_of,
)
from analyze.metrics.norm import SHARED, check_order, norm, norm_of
from tracer.errors import MessageError
from tracer.messaging.messages import Message, MessageBundle
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
class SampleNorm(PerMessage, Selected):
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

    gives = ("{kind}_sample_norm", "{kind}_sample_rms")
    kind: str = "activations"

    def measure(self, message: Message) -> SampleNorms:
        """The mean norm of the datapoints, and the same divided by the root of the elements of a datapoint."""
        data = message.data
        return sample_norm(as_array(data if data is None else datapoints_first(data, axis_of_datapoints(message))))


_WHEN = ("before", "after")


def total_norm(tensors: Iterable[Array]) -> float:
    """The 2-norm of all elements of tensors together, as of one vector.

    Parameters
    ----------
    tensors : iterable of arrays
        Of any shapes and dtypes.

    Returns
    -------
    float
        In the unit of the data; 0 without tensors.

    Examples
    --------
    >>> total_norm([[[3.0, 0.0]], [-4.0]])
    5.0
    """
    return math.hypot(*map(norm, tensors))


@dataclass
class _NormStep(AtStep):
    """The recorded norms of a step, by model; and the norms of its gradients."""

    recorded: dict[str, dict[str, float]] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)


@final
class TotalNorm(OfWindows[_NormStep], Selected):
    r"""Norm of all gradients of a model together, before clipping and after it: :math:`\sqrt{\sum_l \|g_l\|_2^2}`.

    Answers ``total_norm_before`` and ``total_norm_after``: float64 scalars, in the unit of the gradients, for the whole
    network and each step, as soon as a later step begins or the run ends. Where several models are trained, each has
    answers of its own, with its name as their leaf.

    Parameters
    ----------
    kind : str
        The kind of the recorded norms.
    weights, biases : str
        The kinds of the gradients from which the norm after clipping is computed where no norms were recorded.
    tag, subsample, modules
        As in `tracer.Subscription`; with `modules`, the norm is computed from the gradients of these modules.

    Raises
    ------
    MessageError
        If messages of a kind carry no data.

    Notes
    -----
    *Formula*: :math:`\sqrt{\sum_l \sum_i g_{l,i}^2}`, as ``torch.nn.utils.clip_grad_norm_`` returns it. Before
    clipping, g is what has accumulated when the last ``backward`` before the optimizer's step is over, without the
    factor of a ``GradScaler``; after it, what the optimizer uses.
    *Needs*: ``gradient_norms``; or gradients, or their statistics, of all parameters, which tell only the norm after
    clipping. Gradients of weights that a parametrisation computes then count too.
    *Cost*: O(1) a step; from gradients one pass over them, O(n).
    *Invariant to* the order, shape and signs of the elements; scales with the data.
    *Edge values*: NaN where a gradient has NaN, else infinity where one has infinity. No answer of a step that a
    ``GradScaler`` skipped, and none before clipping where no ``backward`` was seen (``torch.autograd.grad``). Never
    raises during a replay.
    *Memory*: the norms of the step that is going on; part of `state_dict`.
    *Numerics*: recorded norms have a relative error of about 1e-6 for float32 and narrower gradients, and are infinite
    where squares leave float32; norms from gradients are float64 throughout.
    *Found by*: exploding gradients, vanishing gradients.
    *Source*: R. Pascanu et al., "On the difficulty of training recurrent neural networks", arXiv:1211.5063,
    algorithm 1.

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> total, told = TotalNorm(), {"entries": ["before", "after"]}
    >>> norms = torch.tensor([45.2, 0.967], dtype=torch.float64)
    >>> where = dict(kind="gradient_norms", global_step=0, train_step=0, epoch=0)
    >>> assert not list(total.compute(NetworkMessage(data=norms, sampling=told, **where)))
    >>> [(said.kind, float(said.data)) for said in total.conclude()]
    [('total_norm_before', 45.2), ('total_norm_after', 0.967)]
    """

    name = "total_norm"
    gathered = _NormStep
    scope = "step"
    bundled = False
    either = True
    takes_statistics = True
    spoiled_by = ("elements", "reduce")
    invariances = ("order", "sign")

    gives = ("total_norm_before", "total_norm_after")
    kind: str = "gradient_norms"
    _: KW_ONLY
    weights: str = "weight_gradients"
    biases: str = "bias_gradients"

    def kinds(self) -> tuple[str, ...]:
        """The recorded norms, unless modules are chosen; and the gradients."""
        return *((self.kind,) if self.modules is None else ()), self.weights, self.biases

    def hear(self, now: _NormStep, message: Message) -> None:
        """Keep the recorded norms, or the norm of a gradient."""
        if message.kind != self.kind:
            now.norms.append(norm_of(message, 2))
        else:
            names = (message.sampling or {}).get("entries", _WHEN)
            now.recorded[message.leaf] = dict(zip(names, real_numbers(message.data).ravel().tolist(), strict=False))

    def numbers(self, over: _NormStep) -> tuple[float]:
        """The norm after clipping, from the gradients."""
        return (math.hypot(*over.norms),)

    def answers(self, tag: str, over: _NormStep) -> Iterator[Message]:
        """The recorded norms of each model; without any, the norm from the gradients."""
        (after,) = self.numbers(over)
        found = over.recorded or {"": {"after": after}}
        for model, norms in found.items():
            for when, kind in zip(_WHEN, self.produces, strict=True):
                if when in norms:
                    yield over.message(kind, (None, tag, model, over.rank), answer(norms[when]))


def ratio(dividend: Array, divisor: Array, order: float = 2) -> float:
    """The norm of one tensor over the norm of another.

    Parameters
    ----------
    dividend, divisor : arrays of any shapes and dtypes
    order : float
        Of the norm, as in `norm`.

    Returns
    -------
    float
        0/0 is NaN, any other x/0 is infinity.

    Raises
    ------
    MessageError
        If `order` is not positive.

    Examples
    --------
    >>> ratio([0.003, 0.004], [[3.0], [4.0]]), ratio([1.0], [0.0]), ratio([0.0], [0.0])
    (0.001, inf, nan)
    """
    return _quotient(norm(dividend, order), norm(divisor, order))


def _quotient(above: float, below: float) -> float:
    if below == 0:
        return math.nan if above == 0 or math.isnan(above) else math.inf
    return above / below


@final
class Ratio(OneNumber, Selected):
    r"""Ratio of the norms of two tensors of one module: :math:`\|a\|_p / \|b\|_p`, by default the update/weight ratio.

    With the defaults :math:`\|W_{t+1}-W_t\|_2/\|W_t\|_2`, of which about 1e-3 is healthy. Answers
    ``{dividend}_{divisor}_ratio`` (with another order than 2, ``_ratio1``, ``_ratioinf``, …): a float64 scalar without
    unit, for each module and step (and call, if one of the kinds has one) that has both.

    Parameters
    ----------
    dividend, divisor : str
        Two different kinds with data of any shapes and dtypes.
    order : float
        p: 2, 1, inf, or any other positive number.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If the kinds are the same, messages of one of them carry no data, or `order` is not positive.

    Notes
    -----
    *Formula*: the quotient of two p-norms, each of all elements.
    *Needs*: both kinds at one step; a replay derives updates from consecutive weights.
    *Cost*: one pass over both, O(n).
    *Invariant to* a common scale of both, and to the order and signs of the elements.
    *Edge values*: 0/0 is NaN, x/0 is infinity; NaN where NaN occurs. A step in which one of the two is missing has no
    answer. Never raises during a replay.
    *Numerics*: both norms as in `norm`, float64; there is no epsilon.
    *Source*: A. Karpathy, "CS231n, Neural Networks Part 3", section "Ratio of weights:updates", for the ratio and the
    1e-3.
    *Formerly*: ikkuna ``RatioSubscriber``; smdebug ``WeightUpdateRatio`` (which adds 1e-9 to the divisor).

    Examples
    --------
    >>> import torch
    >>> from tracer import MessageBundle, ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> ratio_of = Ratio()
    >>> bundle = MessageBundle(ratio_of.subscriptions[0].kinds)
    >>> bundle.add(ModuleMessage(kind="weight_updates", data=torch.tensor([0.0, 0.5]), **where))
    >>> bundle.add(ModuleMessage(kind="weights", data=torch.tensor([3.0, 4.0]), **where))
    >>> [(said.kind, float(said.data)) for said in ratio_of.compute(bundle)]
    [('weight_updates_weights_ratio', 0.1)]
    """

    name = "ratio"
    spoiled_by = ("reduce",)
    invariances = ("order", "sign", "scale")

    takes = ("dividend", "divisor")
    dividend: str = "weight_updates"
    divisor: str = "weights"
    _: KW_ONLY
    order: float = 2

    def check(self) -> None:
        """Raise `MessageError` unless `order` is a positive number."""
        check_order(self.order)
        self.takes_statistics = self.order in SHARED

    def produced(self) -> tuple[str]:
        """Both kinds, and the order unless it is 2."""
        return (f"{self.dividend}_{self.divisor}_ratio{'' if self.order == 2 else f'{self.order:g}'}",)

    def value(self, bundle: MessageBundle) -> float:
        """The ratio of the two norms."""
        above, below = (norm_of(bundle.messages[kind], self.order) for kind in (self.dividend, self.divisor))
        return _quotient(above, below)


class Displacement(NamedTuple):
    """The result of `distance`; as a number it is the distance."""

    value: float
    relative: float

    def __float__(self) -> float:
        return self.value


def distance(now: Array, beginning: Array) -> Displacement:
    """The Euclidean distance between two tensors, and the same relative to the norm of the second.

    Parameters
    ----------
    now, beginning : arrays of one shape

    Returns
    -------
    Displacement
        ``value`` in the unit of the data; ``relative`` to the norm of the beginning: 0/0 is NaN, any other x/0 is
        infinity.

    Raises
    ------
    MessageError
        If the shapes differ.

    Examples
    --------
    >>> distance([3.0, 8.0], [3.0, 4.0])
    Displacement(value=4.0, relative=0.8)
    """
    one, other = as_array(now), as_array(beginning)
    if one.shape != other.shape:
        raise MessageError(f"a distance needs two tensors of one shape, not {one.shape} and {other.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        far = norm(as_float64(one) - as_float64(other))
    return Displacement(far, _quotient(far, norm(other)))


@final
class Distance(PerMessage, Selected):
    r"""Distance of each weight from its initialisation: :math:`\|W_t - W_0\|_2`.

    Answers ``{kind}_distance``, in the unit of the data, and ``{kind}_distance_relative``, the same over
    :math:`\|W_0\|_2`: float64 scalars, for each message. W_0 is the first message of the stream that is heard: a replay
    of steps 500 to 600 measures from step 500.

    Parameters
    ----------
    kind : str
        A kind with data of one shape at all steps.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`\sqrt{\sum_i (W_{t,i} - W_{0,i})^2}`.
    *Cost*: two passes over the data, O(n).
    *Invariant to* a common reordering or sign of the elements, and to a number that is added to all of them.
    *Edge values*: 0 at the first message; NaN where NaN or infinity occurs, and if the shape changed. The relative
    distance of a weight that begins at 0 is NaN, then infinity. Never raises during a replay.
    *Memory*: the first tensor of each stream; part of `state_dict`.
    *Numerics*: differences and sums in float64.
    *Source*: V. Nagarajan, J. Z. Kolter, "Generalization in Deep Networks: The Role of Distance from Initialization",
    arXiv:1901.01672.
    *Formerly*: cockpit ``Distance``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> distance, said = Distance(), []
    >>> for step, weight in enumerate([[3.0, 4.0], [3.0, 8.0]]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0)
    ...     said += distance.compute(ModuleMessage(kind="weights", data=torch.tensor(weight), **where))
    >>> [(one.kind, one.global_step, float(one.data)) for one in said[2:]]
    [('weights_distance', 1, 4.0), ('weights_distance_relative', 1, 0.8)]
    """

    name = "distance"
    scope = "stream"
    spoiled_by = ("elements", "reduce")
    invariances = ("order", "sign")

    gives = ("{kind}_distance", "{kind}_distance_relative")
    kind: str = "weights"
    _first: dict[Stream, NDArray[Any]] = memory(dict)

    def measure(self, message: Message) -> Displacement:
        """The distance from the first message of its stream."""
        now = as_array(message.data)
        first = self._first.setdefault(stream_of(message), now)
        return distance(now, first) if now.shape == first.shape else Displacement(math.nan, math.nan)


def path_length(updates: Iterable[Array]) -> float:
    """The sum of the Euclidean norms of updates.

    Parameters
    ----------
    updates : iterable of arrays

    Returns
    -------
    float
        In the unit of the data; 0 without updates.

    Examples
    --------
    >>> path_length([[3.0, 4.0], [0.0, -2.0]])
    7.0
    """
    length = 0.0
    for update in updates:
        length += norm(update)
    return length


@final
class PathLength(OneNumber, Selected):
    r"""Length of the path of each weight so far: :math:`\sum_{s \le t} \|W_{s+1} - W_s\|_2`.

    Answers ``{kind}_path_length``: a float64 scalar, in the unit of the data, for each message. Over the distance from
    initialisation it says how straight the training goes: 1 is a straight line.

    Parameters
    ----------
    kind : str
        The kind of the updates, with data of any shape.
    tag, subsample, modules
        As in `tracer.Subscription`; with `subsample` it is the sum of the updates that were taken, not of all.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`L_t = L_{t-1} + \|u_t\|_2`.
    *Needs*: the updates of every step; a replay derives them from consecutive weights.
    *Cost*: one pass over the data, O(n).
    *Invariant to* the order and signs of the elements; scales with the data.
    *Edge values*: NaN from the first NaN on, infinity from the first infinity on. Never raises during a replay.
    *Memory*: one number for each stream; part of `state_dict`, and two of them can be merged: the length of a path is
    that of its parts.
    *Source*: M. Raghu et al., "On the Expressive Power of Deep Neural Networks", arXiv:1606.05336, section 2.1, and
    others measure lengths of paths so.
    *Formerly*: the running sum of cockpit ``UpdateSize``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> path, said = PathLength(), []
    >>> for step, update in enumerate([[3.0, 4.0], [0.0, -2.0]]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0)
    ...     said += path.compute(ModuleMessage(kind="weight_updates", data=torch.tensor(update), **where))
    >>> [(one.kind, one.global_step, float(one.data)) for one in said]
    [('weight_updates_path_length', 0, 5.0), ('weight_updates_path_length', 1, 7.0)]
    """

    name = "path_length"
    scope = "stream"
    spoiled_by = ("elements", "reduce")
    mergeable = True
    invariances = ("order", "sign")

    kind: str = "weight_updates"
    _lengths: dict[Stream, float] = memory(dict)

    def value(self, message: Message) -> float:
        """The length of the stream's path so far."""
        stream = stream_of(message)
        length = self._lengths[stream] = self._lengths.get(stream, 0.0) + norm(as_array(message.data))
        return length

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the paths of another metric's state."""
        for stream, length in state["lengths"].items():
            self._lengths[stream] = self._lengths.get(stream, 0.0) + length
