"""How much memory recording takes when the disk is slow: at most what may wait for it, and 64 MB.

Each case is a process of its own, whose store sleeps at each write, so that messages come faster than they are written
and the queue is full nearly all the time. What is printed is the peak of the process's resident memory above what it
had before, beside the bound of the queue; with ``on_full="wait"`` all messages must be in the trace afterwards, and
with ``"drop"`` those that are not must be counted in it. The program ends with 1 if a case takes more than its bound
and 64 MB, or if a message is missing and not counted.

    python benchmarks/memory.py [--queue 64] [--megabytes 400] [--rate 100] [--size 1048576] [--folder /tmp] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import tracer.trace.writer
from tracer.messaging.messages import NetworkMessage
from tracer.recording.recorder import Recorder
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

FORMATS = (".zarr", ".h5")
SLACK = 64_000_000
"""Bytes that recording may take besides its queue."""
_STATUS = Path("/proc/self/status")


class SlowStore:
    """A store on a disk of so many bytes a second."""

    def __init__(self, store: Any, rate: float) -> None:
        self._store, self._rate = store, rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._store, name, value)

    def append(self, name: str, rows: Any, checksums: list[int] | None = None) -> int:
        first = self._store.append(name, rows, checksums)
        time.sleep(rows.nbytes / self._rate)
        return first


def resident() -> int:
    """Bytes of memory that this process has, without the pages of files."""
    found = [line.split()[1] for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon")]
    return int(found[0]) * 1024


class Peak:
    """Looks at the memory every few milliseconds, from a thread of its own."""

    def __init__(self) -> None:
        self.nbytes = resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.nbytes = max(self.nbytes, resident())

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.nbytes


def measure(path: Path, on_full: str, queue: int, total: int, rate: float, size: int) -> dict[str, Any]:
    """Record so many bytes in messages of one size, in this process."""
    create = tracer.trace.writer.create_store
    tracer.trace.writer.create_store = lambda *given, **options: SlowStore(create(*given, **options), rate)
    with TraceWriter(path.with_stem("first")) as writer:  # what is imported and allocated once is not the queue's
        for step in range(5):
            data = torch.ones(size // 4)
            writer.write(NetworkMessage(kind="batch", data=data, global_step=step, train_step=step, epoch=0))
    recorder = Recorder(TraceWriter(path), queue_bytes=queue, on_full=on_full)
    count = total // size
    before = resident()
    peak = Peak()
    begin = time.monotonic()
    for step in range(count):
        data = torch.full((size // 4,), float(step))
        recorder.receive(NetworkMessage(kind="batch", data=data, global_step=step, train_step=step, epoch=0))
        if on_full == "drop":  # a training does something between two messages, but the disk is slower still
            time.sleep(size / rate / 2)
    recorder.close()
    extra = peak.stop() - before
    with TraceReader(path) as reader:
        kept, dropped = len(reader), sum(reader.dropped.values())
    return {
        "format": path.suffix,
        "on_full": on_full,
        "queue": queue,
        "extra": extra,
        "above": extra - queue,
        "ratio": extra / queue,
        "messages": count,
        "kept": kept,
        "dropped": dropped,
        "seconds": time.monotonic() - begin,
        "right": kept + dropped == count and (dropped > 0) == (on_full == "drop"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", type=float, default=64, help="megabytes that may wait")
    parser.add_argument("--megabytes", type=float, default=400, help="that are recorded in each case")
    parser.add_argument("--rate", type=float, default=100, help="megabytes a second that the disk takes")
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of a message")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not _STATUS.exists():
        print("the memory of a process is read from /proc, which this machine does not have", file=sys.stderr)
        return 2
    if given.case:
        suffix, on_full = given.case
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            sizes = (int(given.queue * 1e6), int(given.megabytes * 1e6), given.rate * 1e6, given.size)
            print(json.dumps(measure(Path(folder) / f"run{suffix}", on_full, *sizes)))
        return 0
    found = []
    for suffix in FORMATS:
        for on_full in ("wait", "drop"):
            command = [sys.executable, __file__, *sys.argv[1:], "--case", suffix, on_full]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout))
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print("format  on_full  queue MB  peak extra MB  above the queue  ratio  messages  kept  dropped")
        for one in found:
            megabytes = [one[name] / 1e6 for name in ("queue", "extra", "above")]
            print(
                f"{one['format']:<6}  {one['on_full']:<7}  {megabytes[0]:>8.1f}  {megabytes[1]:>13.1f}"
                f"  {megabytes[2]:>+15.1f}  {one['ratio']:>5.2f}  {one['messages']:>8}  {one['kept']:>4}"
                f"  {one['dropped']:>7}"
            )
    return int(any(one["above"] > SLACK or not one["right"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
