"""Runs two diverging runs again around the step where they part, each by its script, and compares all values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracereel.again import Again, Script, of_a_run, trace_of_steps
from tracereel.checks import TRACE_SUFFIXES, check_new
from tracereel.errors import Failure

if TYPE_CHECKING:
    from analyze.comparing.difference import Difference


def scripts_of(lines: Sequence[str], runs: tuple[str, str]) -> tuple[Script, Script]:
    """The scripts of A and of B; a single line is for both.

    Raises
    ------
    Failure
        If there are more than two lines, or if one names no script.
    """
    if len(lines) > 2:
        raise Failure(f"--reenact is given once for both runs or twice, for A and for B, not {len(lines)} times", 2)
    return Script.of(lines[0], runs[0]), Script.of(lines[-1], runs[1])


def steps_around(step: int) -> tuple[int, int]:
    """The steps to run again, as (start, stop): the first step that differs, and the one before it.

    Examples
    --------
    >>> steps_around(9), steps_around(0)
    ((8, 10), (0, 1))
    """
    return max(step - 1, 0), step + 1


def run_again(
    runs: tuple[str, str], scripts: tuple[Script, Script], steps: tuple[int, int], *, overwrite: bool
) -> tuple[Again, Again]:
    """Run steps of A and B again, one after the other, and record everything about them beside the runs.

    Parameters
    ----------
    runs : pair of str
        The traces.
    scripts : pair of Script
    steps : (int, int)
    overwrite : bool
        Whether existing traces are replaced.

    Raises
    ------
    Failure
        If a trace exists and `overwrite` is false, or if steps cannot be run again.
    """
    outs = [trace_of_steps(run, steps) for run in runs]
    if outs[0] == outs[1]:
        raise Failure(f"{runs[0]} and {runs[1]} would both be run again into {outs[0]}: give one another name", 2)
    for out in outs:
        check_new(out, TRACE_SUFFIXES, overwrite)
    both = zip(runs, scripts, outs, "AB", strict=True)
    one, other = (of_a_run(run, script, steps, out, name, overwrite=overwrite) for run, script, out, name in both)
    return one, other


def as_json(steps: tuple[int, int], again: tuple[Again, Again], found: Difference) -> dict[str, Any]:
    """The result of running A and B again, in JSON values."""
    one, other = (each.as_json() for each in again)
    return {"steps": list(steps), "one": one, "other": other, "difference": found.as_json()}
