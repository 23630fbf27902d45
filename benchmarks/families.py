"""Programs of one benchmark that run one after another, each in a process of its own."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ONE_CORE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def run(
    doc: str | None,
    name: str,
    families: Sequence[str],
    full: Mapping[str, Sequence[str]],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run ``{name}_{family}.py`` for each family that the command line asks for; 0 if all of them end with 0.

    Parameters
    ----------
    doc : str, optional
        What the benchmark is, for ``--help``.
    name : str
    families : sequence of str
    full : mapping of str to sequence of str
        The further arguments of each family under ``--full``.
    environment : mapping of str to str, optional
        What to add to the environment of the programs.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(families), help="families, separated by commas")
    parser.add_argument("--full", action="store_true", help="the large sizes too, which take many minutes")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    unknown = sorted({*wanted} - {*families})
    if unknown:
        parser.error(f"there is no family {', '.join(unknown)}; there are {', '.join(families)}")
    status = 0
    for family in wanted:
        print(f"== {family}", flush=True)
        program = str(Path(__file__).with_name(f"{name}_{family}.py"))
        options = full.get(family, ()) if arguments.full else ()
        done = subprocess.run(
            [sys.executable, program, *options], env={**os.environ, **(environment or {})}, check=False
        )
        status = status or done.returncode
    return status
