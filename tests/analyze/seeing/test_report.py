"""A report of several ranks: the findings of all, the pictures of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from analyze.seeing.check import check
from analyze.seeing.report import report
from tests.analyze.seeing.runs import flip, messages, write_ranks
from tracereel.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Rank 0 is healthy, an update of rank 1 is too large once, and rank 2 has numbers that are not finite later."""
    layers = ("fc1", "fc2")
    ranks = [messages(layers, 40), messages(layers, 40, spike=("fc1", 30)), messages(layers, 40, nan_from=33)]
    return write_ranks(tmp_path / "run.zarr", ranks)


@pytest.mark.parametrize("rank", [None, 2])
def test_the_verdict_is_that_of_all_ranks(run: Path, rank: int | None) -> None:
    """As `check` gives it, whichever rank is drawn; findings name their ranks."""
    page = run.parent / "page.html"
    found, checked = report(run, page, rank=rank), check(run)
    assert found.checked == checked
    assert {one.rank for one in checked.findings} == {1, 2}
    assert found.checked.verdict.startswith("error: not_finite in activations of fc1 (rank 2) at step 33")
    assert {key.rank for key in found.courses} == {rank or 0}
    assert found.remarks == [
        "the findings are of all ranks; one that names no rank is of rank 0",
        f"the pictures are of rank {rank or 0} of 3; --rank chooses another",
    ]
    shown = page.read_text(encoding="utf-8")
    assert "<td>update_ratio</td>" in shown
    assert "weight_updates of fc1 (rank 1)" in shown
    assert ">exploding_gradient (rank 1)</td>" in shown


def test_chosen_rules_judge_all_ranks(run: Path) -> None:
    """And no others do."""
    found = report(run, run.parent / "page.html", rules="update_ratio")
    assert [(one.rule, one.rank) for one in found.checked.findings] == [("update_ratio", 1)]
    assert found.checked.looked == ("update_ratio",)


def test_damage_of_another_rank_is_told(run: Path) -> None:
    """In the page and by the exit code; the findings before it are there."""
    (damaged,) = (
        one
        for one in messages(("fc1", "fc2"), 40, spike=("fc1", 30))
        if (one.kind, one.key, one.global_step) == ("weights", "fc1", 39)
    )
    assert damaged.data is not None
    flip(run, damaged.data.numpy().tobytes())
    page = run.parent / "page.html"
    done = CliRunner().invoke(main, ["report", str(run), "-o", str(page)], prog_name="trace")
    assert done.exit_code == 3
    assert "fails its checksum; the report shows what could be read" in done.stderr
    assert "update_ratio" in page.read_text(encoding="utf-8")
    assert "fails its checksum" in page.read_text(encoding="utf-8")
