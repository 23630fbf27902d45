"""Round trips through a trace: every value, the order, filters, and what a trace says of itself."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tracer
from tests.stores.stored import recorded_in
from tests.trace.round_trips import FORMATS, every_format, module, network, run, write
from tracer.errors import (
    CaptureError,
    MessageError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
)
from tracer.format.encodings import ENCODINGS, encode
from tracer.format.journal import Column
from tracer.format.process import process_start
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
]


def bits(tensor: torch.Tensor | None) -> Any:
    """What identifies a tensor bit for bit."""
    if tensor is None:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()


def same(found: Message, expected: Message) -> bool:
    """Whether two messages are equal in class, fields and every bit of their data."""
    fields = [field.name for field in dataclasses.fields(expected) if field.name != "data"]
    return (
        type(found) is type(expected)
        and all(getattr(found, field) == getattr(expected, field) for field in fields)
        and bits(found.data) == bits(expected.data)
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The messages of `run`, in a trace of each format that was committed several times."""
    folder = tmp_path_factory.mktemp("run")
    for suffix in FORMATS:
        write(folder / f"run{suffix}", run(), own_pool_bytes=4096, commit_rows=20)
    return {suffix: folder / f"run{suffix}" for suffix in FORMATS}


@pytest.fixture
def trace(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Iterator[TraceReader]:
    """A reader of these messages, in Zarr unless the test says which format."""
    with TraceReader(paths[getattr(request, "param", ".zarr")]) as reader:
        yield reader


in_each_format = pytest.mark.parametrize("trace", FORMATS, indirect=True)


tensors = st.builds(
    lambda dtype, shape, seed: (
        torch.randint(
            0,
            2 if dtype == torch.bool else 256,
            (int(np.prod(shape, dtype=int)) * dtype.itemsize,),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
        .view(dtype)
        .reshape(shape)
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.integers(0, 1000),
)


counters = st.fixed_dictionaries(
    {
        "global_step": st.integers(0, 2**40),
        "train_step": st.integers(0, 9),
        "epoch": st.integers(0, 3),
        "tag": st.sampled_from(["default", "eval", "a/b"]),
        "call": st.integers(0, 2),
        "leaf": st.sampled_from(["", "0.1"]),
    }
)


any_message = st.one_of(
    st.builds(
        lambda kind, data, fields: NetworkMessage(kind=kind, data=data, **fields),
        st.sampled_from(["loss", "journal", "ä ö"]),
        st.none() | tensors,
        counters,
    ),
    st.builds(
        lambda kind, name, data, fields: ModuleMessage(kind=kind, module=name, data=data, **fields),
        st.sampled_from(["weights", "pools"]),
        st.sampled_from(["", "fc", "FC", "../../x", "zarr.json", "x" * 300]),
        tensors,
        counters,
    ),
)


@every_format
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(any_message, max_size=25),
    chunk_bytes=st.sampled_from([1, 16, 1000]),
    own_pool_bytes=st.sampled_from([1, 64, 100000]),
    commit_rows=st.sampled_from([1, 3, 1000]),
)
def test_round_trip(tmp_path: Path, suffix: str, messages: list[Message], **options: int) -> None:
    """Any messages come back bit for bit in their order, whatever the sizes of chunks, pools and commits."""
    path = tmp_path / f"trace{suffix}"
    write(path, messages, overwrite=True, **options)
    with TraceReader(path) as reader:
        found = list(reader.messages())
        assert len(reader) == len(found) == len(messages)
        assert all(map(same, found, messages))
        assert sum(stream.count for stream in reader.streams) == len(messages)
        assert reader.status == "finished"


def test_both_formats_hold_the_same(tmp_path: Path) -> None:
    """A trace copied from one format to the other holds the same messages and tells the same of its streams."""
    first, second = tmp_path / "a.zarr", tmp_path / "b.h5"
    write(first, run(), own_pool_bytes=4096, commit_rows=30)
    with TraceReader(first) as one:
        write(second, list(one.messages()), own_pool_bytes=4096, header={"run_id": "copy"})
        with TraceReader(second) as two:
            assert all(map(same, two.messages(), run()))
            assert one.streams == two.streams
            assert two.info["run_id"] == "copy"


@every_format
def test_own_pools_are_plain_arrays(tmp_path: Path, suffix: str) -> None:
    """A large stream is an array whose row i is message i, as the library of the format alone reads it."""
    path = tmp_path / f"run{suffix}"
    data = [torch.randn(130, 140, generator=torch.Generator().manual_seed(step)) for step in range(5)]
    messages = [module("weights", "a.b", step, tensor) for step, tensor in enumerate(data)]
    messages += [module("weights", "a.b", step, tensor, tag="eval") for step, tensor in enumerate(data)]
    write(path, messages)
    expected = torch.stack(data).numpy()
    names = ("rank0/weights/a.b", "rank0/weights@eval/a.b")
    if suffix == ".zarr":
        root = zarr.open_group(path, mode="r")
        assert root.attrs["format"] == "tracereel"
        assert root["rank0"].attrs["status"] == "finished"
        found = [np.asarray(root[name][...]) for name in names]
        # the whole hierarchy, without a warning
        assert set(names) <= {name for name, _ in root.members(max_depth=None)}
    else:
        with h5py.File(path) as file:
            assert file.attrs["format"] == b"tracereel"
            found = [file[name][...] for name in names]
    assert all(np.array_equal(array, expected) for array in found)


def test_changing_streams(tmp_path: Path) -> None:
    """A stream that changes its shape keeps its id; one that changes dtype or sampling has an id for each."""
    path = tmp_path / "run.zarr"
    half, rows = {"dtype": "bfloat16"}, {"rows": [0, 2]}
    with TraceWriter(path, own_pool_bytes=64) as writer:
        for step in range(9):
            writer.write(module("weights", "shape", step, torch.full((20 + step % 2,), float(step))))
            dtype = (torch.float32, torch.float64)[step % 2]
            writer.write(module("weights", "dtype", step, torch.full((20,), step, dtype=dtype)))
            sampling = (None, half, rows)[step % 3]
            writer.write(
                dataclasses.replace(module("weights", "sampling", step, torch.full((20,), step)), sampling=sampling)
            )
            writer.write(network("event or not", step, None if step % 2 else step))
    with TraceReader(path) as reader:
        assert all(
            float(message.data.double().mean()) == message.global_step
            for message in reader.messages()
            if message.data is not None
        )
        by_module: dict[Any, list[Any]] = {}
        for stream in reader.streams:
            by_module.setdefault(stream.module, []).append(stream)
        assert [stream.shapes for stream in by_module["shape"]] == [[(20,), (21,)]]
        assert [stream.dtype for stream in by_module["dtype"]] == ["float32", "float64"]
        assert [stream.sampling for stream in by_module["sampling"]] == [None, half, rows]
        assert [stream.count for stream in by_module["sampling"]] == [3, 3, 3]
        assert [stream.dtype for stream in by_module[None]] == ["int64", None]
        steps, data = reader.array("weights", "dtype")
        assert steps.tolist() == list(range(9))
        assert isinstance(data, list)
        assert [array.dtype.name for array in data[:2]] == ["float32", "float64"]


def test_streams_describe_what_they_hold(trace: TraceReader) -> None:
    """Counts, bytes, shapes, calls and steps of a stream are those of its messages."""
    messages = run()
    for stream in trace.streams:
        mine = [
            m
            for m in messages
            if (m.kind, m.key, m.tag, m.leaf) == (stream.kind, stream.module, stream.tag, stream.leaf)
        ]
        assert stream.count == len(mine)
        assert stream.network == isinstance(mine[0], NetworkMessage)
        assert stream.steps == (mine[0].global_step, mine[-1].global_step)
        assert stream.calls == 1 + max(m.call for m in mine)
        data = [m.data for m in mine if m.data is not None]
        assert stream.bytes == sum(d.nbytes for d in data)
        assert stream.shapes == list(dict.fromkeys(tuple(d.shape) for d in data))
        assert stream.dtype == (str(data[0].dtype).removeprefix("torch.") if data else None)
    assert [stream.id for stream in trace.streams] == list(range(len(trace.streams)))
    assert "activations of conv1" in map(str, trace.streams)


@in_each_format
def test_info(trace: TraceReader) -> None:
    """A trace says in JSON what it is, how far it got and what it holds."""
    info = trace.info
    messages = run()
    assert json.loads(json.dumps(info)) == info
    assert info["messages"] == len(messages) == len(trace)
    assert info["bytes"] == sum(m.data.nbytes for m in messages if m.data is not None)
    assert (info["steps"], info["epochs"], info["status"]) == ([0, 11], [0, 2], "finished")
    assert (info["version"], info["format"], info["store"]) == (
        1,
        "tracereel",
        {".zarr": "zarr"}.get(trace.path.suffix, "hdf5"),
    )
    assert info["header"]["process"]["pid"] == os.getpid()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", info["created"])
    assert info["created"] <= info["ended"]
    assert "finished" in repr(trace)


FILTERS: list[tuple[dict[str, Any], Any]] = [
    ({}, lambda m: True),
    ({"kinds": "loss"}, lambda m: m.kind == "loss"),
    ({"kinds": ["loss", "batch_started"]}, lambda m: m.kind in ("loss", "batch_started")),
    ({"kinds": "nothing"}, lambda m: False),
    ({"modules": "conv1"}, lambda m: m.key == "conv1"),
    ({"modules": "layer1.*"}, lambda m: (m.key or "").startswith("layer1.")),
    ({"modules": ""}, lambda m: m.key == ""),
    ({"modules": "*"}, lambda m: m.key is not None),
    ({"modules": ["rnn", "l*"]}, lambda m: m.key is not None and re.match("rnn|l", m.key)),
    ({"tags": "eval"}, lambda m: m.tag == "eval"),
    ({"tags": ["eval", "default"]}, lambda m: True),
    ({"tags": "!eval"}, lambda m: m.tag != "eval"),
    ({"tags": "ev*"}, lambda m: m.tag == "eval"),
    ({"steps": (3, 7)}, lambda m: 3 <= m.global_step < 7),
    ({"steps": (None, 2)}, lambda m: m.global_step < 2),
    ({"steps": (9, None)}, lambda m: m.global_step >= 9),
    ({"steps": (1, 11, 3)}, lambda m: m.global_step in (1, 4, 7, 10)),
    ({"steps": (None, None, 5)}, lambda m: m.global_step % 5 == 0),
    ({"steps": (4, 4)}, lambda m: False),
    ({"steps": (100, 200)}, lambda m: False),
    ({"streams": [0, 2]}, lambda m: m.kind == "batch_started" or m.key == "conv1"),
    (
        {"kinds": "weights", "modules": "", "steps": (2, 5)},
        lambda m: (m.kind, m.key) == ("weights", "") and 2 <= m.global_step < 5,
    ),
]


@pytest.mark.parametrize(("filters", "wanted"), FILTERS, ids=[str(filters) for filters, _ in FILTERS])
def test_filters(trace: TraceReader, filters: dict[str, Any], wanted: Any) -> None:
    """A filtered reading is the full one without the messages that do not pass."""
    expected = [message for message in run() if wanted(message)]
    found = list(trace.messages(**filters))
    assert len(found) == len(expected)
    assert all(map(same, found, expected))


def test_mask_over_the_journal(trace: TraceReader) -> None:
    """A mask chooses single messages, and joins with other filters."""
    mask = np.zeros(len(trace), bool)
    mask[[5, 3, 70]] = True
    messages = run()
    assert all(map(same, trace.messages(where=mask), [messages[3], messages[5], messages[70]]))
    column = trace.journal[:, Column.GLOBAL_STEP]
    assert [m.global_step for m in trace.messages(kinds="loss", tags="default", where=column % 2 == 1)] == [
        1,
        3,
        5,
        7,
        9,
        11,
    ]
    for bad in (mask[1:], mask.astype(int)):
        with pytest.raises(CaptureError, match="mask"):
            trace.messages(where=bad)


@pytest.mark.parametrize("stride", [2**62, 2**63, 10**30])
def test_strides_beyond_all_steps(trace: TraceReader, stride: int) -> None:
    """Only the first step is one of theirs."""
    found = {message.global_step for message in trace.messages(steps=(1, None, stride))}
    assert found == {1}


@pytest.mark.parametrize(
    "steps", [(5, 3), (-1, 3), (0, 3, 0), (0, 3, -1), (0,), (0, 1, 2, 3), ("a", 3), (0.5, 3), (True, 3)]
)
def test_steps_that_are_no_range(trace: TraceReader, steps: Any) -> None:
    """Reversed, negative and other strange ranges are refused at the call, not at the first message."""
    with pytest.raises(CaptureError, match="steps"):
        trace.messages(steps=steps)


def test_unknown_stream_ids(trace: TraceReader) -> None:
    """An id that no stream has is an error that says which there are."""
    with pytest.raises(CaptureError, match="0 to"):
        trace.messages(streams=[0, 99])


@in_each_format
def test_array(trace: TraceReader) -> None:
    """All data of a stream comes as one array, or as a list where the shape changes; bfloat16 comes as float32."""
    expected = [m for m in run() if m.key == "layer1.0.fc"]
    steps, data = trace.array("weights", "layer1.0.fc")
    assert steps.tolist() == list(range(12))
    assert isinstance(data, np.ndarray)
    assert data.dtype == np.float32
    assert np.array_equal(data, np.stack([m.data.float().numpy() for m in expected]))
    steps, data = trace.array("activations", "conv1")
    assert isinstance(data, list)
    assert [a.shape for a in data] == [(8, 40, 60)] * 11 + [(3, 40, 60)]
    steps, data = trace.array("activations", "conv1", steps=(2, 10, 4))
    assert (steps.tolist(), data.shape) == ([2, 6], (2, 8, 40, 60))
    steps, data = trace.array("activations", "shared", steps=(0, 2))
    assert steps.tolist() == [0, 0, 1, 1]
    assert trace.array("loss", tag="eval")[0].tolist() == [3, 7, 11]
    assert np.array_equal(trace.array("loss")[1], np.arange(12, dtype=np.float32))
    assert trace.array("weights")[1].shape == (12, 3, 3)
    assert trace.array("activations", "rnn", leaf="1.1")[1].shape == (12, 2, 2)
    steps, data = trace.array("loss", steps=(100, 200))
    assert (len(steps), len(data)) == (0, 0)


def test_array_of_what_is_not_there(trace: TraceReader) -> None:
    """Asking for a stream that is not there names those that are; events have no array."""
    with pytest.raises(CaptureError, match="has no activations of conv2; it has activations of conv1, "):
        trace.array("activations", "conv2")
    with pytest.raises(CaptureError, match="carry no data"):
        trace.array("batch_started")


@in_each_format
def test_data_is_free_to_use(trace: TraceReader) -> None:
    """Changing a message's data changes no other message's, in the same reading or in another."""
    found = []
    for message in trace.messages():
        found.append(message)
        if message.data is not None:
            message.data.zero_()
    assert all(message.data is None or not message.data.any() for message in found)
    assert all(map(same, trace.messages(), run()))


@in_each_format
@pytest.mark.parametrize("slow", [-1, 1e9])
def test_blocks_do_not_change_what_is_read(trace: TraceReader, slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the blocks and gaps, the messages are the same, whether a thread reads ahead or not."""
    monkeypatch.setattr("tracer.trace.data.SLOW_SECONDS", slow)
    for block, rows, gap in ((1, 16384, 0), (40000, 7, 0), (40000, 16384, 1 << 30)):
        monkeypatch.setattr("tracer.trace.data.BLOCK_BYTES", block)
        monkeypatch.setattr("tracer.trace.data.RANGE_BYTES", block)
        monkeypatch.setattr("tracer.trace.data.BLOCK_ROWS", rows)
        monkeypatch.setattr("tracer.trace.data.GAP_BYTES", gap)
        assert all(map(same, trace.messages(), run()))
        assert len(list(trace.messages(steps=(2, 9, 3)))) == len([m for m in run() if m.global_step in (2, 5, 8)])


def test_writing_takes_a_copy(tmp_path: Path) -> None:
    """A tensor may be changed in place as soon as it was written."""
    path = tmp_path / "run.zarr"
    small, large = torch.zeros(3), torch.zeros(200, 200)
    with TraceWriter(path) as writer:
        for step in range(4):
            writer.write(module("weights", "small", step, small))
            writer.write(module("weights", "large", step, large))
            small += 1
            large += 1
    with TraceReader(path) as reader:
        assert all(bool((m.data == m.global_step).all()) for m in reader.messages())


def test_traces_that_hold_nothing_yet(tmp_path: Path) -> None:
    """A trace without messages opens and says so, while it is written, and when it is finished."""
    path = tmp_path / "run.zarr"
    writer = TraceWriter(path, header={"run_id": "x"})
    writer.write(network("loss", 0, 1.0))
    with TraceReader(path) as reader:
        assert (len(reader), reader.status, list(reader), reader.streams) == (0, "recording", [], [])
        assert (reader.info["steps"], reader.info["bytes"], reader.info["run_id"]) == (None, 0, "x")
        with pytest.raises(CaptureError, match="no streams"):
            reader.array("loss")
    writer.commit()
    with TraceReader(path) as reader:
        assert (len(reader), reader.status) == (1, "recording")
    writer.finish()
    with TraceReader(path) as reader:
        assert (len(reader), reader.status) == (1, "finished")
    empty = tmp_path / "empty.zarr"
    write(empty, [])
    with TraceReader(empty) as reader:
        assert (len(reader), reader.status, list(reader)) == (0, "finished", [])


def test_endings(tmp_path: Path) -> None:
    """A run that fails says why; notes are kept; a finished writer takes no more."""
    path = tmp_path / "run.zarr"
    writer = TraceWriter(path)

    def fail() -> None:
        with writer:
            writer.write(network("loss", 0, 1.0))
            writer.note({"message": "gave up a stream"})
            raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        fail()
    with TraceReader(path) as reader:
        assert reader.status == "failed: ZeroDivisionError: by zero"
        assert reader.notes == [{"message": "gave up a stream"}]
        assert len(reader) == 1
    writer.finish()
    for attempt in (writer.commit, lambda: writer.write(network("loss", 0)), lambda: writer.note({})):
        with pytest.raises(TraceError, match="finished"):
            attempt()


def test_a_message_that_cannot_be_held_changes_nothing(tmp_path: Path) -> None:
    """After a refused message the writer goes on as if it had not been."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        writer.write(network("loss", 0, 1.0))
        with pytest.raises(MessageError, match="sparse"):
            writer.write(module("weights", "fc", 0, torch.zeros(2, 2).to_sparse()))
        with pytest.raises(TraceError, match="sampling"):
            writer.write(dataclasses.replace(module("weights", "fc", 0, torch.zeros(2)), sampling={"rows": object()}))
        writer.write(network("loss", 1, 2.0))
    with TraceReader(path) as reader:
        assert [float(m.data) for m in reader] == [1.0, 2.0]
        assert len(reader.streams) == 1


def test_automatic_commits(tmp_path: Path) -> None:
    """A commit comes by itself after so many messages, bytes or seconds."""
    for options in ({"commit_rows": 3}, {"commit_bytes": 24}, {"commit_seconds": 0.0}):
        path = tmp_path / "run.zarr"
        writer = TraceWriter(path, overwrite=True, **options)
        for step in range(3):
            writer.write(network("loss", step, torch.zeros(2)))
        with TraceReader(path) as reader:
            assert len(reader) == 3
        writer.finish()
    with pytest.raises(ValueError, match="commit_rows"):
        TraceWriter(tmp_path / "other.zarr", commit_rows=0)


@every_format
def test_only_traces_are_overwritten(tmp_path: Path, suffix: str) -> None:
    """A trace is overwritten when asked; a Zarr group or an HDF5 file that is no trace never is."""
    path = tmp_path / f"run{suffix}"
    write(path, run(2))
    with pytest.raises(TraceExistsError):
        TraceWriter(path)
    write(path, run(3), overwrite=True)
    with TraceReader(path) as reader:
        assert len(reader) == len(run(3))
    other = tmp_path / f"other{suffix}"
    if suffix == ".zarr":
        zarr.create_group(other).attrs["mine"] = 1
    else:
        with h5py.File(other, "w") as file:
            file.attrs["mine"] = 1
    with pytest.raises(TraceExistsError, match="not a trace"):
        TraceWriter(other, overwrite=True)
    with pytest.raises(TraceFormatError, match=f"other{suffix}.*not a trace"):
        TraceReader(other)
    assert other.exists()


FILTERED: list[dict[str, Any]] = [{}, {"kinds": "activations"}, {"modules": "shared"}, {"steps": (2, 9, 3)}]


@pytest.mark.parametrize("filters", FILTERED, ids=str)
def test_arrays(trace: TraceReader, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of arrays hold every message with data once, with the numbers of `messages`, in blocks of any size."""
    for size in (1, 30_000, 1 << 30):
        monkeypatch.setattr("tracer.trace.data.BLOCK_BYTES", size)
        monkeypatch.setattr("tracer.trace.data.RANGE_BYTES", size)
        selected = trace.select(**filters)
        expected = dict(zip(selected.tolist(), trace.messages(**filters), strict=True))
        found = []
        for batch in trace.arrays(**filters):
            assert len(batch.rows) == len(batch.data)
            for row, data in zip(batch.rows.tolist(), batch.data, strict=True):
                found.append(row)
                message = expected[row]
                assert message.data is not None
                assert data.dtype == ENCODINGS[str(message.data.dtype).removeprefix("torch.")].readable
                assert np.array_equal(data, message.data.to(torch.from_numpy(np.array(data)).dtype).numpy())
        assert sorted(found) == [row for row, message in expected.items() if message.data is not None]


@every_format
@pytest.mark.parametrize("slow", [-1, 1e9])
def test_kept_messages_stay_as_they_were(
    tmp_path: Path, suffix: str, slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is used again only when nobody has it: what is kept, or kept in part, never changes."""
    # after a few blocks read by a thread, or by none
    monkeypatch.setattr("tracer.trace.data.SLOW_SECONDS", slow)
    monkeypatch.setattr("tracer.trace.data.BLOCK_BYTES", 1 << 19)
    monkeypatch.setattr("tracer.trace.data.RANGE_BYTES", 1 << 19)
    path = tmp_path / f"run{suffix}"
    write(path, [module("weights", "fc", step, torch.full((130, 500), float(step))) for step in range(60)])
    with TraceReader(path) as reader:
        kept, parts = [], []
        for message in reader:
            assert message.data is not None
            if message.global_step % 3 == 0:
                kept.append(message)
            elif message.global_step % 3 == 1:
                parts.append((message.global_step, message.data[7, 3:9]))
        assert all(torch.equal(m.data, torch.full((130, 500), float(m.global_step))) for m in kept)
        assert all(torch.equal(part, torch.full((6,), float(step))) for step, part in parts)
        arrays = [batch.data for batch in reader.arrays()]
        assert sorted(value for array in arrays for value in array[:, 5, 5].tolist()) == list(range(60))
        # a reading that is given up leaves no thread behind
        threads = threading.active_count()
        given_up = iter(reader)
        for _ in range(10):
            next(given_up)
        del given_up
        assert threading.active_count() <= threads


def test_a_batch_with_a_tensor_that_cannot_be_held(tmp_path: Path) -> None:
    """What comes before it in the batch is written, and the writer goes on."""
    path = tmp_path / "run.zarr"
    good = [network("loss", step, torch.full((3,), float(step))) for step in range(20)]
    bad = network("loss", 20, torch.zeros(3, device="meta"))
    sparse = network("loss", 20, torch.zeros(3).to_sparse())
    with TraceWriter(path) as writer:
        for wrong in (bad, sparse):
            with pytest.raises(MessageError, match="cannot hold"):
                writer.write_many([*good[:10], wrong, *good[10:]])
        writer.write_many(good[10:])
        assert writer.messages == 30
    with TraceReader(path) as reader:
        assert all(map(same, reader, [*good[:10], *good[:10], *good[10:]]))


def test_status_of_other_processes(tmp_path: Path) -> None:
    """A trace without an ending is recorded while its process lives, or changes are recent on another machine."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = {"pid": child.pid, "hostname": platform.node(), "start": process_start(child.pid)}
    traces = {
        "alive": here,
        "reused": {**here, "start": "1"},
        "elsewhere": {**here, "hostname": "another machine"},
        "nonsense": {**here, "pid": "x"},
        "unknown": None,
    }
    expected = dict.fromkeys(traces, "recording") | {"nonsense": "interrupted"}
    if process_start(os.getpid()) is not None:
        expected["reused"] = "interrupted"
    for name, process in traces.items():
        writer = TraceWriter(tmp_path / f"{name}.zarr", header={"process": process})
        writer.write(network("loss", 0, 1.0))
        writer.commit()
        writer._store.abandon()
        with TraceReader(writer.path) as reader:
            assert reader.status == expected[name], name
    child.communicate(b"\n")
    with TraceReader(tmp_path / "alive.zarr") as reader:
        assert reader.status == "interrupted"
    path = recorded_in(tmp_path / "elsewhere.zarr")
    for file in [path, *path.rglob("*")]:
        os.utime(file, (1e9, 1e9))
    with TraceReader(path) as reader:
        assert reader.status == "interrupted"


@every_format
def test_tensors_of_other_dtypes(tmp_path: Path, suffix: str) -> None:
    """Tensors of every dtype that a trace can hold come back bit for bit, 8 bit floats and complex halves included."""
    path = tmp_path / f"run{suffix}"
    raw = torch.randint(0, 2, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    messages: list[Message] = [network(name, 0, raw.view(e.dtype)) for name, e in ENCODINGS.items()]
    write(path, messages)
    with TraceReader(path) as reader:
        assert all(map(same, reader.messages(), messages))
        assert [stream.dtype for stream in reader.streams] == list(ENCODINGS)
        for name, encoding in ENCODINGS.items():
            _, data = reader.array(name)
            assert isinstance(data, np.ndarray)
            assert data.dtype == encoding.readable


@every_format
def test_reading_by_hand(tmp_path: Path, suffix: str) -> None:
    """The programs in docs/trace-format.md read every message of a trace without this project."""
    path = tmp_path / f"run{suffix}"
    write(path, run(), own_pool_bytes=4096, commit_rows=20)
    document = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if ("import zarr" in block) == (suffix == ".zarr"))
    program = compile(block, "trace-format.md", "exec")
    for number, message in enumerate(run()):
        names: dict[str, Any] = {"path": str(path), "number": number}
        exec(program, names)
        assert names["where"] == (message.kind, message.key, message.global_step)
        if message.data is None:
            assert names["data"] is None
        else:
            assert np.array_equal(names["data"], encode(message.data))
            assert names["data"].shape == message.data.shape


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_a_long_kind_with_a_long_tag(suffix: str, tmp_path: Path) -> None:
    """Names that are short enough by themselves are cut where they stand together."""
    sent = torch.arange(20000.0)
    with TraceWriter(tmp_path / f"run{suffix}") as writer:
        for end in "xy":
            message = NetworkMessage(
                kind="k" * 150, tag="t" * 149 + end, data=sent, global_step=0, train_step=0, epoch=0
            )
            writer.write(message)
    with tracer.open(tmp_path / f"run{suffix}") as reader:
        assert [one.tag[-1] for one in reader] == ["x", "y"]
        assert all(torch.equal(one.data, sent) for one in reader)


def test_a_table_for_notebooks(tmp_path: Path) -> None:
    """What there is of each kind; a name of any kind is text."""
    with TraceWriter(tmp_path / "run.zarr") as writer:
        for step in range(3):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="<script>", data=torch.zeros(2), **where))
    with TraceReader(tmp_path / "run.zarr") as trace:
        told = trace._repr_html_()
    assert "<tr><td>&lt;script&gt;</td><td>1</td><td>3</td><td>24</td></tr>" in told
    assert "<script>" not in told
