"""The stride, padding and input size of a convolution, from a trace's header or from recorded shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analyze.metrics.spectra.convolution import MODES, padded, per_axis
from tracer.errors import MessageError


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
