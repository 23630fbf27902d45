"""The table of layers begins with what is most anomalous."""

from __future__ import annotations

from pathlib import Path

from analyze.seeing.gathered import layers
from analyze.seeing.report import gather
from tests.analyze.seeing.runs import messages, write


def test_findings_come_first(tmp_path: Path) -> None:
    """Then what went farthest from its past; each with the step and the reason."""
    found = gather(write(tmp_path / "run.zarr", messages(spike=("fc1", 44))))
    first, *others = layers(found)
    assert (first.name, first.odd, first.place) == ("fc1", 44, 2)
    assert first.severity > 0
    assert first.ratio_step == 44
    assert first.ratio is not None
    assert first.ratio > 0.1
    assert (first.away_step, round(first.away)) == (44, 8)
    assert {one.severity for one in others} == {0}
    far = [abs(one.away) for one in others]
    assert far == sorted(far, reverse=True)


def test_without_a_rule_the_ratio_tells(tmp_path: Path) -> None:
    """A ratio that is far from its past is odd, though no rule was asked."""
    found = gather(write(tmp_path / "run.zarr", messages(spike=("fc1", 44))), rules=())
    first = layers(found)[0]
    assert (first.name, first.odd) == ("fc1", 44)
    assert first.why.startswith("ratio ")
    assert first.why.endswith(" times its past")


def test_what_was_not_recorded_is_none(tmp_path: Path) -> None:
    """A layer of which only activations are there has a dead share, and nothing else."""
    made = [one for one in messages(("a",), 12) if one.kind == "activations"]
    (layer,) = layers(gather(write(tmp_path / "run.zarr", made)))
    assert (layer.ratio, layer.gradient, layer.bad, layer.away) == (None, None, 0, 0.0)
    assert layer.dead is not None
    assert 1 / 6 <= layer.dead < 0.4


def test_numbers_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    """Those of all kinds; and a ratio of NaN is the greatest."""
    (layer,) = layers(gather(write(tmp_path / "run.zarr", messages(("a",), 12, nan_from=9))))
    assert layer.bad == 3 * (96 + 90)
    assert layer.odd == 9
    assert layer.ratio_step == 9
