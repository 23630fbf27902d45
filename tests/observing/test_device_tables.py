"""Tensors of a device are read together, and before they change; tried on the processor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tracer
from benchmarks.gpu import GPT, Bottleneck
from tests.observing.device_cases import laid_out, numbers, wrong_entries, wrong_hash
from tests.observing.test_device_numbers import WAITS
from tests.observing.triton_on_numpy import Kernel, cpu_as_device, kernels_on_numpy
from tracer import Capture
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import Message
from tracer.messaging.pulses import is_pulse
from tracer.observing.device import reading
from tracer.observing.device.reading import DeviceTable
from tracer.observing.pytorch import autograd

CPU = torch.device("cpu")
KINDS = (
    *("activations", "layer_gradients", "weights", "biases"),
    *("weight_gradients", "bias_gradients", "weight_updates", "bias_updates"),
)


def wrong(table: DeviceTable, number: int, expected: Tensor) -> list[str]:
    """What is wrong with a reading."""
    hashed, statistics = table.made("hash", [number])[0], table.made("statistics", [number])[0]
    return wrong_hash(expected, hashed) + wrong_entries(expected, statistics)


@pytest.mark.usefixtures(kernels_on_numpy.__name__)
def test_a_launch_reads_all_of_a_dtype() -> None:
    """In any order, of any size."""
    table = DeviceTable(CPU)
    given = [numbers(dtype, size) for size in (5, 40000, 300) for dtype in ("float32", "bfloat16", "bool")]
    read = [table.read(x) for x in given]
    before = Kernel.launches
    table.flush()
    assert Kernel.launches - before == 3
    order = [4, 0, 8, 2, 2, 6]
    hashes, statistics = (table.made(what, [read[one] for one in order]) for what in ("hash", "statistics"))
    assert Kernel.launches - before == 5
    for one, hashed, entries in zip(order, hashes, statistics, strict=True):
        assert wrong_hash(given[one], hashed) + wrong_entries(given[one], entries) == []
    table.clear()
    assert table.read(given[0]) == 0


@pytest.mark.usefixtures(kernels_on_numpy.__name__)
def test_other_layouts_and_dtypes_take_an_operation_more() -> None:
    """Each; all are read in one launch for each dtype."""
    odd = [*laid_out(), *((dtype, numbers(dtype, 100)) for dtype in ("float8_e4m3fn", "uint16", "uint32"))]
    for name, x in odd:
        if x.is_complex() or x.is_neg() or name.startswith(("bfloat16", "int64")):
            continue
        table = DeviceTable(CPU)
        table.read(numbers("float32", 3))
        with Operations() as operations:
            number = table.read(x)
        assert len(operations.names) <= 1, (name, operations.names)
        assert wrong(table, number, x) == [], name


@pytest.mark.usefixtures(kernels_on_numpy.__name__)
def test_what_changes_in_place_is_read_before() -> None:
    """From the first time on; what does not change waits, from the second time on."""
    table, launches = DeviceTable(CPU), []
    for step in range(4):
        calm, changed = numbers("float32", 100) + step, numbers("float32", 200) + step
        whole = changed.clone()
        before = Kernel.launches
        numbers_read = table.read(calm, "calm"), table.read(changed, "changed")
        changed.relu_()
        launches.append(Kernel.launches - before)
        assert not table.lost()
        assert wrong(table, numbers_read[0], calm) + wrong(table, numbers_read[1], whole) == []
        table.clear()
    assert launches[1:] == [1, 1, 1]


@pytest.mark.usefixtures(kernels_on_numpy.__name__)
@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.set_(torch.zeros(100)), lambda x: x.resize_(0)])
def test_what_changes_for_the_first_time_is_lost(change: Callable[[Tensor], Any]) -> None:
    """And nothing else; afterwards it is read at once."""
    table = DeviceTable(CPU)
    for step in range(4):
        x, other = torch.ones(100), torch.ones(50)
        number, beside = table.read(x, "it"), table.read(other, "other")
        if step:
            change(x)
        assert table.lost().keys() == ({number} if step == 1 else set())
        assert wrong(table, beside, torch.ones(50)) == []
        if step != 1:
            assert wrong(table, number, torch.ones(100)) == []
        table.clear()


@pytest.mark.usefixtures("only_counted")
def test_no_more_waits_than_may() -> None:
    """Neither of what is to be read, nor of what is observed."""
    table = DeviceTable(CPU, most_bytes=10_000)
    for key in (None, *range(20)):
        alive = []
        for _ in range(20):
            x = torch.ones(500)
            memory = x.untyped_storage()
            table.read(x, key)
            alive.append(memory)
            del x, memory
        kept = sum(torch._C._storage_Use_Count(one._cdata) > 1 for one in alive)
        assert kept <= 7
    table.clear()


@pytest.mark.usefixtures(kernels_on_numpy.__name__)
def test_copies_and_differences() -> None:
    """Are made together, at the next flush, as torch makes them one by one."""
    table, now = DeviceTable(CPU), [numbers("float32", size).reshape(2, -1) for size in (10, 20000)]
    now.append(numbers("bfloat16", 3000).reshape(30, 100).t())
    before = [table.copy(x) for x in now]
    table.flush()
    assert all(map(torch.equal, before, now))
    for x in now:
        x.mul_(1.01)
    with Operations() as operations:
        read = [table.read_difference(x, y) for x, y in zip(now, before, strict=True)]
        table.flush()
    assert operations.names.count("_foreach_sub") == 2
    for number, x, y in zip(read, now, before, strict=True):
        assert wrong(table, number, x - y) == []
    assert table.read_difference(torch.ones(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)) is None


@pytest.mark.usefixtures(kernels_on_numpy.__name__)
def test_where_a_kernel_fails_nothing_that_waits_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed by operations of torch; what had been read before is lost, and a warning says why."""
    table, x = DeviceTable(CPU), numbers("float32", 300)
    early = table.read(x)
    table.flush()
    late = table.read(x)
    monkeypatch.setattr(reading.launcher_of(CPU), "read", lambda *_: 1 / 0)
    with pytest.warns(RuntimeWarning, match="Triton fails there: ZeroDivisionError"):
        assert table.lost() == {early: "Triton failed after reading it"}
    assert wrong(table, late, x) == []
    assert table.read(x) is None


@pytest.mark.usefixtures(kernels_on_numpy.__name__)
def test_a_device_without_memory_loses_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the kernels are used on."""
    table, x = DeviceTable(CPU), numbers("float32", 300)
    lost = table.read(x)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(reading.launcher_of(CPU), "read", full)
        table.flush()
    number = table.read(x)
    assert table.lost() == {lost: "the device had no memory left to read it"}
    assert wrong(table, number, x) == []


# -- recordings -------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """The names of the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(("empty", "detach", "_unsafe_view"))):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Small(nn.Module):
    """A network whose activations change in place, by a module and without one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Identity(), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body[0](x)
        h += x
        return self.head(self.body[2:](self.body[1](h)))


def resnet50() -> tuple[nn.Module, Tensor, Tensor]:
    """With as many layers as a ResNet-50 has, on small images."""
    layers = [nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inner = 4
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            layers.append(Bottleneck(inner, 4 << stage, 1 if block or not stage else 2))
            inner = 16 << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10)]
    return nn.Sequential(*layers), torch.randn(2, 3, 64, 64), torch.randint(10, (2,))


def gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    """With as many layers as a GPT-2 (small) has, of small width."""
    tokens = torch.randint(101, (2, 17))
    return GPT(101, 16, 12, 32, 4), tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


def train(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """A step, in mixed precision."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def recorded(path: Path, steps: int) -> dict[Any, Tensor]:
    """The hashes and statistics of a training, by stream, step and call."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    captures = [Capture(kinds=KINDS, reduce=what) for what in ("statistics", "hash")]
    with tracer.record(path, model, optimizer, capture=captures, strict=True):
        for _ in range(steps):
            train(model, torch.randn(4, 6), torch.randint(3, (4,)), optimizer)
    with tracer.open(path) as trace:
        messages = [one for one in trace.messages() if one.data is not None]
        assert len({(m.kind, m.key, m.leaf) for m in messages}) == 60
        return {(m.kind, m.key, m.leaf, m.global_step, m.call): m.data for m in messages}


def test_a_recording_has_what_the_host_makes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Of activations that change in place, of gradients, weights and updates."""
    expected = recorded(tmp_path / "host.zarr", 3)
    request.getfixturevalue(cpu_as_device.__name__)
    found = recorded(tmp_path / "device.zarr", 3)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if value.dtype is torch.float64:
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, equal_nan=True, msg=str(key))
        else:
            assert torch.equal(found[key], value), key


@pytest.fixture
def only_counted(cpu_as_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are counted, and compute nothing."""
    monkeypatch.setattr(Kernel, "computes", False)


@pytest.mark.usefixtures(only_counted.__name__)
@pytest.mark.parametrize("make", [resnet50, gpt2])
def test_launches_and_messages_of_a_step(
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 60 launches, none that waits, and no message of a stream, for all streams of all layers."""
    torch.manual_seed(0)
    model, x, y = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(model, x, y, optimizer)
    with Operations() as bare:
        train(model, x, y, optimizer)
    published: list[Message] = []
    captures = [*(Capture(kinds=KINDS, reduce=what) for what in ("statistics", "hash")), Capture(kinds=["loss"])]
    monkeypatch.setattr(autograd, "_disable_current_modes", contextlib.nullcontext)  # so that observing is counted
    publish = MessageBus.publish
    monkeypatch.setattr(MessageBus, "publish", lambda bus, one: (published.append(one), publish(bus, one)))
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=captures, strict=True):
        for _ in range(3):
            published.clear()
            before = Kernel.launches
            with Operations() as operations:
                train(model, x, y, optimizer)
    more = list(operations.names)
    for name in bare.names:
        more.remove(name)
    rows = sum(len(one.sampling["rows"]) for one in published if is_pulse(one))
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert sum(1 for _ in trace.messages()) == 3 * (rows + 1)
    assert not set(more) & set(WAITS)
    assert Kernel.launches - before + len(more) <= 60
    assert [one.kind for one in published if not is_pulse(one)] == ["loss"]


@pytest.mark.usefixtures(cpu_as_device.__name__)
def test_a_row_that_was_not_read_in_time_is_left_out(tmp_path: Path) -> None:
    """A problem says so; the rows around it are right, and so are those of later steps."""

    class Fickle(nn.Module):
        changes = False

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(h.mul_(2) if self.changes else h * 2)

    torch.manual_seed(0)
    model, expected = Fickle(), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    capture = Capture(kinds=["activations"], reduce="hash")
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture, strict=True) as run:
        for step in range(5):
            x, model.changes = torch.randn(4, 3), step in (2, 4)
            expected[step] = nn.functional.linear(x, *model.first.parameters()).detach()
            model(x).sum().backward()
            if step == 2:
                with pytest.warns(
                    RuntimeWarning, match="activations of first is not recorded: it was changed in place"
                ):
                    optimizer.step()
            else:
                optimizer.step()
        assert [one["what"] for one in run.exporter.problems] == ["activations of first"]
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = {m.global_step: m.data for m in trace.messages("activations_hash") if m.key == "first"}
        assert found.keys() == {0, 1, 3, 4}
        assert sum(1 for m in trace.messages("activations_hash") if m.key == "last") == 5
    for step, hashed in found.items():
        assert wrong_hash(expected[step], hashed) == []
