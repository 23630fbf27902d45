"""``trace record --dry-run``: estimates from a script's first steps what would be recorded."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tracer.errors import CaptureError
from tracer.recording import termination
from tracer.recording.budget import ROW_BYTES
from tracer.recording.certifying.rehearsal import Request, rehearse
from tracer.recording.certifying.verdict import compare
from tracer.recording.launching.program import Program
from tracer.recording.options import Options
from tracer.trace.claiming import this_process

DRY_RUN_STEPS: Final = 8
"""How many steps a dry run takes."""


def dry_run(
    program: Program, settings: Sequence[Mapping[str, Any]], options: Options, *, run_steps: int | None = None
) -> dict[str, Any]:
    """What would be recorded of a script, from its first steps: streams, bytes, and an estimate of the overhead.

    Parameters
    ----------
    program : Program
    settings : sequence of mapping
        The captures, as `tracer.recording.launching.script.captures_of` takes them.
    options : Options
        The recording's options. The rehearsals ignore its bounds.
    run_steps : int, optional
        The number of steps of the whole run.

    Returns
    -------
    dict
        JSON values. ``streams``: for each its ``kind``, ``module``, ``leaf``, ``tag``, ``dtype``, ``shapes``,
        ``bytes_per_message``, ``messages_per_recorded_step``, ``every``, ``burst``, ``start``, ``stop``, and
        ``clock``: ``step``, ``epoch`` (not in the sums), or ``aside`` for passes that are not training. For ``aside``,
        ``every`` counts the passes of an evaluation and is already part of the sums; later evaluations may be more or
        fewer.
        ``bytes_per_recorded_step``: bytes of a step in which all streams are recorded; ``bytes_per_step``: mean over
        many steps; ``run_steps`` and ``bytes_per_run``: None if the number of steps is unknown; ``max_overhead``,
        ``max_bytes`` and ``stop_at_bytes``;
        ``estimated_cpu_ratio``, computed from ``recorded_cpu_ratio``, which was measured over ``steps`` fully recorded
        steps; ``steps_seen``. None of these numbers accounts for what bounds make rarer.

    Raises
    ------
    CaptureError
        If this process is one of several ranks, or the script trains nothing, fails, or cannot be recorded.
    """
    process = this_process()
    if process.size > 1:
        raise CaptureError(
            f"--dry-run runs a script of one process, and this is rank {process.rank} of {process.size}: give it to a "
            "run of one process, whose streams are those of each rank"
        )
    request = Request(
        program=program,
        settings=settings,
        options=options.unbounded(),
        purpose="dry-run",
        steps=DRY_RUN_STEPS,
    )
    with termination.raises(), tempfile.TemporaryDirectory(prefix="trace-dry-run-") as folder:
        bare, _ = rehearse(request, Path(folder), recorded=False)
        if bare.error is not None:
            raise CaptureError(f"{program.script} failed in its first steps: {bare.error}")
        recorded, told = rehearse(request, Path(folder), recorded=True)
        again, _ = rehearse(request, Path(folder), recorded=False)
    if recorded.error is not None or "streams" not in told:
        raise CaptureError(f"{program.script} cannot be recorded: {recorded.error or 'it took no step'}")
    seen = len(recorded.taken)
    if seen < DRY_RUN_STEPS and run_steps is None:  # the script ended by itself
        run_steps = seen
    streams = [_per_step(one, seen) for one in told["streams"]]
    full = sum(one["bytes_per_recorded_step"] for one in streams)
    mean = sum(one["bytes_per_recorded_step"] * _share(one) for one in streams)
    overhead = compare(bare, recorded, again).overhead
    ratio = overhead.get("cpu_ratio")
    return {
        "streams": streams,
        "messages_per_recorded_step": sum(one["messages_per_recorded_step"] for one in streams),
        "bytes_per_recorded_step": full,
        "bytes_per_step": mean,
        "run_steps": run_steps,
        "bytes_per_run": None if run_steps is None else round(sum(_in_run(one, run_steps) for one in streams)),
        "max_overhead": options.max_overhead,
        "max_bytes": options.max_bytes,
        "stop_at_bytes": options.stop_at_bytes,
        "recorded_cpu_ratio": ratio,
        "bare_cpu_ratio": overhead.get("bare_ratio"),
        "estimated_cpu_ratio": None if ratio is None or not full else 1 + (ratio - 1) * mean / full,
        "steps": overhead.get("steps", 0),
        "steps_seen": seen,
    }


def _per_step(stream: Mapping[str, Any], seen: int) -> dict[str, Any]:
    told = {name: stream[name] for name in ("kind", "module", "leaf", "tag", "dtype", "shapes")}
    size = stream["bytes"] / stream["count"]
    # the number of steps in an epoch is unknown, and an epoch's events have no data
    count = 0 if stream["clock"] == "epoch" else stream["kept"]
    return told | {
        "bytes_per_message": size,
        "messages_per_recorded_step": count / seen,
        # data, and a row in the journal for each message
        "bytes_per_recorded_step": (size * count + count * ROW_BYTES) / seen,
        **{name: stream[name] for name in ("every", "burst", "start", "stop", "clock")},
    }


def _share(stream: Mapping[str, Any]) -> float:
    """The share of steps in which a stream is recorded, in the long run."""
    burst, every = _rhythm(stream)
    return burst / every


def _rhythm(stream: Mapping[str, Any]) -> tuple[int, int]:
    """``(burst, every)``: a stream is recorded in `burst` of `every` steps; evaluations count for all steps."""
    return (1, 1) if stream["clock"] == "aside" else (int(stream["burst"]), int(stream["every"]))


def _due(stream: Mapping[str, Any], steps: int) -> int:
    """In how many of the first `steps` a stream is recorded.

    Examples
    --------
    >>> some = {"every": 10, "burst": 1, "start": 5, "stop": None, "clock": "step"}
    >>> _due(some, 31), _due({**some, "clock": "aside"}, 31), _due({**some, "every": 1, "stop": 9}, 31)
    (3, 26, 4)
    >>> _due({**some, "burst": 7}, 31), len([step for step in range(5, 31) if step % 10 < 7])
    (17, 17)
    """
    burst, every = _rhythm(stream)
    stop = max(stream["start"], steps if stream["stop"] is None else min(steps, stream["stop"]))
    until, before = ((step // every) * burst + min(step % every, burst) for step in (stop, stream["start"]))
    return int(until - before)


def _in_run(stream: Mapping[str, Any], steps: int) -> float:
    per_step: float = stream["bytes_per_recorded_step"]
    return _due(stream, steps) * per_step
