"""Recording inside ``torch.compile``: one graph, the same training, eager's values; and where it cannot be."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracer
from tests.endings import InBackward, alike, ended, optimizers_of
from tests.observing.recorded import sgd
from tracer import Capture, Collect, Exporter, Message
from tracer.observing.pytorch.compiled import SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="this torch has no operators with effects")

FORWARD = ("input_data", "layer_inputs", "activations", "network_output")
KINDS = (*FORWARD, "layer_gradients", "weights", "weight_gradients", "weight_updates")


def no_compiler() -> str | None:
    """Why inductor cannot build anything here, or None."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # noqa: BLE001 - torch's own, of a class that moved between versions
        return f"inductor finds no C++ compiler: {type(error).__name__}"
    return None


NO_COMPILER = no_compiler()
# its graph is the one that aot_eager is given, which makes more of it
EAGER = pytest.param("eager", marks=pytest.mark.slow)
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER)))


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """Compilation begins and ends without what others compiled."""
    forget()
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # of torch's own compiler
            warnings.simplefilter("ignore", category)
        yield
    forget()


def forget() -> None:
    """Forget what was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """How many graphs were compiled; a test that asks has no graph breaks."""
    assert not torch._dynamo.utils.counters["graph_break"]
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Residual(nn.Module):
    """In-place ReLU, dropout that does nothing, `h += x`, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.relu = nn.ReLU(inplace=True)
        self.shared = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        h = self.shared(x)
        h += x
        return self.last(self.shared(self.norm(h)))


class Convolutions(nn.Module):
    """Batch norm, an in-place ReLU that is called twice, and a residual that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x.view(-1, 1, 2, 4))))
        y = self.second(x)
        y += x
        return self.last(self.relu(y).mean((2, 3)))


class Attention(nn.Module):
    """A transformer's encoder, whose modules return tuples and views."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x.view(2, -1, 8)))


def watch(model: nn.Module, optimizer: Any = None, *, strict: bool = True, **settings: Any) -> tuple[Exporter, Collect]:
    """An exporter with a capture of these settings, and what is heard of it."""
    exporter, heard = Exporter(capture=Capture(**{"kinds": KINDS, **settings}), strict=strict), Collect("*")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    return exporter, heard


@dataclasses.dataclass
class Trained:
    """A model after its training, what was heard of it, how it ended, and what the loop returned."""

    model: nn.Module
    exporter: Exporter | None
    heard: list[Message]
    end: dict[str, Any]
    returned: Any = None

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    @property
    def data(self) -> dict[Any, Tensor]:
        return {identity(one): one.data for one in self.heard if one.data is not None}


def loop(run: Any, optimizer: Any, steps: int) -> list[list[Tensor]]:
    """A training loop; of each step the output, and the gradient of each parameter."""
    had = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = run(torch.randn(16, 8))
        output.square().mean().backward()
        optimizer.step()
        had.append([output.detach().clone(), *(p.grad.clone() for p in optimizer.param_groups[0]["params"])])
    return had


def adam(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of most trainings."""
    return torch.optim.AdamW(model.parameters(), 1e-2)


def train(
    make: Callable[[], nn.Module],
    backend: str | None,
    *,
    record: bool = True,
    steps: int = 10,
    optimizer: Callable[[nn.Module], Any] = adam,
    loop: Callable[..., Any] = loop,
    calls: bool = False,
    **settings: Any,
) -> Trained:
    """Train a model from one seed: eagerly, or compiled with a backend; for more steps than recompiles are allowed.

    With `calls` the loop has calls of the recorder's in it: it gets the exporter, or None.
    """
    forget()
    torch.manual_seed(3)
    model = make()
    chosen = optimizer(model)
    exporter, heard = watch(model, optimizers_of(chosen), **settings) if record else (None, Collect("*"))
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    returned = loop(run, chosen, steps, *([exporter] if calls else []))
    if exporter is not None:
        exporter.finish()
        exporter.detach()
    return Trained(model, exporter, list(heard), ended(model, optimizers_of(chosen)), returned)


def assert_same_end(one: Trained, other: Trained) -> None:
    """Tensors, gradients, the optimizers' state, generators and hooks are those of the other training, to the bit.

    So is what the loop returned.
    """
    assert one.end.keys() == other.end.keys()
    for name, value in one.end.items():
        assert alike(value, other.end[name]), name
    assert alike(one.returned, other.returned)


def unchanged(make: Callable[[], nn.Module], backend: str | None, **settings: Any) -> Trained:
    """Trained with a recorder; the same, compiled as well but without a recorder, ends the same."""
    alone = train(make, backend, record=False, **settings)
    recorded = train(make, backend, **settings)
    assert_same_end(recorded, alone)
    return recorded


def assert_as_the_loop_had_it(recorded: Trained, last: str) -> None:
    """Outputs, the last layer's and its gradients, and gradients of weights, as `loop` had them itself in each step."""
    names = [name.replace("_orig_mod.", "") for name, _ in recorded.model.named_parameters()]
    for step, (output, *gradients) in enumerate(recorded.returned):
        place = step, "default", 0, ""
        assert torch.equal(recorded.data["activations", last, *place], output)
        assert torch.equal(recorded.data["network_output", None, *place], output)
        torch.testing.assert_close(recorded.data["layer_gradients", last, *place], 2 * output / output.numel())
        for name, gradient in zip(names, gradients, strict=True):
            module, _, attribute = name.rpartition(".")
            if attribute == "weight":
                assert torch.equal(recorded.data["weight_gradients", module, *place], gradient), name


def identity(message: Message) -> tuple[Any, ...]:
    """What tells a message from all others."""
    return message.kind, message.key, message.global_step, message.tag, message.call, message.leaf


def assert_close(found: dict[Any, Tensor], expected: dict[Any, Tensor], backend: str) -> None:
    """Equal to eager's, bit for bit where the backend runs eager's kernels."""
    assert found.keys() == expected.keys()
    near = {"rtol": 1e-9, "atol": 1e-11} if backend == "inductor" else {"rtol": 0, "atol": 0}
    for key, value in found.items():
        torch.testing.assert_close(
            value, expected[key], **near, equal_nan=True, msg=lambda text, key=key: f"{key}: {text}"
        )


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


@functools.cache
def alone() -> Trained:
    """A training that several recorded ones are compared with: ten steps by aot_eager that nobody watches."""
    return train(Residual, "aot_eager", record=False)


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
    with pytest.warns(RuntimeWarning, match="layer_gradients of 'part' is not observed: inside torch.compile"):
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


# -- what is compiled -----------------------------------------------------------------------------------------


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

    told = r"the forward of Sequential, 'first', 'head' is not observed: torch compiles nothing"
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

    with pytest.warns(RuntimeWarning, match="the inside of '0' is not observed"):
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


# -- what must not break --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["activations", pytest.param("layer_gradients", marks=pytest.mark.slow)])
def test_what_fails_in_an_operator_stays_there(kind: str) -> None:
    """The stream is given up with a warning, and the training is the same; strict, the error reaches the loop."""

    def condition(message: Message) -> bool:
        if message.kind == kind and message.global_step >= 1:
            raise RuntimeError("no luck")
        return True

    with pytest.warns(RuntimeWarning, match="no luck"):
        recorded = train(Residual, "aot_eager", strict=False, condition=condition)
    assert_same_end(recorded, alone())
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
@pytest.mark.usefixtures("double")  # as where the same graph is compiled above, whose machine code is kept
def test_cuda_graphs_end_before_what_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor, asked where it would cut its CUDA graphs, names each of the operators; once, however often it traced.

    That what it captures on a device is recorded in every step, `tests/observing/test_cuda.py` shows.
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
        recorded = unchanged(Residual, "inductor", steps=1)
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


def test_the_page_has_a_row_for_every_test() -> None:
    """The table in docs/semantics.md: each test of this file, its backends, and whether it counts graphs.

    And each compares with the same training without a recorder, as the page says.
    """
    page = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text(encoding="utf-8")
    section = page.split("\n## Inside `torch.compile`\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "`test_" in line and line[0] == "|"]
    found = {name.strip("`"): (backends, "graph" in recorded) for _, recorded, backends, name in rows}
    expected = {}
    for name, test in globals().items():
        if name.startswith("test_") and name != "test_the_page_has_a_row_for_every_test":
            source = inspect.getsource(test).replace("EAGER,", "'eager',")
            assert "unchanged(" in source or "assert_same_end(" in source, name
            told = [one for one in ("eager", "aot_eager", "inductor") if re.search(f"['\"]{one}['\"]", source)]
            expected[name] = ", ".join(told) or "none", "graphs()" in source
    assert found.keys() == expected.keys()
    for name, (backends, counted) in expected.items():
        assert found[name][0] == backends, name
        assert found[name][1] or not counted, name
