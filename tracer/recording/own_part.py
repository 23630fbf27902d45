"""`OwnPart`: the part of a trace that this process writes, from its place among the ranks to its writer."""

from __future__ import annotations

import contextlib
from typing import Any

from tracer.errors import CaptureError
from tracer.format.declarations import declaration
from tracer.format.names import part_name
from tracer.observing.exporter import Exporter
from tracer.recording.budget import Budget, already_spent
from tracer.recording.family import Member
from tracer.recording.header import header
from tracer.recording.options import Options
from tracer.recording.resuming import go_on
from tracer.stores.locations import Location
from tracer.stores.opening import exists
from tracer.trace.claiming import Process, claim, of_launch, refuse_here, run_id_of, there, this_process
from tracer.trace.writer import TraceWriter


class OwnPart:
    """The part of a trace that this process writes.

    Its rank is looked up again when it begins and when its writer is made: a script may have one only as it begins to
    train.

    Parameters
    ----------
    path : Location
        Of the trace.
    exporter : Exporter
        Observes the training. It is told the rank, and where a resumed training goes on.
    options : Options
    member : Member, optional
        Which of the processes of a script this is.

    Attributes
    ----------
    budget : Budget or None
        The share of ``max_bytes`` that this part may take.

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
        self.budget = None if options.max_bytes is None else Budget(options.max_bytes)
        self._find_place()

    @property
    def is_recorded(self) -> bool:
        """Whether the options let this rank be recorded."""
        return self._process.rank in self._recorded

    def begin(self) -> None:
        """Go on where an earlier attempt was left, if the recording is resumed.

        Raises
        ------
        CaptureError
            If the step cannot be told, or this process cannot have a share of ``max_bytes``.
        TraceError
            If the trace cannot be read.
        """
        self._settle()
        options = self._options
        if not options.resume:
            return
        if any(one.began for one in there(self._path, self._process)):
            go_on(self._path, self._process.rank, options, self._exporter)
        elif options.first_step is not None:  # all that is there is what a process left that was killed as it began
            self._exporter.start_at(options.first_step, 0, options.first_epoch or 0)

    def make_writer(self) -> TraceWriter:
        """Claim the part, and create it."""
        self._settle()
        with contextlib.nullcontext() if self._member is None else self._member.beginning():
            return self._make_writer()

    def _find_place(self) -> None:
        """Find the rank of this process, and the ranks that are recorded as far as it knows."""
        process = this_process() if self._member is None else self._member.process()
        if process.related and process.size == 1:  # how many others there will be is not known
            recorded = [process.rank]
        else:
            recorded = sorted(set(range(process.size) if self._options.ranks is None else self._options.ranks))
            if not recorded or not all(type(one) is int and 0 <= one < process.size for one in recorded):
                raise CaptureError(f"ranks are some of 0 to {process.size - 1}, the ranks of this run, not {recorded}")
        self._process: Process = process
        self._recorded: list[int] = recorded
        self._exporter.publisher.rank = process.rank
        self._exporter.ranks.recorded = recorded if self._options.replicated == "once" else None

    def _settle(self) -> None:
        """Find the place, and the share of ``max_bytes`` that goes with it."""
        self._find_place()
        if self.budget is not None and self._options.max_bytes is not None:
            if self._recorded != [0] and len(self._recorded) == 1 and self._process.related:
                raise CaptureError(
                    "processes that know nothing of each other cannot share max_bytes, so only the script that starts "
                    "them is recorded"
                )
            self.budget.max_bytes = max(1, self._options.max_bytes // len(self._recorded))

    def _make_writer(self) -> TraceWriter:
        path, process, options = self._path, self._process, self._options
        alone = self._recorded == [0] and not (process.related and of_launch(path, process))
        attempt, run_id = 0, run_id_of(path, process) if process.related else None
        if options.resume or not alone:
            refuse_here(path, process.rank)
            attempt, run_id = claim(path, process, self._recorded, overwrite=options.overwrite, resume=options.resume)
        # else others may make theirs, or something may be there that was left by a process that was killed as it began
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
        """What the header says of this part among the others, as JSON."""
        told: dict[str, Any] = {
            "ranks": self._recorded,
            "launch": self._process.launch,
            "attempt": attempt,
            "first_step": self._exporter.global_step,
        }
        if run_id is not None:
            told["run_id"] = run_id
        if self._options.certificate is not None:
            told["certificate"] = self._options.certificate.describe()
        return told
