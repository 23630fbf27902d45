"""Which hooks hang where: what each part of an exporter wants to be called for."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from tracer.messaging.bus import MessageBus, tell_of_model
from tracer.observing.calls import Calls
from tracer.observing.computed import ComputedWeights
from tracer.observing.demand import Demand
from tracer.observing.losses import Losses
from tracer.observing.models import Models
from tracer.observing.optimizer_steps import OptimizerSteps
from tracer.observing.optimizers import Optimizers
from tracer.observing.parameter_table import ParameterTable
from tracer.observing.passes import Passes
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hanging import after_accumulation, after_forward, before_forward
from tracer.observing.pytorch.hooks import Role, Site
from tracer.observing.ranks import Ranks
from tracer.observing.watching import Watching
from tracer.observing.wiring import Wiring


@dataclass(eq=False, repr=False)
class Layout:
    """Hangs the hooks of all parts, where a receiver wants something."""

    gate: Gate
    bus: MessageBus
    demand: Demand
    models: Models
    optimizers: Optimizers
    table: ParameterTable
    ranks: Ranks
    wiring: Wiring
    passes: Passes
    calls: Calls
    computed: ComputedWeights
    losses: Losses
    optimizer_steps: OptimizerSteps
    watching: Watching

    def rewire(self) -> None:
        """Put hooks where a receiver wants something, and nowhere else; called when receivers or modules change."""
        if not self.gate.attached:
            return
        self.wiring.asides.end()
        self.watching.watch_modules()
        self._look()
        tell_of_model(self.bus.receivers, self.models.structure)
        self.watching.watch_losses()
        self._hang()

    def _look(self) -> None:
        """Find out what there is to observe, and who wants what of it."""
        self.wiring.begin()
        self.demand.look_ahead_anew()
        self.models.changed()
        self.optimizers.forget_what_they_train()
        self.demand.take(self.models.candidates())
        self.table.find(self.models.tops)
        self.demand.ask_anew()
        self.wiring.leave_untouched(self.losses.modules)
        self.ranks.surveyed = False

    def let_go(self, *, collect: bool) -> None:
        """Stop observing models and optimizers that nobody else has any more.

        `collect`: whether Python's garbage is collected for that.
        """
        take_hooks_back = self.wiring.let_go()
        take_models_back = self.models.let_go()
        take_optimizers_back = self.optimizers.let_go()
        self.demand.take(())
        self.table.find(())
        self.table.note((), False)
        if collect:
            gc.collect()
        take_models_back()
        take_hooks_back(take_optimizers_back())
        self.rewire()

    def detach(self) -> None:
        """Take off what does not hang on modules, and refer to none."""
        self.computed.detach()
        self.losses.detach()
        self.table.note((), False)

    def _hang(self) -> None:
        """Hang the hooks, and take off those that nobody needs any more."""
        root, passes = self.models.root, self.passes
        first = functools.partial(before_forward, first=True)
        begin = None
        if root is not None:
            begin = Site(root, Role.BEFORE_ROOT, "", first, passes.before_root, passes.quiet_before_root)
        self.wiring.hang_lasting(begin, [(one, self.optimizer_steps.sites(one)) for one in self.optimizers.all])
        for site in self._sites():
            self.wiring.hang(site)
        self.wiring.asides.layers = {}
        for layer, site in self._layers():
            self.wiring.hang(site)
            self.wiring.asides.layers[id(layer)] = self.wiring.hung_inside(layer)
        self.wiring.finish()

    def _sites(self) -> Iterator[Site]:
        root, passes = self.models.root, self.passes
        for path, one in self.demand.modules.items():
            if self.wiring.takes_hooks(path, one):
                yield from self._of_module(path, one)
        # after the root's own activations, which belong before the network's output
        if root is not None and self.wiring.takes_hooks("", root):
            always = functools.partial(after_forward, always=True)
            yield Site(root, Role.AFTER_ROOT, "", always, passes.after_root, passes.quiet_after_root)
        yield from self._of_parameters()
        yield from self.losses.sites()

    def _of_module(self, path: str, module: nn.Module) -> Iterator[Site]:
        asked, calls = self.demand.asked, self.calls
        inputs = any(asked(kind, path) for kind in ("layer_inputs", "input_gradients"))
        if inputs:
            gradients = asked("input_gradients", path)
            yield Site(module, Role.BEFORE_FORWARD, path, before_forward, calls.before, gradients=gradients)
        if inputs or any(asked(kind, path) for kind in ("activations", "layer_gradients")):
            gradients = asked("layer_gradients", path)
            yield Site(module, Role.AFTER_FORWARD, path, after_forward, calls.after, gradients=gradients)

    def _of_parameters(self) -> Iterator[Site]:
        asked, computed = self.demand.asked, self.computed
        if self.optimizers.forwards_end_steps:
            for path, tensor in self.table.trained(asked):
                yield Site(tensor, Role.AFTER_ACCUMULATION, path, after_accumulation, computed.after_accumulation)
        for path, one in self.table.parametrizations(asked):
            if self.wiring.takes_hooks(path, one):
                yield Site(one, Role.AFTER_PARAMETRIZATION, path, after_forward, computed.after_parametrization)
        for path, one in self.table.replaced(asked):
            if self.wiring.takes_hooks(path, one):
                # before hooks of the program's that take away what others of its hooks have put there
                first = functools.partial(after_forward, first=True)
                yield Site(one, Role.AFTER_REPLACED, path, first, computed.after_replaced)

    def _layers(self) -> Iterator[tuple[nn.Module, Site]]:
        """The layers that have a fast path, where any hooks hang on them or inside: these step aside for it."""
        for path, one in self.models.parts():
            if not isinstance(one, nn.TransformerEncoderLayer):
                continue
            if self.wiring.hung_inside(one) and self.wiring.takes_hooks(path, one):
                calls = self.calls
                yield (
                    one,
                    Site(one, Role.BEFORE_LAYER, path, before_forward, calls.before_layer, calls.quiet_before_layer),
                )
