"""Tensors whose hashes and statistics are made on a device, and what they must be: as the host makes them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tracer.numbers.arrays import as_array
from tracer.numbers.statistics import ENTRIES, PIECE, statistics_of
from tracer.observing.reductions import hash_of

FLOATS = ("float16", "bfloat16", "float32", "float64")
OTHERS = ("int8", "int16", "int32", "int64", "uint8", "bool", "uint16", "complex64", "complex128", "float8_e4m3fn")
SIZES = (
    *(1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 240, 241, 1000, 1024, 1025),
    *(4096, 8192, 16383, 16384, 16385, 32768, 65536, 65537, 70000, 200001),
)
"""In numbers of each dtype: all that XXH3 tells apart, and all around the ends of tiles and pieces."""
FEW = (1, 3, 4, 9, 17, 129, 241, 16385, 70000)
EXACT = ("min", "max", "nan", "inf", "zero", "count", "exponent")


def numbers(dtype: str, size: int) -> Tensor:
    """Random numbers of a dtype, some of them zero."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator) * 50
    x[::7] = 0.0
    kind = getattr(torch, dtype)
    return (x.abs() if dtype.startswith("uint") else x).to(kind)


def of_sizes(sizes: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Vectors of all dtypes and these sizes."""
    for dtype in (*FLOATS, *OTHERS):
        for size in sizes:
            yield f"{dtype} {size}", numbers(dtype, size)


def laid_out() -> Iterator[tuple[str, Tensor]]:
    """Tensors that lie in memory in other ways than vectors do."""
    for dtype in ("float32", "bfloat16", "int64"):
        x = numbers(dtype, 9000).reshape(30, 20, 15)
        yield f"{dtype}, transposed", x.permute(2, 0, 1)
        yield f"{dtype}, every second", x[:, ::2]
        yield f"{dtype}, not aligned", x.reshape(-1)[1:]
        yield f"{dtype}, expanded", x[:1].expand(30, 20, 15)
        yield f"{dtype}, one number", x[0, 0, 0]
        yield f"{dtype}, one number, expanded", x[0, 0, 0].expand(1, 1)
        yield f"{dtype}, channels last", x.reshape(3, 10, 20, 15).contiguous(memory_format=torch.channels_last)
        yield f"{dtype}, ten axes", x.reshape(1, 1, 1, 3, 10, 20, 15, 1, 1, 1)
        yield f"{dtype}, too many axes", x.reshape(*[1] * 30, 9000)
    yield "one complex number, expanded", numbers("complex64", 1).expand(1, 1)
    yield "conjugated", numbers("complex64", 500).add(1j).conj()
    yield "negated", numbers("complex64", 500).add(1j).conj().imag


def odd() -> Iterator[tuple[str, Tensor]]:
    """Numbers that sums lose digits of, or cannot hold."""
    x = torch.randn(30000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    single, nan, inf = x.float(), torch.tensor([torch.nan]), torch.tensor([torch.inf])
    yield "far from zero", 1e8 + x * 1e-7
    yield "far from zero, float32", 1000 + single
    yield "the first far from the others", torch.cat([torch.tensor([1e9]), single])
    yield "the first thousand far from the others", torch.cat([torch.full((1024,), 1e6), single])
    yield "pieces far from each other", torch.cat([torch.full((16384,), 1e6), single, torch.full((16384,), -1e5)])
    yield "all the same", torch.full((40000,), 3.7)
    yield "zeros", torch.zeros(40000)
    yield "negative zeros", torch.full((5,), -0.0)
    yield "squares beyond float64", x * 1e200
    yield "squares below float64", x * 1e-200
    yield "subnormal", x[:100] * 1e-310
    yield "the largest", torch.full((9000,), 1.7e308, dtype=torch.float64)
    yield "very small and very large", torch.cat([x * 1e-300, x * 1e200])
    yield "all positive, very small and very large", torch.cat([x.abs() * 1e-300, x.abs() * 1e200])
    yield "large integers", torch.randint(-(2**62), 2**62, (20000,), generator=torch.Generator().manual_seed(1))
    yield "NaN at the end", torch.cat([single, nan])
    yield "infinite at the end", torch.cat([single, inf])
    yield "infinite at the beginning", torch.cat([-inf, single])
    yield "infinite both ways", torch.cat([-inf, inf])
    yield "NaN and infinite, float16", torch.cat([nan, inf, single]).half()
    yield "NaN among large numbers", torch.cat([x * 1e200, nan.double()])
    yield "infinite among large numbers", torch.cat([x * 1e200, inf.double()])


def wrong_entries(host: Tensor, found: Tensor) -> list[str]:
    """The names of the statistics that are not those of the tensor on the host."""
    expected = dict(zip(ENTRIES, statistics_of(host).tolist(), strict=True))
    told = dict(zip(ENTRIES, found.tolist(), strict=True))
    size = expected["absolute"]  # a sum is as good as the sum of moduli
    exponent = 0 if host.is_complex() else int(expected["exponent"])
    scale = {"total": size, "mean": math.ldexp(size / expected["count"], exponent)}
    single = host.numel() > PIECE and as_array(host).dtype == np.float32  # the host adds up in float32
    digits, wrong = 1e-6 if single else 1e-12, []
    for name in ENTRIES[:14]:
        one, other = told[name], expected[name]
        near = 0.0 if name in EXACT else digits * max(abs(other), scale.get(name, 0.0))
        if not (one == other or abs(one - other) <= near or (math.isnan(one) and math.isnan(other))):
            wrong.append(f"{name} is {one!r}, not {other!r}")
    means = [one["centre"] + one["rest"] / one["count"] for one in (told, expected)]
    known = expected["nan"] + expected["inf"] == 0 and not host.is_complex()
    if known and abs(means[0] - means[1]) > digits * size / expected["count"]:
        wrong.append(f"centre and rest give {means[0]!r}, not {means[1]!r}")
    return wrong


def wrong_hash(host: Tensor, found: Tensor) -> list[str]:
    """A sentence if a hash is not that of the tensor on the host."""
    return [] if int(found) == hash_of(host) else [f"the hash is {int(found)}, not {hash_of(host)}"]
