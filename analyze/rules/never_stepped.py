"""Weights that get gradients, and that no optimizer's step ever changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

import numpy as np

from analyze.metrics.inputs import check, is_whole
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding, Severity
from analyze.rules.header import entries
from analyze.rules.rule import Looking
from analyze.rules.table_rule import TableRule
from analyze.rules.tables import Bools, OfKind, Table, Wholes
from tracer.messaging.messages import Message


class _Weight:
    """A weight of which no update is recorded.

    Attributes
    ----------
    first : Place
        Where it was recorded first.
    numbers : tuple of float
        Its statistics there.
    steps : int
        At how many recorded steps since then a gradient came to its layer's outputs.
    """

    def __init__(self, first: Place, numbers: tuple[float, ...]) -> None:
        self.first, self.numbers = first, numbers
        self.steps = 0


@final
class NeverStepped(TableRule):
    """Weights that get gradients and stay as they are, because no optimizer that steps has them.

    Parameters
    ----------
    steps : int
        At how many recorded steps gradients must have come.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where a weight that asks for gradients is the same at two recorded steps, no update of it is recorded, and
    at `steps` steps or more between them the outputs of its layer had a gradient while other weights were changed. It
    is a warning if more than half of the network's weights were changed, else a note: a part may be trained alone on
    purpose. Weights whose updates are recorded are judged by `unchanged`.
    *Needs* ``weights`` at two steps, ``layer_gradients`` and ``weight_updates``, and a header that names the
    parameters.
    *Source*: PyTorch's documentation of ``torch.optim``: an optimizer's step updates the parameters that it was given.
    """

    name = "never_stepped"
    statistics = ("zeros", "count", "sum", "norm2", "min", "max")
    memory = ("kept", "changed", "updated")
    judges = "weights, the gradients of their layers, and updates"
    numbers = ("steps",)
    advice = "give these parameters to an optimizer, and call its step() after each backward"

    def __init__(self, *, steps: int = 10, **where: Unpack[Looking]) -> None:
        check(is_whole(steps, 1), "steps are a positive integer", steps)
        super().__init__(["weights", "layer_gradients", "weight_updates"], **where)
        self.steps = steps
        self.learnable: set[str] = set()  # the modules whose weight asks for gradients
        self.kept: dict[str, _Weight] = {}
        self.updated: set[str] = set()  # modules of which an update is recorded
        self.changed: set[str] = set()  # modules whose weight an update has changed

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the weights that ask for gradients."""
        for one in entries(model, "parameters"):
            module, _, name = str(one.get("name")).rpartition(".")
            if name == "weight" and one.get("requires_grad") is True:
                self.learnable.add(module)

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Compare weights of which no update is recorded with what they were; note gradients and updates."""
        of, updates, gradients = table.of("weights"), table.of("weight_updates"), table.of("layer_gradients")
        learnable = self._learnable(of)
        self.cover(table, of, learnable)
        updated = _first_rows(updates, self._learnable(updates))
        changed = _first_rows(updates, self._learnable(updates) & (updates["zeros"] < updates["count"]))
        changed = {module: row for module, row in changed.items() if module not in self.changed}
        many = len(self.changed) + np.cumsum(np.bincount([*changed.values()], minlength=len(table)))
        before = np.append(len(self.changed), many[:-1])  # when the weights of a step come
        reached = self._learnable(gradients) & (gradients["norm2"] > 0) & (many > 0)[:, None]
        for module, columns in _by_module(of).items():
            if module in self.learnable and module not in self.updated:
                rows = np.flatnonzero(learnable[:, columns].any(axis=1))
                last = updated.get(module, len(table))
                counted: Bools = np.any(reached[:, _by_module(gradients).get(module, [])], axis=1)
                cell = of, columns[0]
                yield from self._compare(module, table, cell, rows[rows <= last], counted, 2 * before)
        self.updated |= updated.keys()
        self.changed |= changed.keys()

    def _learnable(self, of: OfKind) -> Bools:
        """Where there is a message about a module that has a weight which asks for gradients."""
        return of.there & (of["count"] > 0) & of.where(lambda one: one.floating and one.series[0] in self.learnable)

    def _compare(
        self, module: str, table: Table, cell: tuple[OfKind, int], rows: Wholes, counted: Bools, twice: Wholes
    ) -> Iterator[Message]:
        """Judge a weight of which no update was recorded until the last of some rows.

        `counted`: at which steps its layer's outputs have a gradient while other weights are changed; `twice`: how many
        weights are changed, times two.
        """
        of, column = cell
        begin = 0
        for row in rows.tolist():
            kept = self.kept.get(module)
            numbers = tuple(float(of[name][row, column]) for name in ("sum", "norm2", "min", "max"))
            place = table.place(of.kind, of.columns[column].series, row)
            if kept is not None:
                kept.steps += int(counted[begin:row].sum())
            begin = row
            if kept is None or kept.numbers != numbers:  # the program may change it by itself
                self.kept[module] = _Weight(place, numbers)
            elif kept.steps >= self.steps:
                severity = Severity.WARNING if twice[row] > len(self.learnable) else Severity.NOTE
                steps = kept.steps
                found = self.judge(
                    place, True, steps, self.steps, steps, since=kept.first, severity=severity, covers=False
                )
                yield from found
        if module in self.kept:
            self.kept[module].steps += int(counted[begin:].sum())

    def evidence(self, found: Finding) -> str:
        return (
            f"it is in step {found.last:,} what it was in step {found.first:,}, though its layer had gradients at "
            f"{found.numbers['steps']:.0f} recorded steps between them"
        )


def _by_module(of: OfKind) -> dict[str, list[int]]:
    """The columns of each module."""
    found: dict[str, list[int]] = {}
    for number, column in enumerate(of.columns):
        found.setdefault(column.series[0] or "", []).append(number)
    return found


def _first_rows(of: OfKind, holds: Bools) -> dict[str, int]:
    """The first row at which something holds of each module."""
    each = {module: np.any(holds[:, columns], axis=1) for module, columns in _by_module(of).items()}
    return {module: int(rows.argmax()) for module, rows in each.items() if rows.any()}
