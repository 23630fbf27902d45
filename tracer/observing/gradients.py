"""Gradients of what modules give and get: hooks on tensors, and what comes back through them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor
from torch._C import _current_graph_task_id

from tracer.observing.clock import At, Clock
from tracer.observing.demand import Demand
from tracer.observing.publisher import Publisher
from tracer.observing.pytorch.autograd import without_modes
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hanging import on_gradient, on_gradient_once
from tracer.observing.streams import StreamKey


@dataclass(eq=False, repr=False)
class Gradients:
    """Watches tensors of a forward, and publishes their gradients."""

    gate: Gate
    clock: Clock
    demand: Demand
    publisher: Publisher

    def __post_init__(self) -> None:
        self._backwards: dict[tuple[StreamKey, int], int] = {}  # how often there was a gradient of a call
        # by tensor, kind, module and place in its output or input
        self._leaf_hooks: dict[tuple[int, str, str | None, str], _LeafHook] = {}
        self._scales: dict[int, Tensor] = {}  # by backward: what a GradScaler has multiplied its loss with

    def watch(
        self, kind: str, path: str, found: list[tuple[str, Tensor]], call: int, tag: str, forward: int
    ) -> list[GradientHook]:
        """Hang hooks on the tensors in an output or input whose gradients are wanted.

        Parameters
        ----------
        kind : str
        path : str
            Of the module.
        found : list of (str, Tensor)
            The tensors, each with its leaf.
        call : int
            Of the module, in this step and pass.
        tag : str
            Of the pass.
        forward : int
            The number of the forward of the model.
        """
        hooks: list[GradientHook] = []
        now = self.clock.now()
        if self.demand.wanted(kind, path, tag, now) is not None:
            scale = self.scale
            for leaf, tensor in found:
                if tensor.requires_grad:
                    hooks.append(GradientHook(self, self.gate, StreamKey(kind, path, tag, leaf), call, now, scale))
                    self._hang(tensor, hooks[-1], forward)
        return hooks

    def _hang(self, tensor: Tensor, hook: GradientHook, forward: int) -> None:
        """Hang a hook on a tensor of this pass, and see to it that it does not outlive the step."""
        if not tensor.is_leaf:
            on_gradient_once(tensor, hook)
            return
        # a parameter that a module returns, an input of the user's: both outlive this step
        kind, path, _, leaf = hook.stream
        key = id(tensor), kind, path, leaf
        there = self._leaf_hooks.get(key)
        if there is None or not there.of(tensor):
            there = self._leaf_hooks[key] = _LeafHook(tensor)
        there.wait(forward, hook)

    def seen(self, stream: StreamKey, call: int, at: At, gradient: Tensor) -> None:
        """Publish a gradient that comes from elsewhere than a hook on a tensor: from a compiled graph."""
        GradientHook(self, self.gate, stream, call, at, None)(gradient)

    def came(self, hook: GradientHook, gradient: Tensor) -> None:
        """Publish what has come back to a tensor."""
        kind, path, tag, leaf = hook.stream
        capture = self.demand.wanted(kind, path, tag, hook.at)
        if capture is None:
            return
        if hook.at.global_step != self.clock.now().global_step:
            why = "a backward went through the forward of an earlier step, whose messages are complete"
            self.gate.problems.note(f"{kind} of {path!r}", why)
            return
        if hook.scale is not None:
            self._scales.setdefault(_current_graph_task_id(), hook.scale)
        # a second backward through the same forward is told apart, so that the first's keep their calls
        key = hook.stream, hook.call
        before = self._backwards[key] = self._backwards.get(key, -1) + 1
        if before:
            stream = StreamKey(kind, path, tag, f"{leaf}.backward.{before}".lstrip("."))
        else:
            stream = hook.stream
        module = None if path is None else self.demand.modules.get(path)
        self.publisher.deliver(capture, stream, gradient, hook.call, hook.at, module, owned=False, scale=self.scale)

    def failed(self, stream: StreamKey, error: Exception) -> None:
        """Publish no more gradients of a stream."""
        self.demand.give_up(stream.kind, stream.module, error)

    @property
    def scale(self) -> Tensor | None:
        """What a GradScaler has multiplied the loss with of which this thread runs the backward."""
        return self._scales.get(_current_graph_task_id()) if self._scales else None

    def watch_scale(self, scaled: Tensor, scale: Tensor) -> None:
        """Learn when a backward begins at a loss that a GradScaler has multiplied."""
        on_gradient_once(scaled, _ScaleHook(self, scale))

    def scaled_by(self, scale: Tensor) -> None:
        """Note by what the loss was multiplied of which this thread runs the backward."""
        with self.gate.lock:
            self._scales[_current_graph_task_id()] = scale

    def forget(self) -> None:
        """Let go of what was kept of a step."""
        if self._leaf_hooks:
            for hook in self._leaf_hooks.values():
                hook.handle.remove()
            self._leaf_hooks = {}
        if self._backwards or self._scales:
            self._backwards, self._scales = {}, {}


class GradientHook:
    """Sees the gradient of one tensor of one forward pass."""

    __slots__ = ("_gate", "_owner", "at", "call", "scale", "stream")

    __torch_unserializable__ = True  # torch warns of every other hook on a tensor that is pickled

    def __init__(
        self, owner: Gradients, gate: Gate, stream: StreamKey, call: int, at: At, scale: Tensor | None
    ) -> None:
        self._owner = weakref.ref(owner)
        self._gate = gate
        self.stream = stream
        self.call = call
        self.at = at
        self.scale = scale  # of the backward in which the forward was computed again

    def __call__(self, gradient: Tensor | None) -> None:
        owner, gate = self._owner(), self._gate
        if gradient is None:  # the node has several outputs, and no gradient came back to this one
            return
        if owner is None or not gate.open:
            return
        try:
            with gate.lock, without_modes():
                owner.came(self, gradient)
        except Exception as error:  # noqa: BLE001 - under strict it is raised again
            owner.failed(self.stream, error)

    def tell_shared(self) -> None:
        """Say that this gradient may be another forward's."""
        if self._owner() is not None:
            why = "it is of a tensor that several forwards used before a backward, and is recorded for each of them"
            self._gate.problems.note(f"which forward {self.stream.kind} of {self.stream.module!r} belongs to", why)


class _LeafHook:
    """Sees the gradients of a tensor that is there for more than one call: a parameter that a module returns.

    What a backward brings is of the calls since the last one; if there are none, it went through the same once more.
    """

    __slots__ = ("__weakref__", "_latest", "_tensor", "_waiting", "handle")

    __torch_unserializable__ = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._waiting: list[tuple[int, GradientHook]] = []
        self._latest: list[tuple[int, GradientHook]] = []
        self.handle = on_gradient(tensor, self)

    def of(self, tensor: Tensor) -> bool:
        """Whether it is this tensor's."""
        return self._tensor() is tensor

    def wait(self, forward: int, hook: GradientHook) -> None:
        """Have another call, in a forward of this number, get what the next backward brings."""
        self._waiting.append((forward, hook))

    def __call__(self, gradient: Tensor | None) -> None:
        if self._waiting:
            self._latest, self._waiting = self._waiting, []
        if len({forward for forward, _ in self._latest}) > 1:
            self._latest[0][1].tell_shared()
        for _, hook in self._latest:
            hook(gradient)


class _ScaleHook:
    """Sits on a loss that a GradScaler has multiplied, and tells when a backward begins there."""

    __slots__ = ("_owner", "scale")

    __torch_unserializable__ = True

    def __init__(self, owner: Gradients, scale: Tensor) -> None:
        self._owner = weakref.ref(owner)
        self.scale = scale

    def __call__(self, gradient: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.scaled_by(self.scale)
