"""`Certificate`: the result of `tracer.certify`, whether recording changed a training; part of a trace's header."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["identical", "different", "nondeterministic", "failed"]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The result of comparing a training with and without a recorder.

    Attributes
    ----------
    verdict : str
        ``"identical"``: all bits were equal after every step. ``"different"``: the recorder changed something.
        ``"nondeterministic"``: two runs without a recorder differ, so the comparison has no result. ``"failed"``: the
        training or the recording did not take place.
    reason : str
        The verdict as a sentence.
    steps : int
        The number of compared steps.
    step : int or None
        The first step (from 0) after which something differed.
    differing : tuple of str
        What differed after that step: generators, parameters, buffers, optimizer states, modes.
    overhead : dict
        ``cpu_ratio`` and ``wall_ratio``: the time of a step with a recorder, until all is written, divided by the time
        without; from ``steps`` steps, of which ``recorded_steps`` were recorded. ``average``: the ratios compare
        ``"median"`` or, if only some steps were recorded, ``"mean"`` times. ``bare_ratio``: the CPU times of the two
        runs without a recorder, larger over smaller: the machine's noise. ``bare_cpu_seconds`` and
        ``recorded_cpu_seconds``: CPU time of a step. The first step, which initializes everything, is left out, so this
        is empty for a single step.
    """

    verdict: Verdict
    reason: str
    steps: int = 0
    step: int | None = None
    differing: tuple[str, ...] = ()
    overhead: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether the recorder changed nothing."""
        return self.verdict == "identical"

    def describe(self) -> dict[str, Any]:
        """The certificate as JSON values, as in the header of a trace."""
        return asdict(self) | {"differing": list(self.differing)}

    def __str__(self) -> str:
        told = f"{self.verdict}: {self.reason}"
        if self.overhead:
            told += (
                f"; CPU time ×{self.overhead['cpu_ratio']:.3f} over {self.overhead['steps']} steps, "
                f"{self.overhead['recorded_steps']} of them recorded "
                f"(two runs without a recorder: ×{self.overhead['bare_ratio']:.3f})"
            )
        return told


VERDICTS = ("identical", "nondeterministic", "different", "failed")
"""The verdicts, from the best to the worst."""


def worst_certificate(told: Iterable[object]) -> dict[str, Any] | None:
    """The first of the headers' certificates with the worst verdict; values that are no certificates are ignored.

    Examples
    --------
    >>> worst_certificate([None, {"verdict": "identical"}, {"verdict": "different"}])
    {'verdict': 'different'}
    """
    found = [one for one in told if isinstance(one, dict) and one.get("verdict") in VERDICTS]
    return max(found, key=lambda one: VERDICTS.index(one["verdict"]), default=None)
