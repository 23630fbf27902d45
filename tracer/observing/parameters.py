"""Keeps the weights, gradients and updates of a step until it ends.

The wanted weights are copied before an optimizer steps. Gradients are kept as the optimizer used them, and updates are
computed when the weights have changed. All are published when the step ends, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tracer.format.placement import local
from tracer.messaging.messages import DEFAULT_TAG, difference
from tracer.observing.capture import Capture
from tracer.observing.clock import At
from tracer.observing.numbers import StreamKey
from tracer.observing.parameter_table import Parameter
from tracer.observing.part import Ground, Part
from tracer.observing.pytorch.tensors import copied, same_storage, space_for, unscaled
from tracer.observing.ranks import Ranks


class Parameters(Part):
    """Keeps the weights, gradients and updates of a step, and publishes them when it ends.

    Attributes
    ----------
    replicas : dict
        By path, the placement of a parameter that other ranks hold, too.
    """

    def __init__(self, ground: Ground, ranks: Ranks) -> None:
        super().__init__(ground)
        self.replicas = ranks.replicas
        self._before: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._gradients: dict[str, Tensor] = {}
        # of what is computed: the gradients since an optimizer stepped, the last backward that brought one, whether the
        # value is what it is to be, and whether an optimizer stepped before there was any
        self._pending: dict[str, Tensor] = {}
        self._backwards: dict[str, int] = {}
        self._settled: set[str] = set()
        self._late: set[str] = set()
        # the parameters whose gradients were copied before the optimizer's step that goes on
        self._final: set[str] = set()
        self._after: dict[str, Tensor] = {}
        self._places: dict[tuple[str, str], dict[str, Any] | None] = {}  # by path and kind

    def forget(self) -> None:
        """Forget the step."""
        for kept in (self._before, self._gradients, self._final, self._after, self._places):
            kept.clear()
        for of_computed in (self._pending, self._backwards, self._settled, self._late):
            of_computed.clear()

    @property
    def holding(self) -> bool:
        """Whether there is anything to `forget`. All that is kept has a place, which is noted first."""
        return bool(self._places)

    def snapshot(self, parameters: Iterable[Parameter], *, settle: bool) -> None:
        """Copy the wanted weights before they change, unless that was done in this step.

        Weights that were computed for a forward are kept already. `settle` says that an optimizer steps now, so that
        weights which later forwards compute are not those of this step.
        """
        asked, step = self.demand.of_parameters(), self.clock.now().global_step
        for parameter in parameters:
            value_stream, _, update_stream = asked[parameter.path]
            if settle and parameter.computed:
                (self._settled if parameter.path in self._before else self._late).add(parameter.path)
            if parameter.path in self._before or (value_stream is None and update_stream is None):
                continue
            tensor = parameter.tensor
            if tensor is None and parameter.by_hook:  # no forward was seen to use it, as in a compiled one
                tensor, update_stream = parameter.in_place, None
            if tensor is None:
                continue
            value_capture = None if value_stream is None else value_stream.wanted(step)
            update_capture = None if update_stream is None else update_stream.wanted(step)
            if value_capture is None and update_capture is None:
                continue
            if is_lazy(tensor):  # it has no values yet
                continue
            kind, _, update_kind = parameter.kinds
            try:
                if not self.publisher.can_record(kind, parameter.stream, tensor):
                    continue
                value = self._copy(value_capture, kind, tensor)
                base = value if update_capture is value_capture else self._copy(update_capture, update_kind, tensor)
            except Exception as error:  # noqa: BLE001 - under strict it is raised again
                self.demand.give_up(kind, parameter.stream, error)
                self.demand.give_up(update_kind, parameter.stream, error)
                continue
            place = self.publisher.place(tensor)
            self._places[parameter.path, kind] = self._places[parameter.path, update_kind] = place
            self._before[parameter.path] = (value, base)

    def wanted(self, parameter: Parameter, kind: str) -> Capture | None:
        """The capture by which messages of a kind about a parameter are wanted in this step; None if nobody does."""
        return self.demand.wanted(kind, parameter.stream, DEFAULT_TAG)

    def computed(self, parameter: Parameter, value: Tensor) -> None:
        """Keep what is computed for a forward: the last one before an optimizer steps, or else the first one after."""
        path, kind = parameter.path, parameter.values
        if path in self._settled:
            return
        if path in self._late:
            self._settled.add(path)
        capture = self.wanted(parameter, kind)
        if capture is not None and self.publisher.can_record(kind, parameter.stream, value):
            self._places[path, kind] = self.publisher.place(value)
            self._before[path] = (self._copy(capture, kind, value), None)

    def accumulated(self, parameter: Parameter, gradient: Tensor, scale: Tensor | None) -> None:
        """Keep a running sum of gradients, divided by the factor that a GradScaler put into the loss."""
        capture = self.wanted(parameter, parameter.gradients)
        if capture is not None:
            self._keep_gradient(parameter, capture, gradient, scale)

    def add_gradient(self, parameter: Parameter, gradient: Tensor, scale: Tensor | None, task: int) -> None:
        """Add a gradient of what was computed for a forward to those of this step, as torch adds up a parameter's.

        Parameters
        ----------
        parameter : Parameter
        gradient : torch.Tensor
        scale : torch.Tensor or None
            What a GradScaler has multiplied the loss with.
        task : int
            Tells a backward from others. Where the originals have no gradients when it begins, they were dropped, and
            so are those from before.
        """
        path, capture = parameter.path, self.wanted(parameter, parameter.gradients)
        if capture is None:
            return
        before = self._pending.pop(path, None)
        if self._backwards.get(path) != task:
            self._backwards[path] = task
            originals = parameter.originals
            if originals and all(one.grad is None for one in originals):
                before = None
        copy = self._gradient(parameter, capture, gradient, scale)
        if copy is not None:
            self._pending[path] = copy if before is None else copy.add_(before)

    def keep_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Copy the wanted gradients before a step that may overwrite them."""
        asked, step = self.demand.of_parameters(), self.clock.now().global_step
        for parameter in parameters:
            stream = asked[parameter.path][1]
            gradient = None if stream is None or parameter.tensor is None else parameter.tensor.grad
            capture = None if stream is None or gradient is None else stream.wanted(step)
            if capture is not None and gradient is not None:
                try:
                    self._keep_gradient(parameter, capture, gradient)
                    self._final.add(parameter.path)
                except Exception as error:  # noqa: BLE001 - one parameter's; the others, and the clock, go on
                    self.demand.give_up(parameter.kinds[1], parameter.stream, error)

    def compare(self, parameters: Iterable[Parameter], final: bool) -> None:
        """Compute the wanted updates, now that the weights have changed; and copy gradients, if they are `final`."""
        asked, step = self.demand.of_parameters(), self.clock.now().global_step
        for parameter in parameters:
            _, gradients, updates = asked[parameter.path]
            tensor = parameter.tensor
            pending = self._pending.pop(parameter.path, None) if self._pending else None
            if pending is not None:
                originals = parameter.originals if final else []
                if not originals or any(one.grad is not None for one in originals):  # else none were accumulated
                    self._gradients[parameter.path] = pending
            if tensor is None or (gradients is None and updates is None):
                continue
            capture = None if updates is None else updates.wanted(step)
            if capture is not None:
                try:
                    self._keep_update(parameter, capture, tensor)
                except Exception as error:  # noqa: BLE001 - one parameter's; the others, and the clock, go on
                    self.demand.give_up(parameter.kinds[2], parameter.stream, error)
            capture = None if gradients is None else gradients.wanted(step)
            if capture is not None and final and tensor.grad is not None and parameter.path not in self._final:
                try:
                    self._keep_gradient(parameter, capture, tensor.grad)
                except Exception as error:  # noqa: BLE001 - under strict it is raised again
                    self.demand.give_up(parameter.kinds[1], parameter.stream, error)
        self._final.clear()

    def publish(self, at: At) -> None:
        """Publish the value, gradient and update of each parameter, as far as they were kept and are still wanted."""
        step = self.clock.now().global_step
        for parameter in self.table.all:
            path = parameter.path
            asked = self.demand.of_parameters()  # a receiver may have failed at the message before
            kept = self._before.get(path)
            stages = (None if kept is None else kept[0], self._gradients.get(path), self._after.get(path))
            for kind, data, stream in zip(parameter.kinds, stages, asked[path], strict=True):
                capture = None if data is None or stream is None else stream.wanted(step)
                if capture is not None and data is not None:
                    try:
                        name = StreamKey(kind, parameter.stream, DEFAULT_TAG, "")
                        tensor = parameter.tensor
                        whole = data if tensor is None else local(tensor)
                        place = self._places.get((path, kind))
                        if place is None and not (parameter.computed and kind != parameter.values):
                            place = self.replicas.get(path)
                        self.publisher.release(capture, name, data, whole, 0, at, owned=True, placement=place)
                    except Exception as error:  # noqa: BLE001 - under strict it is raised again
                        self.demand.give_up(kind, parameter.stream, error)

    def _copy(self, capture: Capture | None, kind: str, tensor: Tensor) -> Tensor | None:
        if capture is None:
            return None
        source = _values(tensor)
        chosen = capture.select(kind, source)
        return copied(chosen, self.publisher.memory) if same_storage(chosen, source) else chosen

    def _keep_update(self, parameter: Parameter, capture: Capture, tensor: Tensor) -> None:
        _, base = self._before.get(parameter.path, (None, None))
        if base is not None:
            now = capture.select(parameter.updates, _values(tensor))
            if now.shape == base.shape:
                self._after[parameter.path] = difference(now, base, space_for(now, self.publisher.memory))

    def _keep_gradient(
        self, parameter: Parameter, capture: Capture, gradient: Tensor, scale: Tensor | None = None
    ) -> None:
        copy = self._gradient(parameter, capture, gradient, scale)
        if copy is not None:
            self._gradients[parameter.path] = copy

    def _gradient(
        self, parameter: Parameter, capture: Capture, gradient: Tensor, scale: Tensor | None
    ) -> Tensor | None:
        """What is to be kept of a gradient."""
        kind = parameter.gradients
        if not self.publisher.can_record(kind, parameter.stream, gradient):
            return None
        self._places[parameter.path, kind] = self.publisher.place(gradient)
        gradient = local(gradient).detach()
        if scale is not None:
            gradient = unscaled(gradient, scale)
        return self._copy(capture, kind, gradient)


def _values(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, dense and without a graph."""
    own = local(tensor).detach()
    return own if own.layout is torch.strided else own.to_dense()
