"""`reenact_script`: a training script runs some steps of a recorded run again, with whatever is asked of them now."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tracer.errors import CaptureError
from tracer.messaging.messages import DATA_KINDS, DEFAULT_TAG, KINDS
from tracer.messaging.receiver import Receiver
from tracer.observing.capture import Capture
from tracer.recording.environment import REHEARSAL
from tracer.recording.launching.program import Program
from tracer.recording.launching.script import run
from tracer.recording.options import Options
from tracer.recording.reenacting.comparison import Comparison, Verdict, steps_named
from tracer.recording.reenacting.feed import Feed
from tracer.recording.reenacting.recorded import Keyframe, Recorded
from tracer.recording.run import Run
from tracer.stores.locations import Anywhere, location
from tracer.trace.reader import TraceReader

OF_STEPS: tuple[str, ...] = tuple(kind for kind in DATA_KINDS if KINDS[kind].clock == "global_step")
"""The kinds that a re-enactment can give. Its epochs end where the script's own data does, so they tell nothing."""


@dataclass(frozen=True)
class Plan:
    """Which steps are run again, and from where.

    Attributes
    ----------
    recorded : Recorded
    keyframe : Keyframe
    steps : (int, int)
        Those that were asked for; the second is not among them.
    """

    recorded: Recorded
    keyframe: Keyframe
    steps: tuple[int, int]

    @property
    def count(self) -> int:
        """How many steps are run."""
        return self.steps[1] - self.keyframe.at.global_step

    def describe(self) -> dict[str, object]:
        """What a trace says of the run that it re-enacts, as JSON."""
        path = str(self.recorded.trace.path)
        return {"run": path, "keyframe": self.keyframe.at.global_step, "steps": list(self.steps)}


def plan_of(trace: TraceReader, steps: tuple[int, int], *, allow_different: bool = False) -> Plan:
    """How to come to some steps of a recorded run.

    Parameters
    ----------
    trace : TraceReader
    steps : (int, int)
        The first global step, and the one after the last.
    allow_different : bool
        Whether another version of PyTorch than the recorded one will do.

    Raises
    ------
    CaptureError
        If the run has no such steps, no keyframe before them, did not keep what they need, or was recorded with
        another version of PyTorch.
    """
    start, stop = steps
    if not 0 <= start < stop:
        raise CaptureError(f"steps to run again are START:STOP with 0 <= START < STOP, not {start}:{stop}")
    recorded = Recorded(trace)
    keyframe = recorded.keyframe(start)
    was, now = trace.header.get("versions", {}).get("torch"), torch.__version__
    if was != now and not allow_different:
        raise CaptureError(
            f"{trace.path} was recorded with torch {was}, and this is torch {now}, whose numbers may differ in the "
            "last bits: install that version, or allow differences"
        )
    for step in range(keyframe.at.global_step, stop):
        found = recorded.step(step)
        if found.at is None:
            raise CaptureError(f"{trace.path} has nothing of step {step:,}, so it cannot be run again")
        for kind, kept in (("generators", found.generators), ("input_data", found.inputs)):
            if not kept:
                part = ", but only a part of each tensor" if kind in found.in_part else ""
                raise CaptureError(
                    f"{trace.path} has no {kind} of step {step:,}{part}, so {steps_named(steps)} cannot be run again "
                    f"from the keyframe of step {keyframe.at.global_step:,}: record generators, hyperparameters, "
                    "input_data and input_labels at every step"
                )
    return Plan(recorded, keyframe, steps)


def captures_for(plan: Plan, asked: Sequence[Capture]) -> tuple[Capture, ...]:
    """The captures of a re-enactment: what is asked of its steps, and hashes of what was recorded of all."""
    start, stop = plan.steps
    wanted = tuple(replace(one, start=max(one.start, start), stop=min(one.stop or stop, stop)) for one in asked)
    first = plan.keyframe.at.global_step
    events = Capture(kinds=("batch_started", "batch_finished", "loss", "loss_terms"), tags=(DEFAULT_TAG,), start=first)
    kinds, modules = plan.recorded.kinds, plan.recorded.modules
    compared = Capture(
        kinds=[kind for kind in kinds if kind not in ("loss", "loss_terms")] or ["input_data"],
        modules=[_escaped(path) for path in modules] or None,
        tags=(DEFAULT_TAG,),
        reduce="hash",
        start=first,
    )
    return (events, *wanted, compared)


def _escaped(path: str) -> str:
    """A glob that matches this path only."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


def reenact_script(
    path: Anywhere,
    program: Program,
    *,
    steps: tuple[int, int],
    out: Anywhere,
    captures: Sequence[Capture] = (),
    options: Options | None = None,
    receivers: Sequence[Receiver] = (),
    allow_different: bool = False,
    ended: Callable[[], None] | None = None,
) -> tuple[Verdict, int]:
    """Run steps of a recorded run again by the script that trained, record them anew, and compare.

    The script runs from its beginning. At its first training forward the model gets the state of the last keyframe
    before the steps, and from then on each forward the recorded inputs, each loss the recorded labels, each optimizer
    the recorded hyperparameters. When the last step is over, the script is ended with `SystemExit`. Meanwhile
    ``TRACE_REHEARSAL`` is ``reenact``.

    Parameters
    ----------
    path : path or URL
        Of the trace of the run.
    program : Program
        The script, with the arguments that it had.
    steps : (int, int)
        The first global step, and the one after the last.
    out : path or URL
        Of the trace to make.
    captures : sequence of Capture
        What is recorded of the steps; by default all of the kinds of `Capture`'s default, in full.
    options : Options, optional
    receivers : sequence of Receiver
        Who listens to the steps.
    allow_different : bool
        Whether to go on after the first value that is not as it was recorded.
    ended : callable, optional
        Called when the new trace is closed.

    Returns
    -------
    Verdict
        What was compared, and what came out.
    int
        The exit status of the script; 0 where it was ended.

    Raises
    ------
    CaptureError
        If the steps cannot be run again, before the script begins or when it shows.
    """
    with TraceReader(location(path)) as trace, contextlib.ExitStack() as stack:
        plan = plan_of(trace, steps, allow_different=allow_different)
        asked = captures or (Capture(kinds=[kind for kind in Capture().kinds or () if kind in OF_STEPS]),)
        running: list[Run] = []
        feeds: list[Feed] = []

        def step_over(verdict: Verdict) -> None:
            if feeds[0].over:
                return
            if verdict.complete or (verdict.first is not None and not allow_different):
                recorder = running[0].recorder
                if recorder is not None:
                    recorder.note({"reenacted": verdict.describe()})
                feeds[0].over = True

        comparison = Comparison(plan.recorded, plan.keyframe.at.global_step, steps, step_over)

        def began(recording: Run) -> None:
            running.append(recording)
            feeds.append(Feed(plan.recorded, plan.keyframe, recording.exporter))
            stack.enter_context(feeds[0].feeding())

        stack.enter_context(_telling_the_script())
        try:
            status = run(
                program,
                out=out,
                captures=captures_for(plan, asked),
                options=replace(options or Options(), reenacts=plan.describe()),
                receivers=(*receivers, comparison),
                began=began,
                ended=ended,
                required=True,
            )
        finally:
            if feeds and feeds[0].refusal is not None:
                raise feeds[0].refusal
        return comparison.verdict, status


@contextlib.contextmanager
def _telling_the_script() -> Iterator[None]:
    before = os.environ.get(REHEARSAL)
    os.environ[REHEARSAL] = "reenact"
    try:
        yield
    finally:
        if before is None:
            del os.environ[REHEARSAL]
        else:
            os.environ[REHEARSAL] = before
