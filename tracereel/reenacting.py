"""``trace reenact``: a script runs some steps of a recorded run again; they are compared and recorded in full."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from tracereel import options
from tracereel.command import DIFFERENT, FAILED, UNVERIFIED, WRONG_USAGE, Refusal, conclude, wrong_usage
from tracereel.options import StepsOption
from tracereel.outputs import Outputs, check_new_trace
from tracereel.printing import print_json, say, show, tell
from tracereel.programs import (
    MAIN,
    OPTIONS,
    ProgramCommand,
    module_option,
    program_argument,
    program_of,
    trace_of_steps,
)

if TYPE_CHECKING:
    from analyze.tables.results import Results
    from tracer.recording.launching.program import Program
    from tracer.recording.reenacting.reenact import LateProbe
    from tracer.stores.locations import Location


class ReenactCommand(ProgramCommand):
    """A `ProgramCommand` whose first word, before or after its options, is a trace."""

    other_heading = "What is read"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the trace behind the options, where click expects it."""
        if args and not args[0].startswith("-"):
            trace, rest = args[0], args[1:]
            options, end = self.own_words(rest)
            ctx.meta[OPTIONS] = rest[:options]
            behind = ["--", trace] if options != end else [trace]
            args = [*rest[:end], *behind, *rest[end:]]
            return click.Command.parse_args(self, ctx, args)
        return super().parse_args(ctx, args)


@click.command(
    cls=ReenactCommand,
    options_metavar="",
    no_args_is_help=True,
    examples=[
        "trace reenact run.zarr --steps 295:305 train.py --epochs 5",
        "trace reenact run.zarr --steps 40 -k layer_gradients -m 'encoder.*' --out detail.zarr train.py",
        "trace reenact run.zarr --steps 100:110 -s hessian_trace train.py",
        "trace reenact run.zarr --probe inputs.npy --every-keyframe --out probes.zarr train.py",
        "trace reenact run.zarr --steps 40 --module my.training --lr 0.1",
    ],
)
@click.option(
    "--steps",
    "steps_again",
    type=StepsOption(),
    metavar="A:B",
    help="The global steps to run again: A:B without B itself, or one step. With --probe: take the keyframes among "
    "these steps.",
)
@options.attempt(
    help="Of a run that was resumed: run the steps again as this attempt left them, counted from 0.  [default: the "
    "last]"
)
@options.file("--out", metavar="PATH", help="Trace to make, .zarr or .h5.  [default: RUN.steps-A-B.zarr]")
@options.kinds(help="Record this kind; may be repeated.  [default: what the profile full keeps of steps]")
@options.modules(help="Record modules that match; repeatable.")
@options.subscribers(
    required=False, help="Ask this metric about the steps, also one that needs the model; may be repeated."
)
@options.file("--answers", help="With -s: write the answers, as .parquet, .csv, .jsonl, .zarr or .h5.")
@click.option(
    "--probe", "late_probe", metavar="FILE",
    help="Run no steps, but put these inputs through the weights of the keyframes: .npy, or file.py:function, which "
    "gives what the model takes.",
)  # fmt: skip
@click.option("--probe-labels", metavar="FILE.npy", help="With --probe: the labels of the inputs.")
@options.flag("--every-keyframe", help="With --probe: take every keyframe of the run.")
@options.flag(
    "--allow-different",
    help="Go on after a step with another value, and with another version of PyTorch; the exit code stays 5 where a "
    "value is different.",
)
@module_option
@options.overwrite
@options.as_json
@click.argument("run", metavar="RUN [OPTIONS]", type=click.Path(path_type=str))
@program_argument
def reenact(
    run: str,
    program: tuple[str, ...],
    module: str | None,
    steps_again: tuple[int, int | None, int] | None,
    attempt: int | None,
    out: str | None,
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    specs: tuple[str, ...],
    answers: str | None,
    late_probe: str | None,
    probe_labels: str | None,
    every_keyframe: bool,
    allow_different: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Run some steps of a recorded run again, record all that they have, and prove that they are the same.

    RUN is a trace with keyframes, as the profile standard keeps them. SCRIPT.py, with the arguments that it had, runs
    from its beginning. After its first step the model gets the state of the last keyframe before the steps. From then
    on it gets the inputs, labels, states of random generators and hyperparameters that RUN holds. After the last of the
    steps the script is ended with SystemExit. Files that it writes until then are written; TRACE_REHEARSAL=reenact in
    its environment lets it leave them out.

    Each value is compared with the one in RUN, or with its hash. At the first step with another value the script is
    ended, and the exit code is 5. trace info shows the verdict in the new trace.

    Of a run of several ranks, torchrun or accelerate launch, with its options and its script, stands in the place of
    SCRIPT.py.
    """
    if module is None and not program:
        raise click.UsageError("there is no script to run: trace reenact RUN --steps A:B SCRIPT.py [ARGS]...")
    _run_by_launcher(run, program, module)
    script = program_of(program, module)
    if late_probe is not None:
        if every_keyframe == (steps_again is not None):
            raise click.UsageError("--probe takes the keyframes of --steps A:B, or those of --every-keyframe: give one")
        if specs:
            raise click.UsageError("--probe makes a trace, which trace replay asks; -s is for steps that are run again")
        called = out or f"{Path(run).with_suffix('')}.probes.zarr"
        target = check_new_trace(called, overwrite)
        from tracer.recording.reenacting.reenact import LateProbe

        span = None if steps_again is None else steps_again[:2]
        given = LateProbe(_inputs(late_probe), None if probe_labels is None else _array(probe_labels), span, attempt)
        _probe(run, script, given, target, kinds, modules, overwrite=overwrite)
        say(f"recorded in {called}, with the tag probe: trace info {called}")
        return
    if probe_labels is not None or every_keyframe:
        raise click.UsageError(f"{'--probe-labels' if probe_labels else '--every-keyframe'} goes with --probe")
    if steps_again is None:
        raise click.UsageError("--steps A:B says which steps to run again")
    start, stop, stride = steps_again
    if stop is None or stride != 1:
        raise click.BadParameter("it is START:STOP, without a stride, or one step", param_hint="--steps")
    called = out or trace_of_steps(run, (start, stop), attempt)
    target = check_new_trace(called, overwrite)
    from tracer.observing.capture import Capture
    from tracer.recording.options import Options
    from tracer.recording.reenacting.reenact import OF_STEPS, of_steps, reenact_script

    refused = [kind for kind in kinds if kind not in OF_STEPS]
    if refused:
        raise Refusal(f"steps that are run again have no {refused[0]}; they have {', '.join(OF_STEPS)}", WRONG_USAGE)
    asked = _AskedMetrics(specs, Outputs(answers, None, overwrite), run, called)
    verdict, status = reenact_script(
        run,
        script,
        steps=(start, stop),
        out=target,
        captures=[Capture(kinds=kinds or of_steps().kinds, modules=modules or None)],
        options=Options(overwrite=overwrite),
        receivers=asked.receivers,
        attempt=attempt,
        allow_different=allow_different,
    )
    code = _EXIT_CODES[verdict.outcome] or status
    if code in (DIFFERENT, UNVERIFIED):
        _tell_launcher(code)
    conclude(status or FAILED if verdict.outcome == "unfinished" else code)
    if as_json:
        print_json(verdict.describe())
    else:
        from tracer.trace.claiming import this_process

        process = this_process()
        tell(f"rank {process.rank}: {verdict}" if process.size > 1 else str(verdict))
        for line in verdict.details():
            tell(f"  {line}")
        say(f"recorded in {called}: trace info {called}")
    asked.give()


_EXIT_CODES = {"identical": 0, "partial": UNVERIFIED, "different": DIFFERENT, "unfinished": FAILED}


class _AskedMetrics:
    """Metrics that are computed while steps run again, and the output of their answers."""

    def __init__(self, specs: tuple[str, ...], outputs: Outputs, run: str, trace: str) -> None:
        if outputs.out is not None and not specs:
            raise click.UsageError("--answers FILE goes with -s")
        self._outputs, self._target = outputs, outputs.checked(run)
        self._results: Results | None = None
        self.receivers: list[Any] = []
        if specs:
            from analyze import registry
            from analyze.tables.results import Results

            with wrong_usage():
                subscribers = [registry.parse(spec) for spec in specs]
            self._results = Results()
            self.receivers = [*subscribers, self._results.sink(subscribers, trace)]

    def give(self) -> None:
        """Print or write the answers."""
        if self._results is None:
            return
        if self._target is not None:
            self._outputs.write(self._results, self._target, {})
        elif len(self._results):
            show(self._results.to_table())


_CODES = "TRACE_CODES"
"""Environment variable with a folder in which a rank leaves its exit code, because its launcher exits with 1."""


def _run_by_launcher(run: str, program: tuple[str, ...], module: str | None) -> None:
    """If the program is torchrun or accelerate, run it and exit; each of its processes runs its rank's steps again.

    The launcher runs in this process, so that it gets the signals sent to the command.
    """
    from tracer.recording.launching.program import Program, arguments_for, launcher_of

    launcher = launcher_of(program, module)
    if launcher is None:
        return
    from tracer.recording.launching.script import unwatched

    ctx = click.get_current_context()
    command = ["reenact", run, *ctx.meta[OPTIONS]]
    arguments = arguments_for(launcher, command, program=MAIN)
    with TemporaryDirectory(prefix="trace-") as folder:
        os.environ[_CODES] = folder
        status = unwatched(Program(script=launcher.module, arguments=arguments, module=True))
        codes = [int(one.read_text()) for one in Path(folder).iterdir()]
        ctx.exit(min(codes, default=status))  # a difference says more than what could not be compared


def _tell_launcher(code: int) -> None:
    """Report a difference, or values that were not compared, to the command that started this rank's launcher."""
    from tracer.trace.claiming import this_process

    if _CODES in os.environ:
        Path(os.environ[_CODES], str(this_process().rank)).write_text(str(code))


def _probe(
    run: str,
    script: Program,
    probe: LateProbe,
    target: Location,
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    *,
    overwrite: bool,
) -> None:
    from tracer.recording.options import Options
    from tracer.recording.reenacting.reenact import probe_script

    done = probe_script(
        run, script, probe, out=target, kinds=kinds, modules=modules or None, options=Options(overwrite=overwrite)
    )
    many = f"{len(done)} keyframes, of steps {done[0]:,} to {done[-1]:,}" if len(done) > 1 else f"step {done[0]:,}"
    tell(f"the inputs went through the weights of {many}")


def _inputs(named: str) -> Any:
    """The inputs from an array file, or from a function in a Python file."""
    file, colon, function = named.rpartition(":")
    if not colon or not file.endswith(".py"):
        return _array(named)
    if not Path(file).is_file():
        raise Refusal(f"{file} is not a file, so it has no function that gives inputs")
    import runpy

    try:
        names = runpy.run_path(file)
        if not callable(names.get(function)):
            raise Refusal(f"{file} has no function {function!r} that gives the inputs of a probe", WRONG_USAGE)
        return names[function]()
    except (Exception, SystemExit) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{named} gives no inputs: {type(error).__name__}: {error}") from error


def _array(path: str) -> Any:
    import numpy as np
    import torch

    if not Path(path).is_file() or Path(path).suffix != ".npy":
        raise Refusal(f"{path}: inputs of a probe are a file .npy, or file.py:function", WRONG_USAGE)
    try:
        with open(path, "rb") as file:
            return torch.from_numpy(np.lib.format.read_array(file, allow_pickle=False))
    except (ValueError, TypeError, OSError) as error:
        raise Refusal(f"{path} is no array of numbers: {error}", WRONG_USAGE) from error
