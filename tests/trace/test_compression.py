"""Compressed traces: what the choice of a codec means, what others can read, and what damage and kills do to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import blosc

import tracer
from tests.examples import examples
from tracer.errors import CaptureError, TraceCorruptError, TraceFormatError, UnknownNameError
from tracer.format import encodings
from tracer.format.encodings import ENCODINGS
from tracer.format.names import declarations_name, journal_name
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.stores.codecs import CODECS, HDF5_FILTER, OVERHEAD, decode, encode, hdf5_options
from tracer.stores.opening import create_store, open_store
from tracer.trace.compression import NAMES, Compression
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.convert import convert
from tracer.upkeep.recover import recover
from tracer.upkeep.verify import verify

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)
every_codec = pytest.mark.parametrize("codec", CODECS)
# -- the choice ------------------------------------------------------------------------------------------------------


def test_what_auto_chooses() -> None:
    """Integers and bools are compressed, floats and the bits of bfloat16 not; where a plugin is needed, nothing."""
    auto = Compression()
    assert {name for name in ENCODINGS if auto.of("x", name) is not None} == {
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
    }
    assert not any(auto.of("x", name, plainly=False) for name in ENCODINGS)
    assert Compression("zstd").of(None, "float32", plainly=False) == "zstd"


def test_a_choice_for_each_kind() -> None:
    """What is not named follows ``"*"``, and without it ``"auto"``."""
    some = Compression({"activations": "zstd", "input_labels": "none"})
    assert [some.of(kind, "int64") for kind in ("activations", "input_labels", "other", None)] == [
        *("zstd", None, "lz4", "lz4")
    ]
    rest = Compression.parse(["activations=none", "lz4", "a=b=zstd"])
    assert [rest.of(kind, "float32") for kind in ("activations", "x", "a=b")] == [None, "lz4", "zstd"]
    assert (Compression("lz4").describe(), rest.kinds) == ("lz4", ["activations", "a=b"])


@pytest.mark.parametrize(
    ("choice", "error", "said"),
    [
        ("gzip", UnknownNameError, "auto, lz4, lz4hc, none, zstd"),
        ("lz", UnknownNameError, "did you mean 'lz4'"),
        ({"weights": "bzip2"}, UnknownNameError, "auto, lz4, lz4hc, none, zstd"),
        ({"weights": 3}, CaptureError, "auto, none, lz4, lz4hc, zstd"),
        ({3: "lz4"}, CaptureError, "auto, none, lz4, lz4hc, zstd"),
        (7, CaptureError, "auto, none, lz4, lz4hc, zstd"),
        (None, CaptureError, "auto, none, lz4, lz4hc, zstd"),
    ],
)
def test_choices_that_are_none(tmp_path: Path, choice: Any, error: type[Exception], said: str) -> None:
    """Everything that takes a choice refuses a wrong one at once, says what is allowed, and leaves nothing behind."""
    model = torch.nn.Linear(2, 2)
    with TraceWriter(tmp_path / "run.zarr") as writer:
        writer.write(NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.zeros(())))
    for attempt in (
        lambda: TraceWriter(tmp_path / "new.zarr", compression=choice),
        lambda: tracer.record(tmp_path / "new.zarr", model, compression=choice, capture=tracer.Capture()),
        lambda: convert(tmp_path / "run.zarr", tmp_path / "new.zarr", compression=choice),
    ):
        with pytest.raises(error, match=said):
            attempt()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.zarr"]


def test_kinds_and_words_that_are_wrong(tmp_path: Path) -> None:
    """A copy knows its kinds, so one that is not there is a mistake; so is a word given twice, or an unknown codec."""
    with TraceWriter(tmp_path / "run.zarr") as writer:
        writer.write(NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.zeros(())))
    with pytest.raises(UnknownNameError, match="loss"):
        convert(tmp_path / "run.zarr", tmp_path / "new.zarr", compression={"los": "lz4"})
    for words in (["lz4", "zstd"], ["loss=lz4", "loss=lz4"]):
        with pytest.raises(CaptureError, match="twice"):
            Compression.parse(words)
    with pytest.raises(UnknownNameError, match="lz4, lz4hc, zstd"):
        create_store(tmp_path / "new.h5").create("a", dtype="int8", shape=(), chunk_bytes=8, compression="none")


# -- stores ----------------------------------------------------------------------------------------------------------


@every_codec
def test_commits_waste_no_space(tmp_path: Path, codec: str) -> None:
    """The last chunk, which every commit writes anew, takes no more than two places however many commits there are."""
    rng = np.random.default_rng(0)
    sizes = []
    for commits in (10, 400):
        path = tmp_path / f"store{commits}.zarr"
        store = create_store(path)
        store.create("a", dtype="int64", shape=(), chunk_bytes=4096, compression=codec)
        store.commit()
        empty = open_store(path).nbytes
        for _ in range(commits):
            store.append("a", rng.integers(0, 9, 800 // commits))
            store.commit()
        store.close()
        sizes.append(open_store(path).nbytes - empty)
    # 6.4 kB of numbers; the index of a shard is 2 kB
    assert max(sizes) <= 2 * 4096 + 2 * (4096 + OVERHEAD + 4) + 2100


@every_format
def test_tables_are_never_compressed(tmp_path: Path, suffix: str) -> None:
    """The journal and the declarations are plain, so that they can be read with nothing but the format's library."""
    path = tmp_path / f"run{suffix}"
    with TraceWriter(path, compression="zstd") as writer:
        writer.write(NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.zeros(500)))
    for name, compressed in (
        (journal_name("rank0"), False),
        (declarations_name("rank0"), False),
        ("rank0/pools/loss/float32", True),
    ):
        if suffix == ".zarr":
            assert ("blosc" in (path / name / "zarr.json").read_text()) == compressed
        else:
            with h5py.File(path) as file:
                assert file[name].id.get_create_plist().get_nfilters() == compressed


def test_hdf5_needs_no_plugin(tmp_path: Path) -> None:
    """A compressed HDF5 trace is written and read where HDF5 knows no such filter, and loads none."""
    program = (
        "import sys, h5py, torch\n"
        "from tracer import NetworkMessage, TraceReader, TraceWriter\n"
        "with TraceWriter(sys.argv[1], compression='zstd') as writer:\n"
        "    for step in range(3):\n"
        "        where = dict(global_step=step, train_step=step, epoch=0)\n"
        "        writer.write(NetworkMessage(kind='input_data', data=torch.full((200, 200), step), **where))\n"
        "with TraceReader(sys.argv[1]) as reader:\n"
        "    assert [int(message.data[7, 7]) for message in reader] == [0, 1, 2]\n"
        "    assert reader.info['stored_bytes'] < reader.info['bytes'] / 3\n"
        "assert not h5py.h5z.filter_avail(32001) and 'hdf5plugin' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "run.h5"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HDF5_PLUGIN_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@settings(max_examples=300)
@given(data=st.data(), codec=st.sampled_from(list(CODECS)), item=st.sampled_from([1, 2, 4, 8, 16]))
def test_damaged_buffers(data: st.DataObject, codec: str, item: int) -> None:
    """Whatever is in a buffer, decoding it gives so many bytes or says that it cannot; it never fails otherwise."""
    size = item * data.draw(st.integers(1, 400))
    values = np.arange(size, dtype=np.uint8) % data.draw(st.integers(1, 9))
    encoded = bytearray(encode(CODECS[codec], memoryview(values), item))
    assert len(encoded) <= size + OVERHEAD
    out = np.empty(size, np.uint8)
    assert decode(CODECS[codec], np.frombuffer(encoded, np.uint8), out, item)
    assert np.array_equal(out, values)
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, len(encoded) - 1), st.integers(0, 255)))):
        encoded[place] = byte
    del encoded[len(encoded) - data.draw(st.sampled_from([0, 0, 0, 1, 5, len(encoded)])) :]
    assert decode(CODECS[codec], np.frombuffer(encoded, np.uint8), out, item) in (True, False)


def header(nbytes: int, stored: int, flags: int = 0x21, block: int | None = None) -> bytes:
    """The header of a buffer of float32."""
    sizes = (nbytes, nbytes if block is None else block, stored)
    return bytes([2, 1, flags, 4]) + b"".join(size.to_bytes(4, "little") for size in sizes)


HOSTILE = {
    "larger than the chunk": header(1 << 30, 60) + bytes(44),
    "smaller than the chunk": header(64, 60) + bytes(44),
    "longer than it is": header(4096, 61) + bytes(44),
    "shorter than it is": header(4096, 59) + bytes(44),
    "no header": b"\2\1\x21",
    "nothing": b"",
    "not of this codec": header(4096, 60, 0x81) + bytes(44),
    "stored, and cut": header(4096, 60, 0x23) + bytes(44),
    "blocks of nothing": header(4096, 60, block=0) + bytes(44),
    "huge blocks": header(4096, 60, block=2**31) + bytes(44),
    "zeros": bytes(60),
}


@every_format
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_buffers(tmp_path: Path, suffix: str, what: str) -> None:
    """A buffer that contradicts the array, under a checksum that is right, is damage; `verify` says in which chunk."""
    path = tmp_path / f"run{suffix}"
    with TraceWriter(path, compression="lz4", chunk_bytes=4096) as writer:
        where: dict[str, Any] = {"global_step": 0, "train_step": 0, "epoch": 0}
        writer.write(ModuleMessage(kind="weights", module="a", data=torch.arange(5000.0), **where))
    buffer = HOSTILE[what]
    name = "rank0/pools/weights/float32"
    if suffix == ".zarr":
        shard = path / name / "c" / "0"
        data = bytearray(shard.read_bytes())
        index = np.frombuffer(bytes(data[: 128 * 16]), "<u8").reshape(-1, 2).copy()
        index[1] = (len(data), len(buffer) + 4)
        data += buffer + int(google_crc32c.value(buffer)).to_bytes(4, "little")
        data[: 128 * 16] = index.tobytes()
        data[128 * 16 : 128 * 16 + 4] = int(google_crc32c.value(index.tobytes())).to_bytes(4, "little")
        shard.write_bytes(data)
    else:
        with h5py.File(path, "r+") as file:
            file[name].id.write_direct_chunk((1024,), buffer or b"\0")
    with TraceReader(path) as reader, pytest.raises(TraceCorruptError, match=r"chunk 1 of array|lacks its chunk 1"):
        list(reader)
    problems = [problem for problem in verify(path).problems if problem.check == "chunk"]
    assert [problem.rows for problem in problems] == [(1024, 2048)]


FILTERS: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "another filter": [(1, (1,))],
    "another codec": [(HDF5_FILTER, (2, 2, 4, 4096, 5, 2, 0))],
    "another level": [(HDF5_FILTER, (2, 2, 4, 4096, 9, 2, 1))],
    "chunks of another size": [(HDF5_FILTER, hdf5_options(CODECS["lz4"], 4, 65536))],
    "items of another size": [(HDF5_FILTER, hdf5_options(CODECS["lz4"], 8, 4096))],
    "too few parameters": [(HDF5_FILTER, (2, 2, 4))],
    "two filters": [(2, (4,)), (HDF5_FILTER, hdf5_options(CODECS["lz4"], 4, 4096))],
}


@pytest.mark.parametrize("what", FILTERS)
def test_hdf5_filters_that_a_trace_never_has(tmp_path: Path, what: str) -> None:
    """Only what is written here is accepted: that filter, alone, with these parameters."""
    path = tmp_path / "run.h5"
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((1024,))
        for number, options in FILTERS[what]:
            properties.set_filter(number, h5py.h5z.FLAG_OPTIONAL, options)
        space = h5py.h5s.create_simple((1024,))
        h5py.h5d.create(file.id, b"a", h5py.h5t.py_create(np.dtype("<f4")), space, dcpl=properties)
    with pytest.raises(TraceFormatError, match="'a' has a filter"):
        open_store(path)


@pytest.mark.parametrize(("shape", "chunk"), [((64, 64), (64, 8)), ((8, 1 << 20), (8, 1 << 20))])
def test_hdf5_chunks_that_a_trace_never_has(tmp_path: Path, shape: tuple[int, ...], chunk: tuple[int, ...]) -> None:
    """Compressed chunks that are not contiguous in their rows, or larger than ours, are refused on open."""
    path = tmp_path / "run.h5"
    options = hdf5_options(CODECS["lz4"], 4, 4 * int(np.prod(chunk)))
    with h5py.File(path, "w") as file:
        filters = {"compression": HDF5_FILTER, "compression_opts": options, "allow_unknown_filter": True}
        file.create_dataset("a", shape=shape, chunks=chunk, dtype="<f4", **filters)
    with pytest.raises(TraceFormatError, match="'a' has a filter"):
        open_store(path)


@every_format
def test_an_array_that_says_too_much(tmp_path: Path, suffix: str) -> None:
    """A compressed array may be larger than its file, and no larger than its chunks become."""
    path = tmp_path / f"store{suffix}"
    store = create_store(path)
    store.create("a", dtype="float32", shape=(), chunk_bytes=1 << 20, compression="zstd")
    zeros = np.zeros(24 << 18, np.float32)
    store.append("a", zeros)
    store.close()
    reader = open_store(path)
    assert reader.nbytes < 1 << 20
    assert np.array_equal(reader.read("a", 0, len(zeros)), zeros)
    reader.close()
    if suffix == ".zarr":
        document = json.loads((path / "a" / "zarr.json").read_text())
        document["shape"] = [2**40]
        (path / "a" / "zarr.json").write_text(json.dumps(document))
    else:
        with h5py.File(path, "r+") as file:
            file["a"].resize(2**40, axis=0)
    reader = open_store(path)
    for stop in (30 << 18, 2**40):
        with pytest.raises(TraceCorruptError, match="larger than what is there"):
            reader.read("a", 0, stop)
    assert reader.stored_rows("a") <= 128 << 18
    reader.close()


def test_zarr_chunks_that_share_their_bytes(tmp_path: Path) -> None:
    """An index that refers to the same bytes again and again does not make an array that is there."""
    path = tmp_path / "store.zarr"
    store = create_store(path)
    store.create("a", dtype="float32", shape=(), chunk_bytes=1 << 20, compression="lz4")
    store.append("a", np.zeros(1 << 18, np.float32))
    store.close()
    shard = path / "a" / "c" / "0"
    data = bytearray(shard.read_bytes())
    index = np.frombuffer(bytes(data[: 128 * 16]), "<u8").reshape(-1, 2).copy()
    index[:] = index[0]
    data[: 128 * 16 + 4] = index.tobytes() + int(google_crc32c.value(index.tobytes())).to_bytes(4, "little")
    shard.write_bytes(data)
    document = json.loads((path / "a" / "zarr.json").read_text())
    document["shape"] = [128 << 18]
    (path / "a" / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(TraceCorruptError, match="larger than what is there"):
        open_store(path).read("a", 0, 128 << 18)


@every_format
@every_codec
def test_damage_reaches_one_chunk(tmp_path: Path, suffix: str, codec: str) -> None:
    """One flipped bit costs one message where rows have chunks of their own; it is named, and the rest is saved."""
    path = tmp_path / f"run{suffix}"
    with TraceWriter(path, compression=codec, own_pool_bytes=1) as writer:
        for number in range(8):
            writer.write(message(number, "float32", (50, 60), 0))
    name = "rank0/kind0/m0"
    if suffix == ".zarr":
        file = path / name / "c" / "0" / "0" / "0"
        place, nbytes = np.frombuffer(file.read_bytes()[: 128 * 16], "<u8").reshape(-1, 2)[5].tolist()
    else:
        file = path
        with h5py.File(path) as opened:
            stored = opened[name].id.get_chunk_info_by_coord((5, 0, 0))
        place, nbytes = stored.byte_offset, stored.size
    data = bytearray(file.read_bytes())
    data[place + nbytes // 2] ^= 16
    file.write_bytes(data)
    with TraceReader(path) as reader, pytest.raises(TraceCorruptError, match="kind0"):
        list(reader)
    [problem] = verify(path).problems
    assert (problem.array, problem.rows, problem.messages) == (name, (5, 6), 1)
    loss = recover(path, tmp_path / "saved.zarr")
    assert (loss.saved, loss.lost) == (7, 1)
    with TraceReader(tmp_path / "saved.zarr") as reader:
        expected = [facts(message(number, "float32", (50, 60), 0)) for number in range(8) if number != 5]
        assert [facts(one) for one in reader] == expected


# -- copies ----------------------------------------------------------------------------------------------------------


def facts(message: Message) -> tuple[Any, ...]:
    """All that a message says, comparable."""
    data = message.data
    bits = None if data is None else (data.dtype, tuple(data.shape), encodings.encode(data).tobytes())
    counters = (message.global_step, message.train_step, message.epoch, message.call)
    return (type(message), message.kind, message.key, message.tag, message.leaf, counters, bits)


def contents(path: Path) -> list[tuple[Any, ...]]:
    """What the messages of a trace say; it is intact."""
    assert verify(path).complete
    with TraceReader(path) as reader:
        return [facts(message) for message in reader]


def message(number: int, dtype: str, shape: tuple[int, ...], seed: int) -> Message:
    """A message with bits that may be anything, or may repeat."""
    encoding = ENCODINGS[dtype]
    size = int(np.prod(shape)) * np.dtype(encoding.storage).itemsize
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2 if dtype == "bool" or seed % 3 else 256, size, np.uint8)
    where: dict[str, Any] = {"global_step": number, "train_step": number, "epoch": 0}
    data = encodings.decode(bits.view(encoding.storage), dtype, shape)
    return ModuleMessage(kind=f"kind{seed % 2}", module=f"m{seed % 3}", data=data, **where)


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(
        st.tuples(
            st.sampled_from(["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "complex128"]),
            st.lists(st.integers(0, 40), max_size=3).map(tuple),
            st.integers(0, 1000),
        ),
        min_size=1,
        max_size=12,
    ),
    suffixes=st.permutations(FORMATS),
    first=st.sampled_from(NAMES),
    second=st.sampled_from(NAMES),
    third=st.sampled_from([{"kind0": "zstd", "*": "none"}, {"kind1": "lz4"}, *NAMES]),
    chunk_bytes=st.integers(1, 3000),
)
def test_there_and_back(
    tmp_path_factory: pytest.TempPathFactory,
    made: list[tuple[str, tuple[int, ...], int]],
    suffixes: list[str],
    first: str,
    second: str,
    third: Any,
    chunk_bytes: int,
) -> None:
    """Into the other format and back, whatever codecs, dtypes and shapes, a trace says what it said, bit for bit."""
    folder = tmp_path_factory.mktemp("copies")
    one, two, three = folder / f"one{suffixes[0]}", folder / f"two{suffixes[1]}", folder / f"three{suffixes[0]}"
    messages = [message(number, *of) for number, of in enumerate(made)]
    if isinstance(third, dict):
        kinds = {message.kind for message in messages}
        third = {kind: name for kind, name in third.items() if kind == "*" or kind in kinds}
    with TraceWriter(one, compression=first, chunk_bytes=chunk_bytes, own_pool_bytes=999, commit_rows=3) as writer:
        for written in messages:
            writer.write(written)
    convert(one, two, compression=second, chunk_bytes=500, own_pool_bytes=99)
    convert(two, three, compression=third)
    expected = [facts(written) for written in messages]
    assert contents(one) == contents(two) == contents(three) == expected


def test_a_copy_is_compressed_anew(tmp_path: Path) -> None:
    """However the source is, a copy follows its own setting, and says which."""
    messages = [message(number, "float32", (100, 200), 1) for number in range(5)]
    with TraceWriter(tmp_path / "run.zarr", compression="zstd") as writer:
        for written in messages:
            writer.write(written)
    convert(tmp_path / "run.zarr", tmp_path / "auto.zarr")
    convert(tmp_path / "auto.zarr", tmp_path / "small.h5", compression={"kind1": "lz4"})
    sizes, said = {}, []
    for name in ("run.zarr", "auto.zarr", "small.h5"):
        with TraceReader(tmp_path / name) as reader:
            sizes[name] = reader.info["stored_bytes"]
            said += [note["converted"]["compression"] for note in reader.notes if "converted" in note]
    assert sizes["run.zarr"] < sizes["auto.zarr"] / 2
    assert sizes["small.h5"] < sizes["auto.zarr"] / 2
    assert said == ["auto", "auto", {"*": "auto", "kind1": "lz4"}]


def test_recording_compresses(tmp_path: Path) -> None:
    """What `record` is told reaches the pools; labels and inputs are compressed by default."""
    model, loss = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.zarr"
    with tracer.record(
        path, model, optimizer, loss=loss, compression={"activations": "zstd"}, capture=tracer.Capture()
    ):
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(torch.randn(300, 64)), torch.randint(64, (300,))).backward()
            optimizer.step()
    compressed = {
        str(file.parent.relative_to(path / "rank0"))
        for file in path.rglob("zarr.json")
        if "blosc" in file.read_text() and "shape" in json.loads(file.read_text())
    }
    assert compressed == {"activations/0", "activations/1", "pools/input_labels/int64", "input_data/%~network"}


@pytest.mark.filterwarnings("error")
def test_a_kind_that_is_misspelt_is_told_of(tmp_path: Path) -> None:
    """A choice for a kind that is like a known one, and is none, is a warning; others may be pushed later."""
    model = torch.nn.Linear(2, 2)
    with (
        pytest.warns(RuntimeWarning, match="messages of kind 'activation'; did you mean 'activations'\\?"),
        tracer.record(tmp_path / "run.zarr", model, (), compression={"activation": "zstd"}, capture=tracer.Capture()),
    ):
        pass
    choice = {"my_own": "zstd", "weights": "lz4"}
    with tracer.record(tmp_path / "other.zarr", model, (), compression=choice, capture=tracer.Capture()) as run:
        run.log("my_own", torch.zeros(9))
    with TraceReader(tmp_path / "other.zarr") as trace:
        assert "my_own" in {stream.kind for stream in trace.streams}


def test_blosc_uses_one_thread() -> None:
    """Where it is used from the main thread, too: a training has better uses for the processors."""
    encode(CODECS["lz4"], memoryview(np.zeros(100, np.uint8)), 1)
    assert blosc.use_threads is False


def test_what_compresses_is_imported_at_the_beginning(tmp_path: Path) -> None:
    """Not with the first chunk, which may be as late as the end of a program; and not if nothing is compressed."""
    code = (
        "import os, sys; from tracer import TraceWriter\n"
        "for number, (suffix, compression) in enumerate(word.split(':') for word in sys.argv[2:]):\n"
        "    if os.fork() == 0:\n"  # as a program of its own that has done nothing else
        "        before = 'numcodecs.blosc' in sys.modules\n"
        "        TraceWriter(f'{sys.argv[1]}/{number}{suffix}', compression=compression)\n"
        "        print(suffix, compression, before, 'numcodecs.blosc' in sys.modules, flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), ".zarr:auto", ".zarr:none", ".h5:auto", ".h5:zstd"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines() == [
        ".zarr auto False True",
        ".zarr none False False",
        ".h5 auto False False",
        ".h5 zstd False True",
    ]
