"""Ten architectures of ``transformers``, from tiny configurations: recorded, and trained as if they were not."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls deprecated parts of others when it is imported
    hf = pytest.importorskip("transformers", reason="needs transformers: pip install 'tracereel[transformers]'")

# its advice is no concern of ours; our own warnings are errors
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error::RuntimeWarning")]

STEPS = 3
Batch = dict[str, Tensor]
Made = tuple[nn.Module, Callable[[torch.Generator], Batch]]


def words(labels: bool = True, **more: Any) -> Callable[[torch.Generator], Batch]:
    """Batches of three sequences of seven tokens, which are also the labels."""

    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(3, 40, (3, 7), generator=generator)
        return {"input_ids": tokens, "labels": tokens if labels else tokens[:, 0] % 2, **more}

    return batch


def images(generator: torch.Generator) -> Batch:
    """Batches of four pictures with one of three labels."""
    return {
        "pixel_values": torch.randn(4, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 3, (4,), generator=generator),
    }


def sounds(generator: torch.Generator) -> Batch:
    """Batches of two sounds, with what is spoken."""
    return {
        "input_values": torch.randn(2, 400, generator=generator),
        "labels": torch.randint(1, 12, (2, 3), generator=generator),
    }


TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2() -> Made:
    """GPT-2."""
    config = hf.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2, **TOKENS)
    return hf.GPT2LMHeadModel(config), words()


def bert() -> Made:
    """BERT, with a classifier."""
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT, **TOKENS)), words(labels=False)


def llama() -> Made:
    """Llama, with grouped queries."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **TOKENS, num_key_value_heads=1)), words()


def mixtral() -> Made:
    """Mixtral, with three experts."""
    experts = {"num_key_value_heads": 1, "num_local_experts": 3, "output_router_logits": True}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, **TOKENS, **experts)), words()


def albert() -> Made:
    """ALBERT, whose layers are one layer."""
    return hf.AlbertForMaskedLM(hf.AlbertConfig(**TEXT, **TOKENS, embedding_size=8)), words()


def t5() -> Made:
    """T5, an encoder and a decoder."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=40, **sizes, decoder_start_token_id=0)), words()


def mamba() -> Made:
    """Mamba, without attention."""
    config = hf.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4, **TOKENS)
    return hf.MambaForCausalLM(config), words()


def resnet() -> Made:
    """ResNet, with batch normalisation."""
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3)
    return hf.ResNetForImageClassification(config), images


def vit() -> Made:
    """ViT."""
    config = hf.ViTConfig(**{**TEXT, "image_size": 16, "patch_size": 8, "num_labels": 3})
    return hf.ViTForImageClassification(config), images


def wav2vec2() -> Made:
    """Wav2Vec2, with a CTC loss and a parametrized convolution; no layer is dropped at random."""
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = hf.Wav2Vec2Config(
        **{
            **TEXT,
            **TOKENS,
            **convolutions,
            **positions,
            "num_feat_extract_layers": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
        }
    )
    return hf.Wav2Vec2ForCTC(config), sounds


MODELS = [gpt2, bert, llama, mixtral, albert, t5, mamba, resnet, vit, wav2vec2]


class Watch:
    """What the layers of a model give, by hooks of the test's own."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: list[tuple[str, Tensor]] = []
        self.silent: list[str] = []
        for name, one in model.named_modules():
            if ".parametrizations." in name:  # which computes a weight
                continue
            if not list(one.children()) or list(one.parameters(recurse=False)):
                self.silent.append(name)
                one.register_forward_hook(lambda _, __, output, name=name: self.see(name, output))

    def see(self, name: str, output: Any) -> None:
        if name in self.silent:
            self.silent.remove(name)
        if isinstance(output, Tensor):
            self.outputs.append((name, output.detach().clone()))


def batches(make: Callable[[torch.Generator], Batch]) -> Iterator[Batch]:
    """The same in every training."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield make(generator)


def train(model: nn.Module, called: Any, optimizer: Any, make: Any) -> list[dict[str, Tensor]]:
    """Three steps; the gradients of each."""
    gradients = []
    torch.manual_seed(7)
    for batch in batches(make):
        optimizer.zero_grad()
        called(**batch).loss.backward()
        found = [(name, one.grad) for name, one in model.named_parameters()]
        gradients.append({name: one.clone() for name, one in found if one is not None})
        optimizer.step()
    return gradients


def hooks_of(model: nn.Module) -> dict[str, int]:
    """How many forward hooks there are, by module; some models have their own."""
    return {name: len(one._forward_hooks) + len(one._forward_pre_hooks) for name, one in model.named_modules()}


def compare(
    architecture: Callable[[], Made], folder: Path, backend: str | None, capture: Any = None
) -> list[tracer.Message]:
    """Train alone and recorded, and compare everything but the activations; returns what was recorded."""
    ends, gradients, hooks = [], [], []
    for recorded in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model, make = architecture()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        called = model if backend is None else torch.compile(model, backend=backend)
        recording: Any = contextlib.nullcontext()
        if recorded:
            recording = tracer.record(folder / "run.zarr", model, optimizer, capture=capture or tracer.Capture())
        with recording, warnings.catch_warnings():
            # a compiled graph has no gradient of an output that is its own input, as an identity's is: that is told
            warnings.filterwarnings("ignore", ".*inside torch.compile cannot be watched", RuntimeWarning)
            gradients.append(train(model, called, optimizer, make))
        hooks.append(hooks_of(model))
        ends.append({**model.state_dict(), "generator": torch.get_rng_state()})
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
    assert hooks[0] == hooks[1]
    with tracer.open(folder / "run.zarr") as trace:
        assert trace.status == "finished"
        messages = list(trace.messages())
    everything = {name for name, _ in model.named_parameters()}
    # a weight that parametrizations compute has a gradient, too, and is no parameter
    computed = {path for path, one in model.named_modules() if "parametrizations" in one._modules}
    for step, (alone, watched) in enumerate(zip(*gradients, strict=True)):
        told = [
            one for one in messages if one.global_step == step and one.kind in ("weight_gradients", "bias_gradients")
        ]
        found = {name_of(model, one): one.data for one in told}
        assert everything == set(alone) == set(found) - computed
        assert [name for name in alone if not torch.equal(found[name], alone[name])] == []
        assert [name for name in alone if not torch.equal(watched[name], alone[name])] == []
    return messages


def name_of(model: nn.Module, message: Any) -> str:
    """The name of the parameter that a message is of: a `weight` or `bias` goes by its module's."""
    own = f"{message.key}.{'bias' if message.kind.startswith('bias') else 'weight'}".lstrip(".")
    return own if own in dict(model.named_parameters()) else str(message.key)


@pytest.mark.parametrize("architecture", MODELS, ids=lambda one: one.__name__)
def test_architectures(architecture: Callable[[], Made], tmp_path: Path) -> None:
    """Three steps end with the same bits; every parameter's gradient, and what every layer gives, is recorded."""
    messages = compare(architecture, tmp_path, None)
    torch.manual_seed(1)
    model, make = architecture()
    watch = Watch(model.train())
    train(model, model, torch.optim.AdamW(model.parameters(), 1e-3), make)
    with tracer.open(tmp_path / "run.zarr") as trace:
        notes = [note for note in trace.notes if "epochs" not in note]  # that none was seen to end
        assert [note for note in notes if "silent" not in note] == []
        assert [name for note in notes for name in note["silent"]] == watch.silent
    layers = {name for name, _ in watch.outputs}
    found = [one for one in messages if one.kind == "activations" and one.key in layers]
    assert [one.key for one in found] == [name for name, _ in watch.outputs]
    different = [name for one, (name, output) in zip(found, watch.outputs, strict=True) if differ(one.data, output)]
    assert different == []
    gradients = [one for one in messages if one.kind == "layer_gradients"]
    assert len(gradients) > len(found) / 2


def differ(one: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors differ in any bit."""
    return one is None or one.dtype != other.dtype or not torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("architecture", MODELS, ids=lambda one: one.__name__)
def test_compiled_architectures(architecture: Callable[[], Made], backend: str, tmp_path: Path, dynamo: None) -> None:
    """The same of what ``torch.compile`` traces, compared with the compiled training that is not recorded."""
    messages = compare(architecture, tmp_path, backend)
    assert [one for one in messages if one.kind == "activations"]
    assert [one for one in messages if one.kind == "layer_gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS, ids=lambda one: one.__name__)
def test_architectures_by_inductor(architecture: Callable[[], Made], tmp_path: Path, dynamo: None) -> None:
    """The same of what it makes machine code of.

    Of T5 without the outputs of embeddings: inductor fuses them into the sums of the layer norms that follow, and adds
    in another order where they have to exist because they are recorded.
    """
    if architecture is not t5:
        compare(architecture, tmp_path, "inductor")
        return
    parameters = [f"{one}{what}" for one in ("weight", "bias") for what in ("_gradients", "_updates")]
    leaves = {type(one) for one in t5()[0].modules() if not list(one.children())}
    others = tracer.Capture(types=tuple(leaves - {nn.Embedding}))
    captures = tracer.Capture(kinds=["weights", "biases", *parameters]), others
    messages = compare(architecture, tmp_path, "inductor", captures)
    assert [one for one in messages if one.kind == "activations"]
    assert [one for one in messages if one.kind == "layer_gradients"]


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Forget what was compiled, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
