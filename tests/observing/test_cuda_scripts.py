"""Scripts, certificates and ranks on a CUDA device; all of it is skipped where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tests.observing.cuda_training import DEVICE, batches, by_hand, make, of_modules, repeatable, train

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures(repeatable.__name__),
]


PROGRAM = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3)).to("DEVICE")
    opt = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("DEVICE", init_scale=64.0)
    data = TensorDataset(torch.randn(20, 4), torch.arange(20) % 3)
    loader = DataLoader(data, 8, shuffle=True, num_workers=WORKERS, pin_memory=True, multiprocessing_context=CONTEXT)
    for epoch in range(2):
        for a, b in loader:
            a, b = a.to("DEVICE", non_blocking=True), b.to("DEVICE", non_blocking=True)
            opt.zero_grad()
            with torch.autocast("DEVICE", torch.float16):
                loss = F.cross_entropy(net(a), b)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    print("weights", float(net[0].weight.detach().double().sum()), float(torch.rand(1)))
    print("device", float(torch.rand(1, device="DEVICE")), float(loss))
"""


@pytest.mark.parametrize(("workers", "context"), [(0, "None"), (2, "'fork'"), (2, "'spawn'")])
def test_an_unmodified_script(workers: int, context: str, tmp_path: Path) -> None:
    """``trace record`` of a script as people write them: its output is what it is alone, and all of it is there."""
    body = PROGRAM.replace("DEVICE", DEVICE).replace("WORKERS", str(workers)).replace("CONTEXT", context)
    (tmp_path / "train.py").write_text(body)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    printed = []
    for before in ([], ["-m", "tracereel", "record", "--out", "run.zarr"]):
        done = subprocess.run(
            [sys.executable, *before, "train.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        updates = list(trace.messages("weight_updates", "3"))
        assert [one.global_step for one in updates] == list(range(6))
        assert [one.epoch for one in updates] == [0, 0, 0, 1, 1, 1]
        assert len(list(trace.messages("loss"))) == 6


def test_a_certificate() -> None:
    """Generators, parameters and moments of the device are compared; a recorder that changes nothing is identical."""

    def training(record: Any) -> None:
        model, _ = make()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with record(model, optimizer):
            train(model, optimizer, batches(5))

    certificate = tracer.certify(training, steps=4)
    assert certificate.verdict == "identical", certificate.reason


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
@pytest.mark.filterwarnings("ignore")  # of torch's own collectives
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_ranks(wrapper: str, tmp_path: Path) -> None:
    """DDP and FSDP2 on streams of their own (here a world of one): the values of a training that nobody wraps."""
    given = batches(3)
    model, optimizer = make()
    expected, remove = by_hand(model, optimizer)
    train(model, optimizer, given)
    remove()
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, _ = make()
        wrapped: nn.Module = model
        if wrapper == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            for one in (model.conv, model.shared, model.head, model):
                torch.distributed.fsdp.fully_shard(one)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        with tracer.record(tmp_path / "run.zarr", wrapped, optimizer, strict=True, capture=tracer.Capture()):
            train(wrapped, optimizer, given)
    finally:
        torch.distributed.destroy_process_group()
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = of_modules(trace)
    assert found.keys() == expected.keys()
    different = [key for key, value in expected.items() if not torch.allclose(found[key], value.cpu(), 1e-5, 1e-6)]
    assert not different
