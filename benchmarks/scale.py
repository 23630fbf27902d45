"""Whether costs grow with what is asked and not with what is there: four benchmarks, one after another.

Each runs in a process of its own, on one core, and ends with 1 if a bar is missed; see their docstrings. `batch.py`
measures batches of many small traces.

    python benchmarks/scale.py [--only asking,replay,upkeep,similarity] [--full]
"""

from __future__ import annotations

import sys

from families import ONE_CORE, run

FULL = {"similarity": ("--pairs", "--trials", "1000")}

if __name__ == "__main__":
    sys.exit(run(__doc__, "scale", ("asking", "replay", "upkeep", "similarity"), FULL, ONE_CORE))
