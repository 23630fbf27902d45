"""Writes answers to files, which appear complete or not at all."""

from __future__ import annotations

import contextlib
import csv
import datetime as dt
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from analyze.tables.columns import COLUMNS, WHOLE, Row, as_json
from tracer.errors import TraceError, TraceExistsError, TraceNotFoundError, TracerError
from tracer.messaging.messages import Message
from tracer.shown import in_cell, in_json

if TYPE_CHECKING:
    from tracer.trace.reader import TraceReader


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


_ROWS: Final = 1 << 20
"""The most rows of one Arrow array, because an array of texts holds at most 2 GiB."""


def arrow_table(columns: Mapping[str, Any], *texts: str) -> Any:
    """The `pyarrow.Table` of a table by columns: `COLUMNS`, and further string columns.

    Its arrays are made from buffers, because `pyarrow.array` imports pandas.
    """
    import pyarrow as pa

    schema = arrow_schema(*texts)
    rows = len(columns["value"])
    tables = [
        pa.Table.from_arrays(
            [_array(columns[field.name][first : first + _ROWS], field.type) for field in schema], schema=schema
        )
        for first in range(0, max(rows, 1), _ROWS)
    ]
    return pa.concat_tables(tables)


def _array(column: Sequence[Any] | NDArray[Any], kind: Any) -> Any:
    """An Arrow array of a column of texts, integers or floats; None becomes a null."""
    import pyarrow as pa

    if kind == pa.string():
        return _texts(_in_utf8(column))
    dtype = np.dtype(kind.to_pandas_dtype())
    empty = None
    if not isinstance(column, np.ndarray):
        is_there = np.array([one is not None for one in column], np.bool_)
        if not is_there.all():
            empty = pa.py_buffer(np.packbits(is_there, bitorder="little"))
            column = [0 if one is None else one for one in column]
    numbers = np.ascontiguousarray(column, dtype)
    return pa.Array.from_buffers(kind, len(numbers), [empty, pa.py_buffer(numbers)])


def _texts(column: Sequence[str]) -> Any:
    """An Arrow array of texts; each distinct text, of which there are few, is encoded once."""
    import pyarrow as pa

    number_of = {word: number for number, word in enumerate(dict.fromkeys(column))}
    numbers = np.fromiter((number_of[word] for word in column), np.int32, len(column))
    encoded = [word.encode() for word in number_of]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    words = pa.Array.from_buffers(
        pa.string(), len(encoded), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    )
    which = pa.Array.from_buffers(pa.int32(), len(numbers), [None, pa.py_buffer(numbers)])
    return pa.DictionaryArray.from_arrays(which, words).cast(pa.string())


def arrow_schema(*texts: str) -> Any:
    """The `pyarrow.Schema` of `COLUMNS` and further string columns."""
    import pyarrow as pa

    types = {name: pa.int64() if name in WHOLE else pa.string() for name in (*COLUMNS, *texts)}
    return pa.schema(list((types | {"value": pa.float64()}).items()))


def _in_utf8(column: Any) -> Any:
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


Clock: TypeAlias = Callable[[int], float]
"""A function from a global step to its time, in seconds since 1970."""


def times_of(reader: TraceReader) -> Clock | None:
    """The estimated time of each global step of a trace, in seconds since 1970; None if it died at an unknown time.

    A trace has the times when its run began and ended, but not those of its steps: they are spread evenly between, or
    up to now, while the run is being recorded.
    """
    info = reader.info
    ended = dt.datetime.now(dt.UTC).isoformat() if info["status"] == "recording" else info["ended"]
    if info["created"] is None or ended is None or info["steps"] is None:
        return None
    try:
        began, ended = (dt.datetime.fromisoformat(one).timestamp() for one in (info["created"], ended))
    except (TypeError, ValueError):  # another writer may use these names for anything
        return None
    first, last = info["steps"]
    return lambda step: began + (ended - began) * (step - first + 1) / (last - first + 1)
