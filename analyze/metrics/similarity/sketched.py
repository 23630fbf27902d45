"""CKA and SVCCA estimated from sketches of wide layers, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, final

import numpy as np

from analyze.metrics.similarity.bases import check_threshold, of_sheet
from analyze.metrics.similarity.canonical import CanonicalResult, compare, refuse, sheets
from analyze.metrics.similarity.datapoints import Channels, Positions, Sheet, Status, check_positions
from analyze.metrics.similarity.estimates import (
    NOTHING,
    SIZE,
    SketchColumns,
    alignments,
    check_sketch,
    columns_of,
    is_no_answer,
    kernel_product,
    of_rows,
    taken,
    trace_product,
)
from analyze.metrics.similarity.similarity import Kept, Similarity
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array


@dataclass(frozen=True, slots=True, eq=False)
class SketchedResult:
    """A similarity estimated from sketches; ``float()`` gives its value.

    Attributes
    ----------
    value : float
        The estimate; NaN if there is none.
    low, high : float
        The interval: over random projections, 99 of 100 intervals contain the exact value.
    n : int
        The number of datapoints.
    status : str
        As in `analyze.SVCCA`.
    null_baseline : float
        The expected value for unrelated layers.
    """

    value: float
    low: float
    high: float
    n: int
    status: Status
    null_baseline: float

    def __float__(self) -> float:
        return self.value


def sketched_cka(
    x_nd: Array,
    y_ne: Array,
    *,
    k: int = SIZE,
    seed: int = 0,
    sketches: bool = False,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    drop_rows: bool = False,
    strict: bool = False,
) -> SketchedResult:
    """Linear CKA of two sets of activations, estimated from projections of their neurons to k columns.

    Parameters
    ----------
    x_nd, y_ne : arrays
        Activations of the same datapoints, in the same order, as in `analyze.svcca`; or their sketches. Of k neurons
        or more a sketch is made; fewer are taken as they are.
    k : int
        Columns of a sketch, 16 at least.
    seed : int
        Of the projection, see `tracer.Capture`.
    sketches : bool
        Whether these are sketches of k columns already, or layers of fewer neurons.
    channels, drop_rows, strict
        As in `analyze.svcca`.
    positions : {"datapoints", "pooled"}
        As in `analyze.svcca`.

    Returns
    -------
    SketchedResult

    Raises
    ------
    MessageError
        As `analyze.svcca`.

    Examples
    --------
    >>> import numpy as np, analyze
    >>> random = np.random.default_rng(0)
    >>> x_nd = random.standard_normal((200, 30)) @ random.standard_normal((30, 1000))
    >>> y_ne = np.maximum(x_nd, 0)
    >>> found, exact = sketched_cka(x_nd, y_ne, k=64), float(analyze.cka(x_nd, y_ne))
    >>> found.low < exact < found.high
    True
    """
    check_sketch(k, seed)
    check_positions(positions, fourier=False)
    both = sheets("sketched_cka", x_nd, y_ne, channels, positions, drop_rows)
    one, other = (of_rows("sketched_cka", sheet, k, seed, sketches) for sheet in both)
    found = compared_by_kernels(one, other, k)
    return refuse("sketched_cka", found) if strict else found


def compared_by_kernels(one: Kept, other: Kept, k: int) -> SketchedResult:
    """The estimate from two sketches of k columns; never raises."""
    n = len(one.x_nd)
    x, y = columns_of(one, k), columns_of(other, k)
    if isinstance(x, str) or isinstance(y, str):
        return unlike(x if isinstance(x, str) else y, n)  # type: ignore[arg-type] # one of them is a status
    if not one.like(other):
        return unlike("mismatch")
    xx, yy, xy = kernel_product(x, x, k), kernel_product(y, y, k), kernel_product(x, y, k)
    if not min(xx.min(), yy.min()) > 0:
        return unlike("ill_posed", n)
    size = np.sqrt(xx) * np.sqrt(yy)
    with np.errstate(divide="ignore"):
        value, low, high = (float(one) for one in alignments(np.log(xy / size)))
    traces = [float(trace_product(columns, columns, k)[0]) for columns in (x, y)]
    directions = max(traces[0] / float(xx[0]), traces[1] / float(yy[0]))
    null = min(1.0, math.sqrt(traces[0] * traces[1]) / (n - 1) / float(size[0]))
    status: Status = "few_samples" if n - 1 < 5 * directions else "ok"
    return SketchedResult(value, low, high, n, "ill_posed" if math.isnan(value) else status, null)


def unlike(status: Status, n: int = 0) -> SketchedResult:
    """The result for layers without a value."""
    return SketchedResult(*NOTHING, n, status, math.nan)


class OfSketches(Similarity):
    """A `Similarity` estimated from sketches of k columns."""

    companions = ("_low", "_high", "_null", "_status")
    unlike = unlike("mismatch")
    checks: ClassVar[tuple[Callable[..., object], ...]] = (check_sketch,)

    _: KW_ONLY
    k: int = SIZE
    seed: int = 0

    def check(self) -> None:
        """Raise `MessageError` unless the parameters are in their ranges."""
        super().check()
        self.reduction = f"sketch:k={self.k}"

    def taken(self, message: Message) -> Message:
        """A message with the sketch of its layer, or with the layer itself if it has fewer than k neurons."""
        return taken(message, self.k, self.seed, self.channels, self.positions)

    def represent(self, data: Array) -> Kept:
        """A sketch, or a layer with fewer than k neurons, as it is."""
        return Kept.of(data, self.channels, self.positions)


@final
class SketchedCKA(OfSketches):
    r"""Linear CKA of each wide layer with its own past, its final state, or the other layers, from random projections.

    Answers ``{kind}_sketched_cka``, an estimate of `analyze.CKA`: a float64 scalar from 0 to 1 without unit; and beside
    it its companions, for each message that can be compared.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe, or with their sketches, as a recording keeps them
        with ``Capture(reduce="sketch:k=256")``.
    k : int
        Columns of a sketch, 16 at least: those of the trace. Messages that say that they are such sketches are taken as
        they are. All others are projected where they have k neurons or more, and exact where they have fewer.
    seed : int
        Of the projection, where a layer is projected.
    against, lag, calls, channels, positions
        As in `analyze.SVCCA`, but positions are no frequencies.
    details : bool
        Whether to answer also ``_low`` and ``_high``, the ends of the interval; ``_null``, the value to expect of
        unrelated layers; and ``_status`` as in `analyze.SVCCA`.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or are sketches of another k or another axis than `channels` says; or
        if a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`s_{xy} / \sqrt{s_{xx} s_{yy}}` with :math:`s_{xy} = \frac{k}{k-1} \sum_{a \ne b} (u_a^\top v_b)^2`
    of the centred columns u and v of the sketches: each s is the Frobenius product of two kernels without bias. The
    bias of the ratio is taken out, and the standard error of its logarithm is found, by leaving out one column after
    the other (jackknife). The interval reaches five standard errors down and four up, more with less than 64 columns,
    because errors are skewed, and further by twice the bias that is taken out, which is the error where terms of first
    order cancel; it has the exact value in 99 of 100 projections or more. Where the estimate is below 1e-10, it begins
    at 0 and ends there or above.
    *Needs*: activations of the same datapoints each time, or sketches of them: a probe.
    *Cost*: 2 n k² for each pair, and 2 n d k for each layer that is not a sketch yet.
    *Invariant to* the scale of either set of neurons, to offsets, to dead neurons, and to a permutation of the
    datapoints common to both; to orthogonal maps as far as the interval tells. Symmetric.
    *Edge values*: as `analyze.CKA`. A layer has 1 with itself, and an interval without length: both are projected
    alike.
    *Memory*: for each stream the last `lag` sketches, n by k float32 (with ``"final"`` those of all steps); part of
    `state_dict`.
    *Numerics*: float64 throughout; sketches are made in float32, of float64 activations in float64.
    *Source*: the estimate without the diagonal is that of W. Kong, G. Valiant, "Spectrum Estimation from Samples", The
    Annals of Statistics 45 (2017); for CKA, with neurons that are sampled, C. Chun, A. Canatar, S. Chung, D. D. Lee,
    arXiv:2502.15104; the jackknife of such means: J. N. Arvesen, The Annals of Mathematical Statistics 40 (1969).

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    >>> probe, answers = SketchedCKA(k=32), []
    >>> for step, activations in enumerate([x_nd, 3 * x_nd + 1]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, round(float(said.data), 4)) for said in answers[:3]]
    [('activations_sketched_cka', 1.0), ('activations_sketched_cka_low', 1.0), ('activations_sketched_cka_high', 1.0)]
    """

    name = "sketched_cka"
    invariances = ("rows", "scale", "shift", "offset")

    def compare(self, one: Kept, other: Kept) -> SketchedResult:
        """The similarity of a layer at two steps, or of two layers."""
        return compared_by_kernels(one, other, self.k)


_REACH = 3
"""An interval reaches this many times the range of the values of all parts to either side."""
_SHARES = 4
"""The left-out share of the variance, 1 - threshold, is varied by this many of its standard errors in a sketch."""
_RESOLVED = 1 / 4
"""The largest share of a sketch's columns that may be kept for the estimate to be meaningful."""
_ROUNDING = 1e-6
"""The rounding error of float32 in a value."""


def sketched_svcca(
    x_nd: Array,
    y_ne: Array,
    threshold: float = 0.99,
    *,
    k: int = SIZE,
    seed: int = 0,
    sketches: bool = False,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    drop_rows: bool = False,
    strict: bool = False,
) -> SketchedResult:
    """SVCCA of two sets of activations, estimated from projections of their neurons to k columns.

    Parameters
    ----------
    x_nd, y_ne, k, seed, sketches
        As in `analyze.sketched_cka`.
    threshold, channels, drop_rows, strict
        As in `analyze.svcca`.
    positions : {"datapoints", "pooled"}
        As in `analyze.svcca`.

    Returns
    -------
    SketchedResult
        Its value is NaN and its status ``"ill_posed"`` where the interval is all from 0 to 1, as it is where more than
        a quarter of the columns are needed for the share of the variance. More columns, or a smaller threshold, give
        an answer.

    Raises
    ------
    MessageError
        As `analyze.svcca`.

    Examples
    --------
    >>> import numpy as np, analyze
    >>> random = np.random.default_rng(0)
    >>> z = random.standard_normal((300, 8))
    >>> x_nd, y_ne = np.tanh(z) @ random.standard_normal((8, 900)), z @ random.standard_normal((8, 700))
    >>> found, exact = sketched_svcca(x_nd, y_ne, k=64), float(analyze.svcca(x_nd, y_ne))
    >>> found.low <= exact <= found.high, round(found.high - found.low, 2)
    (True, 0.01)
    """
    check_threshold(threshold)
    check_sketch(k, seed)
    check_positions(positions, fourier=False)
    both = sheets("sketched_svcca", x_nd, y_ne, channels, positions, drop_rows)
    one, other = (of_rows("sketched_svcca", sheet, k, seed, sketches) for sheet in both)
    found = compared_by_directions(one, other, k, threshold)
    return refuse("sketched_svcca", found) if strict else found


def compared_by_directions(one: Kept, other: Kept, k: int, threshold: float) -> SketchedResult:
    """The estimate from two sketches of k columns; never raises."""
    n = len(one.x_nd)
    x, y = columns_of(one, k), columns_of(other, k)
    if isinstance(x, str) or isinstance(y, str):
        return unlike(x if isinstance(x, str) else y, n)  # type: ignore[arg-type] # one of them is a status
    if not one.like(other):
        return unlike("mismatch")
    whole = _of_part(x, y, threshold, slice(None))
    value = float(whole)
    if not (x.drawn or y.drawn):
        return SketchedResult(value, value, value, n, whole.status, whole.null_baseline)
    halves, quarters = ([_of_part(x, y, threshold, part) for part in _parts(k, parts)] for parts in (2, 4))
    uncertain = math.exp(_SHARES * math.sqrt(2 / k))
    shares = [1 - (1 - threshold) * uncertain, 1 - (1 - threshold) / uncertain]
    around = [_of_part(x, y, max(share, threshold / 2), slice(None)) for share in shares]
    value = min(1.0, max(0.0, 2 * value - float(np.mean([float(one) for one in halves]))))
    kept = max(max(one.k if x.drawn else 0, one.m if y.drawn else 0) for one in (whole, *around))
    found = [float(one) for one in (whole, *halves, *quarters, *around)]
    reach = _REACH * (max(found) - min(found)) + _ROUNDING if kept <= _RESOLVED * k else math.inf
    low, high = max(0.0, value - reach), min(1.0, value + reach)
    if is_no_answer(low, high):
        return SketchedResult(math.nan, low, high, n, "ill_posed", whole.null_baseline)
    return SketchedResult(value, low, high, n, whole.status, whole.null_baseline)


def _parts(k: int, count: int) -> list[slice]:
    """The slices that divide k columns into `count` equal parts."""
    return [slice(i * (k // count), (i + 1) * (k // count)) for i in range(count)]


def _of_part(x: SketchColumns, y: SketchColumns, threshold: float, chosen: slice) -> CanonicalResult:
    """SVCCA of two layers; of a sketch, only the chosen columns are used."""
    one, other = (Sheet.matrix(layer.z_nk[:, chosen] if layer.drawn else layer.z_nk) for layer in (x, y))
    return compare(of_sheet(one, threshold), of_sheet(other, threshold))


@final
class SketchedSVCCA(OfSketches):
    r"""SVCCA of each wide layer with its own past, its final state, or the other layers, from random projections.

    Answers ``{kind}_sketched_svcca``, an estimate of `analyze.SVCCA`: a float64 scalar from 0 to 1 without unit; and
    beside it its companions, for each message that can be compared.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe, or with their sketches, as a recording keeps them
        with ``Capture(reduce="sketch:k=256")``.
    threshold : float
        The share of the variance to keep, above 0 and up to 1.
    k : int
        Columns of a sketch, 16 at least: those of the trace. Messages that say that they are such sketches are taken as
        they are. All others are projected where they have k neurons or more, and exact where they have fewer.
    seed : int
        Of the projection, where a layer is projected.
    against, lag, calls, channels, positions
        As in `analyze.SVCCA`, but positions are no frequencies.
    details : bool
        Whether to answer also ``_low`` and ``_high``, the ends of the interval; ``_null``, the value to expect of
        unrelated layers; and ``_status`` as in `analyze.SVCCA`, which is 2 (ill_posed) also where the interval is all
        from 0 to 1.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or are sketches of another k or another axis than `channels` says; or
        if a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`2 v_k - v_{k/2}`, where :math:`v_k` is the SVCCA of sketches of k columns and :math:`v_{k/2}` the
    mean of those of both halves: what is of the order 1/k is taken out. The interval reaches to either side three times
    as far as the values of the whole, both halves and all quarters are apart, and those of the whole for the shares
    that the threshold may be in the layer: what is left out is known within a factor of :math:`e^{4 \sqrt{2/k}}`. Where
    more than a quarter of the columns are needed for such a share, it is all from 0 to 1. It had the exact value in 99
    of 100 projections or more of all layers that it was tried on; unlike that of `analyze.SketchedCKA` it rests on no
    theorem.
    *Needs*: activations of the same datapoints each time, or sketches of them: a probe.
    *Cost*: that of nine SVCCA of k columns or fewer for each pair, and 2 n d k for each layer that is not a sketch
    yet.
    *Invariant to* the scale of either set of neurons, to offsets, to dead neurons, and to a permutation of the
    datapoints common to both; to orthogonal maps as far as the interval tells. Symmetric.
    *Edge values*: as `analyze.SVCCA`. NaN (ill_posed) where the interval is all from 0 to 1, which is no answer: a
    layer that needs more than a quarter as many directions as a sketch has columns. `analyze.SketchedCKA` asks less, or
    a smaller threshold.
    *Memory*: for each stream the last `lag` sketches, n by k float32 (with ``"final"`` those of all steps); part of
    `state_dict`.
    *Numerics*: float64 throughout; sketches are made in float32, of float64 activations in float64.
    *Source*: the definition of `analyze.SVCCA`; projections that keep the directions of most variance: N. Halko, P. G.
    Martinsson, J. A. Tropp, "Finding structure with randomness", arXiv:0909.4061.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.linspace(0, 1, 40)[:, None] * torch.arange(300.0)
    >>> probe, answers = SketchedSVCCA(k=32, details=False), []
    >>> for step, activations in enumerate([x_nd, 3 * x_nd + 1]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, round(float(said.data), 4)) for said in answers]
    [('activations_sketched_svcca', 1.0)]
    """

    name = "sketched_svcca"
    version = 2
    invariances = ("rows", "scale", "shift", "offset")
    checks = (check_threshold, check_sketch)

    _: KW_ONLY
    threshold: float = 0.99
    k: int = SIZE
    seed: int = 0

    def compare(self, one: Kept, other: Kept) -> SketchedResult:
        """The similarity of a layer at two steps, or of two layers."""
        return compared_by_directions(one, other, self.k, self.threshold)
