"""`TrainedModels`: finds the models that a script's optimizers train, and has the exporter watch them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import CaptureError
from tracer.observing.exporter import Exporter
from tracer.observing.pytorch.identity import WeakIdentitySet
from tracer.observing.pytorch.wrappers import unwrap
from tracer.recording.launching.models import Tensors, models_of, named_modules, names_of, trains_no_module

_FEW = 8
"""Optimizers at each of which, as they are made, models are looked for."""
_MANY = 8
"""Of so many models at once some may be garbage that Python has not collected; then of twice as many as are left."""


class TrainedModels:
    """The models that a script's optimizers train, as an exporter watches them.

    Parameters
    ----------
    exporter : Exporter
        It is given the models, and the optimizers that end a step.

    Attributes
    ----------
    optimizers : WeakIdentitySet
        All that were added.
    any_optimizer : bool
        Whether one was added.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self.optimizers = WeakIdentitySet()
        self.any_optimizer = False
        self._tensors: dict[int, Tensors] = {}  # of optimizers that train no module, while all of them are there
        self._beside = WeakIdentitySet()  # the optimizers that trained nothing that was watched when they were added
        self._looked = 0  # how many optimizers there were when models were looked for
        self._many = 1  # the first one may lie in the garbage that torch leaves when it imports what it needs

    def add(self, optimizer: Optimizer) -> CaptureError | None:
        """Find the model, or the models, now that there is one more optimizer, or that one trains more.

        Returns
        -------
        CaptureError or None
            Says that the captures match nothing of these models. Another optimizer, of another model, may mend that.
        """
        exporter = self._exporter
        self.optimizers.add(optimizer)
        self.any_optimizer = True
        if exporter.steps_seen:  # what the script is done with is not kept, nor recorded at each further step
            many = len(exporter.tops) >= self._many and gc.isenabled()
            exporter.let_go(collect=many)
            if many:
                self._many = max(_MANY, 2 * len(exporter.tops))
        alive = self.optimizers.alive()
        known = bool(exporter.tops) and trains_no_module(optimizer)
        found = known or self._is_watched(optimizer, len(alive)) or self._look_for_models(alive)
        if exporter.optimizers.trains(optimizer):
            self._beside.discard(optimizer)
        else:
            self._beside.add(optimizer)
        enders = tuple(self._that_end_steps(alive))
        if enders != exporter.optimizers.all:  # else what is known of their order still holds
            exporter.set_optimizer(enders)
        if not found:  # it trains tensors that are no module's; another optimizer may have a model
            exporter.train(False)
            return None
        refusal: CaptureError | None = None
        try:
            exporter.check()
        except CaptureError as error:
            refusal = error
        exporter.train(refusal is None)
        return refusal

    def watches_last_group(self, optimizer: Optimizer) -> bool:
        """Whether all that was added to an optimizer last is watched already."""
        return self._watches(optimizer.param_groups[-1:])

    def not_trained(self) -> Mapping[str, nn.Module]:
        """The models in the script's variables that no optimizer trains: target networks, teachers, averages."""
        own = self._watched()
        others = {
            name: unwrap(one)
            for name, one in named_modules().items()
            if (parameters := [*walking.parameters(one)]) and not any(id(each) in own for each in parameters)
        }
        inner = {id(part) for one in others.values() for part in walking.modules(one) if part is not one}
        return {name: one for name, one in others.items() if id(one) not in inner}

    def _watched(self) -> set[int]:
        """The ids of all parameters that are watched."""
        return {id(p) for _, top in self._exporter.tops for p in walking.parameters(top)}

    def _watches(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        watched = self._watched()
        return all(id(p) in watched for group in groups for p in group["params"])

    def _that_end_steps(self, alive: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """The optimizers that may end a step.

        Once the training has begun not those that were made for something that is not watched, an adversarial input
        say, if others are there. Of those that are there from the beginning, such as that of a temperature, the
        exporter sees when they step.
        """
        others = [one for one in alive if one not in self._beside]
        if len(others) in (0, len(alive)) or not (self._exporter.steps_seen or self._exporter.clock.open):
            return alive
        if self._exporter.optimizers.ender in self._beside:
            self._exporter.finish_step()
        return others

    def _is_watched(self, optimizer: Optimizer, count: int) -> bool:
        """Whether one more optimizer of many trains only what is watched already.

        To look for models takes as long as there are objects, and some programs make an optimizer for each parameter.
        Of few, and whenever there are twice as many, a module that holds those that were found is looked for, too.
        """
        if count <= _FEW or count >= 2 * self._looked:
            return False
        return self._watches(optimizer.param_groups)

    def _look_for_models(self, alive: Sequence[Optimizer]) -> bool:
        """Watch the models of all optimizers; whether there are any."""
        self._looked = len(alive)
        untrained = self._exporter.steps_seen == 0 and not self._exporter.clock.open
        models = models_of(alive) or self._tensors_of(alive, untrained)
        if untrained or not self._exporter.tops:
            if untrained:
                self._exporter.forget_model()
            if len(models) == 1:
                self._exporter.set_model(models[0])
            else:
                for name, one in names_of(models).items():
                    self._exporter.add_modules((name, one))
        else:  # a second training in one script: its model joins the first
            watched = {id(one) for _, top in self._exporter.tops for one in walking.modules(top)}
            more = [one for one in models if id(one) not in watched]
            for name, one in names_of(more).items():
                self._exporter.add_modules((name, one))
        return bool(models)

    def _tensors_of(self, alive: Sequence[Optimizer], untrained: bool) -> list[nn.Module]:
        """What holds the tensors of optimizers that train no module, under the names ``parameters.N``."""
        watched = set() if untrained else self._watched()
        holder = Tensors(alive, watched)
        if not holder.held:
            return []
        # the exporter keeps no model that nobody else has
        key = id(holder)
        self._tensors[key] = holder
        for one in alive:
            weakref.finalize(one, self._tensors.pop, key, None).atexit = False
        why = "no module holds what its optimizers train; it is recorded as parameters.0, parameters.1 and so on"
        self._exporter.note_problem("the model", why, warn=False)
        return [holder]
