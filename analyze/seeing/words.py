"""Names and numbers as a page has them: escaped, short, and as exact as they are."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from analyze.tables.escapes import printable


def text(value: object) -> str:
    r"""Anything as the text of an HTML element or of an attribute, on one line and without effect.

    Examples
    --------
    >>> text("<b>\u202e&\x1b")
    '&lt;b&gt;\\u202e&amp;\\x1b'
    """
    return html.escape(printable(str(value)))


def plain(value: str) -> str:
    r"""A name as a drawing has it: never a formula, which Bokeh would ask a typesetter on the network for.

    Examples
    --------
    >>> plain("$$x$$"), plain("fc\n")
    ('$ $x$ $', 'fc\\n')
    """
    return printable(value).replace("$$", "$ $").replace("\\(", "\\ (").replace("\\[", "\\ [")


def short(name: str, length: int = 24) -> str:
    """A long name without its beginning, since names of layers differ at their ends.

    Examples
    --------
    >>> short("encoder.layers.11.attention.query", 16), short("fc1")
    ('…attention.query', 'fc1')
    """
    return name if len(name) <= length else "…" + name[1 - length :]


def titled(what: str, tag: str) -> str:
    """What an answer is called, with its tag unless that is the usual one.

    Examples
    --------
    >>> titled("loss", "default"), titled("loss", "probe")
    ('loss', 'loss (tag probe)')
    """
    return plain(what if tag == "default" else f"{what} (tag {tag})")


def number(value: float | None, digits: int = 4) -> str:
    """A number for people; empty for none.

    Examples
    --------
    >>> number(0.00012345678), number(float("inf")), number(None), number(1234567.0, 7)
    ('0.0001235', 'infinite', '', '1234567')
    """
    if value is None:
        return ""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return f"{value:.{digits}g}"


def times(shift: float) -> str:
    """A number of powers of two as a factor.

    Examples
    --------
    >>> times(3.0), times(-1.0)
    ('8 times', '0.5 times')
    """
    return f"{2.0**shift:.3g} times"


def course_in_words(steps: np.ndarray, values: np.ndarray) -> str:
    """The first and the last value of a course, the least and the greatest.

    Examples
    --------
    >>> course_in_words(np.array([0, 5, 9]), np.array([2.0, 0.5, 1.0]))
    '2 at step 0, 1 at step 9; the least is 0.5 at step 5, the greatest 2 at step 0'
    """
    places = (0, -1, np.argmin(values), np.argmax(values))
    first, last, least, greatest = (f"{number(values[at])} at step {steps[at]}" for at in places)
    return f"{first}, {last}; the least is {least}, the greatest {greatest}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Some names in a sentence.

    Examples
    --------
    >>> listed(["a", "b", "c"], 2), listed(["a"])
    ('a, b and 1 more', 'a')
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
