"""Damaged and hostile traces on object stores: never other numbers, and what is right in them is saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tracer
from tests.stores.object_traces import EXPECTED, FEW, SHORT, change, download, keys, read, write
from tracer.errors import TraceCorruptError
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


def test_a_missing_root(url: str, bucket: Any) -> None:
    """What is there without the root is a damaged trace, of which all is saved."""
    write(url, SHORT)
    change(bucket, url, "zarr.json")
    with pytest.raises(TraceCorruptError, match="root"):
        TraceReader(url)
    assert not verify(url).intact
    assert tracer.recover(url, f"{url.removesuffix('.zarr')}-saved.zarr").lossless
    assert read(f"{url.removesuffix('.zarr')}-saved.zarr") == FEW
