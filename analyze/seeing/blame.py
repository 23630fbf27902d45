"""Finds the cause of a spike: changed settings, the first stream with an unusual norm, datapoints that stand out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.inputs import as_float64, datapoints_first
from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import Extent, shared
from analyze.metrics.sample_gram import ConvGeometry, layer_grams, may_have_time_first
from analyze.seeing.check import check
from tracer.errors import CaptureError
from tracer.format.journal import Column
from tracer.messaging.messages import DATA_KINDS, DEFAULT_TAG, KINDS, STATISTICS_SUFFIX, kept_of
from tracer.messaging.subscriber import can_run_again, summary
from tracer.messaging.subscription import is_doubled
from tracer.numbers.arrays import as_array
from tracer.numbers.past import NORMAL, Past, median
from tracer.shown import table
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.rerun import rerun_of

_JUMP, _RECENT, _LEAST = 3.0, 3, 0.1
"""A change is told if it is more than `_JUMP` times the median of the `_RECENT` changes before, and at least the
share `_LEAST` of the value: a schedule that goes on is not told."""
_WORDS = {"lr": "learning rate"}
_COUNTERS = ("growth_tracker", "step")
"""Numbers that count steps."""


@dataclass(frozen=True)
class Change:
    """A setting that changed.

    Attributes
    ----------
    step : int
        The step that was the first with the new value.
    name : str
        The name of the setting in its group, such as ``"lr"``.
    groups : tuple of str
        The groups in which it changed from `before` to `after`: the numbers of optimizer and group, such as ``"0.1"``;
        ``"scaler"`` for the scale of a loss.
    before, after : float
    everywhere : bool
        Whether these are all groups that have the setting.
    """

    step: int
    name: str
    groups: tuple[str, ...]
    before: float
    after: float
    everywhere: bool

    def __str__(self) -> str:
        name = _WORDS.get(self.name, self.name)
        where = "" if self.everywhere else f" of group {', '.join(self.groups)}"
        times = f" ({self.after / self.before:.3g} times)" if self.before and self.after else ""
        return f"the {name}{where} went from {self.before:.4g} to {self.after:.4g}{times} in step {self.step}"


def changes(reader: TraceReader, steps: Sequence[int], past: Sequence[int]) -> tuple[Change, ...]:
    """The settings that changed in `steps` by more than they did just before.

    Parameters
    ----------
    reader : TraceReader
    steps : sequence of int
        Consecutive recorded steps, ascending.
    past : sequence of int
        The recorded steps before.

    Returns
    -------
    tuple of Change
        In the order of time; empty where no ``hyperparameters`` were recorded. A change is told if it is at least 10 %
        of the value before, and more than 3 times the median of the three changes before, both as a difference and
        relative to the value: a schedule that goes on is not told.
    """
    first, last = (past or steps)[0], steps[-1]
    values: dict[tuple[str, str], dict[int, float]] = {}  # by group and name: the value at each step
    for message in reader.messages(kinds="hyperparameters", tags=DEFAULT_TAG, steps=(first, last + 1)):
        names = (message.sampling or {}).get("entries")
        if message.data is None or not isinstance(names, list) or len(names) != message.data.numel():
            continue
        for name, value in zip(map(str, names), message.data.flatten().tolist(), strict=True):
            if name not in _COUNTERS:
                values.setdefault((message.leaf, name), {}).setdefault(message.global_step, float(value))
    found: dict[tuple[int, str, float, float], list[str]] = {}
    for (group, name), of in values.items():
        for step, before, after in _changed(of, steps[0]):
            found.setdefault((step, name, before, after), []).append(group)
    having = {name: sum(one == name for _, one in values) for _, name in values}
    return tuple(
        Change(step, name, tuple(groups), before, after, len(groups) == having[name])
        for (step, name, before, after), groups in sorted(found.items())
    )


def _changed(values: dict[int, float], since: int) -> Iterator[tuple[int, float, float]]:
    """The steps from `since` on in which a setting changed by more than it did just before, with both values."""
    steps = sorted(values)
    jumps: list[tuple[float, float]] = []  # of each step: the change, and the change relative to the value before
    for last, step in pairwise(steps):
        before, after = values[last], values[step]
        far = abs(after - before)
        jump = far, far / abs(before) if before else math.inf if far else 0.0
        usual = [median(list(sizes)) for sizes in zip(*jumps[-_RECENT:], strict=True)] or [0.0, 0.0]
        larger = all(size > _JUMP * of for size, of in zip(jump, usual, strict=True))
        if step >= since and jump[1] >= _LEAST and larger:
            yield step, before, after
        jumps.append(jump)


_PAST = 40
"""How many recorded steps before a message define what is usual for its stream."""
_LEAST_PAST = 8
_FACTOR = 3.0
_DEVIATIONS = 8.0
_BEFORE = 3
"""The search for a cause starts this many recorded steps before the spike."""
_TOLD = 3
"""How many changed settings the verdict names."""
_NOT_COMPARED = ("sample_ids", "input_labels", "loss_terms")
_COMPARED = tuple(name for name in DATA_KINDS if not KINDS[name].event and name not in _NOT_COMPARED)
_SEEN = (*_COMPARED, *(kind + STATISTICS_SUFFIX for kind in _COMPARED))
_INPUTS = ("input_data", "layer_inputs")
_FLOATS = ("float", "bfloat")
_NO_GRADIENTS = "no layer_gradients were recorded, so datapoints cannot be told apart"
_PER_SAMPLE = ("layer_inputs", "layer_gradients", "weight_gradients", "bias_gradients", "loss", "input_labels")


@dataclass(frozen=True)
class Departure:
    """The first message whose norm is unusual for its stream.

    Attributes
    ----------
    step : int
    kind : str
    module : str or None
    value, usual : float
        The norm, and the median of the stream's earlier norms; NaN without any.
    """

    step: int
    kind: str
    module: str | None
    value: float
    usual: float


@dataclass(frozen=True)
class Suspect:
    """A datapoint whose input or gradient stands out.

    Attributes
    ----------
    step : int
    position : int
        Index in the batch, from 0.
    norm : float
        Norm of the gradient of the datapoint's loss with respect to the covered parameters. Without recorded layer
        inputs: the norm of the gradient of each layer's output, divided by the median over the batch, summed over
        layers.
    typical : float
        The median of `norm` over the datapoints of the batch whose `norm` is finite.
    label : str
        The datapoint's label; empty if unknown.
    size : float
        The norm of its input, divided by the median of the steps before; NaN if unknown.
    odd : bool
        Whether the norm of its input is unusual.
    seen : bool
        Whether gradients per datapoint were available; otherwise `norm` and `typical` are NaN.
    sample : int or None
        Its index in the data set, if the trace has sample ids.
    """

    step: int
    position: int
    norm: float
    typical: float
    label: str = ""
    size: float = math.nan
    odd: bool = False
    seen: bool = True
    sample: int | None = None


@dataclass(frozen=True)
class Blame:
    """The cause of a spike.

    Attributes
    ----------
    trace : str
    step : int or None
        Of the spike; None if none was given and no rule found anything.
    why : str
        Why this step: the title and evidence of a finding, or that the caller gave the step. Without a step: what the
        rules judged.
    settings : tuple of Change
        The settings of the optimizers that changed there.
    departure : Departure or None
    suspects : tuple of Suspect
        The most suspicious first: those with an unusual input, then those with the largest gradients.
    unseen : tuple of str
        What could not be examined, a sentence each.
    recorded : str
        What was recorded of the step and the three before; without a step, of the run.
    more : str
        Which command records what the ranking of datapoints needs; empty if all of it was recorded.
    """

    trace: str
    step: int | None
    why: str
    settings: tuple[Change, ...] = ()
    departure: Departure | None = None
    suspects: tuple[Suspect, ...] = ()
    unseen: tuple[str, ...] = ()
    recorded: str = ""
    more: str = ""

    @property
    def answered(self) -> bool:
        """Whether there is a setting, a stream or a datapoint to name."""
        return bool(self.settings or self.departure or self.suspects)

    @property
    def verdict(self) -> str:
        """The cause, in a sentence."""
        if self.step is None:
            return f"no step to begin at: {self.why}; --step N (step=N) gives one"
        told = [str(one) for one in self.settings[:_TOLD]]
        if len(self.settings) > _TOLD:
            told.append(f"{len(self.settings) - _TOLD} more settings changed")
        return f"step {self.step}: {'; '.join([*told, self._departed])}"

    @property
    def _departed(self) -> str:
        one = self.departure
        if one is None:
            first = max(0, (self.step or 0) - _BEFORE)
            return f"nothing that was recorded at steps {first} to {self.step} looks unusual"
        where = one.kind if one.module is None else f"{one.kind} of {one.module or 'the root'}"
        if math.isfinite(one.value) and one.usual > 0:
            beside = f", {one.value / one.usual:.3g} times what is usual for it"
        else:
            beside = "" if math.isnan(one.usual) else f", where {one.usual:.4g} is usual for it"
        return f"the first to leave its past was {where} in step {one.step}: its norm was {one.value:.4g}{beside}"

    def _repr_html_(self) -> str:
        """The cause and the datapoints, for notebooks."""
        found = [("why", self.why), *(("not examined", one) for one in self.unseen), ("recorded", self.recorded)]
        rows = [(name, told) for name, told in [*found, ("to rank datapoints", self.more)] if told]
        return table(("", ""), [*rows, *(("datapoint", str(one)) for one in self.suspects)], self.verdict)

    def as_json(self) -> dict[str, Any]:
        """All fields in JSON values; an unknown size or gradient is null."""
        told = asdict(self)
        for one, suspect in zip(told["suspects"], self.suspects, strict=True):
            unknown = [] if suspect.seen else ["norm", "typical"]
            for name in (*unknown, *(["size"] if math.isnan(suspect.size) else [])):
                one[name] = None
            del one["seen"]
        return {**told, "verdict": self.verdict, "answered": self.answered}


def blame(path: Anywhere | TraceReader, step: int | None = None, *, most: int = 10) -> Blame:
    """Find the cause of a spike.

    Parameters
    ----------
    path : path, URL or TraceReader
        If the trace has several ranks, only the first is examined.
    step : int, optional
        The global step of the spike. By default that of the worst finding of `check`.
    most : int
        How many datapoints are returned.

    Returns
    -------
    Blame

    Raises
    ------
    CaptureError
        If the step was not recorded.
    TracerError
        What `tracer.open` raises.

    Notes
    -----
    The answer begins with the settings of the optimizers (the recorded ``hyperparameters``) that changed in the step or
    the three recorded steps before, by more than a schedule that goes on changes them; see `settings.changes`.

    A norm is unusual where its logarithm exceeds the median of the stream's 40 recorded steps before by log 3 and by 8
    robust standard deviations, or where it is the first of its stream that is not finite. Streams are searched in the
    order in which they were observed, because a cause comes before its effects. Datapoints are ranked by the norms of
    their gradients, computed from each layer's inputs and output gradients (I. Goodfellow, "Efficient Per-Example
    Gradient Computations", arXiv:1510.01799), for linear layers, convolutions, embeddings and normalisations. What is
    typical for a batch is a median of its finite norms, so that a datapoint with NaN leaves the others as they are.

    Datapoints with an unusual input rank above all others: the input comes before the gradients, and a corrupted
    datapoint has a small gradient where the network happens to be right. The input is that of the network or, where
    that is not recorded or has no floating-point numbers, that of the first layer. An input is unusual if it is not
    finite, or if its norm is outside the range of all datapoints of the 40 recorded steps before, and the logarithm of
    the norm is farther from their median than log 3 and than 8 robust standard deviations, up or down.

    The datapoints are on the axis that the recording tells, which is 1 where time comes first; `unseen` says where it
    does not tell it.
    """
    with nullcontext(path) if isinstance(path, TraceReader) else TraceReader(path) as opened:
        reader = opened.of_rank(opened.ranks[0]) if len(opened.ranks) > 1 else opened
        unseen = [f"rank {rank} was not looked at" for rank in opened.ranks[1:]]
        why = "it was given"
        if step is None:
            checked = check(reader)
            if checked.worst is None:
                recorded, more = _recorded(reader, None)
                return Blame(
                    str(reader.path), None, checked.verdict, unseen=tuple(unseen), recorded=recorded, more=more
                )
            step, why = checked.worst.first, f"{checked.worst.title}: {checked.worst.evidence}"
        steps = _steps(reader)
        if step not in steps:
            raise CaptureError(_not_recorded(reader, steps, step))
        at = steps.index(step)
        since = max(0, at - _BEFORE)
        settings = changes(reader, steps[since : at + 1], steps[max(0, since - _PAST) : since])
        departure = _first_departure(reader, steps[max(0, at - _BEFORE - _PAST) : at + 1], steps[max(0, at - _BEFORE)])
        if at < _LEAST_PAST:
            unseen.append(f"only {at} steps were recorded before step {step}, too few to say what is usual")
        start = step if departure is None else departure.step
        begin = steps.index(start)
        suspects, missing = _suspects(reader, steps[begin : at + 1], steps[max(0, begin - _PAST) : begin])
        return Blame(
            str(reader.path),
            step,
            why,
            settings,
            departure,
            tuple(suspects[:most]),
            (*unseen, *missing),
            *_recorded(reader, (steps[since], step + 1)),
        )


def _can_run_again(reader: TraceReader) -> bool:
    """Whether the trace has what it takes to run steps again."""
    return can_run_again({one.kind for one in reader.streams})


def _recorded(reader: TraceReader, steps: tuple[int, int] | None) -> tuple[str, str]:
    """What was recorded of the training in some steps, or of all; and the command that records what is missing."""
    there = reader.streams
    if steps is not None:
        rows = reader.select(tags=DEFAULT_TAG, steps=steps)
        numbers = set(np.unique(reader.journal[rows, Column.STREAM]).tolist())
        there = [one for one in there if one.id in numbers]
    kinds = {one.kind for one in there}
    data = [(one.kind, one.module, one.tag) for one in there if kept_of(one.kind)[0] in DATA_KINDS and one.dtype]
    more = ""
    if not kinds.issuperset(_PER_SAMPLE):
        if _can_run_again(reader):
            more = rerun_of(reader, steps).hint(_PER_SAMPLE)
        else:
            more = f"trace record {' '.join(f'-k {kind}' for kind in _PER_SAMPLE)} SCRIPT.py records it in another run"
    return summary(data), more


def _not_recorded(reader: TraceReader, steps: Sequence[int], step: int) -> str:
    """A sentence about a step that was not recorded, with the steps around it and the command that runs it again."""
    near = [*[one for one in steps if one < step][-1:], *[one for one in steps if one > step][:1]]
    has = f"the nearest {'is' if len(near) == 1 else 'are'} {' and '.join(map(str, near))}" if near else "it has none"
    again = ""
    if len(near) == 2 and _can_run_again(reader):
        again = f"; {rerun_of(reader, (step, step + 1)).hint(_PER_SAMPLE)}"
    return f"step {step} was not recorded in {reader.path}; {has}{again}"


def _steps(reader: TraceReader) -> list[int]:
    """The recorded training steps, ascending."""
    rows = reader.select(kinds=_SEEN, tags=DEFAULT_TAG)
    return [int(one) for one in np.unique(reader.journal[rows, Column.GLOBAL_STEP])]


def _first_departure(reader: TraceReader, steps: Sequence[int], since: int) -> Departure | None:
    """The first message, from step `since` on, whose norm is unusual for its stream."""
    past: dict[tuple[str, int, Series], Past] = {}
    last: dict[tuple[str, int, Series], float] = {}
    for message in reader.messages(kinds=_SEEN, tags=DEFAULT_TAG, steps=(steps[0], steps[-1] + 1)):
        extent = Extent.of(message)
        if extent is None or not extent.floating or extent.count == 0 or is_doubled(message.sampling):
            continue  # the message of its statistics is examined instead
        kind, norm = kept_of(message.kind)[0], shared(message, "norm2")
        stream = kind, message.call, series_of(message)
        before = past.setdefault(stream, Past(_PAST))
        # a stream that was never finite, such as a mask of minus infinity, has no past to leave
        was_finite = math.isfinite(last[stream]) if stream in last else math.isnan(norm)
        last[stream] = norm
        if message.global_step >= since and not math.isfinite(norm) and was_finite:
            usual = math.exp(before.centre) if len(before) else math.nan
            return Departure(message.global_step, kind, message.key, norm, usual)
        if message.global_step >= since and len(before) >= _LEAST_PAST and 0 < norm < math.inf:
            far = max(math.log(_FACTOR), _DEVIATIONS * before.scale)
            if math.log(norm) - before.centre > far:
                return Departure(message.global_step, kind, message.key, norm, math.exp(before.centre))
        if norm > 0 and math.isfinite(norm):
            before.add(math.log(norm))
    return None


def _suspects(reader: TraceReader, steps: Sequence[int], before: Sequence[int]) -> tuple[list[Suspect], list[str]]:
    """The datapoints of `steps`, most suspicious first, and what could not be examined; `before`: earlier steps."""
    found: list[Suspect] = []
    unseen: dict[str, None] = {}
    axes = _axes(reader)
    sizes = _sizes(reader, [*before, *steps], axes)
    usual = [sizes[step] for step in before if step in sizes]
    if len(usual) < _LEAST_PAST:
        where = f"in {len(usual)} of the steps before only" if sizes else "nowhere"
        unseen[f"inputs of floating-point numbers were recorded {where}, so one of unusual size is not told"] = None
    for step in steps:
        heard = _heard(reader, step, axes)
        norms, remarks = _norms(heard, len(sizes.get(step, ())), axes)
        unseen |= dict.fromkeys(remarks)
        seen = norms is not None
        if norms is None:  # an unusual input is reported even without gradients
            norms = np.full(len(sizes.get(step, ())), math.nan)
        labels, samples = _labels(heard, len(norms)), _samples(heard, len(norms))
        typical = _typical(norms)
        times, odd = [math.nan] * len(norms), [False] * len(norms)
        if len(sizes.get(step, ())) == len(norms) > 0:
            past = np.concatenate(usual) if len(usual) >= _LEAST_PAST else np.zeros(0)
            times, odd = _beside(sizes[step], past)
        if seen and len(norms) > 1 and not (np.isfinite(norms).any() or any(odd)):
            told = f"the gradients of all {len(norms)} datapoints of step {step} are not finite, so none stands out"
            unseen[told] = None
            continue
        found += [
            Suspect(step, position, float(norm), typical, label, size, is_odd, seen, sample)
            for position, (norm, label, size, is_odd, sample) in enumerate(
                zip(norms, labels, times, odd, samples, strict=True)
            )
            if is_odd or seen
        ]
    found.sort(key=_suspicion)
    return found, list(unseen)


def _suspicion(one: Suspect) -> tuple[float, ...]:
    """Sort key: unusual inputs before all gradients, NaN before all numbers."""
    away = 0.0 if not one.odd else math.inf if not 0 < one.size < math.inf else abs(math.log(one.size))
    return -away, -math.inf if math.isnan(one.norm) else -one.norm / max(one.typical, 1e-300), one.step


_Axes = Mapping[tuple[str, str | None], int]


def _axes(reader: TraceReader) -> _Axes:
    """The axis of the datapoints by kind and module, where the recording tells it in some of the stream's messages.

    What a layer's inputs do not tell is that of the gradients of its outputs.
    """
    found: dict[tuple[str, str | None], int] = {}
    for one in reader.streams:
        axis = (one.sampling or {}).get("datapoints")
        if type(axis) is int and one.tag == DEFAULT_TAG and not one.leaf:
            found[one.kind, one.module] = axis
    for (kind, module), axis in [*found.items()]:
        if kind == "layer_gradients":
            found.setdefault(("layer_inputs", module), axis)
    return found


def _sizes(reader: TraceReader, steps: Sequence[int], axes: _Axes) -> dict[int, NDArray[np.float64]]:
    """By step, the norm of each datapoint's input to the network or, if that was not recorded, to its first layer."""
    streams = [
        one
        for one in reader.streams
        if one.kind in _INPUTS and one.tag == DEFAULT_TAG and not one.leaf and (one.dtype or "").startswith(_FLOATS)
    ]
    first = min(streams, key=lambda one: _INPUTS.index(one.kind), default=None)
    chosen = [one.id for one in streams if first is not None and (one.kind, one.module) == (first.kind, first.module)]
    found: dict[int, list[NDArray[np.float64]]] = {}
    for message in reader.messages(streams=chosen, steps=(steps[0], steps[-1] + 1)):
        if message.data is not None and message.data.ndim >= 2:
            with np.errstate(all="ignore"):
                data = datapoints_first(message.data, axes.get((message.kind, message.key)))
                rows = as_float64(data).reshape(len(data), -1)
                found.setdefault(message.global_step, []).append(np.linalg.norm(rows, axis=1))
    return {step: np.concatenate(norms) for step, norms in found.items()}


def _beside(now: NDArray[np.float64], usual: NDArray[np.float64]) -> tuple[list[float], list[bool]]:
    """Each input norm divided by the median of the usual norms, if there are any, and whether it is unusual."""
    usual = usual[np.isfinite(usual)]
    middle = float(np.median(usual)) if len(usual) else 0.0
    if middle == 0:
        return [math.nan] * len(now), (~np.isfinite(now)).tolist()
    with np.errstate(all="ignore"):
        spread = NORMAL * float(np.median(np.abs(np.log(usual / middle))))
        far = np.abs(np.log(now / middle)) > max(math.log(_FACTOR), _DEVIATIONS * spread)
        beyond = (now < usual.min()) | (now > usual.max())
    return (now / middle).tolist(), (~np.isfinite(now) | (far & beyond)).tolist()


_Heard = Mapping[str, Mapping[str | None, Mapping[int, Tensor]]]


def _heard(reader: TraceReader, step: int, axes: _Axes) -> _Heard:
    """The data of a step by kind, module and call, with the datapoints in axis 0 as far as the trace tells it."""
    heard: dict[str, dict[str | None, dict[int, Tensor]]] = {}
    for message in reader.messages(kinds=(*_PER_SAMPLE, "sample_ids"), tags=DEFAULT_TAG, steps=(step, step + 1)):
        if message.data is not None and not message.leaf:
            data = datapoints_first(message.data, axes.get((message.kind, message.key)))
            heard.setdefault(message.kind, {}).setdefault(message.key, {})[message.call] = data
    return heard


def _norms(heard: _Heard, likely: int, axes: _Axes) -> tuple[NDArray[np.float64] | None, list[str]]:
    """The gradient norm of each datapoint (of which there are probably `likely`), and what could not be examined."""
    squares: dict[str, NDArray[np.float64]] = {}
    left: list[str] = []
    guessed: list[str] = []
    gradients, inputs = heard.get("layer_gradients", {}), heard.get("layer_inputs", {})
    for module, calls in heard.get("weight_gradients", {}).items():
        of_bias = heard.get("bias_gradients", {}).get(module, {})
        recorded = [as_array(next(iter(one.values()))) for one in (calls, of_bias) if one]
        if recorded[0].ndim > 2 and not np.isfinite(recorded[0]).all():
            left.append(module or "")  # the recorded gradient does not say which geometry the convolution has
            continue
        with np.errstate(all="ignore"):
            grams = layer_grams(
                inputs.get(module, {}), gradients.get(module, {}), recorded,
                passes=max(len(heard.get("loss", {}).get(None, {})), 1), summed=False, geometry=ConvGeometry(),
            )  # fmt: skip
        if grams:
            squares[module or ""] = np.sum([np.diagonal(gram.gram) for gram, _ in grams], axis=0)
            asked = ("layer_gradients", module) not in axes
            if asked and any(may_have_time_first(one, recorded[0]) for one in gradients[module].values()):
                guessed.append(module or "")
        else:
            left.append(module or "")
    if squares:
        counts = [len(one) for one in squares.values()]
        count = likely if likely in counts else _most_frequent(counts)
        # a layer with another number of rows, such as a position embedding, has no row per datapoint
        left += [module for module, one in squares.items() if len(one) != count]
        names = ", ".join(module or "the root" for module in left)
        with np.errstate(all="ignore"):
            norms = np.sqrt(np.sum([one for one in squares.values() if len(one) == count], axis=0))
        remarks = [f"the gradients of {names} could not be had for single datapoints"] if left else []
        if any(len(squares[module]) == count for module in guessed):
            of = ", ".join(module or "the root" for module in guessed)
            remarks.append(
                f"nothing in the trace tells on which axis the datapoints of {of} are: axis 0 was taken, so these may "
                "be time steps"
            )
        return norms, remarks
    return _norms_of_outputs(gradients)


def _norms_of_outputs(
    gradients: Mapping[str | None, Mapping[int, Tensor]],
) -> tuple[NDArray[np.float64] | None, list[str]]:
    """Without layer inputs: the norms of the output gradients, each divided by what is typical, summed over layers."""
    rows = [as_float64(calls[min(calls)]) for calls in gradients.values() if calls[min(calls)].ndim >= 2]
    if not rows:
        return None, [_NO_GRADIENTS]
    usual = _most_frequent([len(one) for one in rows])
    rows = [one for one in rows if len(one) == usual]
    # a layer without a finite gradient ranks nothing
    total = np.full(usual, math.nan) if not any(np.isfinite(one).any() for one in rows) else np.zeros(usual)
    with np.errstate(all="ignore"):
        for one in rows:
            norms = np.linalg.norm(one.reshape(usual, -1), axis=1)
            typical = _typical(norms)
            if typical > 0:
                total += norms / typical
    remark = "no layer_inputs were recorded, so datapoints are ranked by the gradients of the layers' outputs alone"
    return total, [remark]


def _typical(norms: NDArray[np.float64]) -> float:
    """The median of the finite norms or, where that is zero, their mean; NaN without any: no single one decides it."""
    finite = norms[np.isfinite(norms)]
    if not len(finite):
        return math.nan
    return float(np.median(finite)) or float(finite.mean())


def _most_frequent(counts: Sequence[int]) -> int:
    return max(counts, key=counts.count)


def _labels(heard: _Heard, count: int) -> Iterator[str]:
    """The labels of the datapoints; empty strings unless there is exactly one label per datapoint."""
    calls = heard.get("input_labels", {}).get(None, {})
    labels = as_array(calls[min(calls)]) if calls else np.zeros(0)
    for position in range(count):
        yield str(labels[position]) if labels.ndim == 1 and len(labels) == count else ""


def _samples(heard: _Heard, count: int) -> list[int | None]:
    """The datapoints' ids, if there is one for each.

    Consecutive forwards may share a batch or have a part of it each, so both readings are tried.
    """
    calls = heard.get("sample_ids", {}).get(None, {})
    batches = [calls[call].tolist() for call in sorted(calls)]
    for given in (batches, [batch for batch, _ in groupby(batches)]):
        ids = list(chain.from_iterable(given))
        if len(ids) == count:
            return ids
    return [None] * count
