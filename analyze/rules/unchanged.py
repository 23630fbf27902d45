"""Parameters that no step changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

import numpy as np

from analyze.metrics.metric import Series
from analyze.rules.finding import Finding, Severity
from analyze.rules.header import entries
from analyze.rules.rule import Looking
from analyze.rules.table_rule import TableRule, columns_of, grown, latest, taken
from analyze.rules.tables import Bools, Column, Floats, OfKind, Table, Wholes
from tracer.messaging.messages import Message

_FORGOTTEN, _FROZEN, _AMONG_MOST, _STOPPED, _ZERO, _UNKNOWN = range(6)
_WHY = (
    "it asks for gradients, and gets them",
    "it asks for no gradient",
    "it gets gradients, but the steps change no more than half of the network's weights",
    "steps before had changed it",
    "its gradients are zero",
    "no gradient of it is recorded",
)


@final
class Unchanged(TableRule):
    """Weights that no step changes: frozen, unknown to the optimizer, or out of the reach of the loss.

    Parameters
    ----------
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where an update is zero at `patience` steps in a row. It is a warning where the parameter asks for a
    gradient and gets one, and the steps change more than half of the network's weights: the optimizer was not given
    these. Else it is a note, and one for all weights of which the same holds: they were frozen on purpose; they have no
    gradient, or most weights are not changed either, as in a target network, an averaged teacher or a backbone whose
    head is trained; or they were changed before, and a small learning rate rounds to nothing. Without
    ``weight_gradients`` it is a note, too.
    *Needs* ``weight_updates``; ``weight_gradients``, and ``weights`` for whether the program itself writes them.
    *Source*: smdebug's ``UnchangedTensor``, here without a tolerance.
    """

    name = "unchanged"
    statistics = ("zeros", "count", "norm2")
    memory = ("changed", "reached", "flat", "norms", "written", "told")
    judges = "updates of weights"
    numbers = ("why", "others", "written")
    advice = "give it to the optimizer, use it in the loss, or freeze it with requires_grad_(False) if that is meant"

    def __init__(self, *, patience: int = 10, **where: Unpack[Looking]) -> None:
        super().__init__(["weight_updates"], also=("weight_gradients", "weights"), patience=patience, **where)
        self.frozen: set[str] = set()
        none = np.zeros(0, np.bool_)
        self.changed: Bools = none  # by column of updates: by an update
        self.reached: Bools = none  # by column of gradients: by a gradient
        self.flat: Bools = none  # by column of gradients: by a gradient of zeros
        self.norms: Floats = np.zeros(0)  # by column of weights: the last; NaN before the first
        self.written: Bools = none  # by column of weights: by the program, between two steps
        self.told: dict[int, Series] = {}  # the weights that stand for all of which the same holds

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the parameters that are frozen: without a gradient."""
        self.frozen = {
            str(one.get("name")) for one in entries(model, "parameters") if one.get("requires_grad") is False
        }

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the updates of each step; steps in a row of which the same holds are judged together."""
        of = table.of("weight_updates")
        there = of.there & (of["count"] > 0)
        zero = there & (of["zeros"] == of["count"])
        changed_before = grown(self.changed, len(of.columns), False)
        changed = self._ever("changed", there & ~zero)
        why = self._why(table, of, changed, most=changed.sum(axis=1) > there.sum(axis=1) / 2)
        written = self._written(table, of, np.concatenate([changed_before[None], changed])[:-1])
        self.cover(table, of, there)
        together = np.where(zero & (why != _FORGOTTEN), why, -1)
        state = np.concatenate([together, written], axis=1)
        begins = np.flatnonzero(np.append(True, (state[1:] != state[:-1]).any(axis=1))).tolist()
        for begin, end in itertools.pairwise([*begins, len(table)]):
            part, rows = table.part(begin, end), slice(begin, end)
            of = part.of("weight_updates")
            alone = there[rows] & (together[rows] < 0)
            yield from self.judge_all(part, of, alone, zero[rows], 0.0, 0.0, why[rows], 0.0, 0.0, covers=False)
            for reason in [one for one in dict.fromkeys(together[begin].tolist()) if one >= 0]:
                yield from self._note(part, of, np.flatnonzero(together[begin] == reason), reason, written[begin])

    def _note(self, table: Table, of: OfKind, columns: Wholes, why: int, written: Bools) -> Iterator[Message]:
        """Judge all weights of which the same holds as one: the first that stood for them."""
        several = {of.columns[column].series: column for column in columns.tolist()}
        if self.told.get(why) not in several:
            self.told[why] = min(several, key=lambda series: int(of.places[0, several[series]]))
        first = self.told[why]
        judged = np.zeros(of.there.shape, np.bool_)
        judged[:, several[first]] = True
        numbers = float(why), float(len(several) - 1), float(written[columns].any())
        note = np.array(Severity.NOTE)
        yield from self.judge_all(table, of, judged, judged, 0.0, 0.0, *numbers, severity=note, covers=False)
        self.amend(of.kind, first, *numbers)

    def _why(self, table: Table, of: OfKind, changed: Bools, *, most: Bools) -> Wholes:
        """Why updates may be zero, (steps, columns).

        `changed`: whether a step so far has changed the weight; `most`: whether the steps so far have changed more than
        half of the network's weights.
        """
        gradients = table.of("weight_gradients")
        there, zero = gradients.there & (gradients["count"] > 0), gradients["zeros"] == gradients["count"]
        of_each = columns_of(gradients, of)
        reached = taken(self._ever("reached", there & ~zero), of_each, False)
        flat = taken(self._ever("flat", there & zero), of_each, False)
        frozen = np.broadcast_to(of.where(self._is_frozen), reached.shape)
        forgotten = np.where(most, _FORGOTTEN, _AMONG_MOST)[:, None]
        return np.select([frozen, changed, reached, flat], [_FROZEN, _STOPPED, forgotten, _ZERO], _UNKNOWN)

    def _is_frozen(self, column: Column) -> bool:
        module = column.series[0]
        return bool({module, f"{module}.weight" if module else "weight"} & self.frozen)

    def _written(self, table: Table, of: OfKind, changed_before: Bools) -> Bools:
        """Whether the program has changed a weight between two steps, before any update has, (steps, columns)."""
        weights = table.of("weights")
        norm, before = weights["norm2"], grown(self.norms, len(weights.columns), math.nan)
        known = np.concatenate([before[None], latest(norm, weights.there, before)])
        self.norms = known[-1]
        moved = weights.there & ~np.isnan(known[:-1]) & (norm != known[:-1])
        by_program = moved & ~taken(changed_before, columns_of(of, weights), False)
        return taken(self._ever("written", by_program), columns_of(weights, of), False)

    def _ever(self, name: str, holds: Bools) -> Bools:
        """Whether something held at a step or before, (steps, columns); `name`: the attribute that remembers it."""
        before = grown(getattr(self, name), holds.shape[1], False)
        ever: Bools = np.logical_or.accumulate(np.concatenate([before[None], holds]), axis=0)[1:]
        setattr(self, name, ever[-1] if len(ever) else before)
        return ever

    def evidence(self, found: Finding) -> str:
        why, others = int(found.numbers["why"]), int(found.numbers["others"])
        told = f"no update changed it at {found.steps} recorded steps; {_WHY[why]}"
        if others:
            told += f"; the same holds for {others} other{'s' if others > 1 else ''}"
        if found.numbers["written"]:
            told += "; the program writes to it between the steps, as to a copy"
        return told
