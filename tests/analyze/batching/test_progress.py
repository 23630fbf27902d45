"""The file in which other programs read how far a batch is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from analyze.batching import progress
from analyze.batching.batch import batch
from analyze.batching.batch_plan import plan_batch
from analyze.batching.folder import Folder
from analyze.batching.progress import ProgressFile
from tests.analyze.batching.batches import write
from tracer.errors import TraceError, TracerError

KEYS = {
    *("version", "state", "total", "done", "failed", "running", "bytes_total", "bytes_done"),
    *("started", "updated", "finished", "eta", "error"),
}


def read(out: Path, name: str = "progress.json") -> dict[str, Any]:
    """The file, as another program reads it."""
    told: dict[str, Any] = json.loads((out / name).read_text())
    assert set(told) == KEYS
    assert told["version"] == 1
    return told


@pytest.mark.parametrize("workers", [0, 2])
def test_it_counts_what_the_events_tell(
    runs: Path, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """After each part: what is done, what failed and what is left; a trace that cannot be opened has failed."""
    monkeypatch.setattr(progress, "DISK_SECONDS", 0.0)
    (runs / "bad.zarr").mkdir()
    (runs / "bad.zarr" / "zarr.json").write_text("{")
    out, seen = tmp_path / "out", []

    def look(event: Mapping[str, Any]) -> None:
        if event["event"] in ("planned", "part"):
            seen.append((event, read(out)))

    specs = [f"{trouble}:Raises", "norm"]
    batch(runs, ["norm"], out, workers=0)
    results = batch(runs, specs, out, workers=workers, progress=look)
    assert {failure.status for failure in results.failures} == {"unplanned", "failed"}
    for event, told in seen:
        assert (told["state"], told["total"], told["finished"], told["error"]) == ("running", 7, None, None)
        assert 0 <= told["running"] <= 7 - told["done"] - told["failed"]
        if event["event"] == "part" and told["bytes_done"]:
            assert told["eta"] >= 0
    told = read(out)
    assert (told["state"], told["total"], told["done"], told["failed"], told["running"]) == ("finished", 7, 3, 4, 0)
    assert told["bytes_done"] == told["bytes_total"] == seen[0][0]["bytes"]
    assert told["started"] <= told["updated"] == told["finished"]
    assert told["eta"] is None


def test_how_a_batch_ended_is_told(runs: Path, tmp_path: Path) -> None:
    """By Ctrl-C, or by an error, with its sentence."""

    def stop(error: BaseException, event: Mapping[str, Any]) -> None:
        if event["event"] == "part":
            raise error

    for error, state in ((KeyboardInterrupt(), "interrupted"), (TracerError("the power is out"), "failed")):
        with pytest.raises(type(error)):
            batch(runs, "norm", tmp_path / "out", workers=0, force=True, progress=partial(stop, error))
        told = read(tmp_path / "out")
        assert (told["state"], told["error"]) == (state, None if state == "interrupted" else "the power is out")
        assert told["finished"] is not None


def test_shares_have_files_of_their_own(runs: Path, tmp_path: Path) -> None:
    """Their totals are that of the whole, which removes them."""
    out = tmp_path / "out"
    for number in range(2):
        batch(runs, "norm", out, workers=0, part=(number, 2))
    told = [read(out, f"progress-{number}-of-2.json") for number in range(2)]
    assert (sum(one["total"] for one in told), {one["state"] for one in told}) == (3, {"finished"})
    batch(runs, "norm", out, workers=0)
    assert [path.name for path in out.glob("progress*")] == ["progress.json"]
    assert (read(out)["total"], read(out)["done"], read(out)["bytes_total"]) == (3, 3, 0)


def test_it_is_written_once_a_second_and_a_full_disk_does_not_end_the_batch(tmp_path: Path) -> None:
    """The first and the last state, and between them one for each second."""
    written: list[str] = []

    class Full:
        """A folder on a disk on which nothing fits."""

        on_disk = True

        def write(self, name: str, data: bytes) -> None:
            written.append(json.loads(data)["state"])
            raise TraceError("no space left on device")

    planned = plan_batch(write(tmp_path / "run.zarr"), "norm", tmp_path / "out")
    folder: Folder = Full()  # type: ignore[assignment]
    passed: list[Mapping[str, Any]] = []
    with ProgressFile(folder, planned, passed.append) as tell:
        for _ in range(1000):
            tell({"event": "waiting", "running": 1})
        tell({"event": "planned"})
    assert written == ["running", "finished"]
    assert passed == [{"event": "planned"}]
