"""Steps of a run, run again by its script in a process of its own, for commands that need what was not recorded."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

import tracer
from tracer.secrets import STARS
from tracereel.checks import TRACE_SUFFIXES
from tracereel.errors import DIFFERENT, WRONG_USAGE, Failure
from tracereel.printing import say
from tracereel.programs import program_of

RECORDED = "recorded"
"""In the place of a script: the command that a run was recorded with."""
MODULE = "-m"
"""The first word of a command line that runs a module."""


class Script(NamedTuple):
    """A training script and its arguments.

    Attributes
    ----------
    words : tuple of str
        As a command line has them.
    environment : mapping or None
        With which it runs; None: with that of this process.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] | None = None

    @classmethod
    def parse(cls, line: str) -> Script:
        """The script that a line of a shell names: ``train.py --lr 0.1``, or ``-m my.training --lr 0.1``.

        Raises
        ------
        Failure
            If it names none.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise Failure(f"--reenact {line!r} is no command line: {error}", WRONG_USAGE) from error
        if not words or words == [MODULE]:
            raise Failure(f"--reenact {line!r} names no script", WRONG_USAGE)
        if words[0] != MODULE:
            program_of(tuple(words), None)
        return cls(tuple(words))

    @classmethod
    def of(cls, line: str, run: str) -> Script:
        """The script that a line names, as `parse` reads it; of ``recorded``, that of the command that was recorded.

        Raises
        ------
        Failure
            If the line names none, or the run does not tell its command, or hides a part of it.
        """
        if line != RECORDED:
            return cls.parse(line)
        with tracer.open(run) as reader:
            words = reader.header.get("argv")
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise Failure(f"{run} does not tell its command: give --reenact 'SCRIPT.py [ARGS]'", WRONG_USAGE)
        if any(STARS in word for word in words):
            raise Failure(f"{run} hides a part of its command: give --reenact 'SCRIPT.py [ARGS]'", WRONG_USAGE)
        program_of(tuple(words), None)
        return cls(tuple(words))

    @property
    def arguments(self) -> list[str]:
        """What follows the options of ``trace reenact``."""
        if self.words[0] == MODULE:
            return ["--module", *self.words[1:]]
        return list(self.words)


class Again(NamedTuple):
    """Steps of a run that were run again.

    Attributes
    ----------
    trace : str
        Where they were recorded.
    verdict : str
        What came of comparing them with the run, in a sentence.
    identical : bool
        Whether they are what the run was.
    """

    trace: str
    verdict: str
    identical: bool


def trace_of_steps(run: str, steps: tuple[int, int], attempt: int | None = None) -> str:
    """Where steps of a run that are run again are recorded by default.

    Examples
    --------
    >>> trace_of_steps("runs/a.zarr", (8, 10))
    'runs/a.steps-8-10.zarr'
    >>> trace_of_steps("runs/a.zarr", (8, 10), attempt=0)
    'runs/a.attempt-0.steps-8-10.zarr'
    """
    of_attempt = "" if attempt is None else f".attempt-{attempt}"
    return f"{_stem(run)}{of_attempt}.steps-{steps[0]}-{steps[1]}.zarr"


def recorded_again(
    run: str, script: Script, steps: tuple[int, int], attempt: int | None = None, out: str | None = None
) -> Again:
    """The trace of steps of a run that were run again; they are, unless that was done before.

    Raises
    ------
    Failure
        If they cannot be run again, or something else is where their trace is to be.
    """
    out = out or trace_of_steps(run, steps, attempt)
    there = found_again(run, steps, out, attempt)
    if there is not None and there.identical:
        return there
    say(f"running steps {steps[0]}:{steps[1]} of {run} again, into {out}")
    return of_a_run(run, script, steps, out, run, attempt=attempt, overwrite=True)


def found_again(run: str, steps: tuple[int, int], out: str, attempt: int | None = None) -> Again | None:
    """The trace of steps of a run that were run again before; None if there is none of the run as it is now.

    Raises
    ------
    Failure
        If something else is where their trace is to be.
    """
    from tracer.recording.reenacting.recorded import recorded_run
    from tracer.stores.locations import location
    from tracer.stores.opening import exists

    if not exists(location(out)):
        return None
    with tracer.open(out) as reader:
        about = reader.header.get("reenacts") or {}
    with recorded_run(run, attempt) as recorded:
        now = recorded.describe()
    if about.get("run") != now["run"] or about.get("steps") != list(steps):
        raise Failure(f"{out} is already there, and is not of steps {steps[0]}:{steps[1]} of {run}; move it away")
    return _verdict(out) if {name: about.get(name) for name in now} == now else None


def _stem(run: str) -> str:
    """The path or URL of a trace without its suffix."""
    path = run.rstrip("/")
    return next((path.removesuffix(suffix) for suffix in TRACE_SUFFIXES if path.endswith(suffix)), path)


def of_a_run(
    run: str,
    script: Script,
    steps: tuple[int, int],
    out: str,
    name: str,
    *,
    attempt: int | None = None,
    overwrite: bool,
) -> Again:
    """Run steps of one run again, in a process of its own."""
    from tracer.recording.reenacting.comparison import steps_named
    from tracer.recording.reenacting.reenact import OF_STEPS

    start, stop = steps
    kinds = [word for kind in OF_STEPS for word in ("-k", kind)]
    chosen = ["--steps", f"{start}:{stop}", "--out", out, *kinds, *(["--overwrite"] if overwrite else [])]
    chosen += [] if attempt is None else ["--attempt", str(attempt)]
    command = [sys.executable, "-m", "tracereel", "reenact", run, *chosen, *script.arguments]
    done = subprocess.run(
        command,
        env=script.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode not in (0, DIFFERENT):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = said[-1].removeprefix("Error: ") if said else f"it ended with {done.returncode}"
        raise Failure(f"{steps_named(steps)} of {name} cannot be run again: {why}", WRONG_USAGE)
    return _verdict(out)


def _verdict(out: str) -> Again:
    """What the trace of a re-enactment says of it."""
    from tracer.recording.reenacting.comparison import Verdict

    with tracer.open(out) as reader:
        told = [note["reenacted"] for note in reader.notes if "reenacted" in note]
    if not told:
        return Again(out, "the script ended before the steps were over", identical=False)
    verdict = Verdict.of(told[-1])
    return Again(out, str(verdict), verdict.identical)
