"""Derivatives of a training's loss for who needs the model: what they are, and that asking for them changes nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import tracer
from analyze.registry import parse
from tests.observing.recorded import data_of, sgd, watch
from tracer import Capture, Collect, Message, Objective, Subscriber, Subscription
from tracer.messaging.receiver import Around


@dataclasses.dataclass
class Told:
    """What was asked of one loss."""

    message: Message
    parameters: dict[str, int]
    hessian: NDArray[np.float64]
    rows: NDArray[np.float64] | None


class Asking(Subscriber):
    """Keeps the whole Hessian of each loss, and what each row adds to the gradient."""

    needs_model = True

    def __init__(self, *, rows: bool = False, subsample: int = 1) -> None:
        super().__init__(Subscription("loss", subsample=subsample))
        self.rows, self.told = rows, list[Told]()
        self.objective: Objective | None = None
        self.kept: Objective | None = None

    def know_objective(self, objective: Objective | None) -> None:
        """Keep it."""
        self.objective = objective
        self.kept = objective or self.kept

    def compute(self, message: Message) -> Iterable[Message]:
        """Ask for all there is."""
        one = self.objective
        assert one is not None
        size = sum(one.parameters.values())
        hessian = one.hessian_products(np.eye(size))
        rows = one.row_gradients(np.eye(one.rows)) if self.rows else None
        self.told.append(Told(message, dict(one.parameters), hessian, rows))
        return ()


def exact_hessian(model: nn.Module, value: Callable[[Mapping[str, Tensor]], Tensor]) -> NDArray[np.float64]:
    """The Hessian of a function of a model's parameters, by `torch.autograd.functional`."""
    shapes = {name: one.shape for name, one in model.named_parameters()}
    sizes = [one.numel() for one in model.parameters()]

    def flat(vector: Tensor) -> Tensor:
        parts = vector.split(sizes)
        return value({name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)})

    at = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    found: Tensor = torch.autograd.functional.hessian(flat, at)
    return found.double().numpy()


def close(found: NDArray[np.float64], expected: NDArray[np.float64], tolerance: float = 1e-9) -> bool:
    """Whether two arrays are the same but for rounding, relative to the largest element."""
    return bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())


def perceptron(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def data(step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator, dtype=dtype), torch.randint(3, (6,), generator=generator)


def recorded(
    model: nn.Module, receivers: Iterable[tracer.Receiver], loop: Callable[[Any], None], **settings: Any
) -> tracer.Exporter:
    """A training under an exporter with these receivers."""
    optimizer = sgd(model)
    exporter, _ = watch(model, optimizer, F.cross_entropy, **settings)
    for one in receivers:
        exporter.message_bus.register(one)
    try:
        loop(optimizer)
        exporter.finish()
    finally:  # under strict an error goes through, and what stands in for losses is of no other test
        exporter.detach()
    return exporter


def once(model: nn.Module, loss: Callable[[], Tensor], *receivers: tracer.Receiver) -> None:
    """A step of a training under an exporter with these receivers."""

    def loop(optimizer: Any) -> None:
        loss().backward()
        optimizer.step()

    recorded(model, receivers, loop)


def entropy(model: nn.Module) -> Callable[[], Tensor]:
    """The usual loss of the first step."""
    x, y = data()
    return lambda: F.cross_entropy(model(x), y)


# -- what is answered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_hessian_is_that_of_the_loss_at_the_weights_of_the_step(dtype: torch.dtype, tolerance: float) -> None:
    """In each step, of the weights before it; as precise as the dtype of the training."""
    model, asking, expected = perceptron(dtype), Asking(), []

    def value(wide: nn.Module, x: Tensor, y: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(wide, dict(weights), x), y)

    def loop(optimizer: Any) -> None:
        for step in range(3):
            x, y = data(step, dtype)
            wide = perceptron().requires_grad_(False)
            wide.load_state_dict(model.state_dict())
            expected.append(exact_hessian(wide, functools.partial(value, wide, x.double(), y)))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    recorded(model, [asking], loop)
    assert [one.message.global_step for one in asking.told] == [0, 1, 2]
    assert asking.told[0].parameters == {"0.weight": 20, "0.bias": 5, "2.weight": 15, "2.bias": 3}
    for told, hessian in zip(asking.told, expected, strict=True):
        assert close(told.hessian, hessian, tolerance)


def test_dropout_and_batch_statistics_are_those_of_the_forward() -> None:
    """The Hessian is that with the masks that the forward drew, although the generator has gone on since."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, 3)).double()
    x, y = data()
    before = torch.get_rng_state()

    def value(weights: Mapping[str, Tensor]) -> Tensor:
        buffers = {name: one.clone() for name, one in model.named_buffers()}
        with torch.random.fork_rng():
            torch.set_rng_state(before)
            return F.cross_entropy(functional_call(model, {**weights, **buffers}, x), y)

    expected = exact_hessian(model, value)
    asking = Asking()

    def loss() -> Tensor:
        found = F.cross_entropy(model(x), y)
        torch.rand(5)
        return found

    once(model, loss, asking)
    assert close(asking.told[0].hessian, expected)


def test_a_loss_of_any_making_has_its_hessian() -> None:
    """A penalty on weights, and what the program does to the output before, are in it; rows are refused then."""
    model, (x, y) = perceptron(), data()

    def value(weights: Mapping[str, Tensor]) -> Tensor:
        output = functional_call(model, dict(weights), x).square()
        return F.cross_entropy(output, y) / 2 + 0.1 * sum((one**4).sum() for one in weights.values())

    def loss() -> Tensor:
        return value(dict(model.named_parameters()))

    expected, asking = exact_hessian(model, value), Asking()
    once(model, loss, asking)
    assert close(asking.told[0].hessian, expected)
    with pytest.raises(tracer.CaptureError, match="made of more than the output that its loss function got"):
        once(model, loss, Asking(rows=True))


def test_rows_are_what_datapoints_add_to_the_gradient() -> None:
    """N times each is the gradient of the datapoint's own loss, as torch.func finds it."""
    model, (x, y) = perceptron(), data()
    weights = {name: one.detach() for name, one in model.named_parameters()}

    def of_one(weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, dict(weights), x[None]), y[None])

    found = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))(weights, x, y)
    expected = torch.cat([found[name].reshape(6, -1) for name in weights], 1).numpy()
    asking = Asking(rows=True)
    once(model, entropy(model), asking)
    assert asking.told[0].rows is not None
    assert close(6 * asking.told[0].rows, expected)


def test_each_backward_has_its_own() -> None:
    """Of accumulated micro-batches, each loss has its Hessian, and its own rows."""
    model, asking = perceptron(), Asking(rows=True)
    whole, alone = data(), Asking(rows=True)

    def accumulating(optimizer: Any) -> None:
        for part in (slice(0, 3), slice(3, 6)):
            (F.cross_entropy(model(whole[0][part]), whole[1][part]) / 2).backward()
        optimizer.step()

    recorded(model, [asking], accumulating)
    model = perceptron()
    once(model, entropy(model), alone)
    assert [one.message.call for one in asking.told] == [0, 1]
    assert close(sum(one.hessian for one in asking.told), alone.told[0].hessian)
    assert close(np.concatenate([one.rows for one in asking.told]), alone.told[0].rows)  # type: ignore[arg-type]


def test_what_a_scaler_multiplies_is_taken_out() -> None:
    """The Hessian is that of the loss that is published, whatever a GradScaler made of it."""
    told = []
    for scale in (1.0, 1024.0):
        model, asking = perceptron(torch.float32), Asking(rows=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)

        def loop(optimizer: Any, model: nn.Module = model, scaler: Any = scaler) -> None:
            x, y = data(0, torch.float32)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)

        recorded(model, [asking], loop)
        told.append(asking.told[0])
    assert close(told[1].hessian, told[0].hessian, 1e-6)
    assert close(told[1].rows, told[0].rows, 1e-6)  # type: ignore[arg-type]


def test_a_loss_that_is_linear_in_the_parameters_does_not_bend() -> None:
    """Its Hessian is 0, and nothing fails."""
    model, asking = nn.Linear(4, 1).double(), Asking()
    once(model, lambda: model(data()[0]).sum(), asking)
    assert not asking.told[0].hessian.any()
    assert asking.told[0].hessian.shape == (5, 5)


def test_frozen_parameters_are_constants() -> None:
    """Only what is trained is differentiated by."""
    model, asking = perceptron(), Asking()
    model[0].requires_grad_(False)
    once(model, entropy(model), asking)
    assert asking.told[0].parameters == {"2.weight": 15, "2.bias": 3}


# -- what it changes ------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A network whose middle may be computed again in the backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.last, self.again = nn.Linear(4, 5), nn.Linear(5, 3), again
        self.middle = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.again else self.middle(x)
        return self.last(x)


def trained(model: nn.Module, loop: Callable[[Any], None], receivers: Iterable[tracer.Receiver] | None) -> list[Any]:
    """All that a training leaves, with receivers or without an exporter, and the messages."""
    torch.manual_seed(5)
    heard: list[Any] = []
    if receivers is None:
        loop(sgd(model))
    else:
        optimizer = sgd(model)
        exporter, all_heard = watch(model, optimizer, F.cross_entropy)
        for one in receivers:
            exporter.message_bus.register(one)
        loop(optimizer)
        exporter.detach()
        heard = [
            (m.kind, m.key, m.global_step, m.call, m.leaf, None if m.data is None else m.data.tolist())
            for m in all_heard
        ]
    state = [one.clone() for one in (*model.state_dict().values(), *(p.grad for p in model.parameters()))]
    return [[*state, torch.get_rng_state()], heard]


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_asking_changes_neither_the_training_nor_what_is_heard(again: bool) -> None:
    """Weights, buffers, gradients and generators are to the bit those of an unwatched training; so are messages."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Checkpointed(again).double()

    def run(receivers: Iterable[tracer.Receiver] | None) -> list[Any]:
        model = made()
        hooked: list[int] = []
        for one in model.parameters():  # which must not see what is differentiated aside
            one.register_hook(lambda gradient: hooked.append(1) or gradient.clamp(-0.05, 0.05))  # type: ignore[func-returns-value]

        def loop(optimizer: Any) -> None:
            for step in range(3):
                x, y = data(step)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        state, heard = trained(model, loop, receivers)
        return [state, heard, len(hooked)]

    asking = Asking(rows=True)
    bare, alone, asked = run(None), run([]), run([asking])
    for other in (alone, asked):
        assert all(map(torch.equal, bare[0], other[0]))
        assert other[2] == bare[2]
    assert asked[1] == alone[1]
    assert any(kind == "layer_gradients" for kind, *_ in asked[1])
    assert len(asking.told) == 3


def test_a_checkpoint_has_the_hessian_of_the_same_network_without_it() -> None:
    """What is computed again for a derivative is what the forward computed."""
    told = []
    for again in (False, True):
        torch.manual_seed(0)
        model, asking = Checkpointed(again).double(), Asking(rows=True)
        once(model, entropy(model), asking)
        told.append(asking.told[0])
    assert close(told[1].hessian, told[0].hessian)
    assert close(told[1].rows, told[0].rows)  # type: ignore[arg-type]


def test_another_exporter_hears_nothing_of_it() -> None:
    """Two exporters on one model: who asks at one of them gives the other no further gradients."""
    model, (x, y) = perceptron(), data()
    optimizer = sgd(model)
    first, heard = watch(model, optimizer, F.cross_entropy)
    second, _ = watch(model, optimizer, F.cross_entropy)
    second.message_bus.register(Asking(rows=True))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert {message.leaf for message in heard.of("layer_gradients")} == {""}
    assert len(data_of(heard, "loss")) == 1
    for one in (first, second):
        one.detach()


def test_only_due_steps_are_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With subsample=2 nothing is made in the other steps; so it is where a capture takes every second step."""
    made: list[int] = []
    told = tracer.observing.derivatives.Derivatives.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        told(self, *args, **kwargs)
        made.append(self.step)

    monkeypatch.setattr(tracer.observing.derivatives.Derivatives, "__init__", counting)
    for settings, asking in (({}, Asking(subsample=2)), ({"every": 2}, Asking())):
        model = perceptron()

        def loop(optimizer: Any, model: nn.Module = model) -> None:
            for step in range(4):
                x, y = data(step)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        recorded(model, [asking], loop, **settings)
        assert made == [0, 2]
        made.clear()


# -- what cannot be had ---------------------------------------------------------------------------------------------


def attending(heads: int = 2) -> nn.Module:
    """A network with attention, which torch computes in one kernel."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(4, heads, 8, dropout=0.0, batch_first=True)


def failure(model: nn.Module, loss: Callable[[], Tensor], path: Path, **settings: Any) -> str:
    """Why a subscriber that needs the model is taken off the bus in a training, which goes on."""
    asking, heard = Asking(**settings), Collect("loss")
    optimizer = sgd(model)
    before = [one.detach().clone() for one in model.parameters()]
    with (
        pytest.warns(RuntimeWarning, match="Asking failed on loss of global step 0 and no longer listens"),
        tracer.record(
            path, model, optimizer, loss=F.cross_entropy, receivers=[asking, heard], capture=tracer.Capture()
        ) as run,
    ):
        loss().backward()
        optimizer.step()
        ((_, error),) = run.bus.failures
    assert not all(map(torch.equal, before, model.parameters()))
    assert len(heard) == 1
    assert isinstance(error, tracer.CaptureError)
    return str(error)


def test_kernels_without_a_second_derivative(tmp_path: Path) -> None:
    """Fused attention has none: the sentence names it and what helps; the training goes on."""
    model, x = attending(), torch.randn(2, 3, 4)
    told = failure(model, lambda: model(x).square().mean(), tmp_path / "a.zarr")
    assert told.startswith(
        "the loss of step 0 cannot be differentiated twice: derivative for aten::_scaled_dot_product"
    )
    assert told.endswith("attention within torch.nn.attention.sdpa_kernel(SDPBackend.MATH) can be")
    model = attending()
    asking = Asking()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        once(model, lambda: model(x).square().mean(), asking)
    assert asking.told[0].hessian.any()


def test_rows_need_one_loss_function(tmp_path: Path) -> None:
    """Without one that was named, or with two, there are no datapoints."""
    model, (x, y) = perceptron(), data()

    def unnamed() -> Tensor:
        return model(x).logsumexp(1).mean()

    def twice() -> Tensor:
        return F.cross_entropy(model(x), y) + F.cross_entropy(-model(x), y)

    assert "here they got none" in failure(model, unnamed, tmp_path / "a.zarr", rows=True)
    model = perceptron()

    def another() -> Tensor:
        F.cross_entropy(model(x), y)
        return model(x).logsumexp(1).mean()

    assert "here they got none" in failure(model, another, tmp_path / "c.zarr", rows=True)
    model = perceptron()
    assert "here they got 2" in failure(model, twice, tmp_path / "b.zarr", rows=True)


def test_other_calls_of_loss_functions_are_no_datapoints() -> None:
    """One output may go to several terms, and a loss that is only looked at is none of this backward's."""
    model, asking, alone = perceptron(), Asking(rows=True), Asking(rows=True)
    x, y = data()

    def loss() -> Tensor:
        F.cross_entropy(model(x + 1), y)
        output = model(x)
        return (F.cross_entropy(output, y) + F.cross_entropy(output, y, label_smoothing=0.0)) / 2

    once(model, loss, asking)
    model = perceptron()
    once(model, entropy(model), alone)
    assert close(asking.told[0].rows, alone.told[0].rows)  # type: ignore[arg-type]


def test_what_is_kept_for_later_is_of_no_use() -> None:
    """When the message was delivered, the graph is let go."""
    model, asking = perceptron(), Asking()
    once(model, entropy(model), asking)
    assert asking.kept is not None
    with pytest.raises(tracer.CaptureError, match="the loss of step 0 can be differentiated only while its message is"):
        asking.kept.hessian_products(np.eye(43))


@pytest.mark.parametrize("how", ["logged", "several optimizers"])
def test_losses_that_come_too_late_are_not_told(how: str, tmp_path: Path) -> None:
    """What is logged, and the losses of several optimizers, have no graph any more: a metric says so."""
    model, (x, y) = perceptron(), data()
    optimizers = [sgd(model[0]), sgd(model[2])] if how == "several optimizers" else [sgd(model)]
    with (
        pytest.warns(RuntimeWarning, match="hessian_trace cannot differentiate the loss of step 0: only one on which"),
        tracer.record(
            tmp_path / "run.zarr",
            model,
            optimizers,
            receivers=[parse("hessian_trace")],
            logs=["loss"] if how == "logged" else [],
            capture=tracer.Capture(),
        ) as run,
    ):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if how == "logged":
            run.log("loss", loss)
        for one in optimizers:
            one.step()


def test_a_capture_without_the_loss_is_refused_at_once(tmp_path: Path) -> None:
    """Who needs the model needs the message of the loss, too."""
    with pytest.raises(tracer.CaptureError, match="Asking needs loss"):
        tracer.record(
            tmp_path / "run.zarr", perceptron(), receivers=[Asking()], capture=Capture(kinds=["weights"])
        ).__enter__()


def test_a_wrapper_passes_it_on() -> None:
    """What is around a receiver that needs the model needs it, and tells it."""

    class Wrapped(Around):
        pass

    model, asking = perceptron(), Asking()
    around = Wrapped(asking)
    assert around.needs_model
    once(model, entropy(model), around)
    assert len(asking.told) == 1
