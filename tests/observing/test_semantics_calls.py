"""What is recorded of in-place operations, repeated calls, ties, attention, and several backwards in a step."""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracer
from tests.endings import same
from tests.observing.oracles import batches, mlp, simple, situation, unchanged, witnessed
from tests.observing.recorded import data_of, descend, find, only, problems
from tracereel.main import main


class Residual(nn.Module):
    """In-place ReLU after a convolution, ``h += x``, and writing into a part of an output."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 2, 3, padding=1)
        self.relu = nn.ReLU(inplace=in_place)
        self.second = nn.Conv1d(2, 2, 1)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        r = self.second(self.relu(self.first(x)))
        if self.in_place:
            r += x
            r[:, 0] *= 2.0
            return r
        return (r + x) * torch.tensor([2.0, 1.0]).view(1, 2, 1)


def test_in_place_relu_and_residual() -> None:
    """In-place ReLU after conv; residual ``h += x``: told is what a network without in-place operations tells."""

    def train(model: nn.Module, optimizer: Any) -> None:
        descend(optimizer, lambda x: model(x).square().sum(), batches(2, (4, 2, 5)))

    _, _, heard = situation(lambda: Residual(True), train, plain=(lambda: Residual(False), train))
    assert (data_of(heard, "activations", "first")[0] < 0).any()


def test_module_called_several_times() -> None:
    """Module called several times per step: each call has its activation and its gradient; the weight has their sum."""

    def train(model: Any, optimizer: Any) -> None:
        h = batches(1)[0]
        for _ in range(5):
            h = torch.tanh(model["cell"](h))
        h.sum().backward()
        optimizer.step()

    _, _, heard = situation(lambda: nn.ModuleDict({"cell": nn.Linear(3, 3)}), train)
    assert [one.call for one in find(heard, "activations", "cell")] == [0, 1, 2, 3, 4]
    assert [one.call for one in find(heard, "layer_gradients", "cell")] == [4, 3, 2, 1, 0]


class Recursive(nn.Module):
    """Calls itself, perhaps in a checkpoint, so that calls end in another order than they begin."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = torch.tanh(self.layer(x))
        if not depth:
            return y
        if self.checkpointed:
            inner: Tensor = checkpoint(self, y, depth - 1, use_reentrant=True)
            return inner * depth
        return self(y, depth - 1) * depth


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_module_that_calls_itself(checkpointed: bool) -> None:
    """Calls are numbered as they end, and inputs, outputs and the gradients of both have the number of their call."""

    def train(model: nn.Module, optimizer: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs")  # of the inner checkpoint's first forward
            simple(model, optimizer)

    def make(checkpointed: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Recursive(checkpointed))

    plain = lambda: make(False), train
    close = 1e-6 if checkpointed else None
    _, exporter, _ = situation(lambda: make(checkpointed), train, plain=plain, close=close, modules="*")
    assert not exporter.problems


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def test_tied_weights(tmp_path: Path) -> None:
    """Tied weights: one stream with the gradient of both uses; the other name is an alias in the model's structure.

    The trace has the weight once, and its aliases.
    """

    def train(model: nn.Module, optimizer: Any) -> None:
        model(torch.tensor([[1, 2]])).square().sum().backward()
        optimizer.step()

    path = tmp_path / "run.zarr"
    _, exporter, heard = situation(Tied, train, path=path)
    assert {one.key for one in heard.of("weights")} == {"embedding"}
    assert exporter.parts.models.structure()["tied"] == [["embedding.weight", "head.weight"]]
    with tracer.open(path) as trace:
        assert trace.header["model"]["tied"] == [["embedding.weight", "head.weight"]]
        assert [one["name"] for one in trace.header["model"]["parameters"]] == ["embedding.weight"]
        for kind in ("weights", "weight_gradients", "weight_updates"):
            assert {one.key for one in trace.messages(kind)} == {"embedding"}
    info = CliRunner().invoke(main, ["info", str(path)])
    assert re.search(r"tied +embedding\.weight = head\.weight", info.output), info.output


def test_weights_tied_and_untied_in_mid_run() -> None:
    """A head that gets a weight of its own is a stream of its own from the next step on."""

    def train(model: Any, optimizer: Any) -> None:
        for number in range(2):
            if number == 1:
                model.head.weight = nn.Parameter(model.head.weight.detach().clone())
                optimizer.add_param_group({"params": [model.head.weight]})
            optimizer.zero_grad()
            model(torch.tensor([[1, 2]])).square().sum().backward()
            optimizer.step()

    _, _, heard = situation(Tied, train)
    assert [one.global_step for one in find(heard, "weights", "embedding")] == [0, 1]
    assert [one.global_step for one in find(heard, "weights", "head")] == [1]


# -- what is recorded of attention layers, of which torch computes parts without calling modules -------------


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_multihead_attention_and_transformer_encoder(mode: str) -> None:
    """nn.MultiheadAttention / TransformerEncoder in training: values are right; the bypassed module is silent.

    So they are if the model is in evaluation mode while it learns, which is noted.
    """
    dropout = 0.1 if mode == "train" else 0.0

    def make(training: bool) -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=dropout)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)

    def train(model: nn.Module, optimizer: Any) -> None:
        descend(optimizer, lambda x: model(x).square().sum(), batches(2, (2, 3, 4)))

    _, exporter, _ = situation(lambda: make(mode == "train"), train, plain=(lambda: make(True), train))
    assert [one["what"] for one in exporter.problems] == ["the mode of the model"] * (mode == "eval")
    assert exporter.silent == [f"layers.{number}.self_attn.out_proj" for number in range(2)]


def test_multihead_attention_gives_output_and_weights() -> None:
    """nn.MultiheadAttention returns (output, weights): two leaves with a gradient each; weights are a mean of heads."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2, (2, 3, 4)):
            optimizer.zero_grad()
            output, attention = model(x, x, x)
            torch.testing.assert_close(attention.sum(-1), torch.ones(2, 3))
            alone, nothing = model(x, x, x, need_weights=False)
            assert nothing is None
            (output.square().sum() + (attention * attention.detach()).sum() + alone.sum()).backward()
            optimizer.step()

    _, exporter, heard = situation(lambda: nn.MultiheadAttention(4, 2, batch_first=True), train, modules="*")
    assert not exporter.problems
    leaves = [(one.call, one.leaf) for one in find(heard, "activations", "", global_step=1)]
    assert leaves == [(0, "0"), (0, "1"), (1, "0")]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_transformer_encoder_in_evaluation(padded: bool, named: bool) -> None:
    """In evaluation torch keeps its fast path, and what it gives has the bits that it has unwatched.

    Where a capture names the tag, hooks switch it off and inner layers are seen, which is told first; with padding,
    torch then hands nested tensors on, which have no dense values, and the trace says so.
    """
    x = batches(1, (2, 3, 8))[0]
    mask = torch.tensor([[False, False, True], [False, False, False]]) if padded else None
    outputs: list[Tensor] = []  # without a recorder, and with it

    def make() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()

    def evaluate(model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            outputs.append(model(x, src_key_padding_mask=mask))

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's of nested tensors, and ours
        settings: dict[str, Any] = {"tags": ["default", "eval"]} if named else {}
        model, exporter, heard = unchanged(make, evaluate, strict=False, **settings)
        expected, got = outputs
        again = model(x, src_key_padding_mask=mask)
    assert torch.equal(again, expected)
    assert same(only(heard, "network_output", tag="eval"), got)
    assert not heard.of("layer_gradients")
    if not named:
        assert torch.equal(got, expected)
        assert not heard.of("activations")
        assert "the inside of 'layers.1' in passes tagged 'eval': torch's fast path calls nothing inside" in problems(
            exporter
        )
        return
    torch.testing.assert_close(got, expected)
    assert exporter.problems[0]["what"] == "torch's fast path in 'layers.0'"
    if padded:
        assert not find(heard, "activations", "layers.1.linear1")
        assert "activations of 'layers.1.linear1': a nested tensor is not supported" in problems(exporter)
    else:
        inner = {place[1]: one for place, one in witnessed(make, evaluate).items() if place[0] == "activations"}
        assert {one.key for one in heard.of("activations")} == inner.keys()
        for name, value in inner.items():
            torch.testing.assert_close(only(heard, "activations", name, tag="eval"), value, rtol=1e-5, atol=1e-6)
        assert len(exporter.problems) == 2
    assert exporter.silent == [f"layers.{number}.self_attn.out_proj" for number in range(2)]


def test_attention_probabilities_inside_sdpa_are_no_activation() -> None:
    """SDPA attention: the probabilities are inside one function, so only the modules around it are told."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))

    def train(model: nn.Module, optimizer: Any) -> None:
        model(batches(1, (2, 3, 4))[0]).square().sum().backward()
        optimizer.step()

    _, _, heard = situation(Attention, train)
    q, k, v = only(heard, "activations", "qkv").chunk(3, -1)
    torch.testing.assert_close(only(heard, "layer_inputs", "out"), (q @ k.mT / 2).softmax(-1) @ v)
    assert {one.key for one in heard.of("activations")} == {"qkv", "out"}


# -- what is recorded where a step has several backwards, or one that goes through more than its own----------


def test_gradient_accumulation() -> None:
    """Gradient accumulation, 3 micro-batches: `call` is the micro-batch; the gradient is the accumulated one, once."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            for x in batches(3):
                (model(x).square().sum() / 3).backward()
            optimizer.step()

    _, _, heard = situation(mlp, train)
    places = [(step, call) for step in range(2) for call in range(3)]
    for kind in ("activations", "layer_gradients"):
        assert [(one.global_step, one.call) for one in find(heard, kind, "2")] == places
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]


def test_autograd_grad() -> None:
    """``autograd.grad``: gradients of activations are seen; without accumulation there is none of parameters."""

    def train(model: nn.Module, optimizer: Any) -> None:
        x = batches(1)[0].requires_grad_()
        torch.autograd.grad(model(x).square().sum(), [x])
        optimizer.step()

    _, _, heard = situation(mlp, train)
    assert data_of(heard, "input_gradients", "0")
    assert not heard.of("weight_gradients")
    assert float(only(heard, "weight_updates", "0").abs().max()) == 0.0


def test_double_backward() -> None:
    """Double backward (WGAN-GP): the inner one's gradient has the plain leaf, that of the loss says ``backward.1``."""

    def train(critic: nn.Module, optimizer: Any) -> None:
        real, fake = batches(2)
        optimizer.zero_grad()
        x = ((real + fake) / 2).detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), [x], create_graph=True)
        penalty = 10.0 * (slope.norm(dim=1) - 1).square().sum()
        (critic(fake).sum() - critic(real).sum() + penalty).backward()
        optimizer.step()

    _, _, heard = situation(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), train)
    w, b, v = (only(heard, *place) for place in (("weights", "0"), ("biases", "0"), ("weights", "2")))
    hidden = F.linear(sum(batches(2)) / 2, w, b).requires_grad_()
    (inner,) = torch.autograd.grad(F.linear(torch.tanh(hidden), v).sum(), [hidden], create_graph=True)
    (outer,) = torch.autograd.grad(10.0 * ((inner @ w).norm(dim=1) - 1).square().sum(), [hidden])
    torch.testing.assert_close(only(heard, "layer_gradients", "0", call=0, leaf=""), inner)
    torch.testing.assert_close(only(heard, "layer_gradients", "0", call=0, leaf="backward.1"), outer)


def test_retained_graph_keeps_the_calls_of_gradients() -> None:
    """Retained graph twice: the next micro-batch's gradient still has the call of its own activation."""

    def train(model: nn.Module, optimizer: Any) -> None:
        one, two = batches(2)
        output = model(one).square().sum()
        output.backward(retain_graph=True)
        output.backward()
        (3 * model(two)).sum().backward()
        optimizer.step()

    _, _, heard = situation(mlp, train)
    assert [(g.call, g.leaf) for g in find(heard, "layer_gradients", "2")] == [(0, ""), (0, "backward.1"), (1, "")]
    assert same(only(heard, "layer_gradients", "2", call=1), torch.full((4, 2), 3.0))


def test_backward_through_an_earlier_step() -> None:
    """A graph retained beyond its step: the messages of that step are complete, so the second gradient is a problem."""

    def train(model: nn.Module, optimizer: Any) -> None:
        first = model(batches(1)[0]).mean()
        first.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        model(batches(1)[0])
        first.backward()
        optimizer.step()

    with pytest.warns(RuntimeWarning, match="forward of an earlier step"):
        _, exporter, heard = situation(
            lambda: nn.Sequential(nn.Linear(3, 2)), train, but=lambda place: place[-1] == "backward.1"
        )
    assert [(one.global_step, one.call, one.leaf) for one in find(heard, "layer_gradients", "0")] == [(0, 0, "")]
    assert "layer_gradients of '0': a backward went through the forward of an earlier step" in problems(exporter)
    assert same(only(heard, "layer_gradients", "0"), torch.full((4, 2), 1 / 8))  # of a mean of eight numbers


class Returning(nn.Module):
    """Gives a parameter itself, as a position embedding may."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self) -> Tensor:
        return self.weight


@pytest.mark.parametrize("way", ["in turns", "retained", "together"])
def test_gradients_of_a_parameter_that_a_module_returns(way: str) -> None:
    """Each backward's are of the calls since the last one; where those are of several forwards, that is told."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Returning()

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.part()).sum()

    def train(model: nn.Module, optimizer: Any) -> None:
        first, second = torch.full((2,), 2.0), torch.full((2,), 5.0)
        if way == "in turns":
            model(first).backward()
            model(second).backward()
        elif way == "retained":
            loss = model(first)
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            losses = model(first), model(second)
            losses[0].backward()
            losses[1].backward()
        optimizer.step()

    with contextlib.nullcontext() if way != "together" else pytest.warns(RuntimeWarning, match="which forward"):
        _, exporter, heard = unchanged(Net, train)
    found = [(one.call, one.leaf, one.data.tolist()) for one in find(heard, "layer_gradients", "part")]
    again = "backward.1"
    assert (
        found
        == {
            "in turns": [(0, "", [2.0, 2.0]), (1, "", [5.0, 5.0])],
            "retained": [(0, "", [2.0, 2.0]), (0, again, [2.0, 2.0])],
            "together": [(0, "", [2.0, 2.0]), (1, "", [2.0, 2.0]), (0, again, [5.0, 5.0]), (1, again, [5.0, 5.0])],
        }[way]
    )
    assert ("which forward layer_gradients of 'part'" in problems(exporter)) == (way == "together")
