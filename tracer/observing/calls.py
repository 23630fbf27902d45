"""Calls of modules: their inputs and outputs, the gradients of both, and weights that are computed for a call."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch._C import _current_graph_task_id

from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.clock import At
from tracer.observing.numbers import StreamKey
from tracer.observing.part import Ground, Part
from tracer.observing.passes import Passes
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.compiled import Ticket, tag_number, tag_of
from tracer.observing.pytorch.fast_path import may_take_it
from tracer.observing.pytorch.gate import OpenCall
from tracer.observing.pytorch.hanging import Hanging, Told, on_gradient
from tracer.observing.pytorch.hooks import Hook
from tracer.observing.pytorch.leaves import arguments_of
from tracer.observing.pytorch.tensors import leaves, opaque

_INNER = ("activations", "layer_inputs", "layer_gradients", "input_gradients")
"""The kinds of messages about the calls of modules."""


class Calls(Part):
    """Sees the calls of modules."""

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes
        self.gradients = passes.steps.gradients

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
        if self.demand.wanted("layer_inputs", path, tag):
            for leaf, tensor in inputs:  # copied now, because the module may overwrite its input in place
                if self.publisher.can_record("layer_inputs", path, tensor):
                    copies.append((leaf, self.publisher.copy(tensor.detach())))
        self._enter(path, copies, inputs, self.numbers.call(path, tag), tag)

    def _enter(
        self, path: str, copies: list[tuple[str, Tensor]], inputs: list[tuple[str, Tensor]], call: int, tag: str
    ) -> None:
        """Keep the inputs of a call until its forward is over. It is counted then, as others may end before it."""
        watched = is_grad_enabled()
        hooks = self.gradients.watch("input_gradients", path, inputs, call, tag, self.forwards.seen) if watched else []
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
        if recomputing():
            self._after_recomputed(path, output)
            return
        running = self.passes.enter_at(path, module)
        if not running.listening:
            running.count(path)
            return
        tag, now = running.tag, self.demand.at(running.tag)
        call = self.numbers.count_call(path, tag)
        if running.inputs:
            self._inputs_seen(path, tag, call, now)
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
        if is_grad_enabled():
            self.gradients.watch("layer_gradients", path, observed, call, tag, self.forwards.seen)
        elif tag == DEFAULT_TAG:  # a training pass, so this may be the first forward of a reentrant checkpoint
            self.numbers.note_ungraded(path, call)

    def _after_recomputed(self, path: str, output: Any) -> None:
        """See the end of a call that runs inside a backward."""
        first = self._first_call(path)
        if first is not None:
            self._leave(path, first)
        self.numbers.recompute(path, first)
        if first is None:
            return
        if is_grad_enabled():
            self.gradients.watch("layer_gradients", path, leaves(output), first, DEFAULT_TAG, self.forwards.seen)
        else:  # for a checkpoint inside the checkpoint, this is a first forward once more
            self.numbers.note_ungraded(path, first)

    def _inputs_seen(self, path: str, tag: str, call: int, now: At) -> None:
        """Publish the copies of a call's inputs, now that the call has its number."""
        try:
            for leaf, tensor in self._leave(path, call):
                self.publisher.publish("layer_inputs", path, tensor, tag, leaf, call, now)
        except Exception as error:  # noqa: BLE001 - the activations are another stream
            self.demand.give_up("layer_inputs", path, error)

    def _first_call(self, path: str) -> int | None:
        """The number of the call that the second forward of a reentrant checkpoint computes again; None elsewhere."""
        return None if self.clock.idle or not self.clock.open else self.numbers.first_call(path)

    # -- layers that torch may compute in one go ------------------------------------------------------------

    def quiet_before_layer(self, args: tuple[Any, ...]) -> bool:
        """Whether a layer does not take its fast path, because it is in training mode."""
        return bool(args[0].training)

    def before_layer(self, path: str, module: Any, args: Any, kwargs: Any) -> None:
        """Step aside for a layer that may take torch's fast path, unless what is inside is asked for by name."""
        asides = self.wiring.asides
        asides.end_last()
        if self.publisher.collecting is not None or not may_take_it(module, args, kwargs):
            return  # probes take what is inside anyway
        running = self.passes.enter_at(path, module)
        hung = asides.inside(module)
        inside = {hanging.hook.name for on, hanging in hung if on is not module and isinstance(hanging.hook, Hook)}
        tag = running.tag
        heard = running.listening or running.counts is not None  # of one evaluation, all passes take the same path
        streams = [(kind, one) for kind in _INNER for one in inside] if heard else []
        if any(self.demand.named(kind, one, tag) for kind, one in streams):
            why = (
                f"passes tagged {tag!r} do not take it, because a capture that names their tag takes what is inside; "
                "their results may differ in rounding from unwatched ones"
            )
            self.problems.note(f"torch's fast path in {path!r}", why)
            return
        if any(self.demand.stream(kind, one, tag).asked for kind, one in streams):
            why = f"torch's fast path calls nothing inside; a capture whose tags name {tag!r} switches it off"
            self.problems.note(f"the inside of {path!r} in passes tagged {tag!r}", why, warn=False)
        asides.begin(module)

    # -- compiled graphs ------------------------------------------------------------------------------------

    def ticket(self, path: str) -> Ticket:
        """The numbers that a compiled graph keeps for the gradient of the call that was just seen."""
        running = self.gate.passes.now
        now = self.demand.at(running.tag)
        if recomputing():
            return (self.numbers.recalled(path), *now, tag_number(DEFAULT_TAG))
        call = self.numbers.call(path, running.tag) if running.listening else 0
        return (call - 1, *now, tag_number(running.tag))

    def gradient_seen(self, path: str, leaf: str, gradient: Tensor, ticket: Ticket) -> None:
        """Publish the gradient of the output of a compiled module."""
        call, step, train_step, epoch, batch, tag = ticket
        stream = StreamKey("layer_gradients", path, tag_of(tag), leaf)
        self.gradients.seen(stream, call, At(step, train_step, epoch, batch), gradient)


class ComputedWeights(Part):
    """Sees the weights that parametrizations and hooks of the program compute for a forward.

    Parameters
    ----------
    gradients : Gradients
        Knows by what a GradScaler has multiplied a loss.
    """

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes
        self.gradients = passes.steps.gradients
        self.parameters = passes.steps.parameters
        # by path, the last weight that was computed for a forward, and the hook on it
        self._watched: dict[str, tuple[weakref.ref[Tensor], Hanging]] = {}

    def after_accumulation(self, path: str, tensor: Tensor) -> None:
        """Keep a parameter's running sum of gradients. Without an optimizer, nothing says when it is final."""
        if self.clock.open and not self.clock.idle and tensor.grad is not None:
            self.parameters.accumulated(self.table.by_path[path], tensor.grad, self.gradients.scale)

    def after_parametrization(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the weight that a parametrization has computed for the forward; to compute it again might change it."""
        if isinstance(output, Tensor):
            self._seen(path, output)

    def after_replaced(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the tensor that a hook of the program has put in a weight's place, after the forward has used it."""
        parameter = self.table.by_path[path]
        there = parameter.in_place if parameter.tensor is None else None
        if there is not None:
            if not recomputing():
                self.passes.enter_at(path.rpartition(".")[0], module)
            self._seen(path, there)

    def _seen(self, path: str, value: Tensor) -> None:
        """Keep a weight that was computed for a forward of the training, and hang a hook for its gradient."""
        parameter = self.table.by_path[path]
        if self.clock.idle or not self.clock.open:
            return
        if not recomputing():
            running = self.gate.passes.now
            if not (running.listening and running.tag == DEFAULT_TAG):
                return
            self.parameters.computed(parameter, value)
        if is_grad_enabled() and value.requires_grad and not value.is_leaf:
            last, wanted = self._watched.get(path), self.parameters.wanted(parameter, parameter.gradients)
            if wanted and (last is None or last[0]() is not value):
                self._watched[path] = weakref.ref(value), on_gradient(value, Told(self.gradient_came, path))

    def gradient_came(self, path: str, gradient: Tensor) -> None:
        """Add a gradient to those of a computed weight."""
        parameter = self.table.by_path.get(path)  # it may be gone since the forward
        if parameter is not None and self.gate.open and self.clock.open and not self.clock.idle:
            scale, task = self.gradients.scale, _current_graph_task_id()
            add = functools.partial(self.parameters.add_gradient, parameter, gradient, scale, task)
            self.gate.guard(f"the gradient of {path!r}", add)

    def detach(self) -> None:
        """Take all hooks off."""
        for _, handle in self._watched.values():
            handle.remove()
        self._watched = {}
