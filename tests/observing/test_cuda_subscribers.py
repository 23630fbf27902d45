"""What subscribers say of the tensors of a CUDA device; all of it is skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from analyze.registry import parse, subscribers
from tests.observing.cuda_training import DEVICE, batches, make, repeatable, state, train
from tracer import Capture, Collect
from tracer.messaging.messages import DATA_KINDS, KINDS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures(repeatable.__name__),
]


def test_every_subscriber_hears_the_device(tmp_path: Path) -> None:
    """What a subscriber says of the device's tensors while it trains, it says, to the bit, of the trace."""
    model, optimizer = make()
    names = [name for name in subscribers() if not parse(name).needs_model]
    heard = Collect("*")
    given = batches(4)
    with tracer.record(
        tmp_path / "run.zarr",
        model,
        optimizer,
        capture=Capture(kinds=DATA_KINDS),
        receivers=[*(parse(name) for name in names), heard],
        loss=F.cross_entropy,
        strict=True,
    ) as run:
        run.probe("probe", *given[0], every=2)
        train(model, optimizer, given)
    derived = {kind for name in names for kind in parse(name).produces}

    def said(messages: Iterable[tracer.Message]) -> list[Any]:
        return [
            (
                *(one.kind, one.key, one.global_step, one.tag, one.call, one.leaf),
                None if one.data is None else bits(one.data),
            )
            for one in messages
            if one.kind in derived
        ]

    later = Collect("*")
    tracer.replay(tmp_path / "run.zarr", *(parse(name) for name in names), later)
    live = said(heard)
    assert len({one[0] for one in live}) > len(names) / 2
    assert live == said(later)


def test_derivatives_of_the_loss_on_the_device(tmp_path: Path) -> None:
    """Taken while hooks hang that run in the device's thread, they wait for no lock, change nothing, and are right."""

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0)
        for x, y in batches(3):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    model, optimizer = make()
    scaled(model, optimizer)
    expected = state(model)
    model, optimizer = make()
    names = [name for name in subscribers() if parse(name).needs_model]
    heard = Collect("*")
    with tracer.record(
        tmp_path / "run.zarr",
        model,
        optimizer,
        capture=Capture(kinds=KINDS),
        receivers=[*map(parse, names), heard],
        loss=F.cross_entropy,
        strict=True,
    ):
        scaled(model, optimizer)
    assert all(map(torch.equal, expected, state(model)))
    produced = {kind for name in names for kind in parse(name).produces}
    assert {one.kind for one in heard} >= produced
    assert {one.leaf for one in heard.of("layer_gradients")} == {""}

    on_host = Collect("loss_hessian_trace")
    model, _ = make()
    model.cpu().drop.p = 0.0
    alike = make()[0]
    alike.drop.p = 0.0
    on_device = Collect("loss_hessian_trace")
    for one, where, told in ((model, "cpu", on_host), (alike, DEVICE, on_device)):
        exporter = tracer.Exporter(strict=True)
        exporter.set_model(one)
        exporter.set_loss(F.cross_entropy)
        exporter.message_bus.register(parse("hessian_trace"))
        exporter.message_bus.register(told)
        x, y = batches(1)[0]
        F.cross_entropy(one(x.to(where)), y.to(where)).backward()
        exporter.detach()
    ((host,), (device,)) = (
        [float(said.data) for said in told if said.data is not None] for told in (on_host, on_device)
    )
    assert device == pytest.approx(host, rel=0.02)  # convolutions have 10 bits of precision there


def bits(data: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor to the bit, wherever it is."""
    own = data.detach().cpu().contiguous()
    return str(own.dtype), tuple(own.shape), own.reshape(-1).view(torch.uint8).numpy().tobytes()
