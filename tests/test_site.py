"""The site that `make site` builds: without a warning, so with no dead link, and with nothing of another host."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests import processes

for package in ("latex2mathml", "material", "mkdocs_jupyter", "mkdocstrings_handlers.python"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = processes.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr  # a dead link or anchor is a warning, and a warning fails
    assert "WARNING" not in done.stderr
    return folder


def test_the_reference_has_every_public_name_and_its_parameters(site: Path) -> None:
    """Each name has a heading; below that of `tracer.record` stand its parameters."""
    import analyze
    import tracer

    pages = {
        name: (site / "api" / f"{name}.html").read_text(encoding="utf-8") for name in ("tracer", "analyze", "metrics")
    }
    together = "".join(pages.values())
    names = [f"{package.__name__}.{name}" for package in (tracer, analyze) for name in package.__all__]
    assert [name for name in names if f'id="{name}"' not in together] == []
    (record,) = re.findall(r'id="tracer\.record".*?<h3', pages["tracer"], re.DOTALL)
    for parameter in ("optimizer", "capture", "max_bytes", "overwrite"):
        assert f"<code>{parameter}</code>" in record, parameter


def test_the_search_finds_what_pages_say(site: Path) -> None:
    """The index has a word of a page, a name of the reference and a sentence of a notebook."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    pages = ("checking", "notebooks")
    said = {page: " ".join(one["text"] for one in index if one["location"].startswith(page)) for page in pages}
    assert "verdict" in said["checking"]
    assert "Record a training in a notebook" in said["notebooks"]
    assert "api/tracer.html#tracer.record" in {one["location"] for one in index}


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    """Scripts, styles, fonts and pictures are the site's own; formulas are drawn without any."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'(?:src|<link[^>]*href)="((?:https?:)?//[^"]*)"', text)
        assert not loaded, (page, loaded)
        assert "arithmatex" not in text, page
        assert ":math:" not in text or page.is_relative_to(site / "project"), page  # which has source as it is
