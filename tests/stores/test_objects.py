"""Traces on object stores, against a real S3 server on this machine."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner

import tracer
from tests import processes
from tests.stores.served import served
from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    TraceUnreachableError,
)
from tracer.format.encodings import encode
from tracer.format.journal import Column
from tracer.format.names import part_name
from tracer.memory import PAGE
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.recording.recorder import Recorder
from tracer.stores.locations import Url, location
from tracer.stores.opening import create_store, exists, open_store
from tracer.trace.claiming import check_target
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.verify import verify
from tracereel.main import main

obstore = pytest.importorskip("obstore", reason="obstore reads and writes object stores: pip install 'tracereel[s3]'")
boto3 = pytest.importorskip("boto3", reason="boto3 prepares the buckets, and knows the credentials of ~/.aws")

from tracer.stores.objects import writing  # noqa: E402 - it cannot be imported without obstore
from tracer.stores.objects.client import RETRY_VARIABLE, Objects  # noqa: E402
from tracer.stores.objects.writing import ObjectWriteStore  # noqa: E402
from tracer.stores.zarr.shards import chunks_begin  # noqa: E402

# each starts with a URL of its own, so nothing of one test is seen by another
BUCKET = "bucket"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of an S3 server, with a bucket."""
    for port in served():
        client(port).create_bucket(Bucket=BUCKET)
        yield port


@functools.cache
def client(port: int) -> Any:
    """A client that does not share code with what is tested."""
    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )


@pytest.fixture(autouse=True)
def environment(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server and its credentials, as users say them."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """Where nothing is yet."""
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}/run.zarr"


@pytest.fixture
def bucket(server: int) -> Any:
    """The client of the server."""
    return client(server)


def keys(bucket: Any, url: str) -> list[str]:
    """The names of all objects below a URL."""
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    pages = bucket.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return [one["Key"].removeprefix(prefix) for page in pages for one in page.get("Contents", ())]


def change(bucket: Any, url: str, name: str, place: int | None = None, data: bytes | None = None) -> None:
    """Flip a bit of an object, replace it, or remove it."""
    key = f"{url.removeprefix(f's3://{BUCKET}/')}/{name}"
    if place is None and data is None:
        bucket.delete_object(Bucket=BUCKET, Key=key)
        return
    if data is None:
        assert place is not None
        stored = bytearray(bucket.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        stored[place] ^= 4
        data = bytes(stored)
    bucket.put_object(Bucket=BUCKET, Key=key, Body=data)


def download(bucket: Any, url: str, folder: Path) -> Path:
    """A copy of a trace on the disk, as `aws s3 cp --recursive` makes it."""
    for name in keys(bucket, url):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(
            bucket.get_object(Bucket=BUCKET, Key=f"{url.removeprefix(f's3://{BUCKET}/')}/{name}")["Body"].read()
        )
    return folder


def messages(steps: int = 30) -> Iterator[Message]:
    """A run with everything that is stored in another way: large and small, ragged, split, empty, without data."""
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        yield NetworkMessage(kind="batch_started", **where)
        yield NetworkMessage(kind="loss", data=torch.tensor(step / 3), **where)
        yield ModuleMessage(kind="weights", module="fc.%odd name", data=numbers(150, 120), **where)
        if step % 10 == 0:
            yield ModuleMessage(kind="weights", module="split", data=numbers(3, 700, 250), **where)
        yield ModuleMessage(kind="biases", module="fc.%odd name", data=numbers(120).bfloat16(), **where)
        yield ModuleMessage(kind="activations", module="", data=numbers(step % 4, 9), tag="eval", **where)


def write(path: str | Path, steps: int = 30, **options: Any) -> None:
    """A run with a commit in every seventh step."""
    with TraceWriter(path, header={"argv": ["train.py"]}, **options) as writer:
        for message in messages(steps):
            writer.write(message)
            if message.kind == "batch_started" and message.global_step % 7 == 6:
                writer.note({"step": message.global_step})
                writer.commit()


def facts(message: Message) -> tuple[Any, ...]:
    """All that a message says, comparable."""
    data = message.data
    bits = None if data is None else (data.dtype, tuple(data.shape), encode(data).tobytes())
    counters = (message.global_step, message.train_step, message.epoch, message.call)
    return (type(message), message.kind, message.key, message.tag, message.leaf, counters, bits)


def read(path: str | Path) -> list[tuple[Any, ...]]:
    """All messages of a trace."""
    with TraceReader(path) as reader:
        return [facts(message) for message in reader]


EXPECTED = [facts(message) for message in messages()]
SHORT = 8
"""Steps of a run that is as long as it has to be: there is a commit in it, and more comes after that."""
FEW = [facts(message) for message in messages(SHORT)]


# -- locations -------------------------------------------------------------------------------------------------


def test_locations() -> None:
    """URLs are told from paths, and those that no trace can be at are refused."""
    assert location("runs/a.zarr") == Path.cwd() / "runs/a.zarr"
    assert location("C:/a.zarr") == Path.cwd() / "C:/a.zarr"
    found = location("s3://bucket/runs/a.zarr/")
    assert found == Url("s3", "bucket", "runs/a.zarr")
    assert (str(found), found.name, found.suffix) == ("s3://bucket/runs/a.zarr", "a.zarr", ".zarr")
    assert location(found) is found
    for wrong in ("s3://bucket", "s3:///a.zarr", "s3://b/../a.zarr", "s3://b//a.zarr", "ftp://b/a.zarr"):
        with pytest.raises(TraceFormatError, match="URL"):
            location(wrong)
    with pytest.raises(TraceFormatError, match="no query"):
        location("https://host/a.zarr?token=1")
    with pytest.raises(TraceFormatError, match="give it as text"):
        location(Path("s3://bucket/a.zarr"))


def test_without_obstore(url: str) -> None:
    """Where obstore is missing, one sentence says what to install."""
    program = (
        "import sys\nsys.modules['obstore'] = None\nimport tracer\n"
        f"try:\n    tracer.open({url!r})\nexcept tracer.TraceError as error:\n    print(error)\n"
    )
    told = processes.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "needs the package obstore" in told
    assert "pip install 'tracereel[s3]'" in told


# -- the same as on a disk -------------------------------------------------------------------------------------


def test_round_trip(url: str, tmp_path: Path) -> None:
    """A trace at a URL says what the same trace on a disk says."""
    write(url)
    write(tmp_path / "run.zarr")
    assert read(url) == read(tmp_path / "run.zarr") == EXPECTED
    with TraceReader(url) as there, TraceReader(tmp_path / "run.zarr") as here:
        assert there.streams == here.streams
        assert there.notes == here.notes
        assert there.status == "finished"
        assert there.info["store"] == "zarr"
        np.testing.assert_array_equal(
            there.array("weights", "fc.%odd name", steps=(3, 25, 4))[1],
            here.array("weights", "fc.%odd name", steps=(3, 25, 4))[1],
        )
        assert sum(len(batch.rows) for batch in there.arrays("loss")) == 30
        assert there._parts.stores[0].names() == here._parts.stores[0].names()
        assert there._parts.stores[0].names("rank0/pools") == here._parts.stores[0].names("rank0/pools")
        assert abs(there._parts.stores[0].modified - here._parts.stores[0].modified) < 3600
    report = verify(url)
    assert (report.complete, report.messages, report.damaged) == (True, len(EXPECTED), 0)


def test_plain_zarr_reads_it(url: str) -> None:
    """zarr-python alone finds each message where the journal says."""
    from obstore.store import S3Store
    from zarr.storage import ObjectStore

    write(url, SHORT)
    key = url.removeprefix(f"s3://{BUCKET}/")
    store: Any = ObjectStore(S3Store(BUCKET, prefix=key, client_options={"allow_http": True}), read_only=True)
    root: Any = zarr.open_group(store, mode="r")
    assert root.attrs["format"] == "tracereel"
    journal = root["rank0/journal"][:]
    lines = [json.loads(line) for line in bytes(root["rank0/declarations"][:]).splitlines()]
    shapes, pools = ([line[what] for line in lines if what in line] for what in ("shape", "pool"))
    assert len(journal) == len(FEW)
    for row, expected in zip(journal.tolist(), FEW, strict=True):
        if row[Column.POOL] < 0:
            assert expected[-1] is None
            continue
        array = root[pools[row[Column.POOL]]["name"]]
        size = int(np.prod(array.shape[1:]))
        offset, count = row[Column.OFFSET], row[Column.COUNT]
        rows = array[offset // size : -(-(offset + count) // size)].reshape(-1)
        data = rows[offset % size :][:count]
        assert tuple(shapes[row[Column.SHAPE]]["shape"]) == expected[-1][1]
        assert data.tobytes() == expected[-1][2]


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
    monkeypatch.setattr(writing, "IN_FLIGHT_BYTES", 300_000)
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


def test_few_requests(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace is opened with few requests, and read with few for each shard."""
    write(url)
    asked: list[str] = []
    for name in ("get", "list", "head"):
        function = getattr(obstore, name)
        monkeypatch.setattr(
            obstore, name, lambda *a, name=name, function=function, **k: (asked.append(name), function(*a, **k))[1]
        )
    with TraceReader(url) as reader:
        # the root; of the journal and the declarations the zarr.json, the index and what is in the shard; and the
        # length of the journal again, because the run might have ended in between
        assert len(asked) <= 8
        assert set(asked) == {"get"}
        asked.clear()
        assert len(list(reader)) == len(EXPECTED)
        assert len(asked) < 70
        assert set(asked) == {"get"}


def test_convert_and_back(url: str, tmp_path: Path) -> None:
    """Copies to a URL, and from there to the disk, are the same messages; nothing is overwritten."""
    write(tmp_path / "run.h5")
    assert tracer.convert(tmp_path / "run.h5", url)["messages"] == len(EXPECTED)
    assert tracer.convert(url, tmp_path / "back.h5")["status"] == "finished"
    assert read(url) == read(tmp_path / "back.h5") == EXPECTED
    with pytest.raises(TraceExistsError, match="already exists"):
        tracer.convert(tmp_path / "run.h5", url)
    with pytest.raises(TraceExistsError, match="lies within"):
        tracer.convert(url, f"{url}/part.zarr")


def test_a_failed_copy_is_removed(url: str, tmp_path: Path, bucket: Any) -> None:
    """Nothing is left where a damaged trace was to be copied to."""
    write(tmp_path / "run.zarr")
    shutil.rmtree(tmp_path / "run.zarr/rank0/weights/split/c")
    with pytest.raises(TraceCorruptError):
        tracer.convert(tmp_path / "run.zarr", url)
    assert keys(bucket, url) == []


def test_recover(url: str, bucket: Any) -> None:
    """What can be had of a damaged trace is saved at another URL, and the rest is counted."""
    write(url)
    change(bucket, url, "rank0/weights/split/c/0/0/0/0", place=5000)
    change(bucket, url, "rank0/pools/loss/float32/zarr.json", data=b"{")
    change(bucket, url, "rank0/journal/zarr.json", data=b"{")
    change(bucket, url, "rank0/weights/zarr.json", data=b"{")
    report = verify(url)
    assert {problem.array for problem in report.problems} >= {"rank0/weights/split", "rank0/journal"}
    assert any("'rank0/weights'" in problem.what for problem in report.problems)
    saved = tracer.recover(url, f"{url.removesuffix('.zarr')}2.zarr")
    assert (saved.lost, saved.saved) == (1, len(EXPECTED) - 1)
    found = read(f"{url.removesuffix('.zarr')}2.zarr")
    assert found == [one for one in EXPECTED if not (one[2] == "split" and one[5][0] == 0)]


def test_a_copy_on_the_disk(url: str, bucket: Any, tmp_path: Path) -> None:
    """A trace with gaps is whole after it was downloaded, and a shard that is missing in it is told."""
    write(url, SHORT)
    folder = download(bucket, url, tmp_path / "copy.zarr")
    assert read(folder) == FEW
    assert verify(folder).complete
    (folder / "rank0/pools/loss/float32/c/1").unlink()
    report = verify(folder)
    assert [problem.array for problem in report.problems] == ["rank0/pools/loss/float32"]
    assert 0 < report.damaged < sum(one[1] == "loss" for one in FEW)
    change(bucket, url, "rank0/pools/loss/float32/c/1")
    assert verify(url).damaged == report.damaged


def test_the_command_line(url: str, tmp_path: Path) -> None:
    """Every reading command takes a URL."""
    write(url, SHORT)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, arguments)

    assert json.loads(run("info", url, "--json").stdout)["messages"] == len(FEW)
    assert "fc.%odd name" in run("ls", url).stdout
    assert run("cat", url, "--kind", "loss", "--steps", "4:6").exit_code == 0
    assert run("replay", url, "-s", "norm", "--out", str(tmp_path / "answers.csv")).exit_code == 0
    assert (tmp_path / "answers.csv").exists()
    assert run("verify", url).exit_code == 0
    assert run("convert", url, str(tmp_path / "copy.h5")).exit_code == 0
    assert run("recover", url, f"{url}2.zarr").exit_code == 0
    assert read(tmp_path / "copy.h5") == read(f"{url}2.zarr") == FEW
    refused = run("replay", url, "-s", "norm", "--out", f"{url}3.zarr")
    assert (refused.exit_code, "not to a URL" in refused.stderr) == (2, True)


def test_record_and_replay(url: str) -> None:
    """A training is recorded to a URL, and its replay gives what was heard live."""
    model, loss = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Linear(300, 2)), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live, again = tracer.Collect("weights", "loss"), tracer.Collect("weights", "loss")
    with tracer.record(
        url, model, optimizer, loss=loss, receivers=[live], commit_steps=2, capture=tracer.Capture()
    ) as run:
        assert str(run.path) == url
        for _ in range(5):
            optimizer.zero_grad()
            loss(model(torch.randn(5, 6)), torch.zeros(5, 2)).backward()
            optimizer.step()
    tracer.replay(url, again)
    assert [facts(message) for message in again.messages] == [facts(message) for message in live.messages]
    assert len(again.messages) == 15
    assert verify(url).complete


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


# -- HDF5 and HTTP ---------------------------------------------------------------------------------------------


def test_hdf5_is_read_only(url: str, bucket: Any, tmp_path: Path) -> None:
    """An HDF5 trace at a URL is read and verified, and one cannot be recorded there."""
    write(tmp_path / "run.h5")
    there = url.replace(".zarr", ".h5")
    bucket.upload_file(str(tmp_path / "run.h5"), BUCKET, there.removeprefix(f"s3://{BUCKET}/"))
    assert read(there) == EXPECTED
    report = verify(there)
    assert (report.complete, report.store) == (True, "hdf5")
    for refused in (lambda: TraceWriter(there.replace("run", "new")), lambda: check_target(there, overwrite=True)):
        with pytest.raises(TraceFormatError, match=r"HDF5 on an object store is read-only.*\.zarr.*trace convert"):
            refused()
    data = bytearray((tmp_path / "run.h5").read_bytes())
    bucket.put_object(Bucket=BUCKET, Key="cut.h5", Body=bytes(data[: len(data) // 2]))
    with pytest.raises(TraceCorruptError, match="cut off"):
        TraceReader(f"s3://{BUCKET}/cut.h5")
    assert verify(f"s3://{BUCKET}/cut.h5").damaged > 0
    bucket.put_object(Bucket=BUCKET, Key="other.h5", Body=b"no such file")
    with pytest.raises(TraceFormatError, match="not an HDF5 file"):
        TraceReader(f"s3://{BUCKET}/other.h5")


def test_an_interrupted_hdf5_file(bucket: Any, tmp_path: Path) -> None:
    """Of a file whose writer was killed, what was committed is read."""
    program = f"""
import os, signal, torch
from tracer import NetworkMessage, TraceWriter
writer = TraceWriter({str(tmp_path / "killed.h5")!r})
for step in range(9):
    loss = torch.full((50, 50), float(step))
    writer.write(NetworkMessage(kind="loss", global_step=step, train_step=step, epoch=0, data=loss))
    if step == 6:
        writer.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""
    processes.run([sys.executable, "-c", program], check=False)
    bucket.upload_file(str(tmp_path / "killed.h5"), BUCKET, "killed.h5")
    with TraceReader(f"s3://{BUCKET}/killed.h5") as reader:
        assert [message.data.mean().item() for message in reader if message.data is not None] == [*range(7)]
        assert reader.status == "interrupted"


def test_http_is_read_only(url: str, server: int, bucket: Any) -> None:
    """A trace on a web server is read; it cannot be written there."""
    write(url)
    for name in keys(bucket, url):
        key = f"{url.removeprefix(f's3://{BUCKET}/')}/{name}"
        bucket.put_object_acl(Bucket=BUCKET, Key=key, ACL="public-read")
    there = f"http://127.0.0.1:{server}/{BUCKET}/{url.removeprefix(f's3://{BUCKET}/')}"
    assert read(there) == EXPECTED
    with pytest.raises(TraceFormatError, match="http server"):
        TraceWriter(f"http://127.0.0.1:{server}/{BUCKET}/new.zarr")
    with pytest.raises(TraceNotFoundError, match="no trace"):
        TraceReader(f"http://127.0.0.1:{server}/{BUCKET}/none.zarr")


# -- while it is written, and after a kill -----------------------------------------------------------------------


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
        ObjectWriteStore(Objects(found), None)


# -- a server that is away ---------------------------------------------------------------------------------------


class Line:
    """A connection to the server that can be cut, and mended."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._listening: socket.socket | None = None
        self.port = 0
        self.tears = 0
        """How many of the next answers that are lists break off in the middle."""
        self.mend()

    def mend(self) -> None:
        """Take connections."""
        listening = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = listening.getsockname()[1]
        self._listening = listening
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def cut(self) -> None:
        """Take no connections, and break those that there are."""
        listening, self._listening = self._listening, None
        if listening is not None:
            # wakes the thread that waits in accept
            listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        with self._lock:
            for one in self._connections:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._connections.clear()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            with self._lock:
                self._connections += [near, far]
            threading.Thread(target=self._pass_on, args=(near, far), daemon=True).start()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as ready, near, far, contextlib.suppress(OSError):
            ready.register(near, selectors.EVENT_READ, far)
            ready.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in ready.select():
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    if not data:
                        return
                    if self.tears and b"ListBucketResult" in data:
                        self.tears -= 1
                        key.data.sendall(data[: len(data) // 2])
                        return
                    key.data.sendall(data)


@pytest.fixture
def line(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """All requests of the test go over it."""
    made = Line(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    yield made
    made.cut()


def test_gone_for_two_seconds(url: str, line: Line) -> None:
    """Nothing is lost when the server is away for a while in the midst of a recording."""
    recorder = Recorder(TraceWriter(url, commit_seconds=0.01, commit_rows=20))
    mending = threading.Timer(2.0, line.mend)
    for number, message in enumerate(messages()):
        recorder.receive(message)
        if number == 60:
            line.cut()
            mending.start()
    recorder.close()
    mending.join()
    assert read(url) == EXPECTED
    assert verify(url).complete


def test_lists_that_break_off(url: str, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of what is there is asked for again when the connection breaks in the middle of the answer."""
    line.tears = 1
    write(url)
    for use in (
        lambda: verify(url).complete,
        lambda: read(url) == EXPECTED,
        lambda: Objects(location(url)).any(),
    ):
        line.tears = 2
        assert use()
    line.tears = 1
    assert exists(location(url))
    assert line.tears == 0
    monkeypatch.setenv(RETRY_VARIABLE, "0")
    line.tears = 1
    with pytest.raises(TraceUnreachableError, match="cannot be listed"):
        verify(url)


def losses_at(url: str) -> int:
    """How many losses are committed."""
    with contextlib.suppress(TraceNotFoundError), TraceReader(url) as reader:
        return int(reader.select("loss").size)
    return 0


def test_gone_for_good(url: str, line: Line, server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the server stays away the training goes on, and is told so; what was committed is there."""
    monkeypatch.setenv(RETRY_VARIABLE, "1")
    model, loss = torch.nn.Linear(6, 2), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with tracer.record(
            url, model, optimizer, loss=loss, commit_steps=1, queue_bytes=20000, capture=tracer.Capture()
        ):
            for step in range(40):
                optimizer.zero_grad()
                value = loss(model(torch.ones(5, 6)), torch.zeros(5, 2))
                value.backward()
                optimizer.step()
                losses.append(value.item())
                if step == 20:
                    give_up = time.monotonic() + 60
                    while not losses_at(url):
                        assert time.monotonic() < give_up
                        time.sleep(0.02)
                    line.cut()
    assert len(losses) == 40
    assert any("can no longer be written" in str(one.message) and url in str(one.message) for one in told)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server}")
    with TraceReader(url) as reader:
        assert len(list(reader)) == len(reader)
        assert reader.status != "finished"
        heard = reader.array("loss")[1]
    assert len(heard)
    np.testing.assert_array_equal(heard, np.array(losses[: len(heard)], np.float32))


def test_unreachable_is_not_damaged(url: str, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer is told as that, and not as damage to the trace."""
    write(url)
    monkeypatch.setenv(RETRY_VARIABLE, "0.5")
    with TraceReader(url) as reader:
        line.cut()
        with pytest.raises(TraceUnreachableError, match="cannot be read"):
            list(reader)
    # the status of a range that is not there is no part of a name
    for act, there in ((verify, url), (TraceReader, f"s3://{BUCKET}/416/run.zarr"), (TraceWriter, url)):
        with pytest.raises(TraceUnreachableError) as raised:
            act(there)
        assert "\n" not in str(raised.value)


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
        why = "ValueError: of its own" if ending else "TraceError: the training did not come to its end"
        assert reader.status == f"failed: {why}"
        assert [float(one.data[-1]) for one in reader.messages(modules="b")] == [*range(24)]


# -- what cannot work ----------------------------------------------------------------------------------------------


def test_wrong_places(url: str, bucket: Any) -> None:
    """A bucket that is not there, an empty prefix and what is no trace are each told in a sentence."""
    with pytest.raises(TraceNotFoundError, match="no bucket 'nowhere'"):
        TraceReader("s3://nowhere/run.zarr")
    with pytest.raises(TraceError, match="no bucket 'nowhere'"):
        TraceWriter("s3://nowhere/run.zarr")
    for there in (url, url.replace(".zarr", ".h5")):
        with pytest.raises(TraceNotFoundError, match=r"there is no trace at s3://"):
            TraceReader(there)
    with pytest.raises(TraceFormatError, match="suffix"):
        TraceReader(url.removesuffix(".zarr"))
    change(bucket, url, "notes.txt", data=b"of somebody else")
    with pytest.raises(TraceFormatError, match="not a Zarr group"):
        TraceReader(url)
    for options in ({}, {"overwrite": True}):
        with pytest.raises(TraceExistsError, match="already exists"):
            TraceWriter(url, **options)
    assert keys(bucket, url) == ["notes.txt"]


def test_no_credentials(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without credentials one sentence says where they can come from; a profile of ~/.aws is one of the places."""
    write(url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for act in (TraceReader, TraceWriter):
        with pytest.raises(TraceUnreachableError, match=r"no credentials for s3://.*AWS_ACCESS_KEY_ID"):
            act(url)
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert len(read(url)) == len(EXPECTED)
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(TraceUnreachableError, match="other"):
        TraceReader(url)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "1e9"])
def test_wrong_retry_time(url: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for which requests are tried again is a number of seconds."""
    monkeypatch.setenv(RETRY_VARIABLE, value)
    with pytest.raises(TraceError, match=RETRY_VARIABLE):
        TraceReader(url)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("rank0/weights/split/c/0/0/0/0", 9000),
        ("rank0/pools/loss/float32/c/1", None),
        ("rank0/journal/c/0/0", chunks_begin(16) + 240),
        ("rank0/declarations/c/0", chunks_begin(16) + 840),
    ],
)
def test_damage(url: str, bucket: Any, name: str, place: int | None) -> None:
    """A flipped bit in the data or a table, and a missing object, are errors and never other numbers."""
    write(url, SHORT)
    change(bucket, url, name, place)
    with pytest.raises(TraceCorruptError, match=r"fails its checksum|is not there"):
        read(url)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("weights/split/c/0/0/0/0", 3),
        ("journal/c/0/0", PAGE + 3),
        ("declarations/c/0", 3),
        pytest.param("weights/split/c/0/0/0/0", PAGE + 3, marks=pytest.mark.slow),
        pytest.param("journal/c/0/0", 3, marks=pytest.mark.slow),
        pytest.param("declarations/c/0", PAGE + 3, marks=pytest.mark.slow),
    ],
)
def test_damaged_index(url: str, bucket: Any, name: str, place: int) -> None:
    """The second index of an object serves for the first, and what is wrong is told."""
    write(url, SHORT)
    change(bucket, url, f"rank0/{name}", place)
    assert read(url) == FEW
    report = verify(url)
    assert (report.damaged, report.messages, report.intact) == (0, len(FEW), False)
    assert [problem.check for problem in report.problems] == ["store"]


@pytest.mark.parametrize("data", [None, b"{", pytest.param(b"[]", marks=pytest.mark.slow)])
def test_a_damaged_root(url: str, bucket: Any, data: bytes | None) -> None:
    """What is there without the root is a damaged trace, of which all is saved."""
    write(url, SHORT)
    change(bucket, url, "zarr.json", data=data)
    with pytest.raises(TraceCorruptError, match="root"):
        TraceReader(url)
    assert not verify(url).intact
    assert tracer.recover(url, f"{url.removesuffix('.zarr')}-saved.zarr").lossless
    assert read(f"{url.removesuffix('.zarr')}-saved.zarr") == FEW


def test_hostile_documents(url: str, bucket: Any) -> None:
    """Sizes and codecs are checked as those of a trace on a disk are."""
    store = create_store(url)
    store.create("rank0/array", dtype="float32", shape=(1000,), chunk_bytes=4000, gapless=True)
    store.append("rank0/array", np.ones((3, 1000), np.float32))
    store.close()
    name = "rank0/array/zarr.json"
    key = f"{url.removeprefix(f's3://{BUCKET}/')}/{name}"
    document = json.loads(bucket.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def opened(**changes: Any) -> Any:
        change(bucket, url, name, data=json.dumps(document | changes).encode())
        return open_store(url)

    reader = opened(shape=[10**12, 1000])
    with pytest.raises(TraceCorruptError, match="is not there"):
        reader.read("rank0/array", 0, 10**12)
    with pytest.raises(TraceFormatError, match="codec 'pickle'"):
        opened(codecs=[{"name": "pickle"}]).length("rank0/array")
    with pytest.raises(TraceError, match="cannot be the name"):
        reader.read("../other/array", 0, 1)


def test_other_codecs(url: str) -> None:
    """An array that another tool compressed is read through zarr-python."""
    from obstore.store import S3Store
    from zarr.storage import ObjectStore

    create_store(url).close()
    key = url.removeprefix(f"s3://{BUCKET}/")
    store: Any = ObjectStore(S3Store(BUCKET, prefix=key, client_options={"allow_http": True}))
    values = np.arange(3000, dtype=np.int32).reshape(30, 100)
    zarr.create_array(
        store, name="rank0/zipped", data=values, chunks=(7, 100), compressors=zarr.codecs.GzipCodec(), zarr_format=3
    )
    reader = open_store(url)
    np.testing.assert_array_equal(reader.read("rank0/zipped", 3, 29), values[3:29])
    assert reader.names() == ["rank0/zipped"]
    assert reader.stored_rows("rank0/zipped") >= 30
    reader.close()


# -- with what else a trace can be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compression", ["zstd", *(pytest.param(one, marks=pytest.mark.slow) for one in ("auto", "lz4"))]
)
def test_compressed(url: str, bucket: Any, tmp_path: Path, compression: str) -> None:
    """Compressed shards are smaller, read as what they were, also by zarr-python, and told when damaged."""
    with TraceWriter(url, compression=compression) as writer:
        for step in range(22):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="input_labels", data=torch.arange(5000) % 10, **where))
            writer.write(ModuleMessage(kind="weights", module="fc", data=torch.full((100, 200), float(step)), **where))
            if step % 9 == 0:
                writer.commit()
    with TraceReader(url) as reader:
        assert reader.info["stored_bytes"] < reader.info["bytes"] * (0.75 if compression == "auto" else 0.1)
        for message in reader:
            assert message.data is not None
            expected = torch.arange(5000) % 10 if message.kind == "input_labels" else torch.tensor(message.global_step)
            assert (message.data == expected).all()
        assert sorted(reader._parts.stores[0].names()) == sorted(reader._parts.stores[0].names("rank0/"))
    assert verify(url).complete
    copy = download(bucket, url, tmp_path / "copy.zarr")
    assert verify(copy).complete
    name = "rank0/pools/input_labels/int64"
    plain = zarr.open_group(copy, mode="r")[name][:5000]
    assert (plain == np.arange(5000) % 10).all()
    change(bucket, url, f"{name}/c/0", place=chunks_begin(128) + 50)
    assert verify(url).damaged > 0
    change(bucket, url, f"{name}/zarr.json", data=b"{")
    assert tracer.recover(url, tmp_path / "saved.zarr").saved > 20


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
        ObjectWriteStore(Objects(location(url)), "rank0.attempt1")  # type: ignore[arg-type] # an Url
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
