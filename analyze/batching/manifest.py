"""Writes the manifest and the failures of a batch."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from analyze.batching.batch_plan import BatchPlan
from analyze.batching.folder import Folder
from analyze.batching.part_files import remove_outdated, state_of
from analyze.batching.units import SCHEMA, Failure
from analyze.batching.work import Work
from tracer.errors import TraceUnreachableError, TraceUnreadableError
from tracer.format.parsing import parsed

MANIFEST: Final = "manifest.json"
FAILURES: Final = "failures.jsonl"
_OF_A_SHARE: Final = re.compile(r"failures-\d+-of-\d+\.jsonl")


def conclude(folder: Folder, planned: BatchPlan, work: Work, state: str) -> None:
    """Remove outdated answers, and write the failures and the manifest.

    A share of a batch writes its failures only.
    """
    if planned.share is not None:
        number, parts = planned.share
        folder.write(f"failures-{number}-of-{parts}.jsonl", _lines(work.failures))
        return
    if state != "interrupted":
        remove_outdated(folder, planned.units)
        folder.remove(name for name in folder.names("") if _OF_A_SHARE.fullmatch(name))
    folder.write(FAILURES, _lines(work.failures))
    told = _manifest(planned, work, state, folder)
    told["digest"] = _digest(told)
    folder.write(MANIFEST, json.dumps(told, indent=1, ensure_ascii=False).encode(errors="backslashreplace"))


def _lines(failures: Sequence[Failure]) -> bytes:
    lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in failures)
    return lines.encode(errors="backslashreplace")  # because a path may not be UTF-8


def read_manifest(folder: Folder) -> dict[str, Any]:
    """The manifest of a folder; empty if there is none, if it is damaged, or if another release has written it."""
    try:
        found = parsed((folder.read(MANIFEST) or b"{}").decode().strip())
    except TraceUnreachableError:
        raise
    except (ValueError, TraceUnreadableError):
        return {}
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or found.pop("digest", None) != _digest(found):
        return {}
    return found


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _manifest(planned: BatchPlan, work: Work, state: str, folder: Folder) -> dict[str, Any]:
    """The manifest: what this batch did, and what the folder holds from this batch and earlier batches."""
    import numpy as np
    import torch

    from tracer.version import __version__

    before = read_manifest(folder)
    units = _units(planned, before, folder)
    runs = {run["trace"]: run for run in before.get("traces", ())}
    runs |= {one.run.trace: asdict(one.run) for one in planned.traces if one.run is not None}
    asked = {question["spec"]: question for question in before.get("subscribers", ())}
    asked |= {question.spec: question.document() for question in planned.asked}
    traces = {f"{unit['trace']}|{unit['other']}" if unit.get("other") else unit["trace"] for unit in units}
    specs = {unit["spec"] for unit in units}
    return {
        "schema": SCHEMA,
        "state": state,
        "written": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "versions": {
            "tracereel": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "selection": asdict(planned.filters),
        "computed": work.computed,
        "cached": len(planned.cached),
        "failed": len(work.failures),
        "subscribers": [question for spec, question in asked.items() if spec in specs],
        "traces": [run for trace, run in runs.items() if trace in traces],
        "seconds": {**before.get("seconds", {}), **{spec: spent for spec, spent in work.seconds.items() if spent[2]}},
        "units": units,
    }


def _units(planned: BatchPlan, before: Mapping[str, Any], folder: Folder) -> list[dict[str, Any]]:
    """The units of this batch, and the units of earlier batches whose answers are stored, with their states."""
    names = folder.names("parts")
    cells = {unit.cell for unit in planned.units}
    others = [unit for unit in before.get("units", ()) if unit["id"].partition("-")[0] not in cells]
    units = [
        unit | {"state": state_of(unit["id"], names)} for unit in [*(asdict(one) for one in planned.units), *others]
    ]
    return [unit for unit in units if unit["state"] != "missing" or unit["id"].partition("-")[0] in cells]
