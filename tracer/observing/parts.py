"""The parts of an exporter, joined from the ground up: each knows only those that are made before it."""

from __future__ import annotations

import itertools

from tracer.messaging.bus import MessageBus
from tracer.observing.calls import Calls
from tracer.observing.capture import Capture
from tracer.observing.clock import Clock
from tracer.observing.computed import ComputedWeights
from tracer.observing.demand import Demand
from tracer.observing.differentiation import Differentiation
from tracer.observing.forwards import Forwards
from tracer.observing.gradients import Gradients
from tracer.observing.layout import Layout
from tracer.observing.losses import Losses
from tracer.observing.models import Models
from tracer.observing.numbers import Numbers
from tracer.observing.objectives import Objectives, Terms
from tracer.observing.optimizer_steps import OptimizerSteps
from tracer.observing.optimizers import Optimizers
from tracer.observing.parameter_table import ParameterTable
from tracer.observing.parameters import Parameters
from tracer.observing.passes import Passes
from tracer.observing.probing import Probes
from tracer.observing.problems import Problems
from tracer.observing.publisher import Publisher
from tracer.observing.pytorch.gate import Gate
from tracer.observing.ranks import Ranks
from tracer.observing.retrospect import Retrospect
from tracer.observing.steps import Steps
from tracer.observing.values import Values
from tracer.observing.watching import Watching
from tracer.observing.wiring import Wiring

_NUMBERS = itertools.count()


class Parts:
    """The parts of one exporter.

    Parameters
    ----------
    bus : MessageBus
    captures : tuple of Capture
    strict : bool
        Whether what fails reaches the training loop.
    """

    def __init__(self, bus: MessageBus, captures: tuple[Capture, ...], *, strict: bool) -> None:
        self.clock = clock = Clock()
        self.problems = problems = Problems(clock, strict=strict)
        self.gate = gate = Gate(problems, next(_NUMBERS))
        self.models = models = Models()
        self.optimizers = optimizers = Optimizers(models)
        table = ParameterTable()
        self.forwards = forwards = Forwards(gate, models)
        # who wants what, and what becomes of it
        self.demand = demand = Demand(bus, captures, clock, table, problems)
        numbers = Numbers()
        self.publisher = publisher = Publisher(bus, demand, clock, problems, numbers)
        self.ranks = ranks = Ranks(table, demand, publisher, models)
        parameters = Parameters(table, demand, publisher, clock, ranks.replicas)
        gradients = Gradients(gate, clock, demand, publisher)
        terms = Terms(publisher, demand, clock, problems)
        objectives = Objectives(publisher, demand, clock, problems, terms, models.trained_by)
        # steps and passes
        self.wiring = wiring = Wiring(gate, models, optimizers, table)
        self.steps = steps = Steps(
            gate, clock, demand, publisher, numbers, gradients, parameters, ranks, objectives, forwards, optimizers,
            wiring,
        )  # fmt: skip
        self.passes = passes = Passes(
            gate, clock, demand, publisher, models, forwards, optimizers, ranks, wiring, terms, steps
        )
        # what hooks call
        calls = Calls(gate, clock, demand, publisher, numbers, gradients, forwards, wiring, passes)
        computed = ComputedWeights(gate, clock, gradients, parameters, passes)
        self.losses = losses = Losses(
            gate, clock, demand, publisher, models, forwards, optimizers, wiring, terms, steps, passes
        )
        self.optimizer_steps = optimizer_steps = OptimizerSteps(
            gate, clock, bus, demand, publisher, forwards, optimizers, parameters, wiring, objectives, steps
        )
        # and what others call
        self.differentiation = differentiation = Differentiation(
            gate, clock, models, optimizers, gradients, wiring, objectives, steps, passes
        )
        self.watching = watching = Watching(gate, demand, optimizers, losses, differentiation, optimizer_steps, wiring)
        self.layout = Layout(
            gate, bus, demand, models, optimizers, table, ranks, wiring, passes, calls, computed, losses,
            optimizer_steps, watching,
        )  # fmt: skip
        wiring.call_to_rewire(self.layout.rewire)
        self.probes = Probes(gate, clock, demand, publisher, numbers, models, passes)
        steps.call_between(self.probes.run_due)
        self.values = Values(gate, clock, bus, demand, publisher, numbers, objectives, passes)
        self.retrospect = Retrospect(gate, clock, demand, models, forwards, optimizers, wiring, optimizer_steps)
