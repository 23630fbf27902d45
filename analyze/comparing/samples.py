"""Aligns the rows of a batch in one run with the rows of the same samples in the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.matching import Name

INPUT: Final = "input_data"
_FORWARD: Final = (INPUT, "input_labels", "network_output", "activations", "layer_inputs")
_BACKWARD: Final = ("layer_gradients", "input_gradients")
HAVE_SAMPLES: Final = (*_FORWARD, *_BACKWARD)
"""The kinds whose first axis is the samples of a batch."""
_FLATTENED: Final = ("network_output", "input_labels")
"""Kinds whose first axis may be the samples and their positions, flattened for a loss."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of two batches that are of the same samples; `sizes` has the sizes of both batches."""

    one: NDArray[np.int64]
    other: NDArray[np.int64]
    sizes: tuple[int, int]

    @property
    def same(self) -> bool:
        """Whether both batches have the same samples in the same order."""
        n = len(self.one)
        return self.sizes == (n, n) and bool((self.other == np.arange(n)).all())


@final
@dataclass
class Samples:
    """Aligns the data of two runs by samples: rows of a batch whose `input_data` is bitwise equal.

    It must receive the pairs of messages in their order of observation. Samples that occur several times in a batch are
    matched in their order.

    Attributes
    ----------
    left_out : list of int, two numbers
        For each trace, the number of rows of its batches that the batches of the other trace lack.
    """

    left_out: list[int] = field(default_factory=lambda: [0, 0])
    _batches: dict[tuple[int, str], list[_Rows]] = field(default_factory=dict)
    _step: int = -1

    def aligned(
        self, name: Name, step: int, one: NDArray[Any], other: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]] | str:
        """The rows of two arrays that are of the same samples, in the same order; or why they cannot be aligned."""
        if name.kind not in HAVE_SAMPLES:
            return one, other
        if step != self._step:
            self._batches.clear()
            self._step = step
        batches = self._batches.setdefault((name.rank, name.tag), [])
        if name.kind == INPUT and name.leaf in ("", "0") and one.ndim and other.ndim:
            batches.append(_same_rows(one, other))
            for side, n in enumerate(batches[-1].sizes):
                self.left_out[side] += n - len(batches[-1].one)
        if not batches:
            return "no input_data came before it in its step"
        rows = batches[-1]
        if name.kind in _BACKWARD and len(batches) > 1 and not all(batch.same for batch in batches):
            return "it is a gradient of a step with several batches"
        if not len(rows.one):
            return "the batches have no sample in common"
        found = (_taken(name, one, rows.one, rows.sizes[0]), _taken(name, other, rows.other, rows.sizes[1]))
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
        return (one, other) if rows.same else "its first axis is not that of the batch"


def _taken(name: Name, array: NDArray[Any], rows: NDArray[np.int64], size: int) -> NDArray[Any] | None:
    """The given rows of a batch; None if the first axis of the array is not that of the batch."""
    if not array.ndim or not size:
        return None
    if array.shape[0] == size:
        return array[rows]
    if name.kind in _FLATTENED and array.shape[0] % size == 0:
        return array.reshape(size, -1, *array.shape[1:])[rows]
    return None


def _same_rows(one: NDArray[Any], other: NDArray[Any]) -> _Rows:
    sizes = (one.shape[0], other.shape[0])
    first: list[int] = []
    second: list[int] = []
    if one.dtype == other.dtype and one.shape[1:] == other.shape[1:]:
        there: dict[bytes, list[int]] = {}
        for number in range(sizes[1] - 1, -1, -1):
            there.setdefault(other[number].tobytes(), []).append(number)
        for number in range(sizes[0]):
            places = there.get(one[number].tobytes())
            if places:
                first.append(number)
                second.append(places.pop())
    return _Rows(np.array(first, np.int64), np.array(second, np.int64), sizes)
