"""What is written of a run in words: its header and its notes, without secrets."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import platform
import uuid
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tracer.errors import plain
from tracer.format.process import process_start
from tracer.secrets import masked, masked_text

_NAMES: Final = ("run_id", "launch", "process", "versions", "model", "kinds", "indices")
"""What holds names of the program and numbers, and is compared with what other processes wrote."""


def now() -> str:
    """The time as a trace has it: ISO 8601, UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def complete(header: Mapping[str, Any]) -> dict[str, Any]:
    """A header as it is written, with what each has."""
    import torch

    added = {
        "run_id": uuid.uuid4().hex[:12],
        "created": now(),
        "process": {"pid": os.getpid(), "hostname": platform.node(), "start": process_start(os.getpid())},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    return added | public(header)


def public(told: Mapping[str, Any]) -> dict[str, Any]:
    """A header or a note as it is written: without secrets (see `tracer.secrets`)."""
    with contextlib.suppress(RecursionError):  # it is nested too deeply for JSON, which is refused when it is written
        return {name: value if name in _NAMES else masked({name: value})[name] for name, value in told.items()}
    return dict(told)


def ending(status: str, ended: str | None, messages: int) -> dict[str, Any]:
    """What the declaration ``status`` says."""
    return {"status": masked_text(plain(status)), "ended": ended, "messages": messages}
