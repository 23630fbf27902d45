"""What is recorded of parameters that are computed, frozen or replaced, and of modules that come and go."""

from __future__ import annotations

import copy
import functools
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests import processes
from tests.endings import same
from tests.observing.oracles import OF_CALLS, batches, by_place, equal, mlp, simple, situation, unchanged, witnessed
from tests.observing.recorded import data_of, find, only, sgd, watch
from tests.recording.launching.recorded_programs import ENVIRONMENT, of, record, run, script, values
from tracer import Capture, Collect, Exporter, Message, walking
from tracer.messaging.messages import DATA_KINDS


def of_made(place: tuple[Any, ...]) -> bool:
    """Whether something is of a weight that a parametrization makes, or of the modules that make it."""
    return place[:2] in (("weights", "0"), ("weight_gradients", "0")) or (
        place[0] in OF_CALLS and "parametrizations" in str(place[1])
    )


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_weight_norm(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """weight_norm, spectral_norm: the weight that the training's forward used, and originals with all of theirs."""

    def make() -> nn.Module:
        return nn.Sequential(wrap(nn.Linear(3, 3)), nn.Linear(3, 2))

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    # the buffers, which the power iteration of spectral_norm moves, are in the state that it compares
    _, _, heard = situation(make, train, but=of_made)
    path = "0.parametrizations.weight.original"
    assert len(data_of(heard, "weights", "0")) == len(data_of(heard, "weight_gradients", "0")) == 2
    for step, made in enumerate(data_of(heard, "weights", "0")):
        output = F.linear(batches(2)[step], made, data_of(heard, "biases", "0")[step])
        assert same(only(heard, "activations", "0", tag="default", global_step=step), output)
        if wrap is parametrizations.weight_norm:
            g, v = (data_of(heard, "weights", f"{path}{number}")[step] for number in range(2))
            torch.testing.assert_close(made, g * v / v.norm(dim=1, keepdim=True))
        else:  # the original, divided by a number
            original = data_of(heard, "weights", path)[step]
            torch.testing.assert_close(made * (original.norm() / made.norm()), original)
    assert not find(heard, "weight_updates", "0")
    assert {one.leaf for one in find(heard, "weights", "0")} == {""}
    assert {one.key for one in heard.of("activations")} == {"0", "1"}


def test_a_parametrized_weight_that_nobody_wants_is_not_copied() -> None:
    """A capture of other modules puts no hook on a parametrization, and the offer has no update of a made weight."""
    hooks: list[int] = []

    def make() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2))

    def train(model: Any, optimizer: Any) -> None:
        hooks.append(len(model[0].parametrizations.weight._forward_hooks))
        simple(model, optimizer)

    trained, _, heard = situation(make, train, but=lambda place: place[1] != "1", modules="1")
    model: Any = trained
    assert hooks[:2] == [0, 0]
    assert {one.key for one in heard.of("weights")} == {"1"}
    exporter, _ = watch(model, sgd(model))
    assert "0" in exporter.parts.demand.paths_of("weights")
    assert "0" not in exporter.parts.demand.paths_of("weight_updates")
    exporter.detach()
    assert not model[0].parametrizations.weight._forward_hooks


def by_hand(model: nn.Module) -> None:
    """Move the parameters without an optimizer."""
    with torch.no_grad():
        for one in model.parameters():
            if one.grad is not None:
                one.sub_(one.grad, alpha=0.1)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_frozen_and_later_unfrozen_parameters(with_optimizer: bool) -> None:
    """Frozen parameters: weights and zero updates without gradient; from the step on that unfreezes them, all three."""

    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    def train(model: Any, optimizer: Any, with_optimizer: bool = with_optimizer) -> None:
        for number, x in enumerate(batches(4)):
            if number == 2:
                model[0].requires_grad_(True)
            model.zero_grad()
            model(x).square().sum().backward()
            optimizer.step() if with_optimizer else by_hand(model)

    if with_optimizer:
        _, _, heard = situation(make, train)
    else:
        _, _, heard = unchanged(make, train, given=lambda _: None)
        equal(by_place(heard), witnessed(make, functools.partial(train, with_optimizer=True)))
    assert [one.global_step for one in find(heard, "weights", "0")] == [0, 1, 2, 3]
    assert [bool(one.any()) for one in data_of(heard, "weight_updates", "0")] == [False, False, True, True]
    assert [one.global_step for one in find(heard, "weight_gradients", "0")] == [2, 3]
    assert [one.global_step for one in find(heard, "input_gradients", "1")] == [2, 3]


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_replaced_parameter(with_optimizer: bool) -> None:
    """Parameter replaced: the one in its place is told from the next step on, in its own shape."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for number, x in enumerate(batches(4)):
            if number == 2:
                model.weight, model.bias = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(5))
                optimizer.param_groups[0]["params"] = list(model.parameters())
            model.zero_grad()
            model(x).sum().backward()
            if with_optimizer:
                optimizer.step()

    make = lambda: nn.Linear(3, 2)  # noqa: E731
    if with_optimizer:
        _, _, heard = situation(make, train)
    else:
        _, _, heard = unchanged(make, train, given=lambda _: None)
        assert not any(one.any() for one in data_of(heard, "weight_updates", ""))
        for number, x in enumerate(batches(4)):
            gradient = data_of(heard, "weight_gradients", "")[number]
            torch.testing.assert_close(gradient, x.sum(0).expand(gradient.shape[0], 3))
            weight, bias = (data_of(heard, kind, "")[number] for kind in ("weights", "biases"))
            assert same(data_of(heard, "activations", "")[number], F.linear(x, weight, bias))
            assert same(data_of(heard, "layer_gradients", "")[number], torch.ones(4, weight.shape[0]))
    assert [tuple(one.shape) for one in data_of(heard, "weights", "")] == [(2, 3), (2, 3), (5, 3), (5, 3)]
    assert same(data_of(heard, "weights", "")[2], torch.ones(5, 3))
    # without an optimizer a step lasts until the next forward, when the weight of step 1 is no longer there
    steps = [one.global_step for one in find(heard, "weight_updates", "")]
    assert steps == ([0, 1, 2, 3] if with_optimizer else [0, 2, 3])


class Growing(nn.Module):
    """Makes a layer in its forward when it is first needed, and has an optional bias that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.register_parameter("shift", None)
        self.late: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.late is None:
            self.late = nn.Linear(3, 2)
        y = self.late(self.first(x))
        return y if self.shift is None else y + self.shift


def test_lazily_created_modules_and_parameters() -> None:
    """A layer made in the first forward is seen from the next step on; so is a parameter that was None."""

    def train(model: Any, optimizer: Any) -> None:
        for number, x in enumerate(batches(4)):
            if number == 2:
                model.shift = nn.Parameter(torch.ones(2))
                optimizer.add_param_group({"params": [model.shift]})
            optimizer.zero_grad()
            model(x).square().sum().backward()
            if number == 0:
                optimizer.add_param_group({"params": list(model.late.parameters())})
            optimizer.step()

    _, _, heard = situation(Growing, train, but=lambda place: place[1] == "" and place[2] == 2)
    assert [one.global_step for one in find(heard, "activations", "first")] == [0, 1, 2, 3]
    assert [one.global_step for one in find(heard, "activations", "late")] == [1, 2, 3]
    # before the optimizer's step the layer was there, so its parameters are told from the first step on
    assert [one.global_step for one in find(heard, "weight_updates", "late")] == [0, 1, 2, 3]
    assert [one.global_step for one in find(heard, "weights", "shift")] == [2, 3]


def test_submodules_replaced_in_mid_run() -> None:
    """A submodule replaced (a new head, LoRA): the new one is observed under its path, the old one no longer."""
    kept: list[nn.Module] = []

    def train(model: Any, optimizer: Any) -> None:
        for number, x in enumerate(batches(4)):
            if number == 2:
                kept.append(model[2])
                model[2] = nn.Linear(3, 5)
                optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        kept[-1](torch.ones(1, 3))

    _, exporter, heard = situation(mlp, train, but=lambda place: place[2] == 4)
    assert [tuple(one.shape) for one in data_of(heard, "activations", "2")] == [(4, 2), (4, 2), (4, 5), (4, 5)]
    assert [tuple(one.shape) for one in data_of(heard, "weights", "2")] == [(2, 3), (2, 3), (5, 3), (5, 3)]
    assert not kept[1]._forward_hooks
    assert exporter.silent == []


def test_ema_copies_and_saved_models(tmp_path: Path) -> None:
    """deepcopy, AveragedModel, ``torch.save(model)`` while attached: copies compute the same and publish nothing."""
    kept: list[nn.Module] = []

    def train(model: nn.Module, optimizer: Any) -> None:
        average = torch.optim.swa_utils.AveragedModel(model)
        for x in batches(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            average.update_parameters(model)
            average(x)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        kept[:] = [average, copy.deepcopy(model), torch.load(file, weights_only=False)]
        for one in kept:
            one(batches(1)[0]).sum().backward()

    model, _, heard = unchanged(mlp, train)
    x, copies = batches(1)[0], kept[1:]
    assert all(torch.equal(one(x), model(x)) for one in copies)
    equal(by_place(heard), witnessed(mlp, simple))


def test_buffers() -> None:
    """Buffers: BatchNorm's statistics move as without a recorder; they are no stream, but can be logged."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 2))

    def train(model: Any, optimizer: Any, run: Any) -> None:
        for x in batches(2):
            model(x).sum().backward()
            optimizer.step()
            run.log("running_mean", model[1].running_mean)

    _, _, heard = situation(make, train, calls=True)  # the buffers are in the state that it compares
    assert {one.key for one in heard.of("weights")} == {"0", "1", "3"}
    hidden = data_of(heard, "activations", "0")
    first = 0.1 * hidden[0].mean(0)
    logged = data_of(heard, "running_mean")
    torch.testing.assert_close(logged[0], first)
    torch.testing.assert_close(logged[1], 0.9 * first + 0.1 * hidden[1].mean(0))


# -- modules whose classes define what PyTorch's own functions ask: they are recorded as any other, ----------


def refuses(*_: Any, **__: Any) -> Any:
    """A method of the user's that is for something else."""
    raise RuntimeError("this is not for you")


def strange(self: nn.Module, name: str) -> Any:
    """Raises what nobody expects of an attribute that is not there, once the module is made."""
    if "made" not in vars(self):
        return nn.Module.__getattr__(self, name)
    found = {**self._parameters, **self._buffers, **self._modules}
    if name not in found:
        raise RuntimeError(f"there is no {name}")
    return found[name]


def obliging(self: nn.Module, name: str) -> Any:
    """Has an answer to everything, once the module is made."""
    if "made" not in vars(self):
        return nn.Module.__getattr__(self, name)
    return {**self._parameters, **self._buffers, **self._modules}.get(name, self)


def through(self: nn.Module, *args: Any) -> Any:
    """A call that makes torch's own."""
    return nn.Module.__call__(self, *args)


NAMES = (
    *("named_parameters", "modules", "named_modules", "children", "named_children", "buffers", "named_buffers"),
    *("state_dict", "get_submodule", "get_parameter", "register_forward_hook", "register_forward_pre_hook"),
    *("_get_name", "__iter__", "__contains__", "__getitem__", "__dir__", "__getstate__", "__lt__"),
)
ODD: dict[str, dict[str, Any]] = {
    **{name: {name: refuses} for name in NAMES},
    "parameters": {"parameters": lambda self: 5},
    "__len__": {"__len__": lambda self: 0},
    "__bool__": {"__bool__": lambda self: False},
    "__eq__": {"__eq__": lambda self, other: True, "__hash__": nn.Module.__hash__},
    "__eq__ that raises": {"__eq__": refuses, "__hash__": nn.Module.__hash__},
    "unhashable": {"__eq__": lambda self, other: True, "__hash__": None},
    "__hash__": {"__hash__": refuses},
    "__getattr__ that raises": {"__getattr__": strange},
    "__getattr__ that answers": {"__getattr__": obliging},
    "__call__": {"__call__": through},
    "repr": {"__repr__": refuses, "extra_repr": refuses},
}
ODD["all"] = {name: method for methods in ODD.values() for name, method in methods.items()} | {"__getattr__": strange}


def network(methods: dict[str, Any]) -> nn.Module:
    """A model of which every class has these methods."""
    linear = type("Linear", (nn.Linear,), methods)

    def make(self: nn.Module) -> None:
        nn.Module.__init__(self)
        self.body = type("Body", (nn.Sequential,), methods)(linear(4, 5), nn.BatchNorm1d(5))
        self.head = linear(5, 3)
        for one in (self.body._modules["0"], self.body, self.head, self):
            one.made = True

    def forward(self: nn.Module, x: Tensor) -> Any:
        for one in self.body._modules.values():
            x = one(x)
        return self.head(x)

    torch.manual_seed(0)
    model: nn.Module = type("Network", (nn.Module,), {**methods, "__init__": make, "forward": forward})()
    return model


def trained(methods: dict[str, Any], watch: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> list[Tensor]:
    """Three steps, in the midst of which a layer is replaced; what they leave of the parameters and buffers."""
    model = network(methods)
    tensors = [*walking.parameters(model)]
    optimizer = torch.optim.SGD(tensors, lr=0.1, momentum=0.9)
    done = watch(model, optimizer)
    for step in range(3):
        if step == 2:
            model._modules["head"] = type(model._modules["head"])(5, 3)
            vars(model._modules["head"])["made"] = True
            optimizer.add_param_group({"params": [*walking.parameters(model._modules["head"])]})
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(6) % 3).backward()
        optimizer.step()
    done()
    return [*walking.parameters(model), *(buffer for _, buffer in walking.named_buffers(model)), torch.get_rng_state()]


def heard(methods: dict[str, Any]) -> tuple[list[Message], list[Tensor], Exporter]:
    """The same while everything is recorded."""
    exporter, collect = Exporter(capture=Capture(kinds=DATA_KINDS), strict=True), Collect("*")

    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        exporter.message_bus.register(collect)
        exporter.set_loss("cross_entropy")
        exporter.set_model(model)
        exporter.set_optimizer(optimizer)
        exporter.check()

        def done() -> None:
            exporter.finish()
            exporter.detach()

        return done

    ends = trained(methods, watch)
    return list(collect), ends, exporter


def told(messages: list[Message]) -> list[Any]:
    """What messages say, in comparable form."""
    return [
        (m.kind, m.key, m.leaf, m.call, m.global_step, None if m.data is None else m.data.tolist()) for m in messages
    ]


@pytest.mark.parametrize("name", ODD)
def test_what_a_class_defines_is_not_asked(name: str) -> None:
    """The messages are those of a model without such methods, and the training is that of nobody watching."""
    expected, plain, _ = heard({})
    messages, ends, exporter = heard(ODD[name])
    assert told(messages) == told(expected) != []
    assert {m.global_step for m in messages if m.key == "head"} == {0, 1, 2}
    for unwatched in (trained(ODD[name], lambda *_: lambda: None), plain):
        assert all(torch.equal(one, other) for one, other in zip(ends, unwatched, strict=True))
    assert exporter.problems == []
    assert exporter.silent == []


def test_a_call_without_hooks_is_told_truly() -> None:
    """A ``__call__`` that does not make torch's own: parameters are recorded, and why the forward is not is said."""
    with pytest.warns(RuntimeWarning, match="has a __call__ of its own"):
        exporter = Exporter()
        collect = Collect("*")
        exporter.message_bus.register(collect)
        model = network({"__call__": lambda self, x: self.forward(x)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter.set_model(model)
        exporter.set_optimizer(optimizer)
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
        exporter.finish()
    assert {problem["what"] for problem in exporter.problems} == {
        "the forward of the model", "the forward of 'body.0'", "the forward of 'head'"
    }  # fmt: skip
    assert [m.key for m in collect.of("weights")] == ["body.0", "body.1", "head"]
    assert {m.key for m in collect.of("activations")} == {"body.1"}
    exporter.detach()


def test_walking_is_what_torch_lists() -> None:
    """Of ordinary modules: with shared ones, places without a module, and shared parameters."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.BatchNorm1d(2)), "b": shared, "c": nn.Linear(2, 2)})
    model.register_module("nothing", None)
    model["c"].register_parameter("weight", shared.weight)
    assert [*walking.named_modules(model, "x")] == [*model.named_modules(prefix="x")]
    assert [*walking.modules(model)] == [*model.modules()]
    assert walking.children(model) == [model["a"], shared, model["c"]]
    for ours, theirs in (
        (walking.named_parameters(model, "x"), model.named_parameters(prefix="x")),
        (walking.named_buffers(model, "x"), model.named_buffers(prefix="x")),
    ):
        assert [(name, id(one)) for name, one in ours] == [(name, id(one)) for name, one in theirs]
    assert [*map(id, walking.parameters(model))] == [*map(id, model.parameters())]


SCRIPT = """
    def refuse(*_, **__):
        raise RuntimeError("this is not for you")
    class Net(nn.Module):
        named_parameters = modules = named_modules = children = state_dict = refuse
        __len__ = lambda self: 0
        __eq__ = lambda self, other: True
        __hash__ = None
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)
        def parameters(self):
            return 5
        def forward(self, x):
            return self.head(x)
    net = Net()
    opt = torch.optim.SGD(net.head.parameters(), lr=0.1)
    for a, b in DataLoader(TensorDataset(x, y), 5):
        loss = F.cross_entropy(net(a), b)
        opt.zero_grad(); loss.backward(); opt.step()
        print(float(loss.detach()))
"""


def test_a_script_with_such_a_model(tmp_path: Path) -> None:
    """``trace record`` of it prints the same and records all."""
    name = script(tmp_path, SCRIPT)
    plain = run(tmp_path, sys.executable, name)
    printed, messages = record(tmp_path, name)
    assert printed == plain != ""
    assert len([one for one in of(messages, "activations") if one.key == "head"]) == 4
    assert values(of(messages, "loss")) == [pytest.approx(float(line)) for line in plain.split()]


def test_the_last_error_names_what_failed_first(tmp_path: Path) -> None:
    """Where our own part fails and nothing is recorded, the reason is that failure and not what follows from it."""
    name = script(
        tmp_path,
        """
        import tracer.recording.launching.trained
        tracer.recording.launching.trained.models_of = lambda optimizers: 1 / 0
        net = nn.Linear(4, 3)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            F.cross_entropy(net(x), y).backward()
            opt.step()
        """,
    )
    command = [sys.executable, "-m", "tracereel", "record", "--out", "run.zarr", name]
    done = processes.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    (told,) = [line for line in done.stderr.splitlines() if "nothing is recorded: " in line]
    assert "ZeroDivisionError: division by zero" in told
