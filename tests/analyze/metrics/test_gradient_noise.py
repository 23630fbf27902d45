"""The first-order board from a trace: against per-sample gradients of autograd, to 1e-12, and on real recordings."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import analyze
import tracer
from analyze.metrics.sample_gram import SampleGram, bias_gram, conv_gram, linear_gram
from tests.examples import examples
from tracer import Capture, Collect, Message, MessageError, ModuleMessage, NetworkMessage
from tracer.messaging.messages import DATA_KINDS

BOARD = (
    "norm_test",
    "inner_product_test",
    "orthogonality_test",
    "noise_scale",
    "variance",
    "gsnr",
    "early_stopping",
    "cabs",
)


def per_sample(model: nn.Module, x: Tensor, y: Tensor, loss: Any = F.cross_entropy) -> dict[str, Tensor]:
    """Per-sample gradients of every parameter, by torch.func."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = loss(functional_call(model, dict(parameters), (x[None],)), y[None])
        return value

    return vmap(grad(of_one), (None, 0, 0))(parameters, x, y)  # type: ignore[no-any-return]


def board(gradients: Mapping[str, Tensor], loss: float, lr: float = 1.0, eps: float = 1e-5) -> dict[str, float]:
    """The quantities as cockpit defines them, written out from per-sample gradients (b, p)."""
    g_bp = torch.cat([one.reshape(len(one), -1) for one in gradients.values()], dim=1).double()
    b = len(g_bp)
    g = g_bp.mean(0)
    square = g @ g
    projections = g_bp @ g
    orthogonal = g_bp - projections[:, None] / square * g
    variance = g_bp.var(0)
    return {
        "norm_test": float(((g_bp - g).square().sum() / (b * (b - 1))).sqrt() / square.sqrt()),
        "inner_product_test": float((projections.var() / b).sqrt() / square),
        "orthogonality_test": float((orthogonal.square().sum() / (b * (b - 1))).sqrt() / square.sqrt()),
        "noise_scale": float(variance.sum() / square),
        "variance": float(variance.sum()),
        "gsnr": float((g.square() / (g_bp.var(0, correction=0) + eps)).mean()),
        "early_stopping": float(1 - b * (g.square() / (variance + eps)).mean()),
        "cabs": float(lr * g_bp.var(0, correction=0).sum() / loss),
    }


# -- the identity -----------------------------------------------------------------------------------------------------


def layer_of(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A layer in float64, and the shape of one datapoint."""
    layers: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "linear": (nn.Linear(7, 5), (7,)),
        "linear on a sequence": (nn.Linear(7, 5), (6, 7)),
        "conv2d": (nn.Conv2d(3, 4, 3, padding=1), (3, 6, 7)),
        "conv2d, strided, dilated, grouped": (nn.Conv2d(4, 6, (3, 2), 2, (1, 0), (1, 2), 2), (4, 8, 9)),
        "depthwise": (nn.Conv2d(4, 4, 3, groups=4), (4, 5, 5)),
        "conv1d": (nn.Conv1d(3, 4, 4, dilation=2), (3, 12)),
        "conv3d": (nn.Conv3d(2, 3, (3, 2, 1), padding=(1, 0, 2)), (2, 4, 5, 3)),
    }
    layer, shape = layers[name]
    return layer.double(), shape


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "linear on a sequence",
        "conv2d",
        "conv2d, strided, dilated, grouped",
        "depthwise",
        "conv1d",
        "conv3d",
    ],
)
@pytest.mark.parametrize("block", [1 << 22, 50])
def test_products_are_those_of_per_sample_gradients(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner products, means and second moments of each layer agree with autograd to 1e-12, in blocks of any size."""
    monkeypatch.setattr("analyze.metrics.sample_gram._BLOCK", block)
    layer, shape = layer_of(name)
    x = torch.randn(9, *shape, dtype=torch.float64)
    target = torch.randn_like(layer(x))
    gradients = per_sample(layer, x, target, lambda out, y: (out - y).square().sum())
    output = layer(x)
    output.retain_grad()
    ((output - target).square().sum() / len(x)).backward()
    assert output.grad is not None
    if isinstance(layer, nn.Linear):
        found = {"weight": linear_gram(x, output.grad), "bias": bias_gram(output.grad)}
    else:
        geometry = {key: getattr(layer, key) for key in ("stride", "padding", "dilation", "groups")}
        kernel: Any = layer.kernel_size
        found = {"weight": conv_gram(x, output.grad, kernel, **geometry), "bias": bias_gram(output.grad, 1)}
    for parameter, one in found.items():
        g = gradients[parameter]
        flat = g.reshape(len(g), -1)
        for ours, theirs in ((one.gram, flat @ flat.T), (one.mean, g.mean(0)), (one.second, g.square().mean(0))):
            assert np.abs(ours - theirs.numpy()).max() <= 1e-12 * float(theirs.abs().max())


def test_shapes_that_fit_no_layer_are_an_error() -> None:
    """Each says what was found."""
    with pytest.raises(MessageError, match="no linear layer"):
        linear_gram(np.ones((2, 3, 4)), np.ones((2, 5)))
    with pytest.raises(MessageError, match="need samples"):
        linear_gram(np.ones((2, 3)), np.ones((3, 5)))
    with pytest.raises(MessageError, match="no convolution"):
        conv_gram(np.ones((2, 3, 4, 4)), np.ones((2, 3, 4, 4)), (3, 3))
    with pytest.raises(MessageError, match="real"):
        linear_gram(np.ones((2, 3)) * 1j, np.ones((2, 5)))
    with pytest.raises(MessageError, match="as many samples"):
        analyze.gradient_noise([linear_gram(np.ones((2, 3)), np.ones((2, 5))), bias_gram(np.ones((3, 5)))])


@given(st.integers(2, 12), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(40))
def test_board_is_as_cockpit_defines_it(b: int, p: int, seed: int) -> None:
    """Each quantity agrees with its definition from per-sample gradients, and does not depend on their order."""
    random = np.random.default_rng(seed)
    g_bp = random.standard_normal((b, p)) + 1
    expected = board({"p": torch.from_numpy(g_bp)}, loss=0.7, lr=0.1)
    for rows in (np.arange(b), random.permutation(b)):
        g = g_bp[rows]
        gram = SampleGram(g @ g.T, g.mean(0), np.square(g).mean(0))
        found = analyze.gradient_noise([gram], loss=0.7, learning_rate=0.1)
        # the tests are roots of differences, which lose half of the digits where they are near 0
        slack = 8 * math.sqrt(np.finfo(float).eps * np.square(g).sum() / np.square(g.mean(0)).sum())
        for what, value in expected.items():
            assert getattr(found, what) == pytest.approx(value, rel=1e-9, abs=max(slack, 1e-7)), what
        signal = float((g.mean(0) ** 2).sum()) - found.variance / b
        if signal > 1e-9:
            assert found.noise_scale_unbiased == pytest.approx(found.variance / signal, rel=1e-9)
        elif signal < 0:
            assert math.isnan(found.noise_scale_unbiased)
        assert found.samples == b


def test_equal_gradients_have_no_noise() -> None:
    """All tests are 0 then; one sample, or a zero gradient, has none: NaN."""
    a, d = np.ones((4, 3)), np.ones((4, 2))
    found = analyze.gradient_noise([linear_gram(a, d)], loss=1.0)
    assert (found.norm_test, found.inner_product_test, found.noise_scale, found.cabs) == (0, 0, 0, 0)
    assert found.orthogonality_test == pytest.approx(0, abs=1e-7)
    assert math.isnan(float(analyze.gradient_noise([linear_gram(a[:1], d[:1])])))
    assert math.isnan(analyze.gradient_noise([linear_gram(a, 0 * d)], loss=1.0).norm_test)
    assert math.isnan(analyze.gradient_noise([]).gsnr)


# -- from traces ------------------------------------------------------------------------------------------------------


def convolutional() -> nn.Sequential:
    """Layers of several geometries, one without bias, in float64."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(2, 4, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False),
            relu2=nn.ReLU(inplace=True),
            conv3=nn.Conv2d(6, 6, (1, 3), padding=(0, 1)),
            flatten=nn.Flatten(),
            fc1=nn.Linear(6 * 4 * 4, 8),
            tanh=nn.Tanh(),
            fc2=nn.Linear(8, 3),
        )
    ).double()


def recorded(
    path: Path,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    *,
    passes: int = 1,
    loss: Any = None,
    lr: float = 0.1,
    kinds: Sequence[str] = ("layer_inputs", "layer_gradients", "weight_gradients", "bias_gradients", "loss"),
) -> None:
    """Train with SGD, and record what the board needs; `passes` batches accumulate in each step."""
    loss = loss or nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with tracer.record(path, model, optimizer, loss=loss, capture=Capture(kinds=kinds), strict=True):
        for start in range(0, len(batches), passes):
            optimizer.zero_grad()
            for x, y in batches[start : start + passes]:
                (loss(model(x), y) / passes).backward()
            optimizer.step()


def replayed(path: Path, rule: analyze.GradientNoise) -> list[dict[str, float]]:
    """The board of each step."""
    heard = Collect()
    tracer.replay(path, rule, heard)
    steps: dict[int, dict[str, float]] = {}
    for message in heard:
        if message.kind in rule.produces and message.data is not None:
            what = message.kind.removeprefix("layer_gradients_")
            steps.setdefault(message.global_step, {})[what] = float(message.data)
    return [steps[step] for step in sorted(steps)]


def images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 8, 8, generator=generator).double(), torch.randint(3, (n,), generator=generator)


def test_board_of_a_recorded_convolutional_network(tmp_path: Path) -> None:
    """Replay finds stride and padding by itself, covers all parameters, and agrees with autograd to 1e-12."""
    model = convolutional()
    batches = [images(10, 1), images(10, 2), images(7, 3)]
    reference = copy.deepcopy(model)
    recorded(tmp_path / "run.zarr", model, batches)
    found = replayed(tmp_path / "run.zarr", analyze.GradientNoise(learning_rate=0.1))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    assert len(found) == 3
    for (x, y), one in zip(batches, found, strict=True):
        loss = F.cross_entropy(reference(x), y)
        expected = board(per_sample(reference, x, y), float(loss.detach()), lr=0.1)
        assert one["coverage"] == 1
        assert one["samples"] == len(x)
        assert one["residual"] < 1e-14
        for what in BOARD:
            assert one[what] == pytest.approx(expected[what], rel=1e-12), what
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    """Two micro-batches whose losses are halved have the board of the whole batch."""
    model, (x, y) = convolutional(), images(12, 4)
    recorded(tmp_path / "whole.zarr", copy.deepcopy(model), [(x, y)])
    recorded(tmp_path / "parts.zarr", model, [(x[:6], y[:6]), (x[6:], y[6:])], passes=2)
    (whole,), (parts,) = (replayed(tmp_path / name, analyze.GradientNoise()) for name in ("whole.zarr", "parts.zarr"))
    assert (parts["coverage"], parts["samples"]) == (1, 12)
    for what in (*BOARD, "residual"):
        assert parts[what] == pytest.approx(whole[what], rel=1e-11, abs=1e-14), what


class Twice(nn.Module):
    """Uses one layer twice in a pass, and on a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, 5) → (n, 3)."""
        out: Tensor = self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))).mean(1))
        return out


def test_several_losses_of_one_pass(tmp_path: Path) -> None:
    """A pass with two calls of the loss is one pass: the board is of the gradient of their sum."""
    model = nn.Linear(5, 3).double()
    x, y = torch.randn(8, 5).double(), torch.randint(3, (8,))
    expected = board(per_sample(model, x, y, lambda out, y: 1.5 * F.cross_entropy(out, y)), 1.0)
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, loss=loss, capture=Capture(kinds=DATA_KINDS)):
        output = model(x)
        (loss(output, y) + 0.5 * loss(output, y)).backward()
        optimizer.step()
    (found,) = replayed(tmp_path / "run.zarr", analyze.GradientNoise())
    assert (found["coverage"], found["samples"]) == (1, 8)
    for what in BOARD[:-1]:
        assert found[what] == pytest.approx(expected[what], rel=1e-12), what


def test_a_summed_loss(tmp_path: Path) -> None:
    """With reduction="sum" the per-sample gradients are the same as with the mean."""
    model, (x, y) = convolutional(), images(10, 5)
    recorded(tmp_path / "mean.zarr", copy.deepcopy(model), [(x, y)])
    recorded(tmp_path / "sum.zarr", model, [(x, y)], loss=nn.CrossEntropyLoss(reduction="sum"), lr=1e-3)
    (mean,) = replayed(tmp_path / "mean.zarr", analyze.GradientNoise())
    (summed,) = replayed(tmp_path / "sum.zarr", analyze.GradientNoise(reduction="sum"))
    for what in (*BOARD, "coverage"):
        assert summed[what] == pytest.approx(mean[what], rel=1e-11), what
    assert summed["residual"] < 1e-13


def test_batch_normalisations_are_covered(tmp_path: Path) -> None:
    """Their gradient is found from what came back through each sample, also with accumulated batches."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.InstanceNorm2d(4, affine=True), nn.Flatten(),
        nn.Linear(144, 5), nn.BatchNorm1d(5), nn.Linear(5, 3),
    ).double()  # fmt: skip
    recorded(tmp_path / "run.zarr", model, [images(8, 1), images(8, 2)], passes=2)
    (found,) = replayed(tmp_path / "run.zarr", analyze.GradientNoise())
    assert (found["coverage"], found["samples"]) == (1, 16)
    assert found["residual"] < 1e-12


class Positions(nn.Module):
    """Adds an embedding of positions, which it calls with (1, time), before all other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.tokens, self.head = nn.Embedding(6, 4), nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) → (n, 3)."""
        out: Tensor = self.head(torch.tanh(self.positions(torch.arange(6)[None]) + self.tokens(x)).mean(1))
        return out


def with_normalisations(eps: float) -> nn.Module:
    """Layer and RMS normalisation of vectors and of sequences, with scales that differ."""
    model = nn.Sequential(
        nn.Linear(6, 5), nn.LayerNorm(5, eps=eps), nn.Linear(5, 4), nn.RMSNorm(4, eps=eps), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def with_embedding() -> nn.Module:
    """Ids that repeat within and across samples, and padding."""
    return nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 5), nn.Flatten(), nn.Linear(30, 3))


def with_evaluated_statistics() -> nn.Module:
    """A batch normalisation in evaluation mode."""
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3, bias=False))
    model[1].eval()
    return model


def with_frozen_layer() -> nn.Module:
    """A layer that is not trained, and has no gradient."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    return model


class Case(NamedTuple):
    """A network, its inputs, which parameters are not covered (by how they begin), the coverage and the residual."""

    model: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    uncovered: tuple[str, ...] = ()
    coverage: float = 1.0
    residual: float = 1e-14


CASES = {
    "a layer used twice, on sequences": Case(Twice, lambda: torch.randn(8, 4, 5).double()),
    "normalisations": Case(lambda: with_normalisations(1e-5), lambda: torch.randn(9, 3, 6).double(), residual=1e-13),
    "of another eps": Case(lambda: with_normalisations(1e-6), lambda: torch.randn(9, 3, 6).double(), residual=1e-13),
    "an embedding": Case(with_embedding, lambda: torch.randint(6, (10, 6)), residual=1e-13),
    "a frozen layer": Case(with_frozen_layer, lambda: torch.randn(8, 4).double(), ("0",)),
    "statistics of evaluation": Case(
        with_evaluated_statistics,
        lambda: torch.randn(9, 6).double(),
        ("1",),
        (72 + 12 + 36) / (72 + 12 + 24 + 36),
    ),
    # an embedding that is called with (1, time) does not decide how many samples there are
    "positions": Case(Positions, lambda: torch.randint(9, (10, 6)), ("positions",), (36 + 15) / (24 + 36 + 15), 1e-13),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_board_of_a_network_is_that_of_autograd(case: Case, tmp_path: Path) -> None:
    """Of the covered parameters, to 1e-12; which share they are is told."""
    torch.manual_seed(0)
    model, x = case.model().double(), case.x()
    y = torch.randint(3, (len(x),))
    gradients = {name: g for name, g in per_sample(model, x, y).items() if not name.startswith(case.uncovered)}
    expected = board(gradients, float(F.cross_entropy(model(x), y).detach()))
    recorded(tmp_path / "run.zarr", model, [(x, y)])
    (found,) = replayed(tmp_path / "run.zarr", analyze.GradientNoise())
    assert (found["samples"], found["coverage"]) == (len(x), pytest.approx(case.coverage, rel=1e-15))
    assert found["residual"] < case.residual
    for what in BOARD:
        assert found[what] == pytest.approx(expected[what], rel=1e-12), what


def test_padding_that_is_no_zeros_shows_in_the_residual(tmp_path: Path) -> None:
    """The layer counts as covered; without it, all is right."""
    circular = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(192, 3))
    recorded(tmp_path / "circular.zarr", circular.double(), [images(6, 1)])
    (found,) = replayed(tmp_path / "circular.zarr", analyze.GradientNoise())
    assert found["coverage"] == 1
    assert found["residual"] > 0.01
    (found,) = replayed(tmp_path / "circular.zarr", analyze.GradientNoise(modules="2"))
    assert found["residual"] < 1e-14


def test_clipping_shows_in_the_residual_only(tmp_path: Path) -> None:
    """The board is of the gradients before clipping; the recorded ones, as the optimizer used them, are shorter."""
    model, (x, y) = nn.Linear(4, 3).double(), (torch.randn(8, 4).double(), torch.randint(3, (8,)))
    expected = board(per_sample(model, x, y), 1.0)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    with tracer.record(tmp_path / "run.zarr", model, optimizer, loss=loss, capture=Capture(kinds=DATA_KINDS)):
        loss(model(x), y).backward()
        total = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
        optimizer.step()
    (found,) = replayed(tmp_path / "run.zarr", analyze.GradientNoise())
    assert found["norm_test"] == pytest.approx(expected["norm_test"], rel=1e-12)
    assert found["residual"] == pytest.approx(total / 1e-3 - 1, rel=1e-4)


def test_what_is_missing_is_said_before_reading(tmp_path: Path) -> None:
    """A trace without layer inputs, or without biases, gets a sentence; bias=False asks for none."""
    model, x, y = nn.Linear(4, 3, bias=False), torch.randn(8, 4), torch.arange(8) % 3
    recorded(tmp_path / "run.zarr", model, [(x, y)])
    with pytest.raises(tracer.CaptureError, match="gradient_noise needs bias_gradients"):
        replayed(tmp_path / "run.zarr", analyze.GradientNoise())
    (found,) = replayed(tmp_path / "run.zarr", analyze.GradientNoise(bias=False))
    assert found["coverage"] == 1


def test_a_given_geometry_is_taken() -> None:
    """Stride, padding and dilation that are given are not searched for; one that does not fit is not covered."""
    conv = nn.Conv2d(1, 2, 3, padding=2, dilation=2).double()
    x = torch.randn(5, 1, 6, 6).double()
    out = conv(x)
    out.retain_grad()
    out.square().sum(dim=(1, 2, 3)).mean().backward()
    assert out.grad is not None
    assert conv.weight.grad is not None
    where: dict[str, Any] = {"global_step": 0, "train_step": 0, "epoch": 0}
    messages: list[Message] = [
        ModuleMessage(kind="layer_inputs", module="c", data=x, **where),
        ModuleMessage(kind="layer_gradients", module="c", data=out.grad, **where),
        ModuleMessage(kind="weight_gradients", module="c", data=conv.weight.grad, **where),
        NetworkMessage(kind="loss", data=torch.tensor(1.0), **where),
    ]
    for given_, covered, right in (
        ({}, 1, True),
        ({"dilation": 2}, 1, True),
        ({"dilation": 2, "padding": 2, "stride": 1}, 1, True),
        ({"dilation": 1}, 1, False),
        ({"padding": 0}, 0, False),
    ):
        rule = analyze.GradientNoise(bias=False, **given_)  # type: ignore[arg-type]
        for message in messages:
            assert not list(rule.receive(message))
        said = {
            one.kind.removeprefix("layer_gradients_"): float(one.data) for one in rule.finish() if one.data is not None
        }
        assert said["coverage"] == covered, given_
        assert (said["residual"] < 1e-12) == right, given_


# -- time first -------------------------------------------------------------------------------------------------------


class Sequential(nn.Module):
    """Tokens or features, time and batch in either order, to classes: linear layers, a normalisation, and a mean."""

    def __init__(self, *, tokens: bool, time: int = 0) -> None:
        super().__init__()
        self.first: nn.Module = nn.Embedding(9, 5) if tokens else nn.Linear(5, 5)
        self.norm, self.head, self.axis = nn.LayerNorm(5), nn.Linear(5, 3), time
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, x: Tensor) -> Tensor:
        """(t, n, 5) or (t, n) → (n, 3)."""
        out: Tensor = torch.tanh(self.head(self.norm(self.first(x)))).mean(self.axis)
        return out


def of_datapoints(model: nn.Module, x: Tensor, y: Tensor, axis: int) -> dict[str, Tensor]:
    """Per-sample gradients where the datapoints are on an axis of the input, by a loop of single datapoints."""
    names = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(F.cross_entropy(model(x.narrow(axis, at, 1)), y[at : at + 1]), [*names.values()])
        for at in range(len(y))
    ]
    return {name: torch.stack(of_one) for name, of_one in zip(names, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(("t", "b"), [(7, 16), (32, 16), (16, 7)])
def test_datapoints_after_time_are_found(tokens: bool, t: int, b: int, tmp_path: Path) -> None:
    """Where time is on axis 0, the samples are the datapoints, which are as many as the labels; live as on replay."""
    torch.manual_seed(0)
    model = Sequential(tokens=tokens).double()
    batches = [
        (torch.randint(9, (t, size)) if tokens else torch.randn(t, size, 5).double(), torch.randint(3, (size,)))
        for size in (b, b - 1)
    ]
    reference, rule, live = copy.deepcopy(model), analyze.GradientNoise(), Collect()
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    capture = Capture(kinds=DATA_KINDS)
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, loss=loss, capture=capture, receivers=[rule, live], strict=True
    ):
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    found = replayed(tmp_path / "run.zarr", analyze.GradientNoise())
    told = [float(one.data) for one in live if one.kind in rule.produces and one.data is not None]
    np.testing.assert_array_equal(told, [number for one in found for number in one.values()])
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for (x, y), one in zip(batches, found, strict=True):
        expected = board(of_datapoints(reference, x, y, 1), float(F.cross_entropy(reference(x), y).detach()))
        assert (one["samples"], one["coverage"], one["axis"], one["ranks"]) == (len(y), 1, 1, 1)
        assert one["residual"] < 1e-12
        for what in BOARD:
            assert one[what] == pytest.approx(expected[what], rel=1e-11), what
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()


def test_datapoints_before_time_are_known(tmp_path: Path) -> None:
    """The labels tell axis 0, too; where labels are of all positions, or as many as both axes, nothing tells it."""
    torch.manual_seed(0)
    y = torch.randint(3, (8,))
    for name, x, labels, axis, known in (
        ("first", torch.randn(8, 4, 5), y, 1, 0.0),
        ("square", torch.randn(8, 8, 5), y, 1, math.nan),
        ("positions", torch.randn(4, 2, 5), y, None, math.nan),
    ):
        model = Sequential(tokens=False).double()
        model.axis = axis or 0
        if axis is None:
            model = nn.Sequential(model.first, model.norm, model.head, nn.Flatten(0, 1))  # type: ignore[assignment]
        recorded(tmp_path / f"{name}.zarr", model, [(x.double(), labels)], kinds=DATA_KINDS)
        (found,) = replayed(tmp_path / f"{name}.zarr", analyze.GradientNoise())
        assert found["samples"] == len(x)
        np.testing.assert_equal(found["axis"], known)


def test_a_trace_that_does_not_tell_the_axis(tmp_path: Path) -> None:
    """Messages of sequences without an axis, as in an older trace, are taken as before, and the axis is NaN."""
    where: dict[str, Any] = {"module": "fc", "global_step": 0, "train_step": 0, "epoch": 0}
    x, d = torch.randn(6, 4, 3).double(), torch.randn(6, 4, 2).double()
    answers = {}
    for axis in (None, 0, 1):
        rule = analyze.GradientNoise(bias=False)
        sampling = None if axis is None else {"datapoints": axis}
        for kind, data in (
            ("layer_inputs", x), ("layer_gradients", d), ("weight_gradients", torch.einsum("tbo,tbi->oi", d, x))
        ):  # fmt: skip
            told = sampling if kind == "layer_gradients" else None
            assert not list(rule.receive(ModuleMessage(kind=kind, data=data, sampling=told, **where)))
        resumed = analyze.GradientNoise(bias=False)
        resumed.load_state_dict(rule.state_dict())
        answers[axis] = {
            one.kind.removeprefix("layer_gradients_"): float(one.data)
            for one in resumed.finish()
            if one.data is not None
        }
    assert [answers[axis]["samples"] for axis in (None, 0, 1)] == [6, 6, 4]
    assert answers[1]["axis"] == 1
    assert answers[0]["axis"] == 0
    assert math.isnan(answers[None]["axis"])
    assert answers[None]["noise_scale"] == answers[0]["noise_scale"] != answers[1]["noise_scale"]


# -- gradients that were thrown away, or averaged ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["zero_grad", "scaler"])
def test_a_backward_that_was_thrown_away_does_not_count(how: str, tmp_path: Path) -> None:
    """The board is of the batches whose gradient the optimizer used, not of those before `zero_grad` or a skip."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    away, *kept = [(torch.randn(8, 6).double(), torch.randint(3, (8,))) for _ in range(3)]
    x, y = torch.cat([one for one, _ in kept]), torch.cat([one for _, one in kept])
    expected = board(per_sample(model, x, y), float(F.cross_entropy(model(x), y).detach()))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=how == "scaler")
    with tracer.record(tmp_path / "run.zarr", model, optimizer, loss=loss, capture=Capture(kinds=DATA_KINDS)):
        if how == "scaler":
            scaler.scale(loss(model(away[0]) * math.inf, away[1])).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss(model(away[0]), away[1]).backward()
        optimizer.zero_grad()
        for part in kept:
            scaler.scale(loss(model(part[0]), part[1]) / 2).backward()
        scaler.step(optimizer)
    (found,) = replayed(tmp_path / "run.zarr", analyze.GradientNoise())
    assert (found["samples"], found["coverage"]) == (16, 1)
    assert found["residual"] < 1e-12
    for what in BOARD:
        assert found[what] == pytest.approx(expected[what], rel=1e-9), what


def test_an_average_over_ranks_is_named() -> None:
    """Gradients that several ranks hold alike are averages of theirs; the board is of this rank's batch."""
    where: dict[str, Any] = {"module": "fc", "global_step": 0, "train_step": 0, "epoch": 0}
    x, d = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    rule = analyze.GradientNoise(bias=False)
    average = ModuleMessage(
        kind="weight_gradients", data=(d.T @ x) / 2, sampling={"placement": {"replicas": [0, 1, 2]}}, **where
    )
    messages = [
        ModuleMessage(kind="layer_inputs", data=x, **where),
        ModuleMessage(kind="layer_gradients", data=d, **where),
        average,
    ]
    for message in messages:
        assert not list(rule.receive(message))
    found = {one.kind: float(one.data) for one in rule.finish() if one.data is not None}
    assert (found["layer_gradients_ranks"], found["layer_gradients_samples"]) == (3, 6)
    assert found["layer_gradients_residual"] == pytest.approx(1.0)
