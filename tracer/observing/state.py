"""The state of a training besides its parameters: buffers, optimizer states, generators, hyperparameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tracer import walking
from tracer.messaging.messages import DEFAULT_TAG, checked
from tracer.observing.clock import At
from tracer.observing.numbers import StreamKey
from tracer.observing.parameter_table import Parameter
from tracer.observing.part import Ground, Part
from tracer.observing.pytorch import generators
from tracer.observing.pytorch.optimizer_states import SCALE, flat, hyperparameters, scale_of
from tracer.observing.ranks import Ranks

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


class State(Part):
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
        self._forwards = 0  # training forwards of the open step
        self._generators: dict[str, Tensor] = {}  # the states published last
        self._left: tuple[int, dict[str, Tensor]] = -1, {}  # a step, and the states at the end of the previous step
        self._stepped: set[int] = set()  # ids of the parameters whose optimizer state is published in this step
        self._scaled = False
        self._waiting: tuple[Optimizer, Iterable[Parameter]] | None = None  # an optimizer that steps before its forward

    # -- in the order of a step -----------------------------------------------------------------------------

    def look(self) -> Beginning:
        """Keep the state at the beginning of a forward that may turn out to be a training forward."""
        wanted = self.demand.wanted
        of_generators = "generators" in self.demand.of_state and wanted("generators", None, DEFAULT_TAG)
        buffers = self.table.buffers() if "buffers" in self.demand.of_state and not self._forwards else ()
        return Beginning(
            generators.states() if of_generators else [],
            [(path, one.detach().clone()) for path, one in buffers if wanted("buffers", path, DEFAULT_TAG)],
        )

    def forward_begins(self, seen: Beginning | None = None) -> None:
        """Publish the state at the beginning of a training forward; `seen`: what `look` kept of it."""
        if "generators" in self.demand.of_state and self.demand.wanted("generators", None, DEFAULT_TAG):
            self._publish_generators(generators.states() if seen is None else seen.generators)
        if not self._forwards and "buffers" in self.demand.of_state:
            for path, buffer in self.table.buffers() if seen is None else seen.buffers:
                self.publisher.publish_leaves("buffers", path, buffer, DEFAULT_TAG, call=0)
        self._forwards += 1
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.optimizer_steps(*waiting)

    def _publish_generators(self, states: Iterable[tuple[str, Tensor]]) -> None:
        whole = not self._forwards and self._is_keyframe(self.clock.began)
        publish, (step, left) = self.publisher.publish, self._left
        if step != self.clock.step or self._forwards:
            left = {}
        for name, state in states:
            # torch's state differs in nearly every step, NumPy's and Python's in few
            known = self._generators.get(name)
            if whole or name == "torch" or known is None or not torch.equal(known, state):
                self._generators[name] = state
                publish("generators", None, state, DEFAULT_TAG, leaf=name, call=self._forwards, owned=False)
            if name in left and not torch.equal(left[name], state):
                publish("generators", None, left[name], DEFAULT_TAG, leaf=f"{name}{LEFT}", call=0)

    def optimizer_steps(self, optimizer: Optimizer, parameters: Iterable[Parameter]) -> None:
        """Publish the hyperparameters of an optimizer that is about to step, and its states of its parameters.

        An optimizer that computes the forward inside its step (LBFGS) has changed nothing yet when that forward begins.
        """
        if not self.clock.open:
            self._waiting = optimizer, parameters
            return
        if "hyperparameters" in self.demand.of_state:
            place = self.optimizers.place_of(optimizer) or 0
            for number, group in enumerate(optimizer.param_groups):
                found = hyperparameters(group)
                vector = torch.tensor(list(found.values()), dtype=torch.float64, device="cpu")
                self._publish_numbers(vector, list(found), f"{place}.{number}")
        if not ("optimizer_state" in self.demand.of_state or "keyframe" in self.demand.of_state or self.whole_at):
            return
        step = self.clock.step
        if step not in self.whole_at and self.demand.dues.kinds(step).isdisjoint(("optimizer_state", "keyframe")):
            return
        trained = set(map(id, walking.trained(optimizer))) - self._stepped
        for parameter in parameters:
            tensor = parameter.tensor
            if tensor is None or id(tensor) not in trained:
                continue
            self._stepped.add(id(tensor))
            if self.demand.wanted("optimizer_state", parameter.path, DEFAULT_TAG):
                for name, value in flat(optimizer.state.get(tensor, {})):
                    self.publisher.publish(
                        "optimizer_state", parameter.path, value, DEFAULT_TAG, leaf=name, call=0, owned=False
                    )

    def _publish_numbers(self, vector: Tensor, names: list[str], leaf: str, call: int | None = None) -> None:
        """Publish hyperparameters with their names, if they are wanted."""
        at = self.clock.now()
        if self.demand.wanted("hyperparameters", None, DEFAULT_TAG, at):
            number = self.numbers.message(StreamKey("hyperparameters", None, DEFAULT_TAG, leaf), call)
            step, train_step, epoch, _ = at
            about = step, train_step, epoch, DEFAULT_TAG, number, leaf, self.publisher.rank
            self.bus.publish(checked("hyperparameters", None, *about, vector, {"entries": names}))

    def scaled(self, scaler: GradScaler) -> None:
        """Publish the state of a GradScaler that multiplies the first loss of the step."""
        if "hyperparameters" in self.demand.of_state and not self._scaled:
            vector = scale_of(scaler)
            if vector is not None:
                self._scaled = True
                self._publish_numbers(vector, [*SCALE], SCALER, call=0)

    def left_out(self) -> list[Optimizer]:
        """The optimizers that have not stepped in the open step, if the whole state is wanted."""
        at = self.clock.began
        if not (self._is_keyframe(at) or at.global_step in self.whole_at):
            return []
        left = {id(one.tensor) for one in self.table.all} - self._stepped
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
        if not self._forwards:
            return "no training forward of the model was seen in its step, so it has no buffers and generators"
        for optimizer in self.optimizers.all:
            unseen = [
                one for one in walking.trained(optimizer) if id(one) not in self._stepped and one.grad is not None
            ]
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
                if id(parameter.tensor) in self._stepped:
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

    def forget(self) -> None:
        """Reset for the next step."""
        self._forwards, self._scaled, self._waiting = 0, False, None
        if self._stepped:
            self._stepped = set()
