"""A callback that records the training of a Hugging Face trainer: ``Trainer(…, callbacks=[TraceCallback("run.zarr")])``."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from tracer.errors import TracerError
from tracer.integrations.recording import Recording
from tracer.recorder import Run
from tracer.stores import Anywhere

try:
    from transformers import TrainerCallback
except ImportError as _error:
    TrainerCallback = object
    _missing: ImportError | None = _error
else:
    _missing = None


class TraceCallback(TrainerCallback):  # type: ignore[misc]  # without transformers a plain object that cannot be made
    """Records what ``trainer.train`` does; evaluations in it are tagged ``"eval"``.

    Steps and epochs are the trainer's; the batches of gradient accumulation are calls of one step. Loss and labels are
    those of the functions of ``torch.nn.functional`` that the model calls, as they are there: shifted and flattened in
    a language model. A loss of another kind can be recorded with ``callback.run.log("loss", value)``.

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
        if _missing is not None:
            raise TracerError(
                f"this callback needs transformers, which cannot be imported ({_missing}): "
                "pip install 'tracereel[transformers]'"
            )
        super().__init__()
        self._recording = Recording(path, options)
        self._epoch_over = False

    @property
    def run(self) -> Run:
        """The recording in progress, for `Run.log`, `Run.tag` and `Run.probe`; `CaptureError` if there is none."""
        return self._recording.run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, now that model, optimizer and counters are as they go on."""
        self._epoch_over = False
        optimizer = _inner(kwargs["optimizer"])
        self._recording.begin(kwargs["model"], [optimizer], state.global_step, int(state.epoch or 0))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the epoch before."""
        self._end_epoch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the evaluation that comes now belong to the epoch."""
        self._epoch_over = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the trace."""
        self._end_epoch()
        self._recording.end()

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
        self._recording.end(error)

    def __enter__(self) -> TraceCallback:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.close(error)


def _inner(optimizer: Any) -> Any:
    """The optimizer that takes the steps, inside accelerate's wrapper."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
