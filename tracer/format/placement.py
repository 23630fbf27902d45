"""Which part of a tensor a rank holds: of a distributed tensor its shard, of a replicated one the whole.

A rank records what it holds, and says which part of which whole that is; it never asks another rank for theirs. A
reader puts the parts together.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tracer.format.journal import is_shape

if TYPE_CHECKING:
    from torch import Tensor

MOST_PARTS = 4096
"""Parts of one tensor, at most: more are not put together."""
_MOST_REPLICAS = 1 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """What ``sampling["placement"]`` of a stream says.

    Attributes
    ----------
    replicas : tuple of int
        The ranks that hold the same data, ascending. One of them recorded it, or each.
    shape : tuple of int or None
        Of the whole tensor; None where this is the whole.
    offsets, sizes : tuple of int or None
        Where this part begins in the whole, and how large it is; None where it is no block of it (sums that were not
        yet added up, rows that alternate between ranks).
    """

    replicas: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, value: object) -> Placement:
        """The placement that JSON describes.

        Raises
        ------
        ValueError
            If it contradicts itself: a part that reaches out of the whole, a size that no tensor has.

        Examples
        --------
        >>> Placement.parse({"replicas": [1], "shape": [5, 4], "offsets": [3, 0], "sizes": [2, 4]}).sizes
        (2, 4)
        >>> Placement.parse({"replicas": [1], "shape": [5, 4], "offsets": [3, 0], "sizes": [3, 4]})
        Traceback (most recent call last):
        ...
        ValueError: a part at [3, 0] of the sizes [3, 4] is none of a tensor of the shape [5, 4]
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"a placement is an object, not {type(value).__name__}")
        replicas = value.get("replicas")
        if (
            not isinstance(replicas, list)
            or not 1 <= len(replicas) <= _MOST_REPLICAS
            or not all(type(one) is int and 0 <= one < 2**31 for one in replicas)
        ):
            raise ValueError("the replicas of a placement are ranks")
        shape, offsets, sizes = (_numbers(value.get(name), name) for name in ("shape", "offsets", "sizes"))
        ranks = tuple(sorted(set(replicas)))
        if (offsets is None) is not (sizes is None) or (shape is None and sizes is not None):
            raise ValueError("a placement has shape, offsets and sizes, or only the first, or none")
        if shape is None or offsets is None or sizes is None:
            return cls(ranks, shape)
        if not len(shape) == len(offsets) == len(sizes) or any(
            begin + size > whole for begin, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(
                f"a part at {list(offsets)} of the sizes {list(sizes)} is none of a tensor of the shape {list(shape)}"
            )
        return cls(ranks, shape, offsets, sizes)


def _numbers(value: object, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not is_shape(tuple(value)):
        raise ValueError(f"the {name} of a placement are no shape")
    return tuple(value)


def cover(shape: Sequence[int], parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int] | None:
    """Which parts make up a whole, each element once; None if they do not.

    Parameters
    ----------
    shape : sequence of int
    parts : sequence of (offsets, sizes)
        Parts that are empty, or the same as an earlier one, are not needed.

    Examples
    --------
    >>> cover((5, 4), [((0, 0), (3, 4)), ((3, 0), (2, 4)), ((3, 0), (2, 4)), ((5, 0), (0, 4))])
    [0, 1]
    >>> cover((5, 4), [((0, 0), (3, 4))]), cover((5, 4), [((0, 0), (3, 4)), ((2, 0), (3, 4))])
    (None, None)
    """
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for number, (offsets, sizes) in enumerate(parts):
        if all(sizes):
            first.setdefault((tuple(offsets), tuple(sizes)), number)
    covered = sum(math.prod(sizes) for _, sizes in first)
    if covered != math.prod(shape) or len(first) > MOST_PARTS:
        return None
    begins = np.array([offsets for offsets, _ in first], np.int64).reshape(len(first), len(shape))
    ends = begins + np.array([sizes for _, sizes in first], np.int64).reshape(begins.shape)
    for number in range(1, len(first)):
        apart = (ends[:number] <= begins[number]) | (ends[number] <= begins[:number])
        if not apart.any(axis=1).all():
            return None
    return sorted(first.values())


@cache
def _ordinary() -> tuple[type[Tensor], ...]:
    """The classes of tensors that are surely whole."""
    from torch import Tensor, nn

    return Tensor, nn.Parameter


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) in _ordinary():
        return False
    module = sys.modules.get("torch.distributed.tensor")  # not imported for this: that takes half a second
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this process has in memory of a tensor: the shard of a DTensor; every other tensor as it is.

    Nothing is sent, and nothing is awaited but what the training itself has sent for.
    """
    if type(tensor) in _ordinary():
        return tensor
    found: Any = tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]  # of a DTensor
    if hasattr(found, "trigger_wait"):  # the training's own collective is not over; its result is used next
        found = found.trigger_wait()
    own: Tensor = found if found is tensor else found.detach()
    return own


def placement_of(tensor: Tensor) -> dict[str, Any] | None:
    """What `local` gives of a DTensor, as JSON: see rule 22 of the trace's format; None for other tensors."""
    if not is_distributed(tensor):
        return None
    import torch
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec: Any = tensor._spec  # type: ignore[attr-defined]
    mesh, placements = spec.mesh, spec.placements
    coordinate = mesh.get_coordinate()
    told: dict[str, Any] = {
        "replicas": [torch.distributed.get_rank()],
        "shape": list(tensor.shape),
        "mesh": {"shape": list(mesh.shape), "names": list(mesh.mesh_dim_names or ())},
        "placements": [str(one) for one in placements],
    }
    if coordinate is None or any(one.is_partial() for one in placements):
        return told
    held = mesh.mesh[
        tuple(slice(None) if one.is_replicate() else place for one, place in zip(placements, coordinate, strict=True))
    ]
    told["replicas"] = sorted(held.reshape(-1).tolist())
    for number, one in enumerate(placements):
        if hasattr(one, "split_factor"):  # strided: its rows alternate with those of other ranks,
            behind = 1  # unless the dimensions of the mesh that follow have divided them before
            for size, other in zip(mesh.shape[number + 1 :], placements[number + 1 :], strict=True):
                behind *= size if getattr(other, "dim", None) == one.dim else 1
            if behind != one.split_factor:
                return told
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    shape = tuple(tensor._local_tensor.shape)  # type: ignore[attr-defined]
    if tuple(sizes) == shape:
        # an empty part has no place, and torch's may lie beyond the end
        begins = [min(begin, whole) for begin, whole in zip(offsets, tensor.shape, strict=True)]
        told |= {"offsets": begins, "sizes": list(shape)}
    return told
