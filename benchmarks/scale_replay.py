"""What an answer costs on replay where messages are small: answers in a second of CPU, in stacks and one by one.

Each trace has streams of one size, recorded step by step as a training does. Each metric replays it twice in turns:
as `tracer.replay` does by itself, which hands out small messages in stacks, and with a guard around each message, which
has it publish them one by one. The answers of both are compared to the bit. Counted is all that an answer costs: to
open the trace, to plan, to read, to compute, and to gather the answers in a table; the median over the rounds is told.
Of messages that are too large for stacks, both ways are the same, and their ratio is the noise. The program ends with 1
if an elementwise metric answers less often than the bars say.

    python benchmarks/scale_replay.py [--rounds 3] [--messages 60000] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import tracer
from analyze.registry import parse
from analyze.tables.results import Results
from tracer import ModuleMessage, TraceWriter

STREAMS = 12
SIZES = {"scalars": 1, "4 KB": 1024, "256 KB": 65536}
"""Elements of float32 in a message."""
BARS = {"scalars": 100_000, "4 KB": 50_000}
"""Answers in a second of CPU, at least."""
SORTING = ("quantiles", "statistics:which=mean+std+median")
"""Metrics that sort, of which there is no bar."""
SCALARS = (
    ("norm",),
    ("mean",),
    ("sum",),
    ("variance",),
    ("statistics",),
    ("statistics:which=mean+std+median",),
    ("norm", "mean", "variance"),
)
METRICS = {
    "scalars": SCALARS,
    "4 KB": (("norm",), ("mean",), ("statistics",), ("norm", "mean", "variance"), ("quantiles",)),
    "256 KB": (("norm",), ("statistics",)),
}


def record(path: Path, elements: int, messages: int) -> None:
    """Write a trace of so many messages, a step of all streams after the other."""
    generator = torch.Generator().manual_seed(elements)
    shape = () if elements == 1 else (elements,)
    with TraceWriter(path) as writer:
        for step in range(messages // STREAMS):
            where = {"global_step": step, "train_step": step % 1000, "epoch": step // 1000}
            for number in range(STREAMS):
                data = torch.randn(shape, generator=generator)
                writer.write(ModuleMessage(kind="weights", module=f"layer{number}", data=data, **where))


def _of_weights(spec: str) -> str:
    return f"{spec}{',' if ':' in spec else ':'}kind=weights"


def replayed(path: Path, specs: tuple[str, ...], *, singly: bool) -> tuple[float, Results]:
    """CPU seconds of a replay, all threads, and the answers."""
    subscribers, results = [parse(_of_weights(spec)) for spec in specs], Results()
    guard = contextlib.nullcontext() if singly else None
    began = time.process_time()
    tracer.replay(path, *subscribers, results.sink(subscribers, "run"), guard=guard)
    return time.process_time() - began, results


def same(one: Results, other: Results) -> bool:
    """Whether two tables are equal to the bit."""
    ours, theirs = one.columns(), other.columns()
    return all(
        memoryview(ours[name]).tobytes() == memoryview(theirs[name]).tobytes()  # type: ignore[arg-type]
        if name not in ("trace", "subscriber", "kind", "module", "tag", "index")
        else ours[name] == theirs[name]
        for name in ours
    )


def measured(path: Path, specs: tuple[str, ...], messages: int, rounds: int) -> dict[str, Any]:
    """Answers in a CPU second in stacks and one by one, and the ratio of their times."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        found = {}
        for singly in (False, True) if number % 2 else (True, False):
            spent, found[singly] = replayed(path, specs, singly=singly)
            if number:  # the first round imports, and fills the system's cache
                seconds[singly].append(spent)
        if not number and not same(found[False], found[True]):
            raise SystemExit(f"{'+'.join(specs)}: the answers in stacks are others than one by one")
    # an answer of several numbers is several rows
    answers = messages * sum(len(parse(_of_weights(spec)).produces) for spec in specs)
    stacked, alone = (statistics.median(seconds[singly]) for singly in (False, True))
    ratios = [one / other for one, other in zip(seconds[True], seconds[False], strict=True)]
    return {
        "answers": answers,
        "answers_per_cpu_second": round(answers / stacked),
        "one_by_one": round(answers / alone),
        "ratio": round(statistics.median(ratios), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=60_000, help="scalars; of others a tenth and a hundredth")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    told: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for share, (size, elements) in zip((1, 10, 100), SIZES.items(), strict=True):
            path = Path(folder) / f"{elements}.zarr"
            messages = options.messages // share // STREAMS * STREAMS
            record(path, elements, messages)
            told[size] = {"+".join(specs): measured(path, specs, messages, options.rounds) for specs in METRICS[size]}
    status = int(
        any(
            one["answers_per_cpu_second"] < BARS.get(size, 0)
            for size, of_metrics in told.items()
            for name, one in of_metrics.items()
            if name not in SORTING
        )
    )
    if options.json:
        print(json.dumps(told))
        return status
    print(f"{'messages':<10} {'metrics':<34} {'answers/CPU s':>14} {'one by one':>11} {'times':>6}")
    for size, of_metrics in told.items():
        for name, one in of_metrics.items():
            print(
                f"{size:<10} {name:<34} {one['answers_per_cpu_second']:>14,} {one['one_by_one']:>11,} "
                f"{one['ratio']:>6.1f}"
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
