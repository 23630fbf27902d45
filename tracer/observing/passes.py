"""Forwards of the model and calls of modules, in training passes, which may begin a step, and outside the training."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch._C import _current_graph_task_id
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from tracer import walking
from tracer.errors import CaptureError
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG, TRAIN_MODE
from tracer.observing.clock import At, StreamKey, UndecidedTag, decided
from tracer.observing.gradients import CallPlan, GradientHook
from tracer.observing.guesses.batches import SampleIds
from tracer.observing.guesses.evaluations import UndecidedPass
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.pulses import PulseRows
from tracer.observing.pytorch.autograd import (
    NO_BACKWARD,
    backward_running,
    calls_running,
    checkpointing,
    inspected,
    recomputing,
    traced,
)
from tracer.observing.pytorch.compiled import Ticket, tag_number, tag_of
from tracer.observing.pytorch.fast_path import may_take_it
from tracer.observing.pytorch.gate import OpenCall, Pass
from tracer.observing.pytorch.hooks import (
    Hanging,
    Hook,
    Role,
    Site,
    Told,
    before_forward,
    gradient_hooks,
    next_number,
    on_gradient,
)
from tracer.observing.pytorch.structure import unwrap
from tracer.observing.pytorch.tensors import arguments_of, leaves
from tracer.observing.steps import Steps


class Passes(ExporterPart):
    """Classifies each forward, and publishes the model's input and output.

    Attributes
    ----------
    user_tag : str or None
        The tag that the user currently gives passes.
    tag_with_gradients : str
        The tag of the last pass with gradients.
    offered : callable or None
        Takes the model's arguments for a probe: the model, whether this is an evaluation, and the arguments. Returns
        whether it needs no more.
    given_to_losses : bool
        Whether losses are observed, which publish the model's output as they get it.
    fed : callable or None
        Called before each training forward of a model, with the model's name and arguments. May change the tensors.
    in_eval_mode_at : collection of int
        The steps whose training passes are known to run in eval mode.
    undecided : UndecidedPasses
    """

    def __init__(self, ground: Ground, steps: Steps) -> None:
        super().__init__(ground)
        self.steps = steps
        self.ranks = steps.ranks
        self.terms = steps.objectives.terms
        self.state = steps.state
        self.undecided = steps.undecided
        self.samples = SampleIds(ground)
        self.user_tag: str | None = None
        self.tag_with_gradients = DEFAULT_TAG
        self.offered: Callable[[nn.Module, bool, tuple[Any, ...], Mapping[str, Any]], bool] | None = None
        self.given_to_losses = False
        self.fed: Callable[[str, tuple[Any, ...], Mapping[str, Any]], None] | None = None
        self.in_eval_mode_at: Collection[int] = ()

    @property
    def now(self) -> Pass:
        """The pass that runs in this thread, or else the thread's last pass."""
        return self.gate.passes.now

    @contextlib.contextmanager
    def tag(self, name: str) -> Iterator[None]:
        """Give every pass inside this context the tag `name`."""
        if not isinstance(name, str) or not name or name == DEFAULT_TAG:
            raise CaptureError(f"a tag is a non-empty name other than {DEFAULT_TAG!r}, not {name!r}")
        before, self.user_tag = self.user_tag, name
        try:
            yield
        finally:
            self.gate.guard("loss", self.terms.settle)
            self.user_tag = before

    def is_training(self, module: nn.Module) -> bool:
        """Whether a pass through a module that begins now is known to be a training pass."""
        trains = module.training or self.clock.step in self.in_eval_mode_at
        return trains and self.user_tag is None and (is_grad_enabled() or checkpointing())

    def _is_inspected(self, module: nn.Module) -> bool:
        """Whether a forward that begins now is thrown away, so that it is no pass.

        Training passes are asked only in the first step, because such forwards are made before a training.
        """
        trains = self.clock.step > self.clock.first_step and self.is_training(module)
        return not trains and self.publisher.collecting is None and inspected()

    def _may_be_training(self, module: nn.Module) -> bool:
        """Whether a pass that begins now, and is not known to be a training pass, may turn out to be one."""
        return (is_grad_enabled() or checkpointing()) and self.undecided.may_train(module)

    def enter(self, module: nn.Module, path: str | None = None, called: nn.Module | None = None) -> None:
        """Classify a forward that begins: a training pass, which may begin a step, or a pass outside the training.

        `called` is a part of the model that is called outside it, by its `path`, so that each of its calls is a pass.
        """
        self.steps.settle()
        if self.undecided.waiting:
            self.undecided.settle(dead=True)
        if self.terms.undecided:
            self.terms.settle()
        running = self.gate.passes.now
        undecided = None
        if self.user_tag is not None:
            running.tag = self.user_tag
        elif self.is_training(module):
            running.tag = DEFAULT_TAG
        elif self._may_be_training(module):
            undecided = self.undecided.begin(module, outside=running.depth == 0)
            undecided.in_eval_mode |= self._is_in_eval_mode(module, called)
            running.tag = undecided.tag
        else:
            running.tag = EVAL_TAG
        aside = undecided is None and running.tag == EVAL_TAG
        running.in_train_mode = running.in_train_mode + 1 if aside and self._is_in_train_mode(module) else 0
        if is_grad_enabled() or checkpointing():
            self.tag_with_gradients = running.tag
        if running.tag == DEFAULT_TAG:
            first = not self.clock.open
            self.steps.begin()
            running.batch, running.counts = 0, None
            running.listening = not self.clock.idle
            running.inside = running.listening and self.demand.inside_due()
            if self.demand.of_state and running.listening and (first or path is None):
                self.gate.guard("state", self.state.forward_begins)
            self.forwards.training += running.depth
            self.optimizers.note_forward(called or module)
            if self._is_in_eval_mode(module, called):
                self.clock.kept.in_eval_mode = True
        elif undecided is not None:
            self._enter_undecided(running, undecided)
        else:
            self._enter_aside(running, path)

    def _is_in_eval_mode(self, module: nn.Module, called: nn.Module | None) -> bool:
        """Whether a pass trains a model in eval mode.

        A part that is called outside the model has a mode of its own, such as a part of two models. Only the mode of a
        part that is trained counts: not that of a target network or a frozen encoder, which stay in eval mode.
        """
        if called is None:
            return not module.training
        return not called.training and self.optimizers.train(called)

    def _is_in_train_mode(self, module: nn.Module) -> bool:
        """Whether a module of an evaluation behaves as in a training, if somebody wants to know."""
        return module.training and bool(self.demand.wanted(TRAIN_MODE, None, EVAL_TAG)) and _depends_on_mode(module)

    def _enter_undecided(self, running: Pass, undecided: UndecidedPass) -> None:
        """Decide whether a pass is observed of which it is not known yet whether it is a training pass."""
        due, heard = not self.demand.nothing_due(), self.demand.hears(EVAL_TAG)
        running.batch = 0
        running.listening = due or heard
        running.inside = heard or (due and self.demand.inside_due())
        running.counts = None if running.inside else self.numbers.calls_of(running.tag)
        if running.listening and running.depth:
            self.wiring.look()
        first = not self.clock.open and len(self.undecided.waiting) == 1
        if due and self.demand.of_state and undecided.beginning is None and (first or not undecided.outside):
            undecided.beginning = self.state.look()

    def differentiated(self, tensors: Sequence[Tensor]) -> None:
        """Called before some tensors are differentiated: the passes that they are made of are training passes."""
        found = self.undecided.behind(tensors) if self.user_tag is None else []
        if found:
            self.steps.begin()
            self.clock.kept.in_eval_mode |= any(one.in_eval_mode for one in found)
        for one in found:
            self.undecided.train(one)
            self.tag_with_gradients = decided(self.tag_with_gradients)

    def tag_of_loss(self, root: nn.Module | None) -> str:
        """The tag of the pass that a loss with a graph belongs to; `root`: the model, if it is the only one."""
        if root is None:
            tag = self.tag_with_gradients
            return tag if type(tag) is UndecidedTag and not tag.decided else decided(tag)
        if root.training or self.clock.step in self.in_eval_mode_at:
            return DEFAULT_TAG
        return self.undecided.latest or EVAL_TAG

    def _enter_aside(self, running: Pass, path: str | None) -> None:
        """Decide whether a pass outside the training is recorded; if only others with its tag are, count its calls."""
        tag = running.tag
        running.batch = self.numbers.count_pass(tag) if path is None else self.numbers.call(path, tag)
        running.listening = running.inside = self.demand.hears(tag, running.batch)
        running.counts = None
        if not running.listening and self.demand.hears(tag):
            running.counts = self.numbers.calls_of(tag)
        if running.listening and running.depth:
            self.wiring.look()

    def enter_at(self, path: str, module: nn.Module) -> Pass:
        """The pass in which a module is called. A module called outside the model begins a pass of its own."""
        running = self.gate.passes.now
        if running.depth == 0:
            top = self.models.top_of(path, module)
            if self._is_inspected(top):
                running.ignore()
            else:
                self.enter(top, path, module)
        return running

    def before_top(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called before the forward of one of several models."""
        running = self.gate.passes.now
        if recomputing() or running.depth or traced() or self._is_inspected(module):
            return
        if self.fed is not None and self.is_training(module):
            self.fed(name, args, kwargs)
        self.enter(module)
        if running.listening:
            self._publish_input(name, {name: arguments_of(args, kwargs)}, running)

    # -- hooks of the model ---------------------------------------------------------------------------------

    def quiet_before_root(self, args: tuple[Any, ...]) -> bool:
        """Whether this begins a step that nobody records. If so, begin it here, as `before_root` would.

        The ``quiet_…`` methods save time in steps that nobody records. Where the network's numbers fill the processor's
        caches, each object that a hook touches has to be fetched from memory.
        """
        running = self.gate.passes.now
        if self.clock.step >= self.demand.quiet_until or running.depth or self.user_tag is not None:
            return False
        if self.fed is not None:
            return False
        if not (args[0].training and is_grad_enabled()) or backward_running() != NO_BACKWARD or traced():
            return False
        known = self.optimizers
        if (known.found and len(known.all) > 1) or DistributedDataParallel._active_ddp_module is not None:
            return False
        if not self.steps.begin_idle():
            return False
        self.forwards.training += 1
        self.forwards.seen += 1
        running.depth, running.tag, running.inputs = 1, DEFAULT_TAG, []
        running.listening = running.inside = False
        running.batch, running.counts, running.in_train_mode = 0, None, 0
        self.tag_with_gradients = DEFAULT_TAG
        self.wiring.begin_rest()
        return True

    def before_root(self, _: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called before a forward of the model."""
        if recomputing():
            return
        self.wiring.end_rest()  # an interrupted forward did not put them back
        running = self.gate.passes.now
        running.depth += 1
        if running.depth == 1 and any(isinstance(one, FakeTensor) for one in (*args, *kwargs.values())):
            running.listening = running.inside = False
            running.tag = EVAL_TAG
            why = "a fake tensor has no values, so it counts as no pass"
            self.problems.note("a forward of fake tensors", why)
            return
        if running.depth > 1:
            running.depth = max(1, calls_running(module))  # an interrupted forward did not count its end
            if running.depth > 1:
                return
        if running.inputs:
            running.inputs = []
        if self._is_inspected(module):
            running.ignore()
            return
        self.forwards.seen += 1
        outer = DistributedDataParallel._active_ddp_module
        if outer is not None and outer not in self.ranks.around and unwrap(outer) is module:
            self.ranks.note(outer)
        self.steps.settle()
        if self.clock.open and self.optimizers.forwards_end_steps and self.is_training(module):
            self.steps.end()  # without an optimizer, a step lasts until the next training pass
        if self.fed is not None and self.is_training(module):
            self.fed("", args, kwargs)
        self.enter(module)
        if self.offered is not None and self.user_tag is None and not traced():
            self.gate.guard("the inputs of a probe", functools.partial(self._offer, module, args, kwargs))
        if running.listening or running.counts is not None:
            self._publish_input("", arguments_of(args, kwargs), running)

    def _publish_input(self, name: str, arguments: Any, running: Pass) -> None:
        """Publish the input of a model, with this name if there are several, and its datapoints."""
        ids = self.samples.of_forward(name, arguments) if running.listening else None
        self.publisher.publish_leaves("input_data", None, arguments, running.tag)
        if running.listening:
            self.samples.publish(name, ids)

    def _offer(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        evaluation = self.now.tag == EVAL_TAG
        if evaluation and not self.forwards.training:
            return  # a look at the model, such as a summary, may come before the training
        if self.offered is not None and self.offered(module, evaluation, args, kwargs):
            self.offered = None

    def quiet_after_root(self, args: tuple[Any, ...]) -> bool:
        """Whether nobody records this pass. If so, its end is noted here, and `after_root` is not needed."""
        running = self.gate.passes.now
        if running.depth != 1 or running.listening or running.counts is not None or backward_running() != NO_BACKWARD:
            return False
        running.depth = 0
        self.wiring.end_rest()
        return True

    def after_root(self, _: str, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Called after a forward of the model."""
        self.wiring.end_rest()
        # there is no output if an earlier hook has removed this hook, because nobody listens any more
        if recomputing():
            return
        running = self.gate.passes.now
        running.depth = max(0, running.depth - 1)
        if running.depth:
            return
        if type(running.tag) is UndecidedTag:
            self.undecided.forward_ended(running.tag, output)
        if output is None or not (running.listening or running.counts is not None):
            return
        tag = running.tag
        if isinstance(output, Mapping) and isinstance(whole := output.get("loss"), Tensor):
            if type(tag) is UndecidedTag and tag.losses:
                self.undecided.loss_computed(tag, "", whole)
            elif self.terms.here:
                self.terms.whole(whole, tag)
        if running.tag == DEFAULT_TAG and is_grad_enabled():
            self.forwards.watch(one for _, one in leaves(output))
        if running.tag == DEFAULT_TAG and isinstance(output, Tensor) and output.ndim < 3:
            self.publisher.datapoints.rows_are(output)
        # observed losses publish the output as they get it, together with the labels
        if not self.given_to_losses or self.publisher.collecting is not None:
            self.publisher.publish_leaves("network_output", None, output, running.tag)


def _depends_on_mode(top: nn.Module) -> bool:
    """Whether a module or one below it is in train mode, and would give something else in eval mode."""
    for one in walking.modules(top):
        if not one.training:
            continue
        if isinstance(one, _BatchNorm):
            if one.track_running_stats:
                return True
        elif isinstance(one, _DropoutNd):
            if one.p > 0:
                return True
        elif isinstance(one, (nn.RNNBase, nn.MultiheadAttention)) and one.dropout > 0:
            return True
    return False


class Calls(ExporterPart):
    """Sees the calls of modules."""

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes
        self.gradients = passes.steps.gradients

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """See a call begin."""
        if recomputing():
            first = self.gradients.first_call(path)
            if first is not None:
                now = self.demand.at(DEFAULT_TAG)
                self._enter(path, [], leaves(arguments_of(args, kwargs)), first, DEFAULT_TAG, now)
            return
        running = self.passes.enter_at(path, module)
        if not running.listening:
            return
        tag, now = running.tag, self.demand.at(running.tag)
        copies: list[tuple[str, Tensor]] = []
        inputs = leaves(arguments_of(args, kwargs))
        if self.demand.wanted("layer_inputs", path, tag, now):
            for leaf, tensor in inputs:  # copied now, because the module may overwrite its input in place
                if self.publisher.can_record("layer_inputs", path, tensor):
                    copies.append((leaf, self.publisher.copy(tensor.detach())))
        self._enter(path, copies, inputs, self.numbers.call(path, tag), tag, now)

    def _enter(
        self,
        path: str,
        copies: list[tuple[str, Tensor]],
        inputs: list[tuple[str, Tensor]],
        call: int,
        tag: str,
        now: At,
    ) -> None:
        """Keep the inputs of a call until its forward is over. It is counted then, as others may end before it."""
        hooks = self.gradients.watch("input_gradients", path, inputs, call, tag, now) if is_grad_enabled() else []
        self.gate.passes.now.inputs.append(OpenCall(path, copies, hooks))

    def _leave(self, path: str, call: int) -> list[tuple[str, Tensor]]:
        """Tell the hooks of a call that is over its number; returns the copied inputs. Drops those of failed calls."""
        running = self.gate.passes.now
        while running.inputs:
            owner, copies, hooks = running.inputs.pop()
            if owner == path:
                for hook in hooks:
                    hook.call = call
                return copies
        return []

    def after(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """See a call end."""
        if backward_running() != NO_BACKWARD:
            self._after_recomputed(path, output)
            return
        running = self.gate.passes.now
        if not running.depth:
            running = self.passes.enter_at(path, module)
        if not running.listening:
            running.count(path)
            return
        tag, clock = running.tag, self.clock
        now = clock.began if clock.open and tag == DEFAULT_TAG else self.demand.at(tag)
        call = self.numbers.count_call(path, tag)
        if running.inputs:
            self._publish_inputs(path, tag, call, now)
        key = None
        if type(output) is Tensor and tag == DEFAULT_TAG and now is clock.began:
            dues, step = self.demand.dues, now.global_step
            key = path, dues.mask if step == dues.step else dues.at(step), output.dim(), output.dtype
            plan = dues.plans.get(key)
            if plan is not None and self._take(path, plan, output, call, now):
                return
        observed = leaves(output)
        captures = self.demand.wanted("activations", path, tag, now)
        if captures:
            try:
                for leaf, tensor in observed:
                    stream = StreamKey("activations", path, tag, leaf)
                    self.publisher.deliver(captures, stream, tensor, call, now, owned=False)
                if not observed:
                    self.publisher.note_opaque(f"activations of {path!r}", output)
            except Exception as error:  # noqa: BLE001 - the output's gradients are another stream
                self.demand.give_up("activations", path, error)
        self._watch_output(path, observed, call, tag, now)
        if key is not None and key not in self.demand.dues.plans:
            self.demand.dues.plans[key] = self._plan(path, output, now)
        if running.depth == 0 and type(tag) is UndecidedTag:
            self.passes.undecided.call_ended(tag, [one for _, one in observed])

    def _plan(self, path: str, output: Tensor, now: At) -> CallPlan | None:
        """What to do with a training's outputs like this one in steps with these dues; None: as with any others."""
        found: list[PulseRows | None] = []
        for kind in ("activations", "layer_gradients"):
            captures = self.demand.wanted(kind, path, DEFAULT_TAG, now)
            if not self.demand.is_steady(kind, path) or not self.publisher.keeps_rows(kind, captures):
                return None
            stream = StreamKey(kind, path, DEFAULT_TAG, "")
            found.append(self.publisher.rows(captures, stream, output) if captures else None)
        return CallPlan(self.demand.dues.plans, *found)

    def _take(self, path: str, plan: CallPlan, output: Tensor, call: int, now: At) -> bool:
        """Take the rows of a small output, and watch for those of its gradient; False: nothing was done."""
        publisher = self.publisher
        if publisher.collecting is not None or (output.requires_grad and output.grad_fn is None):
            return False
        if plan.outputs is not None and not publisher.pulses.take(plan.outputs, output, call, now, publisher.rank):
            return False
        if not is_grad_enabled():
            self.gradients.note_ungraded(path, call)
        elif plan.gradients is not None and output.requires_grad:
            hook = GradientHook(self.gradients, plan.gradients.stream, call, now, None, plan)
            gradient_hooks(output)[next_number()] = hook
        return True

    def _after_recomputed(self, path: str, output: Any) -> None:
        """See the end of a call that runs inside a backward."""
        first = self.gradients.recompute(path)
        if first is not None:
            self._leave(path, first)
            self._watch_output(path, leaves(output), first, DEFAULT_TAG, self.demand.at(DEFAULT_TAG))

    def _watch_output(self, path: str, output: list[tuple[str, Tensor]], call: int, tag: str, now: At) -> None:
        """Watch for the gradients of a call's output; without gradients, expect the call to be computed again.

        Also the second forward of a checkpoint may be without: for a checkpoint inside, it is a first one once more.
        """
        if is_grad_enabled():
            self.gradients.watch("layer_gradients", path, output, call, tag, now)
        elif tag == DEFAULT_TAG:
            self.gradients.note_ungraded(path, call)
        elif type(tag) is UndecidedTag:
            self.gradients.note_ungraded(path, call + self.numbers.call(path, DEFAULT_TAG))

    def _publish_inputs(self, path: str, tag: str, call: int, now: At) -> None:
        """Publish the copies of a call's inputs, now that the call has its number."""
        try:
            for leaf, tensor in self._leave(path, call):
                self.publisher.publish("layer_inputs", path, tensor, tag, leaf, call, now)
        except Exception as error:  # noqa: BLE001 - the activations are another stream
            self.demand.give_up("layer_inputs", path, error)

    # -- compiled graphs ------------------------------------------------------------------------------------

    def ticket(self, path: str) -> Ticket:
        """The numbers that a compiled graph keeps for the gradient of the call that was just seen."""
        running = self.gate.passes.now
        now = self.demand.at(running.tag)
        if recomputing():
            return (self.gradients.recalled(path), *now, tag_number(DEFAULT_TAG))
        call = self.numbers.call(path, running.tag) if running.listening else 0
        tag = running.tag
        if type(tag) is UndecidedTag:  # a gradient comes only if the training learns from the pass
            call, tag = call + self.numbers.call(path, DEFAULT_TAG), DEFAULT_TAG
        return (call - 1, *now, tag_number(tag))

    def gradient_seen(self, path: str, leaf: str, gradient: Tensor, ticket: Ticket) -> None:
        """Publish the gradient of the output of a compiled module."""
        call, step, train_step, epoch, batch, tag = ticket
        stream = StreamKey("layer_gradients", path, tag_of(tag), leaf)
        self.gradients.seen(stream, call, At(step, train_step, epoch, batch), gradient)


class ComputedWeights(ExporterPart):
    """Observes weights that are computed for a forward, and the accumulation of parameters' gradients."""

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes
        self.gradients = passes.steps.gradients
        self.parameters = passes.steps.parameters
        # by path: the last weight computed for a forward, and the hook on it
        self._watched: dict[str, tuple[weakref.ref[Tensor], Hanging]] = {}

    def after_accumulation(self, path: str, tensor: Tensor) -> None:
        """Keep a parameter's accumulated gradient. Without an optimizer, nothing marks it as final."""
        if self.clock.open and not self.clock.idle and tensor.grad is not None:
            self.parameters.accumulated(self.table.by_path[path], tensor.grad, self.gradients.scale)

    def after_parametrization(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the weight that a parametrization computed for the forward. Computing it again might change it."""
        if isinstance(output, Tensor):
            self._seen(path, output)

    def after_replaced(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the tensor that a program's hook put in a weight's place, after the forward has used it."""
        parameter = self.table.by_path[path]
        there = parameter.in_place if parameter.tensor is None else None
        if there is not None:
            if not recomputing():
                self.passes.enter_at(path.rpartition(".")[0], module)
            self._seen(path, there)

    def _seen(self, path: str, value: Tensor) -> None:
        """Keep a weight that was computed for a training forward, and hang a hook for its gradient."""
        parameter = self.table.by_path[path]
        if self.clock.idle or not self.clock.open:
            return
        if not recomputing():
            running = self.gate.passes.now
            if not (running.listening and running.tag == DEFAULT_TAG):
                return
            self.parameters.computed(parameter, value)
        if is_grad_enabled() and value.requires_grad and not value.is_leaf:
            last, wanted = self._watched.get(path), self.parameters.wanted(parameter, parameter.gradients)
            if wanted and (last is None or last[0]() is not value):
                self._watched[path] = weakref.ref(value), on_gradient(value, Told(self.gradient_came, path))

    def gradient_came(self, path: str, gradient: Tensor) -> None:
        """Add a gradient to the sum for a computed weight."""
        parameter = self.table.by_path.get(path)  # it may be gone since the forward
        if parameter is not None and self.gate.open and self.clock.open and not self.clock.idle:
            scale, task = self.gradients.scale, _current_graph_task_id()
            add = functools.partial(self.parameters.add_gradient, parameter, gradient, scale, task)
            self.gate.guard(f"the gradient of {path!r}", add)

    def detach(self) -> None:
        """Remove all hooks."""
        for _, handle in self._watched.values():
            handle.remove()
        self._watched = {}


_OF_CALLS = ("activations", "layer_inputs", "layer_gradients", "input_gradients")
"""The kinds of messages about the calls of modules."""


class EncoderLayers(ExporterPart):
    """Observes calls of ``nn.TransformerEncoderLayer``."""

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes

    def hang(self) -> None:
        """Hang a hook on each such layer that has other hooks on it or inside."""
        asides = self.wiring.asides
        asides.layers = {}
        for path, one in self.models.parts():
            is_layer = isinstance(one, nn.TransformerEncoderLayer)
            if is_layer and self.wiring.hung_inside(one) and self.wiring.takes_hooks(path, one):
                self.wiring.hang(Site(one, Role.BEFORE_LAYER, path, before_forward, self.before, self.quiet_before))
                asides.layers[id(one)] = self.wiring.hung_inside(one)

    def quiet_before(self, args: tuple[Any, ...]) -> bool:
        """Whether a layer does not take its fast path, because it is in training mode."""
        return bool(args[0].training)

    def before(self, path: str, module: Any, args: Any, kwargs: Any) -> None:
        """Step aside for a layer that may take torch's fast path, unless a capture names what is inside."""
        asides = self.wiring.asides
        asides.end_last()
        if self.publisher.collecting is not None or not may_take_it(module, args, kwargs):
            return  # probes observe the inside anyway
        running = self.passes.enter_at(path, module)
        hung = asides.inside(module)
        inside = {hanging.hook.name for on, hanging in hung if on is not module and isinstance(hanging.hook, Hook)}
        tag = running.tag
        heard = running.listening or running.counts is not None  # all passes of an evaluation must take the same path
        streams = [(kind, one) for kind in _OF_CALLS for one in inside] if heard else []
        if any(self.demand.named(kind, one, tag) for kind, one in streams):
            why = (
                f"passes tagged {tag!r} do not take it, because a capture that names their tag takes what is inside; "
                "their results may differ in rounding from unwatched ones"
            )
            self.problems.note(f"torch's fast path in {path!r}", why)
            return
        if any(self.demand.stream(kind, one, tag).asked for kind, one in streams):
            why = f"torch's fast path calls nothing inside; a capture whose tags name {tag!r} switches it off"
            self.problems.note(f"the inside of {path!r} in passes tagged {tag!r}", why, warn=False)
        asides.begin(module)
