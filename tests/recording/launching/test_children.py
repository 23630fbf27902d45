"""Processes that a script starts under ``trace record``: what they train is recorded, each as a rank of the trace."""

from __future__ import annotations

import functools
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch

import tracer
from tests.recording.launching.recorded_programs import record_apart, script
from tracer import Capture
from tracer.errors import TraceExistsError
from tracer.recording.launching.program import Record, can_be_told
from tracer.recording.launching.session import Recipe, run_child
from tracer.recording.options import Options
from tracer.recording.own_part import Member
from tracer.stores.locations import location
from tracer.trace.claiming import Process, claim

HEAD = """
import os, sys, time, torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

def train(number, net, steps=3):
    torch.manual_seed(number)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        opt.zero_grad()
        loss = F.mse_loss(net(torch.randn(5, 4)), torch.zeros(5, 3))
        loss.backward(); opt.step()
        with open(f"losses{number}.txt", "a") as file: print(loss.item(), file=file)

def in_group(rank, store):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    train(rank, nn.parallel.DistributedDataParallel(nn.Linear(4, 3)))
    dist.destroy_process_group()

def processes(way, numbers, target=train, *more):
    context = mp.get_context(way)
    numbers = range(numbers) if isinstance(numbers, int) else numbers
    started = [context.Process(target=target, args=(number, nn.Linear(4, 3), *more)) for number in numbers]
    for one in started: one.start()
    return started

def end(started):
    for one in started: one.join()
    print([one.exitcode for one in started], flush=True)
"""


def run(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script, recorded."""
    for one in folder.glob("losses*.txt"):
        one.unlink()
    script(folder, 'if __name__ == "__main__":\n' + textwrap.indent(textwrap.dedent(body), " "), head=HEAD)
    return record_apart(folder, *options, "train.py")


def losses(folder: Path) -> dict[int, list[float]]:
    """What each rank recorded; the trace is whole."""
    assert not tracer.verify(folder / "run.zarr").problems
    with tracer.open(folder / "run.zarr") as trace:
        assert trace.status == "finished"
        found: dict[int, list[float]] = {}
        for one in trace.messages(kinds=["loss"]):
            assert one.data is not None
            found.setdefault(one.rank, []).append(one.data.item())
    return found


def printed(folder: Path, number: int) -> list[float]:
    """What a process printed."""
    return [float(line) for line in (folder / f"losses{number}.txt").read_text().split()]


def as_float32(numbers: list[float]) -> list[float]:
    """What a tensor of these holds."""
    return torch.tensor(numbers).tolist()


def test_processes_that_train(tmp_path: Path) -> None:
    """Those that know of no rank have a number each, from 1 on; the script itself is 0. Hogwild is such a program."""
    recorded = run(tmp_path, "end([*processes('fork', 1), *processes('spawn', [1])])")
    assert (recorded.returncode, recorded.stdout) == (0, "[0, 0]\n"), recorded.stderr
    assert "Warning" not in recorded.stderr
    assert losses(tmp_path) == {number + 1: as_float32(printed(tmp_path, number)) for number in range(2)}


def test_a_script_that_trains_beside_its_processes(tmp_path: Path) -> None:
    """It is rank 0, as it would be without them; a trace that was there makes room once."""
    body = "torch.manual_seed(7); train(9, nn.Linear(4, 3)); end(processes('fork', 2)); train(8, nn.Linear(4, 3))"
    for _ in range(2):
        recorded = run(tmp_path, body, "--overwrite")
        assert recorded.returncode == 0, recorded.stderr
        expected = {0: as_float32([*printed(tmp_path, 9), *printed(tmp_path, 8)])}
        expected |= {number + 1: as_float32(printed(tmp_path, number)) for number in range(2)}
        assert losses(tmp_path) == expected


# what a spawned process is told, it is told in `test_processes_that_train`, too
@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ranks_of_torch_distributed(tmp_path: Path, how: str) -> None:
    """`mp.spawn` as the tutorials of DistributedDataParallel do it: the ranks are the group's."""
    body = f"mp.start_processes(in_group, ({str(tmp_path / 'store')!r},), 2, start_method={how!r}); print('done')"
    done = run(tmp_path, body)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert losses(tmp_path) == {rank: as_float32(printed(tmp_path, rank)) for rank in range(2)}
    with tracer.open(tmp_path / "run.zarr") as trace:
        weights = [one.rank for one in trace.messages(kinds=["weights"])]
    assert weights == [0, 0, 0]  # what both have, one keeps


def test_a_process_that_fails_or_is_terminated(tmp_path: Path) -> None:
    """Its exit code is its own, and its part says how it ended; the others' are whole."""
    body = """
    def fail(number, net):
        train(number, net)
        if number == 0: raise ValueError("no more")
        if number == 1: sys.exit(5)
        open("ready", "w").close()
        time.sleep(60)
    started = processes("fork", 3, fail)
    while not os.path.exists("ready"): time.sleep(0.05)
    started[2].terminate()
    end(started)
    """
    recorded = run(tmp_path, body)
    assert recorded.stdout == f"[1, 5, {-signal.SIGTERM}]\n", recorded.stderr
    assert "ValueError: no more" in recorded.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        ends = {rank: trace.of_rank(rank).status for rank in trace.ranks}
        found = [one.rank for one in trace.messages(kinds=["loss"])]
    assert {number: found.count(number) for number in (1, 2, 3)} == {1: 3, 2: 3, 3: 3}
    assert ends[1] == "failed: ValueError: no more"
    assert ends[2].startswith("failed: SystemExit")
    assert ends[3] == "failed: SystemExit: 143"


def test_executors_and_what_is_no_training(tmp_path: Path) -> None:
    """A worker of an executor is one process, whatever it trains; pools, daemons and managers are left alone."""
    body = """
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1, mp_context=mp.get_context("fork")) as pool:
        for number in range(2): pool.submit(train, number, nn.Linear(4, 3)).result()
    with mp.get_context("fork").Pool(1) as pool:
        print(pool.map(abs, [-1, 2]))
    with mp.get_context("fork").Manager() as manager:
        print(list(manager.list([3])))
    daemon = mp.get_context("fork").Process(target=train, args=(5, nn.Linear(4, 3)), daemon=True)
    daemon.start(); daemon.join()
    print(daemon.exitcode)
    """
    recorded = run(tmp_path, body)
    assert (recorded.returncode, recorded.stdout) == (0, "[1, 2]\n[3]\n0\n"), recorded.stderr
    assert losses(tmp_path) == {1: as_float32([*printed(tmp_path, 0), *printed(tmp_path, 1)])}


def test_what_cannot_be_recorded_trains_and_is_told(tmp_path: Path) -> None:
    """A bound on the bytes cannot be shared by processes that know nothing of each other."""
    recorded = run(tmp_path, "end(processes('fork', 2))", "--max-bytes", "10MB")
    assert (recorded.returncode, recorded.stdout) == (0, "[0, 0]\n"), recorded.stderr
    assert recorded.stderr.count("cannot share max_bytes") == 2
    assert not (tmp_path / "run.zarr").exists()
    assert [len(printed(tmp_path, number)) for number in range(2)] == [3, 3]
    assert run(tmp_path, "end(processes('fork', 1))", "--max-bytes", "10MB", "--strict").returncode == 1


def test_a_trace_that_is_there_stays(tmp_path: Path) -> None:
    """One that another process made since the script began: the children train, and say why they record nothing."""
    body = """
    net = nn.Linear(4, 3)
    with_trace = "import tracer; tracer.TraceWriter('run.zarr').finish()"
    __import__("subprocess").run([sys.executable, "-c", with_trace], check=True)
    end(processes("fork", 1))
    """
    recorded = run(tmp_path, body)
    assert recorded.stdout == "[0]\n", recorded.stderr
    assert "already exists" in recorded.stderr
    assert losses(tmp_path) == {}


def test_a_rank_is_recorded_once(tmp_path: Path) -> None:
    """A second process of the same rank is told so, also where traces are to be overwritten."""
    member = Member()
    process = member.child(1).process()
    path = location(tmp_path / "run.zarr")
    with tracer.TraceWriter(path, header={"launch": process.launch}, part="rank1"):
        pass
    with pytest.raises(TraceExistsError, match="has a rank 1 of this run already"):
        claim(path, process, [1], overwrite=True)
    other = member.child(2).process()
    assert claim(path, other, [2], overwrite=True) == (0, claim(path, other, [2])[1])
    stranger = Member().child(2).process()
    assert (process, stranger.launch == process.launch) == (Process(1, 1, process.launch), False)
    claim(path, stranger, [2], overwrite=True)
    assert not path.exists() or not [*path.glob("rank*")]


def test_what_a_new_interpreter_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No function without a name, and not where the script's folder has a module of this package's name."""

    def record(capture: Capture) -> Record:
        recipe = Recipe("train.py", location(tmp_path / "run.zarr"), (capture,), Options())
        return functools.partial(run_child, recipe)

    assert can_be_told(record(Capture()))
    assert not can_be_told(record(Capture(condition=lambda step: step > 1)))
    (tmp_path / "tracer.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not can_be_told(record(Capture()))
