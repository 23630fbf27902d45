"""Torch's fast path of encoder layers: evaluations take it while they are watched as they do unwatched."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from tests.observing.recorded import attached
from tracer import Capture, Collect, Exporter
from tracer.messaging.messages import DATA_KINDS


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Torch warns of nested tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def layer(**settings: Any) -> nn.TransformerEncoderLayer:
    """Eight features, two heads."""
    return nn.TransformerEncoderLayer(8, settings.pop("heads", 2), 16, **{"batch_first": True, **settings})


class Frozen(nn.Module):
    """An encoder that stays in eval mode and learns nothing, before a layer that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = layer().requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def train(self, mode: bool = True) -> Frozen:
        """The encoder is never in training mode."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.head(self.encoder(x, src_key_padding_mask=src_key_padding_mask))
        return result


MODELS = {
    "layer": layer,
    "encoder": lambda: nn.TransformerEncoder(layer(), 2),
    "attention": lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
    "an odd number of heads": lambda: nn.TransformerEncoder(layer(heads=1), 2),
    "batches second": lambda: nn.TransformerEncoder(layer(batch_first=False), 2),
    "norms that differ": lambda: differing(layer()),
    "frozen": Frozen,
}


def differing(one: nn.TransformerEncoderLayer) -> nn.TransformerEncoderLayer:
    """A layer that torch computes module by module although all that is easily told speaks for the fast path."""
    one.norm1.eps = 1e-3
    return one


def trained(name: str, exporter: Exporter | None, *, padded: bool, fails: bool) -> list[Any]:
    """Steps and evaluations; what a user's global hooks saw, the outputs, and what is left of the parameters."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    if exporter is not None:
        exporter.set_model(model)
        exporter.set_optimizer(optimizer)
    seen: list[Any] = []

    def see(one: nn.Module, _: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        seen.append((type(one).__name__, output.to_padded_tensor(0).tolist() if output.is_nested else output.tolist()))

    handle = modules.register_module_forward_hook(see)
    generator = torch.Generator().manual_seed(1)
    mask = torch.tensor([[False, False, True], [False, False, False]]) if padded else None
    try:
        for _ in range(3):
            x = torch.randn(2, 3, 8, generator=generator)
            kwargs = {} if name == "batches second" else {"src_key_padding_mask": mask}
            model.train()
            optimizer.zero_grad()
            model(x, **kwargs).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                seen.append(model(x, **kwargs).tolist())
                if fails:
                    with pytest.raises((RuntimeError, AssertionError)):
                        model(x[..., :5], **kwargs)
            seen.append(model(x, **kwargs).tolist())
    finally:
        handle.remove()
    if exporter is not None:
        exporter.finish()
        exporter.detach()
    for place in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called"):
        assert not getattr(modules, place)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    return [*seen, *(one.tolist() for one in model.parameters())]


@pytest.mark.parametrize("fails", [False, True], ids=["", "and one forward that fails"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_watching_changes_no_evaluation(name: str, padded: bool, fails: bool) -> None:
    """Outputs, what global hooks of the user's see, and the training are those of nobody watching, to the bit."""
    exporter, heard = Exporter(capture=Capture(kinds=DATA_KINDS), strict=True), Collect("*")
    exporter.message_bus.register(heard)
    watched = trained(name, exporter, padded=padded, fails=fails)
    assert watched == trained(name, None, padded=padded, fails=fails)
    assert exporter.global_step == 3
    for kind in ("activations", "layer_inputs", "network_output"):
        steps = {message.global_step for message in heard.of(kind) if message.tag == "default"}
        assert steps == {0, 1, 2}, kind
    for number in range(3):
        assert any(m.tag == "eval" for m in heard.of("network_output") if m.global_step == number + 1)


def test_a_layer_is_observed_as_one() -> None:
    """A capture that takes the layer itself gets what it gives in evaluations, and training passes have all inside."""
    model = nn.TransformerEncoder(layer(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = Capture(kinds=["activations", "layer_inputs"], modules=["layers.*"])
    exporter, heard = attached(Exporter(capture=capture, strict=True), Collect("*"), model, optimizer)
    x = torch.randn(2, 3, 8)
    model(x).square().mean().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        first = model.layers[0](x)
        output = model(x)
    found = [(m.kind, m.key, m.data) for m in heard if m.tag == "eval"]
    exporter.detach()
    expected = [(kind, key) for key in ("layers.0", "layers.1") for kind in ("layer_inputs", "activations")]
    assert [(kind, key) for kind, key, _ in found[-4:]] == expected
    for (_, _, data), value in zip(found[-4:], (x, first, first, output), strict=True):
        assert data is not None
        assert torch.equal(data, value)
    assert {m.key for m in heard if m.tag == "default"} >= {"layers.0.linear1", "layers.1.norm2", "layers.0"}


def test_a_layer_that_goes_the_other_way_is_seen_inside() -> None:
    """Where torch does not take the fast path after all, nothing inside is missed."""
    model = differing(layer())
    exporter, heard = attached(
        Exporter(capture=Capture(kinds=["activations", "layer_inputs"]), strict=True), Collect("*"), model
    )
    x = torch.randn(2, 3, 8)
    model.eval()
    with torch.no_grad():
        model(x)
    inside = [name for name, one in model.named_modules() if name and name != "self_attn.out_proj"]
    for kind in ("activations", "layer_inputs"):
        assert {m.key for m in heard.of(kind)} == {*inside}
    exporter.detach()


def test_an_interrupted_forward_leaves_hooks_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in the fast path the next forward is seen, and nothing is left behind."""
    model = nn.TransformerEncoder(layer(), 1).eval()
    exporter, heard = attached(Exporter(capture=Capture(kinds=DATA_KINDS), strict=True), Collect("*"), model)
    x = torch.randn(2, 3, 8)

    def interrupted(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    with torch.no_grad(), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "_transformer_encoder_layer_fwd", interrupted)
        model(x)
    model.train()
    model(x).sum().backward()
    exporter.finish()
    assert {m.key for m in heard.of("activations") if m.tag == "default"} >= {"layers.0.linear1", "layers.0.norm2"}
    exporter.detach()
    assert not modules._global_forward_hooks
    assert not modules._global_forward_pre_hooks
