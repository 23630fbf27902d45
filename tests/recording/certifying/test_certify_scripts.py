"""The non-interference certificate for scripts; also where the verdict is a bad one.

One rehearsal, of a script that draws from all generators, is of a fresh interpreter, the others are of forked ones
(`tests.processes`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tracer
from tests import processes
from tests.recording.launching.recorded_programs import begin, record_apart, record_here
from tracer import Certificate
from tracer.recording.certifying.rehearsal import Request, certify_script, rehearse
from tracer.recording.launching.program import Program
from tracer.recording.options import Options
from tracereel.main import main

ROOT = Path(__file__).parents[3]


HEAD = """
import os, random, sys, numpy, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
def train(after=lambda step: None):
    step = 0
    for epoch in range(2):
        for a, b in DataLoader(data, batch_size=8, shuffle=True):
            opt.zero_grad(); F.cross_entropy(net(a) * random.uniform(1, 2), b).backward(); opt.step()
            after(step)
            step += 1
"""


def record(
    folder: Path, body: str, *options: str, head: str = HEAD, fresh: bool = False
) -> tuple[Any, dict[str, Any] | None]:
    """Run ``trace record`` on a script; what it did, and the certificate in the trace."""
    (folder / "train.py").write_text(head + textwrap.dedent(body))
    words = (*options, "train.py")
    done = record_apart(folder, *words, fresh=True) if fresh else record_here(folder, *words)
    if not (folder / "run.zarr").exists():
        return done, None
    with tracer.open(folder / "run.zarr") as trace:
        return done, trace.header.get("certificate")


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_script_without_seeds_is_certified(tmp_path: Path, fresh: bool) -> None:
    """It draws from all generators; the rehearsals begin alike, and print nothing; the real run is as without."""
    body = """
    train()
    numpy.random.rand()
    with open("ran", "a") as file: file.write(os.environ.get("TRACE_REHEARSAL", "real") + " ")
    print("done"); sys.exit(3)
    """
    done, told = record(tmp_path, body, "--certify", "4", "--every", "2", fresh=fresh)
    assert (done.returncode, done.stdout) == (3, "done\n"), done.stderr
    assert told is not None
    assert (told["verdict"], told["steps"], told["differing"]) == ("identical", 4, []), told
    assert (told["overhead"]["steps"], told["overhead"]["recorded_steps"]) == (3, 1)
    assert "certificate: identical: after each of 4 steps" in done.stderr
    assert (tmp_path / "ran").read_text() == "real "  # the rehearsals were left before that
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.info["steps"] == [0, 4]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ran", "run.zarr", "train.py"]


def test_a_rehearsal_begins_in_a_fresh_interpreter_as_in_a_forked_one(tmp_path: Path) -> None:
    """With the same generators and the same hash seed: what the script is like after each step is the same."""
    body = """
    begun = [hash("seeded"), random.random(), numpy.random.rand(), float(torch.rand(1))]
    with open("begun", "a") as file: print(begun, file=file)
    train()
    """
    (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(body).replace('"begun"', repr(str(tmp_path / "begun"))))
    program = Program(script=str(tmp_path / "train.py"))
    request = Request(program=program, settings=[{}], options=Options(), purpose="certify", steps=4)
    found = []
    for way in (contextlib.nullcontext, processes.forked):
        with way():
            steps, told = rehearse(request, tmp_path, recorded=way is not processes.forked)
        assert (steps.error, len(steps.taken), "left" in told) == (None, 4, True)
        found.append([one.hashes for one in steps.taken])
    assert found[0] == found[1]
    begun = (tmp_path / "begun").read_text().splitlines()
    assert (len(begun), len(set(begun))) == (2, 1)


def test_a_script_that_ends_before(tmp_path: Path) -> None:
    """It is compared as far as it goes."""
    done, told = record(tmp_path, "train()", "--certify", "100", "--require-identical")
    assert done.returncode == 0, done.stderr
    assert told is not None
    assert (told["verdict"], told["steps"]) == ("identical", 6)


def test_a_script_that_notices_the_recorder(tmp_path: Path) -> None:
    """It is recorded with a warning; or, if that was asked for, not run at all."""
    body = """
    def notice(step):
        if step == 1 and net[0]._forward_hooks: torch.rand(1)
    train(notice)
    """
    done, told = record(tmp_path, body, "--certify", "3")
    assert done.returncode == 0
    assert told is not None
    assert (told["verdict"], told["step"], told["differing"][0]) == ("different", 2, "random generator of torch")
    assert "Warning: certificate: different: with a recorder, after step 2 there differs random" in done.stderr
    done, _ = record(tmp_path, body + "open('ran', 'w')", "--certify", "4", "--require-identical", "--overwrite")
    assert done.returncode == 1
    assert "not run" in done.stderr
    assert not (tmp_path / "ran").exists()


def rehearsed(folder: Path, body: str, steps: int) -> Certificate:
    """The certificate of a script that is not run for real."""
    (folder / "train.py").write_text(HEAD + textwrap.dedent(body))
    with processes.forked():
        return certify_script(Program(script=str(folder / "train.py")), [{}], Options(), steps)


def test_a_script_that_differs_by_itself(tmp_path: Path) -> None:
    """Which seeds with the clock: no verdict is possible, and the sentence says why."""
    certificate = rehearsed(tmp_path, "import time; torch.manual_seed(time.time_ns()); train()", 2)
    assert (certificate.verdict, certificate.step) == ("nondeterministic", 0)
    assert "two runs without a recorder differ after step 0" in certificate.reason


def test_a_script_that_fails(tmp_path: Path) -> None:
    """The verdict says what came of the rehearsal, and of the script that goes on after it was told to end."""
    body = """
    def fail(step):
        if step == 1: raise ValueError("bad data")
    try: train()
    except SystemExit: pass
    train(fail)
    """
    certificate = rehearsed(tmp_path, body, 4)
    assert (certificate.verdict, certificate.steps) == ("identical", 4)
    certificate = rehearsed(tmp_path, body, 100)
    assert certificate.verdict == "failed"
    assert certificate.reason.endswith("failed after step 7: ValueError: bad data (exit status 1)")


@pytest.mark.parametrize("changed", [False, True])
def test_a_script_that_updates_by_hand(tmp_path: Path, changed: bool) -> None:
    """Without an optimizer each backward is a step; what it differentiated is compared, and its gradients."""
    body = f"""
    import torch
    weight, bias = torch.ones(4, 3, requires_grad=True), torch.nn.Parameter(torch.zeros(3))
    watched = hasattr(getattr(torch.Tensor.backward, "__wrapped__", None), "__wrapped__")
    for _ in range(4):
        loss = (torch.ones(5, 4) @ weight * (1.5 if watched and {changed} else 1.0) + bias).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for one in (weight, bias): one -= 0.01 * one.grad; one.grad = None
    """
    done, certificate = record(tmp_path, body, "--certify", "3", head="")
    assert certificate is not None, done.stderr
    assert (certificate["verdict"], certificate["steps"]) == ("different" if changed else "identical", 3), certificate
    if changed:
        assert certificate["step"] == 0
        assert certificate["differing"] == [f"buffer 'gradient of parameters.{number}'" for number in range(2)]


def test_a_script_that_trains_nothing(tmp_path: Path) -> None:
    """Nothing can be compared, and the real run says so too."""
    certificate = rehearsed(tmp_path, "print(1)", 2)
    assert certificate.verdict == "failed"
    assert certificate.reason.startswith("no training step was seen: ")
    assert "its optimizer never stepped" in certificate.reason


def test_options_that_do_not_go_together() -> None:
    """Wrong usage is a sentence, before anything runs."""
    script = str(ROOT / "examples/digits.py")
    for arguments, sentence in (
        (["--require-identical"], "--certify N"),
        (["--certify", "0"], "0 is not in the range"),
        (["--run-steps", "5"], "--dry-run"),
        (["--json"], "--dry-run"),
        (["--dry-run", "--certify", "2"], "--certify or --dry-run"),
    ):
        done = CliRunner().invoke(main, ["record", *arguments, script])
        assert (done.exit_code, sentence in done.output) == (2, True), done.output


@pytest.mark.parametrize("option", ["--dry-run", "--certify 2"])
def test_rehearsals_of_torchrun_are_refused_before_it_is_started(option: str) -> None:
    """One sentence, and not one of each rank."""
    program = ["torchrun", "--nproc-per-node", "2", "train.py"]
    done = CliRunner().invoke(main, ["record", *option.split(), *program])
    assert (done.exit_code, "give it without torchrun" in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    ("number", "begin"),
    [
        (signal.SIGTERM, processes.Popen),
        (signal.SIGINT, processes.Popen),
        pytest.param(signal.SIGTERM, subprocess.Popen, marks=pytest.mark.slow),
    ],
)
def test_who_ends_a_rehearsal_ends_its_process(number: signal.Signals, begin: Any, tmp_path: Path) -> None:
    """The script's process does not go on by itself, and nothing is left behind."""
    body = "import time; open('pid', 'w').write(str(os.getpid())); time.sleep(300)"
    (tmp_path / "train.py").write_text(HEAD + body)
    (tmp_path / "temporary").mkdir()
    asked = begin(
        [sys.executable, "-m", "tracereel", "record", "--certify", "3", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")},
        start_new_session=True,
    )
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()) and asked.poll() is None:
        time.sleep(0.05)
    asked.send_signal(number)
    assert asked.wait(60) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not [*(tmp_path / "temporary").glob("trace-*")]
    assert not (tmp_path / "train.zarr").exists()


RANKS = """
import os, sys, torch, tracer, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
def train(record):
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2))
    model = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    def steps():
        for step in range(6):
            opt.zero_grad()
            model(torch.full((2, 3), float(rank + step))).square().mean().backward()
            opt.step()
    with record(model, opt): steps()
certificate = tracer.certify(train, steps=3)
train(lambda *given: tracer.record("run.zarr", *given, certificate=certificate, capture=tracer.Capture()))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_ranks_certify_a_training_of_their_own(tmp_path: Path) -> None:
    """By the function, in their script: each compares its own bits, and the trace keeps the certificate."""
    (tmp_path / "train.py").write_text(RANKS)
    done = begin(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert (trace.ranks, trace.problems) == ([0, 1], [])
        certificate = trace.attempts[0]["certificate"]
        reason = "after each of 3 steps all bits were the same with and without a recorder"
        assert (certificate["verdict"], certificate["reason"]) == ("identical", reason)


def test_what_is_certified_is_the_run_that_follows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rehearsal has all options of the recording, those too that say how much is written, and by which rank."""
    (tmp_path / "train.py").write_text(HEAD)
    certificate = Certificate(verdict="identical", reason="", steps=2)
    asked: list[Options] = []

    def certify(program: Program, settings: Any, options: Options, steps: int) -> Certificate:
        asked.append(options)
        return certificate

    def run(program: Program, *, options: Options, **_: Any) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr("tracer.recording.certifying.rehearsal.certify_script", certify)
    monkeypatch.setattr("tracer.recording.launching.script.run", run)
    options = ["--replicated", "every", "--max-bytes", "5MB", "--on-full", "drop", "--commit-steps", "3", "--durable"]
    given = {"replicated": "every", "max_bytes": 5_000_000, "on_full": "drop", "commit_steps": 3, "durable": True}
    arguments = ["record", "--certify", "2", *options, str(tmp_path / "train.py")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    rehearsed, run_afterwards = asked
    assert {name: getattr(rehearsed, name) for name in given} == given
    assert run_afterwards == replace(rehearsed, certificate=certificate)


@pytest.mark.parametrize("option", ["--dry-run", "--certify 2"])
def test_one_of_several_ranks_is_refused(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rehearsals of several ranks would wait for each other: what to do instead is said."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HEAD)
    done = CliRunner().invoke(main, ["record", *option.split(), "train.py"])
    assert done.exit_code == 2
    assert "this is rank 1 of 2" in done.output
    assert "a run of one process" in " ".join(done.output.split())
