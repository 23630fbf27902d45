"""What a trace on an object store costs: MB/s written and read, beside bare puts and gets of the same bytes.

The object store is obstore's in memory. Each request to it takes some time longer (30 ms by default), as one to S3
does, and all of them share a line of some bandwidth (625 MB/s, 5 Gbit/s): so what is measured is how many requests wait
for each other, and what is computed meanwhile. Beside `TraceWriter` and `TraceReader` stand bare puts of objects of
16 MiB, and gets of ranges of 4 MiB, 32 at once, over the same line. Times are those of a clock on the wall, because
waiting is what they are about; the variants take turns, and what is printed is the median of the rounds, with ratios
formed within a round.

    python benchmarks/objects.py [--rounds 3] [--scale 1.0] [--latency 0.03] [--bandwidth 625e6] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import torch
from obstore.store import MemoryStore

from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.stores import objects as client
from tracer.stores.objects import PARALLEL, RANGE_BYTES
from tracer.stores.zarr.writing import SHARD_BYTES
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

URL = "s3://bench/run.zarr"
BATCH = 1000


def workload(name: str, scale: float) -> list[Message]:
    """Messages of one size; the large ones are of 20 streams, the small ones of 160."""
    size, count, modules = {"1MB": (262144, 256, 20), "4KB": (1024, 40000, 160), "scalars": (1, 200000, 1)}[name]
    tensors = [torch.randn(size) for _ in range(7)]
    made: list[Message] = []
    for number in range(int(count * scale)):
        where: dict[str, Any] = {"global_step": number // modules, "train_step": number // modules, "epoch": 0}
        data = tensors[number % 7]
        if modules > 1:
            made.append(ModuleMessage(kind="activations", module=f"layer{number % modules}", data=data, **where))
        else:
            made.append(NetworkMessage(kind="loss", data=data[0], **where))
    return made


def slowly(latency: float, bandwidth: float) -> None:
    """Let each request take longer, and its bytes wait for those of others."""
    line = threading.Lock()
    free = [0.0]  # when the line is

    def travel(nbytes: int) -> None:
        with line:
            begin = max(time.perf_counter(), free[0])
            end = free[0] = begin + nbytes / bandwidth
        time.sleep(max(0.0, latency + end - time.perf_counter()))

    for name in ("put", "get", "head", "list", "delete"):
        function = getattr(obstore, name)

        def request(*args: Any, function: Callable[..., Any] = function, **options: Any) -> Any:
            found = function(*args, **options)
            sent = len(args[2]) if len(args) > 2 else 0
            received = found.range[1] - found.range[0] if hasattr(found, "range") else 0
            travel(sent + received)
            return found

        setattr(obstore, name, request)


def timed(function: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def bare(store: Any, data: bytes, threads: ThreadPoolExecutor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Puts and gets of the same bytes."""
    pieces = [data[begin : begin + SHARD_BYTES] for begin in range(0, len(data), SHARD_BYTES)]

    def put() -> None:
        list(
            threads.map(
                lambda one: obstore.put(store, f"bare/{one[0]}", one[1], use_multipart=False), enumerate(pieces)
            )
        )

    def get() -> None:
        def part(place: tuple[int, int]) -> int:
            options: Any = {"range": (place[1], place[1] + RANGE_BYTES)}
            return len(obstore.get(store, f"bare/{place[0]}", options=options).bytes())

        places = [(number, begin) for number, one in enumerate(pieces) for begin in range(0, len(one), RANGE_BYTES)]
        assert sum(threads.map(part, places)) == len(data)

    yield "put", put
    yield "get", get


def measure(name: str, rounds: int, scale: float, threads: ThreadPoolExecutor) -> dict[str, Any]:
    """MB/s, ratios and numbers of one workload."""
    messages = workload(name, scale)
    nbytes = sum(message.data.nbytes for message in messages if message.data is not None)
    found: dict[str, list[float]] = {}
    opening: list[float] = []
    commits: list[float] = []
    for _ in range(rounds):
        store = MemoryStore()
        client._connect = lambda *_, store=store: store

        def write() -> None:
            with TraceWriter(URL) as writer:
                for begin in range(0, len(messages), BATCH):
                    writer.write_many(messages[begin : begin + BATCH])

        def read() -> None:
            with TraceReader(URL) as reader:
                assert sum(len(batch.rows) for batch in reader.arrays()) == len(messages)

        times = {"written": timed(write), "read": timed(read)}
        opening.append(timed(lambda: TraceReader(URL).close()))
        for what, function in bare(store, bytes(nbytes), threads):
            times[what] = timed(function)
        for what, seconds in times.items():
            found.setdefault(what, []).append(nbytes / seconds / 1e6)
        store = MemoryStore()
        client._connect = lambda *_, store=store: store
        writer = TraceWriter(URL, commit_seconds=1000.0)
        for _ in range(3):
            writer.write_many(messages[:160])
            commits.append(timed(writer.commit))
        writer.finish()
    median = {what: statistics.median(values) for what, values in found.items()}
    return {
        "workload": name,
        "MB": nbytes / 1e6,
        **{f"MB/s {what}": value for what, value in median.items()},
        "written / put": statistics.median(a / b for a, b in zip(found["written"], found["put"], strict=True)),
        "read / get": statistics.median(a / b for a, b in zip(found["read"], found["get"], strict=True)),
        "ms to open": statistics.median(opening) * 1e3,
        "ms to commit 160 messages": statistics.median(commits) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds that each request takes longer")
    parser.add_argument("--bandwidth", type=float, default=625e6, help="bytes a second that all requests share")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    slowly(arguments.latency, arguments.bandwidth)
    told = []
    with ThreadPoolExecutor(PARALLEL) as threads:
        for name in ("1MB", "4KB", "scalars"):
            told.append(measure(name, arguments.rounds, arguments.scale, threads))
            if not arguments.json:
                print(
                    "  ".join(
                        f"{key} {value:.3g}" if key != "workload" else f"{value:8}" for key, value in told[-1].items()
                    )
                )
    if arguments.json:
        print(json.dumps({"latency": arguments.latency, "rounds": arguments.rounds, "results": told}, indent=2))


if __name__ == "__main__":
    main()
