"""Captures that reduce: each named statistic is NumPy's, of every dtype and size; and functions of the user's own."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tracer
from tests.examples import examples
from tests.observing.recorded import finished, mlp, observe, sgd, watch
from tracer import Capture, CaptureError
from tracer.observing import reductions
from tracer.observing.capture import REDUCTIONS
from tracer.observing.reductions import SketchReduction, projection

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


@pytest.mark.parametrize("size", [(7, 3), (8, 2), (5, 8)])
def test_reductions_of_large_tensors(size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has more elements than are converted at once is reduced in pieces, to the same number."""
    monkeypatch.setattr("tracer.observing.reductions.AT_ONCE", 8)
    values = (torch.randn(size, generator=torch.Generator().manual_seed(2)) + 1).to(torch.bfloat16).mT
    for name in REDUCTIONS:
        got = finished(Capture(reduce=name), "weights", values)
        assert got.ndim == 0
        assert float(got) == pytest.approx(float(ORACLES[name](values.double().numpy())), rel=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.uint16, torch.complex64])
def test_reductions_of_nothing_are_nan(dtype: torch.dtype) -> None:
    """An empty tensor of any dtype has no statistics, and that is no error."""
    for name in REDUCTIONS:
        assert torch.isnan(finished(Capture(reduce=name), "activations", torch.zeros(0, 3).to(dtype))), name


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
@pytest.mark.parametrize("dtype", numeric().values(), ids=str)
def test_reductions_of_every_dtype(dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each statistic is NumPy's of the same numbers, also of those for which torch has no kernels."""
    monkeypatch.setattr("tracer.observing.reductions.AT_ONCE", piece)
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
    whole = exact.astype(np.longdouble) if exact.dtype.kind in "iu" else exact * 1.0
    rounding = 1e-14 * float(np.abs(whole).sum())
    moduli = {"norm": lambda x: np.sqrt(np.sum(np.abs(x) ** 2)), "rms": lambda x: np.sqrt(np.mean(np.abs(x) ** 2))}
    for name in REDUCTIONS:
        if dtype.is_complex and name in ("min", "max"):
            with pytest.raises(CaptureError, match=f"no {name}; absmax"):
                finished(Capture(reduce=name), "input_data", values)
            continue
        got = finished(Capture(reduce=name), "input_data", values)
        expected = {**ORACLES, **moduli}[name](whole)
        assert got.ndim == 0
        if name in ("min", "max"):
            assert got.dtype is dtype
            assert got.item() == expected, name
        else:
            assert got.is_complex() == (dtype.is_complex and name in ("mean", "sum"))
            assert complex(got.item()) == pytest.approx(
                complex(expected), rel=1e-6 if dtype.is_complex else 1e-14, abs=rounding
            ), name


@pytest.mark.parametrize("piece", [3, 100])
@pytest.mark.parametrize("scale", [1e-307, 1e-200, 1e200, 1e307])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_reductions_stay_in_range(
    dtype: torch.dtype, scale: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where squares, or sums on the way, leave the range of float64 and the statistic does not, it is right."""
    monkeypatch.setattr("tracer.observing.reductions.AT_ONCE", piece)
    values = torch.tensor([3.0, -4.0, 9.0, 9.0, -8.0, 1.5, 2.0], dtype=dtype)
    for name in sorted(set(REDUCTIONS) - {"min", "max"}):
        exact = complex(finished(Capture(reduce=name), "weights", values).item())
        got = complex(finished(Capture(reduce=name), "weights", values * scale).item())
        assert got == pytest.approx(exact * scale, rel=1e-14), name


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
    monkeypatch.setattr("tracer.observing.reductions.AT_ONCE", piece)
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


# -- sketches: which projection is kept of which kinds and axes, what the trace says of it, and what----------


def test_the_projection_is_as_the_trace_format_says() -> None:
    """It is drawn by NumPy from seed and width; its numbers stay what they were when traces were recorded."""
    generator = np.random.Generator(np.random.PCG64([3, 8]))
    assert np.array_equal(projection(50, 8, 3), generator.standard_normal((50, 8)) / np.sqrt(8))
    first = [0.03610729111918801, -0.4157201597191714, 0.1795899569273413, 0.218083333325413]
    np.testing.assert_allclose(projection(2, 4, 0)[0], first, rtol=1e-15)
    assert np.array_equal(projection(200, 16, 5)[:70], projection(70, 16, 5))
    assert not np.array_equal(projection(9, 4, 0), projection(9, 4, 1))
    wide = projection(20000, 64, 0)
    np.testing.assert_allclose(wide @ wide[:9].T, np.eye(20000, 9), atol=1)
    assert np.square(wide).sum(axis=1).mean() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
        (torch.int16, torch.float32),
        (torch.int64, torch.float64),
        (torch.complex64, torch.complex64),
    ],
    ids=str,
)
def test_products_with_the_projection(dtype: torch.dtype, kept: torch.dtype) -> None:
    """The sketch of any dtype is the product in a precision that holds it, also where products are made coarser."""
    x = (torch.randn(7, 90, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    exact = x.to(torch.complex128 if dtype.is_complex else torch.float64) @ torch.from_numpy(projection(90, 8, 0)).to(
        torch.complex128 if dtype.is_complex else torch.float64
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = SketchReduction(8).of(x, 1)
    assert found.dtype is kept
    np.testing.assert_allclose(found.numpy(), exact.numpy(), atol=1e-4)
    if kept is torch.float64:
        np.testing.assert_allclose(found.numpy(), exact.numpy(), atol=1e-12)


def test_coarse_products_of_the_program_are_not_those_of_a_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program lets products of float32 have fewer digits, or that cannot be told, sketches take float64."""
    x = torch.randn(7, 90, generator=torch.Generator().manual_seed(0))
    exact = (x.double() @ torch.from_numpy(projection(90, 8, 0))).float()

    def unknown() -> str:
        raise RuntimeError("two ways are mixed")

    for precision in (lambda: "high", unknown):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", precision)
        assert torch.equal(SketchReduction(8).of(x, 1), exact)


def test_narrow_layers_are_kept_as_they_are() -> None:
    """Of fewer neurons than columns, and of no axis of neurons, nothing is projected, and nothing is told of it."""
    capture = Capture(kinds=["activations"], reduce="sketch:k=8")
    for shape in ((5, 7), (9,), ()):
        x = torch.randn(shape)
        assert finished(capture, "activations", x) is x
        assert capture.sampling("activations", shape) is None
    assert finished(capture, "activations", torch.randn(5, 8)).shape == (5, 8)
    assert capture.sampling("activations", (5, 8)) == {
        "reduce": "sketch:k=8",
        "sketch": {"k": 8, "of": 8, "axis": 1, "seed": 0, "projection": "gaussian"},
    }


@pytest.mark.parametrize(
    ("module", "shape", "axis"),
    [
        (nn.Linear(20, 20), (4, 20), 1),
        (nn.Linear(20, 20), (4, 9, 20), 2),
        (nn.Conv2d(20, 20, 3, padding=1), (4, 20, 5, 6), 1),
        (nn.Conv1d(20, 20, 3, padding=1), (4, 20, 9), 1),
    ],
    ids=lambda one: str(one),
)
@pytest.mark.parametrize("positions", [None, 4])
def test_the_axis_of_the_neurons(module: nn.Module, shape: tuple[int, ...], axis: int, positions: int | None) -> None:
    """Channels are projected where a layer has them, features elsewhere; of chosen positions, too; and that is told."""
    exporter, heard = watch(
        module, sgd(module), kinds=["activations"], reduce="sketch:k=8", positions=positions, seed=2
    )
    x = torch.randn(shape)
    output = module(x).detach()
    output = Capture(positions=positions, seed=2).select("activations", output, module)
    (said,) = heard.of("activations")
    exporter.detach()
    assert said.data is not None
    expected = np.moveaxis(np.moveaxis(output.numpy(), axis, -1) @ projection(20, 8, 2), -1, axis)
    np.testing.assert_allclose(said.data.numpy(), expected, atol=1e-5)
    told = Capture(kinds=["activations"], reduce="sketch:k=8", seed=2).sampling("activations", shape, module)
    assert told == {
        "reduce": "sketch:k=8",
        "sketch": {"k": 8, "of": 20, "axis": axis, "seed": 2, "projection": "gaussian"},
    }


def test_a_trace_tells_how_its_sketches_were_made(tmp_path: Path) -> None:
    """A reader makes the same sketch again of the whole activations, by what the declaration says alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))
    x = torch.randn(10, 6)
    captures = [
        Capture(kinds=["activations"], modules=["1"], reduce="sketch:k=8", seed=4),
        Capture(kinds=["activations"]),
    ]
    with tracer.record(tmp_path / "run.zarr", model, capture=captures):
        model(x)
    with tracer.open(tmp_path / "run.zarr") as reader:
        whole, sketch = (reader.array("activations", module)[1][0] for module in ("0", "1"))
        (stream,) = (one for one in reader.streams if one.module == "1")
        narrow = next(one for one in reader.streams if one.module == "2")
    told = stream.sampling["sketch"]
    generator = np.random.Generator(np.random.PCG64([told["seed"], told["k"]]))
    drawn = generator.standard_normal((told["of"], told["k"])) / np.sqrt(told["k"])
    np.testing.assert_allclose(sketch, np.maximum(whole, 0) @ drawn, atol=1e-5)
    assert narrow.sampling is None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"reduce": "sketch"}, 'a sketch is written "sketch:k=256"'),
        ({"reduce": "sketch:k=many"}, "not 'sketch:k=many'"),
        ({"reduce": "sketch:k=\N{ARABIC-INDIC DIGIT EIGHT}"}, "with the number of its columns, not"),
        ({"reduce": "sketch:k=3"}, "k of a sketch is an integer of at least 4, not 3"),
        ({"reduce": "sketch:k=8", "seed": -1}, "seed of a sketch is an integer of at least 0, not -1"),
        ({"reduce": "sketch:k=8", "elements": 9}, "not both: a sketch needs all neurons"),
        ({"reduce": "sketch:k=8", "kinds": ["activations", "weights"]}, r"\(activations, .*\), not of weights"),
        ({"reduce": "sketch:k=8", "kinds": None}, "name kinds"),
    ],
)
def test_what_is_no_sketch_is_refused(settings: dict[str, Any], match: str) -> None:
    """Each wrong sketch is an error that says what is allowed."""
    with pytest.raises(CaptureError, match=match):
        Capture(**{"kinds": ["activations"], **settings})


def test_a_projection_that_is_too_large_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn block by block each time, and the sketch is the same; what is kept takes no more than allowed."""
    monkeypatch.setattr(reductions, "_BLOCK", 80)
    monkeypatch.setattr(reductions, "_KEPT_BYTES", 4 * 8 * 100)
    monkeypatch.setattr(reductions, "_KEPT", reductions._Projections())
    x = torch.randn(3, 5, 101, generator=torch.Generator().manual_seed(0))
    kept = reductions._KEPT._kept
    for axis, data in ((2, x), (1, x.movedim(2, 1))):
        found = SketchReduction(8).of(data, axis)
        np.testing.assert_allclose(found.movedim(axis, 2).numpy(), x.numpy() @ projection(101, 8, 0), atol=1e-5)
        assert not kept
    for seed in range(3):
        for width in (30, 50, 40):
            SketchReduction(8, seed).of(x[..., :width], 2)
        assert sum(one.nbytes for one in kept.values()) <= 4 * 8 * 100
    assert [(key[0].seed, len(one)) for key, one in kept.items()] == [(1, 50), (2, 50)]


def test_widths_share_one_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of many widths draw it once, if the widest comes first, and again only for a wider one."""
    drawn: list[int] = []
    draw, whole = reductions._drawn, torch.from_numpy(projection(200, 8, 1)).float()

    def counted(d: int, k: int, seed: int) -> Any:
        drawn.append(d)
        return draw(d, k, seed)

    monkeypatch.setattr(reductions, "_drawn", counted)
    monkeypatch.setattr(reductions, "_KEPT", reductions._Projections())
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for width in (100, *range(60, 100), 200):
            found = SketchReduction(8, 1).of(x[:, :width], 1)
            assert torch.equal(found, x[:, :width] @ whole[:width])
    assert drawn == [100, 200]


def test_rows_of_a_projection_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn in blocks they are the same numbers as drawn at once."""
    whole = projection(101, 8, 3)
    monkeypatch.setattr(reductions, "_BLOCK", 80)
    assert np.array_equal(projection(101, 8, 3), whole)
