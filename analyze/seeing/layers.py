"""The table of layers, the most anomalous first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analyze.rules.finding import Finding
from analyze.seeing.course import Course
from analyze.seeing.gathered import BAD, DEAD, GRADIENT, RATIO, Gathered, layer_of
from analyze.seeing.words import times

FAR = 3.0
"""A ratio this many powers of two away from its past is anomalous."""
SETTLED = 20
"""How many values a ratio needs before one can be anomalous, as in the rules."""
LAST = 10
"""A unit counts as dead if it was silent in this many last batches."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A row of the table; None for what was not recorded.

    Attributes
    ----------
    name : str
    place : int
        Index in recorded order.
    odd : int or None
        The first step of an anomaly; `why` names it.
    why : str
    severity : int
        Severity of the worst finding about the layer; 0 without a finding.
    ratio, ratio_step
        The greatest update/weight ratio, and its step.
    away, away_step
        The greatest distance of the ratio from its past, up or down, in powers of two, and its step; 0 and None if the
        ratio has no past.
    dead : float or None
        The smallest share of silent units in the last batches.
    gradient : float or None
        The greatest norm of the gradient of the weights.
    bad : int
        How many values were not finite.
    """

    name: str
    place: int
    odd: int | None
    why: str
    severity: int
    ratio: float | None
    ratio_step: int | None
    away: float
    away_step: int | None
    dead: float | None
    gradient: float | None
    bad: int


def layers(found: Gathered) -> list[Layer]:
    """One row per known layer, the most anomalous first.

    Layers with findings come first, by severity and then by step; then the layers whose update/weight ratio went
    farthest from its own past.
    """
    findings: dict[str, list[Finding]] = {}
    for one in found.checked.findings:
        layer = layer_of(one.module, one.leaf)
        if layer is not None:
            findings.setdefault(layer, []).append(one)
    ratios, deads, gradients = (found.of(what) for what in (RATIO, DEAD, GRADIENT))
    bad: dict[str, int] = {}
    for key, course in found.courses.items():
        if key.what == BAD and key.layer is not None:
            bad[key.layer] = bad.get(key.layer, 0) + int(course.points()[1].sum())
    names = dict.fromkeys([*found.layers, *findings])
    rows = [
        _layer(name, place, findings.get(name, ()), ratios.get(name), deads.get(name), gradients.get(name), bad)
        for place, name in enumerate(names)
    ]
    return sorted(rows, key=_anomaly)


def _layer(
    name: str,
    place: int,
    findings: Sequence[Finding],
    ratio: Course | None,
    dead: Course | None,
    gradient: Course | None,
    bad: dict[str, int],
) -> Layer:
    odd, why, away, away_step = None, "", 0.0, None
    highest = highest_step = None
    if ratio is not None:
        steps, values, shifts = ratio.points()
        highest, highest_step = _greatest(steps, values)
        settled = np.flatnonzero(np.isfinite(shifts[SETTLED:])) + SETTLED
        sizes = np.abs(shifts[settled])
        if len(sizes):
            at = settled[np.argmax(sizes)]
            away, away_step = float(shifts[at]), int(steps[at])
        far = settled[sizes >= FAR]
        if len(far):
            odd, why = int(steps[far[0]]), f"ratio {times(float(shifts[far[0]]))} its past"
    worst = max(findings, key=lambda one: (one.severity, -one.first), default=None)
    if worst is not None:
        first = min(findings, key=lambda one: one.first)
        odd, why = first.first, first.rule if not first.rank else f"{first.rule} (rank {first.rank})"
    return Layer(
        name=name,
        place=place,
        odd=odd,
        why=why,
        severity=0 if worst is None else int(worst.severity),
        ratio=highest,
        ratio_step=highest_step,
        away=away,
        away_step=away_step,
        dead=None if dead is None else float(dead.points()[1][-LAST:].min()),
        gradient=None if gradient is None else _greatest(*gradient.points()[:2])[0],
        bad=bad.get(name, 0),
    )


def _greatest(steps: np.ndarray, values: np.ndarray) -> tuple[float, int]:
    """The greatest value and its step; a non-finite value counts as the greatest."""
    at = int(np.argmax(np.where(np.isfinite(values), values, np.inf)))
    return float(values[at]), int(steps[at])


def _anomaly(layer: Layer) -> tuple[float, ...]:
    first = layer.odd if layer.severity and layer.odd is not None else math.inf
    return -layer.severity, first, -abs(layer.away), layer.place
