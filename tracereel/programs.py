"""For commands that run a training script: where their own options end, and which script it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracereel.command import Command
from tracereel.errors import Failure

if TYPE_CHECKING:
    from tracer.recording.launching.program import Program

MAIN = str(Path(__file__).absolute().with_name("__main__.py"))
"""The file that a launcher starts instead of a script."""
OPTIONS = "options"
"""The key in the click context for the options before the program, which go to the processes of a launcher."""


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
        ctx.meta[OPTIONS] = args[:options]
        return super().parse_args(ctx, args if options == end else [*args[:end], "--", *args[end:]])

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
    from tracer.recording.launching.launchers import PYTHON, hint_for
    from tracer.recording.launching.program import Program

    if module is not None:
        return Program(script=module, arguments=words, module=True)
    name = words[0]
    if not Path(name).is_file():
        raise Failure(f"{name} is not a file, so there is no script to run{hint_for(name)}")
    if PYTHON.fullmatch(Path(name).name):
        raise Failure(f"{name} is no script{hint_for(name)}")
    return Program(script=name, arguments=words[1:])


def title_of(program: Program) -> str:
    """The default name of the trace of a program."""
    return program.script.rpartition(".")[2] if program.module else Path(program.script).stem
