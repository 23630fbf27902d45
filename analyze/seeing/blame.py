"""What caused a spike: the first stream that left its own past, and the datapoints with the largest gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.elementwise.sharing import shared
from analyze.metrics.gradients.layer_grams import Geometry, layer_grams
from analyze.metrics.inputs import as_array, as_float64
from analyze.metrics.streams import Series, series_of
from analyze.rules.past import Past
from analyze.seeing.check import check
from tracer.errors import CaptureError
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader

_PAST = 40
"""So many recorded steps before are what is usual for a stream."""
_LEAST_PAST = 8
_FACTOR = 3.0
_DEVIATIONS = 8.0
_BEFORE = 3
"""A cause is looked for in the step of the spike and in so many recorded steps before it."""
_COMPARED = tuple(name for name, kind in KINDS.items() if not kind.event and name not in ("input_labels", "loss_terms"))
_PER_SAMPLE = ("layer_inputs", "layer_gradients", "weight_gradients", "bias_gradients", "loss", "input_labels")


@dataclass(frozen=True)
class Departure:
    """The first message whose norm left what was usual for its stream.

    Attributes
    ----------
    step : int
    kind : str
    module : str or None
    value, usual : float
        The norm, and the median of the norms before.
    """

    step: int
    kind: str
    module: str | None
    value: float
    usual: float


@dataclass(frozen=True)
class Suspect:
    """A datapoint with a large gradient.

    Attributes
    ----------
    step : int
    position : int
        In the batch, from 0 on.
    norm : float
        Of the gradient of its loss by the parameters that were covered; where no layer inputs were recorded, a sum over
        the layers of how large the gradients of the outputs are beside the mean over the batch.
    typical : float
        The median of the batch.
    label : str
        Its label, if there was one; else empty.
    """

    step: int
    position: int
    norm: float
    typical: float
    label: str = ""


@dataclass(frozen=True)
class Blame:
    """What is to blame for a spike.

    Attributes
    ----------
    trace : str
    step : int
        Of the spike.
    why : str
        Where the step is from: a finding, or that it was given.
    departure : Departure or None
    suspects : tuple of Suspect
        The most suspicious first.
    unseen : tuple of str
        What could not be seen, a sentence each.
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
        """All of it in JSON values."""
        return {**asdict(self), "verdict": self.verdict}


def blame(path: Anywhere | TraceReader, step: int | None = None, *, most: int = 10) -> Blame:
    """Say what caused a spike.

    Parameters
    ----------
    path : path, URL or TraceReader
        Of a trace of one rank, or of several, of which the first is looked at.
    step : int, optional
        The global step of the spike. By default that of the worst finding of `check`.
    most : int
        How many datapoints are told.

    Returns
    -------
    Blame

    Raises
    ------
    CaptureError
        If the step was not recorded, or none is given and nothing is found.
    TracerError
        What `tracer.open` raises.

    Notes
    -----
    A stream has left its past where the logarithm of its norm exceeds the median of the 40 recorded steps before by
    log 3 and by 8 robust standard deviations. Streams are compared in the order in which they were observed, because a
    cause comes before its effects. Datapoints are ranked by the norms of their gradients, from the products of what a
    layer took and what came back (I. Goodfellow, "Efficient Per-Example Gradient Computations", arXiv:1510.01799): of
    linear layers, convolutions, embeddings and normalisations.
    """
    with nullcontext(path) if isinstance(path, TraceReader) else TraceReader(path) as opened:
        reader = opened.of_rank(opened.ranks[0]) if len(opened.ranks) > 1 else opened
        unseen = [f"rank {rank} was not looked at" for rank in opened.ranks[1:]]
        why = "it was given"
        if step is None:
            worst = check(reader).worst
            if worst is None:
                raise CaptureError(f"no rule found anything in {reader.path}: say which step is meant")
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
        suspects, missing = _suspects(reader, [one for one in steps if start <= one <= step])
        return Blame(str(reader.path), step, why, departure, tuple(suspects[:most]), (*unseen, *missing))


def _steps(reader: TraceReader) -> list[int]:
    """The steps of the training that were recorded, ascending."""
    rows = reader.select(kinds=_COMPARED, tags=DEFAULT_TAG)
    return [int(one) for one in np.unique(reader.journal[rows, Column.GLOBAL_STEP])]


def _first_departure(reader: TraceReader, steps: Sequence[int], since: int) -> Departure | None:
    """The first message of the steps from `since` on whose norm is unlike those before."""
    past: dict[tuple[str, int, Series], Past] = {}
    for message in reader.messages(kinds=_COMPARED, tags=DEFAULT_TAG, steps=(steps[0], steps[-1] + 1)):
        data = message.data
        if data is None or not data.is_floating_point() or data.numel() == 0:
            continue
        norm = shared(message, "norm2")
        before = past.setdefault((message.kind, message.call, series_of(message)), Past(_PAST))
        if message.global_step >= since and len(before) >= _LEAST_PAST:
            usual = math.exp(before.centre)
            far = max(math.log(_FACTOR), _DEVIATIONS * before.scale)
            if not math.isfinite(norm) or (norm > 0 and math.log(norm) - before.centre > far):
                return Departure(message.global_step, message.kind, message.key, norm, usual)
        if norm > 0 and math.isfinite(norm):
            before.add(math.log(norm))
    return None


def _suspects(reader: TraceReader, steps: Sequence[int]) -> tuple[list[Suspect], list[str]]:
    """The datapoints of some steps, those with the largest gradients first, and what could not be seen."""
    found: list[Suspect] = []
    unseen: dict[str, None] = {}
    for step in steps:
        heard = _heard(reader, step)
        norms, remarks = _norms(heard)
        unseen |= dict.fromkeys(remarks)
        if norms is None:
            continue
        labels = _labels(heard, len(norms))
        typical = float(np.median(norms))
        found += [
            Suspect(step, position, float(norm), typical, label)
            for position, (norm, label) in enumerate(zip(norms, labels, strict=True))
        ]
    found.sort(key=lambda one: (-math.inf if math.isnan(one.norm) else -one.norm / max(one.typical, 1e-300), one.step))
    return found, list(unseen)


_Heard = Mapping[str, Mapping[str | None, Mapping[int, Tensor]]]


def _heard(reader: TraceReader, step: int) -> _Heard:
    """The data of a step by kind, module and call."""
    heard: dict[str, dict[str | None, dict[int, Tensor]]] = {}
    for message in reader.messages(kinds=_PER_SAMPLE, tags=DEFAULT_TAG, steps=(step, step + 1)):
        if message.data is not None and not message.leaf:
            heard.setdefault(message.kind, {}).setdefault(message.key, {})[message.call] = message.data
    return heard


def _norms(heard: _Heard) -> tuple[NDArray[np.float64] | None, list[str]]:
    """The norm of the gradient of each datapoint, and what could not be seen."""
    covered: list[NDArray[np.float64]] = []
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
        squares = [np.diagonal(gram.gram) for gram, _ in grams]
        if squares and (not covered or len(squares[0]) == len(covered[0])):
            covered.append(np.sum(squares, axis=0))
        else:
            left.append(module or "the root")
    if covered:
        remarks = [f"the gradients of {', '.join(left)} could not be had for single datapoints"] if left else []
        with np.errstate(all="ignore"):
            return np.sqrt(np.sum(covered, axis=0)), remarks
    return _norms_of_outputs(gradients)


def _norms_of_outputs(
    gradients: Mapping[str | None, Mapping[int, Tensor]],
) -> tuple[NDArray[np.float64] | None, list[str]]:
    """For want of layer inputs: how large the gradients of a datapoint's outputs are, beside the mean, over layers."""
    rows = [as_float64(calls[min(calls)]) for calls in gradients.values() if calls[min(calls)].ndim >= 2]
    counts = [len(one) for one in rows]
    if not counts:
        return None, ["no layer_gradients were recorded, so datapoints cannot be told apart"]
    usual = max(set(counts), key=counts.count)
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


def _labels(heard: _Heard, count: int) -> Iterator[str]:
    """The labels of the datapoints, as far as there is one for each."""
    calls = heard.get("input_labels", {}).get(None, {})
    labels = as_array(calls[min(calls)]) if calls else np.zeros(0)
    for position in range(count):
        yield str(labels[position]) if labels.ndim == 1 and len(labels) == count else ""
