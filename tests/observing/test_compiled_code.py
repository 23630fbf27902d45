"""Which code is compiled, and when: more or less than the model, before or after a recording, beside other models."""

from __future__ import annotations

import collections
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.endings import alike, ended
from tests.observing.compiled_training import (
    EAGER,
    Residual,
    Trained,
    adam,
    assert_as_the_loop_had_it,
    assert_same_end,
    dynamo,
    forget,
    graphs,
    identity,
    loop,
    train,
    unchanged,
    watch,
)
from tests.observing.recorded import sgd
from tracer import Collect, Exporter, Message
from tracer.observing.pytorch.compiled import SUPPORTED

pytestmark = [
    pytest.mark.skipif(not SUPPORTED, reason="this torch has no operators with effects"),
    pytest.mark.usefixtures(dynamo.__name__),
]


def test_what_is_compiled_may_be_more_or_less_than_the_model() -> None:
    """A function around it, the module itself by ``.compile()``, or one of its parts: each is one graph."""
    expected = None
    settings: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    for how in ("function", "method", "part"):

        def compiling(model: Any, optimizer: Any, steps: int, how: str = how) -> list[list[Tensor]]:
            run = model
            if how == "function":
                run = torch.compile(lambda x: model(x), **settings)
            elif how == "method":
                model.body.compile(**settings)
            else:
                model.body.forward = torch.compile(model.body.forward, **settings)
            return loop(run, optimizer, steps)

        recorded = unchanged(
            lambda: nn.Sequential(collections.OrderedDict(body=Residual(), head=nn.Linear(4, 2))),
            None, optimizer=sgd, loop=compiling, steps=3,
        )  # fmt: skip
        told = [identity(one) for one in recorded.heard]
        expected = expected or told
        assert recorded.exporter is not None
        assert (how, graphs(), recorded.exporter.silent) == (how, 1, [])
        assert told == expected
        assert_as_the_loop_had_it(recorded, "head")


@pytest.mark.parametrize("late", [False, True], ids=["before", "during"])
def test_what_torch_leaves_uncompiled_stays_so(late: bool) -> None:
    """`.compile()` of torch's own modules compiles nothing, but with hooks it would: they get none, which is told."""

    def compiling(model: Any, optimizer: Any, steps: int) -> list[list[Tensor]]:
        if late:
            model.compile(backend="eager")
        return loop(model, optimizer, steps)

    def make() -> nn.Module:
        model = nn.Sequential(collections.OrderedDict(first=nn.Linear(8, 8), body=Residual(), head=nn.Linear(4, 2)))
        if not late:
            model.compile(backend="eager")
        return model

    told = r"the forward of Sequential, 'first', 'head' is not recorded: torch compiles nothing"
    with pytest.warns(RuntimeWarning, match=told):
        recorded = unchanged(make, None, optimizer=sgd, loop=compiling, steps=3)
    assert graphs() == 1  # of what is inside and of a class of its own
    assert recorded.exporter is not None
    of_weights = {module for kind, module, *_ in recorded.data if kind == "weights"}
    assert of_weights >= {"first", "body.first", "head"}
    of_layers = {module for kind, module, *_ in recorded.data if kind == "activations"}
    assert "body.first" in of_layers
    assert not {"", "first", "head"} & of_layers
    assert nn.Module.compile.__module__ == "torch.nn.modules.module"
    assert not hasattr(nn.Module.compile, "__wrapped__")


def test_only_what_is_asked_for_is_in_the_graph() -> None:
    """Parameters are seen from outside, so recording only them leaves the graph as it is, but for the root's passes."""
    alone = train(lambda: nn.Sequential(Residual()), "eager", record=False, steps=1)
    counts = [torch._dynamo.utils.counters["stats"]["calls_captured"]]
    for kinds in (["weights"], ["weights", "activations"]):
        recorded = train(lambda: nn.Sequential(Residual()), "eager", steps=1, kinds=kinds)
        counts.append(torch._dynamo.utils.counters["stats"]["calls_captured"])
        assert_same_end(recorded, alone)
        assert {key[0] for key in recorded.data} == set(kinds)
    assert torch.equal(recorded.data["activations", "0.last", 0, "default", 0, ""], recorded.returned[0][0])
    assert counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize("backend", [EAGER, "aot_eager"])
def test_after_the_recording(backend: str) -> None:
    """Nothing is left: no hook, no operator in the graph that is compiled next, and the training goes on as alone."""
    kept: list[str] = []

    def looking(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        kept.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    results = []
    for record in (False, True):
        forget()
        torch.manual_seed(5)
        model = Residual()
        optimizer = adam(model)
        run = torch.compile(model, backend=looking, fullgraph=True)
        had = []
        if record:
            kept.clear()
            exporter, heard = watch(model, optimizer)
            had += loop(run, optimizer, 3)
            exporter.detach()
            count = len(list(heard))
        else:
            had += loop(run, optimizer, 3)
        had += loop(run, optimizer, 3)
        results.append(Trained(model, None, [], ended(model, [optimizer]), had))
    assert_same_end(*results)
    assert ["torch.ops.tracereel" in one for one in kept] == [True, False]
    assert len(list(heard)) == count
    found = [one.data for one in heard if (one.kind, one.key) == ("activations", "last")]
    assert alike(found, [output for output, *_ in had[:3]])
    assert not [one for one in model.modules() if one._forward_hooks or one._forward_pre_hooks]


@pytest.mark.parametrize("make", [pytest.param(Residual, marks=pytest.mark.slow), lambda: nn.Sequential(Residual())])
def test_hooks_that_come_too_late_are_reported(make: Callable[[], nn.Module]) -> None:
    """What was compiled before the recording calls no later hooks: a warning, a problem, and the advice that helps."""

    def begun() -> nn.Module:
        model = make()
        loop(torch.compile(model, backend="eager", fullgraph=True), sgd(model), 1)
        return model

    def going_on(run: Any, optimizer: Any, steps: int, exporter: Exporter | None) -> list[list[Tensor]]:
        if exporter is None:
            had = loop(run, optimizer, 1)
        else:
            with pytest.warns(RuntimeWarning, match="begin the recording before the first call"):
                had = loop(run, optimizer, 1)
            assert exporter.silent == [name for name, _ in exporter.named_modules]
            assert [problem["what"] for problem in exporter.problems] == ["the inside of the model"]
        torch._dynamo.reset()
        return had + loop(run, optimizer, 1)

    recorded = unchanged(begun, "eager", optimizer=sgd, loop=going_on, calls=True)
    assert recorded.exporter is not None
    assert recorded.exporter.silent == []
    steps = {kind: {key[2] for key in recorded.data if key[0] == kind} for kind in ("activations", "weight_updates")}
    assert steps == {"activations": {1}, "weight_updates": {0, 1}}
    last = "last" if make is Residual else "0.last"
    for step, (*_, gradient, _) in enumerate(recorded.returned):
        assert torch.equal(recorded.data["weight_gradients", last, step, "default", 0, ""], gradient)
    assert torch.equal(recorded.data["activations", last, 1, "default", 0, ""], recorded.returned[1][0])


def test_models_of_one_class_are_told_apart() -> None:
    """Models share what is compiled: two that are watched each have their own, and so does one that is not."""
    trained = []
    for record in (False, True):
        forget()
        torch.manual_seed(0)
        models = nn.ModuleList(Residual() for _ in range(3))
        x = torch.randn(4, 8)
        expected = [model(x).detach() for model in models]
        chosen: dict[str, Any] = {"kinds": ["activations", "layer_gradients"], "modules": ["last"]}
        heard = [watch(model, **chosen) for model in models[:2]] if record else []
        outputs = []
        for model in models:
            outputs.append(torch.compile(model, backend="aot_eager", fullgraph=True)(x))
            outputs[-1].sum().backward()
        for exporter, _ in heard:
            exporter.detach()
        trained.append(Trained(models, None, [], ended(models, []), outputs))
        assert graphs() == (3 if record else 1)
    assert_same_end(*trained)
    for (_, one), output in zip(heard, expected, strict=False):
        assert [message.kind for message in one] == ["activations", "layer_gradients"]
        assert alike([message.data for message in one], [output, torch.ones_like(output)])


def test_another_model_of_the_class_that_was_compiled_before_is_reported() -> None:
    """The plain graph of the first fits the second, whose hooks it does not call."""
    others = []

    def second() -> nn.Module:
        others.append(Residual())
        torch.compile(others[-1], backend="eager", fullgraph=True)(torch.ones(16, 8)).sum().backward()
        return Residual()

    with pytest.warns(RuntimeWarning, match="for it or for another model of its classes"):
        recorded = unchanged(second, "eager", optimizer=sgd, steps=1)
    assert graphs() == 1
    assert not [one for one in recorded.heard if one.kind == "activations"]
    gradient = recorded.data["weight_gradients", "last", 0, "default", 0, ""]
    assert torch.equal(gradient, recorded.returned[0][-2])


def test_a_part_that_was_compiled_too_early_is_named() -> None:
    """Of a model that is eager, the part that was compiled and run before."""

    def begun() -> nn.Module:
        model = nn.Sequential(torch.compile(Residual(), backend="eager"), nn.Linear(4, 2))
        loop(model, sgd(model), 1)
        return model

    with pytest.warns(RuntimeWarning, match="the inside of '0' is not recorded"):
        recorded = unchanged(begun, None, optimizer=sgd, steps=2)
    assert recorded.exporter is not None
    assert len(recorded.exporter.problems) == 1
    assert_as_the_loop_had_it(recorded, "1")


def test_compiled_code_elsewhere_is_no_problem() -> None:
    """A model that is recorded eagerly, although something else was compiled before."""

    def make() -> nn.Module:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        return Residual()

    recorded = unchanged(make, None, optimizer=sgd, steps=2)
    assert graphs() == 1
    assert recorded.exporter is not None
    assert recorded.exporter.problems == []
    for step, (output, *_) in enumerate(recorded.returned):
        assert torch.equal(recorded.data["activations", "last", step, "default", 0, ""], output)


def test_an_attention_is_not_taken_for_a_compiled_model() -> None:
    """Its last layer is never called by torch; after another model was compiled, that is no sign of hooks too late."""

    def make() -> nn.Module:
        torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
        return nn.MultiheadAttention(4, 2, batch_first=True)

    def once(model: nn.Module, optimizer: Any, steps: int) -> list[Tensor]:
        x = torch.randn(2, 3, 4)
        output = model(x, x, x)[0]
        output.sum().backward()
        optimizer.step()
        return [output.detach()]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?!Guards may run slower on Python 3.13.0)")
        recorded = unchanged(make, None, optimizer=sgd, loop=once)
    assert graphs() == 1
    assert recorded.exporter is not None
    assert not recorded.exporter.problems
    assert "weight_updates" in {one.kind for one in recorded.heard}
    assert torch.equal(recorded.data["network_output", None, 0, "default", 0, "0"], recorded.returned[0])


# -- what must not break inside ``torch.compile``: failing operators, copies, exported models, ``vma----------


@pytest.mark.parametrize("kind", ["activations", pytest.param("layer_gradients", marks=pytest.mark.slow)])
def test_what_fails_in_an_operator_stays_there(kind: str) -> None:
    """The stream is given up with a warning, and the training is the same; strict, the error reaches the loop."""

    def condition(message: Message) -> bool:
        if message.kind == kind and message.global_step >= 1:
            raise RuntimeError("no luck")
        return True

    with pytest.warns(RuntimeWarning, match="no luck"):
        recorded = train(Residual, "aot_eager", strict=False, condition=condition)
    assert_same_end(recorded, train(Residual, "aot_eager", record=False))
    assert {key[2] for key in recorded.data if key[0] == kind} == {0}
    assert {key[2] for key in recorded.data if key[0] == "weights"} == set(range(10))
    with pytest.raises(RuntimeError, match="no luck"):
        train(Residual, "aot_eager", condition=condition)


def test_copies_are_not_watched() -> None:
    """A copy or a pickle of the model, compiled, tells nobody; nor does a graph whose exporter is gone."""
    trained = []
    for record in (False, True):
        forget()
        torch.manual_seed(3)
        model = Residual()
        optimizer = sgd(model)
        exporter, heard = watch(model, optimizer) if record else (None, Collect("*"))
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        had = [*loop(run, optimizer, 1)]
        count = len(list(heard))
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
            output = torch.compile(other, backend="aot_eager", fullgraph=True)(torch.ones(2, 8))
            output.sum().backward()
            had.append([output.detach(), *(p.grad for p in other.parameters())])
        assert len(list(heard)) == count
        if exporter is not None:
            exporter.message_bus.unregister(heard)
            exporter.message_bus.unwatch(exporter.parts.rewire)
        del exporter
        had += loop(run, optimizer, 2)
        assert len(list(heard)) == count
        trained.append(Trained(model, None, [], ended(model, [optimizer]), had))
        del trained[-1].end["hooks"]  # some of an exporter that was never detached are still there, and do nothing
    assert_same_end(*trained)


def test_an_exported_model_has_no_operators() -> None:
    """It is used without the exporter, perhaps without this package; it is the program that is exported without."""
    trained = []
    for record in (False, True):
        forget()
        torch.manual_seed(3)
        model = Residual()
        exporter, heard = watch(model) if record else (None, Collect("*"))
        had: list[Any] = []
        for strict in (False, True):
            program = torch.export.export(model, (torch.ones(2, 8),), strict=strict)
            assert "tracereel" not in str(program.graph)
            output = program.module()(torch.randn(2, 8))
            output.sum().backward()
            had += [str(program.graph), output.detach()]
        if exporter is not None:
            exporter.detach()
        assert not list(heard)
        trained.append(Trained(model, None, [], ended(model, []), had))
    assert_same_end(*trained)


class Branches(nn.Module):
    """One layer or another, as the input has it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.one, self.other, (x,))


def test_where_operators_cannot_be_modules_are_silent() -> None:
    """Under vmap, and in a branch of ``torch.cond``, the graph is compiled as without, and the modules are reported."""

    def compiling(model: nn.Module, optimizer: Any, steps: int) -> list[list[Tensor]]:
        run = model if isinstance(model, Branches) else torch.vmap(model)
        return loop(torch.compile(lambda x: run(x), backend="aot_eager", fullgraph=True), optimizer, steps)

    for make in (Branches, lambda: nn.Sequential(nn.Linear(8, 8))):
        settings = {"steps": 2, "kinds": ["activations", "layer_gradients"]}
        recorded = unchanged(make, None, loop=compiling, **settings)
        assert not recorded.heard
        assert recorded.exporter is not None
        assert recorded.exporter.silent == [name for name, _ in recorded.exporter.named_modules]
        eager = train(make, None, record=False, steps=2)
        torch.testing.assert_close(recorded.returned, eager.returned)
