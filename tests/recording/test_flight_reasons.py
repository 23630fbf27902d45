"""Why a flight recorder writes: asked to, an error, a leap, a receiver of the user's own, a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tracer
from tests import processes
from tests.recording.flight_runs import ALL, LIGHT, ROOT, flights, is_full, key, network, train
from tracer import CaptureError, Flight, Message, Receiver
from tracer.recording.recording import Run


def test_a_second_trigger_extends_the_first(tmp_path: Path) -> None:
    """No step is there twice, and each reason is told; steps between two times apart are not written."""
    train(tmp_path / "whole.zarr", capture=ALL)

    def ask(run: Run, step: int) -> None:
        if step in (5, 9, 10, 20):
            run.keep(f"look at {step}")

    train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(before=3, after=1), each=ask)
    with tracer.open(tmp_path / "run.zarr") as trace:
        told = [(one["trigger"], one["why"], one["first_step"], one["last_step"]) for one in flights(trace)]
        steps = sorted({one.global_step for one in trace if one.kind == "weights"})
    assert told == [("keep", f"look at {step}", step - 3, step + 1) for step in (5, 9, 10, 20)]
    assert steps == [*range(2, 12), *range(17, 22)]
    is_full(tmp_path / "run.zarr", tmp_path / "whole.zarr", steps)


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
    others = set(threading.enumerate())  # of libraries, which may live on
    threading.Thread(target=train, args=(tmp_path / "run.zarr",), kwargs={"bad": 3, "flight": Flight()}).start()
    for one in set(threading.enumerate()) - others:
        if not one.daemon:
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


def run_program(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder."""
    (folder / "program.py").write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "program.py", *arguments]
    return processes.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True)


def test_keep_needs_a_flight_recorder(tmp_path: Path) -> None:
    """Or there is nothing to keep."""
    with pytest.raises(CaptureError, match=r"flight=tracer.Flight\(\)"):
        train(tmp_path / "run.zarr", each=lambda run, step: run.keep("this"))
