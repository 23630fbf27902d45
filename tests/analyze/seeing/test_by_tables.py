"""A trace of statistics is judged and measured by tables as it is by messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tracer
from analyze.rules import tables
from analyze.rules.rule import Rule
from analyze.seeing import check as checking
from analyze.seeing import gather as gathering
from analyze.seeing.check import check
from analyze.seeing.gathered import Gathered
from analyze.seeing.report import gather
from tracer.trace.reader import TraceReader

FAULTS = ("none", "nan", "spike", "forgotten", "eval", "dead")


def record(path: Path, fault: str) -> Path:
    """A training of 150 steps by the defaults, with a fault from step 60 on."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    trained = list(network.parameters())[: 4 if fault == "forgotten" else None]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    draw, loss_of = torch.Generator().manual_seed(1), nn.CrossEntropyLoss()
    with tracer.record(path, model=network, optimizer=optimizer, loss=loss_of, capture="standard"):
        for step in range(150):
            inputs = torch.randn(32, 8, generator=draw)
            bad = step >= 60
            if fault == "eval" and bad:
                network.eval()
            if fault == "nan" and bad:
                inputs[0, 0] = torch.nan
            optimizer.param_groups[0]["lr"] = 50.0 if fault == "spike" and 60 <= step < 63 else 0.1
            optimizer.zero_grad()
            loss_of(network(inputs), (inputs[:, :3].nan_to_num().argmax(dim=1))).backward()
            optimizer.step()
            if fault == "dead" and step == 60:
                with torch.no_grad():
                    network[0].bias.fill_(-100.0)
    return path


@pytest.fixture(scope="module", params=FAULTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of each."""
    return record(tmp_path_factory.mktemp("tables") / "run.zarr", request.param)


def none_by_tables(rules: Sequence[Rule], _: TraceReader) -> tuple[list[Rule], list[Rule]]:
    """Judge all by messages."""
    return [], list(rules)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tables of each trace."""
    monkeypatch.setattr(tables, "MESSAGES", 500)


def test_verdict_and_coverage_are_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings with all their numbers, what was judged, and why something was not."""
    with TraceReader(run) as reader:
        tabled, others = checking.by_tables(checking.rules_of(), reader)
        assert len(tabled) >= 8
        assert others
    found = check(run)
    monkeypatch.setattr(checking, "by_tables", none_by_tables)
    expected = check(run)
    assert found.findings == expected.findings
    assert found.coverage == expected.coverage
    assert found.unjudged == expected.unjudged


def test_measures_are_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each series of each layer, to the bit."""
    found = gather(run)
    monkeypatch.setattr(gathering, "by_tables", none_by_tables)
    monkeypatch.setattr(gathering, "of_statistics", lambda kinds, _: ([], list(kinds)))
    expected = gather(run)
    assert found.checked.findings == expected.checked.findings
    assert courses(found).keys() == courses(expected).keys()
    assert len(courses(found)) > 10
    for key, arrays in courses(expected).items():
        for one, other in zip(courses(found)[key], arrays, strict=True):
            np.testing.assert_array_equal(one, other)


def courses(found: Gathered) -> dict[object, tuple[np.ndarray, ...]]:
    """All series with their heat-map cells."""
    return {key: (*one.points(), one.cells) for key, one in {**found.courses, **found.losses}.items()}
