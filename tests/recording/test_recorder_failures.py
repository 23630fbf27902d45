"""What is left of a recording after a full disk, an exception, a fork, a crash, and what the training sees of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tests import processes
from tests.recording.recorder_runs import training
from tracer import Collect, TraceError, TraceWriter


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """From its `count`-th message on, no writer can write: the disk is full."""
    write, written = TraceWriter.write_many, []

    def failing(self: TraceWriter, batch: Any) -> None:
        for one in batch:
            written.append(one)
            if len(written) > count:
                raise OSError(28, "No space left on device")
            write(self, [one])

    monkeypatch.setattr(TraceWriter, "write_many", failing)


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing fails, the training goes on with a warning, and subscribers still listen."""
    fail_after(monkeypatch, 20)
    path = tmp_path / "run.h5"
    model, optimizer, steps = training()
    heard = Collect("loss", "batch_finished")
    before = model[0].weight.detach().clone()
    with pytest.warns(RuntimeWarning) as caught:
        with tracer.record(
            path, model, optimizer, receivers=[heard], commit_seconds=0.1, capture=tracer.Capture()
        ) as run:
            steps(3)
            deadline = time.monotonic() + 10
            while run.recorder._queue.error is None and time.monotonic() < deadline:
                time.sleep(0.01)
            steps(3)
            assert run.recorder not in run.bus.receivers
    said = [str(one.message) for one in caught]
    assert any("No space left" in one and "the training goes on" in one for one in said)
    assert any("the trace is incomplete" in one for one in said)
    assert len(said) == 2
    assert len(heard.of("batch_finished")) == 6
    assert not torch.equal(before, model[0].weight)
    with tracer.open(path) as trace:
        assert trace.status != "finished"
        assert len(list(trace)) <= 20


def test_a_full_disk_is_an_error_under_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With strict=True the training learns of it: at the next message or, at the latest, at the end."""
    fail_after(monkeypatch, 20)
    model, optimizer, steps = training()
    closed = []

    class Closing(Collect):
        def close(self) -> None:
            closed.append(self)

    with pytest.raises(TraceError, match="No space left"):
        with tracer.record(
            tmp_path / "run.zarr", model, optimizer, receivers=[Closing()], strict=True, capture=tracer.Capture()
        ):
            steps(3)
    assert not model[0]._forward_hooks
    assert len(closed) == 1


@pytest.mark.parametrize(("suffix", "error"), [("zarr", ValueError("diverged\nbadly")), ("h5", KeyboardInterrupt())])
def test_an_exception_in_the_block_is_the_status(suffix: str, error: BaseException, tmp_path: Path) -> None:
    """What ends a run stands in the trace, what was recorded is there, and the exception goes on to the user."""
    model, optimizer, steps = training()
    with pytest.raises(type(error)) as raised:
        with tracer.record(tmp_path / f"run.{suffix}", model, optimizer, capture=tracer.Capture()):
            steps(2)
            raise error
    assert raised.value is error
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        expected = {"ValueError": "failed: ValueError: diverged", "KeyboardInterrupt": "failed: KeyboardInterrupt"}
        assert trace.status == expected[type(error).__name__]
        assert trace.array("weights", "0")[0].tolist() == [0, 1]


def test_a_receiver_that_cannot_close_ends_no_training(tmp_path: Path) -> None:
    """A failure to close a receiver is a warning, never hides the user's exception, and is raised under strict."""

    class Stuck(Collect):
        def close(self) -> None:
            raise OSError("stuck")

    for number, strict in enumerate((False, True)):
        model, optimizer, steps = training()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(KeyError, match="mine"):
                with tracer.record(
                    tmp_path / f"{number}.zarr", model, receivers=[Stuck()], strict=strict, capture=tracer.Capture()
                ):
                    raise KeyError("mine")
        assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match="could not be closed: OSError: stuck"):
        with tracer.record(tmp_path / "2.zarr", model, optimizer, receivers=[Stuck()], capture=tracer.Capture()):
            steps(1)
    assert tracer.open(tmp_path / "2.zarr").status == "finished"
    with (
        pytest.raises(OSError, match="stuck"),
        tracer.record(tmp_path / "3.zarr", model, receivers=[Stuck()], strict=True, capture=tracer.Capture()),
    ):
        pass
    assert tracer.open(tmp_path / "3.zarr").status == "finished"


def run_script(text: str, tmp_path: Path, **settings: Any) -> subprocess.Popen[str]:
    """A Python process that runs this text with the project on its path."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return processes.Popen(
        [sys.executable, "-W", "ignore", str(path)], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings,
    )  # fmt: skip


PREAMBLE = """
    import os, sys, time, torch, tracer
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("suffix", "leave"), [("zarr", "os._exit(0)"), ("zarr", "sys.exit(0)"), ("h5", "sys.exit(0)")])
def test_a_forked_child_does_not_write(suffix: str, leave: str, tmp_path: Path) -> None:
    """A forked child that trains and ends, in whichever way, leaves the parent's trace alone."""
    script = (
        PREAMBLE
        + f"""
    with tracer.record("run.{suffix}", model, optimizer, capture=tracer.Capture()) as run:
        for _ in range(20):
            step()
        child = os.fork()
        if child == 0:
            for _ in range(20):
                step()
            {leave}
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(20):
            step()
    print("done")
    """
    )
    process = run_script(script, tmp_path)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "done\n")
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        assert trace.status == "finished"
        assert trace.array("weights", "0")[0].tolist() == list(range(40))
        assert len(list(trace)) == len(trace)
        assert len(trace.array("activations", "2")[0]) == 40


def test_a_recording_that_nobody_closes_says_nothing(tmp_path: Path) -> None:
    """It is closed when the program ends, when much of Python is gone already, without a complaint."""
    script = (
        PREAMBLE
        + """
    run = tracer.record("run.h5", model, optimizer, capture=tracer.Capture())
    run.__enter__()
    step()
    """
    )
    process = run_script(script, tmp_path)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "")
    with tracer.open(tmp_path / "run.h5") as trace:
        assert trace.status == "failed: TraceError: the program ended before the recording"


def test_a_killed_run_reads_as_interrupted(tmp_path: Path) -> None:
    """After SIGKILL the committed part is there, complete and right, and the trace says that it was interrupted."""
    script = (
        PREAMBLE
        + """
    with tracer.record("run.h5", model, optimizer, commit_seconds=0.2, capture=tracer.Capture()) as run:
        for number in range(10**6):
            step()
            if number % 10 == 0:
                print(number, flush=True)
            time.sleep(0.001)
    """
    )
    process = run_script(script, tmp_path)
    path = tmp_path / "run.h5"
    try:
        assert process.stdout is not None
        deadline, committed = time.monotonic() + 60, 0
        while committed < 100 and time.monotonic() < deadline:
            assert process.stdout.readline()
            with tracer.open(path) as trace:
                committed = len(trace)
                assert trace.status == "recording"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert committed >= 100
    with tracer.open(path) as trace:
        assert trace.status == "interrupted"
        assert len(trace) >= committed
        messages = list(trace)
        assert len(messages) == len(trace)
        steps, weights = trace.array("weights", "0")
        update_steps, updates = trace.array("weight_updates", "0")
    shared = min(len(steps), len(update_steps)) - 1
    assert steps[:shared].tolist() == list(range(shared))
    # an oracle inside the data: each weight is the one before plus its update, up to one rounding
    for step in range(shared - 1):
        torch.testing.assert_close(
            torch.tensor(weights[step + 1]), torch.tensor(weights[step] + updates[step]), rtol=1e-6, atol=1e-6
        )


def test_a_path_is_free_after_its_writer_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the writer thread died of, the trace may then be overwritten."""
    path = tmp_path / "run.h5"
    model = nn.Linear(2, 2)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.warns(RuntimeWarning):
        patched.setattr(tracer.TraceWriter, "write_many", fail)
        with tracer.record(path, model, None, commit_seconds=0.1, capture=tracer.Capture()) as run:
            model(torch.ones(1, 2)).sum().backward()
            run.recorder._thread.join(10)  # type: ignore[union-attr] # it records
    with tracer.record(path, model, None, overwrite=True, capture=tracer.Capture()):
        model(torch.ones(1, 2)).sum().backward()
    assert tracer.open(path).status == "finished"
