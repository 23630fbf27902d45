"""`certify`: trains some steps with and without a recorder, and compares the bits."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import TracerError, summary
from tracer.observing.exporter import Exporter
from tracer.observing.guesses.optimizers import observable, steps_within
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.structure import unwrap
from tracer.observing.pytorch.tensors import bytes_of
from tracer.recording.checks import Whole
from tracer.recording.options import DISABLE, disabled
from tracer.recording.recording import Run, record
from tracer.stores.locations import location
from tracer.trace.header import Certificate


def generators() -> dict[str, Any]:
    """The states of all global random generators."""
    numpy_state = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state(), "cuda": cuda}


def set_generators(states: Mapping[str, Any]) -> None:
    """Restore the states of `generators`; CUDA devices that were not in use then are seeded as torch seeds them."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(torch.initial_seed())


def fingerprint(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Hashes of everything that a recorder could change, by name; causes, such as generators, come first.

    Examples
    --------
    >>> list(fingerprint({"": torch.nn.Linear(3, 2)}, []))[-3:]
    ['modes', "parameter 'weight'", "parameter 'bias'"]
    """
    states = generators()
    found = {f"random generator of {name}": _hash(states[name]) for name in ("python", "numpy", "torch")}
    found |= {f"random generator of cuda:{number}": _hash(state) for number, state in enumerate(states["cuda"])}
    names: dict[int, str] = {}
    found["modes"] = _hash([[one.training for one in walking.modules(model)] for model in models.values()])
    for prefix, model in models.items():
        for name, parameter in walking.named_parameters(model, prefix):
            names[id(parameter)] = name
            found[f"parameter {name!r}"] = _hash(parameter)
        found |= {f"buffer {name!r}": _hash(buffer) for name, buffer in walking.named_buffers(model, prefix)}
    for number, optimizer in enumerate(optimizers):
        which = "optimizer" if len(optimizers) == 1 else f"optimizer {number}"
        settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        found[f"settings of the {which}"] = _hash(settings)
        found |= {
            f"tensor {place} that the {which} trains": _hash(one)
            for place, one in enumerate(walking.trained(optimizer))
            if id(one) not in names
        }
        for place, (owner, state) in enumerate(optimizer.state.items()):
            name = names.get(id(owner), str(place))
            for key, value in state.items() if isinstance(state, Mapping) else ():
                found[f"{key} of {name!r} in the {which}"] = _hash(value)
    return found


def _hash(value: Any) -> str:
    made = hashlib.blake2b(digest_size=16)
    _feed(made, value)
    return made.hexdigest()


def _feed(made: Any, value: Any) -> None:
    """Update a hash with a value: tensors and arrays by their bits, structures by their parts."""
    if isinstance(value, Tensor):
        tensor = value.detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's local shard
        if not tensor.is_meta and not tensor.is_nested and not tensor.is_quantized:
            dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
            there = bytes_of(dense.resolve_conj().resolve_neg().cpu())
            made.update(there.numpy().data if len(there) else b"")
        made.update(f"{value.dtype}{tuple(tensor.shape)}".encode())
    elif isinstance(value, np.ndarray):
        made.update(np.ascontiguousarray(value).tobytes())
        made.update(f"{value.dtype}{value.shape}".encode())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            made.update(f"{key!r}:".encode() if isinstance(key, str | int) else b"key:")
            _feed(made, part)
    elif isinstance(value, tuple | list):
        made.update(f"[{len(value)}".encode())
        for part in value:
            _feed(made, part)
    elif isinstance(value, str | int | float | complex | bool | bytes | None):
        made.update(repr(value).encode())
    else:  # functions and other objects: by type only, because their repr may have an address
        made.update(type(value).__qualname__.encode())


class Enough(BaseException):
    """Ends a training after its first steps; a `BaseException`, so that no ``except Exception`` stops it."""


class Step(NamedTuple):
    """The state of a run after a step.

    Attributes
    ----------
    hashes : dict
        By name, the hashes of everything that could have changed.
    cpu, wall : float
        Seconds of the step, without hashing.
    recorded : bool
        Whether a capture takes something of the step.
    """

    hashes: dict[str, str]
    cpu: float
    wall: float
    recorded: bool


@dataclass
class RehearsedSteps:
    """The first steps of a run.

    Attributes
    ----------
    taken : list of Step
    error : str or None
        Why the run ended early, if it did.
    refused : bool
        Whether the recording, not the training, failed.
    """

    taken: list[Step] = field(default_factory=list)
    error: str | None = None
    refused: bool = False


class Rehearsal(ABC):
    """The first steps of a training, recorded or not: notes the state and the duration of each step.

    Parameters
    ----------
    limit : int
        The number of steps after which the training is ended.

    Attributes
    ----------
    steps : Steps
    recording : Run or None
        The recording, once it has begun.
    """

    def __init__(self, limit: int) -> None:
        self.steps = RehearsedSteps()
        self.recording: Run | None = None
        self._limit = limit
        self._began = self._now()

    @abstractmethod
    def hashed(self) -> dict[str, str]:
        """The hashes of everything that a recorder could change; empty if only times are wanted."""

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def step_over(self) -> bool:
        """Note a step; returns whether it was the last."""
        run, number = self.recording, len(self.steps.taken)
        recorder = None if run is None else run.recorder
        if number >= self._limit:
            return True
        last = number + 1 == self._limit
        if recorder is not None and (number == 0 or last):  # writing the first step must not count for later steps
            recorder.wait_until_written()
        due = run is not None and any(
            capture.due_step(run.exporter.global_step - 1) for capture in run.exporter.captures
        )
        full = recorder is not None and recorder.budget is not None and recorder.budget.exhausted()
        entered, alone = self._now(), time.thread_time()
        cpu, wall = entered[0] - self._began[0], entered[1] - self._began[1]
        self.steps.taken.append(Step(self.hashed(), cpu, wall, recorder is not None and due and not full))
        # CPU time of the recorder's thread during the hashing counts for the next step
        mine, left = time.thread_time() - alone, self._now()
        self._began = entered[0] + mine, left[1]
        return last


def compare(bare: RehearsedSteps, recorded: RehearsedSteps, again: RehearsedSteps, *, hint: str = "") -> Certificate:
    """The verdict on a run with a recorder, and two without; `hint` says why these two may differ."""
    count = min(len(one.taken) for one in (bare, recorded, again))
    overhead = _overhead(bare, recorded, again)
    noise, change = _first_difference(bare, again), _first_difference(bare, recorded)
    made = functools.partial(Certificate, steps=count)
    for one in (bare, again):
        if one.error is not None:
            return made(verdict="failed", reason=f"without a recorder the training failed {_when(one)}: {one.error}")
    if not bare.taken:
        why = f": {recorded.error}" if recorded.error is not None else ""
        return made(verdict="failed", reason=f"no training step was seen{why}")
    if recorded.refused:
        return made(verdict="failed", reason=f"it could not be recorded: {recorded.error}")
    if noise is not None and (change is None or noise[0] <= change[0]):
        step, names = noise
        reason = f"two runs without a recorder differ after step {step} in {_listed(names)}{hint}"
        return made(verdict="nondeterministic", reason=reason, step=step, differing=names, overhead=overhead)
    if change is not None:
        step, names = change
        if recorded.error is not None and step == len(recorded.taken):
            reason = f"with a recorder the training failed {_when(recorded)}, and without it did not: {recorded.error}"
        else:
            reason = f"with a recorder, after step {step} there differs {_listed(names)}"
        return made(verdict="different", reason=reason, step=step, differing=names, overhead=overhead)
    reason = f"after each of {count} steps all bits were the same with and without a recorder"
    if count == 1:
        reason = "after the first step all bits were the same with and without a recorder"
    return made(verdict="identical", reason=reason, overhead=overhead)


def _when(steps: RehearsedSteps) -> str:
    return f"after step {len(steps.taken) - 1}" if steps.taken else "before the end of its first step"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _first_difference(one: RehearsedSteps, other: RehearsedSteps) -> tuple[int, tuple[str, ...]] | None:
    """The first step after which two runs differ, and the names of what differs; None if nothing does."""
    for number, (a, b) in enumerate(zip(one.taken, other.taken, strict=False)):
        if a.hashes != b.hashes:
            names = (name for name in {**a.hashes, **b.hashes} if a.hashes.get(name) != b.hashes.get(name))
            return number, tuple(names) or ("their order",)
    if len(one.taken) != len(other.taken):
        return min(len(one.taken), len(other.taken)), ("the number of steps",)
    return None


def _overhead(bare: RehearsedSteps, recorded: RehearsedSteps, again: RehearsedSteps) -> dict[str, Any]:
    """How much longer a recorded step takes; empty if a run has fewer than two steps."""
    if min(len(one.taken) for one in (bare, recorded, again)) < 2:
        return {}
    first, watched, second = bare.taken[1:], recorded.taken[1:], again.taken[1:]
    among = [one.recorded for one in watched]
    # if only some steps are recorded, a median would ignore their cost
    average = statistics.median if all(among) or not any(among) else statistics.mean

    def means(steps: Sequence[Step]) -> tuple[float, float]:
        return average([step.cpu for step in steps]), average([step.wall for step in steps])

    (without, wall_without), (with_recorder, wall_with) = means([*first, *second]), means(watched)
    both = means(first)[0], means(second)[0]
    if min(without, with_recorder, wall_without, wall_with, *both) <= 0:  # steps below the clock's resolution
        return {}
    return {
        "cpu_ratio": with_recorder / without,
        "wall_ratio": wall_with / wall_without,
        "bare_ratio": max(both) / min(both),
        "bare_cpu_seconds": without,
        "recorded_cpu_seconds": with_recorder,
        "average": average.__name__,
        "steps": len(among),
        "recorded_steps": sum(among),
    }


STEPS: Final = 10
"""The default number of steps to compare."""

Train = Callable[[Callable[..., AbstractContextManager[Run]]], Any]


def certify(train: Train, *, steps: int = STEPS) -> Certificate:
    """Run the first steps of a training without, with and again without a recorder, and compare them bit for bit.

    All three runs begin with the same states of Python's, NumPy's and torch's generators (CPU and CUDA), which are
    restored afterwards. After every step the generators, parameters, buffers, modes, and the optimizers' states and
    settings are compared.

    Parameters
    ----------
    train : callable
        ``train(record)`` creates model, optimizer and data, and trains. It begins the recording with
        ``with record(model, optimizer, …) as run:``; `record` takes the arguments of `tracer.record` without the path,
        and in two of the three runs records nothing. After `steps` steps an exception ends the training.
    steps : int
        The number of steps; a training that ends earlier is compared as far as it goes.

    Returns
    -------
    Certificate
        Pass it to `tracer.record` in the real run, which keeps it in the trace.

    Raises
    ------
    CaptureError
        If `steps` is not a positive integer. An exception from `train` becomes a verdict.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> def train(record):
    ...     model = torch.nn.Linear(3, 2)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with record(model, optimizer, capture=tracer.Capture(kinds=["weights"])):
    ...         for _ in range(100):
    ...             optimizer.zero_grad()
    ...             model(torch.randn(5, 3)).square().mean().backward()
    ...             optimizer.step()
    >>> certificate = tracer.certify(train, steps=4)
    >>> certificate.reason
    'after each of 4 steps all bits were the same with and without a recorder'
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> train(lambda *given, **more: tracer.record(path, *given, certificate=certificate, **more))
    >>> tracer.open(path).header["certificate"]["verdict"]
    'identical'
    """
    Whole()("steps", steps)
    if disabled():
        return Certificate(verdict="failed", reason=f"{DISABLE} turns recording off, so nothing was compared")
    before = generators()
    runs: list[RehearsedSteps] = []
    try:
        for recorded in (False, True, False):
            set_generators(before)
            runs.append(_rehearse(train, steps, recorded))
    finally:
        set_generators(before)
    return compare(*runs, hint="; train must make everything anew, and draw from seeded generators only")


# -- a training in this process ---------------------------------------------------------------------------------------


def _rehearse(train: Train, limit: int, recorded: bool) -> RehearsedSteps:
    """The first steps of a training."""
    with tempfile.TemporaryDirectory(prefix="trace-certify-") as folder:
        rehearsal = _OfFunction(folder if recorded else None, limit)
        steps = rehearsal.steps
        try:
            train(rehearsal.record)
        except Enough:
            pass
        except SystemExit as error:  # it ends the training, not the caller
            if error.code not in (None, 0):
                steps.error = summary(error)
        except TracerError as error:
            steps.error, steps.refused = str(error), True
        except Exception as error:
            steps.error = summary(error)
        return steps


class _OfFunction(Rehearsal):
    """A run of a training function, recorded into a temporary folder or, without a folder, not recorded."""

    def __init__(self, folder: str | None, limit: int) -> None:
        super().__init__(limit)
        self._folder = folder
        self._models: dict[str, nn.Module] = {}
        self._optimizers: list[Optimizer] = []

    def hashed(self) -> dict[str, str]:
        return fingerprint(self._models, self._optimizers)

    @contextlib.contextmanager
    def record(
        self, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None = None, **settings: Any
    ) -> Iterator[Run]:
        """`tracer.record` without the path; an unrecorded run gets a `Run` that does nothing."""
        optimizers = observable(optimizer)
        path = os.path.join(self._folder or "", f"run{len(self._models)}.zarr")
        with self._recording(path, model, None if optimizer is None else optimizers, settings) as run:
            self.recording = run
            self._models["" if not self._models else f"model{len(self._models)}"] = unwrap(model)
            self._optimizers += optimizers
            handles: list[Any] = []
            pending = False
            if optimizers:
                # called after the recorder's own hook, which was registered before
                handles = [optimizers[-1].register_step_post_hook(functools.partial(self._stepped, run))]
            elif optimizer is None:
                passes = _CertifiedPasses(run, self._over)
                handles = [unwrap(model).register_forward_pre_hook(passes)]
            else:
                step = run.step

                def stepped() -> None:
                    step()
                    self._over(run)

                vars(run)["step"] = stepped
            try:
                yield run
                pending = optimizer is None and passes.open
            finally:
                for handle in handles:
                    handle.remove()
        if pending:
            self._over(run)

    def _recording(
        self, path: str, model: nn.Module, given: tuple[Optimizer, ...] | None, settings: Any
    ) -> AbstractContextManager[Run]:
        if self._folder is not None:
            recording = record(path, model, given, **settings)
            recording.path = location(path)  # overrides TRACE_PATH
            return recording
        exporter = Exporter()
        exporter.detach()
        exporter.set_model(model)
        exporter.set_optimizer(given)
        return contextlib.nullcontext(Run(location(path), exporter, None))

    def _stepped(self, run: Run, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not steps_within(optimizer):
            self._over(run)

    def _over(self, run: Run) -> None:
        last = self.step_over()
        if run.recorder is None:  # the loop may read `run.global_step`
            run.exporter.start_at(len(self.steps.taken), 0, 0)
        if last:
            raise Enough


class _CertifiedPasses:
    """Ends steps without an optimizer: a step lasts until the next training forward."""

    def __init__(self, run: Run, over: Callable[[Run], None]) -> None:
        self._run = run
        self._over = over
        self.open = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if recomputing() or not self._run.exporter.parts.passes.is_training(module):
            return
        if self.open:
            self._over(self._run)
        self.open = True
