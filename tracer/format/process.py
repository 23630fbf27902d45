"""Whether the process that wrote a trace still runs."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Mapping
from pathlib import Path


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in a form that can only be compared; None if it ended, or cannot be told.

    With the process id it tells whether the writer of a trace still lives, because ids are used again.
    """
    state, start = _state_and_start(pid) or ("X", "")
    # one that has ended stays in the list until its parent has asked how
    return None if state in "ZX" else start


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """What Linux tells of a process; None where there is no such process, or it is hidden from this user."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # the name of the program stands in parentheses and may hold anything; the start is the 20th field after it
    fields = stat.rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else None


def process_lives(process: object) -> bool | None:
    """Whether the process that a header names still runs; None where that cannot be told from this machine."""
    if not isinstance(process, Mapping) or process.get("hostname") != platform.node():
        return None
    pid = process.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        # the process of another user lives too
        if error.errno != errno.EPERM:
            return False
        # which some systems tell nobody else more of
        if process.get("start") is not None and _state_and_start(pid) is None:
            return None
    return process_start(pid) == process.get("start")
