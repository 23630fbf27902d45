"""Reads from a trace what a re-enactment needs: keyframes, inputs, and values to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from tracer.errors import CaptureError
from tracer.format.journal import Column
from tracer.messaging.messages import DATA_KINDS, DEFAULT_TAG, EVAL_MODE, KINDS, Message, clock_of, kept_of
from tracer.observing.clock import At
from tracer.observing.reductions import hash_of
from tracer.stores.locations import Anywhere, location
from tracer.trace.claiming import this_process
from tracer.trace.reader import TraceReader

COMPARABLE: tuple[str, ...] = tuple(
    kind for kind in DATA_KINDS if not KINDS[kind].event and kind not in ("sample_ids", "gradient_norms")
)
"""The kinds of data that a re-enactment computes, so that they can be compared."""
OF_STATE = ("buffers", "optimizer_state")
"""Kinds of state that a keyframe holds and a step computes from the keyframe before."""
_EXACT = ("loss", "loss_terms")
"""Kinds whose values are compared, because captures keep no hashes of them."""


class TensorPlace(NamedTuple):
    """The place of a tensor in a step."""

    kind: str
    module: str | None
    leaf: str
    call: int

    def __str__(self) -> str:
        where = "" if self.module is None else f" of {self.module!r}"
        leaf = f", {self.leaf}" if self.leaf else ""
        return f"{self.kind}{where}{leaf}{f', call {self.call}' if self.call else ''}"


class BatchOf(NamedTuple):
    """The datapoints of a training forward."""

    step: int
    model: str
    """The model's name if there are several, else empty."""
    call: int
    ids: list[int]


@dataclass(frozen=True)
class Keyframe:
    """The state at the beginning of a step.

    Attributes
    ----------
    at : At
        The counters of the step.
    parameters : dict of (str, str) to Tensor
        By kind (``weights`` or ``biases``) and stream.
    buffers : dict of str to Tensor
        By path.
    optimizer_state : dict of str to dict of str to Tensor
        By the path of the parameter, then by the names that `tracer.observing.pytorch.optimizer_states.flat` gives.
    """

    at: At
    parameters: Mapping[tuple[str, str], Tensor]
    buffers: Mapping[str, Tensor]
    optimizer_state: Mapping[str, Mapping[str, Tensor]]


@dataclass
class RecordedStep:
    """The recording of a training step.

    Attributes
    ----------
    at : At or None
        The counters of the step; None if nothing of it was recorded.
    inputs, labels : dict of int to dict of str to Tensor
        The model's inputs in each forward, and the losses' labels in each of their calls: by call and leaf.
    samples : dict of (str, int) to list of int
        The sample ids of each forward, by the name of the model and the call.
    generators : dict of int to dict of str to Tensor
        The random generators' states at the beginning of each forward, by name.
    hyperparameters : dict of str to dict of str to float
        By optimizer group (``optimizer.group``) or GradScaler (``scaler``), then by name.
    in_part : set of str
        Kinds of which only a part of each tensor was kept.
    values : dict of TensorPlace to Tensor
        Whole losses, to compare with.
    hashes : dict of TensorPlace to int
        Hashes of everything else that was kept whole or as a hash.
    state : dict of TensorPlace to int
        Hashes of the buffers and optimizer states at the beginning of the step.
    """

    at: At | None = None
    inputs: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    labels: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    samples: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    generators: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    hyperparameters: dict[str, dict[str, float]] = field(default_factory=dict)
    in_part: set[str] = field(default_factory=set)
    values: dict[TensorPlace, Tensor] = field(default_factory=dict)
    hashes: dict[TensorPlace, int] = field(default_factory=dict)
    state: dict[TensorPlace, int] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        """Add a message of the step."""
        data, kind = message.data, message.kind
        if self.at is None and clock_of(kind) == "global_step":
            self.at = At(message.global_step, message.train_step, message.epoch)
        if data is None:
            return
        if kind == "sample_ids":
            if not _is_part(message.sampling):
                self.samples[message.leaf, message.call] = data.tolist()
        elif kind == "generators":
            self.generators.setdefault(message.call, {})[message.leaf] = data
        elif kind == "hyperparameters":
            names = (message.sampling or {}).get("entries", [])
            self.hyperparameters[message.leaf] = dict(zip(names, data.tolist(), strict=True))
        elif kept_of(kind)[0] in COMPARABLE:
            self._add_value(message, data)
        elif kind in OF_STATE:
            self.state[TensorPlace(kind, message.key, message.leaf, message.call)] = hash_of(data)

    def gives(self, place: TensorPlace) -> bool:
        """Whether a re-enactment is given this value as recorded, instead of computing it."""
        given = {"input_data": self.inputs, "input_labels": self.labels}.get(place.kind, {})
        return place.leaf in given.get(place.call, {})

    def _add_value(self, message: Message, data: Tensor) -> None:
        kind, held = kept_of(message.kind)
        place = TensorPlace(kind, message.key, message.leaf, message.call)
        if held == "hash":
            self.hashes[place] = int(data)
        elif held != "data":
            return
        elif _is_part(message.sampling):
            self.in_part.add(kind)
        elif kind in _EXACT:
            self.values[place] = data
        else:
            self.hashes.setdefault(place, hash_of(data))
            given = {"input_data": self.inputs, "input_labels": self.labels}.get(kind)
            if given is not None:
                given.setdefault(message.call, {})[message.leaf] = data


def _is_part(sampling: Mapping[str, Any] | None) -> bool:
    """Whether a message has only a part of this rank's tensor, or numbers computed from it."""
    return sampling is not None and bool({*sampling} - {"beside", "placement", "datapoints"})


@contextlib.contextmanager
def recorded_run(path: Anywhere, attempt: int | None = None) -> Iterator[Recorded]:
    """Open a recorded run, for this process's rank.

    Parameters
    ----------
    path : path or URL
    attempt : int, optional
        For a resumed run: read it as this attempt left it; by default, the last attempt.

    Raises
    ------
    CaptureError
        If this process's ranks are not those of the run, or the run has no such attempt.
    """
    process = this_process()
    with TraceReader(location(path), assemble=False) as whole:
        trace = whole if attempt is None else whole.until_attempt(attempt)
        if process.size != len(trace.ranks) or process.rank not in trace.ranks:
            raise CaptureError(
                f"{path} is of {len(trace.ranks)} ranks, and this is rank {process.rank} of {process.size}: start "
                "as many processes as the run had, by torchrun in the place of the script"
            )
        yield Recorded(trace, process.rank if process.size > 1 else None, attempt)


class Recorded:
    """A recorded run, read as a re-enactment needs it.

    Parameters
    ----------
    trace : TraceReader
        Opened with ``assemble=False``: each rank has its own parts of distributed tensors.
    rank : int, optional
        The rank that runs again, if there are several. Messages that other ranks recorded for it count as its own.
    attempt : int, optional
        The requested attempt.
    """

    def __init__(self, trace: TraceReader, rank: int | None = None, attempt: int | None = None) -> None:
        self.trace = trace
        self._attempt = attempt
        self._ranks = None if rank is None else [rank]
        self._step: tuple[int, RecordedStep] | None = None

    def describe(self) -> dict[str, object]:
        """Identify the run, as JSON: path, id, and the attempt if it was requested or there are several."""
        attempts = [one["attempt"] for one in self.trace.attempts]
        attempt = attempts[-1] if self._attempt is None and len(attempts) > 1 else self._attempt
        about = {"run": str(self.trace.path), "run_id": self.trace.header.get("run_id")}
        return about if attempt is None else about | {"attempt": attempt}

    @property
    def kinds(self) -> list[str]:
        """The kinds of data that were kept and can be compared."""
        return [kind for kind in COMPARABLE if kind in self._observed]

    @property
    def modules(self) -> list[str]:
        """The paths of the recorded modules and parameters."""
        return sorted(
            {stream.module for stream in self.trace.streams if stream.module is not None and stream.tag == DEFAULT_TAG}
        )

    @property
    def has_samples(self) -> bool:
        """Whether the run has sample ids."""
        return "sample_ids" in self._observed

    @property
    def _observed(self) -> set[str]:
        return {kept_of(stream.kind)[0] for stream in self.trace.streams if stream.tag == DEFAULT_TAG and stream.count}

    def keyframes(self) -> list[int]:
        """The global steps that have a keyframe, ascending."""
        return sorted({one.global_step for one in self._messages("keyframe")})

    def keyframe(self, step: int) -> Keyframe:
        """The last keyframe at or before `step`.

        Raises
        ------
        CaptureError
            If there is no such keyframe.
        """
        there = self.keyframes()
        before = [one for one in there if one <= step]
        if not before:
            found = f"its first one is at step {there[0]:,}" if there else "it has none"
            raise CaptureError(
                f"{self.trace.path} has no keyframe at or before step {step:,}, from which that could be run again; "
                f"{found}: the profile standard gives keyframes, and so does tracer.KEYFRAME among captures"
            )
        at: At | None = None
        parameters: dict[tuple[str, str], Tensor] = {}
        buffers: dict[str, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {}
        kinds = ("weights", "biases", "buffers", "optimizer_state", "keyframe")
        for message in self._messages(kinds, before[-1]):
            data, key = message.data, message.key
            if data is None or key is None:
                at = At(message.global_step, message.train_step, message.epoch)
            elif message.kind == "buffers":
                buffers[key] = data
            elif message.kind == "optimizer_state":
                states.setdefault(key, {})[message.leaf] = data
            elif not _is_part(message.sampling):
                parameters[message.kind, key] = data
        assert at is not None, "the step has a keyframe"
        return Keyframe(at, parameters, buffers, states)

    def kept(self, start: int, stop: int) -> dict[int, dict[str, bool]]:
        """By global step, the kinds that the trace has of the training, and whether whole. Reads no data."""
        return self._kept(start, stop, self._ranks)

    def kept_by_each_rank(self, step: int) -> list[dict[str, bool]]:
        """For each rank of the run, the kinds that the trace has of a step, as from `kept`; empty if it has none."""
        return [self._kept(step, step + 1, [rank]).get(step, {}) for rank in self.trace.ranks]

    def _kept(self, start: int, stop: int, ranks: Sequence[int] | None) -> dict[int, dict[str, bool]]:
        window = self.trace.within(start, stop)
        rows = window.select(steps=(start, stop), tags=DEFAULT_TAG, ranks=ranks)
        streams = {one.id: one for one in window.streams}
        found: dict[int, dict[str, bool]] = {}
        for number, step in window.journal[rows][:, [Column.STREAM, Column.GLOBAL_STEP]].tolist():
            stream, kinds = streams[number], found.setdefault(step, {})
            kinds[stream.kind] = kinds.get(stream.kind, False) or not _is_part(stream.sampling)
        return found

    def samples(self, start: int, stop: int) -> list[BatchOf]:
        """The sample ids of the training forwards in a range of steps, in order."""
        messages = self.trace.messages("sample_ids", steps=(start, stop), tags=DEFAULT_TAG, ranks=self._ranks)
        return [
            BatchOf(message.global_step, message.leaf, message.call, message.data.tolist())
            for message in messages
            if message.data is not None and not _is_part(message.sampling)
        ]

    def in_eval_mode(self, start: int, stop: int) -> frozenset[int]:
        """The steps in a range that were trained while the model was in eval mode."""
        if EVAL_MODE not in self._observed:
            return frozenset()
        messages = self.trace.messages(EVAL_MODE, steps=(start, stop), tags=DEFAULT_TAG, ranks=self._ranks)
        return frozenset(message.global_step for message in messages)

    def step(self, number: int) -> RecordedStep:
        """The recording of a training step; the last result is cached."""
        if self._step is None or self._step[0] != number:
            found = RecordedStep()
            for message in self._messages(None, number):
                found.add(message)
            self._step = number, found
        return self._step[1]

    def hyperparameters(self, number: int) -> dict[str, dict[str, float]]:
        """The hyperparameters of a training step, as in `RecordedStep`."""
        found = RecordedStep()
        for message in self._messages("hyperparameters", number):
            found.add(message)
        return found.hyperparameters

    def _messages(self, kinds: str | Sequence[str] | None, step: int | None = None) -> Iterator[Message]:
        """The messages of the training, in all steps or in `step`."""
        steps = None if step is None else (step, step + 1)
        return self.trace.messages(kinds, steps=steps, tags=DEFAULT_TAG, ranks=self._ranks)
