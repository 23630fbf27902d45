"""Outputs that no longer depend on the input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack, final

import numpy as np

from analyze.metrics.inputs import check, is_number
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array


@final
class RankCollapse(Rule):
    """Outputs of a layer that are nearly the same for all datapoints of a batch.

    Parameters
    ----------
    spread : float
        How far the outputs are from their mean over the batch, beside their norm.
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the norm of the outputs less their mean over the batch is below `spread` times their norm. Outputs
    that are equal to the bit at the first recorded step, as embeddings of places are, do not depend on the input by
    design.
    *Needs* activations of four datapoints or more.
    *Source*: Y. Dong, J.-B. Cordonnier, A. Loukas, "Attention is not all you need", arXiv:2103.03404, section 2;
    H. Daneshmand et al., "Batch Normalization Provably Avoids Rank Collapse", arXiv:2003.01652.
    """

    name = "rank_collapse"
    memory = ("constant",)
    judges = "activations of several datapoints"
    advice = "add normalisation or residual connections; look at whether the layers before it are dead or saturated"

    def __init__(self, *, spread: float = 1e-3, patience: int = 5, **where: Unpack[Looking]) -> None:
        check(is_number(spread) and 0 < spread < 1, "a spread is a number between 0 and 1", spread)
        super().__init__(["activations"], patience=patience, **where)
        self.spread = spread
        self.constant: dict[tuple[object, ...], bool] = {}

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one output."""
        data = message.data
        if data is None or data.ndim < 2 or data.shape[0] < 4 or not data.is_floating_point():
            return
        x = as_array(data).reshape(data.shape[0], -1)
        if not x.size:
            return
        with np.errstate(all="ignore"):
            x = x.astype(np.float64)
            norm = float(np.linalg.norm(x))
            if not 0 < norm < np.inf:
                return
            spread = float(np.linalg.norm(x - x.mean(axis=0))) / norm
        if self.constant.setdefault(tuple(Place.of(message)[:2]), spread == 0):
            return
        yield from self.judge(message, spread < self.spread, spread, self.spread, worse=False)

    def evidence(self, found: Finding) -> str:
        return f"its outputs for the datapoints of step {found.worst} differ by {found.value:.1e} of their norm"
