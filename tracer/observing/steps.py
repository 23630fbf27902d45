"""Begins and ends steps and epochs, and publishes their data."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tracer.errors import StopTraining
from tracer.messaging.messages import EVAL_MODE
from tracer.observing.gradient_norms import GradientNorms
from tracer.observing.gradients import Gradients
from tracer.observing.objectives import Objectives
from tracer.observing.parameter_table import Parameter
from tracer.observing.parameters import Parameters
from tracer.observing.part import Ground, Part
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.loss_graph import next_of_thread
from tracer.observing.ranks import Ranks
from tracer.observing.state import State
from tracer.observing.undecided import UndecidedPasses

_IDLE_STEPS = 16
"""Of the steps that nobody records, each of this number is followed by the work between steps."""


@dataclass(slots=True)
class Epochs:
    """The state of the current epoch.

    Attributes
    ----------
    open : bool
        Whether its begin was published.
    over : bool
        Whether it ends when the next step begins.
    seen : bool
        Whether `Steps.finish_epoch` was ever called.
    """

    open: bool = False
    over: bool = False
    seen: bool = False


class Between:
    """The work between steps: bound methods, whose objects are not kept alive."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._each_step = False
        self._idle_steps = 0  # since the last work

    def call(self, method: Callable[[], None], *, each_step: bool = False) -> None:
        """Call a method between steps, after earlier methods.

        If no method is for `each_step`, of the steps that nobody records only each sixteenth calls them.
        """
        self._methods = [one for one in self._methods if one() is not None] + [weakref.WeakMethod(method)]
        self._each_step = self._each_step or each_step

    def has_work_after_idle(self) -> bool:
        """Count a step that nobody records; whether the work has to be done after it."""
        self._idle_steps += 1
        return self._idle_steps == _IDLE_STEPS or self._each_step

    def work(self) -> None:
        """Call the methods."""
        self._idle_steps = 0
        for known in self._methods:
            method = known()
            if method is not None:
                method()


class Steps(Part):
    """Begins and ends the steps of a training.

    Attributes
    ----------
    over : bool
        Whether the open step ends when the running backward is over.
    in_eval_mode : bool
        Whether a training pass of the open step ran while the model was in eval mode.
    trained_in_eval_mode : int
        In how many steps that was so.
    epochs : Epochs
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.gradients = Gradients(ground)
        self.ranks = Ranks(ground)
        self.parameters = Parameters(ground, self.ranks)
        self.norms = GradientNorms(ground)
        self.objectives = Objectives(ground)
        self.state = State(ground, self.ranks)
        self.undecided = UndecidedPasses(ground, self.state, self.objectives.terms)
        self.over = False
        self.in_eval_mode = False
        self.trained_in_eval_mode = 0
        self.first_in_eval_mode: int | None = None
        self.epochs = Epochs()
        self._entries = -1  # how many times the gate's lock was taken when the last step began that nobody records
        self.between = Between()

    # -- beginning ------------------------------------------------------------------------------------------

    def start_at(self, global_step: int, train_step: int, epoch: int) -> None:
        """Set the counters. With a `train_step` above 0, the epoch counts as begun."""
        self.clock.start_at(global_step, train_step, epoch)
        self.demand.look_ahead_anew()
        self.epochs.open = train_step > 0

    def go_on_in_epoch(self, train_step: int, epoch: int) -> None:
        """Set the next step's epoch counters, even if the program's data has come to an end."""
        self.clock.train_step, self.clock.epoch = train_step, epoch
        self.epochs.open, self.epochs.over = True, False

    def begin(self) -> None:
        """Begin a step, if none is open."""
        if self.over:
            self.settle()
        if self.clock.open:
            if not self.wiring.check_steps.is_complete():
                self.wiring.check_optimizers()
            return
        if self.epochs.over:
            self.finish_epoch()
        self.clock.begin()
        self.wiring.check()
        self.clock.idle = self.demand.nothing_due()
        self.numbers.begin_step()
        if not self.epochs.open:
            self._announce_epoch()
        if not self.clock.idle:
            self.wiring.come_last()
            self.wiring.look()
            self.publisher.event("batch_started", self.clock.now())
            if not self.optimizers:
                self.snapshot(self.table.all)

    def begin_idle(self) -> bool:
        """Begin a step that nobody records, if nothing else has to be done; whether it has begun, now or before."""
        clock = self.clock
        if clock.step >= self.demand.quiet_until or clock.starting is not None:
            return False
        if clock.open:  # gradient accumulation, or an optimizer that evaluates its closure several times
            return clock.idle and not (self.over or self.optimizers.forwards_end_steps)
        if (
            self.epochs.over
            or not self.epochs.open
            or self.numbers.counted
            or not self.wiring.check_steps.is_complete()
        ):
            return False
        clock.begin()
        clock.idle = True
        self._entries = self.gate.lock.entries
        return True

    def snapshot(self, parameters: Sequence[Parameter], *, releases: bool = False, gradients: bool = False) -> None:
        """Copy the wanted weights before an optimizer changes them.

        `releases`: publish large weights instead, and large `gradients` if these are final.
        """
        if not self.ranks.surveyed:
            self.ranks.survey()
        if self.demand.inside_due():
            if releases and self.clock.open and not (self.clock.idle or self.over):
                self.parameters.release(parameters, gradients=gradients)
            self.parameters.snapshot(parameters, settle=bool(self.optimizers))

    # -- ending ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """End a step whose optimizers stepped in a backward, once the backward is over."""
        if self.over and not recomputing():
            self.over = False
            self.gate.guard("step", self.end)

    def end_by_hand(self) -> None:
        """End the step at the user's call."""
        with self.gate.lock:
            if self.over:
                self.settle()
            else:
                self.gate.guard("step", self.end)

    def end(self) -> None:
        """Publish losses, weights, gradients and updates, and end the step."""
        self._settle_undecided()
        self.begin()  # the step counts even if its forward was not seen (compiled, bypassed)
        try:
            if not self.clock.idle:
                self.publisher.datapoints.step_ends()
                if self.in_eval_mode:
                    self.publisher.event(EVAL_MODE, self.clock.began)
                self.objectives.end_step()
                if self.demand.inside_due():
                    if not self.optimizers:
                        self.parameters.compare(self.table.all, self.optimizers.by_hand, ends=True)
                    self._complete_state()
                    self.parameters.publish(self.clock.began)
                self.state.end()
                self.publisher.pulses.step_over()
                self.norms.publish()
                self.publisher.event("batch_finished", self.clock.began)
        except BaseException as error:
            if not isinstance(error, Exception):
                why = f"it was interrupted ({type(error).__name__})"
                self.problems.note(f"the end of step {self.clock.step}", why, warn=not isinstance(error, StopTraining))
            raise
        finally:  # even if this failed, the optimizer has stepped
            self._advance()
        self._look_back()

    def _complete_state(self) -> None:
        """Publish the states of optimizers that did not step, if the whole state is wanted."""
        for optimizer in self.state.left_out():
            parameters = self.table.of(optimizer, self.optimizers.in_order)
            self.snapshot(parameters)
            self.state.optimizer_steps(optimizer, parameters)

    def end_idle(self) -> None:
        """End a step that nobody records."""
        self.gate.lock.run(self._end_idle)

    def _end_idle(self) -> None:
        if self.undecided.waiting:
            self._settle_undecided()
        self._advance()
        if self.between.has_work_after_idle() or self.clock.step >= self.demand.quiet_until:
            self._look_back()

    def end_later(self) -> None:
        """End the step when the running backward is over. Everything until then belongs to the step."""
        self.begin()
        self.forwards.ended_at = next_of_thread()
        self.over = True

    def _advance(self) -> None:
        """Drop the open step's data, and count the step."""
        if not self.over:  # a step that ended in a backward has already noted this
            self.forwards.ended_at = next_of_thread()
        untouched = self.clock.idle and self.gate.lock.entries == self._entries + 1
        self.over = self.clock.idle = False
        if untouched:  # nothing but its end went through the gate, so nothing was kept
            self.clock.end()
            self.forwards.end_step()
            return
        if self.in_eval_mode:
            self.in_eval_mode = False
            self.trained_in_eval_mode += 1
            if self.first_in_eval_mode is None:
                self.first_in_eval_mode = self.clock.began.global_step
        self.optimizers.step_ended()
        self.undecided.step_ended()
        self.gradients.forget()
        if self.parameters.holding:
            self.parameters.forget()
        self.norms.forget()
        self.state.forget()
        self.numbers.end_step()
        self.clock.end()
        self.forwards.end_step()

    def _look_back(self) -> None:
        """Do the work between steps; after the first step, also detect hooks that are never called."""
        if self.wiring.compiled_before:
            self.gate.guard("compiled", functools.partial(self.wiring.tell_unseen_regions, self.demand.modules))
        self.between.work()
        self.state.look_ahead()  # last, because the other work may change what is due

    def finish(self) -> None:
        """End an open step: in a loop without an optimizer, or if some optimizer has stepped."""
        self.settle()
        if self.optimizers.moved or (self.clock.open and self.optimizers.forwards_end_steps):
            self.gate.guard("step", self.end)
        self.gate.guard("step", self.publisher.pulses.publish)

    def forget(self) -> None:
        """Drop the open step's data."""
        self.publisher.pulses.step_over()
        self.gradients.forget()
        self.parameters.forget()
        self.norms.forget()
        self.state.forget()
        self.undecided.forget()
        self.numbers.end_step()

    def settle_losses(self) -> None:
        """Publish undecided passes as evaluations, and the losses of evaluations, all of which are over."""
        self._settle_undecided()
        self.gate.guard("loss", functools.partial(self.objectives.terms.settle, everywhere=True))

    def _settle_undecided(self) -> None:
        if self.undecided.waiting:
            self.gate.guard("an evaluation", self.undecided.settle)

    def release_losses(self) -> None:
        """Publish the losses that are held until an optimizer steps."""
        self.gate.guard("loss", self.objectives.release)

    # -- epochs ---------------------------------------------------------------------------------------------

    def _announce_epoch(self) -> None:
        self.epochs.open = True
        self.publisher.event("epoch_started", self.clock.now())

    def finish_epoch(self) -> None:
        """End the epoch; the next step is the first of the next epoch."""
        if not self.gate.open:
            return
        self.epochs.seen = True
        with self.gate.lock:
            self.settle()
            self.gate.guard("loss", self.objectives.terms.settle)
            if self.clock.open and self.optimizers.forwards_end_steps:
                self.gate.guard("step", self.end)
            if not self.epochs.open:
                self._announce_epoch()
            self.publisher.event("epoch_finished", self.clock.last_of_epoch())
            self.clock.end_epoch()
            self.epochs.open = self.epochs.over = False
