"""A callback that records a Hugging Face trainer: ``Trainer(…, callbacks=[TraceCallback("run.zarr")])``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tracer.integrations.recording import Recording, require
from tracer.observing.pytorch.hooks import Hanging, after_forward
from tracer.observing.pytorch.patches import ModelLoss
from tracer.recording.recording import Run
from tracer.stores.locations import Anywhere

try:
    from transformers import TrainerCallback
except ImportError as _error:
    TrainerCallback = object
    _missing: ImportError | None = _error
else:
    _missing = None


class TraceCallback(TrainerCallback):  # type: ignore[misc]  # without transformers a plain object that cannot be made
    """Records ``trainer.train``; its evaluations are tagged ``"eval"``.

    Steps and epochs are the trainer's; the batches of gradient accumulation are calls within a step. The loss is the
    tensor that the trainer calls ``backward`` on: with accumulation, each batch's share. In an evaluation the loss is
    the model's own. Outputs and labels are the model's ``logits`` and the ``labels`` it was given; a causal language
    model shifts labels only internally. If the model returns no loss (with label smoothing, or a custom loss), pass
    ``loss=`` as for `tracer.record`.

    The trainer does not tell a callback that it was interrupted. The trace is then closed when the program ends, and
    its status says why. If the program continues, call `close` or use a ``with`` block::

        with TraceCallback("run.zarr") as callback:
            Trainer(model, args, …, callbacks=[callback]).train()

    Parameters
    ----------
    path : path or URL
        The trace.
    **options
        Options of `tracer.record`: ``capture``, ``compression``, ``receivers``, … With ``resume=True``, a run that the
        trainer resumes (``resume_from_checkpoint``) continues its trace.

    Raises
    ------
    TracerError
        If transformers is not installed.
    UnknownNameError
        If an option is none of `tracer.record`.
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
        """Begin, now that model, optimizer and counters are final."""
        self._epoch_over = False
        optimizer = _inner(kwargs["optimizer"])
        self._unhook()
        self._recording.begin(kwargs["model"], [optimizer], state.global_step, int(state.epoch or 0))
        root = self.run.exporter.model
        if self._loss is not None and root is not None:
            self._handle = after_forward(root, _ModelHook(self._loss))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the previous epoch."""
        self._end_epoch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the epoch open for the evaluation that follows."""
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
            Why the training did not end, for the trace's status.
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
    """A forward hook that reports the model's own loss; copies and pickles of the model do not have it."""

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
        # like the exporter's hooks: a pickled model can be loaded without this package
        return getattr, (contextlib.nullcontext(), "__exit__")


def _inner(optimizer: Any) -> Any:
    """The optimizer that takes the steps, inside accelerate's wrapper."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
