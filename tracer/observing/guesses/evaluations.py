"""Passes in eval mode with gradients, until it is known whether the training learns from them.

The mode of a model does not tell a training pass: a program may forget ``model.train()`` after an evaluation, or train
in eval mode on purpose. A pass whose output is differentiated is a training pass; any other is an evaluation. What is
observed of such a pass is held until its ``backward`` begins, until its graph is gone, or until the step ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tracer import walking
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG
from tracer.observing.clock import At, UndecidedTag
from tracer.observing.guesses.losses import Terms
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.pytorch.autograd import Node, is_made_within, next_of_thread, node_of
from tracer.observing.pytorch.hooks import Told, on_gradient_once
from tracer.observing.pytorch.tensors import leaves, unobservable
from tracer.observing.state import Beginning, State


class UndecidedPass:
    """A pass of which it is not known yet whether it is a training pass.

    Parameters
    ----------
    top : Module
        The called model.
    at : At
        The counters when it began.
    outside : bool
        Whether it consists of calls of modules outside a forward of the model.

    Attributes
    ----------
    tag : UndecidedTag
    forwards : int
        How many forwards of the model it counts as.
    beginning : Beginning or None
        The state of the training when it began.
    in_eval_mode : bool
        Whether something that was called in it was in eval mode.
    """

    def __init__(self, top: nn.Module, at: At, *, outside: bool) -> None:
        self.tag = UndecidedTag()
        self.top = weakref.ref(top)
        self.at = at
        self.outside = outside
        self.forwards = 0 if outside else 1
        self.beginning: Beginning | None = None
        self.in_eval_mode = False
        self.thread = threading.get_ident()
        self._first = next_of_thread()
        self._spans: list[tuple[Node, int]] = []  # nodes of the graph: the first one, and the number after the last
        self._graph: list[weakref.ref[Told]] = []  # hooks that live as long as the graph

    def made(self, outputs: Iterable[Tensor]) -> None:
        """Note the outputs of a call."""
        for one in outputs:
            node = node_of(one)
            if node is not None:
                if self.outside:
                    self._spans.append((node, node[1] + 1))
                hook = Told(self._nothing)
                on_gradient_once(one, hook)
                self._graph.append(weakref.ref(hook))

    def _nothing(self, gradient: Tensor) -> None:
        """Called with the gradient of an output."""

    def over(self) -> None:
        """Note that the forward of the model is over."""
        self._spans.append((self._first, next_of_thread()[1]))

    @property
    def is_running(self) -> bool:
        """Whether its forward has not ended."""
        return not self.outside and not self._spans

    @property
    def is_alive(self) -> bool:
        """Whether it may still be differentiated, or is still running."""
        self._graph = [one for one in self._graph if one() is not None]
        return bool(self._graph) or not self._spans

    def is_behind(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of some tensors is made of its outputs."""
        return any(is_made_within(one, self._spans) for one in tensors)


class UndecidedPasses(ExporterPart):
    """Holds the messages of undecided passes, and publishes them once it is known what the passes are for.

    Attributes
    ----------
    waiting : list of UndecidedPass
        In the order in which they began.
    """

    def __init__(self, ground: Ground, state: State, terms: Terms) -> None:
        super().__init__(ground)
        self.state = state
        self.terms = terms
        self.waiting: list[UndecidedPass] = []

    def may_train(self, top: nn.Module) -> bool:
        """Whether the training may learn from a pass with gradients through a model in eval mode."""
        if self.optimizers.forwards_end_steps:
            return False
        trainable = self.clock.kept.trainable
        known = trainable.get(id(top))
        if known is None:
            known = trainable[id(top)] = any(one.requires_grad for one in walking.parameters(top))
        return known

    def begin(self, top: nn.Module, *, outside: bool) -> UndecidedPass:
        """A pass that begins; a call outside the model's forward continues a pass of the same model, if one waits."""
        for one in self.waiting:
            if one.thread == threading.get_ident() and one.is_running:
                one.over()  # it was interrupted, and did not report its end
        if outside:
            for one in reversed(self.waiting):
                if one.outside and one.top() is top and one.thread == threading.get_ident():
                    return one
        new = UndecidedPass(top, self.clock.now(), outside=outside)
        self.waiting.append(new)
        return new

    def forward_ended(self, tag: UndecidedTag, output: Any) -> None:
        """Note the end of the model's forward, and its output."""
        one = self._waiting(tag)
        if one is not None:
            one.over()
            one.made(tensor for _, tensor in leaves(output))

    def call_ended(self, tag: UndecidedTag, outputs: Iterable[Tensor]) -> None:
        """Note the end of a call of a module outside a forward of the model, and its outputs."""
        one = self._waiting(tag)
        if one is not None:
            one.made(outputs)

    def loss_computed(self, tag: UndecidedTag, name: str, value: Tensor) -> None:
        """Hold what a loss function gave in a pass; without a name, it is the whole loss of the pass."""
        if unobservable(value) is None and self.demand.stream("loss", None, EVAL_TAG).asked:
            tag.losses = [*(tag.losses if name else ()), (name, value.detach().clone())]

    def _waiting(self, tag: UndecidedTag) -> UndecidedPass | None:
        return next((one for one in self.waiting if one.tag is tag), None)

    @property
    def latest(self) -> UndecidedTag | None:
        """The tag of this thread's latest pass, if that is undecided."""
        thread = threading.get_ident()
        return next((one.tag for one in reversed(self.waiting) if one.thread == thread), None)

    # -- deciding -------------------------------------------------------------------------------------------

    def behind(self, tensors: Sequence[Tensor]) -> list[UndecidedPass]:
        """The passes that some tensors, which are about to be differentiated, are made of."""
        return [one for one in self.waiting if one.is_behind(tensors)]

    def settle(self, *, dead: bool = False) -> None:
        """Publish all waiting passes as evaluations; `dead`: only those that cannot be differentiated any more."""
        for one in [*self.waiting]:
            if not (one.is_running or (dead and one.is_alive)):
                self._evaluate(one)

    def forget(self) -> None:
        """Drop all waiting passes."""
        self.waiting = []

    def train(self, one: UndecidedPass) -> None:
        """Publish a pass as a training pass of the open step."""
        counts = self._decide(one, DEFAULT_TAG)
        self.forwards.training += one.forwards
        top = one.top()
        if top is not None:
            self.optimizers.note_forward(top)
        if not self.clock.idle:
            if one.beginning is not None:
                self.gate.guard("state", lambda: self.state.forward_begins(one.beginning))
            self._publish(one, self.clock.began, counts)

    def _evaluate(self, one: UndecidedPass) -> None:
        """Publish a pass as an evaluation."""
        counts = self._decide(one, EVAL_TAG)
        number = 0 if one.outside else self.numbers.count_pass(EVAL_TAG)
        self._publish(one, At(*one.at[:3], number), counts)

    def _decide(self, one: UndecidedPass, tag: str) -> dict[str, int]:
        """Let a pass have a tag; returns how often each module was called in it."""
        self.waiting.remove(one)
        counts = self.numbers.take_calls(one.tag)
        calls = self.numbers.calls_of(tag)
        one.tag.decide(tag, {path: calls.get(path, 0) for path in counts})
        running = self.gate.passes.now
        if running.tag is one.tag:
            running.tag = tag
        return counts

    def _publish(self, one: UndecidedPass, at: At, counts: Mapping[str, int]) -> None:
        """Publish the messages of a pass that has been decided."""
        tag = one.tag.decided
        calls = self.numbers.calls_of(tag)
        for name, count in counts.items():
            calls[name] = calls.get(name, 0) + count
        (held, one.tag.held), (losses, one.tag.losses) = (one.tag.held, []), (one.tag.losses, [])
        for stream, data, call in held:
            kind, path, leaf = stream.kind, stream.module, stream.leaf
            if kind == "sample_ids":
                number = None if tag == DEFAULT_TAG else at.batch
            else:
                number = None if call is None else call + one.tag.shift.get(path or "", 0)
            pass_at = at._replace(batch=number or 0) if one.outside and tag == EVAL_TAG else at
            try:
                self.publisher.publish(kind, path, data, tag, leaf, number, pass_at)
            except Exception as error:  # noqa: BLE001 - under strict it is raised again
                self.demand.give_up(kind, path, error)
        if tag == EVAL_TAG and losses:  # the training's loss is what is differentiated
            self.terms.settle()
            for name, value in losses:
                if name:
                    self.terms.wait(name, value, tag, passes_are_seen=True)
                else:
                    self.terms.whole(value, tag)
            self.terms.settle()
