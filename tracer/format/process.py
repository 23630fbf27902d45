"""Whether the process that wrote a trace still runs."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Mapping
from pathlib import Path


def process_start(pid: int) -> str | None:
    """The start time of a process of this machine, only for comparison; None if the process ended or is hidden.

    It distinguishes the writer of a trace from a later process with the same id.
    """
    state, start = _state_and_start(pid) or ("X", "")
    # Z: a zombie, which has ended but was not yet waited for by its parent
    return None if state in "ZX" else start


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """State and start time of a process in ``/proc``; None if it does not exist or is hidden from this user."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # the program's name is in parentheses and may contain anything; the start time is the 20th field behind it
    fields = stat.rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else None


def process_lives(process: object) -> bool | None:
    """Whether the process in a header still runs; None if this machine cannot know."""
    if not isinstance(process, Mapping) or process.get("hostname") != platform.node():
        return None
    pid = process.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        # EPERM: the process exists, but belongs to another user
        if error.errno != errno.EPERM:
            return False
        # some systems hide the processes of other users
        if process.get("start") is not None and _state_and_start(pid) is None:
            return None
    return process_start(pid) == process.get("start")
