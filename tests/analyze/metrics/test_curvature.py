"""Metrics of curvature: against exact float64 Hessians of small nets, by torch.func, and numpy and scipy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

import analyze
import tracer
from analyze.registry import parse
from tests.analyze.metrics.quadratic import Quadratic
from tracer import Collect, NetworkMessage

WHERE = {"kind": "loss", "global_step": 3, "train_step": 3, "epoch": 0}


def symmetric(size: int, values: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """A symmetric matrix with these eigenvalues, in random directions."""
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]
    return (basis * values) @ basis.T


def said(wish: str, objective: Any) -> dict[str, NDArray[np.float64]]:
    """What a subscriber says of a loss."""
    subscriber = parse(wish)
    subscriber.know_objective(objective)
    message = NetworkMessage(data=torch.tensor(1.0), **WHERE)
    return {answer.kind: answer.data.numpy() for answer in subscriber.receive(message) if answer.data is not None}


# -- against small nets ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.conv(x)).flatten(1))


def exact(net: nn.Module, x: Tensor, y: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The Hessian (P, P) of the mean loss and the gradients (N, P) of the datapoints, by torch.func."""
    weights = {name: one.detach().clone() for name, one in net.named_parameters()}

    def loss(weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, dict(weights), x), y)

    blocks, sizes = hessian(loss)(weights, x, y), {name: one.numel() for name, one in weights.items()}
    rows = [torch.cat([blocks[a][b].reshape(sizes[a], sizes[b]) for b in sizes], 1) for a in sizes]
    each = vmap(grad(lambda w, x, y: loss(w, x[None], y[None])), in_dims=(None, 0, 0))(weights, x, y)
    return torch.cat(rows).numpy(), torch.cat([each[name].reshape(len(x), -1) for name in sizes], 1).numpy()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Collect]:
    """Exact Hessians and gradients of each step of a training; and what metrics said live, of it all and of `fc`."""
    torch.manual_seed(0)
    net, heard = Net().double(), Collect("loss_*")
    optimizer, expected = torch.optim.Adam(net.parameters(), lr=0.05), []
    wishes = [
        f"{name}:{options}"
        for name in ("hessian_trace", "ticdiag", "tictrace")
        for options in ("", "modules=fc,as=of_fc")
    ]
    wishes += ["hessian_eigen:k=5", "hessian_eigen:k=5,modules=fc,as=of_fc", "hessian_eigen:k=5,exact=0,as=lanczos"]
    wishes += ["hessian_trace:exact=0,probes=30,as=estimated", "tictrace:exact=3,probes=30,as=estimated"]
    path = tmp_path_factory.mktemp("curvature") / "run.zarr"
    receivers = [*map(parse, wishes), heard]
    with tracer.record(
        path, net, optimizer, loss=F.cross_entropy, receivers=receivers, strict=True, capture=tracer.Capture()
    ):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(6, 1, 4, 4, generator=generator, dtype=torch.float64)
            y = torch.randint(3, (6,), generator=generator)
            expected.append(exact(net, x, y))
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return expected, heard


def of(heard: Collect, kind: str) -> list[NDArray[np.float64]]:
    """The answers of a kind, one for each step."""
    assert [one.global_step for one in heard.of(kind)] == [0, 1, 2]
    return [one.data.numpy() for one in heard.of(kind) if one.data is not None]


FC = slice(20, None)
"""The parameters of `fc`."""


def test_traces_are_those_of_the_exact_hessian(trained: Any) -> None:
    """Of all parameters and of one module's; exact ones have no interval."""
    expected, heard = trained
    for kind, part in (("loss_hessian_trace", slice(None)), ("loss_hessian_trace_of_fc", FC)):
        exactly = [np.trace(h[part, part]) for h, _ in expected]
        np.testing.assert_allclose(of(heard, kind), exactly, rtol=1e-10)
    for end in ("low", "high"):
        np.testing.assert_array_equal(of(heard, f"loss_hessian_trace_{end}"), of(heard, "loss_hessian_trace"))


@pytest.mark.parametrize("label", ["", "_of_fc", "_lanczos"])
def test_eigenvalues_are_those_of_the_exact_hessian(trained: Any, label: str) -> None:
    """By magnitude, and the greatest and the least; by LAPACK and by Lanczos."""
    expected, heard = trained
    part = FC if label == "_of_fc" else slice(None)
    for step, (h, _) in enumerate(expected):
        values = scipy.linalg.eigvalsh(h[part, part])
        largest = values[np.argsort(-np.abs(values))[:5]]
        np.testing.assert_allclose(of(heard, f"loss_hessian_eigen{label}")[step], largest, rtol=1e-6)
        np.testing.assert_allclose(of(heard, f"loss_hessian_eigen_max{label}")[step], values[-1], rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(of(heard, f"loss_hessian_eigen_min{label}")[step], values[0], rtol=1e-6, atol=1e-12)
        residual = of(heard, f"loss_hessian_eigen_residual{label}")[step]
        assert 0 < residual < 1e-6 * abs(largest[0]) if label == "_lanczos" else residual == 0


def test_criteria_are_those_of_exact_gradients_and_hessians(trained: Any) -> None:
    """TICDiag and TICTrace from the gradients of each datapoint."""
    expected, heard = trained
    for label, part in (("", slice(None)), ("_of_fc", FC)):
        diagonals = [np.diagonal(h)[part] for h, _ in expected]
        seconds = [np.square(g[:, part]).mean(0) for _, g in expected]
        diag = [(c / (h + 1e-7)).sum() for c, h in zip(seconds, diagonals, strict=True)]
        trace = [c.sum() / (h.sum() + 1e-7) for c, h in zip(seconds, diagonals, strict=True)]
        np.testing.assert_allclose(of(heard, f"loss_ticdiag{label}"), diag, rtol=1e-6)
        np.testing.assert_allclose(of(heard, f"loss_tictrace{label}"), trace, rtol=1e-8)


def test_estimates_have_the_exact_value_in_their_interval(trained: Any) -> None:
    """Live, of the trace and of TICTrace, whose parts are both estimated."""
    _, heard = trained
    for kind in ("loss_hessian_trace", "loss_tictrace"):
        value, low, high = (np.array(of(heard, f"{kind}{end}_estimated")) for end in ("", "_low", "_high"))
        exactly = np.array(of(heard, kind))
        assert (low < high).all()
        assert ((low <= exactly) & (exactly <= high)).all()
        assert ((low <= value) & (value <= high)).all()


# -- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [300, 10])
def test_intervals_hold_what_they_promise(rank: int) -> None:
    """Of 200 estimates that are drawn, 99 % have the exact trace in their interval, but for chance and rounding."""
    random = np.random.default_rng(1)
    values = np.zeros(300)
    values[:rank] = random.standard_normal(rank) * np.arange(1, rank + 1) ** -0.5
    matrix = symmetric(300, values)
    found = [
        analyze.hessian_trace(lambda v: v @ matrix, 300, exact=0, probes=30, random=np.random.default_rng(seed))
        for seed in range(200)
    ]
    rounding = 1e-10
    assert sum(one.low - rounding <= values.sum() <= one.high + rounding for one in found) >= 194
    if rank == 10:  # all of it is in the basis
        assert max(abs(one.value - values.sum()) for one in found) < rounding


def test_an_estimate_takes_the_products_that_it_may() -> None:
    """Neither more nor less than `probes`; an exact trace takes one for each parameter."""
    asked: list[int] = []

    def products(v: NDArray[np.float64]) -> NDArray[np.float64]:
        asked.append(len(v))
        return 2 * v

    found = analyze.hessian_trace(products, 900, probes=31)
    assert found.low < 1800 < found.high
    assert sum(asked) == 31
    asked.clear()
    assert analyze.hessian_trace(products, 200) == (400.0, 400.0, 400.0)
    assert sum(asked) == 200


@pytest.mark.parametrize("seed", range(5))
def test_lanczos_finds_what_lapack_finds(seed: int) -> None:
    """Of matrices with eigenvalues of both signs, close ones among them."""
    random = np.random.default_rng(seed)
    values = np.sort(random.standard_normal(400) ** 3)
    matrix = symmetric(400, values, seed)
    found = analyze.hessian_eigen(lambda v: v @ matrix, 400, k=6, exact=0, steps=300, tolerance=1e-8)
    exactly = scipy.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(found.values, exactly[np.argsort(-np.abs(exactly))[:6]], rtol=1e-6)
    assert found.greatest == pytest.approx(exactly[-1], rel=1e-6)
    assert found.least == pytest.approx(exactly[0], rel=1e-6)


def test_lanczos_says_how_good_it_is_when_it_may_not_go_on() -> None:
    """After few steps, each number has an eigenvalue within the residual."""
    values = np.linspace(-1, 1, 500)
    matrix = symmetric(500, values)
    found = analyze.hessian_eigen(lambda v: v @ matrix, 500, k=2, exact=0, steps=6)
    assert found.products == 6
    assert found.residual > 1e-3
    for one in (*found.values, found.greatest, found.least):
        assert np.abs(values - one).min() <= found.residual


def test_lanczos_ends_where_there_is_no_more() -> None:
    """A matrix of rank 2 has three different eigenvalues, so three steps find them."""
    values = np.zeros(600)
    values[:2] = 3.0, -7.0
    matrix = symmetric(600, values)
    found = analyze.hessian_eigen(lambda v: v @ matrix, 600, k=2)
    assert found.products <= 8
    np.testing.assert_allclose(found.values, [-7, 3], rtol=1e-10)
    zero = analyze.hessian_eigen(lambda v: 0 * v, 600, k=2)
    assert (zero.values.tolist(), zero.greatest, zero.least, zero.residual) == ([0.0], 0.0, 0.0, 0.0)


def test_what_is_not_finite_is_answered() -> None:
    """NaN in the products gives NaN, and never an error."""

    def products(v: NDArray[np.float64]) -> NDArray[np.float64]:
        return v * np.nan

    for exact in (0, 512):
        assert np.isnan(analyze.hessian_trace(products, 20, exact=exact)).all()
        found = analyze.hessian_eigen(products, 20, k=2, exact=exact)
        assert np.isnan([*found.values, found.greatest, found.least, found.residual]).all()
    assert np.isnan(analyze.ticdiag([[np.nan, 1.0]], [1.0, 1.0]))


def test_a_loss_that_is_not_finite_is_answered(tmp_path: Path) -> None:
    """Live, a training that diverges gets NaN of each metric, and none of them ends."""
    net, heard = nn.Linear(4, 3), Collect("loss_*")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    receivers = [*map(parse, ("hessian_eigen", "hessian_trace", "ticdiag", "tictrace")), heard]
    with tracer.record(
        tmp_path / "run.zarr",
        net,
        optimizer,
        loss=F.cross_entropy,
        receivers=receivers,
        strict=True,
        capture=tracer.Capture(),
    ):
        for step in range(2):
            x = torch.full((5, 4), torch.nan if step else 1.0)
            F.cross_entropy(net(x), torch.arange(5) % 3).backward()
            optimizer.step()
    for message in heard:
        assert message.data is not None
        if message.kind != "loss_terms":
            assert bool(message.data.isnan().all()) == (message.global_step == 1), message.kind
    assert len(heard.of("loss_ticdiag")) == 2


def test_one_hessian_serves_all() -> None:
    """The metrics that are asked of one loss share its products; of the next loss they are taken anew."""
    loss = Quadratic()
    diagonal, second = np.diagonal(loss.hessian), np.square(loss.gradients).mean(0)
    assert said("hessian_trace", loss)["loss_hessian_trace"] == pytest.approx(diagonal.sum())
    assert said("ticdiag", loss)["loss_ticdiag"] == pytest.approx((second / (diagonal + 1e-7)).sum())
    assert said("tictrace:epsilon=0", loss)["loss_tictrace"] == pytest.approx(second.sum() / diagonal.sum())
    assert loss.asked == 5
    other = Quadratic(seed=1)
    trace = said("hessian_eigen", other), said("hessian_trace", other)["loss_hessian_trace"]
    assert trace[1] == pytest.approx(np.trace(other.hessian))
    assert other.asked == 5


def test_quotients_of_intervals() -> None:
    """Where the trace may be 0, the criterion may be anything; where it is negative, so is the criterion."""

    class Estimated(Quadratic):
        @property
        def hessian(self) -> NDArray[np.float64]:
            return self.matrix

        def __init__(self, matrix: NDArray[np.float64]) -> None:
            super().__init__(p=len(matrix))
            self.matrix = matrix

    values = np.where(np.arange(40) % 2, 1.0, -1.0)
    around_zero = said("tictrace:exact=0,probes=6", Estimated(symmetric(40, values)))
    assert around_zero["loss_tictrace_low"] == -np.inf
    assert around_zero["loss_tictrace_high"] == np.inf
    negative = said("tictrace:exact=0,probes=30", Estimated(-np.eye(40)))
    assert negative["loss_tictrace_low"] <= negative["loss_tictrace"] <= negative["loss_tictrace_high"] < 0


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ("hessian_trace:modules=conv*", "no parameters of modules conv* are trained; modules with such are fc"),
        ("ticdiag:exact=4", "ticdiag differentiates once for each of 5 parameters, which is more than exact=4"),
        ("ticdiag:exact=6", "ticdiag differentiates once for each of 7 datapoints, which is more than exact=6"),
    ],
)
def test_what_a_loss_cannot_answer_gets_a_sentence(wish: str, sentence: str) -> None:
    """Each names what was found."""
    with pytest.raises(tracer.CaptureError) as caught:
        said(wish, Quadratic())
    assert sentence in str(caught.value)


def test_without_the_model_there_is_no_answer() -> None:
    """A message alone does not serve."""
    with pytest.raises(tracer.CaptureError, match="tictrace cannot differentiate the loss of step 3"):
        said("tictrace", None)


def test_live_runs_of_one_training_say_the_same(tmp_path: Path) -> None:
    """Estimates draw from generators of their own, so what is said does not depend on the program's."""
    told = []
    for number in range(2):
        torch.manual_seed(0)
        net, heard = Net(), Collect("loss_*")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x, y = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
        torch.manual_seed(number)
        np.random.seed(number)  # noqa: NPY002 - whatever it is
        receivers = [parse("hessian_trace:exact=0"), parse("hessian_eigen:exact=0"), heard]
        with tracer.record(
            tmp_path / f"{number}.zarr", net, optimizer, receivers=receivers, strict=True, capture=tracer.Capture()
        ):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        told.append([(one.kind, one.data.tolist()) for one in heard if one.data is not None])
    assert told[0] == told[1]
    assert len(told[0]) == 7
