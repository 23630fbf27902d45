"""Names and numbers are only ever text."""

from __future__ import annotations

import html
import re

from hypothesis import given
from hypothesis import strategies as st

from analyze.seeing.panel import listed, number, plain, short, text
from tests.analyze.seeing.runs import HOSTILE

NAMES = st.text() | st.sampled_from(HOSTILE) | st.text(alphabet="<>&\"'$\\()[]{}@/!-\u202e\x00 script")


@given(NAMES)
def test_no_name_is_markup(name: str) -> None:
    """No tag, quote or control character is left, and what is printable reads as it was."""
    shown = text(name)
    assert not set("<>\"'") & set(shown)
    assert shown.isprintable()
    assert re.fullmatch(r"(?:[^&]|&(?:amp|lt|gt|quot|#x27);)*", shown)
    if name.isprintable():
        assert html.unescape(shown) == name


@given(NAMES)
def test_no_name_is_a_formula(name: str) -> None:
    """Nothing in a picture is between signs that would ask for a typesetter, and it is on one line."""
    shown = plain(name)
    assert shown.isprintable()
    assert not re.search(r"\$\$|\\\(|\\\[", shown)


@given(NAMES, st.integers(2, 40))
def test_short_names_keep_their_ends(name: str, length: int) -> None:
    """And are no longer than they may be."""
    shown = short(name, length)
    assert len(shown) <= length
    assert name.endswith(shown.removeprefix("…"))


@given(st.floats())
def test_numbers_are_readable(value: float) -> None:
    """Those that are not finite have words."""
    shown = number(value, 17)
    words = {"NaN": "nan", "infinite": "inf", "-infinite": "-inf"}
    assert str(float(words.get(shown, shown))) == str(value)


def test_lists_say_how_many_more() -> None:
    """And name no more than they may."""
    assert listed([f"l{number}" for number in range(9)]) == "l0, l1, l2, l3 and 5 more"
    assert listed([]) == ""
