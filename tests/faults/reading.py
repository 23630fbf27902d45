"""Reads a trace in each way while calls fail: says for each fault what was read, told, or said wrongly."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tracer
from tests.faults import failing
from tracer.errors import TraceUnreadableError


def answers(path: Path, copy: Path) -> dict[str, Callable[[], Any]]:
    """The ways to read a trace, and what each says of it."""

    def read() -> str:
        digest = hashlib.sha256()
        with tracer.open(path) as trace:
            for one in trace.messages():
                digest.update(f"{one.kind} {one.key} {one.global_step} {one.call}".encode())
                digest.update(b"" if one.data is None else one.data.numpy().tobytes())
            return f"{len(trace)} {trace.status} {digest.hexdigest()}"

    def verify() -> str:
        report = tracer.verify(path)
        return f"{report.messages} {report.damaged} {[str(one) for one in report.problems]}"

    def recover() -> str:
        loss = tracer.recover(path, copy)
        return f"{loss.messages} {loss.saved} {loss.lost} {loss.lossless} {loss.problems}"

    return {"read": read, "verify": verify, "recover": recover}


def main(settings: dict[str, Any]) -> None:
    """Try each fault in this process."""
    folder = Path(settings["folder"])
    path, copy = folder / settings["name"], folder.parent / "copy.zarr"
    for way, ask in answers(path, copy).items():
        right = ask()  # what is imported now needs no file later
        failing.arm(str(folder), failing.READS, 0, 0, "EIO")
        shutil.rmtree(copy, ignore_errors=True)
        assert ask() == right
        calls = failing.count()
        wrong, told, equal = [], [], 0
        numbers = range(calls)[settings["from"] :: settings["every"]]
        for first in numbers:
            shutil.rmtree(copy, ignore_errors=True)
            stop = first + settings["times"]
            failing.arm(str(folder), failing.READS, first, stop, settings["error"])
            try:
                said = ask()
            except TraceUnreadableError as error:
                told.append(f"{way} at call {first}: {error}")
                assert not copy.exists()
            except Exception as error:  # noqa: BLE001 - any other error is what is looked for
                wrong.append(f"{way} at call {first}: {type(error).__name__}: {error}")
            else:
                equal += said == right
                if said != right:
                    wrong.append(f"{way} at call {first}: {said} for {right}")
            failing.arm(str(folder), failing.READS, 0, 0, "EIO")
        shutil.rmtree(copy, ignore_errors=True)
        sys.stdout.write(json.dumps({way: {"calls": calls, "told": told, "equal": equal, "wrong": wrong}}) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
