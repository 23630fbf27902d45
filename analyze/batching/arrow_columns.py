"""Turns columns of answers into Arrow tables without importing pandas, which takes longer than most parts of a batch.

`pyarrow.array` imports pandas, if installed, to recognise its objects. This module builds Arrow arrays from buffers
instead.
"""

from __future__ import annotations

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
