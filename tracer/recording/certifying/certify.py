"""Does recording change the training? `certify` trains some steps with and without a recorder, and compares bits."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import CaptureError, TracerError, summary
from tracer.observing.exporter import Exporter
from tracer.observing.optimizers import steps_within
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.wrappers import unwrap
from tracer.recording import environment
from tracer.recording.recording import Run, record
from tracer.stores import location

STEPS: Final = 10
"""How many steps are compared unless it is said."""

Verdict = Literal["identical", "different", "nondeterministic", "failed"]
Train = Callable[[Callable[..., AbstractContextManager[Run]]], Any]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What came of comparing a training with and without a recorder.

    Attributes
    ----------
    verdict : str
        ``"identical"``: after every step all bits were the same. ``"different"``: the recorder changed something.
        ``"nondeterministic"``: two runs without a recorder differ, so nothing can be said. ``"failed"``: the training
        or the recording did not take place.
    reason : str
        The verdict as a sentence.
    steps : int
        How many steps were compared.
    step : int or None
        After which step (from 0) something differed first.
    differing : tuple of str
        What differed after that step: generators, parameters, buffers, optimizer states, modes.
    overhead : dict
        ``cpu_ratio`` and ``wall_ratio``: time of a step with a recorder over that without; of ``steps`` steps, of which
        ``recorded_steps`` were recorded, until all was written. ``average``: whether of the medians, or, if only some
        steps were recorded, of the means. ``bare_ratio``: the same of the two runs without a recorder, which says how
        noisy the machine is. ``bare_cpu_seconds`` and ``recorded_cpu_seconds``: of a step. The first step, in which
        everything is made, is left out, so with one step all this is empty.
    """

    verdict: Verdict
    reason: str
    steps: int = 0
    step: int | None = None
    differing: tuple[str, ...] = ()
    overhead: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether the recorder changed nothing."""
        return self.verdict == "identical"

    def describe(self) -> dict[str, Any]:
        """The same as JSON values, as they stand in the header of a trace."""
        return asdict(self) | {"differing": list(self.differing)}

    def __str__(self) -> str:
        told = f"{self.verdict}: {self.reason}"
        if self.overhead:
            told += (
                f"; CPU time ×{self.overhead['cpu_ratio']:.3f} over {self.overhead['steps']} steps, "
                f"{self.overhead['recorded_steps']} of them recorded "
                f"(two runs without a recorder: ×{self.overhead['bare_ratio']:.3f})"
            )
        return told


def certify(train: Train, *, steps: int = STEPS) -> Certificate:
    """Run the first steps of a training without, with and again without a recorder, and compare them bit for bit.

    All three begin with the same states of Python's, NumPy's and torch's generators (CPU and CUDA), which are put back
    afterwards. After every step the generators, parameters, buffers, states and settings of the optimizers, and modes
    are compared.

    Parameters
    ----------
    train : callable
        ``train(record)`` makes everything anew (model, optimizer, data) and trains. It begins the recording with
        ``with record(model, optimizer, …) as run:``, where `record` takes what `tracer.record` does after the path; in
        two of the three runs it records nothing. After `steps` steps the training is left with an exception.
    steps : int
        How many; a training that ends before is compared as far as it goes.

    Returns
    -------
    Certificate
        Give it to `tracer.record` of the real run, which keeps it in the trace.

    Raises
    ------
    CaptureError
        If `steps` is not a positive integer. What `train` raises is a verdict, not an error.

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
    if type(steps) is not int or steps < 1:
        raise CaptureError(f"steps is a whole number from 1, not {steps!r}")
    if environment.disabled():
        return Certificate(
            verdict="failed", reason=f"{environment.DISABLE} turns recording off, so nothing was compared"
        )
    before = generators()
    runs: list[Steps] = []
    try:
        for recorded in (False, True, False):
            set_generators(before)
            runs.append(_rehearse(train, steps, recorded))
    finally:
        set_generators(before)
    return compare(*runs, hint="; train must make everything anew, and draw from seeded generators only")


class Enough(BaseException):
    """Leaves a training that was run for its first steps only; no ``except Exception`` stops it."""


@dataclass
class Steps:
    """What a run was like after each of its steps.

    Attributes
    ----------
    hashes : list of dict
        Of everything that could have been changed, by what it is.
    cpu, wall : list of float
        Seconds of each step, without those of the comparison.
    recorded : list of bool
        Whether a capture takes something of it.
    error : str or None
        Why it ended, if it did so before its time.
    refused : bool
        Whether it is the recording that could not take place.
    """

    hashes: list[dict[str, str]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    recorded: list[bool] = field(default_factory=list)
    error: str | None = None
    refused: bool = False


class Stopwatch:
    """Notes each step of a run: its hashes and times.

    Parameters
    ----------
    limit : int
        After how many steps the run is left.
    hashed : callable
        Gives the hashes, or nothing if only times are wanted.
    run : callable
        Gives the recording, if there is one by now.
    """

    def __init__(self, limit: int, hashed: Callable[[], dict[str, str]], run: Callable[[], Run | None]) -> None:
        self.steps = Steps()
        self._limit = limit
        self._hashed = hashed
        self._run = run
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def step_over(self) -> bool:
        """Note a step; whether it was the last."""
        steps, run, number = self.steps, self._run(), len(self.steps.hashes)
        recorder = None if run is None else run.recorder
        if number >= self._limit:
            return True
        last = number + 1 == self._limit
        if recorder is not None and (number == 0 or last):  # what the first step left behind is not of the others
            recorder.wait_until_written()
        due = run is not None and any(one.due_step(run.exporter.global_step - 1) for one in run.exporter.captures)
        full = recorder is not None and recorder.budget is not None and recorder.budget.exhausted()
        entered, alone = self._now(), time.thread_time()
        steps.recorded.append(recorder is not None and due and not full)
        steps.cpu.append(entered[0] - self._began[0])
        steps.wall.append(entered[1] - self._began[1])
        steps.hashes.append(self._hashed())
        # the recorder's thread may have worked meanwhile: that is of the next step
        mine, left = time.thread_time() - alone, self._now()
        self._began = entered[0] + mine, left[1]
        return last


# -- a training in this process ---------------------------------------------------------------------------------------


def _rehearse(train: Train, limit: int, recorded: bool) -> Steps:
    """The first steps of a training."""
    with tempfile.TemporaryDirectory(prefix="trace-certify-") as folder:
        rehearsal = _Rehearsal(folder if recorded else None, limit)
        steps = rehearsal.stopwatch.steps
        try:
            train(rehearsal.record)
        except Enough:
            pass
        except SystemExit as error:  # as a script ends; it is not the caller that should
            if error.code not in (None, 0):
                steps.error = summary(error)
        except TracerError as error:
            steps.error, steps.refused = str(error), True
        except Exception as error:
            steps.error = summary(error)
        return steps


class _Rehearsal:
    """One of the runs: with a trace in a folder that is removed afterwards, or without."""

    def __init__(self, folder: str | None, limit: int) -> None:
        self._folder = folder
        self._models: dict[str, nn.Module] = {}
        self._optimizers: list[Optimizer] = []
        self._runs: list[Run] = []
        self.stopwatch = Stopwatch(limit, self._hashed, self._run)

    def _hashed(self) -> dict[str, str]:
        return fingerprint(self._models, self._optimizers)

    def _run(self) -> Run | None:
        return self._runs[-1] if self._runs else None

    @contextlib.contextmanager
    def record(
        self, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None = None, **settings: Any
    ) -> Iterator[Run]:
        """`tracer.record` without the path; or nothing that looks like it."""
        given = optimizer if optimizer is None or isinstance(optimizer, Optimizer) else tuple(optimizer)
        path = os.path.join(self._folder or "", f"run{len(self._runs)}.zarr")
        with self._recording(path, model, given, settings) as run:
            self._runs.append(run)
            self._models["" if not self._models else f"model{len(self._models)}"] = unwrap(model)
            optimizers = () if given is None else (given,) if isinstance(given, Optimizer) else given
            self._optimizers += optimizers
            handles: list[Any] = []
            pending = False
            if optimizers:
                # after the recorder's own hook, which was put on before
                handles = [optimizers[-1].register_step_post_hook(functools.partial(self._stepped, run))]
            elif given is None:
                passes = _Passes(run, self._over)
                handles = [unwrap(model).register_forward_pre_hook(passes)]
            else:
                step = run.step

                def stepped() -> None:
                    step()
                    self._over(run)

                vars(run)["step"] = stepped
            try:
                yield run
                pending = given is None and passes.open
            finally:
                for handle in handles:
                    handle.remove()
        if pending:
            self._over(run)

    def _recording(
        self, path: str, model: nn.Module, given: Optimizer | tuple[Optimizer, ...] | None, settings: Any
    ) -> AbstractContextManager[Run]:
        if self._folder is not None:
            recording = record(path, model, given, **settings)
            recording._path = location(path)  # whatever TRACE_PATH says
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
        last = self.stopwatch.step_over()
        if run.recorder is None:  # a loop may ask at which step it is
            run.exporter.start_at(len(self.stopwatch.steps.hashes), 0, 0)
        if last:
            raise Enough


class _Passes:
    """Without an optimizer a step lasts until the next training forward."""

    def __init__(self, run: Run, over: Callable[[Run], None]) -> None:
        self._run = run
        self._over = over
        self.open = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if recomputing() or not self._run.exporter.is_training_pass(module):
            return
        if self.open:
            self._over(self._run)
        self.open = True


# -- what is compared -------------------------------------------------------------------------------------------------


def generators() -> dict[str, Any]:
    """The states of all global random generators."""
    numpy_state = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state(), "cuda": cuda}


def set_generators(states: Mapping[str, Any]) -> None:
    """Put them back; those of CUDA devices that were not in use begin as torch begins them."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(torch.initial_seed())


def fingerprint(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Hashes of all that a recorder could change, by what it is: causes first.

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
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        found |= {
            f"tensor {place} that the {which} trains": _hash(one)
            for place, one in enumerate(trained)
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
    """Tell a hash a value: tensors and arrays by their bits, structures by their parts."""
    if isinstance(value, Tensor):
        tensor = value.detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor, what is here
        if not tensor.is_meta and not tensor.is_nested and not tensor.is_quantized:
            dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
            flat = dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            made.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
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
    else:  # a function, an object: its address says nothing of the training
        made.update(type(value).__qualname__.encode())


# -- the verdict ------------------------------------------------------------------------------------------------------


def compare(bare: Steps, recorded: Steps, again: Steps, *, hint: str = "") -> Certificate:
    """The verdict on a run with a recorder, between two without; `hint` says what may make those differ."""
    count = min(len(one.hashes) for one in (bare, recorded, again))
    overhead = _overhead(bare, recorded, again)
    noise, change = _first_difference(bare, again), _first_difference(bare, recorded)
    made = functools.partial(Certificate, steps=count)
    for one in (bare, again):
        if one.error is not None:
            return made(verdict="failed", reason=f"without a recorder the training failed {_when(one)}: {one.error}")
    if not bare.hashes:
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
        if recorded.error is not None and step == len(recorded.hashes):
            reason = f"with a recorder the training failed {_when(recorded)}, and without it did not: {recorded.error}"
        else:
            reason = f"with a recorder, after step {step} there differs {_listed(names)}"
        return made(verdict="different", reason=reason, step=step, differing=names, overhead=overhead)
    reason = f"after each of {count} steps all bits were the same with and without a recorder"
    if count == 1:
        reason = "after the first step all bits were the same with and without a recorder"
    return made(verdict="identical", reason=reason, overhead=overhead)


def _when(steps: Steps) -> str:
    return f"after step {len(steps.hashes) - 1}" if steps.hashes else "before the end of its first step"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _first_difference(one: Steps, other: Steps) -> tuple[int, tuple[str, ...]] | None:
    """After which step two runs differ first, and in what."""
    for step, (a, b) in enumerate(zip(one.hashes, other.hashes, strict=False)):
        if a != b:
            return step, tuple(name for name in {**a, **b} if a.get(name) != b.get(name)) or ("their order",)
    if len(one.hashes) != len(other.hashes):
        return min(len(one.hashes), len(other.hashes)), ("the number of steps",)
    return None


def _overhead(bare: Steps, recorded: Steps, again: Steps) -> dict[str, Any]:
    """How much longer a step takes; nothing where there are no two steps of each run."""
    if min(len(one.cpu) for one in (bare, recorded, again)) < 2:
        return {}
    among = recorded.recorded[1:]
    # where only some steps are recorded, a median would leave out what they cost
    average = statistics.median if all(among) or not any(among) else statistics.mean
    without, with_recorder = average([*bare.cpu[1:], *again.cpu[1:]]), average(recorded.cpu[1:])
    wall = average([*bare.wall[1:], *again.wall[1:]]), average(recorded.wall[1:])
    both = average(bare.cpu[1:]), average(again.cpu[1:])
    if min(without, with_recorder, *wall, *both) <= 0:  # steps shorter than the clock tells
        return {}
    return {
        "cpu_ratio": with_recorder / without,
        "wall_ratio": wall[1] / wall[0],
        "bare_ratio": max(both) / min(both),
        "bare_cpu_seconds": without,
        "recorded_cpu_seconds": with_recorder,
        "average": average.__name__,
        "steps": len(among),
        "recorded_steps": sum(among),
    }
