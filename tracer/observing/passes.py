"""What a forward of the model is: a training pass, which may begin a step, or a pass aside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from tracer.errors import CaptureError
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG
from tracer.observing.clock import Clock
from tracer.observing.demand import Demand
from tracer.observing.forwards import Forwards
from tracer.observing.models import Models
from tracer.observing.objectives import Terms
from tracer.observing.optimizers import Optimizers
from tracer.observing.probes import FirstInputs
from tracer.observing.publisher import Publisher
from tracer.observing.pytorch.autograd import calls_running, checkpointing, recomputing, traced
from tracer.observing.pytorch.gate import Gate, Pass
from tracer.observing.pytorch.tensors import arguments_of, leaves
from tracer.observing.pytorch.wrappers import unwrap
from tracer.observing.ranks import Ranks
from tracer.observing.steps import Steps
from tracer.observing.wiring import Wiring


@dataclass(eq=False, repr=False)
class Passes:
    """Decides what each forward is, and publishes what goes into the model and comes out of it.

    Attributes
    ----------
    user_tag : str or None
        The tag that the user gives passes now.
    tag_with_gradients : str
        That of the last pass that had gradients.
    offered : FirstInputs or None
        The probe that takes what the model is given.
    given_to_losses : bool
        Whether losses are observed, which publish the output of the model that they get.
    """

    gate: Gate
    clock: Clock
    demand: Demand
    publisher: Publisher
    models: Models
    forwards: Forwards
    optimizers: Optimizers
    ranks: Ranks
    wiring: Wiring
    terms: Terms
    steps: Steps

    def __post_init__(self) -> None:
        self.user_tag: str | None = None
        self.tag_with_gradients = DEFAULT_TAG
        self.offered: FirstInputs | None = None
        self.given_to_losses = False

    @property
    def now(self) -> Pass:
        """The pass that runs in this thread, or else the last one."""
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
        """Whether a pass through a module that begins now is one of the training."""
        return module.training and self.user_tag is None and (is_grad_enabled() or checkpointing())

    def enter(self, module: nn.Module) -> None:
        """Decide what the forward of this top is that begins: a training pass, which may begin a step, or one aside."""
        if self.steps.over:
            self.steps.settle()
        if self.terms.undecided:
            self.terms.settle()
        running = self.gate.passes.now
        if self.user_tag is not None:
            running.tag = self.user_tag
        else:
            running.tag = DEFAULT_TAG if self.is_training(module) else EVAL_TAG
        if is_grad_enabled() or checkpointing():
            self.tag_with_gradients = running.tag
        if running.tag == DEFAULT_TAG:
            self.steps.begin()
            running.listening = not self.clock.idle
            self.forwards.training += running.depth
            if self.optimizers.of_unknown_order:
                self.forwards.tops.add(id(module))
        else:
            running.listening = self.demand.hears(running.tag)
            if running.listening and running.depth:
                self.wiring.look()

    def enter_at(self, path: str, module: nn.Module) -> Pass:
        """The pass that a module is called in; it is entered here if not with a forward of the model."""
        running = self.gate.passes.now
        if running.depth == 0:
            self.enter(self.models.top_of(path, module))
        return running

    # -- hooks of the model ---------------------------------------------------------------------------------

    def quiet_before_root(self, args: tuple[Any, ...]) -> bool:
        """Whether this begins a step that nobody records; then it begins here, as `before_root` would begin it.

        This and the others called ``quiet_…`` spare the training what the full way costs, most of all where the
        network's numbers have taken the place of everything else in the processor's cache.
        """
        running = self.gate.passes.now
        if self.clock.step >= self.demand.quiet_until or running.depth or self.user_tag is not None:
            return False
        if not (args[0].training and is_grad_enabled()) or recomputing() or traced():
            return False
        if self.optimizers.of_unknown_order or DistributedDataParallel._active_ddp_module is not None:
            return False
        if not self.steps.begin_idle():
            return False
        self.forwards.training += 1
        self.forwards.seen += 1
        running.depth, running.tag, running.listening, running.inputs = 1, DEFAULT_TAG, False, []
        self.tag_with_gradients = DEFAULT_TAG
        return True

    def before_root(self, _: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """See a forward of the model begin."""
        if recomputing():
            return
        running = self.gate.passes.now
        running.depth += 1
        if running.depth == 1 and any(isinstance(one, FakeTensor) for one in (*args, *kwargs.values())):
            running.listening = False
            why = "a fake tensor has no values, so it counts as no pass"
            self.gate.problems.note("a forward of fake tensors", why)
            return
        if running.depth > 1:
            running.depth = max(1, calls_running(module))  # one that was interrupted did not tell its end
            if running.depth > 1:
                return
        self.forwards.seen += 1
        if running.inputs:
            running.inputs = []
        outer = DistributedDataParallel._active_ddp_module
        if outer is not None and outer not in self.ranks.around and unwrap(outer) is module:
            self.ranks.note(outer)
        if self.steps.over:
            self.steps.settle()
        if self.clock.open and self.optimizers.forwards_end_steps and self.is_training(module):
            self.steps.end()  # without an optimizer, a step lasts until the next one begins
        self.enter(module)
        if self.offered is not None and self.user_tag is None and not traced():
            self.gate.guard("the inputs of a probe", functools.partial(self._offer, module, args, kwargs))
        if running.listening:
            self.publisher.publish_leaves("input_data", None, arguments_of(args, kwargs), running.tag)

    def _offer(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.offered is not None and self.offered.settled:
            self.offered = None
        elif self.offered is not None:
            self.offered.offer(module, self.gate.passes.now.tag == EVAL_TAG, args, kwargs)

    def quiet_after_root(self, args: tuple[Any, ...]) -> bool:
        """Whether nobody records this pass; then its end is noted here, and `after_root` has nothing to add."""
        running = self.gate.passes.now
        if running.depth != 1 or running.listening or recomputing():
            return False
        running.depth = 0
        return True

    def after_root(self, _: str, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """See a forward of the model end."""
        # without an output: this hook was taken off by the one before it, which found that nobody listens any more
        if recomputing():
            return
        running = self.gate.passes.now
        running.depth = max(0, running.depth - 1)
        if running.depth or output is None or not running.listening:
            return
        if self.terms.here and isinstance(output, Mapping) and isinstance(whole := output.get("loss"), Tensor):
            self.terms.whole(whole, running.tag)
        if running.tag == DEFAULT_TAG and is_grad_enabled():
            self.forwards.watch(one for _, one in leaves(output))
        # with a loss, the output is what the loss gets: on the same footing as the labels
        if not self.given_to_losses or self.publisher.collecting is not None:
            self.publisher.publish_leaves("network_output", None, output, running.tag)
