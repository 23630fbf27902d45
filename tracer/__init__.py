"""Record a training run once; ask it anything later.

A public name is imported when it is first used, so that ``import tracer`` costs nothing. ``__init__.pyi``, which
`make docs` writes, has the types of all public names.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# not lazily: exit functions that a program registers after this import may still end its recordings
from tracer.recording import termination as _termination  # noqa: F401
from tracer.version import __version__ as __version__

_OF_HOME = {
    "tracer.errors": (
        *("CaptureError", "MessageError", "TraceCorruptError", "TraceError", "TraceExistsError", "TraceFormatError"),
        *("TraceLostError", "TraceNotFoundError", "TraceUnreachableError", "TraceUnreadableError", "TracerError"),
        *("UnknownNameError",),
    ),
    "tracer.messaging.actor": ("Actor",),
    "tracer.messaging.bus": ("MessageBus", "get_default_bus"),
    "tracer.messaging.messages": ("KINDS", "Message", "MessageBundle", "ModuleMessage", "NetworkMessage", "derived"),
    "tracer.messaging.receiver": ("Collect", "Objective", "Receiver"),
    "tracer.messaging.stacks": ("Stack", "Stretch"),
    "tracer.messaging.subscriber": ("CallbackSubscriber", "Subscriber"),
    "tracer.messaging.subscription": ("Subscription", "SynchronizedSubscription"),
    "tracer.observing.capture": ("KEYFRAME", "Capture"),
    "tracer.observing.exporter": ("Exporter",),
    "tracer.observing.profiles": ("profile",),
    "tracer.recording.certifying.certify": ("certify",),
    "tracer.recording.options": ("Flight",),
    "tracer.recording.recorder": ("Recorder",),
    "tracer.recording.reenacting.reenact": ("reenact",),
    "tracer.recording.recording": ("Run", "record"),
    "tracer.replaying.plan": ("plan",),
    "tracer.replaying.replay": ("replay",),
    "tracer.trace.datasets": ("TraceDataset",),
    "tracer.trace.header": ("Certificate",),
    "tracer.trace.reader": ("TraceReader", "open"),
    "tracer.trace.writer": ("TraceWriter",),
    "tracer.upkeep.convert": ("convert",),
    "tracer.upkeep.recover": ("recover",),
    "tracer.upkeep.verify": ("verify",),
}
HOMES: dict[str, str] = {name: home for home, names in _OF_HOME.items() for name in names}
"""Public name → its module."""

ALIASES = {"open": "TraceReader"}
"""Public name → its name in its module, if that differs; `tracer.open` reads like ``gzip.open``."""

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'tracer' has no attribute {name!r}")
    value = getattr(import_module(HOMES[name]), ALIASES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
