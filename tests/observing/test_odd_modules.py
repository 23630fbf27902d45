"""Modules whose classes define what PyTorch's own functions ask: they are recorded as any other, and not asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import processes
from tests.recording.launching.recorded_programs import ENVIRONMENT, of, record, run, script, values
from tracer import Capture, Collect, Exporter, Message, walking
from tracer.messaging.messages import DATA_KINDS


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
