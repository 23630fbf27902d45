"""What storing costs: messages written to a trace and read back, beside the bare system calls for the same bytes.

Workloads: messages of 1 MB (each stream has a pool of its own), of 4 KB (160 streams, packed into shared pools), and
scalars. Each is written by `TraceWriter.write_many` in batches, as the recorder's thread does it, and read back as
arrays (`TraceReader.arrays`), as messages (`TraceReader.messages`) and by a replay to a subscriber that does nothing.

Beside them stand, for the same bytes: ``os.write`` of pieces of 64 KB into one file (also with a CRC-32C of each), a
sequential read of it (also so), and bare ``write_direct_chunk`` calls of h5py. The variants take turns, several rounds
in one process; what is printed is the median of the rounds, and ratios are formed within a round. Times are CPU time of
the process, system time included, because the wall clock of a shared machine measures its neighbours; reads come from
the page cache, into which a first reading (a replay, where it is a trace) has brought what the disk holds, and what is
written has been written and removed once before.

    python benchmarks/storage.py [--rounds 3] [--scale 1.0] [--only 1MB,4KB,scalars,open] [--folder /tmp] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import tracer
from tracer.format.checksum import crc32c
from tracer.memory import new_memory
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

FORMATS = (".zarr", ".h5")
PIECE = 65536
BATCH = 1000


class Nothing(tracer.Receiver):
    """A subscriber that hears everything and does nothing."""

    name = "nothing"
    scope = "message"

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return True

    def receive(self, message: Message) -> tuple[Message, ...]:
        return ()


class Workload:
    """So many messages of one size, spread over streams as a network's layers are."""

    def __init__(self, name: str, messages: int, elements: int, streams: int) -> None:
        self.name = name
        self.messages = messages
        self.streams = streams
        self.nbytes = 4 * max(elements, 1)
        shape = (elements,) if elements else ()
        # more than the processor's cache holds, so that reading them costs what it costs in a training
        kept = max(2, min(messages, (256 << 20) // max(self.nbytes, 4096)))
        # large ones begin at a page, as the copies do that a recorder makes
        space = torch.from_numpy(new_memory(kept * self.nbytes)).view(torch.float32).reshape(kept, *shape)
        self.data = list(space.normal_().unbind(0))

    def batches(self) -> Iterator[list[Message]]:
        """The messages, as the recorder's queue holds them."""
        made = self._make()
        while batch := list(itertools.islice(made, BATCH)):
            yield batch

    def _make(self) -> Iterator[Message]:
        data = itertools.cycle(self.data)
        for number in range(self.messages):
            step = number // self.streams
            fields: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "data": next(data)}
            if self.streams == 1:
                yield NetworkMessage(kind="loss", **fields)
            else:
                yield ModuleMessage(kind="activations", module=f"layer{number % self.streams}", **fields)


def clocked(action: Callable[[], Any]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def write_trace(load: Workload, path: Path) -> float:
    """CPU seconds of writing, without those of making the messages."""
    spent = 0.0
    begin = time.process_time()
    writer = TraceWriter(path)
    spent += time.process_time() - begin
    for batch in load.batches():
        begin = time.process_time()
        writer.write_many(batch)
        spent += time.process_time() - begin
    begin = time.process_time()
    writer.finish()
    return spent + time.process_time() - begin


def write_raw(load: Workload, path: Path, checksum: bool = False) -> float:
    """CPU seconds of ``os.write`` in pieces of 64 KB; messages smaller than that are joined before the clock starts."""
    many = max(1, PIECE // load.nbytes)
    joined = [
        torch.stack(load.data[begin : begin + many]).numpy().reshape(-1).view("u1")
        for begin in range(0, len(load.data), many)
    ]
    left = load.messages * load.nbytes
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    begin = time.process_time()
    for block in itertools.cycle(joined):
        for start in range(0, len(block), PIECE):
            piece = block[start : min(start + PIECE, start + left)]
            if checksum:
                crc32c(piece)
            left -= os.write(file, piece.data)
        if left <= 0:
            break
    os.close(file)
    return time.process_time() - begin


def write_chunks(load: Workload, path: Path) -> float:
    """CPU seconds of bare ``write_direct_chunk`` calls, of a message of 1 MB, or of 64 KB of smaller ones."""
    many = max(1, PIECE // load.nbytes)
    blocks = [torch.stack(load.data[b : b + many]).numpy() for b in range(0, len(load.data) - many + 1, many)]
    chunks = load.messages // many
    begin = time.process_time()
    with h5py.File(path, "w", libver="latest") as file:
        shape = blocks[0].shape[1:]
        dataset = file.create_dataset(
            "x", (chunks * many, *shape), "f4", chunks=(many, *shape), maxshape=(None, *shape)
        )
        where = [0] * len(shape)
        for number, block in zip(range(chunks), itertools.cycle(blocks), strict=False):
            dataset.id.write_direct_chunk((number * many, *where), block)
    return time.process_time() - begin


def read_raw(path: Path, checksum: bool = False) -> float:
    """CPU seconds of reading a file into one buffer of a megabyte, again and again."""
    buffer = bytearray(1 << 20)
    whole = np.frombuffer(buffer, np.uint8)
    pieces = [whole[start : start + 4 * PIECE] for start in range(0, len(buffer), 4 * PIECE)]
    begin = time.process_time()
    with path.open("rb", buffering=0) as file:
        if not checksum:
            while file.readinto(buffer):
                pass
        else:
            # in pieces that are still in the cache when they are checksummed
            for piece in itertools.cycle(pieces):
                if not file.readinto(piece.data):
                    break
                crc32c(piece)
    return time.process_time() - begin


def read_arrays(path: Path) -> None:
    with TraceReader(path) as reader:
        for batch in reader.arrays():
            del batch


def read_messages(path: Path) -> None:
    with TraceReader(path) as reader:
        for message in reader.messages():
            del message


def replay_unverified(path: Path) -> None:
    with TraceReader(path, verify=False) as reader:
        tracer.replay(reader, Nothing())


def written(write: Callable[[], float], path: Path) -> float:
    """CPU seconds of the second of two writings: the first meets memory that a virtual machine gives back when idle."""
    write()
    remove(path)
    return write()


def cache(path: Path, read: Callable[[], object]) -> None:
    """Bring all files from the disk into the page cache by reading them, as when something is read a second time.

    What the writer left there is given up first: one wrote past it, and of the others it depends on the pieces in which
    they wrote how fast it is read, and mapped.
    """
    for name in path.rglob("*") if path.is_dir() else (path,):
        if name.is_file():
            with name.open("rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read()


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def one_round(load: Workload, folder: Path) -> dict[str, float]:
    """Messages per CPU second of each variant."""
    seconds: dict[str, float] = {}
    raw = folder / "raw"
    seconds["write raw"] = written(lambda: write_raw(load, raw), raw)
    cache(raw, lambda: read_raw(raw))
    seconds["read raw"] = read_raw(raw)
    seconds["read raw crc32c"] = read_raw(raw, checksum=True)
    remove(raw)
    seconds["write raw crc32c"] = written(lambda: write_raw(load, raw, checksum=True), raw)
    remove(raw)
    seconds["write bare h5py"] = written(lambda: write_chunks(load, raw), raw)
    remove(raw)
    for suffix in FORMATS:
        path = folder / f"run{suffix}"
        seconds[f"write {suffix}"] = written(lambda path=path: write_trace(load, path), path)  # type: ignore[misc]
        cache(path, lambda path=path: tracer.replay(path, Nothing()))  # type: ignore[misc]
        seconds[f"arrays {suffix}"] = clocked(lambda path=path: read_arrays(path))
        seconds[f"messages {suffix}"] = clocked(lambda path=path: read_messages(path))
        seconds[f"replay {suffix}"] = clocked(lambda path=path: tracer.replay(path, Nothing()))
        seconds[f"not verified {suffix}"] = clocked(lambda path=path: replay_unverified(path))
        remove(path)
    return {what: load.messages / spent for what, spent in seconds.items()}


RATIOS = {
    "write raw crc32c": "write raw",
    "read raw crc32c": "read raw",
    "write .zarr": "write raw",
    "write .h5": "write bare h5py",
    "arrays .zarr": "read raw",
    "messages .zarr": "read raw",
    "replay .zarr": "read raw",
    "not verified .zarr": "read raw",
    "arrays .h5": "read raw",
    "messages .h5": "read raw",
    "replay .h5": "read raw",
    "not verified .h5": "read raw",
}
"""Which variant each is compared with."""


def opening(folder: Path, scale: float) -> dict[str, float]:
    """Milliseconds (wall, median of 5) to open 1,000 streams, and to open 600 MB and read one small stream of it."""
    found: dict[str, float] = {}
    wide, long = Workload("", 20_000, 16, 1000), Workload("", max(200, int(600 * scale)), 262_144, 20)
    for suffix in FORMATS:
        for what, load in (("open 1000 streams", wide), ("one small stream", long)):
            path = folder / f"run{suffix}"
            with TraceWriter(path) as writer:
                for number, batch in enumerate(load.batches()):
                    writer.write_many(batch)
                    for step in range(100):
                        where = {"global_step": 1000 * number + step, "train_step": step, "epoch": 0}
                        writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), **where))
            times = []
            for _ in range(5):
                begin = time.perf_counter()
                with TraceReader(path) as reader:
                    if what == "one small stream":
                        reader.array("loss")
                    else:
                        assert len(reader.streams) == 1001
                    times.append(time.perf_counter() - begin)
            found[f"{what} {suffix}"] = 1000 * statistics.median(times)
            remove(path)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="how many of the messages: 2,000, 100,000 and 500,000")
    parser.add_argument("--only", default="1MB,4KB,scalars,open")
    parser.add_argument("--folder", help="where the traces are written; by default where temporary files are")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = arguments.only.split(",")
    loads = [
        make
        for name, messages, elements, streams in (
            ("1MB", 2_000, 262_144, 20),
            ("4KB", 100_000, 1024, 160),
            ("scalars", 500_000, 0, 1),
        )
        if name in wanted
        for make in [Workload(name, max(BATCH, int(messages * arguments.scale)), elements, streams)]
    ]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        for load in loads:
            one_round(load, folder)  # a virtual machine gets memory slowly that it did not use before
            rounds = [one_round(load, folder) for _ in range(arguments.rounds)]
            result[load.name] = {
                what: {
                    "messages_per_cpu_second": round(statistics.median(one[what] for one in rounds)),
                    "mb_per_cpu_second": round(statistics.median(one[what] for one in rounds) * load.nbytes / 1e6, 1),
                    "ratio": round(statistics.median(one[what] / one[RATIOS[what]] for one in rounds), 3)
                    if what in RATIOS
                    else None,
                    "beside": RATIOS.get(what),
                }
                for what in rounds[0]
            }
        if "open" in wanted:
            result["open"] = {what: round(value, 2) for what, value in opening(folder, arguments.scale).items()}
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    for load in loads:
        print(f"{load.messages} messages of {load.nbytes} bytes, {load.streams} streams, per CPU second:")
        for what, found in result[load.name].items():
            ratio = f"{found['ratio']:6.2f} x {found['beside']}" if found["ratio"] is not None else ""
            print(f"  {what:16} {found['messages_per_cpu_second']:10,d} {found['mb_per_cpu_second']:9,.0f} MB {ratio}")
    for what, value in result.get("open", {}).items():
        print(f"{what:28} {value:7.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
