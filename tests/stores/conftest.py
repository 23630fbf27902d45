"""An S3 server with credentials and places on it, for the tests of object stores; they alone are skipped without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of an S3 server, with a bucket."""
    from tests.stores.object_traces import BUCKET, client
    from tests.stores.served import served

    for port in served():
        client(port).create_bucket(Bucket=BUCKET)
        yield port


@pytest.fixture
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
    from tests.stores.object_traces import BUCKET

    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}/run.zarr"


@pytest.fixture
def bucket(server: int) -> Any:
    """The client of the server."""
    from tests.stores.object_traces import client

    return client(server)
