"""Folders of runs as people and programs leave them: links, loops, pipes, files that are too deep or too large."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from analyze.batching.batch import batch
from analyze.traces import find_traces
from tests.analyze.batching.batches import counted, write
from tracer import NetworkMessage, TraceWriter
from tracer.errors import CaptureError, TraceUnreadableError
from tracereel.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two traces, the working directory."""
    for name in ("a/run1.zarr", "b/run3.h5"):
        (tmp_path / name).parent.mkdir()
        write(tmp_path / name, steps=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_trace_that_links_lead_to_is_found_once(folder: Path) -> None:
    """By the name that has no link: a link to its folder, to itself, links in a circle, and up."""
    os.symlink("b", "a-latest")
    os.symlink("run3.h5", "b/latest.h5")
    os.symlink("../a/run1.zarr", "b/another.zarr")
    os.symlink(".", "a/self")
    os.symlink("..", "a/up")
    os.symlink("/", "b/everything")
    os.symlink("loop", "loop")
    for source in (".", "**/*.*", "**", "*/*", ["a", "b", "."]):
        assert find_traces(source) == ["a/run1.zarr", "b/run3.h5"], source


def test_a_link_out_of_the_folder_is_followed(folder: Path) -> None:
    """Runs may be on another disk; a link that leads nowhere is named, and fails when it is opened."""
    (folder / "runs").mkdir()
    os.symlink("../a", "runs/mine")
    os.symlink("gone.zarr", "runs/latest.zarr")
    assert find_traces("runs") == ["runs/latest.zarr", "runs/mine/run1.zarr"]
    os.symlink("runs", "linked")
    assert find_traces("linked") == ["linked/latest.zarr", "linked/mine/run1.zarr"]
    results = batch("runs", "norm", "out", workers=0)
    assert counted(results) == (1, 0, 1)
    assert "no trace at" in results.failures[0].reason


HOSTILE: dict[str, Callable[[Path], object]] = {
    "nested deeply": lambda path: path.write_text("[" * 200_000),
    "objects nested deeply": lambda path: path.write_text('{"a":' * 200_000),
    "a number of many digits": lambda path: path.write_text('{"a":' + "9" * 100_000 + "}"),
    "attributes that are a list": lambda path: path.write_text('{"attributes":[1]}'),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a loop": lambda path: path.symlink_to(path),
    "huge": lambda path: (path.touch(), os.truncate(path, 1 << 31)),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def test_one_bad_entry_costs_itself_alone(folder: Path) -> None:
    """The commands over a folder tell it, and answer for all other traces; nothing is waited for."""
    names = [f"c{number}.zarr" for number in range(len(HOSTILE))]
    for name, make in zip(names, HOSTILE.values(), strict=True):
        Path(name).mkdir()
        make(Path(name, "zarr.json"))
    os.mkfifo("d.h5")
    os.mkfifo("d.zarr")
    assert find_traces(".") == ["a/run1.zarr", "b/run3.h5", *names, "d.h5", "d.zarr"]
    bad = len(names) + 2
    ran = CliRunner().invoke(main, ["info", ".", "--json"])
    assert ran.exit_code == 4
    assert [one["status"] for one in json.loads(ran.stdout)] == ["finished", "finished", *["unreadable"] * bad]
    results = batch(".", "norm:kind=weights", "out", workers=0)
    assert counted(results) == (2, 0, bad)
    assert all("is" in failure.reason for failure in results.failures)


def test_a_folder_that_cannot_be_listed_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traces elsewhere are found; but if it is the folder that was asked for, that is an error."""
    (folder / "c").mkdir()
    scandir = os.scandir

    def refusing(path: str) -> object:
        if path in ("./c", "c"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.warns(
        RuntimeWarning, match="folder ./c cannot be listed: Permission denied; traces in it are left out"
    ):
        assert find_traces(".") == ["a/run1.zarr", "b/run3.h5"]
    with pytest.raises(TraceUnreadableError, match="folder c cannot be listed"):
        find_traces("c")
    monkeypatch.undo()


def test_a_thousand_folders_deep(folder: Path) -> None:
    """Deeper than Python calls functions."""
    here = os.getcwd()
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    try:
        assert find_traces(["a", "b"]) == ["a/run1.zarr", "b/run3.h5"]
        assert find_traces(".") == ["a/run1.zarr", "b/run3.h5"]
    finally:
        subprocess.run(["rm", "-r", "d"], check=True)  # `shutil.rmtree` calls itself for each folder
    with pytest.raises(CaptureError, match="no trace in the folder"):
        (folder / "empty").mkdir()
        find_traces("empty")


def test_an_hdf5_trace_whose_run_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a folder beside its path, and is found and computed by the name that it will have."""
    monkeypatch.chdir(tmp_path)
    writer = TraceWriter(tmp_path / "run.h5")
    where = {"global_step": 0, "train_step": 0, "epoch": 0}
    writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), **where))
    writer.commit()
    (tmp_path / "list").write_text("run.h5\n")
    for source in (".", "*.h*5", "*", "**/*.h5", "run*.h5", "@list", "run.h5", "run.h5.zarr"):
        assert [Path(trace).name for trace in find_traces(source)] == ["run.h5"], source
    assert counted(batch(".", "loss", tmp_path / "out", workers=0)) == (1, 0, 0)
    writer.finish()
    assert [Path(trace).name for trace in find_traces("run.h5")] == ["run.h5"]
