"""What a trace holds after its writer was killed, or ran out of space."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import pytest
import torch

from tests import processes
from tracer.trace.reader import TraceReader

FORMATS = (".zarr", ".h5")
TRIALS = 12
"""Kills of each format; `make test-slow` has more than a hundred."""

COMMON = """
import os, random, struct, sys, time
import numcodecs.blosc
import torch
from tracer.messaging.messages import ModuleMessage, NetworkMessage
from tracer.trace.writer import TraceWriter

def message(number):
    where = dict(global_step=number, train_step=number, epoch=0)
    kind = number % 5
    if kind == 0:
        return NetworkMessage(kind="batch_started", **where)
    if kind == 1:
        return NetworkMessage(kind="loss", data=torch.tensor(float(number)), **where)
    if number % 20 == 2:
        # written past the page cache
        return ModuleMessage(kind="weights", module="largest", data=torch.full((256, 256), float(number)), **where)
    if kind == 2:
        return ModuleMessage(kind="weights", module="large", data=torch.full((130, 130), float(number)), **where)
    if kind == 3:
        return ModuleMessage(kind="weights", module="ragged", data=torch.full((number % 700,), number), **where)
    name = "late" if number > 400 else "early"
    return ModuleMessage(kind="biases", module=name, data=torch.full((70, 300), float(number)), **where)
"""

# the processes that are killed are forked, because importing torch for each of them would take most of the time
KILLED = (
    COMMON
    + """
torch.set_num_threads(1)
folder, suffix, compression, trials = sys.argv[1], sys.argv[2], sys.argv[3], map(int, sys.argv[4:])
parent = os.getpid()
for trial in trials:
    rng = random.Random(trial)
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        acknowledged = os.open(f"{folder}/{trial}.acknowledged", os.O_WRONLY | os.O_CREAT)
        writer = TraceWriter(
            f"{folder}/{trial}{suffix}", chunk_bytes=4096, commit_rows=rng.choice([7, 60, 5000]), commit_seconds=0.05,
            compression=compression,
        )
        os.write(started, b".")
        number = 0
        while os.getppid() == parent:  # it would fill the disk if the test itself were killed
            many = rng.randrange(1, 200) if trial % 2 else 1
            writer.write_many([message(number + i) for i in range(many)])
            number += many
            if rng.random() < 0.03:
                writer.commit()
                os.pwrite(acknowledged, struct.pack("<q", number), 0)
        os._exit(1)
    os.close(started)
    assert os.read(ready, 1) == b".", f"the writer of trial {trial} did not begin"
    # mostly early, where the files are made, sealed and moved; sometimes with many commits behind it
    time.sleep(rng.random() * rng.choice([0.02, 0.1, 0.4]))
    os.kill(child, 9)
    os.waitpid(child, 0)
"""
)

FULL = (
    COMMON
    + """
import resource, signal
from tracer.errors import TraceError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = sys.argv[1]
writer = TraceWriter(path, chunk_bytes=4096)
for number in range(100):
    writer.write(message(number))
writer.commit()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    for number in range(100, 100000):
        writer.write(message(number))
except TraceError as error:
    first = str(error)
assert path in first and "too large" in first, first
for attempt in (lambda: writer.write(message(0)), writer.commit, writer.finish):
    try:
        attempt()
    except TraceError as error:
        assert first in str(error), error
    else:
        raise AssertionError("a failed writer goes on")
print("said so")
"""
)


def run(code: str, *arguments: str) -> str:
    """Run a program with the modules of this checkout, and return what it prints."""
    root = str(Path(__file__).parents[2])
    done = processes.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(path: Path) -> int:
    """Check every message of a trace against what was written, and return how many there are."""
    with TraceReader(path) as reader:
        assert reader.status == "interrupted" or reader.status.startswith("failed: cannot write")
        number = -1
        for number, message in enumerate(reader.messages()):
            assert message.global_step == number
            assert (message.data is None) == (number % 5 == 0)
            if message.data is not None:
                large = (256, 256) if number % 20 == 2 else (130, 130)
                assert message.data.shape == ((), (), large, (number % 700,), (70, 300))[number % 5]
                assert torch.equal(message.data, torch.full_like(message.data, number))
        assert len(reader) == number + 1
        if len(reader) > 500:
            assert {stream.module for stream in reader.streams} == {None, "large", "largest", "ragged", "early", "late"}
        return len(reader)


def kill(folder: Path, suffix: str, trials: range, compression: str = "none") -> None:
    """Kill so many writers; each trace opens without repair, has all that was acknowledged, and nothing wrong."""
    run(KILLED, str(folder), suffix, compression, *map(str, trials))
    lengths, acknowledgements = [], []
    for trial in trials:
        data = (folder / f"{trial}.acknowledged").read_bytes()
        acknowledgements.append(struct.unpack("<q", data)[0] if data else 0)
        lengths.append(check(folder / f"{trial}{suffix}"))
        assert lengths[-1] >= acknowledgements[-1], trial
    assert max(lengths) >= max(acknowledgements) > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")
@pytest.mark.parametrize("suffix", FORMATS)
def test_kill(tmp_path: Path, suffix: str) -> None:
    """A killed writer loses nothing that it acknowledged."""
    kill(tmp_path, suffix, range(TRIALS))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_kill_compressed(tmp_path: Path, suffix: str, compression: str) -> None:
    """Nor does one whose chunks are compressed."""
    kill(tmp_path, suffix, range(2000, 2004), compression)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")
@pytest.mark.parametrize("suffix", FORMATS)
def test_kill_many(tmp_path: Path, suffix: str) -> None:
    """Nor do more than a hundred others."""
    for trials in (range(TRIALS, 30), *(range(first, first + 25) for first in range(1000, 1100, 25))):
        kill(tmp_path, suffix, trials)
    for compression in ("lz4", "zstd"):
        (tmp_path / compression).mkdir()
        kill(tmp_path / compression, suffix, range(2004, 2012), compression)


@pytest.mark.skipif(sys.platform == "win32", reason="the space is limited by RLIMIT_FSIZE")
@pytest.mark.parametrize(("suffix", "limit"), [(".zarr", 9 << 20), (".h5", 12 << 20)])
def test_no_space_left(tmp_path: Path, suffix: str, limit: int) -> None:
    """When the disk is full the writer says so in a sentence, writes no more, and what was committed is safe."""
    path = tmp_path / f"run{suffix}"
    assert run(FULL, str(path), str(limit)) == "said so\n"
    assert check(path) >= 100
