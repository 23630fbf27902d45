"""What a batch leaves besides answers: the manifest and the failures."""

from __future__ import annotations

import datetime as dt
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from analyze.batching.batch_plan import BatchPlan, of_question
from analyze.batching.folder import Folder
from analyze.batching.units import SCHEMA, Failure
from analyze.batching.work import Work
from tracer.stores import Url
from tracer.stores import remove as remove_url

MANIFEST: Final = "manifest.json"
FAILURES: Final = "failures.jsonl"


def conclude(folder: Folder, planned: BatchPlan, work: Work, state: str) -> None:
    """Remove what is out of date, and write the failures and the manifest."""
    if planned.share is not None:
        number, parts = planned.share
        folder.write(f"failures-{number}-of-{parts}.jsonl", _lines(work.failures))
        return
    if state != "interrupted":
        _remove_old(folder, planned)
        shares = [f"failures-{number}-of-{parts}.jsonl" for number, parts in _shares_there(folder)]
        folder.remove(shares)
    folder.write(FAILURES, _lines(work.failures))
    before = manifest(folder)
    told = _told(planned, work, state, before, folder)
    folder.write(MANIFEST, json.dumps(told, indent=1, ensure_ascii=False).encode(errors="backslashreplace"))


def _lines(failures: Sequence[Failure]) -> bytes:
    lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in failures)
    return lines.encode(errors="backslashreplace")  # a path that is no UTF-8 reads back as what it is


def _shares_there(folder: Folder) -> list[tuple[int, int]]:
    found = []
    for name in folder.names(""):
        front, of, back = name.removeprefix("failures-").removesuffix(".jsonl").partition("-of-")
        if name.startswith("failures-") and of and front.isdigit() and back.isdigit():
            found.append((int(front), int(back)))
    return found


def _remove_old(folder: Folder, planned: BatchPlan) -> None:
    """Remove the answers to questions of this batch that were given when the trace or the subscriber was another."""
    from analyze.batching.part_files import COMPLETE, DAMAGED

    ids = {unit.id for unit in planned.units}
    cells = {unit.cell for unit in planned.units}
    names = folder.names("parts")
    old = [name for name in names if name.partition("-")[0] in cells and name.partition(".")[0] not in ids]
    # and what is damaged no longer
    old += [name for name in names if name.endswith(DAMAGED) and name.removesuffix(DAMAGED) + COMPLETE in names]
    folder.remove([f"parts/{name}" for name in old])
    for name in {name.partition(".")[0] for name in old} - ids:
        _remove_array(folder, f"arrays/{name}.zarr")


def _remove_array(folder: Folder, name: str) -> None:
    import shutil

    if isinstance(folder.path, Url):
        remove_url(folder.path / name)
    else:
        shutil.rmtree(folder.path / name, ignore_errors=True)


def manifest(folder: Folder) -> dict[str, Any]:
    """The manifest that is there; empty if there is none, or that of another layout."""
    try:
        found = json.loads(folder.read(MANIFEST) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}


def _told(planned: BatchPlan, work: Work, state: str, before: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """The manifest: what this batch was, and what is in the folder, from this batch and earlier ones."""
    import numpy as np
    import torch

    from analyze.batching.part_files import COMPLETE, DAMAGED
    from tracer.version import __version__

    names = folder.names("parts")
    units = list(planned.units)
    cells = {unit.cell for unit in units}
    others = [one for one in before.get("units", ()) if one["id"].partition("-")[0] not in cells]
    listed = [asdict(unit) for unit in units] + others
    for one in listed:
        one["state"] = (
            "done" if one["id"] + COMPLETE in names else "damaged" if one["id"] + DAMAGED in names else "missing"
        )
    listed = [one for one in listed if one["state"] != "missing" or one["id"].partition("-")[0] in cells]
    runs = {one["trace"]: one for one in before.get("traces", ())}
    runs |= {one.run.trace: asdict(one.run) for one in planned.traces if one.run is not None}
    specs = {one["spec"]: one for one in before.get("subscribers", ())}
    specs |= {one.spec: of_question(one) for one in planned.asked}
    used = {f"{one['trace']}|{one['other']}" if one.get("other") else one["trace"] for one in listed}
    seconds = {**before.get("seconds", {}), **{spec: spent for spec, spent in work.seconds.items() if spent[2]}}
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
        "selection": asdict(planned.selection),
        "computed": work.computed,
        "cached": len(planned.cached),
        "failed": len(work.failures),
        "subscribers": [one for spec, one in specs.items() if any(unit["spec"] == spec for unit in listed)],
        "traces": [run for trace, run in runs.items() if trace in used],
        "seconds": seconds,
        "units": listed,
    }
