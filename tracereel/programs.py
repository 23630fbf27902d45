"""Training scripts that commands run: where the command's own options end, which script it is, and how to rerun it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import tracer
from tracer.messaging.messages import kept_of
from tracer.secrets import STARS
from tracereel.command import DIFFERENT, UNVERIFIED, WRONG_USAGE, Command, Refusal
from tracereel.outputs import TRACE_SUFFIXES
from tracereel.printing import say

if TYPE_CHECKING:
    from tracer.recording.launching.program import Program
    from tracer.recording.reenacting.comparison import Verdict
    from tracer.replaying.plan import Plan

MAIN = str(Path(__file__).absolute().with_name("__main__.py"))
"""The file that a launcher starts instead of a script."""


module_option = click.option(
    "--module", "module", metavar="NAME", help="Run a module, as python -m does; its arguments follow."
)
program_argument = click.argument("program", metavar="SCRIPT.py [ARGS]...", nargs=-1, type=click.UNPROCESSED)


class ProgramCommand(Command):
    """A command that passes everything after the script's name, or after ``--module NAME``, to the program."""

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``--`` after ``--module NAME``, where the program's own arguments begin."""
        options, end = self.own_words(args)
        return super().parse_args(ctx, args if options == end else [*args[:end], "--", *args[end:]])

    def options_of(self, args: Sequence[str]) -> list[str]:
        """The options before the program, which go to the processes of a launcher, too."""
        return list(args[: self.own_words(args)[0]])

    def own_words(self, args: Sequence[str]) -> tuple[int, int]:
        """How many leading words are the command's options, without and with a final ``--module NAME``."""
        takes_value = {
            name: isinstance(option, click.Option) and not option.is_flag
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] not in ("-", "--"):
            name, equals, _ = args[position].partition("=")
            after = position + (2 if takes_value.get(args[position]) and not equals else 1)
            if name == "--module":
                return position, after
            position = after
        return position, position


def program_of(words: tuple[str, ...], module: str | None) -> Program:
    """The program of a command line: a script with its arguments, or `module` with `words` as its arguments."""
    from tracer.recording.launching.program import PYTHON, Program, hint_for

    if module is not None:
        return Program(script=module, arguments=words, module=True)
    name = words[0]
    if not Path(name).is_file():
        raise Refusal(f"{name} is not a file, so there is no script to run{hint_for(name)}")
    if PYTHON.fullmatch(Path(name).name):
        raise Refusal(f"{name} is no script{hint_for(name)}")
    return Program(script=name, arguments=words[1:])


def title_of(program: Program) -> str:
    """The default name of the trace of a program."""
    return program.script.rpartition(".")[2] if program.module else Path(program.script).stem


RECORDED = "recorded"
"""Given instead of a script, this word stands for the command that the run was recorded with."""
MODULE = "-m"
"""The first word of a command line that runs a module."""


class Script(NamedTuple):
    """A training script and its arguments.

    Attributes
    ----------
    words : tuple of str
        The words of the command line.
    environment : mapping or None
        The environment to run in; None for that of this process.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] | None = None

    @classmethod
    def parse(cls, line: str) -> Script:
        """The script that a shell line names: ``train.py --lr 0.1``, or ``-m my.training --lr 0.1``.

        Raises
        ------
        Refusal
            If the line names no script.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise Refusal(f"--reenact {line!r} is no command line: {error}", WRONG_USAGE) from error
        if not words or words == [MODULE]:
            raise Refusal(f"--reenact {line!r} names no script", WRONG_USAGE)
        if words[0] != MODULE:
            program_of(tuple(words), None)
        return cls(tuple(words))

    @classmethod
    def of(cls, line: str, run: str) -> Script:
        """The script that a line names, as `parse` reads it; for ``recorded``, the command in the trace of the run.

        Raises
        ------
        Refusal
            If the line names no script, or if the trace holds no command or masks a part of it.
        """
        if line != RECORDED:
            return cls.parse(line)
        with tracer.open(run) as reader:
            words = reader.header.get("argv")
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise Refusal(f"{run} does not tell its command: give --reenact 'SCRIPT.py [ARGS]'", WRONG_USAGE)
        if any(STARS in word for word in words):
            raise Refusal(f"{run} hides a part of its command: give --reenact 'SCRIPT.py [ARGS]'", WRONG_USAGE)
        program_of(tuple(words), None)
        return cls(tuple(words))

    @property
    def arguments(self) -> list[str]:
        """The script as arguments of ``trace reenact``, after its options."""
        if self.words[0] == MODULE:
            return ["--module", *self.words[1:]]
        return list(self.words)


class Again(NamedTuple):
    """The result of running steps of a run again.

    Attributes
    ----------
    trace : str
        Path of the trace in which the steps were recorded.
    verdict : Verdict or None
        The result of the comparison with the run; None if the script ended before there was one.
    """

    trace: str
    verdict: Verdict | None

    def __str__(self) -> str:
        return "the script ended before the steps were over" if self.verdict is None else str(self.verdict)

    @property
    def usable(self) -> bool:
        """Whether all steps were run, and none of their values is known to differ from the run's."""
        return self.verdict is not None and self.verdict.outcome in ("identical", "partial")

    def of_replays(self, plans: Iterable[Plan]) -> Verdict:
        """The verdict about the kinds that replays read, of a usable result."""
        assert self.verdict is not None, "a usable result has a verdict"
        return self.verdict.about({kept_of(one.kind)[0] for plan in plans for one in (*plan.streams, *plan.derived)})

    def as_json(self) -> dict[str, Any]:
        """The result in JSON values."""
        told = {"outcome": "unfinished", "identical": False} if self.verdict is None else self.verdict.describe()
        return {"trace": self.trace, "verdict": str(self), **{name: told[name] for name in ("outcome", "identical")}}


def trace_of_steps(run: str, steps: tuple[int, int], attempt: int | None = None) -> str:
    """The default path of the trace for steps that are run again.

    Examples
    --------
    >>> trace_of_steps("runs/a.zarr", (8, 10))
    'runs/a.steps-8-10.zarr'
    >>> trace_of_steps("runs/a.zarr", (8, 10), attempt=0)
    'runs/a.attempt-0.steps-8-10.zarr'
    """
    of_attempt = "" if attempt is None else f".attempt-{attempt}"
    return f"{_stem(run)}{of_attempt}.steps-{steps[0]}-{steps[1]}.zarr"


def plan_of_steps(
    run: str, steps: tuple[int, int], attempt: int | None = None, out: str | None = None
) -> dict[str, Any]:
    """What running steps of a run again would do, in JSON values; runs nothing.

    Returns
    -------
    dict
        ``trace``, ``keyframe`` (the step it begins with), ``steps``, ``runs`` (how many steps), and ``out``, the path
        of the trace to be made.

    Raises
    ------
    CaptureError
        If the steps cannot be run again; the sentence says what the run lacks.
    """
    from tracer.recording.reenacting.recorded import recorded_run
    from tracer.recording.reenacting.reenact import plan_of

    with recorded_run(run, attempt) as recorded:
        plan = plan_of(recorded, steps)
    return {
        "trace": run,
        "keyframe": plan.keyframe.at.global_step,
        "steps": list(steps),
        "runs": plan.count,
        "out": out or trace_of_steps(run, steps, attempt),
    }


def recorded_again(
    run: str, script: Script, steps: tuple[int, int], attempt: int | None = None, out: str | None = None
) -> Again:
    """Run steps of a run again and return the result; an earlier result is reused if it is usable.

    Raises
    ------
    Refusal
        If the steps cannot be run again, or something else is at the path of their trace.
    """
    out = out or trace_of_steps(run, steps, attempt)
    there = found_again(run, steps, out, attempt)
    if there is not None and there.usable:
        return there
    say(f"running steps {steps[0]}:{steps[1]} of {run} again, into {out}")
    return of_a_run(run, script, steps, out, run, attempt=attempt, overwrite=True)


def found_again(run: str, steps: tuple[int, int], out: str, attempt: int | None = None) -> Again | None:
    """The result of an earlier run of these steps; None if there is none, or if the run has changed since.

    Raises
    ------
    Refusal
        If something else is at the path of their trace.
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
        raise Refusal(f"{out} is already there, and is not of steps {steps[0]}:{steps[1]} of {run}; move it away")
    if {name: about.get(name) for name in now} != now:
        return None
    found = _verdict(out)
    # a trace from before verdicts told what was compared proves nothing, so its steps are run once more
    return None if found.verdict is not None and not found.verdict.coverage else found


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
    """Run steps of a run again in another process."""
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
    if done.returncode not in (0, DIFFERENT, UNVERIFIED):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = said[-1].removeprefix("Error: ") if said else f"it ended with {done.returncode}"
        raise Refusal(f"{steps_named(steps)} of {name} cannot be run again: {why}", WRONG_USAGE)
    return _verdict(out)


def _verdict(out: str) -> Again:
    """The result that the trace of a re-enactment notes."""
    from tracer.recording.reenacting.comparison import Verdict

    with tracer.open(out) as reader:
        told = [note["reenacted"] for note in reader.notes if "reenacted" in note]
    return Again(out, Verdict.of(told[-1]) if told else None)
