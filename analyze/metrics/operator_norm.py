"""The operator norm of a layer: the largest factor by which it stretches an input, for a convolution of its real size.

Shapes: ``w_ock`` is a kernel with o outputs, c inputs (of each group) and one or more spatial axes k; ``x_cs`` is one
input with spatial axes s, ``y_ot`` its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_whole
from analyze.metrics.inputs import power_of_two
from analyze.metrics.metric import PerMessage, Selected, memory
from analyze.metrics.spectra import code
from analyze.metrics.spectral_norm import (
    SINGLE,
    STATUSES,
    SpectralNormResult,
    Status,
    check_certify,
    check_tolerance,
    generator_of,
    largest,
    seeded,
    spectral_norm,
    trivial,
)
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.messaging.subscription import Subscription
from tracer.numbers.arrays import Array, as_array

Sizes = int | tuple[int, ...] | None
Padding = int | tuple[int, ...] | tuple[tuple[int, int], ...] | Literal["same", "valid", "circular"] | None
Mode = Literal["zeros", "reflect", "replicate", "circular"]

MODES: Mapping[Mode, Literal["reflect", "edge", "wrap"] | None] = {
    "zeros": None,
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}
"""The content of the padding: its name in torch → its name in NumPy."""

_BATCH = 1 << 22
"""Complex numbers in a batch of frequencies: 64 MiB."""


def per_axis(given: Any, axes: int, what: str, least: int) -> tuple[int, ...]:
    """An integer for each axis, from one for all or one for each. Raise `MessageError` for anything else."""
    several = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,) * axes
    good = len(several) == axes and all(is_whole(one, least) for one in several)
    check(good, f"{what} is a whole number from {least}, or {axes} of them", given)
    return several


def padded(
    padding: Padding, kernel: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of padding elements at the beginning and at the end of each axis."""
    if padding == "valid":
        return (0,) * len(kernel), (0,) * len(kernel)
    if padding in ("same", "circular"):
        both = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        return tuple(b // 2 for b in both), tuple(b - b // 2 for b in both)
    if isinstance(padding, str) or padding is None:
        raise MessageError(f"padding is a number, one for each axis, 'same', 'valid' or 'circular', not {padding!r}")
    if isinstance(padding, tuple) and any(isinstance(one, tuple) for one in padding):  # the two sides of each axis
        sides_of = [per_axis(one, 2, "padding of both sides", 0) for one in padding]
        check(len(sides_of) == len(kernel), f"padding has both sides of {len(kernel)} axes", padding)
        return tuple(one[0] for one in sides_of), tuple(one[1] for one in sides_of)
    sides = per_axis(padding, len(kernel), "padding", 0)
    return sides, sides


@dataclass(frozen=True, slots=True)
class ConvLayout:
    """The geometry of a convolution on its input; each tuple has a number for each spatial axis."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int
    mode: Mode

    def check_reach(self, kernel: Sequence[int]) -> None:
        """Raise `MessageError` if the kernel is wider than the padded input."""
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, self.dilations, strict=True)]
        for n, r, b, a in zip(self.sizes, reach, self.before, self.after, strict=True):
            if n + b + a < r:
                raise MessageError(
                    f"a kernel of {r} positions does not fit into an input of {n} with padding {b} and {a}"
                )


def layout_of(
    shape: Sequence[int],
    input_hw: Sizes,
    stride: int | tuple[int, ...],
    padding: Padding,
    padding_mode: Mode,
    dilation: int | tuple[int, ...],
    groups: int,
) -> ConvLayout:
    """The layout of a convolution with a kernel of this shape (o, c, k...), from the arguments of `operator_norm`.

    Raises
    ------
    MessageError
        If the size is missing, or the arguments contradict each other.
    """
    if input_hw is None:
        raise MessageError("the operator norm of a convolution needs input_hw, the size of its input")
    sizes, strides, dilations = (
        per_axis(given, len(shape) - 2, what, 1)
        for given, what in ((input_hw, "input_hw"), (stride, "stride"), (dilation, "dilation"))
    )
    good = is_whole(groups, 1) and shape[0] % groups == 0
    check(good, f"groups is a positive divisor of the {shape[0]} outputs", groups)
    before, after = padded(padding, shape[2:], dilations)
    check(padding_mode in MODES, f"padding_mode is one of {', '.join(map(repr, MODES))}", padding_mode)
    if padding == "circular":
        if padding_mode not in ("zeros", "circular"):
            raise MessageError(f"padding 'circular' contradicts padding_mode {padding_mode!r}")
        padding_mode = "circular"
    for n, widest in zip(sizes, map(max, before, after), strict=True):
        most = {"reflect": n - 1, "circular": n}.get(padding_mode, widest)
        if widest > most:
            raise MessageError(f"an input of {n} has at most {most} of {padding_mode} padding on a side, not {widest}")
    return ConvLayout(sizes, strides, before, after, dilations, groups, padding_mode)


class Convolution:
    """A convolution of one padded input, and its transpose, as a matrix product for each position of the kernel.

    For a kernel (o, c / groups, ...), `forward` maps the flat input (c, ...) to the flat output (o, ...). `adjoint`,
    its transpose, maps outputs to inputs.
    """

    def __init__(self, kernel: NDArray[Any], layout: ConvLayout) -> None:
        sizes, before, after, groups = layout.sizes, layout.before, layout.after, layout.groups
        outputs, channels, places = kernel.shape[0] // groups, kernel.shape[1], kernel.shape[2:]
        w_kgoc = np.moveaxis(kernel.reshape(groups, outputs, channels, math.prod(places)), 3, 0)
        self._w = [np.ascontiguousarray(w_goc) for w_goc in w_kgoc]
        self.shape = (groups, channels, *sizes)
        self._wide = (groups, channels, *(n + b + a for n, b, a in zip(sizes, before, after, strict=True)))
        self._inside = (slice(None), slice(None), *(slice(b, b + n) for b, n in zip(before, sizes, strict=True)))
        # (target, source): slices of the padded input, axis by axis, of which the target is a copy of the source
        self._copies: list[tuple[tuple[slice | int, ...], tuple[slice | int, ...]]] = []
        how = MODES[layout.mode]
        if how is not None:
            for axis, (n, b, a) in enumerate(zip(sizes, before, after, strict=True), start=2):
                along = (slice(None),) * axis
                sources = np.pad(np.arange(n), (b, a), mode=how).tolist()
                self._copies += [
                    ((*along, to), (*along, b + source)) for to, source in enumerate(sources) if not b <= to < b + n
                ]
        counts = [
            (n - (k - 1) * d - 1) // s + 1
            for n, k, d, s in zip(self._wide[2:], places, layout.dilations, layout.strides, strict=True)
        ]
        # for each position of the kernel, the part of the padded input that it multiplies
        self._seen = [
            (
                slice(None),
                slice(None),
                *(
                    slice(p * d, p * d + (m - 1) * s + 1, s)
                    for p, d, m, s in zip(at, layout.dilations, counts, layout.strides, strict=True)
                ),
            )
            for at in np.ndindex(*places)
        ]
        self._outputs = (groups, outputs, math.prod(counts))
        self._parts = (groups, channels, *counts)

    def forward(self, q: NDArray[Any]) -> NDArray[Any]:
        x = np.zeros(self._wide, q.dtype)
        x[self._inside] = q.reshape(self.shape)
        for to, source in self._copies:
            x[to] = x[source]
        y = np.zeros(self._outputs, q.dtype)
        for w_goc, seen in zip(self._w, self._seen, strict=True):
            y += w_goc @ x[seen].reshape(*self.shape[:2], -1)
        return y.reshape(-1)

    def adjoint(self, p: NDArray[Any]) -> NDArray[Any]:
        y = p.reshape(self._outputs)
        x = np.zeros(self._wide, p.dtype)
        for w_goc, seen in zip(self._w, self._seen, strict=True):
            x[seen] += (w_goc.transpose(0, 2, 1) @ y).reshape(self._parts)
        for to, source in reversed(self._copies):
            x[source] += x[to]
        return x[self._inside].reshape(-1)


def circular_norm(kernel: NDArray[np.float64], layout: ConvLayout) -> tuple[float, float]:
    """The norm of a circular convolution at stride 1, the largest over all frequencies; and its residual."""
    sizes, dilations, groups = layout.sizes, layout.dilations, layout.groups
    outputs, channels = kernel.shape[:2]
    wrapped = np.zeros((outputs, channels, *sizes))
    for place in np.ndindex(*kernel.shape[2:]):
        where = tuple(at * d % n for at, d, n in zip(place, dilations, sizes, strict=True))
        wrapped[(slice(None), slice(None), *where)] += kernel[(slice(None), slice(None), *place)]
    axes = tuple(range(2, kernel.ndim))
    # a real kernel has complex conjugates at the other half of the last axis's frequencies
    spectrum = np.fft.rfftn(wrapped, axes=axes).reshape(outputs, channels, -1)
    per_group, square, at_best = outputs // groups, -1.0, kernel[:, :, 0]
    few = max(1, _BATCH // (per_group * channels))
    for first in range(0, outputs, per_group):
        for begin in range(0, spectrum.shape[2], few):
            k_foc = np.moveaxis(spectrum[first : first + per_group, :, begin : begin + few], 2, 0)
            turned = k_foc.conj().transpose(0, 2, 1)
            gram = k_foc @ turned if per_group <= channels else turned @ k_foc
            tops = np.linalg.eigvalsh(gram)[:, -1]
            if tops.max() > square:
                square, at_best = float(tops.max()), k_foc[int(tops.argmax())]
    left, values, right = np.linalg.svd(at_best, full_matrices=False)
    return float(values[0]), float(np.linalg.norm(at_best.conj().T @ left[:, 0] - values[0] * right[0].conj()))


def inferred(
    inputs: Sequence[int], outputs: Sequence[int], kernel: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Stride and padding of a convolution, from the sizes of its input, output and kernel; None if none fit.

    The padding is at most half the kernel. If several fit: a stride that is a power of 2 before others, then the stride
    nearest to the ratio of the sizes, then the least padding. `ambiguous` tells whether the result is a guess.

    Examples
    --------
    >>> inferred((32, 32), (16, 16), (3, 3)), inferred((224, 224), (14, 14), (16, 16)), inferred((8,), (6,), (3,))
    (((2, 2), (1, 1)), ((16, 16), (0, 0)), ((1,), (0,)))
    """
    strides, paddings = [], []
    for n, m, k in zip(inputs, outputs, kernel, strict=True):
        near = n / m if m else 1.0
        fits = [(s & (s - 1) > 0, abs(s - near), p, s) for s, p in _fitting(n, m, k)]
        if not fits:
            return None
        _, _, p, s = min(fits)
        strides.append(s)
        paddings.append(p)
    return tuple(strides), tuple(paddings)


def ambiguous(inputs: Sequence[int], outputs: Sequence[int], kernel: Sequence[int]) -> bool:
    """Whether several convolutions have these sizes of input, output and kernel, so that `inferred` is a guess.

    It is no guess if the inferred convolution is the only one that uses its whole input.

    Examples
    --------
    >>> ambiguous((32, 32), (16, 16), (3, 3)), ambiguous((224, 224), (14, 14), (16, 16)), ambiguous((8,), (3,), (3,))
    (False, False, True)
    """
    for n, m, k, s, p in zip(inputs, outputs, kernel, *(inferred(inputs, outputs, kernel) or ((), ())), strict=False):
        # with a single output, the stride makes no difference
        fits = {(s if m > 1 else 1, p) for s, p in _fitting(n, m, k)}
        whole = {(s, p) for s, p in fits if m > 1 and (n + 2 * p - k) % s == 0}
        if len(fits) > 1 and whole != {(s, p)}:
            return True
    return False


def _fitting(n: int, m: int, k: int) -> Iterator[tuple[int, int]]:
    """Every stride and padding for which a kernel of size k makes m outputs from n inputs."""
    for s in range(1, n + 1):
        for p in range(k // 2 + 1):
            if n + 2 * p >= k and (n + 2 * p - k) // s + 1 == m:
                yield s, p


def recorded(said: Mapping[str, Any], kernel: Sequence[int]) -> dict[str, Any] | None:
    """A convolution from a trace's header, as arguments of `operator_norm`.

    Of a transposed convolution they describe the convolution from its outputs to its inputs, which has the same norm;
    ``output_padding`` and ``cropped`` are what to add to the size that its input gives, and what to take from the size
    of its output. Empty if the header is missing or does not fit; None if `operator_norm` does not support the
    convolution's padding.
    """
    try:
        axes = len(kernel)
        strides = per_axis(said["stride"], axes, "stride", 1)
        dilations = per_axis(said["dilation"], axes, "dilation", 1)
        further = per_axis(said["output_padding"], axes, "output_padding", 0)
        before, after = padded(said["padding"], kernel, dilations)
        groups, transposed, mode = said["groups"], said["transposed"], said["padding_mode"]
    except (KeyError, TypeError, MessageError):
        return {}
    found = {
        "stride": strides,
        "padding": said["padding"] if isinstance(said["padding"], str) else before,
        "dilation": dilations,
        "groups": groups,
        "transposed": transposed is True,
        "output_padding": further,
        "cropped": (0,) * axes,
        "padding_mode": mode if any(before + after) else "zeros",
    }
    if transposed is True:
        # Output padding below the stride has no part in the transpose: a convolution leaves as many inputs unused.
        # With more, the transpose has as much less padding at the end of an axis, or unused inputs (`cropped`).
        if any(p >= s for p, s in zip(further, strides, strict=True)):
            ends = zip(before, further, strict=True)
            found["padding"] = tuple((b, max(b - more, 0)) for b, more in ends)
            found["cropped"] = tuple(max(more - b, 0) for b, more in zip(before, further, strict=True))
            found["output_padding"] = (0,) * axes
        return found if mode == "zeros" else None
    if mode not in MODES:
        return None
    spans = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    whole = [b + a for b, a in zip(before, after, strict=True)] == spans
    if mode == "circular" and whole and set(strides) == {1}:
        return {**found, "padding": "circular"}
    return found


def inputs_of(
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Any,
    padding: Any,
    dilation: Any,
    further: Sequence[int] | None = None,
) -> tuple[int, ...] | None:
    """The smallest input size that gives an output size, plus `further`; None if the arguments do not fit."""
    try:
        strides, dilations = (
            per_axis(given, len(kernel), what, 1) for given, what in ((stride, "stride"), (dilation, "dilation"))
        )
        before, after = padded(padding, kernel, dilations)
        outputs = per_axis(outputs, len(kernel), "input_hw", 1)
    except MessageError:  # an argument has another number of axes than this layer
        return None
    more = further or (0,) * len(kernel)
    parts = zip(outputs, kernel, strides, dilations, before, after, more, strict=True)
    sizes = tuple((m - 1) * s + (k - 1) * d + 1 - b - a + f for m, k, s, d, b, a, f in parts)
    return sizes if min(sizes) > 0 else None


_SIZES = ("layer_inputs", "activations")
_STEPS = 600
"""The most applications of a convolution; at initialisation, some hundreds are enough."""


def operator_norm(
    w: Array,
    input_hw: Sizes = None,
    *,
    stride: int | tuple[int, ...] = 1,
    padding: Padding = "same",
    padding_mode: Mode = "zeros",
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    tolerance: float = 1e-6,
    random: np.random.Generator | None = None,
) -> SpectralNormResult:
    """The largest factor by which a layer stretches an input: the norm of the map that it is, its bias left out.

    Parameters
    ----------
    w : array
        The kernel (o, c, h, w) of a convolution, with one, two or three spatial axes; or a matrix (o, i), whose
        norm is the spectral norm; or a vector, by which each element is multiplied.
    input_hw : int or tuple of int
        The size of the input, one number for all spatial axes or one for each. Needed by convolutions only.
    stride, dilation, groups
        As in ``torch.nn.Conv2d``.
    padding : int, tuple of int, tuple of pairs of int, or {"same", "valid", "circular"}
        How much there is on both sides, as in ``torch.nn.Conv2d``, or (before, after) for each axis; ``"same"`` is
        dilation · (k - 1) / 2, rounded down on the left and up on the right, ``"valid"`` is none. ``"circular"`` is
        ``"same"`` with that `padding_mode`; at stride 1 it is exact: the largest singular value over all frequencies.
    padding_mode : {"zeros", "reflect", "replicate", "circular"}
        What is there, as in ``torch.nn.Conv2d``: zeros, or elements of the input.
    tolerance, random
        As in `spectral_norm`.

    Returns
    -------
    SpectralNormResult
        A float: 0 for an empty weight; NaN if there is a NaN, else infinity if there is an infinity.

    Raises
    ------
    MessageError
        If the size is missing or too small for the kernel, or the arguments contradict each other.

    Examples
    --------
    >>> laplacian = [[[[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]]]
    >>> round(operator_norm(laplacian, 8), 6), round(operator_norm(laplacian, 8, padding="circular"), 6)
    (7.75877, 8.0)
    """
    check_tolerance(tolerance)
    array = as_array(w)
    if array.ndim < 2:
        return _elementwise(array)
    if array.ndim == 2:
        return spectral_norm(w, tolerance=tolerance, random=random)
    if array.ndim > 5 or array.dtype.kind == "c":
        raise MessageError(
            f"operator_norm takes real kernels with one to three spatial axes, not {array.dtype} of shape {array.shape}"
        )
    layout = layout_of(array.shape, input_hw, stride, padding, padding_mode, dilation, groups)
    if array.size == 0:
        return SpectralNormResult(0.0, 0.0, "exact")
    largest_element = _largest_modulus(array)
    found = trivial(largest_element)
    if found is not None:
        return found
    scale = power_of_two(largest_element)
    single = array.dtype in (np.float16, np.float32) and 1e-30 < scale < 1e30 and tolerance >= SINGLE
    kernel: NDArray[Any] = array.astype(np.float32 if single else np.float64)
    kernel /= scale
    if padding == "circular" and set(layout.strides) == {1}:
        value, residual = circular_norm(kernel.astype(np.float64), layout)
        return SpectralNormResult(value * scale, residual * scale, "exact")
    layout.check_reach(array.shape[2:])
    layer = Convolution(kernel, layout)
    random = seeded("operator_norm") if random is None else random
    size = math.prod(layer.shape)
    with np.errstate(all="ignore"):
        top = largest(
            lambda q: layer.adjoint(layer.forward(q)), size, kernel.dtype, random, tolerance=tolerance, steps=_STEPS
        )
    status: Status = "converged" if top.converged else "unconverged"
    return SpectralNormResult(top.value * scale, top.residual * scale, status, top.steps)


def _elementwise(array: NDArray[Any]) -> SpectralNormResult:
    if not array.size:
        return SpectralNormResult(0.0, 0.0, "exact")
    size = _largest_modulus(array)
    found = trivial(size)
    return SpectralNormResult(size, 0.0, "exact") if found is None else found


def _largest_modulus(array: NDArray[Any]) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.max(np.abs(array.astype(np.float64) if array.dtype.kind in "biu" else array)))


@final
class OperatorNorm(PerMessage, Selected):
    r"""Operator norm of each layer: :math:`\max_{|x|=1} |W * x|`, of a convolution at the size of its recorded input.

    Answers ``{kind}_operator_norm``: a float64 scalar, in the unit of the data, for each message; beside it
    ``{kind}_operator_norm_residual``, r = |W'u − σv| in the same unit: some singular value of the layer lies within r;
    and ``{kind}_operator_norm_status``: 0 converged, 1 exact, 2 certified, 3 corrected by the certificate, 4 NaN or
    infinity in the data, 5 unconverged, 6 without a known size, or no layer that this metric knows, 7 several strides
    and paddings fit the recorded sizes, so it may be the norm of another layer: give `stride` and `padding`.

    Parameters
    ----------
    kind : str
        A kind with weights: matrices (o, i) of linear layers, kernels (o, c, ...) of convolutions with up to three
        spatial axes, vectors by which each element is multiplied.
    input_hw : int, tuple of int, or None
        The size of the input of all convolutions, one number or one for each spatial axis. None: each layer's own, as
        its last recorded ``layer_inputs`` had it, under any tag; or, with `stride` and `padding` given, the smallest
        that gives its last recorded ``activations``. These are read then too.
    stride, padding, padding_mode, dilation, groups : int, tuple of int, str, or None
        Of all convolutions, see `operator_norm`; with `padding` alone it is of zeros. None: what the recording says of
        each layer, which knows transposed ones, too. Where it does not (see *Needs*), `groups` is what the channels of
        the inputs tell, `dilation` is 1, and `stride` and `padding` are those that the sizes of the layer's recorded
        input and ``activations`` tell (see `inferred`); where no outputs are recorded, stride 1 and ``"same"``, and the
        status says that it is a guess.
    tolerance, certify
        As in ``spectral_norm``; only matrices are certified.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: as ``spectral_norm``, on the convolution and its transpose; the matrix of the map is never made. With
    ``"circular"`` padding it is the largest singular value over all frequencies, exactly.
    *Needs*: of convolutions ``layer_inputs`` or ``activations``, or `input_hw`. Stride, padding, dilation and groups
    stand in the trace, if a convolution of ``torch.nn`` was recorded by tracereel. In others the sizes of both kinds
    tell them, and one with dilation, or a transposed one, looks like another: give what it has, and its `modules`.
    *Cost*: 20 to 300 convolutions of one input and their transposes.
    *Invariant to* the order of outputs, and to the sign; scales with the data. It is from 1 to :math:`\sqrt{hw}` times
    the spectral norm of the reshaped kernel, where the padding is at least half the kernel and the stride is 1.
    *Edge values*: 0 for an empty or zero weight; NaN where NaN occurs, else infinity where infinity occurs; NaN where
    the size is not known. Never raises during a replay.
    *Memory*: the sizes of each layer; part of `state_dict`. While it computes, up to 256 MiB of vectors.
    *Numerics*: relative error below 1e-6 where it converged, but for one random vector in :math:`10^9`; a lower bound
    but for rounding. Where 600 applications do not show that, the status is 5, and the value may be too small.
    *Source*: H. Sedghi, V. Gupta, P. M. Long, "The Singular Values of Convolutional Layers", arXiv:1805.10408 (circular
    padding); Lanczos as in ``spectral_norm``.
    *Formerly*: none; ikkuna's and torch's spectral norms take the reshaped kernel, 1.5-2.4 times too low.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> laplacian = torch.tensor([[[[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]]])
    >>> message = ModuleMessage(kind="weights", module="c", data=laplacian, global_step=0, train_step=0, epoch=0)
    >>> [(said.kind, round(float(said.data), 4)) for said in OperatorNorm(input_hw=8).compute(message)][0]
    ('weights_operator_norm', 7.7588)
    """

    name = "operator_norm"
    scope = "stream"
    spoiled_by = ("elements", "reduce")
    version = 4
    invariances = ("rows", "sign")

    gives = ("{kind}_operator_norm", "{kind}_operator_norm_residual", "{kind}_operator_norm_status")
    kind: str = "weights"
    _: KW_ONLY
    input_hw: int | tuple[int, ...] | None = None
    stride: int | tuple[int, ...] | None = None
    padding: int | str | tuple[int, ...] | None = None
    padding_mode: str | None = None
    dilation: int | tuple[int, ...] | None = None
    groups: int | None = None
    tolerance: float = 1e-6
    certify: int = 100
    _sizes: dict[tuple[str, str | None], tuple[int, ...]] = memory(dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input_hw is None:
            (weights,) = self.subscriptions
            self.subscriptions = weights, Subscription(_SIZES, None, weights.subsample, weights.modules)
        self._convolutions: dict[Any, Mapping[str, Any]] = {}

    def check(self) -> None:
        """Raise `MessageError` unless the parameters are in their ranges."""
        check_tolerance(self.tolerance)
        check_certify(self.certify)
        if self.kind in _SIZES:
            raise MessageError(f"operator_norm takes the weights of layers, not their {self.kind}")
        padding = self.padding
        for what, least in (("input_hw", 1), ("stride", 1), ("dilation", 1), ("padding", 0), ("groups", 1)):
            given = getattr(self, what)
            if given is not None and not (what == "padding" and isinstance(padding, str)):
                per_axis(given, len(given) if isinstance(given, tuple) else 1, what, least)
        good = not isinstance(padding, str) or padding in ("same", "valid", "circular")
        check(good, "padding is a number, one for each axis, 'same', 'valid' or 'circular'", padding)
        good = self.padding_mode is None or self.padding_mode in MODES
        check(good, f"padding_mode is one of {', '.join(map(repr, MODES))}", self.padding_mode)

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Keep what the recording's header says about convolutions."""
        modules = model.get("modules")
        self._convolutions = {
            one.get("name"): one["convolution"]
            for one in (modules if isinstance(modules, list) else ())
            if isinstance(one, Mapping) and isinstance(one.get("convolution"), Mapping)
        }

    def compute(self, message: Message) -> Iterator[Message]:
        """Keep the size of an input or output; answer a weight with its norm."""
        if message.kind in _SIZES:
            if not message.leaf and message.data is not None:
                self._sizes[message.kind, message.key] = tuple(message.data.shape)
            return
        yield from super().compute(message)

    def measure(self, message: Message) -> tuple[float, float, float]:
        """The operator norm of a weight, its residual and its status."""
        found = self._found(message)
        return found, found.residual, code(found.status, STATUSES)

    def _found(self, message: Message) -> SpectralNormResult:
        array = as_array(message.data)
        random = generator_of(message)
        if array.ndim == 2:
            certify = bool(self.certify) and message.global_step % self.certify == 0
            return spectral_norm(array, certify=certify, tolerance=self.tolerance, random=random)
        if array.ndim < 2:
            return operator_norm(array)
        layer = self._layer(message.key, array.shape)
        if layer is None or array.dtype.kind == "c" or array.ndim > 5:
            return SpectralNormResult(math.nan, math.nan, "unknown_size")
        arguments, guessed = layer
        try:
            found = operator_norm(array, **arguments, tolerance=self.tolerance, random=random)
        except MessageError:  # the arguments do not fit this layer: answer with a status, so that the replay goes on
            return SpectralNormResult(math.nan, math.nan, "unknown_size")
        if guessed and found.status in ("converged", "exact"):
            return SpectralNormResult(float(found), found.residual, "guessed", found.steps)
        return found

    def _layer(self, module: str | None, shape: tuple[int, ...]) -> tuple[dict[str, Any], bool] | None:
        """The arguments of `operator_norm` for a convolution, and whether they are a guess.

        None if the size of its input is unknown, if `operator_norm` does not support it, or if no stride fits.
        """
        axes, kernel = len(shape) - 2, shape[2:]
        header = recorded(self._convolutions.get(module, {}), kernel)
        if header is None and self.padding is None:
            return None
        header = header or {}
        stride = header.get("stride") if self.stride is None else self.stride
        padding = header.get("padding") if self.padding is None else self.padding
        dilation = header.get("dilation", 1) if self.dilation is None else self.dilation
        groups = header.get("groups") if self.groups is None else self.groups
        shapes = (self._sizes.get((kind, module), ()) for kind in _SIZES)
        inputs, outputs = (one if len(one) in (axes + 1, axes + 2) else () for one in shapes)
        size = self._input_size(header, kernel, inputs, outputs, (stride, padding, dilation))
        if not size:
            return None
        if groups is None:
            channels = inputs[-axes - 1] if inputs else shape[1]
            groups = channels // shape[1] if shape[1] and channels % shape[1] == 0 else 0
        # a missing stride or padding is a guess, unless the user gave the size of the input
        guessed = self.input_hw is None and (stride is None or padding is None)
        if stride is None and padding is None and dilation == 1 and inputs and len(outputs) == len(inputs):
            sizes = inputs[-axes:], outputs[-axes:], kernel
            fitting = inferred(*sizes)
            if fitting is None:
                return None
            (stride, padding), guessed = fitting, ambiguous(*sizes)
        of_header = header.get("padding_mode", "zeros") if self.padding is None else "zeros"
        arguments = {
            "input_hw": size,
            "stride": 1 if stride is None else stride,
            "padding": "same" if padding is None else padding,
            "padding_mode": self.padding_mode or of_header,
            "dilation": dilation,
            "groups": groups,
        }
        return arguments, guessed

    def _input_size(
        self,
        header: Mapping[str, Any],
        kernel: tuple[int, ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        layout: tuple[Any, Any, Any],
    ) -> Any:
        """The size of the input of a convolution: given, recorded, or derived from its output; empty if unknown."""
        axes, (stride, padding, _) = len(kernel), layout
        size: Any = self.input_hw if self.input_hw is not None else inputs[-axes:]
        if header.get("transposed", False):  # a convolution from outputs to inputs has the same norm
            if outputs and self.input_hw is None:
                return tuple(m - unused for m, unused in zip(outputs[-axes:], header["cropped"], strict=True))
            return inputs_of(size, kernel, *layout, header["output_padding"]) if size else size
        if not size and outputs and stride is not None and padding is not None:
            return inputs_of(outputs[-axes:], kernel, *layout)
        return size
