"""What opening a trace must not do, whatever is in it: run code, read other files, take memory, hang, or tell lies."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tracer import layout
from tracer.errors import TraceCorruptError, TraceFormatError, TracerError
from tracer.layout import Column
from tracer.messages import Message, ModuleMessage, NetworkMessage
from tracer.reader import TraceReader
from tracer.recover import recover
from tracer.stores import open_store
from tracer.verify import verify
from tracer.writer import TraceWriter

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)
CASES = int(os.environ.get("TRACEREEL_FUZZ_CASES", "150"))
"""Damaged traces of each format; set it to some thousands for a longer search."""
TABLES_HAVE_CHECKSUMS = {".zarr": True, ".h5": len(Column) > 11}
"""Whether a flipped bit in the journal or the declarations is noticed where it makes sense."""
JOURNAL_LINE = b'{"stream":{"id":0,'


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


def write(path: Path) -> Path:
    """Write the small run, in several commits."""
    with TraceWriter(path, own_pool_bytes=1000, chunk_bytes=512, commit_rows=7, header={"seed": 3}) as writer:
        writer.note({"silent": ["fc"]})
        for message in messages():
            writer.write(message, {"rows": 3} if message.kind == "activations" else None)
    return path


def facts(message: Message) -> tuple[Any, ...]:
    """All that a message says, comparable."""
    data = message.data
    bits = None if data is None else (data.dtype, tuple(data.shape), layout.encode(data).tobytes())
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


@pytest.fixture(scope="module", params=FORMATS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run in each format, undamaged."""
    return write(tmp_path_factory.mktemp("whole") / f"run{request.param}")


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
            assert not readable, what
        except Exception as error:
            error.add_note(what)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
