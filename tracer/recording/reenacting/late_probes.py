"""Late probes: inputs that nobody thought of during a run, put through the weights of its keyframes afterwards."""

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
"""What is recorded of a late probe by default, as of a live one."""


@dataclass(frozen=True)
class LateProbe:
    """Inputs of a model, and the keyframes whose weights they go through.

    Attributes
    ----------
    inputs : Tensor, tuple or dict
        As for `tracer.Exporter.probe`.
    labels : Tensor or None
    steps : (int, int or None) or None
        The global steps whose keyframes are taken; None: all.
    attempt : int or None
        Of a run that was resumed, the attempt that left these keyframes; None: the last.
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
    """Put inputs through the weights of a run's keyframes, and record what the model makes of them.

    The script that trained runs until its first step is over, for its model. Then the model gets the state of one
    keyframe after the other, and is run in eval mode without gradients, as by a probe of a live run.

    Parameters
    ----------
    path : path or URL
        Of the trace of the run.
    program : Program
        The script, with the arguments that it had.
    probe : LateProbe
    out : path or URL
        Of the trace to make. Its messages have the tag ``probe``, and the steps of the keyframes.
    kinds : sequence of str
        What is recorded; if there are none, activations, outputs and labels.
    modules : sequence of str or None
        Of which modules; None: of all that a plain capture takes.
    options : Options

    Returns
    -------
    list of int
        The global steps of the keyframes.

    Raises
    ------
    CaptureError
        If there is no keyframe among the steps, the script has another model, or the model does not take the inputs.
    UnknownNameError
        If a probe gives no such kind.
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
    """Runs the model of a script on inputs, with the state of one keyframe after the other."""

    def __init__(self, recorded: Recorded, steps: Sequence[int], probe: LateProbe) -> None:
        self._recorded = recorded
        self._steps = steps
        self._probe = probe
        self._error: Exception | None = None
        self.done = False

    @contextlib.contextmanager
    def after_the_first_step_of(self, run: Run) -> Iterator[None]:
        """Run it when the script has taken a step, and end the script."""
        handle = register_optimizer_step_post_hook(functools.partial(self._stepped, run.exporter))
        try:
            yield
        finally:
            handle.remove()

    def refuse(self) -> None:
        """Raise what kept the model from being run."""
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
        except Exception as error:  # noqa: BLE001 - of the model, which gets inputs of the user's
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
