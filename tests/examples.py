"""How many random examples a test looks at: some of them each time, all of them in the slow suite."""

from __future__ import annotations

import os

ALL = os.environ.get("TRACEREEL_EXAMPLES") == "all"
"""Set by `make test-slow`, which runs the tests of random examples a second time."""


def examples(number: int) -> int:
    """So many in the slow suite, and a quarter of them else."""
    return number if ALL else number // 4
