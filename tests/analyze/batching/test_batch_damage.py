"""Stored answers that are damaged, gone, empty or no files at all: they are computed again, never told as they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import analyze
from analyze.batching.batch import batch
from analyze.batching.folder import folder_at
from analyze.batching.manifest import read_manifest
from analyze.batching.part_files import label_of
from tests.analyze.batching.batches import TROUBLE, counted, write
from tracer import TraceReader
from tracer.errors import TraceCorruptError, TraceNotFoundError, TraceUnreadableError
from tracereel.main import main

Damage = Callable[[Path], None]


def flip(data: bytes, bit: int) -> bytes:
    """The bytes with one bit inverted."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def a_pipe(path: Path) -> None:
    """Put a pipe that nobody writes to at a path."""
    path.unlink()
    os.mkfifo(path)


def another_part(path: Path) -> None:
    """Put the answers of another unit at a path."""
    other = next(one for one in sorted(path.parent.iterdir()) if one != path)
    shutil.copyfile(other, path)


def a_flip(path: Path) -> None:
    """Invert a bit in the middle of a file."""
    path.write_bytes(flip(path.read_bytes(), 8 * (path.stat().st_size // 2)))


def a_loop(path: Path) -> None:
    """Put a link that leads to itself at a path."""
    path.unlink()
    path.symlink_to(path)


DAMAGES: dict[str, Damage] = {
    "a flipped bit": a_flip,
    "gone": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "a pipe": a_pipe,
    "another part": another_part,
    "not readable": a_loop,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Any], Path]:
    """What a batch of two traces asked, the answers of replays, and a folder with ``runs`` and ``out``."""
    folder = tmp_path_factory.mktemp("damage")
    (folder / "trouble.py").write_text(TROUBLE)
    (folder / "runs").mkdir()
    for seed in range(2):
        write(folder / "runs" / f"run{seed}.zarr", steps=3, seed=seed)
    specs = ["norm:kind=weights", f"{folder / 'trouble.py'}:Large"]
    traces = sorted((folder / "runs").iterdir())
    expected = [row for trace in traces for spec in specs for row in rows_of(analyze.analyze(trace, spec))]
    assert counted(batch(folder / "runs", specs, folder / "out", workers=0)) == (4, 0, 0)
    return specs, expected, folder


@pytest.fixture
def answered(finished: tuple[list[str], list[Any], Path], tmp_path: Path) -> tuple[Any, list[Any], Path]:
    """A function that runs the batch again, the answers that replays give, and a folder of the finished batch."""
    specs, expected, folder = finished
    out = shutil.copytree(folder / "out", tmp_path / "out")
    return (lambda: batch(folder / "runs", specs, out, workers=0)), expected, out


def rows_of(results: Any) -> list[Any]:
    """Rows whose numbers are compared to the bit."""
    return [(*row[:-1], np.float64(row.value).tobytes()) for row in results]


@pytest.mark.parametrize("damages", [tuple(DAMAGES)[:4], tuple(DAMAGES)[4:]])
def test_a_part_that_is_not_as_it_was_written_is_computed_again(answered: Any, damages: tuple[str, ...]) -> None:
    """Whatever is at its place, it counts as missing, its answers come out as they were, and a note says so."""
    run, expected, out = answered
    parts = sorted((out / "parts").iterdir())
    for what, part in zip(damages, parts, strict=True):
        DAMAGES[what](part)
    again = run()
    assert counted(again) == (4, 0, 0)
    assert rows_of(again) == expected
    told = [spec_of(again, part) for what, part in zip(damages, parts, strict=True) if what != "gone"]
    notes = {note for note in again.notes if "damaged" in note}
    assert notes == {f"the stored answers of {spec} are damaged, so they are computed again" for spec in told}
    assert all(part.is_file() for part in parts)
    after = run()
    assert counted(after) == (0, 4, 0)
    assert rows_of(after) == expected
    assert after.notes == []


def spec_of(results: Any, part: Path) -> str:
    """What a part answers."""
    (unit,) = (one for one in results.units if part.name.startswith(one.id))
    return f"{unit.spec} to {unit.title}"


def test_a_folder_in_the_place_of_a_part_stays_and_is_told(answered: Any) -> None:
    """It is no file of a batch, so nothing removes it; the answers that cannot be stored are a failure."""
    run, _, out = answered
    part = sorted((out / "parts").iterdir())[0]
    part.unlink()
    (part / "mine").mkdir(parents=True)
    again = run()
    assert counted(again) == (0, 3, 1)
    assert "cannot be written: Is a directory" in again.failures[0].reason
    assert (part / "mine").is_dir()


@pytest.mark.parametrize("damages", [("gone", "cut off"), ("a file fewer", "a flipped bit"), ("of another", "gone")])
def test_large_answers_that_are_not_as_they_were_written_are_computed_again(
    answered: Any, damages: tuple[str, str]
) -> None:
    """A part's large answers are in a trace of their own, and are a part of what is checked."""
    run, expected, out = answered
    for what, folder in zip(damages, sorted((out / "arrays").iterdir()), strict=True):
        files = sorted((path for path in folder.rglob("c/*") if path.is_file()), key=lambda path: path.stat().st_size)
        if what in ("gone", "of another"):
            shutil.rmtree(folder)
        if what == "of another":
            write(folder, steps=1)
        elif what != "gone":
            change: dict[str, Damage] = {
                "a file fewer": Path.unlink,
                "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
                "a flipped bit": a_flip,
            }
            change[what](files[-1])
    again = run()
    assert counted(again) == (2, 2, 0)
    assert rows_of(again) == expected


def test_every_flipped_bit_of_a_part_is_seen(answered: Any) -> None:
    """So are all cuts, and bytes behind the end."""
    _, _, out = answered
    for path in sorted((out / "parts").iterdir()):
        data = path.read_bytes()
        assert label_of(data) is not None
        assert not any(label_of(flip(data, bit)) is not None for bit in range(8 * len(data)))
        assert not any(label_of(data[:length]) is not None for length in range(len(data)))
        assert label_of(data + b"\0") is None


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 400), marks=pytest.mark.slow)])
def test_no_fault_of_the_folder_changes_an_answer(answered: Any, seeds: range) -> None:
    """Whatever happens to a file below the folder, a batch then gives the answers that replays of the traces give."""
    run, expected, out = answered
    kept = out.with_name("kept")
    out.rename(kept)
    for seed in seeds:
        chance = np.random.default_rng(seed)
        shutil.copytree(kept, out)
        path = chance.choice(np.array(sorted(one for one in out.rglob("*") if one.is_file()), dtype=object))
        what = str(chance.choice(["flip"] * 6 + ["gone", "empty", "a pipe"]))
        if what == "flip" and path.stat().st_size:
            path.write_bytes(flip(path.read_bytes(), int(chance.integers(8 * path.stat().st_size))))
        elif what != "flip":
            DAMAGES[what](path)
        again = run()
        assert rows_of(again) == expected, (seed, path, what)
        assert again.computed + again.cached == 4
        assert rows_of(run()) == expected, (seed, path, what)
        shutil.rmtree(out)


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_the_manifest_is_seen(answered: Any, every: int) -> None:
    """A manifest that is not what was written tells nothing; the next batch writes another."""
    run, _, out = answered
    data = (out / "manifest.json").read_bytes()
    with folder_at(out) as folder:
        whole = read_manifest(folder)
        assert whole == {name: value for name, value in json.loads(data).items() if name != "digest"}
        for bit in range(0, 8 * len(data), every):
            folder.write("manifest.json", flip(data, bit))
            assert read_manifest(folder) in ({}, whole), bit
    for text in (b"[" * 200_000, b'{"schema": 3}', b"[]", b"\xff"):
        (out / "manifest.json").write_bytes(text)
        assert counted(run()) == (0, 4, 0)
    DAMAGES["a pipe"](out / "manifest.json")
    assert counted(run()) == (0, 4, 0)
    assert (out / "manifest.json").is_file()


def test_rows_that_go_while_they_are_read_are_an_error(answered: Any) -> None:
    """What a batch told it has is never left out silently, and never read wrongly."""
    run, expected, out = answered
    results = run()
    parts = sorted((out / "parts").iterdir())
    assert sum(1 for _ in results) == len(expected)
    data = parts[1].read_bytes()
    for damage, error in (
        (Path.unlink, TraceNotFoundError),
        (lambda path: path.write_bytes(flip(data, 999)), TraceCorruptError),
        (lambda path: (path.unlink(), os.mkfifo(path)), TraceUnreadableError),
    ):
        damage(parts[1])
        for read in (list, len, lambda found: found.to_arrow(), lambda found: list(found.messages())):
            with pytest.raises(error, match=parts[1].name):
                read(results)
        if parts[1].exists():
            parts[1].unlink()
        parts[1].write_bytes(data)
    large = sorted((out / "arrays").iterdir())[0]
    shutil.rmtree(large)
    write(large, steps=1)
    with (
        TraceReader(large) as other,
        pytest.raises(TraceCorruptError, match=f"has {len(other)} of the 6 large answers"),
    ):
        list(results)


def test_the_command_tells_that_a_part_was_damaged(answered: Any, finished: Any) -> None:
    """In its line, and in a note on stderr."""
    _, _, out = answered
    for path in (out / "parts").iterdir():
        DAMAGES["empty"](path)
    line = ["batch", str(finished[2] / "runs"), "-s", "norm:kind=weights", "--out", str(out), "--workers", "0"]
    ran = CliRunner().invoke(main, line)
    assert ran.exit_code == 0
    assert "2 parts computed, 0 were there already, 0 failed" in ran.stdout
    assert ran.stderr.count("are damaged, so they are computed again") == 2
    planned = json.loads(CliRunner().invoke(main, [*line, "--plan"]).stdout)
    assert planned["totals"]["cached"] == 2
