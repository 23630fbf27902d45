"""Sketches: which projection is kept of which kinds and axes, what the trace says of it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tracer
from tests.observing.recorded import finished, sgd, watch
from tracer import Capture, CaptureError
from tracer.observing import sketches
from tracer.observing.sketches import Sketch, projection


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
        found = Sketch(8).of(x, 1)
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
        assert torch.equal(Sketch(8).of(x, 1), exact)


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
    monkeypatch.setattr(sketches, "_BLOCK", 80)
    monkeypatch.setattr(sketches, "_KEPT_BYTES", 4 * 8 * 100)
    monkeypatch.setattr(sketches, "_KEPT", sketches._Projections())
    x = torch.randn(3, 5, 101, generator=torch.Generator().manual_seed(0))
    kept = sketches._KEPT._kept
    for axis, data in ((2, x), (1, x.movedim(2, 1))):
        found = Sketch(8).of(data, axis)
        np.testing.assert_allclose(found.movedim(axis, 2).numpy(), x.numpy() @ projection(101, 8, 0), atol=1e-5)
        assert not kept
    for seed in range(3):
        for width in (30, 50, 40):
            Sketch(8, seed).of(x[..., :width], 2)
        assert sum(one.nbytes for one in kept.values()) <= 4 * 8 * 100
    assert [(key[0].seed, len(one)) for key, one in kept.items()] == [(1, 50), (2, 50)]


def test_widths_share_one_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of many widths draw it once, if the widest comes first, and again only for a wider one."""
    drawn: list[int] = []
    draw, whole = sketches._drawn, torch.from_numpy(projection(200, 8, 1)).float()

    def counted(d: int, k: int, seed: int) -> Any:
        drawn.append(d)
        return draw(d, k, seed)

    monkeypatch.setattr(sketches, "_drawn", counted)
    monkeypatch.setattr(sketches, "_KEPT", sketches._Projections())
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for width in (100, *range(60, 100), 200):
            found = Sketch(8, 1).of(x[:, :width], 1)
            assert torch.equal(found, x[:, :width] @ whole[:width])
    assert drawn == [100, 200]


def test_rows_of_a_projection_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn in blocks they are the same numbers as drawn at once."""
    whole = projection(101, 8, 3)
    monkeypatch.setattr(sketches, "_BLOCK", 80)
    assert np.array_equal(projection(101, 8, 3), whole)
