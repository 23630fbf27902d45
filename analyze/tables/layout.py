"""Tables of texts that fit the width of the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


_MOST_LINES: Final = 4
"""The maximum number of lines of a row."""
_LEAST_NAME: Final = 16
"""The minimum width of a shortened name."""
_INDENT: Final = 2
"""Columns by which the rows of a group, and what stands below a line, are indented."""
_BETWEEN: Final = " · "
"""The separator of cells that stand above or below a row."""


def shortened(text: str, width: int) -> str:
    """A text in at most `width` columns; a longer one loses its middle.

    Examples
    --------
    >>> shortened("encoder.layers.11.attention.output.dense", 21)
    'encoder.la…tput.dense'
    """
    if len(text) <= width:
        return text
    if width < 2:
        return text[:width]
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns beside each other, with their widths, and the columns in lines of their own above and below them."""

    width: int
    gap: int
    beside: Mapping[int, int]
    above: Sequence[int] = ()
    below: Sequence[int] = ()
    group: int | None = None


@final
class TextTable:
    """Rows of texts for `rich`, in lines that fit the terminal.

    No word and no heading is broken, and no row takes more than four lines. If the rows are too wide, the values of
    `group` become headings with the rows below them. If that is not enough, the widest name is shortened in the middle,
    unless names would look the same; then names move to a line above their row, and prose to a paragraph below it.

    Parameters
    ----------
    columns : sequence of str
        The headings.
    rows : sequence of sequences of str
        For each row, one text per column, without line breaks.
    right, names, prose : collections of str
        Columns that are aligned to the right, that may be shortened, and that may be wrapped. Any other column is as
        wide as its widest text.
    group : str, optional
        The column whose values may become headings.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        right: Collection[str] = (),
        names: Collection[str] = (),
        prose: Collection[str] = (),
        group: str | None = None,
    ) -> None:
        self._columns, self._rows = list(columns), rows
        self._right, self._names, self._prose = (
            frozenset(place for place, name in enumerate(columns) if name in chosen) for chosen in (right, names, prose)
        )
        self._group = None if group is None else self._columns.index(group)
        self._texts = [list(texts) for texts in zip(self._columns, *rows, strict=True)]
        self._widths = [max(map(len, texts)) for texts in self._texts]

    def __str__(self) -> str:
        """The lines in the width of the terminal."""
        return "\n".join(line for line, _ in self.lines(shutil.get_terminal_size().columns))

    def plain(self) -> str:
        """The table for a file or a program: one line per row, of any width."""
        layout = _Layout(sum(self._widths), 1, dict(enumerate(self._widths)))
        return "\n".join(self._beside(row, layout) for row in (self._columns, *self._rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.style import Style
        from rich.text import Text

        for line, heading in self.lines(options.max_width):
            yield Text(line, style=Style(bold=heading), no_wrap=True, overflow="ignore")

    def lines(self, width: int) -> list[tuple[str, bool]]:
        """The lines in at most `width` columns, and whether each is a heading."""
        layout = self._layout(width)
        groups: dict[str, list[Sequence[str]]] = {}
        for row in self._rows:
            groups.setdefault("" if layout.group is None else row[layout.group], []).append(row)
        lines = [(line, True) for line in self._row(self._columns, layout)]
        used = sum(layout.beside.values()) + layout.gap * (len(layout.beside) - 1)
        lines.append(("─" * (used if len(layout.beside) == len(self._columns) else width), False))
        for group, rows in groups.items():
            if layout.group is not None:
                lines.append((shortened(group, width), True))
            lines += [(line, False) for row in rows for line in self._row(row, layout)]
        return lines

    def _layout(self, width: int) -> _Layout:
        for gap in (2, 1):
            if sum(self._widths) + gap * (len(self._widths) - 1) <= width:
                return _Layout(width, gap, dict(enumerate(self._widths)))
        beside = {place: length for place, length in enumerate(self._widths) if place != self._group}
        above: list[int] = []
        below: list[int] = []
        room = width
        while beside:
            room = width - _INDENT * ((self._group is not None) + bool(above))
            excess = sum(beside.values()) + len(beside) - 1 - room
            if excess <= 0:
                break
            movable = [place for place in beside if place in self._names | self._prose]
            widest = max(movable or beside, key=beside.__getitem__)
            if widest in self._names and self._is_clear(widest, beside[widest] - excess):
                beside[widest] -= excess
            else:
                (above if widest in self._names else below).append(widest)
                del beside[widest]
        gap = 2 if sum(beside.values()) + 2 * (len(beside) - 1) <= room else 1
        return _Layout(width, gap, beside, sorted(above), sorted(below), self._group)

    def _is_clear(self, place: int, width: int) -> bool:
        """Whether the names of a column can be told apart in `width` columns, in which its heading has room."""
        texts = self._texts[place]
        is_wide = width >= max(_LEAST_NAME, len(self._columns[place]))
        return is_wide and len({shortened(text, width) for text in texts}) == len(set(texts))

    def _row(self, row: Sequence[str], layout: _Layout) -> list[str]:
        """The lines of a row."""
        indent = 0 if layout.group is None else _INDENT
        lines = []
        if layout.above:
            head = _BETWEEN.join(filter(None, (row[place] for place in layout.above))) or _BETWEEN.strip()
            lines.append(" " * indent + shortened(head, layout.width - indent))
            indent += _INDENT
        if layout.beside:
            lines.append(" " * indent + self._beside(row, layout))
        room = max(layout.width - indent - _INDENT, 1)
        rest = _BETWEEN.join(filter(None, (row[place] for place in layout.below)))
        paragraph = textwrap.wrap(
            re.sub(r"\S+", lambda word: shortened(word[0], room), rest), room, max_lines=_MOST_LINES - len(lines),
            placeholder=" …", break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        return [*(line.rstrip() for line in lines), *(" " * (indent + _INDENT) + line for line in paragraph)]

    def _beside(self, row: Sequence[str], layout: _Layout) -> str:
        """The line with the cells that stand beside each other."""
        cells = [(place, shortened(row[place], width), width) for place, width in layout.beside.items()]
        words = [f"{text:>{width}}" if place in self._right else f"{text:<{width}}" for place, text, width in cells]
        return (" " * layout.gap).join(words).rstrip()
