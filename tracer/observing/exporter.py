"""A training loop → messages, through PyTorch's own hooks.

The contract is in ``docs/architecture.md`` ("What is observed, and when"). In short: a step is one optimizer step; all
messages of step k belong to the batch and the weights W_k of that step; watching changes nothing; what nobody wants
is neither hooked nor copied.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tracer.errors import CaptureError
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import DATA_KINDS, DEFAULT_TAG
from tracer.messaging.receiver import Receiver, tell_of_model
from tracer.observing.capture import Capture
from tracer.observing.demand import Apart
from tracer.observing.derivatives import Differentiable
from tracer.observing.gradients import GRADIENT_NORMS
from tracer.observing.guesses.optimizers import observable
from tracer.observing.losses import Differentiation, Losses, Values
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.passes import Calls, ComputedWeights, EncoderLayers, Passes
from tracer.observing.probes import PROBE, ProbePlan, Probes
from tracer.observing.pytorch.hooks import Role, Site, after_accumulation, after_forward, before_forward
from tracer.observing.pytorch.loaders import LOADERS
from tracer.observing.pytorch.patches import BACKWARD, COMPILING, SCALERS, SCRIPTING
from tracer.observing.pytorch.structure import unwrap
from tracer.observing.pytorch.tensors import arguments_of
from tracer.observing.steps import OptimizerSteps, Retrospect, Steps
from tracer.observing.wanted_parameters import UpdateTurns


class ExporterParts(ExporterPart):
    """The parts of an exporter. Hangs their hooks where a receiver wants data.

    Parameters
    ----------
    ground : Ground
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.steps = Steps(ground)
        self.passes = Passes(ground, self.steps)
        # called by hooks
        self.calls = Calls(ground, self.passes)
        self.encoder_layers = EncoderLayers(ground, self.passes)
        self.computed = ComputedWeights(ground, self.passes)
        self.differentiable = Differentiable(ground, self.steps.ranks)
        self.losses = Losses(ground, self.passes, self.differentiable)
        self.differentiation = Differentiation(ground, self.passes, self.differentiable)
        self.optimizer_steps = OptimizerSteps(ground, self.steps, self.differentiation.scaled)
        # called by others
        self.probes = Probes(ground, self.passes)
        self.values = Values(ground, self.passes)
        self.retrospect = Retrospect(ground, self.optimizer_steps)
        self.wiring.call_to_rewire(self.rewire)
        self.bus.watch(self.rewire)

    def rewire(self) -> None:
        """Hang hooks where a receiver wants data, and nowhere else. Called when receivers or modules change."""
        if not self.gate.attached:
            return
        self.wiring.asides.end()
        SCRIPTING.watch(self)
        COMPILING.watch(self)
        self._look()
        tell_of_model(self.bus.receivers, self.models.structure)
        of_losses = bool(self.losses.all) or self.differentiation.is_watched
        self.differentiation.of_losses = of_losses and self.demand.asked("loss", None)
        self.differentiation.of_norms = self.demand.asked(GRADIENT_NORMS, None)
        watched = self.differentiation.of_losses or self.differentiation.of_norms
        if watched or not self.optimizers.forwards_end_steps:
            BACKWARD.watch(self.differentiation)
        if self.demand.asked("sample_ids", None):
            LOADERS.watch(self.passes.samples)
        self._hang()

    def compile_called(self) -> None:
        """Hang the hooks anew, because `torch.nn.Module.compile` was called on some module."""
        self.gate.guard("compile", self.rewire)

    def watch_optimizers(self) -> None:
        """Watch which losses GradScalers multiply, and which steps they skip."""
        if self.gate.attached:
            SCALERS.watch(self.optimizer_steps)

    def _look(self) -> None:
        """Find the modules and parameters, and the receivers that want their data."""
        self.wiring.begin()
        self.demand.look_ahead_anew()
        self.models.changed(self.optimizers.all)
        self.optimizers.forget_what_they_train()
        candidates = self.models.candidates()
        self.demand.take(candidates)
        self.publisher.datapoints.know(candidates)
        self.table.find(self.models.tops)
        self.demand.ask_anew()
        self.publisher.forget_captures()
        self.wiring.leave_untouched(self.losses.modules)
        self.steps.ranks.surveyed = False

    def forget_models(self) -> None:
        """Stop observing all modules. For launchers that find the model late, before the first step begins."""
        self.models.forget()
        self.rewire()

    def let_go(self, *, collect: bool = False) -> None:
        """Stop observing models and optimizers that the program has dropped. Does nothing during a forward.

        Parameters
        ----------
        collect : bool
            Whether to collect garbage first. Otherwise models with reference cycles are kept.
        """
        if self.passes.now.depth:
            return
        self.differentiable.forget()
        self.steps.parameters.asked.forget()
        take_hooks_back = self.wiring.let_go()
        take_models_back = self.models.let_go()
        take_optimizers_back = self.optimizers.let_go()
        self.demand.take(())
        self.table.find(())
        self.table.note((), False)
        if collect:
            gc.collect()
        take_models_back()
        take_optimizers_back()
        take_hooks_back()
        self.rewire()

    def detach(self) -> None:
        """Remove every hook, and drop all modules."""
        if self.gate.open:  # an exception may have left losses behind
            self.steps.settle_losses()
            self.steps.release_losses()
        self.wiring.detach(self.demand.modules)
        self.gate.attached = self.gate.open = False
        self.computed.detach()
        self.losses.detach()
        self.differentiable.forget()
        self.table.note((), False)
        self.steps.forget()
        self.publisher.forget_places()
        self.passes.now.inputs = []
        self.passes.samples.forget()
        self.bus.unwatch(self.rewire)
        SCRIPTING.unwatch(self)
        COMPILING.unwatch(self)
        BACKWARD.unwatch(self.differentiation)
        SCALERS.unwatch(self.optimizer_steps)
        LOADERS.unwatch(self.passes.samples)

    # -- which hooks hang where -----------------------------------------------------------------------------

    def _hang(self) -> None:
        """Hang the hooks that are needed, and remove all others."""
        for site in self._sites():
            self.wiring.hang(site)
        self.encoder_layers.hang()
        self.wiring.finish()

    def _sites(self) -> Iterator[Site]:
        passes = self.passes
        root = next((top for _, top in self.models.tops if top is self.models.root), None)
        takes_hooks = root is not None and self.wiring.takes_hooks("", root)
        if takes_hooks:
            first = functools.partial(before_forward, first=True)
            yield Site(root, Role.BEFORE_ROOT, "", first, passes.before_root, passes.quiet_before_root)
        if any(self.demand.asked(kind, None) for kind in ("input_data", "sample_ids")):
            first = functools.partial(before_forward, first=True)
            for path, top in self.models.tops:
                if top is not root and self.wiring.takes_hooks(path, top):
                    yield Site(top, Role.BEFORE_TOP, path, first, passes.before_top)
        for optimizer in self.optimizers.all:
            yield from self.optimizer_steps.sites(optimizer)
        for path, one in self.demand.modules.items():
            if self.wiring.takes_hooks(path, one):
                yield from self._of_module(path, one)
        # after the root module's own activations, which precede the network's output
        if takes_hooks:
            always = functools.partial(after_forward, always=True)
            yield Site(root, Role.AFTER_ROOT, "", always, passes.after_root, passes.quiet_after_root)
        yield from self._of_parameters()
        yield from self.losses.sites()

    def _of_module(self, path: str, module: nn.Module) -> Iterator[Site]:
        asked, calls = self.demand.asked, self.calls
        inputs = any(asked(kind, path) for kind in ("layer_inputs", "input_gradients"))
        if inputs:
            gradients = asked("input_gradients", path)
            yield Site(module, Role.BEFORE_FORWARD, path, before_forward, calls.before, gradients=gradients)
        if inputs or any(asked(kind, path) for kind in ("activations", "layer_gradients")):
            gradients = asked("layer_gradients", path)
            yield Site(module, Role.AFTER_FORWARD, path, after_forward, calls.after, gradients=gradients)

    def _of_parameters(self) -> Iterator[Site]:
        asked, computed = self.demand.asked, self.computed
        if self.optimizers.forwards_end_steps:
            for path, tensor in self.table.trained(asked):
                yield Site(tensor, Role.AFTER_ACCUMULATION, path, after_accumulation, computed.after_accumulation)
        for parameter in self.table.computed(asked):
            path, one = parameter.path, parameter.computed_by
            if not self.wiring.takes_hooks(path, one):
                continue
            if parameter.by_hook:
                # first, because other hooks of the program may remove the tensor
                first = functools.partial(after_forward, first=True)
                yield Site(one, Role.AFTER_REPLACED, path, first, computed.after_replaced)
            else:
                yield Site(one, Role.AFTER_PARAMETRIZATION, path, after_forward, computed.after_parametrization)


class Exporter:
    """Listens to a training loop and publishes what it sees on a bus.

    `tracer.record` creates one for the common case. By hand: pass the model (`set_model`), the optimizer
    (`set_optimizer`) and the loss (`set_loss`), call `epoch_finished` after each epoch, and `finish` and `detach` at
    the end. Receivers may join the bus at any time.

    Parameters
    ----------
    depth : int or None
        Which modules are observed if there is no `capture`: modules exactly this deep below the root and leaves above;
        -1 for all leaves; None for every leaf and every module that has parameters of its own.
    module_filter : iterable of type, optional
        Observe only modules that are instances of one of these classes.
    message_bus : MessageBus, optional
        By default a new bus.
    capture : Capture or iterable of Capture, optional
        What may be observed, for all receivers of the bus. By default all kinds but those of state, in full, of the
        modules given by `depth` and `module_filter`.
    strict : bool
        Whether an exception in a hook reaches the training loop. By default the stream is disabled with one warning.

    Examples
    --------
    >>> import torch
    >>> from tracer import Collect
    >>> exporter, heard = Exporter(), Collect("activations")
    >>> model = exporter(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()))
    >>> exporter.message_bus.register(heard)
    >>> _ = exporter.set_model(model)(torch.ones(4, 3))
    >>> [(message.module, tuple(message.data.shape)) for message in heard]
    [('0', (4, 2)), ('1', (4, 2))]
    >>> exporter.detach()
    """

    def __init__(
        self,
        depth: int | None = None,
        module_filter: Iterable[type] | None = None,
        message_bus: MessageBus | None = None,
        *,
        capture: Capture | Iterable[Capture] | None = None,
        strict: bool = False,
    ) -> None:
        if capture is None:
            capture = Capture(kinds=DATA_KINDS, depth=depth, types=tuple(module_filter) if module_filter else None)
        elif depth is not None or module_filter is not None:
            raise CaptureError("give an exporter a capture, or depth and module_filter, not both")
        self.captures: tuple[Capture, ...] = (capture,) if isinstance(capture, Capture) else tuple(capture)
        self.strict = strict
        self.message_bus = message_bus if message_bus is not None else MessageBus("exporter")
        self.parts = ExporterParts(Ground(self.message_bus, self.captures, strict=strict))
        """The exporter's parts, for recorders that need more than the public methods."""

    # -- what to listen to ----------------------------------------------------------------------------------

    def add_modules(self, module: nn.Module | tuple[str, nn.Module], recursive: bool = True) -> None:
        """Observe a module, or a pair (name, module), and all modules below it unless `recursive` is False.

        Parts of the model keep their names in the model. Another module without a name is named after its class; an
        underscore is appended if its paths are already taken.

        Raises
        ------
        CaptureError
            If `module` is neither.
        """
        name, one = module if isinstance(module, tuple) and len(module) == 2 else ("", module)
        if not isinstance(one, nn.Module) or not isinstance(name, str):
            raise CaptureError(f"add_modules takes a module or a pair (name, module), not {type(module).__name__}")
        self.parts.models.add(name, unwrap(one), recursive)
        self.parts.rewire()

    def __call__(self, module: nn.Module, recursive: bool = True) -> nn.Module:
        """`add_modules`, returning the module; for use inside a constructor."""
        self.add_modules(module, recursive)
        return module

    def set_model(self, model: nn.Module) -> nn.Module:
        """Set the root of the network, whose forwards make up steps and passes. Returns it.

        Wrappers (DistributedDataParallel, DataParallel, compiled modules) are removed, so that names have no prefix.

        Raises
        ------
        CaptureError
            If it is not a module, or another model was set before.
        """
        if not isinstance(model, nn.Module):
            raise CaptureError(f"the model is a torch.nn.Module, not {type(model).__name__}")
        root = unwrap(model)
        self.parts.steps.ranks.note_around(root, model)
        if self.parts.models.root is not None and self.parts.models.root is not root:
            raise CaptureError("this exporter already has a model; use another exporter for another model")
        if self.parts.models.root is None:
            self.parts.models.set_root(root)
            self.parts.rewire()
        return model

    def set_optimizer(self, optimizer: Optimizer | Iterable[Optimizer] | None) -> None:
        """Set the optimizer whose step ends a training step; of several, the last one's step does.

        None: each training forward of the model is a step. An empty sequence: the user calls `step`.

        Raises
        ------
        CaptureError
            If a given object is not an optimizer.
        """
        given = observable(optimizer)
        self.parts.optimizers.by_hand = optimizer is not None and not given
        self.parts.optimizers.take(given)
        self.parts.watch_optimizers()
        self.parts.rewire()

    def set_loss(self, loss: nn.Module | Callable[..., Any] | Iterable[str]) -> None:
        """Set the loss: a module, a function of ``torch.nn.functional``, or names of such functions.

        Its first two arguments are published as ``network_output`` and ``input_labels``, its result as ``loss_terms``.
        In a pass outside the training the result is also the ``loss``, unless several losses are called in the pass or
        the training's loss has further terms. A training's ``loss`` is the tensor that ``backward`` is called on, with
        or without this method.

        Raises
        ------
        CaptureError
            If it is a function from elsewhere, whose labels cannot be observed.
        """
        self.parts.losses.add(loss)
        self.parts.rewire()

    @property
    def modules(self) -> list[nn.Module]:
        """The observed modules."""
        return list(self.parts.demand.modules.values())

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The observed modules with their dotted paths."""
        return list(self.parts.demand.modules.items())

    @property
    def model(self) -> nn.Module | None:
        """The root of the network, without wrappers."""
        return self.parts.models.root

    def freeze_module(self, module: nn.Module | str) -> list[str]:
        """Stop training a module (or the module at a dotted path); returns the names of the frozen parameters.

        Each parameter's ``requires_grad`` becomes False and its gradient None, so that an optimizer with momentum or
        weight decay leaves it alone too.

        Raises
        ------
        CaptureError
            If there is no such module.
        """
        return self.parts.models.freeze(module, self.parts.demand.modules)

    def train(self, train: bool = True) -> None:
        """Publish again, after `test`; ``train(False)`` is ``test()``."""
        self.parts.problems.enabled = train
        self.parts.gate.open = train and self.parts.gate.attached

    def test(self, test: bool = True) -> None:
        """Publish nothing and count nothing until `train` is called."""
        self.train(not test)

    # -- the clock ------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """How many optimizer steps have taken place, including those before a restart."""
        self.parts.steps.settle()
        return self.parts.clock.step

    def step(self) -> None:
        """End the step, in loops without a known optimizer."""
        if self.parts.gate.open:
            self.parts.steps.end_by_hand()

    def start_at(self, global_step: int, train_step: int, epoch: int) -> None:
        """Set the counters after a restart. If `train_step` is in the middle of an epoch, the epoch is continued."""
        self.parts.steps.start_at(global_step, train_step, epoch)

    @property
    def train_step(self) -> int:
        """How many optimizer steps have taken place in this epoch."""
        return self.parts.clock.train_step

    @property
    def epoch(self) -> int:
        """How many epochs have ended."""
        return self.parts.clock.epoch

    @property
    def steps_seen(self) -> int:
        """How many steps have ended since this exporter began to count."""
        return self.global_step - self.parts.clock.first_step

    def epoch_finished(self) -> None:
        """End the epoch: publish ``epoch_finished``; the next step is the first of the next epoch."""
        self.parts.steps.finish_epoch()

    def finish(self) -> None:
        """End the run: end the last step of a loop without an optimizer, and run each probe for the last time."""
        self.parts.steps.settle_losses()
        self.parts.steps.finish()
        self.parts.steps.release_losses()
        self.parts.retrospect.tell(self.steps_seen)
        self.parts.wiring.asides.end()
        if self.parts.gate.attached:
            self.parts.wiring.check()
        self.parts.probes.finish()

    def detach(self) -> None:
        """Remove every hook, which leaves the model as it was."""
        self.parts.detach()

    # -- what was seen --------------------------------------------------------------------------------------

    @property
    def problems(self) -> list[dict[str, Any]]:
        """What is not observed, with the reasons."""
        return self.parts.problems.all

    @property
    def unended(self) -> dict[str, int] | None:
        """The step that was open when the run ended, with its `passes`, which belong to no training step."""
        return self.parts.retrospect.unended

    @property
    def silent(self) -> list[str]:
        """Hooked modules whose forward was never seen: bypassed, compiled away, or not part of the forward."""
        return self.parts.wiring.silent(self.parts.demand.modules)

    # -- data from the user ---------------------------------------------------------------------------------

    def log(self, kind: str, value: Any) -> None:
        """Publish a value of the user under `kind`, which may be new: a loss, a learning rate.

        It belongs to the open step, or to the last one if none is open (right after ``optimizer.step()``).

        Raises
        ------
        MessageError
            If the value cannot be made a tensor, or `kind` is a kind of modules.
        """
        self.parts.values.log(kind, value)

    def samples(self, ids: Any) -> None:
        """Set the datapoints of the next training forward, instead of those of the DataLoader's batch.

        Published as ``sample_ids``, if a capture takes these.

        Parameters
        ----------
        ids : sequence of int, array or Tensor
            Of shape (batch,).

        Raises
        ------
        MessageError
            If they are not integers in one dimension.
        """
        self.parts.passes.samples.give(ids)

    def tag(self, name: str) -> AbstractContextManager[None]:
        """Give every pass inside this context the tag `name`; such passes are never training steps.

        Raises
        ------
        CaptureError
            If `name` is empty or ``"default"``.
        """
        return self.parts.passes.tag(name)

    def probe(
        self, name: str, inputs: Any, labels: Any = None, *, every: int = 1, batch_size: int | None = None
    ) -> None:
        """Run the model on fixed inputs, in eval mode without gradients: now, after each `every` steps, at the end.

        Activations and output are published under the tag `name`; mode, buffers and random generators are restored.

        Parameters
        ----------
        name : str
            The tag.
        inputs : Tensor, tuple or dict
            The model's arguments: ``model(inputs)``, ``model(*inputs)`` or ``model(**inputs)``.
        labels : Tensor, optional
            Published as ``input_labels``, so that accuracies can be computed.
        every : int
            Steps between two passes.
        batch_size : int, optional
            Splits the inputs along their first axis to save memory; the results are joined again.

        Raises
        ------
        CaptureError
            If there is no model, or it is lazy; if the name is not a new tag; if `every` or `batch_size` is not a
            positive integer.
        """
        self.parts.probes.add(name, inputs, labels, every, batch_size)

    def probe_first(self, plan: ProbePlan, name: str = PROBE) -> None:
        """Probe the model on copies of the first datapoints that the program calls it with.

        They come from evaluations if one ran within the first `every` steps, else from the training. The probe runs
        after every `every` steps and at the end. If an argument is an object that a forward can change, such as a
        cache, there is no probe, and a problem is noted.

        Parameters
        ----------
        plan : ProbePlan
            Later calls add datapoints only while their tensors have the same shapes apart from the number of rows.
        name : str
            The tag. A later `probe` may take it over.
        """
        self.parts.probes.add_first(name, plan)

    def take_turns(self, nbytes: int) -> None:
        """Keep at most this many bytes of weights per step for computing updates; the parameters take turns."""
        self.parts.steps.parameters.asked.turns = UpdateTurns(nbytes, self.parts.problems)

    # -- callbacks for hand-written loops -------------------------------------------------------------------

    def new_input_data(self, *args: Tensor) -> None:
        """Publish the network's input; begins a step if none is open."""
        self.parts.steps.begin()
        self.parts.publisher.publish_leaves("input_data", None, args if len(args) != 1 else args[0], DEFAULT_TAG)

    def new_output_and_labels(self, network_output: Tensor, labels: Tensor) -> None:
        """Publish the network's output and the labels."""
        self._publish("network_output", None, network_output)
        self._publish("input_labels", None, labels)

    def new_loss(self, loss: Tensor) -> None:
        """Publish the loss. From then on, the tensor that ``backward`` is called on is not published as the loss."""
        self.parts.values.loss_is_logged(DEFAULT_TAG, self.parts.passes.now.tag)
        self._publish("loss", None, loss)

    def new_activations(self, module: nn.Module, in_: Any, out_: Any) -> None:
        """Publish a module's inputs and output."""
        self._publish("layer_inputs", module, arguments_of(in_, {}) if isinstance(in_, tuple) else in_)
        self._publish("activations", module, out_)

    def new_layer_gradients(self, module: nn.Module, gradients: Any) -> None:
        """Publish the gradients of the loss with respect to a module's output."""
        # torch's backward hooks get a tuple even for a single output
        value = arguments_of(gradients, {}) if isinstance(gradients, tuple) else gradients
        self._publish("layer_gradients", module, value)

    def new_parameter_gradients(self, module: nn.Module, gradients: Sequence[Tensor | None]) -> None:
        """Publish the gradients of the loss with respect to a module's weight and bias, in this order."""
        for kind, gradient in zip(("weight_gradients", "bias_gradients"), gradients, strict=False):
            if gradient is not None:
                self._publish(kind, module, gradient)

    def _publish(self, kind: str, module: nn.Module | None, value: Any) -> None:
        parts = self.parts
        path = None if module is None else parts.models.path_of(module, parts.demand.modules)
        parts.publisher.publish_leaves(kind, path, value, parts.passes.now.tag)

    def set_apart(self, apart: Apart | None) -> None:
        """Observe for one receiver, in each step, streams that no capture takes; None ends this. See `Apart`."""
        self.parts.demand.set_apart(apart)
        self.parts.rewire()

    def set_schedule(self, captures: Iterable[Capture]) -> None:
        """Replace the captures between two steps by captures that take the same streams in other steps.

        `captures` stays as given.
        """
        self.parts.demand.replace_captures(tuple(captures))
        self.parts.publisher.forget_captures()

    # -- assembly -------------------------------------------------------------------------------------------

    def check(self, receivers: Iterable[Receiver] | None = None, logged: Iterable[str] = ()) -> None:
        """Check that everything the receivers need can be observed, or is one of the `logged` kinds.

        Raises
        ------
        CaptureError
            Names what is missing and what is available. Also raised if the capture matches no module.
        """
        self.parts.demand.check(
            self.message_bus.receivers if receivers is None else receivers, logged, self.parts.models.candidates()
        )

    # -- the loss without a name ----------------------------------------------------------------------------

    def watch_backward(self) -> None:
        """Until `detach`, publish the tensor that ``backward`` is called on as the loss, even if no loss was set."""
        self.parts.differentiation.is_watched = True
        self.parts.rewire()
