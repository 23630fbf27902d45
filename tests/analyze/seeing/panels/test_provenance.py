"""Where a run comes from: whatever its header and its notes hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analyze.seeing.report import gather
from analyze.seeing.sections import facts, panel
from tests.analyze.seeing.runs import messages, write

INFO: dict[str, Any] = {
    "path": "run.zarr", "store": "zarr", "version": 1, "status": "finished", "run_id": "1", "created": "then",
    "messages": 3, "streams": 1, "bytes": 10, "dropped": {}, "attempts": [], "problems": [], "notes": [], "header": {},
}  # fmt: skip


def told(**changes: Any) -> dict[str, str]:
    """The lines of a run."""
    return dict(facts({**INFO, **changes}))


def test_what_is_there_is_told(tmp_path: Path) -> None:
    """Arguments, seeds, versions and what else the header has."""
    path = write(tmp_path / "run.zarr", messages(("a",), 3), seeds={"torch": 7}, lucky={"deep": [1, {"er": 2}]})
    lines = dict(facts(gather(path).info))
    assert lines["command"] == "train.py --lr 0.1"
    assert lines["seeds"] == "torch 7"
    assert "torch" in lines["versions"]
    assert lines["lucky"] == "deep 1 er 2"
    assert lines["dropped"] == "nothing"
    assert lines["certificate"].startswith("none")


def test_what_was_not_recorded_is_told() -> None:
    """What was dropped, what was noted, and problems of the trace."""
    notes = [{"problem": {"what": "fc", "why": "compiled"}}, {"indices": [1]}, {"dropped": {"loss": 2}}]
    lines = told(dropped={"loss": 2}, notes=notes, problems=["rank 1 is torn"])
    assert lines["dropped"].startswith("2 loss: observed, and not recorded")
    assert lines["noted: problem"] == "what fc, why compiled"
    assert lines["problem"] == "rank 1 is torn"
    assert "noted: indices" not in lines


def test_attempts_and_certificates() -> None:
    """Each of several attempts, and what was certified."""
    certificate = {"verdict": "identical", "reason": "why"}
    attempts = [
        {"attempt": 0, "first_step": 0, "status": "failed: x", "certificate": None},
        {"attempt": 1, "first_step": 40, "status": "finished", "certificate": certificate},
    ]
    lines = told(attempts=attempts)
    assert lines["attempt 1"] == "from step 40: finished"
    assert lines["certificate"] == "identical: why"


def test_an_odd_header_is_told_in_short(tmp_path: Path) -> None:
    """A header of another writer may be anything."""
    assert told(header=["?"])["status"] == "finished"
    assert told(header={"capture": "all", "argv": "train.py"})["command"] == "train.py"
    assert told(header={"capture": [{"every": 2, "kinds": None}]})["sampling"] == "every 2"
    path = write(tmp_path / "run.zarr", [], argv=["x" * 1000])
    assert "<details><summary>" + "x" * 400 + " …</summary>" in panel(gather(path)).before
