"""Names and small tables for display: safe in a terminal, and escaped in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_MOST = 40
"""The most rows of a table; a line below gives the number of further rows."""


def printable(text: str) -> str:
    r"""A text on one line without control characters; for names, which may contain any character.

    Examples
    --------
    >>> printable("fc\x1b[31m"), printable("größer")
    ('fc\\x1b[31m', 'größer')
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode()


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
