"""The laws of the architecture about training: watching changes nothing in it, and does nothing that nobody wants."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from analyze.registry import parse
from tests.laws import BATCHES, EPOCHS, Training, batch, live_only, network
from tracer import Capture, Collect
from tracer.messaging.messages import DATA_KINDS, KINDS

# -- 4. watching changes nothing ------------------------------------------------------------------------------


def hooks_of(*things: Any) -> int:
    """How many hooks hang on modules, their parameters and buffers, optimizers, and on torch itself."""
    count = 0
    for thing in things:
        if isinstance(thing, nn.Module):
            for one in thing.modules():
                count += sum(len(value) for name, value in vars(one).items() if "_hooks" in name and value)
                for tensor in [*one._parameters.values(), *one._buffers.values()]:
                    if tensor is not None:
                        count += len(tensor._backward_hooks or ())
                        count += len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())
        else:
            count += len(thing._optimizer_step_pre_hooks) + len(thing._optimizer_step_post_hooks)
    from torch.nn.modules import module
    from torch.optim import optimizer

    count += sum(len(value) for name, value in vars(module).items() if name.startswith("_global") and value)
    return count + len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks)


@pytest.fixture(scope="module")
def unwatched() -> dict[str, Any]:
    """The same training without anything of this project."""
    return Training.new().run().state()


@pytest.mark.parametrize(
    "capture",
    [
        Capture(kinds=DATA_KINDS),
        Capture(every=2, elements=7, dtype="bfloat16"),
        (Capture(kinds=["activations"], rows=2, positions=3, reduce="norm"), Capture(kinds=["weights"], every=3)),
    ],
    ids=["everything", "elements", "statistics"],
)
@pytest.mark.parametrize(("suffix", "metrics"), [("zarr", True), ("h5", False)])
def test_watching_changes_nothing(
    capture: Any, suffix: str, metrics: bool, unwatched: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, parameters, buffers, optimizer, gradients, modes and generators are those of an unwatched training."""
    training = Training.new()
    receivers = [tracer.CallbackSubscriber("activations", lambda *_: None)] if metrics else []
    if metrics and not isinstance(capture, tuple):
        receivers += [parse("spectral_norm"), parse("ratio")]
    with tracer.record(
        tmp_path / f"run.{suffix}",
        training.model,
        training.optimizer,
        loss=training.loss,
        capture=capture,
        receivers=receivers,
        strict=True,
    ) as run:
        run.probe("probe", *batch(200, 12), every=2, batch_size=5)
        training.run(run)
        assert hooks_of(training.model, training.optimizer) > 0
    assert training.state() == unwatched
    assert hooks_of(training.model, training.optimizer, training.loss) == 0


@pytest.mark.parametrize("capture", [Capture(kinds=KINDS), Capture(kinds=["loss"], every=2)], ids=["all", "loss"])
def test_differentiating_changes_nothing(capture: Capture, unwatched: dict[str, Any], tmp_path: Path) -> None:
    """The same holds where subscribers ask for derivatives of the loss."""
    training, heard = Training.new(), Collect("loss_hessian_trace")
    receivers = [*live_only().values(), heard]
    with tracer.record(
        tmp_path / "run.zarr",
        training.model,
        training.optimizer,
        loss=training.loss,
        capture=capture,
        receivers=receivers,
        strict=True,
    ) as run:
        training.run(run)
    assert training.state() == unwatched
    assert hooks_of(training.model, training.optimizer, training.loss) == 0
    assert len(heard) == EPOCHS * BATCHES // (capture.every or 1)


def test_watching_a_functional_loss_changes_nothing(unwatched: dict[str, Any], tmp_path: Path) -> None:
    """A loss function of torch is itself again afterwards, and the training the same."""
    original, training = F.cross_entropy, Training.new()
    with tracer.record(
        tmp_path / "run.zarr",
        training.model,
        training.optimizer,
        loss=F.cross_entropy,
        strict=True,
        capture=tracer.Capture(),
    ):
        assert F.cross_entropy is not original
        training.run()
    assert F.cross_entropy is original
    assert training.state() == unwatched


@pytest.mark.parametrize("optimizer", [None, ()], ids=["forward-steps", "user-steps"])
def test_watching_without_the_optimizer_changes_nothing(
    optimizer: Any, unwatched: dict[str, Any], tmp_path: Path
) -> None:
    """The same holds for an exporter that does not know the optimizer, which hangs hooks on parameters."""
    training = Training.new()
    with tracer.record(
        tmp_path / "run.zarr", training.model, optimizer, loss=training.loss, strict=True, capture=tracer.Capture()
    ) as run:
        training.run(run, between=run.step if optimizer == () else lambda: None)
    assert training.state() == unwatched
    assert hooks_of(training.model, training.optimizer, training.loss) == 0


def copies(model: nn.Module) -> Iterator[nn.Module]:
    """The model deep-copied, pickled, and saved by torch."""
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    yield torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("optimizer", ["known", "unknown"])
def test_models_copy_and_pickle_while_watched(optimizer: str, tmp_path: Path) -> None:
    """A copy of a watched model computes the same, publishes nothing, and its own hooks do nothing."""
    training, heard = Training.new(), Collect()
    known = training.optimizer if optimizer == "known" else None
    capture = Capture(kinds=DATA_KINDS)
    with tracer.record(
        tmp_path / "run.zarr", training.model, known, capture=capture, receivers=[heard], strict=True
    ) as run:
        x, y = batch(0)
        training.loss(training.model(x), y).backward()
        training.optimizer.step()
        copied, before = list(copies(training.model)), len(heard)
        step = run.exporter.global_step
        training.model.eval()
        with torch.no_grad():  # else the pass is held until it is known whether the training learns from it
            expected = training.model(x)
        training.model.train()
        after = len(heard)
        assert after > before
        for one in copied:
            loss = training.loss(one.train()(x), y)
            loss.backward()
            one.eval()
            assert torch.isfinite(loss)
        assert len(heard) == after
        assert run.exporter.global_step == step
    fresh = network()
    fresh.load_state_dict(copied[0].state_dict())
    assert torch.equal(fresh.eval()(x), copied[0](x))
    assert expected.shape == copied[0](x).shape


def test_models_copy_and_pickle_afterwards(tmp_path: Path) -> None:
    """After a recording the model and the optimizer copy and pickle, and the copies have no hooks."""
    training = Training.new()
    with tracer.record(
        tmp_path / "run.zarr",
        training.model,
        training.optimizer,
        loss=training.loss,
        strict=True,
        capture=tracer.Capture(),
    ):
        training.run()
    x, _ = batch(0)
    expected = training.model.eval()(x)
    for one in copies(training.model):
        assert torch.equal(one(x), expected)
        assert hooks_of(one) == 0
    assert hooks_of(copy.deepcopy(training.optimizer)) == 0
    assert pickle.dumps(training.optimizer)


def test_a_pickled_watched_model_loads_without_this_project(tmp_path: Path) -> None:
    """What is pickled in the middle of a recording names nothing of this project, so it loads without it."""
    training = Training.new()
    with tracer.record(
        tmp_path / "run.zarr", training.model, training.optimizer, strict=True, capture=tracer.Capture()
    ):
        assert b"tracer" not in pickle.dumps(training.model)


def test_an_exception_leaves_no_hooks(tmp_path: Path) -> None:
    """Hooks are gone too when the training ends in an exception, and the exception is the user's own."""
    training = Training.new()
    with pytest.raises(ZeroDivisionError):
        with tracer.record(
            tmp_path / "run.zarr", training.model, training.optimizer, loss=F.cross_entropy, capture=tracer.Capture()
        ):
            training.model(batch(0)[0])
            raise ZeroDivisionError
    assert hooks_of(training.model, training.optimizer) == 0
    assert F.cross_entropy.__module__ == "torch.nn.functional"


# -- 5. nothing nobody wants ----------------------------------------------------------------------------------


def test_hooks_are_only_where_something_is_wanted() -> None:
    """With a receiver of one kind of one module, only this module (and the root, for the clock) has hooks."""
    training = Training.new()
    exporter = tracer.Exporter()
    exporter.set_model(training.model)
    exporter.set_optimizer(training.optimizer)
    exporter.set_loss(training.loss)
    exporter.message_bus.register(tracer.CallbackSubscriber("activations", lambda *_: None, modules="conv"))
    hooked = {name for name, one in training.model.named_modules() if one._forward_hooks or one._forward_pre_hooks}
    assert hooked == {"", "conv"}
    assert not training.loss._forward_hooks
    assert not training.model.conv._forward_pre_hooks
    assert all(
        not (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)) for p in training.model.parameters()
    )
    exporter.message_bus.unregister(exporter.message_bus.receivers[0])
    assert {name for name, one in training.model.named_modules() if one._forward_hooks or one._forward_pre_hooks} <= {
        ""
    }
    exporter.detach()
    assert hooks_of(training.model, training.optimizer, training.loss) == 0


def test_a_capture_bounds_the_hooks(tmp_path: Path) -> None:
    """A recording of weights puts no hook on any inner module."""
    training = Training.new()
    capture = Capture(kinds=["weights", "weight_updates"])
    with tracer.record(tmp_path / "run.zarr", training.model, training.optimizer, capture=capture, strict=True):
        assert {name for name, one in training.model.named_modules() if one._forward_hooks} <= {""}
        training.run()
    kinds = {stream.kind for stream in tracer.open(tmp_path / "run.zarr").streams}
    assert kinds == {"weights", "weight_updates"}


@pytest.mark.parametrize("receiver", ["capture", "subscriber"])
def test_steps_that_nobody_wants_touch_no_tensor(receiver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every=3, or subscribers that take every third step, nothing is selected or copied in the other steps."""
    training = Training.new()
    every = 3 if receiver == "capture" else 1
    exporter = tracer.Exporter(capture=Capture(kinds=DATA_KINDS, tags=["default"], every=every))
    exporter.set_model(training.model)
    exporter.set_optimizer(training.optimizer)
    exporter.set_loss(training.loss)
    if receiver == "capture":
        exporter.message_bus.register(Collect("*"))
    else:
        kinds = [kind for kind in KINDS if KINDS[kind].clock == "global_step"]
        exporter.message_bus.register(tracer.CallbackSubscriber(kinds[0], lambda *_: None, subsample=3))
        for kind in kinds[1:]:
            exporter.message_bus.register(tracer.CallbackSubscriber(kind, lambda *_: None, subsample=3))
    selected: dict[int, int] = {}
    cloned: dict[int, int] = {}
    select, clone = Capture.select, Tensor.clone

    def counting_select(self: Capture, *args: Any) -> Tensor:
        selected[exporter.global_step] = selected.get(exporter.global_step, 0) + 1
        return select(self, *args)

    def counting_clone(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if sys._getframe(1).f_globals["__name__"].startswith("tracer."):  # the training clones, too
            cloned[exporter.global_step] = cloned.get(exporter.global_step, 0) + 1
        return clone(self, *args, **kwargs)

    monkeypatch.setattr(Capture, "select", counting_select)
    monkeypatch.setattr(Tensor, "clone", counting_clone)
    training.run()
    exporter.detach()
    assert set(selected) == {0, 3}
    assert set(cloned) == {0, 3}


def test_differences_are_made_only_when_updates_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants the gradients of one module gets no snapshot of any weight."""
    training, copied = Training.new(), []
    exporter = tracer.Exporter()
    exporter.set_model(training.model)
    exporter.set_optimizer(training.optimizer)
    exporter.message_bus.register(tracer.CallbackSubscriber("weight_gradients", lambda *_: None, modules="fc"))
    select = Capture.select
    monkeypatch.setattr(Capture, "select", lambda self, kind, *rest: copied.append(kind) or select(self, kind, *rest))
    training.run()
    exporter.detach()
    assert copied == ["weight_gradients"] * EPOCHS * BATCHES
