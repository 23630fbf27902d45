"""`SurveyedTables`: reads the declarations of a part of a trace that may be damaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from tracer.errors import TraceCorruptError, TraceError
from tracer.format.declarations import unsealed
from tracer.format.tables import Tables
from tracer.upkeep.findings import Findings
from tracer.upkeep.survey_chunks import Array, Chunks


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
        self._read_declarations()

    def _read_declarations(self) -> None:
        array = self._chunks.array(self._name)
        if array is None:
            return
        place = 0
        damaged = broken = False
        # Possible checksums of the previous line. Even a damaged line gives some, so the next line can be checked.
        before = {0}
        for line in self._lines(array):
            start, place = place, place + len(line) + 1
            if not line:
                damaged = broken = True
                continue
            found, after = unsealed(line + b"\n", before)
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
