"""Names from traces and scripts may hold anything: here they are made harmless for terminals, JSON and spreadsheets."""

from __future__ import annotations

import re
from typing import Final

_UNSEEN: Final = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What JSON leaves as it is and a terminal or an editor obeys: controls, line ends, and what turns the direction."""
_RUN: Final = tuple("=+-@\t\r\n'＝＋－＠")
"""How texts begin that a spreadsheet takes for formulas; and the apostrophe, so that it can be taken off again."""


def printable(text: str) -> str:
    r"""The same on one line and without effect on a terminal: a module may have any name.

    Examples
    --------
    >>> printable("fc\x1b[31m"), printable("größer")
    ('fc\\x1b[31m', 'größer')
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def in_json(text: str) -> str:
    r"""A JSON document as one that says the same and has no effect on a terminal.

    Examples
    --------
    >>> in_json('{"module": "a\u202eb"}')
    '{"module": "a\\u202eb"}'
    """
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def in_cell(text: str) -> str:
    """A text as the cell of a table that a spreadsheet shows, and does not compute.

    An apostrophe stands before it if it begins with ``= + - @``, their wide forms, a tab, a line end, or an
    apostrophe. Whoever reads it back takes the first apostrophe off.

    Examples
    --------
    >>> in_cell("=1+1"), in_cell("fc.0"), in_cell("'quoted'")
    ("'=1+1", 'fc.0', "''quoted'")
    """
    return f"'{text}" if text.startswith(_RUN) else text
