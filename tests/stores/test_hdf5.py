"""What is HDF5's own: attributes, parts that no trace has, several readers, the way from a Zarr trace to a file."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tests.stores.stored import numbers
from tracer.errors import TraceCorruptError, TraceError, TraceFormatError, TraceUnreadableError
from tracer.messaging.messages import ModuleMessage
from tracer.stores import disk as disk_files
from tracer.stores.opening import create_store, open_store
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter


def five_numbers(path: Path) -> Any:
    """A store that is being written, with an array ``a`` of 0 to 4 that was committed."""
    store = create_store(path)
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    store.append("a", np.arange(5, dtype=np.int8))
    store.commit()
    return store


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
    store.create("a", dtype="int64", shape=(3,), chunk_bytes=24, gapless=True)
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


def of_an_older_release(path: Path) -> None:
    """Make the file that a recorder of an older release left when it was killed: HDF5 takes it as being written."""
    with h5py.File(path.with_suffix(".open"), "w", libver=("v110", "v110")) as file:
        dataset = file.create_dataset("a", (0,), "int8", chunks=(8,), maxshape=(None,))
        file.swmr_mode = True
        dataset.resize(5, axis=0)
        dataset[:] = np.arange(5)
        file.flush()
        path.write_bytes(path.with_suffix(".open").read_bytes())


def test_hdf5_fails_to_say_why_a_file_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose writer was killed is read although h5py, which collects garbage meanwhile, loses why it is not."""
    path = tmp_path / "store.h5"
    of_an_older_release(path)
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
    assert bool(failed)
    assert reader.read("a", 0, reader.length("a")).tolist() == [0, 1, 2, 3, 4]
    reader.close()


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


def test_hdf5_readers_that_nobody_refers_to_are_closed(tmp_path: Path) -> None:
    """A reader that was forgotten holds no file until garbage is collected, and so no lock."""

    def opened() -> int:
        return int(h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET))

    gc.collect()
    gc.disable()
    try:
        before = opened()
        path = tmp_path / "store.h5"
        five_numbers(path).close()
        assert open_store(path).length("a") == 5
        assert opened() == before
    finally:
        gc.enable()


def test_hdf5_1_10_knows_the_format_of_a_file(tmp_path: Path) -> None:
    """Superblock 3, which came with HDF5 1.10; it does not know later ones."""
    for compression in ("none", "zstd"):
        path = tmp_path / f"{compression}.h5"
        with TraceWriter(path, compression=compression) as writer:
            for step in range(3):
                where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
                for size in (3, 30_000):
                    data = torch.full((size,), float(step))
                    writer.write(ModuleMessage(kind="weights", module=f"of{size}", data=data, **where))
        assert path.read_bytes()[:9] == b"\x89HDF\r\n\x1a\n\x03"


@pytest.mark.parametrize("damaged", [False, True])
def test_an_array_that_is_too_new_for_the_library(
    tmp_path: Path, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as that, and never as damage."""
    path = tmp_path / "run.h5"
    with TraceWriter(path, compression="zstd") as writer:
        where: dict[str, Any] = {"global_step": 0, "train_step": 0, "epoch": 0}
        writer.write(ModuleMessage(kind="weights", module="fc", data=torch.zeros(30_000), **where))
    opened = h5py.h5o.open

    def refused(group: Any, name: bytes) -> Any:
        item = opened(group, name)
        if isinstance(item, h5py.h5d.DatasetID):
            raise RuntimeError("Unable to synchronously open object (bad version number for layout message)")
        return item

    monkeypatch.setattr(h5py.h5o, "open", refused)
    with pytest.raises(TraceUnreadableError, match=r"was written by a newer HDF5 .* a newer h5py may read it"):
        open_store(path, damaged=damaged)


def test_hdf5_is_a_zarr_trace_until_it_is_closed(tmp_path: Path) -> None:
    """A reader goes on when the file replaces the Zarr trace; what is killed before stays, and opens by its name."""
    path = tmp_path / "store.h5"
    store = create_store(path)
    store.create("g/a", dtype="float32", shape=(3, 5), chunk_bytes=1, compression="zstd", gapless=True)
    store.create("g/b", dtype="int16", shape=(), chunk_bytes=7, gapless=True)
    store.set_attrs("g", {"x": [1, None]})
    values = numbers("float32", (9, 3, 5))
    store.append("g/a", values)
    store.append("g/b", np.arange(100, dtype="int16"))
    store.commit()
    reader = open_store(path)
    assert (path.exists(), reader.length("g/a")) == (False, 9)
    store.append("g/b", np.arange(100, 133, dtype="int16"))
    store.close()
    assert sorted(tmp_path.iterdir()) == [path]
    for other in (reader, open_store(path)):
        assert other.names() == ["g/a", "g/b"]
        assert other.attrs("g") == {"x": [1, None]}
        assert np.array_equal(other.read("g/a", 2, 9), values[2:])
        assert other.read("g/b", 90, other.length("g/b")).tolist() == list(range(90, 133))
        other.close()


@pytest.mark.parametrize("fails", ["write", "rename"])
def test_a_disk_that_is_too_full_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """The Zarr trace stays whole, opens by the name of the file, and no half of a file stays."""
    path = tmp_path / "store.h5"
    store = five_numbers(path)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fails == "write":
        monkeypatch.setattr(h5py.Dataset, "id", property(full))
    else:
        replace = os.replace
        monkeypatch.setattr(os, "replace", lambda old, new: full() if str(new) == str(path) else replace(old, new))
    with pytest.raises(TraceError, match=r"store.h5: No space .*; the whole trace is in .*store.h5.zarr, and opens as"):
        store.close()
    monkeypatch.undo()
    assert [one.name for one in tmp_path.iterdir()] == ["store.h5.zarr"]
    with closing(open_store(path)) as reader:
        assert reader.read("a", 0, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")
@pytest.mark.parametrize("part", [None, pytest.param("rank1", marks=pytest.mark.slow)])
def test_killed_at_any_call_while_the_file_is_made(tmp_path: Path, part: str | None) -> None:
    """Whichever call of the system is the last, the trace opens by its name, and has everything."""
    made = set()
    for calls in range(1000):
        path = tmp_path / str(calls) / "run.h5"
        child = os.fork()
        if child == 0:
            left = [calls]

            def counted(call: Any, left: list[int] = left) -> Any:
                def counting(*arguments: Any, **options: Any) -> Any:
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*arguments, **options)

                return counting

            writer = TraceWriter(path, part=part)
            for step in range(3):
                where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
                data = torch.full((30_000,), float(step))
                writer.write(ModuleMessage(kind="weights", module="fc", data=data, **where))
            writer.commit()
            for name in ("open", "replace", "rename", "unlink", "rmdir", "fsync", "scandir"):
                setattr(os, name, counted(getattr(os, name)))
            writer.finish()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with TraceReader(path) as reader:
            assert [message.data.unique().tolist() for message in reader] == [[0.0], [1.0], [2.0]]
            made.add((reader.status, len(list(path.parent.glob("run*.h5")))))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert calls > 10
    assert made == {("interrupted", 0), ("finished", 0), ("finished", 1)}
    assert [one.suffix for one in path.parent.iterdir()] == [".h5"]


def test_the_longest_names_of_files(tmp_path: Path) -> None:
    """What is beside a file whose name has no room for an ending has a shorter name, and opens by the long one."""
    path = tmp_path / ("ü" * 120 + "x" * 12 + ".h5")
    store = five_numbers(path)
    with closing(open_store(path)) as reader:
        assert reader.read("a", 0, 5).tolist() == [0, 1, 2, 3, 4]
    store.close()
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    with closing(open_store(path)) as reader:
        assert reader.read("a", 0, 5).tolist() == [0, 1, 2, 3, 4]
