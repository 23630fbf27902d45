"""Ask a recorded training run: metrics, the registry that names them, and tables of their answers.

A public name is imported on first use, so that ``import analyze`` costs nothing. The pure function of each metric has
its registry name (`analyze.svcca`), its subscriber the name of a class (`analyze.SVCCA`). The types of all these names
are in ``__init__.pyi``, which `make docs` writes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from analyze.metrics import BUILT_IN as _BUILT_IN

HOMES: dict[str, str] = {
    "BatchResults": "analyze.batching.batch",
    "Checked": "analyze.seeing.check",
    "Finding": "analyze.rules.finding",
    "Difference": "analyze.comparing.difference",
    "Results": "analyze.tables.results",
    "accuracy": "analyze.metrics.accuracy",
    "analyze": "analyze.asking",
    "TrainingStopped": "analyze.seeing.check",
    "Watch": "analyze.seeing.check",
    "batch": "analyze.batching.batch",
    "blame": "analyze.seeing.blame",
    "check": "analyze.seeing.check",
    "compare": "analyze.comparing.similarities",
    "describe": "analyze.registry",
    "diff": "analyze.comparing.diff",
    "pairs": "analyze.comparing.pairs",
    "parse": "analyze.registry",
    "report": "analyze.seeing.report",
    "runs": "analyze.seeing.runs",
    "statistics_of_tensors": "analyze.metrics.statistics",
    "statistics_over_time": "analyze.comparing.over_time",
    "subscribers": "analyze.registry",
    "view": "analyze.seeing.server",
}
"""Public name → its module; the loop below adds the function and the class of each built-in metric."""

for _name, _place in _BUILT_IN.items():
    _module, _, _class = _place.partition(":")
    HOMES[_name] = HOMES[_class] = _module

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'analyze' has no attribute {name!r}")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
