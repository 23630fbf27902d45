"""Reports the datapoints that each batch of a DataLoader consists of, and lets others be fetched instead."""

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
    """A watcher of `LOADERS`, which gets the batches of map-style data sets."""

    gate: Gate

    def chosen(self, iterator: object) -> Sequence[int] | None:
        """The datapoints of the next batch; None: those of the loader's sampler."""

    def pulled(self, iterator: object, ids: Sequence[int], batch: Any) -> None:
        """Take a batch, and the indices of its datapoints."""


class _Drawn(NamedTuple):
    """The indices that a sampler gave for a batch."""

    ids: list[int]
    alone: bool
    """Whether the sampler gave a single index instead of several."""


# by iterator, and by the number of its worker's task (0 without workers)
_DRAWN: weakref.WeakKeyDictionary[Any, dict[int, _Drawn]] = weakref.WeakKeyDictionary()


def indices_of(given: object) -> list[int] | None:
    """The indices that a sampler gave; None for other keys, and for iterators, which can be consumed only once.

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
"""Reports the batches of DataLoaders, with the indices of their datapoints.

Iterable-style data sets, whose datapoints have no indices, and samplers that give other keys are not reported.
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
        # a task that failed before is finished too, but was no batch
        found = [tasks.pop(number, None) for number in over]
        drawn = found[0] if len(found) == 1 else None
        chosen = _chosen(iterator)
        if chosen is not None:
            batch, drawn = _fetched(iterator, chosen, drawn)
        _tell(iterator, drawn, batch)
        return batch

    return _next_data


def _chosen(iterator: Any) -> Sequence[int] | None:
    """The datapoints that a watcher chooses for the next batch; None if none does."""
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
