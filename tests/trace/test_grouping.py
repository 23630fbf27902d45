"""Places in an array, in groups of equal values."""

from __future__ import annotations

import numpy as np
import pytest

from tracer.trace.columns import grouped


@pytest.mark.parametrize("ascending", [True, False])
def test_groups(ascending: bool) -> None:
    """Each value has all of its places, in the order that was asked for."""
    keys = np.random.default_rng(1).integers(-3, 4, 50)
    values = sorted(set(keys.tolist())) if ascending else list(dict.fromkeys(keys.tolist()))
    found = [(value, places.tolist()) for value, places in grouped(keys, ascending=ascending)]
    assert found == [(value, np.flatnonzero(keys == value).tolist()) for value in values]
    assert list(grouped(keys[:0])) == []
