"""The Lightning callback, with Lightning itself: counters, tags, losses, exceptions, checkpoints."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tracer
from tracer.errors import CaptureError, TraceExistsError, UnknownNameError
from tracer.integrations.lightning import TraceCallback, TraceLogger

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls deprecated parts of others when it is imported
    pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install 'tracereel[lightning]'")

# its advice on loaders and loggers is no concern of ours; our own warnings are errors
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error::RuntimeWarning")]


class Classifier(pl.LightningModule):  # type: ignore[misc]
    """A tiny classifier that remembers what its losses and labels were."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(5, 3))
        self.fail_at, self.error = fail_at, error
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.global_step == self.fail_at:
            raise self.error("as the test wants it")
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.seen.append((loss.detach().clone(), batch[1]))
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class OwnLoss(Classifier):
    """Its loss is no function of torch's, and its forward is not called."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = (self.net(batch[0]).logsumexp(1) - self.net(batch[0])[:, 0]).mean()
        self.seen.append((loss.detach().clone(), batch[1]))
        return loss


class Parts(Classifier):
    """Makes its loss of the sum, or of the datapoints' losses, that torch gives; remembers what is differentiated."""

    def __init__(self, reduction: str = "sum") -> None:
        super().__init__()
        self.reduction = reduction
        self.differentiated: list[Tensor] = []

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction=self.reduction)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        part = self.loss_of(batch)
        return part.sum() / 7 + self.net[0].weight.square().sum() if part.ndim else part / 7

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.seen.append((self.loss_of(batch), batch[1]))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.differentiated.append(loss.detach().clone())
        loss.backward(*args, **kwargs)


class Duel(Classifier):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[3].parameters(), lr=0.1)]


def loader() -> DataLoader[Any]:
    """Five batches, the last of them smaller, always the same."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(18, 6, generator=generator), torch.randint(0, 3, (18,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def trainer(*callbacks: Any, **options: Any) -> Any:
    """A silent trainer of two epochs."""
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet = {"enable_checkpointing": any(isinstance(one, pl.callbacks.ModelCheckpoint) for one in callbacks)}
    return pl.Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "callbacks": list(callbacks), **silent, **quiet, **options}
    )


def read(path: Path, *kinds: str) -> list[tracer.Message]:
    """The messages of a trace."""
    with tracer.open(path) as trace:
        return [one for one in trace.messages() if not kinds or one.kind in kinds]


def status(path: Path) -> str | None:
    """How the run of a trace ended."""
    with tracer.open(path) as trace:
        return trace.status


def at(message: tracer.Message) -> tuple[int, int, int, int]:
    """The counters of a message."""
    return message.global_step, message.train_step, message.epoch, message.call


def test_counters_tags_losses_and_labels(tmp_path: Path) -> None:
    """Two batches a step, the odd one alone; validation belongs to its epoch; the sanity check is not there."""
    model, path = Classifier(), tmp_path / "run.zarr"
    fit = trainer(TraceCallback(path, capture=tracer.Capture()), accumulate_grad_batches=2)
    fit.fit(model, loader(), loader())
    assert (fit.global_step, fit.current_epoch, status(path)) == (6, 2, "finished")
    losses = [one for one in read(path, "loss") if one.tag == "default"]
    counters = [(0, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (1, 1, 0, 1), (2, 2, 0, 0)]
    assert [at(one) for one in losses] == counters + [(step + 3, t, 1, call) for step, t, _, call in counters]
    assert all(torch.equal(one.data, loss / 2) for one, (loss, _) in zip(losses, model.seen, strict=True))
    terms = [one for one in read(path, "loss_terms") if one.tag == "default"]
    assert all(torch.equal(one.data, loss) for one, (loss, _) in zip(terms, model.seen, strict=True))
    labels = [one for one in read(path, "input_labels") if one.tag == "default"]
    assert all(torch.equal(one.data, there) for one, (_, there) in zip(labels, model.seen, strict=True))
    validation = [at(one) for one in read(path, "loss") if one.tag == "eval"]
    assert validation == [(3, 3, 0, call) for call in range(5)] + [(6, 3, 1, call) for call in range(5)]
    events = read(path, "epoch_started", "epoch_finished")
    assert [(one.kind, one.epoch) for one in events] == [
        ("epoch_started", 0), ("epoch_finished", 0), ("epoch_started", 1), ("epoch_finished", 1),
    ]  # fmt: skip
    assert [one.module for one in read(path, "weights") if one.global_step == 5] == ["net.0", "net.3"]
    assert len(read(path, "weight_gradients")) == len(read(path, "weight_updates")) == 12
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_what_becomes_of_a_sum_is_the_loss(tmp_path: Path, reduction: str, scale: float | None) -> None:
    """Each micro-batch's loss is what Lightning differentiates, without its GradScaler.

    A validation's is the sum, as that of the training is a multiple of it; what is weighted is only a term.
    """
    model, path = Parts(reduction), tmp_path / "run.zarr"
    plugins = []
    if scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
    options = {"accumulate_grad_batches": 2, "max_epochs": 1, "num_sanity_val_steps": 0, "plugins": plugins}
    trainer(TraceCallback(path, capture=tracer.Capture()), **options).fit(model, loader(), loader())
    losses = [one for one in read(path, "loss") if one.tag == "default"]
    assert [at(one) for one in losses] == [(0, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (1, 1, 0, 1), (2, 2, 0, 0)]
    for one, loss in zip(losses, model.differentiated, strict=True):
        assert torch.equal(one.data, loss if scale is None else loss / scale)
    assert [len(one.data) for one in read(path, "input_labels")[:5]] == [4, 4, 4, 4, 2]
    validation = [one.data for one in read(path, "loss_terms") if one.tag == "eval"]
    assert all(map(torch.equal, validation, [loss for loss, _ in model.seen]))
    assert len(validation) == 5
    assert len([one for one in read(path, "loss") if one.tag == "eval"]) == (5 if reduction == "sum" else 0)


def test_a_loss_of_ones_own_is_recorded_after_a_validation(tmp_path: Path) -> None:
    """That the validation called a function of torch's says nothing of the training's loss; nor does a scale."""
    model, path = OwnLoss(), tmp_path / "run.zarr"
    precision = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    trainer(TraceCallback(path, capture=tracer.Capture()), val_check_interval=1, plugins=[precision]).fit(
        model, loader(), loader()
    )
    losses = [one for one in read(path, "loss") if one.tag == "default"]
    assert [at(one)[0] for one in losses] == list(range(10))
    assert all(torch.equal(one.data, loss) for one, (loss, _) in zip(losses, model.seen, strict=True))


@pytest.mark.parametrize("kind", [Classifier, OwnLoss, Duel, Parts])
def test_training_is_the_same(tmp_path: Path, kind: type[Classifier]) -> None:
    """Weights are bit-equal with and without the callback."""

    def weights(*callbacks: Any) -> list[Tensor]:
        torch.manual_seed(1)
        model = kind()
        trainer(*callbacks).fit(model, loader(), loader())
        return [one.detach() for one in model.parameters()]

    assert all(map(torch.equal, weights(), weights(TraceCallback(tmp_path / "run.zarr", capture=tracer.Capture()))))


def test_a_loss_of_ones_own_and_a_module(tmp_path: Path) -> None:
    """What Lightning takes the gradient of is the loss; the network may be a part of the LightningModule."""
    model, path = OwnLoss(), tmp_path / "run.h5"
    callback = TraceCallback(path, module="net", capture=tracer.Capture(kinds=["loss", "network_output"]))
    trainer(callback, limit_val_batches=0, max_epochs=1).fit(model, loader())
    losses = read(path, "loss")
    assert [at(one)[:3] for one in losses] == [(step, step, 0) for step in range(5)]
    assert all(torch.equal(one.data, loss) for one, (loss, _) in zip(losses, model.seen, strict=True))
    with pytest.raises(CaptureError, match="nothing is being recorded"):
        _ = callback.run


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exceptions_close_the_trace(tmp_path: Path, error: type[BaseException]) -> None:
    """The trace has the steps before, and says what ended it."""
    model, path = Classifier(fail_at=3, error=error), tmp_path / "run.zarr"
    before = signal.getsignal(signal.SIGINT)
    try:
        # after Ctrl-C, Lightning shuts down and leaves the program
        with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
            trainer(TraceCallback(path, capture=tracer.Capture())).fit(model, loader(), loader())
    finally:
        signal.signal(signal.SIGINT, before)
    assert status(path) == f"failed: {error.__name__}: as the test wants it"
    assert [one.global_step for one in read(path, "batch_finished")] == [0, 1, 2]
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize(("every", "fail_at"), [(2, 7), (2, 3), (5, 7)])
def test_resuming(tmp_path: Path, every: int, fail_at: int) -> None:
    """A run that goes on from a checkpoint, in an epoch or between two, is in the trace as one that never failed."""
    whole, path = tmp_path / "whole.zarr", tmp_path / "run.zarr"
    torch.manual_seed(1)
    first = Classifier()
    first.net[2].p = 0.0  # Lightning does not restore the random generators
    state = {name: value.clone() for name, value in first.state_dict().items()}
    trainer(TraceCallback(whole, capture=tracer.Capture())).fit(first, loader(), loader())

    def attempt(fail_at: int | None, checkpoint: Path | None) -> list[Tensor]:
        model = Classifier(fail_at=fail_at)
        model.load_state_dict(state)
        model.net[2].p = 0.0
        keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=every, save_top_k=1)
        trainer(TraceCallback(path, resume=True, capture=tracer.Capture()), keep).fit(
            model, loader(), loader(), ckpt_path=checkpoint
        )
        return [loss for loss, _ in model.seen]

    with pytest.raises(ValueError, match="as the test wants it"):
        attempt(fail_at, None)
    found = sorted(tmp_path.glob("*.ckpt"), key=lambda one: one.stat().st_mtime)[-1]
    again = attempt(None, found)
    for kind in ("weights", "weight_gradients", "loss"):
        expected = [one for one in read(whole, kind) if one.tag == "default"]
        resumed = [one for one in read(path, kind) if one.tag == "default"]
        assert [(at(one), one.key) for one in resumed] == [(at(one), one.key) for one in expected]
        # in the middle of an epoch, Lightning begins anew with the first batch of the loader
        same = len(expected) if every == 5 else sum(one.global_step < every for one in expected)
        assert all(torch.equal(a.data, b.data) for a, b in zip(resumed[:same], expected[:same], strict=True))
        if kind == "loss":
            recorded = [one.data for one in resumed[-len(again) :]]
            assert all(map(torch.equal, recorded, again))
    epochs = [(one.kind, one.epoch) for one in read(path, "epoch_started", "epoch_finished")]
    assert epochs == [(one.kind, one.epoch) for one in read(whole, "epoch_started", "epoch_finished")]


def test_two_optimizers_resume_at_the_recorders_step(tmp_path: Path) -> None:
    """Lightning counts a step for each optimizer, a trace a step for all; the checkpoint says which step comes next."""
    path = tmp_path / "run.zarr"
    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="last")
    first = trainer(TraceCallback(path, capture=tracer.Capture()), keep, max_epochs=1)
    first.fit(Duel(), loader(), loader())
    assert first.global_step == 10
    second = trainer(TraceCallback(path, resume=True, capture=tracer.Capture()), max_epochs=2)
    second.fit(Duel(), loader(), loader(), ckpt_path=tmp_path / "last.ckpt")
    finished = [(one.global_step, one.train_step, one.epoch) for one in read(path, "batch_finished")]
    assert finished == [(step, step % 5, step // 5) for step in range(10)]


@pytest.mark.parametrize("fail_at", [None, 3, 7])
def test_two_optimizers_resume_from_a_checkpoint_written_afterwards(tmp_path: Path, fail_at: int | None) -> None:
    """The callback knows its step also when `fit` has ended or failed: no step is left out, none comes twice."""
    path, checkpoint = tmp_path / "run.zarr", tmp_path / "after.ckpt"

    class Fails(Duel):
        def training_step(self, batch: list[Tensor], index: int) -> None:
            if fail_at is not None and self.trainer.fit_loop.total_batch_idx == fail_at:
                raise ValueError("as the test wants it")
            super().training_step(batch, index)

    first = trainer(TraceCallback(path, capture=tracer.Capture()), max_epochs=2 if fail_at else 1)
    if fail_at is None:
        first.fit(Fails(), loader())
    else:
        with pytest.raises(ValueError, match="as the test wants it"):
            first.fit(Fails(), loader())
    done = fail_at or 5
    assert first.global_step == 2 * done  # one for each optimizer
    first.save_checkpoint(checkpoint)
    # one that is made of it without training keeps the step, too
    for _ in range(2):
        second = trainer(TraceCallback(path, resume=True, capture=tracer.Capture()), max_epochs=3)
        second.fit(Duel(), loader(), ckpt_path=checkpoint)
    finished = [one.global_step for one in read(path, "batch_finished")]
    assert finished == list(range(second.global_step // 2))


def test_two_optimizers_go_on_in_one_program(tmp_path: Path) -> None:
    """`fit` is called again with the same callback: from where it ended, or, with another trainer, from the start."""
    path = tmp_path / "run.zarr"
    callback = TraceCallback(path, resume=True, capture=tracer.Capture())
    model = Duel()
    first = trainer(callback, max_epochs=1)
    first.fit(model, loader())
    first.fit_loop.max_epochs = 2
    first.fit(model, loader())
    assert [one.global_step for one in read(path, "batch_finished")] == list(range(10))
    fresh = tmp_path / "fresh.zarr"
    callback = TraceCallback(fresh, overwrite=True, capture=tracer.Capture())
    for _ in range(2):
        trainer(callback, max_epochs=1).fit(Duel(), loader())
        assert [one.global_step for one in read(fresh, "batch_finished")] == list(range(5))


def test_a_new_trace_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """It has the trainer's counters, too."""
    path = tmp_path / "run.zarr"
    first = trainer(max_epochs=1)
    first.fit(Classifier(), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    trainer(TraceCallback(path, capture=tracer.Capture()), max_epochs=2).fit(
        Classifier(), loader(), ckpt_path=tmp_path / "first.ckpt"
    )
    finished = [(one.global_step, one.train_step, one.epoch) for one in read(path, "batch_finished")]
    assert finished == [(5 + step, step, 1) for step in range(5)]


def test_a_compiled_model_has_its_own_names(tmp_path: Path) -> None:
    """The wrapper is looked through."""
    path = tmp_path / "run.zarr"
    model = torch.compile(Classifier(), backend="eager", disable=True)
    trainer(TraceCallback(path, capture=tracer.Capture()), max_epochs=1).fit(model, loader())
    assert {one.module for one in read(path, "weights")} == {"net.0", "net.3"}


def test_mistakes(tmp_path: Path) -> None:
    """Mistakes end before the first step, in one sentence."""
    with pytest.raises(UnknownNameError, match="no option of a trace callback 'captures'; did you mean 'capture'"):
        TraceCallback(tmp_path / "run.zarr", captures=[])
    with pytest.raises(UnknownNameError, match="no option of a trace callback 'first_step'"):
        TraceCallback(tmp_path / "run.zarr", first_step=3)
    with pytest.raises(CaptureError, match="Classifier has no module 'nett'; its children are net"):
        trainer(TraceCallback(tmp_path / "run.zarr", module="nett", capture=tracer.Capture())).fit(
            Classifier(), loader()
        )
    (tmp_path / "run.zarr").mkdir()
    (tmp_path / "run.zarr" / "something").touch()
    with pytest.raises(TraceExistsError):
        trainer(TraceCallback(tmp_path / "run.zarr", capture=tracer.Capture())).fit(Classifier(), loader())


class Logging(Classifier):
    """Logs its loss under two names, and has hyperparameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log_dict({"mine": loss, "loss": loss})
        self.log("by_epoch", loss, on_step=False, on_epoch=True)
        return loss


def test_what_a_module_logs_is_in_the_trace(tmp_path: Path) -> None:
    """Each number at the step that it is of; a name of the trace's own is another; hyperparameters are settings."""
    model, path = Logging(width=5), tmp_path / "run.zarr"
    callback = TraceCallback(path, capture=tracer.Capture(), config={"lr": 0.01})
    fit = trainer(callback, logger=TraceLogger(callback), log_every_n_steps=2)
    fit.fit(model, loader(), loader())
    losses = [float(loss) for loss, _ in model.seen]
    assert len(losses) == 10
    with tracer.open(path) as trace:
        assert trace.header["config"] == {"width": 5, "lr": 0.01}
        for kind in ("mine", "logged_loss"):
            found = {one.global_step: float(one.data) for one in trace.messages(kinds=kind)}
            assert found == pytest.approx({step: losses[step] for step in (1, 3, 5, 7, 9)})
        assert trace.array("loss")[1].tolist() == pytest.approx(losses)  # each once
        for kind in ("by_epoch", "val_loss"):
            assert [(one.global_step, one.epoch) for one in trace.messages(kinds=kind)] == [(4, 0), (9, 1)]
        sizes = [4, 4, 4, 4, 2]
        means = [sum(n * loss for n, loss in zip(sizes, losses[5 * k :], strict=False)) / 18 for k in range(2)]
        assert [float(one.data) for one in trace.messages(kinds="by_epoch")] == pytest.approx(means)
        assert "epoch" not in {stream.kind for stream in trace.streams}
    with pytest.warns(RuntimeWarning, match="while nothing is recorded") as told:
        for _ in range(2):
            fit.validate(model, loader(), verbose=False)
    assert len([one for one in told if "nothing is recorded" in str(one.message)]) == 1
