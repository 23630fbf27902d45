"""Judges which differences between two runs are due to rounding, from runs that differ by rounding alone.

A noise run has the seed and the program of the first run, but another order of summation: other threads, another
machine, a fused optimizer. Its difference from the first run, stream by stream and step by step, measures the effect of
rounding. The relative difference is the norm of the difference divided by the norm of the first run's tensor, at most
1.

1. **Envelope.** Rounding errors grow smoothly, and noise may reach again what it has reached before. So the envelope
   of a stream is its largest relative difference up to `WINDOW` recorded steps after the step, because no two runs
   grow at the same pace.
2. **Floor.** A noise run may begin to differ later than the judged run. So the envelope is at least ``amplification *
   max(median envelope of the kind, first nonzero value of that median, machine epsilon)``. The amplification of a
   stream is the 0.9 quantile, over its steps, of its difference over the median of its kind. The gradient of a bias
   before a normalisation, for example, consists of rounding errors only. An update is a difference of two rounded
   weights, so two units in the last place of the weights are always allowed.
3. **Several noise runs.** The upper median of the envelopes of all noise runs counts, so that one of three runs may be
   an outlier.
4. **Margin.** Noise exceeds the envelope of other noise by a factor. The tail of its distribution is estimated from
   the noise runs themselves: each against the others, or a single run against its own past. For each kind, the factor
   that is exceeded in one run of a hundred (`FALSE_ALARMS`, divided among the kinds) follows from the largest ratios by
   the estimators of Hill (1975) and Weissman (1978). It is at least `LEAST` (`ALONE` with a single noise run, `UPDATES`
   for updates) and at most `MOST`.
5. **Kinks.** A unit of a ReLU or a maximum whose input is within rounding of its kink may be on in one run and off in
   the other. Its gradient then jumps, and no noise run has the same jump at the same step. A kink is distinguished
   from a fault by the first difference, in the order of observation, that is too large: it is in the gradient of a
   layer's output, few elements carry it, and each of these is exactly zero in one of the runs. After a kink nothing is
   judged for `RECOVERY` recorded steps, and later each stream is judged against the differences that it reached in
   these steps. A remark names the step. The steps in which noise runs have a kink are excluded from their envelopes.

**Exact streams.** Labels and inputs do not depend on rounding, nor do a frozen layer's weights. So no tolerance is
given to a stream that no noise run changes, though the run goes on after it first differs: not before anything else of
the judged run differs, and not at all to what the program feeds to the network (`FED`).

**Repeated steps.** An abandoned attempt trained some steps that a later attempt trained again (`Repeated`). The
difference of the two attempts serves as a noise run over these steps. It is shifted in time so that it begins where the
judged run first differs, because rounding errors grow from where they begin. Steps beyond its reach are judged by other
noise, or not at all.

Rounding never explains a number that is finite in one run only, nor a difference of integers or bools that no noise run
has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

WINDOW: Final = 5
"""The number of recorded steps that a judged run may be ahead of a noise run."""
FALSE_ALARMS: Final = 0.01
"""The share of runs that differ by rounding alone and are falsely reported to part."""
LEAST: Final = 8.0
MOST: Final = 64.0
"""Bounds of the margin."""
UPDATES: Final = 64.0
"""The least margin of updates, because adaptive optimizers amplify the rounding of small gradients in some steps."""
ALONE: Final = 20.0
"""The least margin with a single noise run, and with too few ratios to estimate a tail."""
RECOVERY: Final = 10
"""Recorded steps after a kink that are not judged: about the memory of an optimizer with a momentum of 0.9."""
FED: Final = ("input_data", "input_labels")
"""The kinds that the program, and not the network, computes."""
KINKED: Final = ("layer_gradients", "input_gradients")
"""The kinds in which a kink appears first."""
_FEW: Final = 50
"""The least number of ratios from which a tail is estimated."""


@dataclass(frozen=True, eq=False)
class Observed:
    """The differences of a run from the first run, for each message of the first run's journal.

    Attributes
    ----------
    relative : ndarray of float64, (messages,)
        The relative difference; NaN if the message was not compared.
    switched : ndarray of bool, (messages,)
        As `Amount.switched`.
    broken : ndarray of bool, (messages,)
        Whether a number is finite in one run only, or the shapes differ.
    """

    relative: NDArray[np.float64]
    switched: NDArray[np.bool_]
    broken: NDArray[np.bool_]

    @classmethod
    def nothing(cls, messages: int) -> Observed:
        """An observation in which no message is compared yet."""
        return cls(np.full(messages, np.nan), np.zeros(messages, np.bool_), np.zeros(messages, np.bool_))

    def first_difference(self, name: NDArray[np.int64], step: NDArray[np.int64]) -> int | None:
        """The first step with a difference; `name` and `step` are those of each message. None if there is none."""
        differs = _differing(self, name)
        return int(step[differs].min()) if differs.any() else None


@dataclass(frozen=True, eq=False)
class Repeated(Observed):
    """The differences between two attempts at the same steps, for their messages in any order.

    Attributes
    ----------
    name, step : ndarray of int64, (messages,)
        As in `Journal`; `beginning_at` shifts the steps to those of the judged run.
    reach : int
        The last repeated step.
    """

    name: NDArray[np.int64]
    step: NDArray[np.int64]
    reach: int

    def beginning_at(self, step: int, end: int) -> Repeated:
        """The same noise, shifted to first differ at `step`, and cut off after `end`."""
        begin = self.first_difference(self.name, self.step)
        assert begin is not None
        steps = self.step + (step - begin)
        rows = (steps >= step) & (steps <= end)
        seen = self.relative[rows], self.switched[rows], self.broken[rows]
        return Repeated(*seen, self.name[rows], steps[rows], min(self.reach + step - begin, end))


@dataclass(frozen=True, eq=False)
class Journal:
    """The properties of the first run's messages that judging needs.

    Attributes
    ----------
    name : ndarray of int64, (messages,)
        The index of each message's stream; -1 if a filter excludes the message.
    step : ndarray of int64, (messages,)
    kinds : list of str
        The kind of each stream.
    epsilon : ndarray of float64, (streams,)
        The machine epsilon of each stream's dtype; 0 for integers and bools.
    rounding : ndarray of float64, (messages,)
        The relative rounding error of computing the message from others; 0 if unknown.
    """

    name: NDArray[np.int64]
    step: NDArray[np.int64]
    kinds: list[str]
    epsilon: NDArray[np.float64]
    rounding: NDArray[np.float64]


@dataclass(eq=False)
class Judgement:
    """The differences that noise does not explain.

    Attributes
    ----------
    alarms : ndarray of bool, (messages,)
        The messages that differ by more than noise explains.
    tolerance : ndarray of float64, (messages,)
        The relative difference that is allowed.
    margins : dict of str to float
        The margin of each kind.
    kinks : list of int
        The rows in which a kink was found.
    """

    alarms: NDArray[np.bool_]
    tolerance: NDArray[np.float64]
    margins: dict[str, float] = field(default_factory=dict)
    kinks: list[int] = field(default_factory=list)


def judge(journal: Journal, run: Observed, noise: Sequence[Observed]) -> Judgement:
    """Find the messages of a run that differ from the first run by more than noise explains; see the module.

    Parameters
    ----------
    journal : Journal
    run : Observed
    noise : sequence of Observed
        At least one.
    """
    chosen = np.flatnonzero(journal.name >= 0)
    steps, place = np.unique(journal.step[chosen], return_inverse=True)
    found = Judgement(np.zeros(len(journal.name), np.bool_), np.full(len(journal.name), np.nan))
    numbers = journal.name[chosen]
    of_kind = sorted(set(journal.kinds))
    kinks = [np.searchsorted(steps, [step for step in _kinks(journal, one) if step <= steps[-1]]) for one in noise]
    ends = [int(one.min()) if len(one) else len(steps) for one in kinks]
    for kind in of_kind:
        streams = np.flatnonzero(np.array([one == kind for one in journal.kinds]))
        rows = np.flatnonzero(np.isin(numbers, streams))
        if not len(rows):
            continue
        at = (np.searchsorted(streams, numbers[rows]), place[rows])
        curves = [
            _of_repeats(one, streams, steps)
            if isinstance(one, Repeated)
            else _curve(_clipped(one)[chosen[rows]], at, (len(streams), len(steps)))
            for one in noise
        ]
        for curve, at_kinks in zip(curves, kinks, strict=True):
            curve[:, at_kinks] = np.nan
        epsilon = journal.epsilon[streams]
        envelopes = [
            _within_reach(_envelope(curve, epsilon, ahead=WINDOW), one, steps)
            for curve, one in zip(curves, noise, strict=True)
        ]
        least = UPDATES if kind.endswith("_updates") else LEAST
        margin = _margin(curves, envelopes, epsilon, ends, FALSE_ALARMS / len(of_kind), least)
        found.margins[kind] = margin
        found.tolerance[chosen[rows]] = np.maximum(
            (margin * _upper_median(envelopes))[at], 2 * journal.rounding[chosen[rows]]
        )
    found.tolerance[_exact(journal, run, noise)] = 0.0
    _walk(journal, run, noise, steps, found)
    return found


def _exact(journal: Journal, run: Observed, noise: Sequence[Observed]) -> NDArray[np.bool_]:
    """The messages that rounding cannot change: of streams that no noise run changes; see the module."""
    changed, lasting = np.zeros((2, len(journal.kinds)), np.bool_)
    for one in noise:
        name, step = (one.name, one.step) if isinstance(one, Repeated) else (journal.name, journal.step)
        differs = _differing(one, name)
        if differs.any():
            later = (name >= 0) & ~np.isnan(one.relative) & (step > step[differs].min())
            changed[name[differs]], lasting[name[later]] = True, True
    still = np.append(lasting & ~changed, False)  # the last entry is that of messages without a stream
    fed = np.array([*(kind in FED for kind in journal.kinds), False])
    differs = _differing(run, journal.name)
    before = np.arange(len(differs)) <= (int(differs.argmax()) if differs.any() else len(differs))
    found: NDArray[np.bool_] = still[journal.name] & (fed[journal.name] | before)
    return found


def _differing(run: Observed, name: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The messages that differ; `name` is the stream of each."""
    with np.errstate(invalid="ignore"):
        found: NDArray[np.bool_] = (name >= 0) & ((run.relative > 0) | run.broken)
    return found


def _clipped(run: Observed) -> NDArray[np.float64]:
    """The relative differences, clipped to 1, the value for an entirely different tensor."""
    return np.minimum(run.relative, 1.0)


def _curve(
    values: NDArray[np.float64], at: tuple[NDArray[np.int64], NDArray[np.int64]], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """The largest value of each stream at each step, (streams, steps); NaN without a value."""
    curve = np.full(shape, -np.inf)
    np.maximum.at(curve, at, np.where(np.isnan(values), -np.inf, values))
    curve[np.isinf(curve)] = np.nan
    return curve


def _of_repeats(run: Repeated, streams: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """The curve of repeated steps; each value is put at the next recorded step of the judged run."""
    mine = np.flatnonzero(np.isin(run.name, streams) & (run.step <= steps[-1]))
    at = (np.searchsorted(streams, run.name[mine]), np.searchsorted(steps, run.step[mine]))
    return _curve(_clipped(run)[mine], at, (len(streams), len(steps)))


def _within_reach(envelope: NDArray[np.float64], run: Observed, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """The envelope, with NaN at steps beyond the reach of repeated steps."""
    if isinstance(run, Repeated):
        envelope[:, steps > run.reach] = np.nan
    return envelope


def _envelope(curve: NDArray[np.float64], epsilon: NDArray[np.float64], ahead: int) -> NDArray[np.float64]:
    """The largest value of a curve up to `ahead` steps after each step (-1: before it), or the floor if larger."""
    reached = np.maximum.accumulate(np.nan_to_num(curve, nan=0.0), axis=1)
    amplification = _amplification(curve, reached)
    last = reached.shape[1] - 1
    if ahead < 0:
        reached = np.concatenate([np.zeros((len(reached), 1)), reached[:, :-1]], axis=1)
    else:
        reached = reached[:, np.minimum(np.arange(last + 1) + ahead, last)]
    level = np.median(reached, axis=0)
    begun = level[level > 0]
    floor = amplification[:, None] * np.maximum(np.maximum(level, begun[0] if len(begun) else 0.0), epsilon[:, None])
    floor[epsilon == 0] = 0.0
    found: NDArray[np.float64] = np.minimum(np.maximum(reached, floor), 1.0)
    return found


def _amplification(curve: NDArray[np.float64], reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """The 0.9 quantile of the ratio of each stream to the median stream of its kind; at least 1."""
    level = np.median(reached, axis=0)
    ratio = np.where(level > 0, curve, np.nan) / np.where(level > 0, level, 1.0)
    known = np.isfinite(ratio).any(axis=1)
    found = np.ones(len(curve))
    if known.any():
        found[known] = np.nanquantile(ratio[known], 0.9, axis=1)
    return np.maximum(found, 1.0)


def _upper_median(curves: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The upper median of the curves that are not NaN; infinity where all are."""
    ordered = np.sort(np.stack(curves), axis=0)  # NaN comes last
    middle = (~np.isnan(ordered)).sum(axis=0, keepdims=True) // 2
    found: NDArray[np.float64] = np.take_along_axis(ordered, np.minimum(middle, len(curves) - 1), axis=0)[0]
    return np.nan_to_num(found, nan=np.inf, posinf=np.inf)


def _kinks(journal: Journal, run: Observed) -> NDArray[np.int64]:
    """The global steps in which a noise run has a kink that exceeds the usual differences of its stream."""
    name, step = (run.name, run.step) if isinstance(run, Repeated) else (journal.name, journal.step)
    kinked = np.array([kind in KINKED for kind in journal.kinds])
    rows = np.flatnonzero(run.switched & (name >= 0))
    rows = rows[kinked[name[rows]]]
    usual = np.full(len(journal.kinds), np.inf)
    for number in np.unique(name[rows]).tolist():
        usual[number] = np.nanmedian(run.relative[name == number])
    return np.unique(step[rows[run.relative[rows] > LEAST * usual[name[rows]]]])


def _margin(
    curves: Sequence[NDArray[np.float64]],
    envelopes: Sequence[NDArray[np.float64]],
    epsilon: NDArray[np.float64],
    ends: Sequence[int],
    false_alarms: float,
    least: float,
) -> float:
    """The factor by which noise exceeds its envelope in a share `false_alarms` of runs."""
    ratios = []
    for number, curve in enumerate(curves):
        others = [one for place, one in enumerate(envelopes) if place != number]
        reference = _upper_median(others) if others else _envelope(curve, epsilon, ahead=-1)
        end = min([ends[number], *(ends if others else [])])
        if not others:  # its own past counts once it has some nonzero steps
            reference = np.where(np.cumsum(np.nan_to_num(curve) > 0, axis=1) > WINDOW, reference, np.nan)
        with np.errstate(all="ignore"):
            ratio = (curve / reference)[:, :end]
        told = np.isfinite(ratio) & (ratio > 0) & (reference[:, :end] < 1.0 / LEAST)
        ratios.append(ratio[told])
    found = np.sort(np.concatenate(ratios))[::-1]
    # a single run does not show how noise runs differ from each other
    least = max(least, LEAST if len(curves) > 1 else ALONE)
    if len(found) < _FEW:
        return max(least, ALONE)
    k = max(10, len(found) // 100)
    logs = np.log(found[:k])
    gamma = float((logs - logs[-1]).mean())
    return float(np.clip(found[k - 1] * (k / (len(curves) * false_alarms)) ** gamma, least, MOST))


def _walk(
    journal: Journal, run: Observed, noise: Sequence[Observed], steps: NDArray[np.int64], found: Judgement
) -> None:
    """Judge the messages in the order of observation, and start again after each kink."""
    relative = _clipped(run)
    whole = [one.broken for one in noise if not isinstance(one, Repeated)]
    broken = run.broken & ~np.logical_or.reduce(whole, initial=False)
    compared = (journal.name >= 0) & ~np.isnan(run.relative)
    kinked = np.array([*(kind in KINKED for kind in journal.kinds), False])[journal.name]
    margins = np.array([*(found.margins.get(kind, LEAST) for kind in journal.kinds), LEAST])[journal.name]
    beginning = 0
    while True:
        # an entirely different tensor (1) is beyond any tolerance below 1
        beyond = compared & (broken | (relative > found.tolerance))
        beyond[:beginning] = False
        first = int(beyond.argmax()) if beyond.any() else len(beyond)
        if first == len(beyond) or broken[first] or not (run.switched[first] and kinked[first]):
            found.alarms[:] = beyond
            return
        found.kinks.append(first)
        here = int(np.searchsorted(steps, journal.step[first]))
        last = int(steps[min(here + RECOVERY, len(steps) - 1)])
        within = compared & (np.arange(len(compared)) >= first) & (journal.step <= last)
        reached = np.zeros(len(journal.kinds))
        np.maximum.at(reached, journal.name[within], relative[within])
        later = compared & (np.arange(len(compared)) >= first)
        rebased = np.maximum(found.tolerance[later], margins[later] * reached[journal.name[later]])
        found.tolerance[later] = rebased
        ahead = np.flatnonzero(within)
        # broken messages are reported even in the steps of recovery
        shown = ahead[broken[ahead]]
        beginning = int(shown[0]) if len(shown) else int(ahead[-1]) + 1
