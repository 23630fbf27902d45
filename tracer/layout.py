"""What a trace looks like inside: names, columns, the encodings of dtypes, and the version of the format.

Constants and functions, most of them pure. `docs/trace-format.md` says the same in prose, with a reason for each rule;
the two are changed together, and `VERSION` with them where an older reader would go wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.errors import MessageError, TraceCorruptError, TraceError, TraceFormatError
from tracer.messages import DEFAULT_TAG

FORMAT = "tracereel"
"""Root attribute ``format``: what makes a store a trace."""
VERSION = 1
"""Root attribute ``format_version``: an integer, raised when older readers would go wrong."""

RANK = "rank0"
JOURNAL = f"{RANK}/journal"
DECLARATIONS = f"{RANK}/declarations"
RESERVED = frozenset({"journal", "declarations", "pools", "late"})
"""Names in a rank's group that no kind takes."""


class Column(IntEnum):
    """The columns of the journal, one row a message, all int64."""

    STREAM = 0
    POOL = 1
    OFFSET = 2
    COUNT = 3
    SHAPE = 4
    GLOBAL_STEP = 5
    TRAIN_STEP = 6
    EPOCH = 7
    CALL = 8
    FLAGS = 9
    CRC32C = 10


COLUMNS = len(Column)
MAX_ELEMENTS = 2**60
"""Elements of a message, at most: places in a pool are int64."""
MAX_AXES = 64
"""Axes of a message, at most: numpy has no more."""
HAS_DATA = 1
"""Bit 0 of the column FLAGS: the message carries data, if only an empty tensor."""
NONE = -1
"""POOL, SHAPE of a message without data; CRC32C where the store checksums its chunks."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How tensors of one dtype are stored.

    Attributes
    ----------
    name : str
        The logical dtype: torch's name without ``torch.``.
    dtype : torch.dtype
    storage : str
        The numpy dtype that the elements have in a pool.
    bits : torch.dtype or None
        The dtype that the elements are viewed as before numpy sees them, where numpy has no such dtype.
    readable : str
        The numpy dtype that represents every value and that computing works with.
    """

    name: str
    dtype: torch.dtype
    storage: str
    bits: torch.dtype | None
    readable: str


def _encodings() -> dict[str, Encoding]:
    native = (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
    table = {name: Encoding(name, getattr(torch, name), name, None, name) for name in native}
    as_bits = {"bfloat16": ("uint16", "float32"), "complex32": ("uint32", "complex64")}
    # every version of torch has other 8 bit floats; a trace holds the bits of any of them
    as_bits |= {name: ("uint8", "float32") for name in sorted(dir(torch)) if re.fullmatch(r"float8_e\w+", name)}
    for name, (storage, readable) in as_bits.items():
        table[name] = Encoding(name, getattr(torch, name), storage, getattr(torch, storage), readable)
    return table


ENCODINGS: Mapping[str, Encoding] = _encodings()
"""Every dtype that a trace can hold, by logical name."""
STORAGE_DTYPES: tuple[str, ...] = tuple(dict.fromkeys(encoding.storage for encoding in ENCODINGS.values()))
"""Every numpy dtype that a pool can have."""
_BY_DTYPE: Mapping[torch.dtype, Encoding] = {encoding.dtype: encoding for encoding in ENCODINGS.values()}


def encoding_of(tensor: Tensor) -> Encoding:
    """The encoding of a tensor's dtype.

    Raises
    ------
    MessageError
        If a trace cannot hold such tensors: quantized, sparse, without memory, or of an exotic dtype.
    """
    encoding = _BY_DTYPE.get(tensor.dtype)
    if encoding is None:
        raise MessageError(f"a trace cannot hold tensors of dtype {tensor.dtype}; it can hold {', '.join(ENCODINGS)}")
    if tensor.layout is not torch.strided:
        raise MessageError(f"a trace cannot hold tensors of layout {tensor.layout}; make it dense with to_dense()")
    if tensor.is_meta:
        raise MessageError("a trace cannot hold a tensor on the device 'meta', because it has no numbers")
    return encoding


def encode(tensor: Tensor) -> NDArray[Any]:
    """The elements of a tensor as they are stored: an array of its shape, of the storage dtype.

    A contiguous CPU tensor is not copied.

    Raises
    ------
    MessageError
        If a trace cannot hold such tensors.
    """
    encoding = encoding_of(tensor)
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if encoding.bits is not None:
        dense = dense.view(encoding.bits)
    array: NDArray[Any] = dense.numpy()
    return array


def decode(array: NDArray[Any], dtype: str, shape: Iterable[int]) -> Tensor:
    """The tensor whose stored elements are in `array` (contiguous, writable, any shape), sharing its memory.

    Parameters
    ----------
    array : numpy.ndarray
    dtype : str
        The logical dtype.
    shape : iterable of int

    Examples
    --------
    >>> decode(encode(torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16)), "bfloat16", (2, 1))
    tensor([[ 1.5000],
            [-2.0000]], dtype=torch.bfloat16)
    """
    encoding = ENCODINGS[dtype]
    if not array.size:
        # numpy gives empty arrays strides that torch then cannot view as another dtype
        return torch.empty(tuple(shape), dtype=encoding.dtype)
    tensor = torch.from_numpy(array)
    if encoding.bits is not None:
        tensor = tensor.view(encoding.dtype)
    return tensor.reshape(tuple(shape))


def crc32c(array: NDArray[Any]) -> int:
    """The CRC-32C of the bytes of a contiguous array.

    Examples
    --------
    >>> import numpy as np
    >>> crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    True
    """
    return int(google_crc32c.value(array))


_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]|^\.|\.$|^_(?=_)|\.(?=json$)")
_LONGEST = 200


def quote(name: str) -> str:
    """A part of an array's path for a kind, tag, module or leaf: different names give different parts.

    What is not a letter, digit, ``.``, ``_`` or ``-`` of ASCII becomes ``%`` and two hex digits for each byte, and so
    do a leading or trailing ``.``, a leading ``__`` and the dot of a trailing ``.json``. The empty name (the root
    module) is ``%~root``. Names over 200 bytes are cut, and end in ``%~`` and a hash.

    Examples
    --------
    >>> quote("layer1.0.conv1"), quote("../a b%"), quote(""), quote("__init__"), quote("zarr.json")
    ('layer1.0.conv1', '%2E.%2Fa%20b%25', '%~root', '%5F_init__', 'zarr%2Ejson')
    >>> len(quote("x" * 999))
    200
    """
    if not name:
        return "%~root"
    raw = name.encode("utf-8", "surrogatepass")
    quoted = _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], raw).decode("ascii")
    if len(quoted) > _LONGEST:
        quoted = f"{quoted[: _LONGEST - 22]}%~{hashlib.sha256(raw).hexdigest()[:20]}"
    return quoted


def own_pool(kind: str, module: str | None, tag: str, leaf: str) -> str:
    """The name of the pool of one stream: ``rank0/{kind}/{module}``, with ``@{tag}`` and ``#{leaf}`` where needed.

    The network's streams stand under ``%~network``.

    Examples
    --------
    >>> own_pool("activations", "layer1.0", "default", ""), own_pool("input_data", None, "eval", "")
    ('rank0/activations/layer1.0', 'rank0/input_data@eval/%~network')
    >>> own_pool("activations", "rnn", "default", "1.0"), own_pool("journal", "", "default", "")
    ('rank0/activations/rnn#1.0', 'rank0/%~journal/%~root')
    """
    group = f"%~{kind}" if kind in RESERVED else quote(kind)
    if tag != DEFAULT_TAG:
        group += f"@{quote(tag)}"
    name = "%~network" if module is None else quote(module)
    if leaf:
        # two parts of 200 bytes would be longer than a file name may be
        name = f"{name}#{quote(leaf)}"
        if len(name) > _LONGEST:
            name = f"{name[: _LONGEST - 22]}%~{hashlib.sha256(name.encode()).hexdigest()[:20]}"
    return f"{RANK}/{group}/{name}"


def shared_pool(kind: str, storage: str) -> str:
    """The name of the pool of all small or ragged messages of one kind and storage dtype."""
    return f"{RANK}/pools/{quote(kind)}/{storage}"


def late_pool(storage: str) -> str:
    """The name of the pool of streams that were first seen when the store could make no more arrays."""
    return f"{RANK}/late/{storage}"


def is_shape(shape: tuple[Any, ...]) -> bool:
    """Whether a message can have this shape.

    Examples
    --------
    >>> is_shape((3, 0)), is_shape((10**9, 10**9)), is_shape((True,)), is_shape((1,) * 65)
    (True, False, False, False)
    """
    return (
        len(shape) <= MAX_AXES
        and all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in shape)
        and math.prod(size or 1 for size in shape) <= MAX_ELEMENTS
    )


def declaration(what: str, value: Any) -> bytes:
    """One line of the declarations.

    Raises
    ------
    TraceError
        If the value is no JSON.
    """
    try:
        return json.dumps({what: value}, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"the {what} cannot be kept in a trace, because it is no JSON: {error}") from error


def declarations(data: bytes) -> list[tuple[str, Any]]:
    """What the lines declare, in order. A last line without its end was not committed, and is left out.

    Raises
    ------
    TraceCorruptError
        If a line is not an object with one member.
    """
    found: list[tuple[str, Any]] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines()):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or len(value) != 1:
            raise TraceCorruptError(f"line {number} of the declarations is damaged")
        found += value.items()
    return found


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in a form that can only be compared; None where that cannot be told.

    With the process id it tells whether the writer of a trace still lives, because ids are used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # the name of the program stands in parentheses and may hold anything; the start is the 20th field after it
    fields = stat.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else None


def check_version(attributes: Mapping[str, Any]) -> None:
    """Check the root attributes of a store.

    Raises
    ------
    TraceFormatError
        If they are not those of a trace, or of a version that this release does not read.
    """
    if attributes.get("format") != FORMAT:
        raise TraceFormatError(f"it is not a trace: its root has no attribute format = {FORMAT!r}")
    found = attributes.get("format_version")
    if found != VERSION or isinstance(found, bool):
        raise TraceFormatError(f"it has the trace format {found!r}, and this release reads {VERSION}")
