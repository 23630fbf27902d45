"""Writes answers to files, which appear complete or not at all."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np

from analyze.tables.columns import COLUMNS, WHOLE, Row, as_json
from tracer.errors import TraceError, TraceExistsError, TraceNotFoundError, TracerError
from tracer.messaging.messages import Message
from tracer.shown import in_cell, in_json

PathLike: TypeAlias = str | os.PathLike[str]
_ODD = "backslashreplace"
"""The error handler for text that is not UTF-8: a path may have any bytes, and a module any name."""


def write_csv(rows: Iterable[Row], path: PathLike, *, overwrite: bool) -> None:
    """Write comma-separated values: see `analyze.Results.to_csv`."""
    with (
        new_file(path, overwrite=overwrite) as temporary,
        temporary.open("x", encoding="utf-8", errors=_ODD, newline="") as file,
    ):
        writer = csv.writer(_Lines(file), lineterminator=_CRLF)
        writer.writerow(COLUMNS)
        cells = lru_cache(_WORDS)(lambda *words: tuple(map(in_cell, words)))  # the rows of a series share their words
        # a csv writer writes floats by repr
        writer.writerows(cells(*row[:5]) + row[5:] for row in rows)


_CRLF = "\r\n"
_WORDS = 1024
"""How many series have their escaped words cached."""


class _Lines:
    """Writes the lines of a csv writer with LF ends. The writer itself uses _CRLF: with LF, it would not quote a CR."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> int:
        """Write a line."""
        return self._file.write(line.removesuffix(_CRLF) + "\n")


def write_jsonl(rows: Iterable[Row], path: PathLike, *, overwrite: bool) -> None:
    """Write JSON lines: see `analyze.Results.to_jsonl`."""
    with new_file(path, overwrite=overwrite) as temporary, temporary.open("x", encoding="utf-8", errors=_ODD) as file:
        for row in rows:
            file.write(in_json(json.dumps(as_json(row), ensure_ascii=False, allow_nan=False)) + "\n")


def write_parquet(table: Mapping[str, Any], path: PathLike, *, overwrite: bool) -> None:
    """Write a table as Parquet: see `analyze.Results.to_parquet`."""
    needed("writing Parquet", "pyarrow", "tables")
    import pyarrow.parquet as pq

    made = arrow_table(table)
    with new_file(path, overwrite=overwrite) as temporary:
        pq.write_table(made, temporary)


def arrow_table(table: Mapping[str, Any], *texts: str) -> Any:
    """The `pyarrow.Table` of a table by columns: `COLUMNS`, and further string columns."""
    import pyarrow as pa

    return pa.table({field.name: pa.array(in_utf8(table[field.name]), field.type) for field in arrow_schema(*texts)})


def arrow_schema(*texts: str) -> Any:
    """The `pyarrow.Schema` of `COLUMNS` and further string columns."""
    import pyarrow as pa

    types = {name: pa.int64() if name in WHOLE else pa.string() for name in (*COLUMNS, *texts)}
    return pa.schema(list((types | {"value": pa.float64()}).items()))


def in_utf8(column: Any) -> Any:
    """A column of strings, with escapes for what UTF-8 cannot hold; a column of numbers is unchanged."""
    if isinstance(column, np.ndarray):
        return column
    try:
        "".join(set(column)).encode()  # the distinct strings are few
    except UnicodeEncodeError:
        return [one.encode(errors=_ODD).decode() for one in column]
    except TypeError:  # numbers
        pass
    return column


def write_trace(
    messages: Iterable[Message],
    traces: Collection[str],
    subscribers: Iterable[str],
    path: PathLike,
    *,
    overwrite: bool,
) -> None:
    """Write the answers to a trace as a trace: see `analyze.Results.to_trace`."""
    from tracer.trace.claiming import check_target
    from tracer.trace.writer import TraceWriter

    if len(traces) > 1:
        raise TraceError(f"a trace holds the results of one trace, but these are of {len(traces)}")
    header = {"results_of": next(iter(traces), None), "subscribers": sorted(subscribers)}
    check_target(path, overwrite=overwrite)
    with new_file(path, overwrite=overwrite) as temporary, TraceWriter(temporary, header=header) as writer:
        for message in messages:
            writer.write(message)


@contextlib.contextmanager
def new_file(path: PathLike, *, overwrite: bool) -> Iterator[Path]:
    """A temporary path beside `path`, with the same suffix; it replaces `path` when the block ends without an error."""
    target = Path(path)
    if not overwrite and (target.exists() or target.is_symlink()):
        raise TraceExistsError(f"there is already something at {str(target)!r}; results are not overwritten unasked")
    if target.is_dir() and target.suffix != ".zarr":
        raise TraceExistsError(f"{str(target)!r} is a folder, which a file never replaces")
    if not target.parent.is_dir():
        raise TraceNotFoundError(f"there is no folder {str(target.parent)!r} to write {target.name!r} into")
    mine = f".{os.getpid()}-{os.urandom(4).hex()}"  # without the target's name, which may have the maximum length
    temporary = target.with_name(f"{mine}.tmp{target.suffix}")
    aside = target.with_name(f"{mine}.old{target.suffix}")
    try:
        yield temporary
        if target.is_dir():  # a folder cannot be replaced, so it is moved aside first
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


def pandas() -> Any:
    """The package pandas; raises `TracerError` if it is not installed."""
    return needed("a data frame", "pandas", "tables")


def xarray() -> Any:
    """The package xarray; raises `TracerError` if it is not installed."""
    return needed("arrays with named axes", "xarray", "xarray")


def needed(what: str, package: str, extra: str, module: str | None = None) -> Any:
    """Import the package that `what` needs, or a module of it.

    Raises
    ------
    TracerError
        If the package is not installed.
    """
    try:
        return import_module(module or package)
    except ImportError as error:
        raise not_installed(what, package, extra) from error


def not_installed(what: str, package: str, extra: str) -> TracerError:
    """The error that `what` needs a package that is missing."""
    return TracerError(f"{what} needs {package}, which is not installed: pip install 'tracereel[{extra}]'")
