"""What is recorded under autocast and with gradient scalers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint

from tests.endings import same
from tests.observing.oracles import GAN, OF_CALLS, SEEN, batches, by_place, equal, mlp, situation, unchanged, witnessed
from tests.observing.recorded import data_of, find, only, sgd


def unscaled(model: nn.Module, optimizer: Any, factors: Any = (1.0,) * 4, dtype: Any = None) -> None:
    """A loop without a scaler, which leaves out the steps of losses that are not finite."""
    for factor, x in zip(factors, batches(len(factors)), strict=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            output = model(x)
        (output.float().square().sum() * factor).backward()
        if factor < float("inf"):
            optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """AMP autocast: activations and their gradients in their own lower precision, those of weights in float32."""
    _, _, heard = situation(mlp, lambda *given: unscaled(*given, dtype=dtype))
    assert {one.dtype for kind in OF_CALLS[1:3] for one in data_of(heard, kind, "0")} == {dtype}
    assert {one.dtype for one in data_of(heard, "weight_gradients", "0")} == {torch.float32}


FACTORS = (1.0, float("inf"), 1.0, 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_autocast_with_grad_scaler(dtype: torch.dtype | None, fused: bool) -> None:
    """Autocast and GradScaler: all gradients are those of the loss that nobody scaled, to the bit; skips move nothing.

    Scales are powers of two, which change no digit of numbers that stay in range.
    """

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        for factor, x in zip(FACTORS, batches(4), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                output = model(x)
            scaler.scale(output.float().square().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)

    def overflown(place: Any) -> bool:
        return "gradients" in place[0] and place[2:5] == (1, "default", 0) and place[0] in OF_CALLS

    plain, close = (mlp, lambda *given: unscaled(*given, FACTORS, dtype)), 0.0 if dtype is torch.float16 else None
    _, exporter, heard = situation(mlp, train, make_optimizer, plain=plain, but=overflown, close=close)
    if dtype is torch.float16:  # which has no room for what is multiplied, so it is divided in float32
        assert {one.dtype for one in data_of(heard, "layer_gradients", "2")} == {torch.float32}
    assert not exporter.problems
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    assert [(one.global_step, one.call) for one in find(heard, "layer_gradients", "2")] == [
        (0, 0), (1, 0), (1, 1), (2, 0)
    ]  # fmt: skip
    assert not any(one.isfinite().all() for one in data_of(heard, "layer_gradients", "2", global_step=1, call=0))
    assert [one.global_step for one in find(heard, "weight_updates", "2")] == [0, 1, 2]


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    """GradScaler, plain and fused: gradients in float16 are told unscaled, in float32; skips are events."""

    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.float()).half()

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
        for number, x in enumerate(batches(4)):
            optimizer.zero_grad()
            factor = float("inf") if number == 1 else 1e-3
            scaler.scale(model(x.half()).float().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    scaler_methods = torch.amp.GradScaler.scale, torch.amp.GradScaler.step
    # a GradScaler refuses gradients in float16, so the parameters stay in float32
    _, _, heard = unchanged(
        lambda: nn.Sequential(Half(), Cast()),
        train,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=fused),
    )
    assert (torch.amp.GradScaler.scale, torch.amp.GradScaler.step) == scaler_methods
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    assert [one.global_step for one in find(heard, "weight_updates", "0.layer")] == [0, 1, 2]
    found = find(heard, "layer_gradients", "1")
    assert [(one.global_step, one.call) for one in found] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    for kind in ("layer_gradients", "input_gradients"):
        for number, one in enumerate(data_of(heard, kind, "1")):
            assert one.dtype is torch.float32
            expected = torch.full((4, 2), float("inf") if number == 1 else 1e-3)
            torch.testing.assert_close(one, expected, rtol=0 if kind[0] == "l" else 1e-3, atol=1e-9)
    for step, x in enumerate([batches(4)[number] for number in (0, 2, 3)]):
        at = {"global_step": step}
        slope = 1e-3 * torch.ones(4, 2).T @ x.half().float()
        torch.testing.assert_close(only(heard, "weight_gradients", "0.layer", **at), slope, rtol=1e-3, atol=1e-5)
        slope = torch.full((2,), 4e-3)
        torch.testing.assert_close(only(heard, "bias_gradients", "0.layer", **at), slope, rtol=1e-3, atol=0)
        for kind in ("weight", "bias"):
            update, gradient = (only(heard, f"{kind}_{of}", "0.layer", **at) for of in ("updates", "gradients"))
            torch.testing.assert_close(update, -0.1 * gradient, rtol=1e-3, atol=1e-6)


def scaler_classes() -> dict[str, type[torch.amp.GradScaler]]:
    """Scalers with methods of their own, made when it is called."""

    class Own(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            return outputs * self._scale

    class Parents(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            return super().scale(outputs).clone()

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return super().step(optimizer, *args, **kwargs)

    return {"own": Own, "parents": Parents, "sharded": ShardedGradScaler}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["own", "parents", "sharded"])
def test_grad_scalers_of_other_classes(name: str, late: bool) -> None:
    """A subclass, FSDP's for one, is seen as its parent is, whether it exists before the recording or not."""
    before = scaler_classes()

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = (scaler_classes() if late else before)[name]("cpu", init_scale=256.0, growth_interval=1)
        for number, x in enumerate(batches(3)):
            optimizer.zero_grad()
            scaler.scale(model(x).square().sum() * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    if name == "sharded":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        methods = {cls: dict(vars(cls)) for cls in (torch.amp.GradScaler, *before.values())}
        _, exporter, heard = situation(
            lambda: nn.Linear(3, 2), train,
            plain=(lambda: nn.Linear(3, 2), lambda *given: unscaled(*given, FACTORS[:3])),
            but=lambda place: place[:5] == ("layer_gradients", "", 1, "default", 0),
        )  # fmt: skip
        assert methods == {cls: dict(vars(cls)) for cls in methods}
    finally:
        if name == "sharded":
            torch.distributed.destroy_process_group()
    assert not exporter.problems
    assert [one.global_step for one in find(heard, "skipped_step")] == [1]
    assert [one.global_step for one in find(heard, "bias_gradients", "")] == [0, 1]


def test_grad_scaler_in_two_threads_at_once() -> None:
    """A scaler that two threads use at the same time scales both losses; gradients of both are published unscaled."""
    both = threading.Barrier(2, timeout=60)

    class Waiting(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            both.wait()
            scaled = super().scale(outputs)
            both.wait()
            return scaled

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = Waiting("cpu", init_scale=1024.0)
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        with ThreadPoolExecutor(2) as threads:
            scaled = list(threads.map(scaler.scale, [model(x).sum() for x in batches(2)]))
        for one in scaled:
            one.backward()
        scaler.step(optimizer)

    _, _, heard = unchanged(lambda: nn.Linear(3, 2), train)
    gradients = data_of(heard, "layer_gradients", "")
    assert len(gradients) == 2
    for one in gradients:
        assert same(one, torch.ones(4, 2))


def test_grad_scaler_beside_an_unscaled_loss() -> None:
    """Of a scaled and an unscaled backward of one step, each gradient is divided by its own backward's scale."""

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model(batches(1)[0]).sum().backward()
        scaler.scale(model(batches(1)[0]).sum()).backward()
        scaler.scale(checkpoint(model, batches(1)[0].requires_grad_(), use_reentrant=True).sum()).backward()
        optimizer.zero_grad()
        optimizer.step()

    def plainly(model: nn.Module, optimizer: Any) -> None:
        for needed in (False, False, True):
            model(batches(1)[0].requires_grad_(needed)).sum().backward()
        optimizer.zero_grad()
        optimizer.step()

    make = lambda: nn.Linear(3, 2)  # noqa: E731
    _, _, heard = situation(make, train, plain=(make, plainly))
    assert [one.call for one in find(heard, "layer_gradients", "")] == [0, 1, 2]
    assert not only(heard, "weight_updates", "").any()  # the gradients were forgotten before the step


def test_grad_scaler_without_an_optimizer() -> None:
    """A loop whose optimizer the exporter does not know: gradients of parameters are divided by the scale, too."""

    def train(model: Any, optimizer: Any, scale: float = 512.0, checkpointed: bool = True) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for x in batches(2):
            optimizer.zero_grad()
            hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True) if checkpointed else model[0](x)
            scaler.scale(model[2](model[1](hidden)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    def through(model: nn.Module, optimizer: Any, scale: float = 512.0) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for x in batches(2):
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    kinds = ("activations", "layer_gradients")
    alone = mlp, lambda *given: train(*given, 1.0, False)
    situation(mlp, train, given=lambda _: (), plain=alone, kinds=kinds)  # calls which nobody tells apart as steps
    _, _, heard = unchanged(mlp, through, given=lambda _: None)
    equal(by_place(heard, SEEN), witnessed(mlp, lambda *given: through(*given, 1.0)))
    assert len(data_of(heard, "bias_gradients", "2")) == len(data_of(heard, "weight_updates", "0")) == 2


def test_grad_scaler_skips_one_of_two_optimizers() -> None:
    """A scaler skips the last of two optimizers: what the first one did is told with the step that comes to its end."""

    def train(model: Any, both: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        critic, generator = both
        for factor in (1.0, float("inf"), 1.0):
            for one in both:
                one.zero_grad()
            scaler.scale(model.critic(torch.ones(4, 3)).sum()).backward()
            scaler.step(critic)
            scaler.scale(model.generator(torch.ones(4, 2)).sum() * factor).backward()
            scaler.step(generator)
            scaler.update()

    def plainly(model: Any, both: Any) -> None:
        for factor in (1.0, float("inf"), 1.0):
            for one in both:
                one.zero_grad()
            model.critic(torch.ones(4, 3)).sum().backward()
            both[0].step()
            (model.generator(torch.ones(4, 2)).sum() * factor).backward()
            if factor == 1.0:
                both[1].step()

    _, _, heard = situation(
        GAN, train, lambda model: (sgd(model.critic), sgd(model.generator)), plain=(GAN, plainly),
        but=lambda place: place[:5] == ("layer_gradients", "generator", 1, "default", 0),
    )  # fmt: skip
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    moved = [float(data_of(heard, "bias_updates", name)[1][0]) for name in ("critic", "generator")]
    assert moved == pytest.approx([-0.8, -0.4])  # the critic moved twice in step 1


def test_to_dtype_in_mid_run() -> None:
    """``.to(dtype)`` keeps identity and hooks: the same streams go on in the other precision."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            optimizer.zero_grad()
            model(batches(1)[0].to(dtype)).square().sum().backward()
            optimizer.step()

    _, _, heard = situation(mlp, train)
    for kind in ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates"):
        assert [one.dtype for one in data_of(heard, kind, "2")] == [torch.float32, torch.float64]
