"""What is recorded under autocast and with gradient scalers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint

from tests.endings import same
from tests.observing.oracles import GAN, OF_CALLS, batches, descended, like_mlp, mlp, of_mlp, squares, unchanged
from tests.observing.recorded import data_of, find, only, sgd


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """AMP autocast: activations and their gradients in their own lower precision, those of weights in float32."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                output = model(x)
            output.float().square().sum().backward()
            optimizer.step()

    _, _, heard = unchanged(mlp, train)
    for step, x in enumerate(batches(2)):
        expected = of_mlp(heard, x, step, autocast=dtype, lr=0.1)
        assert expected["layer_gradients", "0"].dtype is expected["activations", "0"].dtype is dtype
        assert expected["weight_gradients", "0"].dtype is torch.float32
        for (kind, module), value in expected.items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_grad_scaler(dtype: torch.dtype, fused: bool) -> None:
    """Autocast and GradScaler: all gradients are those of the loss that nobody scaled, to the bit; skips move nothing.

    Scales are powers of two, which change no digit of numbers that stay in range.
    """

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        for number, x in enumerate(batches(4)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                output = model(x)
            scaler.scale(output.float().square().sum() * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)

    model, exporter, heard = unchanged(mlp, train, make_optimizer)
    assert not exporter.problems
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    passes = [(0, 0), (1, 0), (1, 1), (2, 0)]
    for x, (step, call) in zip(batches(4), passes, strict=True):
        skipped = (step, call) == (1, 0)
        factor = float("inf") if skipped else 1.0
        expected = of_mlp(heard, x, step, lambda output, factor=factor: squares(output) * factor, dtype)
        for (kind, module), value in expected.items():
            if kind in OF_CALLS:
                got = only(heard, kind, module, global_step=step, call=call)
                torch.testing.assert_close(got.float(), value.float(), rtol=0, atol=0, equal_nan=True)
            elif not skipped:  # whose gradients no optimizer used
                got = only(heard, kind, module, global_step=step)
                assert same(got, value), (kind, module)
    for module in ("0", "2"):
        weights = [*data_of(heard, "weights", module), model.get_submodule(module).weight.detach()]
        for step, update in enumerate(data_of(heard, "weight_updates", module)):
            assert same(update, weights[step + 1] - weights[step])
            gradient = data_of(heard, "weight_gradients", module)[step]
            torch.testing.assert_close(update, -0.1 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler(fused: bool, dtype: torch.dtype) -> None:
    """GradScaler, plain and fused: gradients of parameters and of activations are told unscaled; skips are events."""

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
        for number, x in enumerate(batches(4)):
            optimizer.zero_grad()
            factor = float("inf") if number == 1 else 1e-3
            scaler.scale(model(x.to(dtype)).float().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype).append(Cast())

    def optimizer(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)

    scaler_methods = torch.amp.GradScaler.scale, torch.amp.GradScaler.step
    if dtype is torch.float16:  # a GradScaler refuses gradients in float16, so the parameters stay in float32

        def half() -> nn.Module:
            class Half(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.layer = nn.Linear(3, 2)

                def forward(self, x: Tensor) -> Tensor:
                    return self.layer(x.float()).half()

            return nn.Sequential(Half(), Cast())

        _, _, heard = unchanged(half, train, optimizer)
        module, parameters = "0", "0.layer"
    else:
        _, _, heard = unchanged(make, train, optimizer)
        module, parameters = "2", "2"
    assert (torch.amp.GradScaler.scale, torch.amp.GradScaler.step) == scaler_methods
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    assert [one.global_step for one in heard.of("weight_updates") if one.key == parameters] == [0, 1, 2]
    found = find(heard, "layer_gradients", module if dtype is torch.float32 else "1")
    assert [(one.global_step, one.call) for one in found] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    for number, one in enumerate(found):
        assert one.data is not None
        expected = torch.full((4, 2), float("inf") if number == 1 else 1e-3)
        torch.testing.assert_close(one.data.float(), expected)
    for gradient, update in zip(
        data_of(heard, "bias_gradients", parameters), data_of(heard, "bias_updates", parameters), strict=True
    ):
        torch.testing.assert_close(gradient, torch.full((2,), 4e-3), rtol=1e-3, atol=0)
        torch.testing.assert_close(update, -0.1 * gradient, rtol=1e-3, atol=1e-6)
    for x, (step, call) in zip(batches(4), [(0, 0), (1, 0), (1, 1), (2, 0)], strict=True):
        if dtype is torch.float16:
            leaves = (only(heard, kind, parameters, global_step=step) for kind in ("weights", "biases"))
            halved = x.half().float()
            value, slope = F.linear(halved, *leaves), 1e-3 * torch.ones(4, 2).T @ halved
            assert same(only(heard, "activations", "1", global_step=step, call=call), value.half().float())
        else:
            expected = of_mlp(heard, x, step, lambda output: output.sum() * 1e-3)
            slope = expected["weight_gradients", "2"]
            assert same(only(heard, "activations", "2", global_step=step, call=call), expected["activations", "2"])
        if (step, call) != (1, 0):
            got = only(heard, "weight_gradients", parameters, global_step=step)
            torch.testing.assert_close(got, slope, rtol=1e-3, atol=1e-5)
    for gradient, update in zip(
        data_of(heard, "weight_gradients", parameters), data_of(heard, "weight_updates", parameters), strict=True
    ):
        torch.testing.assert_close(update, -0.1 * gradient, rtol=1e-3, atol=1e-6)
    if dtype is torch.float16:
        inner = data_of(heard, "input_gradients", "1")
        assert {one.dtype for one in inner} == {torch.float32}
        torch.testing.assert_close(inner[0], torch.full((4, 2), 1e-3), rtol=1e-3, atol=0)


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
            scaler.scale(model(x).sum() * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    if name == "sharded":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        methods = {cls: dict(vars(cls)) for cls in (torch.amp.GradScaler, *before.values())}
        _, exporter, heard = unchanged(lambda: nn.Linear(3, 2), train)
        assert methods == {cls: dict(vars(cls)) for cls in methods}
    finally:
        if name == "sharded":
            torch.distributed.destroy_process_group()
    assert not exporter.problems
    assert [one.global_step for one in find(heard, "skipped_step")] == [1]
    assert [one.global_step for one in find(heard, "bias_gradients", "")] == [0, 1]
    for one in data_of(heard, "layer_gradients", "")[::2]:
        assert same(one, torch.ones(4, 2))
    for x, gradient in zip(batches(3)[::2], data_of(heard, "weight_gradients", ""), strict=True):
        assert same(gradient, torch.ones(4, 2).T @ x)
    for x, (step, call) in zip(batches(3), [(0, 0), (1, 0), (1, 1)], strict=True):
        weight, bias = (only(heard, kind, "", global_step=step) for kind in ("weights", "biases"))
        assert same(only(heard, "activations", "", global_step=step, call=call), F.linear(x, weight, bias))
    descended(heard)


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

    _, _, heard = unchanged(lambda: nn.Linear(3, 2), train)
    assert [one.call for one in find(heard, "layer_gradients", "")] == [0, 1, 2]
    assert not only(heard, "weight_updates", "").any()  # the gradients were forgotten before the step
    weight, bias = (only(heard, kind, "") for kind in ("weights", "biases"))
    for call in range(3):
        assert same(only(heard, "layer_gradients", "", call=call), torch.ones(4, 2))
        assert same(only(heard, "activations", "", call=call), F.linear(batches(1)[0], weight, bias))


def test_grad_scaler_without_an_optimizer() -> None:
    """A loop whose optimizer the exporter does not know: gradients of parameters are divided by the scale, too."""

    def train(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        for x in batches(2):
            optimizer.zero_grad()
            hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
            scaler.scale(model[2](model[1](hidden)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    _, _, heard = unchanged(mlp, train, given=lambda _: ())
    torch.manual_seed(5)
    reference = mlp()
    optimizer = sgd(reference)
    for call, x in enumerate(batches(2)):  # which nobody tells apart as steps
        optimizer.zero_grad()
        values = [x]
        for part in reference:
            values.append(part(values[-1]))
        slopes = torch.autograd.grad(values[-1].sum(), values[1:], retain_graph=True)
        values[-1].sum().backward()
        for module, value, slope in zip("012", values[1:], slopes, strict=True):
            assert same(only(heard, "activations", module, global_step=0, call=call), value)
            assert same(only(heard, "layer_gradients", module, global_step=0, call=call), slope)
        optimizer.step()

    def forwards(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        for x in batches(2):
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    _, _, heard = unchanged(mlp, forwards, given=lambda _: None)
    assert len(data_of(heard, "bias_gradients", "2")) == len(data_of(heard, "weight_updates", "0")) == 2
    like_mlp(heard, batches(2), torch.sum, lr=0.1)
    for gradient in data_of(heard, "bias_gradients", "2"):
        assert same(gradient, torch.full((2,), 4.0))
    for gradient, update in zip(
        data_of(heard, "weight_gradients", "0"), data_of(heard, "weight_updates", "0"), strict=True
    ):
        torch.testing.assert_close(update, -0.1 * gradient, rtol=1e-4, atol=1e-6)


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

    model, _, heard = unchanged(GAN, train, lambda model: (sgd(model.critic), sgd(model.generator)))
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    for name in ("critic", "generator"):
        weights, updates = data_of(heard, "weights", name), data_of(heard, "weight_updates", name)
        assert len(weights) == len(updates) == 2
        assert same(updates[0], weights[1] - weights[0])
        assert same(updates[1], model.get_submodule(name).weight - weights[1])  # the critic moved twice in step 1
        inputs, moves = {"critic": (3, (1, 2)), "generator": (2, (1, 1))}[name]
        slope = torch.ones(4, weights[0].shape[0]).T @ torch.ones(4, inputs)
        first = F.linear(torch.ones(4, inputs), weights[0], data_of(heard, "biases", name)[0])
        assert same(only(heard, "activations", name, global_step=0), first)
        assert same(only(heard, "layer_gradients", name, global_step=0), torch.ones_like(first))
        for step, gradient in enumerate(data_of(heard, "weight_gradients", name)):
            assert same(gradient, slope)
            after = weights[step]
            for _ in range(moves[step]):
                after = after.add(slope, alpha=-0.1)
            assert same(updates[step], after - weights[step])


def test_to_dtype_in_mid_run(tmp_path: Path) -> None:
    """``.to(dtype)`` keeps identity and hooks: the same streams go on in the other precision."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            optimizer.zero_grad()
            model(batches(1)[0].to(dtype)).square().sum().backward()
            optimizer.step()

    _, _, heard = unchanged(mlp, train)
    for kind in ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates"):
        assert [one.dtype for one in data_of(heard, kind, "2")] == [torch.float32, torch.float64]
    weights, gradients = data_of(heard, "weights", "2"), data_of(heard, "weight_gradients", "2")
    assert same(data_of(heard, "weight_updates", "2")[1], weights[1].add(gradients[1], alpha=-0.1) - weights[1])
    for step, dtype in enumerate((torch.float32, torch.float64)):
        for (kind, module), value in of_mlp(heard, batches(1)[0].to(dtype), step).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module)
