"""Hooks where somebody wants something, and nowhere else: put on, kept on, taken off."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer

from tracer import walking
from tracer.observing.models import Models
from tracer.observing.optimizers import Optimizers
from tracer.observing.parameter_table import ParameterTable
from tracer.observing.pytorch.compiled import (
    TOO_LATE,
    UNCOMPILED,
    compiled_anything,
    left_uncompiled,
    unseen_regions,
)
from tracer.observing.pytorch.fast_path import Asides
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hanging import Checklist, Hanging, before_step
from tracer.observing.pytorch.hooks import Hook, Role, Site, is_heard_last, leaves_gradients
from tracer.observing.pytorch.wrappers import compiled_parts, named_parts

_ROOT = 0
"""Stands for the model where hooks that last are kept by the ids of what they hang on."""
_FEW_NAMES = 8
"""How many modules a problem names."""


@dataclass(eq=False, repr=False)
class Wiring:
    """Hangs hooks on what is observed.

    Parameters
    ----------
    table : ParameterTable
        Tells whether the model has changed since hooks were put on.

    Attributes
    ----------
    asides : Asides
        The layers for which hooks step aside.
    compiled_before : bool or None
        Whether torch had compiled code when the model's hook came; None: there is none yet.
    """

    gate: Gate
    models: Models
    optimizers: Optimizers
    table: ParameterTable

    def __post_init__(self) -> None:
        self.asides = Asides()
        self.compiled_before: bool | None = None
        self._hang_all: weakref.WeakMethod[Callable[[], None]] | None = None
        # those on the model and on optimizers, by id: these stay while others come and go
        self._lasting: dict[int, list[Hanging]] = {}
        # by what they hang on, role and name: that, the hook, and where it hangs
        self._hung: dict[tuple[int, Role, str], tuple[Any, Hook, Hanging]] = {}
        self._former: dict[tuple[int, Role, str], tuple[Any, Hook, Hanging]] = {}
        self._known: dict[tuple[str, Role], tuple[bool, bool]] = {}  # which hooks were called, and which are off
        self._check = Checklist()  # of all these
        self._check_steps = Checklist()  # of those on optimizers
        self._untouched: set[int] = set()  # by id, modules that a hook would have compiled
        self._silent: list[str] = []

    # -- hanging --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to hang hooks: those that do not come again until `finish` is called are taken off then."""
        # of all that were ever there: one that nobody needed for a while has still been called before
        for (_, role, name), (_, hook, _) in self._hung.items():
            self._known[name, role] = hook.fired, hook.off
        self._former.update(self._hung)  # to those that this did not come to, when it was interrupted
        self._hung = {}

    def hang_lasting(self, root: Site | None, steps: Iterable[tuple[Optimizer, Iterable[Site]]]) -> None:
        """Hang what stays, if it is not there: torch forbids changing an optimizer's hooks while they run."""
        if root is not None and _ROOT not in self._lasting and self.takes_hooks("", root.on):
            self.compiled_before = compiled_anything()
            self._lasting[_ROOT] = [self._put(root)]
        for optimizer, sites in steps:
            if id(optimizer) not in self._lasting:
                self._lasting[id(optimizer)] = [self._put(one) for one in sites]

    def hang(self, site: Site) -> None:
        """Put a hook on something, if it is not there: one taken off in the middle of a call gets other arguments."""
        key = id(site.on), site.role, site.name
        there = self._former.pop(key, None)
        if there is not None:
            there[1].gradients = site.gradients
            self._hung[key] = there
            return
        hook = Hook(self.gate, site)
        self._hung[key] = site.on, hook, site.put(site.on, hook)
        # the root's own activations belong before the network's output
        if site.role is Role.AFTER_FORWARD and (last := self._former.pop((id(site.on), Role.AFTER_ROOT, ""), None)):
            last[2].remove()  # and hung on again after this

    def finish(self) -> None:
        """Take off what did not come again."""
        for _, _, handle in self._former.values():
            handle.remove()
        self._former = {}
        self.table.note(self.models.tops, self.optimizers.forwards_end_steps)
        for (_, role, name), (_, hook, _) in self._hung.items():
            if (name, role) in self._known:
                hook.fired, hook.off = self._known[name, role]
        self._list_hooks()

    def _put(self, site: Site) -> Hanging:
        return site.put(site.on, Hook(self.gate, site))

    def takes_hooks(self, path: str, module: nn.Module) -> bool:
        """Whether hooks can hang on a module, and change nothing there."""
        if isinstance(module, torch.jit.ScriptModule):
            self.gate.problems.note(
                f"module {path!r}", "a ScriptModule takes no hooks; its activations are not observed"
            )
            return False
        return id(module) not in self._untouched

    def leave_untouched(self, losses: Iterable[nn.Module]) -> None:
        """Find out where a hook would change what is compiled, and with that the training."""
        tops = [*self.models.tops, *(("", one) for one in losses)]
        untouched = [(prefix, top, left_uncompiled(top, Hook)) for prefix, top in tops]
        self._untouched = {id(one) for _, _, found in untouched for one in found}
        for prefix, top, found in untouched:
            names = {id(one): path for path, one in named_parts(top, prefix)} if found else {}
            told = [repr(names[id(one)]) if names.get(id(one)) else type(one).__name__ for one in found]
            if told:
                self.gate.problems.note(f"the forward of {', '.join(told)}", UNCOMPILED)
        if self.models.root is not None and id(self.models.root) in self._untouched:
            self.drop_root()

    def hung_inside(self, layer: nn.Module) -> list[tuple[Any, Hanging]]:
        """What hangs on a module and in it, each with what it hangs on."""
        inside = {id(part) for part in walking.modules(layer)}
        return [(on, hanging) for on, _, hanging in self._on_modules() if id(on) in inside]

    # -- staying --------------------------------------------------------------------------------------------

    def call_to_rewire(self, hang_all: Callable[[], None]) -> None:
        """Call a bound method to put all hooks on again; its object is not kept alive."""
        self._hang_all = weakref.WeakMethod(hang_all)

    def rewire(self) -> None:
        """Put the hooks on again."""
        hang_all = None if self._hang_all is None else self._hang_all()
        if hang_all is not None:
            hang_all()

    def look(self) -> None:
        """Put the hooks on again if modules or parameters have come, gone or been replaced."""
        if self.table.changed(self.optimizers.forwards_end_steps):
            self.rewire()

    @property
    def on_optimizers(self) -> bool:
        """Whether the hooks on optimizers hang."""
        return self._check_steps.is_complete()

    def check(self) -> None:
        """Put back all hooks that the program took off, unless some are aside."""
        if not self._check.is_complete() and self.asides.over:
            self._hang_again()

    def check_optimizers(self) -> None:
        """Put back all hooks if the program took some off optimizers."""
        if not self._check_steps.is_complete():
            self._hang_again()

    def _on_optimizers(self) -> list[tuple[Optimizer, Hanging]]:
        return [(one, hanging) for one in self.optimizers.all for hanging in self._lasting.get(id(one), ())]

    def _on_modules(self) -> list[tuple[Any, str, Hanging]]:
        """What else hooks hang on, with its name."""
        root = [(self.models.root, "", hanging) for hanging in self._lasting.get(_ROOT, ())]
        return root + [(on, hook.name, hanging) for on, hook, hanging in self._hung.values()]

    def _list_hooks(self) -> None:
        on_optimizers = self._on_optimizers()
        self._check_steps = Checklist(on_optimizers)
        self._check = Checklist([*on_optimizers, *((on, hanging) for on, _, hanging in self._on_modules())])

    def _hang_again(self) -> None:
        """Put back the hooks that the program took off, and say what was missed meanwhile."""
        stepped = [type(one).__name__ for one, hanging in self._on_optimizers() if hanging.hang_again(one)]
        called = [name for on, name, hanging in self._on_modules() if hanging.hang_again(on)]
        self._list_hooks()
        why = "the program took the recorder's hooks off; they are back from this step on"
        names = list(dict.fromkeys(repr(name) if name else "the model" for name in called))
        note = self.gate.problems.note
        if names:
            told = ", ".join(names[:_FEW_NAMES]) + (" and others" if len(names) > _FEW_NAMES else "")
            note(f"what passed through {told} meanwhile", why)
        for name in dict.fromkeys(stepped):
            note(f"what {name} did meanwhile", f"{why}, and steps that it took are counted as one")

    def come_last(self) -> None:
        """Have hooks before steps called after those that were put on since, which may change gradients.

        That matters of optimizers that overwrite gradients in a step.
        """
        for optimizer in self.optimizers.all:
            if not leaves_gradients(optimizer) and not is_heard_last(optimizer):
                hooks = self._lasting[id(optimizer)]
                hooks[0].remove()
                hooks[0] = before_step(optimizer, hooks[0].hook)
                self._list_hooks()

    # -- going ----------------------------------------------------------------------------------------------

    def drop_root(self) -> None:
        """Take off what lasts on the model."""
        for handle in self._lasting.pop(_ROOT, ()):
            handle.remove()

    def keep_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Take off what lasts on all others: another optimizer may get the id of one of them."""
        for key in self._lasting.keys() - {_ROOT, *map(id, optimizers)}:
            for handle in self._lasting.pop(key):
                handle.remove()

    def let_go_of_replaced(self) -> None:
        """Forget the optimizers of which others took the place, and what hangs on them."""
        self._check = self._check_steps = Checklist()
        for key in self.optimizers.let_go_of_replaced():
            self._lasting.pop(key, None)
        self._list_hooks()

    def let_go(self) -> Callable[[set[int]], None]:
        """Refer to no module and no optimizer; what is returned takes those back that somebody else still has.

        It gets the ids of the optimizers that are gone.
        """
        hung = {key: (weakref.ref(on), hook, handle) for key, (on, hook, handle) in self._hung.items()}
        rooted = self.models.root is not None
        self._hung = {}
        self._check = self._check_steps = Checklist()

        def back(gone: set[int]) -> None:
            for key in gone:
                self._lasting.pop(key, None)
            there = ((key, ref(), hook, handle) for key, (ref, hook, handle) in hung.items())
            self._hung = {key: (on, hook, handle) for key, on, hook, handle in there if on is not None}
            if rooted and self.models.root is None:
                self._lasting.pop(_ROOT, None)

        return back

    def detach(self, observed: Mapping[str, nn.Module]) -> None:
        """Take off everything; `silent` stays what it is."""
        self.asides.end()
        self._silent = self.silent(observed)
        hung = [handle for _, _, handle in (*self._former.values(), *self._hung.values())]
        for handle in [*hung, *(one for handles in self._lasting.values() for one in handles)]:
            handle.remove()
        self._former, self._hung, self._lasting = {}, {}, {}
        self._check = self._check_steps = Checklist()

    # -- what was called ------------------------------------------------------------------------------------

    def listens(self, *roles: Role) -> bool:
        """Whether hooks hang that have one of these roles."""
        return any(role in roles for _, role, _ in self._hung)

    def silent(self, observed: Mapping[str, nn.Module]) -> list[str]:
        """Hooked modules whose forward was never seen: bypassed, compiled away, or not part of the forward."""
        if not self.gate.attached:
            return self._silent
        fired = {hook.name for _, hook, _ in self._hung.values() if hook.fired}
        names = {hook.name for _, hook, _ in self._hung.values() if hook.role is Role.AFTER_FORWARD}
        # a mere list of parameters has no forward
        calls = (name for name, one in observed.items() if _has_forward(one))
        return [name for name in calls if name in names and name not in fired]

    def tell_unseen_regions(self, observed: Mapping[str, nn.Module]) -> None:
        """After the first step: hooks that came after the compilation of what they hang on are never called."""
        self.compiled_before = False
        # the last layer of an attention is never called: its weight is handed to a function
        never = {name for name, one in observed.items() if isinstance(one, NonDynamicallyQuantizableLinear)}
        names = {hook.name for _, hook, _ in self._hung.values() if hook.role is Role.AFTER_FORWARD}
        hooked = [name for name in observed if name in names - never]
        root = self.models.root
        if root is not None:
            for region in unseen_regions(compiled_parts(root), hooked, self.silent(observed)):
                what = f"the inside of {region!r}" if region else "the inside of the model"
                self.gate.problems.note(what, TOO_LATE)


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward
