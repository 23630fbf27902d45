"""The counters of a training: steps and epochs, passes, calls and messages; notes of what is not observed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from tracer.errors import raised_by_signal, warn_only
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG


class At(NamedTuple):
    """The counters that all messages of a step carry; in an evaluation, with the number of its pass."""

    global_step: int
    train_step: int
    epoch: int
    batch: int = 0


@dataclass(slots=True)
class OpenStep:
    """What parts keep of the open step; another one takes its place when it ends.

    Attributes
    ----------
    in_eval_mode : bool
        Whether a training pass ran while the model was in eval mode.
    trainable : dict
        By id of a top: whether a parameter of it can be trained.
    forwards : int
        How many training forwards have begun whose state was published.
    stepped : set of int
        The ids of the parameters whose optimizer state is published.
    waiting : tuple or None
        An optimizer that steps before its forward, and its parameters.
    scaler_published : bool
        Whether the state of a GradScaler is published.
    scale : Tensor or None
        The factor by which a GradScaler multiplied the last loss.
    scales : dict
        By backward: a GradScaler's factor in its loss.
    backwards : dict
        By stream and call: the number of the last gradient.
    ungraded : dict
        By path: the calls without gradients, as (number of the next node in the graph, number of the call).
    recomputed : Counter
        By checkpoint node, backward and path: how many of these calls a module has recomputed.
    norms_before : dict
        By id of an optimizer: the norm of its gradients when the last backward was over.
    norms : dict
        By model and id of an optimizer: the norms of the gradients of its last step.
    """

    in_eval_mode: bool = False
    trainable: dict[int, bool] = field(default_factory=dict)
    forwards: int = 0
    stepped: set[int] = field(default_factory=set)
    waiting: tuple[Any, Any] | None = None
    scaler_published: bool = False
    scale: Tensor | None = None
    scales: dict[int, Tensor] = field(default_factory=dict)
    backwards: dict[tuple[StreamKey, int], int] = field(default_factory=dict)
    ungraded: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    recomputed: Counter[tuple[int | None, int, str]] = field(default_factory=Counter)
    norms_before: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[str, dict[int, Tensor]] = field(default_factory=dict)


class Clock:
    """The counters of a training. An open step keeps the counters that it began with.

    Attributes
    ----------
    step : int
        How many optimizer steps have ended: the global step of the open step, or else of the next.
    train_step : int
        How many optimizer steps have ended in this epoch.
    epoch : int
        How many epochs have ended.
    open : bool
        Whether a step has begun and not ended.
    began : At
        The counters of the open step.
    idle : bool
        Whether nobody wants data of the open step.
    kept : OpenStep
        What parts keep of the open step.
    last : At or None
        The counters of the last step that ended.
    starting : callable or None
        Called once, before the counters are first read.

    Examples
    --------
    >>> clock = Clock()
    >>> clock.begin()
    >>> clock.end()
    >>> clock.now(), clock.last
    (At(global_step=1, train_step=1, epoch=0, batch=0), At(global_step=0, train_step=0, epoch=0, batch=0))
    """

    __slots__ = ("began", "epoch", "first_step", "idle", "kept", "last", "open", "starting", "step", "train_step")

    def __init__(self) -> None:
        self.first_step = self.step = self.train_step = self.epoch = 0
        self.open = self.idle = False
        self.began = At(0, 0, 0)
        self.kept = OpenStep()
        self.last: At | None = None
        self.starting: Callable[[], None] | None = None

    def start_at(self, global_step: int, train_step: int, epoch: int) -> None:
        """Set the counters."""
        self.first_step = self.step = global_step
        self.train_step, self.epoch = train_step, epoch

    def now(self) -> At:
        """The counters of the open step, or else of the next step."""
        if self.starting is not None:
            starting, self.starting = self.starting, None
            starting()
        return self.began if self.open else At(self.step, self.train_step, self.epoch)

    def begin(self) -> None:
        """Begin a step."""
        self.began = self.now() if self.starting is not None else At(self.step, self.train_step, self.epoch)
        self.open = True

    def end(self) -> None:
        """End the open step."""
        self.last = self.began
        self.open = False
        self.step += 1
        if self.last.epoch == self.epoch:  # else the epoch ended within this step, and the next step is number 0
            self.train_step += 1

    def last_of_epoch(self) -> At:
        """The counters of the epoch's last step, or of the next step if the epoch had none."""
        last = self.last
        return last if last is not None and last.epoch == self.epoch else At(self.step, 0, self.epoch)

    def end_epoch(self) -> None:
        """End the epoch."""
        self.epoch += 1
        self.train_step = 0


class Problems:
    """Notes what is not observed, so that the training continues. The first note of each kind is also a warning.

    Parameters
    ----------
    clock : Clock
        Gives the step of a note.
    strict : bool
        Whether errors are raised in the training loop.

    Attributes
    ----------
    all : list of dict
        The notes: `what`, `why`, their `count`, and the `global_step` of the first occurrence.
    enabled : bool
        Whether problems are currently noted.
    """

    def __init__(self, clock: Clock, *, strict: bool) -> None:
        self.all: list[dict[str, Any]] = []
        self.enabled = True
        self.strict = strict
        self._clock = clock
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def note(self, what: str, why: str, *, warn: bool = True) -> None:
        """Note what is not observed, and why. `warn`: False if nothing is missing."""
        if not self.enabled:  # observation has ended, for a reason already noted
            return
        known = self._known.get((what, why))
        if known is not None:
            known["count"] += 1
            return
        known = self._known[what, why] = {"what": what, "why": why, "count": 1, "global_step": self._clock.step}
        self.all.append(known)
        if warn:
            warn_only(f"{what} is not recorded: {why}; the training goes on", stacklevel=3)

    def failed(self, what: str, error: Exception) -> None:
        """Note an exception that ended an observation; raise it under `strict` or if a signal handler raised it."""
        if self.strict or raised_by_signal(error):
            raise error
        self.note(what, f"{type(error).__name__}: {error}")


class StreamKey(NamedTuple):
    """Identifies a stream of messages; each tensor of a structure has its own leaf."""

    kind: str
    module: str | None
    tag: str
    leaf: str


class CallNumbers:
    """Counts the calls of modules and the messages of streams, in each step."""

    def __init__(self) -> None:
        self._messages: dict[StreamKey, int] = {}
        self._passes: dict[str, int] = {}  # passes outside the training, by tag
        self._calls: dict[str, dict[str, int]] = {}  # by tag and path

    @property
    def counted(self) -> bool:
        """Whether anything was counted."""
        return bool(self._calls or self._messages or self._passes)

    # -- steps ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Reset the counts of the training."""
        if self._calls or self._messages:
            self.forget(DEFAULT_TAG)

    def end_step(self) -> None:
        """Reset all counts except those of training messages, because a value may still be logged for this step."""
        if self._calls or self._passes:
            self._calls, self._passes = {}, {}
        if self._messages:
            self._messages = {stream: count for stream, count in self._messages.items() if stream.tag == DEFAULT_TAG}

    def forget(self, tag: str) -> None:
        """Reset the counts of a tag."""
        self._calls.pop(tag, None)
        self._passes.pop(tag, None)
        self._messages = {stream: count for stream, count in self._messages.items() if stream.tag != tag}

    # -- messages -------------------------------------------------------------------------------------------

    def message(self, stream: StreamKey, call: int | None) -> int:
        """Number a stream's message in its step: `call`, or if None the last number plus one."""
        number = call if call is not None else self._messages.get(stream, 0)
        self._messages[stream] = number + 1
        return number

    def next_message(self, stream: StreamKey) -> int:
        """The number of the stream's next message."""
        return self._messages.get(stream, 0)

    # -- passes and calls -----------------------------------------------------------------------------------

    def count_pass(self, tag: str) -> int:
        """Count a pass outside the training; returns its number within its tag and step."""
        number = self._passes.get(tag, 0)
        self._passes[tag] = number + 1
        return number

    def calls_of(self, tag: str) -> dict[str, int]:
        """How many calls of each module were counted in passes of a tag. The caller may count on in the dictionary."""
        return self._calls.setdefault(tag, {})

    def take_calls(self, tag: str) -> dict[str, int]:
        """How many calls of each module were counted in passes of a tag, which are forgotten here."""
        return self._calls.pop(tag, {})

    def call(self, path: str, tag: str) -> int:
        """The number of the next call of a module. Calls are numbered when they end."""
        calls = self._calls.get(tag)
        return 0 if calls is None else calls.get(path, 0)

    def count_call(self, path: str, tag: str) -> int:
        """Count a call that has ended; returns its number."""
        calls = self._calls.get(tag)
        if calls is None:
            calls = self._calls[tag] = {}
        call = calls.get(path, 0)
        calls[path] = call + 1
        return call


_NUMBERS = itertools.count()


class Held(NamedTuple):
    """A tensor of an undecided pass: its stream, a copy, and the number of its call within the pass, if it has any."""

    stream: StreamKey
    data: Tensor
    call: int | None


class UndecidedTag(str):
    """Stands for the tag of one pass until the pass is decided. No two passes have equal ones.

    Attributes
    ----------
    held : list of Held
        What was observed of the pass so far.
    losses : list of (str, Tensor)
        What its loss functions gave, by name; the name is empty if the model gave it as its whole loss.
    decided : str
        The tag that the pass turned out to have; empty before.
    shift : dict of str to int
        By path, how many calls of a module with that tag came before the first one of the pass.
    """

    decided: str
    shift: dict[str, int]
    held: list[Held]
    losses: list[tuple[str, Tensor]]

    def __new__(cls) -> UndecidedTag:
        new = super().__new__(cls, f"\0undecided {next(_NUMBERS)}")
        new.held, new.losses, new.decided, new.shift = [], [], "", {}
        return new

    def decide(self, tag: str, shift: dict[str, int]) -> None:
        """Give the pass its tag."""
        self.decided, self.shift = tag, shift


def decided(tag: str) -> str:
    """The tag itself, or what an undecided pass turned out to have; an evaluation's as long as nothing is known."""
    return (tag.decided or EVAL_TAG) if type(tag) is UndecidedTag else tag
