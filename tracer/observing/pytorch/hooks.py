"""The hooks that PyTorch calls for an exporter."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from tracer.observing.pytorch.compiled import NOBODY, Ticket, name_hook, observe_in_graph, run_uncompiled
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hanging import Hanging
from tracer.observing.pytorch.modes import traced


class Role(enum.Enum):
    """The purpose of a hook; the values are names in problems."""

    BEFORE_ROOT = "before root"
    AFTER_ROOT = "after root"
    BEFORE_TOP = "before top"
    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    BEFORE_LAYER = "before layer"
    AFTER_PARAMETRIZATION = "after parametrization"
    AFTER_REPLACED = "after replaced"
    AFTER_ACCUMULATION = "after accumulation"
    AFTER_LOSS = "after loss"
    BEFORE_OPTIMIZER = "before optimizer"
    AFTER_OPTIMIZER = "after optimizer"


_OF_ROOT = (Role.BEFORE_ROOT, Role.AFTER_ROOT)
_OF_OPTIMIZER = (Role.BEFORE_OPTIMIZER, Role.AFTER_OPTIMIZER)
_IN_GRAPHS = (*_OF_ROOT, Role.BEFORE_FORWARD, Role.AFTER_FORWARD)
INNER = (Role.BEFORE_FORWARD, Role.AFTER_FORWARD, Role.AFTER_PARAMETRIZATION, Role.AFTER_REPLACED)
"""Hooks inside the model, which have no work in a pass whose inside nobody records."""


class Site(NamedTuple):
    """A place to hang a hook, and the method that the hook calls.

    Attributes
    ----------
    on : Module, Optimizer or Tensor
    role : Role
    name : str
        The path of the module or parameter; ``""`` where only one thing is meant.
    put : callable
        Hangs a hook on it.
    call : callable
        A bound method that takes the name and the hook's arguments. Its object is not kept alive.
    quiet : callable or None
        A bound method of the same object, called before the lock is taken. Takes the hook's arguments, and returns
        whether the hook has no more work.
    gradients : bool
        Whether gradients of the observed tensors may be wanted.
    """

    on: Any
    role: Role
    name: str
    put: Callable[[Any, Hook], Hanging]
    call: Callable[..., object]
    quiet: Callable[[tuple[Any, ...]], bool] | None = None
    gradients: bool = False


class Calls(Protocol):
    """The interface for compiled graphs of the object that observes calls of modules."""

    def ticket(self, path: str) -> Ticket:
        """The ticket of a module's call that was just observed: call, step, train step, epoch, tag."""

    def gradient_seen(self, path: str, leaf: str, gradient: Tensor, ticket: Ticket) -> None:
        """Take the gradient of a module's output in the ticket's call."""


class Hook:
    """A hook of an exporter: goes through the gate, and calls its site's method.

    Parameters
    ----------
    gate : Gate
    site : Site
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_gate",
        "_inner",
        "_on",
        "_owner",
        "_quiet",
        "fired",
        "gradients",
        "graph_name",
        "name",
        "of_optimizer",
        "of_root",
        "off",
        "role",
        "sees_inputs",
    )

    def __init__(self, gate: Gate, site: Site) -> None:
        call: Any = site.call
        quiet: Any = site.quiet
        self._gate = gate
        self._owner = weakref.ref(call.__self__)
        self._call = call.__func__
        self._quiet = None if quiet is None else quiet.__func__
        self._on = weakref.ref(site.on)
        self._inner = site.role in INNER
        self.of_optimizer = site.role in _OF_OPTIMIZER
        self.of_root = site.role in _OF_ROOT
        self.sees_inputs = site.role in (Role.BEFORE_ROOT, Role.BEFORE_TOP, Role.BEFORE_FORWARD)
        self.role = site.role
        self.name = site.name
        self.gradients = site.gradients
        self.fired = False
        self.off = False
        self.graph_name = (
            name_hook(self, f"{gate.number}:{site.role.value}:{site.name}") if site.role in _IN_GRAPHS else ""
        )

    def __call__(self, *args: Any) -> Any:
        """Report what the hook observed; an error in the exporter does not reach the training."""
        if is_dynamo_compiling():  # changing state would recompile the graph at every step
            if self.graph_name:
                return observe_in_graph(self, *args)
            if self.of_optimizer:
                # Runs this hook between graphs. A step is never a single graph, because torch's code breaks it anyway.
                torch._dynamo.graph_break()
            return None
        owner, gate = self._owner(), self._gate
        if owner is None:
            return None
        if self._inner and self.fired:
            running = gate.passes.now
            if running.depth and not running.inside:  # a pass whose inside nobody records
                if running.counts is not None and self.role is Role.AFTER_FORWARD:
                    running.count(self.name)
                return None
        if self.off or not gate.open:
            return None
        try:
            if self.fired and self._quiet is not None and self._quiet(owner, args):
                return None
            if traced():
                return None
            self.fired = True
            gate.lock.run(self._call, owner, self.name, *args)
        except Exception as error:  # noqa: BLE001 - under strict it is raised again
            gate.problems.failed(f"module {self.name!r}" if self.name else self.role.value, error)
            self.off = not (self.of_optimizer or self.of_root)
        return None

    @property
    def lasts(self) -> bool:
        """Whether it hangs as long as its owner is observed."""
        return self.of_optimizer or self.role is Role.BEFORE_ROOT

    # -- for compiled graphs --------------------------------------------------------------------------------

    @property
    def on(self) -> Any:
        """The object that it hangs on; None if it is gone."""
        return self._on()

    def ticket(self) -> Ticket:
        """The ticket of the call that this hook has just observed after the forward."""
        owner = self._owner()
        return (
            NOBODY if owner is None or self.role is not Role.AFTER_FORWARD else cast("Calls", owner).ticket(self.name)
        )

    def gradient_seen(self, leaf: str, gradient: Tensor, ticket: Ticket) -> None:
        """Take the gradient of a tensor that this hook observed in a call."""
        owner = self._owner()
        if owner is not None and not self.off:
            cast("Calls", owner).gradient_seen(self.name, leaf, gradient, ticket)

    def lacks(self, kind: str, why: str) -> None:
        """Note that messages of a kind are missing, if anybody listens."""
        gate = self._gate
        if self._owner() is not None and gate.passes.now.listening:
            gate.guard(kind, lambda: gate.problems.note(f"{kind} of {self.name!r}", why))

    def __reduce__(self) -> tuple[Any, ...]:
        # for picklers that do not leave hooks out (see `hanging`): a callable of the standard library that accepts any
        # arguments and returns None
        return getattr, (contextlib.nullcontext(), "__exit__")


run_uncompiled(Hook.__call__)


def leaves_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step leaves gradients unchanged, as those of torch do.

    The exceptions are SGD with Nesterov momentum, if it updates many parameters at once, and hooks of others that come
    before an exporter's.
    """
    first = next(iter(optimizer._optimizer_step_post_hooks.values()), None)
    return (
        type(optimizer).__module__.partition(".")[0] == "torch"
        and isinstance(first, Hook)
        and not any(group.get("nesterov") for group in optimizer.param_groups)
    )


def is_heard_last(optimizer: Optimizer) -> bool:
    """Whether the last of the hooks before its step is an exporter's."""
    last = next(reversed(optimizer._optimizer_step_pre_hooks.values()), None)
    return isinstance(last, Hook) and last.role is Role.BEFORE_OPTIMIZER
