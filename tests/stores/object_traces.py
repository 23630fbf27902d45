"""Traces on an S3 server: written, read, changed and downloaded for the tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tracer.format.encodings import encode
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

boto3 = pytest.importorskip("boto3", reason="boto3 prepares the buckets, and knows the credentials of ~/.aws")

# each test starts with a URL of its own, so nothing of one test is seen by another
BUCKET = "bucket"


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
