"""Answers as arrays with named axes, for xarray."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analyze.tables.columns import Columns, Stream
from analyze.tables.writing import not_installed
from tracer.errors import MessageError, UnknownNameError

UNITS: Final = {
    **dict.fromkeys(("cca", "cka", "pwcca", "r2_cca", "svcca"), "1"),
    **dict.fromkeys(("condition_number", "effective_rank", "participation_ratio", "saturation", "stable_rank"), "1"),
    **dict.fromkeys(("activation_rate", "alpha", "churn", "descent_cosine", "ratio"), "1"),
    "angular": "rad",
}
"""The units of the answers of metrics that have the same whatever was recorded; 1 where there is none."""
_COMPARING: Final = ("angular", "cca", "cka", "procrustes", "pwcca", "r2_cca", "svcca")
"""The metrics whose statuses are those of similarities."""
_NETWORK: Final = ""
"""Where the network's own answers stand, as in the column ``module``."""
_FIRST: Final = ("call", 0)
_LARGE: Final = 1 << 27
"""Arrays of more numbers than this (1 GiB) are made only where answers fill at least a sixteenth of them."""


class _Kind(NamedTuple):
    """The answers of one kind: their positions in the columns, and the axes that tell them apart."""

    name: str
    positions: list[int]
    axes: dict[str, list[Any]]
    shared: dict[str, Any]
    shape: tuple[int, ...]


def xarray() -> Any:
    """The package.

    Raises
    ------
    TracerError
        If it is not installed.
    """
    try:
        import xarray
    except ImportError as error:
        raise not_installed("arrays with named axes", "xarray", "xarray") from error
    return xarray


def words(values: Iterable[object]) -> NDArray[np.object_]:
    """Names as a coordinate, each as it is: an array of NumPy's own texts would cut zeros from their ends."""
    listed = list(values)
    found = np.empty(len(listed), dtype=object)
    found[:] = listed
    return found


def dataset_of(answers: Columns, kinds: str | Iterable[str] | None = None) -> Any:
    """Answers as a dataset: see `analyze.Results.to_xarray`."""
    xr = xarray()
    chosen = _chosen(answers, kinds)
    steps = np.unique(np.array([answers.counters["global_step"][at] for one in chosen for at in one.positions], int))
    axes: dict[str, list[Any]] = {}
    for one in chosen:
        for axis, values in one.axes.items():
            axes[axis] = list(dict.fromkeys([*axes.get(axis, ()), *values]))
    coordinates: dict[str, Any] = {
        axis: (axis, np.array(sorted(values), int) if isinstance(values[0], int) else words(values))
        for axis, values in axes.items()
    }
    coordinates["step"] = ("step", steps, {"long_name": "global step"})
    coordinates.setdefault("layer", ("layer", words(())))
    coordinates |= _counters(answers, [at for one in chosen for at in one.positions], steps)
    places = {axis: {value: at for at, value in enumerate(coordinates[axis][1])} for axis in ("step", *axes)}
    variables = {
        # a variable of the name of an axis would be taken for its coordinate
        f"{one.name}_value" if one.name in coordinates else one.name: _variable(answers, one, places)
        for one in chosen
    }
    traces = {stream.trace for stream in answers.streams}
    return xr.Dataset(variables, coordinates, {"trace": traces.pop()} if len(traces) == 1 else {})


def _chosen(answers: Columns, kinds: str | Iterable[str] | None) -> list[_Kind]:
    """The answers that have numbers, by kind.

    Raises
    ------
    UnknownNameError
        If there is none of a kind.
    MessageError
        If answers of a kind have different numbers of axes.
    """
    positions: dict[str, list[int]] = {}
    for at, number in enumerate(answers.stream_ids):
        if answers.starts[at] < answers.starts[at + 1]:
            positions.setdefault(answers.streams[number].kind, []).append(at)
    wanted: Collection[str] = positions if kinds is None else [kinds] if isinstance(kinds, str) else list(kinds)
    for kind in wanted:
        if kind not in positions:
            raise UnknownNameError.of("kind of answer", kind, positions)
    return [_kind(answers, kind, positions[kind]) for kind in dict.fromkeys(wanted)]


def _kind(answers: Columns, name: str, positions: list[int]) -> _Kind:
    shapes = {answers.shapes[at] for at in positions}
    if len({len(shape) for shape in shapes}) > 1:
        told = " and ".join(str(one) for one in sorted(shapes, key=len)[:: max(1, len(shapes) - 1)])
        raise MessageError(
            f"answers of {name} have shapes such as {told}, which no array has together; name other kinds, or take "
            "to_pandas, which has a row for each number"
        )
    of = [answers.streams[answers.stream_ids[at]] for at in positions]
    told_apart: dict[str, list[Any]] = {
        "trace": [stream.trace for stream in of],
        "subscriber": [stream.subscriber for stream in of],
        "tag": [stream.tag for stream in of],
        "rank": [stream.rank for stream in of],
        "call": [answers.counters["call"][at] for at in positions],
    }
    axes: dict[str, list[Any]] = {}
    shared: dict[str, Any] = {}
    for axis, values in told_apart.items():
        different = list(dict.fromkeys(values))
        if len(different) > 1:
            axes[axis] = different
        else:
            shared[axis] = different[0]
    layers = list(dict.fromkeys(stream.place for stream in of))
    if layers != [_NETWORK]:
        axes["layer"] = layers
    longest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    return _Kind(name, positions, axes, shared, longest)


def _variable(answers: Columns, one: _Kind, places: dict[str, dict[Any, int]]) -> tuple[Any, ...]:
    """The axes, the numbers and the attributes of a kind."""
    before = [axis for axis in one.axes if axis not in ("call", "layer")]
    axes = [*before, "step", *(axis for axis in ("call", "layer") if axis in one.axes)]
    sizes = [*(len(places[axis]) for axis in axes), *one.shape]
    count = int(np.prod(sizes, dtype=object))
    filled = sum(answers.starts[at + 1] - answers.starts[at] for at in one.positions)
    if count > max(_LARGE, 16 * filled):
        raise MessageError(
            f"an array of {one.name} would have {' x '.join(map(str, sizes))} numbers for {filled:,} answers; ask for "
            "fewer steps or layers, or take to_pandas"
        )
    where = [_place(answers, at, axes, places) for at in one.positions]
    _check_apart(answers, one, where)
    values = np.full(sizes, np.nan)
    if not one.shape:
        index = tuple(np.array(where, int).T)
        values[index] = [answers.values[answers.starts[at]] for at in one.positions]
    else:
        for at, place in zip(one.positions, where, strict=True):
            inside = tuple(slice(0, size) for size in answers.shapes[at])
            values[place + inside] = np.array(answers.numbers(at)).reshape(answers.shapes[at])
    return (*axes, *(f"{one.name}_axis{axis}" for axis in range(len(one.shape)))), values, _attributes(one)


def _place(answers: Columns, at: int, axes: Sequence[str], places: dict[str, dict[Any, int]]) -> tuple[int, ...]:
    """Where an answer stands in the array of its kind."""
    stream: Stream = answers.streams[answers.stream_ids[at]]
    found: dict[str, Any] = {
        "trace": stream.trace,
        "subscriber": stream.subscriber,
        "tag": stream.tag,
        "rank": stream.rank,
        "step": answers.counters["global_step"][at],
        "call": answers.counters["call"][at],
        "layer": stream.place,
    }
    return tuple(places[axis][found[axis]] for axis in axes)


def _check_apart(answers: Columns, one: _Kind, where: Sequence[tuple[int, ...]]) -> None:
    if len(set(where)) == len(where):
        return
    ordered = sorted(zip(where, one.positions, strict=True))
    at = next(later[1] for earlier, later in itertools.pairwise(ordered) if earlier[0] == later[0])
    stream = answers.streams[answers.stream_ids[at]]
    raise MessageError(
        f"there are several answers of {one.name} of {stream.place or 'the network'} at step "
        f"{answers.counters['global_step'][at]}, of which an array holds one; take to_pandas, which has all"
    )


def _attributes(one: _Kind) -> dict[str, Any]:
    """What all answers of a kind have in common, their unit where it is known, and what statuses mean."""
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
    """What the statuses of similarities mean, as in the conventions for climate and forecast metadata, CF 1.11, 3.5."""
    from analyze.metrics.similarity.bases import STATUSES

    return {"flag_values": list(range(len(STATUSES))), "flag_meanings": " ".join(STATUSES)}


def _counters(answers: Columns, positions: Sequence[int], steps: NDArray[np.int64]) -> dict[str, Any]:
    """The epoch of each step, and its number in it; not where runs differ in them."""
    found: dict[str, Any] = {}
    global_steps = answers.counters["global_step"]
    for name in ("epoch", "train_step"):
        of_step: dict[int, set[int]] = {}
        for at in positions:
            of_step.setdefault(global_steps[at], set()).add(answers.counters[name][at])
        if all(len(values) == 1 for values in of_step.values()):
            found[name] = ("step", np.array([min(of_step[int(step)]) for step in steps], int))
    return found
