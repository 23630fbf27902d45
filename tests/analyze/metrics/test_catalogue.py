"""The catalogue: the page is up to date, every metric says what it must, and every old name has its new one."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import analyze
import tracer
from analyze import catalogue, registry
from analyze.metrics import BUILT_IN
from tests.analyze.metrics import layers, matrices
from tests.analyze.metrics.invariances import ELEMENTWISE, FAMILY, INVARIANCES
from tracereel.main import main

ROOT = Path(__file__).parents[3]


def rows_of(heading: str) -> list[list[str]]:
    """The rows of the table under a heading of the page around the metrics, without the names of its columns."""
    _, _, section = catalogue.TEMPLATE.read_text(encoding="utf-8").partition(f"## {heading}\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[1:]]


OF_OTHERS = [tuple(row) for row in rows_of("Other numbers elsewhere")]
OLD_NAMES = [(system, name.strip("`"), now, remark) for system, name, now, remark in rows_of("Old names")]


def test_the_page_is_up_to_date() -> None:
    """docs/metrics.md is what `make docs` would write."""
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == catalogue.markdown(), "run `make docs`"


@pytest.mark.parametrize("package", [tracer, analyze], ids=lambda package: package.__name__)
def test_the_types_of_the_public_names_are_up_to_date(package: ModuleType) -> None:
    """``__init__.pyi`` is what `make docs` would write, and offers the names that the package has."""
    written = (ROOT / package.__name__ / "__init__.pyi").read_text(encoding="utf-8")
    assert written == catalogue.stub(package), "run `make docs`"
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_headings_stand_in_their_order(name: str) -> None:
    """The Notes of each metric have the headings that the page is made of, each once and in one order."""
    said = list(catalogue.headings(registry.describe(name)["docstring"]))
    assert said == [heading for heading in catalogue.HEADINGS if heading in said]
    assert {"Invariant to", "Edge values", "Source"} <= set(said)
    assert catalogue.example(getattr(analyze, name)), f"the function {name} shows no example"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_class_data_is_known(name: str) -> None:
    """Scopes and invariances are words that this project knows."""
    cls = registry.find(name)
    assert cls.scope in catalogue.SCOPES
    assert set(cls.invariances) <= set(INVARIANCES)


def test_every_declared_invariance_is_tested() -> None:
    """Each metric that declares invariances is in the list of a test that holds it to them."""
    tested = {
        *layers.NAMES,
        *layers.SKETCHED,
        *matrices.NAMES,
        *FAMILY,
        "gradient_noise",
    }  # the last in test_gradient_noise.py
    elementwise = {type(one) for one in ELEMENTWISE}
    classes = {name: registry.find(name) for name in BUILT_IN}
    declaring = {name for name, cls in classes.items() if cls.invariances and cls not in elementwise}
    assert declaring <= tested, "add it to the list of its family; tests/analyze/metrics/invariances.py says how"


def test_the_page_can_be_printed() -> None:
    """`trace subscribers --markdown` prints the page, and takes no name beside it."""
    printed = CliRunner().invoke(main, ["subscribers", "--markdown"])
    assert (printed.exit_code, printed.stdout) == (0, catalogue.markdown())
    wrong = CliRunner().invoke(main, ["subscribers", "norm", "--markdown"])
    assert wrong.exit_code == 2
    assert "neither a NAME nor --json" in wrong.stderr


def test_other_numbers_are_those_of_their_recipes() -> None:
    """What the table says of others follows from what they do, and what it says of us from what we do."""
    said = {(name, asked): (theirs, ours) for _, name, asked, theirs, ours, _ in OF_OTHERS}
    g = np.full(9, 1e-6)
    theirs = g @ g / (np.linalg.norm(g) ** 2 + 1e-8)
    ours = analyze.gradient_geometry(g, g).cosine
    equal = said["GradientGeometry", "cosine of two equal gradients of norm 3e-6"]
    assert equal == (f"{theirs:.4f}", f"{ours:g}")
    batches = [(np.eye(2)[[0] * 64], [0] * 64), (np.eye(2)[[0] * 3], [1] * 3)]
    theirs = np.mean([analyze.accuracy(*batch) for batch in batches])
    asked = said["TestAccuracySubscriber", "accuracy of 64 right and 3 wrong, in batches of 64"]
    assert asked == (f"{theirs:g}", f"{analyze.test_accuracy(batches):.4f}")


def test_other_spectra_are_those_of_their_recipes() -> None:
    """The same of spectral norms, condition numbers and intrinsic dimensions."""
    said = {(system, name): (theirs, ours) for system, name, _, theirs, ours, _ in OF_OTHERS}
    torch.manual_seed(0)
    weight = nn.Linear(512, 512).weight.detach()
    ours = f"{analyze.spectral_norm(weight):.2f}"
    assert ours == f"{torch.linalg.matrix_norm(weight.double(), 2):.2f}"
    right = torch.randn(512, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        left = nn.functional.normalize(weight @ right, dim=0)
        right = nn.functional.normalize(weight.T @ left, dim=0)
    assert said["ikkuna", "SpectralNormSubscriber"] == (f"{left @ weight @ right:.2f}", ours)
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(512, 512)).eval()
    original = layer.parametrizations.weight.original.detach()
    assert torch.equal(original, weight)
    theirs = float((original / layer.weight.detach()).median())
    assert said["torch", "parametrizations.spectral_norm"] == (f"{theirs:.2f}", ours)
    diagonal = torch.diag(torch.tensor([4.0, 2.0, 0.5], dtype=torch.float64))
    ours = f"{analyze.condition_number(diagonal):g}"
    largest = torch.linalg.matrix_norm(diagonal, 2)
    theirs = largest / torch.linalg.matrix_norm(torch.linalg.pinv(diagonal), 2)
    assert said["ikkuna", "ConditionNumberSubscriber"] == (f"{theirs:g}", ours)
    assert said["monitorch", "ParameterCond"] == (f"{torch.linalg.cond(diagonal, p=-2):g}", ours)
    assert said["weightwatcher", "spectral_norm"] == (f"{largest**2:g}", f"{analyze.spectral_norm(diagonal):g}")
    shares = np.array([0.995, 0.005])
    x_nd = np.sqrt(shares) * np.array([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    theirs = np.count_nonzero(np.cumsum(shares) < 0.99)
    assert said["delve", "idim"] == (f"{theirs}", f"{analyze.saturation(x_nd).k}")


def gram_iteration(w: Any, times: int) -> float:
    """lip4conv's bound: of products with the own transpose, each scaled, with the scales kept as logarithms."""
    log_scale = np.float32(0)
    for _ in range(times):
        size = np.linalg.norm(w)
        log_scale, w = np.float32(2) * (log_scale + np.log(size)), (w / size).T @ (w / size)
    root = np.float32(0.5) ** times
    return float(np.linalg.norm(w) ** root * np.exp(log_scale * root))


def test_other_norms_are_those_of_their_recipes() -> None:
    """The same of vector and operator norms, and of variances far from zero."""
    said = {(system, name): (theirs, ours) for system, name, _, theirs, ours, _ in OF_OTHERS}
    diagonal = np.diag([4.0, 2.0, 0.5])
    expected = {("weightwatcher", "norm"): (f"{np.sum(diagonal**2):g}", f"{analyze.norm(diagonal):g}")}
    kernel = np.array([[[[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]]])
    expected["torch", "spectral_norm of a kernel"] = (
        f"{np.linalg.norm(kernel.reshape(1, -1), 2):.4f}",
        f"{analyze.operator_norm(kernel, 8):.4f}",
    )
    small = np.diag(np.array([1e-10, 5e-11], np.float32))
    theirs = {gram_iteration(small, times) for times in (6, 8)}
    (bound,) = {f"{one:.7g}" for one in theirs}
    assert max(theirs) < np.linalg.norm(small.astype(np.float64), 2)
    expected["lip4conv", "Gram iteration in float32"] = (bound, f"{analyze.spectral_norm(small, certify=True):.7g}")
    tenths = np.full(2**24, 0.1, np.float32)
    sums = np.cumsum((tenths * tenths).reshape(-1, 8), axis=0, dtype=np.float32)[-1]
    theirs = math.sqrt(float(sums.sum()))
    expected["torch", "linalg.vector_norm"] = (f"{theirs:.2f}", f"{analyze.norm(tenths):.6g}")
    x = np.random.default_rng(0).standard_normal(10000) + 1e6
    unshifted = (np.cumsum(x * x)[-1] - np.cumsum(x)[-1] ** 2 / 10000) / 9999
    assert analyze.variance(x) == pytest.approx(analyze.saturation(x[:, None]).trace, rel=1e-9)
    expected["delve", "covariance"] = (f"{unshifted:.5f}", f"{analyze.saturation(x[:, None]).trace:.5f}")
    assert {who: said[who] for who in expected} == expected


@pytest.mark.parametrize(("system", "name", "now", "remark"), OLD_NAMES)
def test_every_old_name_has_a_new_one(system: str, name: str, now: str, remark: str) -> None:
    """What the table of old names offers can be asked; where no metric asks the same, it says what does."""
    assert system in ("ikkuna", "ikkuna's experiments", "monitorch", "cockpit")
    if now.startswith(("`tracereel.", "`trace ")):
        assert not remark
        return
    wish = now.strip("`")
    assert wish.partition(":")[0] in BUILT_IN
    assert registry.parse(wish).produces


def test_the_table_of_old_names_is_complete() -> None:
    """All that ikkuna and monitorch offer is in it, once."""
    names = [(system, name) for system, name, _, _ in OLD_NAMES]
    assert len(set(names)) == len(names)
    ikkuna = "Mean Variance Norm Sum SpectralNorm ConditionNumber Ratio Histogram Loss MessageMean TrainAccuracy"
    ikkuna += " TestAccuracy BatchedSVCCA SVCCA HessianEigen Callback Plot"
    monitorch = "OutputActivation OutputNorm OutputGradientGeometry GradientGeometry GradientActivation"
    monitorch += " ParameterDifferenceGeometry ParameterNorm ParameterCond LossModule ExplicitCall"
    assert {("ikkuna", f"{name}Subscriber") for name in ikkuna.split()} <= set(names)
    assert {("monitorch", name) for name in monitorch.split()} <= set(names)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("saturated", {"activation_rate", "saturation"}),
        ("saturated units", {"activation_rate", "saturation"}),
        ("Dead neurons", {"activation_rate"}),
        ("dying relu", {"activation_rate"}),
        ("intrinsic dimension", {"saturation"}),
        ("vanishing gradients", {"norm"}),
        ("lsat", {"saturation"}),
        ("Chan Golub", {"statistics", "variance"}),
        ("spectral_nrom", set()),
        ("", set()),
    ],
)
def test_metrics_are_found_by_what_people_look_for(words: str, found: set[str]) -> None:
    """By words of the summary, the search words or a former name; if none has them, by words anywhere."""
    assert {one["name"] for one in catalogue.search(words)} >= found
    assert bool(catalogue.search(words)) == bool(found)


def test_saturation_tells_from_saturated_units() -> None:
    """Layer saturation says what it is not, and where that is; there, a saturated tanh is counted."""
    said = catalogue.headings(registry.describe("saturation")["docstring"])["Found by"]
    assert "not about saturated units" in said
    assert "activation_rate" in said
    outputs = torch.tanh(torch.tensor([[9.0, 0.1, -9.0], [9.0, 0.2, 0.3]]))
    assert analyze.activation_rate(outputs, threshold=0.99).rates.tolist() == [1.0, 0.0, 0.5]
