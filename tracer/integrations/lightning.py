"""Records the training of a Lightning trainer, ``Trainer(callbacks=[TraceCallback("run.zarr")])``, and what it logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracer.errors import CaptureError
from tracer.integrations.recording import Recording, Scalars, require
from tracer.recording.recording import Run
from tracer.stores.locations import Anywhere

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger
except ImportError as _error:
    Callback = Logger = object
    _missing: ImportError | None = _error
else:
    _missing = None


class TraceCallback(Callback):  # type: ignore[misc]  # without Lightning it is a plain object that cannot be made
    """Records ``trainer.fit``; its validation passes are tagged ``"eval"``.

    Steps and epochs are the trainer's: with gradient accumulation, the batches of a step are calls within it. With
    several optimizers the last optimizer ends a step, whereas Lightning counts a step for each. The sanity check before
    the training is not recorded. The loss is the tensor whose gradient Lightning takes: with accumulation, it is
    divided by the number of batches; the factor of a GradScaler is left out. Labels and loss terms are those of the
    functions of ``torch.nn.functional`` that the training step calls, itself or through a module of ``torch.nn``.

    Parameters
    ----------
    path : path or URL
        The trace.
    module : str
        The dotted path, in the LightningModule, of the network whose modules are observed. By default the whole
        LightningModule; its input and output are observed only if the training step calls ``self(...)``.
    **options
        Options of `tracer.record`: ``capture``, ``compression``, ``receivers``, … With ``resume=True``, a run that the
        trainer resumes (``ckpt_path``) continues its trace.

    Raises
    ------
    TracerError
        If Lightning is not installed.
    UnknownNameError
        If an option is none of `tracer.record`.
    """

    def __init__(self, path: Anywhere, *, module: str = "", **options: Any) -> None:
        require("lightning", _missing)
        super().__init__()
        self._module = module
        self._recording = Recording(path, options)
        # between recordings: the next step, and Lightning's count at the end of the last (None: from a checkpoint)
        self._next: tuple[int, int | None] | None = None

    @property
    def run(self) -> Run:
        """The recording in progress, for `Run.log`, `Run.tag` and `Run.probe`; `CaptureError` if there is none."""
        return self._recording.run

    @property
    def active(self) -> bool:
        """Whether a recording is in progress."""
        return self._recording.active

    def know_settings(self, settings: Any) -> None:
        """Have the header of the recording that begins next tell settings of the run, below those of ``config=``."""
        self._recording.know_settings(settings)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, now that models, optimizers and counters are final."""
        try:
            network = pl_module.get_submodule(self._module)
        except AttributeError as error:
            names = ", ".join(name for name, _ in pl_module.named_children()) or "none"
            raise CaptureError(
                f"{type(pl_module).__name__} has no module {self._module!r}; its children are {names}"
            ) from error
        step = trainer.global_step
        if self._next is not None and len(trainer.optimizers) > 1 and self._next[1] in (None, step):
            step = self._next[0]
        self._recording.begin(network, trainer.optimizers, step, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch, after its validation."""
        self._recording.epoch_finished()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the trace."""
        self._end(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the trace, with the exception as its status."""
        self._end(trainer, exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the trace of a training that ended in another way."""
        self._end(trainer)

    def _end(self, trainer: Any, error: BaseException | None = None) -> None:
        if self._recording.active:
            run = self.run
            try:
                self._recording.end(error)
            finally:
                self._next = run.global_step, trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """The next step, for Lightning's checkpoint; with several optimizers, it differs from Lightning's own count."""
        if self._recording.active:
            return {"global_step": self.run.global_step}
        return {} if self._next is None else {"global_step": self._next[0]}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Forget the earlier count; `load_state_dict` follows, if the checkpoint has a step."""
        self._next = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the step from a checkpoint."""
        step = state_dict.get("global_step")
        self._next = None if step is None else (step, None)


class TraceLogger(Logger):  # type: ignore[misc]  # without Lightning a plain object that cannot be made
    """Records what a LightningModule logs, in the trace of a `TraceCallback`, beside other loggers or alone::

        callback = TraceCallback("run.zarr")
        Trainer(callbacks=[callback], logger=[TraceLogger(callback), WandbLogger()])

    A number is a message of its name, at the step that has just ended; names that are kinds of the trace's own, such as
    ``loss``, get ``logged_`` before them. Lightning's own number ``epoch`` is left out, because each message has its
    epoch. Lightning logs the numbers of every ``log_every_n_steps``-th step. Hyperparameters
    (``save_hyperparameters``) become the run's ``config``. What is logged while nothing is recorded, such as in
    ``trainer.test``, is left out, with one warning.

    Parameters
    ----------
    callback : TraceCallback
        Of the same trainer.

    Raises
    ------
    TracerError
        If Lightning is not installed.
    """

    def __init__(self, callback: TraceCallback) -> None:
        require("lightning", _missing, "logger")
        super().__init__()
        self._callback = callback
        self._scalars = Scalars()

    name = version = ""
    """Checkpoints lie where they do without a logger."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record numbers."""
        told = {name: value for name, value in metrics.items() if name != "epoch"}
        if told:
            self._scalars.log(self._callback.run if self._callback.active else None, told)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Take settings for the header of the trace."""
        self._callback.know_settings(params)
