"""Makes the parts of an exporter, and decides which hooks hang where and which part they call."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

from torch import nn

from tracer.messaging.receiver import tell_of_model
from tracer.observing.calls import Calls
from tracer.observing.computed_weights import ComputedWeights
from tracer.observing.derivatives import Differentiable
from tracer.observing.encoder_layers import EncoderLayers
from tracer.observing.gradient_norms import GRADIENT_NORMS
from tracer.observing.losses import Differentiation, Losses
from tracer.observing.optimizer_steps import OptimizerSteps
from tracer.observing.part import Ground, Part
from tracer.observing.passes import Passes
from tracer.observing.probes import Probes
from tracer.observing.pytorch.hanging import after_accumulation, after_forward, before_forward
from tracer.observing.pytorch.hooks import Role, Site
from tracer.observing.pytorch.loaders import LOADERS
from tracer.observing.pytorch.patches import BACKWARD, COMPILING, SCALERS, SCRIPTING
from tracer.observing.retrospect import Retrospect
from tracer.observing.steps import Steps
from tracer.observing.values import Values


class Parts(Part):
    """The parts of an exporter. Hangs their hooks where a receiver wants data.

    Parameters
    ----------
    ground : Ground
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.steps = Steps(ground)
        self.passes = Passes(ground, self.steps)
        # called by hooks
        self.calls = Calls(ground, self.passes)
        self.encoder_layers = EncoderLayers(ground, self.passes)
        self.computed = ComputedWeights(ground, self.passes)
        self.differentiable = Differentiable(ground, self.steps.ranks)
        self.losses = Losses(ground, self.passes, self.differentiable)
        self.differentiation = Differentiation(ground, self.passes, self.differentiable)
        self.optimizer_steps = OptimizerSteps(ground, self.steps, self.differentiation)
        # called by others
        self.probes = Probes(ground, self.passes)
        self.values = Values(ground, self.passes)
        self.retrospect = Retrospect(ground, self.optimizer_steps)
        self.wiring.call_to_rewire(self.rewire)
        self.bus.watch(self.rewire)

    def rewire(self) -> None:
        """Hang hooks where a receiver wants data, and nowhere else. Called when receivers or modules change."""
        if not self.gate.attached:
            return
        self.wiring.asides.end()
        SCRIPTING.watch(self)
        COMPILING.watch(self)
        self._look()
        tell_of_model(self.bus.receivers, self.models.structure)
        of_losses = bool(self.losses.all) or self.differentiation.is_watched
        self.differentiation.of_losses = of_losses and self.demand.asked("loss", None)
        self.differentiation.of_norms = self.demand.asked(GRADIENT_NORMS, None)
        watched = self.differentiation.of_losses or self.differentiation.of_norms
        if watched or not self.optimizers.forwards_end_steps:
            BACKWARD.watch(self.differentiation)
        if self.demand.asked("sample_ids", None):
            LOADERS.watch(self.passes.samples)
        self._hang()

    def compile_called(self) -> None:
        """Hang the hooks anew, because `torch.nn.Module.compile` was called on some module."""
        self.gate.guard("compile", self.rewire)

    def watch_optimizers(self) -> None:
        """Watch which losses GradScalers multiply, and which steps they skip."""
        if self.gate.attached:
            SCALERS.watch(self.optimizer_steps)

    def _look(self) -> None:
        """Find the modules and parameters, and the receivers that want their data."""
        self.wiring.begin()
        self.demand.look_ahead_anew()
        self.models.changed(self.optimizers.all)
        self.optimizers.forget_what_they_train()
        candidates = self.models.candidates()
        self.demand.take(candidates)
        self.publisher.datapoints.know(candidates)
        self.table.find(self.models.tops)
        self.demand.ask_anew()
        self.publisher.forget_captures()
        self.wiring.leave_untouched(self.losses.modules)
        self.steps.ranks.surveyed = False

    def forget_models(self) -> None:
        """Stop observing all modules. For launchers that find the model late, before the first step begins."""
        self.models.forget()
        self.rewire()

    def let_go(self, *, collect: bool = False) -> None:
        """Stop observing models and optimizers that the program has dropped. Does nothing during a forward.

        Parameters
        ----------
        collect : bool
            Whether to collect garbage first. Otherwise models with reference cycles are kept.
        """
        if self.passes.now.depth:
            return
        self.differentiable.forget()
        self.steps.parameters.asked.forget()
        take_hooks_back = self.wiring.let_go()
        take_models_back = self.models.let_go()
        take_optimizers_back = self.optimizers.let_go()
        self.demand.take(())
        self.table.find(())
        self.table.note((), False)
        if collect:
            gc.collect()
        take_models_back()
        take_optimizers_back()
        take_hooks_back()
        self.rewire()

    def detach(self) -> None:
        """Remove every hook, and drop all modules."""
        if self.gate.open:  # an exception may have left losses behind
            self.steps.settle_losses()
            self.steps.release_losses()
        self.wiring.detach(self.demand.modules)
        self.gate.attached = self.gate.open = False
        self.computed.detach()
        self.losses.detach()
        self.differentiable.forget()
        self.table.note((), False)
        self.steps.forget()
        self.publisher.forget_places()
        self.passes.now.inputs = []
        self.passes.samples.forget()
        self.bus.unwatch(self.rewire)
        SCRIPTING.unwatch(self)
        COMPILING.unwatch(self)
        BACKWARD.unwatch(self.differentiation)
        SCALERS.unwatch(self.optimizer_steps)
        LOADERS.unwatch(self.passes.samples)

    # -- which hooks hang where -----------------------------------------------------------------------------

    def _hang(self) -> None:
        """Hang the hooks that are needed, and remove all others."""
        for site in self._sites():
            self.wiring.hang(site)
        self.encoder_layers.hang()
        self.wiring.finish()

    def _sites(self) -> Iterator[Site]:
        passes = self.passes
        root = next((top for _, top in self.models.tops if top is self.models.root), None)
        takes_hooks = root is not None and self.wiring.takes_hooks("", root)
        if takes_hooks:
            first = functools.partial(before_forward, first=True)
            yield Site(root, Role.BEFORE_ROOT, "", first, passes.before_root, passes.quiet_before_root)
        if any(self.demand.asked(kind, None) for kind in ("input_data", "sample_ids")):
            first = functools.partial(before_forward, first=True)
            for path, top in self.models.tops:
                if top is not root and self.wiring.takes_hooks(path, top):
                    yield Site(top, Role.BEFORE_TOP, path, first, passes.before_top)
        for optimizer in self.optimizers.all:
            yield from self.optimizer_steps.sites(optimizer)
        for path, one in self.demand.modules.items():
            if self.wiring.takes_hooks(path, one):
                yield from self._of_module(path, one)
        # after the root module's own activations, which precede the network's output
        if takes_hooks:
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
        for parameter in self.table.computed(asked):
            path, one = parameter.path, parameter.computed_by
            if not self.wiring.takes_hooks(path, one):
                continue
            if parameter.by_hook:
                # first, because other hooks of the program may remove the tensor
                first = functools.partial(after_forward, first=True)
                yield Site(one, Role.AFTER_REPLACED, path, first, computed.after_replaced)
            else:
                yield Site(one, Role.AFTER_PARAMETRIZATION, path, after_forward, computed.after_parametrization)
