"""Two runs that part are run again around that step, each by its script in a process of its own, and compared whole."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tracereel.checks import TRACE_SUFFIXES, check_new
from tracereel.errors import DIFFERENT, WRONG_USAGE, Failure
from tracereel.programs import program_of

if TYPE_CHECKING:
    from analyze.comparing.difference import Difference

MODULE = "-m"
"""The first word of a command line that runs a module."""


class Script(NamedTuple):
    """A training script and its arguments, as a command line has them."""

    words: tuple[str, ...]

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


def scripts_of(lines: Sequence[str]) -> tuple[Script, Script]:
    """The scripts of A and of B; one for both if one is named.

    Raises
    ------
    Failure
        If more than two are named, or one is no script.
    """
    if len(lines) > 2:
        raise Failure(f"--reenact is given once for both runs or twice, for A and for B, not {len(lines)} times", 2)
    scripts = [Script.parse(line) for line in lines]
    return scripts[0], scripts[-1]


def steps_around(step: int) -> tuple[int, int]:
    """The steps that are run again: the first that differs, and the one before it; the second number is not among them.

    Examples
    --------
    >>> steps_around(9), steps_around(0)
    ((8, 10), (0, 1))
    """
    return max(step - 1, 0), step + 1


def run_again(
    runs: tuple[str, str], scripts: tuple[Script, Script], steps: tuple[int, int], *, overwrite: bool
) -> tuple[Again, Again]:
    """Run steps of A and B again, one after the other, and record them beside the runs with all that they have.

    Parameters
    ----------
    runs : pair of str
        The traces.
    scripts : pair of Script
    steps : (int, int)
    overwrite : bool
        Whether what is already there is replaced.

    Raises
    ------
    Failure
        If something is there, or steps cannot be run again.
    """
    start, stop = steps
    outs = [f"{_stem(run)}.steps-{start}-{stop}.zarr" for run in runs]
    if outs[0] == outs[1]:
        raise Failure(f"{runs[0]} and {runs[1]} would both be run again into {outs[0]}: give one another name", 2)
    for out in outs:
        check_new(out, TRACE_SUFFIXES, overwrite)
    both = zip(runs, scripts, outs, "AB", strict=True)
    one, other = (_of_a_run(run, script, steps, out, name, overwrite=overwrite) for run, script, out, name in both)
    return one, other


def _stem(run: str) -> str:
    """The path or URL of a trace without its suffix."""
    path = run.rstrip("/")
    return next((path.removesuffix(suffix) for suffix in TRACE_SUFFIXES if path.endswith(suffix)), path)


def _of_a_run(run: str, script: Script, steps: tuple[int, int], out: str, name: str, *, overwrite: bool) -> Again:
    """Run steps of one run again, in a process of its own."""
    from tracer.recording.reenacting.comparison import steps_named
    from tracer.recording.reenacting.reenact import OF_STEPS

    start, stop = steps
    kinds = [word for kind in OF_STEPS for word in ("-k", kind)]
    chosen = ["--steps", f"{start}:{stop}", "--out", out, *kinds, *(["--overwrite"] if overwrite else [])]
    command = [sys.executable, "-m", "tracereel", "reenact", run, *chosen, *script.arguments]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in (0, DIFFERENT):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = said[-1].removeprefix("Error: ") if said else f"it ended with {done.returncode}"
        raise Failure(f"{steps_named(steps)} of {name} cannot be run again: {why}", WRONG_USAGE)
    return _verdict(out)


def _verdict(out: str) -> Again:
    """What the trace of a re-enactment says of it."""
    import tracer
    from tracer.recording.reenacting.comparison import Verdict

    with tracer.open(out) as reader:
        told = [note["reenacted"] for note in reader.notes if "reenacted" in note]
    if not told:
        return Again(out, "the script ended before the steps were over", identical=False)
    verdict = Verdict.of(told[-1])
    return Again(out, str(verdict), verdict.identical)


def as_json(steps: tuple[int, int], again: tuple[Again, Again], found: Difference) -> dict[str, Any]:
    """What came of running A and B again, in JSON values."""
    one, other = (each._asdict() for each in again)
    return {"steps": list(steps), "one": one, "other": other, "difference": found.as_json()}
