"""Commands to type next, after the verdict on a trace: filled in, to copy."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from analyze.seeing.check import Checked
from tracer.secrets import masked


def script_of(header: Mapping[str, Any]) -> str:
    """The script of a run with its arguments, as on a command line; empty if the trace does not say it.

    Examples
    --------
    >>> script_of({"argv": ["train.py", "--name", "a b"]}), script_of({"argv": ["-c"]})
    ("train.py --name 'a b'", '')
    """
    argv = masked(header.get("argv"))
    words = argv if isinstance(argv, list) and all(isinstance(word, str) for word in argv) else []
    is_script = bool(words) and words[0].endswith(".py") and "ipykernel" not in words[0] and "***" not in words
    return shlex.join(words) if is_script else ""


def next_commands(checked: Checked, header: Mapping[str, Any]) -> list[str]:
    """What to type after a verdict: what caused the worst finding, and its steps in full; or how large updates are.

    Parameters
    ----------
    checked : Checked
    header : mapping
        The header of the trace.

    Examples
    --------
    >>> next_commands(Checked("runs/a b.zarr", "finished", ()), {})
    ["trace replay 'runs/a b.zarr' --subscriber ratio"]
    """
    path = checked.trace if "://" in checked.trace else min(checked.trace, os.path.relpath(checked.trace), key=len)
    trace, worst, script = shlex.quote(path), checked.worst, script_of(header)
    if worst is None:
        return [f"trace replay {trace} --subscriber ratio"]
    found = [f"trace blame {trace} --step {worst.first}"]
    captures = header.get("capture")
    kept = [one.get("kinds") or () for one in captures if isinstance(one, dict)] if isinstance(captures, list) else []
    if script and any("keyframe" in kinds for kinds in kept):
        found.append(f"trace reenact {trace} --steps {worst.first}:{worst.first + 3} {script}")
    return found
