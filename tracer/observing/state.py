"""The state of a training besides its parameters: published in a step, and restored after passes of our own."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tracer import walking
from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.clock import At
from tracer.observing.models import Parameter
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.pytorch import generators
from tracer.observing.pytorch.optimizer_states import SCALE, flat, hyperparameters, scale_of
from tracer.observing.pytorch.tensors import bytes_of
from tracer.observing.wanted_parameters import Ranks

SCALER = "scaler"
"""The leaf of a GradScaler's hyperparameters; those of an optimizer's group have ``optimizer.group``, such as
``0.1``."""


LEFT = ".left"
"""Suffix of the leaf of a generator state at the end of the previous step, if it changed between the steps."""


@dataclass(slots=True)
class Beginning:
    """The state at the beginning of a forward, as far as it is wanted of a training forward.

    Attributes
    ----------
    generators : sequence of (str, Tensor)
    buffers : sequence of (str, Tensor)
    """

    generators: Sequence[tuple[str, Tensor]]
    buffers: Sequence[tuple[str, Tensor]]


class State(ExporterPart):
    """Publishes the wanted state at the beginning of a step.

    Generators are published at the beginning of each training forward. Before the first forward of a step with a
    keyframe, their states at the end of the previous step are published too, where they differ. Buffers are published
    at the beginning of the first forward, optimizer states and hyperparameters before the optimizer steps. A step whose
    whole state was published has a ``keyframe`` at its end. The state of an optimizer that does not step has not
    changed, so it is published at the end.

    Attributes
    ----------
    whole_at : collection of int
        Steps whose whole wanted state is published, even if nobody wants a keyframe.
    """

    def __init__(self, ground: Ground, ranks: Ranks) -> None:
        super().__init__(ground)
        self.whole_at: Collection[int] = ()
        self._ranks = ranks
        self._generators: dict[str, Tensor] = {}  # the states published last
        self._left: tuple[int, dict[str, Tensor]] = -1, {}  # a step, and the states at the end of the previous step

    # -- in the order of a step -----------------------------------------------------------------------------

    def look(self) -> Beginning:
        """Keep the state at the beginning of a forward that may turn out to be a training forward."""
        wanted = self.demand.wanted
        of_generators = "generators" in self.demand.of_state and wanted("generators", None, DEFAULT_TAG)
        buffers = self.table.buffers() if "buffers" in self.demand.of_state and not self.clock.kept.forwards else ()
        return Beginning(
            generators.states() if of_generators else [],
            [(path, one.detach().clone()) for path, one in buffers if wanted("buffers", path, DEFAULT_TAG)],
        )

    def forward_begins(self, seen: Beginning | None = None) -> None:
        """Publish the state at the beginning of a training forward; `seen`: what `look` kept of it."""
        if "generators" in self.demand.of_state and self.demand.wanted("generators", None, DEFAULT_TAG):
            self._publish_generators(generators.states() if seen is None else seen.generators)
        if not self.clock.kept.forwards and "buffers" in self.demand.of_state:
            for path, buffer in self.table.buffers() if seen is None else seen.buffers:
                self.publisher.publish_leaves("buffers", path, buffer, DEFAULT_TAG, call=0)
        self.clock.kept.forwards += 1
        waiting, self.clock.kept.waiting = self.clock.kept.waiting, None
        if waiting is not None:
            self.optimizer_steps(*waiting)

    def _publish_generators(self, states: Iterable[tuple[str, Tensor]]) -> None:
        whole = not self.clock.kept.forwards and self._is_keyframe(self.clock.began)
        publish, (step, left) = self.publisher.publish, self._left
        if step != self.clock.step or self.clock.kept.forwards:
            left = {}
        for name, state in states:
            # torch's state differs in nearly every step, NumPy's and Python's in few
            known = self._generators.get(name)
            if whole or name == "torch" or known is None or not torch.equal(known, state):
                self._generators[name] = state
                publish("generators", None, state, DEFAULT_TAG, leaf=name, call=self.clock.kept.forwards, owned=False)
            if name in left and not torch.equal(left[name], state):
                publish("generators", None, left[name], DEFAULT_TAG, leaf=f"{name}{LEFT}", call=0)

    def optimizer_steps(self, optimizer: Optimizer, parameters: Iterable[Parameter]) -> None:
        """Publish the hyperparameters of an optimizer that is about to step, and its states of its parameters.

        An optimizer that computes the forward inside its step (LBFGS) has changed nothing yet when that forward begins.
        """
        if not self.clock.open:
            self.clock.kept.waiting = optimizer, parameters
            return
        if "hyperparameters" in self.demand.of_state:
            place = self.optimizers.place_of(optimizer) or 0
            for number, group in enumerate(optimizer.param_groups):
                found = hyperparameters(group)
                vector = torch.tensor(list(found.values()), dtype=torch.float64, device="cpu")
                self.publisher.publish_numbers("hyperparameters", vector, list(found), f"{place}.{number}")
        if not ("optimizer_state" in self.demand.of_state or "keyframe" in self.demand.of_state or self.whole_at):
            return
        step = self.clock.step
        if step not in self.whole_at and self.demand.dues.kinds(step).isdisjoint(("optimizer_state", "keyframe")):
            return
        trained = set(map(id, walking.trained(optimizer))) - self.clock.kept.stepped
        for parameter in parameters:
            tensor = parameter.tensor
            if tensor is None or id(tensor) not in trained:
                continue
            self.clock.kept.stepped.add(id(tensor))
            if self.demand.wanted("optimizer_state", parameter.path, DEFAULT_TAG):
                for name, value in flat(optimizer.state.get(tensor, {})):
                    self.publisher.publish(
                        "optimizer_state", parameter.path, value, DEFAULT_TAG, leaf=name, call=0, owned=False
                    )

    def scaled(self, scaler: GradScaler) -> None:
        """Publish the state of a GradScaler that multiplies the first loss of the step."""
        if "hyperparameters" in self.demand.of_state and not self.clock.kept.scaler_published:
            vector = scale_of(scaler)
            if vector is not None:
                self.clock.kept.scaler_published = True
                self.publisher.publish_numbers("hyperparameters", vector, [*SCALE], SCALER, call=0)

    def left_out(self) -> list[Optimizer]:
        """The optimizers that have not stepped in the open step, if the whole state is wanted."""
        at = self.clock.began
        if not (self._is_keyframe(at) or at.global_step in self.whole_at):
            return []
        left = {id(one.tensor) for one in self.table.all} - self.clock.kept.stepped
        return [one for one in self.optimizers.all if not left.isdisjoint(map(id, walking.trained(one)))]

    def end(self) -> None:
        """Publish the keyframe, if the step's whole state was published."""
        at = self.clock.began
        if not self._is_keyframe(at):
            return
        missing = self._missing()
        if missing is None:
            self.publisher.event("keyframe", at)
        else:
            self.problems.note("a keyframe", missing)

    def _missing(self) -> str | None:
        """The reason why the published state is incomplete; None if it is complete."""
        if not self.clock.kept.forwards:
            return "no training forward of the model was seen in its step, so it has no buffers and generators"
        for optimizer in self.optimizers.all:
            trained, stepped = walking.trained(optimizer), self.clock.kept.stepped
            unseen = [one for one in trained if id(one) not in stepped and one.grad is not None]
            if unseen:
                shapes = ", ".join(str(tuple(one.shape)) for one in unseen[:3])
                return (
                    f"a {type(optimizer).__name__} trains {len(unseen)} parameters that are not part of what is "
                    f"observed (shapes {shapes})"
                )
        for kind, path in self._needed():
            if (kind, path) in self._ranks.elsewhere:  # another rank records it, for this one too
                continue
            captures = self.demand.wanted(kind, path, DEFAULT_TAG, self.clock.began)
            if not any(one.keeps_whole(kind) for one in captures):
                return f"no capture takes the {kind}{'' if path is None else f' of {path!r}'} of its step whole"
        return None

    def _needed(self) -> Iterable[tuple[str, str | None]]:
        """The streams that make up the state."""
        yield "generators", None
        for path, _ in self.table.buffers():
            yield "buffers", path
        for parameter in self.table.all:
            if not parameter.computed:
                yield parameter.values, parameter.stream
                if id(parameter.tensor) in self.clock.kept.stepped:
                    yield "optimizer_state", parameter.path
        if self.optimizers.all:
            yield "hyperparameters", None

    def look_ahead(self) -> None:
        """Read the generators at the end of a step, if the next step has a keyframe."""
        quiet = self.clock.step < self.demand.quiet_until
        if not quiet and "generators" in self.demand.of_state and self._is_keyframe(self.clock.now()):
            self._left = self.clock.step, dict(generators.states())

    def _is_keyframe(self, at: At) -> bool:
        """Whether a keyframe is wanted of the step with these counters."""
        return "keyframe" in self.demand.of_state and bool(self.demand.wanted("keyframe", None, DEFAULT_TAG, at))


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, without gradients and autocast; restore modes, buffers, attributes and generators."""
    modes = [(one, one.training) for one in walking.modules(model)]
    try:
        with restored(model), torch.no_grad():
            model.eval()
            yield
    finally:
        for one, mode in modes:
            one.training = mode


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Disable autocast; restore a model's buffers, its modules' attributes, and all random generators.

    The contents of attributes that are tensors or Python containers are restored too, recursively.
    """
    buffers = [
        (one, name, buffer, buffer.detach().clone(), buffer._version)
        for one in walking.modules(model)
        for name, buffer in one._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    devices = sorted({p.device.index or 0 for p in walking.parameters(model) if p.device.type == "cuda"})
    attributes = [(one, _own(one)) for one in walking.modules(model)]
    contents = _Contents(value for _, own in attributes for value in own.values())
    python_state, numpy_state = random.getstate(), np.random.get_state()
    device_type = next((p.device.type for p in walking.parameters(model)), "cpu")
    try:
        with torch.random.fork_rng(devices=devices), torch.autocast(device_type, enabled=False):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        contents.restore()
        for one, own in attributes:
            now = _own(one)
            vars(one).update({name: value for name, value in own.items() if now.get(name, _NOTHING) is not value})
            for name in now.keys() - own.keys():
                del vars(one)[name]
        with torch.no_grad():
            for one, name, buffer, content, version in buffers:
                if buffer._version != version or not _same_bytes(buffer, content):
                    buffer.data.copy_(content)  # through `data`, which a graph that saved the buffer does not notice
                if one._buffers.get(name) is not buffer:
                    one._buffers[name] = buffer


class _Contents:
    """The contents of lists, dictionaries, sets and tensors, recursively, to be restored.

    A module may hold its whole data set, so tensors above `_LARGE` bytes, and values after the first `_MOST`, are not
    restored.

    Parameters
    ----------
    values : iterable
        Values of other classes are ignored.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        seen, waiting = set[int](), deque(values)
        while waiting and len(seen) < _MOST:  # breadth first: attributes before their contents
            value = waiting.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) in _CONTAINERS:
                self._containers.append((value, value.copy()))
                waiting += value.values() if isinstance(value, Mapping) else value
            elif type(value) is tuple:
                waiting += value
            elif _can_be_put_back(value):
                self._tensors.append((value, value.detach().clone(), value._version))

    def restore(self) -> None:
        """Restore the contents in place."""
        for container, before in self._containers:
            if _held(container) != _held(before):  # an unchanged container may be in use by a loop
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(before)
        with torch.no_grad():
            for tensor, before, version in self._tensors:
                if tensor._version != version:
                    tensor.data.copy_(before)


def _held(container: Any) -> Any:
    """The items of a container, by identity."""
    ids = [*map(id, container), *map(id, container.values() if isinstance(container, Mapping) else ())]
    return set(ids) if isinstance(container, set) else ids


def _can_be_put_back(value: Any) -> bool:
    plain = type(value) is Tensor and value.layout is torch.strided
    return plain and not value.is_inference() and value.nbytes <= _LARGE


_MOST: Final = 10_000
_LARGE: Final = 16 << 20
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_NOTHING = object()
_OF_TORCH = frozenset(vars(nn.Module()))


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes that a module's class adds to those of `nn.Module`, such as a recurrent network's state."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes; True if they cannot be compared easily.

    Versions do not suffice, because torch's batch norm changes buffers without counting a version.
    """
    easy = type(one) is Tensor and one.layout is torch.strided and not (one.is_quantized or one.is_meta)
    if not easy or one.is_conj() or one.is_neg():
        return True
    return torch.equal(bytes_of(one), bytes_of(other))
