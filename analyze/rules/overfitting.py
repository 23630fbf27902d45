"""A loss that rises in evaluations while the training loss falls."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import final

from analyze.metrics.inputs import check, is_number, is_whole, single_number
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding
from analyze.rules.rule import Rule
from tracer.messaging.messages import DEFAULT_TAG, Message


@final
class Overfitting(Rule):
    """A loss of evaluations that rises, while that of the training falls.

    Parameters
    ----------
    rise : float
        By which share the evaluations' loss exceeds its best.
    patience : int
        At how many evaluations in a row.
    evaluation : str
        The tag of the evaluations.

    Notes
    -----
    *Fires* where the mean loss of an evaluation exceeds the best one so far by `rise`, and the median loss of the steps
    since the evaluation before is below that of the steps before the best one.
    *Needs* the loss of the training and of at least three evaluations.
    *Source*: L. Prechelt, "Early Stopping - But When?", 1998: the generalisation loss GL. smdebug's ``Overfit``
    compares the two losses with each other instead.
    """

    name = "overfitting"
    memory = ("training", "evaluated", "place", "trained", "done", "best")
    judges = "losses of the training and of three evaluations"
    numbers = ("best", "best_step", "training")
    advice = "stop at the best evaluation, or take more data, augmentation, dropout or weight decay"

    def __init__(self, *, rise: float = 0.1, patience: int = 3, evaluation: str = "eval") -> None:
        check(is_number(rise) and rise > 0, "a rise is a positive number", rise)
        check(is_whole(patience, 1), "patience is a positive integer", patience)
        super().__init__(["loss"], patience=patience, tag=None)
        self.rise, self.evaluation = rise, evaluation
        self.training: list[float] = []
        self.evaluated: list[float] = []
        self.place: Place | None = None
        self.trained: Place | None = None
        self.done = 0
        self.best = (math.inf, 0, math.inf)  # the loss, its step, and the training loss at that time

    def look(self, message: Message) -> Iterator[Message]:
        """Store a loss; the first training loss after an evaluation ends it, and it is judged."""
        loss = single_number(message.data)
        if loss is None or not math.isfinite(loss):
            return
        if message.tag == self.evaluation:
            self.weigh(message)
            self.evaluated.append(loss)
            self.place = Place.of(message)
        elif message.tag == DEFAULT_TAG:
            yield from self.evaluation_over()
            self.trained = Place.of(message)
            self.weigh(message)
            self.training.append(loss)

    def conclude(self) -> Iterator[Message]:
        """Judge the last evaluation."""
        yield from self.evaluation_over()
        yield from super().conclude()

    def evaluation_over(self) -> Iterator[Message]:
        """Judge a finished evaluation, if there is one, by its mean loss."""
        if not self.evaluated or self.place is None:
            return
        loss = statistics.fmean(self.evaluated)
        training = statistics.median(self.training) if self.training else math.inf
        place, self.evaluated, self.training, self.place = self.place, [], [], None
        self.done += 1
        best, step, trained = self.best
        if self.done >= 3:
            if self.trained is not None:
                self.judged(self.trained)
            bound = best + self.rise * abs(best)
            yield from self.judge(place, loss > bound and training < trained, loss, bound, best, step, training)
        if loss < best:
            self.best = (loss, place.global_step, training)

    def evidence(self, found: Finding) -> str:
        best, step, training = (found.numbers[one] for one in self.numbers)
        return (
            f"the loss of the evaluation was {found.value:.4g} in step {found.worst} and {best:.4g} in step "
            f"{step:.0f}, while that of the training fell to {training:.4g}"
        )
