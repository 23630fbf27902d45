"""A wrong byte in the metadata of HDF5 is found and put right in memory, wherever it is; of two wrong ones none is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import tracer
from tests.test_torn import metadata
from tracer.errors import TraceCorruptError
from tracer.messaging.messages import ModuleMessage, NetworkMessage
from tracer.stores.flipped import LONGEST, is_header, righted
from tracer.stores.torn import checksum
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.verify import verify


def blocks_of(path: Path, kind: bytes) -> list[tuple[bytes, bool]]:
    """The blocks of a kind that HDF5 reads of a file, and whether each is followed by other bytes."""
    data = path.read_bytes()
    found = []
    for at, nbytes in metadata(path).items():
        block = data[at : at + nbytes]
        if block[:4] == kind:
            found.append((block, kind == b"OHDR"))
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all kinds of blocks: many links and attributes, headers that go on, and indexes of many chunks."""
    path = tmp_path_factory.mktemp("flipped") / "file.h5"
    with h5py.File(path, "w", libver="latest") as root:
        for number in range(150):
            root.create_group(f"group/module.with.a.name.{number}")
        for number in range(12):
            root["group"].attrs[f"attribute {number}"] = number
        for number in range(5):
            root.create_group("few").create_group("x") if number == 0 else root["few"].create_group(str(number))
        for name, chunks, compression in (
            ("few chunks", 30, None),
            ("many chunks", 40_000, None),
            ("gzip", 90, "gzip"),
        ):
            array = root.create_dataset(
                name,
                (0,),
                "u1",
                maxshape=(None,),
                chunks=(1,) if compression is None else (64,),
                compression=compression,
            )
            array.resize((chunks * array.chunks[0],))
            array[:] = 1
    return path


@pytest.mark.parametrize(
    "kind",
    [
        b"OHDR",
        b"OCHK",
        b"EAHD",
        b"EAIB",
        b"EASB",
        b"EADB",
        b"FRHP",
        b"FHDB",
        b"FHIB",
        b"BTHD",
        b"BTLF",
        b"BTIN",
    ],
)
def test_each_kind_of_block(file: Path, kind: bytes) -> None:
    """Every block of every kind is right as it is, and is found again from any one flipped bit."""
    found = blocks_of(file, kind)
    assert found, "HDF5 reads none"
    rng = random.Random(kind)
    for block, _ in found:
        assert righted(block) == (block, None)
    tries = 0
    for block, followed in rng.sample(found, min(6, len(found))):
        if len(block) > LONGEST:
            continue
        end = len(block)
        if followed:  # by bytes that nothing is known of
            flags, start = block[5], 6
            start += (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
            width = 1 << (flags & 3)
            end = start + width + int.from_bytes(block[start : start + width], "little") + 4
            if end > len(block):
                continue
        elif kind in (b"BTLF", b"BTIN"):
            end = 6 + 11 + 4  # the first record, which each has, and as many bytes of what follows
        for place in [*rng.sample(range(end), min(6, end)), *range(4)][: 3 if len(block) > 4096 else 10]:
            damaged = bytearray(block)
            damaged[place] ^= 1 << rng.randrange(8)
            if kind in (b"BTLF", b"BTIN") and place in (4, 5):
                continue  # how long its records are stands there
            assert righted(bytes(damaged)) == (block, place), place
            tries += 1
    assert tries


def test_a_page_of_an_index() -> None:
    """Pages of the index of more than 100,000 chunks have no signature."""
    rng = np.random.default_rng(1)
    for entry, place in ((8, 1024 * 8 - 1), (8, 1024 * 8 + 2), (14, 2)):
        block = rng.integers(0, 256, 1024 * entry, np.uint8).tobytes()
        block += checksum(block).to_bytes(4, "little")
        assert righted(block) == (block, None)
        assert righted(block[:place] + bytes([block[place] ^ 32]) + block[place + 1 :]) == (block, place)


def test_a_byte_of_any_value() -> None:
    """In short blocks a byte may have become any other one."""
    block = b"OCHK" + bytes(range(7, 100))

    block += checksum(block).to_bytes(4, "little")
    for place in range(len(block)):
        for value in (0, 0x5A, 0xFF):
            if value != block[place]:
                assert righted(block[:place] + bytes([value]) + block[place + 1 :]) == (block, place)


def test_what_is_no_single_byte(file: Path) -> None:
    """Where two bytes are wrong, or what it is of is not known, a block stays what it is."""
    rng = np.random.default_rng(0)
    for kind in (b"OCHK", b"EAHD", b"EAIB", b"OHDR"):
        for block, _ in blocks_of(file, kind)[:3]:
            damaged = bytearray(block)
            damaged[9] ^= 0xFF
            damaged[14] ^= 0xFF
            assert righted(bytes(damaged)) == (bytes(damaged), None)
    for size in (0, 3, 4, 7, 8, 60, 512, 8196, 70_000):
        data = rng.integers(0, 256, size, np.uint8).tobytes()
        assert righted(data) == (data, None)
    assert is_header(b"OHDX...")
    assert is_header(b"OHDR")
    assert not is_header(b"OH")
    assert not is_header(b"OCHK")


def test_searches_end() -> None:
    """What may be spent on a search is asked for, and where it may not be, a block stays what it is."""
    block = b"OCHK" + bytes(range(7, 100))
    block += checksum(block).to_bytes(4, "little")
    damaged = block[:20] + b"?" + block[21:]
    asked: list[int] = []
    assert righted(damaged, lambda nbytes: asked.append(nbytes) or False) == (damaged, None)  # type: ignore[func-returns-value]
    assert asked == [97 * 97 * 255]
    assert righted(block, lambda nbytes: False) == (block, None)
    assert righted(damaged) == (block, 20)


def write(path: Path) -> int:
    """A run of several streams of each kind; how many messages."""
    with TraceWriter(path, own_pool_bytes=2000, chunk_bytes=176, header={"argv": ["x"]}) as writer:
        for step in range(5):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
            for name in "abc":
                data = torch.full((30, 20), 3.25 + step)
                writer.write(ModuleMessage(kind="weights", module=name, data=data, **where))
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.5 + step), **where))
    return 20


def test_traces(tmp_path: Path) -> None:
    """Of a trace with a flipped bit anywhere in its metadata, all is saved, and the byte is told."""
    path, bad = tmp_path / "run.h5", tmp_path / "bad.h5"
    count = write(path)
    whole = path.read_bytes()
    with TraceReader(path) as reader:
        expected = [(message.kind, message.global_step, message.data) for message in reader]
    rng = random.Random(3)
    refused = 0
    for at, nbytes in sorted(metadata(path).items()):
        place = at + rng.randrange(min(nbytes, 100))
        bad.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
        saved = tmp_path / f"{at}.h5"
        loss = tracer.recover(bad, saved)
        assert (loss.saved, loss.lost, loss.lossless) == (count, 0, True), place
        with TraceReader(saved) as reader:
            found = [(message.kind, message.global_step, message.data) for message in reader]
            assert reader.status == "finished"
        for one, other in zip(found, expected, strict=True):
            assert one[:2] == other[:2]
            assert torch.equal(one[2], other[2])
        try:
            TraceReader(bad).close()
        except TraceCorruptError:
            refused += 1
            report = verify(bad)
            assert (report.intact, report.damaged, report.messages) == (False, 0, count)
            assert any(f"byte {place} of the file's metadata" in problem.what for problem in report.problems) or at < 48
    assert refused > 20
