"""The experiment in ``examples/``: its numbers from its traces by another route, its verdict, and the claim itself."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tracer

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples/bottom_up_convergence.py"
LAYERS = ("relu1", "relu2", "relu3", "relu4", "logits")


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("bottom_up_convergence", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of a class
    spec.loader.exec_module(module)
    return module


def basis(activations: NDArray[Any]) -> NDArray[Any]:
    """The left singular vectors that hold 99 % of the variance; channels are neurons."""
    x_nd = activations.astype(np.float64)
    if x_nd.ndim == 4:
        x_nd = x_nd.transpose(0, 2, 3, 1).reshape(-1, x_nd.shape[1])
    u, s, _ = np.linalg.svd(x_nd - x_nd.mean(axis=0), full_matrices=False)
    k = int(np.searchsorted(np.cumsum(s**2) / np.sum(s**2), 0.99)) + 1
    return u[:, :k]


@pytest.mark.slow
def test_a_short_run(
    experiment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One seed, two epochs: the numbers are those of the trace, which is asked again without training; a figure."""
    command = ("--seeds", "1", "--epochs", "2", "--folder", "runs", "--json", "--no-negatives")
    monkeypatch.chdir(tmp_path)
    code, printed = experiment.main(command), capsys.readouterr()
    told = json.loads(printed.out)
    assert code == (0 if told["acceptance"]["holds"] else 1)
    assert "seed 0: training" in printed.err
    png = tmp_path / "bottom_up_convergence.png"
    assert png.read_bytes().startswith(b"\x89PNG")
    (conv,) = told["setups"].values()
    assert tuple(conv["layers"]) == LAYERS
    scores = {}
    with tracer.open(tmp_path / "runs/conv_2_epochs_seed_0.zarr") as reader:
        for layer, said in conv["layers"].items():
            steps, course = reader.array("activations", layer, tag="probe")
            assert steps.tolist() == list(range(0, 43, 2))
            bases = [basis(np.asarray(one)) for one in course]
            rho = [np.linalg.svd(u.T @ bases[-1], compute_uv=False) for u in bases]
            similarity = np.array([one.clip(0, 1).mean() for one in rho])
            assert said["similarity_mean"] == pytest.approx(similarity.tolist(), abs=1e-9)
            assert said["k_mean"] == [u.shape[1] for u in bases]
            scores[layer] = similarity.mean()
            assert said["scores"] == [pytest.approx(scores[layer], abs=1e-9)]
            above = np.flatnonzero(similarity >= 0.9)
            assert said["reached"] == [pytest.approx(steps[above[0]] / 42)]
            start = similarity[0]
            assert said["progress"] == [pytest.approx(((similarity - start) / (1 - start)).mean(), abs=1e-9)]
    for words, layers in (("tau", LAYERS[:-1]), ("tau_with_logits", LAYERS)):
        signs = [np.sign(scores[low] - scores[high]) for low, high in combinations(layers, 2)]
        assert conv[words] == [pytest.approx(np.mean(signs))]
    assert conv["first"] == [all(scores["relu1"] > scores[layer] for layer in LAYERS[1:4])]
    assert conv["times"][-1] == 1
    diagonal = np.diagonal(np.array(conv["matrices_mean"])[-1])
    assert diagonal == pytest.approx(np.ones(5), abs=1e-9)

    assert experiment.main((*command, "--overwrite")) == code
    printed = capsys.readouterr()
    assert "training" not in printed.err
    assert json.loads(printed.out) == told
    before = png.stat().st_mtime_ns
    with pytest.raises(SystemExit, match="2"):
        experiment.main(command)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--overwrite" in printed.err
    assert png.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--seeds", "0"), "0 is not at least 1"),
        (("--out", "nowhere/figure.png"), "there is no folder nowhere"),
        (("--folder", "file"), "file is not a folder"),
        (("--folder", "damaged"), "seed_0.zarr"),
    ],
)
def test_what_goes_wrong(
    experiment: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    """A sentence, and exit code 2, before anything is trained."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("damaged/conv_40_epochs_seed_0.zarr").mkdir(parents=True)
    with pytest.raises(SystemExit, match="2"):
        experiment.main(arguments)
    printed = capsys.readouterr()
    assert (printed.out, "training" in printed.err) == ("", False)
    assert says in printed.err


def found(experiment: ModuleType, similarity: NDArray[np.float64]) -> Any:
    """What a set-up said, of given similarities (layers, seeds, times)."""
    names = experiment.CLAIM.asked
    curves = dict(zip(names, similarity, strict=True))
    seeds, times = similarity.shape[1:]
    return experiment.Found(
        experiment.CLAIM,
        np.linspace(0, 1, times),
        curves,
        {name: np.full((seeds, times), 9.0) for name in names},
        {name: np.full((seeds, times), 0.1) for name in names},
        [0.9] * seeds,
        np.ones((seeds, 4, 5, 5)),
        {"few_samples": 3, "ill_posed": 0},
    )


@pytest.mark.parametrize(
    ("order", "seeds", "tau", "holds"),
    [
        ((0, 1, 2, 3), 8, 1.0, True),
        ((1, 0, 2, 3), 1, (7 + 2 / 3) / 8, True),
        ((1, 0, 2, 3), 2, (6 + 4 / 3) / 8, False),  # tau is enough, but the lowest layer is first in 6 seeds only
        ((3, 2, 1, 0), 1, 6 / 8, False),  # the lowest layer is first in 7 seeds, but tau is not enough
        ((0, 3, 2, 1), 8, 0.0, False),
    ],
)
def test_verdict(experiment: ModuleType, order: tuple[int, ...], seeds: int, tau: float, holds: bool) -> None:
    """Mean tau of at least 0.8, and the lowest layer first in at least 7 of 8 seeds; some have another order."""
    scores = np.array([0.98, 0.94, 0.93, 0.91, 0.97])
    courses = np.repeat(scores[:, None, None], 8, axis=1) + np.linspace(-0.05, 0.02, 5)
    courses[:4, :seeds] = courses[list(order), :seeds]
    said = experiment.verdict(found(experiment, courses))
    assert said["holds"] is holds
    assert said["first"] == (8 if order[0] == 0 else 8 - seeds)
    assert said["mean_tau"] == pytest.approx(tau)


def test_a_dead_layer_decides_nothing(experiment: ModuleType, tmp_path: Path) -> None:
    """Without a similarity of one layer there is no tau, the claim does not hold, and all is printed and drawn."""
    courses = np.random.default_rng(0).uniform(0.3, 0.8, (5, 2, 6))
    courses[2] = np.nan
    said = found(experiment, courses)
    assert experiment.verdict(said)["holds"] is False
    assert np.isnan(said.reached("relu3")).all()
    text = experiment.report(said)
    assert "never" in text
    assert "3 few_samples" in text
    assert experiment.plain(experiment.as_json(said))["layers"]["relu3"]["scores"] == [None, None]
    experiment.draw(said, [said], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_claim(experiment: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight seeds: layers converge from the bottom up; the logits and the perceptron, which do not, are reported."""
    assert experiment.main(("--json", "--out", str(tmp_path / "figure.png"))) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["acceptance"]["mean_tau"] >= 0.8
    assert told["acceptance"]["first"] >= 7
    conv, mlp = told["setups"]["conv"], told["setups"]["mlp"]
    means = {layer: said["score_mean"] for layer, said in conv["layers"].items()}
    assert means["relu1"] > means["relu2"] > means["relu3"] > means["relu4"]
    assert means["logits"] > means["relu2"]
    assert np.mean(mlp["tau"]) < 0
    assert len(conv["times"]) == 31
    assert min(conv["test_accuracy"]) > 0.9
    # the order is that of where the layers begin: relative to that there is none
    assert abs(np.mean(conv["tau_of_progress"])) < 0.5
    starts = [said["similarity_mean"][0] for said in conv["layers"].values()][:4]
    assert starts == sorted(starts, reverse=True)
