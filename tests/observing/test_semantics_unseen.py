"""What is recorded of forwards that call no hooks, or that are none of the training."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tracer
from tests.endings import same
from tests.observing.oracles import batches, mlp, of_mlp, simple, unchanged
from tests.observing.recorded import find, only, problems, sgd
from tracer import Exporter
from tracer.observing.optimizers import skipped_inside
from tracereel.main import main


@pytest.mark.parametrize("whole", [False, True])
def test_script_modules(whole: bool, tmp_path: Path) -> None:
    """ScriptModule: it takes no hooks, which is told; its parameters are recorded, the modules around it observed.

    So the gradient of its output is recorded as that of the next layer's input.
    """

    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
        return scripted if whole else nn.Sequential(scripted, nn.Linear(3, 2))

    path = tmp_path / "run.zarr"
    with pytest.warns(RuntimeWarning, match="a ScriptModule takes no hooks"):
        _, _, heard = unchanged(make, simple, path=path, strict=False)
    name = "0" if whole else "0.0"
    for step, x in enumerate(batches(2)):
        at = {"global_step": step}
        modules = [name] if whole else [name, "1"]
        leaves = [only(heard, kind, one, **at).requires_grad_() for one in modules for kind in ("weights", "biases")]
        inner = F.linear(x, *leaves[:2])
        output = inner if whole else F.linear(inner, *leaves[2:])
        of_inner, of_output, *gradients = torch.autograd.grad(output.square().sum(), [inner, output, *leaves])
        for number, one in enumerate(modules):
            weight, gradient = leaves[2 * number], gradients[2 * number]
            assert same(only(heard, "weight_gradients", one, **at), gradient)
            assert same(only(heard, "bias_gradients", one, **at), gradients[2 * number + 1])
            assert same(only(heard, "weight_updates", one, **at), weight.add(gradient, alpha=-0.1) - weight)
        if not whole:
            assert same(only(heard, "layer_inputs", "1", **at), inner)
            assert same(only(heard, "input_gradients", "1", **at), of_inner)
            assert same(only(heard, "activations", "1", **at), output)
            assert same(only(heard, "layer_gradients", "1", **at), of_output)
            assert same(only(heard, "network_output", **at), output)
    for kind in ("activations", "layer_gradients"):
        assert {one.key for one in heard.of(kind)} == (set() if whole else {"1"})
    with tracer.open(path) as trace:
        assert any("ScriptModule" in note["problem"]["why"] for note in trace.notes if "problem" in note)


@pytest.mark.parametrize("way", ["jit", "jit in eval mode", "onnx", "summary", "pipelining"])
def test_forwards_whose_result_is_thrown_away(way: str) -> None:
    """Before and amid the training, by code of torch or of a library: they are no calls, and begin no step."""

    def look(model: nn.Module) -> None:
        x = torch.ones(7, 3)
        with warnings.catch_warnings():  # torch warns itself
            warnings.simplefilter("ignore")
            if "jit" in way:
                model.train("eval" not in way)
                torch.jit.trace(model, x)
            elif way == "onnx":
                torch.onnx.utils._trace_and_get_graph_from_model(model, (x,))
            elif way == "summary":
                inside("torchinfo.torchinfo", "forward_pass", lambda: model(x))
            else:
                inside("torch.distributed.pipelining.stage", "_forward_metadata_inference", lambda: model(x))
        model.train()

    def train(model: nn.Module, optimizer: Any) -> None:
        look(model)
        simple(model, optimizer, 1)
        with torch.no_grad():
            look(model)
        simple(model, optimizer, 1)

    _, exporter, heard = unchanged(lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), train)
    assert {one.tag for one in heard} == {"default"}
    assert [(one.global_step, one.call) for one in heard.of("activations") if one.key == "0"] == [(0, 0), (1, 0)]
    assert [one.global_step for one in heard.of("batch_started")] == [0, 1]
    assert exporter.unended is None


def inside(module: str, name: str, work: Callable[[], object]) -> None:
    """Work that is called by a function of this name in a module of this name."""
    there: dict[str, Any] = {"__name__": module}
    exec(f"def {name}(work): return work()", there)
    there[name](work)


@pytest.mark.parametrize("way", ["fx", "make_fx", "export", "fake", "fake input"])
def test_forwards_that_only_find_out_what_a_model_does(way: str) -> None:
    """They are no calls, begin no step, and find the model as it is when nobody watches it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    def find_out(model: Any) -> str:
        x = torch.ones(4, 3)
        if way == "fx":
            return str(torch.fx.symbolic_trace(model).graph)
        if way == "make_fx":
            return str(make_fx(model)(x).graph)
        if way == "export":
            return str(torch.export.export(model, (x,), strict=False).graph)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            if way == "fake":
                return str(F.mse_loss(model(mode.from_tensor(x)), torch.zeros(4, 3)).shape)
            fake = mode.from_tensor(x)
        with warnings.catch_warnings():  # torch warns itself
            warnings.simplefilter("ignore")
            return str(model(fake).shape)

    def train(model: nn.Module, optimizer: Any) -> str:
        found = find_out(model)
        simple(model, optimizer)
        return found + find_out(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, exporter, heard = unchanged(lambda: nn.Sequential(Block(), Block()), train)
    assert len(exporter.problems) == ("fake" in way)
    assert [(one.global_step, one.call) for one in heard.of("activations") if one.key == "0.linear"] == [(0, 0), (1, 0)]
    assert [one.global_step for one in heard.of("batch_started")] == [0, 1]
    assert exporter.unended is None


def test_direct_forward(tmp_path: Path) -> None:
    """Direct ``m.forward(x)`` runs no hooks: the module is listed as silent, its parameters are recorded.

    What it computes is seen around it: its input as the output of the layer before, its output as the network's.
    """

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.unseen = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            return self.unseen.forward(self.seen(x))

    _, exporter, heard = unchanged(Direct, simple, path=tmp_path / "run.zarr")
    assert not exporter.problems
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [note["silent"] for note in trace.notes if "silent" in note] == [["unseen"]]
    info = CliRunner().invoke(main, ["info", str(tmp_path / "run.zarr")])
    assert re.search(r"silent +never called, so nothing was seen of them: unseen\n", info.output), info.output
    for kind in ("layer_inputs", "activations", "layer_gradients"):
        assert {one.key for one in heard.of(kind)} == {"seen"}
    for step, x in enumerate(batches(2)):
        at = {"global_step": step}
        leaves = [
            only(heard, kind, one, **at).requires_grad_()
            for one in ("seen", "unseen")
            for kind in ("weights", "biases")
        ]
        hidden = F.linear(x, *leaves[:2])
        output = F.linear(hidden, *leaves[2:])
        slope, *gradients = torch.autograd.grad(output.square().sum(), [hidden, *leaves])
        assert same(only(heard, "activations", "seen", **at), hidden)
        assert same(only(heard, "layer_gradients", "seen", **at), slope)
        assert same(only(heard, "network_output", **at), output)
        for number, one in enumerate(("seen", "unseen")):
            weight, gradient = leaves[2 * number], gradients[2 * number]
            assert same(only(heard, "weight_gradients", one, **at), gradient)
            assert same(only(heard, "bias_gradients", one, **at), gradients[2 * number + 1])
            assert same(only(heard, "weight_updates", one, **at), weight.add(gradient, alpha=-0.1) - weight)


def test_data_parallel() -> None:
    """nn.DataParallel (on a CPU it passes through): the module inside is observed, and names have no ``module.``.

    All that is told is what is told of the module by itself, and its numbers are autograd's.
    """
    _, _, heard = unchanged(lambda: nn.DataParallel(mlp()), simple)
    _, _, alone = unchanged(mlp, simple)
    assert len(heard) == len(alone)
    for one, other in zip(heard, alone, strict=True):
        assert (one.kind, one.key, one.global_step, one.call) == (other.kind, other.key, other.global_step, other.call)
        assert (one.data is None and other.data is None) or same(one.data, other.data)
    assert {one.key for one in heard.of("layer_gradients")} == {"0", "1", "2"}
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(heard, x, step, lr=0.1).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)


def test_cuda_graphs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs: while one is captured nothing is copied, because a copy to the host would break the capture."""

    class OnDevice(Tensor):
        is_cuda = True

    class Moving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).as_subclass(OnDevice)

    def train(model: nn.Module, optimizer: Any) -> None:
        for x, captured in zip(batches(2), (False, True), strict=True):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
            optimizer.zero_grad()
            model(x).as_subclass(Tensor).square().sum().backward()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="while a CUDA graph is captured"):
        _, exporter, heard = unchanged(lambda: mlp().append(Moving()), train, strict=False)
    assert [one.global_step for one in find(heard, "activations", "3")] == [0]
    assert "activations of '3': while a CUDA graph is captured" in problems(exporter)
    x = batches(1)[0]
    for (kind, module), value in of_mlp(heard, x, 0, lambda output: (output * 2).square().sum(), lr=0.1).items():
        assert same(only(heard, kind, module, global_step=0), value), (kind, module)
    assert same(only(heard, "activations", "3").as_subclass(Tensor), 2 * only(heard, "activations", "2", global_step=0))
    # nor is a fused optimizer asked whether it has moved, which would wait for the device
    optimizer = sgd(mlp())
    optimizer.found_inf = torch.ones(1).as_subclass(OnDevice)  # type: ignore[attr-defined]
    assert not skipped_inside(optimizer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert skipped_inside(optimizer)


def test_a_recorded_module_cannot_be_made_a_graph() -> None:
    """``torch.cuda.make_graphed_callables`` refuses modules with hooks, before it asks for a device."""

    def train(model: nn.Module, optimizer: Any, run: Any) -> None:
        if isinstance(run, Exporter):
            with pytest.raises((AssertionError, RuntimeError), match="must not have hooks"):
                torch.cuda.make_graphed_callables(model, (batches(1)[0],))
        simple(model, optimizer)

    _, _, heard = unchanged(mlp, train, calls=True)  # the refusal leaves the training and the recording as they are
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(heard, x, step, lr=0.1).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)
