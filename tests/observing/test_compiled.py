"""Recording inside ``torch.compile``: one graph, the same training, eager's values."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracer
from tests.endings import InBackward, alike, ended
from tests.observing.compiled_training import (
    EAGER,
    FORWARD,
    INDUCTOR,
    NO_COMPILER,
    Attention,
    Convolutions,
    Residual,
    Trained,
    adam,
    assert_as_the_loop_had_it,
    assert_close,
    assert_same_end,
    dynamo,
    forget,
    graphs,
    identity,
    loop,
    train,
    unchanged,
)
from tests.observing.recorded import sgd
from tracer import Exporter
from tracer.observing.pytorch.compiled import SUPPORTED

pytestmark = [
    pytest.mark.skipif(not SUPPORTED, reason="this torch has no operators with effects"),
    pytest.mark.usefixtures(dynamo.__name__),
]


# -- what is recorded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "backend"),
    [(Residual, "eager"), (Convolutions, "aot_eager")]
    + [pytest.param(make, "eager", marks=EAGER.marks) for make in (Convolutions, Attention)]
    + [pytest.param(make, "aot_eager", marks=EAGER.marks) for make in (Residual, Attention)]
    # in each `make test`, `test_ways_to_train_a_compiled_model` records what inductor compiles
    + [
        pytest.param(make, "inductor", marks=(*INDUCTOR.marks, *EAGER.marks))
        for make in (Residual, Convolutions, Attention)
    ],
)
@pytest.mark.usefixtures("double")
def test_compiled_records_what_eager_does(make: Callable[[], nn.Module], backend: str) -> None:
    """One graph for all steps; the messages of an eager run; the weights of the compiled run that nobody watches."""
    eager = train(make, None)
    alone = train(make, backend, record=False)
    recorded = train(make, backend)
    assert graphs() == 1
    assert_same_end(recorded, alone)
    assert recorded.exporter is not None
    assert recorded.exporter.problems == []
    order = [identity(one) for one in eager.heard]
    if make is Attention:  # attention's own backward differs, so gradients come in another order
        assert sorted(map(repr, order)) == sorted(repr(identity(one)) for one in recorded.heard)
    else:
        assert [identity(one) for one in recorded.heard] == order
    assert_close(recorded.data, eager.data, backend)
    assert_as_the_loop_had_it(recorded, "last")


@pytest.mark.parametrize("backend", [EAGER, "aot_eager"])
def test_values_against_autograd(backend: str) -> None:
    """Before an in-place ReLU: the negative values, and the gradient with respect to them, by autograd without it."""
    recorded = unchanged(Residual, backend, steps=1)
    torch.manual_seed(3)
    model = Residual()
    before = model.first(torch.randn(16, 8))
    after = torch.relu(before)
    before.retain_grad()
    after.retain_grad()
    model.last(model.shared(model.norm(model.shared(after) + after))).square().mean().backward()
    found = {key[:2]: data for key, data in recorded.data.items()}
    assert before.grad is not None
    assert after.grad is not None
    assert (found["activations", "first"] < 0).any()
    for name, tensor in (("first", before), ("relu", after)):
        torch.testing.assert_close(found["activations", name], tensor.detach())
        torch.testing.assert_close(found["layer_gradients", name], tensor.grad)
    for name in ("first", "shared", "norm", "last"):
        torch.testing.assert_close(found["weight_gradients", name], model.get_submodule(name).weight.grad)
    assert_as_the_loop_had_it(recorded, "last")


@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
def test_half_precision_is_rounded_where_it_is_recorded() -> None:
    """Inductor keeps in float32 what it fuses; what is recorded is rounded in between, as it always is eagerly.

    That this is the only difference: when inductor rounds everything that it fuses, the training is bit-equal.
    """

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.norm, self.last = nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.last(self.norm(self.act(self.first(x)))).float()

    with torch._inductor.config.patch(emulate_precision_casts=True):
        recorded = train(Half, "inductor")
        assert graphs() == 1
        alone = train(Half, "inductor", record=False)
    assert_same_end(recorded, alone)
    assert recorded.data["activations", "act", 0, "default", 0, ""].dtype == torch.bfloat16


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
def test_cuda_graphs_end_before_what_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor, asked where it would cut its CUDA graphs, names each of the operators; once, however often it traced.

    That what it captures on a device is recorded in every step, `tests/observing/test_cuda_graphs.py` shows.
    """
    from torch._inductor.scheduler import Scheduler

    decide, reasons = Scheduler.should_partition, []

    def asked(scheduler: Any, node: Any, *rest: Any) -> Any:
        reason = decide(scheduler, node, *rest)
        if "tracereel" in str(getattr(node.node, "op_overload", None)):
            reasons.append(str(reason))
        return reason

    monkeypatch.setattr(Scheduler, "should_partition", asked)
    with torch._inductor.config.patch(fx_graph_cache=False, custom_should_partition_ops=["other::operator"]):
        layers = lambda: nn.Sequential(collections.OrderedDict(first=nn.Linear(8, 4), last=nn.Linear(4, 4)))  # noqa: E731
        recorded = unchanged(layers, "inductor", steps=1)
        listed = torch._inductor.config.custom_should_partition_ops
        assert listed[0] == "other::operator"
        assert len(listed) == len(set(listed))
    assert any("observe_gradient" in one for one in reasons)
    assert all(one.startswith("custom partition op: tracereel::observe") for one in reasons)
    assert_as_the_loop_had_it(recorded, "last")


def test_a_trace_of_a_compiled_run(tmp_path: Path) -> None:
    """`record` around a compiled loop: all streams stand in the trace, and no module is silent."""
    trained = []
    for record in (False, True):
        forget()
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = sgd(model)
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        path = tmp_path / "run.zarr"
        with (
            tracer.record(path, run, optimizer, strict=True, capture=tracer.Capture())
            if record
            else contextlib.nullcontext()
        ):
            had = loop(run, optimizer, 3)
        trained.append(Trained(model, None, [], ended(model, [optimizer]), had))
    assert_same_end(*trained)
    with tracer.open(tmp_path / "run.zarr") as trace:
        for kind in ("activations", "layer_gradients"):
            assert trace.array(kind, "0")[1].shape == (3, 16, 8)
        assert not [note for note in trace.notes if "silent" in note or "problem" in note]
        outputs, first, _, last, _ = (torch.stack(values) for values in zip(*had, strict=True))
        found = {key: torch.from_numpy(trace.array(*key)[1]) for key in (
            ("activations", "2"), ("layer_gradients", "2"), ("weight_gradients", "0"), ("weight_gradients", "2")
        )}  # fmt: skip
        assert torch.equal(found["activations", "2"], outputs)
        torch.testing.assert_close(found["layer_gradients", "2"], 2 * outputs / outputs[0].numel())
        assert torch.equal(found["weight_gradients", "0"], first)
        assert torch.equal(found["weight_gradients", "2"], last)


Pair = collections.namedtuple("Pair", ["one", "other"])


class Structured(nn.Module):
    """Returns two tensors in a structure, takes a keyword, and has the first changed in place by its caller."""

    def __init__(self, build: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.build, self.one, self.other = build, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, gain: Tensor) -> Any:
        return self.build(self.one(x) * gain, self.other(x))


class Unpacking(nn.Module):
    """Uses a `Structured` module."""

    def __init__(self, build: Callable[[Tensor, Tensor], Any], take: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.part, self.take, self.last = Structured(build), take, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.take(self.part(x, gain=x))
        one.mul_(2)
        return self.last(one * torch.tanh(other))


@dataclasses.dataclass
class Result:
    """What some models return."""

    one: Tensor
    other: Tensor


STRUCTURES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, (None, b, 3)), lambda r: (r[0], r[1][1])),
    "list": (lambda a, b: [a, b], lambda r: (r[0], r[1])),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda r: (r["a"], r["b"])),
    "namedtuple": (Pair, lambda r: (r.one, r.other)),
}


@pytest.mark.parametrize(
    ("backend", "structure"),
    [
        *(("aot_eager", structure) for structure in ("tuple", "dict")),
        ("eager", "tuple"),
        *(pytest.param("aot_eager", structure, marks=pytest.mark.slow) for structure in ("list", "namedtuple")),
        *(pytest.param("eager", structure, marks=pytest.mark.slow) for structure in STRUCTURES if structure != "tuple"),
    ],
)
def test_structured_outputs(structure: str, backend: str) -> None:
    """Each tensor of an output is recorded with its gradient and its place, as eagerly."""
    make = lambda: Unpacking(*STRUCTURES[structure])  # noqa: E731
    settings = {"modules": ["part", "last"], "steps": 3}
    eager, recorded = train(make, None, **settings), train(make, backend, **settings)
    assert_same_end(recorded, train(make, backend, record=False, steps=3))
    assert len({key[-1] for key in recorded.data if key[:2] == ("layer_gradients", "part")}) == 2
    assert_close(recorded.data, eager.data, backend)


@pytest.mark.parametrize("build", [Result, lambda a, b: collections.OrderedDict(one=a, other=b)])
def test_other_containers_keep_their_gradients_to_themselves(build: Any) -> None:
    """A container of the user's own class is not built anew: what is missing is told, and the activations are there."""
    make = lambda: Unpacking(build, lambda r: (r.one, r.other) if isinstance(r, Result) else tuple(r.values()))  # noqa: E731
    with pytest.warns(RuntimeWarning, match="layer_gradients of 'part' is not recorded: inside torch.compile"):
        recorded = train(make, "aot_eager", modules=["part"], steps=3)
    assert {key[-1] for key in recorded.data if key[0] == "activations"} == {"one", "other"}
    assert not [key for key in recorded.data if key[0] == "layer_gradients"]
    assert_same_end(recorded, train(make, "aot_eager", record=False, steps=3))


class Aliasing(nn.Module):
    """Changes in place what a module returned that returns its input, and uses both; the same with a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.flat, self.last = nn.Linear(8, 8), nn.Identity(), nn.Flatten(0), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.same(h).mul_(3)
        self.flat(h).add_(1)
        return self.last(h)


@pytest.mark.parametrize("backend", [EAGER, "aot_eager"])
def test_outputs_that_alias_inputs_are_left_alone(backend: str) -> None:
    """A copy would not change with the original, so the training would change: the gradients are reported missing."""
    with pytest.warns(RuntimeWarning, match="is a view of, its input"):
        recorded = train(Aliasing, backend, steps=3)
    assert_same_end(recorded, train(Aliasing, backend, record=False, steps=3))
    assert recorded.exporter is not None
    told = {problem["what"] for problem in recorded.exporter.problems}
    assert told == {"layer_gradients of 'same'", "layer_gradients of 'flat'"}
    eager = train(Aliasing, None, steps=3)
    expected = {key: value for key, value in eager.data.items() if key[0] in FORWARD}
    assert_close({key: value for key, value in recorded.data.items() if key[0] in FORWARD}, expected, backend)


def test_gradients_of_inputs_are_reported_missing() -> None:
    """A module may overwrite its input in place, so nothing can be put before it; what came in is recorded."""
    with pytest.warns(RuntimeWarning, match="gradients of inputs are not observed inside torch.compile"):
        recorded = unchanged(Residual, "eager", kinds=["input_gradients", "layer_inputs"], modules=["last"], steps=2)
    assert {one.kind for one in recorded.heard} == {"layer_inputs"}
    assert recorded.exporter is not None
    assert {problem["what"] for problem in recorded.exporter.problems} == {"input_gradients of 'last'"}
    for given, (output, *_, gradient, _) in zip(recorded.data.values(), recorded.returned, strict=True):
        torch.testing.assert_close(gradient, (2 * output / output.numel()).T @ given)


# -- when it is recorded --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        EAGER,
        pytest.param("inductor", marks=(*INDUCTOR.marks, pytest.mark.slow)),
    ],
)
def test_a_choice_of_steps_recompiles_nothing(backend: str) -> None:
    """The operators ask at run time: `every` gives its steps' messages from one graph."""
    recorded = unchanged(Residual, backend, every=4)
    assert graphs() == 1
    assert {one.global_step for one in recorded.heard} == {0, 4, 8}
    whole = train(Residual, backend)
    assert all(torch.equal(value, whole.data[key]) for key, value in recorded.data.items())
    assert_same_end(recorded, whole)


def passes(run: Any, optimizer: Any, steps: int, exporter: Exporter | None) -> list[Tensor]:
    """A step of two micro-batches, and three passes aside."""
    inputs = [torch.randn(4, 8) for _ in range(2)]
    outputs = [run(x) for x in inputs]
    (outputs[0].sum() * 3).backward()
    (outputs[1].sum() * 5).backward()
    optimizer.step()
    with contextlib.nullcontext() if exporter is None else exporter.tag("test"):
        outputs.append(run(inputs[0]))
    with torch.no_grad():
        outputs.append(run(inputs[0]))
    run.eval()
    with torch.inference_mode():
        outputs.append(run(inputs[0]))
    return [output.detach().clone() for output in outputs]


def test_passes_and_calls() -> None:
    """Accumulation counts calls and pairs each gradient with its own; passes aside have their tags."""
    chosen = {"kinds": ["activations", "layer_gradients"], "modules": ["last"]}
    recorded = unchanged(Residual, "aot_eager", optimizer=sgd, loop=passes, calls=True, **chosen)
    heard = recorded.heard
    told = [(one.kind, one.global_step, one.tag, one.call) for one in heard]
    assert told[:4] == [
        ("activations", 0, "default", 0),
        ("activations", 0, "default", 1),
        ("layer_gradients", 0, "default", 0),
        ("layer_gradients", 0, "default", 1),
    ]
    assert told[4:] == [("activations", 1, "test", 0), ("activations", 1, "eval", 0), ("activations", 1, "eval", 1)]
    assert [float(one.data[0, 0]) for one in heard if one.kind == "layer_gradients" and one.data is not None] == [3, 5]
    assert alike([one.data for one in heard if one.kind == "activations"], recorded.returned)


def of_many_sizes(run: Any, optimizer: Any, steps: int) -> list[Tensor]:
    """A loop over batches that grow."""
    outputs = []
    for size in range(4, 4 + steps):
        output = run(torch.randn(size, 8))
        output.sum().backward()
        optimizer.step()
        outputs.append(output.detach().clone())
    return outputs


@pytest.mark.parametrize("backend", [EAGER, "aot_eager"])
def test_batches_of_many_sizes(backend: str) -> None:
    """A graph with dynamic shapes has the operators too; it takes as many graphs as without."""
    trained, counts = [], []
    for record in (False, True):
        chosen = {"modules": ["last"], "kinds": ["activations", "layer_gradients"]}
        trained.append(train(Residual, backend, record=record, optimizer=sgd, loop=of_many_sizes, steps=4, **chosen))
        counts.append(graphs())
    assert counts == [2, 2]
    assert_same_end(*trained)
    found = [one.data for one in trained[1].heard if one.data is not None]
    assert [data.shape[0] for data in found] == [4, 4, 5, 5, 6, 6, 7, 7]
    assert alike(found[::2], trained[0].returned)
    assert alike(found[1::2], [torch.ones_like(output) for output in trained[0].returned])


@pytest.mark.parametrize(
    ("backend", "reentrant"),
    [
        ("eager", False),
        ("eager", True),
        ("aot_eager", False),
        ("aot_eager", True),
        # aot_eager cuts the graph in two as inductor does
        pytest.param("inductor", False, marks=(*INDUCTOR.marks, pytest.mark.slow)),
    ],
)
@pytest.mark.usefixtures("double")
def test_checkpoints(reentrant: bool, backend: str) -> None:
    """What a checkpoint computes again is recorded once, with its gradients."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.last = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            # under eager, the reentrant kind needs an input with a gradient; compiled, both kinds are one
            return self.last(checkpoint(self.inner, x, use_reentrant=reentrant))

    class Plain(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x))

    settings: dict[str, Any] = {"kinds": ["activations", "layer_gradients", "weight_gradients"], "steps": 3}
    recorded = train(Checkpointed, backend, **settings)
    assert graphs() == 1
    assert_same_end(recorded, train(Checkpointed, backend, record=False, steps=3))
    assert_close(recorded.data, train(Plain, None, **settings).data, backend)


# -- how it is trained ----------------------------------------------------------------------------------------


def scaled(run: Any, optimizer: Any, steps: int) -> None:
    """A loop with a GradScaler, which skips a step in the middle."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    for number in range(steps):
        optimizer.zero_grad()
        loss = run(torch.randn(16, 8)).square().mean()
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


def in_backward(run: Any, optimizer: Any, steps: int) -> None:
    """A loop whose optimizers step in the backward."""
    for _ in range(steps):
        run(torch.randn(16, 8)).square().mean().backward()


def with_closures(run: Any, optimizer: Any, steps: int) -> None:
    """A loop whose optimizer evaluates the loss several times in a step."""
    for _ in range(steps):
        x = torch.randn(16, 8)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = run(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, Any, int], None]]] = {
    "GradScaler": (adam, scaled),
    "optimizer in backward": (InBackward, in_backward),
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), with_closures),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("backend", "way"),
    [
        *(("aot_eager", way) for way in WAYS),
        ("eager", "GradScaler"),
        pytest.param("inductor", "optimizer in backward", marks=INDUCTOR.marks),
        # how it is trained and what compiles it meet nowhere else
        *(pytest.param("eager", way, marks=pytest.mark.slow) for way in WAYS if way != "GradScaler"),
        *(
            pytest.param("inductor", way, marks=(*INDUCTOR.marks, pytest.mark.slow))
            for way in WAYS
            if way != "optimizer in backward"
        ),
    ],
)
def test_ways_to_train_a_compiled_model(way: str, backend: str) -> None:
    """GradScaler, optimizers in the backward and closures: one graph, the same end, eager's messages and values.

    The gradients of the last layer are those of the loss, which nobody scaled; and its weight's are made of them.
    """
    optimizer, train_so = WAYS[way]
    settings: dict[str, Any] = {"optimizer": optimizer, "loop": train_so, "steps": 4}
    alone = train(Residual, backend, record=False, **settings)
    eager = train(Residual, None, **settings)
    recorded = train(Residual, backend, **settings)
    assert graphs() == 1
    assert_same_end(recorded, alone)
    assert recorded.exporter is not None
    assert recorded.exporter.problems == []
    assert_close(recorded.data, eager.data, backend)
    skipped = [one.global_step for one in recorded.heard if one.kind == "skipped_step"]
    assert skipped == ([1] if way == "GradScaler" else [])
    calls = [key[2:] for key in recorded.data if key[:2] == ("layer_gradients", "last")]
    assert len(calls) > 4 if way == "LBFGS" else len(calls) == 4
    for number, place in enumerate(calls):
        output, slope = (recorded.data[kind, "last", *place] for kind in ("activations", "layer_gradients"))
        if way == "GradScaler" and number == 1:
            assert not slope.isfinite().any()
            continue
        torch.testing.assert_close(slope, 2 * output / output.numel())
        if number + 1 == len(calls) or calls[number + 1][0] != place[0]:  # the last evaluation of its step
            gradient = recorded.data["weight_gradients", "last", place[0], "default", 0, ""]
            given = recorded.data["layer_inputs", "last", *place]
            torch.testing.assert_close(gradient, slope.T @ given)


# -- the page -------------------------------------------------------------------------------------------------


def test_the_page_has_a_row_for_every_test() -> None:
    """The table in docs/semantics.md: each test of `test_compiled*.py`, its backends, and whether it counts graphs.

    And each compares with the same training without a recorder, as the page says.
    """
    page = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text(encoding="utf-8")
    section = page.split("\n## Inside `torch.compile`\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "`test_" in line and line[0] == "|"]
    found = {name.strip("`"): (backends, "graph" in recorded) for _, recorded, backends, name in rows}
    expected = {}
    files = sorted(Path(__file__).parent.glob("test_compiled*.py"))
    tests = [one for file in files for one in vars(importlib.import_module(f"tests.observing.{file.stem}")).items()]
    for name, test in tests:
        if name.startswith("test_") and name != "test_the_page_has_a_row_for_every_test":
            source = inspect.getsource(test).replace("EAGER,", "'eager',")
            assert "unchanged(" in source or "assert_same_end(" in source, name
            told = [one for one in ("eager", "aot_eager", "inductor") if re.search(f"['\"]{one}['\"]", source)]
            expected[name] = ", ".join(told) or "none", "graphs()" in source
    assert found.keys() == expected.keys()
    for name, (backends, counted) in expected.items():
        assert found[name][0] == backends, name
        assert found[name][1] or not counted, name
