"""``--json``: every answer has a schema, every failure is an object; ``tests/answers.py`` checks all other tests."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner

import tracer.errors
from analyze.seeing import server
from tests import answers
from tests.tracereel.command_line import ROOT, damage, run, write
from tracer.errors import TracerError
from tracer.messaging.messages import ModuleMessage
from tracer.trace.writer import TraceWriter
from tracereel.agents import schemas
from tracereel.command import Refusal, error_as_json
from tracereel.main import HOMES, main

SAMPLES = ROOT / "sample_traces" / "v1"
PAGE = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")


def parts(schema: Any) -> Any:
    """A schema and all in it."""
    yield schema
    for one in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from parts(one)


def test_every_command_with_json_has_a_schema_and_a_row() -> None:
    """And no other; the page names the version that the schema has."""
    with_json = {
        name for name in HOMES for option in main.commands[name].params if "--json" in getattr(option, "opts", ())
    }
    titled = {name for name, schema in schemas()["$defs"].items() if "title" in schema}
    assert titled == with_json | {"error"}
    assert set(re.findall(r"^\| `trace (\w+)", PAGE, re.MULTILINE)) == with_json
    assert f"version {schemas()['$id'].rpartition(':')[2]}" in PAGE


def test_the_schemas_are_strict() -> None:
    """An object with fields of ours has no others, and all of them unless it says so."""
    jsonschema.Draft202012Validator.check_schema(schemas())
    described = [one for one in parts(schemas()["$defs"]) if isinstance(one, dict) and "properties" in one]
    assert len(described) > 40
    assert all(one["additionalProperties"] is False for one in described if isinstance(one["properties"], dict))
    with pytest.raises(jsonschema.ValidationError):
        answers.check(["ls", "--json"], json.dumps([{"kind": "loss"}]))


@pytest.mark.parametrize("line", [
    "info run.zarr", "info run.h5 types.zarr", "info . --quick", "ls run.h5", "cat types.zarr --values 3",
    "check run.zarr", "check .", "blame run.zarr", "blame run.zarr --step 2", "diff run.zarr types.zarr --complete",
    "verify run.h5", "replay run.zarr -s norm --steps 0:1", "replay run.zarr -s norm --plan",
    "subscribers svcca", "rules", "rules dead_units", "schema check",
])  # fmt: skip
def test_answers_of_sample_traces(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `run` checks; numbers that are not finite are texts, in every dtype."""
    monkeypatch.chdir(SAMPLES)
    result = run(*line.split(), "--json")
    assert result.exit_code in (0, 1), result.output
    (first, *_) = answers.documents(result.stdout)
    assert first if line != "check ." else len(first) == 4


def test_numbers_that_are_not_finite_are_texts(tmp_path: Path) -> None:
    """They are in the schema, and `float` reads them."""
    data = torch.tensor([float("nan"), float("inf")])
    with TraceWriter(tmp_path / "run.zarr") as writer:
        writer.write(ModuleMessage(kind="weights", module="", data=data, global_step=0, train_step=0, epoch=0))
    for words in (("cat", "--values", 2), ("check",), ("replay", "-s", "norm"), ("blame",)):
        result = run(words[0], tmp_path / "run.zarr", *words[1:], "--json")
        assert result.exit_code == 0, result.output
    (told,) = answers.documents(run("cat", tmp_path / "run.zarr", "--values", 2, "--json").stdout)
    assert (told["values"], told["max"]) == (["NaN", "Infinity"], "NaN")


@pytest.mark.parametrize(("line", "code", "status"), [
    ("info none.zarr", "trace_missing", 1),
    ("info run.txt", "not_a_trace", 1),
    ("cat damaged.zarr", "trace_damaged", 3),
    ("cat run.zarr -k wieghts", "unknown_name", 2),
    ("replay run.zarr -s nrom", "unknown_name", 2),
    ("replay run.zarr -s norm:x=1", "wrong_value", 2),
    ("replay run.zarr -s hessian_trace", "not_possible", 2),
    ("convert run.zarr run.zarr", "already_there", 1),
    ("blame run.zarr --step 99", "not_possible", 1),
    ("check", "usage", 2),
    ("ls run.zarr --steps x", "usage", 2),
    ("ls run.zarr --nope", "usage", 2),
    ("nope", "usage", 2),
    ("--nope", "usage", 2),
    ("record train.py", "usage", 2),
    ("reenact --steps 3:1 run.zarr train.py", "usage", 2),
    ("replay run.zarr -s norm --steps 1:2 --reenact train.py --plan", "not_possible", 2),
    ("schema nope", "unknown_name", 2),
])  # fmt: skip
def test_a_failure_is_one_object(
    line: str, code: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stdout, on its last line; stderr and the exit code are those of the command without ``--json``."""
    monkeypatch.chdir(tmp_path)
    damage(write(tmp_path / "damaged.zarr"))
    write(tmp_path / "run.zarr")
    Path("run.txt").write_text("text")
    Path("train.py").write_text("raise SystemExit('must not run')")
    name, *words = line.split()
    result, plain = run(name, "--json", *words), run(name, *words)
    (*lines, last) = result.stdout.splitlines()
    told = json.loads(last)["error"]
    assert (told["code"], told["exit"], result.exit_code) == (code, status, status)
    assert lines == [] or line.startswith("cat damaged")
    if "record" not in line:  # which has no --json but for a dry run
        assert (plain.exit_code, plain.stderr) == (status, result.stderr)
        assert told["message"] in plain.stderr.replace("\n", " ") or told["message"] in plain.stderr
        assert "error" not in plain.stdout


def test_words_of_a_script_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--json`` behind a script asks the command for nothing."""
    monkeypatch.chdir(tmp_path)
    for line in ("record none.py --json", "reenact run.zarr --steps 1 none.py --json"):
        result = CliRunner().invoke(main, line.split())
        assert (result.exit_code, result.stdout) == (1, "")
        assert "none.py is not a file" in result.stderr


def test_an_interrupted_command_says_so(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a failure with the exit code of an interrupt."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tracer, "open", interrupt)
    result = run("ls", trace, "--json")
    assert (json.loads(result.stdout)["error"]["code"], result.exit_code) == ("interrupted", 130)
    assert run("ls", trace).stderr == "interrupted\n"


def test_every_error_has_a_word() -> None:
    """Of the schema, and its own; other exceptions are unexpected, and an unknown refusal has failed."""
    classes = [one for _, one in inspect.getmembers(tracer.errors, inspect.isclass) if issubclass(one, TracerError)]
    told = {one: error_as_json(one("no")) for one in classes}
    for answer in told.values():
        answers.validator("error").validate(answer)
    assert len({answer["error"]["code"] for answer in told.values()}) == len(classes) > 10
    assert error_as_json(ValueError("no"))["error"]["code"] == "unexpected"
    assert error_as_json(Refusal("no", 77))["error"] == {"code": "failed", "exit": 77, "message": "no", "hint": None}
    known = schemas()["$defs"]["error"]["properties"]["error"]["properties"]["code"]["enum"]
    assert set(known) == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_a_plot_says_what_it_wrote(trace: Path, tmp_path: Path) -> None:
    """Its path and the answers; nothing of a damaged trace but what comes before, and nothing where nothing is."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "norm.png"
    told = json.loads(run("plot", trace, "-s", "norm", "--out", out, "--json").stdout)
    assert told == {"out": str(out), "answers": 24, "traces": [str(trace)], "damage": ""}
    assert out.read_bytes().startswith(b"\x89PNG")
    none = run("plot", trace, "-s", "svcca:tag=eval", "--out", tmp_path / "none.png", "--json")
    assert none.exit_code == 2
    damage(path := write(tmp_path / "run.zarr"))
    torn = run("plot", path, "-s", "norm", "--out", tmp_path / "torn.png", "--json")
    assert torn.exit_code == 3
    assert json.loads(torn.stdout)["damage"].endswith("fails its checksum")
    assert torn.stderr.startswith("Error: ")


def test_a_view_says_its_address(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one line, when the page can be had."""
    pytest.importorskip("bokeh")

    def view(*_: object, opened: Any, **__: object) -> None:
        opened("http://127.0.0.1:1/secret")

    monkeypatch.setattr(server, "view", view)
    result = run("view", trace, "--no-open", "--json")
    assert result.stdout == '{"url": "http://127.0.0.1:1/secret"}\n'


def test_a_demo_says_its_files_and_findings(tmp_path: Path) -> None:
    """And nothing else on stdout."""
    for needed in ("sklearn", "matplotlib", "bokeh"):
        pytest.importorskip(needed)
    result = run("demo", "--out", tmp_path / "shown", "--epochs", "1", "--json")
    (told,) = answers.documents(result.stdout)
    assert [Path(one["path"]).name for one in told["files"]] == ["digits.zarr", "digits.png", "digits.html"]
    assert told["trace"] == str(tmp_path / "shown/digits.zarr")
    assert {"not_finite", "unchanged"} <= set(told["coverage"])
