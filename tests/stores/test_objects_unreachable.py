"""Object stores that are away, that are not there, or that let nobody in."""

from __future__ import annotations

import contextlib
import selectors
import socket
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

import tracer
from tests import processes
from tests.stores.object_traces import BUCKET, EXPECTED, change, keys, messages, read, write
from tracer.errors import TraceError, TraceExistsError, TraceFormatError, TraceNotFoundError, TraceUnreachableError
from tracer.recording.recorder import Recorder
from tracer.stores.locations import location
from tracer.stores.opening import exists
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.verify import verify

pytest.importorskip("obstore", reason="obstore reads and writes object stores: pip install 'tracereel[s3]'")

from tracer.stores.objects import RETRY_VARIABLE, Objects

pytestmark = pytest.mark.usefixtures("environment")


def test_without_obstore(url: str) -> None:
    """Where obstore is missing, one sentence says what to install."""
    program = (
        "import sys\nsys.modules['obstore'] = None\nimport tracer\n"
        f"try:\n    tracer.open({url!r})\nexcept tracer.TraceError as error:\n    print(error)\n"
    )
    told = processes.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "needs the package obstore" in told
    assert "pip install 'tracereel[s3]'" in told


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


# -- what cannot work ----------------------------------------------------------------------------------------------


def test_wrong_places(url: str, bucket: Any) -> None:
    """A bucket that is not there, an empty prefix and what is no trace are each told in a sentence."""
    with pytest.raises(TraceNotFoundError, match="no bucket 'nowhere'"):
        TraceReader("s3://nowhere/run.zarr")
    with pytest.raises(TraceError, match="no bucket 'nowhere'"):
        TraceWriter("s3://nowhere/run.zarr")
    with pytest.raises(TraceNotFoundError, match=r"there is no trace at s3://"):
        TraceReader(url)
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
