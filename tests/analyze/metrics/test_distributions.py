"""Quantiles of every dtype and size, sketches, and histograms exact and by sketches, against NumPy."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import analyze
from analyze.metrics import aggregate
from analyze.metrics.counts import sketch
from tests.analyze.metrics.messages import INF, NAN, message, of
from tracer import MessageError
from tracer.numbers.arrays import as_array
from tracer.numbers.moments import BLOCK

# -- quantiles ---------------------------------------------------------------------------------------------------------


PROBABILITIES = (0.0, 0.013, 0.25, 0.5, 0.77, 0.999, 1.0)


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 2**18 - 1, 2**18, 2**18 + 12345])
@pytest.mark.parametrize("kind", ["normal", "relu", "few values", "tiny", "shifted"])
def test_quantiles_equal_numpy(size: int, kind: str) -> None:
    """Both ways of selecting, by sorting and by counting first, give the quantiles of NumPy."""
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    x = {
        "normal": x,
        "relu": np.maximum(x, 0),
        "few values": np.round(x),
        "tiny": x * np.float32(1e-41),
        "shifted": x + np.float32(1e4),
    }[kind]
    exact = np.quantile(x.astype(np.float64), PROBABILITIES)
    np.testing.assert_allclose(analyze.quantiles(x, PROBABILITIES), exact, rtol=1e-13, atol=1e-300)


def many(dtype: str, size: int) -> Any:
    """Numbers of a dtype, its least and its greatest among them, and many of one."""
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return rng.random(size) > 0.3
    if np.dtype(dtype).kind == "f":
        x = rng.standard_normal(size).astype(dtype)
        x[: size // 4], x[-2:] = 0.5, (INF, -INF)
        return x
    bounds = np.iinfo(dtype)
    x = rng.integers(bounds.min, bounds.max, size, dtype=dtype, endpoint=True)
    x[: size // 4], x[-2:] = 5, (bounds.min, bounds.max)
    return x


DTYPES = ["float16", "float32", "float64", ">f8", "int8", "int16", "int32", "int64", *("uint8", "uint16", "uint32")]


@pytest.mark.parametrize("gathered", [0, 2**20])
@pytest.mark.parametrize("dtype", [*DTYPES, "uint64", "bool"])
def test_quantiles_of_many_numbers_of_every_dtype(dtype: str, gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by their bits, whether or not few are left to sort, they are NumPy's; strided and far from 0, too."""
    monkeypatch.setattr("analyze.metrics.statistics._GATHERED", gathered)
    x = many(dtype, 2**18 + 3)
    places = (*PROBABILITIES, 0.3)
    exact = np.quantile(x[np.isfinite(x)].astype(np.float64), places)
    finite = np.repeat(x[np.isfinite(x)][::-1], 2)[::2]
    np.testing.assert_allclose(analyze.quantiles(finite, places), exact, rtol=1e-13)
    if np.dtype(dtype).kind == "f":
        assert analyze.quantiles(x, (0, 1)).tolist() == [-INF, INF]
        x[1234] = NAN
        assert np.isnan(analyze.quantiles(x, places)).all()
    if dtype == "float64":
        far = finite + 1e12
        np.testing.assert_allclose(analyze.quantiles(far, places), np.quantile(far, places), rtol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.float16])
def test_quantiles_of_tensors_that_numpy_has_not(dtype: torch.dtype) -> None:
    """They are converted part by part."""
    x = (torch.rand(2**18 + 3, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    exact = np.quantile(x.float().double().numpy(), PROBABILITIES)
    np.testing.assert_allclose(analyze.quantiles(x, PROBABILITIES), exact, rtol=1e-13)
    assert analyze.quantiles(x[::3], (0.5,)) == np.quantile(x[::3].float().double().numpy(), 0.5)


@pytest.mark.parametrize(
    ("dtype", "same"),
    [
        pytest.param(dtype, same, marks=[] if number % 2 == same else [pytest.mark.slow])
        for number, dtype in enumerate([*DTYPES, "bool"])
        for same in (False, True)
    ],
)
def test_quantiles_take_memory_that_does_not_grow(dtype: str, same: bool) -> None:
    """Of eight million numbers of any dtype, whether or not they agree, less than 30 MB beside them."""
    x = np.ones(2**23, dtype) if same else np.resize(many(dtype, 2**20)[:-2], 2**23)
    tracemalloc.start()
    try:
        analyze.quantiles(x, (0.05, 0.25, 0.5, 0.75, 0.95))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30e6


def test_quantiles_of_tensors_convert_parts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor whose dtype NumPy has not, no more is converted at once than a block."""
    sizes = []

    def spied(x: Any) -> Any:
        sizes.append(len(x))
        return as_array(x)

    monkeypatch.setattr("analyze.metrics.statistics.as_array", spied)
    analyze.quantiles(torch.arange(2**20).to(torch.bfloat16), (0.5,))
    assert max(sizes) == BLOCK


def test_quantiles_between_numbers_that_are_far_apart() -> None:
    """Where the difference of two numbers is beyond float64, what lies between them is not."""
    assert analyze.quantiles([-1e308, 1e308], (0, 0.25, 0.5, 1)).tolist() == [-1e308, -5e307, 0, 1e308]
    assert analyze.statistics([-1.5e308, 1.5e308, 1.5e308], "median+q0.25") == {"median": 1.5e308, "q0.25": 0.0}
    one = aggregate.Reducer()
    one.add(np.tile([-1e308, 1e308], 4000))
    assert one.answer(["median"])["median"] == pytest.approx(0, abs=1e305)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_the_least_whole_number_has_a_modulus(dtype: str) -> None:
    """Its modulus is none of its dtype, and is right all the same."""
    least = np.iinfo(dtype).min
    x = np.array([[least, 1], [2, 3]], dtype)
    assert analyze.norm(x, INF) == analyze.statistics(x, "norminf").norminf == -float(least)
    assert analyze.norm(x, 1) == 6 - float(least)
    assert analyze.activation_rate(x, threshold=5, units="last").rates.tolist() == [0.5, 0.0]
    assert analyze.spectral_norm(x) == pytest.approx(np.linalg.norm(x.astype(float), 2), rel=1e-13)


def test_edges_of_quantiles() -> None:
    """NaN anywhere, with whatever bits, gives NaN; infinities are numbers; empty and complex data have none."""
    large = of(2**18).numpy()
    assert analyze.quantiles(large, (0.0,))[0] == large.min()
    odd_nan = large.copy()
    odd_nan.view(np.uint32)[7] = 0x7F800001
    for wrong in (odd_nan, np.where(np.arange(large.size) == 3, NAN, large).astype(np.float32), [1.0, NAN], [], [1j]):
        assert np.isnan(analyze.quantiles(wrong, (0.5, 1.0))).all()
    large[:10], large[10:30] = INF, -INF
    ordered = np.sort(large)
    assert analyze.quantiles(large, (0, 1, 0.5)).tolist() == [-INF, INF, ordered[2**17 - 1 : 2**17 + 1].mean()]
    assert analyze.quantiles([INF, -INF], (0, 1)).tolist() == [-INF, INF]
    assert analyze.quantiles([1e308, -1e308], (0.5,)).tolist() != [NAN]
    for wrong in ((), (1.5,), (-0.1,), (True,), ("a",), (NAN,)):
        with pytest.raises(MessageError, match="quantile"):
            analyze.quantiles([1.0], wrong)
    for parameter in ("0.1+x", 2.0, (0.5, 7)):
        with pytest.raises(MessageError, match="from 0 to 1"):
            analyze.Quantiles(probabilities=parameter)  # type: ignore[arg-type]
    assert analyze.parse("quantiles:probabilities=0.05+0.5").probabilities == (0.05, 0.5)  # type: ignore[attr-defined]
    assert analyze.parse("quantiles:probabilities=0.5").probabilities == (0.5,)  # type: ignore[attr-defined]
    assert analyze.Quantiles(probabilities=0.5).probabilities == (0.5,)


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
