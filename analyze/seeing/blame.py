"""Finds the cause of a spike: the first stream with an unusual norm, and the datapoints that stand out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.metrics.gradients.layer_grams import Geometry, layer_grams
from analyze.metrics.inputs import as_float64
from analyze.metrics.streams import Series, series_of
from analyze.seeing.check import check
from tracer.errors import CaptureError
from tracer.format.journal import Column
from tracer.messaging.messages import DATA_KINDS, DEFAULT_TAG, KINDS, STATISTICS_SUFFIX, kept_of
from tracer.messaging.subscriber import run_again
from tracer.messaging.subscription import is_doubled
from tracer.numbers.arrays import as_array
from tracer.numbers.past import NORMAL, Past
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader

_PAST = 40
"""How many recorded steps before a message define what is usual for its stream."""
_LEAST_PAST = 8
_FACTOR = 3.0
_DEVIATIONS = 8.0
_BEFORE = 3
"""The search for a cause starts this many recorded steps before the spike."""
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
        The norm, and the median of the stream's earlier norms.
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
        inputs: the norm of the gradient of each layer's output, divided by its mean over the batch, summed over layers.
    typical : float
        The median of `norm` over the batch.
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
    step : int
        Of the spike.
    why : str
        Why this step: the title and evidence of a finding, or that the caller gave the step.
    departure : Departure or None
    suspects : tuple of Suspect
        The most suspicious first: those with an unusual input, then those with the largest gradients.
    unseen : tuple of str
        What could not be examined, a sentence each.
    """

    trace: str
    step: int
    why: str
    departure: Departure | None
    suspects: tuple[Suspect, ...]
    unseen: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The cause, in a sentence."""
        one = self.departure
        if one is None:
            return f"step {self.step}: no stream left its own past there or in the {_BEFORE} recorded steps before"
        where = one.kind if one.module is None else f"{one.kind} of {one.module or 'the root'}"
        times = f"{one.value / one.usual:.3g} times" if one.usual > 0 and math.isfinite(one.value) else "not"
        return (
            f"step {self.step}: the first to leave its past was {where} in step {one.step}: its norm was "
            f"{one.value:.4g}, {times} what is usual for it"
        )

    def as_json(self) -> dict[str, Any]:
        """All fields in JSON values; an unknown size or gradient is null."""
        told = asdict(self)
        for one, suspect in zip(told["suspects"], self.suspects, strict=True):
            unknown = [] if suspect.seen else ["norm", "typical"]
            for name in (*unknown, *(["size"] if math.isnan(suspect.size) else [])):
                one[name] = None
            del one["seen"]
        return {**told, "verdict": self.verdict}


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
        If the step was not recorded, or if no step is given and no rule finds anything.
    TracerError
        What `tracer.open` raises.

    Notes
    -----
    A norm is unusual where its logarithm exceeds the median of the stream's 40 recorded steps before by log 3 and by 8
    robust standard deviations. Streams are searched in the order in which they were observed, because a cause comes
    before its effects. Datapoints are ranked by the norms of their gradients, computed from each layer's inputs and
    output gradients (I. Goodfellow, "Efficient Per-Example Gradient Computations", arXiv:1510.01799), for linear
    layers, convolutions, embeddings and normalisations.

    Datapoints with an unusual input rank above all others: the input comes before the gradients, and a corrupted
    datapoint has a small gradient where the network happens to be right. The input is that of the network or, where
    that is not recorded or has no floating-point numbers, that of the first layer. An input is unusual if its norm is
    outside the range of all datapoints of the 40 recorded steps before, and the logarithm of the norm is farther from
    their median than log 3 and than 8 robust standard deviations, up or down.
    """
    with nullcontext(path) if isinstance(path, TraceReader) else TraceReader(path) as opened:
        reader = opened.of_rank(opened.ranks[0]) if len(opened.ranks) > 1 else opened
        unseen = [f"rank {rank} was not looked at" for rank in opened.ranks[1:]]
        why = "it was given"
        if step is None:
            worst = check(reader).worst
            if worst is None:
                given = "give the step of the spike, with --step N or step=N"
                raise CaptureError(f"no rule found anything in {reader.path}: {given}")
            step, why = worst.first, f"{worst.title}: {worst.evidence}"
        steps = _steps(reader)
        if step not in steps:
            near = min(steps, key=lambda one: abs(one - step), default=None)
            has = "it has none" if near is None else f"the nearest is {near}"
            raise CaptureError(f"step {step} was not recorded in {reader.path}; {has}")
        at = steps.index(step)
        departure = _first_departure(reader, steps[max(0, at - _BEFORE - _PAST) : at + 1], steps[max(0, at - _BEFORE)])
        if at < _LEAST_PAST:
            unseen.append(f"only {at} steps were recorded before step {step}, too few to say what is usual")
        start = step if departure is None else departure.step
        begin = steps.index(start)
        suspects, missing = _suspects(reader, steps[begin : at + 1], steps[max(0, begin - _PAST) : begin])
        if _NO_GRADIENTS in missing and any(one.kind == "keyframe" for one in reader.streams):
            missing[missing.index(_NO_GRADIENTS)] += f"; {run_again(_PER_SAMPLE, f'{start}:{step + 1}')}"
        return Blame(str(reader.path), step, why, departure, tuple(suspects[:most]), (*unseen, *missing))


def _steps(reader: TraceReader) -> list[int]:
    """The recorded training steps, ascending."""
    rows = reader.select(kinds=_SEEN, tags=DEFAULT_TAG)
    return [int(one) for one in np.unique(reader.journal[rows, Column.GLOBAL_STEP])]


def _first_departure(reader: TraceReader, steps: Sequence[int], since: int) -> Departure | None:
    """The first message, from step `since` on, whose norm is unusual for its stream."""
    past: dict[tuple[str, int, Series], Past] = {}
    for message in reader.messages(kinds=_SEEN, tags=DEFAULT_TAG, steps=(steps[0], steps[-1] + 1)):
        extent = Extent.of(message)
        if extent is None or not extent.floating or extent.count == 0 or is_doubled(message.sampling):
            continue  # the message of its statistics is examined instead
        kind, norm = kept_of(message.kind)[0], shared(message, "norm2")
        before = past.setdefault((kind, message.call, series_of(message)), Past(_PAST))
        if message.global_step >= since and len(before) >= _LEAST_PAST:
            usual = math.exp(before.centre)
            far = max(math.log(_FACTOR), _DEVIATIONS * before.scale)
            if not math.isfinite(norm) or (norm > 0 and math.log(norm) - before.centre > far):
                return Departure(message.global_step, kind, message.key, norm, usual)
        if norm > 0 and math.isfinite(norm):
            before.add(math.log(norm))
    return None


def _suspects(reader: TraceReader, steps: Sequence[int], before: Sequence[int]) -> tuple[list[Suspect], list[str]]:
    """The datapoints of `steps`, most suspicious first, and what could not be examined; `before`: earlier steps."""
    found: list[Suspect] = []
    unseen: dict[str, None] = {}
    sizes = _sizes(reader, [*before, *steps])
    usual = [sizes[step] for step in before if step in sizes]
    if len(usual) < _LEAST_PAST:
        where = f"in {len(usual)} of the steps before only" if sizes else "nowhere"
        unseen[f"inputs of floating-point numbers were recorded {where}, so an odd one is not told"] = None
    for step in steps:
        heard = _heard(reader, step)
        norms, remarks = _norms(heard, len(sizes.get(step, ())))
        unseen |= dict.fromkeys(remarks)
        seen = norms is not None
        if norms is None:  # an unusual input is reported even without gradients
            norms = np.full(len(sizes.get(step, ())), math.nan)
        labels, samples = _labels(heard, len(norms)), _samples(heard, len(norms))
        typical = float(np.median(norms)) if len(norms) else math.nan
        times, odd = [math.nan] * len(norms), [False] * len(norms)
        if len(usual) >= _LEAST_PAST and len(sizes.get(step, ())) == len(norms):
            times, odd = _beside(sizes[step], np.concatenate(usual))
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


def _sizes(reader: TraceReader, steps: Sequence[int]) -> dict[int, NDArray[np.float64]]:
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
                rows = as_float64(message.data).reshape(len(message.data), -1)
                found.setdefault(message.global_step, []).append(np.linalg.norm(rows, axis=1))
    return {step: np.concatenate(norms) for step, norms in found.items()}


def _beside(now: NDArray[np.float64], usual: NDArray[np.float64]) -> tuple[list[float], list[bool]]:
    """Each input norm divided by the median of the usual norms, and whether it is unusual."""
    usual = usual[np.isfinite(usual)]
    middle = float(np.median(usual)) if len(usual) else 0.0
    if middle == 0:
        return [math.nan] * len(now), [False] * len(now)
    with np.errstate(all="ignore"):
        spread = NORMAL * float(np.median(np.abs(np.log(usual / middle))))
        far = np.abs(np.log(now / middle)) > max(math.log(_FACTOR), _DEVIATIONS * spread)
        beyond = (now < usual.min()) | (now > usual.max())
    return (now / middle).tolist(), (~np.isfinite(now) | (far & beyond)).tolist()


_Heard = Mapping[str, Mapping[str | None, Mapping[int, Tensor]]]


def _heard(reader: TraceReader, step: int) -> _Heard:
    """The data of a step by kind, module and call."""
    heard: dict[str, dict[str | None, dict[int, Tensor]]] = {}
    for message in reader.messages(kinds=(*_PER_SAMPLE, "sample_ids"), tags=DEFAULT_TAG, steps=(step, step + 1)):
        if message.data is not None and not message.leaf:
            heard.setdefault(message.kind, {}).setdefault(message.key, {})[message.call] = message.data
    return heard


def _norms(heard: _Heard, likely: int) -> tuple[NDArray[np.float64] | None, list[str]]:
    """The gradient norm of each datapoint (of which there are probably `likely`), and what could not be examined."""
    squares: dict[str, NDArray[np.float64]] = {}
    left: list[str] = []
    gradients, inputs = heard.get("layer_gradients", {}), heard.get("layer_inputs", {})
    for module, calls in heard.get("weight_gradients", {}).items():
        of_bias = heard.get("bias_gradients", {}).get(module, {})
        recorded = [as_array(next(iter(one.values()))) for one in (calls, of_bias) if one]
        with np.errstate(all="ignore"):
            grams = layer_grams(
                inputs.get(module, {}), gradients.get(module, {}), recorded,
                passes=max(len(heard.get("loss", {}).get(None, {})), 1), summed=False, geometry=Geometry(),
            )  # fmt: skip
        if grams:
            squares[module or ""] = np.sum([np.diagonal(gram.gram) for gram, _ in grams], axis=0)
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
        return norms, [f"the gradients of {names} could not be had for single datapoints"] if left else []
    return _norms_of_outputs(gradients)


def _norms_of_outputs(
    gradients: Mapping[str | None, Mapping[int, Tensor]],
) -> tuple[NDArray[np.float64] | None, list[str]]:
    """Without layer inputs: the norms of the output gradients, each divided by the batch mean, summed over layers."""
    rows = [as_float64(calls[min(calls)]) for calls in gradients.values() if calls[min(calls)].ndim >= 2]
    if not rows:
        return None, [_NO_GRADIENTS]
    usual = _most_frequent([len(one) for one in rows])
    total = np.zeros(usual)
    with np.errstate(all="ignore"):
        for one in rows:
            if len(one) == usual:
                norms = np.linalg.norm(one.reshape(usual, -1), axis=1)
                mean = norms.mean()
                if mean != 0:
                    total += norms / mean
    remark = "no layer_inputs were recorded, so datapoints are ranked by the gradients of the layers' outputs alone"
    return total, [remark]


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
