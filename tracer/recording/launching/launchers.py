"""Programs that start a training script: torchrun and accelerate.

``trace record torchrun … train.py`` starts torchrun with ``trace record train.py`` in place of the script, so that
every process is recorded. Any other program would train without being recorded, so it is refused.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from tracer.errors import CaptureError

PYTHON: Final = re.compile(r"(python|pypy)[0-9.]*(\.exe)?")
_SCRIPTS = "what is recorded is a Python script or module"


@dataclass(frozen=True)
class Launcher:
    """A supported program that starts a script in several processes, with its command line.

    Attributes
    ----------
    name : str
        The name for users.
    module : str
        The module for ``python -m``.
    arguments : tuple of str
        The launcher's options; then the script, or ``-m`` and a module; then the script's arguments.
    """

    name: str
    module: str
    arguments: tuple[str, ...]


_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "accelerate": "accelerate",
}
_SHELLS = re.compile(rb"#!\s*(?:\S*/env\s+(?:-\S+\s+)*)?\S*?([a-z]+)[0-9.]*(?:\s|$)")
_NOT_PYTHON = (
    b"sh", b"bash", b"dash", b"zsh", b"ksh", b"csh", b"tcsh", b"fish",
    b"perl", b"ruby", b"node", b"lua", b"php", b"awk",
)  # fmt: skip


def launcher_of(program: Sequence[str], module: str | None = None) -> Launcher | None:
    """The launcher that a command line starts; None if the command line starts a script or a module.

    Parameters
    ----------
    program : sequence of str
        The command line; with `module`, the arguments after ``python -m module``.
    module : str, optional

    Raises
    ------
    CaptureError
        If the command line starts a program that cannot be recorded in this way.

    Examples
    --------
    >>> launcher_of(["/opt/venv/bin/torchrun", "--nproc-per-node", "2", "train.py"]).arguments
    ('--nproc-per-node', '2', 'train.py')
    >>> launcher_of(["python3", "-u", "-m", "torch.distributed.run", "train.py"]).name
    'torchrun'
    >>> launcher_of(["train.py", "torchrun"]) is None
    True
    """
    name, arguments = (_MODULES.get(module, ""), tuple(program)) if module is not None else _named(program)
    if name == "torchrun":
        return Launcher(name, "torch.distributed.run", arguments)
    if name == "torch.distributed.launch":
        rest = tuple(one for one in arguments if one not in ("--use-env", "--use_env"))
        if rest == arguments:
            raise CaptureError(
                "torch.distributed.launch gives --local-rank to what it starts, which is `trace record` and not the "
                "script: use torchrun, or --use-env where the script reads LOCAL_RANK from the environment"
            )
        return Launcher(name, "torch.distributed.run", rest)
    if name == "accelerate" and arguments[:1] != ("launch",):
        raise CaptureError(
            f"accelerate {' '.join(arguments[:1])} trains nothing: trace record accelerate launch train.py"
        )
    if name in ("accelerate", "accelerate-launch"):
        return Launcher("accelerate launch", "accelerate.commands.launch", arguments[name == "accelerate" :])
    return None


def _named(program: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The name of a program, without its folder, and its arguments; for ``python -m``, those of the module."""
    if not program:
        return "", ()
    name = os.path.basename(program[0]).removesuffix(".exe")
    if not PYTHON.fullmatch(name):
        return name, tuple(program[1:])
    for number, one in enumerate(program[1:], 1):
        if one == "-m" and number + 1 < len(program):
            return _MODULES.get(program[number + 1], ""), tuple(program[number + 2 :])
        if not one.startswith("-"):
            break
    return "", ()


def become(launcher: Launcher, command: Sequence[str], *, program: str) -> NoReturn:
    """Replace this process by a launcher whose processes run a command of ``trace`` on the script.

    Parameters and errors are those of `arguments_for`.
    """
    arguments = arguments_for(launcher, command, program=program)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", launcher.module, *arguments])


def arguments_for(launcher: Launcher, command: Sequence[str], *, program: str) -> list[str]:
    """The arguments of a launcher whose processes run a command of ``trace`` on the script.

    Parameters
    ----------
    launcher : Launcher
    command : sequence of str
        The words before the script, such as ``record`` and its options.
    program : str
        The file of the command ``trace``. A module name could also match a module in the script's folder.

    Raises
    ------
    CaptureError
        If the launcher is told to run something other than Python, or is not installed.
    """
    given = _parser_of(launcher)().parse_args(list(launcher.arguments))
    if given.no_python:
        raise CaptureError(f"with --no-python, {launcher.name} runs any program; {_SCRIPTS}")
    before = list(launcher.arguments[: len(launcher.arguments) - len(given.training_script_args) - 1])
    before = [one for one in before if one not in ("-m", "--module")]
    refuse_other_languages(given.training_script)
    script = [*(["--module"] if given.module else []), given.training_script, *given.training_script_args]
    return [*before, program, *command, *script]


def _parser_of(launcher: Launcher) -> Callable[[], Any]:
    if launcher.module == "torch.distributed.run":
        from torch.distributed.run import get_args_parser

        return get_args_parser
    try:
        from accelerate.commands.launch import launch_command_parser
    except ImportError as error:
        raise CaptureError(f"{launcher.name} cannot be started: {error}") from error
    parser: Callable[[], Any] = launch_command_parser
    return parser


def refuse_other_languages(script: str) -> None:
    """Raise `CaptureError` if a file is a binary, or its first line names an interpreter other than Python."""
    try:
        with open(script, "rb") as file:
            first, second = file.readline(512), file.readline(512)
    except OSError:  # another check reports it
        return
    binary = first.startswith((b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"))
    found = _SHELLS.match(first)
    # if Python's path is long, installers write Python scripts that begin as shell scripts
    other = (
        found is not None and found[1] in _NOT_PYTHON and not second.lstrip().startswith((b"'''exec", b'"""', b"''':"))
    )
    if binary or (other and found is not None):
        what = "a program" if binary or found is None else f"a script of {found[1].decode()}"
        raise CaptureError(
            f"{script} is {what}, and {_SCRIPTS}: give the one that it starts, or put `trace record` before that in it"
        )


def hint_for(program: str) -> str:
    """What the user may have meant by a missing file, to append to the error; may be empty."""
    if PYTHON.fullmatch(os.path.basename(program)):
        return "; leave it out: trace record SCRIPT.py, and --module NAME in the place of -m NAME"
    if os.path.basename(program) != program or "." in program:
        return ""
    starts = f"`{program} … trace record [OPTIONS] train.py`"
    return f"; if {program} is a program that starts the script, let it start the recording: {starts}"
