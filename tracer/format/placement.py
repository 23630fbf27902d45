"""The part of a tensor that a rank holds: the shard of a distributed tensor, or all of a replicated tensor.

A rank records only what it holds, and where that lies in the whole tensor; it never communicates. A reader assembles
the parts.
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
"""The most parts of a tensor that a reader assembles."""
_MOST_REPLICAS = 1 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """The parsed ``sampling["placement"]`` of a stream.

    Attributes
    ----------
    replicas : tuple of int
        The ranks that hold the same data, ascending; one of them or each of them recorded it.
    shape : tuple of int or None
        Shape of the whole tensor; None if the data is the whole tensor.
    offsets, sizes : tuple of int or None
        Start and shape of this part in the whole tensor; None if the part is not a block of it (partial sums, or rows
        that alternate between ranks).
    """

    replicas: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, value: object) -> Placement:
        """Parse the JSON of a placement.

        Raises
        ------
        ValueError
            If the placement is inconsistent: a part outside of the whole tensor, or an invalid size.

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
    """The numbers of the parts that cover a tensor, each element once; None if they do not.

    Parameters
    ----------
    shape : sequence of int
    parts : sequence of (offsets, sizes)
        Empty parts, and repetitions of an earlier part, are left out.

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
    """Tensor classes that are never distributed."""
    from torch import Tensor, nn

    return Tensor, nn.Parameter


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) in _ordinary():
        return False
    module = sys.modules.get("torch.distributed.tensor")  # not imported here, because that takes half a second
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor unchanged.

    Starts no communication, and waits at most for a collective that the training itself has started.
    """
    if type(tensor) in _ordinary():
        return tensor
    found: Any = tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]  # of a DTensor
    if hasattr(found, "trigger_wait"):  # the result of a collective that is still running
        found = found.trigger_wait()
    own: Tensor = found if found is tensor else found.detach()
    return own


def placement_of(tensor: Tensor) -> dict[str, Any] | None:
    """The placement of a DTensor's `local` shard as JSON (rule 22 of the trace format); None for other tensors."""
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
        if hasattr(one, "split_factor"):  # strided: rows alternate between ranks,
            behind = 1  # unless the later mesh dimensions split the same axis by the same factor
            for size, other in zip(mesh.shape[number + 1 :], placements[number + 1 :], strict=True):
                behind *= size if getattr(other, "dim", None) == one.dim else 1
            if behind != one.split_factor:
                return told
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    shape = tuple(tensor._local_tensor.shape)  # type: ignore[attr-defined]
    if tuple(sizes) == shape:
        # torch may place an empty part beyond the end
        begins = [min(begin, whole) for begin, whole in zip(offsets, tensor.shape, strict=True)]
        told |= {"offsets": begins, "sizes": list(shape)}
    return told
