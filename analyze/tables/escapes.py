"""Makes names from traces and scripts, which may hold anything, harmless for terminals, JSON and spreadsheets."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from tracer.shown import printable as printable  # with what makes names harmless elsewhere

_UNSEEN: Final = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that JSON does not escape, but terminals and editors obey: controls, line ends, text direction."""
_RUN: Final = tuple("=+-@\t\r\n'＝＋－＠")
"""Beginnings that a spreadsheet takes for formulas; and the apostrophe, so that it can be taken off again."""


def finite(value: Any) -> Any:
    """A value that JSON has a word for: what is not finite becomes ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.

    ``float`` of Python and ``Number`` of JavaScript understand these texts.

    Examples
    --------
    >>> finite(float("-inf")), finite(0.5), finite("fc")
    ('-Infinity', 0.5, 'fc')
    """
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def in_json(text: str) -> str:
    r"""An equal JSON document that has no effect on a terminal.

    Examples
    --------
    >>> in_json('{"module": "a\u202eb"}')
    '{"module": "a\\u202eb"}'
    """
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def in_cell(text: str) -> str:
    """A text as a cell that a spreadsheet shows and does not compute.

    An apostrophe stands before it if it begins with ``= + - @``, their wide forms, a tab, a line end, or an
    apostrophe. A reader takes the first apostrophe off.

    Examples
    --------
    >>> in_cell("=1+1"), in_cell("fc.0"), in_cell("'quoted'")
    ("'=1+1", 'fc.0', "''quoted'")
    """
    return f"'{text}" if text.startswith(_RUN) else text
