"""Messages, random tensors, answers as numbers, and statistics by NumPy, for the tests of metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tracer import ModuleMessage

INF, NAN = float("inf"), float("nan")


def module_message(kind: str, data: Any, module: str = "fc", step: int = 0, **more: Any) -> ModuleMessage:
    """A message of a module in some step."""
    data = data if isinstance(data, torch.Tensor) else torch.tensor(data)
    return ModuleMessage(kind=kind, module=module, data=data, global_step=step, train_step=step, epoch=0, **more)


def numbers(answers: Any) -> list[tuple[str, int, float]]:
    """Kind, step and value of answers."""
    return [(said.kind, said.global_step, float(said.data)) for said in answers]


def message(data: torch.Tensor, kind: str = "weights", step: int = 0) -> ModuleMessage:
    """A message of a module."""
    return ModuleMessage(kind=kind, module="fc", data=data, global_step=step, train_step=step, epoch=0)


def of(*sizes: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, a tenth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes, generator=generator)
    return x * (torch.rand(sizes, generator=generator) > 0.1)


def exactly(values: Any, ddof: int = 1) -> dict[str, float]:
    """All statistics and reductions of real numbers by NumPy in float64."""
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    with np.errstate(all="ignore"):
        return {
            "count": x.size,
            "mean": x.mean(),
            "sum": x.sum(),
            "variance": x.var(ddof=ddof) if x.size > ddof else NAN,
            "std": x.std(ddof=ddof) if x.size > ddof else NAN,
            "min": x.min(),
            "max": x.max(),
            "norm1": np.abs(x).sum(),
            "norm2": np.linalg.norm(x),
            "norminf": np.abs(x).max(),
            "absmean": np.abs(x).mean(),
            "rms": math.sqrt(np.square(x).mean()),
            "skewness": float(np.mean((x - x.mean()) ** 3) / x.var() ** 1.5),
            "kurtosis": float(np.mean((x - x.mean()) ** 4) / x.var() ** 2 - 3),
            "sparsity": np.mean(x == 0),
            "zeros": np.sum(x == 0),
            "nan": np.isnan(x).sum(),
            "inf": np.isinf(x).sum(),
            "norm3": np.linalg.norm(x, 3),
            "norm0.5": np.linalg.norm(x, 0.5),
            "median": np.median(x),
            "q0.1": np.quantile(x, 0.1),
            "q1": x.max(),
            "q0.25": np.quantile(x, 0.25),
            "q0.75": np.quantile(x, 0.75),
            "iqr": np.quantile(x, 0.75) - np.quantile(x, 0.25),
            "first": x[0],
            "last": x[-1],
        }
