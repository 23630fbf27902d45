"""Requests that an object store refuses: for a while, for good, or because of another writer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests.stores.object_traces import EXPECTED, facts, messages, read, write
from tests.stores.refusing import PRECONDITION_FAILED, Fault, Refusing
from tracer.errors import TraceExistsError, TraceUnreachableError
from tracer.stores.locations import location
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.verify import verify

pytest.importorskip("obstore", reason="obstore reads and writes object stores: pip install 'tracereel[s3]'")

from tracer.stores.objects import RETRY_VARIABLE, Objects

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusing]:
    """All requests of the test go through it."""
    made = Refusing(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    yield made
    made.close()


def write_with(url: str, proxy: Refusing, fault: Fault, at: int = 15) -> None:
    """A run with many commits, and a fault from a step on."""
    with TraceWriter(url, commit_rows=20) as writer:
        for message in messages():
            if message.kind == "batch_started" and message.global_step == at:
                fault.begun = time.monotonic()
                proxy.fault = fault
            writer.write(message)


@pytest.mark.parametrize(
    ("status", "code", "lasts"),
    [
        (409, "ConditionalRequestConflict", {"count": 3}),
        (400, "ExpiredToken", {"seconds": 0.5}),
        (403, "InvalidAccessKeyId", {"seconds": 0.5}),
        pytest.param(400, "RequestTimeout", {"count": 1}, marks=pytest.mark.slow),
        pytest.param(409, "OperationAborted", {"count": 1}, marks=pytest.mark.slow),
        pytest.param(400, "IncompleteBody", {"count": 1}, marks=pytest.mark.slow),
        pytest.param(403, "RequestTimeTooSkewed", {"seconds": 1.5}, marks=pytest.mark.slow),
    ],
)
def test_what_passes_ends_no_recording(
    url: str, proxy: Refusing, status: int, code: str, lasts: dict[str, Any]
) -> None:
    """All messages of the run are there, whichever request was refused; and so when it is read."""
    fault = Fault(status, code, **lasts)
    write_with(url, proxy, fault)
    assert fault.seen
    proxy.fault = None
    assert read(url) == EXPECTED
    assert verify(url).complete
    with TraceReader(url) as reader:
        fault = proxy.fault = Fault(status, code, **lasts)
        assert [facts(message) for message in reader] == EXPECTED
    assert fault.seen


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE|POST"])
def test_requests_of_every_sort_are_tried_again(url: str, proxy: Refusing, method: str) -> None:
    """One refusal of each: a look at what is there, a list, a removal, and the first object of a new trace."""
    write(url)
    proxy.fault = fault = Fault(409, "OperationAborted", method, count=1)
    write(url, overwrite=True)
    assert fault.seen == (method != "HEAD")
    proxy.fault = None
    assert read(url) == EXPECTED


def test_credentials_are_asked_for_again(
    url: str, proxy: Refusing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """When a key is replaced in ~/.aws and the old one ends, the recording goes on with the new one."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = secret\n"
    file.write_text(text.format("old"))
    with TraceWriter(url, commit_rows=20) as writer:
        for message in messages():
            if message.kind == "batch_started" and message.global_step == 15:
                proxy.fault = Fault(400, "ExpiredToken", key="old")
                file.write_text(text.format("new"))
            writer.write(message)
    used = [key for *_, key in proxy.requests]
    assert used[0] == "old"
    assert used[-1] == "new"
    assert read(url) == EXPECTED


def test_a_token_that_had_expired_before_is_told_at_once(url: str, proxy: Refusing) -> None:
    """Nobody waits a minute for credentials that never worked: they are asked for once more, and then told."""
    proxy.fault = Fault(400, "ExpiredToken")
    with pytest.raises(TraceUnreachableError, match="ExpiredToken"):
        TraceReader(url)
    assert len(proxy.requests) == 2


@pytest.mark.parametrize(
    ("code", "where"),
    [
        *(("AccessDenied", where) for where in ("data", "journal", "zarr.json")),
        *(pytest.param("AccessDenied", where, marks=pytest.mark.slow) for where in ("declarations", ".")),
        pytest.param("ExpiredToken", ".", marks=pytest.mark.slow),
    ],
)
def test_what_does_not_pass_is_the_reason_in_the_trace(
    url: str, proxy: Refusing, code: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training ends as it would; what was committed reads, and why no more was written, if it could be told."""
    monkeypatch.setenv(RETRY_VARIABLE, "3")
    model, loss = torch.nn.Linear(6, 2), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with tracer.record(url, model, optimizer, loss=loss, commit_steps=1, capture=tracer.Capture()) as run:
            for step in range(12):
                optimizer.zero_grad()
                value = loss(model(torch.ones(5, 6)), torch.zeros(5, 2))
                value.backward()
                optimizer.step()
                losses.append(value.item())
                run.recorder.wait_until_written()
                if step == 5:
                    proxy.fault = Fault(
                        403 if code == "AccessDenied" else 400, code, "PUT", where.replace("data", "/c/")
                    )
            give_up = time.monotonic() + 60
            while not any("can no longer be written" in str(one.message) for one in told):
                assert time.monotonic() < give_up
                run.log("waits", 1.0)
                time.sleep(0.01)
            proxy.fault = None  # the store lets this program write again, after the recording has ended
    assert len(losses) == 12
    with TraceReader(url) as reader:
        assert reader.status.startswith("failed: ")
        assert code in reader.status
        kept = [float(one.data) for one in reader.messages(kinds="loss") if one.data is not None]
        assert len(list(reader)) == len(reader)
    assert 5 <= len(kept) < 12
    assert kept == [pytest.approx(one) for one in losses[: len(kept)]]
    assert verify(url).complete


# -- another writer ----------------------------------------------------------------------------------------------------


def test_another_writer_is_told_apart_from_an_own_earlier_try(url: str, proxy: Refusing, bucket: Any) -> None:
    """The refusal "it exists" may be about the object that this request has put, another's, or none any more."""
    objects = Objects(location(url))
    proxy.fault = Fault(0, "", "PUT", stored=True, count=1)
    objects.put_new("mine", b"mine")
    assert proxy.fault.seen == 1
    proxy.fault = Fault(PRECONDITION_FAILED, "PreconditionFailed", "PUT", count=1)
    objects.put_new("nobody's", b"mine")
    assert proxy.fault.seen == 1
    proxy.fault = None
    for name, data in (("mine", b"another's"), ("nobody's", b"another's")):
        with pytest.raises(TraceExistsError, match="another writer"):
            objects.put_new(name, data)
        part = objects.get(name)
        assert part is not None
        assert bytes(part.data) == b"mine"
    objects.close()
