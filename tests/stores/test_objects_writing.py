"""Traces on object stores while and after they are written: what is put when, kills, several writers, restarts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests import processes
from tests.stores.object_traces import EXPECTED, change, facts, keys, messages, read, write
from tracer.errors import TraceExistsError
from tracer.format.names import part_name
from tracer.messaging.messages import NetworkMessage
from tracer.stores.locations import Url, location
from tracer.stores.opening import create_store
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.verify import verify

pytest.importorskip("obstore", reason="obstore reads and writes object stores: pip install 'tracereel[s3]'")


from tracer.stores.objects import Objects  # it cannot be imported without obstore
from tracer.stores.zarr import on_objects, writing
from tracer.stores.zarr.on_objects import ObjectFiles
from tracer.stores.zarr.writing import ZarrWriteStore

pytestmark = pytest.mark.usefixtures("environment")


def test_objects_are_put_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shard of a pool is put again; those of the tables are, and what says their length comes after them."""
    puts: list[str] = []
    put = Objects.put
    monkeypatch.setattr(Objects, "put", lambda self, name, data: (puts.append(name), put(self, name, data))[1])
    write(url)
    shards = [name for name in puts if "/c/" in name]
    tables = ("rank0/journal/", "rank0/declarations/")
    pools = [name for name in shards if not name.startswith(tables)]
    assert len(pools) == len(set(pools)) > 10
    assert len([name for name in shards if name == "rank0/journal/c/0/0"]) > 3
    # published when it is made, and once more when it is closed
    assert puts.count("rank0/pools/loss/float32/zarr.json") == 2
    for place, name in enumerate(puts):
        if name == "rank0/journal/c/0/0":
            following = [
                one for one in puts[place:] if one == "rank0/journal/zarr.json" or one.startswith("rank0/pools")
            ]
            assert following[0] == "rank0/journal/zarr.json"


def test_what_waits_is_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are put at once, and no more of them than so many bytes."""
    monkeypatch.setattr(on_objects, "IN_FLIGHT_BYTES", 300_000)
    monkeypatch.setattr(writing, "SHARD_BYTES", 100_000)
    active: dict[str, int] = {}
    most: list[int] = []
    put = Objects.put

    def watched(self: Objects, name: str, data: bytes) -> None:
        active[name] = len(data)
        most.append(sum(active.copy().values()))
        put(self, name, data)
        del active[name]

    monkeypatch.setattr(Objects, "put", watched)
    write(url, commit_seconds=1000.0)
    # the row that is larger goes alone
    assert all(total <= 300_000 or 2_100_000 < total < 2_200_000 for total in most)
    assert max(total for total in most if total < 2_000_000) > 150_000
    assert read(url) == EXPECTED


def test_overwrite(url: str, bucket: Any) -> None:
    """A trace is replaced when that is asked for, and nothing else ever is."""
    write(url)
    write(url, steps=2, overwrite=True)
    assert read(url) == [facts(message) for message in messages(2)]
    fresh = f"{url.removesuffix('.zarr')}2.zarr"
    write(fresh, steps=2)
    assert keys(bucket, url) == keys(bucket, fresh)
    change(bucket, url, "zarr.json", data=b"{}")
    with pytest.raises(TraceExistsError, match="not a trace"):
        write(url, overwrite=True)


def test_reading_while_it_is_written(url: str) -> None:
    """A reader sees ever more whole messages, and never a torn one."""
    writer = TraceWriter(url, commit_rows=17)
    seen: list[int] = []
    done = threading.Event()
    wrong: list[Any] = []

    def look() -> None:
        while not wrong:
            last = done.is_set()
            with TraceReader(url) as reader:
                found = [facts(message) for message in reader]
            seen.append(len(found))
            if found != EXPECTED[: len(found)]:
                wrong.append(len(found))
            if last:
                return

    reading = threading.Thread(target=look)
    reading.start()
    try:
        for message in messages():
            writer.write(message)
        writer.finish()
    finally:
        done.set()
        reading.join()
    assert not wrong
    assert seen == sorted(seen)
    assert seen[-1] == len(EXPECTED)
    assert len(set(seen)) > 2


def test_kill(url: str, tmp_path: Path) -> None:
    """After kill -9 every message that a commit acknowledged is there, and the trace says that it was interrupted."""
    program = f"""
import itertools, torch
from tracer import ModuleMessage, TraceWriter
writer = TraceWriter({url!r}, commit_rows=10**6, commit_seconds=1000.0)
for number in itertools.count():
    where = dict(global_step=number, train_step=number, epoch=0)
    shape = (200, 100) if number % 2 else (number % 50,)
    writer.write(ModuleMessage(kind="weights", module="fc", data=torch.full(shape, float(number)), **where))
    if number % 23 == 22:
        writer.commit()
        print(number + 1, flush=True)
"""
    with processes.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(8)][-1]
        process.kill()
        acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
    with TraceReader(url) as reader:
        found = list(reader)
        assert reader.status == "interrupted"
    assert len(found) >= acknowledged
    for number, message in enumerate(found):
        assert message.global_step == number
        assert message.data is not None
        assert torch.equal(message.data, torch.full((200, 100) if number % 2 else (number % 50,), float(number)))
    report = verify(url)
    assert (report.intact, report.complete) == (True, False)


def test_two_writers(url: str) -> None:
    """Of two writers of one trace the second is refused, also if neither saw the other."""
    with TraceWriter(url) as writer:
        with pytest.raises(TraceExistsError, match="already exists"):
            TraceWriter(url)
        program = f"from tracer.trace.claiming import check_target\ncheck_target({url!r}, overwrite=True)"
        other = processes.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert f"{url} is being recorded by process {os.getpid()}" in other.stderr
        writer.note({"still": "writing"})
    found = location(url)
    assert isinstance(found, Url)
    with pytest.raises(TraceExistsError, match="in the meantime"):
        ZarrWriteStore(ObjectFiles(found))


@pytest.mark.parametrize("ending", [pytest.param("", marks=pytest.mark.slow), "raise ValueError('of its own')"])
def test_a_program_that_ends_closes_what_it_records(url: str, ending: str) -> None:
    """Python starts no threads any more then, and nobody ended the recording: it is written all the same."""
    program = f"""
import torch, tracer
recorder = tracer.Recorder(tracer.TraceWriter({url!r}, commit_seconds=3600))
for step in range(24):
    where = {{"global_step": step, "train_step": step, "epoch": 0}}
    for name in ("a", "b", "c"):
        data = torch.full((300_000,), float(step))
        recorder.receive(tracer.ModuleMessage(kind="activations", module=name, data=data, **where))
{ending}
"""
    done = processes.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == bool(ending), done.stderr
    assert "shutdown" not in done.stderr
    with TraceReader(url) as reader:
        why = "ValueError: of its own" if ending else "TraceError: the program ended before the recording"
        assert reader.status == f"failed: {why}"
        assert [float(one.data[-1]) for one in reader.messages(modules="b")] == [*range(24)]


def test_ranks_and_attempts(url: str) -> None:
    """Parts of a trace lie beside each other below one URL, and are put together."""

    def part(steps: range, rank: int, attempt: int = 0) -> None:
        header = {"ranks": [1] if attempt else [0, 1], "attempt": attempt, "first_step": steps.start}
        with TraceWriter(url, header=header, part=part_name(rank, attempt)) as writer:
            for step in steps:
                where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
                writer.write(NetworkMessage(kind="loss", data=torch.tensor(100 * attempt + step), **where))

    part(range(6), 0)
    with TraceReader(url) as reader:
        assert "nothing of rank 1" in reader.problems[0]
    part(range(6), 1)
    part(range(4, 8), 1, attempt=1)
    with pytest.raises(TraceExistsError):
        part(range(2), 1)
    with TraceReader(url) as reader:
        assert (reader.ranks, reader.problems) == ([0, 1], [])
        found = [(int(message.data), message.rank) for message in reader.messages(ranks=1) if message.data is not None]
        assert found == [(step, 1) for step in range(4)] + [(100 + step, 1) for step in range(4, 8)]
        assert reader.array("loss")[0].tolist()[:4] == [0, 0, 1, 1]
    assert verify(url).complete


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_that_was_killed_as_it_began_is_resumed(url: str, killed: int) -> None:
    """Whether another attempt ended before it or not: the root tells only later that it is one of a trace."""
    found = location(url)
    assert isinstance(found, Url)
    left = {"zarr.json": {"writer": "0" * 32}} | ({"rank0/zarr.json": {}} if killed else {})
    store = Objects(found)
    for name, attributes in left.items():
        store.put_new(name, json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}).encode())
    store.close()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with tracer.record(url, model, optimizer, resume=True, capture=tracer.Capture()):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    with TraceReader(url) as reader:
        assert reader.array("weights", "")[0].tolist() == [0, 1]
        assert (reader.problems, [one["attempt"] for one in reader.attempts]) == ([], [killed])
    assert verify(url).intact


def test_two_writers_of_one_part(url: str) -> None:
    """The second is refused, also where both resume and neither has written its header yet."""
    with TraceWriter(url, part="rank0"):
        pass
    first = create_store(url, part="rank0.attempt1")
    with pytest.raises(TraceExistsError):
        ZarrWriteStore(ObjectFiles(location(url)), "rank0.attempt1")  # type: ignore[arg-type] # an Url
    with pytest.raises(TraceExistsError):
        create_store(url, part="rank0.attempt1")
    first.close()


def test_recorded_again_after_a_restart(url: str) -> None:
    """`record` resumes a trace at a URL, and replaces it when it is told to."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for options, steps in (({}, 3), ({"resume": True, "first_step": 2}, 4), ({"overwrite": True}, 1)):
        with tracer.record(url, model, optimizer, **{"capture": tracer.Capture(), **options}):  # type: ignore[arg-type] # options of several types
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
        with TraceReader(url) as reader:
            assert reader.array("weights", "")[0].tolist() == [*range(6 if "resume" in options else steps)]
    with TraceReader(url) as reader:
        assert len(reader.attempts) == 1


def test_followed(url: str) -> None:
    """A replay follows what another process puts, and ends with it."""
    program = f"""
import sys, torch
from tracer import NetworkMessage, TraceWriter
with TraceWriter({url!r}) as writer:
    print("ready", flush=True)
    for step, _ in enumerate(sys.stdin):
        where = dict(global_step=step, train_step=step, epoch=0)
        writer.write(NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where))
        writer.commit()
"""
    heard = tracer.Collect("loss")
    with processes.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        thread = threading.Thread(target=lambda: tracer.replay(url, heard, follow=True), daemon=True)
        thread.start()
        for step in range(3):
            other.stdin.write(b"\n")
            other.stdin.flush()
            deadline = time.monotonic() + 30
            while len(heard) <= step:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        other.stdin.close()
        thread.join(30)
        assert not thread.is_alive()
    assert [float(message.data) for message in heard if message.data is not None] == [0.0, 1.0, 2.0]
