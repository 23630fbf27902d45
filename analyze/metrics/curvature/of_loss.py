"""The base class of the metrics of curvature: they differentiate the loss when its message comes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from analyze.metrics.checks import check, is_whole
from analyze.metrics.curvature.block import Block
from analyze.metrics.metric import PerMessage
from analyze.metrics.spectra.lanczos import generator_of
from tracer.errors import CaptureError
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Objective


class OfLoss(PerMessage):
    """Answers each training loss with numbers computed from its derivatives, at the weights of the step.

    Parameters
    ----------
    produces : iterable of str
        The kinds of its answers.
    exact : int
        See `check_exact`.
    subsample : int
        As in `tracer.Subscription`.
    modules : str, iterable of str, or None
        Globs over dotted paths: the loss is differentiated by the parameters of these modules only. None means all.
    """

    needs_model = True

    def __init__(
        self,
        produces: Iterable[str],
        *,
        exact: int,
        subsample: int = 1,
        modules: str | Iterable[str] | None = None,
    ) -> None:
        check_exact(exact)
        super().__init__("loss", produces, subsample=subsample)
        self.exact = exact
        self.modules = (modules,) if isinstance(modules, str) else None if modules is None else tuple(modules)
        self._objective: Objective | None = None

    def know_objective(self, objective: Objective | None) -> None:
        """Keep the objective of the next loss; None after its message was delivered."""
        self._objective = objective

    def measure(self, message: Message) -> Iterable[float | Tensor]:
        """The numbers of a loss.

        Raises
        ------
        CaptureError
            If the loss cannot be differentiated, or no longer.
        """
        if self._objective is None:
            raise CaptureError(
                f"{self.name} cannot differentiate the loss of step {message.global_step}: only one on which backward "
                "is called next, not what is logged, and not those of several optimizers, which are told apart when "
                "the step ends"
            )
        return self.of(Block(self._objective, self.modules), generator_of(message))

    @abstractmethod
    def of(self, block: Block, random: np.random.Generator) -> Iterable[float | Tensor]:
        """The numbers of a loss, as a function of the block's parameters."""


def check_exact(exact: object) -> None:
    """Raise `MessageError` unless `exact` is a valid limit of parameters up to which a metric computes exactly."""
    check(is_whole(exact, 0), "exact is a number of parameters, an integer from 0", exact)
