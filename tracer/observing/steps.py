"""Begins and ends steps and epochs, by the steps of optimizers, and publishes their data."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tracer.errors import StopTraining
from tracer.messaging.messages import EVAL_MODE
from tracer.observing.clock import OpenStep
from tracer.observing.gradients import GRADIENT_NORMS, GradientNorms, Gradients
from tracer.observing.guesses.evaluations import UndecidedPasses
from tracer.observing.guesses.losses import Objectives
from tracer.observing.guesses.optimizers import skipped_inside, steps_within
from tracer.observing.models import Parameter, Tensors
from tracer.observing.parameters import Parameters
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.pytorch.autograd import NO_BACKWARD, backward_running, next_of_thread, recomputing
from tracer.observing.pytorch.hooks import Role, Site, after_step, before_step, is_heard_last, leaves_gradients
from tracer.observing.state import State
from tracer.observing.wanted_parameters import Ranks

_IDLE_STEPS = 16
"""Of the steps that nobody records, each of this number is followed by the work between steps."""


@dataclass(slots=True)
class EpochState:
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


class Steps(ExporterPart):
    """Begins and ends the steps of a training.

    Attributes
    ----------
    over : bool
        Whether the open step ends when the running backward is over.
    trained_in_eval_mode : int
        In how many steps a training pass ran while the model was in eval mode.
    epochs : EpochState
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
        self.trained_in_eval_mode = 0
        self.first_in_eval_mode: int | None = None
        self.epochs = EpochState()
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
                if self.clock.kept.in_eval_mode:
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
        if self.clock.kept.in_eval_mode:
            self.trained_in_eval_mode += 1
            if self.first_in_eval_mode is None:
                self.first_in_eval_mode = self.clock.began.global_step
        self.optimizers.step_ended()
        self._drop()
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
        self.undecided.forget()
        self._drop()

    def _drop(self) -> None:
        """Drop what the parts keep of the open step."""
        self.gradients.forget()
        if self.parameters.holding:
            self.parameters.forget()
        self.clock.kept = OpenStep()
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


class OptimizerSteps(ExporterPart):
    """Observes optimizer steps.

    Attributes
    ----------
    scaled : callable
        Takes the tensor that a GradScaler made of a loss, the loss, and the factor.
    calls : int
        How many steps were seen.
    skipped : int
        How many steps a GradScaler skipped.
    """

    def __init__(self, ground: Ground, steps: Steps, scaled: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        super().__init__(ground)
        self.steps = steps
        self.parameters = steps.parameters
        self.objectives = steps.objectives
        self.state = steps.state
        self.scaled = scaled
        self.calls = 0
        self.skipped = 0

    def sites(self, optimizer: Optimizer) -> Iterator[Site]:
        """The hooks of an optimizer."""
        yield Site(optimizer, Role.BEFORE_OPTIMIZER, "", before_step, self.before, self.quiet_before)
        yield Site(optimizer, Role.AFTER_OPTIMIZER, "", after_step, self.after, self.quiet_after)

    def quiet_before(self, args: tuple[Any, ...]) -> bool:
        """Whether this step's training passes are known to be unwanted."""
        return self.clock.step < self.demand.quiet_until

    def before(self, _: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before an optimizer's step."""
        if self.optimizers.outdated:
            self.wiring.let_go_of_replaced()
        self.optimizers.steps_inside(optimizer)
        self.objectives.stepped(optimizer)
        if self.optimizers.comes_after_last(optimizer):
            return  # its weights belong to the step that has ended
        # the forward may still follow, in a closure, so only the clock decides whether data is wanted
        if not self.demand.nothing_due():
            self.wiring.check_optimizers()
            if not recomputing():
                self.wiring.look()
            parameters = self.table.of(optimizer, self.optimizers.in_order)
            final = self._are_final(optimizer, args, kwargs)
            if final:
                self.gate.guard(GRADIENT_NORMS, functools.partial(self.steps.norms.optimizer_steps, optimizer))
            gradients = final and self._ends_surely(optimizer)
            self.steps.snapshot(parameters, releases=not recomputing(), gradients=gradients)
            if self.demand.of_state:
                self.gate.guard("state", functools.partial(self.state.optimizer_steps, optimizer, parameters))
            if self.demand.inside_due() and final and not leaves_gradients(optimizer):
                self.parameters.keep_gradients(parameters)

    def _ends_surely(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer step surely ends the training's step."""
        alone = len(self.optimizers.all) == 1 and not self.optimizers.nest
        return alone and getattr(optimizer, "found_inf", None) is None  # with found_inf, the step may skip itself

    def _are_final(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether the gradients before a step are those that the optimizer will use.

        Not if a closure computes them in the step, if they are unscaled in the step, or if a later hook may clip them.
        """
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            return False
        return is_heard_last(optimizer) and getattr(optimizer, "grad_scale", None) is None

    def quiet_after(self, args: tuple[Any, ...]) -> bool:
        """Whether this ends a step that nobody records. If so, end it here, as `after` would."""
        optimizer: Optimizer = args[0]
        if not self.clock.idle or self.steps.over or not self.optimizers.is_known_to_end(optimizer):
            return False
        if getattr(optimizer, "found_inf", None) is not None or backward_running() != NO_BACKWARD:
            return False
        self.calls += 1
        self.steps.end_idle()
        return True

    def after(self, _: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called after an optimizer's step."""
        if steps_within(optimizer):
            return
        self.calls += 1
        self.objectives.stepped(optimizer)  # a closure may have differentiated another loss
        if skipped_inside(optimizer):
            self.skip(optimizer)
            return
        if self.optimizers.comes_after_last(optimizer):
            self._learn_order(optimizer)
            return
        last = self.optimizers.ends_step(optimizer)
        in_backward = recomputing()
        try:
            due = not self.demand.nothing_due()
            if due and not self._are_final(optimizer, args, kwargs):
                self.gate.guard(GRADIENT_NORMS, functools.partial(self.steps.norms.optimizer_steps, optimizer))
            if due and self.demand.inside_due():
                ends = last and not in_backward
                self.parameters.compare(self.table.of(optimizer, self.optimizers.in_order), True, ends=ends)
        finally:  # under strict an exception passes through, but the optimizer has stepped
            if in_backward and (last or self.optimizers.one_each):
                self.steps.end_later()  # in a backward, the supposedly last optimizer may step first
            elif last:
                self.steps.end()
            elif not self.optimizers.is_beside(optimizer):
                self.optimizers.moved = True

    def _learn_order(self, optimizer: Optimizer) -> None:
        """Learn that an optimizer steps after the supposedly last one. Its data of this step is lost."""
        ended = self.optimizers.ender
        self.optimizers.is_last(optimizer)
        step = max(self.clock.step - 1, 0)
        why = (
            f"the last optimizer of a step is the {type(optimizer).__name__} that was made before the "
            f"{type(ended).__name__} that was taken for it; what it trains has no weights, gradients and updates of "
            f"step {step}, and forwards since then are of the step after it"
        )
        self.problems.note(f"the end of step {step}", why)

    # -- GradScalers ----------------------------------------------------------------------------------------

    def knows(self, optimizer: object) -> bool:
        """Whether an optimizer is observed."""
        return self.optimizers.place_of(optimizer) is not None

    def scales(self, scaler: GradScaler) -> None:
        """Called when a GradScaler multiplies losses."""
        self.state.scaled(scaler)

    def skip(self, optimizer: Optimizer) -> None:
        """Called when a GradScaler skips an optimizer's step. The clock does not advance."""
        self.skipped += 1
        self.objectives.stepped(optimizer)
        self.bus.register_topic("skipped_step", "network")
        if not self.demand.nothing_due():
            # another optimizer may still end this step
            self.steps.snapshot(self.table.of(optimizer, self.optimizers.in_order))
        self.publisher.event("skipped_step", self.clock.now())


_LATE = 10
"""A note is made if the open step has more than this many times the usual number of forwards at the end."""


class Retrospect(ExporterPart):
    """Notes at the end of a run what was not observed, with the reasons.

    Attributes
    ----------
    unended : dict or None
        The step that was open when the run ended, with its `passes`, which belong to no training step.
    """

    def __init__(self, ground: Ground, optimizer_steps: OptimizerSteps) -> None:
        super().__init__(ground)
        self.optimizer_steps = optimizer_steps
        self.unended: dict[str, int] | None = None

    def tell(self, steps: int) -> None:
        """Note what was not seen in a run of this many steps."""
        self._tell_of_steps(steps)
        self._tell_of_passes(steps)
        self._tell_of_mode()
        self._tell_own_calls(steps)
        self._tell_of_inputs(steps)

    def _tell_of_steps(self, steps: int) -> None:
        """Note if the given optimizer never stepped, or stopped stepping."""
        forwards, stepped = self.forwards, self.optimizer_steps
        if self.optimizers and forwards.training > 1 and not stepped.calls and not stepped.skipped:
            why = (
                "step() of the optimizer that was given was never called, so everything is of one step; give the "
                "optimizer whose step() is called, or optimizer=() and call step() of the run"
            )
            self.problems.note("the end of a step", why)
        late = forwards.of_open_step
        if self.optimizers and steps and late * steps > _LATE * forwards.of_ended_steps:
            why = (
                f"{late} forwards came since the optimizer that was given stepped last, and are all of one step; if "
                "another took its place, give it to set_optimizer of the exporter"
            )
            self.problems.note("the end of the last step", why)

    def _tell_of_passes(self, steps: int) -> None:
        """Note the passes in training mode that belong to no training step, as far as known at the end."""
        late = self.forwards.of_open_step
        if self.clock.open and late and steps and not self.clock.idle:
            step, train_step, epoch, _ = self.clock.began
            self.unended = {"global_step": step, "train_step": train_step, "epoch": epoch, "passes": late}
        never = self.forwards.undifferentiated
        if never and steps:
            why = (
                f"of {never} forwards in training mode nothing was differentiated, as of an agent that acts, of "
                "samples that are drawn, or of a look at the model; they are calls of training steps all the same; "
                "torch.no_grad(), model.eval() or run.tag('acting') around them tells them apart"
            )
            self.problems.note("what forwards are for", why, warn=False)

    def _tell_of_mode(self) -> None:
        """Note the steps that were trained while the model was in eval mode."""
        told = self.optimizer_steps.steps
        if told.first_in_eval_mode is not None:
            more = told.trained_in_eval_mode - 1
            after = f", and so {'was' if more == 1 else 'were'} {more:,} later step{'s' * (more > 1)}" if more else ""
            why = (
                f"step {told.first_in_eval_mode:,} was trained while the model was in eval() mode{after}: dropout did "
                "nothing, and batch normalisation used running statistics; model.train() ends that mode"
            )
            self.problems.note("the mode of the model", why, warn=False)

    def _tell_own_calls(self, steps: int) -> None:
        """Note the modules whose forward was not seen because their class's ``__call__`` calls no hooks."""
        modules, root = self.demand.modules, self.models.root
        unseen = [(path, modules[path]) for path in self.wiring.silent(modules)]
        if root is not None and steps and not self.forwards.seen:
            unseen = [("", root), *((path, one) for path, one in unseen if one is not root)]
        for path, one in unseen:
            if type(one).__call__ is not nn.Module.__call__:
                name = type(one).__name__
                why = f"{name} has a __call__ of its own that does not make that of torch.nn.Module, which calls hooks"
                self.problems.note(f"the forward of {path!r}" if path else "the forward of the model", why)

    def _tell_of_inputs(self, steps: int) -> None:
        """Note if the model itself was never called, so that nothing is known as its input."""
        root = self.models.root
        if root is None or isinstance(root, Tensors) or self.models.several or self.forwards.seen or not steps:
            return
        if self.demand.asked("input_data", None) and type(root).__call__ is nn.Module.__call__:
            why = (
                "the model itself was never called, only parts of it, or its forward() directly, which calls no hooks; "
                "the parts are recorded, but no step can be run again"
            )
            self.problems.note("input_data", why, warn=False)
