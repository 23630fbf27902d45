"""What is recorded of sparse, narrow, complex, aliased and valueless tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.endings import same
from tests.observing.oracles import OF_PARAMETERS, batches, mlp, simple, situation, unchanged
from tests.observing.recorded import data_of, descend, find, only, problems, sgd, watch


def test_sparse_embeddings() -> None:
    """Sparse Embedding gradient: told as the dense tensor it stands for; the update is that of its rows."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1))

    def train(model: nn.Module, optimizer: Any) -> None:
        model(torch.tensor([1, 1, 4])).sum().backward()
        optimizer.step()

    def densely(model: nn.Module, optimizer: Any) -> None:
        model.get_submodule("0").sparse = False
        train(model, optimizer)

    # a row that was looked up twice moves twice, so by other roundings
    moved = ("weight_updates", "0", 0, "default", 0, "")
    model, _, heard = situation(make, train, plain=(make, densely), but=lambda place: place == moved)
    (update,), (weight,) = (data_of(heard, kind, "0") for kind in ("weight_updates", "weights"))
    torch.testing.assert_close(update, -0.1 * only(heard, "weight_gradients", "0"))
    assert same(update, model.get_submodule("0").weight - weight)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs(layout: torch.layout) -> None:
    """A layer with a sparse input (a graph's adjacency): the input is told dense."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x, self.weight)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR")
        x = torch.eye(3).to_sparse(layout=layout)
        _, _, heard = situation(Graph, lambda model, optimizer: (model(x).sum().backward(), optimizer.step())[1:])
    assert same(only(heard, "layer_inputs", ""), torch.eye(3))
    assert same(only(heard, "layer_gradients", ""), torch.ones(3, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float64])
def test_dtypes_from_the_training_to_the_trace(dtype: torch.dtype, tmp_path: Path) -> None:
    """bf16/fp16/complex: what is read from the trace is what was computed, to the bit and in its dtype."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3, dtype=dtype), nn.Tanh(), nn.Linear(3, 2, dtype=dtype))

    def train(model: nn.Module, optimizer: Any) -> None:
        descend(
            optimizer,
            lambda x: model(x.to(dtype) * (1 + 1j if dtype.is_complex else 1)).abs().float().sum(),
            batches(2),
        )

    _, exporter, heard = situation(make, train, path=tmp_path / "run.zarr")  # which has what is heard, to the bit
    assert not exporter.problems
    assert {one.dtype for kind in OF_PARAMETERS for one in data_of(heard, kind, "2")} == {dtype}


class Float8(nn.Module):
    """Rounds to 8 bits, and holds a frozen weight of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float()).to(torch.float8_e4m3fn)


def test_float8(tmp_path: Path) -> None:
    """fp8: activations, their gradients and weights are told as they are; the clock and other parameters go on."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.eight = nn.Linear(3, 3), Float8()

        def forward(self, x: Tensor) -> Tensor:
            return self.eight(self.layer(x)).float()

    path, unmoved = tmp_path / "run.zarr", ("weight_updates", "eight")  # torch subtracts no float8
    _, exporter, heard = situation(Net, simple, path=path, but=lambda place: place[:2] == unmoved)
    assert not exporter.problems
    for kind in ("activations", "layer_gradients", "weights"):
        assert [one.dtype for one in data_of(heard, kind, "eight")] == [torch.float8_e4m3fn] * 2
    assert all(same(one, torch.zeros(2, 3)) for one in data_of(heard, *unmoved))
    assert len(data_of(heard, *unmoved)) == 2


def test_updates_of_small_integers() -> None:
    """Quantised weights in uint8, int8 or bool that move: the update is the difference, not one modulo 256."""

    def make() -> nn.Module:
        model = nn.Linear(1, 1)
        model.codes = nn.Parameter(torch.tensor([3, 200], dtype=torch.uint8), requires_grad=False)
        model.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        model.levels = nn.Parameter(torch.tensor([100, -100], dtype=torch.int8), requires_grad=False)
        return model

    def train(model: Any, optimizer: Any) -> None:
        def closure() -> Tensor:
            model.codes.data = torch.tensor([5, 100], dtype=torch.uint8)
            model.mask.data = torch.tensor([False, True])
            model.levels.data = torch.tensor([-100, 100], dtype=torch.int8)
            loss: Tensor = model(torch.ones(1, 1)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    own = ("codes", "mask", "levels")
    _, _, heard = situation(make, train, but=lambda place: place[0] == "weight_updates" and place[1] in own)
    assert only(heard, "weights", "codes").tolist() == [3, 200]
    assert only(heard, "weights", "mask").tolist() == [True, False]
    assert only(heard, "weight_updates", "codes").tolist() == [2, -100]
    assert only(heard, "weight_updates", "mask").tolist() == [-1, 1]
    assert only(heard, "weight_updates", "levels").tolist() == [-200, 200]


def test_expanded_and_aliased_tensors() -> None:
    """Expanded tensors (stride 0), views and conjugates: told as contiguous memory of their own, with their values."""

    class Views(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x[:1].expand(4, 3), x.t(), x[:, 1], torch.view_as_complex(x[:, :2].contiguous()).conj()

    def train(model: nn.Module, optimizer: Any) -> None:
        output = model(batches(1)[0])
        (output[0].sum() + 2 * output[2].sum()).backward()
        optimizer.step()

    _, _, heard = situation(lambda: nn.Sequential(nn.Linear(3, 3), Views()), train)
    assert [one.leaf for one in find(heard, "activations", "1")] == ["0", "1", "2", "3"]
    for got in data_of(heard, "activations", "1"):
        assert got.is_contiguous()
        assert not got.is_conj()
    assert same(only(heard, "layer_gradients", "1", leaf="0"), torch.ones(4, 3))
    slope = torch.tensor([[4.0, 6, 4], [0, 2, 0], [0, 2, 0], [0, 2, 0]])
    assert same(only(heard, "layer_gradients", "0"), slope)


def test_meta_and_quantized_tensors() -> None:
    """Meta and quantized tensors have no values a trace could hold: each is a problem, and nothing fails."""

    class Quantizing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)

    class Emptying(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach().to("meta")

    class Beside(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self[0](x)
            self[3](hidden)
            return self[2](self[1](hidden))

    for apart, why in ((Emptying, "a meta tensor has no values"), (Quantizing, "a quantized tensor is not supported")):
        with pytest.warns(RuntimeWarning, match=why):
            _, exporter, heard = situation(
                lambda apart=apart: Beside(*mlp(), apart()), simple, strict=False, but=lambda place: place[1] == "3",
                plain=(lambda: Beside(*mlp(), nn.Identity()), simple),
            )  # fmt: skip
        assert f"activations of '3': {why}" in problems(exporter)
        assert {one.kind for one in heard if one.key == "3"} == {"layer_inputs", "input_gradients"}
    for model, x, why in (
        (mlp().to("meta"), torch.randn(4, 3, device="meta"), "a meta tensor has no values"),
        (nn.Sequential(nn.Linear(3, 2), Quantizing()), torch.randn(4, 3), "a quantized tensor is not supported"),
    ):
        exporter, heard = watch(model, sgd(model), strict=False)
        with pytest.warns(RuntimeWarning, match=why):
            model(x)
        exporter.detach()
        assert f"activations of '1': {why}" in problems(exporter)
        assert not find(heard, "activations", "1")


def test_functional_call_vmap_and_per_sample_gradients() -> None:
    """functional_call is seen; inside vmap/grad of torch.func tensors have no values: skipped, and counted."""
    x = batches(1)[0]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.Tanh())

    def others(model: nn.Module) -> dict[str, Tensor]:
        return {name: (p.detach() + 1).requires_grad_() for name, p in model.named_parameters()}

    def train(model: nn.Module, optimizer: Any) -> list[Any]:
        def each(given: dict[str, Tensor], one: Tensor) -> Tensor:
            result: Tensor = torch.func.functional_call(model, given, (one,)).sum()
            return result

        parameters = others(model)
        called = torch.func.functional_call(model, parameters, (x,))
        called.square().sum().backward()
        per_sample = torch.func.vmap(torch.func.grad(each), (None, 0))(parameters, x)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)  # which jvp itself calls
            of_inputs = torch.func.jvp(model, (x,), (x,))
        return [called, *(p.grad for p in parameters.values()), *per_sample.values(), *of_inputs]

    with pytest.warns(RuntimeWarning, match=r"vmap or grad of torch\.func"):
        model, exporter, heard = unchanged(make, train, given=lambda _: (), strict=False)
    hidden = F.linear(x, *others(model).values())
    output = torch.tanh(hidden)
    slopes = torch.autograd.grad(output.square().sum(), [hidden, output])
    for name, value, slope in zip("01", (hidden, output), slopes, strict=True):
        assert same(only(heard, "activations", name), value)
        assert same(only(heard, "layer_gradients", name), slope)
    assert "activations of '0': inside vmap or grad of torch.func" in problems(exporter)


# -- what is recorded of layers that checkpoints compute a second time in the backward -----------------------


class Blocks(nn.Module):
    """A block that is called three times, each in a checkpoint of its own, as in ALBERT; and one inside another."""

    def __init__(self, reentrant: bool | None, nested: bool = False) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Tanh())
        self.inner, self.outer, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.reentrant, self.nested = reentrant, nested

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        result: Tensor = checkpoint(function, x, use_reentrant=self.reentrant)
        return result

    def both(self, x: Tensor) -> Tensor:
        return self.outer(self.run(self.inner, x))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            x = self.run(self.block, x + number)
        return self.head(self.run(self.both, x) if self.nested else x)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_checkpointing(reentrant: bool, nested: bool) -> None:
    """Checkpoint ``use_reentrant`` True and False: each call once, with its own gradient, as without checkpoints."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            for factor in (1, 2):
                (factor * model(x.clone().requires_grad_())).square().sum().backward()
            optimizer.step()

    def make(form: bool | None) -> nn.Module:
        return Blocks(form, nested)

    def but(place: Any) -> bool:  # the wrapper's own input is a leaf in a checkpoint, and so has a gradient of its own
        return place[0] == "input_gradients" and place[1] != "block.2"

    plain = (lambda: make(None)), train
    _, exporter, heard = situation(lambda: make(reentrant), train, plain=plain, close=1e-9, but=but)
    assert not exporter.problems
    assert len(find(heard, "input_gradients", "block.2")) == 12
    assert {one.key for one in heard.of("activations")} == {
        *("block.0", "block.1", "block.2", "head"), *(("inner", "outer") if nested else ())
    }  # fmt: skip


def test_nested_reentrant_checkpoints() -> None:
    """A checkpoint inside a checkpoint: a module that is called in both, and twice, has each gradient at its call."""

    class Twice(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.checkpointed = checkpointed

        def run(self, function: Any, x: Tensor) -> Any:
            return checkpoint(function, x, use_reentrant=True) if self.checkpointed else function(x)

        def inside(self, x: Tensor) -> Any:
            return self.run(self.layer, self.layer(self.run(self.layer, x) * 2))

        def forward(self, x: Tensor) -> Any:
            return self.run(self.inside, self.run(self.inside, x))

    def train(model: nn.Module, optimizer: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs")  # of the inner checkpoint's first forward
            for x in batches(2):
                model(x.requires_grad_()).square().sum().backward()
            optimizer.step()

    plain = (lambda: Twice(False)), train
    but = lambda place: place[0] == "input_gradients"  # noqa: E731
    _, _, heard = situation(lambda: Twice(True), train, plain=plain, close=1e-6, but=but)
    assert sorted(one.call for one in find(heard, "layer_gradients", "layer")) == list(range(12))


def test_a_whole_model_in_a_reentrant_checkpoint() -> None:
    """The first forward is without gradients, but it is the training's: no evaluation, and with its gradients."""

    def train(model: nn.Module, optimizer: Any, reentrant: bool = True) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            x.requires_grad_()
            output = checkpoint(model, x, use_reentrant=True) if reentrant else model(x)
            output.square().sum().backward()
            with torch.no_grad():
                model(x)  # in training mode, but without gradients: an evaluation
            optimizer.step()

    _, _, heard = situation(mlp, train, plain=(mlp, functools.partial(train, reentrant=False)))
    assert {one.tag for one in heard.of("activations")} == {"default", "eval"}


def test_a_parameter_that_a_checkpointed_module_returns() -> None:
    """A parameter that a module returns inside a checkpoint has one gradient a step, not one for each forward."""

    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    class Positioned(nn.Module):
        def __init__(self, checkpointed: bool = True) -> None:
            super().__init__()
            self.position, self.layer, self.checkpointed = Position(), nn.Linear(3, 2), checkpointed

        def inside(self, x: Tensor) -> Tensor:
            return self.layer(x + self.position())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=False) if self.checkpointed else self.inside(x)

    def apart(place: Any) -> bool:  # of a parameter, a hook sees what was accumulated
        return place[0] == "layer_gradients" and place[1] == "position"

    _, _, heard = situation(Positioned, simple, plain=(lambda: Positioned(False), simple), but=apart)
    assert [(one.global_step, one.call, one.leaf) for one in find(heard, "layer_gradients", "position")] == [
        (0, 0, ""), (1, 0, "")
    ]  # fmt: skip
    for step in range(2):
        slopes = (only(heard, kind, "position", global_step=step) for kind in ("layer_gradients", "weight_gradients"))
        assert same(*slopes)


def test_a_forward_inside_a_backward_is_no_call() -> None:
    """A module that is called in a backward (an implicit layer) is not told as a call of the training."""

    class Implicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
            ctx.save_for_backward(x)
            ctx.layer = layer
            return layer(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                ctx.layer(x)
            return gradient, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Implicit.apply(x, self.layer)
            return result

    def train(model: nn.Module, optimizer: Any) -> None:
        model(batches(1)[0].requires_grad_()).sum().backward()
        optimizer.step()

    _, _, heard = unchanged(Net, train)
    assert [one.call for one in find(heard, "activations", "layer")] == [0]
    expected = F.linear(batches(1)[0], only(heard, "weights", "layer"), only(heard, "biases", "layer"))
    assert same(only(heard, "activations", "layer"), expected)
    assert same(only(heard, "network_output"), expected)
