"""Answers as arrays with named axes, for xarray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from analyze.tables.columns import AnswerColumns
from analyze.tables.writing import pandas, xarray
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


def words(values: Iterable[object]) -> NDArray[np.object_]:
    """Names as a coordinate. An object array, because NumPy's string arrays cut NUL characters from the ends."""
    listed = list(values)
    found = np.empty(len(listed), dtype=object)
    found[:] = listed
    return found


def dataset_of(answers: AnswerColumns, kinds: str | Iterable[str] | None = None) -> Any:
    """Answers as a dataset: see `analyze.Results.to_xarray`."""
    xr = xarray()
    frames = _by_kind(answers, kinds)
    axes = {kind: _differing(frame) for kind, frame in frames.items()}
    coordinates: dict[str, Any] = {}
    for axis in _AXES:
        values = list(
            dict.fromkeys(value for kind, frame in frames.items() if axis in axes[kind] for value in frame[axis])
        )
        if axis != "step" and (values or axis == "layer"):
            is_number = axis in ("rank", "call")
            coordinates[axis] = (axis, np.array(sorted(values), np.int64) if is_number else words(values))
    # a variable with NaN at the steps of others would be a line with holes
    steps = {kind: tuple(sorted(set(frame["step"]))) for kind, frame in frames.items()}
    most = Counter(steps.values()).most_common(1)
    shared = most[0][0] if most else ()
    axis_of: dict[tuple[int, ...], str] = {shared: "step"}
    step_of = {kind: axis_of.setdefault(own, f"step_{kind}") for kind, own in steps.items()}
    for axis in {"step": None, **dict.fromkeys(step_of.values())}:
        these = [frame for kind, frame in frames.items() if step_of[kind] == axis]
        at = np.array(sorted({step for frame in these for step in frame["step"]}), np.int64)
        coordinates[axis] = (axis, at, {"long_name": "global step"})
        for name in ("epoch", "train_step"):
            pairs = {pair for frame in these for pair in zip(frame["step"], frame[name], strict=True)}
            if len(pairs) == len(at):  # all answers of a step agree
                called = name if axis == "step" else f"{name}{axis.removeprefix('step')}"
                coordinates[called] = (axis, np.array([value for _, value in sorted(pairs)], np.int64))
    variables = {}
    for kind, frame in frames.items():
        # xarray would take a variable with the name of an axis for its coordinate
        name = f"{kind}_value" if kind in coordinates else kind
        along = {axis: coordinates[step_of[kind] if axis == "step" else axis][1] for axis in axes[kind]}
        dims, *rest = _variable(answers, kind, frame, along)
        variables[name] = ([step_of[kind] if axis == "step" else axis for axis in dims], *rest)
    traces = {stream.trace for stream in answers.streams}
    return xr.Dataset(variables, coordinates, {"trace": traces.pop()} if len(traces) == 1 else {})


def _by_kind(answers: AnswerColumns, kinds: str | Iterable[str] | None) -> dict[str, Any]:
    """For each kind, a `pandas.DataFrame` of its answers with numbers: their fields, position, and number of numbers.

    Raises
    ------
    UnknownNameError
        If no answer has one of the kinds.
    """
    names = ["kind", *_FIELDS[:-1], "layer"]
    told = [(one.kind, one.trace, one.subscriber, one.tag, one.rank, one.place) for one in answers.streams]
    frame = pandas().DataFrame(told, columns=names).iloc[list(answers.stream_ids)].reset_index(drop=True)
    frame = frame.assign(**{name: np.array(counter, np.int64) for name, counter in answers.counters.items()})
    frame = frame.rename(columns={"global_step": "step"}).assign(size=np.diff(np.array(answers.starts, np.int64)))
    found = dict(tuple(frame[frame["size"] > 0].groupby("kind", sort=False)))
    wanted = list(found) if kinds is None else [kinds] if isinstance(kinds, str) else list(dict.fromkeys(kinds))
    for kind in wanted:
        if kind not in found:
            raise UnknownNameError.of("kind of answer", kind, found)
    return {kind: found[kind] for kind in wanted}


def _differing(frame: Any) -> list[str]:
    """The axes of the answers of a kind: the step, the layer unless only the network answers, and what differs."""
    count = frame.nunique()
    has_layers = count["layer"] > 1 or frame["layer"].iloc[0] != _NETWORK
    return [axis for axis in _AXES if axis == "step" or (has_layers if axis == "layer" else count[axis] > 1)]


def _variable(answers: AnswerColumns, kind: str, frame: Any, along: Mapping[str, NDArray[Any]]) -> tuple[Any, ...]:
    """The axes, the values and the attributes of the variable of a kind; `along`: the coordinates of each axis.

    Raises
    ------
    MessageError
        If the answers have different numbers of axes, if several have the same place, or if most of it were empty.
    """
    shapes = [answers.shapes[at] for at in frame.index]
    if len(set(map(len, shapes))) > 1:
        told = " and ".join(str(one) for one in (min(shapes, key=len), max(shapes, key=len)))
        raise MessageError(
            f"answers of {kind} have shapes such as {told}, which no array has together; name other kinds, or take "
            "to_pandas, which has a row for each number"
        )
    longest = [max(sizes) for sizes in zip(*set(shapes), strict=True)]
    sizes, filled = [*map(len, along.values()), *longest], int(frame["size"].sum())
    if math.prod(sizes) > max(_LARGE, 16 * filled):
        raise MessageError(
            f"an array of {kind} would have {' x '.join(map(str, sizes))} numbers for {filled:,} answers; ask for "
            "fewer steps or layers, or take to_pandas"
        )
    again = frame[frame.duplicated(list(along))]
    if len(again):
        raise MessageError(
            f"there are several answers of {kind} of {again['layer'].iloc[0] or 'the network'} at step "
            f"{again['step'].iloc[0]}, of which an array holds one; take to_pandas, which has all"
        )
    where = [pandas().Index(values).get_indexer(frame[axis]) for axis, values in along.items()]
    values = np.full(sizes, np.nan)
    if not longest:
        values[tuple(where)] = np.array(answers.values)[np.array(answers.starts)[frame.index]]
    for at, shape, *index in zip(frame.index, shapes, *where, strict=True) if longest else ():
        values[(*index, *map(slice, shape))] = np.array(answers.numbers(at)).reshape(shape)
    dims = [*along, *(f"{kind}_axis{axis}" for axis in range(len(longest)))]
    return dims, values, _attributes(kind, frame, along)


def _attributes(kind: str, frame: Any, along: Iterable[str]) -> dict[str, Any]:
    """The fields that all answers of a kind share, the unit if known, and the meanings of statuses."""
    shared = {axis: frame[axis].tolist()[0] for axis in _FIELDS if axis not in along}
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
