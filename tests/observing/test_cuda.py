"""The exporter's contract on a CUDA device; all of it is skipped where there is none.

There are no other values than on a CPU; but there, work is done later than it is asked for, backwards run in threads
of their own, and whoever asks for a value on the host waits. So besides the values, which are compared with what plain
hooks clone in a run without a recorder, these tests ask that the training never waits.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracer
from analyze.registry import parse, subscribers
from tests.observing.cuda_training import DEVICE, batches, by_hand, make, of_modules, repeatable, state, train
from tracer import Capture, Collect
from tracer.messaging.messages import DATA_KINDS, KINDS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures(repeatable.__name__),
]


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_values_and_the_training(suffix: str, tmp_path: Path) -> None:
    """Every value in the trace is, to the bit, what plain hooks clone; the training is as without a recorder."""
    given = batches(3)
    model, optimizer = make()
    expected, remove = by_hand(model, optimizer)
    train(model, optimizer, given)
    remove()
    bare, optimizer = make()
    train(bare, optimizer, given)
    without = state(bare)
    model, optimizer = make()
    with tracer.record(
        tmp_path / f"run.{suffix}", model, optimizer, loss=F.cross_entropy, strict=True, capture=tracer.Capture()
    ):
        train(model, optimizer, given)
    assert all(torch.equal(*pair) for pair in zip(state(model), without, strict=True))
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        found = of_modules(trace)
        assert found.keys() == expected.keys()
        different = [key for key, value in expected.items() if not torch.equal(found[key], value.cpu())]
        assert not different
        assert [one.kind for one in trace.messages("loss")] == ["loss"] * 3


def test_gradients_against_autograd(tmp_path: Path) -> None:
    """Gradients of activations and parameters, against ``autograd.grad`` of a functional copy on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)).to(DEVICE)
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    w0, b0, w1, b1 = (one.detach().cpu().double().requires_grad_() for one in model.parameters())
    h = x.double() @ w0.T + b0
    z = h.clamp(min=0) @ w1.T + b1
    names = {"layer_gradients 0": h, "layer_gradients 2": z, "weight_gradients 0": w0, "bias_gradients 2": b1}
    gradients = torch.autograd.grad(F.cross_entropy(z, y), list(names.values()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = Collect("*")
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, receivers=[heard], strict=True, capture=tracer.Capture()
    ):
        train(model, optimizer, [(x.to(DEVICE), y.to(DEVICE))])
    with tracer.open(tmp_path / "run.zarr") as trace:
        stored = {f"{one.kind} {one.key}": one.data for one in trace.messages() if one.data is not None}
    live = {f"{one.kind} {one.key}": one.data for one in heard if one.data is not None}
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(stored[name].double(), gradient, rtol=1e-3, atol=1e-5)
        assert live[name].device.type == DEVICE
        assert torch.equal(stored[name], live[name].cpu())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # it does not know of all that waits
def test_the_training_never_waits(tmp_path: Path) -> None:
    """No operation of a recorded step, once the first has been taken, makes the host wait for the device."""
    given = batches(6)
    model, optimizer = make()
    capture = [Capture(kinds=["activations"], elements=10), Capture(kinds=["weights"], reduce="mean"), Capture()]
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture, strict=True):
        train(model, optimizer, given[:1])  # the choice of elements is moved to the device, which is waited for
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            train(model, optimizer, given[1:])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert sorted({one.global_step for one in trace.messages("weight_updates")}) == list(range(6))


def test_copies_wait_for_work_that_is_late(tmp_path: Path) -> None:
    """What is made long after it is asked for, in memory that is used again and again, is that of its step."""

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.cuda._sleep(2_000_000)
            return x * 1.0

    model = nn.Sequential(Slow())
    with tracer.record(tmp_path / "run.zarr", model, (), strict=True, capture=tracer.Capture()) as run:
        for step in range(50):
            output = model(torch.full((1 << 18,), float(step), device=DEVICE))
            output.zero_()  # after the record was asked for
            run.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        _, values = trace.array("activations", "0")
        assert [(float(one.min()), float(one.max())) for one in values] == [(s, s) for s in range(50)]


def test_a_stream_of_the_users_own(tmp_path: Path) -> None:
    """A training on another stream than the default one: the copies wait for that one."""
    given = batches(3)
    model, optimizer = make()
    expected, remove = by_hand(model, optimizer)
    train(model, optimizer, given)
    remove()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model, optimizer = make()
        with tracer.record(tmp_path / "run.zarr", model, optimizer, strict=True, capture=tracer.Capture()):
            train(model, optimizer, given)
    with tracer.open(tmp_path / "run.zarr") as trace:
        for kind, module in (("activations", "conv"), ("layer_gradients", "head"), ("weight_updates", "shared")):
            steps, values = trace.array(kind, module)
            for step, value in zip(steps.tolist(), values, strict=True):
                key = (kind, module, step, 0)
                if kind != "activations" or module != "shared":
                    assert torch.equal(torch.from_numpy(value), expected[key].cpu()), key


def test_backwards_run_in_other_threads() -> None:
    """Autograd calls hooks of a CUDA backward from its own thread: they know the step, the call and the tag."""
    model, optimizer = make()
    heard, threads = Collect("layer_gradients"), set[int]()
    exporter = tracer.Exporter(capture=Capture(kinds=DATA_KINDS), strict=True)
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    for x, y in batches(2):
        optimizer.zero_grad()
        output = model(x)
        output.register_hook(lambda _: threads.add(threading.get_ident()))
        F.cross_entropy(output, y).backward()
        optimizer.step()
    exporter.detach()
    assert threads
    assert threading.get_ident() not in threads
    found = [(one.global_step, one.call, one.tag) for one in heard if one.key == "shared"]
    assert found == [(0, 1, "default"), (0, 0, "default"), (1, 1, "default"), (1, 0, "default")]
    assert not exporter.problems


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    """What is computed again, in autograd's thread, is told once and with its own gradient, as without a checkpoint."""

    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.body, self.head, self.on = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2), on

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.body, x, use_reentrant=reentrant) if self.on else self.body(x)
            return self.head(h)

    told = []
    for on in (False, True):
        torch.manual_seed(0)
        model, heard = Checkpointed(on).to(DEVICE), Collect("*")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter = tracer.Exporter(capture=Capture(kinds=["activations", "layer_gradients"]), strict=True)
        exporter.message_bus.register(heard)
        exporter.set_model(model)
        exporter.set_optimizer(optimizer)
        for step in range(2):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(5, 4).to(DEVICE).requires_grad_()).square().sum().backward()
            optimizer.step()
        exporter.detach()
        told.append({(one.kind, one.key, one.global_step, one.call): one.data for one in heard})
    assert told[0].keys() == told[1].keys()
    for key, data in told[0].items():
        torch.testing.assert_close(told[1][key], data)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool, tmp_path: Path) -> None:
    """Float16 under autocast: gradients are told unscaled, a skipped step is an event, the training is as it was."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=1)
        for number, (x, y) in enumerate(batches(4)):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                output = model(x)
            loss = F.cross_entropy(output.float(), y) * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = make()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)

    bare, optimizer = made()
    run(bare, optimizer)
    without = state(bare)
    model, optimizer = made()
    heard = Collect("*")
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, receivers=[heard], strict=True, capture=tracer.Capture()
    ):
        run(model, optimizer)
    assert all(torch.equal(*pair) for pair in zip(state(model), without, strict=True))
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    with tracer.open(tmp_path / "run.zarr") as trace:
        updates = {one.global_step: one.data for one in trace.messages("weight_updates", "head")}
        gradients = {one.global_step: one.data for one in trace.messages("weight_gradients", "head")}
        assert sorted(updates) == [0, 1, 2]
        for step, update in updates.items():
            torch.testing.assert_close(update, -0.1 * gradients[step], rtol=1e-3, atol=1e-5)
        assert {str(one.data.dtype) for one in trace.messages("activations", "head")} == {"torch.float16"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """To the bit, in their dtype; also of tensors that are no contiguous memory, or have no elements."""

    class Given(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return x, x.t(), x[:0], x[0, 0]

    values = torch.randn(4, 6).to(dtype).to(DEVICE)
    with tracer.record(tmp_path / "run.zarr", nn.Sequential(Given()), (), strict=True, capture=tracer.Capture()) as run:
        run.exporter.model(values)
        run.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = {one.leaf: one.data for one in trace.messages("activations", "0")}
    for leaf, expected in zip("0123", (values, values.t(), values[:0], values[0, 0]), strict=True):
        own = expected.cpu().contiguous()
        assert found[leaf].dtype is dtype
        assert found[leaf].shape == own.shape
        assert torch.equal(found[leaf].reshape(-1).view(torch.uint8), own.reshape(-1).view(torch.uint8))


def test_probes_leave_the_devices_generator_alone(tmp_path: Path) -> None:
    """A probe of a network with dropout between the steps of a training changes neither generator nor training."""
    given = batches(3)
    bare, optimizer = make()
    train(bare, optimizer, given)
    without = state(bare)
    model, optimizer = make()
    with tracer.record(tmp_path / "run.zarr", model, optimizer, strict=True, capture=tracer.Capture()) as run:
        run.probe("fixed", given[0][0], given[0][1], every=1, batch_size=5)
        train(model, optimizer, given)
    assert all(torch.equal(*pair) for pair in zip(state(model), without, strict=True))
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace.messages("network_output", tags="fixed")] == [0, 1, 2, 3]


# -- memory of a CUDA device: too little of it, and all of it given back; skipped where there is non----------


def test_no_memory_left_for_the_copies(tmp_path: Path) -> None:
    """A device without room for what is to be recorded: the training goes on, and the trace says what it lacks."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    elements = 16 << 20  # 64 MB

    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.expand(8, elements)  # recorded, it takes 512 MB

    model = nn.Sequential(Large(), nn.Identity())
    held = torch.zeros(elements, device=DEVICE)
    model[1].weight = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (before + (128 << 20)) / total))
    try:
        with pytest.warns(RuntimeWarning, match="memory"):
            with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture()) as run:
                for _ in range(3):
                    optimizer.zero_grad()
                    model(held)
                    model[1].weight.sum().backward()
                    optimizer.step()
                assert any("memory" in one["why"] for one in run.exporter.problems)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(model[1].weight.detach().cpu(), torch.tensor([-0.5, -0.5]))
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert [one.global_step for one in trace.messages("weight_updates")] == [0, 1, 2]


def test_memory_of_the_device_is_given_back(tmp_path: Path) -> None:
    """However long a training is: what its recording holds on the device is bounded by the queue, and then nothing."""
    given = batches(1)
    model, optimizer = make()
    train(model, optimizer, given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bound = 1 << 20
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, strict=True, queue_bytes=bound, capture=tracer.Capture()
    ):
        for _ in range(200):
            train(model, optimizer, given)
    written = sum(one.stat().st_size for one in (tmp_path / "run.zarr").rglob("*") if one.is_file())
    assert written > 8 * bound
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 4 * bound, peak
    del given
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


# -- scripts, certificates and ranks on a CUDA device; all of it is skipped where there is none --------------


ROOT = Path(__file__).parents[2]


PROGRAM = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3)).to("DEVICE")
    opt = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("DEVICE", init_scale=64.0)
    data = TensorDataset(torch.randn(20, 4), torch.arange(20) % 3)
    loader = DataLoader(data, 8, shuffle=True, num_workers=WORKERS, pin_memory=True, multiprocessing_context=CONTEXT)
    for epoch in range(2):
        for a, b in loader:
            a, b = a.to("DEVICE", non_blocking=True), b.to("DEVICE", non_blocking=True)
            opt.zero_grad()
            with torch.autocast("DEVICE", torch.float16):
                loss = F.cross_entropy(net(a), b)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    print("weights", float(net[0].weight.detach().double().sum()), float(torch.rand(1)))
    print("device", float(torch.rand(1, device="DEVICE")), float(loss))
"""


@pytest.mark.parametrize(("workers", "context"), [(0, "None"), (2, "'fork'"), (2, "'spawn'")])
def test_an_unmodified_script(workers: int, context: str, tmp_path: Path) -> None:
    """``trace record`` of a script as people write them: its output is what it is alone, and all of it is there."""
    body = PROGRAM.replace("DEVICE", DEVICE).replace("WORKERS", str(workers)).replace("CONTEXT", context)
    (tmp_path / "train.py").write_text(body)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    printed = []
    for before in ([], ["-m", "tracereel", "record", "--out", "run.zarr"]):
        done = subprocess.run(
            [sys.executable, *before, "train.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        updates = list(trace.messages("weight_updates", "3"))
        assert [one.global_step for one in updates] == list(range(6))
        assert [one.epoch for one in updates] == [0, 0, 0, 1, 1, 1]
        assert len(list(trace.messages("loss"))) == 6


def test_a_certificate() -> None:
    """Generators, parameters and moments of the device are compared; a recorder that changes nothing is identical."""

    def training(record: Any) -> None:
        model, _ = make()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with record(model, optimizer):
            train(model, optimizer, batches(5))

    certificate = tracer.certify(training, steps=4)
    assert certificate.verdict == "identical", certificate.reason


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
@pytest.mark.filterwarnings("ignore")  # of torch's own collectives
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_ranks(wrapper: str, tmp_path: Path) -> None:
    """DDP and FSDP2 on streams of their own (here a world of one): the values of a training that nobody wraps."""
    given = batches(3)
    model, optimizer = make()
    expected, remove = by_hand(model, optimizer)
    train(model, optimizer, given)
    remove()
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, _ = make()
        wrapped: nn.Module = model
        if wrapper == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            for one in (model.conv, model.shared, model.head, model):
                torch.distributed.fsdp.fully_shard(one)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        with tracer.record(tmp_path / "run.zarr", wrapped, optimizer, strict=True, capture=tracer.Capture()):
            train(wrapped, optimizer, given)
    finally:
        torch.distributed.destroy_process_group()
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = of_modules(trace)
    assert found.keys() == expected.keys()
    different = [key for key, value in expected.items() if not torch.allclose(found[key], value.cpu(), 1e-5, 1e-6)]
    assert not different


# -- what subscribers say of the tensors of a CUDA device; all of it is skipped where there is none ----------


def test_every_subscriber_hears_the_device(tmp_path: Path) -> None:
    """What a subscriber says of the device's tensors while it trains, it says, to the bit, of the trace."""
    model, optimizer = make()
    names = [name for name in subscribers() if not parse(name).needs_model]
    heard = Collect("*")
    given = batches(4)
    with tracer.record(
        tmp_path / "run.zarr",
        model,
        optimizer,
        capture=Capture(kinds=DATA_KINDS),
        receivers=[*(parse(name) for name in names), heard],
        loss=F.cross_entropy,
        strict=True,
    ) as run:
        run.probe("probe", *given[0], every=2)
        train(model, optimizer, given)
    derived = {kind for name in names for kind in parse(name).produces}

    def said(messages: Iterable[tracer.Message]) -> list[Any]:
        return [
            (
                *(one.kind, one.key, one.global_step, one.tag, one.call, one.leaf),
                None if one.data is None else bits(one.data),
            )
            for one in messages
            if one.kind in derived
        ]

    later = Collect("*")
    tracer.replay(tmp_path / "run.zarr", *(parse(name) for name in names), later)
    live = said(heard)
    assert len({one[0] for one in live}) > len(names) / 2
    assert live == said(later)


def test_derivatives_of_the_loss_on_the_device(tmp_path: Path) -> None:
    """Taken while hooks hang that run in the device's thread, they wait for no lock, change nothing, and are right."""

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0)
        for x, y in batches(3):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    model, optimizer = make()
    scaled(model, optimizer)
    expected = state(model)
    model, optimizer = make()
    names = [name for name in subscribers() if parse(name).needs_model]
    heard = Collect("*")
    with tracer.record(
        tmp_path / "run.zarr",
        model,
        optimizer,
        capture=Capture(kinds=KINDS),
        receivers=[*map(parse, names), heard],
        loss=F.cross_entropy,
        strict=True,
    ):
        scaled(model, optimizer)
    assert all(map(torch.equal, expected, state(model)))
    produced = {kind for name in names for kind in parse(name).produces}
    assert {one.kind for one in heard} >= produced
    assert {one.leaf for one in heard.of("layer_gradients")} == {""}

    on_host = Collect("loss_hessian_trace")
    model, _ = make()
    model.cpu().drop.p = 0.0
    alike = make()[0]
    alike.drop.p = 0.0
    on_device = Collect("loss_hessian_trace")
    for one, where, told in ((model, "cpu", on_host), (alike, DEVICE, on_device)):
        exporter = tracer.Exporter(strict=True)
        exporter.set_model(one)
        exporter.set_loss(F.cross_entropy)
        exporter.message_bus.register(parse("hessian_trace"))
        exporter.message_bus.register(told)
        x, y = batches(1)[0]
        F.cross_entropy(one(x.to(where)), y.to(where)).backward()
        exporter.detach()
    ((host,), (device,)) = (
        [float(said.data) for said in told if said.data is not None] for told in (on_host, on_device)
    )
    assert device == pytest.approx(host, rel=0.02)  # convolutions have 10 bits of precision there


def bits(data: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor to the bit, wherever it is."""
    own = data.detach().cpu().contiguous()
    return str(own.dtype), tuple(own.shape), own.reshape(-1).view(torch.uint8).numpy().tobytes()
