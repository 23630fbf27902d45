"""How much memory recording takes: when the disk is slow, and when one tensor is larger than what may wait.

Each case is a process of its own, whose store sleeps at each write, so that messages come faster than they are written
and the queue is full nearly all the time. What is printed is the peak of the process's resident memory above what it
had before, beside the bound of the queue; with ``on_full="wait"`` all messages must be in the trace afterwards, and
with ``"drop"`` those that are not must be counted in it. The program ends with 1 if a case takes more than its bound
and 64 MB, or if a message is missing and not counted.

Then an embedding of 268 MB is trained, bare and with its weights, gradients and updates recorded through a queue of
16 MiB, each in a process of its own. What is printed is the difference of their peaks, which may be the queue, 1.2
times the embedding, and 64 MB.

    python benchmarks/memory.py [--queue 64] [--megabytes 400] [--rate 100] [--size 1048576] [--rows 1048576]
        [--steps 4] [--folder /tmp] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tracer
import tracer.trace.writer
from tracer.messaging.messages import NetworkMessage
from tracer.recording.recorder import Recorder
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

FORMATS = (".zarr", ".h5")
SLACK = 64_000_000
"""Bytes that recording may take besides its queue."""
QUEUE_OF_TRAINING = 16 << 20
"""Bytes that may wait of what is recorded of the embedding."""
LARGEST = 1.2
"""How many times the embedding may be in memory besides the queue."""
_COLUMNS = 64
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


def train(path: Path | None, rows: int, steps: int) -> dict[str, Any]:
    """Train an embedding in this process, recorded if there is a path."""

    def run(rows: int, steps: int, path: Path | None) -> None:
        model = nn.Embedding(rows, _COLUMNS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.randint(0, rows, (64,))
        capture = tracer.Capture(kinds=["weights", "weight_gradients", "weight_updates"])
        recording: Any = nullcontext()
        if path is not None:
            recording = tracer.record(path, model, optimizer, capture=capture, queue_bytes=QUEUE_OF_TRAINING)
        with recording:
            for _ in range(steps):
                optimizer.zero_grad()
                model(ids).square().sum().backward()
                optimizer.step()

    run(16, 2, None if path is None else path.with_stem("first"))  # what is imported and allocated once
    before = resident()
    peak = Peak()
    begin = time.monotonic()
    run(rows, steps, path)
    seconds = time.monotonic() - begin
    extra = peak.stop() - before
    kept = 0
    if path is not None:
        with TraceReader(path) as reader:
            kept = len(reader)
    return {"extra": extra, "seconds": seconds, "kept": kept}


def compare_training(command: list[str], rows: int, steps: int) -> dict[str, Any]:
    """What recording adds to the peak of a training, in each format."""
    found: dict[str, Any] = {"bytes": 4 * _COLUMNS * rows, "queue": QUEUE_OF_TRAINING}
    found["allowed"] = QUEUE_OF_TRAINING + LARGEST * found["bytes"] + SLACK
    for case in ("bare", *FORMATS):
        done = subprocess.run([*command, "--case", "train", case], stdout=subprocess.PIPE, text=True, check=True)
        found[case] = json.loads(done.stdout)
    for suffix in FORMATS:
        one = found[suffix]
        one["above"] = one["extra"] - found["bare"]["extra"]
        one["right"] = one["kept"] == 3 * steps and one["above"] <= found["allowed"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", type=float, default=64, help="megabytes that may wait")
    parser.add_argument("--megabytes", type=float, default=400, help="that are recorded in each case")
    parser.add_argument("--rate", type=float, default=100, help="megabytes a second that the disk takes")
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of a message")
    parser.add_argument("--rows", type=int, default=1 << 20, help="of the embedding, which has 256 bytes in each")
    parser.add_argument("--steps", type=int, default=4, help="of its training")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not _STATUS.exists():
        print("the memory of a process is read from /proc, which this machine does not have", file=sys.stderr)
        return 2
    if given.case:
        suffix, on_full = given.case
        if suffix == "train":
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                path = None if on_full == "bare" else Path(folder) / f"run{on_full}"
                print(json.dumps(train(path, given.rows, given.steps)))
            return 0
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
    trained = compare_training([sys.executable, __file__, *sys.argv[1:]], given.rows, given.steps)
    if given.json:
        print(json.dumps({"slow disk": found, "training": trained}, indent=2))
    else:
        print("format  on_full  queue MB  peak extra MB  above the queue  ratio  messages  kept  dropped")
        for one in found:
            megabytes = [one[name] / 1e6 for name in ("queue", "extra", "above")]
            print(
                f"{one['format']:<6}  {one['on_full']:<7}  {megabytes[0]:>8.1f}  {megabytes[1]:>13.1f}"
                f"  {megabytes[2]:>+15.1f}  {one['ratio']:>5.2f}  {one['messages']:>8}  {one['kept']:>4}"
                f"  {one['dropped']:>7}"
            )
        print(f"\nan embedding of {trained['bytes'] / 1e6:.0f} MB, a queue of {trained['queue'] / 1e6:.1f} MB")
        print("format  peak MB  above the bare one  allowed  seconds")
        for case in ("bare", *FORMATS):
            one = trained[case]
            above = f"{one.get('above', 0) / 1e6:>18.1f}  {trained['allowed'] / 1e6:>7.1f}"
            print(f"{case:<6}  {one['extra'] / 1e6:>7.1f}  {above}  {one['seconds']:>7.1f}")
    wrong = any(one["above"] > SLACK or not one["right"] for one in found)
    return int(wrong or not all(trained[suffix]["right"] for suffix in FORMATS))


if __name__ == "__main__":
    sys.exit(main())
