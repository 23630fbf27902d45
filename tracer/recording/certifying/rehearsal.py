"""Rehearsals: a script's first steps in separate processes, for ``trace record --certify`` and ``--dry-run``.

A rehearsal runs the script from its beginning, with its arguments, and ends it with ``SystemExit`` after some steps.
Files that the script writes in these steps are really written. Its stdout is discarded, its stdin is empty, and
``TRACE_REHEARSAL`` in its environment is ``certify`` or ``dry-run``. All rehearsals of a script begin with the same
seeds and hash seed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from tracer.errors import CaptureError, plain
from tracer.recording import termination
from tracer.recording.certifying.verdict import Step, Steps, compare
from tracer.recording.environment import REHEARSAL
from tracer.recording.launching.program import Program
from tracer.recording.options import Options
from tracer.secrets import masked_text
from tracer.trace.certificate import VERDICTS, Certificate
from tracer.trace.claiming import this_process

PATIENCE = 20.0
"""Seconds that a script has to end after its last step, and that a rank waits for the other ranks' last step."""

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

    With several ranks under torchrun, each rank calls this, and all get the worst verdict.

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
        If there are several ranks, and torchrun has not started them.
    """
    ranks = Ranks() if this_process().size > 1 else None
    request = Request(program=program, settings=settings, options=options, purpose="certify", steps=steps)
    with termination.raises(), tempfile.TemporaryDirectory(prefix="trace-certify-") as folder:
        runs = [rehearse(request, Path(folder), recorded=recorded, ranks=ranks)[0] for recorded in (False, True, False)]
    certificate = compare(
        *runs, hint="; it seeds a generator anew in each run, reads the clock, or computes in no fixed order"
    )
    return certificate if ranks is None else ranks.agree(certificate)


def rehearse(
    request: Request, folder: Path, *, recorded: bool, ranks: Ranks | None = None
) -> tuple[Steps, dict[str, Any]]:
    """Run a rehearsal in a separate process.

    Parameters
    ----------
    request : Request
    folder : Path
        For the files of all rehearsals of the script.
    recorded : bool
    ranks : Ranks, optional
        The ranks that rehearse together.

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
        "import tracer.recording.certifying.rehearsed as rehearsed; rehearsed.main()"
    )
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", begin]  # type: ignore[attr-defined]
    environment = {"PYTHONHASHSEED": "0", **os.environ, REHEARSAL: request.purpose}
    if ranks is not None:
        environment |= ranks.environment(number)
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, str(asked)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
        )
        try:
            _wait(process, report, (lambda: False) if ranks is None else functools.partial(ranks.failed, number))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    found, told = _read(report, errors, process.returncode)
    if ranks is not None and found.error is not None and not ranks.is_first_to_fail(number):
        found.error = ANOTHER
    return found, told


def _anew(options: Options) -> Options:
    """The options of a rehearsal: not resumed, and not strict, so that failures to observe do not end it.

    Receivers among a flight recorder's triggers cannot be sent to another process.
    """
    flight = None if options.flight is None else replace(options.flight, when=options.flight.names)
    anew = replace(options, overwrite=False, strict=False, resume=False, certificate=None, flight=flight)
    return replace(anew, first_step=None, first_epoch=None)


def _wait(process: subprocess.Popen[bytes], report: Path, in_vain: Callable[[], bool]) -> None:
    """Wait until the process has ended, but only `PATIENCE` seconds after its report is complete or `in_vain`."""
    deadline = None
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        if deadline is None and (b'"over"' in _tail(report) or in_vain()):
            deadline = time.monotonic() + PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            return


def _tail(report: Path) -> bytes:
    """The end of a report; the whole may be too long to read repeatedly."""
    with report.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        return file.read()


def _read(report: Path, errors: Path, code: int) -> tuple[Steps, dict[str, Any]]:
    steps, told = Steps(), dict[str, Any]()
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
        # drop the rank that torch.distributed writes before each line; `Ranks.agree` names the rank
        last = re.sub(r"^\[rank\d+\]: *", "", masked_text(plain(lines[-1])).strip()) if lines else "it said nothing"
        steps.error = f"{last} (exit status {status})"
    return steps, told


_LONG = timedelta(days=1)
"""How long ranks wait for each other's rehearsals, which last as long as the script's first steps."""
ANOTHER = "another rank had failed before"


class Ranks:
    """Connects a rank that torchrun has started with the other ranks, through torchrun's store.

    Each rehearsal has its own store, served by rank 0, because a process group leaves entries in its store that would
    confuse the next.

    Raises
    ------
    CaptureError
        If torchrun has not started the ranks.
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
        """The environment variables through which the processes of a rehearsal find each other."""
        if self._rank == 0:
            self._servers.append(self._make(self._host, 0, is_master=True, wait_for_workers=False))
            self._store.set(f"port/{number}", str(self._servers[-1].port))
        return {"MASTER_PORT": self._store.get(f"port/{number}").decode()}

    def failed(self, number: int) -> bool:
        """Whether a rehearsal has failed on any rank, so that others may wait for it forever."""
        return bool(self._store.check([f"failed/{number}"]))

    def is_first_to_fail(self, number: int) -> bool:
        """Tell the other ranks that a rehearsal has failed here; whether this rank is the first."""
        first: bool = self._store.add(f"failed/{number}", 1) == 1
        return first

    def agree(self, certificate: Certificate) -> Certificate:
        """The worst of all ranks' certificates, with its rank; this rank's own if all ranks are identical."""
        self._store.set(f"certificate/{self._rank}", json.dumps(asdict(certificate)))
        found = [json.loads(self._store.get(f"certificate/{rank}")) for rank in range(self._size)]
        told = [Certificate(**{**one, "differing": tuple(one["differing"])}) for one in found]
        if all(one.identical for one in told):
            return replace(certificate, reason=f"{certificate.reason}, on each of {self._size} ranks")

        def weight(one: Certificate) -> tuple[object, ...]:
            # a difference on one rank changes the parameters of all; a differing generator is nearer to the cause
            drew = any(name.startswith("random generator") for name in one.differing)
            return VERDICTS.index(one.verdict), ANOTHER not in one.reason, -(one.step or 0), drew

        worst = max(told, key=weight)
        return replace(worst, reason=f"on rank {told.index(worst)}, {worst.reason}")
