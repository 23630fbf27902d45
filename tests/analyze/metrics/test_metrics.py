"""Statistics, norms, histograms and means against an oracle that is not this project: NumPy, SciPy, exact fractions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import torch

import analyze
from analyze.metrics.inputs import BLOCK
from tests.analyze.metrics.messages import INF, NAN, module_message, numbers
from tracer import MessageBus, MessageError, NetworkMessage
from tracer.messaging.receiver import Collect
from tracer.numbers.arrays import as_array

# -- elementwise statistics ---------------------------------------------------------------------------------


def test_variance_of_sorted_blocks() -> None:
    """Blocks with very different means are merged without loss (Chan's formula)."""
    x = np.repeat([-1e6, 0.0, 1e6], BLOCK) + np.random.default_rng(0).standard_normal(3 * BLOCK)
    assert analyze.variance(x) == pytest.approx(x.var(ddof=1), rel=1e-13)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_norm_where_squares_leave_float64(scale: float) -> None:
    """Numbers whose squares overflow or underflow have a norm all the same."""
    assert analyze.norm([3 * scale, 4 * scale]) == pytest.approx(5 * scale, rel=1e-14)
    assert analyze.norm([3 * scale, 4 * scale], 3) == pytest.approx(91 ** (1 / 3) * scale, rel=1e-13)


def test_edge_values_of_statistics() -> None:
    """Empty, NaN, infinite and complex data give the documented values, and never an error or a warning."""
    empty = torch.zeros(0, 3)
    assert math.isnan(analyze.mean(empty))
    assert math.isnan(analyze.variance(empty))
    assert (analyze.sum(empty), analyze.norm(empty), analyze.norm(empty, INF), analyze.spectral_norm(empty)) == (0,) * 4
    assert math.isnan(analyze.variance([1.0]))
    assert analyze.variance([1.0], ddof=0) == 0
    for statistic in (analyze.mean, analyze.sum, analyze.variance, analyze.norm, analyze.spectral_norm):
        assert math.isnan(statistic([1.0, NAN, INF])), statistic
        assert math.isnan(statistic(torch.tensor([1.0, NAN]))), statistic
    assert analyze.mean([INF, 1.0]) == analyze.norm([-INF, 1.0]) == analyze.spectral_norm([[INF, 1.0]]) == INF
    assert math.isnan(analyze.mean([INF, -INF]))
    assert math.isnan(analyze.variance([INF, 1.0]))
    z = torch.tensor([3 + 4j, 0])
    assert (analyze.norm(z), analyze.norm(z, 1), analyze.norm(z, INF)) == (5, 5, 5)
    assert math.isnan(analyze.mean(z))
    assert math.isnan(analyze.sum(z))
    assert analyze.variance(z) == pytest.approx(np.var(z.numpy(), ddof=1))
    assert analyze.norm(torch.conj(z)) == 5


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32])
def test_dtypes_that_numpy_lacks(dtype: torch.dtype) -> None:
    """Rare dtypes are upcast without loss."""
    assert analyze.norm(torch.tensor([3.0, 4.0]).to(dtype)) == 5


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor", "ignore:torch.ao.quantization")
def test_sparse_and_quantized_tensors() -> None:
    """A sparse gradient of an embedding and a quantized weight are taken as the dense numbers that they stand for."""
    dense = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    assert analyze.norm(dense.to_sparse()) == 5
    assert analyze.norm(torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8)) == 5
    with pytest.raises(MessageError, match="numbers"):
        analyze.norm(np.array(["a"]))


def test_inputs_are_left_alone() -> None:
    """No metric writes into the tensor that it was given, which others receive too."""
    data = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(12, 5)
    before = data.clone()
    for metric in (
        analyze.Mean("weights"),
        analyze.Sum("weights"),
        analyze.Variance("weights"),
        *(analyze.Norm(order=order) for order in (0.5, 1, 2, INF)),
        analyze.SpectralNorm(),
        analyze.Histogram(),
        analyze.SVCCA("weights"),
    ):
        list(metric.compute(module_message("weights", data)))
        list(metric.compute(module_message("weights", data, step=1)))
        assert torch.equal(data, before), metric
    big = torch.tensor([[1e200, 2e200]], dtype=torch.float64)
    analyze.norm(big), analyze.spectral_norm(big)
    assert big.tolist() == [[1e200, 2e200]]


def test_ratio() -> None:
    """The ratio of norms, its edge values, and its answers under live conditions: no answer for half a pair."""
    assert analyze.ratio([3.0, 4.0], [10.0]) == 0.5
    assert analyze.ratio([3.0, 4.0], [7.0], order=1) == 1
    assert analyze.ratio([1.0], [0.0]) == INF
    assert math.isnan(analyze.ratio([0.0], [0.0]))
    assert math.isnan(analyze.ratio([NAN], [0.0]))
    assert math.isnan(analyze.ratio([INF], [INF]))
    assert analyze.ratio([0.0], [5.0]) == 0
    bus, heard = MessageBus(), Collect("weight_updates_weights_ratio")
    bus.register(analyze.Ratio())
    bus.register(heard)
    for step in range(3):
        bus.publish(module_message("weights", [3.0, 4.0], step=step))
        if step != 1:
            bus.publish(module_message("weight_updates", [0.0, 1.0 + step], step=step))
    bus.finish()
    assert numbers(heard) == [("weight_updates_weights_ratio", 0, 0.2), ("weight_updates_weights_ratio", 2, 0.6)]


def test_kinds_of_norms() -> None:
    """The order of a norm is part of the kind of its answers, so that two orders may be asked at once."""
    orders = (2, 2.0, 1, INF, 0.5)
    assert [analyze.Norm(order=order).produces[0].removeprefix("weights_") for order in orders] == [
        "norm2",
        "norm2",
        "norm1",
        "norminf",
        "norm0.5",
    ]
    assert analyze.Ratio(order=1).produces == ("weight_updates_weights_ratio1",)


def test_events_carry_no_data() -> None:
    """Asking for the mean of an event is an error when it is asked, not in the middle of a replay."""
    for metric in (analyze.Mean, analyze.SpectralNorm, analyze.Histogram, analyze.SVCCA, analyze.MessageMean):
        with pytest.raises(MessageError, match=r"batch_started .* carry no data"):
            metric("batch_started")
    with pytest.raises(MessageError, match="epoch_finished"):
        analyze.Ratio("weights", "epoch_finished")
    with pytest.raises(MessageError, match="event"):
        as_array(None)


def test_loss_is_the_recorded_number() -> None:
    """A loss is given as it was; one per datapoint is averaged."""
    message = NetworkMessage(kind="loss", data=torch.tensor(0.1), global_step=3, train_step=1, epoch=1, tag="eval")
    (said,) = analyze.Loss(tag="eval").compute(message)
    assert (said.kind, said.key, said.tag, said.epoch) == ("loss_value", None, "eval", 1)
    assert said.data.dtype == torch.float64
    assert float(said.data) == float(np.float32(0.1))
    assert analyze.loss([1.0, 2.0, 6.0]) == 3
    assert math.isnan(analyze.loss([]))


# -- spectral norm ------------------------------------------------------------------------------------------


def matrices() -> Iterator[tuple[str, np.ndarray[Any, Any], float]]:
    """Matrices with a known largest singular value, from closed forms or 50 digits of mpmath."""
    yield "Hilbert 5", scipy.linalg.hilbert(5), 1.5670506910982307955
    yield "Hilbert 10", scipy.linalg.hilbert(10), 1.7519196702651775224
    tridiagonal = 2 * np.eye(50) - np.eye(50, k=1) - np.eye(50, k=-1)
    yield "tridiagonal", tridiagonal, 4 * math.sin(50 * math.pi / 102) ** 2
    yield "Hadamard", scipy.linalg.hadamard(64), 8.0
    yield "scaled Hadamard", scipy.linalg.hadamard(128) / math.sqrt(128), 1.0
    laplacian = np.array([[[[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]]])
    yield "a convolution's kernel, reshaped", laplacian, math.sqrt(20)
    yield "identity", np.eye(30), 1.0
    yield "ties", np.diag([2.0, 2, 2, 1, -2]), 2.0
    yield "a gap of 1e-8", np.diag([1.0, 1 - 1e-8, 0.5]), 1.0
    yield "rank 1", np.outer(np.arange(1, 6), np.arange(1, 8)).astype(float), math.sqrt(55 * 140)
    yield "zero", np.zeros((3, 4)), 0.0
    yield "a row", np.array([[3.0, 4.0]]), 5.0
    yield "a vector", np.array([3.0, 4.0]), 5.0
    yield "a number", np.array(-3.0), 3.0
    yield "complex", np.array([[3j, 0], [0, 1]]), 3.0


@pytest.mark.parametrize(("w", "exact"), [case[1:] for case in matrices()], ids=[case[0] for case in matrices()])
def test_spectral_norm_of_known_matrices(w: Any, exact: float) -> None:
    """The largest singular value where it is known, at every scale that float64 has."""
    assert analyze.spectral_norm(w) == pytest.approx(exact, rel=1e-13)
    for scale in (1e-300, 1e-30, 1e30, 1e300):
        assert analyze.spectral_norm(w * scale) == pytest.approx(exact * scale, rel=1e-12)


def test_spectral_norm_where_lapack_finds_fewer_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal eigenvalues some of LAPACK's kernels give none: then all are computed."""
    eigh, subsets = scipy.linalg.eigh, []

    def fewer(*args: Any, subset_by_index: Any = None, **options: Any) -> Any:
        squares, vectors = eigh(*args, subset_by_index=subset_by_index, **options)
        subsets.append(subset_by_index)
        return (squares, vectors) if subset_by_index is None else (squares[:0], vectors[:, :0])

    monkeypatch.setattr(scipy.linalg, "eigh", fewer)
    w = np.random.default_rng(0).standard_normal((20, 30))
    assert analyze.spectral_norm(w) == pytest.approx(np.linalg.norm(w, 2), rel=1e-13)
    assert subsets == [(19, 19), None]


def test_spectral_norm_equals_svd() -> None:
    """Tall, wide, float32, bfloat16 and convolutional weights agree with LAPACK's SVD to 1e-6 and much better."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((300, 80), (80, 300), (64, 64), (32, 16, 3, 3), (1, 500), (500, 1), (7, 3, 5)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            w = torch.randn(shape, generator=generator).to(dtype)
            exact = np.linalg.norm(w.double().numpy().reshape(shape[0], -1), 2)
            assert analyze.spectral_norm(w) == pytest.approx(exact, rel=1e-12)


# -- histogram and message mean -----------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [1, 7, 50])
@pytest.mark.parametrize("ends", [(None, None), (-1.0, 2.0), (None, 1.0), (0.0, None)])
def test_histogram_equals_numpy(bins: int, ends: tuple[float | None, float | None]) -> None:
    """Counts and edges are those of numpy.histogram over the same range, NaN and infinities left out."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    low, high = ends
    span = (float(x.min()) if low is None else low, float(x.max()) if high is None else high)
    counts, edges = np.histogram(x.double().numpy(), bins, span)
    with_junk = torch.cat([x, torch.tensor([NAN, INF, -INF])])
    said = list(analyze.Histogram(bins=bins, low=low, high=high).compute(module_message("weights", with_junk)))
    assert [one.kind for one in said] == ["weights_histogram", "weights_histogram_edges"]
    assert [one.data.dtype for one in said] == [torch.int64, torch.float64]
    np.testing.assert_array_equal(said[0].data.numpy(), counts)
    np.testing.assert_array_equal(said[1].data.numpy(), edges)


def test_histogram_of_degenerate_data() -> None:
    """Equal, empty, extreme, tiny-ranged and complex data have a histogram too, and it counts everything."""
    assert analyze.histogram([3.0, 3.0], bins=2).edges.tolist() == [2.5, 3.0, 3.5]
    for nothing in ([], [NAN], torch.tensor([1j])):
        counts, edges = analyze.histogram(nothing, bins=3)
        assert counts.tolist() == [0, 0, 0]
        assert np.isnan(edges).all()
        assert edges.shape == (4,)
    assert analyze.histogram([], bins=2, low=0.0, high=1.0).edges.tolist() == [0, 0.5, 1]
    assert np.isnan(analyze.histogram([1.0], low=2.0).edges).all()
    huge = analyze.histogram([-1.7e308, 0.0, 1.7e308], bins=3)
    assert huge.counts.tolist() == [1, 1, 1]
    assert huge.edges[0] == -1.7e308
    close = analyze.histogram([1.0, np.nextafter(1.0, 2)], bins=10)
    assert close.counts.sum() == 2
    large = analyze.histogram([1e300, 1e300], bins=4)
    assert large.counts.sum() == 2


def test_message_mean_does_not_depend_on_order() -> None:
    """The sum is exact, so modules may come in any order; overflow of the sum is not overflow of the mean."""
    values = [1e16, 1.0, -1e16, 3.0]
    assert {analyze.message_mean(order) for order in itertools.permutations(values)} == {1.0}
    assert analyze.message_mean([1.5e308, 1.5e308]) == 1.5e308
    assert math.isnan(analyze.message_mean([1.0, NAN]))
    assert analyze.message_mean([1.0, INF]) == INF
    assert math.isnan(analyze.message_mean([-INF, INF]))


@pytest.mark.parametrize("data", [[1.0, 2.0], [], [1j]])
def test_message_mean_takes_numbers_only(data: Any) -> None:
    """What is not one real number has no mean over modules; that makes a NaN of its step, and ends no replay."""
    overall, said = analyze.MessageMean("activations"), []
    for step, these in enumerate([[3.0], data, [5.0]]):
        said += overall.compute(module_message("activations", these, step=step))
    assert [float(one.data) for one in said] == pytest.approx([3.0, math.nan], nan_ok=True)
    assert [float(said.data) for said in overall.conclude()] == [5.0]
