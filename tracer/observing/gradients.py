"""Publishes gradients of modules' outputs and inputs, through hooks on these tensors.

The gradients of a call in a reentrant checkpoint come from its second forward, which runs in the backward. They get
the call number of the first forward, which ran without gradients.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor
from torch._C import _current_graph_task_id

from tracer.observing.clock import At
from tracer.observing.numbers import StreamKey
from tracer.observing.part import Ground, Part
from tracer.observing.pulses import Rows
from tracer.observing.pytorch.autograd import backward_node, next_node
from tracer.observing.pytorch.hanging import Told, on_gradient, on_gradient_once
from tracer.observing.tags import UndecidedTag

_RECOMPUTED = "recomputed"
"""Replaces the tag for calls that a compiled graph recomputes in a checkpoint of its own."""


class Plan(NamedTuple):
    """What is kept of a module's small outputs and of their gradients, if that is only hashes and statistics.

    Attributes
    ----------
    plans : dict
        `Dues.plans`, while the plan holds.
    outputs, gradients : Rows or None
    """

    plans: dict[tuple[Any, ...], Any]
    outputs: Rows | None
    gradients: Rows | None


class Gradients(Part):
    """Watches tensors of a forward, and publishes their gradients."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._backwards: dict[tuple[StreamKey, int], int] = {}  # the number of the last gradient of each call
        # by tensor id, kind, module and leaf
        self._leaf_hooks: dict[tuple[int, str, str | None, str], _LeafHook] = {}
        self._scales: dict[int, Tensor] = {}  # by backward: a GradScaler's factor in its loss
        # by path: the calls without gradients, as (number of the next node in the graph, number of the call)
        self._ungraded: dict[str, list[tuple[int, int]]] = {}
        # how many of these calls a module has recomputed, by checkpoint node, backward and path
        self._recomputed: Counter[tuple[int | None, int, str]] = Counter()
        self._recalled: dict[str, int] = {}  # by path: the call that was recomputed last

    def watch(
        self, kind: str, path: str, found: list[tuple[str, Tensor]], call: int, tag: str, at: At
    ) -> list[GradientHook]:
        """Hang hooks on the tensors of a module's output or input, if gradients are wanted; returns the hooks.

        `found`: the tensors with their leaves. `call`, `tag` and `at`: the module's call, its pass, and its counters.
        """
        hooks: list[GradientHook] = []
        if self.demand.wanted(kind, path, tag, at):
            scale = self.scale
            for leaf, tensor in found:
                if tensor.requires_grad:
                    hooks.append(GradientHook(self, StreamKey(kind, path, tag, leaf), call, at, scale))
                    self._hang(tensor, hooks[-1])
        return hooks

    def _hang(self, tensor: Tensor, hook: GradientHook) -> None:
        """Hang a hook on a tensor; the hook is removed when the step is over."""
        if not tensor.is_leaf:
            on_gradient_once(tensor, hook)
            return
        # a leaf tensor (a parameter that a module returns, a user's input) outlives the step
        kind, path, _, leaf = hook.stream
        key = id(tensor), kind, path, leaf
        there = self._leaf_hooks.get(key)
        if there is None or not there.of(tensor):
            there = self._leaf_hooks[key] = _LeafHook(tensor)
        there.wait(self.forwards.seen, hook)

    def seen(self, stream: StreamKey, call: int, at: At, gradient: Tensor) -> None:
        """Publish a gradient that a compiled graph has computed."""
        GradientHook(self, stream, call, at, None)(gradient)

    def came(self, hook: GradientHook, gradient: Tensor) -> None:
        """Publish a gradient that a backward has brought to a tensor."""
        stream, call = hook.stream, hook.call
        if hook.plan is not None and self._take(hook, hook.plan, gradient):
            return
        if type(stream.tag) is UndecidedTag and stream.tag.decided:
            call += stream.tag.shift.get(stream.module or "", 0)
            stream = stream._replace(tag=stream.tag.decided)
        kind, path, tag, leaf = stream
        captures = self.demand.wanted(kind, path, tag, hook.at)
        if not captures:
            return
        if hook.at.global_step != self.clock.now().global_step:
            why = "a backward went through the forward of an earlier step, whose messages are complete"
            self.problems.note(f"{kind} of {path!r}", why)
            return
        if hook.scale is not None:
            self._scales.setdefault(_current_graph_task_id(), hook.scale)
        # a second backward through the same forward gives its gradients another leaf and the same call
        key = stream, call
        before = self._backwards[key] = self._backwards.get(key, -1) + 1
        if before:
            stream = StreamKey(kind, path, tag, f"{leaf}.backward.{before}".lstrip("."))
        self.publisher.deliver(captures, stream, gradient, call, hook.at, owned=False, scale=self.scale)

    def _take(self, hook: GradientHook, plan: Plan, gradient: Tensor) -> bool:
        """Take the rows of a small gradient in the step of its forward; False: nothing was done."""
        at, clock, publisher = hook.at, self.clock, self.publisher
        if (
            plan.gradients is None
            or plan.plans is not self.demand.dues.plans
            or at is not clock.began
            or not clock.open
        ):
            return False
        key = hook.stream, hook.call
        if self._scales or key in self._backwards or publisher.collecting is not None:
            return False
        if not publisher.pulses.take(plan.gradients, gradient, hook.call, at, publisher.rank):
            return False
        self._backwards[key] = 0
        return True

    # -- calls that a reentrant checkpoint recomputes -------------------------------------------------------

    def note_ungraded(self, path: str, call: int) -> None:
        """Note a call without gradients, which may be the first forward of a reentrant checkpoint."""
        self._ungraded.setdefault(path, []).append((next_node(), call))

    def first_call(self, path: str) -> int | None:
        """The number of the call that a module recomputes in the second forward of a checkpoint.

        None in any other forward inside a backward. A checkpoint's graph node is numbered just before its first
        forward; the calls of that forward follow it.
        """
        first = None if self.clock.idle or not self.clock.open else self._ungraded.get(path)
        node = None if first is None else backward_node()
        if first is None or node is None:
            return None
        seen = self._recomputed[node, _current_graph_task_id(), path]
        calls = [call for number, call in first if number > node]
        return calls[seen] if seen < len(calls) else None

    def recompute(self, path: str) -> int | None:
        """Note that a module has recomputed a call; returns its `first_call`."""
        first = self.first_call(path)
        if first is None:
            self._recalled.pop(path, None)
        else:
            self._recomputed[backward_node(), _current_graph_task_id(), path] += 1
            self._recalled[path] = first
        return first

    def recalled(self, path: str) -> int:
        """The call that a module has just recomputed.

        Without a first call in this step, it belongs to a compiled graph's own checkpoint, which recomputes in order.
        """
        first = self._recalled.get(path)
        return self.numbers.count_call(path, _RECOMPUTED) if first is None else first

    # -- a GradScaler's factor ------------------------------------------------------------------------------

    @property
    def scale(self) -> Tensor | None:
        """A GradScaler's factor in the loss of the backward that runs in this thread."""
        return self._scales.get(_current_graph_task_id()) if self._scales else None

    def watch_scale(self, scaled: Tensor, scale: Tensor) -> None:
        """Register a loss's factor, to be noted when a backward begins at the scaled loss."""
        on_gradient_once(scaled, Told(self.scaled_by, scale))

    def scaled_by(self, scale: Tensor, gradient: Tensor) -> None:
        """Note the factor in the loss of the backward that runs in this thread."""
        if not self.gate.open:  # in an unobserved backward, this thread must not wait for the lock
            return
        self.gate.lock.run(self._scales.__setitem__, _current_graph_task_id(), scale)

    def forget(self) -> None:
        """Drop the step's data."""
        if self._leaf_hooks:
            for hook in self._leaf_hooks.values():
                hook.handle.remove()
            self._leaf_hooks = {}
        if self._backwards or self._scales:
            self._backwards, self._scales = {}, {}
        if self._ungraded or self._recomputed:
            self._ungraded = {}
            self._recomputed.clear()


class GradientHook:
    """A hook on a tensor of one forward."""

    __slots__ = ("_owner", "at", "call", "plan", "scale", "stream")

    __torch_unserializable__ = True  # otherwise torch warns when a tensor with the hook is pickled

    def __init__(
        self,
        owner: Gradients,
        stream: StreamKey,
        call: int,
        at: At,
        scale: Tensor | None,
        plan: Plan | None = None,
    ) -> None:
        self._owner = weakref.ref(owner)
        self.stream = stream
        self.call = call
        self.at = at
        self.plan = plan
        self.scale = scale  # in a forward within a backward (a checkpoint), the factor of that backward's loss

    def __call__(self, gradient: Tensor | None) -> None:
        owner = self._owner()
        if gradient is None:  # the node has several outputs, and this output got no gradient
            return
        if owner is None or not owner.gate.open:
            return
        try:
            owner.gate.lock.run(owner.came, self, gradient)
        except Exception as error:  # noqa: BLE001 - under strict it is raised again
            owner.demand.give_up(self.stream.kind, self.stream.module, error)

    def tell_shared(self) -> None:
        """Note that this gradient may belong to another forward."""
        owner = self._owner()
        if owner is not None:
            why = "it is of a tensor that several forwards used before a backward, and is recorded for each of them"
            owner.problems.note(f"which forward {self.stream.kind} of {self.stream.module!r} belongs to", why)


class _LeafHook:
    """A hook on a tensor that several calls use, such as a parameter that a module returns.

    A gradient is attributed to the calls since the last backward. If there were none, the backward went through the
    same calls again.
    """

    __slots__ = ("__weakref__", "_latest", "_tensor", "_waiting", "handle")

    __torch_unserializable__ = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._waiting: list[tuple[int, GradientHook]] = []
        self._latest: list[tuple[int, GradientHook]] = []
        self.handle = on_gradient(tensor, self)

    def of(self, tensor: Tensor) -> bool:
        """Whether it hangs on this tensor."""
        return self._tensor() is tensor

    def wait(self, forward: int, hook: GradientHook) -> None:
        """Give the next backward's gradient to a call's hook too; `forward` is the number of the call's forward."""
        self._waiting.append((forward, hook))

    def __call__(self, gradient: Tensor | None) -> None:
        if self._waiting:
            self._latest, self._waiting = self._waiting, []
        if len({forward for forward, _ in self._latest}) > 1:
            self._latest[0][1].tell_shared()
        for _, hook in self._latest:
            hook(gradient)
