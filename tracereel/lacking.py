"""Traces of a batch that lack what is asked: their steps are run again, and asked in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import tracer
from analyze import registry
from analyze.batching.planning import where
from tracer.errors import CaptureError
from tracer.recording.reenacting.recorded import recorded_run
from tracer.recording.reenacting.reenact import plan_of
from tracereel.again import RECORDED, Script, found_again, recorded_again, trace_of_steps
from tracereel.errors import Failure

FOLDER = "reenacted"
"""Where in the folder of a batch the traces of steps are."""


class StepsAgain:
    """Gives of each trace of a batch the one that is asked: itself if it has what is asked, or its steps, run again.

    Parameters
    ----------
    line : str
        As `Script.of` takes it.
    specs : sequence of str
        The metrics.
    filters : mapping
        What is replayed, as `tracer.plan` takes it, with ``steps``.
    out : str
        The folder of the batch.
    environment : mapping
        With which scripts run. That of a batch, which computes with one thread, would give their sums other last bits.
    only_plan : bool
        Whether nothing is run.

    Attributes
    ----------
    planned : list of dict
        Where nothing is run, what would be: ``trace``, ``keyframe``, ``steps``, ``runs`` (how many steps) and ``out``.

    Raises
    ------
    Failure
        If the line names no script.
    """

    def __init__(
        self,
        line: str,
        specs: Sequence[str],
        filters: Mapping[str, Any],
        out: str,
        *,
        environment: Mapping[str, str],
        only_plan: bool,
    ) -> None:
        if line != RECORDED:
            Script.parse(line)
        self._line, self._specs, self._filters, self._out, self._only_plan = line, specs, filters, out, only_plan
        self._environment = environment
        self._steps: tuple[int, int] = filters["steps"][:2]
        self.planned: list[dict[str, Any]] = []

    def __call__(self, trace: str) -> str | None:
        """The trace that is asked in the place of one; None if it would have to be made.

        Raises
        ------
        CaptureError
            If the steps cannot be run again, or are not those of the run.
        """
        if self._has_all(trace):
            return trace
        # traces in several folders may have one name
        name = f"{sha256(where(trace).encode(errors='surrogateescape')).hexdigest()[:8]}-{trace.rpartition('/')[2]}"
        out = trace_of_steps(f"{self._out.rstrip('/')}/{FOLDER}/{name}", self._steps)
        try:
            script = Script.of(self._line, trace)._replace(environment=self._environment)
            if self._only_plan:
                return self._plan(trace, out)
            found = recorded_again(trace, script, self._steps, out=out)
        except Failure as failure:
            raise CaptureError(failure.message) from failure
        if not found.identical:
            raise CaptureError(f"{found.verdict}; they are in {found.trace}")
        return found.trace

    def _has_all(self, trace: str) -> bool:
        """Whether a rank of a trace has what is asked, at all of the steps."""
        with tracer.open(trace) as reader:
            for rank in reader.ranks:
                plan = tracer.plan(reader, *map(registry.parse, self._specs), rank=rank, **self._filters)
                if not plan.missing and not plan.scarce:
                    return True
        return False

    def _plan(self, trace: str, out: str) -> str | None:
        there = found_again(trace, self._steps, out)
        if there is not None and there.identical:
            return there.trace
        with recorded_run(trace) as recorded:
            plan = plan_of(recorded, self._steps)
        about = {"keyframe": plan.keyframe.at.global_step, "steps": list(self._steps), "runs": plan.count}
        self.planned.append({"trace": trace, **about, "out": out})
        return None
