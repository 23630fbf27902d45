"""Calls of losses, of ``backward`` and of ``autograd.grad``, and values that a user logs."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tracer.errors import CaptureError, MessageError
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG, TRAIN_MODE
from tracer.observing.clock import At, StreamKey, UndecidedTag
from tracer.observing.derivatives import Differentiable
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.passes import Passes
from tracer.observing.pytorch.autograd import (
    checkpointed_inputs,
    inspected,
    looks_back,
    recomputing,
    recomputing_reentrant,
)
from tracer.observing.pytorch.hooks import Role, Site, after_forward
from tracer.observing.pytorch.patches import (
    LOSS_FUNCTIONS,
    LossFunction,
    ModelLoss,
    output_and_labels,
    unpatch,
)
from tracer.observing.pytorch.structure import unwrap
from tracer.observing.pytorch.tensors import leaves, summed

_OF_LOSSES = ("loss", "loss_terms", "input_labels", "network_output")
"""The kinds of messages that a call of a loss may produce."""


class Losses(ExporterPart):
    """Observes the losses that the user has set.

    Attributes
    ----------
    all : list of Module or str
        The losses: modules, and names of functions.
    seen : int
        How many calls of losses were seen.
    fed : callable or None
        Called with each function of ``torch.nn.functional`` that is a loss, and its arguments, before it runs. It may
        change the tensors.
    """

    def __init__(self, ground: Ground, passes: Passes, differentiable: Differentiable) -> None:
        super().__init__(ground)
        self.passes = passes
        self.differentiable = differentiable
        self.steps = passes.steps
        self.terms = passes.terms
        self.all: list[nn.Module | str] = []
        self.seen = 0
        self.fed: Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], None] | None = None
        self._told_train_mode = -1  # the last step in which it was told
        self._patched: dict[str, LossFunction] = {}
        weakref.finalize(self, unpatch, self._patched).atexit = False  # a dropped exporter leaves no stand-ins behind

    # -- the losses -----------------------------------------------------------------------------------------

    def add(self, loss: nn.Module | Callable[..., Any] | Iterable[str]) -> None:
        """Add a loss: a module, a function of ``torch.nn.functional``, or names of such functions."""
        if isinstance(loss, nn.Module):
            self.all.append(unwrap(loss))
        else:
            self.all += _names_of(loss)
        self.passes.given_to_losses = bool(self.all)

    @property
    def modules(self) -> list[nn.Module]:
        """The losses that are modules."""
        return [one for one in self.all if isinstance(one, nn.Module)]

    def sites(self) -> Iterator[Site]:
        """The hooks on loss modules; loss functions are replaced by stand-ins."""
        wanted = any(self.demand.asked(kind, None) for kind in _OF_LOSSES)
        paths = {id(one): path for path, one in self.models.candidates()} if wanted and self.all else {}
        for loss in self.all if wanted else ():
            if isinstance(loss, nn.Module):
                if self.wiring.takes_hooks("", loss):
                    name = paths.get(id(loss)) or type(loss).__name__
                    yield Site(loss, Role.AFTER_LOSS, name, after_forward, self.after, self.quiet_after)
            elif loss not in self._patched:
                original = getattr(torch.nn.functional, loss)
                self._patched[loss] = LossFunction(self.gate, self.called, original)
                setattr(torch.nn.functional, loss, self._patched[loss])

    def detach(self) -> None:
        """Remove all stand-ins."""
        unpatch(self._patched)

    # -- calls of losses ------------------------------------------------------------------------------------

    def quiet_after(self, args: tuple[Any, ...]) -> bool:
        """Whether this loss belongs to a step that nobody records. If so, it is counted here, as `called` would."""
        if not self.clock.idle or self.passes.user_tag is not None or not self.wiring.check_steps.is_complete():
            return False  # probes have a tag
        output, root = args[-1], self.models.root
        if not (type(output) is Tensor and output.requires_grad and root is not None and root.training):
            return False
        self.seen += 1
        return True

    def after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Called after a loss module's forward."""
        self.called(name, module.forward, args, kwargs, output)

    def called(self, name: str, loss: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Called with the result of a loss function, or of a loss module's forward."""
        if not isinstance(output, Tensor) or isinstance(output, FakeTensor) or self.publisher.collecting is not None:
            return
        if recomputing() and (not output.requires_grad or not recomputing_reentrant()):
            return  # the checkpoint's first forward has reported it
        if self.clock.step == self.clock.first_step and inspected():
            return
        self.steps.settle()
        self.seen += 1
        if self.passes.user_tag is None and not output.requires_grad and self._waits_for_backward():
            return
        tag = self._tag_of(output)
        if tag == DEFAULT_TAG:
            self.terms.settle()
            self.steps.begin()
            if self.clock.idle:
                return
        found = output_and_labels(loss, args, kwargs)
        if tag == DEFAULT_TAG or type(tag) is UndecidedTag:
            self.differentiable.output_seen(found[0])
            output_rows = found[0] if found[0] is not None and found[0].ndim < 3 else None
            self.publisher.datapoints.rows_are(output_rows, found[1])
        for kind, tensor in zip(("network_output", "input_labels"), found, strict=True):
            if tensor is not None:
                self.publisher.publish_leaves(kind, None, tensor, tag)
        if self.gate.passes.now.in_train_mode:
            self._tell_train_mode(tag)
        of_model = isinstance(getattr(loss, "__self__", None), ModelLoss)
        if of_model:
            self.terms.note(name, output)
        else:
            self.terms.publish(name, output, tag)
        if tag != DEFAULT_TAG:
            if type(tag) is UndecidedTag:
                self.passes.undecided.loss_computed(tag, "" if of_model else name, output)
            elif of_model:
                self.terms.whole(output, tag)
            else:
                self.terms.wait(name, output, tag, passes_are_seen=self.forwards.seen > 0)
                self.demand.look_ahead_anew()  # so that the next pass settles the loss even if nobody records it

    def _tell_train_mode(self, tag: str) -> None:
        """Publish, once in a step, that a loss is of a pass without gradients that behaved as in a training.

        A loss of several passes, as of a mean over dropout masks, is meant to be of such passes.
        """
        running, step = self.gate.passes.now, self.clock.step
        alone, running.in_train_mode = running.in_train_mode == 1, 0
        if alone and tag == EVAL_TAG and step != self._told_train_mode:
            self._told_train_mode = step
            self.publisher.event(TRAIN_MODE, self.demand.at(tag), tag)

    def _tag_of(self, output: Tensor) -> str:
        """The tag of the pass that a loss belongs to."""
        user_tag, root = self.passes.user_tag, self.models.root
        again = user_tag is None and self._is_second_look(output)
        if user_tag is not None:
            return user_tag
        if not output.requires_grad or again:
            return EVAL_TAG
        # not the last pass's tag, because an evaluation may lie between a forward and its loss
        return self.passes.tag_of_loss(None if self.models.several else root)

    def _is_second_look(self, output: Tensor) -> bool:
        """Whether a loss is computed from outputs of the step that has ended, as for a metric."""
        # with several optimizers, the loss may be for one that has yet to step
        alone = not self.clock.open and len(self.optimizers.all) < 2
        return alone and looks_back(output, self.forwards.ended_at)

    def _waits_for_backward(self) -> bool:
        """Whether a training's reentrant checkpoint runs its first forward, where losses have no graph yet.

        Whether they are differentiated shows only when they are recomputed or `backward` is called.
        """
        inputs = checkpointed_inputs()
        if inputs is None:
            return False
        running = self.gate.passes.now
        return running.tag == DEFAULT_TAG if running.depth else any(one.requires_grad for _, one in leaves(inputs))


def _names_of(loss: Callable[..., Any] | Iterable[str]) -> list[str]:
    """The names of torch's loss functions."""
    names = [getattr(loss, "__name__", "")] if callable(loss) else [loss] if isinstance(loss, str) else list(loss)
    loss = inspect.unwrap(loss) if callable(loss) else loss  # another recording may have replaced it by a stand-in
    for name in names:
        there = getattr(torch.nn.functional, name, None) if name in LOSS_FUNCTIONS else None
        if there is None or (callable(loss) and inspect.unwrap(there) is not loss):
            raise CaptureError(
                f"the loss is a module or a loss function of torch.nn.functional, not {loss!r}; others need "
                "not be named, as what backward is called on is recorded, or log('loss', value)"
            )
    return names


class Differentiation(ExporterPart):
    """Observes the tensors that the program differentiates, which are the training's losses.

    Attributes
    ----------
    is_watched : bool
        Whether ``backward`` is watched even if no loss is set.
    of_losses : bool
        Whether somebody asks for losses. If not, ``backward`` only tells training passes from evaluations.
    of_norms : bool
        Whether somebody asks for the norms of all gradients.
    """

    def __init__(self, ground: Ground, passes: Passes, differentiable: Differentiable) -> None:
        super().__init__(ground)
        self.passes = passes
        self.differentiable = differentiable
        self.steps = passes.steps
        self.gradients = passes.steps.gradients
        self.objectives = passes.steps.objectives
        self.is_watched = False
        self.of_losses = False
        self.of_norms = False
        # the last loss that a GradScaler has scaled: the scaled loss, the loss before scaling, and the factor
        self._last_scaled: tuple[weakref.ref[Tensor], Tensor, Tensor] | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that is differentiated now is of interest: the step is one that nobody records."""
        clock = self.clock
        return clock.idle and clock.open and self.passes.user_tag is None and not self.passes.undecided.waiting

    def backward(self, *tensors: Tensor) -> None:
        """Publish the tensors that ``backward`` is called on."""
        user_tag, terms = self.passes.user_tag, self.objectives.terms
        if recomputing() or not self.gate.open:
            return
        if self.clock.step == self.clock.first_step and inspected():
            return
        if self.passes.undecided.waiting:
            self.passes.differentiated(tensors)
        if not self.of_losses:
            return
        if user_tag is None and self.clock.idle and self.clock.open:
            return
        if not self.optimizers.found and all(map(self.models.made_by_others, tensors)):
            return
        if any(one.numel() != 1 for one in tensors):
            why = "backward was called on a tensor of several elements; run.log('loss', value) says what the loss is"
            self.problems.note("the loss", why, warn=False)
            return
        for one in tensors:
            terms.differentiated(one)
        if user_tag is None:
            terms.settle()
            self.steps.begin()
            if self.clock.idle:
                return
        scaled = [self._scaled(one) for one in tensors]
        values = [one if known is None else known[0] for one, known in zip(tensors, scaled, strict=True)]
        if user_tag is not None:
            for one in values:
                terms.whole(one, user_tag)
            return
        whole = summed([one.detach() for one in values])
        with self.differentiable.told(tensors, [None if one is None else one[1] for one in scaled]):
            self.objectives.differentiated(tensors, whole, hold=len(self.optimizers.all) > 1)

    @property
    def waits(self) -> bool:
        """Whether to call `over` when the backward that has just begun is over."""
        return self.of_norms and not self.clock.idle

    def over(self) -> None:
        """Called when a ``backward`` is over."""
        if self.passes.user_tag is None and not recomputing() and self.gate.open:
            self.steps.norms.backward_over()

    def _scaled(self, loss: Tensor) -> tuple[Tensor, Tensor] | None:
        """A loss before a GradScaler scaled it, and the factor; None if it was not scaled."""
        last = self._last_scaled
        return last[1:] if last is not None and last[0]() is loss else None

    def grad(self, tensor: Tensor, inputs: Iterable[Any], *, derivable: bool) -> None:
        """Called for ``autograd.grad``. Without a ``backward``, the tensor differentiated by parameters is the loss."""
        waiting = bool(self.passes.undecided.waiting)
        if recomputing() or not self.gate.open or self.passes.user_tag is not None:
            return
        if not waiting and (self.clock.idle or not self.clock.open or not self.of_losses):
            return
        own = self.models.parameter_ids
        if any(id(one) in own for one in inputs):
            if waiting:
                self.passes.differentiated([tensor])
            if self.of_losses and tensor.numel() == 1 and self.clock.open and not self.clock.idle:
                self.objectives.by_hand(tensor, derivable=derivable)

    def scaled(self, scaled: Tensor, loss: Tensor, scale: Tensor) -> None:
        """Note that a GradScaler scaled a loss, so that gradients can be published without the factor."""
        self._last_scaled = weakref.ref(scaled), loss.detach(), scale
        self.clock.kept.scale = scale
        listens = self.wiring.listens(Role.AFTER_FORWARD, Role.AFTER_ACCUMULATION)
        if self.clock.open and not self.clock.idle and listens:
            self.gradients.watch_scale(scaled, scale)


class Values(ExporterPart):
    """Publishes values that a user logs."""

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes
        self.objectives = passes.steps.objectives
        # by kind and tag: the step and the number of the last value
        self._logged: dict[tuple[str, str], tuple[At, int]] = {}

    def log(self, kind: str, value: Any) -> None:
        """Publish a value in the open step, or in the last step if none is open."""
        if not self.gate.open:
            return
        if not isinstance(kind, str) or not kind:
            raise MessageError(f"log takes a kind, which is a non-empty string, not {kind!r}")
        if kind == "sample_ids":
            raise MessageError("sample ids are told by run.samples(ids), before the forward")
        if kind not in self.bus.topics:
            self.bus.register_topic(kind, "network")
        data = self._copied(kind, value)
        if data is None:
            return
        self.gate.lock.run(self._log, kind, data)

    def _log(self, kind: str, data: Tensor) -> None:
        """Publish a value of the open step, or else of the last one."""
        user_tag = self.passes.user_tag
        last = None if user_tag is not None or self.clock.open else self.clock.last
        at = self.clock.now() if last is None else last
        tag = user_tag or DEFAULT_TAG
        if kind == "loss":
            self.objectives.terms.logged(tag)
            if user_tag is None and self.objectives.logs(data, at):
                return
        # logged values are counted apart from observed ones, because they may come before, in and after a step
        before, count = self._logged.get((kind, tag), (at, 0))
        call = max(count if before == at else 0, self.numbers.next_message(StreamKey(kind, None, tag, "")))
        self._logged[kind, tag] = (at, call + 1)
        self.publisher.publish(kind, None, data, tag, call=call, at=at)

    def loss_is_logged(self, *tags: str) -> None:
        """Let the user log the training's loss, and the loss of passes with these tags."""
        for tag in tags:
            self.objectives.terms.logged(tag)
        self.objectives.logged()

    def _copied(self, kind: str, value: Any) -> Tensor | None:
        """A copy of a value; None if it cannot be recorded."""
        if not isinstance(value, Tensor):
            try:
                return torch.as_tensor(np.array(value), device="cpu")
            except (TypeError, ValueError, RuntimeError) as error:
                raise MessageError(f"log({kind!r}) takes a number or an array, not {type(value).__name__}") from error
        if not self.publisher.can_record(kind, None, value):
            return None
        try:
            return value.detach().clone()
        except Exception as error:  # noqa: BLE001 - out of memory
            self.demand.give_up(kind, None, error)
            return None
