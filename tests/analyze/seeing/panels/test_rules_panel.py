"""The parts of the page about rules and about learning rates."""

from __future__ import annotations

import pytest

from analyze.rules.coverage import Coverage
from analyze.seeing.course import Grid
from analyze.seeing.findings import Checked
from analyze.seeing.gathered import LEARNING_RATE, Gathered, Key
from analyze.seeing.page import steps_of
from analyze.seeing.panels import rates, rules

PART = Coverage(
    steps=15, of=240, first=0, last=14, after=14, streams=4, partial=1, ended={"activations of <b>": 9},
    aside={"eval": 3},
)  # fmt: skip


def test_each_rule_says_what_it_judged() -> None:
    """In a table whose cells say in a narrow window, too, what they are; names are text."""
    whole = Coverage(steps=240, of=240, first=0, last=239, streams=1)
    checked = Checked("run.zarr", "finished", (), {"rank_collapse": PART, "not_finite": whole}, steps=240)
    assert checked.verdict == "nothing found by 2 rules, of which 1 judged all 240 steps"
    assert repr(checked) == f"Checked('run.zarr': {checked.verdict})"
    told = rules.panel(checked).before
    assert (
        '<tr><td>rank_collapse</td><td data-name="findings">0</td><td data-name="steps judged">15 of 240, 3 of eval'
        '</td><td data-name="streams">4, 1 in part</td><td data-name="not judged">after step 14; activations of '
        "&lt;b&gt; after step 9</td></tr>"
    ) in told
    assert (
        '<td data-name="steps judged">all 240</td><td data-name="streams">1</td><td data-name="not judged"></td>'
        in told
    )
    assert "No rule found anything" not in told
    assert "activations of &lt;b&gt; after step 9" in checked._repr_html_()


def test_a_verdict_on_the_part_of_one_rule() -> None:
    """It is no verdict on the run."""
    checked = Checked("run.zarr", "finished", (), {"rank_collapse": PART}, steps=240)
    assert checked.verdict == "nothing found by 1 rule, which judged 15 of 240, 3 of eval"


@pytest.mark.parametrize("groups", [1, 8, 11])
def test_a_constant_learning_rate_is_drawn_where_it_is(groups: int) -> None:
    """On an axis from zero to twice the rate, not from -1 to 1; groups beyond those drawn are counted."""
    pytest.importorskip("bokeh")
    found = Gathered(Checked("run", "finished", ()), {}, 0, (0, 9), Grid.over(0, 9))
    for group in range(groups):
        for step in range(10):
            found.add(Key(LEARNING_RATE, f"group 0.{group}", "default", 0), step, 1e-4)
    drawn = rates.panel(found, steps_of(found))
    assert drawn.picture is not None
    assert drawn.picture.y_range.default_span == pytest.approx(2e-4)
    assert ("3 more groups are not drawn" in drawn.alternative) is (groups == 11)
