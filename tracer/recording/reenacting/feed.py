"""Feeds a script with a recorded run: a keyframe's state, then each step's data; notes what the script has changed."""

from __future__ import annotations

import contextlib
import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, final

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracer import walking
from tracer.errors import CaptureError
from tracer.format.placement import local
from tracer.observing.exporter import Exporter
from tracer.observing.guesses.batches import Pulls
from tracer.observing.pytorch import generators
from tracer.observing.pytorch.hooks import before_any_step
from tracer.observing.pytorch.loaders import LOADERS
from tracer.observing.pytorch.optimizer_states import (
    SCALE,
    hyperparameters,
    put_state,
    scale_of,
    set_hyperparameters,
    set_scale,
)
from tracer.observing.pytorch.patches import output_and_labels
from tracer.observing.pytorch.structure import unwrap
from tracer.observing.pytorch.tensors import arguments_of, leaves
from tracer.observing.reductions import hash_of
from tracer.observing.state import LEFT, SCALER
from tracer.recording.launching.session import replaced
from tracer.recording.reenacting.recorded import BatchOf, Keyframe, Recorded, RecordedStep, TensorPlace


@final
class ScriptChanges:
    """Compares what a script brings with what the run had, as far as the two are of the same step of the training.

    A script that is run again begins with its own first step, and then gets the recorded steps. So its hyperparameters
    are compared until recorded ones have replaced them; if the recorded steps are the run's first, at every step.

    Parameters
    ----------
    recorded : Recorded
    start : int
        The global step that the script's first step counts as.

    Attributes
    ----------
    told : list of str
        A sentence for each change; a change is told once.
    """

    def __init__(self, recorded: Recorded, start: int) -> None:
        self.told: list[str] = []
        self._recorded = recorded
        self._start = start
        # a script that resumes a training does not begin with the first step of the run
        self._begins_alike = len(recorded.trace.attempts) <= 1
        self._replaced: set[str] = set()  # places whose hyperparameters were replaced
        self._known: set[str] = set()
        self._of_step: tuple[int, dict[str, dict[str, float]]] = -1, {}  # a step, and its recorded hyperparameters

    def threads(self) -> None:
        """Compare the number of threads that PyTorch computes with."""
        was, now = self._recorded.trace.header.get("threads"), torch.get_num_threads()
        if isinstance(was, int) and was != now:
            self._tell("threads", f"PyTorch computes with {now} threads, and did with {was} in the run")

    def optimizer(self, optimizer: Optimizer, place: int, step: int, *, fed: bool) -> None:
        """Compare the hyperparameters of an optimizer that is about to take a global step; `fed`: a recorded one."""
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            of_group = f" of group {number}" if len(groups) > 1 else ""
            name = f"{type(optimizer).__name__}'s "
            self._numbers(f"{place}.{number}", hyperparameters(group), f"{name}{{}}{of_group}", step, fed=fed)

    def scaler(self, numbers: Sequence[float], step: int) -> None:
        """Compare the state of a GradScaler that is about to scale its first loss of a global step."""
        # the script's second step may have another scale, because its first had other data than the run's
        self._numbers(SCALER, dict(zip(SCALE, numbers, strict=True)), "GradScaler's {}", step, fed=True)

    def _numbers(self, place: str, now: dict[str, float], called: str, step: int, *, fed: bool) -> None:
        if self._begins_alike and (not self._start or place not in self._replaced):
            own = step - self._start
            if own != self._of_step[0]:
                self._of_step = own, self._recorded.hyperparameters(own)
            was = self._of_step[1].get(place, {})
            for name in {**was, **now} if was else ():
                said = f"{called.format(name)} is {{}} in step {own:,} of the script"
                self._number(place, name, now.get(name), was.get(name), said)
        if fed:
            self._replaced.add(place)

    def _number(self, place: str, name: str, now: float | None, was: float | None, said: str) -> None:
        if now == was or (now is not None and was is not None and math.isnan(now) and math.isnan(was)):
            return
        value, recorded = ("not set" if one is None else repr(one) for one in (now, was))
        put_back = "; the recorded value took its place" if was is not None else ""
        key = f"{place}.{name.removeprefix('initial_')}"
        self._tell(key, f"{said.format(value)}, and was {recorded} in the run{put_back}")

    def data(self, what: str, leaf: str, own: Tensor, given: Tensor, step: int) -> None:
        """Compare inputs or labels of the script with the recorded ones of the same datapoints."""
        if not alike(own, given):
            self._tell(
                f"{what}.{leaf}",
                f"{what}{f' {leaf}' if leaf else ''} of the datapoints of step {step:,} are others in the script, "
                "because its data has changed or is drawn at random; the recorded ones took their place",
            )

    def _tell(self, key: str, sentence: str) -> None:
        if key not in self._known:
            self._known.add(key)
            self.told.append(sentence)


def alike(one: Tensor, other: Any) -> bool:
    """Whether two tensors are equal to the bit, in dtype, shape and numbers."""
    return isinstance(other, Tensor) and hash_of(one) == hash_of(other)


class Batches:
    """Chooses the datapoints of each batch that a training draws: those of the recorded forward it will be used in.

    That forward follows from the step, the step's forwards so far, and the number of batches that were drawn and not
    yet used. The script's own batches are kept in eval mode, without gradients, under a tag, and if the data set is too
    small to have the recorded datapoints.

    Parameters
    ----------
    recorded : sequence of BatchOf
        The sample ids of the recorded forwards, in order.
    exporter : Exporter
    """

    def __init__(self, recorded: Sequence[BatchOf], exporter: Exporter) -> None:
        self.gate = exporter.parts.gate
        self._recorded = recorded
        self._exporter = exporter
        self._steps = [one.step for one in recorded]
        self._places = {(one.step, one.model, one.call): place for place, one in enumerate(recorded)}
        self._pulls = Pulls()
        self._next = 0  # the place of the next forward

    # -- what DataLoaders ask and tell ------------------------------------------------------------------------

    def chosen(self, iterator: Any) -> Sequence[int] | None:
        """The datapoints of the next batch; None: the script's own."""
        if not self._is_training:
            return None
        batch = next(islice(self._coming(), len(self._pulls.waiting), None), None)
        return None if batch is None or not _can_have(iterator._dataset, batch.ids) else batch.ids

    def pulled(self, iterator: object, ids: Sequence[int], batch: Any) -> None:
        """Note a batch that was drawn."""
        if self._is_training:
            self._pulls.add(iterator, ids, batch, self._exporter.parts.forwards.seen)

    @property
    def _is_training(self) -> bool:
        passes, models = self._exporter.parts.passes, self._exporter.parts.models
        return is_grad_enabled() and any(passes.is_training(top) for _, top in models.tops)

    def _coming(self) -> Iterator[BatchOf]:
        """The batches of the next forwards; a batch that consecutive forwards share comes once."""
        place = max(self._next, bisect_left(self._steps, self._exporter.parts.clock.step))
        before: Sequence[int] | None = None
        for one in self._recorded[place:]:
            if one.ids != before:
                yield one
            before = one.ids

    # -- what the model is given ------------------------------------------------------------------------------

    def forward_begins(self, name: str, call: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note a training forward of a model: `call` is its number in the step.

        Returns whether it uses a batch of the datapoints that the recorded forward used.
        """
        place = self._places.get((self._exporter.parts.clock.step, name, call))
        forwards = None if name else self._exporter.parts.forwards.seen
        pulled = self._pulls.of_forward(arguments_of(args, kwargs), forwards)
        if place is None:
            return False
        if pulled is None:
            self._pulls.use_first()
        self._next = place + 1
        return pulled is not None and list(pulled.ids) == self._recorded[place].ids


def _can_have(dataset: Any, ids: Sequence[int]) -> bool:
    """Whether a data set is large enough to have the datapoints `ids`."""
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return True
    return all(-count <= one < count for one in ids)


class Ended(SystemExit):
    """Ends a script that is run again, because the requested steps are done or cannot be run."""


class Feed:
    """Lets a training that an exporter observes repeat steps of a recorded run.

    The script first takes a step of its own, which is not recorded, so that code between this step and the next
    forward draws from the generators as in the run. Then the model gets the state of the keyframe. The tensors that the
    script gives its model and its losses keep their identity and get the recorded numbers. If the run has sample ids,
    the script's DataLoaders give these datapoints from the first step on.

    Parameters
    ----------
    recorded : Recorded
    keyframe : Keyframe
        The state to begin with.
    wanted : int
        The step after the last that is wanted. Steps from this one on are run only to compare them, so if the script
        cannot be fed with such a step, it is ended, and nothing is refused.
    stop : int
        The step after the last that is run.
    exporter : Exporter
    own_steps : int
        Unfed steps that the training takes first; at most as many as the run had before the keyframe.

    Attributes
    ----------
    over : bool
        Whether the script is to be ended before it continues the training.
    refusal : CaptureError or None
        Why the script was ended, if it could not be fed.
    changes : ScriptChanges
        What the script has otherwise than the run.
    """

    def __init__(
        self, recorded: Recorded, keyframe: Keyframe, wanted: int, stop: int, exporter: Exporter, *, own_steps: int
    ) -> None:
        self._recorded = recorded
        self._keyframe = keyframe
        self._wanted = wanted
        self._stop = stop
        self._batches: Batches | None = None
        self._exporter = exporter
        self._restored = False
        self._counts = StepCounts()
        self._ahead = False  # whether the inputs of the next forward are already fed
        self.over = False
        self.refusal: CaptureError | None = None
        self._first = max(0, keyframe.at.global_step - own_steps)
        self.changes = ScriptChanges(recorded, self._first)
        self._same = False  # whether the last forward had the datapoints of the recorded forward

    @contextlib.contextmanager
    def feeding(self) -> Iterator[None]:
        """Feed the training inside this context."""
        parts = self._exporter.parts
        self._exporter.start_at(self._first, 0, 0)
        samples = self._recorded.samples(self._first, self._stop)
        if samples:
            self._batches = Batches(samples, self._exporter)
            LOADERS.watch(self._batches)
        parts.steps.state.whole_at = frozenset(self._recorded.keyframes())
        parts.passes.in_eval_mode_at = self._recorded.in_eval_mode(self._first, self._stop + 1)
        parts.passes.fed = functools.partial(self._guarded, self._inputs)
        parts.losses.fed = functools.partial(self._guarded, self._labels)
        steps = before_any_step(functools.partial(self._guarded, self._optimizer_steps))
        # global hooks are called after an optimizer's own hooks, and so after the exporter's, which ends the step
        stepped = register_optimizer_step_post_hook(functools.partial(self._guarded, self._optimizer_stepped))
        scaling = replaced(GradScaler, "scale", self._scaling(GradScaler.scale))
        try:
            with feeding_compiled(self._compiled_called), scaling:
                yield
        finally:
            parts.passes.fed = parts.losses.fed = None
            parts.steps.state.whole_at = parts.passes.in_eval_mode_at = ()
            if self._batches is not None:
                LOADERS.unwatch(self._batches)
            steps.remove()
            stepped.remove()

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Call `work`, which feeds the script; if it fails, end the script."""
        if is_dynamo_compiling():
            return
        try:
            work(*args)
        except CaptureError as error:
            if self._counts.step < self._wanted:
                self.refusal = error
            self.over = True
            raise Ended(0) from error

    def _is_fed(self) -> bool:
        """Whether the open or next step is fed. Before the first fed step, the keyframe's state is restored."""
        clock = self._exporter.parts.clock
        if self.over:
            raise Ended(0)
        if clock.step < self._keyframe.at.global_step:
            return False
        if not self._restored:
            self._restored = True
            restore(self._keyframe, self._exporter)
            self.changes.threads()
        step = clock.began.global_step if clock.open else clock.step
        if step != self._counts.step:
            self._counts = StepCounts(step)
        at = self._now.at
        if at is not None and not clock.open:
            self._exporter.parts.steps.go_on_in_epoch(at.train_step, at.epoch)
        return True

    @property
    def _now(self) -> RecordedStep:
        """The recording of the step that is fed."""
        return self._recorded.step(self._counts.step)

    # -- what is fed ------------------------------------------------------------------------------------------

    def _inputs(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Give a training forward its recorded generators and inputs."""
        ahead, self._ahead = self._ahead, False
        if ahead:
            return
        fed = self._is_fed()
        call, own_call = self._counts.forward(name) if fed else (0, 0)
        chosen = self._batches is not None and self._batches.forward_begins(name, own_call, args, kwargs)
        if not fed:
            return
        step, found = self._counts.step, self._now
        states = {leaf: state for leaf, state in found.generators.get(call, {}).items() if not leaf.endswith(LEFT)}
        if not states:
            raise CaptureError(
                f"the random generators of forward {call} of step {step:,} were not recorded, so it cannot be run again"
            )
        for leaf, state in states.items():
            generators.restore(leaf, state)
        arguments = arguments_of(args, kwargs)
        there = [(leaf, one) for leaf, one in leaves({name: arguments} if name else arguments) if not one.requires_grad]
        given = found.inputs.get(own_call, {})
        if found.samples:  # other inputs come from the data set or from the script; their hashes are compared
            there = [
                (leaf, one)
                for leaf, one in there
                if leaf in given or TensorPlace("input_data", None, leaf, own_call) not in found.hashes
            ]
        if there and not given:
            part = " (only a part of each was)" if "input_data" in found.in_part else ""
            raise CaptureError(
                f"what the model was given in forward {own_call} of step {step:,} was not recorded{part}, so the step "
                "cannot be run again; a capture of input_data, or of sample_ids, at every step keeps it"
            )
        self._same = chosen or (bool(there) and all(alike(one, given.get(leaf)) for leaf, one in there))
        for leaf, tensor in there:
            if chosen and leaf in given:
                self.changes.data("inputs", leaf, tensor, given[leaf], step)
            _give(f"input {leaf or 'of the model'}", tensor, given.get(leaf), step)

    def _compiled_called(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Feed a compiled model before its graph begins, where hooks cannot feed it."""
        parts = self._exporter.parts
        name = next((name for name, top in parts.models.tops if top is unwrap(module)), None)
        if name is not None and not parts.passes.now.depth and parts.passes.is_training(unwrap(module)):
            self._guarded(self._inputs, name, args, kwargs)
            self._ahead = True

    def _labels(self, loss: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Give a loss of the training its labels."""
        output, labels = output_and_labels(loss, args, kwargs)
        if output is None or not output.requires_grad or labels is None or labels.requires_grad:
            return
        if self._restored and self._is_fed():
            given = self._now.labels.get(self._counts.loss(), {})
            for leaf, tensor in leaves(labels):
                if leaf in given:  # other labels are inputs, too, or show as a difference if they matter
                    if self._same:
                        self.changes.data("labels", leaf, tensor, given[leaf], self._counts.step)
                    _give("labels of a loss", tensor, given[leaf], self._counts.step)

    def _optimizer_steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Give an optimizer that is about to step its recorded hyperparameters."""
        place = self._exporter.parts.optimizers.place_of(optimizer)
        if place is None:
            return
        fed = self._is_fed()  # here, too: an optimizer with a closure steps before the first forward
        clock = self._exporter.parts.clock
        step = clock.began.global_step if clock.open else clock.step
        self.changes.optimizer(optimizer, place, step, fed=fed)
        if fed:
            for number, group in enumerate(optimizer.param_groups):
                set_hyperparameters(group, self._now.hyperparameters.get(f"{place}.{number}", {}))

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before the first fed step, restore the generators as the recorded step before it left them."""
        clock = self._exporter.parts.clock
        if not clock.open and self._is_fed() and self._counts.step == self._keyframe.at.global_step:
            states = self._now.generators.get(0, {})
            for name, state in states.items():
                if not name.endswith(LEFT):
                    generators.restore(name, states.get(f"{name}{LEFT}", state))

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled():
                self._guarded(self._scale, scaler)
            return original(scaler, outputs)

        return scale

    def _scale(self, scaler: GradScaler) -> None:
        """Give a GradScaler its recorded state at its first loss in a step."""
        now, clock = scale_of(scaler), self._exporter.parts.clock
        step = clock.began.global_step if clock.open else clock.step
        fed = self._is_fed()
        if (fed and self._counts.scaled) or now is None:
            return
        self.changes.scaler(now.tolist(), step)
        if fed:
            self._counts.scaled = True
            numbers = self._now.hyperparameters.get(SCALER)
            if numbers is not None:
                set_scale(scaler, [numbers[name] for name in SCALE])


@contextlib.contextmanager
def feeding_compiled(feed: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]) -> Iterator[None]:
    """Call `feed` with each compiled module and its arguments before each call of the module."""
    compile_ = nn.Module.compile

    def fed(called: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_dynamo_compiling():
                feed(module, args, kwargs)
            return called(*args, **kwargs)

        return call

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fed(functools.partial(nn.Module.__call__, module), module)(*args, **kwargs)

    @functools.wraps(compile_)
    def compiled(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_(module, *args, **kwargs)
        vars(module)["_compiled_call_impl"] = fed(vars(module)["_compiled_call_impl"], module)

    with replaced(OptimizedModule, "__call__", call), replaced(nn.Module, "compile", compiled):
        yield


class StepCounts:
    """Counts the forwards and losses of a step so far."""

    def __init__(self, step: int = -1) -> None:
        self.step = step
        self.scaled = False
        self._forwards: dict[str, int] = {}
        self._losses = 0

    def forward(self, name: str) -> tuple[int, int]:
        """Count a forward of a model; returns its number in the step, and its number among this model's forwards."""
        call, own = sum(self._forwards.values()), self._forwards.get(name, 0)
        self._forwards[name] = own + 1
        return call, own

    def loss(self) -> int:
        """Count a call of a loss; returns its number in the step."""
        self._losses += 1
        return self._losses - 1


def _give(what: str, tensor: Tensor, given: Tensor | None, step: int) -> None:
    """Put recorded numbers into a tensor of the script, whose shape may differ."""
    if given is None:
        raise CaptureError(
            f"{what} in step {step:,} is not among what was recorded: the script gives another structure, or a model "
            "that the run did not train in that step; of models that are trained one after another, only steps of the "
            "keyframe's model can be run again"
        )
    if given.dtype is not tensor.dtype or given.ndim != tensor.ndim:
        raise CaptureError(
            f"{what} in step {step:,} is {_said(tensor)}, and was {_said(given)} when the run was recorded: another "
            "script, or other arguments"
        )
    new = _placed(given.to(tensor.device), tensor)
    for layout, axes in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if tensor.ndim == axes and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            new = new.contiguous(memory_format=layout)
    tensor.data = new


_ALIGNED: Final = 64
"""PyTorch's memory on the CPU begins at a multiple of this many bytes."""


def _placed(given: Tensor, tensor: Tensor) -> Tensor:
    """Copy `given` into memory with the alignment, modulo `_ALIGNED`, of the script's `tensor`.

    On some processors, products of small matrices depend on the alignment in their last bits.
    """
    apart = tensor.data_ptr() % _ALIGNED
    if not tensor.is_cpu or not apart or apart % given.itemsize:
        return given.clone(memory_format=torch.contiguous_format)
    memory = torch.empty(given.numel() + 2 * _ALIGNED, dtype=given.dtype)
    begin = (apart - memory.data_ptr()) % _ALIGNED // given.itemsize
    return memory[begin : begin + given.numel()].view(given.shape).copy_(given)


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


# -- the state of a keyframe --------------------------------------------------------------------------------------


def restore(keyframe: Keyframe, exporter: Exporter) -> None:
    """Put the state of a keyframe into the models and optimizers that an exporter observes.

    Raises
    ------
    CaptureError
        If the keyframe lacks a parameter or buffer of the model, or has it in another shape or dtype.
    """
    table = exporter.parts.table
    own = {(one.values, one.stream): one.tensor for one in table.all if not one.computed}
    _copy("parameter", keyframe.parameters, own, str(keyframe.at.global_step))
    _copy("buffer", keyframe.buffers, dict(table.buffers()), str(keyframe.at.global_step))
    for optimizer in exporter.parts.optimizers.all:
        _restore_states(keyframe, exporter, optimizer)


def _copy(what: str, given: Mapping[Any, Tensor], own: Mapping[Any, Tensor | None], step: str) -> None:
    with torch.no_grad():
        for name, tensor in own.items():
            path = name if isinstance(name, str) else f"{name[1]!r} ({name[0]})"
            if tensor is None:
                continue
            if name not in given:
                raise CaptureError(
                    f"the model has a {what} {path} that the keyframe of step {step} has not: another model"
                )
            target, source = local(tensor), given[name]
            if target.shape != source.shape or target.dtype is not source.dtype:
                raise CaptureError(
                    f"the {what} {path} of the model is {_said(target)}, and that of the keyframe {_said(source)}: "
                    "another model"
                )
            target.detach().copy_(source)


def _restore_states(keyframe: Keyframe, exporter: Exporter, optimizer: Optimizer) -> None:
    trained = {id(one) for one in walking.trained(optimizer)}
    for parameter in exporter.parts.table.all:
        tensor = parameter.tensor
        if tensor is not None and id(tensor) in trained:
            put_state(optimizer, tensor, keyframe.optimizer_state.get(parameter.path, {}))
