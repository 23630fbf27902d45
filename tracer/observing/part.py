"""`Ground`: the objects that all parts of an exporter share, such as the hooks; `ExporterPart`: their base."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from tracer import walking
from tracer.messaging.bus import MessageBus
from tracer.observing.capture import Capture
from tracer.observing.clock import CallNumbers, Clock, Problems
from tracer.observing.demand import Demand
from tracer.observing.guesses.optimizers import Optimizers
from tracer.observing.models import Models, ParameterTable, has_forward
from tracer.observing.publisher import Publisher
from tracer.observing.pytorch.autograd import Node, calls_running
from tracer.observing.pytorch.compiled import (
    TOO_LATE,
    UNCOMPILED,
    compiled_anything,
    left_uncompiled,
    unseen_regions,
)
from tracer.observing.pytorch.fast_path import Asides
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hooks import (
    INNER,
    Checklist,
    Hanging,
    Hook,
    Rest,
    Role,
    Site,
    Told,
    before_step,
    is_heard_last,
    leaves_gradients,
    on_gradient_once,
)
from tracer.observing.pytorch.structure import compiled_parts, named_parts


@dataclass(eq=False, repr=False)
class Forwards:
    """Counts the forwards of the model.

    Attributes
    ----------
    seen : int
        All forwards, in training and outside.
    training : int
        The training forwards.
    of_ended_steps : int
        The training forwards of steps that have ended.
    ended_at : Node or None
        The position in the autograd graph where the last step ended.
    """

    gate: Gate
    models: Models

    def __post_init__(self) -> None:
        self.seen = 0
        self.training = 0
        self.of_ended_steps = 0
        self.ended_at: Node | None = None
        self._undifferentiated: set[int] = set()  # numbers of recorded forwards in the open step
        self._never_differentiated = 0  # how many there were in earlier steps
        self._watched = 0  # the number of the last recorded forward

    @property
    def of_open_step(self) -> int:
        """How many training forwards there were since the last step ended."""
        return self.training - self.of_ended_steps

    @property
    def undifferentiated(self) -> int:
        """How many recorded training forwards were never differentiated."""
        return self._never_differentiated + len(self._undifferentiated)

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Detect whether the training forward with these outputs is differentiated."""
        self._watched += 1
        hook = Told(self._differentiated, self._watched)
        for one in outputs:
            if one.grad_fn is not None:
                on_gradient_once(one, hook)
                self._undifferentiated.add(self._watched)

    def _differentiated(self, number: int, gradient: Tensor) -> None:
        self._undifferentiated.discard(number)

    def end_step(self) -> None:
        """Begin to count the next step's forwards. A forward that is still running belongs to no step."""
        if self._undifferentiated:
            self._never_differentiated += len(self._undifferentiated)
            self._undifferentiated = set()
        self.of_ended_steps = self.training
        running = self.gate.passes.now
        running.listening = running.inside = False
        if running.inputs and not running.depth:  # inputs of calls that failed or were interrupted
            running.inputs = []
        if running.depth and self.models.root is not None:  # an interrupted forward did not report its end
            running.depth = calls_running(self.models.root)


_FEW_NAMES = 8
"""How many modules a problem message names."""


@dataclass(eq=False, repr=False)
class Wiring:
    """Hangs hooks on modules, optimizers and parameters.

    Parameters
    ----------
    table : ParameterTable
        Detects that the model has changed since the hooks were hung.

    Attributes
    ----------
    asides : Asides
        The layers with a fast path, for which hooks step aside.
    check_steps : Checklist
        The hooks on optimizers.
    compiled_before : bool or None
        Whether torch had compiled code when the model's hook was hung; None before that.
    """

    gate: Gate
    models: Models
    optimizers: Optimizers
    table: ParameterTable

    def __post_init__(self) -> None:
        self.asides = Asides()
        self.compiled_before: bool | None = None
        self._hang_all: weakref.WeakMethod[Callable[[], None]] | None = None
        # by owner id, role and name: the owner, the hook and its handle
        self._hung: dict[tuple[int, Role, str], tuple[Any, Hook, Hanging]] = {}
        self._former: dict[tuple[int, Role, str], tuple[Any, Hook, Hanging]] = {}
        self._known: dict[tuple[str, Role], tuple[bool, bool]] = {}  # per hook: has it fired, and is it off
        self._check = Checklist()  # all hooks
        self.check_steps = Checklist()
        self._rest: Rest | None = None  # of the hooks inside the model; None if it has to be made anew
        self._untouched: set[int] = set()  # ids of modules that torch would compile if they had a hook
        self._silent: list[str] = []

    # -- hanging --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to hang hooks anew. `finish` removes the hooks that are not hung again."""
        # kept for every hook, because it may be needed again later
        for (_, role, name), (_, hook, _) in self._hung.items():
            if not hook.lasts:
                self._known[name, role] = hook.fired, hook.off
        self._former.update(self._hung)  # adds to the rest of an interrupted rewiring
        self._hung = {}

    def hang(self, site: Site) -> None:
        """Hang a hook, unless it hangs there already.

        An existing hook stays. If a hook is removed during a call, torch calls it with other arguments, and torch
        forbids changing an optimizer's hooks while they run.
        """
        key = id(site.on), site.role, site.name
        there = self._former.pop(key, None)
        if there is not None:
            there[1].gradients = site.gradients
            self._hung[key] = there
            return
        if site.role is Role.BEFORE_ROOT:
            self.compiled_before = compiled_anything()
        hook = Hook(self.gate, site)
        self._hung[key] = site.on, hook, site.put(site.on, hook)
        # activations of the root module precede the network's output
        if site.role is Role.AFTER_FORWARD and (last := self._former.pop((id(site.on), Role.AFTER_ROOT, ""), None)):
            last[2].remove()  # a later site hangs it again

    def finish(self) -> None:
        """Remove the hooks that were not hung again."""
        for _, _, handle in self._former.values():
            handle.remove()
        self._former = {}
        self.table.note(self.models.outermost, self.optimizers.forwards_end_steps)
        for (_, role, name), (_, hook, _) in self._hung.items():
            if (name, role) in self._known:
                hook.fired, hook.off = self._known[name, role]
        self._list_hooks()

    def takes_hooks(self, path: str, module: nn.Module) -> bool:
        """Whether hooks can hang on a module without changing its behaviour."""
        if isinstance(module, torch.jit.ScriptModule):
            self.gate.problems.note(
                f"module {path!r}", "a ScriptModule takes no hooks; its activations are not observed"
            )
            return False
        return id(module) not in self._untouched

    def leave_untouched(self, losses: Iterable[nn.Module]) -> None:
        """Find the modules where a hook would change what torch compiles, and thereby the training."""
        tops = [*self.models.tops, *(("", one) for one in losses)]
        untouched = [(prefix, top, left_uncompiled(top, Hook)) for prefix, top in tops]
        self._untouched = {id(one) for _, _, found in untouched for one in found}
        for prefix, top, found in untouched:
            names = {id(one): path for path, one in named_parts(top, prefix)} if found else {}
            told = [repr(names[id(one)]) if names.get(id(one)) else type(one).__name__ for one in found]
            if told:
                self.gate.problems.note(f"the forward of {', '.join(told)}", UNCOMPILED)

    def hung_inside(self, layer: nn.Module) -> list[tuple[Any, Hanging]]:
        """The hooks on a module and inside it, each with its owner."""
        inside = {id(part) for part in walking.modules(layer)}
        return [(on, hanging) for on, _, hanging in self._hung.values() if id(on) in inside]

    # -- staying --------------------------------------------------------------------------------------------

    def call_to_rewire(self, hang_all: Callable[[], None]) -> None:
        """Set the bound method that hangs all hooks again; its object is not kept alive."""
        self._hang_all = weakref.WeakMethod(hang_all)

    def rewire(self) -> None:
        """Hang all hooks again."""
        hang_all = None if self._hang_all is None else self._hang_all()
        if hang_all is not None:
            hang_all()

    def look(self) -> None:
        """Hang all hooks again if modules or parameters were added, removed or replaced."""
        if self.table.changed(self.optimizers.forwards_end_steps):
            self.rewire()

    def check(self) -> None:
        """Restore hooks that the program removed, unless hooks have stepped aside for a fast path."""
        self.end_rest()  # the last forward may have failed
        if not self._check.is_complete() and self.asides.over:
            self._hang_again()

    def check_optimizers(self) -> None:
        """Restore hooks that the program removed from optimizers."""
        if not self.check_steps.is_complete():
            self._hang_again()

    def begin_rest(self) -> None:
        """Take the hooks inside the model off until `end_rest`, unless torch has compiled code that knows of them."""
        if compiled_anything():
            return
        if self._rest is None:
            hung = self._hung.values()
            self._rest = Rest((on, hanging) for on, hook, hanging in hung if hook.role in INNER and hook.fired)
        self._rest.begin()

    def end_rest(self) -> None:
        """Put the hooks back that rest."""
        if self._rest is not None:
            self._rest.end()

    def _drop_rest(self) -> None:
        self.end_rest()
        self._rest = None

    def _list_hooks(self) -> None:
        """List the hooks that should hang."""
        self._drop_rest()
        self._check = Checklist((on, hanging) for on, _, hanging in self._hung.values())
        self.check_steps = Checklist((on, hanging) for on, hook, hanging in self._hung.values() if hook.of_optimizer)

    def _hang_again(self) -> None:
        """Restore the hooks that the program removed, and note what was missed."""
        again = [(on, hook) for on, hook, hanging in self._hung.values() if hanging.hang_again(on)]
        self._list_hooks()
        why = "the program took the recorder's hooks off; they are back from this step on"
        called = (repr(hook.name) if hook.name else "the model" for _, hook in again if not hook.of_optimizer)
        names = list(dict.fromkeys(called))
        note = self.gate.problems.note
        if names:
            told = ", ".join(names[:_FEW_NAMES]) + (" and others" if len(names) > _FEW_NAMES else "")
            note(f"what passed through {told} meanwhile", why)
        for name in dict.fromkeys(type(on).__name__ for on, hook in again if hook.of_optimizer):
            note(f"what {name} did meanwhile", f"{why}, and steps that it took are counted as one")

    def come_last(self) -> None:
        """Move our before-step hooks behind the program's, which may change gradients.

        Needed for optimizers that overwrite gradients in a step: their gradients are copied before it.
        """
        for optimizer in self.optimizers.all:
            if not leaves_gradients(optimizer) and not is_heard_last(optimizer):
                key = id(optimizer), Role.BEFORE_OPTIMIZER, ""
                hung = self._hung.get(key)
                if hung is None:  # another thread, whose garbage collection found the recording, takes the hooks off
                    continue
                _, hook, hanging = hung
                hanging.remove()
                self._hung[key] = optimizer, hook, before_step(optimizer, hook)
                self._list_hooks()

    # -- going ----------------------------------------------------------------------------------------------

    def let_go_of_replaced(self) -> None:
        """Forget replaced optimizers and the hooks on them."""
        take_back = self.let_go()
        self.optimizers.let_go_of_replaced()
        take_back()
        self._list_hooks()

    def let_go(self) -> Callable[[], None]:
        """Drop all references to modules and optimizers; the returned function restores those that are still alive."""
        self._drop_rest()
        hung = {key: (weakref.ref(on), hook, handle) for key, (on, hook, handle) in self._hung.items()}
        self._hung = {}
        self._check = self.check_steps = Checklist()

        def back() -> None:
            there = ((key, ref(), hook, handle) for key, (ref, hook, handle) in hung.items())
            self._hung = {key: (on, hook, handle) for key, on, hook, handle in there if on is not None}

        return back

    def detach(self, observed: Mapping[str, nn.Module]) -> None:
        """Remove all hooks. `silent` keeps its last answer."""
        self.asides.end()
        self._drop_rest()
        self._silent = self.silent(observed)
        for _, _, handle in (*self._former.values(), *self._hung.values()):
            handle.remove()
        self._former, self._hung = {}, {}
        self._check = self.check_steps = Checklist()

    # -- what was called ------------------------------------------------------------------------------------

    def listens(self, *roles: Role) -> bool:
        """Whether any hook has one of these roles."""
        return any(role in roles for _, role, _ in self._hung)

    def silent(self, observed: Mapping[str, nn.Module]) -> list[str]:
        """Hooked modules whose forward was never seen: bypassed, compiled away, or not part of the forward."""
        if not self.gate.attached:
            return self._silent
        fired = {hook.name for _, hook, _ in self._hung.values() if hook.fired and not hook.lasts}
        names = {hook.name for _, hook, _ in self._hung.values() if hook.role is Role.AFTER_FORWARD}
        return [name for name, one in observed.items() if has_forward(one) and name in names and name not in fired]

    def tell_unseen_regions(self, observed: Mapping[str, nn.Module]) -> None:
        """After the first step, note compiled regions whose hooks do not fire because they were compiled earlier."""
        self.compiled_before = False
        # an attention's output layer is never called: torch passes its weight to a function
        never = {name for name, one in observed.items() if isinstance(one, NonDynamicallyQuantizableLinear)}
        names = {hook.name for _, hook, _ in self._hung.values() if hook.role is Role.AFTER_FORWARD}
        hooked = [name for name in observed if name in names - never]
        root = self.models.root
        if root is not None:
            for region in unseen_regions(compiled_parts(root), hooked, self.silent(observed)):
                what = f"the inside of {region!r}" if region else "the inside of the model"
                self.gate.problems.note(what, TOO_LATE)


_EXPORTERS = itertools.count()


class Ground:
    """The objects that all parts of an exporter share, in the order of their dependencies.

    Parameters
    ----------
    bus : MessageBus
    captures : tuple of Capture
    strict : bool
        Whether exceptions reach the training loop.
    """

    def __init__(self, bus: MessageBus, captures: tuple[Capture, ...], *, strict: bool) -> None:
        self.bus = bus
        self.clock = Clock()
        self.problems = Problems(self.clock, strict=strict)
        self.gate = Gate(self.problems, next(_EXPORTERS))
        self.models = Models()
        self.optimizers = Optimizers(self.models)
        self.table = ParameterTable()
        self.forwards = Forwards(self.gate, self.models)
        self.demand = Demand(bus, captures, self.clock, self.table, self.problems, self.gate.passes)
        self.numbers = CallNumbers()
        self.publisher = Publisher(bus, self.demand, self.clock, self.problems, self.numbers)
        self.wiring = Wiring(self.gate, self.models, self.optimizers, self.table)


class ExporterPart(Ground):
    """The base of the parts of an exporter: has the attributes of the `Ground` itself, because hooks read them often.

    Parameters
    ----------
    ground : Ground
    """

    def __init__(self, ground: Ground) -> None:
        for name, shared in vars(ground).items():
            setattr(self, name, shared)
