"""Statistics of a tensor by torch operations alone, on the tensor's device, without waiting for it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tracer.observing.reductions import power_of_two

PART: Final = 1 << 24
"""How many numbers are converted to float64 at once, to limit memory."""
_NAN, _INF, _ZERO, _COUNT, _TOTAL, _SQUARES, _ABSOLUTE, _SECOND, _CENTRE, _REST, _LOW, _HIGH = range(12)


def statistics_by_operations(tensor: Tensor) -> Tensor:
    """`tracer.numbers.statistics.statistics_of`, accurate to about 1e-13; float64 (16,), on the tensor's device.

    Takes about fifty kernel launches, and thirty more for each further `PART`.

    Parameters
    ----------
    tensor : torch.Tensor
        Dense, of any dtype; not empty.

    Examples
    --------
    >>> statistics_by_operations(torch.tensor([3.0, 0.0, -4.0]))[:5].tolist()[2:]
    [5.0, -4.0, 3.0]
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        return _counts_of_complex(flat)
    exponent = exponent_of(flat) if flat.dtype is torch.float64 else None
    rows = torch.stack([_moments(part, exponent) for part in flat.split(PART)])
    row = rows[0] if len(rows) == 1 else _united(rows)
    spread = row[_SECOND] / (len(flat) - 1) if len(flat) > 1 else torch.full_like(row[_SECOND], torch.nan)
    values = torch.stack([row[_TOTAL] / len(flat), spread.sqrt(), row[_SQUARES].sqrt(), row[_LOW], row[_HIGH]])
    if exponent is None:
        exponent = torch.zeros_like(spread)
    else:
        values = _raised(values, exponent)
    return torch.cat([values, row[_NAN : _SECOND + 1], exponent.reshape(1), row[_CENTRE : _REST + 1]])


def exponent_of(flat: Tensor) -> Tensor:
    """The exponent of the power of two by which `tracer.numbers.moments` divides float64 numbers; float64 ().

    Parameters
    ----------
    flat : torch.Tensor
        Float64, not empty.
    """
    low, high = flat.aminmax()
    largest = torch.maximum(low.abs(), high.abs())
    outside = largest.isfinite() & (largest != 0) & ((largest > 1e60) | (largest < 1e-60))
    return (torch.frexp(largest).exponent * outside).double()


def _raised(values: Tensor, exponent: Tensor) -> Tensor:
    """Return values * 2**exponent, where 2**exponent itself may overflow."""
    half = (exponent / 2).floor()
    return values * power_of_two(half) * power_of_two(exponent - half)


def _moments(part: Tensor, exponent: Tensor | None) -> Tensor:
    """The moments of some numbers, divided by 2**exponent; float64 (12,)."""
    x = part.double() if exponent is None else _raised(part, -exponent)
    low, high = x.aminmax()
    total = x.sum()
    centre = total / len(x)
    deviations = x - centre
    rest = deviations.sum()
    second = torch.linalg.vector_norm(deviations).square() - rest * rest / len(x)
    return torch.stack(
        [
            x.isnan().sum(dtype=torch.float64),
            x.isinf().sum(dtype=torch.float64),
            ((x if exponent is None else part) == 0).sum(dtype=torch.float64),
            torch.full_like(total, len(x)),
            total,
            torch.linalg.vector_norm(x).square(),
            torch.linalg.vector_norm(x, 1),
            second.clamp(min=0),
            centre,
            rest,
            low + 0.0,
            high + 0.0,
        ]
    )


def _united(rows: Tensor) -> Tensor:
    """The moments of the union of several groups, by the formulas of `tracer.numbers.moments`; (groups, 12) → (12,)."""
    counts, centres = rows[:, _COUNT], rows[:, _CENTRE]
    means = centres - centres[0] + rows[:, _REST] / counts
    mean = (counts * means).sum() / counts.sum()
    centre = centres[0] + mean
    rest = counts.sum() * (mean - (centre - centres[0]))
    second = (rows[:, _SECOND] + counts * (means - mean).square()).sum()
    found = [*rows[:, :_SECOND].sum(0), second, centre, rest, rows[:, _LOW].amin(), rows[:, _HIGH].amax()]
    return torch.stack(found)


def _counts_of_complex(flat: Tensor) -> Tensor:
    """The counts; all other entries are NaN."""
    found = flat.isnan().sum(), flat.isinf().sum(), (flat == 0).sum(), torch.full_like(flat.real[0], flat.numel())
    counts = torch.stack([one.double() for one in found])
    return torch.cat([torch.full_like(counts[:1], torch.nan).expand(5), counts, counts.new_full((7,), torch.nan)])
