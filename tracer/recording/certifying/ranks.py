"""The ranks that torchrun has started, as they rehearse together."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from tracer.errors import CaptureError
from tracer.trace.certificate import VERDICTS, Certificate
from tracer.trace.claiming import this_process

_LONG = timedelta(days=1)
"""How long ranks wait for each other between rehearsals, which take as long as the script's first steps do."""
ANOTHER = "another rank had failed before"


class Ranks:
    """The ranks that torchrun has started, in one of them: they meet in torchrun's store.

    Each rehearsal has a store of its own, which rank 0 serves, because what a process group leaves behind in one would
    be found by the next.

    Raises
    ------
    CaptureError
        If torchrun has not started them.
    """

    def __init__(self) -> None:
        process = this_process()
        self._rank, self._size = process.rank, process.size
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise CaptureError(
                f"--certify of several ranks needs torchrun, and this is rank {self._rank} of {self._size} of another "
                "launcher: start it with torchrun, give it to a run of one process, or call tracer.certify in it"
            )
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self._make = TCPStore
        self._host = os.environ["MASTER_ADDR"]
        shared = TCPStore(self._host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=_LONG)
        self._store = PrefixStore(f"trace-certify/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", shared)
        self._servers: list[Any] = []

    def environment(self, number: int) -> dict[str, str]:
        """What leads the processes of a rehearsal to each other."""
        if self._rank == 0:
            self._servers.append(self._make(self._host, 0, is_master=True, wait_for_workers=False))
            self._store.set(f"port/{number}", str(self._servers[-1].port))
        return {"MASTER_PORT": self._store.get(f"port/{number}").decode()}

    def failed(self, number: int) -> bool:
        """Whether a rehearsal has failed on any rank, so that others may wait for it forever."""
        return bool(self._store.check([f"failed/{number}"]))

    def is_first_to_fail(self, number: int) -> bool:
        """Let the others know that a rehearsal has failed here; whether none did so before."""
        first: bool = self._store.add(f"failed/{number}", 1) == 1
        return first

    def agree(self, certificate: Certificate) -> Certificate:
        """The worst of all ranks' certificates, with the rank; this rank's own if all are as good."""
        self._store.set(f"certificate/{self._rank}", json.dumps(asdict(certificate)))
        found = [json.loads(self._store.get(f"certificate/{rank}")) for rank in range(self._size)]
        told = [Certificate(**{**one, "differing": tuple(one["differing"])}) for one in found]
        if all(one.identical for one in told):
            return replace(certificate, reason=f"{certificate.reason}, on each of {self._size} ranks")

        def weight(one: Certificate) -> tuple[object, ...]:
            # what one rank does differently changes the parameters of all: a generator is nearer to the cause
            drew = any(name.startswith("random generator") for name in one.differing)
            return VERDICTS.index(one.verdict), ANOTHER not in one.reason, -(one.step or 0), drew

        worst = max(told, key=weight)
        return replace(worst, reason=f"on rank {told.index(worst)}, {worst.reason}")
