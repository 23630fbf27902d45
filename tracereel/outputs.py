"""Where commands write: checks that refuse a command before it does any work, and the outputs of answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tracer.errors import TraceError, TraceExistsError, TracerError
from tracereel.command import WRONG_USAGE, Refusal, wrong_usage
from tracereel.printing import say

if TYPE_CHECKING:
    from analyze.tables.results import Results
    from tracer.stores.locations import Location

TRACE_SUFFIXES = (".zarr", ".h5", ".hdf5")
RESULT_SUFFIXES = (".parquet", ".csv", ".jsonl", ".zarr", ".h5")


def check_new(path: str, suffixes: Sequence[str], overwrite: bool) -> Location:
    """Check that a file can be made at `path`; return the location."""
    from tracer.stores.locations import Url, location
    from tracer.stores.opening import check_writable, exists, refuse_part

    target = location(path)
    if target.suffix not in suffixes:
        raise Refusal(
            f"{path}: the suffix says what is written; it is {target.suffix or 'missing'!r}, "
            f"and can be {', '.join(suffixes)}",
            WRONG_USAGE,
        )
    if isinstance(target, Url):
        check_writable(target)
    refuse_part(target)
    if exists(target) and not overwrite:
        raise TraceExistsError(f"{path} is already there; --overwrite replaces it")
    if isinstance(target, Url):
        return target
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise TraceError(f"{path} cannot be made, because {parent} is not a directory that can be written to")
    return target


def check_new_trace(path: str, overwrite: bool) -> Location:
    """Like `check_new`, for a trace. Under a launcher an existing trace is fine: other ranks may have begun it."""
    from tracer.trace.claiming import this_process

    return check_new(path, TRACE_SUFFIXES, overwrite or this_process().size > 1)


def check_apart(out: str, trace: str) -> None:
    """Refuse an output path that is the trace to read, one of its files, or inside it."""
    from tracer.stores.locations import Url
    from tracer.stores.opening import store_files

    target = os.path.realpath(out)
    for part in store_files(trace):
        file = "" if isinstance(part, Url) else os.path.realpath(part)
        if file and (target == file or target.startswith(file + os.sep)):
            raise TraceExistsError(f"{out} belongs to the trace that is being read; give another path")


def check_installed(package: str, extra: str, what: str) -> None:
    """Raise `TracerError` if a package that `what` needs is not installed."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise TracerError(f"{what} needs {package}, which is not installed: pip install 'tracereel[{extra}]'")


def check_trackers(targets: Sequence[str], traces: Sequence[str]) -> None:
    """Refuse a target for `analyze.Results.to_tracker` that names no tracker, or a path that cannot be written to."""
    from analyze.tables.trackers import tracker_of

    for target in targets:
        name, _, where = target.partition(":")
        if name in ("tensorboard", "mlflow") and where and "://" not in where:
            for trace in traces:
                check_apart(where, trace)
            if Path(where).exists() and not Path(where).is_dir():
                raise TraceExistsError(f"{where} is already there and is not a directory")
        with wrong_usage():
            tracker_of(target)


class Outputs(NamedTuple):
    """Where answers are written."""

    out: str | None
    tensorboard: str | None
    overwrite: bool
    trackers: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        """The trackers, with that of ``--tensorboard``."""
        return self.trackers if self.tensorboard is None else (*self.trackers, f"tensorboard:{self.tensorboard}")

    def checked(self, trace: str) -> Path | None:
        """Refuse impossible outputs; return the absolute path of `out`.

        The path is resolved before the replay, since a user's subscriber may change the working directory.
        """
        target = None
        if self.out is not None:
            if "://" in self.out:
                raise Refusal(f"{self.out}: answers are written to a path, and not to a URL", WRONG_USAGE)
            target = Path(self.out).absolute()
            check_new(self.out, RESULT_SUFFIXES, self.overwrite)
            check_apart(self.out, trace)
            if target.suffix == ".parquet":
                check_installed("pyarrow", "tables", "writing Parquet")
        check_trackers(self.targets, [trace])
        return target

    def write(self, results: Results, target: Path | None, times: Mapping[str, Callable[[int], float]]) -> None:
        """Write answers to `target`, the path from `checked`, and hand them to trackers."""
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            results.write(target, overwrite=self.overwrite)
            say(f"{len(results):,} rows written to {self.out}")
        for one in self.targets:
            results.to_tracker(one, times=times)
            say(f"{len(results):,} numbers handed to {one}")
