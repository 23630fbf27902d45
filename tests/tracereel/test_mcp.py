"""``trace mcp``: the SDK's client asks the real server over stdio: it answers as commands do, in its folders only."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import answers
from tests.tracereel.command_line import ROOT, run, snapshot, write
from tracereel.agents import TOOLS, MCPTools, OpenFolders, bounded
from tracereel.command import Refusal

pytest.importorskip("mcp.server.mcpserver")  # version 2 has it
mcp, anyio = pytest.importorskip("mcp"), pytest.importorskip("anyio")


def asked(folders: list[Path], calls: list[tuple[str, dict[str, Any]]]) -> tuple[list[Any], list[tuple[bool, Any]]]:
    """The tools of a server of its own, and of each call whether it failed, and its result."""
    server = mcp.StdioServerParameters(
        command=sys.executable,
        args=[str(ROOT / "cli.py"), "mcp", *map(str, folders)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    async def ask() -> tuple[list[Any], list[tuple[bool, Any]]]:
        async with mcp.Client(mcp.stdio_client(server)) as client:
            tools = (await client.list_tools()).tools
            results = [await client.call_tool(name, arguments) for name, arguments in calls]
        for result in results:
            assert result.structured_content == json.loads(result.content[0].text)
        return tools, [(bool(result.is_error), result.structured_content) for result in results]

    return anyio.run(ask)  # type: ignore[no-any-return]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs in a folder, a link in it that leads out, and a trace in it with such a link."""
    write(tmp_path / "runs" / "a.zarr")
    write(tmp_path / "runs" / "deep" / "b.h5")
    secret = write(tmp_path / "secret.zarr")
    (tmp_path / "runs" / "link.zarr").symlink_to(secret)
    (tmp_path / "runs" / "folder").symlink_to(tmp_path)
    mixed = shutil.copytree(secret, tmp_path / "runs" / "mixed.zarr")
    shutil.rmtree(mixed / "rank0" / "pools")
    (mixed / "rank0" / "pools").symlink_to(secret / "rank0" / "pools")
    (tmp_path / "runs" / "unfinished.h5.zarr").symlink_to(secret)
    return tmp_path / "runs"


def test_the_tools_answer_as_the_commands_do(runs: Path) -> None:
    """The same JSON, of paths that are absolute or relative to a folder; nothing is written."""
    a, b = runs / "a.zarr", runs / "deep" / "b.h5"
    before = snapshot(runs)
    calls = {
        "runs": {"path": "a.zarr"},
        "streams": {"trace": "a.zarr", "kinds": ["weights"], "steps": "2:4"},
        "check": {"trace": str(b), "rules": ["not_finite"]},
        "blame": {"trace": "./deep/../a.zarr", "step": 9},
        "diff": {"a": str(a), "b": "deep/b.h5"},
        "values": {"trace": "a.zarr", "metrics": ["norm"], "modules": ["conv*"], "rows": 200},
    }
    lines = {
        "streams": ("ls", a, "-k", "weights", "--steps", "2:4"),
        "check": ("check", b, "--rule", "not_finite"),
        "blame": ("blame", a, "--step", 9),
        "diff": ("diff", a, b),
        "values": ("replay", a, "-s", "norm", "-m", "conv*"),
    }
    more = [
        ("runs", {}),
        ("values", {"trace": "a.zarr", "kinds": ["loss"], "rows": 3}),
        ("blame", {"trace": "deep/b.h5"}),
    ]
    tools, results = asked([runs], [*calls.items(), *more, ("reenact_plan", {"trace": "a.zarr", "steps": "3:5"})])
    assert tuple(tool.name for tool in tools) == TOOLS
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools)
    for (name, line), (failed, told) in zip(lines.items(), results[1:6], strict=True):
        printed = [*answers.documents(run(*line, "--json").stdout)]
        assert (failed, told["left_out"]) == (False, {})
        assert told["answer"] == (printed if name == "values" else printed[0])
    (one, several, three, _, plan) = (results[0], *results[6:])
    assert one[1]["answer"][0] == json.loads(run("info", a, runs / "deep", "--json").stdout)[0]
    assert [Path(told["path"]).name for told in several[1]["answer"]] == ["a.zarr", "b.h5"]
    assert "header" not in several[1]["answer"][0]
    assert [message["global_step"] for message in three[1]["answer"]] == [0, 1, 2]
    assert three[1]["left_out"] == {"": 9}
    assert plan[0]
    assert "has no keyframe at or before step 3" in plan[1]["error"]["message"]
    answers.validator("error").validate(plan[1])
    assert snapshot(runs) == before


@pytest.mark.parametrize("given", [
    "../secret.zarr", "deep/../../secret.zarr", "{parent}/secret.zarr", "link.zarr", "folder/secret.zarr", "mixed.zarr",
    "unfinished.h5",
    "file://{parent}/secret.zarr", "s3://bucket/run.zarr", "https://example.org/run.zarr", "@{parent}/list.txt",
    "/etc/passwd", "a.zarr\0", "..", "folder",
])  # fmt: skip
def test_nothing_outside_of_the_folders_is_read(given: str, runs: Path) -> None:
    """By no path, link, list or URL; the sentence names what was given."""
    (runs.parent / "list.txt").write_text("secret.zarr\n")
    folders = OpenFolders([str(runs)])
    given = given.format(parent=runs.parent)
    with pytest.raises(Refusal, match="nothing else may be read"):
        folders.path(given)
    tools = MCPTools(folders)
    for ask in (tools.streams, tools.check, tools.blame, tools.values, tools.runs):
        with pytest.raises(Refusal, match="nothing else may be read"):
            ask(given)
    for pair in ((given, "a.zarr"), ("a.zarr", given)):
        with pytest.raises(Refusal, match="nothing else may be read"):
            tools.diff(*pair)
    assert folders.traces(".") == folders.traces(str(runs)) == folders.traces(None)
    assert folders.traces(None) == [str(runs / "a.zarr"), str(runs / "deep" / "b.h5")]


def test_the_server_refuses_in_a_sentence(runs: Path) -> None:
    """An escape, code of a file, a step that is no number, a name: tool errors, after which it goes on."""
    (runs / "mine.py").write_text("raise SystemExit('must not run')\n")
    calls = [
        ("check", {"trace": "../secret.zarr"}),
        ("check", {"trace": "link.zarr"}),
        ("values", {"trace": "a.zarr", "metrics": [f"{runs}/mine.py:Mine"]}),
        ("check", {"trace": "a.zarr", "rules": [f"{runs}/mine.py:Mine"]}),
        ("values", {"trace": "a.zarr", "steps": "x"}),
        ("streams", {"trace": "a.zarr", "kinds": ["wieghts"]}),
        ("streams", {"trace": "none.zarr"}),
        ("streams", {"trace": "a.zarr", "kinds": ["loss"]}),
    ]
    _, results = asked([runs], calls)
    codes = ["outside", "outside", "unknown_name", "unknown_name", "usage", "unknown_name", "trace_missing"]
    assert [told["error"]["code"] for failed, told in results[:-1] if failed] == codes
    assert str(runs.parent / "secret.zarr") not in json.dumps(results)
    assert results[-1][1]["answer"][0]["kind"] == "loss"


def test_a_name_that_is_no_text_is_told(runs: Path) -> None:
    """Bytes of a path that are not UTF-8 are sent as question marks; a folder may have a dot in its name."""
    folder = runs.rename(runs.with_name(os.fsdecode(b"runs.\xff")))
    shutil.rmtree(folder / "deep")
    _, results = asked([folder], [("runs", {"quick": True})])
    assert [one["path"] for one in results[0][1]["answer"]] == [f"{runs.parent}/runs.?/a.zarr"]
    with pytest.raises(Refusal, match="is no folder"):
        OpenFolders([str(folder / "a.h5")])


def test_answers_are_bounded() -> None:
    """In entries, texts and characters; what is left out is counted."""
    told = bounded({"streams": [{"shapes": [[1] * 500]}] * 300, "text": "x" * 9000})
    assert len(json.dumps(told)) <= 100_000
    kept = len(told["answer"]["streams"])
    assert told["left_out"]["streams"] == 300 - kept
    assert len(told["answer"]["streams"][0]["shapes"][0]) == min(500, kept)
    assert len(told["answer"]["text"]) == 2001
    assert bounded([float("nan")]) == {"answer": ["NaN"], "left_out": {}}
    with pytest.raises(Exception, match="ask about less"):
        bounded({str(number): "x" * 1000 for number in range(200)})
