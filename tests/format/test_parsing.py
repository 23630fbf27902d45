"""`tracer.format.declarations`: JSON that may be damaged."""

from __future__ import annotations

import gc
import inspect
from types import FrameType
from typing import Any

import pytest

from tracer.format.declarations import parsed


def test_json_is_parsed() -> None:
    """What Python's own parser makes of it."""
    assert parsed('{"a":[1,2.5,null,"\u00fc"]}') == {"a": [1, 2.5, None, "\u00fc"]}


@pytest.mark.parametrize("text", ["", "{", "[1] 2", "[1]\n", " [1]", "nothing", '{"a":' * 100_000, "[" * 100_000])
def test_anything_else_is_a_value_error(text: str) -> None:
    """Also JSON with something around it, and nesting that Python does not follow."""
    with pytest.raises(ValueError, match=r"Expecting|nested|ends at"):
        parsed(text)


def test_the_collector_waits() -> None:
    """No collection begins at the depth where h5py's objects cannot release its lock."""
    began: list[str] = []

    def note(phase: str, _: dict[str, Any]) -> None:
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            began.append(frame.f_code.co_name)
            frame = frame.f_back

    before = gc.get_threshold()
    gc.callbacks.append(note)
    try:
        gc.set_threshold(1)
        kept = [[number] for number in range(10)]
        parsed("[" * 900 + "]" * 900)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert kept[9] == [9]
    assert began, "the collector did not run at all"
    assert "raw_decode" not in began
