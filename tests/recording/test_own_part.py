"""Where a resumed recording goes on is read from the end of what is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trace.small_summaries import rows_looked_at, small_summaries
from tracer import NetworkMessage, TraceWriter
from tracer.format.names import part_name
from tracer.recording.own_part import go_on

PER_EPOCH = 7


def write(path: Path, rank: int, steps: range) -> None:
    """What a rank recorded of some steps: epochs that end, and an evaluation with the number of the next step."""
    with TraceWriter(path, header={"ranks": [0, 1], "run_id": "one"}, part=part_name(rank, 0), commit_rows=4) as writer:
        for step in steps:
            epoch, train_step = divmod(step, PER_EPOCH)
            where: dict[str, Any] = {"global_step": step, "train_step": train_step, "epoch": epoch, "rank": rank}
            writer.write(NetworkMessage(kind="batch_started", **where))
            if train_step == PER_EPOCH - 1:
                writer.write(NetworkMessage(kind="epoch_finished", **where))
                writer.write(NetworkMessage(kind="batch_started", tag="eval", **where | {"global_step": step + 1}))


def where(path: Path, rank: int, step: int) -> tuple[int, int, int]:
    """Where the recording of a rank goes on at a step."""
    options: Any = SimpleNamespace(first_step=step, first_epoch=None)
    found = []
    go_on(path, rank, options, SimpleNamespace(start_at=lambda *given: found.append(given)))  # type: ignore[arg-type]
    return found[0]


@pytest.mark.parametrize(("rank", "stride"), [(0, 1), (0, 3), (1, 1), (1, 5)])
def test_where_it_goes_on(tmp_path: Path, rank: int, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what is there, where it ends, and later, also if not every step was recorded, or by another rank alone."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch)
    write(path, 0, range(0, 40, stride))
    for step in range(60):
        last = step - step % stride if step < 40 else range(0, 40, stride)[-1]
        epoch, train_step = divmod(last, PER_EPOCH)
        expected = step, train_step + step - last, epoch
        if train_step == PER_EPOCH - 1 and step > last:
            expected = step, step - last - 1, epoch + 1
        assert where(path, rank, step) == expected


def test_few_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an attempt ended, and some steps later, no more than the last of some four hundred rows."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch)
    write(path, 0, range(300))
    looked = rows_looked_at(monkeypatch)
    for step in (299, 300, 303):
        looked.clear()
        assert where(path, 0, step)[0] == step
        assert sum(looked) <= 40
