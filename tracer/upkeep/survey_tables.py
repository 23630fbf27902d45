"""`SurveyedTables`: reads the declarations of a part of a trace that may be damaged."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, final

from tracer.errors import TraceCorruptError, TraceError
from tracer.format.declarations import as_they_were, unsealed
from tracer.format.tables import Tables
from tracer.upkeep.findings import Findings
from tracer.upkeep.survey_chunks import Array, Chunks

SEARCHED_BYTES: Final = 1 << 15
"""The most bytes of lines in which a flipped bit is searched."""


@final
class SurveyedTables:
    """Reads what is left of the declarations of a part.

    Parameters
    ----------
    chunks : Chunks
    name : str
        Name of the array.
    findings : Findings
        Receives problems of the declarations.

    Attributes
    ----------
    tables : Tables
        The readable declarations.
    declarations : int
        The number of readable lines.
    chained : bool
        Whether the checksums chain all lines, so that declarations can be missing only at the end.
    """

    def __init__(self, chunks: Chunks, name: str, findings: Findings) -> None:
        self.tables = Tables(gaps=True)
        self.declarations = 0
        self.chained = False
        self._chunks = chunks
        self._findings = findings
        self._name = name
        # bytes of damaged lines that were searched for a flipped bit so far
        self._searched = 0
        self._read_declarations()

    def _read_declarations(self) -> None:
        array = self._chunks.array(self._name, "uint8", ())
        if array is None:
            return
        place = 0
        damaged = broken = False
        # Possible checksums of the previous line. Even a damaged line gives some, so the next line can be checked.
        before = {0}
        lines = deque(self._lines(array))
        while lines:
            line = lines.popleft()
            start, place = place, place + len(line) + 1
            if not line:
                damaged = broken = True
                continue
            found, after = unsealed(line + b"\n", before)
            if found is None and not damaged and self._flipped_back(line, lines, before, start):
                place = start
                continue
            before = after
            broken = broken or found is None
            why = "is damaged" if found is None else self._declare(found)
            if not why:
                self.declarations += 1
            elif not damaged:  # else it is the rest of a line that was reported already
                self._findings.add("declaration", f"the line at byte {start} {why}", array.name, (start, place))
            damaged = False
        if not self.tables.header:
            self._findings.add("declaration", "the header is not there", array.name)
        self.chained = not broken

    def _lines(self, array: Array) -> list[bytes]:
        """The lines of the declarations without line feeds; an empty line stands for an unreadable chunk."""
        data = bytearray()
        for number in range(len(array.state)):
            chunk = self._chunks.of_table(array, number)
            # the first line feed ends the line in which the damage begins, the second makes the empty line
            data += b"\n\n" if chunk is None else chunk.data
        del data[data.rfind(b"\n") + 1 :]
        return list(map(bytes, data.split(b"\n")[:-1]))

    def _declare(self, found: Mapping[str, Any]) -> str:
        """Enter the declaration of a line; returns its problem, or an empty text."""
        try:
            for what, value in found.items():
                self.tables.declare(what, value)
        except TraceCorruptError:
            return "is damaged"
        except (TraceError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            return f"makes no sense: {error!r}"
        return ""

    def _flipped_back(self, line: bytes, lines: deque[bytes], before: set[int], start: int) -> bool:
        """Repair a line with one flipped bit, and put it back at the front of `lines`; returns whether that succeeded.

        The flip may have destroyed a line feed, which joins two lines, or created one, which splits a line.
        """
        for following in ([], [lines[0]] if lines else []):
            text = b"".join(one + b"\n" for one in (line, *following))
            self._searched += len(text)
            # the search is limited, because trying each bit of long lines takes long
            found = None if self._searched > SEARCHED_BYTES else as_they_were(text, before)
            if found is not None:
                self._findings.add(
                    "declaration",
                    f"a bit of byte {start + found[1]} is wrong, and is put right",
                    self._name,
                    (start + found[1], start + found[1] + 1),
                )
                for _ in following:
                    lines.popleft()
                lines.extendleft(reversed(found[0].split(b"\n")[:-1]))
                return True
        return False
