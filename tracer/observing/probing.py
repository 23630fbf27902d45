"""Passes of probes: run between steps, and put together from their batches."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tracer import walking
from tracer.errors import CaptureError
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG
from tracer.observing.clock import Clock
from tracer.observing.demand import Demand
from tracer.observing.models import Models
from tracer.observing.numbers import Numbers
from tracer.observing.passes import Passes
from tracer.observing.probes import NO_PROBES, FirstInputs, Probe, joinable, undisturbed
from tracer.observing.publisher import Publisher
from tracer.observing.pytorch.autograd import with_subclasses
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.tensors import leaves


@dataclass(eq=False, repr=False)
class Probes:
    """Runs the model on fixed inputs."""

    gate: Gate
    clock: Clock
    demand: Demand
    publisher: Publisher
    numbers: Numbers
    models: Models
    passes: Passes

    def __post_init__(self) -> None:
        self._all: list[Probe] = []

    def add(self, name: str, inputs: Any, labels: Any, every: int, batch_size: int | None) -> None:
        """Run the model on these inputs now, and from now on."""
        root = self.models.root
        if root is None:
            raise CaptureError("a probe needs the model: call set_model first")
        if self.models.is_sharded:
            raise CaptureError(NO_PROBES)
        buffers = (buffer for _, buffer in walking.named_buffers(root))
        if any(map(is_lazy, itertools.chain(walking.parameters(root), buffers))):
            raise CaptureError(
                f"probe {name!r} would make the parameters of a lazy model, and with other random numbers than the "
                "training would: run the model once before"
            )
        if not isinstance(name, str) or name in ("", DEFAULT_TAG, EVAL_TAG) or any(p.name == name for p in self._all):
            raise CaptureError(f"a probe's name is a tag of its own, not {name!r}")
        for what, number in (("every", every), ("batch_size", batch_size)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise CaptureError(f"{what} of probe {name!r} is a positive integer, not {number!r}")
        if labels is not None and not isinstance(labels, Tensor):
            labels = torch.as_tensor(labels, device="cpu")
        probe = Probe(name, inputs, labels, every, batch_size)
        self._run(probe)  # a probe that cannot run is the caller's error, now, not a problem of the training
        self._all.append(probe)

    def add_first(self, name: str, count: int, every: int) -> None:
        """Run the model on the first inputs that it is given."""
        probe = FirstInputs(name, count, every)
        self._all.append(probe)
        self.passes.offered = probe

    def run_due(self) -> None:
        """Run those that come between the step that has ended and the next one."""
        for probe in self._all:
            if self.clock.step % probe.every == 0:
                self.gate.guard(f"probe {probe.name}", functools.partial(self._run, probe))

    def finish(self) -> None:
        """Run all for the last time, and say which never could."""
        for probe in self._all:
            if probe.last != self.clock.step:
                self.gate.guard(f"probe {probe.name}", functools.partial(self._run, probe))
            if isinstance(probe, FirstInputs) and not probe.settled:
                alone = self.models.root is not None
                why = probe.refusal if alone else "there is not one model, but none or several"
                self.gate.problems.note(f"probe {probe.name!r}", why)

    def _run(self, probe: Probe) -> None:
        root = self.models.root
        probe.last = self.clock.step
        if root is None or not probe.ready(root):  # that was checked of others than the first inputs
            return
        if not self.gate.open or not self.demand.hears(probe.name):
            return
        if self.models.is_sharded:
            self.gate.problems.note(f"probe {probe.name!r}", NO_PROBES)
            return
        running, passes = self.gate.passes.now, self.passes
        collected: dict[tuple[str, str | None, int, str], list[Tensor]] = {}
        sizes: list[int] = []
        before = (running.tag, passes.user_tag, running.listening, running.depth, running.inputs)
        try:
            passes.user_tag, running.depth, running.inputs = probe.name, 0, []
            self.publisher.collecting = collected
            with undisturbed(root), with_subclasses():
                for batch in probe.batches():
                    sizes += [next((tensor.shape[0] for _, tensor in leaves(batch) if tensor.ndim), 1)]
                    self.numbers.forget(probe.name)
                    probe.call(root, batch)
        finally:
            running.tag, passes.user_tag, running.listening, running.depth, running.inputs = before
            self.publisher.collecting = None
        self._publish(probe, collected, sizes)
        self.numbers.forget(probe.name)

    def _publish(
        self, probe: Probe, collected: dict[tuple[str, str | None, int, str], list[Tensor]], sizes: list[int]
    ) -> None:
        """Publish what batches of these sizes gave, put together, and the labels."""
        for (kind, path, call, leaf), parts in collected.items():
            if not joinable(parts, sizes):
                what = f"{kind} of {path!r} in probe {probe.name!r}"
                why = "its first axis is not the datapoints, so batches cannot be put together again"
                self.gate.problems.note(what, why)
                continue
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            module = self.demand.modules.get(path) if path is not None else None
            self.publisher.publish(kind, path, whole, probe.name, leaf, call, module=module)
        if probe.labels is not None:
            outputs = {leaf for kind, _, _, leaf in collected if kind == "network_output"}
            # labels join the output whose leaf they have
            leaf = outputs.pop() if len(outputs) == 1 else ""
            self.publisher.publish("input_labels", None, probe.labels.clone(), probe.name, leaf, 0)
