"""Ranks: what `trace record` records of scripts that torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer
from tests import processes
from tests.endings import alike
from tests.recording.ranks import ROOT, needs_gloo, torchrun, values
from tracer import TraceReader
from tracer.errors import CaptureError

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    ddp(torch.full((2, 3), float(dist.get_rank() + step))).square().mean().backward()
    optimizer.step()
torch.save([*model.state_dict().values(), torch.get_rng_state()], f"{sys.argv[1]}.{dist.get_rank()}")
dist.barrier()
dist.destroy_process_group()
"""


BECOMES_ANOTHER = """
import os, subprocess, sys
sys.path.remove("")
from tracereel.main import main
os.execv = lambda path, command: sys.exit(subprocess.run(command).returncode)
main()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the script saved how each rank ended that nobody recorded."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    torchrun(str(folder / "train.py"), str(folder / "ended"))
    return folder / "ended"


def as_one_process() -> list[dict[Any, Tensor]]:
    """Each step of the script, whose gradients are the mean of the ranks': by kind, and by module or rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(3):
        optimizer.zero_grad()
        had = {("weights", module): model.get_submodule(module).weight.detach().clone() for module in ("0", "2")}
        for rank in (0, 1):
            loss = model(torch.full((2, 3), float(rank + step))).square().mean()
            (loss / 2).backward()
            had["loss", rank] = loss.detach()
        had |= {("weight_gradients", module): model.get_submodule(module).weight.grad.clone() for module in ("0", "2")}
        steps.append(had)
        optimizer.step()
    return steps


@needs_gloo
@pytest.mark.parametrize(
    "form",
    [
        *("torchrun", "torchrun inside"),
        # which become the same command (tests/recording/launching/test_launchers.py)
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("torchrun by its path", "python")),
        pytest.param("--module torch.distributed.run", marks=pytest.mark.slow),
    ],
)
def test_trace_record_under_torchrun(tmp_path: Path, form: str, alone: Path) -> None:
    """The launcher around the recorder, or the recorder around the launcher: one trace with a part for each rank.

    The script ends as it does without either, to the bit; the weights are those of one process with all the batches.
    """
    script, path, end = tmp_path / "train.py", tmp_path / "run.zarr", tmp_path / "ended"
    script.write_text(SCRIPT)
    options = ["record", "--out", str(path), "-k", "weights", "-k", "weight_gradients", "-k", "loss"]
    if form == "torchrun":
        torchrun("-m", "tracereel", *options, str(script), str(end))
    else:
        launcher = {
            "torchrun inside": ["torchrun"],
            "torchrun by its path": [str(tmp_path / "bin" / "torchrun")],  # there may be none: what counts is the name
            "python": [sys.executable, "-u", "-m", "torch.distributed.run"],
        }.get(form, form.split())
        launcher += ["--standalone", "--nproc-per-node", "2"]
        (tmp_path / "tracereel.py").write_text("raise SystemExit('a script of the user that is called so, too')")
        # in forked processes, so that it becomes one of those (in fresh ones: test_launchers.py, with accelerate)
        forked = form == "torchrun inside"
        recorder = ["-c", BECOMES_ANOTHER] if forked else [str(ROOT / "cli.py")]
        ran = (processes.run if forked else subprocess.run)(
            [sys.executable, *recorder, *options, *launcher, str(script), str(end)],
            cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
    with TraceReader(path) as reader:
        assert (reader.ranks, reader.problems, reader.status) == ([0, 1], [], "finished")
        assert {(one.kind, one.module, one.rank) for one in reader.streams} == {
            *((kind, module, 0) for kind in ("weights", "weight_gradients") for module in ("0", "2")),
            *(("loss", None, rank) for rank in (0, 1)),
        }
        assert [len(reader.array("weights", module)[0]) for module in ("0", "2")] == [3, 3]
        steps = as_one_process()
        for kind, of in steps[0]:
            found = values(reader, kind, None, ranks=of) if kind == "loss" else values(reader, kind, of)
            torch.testing.assert_close(found, [step[kind, of] for step in steps])
    for rank in (0, 1):
        one, other = (torch.load(f"{where}.{rank}", weights_only=True) for where in (end, alone))
        assert alike(one, other)


def test_options_are_checked(tmp_path: Path) -> None:
    """Before anything is made."""
    model = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match="replicated is 'once' or 'every'"):
        tracer.record(tmp_path / "run.zarr", model, replicated="twice", capture=tracer.Capture()).__enter__()  # type: ignore[arg-type]
    assert not (tmp_path / "run.zarr").exists()
