"""``trace report``: the verdict on stdout, the page in a file, faults as a sentence and an exit code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.analyze.seeing.runs import flip, messages, write
from tracereel.main import main


def run(*arguments: object) -> Result:
    """Call the command line in this process."""
    return CliRunner().invoke(main, ["report", *map(str, arguments)], prog_name="trace")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A small trace with a fault."""
    return write(tmp_path / "run.zarr", messages(("fc1", "fc2"), 26, spike=("fc1", 24)))


def test_a_report_has_the_name_of_its_trace(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written here, and never over another without being told."""
    monkeypatch.chdir(trace.parent)
    done = run("run.zarr")
    assert done.exit_code == 0, done.output
    verdict, file = done.stdout.splitlines()
    assert "fc1" in verdict
    assert file.startswith("run.html  1.")
    assert verdict.partition(": ")[2] in (trace.parent / "run.html").read_text(encoding="utf-8")
    again = run("run.zarr")
    assert again.exit_code == 1
    assert "run.html is already there; --overwrite replaces it" in again.stderr
    assert run("run.zarr", "--overwrite", "-s", "spectral_norm").exit_code == 0


def test_a_report_as_json(trace: Path) -> None:
    """What it found, and where the page is."""
    out = trace.parent / "deep" / "page.html"
    done = run(trace, trace, "-o", out, "--json", "-s", "cka:tag=probe")
    told = json.loads(done.stdout)
    assert told["report"] == str(out)
    assert out.is_file()
    assert {one["module"] for one in told["findings"]} == {"fc1"}
    assert {one["first"] for one in told["findings"]} == {24}
    assert told["damage"] == ""
    assert told["remarks"][0].startswith("cka needs activations")
    assert set(told["silent"]).isdisjoint(told["unjudged"])


def test_a_damaged_trace_has_a_report(trace: Path) -> None:
    """Of what can be read; and the exit code says so."""
    made = messages(("fc1", "fc2"), 26, spike=("fc1", 24))
    flip(trace, made[6].data.numpy().tobytes())  # type: ignore[union-attr] # a weight
    out = trace.parent / "page.html"
    done = run(trace, "-o", out)
    assert done.exit_code == 3
    assert "left out for that: weights; the report shows what could be read" in done.stderr
    assert out.is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("nowhere.zarr", "-o", "page.html"), 1, "nowhere.zarr"),
        (("run.zarr", "-o", "page.pdf"), 2, "it is '.pdf', and can be .html"),
        (("run.zarr", "-o", "run.zarr/page.html"), 1, "belongs to the trace"),
        (("run.zarr", "-s", "nothing"), 2, "nothing"),
        (("run.zarr", "-s", "spectral_norm:x=1"), 2, "spectral_norm has no parameter 'x'"),
        (("run.zarr", "--rank", "4"), 2, "nothing of rank 4"),
        (("run.zarr", "gone.zarr"), 1, "gone.zarr"),
    ],
)
def test_a_mistake_is_a_sentence(
    trace: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    """And leaves no page."""
    monkeypatch.chdir(trace.parent)
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(file.name for file in trace.parent.iterdir()) == ["run.zarr"]


def test_without_bokeh(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says which extra brings it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bokeh" else find(name))
    done = run(trace, "-o", trace.parent / "page.html")
    assert done.exit_code == 1
    assert "a report needs bokeh, which is not installed: pip install 'tracereel[report]'" in done.stderr
