"""Prints the tests of what changed since the last commit: ``make check`` runs them.

A changed test stands for itself. Any other changed file stands for its doctests and for the test files that have its
name alone, first or last (`exporter.py` for all `test_exporter_*.py`, `losses.py` for `test_exporter_losses.py`);
where there are none, for the test files that import it. A file below `analyze/metrics/` also stands for the tests that
walk all metrics.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
OF_ALL_METRICS = [ROOT / "tests" / "analyze" / "metrics" / f"test_{name}.py" for name in ("registry", "catalogue")]


def changed() -> list[Path]:
    """The Python files that differ from the last commit or are new to git."""
    names: list[str] = []
    for command in (("diff", "--name-only", "--diff-filter=d", "HEAD"), ("ls-files", "--others", "--exclude-standard")):
        names += subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [ROOT / name for name in dict.fromkeys(names) if name.endswith(".py")]


def tests_of(path: Path) -> list[Path]:
    """The test files that look at a file."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    if path in tests:
        return [path]
    named = [test for test in tests if re.fullmatch(rf"test_(\w+_)?{path.stem}|test_{path.stem}_\w+", test.stem)]
    module = re.escape(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    importing = [test for test in tests if re.search(rf"\b{module}\b(?!\.)", test.read_text(encoding="utf-8"))]
    with_doctests = [path] if ">>> " in path.read_text(encoding="utf-8") else []
    is_metric = path.is_relative_to(ROOT / "analyze" / "metrics")
    return with_doctests + (named or importing) + (OF_ALL_METRICS if is_metric else [])


if __name__ == "__main__":
    for test in dict.fromkeys(test for path in changed() for test in tests_of(path)):
        print(test.relative_to(ROOT))
