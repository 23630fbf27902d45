"""`Certificate`: whether recording a training changed it, as `tracer.certify` found and a trace's header says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["identical", "different", "nondeterministic", "failed"]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What came of comparing a training with and without a recorder.

    Attributes
    ----------
    verdict : str
        ``"identical"``: after every step all bits were the same. ``"different"``: the recorder changed something.
        ``"nondeterministic"``: two runs without a recorder differ, so nothing can be said. ``"failed"``: the training
        or the recording did not take place.
    reason : str
        The verdict as a sentence.
    steps : int
        How many steps were compared.
    step : int or None
        After which step (from 0) something differed first.
    differing : tuple of str
        What differed after that step: generators, parameters, buffers, optimizer states, modes.
    overhead : dict
        ``cpu_ratio`` and ``wall_ratio``: time of a step with a recorder over that without; of ``steps`` steps, of which
        ``recorded_steps`` were recorded, until all was written. ``average``: whether of the medians, or, if only some
        steps were recorded, of the means. ``bare_ratio``: the same of the two runs without a recorder, which says how
        noisy the machine is. ``bare_cpu_seconds`` and ``recorded_cpu_seconds``: of a step. The first step, in which
        everything is made, is left out, so with one step all this is empty.
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
        """The same as JSON values, as they stand in the header of a trace."""
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
"""Of certificates, from the best to the worst."""


def worst_certificate(told: Iterable[object]) -> dict[str, Any] | None:
    """Of what headers say of certificates, the first with the worst verdict; what is no certificate does not count.

    Examples
    --------
    >>> worst_certificate([None, {"verdict": "identical"}, {"verdict": "different"}])
    {'verdict': 'different'}
    """
    found = [one for one in told if isinstance(one, dict) and one.get("verdict") in VERDICTS]
    return max(found, key=lambda one: VERDICTS.index(one["verdict"]), default=None)
