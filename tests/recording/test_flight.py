"""A flight recorder: what it holds, when it writes, that the trace then has these steps in full and no others."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer
from tests import processes
from tracer import Capture, CaptureError, Collect, Flight, Message, Receiver, UnknownNameError
from tracer.errors import StopTraining
from tracer.messaging.messages import NetworkMessage, checked, with_data
from tracer.recording.flight import PER_MESSAGE, Ring, size_of
from tracer.recording.run import Run
from tracer.recording.transfers import ELSEWHERE, Copy

ROOT = Path(__file__).parents[2]
FORMATS = ("zarr", "h5")
LIGHT = Capture(kinds=["loss", "epoch_finished"])
ALL = Capture(tags=["default"])

Key = tuple[Any, ...]


def network() -> nn.Module:
    """A small network with dropout, so that a generator that is drawn from once more is seen."""
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def train(
    path: Path | None,
    steps: int = 30,
    *,
    seed: int = 0,
    bad: int | None = None,
    each: Callable[[Run, int], object] = lambda run, step: None,
    **options: Any,
) -> nn.Module:
    """Train some steps; the inputs of step `bad` have a NaN. Without a path nothing is recorded."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loop(run: Run | None) -> None:
        for step in range(steps):
            inputs = torch.randn(8, 6)
            if step == bad:
                inputs[2, 1] = float("nan")
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if run is not None:
                each(run, step)
                if step % 10 == 9:
                    run.epoch_finished()

    if path is None:
        loop(None)
    else:
        with tracer.record(path, model, optimizer, **{"capture": tracer.Capture(), **options}) as run:
            loop(run)
    return model


def key(message: Message) -> Key:
    """What tells a message from all others of a run."""
    return message.global_step, message.kind, message.key, message.tag, message.call, message.leaf


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def flights(trace: tracer.TraceReader) -> list[dict[str, Any]]:
    """Why something was written, in order."""
    return [note["flight"] for note in trace.notes if "flight" in note]


def is_full(path: Path, whole: Path, steps: range, light: Capture = LIGHT) -> None:
    """Assert that a trace has some steps as a full recording has them, and of others what a light capture takes."""
    with tracer.open(path) as trace, tracer.open(whole) as full:
        found, expected = list(trace), {key(one): one for one in full}
        order = [key(one) for one in full if one.global_step in steps]
    keys = [key(one) for one in found]
    assert len(keys) == len(set(keys)), "no message is there twice"
    assert all(same(one.data, expected[key(one)].data) for one in found)
    assert {one for one in keys if one[0] in steps} == set(order)
    rest = {one for one in expected if one[0] not in steps and one[1] in (light.kinds or ())}
    rest = {one for one in rest if light.due(one[1], one[3], one[0]) or one[1] == "epoch_finished"}
    assert {one for one in keys if one[0] not in steps} == rest
    # what is written late is in the order of a full recording
    ordinary = {one for one in keys if one[1] in (light.kinds or ()) and light.due(one[1], one[3], one[0])}
    assert [one for one in keys if one not in ordinary] == [one for one in order if one not in ordinary]


# -- a NaN in a training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_nan_is_written_with_the_steps_around_it(seed: int, tmp_path: Path) -> None:
    """Those before and after are there in full and in order, equal to a full recording's, and no other step is."""
    chance = random.Random(seed)
    bad, before, after = chance.randrange(30), chance.randrange(6), chance.randrange(5)
    light = chance.choice([LIGHT, Capture(kinds=["loss"], every=3), Capture(kinds=["weights", "loss"], every=4)])
    suffix = FORMATS[seed % 2]
    path, whole = tmp_path / f"run.{suffix}", tmp_path / f"whole.{suffix}"
    train(whole, seed=seed, bad=bad, capture=ALL)
    flight = Flight(before=before, after=after, when=["non_finite"])
    train(path, seed=seed, bad=bad, capture=light, flight=flight)
    with tracer.open(path) as trace:
        (told,) = flights(trace)
    first = max(0, bad - before)
    assert told == {
        "trigger": "non_finite",
        "why": "activations of '0' had NaN or infinities",
        "global_step": bad,
        "first_step": first,
        "last_step": bad + after,
    }
    is_full(path, whole, range(first, min(30, bad + after + 1)), light)


@pytest.mark.parametrize("suffix", FORMATS)
def test_without_a_reason_nothing_is_written(suffix: str, tmp_path: Path) -> None:
    """The trace is the one that there is without a flight recorder, but for what the header says of it."""
    train(tmp_path / f"run.{suffix}", capture=LIGHT, flight=Flight())
    train(tmp_path / f"plain.{suffix}", capture=LIGHT)
    with tracer.open(tmp_path / f"run.{suffix}") as trace, tracer.open(tmp_path / f"plain.{suffix}") as plain:
        assert [key(one) for one in trace] == [key(one) for one in plain]
        assert all(same(one.data, other.data) for one, other in zip(trace, plain, strict=True))
        assert flights(trace) == []
        told = trace.header["flight"]
        assert (told["before"], told["after"], told["bytes"]) == (8, 4, 1 << 30)
        assert told["when"] == ["non_finite", "loss", "exception", "signal"]
        assert "flight" not in plain.header


@pytest.mark.parametrize("bad", [None, 12])
def test_training_is_the_same_to_the_bit(bad: int | None, tmp_path: Path) -> None:
    """With a flight recorder that writes or does not, and without a recorder."""
    bare = train(None, bad=bad)
    state = torch.random.get_rng_state()
    seen = train(
        tmp_path / "run.zarr", bad=bad, capture=LIGHT, flight=Flight(when=["non_finite", "loss", "norm", "exception"])
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in bare.state_dict().items():
        assert same(value, seen.state_dict()[name]), name
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in seen.modules())


# -- the ring -----------------------------------------------------------------------------------------------------


def message(step: int, elements: int) -> Message:
    """A message with so many numbers of four bytes."""
    return NetworkMessage(kind="loss", global_step=step, train_step=step, epoch=0, data=torch.zeros(elements))


def test_a_ring_stays_below_its_bound() -> None:
    """Whatever comes, the oldest steps leave first, and all messages of a step together."""
    chance = random.Random(7)
    ring = Ring(100_000)
    held: dict[int, list[Message]] = {}
    for step in range(200):
        for _ in range(chance.randrange(1, 6)):
            one = message(step, chance.choice([1, 10, 1000, 4000, 9000]))
            ring.hold(one)
            held.setdefault(step, []).append(one)
            assert ring.nbytes <= 100_000
    first = ring.whole_from
    assert 0 < first < 200
    assert sum(size_of(one) for step in range(first, 200) for one in held[step]) == ring.nbytes
    found = list(ring.emptied())
    assert [id(one) for one in found] == [id(one) for step in range(first, 200) for one in held[step]]
    assert ring.nbytes == 0


def test_a_step_above_the_bound_is_not_held() -> None:
    """Nor what comes of it later; the next step is."""
    ring = Ring(10_000)
    for elements in (1000, 1000, 1000, 1):
        ring.hold(message(0, elements))
    assert (ring.nbytes, ring.too_large, ring.whole_from) == (0, 0, 1)
    ring.hold(message(1, 1000))
    assert (ring.nbytes, ring.too_large) == (4000 + PER_MESSAGE, 0)


def test_data_on_its_way() -> None:
    """It counts from the beginning, is there when it is waited for, and is left out if somebody changed it."""
    ring = Ring(10_000)
    copies = [Copy.made(torch.full((100,), float(number))) for number in range(4)]
    for number, copy in enumerate(copies):
        ring.hold(with_data(message(number, 1), ELSEWHERE), copy)
        ring.hold(message(number, 2))
    assert ring.nbytes == 4 * (400 + 8 + 2 * PER_MESSAGE)
    ring.drop_before(1)
    ring.settle(lambda copy: None if copy is copies[2] else copy.host)
    assert ring.nbytes == 3 * (8 + PER_MESSAGE) + 2 * (400 + PER_MESSAGE)
    data = [one.data for one in ring.emptied()]
    assert [None if one is None else (len(one), float(one[0])) for one in data] == [
        *((100, 1.0), (2, 0.0)),
        *((2, 0.0),),
        *((100, 3.0), (2, 0.0)),
    ]
    assert ring.nbytes == 0


def test_a_view_counts_as_what_it_keeps_alive() -> None:
    """The memory behind the data is held, not only the data."""
    part = checked("loss", None, 0, 0, 0, "default", 0, "", 0, torch.zeros(1000)[:2])
    assert size_of(part) == PER_MESSAGE + 4000


def test_a_bound_shortens_what_is_there(tmp_path: Path) -> None:
    """The note says from which step on all is there, and it is; the ring was never above its bound."""
    train(tmp_path / "whole.zarr", bad=20, capture=ALL)
    peaks: list[int] = []

    def look(run: Run, step: int) -> None:
        assert run.flight is not None
        peaks.append(run.flight._ring.nbytes)

    flight = Flight(before=10, after=0, bytes=100_000, when=["non_finite"])
    train(tmp_path / "run.zarr", bad=20, capture=LIGHT, flight=flight, each=look)
    assert 70_000 < max(peaks) <= 100_000
    with tracer.open(tmp_path / "run.zarr") as trace:
        (told,) = flights(trace)
    assert 10 < told["first_step"] < 20
    is_full(tmp_path / "run.zarr", tmp_path / "whole.zarr", range(told["first_step"], 21))


def test_a_step_that_is_too_large_is_told(tmp_path: Path) -> None:
    """In one sentence, once; nothing of it reaches the trace, and those after a trigger do all the same."""
    with pytest.warns(RuntimeWarning, match="more than the 5,000 bytes"):
        train(
            tmp_path / "run.zarr", bad=5, capture=LIGHT, flight=Flight(before=3, after=2, bytes=5000, when="non_finite")
        )
    with tracer.open(tmp_path / "run.zarr") as trace:
        (problem,) = [note["problem"] for note in trace.notes if "problem" in note]
        assert problem["why"] == "a step has more than the 5,000 bytes that may be held, so nothing of it is held"
        (told,) = flights(trace)
        assert (told["first_step"], told["last_step"]) == (6, 7)
        assert {one.global_step for one in trace if one.kind == "weights"} == {6, 7}


# -- why it writes ------------------------------------------------------------------------------------------------


def test_a_second_trigger_extends_the_first(tmp_path: Path) -> None:
    """No step is there twice, and each reason is told."""
    train(tmp_path / "whole.zarr", capture=ALL)

    def ask(run: Run, step: int) -> None:
        if step in (10, 12, 13):
            run.keep(f"look at {step}")

    train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(before=4, after=3), each=ask)
    with tracer.open(tmp_path / "run.zarr") as trace:
        told = [(one["trigger"], one["why"], one["first_step"], one["last_step"]) for one in flights(trace)]
    assert told == [("keep", "look at 10", 6, 13), ("keep", "look at 12", 8, 15), ("keep", "look at 13", 9, 16)]
    is_full(tmp_path / "run.zarr", tmp_path / "whole.zarr", range(6, 17))


def test_two_times_apart(tmp_path: Path) -> None:
    """Steps between them are not written, and those that both could have are there once."""
    train(tmp_path / "whole.zarr", capture=ALL)

    def ask(run: Run, step: int) -> None:
        if step in (5, 9, 20):
            run.keep("look")

    train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(before=3, after=1), each=ask)
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps = sorted({one.global_step for one in trace if one.kind == "weights"})
    assert steps == [*range(2, 11), *range(17, 22)]


def test_keep_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """It is written when it is over."""
    train(tmp_path / "whole.zarr", capture=ALL)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=LIGHT, flight=Flight(before=1, after=0)) as run:
        for step in range(10):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 6)).square().mean()
            if step == 5:
                run.keep("this one")
            loss.backward()
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace, tracer.open(tmp_path / "whole.zarr") as whole:
        found = {key(one) for one in trace if one.global_step in (4, 5)}
        assert found == {key(one) for one in whole if one.global_step in (4, 5)}
        assert sorted({one.global_step for one in trace if one.kind == "weights"}) == [4, 5]


def test_an_error_writes_what_is_held(tmp_path: Path) -> None:
    """With what there is of the step in which it was raised."""
    train(tmp_path / "whole.zarr", capture=ALL)

    def fail(run: Run, step: int) -> None:
        if step == 14:
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(before=5), each=fail)
    with tracer.open(tmp_path / "run.zarr") as trace, tracer.open(tmp_path / "whole.zarr") as whole:
        (told,) = flights(trace)
        assert (told["trigger"], told["why"], told["global_step"]) == ("exception", "ValueError: no more", 14)
        expected = {key(one) for one in whole if 9 <= one.global_step <= 14}
        assert {key(one) for one in trace if one.global_step >= 9} == expected
        assert not any(one.kind == "weights" and one.global_step < 9 for one in trace)


def test_an_error_inside_a_step(tmp_path: Path) -> None:
    """The forward that failed is there as far as it came."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def run() -> None:
        with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=LIGHT, flight=Flight(before=1)):
            for step in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 6 if step < 5 else 7)).square().mean().backward()
                optimizer.step()

    with pytest.raises(RuntimeError):
        run()
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps = {one.global_step for one in trace if one.kind != "loss"}
        (inputs,) = [one.data for one in trace if one.kind == "input_data" and one.global_step == 5]
    assert steps == {4, 5}
    assert inputs is not None
    assert inputs.shape == (8, 7)


def test_no_error_without_that_reason(tmp_path: Path) -> None:
    """`when` says what counts."""

    def fail(run: Run, step: int) -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(when=["non_finite"]), each=fail)
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert flights(trace) == []
        assert {one.kind for one in trace} == {"loss"}


@pytest.mark.parametrize("trigger", ["loss", "norm"])
def test_a_leap(trigger: str, tmp_path: Path) -> None:
    """Of the loss, or of the gradients alone; smaller ones are none, and what goes on is told once."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs = torch.randn(16, 4)
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, capture=LIGHT, flight=Flight(before=0, after=0, when=[trigger])
    ):
        for step in range(60):
            optimizer.zero_grad()
            noise = 1 + 0.01 * torch.rand(()).item()
            loss = model(inputs).square().mean() * noise
            if step in (40, 41):  # twice as much of the one, and as much of the other
                loss = loss * 2 if trigger == "loss" else 2 * loss - loss.detach()
            loss.backward()
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        told = [(one["trigger"], one["global_step"]) for one in flights(trace)]
    assert told == [(trigger, 40)]


class Large(Receiver):
    """Answers where a weight is large; it asks for weights, which the capture does not take."""

    name = "large"
    produces = ("large_found",)

    def __init__(self, step: int) -> None:
        self.step = step
        self.heard: list[int] = []

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return kind == "weights" and module in (None, "0")

    def receive(self, message: Message) -> Iterator[Message]:
        self.heard.append(message.global_step)
        if message.global_step == self.step:
            yield message


def test_a_receiver_is_a_reason(tmp_path: Path) -> None:
    """It hears every step in full, and its answer is no message of the trace."""
    rule = Large(11)
    train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(before=1, after=1, when=[rule]))
    assert rule.heard == list(range(30))
    with tracer.open(tmp_path / "run.zarr") as trace:
        (told,) = flights(trace)
        assert (told["trigger"], told["global_step"]) == ("large", 11)
        assert {one.global_step for one in trace if one.kind == "weights"} == {10, 11, 12}


def test_a_receiver_that_fails_is_left_out(tmp_path: Path) -> None:
    """With a warning; the other reasons stay, and so do the streams."""

    class Failing(Large):
        def receive(self, message: Message) -> Iterator[Message]:
            raise ZeroDivisionError("oh")

    flight = Flight(before=1, after=1, when=[Failing(1), "non_finite"])
    with pytest.warns(RuntimeWarning, match="trigger large of the flight recorder .*ZeroDivisionError"):
        train(tmp_path / "run.zarr", bad=9, capture=LIGHT, flight=flight)
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one["trigger"] for one in flights(trace)] == ["non_finite"]
        assert {one.global_step for one in trace if one.kind == "weights"} == {8, 9, 10}


def test_skipped_steps_are_no_reason(tmp_path: Path) -> None:
    """A GradScaler looks for its scale with infinite gradients."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, flight=Flight(when=["non_finite"]), capture=tracer.Capture()
    ) as run:
        for _ in range(8):
            optimizer.zero_grad()
            loss = (1000 * model(torch.ones(3, 4))).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        skipped = 8 - run.global_step
    assert skipped > 0
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert any(one.kind == "skipped_step" for one in trace)
        assert flights(trace) == []


# -- SIGUSR1 ------------------------------------------------------------------------------------------------------


def test_a_signal(tmp_path: Path) -> None:
    """SIGUSR1 is a reason; the handler that was there is called, and is there again afterwards."""
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    try:

        def send(run: Run, step: int) -> None:
            if step == 7:
                os.kill(os.getpid(), signal.SIGUSR1)

        train(tmp_path / "whole.zarr", capture=ALL)
        train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(before=2, after=1), each=send)
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert called == [signal.SIGUSR1]
    with tracer.open(tmp_path / "run.zarr") as trace:
        (told,) = flights(trace)
    assert (told["trigger"], told["global_step"]) == ("signal", 7)  # the last that was over
    is_full(tmp_path / "run.zarr", tmp_path / "whole.zarr", range(5, 9))


def test_a_signal_at_the_end_is_not_lost(tmp_path: Path) -> None:
    """Though no step comes after it."""

    def send(run: Run, step: int) -> None:
        if step == 29:
            os.kill(os.getpid(), signal.SIGUSR1)

    train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(before=2), each=send)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert {one.global_step for one in trace if one.kind == "weights"} == {27, 28, 29}


def test_no_signal_outside_the_main_thread(tmp_path: Path) -> None:
    """No other may have a handler; all else works there."""
    threading.Thread(target=train, args=(tmp_path / "run.zarr",), kwargs={"bad": 3, "flight": Flight()}).start()
    for one in threading.enumerate():
        if one is not threading.current_thread() and not one.daemon:
            one.join()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert flights(trace)[0]["trigger"] == "non_finite"


def test_a_forked_child_ends_by_the_signal(tmp_path: Path) -> None:
    """As it would without a recording: it has the handler, and nothing to write."""
    program = """
        import os, signal, torch, tracer
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tracer.record("run.zarr", model, optimizer, flight=tracer.Flight(), capture=tracer.Capture()):
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGUSR1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        print(os.WTERMSIG(status) == signal.SIGUSR1)
    """
    assert run_program(program, tmp_path).stdout == "True\n"


# -- the end ------------------------------------------------------------------------------------------------------

PROGRAM = """
    import os, sys, time, torch, tracer
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    capture = tracer.Capture(kinds=["loss"])
    flight = tracer.Flight(before=5, after=2)
    with tracer.record(f"run.{sys.argv[1]}", model, optimizer, capture=capture, flight=flight, commit_steps=1) as run:
        for step in range(40):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            if step == 10:
                run.keep("look")
        run.recorder.wait_until_written()
        print("written", flush=True)
        time.sleep(60)
"""


def run_program(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder."""
    (folder / "program.py").write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "program.py", *arguments]
    return processes.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize("suffix", FORMATS)
def test_kill_loses_the_ring_alone(suffix: str, tmp_path: Path) -> None:
    """What was recorded, and what was written of the ring before, is there."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "program.py", suffix], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and committed(tmp_path / f"run.{suffix}") < 40:
            time.sleep(0.1)
        process.kill()
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        assert trace.status == "interrupted"
        assert [one.global_step for one in trace if one.kind == "loss"] == list(range(40))
        assert sorted({one.global_step for one in trace if one.kind == "weights"}) == list(range(5, 13))
        assert [one["why"] for one in flights(trace)] == ["look"]


def committed(path: Path) -> int:
    """How many losses are safe."""
    with tracer.open(path) as trace:
        return sum(stream.count for stream in trace.streams if stream.kind == "loss")


def test_a_bound_of_the_trace_holds(tmp_path: Path) -> None:
    """What the ring writes counts; once the recording ends, nothing is held, and the training goes on."""
    rings: list[int] = []

    def ask(run: Run, step: int) -> None:
        assert run.flight is not None
        rings.append(run.flight._ring.nbytes)
        if step == 12:
            run.keep("look")

    with pytest.warns(RuntimeWarning, match="stop_at_bytes"):
        train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(), stop_at_bytes=700_000, each=ask)
    with tracer.open(tmp_path / "run.zarr") as trace:
        (stopped,) = [note["stopped"] for note in trace.notes if "stopped" in note]
        assert stopped["global_step"] in (12, 13)
        assert trace.info["stored_bytes"] <= 700_000
    assert rings[11] > 0
    assert not any(rings[14:])


def test_live_receivers_hear_what_the_trace_has(tmp_path: Path) -> None:
    """In its order: so a replay says what they said."""
    live, later = Collect("*"), Collect("*")
    train(tmp_path / "run.zarr", bad=9, capture=LIGHT, flight=Flight(before=2, after=2), receivers=[live])
    tracer.replay(tmp_path / "run.zarr", later)
    assert [key(one) for one in live] == [key(one) for one in later]
    assert all(same(one.data, other.data) for one, other in zip(live, later, strict=True))
    assert {one.global_step for one in live.of("weights")} == {7, 8, 9, 10, 11}


def test_receivers_cannot_ask_for_what_is_only_held(tmp_path: Path) -> None:
    """As they would not hear it in most steps."""
    norm = tracer.CallbackSubscriber(["weights"], lambda message: None)
    with pytest.raises(CaptureError, match="weights"):
        train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(), receivers=[norm])


def test_hashes_beside_what_is_held(tmp_path: Path) -> None:
    """The data of a stream is held where a capture takes its hashes or its statistics alone."""
    captures = [Capture(kinds=["weights"], reduce="hash"), Capture(kinds=["activations"], reduce="statistics")]
    train(tmp_path / "run.zarr", bad=9, capture=captures, flight=Flight(before=1, after=0, when="non_finite"))
    train(tmp_path / "whole.zarr", bad=9, capture=ALL)
    with tracer.open(tmp_path / "run.zarr") as trace, tracer.open(tmp_path / "whole.zarr") as whole:
        full = {key(one): one for one in whole}
        data = [one for one in trace if one.kind in ("weights", "activations")]
        assert {key(one) for one in data} == {
            one for one in full if one[0] in (8, 9) and one[1] in ("weights", "activations")
        }
        assert all(same(one.data, full[key(one)].data) for one in data)
        # whoever takes statistics in place of data is told that they are there
        assert all((one.sampling or {}).get("beside") == ["statistics"] for one in data if one.kind == "activations")
        assert [one.global_step for one in trace if one.kind == "weights_hash" and one.key == "0"] == list(range(30))


def test_what_else_may_be_held(tmp_path: Path) -> None:
    """A capture of its own, of some kinds and every second step."""
    capture = Capture(kinds=["weights"], every=2)
    train(
        tmp_path / "run.zarr", bad=9, capture=LIGHT, flight=Flight(before=4, after=0, capture=capture, when="exception")
    )
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert not any(one.kind == "weights" for one in trace)
    train(
        tmp_path / "again.zarr",
        capture=LIGHT,
        flight=Flight(before=4, after=1, capture=capture),
        each=lambda run, step: run.keep("now") if step == 9 else None,
    )
    with tracer.open(tmp_path / "again.zarr") as trace:
        assert {one.global_step for one in trace if one.kind == "weights"} == {6, 8, 10}


def test_a_stop_while_it_writes_loses_nothing(tmp_path: Path) -> None:
    """A receiver that hears what is written stops the training: all of it is in the trace, and nothing twice."""

    class Stopping(Collect):
        def receive(self, message: Message) -> list[Message]:
            if message.kind == "weights":
                raise StopTraining("enough")
            return []

    capture = Capture(kinds=["loss", "batch_finished"])
    train(tmp_path / "whole.zarr", bad=8, capture=ALL)
    with pytest.raises(StopTraining):
        train(
            tmp_path / "run.zarr",
            bad=8,
            capture=capture,
            flight=Flight(before=2, when="non_finite"),
            receivers=[Stopping()],
        )
    is_full(tmp_path / "run.zarr", tmp_path / "whole.zarr", range(6, 9), replace(capture, stop=9))


def test_another_rank_records_weights(tmp_path: Path) -> None:
    """What another rank has alike is not held here."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=LIGHT, flight=Flight(before=0)) as run:
        assert run.recorder is not None
        run.recorder._elsewhere = {("weights", "0")}
        run.exporter.parts.rewire()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
        run.keep("look")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert {one.key for one in trace if one.kind == "weights"} == {"1", "4"}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bad", [None, 12])
def test_on_a_device(bad: int | None, tmp_path: Path) -> None:
    """What is held is copied from the device, and is what a full recording has."""

    def go(name: str, **options: Any) -> None:
        torch.manual_seed(0)
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tracer.record(tmp_path / name, model, optimizer, **{"capture": tracer.Capture(), **options}) as run:
            for step in range(20):
                inputs = torch.randn(8, 6, device="cuda")
                if step == bad:
                    inputs[0, 0] = float("nan")
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            if bad is None and run.flight is not None:
                run.keep("the last")

    go("whole.zarr", capture=ALL)
    go("run.zarr", capture=Capture(kinds=["loss"]), flight=Flight(before=3, after=2))
    steps = range(16, 20) if bad is None else range(9, 15)
    is_full(tmp_path / "run.zarr", tmp_path / "whole.zarr", steps, Capture(kinds=["loss"]))


def test_keep_needs_a_flight_recorder(tmp_path: Path) -> None:
    """Or there is nothing to keep."""
    with pytest.raises(CaptureError, match=r"flight=tracer.Flight\(\)"):
        train(tmp_path / "run.zarr", each=lambda run, step: run.keep("this"))


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"before": -1}, CaptureError, "before of a flight recorder is a whole number of steps from 0, not -1"),
        ({"after": 1.5}, CaptureError, "after of a flight recorder"),
        ({"when": ["nan"]}, UnknownNameError, "reason to write .* 'nan'"),
        ({"when": [3]}, CaptureError, "names and receivers, not 3"),
        ({"bytes": "much"}, CaptureError, "'much' is not a size"),
        ({"bytes": "100TB"}, CaptureError, "100,000,000,000,000 bytes does not fit into the memory of this machine"),
        ({"capture": "weights"}, CaptureError, "capture of a flight recorder is a tracer.Capture"),
        ({"capture": Capture(reduce=torch.maximum)}, CaptureError, "no running reductions"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_is_no_flight_recorder(given: dict[str, Any], error: type[Exception], sentence: str) -> None:
    """Each is told in one sentence, before anything is recorded."""
    with pytest.raises(error, match=sentence):
        Flight(**given)


def test_a_recording_is_given_a_flight(tmp_path: Path) -> None:
    """And nothing else."""
    with pytest.raises(CaptureError, match=r"flight is a tracer\.Flight, not True"):
        train(tmp_path / "run.zarr", flight=True)
