"""What is recorded of sparse, narrow, complex, aliased and valueless tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracer
from tests.endings import same
from tests.observing.oracles import batches, descended, like_mlp, mlp, of_mlp, simple, unchanged
from tests.observing.recorded import data_of, find, only, problems, sgd, watch
from tracer import Collect


def test_sparse_embeddings() -> None:
    """Sparse Embedding gradient: told as the dense tensor it stands for; the update is that of its rows."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1))

    def train(model: nn.Module, optimizer: Any) -> None:
        model(torch.tensor([1, 1, 4])).sum().backward()
        optimizer.step()

    model, _, heard = unchanged(make, train)
    places = (("weights", "0"), ("weights", "1"), ("biases", "1"))
    table, w, b = (only(heard, *place).requires_grad_() for place in places)
    rows = F.embedding(torch.tensor([1, 1, 4]), table)  # whose gradient is dense
    output = F.linear(rows, w, b)
    expected, *slopes = torch.autograd.grad(output.sum(), [table, rows, output, w, b])
    assert same(only(heard, "weight_gradients", "0"), expected)
    # a row that was looked up twice moves twice, so by other roundings
    torch.testing.assert_close(only(heard, "weight_updates", "0"), -0.1 * expected)
    assert same(only(heard, "weight_updates", "0"), model.get_submodule("0").weight - table)
    for module, value, slope in zip("01", (rows, output), slopes, strict=False):
        assert same(only(heard, "activations", module), value)
        assert same(only(heard, "layer_gradients", module), slope)
    assert same(only(heard, "weight_gradients", "1"), slopes[2])
    assert same(only(heard, "bias_gradients", "1"), slopes[3])


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
        _, _, heard = unchanged(Graph, lambda model, optimizer: (model(x).sum().backward(), optimizer.step()))
    assert same(only(heard, "layer_inputs", ""), torch.eye(3))
    assert same(only(heard, "input_data"), torch.eye(3))
    assert same(only(heard, "activations", ""), only(heard, "weights", ""))
    torch.manual_seed(5)
    weight = Graph().weight.detach()
    assert same(only(heard, "weights", ""), weight)
    assert same(only(heard, "layer_gradients", ""), torch.ones(3, 2))
    assert same(only(heard, "weight_gradients", ""), torch.ones(3, 2))
    assert same(only(heard, "weight_updates", ""), weight.add(torch.ones(3, 2), alpha=-0.1) - weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float64])
@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_dtypes_from_the_training_to_the_trace(dtype: torch.dtype, suffix: str, tmp_path: Path) -> None:
    """bf16/fp16/complex: what is read from the trace is what was computed, to the bit and in its dtype."""
    inputs = [x.to(dtype) * (1 + 1j if dtype.is_complex else 1) for x in batches(2)]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3, dtype=dtype), nn.Tanh(), nn.Linear(3, 2, dtype=dtype))

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in inputs:
            optimizer.zero_grad()
            model(x).abs().float().sum().backward()
            optimizer.step()

    _, exporter, _ = unchanged(make, train, path=tmp_path / f"run.{suffix}")
    assert not exporter.problems
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        read = Collect("*")
        for one in trace.messages():
            read.receive(one)
    for step, x in enumerate(inputs):
        at = {"global_step": step}
        leaves = [only(read, kind, name, **at).requires_grad_() for name in "02" for kind in ("weights", "biases")]
        first = F.linear(x, *leaves[:2])
        second = torch.tanh(first)
        third = F.linear(second, *leaves[2:])
        outputs = [first, second, third]
        gradients = torch.autograd.grad(third.abs().float().sum(), [*outputs, *leaves])
        assert {one.dtype for one in gradients} == {dtype}
        for name, output, gradient in zip("012", outputs, gradients[:3], strict=True):
            assert same(only(read, "activations", name, **at), output)
            assert same(only(read, "layer_gradients", name, **at), gradient.resolve_conj())
        assert same(only(read, "input_gradients", "2", **at), gradients[1].resolve_conj())
        assert same(only(read, "network_output", **at), third)
        own = zip([(kind, name) for name in "02" for kind in ("weight", "bias")], leaves, gradients[3:], strict=True)
        for (kind, name), leaf, gradient in own:
            assert same(only(read, f"{kind}_gradients", name, **at), gradient.resolve_conj())
            moved = leaf.detach().add(gradient, alpha=-0.1) - leaf.detach()
            assert same(only(read, f"{kind}_updates", name, **at), moved)


class Float8(nn.Module):
    """Rounds to 8 bits, and holds a frozen weight of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float()).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_float8(suffix: str, tmp_path: Path) -> None:
    """fp8: activations, their gradients and weights are told as they are; the clock and other parameters go on."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.eight = nn.Linear(3, 3), Float8()

        def forward(self, x: Tensor) -> Tensor:
            return self.eight(self.layer(x)).float()

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    _, exporter, heard = unchanged(Net, train, path=tmp_path / f"run.{suffix}")  # which also reads the trace
    assert not exporter.problems
    for step, x in enumerate(batches(2)):
        w, b = (data_of(heard, kind, "layer")[step].clone().requires_grad_() for kind in ("weights", "biases"))
        hidden = F.linear(x, w, b)
        rounded = F.linear(hidden, torch.ones(2, 3)).to(torch.float8_e4m3fn)
        slopes = torch.autograd.grad(rounded.float().square().sum(), [rounded, hidden, w, b])
        assert rounded.dtype is slopes[0].dtype is torch.float8_e4m3fn
        assert same(data_of(heard, "activations", "eight")[step], rounded)
        assert same(data_of(heard, "activations", "layer")[step], hidden)
        assert same(data_of(heard, "layer_gradients", "eight")[step], slopes[0])
        assert same(data_of(heard, "layer_gradients", "layer")[step], slopes[1])
        assert same(data_of(heard, "weight_gradients", "layer")[step], slopes[2])
        assert same(data_of(heard, "bias_gradients", "layer")[step], slopes[3])
        assert same(data_of(heard, "weight_updates", "layer")[step], w.add(slopes[2], alpha=-0.1) - w)
        assert same(data_of(heard, "bias_updates", "layer")[step], b.add(slopes[3], alpha=-0.1) - b)
        assert same(only(heard, "input_gradients", "eight", global_step=step), slopes[1])
        assert same(only(heard, "network_output", global_step=step), rounded.float())
        assert same(data_of(heard, "weights", "eight")[step], torch.ones(2, 3).to(torch.float8_e4m3fn))
        assert same(data_of(heard, "weight_updates", "eight")[step], torch.zeros(2, 3))


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

    _, _, heard = unchanged(make, train)
    weight, bias = (only(heard, kind, "") for kind in ("weights", "biases"))
    assert same(only(heard, "activations", ""), F.linear(torch.ones(1, 1), weight, bias))
    for kind, module in (("layer_gradients", ""), ("weight_gradients", "")):
        assert same(only(heard, kind, module), torch.ones(1, 1))
    assert same(only(heard, "weight_updates", ""), weight.add(torch.ones(1, 1), alpha=-0.1) - weight)
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

    _, _, heard = unchanged(lambda: nn.Sequential(nn.Linear(3, 3), Views()), train)
    hidden = F.linear(batches(1)[0], only(heard, "weights", "0"), only(heard, "biases", "0"))
    expected = [one.clone().resolve_conj() for one in Views()(hidden)]
    for number, value in enumerate(expected):
        got = only(heard, "activations", "1", leaf=str(number))
        assert same(got, value)
        assert got.is_contiguous()
        assert not got.is_conj()
    assert same(only(heard, "layer_gradients", "1", leaf="0"), torch.ones(4, 3))
    slope = torch.tensor([[4.0, 6, 4], [0, 2, 0], [0, 2, 0], [0, 2, 0]])
    assert same(only(heard, "layer_gradients", "0"), slope)
    assert same(only(heard, "weight_gradients", "0"), slope.T @ batches(1)[0])
    descended(heard)


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
            _, exporter, heard = unchanged(lambda apart=apart: Beside(*mlp(), apart()), simple, strict=False)
        assert f"activations of '3': {why}" in problems(exporter)
        assert not find(heard, "activations", "3")
        like_mlp(heard, batches(2), lr=0.1)
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


def through_blocks(model: Any, x: Tensor) -> dict[str, list[Tensor]]:
    """The outputs of each module of `Blocks` in the order of calls, by functions and without checkpoints."""
    found: dict[str, list[Tensor]] = {f"block.{number}": [] for number in range(3)}
    for number in range(3):
        found["block.0"].append(F.linear(x + number, model.block[0].weight, model.block[0].bias))
        found["block.1"].append(F.dropout(found["block.0"][-1], 0.2))
        found["block.2"].append(torch.tanh(found["block.1"][-1]))
        x = found["block.2"][-1]
    for name in ("inner", "outer", "head") if model.nested else ("head",):
        layer = model.get_submodule(name)
        found[name] = [F.linear(x, layer.weight, layer.bias)]
        x = found[name][0]
    return found


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

    heard = {}
    for form in (None, reentrant):
        _, exporter, heard[form] = unchanged(lambda form=form: Blocks(form, nested), train)
        assert not exporter.problems
    descended(heard[reentrant])
    modules = ["block.0", "block.1", "block.2", "head", *(["inner", "outer"] if nested else [])]
    for kind in ("activations", "layer_inputs", "layer_gradients", "weights", "weight_gradients", "weight_updates"):
        for module in modules:
            got, expected = ({(m.global_step, m.call): m.data for m in find(heard[f], kind, module)} for f in heard)
            assert got.keys() == expected.keys(), (kind, module)
            for place, data in got.items():
                torch.testing.assert_close(data, expected[place], rtol=1e-9, atol=1e-12)
    got, expected = (
        {(m.global_step, m.call): m.data for m in find(heard[f], "input_gradients", "block.2")} for f in heard
    )
    assert len(got) == 12
    assert got.keys() == expected.keys()
    for place, data in got.items():
        torch.testing.assert_close(data, expected[place], rtol=1e-9, atol=1e-12)
    torch.manual_seed(5)
    reference = Blocks(None, nested)
    optimizer = sgd(reference)
    for step, x in enumerate(batches(2)):
        optimizer.zero_grad()
        for number, factor in enumerate((1, 2)):
            found = through_blocks(reference, x)
            outputs = [output for each in found.values() for output in each]
            loss = (factor * found["head"][0]).square().sum()
            slopes = iter(torch.autograd.grad(loss, outputs, retain_graph=True))
            loss.backward()
            for module, each in found.items():
                for call, output in enumerate(each, start=number * len(each)):
                    at = {"global_step": step, "call": call}
                    value = only(heard[reentrant], "activations", module, **at)
                    torch.testing.assert_close(value, output.detach(), rtol=1e-9, atol=1e-12)
                    slope = only(heard[reentrant], "layer_gradients", module, **at)
                    torch.testing.assert_close(slope, next(slopes), rtol=1e-9, atol=1e-12)
        for module in set(modules) - {"block.1", "block.2"}:
            before = reference.get_submodule(module).weight.detach()
            gradient = only(heard[reentrant], "weight_gradients", module, global_step=step)
            torch.testing.assert_close(gradient, reference.get_submodule(module).weight.grad, rtol=1e-9, atol=1e-12)
            weight = only(heard[reentrant], "weights", module, global_step=step)
            torch.testing.assert_close(weight, before, rtol=1e-9, atol=1e-12)
        optimizer.step()


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

    heard = {}
    for checkpointed in (False, True):
        _, _, heard[checkpointed] = unchanged(lambda checkpointed=checkpointed: Twice(checkpointed), train)
    for kind in ("activations", "layer_gradients"):
        got, expected = ({m.call: m.data for m in find(heard[form], kind, "layer")} for form in (True, False))
        assert sorted(got) == sorted(expected) == list(range(12))
        for call, data in got.items():
            torch.testing.assert_close(data, expected[call])
    descended(heard[True])
    w, b = (only(heard[True], kind, "layer").requires_grad_() for kind in ("weights", "biases"))
    summed = torch.zeros_like(w)
    for number, x in enumerate(batches(2)):
        outputs = []
        for place in range(6):  # the second of each three doubles its input
            h = outputs[-1] if outputs else x
            outputs.append(F.linear(h * 2 if place % 3 == 1 else h, w, b))
        *slopes, own = torch.autograd.grad(outputs[-1].square().sum(), [*outputs, w])
        summed += own
        for place, (output, slope) in enumerate(zip(outputs, slopes, strict=True)):
            call = 6 * number + place
            assert same(only(heard[True], "activations", "layer", call=call), output)
            torch.testing.assert_close(only(heard[True], "layer_gradients", "layer", call=call), slope)
    torch.testing.assert_close(only(heard[True], "weight_gradients", "layer"), summed)


def test_a_whole_model_in_a_reentrant_checkpoint() -> None:
    """The first forward is without gradients, but it is the training's: no evaluation, and with its gradients."""

    def run(reentrant: bool) -> Collect:
        def train(model: nn.Module, optimizer: Any) -> None:
            for x in batches(2):
                optimizer.zero_grad()
                if reentrant:
                    checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum().backward()
                else:
                    model(x.requires_grad_()).square().sum().backward()
                with torch.no_grad():
                    model(x)  # in training mode, but without gradients: an evaluation
                optimizer.step()

        return unchanged(mlp, train)[2]

    got, expected = run(True), run(False)
    for kind in ("activations", "layer_gradients", "input_gradients"):
        for module in ("0", "1", "2"):
            pairs = zip(find(got, kind, module), find(expected, kind, module), strict=True)
            for one, other in pairs:
                assert (one.tag, one.global_step, one.call) == (other.tag, other.global_step, other.call)
                assert one.data is not None
                torch.testing.assert_close(one.data, other.data)
    assert {one.tag for one in got.of("activations")} == {"default", "eval"}
    descended(got)
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(got, x, step).items():
            assert same(only(got, kind, module, global_step=step, tag="default"), value), (kind, module, step)
            if kind in ("layer_inputs", "activations"):
                assert same(only(got, kind, module, global_step=step, tag="eval"), value), (module, step)


def test_a_parameter_that_a_checkpointed_module_returns() -> None:
    """A parameter that a module returns inside a checkpoint has one gradient a step, not one for each forward."""

    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.layer = Position(), nn.Linear(3, 2)

        def inside(self, x: Tensor) -> Tensor:
            return self.layer(x + self.position())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=False)

    _, _, heard = unchanged(Positioned, simple)
    assert [(one.global_step, one.call, one.leaf) for one in find(heard, "layer_gradients", "position")] == [
        (0, 0, ""),
        (1, 0, ""),
    ]
    for step, x in enumerate(batches(2)):
        at = {"global_step": step}
        position = only(heard, "weights", "position", **at).requires_grad_()
        output = F.linear(x + position, *(only(heard, kind, "layer", **at) for kind in ("weights", "biases")))
        (slope,) = torch.autograd.grad(output.square().sum(), [position])
        assert same(only(heard, "activations", "position", **at), position)
        assert same(only(heard, "activations", "layer", **at), output)
        assert same(only(heard, "layer_gradients", "position", **at), slope)
        assert same(only(heard, "weight_gradients", "position", **at), slope)
        assert same(only(heard, "weight_updates", "position", **at), position.add(slope, alpha=-0.1) - position)


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
