"""A callback that records what a Hugging Face trainer trains: ``Trainer(…, callbacks=[TraceCallback("run.zarr")])``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tracer.integrations.recording import Recording, require
from tracer.observing.pytorch.hanging import Hanging, after_forward
from tracer.observing.pytorch.loss_functions import ModelLoss
from tracer.recording.run import Run
from tracer.stores.locations import Anywhere

try:
    from transformers import TrainerCallback
except ImportError as _error:
    TrainerCallback = object
    _missing: ImportError | None = _error
else:
    _missing = None


class TraceCallback(TrainerCallback):  # type: ignore[misc]  # without transformers a plain object that cannot be made
    """Records what ``trainer.train`` does; evaluations in it are tagged ``"eval"``.

    Steps and epochs are the trainer's; the batches of gradient accumulation are calls of one step. The loss is what the
    trainer calls ``backward`` on: with accumulation that is each batch's share. In an evaluation it is the one that the
    model returns. Outputs and labels are its ``logits`` and the ``labels`` it was given, which a causal language model
    shifts only inside. Where it returns no loss (with label smoothing, or a loss of one's own), ``loss=``, as for
    `tracer.record`, gives them.

    The trainer does not tell a callback that it was interrupted. The trace is then closed when the program ends, and
    says why; where the program goes on, `close` does so, or a ``with`` block::

        with TraceCallback("run.zarr") as callback:
            Trainer(model, args, …, callbacks=[callback]).train()

    Parameters
    ----------
    path : path or URL
        Of the trace.
    **options
        Of `tracer.record`: ``capture``, ``compression``, ``receivers``, … With ``resume=True`` a run that the trainer
        goes on with (``resume_from_checkpoint``) goes on in its trace.

    Raises
    ------
    TracerError
        If transformers is not installed.
    UnknownNameError
        If `tracer.record` has no such option.
    """

    def __init__(self, path: Anywhere, **options: Any) -> None:
        require("transformers", _missing)
        super().__init__()
        self._loss = ModelLoss() if "loss" not in options else None
        self._recording = Recording(path, {"loss": self._loss, **options})
        self._handle: Hanging | None = None
        self._epoch_over = False

    @property
    def run(self) -> Run:
        """The recording in progress, for `Run.log`, `Run.tag` and `Run.probe`; `CaptureError` if there is none."""
        return self._recording.run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, now that model, optimizer and counters are as they go on."""
        self._epoch_over = False
        optimizer = _inner(kwargs["optimizer"])
        self._unhook()
        self._recording.begin(kwargs["model"], [optimizer], state.global_step, int(state.epoch or 0))
        root = self.run.exporter.model
        if self._loss is not None and root is not None:
            self._handle = after_forward(root, _ModelHook(self._loss))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the epoch before."""
        self._end_epoch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the evaluation that comes now belong to the epoch."""
        self._epoch_over = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the trace."""
        self._end_epoch()
        self.close()

    def _end_epoch(self) -> None:
        over, self._epoch_over = self._epoch_over, False
        if over:
            self._recording.epoch_finished()

    def close(self, error: BaseException | None = None) -> None:
        """Close the trace of a training that did not end; closing twice is fine.

        Parameters
        ----------
        error : BaseException, optional
            Why it did not, for the trace's status.
        """
        self._unhook()
        self._recording.end(error)

    def _unhook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __enter__(self) -> TraceCallback:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.close(error)


class _ModelHook:
    """Tells what a model's own loss was; copies and pickles of the model are without it."""

    def __init__(self, loss: ModelLoss) -> None:
        self._loss = weakref.ref(loss)

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        loss, labels = self._loss(), kwargs.get("labels")
        if loss is not None and isinstance(output, Mapping) and isinstance(labels, Tensor):
            logits, value = output.get("logits"), output.get("loss")
            if isinstance(logits, Tensor) and isinstance(value, Tensor):
                loss(logits, labels, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # as the exporter's hooks: what is loaded needs no tracer
        return getattr, (contextlib.nullcontext(), "__exit__")


def _inner(optimizer: Any) -> Any:
    """The optimizer that takes the steps, inside accelerate's wrapper."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
