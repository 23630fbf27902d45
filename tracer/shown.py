"""Makes names from traces and scripts, which may hold anything, harmless: in terminals, JSON, cells and notebooks."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

_MOST = 40
"""The most rows of a table; a line below gives the number of further rows."""
_UNSEEN: Final = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that JSON does not escape but terminals and editors obey: controls, line ends, text direction."""
_RUN: Final = tuple("=+-@\t\r\n'＝＋－＠")
"""Prefixes that a spreadsheet takes for a formula; also the apostrophe, so that the escape can be undone."""


def printable(text: str) -> str:
    r"""A text on one line without control characters; for names, which may contain any character.

    Examples
    --------
    >>> printable("fc\x1b[31m"), printable("größer")
    ('fc\\x1b[31m', 'größer')
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode()


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


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """An HTML table for a notebook, of the first `_MOST` rows.

    Examples
    --------
    >>> table(["module", "n"], [["<b>", 3]])
    '<table><thead><tr><th>module</th><th>n</th></tr></thead><tbody><tr><td>&lt;b&gt;</td><td>3</td></tr></tbody></table>'
    """
    told = [[_cell(value) for value in row] for row in rows]
    head = "".join(f"<th>{_cell(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{value}</td>' for value in row)}</tr>" for row in told[:_MOST])
    title = f"<caption>{_cell(caption)}</caption>" if caption else ""
    found = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return found if len(told) <= _MOST else f"{found}<p>and {len(told) - _MOST:,} more</p>"


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(printable(text))


def json_of(thing: object, *names: str) -> dict[str, Any]:
    """Some attributes of an object in JSON values.

    Examples
    --------
    >>> json_of(3 + 4j, "real", "imag")
    {'real': 3.0, 'imag': 4.0}
    """
    return {name: _json_of(getattr(thing, name)) for name in names}


def _json_of(value: Any) -> Any:
    if isinstance(value, IntEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _json_of(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_of(one) for one in value]
    return value.as_json() if hasattr(value, "as_json") else value
