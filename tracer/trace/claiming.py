"""`claim`: whether a process may write its part of a trace, given the existing parts and their writers."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tracer.errors import TraceCorruptError, TraceError, TraceExistsError, TraceUnreadableError
from tracer.format.declarations import declarations
from tracer.format.names import check_root, declarations_name, part_of, rank_and_attempt
from tracer.format.process import process_start
from tracer.stores.locations import Anywhere, Location, Url, location
from tracer.stores.opening import blank, check_writable, exists, open_parts, refuse_part, remove_part, store_files
from tracer.stores.protocols import ReadStore
from tracer.stores.zarr.layout import WRITER
from tracer.trace.attempts import seconds
from tracer.trace.part import lines_to_the_break, lives

BEGINNING_SECONDS = 10.0
"""Seconds that a rank waits for other ranks to begin their parts of a new trace."""
MADE_SECONDS = 1.0
"""Seconds that a process waits for the header of a part that another process has just created."""
FRESH_SECONDS = 600.0
"""Seconds after its last change during which an ended part still counts as part of another rank's launch."""
_LOADED = time.time()
"""When this module was imported; used if the start of the process is unknown."""


@dataclass(frozen=True, slots=True)
class Process:
    """The rank of a process in a distributed run.

    Attributes
    ----------
    rank, size : int
        0 and 1 if the run is not distributed.
    launch : str or None
        An id of the launch from its environment variables; the same in all its processes.
    """

    rank: int
    size: int
    launch: str | None

    @property
    def related(self) -> bool:
        """Whether this process belongs to a recorded script, whose `launch` no other launch has."""
        return self.launch is not None and self.launch.startswith(OF_SCRIPT)


OF_SCRIPT = "script "
"""Prefix of `launch` in a recorded script and the processes that it starts; see `tracer.recording.own_part`."""
_LAUNCH = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)


def this_process(environment: Mapping[str, str] = os.environ) -> Process:
    """The rank of this process: from torch.distributed if initialized, else torchrun's variables, else SLURM's.

    Examples
    --------
    >>> this_process({"RANK": "1", "WORLD_SIZE": "4"})
    Process(rank=1, size=4, launch='')
    >>> this_process({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})  # not started by srun
    Process(rank=0, size=1, launch=None)
    """
    rank, size = 0, 1
    distributed = sys.modules.get("torch.distributed")  # a program that uses it has imported it
    if (
        distributed is not None
        and environment is os.environ
        and distributed.is_available()
        and distributed.is_initialized()
    ):
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        for of_rank, of_size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
            found = environment.get(of_rank, ""), environment.get(of_size, "")
            if found[0].isdecimal() and found[1].isdecimal() and int(found[0]) < int(found[1]):
                rank, size = int(found[0]), int(found[1])
                break
    if size == 1:
        return Process(0, 1, None)
    return Process(rank, size, "/".join(f"{name}={environment[name]}" for name in _LAUNCH if name in environment))


def run_id_of(path: Location | str, process: Process) -> str | None:
    """The run id that all ranks of a launch can compute without communication; None if they cannot.

    Examples
    --------
    >>> one, other = (Process(rank, 2, "TORCHELASTIC_RUN_ID=6f1c2a90-77ab/MASTER_PORT=0") for rank in (0, 1))
    >>> run_id_of("run.zarr", one) == run_id_of("run.zarr", other) != run_id_of("next.zarr", one)
    True
    >>> run_id_of("run.zarr", Process(0, 2, "TORCHELASTIC_RUN_ID=none/MASTER_PORT=29500"))
    """
    launch = process.launch or ""
    # torchrun uses the run id "none" unless it is given a name or --standalone
    named = re.search(r"TORCHELASTIC_RUN_ID=(?!none(/|$))[^/]|SLURM_JOB_ID=\d", launch)
    if named is None and not process.related:
        return None
    return hashlib.sha256(f"{launch} {path}".encode()).hexdigest()[:12]


def claim(
    path: Location, process: Process, ranks: Sequence[int], *, overwrite: bool = False, resume: bool = False
) -> tuple[int, str | None]:
    """Check that this process may write its part of the trace at `path`; with `overwrite`, remove old parts.

    Parameters
    ----------
    path : path
    process : Process
    ranks : sequence of int
        The ranks that are recorded.
    overwrite : bool
        Whether to remove earlier parts of this rank.
    resume : bool
        Whether to continue where an earlier attempt ended.

    Returns
    -------
    attempt : int
    run_id : str or None
        The id of the run that is continued or that other ranks have begun or will begin; None for a new run.

    Raises
    ------
    TraceExistsError
        If there is a trace that may not be overwritten, that is still being recorded, or that is of another run.
    TraceError
        If there is something that is not a trace.
    """
    parts = there(path, process)
    mine = [one for one in parts if one.rank == process.rank]
    of_this_launch = [one for one in parts if process.launch is not None and one.launch == process.launch]
    refuse_living(path, [one for one in parts if one in mine or one not in of_this_launch])
    if resume:
        # an earlier launch may have had the same environment; its parts are older than this process
        began = _began()
        former = [one for one in of_this_launch if not one.lives and one.created < began]
        before = [one.attempt for one in parts if one in mine or one in former or one not in of_this_launch]
        return 1 + max(before, default=-1), next((one.run_id for one in parts if one.run_id), run_id_of(path, process))
    if process.related:
        if any(one in mine for one in of_this_launch):
            raise TraceExistsError(f"{path} has a rank {process.rank} of this run already, from an earlier process")
        if of_this_launch:  # the first process of the run has removed old parts
            return 0, run_id_of(path, process)
    if overwrite:
        refuse_link(path)
        for one in parts:
            mine_to_remove = process.rank == min(ranks) and one.rank not in ranks
            if one.rank == process.rank or process.related or mine_to_remove:
                remove_part(path, one.name)
    # Parts of this launch may exist, because one rank may end before another begins. But a part that ended long ago
    # belongs to an earlier launch with the same environment.
    elif mine or any((one.ended and not one.fresh) or one not in of_this_launch for one in parts):
        raise TraceExistsError.at(path)
    return 0, next((one.run_id for one in of_this_launch if one not in mine), run_id_of(path, process))


def of_launch(path: Location, process: Process) -> list[Head]:
    """The existing parts of a process's launch; empty if there is no trace."""
    try:
        return [one for one in heads(path) if process.launch is not None and one.launch == process.launch]
    except TraceError:
        return []


@dataclass(frozen=True, slots=True)
class Head:
    """A part, as described by its name and its declarations.

    Attributes
    ----------
    name : str
    rank, attempt : int
    run_id : str or None
    here : bool
        Whether this process writes or wrote it.
    pid : object
        The id of the process that writes or wrote it.
    launch : str or None
        The `Process.launch` of that process.
    began, ended, lives : bool
        Whether it has a header; whether it says how the run ended; if it does not, whether its process still runs.
    fresh : bool
        Whether it was changed in the last `FRESH_SECONDS`.
    created : float
        When it was begun, in seconds since 1970; 0 if unknown.
    """

    name: str
    rank: int
    attempt: int
    run_id: str | None
    here: bool
    pid: object
    launch: str | None
    began: bool
    ended: bool
    lives: bool
    fresh: bool
    created: float


def heads(path: Location) -> list[Head]:
    """The parts of the trace at `path`, read without messages; empty if there is nothing.

    Raises
    ------
    TraceError
        If there is something that is not a trace or cannot be read.
    """
    if blank(path) or (not exists(path) and not any(one != path for one in store_files(path))):
        return []
    opened, broken = open_parts(path)
    try:
        if broken:
            raise next(iter(broken.values()))
        return [_head(name, store) for name, store in opened]
    finally:
        for _, store in opened:
            store.close()


def _head(name: str, store: ReadStore) -> Head:
    """Read the declarations of a part."""
    array = declarations_name(name)
    try:
        lines = declarations(store.read(array, 0, store.length(array)).tobytes())[0]
    except TraceUnreadableError:
        raise
    except TraceCorruptError as error:
        # no lines: its process was killed as it began; some lines: its machine may have lost power
        lines = lines_to_the_break(store, name, 0, 0, error)[0] if store.names(array) else []
        if store.names(array) and not lines:
            raise
    if lines or store.attrs().keys() - {WRITER}:
        check_root(store.attrs(), functools.partial(store.attrs, name))
    said = dict(lines)
    header = said.get("header", {})
    process, launch, run_id = header.get("process"), header.get("launch"), header.get("run_id")
    wrote = process if isinstance(process, Mapping) else {}
    rank, attempt = rank_and_attempt(name)
    ended = "status" in said
    return Head(
        name=name,
        rank=rank,
        attempt=attempt,
        run_id=run_id if isinstance(run_id, str) else None,
        here=(wrote.get("pid"), wrote.get("hostname")) == (os.getpid(), platform.node()),
        pid=wrote.get("pid"),
        launch=launch if isinstance(launch, str) else None,
        began=bool(header),
        ended=ended,
        lives=bool(header) and not ended and lives(process, store),
        fresh=time.time() - store.modified < FRESH_SECONDS,
        created=seconds(header.get("created")),
    )


def _began() -> float:
    """When this process began, in seconds since 1970; `_LOADED` if that is unknown."""
    start = process_start(os.getpid())
    if start is None or not start.isdecimal():
        return _LOADED
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(start) / os.sysconf("SC_CLK_TCK")


def refuse_link(path: Location) -> None:
    """Raise `TraceExistsError` if `path` is a link: its target may belong to somebody else."""
    if not isinstance(path, Url) and os.path.islink(path):
        raise TraceExistsError(f"{path} is a link to {os.path.realpath(path)}, and is not overwritten; give that path")


def refuse_living(path: Location, parts: Sequence[Head]) -> None:
    """Raise `TraceExistsError` if another process is still recording one of these parts."""
    for one in parts:
        if one.lives and not one.here:
            raise TraceExistsError(f"{path} is being recorded by process {one.pid}, so it is not overwritten")


def there(path: Location, process: Process) -> list[Head]:
    """Wait until every part that was started has a header, up to a time limit; return `heads(path)`."""
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        waiting = process.size > 1 and waited < BEGINNING_SECONDS
        try:
            found = heads(path)
        except TraceError:
            if not waiting:
                raise
        else:
            # an old part without a header is not waited for: its process was killed as it began
            waiting = waiting or (waited < MADE_SECONDS and any(one.fresh for one in found))
            if not waiting or all(one.began for one in found):
                return found
        time.sleep(0.05)


class Writing(Protocol):
    """A writer of one part of a trace, in this process."""

    path: Location
    part: str

    @property
    def writes(self) -> bool:
        """Whether the writer may still write."""


WRITERS: weakref.WeakSet[Writing] = weakref.WeakSet()
"""The writers of this process."""


def refuse_here(path: Location, rank: int | None) -> None:
    """Raise `TraceExistsError` if this process is recording the trace at `path`; with a rank, that rank's part."""
    for one in WRITERS:
        where = part_of(one.part)
        same_rank = rank is None or where is None or where[0] == rank
        if one.writes and same_rank and _absolute(one.path) == _absolute(path):
            raise TraceExistsError(f"{path} is being recorded by this process, so it is not overwritten")


def _absolute(path: Location) -> str:
    """A name that is equal for all paths to the same trace."""
    return str(path) if isinstance(path, Url) else os.path.realpath(path)


def check_ours(path: Location) -> list[Head]:
    """The parts of the trace at `path`, if there is one.

    Raises
    ------
    TraceExistsError
        If there is something else, or a link, or if another process is recording the trace.
    """
    refuse_link(path)
    try:
        found = heads(path)
    except TraceUnreadableError:
        raise
    except TraceError as error:
        raise TraceExistsError(
            f"{path} already exists, and is not overwritten because it is not a trace of this format: {error}"
        ) from error
    refuse_living(path, found)
    return found


def check_target(path: Anywhere, *, overwrite: bool = False) -> None:
    """Check, without creating anything, that a trace could be written at `path`.

    Raises
    ------
    TraceExistsError
        If there is something that may not be overwritten, or that is not a trace.
    TraceFormatError
        If the suffix is not that of a store that can be written there.
    """
    path = location(path)
    check_writable(path)
    refuse_part(path)
    if not overwrite and any(exists(file) for file in store_files(path)):
        raise TraceExistsError.at(path)
    check_ours(path)
