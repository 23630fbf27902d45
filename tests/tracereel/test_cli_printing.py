"""What commands print: tables that fit a terminal, colours, and names and paths that have no effect on it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from analyze.tables.layout import TextTable
from tests import processes
from tests.tracereel.command_line import ROOT, damage, run, spawn, write
from tracer.messaging.messages import ModuleMessage, NetworkMessage
from tracer.trace.writer import TraceWriter


@pytest.mark.parametrize("plain", [False, True])
def test_no_color(trace: Path, plain: bool, tmp_path: Path) -> None:
    """On a terminal NO_COLOR leaves out colours, bold and the bar, and nothing else."""
    parent, child = os.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "80"} | ({"NO_COLOR": "1"} if plain else {})
    done = processes.Popen(
        spawn("replay", trace, "-s", "norm"), stdout=child, stderr=child, env=environment, cwd=tmp_path
    )
    os.close(child)
    shown = b""
    with suppress(OSError):  # the terminal is closed by the process that ended
        while part := os.read(parent, 65536):
            shown += part
    assert done.wait() == 0
    os.close(parent)
    assert b"weights_norm2" in shown
    assert (b"\x1b" in shown) is not plain
    assert (b"replaying" in shown) is not plain


# -- tables on a terminal -----------------------------------------------------------------------------------------


def test_long_tables_are_plain(tmp_path: Path) -> None:
    """A table of many rows has the same cells as a short one, in aligned columns, and is not left to rich."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for number in range(400):
            data = torch.ones(number % 7 + 1)
            writer.write(
                ModuleMessage(
                    kind="biases", module=f"b{number}\n", data=data, global_step=number, train_step=0, epoch=0
                )
            )
    long, short = run("ls", path).stdout.splitlines(), run("ls", path, "--steps", "0:5").stdout.splitlines()
    assert (len(long), len(short)) == (401, 6)
    assert [line.split() for line in long[:6]] == [line.split() for line in short]
    assert {line.index("float32") for line in long[1:]} == {long[0].index("dtype")}
    call = "main(['ls', sys.argv[1]], standalone_mode=False)"
    code = f"from tracereel.main import main; {call}; print('rich' in sys.modules)"
    done = subprocess.run(spawn(path, code=code), capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


DEEP = ("features.denseblock3.denselayer16.conv2", "encoder.layers.10.attention.output.dense", "fc", "")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with long module paths, which differ in their middle only, several tags, shapes and large numbers."""
    path = tmp_path_factory.mktemp("deep") / "a_run_with_a_name_that_is_rather_long.zarr"
    numbers = itertools.count(85)
    with TraceWriter(path) as writer:
        for step in (0, 100_000, 2_000_000):
            where = {"global_step": step, "train_step": 0, "epoch": 0}
            for module in (*DEEP, DEEP[1].replace("10", "11")):
                for kind, tag in (("weights", "default"), ("weight_gradients", "default"), ("activations", "probe")):
                    data = torch.full((3, 4 if step else 5), float(next(numbers)))
                    writer.write(ModuleMessage(kind=kind, module=module, tag=tag, data=data, **where))
    return path


def dry_run_of(trace: Path) -> dict[str, Any]:
    """What a dry run tells, as if the script recorded the streams of a trace."""
    streams = []
    with tracer.open(trace) as reader:
        for number, one in enumerate(reader.streams):
            told = {name: getattr(one, name) for name in ("kind", "module", "leaf", "tag", "dtype", "shapes")}
            clock = {"clock": "step", "every": number + 1, "burst": 1, "start": 1000 * number, "stop": None}
            streams.append({**told, **clock, "bytes_per_message": 10**number, "messages_per_recorded_step": number})
    numbers = {
        "bytes_per_recorded_step": 1,
        "bytes_per_step": 1.0,
        "run_steps": None,
        "max_overhead": None,
        "max_bytes": None,
        "stop_at_bytes": None,
    }
    return {"streams": streams, **numbers, "estimated_cpu_ratio": None}


LISTINGS = {
    "ls": ("kind", "module", "tag", "rank", "calls", "dtype", "shape", "messages", "steps", "bytes"),
    "plan": ("kind", "module", "tag", "dtype", "recorded", "bytes"),
    "recover": ("kind", "module", "tag", "saved", "lost", "steps lost"),
    "record": ("kind", "module", "tag", "dtype", "shape", "bytes a message", "a step", "recorded"),
    "info": ("run", "status", "steps", "loss", "best loss", "at", "accuracy", "on disk", "verdict", "trace"),
    "subscribers": ("name", "needs", "what it says"),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_tables_fit_the_terminal(name: str, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider, no word or heading is broken, and no row takes more than four lines."""
    script = tmp_path / "train.py"
    script.touch()
    damaged = tmp_path / "damaged.zarr"
    shutil.copytree(deep, damaged)
    for value in (100.0, 101.0):  # one of the weights, one of their gradients
        damage(damaged, torch.full((3, 4), value).numpy().tobytes())
    monkeypatch.setattr("tracer.recording.certifying.rehearsal.dry_run", lambda *_, **__: dry_run_of(deep))
    arguments = {
        "ls": ("ls", deep),
        "plan": ("replay", deep, "-s", "norm:kind=weights", "-s", "norm:kind=activations,tag=probe,as=b", "--plan"),
        "recover": ("recover", damaged, tmp_path / "{}.zarr"),
        "record": ("record", "--dry-run", script),
        "info": ("info", deep, ROOT / "sample_traces/v1/run.h5", ROOT / "sample_traces/v1/run.zarr"),
        "subscribers": ("subscribers",),
    }[name]
    plain = run(*(str(one).format("plain") for one in arguments))
    words = {word for line in plain.stdout.splitlines() for word in line.split()}
    monkeypatch.setattr("tracereel.printing.is_terminal", lambda stream: stream is sys.stdout)
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = run(*(str(one).format(f"shown{width}") for one in arguments))
        assert shown.exit_code == plain.exit_code == (3 if name == "recover" else 0), shown.output
        lines = shown.stdout.splitlines()
        end = next((at for at, line in enumerate(lines) if line.startswith(("would read", "saved", "a step in"))), None)
        check_lines(lines[:end], LISTINGS[name], width, words)


def check_lines(lines: list[str], columns: tuple[str, ...], width: int, words: set[str]) -> None:
    """Check the lines of a table in a terminal of so many columns; `words`: all that stands in it."""
    assert max(map(len, lines)) <= width
    rule = next(at for at, line in enumerate(lines) if line.strip().startswith("──"))
    grouped = lines[0].startswith("  ")
    heading = "\n".join(lines[:rule])
    for column in sorted(columns[grouped:], key=len, reverse=True):
        assert column in heading
        heading = heading.replace(column, "", 1)
    assert not heading.strip(" \n·")
    assert {word for line in lines[rule + 1 :] for word in line.split() if "…" not in word} - {"·"} <= words
    depth = [len(line) - len(line.lstrip()) for line in lines[rule + 1 :]]
    starts = [at for at, indent in enumerate(depth) if indent <= 2 * grouped]
    assert max(after - start for start, after in itertools.pairwise([*starts, len(depth)])) <= 4
    if grouped:
        kinds = [line for line in lines[rule + 1 :] if not line.startswith(" ")]
        assert kinds == list(dict.fromkeys(kinds))
        assert set(kinds) <= {"weights", "weight_gradients", "activations"}


def test_different_modules_look_different(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the paths would be alike in their shortened form, they stand in full above the rows."""
    monkeypatch.setattr("tracereel.printing.is_terminal", lambda stream: stream is sys.stdout)
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = [line.strip() for line in run("ls", deep, "-k", "weights").stdout.splitlines()]
        for layer in (10, 11):
            assert sum(f"encoder.layers.{layer}.attention.output.dense" in line for line in lines) == 1


def test_a_cell_that_is_too_long_ends_with_an_ellipsis() -> None:
    """A row of four lines is cut after a word; one word that is wider than the terminal is shortened."""
    words = [f"word{number}" for number in range(200)]
    table = TextTable(("name", "what"), [("a", " ".join(words)), ("b", "x" * 100)], prose=("what",))
    (heading, _), (below, _), (rule, _), *rows = table.lines(30)
    assert (heading, below, rule) == ("name", "  what", "─" * 30)
    first, second = [line for line, _ in rows[:4]], [line for line, _ in rows[4:]]
    told = " ".join(first).split()
    assert told[0] == "a"
    assert told[-1] == "…"
    assert told[1:-1] == words[: len(told) - 2]
    assert second == ["b", "  " + "x" * 14 + "…" + "x" * 13]
    assert max(len(line) for line, _ in rows) <= 30


# -- names and paths ----------------------------------------------------------------------------------------------


def test_names_have_no_effect_on_a_terminal(tmp_path: Path) -> None:
    """Escapes, line feeds and markup in kinds, modules, tags and leaves are shown on their line, and not obeyed."""
    path = tmp_path / "odd.zarr"
    odd = "\x1b[31m\n"
    with TraceWriter(path) as writer:
        where = {"global_step": 0, "train_step": 0, "epoch": 0, "data": torch.ones(2, 2)}
        for name in ("x\ny", "\x1b[31mred", "a[bold]b"):
            writer.write(ModuleMessage(kind="weights", module=name, **where))
        writer.write(ModuleMessage(kind=f"k{odd}", module=f"m{odd}", tag=f"t{odd}", leaf=f"l{odd}", **where))
    for command in (("cat",), ("ls",), ("info",), ("replay", "-s", "norm")):
        result = run(command[0], path, *command[1:])
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
        for shown in () if command == ("info",) else ("x\\ny", "\\x1b[31mred", "a[bold]b"):
            assert sum(shown in line for line in result.output.splitlines()) == 1
    assert len(run("cat", path).stdout.splitlines()) == 4


def test_json_has_no_effect_on_a_terminal(tmp_path: Path) -> None:
    """What turns the direction of a text, or moves the cursor, is escaped in every JSON, and says the same."""
    odd = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\x9b\x7f\u2028"
    name = f"a{odd}b"
    path = tmp_path / f"run{odd}.zarr"
    with TraceWriter(path, header={"argv": [name]}) as writer:
        where = {"global_step": 0, "train_step": 0, "epoch": 0}
        writer.write(ModuleMessage(kind="weights", module=name, data=torch.ones(2), **where))
    for command in (["info"], ["ls"], ["cat"], ["verify"], ["replay", "-s", "norm"]):
        result = run(command[0], path, *command[1:], "--json")
        assert result.exit_code == 0, result.output
        assert not set(odd) & set(result.stdout)
        if command[0] != "verify":
            assert odd in json.dumps(json.loads(result.stdout), ensure_ascii=False)
    assert not set(odd) & set("".join(run(command, path).output for command in ("info", "ls", "cat")))


def test_names_in_sentences_have_no_effect_on_a_terminal(tmp_path: Path) -> None:
    """What commands say of a damaged trace and of its modules has names escaped, on stdout and in errors."""
    name = "a\u202eb\x1b[31m\nc"
    runs = [tmp_path / "run.zarr", tmp_path / "damaged.zarr"]
    weights = torch.arange(1.0, 51.0)
    for run_number, path in enumerate(runs):
        with TraceWriter(path) as writer:
            for step in range(30):
                where = {"global_step": step, "train_step": step, "epoch": 0}
                writer.write(ModuleMessage(kind="weights", module=name, data=weights + step, **where))
                changed = weights * (float("nan") if run_number and step == 20 else 1)
                writer.write(ModuleMessage(kind="weight_gradients", module=name, data=changed, **where))
    damage(runs[1], (weights + 25).numpy().tobytes())
    shown = ""
    for words in (
        ("verify", runs[1]),
        ("check", runs[1]),
        ("check", *runs),
        ("diff", *runs),
        ("blame", runs[1]),
        ("cat", runs[1]),
        ("replay", runs[1], "-s", "norm"),
        ("replay", runs[0], "-s", "update_ratio", "--plan"),
        ("recover", runs[1], tmp_path / "saved.zarr"),
    ):
        result = run(*words)
        assert not {"\u202e", "\x1b"} & set(result.output), result.output
        shown += result.output
    assert shown.count("a\\u202eb\\x1b[31m\\nc") >= 4


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_answers_about_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    """The path stands in the answers with escapes, and JSON is JSON; a batch has the answers of all traces."""
    odd = tmp_path / os.fsdecode(b"caf\xe9.zarr")
    with TraceWriter(odd) as writer:
        writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), global_step=0, train_step=0, epoch=0))
    for suffix in ("csv", "jsonl", "parquet"):
        told = run("replay", odd, "-s", "statistics:kind=loss", "--out", tmp_path / f"out.{suffix}")
        assert told.exit_code == 0, told.output
    assert str(odd).encode(errors="backslashreplace") in (tmp_path / "out.csv").read_bytes()
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["trace"] == str(odd)
    assert json.loads(run("info", odd, "--json").output)["path"] == str(odd)
    told = run("batch", tmp_path, "-s", "statistics:kind=loss", "--out", tmp_path / "results")
    assert told.exit_code == 0, told.output
    assert json.loads((tmp_path / "results" / "manifest.json").read_bytes())["traces"][0]["trace"] == str(odd)


def test_paths_are_told_as_they_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path stays relative in errors, in `info` and in tables; a full one stays full; JSON has full ones."""
    write(tmp_path / "run.zarr")
    monkeypatch.chdir(tmp_path)
    for typed, found in (("none.zarr", "none.zarr"), (str(tmp_path / "none.zarr"), str(tmp_path / "none.zarr"))):
        assert f" {found}" in (stderr := run("ls", typed).stderr)
        assert (str(tmp_path) in stderr) is (found == str(tmp_path / "none.zarr"))
    assert "run.zarr (" in run("info", "run.zarr").stdout.splitlines()[0]
    assert str(tmp_path) not in run("info", "run.zarr").stdout
    assert json.loads(run("info", "run.zarr", "--json").stdout)["path"] == str(tmp_path / "run.zarr")
    row = json.loads(run("replay", "run.zarr", "-s", "loss", "--json").stdout.splitlines()[0])
    assert row["trace"] == "run.zarr"
    damage(tmp_path / "run.zarr")
    damaged = run("verify", "run.zarr")
    assert damaged.exit_code == 3
    assert str(tmp_path) not in damaged.output
