"""A training loop → messages, through PyTorch's own hooks.

The contract is in ``docs/architecture.md`` ("What is observed, and when"). In short: a step is one optimizer step; the
messages of step k all belong to the batch and the weights W_k of that step; watching changes nothing; what nobody wants
is neither hooked nor copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tracer.errors import CaptureError
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import DATA_KINDS, DEFAULT_TAG
from tracer.messaging.receiver import Receiver
from tracer.observing.capture import Capture
from tracer.observing.demand import Apart
from tracer.observing.optimizers import observable
from tracer.observing.part import Ground
from tracer.observing.parts import Parts
from tracer.observing.probes import PROBE, ProbePlan
from tracer.observing.pytorch.leaves import arguments_of
from tracer.observing.pytorch.wrappers import unwrap
from tracer.observing.turns import Turns


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
        What may be observed, for all receivers of the bus; by default all kinds but those of state, of the modules
        given by `depth` and `module_filter`, in full.
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
        self.parts = Parts(Ground(self.message_bus, self.captures, strict=strict))
        """What it is made of, for whoever records a training and knows more of it than a user says."""

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
        self.parts.models.add(name, unwrap(one), recursive)
        self.parts.rewire()

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
        self.parts.steps.ranks.note_around(root, model)
        if self.parts.models.root is not None and self.parts.models.root is not root:
            raise CaptureError("this exporter already has a model; use another exporter for another model")
        if self.parts.models.root is None:
            self.parts.models.set_root(root)
            self.parts.rewire()
        return model

    def set_optimizer(self, optimizer: Optimizer | Iterable[Optimizer] | None) -> None:
        """Name the optimizer whose step ends a step; of several, the last one's does.

        None: each training forward of the model is a step. An empty sequence: the user calls `step`.

        Raises
        ------
        CaptureError
            If one is not an optimizer.
        """
        given = observable(optimizer)
        self.parts.optimizers.by_hand = optimizer is not None and not given
        self.parts.optimizers.take(given)
        self.parts.watch_optimizers()
        self.parts.rewire()

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
        """Stop training a module (or the one at a dotted path); returns the names of the parameters it froze.

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
        """How many optimizer steps have taken place; after a restart, those before it included."""
        self.parts.steps.settle()
        return self.parts.clock.step

    def step(self) -> None:
        """End the step: for loops without an optimizer that this exporter knows."""
        if self.parts.gate.open:
            self.parts.steps.end_by_hand()

    def start_at(self, global_step: int, train_step: int, epoch: int) -> None:
        """Count from here: the training goes on after a restart. In the middle of an epoch, that is not begun again."""
        self.parts.steps.start_at(global_step, train_step, epoch)

    @property
    def train_step(self) -> int:
        """How many of them in this epoch."""
        return self.parts.clock.train_step

    @property
    def epoch(self) -> int:
        """How many epochs have ended."""
        return self.parts.clock.epoch

    @property
    def steps_seen(self) -> int:
        """How many steps were taken since this exporter began to count."""
        return self.global_step - self.parts.clock.first_step

    def epoch_finished(self) -> None:
        """End the epoch: publish ``epoch_finished``; the next step is the first of the next epoch."""
        self.parts.steps.finish_epoch()

    def finish(self) -> None:
        """End the run: the last step of a loop without an optimizer, and the last pass of each probe."""
        self.parts.steps.settle_losses()
        self.parts.steps.finish()
        self.parts.steps.release_losses()
        self.parts.retrospect.tell(self.steps_seen)
        self.parts.wiring.asides.end()
        if self.parts.gate.attached:
            self.parts.wiring.check()
        self.parts.probes.finish()

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        self.parts.detach()

    # -- what was seen --------------------------------------------------------------------------------------

    @property
    def problems(self) -> list[dict[str, Any]]:
        """What is not observed, and why."""
        return self.parts.problems.all

    @property
    def unended(self) -> dict[str, int] | None:
        """The step that was open when the run ended, with its `passes`: they are of no training step."""
        return self.parts.retrospect.unended

    @property
    def silent(self) -> list[str]:
        """Hooked modules whose forward was never seen: bypassed, compiled away, or not part of the forward."""
        return self.parts.wiring.silent(self.parts.demand.modules)

    # -- what the user says ---------------------------------------------------------------------------------

    def log(self, kind: str, value: Any) -> None:
        """Publish a value of the user's own under `kind`, which may be new: a loss, a learning rate.

        It belongs to the open step, or to the last one if none is open (right after ``optimizer.step()``).

        Raises
        ------
        MessageError
            If the value cannot be made a tensor, or `kind` is a kind of modules.
        """
        self.parts.values.log(kind, value)

    def samples(self, ids: Any) -> None:
        """Say of which datapoints of the data set the next training forward is, in the place of what a DataLoader says.

        Published as ``sample_ids``, if a capture takes these.

        Parameters
        ----------
        ids : sequence of int, array or Tensor
            Of shape (batch,).

        Raises
        ------
        MessageError
            If they are no integers in one dimension.
        """
        self.parts.passes.samples.give(ids)

    def tag(self, name: str) -> AbstractContextManager[None]:
        """Give every pass inside this context the tag `name`; such passes are never training steps.

        Raises
        ------
        CaptureError
            If it is empty or ``"default"``.
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
        self.parts.probes.add(name, inputs, labels, every, batch_size)

    def probe_first(self, plan: ProbePlan, name: str = PROBE) -> None:
        """Probe the model on the first datapoints that it is given itself, of whose calls copies are kept.

        They are those of evaluations, if there was one before the first `every` steps were over, else the training's.
        The passes are after each `every` steps, and at the end. Where a model is called with anything that its forward
        could change, such as a cache, there is none, and a problem says so.

        Parameters
        ----------
        plan : ProbePlan
            Of further calls datapoints are taken only as long as their tensors have the same shapes otherwise.
        name : str
            The tag. `probe` may take it over.
        """
        self.parts.probes.add_first(name, plan)

    def take_turns(self, nbytes: int) -> None:
        """Keep at most so many bytes of weights in a step to make updates from; the parameters take turns."""
        self.parts.steps.parameters.turns = Turns(nbytes, self.parts.problems)

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
        """Publish the loss. From then on, what ``backward`` is called on is not taken for it."""
        self.parts.values.loss_is_logged(DEFAULT_TAG, self.parts.passes.now.tag)
        self._publish("loss", None, loss)

    def new_activations(self, module: nn.Module, in_: Any, out_: Any) -> None:
        """Publish a module's inputs and output."""
        self._publish("layer_inputs", module, arguments_of(in_, {}) if isinstance(in_, tuple) else in_)
        self._publish("activations", module, out_)

    def new_layer_gradients(self, module: nn.Module, gradients: Any) -> None:
        """Publish the gradients of the loss with respect to a module's output."""
        # torch's backward hooks get a tuple, also of one output
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
        """Observe for one listener alone what no capture takes, in each step; None: no longer. See `Apart`."""
        self.parts.demand.set_apart(apart)
        self.parts.rewire()

    def set_schedule(self, captures: Iterable[Capture]) -> None:
        """Observe by captures that take the same streams as those that were given, in other steps. Between two steps.

        `captures` stays what was given.
        """
        self.parts.demand.replace_captures(tuple(captures))
        self.parts.publisher.forget_captures()

    # -- assembly -------------------------------------------------------------------------------------------

    def check(self, receivers: Iterable[Receiver] | None = None, logged: Iterable[str] = ()) -> None:
        """Make sure that everything the receivers need can be observed, or is one of the `logged` kinds.

        Raises
        ------
        CaptureError
            With a sentence that names what is missing and what can be had; or if the capture matches no module at all.
        """
        self.parts.demand.check(
            self.message_bus.receivers if receivers is None else receivers, logged, self.parts.models.candidates()
        )

    # -- what PyTorch does while it is watched --------------------------------------------------------------

    def watch_backward(self) -> None:
        """Publish as the loss what ``backward`` is called on, until `detach`, although no loss is named."""
        self.parts.differentiation.is_watched = True
        self.parts.rewire()
