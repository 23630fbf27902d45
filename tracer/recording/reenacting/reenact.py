"""`reenact`: runs steps of a recorded run again, and records what is wanted now; `probe_script`: late probes."""

from __future__ import annotations

import contextlib
import functools
import glob
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracer.errors import CaptureError, UnknownNameError
from tracer.messaging.messages import DATA_KINDS, DEFAULT_TAG, KINDS, clock_of
from tracer.messaging.receiver import Around, Receiver
from tracer.observing.capture import DEFAULT_KINDS, Capture
from tracer.observing.exporter import Exporter
from tracer.observing.probes import PROBE
from tracer.observing.publisher import PROBED
from tracer.recording.launching.program import Program
from tracer.recording.launching.script import run
from tracer.recording.options import REHEARSAL, Options
from tracer.recording.recording import Run, record
from tracer.recording.reenacting.comparison import StepComparison, Verdict, steps_named
from tracer.recording.reenacting.feed import Ended, Feed, restore
from tracer.recording.reenacting.recorded import COMPARABLE, OF_STATE, Keyframe, Recorded, recorded_run
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader

OF_STEPS: tuple[str, ...] = tuple(kind for kind in DATA_KINDS if KINDS[kind].clock == "global_step")
"""The kinds that a re-enactment can give; none of epochs, whose ends are those of the script's own data."""


_OR_IDS = ", or sample_ids and a hash of input_data, if a DataLoader gives the inputs"
_PARTS_ONLY = "input_data is of calls of the model's own forward, and the step may have called its parts only; else "


@dataclass(frozen=True)
class ReenactmentPlan:
    """The steps to run again, and the keyframe to begin with.

    Attributes
    ----------
    recorded : Recorded
    keyframe : Keyframe
    steps : (int, int)
        The requested global steps; the end is excluded.
    stop : int
        The step after the last that is run. The first step after the requested ones is run too if the run has it,
        because it shows whether the last update was the same.
    """

    recorded: Recorded
    keyframe: Keyframe
    steps: tuple[int, int]
    stop: int

    @property
    def count(self) -> int:
        """The number of steps to run, from the keyframe on."""
        return self.stop - self.keyframe.at.global_step

    def describe(self) -> dict[str, object]:
        """The header's entry about the re-enacted run, as JSON."""
        return {**self.recorded.describe(), "keyframe": self.keyframe.at.global_step, "steps": list(self.steps)}


def plan_of(
    recorded: Recorded, steps: tuple[int, int], *, allow_different: bool = False, with_data: bool = True
) -> ReenactmentPlan:
    """Plan how to run steps of a recorded run again.

    Parameters
    ----------
    recorded : Recorded
    steps : (int, int)
        The first global step, and the step after the last.
    allow_different : bool
        Whether another version of PyTorch than the recorded version is acceptable.
    with_data : bool
        Whether the script has the data set, so that sample ids and a hash can replace recorded inputs.

    Raises
    ------
    CaptureError
        If the run has no such steps, has no keyframe at or before them, lacks data that they need, or was recorded
        with another version of PyTorch.
    """
    start, stop = steps
    if not 0 <= start < stop:
        raise CaptureError(f"steps to run again are START:STOP with 0 <= START < STOP, not {start}:{stop}")
    trace, keyframe = recorded.trace, recorded.keyframe(start)
    was, now = trace.header.get("versions", {}).get("torch"), torch.__version__
    if was != now and not allow_different:
        raise CaptureError(
            f"{trace.path} was recorded with torch {was}, and this is torch {now}, whose numbers may differ in the "
            "last bits: install that version, or allow differences"
        )
    began = keyframe.at.global_step
    kept = recorded.kept(began, stop)
    for step in range(began, stop):
        if step not in kept:
            raise CaptureError(f"{trace.path} has nothing of step {step:,}, so it cannot be run again")
        lacking = _lacking(kept[step], with_data=with_data)
        if lacking == "input_data" and (why := _no_inputs(trace)):
            raise CaptureError(f"{trace.path} has no input_data: {why}")
        if lacking is not None:
            part = ", but only a part of each tensor" if lacking in kept[step] else ""
            raise CaptureError(
                f"{trace.path} has no {lacking} of step {step:,}{part}, so {steps_named(steps)} cannot be run again "
                f"from the keyframe of step {began:,}{f'; steps up to {step - 1:,} can' if step > began else ''}: "
                f"{_PARTS_ONLY if lacking == 'input_data' and 'generators' in kept[step] else ''}"
                "record generators, hyperparameters, input_data and input_labels at every step"
                f"{_OR_IDS if with_data else ''}"
            )
    after = recorded.kept_by_each_rank(stop)  # ranks wait for each other, so all of them run it or none
    goes_on = all(one and _lacking(one, with_data=with_data) is None for one in after)
    return ReenactmentPlan(recorded, keyframe, steps, stop + goes_on)


def _no_inputs(trace: TraceReader) -> str:
    """Why a run has no inputs, although they were asked for; "" if it has some, or the reason is not known."""
    problems = [note["problem"] for note in trace.notes if isinstance(note.get("problem"), Mapping)]
    unseen = ("input_data", "the forward of the model")
    return next((str(problem.get("why")) for problem in problems if problem.get("what") in unseen), "")


def _lacking(kept: Mapping[str, bool], *, with_data: bool) -> str | None:
    """The kind without which a step cannot be run again, if the trace lacks any; `kept` as from `Recorded.kept`."""
    by_ids = with_data and kept.get("sample_ids") and "input_data_hash" in kept
    needed = ("generators",) if by_ids else ("generators", "input_data")
    return next((kind for kind in needed if not kept.get(kind)), None)


def captures_for(plan: ReenactmentPlan, asked: Sequence[Capture]) -> tuple[Capture, ...]:
    """The captures of a re-enactment: the user's, hashes of what can be compared, and sample ids if the run has them.

    Of the requested steps every value is hashed, so that the verdict can name what was compared with nothing.
    """
    recorded, first, (start, stop) = plan.recorded, plan.keyframe.at.global_step, plan.steps
    wanted = tuple(replace(one, start=max(one.start, start), stop=min(one.stop or stop, stop)) for one in asked)
    ids = ("sample_ids",) if recorded.has_samples else ()
    always = ("batch_started", "batch_finished", "loss", "loss_terms", *ids)
    events = Capture(kinds=always, tags=(DEFAULT_TAG,), start=first)
    hashes = Capture(reduce="hash", tags=(DEFAULT_TAG,), start=first)
    compared = replace(
        hashes,
        kinds=[kind for kind in recorded.kinds if kind not in ("loss", "loss_terms")] or ["input_data"],
        modules=[glob.escape(path) for path in recorded.modules] or None,
    )
    all_computed = replace(hashes, kinds=[kind for kind in DEFAULT_KINDS if kind in COMPARABLE], start=start, stop=stop)
    later = [step for step in recorded.keyframes() if first < step < plan.stop]
    state = (replace(hashes, kinds=OF_STATE, start=first + 1, every=math.gcd(*later)),) if later else ()
    return (events, *wanted, compared, all_computed, *state)


class Reenactment:
    """Feeds a training that runs steps of a recorded run again, and compares its values.

    Parameters
    ----------
    plan : ReenactmentPlan
    allow_different : bool
        Whether to continue after the first value that differs from the recorded value.

    Attributes
    ----------
    comparison : StepComparison
        Listens to the training.
    """

    def __init__(self, plan: ReenactmentPlan, *, allow_different: bool) -> None:
        self.plan = plan
        self.comparison = StepComparison(plan.recorded, plan.keyframe.at.global_step, plan.steps, self._step_over)
        self._allow_different = allow_different
        self._feed: Feed | None = None
        self._run: Run | None = None
        self._noted = False

    @contextlib.contextmanager
    def by(self, run: Run, *, own_steps: int = 1) -> Iterator[None]:
        """Feed the training that a run observes; see `Feed`."""
        self._run = run
        plan = self.plan
        self._feed = Feed(plan.recorded, plan.keyframe, plan.steps[1], plan.stop, run.exporter, own_steps=own_steps)
        with self._feed.feeding():
            yield

    @property
    def verdict(self) -> Verdict:
        """The verdict so far."""
        replaced = () if self._feed is None else tuple(self._feed.changes.told)
        return replace(self.comparison.verdict, replaced=replaced)

    @property
    def over(self) -> bool:
        """Whether the last step is over, or a value is different and differences are not allowed."""
        different = self.comparison.verdict.first is not None and not self._allow_different
        return different or self.comparison.last >= self.plan.stop - 1

    def _step_over(self, ended: bool) -> None:
        """After the last step, the first difference, or the end of the training: note the verdict, end the script."""
        if self._noted or not (self.over or ended):
            return
        self._noted = True
        if self._run is not None and self._run.recorder is not None:
            self._run.recorder.note({"reenacted": self.verdict.describe()})
        assert self._feed is not None
        self._feed.over = True

    def refuse(self) -> None:
        """Raise the `CaptureError` that kept the training from being fed, if there is one."""
        if self._feed is not None and self._feed.refusal is not None:
            raise self._feed.refusal


@final
class WithinSteps(Around):
    """Hides from a listener what is run before and after the requested steps."""

    def __init__(self, inner: Receiver, steps: tuple[int, int]) -> None:
        super().__init__(inner)
        self._steps = steps

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether the listener wants it, in the requested steps."""
        start, stop = self._steps
        within = step is None or clock_of(kind) == "epoch" or start <= step < stop
        return within and super().wants(kind, module, tag, step)


def reenact_script(
    path: Anywhere,
    program: Program,
    *,
    steps: tuple[int, int],
    out: Anywhere,
    captures: Sequence[Capture],
    options: Options,
    receivers: Sequence[Receiver],
    attempt: int | None,
    allow_different: bool,
) -> tuple[Verdict, int]:
    """Run steps of a recorded run again by the script that trained, record them anew, and compare.

    The script runs from its beginning. After an unfed step the model gets the state of the last keyframe at or before
    the steps. From then on each forward gets the recorded inputs, each loss the recorded labels, and each optimizer the
    recorded hyperparameters. After the last step, `SystemExit` ends the script. While it runs, ``TRACE_REHEARSAL`` is
    ``reenact``.

    Parameters
    ----------
    path : path or URL
        The trace of the run.
    program : Program
        The script, with its arguments in the run.
    steps : (int, int)
        The first global step, and the step after the last.
    out : path or URL
        The new trace.
    captures : sequence of Capture
        What to record of the steps.
    options : Options
    receivers : sequence of Receiver
        Live listeners to the steps.
    attempt : int or None
        For a resumed run: run the steps again as this attempt left them; None: the last attempt.
    allow_different : bool
        Whether to continue after the first value that differs from the recorded value.

    Returns
    -------
    Verdict
        The result of the comparison.
    int
        The exit status of the script; 0 if it was ended after the last step.

    Raises
    ------
    CaptureError
        If the steps cannot be run again; raised before the script begins, or as soon as this is known.
    """
    with recorded_run(path, attempt) as recorded, contextlib.ExitStack() as stack:
        plan = plan_of(recorded, steps, allow_different=allow_different)
        again = Reenactment(plan, allow_different=allow_different)
        stack.enter_context(telling_the_script())
        try:
            status = run(
                program,
                out=out,
                captures=captures_for(plan, captures),
                options=replace(options, reenacts=plan.describe()),
                receivers=(*(WithinSteps(receiver, steps) for receiver in receivers), again.comparison),
                began=lambda recording: stack.enter_context(again.by(recording)),
                required=True,
            )
        finally:
            again.refuse()
        return again.verdict, status


def reenact(
    path: Anywhere,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    step: Callable[[nn.Module, Any, Any, Any], object],
    *,
    steps: tuple[int, int],
    out: Anywhere,
    capture: Capture | Iterable[Capture] | None = None,
    loss: nn.Module | Callable[..., Any] | None = None,
    receivers: Iterable[Receiver] = (),
    overwrite: bool = False,
    attempt: int | None = None,
    allow_different: bool = False,
) -> Verdict:
    """Run steps of a recorded run again by a function, record them anew, and compare.

    Parameters
    ----------
    path : path or URL
        The trace of the run.
    model : nn.Module
        A model of the run's architecture. It gets the state of the last keyframe at or before the steps.
    optimizer : Optimizer or iterable of Optimizer
        Created as for the run. It gets the recorded state, and at each step the recorded hyperparameters.
    step : callable
        ``step(model, optimizer, inputs, labels)`` takes one step of the training. Inputs and labels are those of the
        step's first recorded forward and loss: a tensor, or a dictionary by leaf; labels may be None.
    steps : (int, int)
        The first global step, and the step after the last.
    out : path or URL
        The new trace.
    capture : Capture or iterable of Capture, optional
        What to record of the steps; by default everything.
    loss
        As for `tracer.record`.
    receivers : iterable of Receiver
        Live listeners to the steps.
    overwrite : bool
        Whether to replace a trace that is at `out`.
    attempt : int, optional
        For a resumed run: run the steps again as this attempt left them; by default, the last attempt.
    allow_different : bool
        Whether to continue after the first value that differs from the recorded value, and to accept another version
        of PyTorch.

    Returns
    -------
    Verdict
        ``outcome``: ``"identical"`` if every value was compared and is equal to the bit, ``"partial"`` if some were
        compared with nothing, which ``uncompared`` names; the ``first`` difference; and what was ``replaced``.

    Raises
    ------
    CaptureError
        If the steps cannot be run again.
    TraceExistsError
        If something is at `out`.
    """
    with recorded_run(path, attempt) as recorded:
        plan = plan_of(recorded, steps, allow_different=allow_different, with_data=False)
        again = Reenactment(plan, allow_different=allow_different)
        given = (of_steps(),) if capture is None else (capture,) if isinstance(capture, Capture) else tuple(capture)
        recording = record(
            out,
            model,
            optimizer,
            loss=loss,
            capture=captures_for(plan, given),
            receivers=(*(WithinSteps(receiver, steps) for receiver in receivers), again.comparison),
            overwrite=overwrite,
            reenacts=plan.describe(),
        )
        with recording as observed, again.by(observed, own_steps=0):
            for number in range(plan.keyframe.at.global_step, plan.stop):
                found = plan.recorded.step(number)
                inputs, labels = (_alone(one.get(0)) for one in (found.inputs, found.labels))
                with contextlib.suppress(Ended):
                    step(model, optimizer, inputs, labels)
                if again.over:
                    break
        again.refuse()
        return again.verdict


def of_steps() -> Capture:
    """A default capture, without the kinds of epochs."""
    return Capture(kinds=[kind for kind in Capture().kinds or () if kind in OF_STEPS])


def _alone(found: dict[str, Any] | None) -> Any:
    """Copies of tensors by leaf, or, if the only leaf is ``""``, the copied tensor alone."""
    copies = None if found is None else {leaf: tensor.clone() for leaf, tensor in found.items()}
    return copies if copies is None or {*copies} != {""} else copies[""]


@contextlib.contextmanager
def telling_the_script() -> Iterator[None]:
    """Set ``TRACE_REHEARSAL`` to ``reenact`` inside this context, so that a script can tell."""
    before = os.environ.get(REHEARSAL)
    os.environ[REHEARSAL] = "reenact"
    try:
        yield
    finally:
        if before is None:
            del os.environ[REHEARSAL]
        else:
            os.environ[REHEARSAL] = before


PROBE_KINDS: tuple[str, ...] = ("activations", "network_output", "input_labels")
"""The default kinds of a late probe, as of a live probe."""


@dataclass(frozen=True)
class LateProbe:
    """Inputs for a model, and the keyframes whose weights it gets.

    Attributes
    ----------
    inputs : Tensor, tuple or dict
        As for `tracer.Exporter.probe`.
    labels : Tensor or None
    steps : (int, int or None) or None
        The range of global steps whose keyframes are used; None: all.
    attempt : int or None
        For a resumed run: use the keyframes as this attempt left them; None: the last attempt.
    """

    inputs: Any
    labels: Tensor | None = None
    steps: tuple[int, int | None] | None = None
    attempt: int | None = None


def probe_script(
    path: Anywhere,
    program: Program,
    probe: LateProbe,
    *,
    out: Anywhere,
    kinds: Sequence[str],
    modules: Sequence[str] | None,
    options: Options,
) -> list[int]:
    """Run a model on inputs with the weights of a run's keyframes, and record its results.

    The script that trained runs until its first step is over, to create the model. Then the model gets the state of
    each keyframe in turn, and runs in eval mode without gradients, like a probe of a live run.

    Parameters
    ----------
    path : path or URL
        The trace of the run.
    program : Program
        The script, with its arguments in the run.
    probe : LateProbe
    out : path or URL
        The new trace. Its messages have the tag ``probe``, and the steps of the keyframes.
    kinds : sequence of str
        The kinds to record; if empty, activations, outputs and labels.
    modules : sequence of str or None
        The modules to record; None: all that a default capture takes.
    options : Options

    Returns
    -------
    list of int
        The global steps of the keyframes.

    Raises
    ------
    CaptureError
        If the steps have no keyframe, the script has another model, or the model does not take the inputs.
    UnknownNameError
        If `kinds` has a kind that no probe gives.
    """
    allowed = (*PROBED, "input_labels")
    for kind in kinds:
        if kind not in allowed:
            raise UnknownNameError.of("kind of a probe", kind, allowed)
    with recorded_run(path, probe.attempt) as recorded, contextlib.ExitStack() as stack:
        there = recorded.keyframes()
        start, stop = probe.steps if probe.steps is not None else (0, None)
        steps = [step for step in there if start <= step and (stop is None or step < stop)]
        if not steps:
            found = f"it has them at {len(there)} steps, {there[0]:,} to {there[-1]:,}" if there else "it has none"
            raise CaptureError(f"{path} has no keyframe among these steps; {found}")
        passes = _Passes(recorded, steps, probe)
        stack.enter_context(telling_the_script())
        about = {**recorded.describe(), "keyframes": steps}
        try:
            run(
                program,
                out=out,
                captures=[Capture(kinds=kinds or PROBE_KINDS, modules=modules, tags=(PROBE,))],
                options=replace(options, reenacts=about),
                began=lambda recording: stack.enter_context(passes.after_the_first_step_of(recording)),
                required=None,  # no step of the training is recorded
            )
        finally:
            passes.refuse()
        if not passes.done:
            raise CaptureError(f"{program.script} took no training step, so it has no model to put inputs through")
        return steps


class _Passes:
    """Runs the model of a script on inputs, with the state of each keyframe in turn."""

    def __init__(self, recorded: Recorded, steps: Sequence[int], probe: LateProbe) -> None:
        self._recorded = recorded
        self._steps = steps
        self._probe = probe
        self._error: Exception | None = None
        self.done = False

    @contextlib.contextmanager
    def after_the_first_step_of(self, run: Run) -> Iterator[None]:
        """When the script has taken its first step, run the model and end the script."""
        handle = register_optimizer_step_post_hook(functools.partial(self._stepped, run.exporter))
        try:
            yield
        finally:
            handle.remove()

    def refuse(self) -> None:
        """Raise the error that kept the model from being run, if there is one."""
        if self._error is not None:
            raise self._error

    def _stepped(self, exporter: Exporter, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.done or exporter.parts.clock.open or not exporter.parts.optimizers.trains(optimizer):
            return
        self.done = True
        try:
            self._run(exporter)
        except CaptureError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - the model may raise anything for a user's inputs
            said = f"{type(error).__name__}: {error}"
            self._error = CaptureError(f"the model does not take the inputs of the probe ({said})")
        raise Ended(0)

    def _run(self, exporter: Exporter) -> None:
        for number, step in enumerate(self._steps):
            keyframe = self._recorded.keyframe(step)
            restore(keyframe, exporter)
            exporter.start_at(step, keyframe.at.train_step, keyframe.at.epoch)
            if number:
                exporter.parts.probes.run(PROBE)
            else:
                exporter.probe(PROBE, self._probe.inputs, self._probe.labels, every=1)
