"""Tensors of nothing but zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack, final

from analyze.rules.finding import Finding
from analyze.rules.rule import Looking
from analyze.rules.table_rule import TableRule
from analyze.rules.tables import Table
from tracer.messaging.messages import Message


@final
class AllZeros(TableRule):
    """Outputs, or gradients of weights, of which every number is zero.

    Parameters
    ----------
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where all numbers are zero at `patience` steps in a row. Gradients of a second backward are not judged.
    *Needs* activations, ``layer_gradients`` or ``weight_gradients``.
    *Source*: smdebug's ``AllZero``.
    """

    name = "all_zeros"
    statistics = ("zeros", "count")
    judges = "activations or gradients"
    advice = "look at whether the loss depends on this module, and at whether the layers before and after it are dead"

    def __init__(self, *, patience: int = 5, **where: Unpack[Looking]) -> None:
        super().__init__([("activations", "layer_gradients", "weight_gradients")], patience=patience, **where)

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the numbers of zeros."""
        for of in table:
            # a gradient of a gradient may be zero without a fault
            first = of.where(lambda column: column.floating and "backward." not in column.series[2])
            count = of["count"]
            yield from self.judge_all(table, of, first & (count >= 2), of["zeros"] == count, 1.0, 1.0)

    def evidence(self, found: Finding) -> str:
        return f"all its numbers were zero at {found.steps} recorded steps"
