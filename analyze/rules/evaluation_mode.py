"""Modules that behave as in an evaluation while the network is trained, or the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, is_whole
from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.metrics.streams import Series, series_of
from analyze.rules.finding import Finding
from analyze.rules.header import modules_of
from analyze.rules.rule import Place, Rule
from tracer.messaging.messages import DEFAULT_TAG, EVAL_MODE, EVAL_TAG, TRAIN_MODE, Message
from tracer.messaging.subscription import is_doubled
from tracer.numbers.arrays import as_array
from tracer.numbers.statistics import are_statistics

_PASSES, _DROPOUT, _NORMALISATION, _MODE, _EVALUATED = range(5)
_OFFSET = 0.1
_CERTAIN = 6.0
_Channels: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]


@final
class EvaluationMode(Rule):
    """A network that is trained in evaluation mode, wholly or in part, or that is evaluated in training mode.

    Parameters
    ----------
    patience : int
        At how many recorded steps in a row; of a batch normalisation, over how many steps its outputs are averaged.
    modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* at a step whose training pass is recorded as one in eval mode, without `patience`; in traces that do not
    say so, where steps have updates, and only passes in evaluation mode; where a dropout zeroes nothing; where the
    means of a batch normalisation's outputs are not its biases: for half of the channels, the mean of `patience` steps
    is off by more than a tenth of a standard deviation, and by more than 6 standard errors. It also fires where the
    loss of an evaluation is recorded as one of a single pass in train mode, in which a dropout or a batch
    normalisation is active. Passes in train mode without a loss of their own are meant, as those that recompute the
    statistics of a batch normalisation, and those of teachers and of generators.
    *Needs* ``weight_updates``, and activations of the training passes; of a dropout, a header that says its
    probability; of a batch normalisation, ``biases``, too, and the data of both, not statistics.
    *Source*: S. Ioffe and C. Szegedy, "Batch Normalization", arXiv:1502.03167, for the mean; what dropout does is
    PyTorch's documentation.
    """

    name = "evaluation_mode"
    takes_statistics = "too"
    memory = ("in_eval_mode", "passes", "updated", "before", "means", "biases", "offsets")
    judges = "updates of weights, and training passes"
    numbers = ("why",)
    advice = "call model.train() before each epoch of the training, and model.eval() before each evaluation"

    def __init__(self, *, patience: int = 10, modules: str | Iterable[str] | None = None) -> None:
        check(is_whole(patience, 3), "patience is an integer from 3 on", patience)
        kinds = ("network_output", "activations", "biases", EVAL_MODE, TRAIN_MODE)
        super().__init__([("weight_updates",), kinds], patience=patience, tag=None, modules=modules)
        self.dropouts: set[str] = set()
        self.normalisations: set[str] = set()
        self.in_eval_mode: Message | None = None  # says that the training pass of this step ran in eval mode
        self.passes: dict[str, Message] = {}  # the first message of a pass in this step, by tag
        self.updated = False
        self.before: tuple[int, float] | None = None  # the counts of numbers and of zeros of the previous output
        self.means: dict[Series, tuple[Place, _Channels]] = {}
        self.biases: dict[str, NDArray[np.float64]] = {}
        self.offsets: dict[Series, list[tuple[Place, NDArray[np.float64]]]] = {}

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the dropouts and the batch normalisations."""
        for one in modules_of(model):
            probability = one.said.get("probability")
            if isinstance(probability, (int, float)) and probability >= 0.01:
                self.dropouts.add(one.name)
            if one.kind in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
                self.normalisations.add(one.name)

    def look(self, message: Message) -> Iterator[Message]:
        """Store what a step has, and judge the outputs of dropouts."""
        if message.kind == EVAL_MODE:
            self.in_eval_mode = message
            return
        if message.kind == TRAIN_MODE:
            place = Place.of(message)._replace(kind="network_output")
            yield from self.judge(place, True, 1.0, 1.0, _EVALUATED, patience=1)
            return
        data, extent = message.data, Extent.of(message)
        if data is None or extent is None or not extent.floating or not extent.count:
            return
        if message.kind == "weight_updates":
            self.updated = self.updated or (message.tag == DEFAULT_TAG and shared(message, "zeros") < extent.count)
        elif message.kind == "biases":
            if message.key in self.normalisations and not are_statistics(message.sampling):
                self.biases[message.key or ""] = as_array(data).astype(np.float64)
        else:
            self.passes.setdefault(message.tag, message)
            if message.kind == "activations" and message.tag == DEFAULT_TAG:
                yield from self._look_at(message, data, extent.count)

    def _look_at(self, message: Message, data: Tensor, numbers: int) -> Iterator[Message]:
        """Judge the output of a dropout; store the means of a batch normalisation's output."""
        if not is_doubled(message.sampling):  # if doubled, the message with its statistics is judged instead
            zeros = shared(message, "zeros")
            judged = numbers >= 1000 and zeros < numbers and not shared(message, "nan")
            if message.key in self.dropouts and judged:
                of_input = self.before[1] if self.before is not None and self.before[0] == numbers else 0
                yield from self.judge(message, zeros <= of_input, zeros, of_input, _DROPOUT)
            self.before = numbers, zeros
        of_channels = message.key in self.normalisations and not are_statistics(message.sampling)
        if of_channels and data.ndim >= 2 and data.shape[0] >= 4:
            self.means[series_of(message)] = Place.of(message), _standardised(as_array(data))

    def look_back(self) -> Iterator[Message]:
        """Judge the passes of a step, and the means of its batch normalisations."""
        training, evaluation = self.passes.get(DEFAULT_TAG), self.passes.get(EVAL_TAG)
        at = self.in_eval_mode or ((training or evaluation) if self.updated else None)
        if at is not None:
            place = Place("network_output", (None, DEFAULT_TAG, "", at.rank), *Place.of(at)[2:])
            if self.in_eval_mode is not None:
                yield from self.judge(place, True, 1.0, 1.0, _MODE, patience=1)
            else:
                yield from self.judge(place, training is None, 1.0, 1.0, _PASSES)
        for series, (place, (mean, deviation)) in self.means.items():
            bias = self.biases.get(series[0] or "")
            if bias is None or bias.shape != mean.shape:
                continue
            self.weigh(place)
            offsets = self.offsets.setdefault(series, [])
            if offsets and offsets[0][1].shape != mean.shape:
                offsets.clear()
            with np.errstate(all="ignore"):
                offsets.append((place, (mean - bias) / deviation))
            del offsets[: -self.patience]
            if len(offsets) == self.patience:
                all_of = np.stack([one for _, one in offsets])
                with np.errstate(all="ignore"):
                    error = all_of.std(axis=0, ddof=1) / np.sqrt(len(all_of))
                    mean_off = np.abs(all_of.mean(axis=0))
                off = (mean_off > _OFFSET) & (mean_off > _CERTAIN * error)
                share = float(off.mean())
                usual = float(np.median(mean_off))
                yield from self.judge(place, share >= 0.5, usual, _OFFSET, _NORMALISATION, since=offsets[0][0])
        self.passes, self.means, self.updated, self.before, self.in_eval_mode = {}, {}, False, None, None

    def evidence(self, found: Finding) -> str:
        why = int(found.numbers["why"])
        if why == _MODE:
            more = f"; so were {found.steps - 1:,} more recorded steps, up to {found.last:,}" if found.steps > 1 else ""
            return f"step {found.first:,} was trained while the model was in eval() mode{more}"
        if why == _PASSES:
            return f"{found.steps} recorded steps had updates, but only passes in evaluation mode"
        if why == _EVALUATED:
            return (
                f"evaluations at {found.steps} recorded step{'s' if found.steps > 1 else ''} have losses of passes in "
                "train() mode: dropouts drop, and batch normalisations learn from what is evaluated"
            )
        if why == _DROPOUT:
            return f"this dropout set nothing to zero at {found.steps} recorded steps of the training"
        return (
            f"its outputs are {found.value:.2g} standard deviations away from what the statistics of a batch give: it "
            "uses running statistics"
        )


def _standardised(x: NDArray[Any]) -> _Channels:
    """The mean and the standard deviation of each channel."""
    axes = (0, *range(2, x.ndim))
    with np.errstate(all="ignore"):
        x = x.astype(np.float64)
        return x.mean(axis=axes), np.maximum(x.std(axis=axes), 1e-12)
