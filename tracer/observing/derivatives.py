"""Derivatives of a training's loss for subscribers that need the model, computed on the training's own graph.

The graph exists from the forward to the end of the backward. The loss is therefore exactly the step's, with its dropout
masks and batch statistics, whatever it is made of, and no forward runs again. The training's backward follows, and
finds the graph unchanged.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from tracer import walking
from tracer.errors import CaptureError
from tracer.format.placement import is_distributed
from tracer.messaging.messages import DEFAULT_TAG
from tracer.messaging.receiver import Receiver
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.pytorch.autograd import behind
from tracer.observing.pytorch.patches import BACKWARD
from tracer.observing.pytorch.tensors import summed
from tracer.observing.state import restored
from tracer.observing.wanted_parameters import Ranks

Aside: TypeAlias = "Callable[[], AbstractContextManager[None]]"
"""Makes a context in which differentiation is not observed and changes nothing."""

_WITH_SECOND = "; attention within torch.nn.attention.sdpa_kernel(SDPBackend.MATH) can be"


class OutputRows:
    """The network output that a loss function got, as a position in the graph. Its rows are the datapoints.

    Parameters
    ----------
    output : Tensor
        With a graph; the tensor itself is not kept.
    """

    def __init__(self, output: Tensor) -> None:
        self.edge: GradientEdge = get_gradient_edge(output)
        self.shape = output.shape


class Derivatives:
    """A loss that is about to be differentiated, for `tracer.messaging.receiver.Objective`.

    Parameters
    ----------
    loss : Tensor
        One element, with its graph.
    parameters : mapping of str to Tensor
        The trained parameters, by path.
    outputs : sequence of OutputRows
        The outputs that loss functions got since the last backward.
    aside : callable
        See `Aside`.
    step : int
        The global step, for messages.
    hindrance : str
        The reason why the loss cannot be differentiated; empty if none is known.
    """

    def __init__(
        self,
        loss: Tensor,
        parameters: Mapping[str, Tensor],
        outputs: Sequence[OutputRows],
        aside: Aside,
        step: int,
        hindrance: str = "",
    ) -> None:
        self.step, self.hindrance = step, hindrance
        self.parameters = {path: one.numel() for path, one in parameters.items()}
        self._loss: Tensor | None = loss
        self._tensors = [*parameters.values()]
        self._outputs = [*outputs]
        self._looked = False  # whether the outputs have been restricted to those of this loss
        self._aside = aside
        self._gradients: list[Tensor] | None = None  # with their graph
        self._of_output: Tensor | None = None  # the gradient of the loss with respect to the output

    def close(self) -> None:
        """Release the graph."""
        self._loss = self._gradients = self._of_output = None
        self._tensors, self._outputs = [], []

    # -- the derivatives ------------------------------------------------------------------------------------

    def hessian_products(self, vectors_kp: NDArray[np.float64]) -> NDArray[np.float64]:
        """The products of the loss's Hessian with k vectors (k, P), one per row."""
        found = np.zeros(vectors_kp.shape)
        with self._differentiating("twice"):
            gradients = self._gradients_with_graph()
            for vector_p, product_p in zip(vectors_kp, found, strict=True):
                pairs = zip(gradients, self._parts(vector_p), strict=True)
                known = [(one, along) for one, along in pairs if one.requires_grad]
                if known:  # otherwise the gradient is constant
                    outputs, alongs = zip(*known, strict=True)
                    product_p[:] = self._joined(self._pulled_back(outputs, alongs))
        return found

    @property
    def rows(self) -> int:
        """The number N of rows of the network output that the loss function got."""
        return int(self._only_output().shape[0])

    def row_gradients(self, weights_kn: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weighted sums (k, P) of the contributions of the N output rows to the gradient."""
        output = self._only_output()
        with self._differentiating("by rows"):
            if self._of_output is None:
                self._of_output = self._checked_gradient_of(output)
            return np.stack([self._of_rows(output, self._of_output, one) for one in weights_kn])

    # -- how they are computed ------------------------------------------------------------------------------

    def _only_output(self) -> OutputRows:
        """The only output of a loss function that this loss is made of."""
        if not self._looked:
            nodes = {*behind(self._graph)} if self._outputs else set()
            by_place = {(one.edge.node, one.edge.output_nr): one for one in self._outputs if one.edge.node in nodes}
            self._outputs, self._looked = [*by_place.values()], True
        if len(self._outputs) != 1:
            raise CaptureError(
                f"the loss of step {self.step} has no datapoints of its own: they are the rows of the one output that "
                "loss functions get which are named to the recording (loss=...), and here they got "
                f"{len(self._outputs) or 'none'}"
            )
        return self._outputs[0]

    def _checked_gradient_of(self, output: OutputRows) -> Tensor:
        """The gradient of the loss with respect to an output, if the loss depends on the parameters only through it."""
        (found,) = torch.autograd.grad(self._graph, (output.edge,), retain_graph=True)
        whole = self._joined(self._pulled_back((self._graph,), (torch.ones_like(self._graph),)))
        through = self._of_rows(output, found, np.ones(output.shape[0]))
        distance, length = float(np.linalg.norm(whole - through)), float(np.linalg.norm(whole))
        if distance > math.sqrt(torch.finfo(found.dtype).eps) * length:  # false if there is a NaN
            raise CaptureError(
                f"the loss of step {self.step} is made of more than the output that its loss function got (a penalty "
                "on weights, or another output), so datapoints have no gradients that add up to its own"
            )
        return found

    def _of_rows(self, output: OutputRows, gradient: Tensor, weights_n: NDArray[np.float64]) -> NDArray[np.float64]:
        weights = torch.as_tensor(weights_n, device="cpu").to(gradient).reshape(-1, *[1] * (gradient.ndim - 1))
        return self._joined(self._pulled_back((output.edge,), (gradient * weights,)))

    @property
    def _graph(self) -> Tensor:
        if self._loss is None:
            raise CaptureError(
                f"the loss of step {self.step} can be differentiated only while its message is delivered"
            )
        return self._loss

    @contextlib.contextmanager
    def _differentiating(self, how: str) -> Iterator[None]:
        """Differentiate unobserved; autograd's errors become a `CaptureError`."""
        _ = self._graph
        if self.hindrance:
            raise CaptureError(f"the loss of step {self.step} cannot be differentiated: {self.hindrance}")
        try:
            with self._aside(), without_hooks(self._tensors):
                yield
        except (RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).partition("\n")[0].split()).rstrip(".")
            hint = _WITH_SECOND if "scaled_dot_product" in reason else ""
            raise CaptureError(
                f"the loss of step {self.step} cannot be differentiated {how}: {reason}{hint}"
            ) from error

    def _gradients_with_graph(self) -> list[Tensor]:
        if self._gradients is None:
            self._gradients = [
                one.to_dense() if one.layout is not torch.strided else one
                for one in torch.autograd.grad(
                    self._graph, self._tensors, create_graph=True, allow_unused=True, materialize_grads=True
                )
            ]
        return self._gradients

    def _pulled_back(self, outputs: Sequence[Any], alongs: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.autograd.grad(
            outputs, self._tensors, alongs, retain_graph=True, allow_unused=True, materialize_grads=True
        )

    def _parts(self, vector_p: NDArray[np.float64]) -> list[Tensor]:
        """A vector, split into the shapes of the parameters, in their dtypes and on their devices."""
        whole = torch.as_tensor(np.ascontiguousarray(vector_p), device="cpu")
        cut = whole.split([one.numel() for one in self._tensors])
        return [part.reshape(one.shape).to(one) for part, one in zip(cut, self._tensors, strict=True)]

    def _joined(self, parts: Sequence[Tensor]) -> NDArray[np.float64]:
        flat = [(one.to_dense() if one.layout is not torch.strided else one).detach().reshape(-1) for one in parts]
        return np.concatenate([one.to("cpu", torch.float64).numpy() for one in flat])


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Temporarily remove hooks from leaf tensors, because they are meant for the training's gradients."""
    held = [hooks for one in tensors if (hooks := one._backward_hooks)]
    kept = [OrderedDict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(held, kept, strict=True):
            hooks.update(before)


class Differentiable(ExporterPart):
    """Gives subscribers that need the model the `Derivatives` of each loss, before its message."""

    def __init__(self, ground: Ground, ranks: Ranks) -> None:
        super().__init__(ground)
        self.ranks = ranks
        self._outputs: list[OutputRows] = []  # the outputs that loss functions got since the last backward
        self._of_step = -1  # the step of these outputs

    def asking(self) -> list[Receiver]:
        """The receivers that need the model for a loss of the open step."""
        needing = [one for one in self.bus.receivers if one.needs_model]
        if not needing or not self.demand.wanted("loss", None, DEFAULT_TAG):
            return []
        step = self.clock.now().global_step
        return [one for one in needing if one.wants("loss", None, DEFAULT_TAG, step)]

    def output_seen(self, output: Tensor | None) -> None:
        """Note the output that a loss function of the training got."""
        if output is None or not output.requires_grad or not output.ndim or not self.asking():
            return
        step = self.clock.now().global_step
        if step != self._of_step:
            self._outputs, self._of_step = [], step
        self._outputs.append(OutputRows(output))

    def forget(self) -> None:
        """Release graphs."""
        self._outputs = []

    @contextlib.contextmanager
    def told(self, tensors: Sequence[Tensor], scales: Sequence[Tensor | None]) -> Iterator[None]:
        """Give the `Derivatives` of a loss to the receivers that need the model, while its message is published.

        Parameters
        ----------
        tensors : sequence of Tensor
            The tensors that ``backward`` is called on, before it begins.
        scales : sequence of Tensor or None
            The factors by which a GradScaler has multiplied them.
        """
        asking = self.asking()
        if not asking:
            yield
            return
        outputs, self._outputs = self._outputs, []
        objective = self._objective(tensors, scales, outputs)
        for one in asking:
            one.know_objective(objective)
        try:
            yield
        finally:
            for one in asking:
                one.know_objective(None)
            objective.close()

    def _objective(
        self, tensors: Sequence[Tensor], scales: Sequence[Tensor | None], outputs: Sequence[OutputRows]
    ) -> Derivatives:
        trained = {
            path: one
            for name, top in self.models.tops
            for path, one in walking.named_parameters(top, name)
            if one.requires_grad and not is_lazy(one)
        }
        with torch.enable_grad():
            parts = [
                one.reshape(()) if by is None else one.reshape(()) / by.to(one.device)
                for one, by in zip(tensors, scales, strict=True)
            ]
            whole = summed(parts)
        step = self.clock.now().global_step
        return Derivatives(whole, trained, outputs, self._aside, step, self._hindrance(trained.values()))

    def _hindrance(self, trained: Iterable[Tensor]) -> str:
        """The reason why the loss cannot be differentiated in addition to the training's backward; empty if it can."""
        tops = [top for _, top in self.models.tops]
        inside = itertools.chain.from_iterable(map(walking.modules, tops))
        parameters = itertools.chain.from_iterable(map(walking.parameters, tops))
        if any(map(is_distributed, parameters)) or any("_is_fsdp_managed_module" in vars(one) for one in inside):
            return "the model is sharded, so a backward of one rank waits for all others"
        if any(isinstance(one, DistributedDataParallel) and one.static_graph for one in self.ranks.around):
            return "DistributedDataParallel with static_graph=True takes each backward for the training's"
        if any(one.is_complex() for one in trained):
            return "the model has complex parameters"
        return ""

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Hide the differentiation from all exporters, and restore what a checkpoint's second forward changes."""
        gates = [gate for one in BACKWARD.watchers if (gate := one.gate).open]
        with contextlib.ExitStack() as stack:
            for gate in gates:
                stack.callback(setattr, gate, "open", True)
                gate.open = False
            for _, top in self.models.tops:
                stack.enter_context(restored(top))
            stack.enter_context(torch.enable_grad())
            yield
