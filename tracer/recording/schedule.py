"""`Schedule`: how often each group of kinds is recorded; `Costs` and `Bound`: what a group costs, and may cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG, KINDS
from tracer.observing.capture import Capture

GROUPS: Final = ("losses", "inputs", "keyframes", "tensors")
"""Kinds that are widened together, from the group that is kept longest to the group that is given up first.

``losses``: losses and the beginnings and ends of steps. ``inputs``: the data with which a step can be run again
(inputs, sample ids, labels, generators and hyperparameters, not their hashes or statistics). ``keyframes``: captures of
keyframes. ``tensors``: everything else.
"""
_INPUTS = frozenset(("input_data", "sample_ids", "input_labels", "generators", "hyperparameters"))
_LOSSES = frozenset(("loss", "loss_terms"))


def group_of(capture: Capture, kind: str) -> str | None:
    """The group of a kind in a capture; None for kinds that are not counted by steps (epochs), and for probes.

    In a capture of evaluations only, all kinds but losses belong to ``inputs``.

    Examples
    --------
    >>> [group_of(Capture(), kind) for kind in ("loss", "input_data", "weights")]
    ['losses', 'inputs', 'tensors']
    >>> [group_of(Capture(tags=["eval"]), kind) for kind in ("loss", "network_output", "epoch_finished")]
    ['losses', 'inputs', None]
    """
    if KINDS[kind].clock != "global_step":
        return None
    if not capture.takes_tag(DEFAULT_TAG):
        if not capture.takes_tag(EVAL_TAG):
            return None
        return "losses" if kind in _LOSSES else "inputs"
    if "keyframe" in (capture.kinds or ()):
        return "keyframes"
    if kind in _LOSSES or KINDS[kind].event:
        return "losses"
    return "inputs" if kind in _INPUTS and capture.beside(kind) is None else "tensors"


def with_generators(factors: dict[str, int]) -> dict[str, int]:
    """The factors with keyframes in steps that have inputs: without generators and hyperparameters, they are useless.

    Examples
    --------
    >>> with_generators({"inputs": 3, "keyframes": 4})
    {'inputs': 3, 'keyframes': 6}
    """
    return factors | {"keyframes": -(-factors["keyframes"] // factors["inputs"]) * factors["inputs"]}


class _CapturePart(NamedTuple):
    """The kinds of a given capture that belong to a group.

    Attributes
    ----------
    number : int
        The capture's index.
    group : str or None
        None: never widened.
    whole : bool
        Whether the piece has all kinds of its capture.
    capture : Capture
        The kinds, as often as given.
    of_steps : bool
        Whether the piece takes training steps.
    """

    number: int
    group: str | None
    whole: bool
    capture: Capture
    of_steps: bool


def _pieces(captures: Iterable[Capture]) -> Iterator[_CapturePart]:
    for number, capture in enumerate(captures):
        kinds: dict[str | None, list[str]] = {}
        for kind in capture.kinds or ():
            kinds.setdefault(group_of(capture, kind), []).append(kind)
        for group, some in kinds.items():
            whole = len(kinds) == 1
            piece = capture if whole else replace(capture, kinds=tuple(some))
            yield _CapturePart(number, group, whole, piece, group is not None and capture.takes_tag(DEFAULT_TAG))


class Schedule:
    """The captures in force: each as often as given, or rarer by a factor.

    Parameters
    ----------
    captures : iterable of Capture
        As given. The first capture that takes a stream decides on it.
    evaluations : bool
        Whether evaluations become rarer, too.

    Attributes
    ----------
    factors : dict of str to int
        By group, how many times rarer than given.
    captures : tuple of Capture
        The captures in force. A given capture with kinds of several groups is split.

    Examples
    --------
    >>> schedule = Schedule([Capture(kinds=["loss", "weights"], every=2)])
    >>> schedule.widen({"tensors": 4})
    [{'capture': 0, 'kinds': ['weights'], 'every': [2, 8]}]
    >>> schedule.due(2), schedule.due(8)
    (('losses',), ('losses', 'tensors'))
    """

    def __init__(self, captures: Iterable[Capture], *, evaluations: bool = True) -> None:
        self._evaluations = evaluations
        self._pieces = tuple(_pieces(captures))
        self.factors = dict.fromkeys(GROUPS, 1)
        self.captures = tuple(piece.capture for piece in self._pieces)
        self._ranked = self._by_distance()

    def spacing(self, group: str) -> int | None:
        """The given distance in steps between a group's messages; None if no capture takes the group."""
        taken = (piece.capture.every for piece in self._pieces if piece.group == group and piece.of_steps)
        return min(taken, default=None)

    def due(self, step: int) -> tuple[str, ...]:
        """The groups that are due in a training step, from the most frequent to the rarest."""
        found = {
            piece.group
            for piece, capture in zip(self._pieces, self.captures, strict=True)
            if piece.of_steps and capture.next_step(step) == step
        }
        return tuple([group for group in self._ranked if group in found])

    def _by_distance(self) -> list[str]:
        """The groups, from the most frequent to the rarest."""
        return sorted(GROUPS, key=lambda group: (self.spacing(group) or 1) * self.factors[group])

    def widen(self, factors: Mapping[str, int]) -> list[dict[str, Any]]:
        """Put factors in force, and return the changes as JSON.

        Each change has ``capture``, the index of the given capture; ``kinds``, unless all kinds of that capture change;
        and ``every``, a list of the values before and after.
        """
        before, self.factors = self.captures, {**self.factors, **factors}
        self.captures = tuple(map(self._in_force, self._pieces))
        self._ranked = self._by_distance()
        return [
            {
                "capture": piece.number,
                **({} if piece.whole else {"kinds": list(piece.capture.kinds or ())}),
                "every": [old.every, new.every],
            }
            for piece, old, new in zip(self._pieces, before, self.captures, strict=True)
            if old.every != new.every
        ]

    def _in_force(self, piece: _CapturePart) -> Capture:
        factor, capture = self.factors.get(piece.group or "", 1), piece.capture
        if factor == 1 or not (piece.of_steps or self._evaluations):
            return capture
        return replace(capture, every=capture.every * factor)


class Wish(NamedTuple):
    """The range of factors that a bound asks of a schedule.

    Attributes
    ----------
    least : mapping of str to int
        By group; a lower factor breaks the bound.
    most : mapping of str to int
        By group; a higher factor records less than the bound allows.
    why : str
    """

    least: Mapping[str, int]
    most: Mapping[str, int]
    why: str


class Bound(Protocol):
    """Measures what steps take of a bounded resource."""

    def step_over(self, step: int, due: Sequence[str], steps: int) -> None:
        """Measure the steps since the last call: `steps`, the last of which is `step`, in which `due` was due.

        Nothing was due in the steps before it.
        """

    def wish(self) -> Wish | None:
        """The factors that the bound asks for; None as long as it asks for nothing."""


WIDEST: Final = 1 << 20
"""The largest factor."""
SHARES: Final[Mapping[str, float]] = {"losses": 0.5, "inputs": 0.7, "keyframes": 0.5, "tensors": 1.0}
"""By group, the share of what the groups before it leave that it may take before it is widened."""
_LEARNS = 0.1
"""Weight of the newest step in an estimate, after the first steps."""


def next_factor(least: float, *, fine: bool = False) -> int:
    """The smallest factor that is at least `least`: a power of two or, if `fine`, also three halves of such a power.

    Examples
    --------
    >>> [next_factor(least) for least in (0.3, 1, 1.1, 2.5, 5)], next_factor(5, fine=True)
    ([1, 1, 2, 4, 8], 6)
    """
    factor = 1
    while factor < least and factor < WIDEST:
        if fine and factor > 1 and factor * 3 // 2 >= least:
            return factor * 3 // 2
        factor *= 2
    return factor


class Costs:
    """Learns what each group costs in a step in which it is due.

    A step costs the sum over its due groups. Its cost beyond the estimates of the other groups is attributed to the
    rarest due group, so the base cost of every step counts for the most frequent group.

    Examples
    --------
    >>> from tracer.observing.capture import Capture
    >>> schedule, costs = Schedule([Capture(kinds=["loss", "weights"])]), Costs()
    >>> for step in range(1, 41):
    ...     costs.learn(1.0 if step % 2 else 9.0, ("losses",) if step % 2 else ("losses", "tensors"))
    >>> round(costs.mean(schedule), 2), costs.factors(schedule, 3.0)["tensors"]
    (9.0, 4)
    """

    def __init__(self) -> None:
        self._of = dict.fromkeys(GROUPS, 0.0)
        self._seen = dict.fromkeys(GROUPS, 0)

    def learn(self, amount: float, due: Sequence[str]) -> None:
        """Learn from a step that took `amount`; `due` are its groups, the rarest last."""
        if not due:
            return
        last = due[-1]
        own = max(0.0, amount - sum(self._of[group] for group in due[:-1]))
        self._seen[last] += 1
        self._of[last] += (own - self._of[last]) * max(_LEARNS, 1 / self._seen[last])

    def mean(self, schedule: Schedule) -> float:
        """The mean cost of a step if the groups come as often as given."""
        return sum(self._rate(schedule, group) for group in GROUPS)

    def factors(self, schedule: Schedule, allowed: float) -> dict[str, int]:
        """The smallest factors with which the mean step costs no more than `allowed`.

        Parameters
        ----------
        schedule : Schedule
        allowed : float
            In the unit of `learn`.
        """
        left, found = max(allowed, 0.0), dict[str, int]()
        for group in GROUPS:
            rate = self._rate(schedule, group)
            share = SHARES[group] * left
            needed = rate / share if share > 0 else float(WIDEST if rate else 1)
            found[group] = next_factor(needed, fine=group == "tensors")
            left -= min(left, rate / found[group])
        found["inputs"] = max(found["inputs"], found["losses"])
        return with_generators(found)

    def _rate(self, schedule: Schedule, group: str) -> float:
        spacing = schedule.spacing(group)
        return 0.0 if spacing is None else self._of[group] / spacing
