"""Rehearsals: a script's first steps in separate processes, for ``trace record --certify`` and ``--dry-run``.

A rehearsal runs the script from its beginning, with its arguments, and ends it with ``SystemExit`` after some steps.
Files that the script writes in these steps are really written. Its stdout is discarded, its stdin is empty, and
``TRACE_REHEARSAL`` in its environment is ``certify`` or ``dry-run``. All rehearsals of a script begin with the same
seeds and hash seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracer.errors import CaptureError, TracerError, plain
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.observing.capture import Capture, observed
from tracer.observing.guesses.optimizers import steps_within
from tracer.observing.probes import PROBE
from tracer.observing.pytorch.autograd import behind
from tracer.recording import termination
from tracer.recording.budget import ROW_BYTES
from tracer.recording.certifying.certify import Rehearsal, RehearsedSteps, Step, compare, fingerprint
from tracer.recording.launching.program import Program
from tracer.recording.launching.script import captures_of, run, unwatched
from tracer.recording.launching.session import replaced, telling, telling_backward
from tracer.recording.launching.trained import models_of, names_of
from tracer.recording.options import REHEARSAL, Options
from tracer.recording.recording import Run
from tracer.secrets import masked_text
from tracer.trace.claiming import this_process
from tracer.trace.header import Certificate
from tracer.trace.reader import TraceReader

PATIENCE = 20.0
"""Seconds that a script has to end after its last step."""

Purpose = Literal["certify", "dry-run"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The task of a rehearsal's process.

    Attributes
    ----------
    program : Program
    settings : sequence of mapping
        The captures, as `tracer.recording.launching.script.captures_of` takes them.
    options : Options
    purpose : str
        ``"certify"`` or ``"dry-run"``.
    steps : int
        The number of steps after which the script is ended.
    trace : str or None
        The path of the recording; None: not recorded.
    report : str
        The file to which the process reports each step.
    """

    program: Program
    settings: Sequence[Mapping[str, Any]]
    options: Options
    purpose: Purpose
    steps: int
    trace: str | None = None
    report: str = ""

    @classmethod
    def read(cls, path: str) -> Request:
        """Read a request that `write` has written."""
        with open(path, encoding="utf-8") as file:
            told = json.load(file)
        del told["path"]
        return cls(**told | {"program": Program(**told["program"]), "options": Options(**told["options"])})

    def write(self, path: Path) -> None:
        """Write the request as JSON, with ``sys.path``."""
        path.write_text(json.dumps(asdict(self) | {"path": sys.path}), encoding="utf-8")


def certify_script(
    program: Program, settings: Sequence[Mapping[str, Any]], options: Options, steps: int
) -> Certificate:
    """`tracer.certify` for a script: its first steps without, with and again without a recorder.

    Parameters
    ----------
    program : Program
    settings : sequence of mapping
        The captures, as `tracer.recording.launching.script.captures_of` takes them.
    options : Options
        The recording's options; rehearsals ignore `resume` and start from the beginning.
    steps : int

    Raises
    ------
    CaptureError
        If this process is one of several ranks.
    """
    _refuse_ranks("--certify", "or call tracer.certify in the script")
    request = Request(program=program, settings=settings, options=options, purpose="certify", steps=steps)
    with termination.raises(), tempfile.TemporaryDirectory(prefix="trace-certify-") as folder:
        runs = [rehearse(request, Path(folder), recorded=recorded)[0] for recorded in (False, True, False)]
    hint = "; it seeds a generator anew in each run, reads the clock, or computes in no fixed order"
    return compare(*runs, hint=hint)


def _refuse_ranks(option: str, advice: str) -> None:
    """Raise `CaptureError` if this process is one of several ranks, whose rehearsals would wait for each other."""
    process = this_process()
    if process.size > 1:
        raise CaptureError(
            f"{option} runs a script of one process, and this is rank {process.rank} of {process.size}: give it to a "
            f"run of one process, {advice}"
        )


def rehearse(request: Request, folder: Path, *, recorded: bool) -> tuple[RehearsedSteps, dict[str, Any]]:
    """Run a rehearsal in a separate process.

    Parameters
    ----------
    request : Request
    folder : Path
        For the files of all rehearsals of the script.
    recorded : bool

    Returns
    -------
    Steps
        The state of the training after each step.
    dict
        The other entries of the process's report.
    """
    number = len(list(folder.glob("*.request")))
    asked, report, errors = (folder / f"{number}.{suffix}" for suffix in ("request", "report", "errors"))
    replace(
        request,
        options=_anew(request.options),
        trace=str(folder / f"{number}.zarr") if recorded else None,
        report=str(report),
    ).write(asked)
    report.touch()
    begin = (
        "import json, sys; sys.path[:] = json.load(open(sys.argv[1]))['path']; "
        "import tracer.recording.certifying.rehearsal as rehearsal; rehearsal.main()"
    )
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", begin]  # type: ignore[attr-defined]
    environment = {"PYTHONHASHSEED": "0", **os.environ, REHEARSAL: request.purpose}
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, str(asked)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
        )
        try:
            _wait(process, report)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    return _read(report, errors, process.returncode)


def _anew(options: Options) -> Options:
    """The options of a rehearsal: not resumed, and not strict, so that failures to observe do not end it.

    Receivers among a flight recorder's triggers cannot be sent to another process.
    """
    flight = None if options.flight is None else replace(options.flight, when=options.flight.names)
    anew = replace(options, overwrite=False, strict=False, resume=False, certificate=None, flight=flight)
    return replace(anew, first_step=None, first_epoch=None)


def _wait(process: subprocess.Popen[bytes], report: Path) -> None:
    """Wait until the process has ended, but only `PATIENCE` seconds after its report is complete."""
    deadline = None
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        if deadline is None and b'"over"' in _tail(report):
            deadline = time.monotonic() + PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            return


def _tail(report: Path) -> bytes:
    """The end of a report; the whole may be too long to read repeatedly."""
    with report.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        return file.read()


def _read(report: Path, errors: Path, code: int) -> tuple[RehearsedSteps, dict[str, Any]]:
    steps, told = RehearsedSteps(), dict[str, Any]()
    for line in report.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if "hashes" in one:
            steps.taken.append(Step(**one))
        else:
            told |= one
    if "refused" in told:
        steps.error, steps.refused = told["refused"], True
    elif "left" not in told and (told.get("status", code) != 0 or "status" not in told):
        status = told.get("status", code)
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = masked_text(plain(lines[-1])).strip() if lines else "it said nothing"
        steps.error = f"{last} (exit status {status})"
    return steps, told


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
    _refuse_ranks("--dry-run", "whose streams are those of each rank")
    request = Request(
        program=program, settings=settings, options=options.unbounded(), purpose="dry-run", steps=DRY_RUN_STEPS
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
    streams = told["streams"]
    full = sum(stream["bytes_per_recorded_step"] for stream in streams)
    shares = [burst / every for burst, every in map(_rhythm, streams)]
    mean = sum(stream["bytes_per_recorded_step"] * share for stream, share in zip(streams, shares, strict=True))
    in_run = sum(stream["bytes_per_recorded_step"] * _due(stream, run_steps or 0) for stream in streams)
    overhead = compare(bare, recorded, again).overhead
    ratio = overhead.get("cpu_ratio")
    return {
        "streams": streams,
        "messages_per_recorded_step": sum(stream["messages_per_recorded_step"] for stream in streams),
        "bytes_per_recorded_step": full,
        "bytes_per_step": mean,
        "run_steps": run_steps,
        "bytes_per_run": None if run_steps is None else round(in_run),
        "max_overhead": options.max_overhead,
        "max_bytes": options.max_bytes,
        "stop_at_bytes": options.stop_at_bytes,
        "recorded_cpu_ratio": ratio,
        "bare_cpu_ratio": overhead.get("bare_ratio"),
        "estimated_cpu_ratio": None if ratio is None or not full else 1 + (ratio - 1) * mean / full,
        "steps": overhead.get("steps", 0),
        "steps_seen": seen,
    }


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
            captures=[replace(capture, every=1, burst=1, start=0, stop=None) for capture in captures]
            if is_dry
            else captures,
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
        """Report each stream of the trace as `dry_run` returns it."""
        assert self.recording is not None
        exporter, probe = self.recording.exporter, self._request.options.probe
        steps = max(1, len(self.steps.taken))
        by_capture = {id(one): real for one, real in zip(exporter.captures, captures, strict=True)}
        streams = []
        with TraceReader(path) as trace:
            rows = trace.journal
            for stream in trace.streams:
                kind = observed(stream.kind)
                taken = exporter.parts.demand.capture_of(stream.kind, stream.module, stream.tag)
                capture = by_capture[id(taken)] if taken is not None else Capture()
                clock = KINDS[kind].clock if kind in KINDS else "global_step"
                probed, training = stream.tag == PROBE, stream.tag == DEFAULT_TAG
                thinned = not probed and kind in KINDS and clock == "global_step"
                every = probe.every if probed and probe else capture.every if thinned else 1
                burst = capture.burst if thinned else 1
                aside = clock != "epoch" and not probed and not (training and thinned)
                # if a module is called once in each pass, its call numbers are the passes' numbers
                calls = rows[rows[:, Column.STREAM] == stream.id, Column.CALL]
                kept = int((calls % every < burst).sum()) if aside else stream.count
                # the number of steps in an epoch is unknown, and an epoch's events have no data
                count = 0 if clock == "epoch" else kept
                size = stream.bytes / stream.count
                streams.append(
                    {name: getattr(stream, name) for name in ("kind", "module", "leaf", "tag", "dtype")}
                    | {"shapes": [list(shape) for shape in stream.shapes], "bytes_per_message": size}
                    | {"messages_per_recorded_step": count / steps}
                    # data, and a row in the journal for each message
                    | {"bytes_per_recorded_step": (size * count + count * ROW_BYTES) / steps}
                    | {"every": every, "burst": burst, "start": capture.start if thinned else 0}
                    | {"stop": capture.stop if thinned else None}
                    | {"clock": "epoch" if clock == "epoch" else "aside" if aside else "step"}
                )
        self._tell(streams=streams)

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
