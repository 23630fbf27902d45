"""What a loss function is given: probabilities or clipped numbers for logits, or outputs and labels of other shapes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack, final

from analyze.metrics.checks import check, is_number
from analyze.metrics.moments import Extent, shared
from analyze.rules.finding import Finding, Place
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.statistics import are_statistics

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
