"""The page docs/semantics.md and the tests of the situations that it lists agree."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def test_the_page_names_every_test() -> None:
    """Each section of docs/semantics.md names the tests of one file, all of them, but that of compiled models.

    And each test trains a second time without a recorder, as the page says.
    """
    page = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text(encoding="utf-8")
    page = re.sub("\n## Inside `torch.compile`\n.*?(?=\n## )", "", page, flags=re.DOTALL)
    sections = [set(re.findall(r"`(test_\w+)`", section)) for section in page.split("\n## ")]
    files = []
    for path in Path(__file__).parent.glob("test_semantics_*.py"):
        source = path.read_text(encoding="utf-8")
        tests = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name[:5] == "test_"]
        assert [one.name for one in tests if "unchanged(" not in str(ast.get_source_segment(source, one))] == []
        files.append({one.name for one in tests})
    assert sorted(map(sorted, files)) == sorted(map(sorted, filter(None, sections)))
