"""What a trace says of its run: header, notes and ending without secrets; the certificate, and the fingerprint."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import platform
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import plain
from tracer.format.journal import NONE, Column
from tracer.format.process import process_start
from tracer.format.tables import Stream
from tracer.secrets import masked, masked_text
from tracer.trace.assembly import WHOLE

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


@final
class Fingerprint:
    """A digest that changes whenever a replay of some rows of a journal may give other messages.

    It covers the recorded runs, the streams and shapes, and each added row, which includes the checksum of its data if
    there is one. Rows that are not added do not change it.

    Parameters
    ----------
    runs : sequence
        JSON values that identify the recorded runs.
    streams : sequence of Stream
    shapes : sequence of tuple of int
    recorded : ndarray of int64, (rows, columns)
        The journal before distributed tensors were assembled.
    """

    def __init__(
        self,
        runs: Sequence[Any],
        streams: Sequence[Stream],
        shapes: Sequence[tuple[int, ...]],
        recorded: NDArray[np.int64],
    ) -> None:
        self._runs, self._streams, self._shapes, self._recorded = runs, streams, shapes, recorded
        self._digest = hashlib.sha256()
        # the streams and shapes of the added rows, and whether some rows stand for assembled tensors
        self._met: tuple[set[int], set[int]] = set(), set()
        self._whole = False

    def add(self, rows: NDArray[np.int64]) -> None:
        """Add rows of the journal, (rows, columns)."""
        for met, column in zip(self._met, (Column.STREAM, Column.SHAPE), strict=True):
            met.update(np.unique(rows[:, column]).tolist())
        self._whole |= bool((rows[:, Column.POOL] == WHOLE).any())
        self._digest.update(np.ascontiguousarray(rows).tobytes())

    def hexdigest(self) -> str:
        """The digest, in hexadecimal digits."""
        streams = [[number, repr(self._streams[number])] for number in sorted(self._met[0])]
        shapes = [[number, *self._shapes[number]] for number in sorted(self._met[1] - {NONE})]
        digest = self._digest.copy()
        digest.update(json.dumps([self._runs, streams, shapes], default=str).encode())
        if self._whole:
            digest.update(np.ascontiguousarray(self._recorded).tobytes())
        return digest.hexdigest()


_NAMES: Final = ("run_id", "launch", "process", "versions", "model", "kinds", "indices")
"""Entries that are not masked: they hold only names and numbers of the program, and processes compare them."""


def now() -> str:
    """The current time, ISO 8601, UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def complete(header: Mapping[str, Any]) -> dict[str, Any]:
    """A header as it is written: `public`, with the standard entries added where they are missing."""
    import torch

    added = {
        "run_id": uuid.uuid4().hex[:12],
        "created": now(),
        "process": {"pid": os.getpid(), "hostname": platform.node(), "start": process_start(os.getpid())},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    return added | public(header)


def public(told: Mapping[str, Any]) -> dict[str, Any]:
    """A header or a note as it is written: without secrets (see `tracer.secrets`)."""
    with contextlib.suppress(RecursionError):  # nested too deeply; refused when it is written as JSON
        return {name: value if name in _NAMES else masked({name: value})[name] for name, value in told.items()}
    return dict(told)


def ending(status: str, ended: str | None, messages: int) -> dict[str, Any]:
    """The value of the declaration ``status``."""
    return {"status": masked_text(plain(status)), "ended": ended, "messages": messages}
