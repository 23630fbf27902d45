"""Metadata of HDF5 that a kill tore is put back, to the byte, wherever the tear is; and nothing else is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import tracer
from tracer.errors import TraceError
from tracer.memory import PAGE
from tracer.messaging.messages import ModuleMessage
from tracer.stores.disk.files import LocalFile
from tracer.stores.hdf5 import torn
from tracer.stores.hdf5.mended import Mended
from tracer.stores.hdf5.store import create
from tracer.stores.hdf5.torn import checksum, restored
from tracer.stores.opening import open_store
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

CROSSING = PAGE - 1
"""A place in a file at which every block crosses the border of a page."""


class Watched(Mended):
    """A file that remembers what HDF5 asked of it."""

    def __init__(self, path: Path) -> None:
        file = LocalFile(path)
        file.hold()
        super().__init__(file)
        self.asked: dict[int, int] = {}

    def readinto(self, buffer: Any) -> int:
        at = self.tell()
        self.asked[at] = super().readinto(buffer)
        return self.asked[at]


def metadata(path: Path) -> dict[int, int]:
    """Where HDF5 looks for metadata of the arrays, and for how many bytes."""
    watched = Watched(path)
    with h5py.File(watched, "r") as file:
        found: list[Any] = []
        file.visititems(lambda name, item: found.append(item))
        for item in found:
            if isinstance(item, h5py.Dataset):
                item.id.chunk_iter(lambda stored: None)
    watched.file.close()
    return watched.asked


def rewritten(old: bytes, new: bytes, asked: dict[int, int]) -> Iterator[tuple[int, bytes, bytes]]:
    """Blocks that were there, and were written again with something else: where, what was there and what is."""
    for at, nbytes in asked.items():
        if at and old[at : at + nbytes] != new[at : at + nbytes]:
            size = torn._header_bytes(new[at : at + nbytes]) if new[at : at + 4] == b"OHDR" else nbytes
            before, after = old[at : at + size], new[at : at + size]
            if before != after and is_whole(before):
                assert is_whole(after)
                yield at, before, after


def is_whole(block: bytes) -> bool:
    """Whether a block has the checksum that it says."""
    return checksum(block[:-4]).to_bytes(4, "little") == block[-4:]


def kind_of(block: bytes) -> str:
    """The signature of a block; the pages of large ones have none."""
    return block[:4].decode() if block[:2] in (b"EA", b"OH", b"OC") else "page"


@pytest.mark.parametrize(
    ("compression", "headers"),
    [
        ("zstd", 4),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((None, 4), (None, 1), ("zstd", 1))),
    ],
)
def test_a_block_torn_anywhere_is_as_it_was(tmp_path: Path, compression: str | None, headers: int) -> None:
    """Blocks as HDF5 wrote them at one commit, with the end that they had at the commit before.

    Headers of arrays are written at each commit, and are looked at in one of so many.
    """
    path, rng = tmp_path / "run.h5", np.random.default_rng(0)
    store = create(path)
    store.create("a", dtype="float32", shape=(16,), chunk_bytes=64, compression=compression)
    store.create("flat", dtype="uint8", shape=(), chunk_bytes=64)
    store.seal()
    old, seen = b"", dict.fromkeys(("OHDR", "EAHD", "EAIB", "EASB", "EADB"), 0)
    # block by block of the index at first, then through those that are larger
    for commit, rows in enumerate([*range(1, 9)] * 4 + [200, 3, 700, 1, 5000, 40, 8000, 1000]):
        store.append("a", np.full((rows, 16), commit, np.float32))
        store.append("flat", np.full(rows * 64 + commit, commit, np.uint8))
        store.commit()
        new = path.read_bytes()
        for _, before, after in rewritten(old, new, metadata(path)):
            if kind_of(before) == "OHDR" and commit % headers:
                continue
            changed = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
            for cut in rng.integers(changed[0] + 1, changed[-1] + 1, 2).tolist():
                block = after[:cut] + before[cut:]
                assert restored(block, CROSSING) in ((before,) if cut <= len(before) - 4 else (before, after))
                assert restored(block, 0) == block or len(block) > PAGE, "within a page nothing is torn"
                seen[kind_of(before)] += 1
        old = new
    store.close()
    assert min(seen.values()) > 10, seen


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_so_are_the_pages_of_an_array_of_very_many_chunks(tmp_path: Path, compression: str | None) -> None:
    """Larger blocks are written page by page, and a block above them says which pages there are."""
    path, rng = tmp_path / "run.h5", np.random.default_rng(0)
    store = create(path)
    store.create("a", dtype="float32", shape=(4,), chunk_bytes=16, compression=compression)
    store.seal()
    old, seen = b"", {"page": 0, "EASB": 0}
    # the first data block of more than a page is that of chunk 131,060
    for rows in (131_000, 100, 5, 500, 400, 40, 1000, 1, 1000):
        store.append("a", rng.random((rows, 4), np.float32))
        store.commit()
        new = path.read_bytes()
        for _, before, after in rewritten(old, new, metadata(path)) if old else ():
            changed = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
            for cut in rng.integers(changed[0] + 1, max(changed[-1] - 3, changed[0] + 2), 3).tolist():
                assert restored(after[:cut] + before[cut:], CROSSING) == before
                if kind_of(before) in seen:
                    seen[kind_of(before)] += 1
        old = new
    store.close()
    assert min(seen.values()) >= 6, seen


def test_nothing_is_made_that_was_never_there(tmp_path: Path) -> None:
    """A flipped bit gives the block as it is or as it was, and bytes of other kinds are left alone."""
    path, rng = tmp_path / "run.h5", np.random.default_rng(0)
    store = create(path)
    store.create("a", dtype="float32", shape=(16,), chunk_bytes=64)
    store.seal()
    store.append("a", np.zeros((300, 16), np.float32))
    store.commit()
    data = path.read_bytes()
    blocks = {at: nbytes for at, nbytes in metadata(path).items() if is_whole(data[at : at + nbytes])}
    blocks |= {
        at: torn._header_bytes(data[at:]) for at, nbytes in metadata(path).items() if data[at : at + 4] == b"OHDR"
    }
    assert {kind_of(data[at:]) for at in blocks} >= {"OHDR", "EAHD", "EAIB", "EADB"}
    for at, size in blocks.items():
        block = data[at : at + size]
        assert restored(block, CROSSING) is block
        for place in rng.integers(0, size, 20).tolist():
            flipped = bytearray(block)
            flipped[place] ^= 1 << int(rng.integers(8))
            # a bit of what follows from the rest may be right again, by the checksum
            assert restored(bytes(flipped), CROSSING) in (flipped, block)
    for nonsense in (b"", b"OHDR", b"OHDR\2\0\xff", b"EADB", b"EASB" + bytes(60), b"EAHD" + bytes(68), bytes(8196)):
        assert restored(nonsense, CROSSING) == nonsense
        assert restored(bytes(rng.integers(0, 256, len(nonsense), np.uint8)), CROSSING)[:4] != b"EADB"
    store.close()


def message(step: int, module: int, count: int) -> ModuleMessage:
    """What module `module` records in a step."""
    data = torch.full((count,), float(step * 10 + module))
    where = {"global_step": step, "train_step": step, "epoch": 0}
    return ModuleMessage(kind="activations", module=f"fc{module}", data=data, **where)


def torn_traces(folder: Path, compression: str, most: int) -> Iterator[tuple[Path, str, int]]:
    """Traces whose writer was killed as it wrote a block again; which kind it was, and the messages committed.

    There are no more than three of a kind, and no more than `most`.
    """
    path = folder / "run.h5"
    taken: dict[str, int] = {}
    with TraceWriter(path, compression=compression, chunk_bytes=4096) as writer:
        old = b""
        for step in range(260):
            # of sizes that are kept alone, and in one array with others
            for module, count in enumerate((1500, 1300, 3 + step % 7)):
                writer.write(message(step, module, count))
            writer.commit()
            new = path.read_bytes()
            if step > 5:
                for at, before, after in rewritten(old, new, metadata(path)):
                    kind = kind_of(before)
                    cuts = [cut - at for cut in range(-(-at // PAGE) * PAGE, at + len(before), PAGE) if cut > at]
                    cuts = [cut for cut in cuts if after[:cut] != before[:cut] and after[cut:] != before[cut:]]
                    if not cuts or taken.get(kind, 0) == 3:
                        continue
                    taken[kind] = taken.get(kind, 0) + 1
                    killed = folder / f"killed_{step}_{at}.h5"
                    # what was written before it is in place, too: the numbers, which lie behind the old end
                    killed.write_bytes(old[:at] + after[: cuts[0]] + old[at + cuts[0] :] + new[len(old) :])
                    yield killed, kind, 3 * step
                    if sum(taken.values()) == most:
                        return
            old = new


@pytest.mark.parametrize(
    ("compression", "most"),
    [
        ("none", 3),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("zstd", 3), ("none", 100), ("zstd", 100))),
    ],
)
def test_a_trace_whose_index_was_torn_has_all_that_was_committed(tmp_path: Path, compression: str, most: int) -> None:
    """HDF5 itself refuses such a file; whatever reads a trace does not notice."""
    kinds = set()
    for path, kind, committed in torn_traces(tmp_path, compression, most):
        kinds.add(kind)
        with pytest.raises((OSError, RuntimeError, KeyError), match="checksum"):
            metadata(path)
        trace = TraceReader(path)
        assert trace.status == "recording", "the writer is in this process"
        messages = list(trace.messages())
        assert len(messages) == committed
        for number, one in enumerate(messages):
            want = message(number // 3, number % 3, (1500, 1300, 3 + number // 3 % 7)[number % 3])
            assert (one.module, one.global_step) == (want.module, want.global_step)
            assert torch.equal(one.data, want.data)
        report = tracer.verify(path)
        assert (report.intact, report.messages) == (True, committed), report.problems
        loss = tracer.recover(path, path.with_suffix(".recovered.h5"))
        assert (loss.lossless, loss.saved, loss.problems) == (True, committed, [])
    assert kinds, "none of the blocks lay across two pages"


def test_one_that_is_followed_goes_on_when_the_block_is_whole_again(tmp_path: Path) -> None:
    """A reader may see a write that is not complete, on some systems, while its writer lives."""
    path = tmp_path / "run.h5"
    store = create(path)
    store.create("a", dtype="float32", shape=(16,), chunk_bytes=64)
    store.seal()
    before = path.read_bytes()
    at = size = 0
    rows = itertools.count(1)
    for written in rows:
        store.append("a", np.full((1, 16), written, np.float32))
        store.commit()
        after = path.read_bytes()
        data = [(at, size) for at, size in metadata(path).items() if kind_of(after[at:]) == "EADB"]
        crossing = [(at, size) for at, size in data if at // PAGE != (at + size - 1) // PAGE]
        if crossing and any(after[at : at + size] != before[at : at + size] for at, size in crossing):
            at, size = crossing[-1]
            if len(before) >= at + size and before[at : at + 4] == b"EADB":
                cut = -(-at // PAGE) * PAGE - at
                if after[at : at + cut] != before[at : at + cut]:
                    break
        before = after
        assert written < 3000
    follower = open_store(path)
    whole = after[at : at + size]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(whole[:cut] + before[at + cut : at + size])
    follower.refresh()
    seen = follower.read("a", 0, written - 1)
    assert (seen[:, 0] == np.arange(1, written)).all()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(whole)
    store.append("a", np.full((5, 16), -1, np.float32))
    store.commit()
    follower.refresh()
    assert follower.length("a") == written + 5
    assert (follower.read("a", written - 1, written + 5)[:, 0] == [written, -1, -1, -1, -1, -1]).all()
    follower.close()
    store.close()


def test_a_closed_file_is_not_mended(tmp_path: Path) -> None:
    """Nothing tears it any more, so what is wrong with it is damage."""
    for rows in range(20, 400):
        path = tmp_path / f"{rows}.h5"
        store = create(path)
        store.create("a", dtype="float32", shape=(16,), chunk_bytes=64)
        store.seal()
        store.append("a", np.zeros((rows, 16), np.float32))
        store.close()
        data = bytearray(path.read_bytes())
        blocks = [(at, size) for at, size in metadata(path).items() if kind_of(data[at:]) == "EADB"]
        at, size = blocks[-1]
        last = at + 18 + (data[at + 18 : at + size].find(b"\xff" * 8) // 8 - 1) * 8
        if at // PAGE != (at + size) // PAGE and last > at + 18:
            break
    data[last + 8 : last + 16] = data[last : last + 8]
    path.write_bytes(data)
    assert restored(bytes(data[at : at + size]), at) != data[at : at + size], "a kill could have left it so"
    damaged = open_store(path)
    with pytest.raises(TraceError, match="checksum"):
        damaged.read("a", 0, rows)
    damaged.close()
