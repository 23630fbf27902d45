"""What is recorded of a training whose model is in eval mode, and of evaluations with gradients.

The oracle is the same training in train mode: the mode changes nothing in a model without dropout and batch
normalisation, so all messages are the same but for the event that tells the mode. For evaluations it is the same
evaluation under ``torch.no_grad()``. Then: what is recorded of structures, and of forwards that call no hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tracer
from tests.endings import same
from tests.observing.oracles import OF_CALLS, batches, by_place, equal, mlp, simple, situation, unchanged, witnessed
from tests.observing.recorded import data_of, descend, find, only, problems, sgd
from tracer import Collect, Exporter
from tracer.messaging.messages import KINDS
from tracer.observing.guesses.optimizers import skipped_inside
from tracereel.main import main


def rows(heard: Collect, without: Sequence[str] = ("eval_mode",)) -> list[tuple[Any, ...]]:
    """All messages with their data, in the order of step, tag, kind and call."""
    found = [
        (one.global_step, one.tag, one.kind, one.key or "", one.leaf, one.call, str(one.data))
        for one in heard
        if one.kind not in without
    ]
    return sorted(found)


def accumulating(model: nn.Module, optimizer: Any) -> None:
    """Two backwards a step."""
    for x in batches(4):
        model(x).square().sum().backward()
        model(-x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def contrasting(model: nn.Module, optimizer: Any) -> None:
    """Two forwards, of which the sum is differentiated."""
    for x in batches(3):
        optimizer.zero_grad()
        first = model(x).square().sum()
        (first - model(2 * x).sum()).backward()
        optimizer.step()


def with_closure(model: nn.Module, optimizer: Any) -> None:
    """The forward is inside the optimizer's step."""
    (x,) = batches(1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def by_hand(model: nn.Module, optimizer: Any) -> None:
    """Gradients from ``autograd.grad``."""
    for x in batches(3):
        parameters = list(model.parameters())
        for one, gradient in zip(parameters, torch.autograd.grad(model(x).square().sum(), parameters), strict=True):
            one.grad = gradient
        optimizer.step()


def checkpointed(model: nn.Module, optimizer: Any) -> None:
    """The model in a reentrant checkpoint, whose first forward has no gradients."""
    descend(optimizer, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum(), batches(3))


def lbfgs(model: nn.Module) -> torch.optim.LBFGS:
    """A few evaluations of the closure each step."""
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("train", [simple, accumulating, contrasting, with_closure, by_hand, checkpointed])
@pytest.mark.parametrize("kinds", [tuple(KINDS), ("activations", "layer_inputs", "weights", "eval_mode")])
def test_training_in_eval_mode(train: Callable[[nn.Module, Any], None], kinds: Sequence[str]) -> None:
    """Passes that are differentiated are of the training, whatever the mode is; the mode is told at each step."""
    optimizer = {"optimizer": lbfgs} if train is with_closure else {}
    _, _, expected = unchanged(mlp, train, kinds=kinds, **optimizer)
    _, exporter, heard = unchanged(lambda: mlp().eval(), train, kinds=kinds, **optimizer)
    assert rows(heard) == rows(expected)
    assert [one.global_step for one in heard.of("eval_mode")] == [*range(exporter.global_step)]
    assert not expected.of("eval_mode")
    (noted,) = (one["why"] for one in exporter.problems if one["what"] == "the mode of the model")
    assert noted.startswith("step 0 was trained while the model was in eval() mode")


@pytest.mark.parametrize("evaluating_first", [True, False])
@pytest.mark.parametrize("eval_mode", [True, False])
def test_evaluations_with_gradients(evaluating_first: bool, eval_mode: bool) -> None:
    """Without a backward they are evaluations, also where the training is in eval mode, and where outputs live on."""
    kept: list[Tensor] = []

    def loop(context: Callable[[], Any]) -> Callable[[nn.Module, Any], None]:
        def train(model: nn.Module, optimizer: Any) -> None:
            for x in batches(3):
                for evaluated in (True, False) if evaluating_first else (False, True):
                    model.train(not evaluated and not eval_mode)
                    if evaluated:
                        with context():
                            for _ in range(2):
                                model(x + 1)
                            kept.append(model(x - 1))
                    else:
                        optimizer.zero_grad()
                        model(x).square().sum().backward()
                        optimizer.step()

        return train

    _, _, expected = unchanged(mlp, loop(torch.no_grad))
    _, _, heard = unchanged(mlp, loop(contextlib.nullcontext))
    assert rows(heard) == rows(expected)
    assert len(heard.of("eval_mode")) == (3 if eval_mode else 0)


def test_an_evaluation_between_backward_and_step() -> None:
    """A pass without gradients there changes no message of the training."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            with torch.no_grad():
                model(x + 1)
            optimizer.step()

    situation(mlp, train)


def layered(probability: float = 0.5) -> nn.Module:
    """A network with a dropout and no batch normalisation."""
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(probability), nn.Linear(8, 4))


def frozen() -> nn.Module:
    """A network in train mode whose batch normalisation is in eval mode."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].eval()
    return model


def one_loss(model: nn.Module, x: Tensor) -> None:
    """A loss for each pass."""
    for rows in x.split(2):
        F.mse_loss(model(rows), torch.zeros(len(rows), 4))


def masks(model: nn.Module, x: Tensor) -> None:
    """The loss of the mean over several dropout masks."""
    F.mse_loss(torch.stack([model(x) for _ in range(4)]).mean(0), torch.zeros(len(x), 4))


def statistics(model: nn.Module, x: Tensor) -> None:
    """Passes without a loss, as those that recompute the statistics of a batch normalisation."""
    for _ in range(3):
        model(x)


def judged(model: nn.Module, x: Tensor) -> None:
    """The loss of a pass in eval mode, after another in train mode."""
    model(x)
    model.eval()
    F.mse_loss(model(x), torch.zeros(len(x), 4))
    model.train()


@pytest.mark.parametrize(
    ("make", "evaluate", "told"),
    [
        (layered, one_loss, [1, 2, 3]),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), one_loss, [1, 2, 3]),
        (lambda: layered(0.0), one_loss, []),
        (frozen, one_loss, []),
        (layered, masks, []),
        (layered, statistics, []),
        (layered, judged, []),
    ],
)
def test_an_evaluation_in_train_mode(
    make: Callable[[], nn.Module], evaluate: Callable[[nn.Module, Tensor], None], told: Sequence[int]
) -> None:
    """It is told once a step, where the loss of one pass depends on the mode."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            F.mse_loss(model(x), torch.zeros(8, 4)).backward()
            optimizer.step()
            with torch.no_grad():
                evaluate(model, x)

    _, _, heard = unchanged(make, train, kinds=("train_mode", "loss"), loss=F.mse_loss)
    assert [(one.global_step, one.tag) for one in heard.of("train_mode")] == [(step, "eval") for step in told]


# -- what is recorded of inputs and outputs that are structures, or of which only some are used --------------


@pytest.mark.parametrize(("cls", "names"), [(nn.LSTM, ["0", "1.0", "1.1"]), (nn.GRU, ["0", "1"])])
def test_lstm_and_gru(cls: Any, names: list[str]) -> None:
    """nn.LSTM, nn.GRU: each leaf of the output with its path, value and gradient, as autograd has them."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2, (2, 5, 3)):
            optimizer.zero_grad()
            output, state = model(x)
            parts = [output, *(state if isinstance(state, tuple) else [state])]
            sum((part.square() * (number + 1)).sum() for number, part in enumerate(parts)).backward()
            optimizer.step()

    _, _, heard = situation(lambda: cls(3, 4, batch_first=True), train)
    for kind in ("activations", "layer_gradients"):
        assert sorted(one.leaf for one in find(heard, kind, "", global_step=1)) == names


class Fields(NamedTuple):
    """A named tuple of a tensor and a number."""

    score: Tensor
    count: int


@dataclasses.dataclass
class Answer:
    """A dataclass of nested structures."""

    logits: Tensor
    rest: tuple[Any, ...]
    nothing: None = None


FORMS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "tuple": (lambda y: (y, y * 2), ["0", "1"]),
    "list": (lambda y: [y, None, y * 2], ["0", "2"]),
    "dict": (lambda y: {"a": y, "b": 3, "c": y * 2}, ["a", "c"]),
    "named tuple": (lambda y: (Fields(y, 3), y * 2), ["0.score", "1"]),
    "dataclass": (lambda y: Answer(y, ({"deep": [y * 2]}, 1)), ["logits", "rest.0.deep.0"]),
    "nested": (lambda y: ((y, (None, [y * 2])), {"n": 1}), ["0.0", "0.1.1.0"]),
    "integers": (lambda y: (y, (y * 2).long()), ["0", "1"]),
}


class Shaped(nn.Module):
    """Gives its linear layer's output in a form, and takes a mask by keyword."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, flag: bool = False) -> Any:
        return FORMS[self.form][0](self.layer(x if mask is None else x * mask))


@pytest.mark.parametrize("form", FORMS)
def test_structured_outputs_and_keyword_inputs(form: str) -> None:
    """tuple/list/dict/dataclass/nested/None/int outputs, kwargs: each tensor with its path, value and gradient."""
    from tracer.observing.pytorch.tensors import leaves

    x, mask = batches(1)[0], torch.tensor([1.0, 0.0, 1.0])
    names = FORMS[form][1]

    def train(model: nn.Module, optimizer: Any) -> None:
        parts = dict(leaves(model(x, mask=mask, flag=True)))
        assert list(parts) == names
        sum((part * 3).sum() for part in parts.values() if part.requires_grad).backward()
        optimizer.step()

    _, _, heard = unchanged(lambda: Shaped(form), train, modules="*")
    for kind, module in (("activations", ""), ("network_output", None)):
        assert [one.leaf for one in find(heard, kind, module)] == names
    y = F.linear(x * mask, only(heard, "weights", "layer"), only(heard, "biases", "layer"))
    second = y * 2
    assert same(only(heard, "activations", "", leaf=names[0]), y)
    assert same(only(heard, "activations", "", leaf=names[1]), second.long() if form == "integers" else second)
    # the first leaf is the tensor from which the second is made, so it has the gradient of both uses
    both = form != "integers"
    expected = {
        name: torch.full((4, 2), value) for name, value in zip(names, (9.0, 3.0) if both else (3.0,), strict=False)
    }
    gradients = {one.leaf: one.data for one in find(heard, "layer_gradients", "")}
    assert gradients.keys() == expected.keys()
    assert all(same(gradients[name], value) for name, value in expected.items() if gradients[name] is not None)
    for kind, module in (("layer_inputs", ""), ("input_data", None)):
        shapes = [(one.leaf, tuple(one.data.shape)) for one in find(heard, kind, module)]
        assert shapes == [("0", (4, 3)), ("mask", (3,))]
    assert same(only(heard, "layer_inputs", "", leaf="mask"), mask)
    assert same(only(heard, "weight_gradients", "layer"), expected[names[0]].T @ (x * mask))
    assert same(only(heard, "bias_gradients", "layer"), expected[names[0]].sum(0))


class Splitting(nn.Module):
    """Two parts of one result, which one node of the graph makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x).split(2, 1)


def test_an_output_that_nothing_uses() -> None:
    """Of two outputs of one node, the one that the loss does not depend on has no gradient; the other has its own."""

    def train(model: nn.Module, optimizer: Any) -> None:
        descend(optimizer, lambda x: model(x)[1].square().sum(), batches(2))

    _, exporter, heard = unchanged(Splitting, train)
    assert not exporter.problems
    assert [one.leaf for one in find(heard, "activations", "")] == []  # it has no parameters, and is no leaf
    _, exporter, heard = situation(Splitting, train, modules="*")
    assert not exporter.problems
    assert [one.leaf for one in find(heard, "activations", "")] == ["0", "1"] * 2
    assert [one.leaf for one in find(heard, "layer_gradients", "")] == ["1"] * 2


class Opaque:
    """An output that is no structure."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(nn.Module):
    """Gives an opaque output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(self.layer(x))


def test_an_output_that_is_not_looked_into_is_told() -> None:
    """An output of a class of the user's own has no known leaves; the trace says so, the layers inside are told."""

    def train(model: nn.Module, optimizer: Any) -> None:
        model(batches(1)[0]).value.square().sum().backward()
        optimizer.step()

    with pytest.warns(RuntimeWarning, match="no object of the class Opaque is looked into"):
        _, _, heard = situation(Hiding, train, modules="*", strict=False)
    assert not find(heard, "activations", "")
    assert find(heard, "activations", "layer")


def test_smaller_last_batch() -> None:
    """A smaller last batch is recorded in its own shape, equal to the forward of its weights."""

    def train(model: nn.Module, optimizer: Any) -> None:
        descend(optimizer, lambda size: model(batches(1, (size, 3))[0]).square().sum(), (4, 4, 1))

    _, _, heard = situation(lambda: nn.Linear(3, 2), train)
    assert [len(one) for one in data_of(heard, "activations", "")] == [4, 4, 1]


# -- what is recorded of forwards that call no hooks, or that are none of the training -----------------------


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

    def plainly() -> nn.Module:
        layer = nn.Sequential(nn.Linear(3, 3))
        return layer if whole else nn.Sequential(layer, nn.Linear(3, 2))

    path = tmp_path / "run.zarr"
    name = "0" if whole else "0.0"
    outer = ("input_data", "network_output") if whole else ()
    with pytest.warns(RuntimeWarning, match="a ScriptModule takes no hooks"):
        _, _, heard = situation(
            make, simple, path=path, strict=False, plain=(plainly, simple),
            but=lambda place: (place[0] in OF_CALLS and place[1] == name) or place[0] in outer,
        )  # fmt: skip
    for kind in OF_CALLS:
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

    _, exporter, heard = situation(Direct, simple, path=tmp_path / "run.zarr")
    assert not exporter.problems
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [note["silent"] for note in trace.notes if "silent" in note] == [["unseen"]]
    info = CliRunner().invoke(main, ["info", str(tmp_path / "run.zarr")])
    assert re.search(r"silent +never called, so nothing was seen of them: unseen\n", info.output), info.output
    for kind in ("layer_inputs", "activations", "layer_gradients"):
        assert {one.key for one in heard.of(kind)} == {"seen"}
    assert {one.key for one in heard.of("weight_gradients")} == {"seen", "unseen"}


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

    def doubled(model: nn.Module, optimizer: Any) -> None:
        descend(optimizer, lambda x: (model(x) * 2).square().sum(), batches(2))

    with pytest.warns(RuntimeWarning, match="while a CUDA graph is captured"):
        _, exporter, heard = unchanged(lambda: mlp().append(Moving()), train, strict=False)
    assert [one.global_step for one in find(heard, "activations", "3")] == [0]
    assert "activations of '3': while a CUDA graph is captured" in problems(exporter)
    recorded = {place: one for place, one in by_place(heard).items() if place[1] not in ("3", None)}
    seen = witnessed(mlp, doubled)
    equal(recorded, {place: one for place, one in seen.items() if place[1] is not None})
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

    situation(mlp, train, calls=True)  # the refusal leaves the training and the recording as they are
