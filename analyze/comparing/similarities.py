"""Holds the similarity of each pair of many layers and steps: as a matrix, a table, a figure, in pandas and xarray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.similarity.datapoints import STATUSES, Status
from analyze.tables.arrays import flags, words
from analyze.tables.plotting import Matrix, matrices_of
from analyze.tables.writing import pandas, xarray
from tracer.shown import table


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
        chosen = [place for place, item in enumerate(self.items) if isinstance(item, Item) and item.module == module]
        both = np.ix_(chosen, chosen)
        matrices = {name: getattr(self, name) for name in ("values", "codes", "nulls", "lows", "highs")}
        parts: dict[str, Any] = {name: of[both] for name, of in matrices.items() if of is not None}
        items = tuple(self.items[place] for place in chosen)
        return replace(self, items=items, k=self.k[chosen], n=self.n[chosen], **parts)

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
        drawn = [self._as_it_is()]
        if np.isfinite(self.nulls).any():
            drawn.append(self._against_null())
        return matrices_of(drawn, self.names, title, self._remarks())

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
        for code in range(1, len(STATUSES)):
            count = int((upper & (self.codes == code)).sum())
            if count:
                told.append(f"{count:,} of {pairs:,} pairs: {STATUSES[code]}.")
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
