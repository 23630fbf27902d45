"""What a trace holds after a power failure, whatever the disk has of what was written since it was last waited for."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tracer
import tracer.stores.chunks
import tracer.stores.hdf5.reading
import tracer.stores.zarr.reading
from tests.trace.crash_states import Disk, Stage, State
from tests.trace.small_summaries import small_summaries
from tracer.errors import TraceError
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.claiming import claim, this_process
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

FORMATS = (".zarr", ".h5")
GONE = {"process": {"pid": 2**22 + 1, "hostname": platform.node(), "start": "1"}}
"""A header by which the writer does not run any more."""


def message(number: int, seed: int) -> Message:
    """The message of this number: events, scalars, rows of pools of their own, rows that are split, ragged ones."""
    where: dict[str, Any] = {"global_step": number, "train_step": number, "epoch": 0}
    value = float(number * 10 + seed)
    kind = (number * 7 + seed) % 6
    if kind == 0:
        return NetworkMessage(kind="batch_started", **where)
    if kind == 1:
        return NetworkMessage(kind="loss", data=torch.tensor(value), **where)
    if kind == 2:
        return ModuleMessage(kind="weights", module="own", data=torch.full((310,), value), **where)
    if kind == 3:
        return ModuleMessage(kind="weights", module="split", data=torch.full((3, 500), value), **where)
    if kind == 4:
        return ModuleMessage(kind="labels", module="", data=torch.full((number % 90,), number), **where)
    return ModuleMessage(kind="biases", module=f"fc{number % 4}", data=torch.full((70,), value), **where)


@dataclass
class Trial:
    """A trace that is written, and the states of the disk that are looked at meanwhile."""

    suffix: str
    durable: bool
    compression: str
    seed: int
    each: int
    most: int
    messages: int = 24
    states: int = 0
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    whole: int = 0

    def run(self, folder: Path) -> None:
        """Write the trace, and read it in every state."""
        live, shown = folder / "live", folder / "shown"
        live.mkdir()
        shown.mkdir()
        rng = random.Random(self.seed)
        self.expected = [message(number, self.seed) for number in range(self.messages)]
        self.stage = Stage(shown)
        self.disk = Disk(live, self.look, hdf5=self.suffix == ".h5")
        self.written = 0
        with self.disk.watched():
            writer = TraceWriter(
                live / f"run{self.suffix}", header=GONE, chunk_bytes=512, own_pool_bytes=1024, commit_seconds=1e9,
                durable=self.durable, compression=self.compression,
            )  # fmt: skip
            while self.written < self.messages:
                count = rng.randrange(1, 6)
                writer.write_many(self.expected[self.written : self.written + count])
                self.written += count
                writer.commit()
                self.acknowledged = min(self.written, self.messages)
                if not self.durable:
                    self.look()
            writer.finish()
        self.look()

    def look(self) -> None:
        """Read the trace in the states that the disk may be in now."""
        if self.states >= self.most:
            return
        for state in self.disk.states(self.each, self.seed * 1000 + self.states):
            digest = hashlib.blake2b(digest_size=12)
            for path in sorted(state):
                digest.update(f"\n{path}\n".encode())
                digest.update(state[path] or b"")
            if digest.digest() not in self.seen:
                self.seen.add(digest.digest())
                with self.disk.elsewhere():
                    self.check(state)

    def check(self, state: State) -> None:
        """Read the trace in one state: nothing may be wrong, and where it is durable nothing acknowledged be lost."""
        self.states += 1
        self.stage.show(state)
        path = self.stage.folder / f"run{self.suffix}"
        found = 0
        why = "the end is missing"
        try:
            with TraceReader(path) as trace:
                for one in trace.messages():
                    if found == len(self.expected) or not same(one, self.expected[found]):
                        self.wrong.append(f"state {self.states}: message {found} is {one}")
                        return
                    found += 1
                if found == len(self.expected):
                    self.whole += 1
        except TraceError as error:
            why = str(error)
        if self.durable and found < self.acknowledged:
            self.lost.append(f"state {self.states}: {found} of {self.acknowledged}: {why}")
        if self.states % 97 == 0:
            self.check_others(path, found)

    def check_others(self, path: Path, found: int) -> None:
        """What `verify` calls intact can be read, and what `recover` saves is right."""
        try:
            report = tracer.verify(path)
        except TraceError:
            return
        if report.intact and report.messages > found:
            self.wrong.append(f"state {self.states}: {report.messages} messages are called intact, {found} can be read")
        with tempfile.TemporaryDirectory() as folder:
            try:
                tracer.recover(path, Path(folder) / "saved.zarr")
            except TraceError:
                return
            with TraceReader(Path(folder) / "saved.zarr") as saved:
                for one in saved.messages():
                    if not same(one, self.expected[one.global_step]):
                        self.wrong.append(f"state {self.states}: {one} was saved")


def same(one: Message, other: Message) -> bool:
    """Whether two messages are the same to the bit."""
    if (one.kind, one.key, one.global_step) != (other.kind, other.key, other.global_step):
        return False
    if one.data is None or other.data is None:
        return one.data is other.data
    return one.data.dtype == other.data.dtype and torch.equal(one.data, other.data)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory, if there is one; rows are split as if a chunk had to be small."""
    monkeypatch.setattr(tracer.stores.chunks, "CHUNK_LIMIT", 2048)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        yield Path(name)


def look_at_states(
    folder: Path,
    suffix: str,
    durable: bool,
    compression: str,
    monkeypatch: pytest.MonkeyPatch,
    quota: int | None = None,
) -> None:
    """Look at states of several traces: all of a small one where that is durable, and some of others.

    Without a quota: of the small trace and one other, from their beginning to their end, a few at each moment. All but
    the first have summaries of a few rows each.
    """
    seen = whole = 0
    for seed in range(2 if quota is None else 1000):
        if seed == 1:
            small_summaries(monkeypatch)
        place = folder / str(seed)
        place.mkdir()
        small = seed == 0
        some = (60 if durable else 336) // (8 if quota is None else 1)
        trial = Trial(
            suffix, durable, compression, seed, each=1 << 14 if small and durable else some,
            most=sys.maxsize if quota is None else quota - seen, messages=3 if small else (24, 24, 24, 150)[seed % 4],
        )  # fmt: skip
        trial.run(place)
        assert not trial.wrong, trial.wrong[:3]
        assert not trial.lost, trial.lost[:3]
        assert not (small and durable) or trial.disk.most <= trial.each, "all states of the small one are looked at"
        assert trial.states > 40 or (quota is not None and seen + trial.states >= quota), "there are states to look at"
        seen += trial.states
        whole += trial.whole
        if quota is not None and seen >= quota:
            break
    assert seen >= (quota or 0)
    assert whole, "some state has all messages"


@pytest.mark.parametrize(
    ("suffix", "compression", "durable"),
    [
        (".zarr", "none", True),
        (".zarr", "lz4", False),
        (".h5", "none", True),
        pytest.param(".zarr", "none", False, marks=pytest.mark.slow),
        pytest.param(".zarr", "lz4", True, marks=pytest.mark.slow),
        pytest.param(".h5", "none", False, marks=pytest.mark.slow),
        *(pytest.param(".h5", "lz4", durable, marks=pytest.mark.slow) for durable in (True, False)),
    ],
)
def test_power_failure(
    folder: Path, suffix: str, durable: bool, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two thousand states none has a wrong value, and where the trace is durable each has what was acknowledged."""
    look_at_states(folder, suffix, durable, compression, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "durable", "quota"),
    [(".zarr", True, 28600), (".zarr", False, 16500), (".h5", True, 6600), (".h5", False, 4400)],
)
@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_power_failure_many(
    folder: Path, suffix: str, durable: bool, quota: int, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is there one among 112,200, of longer traces, too."""
    look_at_states(folder, suffix, durable, compression, monkeypatch, quota)


def test_the_states_of_a_disk(tmp_path: Path) -> None:
    """Pages, sizes and names are each as they were or as they are, until the disk was waited for."""
    disk = Disk(tmp_path, lambda: None, hdf5=False)
    with disk.watched():
        file = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
        os.pwrite(file, b"x" * 4096 + b"y", 0)
        states = list(disk.states(100, 0))
        assert {state.get("a") for state in states} == {
            None, b"", bytes(4097), b"x" * 4096 + b"\0", bytes(4096) + b"y", b"x" * 4096 + b"y"
        }  # fmt: skip
        os.fsync(file)
        assert {state.get("a") for state in disk.states(100, 0)} == {None, b"x" * 4096 + b"y"}
        there = os.open(tmp_path, os.O_RDONLY)
        os.fsync(there)
        os.replace(tmp_path / "a", tmp_path / "b")
        os.pwrite(file, b"z", 4096)
        assert (
            sorted(map(str, map(dict.keys, disk.states(100, 0)))) == ["dict_keys(['a'])"] * 2 + ["dict_keys(['b'])"] * 2
        )
        os.close(file)
        os.close(there)


@pytest.mark.parametrize("what", ["journal", "declarations", "a pool"])
def test_a_trace_whose_end_the_disk_never_had(tmp_path: Path, what: str) -> None:
    """What is whole is read, and it is said that the rest is missing; the run can be resumed."""
    path = tmp_path / "run.zarr"
    expected = [message(number, 5) for number in range(60)]
    writer = TraceWriter(path, header=GONE | {"run_id": "one", "ranks": [0]}, chunk_bytes=512, own_pool_bytes=1024)
    for one in expected:
        writer.write(one)
        writer.commit()
    writer._store.abandon()
    name = {"journal": "rank0/journal", "declarations": "rank0/declarations", "a pool": "rank0/pools/biases/float32"}
    shard = path / name[what] / "c" / ("0/0" if what == "journal" else "0")
    data = bytearray(shard.read_bytes())
    data[-600:] = bytes(600)
    shard.write_bytes(data)
    found = []
    with TraceReader(path) as trace:
        told = list(trace.problems)
        with contextlib.suppress(TraceError):
            for one in trace.messages():
                found.append(one)  # noqa: PERF402 - what came before an error counts
    assert len(found) < 60
    # data is read in blocks, and nothing of a damaged one is given out
    assert found or what == "a pool"
    assert all(map(same, found, expected))
    if what != "a pool":
        assert len(told) == 1
        assert f"the end of rank0 is missing or damaged, from row {len(found)} of the journal on" in told[0]
    assert not tracer.verify(path).intact
    attempt, run_id = claim(path, this_process({}), [0], resume=True)
    assert (attempt, run_id) == (1, "one")
    # what is not at the end is damage, whoever the writer was
    if what == "journal":
        data = bytearray(shard.read_bytes())
        place = data.find(np.array([5, 5, 0], "<i8").tobytes())
        data[place] ^= 4
        shard.write_bytes(data)
        with pytest.raises(TraceError, match="fails its checksum"):
            TraceReader(path)


def test_a_shard_of_another_run_is_noticed(tmp_path: Path) -> None:
    """Its chunks are whole, but its messages are others: an interrupted copy of one run over another leaves such."""
    paths = [tmp_path / "one.zarr", tmp_path / "other.zarr"]
    for seed, path in enumerate(paths):
        with TraceWriter(path, own_pool_bytes=1024) as writer:
            for number in range(12):
                where = {"global_step": number, "train_step": number, "epoch": 0}
                values = torch.full((700,), float(100 * seed + number))
                writer.write(ModuleMessage(kind="weights", module="own", data=values, **where))
                writer.write(NetworkMessage(kind="loss", data=values[0], **where))
                large = torch.full((300_000,), float(seed))
                writer.write(ModuleMessage(kind="weights", module="large", data=large, **where))
    for name in ("weights/own/c/0/0", "weights/large/c/0/0", "pools/loss/float32/c/0"):
        for path in paths:
            assert tracer.verify(path).intact
        one, other = (path / "rank0" / name for path in paths)
        before = one.read_bytes()
        one.write_bytes(other.read_bytes())
        with TraceReader(paths[0]) as trace, pytest.raises(TraceError, match="checksum"):
            list(trace.messages())
        report = tracer.verify(paths[0])
        assert (report.damaged, {problem.check for problem in report.problems}) == (12, {"data"})
        one.write_bytes(before)


@pytest.mark.parametrize("suffix", FORMATS)
def test_names_above_a_trace_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Of folders that are made for a durable trace, the disk has the names, too, before anything is committed."""
    synced, fsync = set(), os.fsync

    def noting(file: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noting)
    with TraceWriter(tmp_path / "a" / "b" / f"run{suffix}", durable=True):
        assert synced >= {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
