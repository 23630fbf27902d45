"""The part of a trace that this process writes: its place among processes, its header and notes, and its writer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from tracer.errors import CaptureError, plain
from tracer.format.declarations import declaration
from tracer.format.journal import Column
from tracer.format.names import part_name
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.messaging.receiver import describe
from tracer.observing.exporter import Exporter
from tracer.recording.budget import Budget, already_spent
from tracer.recording.options import Options
from tracer.stores.locations import Location
from tracer.stores.opening import exists
from tracer.trace.claiming import OF_SCRIPT, Process, claim, of_launch, refuse_here, run_id_of, there, this_process
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter


@dataclass(frozen=True)
class Member:
    """A process of the family.

    Attributes
    ----------
    number : int
        0 for the script itself, 1, 2 and so on for the processes that it starts.
    name : str
        Names the family: all its members share it.
    """

    number: int = 0
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def child(self, number: int) -> Member:
        """The member that the script starts as its `number`-th process."""
        return replace(self, number=number)

    def process(self) -> Process:
        """The rank that torch.distributed or its launcher gives this process, else `number`."""
        here = this_process()
        if here.size == 1:
            return Process(self.number, 1, OF_SCRIPT + self.name)
        return here if self.number == 0 else replace(here, launch=OF_SCRIPT + self.name)

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Keep other members from beginning their parts of the trace inside this context."""
        with open(self._lock, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases the lock
            yield

    def end(self) -> None:
        """Remove the lock file of `beginning`, once all members have ended."""
        with contextlib.suppress(OSError):
            os.remove(self._lock)

    @property
    def _lock(self) -> str:
        return os.path.join(tempfile.gettempdir(), f"trace-{self.name}.lock")


NO_EPOCHS = (
    "no epoch was seen to end, so all steps are of one: run.epoch_finished() ends an epoch; under `trace record` "
    "a DataLoader does so that feeds the training and comes to its end"
)


def header(exporter: Exporter, options: Options) -> dict[str, Any]:
    """The header of a trace as JSON: the facts about a run that are known before its first message."""
    models, optimizers = exporter.parts.models, exporter.parts.optimizers.all
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    for package in ("tracereel", "zarr", "h5py"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "versions": versions,
        "threads": torch.get_num_threads(),
        **({"argv": list(sys.argv)} if options.command else {}),
        **({} if options.name is None else {"name": options.name}),
        **({"tags": [*options.tags]} if options.tags else {}),
        **({} if options.config is None else {"config": options.config}),
        "seeds": dict(options.seeds) if options.seeds is not None else {"torch": torch.initial_seed()},
        "capture": [capture.describe() for capture in exporter.captures],
        **({"flight": options.flight.describe()} if options.flight is not None else {}),
        "kinds": sorted(KINDS),
        "model": models.structure(),
        "models": models.summaries(optimizers),
        "optimizers": [
            {"class": type(optimizer).__name__, "trains": models.trained_by(optimizer)} for optimizer in optimizers
        ],
    }


def notes(exporter: Exporter) -> Iterator[Mapping[str, Any]]:
    """The notes at the end of a trace as JSON: problems and gaps in how the run was observed."""
    parts, steps = exporter.parts, exporter.steps_seen
    for problem in exporter.problems:
        yield {"problem": {**problem, "why": plain(problem["why"])}}
    for overflow in parts.publisher.overflows.told():
        yield {"overflowed": overflow}
    for receiver, error in exporter.message_bus.failures:
        why = plain(f"{type(error).__name__}: {error}")
        yield {"problem": {"what": f"subscriber {describe(receiver)}", "why": why, "count": 1}}
    if len(parts.losses.all) == 1 and not parts.losses.seen and steps:
        yield {"problem": {"what": "loss", "why": "it was never called by the name it was given by", "count": 1}}
    if steps > 1 and not parts.steps.epochs.seen:
        yield {"epochs": NO_EPOCHS}
    if exporter.unended is not None:
        yield {"unended": exporter.unended}
    silent = exporter.silent
    if silent:
        yield {"silent": silent}


_COUNTING = frozenset(
    {
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SparseAdam"),
    }
)
"""Optimizers of torch.optim that count their steps."""


def _steps_counted(optimizers: Iterable[Optimizer]) -> int | None:
    """How many steps the last optimizer has taken, over all restarts; None if it does not count them."""
    last = [*optimizers][-1:]
    if not last:
        return None
    counts = [int(state["step"]) for state in last[0].state.values() if isinstance(state, Mapping) and "step" in state]
    if counts:
        return max(counts)
    return 0 if type(last[0]).__name__ in _COUNTING and not last[0].state else None


def go_on(path: Location, rank: int, options: Options, exporter: Exporter) -> None:
    """Let an exporter count on from where the earlier attempts in the trace at `path` ended.

    Raises
    ------
    CaptureError
        If the step is unknown.
    TraceError
        If the trace cannot be read.
    """
    step = options.first_step if options.first_step is not None else _steps_counted(exporter.parts.optimizers.all)
    if step is None:
        raise CaptureError(
            f"{path} cannot be resumed, because the optimizer does not count its steps; say with first_step= "
            "(--first-step) which global step the checkpoint goes on with"
        )
    with TraceReader(path) as trace:
        # only training: an evaluation after an epoch's last step has the next step's number, but the old epoch
        training = [stream for stream in trace.streams if stream.tag == DEFAULT_TAG and stream.count]
        # other ranks tell the step if this rank has no messages
        mine = [one.id for one in training if one.rank == rank] or [one.id for one in training]
        ended = [stream.id for stream in trace.streams if stream.kind == "epoch_finished"]
        train_step, epoch = _counted(_last_rows(trace, mine, step), step, ended)
    if options.first_epoch is not None and options.first_epoch != epoch:
        train_step, epoch = 0, options.first_epoch
    exporter.start_at(step, train_step, epoch)


def _last_rows(trace: TraceReader, streams: Sequence[int], step: int) -> NDArray[np.int64]:
    """The last rows of some streams up to a step. The window of steps doubles until it has rows, to read few others."""
    steps = 1
    while True:
        first = max(0, step + 1 - steps)
        journal = trace.within(first, step + 1).journal
        journal = journal[np.isin(journal[:, Column.STREAM], streams) & (journal[:, Column.GLOBAL_STEP] <= step)]
        if not first or (journal[:, Column.GLOBAL_STEP] >= first).any():
            return journal
        steps *= 2


def _counted(journal: NDArray[np.int64], step: int, ended: Sequence[int]) -> tuple[int, int]:
    """The train step and the epoch of a global step, which may be the step after the journal's last.

    Parameters
    ----------
    journal : (messages, columns) array
        Rows of the training and of ends of epochs, up to this step.
    step : int
        The global step.
    ended : sequence of int
        The streams of the messages that end an epoch.
    """
    if not len(journal):
        return 0, 0
    numbers = journal[:, Column.GLOBAL_STEP]
    over = np.isin(journal[:, Column.STREAM], ended)
    # the step's own rows; the end of its epoch only if the step has no others
    for found in (journal[(numbers == step) & ~over], journal[(numbers == step) & over]):
        if len(found):
            return int(found[-1, Column.TRAIN_STEP]), int(found[-1, Column.EPOCH])
    last = journal[numbers == numbers.max()][-1]
    number, train_step, epoch = (int(last[one]) for one in (Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH))
    if (journal[over, Column.EPOCH] == epoch).any():
        return step - number - 1, epoch + 1
    return train_step + step - number, epoch


class OwnPart:
    """The part of a trace that this process writes.

    The rank is looked up again when the part begins and when its writer is made, because a script may get its rank only
    when its training begins.

    Parameters
    ----------
    path : Location
        The trace.
    exporter : Exporter
        Observes the training. It is given the rank, and the step at which a resumed training continues.
    options : Options
    member : Member, optional
        This process's place among the processes of a script.

    Attributes
    ----------
    budget : Budget or None
        The share of ``max_bytes`` or ``stop_at_bytes`` that this part may take.

    Raises
    ------
    CaptureError
        If the options name ranks that the run does not have.
    """

    def __init__(self, path: Location, exporter: Exporter, options: Options, member: Member | None = None) -> None:
        self._path = path
        self._exporter = exporter
        self._options = options
        self._member = member
        self._bound = options.max_bytes if options.stop_at_bytes is None else options.stop_at_bytes
        self.budget = None if self._bound is None else Budget(self._bound, thins=options.max_bytes is not None)
        self._find_place()

    @property
    def is_recorded(self) -> bool:
        """Whether the options let this rank be recorded."""
        return self._process.rank in self._recorded

    def begin(self) -> None:
        """If the recording is resumed, count on from where the earlier attempt ended.

        Raises
        ------
        CaptureError
            If the step is unknown, or this process cannot have a share of the bound.
        TraceError
            If the trace cannot be read.
        """
        self._settle()
        options = self._options
        if not options.resume:
            return
        if any(one.began for one in there(self._path, self._process)):
            go_on(self._path, self._process.rank, options, self._exporter)
        elif options.first_step is not None:  # no earlier attempt has a message, but the user gives the step
            self._exporter.start_at(options.first_step, 0, options.first_epoch or 0)

    def make_writer(self) -> TraceWriter:
        """Claim the part, and create it."""
        self._settle()
        with contextlib.nullcontext() if self._member is None else self._member.beginning():
            return self._make_writer()

    def _find_place(self) -> None:
        """Find the rank of this process, and the recorded ranks that this process knows of."""
        process = this_process() if self._member is None else self._member.process()
        if process.related and process.size == 1:  # the number of other processes is unknown
            recorded = [process.rank]
        else:
            recorded = sorted(set(range(process.size) if self._options.ranks is None else self._options.ranks))
            if not recorded or not all(type(one) is int and 0 <= one < process.size for one in recorded):
                raise CaptureError(f"ranks are some of 0 to {process.size - 1}, the ranks of this run, not {recorded}")
        self._process: Process = process
        self._recorded: list[int] = recorded
        self._exporter.parts.publisher.rank = process.rank
        self._exporter.parts.steps.ranks.recorded = recorded if self._options.replicated == "once" else None

    def _settle(self) -> None:
        """Find the rank, and this rank's share of the bound."""
        self._find_place()
        if self.budget is not None and self._bound is not None:
            if self._recorded != [0] and len(self._recorded) == 1 and self._process.related:
                raise CaptureError(
                    f"processes that know nothing of each other cannot share {self.budget.name}, so only the script "
                    "that starts them is recorded"
                )
            self.budget.max_bytes = max(1, self._bound // len(self._recorded))

    def _make_writer(self) -> TraceWriter:
        path, process, options = self._path, self._process, self._options
        alone = self._recorded == [0] and not (process.related and of_launch(path, process))
        attempt, run_id = 0, run_id_of(path, process) if process.related else None
        if options.resume or not alone:
            refuse_here(path, process.rank)
            attempt, run_id = claim(path, process, self._recorded, overwrite=options.overwrite, resume=options.resume)
        # without other processes and without remains of an earlier attempt, the part is the whole trace
        whole = alone and not attempt and not (options.resume and exists(path))
        about = header(self._exporter, options)
        if self.budget is not None:
            self.budget.spent += len(declaration("header", about))
            self.budget.spent += already_spent(path, process.rank) if attempt else 0
        return TraceWriter(
            path,
            header=about | self._describe(attempt, run_id) | {"recording": options.describe()},
            overwrite=options.overwrite and whole,
            part=None if whole else part_name(process.rank, attempt),
            commit_steps=options.commit_steps,
            commit_seconds=options.commit_seconds,
            durable=options.durable,
            compression=options.compression,
        )

    def _describe(self, attempt: int, run_id: str | None) -> dict[str, Any]:
        """The header's entries about this part's place among the parts, as JSON."""
        told: dict[str, Any] = {
            "ranks": self._recorded,
            "launch": self._process.launch,
            "attempt": attempt,
            "first_step": self._exporter.global_step,
        }
        if run_id is not None:
            told["run_id"] = run_id
        if self._options.reenacts is not None:
            told["reenacts"] = dict(self._options.reenacts)
        if self._options.certificate is not None:
            told["certificate"] = self._options.certificate.describe()
        return told
