"""Calls of modules: what goes in, what comes out, and the gradients of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, is_grad_enabled, nn

from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.clock import At, Clock
from tracer.observing.demand import Demand
from tracer.observing.forwards import Forwards
from tracer.observing.gradients import Gradients
from tracer.observing.numbers import Numbers
from tracer.observing.passes import Passes
from tracer.observing.publisher import Publisher
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.compiled import Ticket, tag_number, tag_of
from tracer.observing.pytorch.fast_path import may_take_it
from tracer.observing.pytorch.gate import Gate, OpenCall
from tracer.observing.pytorch.hooks import Hook
from tracer.observing.pytorch.tensors import arguments_of, copied, leaves, opaque
from tracer.observing.streams import StreamKey
from tracer.observing.wiring import Wiring

_INNER = ("activations", "layer_inputs", "layer_gradients", "input_gradients")
"""The kinds of messages about the calls of modules."""


@dataclass(eq=False, repr=False)
class Calls:
    """Sees the calls of modules."""

    gate: Gate
    clock: Clock
    demand: Demand
    publisher: Publisher
    numbers: Numbers
    gradients: Gradients
    forwards: Forwards
    wiring: Wiring
    passes: Passes

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """See a call begin."""
        if recomputing():
            first = self._first_call(path)
            if first is not None:
                self._enter(path, [], leaves(arguments_of(args, kwargs)), first, DEFAULT_TAG)
            return
        running = self.passes.enter_at(path, module)
        if not running.listening:
            return
        tag = running.tag
        copies: list[tuple[str, Tensor]] = []
        inputs = leaves(arguments_of(args, kwargs))
        if self.demand.wanted("layer_inputs", path, tag) is not None:
            for leaf, tensor in inputs:  # copied now, because the module may overwrite its input in place
                if self.publisher.can_record("layer_inputs", path, tensor):
                    copies.append((leaf, copied(tensor.detach(), self.publisher.memory)))
        self._enter(path, copies, inputs, self.numbers.call(path, tag), tag)

    def _enter(
        self, path: str, copies: list[tuple[str, Tensor]], inputs: list[tuple[str, Tensor]], call: int, tag: str
    ) -> None:
        """Keep what is known of a call until its forward is over, and only then counted: others may end before it."""
        watched = is_grad_enabled()
        hooks = self.gradients.watch("input_gradients", path, inputs, call, tag, self.forwards.seen) if watched else []
        self.gate.passes.now.inputs.append(OpenCall(path, copies, hooks))

    def _leave(self, path: str, call: int) -> list[tuple[str, Tensor]]:
        """Number the call that is over; the inputs that were copied. What a failed forward left behind is dropped."""
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
        if recomputing():
            self._after_recomputed(path, output)
            return
        running = self.passes.enter_at(path, module)
        if not running.listening:
            return
        tag, now = running.tag, self.clock.now()
        call = self.numbers.count_call(path, tag)
        if running.inputs:
            self._inputs_seen(path, module, tag, call, now)
        observed = leaves(output)
        capture = self.demand.wanted("activations", path, tag, now)
        if capture is not None:
            try:
                for leaf, tensor in observed:
                    stream = StreamKey("activations", path, tag, leaf)
                    self.publisher.deliver(capture, stream, tensor, call, now, module, owned=False)
                if not observed and opaque(output):
                    why = f"the output is a {type(output).__name__}, which is not looked into"
                    self.gate.problems.note(f"activations of {path!r}", why)
            except Exception as error:  # noqa: BLE001 - the output's gradients are another stream
                self.demand.give_up("activations", path, error)
        if is_grad_enabled():
            self.gradients.watch("layer_gradients", path, observed, call, tag, self.forwards.seen)
        elif tag == DEFAULT_TAG:  # a training pass, so this may be the first forward of a reentrant checkpoint
            self.numbers.note_ungraded(path, call)

    def _after_recomputed(self, path: str, output: Any) -> None:
        """See a call end that runs inside a backward."""
        first = self._first_call(path)
        if first is not None:
            self._leave(path, first)
        self.numbers.recompute(path, first)
        if first is None:
            return
        if is_grad_enabled():
            self.gradients.watch("layer_gradients", path, leaves(output), first, DEFAULT_TAG, self.forwards.seen)
        else:  # of a checkpoint inside the checkpoint this is another first forward
            self.numbers.note_ungraded(path, first)

    def _inputs_seen(self, path: str, module: nn.Module, tag: str, call: int, now: At) -> None:
        """Publish the copies of a call's inputs, now that the call has its number."""
        try:
            for leaf, tensor in self._leave(path, call):
                self.publisher.publish("layer_inputs", path, tensor, tag, leaf, call, now, module)
        except Exception as error:  # noqa: BLE001 - the activations are another stream
            self.demand.give_up("layer_inputs", path, error)

    def _first_call(self, path: str) -> int | None:
        """In the second forward of a reentrant checkpoint: which call of the open step is computed again."""
        return None if self.clock.idle or not self.clock.open else self.numbers.first_call(path)

    # -- layers that torch may compute in one go ------------------------------------------------------------

    def quiet_before_layer(self, args: tuple[Any, ...]) -> bool:
        """Whether a layer that has a fast path does not take it: in training it never does."""
        return bool(args[0].training)

    def before_layer(self, path: str, module: Any, args: Any, kwargs: Any) -> None:
        """Step aside for a layer that may take torch's fast path, unless what is inside is asked for by name."""
        asides = self.wiring.asides
        asides.end_last()
        if self.publisher.collecting is not None or not may_take_it(module, args, kwargs):
            return  # a probe's pass is not one of the training's
        running = self.passes.enter_at(path, module)
        hung = asides.inside(module)
        inside = {hanging.hook.name for on, hanging in hung if on is not module and isinstance(hanging.hook, Hook)}
        tag = running.tag
        streams = [(kind, one) for kind in _INNER for one in inside] if running.listening else []
        if any(self.demand.named(kind, one, tag) for kind, one in streams):
            why = (
                f"passes tagged {tag!r} do not take it, because a capture that names their tag takes what is inside; "
                "their results may differ in rounding from unwatched ones"
            )
            self.gate.problems.note(f"torch's fast path in {path!r}", why)
            return
        if any(self.demand.stream(kind, one, tag).asked for kind, one in streams):
            why = f"torch's fast path calls nothing inside; a capture whose tags name {tag!r} switches it off"
            self.gate.problems.note(f"the inside of {path!r} in passes tagged {tag!r}", why, warn=False)
        asides.begin(module)

    # -- compiled graphs ------------------------------------------------------------------------------------

    def ticket(self, path: str) -> Ticket:
        """What a compiled graph keeps of the call of a module that was just seen, for its gradient."""
        running, now = self.gate.passes.now, self.clock.now()
        if recomputing():
            return (self.numbers.recalled(path), *now, tag_number(DEFAULT_TAG))
        call = self.numbers.call(path, running.tag) if running.listening else 0
        return (call - 1, *now, tag_number(running.tag))

    def gradient_seen(self, path: str, leaf: str, gradient: Tensor, ticket: Ticket) -> None:
        """Publish the gradient of what a compiled module gave."""
        call, step, train_step, epoch, tag = ticket
        stream = StreamKey("layer_gradients", path, tag_of(tag), leaf)
        self.gradients.seen(stream, call, At(step, train_step, epoch), gradient)
