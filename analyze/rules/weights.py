"""Rules about weights and their updates: too large, none at all, or not from the optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.metric import Series, series_of
from analyze.rules.finding import Finding, Place, Severity
from analyze.rules.rule import LastValues, Looking, TableRule, columns_of, entries, grown, latest, taken
from analyze.rules.tables import Bools, Floats, OfKind, Table, TableColumn, Wholes
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array
from tracer.numbers.past import Pasts, median

_FEW = 3
"""The least number of layers from which their common change is subtracted."""
_UNTOUCHED = 0.1
"""A layer of which an update leaves more than this share of the numbers unchanged is used in part."""
_LONG = 5
"""The number of steps in a row for which a ratio must be at least `high`."""


@final
class UpdateRatio(TableRule):
    r"""Updates of a layer that leave their own past, or that are as large as its weights.

    Of each layer and step it takes :math:`r = \|\Delta W\|_1 / \|W\|_1`: a sum of moduli, to which a single unit that
    learns for the first time adds little. What all layers do at once, as under a schedule of the learning rate, is
    taken off: x is log r less the median, over the layers of the step, of how far each is from its own past, where
    there are three layers or more. Parameters of one dimension, such as biases, are passed over, because they start at
    zero.

    Parameters
    ----------
    factor : float
        By how much a ratio must exceed what is usual.
    deviations : float
        By how many robust standard deviations, too.
    high : float
        The ratio that is too large by itself.
    window, warm_up : int
        How many steps the past has, and from how many on it is one.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where x exceeds its median of the last `window` steps by ``log(factor)`` and by `deviations` times their
    spread; or where r is at least `high` at 5 steps in a row, after the warm-up. The past is that of steps in a row in
    which the layer had a gradient, and in which at most a tenth of its numbers were left unchanged: an expert or a word
    that is seldom used has no usual update.
    *Needs* weights and their updates; ``weight_gradients`` if there are any.
    *Source*: A. Karpathy, "CS231n, Neural Networks Part 3", for the ratio, of which about 1e-3 is healthy; for the
    spread 1.4826 median absolute deviations, P. Rousseeuw and C. Croux, J. Am. Stat. Assoc. 88 (1993) 1273.
    """

    name = "update_ratio"
    statistics = ("norm1", "zeros", "count")
    numbers = ("usual", "alone")
    advice = "look at what changed in this step for this layer: its learning rate, its gradient, its optimizer's state"

    def __init__(
        self,
        *,
        factor: float = 5.0,
        deviations: float = 8.0,
        high: float = 0.5,
        window: int = 32,
        warm_up: int = 20,
        **where: Unpack[Looking],
    ) -> None:
        check(is_number(factor) and factor > 1, "the factor of update_ratio is a number above 1", factor)
        check(is_number(deviations) and deviations > 0, "deviations are a positive number", deviations)
        check(is_whole(warm_up, 2), "a warm-up is an integer from 2 on", warm_up)
        check(is_whole(window, warm_up), "a window is an integer, and no shorter than the warm-up", window)
        super().__init__(["weights", "weight_updates"], also=("weight_gradients",), **where)
        self.deviations, self.high, self.warm_up = deviations, high, warm_up
        self.judges = f"updates of weights over more than {warm_up} steps"
        self.least = math.log(factor)
        self.weights = LastValues(math.nan)  # by column of weights: the norm
        self.graded = LastValues(True)  # by column of gradients: whether it was not all zeros
        self.past = Pasts(window)  # by column of updates: the logarithms of ratios
        self.common = 0.0  # how far the layers have moved from their past together
        self.large: Wholes = np.zeros(0, np.int64)  # by column: steps in a row with a ratio of at least `high`

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the ratios of each step beside those before."""
        of, weights, gradients = (table.of(kind) for kind in ("weight_updates", "weights", "weight_gradients"))
        update = of["norm1"]
        there = of.there & of.where(_is_matrix)
        with np.errstate(all="ignore"):
            ratio = update / self.weights.beside(of, weights, weights["norm1"])
        graded = self.graded.beside(of, gradients, gradients["zeros"] < gradients["count"])
        left_out = there & ((of["zeros"] > _UNTOUCHED * of["count"]) | ~graded)
        usable = there & ~left_out & (ratio > 0) & (ratio < math.inf)
        logs = np.log(np.where(usable, ratio, 1.0))
        self.past.grow(len(of.columns))
        self.large = grown(self.large, len(of.columns), 0)
        judged, bad = np.zeros((2, *update.shape), np.bool_)
        bound, usual, alone = np.zeros((3, *update.shape))
        for row in range(len(table)):
            if left_out[row].any():
                self.past.forget(left_out[row])
                self.large[left_out[row]] = 0
            columns = np.flatnonzero(usable[row])
            centres = self.past.centres(columns)
            self._move(logs[row, columns] - centres)
            beside = logs[row, columns] - self.common
            warm = self.past.counts[columns] >= self.warm_up
            late, apart = columns[warm], (beside - centres)[warm]
            self.large[late] = np.where(ratio[row, late] >= self.high, self.large[late] + 1, 0)
            cells = row, late
            judged[cells], bad[cells], bound[cells] = True, self.large[late] >= _LONG, self.high
            usual[cells] = np.exp(centres[warm] + self.common)
            if (apart > self.least).any():
                far = np.maximum(self.least, self.deviations * self.past.scales(late))
                beyond = apart > far
                cells = row, late[beyond]
                bad[cells], alone[cells], bound[cells] = True, 1.0, usual[cells] * np.exp(far[beyond])
            self.past.add(columns, beside)
        self.cover(table, of, judged | (there & (update == 0)))
        yield from self.judge_all(table, of, judged, bad, ratio, bound, usual, alone, covers=False)

    def _move(self, moved: Floats) -> None:
        """Update how far all layers have moved from their past together; NaN: a layer without one."""
        moved = moved[~np.isnan(moved)]
        if len(moved) >= _FEW:
            self.common = median(moved.tolist())

    def evidence(self, found: Finding) -> str:
        usual = found.numbers["usual"]
        if found.numbers["alone"]:
            return (
                f"its update was {found.value:.2g} times its weights in step {found.worst}, {found.value / usual:.3g} "
                f"times what is usual for it, while the other layers stayed with their past"
            )
        return f"its update was {found.value:.2g} times its weights in step {found.worst}; about 0.001 is healthy"


def _is_matrix(column: TableColumn) -> bool:
    return column.axes >= 2


_FORGOTTEN, _FROZEN, _AMONG_MOST, _STOPPED, _ZERO, _UNKNOWN = range(6)
_WHY = (
    "it asks for gradients, and gets them",
    "it is frozen (requires_grad=False)",
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

    def _is_frozen(self, column: TableColumn) -> bool:
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


_COARSEST = 2.0**-8
"""The relative rounding of bfloat16, the coarsest that weights have: statistics do not tell the precision."""
_SUMMING = 1e-6
"""The error of a recorded sum, beside the sum of the moduli, with a margin of ten."""


class _WeightSums:
    """By column of weights: the sums of weights and updates of the last step, and how often they were compared.

    `total` is the sum over the elements, `moduli` that over their moduli, `rounding` by how much `total` may be off.
    """

    def __init__(self) -> None:
        self.step = -2
        self.total = self.moduli = self.rounding = np.zeros(0)
        self.moved: Bools = np.zeros(0, np.bool_)  # by an update
        self.bad: Wholes = np.zeros(0, np.int64)
        self.steps: Wholes = np.zeros(0, np.int64)

    def grow(self, size: int) -> None:
        """Make room for more columns."""
        self.total, self.moduli, self.rounding = (
            grown(one, size, np.nan) for one in (self.total, self.moduli, self.rounding)
        )
        self.moved, self.bad, self.steps = (grown(one, size, 0) for one in (self.moved, self.bad, self.steps))


@final
class ChangedBetweenSteps(TableRule):
    r"""Weights that are not what the update of the step before made of them.

    Parameters
    ----------
    share : float
        At which share of the steps a loop may change its weights itself, as clipping of weights does, before that is a
        habit, and a note instead of a warning.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where :math:`W_{t+1} \ne W_t + \Delta W_t` by more than the rounding of the sum, in two steps that were
    recorded one after the other. Of statistics, the sums over all elements are compared: a change that leaves the sum
    as it was, up to the rounding, is not seen. Weights that no update has changed are not judged: what a program writes
    there is a copy, such as a target network, of which `unchanged` tells.
    *Needs* weights and their updates, or statistics of both, at every step.
    *Source*: arithmetic.
    """

    name = "changed_between_steps"
    takes_statistics = "too"
    statistics = ("sum", "norm1")
    whole = frozenset({"weights", "weight_updates"})
    judges = "weights and their updates at consecutive steps"
    numbers = ("elements",)
    advice = "look for what writes into the parameters: a hook, a callback, an averaged or restored copy, a clamp"

    def __init__(self, *, share: float = 0.05, **where: Unpack[Looking]) -> None:
        super().__init__(["weights", "weight_updates"], **where)
        self.share = share
        self.weights: dict[Series, tuple[int, NDArray[np.float64]]] = {}
        self.after: dict[Series, tuple[int, NDArray[np.float64], NDArray[np.float64]]] = {}
        self.sums = _WeightSums()
        self.times: dict[Series, tuple[int, int]] = {}
        self.trained: set[Series] = set()

    def look_at_data(self, message: Message) -> Iterator[Message]:
        """Compare a weight with the result of the last step's update, or store the result of this step's update."""
        data = message.data
        if data is None or data.is_complex() or not data.is_floating_point():
            return
        series, x = series_of(message), as_array(data).astype(np.float64)
        if message.kind == "weight_updates":
            if x.any():
                self.trained.add(series)
            step, before = self.weights.get(series, (-1, x))
            if step == message.global_step and before.shape == x.shape:
                # the rounding of the sum and of the recorded difference, in the precision of the weights
                epsilon = float(torch.finfo(data.dtype).eps)
                with np.errstate(all="ignore"):
                    self.after[series] = step, before + x, 4 * epsilon * (np.abs(before) + np.abs(x))
            return
        self.weights[series] = message.global_step, x
        step, expected, rounding = self.after.pop(series, (-2, x, x))
        if step != message.global_step - 1 or expected.shape != x.shape:
            return
        if series not in self.trained:
            self.judged(message)
            return
        with np.errstate(all="ignore"):
            away = np.abs(x - expected)
            count = int((away > rounding).sum())
            far = float(np.linalg.norm(away)) / max(float(np.linalg.norm(expected)), 1e-300)
        times, steps = self.times.get(series, (0, 0))
        times, steps = self.times[series] = times + (count > 0), steps + 1
        habit = times > self.share * steps
        if habit and not count:
            return  # so that a habit is one finding
        yield from self.judge(message, count > 0, far, 0.0, count, severity=Severity.NOTE if habit else None)

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Compare the sum of each weight with that of the weight and its update in the step before."""
        of, updates = table.of("weights"), table.of("weight_updates")
        total, moduli = of["sum"], of["norm1"]
        columns = columns_of(updates, of)
        change, size = taken(updates["sum"], columns, np.nan), taken(updates["norm1"], columns, np.nan)
        last = self.sums
        last.grow(len(of.columns))
        after = total + change, moduli + size, _SUMMING * moduli + (_COARSEST + _SUMMING) * size
        expected, moduli_before, rounding = (
            np.concatenate([before[None], one])
            for before, one in zip((last.total, last.moduli, last.rounding), after, strict=True)
        )
        in_a_row = np.append(table.steps[0] == last.step + 1, table.steps[1:] == table.steps[:-1] + 1)[:, None]
        last.step, last.total, last.moduli, last.rounding = (
            int(table.steps[-1]),
            expected[-1],
            moduli_before[-1],
            rounding[-1],
        )
        ever = np.logical_or.accumulate(np.concatenate([last.moved[None], size > 0]), axis=0)
        with np.errstate(all="ignore"):
            away = np.abs(total - expected[:-1])
            compared = in_a_row & of.there & of.where(lambda column: column.floating) & np.isfinite(away + moduli)
            far = away / np.maximum(moduli_before[:-1], 1e-300)
        trained = compared & ever[:-1]
        bad = trained & (away > rounding[:-1] + _SUMMING * moduli)
        times, steps = (
            np.cumsum(np.concatenate([before[None], now]), axis=0)
            for before, now in ((last.bad, bad), (last.steps, trained))
        )
        last.moved, last.bad, last.steps = ever[-1], times[-1], steps[-1]
        habit = times[1:] > self.share * steps[1:]
        judged = trained & ~(habit & ~bad)  # so that a habit is one finding
        self.cover(table, of, judged | (compared & ~trained))
        severity = np.where(habit, Severity.NOTE, self.severity)
        yield from self.judge_all(table, of, judged, bad, far, 0.0, 0.0, severity=severity, covers=False)

    def evidence(self, found: Finding) -> str:
        elements, between = found.numbers["elements"], f"the update of step {found.worst - 1} and step {found.worst}"
        if not elements:
            return f"its sum changed between {between}, by {found.value:.1e} of the sum of the moduli"
        return f"{elements:,.0f} of its numbers changed between {between}, by {found.value:.1e} of its norm"
