"""Formats names and numbers for a page: escaped and short."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from tracer.shown import printable

TO_COMPARE = (
    "similarity of layers needs the same inputs at several steps: trace record --probe 64 SCRIPT.py records them, and "
    "trace reenact RUN --probe FILE --every-keyframe SCRIPT.py computes them for a run with keyframes"
)
"""How to get the activations that similarities of layers need."""


def text(value: object) -> str:
    r"""Any value as text for an HTML element or attribute: escaped, on one line, without control characters.

    Examples
    --------
    >>> text("<b>\u202e&\x1b")
    '&lt;b&gt;\\u202e&amp;\\x1b'
    """
    return html.escape(printable(str(value)))


def plain(value: str) -> str:
    r"""A name for a drawing, never a formula: Bokeh would load a typesetter for formulas from the network.

    Examples
    --------
    >>> plain("$$x$$"), plain("fc\n")
    ('$ $x$ $', 'fc\\n')
    """
    return printable(value).replace("$$", "$ $").replace("\\(", "\\ (").replace("\\[", "\\ [")


def short(name: str, length: int = 24) -> str:
    """Shorten a long name at its beginning, since names of layers differ at their ends.

    Examples
    --------
    >>> short("encoder.layers.11.attention.query", 16), short("fc1")
    ('…attention.query', 'fc1')
    """
    return name if len(name) <= length else "…" + name[1 - length :]


def titled(what: str, tag: str) -> str:
    """The name of an answer, with its tag unless that is the default.

    Examples
    --------
    >>> titled("loss", "default"), titled("loss", "probe")
    ('loss', 'loss (tag probe)')
    """
    return plain(what if tag == "default" else f"{what} (tag {tag})")


def number(value: float | None, digits: int = 4) -> str:
    """A number for people; empty for None.

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
    """A shift in powers of two as a factor.

    Examples
    --------
    >>> times(3.0), times(-1.0)
    ('8 times', '0.5 times')
    """
    return f"{2.0**shift:.3g} times"


def course_in_words(steps: np.ndarray, values: np.ndarray) -> str:
    """The first, last, least and greatest value of a course, in words.

    Examples
    --------
    >>> course_in_words(np.array([0, 5, 9]), np.array([2.0, 0.5, 1.0]))
    '2 at step 0, 1 at step 9; the least is 0.5 at step 5, the greatest 2 at step 0'
    """
    places = (0, -1, np.argmin(values), np.argmax(values))
    first, last, least, greatest = (f"{number(values[at])} at step {steps[at]}" for at in places)
    return f"{first}, {last}; the least is {least}, the greatest {greatest}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names as a list in a sentence; beyond `most`, only their count.

    Examples
    --------
    >>> listed(["a", "b", "c"], 2), listed(["a"])
    ('a, b and 1 more', 'a')
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
