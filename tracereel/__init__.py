"""Record a PyTorch training run once; ask it anything later.

``import tracereel`` offers all public names of the package `tracer` (`tracereel.record`, `tracereel.open`, …) and the
package `analyze` as `tracereel.analyze`. Each is imported when it is first used.

The command line is ``trace``, and ``tracereel`` on machines whose ``trace`` is another program. stdout is data; stderr
is progress and complaints. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the trace is damaged (what could be read was
given), 4 some traces (or parts of a batch) failed, 5 steps that were run again gave other values, 6 a check found
something of the severity given with ``--fail-on``, 7 steps that were run again gave no other value, but some of their
values were compared with nothing, 130 interrupted. ``trace record`` ends with the exit code of the script, or with 6 if
``--stop-on`` found something.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tracereel.own import hidden

_PACKAGES = {"analyze": "analyze", "integrations": "tracer.integrations", "recorders": "tracer.recorders"}
"""Public name → the module that it is."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return _ours(_PACKAGES[name])
    if name == "__all__":
        return [*_ours("tracer").__all__, *_PACKAGES]
    if name == "__version__" or (not name.startswith("_") and name in _ours("tracer").__all__):
        return getattr(_ours("tracer"), name)
    raise AttributeError(f"module 'tracereel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__getattr__("__all__"))


def _ours(module: str) -> Any:
    why = hidden(module.partition(".")[0])
    if why is not None:
        raise ImportError(why)
    return import_module(module)
