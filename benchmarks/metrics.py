"""What metrics cost, beside the references that each family names: the four benchmarks of metrics, one after another.

Each runs in a process of its own, on one core, and prints ratios of variants that take turns in that run; see their
docstrings for what is compared with what.

    python benchmarks/metrics.py [--only similarity,spectra,statistics,dynamics] [--full]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

FAMILIES = ("similarity", "spectra", "statistics", "dynamics")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--full", action="store_true", help="the large sizes too, which take many minutes")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    unknown = sorted({*wanted} - {*FAMILIES})
    if unknown:
        parser.error(f"there is no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    status = 0
    for family in wanted:
        print(f"== {family}", flush=True)
        program = Path(__file__).with_name(f"metrics_{family}.py")
        options = ["--full"] if arguments.full else []
        one_core = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        done = subprocess.run([sys.executable, str(program), *options], env={**os.environ, **one_core}, check=False)
        status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
