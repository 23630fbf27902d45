"""``trace verify``, ``recover`` and ``convert``, and what other commands say of a trace that is damaged."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import h5py
import pytest

import tracer
from tests.tracereel.command_line import damage, run, snapshot, write
from tracer.stores.zarr.layout import chunks_begin
from tracer.stores.zarr.writing import CHUNKS_PER_SHARD

# -- damaged traces -----------------------------------------------------------------------------------------------


def test_a_damaged_trace_gives_what_it_has(tmp_path: Path) -> None:
    """Of a trace with damaged data ``cat`` and ``replay`` say so and exit with 3; what is whole is read as ever."""
    copy = write(tmp_path / "damaged.zarr")
    damaged = [path for path in (copy / "rank0").rglob("c/*") if "weight_updates" in str(path)]
    assert damaged
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[chunks_begin(CHUNKS_PER_SHARD) + 5] ^= 0xFF
        path.write_bytes(content)
    assert run("info", copy).exit_code == 0
    for arguments in (("cat", copy, "-k", "weight_updates"), ("replay", copy, "-s", "norm:kind=weight_updates")):
        result = run(*arguments)
        assert result.exit_code == 3, result.output
        assert "Traceback" not in result.output
    assert run("replay", copy, "-s", "norm:kind=weights").exit_code == 0
    unverified = run("replay", copy, "-s", "norm:kind=weight_updates", "--no-verify", "--json")
    assert unverified.exit_code == 0, unverified.output
    right = run("replay", write(tmp_path / "right.zarr"), "-s", "norm:kind=weight_updates", "--json")
    assert len(unverified.stdout.splitlines()) == len(right.stdout.splitlines())
    assert unverified.stdout != right.stdout


@pytest.mark.parametrize("text", [None, b"", b"{", b"flipped", b"[]", b"another format", b"no version"])
def test_a_trace_whose_root_is_damaged_is_damaged(tmp_path: Path, text: bytes | None) -> None:
    """Each command that reads says so and exits with 3, `recover` saves all; a folder without arrays is no trace."""
    path = write(tmp_path / "run.zarr")
    root = path / "zarr.json"
    if text is None:
        root.unlink()
    elif text == b"flipped":
        data = bytearray(root.read_bytes())
        data[0] ^= 4
        root.write_bytes(data)
    elif text == b"another format":
        root.write_bytes(root.read_bytes().replace(b"tracereel", b"tracerael"))
    elif text == b"no version":
        root.write_bytes(root.read_bytes().replace(b"_version", b"_Version"))
    else:
        root.write_bytes(text)
    before = snapshot(path)
    asked = ("-s", "norm:kind=weights")
    for command in (
        *(("info", path), ("ls", path), ("cat", path), ("convert", path, tmp_path / "copy.h5")),
        *(("replay", path, *asked, *more) for more in ((), ("--plan",), ("--follow",), ("--no-verify",))),
    ):
        result = run(*command)
        assert (result.exit_code, result.stdout) == (3, ""), command
        assert len(result.stderr.splitlines()) == 1
        assert str(path) in result.stderr
    assert run("verify", path).exit_code == 3
    result = run("recover", path, tmp_path / "saved.zarr", "--json")
    assert (result.exit_code, json.loads(result.stdout)["saved"]) == (0, 66)
    assert snapshot(path) == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.zarr", "saved.zarr"]
    shutil.rmtree(path)
    (path / "rank0").mkdir(parents=True)
    (path / "rank0" / "notes.txt").write_text("of somebody else")
    assert run("info", path).exit_code == 1


def test_a_file_that_begins_wrongly_is_damaged(tmp_path: Path) -> None:
    """A wrong byte in what tells HDF5 files from others."""
    path = write(tmp_path / "run.h5")
    data = bytearray(path.read_bytes())
    data[1] ^= 1
    path.write_bytes(data)
    told = run("info", path)
    assert (told.exit_code, "first bytes" in told.stderr) == (3, True)


# -- checking, saving, copying ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_verify(tmp_path: Path, suffix: str) -> None:
    """``verify`` ends with 0 for a whole trace and with 3 for a damaged one, and says what is damaged."""
    path = write(tmp_path / f"run{suffix}")
    result = run("verify", path)
    assert (result.exit_code, result.stdout.partition(":")[0]) == (0, "intact, finished")
    damage(path)
    result = run("verify", path)
    assert result.exit_code == 3
    assert "weights of conv1 in step" in result.stdout
    told = json.loads(run("verify", path, "--json").stdout)
    assert told["damaged"] >= 1
    assert (told["intact"], told["complete"]) == (False, False)
    assert run("verify", tmp_path / "none.h5").exit_code == 1


def test_verify_says_what_to_do_where_nothing_is_lost(tmp_path: Path) -> None:
    """Of a trace whose messages are all there, though it is damaged, `recover` makes one that is whole."""
    path = write(tmp_path / "run.zarr")
    shard = path / "rank0" / "journal" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # of the index at the end; the shard has another
    shard.write_bytes(data)
    told = run("verify", path)
    assert told.exit_code == 3
    assert f"trace recover {path} OUT makes a whole trace of them" in told.stdout
    assert run("recover", path, tmp_path / "whole.zarr").exit_code == 0
    assert run("verify", tmp_path / "whole.zarr").exit_code == 0


def test_verify_promises_nothing_where_nothing_is_left(tmp_path: Path) -> None:
    """Of a trace of which every message is lost, it is not said that others can be saved or that all can be read."""
    path = write(tmp_path / "run.zarr")
    shard = path / "rank0" / "journal" / "c" / "0" / "0"
    shard.write_bytes(bytes(shard.stat().st_size))
    told = run("verify", path)
    assert told.exit_code == 3
    assert "saves the others" not in told.output
    assert "can be read" not in told.output
    file = write(tmp_path / "run.h5")
    os.truncate(file, 3000)
    told = run("verify", file)
    assert told.exit_code == 3
    assert "can be read" not in told.output


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_recover(tmp_path: Path, suffix: str) -> None:
    """``recover`` ends with 0 when nothing was lost, 3 when something was, 1 when nothing could be saved."""
    path = write(tmp_path / f"run{suffix}")
    result = run("recover", path, tmp_path / "a.h5")
    assert (result.exit_code, result.stdout.strip()) == (0, f"saved 66 of 66 messages to {tmp_path / 'a.h5'}")
    damage(path)
    result = run("recover", path, tmp_path / "b.h5", "--json")
    assert result.exit_code == 3
    told = json.loads(result.stdout)
    assert told["lost"] == sum(one["lost"] for one in told["streams"]) >= 1
    result = run("recover", path, tmp_path / "c.h5")
    assert (result.exit_code, "conv1" in result.stdout) == (3, True)
    result = run("recover", path, tmp_path / "c.h5")
    assert (result.exit_code, "already exists" in result.stderr) == (1, True)
    (tmp_path / "no.h5").write_bytes(path.read_bytes()[:100] if path.is_file() else b"")
    assert run("recover", tmp_path / "no.h5", tmp_path / "d.h5").exit_code == 1


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_recover_counts_what_was_lost_where_nothing_is_saved(tmp_path: Path, suffix: str) -> None:
    """The numbers are on stdout as ever, the path is null, one sentence says so, and nothing is at the target."""
    path = write(tmp_path / f"run{suffix}")
    whole = json.loads(run("recover", path, tmp_path / "whole.zarr", "--json").stdout)
    if suffix == ".zarr":
        shard = path / "rank0/journal/c/0/0"
        shard.write_bytes(bytes(shard.stat().st_size))
    else:
        os.truncate(path, 3000)
    before = {path.name, "whole.zarr"}
    for target in ("a.zarr", "a.h5"):
        result = run("recover", "--json", path, tmp_path / target)
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith(f"Error: nothing could be saved of {path}: ")
        told = json.loads(result.stdout)
        assert told.keys() == whole.keys()
        assert (told["source"], told["path"], told["saved"], told["lossless"]) == (str(path), None, 0, False)
        assert told["lost"] == told["messages"] == sum(one["lost"] for one in told["streams"])
        assert suffix == ".h5" or (told["lost"], told["status"], told["header"]) == (66, "finished", True)
        assert told["problems"]
        result = run("recover", path, tmp_path / target)
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
        assert {one.name for one in tmp_path.iterdir()} == before
    with pytest.raises(tracer.TraceLostError, match="nothing could be saved") as raised:
        tracer.recover(path, tmp_path / "a.zarr")
    assert raised.value.loss.describe() == told


def test_recover_counts_nothing_of_a_trace_that_cannot_be_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not even the journal is found, the numbers are zeros, and the reason is among the problems."""
    path = write(tmp_path / "run.h5")
    whole = json.loads(run("recover", path, tmp_path / "whole.zarr", "--json").stdout)

    def survey(where: Path) -> None:
        raise tracer.TraceCorruptError(f"{where}: nothing in it can be told from anything else")

    monkeypatch.setattr(sys.modules["tracer.upkeep.recover"], "survey", survey)
    result = run("recover", "--json", path, tmp_path / "a.zarr")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert f"nothing could be saved: {path}: nothing in it" in result.stderr
    told = json.loads(result.stdout)
    assert told.keys() == whole.keys()
    assert [told[name] for name in ("path", "status", "messages", "saved", "lost")] == [None, "unknown", 0, 0, 0]
    assert told["problems"] == [f"{path}: nothing in it can be told from anything else"]
    assert not (tmp_path / "a.zarr").exists()


def test_convert(trace: Path, tmp_path: Path) -> None:
    """``convert`` copies what passes the filters, never over anything, and refuses names that are not in the trace."""
    result = run("convert", trace, tmp_path / "a.h5")
    assert (result.exit_code, "copied 66 messages" in result.stdout) == (0, True)
    result = run("convert", trace, tmp_path / "b.zarr", "-k", "weights", "-m", "fc*", "--steps", "2:6", "--json")
    told = json.loads(result.stdout)
    assert (told["messages"], told["left_out"]) == (4, 62)
    assert run("cat", tmp_path / "b.zarr").stdout.count("weights  fc.0") == 4
    assert run("convert", trace, tmp_path / "a.h5").exit_code == 1
    assert run("convert", trace, tmp_path / "c.h5", "-k", "wieghts").exit_code == 2
    assert run("convert", trace, tmp_path / "c.txt").exit_code == 1
    result = run("convert", trace, tmp_path / "d.h5", "--compression", "zstd", "--compression", "loss=none")
    assert result.exit_code == 0, result.output
    with h5py.File(tmp_path / "d.h5") as file:
        filters = {
            kind: file[f"rank0/pools/{kind}/float32"].id.get_create_plist().get_nfilters()
            for kind in ("weights", "loss")
        }
    assert filters == {"weights": 1, "loss": 0}
    assert not (tmp_path / "c.h5").exists()


def test_export_writes_rows_that_others_read(tmp_path: Path) -> None:
    """Data of a kind as Arrow files, aligned by the modules that are chosen; nothing is overwritten."""
    pa = pytest.importorskip("pyarrow")
    trace, folder = write(tmp_path / "run.zarr"), tmp_path / "rows"
    result = run("export", trace, folder, "-k", "weights", "--steps", "2:5", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told == {"path": str(folder), "datapoints": 12, "columns": ["conv1", "fc.0"], "left_out": 0}
    rows = pa.ipc.open_stream(folder / "data-00000-of-00001.arrow").read_all()
    steps, wanted = tracer.open(trace).array("weights", "fc.0", steps=(2, 5))
    assert rows["fc.0"].to_pylist() == wanted.reshape(-1, 3).tolist()
    assert rows["global_step"].to_pylist() == [step for step in steps.tolist() for _ in range(4)]
    for arguments, code, says in (
        (("-k", "weights"), 1, "rows already exists; give another folder"),
        ((), 2, "say with --kind what to export"),
        (("-k", "wieghts"), 2, "did you mean 'weights'?"),
    ):
        assert run("export", trace, trace / "rows", "-k", "weights").exit_code == 1  # it is inside of the trace
        result = run("export", trace, folder, *arguments)
        assert result.exit_code == code
        assert says in result.output
