"""Statistics of a published number over an epoch, a window of steps, or the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack, final

from analyze.metrics.checks import check, is_whole
from analyze.metrics.elementwise.statistics import StatisticsResult
from analyze.metrics.inputs import answer, real_numbers
from analyze.metrics.metric import Metric, Where
from analyze.metrics.reducing.reducers import Reducer, check_reductions
from analyze.metrics.streams import At, Series, packed_series, series_of, unpacked_series
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array

BOX = "mean+std+min+q0.25+median+q0.75+max"
"""The default statistics: the mean, the standard deviation, and the five numbers of a box plot."""


def aggregate(values: Array, which: str | Iterable[str] = BOX) -> StatisticsResult:
    """Statistics of numbers, in the order in which they came.

    Parameters
    ----------
    values : array of any shape and real dtype
    which : str or iterable of str
        ``mean``, ``std`` and ``variance`` (of the sample: over n - 1), ``min``, ``max``, ``median``, quantiles such as
        ``q0.25`` (the first quartile), ``iqr`` (the third quartile less the first), ``first``, ``last``, ``sum``,
        ``count``, and the other statistics of `statistics`. A string has a plus between them.

    Returns
    -------
    StatisticsResult
        A float for each, by name and as attributes.

    Raises
    ------
    MessageError
        If a reduction is unknown.

    Examples
    --------
    >>> found = aggregate([1, 2, 3, 4, 10], "min+median+q0.75+iqr")
    >>> dict(found)
    {'min': 1.0, 'median': 3.0, 'q0.75': 4.0, 'iqr': 2.0}
    """
    names = check_reductions(which)
    reducer = Reducer()
    reducer.add(real_numbers(values))
    return StatisticsResult(reducer.answer(names))


def check_window(over: object) -> None:
    """Raise `MessageError` unless `over` is ``"epoch"``, ``"run"`` or a positive integer."""
    good = over in ("epoch", "run") or is_whole(over, 1)
    check(good, "over is 'epoch', 'run' or a positive number of steps", over)


@dataclass
class _Window(At):
    """The numbers of one series in one window, and the place of the last of them."""

    reducer: Reducer = field(default_factory=Reducer)


@final
class Aggregate(Metric):
    r"""Statistics of a published number, such as a loss or a norm, over each epoch, window of steps, or the run.

    Answers ``{kind}_aggregate_{reduction}`` for each of `which`, such as ``loss_aggregate_median``: a float64 scalar,
    in the unit of the numbers, for each stream (module, tag, leaf) and window, with the step of the window's last
    message, as soon as the stream's next window begins or the run ends. It takes what other subscribers answer:
    ``Norm()`` and ``Aggregate("weights_norm2")`` together give each weight's norm over an epoch.

    Parameters
    ----------
    kind : str
        A kind whose messages carry numbers. Each element of a message counts: the losses of all datapoints, if each has
        one; all activations of all steps, if that is what is asked.
    over : "epoch", "run" or int
        A number n stands for windows of n steps, from those whose global step is 0 to n - 1 on.
    which : str or iterable of str
        ``mean``, ``std`` and ``variance`` (of the sample: over n - 1), ``min``, ``max``, ``median``, quantiles such as
        ``q0.25`` (the first quartile), ``iqr`` (the third quartile less the first), ``first``, ``last``, ``sum``,
        ``count``, and the other statistics of `Statistics`.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, a reduction is unknown, or `over` is none of these.

    Notes
    -----
    *Formula*: those of `Statistics` and `Quantiles`, of all numbers of the window.
    *Needs*: in a replay of some steps, all steps of a window; a window that is cut is answered as far as it was heard.
    *Cost*: that of keeping the numbers, some 20 microseconds a message.
    *Invariant to* the order of the numbers (but for first and last); scales with them.
    *Edge values*: NaN among the numbers gives NaN in all but the counts, ``first`` and ``last``; std of one number is
    NaN. A window without numbers has no answer. Complex numbers count as NaN. Never raises during a replay.
    *Memory*: for each stream the open window: its numbers, up to 4096; then their moments and how many lie in each bin.
    Part of `state_dict`, and can be merged.
    *Numerics*: float64; moments to rounding of any number of numbers; quantiles exact of up to 4096 numbers in a
    window, of more good to 0.05 % of the numbers that they lie between.
    *Source*: P. Pébay, SAND2008-6212 (2008), for merging; Hyndman and Fan (1996), definition 7, for quantiles.
    *Formerly*: monitorch's aggregation methods (whose min gave the maximum, whose Q3 gave Q1, and whose median an
    observation beside it) and its running means; ikkuna's accuracies once per epoch.

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> by_epoch, answers = Aggregate(which="mean+median"), []
    >>> for step, value in enumerate([3.0, 1.0, 8.0, 5.0]):
    ...     where = dict(global_step=step, train_step=step % 3, epoch=step // 3)
    ...     answers += by_epoch.compute(NetworkMessage(kind="loss", data=torch.tensor(value), **where))
    >>> [(said.kind, said.epoch, said.global_step, float(said.data)) for said in answers]
    [('loss_aggregate_mean', 0, 2, 4.0), ('loss_aggregate_median', 0, 2, 3.0)]
    """

    name = "aggregate"
    scope = "stream"
    spoiled_by = ("reduce",)
    version = 2
    mergeable = True
    invariances = ("order",)

    def __init__(
        self,
        kind: str = "loss",
        *,
        over: int | str = "epoch",
        which: str | Iterable[str] = BOX,
        **where: Unpack[Where],
    ) -> None:
        names = check_reductions(which)
        check_window(over)
        super().__init__(kind, [f"{kind}_aggregate_{name}" for name in names], **where)
        self.over, self.which = over, names
        self._open: dict[Series, dict[int, _Window]] = {}

    def compute(self, message: Message) -> Iterator[Message]:
        """Keep the numbers of one message; if it begins another window, first answer for the window before."""
        key = series_of(message)
        number = self._number(message)
        windows = self._open.setdefault(key, {})
        for other in [other for other in windows if other != number]:
            yield from self._answers(key, windows.pop(other))
        if number not in windows:
            windows[number] = _Window.of(message)
        window = windows[number]
        window.move_to(message)
        window.reducer.add(real_numbers(message.data))

    def conclude(self) -> Iterator[Message]:
        """Answer for the last window of each series."""
        streams, self._open = self._open, {}
        for key, windows in streams.items():
            for window in windows.values():
                yield from self._answers(key, window)

    def state_dict(self) -> dict[str, Any]:
        """The open windows of each series."""
        return {
            "windows": [
                {
                    **packed_series(key),
                    "window": number,
                    "global_step": window.global_step,
                    "train_step": window.train_step,
                    "epoch": window.epoch,
                    "numbers": window.reducer.state(),
                }
                for key, windows in self._open.items()
                for number, window in windows.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of a metric with the same parameters."""
        self._open = {}
        self.merge(state)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the open windows of another metric's state, whose messages came after those of this one."""
        for one in state["windows"]:
            windows = self._open.setdefault(unpacked_series(one), {})
            at = one["global_step"], one["train_step"], one["epoch"], one["rank"]
            heard = _Window(*at, Reducer.of_state(one["numbers"]))
            before = windows.get(one["window"])
            if before is not None:
                before.reducer.merge(heard.reducer)
                heard.reducer = before.reducer
            windows[one["window"]] = heard

    def _number(self, message: Message) -> int:
        """The number of the window of a message; it depends on the message alone."""
        if isinstance(self.over, int):
            return message.global_step // self.over
        return message.epoch if self.over == "epoch" else 0

    def _answers(self, series: Series, window: _Window) -> Iterator[Message]:
        if window.reducer.count:
            for kind, value in zip(self.produces, window.reducer.answer(self.which).values(), strict=True):
                yield window.message(kind, series, answer(value))
