"""Calls of modules: their inputs and outputs, and the gradients of both."""

from __future__ import annotations

from typing import Any

from torch import Tensor, is_grad_enabled, nn

from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.clock import At
from tracer.observing.gradients import GradientHook, Plan
from tracer.observing.numbers import StreamKey
from tracer.observing.part import Ground, Part
from tracer.observing.passes import Passes
from tracer.observing.pulses import Rows
from tracer.observing.pytorch.autograd import NO_BACKWARD, backward_running, recomputing
from tracer.observing.pytorch.compiled import Ticket, tag_number, tag_of
from tracer.observing.pytorch.gate import OpenCall
from tracer.observing.pytorch.hanging import gradient_hooks, next_number
from tracer.observing.pytorch.leaves import arguments_of
from tracer.observing.pytorch.tensors import leaves, opaque
from tracer.observing.tags import UndecidedTag


class Calls(Part):
    """Sees the calls of modules."""

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes
        self.gradients = passes.steps.gradients

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """See a call begin."""
        if recomputing():
            first = self.gradients.first_call(path)
            if first is not None:
                now = self.demand.at(DEFAULT_TAG)
                self._enter(path, [], leaves(arguments_of(args, kwargs)), first, DEFAULT_TAG, now)
            return
        running = self.passes.enter_at(path, module)
        if not running.listening:
            return
        tag, now = running.tag, self.demand.at(running.tag)
        copies: list[tuple[str, Tensor]] = []
        inputs = leaves(arguments_of(args, kwargs))
        if self.demand.wanted("layer_inputs", path, tag, now):
            for leaf, tensor in inputs:  # copied now, because the module may overwrite its input in place
                if self.publisher.can_record("layer_inputs", path, tensor):
                    copies.append((leaf, self.publisher.copy(tensor.detach())))
        self._enter(path, copies, inputs, self.numbers.call(path, tag), tag, now)

    def _enter(
        self,
        path: str,
        copies: list[tuple[str, Tensor]],
        inputs: list[tuple[str, Tensor]],
        call: int,
        tag: str,
        now: At,
    ) -> None:
        """Keep the inputs of a call until its forward is over. It is counted then, as others may end before it."""
        hooks = self.gradients.watch("input_gradients", path, inputs, call, tag, now) if is_grad_enabled() else []
        self.gate.passes.now.inputs.append(OpenCall(path, copies, hooks))

    def _leave(self, path: str, call: int) -> list[tuple[str, Tensor]]:
        """Tell the hooks of a call that is over its number; returns the copied inputs. Drops those of failed calls."""
        running = self.gate.passes.now
        while running.inputs:
            owner, copies, hooks = running.inputs.pop()
            if owner == path:
                for hook in hooks:
                    hook.call = call
                return copies
        return []

    def after(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """See a call end."""
        if backward_running() != NO_BACKWARD:
            self._after_recomputed(path, output)
            return
        running = self.gate.passes.now
        if not running.depth:
            running = self.passes.enter_at(path, module)
        if not running.listening:
            running.count(path)
            return
        tag, clock = running.tag, self.clock
        now = clock.began if clock.open and tag == DEFAULT_TAG else self.demand.at(tag)
        call = self.numbers.count_call(path, tag)
        if running.inputs:
            self._publish_inputs(path, tag, call, now)
        key = None
        if type(output) is Tensor and tag == DEFAULT_TAG and now is clock.began:
            dues, step = self.demand.dues, now.global_step
            key = path, dues.mask if step == dues.step else dues.at(step), output.dim(), output.dtype
            plan = dues.plans.get(key)
            if plan is not None and self._take(path, plan, output, call, now):
                return
        observed = leaves(output)
        captures = self.demand.wanted("activations", path, tag, now)
        if captures:
            try:
                for leaf, tensor in observed:
                    stream = StreamKey("activations", path, tag, leaf)
                    self.publisher.deliver(captures, stream, tensor, call, now, owned=False)
                if not observed and opaque(output):
                    why = f"the output is a {type(output).__name__}, which is not looked into"
                    self.problems.note(f"activations of {path!r}", why)
            except Exception as error:  # noqa: BLE001 - the output's gradients are another stream
                self.demand.give_up("activations", path, error)
        self._watch_output(path, observed, call, tag, now)
        if key is not None and key not in self.demand.dues.plans:
            self.demand.dues.plans[key] = self._plan(path, output, now)
        if running.depth == 0 and type(tag) is UndecidedTag:
            self.passes.undecided.call_ended(tag, [one for _, one in observed])

    def _plan(self, path: str, output: Tensor, now: At) -> Plan | None:
        """What to do with a training's outputs like this one in steps with these dues; None: as with any others."""
        found: list[Rows | None] = []
        for kind in ("activations", "layer_gradients"):
            captures = self.demand.wanted(kind, path, DEFAULT_TAG, now)
            if not self.demand.is_steady(kind, path) or not self.publisher.keeps_rows(kind, captures):
                return None
            stream = StreamKey(kind, path, DEFAULT_TAG, "")
            found.append(self.publisher.rows(captures, stream, output) if captures else None)
        return Plan(self.demand.dues.plans, *found)

    def _take(self, path: str, plan: Plan, output: Tensor, call: int, now: At) -> bool:
        """Take the rows of a small output, and watch for those of its gradient; False: nothing was done."""
        publisher = self.publisher
        if publisher.collecting is not None or (output.requires_grad and output.grad_fn is None):
            return False
        if plan.outputs is not None and not publisher.pulses.take(plan.outputs, output, call, now, publisher.rank):
            return False
        if not is_grad_enabled():
            self.gradients.note_ungraded(path, call)
        elif plan.gradients is not None and output.requires_grad:
            hook = GradientHook(self.gradients, plan.gradients.stream, call, now, None, plan)
            gradient_hooks(output)[next_number()] = hook
        return True

    def _after_recomputed(self, path: str, output: Any) -> None:
        """See the end of a call that runs inside a backward."""
        first = self.gradients.recompute(path)
        if first is not None:
            self._leave(path, first)
            self._watch_output(path, leaves(output), first, DEFAULT_TAG, self.demand.at(DEFAULT_TAG))

    def _watch_output(self, path: str, output: list[tuple[str, Tensor]], call: int, tag: str, now: At) -> None:
        """Watch for the gradients of a call's output; without gradients, expect the call to be computed again.

        Also the second forward of a checkpoint may be without: for a checkpoint inside, it is a first one once more.
        """
        if is_grad_enabled():
            self.gradients.watch("layer_gradients", path, output, call, tag, now)
        elif tag == DEFAULT_TAG:
            self.gradients.note_ungraded(path, call)
        elif type(tag) is UndecidedTag:
            self.gradients.note_ungraded(path, call + self.numbers.call(path, DEFAULT_TAG))

    def _publish_inputs(self, path: str, tag: str, call: int, now: At) -> None:
        """Publish the copies of a call's inputs, now that the call has its number."""
        try:
            for leaf, tensor in self._leave(path, call):
                self.publisher.publish("layer_inputs", path, tensor, tag, leaf, call, now)
        except Exception as error:  # noqa: BLE001 - the activations are another stream
            self.demand.give_up("layer_inputs", path, error)

    # -- compiled graphs ------------------------------------------------------------------------------------

    def ticket(self, path: str) -> Ticket:
        """The numbers that a compiled graph keeps for the gradient of the call that was just seen."""
        running = self.gate.passes.now
        now = self.demand.at(running.tag)
        if recomputing():
            return (self.gradients.recalled(path), *now, tag_number(DEFAULT_TAG))
        call = self.numbers.call(path, running.tag) if running.listening else 0
        tag = running.tag
        if type(tag) is UndecidedTag:  # a gradient comes only if the training learns from the pass
            call, tag = call + self.numbers.call(path, DEFAULT_TAG), DEFAULT_TAG
        return (call - 1, *now, tag_number(tag))

    def gradient_seen(self, path: str, leaf: str, gradient: Tensor, ticket: Ticket) -> None:
        """Publish the gradient of the output of a compiled module."""
        call, step, train_step, epoch, batch, tag = ticket
        stream = StreamKey("layer_gradients", path, tag_of(tag), leaf)
        self.gradients.seen(stream, call, At(step, train_step, epoch, batch), gradient)
