"""Record a training run once; ask it anything later.

The names below are imported when they are first used, so that ``import tracer`` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

# not when it is used: what a program has called at its end, from now on, may still end what it records
from tracer import termination as _termination  # noqa: F401

if TYPE_CHECKING:
    from tracer.actions import Actor
    from tracer.bus import Collect, MessageBus, Receiver, get_default_bus
    from tracer.capture import Capture
    from tracer.certify import Certificate, certify
    from tracer.convert import convert
    from tracer.errors import (
        CaptureError,
        MessageError,
        TraceCorruptError,
        TraceError,
        TraceExistsError,
        TraceFormatError,
        TraceLostError,
        TraceNotFoundError,
        TracerError,
        TraceUnreachableError,
        TraceUnreadableError,
        UnknownNameError,
    )
    from tracer.exporter import Exporter
    from tracer.messages import KINDS, Message, MessageBundle, ModuleMessage, NetworkMessage, derived
    from tracer.reader import TraceReader
    from tracer.reader import TraceReader as open  # noqa: A004 - tracer.open(path), as in gzip.open
    from tracer.recorder import Recorder
    from tracer.recording import Run, record
    from tracer.recover import recover
    from tracer.replay import plan, replay
    from tracer.subscriber import CallbackSubscriber, Subscriber
    from tracer.subscription import Subscription, SynchronizedSubscription
    from tracer.verify import verify
    from tracer.writer import TraceWriter

__version__ = "0.1.0"

_HOMES = {
    "actions": ("Actor",),
    "bus": ("Collect", "MessageBus", "Receiver", "get_default_bus"),
    "capture": ("Capture",),
    "certify": ("Certificate", "certify"),
    "errors": (
        "CaptureError",
        "MessageError",
        "TraceCorruptError",
        "TraceError",
        "TraceExistsError",
        "TraceFormatError",
        "TraceLostError",
        "TraceNotFoundError",
        "TraceUnreachableError",
        "TraceUnreadableError",
        "TracerError",
        "UnknownNameError",
    ),
    "exporter": ("Exporter",),
    "messages": ("KINDS", "Message", "MessageBundle", "ModuleMessage", "NetworkMessage", "derived"),
    "reader": ("TraceReader",),
    "recorder": ("Recorder",),
    "recording": ("Run", "record"),
    "replay": ("plan", "replay"),
    "subscriber": ("CallbackSubscriber", "Subscriber"),
    "subscription": ("Subscription", "SynchronizedSubscription"),
    "verify": ("verify",),
    "convert": ("convert",),
    "recover": ("recover",),
    "writer": ("TraceWriter",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "KINDS",
    "Actor",
    "CallbackSubscriber",
    "Capture",
    "CaptureError",
    "Certificate",
    "Collect",
    "Exporter",
    "Message",
    "MessageBundle",
    "MessageBus",
    "MessageError",
    "ModuleMessage",
    "NetworkMessage",
    "Receiver",
    "Recorder",
    "Run",
    "Subscriber",
    "Subscription",
    "SynchronizedSubscription",
    "TraceCorruptError",
    "TraceError",
    "TraceExistsError",
    "TraceFormatError",
    "TraceLostError",
    "TraceNotFoundError",
    "TraceReader",
    "TraceUnreachableError",
    "TraceUnreadableError",
    "TraceWriter",
    "TracerError",
    "UnknownNameError",
    "certify",
    "convert",
    "derived",
    "get_default_bus",
    "open",
    "plan",
    "record",
    "recover",
    "replay",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "open":
        value = import_module("tracer.reader").TraceReader
    elif name in _HOME_OF:
        value = getattr(import_module(f"tracer.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'tracer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `tracer.replay` and others functions: importing the submodule of that name would else bind it there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("certify", "convert", "recover", "replay", "verify") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
