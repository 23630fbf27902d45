"""Sketches, and histograms exact and by sketches, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import analyze
from analyze.metrics.counts import sketch
from tests.analyze.metrics.tensors import INF, NAN, message, of
from tracer import MessageError
from tracer.numbers.moments import BLOCK

# -- histograms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", "sketch"])
def test_histograms_with_details(method: Any) -> None:
    """Both methods count all finite elements, and tell exactly how many are zero, NaN and infinite."""
    x = of(5000)
    x[:7], x[7:9], x[9] = NAN, INF, -INF
    said = list(analyze.Histogram(bins=8, method=method, details=True).compute(message(x)))
    assert [one.kind.removeprefix("weights_histogram") for one in said] == ["", "_edges", "_zeros", "_nan", "_inf"]
    counts, edges, *rest = [one.data.numpy() for one in said if one.data is not None]
    finite = x[torch.isfinite(x)].double().numpy()
    exact, exact_edges = np.histogram(finite, 8)
    np.testing.assert_allclose(edges, exact_edges, rtol=1e-14)
    assert counts.sum() == exact.sum() == finite.size
    assert np.abs(counts - exact).max() <= (0 if method == "exact" else 25)
    assert [int(one) for one in rest] == [np.sum(finite == 0), 7, 3]


def test_sketched_histograms_of_degenerate_data() -> None:
    """Equal, empty, extreme and cut ranges have the same total by both methods."""
    for x, ends in (
        ([3.0, 3.0], {}),
        ([-1.7e308, 0.0, 1.7e308], {}),
        ([1.0, 2.0, 3.0, 4.0], {"low": 1.5, "high": 3.5}),
        ([1.0], {"low": 2.0}),
        ([], {"low": 0.0, "high": 1.0}),
        ([NAN], {}),
        ([0.0, 0.0, 5e-324], {}),
    ):
        one, other = (analyze.histogram(x, 4, method=method, **ends) for method in ("exact", "sketch"))  # type: ignore[arg-type]
        assert one.counts.sum() == other.counts.sum(), x
        np.testing.assert_allclose(other.edges, one.edges, rtol=1e-12, atol=1e-323)
    with pytest.raises(MessageError, match="'exact' or 'sketch', not 'fast'"):
        analyze.Histogram(method="fast")  # type: ignore[arg-type]


# -- sketches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64, np.bool_])
def test_counts_of_sketches_are_exact(dtype: Any) -> None:
    """Zeros, NaN, infinities, signs and extremes are counted exactly, whatever bits they have."""
    x = of(6 * BLOCK + 5).numpy() * 10
    if np.dtype(dtype).kind == "f":
        x[5:25], x[30:37], x[40:43], x[50] = NAN, INF, -INF, -0.0
    x = x.astype(dtype)
    found = sketch(x)
    assert found.zeros == np.sum(x == 0)
    finite = x[np.isfinite(x)]
    assert (found.nan, found.positive_infinities, found.negative_infinities) == (
        np.isnan(x).sum(),
        np.sum(x == INF),
        np.sum(x == -INF),
    )
    assert (found.finite, found.low, found.high) == (finite.size, finite.min(), finite.max())
    lows, highs, counts = found.bins()
    assert counts.sum() == finite.size
    assert (lows <= highs).all()
    assert (np.diff(lows) >= 0).all()
    assert counts[highs < 0].sum() == np.sum(finite < 0)
    for low, high, count in list(zip(lows, highs, counts, strict=True))[::97]:
        assert np.sum((finite >= low) & (finite <= high)) == count


def test_numbers_that_float32_has_not() -> None:
    """Odd NaN, subnormal numbers and numbers beyond float32 are counted where they belong."""
    bits = np.array([0x7F800001, 0xFF800001, 0x7F800000, 0xFF800000, 1, 0x80000001, 0, 0x80000000], np.uint32)
    found = sketch(bits.view(np.float32))
    assert (found.nan, found.positive_infinities, found.negative_infinities, found.zeros, found.finite) == (
        2,
        1,
        1,
        2,
        4,
    )
    assert found.counts[[0, 0x8000]].tolist() == [1, 1]
    wide = sketch([1e300, -1e300, 1e-300, -1e-300, -1e-310, 0.0])
    assert (wide.zeros, wide.finite, wide.low, wide.high) == (1, 6, -1e300, 1e300)
    assert wide.counts[[0, 0x8000, 0x7F7F, 0xFF7F]].tolist() == [1, 2, 1, 1]
    for nothing in ([], [1j], [NAN]):
        assert sketch(nothing).finite == 0
        assert sketch(nothing).histogram(np.array([0.0, 1.0])).tolist() == [0]


@pytest.mark.parametrize("bins", [1, 10, 50])
def test_display_bins_of_sketches(bins: int) -> None:
    """Display bins of a sketch hold what NumPy's do, but for neighbours of the edges; none is lost."""
    x = of(200000).numpy()
    counts, edges = np.histogram(x.astype(np.float64), bins)
    found = sketch(x).histogram(edges)
    assert found.sum() == x.size
    # a number within 0.8 % of an edge may be counted on its other side
    near = np.array([np.sum(np.abs(x - edge) <= abs(edge) * 2**-7) for edge in edges])
    assert (np.abs(found - counts) <= near[:-1] + near[1:] + 1).all()
    inner = np.array([-0.5, 0.25, 1.5])
    assert abs(sketch(x).histogram(inner).sum() - np.sum((x >= -0.5) & (x <= 1.5))) < 2000
