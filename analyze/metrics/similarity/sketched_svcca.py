"""SVCCA of wide layers, estimated with intervals from random projections of their neurons."""

from __future__ import annotations

import math
from typing import Unpack, final

import numpy as np

from analyze.metrics.similarity.bases import check_threshold, of_sheet
from analyze.metrics.similarity.canonical import CanonicalResult, compare, refuse, sheets
from analyze.metrics.similarity.datapoints import Channels, Positions, Sheet, check_positions
from analyze.metrics.similarity.estimates import SIZE, Columns, check_sketch, columns_of, is_no_answer, of_rows
from analyze.metrics.similarity.similarity import Compared, Kept
from analyze.metrics.similarity.sketched_cka import OfSketches, SketchedResult, unlike
from tracer.numbers.arrays import Array

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
    found = compared(one, other, k, threshold)
    return refuse("sketched_svcca", found) if strict else found


def compared(one: Kept, other: Kept, k: int, threshold: float) -> SketchedResult:
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


def _of_part(x: Columns, y: Columns, threshold: float, chosen: slice) -> CanonicalResult:
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

    def __init__(
        self,
        kind: str = "activations",
        *,
        threshold: float = 0.99,
        k: int = SIZE,
        seed: int = 0,
        **compared: Unpack[Compared],
    ) -> None:
        check_threshold(threshold)
        super().__init__(kind, k, seed, **compared)
        self.threshold = threshold

    def compare(self, one: Kept, other: Kept) -> SketchedResult:
        """The similarity of a layer at two steps, or of two layers."""
        return compared(one, other, self.k, self.threshold)
