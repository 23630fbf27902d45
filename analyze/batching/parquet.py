"""Bytes of a Parquet file: a table of answers, sealed with a label and a digest of every byte."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from analyze.tables.writing import arrow_schema, in_utf8

ROWS: Final = 1 << 20
"""The most rows of one Arrow array, because an array of texts holds at most 2 GiB."""


def table_of(columns: Mapping[str, Any], *texts: str) -> Any:
    """A `pyarrow.Table` of the columns `analyze.tables.columns.COLUMNS` and of further columns of `texts`."""
    import pyarrow as pa

    schema = arrow_schema(*texts)
    rows = len(columns["value"])
    tables = [
        pa.Table.from_arrays(
            [_array(columns[field.name][first : first + ROWS], field.type) for field in schema], schema=schema
        )
        for first in range(0, max(rows, 1), ROWS)
    ]
    return pa.concat_tables(tables)


def _array(column: Sequence[Any] | NDArray[Any], kind: Any) -> Any:
    """An Arrow array of a column of texts, integers or floats; None becomes a null."""
    import pyarrow as pa

    if kind == pa.string():
        return _texts(in_utf8(column))
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


_DIGEST: Final = 32
_LENGTH: Final = 4
"""Bytes of the length of the label."""
_TAIL: Final = 8
"""Bytes at the end of a Parquet file: the length of its footer, and its magic number."""


def sealed(parquet: bytes, label: bytes) -> bytes:
    """A Parquet file with a label and a digest between its data and its footer, where no reader of Parquet looks."""
    footer = _footer(parquet)
    data = parquet[:footer] + label + len(label).to_bytes(_LENGTH, "little")
    return data + _digest(data, parquet[footer:]) + parquet[footer:]


def label_of(data: bytes) -> bytes | None:
    """The label of a file; None unless all these bytes, and no others, are what `sealed` returned."""
    footer = _footer(data)
    end = footer - _DIGEST - _LENGTH
    if end < 0 or data[end + _LENGTH : footer] != _digest(data[: end + _LENGTH], data[footer:]):
        return None
    return data[end - int.from_bytes(data[end : end + _LENGTH], "little") : end]


def _footer(parquet: bytes) -> int:
    """Where the footer begins; negative if the file is too short for the length that it claims."""
    return len(parquet) - _TAIL - int.from_bytes(parquet[-_TAIL:-4], "little")


def _digest(data: bytes, footer: bytes) -> bytes:
    return hashlib.sha256(len(data).to_bytes(8, "little") + data + footer).digest()
