"""Large messages that are mapped instead of read: the same values, whoever changes, keeps, cuts or damages what."""

from __future__ import annotations

import errno
import functools
import gc
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from analyze import Norm
from tracer import ModuleMessage, TraceCorruptError, TraceReader, TraceWriter
from tracer.memory import PAGE
from tracer.messaging.messages import Message
from tracer.stores.disk import mapped
from tracer.stores.disk.mapped import HUGE, WINDOW, MappedFiles
from tracer.stores.protocols import Place
from tracer.trace.data import TOGETHER

ELEMENTS = 1 << 18
STEPS = 12
LAYERS = ("a", "b")


@functools.cache
def value(layer: str, step: int) -> torch.Tensor:
    """What was recorded of a layer at a step: other bits everywhere."""
    return torch.arange(ELEMENTS, dtype=torch.float32) + 1e6 * step + 7e5 * LAYERS.index(layer)


@pytest.fixture(scope="module", params=[".zarr", ".h5"])
def written(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A trace of messages of a megabyte."""
    path: Path = tmp_path_factory.mktemp("written") / f"run{request.param}"
    with TraceWriter(path) as writer:
        for step in range(STEPS):
            for layer in LAYERS:
                where = {"global_step": step, "train_step": step, "epoch": 0}
                writer.write(ModuleMessage(kind="activations", module=layer, data=value(layer, step), **where))
    return path


@pytest.fixture
def page_cache(tmp_path: Path) -> None:
    """The test is skipped where the system does not say what its page cache holds."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(PAGE))
    with probe.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(4)], 0, os.RWF_NOWAIT)
        except (AttributeError, OSError):
            pytest.skip("this system does not say what its page cache holds")


@pytest.fixture
def trace(tmp_path: Path, written: Path, page_cache: None) -> Path:
    """A copy of that trace, which the page cache holds."""
    path = tmp_path / written.name
    if written.is_dir():
        shutil.copytree(written, path)
    else:
        shutil.copyfile(written, path)
    for stored in (path, *path.rglob("*")):
        if stored.is_file():
            stored.read_bytes()
    return path


@pytest.fixture(autouse=True)
def _nothing_stays_mapped() -> Iterator[None]:
    """When nobody refers to a message any more, nothing is mapped, and no file is open for it."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert [ref for ref in mapped._mapped if ref() is not None] == []
    assert len(os.listdir("/proc/self/fd")) <= before


def is_right(message: Message) -> bool:
    """Whether a message is what was recorded."""
    assert isinstance(message, ModuleMessage)
    assert message.data is not None
    return torch.equal(message.data, value(message.module, message.global_step))


def is_mapped(message: Message) -> bool:
    """Whether a message's data lies in a mapping of the trace, as the system tells."""
    assert message.data is not None
    where = message.data.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= where < end:
            return "run." in line
    return False


def test_large_messages_are_mapped_and_right(trace: Path) -> None:
    """All that the page cache holds comes without a copy; only the last row of a shard, which may move, is read."""
    with TraceReader(trace) as reader:
        found = [(is_right(message), is_mapped(message)) for message in reader.messages(mapped=True)]
    assert all(right for right, _ in found)
    assert sum(without_a_copy for _, without_a_copy in found) >= len(found) - len(LAYERS)


def test_nothing_is_mapped_unless_asked_for(trace: Path) -> None:
    """What a reader gives may be kept, whatever becomes of the file."""
    with TraceReader(trace) as reader:
        kept = list(reader.messages())
    assert not any(map(is_mapped, kept))
    for file in (trace, *trace.rglob("*")):
        if file.is_file():
            os.truncate(file, 0)
    assert all(map(is_right, kept))


@pytest.mark.parametrize(
    ("others", "scope", "expected"),
    [
        ((), "message", True), ((), "stream", True), ((), "everything", False),
        ((tracer.Collect("activations"),), "message", True), ((Norm("activations"),), "stream", True),
        ((Norm("activations"),), "everything", False),
    ],
)  # fmt: skip
def test_a_replay_maps_what_nobody_keeps(trace: Path, others: tuple[Any, ...], scope: str, expected: bool) -> None:
    """If each receiver says that it does not keep everything; one that says nothing may."""
    heard = []

    class Listener(tracer.Receiver):
        def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
            return kind == "activations"

        def receive(self, message: Message) -> tuple[Message, ...]:
            heard.append((is_right(message), is_mapped(message)))
            return ()

    silent, listener = Listener(), Listener()
    listener.scope = scope
    tracer.replay(trace, listener, *others)
    assert all(right for right, _ in heard)
    assert any(lies for _, lies in heard) == (expected and not any(isinstance(one, tracer.Collect) for one in others))
    heard.clear()
    tracer.replay(trace, silent)
    assert heard == [(True, False)] * STEPS * len(LAYERS)
    for one in others:
        if isinstance(one, tracer.Collect):
            one.messages.clear()


def test_nothing_is_mapped_where_the_system_does_not_say_what_it_holds(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another system, or a file system of a network: messages are read."""
    monkeypatch.setattr(mapped, "_NOWAIT", None)
    with TraceReader(trace) as reader:
        found = [(is_right(message), is_mapped(message)) for message in reader.messages(mapped=True)]
    assert found == [(True, False)] * STEPS * len(LAYERS)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_what_is_not_in_memory_is_read(trace: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """A mapping would wait for the disk without a way to fail."""
    preadv = os.preadv

    def refusing(file: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(error, os.strerror(error))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    with TraceReader(trace) as reader:
        found = [(is_right(message), is_mapped(message)) for message in reader.messages(mapped=True)]
    assert found == [(True, False)] * STEPS * len(LAYERS)


def refusing(address: int, nbytes: int, advice: int) -> int:
    """A system that is older than the advice."""
    return -1


@pytest.mark.parametrize("madvise", ["the system's", None, refusing])
@pytest.mark.parametrize("steps", [slice(None), slice(1, None, 3)])
def test_what_the_disk_holds(trace: Path, monkeypatch: pytest.MonkeyPatch, madvise: Any, steps: slice) -> None:
    """What is not in memory comes from the disk, whatever the system does when it is asked for large pages."""
    if madvise != "the system's":
        monkeypatch.setattr(mapped, "_madvise", madvise)
    for file in (trace, *trace.rglob("*")):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(2):  # from the disk, and from where the first reading has left it
        with TraceReader(trace) as reader:
            chosen = (steps.start, None, steps.step)
            found = [(is_right(one), one.global_step) for one in reader.messages(steps=chosen, mapped=True)]
        assert found == [(True, step) for step in range(STEPS)[steps] for _ in LAYERS]


@pytest.mark.parametrize("verify", [True, False])
def test_what_is_changed_is_ones_own(trace: Path, verify: bool) -> None:
    """Neither the file nor another reading, nor another message, has what somebody wrote into a message's memory."""
    before = [file.read_bytes() for file in (trace, *sorted(trace.rglob("*"))) if file.is_file()]
    with TraceReader(trace, verify=verify) as reader:
        kept = []
        for message in reader.messages(mapped=True):
            assert is_right(message)
            assert message.data is not None
            message.data.fill_(-1)
            kept.append(message)
        assert all(is_right(message) for message in reader.messages(mapped=True))
        assert all(bool((message.data == -1).all()) for message in kept)
    assert [file.read_bytes() for file in (trace, *sorted(trace.rglob("*"))) if file.is_file()] == before
    del kept, message


def test_kept_messages_stay_and_keep_no_more_mapped_than_is_allowed(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept beyond the bound is memory of one's own; all of it is right after the reader is closed."""
    monkeypatch.setattr(mapped, "WINDOW", HUGE)
    monkeypatch.setattr(mapped, "MOST", 4 * HUGE)
    with TraceReader(trace) as reader:
        kept = list(reader.messages(mapped=True))
    assert all(map(is_right, kept))
    assert 0 < sum(len(one) for ref in mapped._mapped if (one := ref()) is not None) <= 4 * HUGE
    assert 0 < sum(map(is_mapped, kept)) < len(kept)
    trace.rename(trace.with_name("elsewhere"))
    assert all(map(is_right, kept))
    kept.clear()


def test_a_trace_that_is_cut_while_it_is_read(trace: Path) -> None:
    """What is not there any more is an error, though it had been mapped; the process goes on."""
    largest = max((file for file in (trace, *trace.rglob("*")) if file.is_file()), key=lambda file: file.stat().st_size)
    with TraceReader(trace) as reader:
        messages = reader.messages(mapped=True)
        for _ in range(TOGETHER):  # which were mapped together, and must not be looked at when they are cut off
            assert is_right(next(messages))
        os.truncate(largest, 3 * ELEMENTS * 4)
        with pytest.raises(TraceCorruptError, match=r"run\.(zarr|h5)"):
            for message in messages:
                assert is_right(message)
                del message
        del messages


def test_damage_in_what_is_mapped(trace: Path) -> None:
    """A flipped byte is found as where it is read, and named; what comes before is right."""
    wanted = value("b", 5)[1000:1010].numpy().tobytes()
    for file in (trace, *trace.rglob("*")):
        place = file.read_bytes().find(wanted) if file.is_file() else -1
        if place >= 0:
            with file.open("r+b") as opened:
                opened.seek(place)
                opened.write(bytes([wanted[0] ^ 1]))
    seen = []
    with TraceReader(trace) as reader, pytest.raises(TraceCorruptError, match=r"activations|checksum"):
        for message in reader.messages(mapped=True):
            assert is_right(message)
            seen.append((message.module, message.global_step))
    assert 4 * len(LAYERS) - 4 <= len(seen) <= 5 * len(LAYERS) + 1
    del message


class TestWindows:
    """`MappedFiles` by itself, on a file of numbered pages."""

    @pytest.fixture
    def file(self, tmp_path: Path, page_cache: None) -> Iterator[int]:
        path = tmp_path / "numbered"
        path.write_bytes(b"".join(number.to_bytes(4, "little") * (PAGE // 4) for number in range(3 * WINDOW // PAGE)))
        file = os.open(path, os.O_RDONLY)
        yield file
        os.close(file)

    @pytest.mark.parametrize("checksummed", [True, False])
    def test_bytes_and_checksum(self, file: int, checksummed: bool) -> None:
        """Of any place that begins at a page, also across windows."""
        files = MappedFiles()
        for page in range(0, 3 * WINDOW // PAGE - 100, 97):
            found = files.take(Place(file, page * PAGE, checksummed, None, (0, 1)), 90 * PAGE)
            assert found is not None
            data, checksum = found
            assert data.tobytes() == b"".join(one.to_bytes(4, "little") * (PAGE // 4) for one in range(page, page + 90))
            assert checksum == (page + 90 if checksummed else 0)

    def test_refused(self, file: int) -> None:
        """What lies across a page, was given out, or reaches beyond the end of the file."""
        files = MappedFiles()
        assert files.take(Place(file, 8, False, None, (0, 1)), 90 * PAGE) is None
        assert files.take(Place(file, PAGE, False, None, (0, 1)), 90 * PAGE) is not None
        assert files.take(Place(file, PAGE, False, None, (0, 1)), 90 * PAGE) is None
        assert files.take(Place(file, 90 * PAGE, False, None, (0, 1)), PAGE) is None
        assert files.take(Place(file, 91 * PAGE, False, None, (0, 1)), PAGE) is not None
        assert files.take(Place(file, 3 * WINDOW - 90 * PAGE, False, None, (0, 1)), 91 * PAGE) is None
        assert files.take(Place(file, 3 * WINDOW - 90 * PAGE, True, None, (0, 1)), 90 * PAGE) is None
        assert files.take(Place(file, 3 * WINDOW - 90 * PAGE, False, None, (0, 1)), 90 * PAGE) is not None
        assert files.take(Place(file, 1 << 62, False, None, (0, 1)), 90 * PAGE) is None

    def test_many_files_take_turns_only_where_one_is_done(self, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A window that others still use is not taken from them; one that nobody uses any more is."""
        monkeypatch.setattr(mapped, "MOST", 2 * WINDOW)
        monkeypatch.setattr(mapped, "_OTHERS", 20)
        monkeypatch.setattr(mapped, "_PAUSE", 2)
        files, owners = MappedFiles(), [(0, 1), (0, 2), (0, 3)]
        for owner in owners[:2]:
            assert files.take(Place(file, 0, False, None, owner), PAGE) is not None
        for page in range(1, 11):
            assert files.take(Place(file, 0, False, None, owners[2]), PAGE) is None
            assert files.take(Place(file, page * PAGE, False, None, owners[1]), PAGE) is not None
        assert files.take(Place(file, 11 * PAGE, False, None, owners[1]), PAGE) is not None
        assert files.take(Place(file, 0, False, None, owners[2]), PAGE) is not None

    def test_a_file_that_cannot_be_mapped(self, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """No memory for it, or no right to: what comes later is read."""

        def refused(*arguments: object, **options: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        files = MappedFiles()
        with monkeypatch.context() as patch:
            patch.setattr("mmap.mmap", refused)
            assert files.take(Place(file, 0, False, None, (0, 1)), PAGE) is None
        assert files.take(Place(file, 0, False, None, (0, 1)), PAGE) is None

    def test_readings_in_threads(self, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is mapped is counted together, and never more than allowed."""
        monkeypatch.setattr(mapped, "WINDOWS", 3)
        failed: list[BaseException] = []

        def read(number: int) -> None:
            try:
                for _ in range(30):
                    files = MappedFiles()
                    for page in range(0, 3 * WINDOW // PAGE - 64, 64):
                        found = files.take(Place(file, page * PAGE, False, None, (0, number)), 64 * PAGE)
                        assert found is None or int.from_bytes(found[0][:4].tobytes(), "little") == page
                        assert sum(ref() is not None for ref in list(mapped._mapped)) <= 3
            except BaseException as error:  # noqa: BLE001 - what a thread raises nobody hears
                failed.append(error)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        finally:
            sys.setswitchinterval(interval)
        assert failed == []


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_many_streams_take_few_files(tmp_path: Path, suffix: str) -> None:
    """A window for each of hundreds of files would take them all; what is beyond the bound is read."""
    path, streams = tmp_path / f"run{suffix}", 150
    with TraceWriter(path) as writer:
        for step in range(2):
            for number in range(streams):
                where = {"global_step": step, "train_step": step, "epoch": 0}
                data = torch.full((1 << 16,), float(number + 1000 * step))
                writer.write(ModuleMessage(kind="activations", module=f"m{number}", data=data, **where))
    before = len(os.listdir("/proc/self/fd"))
    with TraceReader(path) as reader:
        for place, message in enumerate(reader.messages(mapped=True)):
            assert message.data is not None
            assert set(message.data.tolist()) == {float(place % streams + 1000 * (place // streams))}
            assert len(os.listdir("/proc/self/fd")) - before <= 64 + mapped.WINDOWS + 10
            del message
