"""Memory of a CUDA device: too little of it, and all of it given back; skipped where there is none."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tracer
from tests.observing.cuda_training import DEVICE, batches, make, repeatable, train

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures(repeatable.__name__),
]


def test_no_memory_left_for_the_copies(tmp_path: Path) -> None:
    """A device without room for what is to be recorded: the training goes on, and the trace says what it lacks."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    elements = 16 << 20  # 64 MB

    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.expand(8, elements)  # recorded, it takes 512 MB

    model = nn.Sequential(Large(), nn.Identity())
    held = torch.zeros(elements, device=DEVICE)
    model[1].weight = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (before + (128 << 20)) / total))
    try:
        with pytest.warns(RuntimeWarning, match="memory"):
            with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture()) as run:
                for _ in range(3):
                    optimizer.zero_grad()
                    model(held)
                    model[1].weight.sum().backward()
                    optimizer.step()
                assert any("memory" in one["why"] for one in run.exporter.problems)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(model[1].weight.detach().cpu(), torch.tensor([-0.5, -0.5]))
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert [one.global_step for one in trace.messages("weight_updates")] == [0, 1, 2]


def test_memory_of_the_device_is_given_back(tmp_path: Path) -> None:
    """However long a training is: what its recording holds on the device is bounded by the queue, and then nothing."""
    given = batches(1)
    model, optimizer = make()
    train(model, optimizer, given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bound = 1 << 20
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, strict=True, queue_bytes=bound, capture=tracer.Capture()
    ):
        for _ in range(200):
            train(model, optimizer, given)
    written = sum(one.stat().st_size for one in (tmp_path / "run.zarr").rglob("*") if one.is_file())
    assert written > 8 * bound
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 4 * bound, peak
    del given
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
