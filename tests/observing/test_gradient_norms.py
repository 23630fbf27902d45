"""The norms of all gradients: before clipping and after it, as ``clip_grad_norm_`` and ``get_total_norm`` say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import tracer
from analyze.metrics.lengths import TotalNorm
from tests.observing.oracles import batches, mlp
from tests.observing.recorded import problems, sgd, watch
from tracer import Capture, Collect, Message, replay
from tracer.observing.gradients import total_norm

CLOSE = {"rel": 2e-6}
"""The sums of squares are in float32."""
NORMS = {"kinds": ["gradient_norms"]}


def norm_of(tensors: Iterable[Tensor | None]) -> float:
    """The norm in float64, of what has a gradient."""
    dense = [one.to_dense() if one.is_sparse else one for one in tensors if one is not None]
    wide = [one.to(torch.complex128 if one.is_complex() else torch.float64) for one in dense]
    return math.hypot(*(float(torch.linalg.vector_norm(one)) for one in wide))


def gradients(model: nn.Module) -> list[Tensor | None]:
    """The gradients of a model's parameters."""
    return [one.grad for one in model.parameters()]


def recorded(heard: Collect) -> list[tuple[int, dict[str, float]]]:
    """The step and the named numbers of each message."""
    return [
        (one.global_step, dict(zip((one.sampling or {})["entries"], one.data.tolist(), strict=True)))
        for one in heard.of("gradient_norms")
        if one.data is not None
    ]


def check(heard: Collect, expected: list[dict[str, float]]) -> None:
    """Each step has these numbers."""
    found = recorded(heard)
    assert [step for step, _ in found] == list(range(len(expected)))
    for (_, numbers), right in zip(found, expected, strict=True):
        assert numbers == pytest.approx(right, **CLOSE)


def said(answers: Iterable[Message]) -> list[tuple[Any, ...]]:
    """Answers, with the bytes of their numbers."""
    return [
        (one.kind, one.global_step, one.leaf, one.data.numpy().tobytes()) for one in answers if one.data is not None
    ]


ANSWERS = ("total_norm_before", "total_norm_after")


def clipped(model: nn.Module, optimizer: Any, steps: int = 4) -> list[tuple[float, float]]:
    """Train with two batches a step and clipping; what ``clip_grad_norm_`` returns, and the norm after it."""
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for x in batches(2):
            (10.0 ** (step - 2) * model(x).square().sum()).backward()
        before = clip_grad_norm_(model.parameters(), 0.967)
        norms.append((float(before), norm_of(gradients(model))))
        optimizer.step()
    return norms


@pytest.mark.parametrize(("profile", "suffix"), [("standard", "zarr"), ("full", "h5")])
def test_profiles_record_both_norms(profile: str, suffix: str, tmp_path: Path) -> None:
    """At every recorded step; what the metric says live and in a replay is the same to the bit."""
    model, path, live = mlp(), tmp_path / f"run.{suffix}", Collect(*ANSWERS)
    optimizer = torch.optim.AdamW(model.parameters())
    with tracer.record(path, model, optimizer, capture=profile, receivers=[TotalNorm(), live]):
        norms = clipped(model, optimizer)
    assert norms[0][0] < 0.967 < 45 < norms[-1][0]
    assert [float(one.data) for one in live.of("total_norm_before")] == pytest.approx(
        [one for one, _ in norms], **CLOSE
    )
    assert [float(one.data) for one in live.of("total_norm_after")] == pytest.approx([one for _, one in norms], **CLOSE)
    again = Collect(*ANSWERS)
    replay(path, TotalNorm(), again)
    assert said(again) == said(live)
    assert len(said(again)) == 8


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("capture", ["full", None, "statistics"])
def test_the_norm_after_clipping_follows_from_gradients(capture: str | None, tmp_path: Path) -> None:
    """Of traces without recorded norms: as float64 has it, live as in a replay, of all layers or some.

    With `modules`, recorded norms, which are of all layers, are not taken.
    """
    model, path, live = mlp(), tmp_path / "run.zarr", Collect(*ANSWERS)
    optimizer = sgd(model)
    gradient_kinds = Capture(
        kinds=["weight_gradients", "bias_gradients"], reduce=capture if capture != "full" else None
    )
    expected, of_first = [], []
    with tracer.record(
        path, model, optimizer, capture="full" if capture == "full" else gradient_kinds, receivers=[TotalNorm(), live]
    ):
        for x in batches(2):
            optimizer.zero_grad()
            model(x.double()).square().sum().backward()
            clip_grad_norm_(model.parameters(), 0.5)
            expected.append(float(torch.nn.utils.get_total_norm([one for one in gradients(model) if one is not None])))
            of_first.append(norm_of(gradients(model[0])))
            optimizer.step()
    first = Collect(*ANSWERS)
    replay(path, TotalNorm(modules="0"), first)
    assert {one.kind for one in first} == {"total_norm_after"}
    assert [float(one.data) for one in first.of("total_norm_after")] == pytest.approx(of_first, rel=1e-14)
    if capture != "full":
        assert [float(one.data) for one in live.of("total_norm_after")] == pytest.approx(expected, rel=1e-14)
        assert not live.of("total_norm_before")
        again = Collect(*ANSWERS)
        replay(path, TotalNorm(), again)
        assert said(again) == said(live)


@pytest.mark.parametrize("fused", [False, True])
def test_the_factor_of_a_grad_scaler_is_taken_out(fused: bool) -> None:
    """Also where the optimizer unscales in its step; a step that is skipped has no norms."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    exporter, heard = watch(model, optimizer, **NORMS)
    scaler, expected = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1), []
    for number, x in enumerate(batches(4)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        loss = output.float().square().sum()
        if number != 1:
            alone = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        scaler.scale(loss * (math.inf if number == 1 else 1.0)).backward()
        if number > 1 and not fused:
            scaler.unscale_(optimizer)
            before = float(clip_grad_norm_(model.parameters(), 0.1))
            assert before == pytest.approx(norm_of(alone), **CLOSE)
            expected.append({"before": before, "after": norm_of(gradients(model))})
        elif number != 1:
            expected.append(dict.fromkeys(("before", "after"), norm_of(alone)))
        scaler.step(optimizer)
        scaler.update()
    exporter.detach()
    check(heard, expected)
    assert scaler.get_scale() == 2.0**14  # doubled thrice, halved once


def test_closures() -> None:
    """LBFGS: the last backward of the step, and what the closure made of it."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    exporter, heard = watch(model, optimizer, **NORMS)
    seen: list[list[dict[str, float]]] = []
    for x in batches(3):
        seen.append([])

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            before = float(clip_grad_norm_(model.parameters(), 1.0))
            seen[-1].append({"before": before, "after": norm_of(gradients(model))})
            return loss

        optimizer.step(closure)
    exporter.detach()
    assert all(len(one) > 1 for one in seen)
    check(heard, [one[-1] for one in seen])


def by_value(model: nn.Module) -> None:
    """Clip each element."""
    clip_grad_value_(model.parameters(), 0.01)


def behind_the_version(model: nn.Module) -> None:
    """Clip each element as old programs do, which leaves the gradient's version counter as it was."""
    for one in model.parameters():
        assert one.grad is not None
        one.grad.data.clamp_(-0.01, 0.01)


def by_another_tensor(model: nn.Module) -> None:
    """Put other tensors in the gradients' place."""
    for one in model.parameters():
        assert one.grad is not None
        one.grad = one.grad.clamp(-0.01, 0.01)


def by_the_largest(model: nn.Module) -> None:
    """Clip by the largest element."""
    clip_grad_norm_(model.parameters(), 3e4, norm_type=math.inf)


def not_at_all(model: nn.Module) -> None:
    """Leave the gradients alone."""


class Bag(nn.Module):
    """A sparse table, of which a row comes up twice, and a layer without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.table(torch.tensor([1, 3, 3, 8])))  # type: ignore[no-any-return]


def by_axes(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Matrices by one optimizer and vectors by another."""
    return [torch.optim.SGD([one for one in model.parameters() if one.ndim == axes], lr=0.1) for axes in (2, 1)]


CLIPPED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    **{
        f"{kind.__name__}, {clip.__name__}": (mlp, lambda model, kind=kind: kind(model.parameters(), lr=0.01), clip)
        for kind in (torch.optim.SGD, torch.optim.Adam)
        for clip in (by_value, behind_the_version, by_another_tensor)
    },
    **{
        str(dtype): (lambda dtype=dtype: nn.Linear(3, 4, dtype=dtype), lambda model: sgd(model, 1e-6), by_the_largest)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)
    },
    "sparse": (Bag, sgd, not_at_all),
    "which overwrites": (
        mlp,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True),
        not_at_all,
    ),
    "two optimizers": (mlp, by_axes, lambda model: clip_grad_norm_(model.parameters(), 0.1)),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_by_value(name: str) -> None:
    """However the program clips, and if it drops the gradients right after the step; in any dtype, dense or not.

    Squares of float16 are not infinite; of complex gradients it is the norm of their moduli. Of a row that came up
    twice, the sum counts; parameters without a gradient do not. Of two optimizers of a model there is one norm.
    """
    make, optimizer, clip = CLIPPED[name]
    model = make()
    optimizers = optimizer(model)
    exporter, heard = watch(model, optimizers, **NORMS)
    dtype, expected = next(model.parameters()).dtype, []
    for x in batches(3):
        output = model(x.to(dtype))
        (output.square().sum() if dtype is torch.float32 else (1000 * output).abs().sum()).backward()
        before = norm_of(gradients(model))
        clip(model)
        expected.append({"before": before, "after": norm_of(gradients(model))})
        for one in optimizers if isinstance(optimizers, list) else [optimizers]:
            one.step()
            one.zero_grad()
    exporter.detach()
    assert clip in (not_at_all, by_the_largest) or all(one["after"] < one["before"] for one in expected)
    check(heard, expected)


def test_a_hook_of_the_program_clips() -> None:
    """Just before the step, after the exporter's own hook."""
    model = mlp()
    optimizer = sgd(model)
    exporter, heard = watch(model, optimizer, **NORMS)
    optimizer.register_step_pre_hook(lambda *_: clip_grad_value_(model.parameters(), 0.01))
    expected = []
    for x in batches(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        before = norm_of(gradients(model))
        optimizer.step()
        expected.append({"before": before, "after": norm_of(gradients(model))})
    exporter.detach()
    check(heard, expected)


def test_two_models() -> None:
    """A GAN: a norm of each model, under its name; its discriminator's is of its own step, not of the generator's."""
    generator, discriminator = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    exporter, heard = tracer.Exporter(capture=Capture(**NORMS), strict=True), Collect("gradient_norms")
    exporter.message_bus.register(heard)
    exporter.add_modules(("generator", generator))
    exporter.add_modules(("discriminator", discriminator))
    exporter.set_optimizer([of_discriminator, of_generator])
    expected: list[tuple[int, str, list[float]]] = []
    for step, (x, z) in enumerate(zip(batches(2), batches(2, (4, 2)), strict=True)):
        of_discriminator.zero_grad()
        (discriminator(generator(z).detach()).mean() - discriminator(x).mean()).backward()
        before = float(clip_grad_norm_(discriminator.parameters(), 0.1))
        expected.append((step, "discriminator", [before, norm_of(gradients(discriminator))]))
        of_discriminator.step()
        of_generator.zero_grad()
        (-discriminator(generator(z)).mean()).backward()
        expected.append((step, "generator", [norm_of(gradients(generator))] * 2))
        of_generator.step()
    exporter.detach()
    found = [(one.global_step, one.leaf, one.data.tolist()) for one in heard if one.data is not None]
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for (_, _, norms), (_, _, right) in zip(found, expected, strict=True):
        assert norms == pytest.approx(right, **CLOSE)


def test_without_a_backward() -> None:
    """Gradients of ``autograd.grad``: it is not known what they were before clipping."""
    model = mlp()
    optimizer = sgd(model)
    exporter, heard = watch(model, optimizer, **NORMS)
    total, answers = TotalNorm(), Collect(*ANSWERS)
    exporter.message_bus.register(total)
    exporter.message_bus.register(answers)
    expected = []
    for x in batches(2):
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        for one, gradient in zip(model.parameters(), found, strict=True):
            one.grad = gradient / 2
        expected.append({"after": norm_of(gradients(model))})
        optimizer.step()
    exporter.detach()
    check(heard, expected)
    answered = [*answers, *total.finish()]
    assert [one.kind for one in answered] == ["total_norm_after"] * 2
    assert [float(one.data) for one in answered if one.data is not None] == pytest.approx(
        [one["after"] for one in expected], **CLOSE
    )


def test_norms_of_optimizers_in_the_backward() -> None:
    """One for each parameter, which steps and drops the gradient before the backward is over."""
    model = mlp()
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    exporter, heard = watch(model, list(optimizers.values()), **NORMS)

    def step(one: Tensor) -> None:
        optimizers[one].step()
        optimizers[one].zero_grad()

    handles = [one.register_post_accumulate_grad_hook(step) for one in model.parameters()]
    expected = []
    for x in batches(3):
        loss = model(x).square().sum()
        expected.append({"after": norm_of(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))})
        loss.backward()
    for handle in handles:
        handle.remove()
    exporter.finish()
    exporter.detach()
    check(heard, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite(bad: float) -> None:
    """The norm says so."""
    model = mlp()
    optimizer = sgd(model)
    exporter, heard = watch(model, optimizer, **NORMS)
    (model(batches(1)[0]).sum()).backward()
    assert model[0].bias.grad is not None
    model[0].bias.grad[1] = bad
    optimizer.step()
    exporter.detach()
    ((_, numbers),) = recorded(heard)
    assert math.isfinite(numbers["before"])
    assert str(numbers["after"]) == str(bad)


def test_work_is_done_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two norms in a recorded step, by one operation over all gradients each; none in other steps, or for nobody."""
    called: list[int] = []
    plain = torch._foreach_norm
    monkeypatch.setattr(
        torch, "_foreach_norm", lambda group, *more, **named: called.append(len(group)) or plain(group, *more, **named)
    )
    model = mlp()
    optimizer = sgd(model)
    exporter, heard = watch(model, optimizer, kinds=["gradient_norms"], every=2)
    counts = []
    for x in batches(4):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        counts.append(len(called))
    assert counts == [2, 2, 4, 4]
    assert called == [4] * 4
    exporter.message_bus.unregister(heard)
    model(batches(1)[0]).square().sum().backward()
    optimizer.step()
    exporter.detach()
    assert len(called) == 4


def test_gradients_of_a_special_class_are_not_added_up() -> None:
    """They may be a process's part of what other processes hold, too. The training goes on, and a problem is told."""

    class Part(Tensor):
        pass

    model = nn.Linear(3, 2, bias=False)
    optimizer = sgd(model)
    exporter, heard = watch(model, optimizer, strict=False, **NORMS)
    model(batches(1)[0]).square().sum().backward()
    assert model.weight.grad is not None
    model.weight.grad = model.weight.grad.as_subclass(Part)
    with pytest.warns(RuntimeWarning, match="class Part, of which a process may hold only a part"):
        optimizer.step()
    exporter.detach()
    assert not heard.of("gradient_norms")
    assert "gradient_norms: gradients are of the class Part" in problems(exporter)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2048, 2048), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    + [(shape, torch.float32) for shape in ((3, 1 << 20), ((1 << 22) + 7,), (512, 128, 64))],
)
def test_large_tensors_are_precise(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Where torch's own float32 norm is wrong by 3e-5; also where they are not in C order."""
    one = torch.randn(shape).to(dtype)
    exact = float(torch.linalg.vector_norm(one.double()))
    assert float(total_norm([one])) == pytest.approx(exact, rel=1e-6)
    assert float(total_norm([one.T if one.ndim == 2 else one])) == pytest.approx(exact, rel=1e-4)
    if dtype is torch.float32:
        assert float(torch.linalg.vector_norm(one)) != pytest.approx(exact, rel=1e-5)
