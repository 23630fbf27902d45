"""Makes names from traces and scripts, which may hold anything, harmless for terminals, JSON and spreadsheets."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from tracer.shown import printable as printable  # re-exported beside the other escapes

_UNSEEN: Final = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that JSON does not escape but terminals and editors obey: controls, line ends, text direction."""
_RUN: Final = tuple("=+-@\t\r\n'＝＋－＠")
"""Prefixes that a spreadsheet takes for a formula; also the apostrophe, so that the escape can be undone."""


def finite(value: Any) -> Any:
    """A value that JSON can represent: a non-finite float becomes ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.

    Python's ``float`` and JavaScript's ``Number`` parse these texts.

    Examples
    --------
    >>> finite(float("-inf")), finite(0.5), finite("fc")
    ('-Infinity', 0.5, 'fc')
    """
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def in_json(text: str) -> str:
    r"""An equal JSON document without characters that a terminal obeys.

    Examples
    --------
    >>> in_json('{"module": "a\u202eb"}')
    '{"module": "a\\u202eb"}'
    """
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def in_cell(text: str) -> str:
    """A text as a cell that a spreadsheet shows and does not compute.

    An apostrophe is put before a text that begins with ``= + - @``, their fullwidth forms, a tab, a line end, or an
    apostrophe. A reader removes the first apostrophe.

    Examples
    --------
    >>> in_cell("=1+1"), in_cell("fc.0"), in_cell("'quoted'")
    ("'=1+1", 'fc.0', "''quoted'")
    """
    return f"'{text}" if text.startswith(_RUN) else text
