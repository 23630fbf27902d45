"""What opening a trace must not do, whatever is in it: run code, read other files, take memory, hang, or tell lies."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tests.trace.small_summaries import small_summaries
from tracer.errors import TraceCorruptError, TraceError, TraceFormatError, TracerError
from tracer.format.declarations import declaration
from tracer.format.encodings import encode
from tracer.format.journal import Column
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.stores.opening import open_store
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.recover import recover
from tracer.upkeep.verify import verify

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)
CASES = int(os.environ.get("TRACEREEL_FUZZ_CASES", "6"))
"""Damaged traces of each format; `make test-slow` has a thousand."""
TABLES_HAVE_CHECKSUMS = {".zarr": True, ".h5": len(Column) > 11}
"""Whether a flipped bit in the journal or the declarations is noticed where it makes sense."""


def messages() -> list[Message]:
    """A small run with events, scalars, pools of their own, ragged batches and bits that numpy lacks."""
    generator = torch.Generator().manual_seed(5)
    made: list[Message] = []
    for step in range(5):
        where: dict[str, Any] = {"global_step": step, "train_step": step % 3, "epoch": step // 3}
        made += [
            NetworkMessage(kind="batch_started", **where),
            ModuleMessage(kind="weights", module="conv", data=torch.randn(20, 16, generator=generator), **where),
            ModuleMessage(kind="biases", module="", data=torch.randn(step + 1, generator=generator), **where),
            ModuleMessage(kind="activations", module="conv", data=torch.ones(3, 7).bfloat16() * step, **where),
            NetworkMessage(kind="loss", data=torch.tensor(step / 7), tag="eval", **where),
        ]
    return made


def write(path: Path, compression: str = "auto") -> Path:
    """Write the small run, in several commits."""
    options: dict[str, Any] = {"own_pool_bytes": 1000, "chunk_bytes": 512, "commit_rows": 7}
    with TraceWriter(path, header={"seed": 3}, compression=compression, **options) as writer:
        writer.note({"silent": ["fc"]})
        for message in messages():
            writer.write(replace(message, sampling={"rows": 3} if message.kind == "activations" else None))
    return path


def facts(message: Message) -> tuple[Any, ...]:
    """All that a message says, comparable."""
    data = message.data
    bits = None if data is None else (data.dtype, tuple(data.shape), encode(data).tobytes())
    counters = (message.global_step, message.train_step, message.epoch, message.call)
    return (type(message), message.kind, message.key, message.tag, message.leaf, counters, bits)


@contextmanager
def bounded(nbytes: int = 64 << 20, seconds: float = 20) -> Iterator[None]:
    """Fail if more memory is taken; end the process, with a traceback, if it takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()
        faulthandler.cancel_dump_traceback_later()


def read_all(path: Path) -> list[Message]:
    """Everything that a reader gives."""
    with TraceReader(path) as reader:
        assert len(reader.streams) >= 0
        assert reader.info["messages"] == len(reader)
        return list(reader)


# -- random damage -------------------------------------------------------------------------------------------------


def damage(path: Path, rng: random.Random) -> str:
    """Cut, flip, overwrite, splice or remove something in a trace; says what."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    kind = rng.choice(["flip", "flip", "flips", "cut", "zeros", "noise", "splice", "insert", "remove"])
    # half of the time where metadata is: at the beginning
    place = rng.randrange(len(data)) if rng.random() < 0.5 or len(data) < 4096 else rng.randrange(4096)
    length = rng.choice([1, 2, 8, 64, 512])
    if kind == "flip":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "flips":
        for _ in range(rng.randrange(2, 20)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "zeros":
        data[place : place + length] = bytes(len(data[place : place + length]))
    elif kind == "noise":
        data[place : place + length] = rng.randbytes(len(data[place : place + length]))
    elif kind == "splice":
        other = rng.randrange(len(data))
        data[place : place + length] = data[other : other + len(data[place : place + length])]
    elif kind == "insert":
        data[place:place] = rng.randbytes(length)
    elif path.is_file():
        del data[place : place + length]
    else:
        file.unlink()
        return f"remove {file.relative_to(path)}"
    file.write_bytes(data)
    return f"{kind} {file.relative_to(path) if file != path else ''} at {place}, {length}"


# each codec in one of the formats; the others are slow
RARER = [pytest.param(name, marks=pytest.mark.slow) for name in ("zstd.zarr", "lz4.h5")]


@pytest.fixture(scope="module", params=[*FORMATS, "lz4.zarr", "zstd.h5", "summaries.zarr", "summaries.h5", *RARER])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The small run in each format, as it is, compressed, and with summaries of a few rows, undamaged."""
    compression, _, suffix = request.param.partition(".")
    with pytest.MonkeyPatch.context() as patches:
        if compression == "summaries":
            small_summaries(patches)
            compression = ""
        yield write(tmp_path_factory.mktemp("whole") / f"run.{suffix}", compression or "none")


def test_random_damage(whole: Path, tmp_path: Path) -> None:
    """Reading, checking and saving a damaged trace gives right messages or an error of this project, and nothing else.

    What is read is a beginning of what was written; what is saved is a part of it.
    """
    truth = [facts(message) for message in messages()]
    seed = int(os.environ.get("TRACEREEL_FUZZ_SEED", "1"))
    compared = TABLES_HAVE_CHECKSUMS[whole.suffix]
    for case in range(CASES):
        rng = random.Random(f"{seed} {case} {whole.suffix}")
        path, saved = tmp_path / f"bad{whole.suffix}", tmp_path / "saved.zarr"
        for old in (path, saved):
            if old.is_dir():
                shutil.rmtree(old)
        (shutil.copytree if whole.is_dir() else shutil.copyfile)(whole, path)
        what = f"seed {seed}, case {case}: {damage(path, rng)}"
        readable = False
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            found = [facts(message) for message in read_all(path)]
        except TracerError:
            pass
        except Exception as error:
            error.add_note(what)
            raise
        else:
            readable = True
            if compared:
                assert found == truth[: len(found)], what
        try:
            report = verify(path)
            if not readable:
                assert not report.intact, what
            elif compared and report.intact:
                assert report.damaged == 0, what
            loss = recover(path, saved)
            rescued = [facts(message) for message in read_all(saved)]
            assert len(rescued) == loss.saved, what
            assert loss.saved + loss.lost == loss.messages, what
            if readable:
                assert loss.saved == len(found), what
            if compared:
                rest = iter(truth)
                assert all(one in rest for one in rescued), what
        except TracerError:
            # of a file that was cut off a reader sees the beginning, which may hold no message
            assert not readable or not found, what
        except Exception as error:
            error.add_note(what)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


# -- other files, and code -----------------------------------------------------------------------------------------


def rewrite(path: Path, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an array of an HDF5 trace by what `make` puts into its group under its name."""
    with h5py.File(path, "r+") as file:
        del file[name]
        group, _, last = name.rpartition("/")
        make((file[group], last))


HOSTILE_HDF5: dict[str, Callable[[Any], Any]] = {
    "a link to another file": lambda at: at[0].__setitem__(at[1], h5py.ExternalLink("/etc/hostname", "/a")),
    "a link within the file": lambda at: at[0].__setitem__(at[1], h5py.SoftLink("/rank0/journal")),
    "a link to nowhere": lambda at: at[0].__setitem__(at[1], h5py.SoftLink("/nowhere")),
    "external storage": lambda at: at[0].create_dataset(at[1], (8,), "u1", external=[("/etc/hostname", 0, 8)]),
    "a virtual dataset": lambda at: at[0].create_virtual_dataset(at[1], h5py.VirtualLayout((8,), "f4")),
    "a filter": lambda at: at[0].create_dataset(at[1], data=np.arange(8.0), chunks=(8,), compression="gzip"),
    "objects": lambda at: at[0].create_dataset(at[1], (8,), h5py.vlen_dtype("u1"), chunks=(8,)),
    "text": lambda at: at[0].create_dataset(at[1], (8,), h5py.string_dtype(), chunks=(8,)),
    "records": lambda at: at[0].create_dataset(at[1], (8,), [("a", "i4"), ("b", "f4")], chunks=(8,)),
    "references": lambda at: at[0].create_dataset(at[1], (8,), h5py.ref_dtype, chunks=(8,)),
    "chunks of gigabytes": lambda at: at[0].create_dataset(at[1], (2**33,), "u1", chunks=(2**31,)),
}


@pytest.mark.parametrize("what", HOSTILE_HDF5)
@pytest.mark.parametrize("name", ["rank0/journal", "rank0/pools/loss/float32"])
def test_hdf5_that_reaches_out_is_refused(tmp_path: Path, name: str, what: str) -> None:
    """Links, external storage, virtual datasets, filters and objects are refused on open, by everything that opens."""
    path = write(tmp_path / "run.h5")
    rewrite(path, name, HOSTILE_HDF5[what])
    for opens in (TraceReader, verify, lambda path: recover(path, tmp_path / "out.zarr")):
        with bounded(), pytest.raises(TraceFormatError, match=name):
            opens(path)
    assert not (tmp_path / "out.zarr").exists()


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON document in place."""
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


HOSTILE_ZARR: dict[str, dict[str, Any]] = {
    "pickles": {"codecs": [{"name": "numcodecs.pickle"}]},
    "an unknown codec": {"codecs": [{"name": "bytes"}, {"name": "my_module.Evil"}]},
    "an unknown codec inside": {
        "codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [1], "codecs": [{"name": "evil"}]}}]
    },
    "objects": {"data_type": "object"},
    "text": {"data_type": "string"},
    "records": {"data_type": {"name": "structured", "configuration": {"fields": [["a", "int32"]]}}},
    "a transformer": {"storage_transformers": [{"name": "evil"}]},
    "chunks of gigabytes": {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40]}},
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    },
    "an index of gigabytes": {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**50]}}},
}


@pytest.mark.parametrize("what", HOSTILE_ZARR)
def test_zarr_that_reaches_out_is_refused(tmp_path: Path, what: str) -> None:
    """Pickles, unknown codecs, objects and sizes that nothing needs are refused when the array is opened."""
    path = write(tmp_path / "run.zarr")
    edit(path / "rank0/pools/loss/float32/zarr.json", lambda document: document.update(HOSTILE_ZARR[what]))
    with bounded(), TraceReader(path) as reader, pytest.raises(TraceFormatError, match="loss"):
        list(reader.messages(kinds="loss"))
    with bounded():
        # the array, and the messages in it
        found = [(problem.check, problem.array) for problem in verify(path).problems]
        assert found == [("array", "rank0/pools/loss/float32")] * 2


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("codecs", ["ours", "ours, compressed", "others"])
@pytest.mark.parametrize("name", ["rank0/pools/loss/float32/c/0", "rank0/pools/loss/float32/zarr.json"])
def test_zarr_links_and_pipes(tmp_path: Path, name: str, codecs: str, kind: str) -> None:
    """A link out of the trace, a pipe or a folder in the place of a file is an error; none is read or waited for."""
    path = write(tmp_path / "run.zarr", "zstd" if codecs == "ours, compressed" else "none")
    if codecs == "others":
        changes = {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]}
        edit(path / "rank0/pools/loss/float32/zarr.json", lambda document: document.update(changes))
    file = path / name
    shutil.move(file, tmp_path / "elsewhere")
    if kind == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    with bounded(), TraceReader(path) as reader, pytest.raises((TraceFormatError, TraceCorruptError)):
        list(reader.messages(kinds="loss"))
    with bounded():
        assert not verify(path).intact


@every_format
@pytest.mark.parametrize("name", ["../../secret", "/etc", "rank0/../../x", "", ".", "rank0//a", "a\\b", "x\0y", "__x"])
def test_names_that_lead_out(tmp_path: Path, suffix: str, name: str) -> None:
    """A pool is never looked for outside of the trace, whatever its name says."""
    path = write(tmp_path / f"run{suffix}")
    store = open_store(path)
    with pytest.raises(TracerError):
        store.read(name, 0, 1)
    store.close()


# -- sizes ---------------------------------------------------------------------------------------------------------


# in every second of them each two values of different parameters meet
ABSURD = [
    pytest.param(codecs, name, rows, marks=pytest.mark.slow if (j + k + step // 2) % step else ())
    for codecs, step in (("ours", 2), ("others", 3))
    for j, name in enumerate(("journal", "declarations", "pools/loss/float32"))
    for k, rows in enumerate((10**9, 2**40, 10**18, 10**30))
]


@pytest.mark.parametrize(("codecs", "name", "rows"), ABSURD)
def test_zarr_of_absurd_length(tmp_path: Path, codecs: str, name: str, rows: int) -> None:
    """An array that says it has more rows than there are on disk takes no memory for them."""
    path = write(tmp_path / "run.zarr")
    file = path / "rank0" / name / "zarr.json"
    edit(file, lambda document: document["shape"].__setitem__(0, rows))
    if codecs == "others":
        edit(file, lambda document: document.__setitem__("codecs", document["codecs"][0]["configuration"]["codecs"]))
    with bounded():
        if name == "pools/loss/float32":
            with TraceReader(path) as reader, pytest.raises(TracerError):
                reader._parts.stores[0].read("rank0/pools/loss/float32", 0, rows)
        else:
            with pytest.raises((TraceCorruptError, TraceFormatError)):
                TraceReader(path)
    # what is checked is read in parts
    with bounded(160 << 20):
        report = verify(path)
    # rows of a pool mean nothing without the journal, so it may say that it has more
    assert report.intact is (name == "pools/loss/float32" and codecs == "ours")


def test_zarr_with_declarations_that_become_many(tmp_path: Path) -> None:
    """Compression may make thousands of bytes of each; verifying holds what it made of the declarations once."""
    path = write(tmp_path / "run.zarr")
    file = path / "rank0/declarations/zarr.json"
    edit(file, lambda document: document["shape"].__setitem__(0, 10**9))
    edit(file, lambda document: document.__setitem__("codecs", document["codecs"][0]["configuration"]["codecs"]))
    shard = path / "rank0/declarations/c/0"
    shard.write_bytes(shard.read_bytes().ljust(12 << 10, b"\0"))
    with bounded(80 << 20):  # of 48 MB
        assert not verify(path).intact


@pytest.mark.parametrize("name", ["journal", "declarations", "pools/loss/float32"])
def test_hdf5_of_absurd_length(tmp_path: Path, name: str) -> None:
    """An array that is longer than its file is not read, because chunks that are not there read as zeros."""
    path = write(tmp_path / "run.h5")
    with h5py.File(path, "r+") as file:
        file[f"rank0/{name}"].resize(2**40, axis=0)
    with bounded():
        if name == "pools/loss/float32":
            with TraceReader(path) as reader, pytest.raises(TraceCorruptError, match="larger than the file"):
                reader._parts.stores[0].read("rank0/pools/loss/float32", 0, 2**40)
        else:
            with pytest.raises(TraceCorruptError, match="larger than the file"):
                TraceReader(path)
    with bounded():
        assert not verify(path).intact


SUMMARY: dict[str, Any] = {"rows": [0, 2], "crc32c": 1, "streams": [[0, 2, 2, 1, 0, 1, 0, 0, [0]]]}
DECLARED: dict[str, list[bytes]] = {
    "a shape of 10^30 elements": [declaration("shape", {"id": 0, "shape": [10**10] * 3})],
    "a shape of a thousand axes": [declaration("shape", {"id": 0, "shape": [1] * 1000})],
    "a shape of no numbers": [declaration("shape", {"id": 0, "shape": [True, 2.0, "3"]})],
    "ids of another type": [declaration("shape", {"id": False, "shape": [1]})],
    "an endless number": [b'{"shape":{"id":0,"shape":[' + b"9" * 700 + b"]}}"],
    "brackets in brackets": [b'{"note":' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
    "braces in braces": [b'{"note":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"],
    "a summary of rows that are not there": [declaration("summary", SUMMARY | {"rows": [5, 7]})],
    "a summary of other streams": [declaration("summary", SUMMARY)],
    "a summary of too few rows": [declaration("summary", SUMMARY | {"rows": [0, 3]})],
    "a summary that ends before it begins": [declaration("summary", SUMMARY | {"rows": [2, 0]})],
    "a summary of large numbers": [declaration("summary", SUMMARY | {"streams": [[0, 2**80, 0, 1, 0, 0, 0, 0, []]]})],
    "a summary of short lists": [declaration("summary", SUMMARY | {"streams": [[0, 2], [1]]})],
    "a summary of no lists": [declaration("summary", SUMMARY | {"streams": {"0": 2}})],
    "a summary of text": [declaration("summary", "all is well")],
    "a summary of fractions": [declaration("summary", SUMMARY | {"crc32c": 0.5})],
    "no text": [b'{"note":"\xff\xfe\xff"}'],
    "two things in a line": [b'{"note":{},"shape":{"id":0,"shape":[]}}'],
    "a header that is a list": [b'{"header":[1,2]}'],
    "a dtype that runs code": [
        declaration(
            "stream",
            {"id": 0, "kind": "a", "network": False, "module": "m", "tag": "t", "leaf": "", "dtype": "os.system"},
        )
    ],
    **{
        f"a sampling that is {what}": [
            declaration(
                "stream",
                {"id": 0, "kind": "a", "network": False, "module": "m", "tag": "t", "leaf": "", "dtype": "float32"}
                | {"rank": 0, "sampling": sampling},
            )
        ]
        for what, sampling in {"a list": [1], "a text": "rows", "a number": 7, "false": False}.items()
    },
    "a pool elsewhere": [
        *(declaration("shape", {"id": 0, "shape": [2]}),),
        declaration("pool", {"id": 0, "name": "../../../etc/passwd", "dtype": "float32"}),
    ],
}


@pytest.fixture
def short_numbers() -> Iterator[None]:
    """Python makes a number of no more than 640 digits; else it would be 4,300, each of which may be a flipped bit."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("short_numbers")
@pytest.mark.parametrize("what", DECLARED)
def test_hostile_declarations(tmp_path: Path, what: str) -> None:
    """Declarations that are too deep, too large or nonsense are damage; a name in them never leads out of the trace."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        writer._commits.lines += DECLARED[what]
    with bounded():
        if what == "a pool elsewhere":
            with TraceReader(path) as reader:
                assert list(reader) == []
        else:
            with pytest.raises(TracerError):
                TraceReader(path)
    with bounded():
        assert not verify(path).intact


def test_a_large_zarr_json_is_not_parsed(tmp_path: Path) -> None:
    """JSON takes many times its size in memory, so a zarr.json of 16 MiB or more is refused."""
    path = write(tmp_path / "run.zarr")
    with (path / "zarr.json").open("r+b") as file:
        file.truncate(1 << 40)
    with bounded(), pytest.raises(TraceCorruptError, match="root"):
        TraceReader(path)


def test_long_waits_of_hdf5(tmp_path: Path) -> None:
    """A flipped bit in metadata is an error at once, though HDF5 would wait for a writer to put it right."""
    path = write(tmp_path / "run.h5")
    data = bytearray(path.read_bytes())
    for place in (11, 20, 45, 60):
        data[place] ^= 5
        path.write_bytes(data)
        with bounded(seconds=20), pytest.raises(TraceCorruptError):
            TraceReader(path)
        data[place] ^= 5


@pytest.mark.parametrize("what", ["attributes", "a virtual dataset", "a virtual dataset of an old library"])
@pytest.mark.parametrize("far", [False, True])
def test_damaged_heaps_of_hdf5(tmp_path: Path, far: bool, what: str) -> None:
    """What lies in a global heap is refused unread: of a damaged one HDF5 never returns, wherever in the file it is."""
    path = write(tmp_path / "run.h5")
    before = path.stat().st_size
    with h5py.File(path, "r+", libver="earliest" if "old" in what else "latest") as file:
        if far:
            file["rank0/journal"].resize(20_000, axis=0)
            file["rank0/journal"][-2000:] = 1
        if what == "attributes":
            file.attrs["format"] = "tracereel"
        else:
            layout = h5py.VirtualLayout((8,), "f4")
            layout[:] = h5py.VirtualSource("other.h5", "x", (8,))
            group = file.require_group("rank0/pools/more")
            # so that the header of the dataset goes on elsewhere
            group.create_virtual_dataset("v", layout).attrs["about"] = "x" * 5000
    data = bytearray(path.read_bytes())
    place = data.find(b"GCOL", before)
    assert place >= (before + 65536 if far else before)
    # an object that is free space of no size
    data[place + 16 : place + 32] = bytes(16)
    path.write_bytes(data)
    for opens in (TraceReader, lambda path: recover(path, tmp_path / "out.zarr")):
        with bounded(), pytest.raises(TraceFormatError, match=r"not one of a trace|virtual dataset"):
            opens(path)
    with bounded(), suppress(TraceFormatError):
        assert not verify(path).intact


@pytest.mark.parametrize("part", [0.5, 0.9, 0.999])
def test_a_finished_file_that_was_cut_off(tmp_path: Path, part: float) -> None:
    """It is damaged, and neither empty nor being recorded."""
    path = write(tmp_path / "run.h5")
    os.truncate(path, int(path.stat().st_size * part))
    with bounded(), pytest.raises(TraceCorruptError, match="cut off"):
        TraceReader(path)
    with bounded():
        assert not verify(path).intact


@pytest.mark.parametrize("name", ["a" * 300 + ".zarr", "a" * 300 + ".h5", "a\0b.zarr"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    """A sentence, before a script is trained whose trace could never be written."""
    for opens in (TraceReader, TraceWriter):
        with pytest.raises(TraceFormatError, match="is no path: "):
            opens(tmp_path / name)


def test_a_file_that_was_closed_is_not_called_damaged(tmp_path: Path) -> None:
    """What cannot be read any more is as it was."""
    reader = TraceReader(write(tmp_path / "run.h5"))
    reader.close()
    with pytest.raises(TraceError, match="was closed") as told:
        list(reader.messages())
    assert not isinstance(told.value, TraceCorruptError)
