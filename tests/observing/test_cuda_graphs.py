"""CUDA graphs and compiled models on a device; all of it is skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from tests.observing.cuda_training import DEVICE, batches, by_hand, make, of_modules, repeatable, state, train
from tests.observing.recorded import attached
from tracer import Capture, Collect
from tracer.messaging.messages import DATA_KINDS
from tracer.observing.pytorch import compiled

MODE = "thread_local"
"""How graphs are captured: the recorder's thread waits for events meanwhile, which a "global" capture forbids it."""

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures(repeatable.__name__),
]


def test_a_graph_that_is_captured() -> None:
    """A CUDA graph is captured and replayed as without an exporter, and a sentence says that it is not observed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(DEVICE)
    x = torch.randn(3, 4, device=DEVICE)
    expected = model(x).detach().clone()
    exporter, heard = attached(tracer.Exporter(capture=Capture(kinds=DATA_KINDS)), Collect("*"), model, ())
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm), torch.no_grad():
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(RuntimeWarning, match="while a CUDA graph is captured"):
        with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode=MODE):
            output = model(x)
    before = len(heard)
    graph.replay()
    torch.cuda.synchronize()
    exporter.detach()
    torch.testing.assert_close(output, expected)
    assert len(heard) == before
    assert any("while a CUDA graph is captured" in one["why"] for one in exporter.problems)


def test_a_step_that_is_captured_whole(tmp_path: Path) -> None:
    """Forward, backward and optimizer in one graph: the capture works, replays train, and the recording ends well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)
    x, y = torch.randn(3, 4, device=DEVICE), torch.tensor([0, 1, 1], device=DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with pytest.warns(RuntimeWarning, match="while a CUDA graph is captured"):
        with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture()):
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=MODE):
                step()
            before = [one.detach().clone() for one in model.parameters()]
            graph.replay()
            torch.cuda.synchronize()
            assert not all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert sorted({one.global_step for one in trace.messages("weight_updates")}) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's own capture
def test_a_model_that_was_made_a_graph() -> None:
    """A model that ``make_graphed_callables`` took trains as ever; its layers are silent, its weights are recorded.

    Once it is recorded it is too late: modules with hooks are refused.
    """
    x = torch.randn(3, 4, device=DEVICE)
    ends = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(DEVICE)
        torch.cuda.make_graphed_callables(model, (x,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter, heard = tracer.Exporter(capture=Capture(kinds=DATA_KINDS), strict=True), Collect("*")
        if recorded:
            exporter.message_bus.register(heard)
            exporter.set_model(model)
            exporter.set_optimizer(optimizer)
        seen = []
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().sum().backward()
            seen.append(model[0].weight.grad.clone())
            optimizer.step()
        ends.append([*seen, *(one.detach().clone() for one in model.parameters())])
        if recorded:
            with pytest.raises((AssertionError, RuntimeError), match="must not have hooks"):
                torch.cuda.make_graphed_callables(model, (x,))
            assert set(exporter.silent) == {"0", "1", "2"}
        exporter.detach()
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
    gradients = [one.data for one in heard.of("weight_gradients") if one.key == "0"]
    assert all(
        torch.equal(one.cpu(), other.cpu()) for one, other in zip(gradients, seen, strict=True) if one is not None
    )
    assert not heard.of("activations")


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler, and of its compiler's own compiler
@pytest.mark.skipif(not compiled.SUPPORTED, reason="this torch has no operators with effects")
@pytest.mark.parametrize("how", ["aot_eager", "inductor", "reduce-overhead"])
def test_compiled(how: str, tmp_path: Path) -> None:
    """Inside ``torch.compile``: the operators work on device tensors, and the compiled training is not changed.

    CUDA graphs of inductor leave the operators out of what they replay, so each step is told; other kernels are fused
    where tensors are watched, so the last bits are only asked for of kernels that are the same.
    """
    given = batches(6)
    how_made: dict[str, Any] = {"mode": how} if how == "reduce-overhead" else {"backend": how}
    ends: list[list[Tensor]] = []
    model, optimizer = make()
    model.drop.p = 0.0  # inductor draws other numbers than eager kernels
    expected, remove = by_hand(model, optimizer)
    train(model, optimizer, given)
    remove()
    for recorded in (False, True):
        torch._dynamo.reset()
        model, optimizer = make()
        model.drop.p = 0.0
        compiled_model = torch.compile(model, fullgraph=True, **how_made)
        if recorded:
            with tracer.record(tmp_path / "run.zarr", model, optimizer, strict=True, capture=tracer.Capture()):
                train(compiled_model, optimizer, given)
        else:
            train(compiled_model, optimizer, given)
        ends.append(state(model))
    for one, other in zip(*ends, strict=True):
        if how == "aot_eager":
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = of_modules(trace)
    assert found.keys() ^ expected.keys() == set()
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value.cpu(), rtol=1e-2, atol=1e-3, msg=lambda text, key=key: f"{key}: {text}"
        )
