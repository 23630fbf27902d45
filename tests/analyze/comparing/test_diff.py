"""`analyze.diff` finds the first message in which two runs part, and says what it could not compare."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tracer
from analyze.comparing.diff import diff
from analyze.comparing.difference import Difference
from tests.analyze.rules.trainings import Fault, Training
from tracer.errors import CaptureError, TraceCorruptError
from tracer.format.names import part_name
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage

STEPS = 8
BASE = Training("mlp", "mlp", steps=STEPS)


# -- the oracle ---------------------------------------------------------------------------------------------------


def key(message: Message) -> tuple[Any, ...]:
    """What a message is matched by."""
    return message.kind, message.key, message.tag, message.leaf, message.rank, message.global_step, message.call


def bits(data: Tensor | None) -> Any:
    """The bytes of a message, with one NaN for all."""
    if data is None:
        return None
    values = torch.where(torch.isnan(data), torch.full_like(data, math.nan), data) if data.is_floating_point() else data
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""


def partings(one: Path, other: Path) -> list[tuple[Any, ...]]:
    """All messages that both have and that differ, in the order of the first."""
    with tracer.open(other) as reader:
        theirs = {key(message): bits(message.data) for message in reader.messages()}
    with tracer.open(one) as reader:
        return [
            key(message)
            for message in reader.messages()
            if key(message) in theirs and theirs[key(message)] != bits(message.data)
        ]


def place(found: Difference) -> tuple[Any, ...]:
    """Where runs part, as `partings` says it."""
    assert found.first is not None
    name = found.first.name
    return name.kind, name.module, name.tag, name.leaf, name.rank, found.first.step, found.first.call


# -- traces -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy training of an MLP."""
    path = tmp_path_factory.mktemp("base") / "a.zarr"
    BASE.run(path)
    return path


def write(path: Path, messages: Iterable[Message], **options: Any) -> Path:
    """Write messages to a trace."""
    with tracer.TraceWriter(path, **options) as writer:
        for message in messages:
            writer.write(message)
    return path


def series(
    values: Sequence[Tensor], kind: str = "weights", module: str | None = "fc", tag: str = "default", rank: int = 0
) -> list[Message]:
    """A message at each step."""
    made: list[Message] = []
    for step, data in enumerate(values):
        where = {"global_step": step, "train_step": step, "epoch": 0, "tag": tag, "rank": rank}
        if module is None:
            made.append(NetworkMessage(kind=kind, data=data, **where))
        else:
            made.append(ModuleMessage(kind=kind, module=module, data=data, **where))
    return made


def two(tmp_path: Path, one: Iterable[Message], other: Iterable[Message]) -> tuple[Path, Path]:
    """Two traces of some messages."""
    return write(tmp_path / "a.zarr", one), write(tmp_path / "b.zarr", other)


# -- trainings ----------------------------------------------------------------------------------------------------


class Nudge(Fault):
    """One element of a weight is moved by one unit in its last place, after a step of the optimizer."""

    def begin(self, step: int, model: nn.Module) -> None:
        if step == 4:
            weight = model.get_parameter("4.weight").data
            weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(math.inf))


class Label(Fault):
    """One label is another one."""

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == 5:
            y = y.clone()
            y[9] = (y[9] + 1) % 8
        return x, y


class Masks(Fault):
    """The generator of the dropout is another one from a step on."""

    def begin(self, step: int, model: nn.Module) -> None:
        if step == 2:
            torch.manual_seed(77)


class Gradient(Fault):
    """One layer's gradient is wrong by a little."""

    def before_step(self, step: int, model: nn.Module) -> None:
        if step == 4:
            grad = model.get_parameter("2.weight").grad
            assert grad is not None
            grad.mul_(1 + 1e-4)


class Poison(Fault):
    """A number of the input is NaN."""

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == 6:
            x = x.clone()
            x[0, 0] = math.nan
        return x, y


@pytest.mark.parametrize(
    ("fault", "step", "kind", "module"),
    [
        (Nudge(), 4, "activations", "4"),
        (Label(), 5, "input_labels", None),
        (Masks(), 2, "activations", "6"),
        (Gradient(), 4, "weight_gradients", "2"),
        (Poison(), 6, "input_data", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Fault) else None,
)
def test_faults(fault: Fault, step: int, kind: str, module: str | None, base: Path, tmp_path: Path) -> None:
    """The first message that differs is found, as a comparison of all messages finds it."""
    path = tmp_path / "b.zarr"
    replace(BASE, fault=fault).run(path)
    found = diff(base, path)
    expected = partings(base, path)
    assert found.parted
    assert not found.identical
    assert found.complete
    assert place(found) == expected[0]
    assert (found.first.step, found.first.name.kind, found.first.name.module) == (step, kind, module)  # type: ignore[union-attr] # it parted
    assert found.differing == found.parted_messages == len(expected)
    assert {one.name for one in found.streams if one.first is not None} == {one.name for one in found.streams}
    assert len(found.streams) == len({one[:5] for one in expected})
    quick = diff(base, path, quick=True)
    assert (place(quick), quick.differing, quick.compared) == (place(found), found.differing, found.compared)


class LargerNudge(Fault):
    """The first parameter is moved by 1e-3."""

    def begin(self, step: int, model: nn.Module) -> None:
        if step == 6:
            next(model.parameters()).data.view(-1)[0] += 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Label(), Masks(), LargerNudge()], ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("network", ["mlp", "deep_tanh", "cnn", "transformer", "rnn"])
def test_more_faults(network: str, fault: Fault, tmp_path: Path) -> None:
    """In each architecture, the first message that differs is the one that a comparison of all messages finds."""
    good = replace(BASE, network=network, optimizer="adamw")
    if isinstance(fault, Label) and network == "transformer":
        fault = LargerNudge()  # its labels are rows
    good.run(tmp_path / "a.zarr")
    replace(good, fault=fault).run(tmp_path / "b.zarr")
    found, expected = diff(tmp_path / "a.zarr", tmp_path / "b.zarr"), partings(tmp_path / "a.zarr", tmp_path / "b.zarr")
    if not expected:  # a network without dropout does not know
        assert isinstance(fault, Masks)
        assert network in ("deep_tanh", "rnn")
        assert not found.parted
        return
    assert place(found) == expected[0]
    assert found.differing == len(expected)


def test_the_largest_difference(base: Path, tmp_path: Path) -> None:
    """Of each stream it is the message with the largest relative difference, as NumPy finds it."""
    path = tmp_path / "b.zarr"
    replace(BASE, fault=Gradient()).run(path)
    found = {(one.name.kind, one.name.module): one for one in diff(base, path).streams}
    for kind, module in (("weights", "2"), ("activations", "7"), ("weight_gradients", "2")):
        (steps, one), (_, other) = (tracer.open(trace).array(kind, module) for trace in (base, path))
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        axes = tuple(range(1, one.ndim))
        apart = np.sqrt(((one - other) ** 2).sum(axes) / (one**2).sum(axes))
        largest = found[kind, module].largest
        assert largest.step == steps[apart.argmax()]
        assert largest.amount.relative == pytest.approx(apart.max(), rel=1e-12)
        assert largest.amount.largest == pytest.approx(np.abs(one - other)[apart.argmax()].max(), rel=1e-12)
        at = (int(apart.argmax()), *largest.amount.place)
        assert (largest.amount.here, largest.amount.there) == (one[at], other[at])
        assert found[kind, module].differing == (apart > 0).sum()


def test_identical(base: Path, tmp_path: Path) -> None:
    """The same training again is bit-identical, and so is a copy in the other format."""
    again = tmp_path / "again.zarr"
    BASE.run(again)
    copy = tmp_path / "copy.h5"
    tracer.convert(base, copy)
    with tracer.open(base) as reader:
        count = len(reader)
    for other in (again, copy, base):
        for quick in (False, True):
            found = diff(base, other, quick=quick)
            assert found.identical
            assert not found.parted
            assert found.complete
            assert found.compared == count
            assert "identical" in found.verdict or quick
            assert found.structure == ()
            assert found.steps == (0, STEPS - 1)


def test_tolerance(tmp_path: Path) -> None:
    """An element may differ by ``atol + rtol * abs(a)``; what differs within it is counted, and is no parting."""
    x = torch.tensor([1.0, 100.0])
    paths = two(tmp_path, series([x, x, x]), series([x, x * (1 + 1e-3), x + torch.tensor([0.0, 2.0])]))
    for options, step in (
        ({}, 1), ({"rtol": 0.01}, 2), ({"atol": 0.2}, 2), ({"rtol": 0.05}, None), ({"atol": 2.0}, None),
        ({"rtol": 0.01, "atol": 1.0}, None), ({"rtol": 5e-4}, 1),
    ):  # fmt: skip
        found = diff(*paths, **options)  # type: ignore[arg-type] # tolerances
        assert (None if found.first is None else found.first.step) == step, options
        assert found.differing == 2
    assert "agree within rtol=0.05: 2 of 3 messages" in diff(*paths, rtol=0.05).verdict
    for options in ({"rtol": -1.0}, {"atol": math.nan}, {"rtol": math.inf}):
        with pytest.raises(CaptureError, match="is a number from 0"):
            diff(*paths, **options)  # type: ignore[arg-type] # tolerances


def test_nan_and_zeros(tmp_path: Path) -> None:
    """NaN is the same as NaN in the same place; a number that is finite in one run only is beyond every tolerance."""
    nan, inf = math.nan, math.inf
    same = torch.tensor([nan, 1.0, inf])
    one, other = [same, same, same], [same, same, torch.tensor([nan, nan, inf])]
    found = diff(*two(tmp_path, series(one), series(other)), rtol=10.0, atol=1e9)
    assert found.first is not None
    assert (found.first.step, found.first.amount.elements, found.first.amount.place) == (2, 1, (1,))
    assert found.first.amount.largest == found.first.amount.relative == inf
    zeros = [torch.tensor([0.0, 1.0])], [torch.tensor([-0.0, 1.0])]
    (tmp_path / "zeros").mkdir()
    found = diff(*two(tmp_path / "zeros", *(series(values) for values in zeros)))
    assert found.first is not None
    assert found.first.amount.signs
    assert "zeros of another sign" in found.verdict
    assert not diff(tmp_path / "zeros/a.zarr", tmp_path / "zeros/b.zarr", atol=1e-30).parted
    (tmp_path / "inf").mkdir()
    opposite = diff(*two(tmp_path / "inf", series([torch.tensor(inf)]), series([torch.tensor(-inf)])), rtol=0.1)
    assert opposite.parted


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.complex64]
)
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Numbers of each dtype are compared; large integers are not rounded on the way."""
    x = torch.tensor([0, 1, 1]).to(dtype)
    y = torch.tensor([0, 1, 0]).to(dtype)
    found = diff(*two(tmp_path, series([x, x]), series([x, y])))
    assert found.first is not None
    assert (found.first.step, found.first.amount.elements, found.first.amount.largest) == (1, 1, 1.0)
    if dtype is torch.int64:
        (tmp_path / "large").mkdir()
        large = [torch.tensor([2**62, -(2**63)])], [torch.tensor([2**62 + 1, 2**63 - 1])]
        found = diff(*two(tmp_path / "large", *(series(values) for values in large)))
        assert found.first is not None
        assert found.first.amount.largest == 2.0**64
        assert found.first.amount.elements == 2


def test_another_dtype(tmp_path: Path) -> None:
    """Where one run has another dtype, that is told, and numbers are compared as numbers."""
    x = torch.tensor([0.5, 0.1])
    found = diff(*two(tmp_path, series([x]), series([x.double()])))
    assert not found.parted
    assert [(one.what, one.one, one.other) for one in found.structure] == [("dtype", "float32", "float64")]
    (tmp_path / "half").mkdir()
    found = diff(*two(tmp_path / "half", series([x]), series([x.half()])))
    assert found.first is not None
    assert (found.first.amount.elements, found.first.amount.place) == (1, (1,))


def test_shapes(tmp_path: Path) -> None:
    """Another shape is a parting that no tolerance allows."""
    paths = two(tmp_path, series([torch.ones(3), torch.ones(3)]), series([torch.ones(3), torch.ones(2, 3)]))
    found = diff(*paths, rtol=1.0, atol=9.0)
    assert found.first is not None
    assert (found.first.step, found.first.amount.shapes) == (1, ((3,), (2, 3)))
    assert "the shapes are (3,) and (2, 3)" in found.verdict


# -- structure ----------------------------------------------------------------------------------------------------


def record(path: Path, model: nn.Module, seed: int = 0, **options: Any) -> Path:
    """Record three steps of a model with made inputs."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(5)
    with tracer.record(path, model, optimizer, loss=nn.functional.mse_loss, **{"capture": tracer.Capture(), **options}):
        for _ in range(3):
            x = torch.randn(6, 4, generator=draw)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x[:, :2]).backward()
            optimizer.step()
    return path


def named(**modules: nn.Module) -> nn.Sequential:
    """A chain of modules with names."""
    model = nn.Sequential()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def linear(seed: int, *sizes: int) -> nn.Linear:
    """A linear layer that does not depend on what was drawn before."""
    torch.manual_seed(seed)
    return nn.Linear(*sizes)


def test_renamed_modules(tmp_path: Path) -> None:
    """Modules of other names are only in one run; with a rename map they are compared, and a map is suggested."""
    a = record(tmp_path / "a.zarr", named(first=linear(1, 4, 3), last=linear(2, 3, 2)))
    b = record(tmp_path / "b.zarr", named(one=linear(1, 4, 3), last=linear(2, 3, 2)))
    found = diff(a, b)
    assert not found.parted
    assert not found.complete
    assert {one.name.module for one in found.uncompared if one.why == "only in A"} == {"first"}
    assert {one.name.module for one in found.uncompared if one.why == "only in B"} == {"one"}
    assert all(one.whole for one in found.uncompared)
    assert found.likely_renamings == (("first", "one"),)
    assert ("module", "first", "torch.nn.modules.linear.Linear", None) in [
        (one.what, one.name, one.one, one.other) for one in found.structure
    ]
    for rename in ({"first": "one"}, "first=one", ["f*t=one"], "first*=one*"):
        again = diff(a, b, rename=rename)
        assert again.identical, rename
        assert not [one for one in again.structure if one.what in ("module", "parameter")]
    with pytest.raises(CaptureError, match="no module is called 'frist'; did you mean 'first'"):
        diff(a, b, rename="frist=one")
    with pytest.raises(CaptureError, match="would both be called 'one'"):
        diff(a, b, rename=["first=one", "last=one"])
    with pytest.raises(CaptureError, match="OLD=NEW"):
        diff(a, b, rename="first")
    with pytest.raises(CaptureError, match="has more"):
        diff(a, b, rename="first=one*")


def test_a_model_within_another(tmp_path: Path) -> None:
    """The root may be renamed: what was the model is a part of a larger one, and back."""
    inner = record(tmp_path / "a.zarr", named(fc=linear(1, 4, 2)))
    outer = record(tmp_path / "b.zarr", named(model=named(fc=linear(1, 4, 2))))
    into = diff(inner, outer, rename={"": "model"}, kinds=["weights", "weight_gradients"])
    assert into.identical
    back = diff(outer, inner, rename={"model": ""}, modules="*fc", kinds=["weights", "biases"])
    assert back.identical
    assert back.compared == 6


def test_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules, parameters, seeds, the capture and the header are compared, and the values of both all the same."""
    monkeypatch.setattr("sys.argv", ["a.py", "--lr", "1"])
    a = record(tmp_path / "a.zarr", named(fc=linear(1, 4, 2), act=nn.ReLU()))
    frozen = named(fc=linear(1, 4, 2), act=nn.GELU())
    frozen.fc.bias.requires_grad_(False)  # type: ignore[union-attr] # a linear layer
    monkeypatch.setattr("sys.argv", ["a.py"])
    b = record(tmp_path / "b.zarr", frozen, seed=3, capture=tracer.Capture(every=2))
    found = diff(a, b)
    told = {(one.what, one.name): (one.one, one.other) for one in found.structure}
    assert told["module", "act"] == ("torch.nn.modules.activation.ReLU", "torch.nn.modules.activation.GELU")
    assert told["parameter", "fc.bias"] == ({"requires_grad": True}, {"requires_grad": False})
    assert told["seed", "torch"] == (0, 3)
    assert told["argv", ""] == (["a.py", "--lr", "1"], ["a.py"])
    assert told["capture", "every"] == (1, 2)
    assert found.first is not None
    assert (found.first.name.kind, found.first.name.module, found.first.step) == ("activations", "act", 0)
    assert {one.why for one in found.uncompared} == {"only in A"}


def test_missing_streams_and_steps(tmp_path: Path) -> None:
    """What one run lacks does not keep the rest from being compared, and is told with its first step."""
    values = [torch.full((2,), float(step)) for step in range(5)]
    one = series(values) + series(values, "biases")
    other = series(values[:3])
    found = diff(*two(tmp_path, one, other))
    assert not found.parted
    assert not found.identical
    assert (found.compared, found.compared_streams) == (3, 1)
    assert [(one.why, one.name.kind, one.count, one.first, one.whole) for one in found.uncompared] == [
        ("only in A", "biases", 5, 0, True), ("only in A", "weights", 2, 3, False),
    ]  # fmt: skip
    assert "bit-identical: 3 messages" in found.verdict
    assert "7 are only in A" in found.verdict


def test_sampling(tmp_path: Path) -> None:
    """Streams that were sampled differently are not compared, and the rest is."""
    model = [named(fc=linear(1, 4, 2)) for _ in range(2)]
    a = record(tmp_path / "a.zarr", model[0], capture=tracer.Capture(rows=3))
    b = record(tmp_path / "b.zarr", model[1], capture=tracer.Capture(rows=2))
    found = diff(a, b)
    assert not found.parted
    refused = {one.name.kind for one in found.uncompared}
    assert {"activations", "layer_gradients", "input_data"} <= refused
    assert not refused & {"weights", "loss", "weight_gradients"}
    assert {one.why for one in found.uncompared} == {"recorded with another sampling"}
    assert any(one.what == "sampling" for one in found.structure)


def test_ranks(tmp_path: Path) -> None:
    """Ranks are compared number by number, and one that only one run has is told."""
    values = [torch.full((2,), float(step)) for step in range(3)]
    for run, wrong in (("a", 0.0), ("b", 1.0)):
        for rank in (0, 1):
            told = [x + wrong * (rank == 1 and step == 2) for step, x in enumerate(values)]
            header = {"run_id": run, "ranks": [0, 1]}
            write(tmp_path / f"{run}.zarr", series(told, rank=rank), header=header, part=part_name(rank, 0))
    both = diff(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert both.first is not None
    assert (both.first.name.rank, both.first.step, both.compared) == (1, 2, 6)
    assert "rank 1" in both.verdict
    assert diff(tmp_path / "a.zarr", tmp_path / "b.zarr", rank=0).identical
    assert diff(tmp_path / "a.zarr", tmp_path / "b.zarr", rank=1).parted
    alone = write(tmp_path / "c.zarr", series(values))
    found = diff(tmp_path / "a.zarr", alone)
    assert not found.parted
    assert {(one.why, one.name.rank, one.count) for one in found.uncompared} == {("only in A", 1, 3)}
    assert ("ranks", [0, 1], [0]) in [(one.what, one.one, one.other) for one in found.structure]
    with pytest.raises(CaptureError, match="nothing of rank 7"):
        diff(tmp_path / "a.zarr", alone, rank=7)


def test_calls_and_order(tmp_path: Path) -> None:
    """Calls are matched by their numbers, and another order of observation is told and does not matter."""
    where = {"kind": "activations", "global_step": 0, "train_step": 0, "epoch": 0}
    first = [ModuleMessage(module="f", call=call, data=torch.tensor([float(call)]), **where) for call in range(3)]
    other = ModuleMessage(module="g", data=torch.ones(2), **where)
    changed = ModuleMessage(module="f", call=2, data=torch.tensor([9.0]), **where)
    found = diff(*two(tmp_path, [*first, other], [other, first[0], first[1], changed]))
    assert found.first is not None
    assert (found.first.call, found.first.name.module) == (2, "f")
    (order,) = (one for one in found.structure if one.what == "order")
    assert order.name == "from step 0 on"


def test_filters(base: Path, tmp_path: Path) -> None:
    """Only what passes the filters is compared."""
    path = tmp_path / "b.zarr"
    replace(BASE, fault=Label()).run(path)
    assert diff(base, path, steps=(0, 5)).identical
    assert diff(base, path, kinds="input_data").identical
    assert diff(base, path, modules="0", kinds="activations", steps=(5, 6)).identical
    found = diff(base, path, modules=["4", "7"], kinds=["weights"])
    assert found.first is not None
    assert (found.first.step, found.compared, found.compared_streams) == (6, 2 * STEPS, 2)
    assert not diff(base, path, tags="eval").compared


# -- traces as they are -------------------------------------------------------------------------------------------


def test_empty(tmp_path: Path) -> None:
    """Of empty traces nothing is compared, and they are not said to be identical."""
    one, other = two(tmp_path, [], series([torch.ones(2)]))
    assert diff(one, one).verdict == "nothing could be compared: neither trace has messages"
    found = diff(one, other)
    assert not found.identical
    assert not found.parted
    assert found.verdict.startswith("nothing could be compared. Not compared: 1 message, of which 1 are only in B")


def test_interrupted_and_running(tmp_path: Path) -> None:
    """What is committed is compared, and that one run did not end is told."""
    values = [torch.full((2,), float(step)) for step in range(4)]
    whole = write(tmp_path / "a.zarr", series(values))
    writer = tracer.TraceWriter(tmp_path / "b.zarr")
    for message in series(values[:2]):
        writer.write(message)
    writer.commit()
    found = diff(whole, tmp_path / "b.zarr")
    assert (found.compared, found.parted, found.complete) == (2, False, False)
    assert ("status", "finished", "recording") in [(one.what, one.one, one.other) for one in found.structure]
    writer.finish("interrupted")
    assert [one.other for one in diff(whole, tmp_path / "b.zarr").structure] == ["interrupted"]


def test_damaged(tmp_path: Path) -> None:
    """A value that fails its checksum is an error, in whichever of the traces it is."""
    values = [torch.randn(40000) for _ in range(2)]
    a, b = two(tmp_path, series(values), series(values))
    file = max((one for one in b.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(bytes(data))
    for pair in ((a, b), (b, a)):
        with pytest.raises(TraceCorruptError):
            diff(*pair)


def test_attempts(tmp_path: Path) -> None:
    """A run that was killed and went on is compared by what counts of it."""
    values = [torch.full((2,), float(step)) for step in range(6)]
    whole = write(tmp_path / "a.zarr", series(values))
    broken = [*values[:3], values[3] + 1]
    write(tmp_path / "b.zarr", series(broken), header={"run_id": "r"}, part=part_name(0, 0))
    header = {"run_id": "r", "attempt": 1, "first_step": 3}
    write(tmp_path / "b.zarr", series(values)[3:], header=header, part=part_name(0, 1))
    found = diff(whole, tmp_path / "b.zarr")
    assert (found.compared, found.differing, found.complete) == (6, 0, True)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Both traces are read in lockstep: never more than a few blocks of them are in memory."""
    values = [torch.full((1 << 17,), float(step)) for step in range(192)]
    a, b = two(tmp_path, series(values), series(values))
    with tracer.open(a) as one, tracer.open(b) as other:
        tracemalloc.start()
        assert diff(one, other).identical
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < sum(value.nbytes for value in values) / 2


def test_json(base: Path, tmp_path: Path) -> None:
    """What is found can be written as JSON and says the same."""
    path = tmp_path / "b.zarr"
    replace(BASE, fault=Label()).run(path)
    found = diff(base, path)
    told = json.loads(json.dumps(found.as_json()))
    assert (told["parted"], told["identical"], told["complete"]) == (True, False, True)
    assert (told["first"]["step"], told["first"]["kind"], told["first"]["module"]) == (5, "input_labels", None)
    assert len(told["streams"]) == len(found.streams)
    assert told["verdict"] == found.verdict


# -- samples ------------------------------------------------------------------------------------------------------


def batches(order: Callable[[int], Sequence[int]], nudge: float = 0.0) -> list[Message]:
    """Two steps of a layer without memory, whose batches are in some order."""
    made: list[Message] = []
    draw = torch.Generator().manual_seed(3)
    for step in range(2):
        where = {"global_step": step, "train_step": step, "epoch": 0}
        x = torch.randn(6, 4, generator=draw)[list(order(step))]
        y = x * 2
        y[x[:, 0].argmax()] += nudge * step
        made.append(NetworkMessage(kind="input_data", data=x, **where))
        made.append(ModuleMessage(kind="activations", module="fc", data=y, **where))
        made.append(NetworkMessage(kind="network_output", data=y.repeat_interleave(2, 0), **where))
        made.append(ModuleMessage(kind="layer_gradients", module="fc", data=y + 1, **where))
        made.append(ModuleMessage(kind="weights", module="fc", data=torch.full((6, 4), float(step)), **where))
    return made


def test_samples_in_another_order(tmp_path: Path) -> None:
    """Rows of the same samples are compared, whatever place they have in their batches."""
    a, b = two(tmp_path, batches(lambda step: range(6)), batches(lambda step: [5, 3, 1, 0, 2, 4]))
    assert diff(a, b).parted
    assert diff(a, b, align="sample").identical
    wrong = write(tmp_path / "c.zarr", batches(lambda step: [5, 3, 1, 0, 2, 4], nudge=1.0))
    found = diff(a, wrong, align="sample")
    assert found.first is not None
    assert (found.first.step, found.first.name.kind, found.first.amount.elements) == (1, "activations", 4)


def test_samples_that_one_run_lacks(tmp_path: Path) -> None:
    """Rows that both have are compared, and how many others there are is told; without a common one nothing is."""
    a, b = two(tmp_path, batches(lambda step: range(6)), batches(lambda step: [4, 2, 0]))
    found = diff(a, b, align="sample")
    assert not found.parted
    assert "6 rows of the batches of A are not in those of the other" in found.remarks
    c = write(tmp_path / "c.zarr", batches(lambda step: [0, 1]))
    d = write(tmp_path / "d.zarr", batches(lambda step: [2, 3]))
    apart = diff(c, d, align="sample")
    assert {one.why for one in apart.uncompared} == {"the batches have no sample in common"}
    assert {one.name.kind for one in apart.uncompared} == {
        "input_data", "activations", "network_output", "layer_gradients",
    }  # fmt: skip


def test_samples_need_inputs(tmp_path: Path) -> None:
    """Without inputs no samples can be aligned, and another word than step and sample is refused."""
    a, b = two(tmp_path, series([torch.ones(2)]), series([torch.ones(2)]))
    with pytest.raises(CaptureError, match="has no input_data, by which samples are aligned"):
        diff(a, b, align="sample")
    with pytest.raises(CaptureError, match="align is 'step' or 'sample'"):
        diff(a, b, align="row")  # type: ignore[arg-type] # what is refused


def test_a_copy_of_the_base_is_left_alone(base: Path, tmp_path: Path) -> None:
    """Comparing changes no file."""
    copy = tmp_path / "copy.zarr"
    shutil.copytree(base, copy)
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    diff(base, copy)
    assert {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()} == before
