"""Answers as arrays with named axes, for xarray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analyze.tables.columns import Columns
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
_OF_STREAMS: Final = ("trace", "subscriber", "tag", "rank")
"""The fields of streams that become axes where they differ, besides the call and the layer."""
_FIRST: Final = ("call", 0)
_LARGE: Final = 1 << 27
"""A larger array (more than 1 GiB) is made only if answers fill at least a sixteenth of it."""


class _Kind(NamedTuple):
    """The answers of one kind: their positions, their axes, and what they have in common."""

    name: str
    chosen: NDArray[np.int64]
    axes: dict[str, list[Any]]
    shared: dict[str, Any]
    shape: tuple[int, ...]


class _All(NamedTuple):
    """All answers, as arrays."""

    columns: Columns
    stream_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    counters: dict[str, NDArray[np.int64]]

    @classmethod
    def of(cls, columns: Columns) -> _All:
        """Make it from columns."""
        counters = {name: np.array(counter, np.int64) for name, counter in columns.counters.items()}
        return cls(columns, np.array(columns.stream_ids, np.int64), np.array(columns.starts, np.int64), counters)


def words(values: Iterable[object]) -> NDArray[np.object_]:
    """Names as a coordinate. An object array, because NumPy's string arrays cut NUL characters from the ends."""
    listed = list(values)
    found = np.empty(len(listed), dtype=object)
    found[:] = listed
    return found


def dataset_of(answers: Columns, kinds: str | Iterable[str] | None = None) -> Any:
    """Answers as a dataset: see `analyze.Results.to_xarray`."""
    xr = xarray()
    there = _All.of(answers)
    chosen = _chosen(there, kinds)
    everything = np.concatenate([np.zeros(0, np.int64), *(one.chosen for one in chosen)])
    axes: dict[str, list[Any]] = {}
    for one in chosen:
        for axis, values in one.axes.items():
            axes[axis] = list(dict.fromkeys([*axes.get(axis, ()), *values]))
    coordinates: dict[str, Any] = {
        axis: (axis, np.array(sorted(values), np.int64) if isinstance(values[0], int) else words(values))
        for axis, values in axes.items()
    }
    steps = np.unique(there.counters["global_step"][everything])
    coordinates["step"] = ("step", steps, {"long_name": "global step"})
    coordinates.setdefault("layer", ("layer", words(())))
    coordinates |= _counters(there, everything, steps)
    places = {axis: {value: at for at, value in enumerate(coordinates[axis][1].tolist())} for axis in ("step", *axes)}
    variables = {
        # xarray would take a variable with the name of an axis for its coordinate
        f"{one.name}_value" if one.name in coordinates else one.name: _variable(there, one, places)
        for one in chosen
    }
    traces = {stream.trace for stream in answers.streams}
    return xr.Dataset(variables, coordinates, {"trace": traces.pop()} if len(traces) == 1 else {})


def _chosen(there: _All, kinds: str | Iterable[str] | None) -> list[_Kind]:
    """The answers with numbers, by kind.

    Raises
    ------
    UnknownNameError
        If no answer has one of the kinds.
    MessageError
        If answers of a kind have different numbers of axes.
    """
    of_kind: dict[str, list[int]] = {}
    for number, stream in enumerate(there.columns.streams):
        of_kind.setdefault(stream.kind, []).append(number)
    full = np.flatnonzero(np.diff(there.starts) > 0)
    positions = {kind: full[np.isin(there.stream_ids[full], numbers)] for kind, numbers in of_kind.items()}
    positions = {kind: at for kind, at in positions.items() if len(at)}
    wanted = list(positions) if kinds is None else [kinds] if isinstance(kinds, str) else list(dict.fromkeys(kinds))
    for kind in wanted:
        if kind not in positions:
            raise UnknownNameError.of("kind of answer", kind, positions)
    return [_kind(there, kind, positions[kind]) for kind in wanted]


def _kind(there: _All, name: str, chosen: NDArray[np.int64]) -> _Kind:
    shapes = {there.columns.shapes[at] for at in chosen.tolist()}
    if len({len(shape) for shape in shapes}) > 1:
        told = " and ".join(str(one) for one in (min(shapes, key=len), max(shapes, key=len)))
        raise MessageError(
            f"answers of {name} have shapes such as {told}, which no array has together; name other kinds, or take "
            "to_pandas, which has a row for each number"
        )
    axes: dict[str, list[Any]] = {}
    shared: dict[str, Any] = {}
    streams = [there.columns.streams[number] for number in _in_order(there.stream_ids[chosen])]
    values = {axis: list(dict.fromkeys(getattr(stream, axis) for stream in streams)) for axis in _OF_STREAMS}
    for axis, different in {**values, "call": _in_order(there.counters["call"][chosen])}.items():
        if len(different) > 1:
            axes[axis] = different
        else:
            shared[axis] = different[0]
    layers = list(dict.fromkeys(stream.place for stream in streams))
    if layers != [_NETWORK]:
        axes["layer"] = layers
    longest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    return _Kind(name, chosen, axes, shared, longest)


def _in_order(numbers: NDArray[np.int64]) -> list[int]:
    """The distinct numbers, in order of first occurrence."""
    different, first = np.unique(numbers, return_index=True)
    found: list[int] = different[np.argsort(first)].tolist()
    return found


def _variable(there: _All, one: _Kind, places: Mapping[str, Mapping[Any, int]]) -> tuple[Any, ...]:
    """The axes, the values and the attributes of the variable of a kind."""
    axes = [axis for axis in (*_OF_STREAMS, "step", "call", "layer") if axis in one.axes or axis == "step"]
    sizes = [*(len(places[axis]) for axis in axes), *one.shape]
    starts = there.starts[one.chosen]
    filled = int((there.starts[one.chosen + 1] - starts).sum())
    if math.prod(sizes) > max(_LARGE, 16 * filled):
        raise MessageError(
            f"an array of {one.name} would have {' x '.join(map(str, sizes))} numbers for {filled:,} answers; ask for "
            "fewer steps or layers, or take to_pandas"
        )
    where = tuple(_along(there, one, axis, places[axis]) for axis in axes)
    _check_apart(there, one, np.ravel_multi_index(where, sizes[: len(axes)]))
    values = np.full(sizes, np.nan)
    numbers = np.frombuffer(there.columns.values, np.float64)
    if not one.shape:
        values[where] = numbers[starts]
    else:
        for at, start, *place in zip(one.chosen.tolist(), starts.tolist(), *where, strict=True):
            shape = there.columns.shapes[at]
            inside = tuple(slice(0, size) for size in shape)
            values[(*place, *inside)] = numbers[start : start + math.prod(shape)].reshape(shape)
    return (*axes, *(f"{one.name}_axis{axis}" for axis in range(len(one.shape)))), values, _attributes(one)


def _along(there: _All, one: _Kind, axis: str, places: Mapping[Any, int]) -> NDArray[np.int64]:
    """The index of each answer on an axis."""
    if axis in ("step", "call"):
        known = np.array(list(places), np.int64)  # ascending
        return np.searchsorted(known, there.counters["global_step" if axis == "step" else "call"][one.chosen])
    field = "place" if axis == "layer" else axis
    of_stream = [places.get(getattr(stream, field), -1) for stream in there.columns.streams]
    return np.array(of_stream, np.int64)[there.stream_ids[one.chosen]]


def _check_apart(there: _All, one: _Kind, flat: NDArray[np.int64]) -> None:
    order = np.argsort(flat, kind="stable")
    twice = np.flatnonzero(np.diff(flat[order]) == 0)
    if len(twice):
        at = int(one.chosen[order[twice[0]]])
        stream = there.columns.streams[int(there.stream_ids[at])]
        raise MessageError(
            f"there are several answers of {one.name} of {stream.place or 'the network'} at step "
            f"{there.counters['global_step'][at]}, of which an array holds one; take to_pandas, which has all"
        )


def _attributes(one: _Kind) -> dict[str, Any]:
    """The fields that all answers of a kind share, the unit if known, and the meanings of statuses."""
    told: dict[str, Any] = {
        axis: value for axis, value in one.shared.items() if value != "" and (axis, value) != _FIRST
    }
    metric = one.shared.get("subscriber", "")
    if metric in UNITS and one.name.endswith((f"_{metric}", f"_{metric}_null")):
        told["units"] = UNITS[metric]
    if metric in _COMPARING and one.name.endswith(f"_{metric}_status"):
        told |= flags()
    return told


def flags() -> dict[str, Any]:
    """The meanings of similarity statuses as CF flags (climate and forecast conventions, CF 1.11, section 3.5)."""
    from analyze.metrics.similarity.datapoints import STATUSES

    return {"flag_values": list(range(len(STATUSES))), "flag_meanings": " ".join(STATUSES)}


def _counters(there: _All, chosen: NDArray[np.int64], steps: NDArray[np.int64]) -> dict[str, Any]:
    """The epoch and the train step of each step; each only if all answers of a step agree."""
    found: dict[str, Any] = {}
    place = np.searchsorted(steps, there.counters["global_step"][chosen])
    for name in ("epoch", "train_step"):
        numbers = there.counters[name][chosen]
        of_step = np.zeros(len(steps), np.int64)
        of_step[place] = numbers
        if np.array_equal(of_step[place], numbers):
            found[name] = ("step", of_step)
    return found
