"""What is HDF5's own: attributes, parts that no trace has, several readers, forks."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tests import processes
from tests.stores.stored import numbers, written_unhurried
from tracer.errors import TraceCorruptError, TraceError, TraceFormatError, TraceUnreadableError
from tracer.messaging.messages import ModuleMessage
from tracer.stores.disk import files as disk_files
from tracer.stores.hdf5 import reading as hdf5_reading
from tracer.stores.hdf5 import writing as hdf5_writing
from tracer.stores.hdf5.layouts import layout_of
from tracer.stores.opening import create_store, open_store
from tracer.trace.writer import TraceWriter


def five_numbers(path: Path) -> Any:
    """A store that is being written, with an array ``a`` of 0 to 4 that was committed."""
    store = create_store(path)
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    store.seal()
    store.append("a", np.arange(5, dtype=np.int8))
    store.commit()
    return store


def test_hdf5_is_sealed(tmp_path: Path) -> None:
    """A sealed HDF5 file takes rows, and neither arrays nor attributes."""
    store = create_store(tmp_path / "store.h5")
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    assert store.seals
    assert store.can_create
    store.seal()
    assert not store.can_create
    store.append("a", np.zeros(1, np.int8))
    for attempt in (
        lambda: store.create("b", dtype="int8", shape=(), chunk_bytes=8),
        lambda: store.set_attrs("", {"x": 1}),
    ):
        with pytest.raises(TraceError, match="sealed"):
            attempt()
    store.close()


@pytest.mark.parametrize("what", ["reference", "text of variable length", "list", "bytes"])
def test_hdf5_attributes_of_other_types(tmp_path: Path, what: str) -> None:
    """An attribute that no JSON value is stored as is refused, not interpreted; what would be in a heap is not read."""
    path = tmp_path / "store.h5"
    with h5py.File(path, "w") as file:
        value = {"reference": file.ref, "list": [1, 2], "bytes": np.void(b"x")}.get(what, "text")
        file.attrs["odd"] = value
    store = open_store(path)
    with pytest.raises(TraceFormatError, match=r"'odd' of 'the root' is not one of a trace"):
        store.attrs()
    store.close()


@pytest.mark.parametrize("text", ["{", "[" * 30_000])
def test_an_error_in_an_attribute_stops_no_other_thread(tmp_path: Path, text: str) -> None:
    """Other threads use HDF5 while a program keeps the error, as an interactive session keeps its last one."""
    path = tmp_path / "store.h5"
    with h5py.File(path, "w") as file:
        file.attrs.create("odd", b"json:" + text.encode(), dtype=h5py.string_dtype("utf-8", len(text) + 5))
    store = open_store(path)
    with pytest.raises(TraceCorruptError, match="the attributes of 'the root' cannot be read") as kept:
        store.attrs()
    other = threading.Thread(target=lambda: five_numbers(tmp_path / "other.h5").close(), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
    assert kept.value.__traceback__ is not None
    store.close()


def test_hdf5_attributes_need_no_heap(tmp_path: Path) -> None:
    """Texts are of fixed length: a trace has no global heap, of which a damaged one would make HDF5 hang."""
    path = tmp_path / "run.h5"
    values = {
        "text": "gr\u00fc\u00df",
        "empty": "",
        "nested": {"a": ["b"]},
        "zero": "a\0b",
        "long": "x" * 100_000,
        "none": None,
    }
    store = create_store(path)
    store.set_attrs("", values)
    store.close()
    assert b"GCOL" not in path.read_bytes()
    with h5py.File(path) as file:
        assert file.attrs["text"].decode() == values["text"]
    read = open_store(path)
    assert read.attrs() == values
    read.close()


@pytest.mark.parametrize(
    "kind",
    ["external", "soft", "external storage", "virtual", "filter", "contiguous", "text", "twice", "cycle", "type"],
)
def test_hdf5_parts_that_a_trace_never_has(tmp_path: Path, kind: str) -> None:
    """What would make a trace show other files, or run a filter, is refused on open, before anything is read."""
    path = tmp_path / "hostile.h5"
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"secret!!")
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other.create_dataset("a", data=np.arange(8))
    with h5py.File(path, "w") as file:
        group = file.create_group("g")
        if kind == "external":
            group["a"] = h5py.ExternalLink("other.h5", "/a")
        elif kind == "soft":
            group["a"] = h5py.SoftLink("/g")
        elif kind == "external storage":
            group.create_dataset("a", shape=(8,), dtype="u1", external=[(str(secret), 0, 8)])
        elif kind == "virtual":
            virtual = h5py.VirtualLayout((8,), "i8")
            virtual[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "a", (8,))
            group.create_virtual_dataset("a", virtual)
        elif kind == "filter":
            group.create_dataset("a", data=np.arange(8), chunks=(8,), compression="gzip")
        elif kind == "contiguous":
            group.create_dataset("a", data=np.arange(8))
        elif kind == "text":
            group.create_dataset("a", data=["x"], chunks=(1,), maxshape=(None,))
        elif kind == "twice":
            group.create_dataset("a", data=np.arange(8), chunks=(8,))
            group["b"] = group["a"]
        elif kind == "cycle":
            group["a"] = group
        elif kind == "type":
            group["a"] = np.dtype("f8")
    with pytest.raises(TraceFormatError, match="g/"):
        open_store(path)


def test_hdf5_of_groups_inside_groups(tmp_path: Path) -> None:
    """Too many to be read by recursion are refused in a sentence."""
    with h5py.File(tmp_path / "deep.h5", "w") as file:
        group: Any = file
        for _ in range(3000):
            group = group.create_group("g")
    with pytest.raises(TraceFormatError, match=r"deep.h5: more than 64 groups are inside each other"):
        open_store(tmp_path / "deep.h5")


def test_hdf5_opened_twice_in_a_process(tmp_path: Path) -> None:
    """Two readers of one file see the same, one after the other and side by side, while it is written and later."""
    path = tmp_path / "store.h5"
    values = numbers("int64", (40, 3))
    store = create_store(path)
    store.create("a", dtype="int64", shape=(3,), chunk_bytes=24)
    store.seal()
    store.append("a", values[:20])
    store.commit()
    for stop in (20, 40):
        one, two = open_store(path), open_store(path)
        for reader in (one, two, one):
            assert np.array_equal(reader.read("a", 0, reader.length("a")), values[:stop])
        one.close()
        two.close()
        if stop == 20:
            store.append("a", values[20:])
            store.close()


def test_hdf5_grows_beside_a_reader_that_is_behind(tmp_path: Path) -> None:
    """A reader of what another one of the process follows reads what it saw, though the file has grown since."""
    path = tmp_path / "store.h5"
    values = numbers("int64", (3000, 3))
    store = create_store(path)
    store.create("a", dtype="int64", shape=(3,), chunk_bytes=24)
    store.seal()
    store.append("a", values[:20])
    store.commit()
    with closing(open_store(path)) as behind, closing(open_store(path)) as reader:
        assert (behind.length("a"), reader.length("a")) == (20, 20)
        store.append("a", values[20:])
        store.commit()
        assert np.array_equal(reader.read("a", 0, 20), values[:20])
        reader.refresh()
        assert np.array_equal(reader.read("a", 0, reader.length("a")), values)
    store.close()


def test_hdf5_fails_to_say_why_a_file_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is being written is read although h5py, which collects garbage meanwhile, loses why it is not."""
    path = tmp_path / "store.h5"
    store = five_numbers(path)
    plainly = h5py.h5f.open
    failed = []

    def open_file(*arguments: Any, **options: Any) -> Any:
        try:
            return plainly(*arguments, **options)
        except OSError as error:
            failed.append(str(error))
            raise UnicodeDecodeError("utf-8", b"\x9b", 0, 1, "invalid start byte") from None

    monkeypatch.setattr(h5py.h5f, "open", open_file)
    reader = open_store(path)
    assert (reader.length("a"), bool(failed)) == (5, True)
    reader.close()
    store.close()


@pytest.mark.parametrize("damaged", [False, True])
def test_hdf5_whose_reads_fail_from_some_call_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, damaged: bool
) -> None:
    """Whichever call of the opening is the first that fails, the file is told as unreadable."""
    path = tmp_path / "store.h5"
    five_numbers(path).close()
    read, calls, fails_from = os.preadv, [0], [sys.maxsize]

    def fail(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] > fails_from[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(disk_files, "PAUSES", (0.0,))
    open_store(path, damaged=damaged).close()
    assert calls[0] >= 1 + damaged
    for first in range(calls[0]):
        calls[0], fails_from[0] = 0, first
        with pytest.raises(TraceUnreadableError, match=str(path)):
            open_store(path, damaged=damaged)


def test_hdf5_opened_while_another_thread_opens_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose writer ends is opened although another thread changes how it is open, as soon as it can."""
    path = tmp_path / "store.h5"
    store = five_numbers(path)
    one = open_store(path)
    store.close()
    others: list[Any] = []

    def reopen() -> None:
        one.close()
        others.append(open_store(path))

    thread = threading.Thread(target=reopen)
    plainly = h5py.h5f.open

    def open_file(*arguments: Any, **options: Any) -> Any:
        try:
            return plainly(*arguments, **options)
        except OSError:
            if thread.ident is None:
                thread.start()
                thread.join(0.5)
            raise

    monkeypatch.setattr(h5py.h5f, "open", open_file)
    monkeypatch.setattr(hdf5_reading, "is_followed", lambda file: False)  # as when the other one opens it only then
    two = open_store(path)
    thread.join()
    for reader in (two, *others):
        assert np.array_equal(reader.read("a", 0, 5), np.arange(5))
        reader.close()
    assert len(others) == 1


def test_hdf5_readers_that_nobody_refers_to_are_closed(tmp_path: Path) -> None:
    """A reader that was forgotten holds no file until garbage is collected, opened while it is written or later."""

    def opened() -> int:
        return int(h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET))

    gc.collect()
    gc.disable()
    try:
        before = opened()
        path = tmp_path / "store.h5"
        store = five_numbers(path)
        writing = opened()
        assert open_store(path).length("a") == 5
        assert opened() == writing > before
        store.close()
        del store
        assert open_store(path).length("a") == 5
        assert opened() == before
    finally:
        gc.enable()


def test_a_forked_child_writes_nothing_to_hdf5(tmp_path: Path) -> None:
    """What HDF5 keeps in memory is not written a second time by a child that ends in order."""
    path = tmp_path / "run.h5"
    code = """
import os, sys
import numpy as np
from tracer.stores.opening import create_store, open_store
from tracer.trace.writer import TraceWriter
store = create_store(sys.argv[1])
store.create("a", dtype="int64", shape=(), chunk_bytes=64)
store.append("a", np.arange(100))
store.seal()
store.append("a", np.arange(1000))
if os.fork() == 0:
    assert not os.path.samestat(os.fstat(store._file.id.get_vfd_handle()), os.stat(sys.argv[1]))
    sys.exit()
store.append("a", np.arange(50_000))
store.commit()
assert os.wait()[1] == 0
store.append("a", np.arange(9))
store.close()
read = open_store(sys.argv[1])
assert read.length("a") == 51_109
assert read.read("a", 1100, 51_100).tolist() == list(range(50_000))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = processes.run(
        [sys.executable, "-W", "ignore", "-c", code, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_hdf5_that_is_moved_while_it_is_written(tmp_path: Path) -> None:
    """Large chunks go to the file that was begun, whatever else is at its path by now."""
    path = tmp_path / "store.h5"
    values = numbers("float32", (6, 256, 256))
    store = create_store(path)
    store.create("own", dtype="float32", shape=(256, 256), chunk_bytes=1)
    store.seal()
    store.append("own", values[:3])
    store.commit()
    path.rename(tmp_path / "moved.h5")
    written_unhurried(path)
    other = path.read_bytes()
    store.unhurried = True
    store.append("own", values[3:])
    store.close()
    assert path.read_bytes() == other
    with closing(open_store(tmp_path / "moved.h5")) as reader:
        assert np.array_equal(reader.read("own", 0, 6), values)


def layouts(path: Path) -> dict[str, Any]:
    """The layout of each array of a file."""
    data, found = path.read_bytes(), {}
    with h5py.File(path, "r") as file:

        def note(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                address = h5py.h5o.get_info(item.id).addr
                found[name] = layout_of(lambda nbytes, at: data[at : at + nbytes], address)

        file.visititems(note)
    return found


def test_hdf5_1_10_knows_every_format_in_a_trace(tmp_path: Path) -> None:
    """Superblock 3 and layout 4, which came with HDF5 1.10, whatever HDF5 writes; later ones are unknown to it."""
    for compression in ("none", "zstd"):
        path = tmp_path / f"{compression}.h5"
        with TraceWriter(path, compression=compression) as writer:
            for step in range(3):
                where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
                for size in (3, 30_000):
                    data = torch.full((size,), float(step))
                    writer.write(ModuleMessage(kind="weights", module=f"of{size}", data=data, **where))
        assert path.read_bytes()[:9] == b"\x89HDF\r\n\x1a\n\x03"
        found = layouts(path)
        assert len(found) > 3
        assert {one.version for one in found.values()} == {4}
        assert all(one.intact for one in found.values())


@pytest.mark.skipif(h5py.version.hdf5_version_tuple < (2,), reason="an older HDF5 cannot write what it cannot read")
@pytest.mark.parametrize("damaged", [False, True])
def test_an_array_that_is_too_new_for_the_library(
    tmp_path: Path, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as that, and never as damage."""
    path = tmp_path / "run.h5"
    monkeypatch.setitem(hdf5_writing._WRITING, "libver", "latest")
    with TraceWriter(path, compression="zstd") as writer:
        where: dict[str, Any] = {"global_step": 0, "train_step": 0, "epoch": 0}
        writer.write(ModuleMessage(kind="weights", module="fc", data=torch.zeros(30_000), **where))
    newer = [name for name, one in layouts(path).items() if one.version > 4]
    assert newer
    opened = h5py.h5o.open

    def refused(group: Any, name: bytes) -> Any:
        item = opened(group, name)
        if isinstance(item, h5py.h5d.DatasetID) and h5py.Dataset(item).name[1:] in newer:
            raise RuntimeError("Unable to synchronously open object (bad version number for layout message)")
        return item

    monkeypatch.setattr(h5py.h5o, "open", refused)
    with pytest.raises(TraceUnreadableError, match=r"not damaged, but was written by a newer HDF5 .* h5py, such as"):
        open_store(path, damaged=damaged)
