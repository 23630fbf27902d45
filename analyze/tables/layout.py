"""Tables of texts that fit the width of the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


_MOST_LINES: Final = 4
"""The maximum number of lines of a row."""
_LEAST_NAME: Final = 16
"""The minimum width of a shortened name."""
_LEAST_PROSE: Final = 12
"""The minimum width of wrapped prose."""
_INDENT: Final = 2
"""Columns by which the rows of a group, and the paragraph below a row, are indented."""
_BETWEEN: Final = " · "
"""The separator of cells in the paragraph below a row."""


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
    """The columns beside each other, with their widths, and the columns in the paragraph below the row."""

    width: int
    gap: int
    beside: Mapping[int, int]
    below: Sequence[int] = ()
    group: int | None = None


@final
class TextTable:
    """Rows of texts for `rich`, in lines that fit the terminal.

    No word and no heading is broken, and no row takes more than four lines. If the rows are too wide, the values of
    `group` become headings with the rows below them. If that is not enough, names are shortened in the middle, prose is
    wrapped, and the widest of these columns move to a paragraph below the row. Among the layouts that fit, the one that
    loses least is taken (cut text, and names that look the same once shortened), and among equals the shortest.

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

    def plain(self) -> str:
        """The table for a file or a program: one line per row, of any width."""
        layout = _Layout(width=sum(self._widths) + len(self._widths), gap=1, beside=dict(enumerate(self._widths)))
        return "\n".join(line for row in (self._columns, *self._rows) for line in self._row(row, layout)[0])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.style import Style
        from rich.text import Text

        for line, heading in self.lines(options.max_width):
            yield Text(line, style=Style(bold=heading), no_wrap=True, overflow="ignore")

    def lines(self, width: int) -> list[tuple[str, bool]]:
        """The lines in at most `width` columns, and whether each is a heading."""
        made = [self._lines(layout) for layout in self._layouts(width)]
        return min(made, key=lambda one: (one[0], len(one[1])))[1]

    def _layouts(self, width: int) -> Iterator[_Layout]:
        for gap in (2, 1):
            if sum(self._widths) + gap * (len(self._widths) - 1) <= width:
                yield _Layout(width, gap, dict(enumerate(self._widths)))
                return
        indent = 0 if self._group is None else _INDENT
        beside = [place for place in range(len(self._columns)) if place != self._group]
        below: list[int] = []
        found = False
        while beside:
            for gap, shrinks in ((2, False), (1, False), (1, True)):
                widths = self._fitted(beside, width - indent - gap * (len(beside) - 1), shrinks=shrinks)
                if widths is not None:
                    yield _Layout(width, gap, widths, tuple(sorted(below)), self._group)
                    found = True
                    break
            movable = [place for place in beside if place in self._names | self._prose]
            if found and not movable:
                return
            below.append(max(movable or beside, key=lambda place: self._widths[place]))
            beside.remove(below[-1])
        if not found:
            yield _Layout(width, 1, {}, tuple(sorted(below)), self._group)

    def _fitted(self, beside: Sequence[int], room: int, *, shrinks: bool) -> dict[int, int] | None:
        """The widths of columns in `room`, taken from the widest that can shrink; None if the columns do not fit."""
        widths = {place: self._widths[place] for place in beside}
        least = {place: self._least(place) if shrinks else widths[place] for place in beside}
        if not beside or sum(least.values()) > room:
            return None
        while sum(widths.values()) > room:
            widest = max((place for place in beside if widths[place] > least[place]), key=widths.__getitem__)
            widths[widest] -= 1
        return widths

    def _least(self, place: int) -> int:
        if place in self._names:
            return min(self._widths[place], max(len(self._columns[place]), _LEAST_NAME))
        if place in self._prose:
            words = (len(word) for text in self._texts[place][1:] for word in text.split())
            return min(self._widths[place], max(len(self._columns[place]), _LEAST_PROSE, *words))
        return self._widths[place]

    def _lines(self, layout: _Layout) -> tuple[int, list[tuple[str, bool]]]:
        """How many rows are cut and columns have ambiguous names, added up; and the lines."""
        lost = sum(
            len({shortened(text, width) for text in self._texts[place]}) < len(set(self._texts[place]))
            for place, width in layout.beside.items()
            if place in self._names
        )
        groups: dict[str, list[Sequence[str]]] = {}
        for row in self._rows:
            groups.setdefault("" if layout.group is None else row[layout.group], []).append(row)
        lines = [(line, True) for line in self._row(self._columns, layout)[0]]
        used = sum(layout.beside.values()) + layout.gap * (len(layout.beside) - 1)
        lines.append(("─" * (layout.width if layout.below or layout.group is not None else used), False))
        for group, rows in groups.items():
            if layout.group is not None:
                lines.append((shortened(group, layout.width), True))
            for row in rows:
                of_row, cut = self._row(row, layout)
                lost += cut
                lines += [(line, False) for line in of_row]
        return lost, lines

    def _row(self, row: Sequence[str], layout: _Layout) -> tuple[list[str], bool]:
        """The lines of a row, and whether text was left out."""
        indent = 0 if layout.group is None else _INDENT
        room = max(layout.width - indent - _INDENT, 1)
        rest = _wrapped(_BETWEEN.join(row[place] for place in layout.below if row[place]), room)
        cells = [
            _wrapped(row[place], width) if place in self._prose else [shortened(row[place], width)]
            for place, width in layout.beside.items()
        ]
        most = _MOST_LINES - bool(rest)
        height = min(max(map(len, cells), default=0), most)
        lines = []
        kept = [_cut(cell, most, width) for cell, width in zip(cells, layout.beside.values(), strict=True)]
        for at in range(height):
            words = []
            for (place, width), cell in zip(layout.beside.items(), kept, strict=True):
                text = cell[at] if at < len(cell) else ""
                words.append(f"{text:>{width}}" if place in self._right else f"{text:<{width}}")
            lines.append((" " * indent + (" " * layout.gap).join(words)).rstrip())
        lines += [" " * (indent + _INDENT) + line for line in _cut(rest, _MOST_LINES - height, room)]
        return lines, len(rest) > _MOST_LINES - height or any(len(cell) > most for cell in cells)


def _wrapped(text: str, width: int) -> list[str]:
    """A text in lines of at most `width` columns, broken between words; a longer word is shortened."""
    if len(text) <= width:
        return [text] if text else []
    words = " ".join(shortened(word, width) for word in text.split())
    return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)


def _cut(lines: Sequence[str], most: int, width: int) -> list[str]:
    """The first `most` lines; if some are left out, an ellipsis follows the last word."""
    if len(lines) <= most:
        return list(lines)
    last = lines[most - 1]
    while len(last) + 2 > width and " " in last:
        last = last.rpartition(" ")[0]
    return [*lines[: most - 1], f"{last[: width - 1]}…" if len(last) + 2 > width else f"{last} …"]
