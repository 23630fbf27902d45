"""Rules about what a program sets: learning rates, the mode of the network, and what loss functions are given."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import Extent, shared
from analyze.rules.finding import Finding, Place, Severity
from analyze.rules.rule import Looking, Rule, TableRule, modules_of
from analyze.rules.tables import Bools, OfKind, Table
from tracer.messaging.messages import DEFAULT_TAG, EVAL_MODE, EVAL_TAG, TRAIN_MODE, Message
from tracer.messaging.subscription import is_doubled
from tracer.numbers.arrays import as_array
from tracer.numbers.past import median
from tracer.numbers.statistics import are_statistics

_JUMP, _ZERO, _BESIDE = 0, 1, 2
_SCHEDULED = ("initial_lr", "max_lr")
"""The entries of a group in which PyTorch's schedules keep the rate that they were given."""
_TOLERANCE = 1 + 1e-6


class _GroupRate(NamedTuple):
    """The learning rate of a group in a step, and the largest rate that its schedule was given (0 without one)."""

    place: Place
    rate: float
    scheduled: float

    @property
    def group(self) -> str:
        """The number of the optimizer and of its group, such as ``0.1``."""
        return self.place.series[2]

    @property
    def optimizer(self) -> str:
        """The number of the optimizer."""
        return self.group.partition(".")[0]


@final
class LearningRate(Rule):
    """A learning rate that jumps up, that is zero from a step on, or that is far above that of the other groups.

    Parameters
    ----------
    factor : float
        By which factor a rate exceeds all before it, or that of the other groups.
    patience : int
        At how many recorded steps in a row all rates must be zero.
    warm_up : int
        After how many recorded steps a rate is judged beside those before: a warm-up may begin with steep steps.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the rate of a group, after the warm-up, exceeds from one step to the next all before it `factor`
    times, and what the group's schedule was given (``initial_lr``, ``max_lr``); a warm-up from zero, and a restart to a
    rate that was there before, are none. Or where the rates of all groups are zero at `patience` steps in a row:
    nothing is learned there. Where a rate is `factor` times the median of those of the optimizer's other groups, it is
    a note: it may be meant.
    *Needs* ``hyperparameters``.
    *Source*: arithmetic; for what schedules do L. Smith, "Cyclical Learning Rates", arXiv:1506.01186, and I. Loshchilov
    and F. Hutter, "SGDR", arXiv:1608.03983.
    """

    name = "learning_rate"
    judges = "hyperparameters with a learning rate"
    numbers = ("why", "usual", "groups", "step")
    advice = "look at what sets the learning rate: the schedule and its number of steps, or a group's own setting"

    def __init__(
        self, *, factor: float = 20.0, patience: int = 10, warm_up: int = 16, **where: Unpack[Looking]
    ) -> None:
        check(is_number(factor) and factor > 1, "the factor of learning_rate is a number above 1", factor)
        check(is_whole(warm_up, 1), "a warm-up is a positive integer", warm_up)
        super().__init__(["hyperparameters"], patience=patience, **where)
        self.factor, self.wait, self.warm_up = factor, patience, warm_up
        self.patience = 1  # of jumps; zeros are counted in `zeros`
        self.last: dict[str, tuple[int, float]] = {}
        self.highest: dict[str, float] = {}
        self.steps: dict[str, int] = {}
        self.zeros: list[Place] = []  # the steps in a row, up to `patience`, at which all rates were zero
        self.now: list[_GroupRate] = []

    def look(self, message: Message) -> Iterator[Message]:
        """Store the learning rate of a group."""
        names = (message.sampling or {}).get("entries")
        data = message.data
        if data is None or not isinstance(names, list) or "lr" not in names or data.shape != (len(names),):
            return
        told = dict(zip(names, data.tolist(), strict=True))
        if math.isfinite(told["lr"]):
            scheduled = max((abs(told[name]) for name in _SCHEDULED if name in told), default=0.0)
            self.now.append(_GroupRate(Place.of(message), told["lr"], scheduled))
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the rates of a step."""
        now, self.now = self.now, []
        if not now:
            return
        yield from self._look_for_jumps(now)
        yield from self._look_for_zeros(now)
        for name in dict.fromkeys(one.optimizer for one in now):
            yield from self._compare([one for one in now if one.optimizer == name])

    def _look_for_jumps(self, now: list[_GroupRate]) -> Iterator[Message]:
        """Judge the rates beside those before."""
        jumped = []
        for one in now:
            step, rate = one.place.global_step, one.rate
            before = self.last.get(one.group)
            highest = self.highest.get(one.group, 0.0)
            self.steps[one.group] = self.steps.get(one.group, 0) + 1
            warm = self.steps[one.group] > self.warm_up
            if warm and before is not None and before[1] > 0 and step > before[0]:
                beyond = rate > self.factor * (step - before[0]) * highest
                if beyond and rate > one.scheduled * _TOLERANCE:
                    jumped.append((one, before[1]))
            self.last[one.group] = step, rate
            self.highest[one.group] = max(highest, rate)
        for one in now:
            if not jumped or one is not jumped[0][0]:
                yield from self.judge(one.place, False, one.rate, 0.0, _JUMP, 0.0, 0.0, 0.0)
        if jumped:
            one, before_it = jumped[0]
            bound = self.factor * before_it
            numbers = _JUMP, before_it, len(jumped), one.place.global_step
            yield from self.judge(one.place, True, one.rate, bound, *numbers)

    def _look_for_zeros(self, now: list[_GroupRate]) -> Iterator[Message]:
        """Judge whether all rates have been zero for long."""
        place = _of(now[0].place, "")
        if any(one.rate for one in now):
            self.zeros = []
            if place[:2] in self.episodes:  # it is no stream of its own, so it covers nothing
                yield from self.judge(place, False, 0.0, 0.0, _ZERO, 0.0, 0.0, 0.0)
            return
        if not self.zeros or self.zeros[-1].global_step != place.global_step:
            self.zeros = [*self.zeros[: self.wait - 1], place]
        if len(self.zeros) == self.wait:
            usual = max(self.highest[one.group] for one in now)
            numbers = _ZERO, usual, len(now), self.zeros[0].global_step
            yield from self.judge(place, True, 0.0, 0.0, *numbers, since=self.zeros[0])

    def _compare(self, groups: list[_GroupRate]) -> Iterator[Message]:
        """Judge the rates of the groups of one optimizer beside each other."""
        if len(groups) < 2:
            return
        greatest = max(groups, key=lambda one: one.rate)
        others = median([one.rate for one in groups if one is not greatest])
        bad = others > 0 and greatest.rate > self.factor * others
        place = _of(greatest.place, greatest.optimizer)
        numbers = _BESIDE, others, float(greatest.group.partition(".")[2] or 0), place.global_step
        if bad or place[:2] in self.episodes:
            yield from self.judge(place, bad, greatest.rate, self.factor * others, *numbers, severity=Severity.NOTE)

    def evidence(self, found: Finding) -> str:
        why, usual, groups, step = (found.numbers[name] for name in self.numbers)
        if why == _JUMP:
            several = f" of {groups:.0f} groups" if groups > 1 else ""
            factor = found.value / usual
            return (
                f"the learning rate{several} was {found.value:.3g} in step {step:.0f}, {factor:.3g} times that before"
            )
        if why == _ZERO:
            return f"all learning rates were 0 from step {step:.0f} to {found.last}; the highest had been {usual:.3g}"
        return (
            f"group {groups:.0f} of the optimizer has the learning rate {found.value:.3g}, {found.value / usual:.3g} "
            "times that of the others"
        )


def _of(place: Place, leaf: str) -> Place:
    """A place with another leaf: that of an optimizer, or of none."""
    module, tag, _, rank = place.series
    return place._replace(series=(module, tag, leaf, rank))


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


CROSS_ENTROPY = ("cross_entropy", "CrossEntropyLoss")
_NEGATIVE_LOG = ("nll_loss", "NLLLoss")
_WITH_LOGITS = ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss")
_EQUAL_SHAPES = (
    "mse_loss", "MSELoss", "l1_loss", "L1Loss", "smooth_l1_loss", "SmoothL1Loss", "huber_loss", "HuberLoss",
)  # fmt: skip
_ROUNDING = 1e-3


@dataclass
class Argument:
    """The output or the labels that a loss function was given: place, extent, shape if known, and some statistics."""

    place: Place
    extent: Extent
    shape: tuple[int, ...] | None
    least: float
    greatest: float
    total: float
    zeros: float

    @classmethod
    def of(cls, message: Message) -> Argument | None:
        """The argument in a message; None without data."""
        extent, data = Extent.of(message), message.data
        if extent is None or data is None or not extent.count or data.is_complex():
            return None
        shape = None if are_statistics(message.sampling) else tuple(data.shape)
        least, greatest, mean, zeros = (shared(message, name) for name in ("min", "max", "mean", "zeros"))
        return cls(Place.of(message), extent, shape, least, greatest, mean * extent.count, zeros)


class OfLossFunctions(Rule):
    """A rule about what loss functions are given: a subclass implements `look_at`."""

    takes_statistics = "too"
    judges = "calls of loss functions, with the network's output and labels"

    def __init__(self, *, patience: int, **where: Unpack[Looking]) -> None:
        needs = ["network_output", "input_labels", "loss_terms"]
        super().__init__(needs, also=("input_data",), patience=patience, **where)
        self.output: Argument | None = None
        self.labels: Argument | None = None
        self.rows: set[int] = set()  # the numbers of rows of this step's inputs

    def look(self, message: Message) -> Iterator[Message]:
        """Store the arguments of a loss function; judge them when its result comes."""
        if message.kind == "input_data":
            if message.data is not None and message.data.ndim and not are_statistics(message.sampling):
                self.rows.add(len(message.data))
        elif message.kind == "network_output":
            self.output, self.labels = None if message.leaf else Argument.of(message), None
        elif message.kind == "input_labels":
            told = None if message.leaf else Argument.of(message)
            if told is None or told.shape is not None or self.labels is None or self.labels.shape is None:
                self.labels = told  # the data of labels tells more than their statistics
        elif self.output is not None and self.labels is not None:
            output, labels = self.output, self.labels
            self.output = self.labels = None
            value = shared(message, "mean")
            if output.extent.floating and math.isfinite(output.total):
                yield from self.look_at(message.leaf, value, output, labels)

    def look_back(self) -> Iterator[Message]:
        """Forget the arguments of a step."""
        self.output, self.labels, self.rows = None, None, set()
        yield from ()

    @abstractmethod
    def look_at(self, name: str, value: float, output: Argument, labels: Argument) -> Iterator[Message]:
        """Judge a call of a loss function.

        Parameters
        ----------
        name : str
            The name of the function, of the class of the loss module, or of the module in the network.
        value : float
            The result, or its mean.
        output, labels : Argument
        """


def _rows(output: Argument, labels: Argument) -> float:
    """How many distributions over classes an output has, by its labels: indices, or probabilities that sum to one."""
    if labels.extent.count == output.extent.count:
        return labels.total if labels.extent.floating and labels.least >= 0 else math.nan
    return math.nan if labels.extent.floating else labels.extent.count


def _are_probabilities(output: Argument, rows: float) -> bool:
    """Whether an output may be the probabilities of classes: from 0 to 1, with a sum of 1 for each row."""
    within = output.least >= 0 and output.greatest <= 1 + _ROUNDING
    return within and output.extent.count > rows >= 1 and abs(output.total - rows) <= _ROUNDING * rows


def _is_cross_entropy(name: str, value: float, output: Argument, rows: float) -> bool:
    """Whether a loss is the cross-entropy of logits, by its name, or else by what it makes of probabilities."""
    if name in CROSS_ENTROPY:
        return True
    if name.rpartition(".")[2] in (*_NEGATIVE_LOG, *_WITH_LOGITS, *_EQUAL_SHAPES) or not rows > 0:
        return False
    most = math.log(output.extent.count / rows - 1 + math.e)  # of a distribution that is sure of another class
    return most - 1 - _ROUNDING <= value <= most + _ROUNDING


@final
class SoftmaxBeforeLoss(OfLossFunctions):
    """Probabilities where the loss function takes logits or their logarithms, as after a softmax too many.

    Parameters
    ----------
    patience : int
        At how many recorded steps in a row; of a sigmoid, ten times as many.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the rows of the network's output are from 0 to 1 and have a sum of 1, and the loss function is
    ``cross_entropy``, which takes the softmax itself, or ``nll_loss``, which takes logarithms; or where all outputs
    since the first recorded step are from 0 to 1, and the loss function is ``binary_cross_entropy_with_logits``, which
    takes the sigmoid itself. The loss then cannot become small, and its gradient vanishes.
    *Needs* ``network_output``, ``input_labels`` and ``loss_terms``, as loss functions of PyTorch get and give them.
    *Source*: the documentation of ``torch.nn.CrossEntropyLoss``: its input is unnormalised logits.
    """

    name = "softmax_before_loss"
    numbers = ("why",)
    advice = (
        "give the loss function the logits: remove the softmax or sigmoid before it, or take log_softmax for nll_loss"
    )

    def __init__(self, *, patience: int = 3, **where: Unpack[Looking]) -> None:
        super().__init__(patience=patience, **where)
        self.within: dict[str, int] = {}  # by loss function: the steps since the first with outputs from 0 to 1

    def look_at(self, name: str, value: float, output: Argument, labels: Argument) -> Iterator[Message]:
        rows = _rows(output, labels)
        if name.rpartition(".")[2] in _WITH_LOGITS:
            known = self.within.get(name, 0)
            inside = output.least >= 0 and output.greatest <= 1 and output.least < output.greatest
            self.within[name] = known + 1 if inside and known >= 0 else -1
            yield from self.judge(output.place, self.within[name] > 10 * self.patience, output.greatest, 1.0, 2)
            return
        bad = _are_probabilities(output, rows)
        if name in _NEGATIVE_LOG:
            yield from self.judge(output.place, bad, 1.0, 1.0, 1)
        else:
            bad = bad and _is_cross_entropy(name, value, output, rows)
            yield from self.judge(output.place, bad, 1.0, 1.0, 0)

    def evidence(self, found: Finding) -> str:
        return (
            "each row of the network's output has a sum of 1, and cross_entropy takes the softmax again",
            "each row of the network's output has a sum of 1, and nll_loss takes logarithms of probabilities",
            "all outputs are from 0 to 1, and binary_cross_entropy_with_logits takes the sigmoid again",
        )[int(found.numbers["why"])] + f", at {found.steps} recorded steps"


@final
class ReluBeforeLoss(OfLossFunctions):
    """Logits that cannot be negative, as after a ReLU too many.

    Parameters
    ----------
    share : float
        Which share of the numbers must be zero.
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where none of the network's outputs is negative and at least `share` of them are exactly zero, and the loss
    function is ``cross_entropy`` or ``binary_cross_entropy_with_logits``. A class whose logit is zero gets no gradient,
    and no class can be less likely than that.
    *Needs* ``network_output``, ``input_labels`` and ``loss_terms``, as loss functions of PyTorch get and give them.
    *Source*: the documentation of ``torch.nn.CrossEntropyLoss``: its input is unnormalised logits.
    """

    name = "relu_before_loss"
    numbers = ("zeros",)
    advice = "give the loss function the output of the last linear layer: remove the ReLU after it"

    def __init__(self, *, share: float = 0.05, patience: int = 5, **where: Unpack[Looking]) -> None:
        check(is_number(share) and 0 < share <= 1, "a share is a number from 0 to 1", share)
        super().__init__(patience=patience, **where)
        self.share = share

    def look_at(self, name: str, value: float, output: Argument, labels: Argument) -> Iterator[Message]:
        takes_logits = name.rpartition(".")[2] in (*CROSS_ENTROPY, *_WITH_LOGITS)
        share = output.zeros / output.extent.count
        clipped = output.least == 0 and share >= self.share and output.greatest > 0
        bad = clipped and not _are_probabilities(output, _rows(output, labels))
        if takes_logits:
            yield from self.judge(output.place, bad, share, self.share, output.zeros)

    def evidence(self, found: Finding) -> str:
        return (
            f"{found.value:.0%} of the network's outputs were exactly zero in step {found.worst}, and none was "
            f"negative at {found.steps} recorded steps"
        )


@final
class LossBroadcasts(OfLossFunctions):
    """Outputs and labels of other shapes, so that a loss compares each output with the labels of all datapoints.

    Parameters
    ----------
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the output has as many numbers as the labels and one axis more, or less, and the two are broadcast to
    more numbers than either has: of shapes (B, 1) and (B,) PyTorch compares B x B pairs, and the network learns the
    mean of the labels.
    *Needs* ``network_output``, ``input_labels`` and ``loss_terms``, as loss functions of PyTorch get and give them.
    *Source*: the semantics of broadcasting of PyTorch, which warns of it once.
    """

    name = "loss_broadcasts"
    numbers = ("axes", "axes_of_labels")
    advice = "give output and labels one shape: output.squeeze(-1), or labels.unsqueeze(-1)"

    def __init__(self, *, patience: int = 1, **where: Unpack[Looking]) -> None:
        super().__init__(patience=patience, **where)

    def look_at(self, name: str, value: float, output: Argument, labels: Argument) -> Iterator[Message]:
        if not labels.extent.floating and name.rpartition(".")[2] not in _EQUAL_SHAPES:
            return
        count, axes, of_labels = output.extent.count, output.extent.axes, labels.extent.axes
        pairs = count
        if count == labels.extent.count and axes != of_labels:
            if output.shape is not None and labels.shape is not None:
                pairs = _broadcast(output.shape, labels.shape)
            elif {axes, of_labels} == {1, 2} and count in self.rows:
                pairs = count * count
        yield from self.judge(output.place, pairs > count, pairs, count, axes, of_labels)

    def evidence(self, found: Finding) -> str:
        axes, of_labels = (int(found.numbers[name]) for name in self.numbers)
        return (
            f"the output has {axes} ax{'i' if axes == 1 else 'e'}s and the labels have {of_labels}, so that "
            f"{found.threshold:,.0f} outputs and as many labels were compared in {found.value:,.0f} pairs"
        )


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many numbers two shapes are broadcast to; that of the first if they cannot be.

    Examples
    --------
    >>> _broadcast((8, 1), (8,)), _broadcast((1, 8), (8,)), _broadcast((8, 3), (8,))
    (64, 8, 24)
    """
    length = max(len(one), len(other))
    pairs = zip((1,) * (length - len(one)) + one, (1,) * (length - len(other)) + other, strict=True)
    sizes = [(a, b) for a, b in pairs]
    if any(a != b and 1 not in (a, b) for a, b in sizes):
        return math.prod(one)
    return math.prod(max(a, b) for a, b in sizes)
