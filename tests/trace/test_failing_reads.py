"""Reads that fail for a moment, or from a moment on: no answer is ever another one, and nothing is told as damage."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests import processes
from tests.faults import failing
from tracer import TraceWriter
from tracer.messaging.messages import ModuleMessage, NetworkMessage

VARIANTS = [(".zarr", "none"), (".zarr", "zstd"), (".h5", "none"), (".h5", "zstd")]
ERRORS = ["EIO", "ESTALE", "ETIMEDOUT", "EACCES", "short"]


def written(folder: Path, suffix: str, compression: str) -> str:
    """A trace with events, small, ragged and large messages; returns its name."""
    folder.mkdir()
    with TraceWriter(folder / f"run{suffix}", compression=compression, own_pool_bytes=8192, chunk_bytes=4096) as writer:
        for step in range(6):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where))
            for name, shape in (("wide", (60, 70)), ("ragged", (step,)), ("large", (150, 200))):
                writer.write(ModuleMessage(kind="weights", module=name, data=torch.full(shape, float(step)), **where))
            writer.commit()
    return f"run{suffix}"


def sweep(tmp_path: Path, variant: tuple[str, str], error: str, times: int, every: int) -> tuple[list[str], int]:
    """Let calls fail, `times` in a row from each `every`-th on; returns what was told, and how often nothing."""
    folder = tmp_path / "traces"
    name = written(folder, *variant)
    done = failing.run("reading.py", folder, name=name, error=error, times=times, every=every, **{"from": every // 2})
    assert done.code == 0, done.errors
    assert {way: found["wrong"] for way, found in done.said.items()} == {"read": [], "verify": [], "recover": []}
    assert all(found["calls"] > 20 for found in done.said.values())
    return [one for found in done.said.values() for one in found["told"]], sum(
        found["equal"] for found in done.said.values()
    )


@pytest.mark.parametrize(("variant", "error"), [(VARIANTS[1], "short"), (VARIANTS[2], "ESTALE")])
def test_reads_that_fail_once(tmp_path: Path, variant: tuple[str, str], error: str) -> None:
    """They are tried again, so that every answer is the right one."""
    told, equal = sweep(tmp_path, variant, error, times=1, every=17)
    assert (told, equal > 10) == ([], True)


@pytest.mark.parametrize(("variant", "error"), [(VARIANTS[0], "ETIMEDOUT"), (VARIANTS[2], "EIO")])
def test_reads_that_fail_from_some_moment_on(tmp_path: Path, variant: tuple[str, str], error: str) -> None:
    """A trace that cannot be read is told as that; reads that are only short end well."""
    told, equal = sweep(tmp_path, variant, error, times=failing.FOR_EVER, every=43)
    assert (len(told) > 3) != (error == "short")
    assert (equal > 3) == (error == "short")


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, failing.FOR_EVER])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_read_fails(tmp_path: Path, variant: tuple[str, str], error: str, times: int) -> None:
    """The same for each call of reading, verifying and recovering."""
    sweep(tmp_path, variant, error, times, every=1)


# -- kills ---------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What ends a process, as far as this one can tell."""


def test_a_kill_while_a_trace_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path stays usable, and what the kill left beside it is gone after the next recording."""
    name = written(tmp_path / "runs", ".zarr", "none")
    path = tmp_path / "runs" / name
    removed = shutil.rmtree

    def killed(folder: Path, **options: Any) -> None:
        next(Path(folder).rglob("zarr.json")).unlink()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            TraceWriter(path, overwrite=True)
    assert shutil.rmtree is removed
    assert len(os.listdir(path.parent)) == 1
    with TraceWriter(path, overwrite=True):
        pass
    assert os.listdir(path.parent) == [name]


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_what_a_killed_upkeep_leaves(tmp_path: Path, suffix: str) -> None:
    """The next upkeep of the same path removes it; the folder of a living program, and what others named, stay."""
    name = written(tmp_path / "runs", suffix, "none")
    target = tmp_path / f"copy{suffix}"
    program = (
        "import os, sys, tracer\nfrom tracer.upkeep import convert\n"
        "convert.TraceReader.windows = lambda *a, **o: os.kill(os.getpid(), 9)\n"
        "tracer.TraceWriter.finish = lambda *a, **o: os.kill(os.getpid(), 9)\n"
        f"tracer.convert({str(tmp_path / 'runs' / name)!r}, {str(target)!r})\n"
    )
    done = processes.run([sys.executable, "-c", program], cwd=failing.ROOT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.glob(".copy*.unfinished")
    living = tmp_path / f".copy{suffix}.abcdefgh.unfinished"
    living.mkdir()
    (tmp_path / f".copy{suffix}.original").mkdir()
    file = os.open(living, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    tracer.convert(tmp_path / "runs" / name, target)
    os.close(file)
    assert not left.exists()
    assert {one.name for one in tmp_path.glob(".*")} == {living.name, f".copy{suffix}.original"}
