"""The norm of a convolution as an operator against the dense operator, and its geometry as recordings tell it."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import analyze
import tracer
from analyze.metrics.operator_norm import OperatorNorm, inferred
from analyze.metrics.spectral_norm import STATUSES
from tests.analyze.metrics.matrices import INF, NAN, message, said
from tracer import MessageError, ModuleMessage

# -- operator norm --------------------------------------------------------------------------------------------


LAPLACIAN = np.array([[[[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]]])


def test_operator_norms_of_known_kernels() -> None:
    """The five-point Laplacian and the kernel of ones: closed forms for zero and circular padding."""
    for n in (8, 12, 20):
        exact = 4 + 4 * math.cos(math.pi / (n + 1))
        assert analyze.operator_norm(LAPLACIAN, n) == pytest.approx(exact, rel=1e-6)
        assert analyze.operator_norm(LAPLACIAN, n, padding="circular") == pytest.approx(8, rel=1e-13)
        ones = (1 + 2 * math.cos(math.pi / (n + 1))) ** 2
        assert analyze.operator_norm(np.ones((1, 1, 3, 3)), n) == pytest.approx(ones, rel=1e-6)
    assert analyze.operator_norm(LAPLACIAN, 8) == pytest.approx(7.758770483144, rel=1e-6)
    assert analyze.operator_norm(LAPLACIAN, 9, padding="circular") == pytest.approx(7.758770483144, rel=1e-12)
    assert analyze.operator_norm(np.ones((1, 1, 3, 3)), 8) == pytest.approx(8.29085936938159, rel=1e-6)
    assert analyze.operator_norm(np.ones((1, 1, 3, 3)), 8, padding="circular") == pytest.approx(9, rel=1e-13)
    assert analyze.spectral_norm(LAPLACIAN) == pytest.approx(4.472135955, rel=1e-9)


def test_circular_operator_norm_of_several_channels() -> None:
    """The reference value of a random kernel, which the dense operator confirms."""
    torch.manual_seed(0)
    kernel = torch.randn(3, 2, 3, 3).double()
    found = analyze.operator_norm(kernel, 6, padding="circular")
    assert found == pytest.approx(9.681712720682, rel=1e-12)
    eye = torch.eye(72, dtype=torch.float64).reshape(72, 2, 6, 6)
    dense = F.conv2d(F.pad(eye, (1, 1, 1, 1), mode="circular"), kernel).reshape(72, -1)
    assert found == pytest.approx(np.linalg.norm(dense.numpy(), 2), rel=1e-12)
    assert found.residual < 1e-12


PADDED: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3, "padding": 1},
    "wide": {"kernel_size": 3, "padding": (3, 4), "size": (4, 5)},
    "stride": {"kernel_size": (3, 4), "padding": (1, 2), "stride": (2, 3), "size": (8, 7)},
    "dilation": {"kernel_size": 3, "padding": 2, "dilation": 2, "stride": 2},
    "same, even kernel": {"kernel_size": (2, 4), "padding": "same"},
    "valid": {"kernel_size": 3, "padding": "valid", "stride": 2},
    "groups": {"kernel_size": 3, "padding": 2, "groups": 2},
    "depthwise": {"kernel_size": 5, "padding": 2, "groups": 4, "stride": 3},
    "patches": {"kernel_size": 2, "padding": 0, "stride": 2},
    "1 x 1": {"kernel_size": 1, "padding": 0, "stride": 2},
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("options", PADDED.values(), ids=PADDED)
def test_operator_norm_of_padded_convolutions(options: dict[str, Any], mode: Any, axes: int) -> None:
    """With whatever around the input, it is the largest singular value of torch's layer as a dense matrix."""
    given = {key: value[0] if isinstance(value, tuple) and axes != 2 else value for key, value in options.items()}
    size = given.pop("size", (6, 5))
    side = size if isinstance(size, int) else size[0]
    size = size if axes == 2 else (side,) if axes == 1 else (min(side, 4),) * 3
    torch.manual_seed(0)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](4, 4, padding_mode=mode, bias=False, **given).double()
    eye = torch.eye(4 * math.prod(size), dtype=torch.float64).reshape(-1, 4, *size)
    with torch.no_grad():
        exact = np.linalg.norm(layer(eye).reshape(len(eye), -1).numpy(), 2)
    given.pop("kernel_size")
    for weight in (layer.weight, layer.weight.float()):
        found = analyze.operator_norm(weight, size, padding_mode=mode, **given)
        assert found == pytest.approx(exact, rel=1e-6)
        assert found.status == "converged"


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_strided_circular_padding_is_part_of_the_unstrided(stride: int, size: int) -> None:
    """Its outputs are those at every stride-th position of the wrapped convolution, whose norm is no smaller."""
    kernel = torch.randn(3, 2, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = analyze.operator_norm(kernel, size, padding="circular", stride=stride)
    eye = torch.eye(2 * size**2, dtype=torch.float64).reshape(-1, 2, size, size)
    dense = F.conv2d(F.pad(eye, (0, 1, 1, 1), mode="circular"), kernel)[..., ::stride, ::stride]
    assert found == pytest.approx(np.linalg.norm(dense.reshape(len(eye), -1).numpy(), 2), rel=1e-6)
    assert found.status == ("exact" if stride == 1 else "converged")


def test_operator_norm_is_sandwiched() -> None:
    """At stride 1 and half padding it is from 1 to sqrt(hw) times the spectral norm of the reshaped kernel."""
    for seed in range(2):
        kernel = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(seed))
        reshaped = analyze.spectral_norm(kernel)
        for padding in ("same", "circular"):
            found = analyze.operator_norm(kernel, 9, padding=padding)
            assert reshaped * (1 - 1e-6) <= found <= 3 * reshaped


def test_operator_norm_of_other_layers() -> None:
    """A matrix has its spectral norm, a vector its largest element; nothing, zero and no number are as everywhere."""
    w = torch.randn(150, 160, generator=torch.Generator().manual_seed(0))
    assert analyze.operator_norm(w) == pytest.approx(np.linalg.norm(w.double().numpy(), 2), rel=1e-6)
    assert analyze.operator_norm([1.0, -3.0, 2.0]) == 3
    assert analyze.operator_norm(np.zeros((2, 2, 3, 3)), 5) == 0
    assert analyze.operator_norm(np.zeros((0, 2, 3, 3)), 5) == 0
    for value in (NAN, INF):
        broken = np.where(np.arange(36).reshape(2, 2, 3, 3) == 5, value, 1.0)
        assert analyze.operator_norm(broken, 5).status == "nonfinite"
    for scale in (1e-300, 1e-30, 1e30, 1e300):
        exact = (4 + 4 * math.cos(math.pi / 9)) * scale
        assert analyze.operator_norm(LAPLACIAN * scale, 8) == pytest.approx(exact, rel=1e-6)
        assert analyze.operator_norm(LAPLACIAN * scale, 8, padding="circular") == pytest.approx(8 * scale, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "needs input_hw"),
        ({"input_hw": (8, 8, 8)}, "input_hw is a whole number from 1, or 2 of them"),
        ({"input_hw": 8, "stride": 0}, "stride is a whole number from 1"),
        ({"input_hw": 8, "padding": -1}, "padding is a whole number from 0"),
        ({"input_hw": 8, "padding": "reflect"}, "padding is a number, one for each axis, 'same'"),
        ({"input_hw": 8, "padding_mode": "mirror"}, "padding_mode is one of 'zeros', 'reflect', 'replicate'"),
        ({"input_hw": 8, "padding": "circular", "padding_mode": "reflect"}, "contradicts padding_mode 'reflect'"),
        ({"input_hw": 3, "padding": 3, "padding_mode": "reflect"}, "an input of 3 has at most 2 of reflect padding"),
        ({"input_hw": 3, "padding": 4, "padding_mode": "circular"}, "at most 3 of circular padding on a side, not 4"),
        ({"input_hw": 8, "groups": 3}, "groups is a positive divisor of the 1 outputs"),
        ({"input_hw": 2, "padding": 0}, "does not fit into an input of 2"),
        ({"input_hw": 8, "tolerance": 0}, "tolerance"),
    ],
)
def test_wrong_wishes_of_operator_norm(options: dict[str, Any], sentence: str) -> None:
    """What contradicts itself is an error of the pure function that names it."""
    with pytest.raises(MessageError, match=sentence):
        analyze.operator_norm(LAPLACIAN, **options)


def test_strides_and_paddings_are_inferred() -> None:
    """Of torch's convolutions with the usual settings stride and padding are found again from the sizes."""
    for n, k, s in itertools.product((7, 8, 14, 28, 32, 33, 56, 224), (1, 3, 5, 7), (1, 2)):
        padding = k // 2
        outputs = (n + 2 * padding - k) // s + 1
        told = inferred((n,), (outputs,), (k,))
        assert told is not None
        (stride,), (zeros,) = told
        assert (n + 2 * zeros - k) // stride + 1 == outputs
        if s == 1 or n % 2 == 0:
            assert (stride, zeros) == (s, padding) or (n + 2 * zeros - k) // s + 1 == outputs
    assert inferred((224, 224), (14, 14), (16, 16)) == ((16, 16), (0, 0))
    assert inferred((8, 8), (6, 4), (3, 3)) == ((1, 2), (0, 1))
    assert inferred((8,), (80,), (3,)) is None


# -- what a recording tells of convolutions -------------------------------------------------------------------


def test_operator_norm_learns_sizes_from_the_trace() -> None:
    """From recorded inputs and outputs: size, stride, padding and groups; before that a NaN with its status."""
    kernel = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    metric = analyze.OperatorNorm()
    assert metric.needs == {"weights", "layer_inputs", "activations"}
    unknown = said(metric, message(kernel))
    assert math.isnan(unknown["value"])
    assert STATUSES[int(unknown["status"])] == "unknown_size"
    for options in ({"padding": 1}, {"padding": 1, "stride": 2}, {"padding": 0}, {"padding": 1, "groups": 2}):
        channels = 2 * options.get("groups", 1)
        inputs = torch.zeros(5, channels, 8, 10)
        assert not said(metric, message(inputs, "layer_inputs", tag="probe"))
        assert not said(metric, message(F.conv2d(inputs, kernel, **options), "activations", tag="probe"))
        found = said(metric, message(kernel))
        right = analyze.operator_norm(kernel, (8, 10), **options)  # type: ignore[arg-type]
        assert found["value"] == pytest.approx(right, rel=1e-6)
        again = analyze.OperatorNorm()
        again.load_state_dict(metric.state_dict())
        assert said(again, message(kernel, step=1)) == said(metric, message(kernel, step=1))
    for padding, stride, size in ((1, 1, (8, 10)), ("same", 1, (8, 10)), (1, 2, (7, 9)), (0, 1, (8, 10))):
        outputs_only = analyze.OperatorNorm(stride=stride, padding=padding)
        outputs = F.conv2d(torch.zeros(5, 2, 8, 10), kernel, padding=padding, stride=stride)
        assert not said(outputs_only, message(outputs, "activations"))
        right = analyze.operator_norm(kernel, size, padding=padding, stride=stride)  # type: ignore[arg-type]
        assert said(outputs_only, message(kernel))["value"] == pytest.approx(right, rel=1e-6)
    unsaid = analyze.OperatorNorm(stride=1)
    assert not said(unsaid, message(torch.zeros(5, 4, 8, 10), "activations"))
    assert STATUSES[int(said(unsaid, message(kernel))["status"])] == "unknown_size"
    given = analyze.OperatorNorm(input_hw=8, stride=2, padding=1)
    assert given.needs == {"weights"}
    expected = analyze.operator_norm(kernel, 8, stride=2, padding=1)
    assert said(given, message(kernel))["value"] == pytest.approx(expected, rel=1e-6)
    misfit = said(analyze.OperatorNorm(input_hw=1, padding=0), message(kernel))
    assert STATUSES[int(misfit["status"])] == "unknown_size"


@pytest.mark.parametrize(
    ("layer", "size", "status"),
    [
        (nn.Conv2d(2, 3, 3, stride=2), 8, "guessed"),  # 3 x 3 outputs, as with stride 3 and padding 1
        (nn.Conv2d(2, 3, 3, stride=2, padding=1), 8, "converged"),
        (nn.Conv2d(2, 3, 4, stride=4), 16, "converged"),  # the only one that uses the whole input
        (nn.Conv2d(2, 3, 3, dilation=3), 8, "guessed"),  # as one with stride 4, of another norm
        (nn.ConvTranspose2d(2, 2, 3, stride=2), 4, "unknown_size"),
    ],
)
def test_a_guessed_geometry_says_so(layer: nn.Module, size: int, status: str) -> None:
    """Where sizes do not tell the stride and padding the status says so; and what is given is no guess."""
    x = torch.randn(2, 2, size, size, generator=torch.Generator().manual_seed(0))
    where = {"module": "c", "global_step": 1, "train_step": 1, "epoch": 0}
    heard = {"layer_inputs": x, "activations": layer(x).detach(), "weights": layer.weight.detach()}  # type: ignore[operator]

    def said(**options: Any) -> list[float]:
        asked = OperatorNorm(**options)
        messages = [ModuleMessage(kind=kind, data=data, **where) for kind, data in heard.items()]  # type: ignore[arg-type]
        return [float(answer.data) for message in messages for answer in asked.compute(message)]

    assert STATUSES[int(said()[2])] == status
    if isinstance(layer, nn.Conv2d):
        given = {"stride": layer.stride[0], "padding": int(layer.padding[0]), "dilation": layer.dilation[0]}
        units = torch.eye(x[0].numel()).reshape(-1, *x.shape[1:])
        dense = F.conv2d(units, layer.weight.detach(), **given).reshape(len(units), -1)
        value, _, number = said(**given)
        assert value == pytest.approx(float(torch.linalg.matrix_norm(dense.double(), 2)), rel=1e-5)
        assert STATUSES[int(number)] == "converged"
        assert (said()[0] == pytest.approx(value, rel=1e-5)) or status == "guessed"
    else:
        assert math.isnan(said()[0])


def test_without_recorded_outputs_the_stride_is_a_guess() -> None:
    """The input alone does not tell the stride; nor is stride 1 said to be right."""
    asked = OperatorNorm()
    where = {"module": "c", "global_step": 1, "train_step": 1, "epoch": 0}
    assert not list(asked.compute(ModuleMessage(kind="layer_inputs", data=torch.ones(1, 2, 8, 8), **where)))
    _, _, status = asked.compute(ModuleMessage(kind="weights", data=torch.ones(3, 2, 3, 3), **where))
    assert STATUSES[int(status.data)] == "guessed"


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "strided": (lambda: nn.Conv2d(2, 3, 3, stride=2), (8, 8)),  # its sizes say stride 3 and padding 1, too
    "dilated": (lambda: nn.Conv2d(2, 4, 3, dilation=3, groups=2, padding=1), (8, 7)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding="same"), (6, 5)),
    "valid": (lambda: nn.Conv1d(2, 3, 4, stride=3, padding="valid", padding_mode="reflect"), (12,)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (6, 5)),
    "circular, strided": (lambda: nn.Conv2d(2, 3, 3, 2, padding=1, padding_mode="circular"), (5, 7)),
    "circular, wide": (lambda: nn.Conv1d(2, 3, 3, padding=4, padding_mode="circular"), (6,)),
    "reflect": (lambda: nn.Conv2d(2, 4, 3, padding=2, groups=2, padding_mode="reflect"), (6, 5)),
    "replicate": (lambda: nn.Conv3d(1, 2, 3, (2, 1, 1), padding=1, padding_mode="replicate"), (3, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (4, 5)),
    "transposed, in groups": (lambda: nn.ConvTranspose1d(4, 6, 5, stride=3, groups=2, dilation=2), (5,)),
    "transposed, padded beyond the stride": (
        lambda: nn.ConvTranspose1d(2, 1, 5, padding=2, dilation=2, output_padding=1),
        (5,),
    ),
    "transposed, padded more at the end": (
        lambda: nn.ConvTranspose2d(2, 3, (3, 2), (2, 1), padding=(1, 0), dilation=(4, 3), output_padding=(3, 2)),
        (4, 3),
    ),
    "three axes": (lambda: nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), (3, 4, 3)),
    "lazy": (lambda: nn.LazyConv2d(3, 3, stride=3, padding=2), (7, 7)),
}


class Apart(nn.Module):
    """Each of `LAYERS` by itself, with an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        layers = {name: make() for name, (make, _) in LAYERS.items()}
        channels = {name: 2 if name == "lazy" else layer.in_channels for name, layer in layers.items()}
        self.layers = nn.ModuleDict(layers)
        self.inputs = {name: torch.randn(2, channels[name], *LAYERS[name][1]) for name in LAYERS}

    def forward(self) -> torch.Tensor:
        """A loss of all of them."""
        return torch.stack([layer(self.inputs[name]).square().mean() for name, layer in self.layers.items()]).sum()


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]], dict[str, float]]:
    """A training of all of them; what was said live of each; and the norm of torch's own map in the last step."""
    torch.manual_seed(0)
    path, live, exact = tmp_path_factory.mktemp("convolutions") / "run.zarr", tracer.Collect("weights_*"), {}
    model = Apart()
    model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = tracer.Capture(kinds=["weights", "layer_inputs", "activations"])
    with tracer.record(path, model, optimizer, capture=capture, receivers=[OperatorNorm(), live], strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            for name, layer in model.layers.items():
                x = model.inputs[name]
                units = torch.eye(x[0].numel(), dtype=torch.float64).reshape(-1, *x.shape[1:])
                dense = copy.deepcopy(layer).double()
                with torch.no_grad():
                    dense.bias.zero_()
                    exact[name] = float(torch.linalg.matrix_norm(dense(units).reshape(len(units), -1), 2))
            optimizer.step()
    return path, said_of(live), exact


def said_of(heard: tracer.Collect) -> dict[str, list[Any]]:
    """Kind, step and value of each answer, by layer."""
    found: dict[str, list[Any]] = {}
    for one in heard:
        name = str(one.key).removeprefix("layers.")
        found.setdefault(name, []).append((one.kind, one.global_step, float(one.data)))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("kinds", ["layer_inputs+activations", "layer_inputs", "activations"])
def test_a_recording_tells_what_a_convolution_is(kinds: str, convolutions: Any) -> None:
    """Whatever it is, the norm is that of torch's own map as a dense matrix, live and on replay; nothing is a guess."""
    path, live, exact = convolutions
    heard = tracer.Collect("weights_*")
    tracer.replay(path, OperatorNorm(), heard, kinds=["weights", *kinds.split("+")])
    told = said_of(heard)
    assert told.keys() == exact.keys()
    if "+" in kinds:
        assert told == live
    for name, answers in told.items():
        said_last = {kind.removeprefix("weights_operator_norm"): value for kind, _, value in answers[-3:]}
        # of outputs alone follows the smallest input only, which this one is not
        if kinds == "activations" and name in ("strided", "lazy"):
            assert said_last[""] <= exact[name] * (1 + 1e-6), name
        else:
            assert said_last[""] == pytest.approx(exact[name], rel=1e-6), name
        assert STATUSES[int(said_last["_status"])] in ("converged", "exact"), name


def test_a_batch_knows_what_a_convolution_is(tmp_path: Path) -> None:
    """The parts of a batch, each of one layer, are told what the header says, as a replay is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Conv2d(3, 2, 2, padding=1, padding_mode="circular"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = tracer.Capture(kinds=["weights", "layer_inputs"])
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture):
        for _ in range(3):
            model(torch.randn(2, 2, 8, 8)).square().mean().backward()
            optimizer.step()
    rows = analyze.batch(tmp_path / "run.zarr", ["operator_norm"], tmp_path / "out", workers=0, part_bytes=1)
    assert len(rows.units) == 2
    whole = analyze.analyze(tmp_path / "run.zarr", ["operator_norm"])
    found, right = (
        sorted((row.kind, row.module, row.global_step, row.value) for row in some if not math.isnan(row.value))
        for some in (rows, whole)
    )
    assert found == right
    status = {row.module: STATUSES[int(row.value)] for row in rows if row.kind.endswith("_status")}
    assert status == {"0": "converged", "1": "converged"}


def test_what_a_header_says_of_convolutions_is_not_believed_blindly() -> None:
    """What is missing or broken there is as if nothing were said; a padding that is not known is no zero padding."""
    kernel = torch.randn(3, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    good = {
        "stride": [1, 1],
        "padding": [1, 1],
        "dilation": [1, 1],
        "output_padding": [0, 0],
        "groups": 1,
        "padding_mode": "zeros",
        "transposed": False,
    }
    x = torch.zeros(1, 2, 6, 6)

    def answers(model: Any, **options: Any) -> tuple[float, str]:
        metric = OperatorNorm(**options)
        metric.know_model(model)
        for kind in ("layer_inputs", "activations"):
            list(metric.receive(message(x if kind == "layer_inputs" else F.conv2d(x, kernel, padding=1), kind)))
        value, _, status = (float(one.data) for one in metric.receive(message(kernel)))  # type: ignore[arg-type]
        return value, STATUSES[int(status)]

    exact = float(analyze.operator_norm(kernel, 6, padding=1))
    for broken in (
        {},
        {"modules": None},
        {"modules": [3, {"name": "m"}, {"name": "m", "convolution": 4}]},
        *({"modules": [{"name": "m", "convolution": {**good, name: "x"}}]} for name in ("stride", "padding")),
        *({"modules": [{"name": "m", "convolution": {**good, name: [1]}}]} for name in ("dilation", "output_padding")),
        {"modules": [{"name": "m", "convolution": {name: good[name] for name in good if name != "groups"}}]},
    ):
        assert answers(broken) == (pytest.approx(exact, rel=1e-6), "converged"), broken

    def said_to_be(**change: Any) -> dict[str, Any]:
        return {"modules": [{"name": "m", "convolution": {**good, **change}}]}

    assert math.isnan(answers(said_to_be(padding_mode="mirror"))[0])
    assert math.isnan(answers(said_to_be(padding_mode="reflect", transposed=True))[0])
    assert math.isnan(answers(said_to_be(padding_mode="reflect", padding=[6, 6]))[0])
    for mode in ("reflect", "replicate", "circular"):
        right = float(analyze.operator_norm(kernel, 6, padding=(2, 1), padding_mode=mode))
        told = answers(said_to_be(padding_mode=mode, padding=[2, 1]))
        assert told == (pytest.approx(right, rel=1e-6), "converged")
        assert answers({}, padding=(2, 1), stride=1, padding_mode=mode) == told
    assert math.isnan(answers(said_to_be(groups="x"))[0])
    circular = float(analyze.operator_norm(kernel, 6, padding="circular"))
    assert answers(said_to_be(padding_mode="circular")) == (pytest.approx(circular, rel=1e-12), "exact")
    # what the user gives wins
    strided = float(analyze.operator_norm(kernel, 6, padding=0, stride=2))
    assert answers(said_to_be(), padding=0, stride=2) == (pytest.approx(strided, rel=1e-6), "converged")
    assert answers(said_to_be(padding_mode="reflect"), padding=1)[0] == pytest.approx(exact, rel=1e-6)
