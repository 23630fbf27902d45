"""`Ground`: the objects that all parts of an exporter share; `Part`: the base of the parts."""

from __future__ import annotations

import itertools

from tracer.messaging.bus import MessageBus
from tracer.observing.capture import Capture
from tracer.observing.clock import Clock
from tracer.observing.demand import Demand
from tracer.observing.forwards import Forwards
from tracer.observing.models import Models
from tracer.observing.numbers import Numbers
from tracer.observing.optimizers import Optimizers
from tracer.observing.parameter_table import ParameterTable
from tracer.observing.problems import Problems
from tracer.observing.publisher import Publisher
from tracer.observing.pytorch.gate import Gate
from tracer.observing.wiring import Wiring

_NUMBERS = itertools.count()


class Ground:
    """The objects that all parts of an exporter share, in the order of their dependencies.

    Parameters
    ----------
    bus : MessageBus
    captures : tuple of Capture
    strict : bool
        Whether exceptions reach the training loop.
    """

    def __init__(self, bus: MessageBus, captures: tuple[Capture, ...], *, strict: bool) -> None:
        self.bus = bus
        self.clock = Clock()
        self.problems = Problems(self.clock, strict=strict)
        self.gate = Gate(self.problems, next(_NUMBERS))
        self.models = Models()
        self.optimizers = Optimizers(self.models)
        self.table = ParameterTable()
        self.forwards = Forwards(self.gate, self.models)
        self.demand = Demand(bus, captures, self.clock, self.table, self.problems, self.gate.passes)
        self.numbers = Numbers()
        self.publisher = Publisher(bus, self.demand, self.clock, self.problems, self.numbers)
        self.wiring = Wiring(self.gate, self.models, self.optimizers, self.table)


class Part:
    """The base of the parts of an exporter. Copies the attributes of the `Ground`, because hooks read them often.

    Parameters
    ----------
    ground : Ground
    """

    def __init__(self, ground: Ground) -> None:
        self.bus = ground.bus
        self.clock = ground.clock
        self.problems = ground.problems
        self.gate = ground.gate
        self.models = ground.models
        self.optimizers = ground.optimizers
        self.table = ground.table
        self.forwards = ground.forwards
        self.demand = ground.demand
        self.numbers = ground.numbers
        self.publisher = ground.publisher
        self.wiring = ground.wiring
