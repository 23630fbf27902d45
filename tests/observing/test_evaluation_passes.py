"""Evaluations obey `every`, `start` and `stop`: what is kept is what the whole recording has of these passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer
from tests.observing.recorded import attached, mlp
from tracer import Capture, Collect, Exporter, Message
from tracer.messaging.messages import KINDS
from tracer.observing.passes import Calls

SHARED = 3
"""How often `Shared` calls its layer at most."""


class Shared(nn.Module):
    """Calls one of its layers more or less often, as its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x[0, 0]) % SHARED + 1):
            x = self.inner(x).relu()
        result: Tensor = self.head(x)
        return result


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Batches of which the first number says which one it is."""
    generator = torch.Generator().manual_seed(seed)
    made = [(torch.randn(5, 4, generator=generator), torch.tensor([0, 1, 0, 1, 1])) for _ in range(count)]
    for number, (x, _) in enumerate(made):
        x[0, 0] = number
    return made


def observe(
    capture: Capture | Sequence[Capture],
    run: Callable[[Exporter, nn.Module, nn.Module], None] | None = None,
    model: nn.Module | None = None,
) -> list[Message]:
    """What a training is heard to say that is evaluated over 8 batches after each second of 6 steps."""
    torch.manual_seed(0)
    model = model or Shared()
    loss, heard = nn.CrossEntropyLoss(), Collect("*")
    exporter = Exporter(capture=capture, strict=True)
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_loss(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter.set_optimizer(optimizer)
    for step, (x, labels) in enumerate(batches(6)):
        model.train()
        optimizer.zero_grad()
        loss(model(x), labels).backward()
        optimizer.step()
        if step % 2:
            model.eval()
            (run or evaluate)(exporter, model, loss)
    exporter.finish()
    exporter.detach()
    return heard.messages


def evaluate(exporter: Exporter, model: nn.Module, loss: nn.Module) -> None:
    """An evaluation as most loops have it."""
    with torch.no_grad():
        for x, labels in batches(8, seed=1):
            loss(model(x), labels)


def row(message: Message) -> tuple[Any, ...]:
    """A message as plain values."""
    data = None if message.data is None else message.data.tolist()
    return (
        message.kind,
        message.key,
        message.global_step,
        message.epoch,
        message.tag,
        message.call,
        message.leaf,
        data,
    )


def aside(messages: Sequence[Message], kind: str | None = None) -> list[Message]:
    """Those of passes that are not of the training."""
    return [one for one in messages if one.tag != "default" and kind in (None, one.kind)]


def pass_of(message: Message) -> int:
    """In which pass of its evaluation a message of `evaluate` was observed, worked out from the numbers of calls."""
    if message.key != "inner":
        return message.call  # once in each
    calls = [number for number in range(8) for _ in range(number % SHARED + 1)]
    return calls[message.call]


@pytest.mark.parametrize(("every", "start", "stop"), [(3, 0, None), (5, 3, 6), (2, 0, 4), (1, 3, None), (100, 0, None)])
def test_what_is_kept_is_what_the_whole_recording_has_of_these_passes(every: int, start: int, stop: int | None) -> None:
    """The passes 0, every, … of each evaluation in the range: numbers of calls, values and their order are the same."""
    whole = aside(observe(Capture(kinds=KINDS)))
    kept = aside(observe(Capture(kinds=KINDS, every=every, start=start, stop=stop)))
    steps = [step for step in (2, 4, 6) if start <= step and (stop is None or step < stop)]
    expected = [one for one in whole if one.global_step in steps and pass_of(one) % every == 0]
    assert [*map(row, kept)] == [*map(row, expected)]
    passes = len(range(0, 8, every)) * len(steps)
    for kind in ("input_data", "network_output", "input_labels", "loss_terms", "loss"):
        assert len(aside(kept, kind)) == passes, kind
    assert {one.kind for one in whole} == {
        *("input_data", "network_output", "input_labels", "loss_terms", "loss", "activations", "layer_inputs"),
    }


def test_several_captures_have_the_numbers_of_one() -> None:
    """A loss that is kept in each pass and an output that is kept now and then have the same number in a pass."""
    captures = [
        Capture(kinds=["loss"]),
        Capture(kinds=["network_output", "input_labels"], every=4),
        Capture(kinds=["activations"], modules=["inner"], every=3),
        Capture(kinds=["activations"], modules=["head"], every=7),
    ]
    whole = [*map(row, aside(observe(Capture(kinds=KINDS))))]
    kept = aside(observe(captures))
    assert all(row(one) in whole for one in kept)
    assert [one.call for one in aside(kept, "loss")] == [*range(8)] * 3
    for kind in ("network_output", "input_labels"):
        assert [one.call for one in aside(kept, kind)] == [0, 4] * 3
    of = {key: [one for one in aside(kept, "activations") if one.key == key] for key in ("inner", "head")}
    assert {pass_of(one) for one in of["inner"]} == {0, 3, 6}
    assert [one.call for one in of["head"]] == [0, 7] * 3


def test_rows_thin_out_evaluations_too() -> None:
    """Of each batch that is kept, the first rows."""
    kept = aside(observe(Capture(rows=2, every=4)))
    for kind in ("input_data", "network_output", "input_labels", "activations"):
        assert {len(one.data) for one in aside(kept, kind) if one.data is not None} == {2}, kind


def test_tags_are_evaluations_of_their_own() -> None:
    """Two evaluations between two steps are one if they have one tag, else each has its first pass."""

    def both(tags: Sequence[str]) -> list[tuple[str, int]]:
        def run(exporter: Exporter, model: nn.Module, loss: nn.Module) -> None:
            for tag in tags:
                with exporter.tag(tag), torch.no_grad():
                    for x, _ in batches(3):
                        model(x)

        kept = aside(observe(Capture(kinds=["input_data"], every=2, start=6), run))
        return [(one.tag, one.call) for one in kept]

    assert both(["valid", "test"]) == [("valid", 0), ("valid", 2), ("test", 0), ("test", 2)]
    assert both(["valid", "valid"]) == [("valid", 0), ("valid", 2), ("valid", 4)]


def test_a_model_that_is_called_by_its_parts() -> None:
    """Outside of the model's forward, the calls of a module are its passes."""

    def run(exporter: Exporter, model: nn.Module, loss: nn.Module) -> None:
        with torch.no_grad():
            for x, labels in batches(8):
                loss(model.head(model.inner(x).relu()), labels)

    whole, kept = (aside(observe(Capture(kinds=KINDS, every=every), run)) for every in (1, 3))
    assert [*map(row, kept)] == [row(one) for one in whole if one.call % 3 == 0]
    assert {one.kind for one in kept} >= {"activations", "network_output", "loss"}


def test_gradients_of_passes_aside() -> None:
    """Of a pass with a tag and gradients they are kept as all else, also if the backward comes after later passes."""

    def run(exporter: Exporter, model: nn.Module, loss: nn.Module) -> None:
        with exporter.tag("attack"):
            losses = [loss(model(x), labels) for x, labels in batches(8)]
            for one in reversed(losses):
                one.backward()

    kinds = ["activations", "layer_gradients"]
    whole, kept = (aside(observe(Capture(kinds=kinds, every=every, start=6), run)) for every in (1, 3))
    assert sorted(map(row, kept)) == sorted(row(one) for one in whole if pass_of(one) % 3 == 0)
    assert [one.call for one in aside(kept, "layer_gradients") if one.key == "head"] == [6, 3, 0]


def test_probes_and_logged_values_have_their_own_times() -> None:
    """Neither is thinned out by `every`; `start` and `stop` hold for values that are logged in an evaluation."""

    def run(exporter: Exporter, model: nn.Module, loss: nn.Module) -> None:
        with exporter.tag("valid"), torch.no_grad():
            for x, _ in batches(8):
                model(x)
            exporter.log("loss", 0.5)

    model = Shared()
    exporter, heard = attached(Exporter(capture=Capture(every=3, start=2, stop=6), strict=True), Collect("*"), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter.set_optimizer(optimizer)
    x = batches(1)[0][0]
    exporter.probe("probe", x, every=2)
    for step in range(8):
        model(x).sum().backward()
        optimizer.step()
        if step % 2:
            run(exporter, model, model)
    exporter.detach()
    of = {tag: [one for one in heard.messages if one.tag == tag] for tag in ("probe", "valid", "default")}
    assert [one.global_step for one in of["probe"] if one.kind == "network_output"] == [0, 2, 4, 6, 8]
    assert [one.global_step for one in of["valid"] if one.kind == "loss"] == [2, 4]
    assert {one.global_step for one in of["default"] if one.kind == "activations"} == {3}


def test_passes_that_nobody_records_reach_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 passes with every=4, the hooks of modules look at 2; of an evaluation out of the range, at none."""
    seen: list[str] = []
    after = Calls.after

    def counted(self: Calls, path: str, *args: Any) -> None:
        if self.gate.passes.now.tag == "eval":
            seen.append(path)
        after(self, path, *args)

    monkeypatch.setattr(Calls, "after", counted)
    observe(Capture(kinds=["activations"], every=4, start=4, stop=6))
    assert seen.count("head") == 2
    assert seen.count("inner") == 1 + 2  # calls in the passes 0 and 4


def test_compiled_evaluations() -> None:
    """A compiled model has the same numbers and passes, and one graph for those that are kept and all others."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(every: int) -> list[Message]:
        torch._dynamo.reset()
        graphs.clear()
        model = mlp()
        exporter, heard = attached(
            Exporter(capture=Capture(kinds=["activations"], every=every), strict=True), Collect("*"), model
        )
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.manual_seed(0)
        model.eval()
        with torch.no_grad():
            for _ in range(7):
                compiled(torch.randn(5, 3))
        exporter.detach()
        return heard.messages

    whole, count = run(1), len(graphs)
    kept = run(3)
    assert len(graphs) == count > 0
    assert {one.call for one in kept} == {0, 3, 6}
    assert [one.call for one in kept] == [one.call for one in whole if one.call % 3 == 0]


def test_all_passes_of_an_evaluation_take_the_fast_path_or_none_does() -> None:
    """Where hooks switch torch's fast path off, they do so in passes between, whose results are of the same making."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 2))
    x = torch.randn(2, 3, 8)

    def run(every: int) -> tuple[list[Tensor], list[tuple[str | None, int]]]:
        capture = Capture(kinds=["activations"], tags=["eval"], every=every)
        exporter, heard = attached(Exporter(capture=capture), Collect("*"), model)
        model.eval()
        with torch.no_grad():
            outputs = [model(x) for _ in range(5)]
        exporter.detach()
        return outputs, [(one.key, one.call) for one in heard.messages]

    with pytest.warns(RuntimeWarning, match="fast path"):
        _, whole = run(1)
    with pytest.warns(RuntimeWarning, match="fast path"):
        outputs, kept = run(2)
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    assert kept == [one for one in whole if one[1] % 2 == 0]
    assert ("0.linear1", 4) in kept


def test_a_trace_and_a_replay_of_it(tmp_path: Any) -> None:
    """What is recorded of an evaluation is what a live metric heard of it."""
    model, loss = Shared(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = Collect("network_output", "loss")
    captures = [Capture(kinds=["loss"]), Capture(every=4)]
    path = tmp_path / "run.zarr"
    with tracer.record(path, model, optimizer, loss=loss, capture=captures, receivers=[live], strict=True):
        x, labels = batches(1)[0]
        loss(model(x), labels).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, labels in batches(10):
                loss(model(x), labels)
    again = Collect("network_output", "loss")
    tracer.replay(path, again)
    assert [*map(row, again.messages)] == [*map(row, live.messages)]
    assert [one.call for one in aside(again.messages, "network_output")] == [0, 4, 8]
    assert [one.call for one in aside(again.messages, "loss")] == [*range(10)]
