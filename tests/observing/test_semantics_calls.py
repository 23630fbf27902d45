"""What is recorded of in-place operations, of modules that are called several times, and of tied weights."""

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
from tests.observing.oracles import (
    GRADIENT_KINDS,
    OF_CALLS,
    batches,
    descended,
    mlp,
    of_mlp,
    simple,
    squares,
    unchanged,
)
from tests.observing.recorded import data_of, find, only, problems, sgd
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
    heard = {}
    for in_place in (False, True):

        def train(model: nn.Module, optimizer: Any) -> None:
            for x in batches(2, (4, 2, 5)):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()

        _, _, heard[in_place] = unchanged(lambda in_place=in_place: Residual(in_place), train)
    assert (data_of(heard[True], "activations", "first")[0] < 0).any()
    for step, x in enumerate(batches(2, (4, 2, 5))):
        at = {"global_step": step}
        kinds = ("weights", "biases")
        leaves = [only(heard[True], kind, one, **at).requires_grad_() for one in ("first", "second") for kind in kinds]
        first = F.conv1d(x, *leaves[:2], padding=1)
        hidden = F.relu(first)
        second = F.conv1d(hidden, *leaves[2:])
        output = (second + x) * torch.tensor([2.0, 1.0]).view(1, 2, 1)
        values = {"first": first, "relu": hidden, "second": second}
        slopes = torch.autograd.grad(output.square().sum(), [*values.values(), *leaves])
        for (module, value), slope in zip(values.items(), slopes[:3], strict=True):
            assert same(only(heard[True], "activations", module, **at), value), module
            assert same(only(heard[True], "layer_gradients", module, **at), slope), module
        places = [(module, kind) for module in ("first", "second") for kind in ("weight", "bias")]
        for (module, kind), leaf, slope in zip(places, leaves, slopes[3:], strict=True):
            assert same(only(heard[True], f"{kind}_gradients", module, **at), slope), (module, kind)
            moved = leaf.detach().add(slope, alpha=-0.1) - leaf.detach()
            assert same(only(heard[True], f"{kind}_updates", module, **at), moved), (module, kind)
    for kind in ("activations", "layer_inputs", *GRADIENT_KINDS, "weights", "weight_gradients", "weight_updates"):
        for module in ("first", "relu", "second"):
            got, expected = (data_of(heard[form], kind, module) for form in (True, False))
            assert len(got) == len(expected)
            assert all(same(*pair) for pair in zip(got, expected, strict=True)), (kind, module)


def test_module_called_several_times() -> None:
    """Module called several times per step: each call has its activation and its gradient; the weight has their sum."""

    def train(model: Any, optimizer: Any) -> None:
        h = batches(1)[0]
        for _ in range(5):
            h = torch.tanh(model["cell"](h))
        h.sum().backward()
        optimizer.step()

    model, _, heard = unchanged(lambda: nn.ModuleDict({"cell": nn.Linear(3, 3)}), train)
    w, b = (only(heard, kind, "cell").requires_grad_() for kind in ("weights", "biases"))
    h, hidden = batches(1)[0], []
    for _ in range(5):
        hidden.append(F.linear(h, w, b))
        h = torch.tanh(hidden[-1])
    *gradients, summed = torch.autograd.grad(h.sum(), [*hidden, w])
    assert [one.call for one in find(heard, "activations", "cell")] == [0, 1, 2, 3, 4]
    assert [one.call for one in find(heard, "layer_gradients", "cell")] == [4, 3, 2, 1, 0]
    for call in range(5):
        assert same(only(heard, "activations", "cell", call=call), hidden[call])
        assert same(only(heard, "layer_gradients", "cell", call=call), gradients[call])
    torch.testing.assert_close(only(heard, "weight_gradients", "cell"), summed)
    assert same(only(heard, "weight_gradients", "cell"), model.get_submodule("cell").weight.grad)
    descended(heard)


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

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Recursive(checkpointed))

    _, exporter, heard = unchanged(make, train, modules="*")
    assert not exporter.problems
    descended(heard)
    for step, x in enumerate(batches(2)):
        places = (("weights", "0"), ("biases", "0"), ("weights", "1.layer"))
        w, b, v = (only(heard, *place, global_step=step).requires_grad_() for place in places)
        inputs = [F.linear(x, w, b)]
        for _ in range(2):
            inputs.append(torch.tanh(F.linear(inputs[-1], v)))
        innermost = torch.tanh(F.linear(inputs[-1], v))
        outputs = [innermost, middle := innermost * 1, middle * 2]
        gradients = torch.autograd.grad(outputs[2].square().sum(), [*reversed(inputs), *outputs, w, b, v])
        own = (("weight_gradients", "0"), ("bias_gradients", "0"), ("weight_gradients", "1.layer"))
        for place, gradient in zip(own, gradients[6:], strict=True):
            torch.testing.assert_close(only(heard, *place, global_step=step), gradient)
        for call in range(3):
            at = {"global_step": step, "call": call}
            assert same(only(heard, "layer_inputs", "1", **at), inputs[2 - call])
            assert same(only(heard, "activations", "1", **at), outputs[call])
            torch.testing.assert_close(only(heard, "input_gradients", "1", **at), gradients[call])
            torch.testing.assert_close(only(heard, "layer_gradients", "1", **at), gradients[3 + call])


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_tied_weights(suffix: str, tmp_path: Path) -> None:
    """Tied weights: one stream with the gradient of both uses; the other name is an alias in the model's structure.

    The trace has the weight once, and its aliases.
    """

    def train(model: nn.Module, optimizer: Any) -> None:
        model(torch.tensor([[1, 2]])).square().sum().backward()
        optimizer.step()

    _, exporter, heard = unchanged(Tied, train, path=tmp_path / f"run.{suffix}")
    w = only(heard, "weights", "embedding").requires_grad_()
    hidden = F.embedding(torch.tensor([[1, 2]]), w)
    output = F.linear(hidden, w)
    gradient, *inner = torch.autograd.grad(output.square().sum(), [w, hidden, output])
    assert same(only(heard, "weight_gradients", "embedding"), gradient)
    for module, value, expected in zip(("embedding", "head"), (hidden, output), inner, strict=True):
        assert same(only(heard, "activations", module), value)
        assert same(only(heard, "layer_gradients", module), expected)
    assert same(only(heard, "weight_updates", "embedding"), w.add(gradient, alpha=-0.1) - w)
    assert {one.key for one in heard.of("weights")} == {"embedding"}
    assert exporter.parts.models.structure()["tied"] == [["embedding.weight", "head.weight"]]
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        assert trace.header["model"]["tied"] == [["embedding.weight", "head.weight"]]
        assert [one["name"] for one in trace.header["model"]["parameters"]] == ["embedding.weight"]
        for kind in ("weights", "weight_gradients", "weight_updates"):
            assert {one.key for one in trace.messages(kind)} == {"embedding"}
    info = CliRunner().invoke(main, ["info", str(tmp_path / f"run.{suffix}")])
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

    _, _, heard = unchanged(Tied, train)
    assert [one.global_step for one in find(heard, "weights", "embedding")] == [0, 1]
    assert [one.global_step for one in find(heard, "weights", "head")] == [1]
    descended(heard)
    for step in range(2):
        w = only(heard, "weights", "embedding", global_step=step).requires_grad_()
        v = only(heard, "weights", "head", global_step=step).requires_grad_() if step else w
        hidden = F.embedding(torch.tensor([[1, 2]]), w)
        output = F.linear(hidden, v)
        gradients = torch.autograd.grad(output.square().sum(), [w, v, hidden, output])
        for place, name in enumerate(("embedding", "head")):
            assert same(only(heard, "activations", name, global_step=step), (hidden, output)[place])
            assert same(only(heard, "layer_gradients", name, global_step=step), gradients[2 + place])
            if step or name == "embedding":
                assert same(only(heard, "weight_gradients", name, global_step=step), gradients[place])


# -- what is recorded of attention layers, of which torch computes parts without calling modules -------------


def attend(model: nn.MultiheadAttention, x: Tensor, weights: bool) -> tuple[Tensor, Tensor | None]:
    """Self-attention, by the function that torch has for it."""
    x = x.transpose(0, 1)
    output, attention = F.multi_head_attention_forward(
        *(x, x, x, model.embed_dim, model.num_heads, model.in_proj_weight, model.in_proj_bias, None, None, False),
        *(model.dropout, model.out_proj.weight, model.out_proj.bias, model.training),
        need_weights=weights,
    )
    return output.transpose(0, 1), attention


def encode(model: Any, x: Tensor) -> dict[str, Tensor]:
    """The output of each layer of a `nn.TransformerEncoder`, in order and by functions, without calling a module."""
    found = {}
    for number, layer in enumerate(model.layers):
        p = layer.dropout.p if layer.training else 0.0
        here = {"self_attn": attend(layer.self_attn, x, False)[0]}
        here["dropout1"] = F.dropout(here["self_attn"], p)
        here["norm1"] = F.layer_norm(x + here["dropout1"], x.shape[-1:], layer.norm1.weight, layer.norm1.bias)
        here["linear1"] = F.linear(here["norm1"], layer.linear1.weight, layer.linear1.bias)
        here["dropout"] = F.dropout(F.relu(here["linear1"]), p)
        here["linear2"] = F.linear(here["dropout"], layer.linear2.weight, layer.linear2.bias)
        here["dropout2"] = F.dropout(here["linear2"], p)
        x = here["norm2"] = F.layer_norm(
            here["norm1"] + here["dropout2"], x.shape[-1:], layer.norm2.weight, layer.norm2.bias
        )
        found |= {f"layers.{number}.{name}": value for name, value in here.items()}
    return found


def encoder(dropout: float = 0.1) -> nn.TransformerEncoder:
    """Two layers of four features."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=dropout)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_multihead_attention_and_transformer_encoder(mode: str) -> None:
    """nn.MultiheadAttention / TransformerEncoder in training: values are right; the bypassed module is silent.

    So they are if the model is in evaluation mode while it learns, which is noted.
    """
    inputs = batches(2, (2, 3, 4))

    def make() -> nn.Module:
        return encoder().train(mode == "train")

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    _, exporter, heard = unchanged(make, train)
    assert [one["what"] for one in exporter.problems] == ["the mode of the model"] * (mode == "eval")
    assert exporter.silent == [f"layers.{number}.self_attn.out_proj" for number in range(2)]
    torch.manual_seed(5)
    reference = make()
    optimizer = sgd(reference)
    for step, x in enumerate(inputs):
        outputs = encode(reference, x)
        names = [name for name, _ in reference.named_parameters()]
        loss = outputs["layers.1.norm2"].square().sum()
        gradients = torch.autograd.grad(loss, [*outputs.values(), *reference.parameters()])
        at = {"global_step": step, "tag": "default"}
        assert {one.key for one in heard.of("activations")} == outputs.keys()
        for (name, output), gradient in zip(outputs.items(), gradients, strict=False):
            assert same(only(heard, "activations", name, **at), output), name
            assert same(only(heard, "layer_gradients", name, **at), gradient), name
        for name, parameter, gradient in zip(names, reference.parameters(), gradients[len(outputs) :], strict=True):
            module, _, last = name.rpartition(".")
            kind = "bias" if "bias" in last else "weight"
            key = module if last in ("weight", "bias") else name
            assert same(only(heard, f"{kind}_gradients", key, global_step=step), gradient), name
            moved = parameter.detach().add(gradient, alpha=-0.1) - parameter.detach()
            assert same(only(heard, f"{kind}_updates", key, global_step=step), moved), name
            parameter.grad = gradient
        optimizer.step()


def test_multihead_attention_gives_output_and_weights() -> None:
    """nn.MultiheadAttention returns (output, weights): two leaves with a gradient each; weights are a mean of heads."""
    inputs = batches(2, (2, 3, 4))

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in inputs:
            optimizer.zero_grad()
            output, attention = model(x, x, x)
            alone, nothing = model(x, x, x, need_weights=False)
            assert nothing is None
            (output.square().sum() + (attention * attention.detach()).sum() + alone.sum()).backward()
            optimizer.step()

    _, exporter, heard = unchanged(lambda: nn.MultiheadAttention(4, 2, batch_first=True), train, modules="*")
    assert not exporter.problems
    descended(heard)
    torch.manual_seed(5)
    reference = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = sgd(reference)
    for step, x in enumerate(inputs):
        (output, attention), (alone, _) = (attend(reference, x, weights) for weights in (True, False))
        assert attention is not None
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 3))
        loss = output.square().sum() + (attention * attention.detach()).sum() + alone.sum()
        leaves = {(0, "0"): output, (0, "1"): attention, (1, "0"): alone}
        gradients = torch.autograd.grad(loss, [*leaves.values(), *reference.parameters()])
        for ((call, leaf), value), gradient in zip(leaves.items(), gradients, strict=False):
            at = {"global_step": step, "call": call, "leaf": leaf}
            assert same(only(heard, "activations", "", **at), value)
            assert same(only(heard, "layer_gradients", "", **at), gradient)
        for parameter, gradient in zip(reference.parameters(), gradients[3:], strict=True):
            parameter.grad = gradient
        for kind, name, gradient in (
            ("weight_gradients", "in_proj_weight", gradients[3]),
            ("bias_gradients", "in_proj_bias", gradients[4]),
            ("weight_gradients", "out_proj", gradients[5]),
            ("bias_gradients", "out_proj", gradients[6]),
        ):
            torch.testing.assert_close(only(heard, kind, name, global_step=step), gradient)
        optimizer.step()


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
        inner = encode(model, x)
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

    _, _, heard = unchanged(Attention, train)
    weights = {one: [only(heard, kind, one) for kind in ("weights", "biases")] for one in ("qkv", "out")}
    leaves = [leaf.requires_grad_() for both in weights.values() for leaf in both]
    first = F.linear(batches(1, (2, 3, 4))[0], *weights["qkv"])
    inside = F.scaled_dot_product_attention(*first.chunk(3, -1))
    q, k, v = first.chunk(3, -1)
    torch.testing.assert_close(inside, (q @ k.mT / 2).softmax(-1) @ v)
    last = F.linear(inside, *weights["out"])
    gradients = torch.autograd.grad(last.square().sum(), [first, inside, last, *leaves])
    for number, gradient in enumerate(gradients[3:]):
        kind, module = ("weight_gradients", "bias_gradients")[number % 2], ("qkv", "out")[number // 2]
        torch.testing.assert_close(only(heard, kind, module), gradient)
    descended(heard)
    assert same(only(heard, "layer_inputs", "out"), inside)
    assert same(only(heard, "input_gradients", "out"), gradients[1])
    for module, output, gradient in (("qkv", first, gradients[0]), ("out", last, gradients[2])):
        assert same(only(heard, "activations", module), output)
        assert same(only(heard, "layer_gradients", module), gradient)
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

    _, _, heard = unchanged(mlp, train)
    places = [(step, call) for step in range(2) for call in range(3)]
    for kind in ("activations", *GRADIENT_KINDS[:1]):
        assert [(one.global_step, one.call) for one in find(heard, kind, "2")] == places
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    for step in range(2):
        summed: dict[tuple[str, str], Tensor] = {}
        for call, x in enumerate(batches(3)):
            for (kind, module), value in of_mlp(heard, x, step, lambda output: squares(output) / 3).items():
                if kind in OF_CALLS:
                    got = only(heard, kind, module, global_step=step, call=call)
                    assert same(got, value), (kind, module, step, call)
                else:
                    summed[kind, module] = summed[kind, module] + value if call else value
        for (kind, module), value in summed.items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)
            own = ("weights", "weight_updates") if kind == "weight_gradients" else ("biases", "bias_updates")
            before, moved = (only(heard, one, module, global_step=step) for one in own)
            assert same(moved, before.add(value, alpha=-0.1) - before), (kind, module, step)


def test_autograd_grad() -> None:
    """``autograd.grad``: gradients of activations are seen; without accumulation there is none of parameters."""

    def train(model: nn.Module, optimizer: Any) -> None:
        x = batches(1)[0].requires_grad_()
        torch.autograd.grad(model(x).square().sum(), [x])
        optimizer.step()

    _, _, heard = unchanged(mlp, train)
    w, b, v, c = (only(heard, kind, one) for one in "02" for kind in ("weights", "biases"))
    x = batches(1)[0].requires_grad_()
    hidden = F.linear(x, w, b)
    output = F.linear(torch.tanh(hidden), v, c)
    expected = torch.autograd.grad(output.square().sum(), [x, hidden, output])
    assert same(only(heard, "input_gradients", "0"), expected[0])
    assert same(only(heard, "layer_gradients", "0"), expected[1])
    assert same(only(heard, "layer_gradients", "2"), expected[2])
    for module, value in zip("012", (hidden, torch.tanh(hidden), output), strict=True):
        assert same(only(heard, "activations", module), value)
    assert not heard.of("weight_gradients")
    assert float(only(heard, "weight_updates", "0").abs().max()) == 0.0


def penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The loss of a WGAN with gradient penalty."""
    x = ((real + fake) / 2).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), [x], create_graph=True)
    return critic(fake).sum() - critic(real).sum() + 10.0 * (slope.norm(dim=1) - 1).square().sum()


def test_double_backward() -> None:
    """Double backward (WGAN-GP): the inner one's gradient has the plain leaf, that of the loss says ``backward.1``."""

    def train(model: nn.Module, optimizer: Any) -> None:
        one, two = batches(2)
        optimizer.zero_grad()
        penalty(model, one, two).backward()
        optimizer.step()

    _, _, heard = unchanged(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), train)
    w, b, v = (only(heard, *place) for place in (("weights", "0"), ("biases", "0"), ("weights", "2")))
    one, two = batches(2)
    hidden = F.linear((one + two) / 2, w, b).requires_grad_()
    out = F.linear(torch.tanh(hidden), v, only(heard, "biases", "2")).requires_grad_()
    (inner,) = torch.autograd.grad(out.sum(), [hidden], create_graph=True)
    (outer,) = torch.autograd.grad(10.0 * ((inner @ w).norm(dim=1) - 1).square().sum(), [hidden])
    torch.testing.assert_close(only(heard, "layer_gradients", "0", call=0, leaf=""), inner)
    torch.testing.assert_close(only(heard, "layer_gradients", "0", call=0, leaf="backward.1"), outer)
    penalised = [torch.tanh(hidden), out]
    leaves = [only(heard, *place).requires_grad_() for place in (("weights", "0"), ("biases", "0"))]
    leaves += [only(heard, *place).requires_grad_() for place in (("weights", "2"), ("biases", "2"))]

    def critic(x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, *leaves[:2])), *leaves[2:])

    x = ((one + two) / 2).requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), [x], create_graph=True)
    loss = critic(two).sum() - critic(one).sum() + 10.0 * (slope.norm(dim=1) - 1).square().sum()
    for number, gradient in enumerate(torch.autograd.grad(loss, leaves)):
        got = only(heard, ("weight_gradients", "bias_gradients")[number % 2], "02"[number // 2])
        torch.testing.assert_close(got, gradient)
    for module, value in zip("012", (hidden, *penalised), strict=True):
        assert same(only(heard, "activations", module, call=0), value)
    descended(heard)
    identities = [(one.kind, one.key, one.leaf, one.call, one.global_step) for one in heard]
    assert len(set(identities)) == len(identities)


def test_retained_graph_keeps_the_calls_of_gradients() -> None:
    """Retained graph twice: the next micro-batch's gradient still has the call of its own activation."""

    def train(model: nn.Module, optimizer: Any) -> None:
        one, two = batches(2)
        output = model(one).square().sum()
        output.backward(retain_graph=True)
        output.backward()
        (3 * model(two)).sum().backward()
        optimizer.step()

    _, _, heard = unchanged(mlp, train)
    assert [(g.call, g.leaf) for g in find(heard, "layer_gradients", "2")] == [(0, ""), (0, "backward.1"), (1, "")]
    assert same(only(heard, "layer_gradients", "2", call=1), torch.full((4, 2), 3.0))
    one, two = batches(2)
    first, second = of_mlp(heard, one, 0), of_mlp(heard, two, 0, lambda output: (3 * output).sum())
    for kind, module in first:
        if kind in ("layer_inputs", "activations"):
            assert same(only(heard, kind, module, call=0), first[kind, module])
            assert same(only(heard, kind, module, call=1), second[kind, module])
        elif kind in GRADIENT_KINDS:
            for leaf in ("", "backward.1"):
                assert same(only(heard, kind, module, call=0, leaf=leaf), first[kind, module])
            assert same(only(heard, kind, module, call=1), second[kind, module])
        else:
            summed = first[kind, module] + first[kind, module] + second[kind, module]
            assert same(only(heard, kind, module), summed)
    descended(heard)


def test_backward_through_an_earlier_step() -> None:
    """A graph retained beyond its step: the messages of that step are complete, so the second gradient is a problem."""

    def train(model: nn.Module, optimizer: Any) -> None:
        first = model(batches(1)[0]).mean()
        first.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        model(batches(1)[0])
        with torch.no_grad():
            weights = [p.clone() for p in model.parameters()]
        first.backward()
        assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))
        optimizer.step()

    with pytest.warns(RuntimeWarning, match="forward of an earlier step"):
        _, exporter, heard = unchanged(lambda: nn.Sequential(nn.Linear(3, 2)), train)
    assert [(one.global_step, one.call) for one in find(heard, "layer_gradients", "0")] == [(0, 0)]
    assert "layer_gradients of '0': a backward went through the forward of an earlier step" in problems(exporter)
    descended(heard)
    slope = torch.full((4, 2), 1 / 8)  # of a mean of eight numbers
    assert same(only(heard, "layer_gradients", "0"), slope)
    for step in range(2):
        at = {"global_step": step}
        weight, bias = (only(heard, kind, "0", **at) for kind in ("weights", "biases"))
        assert same(only(heard, "activations", "0", **at), F.linear(batches(1)[0], weight, bias))
        assert same(only(heard, "weight_gradients", "0", **at), slope.T @ batches(1)[0])
        assert same(only(heard, "bias_gradients", "0", **at), slope.sum(0))


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
