"""Probes of the first datapoints that a model is given: ``trace record --probe N``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer
from tests.observing.recorded import descend
from tracer.observing.probes import ProbePlan
from tracer.recording.recording import Run


class Net(nn.Module):
    """Takes its input by name, counts its calls, and keeps a state; noisy in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.noise = nn.Linear(3, 2), nn.Dropout(0.5)
        self.state: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0, cache: Any = None) -> Tensor:
        self.calls += 1
        self.state = torch.zeros(2) if self.state is None else self.state + 1
        return self.noise(self.inner(x)) * scale + self.state


def train(model: Net, batches: list[Tensor], evaluation: Tensor | None = None, **given: Any) -> list[Tensor]:
    """A step for each batch, the evaluation after the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, x in enumerate(batches):
        optimizer.zero_grad()
        losses.append(model(x=x, scale=2.0, **given).square().mean())
        losses[-1].backward()
        optimizer.step()
        if evaluation is not None and number == 0:
            model.eval()
            with torch.no_grad():
                model(evaluation)
            model.train()
    return [one.detach() for one in losses]


def recorded(path: Path, batches: list[Tensor], evaluation: Tensor | None = None, every: int = 2, **given: Any) -> Net:
    """The same, with a probe of the first five."""
    torch.manual_seed(0)
    bare = Net()
    expected = [*train(bare, batches, evaluation, **given), torch.rand(1)]
    torch.manual_seed(0)
    model = Net()
    optimizer_of = torch.optim.SGD.__init__
    runs: list[Run] = []

    def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        optimizer_of(optimizer, *args, **kwargs)
        capture = tracer.Capture(kinds=["weights", "layer_inputs", "activations", "network_output"])
        context = tracer.record(path, model, optimizer, capture=capture)
        runs.append(context.__enter__())
        runs[0].exporter.probe_first(ProbePlan(5, every=every))
        contexts.append(context)

    contexts: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "__init__", made)
        found = [*train(model, batches, evaluation, **given), torch.rand(1)]
        contexts[0].__exit__(None, None, None)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, model.state_dict().values(), bare.state_dict().values()))
    assert (model.calls, model.training) == (bare.calls, True)
    assert torch.equal(model.state, bare.state)  # type: ignore[arg-type]
    return model


def probed(path: Path) -> tuple[list[int], list[Tensor]]:
    """Of the inner layer, the steps at which it was probed, and its inputs."""
    with tracer.open(path) as trace:
        heard = [*trace.messages(kinds="layer_inputs", modules="inner", tags="probe")]
        assert {one.tag for one in trace.streams} <= {"default", "eval", "probe"}
    return [one.global_step for one in heard], [one.data for one in heard]


def test_the_first_training_data(tmp_path: Path) -> None:
    """Of as many batches as it takes, and always the same; the training, its state and generators are as without."""
    batches = [torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    recorded(tmp_path / "run.zarr", batches)
    steps, inputs = probed(tmp_path / "run.zarr")
    assert steps == [2, 4, 5]
    assert all(torch.equal(one, torch.cat(batches[:2])[:5]) for one in inputs)


def test_the_values_are_those_of_a_pass_in_eval_mode(tmp_path: Path) -> None:
    """With all arguments, and with the weights of then."""
    batches = [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    model = recorded(tmp_path / "run.zarr", batches)
    with tracer.open(tmp_path / "run.zarr") as trace:
        (output,) = trace.messages(kinds="network_output", tags="probe")
    expected = model.eval()(x=batches[0], scale=2.0)
    assert torch.equal(output.data, expected.detach())


@pytest.mark.parametrize(("every", "which"), [(2, "evaluation"), (1, "training")])
def test_an_evaluation_before_the_first_probe(tmp_path: Path, every: int, which: str) -> None:
    """It is what is probed; one that comes later is not, because the inputs stay."""
    batches, evaluation = [torch.full((5, 3), float(number)) for number in range(4)], torch.full((7, 3), 9.0)
    recorded(tmp_path / "run.zarr", batches, evaluation, every)
    expected = evaluation[:5] if which == "evaluation" else batches[0]
    steps, inputs = probed(tmp_path / "run.zarr")
    assert steps == [*range(every, 5, every)]
    assert all(torch.equal(one, expected) for one in inputs)


def test_batches_of_other_shapes_end_the_choice(tmp_path: Path) -> None:
    """There are fewer then."""
    batches = [torch.ones(3, 3), torch.ones(2, 4, 3), torch.ones(3, 3)]
    recorded(tmp_path / "run.zarr", batches)
    assert [one.shape for one in probed(tmp_path / "run.zarr")[1]] == [(3, 3), (3, 3)]


def test_what_a_forward_may_change_is_not_given_to_it_again(tmp_path: Path) -> None:
    """A cache, say: there is no probe, and a note says why."""
    with pytest.warns(RuntimeWarning, match="the model is called with something else than tensors"):
        recorded(tmp_path / "run.zarr", [torch.ones(3, 3)] * 3, cache=object())
    assert probed(tmp_path / "run.zarr") == ([], [])
    with tracer.open(tmp_path / "run.zarr") as trace:
        problems = [note["problem"] for note in trace.notes if "problem" in note]
    assert [(one["what"], "something else than tensors" in one["why"]) for one in problems] == [("probe 'probe'", True)]


def test_a_look_at_the_model_before_the_training_is_no_probe(tmp_path: Path) -> None:
    """A summary on made-up numbers comes before the training; the probe is of the datapoints that are trained on."""
    torch.manual_seed(0)
    model, batches = nn.Linear(3, 2), [torch.randn(4, 3) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    capture = tracer.Capture(kinds=["network_output"])
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture) as run:
        run.exporter.probe_first(ProbePlan(4, every=2))
        model.eval()
        with torch.no_grad():
            model(torch.zeros(4, 3))
        model.train()
        descend(optimizer, lambda x: model(x).square().mean(), batches)
    with tracer.open(tmp_path / "run.zarr") as trace:
        probes = [one.data for one in trace.messages("network_output", tags="probe")]
    assert len(probes) == 2
    assert all(torch.equal(one, model(batches[0]).detach()) for one in probes)


@pytest.mark.parametrize("large", [False, True])
def test_a_graph_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """Edges refer to any node, so all nodes are probed; if those are too many, a note says why there is no probe."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            return torch.zeros(len(nodes), 2).index_add(0, edges[1], self.layer(nodes)[edges[0]])

    if large:
        monkeypatch.setattr("tracer.observing.probes._GRAPH", 100)
    torch.manual_seed(0)
    model, nodes, edges = Network(), torch.randn(30, 3), torch.randint(0, 30, (2, 90))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    warned = pytest.warns(RuntimeWarning, match="no 8 can be cut out") if large else contextlib.nullcontext()
    with (
        warned,
        tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture(kinds=["network_output"])) as run,
    ):
        run.exporter.probe_first(ProbePlan(8, every=2))
        descend(optimizer, lambda _: model(nodes, edges).square().mean(), range(2))
    with tracer.open(tmp_path / "run.zarr") as trace:
        probes = [one.data for one in trace.messages("network_output", tags="probe")]
        notes = str(trace.notes)
    assert len(probes) == (0 if large else 1)
    assert all(torch.equal(one, model(nodes, edges).detach()) for one in probes)
    assert ("no 8 can be cut out" in notes) == large
