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
FOUNDATION = {
    "tracer.messaging.messages",
    "tracer.messaging.bus",
    "tracer.messaging.subscription",
    "tracer.messaging.subscriber",
    "tracer.observing.capture",
}
STORAGE = {
    *(
        "tracer.trace.writer",
        "tracer.trace.reader",
        "tracer.trace.part",
        "tracer.format.layout",
        "tracer.stores",
        "tracer.trace.compression",
    ),
    "tracer.format.placement",
}
RUNNING = {
    "tracer.observing.exporter",
    "tracer.recording.recorder",
    "tracer.recording.recording",
    "tracer.replay",
    "tracer.recording.launching.launch",
}
MAY_IMPORT: dict[str, set[str]] = {
    "tracer.secrets": set(),
    "tracer.errors": {"tracer.secrets"},
    "tracer.messaging.messages": set(),
    "tracer.messaging.subscription": {"tracer.messaging.messages"},
    "tracer.messaging.bus": {"tracer.messaging.messages", "tracer.messaging.subscription"},
    "tracer.messaging.subscriber": {
        "tracer.messaging.messages",
        "tracer.messaging.subscription",
        "tracer.messaging.bus",
    },
    "tracer.messaging.actor": {"tracer.walking", "tracer.messaging.messages", "tracer.messaging.bus"},
    "tracer.observing.capture": {"tracer.walking", "tracer.messaging.messages", "tracer.messaging.subscription"},
    "tracer.walking": set(),
    "tracer.memory": set(),
    "tracer.format.checksum": set(),
    "tracer.stores": {"tracer.memory", "tracer.format.checksum", "tracer.secrets"},
    "tracer.stores.*": {
        *("tracer.stores", "tracer.stores.codecs", "tracer.stores.disk.direct", "tracer.stores.torn", "tracer.memory"),
        *("tracer.stores.flipped", "tracer.format.checksum"),
    },
    "tracer.stores.objects": {"tracer.stores", "tracer.stores.codecs", "tracer.stores.zarr", "tracer.stores.hdf5"},
    "tracer.trace.compression": {"tracer.stores.codecs"},
    "tracer.format.layout": {"tracer.messaging.messages", "tracer.stores", "tracer.format.checksum"},
    "tracer.format.placement": {"tracer.format.layout"},
    "tracer.trace.part": {
        "tracer.messaging.messages",
        "tracer.format.layout",
        "tracer.stores",
        "tracer.format.placement",
    },
    "tracer.trace.writer": {
        *(
            "tracer.messaging.messages",
            "tracer.trace.part",
            "tracer.format.layout",
            "tracer.stores",
            "tracer.trace.compression",
            "tracer.secrets",
        ),
    },
    "tracer.trace.reader": {
        *(
            "tracer.messaging.messages",
            "tracer.trace.part",
            "tracer.format.layout",
            "tracer.stores",
            "tracer.trace.assembly",
            "tracer.memory",
        ),
        *("tracer.messaging.subscription", "tracer.stores.disk.mapped", "tracer.format.checksum"),
    },
    "tracer.trace.assembly": {"tracer.trace.part", "tracer.format.layout", "tracer.format.placement"},
    "tracer.verify": {"tracer.messaging.messages", "tracer.format.checksum"} | STORAGE,
    "tracer.convert": {"tracer", "tracer.messaging.messages", "tracer.messaging.subscription"} | STORAGE,
    "tracer.recover": {"tracer.messaging.messages", "tracer.verify", "tracer.convert"} | STORAGE,
    "tracer.observing.pytorch.leaves": set(),
    "tracer.observing.overflows": set(),
    "tracer.observing.pytorch.compiled": {"tracer.observing.pytorch.leaves", "tracer.walking"},
    "tracer.recording.transfers": set(),
    "tracer.recording.termination": set(),
    "tracer.observing.pytorch.hanging": set(),
    "tracer.observing.pytorch.hooks": {"tracer.observing.pytorch.compiled", "tracer.observing.pytorch.hanging"},
    "tracer.observing.pytorch.fast_path": {
        "tracer.observing.pytorch.hanging",
        "tracer.observing.pytorch.hooks",
        "tracer.walking",
    },
    "tracer.observing.pytorch.tensors": {"tracer.memory", "tracer.format.layout", "tracer.observing.pytorch.leaves"},
    "tracer.observing.pytorch.loss_functions": {"tracer.observing.pytorch.hooks"},
    "tracer.observing.callers": set(),
    "tracer.observing.objectives": {
        "tracer.observing.callers",
        "tracer.observing.pytorch.loss_functions",
        "tracer.messaging.messages",
        "tracer.observing.pytorch.tensors",
    },
    "tracer.observing.pytorch.patches": {
        "tracer.observing.pytorch.compiled",
        "tracer.walking",
        "tracer.observing.pytorch.hooks",
        "tracer.observing.pytorch.loss_functions",
        "tracer.observing.pytorch.tensors",
    },
    "tracer.observing.optimizers": {"tracer.walking"},
    "tracer.observing.probes": {"tracer.walking", "tracer.observing.pytorch.tensors"},
    "tracer.observing.pytorch.structure": {"tracer.walking", "tracer.observing.pytorch.wrappers"},
    "tracer.recording.environment": set(),
    "tracer.recording.budget": {"tracer.memory", "tracer.messaging.messages"} | STORAGE,
    "tracer.observing.pytorch.wrappers": set(),
    "tracer.observing.parameters": {
        *(
            "tracer.messaging.messages",
            "tracer.observing.capture",
            "tracer.observing.pytorch.tensors",
            "tracer.observing.pytorch.wrappers",
            "tracer.format.placement",
        ),
        *("tracer.memory", "tracer.walking"),
    },
    "tracer.observing.clock": set(),
    "tracer.observing.pytorch.identity": set(),
    "tracer.observing.publisher": {
        *(
            "tracer.messaging.messages",
            "tracer.messaging.bus",
            "tracer.observing.capture",
            "tracer.observing.clock",
            "tracer.memory",
            "tracer.observing.parameters",
        ),
        *(
            "tracer.format.placement",
            "tracer.observing.probes",
            "tracer.messaging.subscription",
            "tracer.observing.pytorch.tensors",
            "tracer.format.layout",
        ),
        "tracer.observing.overflows",
    },
    "tracer.observing.exporter": FOUNDATION
    | {
        "tracer.observing.pytorch.hooks",
        "tracer.observing.pytorch.tensors",
        "tracer.observing.pytorch.loss_functions",
        "tracer.observing.pytorch.patches",
        "tracer.observing.optimizers",
        "tracer.observing.probes",
    }
    | {
        "tracer.observing.pytorch.compiled",
        "tracer.observing.pytorch.wrappers",
        "tracer.observing.pytorch.structure",
        "tracer.format.placement",
        "tracer.observing.parameters",
    }
    | {
        "tracer.observing.clock",
        "tracer.observing.pytorch.fast_path",
        "tracer.observing.pytorch.hanging",
        "tracer.observing.publisher",
        "tracer.walking",
        "tracer.observing.objectives",
    },
    "tracer.recording.recorder": FOUNDATION
    | STORAGE
    | {"tracer.recording.transfers", "tracer.recording.budget", "tracer.recording.termination"},
    "tracer.recording.recording": FOUNDATION
    | STORAGE
    | {
        "tracer.observing.exporter",
        "tracer.recording.recorder",
        "tracer.recording.budget",
        "tracer.recording.environment",
        "tracer",
        "tracer.recording.termination",
    }
    | {"tracer.recording.family"},
    "tracer.recording.family": {"tracer.trace.part"},
    "tracer.recording.launching.children": set(),
    "tracer.certify": STORAGE
    | {
        "tracer.observing.exporter",
        "tracer.observing.pytorch.hooks",
        "tracer.observing.optimizers",
        "tracer.recording.recording",
        "tracer.recording.environment",
    }
    | {"tracer.walking", "tracer.observing.pytorch.wrappers"},
    "tracer.recorders": FOUNDATION
    | STORAGE
    | {
        "tracer.observing.exporter",
        "tracer.recording.recording",
        "tracer.observing.pytorch.wrappers",
        "tracer.recording.termination",
    },
    "tracer.replay": FOUNDATION | STORAGE,
    "tracer.integrations": set(),
    "tracer.integrations.*": FOUNDATION
    | STORAGE
    | {
        "tracer.observing.pytorch.hanging",
        "tracer.observing.pytorch.loss_functions",
        "tracer.recording.recording",
        "tracer.recording.termination",
        "tracer.integrations.*",
    },
    "tracer.recording.launching.epochs": {"tracer.observing.exporter", "tracer.observing.pytorch.identity"},
    "tracer.recording.launching.launchers": set(),
    "tracer.recording.launching.launch": FOUNDATION
    | STORAGE
    | RUNNING
    | {
        "tracer",
        "tracer.observing.callers",
        "tracer.recording.launching.children",
        "tracer.recording.launching.epochs",
        "tracer.recording.family",
        "tracer.observing.pytorch.hanging",
        "tracer.observing.pytorch.identity",
        "tracer.recording.launching.launchers",
        "tracer.observing.pytorch.loss_functions",
        "tracer.observing.pytorch.patches",
        "tracer.observing.probes",
        "tracer.walking",
        "tracer.observing.pytorch.wrappers",
        "tracer.recording.termination",
    },
    "tracer.recording.certifying.rehearsal": FOUNDATION
    | STORAGE
    | RUNNING
    | {
        "tracer.recording.budget",
        "tracer.certify",
        "tracer.recording.environment",
        "tracer.observing.optimizers",
        "tracer.recording.termination",
    }
    | {"tracer.observing.pytorch.patches", "tracer.secrets"},
    "analyze.metrics": set(),
    "analyze.metrics.*": {
        "tracer.messaging.messages",
        "tracer.messaging.subscription",
        "tracer.messaging.subscriber",
        "analyze.metrics.*",
    },
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
