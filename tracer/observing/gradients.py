"""Publishes gradients of modules' outputs and inputs, through hooks on these tensors, and the norm of all gradients.

The gradients of a call in a reentrant checkpoint come from its second forward, which runs in the backward. They get
the call number of the first forward, which ran without gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._C import _current_graph_task_id
from torch.optim import Optimizer

from tracer import walking
from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.clock import At, StreamKey, UndecidedTag
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.pulses import PulseRows
from tracer.observing.pytorch.autograd import backward_node, next_node
from tracer.observing.pytorch.hooks import Told, on_gradient, on_gradient_once
from tracer.observing.pytorch.tensors import unscaled

_RECOMPUTED = "recomputed"
"""Replaces the tag for calls that a compiled graph recomputes in a checkpoint of its own."""


class CallPlan(NamedTuple):
    """What is kept of a module's small outputs and of their gradients, if that is only hashes and statistics.

    Attributes
    ----------
    plans : dict
        `Dues.plans`, while the plan holds.
    outputs, gradients : PulseRows or None
    """

    plans: dict[tuple[Any, ...], Any]
    outputs: PulseRows | None
    gradients: PulseRows | None


class Gradients(ExporterPart):
    """Watches tensors of a forward, and publishes their gradients."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        # by tensor id, kind, module and leaf
        self._leaf_hooks: dict[tuple[int, str, str | None, str], _LeafHook] = {}
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
            self.clock.kept.scales.setdefault(_current_graph_task_id(), hook.scale)
        # a second backward through the same forward gives its gradients another leaf and the same call
        key, backwards = (stream, call), self.clock.kept.backwards
        before = backwards[key] = backwards.get(key, -1) + 1
        if before:
            stream = StreamKey(kind, path, tag, f"{leaf}.backward.{before}".lstrip("."))
        self.publisher.deliver(captures, stream, gradient, call, hook.at, owned=False, scale=self.scale)

    def _take(self, hook: GradientHook, plan: CallPlan, gradient: Tensor) -> bool:
        """Take the rows of a small gradient in the step of its forward; False: nothing was done."""
        at, clock, publisher = hook.at, self.clock, self.publisher
        if (
            plan.gradients is None
            or plan.plans is not self.demand.dues.plans
            or at is not clock.began
            or not clock.open
        ):
            return False
        key, kept = (hook.stream, hook.call), clock.kept
        if kept.scales or key in kept.backwards or publisher.collecting is not None:
            return False
        if not publisher.pulses.take(plan.gradients, gradient, hook.call, at, publisher.rank):
            return False
        kept.backwards[key] = 0
        return True

    # -- calls that a reentrant checkpoint recomputes -------------------------------------------------------

    def note_ungraded(self, path: str, call: int) -> None:
        """Note a call without gradients, which may be the first forward of a reentrant checkpoint."""
        self.clock.kept.ungraded.setdefault(path, []).append((next_node(), call))

    def first_call(self, path: str) -> int | None:
        """The number of the call that a module recomputes in the second forward of a checkpoint.

        None in any other forward inside a backward. A checkpoint's graph node is numbered just before its first
        forward; the calls of that forward follow it.
        """
        first = None if self.clock.idle or not self.clock.open else self.clock.kept.ungraded.get(path)
        node = None if first is None else backward_node()
        if first is None or node is None:
            return None
        seen = self.clock.kept.recomputed[node, _current_graph_task_id(), path]
        calls = [call for number, call in first if number > node]
        return calls[seen] if seen < len(calls) else None

    def recompute(self, path: str) -> int | None:
        """Note that a module has recomputed a call; returns its `first_call`."""
        first = self.first_call(path)
        if first is None:
            self._recalled.pop(path, None)
        else:
            self.clock.kept.recomputed[backward_node(), _current_graph_task_id(), path] += 1
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
        scales = self.clock.kept.scales
        return scales.get(_current_graph_task_id()) if scales else None

    def watch_scale(self, scaled: Tensor, scale: Tensor) -> None:
        """Register a loss's factor, to be noted when a backward begins at the scaled loss."""
        on_gradient_once(scaled, Told(self.scaled_by, scale))

    def scaled_by(self, scale: Tensor, gradient: Tensor) -> None:
        """Note the factor in the loss of the backward that runs in this thread."""
        if not self.gate.open:  # in an unobserved backward, this thread must not wait for the lock
            return
        self.gate.lock.run(self.clock.kept.scales.__setitem__, _current_graph_task_id(), scale)

    def forget(self) -> None:
        """Remove the hooks on tensors that outlive the step."""
        if self._leaf_hooks:
            for hook in self._leaf_hooks.values():
                hook.handle.remove()
            self._leaf_hooks = {}


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
        plan: CallPlan | None = None,
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


GRADIENT_NORMS: Final = "gradient_norms"
"""The kind of the messages."""
NAMES: Final = ("before", "after")
"""The names of the numbers of a message; one without the first number has the second alone."""
_ROW: Final = 1 << 12
"""Of so many numbers torch's float32 norm on a CPU is precise; its error is 1e-5 for 2^20 numbers, 6e-4 for 2^24."""


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all elements of tensors together, by few operations that wait for no device.

    Parameters
    ----------
    tensors : iterable of Tensor
        At least one; of any floating or complex dtype, dense or sparse, on any devices.

    Returns
    -------
    Tensor
        Float64, of shape (), on the first tensor's device. The sums of squares of a tensor narrower than float64 are
        in float32, with a relative error of about 1e-6; squares beyond its range give infinity.

    Examples
    --------
    >>> total_norm([torch.tensor([3.0]), torch.tensor([4j])])
    tensor(5., dtype=torch.float64)
    """
    norms: list[Tensor] = []
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for one in tensors:
        if one.layout is not torch.strided:
            one = (one.coalesce() if one.layout is torch.sparse_coo else one).values()
        if one.is_complex():
            one = torch.view_as_real(one.resolve_conj())
        if one.is_cpu and one.numel() > 16 * _ROW and one.is_contiguous():
            rows, one = one.view(-1).tensor_split([one.numel() // _ROW * _ROW])
            of_rows = torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1, dtype=_wide(one.dtype))
            norms.append(torch.linalg.vector_norm(of_rows, dtype=torch.float64))
        groups.setdefault((one.device, one.dtype), []).append(one)
    for (_, dtype), group in groups.items():
        norms += torch._foreach_norm(group, 2.0, dtype=_wide(dtype))
    device = norms[0].device
    double = torch.float32 if device.type == "mps" else torch.float64  # which has no float64
    together: Tensor = torch.linalg.vector_norm(torch.stack([one.to(device, double) for one in norms]))
    return together


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which the elements of a narrow one are squared."""
    return torch.float32 if dtype.itemsize < 4 else None


class GradientNorms(ExporterPart):
    """Publishes the norm of all gradients of each model in each recorded step.

    The norm before clipping is that of the gradients when the last backward before an optimizer's step is over,
    divided by the factor of a GradScaler; the norm after it is that of the gradients which the optimizer uses. Only
    parameters that the optimizer trains are taken. Several optimizers of one model make one norm.
    """

    def backward_over(self) -> None:
        """Compute the norms of the gradients that a backward has left."""
        if not self.demand.wanted(GRADIENT_NORMS, None, DEFAULT_TAG):
            return
        kept = self.clock.kept
        kept.norms_before = {}
        for optimizer in self.optimizers.all:
            norm = self._norm(optimizer)
            if norm is not None:
                kept.norms_before[id(optimizer)] = norm if kept.scale is None else unscaled(norm, kept.scale)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Compute the norm of the gradients that an optimizer uses; of several steps in a step, the last one counts."""
        if not self.demand.wanted(GRADIENT_NORMS, None, DEFAULT_TAG):
            return
        after = self._norm(optimizer)
        if after is not None:
            kept = self.clock.kept
            before = kept.norms_before.get(id(optimizer))
            both = torch.stack([after] if before is None else [before, after])
            kept.norms.setdefault(self.models.model_of(optimizer) or "", {})[id(optimizer)] = both

    def _norm(self, optimizer: Optimizer) -> Tensor | None:
        """The norm of all gradients of what an optimizer trains; None if there are none, or it cannot be computed."""
        gradients = [one.grad for one in walking.trained(optimizer) if one.grad is not None]
        if not gradients or not self.publisher.can_record(GRADIENT_NORMS, None, gradients[0]):
            return None
        special = next((type(one) for one in gradients if type(one) is not Tensor), None)
        if special is not None:
            why = f"gradients are of the class {special.__name__}, of which a process may hold only a part"
            self.problems.note(GRADIENT_NORMS, why)
            return None
        with torch.no_grad():
            return total_norm(gradients)

    def publish(self) -> None:
        """Publish the norms of the step."""
        for model, of_each in self.clock.kept.norms.items():
            each = list(of_each.values())
            least = min(map(len, each))
            together = each[0]
            if len(each) > 1:
                together = torch.linalg.vector_norm(
                    torch.stack([one[-least:].to(together.device) for one in each]), dim=0
                )
            self.publisher.publish_numbers(GRADIENT_NORMS, together, [*NAMES[-least:]], model, call=0)
