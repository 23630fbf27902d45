"""`Program`: the script or module that ``trace record`` runs, as Python would run it."""

from __future__ import annotations

import builtins
import dis
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType

from tracer import version
from tracer.errors import CaptureError
from tracer.recording.launching.launchers import refuse_other_languages

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

    def check_imports(self, code: CodeType) -> None:
        """Refuse a program whose own module `tracer` would be shadowed by this package.

        Raises
        ------
        CaptureError
            If the program imports such a module.
        """
        folder = self.folder
        for theirs in (os.path.join(folder, "tracer.py"), os.path.join(folder, "tracer", "__init__.py")):
            is_other = os.path.isfile(theirs) and not os.path.samefile(os.path.dirname(theirs), PACKAGE)
            if is_other and _imports(code, "tracer"):
                raise CaptureError(
                    f"the program imports its own {os.path.relpath(theirs, folder)}, which has the name of this "
                    "package, and would get the package; give it another name"
                )


def _imports(code: CodeType, name: str) -> bool:
    """Whether code, or a function in it, imports a module."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    found = any(
        one.opname == "IMPORT_NAME" and str(one.argval).partition(".")[0] == name for one in dis.get_instructions(code)
    )
    return found or any(_imports(one, name) for one in inner)


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
