"""Which losses an exporter tells, and what the user may log."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tracer
from tests.observing.recorded import attached, data_of, descend, find, mlp, train, watch
from tracer import CaptureError, Collect, Exporter, MessageError
from tracer.memory import SMALLEST, Memory
from tracer.observing.pytorch.tensors import copied

# -- losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [False, True])
@pytest.mark.parametrize("form", ["function", "name", "module"])
def test_a_loss_gives_output_labels_and_value(form: str, keywords: bool) -> None:
    """A loss as a function of torch, its name, or a module publishes what it was given and what it gave.

    Output and labels are told apart by the names of the parameters, not by their order in the call.
    """
    model, module = mlp(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(
        model, optimizer, {"function": F.cross_entropy, "name": "cross_entropy", "module": module}[form]
    )
    loss = module if form == "module" else functools.partial(F.cross_entropy, label_smoothing=0.1)
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    output = model(x)
    value = loss(target=y, input=output) if keywords else loss(output, y)
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
    exporter, heard = attached(Exporter(strict=True), Collect("loss"), model, loss=loss)
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


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        ("thing", object(), "number or an array"),
        ("weights", 1.0, "module topic"),
        *((kind, 1.0, "non-empty string") for kind in ("", None, 3)),
    ],
)
def test_what_cannot_be_logged(kind: Any, value: Any, why: str) -> None:
    """A value that is no number, a kind of modules, and what is no name: the trace of the run could not be opened."""
    exporter, _ = watch(mlp())
    with pytest.raises(MessageError, match=why):
        exporter.log(kind, value)
    exporter.detach()


def test_logged_kinds_can_be_asked_for_live(tmp_path: Path) -> None:
    """A kind of the user's own is announced with ``logs``; then live subscribers may need it, else that is an error."""
    heard = tracer.Collect("lr_value")
    from analyze.metrics.moments import Loss

    with pytest.raises(CaptureError, match="needs lr"):
        tracer.record(
            tmp_path / "a.zarr", nn.Linear(3, 2), receivers=[Loss("lr")], capture=tracer.Capture()
        ).__enter__()
    with tracer.record(
        tmp_path / "b.zarr", nn.Linear(3, 2), receivers=[Loss("lr"), heard], logs="lr", capture=tracer.Capture()
    ) as run:
        run.log("lr", 0.25)
    assert [float(one.data) for one in heard] == [0.25]


# -- what an exporter tells of unusual models and tensors: sparse, narrow, lazy, without values, or ----------


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
            descend(optimizer, lambda _, model=model: F.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 2)), range(2))
        if exporter is not None and heard is not None:
            exporter.detach()
            assert len(heard.of("activations")) == 2 * 3
            assert len(heard.of("weight_updates")) == 2 * 2
        asked.append(mode.asked)
    assert asked[0] == asked[1]


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


# -- an exporter leaves compilers alone: a compiled model trains on, and torch.jit finds what is the----------


# -- torch.jit ------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """Computes its loss itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.inner(x), y)


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_models_are_compiled_for_elsewhere_while_they_are_watched(how: str, tmp_path: Path) -> None:
    """``torch.jit`` finds the model as it is alone, and what is trained afterwards is observed as before."""
    torch.manual_seed(0)
    model, given = WithLoss(), (torch.ones(4, 3), torch.zeros(4, 2))

    def compiled() -> Any:
        return torch.jit.script(model) if how == "script" else torch.jit.trace(model, given)

    alone = compiled()
    exporter, heard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=["mse_loss"])
    found = compiled()
    graphs = [re.sub(r"___torch_mangle_\d+\.", "", str(one.inlined_graph)) for one in (alone, found)]
    assert graphs[0] == graphs[1]
    found.save(str(tmp_path / "model.pt"))
    assert torch.equal(torch.jit.load(str(tmp_path / "model.pt"))(*given), model(*given))
    before = len(heard.of("activations")), len(heard.of("loss"))
    model(*given).backward()
    exporter.detach()
    assert (len(heard.of("activations")), len(heard.of("loss"))) == (before[0] + 1, before[1] + 1)
    assert not hasattr(vars(torch.jit._script)["_script_impl"], "__wrapped__")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_and_classes_are_scripted_while_a_model_is_watched() -> None:
    """Which torch does in libraries that are imported meanwhile: names are found where they are used."""
    exporter, _ = watch(mlp())

    @torch.jit.script
    def times(x: Tensor) -> Tensor:
        return torch.multiply(x, 3)

    def thrice(x: Tensor) -> Tensor:
        return times(x) + 3

    @torch.jit.script
    class Doubling:
        def __init__(self, by: int) -> None:
            self.by = by

        def of(self, x: Tensor) -> Tensor:
            return times(x) * self.by

    assert torch.equal(torch.jit.script(thrice)(torch.ones(2)), torch.full((2,), 6.0))
    assert torch.equal(Doubling(2).of(torch.ones(2)), torch.full((2,), 6.0))
    exporter.detach()


# -- torch.compile --------------------------------------------------------------------------------------------
