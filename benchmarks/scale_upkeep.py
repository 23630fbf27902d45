"""What `verify`, `convert` and `recover` cost of long traces: memory, and the processor beside a bare checked read.

A trace of some scalar streams is written for each number of messages. Each command works on it in a process of its own:
its peak of resident memory is that of the process, with Python, numpy and (for copies) torch; its time is what the
processor spent on the call, without imports. Beside it stands that of a bare checked read of the same trace: a
`TraceReader` is opened, which checks the journal, and `TraceReader.arrays` reads all data and compares it with its
checksums. A copy is removed before the next command.

The program ends with 1 if a command takes more memory or more of the processor than the bounds say.

    python benchmarks/scale_upkeep.py [--messages 1200000 12000000] [--streams 12] [--suffix .zarr] [--folder /tmp]
        [--megabytes 400] [--ratio 3] [--json]
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tracer.format.tables import Stream
from tracer.trace.columns import Columns, Group
from tracer.trace.writer import TraceWriter

COMMANDS = ("read", "verify", "convert", "recover")
_BLOCK = 65_536
"""Messages that are made at once."""


def write(path: Path, messages: int, streams: int) -> None:
    """A trace of scalars: in each step one message of each stream."""
    names = [Stream("biases", False, f"layer{number}", "default", "", "float32", None, 0) for number in range(streams)]
    with TraceWriter(path) as writer:
        for first in range(0, messages, _BLOCK):
            numbers = np.arange(first, min(first + _BLOCK, messages))
            counters = np.zeros((len(numbers), 4), np.int64)
            counters[:, 0] = counters[:, 1] = numbers // streams
            values = np.sin(numbers).astype(np.float32)
            data = [Group(np.arange(len(numbers)), values, "float32")]
            writer.write_columns(Columns(names, numbers % streams, counters, data))


def read(path: Path, _: Path) -> int:
    """All data, compared with its checksums; how many messages."""
    from tracer.trace.reader import TraceReader

    with TraceReader(path) as reader:
        return sum(len(one.rows) for one in reader.arrays())


def verify(path: Path, _: Path) -> int:
    """How many messages are right."""
    from tracer.upkeep.verify import verify as check

    report = check(path)
    return report.messages - report.damaged if report.complete else 0


def convert(path: Path, copy: Path) -> int:
    """How many messages were copied."""
    from tracer.upkeep.convert import convert as copy_to

    return int(copy_to(path, copy)["messages"])


def recover(path: Path, copy: Path) -> int:
    """How many messages were saved."""
    from tracer.upkeep.recover import recover as save

    return save(path, copy).saved


def measure(command: str, path: Path, copy: Path) -> dict[str, Any]:
    """Run a command in this process."""
    copies = command in ("convert", "recover")
    modules = ("torch", "tracer.upkeep.convert", "tracer.upkeep.recover") if copies else ("tracer.upkeep.verify",)
    for module in modules:  # before the clock starts
        importlib.import_module(module)
    call: dict[str, Callable[[Path, Path], int]] = {
        "read": read, "verify": verify, "convert": convert, "recover": recover,
    }  # fmt: skip
    began, cpu = time.perf_counter(), time.process_time()
    messages = call[command](path, copy)
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"command": command, "messages": messages, "cpu": cpu, "seconds": seconds, "peak": peak}


def remove(trace: Path) -> None:
    """Remove a trace, if it is there."""
    shutil.rmtree(trace) if trace.is_dir() else trace.unlink(missing_ok=True)


def in_process(*arguments: Any) -> str:
    """What this program prints, in a process of its own, when it is given these arguments."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, nargs="+", default=[1_200_000, 12_000_000])
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--suffix", choices=(".zarr", ".h5"), default=".zarr")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument("--megabytes", type=float, default=400, help="the most that a command may take")
    parser.add_argument("--ratio", type=float, default=3, help="of its processor time to that of a bare checked read")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write(Path(given.write[0]), int(given.write[1]), given.streams)
        return 0
    if given.case:
        command, path, copy = given.case
        print(json.dumps(measure(command, Path(path), Path(copy))))
        return 0
    found = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path, copy = Path(folder) / f"run{given.suffix}", Path(folder) / f"copy{given.suffix}"
        for messages in given.messages:
            in_process("--streams", given.streams, "--write", path, messages)
            bare = None
            for command in dict.fromkeys(["read", *given.commands]):
                one = json.loads(in_process("--case", command, path, copy))
                bare = one if bare is None else bare
                one["ratio"] = one["cpu"] / bare["cpu"]
                one["right"] = one["messages"] == messages
                found.append(one)
                remove(copy)
            remove(path)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print("command  messages    peak MB  CPU s  us a message  of a bare read")
        for one in found:
            each = 1e6 * one["cpu"] / max(1, one["messages"])
            print(
                f"{one['command']:<7}  {one['messages']:>10,}  {one['peak'] / 1e6:>7.0f}  {one['cpu']:>5.1f}"
                f"  {each:>12.2f}  {one['ratio']:>14.2f}"
            )
    judged = [one for one in found if one["command"] != "read"]
    late = any(one["peak"] > given.megabytes * 1e6 or one["ratio"] > given.ratio for one in judged)
    return int(late or not all(one["right"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
