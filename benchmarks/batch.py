"""What a batch costs beside the work itself: planning, each part, a second run, memory; and how it scales.

Traces are made in a temporary folder: many small ones (copies under their own names) for planning and for what a part
costs, and some with activations of which SVCCA takes long for scaling. A batch of few small ones is computed by
default, in one process and with two workers, as a command and as a function of this process. Numbers of workers take
turns; ratios are formed within a round, and their median is printed. What a part costs is the time of
`analyze.batching.tasks.run` over that of the replay alone, in processor time. Where more workers than there are
processors would be needed, the curve is simulated: the part times that were recorded, taken in the order of the plan by
N workers, each task waiting for the one process that hands them out, whose time per task is measured, too. python
benchmarks/batch.py [--rounds 3] [--traces 500] [--few 60] [--scale 1.0] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

import analyze
from analyze.batching.batch import batch
from analyze.batching.batch_plan import plan_batch
from analyze.batching.engines import Engine, Processes, Running, environment
from analyze.batching.folder import folder_at
from analyze.batching.tasks import run
from analyze.batching.units import Outcome, Receipt, Task
from analyze.batching.work import Work
from tracer import ModuleMessage, NetworkMessage, TraceWriter

SPECS = ["norm", "ratio", "message_mean", "svcca:tag=default", "loss"]
WAYS: Mapping[str, int | None] = {"default": None, "here": 0, "two": 2}
"""How a batch of small traces is computed, and the number of workers that says so."""
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)


def small(path: Path, steps: int = 20) -> None:
    """A trace as that of a short run: four layers, a thousand messages or so a hundred kilobytes."""
    with TraceWriter(path) as writer:
        for step in range(steps):
            at = {"global_step": step, "train_step": step, "epoch": 0}
            for module in range(4):
                for kind in ("activations", "weights", "weight_updates"):
                    writer.write(ModuleMessage(kind=kind, module=f"layer{module}", data=torch.randn(16, 8), **at))
            writer.write(NetworkMessage(kind="loss", data=torch.rand(()), **at))


def heavy(path: Path, steps: int, seed: int) -> None:
    """A trace with activations of two layers of which a similarity takes some hundredths of a second."""
    generator = torch.Generator().manual_seed(seed)
    with TraceWriter(path) as writer:
        for step in range(steps):
            at = {"global_step": step, "train_step": step, "epoch": 0}
            for module in ("conv", "fc"):
                data = torch.randn(512, 192, generator=generator)
                writer.write(ModuleMessage(kind="activations", module=module, data=data, **at))


def planning(folder: Path, count: int) -> dict[str, float]:
    """Seconds to plan, and to find that nothing is to be done: as a function, and as a command."""
    first = folder / "small" / "run0.zarr"
    first.parent.mkdir()
    small(first)
    for number in range(1, count):
        shutil.copytree(first, first.with_name(f"run{number}.zarr"))
    began = time.perf_counter()
    planned = plan_batch(first.parent, SPECS, folder / "planned")
    seconds = time.perf_counter() - began
    assert len(planned.units) == count * len(SPECS)
    assert not planned.failures
    few = [str(first.with_name(f"run{number}.zarr")) for number in range(min(200, count))]
    batch(few, "norm", folder / "again", workers=2)
    began = time.perf_counter()
    again = batch(few, "norm", folder / "again", workers=2)
    second = time.perf_counter() - began
    assert again.computed == 0
    began = time.perf_counter()
    command = [sys.executable, "-m", "tracereel", "batch", *few, "-s", "norm", "--out", str(folder / "again")]
    subprocess.run(command, check=True, env=environment(), capture_output=True)
    return {
        "traces": count,
        "units": len(planned.units),
        "seconds": seconds,
        "second_run_traces": len(few),
        "second_run_seconds": second,
        "second_run_command_seconds": time.perf_counter() - began,
    }


def processor_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def few_small(folder: Path, rounds: int, count: int = 60) -> dict[str, dict[str, float]]:
    """Seconds of a batch of small traces: by default, in one process, with two workers; as command, and as function.

    Ratios are of the default over the better of the other two, formed within a round.
    """
    runs = [str(folder / "small" / f"run{number}.zarr") for number in range(count)]
    for number in range(count):
        if not Path(runs[number]).exists():
            shutil.copytree(runs[0], runs[number])

    def command(way: str) -> None:
        words = [word for spec in SPECS for word in ("-s", spec)]
        workers = [] if WAYS[way] is None else ["--workers", str(WAYS[way])]
        arguments = ["batch", *runs, *words, *workers, "--force", "--out", str(folder / f"command_{way}")]
        subprocess.run([sys.executable, "-m", "tracereel", *arguments], check=True, capture_output=True)

    def function(way: str) -> None:
        assert not batch(runs, SPECS, folder / f"function_{way}", workers=WAYS[way], force=True).failures

    found: dict[str, dict[str, float]] = {}
    for name, run_once in (("command", command), ("function", function)):
        run_once("here")  # what is imported, or read for the first time, is not a part of any
        walls: dict[str, list[float]] = {way: [] for way in WAYS}
        busy: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                before, began = processor_seconds(), time.perf_counter()
                run_once(way)
                walls[way].append(time.perf_counter() - began)
                busy[way].append(processor_seconds() - before)
        found[name] = {"traces": float(count)}
        for what, seconds in (("wall", walls), ("cpu", busy)):
            found[name] |= {f"{way}_{what}": statistics.median(seconds[way]) for way in WAYS}
            ratios = [a / min(b, c) for a, b, c in zip(*(seconds[way] for way in WAYS), strict=True)]
            found[name][f"default_over_best_{what}"] = statistics.median(ratios)
    return found


def per_part(folder: Path, rounds: int) -> dict[str, float]:
    """Milliseconds of processor time that a part costs beyond opening the trace and replaying it."""
    trace = folder / "small" / "run0.zarr"
    out = folder / "per_part"
    costs = []
    for _ in range(5 * rounds):
        planned = plan_batch(trace, "norm", out, force=True, workers=1)
        (task,) = planned.tasks
        began = time.process_time()
        analyze.analyze(trace, "norm")
        alone = time.process_time() - began
        began = time.process_time()
        receipt = run(task, str(out), replace=True)
        costs.append(time.process_time() - began - alone)
        assert receipt.outcomes[0].status == "computed"
    return {"median_ms": 1e3 * statistics.median(costs), "worst_ms": 1e3 * max(costs)}


def handing_out(count: int = 300) -> float:
    """Seconds of the process that hands tasks out, for each: what a task costs it, but for the work."""

    class Nothing(Engine):
        """An engine whose workers take no time."""

        def submit(self, task: Task, out: str, replace: bool) -> Running:
            outcomes = [Outcome(unit.id, "computed", 1, 1.0) for unit in task.units]
            done: Running = Future()
            done.set_result(Receipt(outcomes, "nowhere"))
            return done

        def close(self) -> None:
            """Nothing is left."""

    with tempfile.TemporaryDirectory() as name:
        small(Path(name) / "run.zarr", steps=count)
        planned = plan_batch(Path(name) / "run.zarr", "norm", Path(name) / "out", part_bytes=1, workers=count)
        with folder_at(Path(name) / "out") as folder:
            work = Work(planned, folder, lambda event: None, False)
            began = time.process_time()
            work.run(Nothing())
            return (time.process_time() - began) / len(planned.tasks)


def scaling(folder: Path, rounds: int, scale: float) -> tuple[dict[str, float], list[float]]:
    """Wall seconds with one and with two workers, taking turns, and the seconds of the parts."""
    runs = folder / "heavy"
    runs.mkdir()
    for seed in range(8):
        heavy(runs / f"run{seed}.zarr", max(int(24 * scale), 2), seed)
    ratios, walls, busy, parts = [], {1: [], 2: []}, [], []
    for _ in range(rounds):
        for workers in (1, 2):
            times: list[tuple[float, float]] = []

            def heard(event: Mapping[str, Any], times: list[tuple[float, float]] = times) -> None:
                if event["event"] == "part":
                    times.append((time.perf_counter(), event["seconds"]))

            out = folder / f"scaling{workers}"
            results = batch(runs, "svcca:tag=default", out, workers=workers, force=True, part_bytes=1, progress=heard)
            assert not results.failures
            # from the first part on, because the start of processes is not what grows with the work
            walls[workers].append((times[-1][0] - times[workers - 1][0]) / (len(times) - workers))
            if workers == 1:
                parts = [seconds for _, seconds in times]
            else:
                span = times[-1][0] - times[workers - 1][0]
                busy.append(sum(seconds for _, seconds in times[workers:]) / (workers * span))
        ratios.append(walls[1][-1] / walls[2][-1])
    return {
        "parts": len(parts),
        "part_seconds": statistics.median(parts),
        "two_over_one": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "busy": statistics.median(busy),
        "processors": float(len(os.sched_getaffinity(0))),
        "load": os.getloadavg()[0],
    }, parts


def memory(folder: Path, scale: float) -> dict[str, float]:
    """Megabytes that a worker has at most, above an idle one, with parts of 32 MiB of a trace much larger than that."""
    path = folder / "large.zarr"
    generator = torch.Generator().manual_seed(0)
    with TraceWriter(path) as writer:
        for step in range(int(400 * scale)):
            at = {"global_step": step, "train_step": step, "epoch": 0, "module": "fc"}
            writer.write(ModuleMessage(kind="weights", data=torch.randn(256, 1024, generator=generator), **at))
    planned = plan_batch(path, "norm", folder / "memory", part_bytes=32 << 20, workers=1)
    idle = peak = 0.0
    with contextlib.closing(Processes(1)) as engine:
        (unit,) = plan_batch(folder / "small" / "run0.zarr", "norm", folder / "memory", workers=1).tasks
        for task in (unit, *planned.tasks):
            running = engine.submit(task, str(folder / "memory"), True)
            pid = engine.busy[running].processes[0].pid
            running.result()
            engine.receipt(running)
            status = Path(f"/proc/{pid}/status").read_text()
            peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
            idle = idle or peak
    shutil.rmtree(path)
    return {
        "trace_mb": int(400 * scale) * 256 * 1024 * 4 / 1e6,
        "idle_mb": idle,
        "peak_mb": peak,
        "above_mb": peak - idle,
    }


def simulated(parts: Sequence[float], per_task: float, tasks: int) -> list[dict[str, float]]:
    """The speed-up of N workers on so many tasks, of the part times that were recorded, again and again."""
    seconds = [parts[number % len(parts)] for number in range(tasks)]
    total = sum(seconds)
    curve = []
    for workers in WORKERS:
        free = [0.0] * workers
        handed = end = 0.0
        for one in seconds:
            # the process that hands tasks out does one at a time
            handed = max(handed, heapq.heappop(free)) + per_task
            heapq.heappush(free, handed + one)
            end = max(end, handed + one)
        curve.append({"workers": workers, "speedup": total / end, "efficiency": total / end / workers})
    return curve


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--traces", type=int, default=500)
    parser.add_argument("--few", type=int, default=60, help="how many small traces a small batch has")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--tasks", type=int, default=20000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, Any] = {"planning": planning(folder, given.traces)}
        found["few_small"] = few_small(folder, given.rounds, given.few)
        found["per_part"] = per_part(folder, given.rounds)
        found["per_task_seconds"] = handing_out()
        found["scaling"], parts = scaling(folder, given.rounds, given.scale)
        found["memory"] = memory(folder, given.scale)
    shorter = [seconds / 10 for seconds in parts]
    for name, times in (("simulated", parts), ("simulated_shorter", shorter)):
        curve = simulated(times, found["per_task_seconds"], given.tasks)
        bend = next((one["workers"] for one in curve if one["efficiency"] < 0.9), None)
        found[name] = {"part_seconds": statistics.median(times), "bends_at": bend, "curve": curve}
    if given.json:
        print(json.dumps(found, indent=1))
        return
    plan, cost, grows, held = found["planning"], found["per_part"], found["scaling"], found["memory"]
    print(f"planning {plan['traces']} traces x {len(SPECS)} subscribers: {plan['seconds']:.2f} s")
    print(
        f"second run of {plan['second_run_traces']} traces: {plan['second_run_seconds']:.2f} s, as a command "
        f"{plan['second_run_command_seconds']:.2f} s"
    )
    for name, one in found["few_small"].items():
        told = "; ".join(f"{way} {one[f'{way}_wall']:.2f} s, {one[f'{way}_cpu']:.2f} s CPU" for way in WAYS)
        over = f"{one['default_over_best_wall']:.2f}, CPU {one['default_over_best_cpu']:.2f}"
        print(f"{one['traces']:.0f} small traces, as a {name}: {told}; default over the best: {over}")
    print(f"a part costs {cost['median_ms']:.1f} ms of processor time over its replay (worst {cost['worst_ms']:.1f})")
    print(f"handing a task out costs {1e3 * found['per_task_seconds']:.2f} ms")
    print(
        f"two workers over one: {grows['two_over_one']:.2f} ({grows['lowest']:.2f}-{grows['highest']:.2f}), "
        f"{grows['parts']} parts of {grows['part_seconds']:.2f} s, {grows['processors']:.0f} processors, "
        f"load {grows['load']:.1f}; two workers had a part to compute {100 * grows['busy']:.0f} % of the time"
    )
    print(
        f"memory: {held['above_mb']:.0f} MB above an idle worker's {held['idle_mb']:.0f} MB, "
        f"trace of {held['trace_mb']:.0f} MB in parts of 34 MB"
    )
    for name in ("simulated", "simulated_shorter"):
        curve = found[name]
        print(f"simulated, {given.tasks} tasks of {curve['part_seconds']:.3f} s:")
        for one in curve["curve"]:
            print(f"  {one['workers']:>5} workers: {one['speedup']:8.1f} x, {100 * one['efficiency']:5.1f} %")
        bend = curve["bends_at"]
        print(f"below 90 % from {bend} workers on" if bend else "not below 90 % up to 1,000 workers")


if __name__ == "__main__":
    main()
