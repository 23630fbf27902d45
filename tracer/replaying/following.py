"""How far a replay may go in a trace that is still being written."""

from __future__ import annotations

import time

import numpy as np

from tracer.format.journal import Column
from tracer.replaying.plan import Plan
from tracer.trace.reader import TraceReader

POLL_SECONDS = 0.1
LONGEST_POLL_SECONDS = 2.0
"""How often a replay that follows a run looks whether more was committed, at first and at last."""


def settled(reader: TraceReader, todo: Plan) -> int:
    """Up to which row, exclusive, all is there that is to be published: an update waits for the next weight."""
    streams, steps = reader.journal[:, Column.STREAM], reader.journal[:, Column.GLOBAL_STEP]
    # what comes before a step carries its number, so the step after a weight's is over with the one after that
    over = int(steps.max(initial=0)) - 1
    last = np.full(len(reader.streams), -1)
    last[streams] = np.arange(len(streams))  # of several, the last is what stays
    last = last[[stream.id for stream in todo.derived]]
    last = last[last >= 0]  # a stream is declared before it has messages
    waiting = last[steps[last] >= over]
    return int(waiting.min(initial=len(streams)))


def wait(reader: TraceReader) -> bool:
    """Wait until more was committed, or the run has ended; whether it still goes on."""
    pause = POLL_SECONDS
    while True:
        # asked before: what is committed after this is read by the refresh
        going_on = reader.status == "recording"
        began = time.monotonic()
        changed = reader.refresh()
        if changed or not going_on:
            return going_on
        # where looking is slow, as in a store far away, look less often
        pause = min(max(pause * 1.2, 5 * (time.monotonic() - began)), LONGEST_POLL_SECONDS)
        time.sleep(pause)
