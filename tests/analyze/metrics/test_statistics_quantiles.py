"""Quantiles of every dtype and size against NumPy."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import analyze
from analyze.metrics import aggregate
from tests.analyze.metrics.tensors import INF, NAN, of
from tracer import MessageError
from tracer.numbers.arrays import as_array
from tracer.numbers.moments import BLOCK

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
