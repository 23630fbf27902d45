"""Traces on object stores, against a real S3 server on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner

import tracer
from tests.stores.object_traces import BUCKET, EXPECTED, FEW, SHORT, change, download, facts, keys, read, write
from tracer.errors import TraceExistsError, TraceFormatError, TraceNotFoundError
from tracer.format.journal import Column
from tracer.messaging.messages import ModuleMessage, NetworkMessage
from tracer.stores.locations import Url, location
from tracer.stores.opening import create_store, open_store
from tracer.stores.zarr.layout import chunks_begin
from tracer.trace.claiming import check_target
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.verify import verify
from tracereel.main import main

obstore = pytest.importorskip("obstore", reason="obstore reads and writes object stores: pip install 'tracereel[s3]'")

pytestmark = pytest.mark.usefixtures("environment")

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


# -- HDF5 and HTTP ---------------------------------------------------------------------------------------------


def test_hdf5_is_on_disks_only(url: str, bucket: Any, tmp_path: Path) -> None:
    """An HDF5 trace at a URL is refused, with what to do instead, whatever is done with it."""
    write(tmp_path / "run.h5")
    there = url.replace(".zarr", ".h5")
    bucket.upload_file(str(tmp_path / "run.h5"), BUCKET, there.removeprefix(f"s3://{BUCKET}/"))
    uses = (TraceReader, TraceWriter, verify, tracer.recover, lambda path: check_target(path, overwrite=True))
    for use in uses:
        with pytest.raises(TraceFormatError, match=r"run.h5: an HDF5 trace can only be on a disk.*trace convert.*zarr"):
            use(there) if use is not tracer.recover else use(there, tmp_path / "copy.zarr")


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
