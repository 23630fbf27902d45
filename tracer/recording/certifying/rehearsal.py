"""The first steps of a script in processes of their own: ``trace record --certify`` and ``--dry-run``.

A rehearsal runs the script from its beginning, with its arguments, and leaves it with ``SystemExit`` after some steps.
What the script writes in them, it writes. Its output is thrown away, it reads nothing, and ``TRACE_REHEARSAL`` in its
environment says ``certify`` or ``dry-run``. All rehearsals of a script begin with the same seeds and hash seed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracer.errors import CaptureError, TracerError, plain
from tracer.format.encodings import ENCODINGS
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.observing.capture import Capture
from tracer.observing.optimizers import steps_within
from tracer.observing.pytorch.patches import Differentiating
from tracer.recording import termination
from tracer.recording.budget import ARRAY_BYTES, BASE_BYTES, CHUNK_BYTES, ROW_BYTES, STREAM_BYTES, stored_bytes
from tracer.recording.certifying.certify import Certificate, Steps, Stopwatch, compare, fingerprint
from tracer.recording.environment import REHEARSAL
from tracer.recording.launching import launch
from tracer.recording.recording import Run
from tracer.secrets import masked_text
from tracer.trace.part import VERDICTS, this_process
from tracer.trace.reader import TraceReader

DRY_RUN_STEPS: Final = 8
"""How many steps a dry run takes."""
_PATIENCE = 20.0
"""Seconds that a script has for its end after the last step, and a rank for the others' last step."""
_SEED = 67280421310721
"""With which all generators begin: torch's own default."""
_LONG = timedelta(days=1)
"""How long ranks wait for each other between rehearsals, which take as long as the script's first steps do."""
_ANOTHER = "another rank had failed before"

Purpose = Literal["certify", "dry-run"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is to be run, and how it would be recorded.

    Attributes
    ----------
    script : str
    arguments : sequence of str
    module : bool
        As in `tracer.recording.launching.launch.run`.
    captures : sequence of mapping
        Settings as `Capture.from_mapping` takes them; of a single one, evaluations are kept light.
    recording : mapping
        Options of `tracer.recording.launching.launch.run` on how the recorder writes.
    """

    script: str
    arguments: Sequence[str] = ()
    module: bool = False
    captures: Sequence[Mapping[str, Any]] = ({},)
    recording: Mapping[str, Any] | None = None


def certify_script(program: Program, steps: int) -> Certificate:
    """`tracer.certify` for a script: its first steps without, with and again without a recorder.

    Of several ranks that torchrun has started each calls this; what all of them get is the worst verdict.

    Raises
    ------
    CaptureError
        If this is one of several ranks that torchrun has not started.
    """
    ranks = _Ranks() if this_process().size > 1 else None
    with termination.raises(), tempfile.TemporaryDirectory(prefix="trace-certify-") as folder:
        runs = [
            _run(program, Path(folder), "certify", steps, recorded=recorded, ranks=ranks)[0]
            for recorded in (False, True, False)
        ]
    certificate = compare(
        *runs, hint="; it seeds a generator anew in each run, reads the clock, or computes in no fixed order"
    )
    return certificate if ranks is None else ranks.agree(certificate)


def dry_run(program: Program, *, run_steps: int | None = None, max_bytes: int | None = None) -> dict[str, Any]:
    """What would be recorded of a script, from its first steps: streams, bytes, and an estimate of the overhead.

    Parameters
    ----------
    program : Program
    run_steps : int, optional
        How many steps the whole run has.
    max_bytes : int, optional
        The bound of the trace.

    Returns
    -------
    dict
        JSON values. ``streams``: of each its ``kind``, ``module``, ``leaf``, ``tag``, ``dtype``, ``shapes``,
        ``bytes_per_message``, ``messages_per_recorded_step``, ``every``, ``start``, ``stop``, and
        ``clock``: ``step``, ``epoch`` (not in the sums), or ``aside`` for passes that are not training (which may come
        in other numbers later).
        ``bytes_per_recorded_step``: of a step in which all are recorded; ``bytes_per_step``: in the mean over many
        steps; ``run_steps`` and ``bytes_per_run``: None where it is not known how many steps there are; ``max_bytes``
        and ``max_bytes_reached_at_step``; ``estimated_cpu_ratio``, made of ``recorded_cpu_ratio``, which was measured
        over ``steps`` steps that were all recorded; ``steps_seen``.

    Raises
    ------
    CaptureError
        If this is one of several ranks, the script trains nothing, fails, or nothing of it can be recorded.
    """
    process = this_process()
    if process.size > 1:
        raise CaptureError(
            f"--dry-run runs a script of one process, and this is rank {process.rank} of {process.size}: give it to a "
            "run of one process, whose streams are those of each rank"
        )
    with termination.raises(), tempfile.TemporaryDirectory(prefix="trace-dry-run-") as folder:
        bare, _ = _run(program, Path(folder), "dry-run", DRY_RUN_STEPS, recorded=False)
        if bare.error is not None:
            raise CaptureError(f"{program.script} failed in its first steps: {bare.error}")
        recorded, told = _run(program, Path(folder), "dry-run", DRY_RUN_STEPS, recorded=True)
        again, _ = _run(program, Path(folder), "dry-run", DRY_RUN_STEPS, recorded=False)
    if recorded.error is not None or "streams" not in told:
        raise CaptureError(f"{program.script} cannot be recorded: {recorded.error or 'it took no step'}")
    seen = len(recorded.cpu)
    if seen < DRY_RUN_STEPS and run_steps is None:  # the script has ended by itself
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
        "max_bytes": max_bytes,
        "max_bytes_reached_at_step": None if max_bytes is None else _reached(streams, told["header"], max_bytes),
        "recorded_cpu_ratio": ratio,
        "bare_cpu_ratio": overhead.get("bare_ratio"),
        "estimated_cpu_ratio": None if ratio is None or not full else 1 + (ratio - 1) * mean / full,
        "steps": overhead.get("steps", 0),
        "steps_seen": seen,
    }


class _Ranks:
    """The ranks that torchrun has started, in one of them: they meet in torchrun's store.

    Each rehearsal has a store of its own, which rank 0 serves, because what a process group leaves behind in one would
    be found by the next.

    Raises
    ------
    CaptureError
        If torchrun has not started them.
    """

    def __init__(self) -> None:
        process = this_process()
        self._rank, self._size = process.rank, process.size
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise CaptureError(
                f"--certify of several ranks needs torchrun, and this is rank {self._rank} of {self._size} of another "
                "launcher: start it with torchrun, give it to a run of one process, or call tracer.certify in it"
            )
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self._make = TCPStore
        self._host = os.environ["MASTER_ADDR"]
        shared = TCPStore(self._host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=_LONG)
        self._store = PrefixStore(f"trace-certify/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", shared)
        self._servers: list[Any] = []

    def environment(self, number: int) -> dict[str, str]:
        """What leads the processes of a rehearsal to each other."""
        if self._rank == 0:
            self._servers.append(self._make(self._host, 0, is_master=True, wait_for_workers=False))
            self._store.set(f"port/{number}", str(self._servers[-1].port))
        return {"MASTER_PORT": self._store.get(f"port/{number}").decode()}

    def failed(self, number: int) -> bool:
        """Whether a rehearsal has failed on any rank, so that others may wait for it forever."""
        return bool(self._store.check([f"failed/{number}"]))

    def is_first_to_fail(self, number: int) -> bool:
        """Let the others know that a rehearsal has failed here; whether none did so before."""
        first: bool = self._store.add(f"failed/{number}", 1) == 1
        return first

    def agree(self, certificate: Certificate) -> Certificate:
        """The worst of all ranks' certificates, with the rank; this rank's own if all are as good."""
        self._store.set(f"certificate/{self._rank}", json.dumps(asdict(certificate)))
        found = [json.loads(self._store.get(f"certificate/{rank}")) for rank in range(self._size)]
        told = [Certificate(**{**one, "differing": tuple(one["differing"])}) for one in found]
        if all(one.identical for one in told):
            return replace(certificate, reason=f"{certificate.reason}, on each of {self._size} ranks")

        def weight(one: Certificate) -> tuple[object, ...]:
            # what one rank does differently changes the parameters of all: a generator is nearer to the cause
            drew = any(name.startswith("random generator") for name in one.differing)
            return VERDICTS.index(one.verdict), _ANOTHER not in one.reason, -(one.step or 0), drew

        worst = max(told, key=weight)
        return replace(worst, reason=f"on rank {told.index(worst)}, {worst.reason}")


# -- estimates --------------------------------------------------------------------------------------------------------


def _per_step(stream: Mapping[str, Any], seen: int) -> dict[str, Any]:
    told = {name: stream[name] for name in ("kind", "module", "leaf", "tag", "dtype", "shapes")}
    count, nbytes = stream["count"], stream["bytes"]
    size = nbytes / count
    if stream["clock"] == "epoch":  # how many steps an epoch has is not known, and its events have no data
        count = nbytes = 0
    return told | {
        "bytes_per_message": size,
        "messages_per_recorded_step": count / seen,
        # with its row in the journal
        "bytes_per_recorded_step": (nbytes + count * ROW_BYTES) / seen,
        **{name: stream[name] for name in ("every", "start", "stop", "clock")},
    }


def _share(stream: Mapping[str, Any]) -> float:
    """Of how many steps a stream is recorded, in the long run."""
    return 1 / int(stream["every"])


def _due(stream: Mapping[str, Any], steps: int) -> int:
    """How many of the first steps are recorded.

    Examples
    --------
    >>> _due({"every": 10, "start": 5, "stop": None}, 31), _due({"every": 1, "start": 0, "stop": 4}, 31)
    (3, 4)
    """
    stop = steps if stream["stop"] is None else min(steps, stream["stop"])
    return len(range(-(-stream["start"] // stream["every"]) * stream["every"], stop, stream["every"]))


def _in_run(stream: Mapping[str, Any], steps: int) -> float:
    per_step: float = stream["bytes_per_recorded_step"]
    return _due(stream, steps) * per_step


def _padding(stream: Mapping[str, Any]) -> float:
    """What a recorded step's messages of a stream take on the disk besides their data and rows."""
    shape = next(iter(stream.get("shapes", ())), None)
    size = stream["bytes_per_message"]
    if shape is None or not size:
        return 0.0
    itemsize = ENCODINGS[stream["dtype"]].dtype.itemsize
    nbytes = itemsize * math.prod(shape)
    more: float = size * stored_bytes(tuple(shape), itemsize) / nbytes - size if nbytes else 0.0
    return more * float(stream["messages_per_recorded_step"])


def _reached(streams: Sequence[Mapping[str, Any]], header: int, max_bytes: int) -> int | None:
    """At which step a trace would be full; None: never."""
    arrays = {
        (one["kind"], one["dtype"])
        if one["bytes_per_message"] < CHUNK_BYTES
        else (one["kind"], one["dtype"], one["module"], one["leaf"], one["tag"])
        for one in streams
        if one["dtype"] is not None
    }
    padded = [(one, _padding(one)) for one in streams]
    fixed = BASE_BYTES + header + len(streams) * STREAM_BYTES + len(arrays) * ARRAY_BYTES

    def taken(steps: int) -> float:
        return fixed + sum(_in_run(one, steps) + _due(one, steps) * padding for one, padding in padded)

    step, stride = 0, 1
    while taken(step + stride) <= max_bytes:  # up by doubling, then down by halving
        step, stride = step + stride, stride * 2
        if stride > 1 << 40:
            return None
    while stride > 1:
        stride //= 2
        if taken(step + stride) <= max_bytes:
            step += stride
    return step


# -- the process that asks --------------------------------------------------------------------------------------------


def _run(
    program: Program, folder: Path, purpose: Purpose, steps: int, *, recorded: bool, ranks: _Ranks | None = None
) -> tuple[Steps, dict[str, Any]]:
    """One rehearsal, in a process of its own: its steps, and what else it told."""
    number = len(list(folder.glob("*.request")))
    report, errors = folder / f"{number}.report", folder / f"{number}.errors"
    request = {
        "script": program.script,
        "arguments": list(program.arguments),
        "module": program.module,
        "captures": [dict(one) for one in program.captures],
        "recording": dict(program.recording or {}),
        "trace": str(folder / f"{number}.zarr") if recorded else None,
        "report": str(report),
        "purpose": purpose,
        "steps": steps,
        "path": sys.path,
    }
    (folder / f"{number}.request").write_text(json.dumps(request), encoding="utf-8")
    report.touch()
    begin = (
        "import json, sys; sys.path[:] = json.load(open(sys.argv[1]))['path']; "
        "import tracer.recording.certifying.rehearsal as rehearsal; rehearsal.main()"
    )
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", begin]  # type: ignore[attr-defined]
    environment = {"PYTHONHASHSEED": "0", **os.environ, REHEARSAL: purpose}
    if ranks is not None:
        environment |= ranks.environment(number)
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, str(folder / f"{number}.request")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
        )
        try:
            _wait(process, report, (lambda: False) if ranks is None else functools.partial(ranks.failed, number))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    found, told = _read(report, errors, process.returncode)
    if ranks is not None and found.error is not None and not ranks.is_first_to_fail(number):
        found.error = _ANOTHER
    return found, told


def _wait(process: subprocess.Popen[bytes], report: Path, in_vain: Callable[[], bool]) -> None:
    """Until the process has ended; it has some time for that after it has told all, or once it runs in vain."""
    deadline = None
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        if deadline is None and (b'"over"' in _tail(report) or in_vain()):
            deadline = time.monotonic() + _PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            return


def _tail(report: Path) -> bytes:
    """The end of a report, which of many steps of a large model is too long to be read again and again."""
    with report.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        return file.read()


def _read(report: Path, errors: Path, code: int) -> tuple[Steps, dict[str, Any]]:
    steps, told = Steps(), dict[str, Any]()
    for line in report.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if "hashes" in one:
            steps.hashes.append(one["hashes"])
            steps.cpu.append(one["cpu"])
            steps.wall.append(one["wall"])
            steps.recorded.append(one["recorded"])
        else:
            told |= one
    if "refused" in told:
        steps.error, steps.refused = told["refused"], True
    elif "left" not in told and (told.get("status", code) != 0 or "status" not in told):
        status = told.get("status", code)
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        # torch.distributed writes the rank before each line of a traceback; of which rank this is, is told anyway
        last = re.sub(r"^\[rank\d+\]: *", "", masked_text(plain(lines[-1])).strip()) if lines else "it said nothing"
        steps.error = f"{last} (exit status {status})"
    return steps, told


# -- the process that is asked ----------------------------------------------------------------------------------------


class _Left(SystemExit):
    """Ends a script after its first steps, with exit status 0."""


def main() -> None:
    """Run a script's first steps, as the file that the command line names says."""
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    random.seed(_SEED)
    np.random.seed(_SEED % 2**32)
    torch.manual_seed(_SEED)
    with open(request["report"], "a", encoding="utf-8") as report:

        def tell(**told: Any) -> None:
            report.write(json.dumps(told) + "\n")
            report.flush()

        rehearsal = _Rehearsal(request, tell)
        try:
            with rehearsal.watching():
                status = rehearsal.run()
        except TracerError as error:
            tell(refused=str(error), over=True)
        else:
            tell(status=status, over=True)


def _wait_for_the_others() -> None:
    """Until all ranks have taken the last step: one that leaves may break what another still computes with it."""
    process = this_process()
    if process.size > 1:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with contextlib.suppress(RuntimeError):  # a rank that has failed takes no last step
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            store.set(f"trace-rehearsal/{process.rank}", "")
            store.wait([f"trace-rehearsal/{rank}" for rank in range(process.size)], timedelta(seconds=_PATIENCE))


class _Rehearsal:
    """Counts the steps of a script as a recording does, and ends it."""

    def __init__(self, request: Mapping[str, Any], tell: Callable[..., None]) -> None:
        self._request = request
        self._tell = tell
        self._pid = os.getpid()
        self._recording: Run | None = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._models: dict[str, weakref.ref[nn.Module]] | None = None
        self._differentiated: list[Tensor] = []  # the leaves of what backward was called on, while there was none
        self._probe_every = launch.PROBE_EVERY
        hashed = self._hashed if request["purpose"] == "certify" else dict
        self._stopwatch = Stopwatch(request["steps"], hashed, lambda: self._recording)

    def run(self) -> int:
        """Run the script, recorded or not; its exit status."""
        request = self._request
        script, arguments, module = request["script"], request["arguments"], request["module"]
        if request["trace"] is None:
            self._watch_backward()
            return launch.unwatched(script, arguments, module=module)
        given = tuple(Capture.from_mapping(one) for one in request["captures"])
        captures = launch.lighter_on_evaluation(given[0]) if len(given) == 1 else given
        all_steps = captures
        if request["purpose"] == "dry-run":  # so that what is recorded later is seen in the first steps
            all_steps = tuple(replace(one, every=1, start=0, stop=None) for one in captures)
        # so often that some of the probes are seen
        often = 1 if request["purpose"] == "dry-run" else max(1, request["steps"] // 2)
        recording = dict(request["recording"])
        self._probe_every = recording.get("probe_every", launch.PROBE_EVERY)
        recording["probe_every"] = min(often, self._probe_every)
        status = launch.run(
            script,
            arguments,
            out=request["trace"],
            capture=all_steps,
            module=module,
            began=self._began,
            required=True,
            **recording,
        )
        if request["purpose"] == "dry-run":
            self._tell_streams(captures)
        return status

    def _began(self, run: Run) -> None:
        self._recording = run
        self._watch_backward()  # outside of what the recording does after it

    def _tell_streams(self, captures: Sequence[Capture]) -> None:
        """Tell each stream of the trace, and how often the capture that decides on it takes it."""
        assert self._recording is not None
        exporter = self._recording.exporter
        by_capture = {id(one): real for one, real in zip(exporter.captures, captures, strict=True)}
        streams = []
        with TraceReader(self._request["trace"]) as trace:
            header = len(json.dumps(trace.header))
            for one in trace.streams:
                taken = exporter.demand.capture_of(one.kind, one.module, one.tag) if one.kind in KINDS else None
                capture = by_capture[id(taken)] if taken is not None else Capture()
                clock = KINDS[one.kind].clock if one.kind in KINDS else "global_step"
                probed = one.tag == launch.PROBE
                thinned = one.tag == DEFAULT_TAG and one.kind in KINDS and clock == "global_step"
                streams.append(
                    {name: getattr(one, name) for name in ("kind", "module", "leaf", "tag", "dtype", "count", "bytes")}
                    | {"shapes": [list(shape) for shape in one.shapes]}
                    | {"every": self._probe_every if probed else 1, "start": 0, "stop": None}
                    | {"clock": "epoch" if clock == "epoch" else "step" if thinned or probed else "aside"}
                    | ({name: getattr(capture, name) for name in ("every", "start", "stop")} if thinned else {})
                )
        self._tell(streams=streams, header=header)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notice the optimizers that are made, and their steps."""
        original, backward = Optimizer.__init__, Tensor.backward

        @functools.wraps(original)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._optimizers.append(weakref.ref(optimizer))
            self._models = None

        setattr(Optimizer, "__init__", made)  # noqa: B010 - mypy forbids to assign it
        # it is called after the hooks of an optimizer's own, the recorder's among them
        handle = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            handle.remove()
            setattr(Optimizer, "__init__", original)  # noqa: B010
            setattr(Tensor, "backward", backward)  # noqa: B010

    def _watch_backward(self) -> None:
        """Until a script makes an optimizer, each backward is a step, as a recording counts them."""
        original: Callable[..., None] = Tensor.backward
        running = Differentiating()

        @functools.wraps(original)
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if self._optimizers or running.now or os.getpid() != self._pid:
                original(tensor, *args, **kwargs)
                return
            leaves = _leaves_of(tensor)
            running.now = True
            try:
                original(tensor, *args, **kwargs)
            finally:
                running.now = False
            self._differentiated = leaves
            self._step_over()

        setattr(Tensor, "backward", backward)  # noqa: B010 - as above

    def _alive(self) -> list[Optimizer]:
        return [one for one in (ref() for ref in self._optimizers) if one is not None]

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = self._alive()
        if os.getpid() != self._pid or not alive or optimizer is not alive[-1] or steps_within(optimizer):
            return
        self._step_over()

    def _step_over(self) -> None:
        before = len(self._stopwatch.steps.hashes)
        last = self._stopwatch.step_over()
        steps = self._stopwatch.steps
        if len(steps.hashes) > before:  # else the script goes on after it was told to end
            self._tell(hashes=steps.hashes[-1], cpu=steps.cpu[-1], wall=steps.wall[-1], recorded=steps.recorded[-1])
            if last:
                self._tell(left=True)
                _wait_for_the_others()
        if last:
            raise _Left(0)

    def _hashed(self) -> dict[str, str]:
        if not self._optimizers:
            holder = nn.Module()
            for number, tensor in enumerate(self._differentiated):
                parameters: dict[str, Any] = holder._parameters  # which these need not be
                parameters[f"parameters.{number}"] = tensor
                holder._buffers[f"gradient of parameters.{number}"] = tensor.grad
            return fingerprint({"": holder}, [])
        alive = self._alive()
        if self._models is None:
            models = launch.models_of(alive)
            named = {"": models[0]} if len(models) == 1 else launch.names_of(models)
            self._models = {name: weakref.ref(one) for name, one in named.items()}
        living = {name: one for name, ref in self._models.items() if (one := ref()) is not None}
        return fingerprint(living, alive)


def _leaves_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that a backward gives gradients, in the order in which the graph leads to them."""
    found: dict[int, Tensor] = {}
    waiting: list[Any] = [tensor.grad_fn]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            found.setdefault(id(variable), variable)
        inner = [one for one, _ in getattr(node, "next_functions", ()) if one is not None and one not in seen]
        seen.update(inner)
        waiting += inner
    return [*found.values()]
