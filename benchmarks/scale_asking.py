"""Whether what is asked of a trace costs in proportion to the answer, and not to what is there.

*Asking*: of a long trace of scalars and of one that is ten times as long, each question in a process of its own: what
the trace is, its last step (messages, an array, a plan, a replay). Time is that of the processor: of the whole process,
which is what a command takes, and of the question alone. Memory is the peak of the process.

*Streams*: opening traces of many streams.

*Following*: what a poll costs that finds ten new steps, in a short trace and in a long one; and what the polls cost of
a run that commits every half second for ten minutes.

*Checking*: what a check and a report's replay cost of traces of statistics: of many layers over some thousand steps, as
of a GPT-2, and of four layers over very many steps; and of a tenth of the steps.

Growth is told as an exponent, too: 0 where a trace that is ten times as long costs as much, 1 where it costs ten times
as much. The program ends with 1 if a bar is missed.

    python benchmarks/scale_asking.py [--messages 1200000] [--times 10] [--streams 12] [--suffix .zarr] [--folder /tmp]
        [--only asking,streams,following,checking] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scale_upkeep import write

MANY_STREAMS = (2_400, 24_000)
_ROUNDS = 3
RATIO, MEGABYTES = 1.3, 300
"""How many times more of the processor and of memory a question may cost of the longer trace, and its memory in all."""
MILLISECONDS, LINEAR = 300, 1.1
"""What opening a trace of 24,000 streams may take, and the exponent of its growth."""
POLLS, HALF_SECOND = 2.0, 0.5
"""How many times more a poll may cost of the longest trace, and the seconds between commits."""


def _info(path: Path) -> int:
    """How many messages a trace has."""
    from tracer.trace.reader import TraceReader

    with TraceReader(path) as reader:
        return int(reader.info["messages"])


def _cat(path: Path) -> int:
    """How many messages the last step has, each with its data."""
    from tracer.trace.reader import TraceReader

    with TraceReader(path) as reader:
        last = reader.info["steps"][1]
        return sum(1 for window in reader.within(last, None).windows() for _ in window.values(steps=(last, None)))


def _array(path: Path) -> int:
    """How many values one stream has in the last step."""
    from tracer.trace.reader import TraceReader

    with TraceReader(path) as reader:
        last = reader.info["steps"][1]
        steps, _ = reader.array("biases", "layer0", steps=(last, None))
        return len(steps)


def _plan(path: Path) -> int:
    """How many messages of the last step a metric would get."""
    import tracer
    from analyze.registry import parse
    from tracer.trace.reader import TraceReader

    with TraceReader(path) as reader:
        last = reader.info["steps"][1]
        return tracer.plan(reader, parse("norm:kind=biases"), steps=(last, None)).messages


def _replay(path: Path) -> int:
    """How many answers a metric gives about the last step."""
    import tracer
    from analyze.registry import parse
    from tracer.trace.reader import TraceReader

    with TraceReader(path) as reader:
        last = reader.info["steps"][1]
        norm = parse("norm:kind=biases")
        heard = tracer.Collect(*norm.produces)
        tracer.replay(reader, norm, heard, steps=(last, None))
        return len(heard)


QUESTIONS: dict[str, Callable[[Path], int]] = {
    "info": _info,
    "cat, last step": _cat,
    "array, last step": _array,
    "plan, last step": _plan,
    "replay, last step": _replay,
}


SHAPES = {"many layers": (5_000, 148, 100), "four layers": (100_000, 4, 0)}
"""Steps, parameters (weights, their gradients and updates), and modules (outputs and their gradients)."""
CHECKS = {("check", "many layers"): 5.0, ("check", "four layers"): 1.0, ("report", "many layers"): 10.0}
"""The seconds of the processor that a question may cost beside its imports."""


def _check(path: Path) -> int:
    """How many rules judge a trace."""
    import analyze

    return len(analyze.check(path).looked)


def _report(path: Path) -> int:
    """How many series a report draws."""
    from analyze.seeing.report import gather

    return len(gather(path).losses)


OF_STATISTICS: dict[str, Callable[[Path], int]] = {"check": _check, "report": _report}


def write_statistics(path: Path, steps: int, parameters: int, modules: int) -> None:
    """Write a trace of a healthy training: losses, and the statistics of all tensors at each step, as pulses."""
    import numpy as np
    import torch

    from tracer import NetworkMessage, TraceWriter
    from tracer.messaging.pulses import PULSE, PulseRow, sampling_of
    from tracer.numbers.statistics import ENTRIES, statistics_of

    draw, told = np.random.default_rng(0), {"reduce": "statistics", "entries": list(ENTRIES), "axes": 2}
    kinds = ["activations", "layer_gradients"] * bool(modules) + ["weights", "weight_gradients", "weight_updates"]
    scales = {"weight_updates": 1e-3}
    rows, tables = [], []
    for kind in kinds:
        count = modules if kind in ("activations", "layer_gradients") else parameters
        rows += [PulseRow(f"{kind}_statistics", f"layer{number}", "", 0, told) for number in range(count)]
        tables.append([_statistics(draw, scales.get(kind, 1.0), count, statistics_of) for _ in range(16)])
    pulses = [torch.cat([table[number] for table in tables]) for number in range(16)]
    sampling, losses = sampling_of(rows, ENTRIES), 2 + 0.1 * draw.standard_normal(steps)
    with TraceWriter(path) as writer:
        for step in range(steps):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(losses[step]), **where))
            writer.write(NetworkMessage(kind=PULSE, data=pulses[step % 16], sampling=sampling, **where))


def _statistics(draw: Any, scale: float, count: int, statistics_of: Callable[..., Any]) -> Any:
    """The statistics of so many matrices of numbers of a scale, (count, 16)."""
    import torch

    each = torch.from_numpy(draw.standard_normal((count, 64, 32)) * scale).float()
    return torch.stack([statistics_of(one) for one in each])


def checking(folder: Path, suffix: str, scale: float) -> dict[str, Any]:
    """What a check and a report cost of each shape, and of a tenth of its steps."""
    found: dict[str, Any] = {}
    for shape, (steps, parameters, modules) in SHAPES.items():
        lengths = max(30, int(steps * scale) // 10), max(60, int(steps * scale))
        paths = [folder / f"{shape.replace(' ', '_')}{number}{suffix}" for number in lengths]
        for path, number in zip(paths, lengths, strict=True):
            write_statistics(path, number, parameters, modules)
        for name in [name for name, of in CHECKS if of == shape]:
            short, long = (asked(name, path) for path in paths)
            exponent = _exponent(long["alone"] / short["alone"], lengths[1] / lengths[0])
            found[f"{name}, {shape}"] = {"short": short, "long": long, "exponent": exponent, "bar": CHECKS[name, shape]}
    return found


def _ask(name: str, path: str) -> None:
    """Answer a question in this process, and print what it cost: by itself, and with all that is imported for it."""
    with tempfile.TemporaryDirectory() as folder:  # the first answer, about a small trace, imports all that is needed
        small = Path(folder) / f"small{Path(path).suffix}"
        if name in OF_STATISTICS:
            write_statistics(small, 60, 2, 0)
        else:
            write(small, 120, 12)
        question = (QUESTIONS | OF_STATISTICS)[name]
        question(small)
    began = time.process_time()
    found = question(Path(path))
    whole = time.process_time()
    print(json.dumps([found, whole, whole - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def asked(name: str, path: Path) -> dict[str, float]:
    """The median seconds and megabytes of a question, of processes of its own."""
    found = []
    for _ in range(_ROUNDS):
        done = subprocess.run(
            [sys.executable, __file__, "--ask", name, str(path)], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    assert all(one[0] for one in found), f"{name} finds something"
    return {
        what: statistics.median(one[place] for one in found)
        for place, what in enumerate(("seconds", "alone", "megabytes"), start=1)
    }


def asking(folder: Path, suffix: str, messages: int, times: int, streams: int) -> dict[str, Any]:
    """What each question costs of a trace, and of one so many times as long."""
    paths = []
    for count in (messages, times * messages):
        paths.append(folder / f"of{count}{suffix}")
        write(paths[-1], count, streams)
    found = {}
    for name in QUESTIONS:
        short, long = (asked(name, path) for path in paths)
        ratios = {what: long[of] / short[of] for what, of in (("ratio", "seconds"), ("memory", "megabytes"))}
        found[name] = {"short": short, "long": long, **ratios}
    return found


def many_streams(folder: Path, suffix: str, scale: float) -> dict[str, Any]:
    """The seconds that opening takes, and telling of each stream, where there are few and many."""
    from tracer.trace.reader import TraceReader

    found: dict[str, Any] = {}
    for count in (max(10, int(number * scale)) for number in MANY_STREAMS):
        path = folder / f"streams{count}{suffix}"
        write(path, 3 * count, count)
        opening, telling = [], []
        for _ in range(2 * _ROUNDS):
            began = time.process_time()
            with TraceReader(path) as reader:
                opened = time.process_time()
                assert len(reader.streams) == count
                telling.append(time.process_time() - opened)
            opening.append(opened - began)
        found[str(count)] = {"open": statistics.median(opening), "streams": statistics.median(telling)}
    few, many = found.values()
    found["exponent"] = _exponent(many["open"] / few["open"], MANY_STREAMS[1] / MANY_STREAMS[0])
    return found


def _exponent(ratio: float, times: float) -> float:
    """The power of the length with which a cost grows that is so many times higher where there are `times` as many."""
    return math.log(ratio) / math.log(times)


def following(folder: Path, suffix: str, messages: int, times: int, streams: int) -> dict[str, Any]:
    """The seconds that a poll takes which finds ten steps, by the length of the trace; and of writing them.

    And those of a run that commits every half second for ten minutes: its clock is that of its commits.
    """
    found: dict[str, Any] = {}
    for count in (messages // 100, messages, times * messages):
        polls, writes = _followed(folder / f"follow{count}{suffix}", count // streams, 40, 10, streams)
        found[str(count)] = {"poll": statistics.median(polls), "write": statistics.median(writes)}
    short, *_, long = found.values()
    found["ratio"] = long["poll"] / short["poll"]
    commits = min(1200, messages // 1000)
    polls, writes = _followed(folder / f"minutes{suffix}", 0, commits, max(1, messages // commits // streams), streams)
    found["minutes"] = {
        "commits": commits,
        "messages": messages // commits,
        "first": statistics.median(polls[: -(-commits // 10)]),
        "last": statistics.median(polls[-commits // 10 :]),
        "mean": statistics.mean(polls),
        "longest": max(polls),
        "write": statistics.median(writes),
    }
    return found


def _followed(path: Path, length: int, commits: int, steps: int, streams: int) -> tuple[list[float], list[float]]:
    """A replay to a table follows a run of so many steps, which commits some steps each time the replay would wait.

    Returns the processor's seconds of each poll, with all that the replay does of what it finds, and of each commit.
    """
    import torch

    import tracer
    import tracer.replaying.replay as replaying
    from analyze.registry import parse
    from analyze.tables.results import Results
    from tracer import ModuleMessage, TraceReader, TraceWriter

    values = torch.linspace(-1, 1, streams).unbind()

    def written(first: int, stop: int) -> Iterator[ModuleMessage]:
        for step in range(first, stop):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            for stream, value in enumerate(values):
                yield ModuleMessage(kind="biases", module=f"layer{stream}", data=value, **where)

    writer = TraceWriter(path, commit_seconds=1e9)
    for first in range(0, length, 512):
        writer.write_many(written(first, min(first + 512, length)))
    writer.commit()
    polls: list[float] = []
    writes: list[float] = []
    began = time.process_time()

    def wait(reader: TraceReader) -> bool:
        """Write the next commit in place of waiting for it."""
        nonlocal began
        now = time.process_time()
        polls.append(now - began)
        goes_on = len(writes) < commits
        if goes_on:
            first = length + steps * len(writes)
            writer.write_many(written(first, first + steps))
            writer.commit()
            writes.append(time.process_time() - now)
        else:
            writer.finish()
        began = time.process_time()
        reader.refresh()
        return goes_on

    norm = parse("norm:kind=biases")
    results = Results()
    waiting, replaying.wait = replaying.wait, wait
    try:
        tracer.replay(path, norm, results.sink([norm], str(path)), steps=(length, None), follow=True)
    finally:
        replaying.wait = waiting
    assert len(results) == commits * steps * streams, "everything is followed"
    return polls[1:], writes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_200_000)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--suffix", default=".zarr")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="asking,streams,following,checking")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--ask", nargs=2, metavar=("QUESTION", "TRACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        _ask(*options.ask)
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, suffix, messages, times = Path(name), options.suffix, options.messages, options.times
        if "asking" in options.only:
            found["asking"] = asking(folder, suffix, messages, times, options.streams)
        if "streams" in options.only:
            found["streams"] = many_streams(folder, suffix, min(1.0, messages / 1_200_000))
        if "following" in options.only:
            found["following"] = following(folder, suffix, messages, times, options.streams)
        if "checking" in options.only:
            found["checking"] = checking(folder, suffix, min(1.0, messages / 1_200_000))
    print(json.dumps(found) if options.json else "\n".join(_lines(found, messages, times)))
    return int(any(_missed(found)))


def _missed(found: dict[str, Any]) -> Iterator[bool]:
    """Whether each bar is missed."""
    for one in found.get("asking", {}).values():
        yield max(one["ratio"], one["memory"]) > RATIO or one["long"]["megabytes"] > MEGABYTES
    if "streams" in found:
        *_, many, exponent = found["streams"].values()
        yield 1e3 * many["open"] > MILLISECONDS or exponent > LINEAR
    for one in found.get("checking", {}).values():
        yield one["long"]["alone"] > one["bar"]
    if "following" in found:
        yield found["following"]["ratio"] > POLLS
        minutes = found["following"]["minutes"]
        yield minutes["mean"] + minutes["write"] > HALF_SECOND


def _lines(found: dict[str, Any], messages: int, times: int) -> Iterator[str]:
    if "asking" in found:
        bars = f"(bars: {RATIO}, {RATIO}, {MEGABYTES} MB)"
        yield f"{'':20}{messages:>20,} messages{times * messages:>23,} messages   ratio {bars}"
        for name, one in found["asking"].items():
            short, long = (
                f"{at['seconds']:6.2f} s {1e3 * at['alone']:6.1f} ms {at['megabytes']:5.0f} MB"
                for at in (one["short"], one["long"])
            )
            growth = f"{one['ratio']:5.2f}  memory {one['memory']:.2f}  exponent {_exponent(one['ratio'], times):.2f}"
            yield f"{name:20}  {short}    {long}   {growth}"
        yield "first the time of the process, with Python and all imports; then that of the question alone"
    if "streams" in found:
        for count, one in found["streams"].items():
            if isinstance(one, dict):
                yield f"{count:>6} streams: open {1e3 * one['open']:.0f} ms, tell of each {1e3 * one['streams']:.0f} ms"
        exponent = found["streams"]["exponent"]
        yield f"opening grows with the power {exponent:.2f} of the streams (bars: {MILLISECONDS} ms, {LINEAR})"
    for name, one in found.get("checking", {}).items():
        short, long = one["short"], one["long"]
        yield (
            f"{name}: {long['alone']:.2f} s, {long['megabytes']:.0f} MB (bar: {one['bar']:g} s); of a tenth of the "
            f"steps {short['alone']:.2f} s, {short['megabytes']:.0f} MB; exponent {one['exponent']:.2f}"
        )
    if "following" in found:
        for count, one in found["following"].items():
            if count.isdigit():
                written = f"writing and committing them {1e3 * one['write']:.2f} ms"
                yield f"a poll after {int(count):>12,} messages finds 10 steps in {1e3 * one['poll']:.2f} ms; {written}"
        yield f"the longest over the shortest: {found['following']['ratio']:.2f} (bar: {POLLS:g})"
        one = found["following"]["minutes"]
        yield (
            f"a run of {one['commits']} commits, half a second apart, of {one['messages']:,} messages: "
            f"{1e3 * one['first']:.1f} ms a poll at first, {1e3 * one['last']:.1f} at last, "
            f"{1e3 * one['mean']:.1f} in the mean, {1e3 * one['longest']:.1f} at most; writing them "
            f"{1e3 * one['write']:.1f} (bar: 500 ms)"
        )


if __name__ == "__main__":
    sys.exit(main())
