"""A training loop → messages, through PyTorch's own hooks.

The contract is in ``docs/architecture.md`` ("What is observed, and when"). In short: a step is one optimizer step; the
messages of step k all belong to the batch and the weights W_k of that step; watching changes nothing; what nobody wants
is neither hooked nor copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tracer.errors import CaptureError
from tracer.messaging.bus import MessageBus, Receiver
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.observing.capture import Capture
from tracer.observing.optimizers import observable
from tracer.observing.parts import Parts
from tracer.observing.pytorch.tensors import arguments_of
from tracer.observing.pytorch.wrappers import unwrap


class Exporter:
    """Listens to a training loop and publishes what it sees on a bus.

    `tracer.record` wires one for the common case. By hand: give it the model (`set_model`), the optimizer
    (`set_optimizer`), the loss (`set_loss`), call `epoch_finished`, and `finish` and `detach` at the end. Receivers may
    join the bus at any time.

    Parameters
    ----------
    depth : int or None
        Which modules are observed, if no `capture` says so: modules exactly this deep below the root and leaves above;
        -1 for all leaves; None for every leaf and every module that has parameters of its own.
    module_filter : iterable of type, optional
        Only modules that are instances of one of these classes.
    message_bus : MessageBus, optional
        By default a new one of its own.
    capture : Capture or iterable of Capture, optional
        What may be observed, for all receivers of the bus; by default all kinds of the modules given by `depth` and
        `module_filter`, in full.
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
            capture = Capture(kinds=KINDS, depth=depth, types=tuple(module_filter) if module_filter else None)
        elif depth is not None or module_filter is not None:
            raise CaptureError("give an exporter a capture, or depth and module_filter, not both")
        self.captures: tuple[Capture, ...] = (capture,) if isinstance(capture, Capture) else tuple(capture)
        self.strict = strict
        self.message_bus = message_bus if message_bus is not None else MessageBus("exporter")
        self._parts = parts = Parts(self.message_bus, self.captures, strict=strict)
        self.clock = parts.clock
        self.gate = parts.gate
        self.optimizers = parts.optimizers
        self.demand = parts.demand
        self.publisher = parts.publisher
        self.ranks = parts.ranks
        self.looked_at: Callable[[], Mapping[str, nn.Module]] = dict
        """Gives the models that the program has besides those that are observed, by name, for a launcher."""
        self.message_bus.watch(self._parts.layout.rewire)

    # -- what to listen to ----------------------------------------------------------------------------------

    def add_modules(self, module: nn.Module | tuple[str, nn.Module], recursive: bool = True) -> None:
        """Observe a module, or a pair (name, module), and unless told otherwise all below it.

        Parts of the model have their names there. Another module whose paths something else has got already is named
        after its class, if it has no name, or gets an underscore at the end of it.

        Raises
        ------
        CaptureError
            If it is neither.
        """
        name, one = module if isinstance(module, tuple) and len(module) == 2 else ("", module)
        if not isinstance(one, nn.Module) or not isinstance(name, str):
            raise CaptureError(f"add_modules takes a module or a pair (name, module), not {type(module).__name__}")
        self._parts.models.add(name, unwrap(one), recursive)
        self._parts.layout.rewire()

    def __call__(self, module: nn.Module, recursive: bool = True) -> nn.Module:
        """`add_modules`, returning the module: for use inside a constructor."""
        self.add_modules(module, recursive)
        return module

    def set_model(self, model: nn.Module) -> nn.Module:
        """Name the root of the network; its forward passes are what steps and passes are made of. Returns it.

        A wrapper (DistributedDataParallel, DataParallel, a compiled module) is looked through, so names have no prefix.

        Raises
        ------
        CaptureError
            If it is not a module, or another model was set before.
        """
        if not isinstance(model, nn.Module):
            raise CaptureError(f"the model is a torch.nn.Module, not {type(model).__name__}")
        root = unwrap(model)
        self.ranks.note_around(root, model)
        if self._parts.models.root is not None and self._parts.models.root is not root:
            raise CaptureError("this exporter already has a model; use another exporter for another model")
        if self._parts.models.root is None:
            self._parts.models.set_root(root)
            self._parts.layout.rewire()
        return model

    def forget_model(self) -> None:
        """Take back `set_model` and `add_modules`, for a launcher that learns only later what the model is.

        Raises
        ------
        CaptureError
            If a step has begun.
        """
        if self.clock.open or self.clock.last is not None:
            raise CaptureError("the model cannot be changed once training has begun")
        self._parts.wiring.drop_root()
        self._parts.models.forget()
        self._parts.layout.rewire()

    def let_go(self, *, collect: bool = False) -> None:
        """Stop observing models and optimizers that nobody else has any more, for a launcher; not during a forward.

        Parameters
        ----------
        collect : bool
            Whether Python's garbage is collected for that: models whose parts refer to each other are there until then.
        """
        if not self._parts.passes.now.depth:
            self._parts.layout.let_go(collect=collect)

    def set_optimizer(self, optimizer: Optimizer | Iterable[Optimizer] | None) -> None:
        """Name the optimizer whose step ends a step; of several, the last one's does.

        None: each training forward of the model is a step. An empty sequence: the user calls `step`.

        Raises
        ------
        CaptureError
            If one is not an optimizer.
        """
        given = observable(optimizer)
        self.optimizers.by_hand = optimizer is not None and not given
        self._parts.wiring.keep_optimizers(given)
        self.optimizers.take(given)
        self._parts.watching.watch_optimizers()
        self._parts.layout.rewire()

    def set_loss(self, loss: nn.Module | Callable[..., Any] | Iterable[str]) -> None:
        """Name the loss: a module, a function of ``torch.nn.functional``, or names of such functions.

        Its first two arguments are published as ``network_output`` and ``input_labels``, its result as ``loss_terms``;
        in a pass aside the result is also the ``loss``, unless more than one is called in the pass, or the training
        makes its loss of more. The ``loss`` of a training is what ``backward`` is called on, with and without this.

        Raises
        ------
        CaptureError
            If it is a function of another place, of which no labels can be had.
        """
        self._parts.losses.add(loss)
        self._parts.layout.rewire()

    @property
    def modules(self) -> list[nn.Module]:
        """The observed modules."""
        return list(self.demand.modules.values())

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The observed modules with their dotted paths."""
        return list(self.demand.modules.items())

    @property
    def tops(self) -> list[tuple[str, nn.Module]]:
        """The model, and the modules that were added and are not part of it, by their names."""
        return self._parts.models.tops

    @property
    def model(self) -> nn.Module | None:
        """The root of the network, without wrappers."""
        return self._parts.models.root

    def freeze_module(self, module: nn.Module | str) -> list[str]:
        """Stop training a module (or the one at a dotted path); returns the names of the parameters it froze.

        Each parameter's ``requires_grad`` becomes False and its gradient None, so that an optimizer with momentum or
        weight decay leaves it alone too.

        Raises
        ------
        CaptureError
            If there is no such module.
        """
        return self._parts.models.freeze(module, self.demand.modules)

    def train(self, train: bool = True) -> None:
        """Publish again, after `test`; ``train(False)`` is ``test()``."""
        self._parts.problems.enabled = train
        self.gate.open = train and self.gate.attached

    def test(self, test: bool = True) -> None:
        """Publish nothing and count nothing until `train` is called."""
        self.train(not test)

    # -- the clock ------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """How many optimizer steps have taken place; after a restart, those before it included."""
        self._parts.steps.settle()
        return self.clock.step

    def step(self) -> None:
        """End the step: for loops without an optimizer that this exporter knows."""
        if self.gate.open:
            self._parts.steps.end_by_hand()

    def start_at(self, global_step: int, train_step: int, epoch: int) -> None:
        """Count from here: the training goes on after a restart. In the middle of an epoch, that is not begun again."""
        self._parts.steps.start_at(global_step, train_step, epoch)

    @property
    def train_step(self) -> int:
        """How many of them in this epoch."""
        return self.clock.train_step

    @property
    def epoch(self) -> int:
        """How many epochs have ended."""
        return self.clock.epoch

    @property
    def steps_seen(self) -> int:
        """How many steps were taken since this exporter began to count."""
        return self.global_step - self.clock.first_step

    def epoch_finished(self) -> None:
        """End the epoch: publish ``epoch_finished``; the next step is the first of the next epoch."""
        self._parts.steps.finish_epoch()

    def epoch_is_over(self) -> None:
        """End the epoch as soon as the next step begins: an evaluation before that still belongs to the epoch."""
        self._parts.steps.epochs.over = True

    @property
    def epochs_seen(self) -> bool:
        """Whether somebody said that an epoch is over."""
        return self._parts.steps.epochs.seen

    @epochs_seen.setter
    def epochs_seen(self, seen: bool) -> None:
        self._parts.steps.epochs.seen = seen

    def finish_step(self) -> None:
        """End a step that is open: of a loop without an optimizer, or one in which some optimizer has stepped."""
        self._parts.steps.finish()

    def finish(self) -> None:
        """End the run: the last step of a loop without an optimizer, and the last pass of each probe."""
        self._parts.steps.settle_losses()
        self._parts.steps.finish()
        self._parts.steps.release_losses()
        self._parts.retrospect.tell(self.steps_seen)
        self._parts.wiring.asides.end()
        if self.gate.attached:
            self._parts.wiring.check()
        self._parts.probes.finish()

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        if self.gate.open:  # what an exception has left behind
            self._parts.steps.settle_losses()
            self._parts.steps.release_losses()
        self._parts.wiring.detach(self.demand.modules)
        self.gate.attached = self.gate.open = False
        self._parts.layout.detach()
        self._parts.steps.forget()
        self.publisher.forget_places()
        self._parts.passes.now.inputs = []
        self.message_bus.unwatch(self._parts.layout.rewire)
        self._parts.watching.end()

    @property
    def attached(self) -> bool:
        """Whether it has not been detached."""
        return self.gate.attached

    # -- what was seen --------------------------------------------------------------------------------------

    @property
    def problems(self) -> list[dict[str, Any]]:
        """What is not observed, and why."""
        return self._parts.problems.all

    def note_problem(self, what: str, why: str, *, warn: bool = True) -> None:
        """Note what is not observed, and why; with a warning, if something is missing."""
        self._parts.problems.note(what, why, warn=warn)

    @property
    def forwards_seen(self) -> int:
        """How many forwards of the model were seen, in training and aside."""
        return self._parts.forwards.seen

    @property
    def losses_seen(self) -> int:
        """How often a loss that was named was called."""
        return self._parts.losses.seen

    @property
    def optimizer_calls(self) -> int:
        """How many steps of optimizers were seen."""
        return self._parts.optimizer_steps.calls

    @property
    def unended(self) -> dict[str, int] | None:
        """The step that was open when the run ended, with its `passes`: they are of no training step."""
        return self._parts.retrospect.unended

    @property
    def silent(self) -> list[str]:
        """Hooked modules whose forward was never seen: bypassed, compiled away, or not part of the forward."""
        return self._parts.wiring.silent(self.demand.modules)

    @property
    def loss_is_silent(self) -> bool:
        """Whether a loss was given, and steps were taken, but it was never seen: another name of it was called."""
        return len(self._parts.losses.all) == 1 and self.losses_seen == 0 and self.steps_seen > 0

    @property
    def learns_in_eval_mode(self) -> bool:
        """Whether the model was in eval mode in the first step, and had no training pass since."""
        return self._parts.forwards.began_in_eval_mode and not self._parts.forwards.training

    def is_training_pass(self, module: nn.Module) -> bool:
        """Whether a forward of a module that begins now is one of the training."""
        return self._parts.passes.is_training(module)

    # -- what the user says ---------------------------------------------------------------------------------

    def log(self, kind: str, value: Any) -> None:
        """Publish a value of the user's own under `kind`, which may be new: a loss, a learning rate.

        It belongs to the open step, or to the last one if none is open (right after ``optimizer.step()``).

        Raises
        ------
        MessageError
            If the value cannot be made a tensor, or `kind` is a kind of modules.
        """
        self._parts.values.log(kind, value)

    def tag(self, name: str) -> AbstractContextManager[None]:
        """Give every pass inside this context the tag `name`; such passes are never training steps.

        Raises
        ------
        CaptureError
            If it is empty or ``"default"``.
        """
        return self._parts.passes.tag(name)

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
            Of the model: ``model(inputs)``, ``model(*inputs)`` or ``model(**inputs)``.
        labels : Tensor, optional
            Published as ``input_labels``, so that accuracies can be computed.
        every : int
            Steps between two passes.
        batch_size : int, optional
            Split the inputs along their first axis to save memory; what is published is put together again.

        Raises
        ------
        CaptureError
            If there is no model, or it is lazy; if the name is not a new tag; if `every` or `batch_size` is not a
            positive integer.
        """
        self._parts.probes.add(name, inputs, labels, every, batch_size)

    def probe_first(self, name: str, count: int, *, every: int = 1) -> None:
        """Probe the model on the first datapoints that it is given itself, of whose calls copies are kept.

        They are those of evaluations, if there was one before the first `every` steps were over, else the training's.
        The passes are after each `every` steps, and at the end. Where a model is called with anything that its forward
        could change, such as a cache, there is none, and a problem says so.

        Parameters
        ----------
        name : str
            The tag.
        count : int
            Datapoints, at most: of further calls only as long as their tensors have the same shapes otherwise.
        every : int
            Steps between two passes.
        """
        self._parts.probes.add_first(name, count, every)

    # -- callbacks for hand-written loops -------------------------------------------------------------------

    def new_input_data(self, *args: Tensor) -> None:
        """Publish the network's input; begins a step if none is open."""
        self._parts.steps.begin()
        self.publisher.publish_leaves("input_data", None, args if len(args) != 1 else args[0], DEFAULT_TAG)

    def new_output_and_labels(self, network_output: Tensor, labels: Tensor) -> None:
        """Publish the network's output and the labels."""
        self.publisher.publish_leaves("network_output", None, network_output, self._parts.passes.now.tag)
        self.publisher.publish_leaves("input_labels", None, labels, self._parts.passes.now.tag)

    def new_loss(self, loss: Tensor) -> None:
        """Publish the loss; from then on, what ``backward`` is called on is none."""
        self._parts.values.loss_is_logged(DEFAULT_TAG, self._parts.passes.now.tag)
        self.publisher.publish_leaves("loss", None, loss, self._parts.passes.now.tag)

    def loss_is_logged(self) -> None:
        """Leave it to the user to say what the loss of the training is, as ``log("loss", value)`` does."""
        self._parts.values.loss_is_logged(DEFAULT_TAG)

    def new_activations(self, module: nn.Module, in_: Any, out_: Any) -> None:
        """Publish a module's inputs and output."""
        path = self._parts.models.path_of(module, self.demand.modules)
        inputs = arguments_of(in_, {}) if isinstance(in_, tuple) else in_
        self.publisher.publish_leaves("layer_inputs", path, inputs, self._parts.passes.now.tag)
        self.publisher.publish_leaves("activations", path, out_, self._parts.passes.now.tag)

    def new_layer_gradients(self, module: nn.Module, gradients: Any) -> None:
        """Publish the gradients of the loss with respect to a module's output."""
        if isinstance(gradients, tuple):  # as a backward hook of torch's gets them, also of one output
            gradients = arguments_of(gradients, {})
        self.publisher.publish_leaves(
            "layer_gradients",
            self._parts.models.path_of(module, self.demand.modules),
            gradients,
            self._parts.passes.now.tag,
        )

    def new_parameter_gradients(self, module: nn.Module, gradients: Sequence[Tensor | None]) -> None:
        """Publish the gradients of the loss with respect to a module's weight and bias, in this order."""
        path = self._parts.models.path_of(module, self.demand.modules)
        for kind, gradient in zip(("weight_gradients", "bias_gradients"), gradients, strict=False):
            if gradient is not None:
                self.publisher.publish_leaves(kind, path, gradient, self._parts.passes.now.tag)

    # -- assembly -------------------------------------------------------------------------------------------

    def check(self, receivers: Iterable[Receiver] | None = None, logged: Iterable[str] = ()) -> None:
        """Make sure that everything the receivers need can be observed, or is one of the `logged` kinds.

        Raises
        ------
        CaptureError
            With a sentence that names what is missing and what can be had; or if the capture matches no module at all.
        """
        self.demand.check(
            self.message_bus.receivers if receivers is None else receivers, logged, self._parts.models.candidates()
        )

    def structure(self) -> dict[str, Any]:
        """The model as JSON: names and classes of modules, what convolutions are, parameters, tied aliases."""
        return self._parts.models.structure()

    def models(self) -> list[dict[str, Any]]:
        """The models that are observed, and those that are only looked at, as JSON.

        Each with its name, class and number of parameters, and `trained`: whether an optimizer that was given trains
        it. A model without a name is the root of the network.
        """
        return self._parts.models.summaries(self.optimizers.all, self.looked_at())

    def trainers(self) -> list[dict[str, str]]:
        """The optimizers that were given, as JSON: the class of each, and the path of what it trains."""
        return [
            {"class": type(one).__name__, "trains": self._parts.models.trained_by(one)} for one in self.optimizers.all
        ]

    # -- what PyTorch does while it is watched --------------------------------------------------------------

    def watch_backward(self) -> None:
        """Publish as the loss what ``backward`` is called on, until `detach`, although no loss is named."""
        self._parts.differentiation.is_watched = True
        self._parts.layout.rewire()

    def backward_called(self, tensor: Tensor) -> None:
        """Publish a scalar as the loss that is differentiated; if its ``backward`` is watched, only once."""
        self._parts.differentiation.told(tensor)
