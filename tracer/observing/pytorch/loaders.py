"""Tells which datapoints of its data set each batch of a DataLoader is made of, and has other datapoints fetched."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.patches import Patch


class Loading(Protocol):
    """Is told of the batches that DataLoaders of map-style data sets give."""

    gate: Gate

    def chosen(self, iterator: object) -> Sequence[int] | None:
        """The datapoints that the next batch is to be made of; None: those that the loader's sampler gives."""

    def pulled(self, iterator: object, ids: Sequence[int], batch: Any) -> None:
        """Take a batch, and the indices of its datapoints."""


class _Drawn(NamedTuple):
    """What a sampler gave for a batch."""

    ids: list[int]
    alone: bool
    """Whether it gave one index, not several."""


# by iterator, and by the number of the task that a worker has of it; without workers that is 0
_DRAWN: weakref.WeakKeyDictionary[Any, dict[int, _Drawn]] = weakref.WeakKeyDictionary()


def indices_of(given: object) -> list[int] | None:
    """What a sampler gave as indices; None of other keys, and of what can be gone through only once.

    Examples
    --------
    >>> indices_of(range(3)), indices_of(np.array([4, 2])), indices_of(7), indices_of(["a"]), indices_of(None)
    ([0, 1, 2], [4, 2], [7], None, None)
    """
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    many: Sequence[Any] = given if isinstance(given, list | tuple | range) else [given]
    try:
        return [operator.index(one) for one in many]
    except (TypeError, ValueError):
        return None


def _replace_loading() -> None:
    LOADERS.replace(_BaseDataLoaderIter, "_next_index", _drawing(_BaseDataLoaderIter._next_index))
    for owner, giving in (
        (_SingleProcessDataLoaderIter, _giving),
        (_MultiProcessingDataLoaderIter, _giving_of_workers),
    ):
        LOADERS.replace(owner, "_next_data", giving(owner._next_data))


LOADERS: Patch[Loading] = Patch(_replace_loading)
"""The batches of DataLoaders are told, with the indices of their datapoints.

Of iterable-style data sets, whose datapoints have no indices, and of samplers that give other keys, nothing is.
"""


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _next_index(iterator: Any) -> Any:
        given = original(iterator)
        if iterator._dataset_kind == _DatasetKind.Map:
            tasks, number = _DRAWN.setdefault(iterator, {}), getattr(iterator, "_send_idx", 0)
            ids = indices_of(given)
            if ids is None:
                tasks.pop(number, None)
            else:
                tasks[number] = _Drawn(ids, alone=not isinstance(given, list | tuple | range | Tensor | np.ndarray))
        return given

    return _next_index


def _giving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _next_data(iterator: Any) -> Any:
        chosen = _chosen(iterator)
        if chosen is None:
            batch = original(iterator)
            drawn = _DRAWN.get(iterator, {}).get(0)
        else:
            iterator._next_index()
            drawn = _DRAWN.get(iterator, {}).get(0)
            batch, drawn = _fetched(iterator, chosen, drawn)
        _tell(iterator, drawn, batch)
        return batch

    return _next_data


def _giving_of_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _next_data(iterator: Any) -> Any:
        tasks = _DRAWN.get(iterator, {})
        before = {*iterator._task_info}
        batch = original(iterator)
        over = [number for number in before if number not in iterator._task_info]
        # a task that failed before is over, too, and was no batch
        found = [tasks.pop(number, None) for number in over]
        drawn = found[0] if len(found) == 1 else None
        chosen = _chosen(iterator)
        if chosen is not None:
            batch, drawn = _fetched(iterator, chosen, drawn)
        _tell(iterator, drawn, batch)
        return batch

    return _next_data


def _chosen(iterator: Any) -> Sequence[int] | None:
    """The datapoints that somebody chooses for the next batch."""
    if iterator._dataset_kind != _DatasetKind.Map:
        return None
    choices = (one.chosen(iterator) for one in [*LOADERS.watchers] if one.gate.open)
    return next((ids for ids in choices if ids is not None), None)


def _fetched(iterator: Any, ids: Sequence[int], like: _Drawn | None) -> tuple[Any, _Drawn]:
    """A batch of other datapoints, fetched in this process as the loader would fetch it."""
    alone = like is not None and like.alone and len(ids) == 1
    fetcher = _MapDatasetFetcher(iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last)
    return fetcher.fetch(ids[0] if alone else [*ids]), _Drawn([*ids], alone)


def _tell(iterator: Any, drawn: _Drawn | None, batch: Any) -> None:
    if drawn is None:
        return
    for one in [*LOADERS.watchers]:
        if one.gate.open:
            one.gate.guard("sample_ids", functools.partial(one.pulled, iterator, drawn.ids, batch))
