"""Batches of traces on an object store, into a folder on one."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import analyze
from analyze.batching.batch import batch
from analyze.batching.folder import folder_at
from analyze.traces import find_traces
from tests.stores.served import served
from tracer import ModuleMessage, TraceReader, TraceWriter
from tracer.errors import CaptureError

boto3 = pytest.importorskip("boto3", reason="the client of the tests is not installed: pip install boto3")
pytest.importorskip("obstore", reason="the extra s3 is not installed: pip install 'tracereel[s3]'")
pq = pytest.importorskip("pyarrow.parquet", reason="the extra tables is not installed: pip install 'tracereel[tables]'")

BUCKET = "bucket"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of an S3 server."""
    yield from served()


@pytest.fixture
def bucket(server: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client that does not share code with what is tested; the environment says where the server is."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    return client


def keys(bucket: Any, prefix: str) -> list[str]:
    """The names of all objects below a prefix."""
    pages = bucket.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return [one["Key"] for page in pages for one in page.get("Contents", ())]


def write(path: str | Path, seed: int = 0, steps: int = 4) -> None:
    """A small trace."""
    generator = torch.Generator().manual_seed(seed)
    with TraceWriter(path, overwrite=True) as writer:
        for step in range(steps):
            at = {"global_step": step, "train_step": step, "epoch": 0, "module": "fc"}
            writer.write(ModuleMessage(kind="weights", data=torch.randn(5, 4, generator=generator), **at))


def test_a_damaged_part_on_an_object_store_is_computed_again(bucket: Any, trouble: str) -> None:
    """An object that is not what was put is replaced, although nothing there is replaced unasked."""
    write(f"s3://{BUCKET}/spoiled/run.zarr")
    specs, out = ["norm", f"{trouble}:Large"], f"s3://{BUCKET}/spoiled-results"
    expected = list(batch(f"s3://{BUCKET}/spoiled/run.zarr", specs, out, workers=0))
    parts = keys(bucket, "spoiled-results/parts/")
    assert len(parts) == 2
    data = bytearray(bucket.get_object(Bucket=BUCKET, Key=parts[0])["Body"].read())
    data[len(data) // 2] ^= 1
    bucket.put_object(Bucket=BUCKET, Key=parts[0], Body=bytes(data))
    again = batch(f"s3://{BUCKET}/spoiled/run.zarr", specs, out, workers=0)
    assert (again.computed, again.cached, again.failures) == (1, 1, [])
    assert list(again) == expected
    for key in keys(bucket, "spoiled-results/arrays/"):
        bucket.delete_object(Bucket=BUCKET, Key=key)
    again = batch(f"s3://{BUCKET}/spoiled/run.zarr", specs, out, workers=0)
    assert (again.computed, again.cached) == (1, 1)
    assert list(again) == expected


def test_traces_and_results_on_an_object_store(bucket: Any, trouble: str, tmp_path: Path) -> None:
    """Found below a URL, computed by another process, put under names that say what they are, never twice."""
    for seed in range(2):
        write(f"s3://{BUCKET}/runs/deep/run{seed}.zarr", seed)
    runs, out = f"s3://{BUCKET}/runs", f"s3://{BUCKET}/results"
    assert find_traces(runs) == [f"s3://{BUCKET}/runs/deep/run{seed}.zarr" for seed in range(2)]
    assert find_traces(f"s3://{BUCKET}/runs/deep/*1.zarr") == [f"s3://{BUCKET}/runs/deep/run1.zarr"]
    with pytest.raises(CaptureError, match="no trace at"):
        find_traces(f"s3://{BUCKET}/absent")
    specs = ["norm", f"{trouble}:Large"]
    results = batch(runs, specs, out, workers=1, table=tmp_path / "table.parquet")
    assert (results.computed, results.cached, results.failures) == (4, 0, [])
    rows = [row for row in results if row.subscriber == "norm"]
    expected = [row for trace in find_traces(runs) for row in analyze.analyze(trace, "norm")]
    assert [tuple(row) for row in rows] == [tuple(row) for row in expected]
    parts = [key for key in keys(bucket, "results/parts/") if key.endswith(".parquet")]
    assert len(parts) == 4
    # read by others: boto3 and pyarrow
    tables = [pq.read_table(io.BytesIO(bucket.get_object(Bucket=BUCKET, Key=key)["Body"].read())) for key in parts]
    assert sum(table.num_rows for table in tables) == pq.read_table(tmp_path / "table.parquet").num_rows
    assert len(results) == sum(1 for _ in results) > sum(table.num_rows for table in tables)
    row = next(row for row in results.to_arrow().to_pylist() if row["array"])
    place, _, number = row["array"].partition("#")
    with TraceReader(f"{out}/{place}") as trace:
        message = list(trace)[int(number)]
    assert message.data is not None
    assert torch.equal(message.data, torch.full((70, 70), float(row["global_step"])))
    assert (
        json.loads(bucket.get_object(Bucket=BUCKET, Key="results/manifest.json")["Body"].read())["state"] == "finished"
    )
    again = batch(runs, specs, out, workers=0)
    assert (again.computed, again.cached, again.failures) == (0, 4, [])
    write(f"s3://{BUCKET}/runs/deep/run0.zarr", seed=7)
    changed = batch(runs, specs, out, workers=0)
    assert (changed.computed, changed.cached, changed.failures) == (2, 2, [])
    assert len([key for key in keys(bucket, "results/parts/") if key.endswith(".parquet")]) == 4
    assert len({key.split("/")[2] for key in keys(bucket, "results/arrays/")}) == 2
    assert not np.array_equal([row.value for row in changed if row.subscriber == "norm"], [row.value for row in rows])


def test_shares_on_an_object_store(bucket: Any) -> None:
    """Shares put their parts and failures; the whole finds them and clears up after them."""
    for seed in range(3):
        write(f"s3://{BUCKET}/shared/run{seed}.zarr", seed)
    runs, out = f"s3://{BUCKET}/shared", f"s3://{BUCKET}/shares"
    shares = [batch(runs, "norm", out, workers=0, part=(number, 2)) for number in range(2)]
    assert sorted(share.computed for share in shares) == [1, 2]
    assert "shares/failures-1-of-2.jsonl" in keys(bucket, "shares/")
    whole = batch(runs, "norm", out, workers=0)
    assert (whole.computed, whole.cached, whole.failures) == (0, 3, [])
    left = sorted(key for key in keys(bucket, "shares/") if "/parts/" not in key)
    assert left == ["shares/failures.jsonl", "shares/manifest.json", "shares/progress.json"]


def test_two_workers_may_compute_the_same(bucket: Any) -> None:
    """What is there is not put again, unless it is to be replaced."""
    with folder_at(f"s3://{BUCKET}/folder") as folder:
        folder.write("parts/a.parquet", b"first", replace=False)
        folder.write("parts/a.parquet", b"second", replace=False)
        assert folder.read("parts/a.parquet") == b"first"
        folder.write("parts/a.parquet", b"third")
        assert bucket.get_object(Bucket=BUCKET, Key="folder/parts/a.parquet")["Body"].read() == b"third"
        assert folder.names("parts") == {"a.parquet"}
        folder.remove(["parts/a.parquet"])
        assert folder.names("parts") == set()
        assert folder.read("parts/a.parquet") is None
