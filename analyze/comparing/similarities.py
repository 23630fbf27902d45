"""Compares the layers of two recorded runs step by step; and holds the similarity of each pair of many layers."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.comparing.matching import both_ranks, none_in_both
from analyze.metrics.similarity.datapoints import STATUSES, Status
from analyze.metrics.similarity.similarity import Origin, Similarity
from analyze.registry import instances
from analyze.tables.arrays import flags, words
from analyze.tables.plotting import Matrix, matrices_of
from analyze.tables.results import Results
from analyze.tables.writing import pandas, xarray
from tracer.errors import CaptureError, MessageError
from tracer.messaging.messages import Message
from tracer.messaging.subscriber import unmet
from tracer.replaying.filters import Audience
from tracer.replaying.wanted import opened
from tracer.shown import table
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.rerun import rerun_of
from tracer.trace.streams import Steps, StreamInfo


def compare(
    one: Anywhere | TraceReader,
    other: Anywhere | TraceReader,
    subscribers: str | Similarity | Iterable[str | Similarity] = "svcca",
    *,
    steps: Steps | None = None,
) -> Results:
    """The similarity of each layer of a run to the same layer of another run, at each common step.

    Parameters
    ----------
    one, other : path, URL or TraceReader
        Two traces with activations of the same datapoints in the same order, such as those of a probe.
    subscribers : str or subscriber, or several
        The similarities, with their kind, tag and modules: ``"svcca:threshold=0.9"``. Their `against` is ignored,
        because each layer is compared with the same layer of the other run.
    steps : (start, stop) or (start, stop, stride), optional
        The global steps to compare; by default all.

    Returns
    -------
    Results
        A row for each number, at each common step, module, call and leaf; the trace is called ``one|other``. If the
        runs have several ranks, each common rank is compared.

    Raises
    ------
    CaptureError
        If a trace lacks what a subscriber takes, if the labels or the sampling of the traces differ, so that their
        datapoints differ, or if the traces have no step of a layer in common.
    MessageError
        If a subscriber does not compare layers.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> paths = [tempfile.mkdtemp() + "/run.zarr" for _ in range(2)]
    >>> for number, path in enumerate(paths):
    ...     with tracer.TraceWriter(path) as writer:
    ...         for step in range(2):
    ...             where = dict(global_step=step, train_step=step, epoch=0, tag="probe")
    ...             x = torch.linspace(0, 1, 60).reshape(20, 3) ** (step * number + 1)
    ...             writer.write(tracer.ModuleMessage(kind="activations", module="fc", data=x, **where))
    >>> found = compare(*paths, "svcca:details=false")
    >>> [(row.kind, row.module, row.global_step, round(row.value, 6)) for row in found]
    [('activations_svcca', 'fc', 0, 1.0), ('activations_svcca', 'fc', 1, 0.967569)]
    """
    asked = instances(subscribers)
    for measure in asked:
        if not isinstance(measure, Similarity):
            raise MessageError(f"compare compares layers, and {type(measure).__name__} does not")
    results = Results()
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(opened(trace, None)) for trace in (one, other))
        for measure in asked:
            sink = results.sink([measure], f"{first.path}|{second.path}")
            met = 0
            for a, b in _ranks(first, second, measure):
                with aligned([first.of_rank(a), second.of_rank(b)], measure) as (mine, theirs):
                    for x, y in _matched(observed(mine, measure, steps), observed(theirs, measure, steps)):
                        found = measure.compare(measure.represent(x.data), measure.represent(y.data))
                        for answer in measure.answers(Origin.of(x), found):
                            sink.receive(answer)
                        met += 1
            if not met:
                raise CaptureError(f"{first.path} and {second.path} have no step of a layer in common")
    return results


def _ranks(one: TraceReader, other: TraceReader, measure: Similarity) -> list[tuple[int, int]]:
    """The pairs of ranks that are compared.

    If no rank of a trace has all that the subscriber needs, the first rank is taken, so that `aligned` raises an error
    that says what is missing.

    Raises
    ------
    CaptureError
        If there are no two ranks to compare.
    """
    having = [
        [rank for rank in reader.ranks if not _lacking(reader.of_rank(rank), measure)] or reader.ranks[:1]
        for reader in (one, other)
    ]
    both = both_ranks(*having)
    if not both:
        why = none_in_both(one.path, having[0], other.path, having[1])
        raise CaptureError(f"{why}; compare TraceReader(path).of_rank(number) of each")
    return both


def _lacking(reader: TraceReader, measure: Similarity) -> list[str]:
    """Sentences about what a subscriber needs and a trace lacks."""
    offered = [(stream.kind, stream.module, stream.tag) for stream in reader.streams]
    return unmet([measure], offered, str(reader.path), rerun_of(reader))


def observed(reader: TraceReader, measure: Similarity, steps: Steps | None) -> Iterator[Message]:
    """The messages of a trace that a subscriber takes, reduced to the data that it keeps."""
    subscription = measure.subscriptions[0]
    chosen = _taken(reader, measure)
    for message in reader.messages(streams=[stream.id for stream in chosen], steps=steps):
        if subscription.wants(message.kind, message.key, message.tag, message.step):
            yield measure.taken(message)


def _taken(reader: TraceReader, measure: Similarity) -> list[StreamInfo]:
    wants = measure.subscriptions[0].wants
    return [stream for stream in reader.streams if wants(stream.kind, stream.module, stream.tag, None)]


_Key = tuple[str | None, str, int, str, int]


def _matched(one: Iterator[Message], other: Iterator[Message]) -> Iterator[tuple[Message, Message]]:
    """Pairs of messages of the same layer and step; only messages of the current steps are held in memory."""
    waiting: tuple[dict[_Key, Message], dict[_Key, Message]] = ({}, {})
    sources, ended, at = (one, other), [False, False], [-1, -1]
    while not all(ended):
        # read the source that is behind, so that both stay at about the same step
        side = 0 if ended[1] or (not ended[0] and at[0] <= at[1]) else 1
        message = next(sources[side], None)
        if message is None:
            ended[side] = True
            continue
        if message.global_step != at[side]:
            at[side] = message.global_step
            for held in waiting:
                for key in [key for key in held if key[2] < min(at)]:
                    del held[key]
        key = (message.key, message.tag, message.global_step, message.leaf, message.call)
        partner = waiting[1 - side].pop(key, None)
        if partner is None:
            waiting[side][key] = message
        else:
            yield (message, partner) if side == 0 else (partner, message)


@contextlib.contextmanager
def aligned(traces: Sequence[Anywhere | TraceReader], measure: Similarity) -> Iterator[list[TraceReader]]:
    """Open traces, and check that they have what a subscriber takes and that labels and sampling agree.

    Raises
    ------
    CaptureError
        If a trace lacks what the subscriber takes or has several ranks, or if the datapoints differ.
    """
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(opened(trace, None)) for trace in traces]
        for reader in readers:
            missing = _lacking(reader, measure)
            if missing:
                raise CaptureError("; ".join(missing))
            if len(reader.ranks) > 1:
                raise CaptureError(
                    f"{reader.path} has the ranks {', '.join(map(str, reader.ranks))}: give one of them, as "
                    f"TraceReader(path).of_rank({reader.ranks[0]})"
                )
            for sentence in Audience([measure]).spoiled(_taken(reader, measure)):
                warnings.warn(f"{reader.path}: {sentence}", RuntimeWarning, stacklevel=2)
        for other in readers[1:]:
            _check_alike(readers[0], other, measure)
        yield readers


def _samplings(reader: TraceReader, measure: Similarity) -> dict[tuple[str, str | None, str, str], set[str]]:
    """The samplings, in words, of each kind, module, tag and leaf that a subscriber takes.

    There are several if a recording was resumed with another capture.
    """
    found: dict[tuple[str, str | None, str, str], set[str]] = {}
    for one in _taken(reader, measure):
        told = one.sampling or {}
        beside = ("dtype",) if "rows" in told else ("dtype", "datapoints")
        sampled = {name: value for name, value in told.items() if name not in beside}
        found.setdefault((one.kind, one.module, one.tag, one.leaf), set()).add(str(sampled or "no sampling"))
    return found


def _check_alike(one: TraceReader, other: TraceReader, measure: Similarity) -> None:
    """Raise `CaptureError` if the sampling of two traces differs, or the labels of their datapoints."""
    mine, theirs = _samplings(one, measure), _samplings(other, measure)
    tags = set()
    for (kind, module, tag, leaf), sampled in mine.items():
        found = theirs.get((kind, module, tag, leaf))
        if found is None:
            continue
        tags.add(tag)
        if found != sampled:
            raise CaptureError(
                f"{kind} of {module} are not of the same datapoints: {one.path} recorded them with "
                f"{' and '.join(sorted(sampled))}, {other.path} with {' and '.join(sorted(found))}"
            )
    for tag in sorted(tags):
        first, second = (_labels(reader, tag) for reader in (one, other))
        if first is not None and second is not None and not torch.equal(first, second):
            raise CaptureError(
                f"the datapoints under the tag {tag!r} are not the same: their labels differ in {one.path} and "
                f"{other.path}"
            )


def _labels(reader: TraceReader, tag: str) -> torch.Tensor | None:
    """The labels of a probe, from its first run; None if they are not recorded."""
    chosen = [stream.id for stream in reader.streams if stream.kind == "input_labels" and stream.tag == tag]
    message = next(reader.messages(streams=chosen), None) if chosen else None
    return None if message is None else message.data


_WHY: dict[Status, str] = {
    "few_samples": "few_samples, too few datapoints for so many directions",
    "ill_posed": "ill_posed, directions that rounding decides",
    "zero_variance": "zero_variance, a layer answers each datapoint alike",
    "nonfinite": "nonfinite, a layer has NaN or infinite values",
    "mismatch": "mismatch, the layers have different datapoints",
}
"""What a status but ok says of a pair."""


@dataclass(frozen=True, slots=True)
class Item:
    """A layer at a step of a run, which is a row and a column of `Similarities`.

    Attributes
    ----------
    trace : str
    module : str or None
        The dotted path; None for the network.
    global_step, call : int
    leaf : str
    """

    trace: str
    module: str | None
    global_step: int
    call: int
    leaf: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Similarities:
    """The similarity of each pair of items.

    Attributes
    ----------
    items : tuple
        The items of the rows and columns: each an `Item`, or a key that was given to `Bases.add`.
    values : array (items, items)
        The similarity of each pair; NaN if it could not be computed.
    codes : array (items, items) of int8
        The status of each pair, as an index into `analyze.metrics.similarity.datapoints.STATUSES`.
    k : array (items,)
        The number of directions that are kept of each item; 0 for measures that keep all activations.
    n : array (items,)
        The number of datapoints of each item.
    nulls : array (items, items)
        The null baseline of each pair: the value to expect of unrelated layers; NaN without a value.
    measure : str
        The name of the measure, such as ``svcca``.
    is_distance : bool
        Whether the measure is a distance: 0 is the same, and larger values are less similar.
    lows, highs : array (items, items), or None
        The ends of the interval of each value that was estimated from sketches; None if values are exact.
    """

    items: tuple[Any, ...]
    values: NDArray[np.float64]
    codes: NDArray[np.int8]
    k: NDArray[np.int64]
    n: NDArray[np.int64]
    nulls: NDArray[np.float64]
    measure: str = "similarity"
    is_distance: bool = False
    lows: NDArray[np.float64] | None = None
    highs: NDArray[np.float64] | None = None

    def status(self, i: int, j: int) -> Status:
        """The status of a pair."""
        return STATUSES[int(self.codes[i, j])]

    def null(self, i: int, j: int) -> float:
        """The value to expect of unrelated layers with as many datapoints and directions as this pair."""
        return float(self.nulls[i, j])

    @property
    def beyond_null(self) -> NDArray[np.float64]:
        """The similarity of each pair beyond unrelated layers: value minus null; for a distance, null minus value."""
        return self.nulls - self.values if self.is_distance else self.values - self.nulls

    @property
    def names(self) -> list[str]:
        """The names of the items: layer and step, and the trace if there are several."""
        several = len({item.trace for item in self.items if isinstance(item, Item)}) > 1
        return [f"{name_of(item)} of {Path(item.trace).name}" if several else name_of(item) for item in self.items]

    def of(self, module: str | None) -> Similarities:
        """The similarities of one module, step by step."""
        return self._at(
            [place for place, item in enumerate(self.items) if isinstance(item, Item) and item.module == module]
        )

    def _at(self, chosen: Sequence[int]) -> Similarities:
        """The similarities of the items at these places, in this order."""
        both = np.ix_(chosen, chosen)
        matrices = {name: getattr(self, name) for name in ("values", "codes", "nulls", "lows", "highs")}
        parts: dict[str, Any] = {name: of[both] for name, of in matrices.items() if of is not None}
        items = tuple(self.items[place] for place in chosen)
        return replace(self, items=items, k=self.k[list(chosen)], n=self.n[list(chosen)], **parts)

    def _layer_by_layer(self) -> Similarities:
        """The same, with the steps of a layer beside each other; the layers as they first occur, run by run."""
        first: dict[Any, int] = {}
        families = [
            (item.trace, (item.trace, item.module, item.leaf)) if isinstance(item, Item) else () for item in self.items
        ]
        for place, family in enumerate(families):
            for one in family:
                first.setdefault(one, place)
        return self._at(sorted(range(len(self.items)), key=lambda place: [first[one] for one in families[place]]))

    @property
    def _ends(self) -> dict[str, NDArray[np.float64]]:
        """The ends of the intervals by their names in tables; empty if values are exact."""
        return {name: ends for name, ends in (("low", self.lows), ("high", self.highs)) if ends is not None}

    def __repr__(self) -> str:
        return f"Similarities of {len(self.items):,} items: {self.measure} {_range(self.values)}"

    def _repr_html_(self) -> str:
        """A table of the items, for notebooks; `plot` draws the matrix."""
        columns = ("item", "datapoints", "directions", f"mean {self.measure} to the others", "mean null")
        means = [
            [_mean(np.delete(row, place)) for place, row in enumerate(matrix)] for matrix in (self.values, self.nulls)
        ]
        return table(columns, zip(self.names, self.n.tolist(), self.k.tolist(), *means, strict=True), repr(self))

    def plot(self, title: str = "") -> Any:
        """Draw the matrix, and a second matrix of how much more similar each pair is than unrelated layers.

        The steps of a layer stand beside each other. A grey cell has no value; the text below says why.

        Bright is similar, for distances, too. In the second matrix, white is the value for unrelated layers with as
        many datapoints and directions, orange is more similar, blue is less similar.

        Returns
        -------
        matplotlib.figure.Figure
            It opens no window; a notebook shows it.

        Raises
        ------
        MessageError
            If nothing was compared.
        TracerError
            If matplotlib is not installed.
        """
        shown = self._layer_by_layer()
        drawn = [shown._as_it_is()]
        if np.isfinite(self.nulls).any():
            drawn.append(shown._against_null())
        return matrices_of(drawn, shown.names, title, self._remarks())

    def _as_it_is(self) -> Matrix:
        finite = self.values[np.isfinite(self.values)]
        if self.is_distance:
            high = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
            return Matrix(self.values, f"{self.measure} (a distance: 0 is the same)", 0.0, high, "cividis_r")
        low = min(0.0, float(finite.min())) if finite.size else 0.0
        return Matrix(self.values, self.measure, low, max(1.0, float(finite.max(initial=1.0))), "cividis")

    def _against_null(self) -> Matrix:
        beyond = self.beyond_null
        far = float(np.abs(beyond[np.isfinite(beyond)]).max(initial=0.0)) or 1.0
        return Matrix(beyond, f"{self.measure} {'below' if self.is_distance else 'above'} its null", -far, far, "away")

    def _remarks(self) -> str:
        """Sentences about the null, and about the number of pairs with each status but ok."""
        upper = np.triu(np.ones(self.values.shape, bool), 1)
        told = []
        nulls = self.nulls[upper & np.isfinite(self.nulls)]
        if nulls.size:
            low, high = f"{nulls.min():.3g}", f"{nulls.max():.3g}"
            told.append(
                f"Null: the {self.measure} to expect of unrelated layers with as many datapoints and directions; here "
                f"{low if low == high else f'{low} to {high}'}."
            )
        pairs = int(upper.sum())
        for status, why in _WHY.items():
            of_code = upper & (self.codes == STATUSES.index(status))
            if of_code.any():
                empty = " (grey)" if not np.isfinite(self.values[of_code]).any() else ""
                told.append(f"{int(of_code.sum()):,} of {pairs:,} pairs{empty}: {why}.")
        return " ".join(told)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The values, for NumPy."""
        return np.array(self.values, dtype=dtype, copy=copy)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each pair once, as a row of a table: both items, value, status, numbers of directions, null, interval."""
        for i, one in enumerate(self.items):
            for j in range(i, len(self.items)):
                yield {
                    "one": one,
                    "other": self.items[j],
                    "value": float(self.values[i, j]),
                    "status": self.status(i, j),
                    "k": int(self.k[i]),
                    "m": int(self.k[j]),
                    "null": self.null(i, j),
                    **{name: float(ends[i, j]) for name, ends in self._ends.items()},
                }

    def to_pandas(self) -> Any:
        """Each pair once, as a `pandas.DataFrame`.

        Its columns are those of `rows`; an `Item` has the columns ``one_trace``, ``one_module``, ``one_global_step``,
        ``one_call`` and ``one_leaf``, or the same with ``other_``.

        Raises
        ------
        TracerError
            If pandas is not installed.
        """
        first, second = np.triu_indices(len(self.items))
        columns: dict[str, Any] = {}
        for side, chosen in (("one", first), ("other", second)):
            for name, values in _coordinates(self.items).items():
                columns[side if name == "key" else f"{side}_{name}"] = values[chosen]
        columns |= {
            "value": self.values[first, second],
            "status": np.array(STATUSES, dtype=object)[self.codes[first, second]],
            "k": self.k[first],
            "m": self.k[second],
            "null": self.nulls[first, second],
            **{name: ends[first, second] for name, ends in self._ends.items()},
        }
        return pandas().DataFrame(columns)

    def to_xarray(self) -> Any:
        """The matrix as an `xarray.Dataset`.

        Returns
        -------
        xarray.Dataset
            The variables ``value``, ``null`` and ``status`` (and ``low`` and ``high`` for estimates), with the
            dimensions ``item`` and ``other``. Further coordinates of ``item`` are ``trace``, ``module`` (empty for the
            network), ``global_step``, ``call``, ``leaf``, ``datapoints`` and ``directions``; those of ``other`` have
            the same names after ``other_``.

        Raises
        ------
        TracerError
            If xarray is not installed.
        """
        names = words(self.names)
        coordinates: dict[str, Any] = {"item": ("item", names), "other": ("other", names)}
        of_each = {name: values for name, values in _coordinates(self.items).items() if name != "key"}
        for name, values in {**of_each, "datapoints": self.n, "directions": self.k}.items():
            coordinates[name] = ("item", values)
            coordinates[f"other_{name}"] = ("other", values)
        both = ("item", "other")
        direction = "smaller is more alike" if self.is_distance else "larger is more alike"
        variables = {
            "value": (both, self.values, {"long_name": self.measure, "comment": direction}),
            "null": (both, self.nulls, {"long_name": f"{self.measure} to expect of unrelated layers"}),
            "status": (both, self.codes, {"long_name": "status", **flags()}),
            **{name: (both, ends, {"long_name": f"{name} end of the interval"}) for name, ends in self._ends.items()},
        }
        return xarray().Dataset(variables, coordinates, {"measure": self.measure})


def codes_of_pairs(
    of_pairs: NDArray[np.int64], same: NDArray[np.bool_], of_items: Iterable[Status]
) -> NDArray[np.int8]:
    """The status of each pair: an item's own status if it is not ok, else a mismatch, else the status of the pair.

    Parameters
    ----------
    of_pairs : array (items, items) of int
        The status of each pair by itself, as an index into `STATUSES`.
    same : array (items, items) of bool
        Whether the items of each pair have the same datapoints.
    of_items : iterable of str
        The status of each item.
    """
    codes = np.where(same, of_pairs, STATUSES.index("mismatch"))
    alone = np.array([STATUSES.index(status) for status in of_items], np.int8)
    codes = np.where(alone[None, :] != 0, alone[None, :], codes)
    codes = np.where(alone[:, None] != 0, alone[:, None], codes)
    return codes.astype(np.int8)


def _coordinates(items: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """A column for each field of the items; for keys that are not `Item`, the single column ``key``."""
    if not items or not all(isinstance(item, Item) for item in items):
        return {"key": words(items)}
    found: dict[str, NDArray[Any]] = {}
    told = [asdict(item) | {"module": item.module or ""} for item in items]
    for field in fields(Item):
        values = [one[field.name] for one in told]
        found[field.name] = np.array(values, np.int64) if isinstance(values[0], int) else words(values)
    return found


def name_of(item: Any) -> str:
    """The name of an item: layer and step, and the call and leaf unless they are 0 and empty.

    Examples
    --------
    >>> name_of(Item("run.zarr", "fc", 30, 0, "")), name_of(("any", "key"))
    ('fc @30', "('any', 'key')")
    """
    if not isinstance(item, Item):
        return str(item)
    more = "".join(f" {name} {value}" for name, value in (("call", item.call), ("leaf", item.leaf)) if value)
    return f"{'network' if item.module is None else item.module or 'the root'} @{item.global_step}{more}"


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _range(values: NDArray[np.float64]) -> str:
    apart = values[~np.eye(len(values), dtype=bool) & np.isfinite(values)]
    return f"{apart.min():.4g} to {apart.max():.4g}" if apart.size else "has a value of no pair"
