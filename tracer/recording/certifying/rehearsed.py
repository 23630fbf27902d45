"""The process of a rehearsal: runs a script's first steps, reports the state after each, and ends the script."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracer.errors import TracerError
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.observing.capture import Capture, observed
from tracer.observing.optimizers import steps_within
from tracer.observing.probes import PROBE
from tracer.observing.pytorch.loss_graph import behind
from tracer.recording.certifying.certify import Rehearsal, fingerprint
from tracer.recording.certifying.rehearsal import Request
from tracer.recording.launching.script import captures_of, run, unwatched
from tracer.recording.launching.session import replaced, telling, telling_backward
from tracer.recording.launching.trained import models_of, names_of
from tracer.recording.recording import Run
from tracer.trace.reader import TraceReader

_SEED = 67280421310721
"""The seed of all generators: torch's own default."""


class _Left(SystemExit):
    """Ends a script after its first steps, with exit status 0."""


def main() -> None:
    """Run a script's first steps; the command line names the file of the `Request`."""
    request = Request.read(sys.argv[1])
    random.seed(_SEED)
    np.random.seed(_SEED % 2**32)
    torch.manual_seed(_SEED)
    with open(request.report, "a", encoding="utf-8") as report:

        def tell(**told: Any) -> None:
            report.write(json.dumps(told) + "\n")
            report.flush()

        rehearsal = _OfScript(request, tell)
        try:
            with rehearsal.watching():
                status = rehearsal.run()
        except TracerError as error:
            tell(refused=str(error), over=True)
        else:
            tell(status=status, over=True)


class _OfScript(Rehearsal):
    """Counts the steps of a script as a recording does, and ends the script."""

    def __init__(self, request: Request, tell: Callable[..., None]) -> None:
        super().__init__(request.steps)
        self._request = request
        self._tell = tell
        self._pid = os.getpid()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._models: weakref.WeakValueDictionary[str, nn.Module] | None = None
        self._differentiated: list[Tensor] = []  # without optimizers: the leaves of the last `backward`

    def run(self) -> int:
        """Run the script, recorded or not; returns its exit status."""
        request = self._request
        if request.trace is None:
            self._watch_backward()
            return unwatched(request.program)
        captures = captures_of(request.settings)
        is_dry = request.purpose == "dry-run"
        probe = request.options.probe
        if probe:  # often enough that the rehearsal has some probes
            probe = probe._replace(every=min(probe.every, 1 if is_dry else max(1, request.steps // 2)))
        status = run(
            request.program,
            out=request.trace,
            # a dry run records all steps, to see in the first ones the streams of later steps
            captures=[replace(one, every=1, burst=1, start=0, stop=None) for one in captures] if is_dry else captures,
            options=replace(request.options, probe=probe),
            began=self._started,
            required=True,
        )
        if is_dry:
            self._tell_streams(request.trace, captures)
        return status

    def _started(self, run: Run) -> None:
        self.recording = run
        self._watch_backward()  # only now, so that it wraps the recording's own `backward`

    def _tell_streams(self, path: str, captures: Sequence[Capture]) -> None:
        """Report each stream of the trace, and how often its capture takes it."""
        assert self.recording is not None
        exporter = self.recording.exporter
        by_capture = {id(one): real for one, real in zip(exporter.captures, captures, strict=True)}
        streams = []
        with TraceReader(path) as trace:
            header, rows = len(json.dumps(trace.header)), trace.journal
            for one in trace.streams:
                taken, kind = exporter.parts.demand.capture_of(one.kind, one.module, one.tag), observed(one.kind)
                capture = by_capture[id(taken)] if taken is not None else Capture()
                clock = KINDS[kind].clock if kind in KINDS else "global_step"
                probed, training = one.tag == PROBE, one.tag == DEFAULT_TAG
                thinned = not probed and kind in KINDS and clock == "global_step"
                probe = self._request.options.probe
                every = probe.every if probed and probe else capture.every if thinned else 1
                calls = rows[rows[:, Column.STREAM] == one.id, Column.CALL]
                aside = clock != "epoch" and not probed and not (training and thinned)
                # if a module is called once in each pass, its call numbers are the passes' numbers
                burst = capture.burst if thinned else 1
                kept = int((calls % every < burst).sum()) if aside else one.count
                streams.append(
                    {name: getattr(one, name) for name in ("kind", "module", "leaf", "tag", "dtype", "count", "bytes")}
                    | {"shapes": [list(shape) for shape in one.shapes]}
                    | {"every": every, "burst": burst, "start": capture.start if thinned else 0}
                    | {"stop": capture.stop if thinned else None, "kept": kept}
                    | {"clock": "epoch" if clock == "epoch" else "aside" if aside else "step"}
                )
        self._tell(streams=streams, header=header)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside this context, notice new optimizers and their steps."""

        def made(optimizer: Optimizer) -> None:
            self._optimizers.append(weakref.ref(optimizer))
            self._models = None

        init = telling(Optimizer.__init__, made)
        # global hooks are called after an optimizer's own hooks, and so after the recorder's
        handle = register_optimizer_step_post_hook(self._stepped)
        # the second entry restores `Tensor.backward`, which `_watch_backward` replaces
        with replaced(Optimizer, "__init__", init), replaced(Tensor, "backward", Tensor.backward):
            try:
                yield
            finally:
                handle.remove()

    def _watch_backward(self) -> None:
        """Count each ``backward`` as a step until the script makes an optimizer, as a recording does."""

        def is_step() -> bool:
            return not self._optimizers and os.getpid() == self._pid

        def begins(tensor: Tensor) -> None:
            if is_step():
                self._differentiated = _leaves_of(tensor)

        def ended() -> None:
            if is_step():
                self._step_over()

        backward = telling_backward(begins, ended)
        setattr(Tensor, "backward", backward)  # noqa: B010 - mypy forbids to assign it

    def _alive(self) -> list[Optimizer]:
        return [one for one in (ref() for ref in self._optimizers) if one is not None]

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = self._alive()
        if os.getpid() != self._pid or not alive or optimizer is not alive[-1] or steps_within(optimizer):
            return
        self._step_over()

    def _step_over(self) -> None:
        taken, before = self.steps.taken, len(self.steps.taken)
        last = self.step_over()
        if len(taken) > before:  # not if the script continues after it was ended
            self._tell(**taken[-1]._asdict())
            if last:
                self._tell(left=True)
        if last:
            raise _Left(0)

    def hashed(self) -> dict[str, str]:
        if self._request.purpose != "certify":
            return {}
        if not self._optimizers:
            holder = nn.Module()
            for number, tensor in enumerate(self._differentiated):
                parameters: dict[str, Any] = holder._parameters  # the tensors need not be `nn.Parameter`
                parameters[f"parameters.{number}"] = tensor
                holder._buffers[f"gradient of parameters.{number}"] = tensor.grad
            return fingerprint({"": holder}, [])
        alive = self._alive()
        if self._models is None:
            models = models_of(alive)
            self._models = weakref.WeakValueDictionary({"": models[0]} if len(models) == 1 else names_of(models))
        return fingerprint(dict(self._models), alive)


def _leaves_of(tensor: Tensor) -> list[Tensor]:
    """The tensors to which a ``backward`` gives gradients, in the order of the graph."""
    found = (getattr(node, "variable", None) for node in behind(tensor))
    return list({id(one): one for one in found if isinstance(one, Tensor)}.values())
