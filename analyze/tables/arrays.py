"""Answers as arrays with named axes, for xarray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from analyze.tables.columns import AnswerColumns
from analyze.tables.writing import xarray
from tracer.errors import MessageError, UnknownNameError

UNITS: Final = {
    **dict.fromkeys(("cca", "cka", "pwcca", "r2_cca", "svcca"), "1"),
    **dict.fromkeys(("condition_number", "effective_rank", "participation_ratio", "saturation", "stable_rank"), "1"),
    **dict.fromkeys(("activation_rate", "alpha", "churn", "descent_cosine", "ratio"), "1"),
    "angular": "rad",
}
"""Metric → the unit of its answers, where the unit does not depend on what was recorded; "1": dimensionless."""
_COMPARING: Final = ("angular", "cca", "cka", "procrustes", "pwcca", "r2_cca", "svcca")
"""The metrics whose statuses are those of similarities."""
_NETWORK: Final = ""
"""The label of the network's own answers, as in the column ``module``."""
_FIELDS: Final[tuple[str, ...]] = ("trace", "subscriber", "tag", "rank", "call")
"""The fields of answers that become axes where they differ, besides the layer."""
_AXES: Final[tuple[str, ...]] = ("trace", "subscriber", "tag", "rank", "step", "call", "layer")
_FIRST: Final = ("call", 0)
_LARGE: Final = 1 << 27
"""A larger array (more than 1 GiB) is made only if answers fill at least a sixteenth of it."""
_Fields = dict[str, NDArray[Any]]
"""The fields of some answers: an array of each, with an entry for each answer."""


def words(values: Iterable[object]) -> NDArray[np.object_]:
    """Names as a coordinate. An object array, because NumPy's string arrays cut NUL characters from the ends."""
    listed = list(values)
    found = np.empty(len(listed), dtype=object)
    found[:] = listed
    return found


def dataset_of(answers: AnswerColumns, kinds: str | Iterable[str] | None = None) -> Any:
    """Answers as a dataset: see `analyze.Results.to_xarray`."""
    xr = xarray()
    there = _fields(answers)
    chosen = {
        kind: {name: values[at] for name, values in there.items()} for kind, at in _positions(there, kinds).items()
    }
    differing = {kind: _differing(of) for kind, of in chosen.items()}
    axes: dict[str, list[Any]] = {}
    for of_kind in differing.values():
        for axis, values in of_kind.items():
            axes[axis] = list(dict.fromkeys([*axes.get(axis, ()), *values]))
    coordinates: dict[str, Any] = {
        axis: (axis, np.array(sorted(values), np.int64) if isinstance(values[0], int) else words(values))
        for axis, values in axes.items()
    }
    together = {
        name: np.concatenate([values[:0], *(of[name] for of in chosen.values())]) for name, values in there.items()
    }
    steps = np.unique(together["step"])
    coordinates["step"] = ("step", steps, {"long_name": "global step"})
    coordinates.setdefault("layer", ("layer", words(())))
    coordinates |= _counters(together, steps)
    variables = {}
    for kind, of in chosen.items():
        places = {axis: coordinates[axis][1].tolist() for axis in _AXES if axis in differing[kind] or axis == "step"}
        # xarray would take a variable with the name of an axis for its coordinate
        name = f"{kind}_value" if kind in coordinates else kind
        variables[name] = _variable(answers, kind, of, places)
    traces = {stream.trace for stream in answers.streams}
    return xr.Dataset(variables, coordinates, {"trace": traces.pop()} if len(traces) == 1 else {})


def _fields(answers: AnswerColumns) -> _Fields:
    """The fields of all answers, their positions, and how many numbers each has."""
    ids = np.array(answers.stream_ids, np.int64)
    of_streams = {name: name for name in ("kind", *_FIELDS[:-1])} | {"layer": "place"}
    found: _Fields = {
        name: words(getattr(one, field) for one in answers.streams)[ids] for name, field in of_streams.items()
    }
    counters = {name: np.array(counter, np.int64) for name, counter in answers.counters.items()}
    found |= counters | {"step": counters["global_step"], "at": np.arange(len(ids))}
    starts = np.array(answers.starts, np.int64)
    return found | {"start": starts[:-1], "size": np.diff(starts)}


def _positions(there: _Fields, kinds: str | Iterable[str] | None) -> dict[str, NDArray[np.int64]]:
    """The positions of the answers with numbers, by kind.

    Raises
    ------
    UnknownNameError
        If no answer has one of the kinds.
    """
    full = np.flatnonzero(there["size"] > 0)
    found = {kind: full[there["kind"][full] == kind] for kind in dict.fromkeys(there["kind"].tolist())}
    found = {kind: at for kind, at in found.items() if len(at)}
    wanted = list(found) if kinds is None else [kinds] if isinstance(kinds, str) else list(dict.fromkeys(kinds))
    for kind in wanted:
        if kind not in found:
            raise UnknownNameError.of("kind of answer", kind, found)
    return {kind: found[kind] for kind in wanted}


def _differing(of: _Fields) -> dict[str, list[Any]]:
    """The axes that the answers of a kind have besides the step, with their values in the order of the answers."""
    found = {axis: list(dict.fromkeys(of[axis].tolist())) for axis in (*_FIELDS, "layer")}
    return {axis: values for axis, values in found.items() if (values != [""] if axis == "layer" else len(values) > 1)}


def _variable(answers: AnswerColumns, kind: str, of: _Fields, places: Mapping[str, list[Any]]) -> tuple[Any, ...]:
    """The axes, the values and the attributes of the variable of a kind; `places`: the values along each axis.

    Raises
    ------
    MessageError
        If the answers have different numbers of axes, if several have the same place, or if most of it were empty.
    """
    shapes = [answers.shapes[at] for at in of["at"].tolist()]
    if len(set(map(len, shapes))) > 1:
        told = " and ".join(str(one) for one in (min(shapes, key=len), max(shapes, key=len)))
        raise MessageError(
            f"answers of {kind} have shapes such as {told}, which no array has together; name other kinds, or take "
            "to_pandas, which has a row for each number"
        )
    longest = [max(sizes) for sizes in zip(*set(shapes), strict=True)]
    sizes, filled = [*map(len, places.values()), *longest], int(of["size"].sum())
    if math.prod(sizes) > max(_LARGE, 16 * filled):
        raise MessageError(
            f"an array of {kind} would have {' x '.join(map(str, sizes))} numbers for {filled:,} answers; ask for "
            "fewer steps or layers, or take to_pandas"
        )
    where = []
    for axis, along in places.items():
        place = {value: at for at, value in enumerate(along)}
        where.append(np.array([place[value] for value in of[axis].tolist()], np.int64))
    _check_apart(kind, of, np.ravel_multi_index(where, sizes[: len(places)]))
    values = np.full(sizes, np.nan)
    if not longest:
        values[tuple(where)] = np.array(answers.values)[of["start"]]
    for at, shape, *index in zip(of["at"].tolist(), shapes, *where, strict=True) if longest else ():
        inside = tuple(slice(0, size) for size in shape)
        values[(*index, *inside)] = np.array(answers.numbers(at)).reshape(shape)
    return (*places, *(f"{kind}_axis{axis}" for axis in range(len(longest)))), values, _attributes(kind, of, places)


def _check_apart(kind: str, of: _Fields, flat: NDArray[np.int64]) -> None:
    """Raise `MessageError` if two answers have the same place."""
    different, first, counts = np.unique(flat, return_index=True, return_counts=True)
    if len(different) < len(flat):
        at = int(first[counts > 1][0])
        raise MessageError(
            f"there are several answers of {kind} of {of['layer'][at] or 'the network'} at step {of['step'][at]}, of "
            "which an array holds one; take to_pandas, which has all"
        )


def _attributes(kind: str, of: _Fields, places: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The fields that all answers of a kind share, the unit if known, and the meanings of statuses."""
    shared = {axis: of[axis].tolist()[0] for axis in _FIELDS if axis not in places}
    told: dict[str, Any] = {axis: value for axis, value in shared.items() if value != "" and (axis, value) != _FIRST}
    metric = shared.get("subscriber", "")
    if metric in UNITS and kind.endswith((f"_{metric}", f"_{metric}_null")):
        told["units"] = UNITS[metric]
    if metric in _COMPARING and kind.endswith(f"_{metric}_status"):
        told |= flags()
    return told


def flags() -> dict[str, Any]:
    """The meanings of similarity statuses as CF flags (climate and forecast conventions, CF 1.11, section 3.5)."""
    from analyze.metrics.similarity.datapoints import STATUSES

    return {"flag_values": list(range(len(STATUSES))), "flag_meanings": " ".join(STATUSES)}


def _counters(of: _Fields, steps: NDArray[np.int64]) -> dict[str, Any]:
    """The epoch and the train step of each step; each only if all answers of a step agree."""
    found: dict[str, Any] = {}
    place = np.searchsorted(steps, of["step"])
    for name in ("epoch", "train_step"):
        of_step = np.zeros(len(steps), np.int64)
        of_step[place] = of[name]
        if np.array_equal(of_step[place], of[name]):
            found[name] = ("step", of_step)
    return found
