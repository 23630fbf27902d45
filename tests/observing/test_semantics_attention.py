"""What is recorded of attention layers, of which torch computes parts without calling modules."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.endings import same
from tests.observing.oracles import batches, descended, unchanged
from tests.observing.recorded import find, only, problems, sgd


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
