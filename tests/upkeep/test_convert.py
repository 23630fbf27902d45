"""`convert` changes how a trace is stored, and nothing of what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes
from tracer.errors import (
    CaptureError,
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    UnknownNameError,
)
from tracer.format.encodings import encode
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.convert import convert
from tracer.upkeep.verify import verify

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)
OTHER = {".zarr": ".h5", ".h5": ".zarr"}


def facts(message: Message) -> tuple[Any, ...]:
    """All that a message says, comparable."""
    data = message.data
    bits = None if data is None else (data.dtype, tuple(data.shape), encode(data).tobytes())
    counters = (message.global_step, message.train_step, message.epoch, message.call)
    return (type(message), message.kind, message.key, message.tag, message.leaf, counters, bits)


def contents(path: Path) -> dict[str, Any]:
    """All that a trace says, save for where its copies came from."""
    with TraceReader(path) as reader:
        return {
            "messages": [(facts(m), m.sampling) for m in reader],
            "header": reader.header,
            "notes": [note for note in reader.notes if "converted" not in note],
            "status": (reader.status, reader.info["ended"]),
            "run": (reader.info["run_id"], reader.info["created"]),
        }


def messages(steps: int = 8) -> list[Message]:
    """Messages of many kinds and dtypes, some of them sampled."""
    generator = torch.Generator().manual_seed(2)
    made: list[Message] = []
    for step in range(steps):
        where: dict[str, Any] = {"global_step": step, "train_step": step % 4, "epoch": step // 4}
        large = torch.randn(40, 50, generator=generator)
        made += [
            NetworkMessage(kind="epoch_started", **where),
            ModuleMessage(kind="weights", module="a.fc", data=large, **where),
            # a sampling that changes during the run
            ModuleMessage(
                kind="activations", module="a", data=large[: 3 + step % 2], sampling={"rows": 3 + step % 2}, **where
            ),
            ModuleMessage(kind="activations", module="", data=large[:0], tag="probe", **where),
            ModuleMessage(kind="activations", module="b", data=large.bfloat16(), leaf="1.0", call=2, **where),
            NetworkMessage(kind="loss", data=torch.tensor(complex(step, -step)), **where),
        ]
    return made


def write(path: Path, status: str = "finished") -> Path:
    """A trace of these messages, with notes."""
    writer = TraceWriter(path, header={"argv": ["x"], "odd": float("inf")}, own_pool_bytes=4000)
    writer.note({"silent": ["c"]})
    for message in messages():
        writer.write(message)
    writer.note({"problem": {"what": "d"}})
    writer.finish(status)
    return path


@every_format
@pytest.mark.parametrize("status", ["finished", "failed: ValueError: lr", "interrupted"])
def test_there_and_back(tmp_path: Path, suffix: str, status: str) -> None:
    """Into the other format and back, and with other chunks, a trace says what it said, bit for bit."""
    path = write(tmp_path / f"run{suffix}", status)
    there, back = tmp_path / f"there{OTHER[suffix]}", tmp_path / "new" / f"back{suffix}"
    told = convert(path, there, chunk_bytes=100, own_pool_bytes=100)
    convert(there, back)
    expected = contents(path)
    assert contents(there) == expected
    assert contents(back) == expected
    assert (told["messages"], told["left_out"], told["status"]) == (48, 0, status)
    assert verify(back).intact
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["new", path.name, there.name])


def test_provenance(tmp_path: Path) -> None:
    """Each copy says from what it was made, with which filters, by which release."""
    path = write(tmp_path / "run.zarr")
    convert(path, tmp_path / "a.h5", kinds="weights", steps=(0, 4))
    convert(tmp_path / "a.h5", tmp_path / "b.zarr")
    with TraceReader(tmp_path / "b.zarr") as reader:
        first, second = [note["converted"] for note in reader.notes if "converted" in note]
    assert (first["from"], first["kinds"], first["steps"]) == (str(path), ["weights"], [0, 4])
    assert second["from"] == str(tmp_path / "a.h5")
    assert first["by"].startswith("tracereel ")


@every_format
@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({"kinds": "weights"}, lambda m: m.kind == "weights"),
        ({"kinds": ["weights", "loss"], "steps": (2, 5)}, lambda m: m.kind in ("weights", "loss") and 2 <= m.step < 5),
        ({"modules": "a*"}, lambda m: m.key is not None and m.key.startswith("a")),
        ({"tags": "!default"}, lambda m: m.tag != "default"),
        ({"steps": (1, None, 3)}, lambda m: m.global_step in (1, 4, 7)),
        ({"steps": (100, 200)}, lambda m: False),
    ],
)
def test_filters(tmp_path: Path, suffix: str, filters: dict[str, Any], wanted: Any) -> None:
    """Only what passes the filters is copied, in its order."""
    path = write(tmp_path / f"run{suffix}")
    told = convert(path, tmp_path / "part.zarr", **filters)
    expected = [facts(message) for message in messages() if wanted(message)]
    with TraceReader(tmp_path / "part.zarr") as reader:
        assert [facts(message) for message in reader] == expected
    assert (told["messages"], told["left_out"]) == (len(expected), 48 - len(expected))


@every_format
def test_of_a_killed_run(tmp_path: Path, suffix: str) -> None:
    """A trace whose writer was killed is copied up to its last commit, and stays marked as interrupted."""
    path = tmp_path / f"run{suffix}"
    program = (
        "import os, signal, sys, torch\n"
        "from tracer import NetworkMessage, TraceWriter\n"
        "writer = TraceWriter(sys.argv[1])\n"
        "for step in range(5):\n"
        "    where = dict(global_step=step, train_step=step, epoch=0)\n"
        "    writer.write(NetworkMessage(kind='loss', data=torch.tensor(1.0), **where))\n"
        "    if step == 3: writer.commit()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    processes.run([sys.executable, "-c", program, path], check=False, cwd=Path(__file__).parents[2])
    there, back = tmp_path / f"there{OTHER[suffix]}", tmp_path / f"back{suffix}"
    assert convert(path, there)["status"] == "interrupted"
    convert(there, back)
    assert contents(back) == contents(there) == contents(path)
    assert len(contents(back)["messages"]) == 4
    assert contents(back)["status"] == ("interrupted", None)


@every_format
def test_what_is_refused(tmp_path: Path, suffix: str) -> None:
    """Nothing is overwritten, nothing is made within the source, and a mistake leaves nothing behind."""
    path = write(tmp_path / f"run{suffix}")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TraceExistsError, match="already exists"):
        convert(path, path)
    (tmp_path / "dangling.zarr").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TraceExistsError, match="already exists"):
        convert(path, tmp_path / "dangling.zarr")
    (tmp_path / "dangling.zarr").unlink()
    with pytest.raises(TraceExistsError, match="lies within"):
        convert(path, path / "inner.zarr")
    with pytest.raises(TraceNotFoundError):
        convert(tmp_path / f"none{suffix}", tmp_path / "out.zarr")
    with pytest.raises(TraceFormatError, match="suffix"):
        convert(path, tmp_path / "out.txt")
    with pytest.raises(UnknownNameError, match="weights"):
        convert(path, tmp_path / "out.zarr", kinds="wieghts")
    with pytest.raises(UnknownNameError, match="probe"):
        convert(path, tmp_path / "out.zarr", tags="prob")
    with pytest.raises(CaptureError, match="steps"):
        convert(path, tmp_path / "out.zarr", steps=(5, 2))
    if os.geteuid():
        os.chmod(tmp_path, 0o500)
        with pytest.raises(TraceError, match="cannot write"):
            convert(path, tmp_path / "out.zarr")
        os.chmod(tmp_path, 0o700)
    assert sorted(tmp_path.iterdir()) == before


@every_format
def test_damage_leaves_no_copy(tmp_path: Path, suffix: str) -> None:
    """A trace that is damaged is not copied in part; the error says so, and nothing is left."""
    path = write(tmp_path / f"run{suffix}")
    needle = next(m for m in messages() if m.kind == "weights").data.numpy().tobytes()
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    file = next(file for file in files if needle in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.find(needle) + 100] ^= 1
    file.write_bytes(data)
    with pytest.raises(TraceCorruptError, match="weights"):
        convert(path, tmp_path / f"out{OTHER[suffix]}")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
