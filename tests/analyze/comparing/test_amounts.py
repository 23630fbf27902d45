"""How far two arrays are apart, against sums that are written out."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from analyze.comparing.amounts import amount

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 1e-30, 1e30, -1e30, math.nan, math.inf, -math.inf])


@given(
    arrays.arrays(np.float32, st.integers(1, 12), elements=st.sampled_from([0.0, 1.0, math.nan])).flatmap(
        lambda x: st.tuples(
            arrays.arrays(np.float32, x.shape, elements=NUMBERS.map(np.float32)),
            arrays.arrays(np.float32, x.shape, elements=NUMBERS.map(np.float32)),
        )
    ),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 1.0]),
)
def test_against_python(pair: tuple[Any, Any], rtol: float, atol: float) -> None:
    """Counts, the largest difference, its place, the relative difference and the tolerance are those of exact sums."""
    one, other = pair
    differing, apart = [], []
    for place, (x, y) in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
        if (math.isnan(x) and math.isnan(y)) or (x == y and math.copysign(1, x) == math.copysign(1, y)):
            continue
        differing.append(place)
        apart.append(abs(Fraction(x) - Fraction(y)) if math.isfinite(x) and math.isfinite(y) else math.inf)
    found = amount(one, other, rtol, atol)
    if not differing:
        assert found is None
        return
    assert found is not None
    assert (found.elements, found.of) == (len(differing), len(one))
    assert found.largest == float(max(apart))
    # of differences that float64 cannot tell apart, any place will do
    assert float(apart[differing.index(found.place[0])]) == float(max(apart))
    limits = [atol + rtol * abs(one[place].item()) for place in differing]
    too_far = [x == math.inf or not float(x) <= limit for x, limit in zip(apart, limits, strict=True)]
    assert found.beyond == (any(too_far) if rtol or atol else True)
    assert found.signs == (max(apart) == 0)
    if math.inf in apart:
        assert found.relative == math.inf
    else:
        scale = math.sqrt(sum(Fraction(x) ** 2 for x in one.tolist() if math.isfinite(x)))
        size = math.sqrt(sum(x**2 for x in apart))  # type: ignore[arg-type] # fractions
        assert found.relative == pytest.approx(size / scale if scale else (math.inf if size else 0.0), rel=1e-9)


def test_large_numbers() -> None:
    """Squares that float64 cannot hold are no infinite difference."""
    one, other = np.full(4, 1e200), np.full(4, 2e200)
    found = amount(one, other)
    assert found is not None
    assert found.relative == pytest.approx(1.0)
    tiny = amount(np.full(4, 1e-200), np.full(4, 3e-200))
    assert tiny is not None
    assert tiny.relative == pytest.approx(2.0)


def test_a_unit_that_is_switched() -> None:
    """Few elements carry the difference, and each is exactly zero in one array only."""
    draw = np.random.default_rng(0)
    one = draw.normal(size=1000).astype(np.float32)
    other = (one * (1 + draw.normal(size=1000) * 1e-7)).astype(np.float32)
    one[17] = 0.0
    found = amount(one, other)
    assert found is not None
    assert found.switched
    dense = amount(one, (one * (1 + draw.normal(size=1000) * 1e-3)).astype(np.float32))
    assert dense is not None
    assert not dense.switched
    one[17] = other[17] + 1.0
    shifted = amount(one, other)
    assert shifted is not None
    assert not shifted.switched
