"""Memory that is used again: never while somebody still uses it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tracer import memory
from tracer.memory import SMALLEST, Memory

USES: dict[str, Callable[[NDArray[np.uint8]], Any]] = {
    "itself": lambda block: block,
    "a part": lambda block: block[100:200],
    "a view": lambda block: block[: SMALLEST // 8 * 8].view(np.float64).reshape(-1, 2)[3:],
    "a tensor": torch.from_numpy,
    "a view of a tensor": lambda block: torch.from_numpy(block).view(torch.float32)[5:6],
    "a storage": lambda block: torch.from_numpy(block).untyped_storage(),
    "its buffer": lambda block: block.data,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_memory_that_is_used_is_nobody_elses(use: Callable[[NDArray[np.uint8]], Any]) -> None:
    """Whatever was made of a block keeps it; when that is gone, the block is used again."""
    blocks = Memory()
    kept, places = [], []
    for _ in range(4):
        block = blocks.take(SMALLEST)
        assert block is not None
        places.append(block.ctypes.data)
        kept.append(use(block))
        del block
    assert len(set(places)) == 4
    del kept[2]
    again = blocks.take(SMALLEST)
    assert again is not None
    assert again.ctypes.data == places[2]


def counted(monkeypatch: pytest.MonkeyPatch, count: Callable[[object], int], gil: bool = True) -> int | None:
    """What tells unused memory in a Python whose references are counted like this."""
    monkeypatch.setattr(memory, "sys", SimpleNamespace(getrefcount=count, _is_gil_enabled=lambda: gil))
    found = memory._references_of_unused()
    monkeypatch.setattr(memory, "_UNUSED", found)
    return found


@pytest.mark.parametrize("less", [0, 1, 2])
def test_versions_of_python_count_differently(monkeypatch: pytest.MonkeyPatch, less: int) -> None:
    """From 3.14 on, a reference in a variable is not counted where it is only looked at."""
    # one more reference than outside: the argument of this function
    assert counted(monkeypatch, lambda whole: sys.getrefcount(whole) - less) is not None
    test_memory_that_is_used_is_nobody_elses(USES["a tensor"])


@pytest.mark.parametrize(("count", "gil"), [(lambda whole: 3, True), (sys.getrefcount, False)])
def test_where_users_cannot_be_told(monkeypatch: pytest.MonkeyPatch, count: Callable[[object], int], gil: bool) -> None:
    """Then memory is new."""
    assert counted(monkeypatch, count, gil) is None
    assert Memory().take(SMALLEST) is None
