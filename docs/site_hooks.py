"""What the site adds to the pages of docs/: the reference of the API, the files beside docs/, and formulas.

The pages are written for a reader of the repository, on whose host they look as they are: nothing in them is for this
site. MkDocs calls the functions whose names begin with ``on_``; mkdocs.yml names this file.
"""

from __future__ import annotations

import html
import os.path
import re
from collections.abc import Iterator
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import analyze
import tracer

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)\s#:]+)")
FENCE = re.compile(r"( *)(`{3,})")
FORMULA = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>|:math:<code>(.*?)</code>', re.DOTALL)
"""A formula of a page, and one of a docstring."""


TRACER = {
    "Record": ("tracer.recording", "tracer.observing"),
    "Read, replay, keep": ("tracer.replaying", "tracer.trace", "tracer.upkeep"),
    "Messages and subscribers": ("tracer.messaging",),
    "Errors": ("tracer.errors",),
}
ANALYZE = {
    "Ask": ("analyze.asking", "analyze.registry", "analyze.tables", "analyze.batching"),
    "Check": ("analyze.seeing", "analyze.rules"),
    "Compare": ("analyze.comparing",),
}
METRICS = {"Functions and subscribers": ("analyze.metrics",)}
"""For each page of the reference its headings, and the modules whose public names stand below each."""


def reference(package: str, title: str, groups: dict[str, tuple[str, ...]], homes: dict[str, str]) -> str:
    """A page of the reference: the public names of a package whose modules are in one of the groups."""
    text = [f"# {title}", f"Every name is also in `tracereel`: `from tracereel import {package}`, or `tracereel.NAME`."]
    if package == "tracer":
        text[1] = "Every name is also in `tracereel`: `tracereel.record` is `tracer.record`."
    for heading, modules in groups.items():
        text.append(f"## {heading}")
        text += [f"::: {package}.{name}" for name, home in sorted(homes.items()) if home.startswith(modules)]
    return "\n\n".join(text) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and the files of the project that pages name."""
    pages = {
        "api/tracer.md": reference("tracer", "tracer", TRACER, tracer.HOMES),
        "api/analyze.md": reference("analyze", "analyze", ANALYZE, analyze.HOMES),
        "api/metrics.md": reference("analyze", "Metrics in Python", METRICS, analyze.HOMES),
    }
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for there in linked(page.read_text(encoding="utf-8"), page):
            if not there.is_relative_to(ROOT / "docs"):
                name = there.relative_to(ROOT)
                text = there.read_text(encoding="utf-8")
                pages[place_of(there)] = text if there.suffix == ".md" else f"# {name}\n\n````python\n{text}````\n"
    for uri, text in pages.items():
        level = InclusionLevel.UNDEFINED if uri.startswith("api/") else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, content=text, inclusion=level))
    return files


def linked(text: str, page: Path) -> Iterator[Path]:
    """The files of the project that a page links to."""
    for target in LINK.findall(text):
        there = Path(os.path.normpath(page.parent / target))
        if there.is_file() and there.is_relative_to(ROOT):
            yield there


def place_of(there: Path) -> str:
    """Where the site has a file of the project."""
    if there.is_relative_to(ROOT / "docs"):
        return there.relative_to(ROOT / "docs").as_posix()
    return f"project/{there.relative_to(ROOT)}" + ("" if there.suffix == ".md" else ".md")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the site has a file, and write lists as Python's Markdown reads them."""
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix("project/") if uri.startswith("project/") else ROOT / "docs" / uri
    if uri == "README.md":  # the first page of the site
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        markdown = moved(readme, ROOT / "README.md", uri) + "\n\n#" + markdown.replace("\n#", "\n##")
    return indented(moved(markdown, source, uri))


def moved(markdown: str, source: Path, uri: str) -> str:
    """The text of a file, with links as from a page of the site."""

    def link(found: re.Match[str]) -> str:
        there = next(linked(found[0], source), None)
        return found[0] if there is None else f"]({os.path.relpath(place_of(there), os.path.dirname(uri) or '.')}"

    return LINK.sub(link, markdown)


def indented(markdown: str) -> str:
    """Markdown whose lists are nested by four spaces, as this Markdown wants, where others take two."""
    lines, fence, more = [], "", 0
    for line in markdown.splitlines():
        found = FENCE.match(line)
        if fence:
            lines.append(" " * more + line if line else line)
            fence = "" if found and found[2] == fence else fence
            continue
        more = len(line) - len(line.lstrip())
        fence = found[2] if found else ""
        lines.append(" " * more + line)
    return "\n".join(lines) + "\n"


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers draw by themselves."""
    return FORMULA.sub(lambda found: convert(html.unescape(found[1] or found[2])), content)
