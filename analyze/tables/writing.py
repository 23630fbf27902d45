"""Files of answers: they appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

import numpy as np

from tracer.errors import TraceError, TraceExistsError, TraceNotFoundError, TracerError

PathLike: TypeAlias = str | os.PathLike[str]


CRLF = "\r\n"


class Lines:
    """A file whose lines end with LF, for a csv writer that ends them with CRLF: it quotes no CR otherwise."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> int:
        """Write a line."""
        return self._file.write(line.removesuffix(CRLF) + "\n")


ODD = "backslashreplace"
"""How what is no UTF-8 is written: a path may have any bytes, and a module any name."""


def in_utf8(column: Any) -> Any:
    """A column of words as UTF-8, with escapes for what is none; one of numbers, or in UTF-8, as it is."""
    if isinstance(column, np.ndarray):
        return column
    try:
        "".join(set(column)).encode()  # there are few different ones
    except UnicodeEncodeError:
        return [one.encode(errors=ODD).decode() for one in column]
    except TypeError:  # numbers
        pass
    return column


def not_installed(what: str, package: str, extra: str) -> TracerError:
    """The error of what needs a package that is missing."""
    return TracerError(f"{what} needs {package}, which is not installed: pip install 'tracereel[{extra}]'")


@contextlib.contextmanager
def new_file(path: PathLike, overwrite: bool) -> Iterator[Path]:
    """A temporary path beside `path`, of the same suffix, that takes its place once the block is done."""
    target = Path(path)
    if not overwrite and (target.exists() or target.is_symlink()):
        raise TraceExistsError(f"there is already something at {str(target)!r}; results are not overwritten unasked")
    if target.is_dir() and target.suffix != ".zarr":
        raise TraceExistsError(f"{str(target)!r} is a folder, which a file never replaces")
    if not target.parent.is_dir():
        raise TraceNotFoundError(f"there is no folder {str(target.parent)!r} to write {target.name!r} into")
    mine = f".{os.getpid()}-{os.urandom(4).hex()}"  # and not the target's name, which may be as long as a name can be
    temporary = target.with_name(f"{mine}.tmp{target.suffix}")
    aside = target.with_name(f"{mine}.old{target.suffix}")
    try:
        yield temporary
        if target.is_dir():  # a folder cannot be replaced by another, unless it makes room first
            os.replace(target, aside)
        try:
            os.replace(temporary, target)
        except OSError:
            if aside.exists():
                os.replace(aside, target)
            raise
    except OSError as error:
        if isinstance(error, TracerError):
            raise
        raise TraceError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error
    finally:
        for left in (temporary, aside) if target.exists() else (temporary,):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


Format = Literal[".csv", ".jsonl", ".parquet", ".zarr", ".h5"]
