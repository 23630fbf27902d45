"""`Program`: the script or module that ``trace record`` runs, as Python would run it."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from modulefinder import ModuleFinder
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
