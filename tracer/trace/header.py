"""The header, notes and ending of a run as they are written: without secrets."""

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
"""Entries that are not masked: they hold only names and numbers of the program, and processes compare them."""


def now() -> str:
    """The current time, ISO 8601, UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def complete(header: Mapping[str, Any]) -> dict[str, Any]:
    """A header as it is written: `public`, with the standard entries added where they are missing."""
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
    with contextlib.suppress(RecursionError):  # nested too deeply; refused when it is written as JSON
        return {name: value if name in _NAMES else masked({name: value})[name] for name, value in told.items()}
    return dict(told)


def ending(status: str, ended: str | None, messages: int) -> dict[str, Any]:
    """The value of the declaration ``status``."""
    return {"status": masked_text(plain(status)), "ended": ended, "messages": messages}
