"""``min_free_disk``: the recording ends before the disk is full, the training does not."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tracer
from tests.recording.pacing.trainings import mlp, recorded, train
from tracer.recording import pacer
from tracer.recording.pacer import MOST, SHARE, FreeDisk, disk_of
from tracer.stores.locations import location


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_a_disk_is_never_filled(suffix: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace is complete up to a step, and says why it ends there; so is the training."""
    monkeypatch.setattr(pacer, "_EVERY_BYTES", 1)
    torch.manual_seed(0)
    model = torch.nn.Linear(400, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, floor = small_disk / f"run.{suffix}", 8_000_000
    with (
        pytest.warns(RuntimeWarning, match="min_free_disk"),
        tracer.record(path, model, optimizer, min_free_disk=floor, capture=tracer.Capture()) as run,
    ):
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.ones(2, 400)).sum().backward()
            optimizer.step()
        assert run.recorder not in run.bus.receivers
        assert run.global_step == 100
    assert pacer.free_bytes(small_disk) > floor / 2
    with tracer.open(path) as trace:
        assert trace.status == "finished"
        (stopped,) = [note["stopped"] for note in trace.notes if "stopped" in note]
        found = recorded(trace)
    assert stopped == {"by": "min_free_disk", "min_free_disk": floor, "global_step": len(found["weights"])}
    assert found["weights"] == found["weight_updates"] == set(range(stopped["global_step"]))
    assert 2 < stopped["global_step"] < 40


def test_a_keyframe_that_does_not_fit_ends_the_recording_before_it(small_disk: Path) -> None:
    """Though it is three times as large as the first one, because that had no states of the optimizer."""
    model = torch.nn.Linear(400, 1500)
    optimizer = torch.optim.Adam(model.parameters())
    keyframes = [tracer.Capture(kinds=["loss"]), replace(tracer.KEYFRAME, every=5)]
    path = small_disk / "run.zarr"
    with pytest.warns(RuntimeWarning, match="min_free_disk"), tracer.record(path, model, optimizer, capture=keyframes):
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(2, 400)).square().mean().backward()
            optimizer.step()
    with tracer.open(path) as trace:
        assert trace.status == "finished"
        assert [one for one in trace.notes if "stopped" in one]
        found = recorded(trace)
    assert found["keyframe"] <= {0, 5, 10}
    assert {0, 1, 2, 3, 4} <= found["loss"]


@pytest.mark.parametrize("bounds", [{}, {"max_bytes": "1GB"}, {"stop_at_bytes": "1GB"}])
def test_what_is_held_is_still_written(bounds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another bound, too, for which a step's messages wait until it is over."""
    left = iter([10**12] * 3 + [0] * 100)
    monkeypatch.setattr(pacer, "_EVERY_SECONDS", 0)
    monkeypatch.setattr(pacer, "free_bytes", lambda folder: next(left))
    with pytest.warns(RuntimeWarning, match="ends before global step 4, for which min_free_disk"):
        model, optimizer, inputs, labels = mlp()
        with tracer.record(
            tmp_path / "run.zarr", model, optimizer, min_free_disk="1kB", **{"capture": tracer.Capture(), **bounds}
        ):
            for _ in range(10):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert recorded(trace)["weights"] == recorded(trace)["batch_finished"] == {0, 1, 2, 3}
        assert trace.status == "finished"


def test_zero_does_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is there a disk to look at behind a URL."""
    monkeypatch.setattr(pacer, "free_bytes", lambda folder: 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "run.zarr", mlp, 5, min_free_disk=0)
    assert len(recorded(tracer.open(tmp_path / "run.zarr"))["weights"]) == 5
    assert disk_of(location("s3://bucket/run.zarr")) is None
    assert disk_of(tmp_path / "not" / "yet" / "run.zarr") == tmp_path


def test_the_default_is_little_of_a_small_disk(small_disk: Path) -> None:
    """Two per cent of it."""
    looks = FreeDisk(small_disk, None, tracer.Exporter(), None)  # type: ignore[arg-type]
    assert looks._floor == pytest.approx(SHARE * 24 * (1 << 20), rel=0.01)
    assert looks._floor < MOST
