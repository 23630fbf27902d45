"""Made by `make docs` from the public names of the package, for type checkers and editors."""

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
from tracer.messaging.bus import MessageBus, get_default_bus
from tracer.messaging.messages import KINDS, Message, MessageBundle, ModuleMessage, NetworkMessage, derived
from tracer.messaging.receiver import Collect, Objective, Receiver
from tracer.messaging.stacks import Stack, Stretch
from tracer.messaging.subscriber import CallbackSubscriber, Subscriber
from tracer.messaging.subscription import Subscription, SynchronizedSubscription
from tracer.observing.capture import KEYFRAME, Capture
from tracer.observing.exporter import Exporter
from tracer.observing.profiles import profile
from tracer.recording.certifying.certify import certify
from tracer.recording.options import Flight
from tracer.recording.recorder import Recorder
from tracer.recording.recording import Run, record
from tracer.recording.reenacting.reenact import reenact
from tracer.replaying.plan import plan
from tracer.replaying.replay import replay
from tracer.trace.datasets import TraceDataset
from tracer.trace.header import Certificate
from tracer.trace.reader import TraceReader
from tracer.trace.reader import TraceReader as open
from tracer.trace.writer import TraceWriter
from tracer.upkeep.convert import convert
from tracer.upkeep.recover import recover
from tracer.upkeep.verify import verify

__version__: str
ALIASES: dict[str, str]
HOMES: dict[str, str]
__all__ = [
    "KEYFRAME",
    "KINDS",
    "Actor",
    "CallbackSubscriber",
    "Capture",
    "CaptureError",
    "Certificate",
    "Collect",
    "Exporter",
    "Flight",
    "Message",
    "MessageBundle",
    "MessageBus",
    "MessageError",
    "ModuleMessage",
    "NetworkMessage",
    "Objective",
    "Receiver",
    "Recorder",
    "Run",
    "Stack",
    "Stretch",
    "Subscriber",
    "Subscription",
    "SynchronizedSubscription",
    "TraceCorruptError",
    "TraceDataset",
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
    "profile",
    "record",
    "recover",
    "reenact",
    "replay",
    "verify",
]
