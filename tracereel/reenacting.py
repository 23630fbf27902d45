"""``trace reenact``: a script runs some steps of a recorded run again, and they are compared and recorded anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tracereel import options
from tracereel.checks import TRACE_SUFFIXES, check_new
from tracereel.errors import DIFFERENT, FAILED, WRONG_USAGE, Failure
from tracereel.options import Steps
from tracereel.printing import print_json, say, tell
from tracereel.programs import ProgramCommand, program_of


class ReenactCommand(ProgramCommand):
    """A `ProgramCommand` of which the first word, before or after its options, is a trace."""

    other_heading = "What is read"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the trace behind the options, where click expects it."""
        if args and not args[0].startswith("-"):
            trace, rest = args[0], args[1:]
            options, end = self.own_words(rest)
            behind = ["--", trace] if options != end else [trace]
            args = [*rest[:end], *behind, *rest[end:]]
            return click.Command.parse_args(self, ctx, args)
        return super().parse_args(ctx, args)


@click.command(
    cls=ReenactCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="",
    no_args_is_help=True,
    examples=[
        "trace reenact run.zarr --steps 295:305 train.py --epochs 5",
        "trace reenact run.zarr --steps 40 -k layer_gradients -m 'encoder.*' --out detail.zarr train.py",
        "trace reenact run.zarr --steps 40 --module my.training --lr 0.1",
    ],
)
@click.option(
    "--steps",
    "steps_again",
    type=Steps(),
    required=True,
    help="The global steps to run again: start inclusive, stop exclusive, or one.",
)
@click.option(
    "--out", metavar="PATH", type=click.Path(), help="Trace to make, .zarr or .h5.  [default: RUN.steps-A-B.zarr]"
)
@options.kinds(help="Record this kind of these steps; may be repeated.  [default: all that a plain recording has]")
@options.modules(help="Record modules that match; repeatable.")
@options.flag(
    "--allow-different",
    help="Go on after the first value that is not as it was recorded, and with another version of PyTorch.",
)
@click.option("--module", "module", metavar="NAME", help="Run a module, as python -m does; its arguments follow.")
@options.overwrite
@options.as_json
@click.argument("run", metavar="RUN [OPTIONS]", type=click.Path(path_type=str))
@click.argument("program", metavar="SCRIPT.py [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def reenact(
    run: str,
    program: tuple[str, ...],
    module: str | None,
    steps_again: tuple[int, int | None, int],
    out: str | None,
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    allow_different: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Run some steps of a recorded run again, and record all of them.

    SCRIPT.py, with the arguments that it had, runs from its beginning. At its first training step the model gets the
    state of the last keyframe in RUN before the steps; from then on it gets the inputs, labels, random generators and
    hyperparameters that RUN holds, until the last step is over. Then the script is ended with SystemExit. What it
    writes, it writes; TRACE_REHEARSAL in its environment is reenact, so that it can tell.

    Every value that RUN holds of these steps, or the hash of it, is compared with what comes out. The exit code is 5 if
    one is different. trace info shows the verdict in the new trace.
    """
    start, stop, stride = steps_again
    if stop is None or stride != 1:
        raise click.BadParameter("it is START:STOP, without a stride, or one step", param_hint="--steps")
    if module is None and not program:
        raise click.UsageError("there is no script to run: trace reenact RUN --steps A:B SCRIPT.py [ARGS]...")
    script = program_of(program, module)
    called = out or f"{Path(run).with_suffix('')}.steps-{start}-{stop}.zarr"
    target = check_new(called, TRACE_SUFFIXES, overwrite)
    from tracer.observing.capture import Capture
    from tracer.recording.options import Options
    from tracer.recording.reenacting.reenact import OF_STEPS, reenact_script

    chosen: dict[str, Any] = {"kinds": kinds or [kind for kind in Capture().kinds or () if kind in OF_STEPS]}
    refused = [kind for kind in kinds if kind not in OF_STEPS]
    if refused:
        raise Failure(f"steps that are run again have no {refused[0]}; they have {', '.join(OF_STEPS)}", WRONG_USAGE)
    verdict, status = reenact_script(
        run,
        script,
        steps=(start, stop),
        out=target,
        captures=[Capture(**chosen, modules=modules or None)],
        options=Options(overwrite=overwrite),
        allow_different=allow_different,
    )
    if as_json:
        print_json(verdict.describe())
    else:
        tell(str(verdict))
        say(f"recorded in {called}: trace info {called}")
    ctx = click.get_current_context()
    if verdict.first is not None:
        ctx.exit(DIFFERENT)
    ctx.exit(0 if verdict.complete else status or FAILED)
