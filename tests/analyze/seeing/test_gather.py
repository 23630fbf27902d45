"""What a replay gathers for a report, by messages and by tables; the report that is written of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tracer
from analyze.asking import analyze
from analyze.rules import tables
from analyze.rules.rule import Rule
from analyze.seeing import check as checking
from analyze.seeing import report as gathering
from analyze.seeing.check import check
from analyze.seeing.gathered import BAD, DEAD, GRADIENT, RATIO, WEIGHT, Frames, Gathered, layers
from analyze.seeing.report import gather, reference, report
from tests.analyze.seeing.runs import LAYERS, flip, messages, write, write_ranks
from tracer.errors import CaptureError, UnknownNameError
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.reader import TraceReader
from tracereel.main import main


def test_measures_are_those_of_the_metrics(run: Path) -> None:
    """The ratio is that of `ratio`, to the bit; norms are those of numpy; a silent unit of six is dead."""
    found = gather(run, ["ratio", "norm:kind=weight_gradients"])
    asked = analyze(run, "ratio").columns()
    for name in LAYERS:
        mine = np.array(asked["module"]) == name
        steps, values, _ = found.of(RATIO)[name].points()
        np.testing.assert_array_equal(steps, np.asarray(asked["global_step"])[mine])
        np.testing.assert_array_equal(values, np.asarray(asked["value"])[mine])
        own = found.of("weight_updates_weights_ratio")[name].points()[1]
        np.testing.assert_array_equal(own, values)
        np.testing.assert_array_equal(
            found.of("weight_gradients_norm2")[name].points()[1], found.of(GRADIENT)[name].points()[1]
        )
    with TraceReader(run) as reader:
        _, weights = reader.array("weights", "conv2")
    norms = np.linalg.norm(np.asarray(weights, np.float64).reshape(60, -1), axis=1)
    np.testing.assert_allclose(found.of(WEIGHT)["conv2"].points()[1], norms, rtol=1e-12)
    assert found.of(DEAD)["fc2"].points()[1].min() == pytest.approx(1 / 6)
    assert found.layers == list(LAYERS)
    assert found.span == (0, 59)
    assert found.subscribers["weight_gradients_norm2"] == "norm"


def test_findings_are_those_of_a_check(run: Path) -> None:
    """The same rules say the same, whatever else listens; and what happened around a finding is whole."""
    alone, found = check(run), gather(run, "spectral_norm")
    assert found.checked.findings == alone.findings
    assert found.checked.verdict == alone.verdict
    assert ("update_ratio", "fc1", 44) in [(one.rule, one.module, one.first) for one in found.checked.findings]
    assert (29, 59) in found.windows


def test_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    """By layer, in all kinds together; and a ratio of NaN is the greatest."""
    found = gather(write(tmp_path / "run.zarr", messages(("a", "b"), 10, nan_from=7)))
    assert found.of(BAD)["a"].points()[1].sum() == 3 * (16 * 6 + 3 * 30)
    assert found.losses["loss", "default"].bad == 3
    first = layers(found)[0]
    assert (first.name, first.bad, first.odd, first.ratio_step) == ("a", 3 * (16 * 6 + 3 * 30), 7, 7)


def test_a_metric_that_cannot_be_had_is_a_remark(run: Path) -> None:
    """The others are there all the same; a name that nobody knows is an error."""
    found = gather(run, ["cka:tag=probe", "spectral_norm"])
    assert len(found.of("weights_spectral_norm")) == len(LAYERS)
    (remark,) = found.remarks
    assert remark.startswith("cka needs activations (tag probe")
    with pytest.raises(UnknownNameError, match="spectral_norm"):
        gather(run, "spectral_nrom")


def test_arrays_are_frames(run: Path) -> None:
    """Histograms come with their edges."""
    found = gather(run, "histogram:bins=7")
    keys = {(key.what, key.layer) for key in found.frames}
    assert {("weights_histogram", "fc2"), ("weights_histogram_edges", "fc2")} <= keys
    for key, frames in found.frames.items():
        steps, table = frames.points()
        assert steps.tolist() == list(range(60))
        assert table.shape == (60, 7 if key.what == "weights_histogram" else 8)


def test_frames_of_different_lengths_are_filled() -> None:
    """With NaN, at their ends."""
    frames = Frames()
    frames.add(0, np.array([1.0]))
    frames.add(1, np.array([1.0, 2.0]))
    assert np.isnan(frames.points()[1]).tolist() == [[False, True], [False, False]]
    assert Frames().points()[1].shape == (0, 0)


def test_a_reference_has_the_columns_of_the_run(tmp_path: Path, gathered: Gathered) -> None:
    """Though it is of another length; and no rules are asked of it."""
    other, found = write(tmp_path / "good.zarr", messages(steps=30)), gathered
    good = reference(other, found.grid)
    assert good.grid == found.grid
    assert good.of(RATIO)["fc1"].cells.shape == found.of(RATIO)["fc1"].cells.shape
    assert not good.checked.looked
    assert not good.of(GRADIENT)


def test_what_came_before_damage_is_there(tmp_path: Path) -> None:
    """And why nothing came after it."""
    made = messages(steps=30)
    path = write(tmp_path / "run.zarr", made)
    weights = [one for one in made if one.kind == "weights" and one.global_step == 20]
    flip(path, weights[0].data.numpy().tobytes())  # type: ignore[union-attr] # weights have data
    found = gather(path, "spectral_norm")
    assert "fails its checksum; left out for that: weights" in found.damage
    assert len(found.losses["loss", "default"].points()[0]) == 30
    assert set(found.of(GRADIENT)) == set(LAYERS)
    assert not found.of(RATIO)
    assert "loss_spike" in found.checked.looked
    assert found.checked.unjudged["update_ratio"].startswith("update_ratio needs weights")
    assert found.remarks == [one for one in found.remarks if one.startswith("spectral_norm needs weights")]


def test_an_empty_trace_has_nothing(tmp_path: Path) -> None:
    """Neither steps nor layers, and no error."""
    found = gather(write(tmp_path / "run.zarr", []))
    assert (found.span, found.layers, found.courses, found.checked.verdict) == (
        None,
        [],
        {},
        "nothing could be judged in 0 steps",
    )


def test_a_rank_is_chosen(tmp_path: Path) -> None:
    """Of a run that is not distributed there is only one."""
    path = write(tmp_path / "run.zarr", messages(steps=3))
    assert gather(path, rank=0).rank == 0
    with pytest.raises(CaptureError, match="nothing of rank 3"):
        gather(path, rank=3)


def test_further_parameters_are_layers_of_their_own(tmp_path: Path) -> None:
    """As in `Results`: a module with two weights has two ratios; and whole numbers are measured by nobody."""
    made: list[Message] = []
    for step in range(4):
        where = {"global_step": step, "train_step": step, "epoch": 0}
        made += [
            ModuleMessage(kind=kind, module="attention", leaf=leaf, data=torch.ones(2, 2), **where)
            for leaf in ("", "in_proj")
            for kind in ("weights", "weight_updates")
        ]
        made.append(ModuleMessage(kind="activations", module="words", data=torch.zeros(3, dtype=torch.int64), **where))
        made.append(NetworkMessage(kind="loss", data=torch.ones(2), **where))
    found = gather(write(tmp_path / "run.zarr", made))
    assert set(found.of(RATIO)) == {"attention", "attention#in_proj"}
    assert not found.losses
    assert found.layers == ["attention", "attention#in_proj", "words"]


FAULTS = ("none", "nan", "spike", "forgotten", "eval", "dead")


def record(path: Path, fault: str) -> Path:
    """A training of 80 steps by the defaults, with a fault from step 40 on."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    trained = list(network.parameters())[: 4 if fault == "forgotten" else None]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    draw, loss_of = torch.Generator().manual_seed(1), nn.CrossEntropyLoss()
    with tracer.record(path, model=network, optimizer=optimizer, loss=loss_of, capture="standard"):
        for step in range(80):
            inputs = torch.randn(32, 8, generator=draw)
            bad = step >= 40
            if fault == "eval" and bad:
                network.eval()
            if fault == "nan" and bad:
                inputs[0, 0] = torch.nan
            optimizer.param_groups[0]["lr"] = 50.0 if fault == "spike" and 40 <= step < 43 else 0.1
            optimizer.zero_grad()
            loss_of(network(inputs), (inputs[:, :3].nan_to_num().argmax(dim=1))).backward()
            optimizer.step()
            if fault == "dead" and step == 40:
                with torch.no_grad():
                    network[0].bias.fill_(-100.0)
    return path


@pytest.fixture(scope="module", params=FAULTS)
def faulty(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of each."""
    return record(tmp_path_factory.mktemp("tables") / "run.zarr", request.param)


def none_by_tables(rules: Sequence[Rule], _: TraceReader) -> tuple[list[Rule], list[Rule]]:
    """Judge all by messages."""
    return [], list(rules)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tables of each trace."""
    monkeypatch.setattr(tables, "MESSAGES", 500)


def test_verdict_and_coverage_are_the_same(faulty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings with all their numbers, what was judged, and why something was not."""
    with TraceReader(faulty) as reader:
        tabled, others = checking.by_tables(checking.rules_of(), reader)
        assert len(tabled) >= 8
        assert others
    found = check(faulty)
    monkeypatch.setattr(checking, "by_tables", none_by_tables)
    expected = check(faulty)
    assert found.findings == expected.findings
    assert found.coverage == expected.coverage
    assert found.unjudged == expected.unjudged


def test_measures_are_the_same(faulty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each series of each layer, to the bit."""
    found = gather(faulty)
    monkeypatch.setattr(gathering, "by_tables", none_by_tables)
    monkeypatch.setattr(gathering, "of_statistics", lambda kinds, _: ([], list(kinds)))
    expected = gather(faulty)
    assert found.checked.findings == expected.checked.findings
    assert courses(found).keys() == courses(expected).keys()
    assert len(courses(found)) > 10
    for key, arrays in courses(expected).items():
        for one, other in zip(courses(found)[key], arrays, strict=True):
            np.testing.assert_array_equal(one, other)


def courses(found: Gathered) -> dict[object, tuple[np.ndarray, ...]]:
    """All series with their heat-map cells."""
    return {key: (*one.points(), one.cells) for key, one in {**found.courses, **found.losses}.items()}


def test_findings_come_first(gathered: Gathered) -> None:
    """Then what went farthest from its past; each with the step and the reason."""
    first, *others = layers(gathered)
    assert (first.name, first.odd, first.place) == ("fc1", 44, 2)
    assert first.severity > 0
    assert first.ratio_step == 44
    assert first.ratio is not None
    assert first.ratio > 0.1
    assert (first.away_step, round(first.away)) == (44, 8)
    assert {one.severity for one in others} == {0}
    far = [abs(one.away) for one in others]
    assert far == sorted(far, reverse=True)


def test_without_a_rule_the_ratio_tells(run: Path) -> None:
    """A ratio that is far from its past is odd, though no rule was asked."""
    first = layers(gather(run, rules=()))[0]
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


@pytest.fixture
def of_ranks(tmp_path: Path) -> Path:
    """Rank 0 is healthy, an update of rank 1 is too large once, and rank 2 has numbers that are not finite later."""
    layers = ("fc1", "fc2")
    ranks = [messages(layers, 40), messages(layers, 40, spike=("fc1", 30)), messages(layers, 40, nan_from=33)]
    return write_ranks(tmp_path / "run.zarr", ranks)


@pytest.mark.parametrize("rank", [None, 2])
def test_the_verdict_is_that_of_all_ranks(of_ranks: Path, rank: int | None) -> None:
    """As `check` gives it, whichever rank is drawn; findings name their ranks."""
    page = of_ranks.parent / "page.html"
    found, checked = report(of_ranks, page, rank=rank).gathered, check(of_ranks)
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


def test_chosen_rules_judge_all_ranks(of_ranks: Path) -> None:
    """And no others do."""
    found = report(of_ranks, of_ranks.parent / "page.html", rules="update_ratio")
    assert [(one.rule, one.rank) for one in found.checked.findings] == [("update_ratio", 1)]
    assert found.checked.looked == ("update_ratio",)


def test_damage_of_another_rank_is_told(of_ranks: Path) -> None:
    """In the page and by the exit code; the findings before it are there."""
    (damaged,) = (
        one
        for one in messages(("fc1", "fc2"), 40, spike=("fc1", 30))
        if (one.kind, one.key, one.global_step) == ("weights", "fc1", 39)
    )
    assert damaged.data is not None
    flip(of_ranks, damaged.data.numpy().tobytes())
    page = of_ranks.parent / "page.html"
    done = CliRunner().invoke(main, ["report", str(of_ranks), "-o", str(page)], prog_name="trace")
    assert done.exit_code == 3
    assert "fails its checksum; the report shows what could be read" in done.stderr
    assert "update_ratio" in page.read_text(encoding="utf-8")
    assert "fails its checksum" in page.read_text(encoding="utf-8")
