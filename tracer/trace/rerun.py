"""What to type to run steps of a recorded run again: its path, its steps and its script, to copy."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from tracer.messaging.messages import DEFAULT_TAG
from tracer.messaging.receiver import Rerun
from tracer.secrets import masked
from tracer.trace.described import Described
from tracer.trace.streams import Steps

_LAST = 10
"""How many steps are run again where none are named: few, since each is recorded in full."""


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


def shortest(path: object) -> str:
    """A path as a word of a shell, from the current folder if that is shorter.

    Examples
    --------
    >>> shortest("runs/a b.zarr"), shortest("s3://runs/a.zarr")
    ("'runs/a b.zarr'", 's3://runs/a.zarr')
    """
    text = str(path)
    return shlex.quote(text if "://" in text else min(text, os.path.relpath(text), key=len))


def rerun_of(reader: Described, steps: Steps | None = None) -> Rerun:
    """What to type to run steps of a trace again; without a range of steps, the last ten of the training."""
    again = Rerun(shortest(reader.path), script=script_of(reader.header) or Rerun().script)
    spans = [one.steps for one in reader.streams if one.tag == DEFAULT_TAG and one.steps]
    if not spans:
        return again
    start, stop, *_ = steps or (None, None)
    end = max(last for _, last in spans) + 1
    stop = end if stop is None else min(stop, end)
    start = max(stop - _LAST, min(first for first, _ in spans)) if start is None else start
    return again._replace(steps=f"{start}:{stop}")
