"""Commands to type next, after the verdict on a trace: filled in, to copy."""

from __future__ import annotations

from analyze.seeing.check import Checked
from tracer.messaging.receiver import Rerun
from tracer.trace.rerun import shortest


def next_commands(checked: Checked) -> list[str]:
    """What to type after a verdict.

    Of the worst finding: what caused it, and its steps in full. Without findings: how large updates are, and the last
    steps with what rules lacked. Steps are run again only of a run that has what that takes, and tells its script.

    Examples
    --------
    >>> next_commands(Checked("runs/a b.zarr", "finished", ()))
    ["trace replay 'runs/a b.zarr' --subscriber ratio"]
    """
    trace, worst, again = shortest(checked.trace), checked.worst, checked.again
    if worst is None:
        found = [f"trace replay {trace} --subscriber ratio"]
    else:
        found = [f"trace blame {trace} --step {worst.first}"]
    if again is not None and again.script != Rerun().script:
        if worst is not None:
            found.append(again._replace(steps=f"{worst.first}:{worst.first + 3}").command())
        elif checked.lacks:
            found.append(again.command(checked.lacks))
    return found
