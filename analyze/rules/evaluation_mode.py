"""Modules that behave as in an evaluation while the network is trained, or the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.inputs import check, is_whole
from analyze.metrics.metric import Series, series_of
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding
from analyze.rules.header import modules_of
from analyze.rules.table_rule import TableRule
from analyze.rules.tables import Bools, OfKind, Table
from tracer.messaging.messages import DEFAULT_TAG, EVAL_MODE, EVAL_TAG, TRAIN_MODE, Message
from tracer.messaging.subscription import is_doubled
from tracer.numbers.arrays import as_array

_PASSES, _DROPOUT, _NORMALISATION, _MODE, _EVALUATED = range(5)
_OFFSET = 0.1
_CERTAIN = 6.0
_Channels: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]


@final
class EvaluationMode(TableRule):
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
    statistics = ("zeros", "count", "nan")
    whole = frozenset({"activations", "biases"})
    memory = ("means", "biases", "offsets")
    judges = "updates of weights, and training passes"
    numbers = ("why",)
    advice = "call model.train() before each epoch of the training, and model.eval() before each evaluation"

    def __init__(self, *, patience: int = 10, modules: str | Iterable[str] | None = None) -> None:
        check(is_whole(patience, 3), "patience is an integer from 3 on", patience)
        kinds = ("network_output", "activations", "biases", EVAL_MODE, TRAIN_MODE)
        super().__init__([("weight_updates",), kinds], patience=patience, tag=None, modules=modules)
        self.dropouts: set[str] = set()
        self.normalisations: set[str] = set()
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

    def look_at_data(self, message: Message) -> Iterator[Message]:
        """Take an output into the table, too; store the data of batch normalisations."""
        data = message.data
        if message.kind != "biases" and not is_doubled(message.sampling):
            self.tables.hear(message)
        if data is not None and message.key in self.normalisations and data.is_floating_point() and data.numel():
            if message.kind == "biases":
                self.biases[message.key or ""] = as_array(data).astype(np.float64)
            elif message.tag == DEFAULT_TAG and data.ndim >= 2 and len(data) >= 4:
                self.means[series_of(message)] = Place.of(message), _standardised(as_array(data))
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the table of a step, and the means of its batch normalisations."""
        yield from super().look_back()
        yield from self._look_at_means()

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the passes of each step, and the outputs of dropouts."""
        updates, passes = table.of("weight_updates"), (table.of("network_output"), table.of("activations"))
        changes = _any(_floating(updates) & (updates["zeros"] < updates["count"]) & updates.of_tag(DEFAULT_TAG))
        training, evaluation = (
            _any(np.concatenate([_floating(of) & of.of_tag(tag) for of in passes], axis=1))
            for tag in (DEFAULT_TAG, EVAL_TAG)
        )
        in_eval_mode = _any(table.of(EVAL_MODE).there)
        ranks = [column.series[3] for of in table for column in of.columns]
        for row in np.flatnonzero(in_eval_mode | changes & (training | evaluation)).tolist():
            place = table.place("network_output", (None, DEFAULT_TAG, "", ranks[0]), row)
            if in_eval_mode[row]:
                yield from self.judge(place, True, 1.0, 1.0, _MODE, patience=1)
            else:
                yield from self.judge(place, not training[row], 1.0, 1.0, _PASSES)
        evaluated = table.of(TRAIN_MODE)
        for row, column in zip(*np.nonzero(evaluated.there), strict=True):
            place = table.place("network_output", evaluated.columns[column].series, row)
            yield from self.judge(place, True, 1.0, 1.0, _EVALUATED, patience=1)
        yield from self._look_at_dropouts(table, table.of("activations"))

    def _look_at_dropouts(self, table: Table, of: OfKind) -> Iterator[Message]:
        """Judge whether a dropout sets more to zero than what comes before it."""
        dropouts = of.where(lambda column: column.series[0] in self.dropouts)
        if not dropouts.any():
            return
        count, zeros = of["count"], of["zeros"]
        there = _floating(of) & of.of_tag(DEFAULT_TAG)
        order = np.argsort(np.where(there, of.places, -1), axis=1, kind="stable")
        before = np.zeros(count.shape, np.int64)  # the column of the message before each
        np.put_along_axis(before, order[:, 1:], order[:, :-1], axis=1)
        np.put_along_axis(before, order[:, :1], order[:, :1], axis=1)
        of_input = np.take_along_axis(zeros, before, axis=1)
        is_input = np.take_along_axis(there & (count > 0), before, axis=1) & (before != np.arange(count.shape[1]))
        of_input = np.where(is_input & (np.take_along_axis(count, before, axis=1) == count), of_input, 0.0)
        judged = there & dropouts & (count >= 1000) & (zeros < count) & (of["nan"] == 0)
        yield from self.judge_all(table, of, judged, zeros <= of_input, zeros, of_input, _DROPOUT)

    def _look_at_means(self) -> Iterator[Message]:
        """Judge the means of the outputs of batch normalisations, beside their biases."""
        means, self.means = self.means, {}
        for series, (place, (mean, deviation)) in means.items():
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


def _floating(of: OfKind) -> Bools:
    """Where there are messages of floating-point numbers."""
    return of.there & of.where(lambda column: column.floating) & (of["count"] > 0)


def _any(holds: Bools) -> Bools:
    """At which steps something holds in a column."""
    found: Bools = np.any(holds, axis=1)
    return found
