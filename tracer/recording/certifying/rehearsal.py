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
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tracer.errors import CaptureError, plain
from tracer.recording import termination
from tracer.recording.certifying.verdict import Step, Steps, compare
from tracer.recording.environment import REHEARSAL
from tracer.recording.launching.program import Program
from tracer.recording.options import Options
from tracer.secrets import masked_text
from tracer.trace.certificate import Certificate
from tracer.trace.claiming import this_process

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
    process = this_process()
    if process.size > 1:
        raise CaptureError(
            f"--certify runs a script of one process, and this is rank {process.rank} of {process.size}: give it to a "
            "run of one process, or call tracer.certify in the script"
        )
    request = Request(program=program, settings=settings, options=options, purpose="certify", steps=steps)
    with termination.raises(), tempfile.TemporaryDirectory(prefix="trace-certify-") as folder:
        runs = [rehearse(request, Path(folder), recorded=recorded)[0] for recorded in (False, True, False)]
    hint = "; it seeds a generator anew in each run, reads the clock, or computes in no fixed order"
    return compare(*runs, hint=hint)


def rehearse(request: Request, folder: Path, *, recorded: bool) -> tuple[Steps, dict[str, Any]]:
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
        "import tracer.recording.certifying.rehearsed as rehearsed; rehearsed.main()"
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
        last = masked_text(plain(lines[-1])).strip() if lines else "it said nothing"
        steps.error = f"{last} (exit status {status})"
    return steps, told
