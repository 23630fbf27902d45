"""Late probes: run the model of a recorded run on new inputs, with the weights of its keyframes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracer.errors import CaptureError, UnknownNameError
from tracer.observing.capture import Capture
from tracer.observing.exporter import Exporter
from tracer.observing.probes import PROBE
from tracer.observing.publisher import PROBED
from tracer.recording.launching.program import Program
from tracer.recording.launching.script import run
from tracer.recording.options import Options
from tracer.recording.reenacting.feed import Ended, restore
from tracer.recording.reenacting.recorded import Recorded, recorded_run
from tracer.recording.reenacting.reenact import telling_the_script
from tracer.recording.run import Run
from tracer.stores.locations import Anywhere

KINDS: tuple[str, ...] = ("activations", "network_output", "input_labels")
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
                captures=[Capture(kinds=kinds or KINDS, modules=modules, tags=(PROBE,))],
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
