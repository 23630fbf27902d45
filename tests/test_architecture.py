"""Who may import whom, what an import costs, and what must not be in the source: laws 9 and 10 of the architecture."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([ROOT / "cli.py", *(ROOT / "tracer").rglob("*.py"), *(ROOT / "analyze").rglob("*.py")])

NOT_NAMES = {"utils", "helpers", "common", "base", "core", "misc", "manager", "factory"}

# What a module may import of this project, itself and `tracer.errors` apart. Lower never imports upper.
FOUNDATION = {"tracer.messages", "tracer.bus", "tracer.subscription", "tracer.subscriber", "tracer.capture"}
STORAGE = {
    *("tracer.writer", "tracer.reader", "tracer.parts", "tracer.layout", "tracer.stores", "tracer.compression"),
    "tracer.placement",
}
RUNNING = {"tracer.exporter", "tracer.recorder", "tracer.recording", "tracer.replay", "tracer.launch"}
MAY_IMPORT: dict[str, set[str]] = {
    "tracer.secrets": set(),
    "tracer.errors": {"tracer.secrets"},
    "tracer.messages": set(),
    "tracer.subscription": {"tracer.messages"},
    "tracer.bus": {"tracer.messages", "tracer.subscription"},
    "tracer.subscriber": {"tracer.messages", "tracer.subscription", "tracer.bus"},
    "tracer.actions": {"tracer.walking", "tracer.messages", "tracer.bus"},
    "tracer.capture": {"tracer.walking", "tracer.messages", "tracer.subscription"},
    "tracer.walking": set(),
    "tracer.memory": set(),
    "tracer.checksum": set(),
    "tracer.stores": {"tracer.memory", "tracer.checksum", "tracer.secrets"},
    "tracer.stores.*": {
        *("tracer.stores", "tracer.stores.codecs", "tracer.stores.direct", "tracer.stores.torn", "tracer.memory"),
        *("tracer.stores.flipped", "tracer.checksum"),
    },
    "tracer.stores.objects": {"tracer.stores", "tracer.stores.codecs", "tracer.stores.zarr", "tracer.stores.hdf5"},
    "tracer.compression": {"tracer.stores.codecs"},
    "tracer.layout": {"tracer.messages", "tracer.stores", "tracer.checksum"},
    "tracer.placement": {"tracer.layout"},
    "tracer.parts": {"tracer.messages", "tracer.layout", "tracer.stores", "tracer.placement"},
    "tracer.writer": {
        *("tracer.messages", "tracer.parts", "tracer.layout", "tracer.stores", "tracer.compression", "tracer.secrets"),
    },
    "tracer.reader": {
        *("tracer.messages", "tracer.parts", "tracer.layout", "tracer.stores", "tracer.assembly", "tracer.memory"),
        *("tracer.subscription", "tracer.stores.mapped", "tracer.checksum"),
    },
    "tracer.assembly": {"tracer.parts", "tracer.layout", "tracer.placement"},
    "tracer.verify": {"tracer.messages", "tracer.checksum"} | STORAGE,
    "tracer.convert": {"tracer", "tracer.messages", "tracer.subscription"} | STORAGE,
    "tracer.recover": {"tracer.messages", "tracer.verify", "tracer.convert"} | STORAGE,
    "tracer.leaves": set(),
    "tracer.overflows": set(),
    "tracer.compiled": {"tracer.leaves", "tracer.walking"},
    "tracer.transfers": set(),
    "tracer.termination": set(),
    "tracer.hanging": set(),
    "tracer.hooks": {"tracer.compiled", "tracer.hanging"},
    "tracer.fast_path": {"tracer.hanging", "tracer.hooks", "tracer.walking"},
    "tracer.tensors": {"tracer.memory", "tracer.layout", "tracer.leaves"},
    "tracer.losses": {"tracer.hooks"},
    "tracer.callers": set(),
    "tracer.objectives": {"tracer.callers", "tracer.losses", "tracer.messages", "tracer.tensors"},
    "tracer.patches": {"tracer.compiled", "tracer.walking", "tracer.hooks", "tracer.losses", "tracer.tensors"},
    "tracer.optimizers": {"tracer.walking"},
    "tracer.probes": {"tracer.walking", "tracer.tensors"},
    "tracer.structure": {"tracer.walking", "tracer.wrappers"},
    "tracer.environment": set(),
    "tracer.budget": {"tracer.memory", "tracer.messages"} | STORAGE,
    "tracer.wrappers": set(),
    "tracer.parameters": {
        *("tracer.messages", "tracer.capture", "tracer.tensors", "tracer.wrappers", "tracer.placement"),
        *("tracer.memory", "tracer.walking"),
    },
    "tracer.clock": set(),
    "tracer.identity": set(),
    "tracer.publishing": {
        *("tracer.messages", "tracer.bus", "tracer.capture", "tracer.clock", "tracer.memory", "tracer.parameters"),
        *("tracer.placement", "tracer.probes", "tracer.subscription", "tracer.tensors", "tracer.layout"),
        "tracer.overflows",
    },
    "tracer.exporter": FOUNDATION
    | {"tracer.hooks", "tracer.tensors", "tracer.losses", "tracer.patches", "tracer.optimizers", "tracer.probes"}
    | {"tracer.compiled", "tracer.wrappers", "tracer.structure", "tracer.placement", "tracer.parameters"}
    | {
        "tracer.clock",
        "tracer.fast_path",
        "tracer.hanging",
        "tracer.publishing",
        "tracer.walking",
        "tracer.objectives",
    },
    "tracer.recorder": FOUNDATION | STORAGE | {"tracer.transfers", "tracer.budget", "tracer.termination"},
    "tracer.recording": FOUNDATION
    | STORAGE
    | {"tracer.exporter", "tracer.recorder", "tracer.budget", "tracer.environment", "tracer", "tracer.termination"}
    | {"tracer.family"},
    "tracer.family": {"tracer.parts"},
    "tracer.children": set(),
    "tracer.certify": STORAGE
    | {"tracer.exporter", "tracer.hooks", "tracer.optimizers", "tracer.recording", "tracer.environment"}
    | {"tracer.walking", "tracer.wrappers"},
    "tracer.recorders": FOUNDATION
    | STORAGE
    | {"tracer.exporter", "tracer.recording", "tracer.wrappers", "tracer.termination"},
    "tracer.replay": FOUNDATION | STORAGE,
    "tracer.integrations": set(),
    "tracer.integrations.*": FOUNDATION
    | STORAGE
    | {"tracer.hanging", "tracer.losses", "tracer.recording", "tracer.termination", "tracer.integrations.*"},
    "tracer.epochs": {"tracer.exporter", "tracer.identity"},
    "tracer.launchers": set(),
    "tracer.launch": FOUNDATION
    | STORAGE
    | RUNNING
    | {
        "tracer",
        "tracer.callers",
        "tracer.children",
        "tracer.epochs",
        "tracer.family",
        "tracer.hanging",
        "tracer.identity",
        "tracer.launchers",
        "tracer.losses",
        "tracer.patches",
        "tracer.probes",
        "tracer.walking",
        "tracer.wrappers",
        "tracer.termination",
    },
    "tracer.rehearsal": FOUNDATION
    | STORAGE
    | RUNNING
    | {"tracer.budget", "tracer.certify", "tracer.environment", "tracer.optimizers", "tracer.termination"}
    | {"tracer.patches", "tracer.secrets"},
    "analyze.metrics": set(),
    "analyze.metrics.*": {"tracer.messages", "tracer.subscription", "tracer.subscriber", "analyze.metrics.*"},
    "analyze.*": {"tracer", "tracer.*", "analyze", "analyze.*"},
    "cli": {"tracer", "tracer.*", "analyze", "analyze.*"},
}


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rule_for(module: str) -> set[str]:
    """The row of `MAY_IMPORT` for a module: its own, or that of the package it stands in."""
    if module in MAY_IMPORT:
        return MAY_IMPORT[module]
    package = module.rpartition(".")[0]
    return MAY_IMPORT[f"{package}.*"]


def only_for_types(tree: ast.Module) -> set[ast.AST]:
    """The nodes under ``if TYPE_CHECKING:``, which never run."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }


def imports(path: Path) -> Iterator[str]:
    """What a file imports, inside functions too: modules, and names of packages that are modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ignored = only_for_types(tree)
    for node in ast.walk(tree):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = ROOT / Path(*node.module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def allowed(target: str, rule: set[str]) -> bool:
    """Whether a rule allows importing a module."""
    return any(
        target == entry or (entry.endswith(".*") and target.startswith(entry[:-1]))
        for entry in {*rule, "tracer.errors"}
    )


def test_the_table_of_layers_names_every_module() -> None:
    """That of docs/architecture.md, which says ``analyze.{pairs, batch}`` for two of them."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| layer \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    named = set()
    for name in re.findall(r"`((?:tracer|analyze|cli)[^`]*)`", table):
        package, _, several = name.partition("{")
        named.update(package + one.strip() for one in several.rstrip("}").split(",")) if several else named.add(name)
    modules = {module_name(path) for path in SOURCES} - {"tracer", "analyze", "analyze.metrics"}
    inside = {
        one for one in modules if f"{one.rpartition('.')[0]}.*" in named or one.startswith("tracer.integrations.")
    }
    assert modules - inside - named == set()
    assert {one for one in named if not one.endswith(".*")} - modules == set()


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_layers(path: Path) -> None:
    """A module imports only what is below it; the packages' own files import by name, when a name is used."""
    module = module_name(path)
    if module in ("tracer", "analyze"):
        return
    inside = {target for target in imports(path) if target.partition(".")[0] in ("tracer", "analyze", "cli")}
    forbidden = sorted(target for target in inside if target != module and not allowed(target, rule_for(module)))
    assert not forbidden, f"{module} must not import {', '.join(forbidden)}"


def test_tracer_never_imports_analyze() -> None:
    """Recording and replaying know nothing of the metrics, even as a string or for types only."""
    for path in (ROOT / "tracer").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] in ("analyze", "cli") for name in names), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
                assert "analyze" not in ast.unparse(node), path


def test_metrics_touch_no_files() -> None:
    """A metric is arithmetic: nothing in it opens files, plots or prints."""
    for path in (ROOT / "analyze" / "metrics").glob("*.py"):
        outside = {target.partition(".")[0] for target in imports(path)}
        assert not outside & {"h5py", "io", "matplotlib", "os", "pathlib", "random", "rich", "subprocess", "zarr"}, path


def test_opening_a_trace_runs_no_code() -> None:
    """Neither pickle nor its relatives nor eval nor torch.load is anywhere in what records, reads or analyses."""
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        targets = {target.partition(".")[0] for target in imports(path)}
        assert not targets & {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "torch.load", "np.load", "numpy.load", "torch.jit.load"), path
                # `trace record` runs the user's script, which is what it is for
                assert called != "exec" or path.name == "launch.py", path


@pytest.mark.parametrize("package", ["tracer", "analyze", "cli"])
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


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_every_module_opens_with_a_sentence(path: Path) -> None:
    """A module says in its first line what it is, and its name says something too."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path} has no docstring"
    first = docstring.partition("\n\n")[0]
    assert first.rstrip("`").endswith((".", "::", "?")), f"{path} does not open with a sentence: {first}"
    assert path.stem not in NOT_NAMES
    assert len(path.relative_to(ROOT).parts) <= 3, f"{path} is deeper than two packages"


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
