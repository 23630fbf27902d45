"""Keeps the weights, gradients and updates of a step until it ends.

The wanted weights are copied before an optimizer steps. Gradients are kept as the optimizer used them, and updates are
computed after the weights have changed. When the step ends, all are published and freed, parameter by parameter.

Final data of large parameters is not kept but published before the optimizer steps: weights, and gradients if nothing
can change them any more. If updates are wanted, one copy of the weights is kept through the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tracer.format.placement import local
from tracer.messaging.messages import DEFAULT_TAG, difference
from tracer.observing.capture import Capture
from tracer.observing.clock import At, StreamKey
from tracer.observing.demand import Captures, OfParameters, is_beside_statistics
from tracer.observing.device.reading import Noted
from tracer.observing.models import Parameter
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.pulses import PulseRows
from tracer.observing.pytorch.tensors import same_storage, unscaled
from tracer.observing.wanted_parameters import Ranks, Small, SmallParameters, WantedParameters

T = TypeVar("T")


class KeptParameter(NamedTuple):
    """The data kept of a tensor until the step ends.

    Attributes
    ----------
    small : list of (Capture, Tensor or Noted)
        Hash and statistics, which are computed at once so that the tensor need not be copied for them; or a note of
        what a device is asked to read.
    data : torch.Tensor or None
        A copy of the part that the data's capture selects. If the tensor is not final and its hash or statistics are
        wanted, a copy of all of it.
    whole : bool
        Whether the data is the whole tensor, from which captures select when the step ends.
    alone : bool
        Whether no message shares the data's memory, so that the update may be computed in place.
    like : torch.Tensor or None
        A tensor without memory with the dtype and shape of what may be gone when the step ends.
    """

    small: list[tuple[Capture, Tensor | Noted]]
    data: Tensor | None
    whole: bool = False
    alone: bool = False
    like: Tensor | None = None


@dataclass(slots=True)
class OfStep:
    """What is kept of a parameter until the step ends.

    Attributes
    ----------
    value, gradient, update : Kept or None
        The data of its messages.
    base : Kept or None
        The weights from which its update is computed.
    moved : tuple of Capture
        Of an update that is computed when it is published.
    seen : bool
        Whether its weights were copied or published, or cannot be.
    released : bool
        Whether its gradient was published before the optimizer step.
    pending, backward : Kept or None, int
        Of a computed weight: the gradients since an optimizer stepped, and the last backward that brought one.
    settled, late : bool
        Of a computed weight: whether its value is final, and whether it had none when an optimizer stepped.
    places : dict
        By kind, which part of the tensor this process holds.
    """

    value: KeptParameter | None = None
    gradient: KeptParameter | None = None
    update: KeptParameter | None = None
    base: KeptParameter | None = None
    moved: Captures = ()
    seen: bool = False
    released: bool = False
    pending: KeptParameter | None = None
    backward: int | None = None
    settled: bool = False
    late: bool = False
    places: dict[str, dict[str, Any] | None] = field(default_factory=dict)


_UNREAD: tuple[None, Sequence[int | None]] = None, ()


EARLY = 4 << 20
"""Parameters of at least this many bytes are published as soon as they are final; smaller ones when the step ends.

Early publishing takes one more copy, from which the update is computed in place. In return, the limit on messages
waiting to be written also limits all copies.
"""


class Parameters(ExporterPart):
    """Keeps the weights, gradients and updates of a step, and publishes them when it ends.

    Attributes
    ----------
    replicas : dict
        By path, the placement of a parameter that other ranks hold too.
    asked : WantedParameters
        Which parameters are wanted in a step.
    """

    def __init__(self, ground: Ground, ranks: Ranks) -> None:
        super().__init__(ground)
        self.replicas = ranks.replicas
        self.asked = WantedParameters(ground, ranks)
        self._kept: dict[str, OfStep] = {}  # by path, of the open step
        self._final: set[str] = set()  # whose gradients were copied before the optimizer step in progress
        self._small = SmallParameters(self.publisher)

    def forget(self) -> None:
        """Drop all data of the step."""
        self._kept, self._final = {}, set()
        self._small.forget()

    @property
    def holding(self) -> bool:
        """Whether there is data to `forget`."""
        return bool(self._kept or self._small.read)

    def _of(self, parameter: Parameter) -> OfStep:
        """What is kept of a parameter in this step."""
        return self._kept.get(parameter.path) or self._kept.setdefault(parameter.path, OfStep())

    def snapshot(self, parameters: Sequence[Parameter], *, settle: bool) -> None:
        """Copy the wanted weights before they change, at most once per step.

        Weights that were computed for a forward are already kept. `settle`: an optimizer steps now, so weights that
        later forwards compute do not belong to this step.
        """
        listed = self.asked.of(parameters)
        left = self._small.read_weights(listed.together, self.demand.of_parameters()) if listed.together else []
        for parameter, value_captures, _, update_captures in (*left, *listed.alone):
            kept = self._of(parameter)
            if settle and parameter.computed:
                kept.settled, kept.late = kept.settled or kept.seen, kept.late or not kept.seen
            if kept.seen or not (value_captures or update_captures):
                continue
            tensor = parameter.tensor
            if tensor is None and parameter.by_hook:  # no forward was seen using it, as when compiled
                tensor, update_captures = parameter.in_place, ()
            if tensor is None or is_lazy(tensor):
                continue
            kind, _, update_kind = parameter.kinds
            try:
                if not self.publisher.can_record(kind, parameter.stream, tensor):
                    continue
                value = self._keep(value_captures, kind, tensor)
                base = value
                if update_captures != value_captures or (value is not None and value.small):
                    base = self._keep(update_captures, update_kind, tensor, final=False)
            except Exception as error:  # noqa: BLE001 - under strict it is raised again
                self.demand.give_up(kind, parameter.stream, error)
                self.demand.give_up(update_kind, parameter.stream, error)
                continue
            kept.places[kind] = kept.places[update_kind] = self.publisher.place(tensor)
            kept.seen, kept.value, kept.base = True, value, base
        self.publisher.pulses.flush()

    def release(self, parameters: Sequence[Parameter], *, gradients: bool) -> None:
        """Publish the final data of large parameters before an optimizer steps; `gradients`: gradients are final."""
        at = self.clock.began
        for one, value, gradient, update in self.asked.of(parameters).alone:
            tensor = one.tensor
            if tensor is None or one.computed or self._of(one).seen or not _is_large(tensor):
                continue
            self._attempt(one.values, one, self._release_value, tensor, value, update, at)
            if gradients:
                self._attempt(one.gradients, one, self._release_gradient, tensor, gradient, at)
            self._attempt(one.updates, one, self._keep_base, tensor, update)

    def _release_value(
        self, parameter: Parameter, tensor: Tensor, captures: Captures, updates: Captures, at: At
    ) -> None:
        """Publish the weights of a parameter."""
        kind, of_step = parameter.values, self._of(parameter)
        if not (captures or updates):
            return
        of_step.seen = True
        if not self.publisher.can_record(kind, parameter.stream, tensor):
            return
        of_step.places[kind] = of_step.places[parameter.updates] = self.publisher.place(tensor)
        kept = self._keep(captures, kind, tensor)
        if kept is not None:
            self._publish(parameter, kind, kept, captures, at)

    def _release_gradient(self, parameter: Parameter, tensor: Tensor, captures: Captures, at: At) -> None:
        """Publish the gradient of a parameter."""
        if not captures or tensor.grad is None or self._of(parameter).released:
            return
        kept = self._gradient(parameter, captures, tensor.grad)
        self._of(parameter).released = True
        if kept is not None:
            self._publish(parameter, parameter.gradients, kept, captures, at)

    def _keep_base(self, parameter: Parameter, tensor: Tensor, captures: Captures) -> None:
        """Keep the published weights of a parameter, from which its update is computed."""
        of_step = self._of(parameter)
        if captures and parameter.updates in of_step.places:  # otherwise it cannot be recorded
            base = self._keep(captures, parameter.updates, tensor, final=False)
            of_step.base = None if base is None else base._replace(alone=True)

    def _attempt(self, kind: str, parameter: Parameter, work: Callable[..., T], *about: Any) -> T | None:
        """Do work for a parameter. If it fails, its messages of the kind are given up, and all others continue."""
        try:
            return work(parameter, *about)
        except Exception as error:  # noqa: BLE001 - under strict it is raised again
            self.demand.give_up(kind, parameter.stream, error)
            return None

    def wanted(self, parameter: Parameter, kind: str) -> Captures:
        """The captures that want messages of a kind about a parameter in this step."""
        return self.demand.wanted(kind, parameter.stream, DEFAULT_TAG)

    def computed(self, parameter: Parameter, value: Tensor) -> None:
        """Keep a weight computed for a forward: the last before an optimizer steps, or else the first after it."""
        kind, of_step = parameter.values, self._of(parameter)
        if of_step.settled:
            return
        of_step.settled = of_step.late
        captures = self.wanted(parameter, kind)
        if captures and self.publisher.can_record(kind, parameter.stream, value):
            of_step.places[kind] = self.publisher.place(value)
            kept = self._keep(captures, kind, value)
            like = torch.empty_like(local(value), device="meta")
            of_step.seen, of_step.base = True, None
            of_step.value = None if kept is None else kept._replace(like=like)
            self.publisher.pulses.flush()

    def accumulated(self, parameter: Parameter, gradient: Tensor, scale: Tensor | None) -> None:
        """Keep a running sum of gradients, divided by a GradScaler's factor."""
        captures = self.wanted(parameter, parameter.gradients)
        if captures:
            self._keep_gradient(parameter, captures, gradient, scale)
            self.publisher.pulses.flush()

    def add_gradient(self, parameter: Parameter, gradient: Tensor, scale: Tensor | None, task: int) -> None:
        """Add a gradient of a computed weight to its sum in this step, as torch accumulates a parameter's gradient.

        Parameters
        ----------
        parameter : Parameter
        gradient : torch.Tensor
        scale : torch.Tensor or None
            The factor by which a GradScaler multiplied the loss.
        task : int
            Identifies the backward. If the original parameters have no gradients when it begins, the program has
            dropped them, and the earlier sum is dropped too.
        """
        captures, of_step = self.wanted(parameter, parameter.gradients), self._of(parameter)
        if not captures:
            return
        before, of_step.pending = of_step.pending, None
        if of_step.backward != task:
            of_step.backward = task
            originals = parameter.originals
            if originals and all(one.grad is None for one in originals):
                before = None
        kept = self._gradient(parameter, captures, gradient, scale, final=False)
        self.publisher.pulses.flush()
        if kept is not None:
            if before is not None and kept.data is not None and before.data is not None:
                kept.data.add_(before.data)
            of_step.pending = kept

    def keep_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Copy the wanted gradients before an optimizer step that may overwrite them."""
        listed = self.asked.of(parameters)
        left = self._small.read_gradients(listed.together, ())
        self._final.update(one.path for one in listed.together if one.path in self._small.read)
        for one, _, captures, _ in (*left, *listed.alone):
            gradient = None if one.tensor is None else one.tensor.grad
            if captures and gradient is not None and not self._of(one).released:
                self._attempt(one.gradients, one, self._keep_gradient, captures, gradient)
                self._final.add(one.path)
        self.publisher.pulses.flush()

    def compare(self, parameters: Sequence[Parameter], final: bool, *, ends: bool) -> None:
        """Compute the wanted updates after the weights have changed, and copy gradients if they are `final`.

        `ends`: the training step ends now. Updates are then computed one by one as they are published.
        """
        listed = self.asked.of(parameters)
        left = [one.wanted for one in listed.together if one.path not in self._small.read]
        if len(left) < len(listed.together):
            odd = self._small.read_gradients(listed.together, self._final) if final else []
            self._small.read_updates(listed.together)
            left += [one._replace(updates=()) for one in odd]
        for parameter, _, gradients, updates in (*left, *listed.alone):
            kept, tensor = self._of(parameter), parameter.tensor
            pending, kept.pending = kept.pending, None
            if pending is not None:
                originals = parameter.originals if final else []
                if not originals or any(one.grad is not None for one in originals):  # otherwise none were accumulated
                    kept.gradient = pending
            if tensor is None:
                continue
            if updates and ends:
                kept.moved = updates
            elif updates:
                update = self._attempt(parameter.updates, parameter, self._update, updates, kept.base, False)
                kept.update = update or kept.update
            known = parameter.path in self._final or kept.released
            if gradients and final and tensor.grad is not None and not known:
                self._attempt(parameter.gradients, parameter, self._keep_gradient, gradients, tensor.grad)
        self._final.clear()
        if not ends:
            self.publisher.pulses.flush()

    def publish(self, at: At) -> None:
        """Publish the kept values, gradients and updates of each parameter that are still wanted."""
        step, asked = self.clock.now().global_step, self.demand.of_parameters()
        read: list[tuple[PulseRows, int]] = []
        pulses, rank = self.publisher.pulses, self.publisher.rank
        for parameter in self.table.all:
            path, of_step = parameter.path, self._kept.get(parameter.path)
            small, numbers = self._small.read.get(path, _UNREAD)
            rows: Sequence[PulseRows | None] = () if small is None else small.rows
            if small is not None and asked is not self._small.asked:
                rows = self._rows_still_wanted(small, asked, step)
            if small is not None and (of_step is None or of_step.gradient is None):  # nothing of it is kept alone
                both = zip(rows, numbers, strict=True)
                read += [(one, number) for one, number in both if one is not None and number is not None]
                continue
            if of_step is None:
                continue
            base, update = of_step.base, of_step.update
            if of_step.moved:  # before the message that its base belongs to is published
                update = self._attempt(parameter.updates, parameter, self._update, of_step.moved, base, True)
            kept = [of_step.value, of_step.gradient, update]
            of_step.value = of_step.gradient = of_step.update = of_step.base = None
            del base, update
            for place, kind in enumerate(parameter.kinds):
                if small is not None and (one := rows[place]) is not None and (number := numbers[place]) is not None:
                    read.append((one, number))
                asked = self.demand.of_parameters()  # a receiver may just have failed
                stream = asked[path][place]
                data, kept[place] = kept[place], None
                captures = () if data is None or stream is None else stream.wanted(step)
                if captures and data is not None:
                    if read:
                        pulses.take_read(read, at, rank)
                        read = []
                    self._attempt(kind, parameter, self._publish, kind, data, captures, at)
                del data
        if read:
            pulses.take_read(read, at, rank)

    def _rows_still_wanted(self, small: Small, asked: OfParameters, step: int) -> list[PulseRows | None]:
        """The rows of a parameter that was read before somebody who wants it came or went."""
        parameter, tensor, found = small.wanted.parameter, small.wanted.parameter.tensor, list[PulseRows | None]()
        for kind, stream in zip(parameter.kinds, asked.get(small.path, (None, None, None)), strict=True):
            captures = () if stream is None else stream.wanted(step)
            if captures and tensor is not None and self.publisher.keeps_rows(kind, captures):
                key = StreamKey(kind, parameter.stream, DEFAULT_TAG, "")
                found.append(self.publisher.rows(captures, key, tensor))
            else:
                found.append(None)
        return found

    def _publish(self, parameter: Parameter, kind: str, kept: KeptParameter, captures: Captures, at: At) -> None:
        """Publish the kept tensor of a kind of a parameter, for the captures that still want it."""
        stream = StreamKey(kind, parameter.stream, DEFAULT_TAG, "")
        place = self._of(parameter).places.get(kind)
        if place is None and not (parameter.computed and kind != parameter.values):
            place = self.replicas.get(parameter.path)
        tensor = parameter.tensor
        like = kept.like if tensor is None else local(tensor)
        small = {id(capture): made for capture, made in kept.small}
        for capture in captures:
            made = small.get(id(capture))
            source = like if like is not None else made if isinstance(made, Tensor) else kept.data
            if source is None:
                continue
            twice = is_beside_statistics(capture, captures, kind)
            sampling = self.publisher.sampling(capture, stream, source, place, twice)
            if made is not None:
                self.publisher.tell(capture, stream, made, 0, at, sampling)
            elif kept.data is not None:
                chosen = capture.select(kind, kept.data) if kept.whole else kept.data
                self.publisher.release(capture, stream, chosen, source, 0, at, sampling, owned=True)

    def _keep(self, captures: Captures, kind: str, tensor: Tensor, *, final: bool = True) -> KeptParameter | None:
        """The data to keep of a tensor; None if there is none.

        Hashes and statistics of a `final` tensor are computed at once. Otherwise the tensor is kept whole for them.
        """
        if not captures:
            return None
        source, apart = _values(tensor), local(tensor).layout is torch.strided
        beside = [one for one in captures if one.beside(kind) is not None]
        if beside and not final:
            copied = self.publisher.pulses.copy(source) if apart else source
            return KeptParameter([], self.publisher.copy(source) if copied is None else copied, whole=True)
        made = self._made(beside, kind, source, captures)
        if len(made) == len(captures):
            noted = any(isinstance(one, Noted) for _, one in made)
            return KeptParameter(made, None, like=torch.empty_like(source, device="meta") if noted else None)
        chosen = captures[-1].select(kind, source)
        return KeptParameter(made, self.publisher.copy(chosen) if apart and same_storage(chosen, source) else chosen)

    def _made(
        self, beside: list[Capture], kind: str, tensor: Tensor, captures: Captures
    ) -> list[tuple[Capture, Tensor | Noted]]:
        """Hash and statistics of a tensor, or a note of it, if it stays as it is until what is noted is flushed."""
        noted = self.publisher.pulses.note(tensor) if beside and self.publisher.keeps_rows(kind, captures) else None
        return [(one, one.reduced(kind, tensor) if noted is None else noted) for one in beside]

    def _update(
        self, parameter: Parameter, captures: Captures, base: KeptParameter | None, ends: bool
    ) -> KeptParameter | None:
        """The data to keep of an update; if the step `ends`, the update may overwrite its base."""
        tensor = parameter.tensor
        if tensor is None or base is None or base.data is None:
            return None
        kind, now = parameter.updates, _values(tensor)
        if not base.whole:
            now = captures[-1].select(kind, now)
        if now.shape != base.data.shape:
            return None
        if self.publisher.keeps_rows(kind, captures):
            noted = self.publisher.pulses.note_difference(now, base.data)
            if noted is not None:
                return KeptParameter([(one, noted) for one in captures], None)
        update = difference(now, base.data, base.data if ends and base.alone else self.publisher.space(now))
        made = self._made([one for one in captures if one.beside(kind) is not None], kind, update, captures)
        return KeptParameter(made, update if len(made) < len(captures) else None, base.whole)

    def _keep_gradient(
        self, parameter: Parameter, captures: Captures, gradient: Tensor, scale: Tensor | None = None
    ) -> None:
        kept = self._gradient(parameter, captures, gradient, scale)
        if kept is not None:
            self._of(parameter).gradient = kept

    def _gradient(
        self,
        parameter: Parameter,
        captures: Captures,
        gradient: Tensor,
        scale: Tensor | None = None,
        *,
        final: bool = True,
    ) -> KeptParameter | None:
        """The data to keep of a gradient."""
        kind = parameter.gradients
        if not self.publisher.can_record(kind, parameter.stream, gradient):
            return None
        self._of(parameter).places[kind] = self.publisher.place(gradient)
        gradient = local(gradient).detach()
        if scale is not None:
            gradient = unscaled(gradient, scale)
        return self._keep(captures, kind, gradient, final=final)


def _is_large(tensor: Tensor) -> bool:
    """Whether this process's share of a tensor is large enough to be published as soon as it is final."""
    own = local(tensor)
    return own.layout is torch.strided and own.is_cpu and own.nbytes >= EARLY


def _values(tensor: Tensor) -> Tensor:
    """This process's share of a tensor, dense and without a graph."""
    own = local(tensor).detach()
    return own if own.layout is torch.strided else own.to_dense()
