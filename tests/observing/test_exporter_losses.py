"""Which losses an exporter tells, and what the user may log."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tracer
from tests.observing.recorded import data_of, mlp, watch
from tracer import CaptureError, Collect, Exporter, MessageError

# -- losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["function", "name", "module"])
def test_a_loss_gives_output_labels_and_value(form: str) -> None:
    """A loss as a function of torch, its name, or a module publishes what it was given and what it gave."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = nn.CrossEntropyLoss()
    exporter, heard = watch(
        model, optimizer, {"function": F.cross_entropy, "name": "cross_entropy", "module": module}[form]
    )
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    output = model(x)
    value = module(output, y) if form == "module" else F.cross_entropy(input=output, target=y, label_smoothing=0.1)
    value.backward()
    optimizer.step()
    exporter.detach()
    assert [torch.equal(one, output) for one in data_of(heard, "network_output")] == [True]
    assert [torch.equal(one, y) for one in data_of(heard, "input_labels")] == [True]
    assert [float(one) for one in data_of(heard, "loss")] == [float(value.detach())]
    assert F.cross_entropy.__module__ == "torch.nn.functional"


def test_a_foreign_loss_is_refused_with_a_way_out() -> None:
    """A function of another place cannot be seen, and the error says what serves instead."""
    for foreign in (lambda x, y: x, torch.sum, F.relu, "relu"):
        with pytest.raises(CaptureError, match=r"log\('loss', value\)"):
            Exporter().set_loss(foreign)


def test_a_patched_loss_still_copies_and_pickles() -> None:
    """What holds a watched loss function can be copied and pickled, and gets the function itself where it is loaded."""
    original = F.cross_entropy
    exporter, _ = watch(mlp(), None, F.cross_entropy)
    copied, packed = copy.deepcopy({"f": F.cross_entropy}), pickle.dumps(F.cross_entropy)
    assert b"tracer" not in packed
    exporter.detach()
    assert pickle.loads(packed) is original
    assert float(copied["f"](torch.zeros(1, 2), torch.tensor([0]))) == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("first", [0, 1])
def test_two_exporters_of_one_loss_leave_in_any_order(first: int) -> None:
    """After two exporters of the same loss function are gone, it is torch's own again, whoever left first."""
    original = F.mse_loss
    both = [watch(mlp(), None, "mse_loss") for _ in range(2)]
    both[first][0].detach()
    model = both[1 - first][0].model
    F.mse_loss(model(torch.randn(2, 3)), torch.zeros(2, 2)).backward()
    assert len(both[1 - first][1].of("loss")) == 1
    assert len(both[first][1].of("loss")) == 0
    both[1 - first][0].detach()
    assert F.mse_loss is original


def test_a_loss_that_is_named_late_may_be_a_metric_of_the_step_before() -> None:
    """What the network gave in a step that has ended is looked at again, and begins no step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    for _ in range(2):
        output = model(torch.ones(5, 3))
        output.sum().backward()
        optimizer.step()
    exporter.set_loss(F.mse_loss)
    F.mse_loss(output, torch.zeros_like(output))
    F.mse_loss(model(torch.ones(5, 3)), torch.zeros_like(output)).backward()
    optimizer.step()
    exporter.detach()
    assert [(one.global_step, one.tag, one.call) for one in heard.of("loss")] == [(2, "eval", 0), (2, "default", 0)]
    assert exporter.global_step == 3


def test_a_backward_is_one_where_torch_calls_it_again() -> None:
    """While there is a default device, and for subclasses of tensors, torch calls ``backward`` from within itself."""
    model = mlp()
    exporter, heard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    exporter.watch_backward()
    for number, mode in enumerate((contextlib.nullcontext(), torch.device("cpu")), 1):
        with mode:
            model(torch.ones(4, 3)).sum().backward()
        assert len(heard.of("loss")) == number
    exporter.detach()


def test_stand_ins_for_loss_functions_are_as_functions() -> None:
    """They bind as methods, and have the signature, the name and the module of what they stand in for."""
    original = F.mse_loss
    model = mlp()
    exporter, heard = watch(model, loss=["mse_loss"])
    assert F.mse_loss is not original
    assert inspect.signature(F.mse_loss) == inspect.signature(original)
    assert (F.mse_loss.__name__, F.mse_loss.__module__) == (original.__name__, original.__module__)

    class Pair:
        loss = F.mse_loss
        static = staticmethod(F.mse_loss)

    with pytest.raises(TypeError):  # with itself as the first of three tensors
        Pair().loss(torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2), "mean", None, 1)
    out = model(torch.ones(4, 3))
    assert torch.equal(Pair().static(out, torch.ones(4, 2)), original(out, torch.ones(4, 2)))
    exporter.detach()
    assert F.mse_loss is original
    assert [(one.tag, one.leaf) for one in heard.of("loss_terms")] == [("default", "mse_loss")]
    assert not heard.of("loss")  # nothing was differentiated


def test_an_evaluation_between_forward_and_loss_does_not_retag_the_loss() -> None:
    """A training loss stays a training loss, whatever was evaluated between the forward and it."""
    model, loss = nn.Linear(3, 2), nn.MSELoss()
    exporter, heard = Exporter(strict=True), Collect("loss")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_loss(loss)
    output = model(torch.ones(4, 3))
    model.eval()
    with torch.no_grad():
        loss(model(torch.zeros(2, 3)), torch.zeros(2, 2))
    model.train()
    loss(output, torch.zeros(4, 2)).backward()
    exporter.detach()
    assert [one.tag for one in heard] == ["eval", "default"]


def test_a_loss_that_is_never_called_is_told(tmp_path: Path) -> None:
    """A loss function that the loop calls by another name is not seen; the trace says so."""
    mine = F.mse_loss
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, loss=F.mse_loss, capture=tracer.Capture()):
        mine(model(torch.ones(4, 3)), torch.zeros(4, 2)).backward()
        optimizer.step()
    assert any(note.get("problem", {}).get("what") == "loss" for note in tracer.open(tmp_path / "run.zarr").notes)


@pytest.mark.parametrize("form", ["function", "module"])
def test_a_loss_called_by_keywords_in_any_order(form: str) -> None:
    """Output and labels are told apart by the names of the parameters, not by their order in the call."""
    model, criterion = nn.Linear(3, 2), nn.CrossEntropyLoss()
    exporter, heard = Exporter(strict=True), Collect("network_output", "input_labels")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_loss(F.cross_entropy if form == "function" else criterion)
    y = torch.tensor([0, 1, 1, 0])
    loss = F.cross_entropy if form == "function" else criterion
    loss(target=y, input=model(torch.ones(4, 3))).backward()
    exporter.detach()
    assert [(one.kind, one.data.dtype, tuple(one.data.shape)) for one in heard] == [
        ("network_output", torch.float32, (4, 2)),
        ("input_labels", torch.int64, (4,)),
    ]


def test_a_loss_that_another_exporter_watches() -> None:
    """Torch's own function, and what stands in for it meanwhile, are the loss of each."""
    original = F.cross_entropy
    first = Exporter()
    first.message_bus.register(Collect("loss"))
    first.set_model(mlp())
    first.set_loss(original)
    stand_in = F.cross_entropy
    assert stand_in is not original
    for loss in (original, stand_in):
        model, heard = mlp(), Collect("loss_terms")
        other = Exporter()
        other.message_bus.register(heard)
        other.set_model(model)
        other.set_loss(loss)
        F.cross_entropy(model(torch.randn(2, 3)), torch.tensor([0, 1]))
        other.detach()
        assert len(heard.of("loss_terms")) == 1
    first.detach()
    assert F.cross_entropy is original


# -- what the user says ---------------------------------------------------------------------------------------


def test_logged_values_belong_to_the_open_or_the_last_step() -> None:
    """A value logged before or right after `optimizer.step` carries the same step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    for step in range(3):
        model(torch.randn(5, 3)).sum().backward()
        exporter.log("before", step)
        optimizer.step()
        exporter.log("after", [step, 2.5])
    exporter.log("loss", torch.tensor(1.0, requires_grad=True))
    exporter.detach()
    for kind in ("before", "after"):
        assert [(one.global_step, one.call) for one in heard.of(kind)] == [(0, 0), (1, 0), (2, 0)]
    assert [value.tolist() for value in data_of(heard, "after")] == [[0.0, 2.5], [1.0, 2.5], [2.0, 2.5]]
    assert [one.global_step for one in heard.of("loss")] == [2]


def test_logged_values_have_identities() -> None:
    """However often and wherever in a step a value is logged, no two messages have the same step and call."""
    model, loss = mlp(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer, loss)
    for _ in range(3):
        exporter.log("rate", 0.1)
        value = loss(model(torch.randn(5, 3)), torch.zeros(5, 2))
        value.backward()
        exporter.log("rate", 0.2)
        optimizer.step()
        exporter.log("rate", 0.3)
        exporter.log("loss", value)
    exporter.detach()
    for kind in ("rate", "loss"):
        identities = [(one.global_step, one.call) for one in heard.of(kind)]
        # the loss is what is logged, and not also what backward was called on
        assert len(set(identities)) == len(identities) == (9 if kind == "rate" else 3)


@pytest.mark.parametrize("told", [True, False])
def test_epochs_that_nobody_ends_are_noted(told: bool, tmp_path: Path) -> None:
    """A loop that calls no `epoch_finished` has one epoch, and the trace says why."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture()) as run:
        for _ in range(2):
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
        if told:
            run.epoch_finished()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert ["run.epoch_finished()" in str(note) for note in trace.notes] == ([] if told else [True])


def test_what_cannot_be_logged() -> None:
    """A value that is no number, and a kind of modules, are the caller's errors."""
    exporter, _ = watch(mlp())
    with pytest.raises(MessageError, match="number or an array"):
        exporter.log("thing", object())
    with pytest.raises(MessageError, match="module topic"):
        exporter.log("weights", 1.0)
    exporter.detach()


def test_logged_kinds_can_be_asked_for_live(tmp_path: Path) -> None:
    """A kind of the user's own is announced with ``logs``; then live subscribers may need it, else that is an error."""
    heard = tracer.Collect("lr_value")
    from analyze import Loss

    with pytest.raises(CaptureError, match="needs lr"):
        tracer.record(
            tmp_path / "a.zarr", nn.Linear(3, 2), receivers=[Loss("lr")], capture=tracer.Capture()
        ).__enter__()
    with tracer.record(
        tmp_path / "b.zarr", nn.Linear(3, 2), receivers=[Loss("lr"), heard], logs="lr", capture=tracer.Capture()
    ) as run:
        run.log("lr", 0.25)
    assert [float(one.data) for one in heard] == [0.25]


@pytest.mark.parametrize("kind", ["", None, 3])
def test_a_kind_that_is_no_name_is_refused(kind: Any) -> None:
    """Where it is logged; the trace of the run could not be opened."""
    exporter = Exporter()
    exporter.set_model(mlp())
    with pytest.raises(MessageError, match="non-empty string"):
        exporter.log(kind, 1.0)
    exporter.detach()
