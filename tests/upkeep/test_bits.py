"""Bits say of each row what a mask of numpy says, and in which runs rows stand."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest

from tracer.upkeep import survey_journal
from tracer.upkeep.survey_journal import Bits


@pytest.mark.parametrize("length", [0, 1, 7, 8, 64, 65, 200])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_bits_are_a_mask(length: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written and looked at in pieces, they are the mask that was written."""
    monkeypatch.setattr(survey_journal, "LOOKED_AT", 16)
    rng = np.random.default_rng(length)
    mask = rng.random(length) < share
    kept = Bits(length)
    for start in range(0, length, 24):
        kept.put(start, mask[start : start + 24])
    assert kept.count() == mask.sum()
    for start in range(0, length + 1, 5):
        for stop in range(start, length + 1, 7):
            assert (kept.of(start, stop) == mask[start:stop]).all()
            assert kept.count(start, stop) == mask[start:stop].sum()
    expected = [[place for place, _ in run] for holds, run in groupby(enumerate(mask), lambda one: one[1]) if holds]
    assert list(kept.runs()) == [(run[0], run[-1] + 1) for run in expected]


def test_what_lies_beyond_the_last_row() -> None:
    """There are no rows, and nothing holds of them."""
    kept = Bits(10)
    kept.put(8, np.ones(2, bool))
    assert kept.of(6, 99).tolist() == [False, False, True, True]
    assert (kept.count(9, 99), kept.count(20, 30)) == (1, 0)
