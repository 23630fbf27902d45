"""Who may import whom, what an import costs, and what must not be in the source: laws 9 and 10 of the architecture."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tracer", "analyze", "tracereel")
SOURCES = sorted([ROOT / "cli.py", *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))])

NOT_NAMES = {"utils", "helpers", "common", "base", "core", "misc", "manager", "factory"}

# The floors of the house, from the ground up. A folder (or a module) imports what is in itself and on lower floors,
# never what is on its own floor or above.
FLOORS: list[set[str]] = [
    {"tracer.secrets", "tracer.memory", "tracer.walking", "tracer.version", "tracer.shown"},
    {"tracer.errors"},
    {"tracer.numbers"},
    {"tracer.messaging"},
    {"tracer.format"},
    {"tracer.stores"},
    {"tracer.trace", "tracer.observing.pytorch"},
    {"tracer.observing"},
    {"tracer.recording", "tracer.replaying", "tracer.upkeep"},
    {"tracer.recording.launching"},
    {"tracer.recording.certifying", "tracer.recording.reenacting"},
    {"tracer.integrations", "tracer.recorders"},
    {"tracer"},
    {"analyze.metrics"},
    {"analyze.rules"},
    {"analyze.registry"},
    {"analyze.tables", "analyze.traces"},
    {"analyze.asking", "analyze.comparing"},
    {"analyze.batching", "analyze.seeing"},
    {"analyze"},
    {"analyze.catalogue", "analyze.rulebook", "analyze.demo"},
    {"tracereel"},
    {"cli"},
]


# Lines of product code by folder, without blank lines, comments and docstrings: at most so many, and who deletes code
# lowers the number. Whoever raises one writes the reason beside it.
LINES = {
    "analyze": 824,
    "analyze/batching": 2182,  # progress for other programs, refused and lost jobs, a dashboard
    "analyze/comparing": 2322,
    "analyze/metrics": 7069,
    "analyze/rules": 3070,
    "analyze/seeing": 3462,  # runs beside each other
    "analyze/tables": 1525,  # settings that differ between runs; four trackers
    "cli.py": 3,
    "tracer": 724,
    "tracer/format": 870,
    "tracer/integrations": 271,  # Lightning's logger, accelerate's tracker
    "tracer/messaging": 1511,
    "tracer/numbers": 582,
    "tracer/observing": 9255,
    "tracer/recording": 5400,  # names and settings of runs
    "tracer/replaying": 633,
    "tracer/stores": 3312,  # names of axes, dimension scales and consolidated documents, so that other programs read
    "tracer/trace": 3966,  # the step of each row, for other programs; recorded data as a torch dataset
    "tracer/upkeep": 1175,
    "tracereel": 3717,  # runs by name; errors as JSON, schemas, MCP, completion; --to, export, --dashboard
}


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """What a file imports, in functions and for types too: modules, and names of packages that are modules."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = ROOT / Path(*node.module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def floor_of(module: str) -> tuple[int, str]:
    """The number of the floor that a module stands on, and the folder that it stands in."""
    found = [
        (number, folder)
        for number, floor in enumerate(FLOORS)
        for folder in floor
        if module == folder or module.startswith(f"{folder}.")
    ]
    return max(found, key=lambda one: len(one[1]))


def inside(path: Path) -> set[str]:
    """The project's own modules that a file imports."""
    return {target for target in imports(path) if target in MODULES} - {module_name(path)}


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for module in edges:
        seen: set[str] = set()
        ahead = list(edges[module])
        while ahead:
            if (one := ahead.pop()) not in seen:
                seen.add(one)
                ahead += edges.get(one, ())
        reached[module] = seen
    return {
        frozenset(other for other in reached[module] if module in reached.get(other, ()))
        for module in edges
        if module in reached[module]
    }


def test_folders_import_downwards() -> None:
    """A module imports only what stands below it, for types and in functions too."""
    found = {}
    for module, path in MODULES.items():
        floor, folder = floor_of(module)
        found[module] = {one for one in inside(path) if (there := floor_of(one))[0] >= floor and there[1] != folder}
    del found["tracer"], found["analyze"]  # the faces, which import a name when it is used
    assert {module: upwards for module, upwards in found.items() if upwards} == {}


def test_no_circle_of_files() -> None:
    """No modules import each other, directly or through others."""
    edges = {module: inside(path) for module, path in MODULES.items() if module not in ("tracer", "analyze")}
    assert circles(edges) == set()


def test_circles_are_found() -> None:
    """What the test above rests on."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset({"b", "c"})}
    assert circles({"a": {"a"}}) == {frozenset({"a"})}


def test_the_table_of_floors_names_every_folder() -> None:
    """That of docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| floor \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`((?:tracer|analyze|tracereel|cli)(?:\.[a-z_.]+)?)`", table))
    assert named == set().union(*FLOORS)


def test_files_and_classes_can_be_read_at_once() -> None:
    """A file has at most 700 lines, a class 500, and an object 15 attributes."""
    too_large = []
    for name, path in MODULES.items():
        if len(path.read_text().splitlines()) > 700:
            too_large.append(name)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                assigned = {
                    one.attr
                    for one in ast.walk(node)
                    if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
                    if isinstance(one.value, ast.Name) and one.value.id == "self"
                }
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 500 or len(assigned) > 15:
                    too_large.append(f"{name}.{node.name}: {lines} lines, {len(assigned)} attributes")
    assert not too_large


def lines_of_code(path: Path) -> int:
    """The lines of a file that hold code: neither blank nor only a comment, and not of a docstring."""
    texts = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Expr))
    documentation = {
        line
        for node in texts
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    outside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open(encoding="utf-8") as file:
        tokens = [one for one in tokenize.generate_tokens(file.readline) if one.type not in outside]
    return len({line for one in tokens for line in range(one.start[0], one.end[0] + 1)} - documentation)


def test_a_class_name_exists_once() -> None:
    """A reader who meets a name finds one class. Callbacks of several trainers have the name that users import."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_name(path))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {
        "TraceCallback": ["tracer.integrations.lightning", "tracer.integrations.transformers"],
    }


def test_the_code_does_not_grow() -> None:
    """No folder has more lines than its budget, and no budget is for more than a hundred lines that are not there."""
    found: dict[str, int] = dict.fromkeys(LINES, 0)
    for path in SOURCES:
        parts = path.relative_to(ROOT).parts
        folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        found[folder] = found.get(folder, 0) + lines_of_code(path)
    budgets = {name: range(most - 100, most + 1) for name, most in LINES.items()}
    assert {name: lines for name, lines in found.items() if lines not in budgets.get(name, ())} == {}


def test_tracer_never_imports_analyze() -> None:
    """Recording and replaying know nothing of the metrics, even as a string or for types only."""
    for path in (ROOT / "tracer").rglob("*.py"):
        tree = parsed(path)
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] in ("analyze", "tracereel", "cli") for name in names), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
                assert "analyze" not in ast.unparse(node), path


def test_metrics_touch_no_files() -> None:
    """A metric is arithmetic: nothing in it opens files, plots or prints."""
    for path in (ROOT / "analyze" / "metrics").rglob("*.py"):
        outside = {target.partition(".")[0] for target in imports(path)}
        assert not outside & {"h5py", "io", "matplotlib", "os", "pathlib", "random", "rich", "subprocess", "zarr"}, path


def test_opening_a_trace_runs_no_code() -> None:
    """Neither pickle nor its relatives nor eval nor torch.load is anywhere in what records, reads or analyses."""
    for path in SOURCES:
        tree = parsed(path)
        targets = {target.partition(".")[0] for target in imports(path)}
        assert not targets & {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "torch.load", "np.load", "numpy.load", "torch.jit.load"), path
                # `trace record` runs the user's script, which is what it is for
                assert called != "exec" or path.name == "script.py", path


@pytest.mark.parametrize("package", ["tracer", "analyze", "tracereel.main", "cli"])
def test_imports_have_no_side_effects(package: str) -> None:
    """Importing a package loads nothing heavy, prints nothing and leaves the global state alone."""
    program = (
        "import random, sys, threading, warnings\n"
        "before = random.getstate(), threading.active_count(), list(warnings.filters)\n"
        f"import {package}\n"
        "assert before == (random.getstate(), threading.active_count(), list(warnings.filters))\n"
        "heavy = {'dask', 'h5py', 'matplotlib', 'numpy', 'pandas', 'rich', 'scipy', 'sklearn', 'torch', 'zarr'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("module", ["analyze.batching.batch", "analyze.comparing.diff", "analyze.tables.results"])
def test_modules_that_load_no_torch(module: str) -> None:
    """What compares, plans and tells needs no tensors, and torch takes two seconds to load."""
    program = f"import sys, {module}\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_opens_with_a_sentence() -> None:
    """A module says in its first line what it is, and its name says something too."""
    for path in SOURCES:
        docstring = ast.get_docstring(parsed(path))
        assert docstring, f"{path} has no docstring"
        first = docstring.partition("\n\n")[0]
        assert first.rstrip("`").endswith((".", "::", "?")), f"{path} does not open with a sentence: {first}"
        assert path.stem not in NOT_NAMES, path
        assert len(path.relative_to(ROOT).parts) <= 4, f"{path} is deeper than three packages"


def test_public_names_exist() -> None:
    """Every name that a package offers can be had from it, and is listed once."""
    import analyze
    import tracer

    for package in (tracer, analyze):
        assert len(set(package.__all__)) == len(package.__all__)
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = package.no_such_name


def test_the_oldest_versions_are_those_that_users_may_have() -> None:
    """`make test-oldest` installs the lowest version that pyproject.toml allows of each dependency but torch."""
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lowest = dict(one.split(">=") for one in allowed if not one.startswith("torch"))
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(one.split("==") for one in lines if not one.startswith("#"))
    assert {name: f"{version}.0" if version.count(".") == 1 else version for name, version in lowest.items()} == pinned
