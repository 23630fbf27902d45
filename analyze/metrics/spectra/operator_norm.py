"""The operator norm of a layer: the largest factor by which it stretches an input, for a convolution of its real size.

Shapes: ``w_ock`` is a kernel with o outputs, c inputs (of each group) and one or more spatial axes k; ``x_cs`` is one
input with spatial axes s, ``y_ot`` its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check
from analyze.metrics.inputs import power_of_two
from analyze.metrics.metric import PerMessage, Where
from analyze.metrics.spectra.convolution import (
    MODES,
    Convolution,
    Mode,
    Padding,
    Sizes,
    circular_norm,
    layout_of,
    per_axis,
)
from analyze.metrics.spectra.lanczos import generator_of, largest, seeded
from analyze.metrics.spectra.recorded_layers import ambiguous, inferred, inputs_of, recorded
from analyze.metrics.spectra.spectra import code
from analyze.metrics.spectra.spectral_norm import (
    SINGLE,
    STATUSES,
    SpectralNormResult,
    Status,
    check_certify,
    check_tolerance,
    spectral_norm,
    trivial,
)
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.messaging.subscription import Subscription
from tracer.numbers.arrays import Array, as_array

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
class OperatorNorm(PerMessage):
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

    def __init__(
        self,
        kind: str = "weights",
        *,
        input_hw: int | tuple[int, ...] | None = None,
        stride: int | tuple[int, ...] | None = None,
        padding: int | str | tuple[int, ...] | None = None,
        padding_mode: str | None = None,
        dilation: int | tuple[int, ...] | None = None,
        groups: int | None = None,
        tolerance: float = 1e-6,
        certify: int = 100,
        **where: Unpack[Where],
    ) -> None:
        check_tolerance(tolerance)
        check_certify(certify)
        if kind in _SIZES:
            raise MessageError(f"operator_norm takes the weights of layers, not their {kind}")
        for what, given, least in (
            ("input_hw", input_hw, 1),
            ("stride", stride, 1),
            ("dilation", dilation, 1),
            ("padding", None if isinstance(padding, str) else padding, 0),
            ("groups", groups, 1),
        ):
            if given is not None:
                per_axis(given, len(given) if isinstance(given, tuple) else 1, what, least)
        good = not isinstance(padding, str) or padding in ("same", "valid", "circular")
        check(good, "padding is a number, one for each axis, 'same', 'valid' or 'circular'", padding)
        good = padding_mode is None or padding_mode in MODES
        check(good, f"padding_mode is one of {', '.join(map(repr, MODES))}", padding_mode)
        metric = f"{kind}_operator_norm"
        super().__init__(kind, (metric, f"{metric}_residual", f"{metric}_status"), **where)
        if input_hw is None:
            (weights,) = self.subscriptions
            self.subscriptions = weights, Subscription(_SIZES, None, weights.subsample, weights.modules)
        self.input_hw, self.stride, self.padding, self.dilation = input_hw, stride, padding, dilation
        self.groups, self.padding_mode, self.tolerance, self.certify = groups, padding_mode, tolerance, certify
        self._sizes: dict[tuple[str, str | None], tuple[int, ...]] = {}
        self._convolutions: dict[Any, Mapping[str, Any]] = {}

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

    def state_dict(self) -> dict[str, Any]:
        """The last input and output shape of each layer."""
        sizes = [{"kind": kind, "module": module, "shape": list(of)} for (kind, module), of in self._sizes.items()]
        return {"sizes": sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of a metric with the same parameters."""
        self._sizes = {(one["kind"], one["module"]): tuple(one["shape"]) for one in state["sizes"]}
