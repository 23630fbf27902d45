"""What a trace looks like inside: names, columns, the encodings of dtypes, and the version of the format.

Constants and functions, most of them pure. `docs/trace-format.md` says the same in prose, with a reason for each rule;
the two are changed together, and `VERSION` with them where an older reader would go wrong.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import MessageError, TraceCorruptError, TraceError, TraceFormatError
from tracer.format.checksum import crc32c
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores import PART

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT = "tracereel"
"""Root attribute ``format``: what makes a store a trace."""
VERSION = 1
"""Root attribute ``format_version``: an integer, raised when older readers would go wrong."""

RESERVED = frozenset({"journal", "declarations", "pools", "late"})
"""Names in a rank's group that no kind takes."""


def part_name(rank: int, attempt: int = 0) -> str:
    """The name of what one process wrote of a trace: a group of its own.

    Examples
    --------
    >>> part_name(0), part_name(3, attempt=1)
    ('rank0', 'rank3.attempt1')
    """
    return f"rank{rank}.attempt{attempt}" if attempt else f"rank{rank}"


def part_of(name: str) -> tuple[int, int] | None:
    """Rank and attempt of a part's name; None for other names.

    Examples
    --------
    >>> part_of("rank3.attempt1"), part_of("rank0"), part_of("rank01"), part_of("rank0.attempt0")
    ((3, 1), (0, 0), None, None)
    """
    match = PART.fullmatch(name)
    return None if match is None else (int(match["rank"]), int(match["attempt"] or 0))


def journal_name(part: str) -> str:
    """The name of a part's journal."""
    return f"{part}/journal"


def declarations_name(part: str) -> str:
    """The name of the array of a part's declarations."""
    return f"{part}/declarations"


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
    CHECK = 11


COLUMNS = len(Column)
MAX_ELEMENTS = 2**60
"""Elements of a message, at most: places in a pool are int64."""
MAX_AXES = 63
"""Axes of a message, at most: numpy has 64, and one of them is that of the messages."""
HAS_DATA = 1
"""Bit 0 of the column FLAGS: the message carries data, if only an empty tensor."""
NONE = -1
"""POOL, SHAPE and CRC32C of a message without data; CRC32C where only chunks have checksums."""
JOURNAL_BLOCK = 8192
"""Rows of the journal that are checksummed at once, because more would not stay in a processor's cache."""


@dataclass(frozen=True)
class Encoding:
    """How tensors of one dtype are stored.

    Attributes
    ----------
    name : str
        The logical dtype: torch's name without ``torch.``.
    storage : str
        The numpy dtype that the elements have in a pool.
    readable : str
        The numpy dtype that represents every value and that computing works with.
    """

    name: str
    storage: str
    readable: str

    @property
    def is_native(self) -> bool:
        """Whether numpy has the dtype, too; where it has not, a pool holds the bits as integers."""
        return self.storage == self.name

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of torch.

        Raises
        ------
        MessageError
            If this version of torch lacks it.
        """
        import torch

        found: torch.dtype | None = getattr(torch, self.name, None)
        if found is None:
            raise MessageError(f"torch {torch.__version__} lacks the dtype {self.name}")
        return found

    @cached_property
    def bits(self) -> torch.dtype | None:
        """The dtype that tensors are viewed as before numpy sees them; None where numpy has theirs."""
        import torch

        return None if self.is_native else getattr(torch, self.storage)


_NATIVE = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
ENCODINGS: dict[str, Encoding] = {
    **{name: Encoding(name, name, name) for name in _NATIVE},
    "bfloat16": Encoding("bfloat16", "uint16", "float32"),
    "complex32": Encoding("complex32", "uint32", "complex64"),
    **{name: Encoding(name, "uint8", "float32") for name in _FLOAT8},
}
"""Every dtype that a trace can hold, by logical name; `is_encoded` may add to it."""
STORAGE_DTYPES: tuple[str, ...] = tuple(dict.fromkeys(encoding.storage for encoding in ENCODINGS.values()))
"""Every numpy dtype that a pool can have."""


@cache
def _by_dtype() -> Mapping[torch.dtype, Encoding]:
    """The encodings by the dtypes of the installed torch, which may have other 8 bit floats than are known here."""
    import torch

    for name in sorted(dir(torch)):
        if re.fullmatch(r"float8_e\w+", name):
            ENCODINGS.setdefault(name, Encoding(name, "uint8", "float32"))
    return {one.dtype: one for one in ENCODINGS.values() if hasattr(torch, one.name)}


def is_encoded(dtype: str) -> bool:
    """Whether a trace can hold a logical dtype; torch is imported only for one that is not known by itself."""
    if dtype not in ENCODINGS and dtype.startswith("float8_e"):
        _by_dtype()
    return dtype in ENCODINGS


def held() -> Collection[torch.dtype]:
    """The dtypes of the installed torch that a trace can hold."""
    return _by_dtype().keys()


_MOST_BYTES = 2**63 - 1
"""Of an array of numpy, where axes of no elements count as one of one."""


def refusal(tensor: Tensor) -> str | None:
    """Why a trace cannot hold the numbers of a tensor; None if it can, or could if the tensor were made dense.

    Examples
    --------
    >>> import torch
    >>> refusal(torch.ones(2))
    >>> refusal(torch.ones((1,) * 65))
    'a trace cannot hold tensors of 65 axes; it can hold 63 at most'
    """
    from torch import Tensor

    if tensor.dtype not in _by_dtype():
        return f"a trace cannot hold tensors of dtype {tensor.dtype}; it can hold {', '.join(ENCODINGS)}"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a trace cannot hold a {type(tensor).__name__}, a class of tensors that keeps its numbers to itself"
    if tensor.is_nested:
        return "a trace cannot hold nested tensors"
    if tensor.dim() > MAX_AXES:
        return f"a trace cannot hold tensors of {tensor.dim()} axes; it can hold {MAX_AXES} at most"
    if tensor.numel() == 0:
        shape = tuple(tensor.shape)
        if not is_shape(shape) or math.prod(size or 1 for size in shape) * tensor.itemsize > _MOST_BYTES:
            return f"a trace cannot hold tensors of the shape {shape}, although they are empty"
    return None


def encoding_of(tensor: Tensor) -> Encoding:
    """The encoding of a tensor's dtype.

    Raises
    ------
    MessageError
        If a trace cannot hold such tensors: quantized, sparse, nested, without memory, of an exotic dtype, of a class
        that keeps its numbers to itself, or of too many axes.
    """
    import torch

    reason = refusal(tensor)
    if reason is not None:
        raise MessageError(reason)
    if tensor.layout is not torch.strided:
        raise MessageError(f"a trace cannot hold tensors of layout {tensor.layout}; make it dense with to_dense()")
    if tensor.is_meta:
        raise MessageError("a trace cannot hold a tensor on the device 'meta', because it has no numbers")
    return _by_dtype()[tensor.dtype]


def encode(tensor: Tensor) -> NDArray[Any]:
    """The elements of a tensor as they are stored: an array of its shape, of the storage dtype.

    A contiguous CPU tensor is not copied.

    Raises
    ------
    MessageError
        If a trace cannot hold such tensors.
    """
    import torch

    encoding = _by_dtype().get(tensor.dtype)
    if encoding is None or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.is_cpu:
        encoding = encoding_of(tensor)  # which says what it cannot hold
    elif tensor.is_contiguous():
        # each operation of PyTorch lets other threads of Python go first, and waking them costs more than it does
        try:
            array: NDArray[Any] = tensor.numpy() if encoding.bits is None else tensor.view(encoding.bits).numpy()
            return array
        except RuntimeError:  # it requires gradients, or its numbers stand for their conjugates or negatives
            pass
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return (dense if encoding.bits is None else dense.view(encoding.bits)).numpy()


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
    >>> import torch
    >>> decode(encode(torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16)), "bfloat16", (2, 1))
    tensor([[ 1.5000],
            [-2.0000]], dtype=torch.bfloat16)
    """
    import torch

    encoding = ENCODINGS[dtype]
    if not array.size:
        # numpy gives empty arrays strides that torch then cannot view as another dtype
        return torch.empty(tuple(shape), dtype=encoding.dtype, device="cpu")
    tensor = torch.from_numpy(array)
    if encoding.bits is not None:
        tensor = tensor.view(encoding.dtype)
    return tensor.reshape(tuple(shape))


def readable(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Stored elements as numbers that numpy computes with: as they are, or as float32 or complex64, which hold each.

    Parameters
    ----------
    array : numpy.ndarray
        Contiguous.
    dtype : str
        The logical dtype.

    Examples
    --------
    >>> readable(np.array([[0x3FC0], [0xC000]], np.uint16), "bfloat16").tolist()
    [[1.5], [-2.0]]
    """
    encoding = ENCODINGS[dtype]
    if encoding.is_native:
        return array
    if dtype == "bfloat16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        halves = array.reshape(-1).view(np.float16).astype(np.float32)
        return halves.view(np.complex64).reshape(array.shape)
    return decode(array, dtype, array.shape).float().numpy()


SHORT = 8 * COLUMNS
"""Bytes of the longest rows whose checksums `checksums` looks up in tables."""
_WORTH_TABLES = 5
"""For how many rows for each of their bytes that takes less time than to ask for one checksum after the other."""


def _crc_tables() -> tuple[NDArray[np.uint32], list[int]]:
    """What each value of each byte of a short row adds to its checksum, and the checksums of so many zeros."""
    # the CRC is linear but for a constant, so bytes can be looked up one by one and joined by exclusive or
    tables = np.zeros((SHORT, 256), np.uint32)
    for value in range(256):
        last = value
        for _ in range(8):
            last = (last >> 1) ^ (0x82F63B78 if last & 1 else 0)
        tables[-1, value] = last
    for place in range(SHORT - 2, -1, -1):
        after = tables[place + 1]
        tables[place] = tables[-1][after & 0xFF] ^ (after >> 8)
    return tables, [crc32c(bytes(size)) for size in range(SHORT + 1)]


_CRC_TABLES, _CRC_ZEROS = _crc_tables()


def checksums(rows: NDArray[Any]) -> NDArray[np.int64]:
    """The CRC-32C of the bytes of each row of a contiguous array.

    Examples
    --------
    >>> rows = np.arange(6, dtype=np.int16).reshape(2, 3)
    >>> checksums(rows).tolist() == [crc32c(row) for row in rows]
    True
    """
    size = rows[:1].nbytes
    if size > SHORT or len(rows) < _WORTH_TABLES * size:
        return np.fromiter(map(crc32c, rows), np.int64, len(rows))
    found = np.full(len(rows), _CRC_ZEROS[size], np.uint32)
    values = rows.reshape(-1).view(np.uint8).reshape(len(rows), size)
    for place in range(size):
        found ^= _CRC_TABLES[SHORT - size + place][values[:, place]]
    return found.astype(np.int64)


def row_checksums(rows: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """The column CHECK of consecutive rows of a journal.

    It is the CRC-32C of the row's number in the journal and its other columns, each as 8 bytes, little-endian. The
    number is in it so that rows cannot change places unnoticed.

    Parameters
    ----------
    rows : numpy.ndarray of int64, (n, COLUMNS)
        Their last column is not looked at.
    first : int
        Number of the first of them.

    Examples
    --------
    >>> row = np.arange(COLUMNS)[None]
    >>> data = np.array([5, *range(COLUMNS - 1)], "<i8")
    >>> row_checksums(row, 5).tolist() == [crc32c(data)]
    True
    """
    if len(rows) < 3 * SHORT:  # what follows takes as long for a few rows as for some hundred
        numbered = np.empty((len(rows), COLUMNS), "<i8")
        numbered[:, 0] = np.arange(first, first + len(rows))
        numbered[:, 1:] = rows[:, :-1]
        return checksums(numbered)
    found = np.empty(len(rows), np.int64)
    for begin in range(0, len(rows), JOURNAL_BLOCK):
        block = rows[begin : begin + JOURNAL_BLOCK]
        joined = np.full(len(block), _CRC_ZEROS[SHORT], np.uint32)
        for place in range(COLUMNS):
            if place:
                column = np.ascontiguousarray(block[:, place - 1], "<i8")
            else:
                column = np.arange(first + begin, first + begin + len(block), dtype="<i8")
            # a byte that is zero in all rows adds nothing; most are
            used = int(np.bitwise_or.reduce(column)) & (2**64 - 1)
            values = column.view(np.uint8).reshape(-1, 8)
            for byte in range(8):
                if used >> (8 * byte) & 0xFF:
                    joined ^= _CRC_TABLES[8 * place + byte][values[:, byte]]
        found[begin : begin + len(block)] = joined
    return found


def row_as_it_was(row: NDArray[np.int64], number: int) -> NDArray[np.int64] | None:
    """A row of a journal of which one bit was flipped, as it was; None if that is not what happened to it.

    Parameters
    ----------
    row : numpy.ndarray of int64, (COLUMNS,)
    number : int
        Of the row, in its journal.

    Examples
    --------
    >>> row = np.arange(COLUMNS)
    >>> row[Column.CHECK] = row_checksums(row[None], 5)[0]
    >>> damaged = row ^ np.eye(COLUMNS, dtype=np.int64)[3] * 1024
    >>> bool((row_as_it_was(damaged, 5) == row).all()), row_as_it_was(damaged ^ 6, 5)
    (True, None)
    """
    stored = int(row[Column.CHECK])
    differs = stored ^ int(row_checksums(row[None], number)[0])
    right = row.astype("<i8")
    if differs.bit_count() == 1:  # in the checksum itself
        right[Column.CHECK] = stored ^ differs
        return right
    if 0 <= stored < 2**32:
        # behind the number of the row, which is not stored
        found = np.argwhere(_CRC_TABLES[8:, 1 << np.arange(8)] == differs)
        if len(found) == 1:
            byte, bit = found[0].tolist()
            right.view(np.uint8)[byte] ^= np.uint8(1 << bit)
            return right
    return None


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
    return _cut(quoted, raw)


def _cut(quoted: str, raw: bytes) -> str:
    """A name that is short enough for a file, and another one for each that is longer."""
    if len(quoted) > _LONGEST:
        quoted = f"{quoted[: _LONGEST - 22]}%~{hashlib.sha256(raw).hexdigest()[:20]}"
    return quoted


def own_pool(part: str, kind: str, module: str | None, tag: str, leaf: str) -> str:
    """The name of the pool of one stream: ``{part}/{kind}/{module}``, with ``@{tag}`` and ``#{leaf}`` where needed.

    The network's streams stand under ``%~network``.

    Examples
    --------
    >>> own_pool("rank0", "activations", "layer1.0", "default", ""), own_pool("rank0", "input_data", None, "eval", "")
    ('rank0/activations/layer1.0', 'rank0/input_data@eval/%~network')
    >>> own_pool("rank1", "activations", "rnn", "default", "1.0"), own_pool("rank0", "journal", "", "default", "")
    ('rank1/activations/rnn#1.0', 'rank0/%~journal/%~root')
    """
    group = f"%~{kind}" if kind in RESERVED else quote(kind)
    if tag != DEFAULT_TAG:
        # two parts of 200 bytes would be longer than a file name may be
        group = f"{group}@{quote(tag)}"
        group = _cut(group, group.encode())
    name = "%~network" if module is None else quote(module)
    if leaf:
        name = f"{name}#{quote(leaf)}"
        name = _cut(name, name.encode())
    return f"{part}/{group}/{name}"


def shared_pool(part: str, kind: str, storage: str) -> str:
    """The name of the pool of all small or ragged messages of one kind and storage dtype."""
    return f"{part}/pools/{quote(kind)}/{storage}"


def late_pool(part: str, storage: str) -> str:
    """The name of the pool of streams that were first seen when the store could make no more arrays."""
    return f"{part}/late/{storage}"


def is_shape(shape: tuple[Any, ...]) -> bool:
    """Whether a message can have this shape.

    Examples
    --------
    >>> is_shape((3, 0)), is_shape((10**10, 10**9)), is_shape((True,)), is_shape((1,) * 64)
    (True, False, False, False)
    """
    return (
        len(shape) <= MAX_AXES
        and all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in shape)
        and math.prod(size or 1 for size in shape) <= MAX_ELEMENTS
    )


def declaration(what: str, value: Any) -> bytes:
    """One line of the declarations, as yet without its checksum and its end; see `sealed`.

    Raises
    ------
    TraceError
        If the value is no JSON.
    """
    try:
        return json.dumps({what: value}, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"the {what} cannot be kept in a trace, because it is no JSON: {error}") from error


def is_note(line: bytes) -> bool:
    """Whether a declaration, as `declaration` makes it, is a remark on the run, which nothing else depends on."""
    return line.startswith(b'{"note":')


_SEAL = b',"crc32c":'
_LONGEST_LINE = 1 << 14
"""Bytes of the longest lines of which each bit is flipped in turn, which takes a second."""


def sealed(lines: Iterable[bytes], checksum: int = 0) -> tuple[bytes, int]:
    """Lines as they are stored, and the checksum of the last one.

    Each gets a second member ``crc32c``: of its bytes before that member, continued from the checksum of the line
    before it. So no line can be changed, left out or put elsewhere unnoticed.

    Parameters
    ----------
    lines : iterable of bytes
        From `declaration`.
    checksum : int
        That of the line before them; 0 for the first.

    Examples
    --------
    >>> stored, checksum = sealed([declaration("shape", {"id": 0, "shape": [2]})])
    >>> stored.decode().rstrip(), checksum
    ('{"shape":{"id":0,"shape":[2]},"crc32c":2409000863}', 2409000863)
    """
    stored = []
    for line in lines:
        checksum = crc32c(line[:-1], checksum)
        stored.append(b"%s%s%d}\n" % (line[:-1], _SEAL, checksum))
    return b"".join(stored), checksum


def unsealed(line: bytes, before: Collection[int]) -> tuple[dict[str, Any] | None, set[int]]:
    """What one stored line declares, and the checksums that the line after it may be continued from.

    The object is None where the line is damaged. The checksums are then the one that it has and the one that it should
    have, of which one is right unless both parts of the line are damaged: so that the lines after it can be told from
    damaged ones.

    Parameters
    ----------
    line : bytes
        With its end.
    before : collection of int
        Checksums that it may be continued from.
    """
    body, _, tail = line.rpartition(_SEAL)
    found = {crc32c(body, checksum) for checksum in before}
    for checksum in found:
        if tail == b"%d}\n" % checksum:
            try:
                value = json.loads(body + b"}")
            except (ValueError, RecursionError):
                value = None
            return (value if isinstance(value, dict) and len(value) == 1 else None), {checksum}
    said = re.fullmatch(rb"([0-9]{1,10})}\n", tail)
    if said is not None and int(said[1]) < 2**32:
        found.add(int(said[1]))
    return None, found


def as_they_were(lines: bytes, before: Collection[int]) -> tuple[bytes, int] | None:
    """Lines of which one bit was flipped, as they were, and the byte that it is in; None if that is not what happened.

    Parameters
    ----------
    lines : bytes
        With their ends, of which one may be what was flipped, or what became of another byte.
    before : collection of int
        Checksums that they may be continued from.

    Examples
    --------
    >>> stored, _ = sealed([declaration("shape", {"id": 0, "shape": [2]})])
    >>> as_they_were(stored.replace(b"2]", b"3]"), {0}) == (stored, stored.index(b"2]"))
    True
    """
    if len(lines) > _LONGEST_LINE:
        return None
    for place in range(len(lines)):
        for bit in range(8):
            candidate = lines[:place] + bytes([lines[place] ^ 1 << bit]) + lines[place + 1 :]
            # the last byte is where what is not damaged begins
            if candidate.endswith(b"\n"):
                checksums = set(before)
                for line in candidate.splitlines(keepends=True):
                    found, checksums = unsealed(line, checksums)
                    if found is None:
                        break
                else:
                    return candidate, place
    return None


def declarations(data: bytes, checksum: int = 0) -> tuple[list[tuple[str, Any]], int, int]:
    """What lines declare, in order, the bytes that they take, and the checksum of the last one.

    Zeros after the last line are not yet committed, and are left out.

    Parameters
    ----------
    data : bytes
    checksum : int
        That of the line before them; 0 for the first.

    Raises
    ------
    TraceCorruptError
        If a line is not an object of one member and its checksum, or fails the checksum.
    """
    found: list[tuple[str, Any]] = []
    written = data.rstrip(b"\0")
    before = {checksum}
    for number, line in enumerate(written.splitlines(keepends=True)):
        value, before = unsealed(line, before)
        if value is None:
            raise TraceCorruptError(f"line {number} of the declarations is damaged")
        found += value.items()
    return found, len(written), before.pop()


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in a form that can only be compared; None if it ended, or cannot be told.

    With the process id it tells whether the writer of a trace still lives, because ids are used again.
    """
    state, start = _state_and_start(pid) or ("X", "")
    # one that has ended stays in the list until its parent has asked how
    return None if state in "ZX" else start


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """What Linux tells of a process; None where there is no such process, or it is hidden from this user."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # the name of the program stands in parentheses and may hold anything; the start is the 20th field after it
    fields = stat.rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else None


def process_lives(process: object) -> bool | None:
    """Whether the process that a header names still runs; None where that cannot be told from this machine."""
    if not isinstance(process, Mapping) or process.get("hostname") != platform.node():
        return None
    pid = process.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        # the process of another user lives too
        if error.errno != errno.EPERM:
            return False
        # which some systems tell nobody else more of
        if process.get("start") is not None and _state_and_start(pid) is None:
            return None
    return process_start(pid) == process.get("start")


def check_root(root: Mapping[str, Any], part: Callable[[], Mapping[str, Any]], *, doubt_version: bool = False) -> None:
    """Check the attributes of the root of a store that has parts.

    Parameters
    ----------
    root : mapping
    part : callable
        Returns the attributes of the group of a part, which tell a damaged root from one of something else.
    doubt_version : bool
        Whether another version, too, may be what became of this one.

    Raises
    ------
    TraceFormatError
        If it is no trace, or of a version that this release does not read.
    TraceCorruptError
        If a part says that it is a trace of this version, and the root does not.
    """
    try:
        check_version(root)
    except TraceFormatError as error:
        if not doubt_version and root.get("format") == FORMAT and isinstance(root.get("format_version"), int):
            raise
        try:
            check_version(part())
        except TraceError:
            raise error from None
        raise TraceCorruptError(f"the attributes of its root are not as they were: {error}") from None


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
