"""A convolution as a linear map of one input: its layout, its products, its norm with circular padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_whole
from tracer.errors import MessageError

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
class Layout:
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
) -> Layout:
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
    return Layout(sizes, strides, before, after, dilations, groups, padding_mode)


class Convolution:
    """A convolution of one padded input, and its transpose, as a matrix product for each position of the kernel.

    For a kernel (o, c / groups, ...), `forward` maps the flat input (c, ...) to the flat output (o, ...). `adjoint`,
    its transpose, maps outputs to inputs.
    """

    def __init__(self, kernel: NDArray[Any], layout: Layout) -> None:
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


def circular_norm(kernel: NDArray[np.float64], layout: Layout) -> tuple[float, float]:
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
