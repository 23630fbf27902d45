"""The files of an HDF5 trace: one for each part, beside each other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from tracer.errors import TraceUnreadableError
from tracer.stores.disk.files import is_there
from tracer.stores.locations import FIRST_PART, beside

ABSENT_RANKS = 64
"""So many ranks in a row may have left nothing in a folder that cannot be listed."""


def file_of(path: Path, part: str) -> Path:
    """The file of a part: that of the first one is the trace's own, ``run.h5``; others are ``run.rank1.h5``."""
    if part == FIRST_PART:
        return path
    path = _itself(path)
    return path.with_name(f"{path.stem}.{part}{path.suffix}")


def _itself(path: Path) -> Path:
    """What a link leads to: other parts lie beside that."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def files(path: Path) -> list[Path]:
    """The files of a trace: one at `path`, if there is one, and those of other parts beside it."""
    there = _itself(path)
    try:
        names = os.listdir(there.parent)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except PermissionError:  # a folder that one may enter all the same
        names = list(_met(there))
    except OSError as error:
        raise TraceUnreadableError(f"{there.parent} cannot be listed: {error.strerror}") from error
    found = [there.with_name(name) for name in beside(there, names)]
    return [path, *found] if is_there(path) or not found else found


def _met(path: Path) -> Iterator[str]:
    """The names of parts that are in a folder which cannot be listed: those of ranks and attempts that follow on."""
    absent = 0
    for rank in itertools.count():
        attempts = itertools.count(1 if rank == 0 else 0)  # the first rank's first is the trace's own file
        parts = (f"rank{rank}.attempt{attempt}" if attempt else f"rank{rank}" for attempt in attempts)
        files = (path.with_name(f"{path.stem}.{part}{path.suffix}") for part in parts)
        there = list(itertools.takewhile(os.path.lexists, files))
        yield from (file.name for file in there)
        absent = 0 if there else absent + 1
        if absent > ABSENT_RANKS:
            return
