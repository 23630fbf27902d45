"""What an exporter tells of unusual models and tensors: sparse, narrow, lazy, without values, or views of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tracer
from tests.observing.recorded import data_of, find, mlp, train, watch
from tracer import Capture, Collect
from tracer.memory import SMALLEST, Memory
from tracer.messaging.messages import DATA_KINDS
from tracer.observing.pytorch.tensors import copied


def test_a_sparse_gradient_is_told_dense() -> None:
    """The sparse gradient of an embedding comes as the dense tensor it stands for."""
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    model(torch.tensor([1, 1, 4])).sum().backward()
    expected = model[0].weight.grad.to_dense()
    optimizer.step()
    exporter.detach()
    (gradient,) = data_of(heard, "weight_gradients", "0")
    assert torch.equal(gradient, expected)
    assert gradient.layout is torch.strided


def test_attention_is_watched_as_far_as_it_can_be(tmp_path: Path) -> None:
    """A transformer layer trains on; in_proj_weight is a stream; modules that torch bypasses are reported as silent."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=Capture(kinds=DATA_KINDS), strict=True):
        for _ in range(2):
            model(torch.randn(2, 3, 4)).sum().backward()
            optimizer.step()
        model.eval()
        model(torch.randn(2, 3, 4))
    with tracer.open(tmp_path / "run.zarr") as trace:
        streams = {(one.kind, one.module) for one in trace.streams}
        assert ("weights", "layers.0.self_attn.in_proj_weight") in streams
        assert ("biases", "layers.0.self_attn.in_proj_bias") in streams
        assert ("weights", "layers.0.self_attn.out_proj") in streams
        assert ("activations", "layers.0.self_attn") in streams
        assert ("activations", "layers.0.self_attn.out_proj") not in streams
        silent = [note["silent"] for note in trace.notes if "silent" in note]
        assert silent == [["layers.0.self_attn.out_proj"]]


@pytest.mark.parametrize("form", ["weight_norm", "spectral_norm"])
def test_parametrizations_do_not_disturb(form: str) -> None:
    """A parametrized layer trains on; its original parameters are streams, its pseudo-modules are none."""
    model = mlp()
    getattr(nn.utils.parametrizations, form)(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    train(model, optimizer, 2)
    exporter.detach()
    assert {one.key for one in heard.of("activations")} == {"0", "1", "2"}
    originals = {name for name, _ in model.named_parameters() if "parametrizations" in name}
    assert originals
    assert originals <= {one.key for one in heard.of("weights")}


def test_the_original_of_a_parametrized_bias_is_a_bias() -> None:
    """A parameter is a bias when its name says so, also where a parametrization has moved it."""
    model = nn.Sequential(nn.Linear(3, 2))
    nn.utils.parametrize.register_parametrization(model[0], "bias", nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    train(model, optimizer, 1)
    exporter.detach()
    assert {one.key for one in heard.of("weights")} == {"0"}
    assert {one.key for one in heard.of("bias_updates")} == {"0.parametrizations.bias.original"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_are_told_as_they_are(dtype: torch.dtype) -> None:
    """Half-precision and complex networks give messages of their own dtype."""
    model = nn.Sequential(nn.Linear(3, 2, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    model(torch.randn(4, 3).to(dtype)).abs().float().sum().backward()
    optimizer.step()
    exporter.detach()
    kinds = ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates")
    assert {data_of(heard, kind, "0")[0].dtype for kind in kinds} == {dtype}


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, :1].expand(-1, 5),
        lambda x: x[::2, 1:],
        lambda x: torch._neg_view(x),
        lambda x: torch.complex(x, 2 * x).conj(),
        lambda x: torch.complex(x, 2 * x).conj().imag,
        lambda x: x.reshape(2, 2, 3, 1).to(memory_format=torch.channels_last),
        lambda x: x.sum(),
        lambda x: x[:0],
    ],
)
def test_views_are_told_as_dense_copies(make: Callable[[Tensor], Tensor]) -> None:
    """Outputs that are views of any sort give contiguous messages of their values, which share nothing with them."""

    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return make(2 * x)

    x = torch.randn(4, 3, requires_grad=True)
    expected = make(2 * x.detach()).resolve_conj().resolve_neg().contiguous()
    exporter, heard = watch(model := Viewed(), ())
    output = model(x)
    exporter.step()
    exporter.detach()
    (got,) = data_of(heard, "activations", "")
    assert got.is_contiguous()
    assert not got.is_conj()
    assert not got.is_neg()
    assert not got.requires_grad
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(got, expected)
    assert not got.numel() or got.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()


def test_autocast_is_told_as_it_is() -> None:
    """Under autocast activations have the lower precision and weights the higher, as in the training."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(4, 3))
    output.float().sum().backward()
    optimizer.step()
    exporter.detach()
    assert data_of(heard, "activations", "0")[0].dtype is torch.bfloat16
    assert data_of(heard, "weights", "0")[0].dtype is torch.float32


class Counting(TorchDispatchMode):
    """Counts what torch is asked for, as counters of operations and profilers do."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_modes_of_the_program_see_what_the_program_does() -> None:
    """A mode of dispatch is asked for the same with and without an exporter, which observes all the same."""
    asked = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        exporter, heard = watch(model, optimizer) if watched else (None, None)
        with Counting() as mode:
            for _ in range(2):
                optimizer.zero_grad()
                F.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 2)).backward()
                optimizer.step()
        if exporter is not None and heard is not None:
            exporter.detach()
            assert len(heard.of("activations")) == 2 * 3
            assert len(heard.of("weight_updates")) == 2 * 2
        asked.append(mode.asked)
    assert asked[0] == asked[1]


def test_fake_tensors_are_left_alone() -> None:
    """A pass without values, to plan memory, say, is no error."""
    model = mlp()
    exporter, heard = watch(model, strict=False, kinds=["activations"])
    with pytest.warns(RuntimeWarning, match="has no values"), FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(4, 3))
    exporter.detach()
    assert not heard.of("activations")


def test_meta_tensors_are_named_and_left_alone() -> None:
    """A pass without values is no error; the problem is told once."""
    model = mlp().to("meta")
    exporter, heard = watch(model, strict=False, kinds=["activations"])
    with pytest.warns(RuntimeWarning, match="meta tensor has no values"):
        for _ in range(2):
            model(torch.randn(4, 3, device="meta"))
    exporter.detach()
    assert not heard.of("activations")
    assert {(one["what"], one["count"]) for one in exporter.problems} == {
        (f"activations of '{module}'", 2) for module in ("0", "1", "2")
    }


def test_transforms_of_torch_func_are_left_alone() -> None:
    """Under vmap and grad of torch.func a tensor has no values of its own: results are right, the problem is told."""
    model = nn.Sequential(nn.Linear(3, 2))
    x = torch.randn(5, 3)
    expected = model(x)
    exporter, heard = watch(model, strict=False)
    with pytest.warns(RuntimeWarning, match=r"vmap or grad of torch\.func"):
        got = torch.func.vmap(model)(x)
        gradient = torch.func.grad(lambda one: model(one).sum())(x[0])
    exporter.detach()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradient, model[0].weight.detach().sum(0))
    assert not heard.of("activations")


def test_lazy_modules_are_watched_once_they_have_a_shape(tmp_path: Path) -> None:
    """A model with lazy parameters can be recorded from before its first forward."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    with tracer.record(tmp_path / "run.zarr", model, strict=True, capture=tracer.Capture()):
        for _ in range(3):
            model(torch.randn(5, 3)).sum().backward()
    with tracer.open(tmp_path / "run.zarr") as trace:
        shapes = [one["shape"] for one in trace.header["model"]["parameters"]]
        assert shapes == [None, None, [2, 4], [2]]
        assert trace.array("weights", "0")[0].tolist() == [1, 2]
        assert len(trace.array("activations", "0")[0]) == 3


def test_batches_of_different_sizes(tmp_path: Path) -> None:
    """A smaller last batch is recorded in its own shape."""
    model, heard = mlp(), Collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.h5", model, optimizer, receivers=[heard], strict=True, capture=tracer.Capture()):
        for size in (4, 4, 1):
            model(torch.randn(size, 3)).sum().backward()
            optimizer.step()
    _, activations = tracer.open(tmp_path / "run.h5").array("activations", "1")
    assert [one.shape for one in activations] == [(4, 4), (4, 4), (1, 4)]
    for got, expected in zip(activations, data_of(heard, "activations", "1"), strict=True):
        assert (got == expected.numpy()).all()


def test_affine_free_and_parameterless_models() -> None:
    """Norm layers without weights and models without parameters have nothing to tell of them, and no error."""
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.ReLU())
    exporter, heard = watch(model)
    model(torch.randn(4, 3))
    exporter.finish()
    exporter.detach()
    assert [one.key for one in heard.of("activations")] == ["0", "1"]
    assert not heard.of("weights")


def test_parameters_of_a_functional_call_without_an_optimizer() -> None:
    """What stands in for the parameters, and is no leaf, takes no hooks of theirs; the steps are recorded."""
    model = nn.Linear(3, 2)
    exporter, heard = watch(model)
    for step in range(4):
        stand_ins = {name: one * 1 if step % 2 else one for name, one in model.named_parameters()}
        torch.func.functional_call(model, stand_ins, (torch.ones(4, 3),)).sum().backward()
    exporter.finish()
    exporter.detach()
    assert [one.global_step for one in find(heard, "activations", "")] == [0, 1, 2, 3]
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())


def test_a_column_with_an_odd_stride_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a sum over an axis of one has a stride of 0 there, though it lies in C order."""
    column = torch.randn(SMALLEST, 1).as_strided((SMALLEST, 1), (1, 0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert column.is_contiguous()
    assert torch.equal(copied(column, Memory()), column)
