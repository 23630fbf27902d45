"""The plugin of pytest: a test fails in the first layer in which its training parts from the baseline."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tracer
from tests.analyze.comparing.test_diff import series, write

pytest_plugins = "pytester"
ROOT = Path(__file__).parents[3]
TEST = """
import os
import torch
import tracer
from torch import nn

def test_training(trace_baseline):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace_baseline("small", model, optimizer, capture=tracer.Capture(kinds=["activations", "weights"]), {how}):
        for step in range(4):
            if step == 2:
                model[2].bias.data += float(os.environ.get("NUDGE", 0))
            optimizer.zero_grad()
            model(torch.ones(5, 3)).square().sum().backward()
            optimizer.step()
"""


def run(pytester: pytest.Pytester, *arguments: object) -> pytest.RunResult:
    """Run pytest with the plugin, whether or not it is installed."""
    plugin = ("-p", "no:tracereel", "-p", "no:cacheprovider", "-p", "analyze.comparing.pytest_baseline")
    return pytester.runpytest_inprocess(*plugin, "-W", "ignore", *map(str, arguments))


def test_a_training(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written, compared, found different with the layer, allowed by a tolerance, and replaced."""
    pytester.makepyfile(TEST.format(how=""))
    folder = pytester.path / "baselines"
    skipped = run(pytester, "-rs")
    skipped.assert_outcomes(skipped=1)
    skipped.stdout.fnmatch_lines(["*there is no --trace-baseline DIR*"])
    missing = run(pytester, "--trace-baseline", folder)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no baseline *small.zarr; --trace-baseline-update writes it"])
    assert not folder.exists()
    run(pytester, "--trace-baseline", folder, "--trace-baseline-update").assert_outcomes(passed=1)
    before = (folder / "small.zarr" / "rank0" / "zarr.json").stat().st_mtime_ns
    for update in ((), ("--trace-baseline-update",)):
        run(pytester, "--trace-baseline", folder, *update).assert_outcomes(passed=1)
    assert (folder / "small.zarr" / "rank0" / "zarr.json").stat().st_mtime_ns == before
    monkeypatch.setenv("NUDGE", "1e-4")
    failed = run(pytester, "--trace-baseline", folder)
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(
        ["*the training parts from its baseline small.zarr*A and B part at step 2: activations of 2:*"]
    )
    assert "Traceback" not in failed.stdout.str()
    pytester.makepyfile(TEST.format(how="rtol=1e-2, atol=1e-2"))
    run(pytester, "--trace-baseline", folder).assert_outcomes(passed=1)
    pytester.makepyfile(TEST.format(how=""))
    run(pytester, "--trace-baseline", folder, "--trace-baseline-update").assert_outcomes(passed=1)
    run(pytester, "--trace-baseline", folder).assert_outcomes(passed=1)


def test_a_path(pytester: pytest.Pytester) -> None:
    """A test may record by itself; the folder may stand in the configuration; what one trace lacks fails, too."""
    pytester.makeini("[pytest]\ntrace_baseline = kept\n")
    pytester.makepyfile(
        """
        import shutil
        from pathlib import Path

        def test_recorded(trace_baseline):
            with trace_baseline.path("run.h5", rtol=0.5) as path:
                path.parent.mkdir()
                shutil.copy(Path("made.h5"), path)

        def test_nothing(trace_baseline):
            with trace_baseline.path("nothing"):
                pass

        def test_name(trace_baseline):
            with trace_baseline.path("../run"):
                pass
        """
    )
    import torch

    values = [torch.ones(2) * step for step in range(1, 4)]
    made = pytester.path / "made.h5"
    write(made, series(values))
    (pytester.path / "kept").mkdir()
    write(pytester.path / "kept" / "run.h5", series([value * 1.1 for value in values]))
    found = run(pytester)
    found.assert_outcomes(passed=1, failed=2)
    found.stdout.fnmatch_lines(["*nothing was recorded to*", "*has the name of a file in*not '../run'*"])
    made.unlink()
    write(made, series(values[:2]))
    short = run(pytester, "-k", "recorded")
    short.assert_outcomes(failed=1)
    short.stdout.fnmatch_lines(["*only in A: weights of fc from step 2 on*"])


def test_a_failing_training(pytester: pytest.Pytester) -> None:
    """What the training raises is what the test says, and nothing is written."""
    pytester.makepyfile(
        """
        import torch
        from torch import nn

        def test_training(trace_baseline):
            model = nn.Linear(2, 2)
            with trace_baseline("broken", model, torch.optim.SGD(model.parameters(), lr=0.1)):
                raise ArithmeticError("the training is broken")
        """
    )
    failed = run(pytester, "--trace-baseline", "kept", "--trace-baseline-update")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["*ArithmeticError: the training is broken*"])
    assert not (pytester.path / "kept").exists()


def test_it_is_cheap_and_installed() -> None:
    """Pytest finds it where this is installed, and importing it imports neither torch nor numpy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module = project["entry-points"]["pytest11"]["tracereel"]
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'tracer', 'zarr'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
    assert tracer.__version__
