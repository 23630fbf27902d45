"""`record` without a ``with``: what is forgotten is told, and `start` and `close` record as a ``with`` does."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tracer.errors import CaptureError, TraceExistsError


def training() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and a function that takes one step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    return model, optimizer, step


def test_a_record_that_never_began_is_told(tmp_path: Path) -> None:
    """With the line that made it, when it is dropped; but not if its arguments were wrong."""
    model, optimizer, step = training()
    recording = tracer.record(tmp_path / "run.zarr", model, optimizer)
    step()
    with pytest.warns(RuntimeWarning, match=f"nothing is recorded to {tmp_path / 'run.zarr'}") as told:
        del recording
        gc.collect()
    assert told[0].filename == __file__
    assert not (tmp_path / "run.zarr").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CaptureError):
            tracer.record(tmp_path / "run.zarr", model, optimizer, capture=())
        gc.collect()


def test_a_program_that_never_began_its_record_is_told(tmp_path: Path) -> None:
    """At its end, also where warnings are errors."""
    program = "import tracer, torch; run = tracer.record('run.zarr', torch.nn.Linear(2, 2))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[2])}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.startswith("RuntimeWarning: nothing is recorded to ")


def test_start_and_close_are_a_with(tmp_path: Path) -> None:
    """The same messages and status, and no hook left; closing again does nothing."""
    traces = []
    for name in ("with", "start"):
        model, optimizer, step = training()
        recording = tracer.record(tmp_path / f"{name}.zarr", model, optimizer, capture=tracer.Capture())
        if name == "with":
            with recording:
                for _ in range(3):
                    step()
        else:
            run = recording.start()
            with pytest.raises(CaptureError, match="has begun"):
                recording.start().close()
            for _ in range(3):
                step()
            assert not run.closed
            run.close()
            recording.close()
        step()
        assert not model._forward_hooks
        with tracer.open(tmp_path / f"{name}.zarr") as trace:
            assert trace.status == "finished"
            traces.append(
                [(m.kind, m.global_step, m.data.tolist()) for m in trace.messages() if isinstance(m.data, torch.Tensor)]
            )
    assert traces[0] == traces[1] != []


def test_a_cell_that_runs_twice(tmp_path: Path) -> None:
    """The first recording ends with a sentence, whatever the path and model of the second; a loop's go on together."""
    cell = "runs.append(tracer.record(next(paths), model, optimizer, overwrite=True).start())"
    model, optimizer, step = training()
    paths = iter(
        [tmp_path / "a.zarr", tmp_path / "b.zarr", tmp_path / "b.zarr", tmp_path / "c.zarr", tmp_path / "d.zarr"]
    )
    runs: list[tracer.Run] = []
    space = {"tracer": tracer, "paths": paths, "model": model, "optimizer": optimizer, "runs": runs}
    exec(compile(cell, "<cell 1>", "exec"), space)
    step()
    for place in ("<cell 1>", "<another cell>"):
        with pytest.warns(RuntimeWarning, match=f"the recording to {runs[-1].path} ends here"):
            exec(compile(cell, place, "exec"), space)
        step()
        assert [run.closed for run in runs] == [*[True] * (len(runs) - 1), False]
    runs[-1].close()
    exec(compile(f"for _ in range(2): {cell}", "<cell 1>", "exec"), space)
    assert [run.closed for run in runs[-2:]] == [False, False]
    with pytest.raises(TraceExistsError), pytest.warns(RuntimeWarning, match="ends here"):
        tracer.record(tmp_path / "d.zarr", model, optimizer).start()
    runs[-2].close()
    with tracer.open(tmp_path / "a.zarr") as trace:
        assert (trace.status, trace.array("loss")[0].tolist()) == ("finished", [0])
