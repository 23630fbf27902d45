"""Findings in words, and how the benchmark grades them."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from analyze.rules.finding import Finding, Severity
from tests import processes

FOUND = Finding(
    rule="dead_units", severity=Severity.WARNING, module="<b>", kind="activations", tag="default", leaf="", rank=0,
    epoch=0, first=3, worst=5, last=1200, steps=9, value=0.123456, threshold=0.1, numbers={"units": 7.0},
    evidence="a\x1b[31m of <i>", advice="less",
)  # fmt: skip


def test_a_finding_for_notebooks() -> None:
    """Where, when, by how much, why and what to try; names are text."""
    told = FOUND._repr_html_()
    assert "<caption>warning: dead_units in activations of &lt;b&gt; at step 3</caption>" in told
    assert "<td>steps</td><td>3 to 1200, 9 of them recorded; the worst is 5</td>" in told
    assert "<td>value</td><td>0.1235, beside a threshold of 0.1</td>" in told
    assert "<td>numbers</td><td>units 7</td>" in told
    assert "<td>evidence</td><td>a\\x1b[31m of &lt;i&gt;</td>" in told
    once = replace(FOUND, steps=1, last=3, worst=3, numbers={})._repr_html_()
    assert "<td>steps</td><td>3</td>" in once
    assert "numbers" not in once


FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def verdicts() -> ModuleType:
    """The benchmark, imported as its own script imports it."""
    sys.path.insert(0, str(FOLDER))
    try:
        specification = importlib.util.spec_from_file_location("verdicts", FOLDER / "verdicts.py")
        assert specification is not None
        assert specification.loader is not None
        module = sys.modules["verdicts"] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


def test_a_selection_is_told_as_declared() -> None:
    """The whole, of which this is a part, takes some minutes."""
    program = [sys.executable, str(FOLDER / "verdicts.py"), "--json"]
    chosen = ["linear_probe", "nan_datapoint"]
    done = processes.run(
        [*program, "--only", ",".join(chosen), "--ways=--profile full"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grades = {one["name"]: (one["grade"], one["findings"]) for one in json.loads(done.stdout)}
    assert [grades[name][0] for name in chosen] == ["silent", "right"], grades


def test_there_are_enough_of_each(verdicts: ModuleType) -> None:
    """Sixty healthy trainings of fifteen kinds, of which half are recorded with no options, and thirty faults."""
    healthy = {name: one for name, one in verdicts.TRAININGS.items() if one.fault is None}
    faulty = [one for one in verdicts.TRAININGS.values() if one.fault is not None]
    assert len(healthy) >= 60
    assert len({one.kind for one in healthy.values()}) >= 15
    assert 2 * sum(not options for _, options in verdicts.work(healthy, [])) >= len(healthy)
    assert len(faulty) >= 30
    assert sum(one.kind == "first day" for one in faulty) >= 12


def test_what_is_right_half_and_missed(verdicts: ModuleType) -> None:
    """All three facts in the first line; two of them, or all below the first line; less than that."""
    fault = verdicts.Fault(rules=("loss_spike",), places=(None, "fc"), step=50, tolerance=2)
    right = replace(FOUND, rule="loss_spike", module="fc", first=52, severity=Severity.WARNING)
    late, elsewhere = replace(right, first=53), replace(right, module="conv")
    other = replace(right, rule="norm_drift", module="conv", first=0)
    assert verdicts.grade(fault, [right], right) == "right"
    assert verdicts.grade(fault, [other, right], other) == "half"
    assert verdicts.grade(fault, [late], late) == "half"
    assert verdicts.grade(fault, [elsewhere], elsewhere) == "half"
    assert verdicts.grade(fault, [other], other) == "missed"
    assert verdicts.grade(fault, [], None) == "missed"
