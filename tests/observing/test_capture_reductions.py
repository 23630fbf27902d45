"""Captures that reduce: each named statistic is NumPy's, of every dtype and size; and functions of the user's own."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.observing.recorded import finished, mlp, observe
from tracer import Capture, CaptureError
from tracer.observing.capture import REDUCTIONS

ORACLES: dict[str, Callable[[Any], Any]] = {
    "mean": np.mean,
    "sum": np.sum,
    "min": np.min,
    "max": np.max,
    "absmax": lambda x: np.max(np.abs(x)),
    "norm": lambda x: np.sqrt(np.sum(np.square(x))),
    "rms": lambda x: np.sqrt(np.mean(np.square(x))),
    "std": lambda x: np.std(x, ddof=1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=30))
@settings(max_examples=examples(20))
def test_reductions_by_name_are_numpys(name: str, values: list[float]) -> None:
    """Each named statistic is that of NumPy in float64."""
    got = finished(Capture(reduce=name), "weights", torch.tensor(values).reshape(1, -1))
    assert got.ndim == 0
    expected = ORACLES[name](np.array(values, dtype=np.float32).astype(np.float64))
    assert float(got) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("size", [(7, 3), (8, 2), (5, 8)])
def test_reductions_of_large_tensors(name: str, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has more elements than are converted at once is reduced in pieces, to the same number."""
    monkeypatch.setattr("tracer.observing.capture.PIECE", 8)
    values = (torch.randn(size, generator=torch.Generator().manual_seed(2)) + 1).to(torch.bfloat16).mT
    got = finished(Capture(reduce=name), "weights", values)
    assert got.ndim == 0
    assert float(got) == pytest.approx(float(ORACLES[name](values.double().numpy())), rel=1e-12)


@pytest.mark.parametrize("piece", [4, 100])
@pytest.mark.parametrize("name", ["mean", "sum", "absmax", "norm", "rms", "std"])
def test_reductions_of_complex_tensors(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of complex numbers is complex; what measures them is real."""
    monkeypatch.setattr("tracer.observing.capture.PIECE", piece)
    values = torch.randn(9, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    array = values.numpy().astype(np.complex128)
    oracle = {"norm": np.linalg.norm, "rms": lambda x: np.sqrt(np.mean(np.abs(x) ** 2))}.get(name, ORACLES[name])
    got = finished(Capture(reduce=name), "weights", values)
    assert got.is_complex() == (name in ("mean", "sum"))
    assert complex(got) == pytest.approx(complex(oracle(array)), rel=1e-6 if name == "absmax" else 1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_integers(name: str, dtype: torch.dtype) -> None:
    """What a network gets may be numbers of words, or a mask."""
    values = torch.tensor([[1, 0, 7], [3, 1, 0]]).to(dtype)
    got = finished(Capture(reduce=name), "input_data", values)
    assert float(got) == pytest.approx(float(ORACLES[name](values.double().numpy())), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.uint16, torch.complex64])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_nothing_are_nan(name: str, dtype: torch.dtype) -> None:
    """An empty tensor of any dtype has no statistics, and that is no error."""
    assert torch.isnan(finished(Capture(reduce=name), "activations", torch.zeros(0, 3).to(dtype)))


def numeric() -> dict[str, torch.dtype]:
    """Every dtype of this torch to which numbers can be converted."""
    found = {}
    for name, dtype in vars(torch).items():
        if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}":
            try:
                with warnings.catch_warnings(action="ignore"):
                    torch.ones(1).to(dtype)
            except (NotImplementedError, RuntimeError):  # of bits and of what is smaller than a byte
                continue
            found[name] = dtype
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("piece", [5, 100])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", numeric().values(), ids=str)
def test_reductions_of_every_dtype(dtype: torch.dtype, name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each statistic is NumPy's of the same numbers, also of those for which torch has no kernels."""
    monkeypatch.setattr("tracer.observing.capture.PIECE", piece)
    numbers = [2.0, 0.5, 1.0, 4.0, 0.25, 8.0, 2.0, 1.0]
    if not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool:
        # the least number of a dtype, whose modulus it has not, and the greatest
        numbers[0], numbers[1] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        exact = np.array([int(one) for one in numbers], dtype=str(dtype).removeprefix("torch."))
        values = torch.from_numpy(exact)
    else:
        values = torch.tensor(numbers).to(dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        exact = (values.float() if dtype.is_floating_point and dtype.itemsize == 1 else values).to(wide).numpy()
    if dtype.is_complex and name in ("min", "max"):
        with pytest.raises(CaptureError, match=f"no {name}; absmax"):
            finished(Capture(reduce=name), "input_data", values)
        return
    got = finished(Capture(reduce=name), "input_data", values)
    whole = exact.astype(np.longdouble) if exact.dtype.kind in "iu" else exact * 1.0
    oracle = (lambda x: np.sqrt(np.sum(np.abs(x) ** 2))) if name == "norm" else ORACLES[name]
    oracle = (lambda x: np.sqrt(np.mean(np.abs(x) ** 2))) if name == "rms" else oracle
    expected = oracle(whole)
    rounding = 1e-14 * float(np.abs(whole).sum())
    assert got.ndim == 0
    if name in ("min", "max"):
        assert got.dtype is dtype
        assert got.item() == expected
    else:
        assert complex(got.item()) == pytest.approx(
            complex(expected), rel=1e-6 if dtype.is_complex else 1e-14, abs=rounding
        )


@pytest.mark.parametrize("piece", [3, 100])
@pytest.mark.parametrize("scale", [1e-307, 1e-200, 1e200, 1e307])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", sorted(set(REDUCTIONS) - {"min", "max"}))
def test_reductions_stay_in_range(
    name: str, dtype: torch.dtype, scale: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where squares, or sums on the way, leave the range of float64 and the statistic does not, it is right."""
    monkeypatch.setattr("tracer.observing.capture.PIECE", piece)
    values = torch.tensor([3.0, -4.0, 9.0, 9.0, -8.0, 1.5, 2.0], dtype=dtype)
    exact = complex(finished(Capture(reduce=name), "weights", values).item())
    got = complex(finished(Capture(reduce=name), "weights", values * scale).item())
    assert got == pytest.approx(exact * scale, rel=1e-14)


def test_a_norm_of_large_numbers_is_finite() -> None:
    """The reported example and its neighbours; what is infinite or no number stays so."""
    two = torch.tensor([1e300, 1e300], dtype=torch.float64)
    assert float(REDUCTIONS["norm"](two)) == pytest.approx(math.sqrt(2) * 1e300, rel=1e-15)
    assert float(REDUCTIONS["rms"](two * 1.7e8)) == pytest.approx(1.7e308, rel=1e-15)
    assert float(REDUCTIONS["std"](torch.tensor([1e308, -1e308], dtype=torch.float64))) == pytest.approx(
        math.sqrt(2) * 1e308, rel=1e-15
    )
    for value in (math.inf, -math.inf):
        odd = torch.tensor([1.0, value], dtype=torch.float64)
        assert float(REDUCTIONS["norm"](odd)) == float(REDUCTIONS["absmax"](odd)) == math.inf
        assert float(REDUCTIONS["mean"](odd)) == value
    assert all(math.isnan(REDUCTIONS[name](torch.tensor([1.0, math.nan]).double())) for name in REDUCTIONS)
    assert float(REDUCTIONS["norm"](torch.zeros(3, dtype=torch.float64))) == 0


@pytest.mark.parametrize("offset", [0.0, 1e8, -1e8, 1e12])
@pytest.mark.parametrize("piece", [1000, 1 << 24])
def test_an_offset_takes_no_digits_from_the_deviation(
    offset: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deviation of numbers far from zero is that of the same numbers without the offset, summed exactly."""
    monkeypatch.setattr("tracer.observing.capture.PIECE", piece)
    values = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + offset
    rest = (values - offset).tolist()  # exactly
    mean = math.fsum(rest) / len(rest)
    exact = math.sqrt(math.fsum((one - mean) ** 2 for one in rest) / (len(rest) - 1))
    assert float(REDUCTIONS["std"](values)) == pytest.approx(exact, rel=1e-13)


def test_targets_are_not_reduced() -> None:
    """Labels, outputs and the loss mean nothing when they are reduced or sampled, and stay as they are."""
    capture = Capture(reduce="mean", elements=1)
    for kind in ("input_labels", "network_output", "loss"):
        data = torch.arange(6.0).reshape(3, 2)
        assert finished(capture, kind, capture.select(kind, data)) is data


def test_reductions_by_callable() -> None:
    """A function of one tensor reduces each; a function of two runs along, over the last result and the next tensor."""
    heard = observe(mlp(), Capture(kinds=["weights"], reduce=lambda x: x.sum(0)), steps=1)
    assert {tuple(one.data.shape) for one in heard} == {(3,), (4,)}

    def average(so_far: Tensor, x: Tensor) -> Tensor:
        return 0.5 * so_far + 0.5 * x

    plain, running = ([], [])
    for into, capture in (
        (plain, Capture(kinds=["weights", "activations"])),
        (running, Capture(kinds=["weights", "activations"], reduce=average)),
    ):
        torch.manual_seed(4)
        into.extend(observe(mlp(), capture, steps=4).messages)
    state: dict[Any, Tensor] = {}
    for raw, got in zip(plain, running, strict=True):
        key = (raw.kind, raw.key)
        state[key] = average(state[key], raw.data) if key in state else raw.data
        torch.testing.assert_close(got.data, state[key], rtol=0, atol=0)
        assert (got.kind, got.key, got.global_step) == (raw.kind, raw.key, raw.global_step)


def test_a_running_reduction_may_work_in_place() -> None:
    """A reduction that overwrites its running result does not change messages that were published before."""

    def total(so_far: Tensor, x: Tensor) -> Tensor:
        so_far += x
        return so_far

    heard = observe(mlp(), Capture(kinds=["weights", "activations"], reduce=total), steps=4)
    for kind in ("weights", "activations"):
        values = [one.data for one in heard.of(kind) if one.key == "0"]
        assert len({one.data_ptr() for one in values}) == 4
        assert not torch.equal(values[0], values[-1])


def test_a_builtin_that_runs() -> None:
    """What has no signature is asked: `torch.maximum` takes the result so far, too; `torch.sum` does not."""
    assert Capture(reduce=torch.maximum).runs
    assert not Capture(reduce=torch.sum).runs
    heard = observe(mlp(), Capture(kinds=["weights"], reduce=torch.maximum), steps=3)
    for key in ("0", "2"):
        values = [one.data for one in heard.of("weights") if one.key == key]
        assert all(bool((after >= before).all()) for before, after in itertools.pairwise(values))


def test_a_reduction_may_give_what_it_keeps() -> None:
    """A reduction may return the same tensor each time: each message has numbers of its own."""
    held = torch.zeros(1)

    def reduce(x: Tensor) -> Tensor:
        return held.fill_(float(x.sum()))

    torch.manual_seed(4)
    sums = [one.data.sum() for one in observe(mlp(), Capture(kinds=["activations"])).messages]
    torch.manual_seed(4)
    heard = observe(mlp(), Capture(kinds=["activations"], reduce=reduce))
    assert [float(one.data) for one in heard] == [float(one) for one in sums]


def test_a_reduction_gives_a_tensor() -> None:
    """What is none is an error that says so."""
    with pytest.raises(CaptureError, match="reduce of a capture returns a tensor, not float"):
        observe(mlp(), Capture(kinds=["activations"], reduce=lambda x: float(x.sum())))
