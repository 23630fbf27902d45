"""`Program`: the script or module that ``trace record`` runs; launchers that start it, and processes that it starts.

``trace record torchrun … train.py`` starts torchrun with ``trace record train.py`` in place of the script, so that
every process is recorded. Any other program would train without being recorded, so it is refused.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from modulefinder import ModuleFinder
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import CodeType, ModuleType
from typing import Any, Final, NoReturn

from tracer import version
from tracer.errors import CaptureError

PYTHON: Final = re.compile(r"(python|pypy)[0-9.]*(\.exe)?")
_SCRIPTS = "what is recorded is a Python script or module"


@dataclass(frozen=True)
class ScriptLauncher:
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
_SHELL = re.compile(rb"#!.*\b((?:ba|da|z|k|c|tc|fi)?sh)\b")


def launcher_of(program: Sequence[str], module: str | None = None) -> ScriptLauncher | None:
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
        return ScriptLauncher(name, "torch.distributed.run", arguments)
    if name == "torch.distributed.launch":
        rest = tuple(argument for argument in arguments if argument not in ("--use-env", "--use_env"))
        if rest == arguments:
            raise CaptureError(
                "torch.distributed.launch gives --local-rank to what it starts, which is `trace record` and not the "
                "script: use torchrun, or --use-env where the script reads LOCAL_RANK from the environment"
            )
        return ScriptLauncher(name, "torch.distributed.run", rest)
    if name == "accelerate" and arguments[:1] != ("launch",):
        raise CaptureError(
            f"accelerate {' '.join(arguments[:1])} trains nothing: trace record accelerate launch train.py"
        )
    if name in ("accelerate", "accelerate-launch"):
        return ScriptLauncher("accelerate launch", "accelerate.commands.launch", arguments[name == "accelerate" :])
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


def become(launcher: ScriptLauncher, command: Sequence[str], *, program: str) -> NoReturn:
    """Replace this process by a launcher whose processes run a command of ``trace`` on the script.

    Parameters and errors are those of `arguments_for`.
    """
    arguments = arguments_for(launcher, command, program=program)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", launcher.module, *arguments])


def arguments_for(launcher: ScriptLauncher, command: Sequence[str], *, program: str) -> list[str]:
    """The arguments of a launcher whose processes run a command of ``trace`` on the script.

    Parameters
    ----------
    launcher : ScriptLauncher
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


def _parser_of(launcher: ScriptLauncher) -> Callable[[], Any]:
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
    """Raise `CaptureError` if a file is a binary or a script of a shell, some of which Python would begin to run."""
    try:
        with open(script, "rb") as file:
            first, second = file.readline(512), file.readline(512)
    except OSError:  # another check reports it
        return
    # if Python's path is long, installers write Python scripts that begin as shell scripts
    installed = second.lstrip().startswith((b"'''exec", b'"""', b"''':"))
    shell = None if installed else _SHELL.match(first)
    if shell is not None or b"\0" in first:
        what = "a program" if shell is None else f"a script of {shell[1].decode()}"
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


PACKAGE = os.path.dirname(os.path.abspath(version.__file__))
"""The folder of the package `tracer`."""
_before: ModuleType | None = None
"""The ``__main__`` that a program has replaced, kept alive because its code continues after the program."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and its command line.

    Attributes
    ----------
    script : str
        Path of a Python file, or with `module` the dotted name of a module or package.
    arguments : sequence of str
        The command line's arguments.
    module : bool
        Whether `script` is the name of a module, which runs as under ``python -m``.
    """

    script: str
    arguments: Sequence[str] = ()
    module: bool = False

    @property
    def folder(self) -> str:
        """The folder that the program imports from first."""
        return os.getcwd() if self.module else os.path.dirname(os.path.abspath(self.script))

    def load(self) -> tuple[CodeType, ModuleType]:
        """The program's code, and a module to run it in.

        Raises
        ------
        CaptureError
            If there is no such script or module, or it is not Python.
        """
        return _load_module(self.script) if self.module else _load_script(self.script)

    def become_main(self, main: ModuleType) -> None:
        """Make a module ``__main__``, with the program's command line, until the process ends.

        Functions that the program registered for the end of the process need both.
        """
        global _before
        _before = sys.modules["__main__"]
        sys.modules["__main__"] = main
        sys.argv = [str(main.__file__) if self.module else self.script, *self.arguments]
        sys.path.insert(0, self.folder)

    def check_imports(self) -> None:
        """Refuse a program that imports a module of its own whose name a loaded package of this project has.

        Python keeps one module of a name, so the program would get the package. Modules of the program that import it,
        in the program's folder or in ``PYTHONPATH``, count as well.

        Raises
        ------
        CaptureError
            If the program imports such a module.
        """
        hidden = [name for name in sorted(_ours()) if _has_module(self.folder, name)]
        if not hidden:
            return
        imported = self._own_imports()
        for name in hidden:
            if name in imported:
                raise CaptureError(
                    f"the program imports its own {os.path.relpath(imported[name], self.folder)}, which has the name "
                    f"of the package {name}, and would get the package; give it another name"
                )

    def _own_imports(self) -> dict[str, str]:
        """Modules that the program's folder or ``PYTHONPATH`` has and the program may import: name → file."""
        path = [self.folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        finder = ModuleFinder(path)
        with contextlib.suppress(SyntaxError, ValueError, OSError):  # Python reports it when the program imports it
            if self.module:
                finder.import_hook(self.script)
                with contextlib.suppress(ImportError):  # no package
                    finder.import_hook(f"{self.script}.__main__")
            else:
                finder.run_script(self.script)
        files = {name: vars(one)["__file__"] for name, one in finder.modules.items()}  # of modulefinder's own class
        return {name: file for name, file in files.items() if file is not None}


def _ours() -> set[str]:
    """Names of this project's loaded packages."""
    beside = os.path.dirname(PACKAGE)
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    return {name for name, file in files.items() if file == os.path.join(beside, name, "__init__.py")}


def _has_module(folder: str, name: str) -> bool:
    """Whether a folder has a module of a name that is not this project's own."""
    package = os.path.join(folder, name)
    ours = os.path.join(os.path.dirname(PACKAGE), name)
    if os.path.isfile(os.path.join(package, "__init__.py")):
        return not (os.path.exists(ours) and os.path.samefile(package, ours))
    return os.path.isfile(f"{package}.py")


def _load_script(script: str) -> tuple[CodeType, ModuleType]:
    path = os.path.abspath(script)
    if not os.path.isfile(path):
        raise CaptureError(f"there is no script {script}" + (": it is a folder" if os.path.isdir(path) else ""))
    refuse_other_languages(path)
    with io.open_code(path) as file:
        code = _compiled(file.read(), path)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    return code, main


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise CaptureError(f"module {name!r} cannot be found: {error}") from error
    finally:
        sys.path.pop(0)
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    if spec is None or get_code is None:
        raise CaptureError(f"there is no module {name!r} that could be run; packages need a __main__.py")
    code = get_code(spec.name)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=spec.origin, __builtins__=builtins, __spec__=spec, __package__=spec.parent)
    return code, main


def _compiled(source: bytes, path: str) -> CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise CaptureError(f"{path} is not a Python script: {error}") from error


# -- processes that a program starts ----------------------------------------------------------------------------
# Each process that trains is recorded as a rank. A process is recorded if it is started with `multiprocessing` (or
# `torch.multiprocessing`, ``spawn``, an executor), has imported torch when its work begins, and trains. Daemons, which
# are killed without notice, and helpers of `multiprocessing` are not recorded. This module imports no torch, because
# not every new interpreter needs it.

Record = Callable[[Callable[[], None]], None]
"""Runs the given work of a process, and records the training in it."""


def may_train(process: BaseProcess) -> bool:
    """Whether a process that is about to start does the script's own work (no helper), and is no daemon."""
    target = getattr(process, "_target", None)
    helper = str(getattr(target, "__module__", "")).partition(".")[0] == "multiprocessing"
    return not process.daemon and not helper and "run" not in vars(process)


def can_be_told(record: Record) -> bool:
    """Whether a new interpreter can get `record`: it must be picklable (no lambdas), and this package importable."""
    try:
        ForkingPickler.dumps(record)
    except Exception:  # noqa: BLE001 - objects of the script's own raise what they like
        return False
    # the new interpreter imports this package by name, and a module next to the script may have the same name
    found = importlib.machinery.PathFinder.find_spec("tracer", sys.path)
    ours = os.path.join(PACKAGE, "__init__.py")
    return found is None or os.path.realpath(str(found.origin)) == os.path.realpath(ours)


@contextlib.contextmanager
def recording_process(process: BaseProcess, record: Record, detach: Callable[[], None]) -> Iterator[None]:
    """Let a process that is started inside this context record its training; see `RecordedProcess`."""
    attributes: dict[str, Any] = vars(process)
    attributes["run"] = RecordedProcess(process, record, detach)
    try:
        yield
    finally:
        del attributes["run"]


class RecordedProcess:
    """Replaces the ``run`` method of a process, to record its training.

    Parameters
    ----------
    process : BaseProcess
    record : callable or bytes
        Bytes are its pickle: unpickling imports torch, which not every new interpreter needs.
    detach : callable, optional
        Removes the hooks of the script's own recording from its models, which a forked process has copies of.
    """

    def __init__(self, process: BaseProcess, record: Record | bytes, detach: Callable[[], None] | None = None) -> None:
        self._process = process
        self._record = record
        self._detach = detach

    def __reduce__(self) -> tuple[Any, ...]:  # without `detach`: a new interpreter has no hooks of the script
        return RecordedProcess, (self._process, bytes(ForkingPickler.dumps(self._record)))

    def __call__(self) -> None:
        del vars(self._process)["run"]
        if "torch" not in sys.modules:
            self._process.run()
            return
        if self._detach is not None:
            with contextlib.suppress(Exception):  # the script's recording is not used in this process
                self._detach()
        record: Record = ForkingPickler.loads(self._record) if isinstance(self._record, bytes) else self._record
        record(self._process.run)
