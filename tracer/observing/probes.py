"""Probes: fixed inputs on which a model is run between steps, so that its activations can be compared over time."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from time import thread_time
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tracer import walking
from tracer.errors import CaptureError
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG
from tracer.observing.clock import StreamKey
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.passes import Passes
from tracer.observing.publisher import PROBED
from tracer.observing.pytorch.autograd import with_subclasses
from tracer.observing.pytorch.gate import Pass
from tracer.observing.pytorch.tensors import leaves, unobservable
from tracer.observing.state import undisturbed

PROBE: Final = "probe"
"""The tag of the passes of a `ProbePlan`; metrics of representations listen to it."""
NO_PROBES = (
    "the model's parameters are distributed, so a pass of one rank waits for all others; evaluate it yourself, on all "
    "ranks, within `run.tag(name)`"
)
"""The reason why sharded models are not probed."""

_GRAPH: Final = 16 << 20
"""The largest number of bytes of a call that is kept whole because it cannot be cut."""


class ProbePlan(NamedTuple):
    """How `Exporter.probe_first` probes the first datapoints that the model is called with.

    Attributes
    ----------
    datapoints : int
        The largest number; 0 means no probe.
    every : int
        Steps between two passes.
    calls : int or None
        The largest number of calls that they are taken from; None: as many as needed.
    """

    datapoints: int
    every: int = 100
    calls: int | None = None

    def __bool__(self) -> bool:
        return self.datapoints > 0


@dataclasses.dataclass
class Arguments:
    """The arguments of a call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> Arguments:
        """From inputs: a mapping has keyword arguments, a tuple positional arguments; anything else is one argument."""
        if isinstance(inputs, Mapping):
            return cls((), dict(inputs))
        return cls(tuple(inputs) if isinstance(inputs, tuple) else (inputs,), {})


class Probe:
    """Fixed inputs of a model, and the steps after which it is run on them; see `Exporter.probe`."""

    def __init__(
        self, name: str, inputs: Arguments | None, labels: Tensor | None, every: int, batch_size: int | None
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.labels = labels
        self.every = every
        self.batch_size = batch_size
        self.last: int | None = None

    def batches(self) -> Iterator[Arguments]:
        """Copies of the inputs, in batches of at most `batch_size` datapoints. The model may overwrite them."""
        tensors = [tensor for _, tensor in leaves(self.inputs) if tensor.ndim]
        if self.batch_size is None or not tensors:
            yield map_tensors(self.inputs, Tensor.clone)
            return
        for begin in range(0, tensors[0].shape[0], self.batch_size):
            part = slice(begin, begin + self.batch_size)
            yield map_tensors(self.inputs, functools.partial(rows_of, part))

    def due(self, step: int) -> bool:
        """Whether a pass is due after `step` steps."""
        return step % self.every == 0

    def ready(self, model: nn.Module) -> bool:
        """Whether there are inputs for this model."""
        return True


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Classes of arguments that no forward can change."""


class FirstInputs(Probe):
    """A probe whose inputs are the first datapoints that the program calls the model with.

    Datapoints of evaluations before the first pass are preferred to those of the training; what a program gives the
    model before it trains may be a look at the model. A graph is not cut: with integers beside the datapoints, such as
    edges, which may refer to any of these, all datapoints of a call are taken.

    Parameters
    ----------
    name : str
        The tag.
    plan : ProbePlan
        Datapoints are rows along the first axis of the first tensor among the arguments.
    """

    def __init__(self, name: str, plan: ProbePlan) -> None:
        super().__init__(name, None, None, plan.every, None)
        self._plan = plan
        self.refusal = "the model was never called"
        """The reason why there are no inputs."""
        self._given: dict[bool, list[tuple[int, Arguments]]] = {}
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def settled(self) -> bool:
        """Whether the inputs are chosen. Then no more calls are kept."""
        return self.inputs is not None

    def offer(self, model: nn.Module, evaluation: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Keep copies of a call's arguments if they are still needed; returns whether the inputs are chosen."""
        if not self.settled:
            self._keep(model, evaluation, args, kwargs)
        return self.settled

    def _keep(self, model: nn.Module, evaluation: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._model is None or self._model() is not model:
            self._model, self._given = weakref.ref(model), {}
        kept = self._given.setdefault(evaluation, [])
        have = sum(size for size, _ in kept)
        if have >= self._plan.datapoints or len(kept) == self._plan.calls or (kept and kept[-1][0] == 0):
            return
        call = Arguments(tuple(args), dict(kwargs))
        tensors = [tensor for _, tensor in leaves(call)]
        size = next((one.shape[0] for one in tensors if one.ndim), 0)
        if not size or not _unchanging(call) or any(unobservable(one) for one in tensors):
            self.refusal = "the model is called with something else than tensors and plain values, or without tensors"
            return
        if kept and not _alike(kept[0], (size, call)):
            kept.append((0, call))  # marks that no more calls are kept
            return
        taken = min(size, self._plan.datapoints - have)
        if taken < size and any(_may_refer(one, size) for one in tensors):
            if kept or sum(one.nbytes for one in tensors) > _GRAPH:
                self.refusal = (
                    f"beside its {size:,} datapoints the model is given integers, such as the edges of a graph, which "
                    f"may refer to any of them, so no {self._plan.datapoints:,} can be cut out"
                )
                return
            taken = size
        part = slice(0, taken)

        def copy_of(tensor: Tensor) -> Tensor:
            whole = tensor.detach()
            return (whole[part] if _has_rows(whole, size) else whole).clone()

        kept.append((taken, map_tensors(call, copy_of)))

    def ready(self, model: nn.Module) -> bool:
        """Choose the inputs from the kept calls, unless they are chosen; whether there are inputs for this model."""
        if not self.settled and self._model is not None and self._model() is model:
            for evaluation in (True, False):
                kept = [one for one in self._given.get(evaluation, ()) if one[0]]
                if kept and not self.settled:
                    self.inputs = _joined(kept)
            self._given = {}
        return self.settled and self._model is not None and self._model() is model


def _may_refer(tensor: Tensor, size: int) -> bool:
    """Whether a tensor beside some datapoints may hold their numbers, as the edges of a graph do."""
    return not (_has_rows(tensor, size) or tensor.dtype.is_floating_point or tensor.dtype.is_complex) and bool(
        tensor.dtype is not torch.bool and tensor.numel() > 1
    )


def _has_rows(tensor: Tensor, size: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == size


def _unchanging(value: Any) -> bool:
    """Whether a value consists of tensors and values that no forward can change; a cache does not."""
    if value is None or isinstance(value, (Tensor, *_PLAIN)):
        return True
    if isinstance(value, Mapping):
        return all(_unchanging(part) for part in value.values())
    if isinstance(value, tuple | list):
        return all(_unchanging(part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_unchanging(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def _alike(first: tuple[int, Arguments], other: tuple[int, Arguments]) -> bool:
    """Whether two calls have tensors at the same paths, of equal dtypes and shapes apart from the number of rows."""
    one, another = leaves(first[1]), leaves(other[1])
    return [path for path, _ in one] == [path for path, _ in another] and all(
        a.dtype == b.dtype
        and _has_rows(a, first[0]) == _has_rows(b, other[0])
        and (a.shape[1:] == b.shape[1:] if _has_rows(a, first[0]) else a.shape == b.shape)
        for (_, a), (_, b) in zip(one, another, strict=True)
    )


def _joined(calls: Sequence[tuple[int, Arguments]]) -> Arguments:
    """One call with the rows of several calls."""
    size, first = calls[0]
    if len(calls) == 1:
        return first
    others = [iter([tensor for _, tensor in leaves(call)]) for _, call in calls[1:]]

    def joined(tensor: Tensor) -> Tensor:
        more = [next(one) for one in others]
        return torch.cat([tensor, *more]) if _has_rows(tensor, size) else tensor

    whole: Arguments = map_tensors(first, joined)
    return whole


def rows_of(part: slice, tensor: Tensor) -> Tensor:
    """A copy of some rows of a tensor; a scalar is copied whole."""
    return (tensor[part] if tensor.ndim else tensor).clone()


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a structure, in which a function has replaced each tensor that `leaves` finds."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        same: Any = copy.copy(value)  # an instance of a subclass may have attributes
        for key, part in value.items():
            same[key] = map_tensors(part, function)
        return same
    if isinstance(value, Mapping):
        return {key: map_tensors(part, function) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, function) for part in value]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(same, field.name, map_tensors(getattr(value, field.name), function))
        return same
    return value


def joinable(parts: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether tensors of batches of these sizes can be joined: all have the same number of rows per datapoint."""
    if len(sizes) == 1:
        return True
    return len(parts) == len(sizes) and all(
        part.ndim > 0 and part.shape[0] * sizes[0] == parts[0].shape[0] * size and part.shape[0] % size == 0
        for part, size in zip(parts, sizes, strict=True)
    )


class Collected:
    """The tensors of the running probe, of kinds in `PROBED`.

    Parameters
    ----------
    joins : bool
        Whether the inputs are split into batches, whose tensors are held until they are joined. Without batches,
        tensors are published at once, so that only what a capture keeps is held.

    Attributes
    ----------
    parts : dict of list of Tensor
        The held tensors by stream and call.
    outputs : set of str
        The leaves of the model's output.
    """

    def __init__(self, *, joins: bool) -> None:
        self.joins = joins
        self.parts: dict[tuple[StreamKey, int], list[Tensor]] = {}
        self.outputs: set[str] = set()

    def take(self, stream: StreamKey, call: int | None, source: Tensor, owned: bool) -> bool:
        """Hold a tensor if batches are joined; returns whether to withhold it for now. See `Collecting`."""
        if stream.kind not in PROBED:
            return True
        if stream.kind == "network_output":
            self.outputs.add(stream.leaf)
        if self.joins:
            held = source if owned else source.clone(memory_format=torch.contiguous_format)
            self.parts.setdefault((stream, call or 0), []).append(held)
        return self.joins


class Probes(ExporterPart):
    """Runs the model on fixed inputs.

    Attributes
    ----------
    seconds : float
        CPU time of the training thread spent on probes.
    """

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes
        self._all: list[Probe] = []
        self.seconds = 0.0

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
        # a probe of first inputs with the same name gives way
        known = [one for one in self._all if one.name != name or not isinstance(one, FirstInputs)]
        if not isinstance(name, str) or name in ("", DEFAULT_TAG, EVAL_TAG) or any(p.name == name for p in known):
            raise CaptureError(f"a probe's name is a tag of its own, not {name!r}")
        for what, number in (("every", every), ("batch_size", batch_size)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise CaptureError(f"{what} of probe {name!r} is a positive integer, not {number!r}")
        if labels is not None and not isinstance(labels, Tensor):
            labels = torch.as_tensor(labels, device="cpu")
        probe = Probe(name, Arguments.of(inputs), labels, every, batch_size)
        self.demand.leave_times(name)
        self._run(probe)  # now, so that the caller gets the error of a probe that cannot run
        if len(known) < len(self._all):
            self.passes.offered = None
        self._keep([*known, probe])

    def add_first(self, name: str, plan: ProbePlan) -> None:
        """Run the model on the first inputs that the program calls it with."""
        probe = FirstInputs(name, plan)
        self._keep([*self._all, probe])
        self.demand.leave_times(name)
        self.passes.offered = probe.offer

    def _keep(self, probes: list[Probe]) -> None:
        if not self._all:
            self.passes.steps.between.call(self.run_due, each_step=True)
        self._all = probes

    def run_due(self) -> None:
        """Run the probes that are due after the last step."""
        for probe in self._all:
            if probe.due(self.clock.step):
                self.gate.guard(f"probe {probe.name}", functools.partial(self._run, probe))

    def run(self, name: str) -> None:
        """Run a probe now, and raise its errors."""
        for probe in self._all:
            if probe.name == name:
                self._run(probe)

    def finish(self) -> None:
        """Run all probes for the last time, and note those that never had inputs."""
        for probe in self._all:
            if probe.last != self.clock.step:
                self.gate.guard(f"probe {probe.name}", functools.partial(self._run, probe))
            if isinstance(probe, FirstInputs) and not probe.settled:
                alone = self.models.root is not None
                why = probe.refusal if alone else "there is not one model, but none or several"
                self.problems.note(f"probe {probe.name!r}", why)

    def _run(self, probe: Probe) -> None:
        root = self.models.root
        probe.last = self.clock.step
        if root is None or not probe.ready(root):  # only a probe of first inputs may not be ready
            return
        if not self.gate.open or not self.demand.hears(probe.name):
            return
        if self.models.is_sharded:
            self.problems.note(f"probe {probe.name!r}", NO_PROBES)
            return
        passes = self.passes
        collected = Collected(joins=probe.batch_size is not None)
        sizes: list[int] = []
        before = self.gate.passes.now, passes.user_tag
        begin = thread_time()
        seen = passes.forwards.seen  # restored after the pass: batches are matched to the program's forwards only
        try:
            self.gate.passes.now, passes.user_tag = Pass(), probe.name
            self.publisher.collecting = collected.take
            with undisturbed(root), with_subclasses():
                for batch in probe.batches():
                    sizes += [next((tensor.shape[0] for _, tensor in leaves(batch) if tensor.ndim), 1)]
                    self.numbers.forget(probe.name)
                    root(*batch.args, **batch.kwargs)
        finally:
            self.gate.passes.now, passes.user_tag = before
            self.publisher.collecting = None
            passes.forwards.seen = seen
            self.seconds += thread_time() - begin
        self._publish(probe, collected, sizes)
        self.numbers.forget(probe.name)

    def _publish(self, probe: Probe, collected: Collected, sizes: list[int]) -> None:
        """Publish the joined tensors of batches of these sizes, and the labels."""
        for ((kind, path, _, leaf), call), parts in collected.parts.items():
            if not joinable(parts, sizes):
                what = f"{kind} of {path!r} in probe {probe.name!r}"
                why = "its first axis is not the datapoints, so batches cannot be put together again"
                self.problems.note(what, why)
                continue
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            self.publisher.publish(kind, path, whole, probe.name, leaf, call)
        if probe.labels is not None:
            # labels get the output's leaf, to be joined with it
            leaf = next(iter(collected.outputs)) if len(collected.outputs) == 1 else ""
            self.publisher.publish("input_labels", None, probe.labels.clone(), probe.name, leaf, 0)
