"""Random networks: trained with and without a recorder, and computed a third time by pure functions.

A seed makes a small network out of what real ones are made of (parts used again, residuals, in-place operations, tuples
and dicts, casts, frozen and tied parameters, checkpoints, passages without gradients, recurrences, attention), an
optimizer and a loop. Its training ends with the same parameters, buffers and random generator whether it is recorded or
not. The oracle computes each step again without modules, hooks or in-place operations, from the parameters of the
training that was not recorded, and takes all gradients by ``autograd.grad``. What is recorded must be just what the
oracle has: the same messages, no more, with the same data.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from tests.observing.random_networks import Network, Plan, plan
from tests.observing.random_parts import Key, Tape, added, arguments
from tracer import Capture, Collect, Exporter, Message
from tracer.messaging.messages import DATA_KINDS


@dataclasses.dataclass
class Before:
    """What the training that is not recorded was like when a step began, and what it did to the parameters."""

    values: dict[str, Tensor]
    trained: dict[str, bool]
    generator: Tensor
    after: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # as an evaluation after the step finds them


def copies(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Detached copies."""
    return {name: one.detach().clone() for name, one in named}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()


Watch = Callable[[nn.Module, torch.optim.Optimizer], contextlib.AbstractContextManager[Any]]


def train(plan: Plan, watch: Watch = lambda *_: contextlib.nullcontext()) -> tuple[Network, list[Before]]:
    """Train the network of a plan, watched or not."""
    model = plan.make()
    optimizer = plan.optimizer(model)
    with watch(model, optimizer):
        return model, loop(plan, model, optimizer)


def loop(plan: Plan, model: Network, optimizer: torch.optim.Optimizer) -> list[Before]:
    """Every step, from freezing to the evaluation after it."""
    for index in plan.frozen:
        model.parts[index].requires_grad_(False)
    torch.manual_seed(plan.seed + 1)
    steps = []
    for step in range(plan.steps):
        if step == plan.thawed_at:
            model.requires_grad_(True)
        trained = {name: one.requires_grad for name, one in model.named_parameters()}
        steps.append(Before(copies(model.named_parameters()), trained, torch.get_rng_state()))
        optimizer.zero_grad(set_to_none=plan.to_none)
        for number in range(plan.micro):
            inputs, target = plan.batch(step, number)
            loss = plan.loss(model(*inputs), target)
            if loss.requires_grad:
                loss.backward()
        if plan.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        steps[-1].after = copies(model.named_parameters())
        steps[-1].buffers = copies(model.named_buffers())
        if plan.evaluates:
            with evaluating(model):
                plan.loss(model(*plan.batch(step, 0)[0]), plan.batch(step, 0)[1])
    return steps


def oracle(plan: Plan, model: Network, steps: list[Before]) -> list[dict[Key, Tensor]]:
    """For each step, what is to be recorded of it, in the order of the forwards and then of the parameters."""
    expected: list[dict[Key, Tensor]] = []
    gradients: dict[str, Tensor] = {}
    aside: dict[Key, Tensor] = {}
    for step, before in enumerate(steps):
        values = {name: one.clone().requires_grad_(before.trained[name]) for name, one in before.values.items()}
        gradients = {} if plan.to_none else {name: torch.zeros_like(one) for name, one in gradients.items()}
        tape, found = Tape(model, values, {}, "default"), aside
        torch.set_rng_state(before.generator)
        for number in range(plan.micro):
            loss = noted_pass(plan, tape, model, plan.batch(step, number), number, aside)
            wanted = {**tape.watched, **{name: one for name, one in values.items() if one.requires_grad}}
            tape.watched = {}
            if not loss.requires_grad:
                continue
            for key, one in zip(
                wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True), strict=True
            ):
                if isinstance(key, tuple) and one is not None:
                    tape.noted[key] = one
                elif one is not None:
                    gradients[key] = gradients[key] + one if key in gradients else one
        found.update(tape.noted)
        if plan.clip is not None and gradients:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients.values()]))
            gradients = {name: one * (plan.clip / (norm + 1e-6)).clamp(max=1.0) for name, one in gradients.items()}
        for name in before.values:
            owner, _, attribute = name.rpartition(".")
            stream, sort = (
                owner if attribute in ("weight", "bias") else name,
                "bias" if "bias" in attribute else "weight",
            )
            found["biases" if sort == "bias" else "weights", stream, "default", 0, ""] = before.values[name]
            if name in gradients:
                found[f"{sort}_gradients", stream, "default", 0, ""] = gradients[name]
            found[f"{sort}_updates", stream, "default", 0, ""] = before.after[name] - before.values[name]
        if step % plan.every:
            found = {key: one for key, one in found.items() if key[2] == "eval"}
        expected.append(found)
        aside = {}
        if plan.evaluates:
            tape = Tape(model, before.after, before.buffers, "eval")
            with torch.no_grad():
                noted_pass(plan, tape, model, plan.batch(step, 0), 0, {})
            aside = tape.noted
    return [*expected, aside]


def noted_pass(
    plan: Plan, tape: Tape, model: Network, batch: tuple[Any, Tensor], number: int, before: dict[Key, Tensor]
) -> Tensor:
    """A forward and its loss, with what the network gets and gives; `before` was noted earlier of the same step."""
    inputs, target = batch
    tape.note(("input_data", ""), None, number, arguments(*inputs))
    output = tape.call(model, *inputs)
    loss = plan.loss(output, target)
    seen: dict[str, Any] = {"network_output": output}
    if loss.requires_grad:  # what `backward` is called on, whatever made it
        seen["loss"] = loss
    tag = tape.tag
    if plan.with_loss:
        # nothing is made of what the loss function gives, so its only term is the loss
        terms = {"mse_loss": loss}
        seen = {"network_output": added(output), "input_labels": target, "loss_terms": terms, "loss": loss}
        if not loss.requires_grad:  # all that it depends on is frozen: as the loss of an evaluation
            tape.tag, number = "eval", sum(key[0] == "loss" and key[2] == "eval" for key in {**tape.noted, **before})
    for kind, value in seen.items():
        tape.note((kind, ""), None, number, value)
    tape.tag = tag
    tape.watched = {key: one for key, one in tape.watched.items() if key[0]}
    return loss


def heard(plan: Plan) -> tuple[Network, list[Message]]:
    """Train under an exporter; what a receiver heard."""
    exporter, collect = Exporter(capture=capture(plan)), Collect("*")
    exporter.message_bus.register(collect)

    @contextlib.contextmanager
    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        exporter.set_model(model)
        exporter.set_optimizer(optimizer)
        exporter.watch_backward()
        if plan.with_loss:
            exporter.set_loss(F.mse_loss)
        yield
        exporter.finish()
        exporter.detach()

    model, _ = train(plan, watch)
    assert all("fast path" in problem["why"] for problem in exporter.problems), (plan.seed, exporter.problems)
    return model, list(collect)


def stored(plan: Plan, path: Path) -> tuple[Network, list[Message]]:
    """Train under `tracer.record`; what stands in the trace."""
    loss = F.mse_loss if plan.with_loss else None
    model, _ = train(plan, lambda *parts: tracer.record(path, *parts, loss=loss, capture=capture(plan)))
    with tracer.open(path) as trace:
        assert trace.status == "finished", plan.seed
        return model, list(trace.messages())


def capture(plan: Plan) -> Capture:
    """All kinds, of all modules, those that only contain others included."""
    return Capture(kinds=DATA_KINDS, modules="*", every=plan.every)


def check(seed: int, folder: Path) -> None:
    """A training is the same with and without a recorder, and what is recorded is what the oracle says."""
    one = plan(seed)
    plain, steps = train(one)
    ended = torch.get_rng_state()
    recorded, messages = stored(one, folder / f"{seed}.zarr") if seed % 5 == 0 else heard(one)
    assert torch.equal(ended, torch.get_rng_state()), seed
    for (name, left), right in zip(plain.state_dict().items(), recorded.state_dict().values(), strict=True):
        equal(right, left, 0.0, (seed, name))
    norms = [message.data for message in messages if message.kind == "gradient_norms"]
    assert all(one.shape in ((1,), (2,)) and bool((one >= 0).all()) for one in norms), seed
    messages = [message for message in messages if message.data is not None and message.kind != "gradient_norms"]
    coarse = any(value.dtype is torch.bfloat16 for value in steps[0].values.values())
    for step, expected in enumerate(oracle(one, plain, steps)):
        keys = [key_of(message) for message in messages if message.global_step == step]
        found = {key_of(message): message.data for message in messages if message.global_step == step}
        assert len(found) == len(keys), seed
        assert set(found) == set(expected), (seed, step, set(found) ^ set(expected))
        ordered = ("layer_inputs", "activations")
        assert [key for key in keys if key[0] in ordered] == [key for key in expected if key[0] in ordered], (
            seed,
            step,
        )
        for key, value in expected.items():
            rounding = 0.0 if one.exact or key[0] in EXACT else 1e-4
            if key[0] in ("weight_gradients", "bias_gradients"):  # which may be summed in another order
                rounding = 0.1 if coarse else 1e-4
            equal(found[key], value, rounding, (seed, step, key))
    for module in recorded.modules():
        assert not module._forward_hooks, seed
        assert not module._forward_pre_hooks, seed


EXACT = ("input_data", "input_labels", "weights", "biases", "weight_updates", "bias_updates")
"""What does not depend on how something is computed."""


def equal(found: Tensor | None, expected: Tensor, rounding: float, where: Any) -> None:
    """Up to the rounding of another order or formula, or to the last bit; a training that explodes has NaN."""
    torch.testing.assert_close(
        found, expected, rtol=rounding, atol=rounding / 10, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )


def key_of(message: Message) -> Key:
    """What tells a message from the others of its step."""
    return message.kind, message.key, message.tag, message.call, message.leaf


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
def test_random_models(part: int, tmp_path: Path) -> None:
    """Two hundred networks, twenty-five at a time; the first of them in each `make test`."""
    for seed in range(25 * part, 25 * part + 25):
        check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_random_models(part: int, tmp_path: Path) -> None:
    """Two thousand more."""
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        check(seed, tmp_path)


def counted(forward: Any, note: Callable[..., None]) -> Callable[..., Any]:
    """A forward that notes each call of it."""

    def noting(*inputs: Any, **named: Any) -> Any:
        note(forward.__self__)
        return forward(*inputs, **named)

    return noting


def calls_of(plan: Plan, watch: Watch) -> tuple[list[tuple[Any, ...]], Network]:
    """Each call of a module's forward and of hooks on it, in order, with its modes; and the trained network."""
    calls: list[tuple[Any, ...]] = []

    def told(what: str, name: str) -> Callable[..., None]:
        return lambda module, *_: calls.append((what, name, module.training, torch.is_grad_enabled()))

    model = plan.make()
    optimizer = plan.optimizer(model)
    for name, module in model.named_modules():
        module.forward = counted(module.forward, told("forward", name))  # type: ignore[method-assign]
        module.register_forward_pre_hook(told("before", name))
        module.register_forward_hook(told("after", name))
    with watch(model, optimizer):
        loop(plan, model, optimizer)
    return calls, model


@pytest.mark.parametrize(
    "seed", [seed if seed < 6 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(200)]
)
def test_the_default_calls_nothing_of_the_program(seed: int, tmp_path: Path) -> None:
    """By the default profile, modules and hooks see the calls that the program makes, in their modes, and no other."""
    one = plan(seed)
    loss = F.mse_loss if one.with_loss else None
    plain, expected = calls_of(one, lambda *_: contextlib.nullcontext())
    ended = torch.get_rng_state()
    recorded, found = calls_of(
        one, lambda *parts: tracer.record(tmp_path / "run.zarr", *parts, loss=loss, capture="standard")
    )
    assert torch.equal(ended, torch.get_rng_state())
    assert recorded == plain
    assert len(plain) > 3 * one.steps
    for (name, left), right in zip(expected.state_dict().items(), found.state_dict().values(), strict=True):
        equal(right, left, 0.0, (seed, name))
