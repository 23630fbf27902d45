"""Record a training run once; ask it anything later.

The names below are imported when they are first used, so that ``import tracer`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# not when it is used: what a program has called at its end, from now on, may still end what it records
from tracer.recording import termination as _termination  # noqa: F401
from tracer.version import __version__ as __version__

if TYPE_CHECKING:
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
    from tracer.messaging.actor import Actor
    from tracer.messaging.bus import Collect, MessageBus, Receiver, get_default_bus
    from tracer.messaging.messages import KINDS, Message, MessageBundle, ModuleMessage, NetworkMessage, derived
    from tracer.messaging.subscriber import CallbackSubscriber, Subscriber
    from tracer.messaging.subscription import Subscription, SynchronizedSubscription
    from tracer.observing.capture import Capture
    from tracer.observing.exporter import Exporter
    from tracer.recording.certifying.certify import certify
    from tracer.recording.recorder import Recorder
    from tracer.recording.recording import Run, record
    from tracer.replaying.replay import plan, replay
    from tracer.trace.certificate import Certificate
    from tracer.trace.reader import TraceReader
    from tracer.trace.reader import TraceReader as open  # noqa: A004 - tracer.open(path), as in gzip.open
    from tracer.trace.writer import TraceWriter
    from tracer.upkeep.convert import convert
    from tracer.upkeep.recover import recover
    from tracer.upkeep.verify import verify

_HOMES = {
    "messaging.actor": ("Actor",),
    "messaging.bus": ("Collect", "MessageBus", "Receiver", "get_default_bus"),
    "observing.capture": ("Capture",),
    "recording.certifying.certify": ("certify",),
    "trace.certificate": ("Certificate",),
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
    "observing.exporter": ("Exporter",),
    "messaging.messages": ("KINDS", "Message", "MessageBundle", "ModuleMessage", "NetworkMessage", "derived"),
    "trace.reader": ("TraceReader",),
    "recording.recorder": ("Recorder",),
    "recording.recording": ("Run", "record"),
    "replaying.replay": ("plan", "replay"),
    "messaging.subscriber": ("CallbackSubscriber", "Subscriber"),
    "messaging.subscription": ("Subscription", "SynchronizedSubscription"),
    "upkeep.verify": ("verify",),
    "upkeep.convert": ("convert",),
    "upkeep.recover": ("recover",),
    "trace.writer": ("TraceWriter",),
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
        value = import_module("tracer.trace.reader").TraceReader
    elif name in _HOME_OF:
        value = getattr(import_module(f"tracer.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'tracer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
