"""Statistics and sketches of a capture, taken on a CUDA device; all of it is skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from tests.observing.cuda_training import DEVICE, repeatable
from tests.observing.recorded import finished
from tracer import Capture
from tracer.observing.reductions import PIECE, REDUCTIONS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures(repeatable.__name__),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    """Each named statistic is the host's, of float64 numbers, of contiguous and other memory; so is the choice."""
    if dtype.is_complex and name in ("min", "max"):
        return  # complex numbers have no order
    capture = Capture(reduce=name)
    for shape in ((1,), (3, 5), (1000, 37)):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        for data in (values, values.mT if len(shape) > 1 else values):
            own = finished(capture, "weights", data.to(DEVICE))
            expected = finished(capture, "weights", data)
            assert (own.device.type, own.dtype) == (DEVICE, expected.dtype)
            torch.testing.assert_close(own.cpu(), expected, rtol=1e-12, atol=0, equal_nan=True)
    some = Capture(elements=10).select("weights", values.to(DEVICE))
    assert torch.equal(some.cpu(), Capture(elements=10).select("weights", values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_sketches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sketch is the host's, in float32 and not in fewer digits, whatever the program allows for its own products."""
    capture = Capture(kinds=["activations"], reduce="sketch:k=16")
    data = torch.randn(50, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = finished(capture, "activations", data)
    for coarse in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", coarse)
        own = finished(capture, "activations", data.to(DEVICE))
        assert (own.device.type, own.dtype) == (DEVICE, expected.dtype)
        torch.testing.assert_close(own.cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_large_tensors_need_little_memory(name: str) -> None:
    """What is converted to float64 is converted in pieces: of 200 MB in bfloat16 it would be 800 MB."""
    data = torch.randn(100_000_000, dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = finished(Capture(reduce=name), "weights", data)
    assert torch.cuda.max_memory_allocated() - before <= 3 * 8 * PIECE
    double = data.double()
    expected = (
        REDUCTIONS[name](double)
        if name in ("min", "max", "absmax")
        else {
            "mean": double.mean,
            "sum": double.sum,
            "norm": double.norm,
            "rms": double.square().mean().sqrt,
            "std": double.std,
        }[name]()
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-9, atol=0)
