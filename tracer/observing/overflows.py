"""`Overflows`: numbers that a cast to a narrower dtype makes infinite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tracer.observing.numbers import StreamKey


class Overflows:
    """Counts, for each stream, the numbers that were finite before a cast and are infinite after it.

    On the CPU the extremes show whether there are any. On a device the numbers are counted on the device; only `told`
    waits for the counts.

    Examples
    --------
    >>> overflows, before = Overflows(), torch.tensor([1e6, -1.0, torch.inf, torch.nan])
    >>> overflows.count(StreamKey("weights", "fc", "default", ""), before, before.half())
    >>> [(one["module"], one["dtype"], one["count"], one["of"]) for one in overflows.told()]
    [('fc', 'float16', 1, 4)]
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[StreamKey, torch.dtype, torch.device], int | Tensor] = {}
        self._seen: dict[tuple[StreamKey, torch.dtype, torch.device], int] = {}

    def count(self, stream: StreamKey, before: Tensor, after: Tensor) -> None:
        """Count the floating-point numbers that a cast has made infinite.

        Parameters
        ----------
        stream : StreamKey
        before, after : torch.Tensor
            Of equal shape.
        """
        limit = _limit(before.dtype, after.dtype)
        if limit is None or not before.numel():
            return
        key = stream, after.dtype, after.device
        self._seen[key] = self._seen.get(key, 0) + before.numel()
        if before.itemsize == 1:  # torch has no aminmax for 1-byte floats
            before = before.float()
        if before.is_cpu:
            low, high = before.aminmax()
            if -limit <= low.item() and high.item() <= limit:  # false if there is a NaN
                return
        found = _overflowed(before, after)
        self._counts[key] = self._counts.get(key, 0) + (int(found) if before.is_cpu else found)

    def told(self) -> Iterator[dict[str, Any]]:
        """Describe each stream that has such numbers, as JSON. Waits for the devices."""
        for key, count in self._counts.items():
            (kind, module, tag, leaf), dtype, _ = key
            try:
                number = int(count)
            except RuntimeError:  # the device has failed
                continue
            if number:
                yield {
                    "kind": kind,
                    "module": module,
                    "tag": tag,
                    "leaf": leaf,
                    "dtype": str(dtype).removeprefix("torch."),
                    "count": number,
                    "of": self._seen[key],
                }


def _overflowed(before: Tensor, after: Tensor) -> Tensor:
    """How many numbers are infinite after a cast, and were not before it."""
    # for numbers that were infinite before, the difference is NaN
    return (after - before).abs_().eq(torch.inf).sum()


@lru_cache(maxsize=64)
def _limit(before: torch.dtype, after: torch.dtype) -> float | None:
    """The largest number of the dtype `after`; None if it covers the range of `before`."""
    limit: float = torch.finfo(after).max
    return limit if torch.finfo(before).max > limit else None
