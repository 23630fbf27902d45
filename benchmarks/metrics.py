"""What metrics cost, beside the references that each family names: the four benchmarks of metrics, one after another.

Each runs in a process of its own, on one core, and prints ratios of variants that take turns in that run; see their
docstrings for what is compared with what.

    python benchmarks/metrics.py [--only similarity,spectra,statistics,dynamics] [--full]
"""

from __future__ import annotations

import sys

from families import ONE_CORE, run

FAMILIES = ("similarity", "spectra", "statistics", "dynamics")

if __name__ == "__main__":
    sys.exit(run(__doc__, "metrics", FAMILIES, dict.fromkeys(FAMILIES, ("--full",)), ONE_CORE))
