"""Declarations: lines of JSON that say what the journal's numbers mean, each sealed with a checksum."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from tracer.errors import TraceCorruptError, TraceError
from tracer.format.checksum import crc32c


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


_decode = json.JSONDecoder().raw_decode
_SEAL = b',"crc32c":'
_MARK = "\x7f"
"""Stands between lines that are parsed at once; `_MARK_ESCAPED` begins the only other way to write it in JSON."""
_MARK_ESCAPED = r"\u007"
_BETWEEN = b'},"%s",\n' % _MARK.encode()
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


def _object(body: bytes) -> dict[str, Any] | None:
    """The object of one member that a line declares, without the line's checksum; None if it is none."""
    try:
        text = f"{body.decode()}}}"
        value, end = _decode(text)  # half of what `json.loads` takes
    except (ValueError, RecursionError):
        return None
    return value if end == len(text) and isinstance(value, dict) and len(value) == 1 else None


def _objects(bodies: Sequence[bytes]) -> list[dict[str, Any]]:
    """The object of each line, as `_object`.

    Raises
    ------
    TraceCorruptError
        If a line has none.
    """
    # One call for all lines takes half of the time. Between them stands a text that is nowhere else. Where each second
    # value is that text, every line ends outside of its object. A text that a line leaves open ends at the next quote,
    # behind which the mark is no JSON.
    try:
        text = (b"[" + _BETWEEN.join(bodies) + b"}]").decode()
        escaped = "\\" in text and _MARK_ESCAPED in text  # the first is a fraction of the time
        alone = text.count(_MARK) == len(bodies) - 1 and not escaped
        values, _ = _decode(text) if alone else ([], 0)
    except (ValueError, RecursionError):
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
            return _object(body), {checksum}
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
