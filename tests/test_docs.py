"""The documentation is true: its commands and programs run, its links lead somewhere, and the README is short."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from tests import processes
from tracereel.main import main

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
RECORD = "trace record --every 5 --out digits.zarr examples/digits.py --epochs 1"


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(*command: str) -> str:
    """What a program prints that is to end well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = processes.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def examples(folder: Path) -> Path:
    """A folder in which the pages' commands find the examples."""
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder in which a page's ``trace record`` has run, once for all pages that show the same."""

    @functools.cache
    def record(line: str) -> Path:
        folder = examples(tmp_path_factory.mktemp("recorded"))
        with contextlib.chdir(folder), mock.patch.dict(os.environ):
            del os.environ["TRACE_RECORD_PROFILE"]  # a reader has none
            run(sys.executable, str(ROOT / "cli.py"), *shlex.split(line, comments=True)[1:])
        return folder

    return record


@pytest.mark.parametrize(
    ("page", "commands", "says"),
    [
        ("README.md", 5, "activations_sparsity"),
        ("docs/tutorial.md", 11, "weights_spectral_norm"),
        ("docs/recording.md", 1, ""),
        ("docs/asking.md", 7, "weights_spectral_norm 0 0"),
        ("docs/seeing.md", 2, ""),
        ("docs/datasets.md", 2, "datapoints of 6, input_labels"),
    ],
)
def test_what_a_page_shows_runs(
    page: str,
    commands: int,
    says: str,
    recorded: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each ``trace`` line of a page, one after the other, then its Python blocks as one program."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    examples(tmp_path)
    lines = [line for block in blocks(ROOT / page, "sh") for line in block.splitlines() if line.startswith("trace ")]
    lines = [line for line in lines if not line.startswith("trace view")]  # which serves until somebody ends it
    assert len(lines) >= commands
    if not any(line.startswith("trace record") for line in lines):
        lines = [RECORD, *lines]
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "record":  # runs the script in its own process
            there = shutil.ignore_patterns("examples")
            shutil.copytree(recorded(line), tmp_path, ignore=there, dirs_exist_ok=True)
        else:
            with processes.forked():  # scripts that run steps again
                done = CliRunner().invoke(main, words)
            # of steps run again, a busy machine may have kept no hashes, and then they are verified only in part
            assert done.exit_code in ((0, 7) if "--reenact" in words else (0,)), f"{line}: {done.output}"
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks(ROOT / page, "python")), encoding="utf-8")
    assert says in run(sys.executable, "-W", "error", str(program))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "llms.txt"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """A link to a file names one that is there, and an anchor a heading of it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def test_every_page_is_in_the_index() -> None:
    """docs/README.md leads to each page beside it."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_the_readme_is_short() -> None:
    """A newcomer reads it in four minutes."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_prose_end(page: Path) -> None:
    """Lines of prose have at most 120 characters; rows of tables, headings and lines of code may have more."""
    if page.name in ("metrics.md", "rules.md"):
        return  # made of docstrings, whose lines the linter bounds
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")]
    assert not long, long[0]
