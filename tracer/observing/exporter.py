"""A training loop → messages, through PyTorch's own hooks.

The contract is in ``docs/architecture.md`` ("What is observed, and when"). In short: a step is one optimizer step; the
messages of step k all belong to the batch and the weights W_k of that step; watching changes nothing; what nobody wants
is neither hooked nor copied.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional
from torch import Tensor, is_grad_enabled, nn
from torch._C import _current_graph_task_id
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import CaptureError, MessageError
from tracer.format.placement import is_distributed
from tracer.messaging.bus import MessageBus, Receiver, tell_of_model
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG, KINDS, NetworkMessage
from tracer.messaging.subscriber import unmet
from tracer.observing.capture import Capture
from tracer.observing.clock import At, Clock
from tracer.observing.demand import Demand
from tracer.observing.gradients import Gradients
from tracer.observing.objectives import Objectives, Terms
from tracer.observing.optimizers import Optimizers, skipped_inside, steps_within
from tracer.observing.parameter_table import Parameter, ParameterTable
from tracer.observing.parameters import Parameters
from tracer.observing.probes import NO_PROBES, FirstInputs, Probe, joinable, undisturbed
from tracer.observing.problems import Problems
from tracer.observing.publisher import Publisher
from tracer.observing.pytorch.autograd import (
    backward_node,
    calls_running,
    checkpointed_inputs,
    checkpointing,
    next_node,
    recomputing,
    recomputing_reentrant,
    traced,
    with_subclasses,
)
from tracer.observing.pytorch.compiled import (
    TOO_LATE,
    UNCOMPILED,
    Ticket,
    compiled_anything,
    left_uncompiled,
    tag_number,
    tag_of,
    unseen_regions,
)
from tracer.observing.pytorch.fast_path import Aside, may_take_it
from tracer.observing.pytorch.hanging import (
    Checklist,
    Hanging,
    after_accumulation,
    after_forward,
    after_step,
    before_forward,
    before_step,
    on_gradient,
)
from tracer.observing.pytorch.hooks import Gate, Hook, OpenCall, Role, Site
from tracer.observing.pytorch.loss_functions import LOSS_FUNCTIONS, LossFunction, ModelLoss, output_and_labels, unpatch
from tracer.observing.pytorch.loss_graph import Node, belongs_to_others, looks_back, next_of_thread
from tracer.observing.pytorch.patches import (
    unwatch_backward,
    unwatch_compiling,
    unwatch_scalers,
    unwatch_scripting,
    watch_backward,
    watch_compiling,
    watch_scalers,
    watch_scripting,
)
from tracer.observing.pytorch.structure import structure_of, summary_of
from tracer.observing.pytorch.tensors import arguments_of, copied, leaves, opaque
from tracer.observing.pytorch.wrappers import compiled_parts, named_parts, paths_of, unwrap, wrapped_by
from tracer.observing.ranks import Ranks
from tracer.observing.streams import StreamKey
from tracer.observing.undifferentiated import Undifferentiated


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

    # what steps that nobody records look at; side by side, it is fetched from memory at once
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_calls",
        "_check",
        "_check_steps",
        "_compiled_before",
        "_ended_at",
        "_epoch_open",
        "_epoch_over",
        "_gradients",
        "_idle",
        "_objectives",
        "_offered",
        "_over",
        "_parameters",
        "_passes_before",
        "_probes",
        "_problems",
        "_recomputed",
        "_root",
        "_table",
        "_tag_with_gradients",
        "_terms",
        "_training_passes",
        "_ungraded",
        "_user_tag",
        "clock",
        "demand",
        "forwards_seen",
        "gate",
        "losses_seen",
        "optimizer_calls",
        "optimizers",
        "publisher",
    )

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
        self.message_bus = message_bus if message_bus is not None else MessageBus("exporter")
        self.captures: tuple[Capture, ...] = (capture,) if isinstance(capture, Capture) else tuple(capture)
        self.strict = strict
        self.clock = Clock()
        self._problems = Problems(self.clock, strict=strict)
        self.gate = Gate(self._problems, next(_NUMBERS))
        self._table = ParameterTable()
        self.demand = Demand(self.message_bus, self.captures, self.clock, self._table, self._problems)
        self.publisher = Publisher(self.message_bus, self.demand, self.clock, self._problems)
        self.ranks = Ranks(self._table, self.demand, self.publisher)
        self._parameters = Parameters(self._table, self.demand, self.publisher, self.clock, self.ranks.replicas)
        self._gradients = Gradients(self.gate, self.clock, self.demand, self.publisher)
        self.losses_seen = 0
        self._terms = Terms(self.publisher, self.demand, self.clock, self._problems)
        self._objectives = Objectives(self.publisher, self.demand, self.clock, self._problems, self._terms)
        self._hears_backward = False  # although no loss was named
        self._told_by_hand: weakref.ref[Tensor] | None = None  # with `backward_called`, and `backward` has not come yet
        self._own: frozenset[int] = frozenset()  # ids of the parameters of what is observed
        self._trained_names: dict[int, str] = {}  # by optimizer, what it trains, as far as that was asked
        self._began_in_eval_mode = False  # whether the model was in eval mode all through the first step
        self._ended_at: Node | None = None
        # what a GradScaler gave, what it got, and the value of that
        self._last_scaled: tuple[weakref.ref[Tensor], Tensor] | None = None
        self.forwards_seen = 0  # of the root, in training and aside
        self.optimizer_calls = 0

        self._root: nn.Module | None = None
        # the top that each module's path leads to, as far as that was asked
        self._top_of: dict[str, weakref.ref[nn.Module]] = {}
        self._several = False  # whether there are several tops
        # the tag of the last pass that had gradients
        self._tag_with_gradients = DEFAULT_TAG
        self._added: list[tuple[str, nn.Module, bool]] = []
        self.optimizers = Optimizers()
        # whether torch had compiled code when the root's hook came; None: told
        self._compiled_before: bool | None = None
        self._steps_itself = False  # the user calls step(), neither an optimizer nor the forward ends a step
        self._losses: list[nn.Module | str] = []
        self._patched: dict[str, LossFunction] = {}
        weakref.finalize(self, unpatch, self._patched).atexit = False  # one that is dropped leaves no stand-ins
        self._lasting: dict[Any, list[Hanging]] = {}
        # by what they hang on, method and name: that, the hook, and where it hangs
        self._hung: dict[tuple[int, Role, str], tuple[Any, Hook, Hanging]] = {}
        self._former: dict[tuple[int, Role, str], tuple[Any, Hook, Hanging]] = {}
        self._check = Checklist()  # of all these
        self._check_steps = Checklist()  # of those on optimizers
        self._known: dict[tuple[str, Role], tuple[bool, bool]] = {}  # which hooks were called, and which are off
        # by path, what was computed last for a forward, and the hook on it
        self._watched: dict[str, tuple[weakref.ref[Tensor], Hanging]] = {}
        self._probes: list[Probe] = []
        self._offered: FirstInputs | None = None  # the probe that takes what the model is given
        self.looked_at: Callable[[], Mapping[str, nn.Module]] = dict
        """Gives the models that the program has besides those that are observed, by name, for a launcher."""
        self._logged: dict[tuple[str, str], tuple[At, int]] = {}

        self._silent: list[str] = []
        self._epoch_open = False
        self._epoch_over = False  # but the next one has not begun
        self._idle = False  # whether a step is open of which nobody wants anything
        self._over = False  # whether the open step ends as soon as the running backward is over
        self._training_passes = 0  # training forwards of the root
        self._passes_before = 0  # those of the steps that have ended
        self._undifferentiated = Undifferentiated()  # those of the open step, as far as they are recorded
        self._never_differentiated = 0  # and of the steps before
        self.epochs_seen = False
        """Whether somebody said that an epoch is over."""
        self.unended: dict[str, int] | None = None
        """The step that was open when the run ended, with its `passes`: they are of no training step."""
        self._skipped = 0
        self._user_tag: str | None = None
        self._calls: dict[tuple[str, str], int] = {}
        # calls of this step without gradients, by place: the first forwards of reentrant checkpoints, with torch's
        # number of their place in the order of autograd; and which of them were computed again in a backward
        self._ungraded: dict[str, list[tuple[int, int]]] = {}
        self._recomputed: dict[tuple[int, int, str], int] = {}
        self._recalled: dict[str, int] = {}  # the call that a module computed again, the last time
        self._untouched: set[int] = set()  # by id, modules that a hook would have compiled
        # ids of the tops that had a training forward in the open step, and in the one before, where the order of the
        # optimizers is not known
        self._called: set[int] = set()
        self._called_before: set[int] = set()
        # by id, the layers that have a fast path: what of ours hangs on them and inside
        self._layers: dict[int, list[tuple[Any, Hanging]]] = {}
        self._asides: dict[int, Aside] = {}  # by thread, the last layer for which hooks stepped aside
        self.message_bus.watch(self._rewire)

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
        self._added.append((self._free_name(name, unwrap(one)), unwrap(one), recursive))
        self._rewire()

    def _free_name(self, name: str, added: nn.Module) -> str:
        """The name of a module that is beside the model: one under which no path is another's."""
        tops = self.tops
        if any(one is added for _, top in tops for _, one in named_parts(top)):
            return name  # it is observed as what it is a part of
        taken = {path for prefix, top in tops for path in paths_of(top, prefix)}
        while not taken.isdisjoint(paths_of(added, name)):
            name = f"{name}_" if name else type(added).__name__.lower()
        return name

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
        outer: nn.Module | None = model
        while outer is not None and outer is not root:
            self.ranks.note(outer)
            outer = wrapped_by(outer)
        if self._root is not None and self._root is not root:
            raise CaptureError("this exporter already has a model; use another exporter for another model")
        if self._root is None:
            self._root = root
            added, self._added = self._added, []
            for name, one, recursive in added:
                self._added.append((self._free_name(name, one), one, recursive))
            self._rewire()
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
        for handle in self._lasting.pop("root", ()):
            handle.remove()
        self._root, self._added = None, []
        self._rewire()

    def let_go(self, *, collect: bool = False) -> None:
        """Stop observing models and optimizers that nobody else has any more, for a launcher; not during a forward.

        Parameters
        ----------
        collect : bool
            Whether Python's garbage is collected for that: models whose parts refer to each other are there until then.
        """
        if self.gate.passes.now.depth:
            return
        root = None if self._root is None else weakref.ref(self._root)
        added = [(name, weakref.ref(one), recursive) for name, one, recursive in self._added]
        take_optimizers_back = self.optimizers.let_go()
        hung = {key: (weakref.ref(on), hook, handle) for key, (on, hook, handle) in self._hung.items()}
        self._root, self._added, self.demand.modules, self._hung = None, [], {}, {}
        self._check = self._check_steps = Checklist()
        self._table.find(())
        self._table.note((), False)
        if collect:
            gc.collect()
        self._root = None if root is None else root()
        self._added = [(name, top, recursive) for name, was, recursive in added if (top := was()) is not None]
        for key in take_optimizers_back():  # another may get its number
            self._lasting.pop(key, None)
        self._hung = {key: (on, hook, handle) for key, (ref, hook, handle) in hung.items() if (on := ref()) is not None}
        if root is not None and self._root is None:
            self._lasting.pop("root", None)
        self._rewire()

    def set_optimizer(self, optimizer: Optimizer | Iterable[Optimizer] | None) -> None:
        """Name the optimizer whose step ends a step; of several, the last one's does.

        None: each training forward of the model is a step. An empty sequence: the user calls `step`.

        Raises
        ------
        CaptureError
            If one is not an optimizer.
        """
        if optimizer is not None and not isinstance(optimizer, Optimizer | Iterable):
            raise CaptureError(f"the optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
        given = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
        self._steps_itself = optimizer is not None and not given
        for one in given:
            if not isinstance(one, Optimizer):
                raise CaptureError(f"the optimizer is a torch.optim.Optimizer, not {type(one).__name__}")
        given = tuple(map(_with_hooks, given))
        for key in self._lasting.keys() - {"root", *map(id, given)}:  # another may get its number
            for handle in self._lasting.pop(key):
                handle.remove()
        self.optimizers.take(given)
        if self.gate.attached:
            watch_scalers(self)
        self._rewire()

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
        if isinstance(loss, nn.Module):
            self._losses.append(unwrap(loss))
        else:
            names = (
                [getattr(loss, "__name__", "")] if callable(loss) else [loss] if isinstance(loss, str) else list(loss)
            )
            loss = inspect.unwrap(loss) if callable(loss) else loss  # another recording may stand in for it
            for name in names:
                there = getattr(torch.nn.functional, name, None) if name in LOSS_FUNCTIONS else None
                if there is None or (callable(loss) and inspect.unwrap(there) is not loss):
                    raise CaptureError(
                        f"the loss is a module or a loss function of torch.nn.functional, not {loss!r}; others need "
                        "not be named, as what backward is called on is recorded, or log('loss', value)"
                    )
                self._losses.append(name)
        self._rewire()

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
        below = set() if self._root is None else {id(one) for one in walking.modules(self._root)}
        root = [] if self._root is None else [("", self._root)]
        return root + [(name, top) for name, top, _ in self._added if id(top) not in below]

    @property
    def model(self) -> nn.Module | None:
        """The root of the network, without wrappers."""
        return self._root

    def freeze_module(self, module: nn.Module | str) -> list[str]:
        """Stop training a module (or the one at a dotted path); returns the names of the parameters it froze.

        Each parameter's ``requires_grad`` becomes False and its gradient None, so that an optimizer with momentum or
        weight decay leaves it alone too.

        Raises
        ------
        CaptureError
            If there is no such module.
        """
        if isinstance(module, str):
            everything = dict(named_parts(self._root)) if self._root is not None else dict(self.demand.modules)
            if module not in everything:
                raise CaptureError(f"there is no module {module!r}; there are {', '.join(everything)}")
            module = everything[module]
        frozen = []
        for name, parameter in walking.named_parameters(module):
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                parameter.grad = None
                frozen.append(name)
        return frozen

    def train(self, train: bool = True) -> None:
        """Publish again, after `test`; ``train(False)`` is ``test()``."""
        self._problems.enabled = train
        self.gate.open = train and self.gate.attached

    def test(self, test: bool = True) -> None:
        """Publish nothing and count nothing until `train` is called."""
        self.train(not test)

    # -- the clock ------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """How many optimizer steps have taken place; after a restart, those before it included."""
        self._settle()
        return self.clock.step

    def step(self) -> None:
        """End the step: for loops without an optimizer that this exporter knows."""
        if self.gate.open:
            with self.gate.lock:
                if self._over:
                    self._settle()
                else:
                    self.gate.guard("step", self._end_step)

    def start_at(self, global_step: int, train_step: int, epoch: int) -> None:
        """Count from here: the training goes on after a restart. In the middle of an epoch, that is not begun again."""
        self.clock.start_at(global_step, train_step, epoch)
        self.demand.look_ahead_anew()
        self._epoch_open = train_step > 0

    @property
    def train_step(self) -> int:
        """How many of them in this epoch."""
        return self.clock.train_step

    @property
    def epoch(self) -> int:
        """How many epochs have ended."""
        return self.clock.epoch

    @property
    def problems(self) -> list[dict[str, Any]]:
        """What is not observed, and why."""
        return self._problems.all

    def note_problem(self, what: str, why: str, *, warn: bool = True) -> None:
        """Note what is not observed, and why; with a warning, if something is missing."""
        self._problems.note(what, why, warn=warn)

    @property
    def steps_seen(self) -> int:
        """How many steps were taken since this exporter began to count."""
        return self.global_step - self.clock.first_step

    def epoch_finished(self) -> None:
        """End the epoch: publish ``epoch_finished``; the next step is the first of the next epoch."""
        if not (self.gate.open):
            return
        self.epochs_seen = True
        with self.gate.lock:
            self._settle()
            self.gate.guard("loss", self._terms.settle)
            if self.clock.open and not self.optimizers and not self._steps_itself:
                self.gate.guard("step", self._end_step)
            if not self._epoch_open:
                self._announce_epoch()
            self.publisher.event("epoch_finished", self.clock.last_of_epoch())
            self.clock.end_epoch()
            self._epoch_open = False
            self._epoch_over = False

    def epoch_is_over(self) -> None:
        """End the epoch as soon as the next step begins: an evaluation before that still belongs to the epoch."""
        self._epoch_over = True

    def finish_step(self) -> None:
        """End a step that is open: of a loop without an optimizer, or one in which some optimizer has stepped."""
        self._settle()
        if self.optimizers.moved or (self.clock.open and not self.optimizers and not self._steps_itself):
            self.gate.guard("step", self._end_step)

    def finish(self) -> None:
        """End the run: the last step of a loop without an optimizer, and the last pass of each probe."""
        self.gate.guard("loss", functools.partial(self._terms.settle, everywhere=True))
        self.finish_step()
        self.gate.guard("loss", functools.partial(self._objectives.release, self._name_of_what_it_trains))
        if self.optimizers and self._training_passes > 1 and not self.optimizer_calls and not self._skipped:
            why = (
                "step() of the optimizer that was given was never called, so everything is of one step; give the "
                "optimizer whose step() is called, or optimizer=() and call step() of the run"
            )
            self._problems.note("the end of a step", why)
        late = self._training_passes - self._passes_before
        if self.optimizers and self.steps_seen and late * self.steps_seen > _LATE * self._passes_before:
            why = (
                f"{late} forwards came since the optimizer that was given stepped last, and are all of one step; if "
                "another took its place, give it to set_optimizer of the exporter"
            )
            self._problems.note("the end of the last step", why)
        self._tell_of_passes()
        self._tell_own_calls()
        self._end_asides()
        if self.gate.attached and not self._check.is_complete():
            self._hang_again()
        for probe in self._probes:
            if probe.last != self.clock.step:
                self.gate.guard(f"probe {probe.name}", functools.partial(self._run_probe, probe))
            if isinstance(probe, FirstInputs) and not probe.settled:
                why = probe.refusal if self._root is not None else "there is not one model, but none or several"
                self._problems.note(f"probe {probe.name!r}", why)

    def _tell_own_calls(self) -> None:
        """Say of which modules no forward was seen because their classes have a ``__call__`` that calls no hooks."""
        unseen = [(path, self.demand.modules[path]) for path in self.silent]
        if self._root is not None and self.steps_seen and not self.forwards_seen:
            unseen = [("", self._root), *((path, one) for path, one in unseen if one is not self._root)]
        for path, one in unseen:
            if type(one).__call__ is not nn.Module.__call__:
                name = type(one).__name__
                why = f"{name} has a __call__ of its own that does not make that of torch.nn.Module, which calls hooks"
                self._problems.note(f"the forward of {path!r}" if path else "the forward of the model", why)

    def _tell_of_passes(self) -> None:
        """Note which passes in training mode were none of a training, as far as that is known at the end."""
        late = self._training_passes - self._passes_before
        if self.clock.open and late and self.steps_seen and not self._idle:
            step, train_step, epoch = self.clock.began
            self.unended = {"global_step": step, "train_step": train_step, "epoch": epoch, "passes": late}
        never = self._never_differentiated + self._undifferentiated.passes
        if never and self.steps_seen:
            why = (
                f"of {never} forwards in training mode nothing was differentiated, as of an agent that acts, of "
                "samples that are drawn, or of a look at the model; they are calls of training steps all the same; "
                "torch.no_grad(), model.eval() or run.tag('acting') around them tells them apart"
            )
            self._problems.note("what forwards are for", why, warn=False)

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        if self.gate.open:  # what an exception has left behind
            self.gate.guard("loss", functools.partial(self._terms.settle, everywhere=True))
            self.gate.guard("loss", functools.partial(self._objectives.release, self._name_of_what_it_trains))
        self._end_asides()
        self._silent = self.silent
        self.gate.attached = self.gate.open = False
        hung = [handle for _, _, handle in (*self._former.values(), *self._hung.values())]
        for handle in [*hung, *(one for handles in self._lasting.values() for one in handles)]:
            handle.remove()
        self._former, self._hung, self._lasting = {}, {}, {}
        for _, handle in self._watched.values():
            handle.remove()
        self._watched = {}
        self._check = self._check_steps = Checklist()
        self._gradients.forget()
        unpatch(self._patched)
        self._parameters.forget()
        self._table.note((), False)
        self._ungraded, self._recomputed = {}, {}
        self.publisher.forget_places()
        self.gate.passes.now.inputs = []
        self.message_bus.unwatch(self._rewire)
        unwatch_scalers(self)
        unwatch_scripting(self)
        unwatch_compiling(self)
        unwatch_backward(self)

    @property
    def attached(self) -> bool:
        """Whether it has not been detached."""
        return self.gate.attached

    @property
    def silent(self) -> list[str]:
        """Hooked modules whose forward was never seen: bypassed, compiled away, or not part of the forward."""
        if not self.gate.attached:
            return self._silent
        fired = {hook.name for _, hook, _ in self._hung.values() if hook.fired}
        names = {hook.name for _, hook, _ in self._hung.values() if hook.role is Role.AFTER_FORWARD}
        # a mere list of parameters has no forward
        calls = (name for name, one in self.demand.modules.items() if _has_forward(one))
        return [name for name in calls if name in names and name not in fired]

    @property
    def loss_is_silent(self) -> bool:
        """Whether a loss was given, and steps were taken, but it was never seen: another name of it was called."""
        return len(self._losses) == 1 and self.losses_seen == 0 and self.steps_seen > 0

    @property
    def learns_in_eval_mode(self) -> bool:
        """Whether the model was in eval mode in the first step, and had no training pass since."""
        return self._began_in_eval_mode and not self._training_passes

    # -- what the user says ---------------------------------------------------------------------------------

    def log(self, kind: str, value: Any) -> None:
        """Publish a value of the user's own under `kind`, which may be new: a loss, a learning rate.

        It belongs to the open step, or to the last one if none is open (right after ``optimizer.step()``).

        Raises
        ------
        MessageError
            If the value cannot be made a tensor, or `kind` is a kind of modules.
        """
        if not (self.gate.open):
            return
        if not isinstance(kind, str) or not kind:
            raise MessageError(f"log takes a kind, which is a non-empty string, not {kind!r}")
        if kind not in self.message_bus.topics:
            self.message_bus.register_topic(kind, "network")
        if isinstance(value, Tensor):
            if not self.publisher.can_record(kind, None, value):
                return
            try:
                data = value.detach().clone()
            except Exception as error:  # noqa: BLE001 - there is no memory for it
                self.demand.give_up(kind, None, error)
                return
        else:
            try:
                data = torch.as_tensor(np.array(value), device="cpu")
            except (TypeError, ValueError, RuntimeError) as error:
                raise MessageError(f"log({kind!r}) takes a number or an array, not {type(value).__name__}") from error
        with self.gate.lock:
            aside = self._user_tag is not None
            at = self.clock.now() if aside or self.clock.open or self.clock.last is None else self.clock.last
            tag = self._user_tag or DEFAULT_TAG
            if kind == "loss":
                self._terms.logged(tag)
                if not aside and self._objectives.logs(data, at):
                    return
            # counted apart from what is observed: this may come before a step, in it and after it
            last, count = self._logged.get((kind, tag), (at, 0))
            call = max(count if last == at else 0, self.publisher.counts.get(StreamKey(kind, None, tag, ""), 0))
            self._logged[kind, tag] = (at, call + 1)
            self.publisher.publish(kind, None, data, tag, call=call, at=at)

    @contextlib.contextmanager
    def tag(self, name: str) -> Iterator[None]:
        """Give every pass inside this context the tag `name`; such passes are never training steps.

        Raises
        ------
        CaptureError
            If it is empty or ``"default"``.
        """
        if not isinstance(name, str) or not name or name == DEFAULT_TAG:
            raise CaptureError(f"a tag is a non-empty name other than {DEFAULT_TAG!r}, not {name!r}")
        before, self._user_tag = self._user_tag, name
        try:
            yield
        finally:
            self.gate.guard("loss", self._terms.settle)
            self._user_tag = before

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
        if self._root is None:
            raise CaptureError("a probe needs the model: call set_model first")
        if self._sharded():
            raise CaptureError(NO_PROBES)
        buffers = (buffer for _, buffer in walking.named_buffers(self._root))
        if any(map(is_lazy, itertools.chain(walking.parameters(self._root), buffers))):
            raise CaptureError(
                f"probe {name!r} would make the parameters of a lazy model, and with other random numbers than the "
                "training would: run the model once before"
            )
        if (
            not isinstance(name, str)
            or name in ("", DEFAULT_TAG, EVAL_TAG)
            or any(p.name == name for p in self._probes)
        ):
            raise CaptureError(f"a probe's name is a tag of its own, not {name!r}")
        for what, number in (("every", every), ("batch_size", batch_size)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise CaptureError(f"{what} of probe {name!r} is a positive integer, not {number!r}")
        if labels is not None and not isinstance(labels, Tensor):
            labels = torch.as_tensor(labels, device="cpu")
        probe = Probe(name, inputs, labels, every, batch_size)
        self._run_probe(probe)  # a probe that cannot run is the caller's error, now, not a problem of the training
        self._probes.append(probe)

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
        probe = FirstInputs(name, count, every)
        self._probes.append(probe)
        self._offered = probe

    # -- callbacks for hand-written loops -------------------------------------------------------------------

    def new_input_data(self, *args: Tensor) -> None:
        """Publish the network's input; begins a step if none is open."""
        self._begin_step()
        self.publisher.publish_leaves("input_data", None, args if len(args) != 1 else args[0], DEFAULT_TAG)

    def new_output_and_labels(self, network_output: Tensor, labels: Tensor) -> None:
        """Publish the network's output and the labels."""
        self.publisher.publish_leaves("network_output", None, network_output, self.gate.passes.now.tag)
        self.publisher.publish_leaves("input_labels", None, labels, self.gate.passes.now.tag)

    def new_loss(self, loss: Tensor) -> None:
        """Publish the loss; from then on, what ``backward`` is called on is none."""
        self.loss_is_logged()
        self._terms.logged(self.gate.passes.now.tag)
        self.publisher.publish_leaves("loss", None, loss, self.gate.passes.now.tag)

    def loss_is_logged(self) -> None:
        """Leave it to the user to say what the loss of the training is, as ``log("loss", value)`` does."""
        self._terms.logged(DEFAULT_TAG)
        self._objectives.logged()

    def new_activations(self, module: nn.Module, in_: Any, out_: Any) -> None:
        """Publish a module's inputs and output."""
        path = self._path_of(module)
        inputs = arguments_of(in_, {}) if isinstance(in_, tuple) else in_
        self.publisher.publish_leaves("layer_inputs", path, inputs, self.gate.passes.now.tag)
        self.publisher.publish_leaves("activations", path, out_, self.gate.passes.now.tag)

    def new_layer_gradients(self, module: nn.Module, gradients: Any) -> None:
        """Publish the gradients of the loss with respect to a module's output."""
        if isinstance(gradients, tuple):  # as a backward hook of torch's gets them, also of one output
            gradients = arguments_of(gradients, {})
        self.publisher.publish_leaves("layer_gradients", self._path_of(module), gradients, self.gate.passes.now.tag)

    def new_parameter_gradients(self, module: nn.Module, gradients: Sequence[Tensor | None]) -> None:
        """Publish the gradients of the loss with respect to a module's weight and bias, in this order."""
        path = self._path_of(module)
        for kind, gradient in zip(("weight_gradients", "bias_gradients"), gradients, strict=False):
            if gradient is not None:
                self.publisher.publish_leaves(kind, path, gradient, self.gate.passes.now.tag)

    # -- assembly -------------------------------------------------------------------------------------------

    def check(self, receivers: Iterable[Receiver] | None = None, logged: Iterable[str] = ()) -> None:
        """Make sure that everything the receivers need can be observed, or is one of the `logged` kinds.

        Raises
        ------
        CaptureError
            With a sentence that names what is missing and what can be had; or if the capture matches no module at all.
        """
        offered: list[tuple[str, str | None, str | None]] = [
            (kind, None, None)
            for kind, entry in KINDS.items()
            if entry.network and self.demand.capture_of(kind, None, None)
        ]
        for kind, entry in KINDS.items():
            if not entry.network:
                offered += [(kind, path, None) for path in self.demand.paths_of(kind)]
        offered += [(kind, None, None) for kind in logged]
        candidates = self._candidates()
        for capture in self.captures:
            if any(not KINDS[kind].network for kind in capture.kinds or ()) and not (
                any(capture.takes_module(path, one) for path, one in candidates)
                or any(capture.takes_parameter(parameter.path) for parameter in self._table.all)
            ):
                asked = {
                    key: value for key, value in capture.describe().items() if key in ("modules", "types", "depth")
                }
                names = ", ".join(repr(name) for name, _ in candidates) or "none"
                told = ", ".join(f"{key}={value}" for key, value in asked.items() if value is not None)
                raise CaptureError(f"the capture ({told or 'all modules'}) matches no module; there are {names}")
        missing = unmet(self.message_bus.receivers if receivers is None else tuple(receivers), offered, "the capture")
        if missing:
            raise CaptureError("; ".join(missing))

    def structure(self) -> dict[str, Any]:
        """The model as JSON: names and classes of modules, what convolutions are, parameters, tied aliases."""
        return {} if self._root is None else structure_of(self._root)

    def models(self) -> list[dict[str, Any]]:
        """The models that are observed, and those that are only looked at, as JSON.

        Each with its name, class and number of parameters, and `trained`: whether an optimizer that was given trains
        it. A model without a name is the root of the network.
        """
        trained = {
            id(one) for optimizer in self.optimizers.all for group in optimizer.param_groups for one in group["params"]
        }
        told = [
            summary_of(name, top) | {"trained": any(id(one) in trained for one in walking.parameters(top))}
            for name, top in self.tops
        ]
        return told + [summary_of(name, one) | {"trained": False} for name, one in self.looked_at().items()]

    def trainers(self) -> list[dict[str, str]]:
        """The optimizers that were given, as JSON: the class of each, and the path of what it trains."""
        return [
            {"class": type(one).__name__, "trains": self._name_of_what_it_trains(one)} for one in self.optimizers.all
        ]

    def _candidates(self) -> list[tuple[str, nn.Module]]:
        """Every module that may be observed, by path; not those of parametrizations, which have no forward."""
        below_root = {} if self._root is None else {id(one): name for name, one in named_parts(self._root)}
        found: dict[int, tuple[str, nn.Module]] = {}
        # modules of the model that were added by themselves are a choice among its modules; others come beside it
        chosen = [one for one in self._added if id(one[1]) in below_root]
        beside = [one for one in self._added if id(one[1]) not in below_root]
        sources = chosen + beside if chosen or self._root is None else [("", self._root, True), *beside]
        for prefix, top, recursive in sources:
            for inner, one in named_parts(top) if recursive else [("", top)]:
                name = ".".join(part for part in (prefix, inner) if part)
                found.setdefault(id(one), (below_root.get(id(one), name), one))
        names: dict[str, nn.Module] = {}
        for name, one in found.values():
            if ".parametrizations." in f".{name}." or isinstance(one, ParametrizationList):
                continue
            while name in names:  # of a module that came later
                name = f"{name or type(one).__name__.lower()}_"
            names[name] = one
        return list(names.items())

    def _rewire(self) -> None:
        """Put hooks where a receiver wants something, and nowhere else; called when receivers or modules change."""
        if not self.gate.attached:
            return
        self._end_asides()
        watch_scripting(self)
        watch_compiling(self)
        # of all that were ever there: one that nobody needed for a while has still been called before
        for (_, role, name), (_, hook, _) in self._hung.items():
            self._known[name, role] = hook.fired, hook.off
        self._former.update(self._hung)  # to those that this did not come to, when it was interrupted
        self._hung = {}
        self.demand.look_ahead_anew()
        self._several, self._top_of = len(self.tops) > 1, {}
        self.optimizers.forget_what_they_train()
        self.demand.modules = {
            path: one for path, one in self._candidates() if any(c.takes_module(path, one) for c in self.captures)
        }
        self._table.find(self.tops)
        self.demand.ask_anew()
        self._own, self._trained_names = frozenset(), {}
        self._leave_untouched()
        tell_of_model(self.message_bus.receivers, self.structure)
        self.ranks.surveyed = False
        # these stay while others come and go: torch forbids changing an optimizer's hooks while they run
        if self._root is not None and "root" not in self._lasting and self._takes_hooks("", self._root):
            self._compiled_before = compiled_anything()
            self._lasting["root"] = [before_forward(self._root, self._hook(self._root, Role.BEFORE_ROOT), first=True)]
        for optimizer in self.optimizers.all:
            if id(optimizer) not in self._lasting:
                self._lasting[id(optimizer)] = [
                    before_step(optimizer, self._hook(optimizer, Role.BEFORE_OPTIMIZER)),
                    after_step(optimizer, self._hook(optimizer, Role.AFTER_OPTIMIZER)),
                ]
        for path, one in self.demand.modules.items():
            if not self._takes_hooks(path, one):
                continue
            inputs = any(self.demand.asked(kind, path) for kind in ("layer_inputs", "input_gradients"))
            if inputs:
                self._hang(one, Role.BEFORE_FORWARD, path, before_forward, self.demand.asked("input_gradients", path))
            if inputs or any(self.demand.asked(kind, path) for kind in ("activations", "layer_gradients")):
                gradients = self.demand.asked("layer_gradients", path)
                new = self._hang(one, Role.AFTER_FORWARD, path, after_forward, gradients)
                if new and one is self._root and (last := self._former.pop((id(one), Role.AFTER_ROOT, ""), None)):
                    last[2].remove()  # and hung on again below
        # after the root's own activations, which belong before the network's output
        if self._root is not None and self._takes_hooks("", self._root):
            self._hang(self._root, Role.AFTER_ROOT, "", functools.partial(after_forward, always=True))
        hooked = not self.optimizers and not self._steps_itself  # each parameter that is trained
        if hooked:
            for path, tensor in self._table.trained(self.demand.asked):
                self._hang(tensor, Role.AFTER_ACCUMULATION, path, after_accumulation)
        for path, computing in self._table.parametrizations(self.demand.asked):
            if not self._takes_hooks(path, computing):
                continue
            self._hang(computing, Role.AFTER_PARAMETRIZATION, path, after_forward)
        for path, one in self._table.replaced(self.demand.asked):
            if not self._takes_hooks(path, one):
                continue
            # before hooks of the program's that take away what others of its hooks have put there
            self._hang(one, Role.AFTER_REPLACED, path, functools.partial(after_forward, first=True))
        self._wire_losses()
        self._wire_layers()
        for _, _, handle in self._former.values():
            handle.remove()
        self._former = {}
        self._table.note(self.tops, hooked)
        for (_, role, name), (_, hook, _) in self._hung.items():
            if (name, role) in self._known:
                hook.fired, hook.off = self._known[name, role]
        self._list_hooks()

    def _on_optimizers(self) -> list[tuple[Optimizer, Hanging]]:
        return [(one, hanging) for one in self.optimizers.all for hanging in self._lasting.get(id(one), ())]

    def _on_modules(self) -> list[tuple[Any, str, Hanging]]:
        """What else hooks hang on, with its name."""
        root = [(self._root, "", hanging) for hanging in self._lasting.get("root", ())]
        return root + [(on, hook.name, hanging) for on, hook, hanging in self._hung.values()]

    def _list_hooks(self) -> None:
        on_optimizers = self._on_optimizers()
        self._check_steps = Checklist(on_optimizers)
        self._check = Checklist([*on_optimizers, *((on, hanging) for on, _, hanging in self._on_modules())])

    def _hang_again(self) -> None:
        """Put back the hooks that the program took off, and say what was missed meanwhile."""
        stepped = [type(one).__name__ for one, hanging in self._on_optimizers() if hanging.hang_again(one)]
        called = [name for on, name, hanging in self._on_modules() if hanging.hang_again(on)]
        self._list_hooks()
        why = "the program took the recorder's hooks off; they are back from this step on"
        names = list(dict.fromkeys(repr(name) if name else "the model" for name in called))
        if names:
            told = ", ".join(names[:_FEW_NAMES]) + (" and others" if len(names) > _FEW_NAMES else "")
            self._problems.note(f"what passed through {told} meanwhile", why)
        for name in dict.fromkeys(stepped):
            self._problems.note(f"what {name} did meanwhile", f"{why}, and steps that it took are counted as one")

    def _takes_hooks(self, path: str, module: nn.Module) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            self._problems.note(f"module {path!r}", "a ScriptModule takes no hooks; its activations are not observed")
            return False
        return id(module) not in self._untouched

    def _leave_untouched(self) -> None:
        """Find out where a hook would change what is compiled, and with that the training."""
        tops = [*self.tops, *(("", one) for one in self._losses if isinstance(one, nn.Module))]
        untouched = [(prefix, top, left_uncompiled(top, Hook)) for prefix, top in tops]
        self._untouched = {id(one) for _, _, found in untouched for one in found}
        for prefix, top, found in untouched:
            names = {id(one): path for path, one in named_parts(top, prefix)} if found else {}
            told = [repr(names[id(one)]) if names.get(id(one)) else type(one).__name__ for one in found]
            if told:
                self._problems.note(f"the forward of {', '.join(told)}", UNCOMPILED)
        if self._root is not None and id(self._root) in self._untouched:
            for handle in self._lasting.pop("root", ()):
                handle.remove()

    def compile_called(self) -> None:
        """Look again, because `torch.nn.Module.compile` was called on some module."""
        self.gate.guard("compile", self._rewire)

    def _look(self) -> None:
        """Put the hooks on again if modules or parameters have come, gone or been replaced."""
        if self._table.changed(not self.optimizers and not self._steps_itself):
            self._rewire()

    def _wire_layers(self) -> None:
        """Let hooks step aside for the layers that have a fast path, where any hang on them or inside."""
        hung = {id(on) for on, _, _ in self._on_modules()}
        self._layers = {}
        for path, one in [found for prefix, top in self.tops for found in named_parts(top, prefix)]:
            if not isinstance(one, nn.TransformerEncoderLayer):
                continue
            inside = {id(part) for part in walking.modules(one)}
            if not inside.isdisjoint(hung) and self._takes_hooks(path, one):
                self._hang(one, Role.BEFORE_LAYER, path, before_forward)
                self._layers[id(one)] = [(on, hanging) for on, _, hanging in self._on_modules() if id(on) in inside]

    def _wire_losses(self) -> None:
        if (self._losses or self._hears_backward) and self.demand.asked("loss", None):
            watch_backward(self)
        wanted = any(self.demand.asked(kind, None) for kind in ("loss", "loss_terms", "input_labels", "network_output"))
        paths = {id(one): path for path, one in self._candidates()} if wanted and self._losses else {}
        for loss in self._losses if wanted else ():
            if isinstance(loss, nn.Module):
                if not self._takes_hooks("", loss):
                    continue
                self._hang(loss, Role.AFTER_LOSS, paths.get(id(loss)) or type(loss).__name__, after_forward)
            elif loss not in self._patched:
                self._patched[loss] = LossFunction(self.gate, self._loss_seen, getattr(torch.nn.functional, loss))
                setattr(torch.nn.functional, loss, self._patched[loss])

    def _hang(
        self, on: Any, role: Role, name: str, put: Callable[[Any, Hook], Hanging], gradients: bool = False
    ) -> bool:
        """Put a hook on something, if it is not there: one taken off in the middle of a call gets other arguments."""
        key = id(on), role, name
        there = self._former.pop(key, None)
        if there is None:
            hook = self._hook(on, role, name, gradients)
            self._hung[key] = on, hook, put(on, hook)
        else:
            there[1].gradients = gradients
            self._hung[key] = there
        return there is None

    def _hook(self, on: Any, role: Role, name: str = "", gradients: bool = False) -> Hook:
        calls: dict[Role, tuple[Callable[..., None], Callable[[tuple[Any, ...]], bool] | None]] = {
            Role.BEFORE_ROOT: (self._before_root, self._idle_before_root),
            Role.AFTER_ROOT: (self._after_root, self._idle_after_root),
            Role.BEFORE_FORWARD: (self._before_forward, None),
            Role.AFTER_FORWARD: (self._after_forward, None),
            Role.BEFORE_LAYER: (self._before_layer, self._idle_before_layer),
            Role.AFTER_PARAMETRIZATION: (self._after_parametrization, None),
            Role.AFTER_REPLACED: (self._after_replaced, None),
            Role.AFTER_ACCUMULATION: (self._after_accumulation, None),
            Role.AFTER_LOSS: (self._after_loss, self._idle_after_loss),
            Role.BEFORE_OPTIMIZER: (self._before_optimizer, self._idle_before_optimizer),
            Role.AFTER_OPTIMIZER: (self._after_optimizer, self._idle_after_optimizer),
        }
        call, quiet = calls[role]
        return Hook(self.gate, Site(on, role, name, after_forward, call, quiet, gradients))

    # -- ranks ----------------------------------------------------------------------------------------------

    def _survey(self) -> None:
        """Find out what other ranks hold, and how the model began."""
        listens = any(role in (Role.BEFORE_FORWARD, Role.AFTER_FORWARD) for _, role, _ in self._hung)
        self._began_in_eval_mode = (
            listens and self._root is not None and not self._root.training and not self._training_passes
        )
        self.ranks.survey(one for _, top in self.tops for one in walking.modules(top))

    # -- steps ----------------------------------------------------------------------------------------------

    def _announce_epoch(self) -> None:
        self._epoch_open = True
        self.publisher.event("epoch_started", self.clock.now())

    def _settle(self) -> None:
        """End a step whose optimizers stepped in a backward that is over by now."""
        if self._over and not recomputing():
            self._over = False
            self.gate.guard("step", self._end_step)

    def _begin_step(self) -> None:
        if self._over:
            self._settle()
        if self.clock.open:
            if not self._check_steps.is_complete():
                self._hang_again()
            return
        if self._epoch_over:
            self.epoch_finished()
        self.clock.begin()
        if not self._check.is_complete() and all(one.over for one in self._asides.values()):
            self._hang_again()
        self._idle = self.demand.nothing_due()
        if self._calls or self.publisher.counts:
            self._calls = {key: count for key, count in self._calls.items() if key[1] != DEFAULT_TAG}
            self.publisher.count_anew(DEFAULT_TAG)
        if not self._epoch_open:
            self._announce_epoch()
        if not self._idle:
            self._come_last()
            self._look()
            self.publisher.event("batch_started", self.clock.now())
            if not self.optimizers:
                self._snapshot(self._table.all)

    def _end_step(self) -> None:
        """Publish what is known now that the weights have moved, and move the clock."""
        self._begin_step()  # nothing of the forward was seen (compiled, bypassed), but the step took place
        try:
            if not self._idle:
                self._objectives.end_step(self._name_of_what_it_trains)
                if not self.optimizers:
                    self._parameters.compare(self._table.all, self._steps_itself)
                self._parameters.publish(self.clock.began)
                self.publisher.event("batch_finished", self.clock.began)
        except BaseException as error:
            if not isinstance(error, Exception):
                why = f"it was interrupted ({type(error).__name__})"
                self._problems.note(f"the end of step {self.clock.step}", why)
            raise
        finally:  # whatever failed, the optimizer has stepped
            self._advance()
        if self._compiled_before or self._probes:
            self._look_back()

    def _advance(self) -> None:
        """Let go of what was kept of the open step, and move the clock."""
        if self._undifferentiated.passes:
            self._never_differentiated += self._undifferentiated.passes
            self._undifferentiated = Undifferentiated()
        if self._called or self._called_before:
            self._called_before, self._called = self._called, set()
        if not self._over:  # else it was noted when it ended, in a backward
            self._ended_at = next_of_thread()
        self._over = self._idle = False
        self.optimizers.step_ended()
        self._gradients.forget()
        if self._ungraded or self._recomputed:
            self._ungraded, self._recomputed = {}, {}
        if self._parameters.holding:
            self._parameters.forget()
        if self._calls:
            self._calls = {}
        # of the training, the next step forgets them: a value may still be logged for this one
        if self.publisher.counts:
            self.publisher.count_only(DEFAULT_TAG)
        self.clock.end()
        self._passes_before = self._training_passes
        running = self.gate.passes.now
        running.listening = False
        if running.inputs and not running.depth:  # of calls that failed, or were interrupted
            running.inputs = []
        if running.depth and self._root is not None:  # one that was interrupted did not tell its end
            running.depth = calls_running(self._root)

    def _look_back(self) -> None:
        """Do what comes between two steps: probes, and after the first step a look at what was never called."""
        if self._compiled_before:
            self.gate.guard("compiled", self._tell_unseen_regions)
        for probe in self._probes:
            if self.clock.step % probe.every == 0:
                self.gate.guard(f"probe {probe.name}", functools.partial(self._run_probe, probe))

    def _tell_unseen_regions(self) -> None:
        """After the first step: hooks that came after the compilation of what they hang on are never called."""
        self._compiled_before = False
        # the last layer of an attention is never called: its weight is handed to a function
        never = {name for name, one in self.demand.modules.items() if isinstance(one, NonDynamicallyQuantizableLinear)}
        names = {hook.name for _, hook, _ in self._hung.values() if hook.role is Role.AFTER_FORWARD}
        hooked = [name for name in self.demand.modules if name in names - never]
        compiled = [] if self._root is None else compiled_parts(self._root)
        for region in unseen_regions(compiled, hooked, self.silent) if self._root is not None else ():
            self._problems.note(f"the inside of {region!r}" if region else "the inside of the model", TOO_LATE)

    def _snapshot(self, parameters: Iterable[Parameter]) -> None:
        """Copy what is wanted of the weights before they move."""
        if not self.ranks.surveyed:
            self._survey()
        self._parameters.snapshot(parameters, settle=bool(self.optimizers))

    # -- passes ---------------------------------------------------------------------------------------------

    def _enter_pass(self, module: nn.Module) -> None:
        """Decide what the forward that begins is: a training pass, which may begin a step, or a pass aside."""
        if self._over:
            self._settle()
        if self._terms.undecided:
            self._terms.settle()
        running = self.gate.passes.now
        if self._user_tag is not None:
            running.tag = self._user_tag
        else:
            running.tag = DEFAULT_TAG if self.is_training_pass(module) else EVAL_TAG
        if is_grad_enabled() or checkpointing():
            self._tag_with_gradients = running.tag
        if running.tag == DEFAULT_TAG:
            self._begin_step()
            running.listening = not self._idle
            self._training_passes += running.depth
            if self.optimizers.of_unknown_order:
                self._called.add(id(module))
        else:
            running.listening = self.demand.hears(running.tag)
            if running.listening and running.depth:
                self._look()

    def _top(self, path: str, module: nn.Module) -> nn.Module:
        """The top that a module is part of: its mode says what a pass through some of its parts is.

        A layer of it may be in another mode: a batch norm that is frozen while the rest is trained.
        """
        if not self._top_of:
            self._top_of = {inner: weakref.ref(top) for name, top in self.tops for inner, _ in named_parts(top, name)}
        known = self._top_of.get(path)
        top = None if known is None else known()
        return module if top is None else top

    def _idle_before_root(self, args: tuple[Any, ...]) -> bool:
        """Whether this begins a step that nobody records; then it begins here, as `_before_root` would begin it.

        This and the others called ``_idle_…`` spare the training what the full way costs, most of all where the
        network's numbers have taken the place of everything else in the processor's cache.
        """
        running, clock = self.gate.passes.now, self.clock
        if clock.step >= self.demand.quiet_until or clock.open or running.depth:
            return False
        if self._epoch_over or not self._epoch_open or self._user_tag is not None or clock.starting is not None:
            return False
        if not (args[0].training and is_grad_enabled()) or recomputing() or traced():
            return False
        if self._calls or self.publisher.counts or DistributedDataParallel._active_ddp_module is not None:
            return False
        if self.optimizers.of_unknown_order or not self._check_steps.is_complete():
            return False
        clock.begin()
        self._idle = True
        self._training_passes += 1
        self.forwards_seen += 1
        running.depth, running.tag, running.listening, running.inputs = 1, DEFAULT_TAG, False, []
        self._tag_with_gradients = DEFAULT_TAG
        return True

    def _before_root(self, _: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if recomputing():
            return
        running = self.gate.passes.now
        running.depth += 1
        if running.depth == 1 and any(isinstance(one, FakeTensor) for one in (*args, *kwargs.values())):
            running.listening = False
            self._problems.note("a forward of fake tensors", "a fake tensor has no values, so it counts as no pass")
            return
        if running.depth > 1:
            running.depth = max(1, calls_running(module))  # one that was interrupted did not tell its end
            if running.depth > 1:
                return
        self.forwards_seen += 1
        if running.inputs:
            running.inputs = []
        outer = DistributedDataParallel._active_ddp_module
        if outer is not None and outer not in self.ranks.around and unwrap(outer) is module:
            self.ranks.note(outer)
        if self._over:
            self._settle()
        if self.clock.open and not self.optimizers and not self._steps_itself and self.is_training_pass(module):
            self._end_step()  # without an optimizer, a step lasts until the next one begins
        self._enter_pass(module)
        if self._offered is not None and self._user_tag is None and not traced():
            self.gate.guard("the inputs of a probe", functools.partial(self._offer, module, args, kwargs))
        if running.listening:
            self.publisher.publish_leaves("input_data", None, arguments_of(args, kwargs), running.tag)

    def _offer(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._offered is not None and self._offered.settled:
            self._offered = None
        elif self._offered is not None:
            self._offered.offer(module, self.gate.passes.now.tag == EVAL_TAG, args, kwargs)

    def is_training_pass(self, module: nn.Module) -> bool:
        return module.training and self._user_tag is None and (is_grad_enabled() or checkpointing())

    def _idle_after_root(self, args: tuple[Any, ...]) -> bool:
        """Whether nobody records this pass; then its end is noted here, and `_after_root` has nothing to add."""
        running = self.gate.passes.now
        if running.depth != 1 or running.listening or recomputing():
            return False
        running.depth = 0
        return True

    def _after_root(self, _: str, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        # without an output: this hook was taken off by the one before it, which found that nobody listens any more
        if recomputing():
            return
        running = self.gate.passes.now
        running.depth = max(0, running.depth - 1)
        if running.depth or output is None or not running.listening:
            return
        if self._terms.here and isinstance(output, Mapping) and isinstance(whole := output.get("loss"), Tensor):
            self._terms.whole(whole, running.tag)
        if running.tag == DEFAULT_TAG and is_grad_enabled():
            self._undifferentiated.watch(one for _, one in leaves(output))
        # with a loss, the output is what the loss gets: on the same footing as the labels
        if not self._losses or self.publisher.collecting is not None:
            self.publisher.publish_leaves("network_output", None, output, running.tag)

    def _idle_before_layer(self, args: tuple[Any, ...]) -> bool:
        """Whether a layer that has a fast path does not take it: in training it never does."""
        return bool(args[0].training)

    def _before_layer(self, path: str, module: Any, args: Any, kwargs: Any) -> None:
        """Step aside for a layer that may take torch's fast path, unless what is inside is asked for by name."""
        last = self._asides.pop(threading.get_ident(), None)
        if last is not None:
            last.end()
        if self.publisher.collecting is not None or not may_take_it(module, args, kwargs):
            return  # a probe's pass is not one of the training's
        running = self.gate.passes.now
        if running.depth == 0:
            self._enter_pass(self._top(path, module))
        hung = self._layers.get(id(module), [])
        inside = {hanging.hook.name for on, hanging in hung if on is not module and isinstance(hanging.hook, Hook)}
        tag = running.tag
        streams = [(kind, one) for kind in _INNER_KINDS for one in inside] if running.listening else []
        if any(self.demand.named(kind, one, tag) for kind, one in streams):
            why = (
                f"passes tagged {tag!r} do not take it, because a capture that names their tag takes what is inside; "
                "their results may differ in rounding from unwatched ones"
            )
            self._problems.note(f"torch's fast path in {path!r}", why)
            return
        if any(self.demand.stream(kind, one, tag).asked for kind, one in streams):
            why = f"torch's fast path calls nothing inside; a capture whose tags name {tag!r} switches it off"
            self._problems.note(f"the inside of {path!r} in passes tagged {tag!r}", why, warn=False)
        self._asides[threading.get_ident()] = Aside(module, hung)

    def _end_asides(self) -> None:
        for one in self._asides.values():
            one.end()
        self._asides = {}

    def _before_forward(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if recomputing():
            first = self._first_call(path)
            if first is not None:
                self._enter_call(path, [], leaves(arguments_of(args, kwargs)), first, DEFAULT_TAG)
            return
        if self.gate.passes.now.depth == 0:
            self._enter_pass(self._top(path, module))
        if not self.gate.passes.now.listening:
            return
        tag = self.gate.passes.now.tag
        copies: list[tuple[str, Tensor]] = []
        inputs = leaves(arguments_of(args, kwargs))
        if self.demand.wanted("layer_inputs", path, tag) is not None:
            for leaf, tensor in inputs:  # copied now, because the module may overwrite its input in place
                if self.publisher.can_record("layer_inputs", path, tensor):
                    copies.append((leaf, copied(tensor.detach(), self.publisher.memory)))
        self._enter_call(path, copies, inputs, self._calls.get((path, tag), 0), tag)

    def _enter_call(
        self, path: str, copies: list[tuple[str, Tensor]], inputs: list[tuple[str, Tensor]], call: int, tag: str
    ) -> None:
        """Keep what is known of a call until its forward is over, and only then counted: others may end before it."""
        hooks = (
            self._gradients.watch("input_gradients", path, inputs, call, tag, self.forwards_seen)
            if is_grad_enabled()
            else []
        )
        self.gate.passes.now.inputs.append(OpenCall(path, copies, hooks))

    def _leave_call(self, path: str, call: int) -> list[tuple[str, Tensor]]:
        """Number the call that is over; the inputs that were copied. What a failed forward left behind is dropped."""
        while self.gate.passes.now.inputs:
            owner, copies, hooks = self.gate.passes.now.inputs.pop()
            if owner == path:
                for hook in hooks:
                    hook.call = call
                return copies
        return []

    def _after_forward(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if recomputing():
            first = self._first_call(path)
            if first is not None:
                self._leave_call(path, first)
                key = backward_node() or 0, _current_graph_task_id(), path
                self._recomputed[key] = self._recomputed.get(key, 0) + 1
                self._recalled[path] = first
                if is_grad_enabled():
                    self._gradients.watch(
                        "layer_gradients", path, leaves(output), first, DEFAULT_TAG, self.forwards_seen
                    )
                else:  # of a checkpoint inside the checkpoint this is another first forward
                    self._ungraded[path].append((next_node(), first))
            else:
                self._recalled.pop(path, None)
            return
        running = self.gate.passes.now
        if running.depth == 0:
            self._enter_pass(self._top(path, module))
        if not running.listening:
            return
        tag, now = running.tag, self.clock.now()
        call = self._calls.get((path, tag), 0)
        self._calls[path, tag] = call + 1
        if running.inputs:
            self._inputs_seen(path, module, tag, call, now)
        observed = leaves(output)
        capture = self.demand.wanted("activations", path, tag, now)
        if capture is not None:
            try:
                for leaf, tensor in observed:
                    stream = StreamKey("activations", path, tag, leaf)
                    self.publisher.deliver(capture, stream, tensor, call, now, module, owned=False)
                if not observed and opaque(output):
                    why = f"the output is a {type(output).__name__}, which is not looked into"
                    self._problems.note(f"activations of {path!r}", why)
            except Exception as error:  # noqa: BLE001 - the output's gradients are another stream
                self.demand.give_up("activations", path, error)
        if is_grad_enabled():
            self._gradients.watch("layer_gradients", path, observed, call, tag, self.forwards_seen)
        elif tag == DEFAULT_TAG:  # a training pass, so this may be the first forward of a reentrant checkpoint
            self._ungraded.setdefault(path, []).append((next_node(), call))

    def _inputs_seen(self, path: str, module: nn.Module, tag: str, call: int, now: At) -> None:
        """Publish the copies of a call's inputs, now that the call has its number."""
        try:
            for leaf, tensor in self._leave_call(path, call):
                self.publisher.publish("layer_inputs", path, tensor, tag, leaf, call, now, module)
        except Exception as error:  # noqa: BLE001 - under strict it is raised again
            self.demand.give_up("layer_inputs", path, error)

    def _first_call(self, path: str) -> int | None:
        """In the second forward of a reentrant checkpoint: which call of this step is computed again.

        Only this one's gradients will be seen. None in every other forward inside a backward. A checkpoint's node in
        the graph was numbered just before its first forward; the calls of that forward follow it.
        """
        first = self._ungraded.get(path)
        if first is None or self._idle or not self.clock.open:
            return None
        node = backward_node()
        if node is None:
            return None
        seen = self._recomputed.get((node, _current_graph_task_id(), path), 0)
        calls = [call for number, call in first if number > node]
        return calls[seen] if seen < len(calls) else None

    def ticket(self, path: str) -> Ticket:
        """What a compiled graph keeps of the call of a module that was just seen, for its gradient: call, step, tag."""
        tag = self.gate.passes.now.tag
        if recomputing():
            first = self._recalled.get(path)
            if first is None:  # the graph's own checkpoint, which computes the calls again in their order
                first = self._calls.get((path, "recomputed"), 0)
                self._calls[path, "recomputed"] = first + 1
            return (first, *self.clock.now(), tag_number(DEFAULT_TAG))
        call = self._calls.get((path, tag), 0) if self.gate.passes.now.listening else 0
        return (call - 1, *self.clock.now(), tag_number(tag))

    def gradient_seen(self, path: str, leaf: str, gradient: Tensor, ticket: Ticket) -> None:
        """Publish the gradient of what a compiled module gave."""
        call, step, train_step, epoch, tag = ticket
        stream = StreamKey("layer_gradients", path, tag_of(tag), leaf)
        self._gradients.seen(stream, call, At(step, train_step, epoch), gradient)

    def loss_scaled(self, scaled: Tensor, loss: Tensor, scale: Tensor) -> None:
        """A GradScaler has multiplied a loss: see to it that the gradients of its backward are told without that."""
        self._last_scaled = weakref.ref(scaled), loss.detach()
        listens = any(role in (Role.AFTER_FORWARD, Role.AFTER_ACCUMULATION) for _, role, _ in self._hung)
        if self.clock.open and not self._idle and listens:
            self._gradients.watch_scale(scaled, scale)

    # -- loss -----------------------------------------------------------------------------------------------

    def _idle_after_loss(self, args: tuple[Any, ...]) -> bool:
        """Whether this loss is of a step that nobody records; then it is counted here, as `_loss_seen` would."""
        if not self._idle or self._user_tag is not None:  # in a probe, there is a tag
            return False
        if not self._check_steps.is_complete():
            return False
        output, root = args[-1], self._root
        if not (type(output) is Tensor and output.requires_grad and root is not None and root.training):
            return False
        self.losses_seen += 1
        return True

    def _after_loss(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._loss_seen(name, module.forward, args, kwargs, output, of_model=isinstance(module, ModelLoss))

    def _loss_seen(
        self, name: str, loss: Any, args: Any, kwargs: Mapping[str, Any], output: Any, *, of_model: bool = False
    ) -> None:
        if not isinstance(output, Tensor) or isinstance(output, FakeTensor) or self.publisher.collecting is not None:
            return
        if recomputing() and (not output.requires_grad or not recomputing_reentrant()):
            return  # it was told before
        if self._over:
            self._settle()
        self.losses_seen += 1
        if self._user_tag is None and not output.requires_grad and self._waits_for_backward():
            return
        again = self._user_tag is None and self._is_second_look(output)
        if self._user_tag is not None:
            tag = self._user_tag
        elif not output.requires_grad or again:
            tag = EVAL_TAG
        # not the last pass's: an evaluation may lie between a forward and its loss
        elif self._root is not None and not self._several:
            tag = DEFAULT_TAG if self._root.training else EVAL_TAG
        else:
            tag = self._tag_with_gradients
        if tag == DEFAULT_TAG:
            self._terms.settle()
            self._begin_step()
            if self._idle:
                return
        for kind, tensor in zip(("network_output", "input_labels"), output_and_labels(loss, args, kwargs), strict=True):
            if tensor is not None:
                self.publisher.publish_leaves(kind, None, tensor, tag)
        if of_model:
            self._terms.note(name, output)
        else:
            self._terms.publish(name, output, tag)
        if tag != DEFAULT_TAG:
            if of_model:
                self._terms.whole(output, tag)
            else:
                self._terms.wait(name, output, tag, passes_are_seen=self.forwards_seen > 0)
                self.demand.look_ahead_anew()  # so that the next pass settles it, even if nobody records that

    def _is_second_look(self, output: Tensor) -> bool:
        """Whether a loss is of what the network gave in the step that has ended, such as a metric."""
        # of several optimizers, one may step yet that the loss is for
        return not self.clock.open and len(self.optimizers.all) < 2 and looks_back(output, self._ended_at)

    def _waits_for_backward(self) -> bool:
        """Whether a reentrant checkpoint of a training runs for the first time: its losses have no graph yet.

        Whether they are differentiated only their second computation tells, or `backward`.
        """
        inputs = checkpointed_inputs()
        if inputs is None:
            return False
        running = self.gate.passes.now
        return running.tag == DEFAULT_TAG if running.depth else any(one.requires_grad for _, one in leaves(inputs))

    def watch_backward(self) -> None:
        """Publish as the loss what ``backward`` is called on, until `detach`, although no loss is named."""
        self._hears_backward = True
        self._rewire()

    def backward_called(self, tensor: Tensor) -> None:
        """Publish a scalar as the loss that is differentiated; if its ``backward`` is watched, only once."""
        self._told_by_hand = weakref.ref(tensor)
        self._differentiated(tensor)

    def has_optimizer(self, optimizer: object) -> bool:
        """Whether an optimizer is one of those that were given."""
        return any(known is optimizer for known in self.optimizers.all)

    @property
    def is_at_work(self) -> bool:
        """Whether this thread runs code of the exporter, or code that the exporter calls, such as a receiver's."""
        return self.gate.held

    def differentiates(self, *tensors: Tensor) -> None:
        """Publish the scalar of which a ``backward`` begins as the loss, without what a GradScaler multiplied it with.

        Several tensors of one ``backward`` are differentiated as their sum. In a pass that the user gave a tag, the
        loss has that tag. What other networks were trained with is left out, if the observed ones were given by name.
        """
        told, self._told_by_hand = self._told_by_hand, None
        if told is None or told() is not tensors[0]:
            self._differentiated(*tensors)

    def _differentiated(self, *tensors: Tensor) -> None:
        if recomputing() or not (self.gate.open):
            return
        if self._user_tag is None and self._idle and self.clock.open:
            return
        if not self.optimizers.found and all(map(self._is_of_others, tensors)):
            return
        if any(one.numel() != 1 for one in tensors):
            why = "backward was called on a tensor of several elements; run.log('loss', value) says what the loss is"
            self._problems.note("the loss", why, warn=False)
            return
        for one in tensors:
            self._terms.differentiated(one)
        if self._user_tag is None:
            self._terms.settle()
            self._begin_step()
            if self._idle:
                return
        values = []
        for one in tensors:
            scaled = self._last_scaled if self._last_scaled is not None and self._last_scaled[0]() is one else None
            values.append(one if scaled is None else scaled[1])
        if self._user_tag is not None:
            for one in values:
                self._terms.whole(one, self._user_tag)
            return
        whole = values[0].detach()
        for one in values[1:]:
            whole = whole + one.detach().to(whole.device)
        self._objectives.differentiated(tensors, whole, hold=len(self.optimizers.all) > 1)

    def grad_called(self, tensor: Tensor, inputs: Iterable[Any], *, derivable: bool) -> None:
        """Take what ``autograd.grad`` differentiates by the model's parameters for the loss, if nothing else is.

        `derivable`: whether it keeps a graph of the derivatives.
        """
        if recomputing() or self._idle or not self.clock.open or tensor.numel() != 1:
            return
        if self.gate.open and self._user_tag is None:
            own = self._ids_of_parameters()
            if any(id(one) in own for one in inputs):
                self._objectives.by_hand(tensor, derivable=derivable)

    def _is_of_others(self, tensor: Tensor) -> bool:
        """Whether a tensor was made of parameters, but of none that are observed."""
        if not self._own:
            self._own = self._ids_of_parameters()
        if not self._own or not belongs_to_others(tensor, self._own):
            return False
        known, self._own = self._own, self._ids_of_parameters()  # one may have taken the place of another
        return known == self._own or belongs_to_others(tensor, self._own)

    def _ids_of_parameters(self) -> frozenset[int]:
        """Of what is observed; none if they are distributed, because a forward then uses others in their place."""
        parameters = [one for _, top in self.tops for one in walking.parameters(top)]
        return frozenset() if any(map(is_distributed, parameters)) else frozenset(map(id, parameters))

    def _name_of_what_it_trains(self, optimizer: Optimizer) -> str:
        """The name of the smallest module that has all parameters of an optimizer that are observed; "" for none."""
        known = self._trained_names.get(id(optimizer))
        if known is not None:
            return known
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        name, size = "", sys.maxsize
        parts = [(path, one) for prefix, top in self.tops for path, one in named_parts(top, prefix)]
        trained = {id(one) for _, top in self.tops for one in walking.parameters(top)} & own
        for path, one in parts if trained else ():
            inside = [id(parameter) for parameter in walking.parameters(one)]
            if path and len(inside) < size and trained.issubset(inside):
                name, size = path, len(inside)
        self._trained_names[id(optimizer)] = name
        return name

    # -- optimizer ------------------------------------------------------------------------------------------

    def _idle_before_optimizer(self, args: tuple[Any, ...]) -> bool:
        """Whether it is known that nobody wants anything of this step's training passes."""
        return self.clock.step < self.demand.quiet_until

    def _before_optimizer(self, _: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.optimizers.outdated:
            self._check = self._check_steps = Checklist()
            for key in self.optimizers.let_go_of_replaced():
                self._lasting.pop(key, None)
            self._list_hooks()
        self.optimizers.steps_inside(optimizer)
        self._objectives.stepped(optimizer)
        if self._comes_after_last(optimizer):
            return  # its weights are those of the step that has ended
        # the forward may come later, in a closure: whether anything is wanted is a question of the clock alone
        if not self.demand.nothing_due():
            if not self._check_steps.is_complete():
                self._hang_again()
            if not recomputing():
                self._look()
            parameters = self._table.of(optimizer, self.optimizers.in_order)
            self._snapshot(parameters)
            if self._may_overwrite_gradients(optimizer, args, kwargs):
                self._parameters.keep_gradients(parameters)

    def _may_overwrite_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether the gradients, which are final before a step, may be others after it.

        Not where they are made in the step, by a closure, or are to be unscaled in it; and where another hook comes
        after this one, it may clip them yet.
        """
        if _leaves_gradients(optimizer) or any(one is not None for one in (*args[1:], *kwargs.values())):
            return False
        return _is_heard_last(optimizer) and getattr(optimizer, "grad_scale", None) is None

    def _come_last(self) -> None:
        """Be called after hooks that were put on since, which may change gradients that this step overwrites."""
        for optimizer in self.optimizers.all:
            if not _leaves_gradients(optimizer) and not _is_heard_last(optimizer):
                hooks = self._lasting[id(optimizer)]
                hooks[0].remove()
                hooks[0] = before_step(optimizer, self._hook(optimizer, Role.BEFORE_OPTIMIZER))
                self._list_hooks()

    def _idle_after_optimizer(self, args: tuple[Any, ...]) -> bool:
        """Whether this ends a step that nobody records; then it ends here, as `_after_optimizer` would end it."""
        optimizer: Optimizer = args[0]
        known = self.optimizers
        if not self._idle or optimizer is not known.ender or known.nest or self._over:
            return False
        if known.found and (not known.is_settled or known.is_beside(optimizer, self)):
            return False
        if getattr(optimizer, "found_inf", None) is not None or recomputing():
            return False
        self.optimizer_calls += 1
        with self.gate.lock:
            self._advance()
            if self._compiled_before or self._probes:
                self._look_back()
        return True

    def _after_optimizer(self, _: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if steps_within(optimizer):
            return
        self.optimizer_calls += 1
        self._objectives.stepped(optimizer)  # also what its closure differentiated
        if skipped_inside(optimizer):
            self.step_skipped(optimizer)
            return
        if self._comes_after_last(optimizer):
            self._learn_order(optimizer)
            return
        last = self.optimizers.ends_step(optimizer, self)
        in_backward = recomputing()
        try:
            if not self.demand.nothing_due():
                self._parameters.compare(self._table.of(optimizer, self.optimizers.in_order), True)
        finally:  # under strict an exception goes through, but the optimizer has stepped
            if in_backward and (last or self.optimizers.one_each):
                self._begin_step()
                self._ended_at = next_of_thread()
                self._over = True  # of the optimizers in a backward, the last one given may be the first to step
            elif last:
                self._end_step()
            elif not self.optimizers.is_beside(optimizer, self):
                self.optimizers.moved = True

    def _comes_after_last(self, optimizer: Optimizer) -> bool:
        return self.optimizers.of_unknown_order and self.optimizers.comes_after_last(
            optimizer, self, self._called, self._called_before
        )

    def _learn_order(self, optimizer: Optimizer) -> None:
        """An optimizer stepped for a step that was taken for ended; that is known now, and what it did then is lost."""
        ended = self.optimizers.ender
        self.optimizers.is_last(optimizer)
        step = max(self.clock.step - 1, 0)
        why = (
            f"the last optimizer of a step is the {type(optimizer).__name__} that was made before the "
            f"{type(ended).__name__} that was taken for it; what it trains has no weights, gradients and updates of "
            f"step {step}, and forwards since then are of the step after it"
        )
        self._problems.note(f"the end of step {step}", why)

    def step_skipped(self, optimizer: Optimizer) -> None:
        """A GradScaler skipped the optimizer's step: the clock stands still, and what follows is of the same step."""
        self._skipped += 1
        self._objectives.stepped(optimizer)
        self.message_bus.register_topic("skipped_step", "network")
        if not self.demand.nothing_due():
            # another optimizer may end this step all the same
            self._snapshot(self._table.of(optimizer, self.optimizers.in_order))
        if any(one.wants("skipped_step", None, DEFAULT_TAG, self.clock.step) for one in self.demand.asking):
            step, train_step, epoch = self.clock.now()
            self.message_bus.publish(
                NetworkMessage(
                    kind="skipped_step", global_step=step, train_step=train_step, epoch=epoch, rank=self.publisher.rank
                )
            )

    def _after_accumulation(self, path: str, tensor: Tensor) -> None:
        """Without an optimizer, nothing says when a gradient is final: keep the last running sum."""
        if self.clock.open and not self._idle and tensor.grad is not None:
            scale = self._gradients.scale
            self._parameters.accumulated(path, tensor.grad, scale)

    def _after_parametrization(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the weight that a parametrization computes, as the forward uses it: to ask for it might change it."""
        if isinstance(output, Tensor):
            self._computed(path, output)

    def _after_replaced(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep what a hook of the program's has put in the place of a weight, as the forward has used it."""
        there = self._table.in_place(path)
        if there is not None:
            if self.gate.passes.now.depth == 0 and not recomputing():
                self._enter_pass(self._top(path.rpartition(".")[0], module))
            self._computed(path, there)

    def _computed(self, path: str, value: Tensor) -> None:
        """Keep a weight that was computed for a forward of the training, and see to it that its gradient is seen."""
        if self._idle or not self.clock.open:
            return
        if not recomputing():
            running = self.gate.passes.now
            if not (running.listening and running.tag == DEFAULT_TAG):
                return
            self._parameters.computed(path, value)
        if is_grad_enabled() and value.requires_grad and not value.is_leaf:
            last = self._watched.get(path)
            if (last is None or last[0]() is not value) and self._parameters.wants_gradient(path):
                self._watched[path] = weakref.ref(value), on_gradient(value, _ComputedHook(self, path))

    def gradient_of_computed(self, path: str, gradient: Tensor) -> None:
        if self.clock.open and not self._idle:
            task = _current_graph_task_id()
            scale = self._gradients.scale
            self._parameters.add_gradient(path, gradient, scale, task)

    # -- probes ---------------------------------------------------------------------------------------------

    def _run_probe(self, probe: Probe) -> None:
        root = self._root
        probe.last = self.clock.step
        if root is None or not probe.ready(root):  # that was checked of others than the first inputs
            return
        if not (self.gate.open):
            return
        if not self.demand.hears(probe.name):
            return
        if self._sharded():
            self._problems.note(f"probe {probe.name!r}", NO_PROBES)
            return
        running = self.gate.passes.now
        collected: dict[tuple[str, str | None, int, str], list[Tensor]] = {}
        sizes: list[int] = []
        before = (running.tag, self._user_tag, running.listening, running.depth, running.inputs)
        try:
            self._user_tag, running.depth, running.inputs = probe.name, 0, []
            self.publisher.collecting = collected
            with undisturbed(root), with_subclasses():
                for batch in probe.batches():
                    sizes += [next((tensor.shape[0] for _, tensor in leaves(batch) if tensor.ndim), 1)]
                    self._forget_calls(probe.name)
                    probe.call(root, batch)
        finally:
            running.tag, self._user_tag, running.listening, running.depth, running.inputs = before
            self.publisher.collecting = None
        for (kind, path, call, leaf), parts in collected.items():
            if not joinable(parts, sizes):
                what = f"{kind} of {path!r} in probe {probe.name!r}"
                self._problems.note(
                    what, "its first axis is not the datapoints, so batches cannot be put together again"
                )
                continue
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            module = self.demand.modules.get(path) if path is not None else None
            self.publisher.publish(kind, path, whole, probe.name, leaf, call, module=module)
        if probe.labels is not None:
            outputs = {leaf for kind, _, _, leaf in collected if kind == "network_output"}
            # labels join the output whose leaf they have
            leaf = outputs.pop() if len(outputs) == 1 else ""
            self.publisher.publish("input_labels", None, probe.labels.clone(), probe.name, leaf, 0)
        self._forget_calls(probe.name)

    def _sharded(self) -> bool:
        """Whether the model's forward needs other ranks to run it, too."""
        return self._root is not None and any(map(is_distributed, walking.parameters(self._root)))

    def _forget_calls(self, tag: str) -> None:
        self._calls = {key: count for key, count in self._calls.items() if key[1] != tag}
        self.publisher.count_anew(tag)

    # -- trouble --------------------------------------------------------------------------------------------

    def _path_of(self, module: nn.Module) -> str:
        for path, one in [*self.demand.modules.items(), *self._candidates()]:
            if one is module:
                return path
        raise CaptureError(f"this {type(module).__name__} was not added to the exporter; call add_modules first")


class _ComputedHook:
    """Sees the gradient of a weight that was computed for a forward."""

    __slots__ = ("__weakref__", "_exporter", "path")

    __torch_unserializable__ = True

    def __init__(self, exporter: Exporter, path: str) -> None:
        self._exporter = weakref.ref(exporter)
        self.path = path

    def __call__(self, gradient: Tensor | None) -> None:
        exporter = self._exporter()
        if gradient is None or exporter is None or not exporter.gate.open:
            return
        work = functools.partial(exporter.gradient_of_computed, self.path, gradient)
        exporter.gate.guard(f"the gradient of {self.path!r}", work)


_NUMBERS = itertools.count()
_INNER_KINDS = ("activations", "layer_inputs", "layer_gradients", "input_gradients")
_FEW_NAMES = 8
"""How many modules a problem names."""
_LATE = 10
"""How many times the usual forwards of a step one may have that is still open at the end, and nobody is told."""


def _with_hooks(optimizer: Optimizer) -> Optimizer:
    """An optimizer, or the one that it wraps without being one itself, as accelerate's does."""
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and hasattr(inner, "_optimizer_step_pre_hooks"):
        return inner
    raise CaptureError(
        f"{type(optimizer).__name__} takes no hooks, because it does not call Optimizer.__init__; give the optimizer "
        "that it wraps, or optimizer=() and call step() of the run"
    )


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _leaves_gradients(optimizer: Optimizer) -> bool:
    """Whether gradients are after a step what they were before: torch's own optimizers do not change them.

    But SGD with Nesterov's momentum does, where it moves many parameters at once; and what hooks do that come before an
    exporter's, nobody knows.
    """
    first = next(iter(optimizer._optimizer_step_post_hooks.values()), None)
    return (
        type(optimizer).__module__.partition(".")[0] == "torch"
        and isinstance(first, Hook)
        and not any(group.get("nesterov") for group in optimizer.param_groups)
    )


def _is_heard_last(optimizer: Optimizer) -> bool:
    """Whether the last of the hooks before its step is an exporter's."""
    last = next(reversed(optimizer._optimizer_step_pre_hooks.values()), None)
    return isinstance(last, Hook) and last.role is Role.BEFORE_OPTIMIZER
