"""`certify`: trains some steps with and without a recorder, and compares the bits."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from tracer.errors import CaptureError, TracerError, summary
from tracer.observing.exporter import Exporter
from tracer.observing.guesses.optimizers import observable, steps_within
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.structure import unwrap
from tracer.recording import environment
from tracer.recording.certifying.fingerprint import fingerprint, generators, set_generators
from tracer.recording.certifying.verdict import Enough, Rehearsal, Steps, compare
from tracer.recording.recording import record
from tracer.recording.run import Run
from tracer.stores.locations import location
from tracer.trace.certificate import Certificate

STEPS: Final = 10
"""The default number of steps to compare."""

Train = Callable[[Callable[..., AbstractContextManager[Run]]], Any]


def certify(train: Train, *, steps: int = STEPS) -> Certificate:
    """Run the first steps of a training without, with and again without a recorder, and compare them bit for bit.

    All three runs begin with the same states of Python's, NumPy's and torch's generators (CPU and CUDA), which are
    restored afterwards. After every step the generators, parameters, buffers, modes, and the optimizers' states and
    settings are compared.

    Parameters
    ----------
    train : callable
        ``train(record)`` creates model, optimizer and data, and trains. It begins the recording with
        ``with record(model, optimizer, …) as run:``; `record` takes the arguments of `tracer.record` without the path,
        and in two of the three runs records nothing. After `steps` steps an exception ends the training.
    steps : int
        The number of steps; a training that ends earlier is compared as far as it goes.

    Returns
    -------
    Certificate
        Pass it to `tracer.record` in the real run, which keeps it in the trace.

    Raises
    ------
    CaptureError
        If `steps` is not a positive integer. An exception from `train` becomes a verdict.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> def train(record):
    ...     model = torch.nn.Linear(3, 2)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with record(model, optimizer, capture=tracer.Capture(kinds=["weights"])):
    ...         for _ in range(100):
    ...             optimizer.zero_grad()
    ...             model(torch.randn(5, 3)).square().mean().backward()
    ...             optimizer.step()
    >>> certificate = tracer.certify(train, steps=4)
    >>> certificate.reason
    'after each of 4 steps all bits were the same with and without a recorder'
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> train(lambda *given, **more: tracer.record(path, *given, certificate=certificate, **more))
    >>> tracer.open(path).header["certificate"]["verdict"]
    'identical'
    """
    if type(steps) is not int or steps < 1:
        raise CaptureError(f"steps is a whole number from 1, not {steps!r}")
    if environment.disabled():
        return Certificate(
            verdict="failed", reason=f"{environment.DISABLE} turns recording off, so nothing was compared"
        )
    before = generators()
    runs: list[Steps] = []
    try:
        for recorded in (False, True, False):
            set_generators(before)
            runs.append(_rehearse(train, steps, recorded))
    finally:
        set_generators(before)
    return compare(*runs, hint="; train must make everything anew, and draw from seeded generators only")


# -- a training in this process ---------------------------------------------------------------------------------------


def _rehearse(train: Train, limit: int, recorded: bool) -> Steps:
    """The first steps of a training."""
    with tempfile.TemporaryDirectory(prefix="trace-certify-") as folder:
        rehearsal = _OfFunction(folder if recorded else None, limit)
        steps = rehearsal.steps
        try:
            train(rehearsal.record)
        except Enough:
            pass
        except SystemExit as error:  # it ends the training, not the caller
            if error.code not in (None, 0):
                steps.error = summary(error)
        except TracerError as error:
            steps.error, steps.refused = str(error), True
        except Exception as error:
            steps.error = summary(error)
        return steps


class _OfFunction(Rehearsal):
    """A run of a training function, recorded into a temporary folder or, without a folder, not recorded."""

    def __init__(self, folder: str | None, limit: int) -> None:
        super().__init__(limit)
        self._folder = folder
        self._models: dict[str, nn.Module] = {}
        self._optimizers: list[Optimizer] = []

    def hashed(self) -> dict[str, str]:
        return fingerprint(self._models, self._optimizers)

    @contextlib.contextmanager
    def record(
        self, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None = None, **settings: Any
    ) -> Iterator[Run]:
        """`tracer.record` without the path; an unrecorded run gets a `Run` that does nothing."""
        optimizers = observable(optimizer)
        path = os.path.join(self._folder or "", f"run{len(self._models)}.zarr")
        with self._recording(path, model, None if optimizer is None else optimizers, settings) as run:
            self.recording = run
            self._models["" if not self._models else f"model{len(self._models)}"] = unwrap(model)
            self._optimizers += optimizers
            handles: list[Any] = []
            pending = False
            if optimizers:
                # called after the recorder's own hook, which was registered before
                handles = [optimizers[-1].register_step_post_hook(functools.partial(self._stepped, run))]
            elif optimizer is None:
                passes = _Passes(run, self._over)
                handles = [unwrap(model).register_forward_pre_hook(passes)]
            else:
                step = run.step

                def stepped() -> None:
                    step()
                    self._over(run)

                vars(run)["step"] = stepped
            try:
                yield run
                pending = optimizer is None and passes.open
            finally:
                for handle in handles:
                    handle.remove()
        if pending:
            self._over(run)

    def _recording(
        self, path: str, model: nn.Module, given: tuple[Optimizer, ...] | None, settings: Any
    ) -> AbstractContextManager[Run]:
        if self._folder is not None:
            recording = record(path, model, given, **settings)
            recording.path = location(path)  # overrides TRACE_PATH
            return recording
        exporter = Exporter()
        exporter.detach()
        exporter.set_model(model)
        exporter.set_optimizer(given)
        return contextlib.nullcontext(Run(location(path), exporter, None))

    def _stepped(self, run: Run, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not steps_within(optimizer):
            self._over(run)

    def _over(self, run: Run) -> None:
        last = self.step_over()
        if run.recorder is None:  # the loop may read `run.global_step`
            run.exporter.start_at(len(self.steps.taken), 0, 0)
        if last:
            raise Enough


class _Passes:
    """Ends steps without an optimizer: a step lasts until the next training forward."""

    def __init__(self, run: Run, over: Callable[[Run], None]) -> None:
        self._run = run
        self._over = over
        self.open = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if recomputing() or not self._run.exporter.parts.passes.is_training(module):
            return
        if self.open:
            self._over(self._run)
        self.open = True
