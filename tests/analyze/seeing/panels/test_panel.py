"""What all pictures share: names beside rows, colours, numbers for the page's script."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from analyze.seeing.panel import LABELS, blend, drawing, height_of, name_rows, packed

pytest.importorskip("bokeh")

TYPES = {"f": "<f4", "d": "<f8", "i": "<i4"}


def unpacked(words: str) -> np.ndarray:
    """The numbers as the page's script reads them."""
    return np.frombuffer(base64.b64decode(words[1:]), TYPES[words[0]])


@pytest.mark.parametrize("values", [[1.5, np.inf, -np.inf], [1e300, 1.0], [3, -7], [2**40], [], [5e-42]])
def test_numbers_arrive(values: list[float]) -> None:
    """As they were, to the digits that a picture shows; steps exactly."""
    found = unpacked(packed(np.array(values)))
    np.testing.assert_allclose(found, values, rtol=1e-7)


def test_some_rows_have_names() -> None:
    """All if there is room; else a few of them, and those that matter."""
    from bokeh.models import Range1d

    few, many = drawing(Range1d(0, 1), 100), drawing(Range1d(0, 1), 100)
    name_rows(few, ["a", "$$b$$", "c" * 40])
    assert few.yaxis[0].major_label_overrides == {0: "a", 1: "$ $b$ $", 2: "…" + "c" * 23}
    name_rows(many, [f"layer{number}" for number in range(500)], [333, 41])
    ticks = many.yaxis[0].ticker.ticks
    assert {333, 41} <= set(ticks)
    assert LABELS / 2 < len(ticks) <= LABELS + 6
    assert all(abs(a - b) > 5 for a in ticks for b in (333, 41) if a != b)


def test_colours_are_even() -> None:
    """The middle is the second of three colours."""
    found = blend(("#0072B2", "#f4f4f4", "#D55E00"))
    assert (len(found), found[0], found[127], found[-1]) == (255, "#0072b2", "#f4f4f4", "#d55e00")
    assert height_of(1) < height_of(20) <= height_of(10_000) <= 640
