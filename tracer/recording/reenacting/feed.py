"""Gives a script what a recorded run had: the state of a keyframe, then in each step its inputs, labels and numbers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracer import walking
from tracer.errors import CaptureError
from tracer.format.placement import local
from tracer.observing.exporter import Exporter
from tracer.observing.pytorch import generators
from tracer.observing.pytorch.hanging import before_any_step
from tracer.observing.pytorch.leaves import arguments_of
from tracer.observing.pytorch.loss_functions import output_and_labels
from tracer.observing.pytorch.optimizer_states import SCALE, put_state, set_hyperparameters, set_scale
from tracer.observing.pytorch.tensors import leaves
from tracer.observing.state import SCALER
from tracer.recording.reenacting.recorded import Keyframe, Recorded


class Ended(SystemExit):
    """Ends a script that is run again, because what was asked for is there, or cannot be had."""


class Feed:
    """Lets a training that an exporter observes go through steps of a recorded run.

    The tensors that the script gives its model and its losses keep their identity and get the recorded numbers.

    Parameters
    ----------
    recorded : Recorded
    keyframe : Keyframe
        Where it begins.
    exporter : Exporter

    Attributes
    ----------
    over : bool
        Whether the script is to be ended before it goes on with the training.
    refusal : CaptureError or None
        Why the script was ended, if it could not be fed.
    """

    def __init__(self, recorded: Recorded, keyframe: Keyframe, exporter: Exporter) -> None:
        self._recorded = recorded
        self._keyframe = keyframe
        self._exporter = exporter
        self._restored = False
        self._step = -1  # the step that the counts below are of
        self._forwards = self._losses = 0
        self._scaled_at = -1  # the last step whose GradScaler has got its state
        self._given: set[int] = set()  # ids of the optimizers that have the states of the keyframe
        self.over = False
        self.refusal: CaptureError | None = None

    @contextlib.contextmanager
    def feeding(self) -> Iterator[None]:
        """Feed the training meanwhile."""
        parts, scale = self._exporter.parts, GradScaler.scale
        self._exporter.start_at(*self._keyframe.at)
        parts.passes.fed = functools.partial(self._guarded, self._inputs)
        parts.losses.fed = functools.partial(self._guarded, self._labels)
        steps = before_any_step(functools.partial(self._guarded, self._optimizer_steps))
        # called after the hooks of an optimizer's own, among which the exporter's ends the step
        stepped = register_optimizer_step_post_hook(self._optimizer_stepped)
        setattr(GradScaler, "scale", self._scaling(scale))  # noqa: B010 - mypy forbids to assign it
        try:
            yield
        finally:
            parts.passes.fed = parts.losses.fed = None
            steps.remove()
            stepped.remove()
            setattr(GradScaler, "scale", scale)  # noqa: B010

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Do what feeds the script; end the script where that cannot be done."""
        if is_dynamo_compiling():
            return
        try:
            work(*args)
        except CaptureError as error:
            self.refusal = error
            raise Ended(0) from error

    def _begin(self) -> int:
        """The step that something is fed to; begins its counts."""
        clock = self._exporter.parts.clock
        step = clock.began.global_step if clock.open else clock.step
        if step != self._step:
            self._step, self._forwards, self._losses = step, 0, 0
            at = self._recorded.step(step).at
            if at is not None and not clock.open:
                self._exporter.parts.steps.go_on_in_epoch(at.train_step, at.epoch)
        return step

    def _restore(self) -> None:
        """Give the model the state of the keyframe, if it has not got it yet."""
        if not self._restored:
            self._restored = True
            restore(self._keyframe, self._exporter)

    # -- what is fed ------------------------------------------------------------------------------------------

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Give a training forward the state of the keyframe, if it is the first, its generators, and its inputs."""
        self._end_if_over()
        self._restore()
        step = self._begin()
        found, call = self._recorded.step(step), self._forwards
        self._forwards += 1
        for name, state in found.generators.get(call, {}).items():
            generators.restore(name, state)
        if not found.generators.get(call):
            raise CaptureError(
                f"the random generators of forward {call} of step {step:,} were not recorded, so it cannot be run again"
            )
        there = [(leaf, one) for leaf, one in leaves(arguments_of(args, kwargs)) if not one.requires_grad]
        given = found.inputs.get(call)
        if there and given is None:
            part = " (only a part of each was)" if "input_data" in found.in_part else ""
            raise CaptureError(
                f"what the model was given in forward {call} of step {step:,} was not recorded{part}, so the step "
                "cannot be run again; a capture of input_data at every step keeps it"
            )
        for leaf, tensor in there:
            _give(f"input {leaf or 'of the model'}", tensor, (given or {}).get(leaf), step)

    def _labels(self, loss: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Give a loss of the training its labels."""
        output, labels = output_and_labels(loss, args, kwargs)
        if not self._restored or output is None or not output.requires_grad or labels is None or labels.requires_grad:
            return
        step = self._begin()
        found, call = self._recorded.step(step), self._losses
        self._losses += 1
        if call in found.labels:  # else they are among the inputs, or differ if they matter
            for leaf, tensor in leaves(labels):
                _give("labels of a loss", tensor, found.labels[call].get(leaf), step)

    def _optimizer_steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Give an optimizer that steps its hyperparameters, and at first its states."""
        every = self._exporter.parts.optimizers.all
        place = next((number for number, one in enumerate(every) if one is optimizer), None)
        if place is None:
            return
        self._restore()  # an optimizer with a closure steps before the first forward
        if id(optimizer) not in self._given:
            self._given.add(id(optimizer))
            _restore_states(self._keyframe, self._exporter, optimizer)
        found = self._recorded.step(self._begin())
        for number, group in enumerate(optimizer.param_groups):
            set_hyperparameters(group, found.hyperparameters.get(f"{place}.{number}", {}))

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self.over:
            raise Ended(0)

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: GradScaler, outputs: Any) -> Any:
            if self._restored and scaler.is_enabled():
                self._guarded(self._scale, scaler)
            return original(scaler, outputs)

        return scale

    def _scale(self, scaler: GradScaler) -> None:
        """Give a GradScaler that multiplies the first loss of a step its state."""
        step = self._begin()
        numbers = self._recorded.step(step).hyperparameters.get(SCALER)
        if numbers is not None and step != self._scaled_at:
            self._scaled_at = step
            set_scale(scaler, [numbers[name] for name in SCALE])


def _give(what: str, tensor: Tensor, given: Tensor | None, step: int) -> None:
    """Put recorded numbers into a tensor of the script, which may have another shape."""
    if given is None:
        raise CaptureError(
            f"{what} in step {step:,} is not among what was recorded: the script gives another structure"
        )
    if given.dtype is not tensor.dtype or given.ndim != tensor.ndim:
        raise CaptureError(
            f"{what} in step {step:,} is {_said(tensor)}, and was {_said(given)} when the run was recorded: another "
            "script, or other arguments"
        )
    new = given.to(tensor.device)
    for layout, axes in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if tensor.ndim == axes and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            new = new.contiguous(memory_format=layout)
    tensor.data = new


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


# -- the state of a keyframe --------------------------------------------------------------------------------------


def restore(keyframe: Keyframe, exporter: Exporter) -> None:
    """Put the parameters and buffers of a keyframe into the model that an exporter observes.

    Raises
    ------
    CaptureError
        If the model has other parameters or buffers.
    """
    table = exporter.parts.table
    own = {(one.values, one.stream): one.tensor for one in table.all if not one.computed}
    _copy("parameter", keyframe.parameters, own, str(keyframe.at.global_step))
    _copy("buffer", keyframe.buffers, dict(table.buffers()), str(keyframe.at.global_step))


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
