"""Damaged and hostile traces on object stores: never other numbers, and what is right in them is saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracer
from tests.stores.object_traces import BUCKET, EXPECTED, FEW, SHORT, change, download, keys, read, write
from tracer.errors import TraceCorruptError, TraceError, TraceFormatError
from tracer.memory import PAGE
from tracer.stores.opening import create_store, open_store
from tracer.stores.zarr.layout import chunks_begin
from tracer.trace.reader import TraceReader
from tracer.upkeep.verify import verify

pytest.importorskip("obstore", reason="obstore reads and writes object stores: pip install 'tracereel[s3]'")

pytestmark = pytest.mark.usefixtures("environment")


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
    change(bucket, url, "rank0/weights/zarr.json", data=b"{")
    report = verify(url)
    assert {problem.array for problem in report.problems} >= {"rank0/weights/split", "rank0/pools/loss/float32"}
    assert any("'rank0/weights'" in problem.what for problem in report.problems)
    saved = tracer.recover(url, f"{url.removesuffix('.zarr')}2.zarr")
    left = [one for one in EXPECTED if "loss" not in one and not (one[2] == "split" and one[5][0] == 0)]
    assert (saved.lost, saved.saved) == (len(EXPECTED) - len(left), len(left))
    assert saved.lost == 31
    assert read(f"{url.removesuffix('.zarr')}2.zarr") == left


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
    with pytest.raises(TraceCorruptError, match="is larger than what is there of it"):
        reader.read("rank0/array", 0, 10**12)
    with pytest.raises(TraceFormatError, match="codec 'pickle'"):
        opened(codecs=[{"name": "pickle"}]).length("rank0/array")
    with pytest.raises(TraceError, match="cannot be the name"):
        reader.read("../other/array", 0, 1)
