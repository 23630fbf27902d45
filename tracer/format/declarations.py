"""Declarations: lines of JSON that give the journal's numbers a meaning, each with a checksum.

The JSON is that of files that may be damaged or hostile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from tracer.errors import TraceCorruptError, TraceError
from tracer.format.checksum import crc32c
from tracer.memory import collector_waits

_decode = json.JSONDecoder().raw_decode


@collector_waits()
def parsed(text: str) -> Any:
    """Parse a JSON text, which has no white space around it.

    The garbage collector waits, because deep nesting reaches Python's recursion limit. A collection at that depth would
    free objects of h5py, which cannot release h5py's global lock there. Later uses of HDF5 would then wait for ever.

    Raises
    ------
    ValueError
        If the text is not valid JSON, or is nested too deeply.

    Examples
    --------
    >>> parsed('{"shape": [2, 3]}')
    {'shape': [2, 3]}
    """
    try:
        value, end = _decode(text)  # takes half the time of `json.loads`
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    if end != len(text):
        raise ValueError(f"the JSON ends at character {end:,} of {len(text):,}")
    return value


def declaration(what: str, value: Any) -> bytes:
    """A line of the declarations, without checksum and line feed; see `sealed`.

    Raises
    ------
    TraceError
        If the value cannot be written as JSON.
    """
    try:
        return json.dumps({what: value}, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"the {what} cannot be kept in a trace, because it is no JSON: {error}") from error


def is_note(line: bytes) -> bool:
    """Whether a line from `declaration` is a note, which no other data depends on."""
    return line.startswith(b'{"note":')


_SEAL = b',"crc32c":'
_MARK = "\x7f"
"""Separates lines that are parsed together; `_MARK_ESCAPED` is the start of its escaped form in JSON."""
_MARK_ESCAPED = r"\u007"
_BETWEEN = b'},"%s",\n' % _MARK.encode()


def sealed(lines: Iterable[bytes], checksum: int = 0) -> tuple[bytes, int]:
    """Lines in their stored form, and the checksum of the last line.

    Each line gets a second member ``crc32c``: the checksum of its bytes before that member, continued from the
    checksum of the previous line. So no line can be changed, removed or moved unnoticed.

    Parameters
    ----------
    lines : iterable of bytes
        From `declaration`.
    checksum : int
        The checksum of the previous line; 0 for the first line.

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


def _object(body: bytes) -> dict[str, Any] | None:
    """Parse a line without its checksum member; None if it is not a JSON object with exactly one other member."""
    try:
        value = parsed(f"{body.decode()}}}")
    except ValueError:
        return None
    return value if isinstance(value, dict) and len(value) == 1 else None


def _objects(bodies: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parse all lines, as `_object` does.

    Raises
    ------
    TraceCorruptError
        If a line is invalid.
    """
    # Parsing all lines in one call takes half the time. The lines are joined to one array, with a mark between them
    # that occurs nowhere else. If every second value is the mark, each line is complete by itself. A string that a line
    # leaves open would end at the quote in front of the mark, and the mark behind it is not valid JSON.
    try:
        text = (b"[" + _BETWEEN.join(bodies) + b"}]").decode()
        escaped = "\\" in text and _MARK_ESCAPED in text  # the first test is much faster
        alone = text.count(_MARK) == len(bodies) - 1 and not escaped
        values = parsed(text) if alone else []
    except ValueError:
        values = []
    objects = values[::2]
    if (
        len(values) == 2 * len(bodies) - 1
        and values[1::2] == [_MARK] * (len(bodies) - 1)
        and {*map(type, objects)} == {dict}
        and {*map(len, objects)} == {1}
    ):
        return objects
    found = []
    for number, body in enumerate(bodies):
        value = _object(body)
        if value is None:
            raise TraceCorruptError(f"line {number} of the declarations is damaged")
        found.append(value)
    return found


def unsealed(line: bytes, before: Collection[int]) -> tuple[dict[str, Any] | None, set[int]]:
    """Check and parse a stored line; returns its object and the possible checksums that the next line continues.

    The object is None if the line is damaged. The checksums are then the stored and the computed one. One of them is
    right unless both the content and the checksum of the line are damaged. So the following lines can still be checked.

    Parameters
    ----------
    line : bytes
        The line with its line feed.
    before : collection of int
        Possible checksums of the previous line.
    """
    body, _, tail = line.rpartition(_SEAL)
    found = {crc32c(body, checksum) for checksum in before}
    for checksum in found:
        if tail == b"%d}\n" % checksum:
            return _object(body), {checksum}
    said = re.fullmatch(rb"([0-9]{1,10})}\n", tail)
    if said is not None and int(said[1]) < 2**32:
        found.add(int(said[1]))
    return None, found


def declarations(data: bytes, checksum: int = 0) -> tuple[list[tuple[str, Any]], int, int]:
    """Parse lines; returns their declarations (name, value), their total bytes, and the checksum of the last line.

    Zeros after the last line are uncommitted and ignored.

    Parameters
    ----------
    data : bytes
    checksum : int
        The checksum of the previous line; 0 for the first line.

    Raises
    ------
    TraceCorruptError
        If a line fails its checksum, or is not an object of one member and the checksum.
    """
    written = data.rstrip(b"\0")
    bodies = []
    for number, line in enumerate(written.splitlines(keepends=True)):
        body, _, tail = line.rpartition(_SEAL)
        checksum = crc32c(body, checksum)
        if tail != b"%d}\n" % checksum:
            raise TraceCorruptError(f"line {number} of the declarations is damaged")
        bodies.append(body)
    found = [*chain.from_iterable(map(dict.items, _objects(bodies)))]
    return found, len(written), checksum
