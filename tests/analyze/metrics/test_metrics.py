"""Every metric against an oracle that is not this project: NumPy, SciPy, exact fractions or closed forms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits, load_iris, load_linnerud

import analyze
from analyze.metrics.inputs import BLOCK
from analyze.metrics.similarity.bases import basis
from analyze.metrics.similarity.canonical import compare, null_baseline
from analyze.metrics.similarity.datapoints import neurons
from tests.examples import examples
from tracer import MessageBundle, MessageBus, MessageError, ModuleMessage, NetworkMessage
from tracer.messaging.receiver import Collect
from tracer.numbers.arrays import as_array

INF, NAN = float("inf"), float("nan")


def module_message(kind: str, data: Any, module: str = "fc", step: int = 0, **more: Any) -> ModuleMessage:
    """A message of a module in some step."""
    data = data if isinstance(data, torch.Tensor) else torch.tensor(data)
    return ModuleMessage(kind=kind, module=module, data=data, global_step=step, train_step=step, epoch=0, **more)


def pair(step: int, output: Any, labels: Any, tag: str = "default", call: int = 0) -> MessageBundle:
    """The outputs and labels of one batch."""
    bundle = MessageBundle(("network_output", "input_labels"))
    for kind, data in zip(bundle.kinds, (output, labels), strict=True):
        bundle.add(
            NetworkMessage(
                kind=kind,
                data=torch.as_tensor(data),
                global_step=step,
                train_step=step,
                epoch=0,
                tag=tag,
                call=call,
            )
        )
    return bundle


def numbers(answers: Any) -> list[tuple[str, int, float]]:
    """Kind, step and value of answers."""
    return [(said.kind, said.global_step, float(said.data)) for said in answers]


def same(one: float, other: float) -> bool:
    """Equal, or both NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


DATA = {
    "float32 of several blocks": torch.linspace(-3, 5, 2 * BLOCK + 17).reshape(-1, 1),
    "bfloat16": torch.linspace(-3, 5, 1000).bfloat16(),
    "float16 beyond its own sums": torch.full((70000,), 3.0, dtype=torch.float16),
    "integers": torch.arange(-5, 20).reshape(5, 5),
    "booleans": torch.tensor([True, False, True]),
    "one number": torch.tensor(2.5),
    "channels last": torch.arange(120.0).reshape(1, 4, 6, 5).to(memory_format=torch.channels_last),
    "a strided view": torch.arange(100.0)[::7],
    "nested lists": [[1, 2], [3, 4.5]],
}


# -- elementwise statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("x", DATA.values(), ids=DATA)
def test_statistics_equal_numpy_in_float64(x: Any) -> None:
    """Mean, sum, variance and norms of every dtype and layout are those of NumPy on float64 copies."""
    exact = np.array(torch.as_tensor(x).double().tolist(), dtype=np.float64).reshape(-1)
    assert analyze.mean(x) == pytest.approx(exact.mean(), rel=1e-12)
    assert analyze.sum(x) == pytest.approx(exact.sum(), rel=1e-12)
    for ddof in (0, 1) if exact.size > 1 else (0,):
        assert analyze.variance(x, ddof=ddof) == pytest.approx(exact.var(ddof=ddof), rel=1e-12)
    for order in (0.5, 1, 2, 3, INF):
        assert analyze.norm(x, order) == pytest.approx(np.linalg.norm(exact, order), rel=1e-12)


@settings(max_examples=examples(60))
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40))
def test_statistics_equal_exact_fractions(values: list[float]) -> None:
    """Mean and variance equal those computed without any rounding."""
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / (len(exact) - 1)
    size = max(map(abs, values)) + 1e-300
    assert analyze.mean(values) == pytest.approx(float(mean), rel=1e-12, abs=1e-14 * size)
    assert analyze.variance(values) == pytest.approx(float(variance), rel=1e-9, abs=1e-20 * size**2)


def test_norm_of_many_float32() -> None:
    """2^24 float32 numbers have the norm of their float64 copies; torch's float32 norm is off by 1e-4 and more."""
    x = torch.randn(2**24, generator=torch.Generator().manual_seed(1))
    exact = math.sqrt(sum(float(np.dot(part, part)) for part in np.split(x.numpy().astype(np.float64), 64)))
    assert analyze.norm(x) == pytest.approx(exact, rel=1e-12)
    assert analyze.norm(torch.full((2**20,), 0.1)) == pytest.approx(1024 * float(np.float32(0.1)), rel=1e-13)


def test_variance_is_safe_from_offsets() -> None:
    """An offset of 1e8 takes no more from the variance than the rounding of the data itself does."""
    x = np.random.default_rng(0).standard_normal(3 * BLOCK)
    assert analyze.variance(x.astype(np.float32) + np.float32(1e4)) == pytest.approx(
        (x.astype(np.float32) + np.float32(1e4)).astype(np.float64).var(ddof=1), rel=1e-12
    )
    assert analyze.variance(x + 1e8) == pytest.approx(x.var(ddof=1), rel=1e-6)
    assert analyze.variance(np.full(100000, 0.1)) == pytest.approx(0, abs=1e-30)


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


@pytest.mark.parametrize("order", [0, -1, NAN, "2", True])
def test_orders_of_norms_are_checked(order: Any) -> None:
    """A norm's order is a positive number."""
    with pytest.raises(MessageError, match="positive number or inf"):
        analyze.norm([1.0], order)


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


def test_blocks_of_all_layouts_agree_to_the_bit() -> None:
    """The same elements in another memory layout, or on another thread count, give the same bits."""
    x = torch.randn(8, 16, 32, 33, generator=torch.Generator().manual_seed(0))
    for statistic in (analyze.mean, analyze.variance, analyze.norm, analyze.sum):
        assert statistic(x) == statistic(x.to(memory_format=torch.channels_last))


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


def test_spectral_norm_through_a_crossing() -> None:
    """Where the two largest singular values change places, the answer follows the larger at every step."""
    metric = analyze.SpectralNorm()
    for t in range(11):
        w = torch.diag(torch.cat([torch.tensor([3 - 0.1 * t, 2 + 0.1 * t]), torch.linspace(0, 1, 20)]).double())
        said, *_ = metric.compute(module_message("weights", w, step=t))
        assert float(said.data) == pytest.approx(max(3 - 0.1 * t, 2 + 0.1 * t), rel=1e-6)


@settings(max_examples=examples(40))
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**31), st.integers(-60, 60))
def test_spectral_norm_of_random_matrices(rows: int, columns: int, seed: int, exponent: int) -> None:
    """Random matrices of any scale, multiplied by orthogonal maps: equal to NumPy's, unchanged by the maps."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, columns)) * 10.0**exponent
    turned = np.linalg.qr(rng.standard_normal((rows, rows)))[0] @ w
    assert analyze.spectral_norm(w) == pytest.approx(np.linalg.norm(w, 2), rel=1e-12)
    assert analyze.spectral_norm(turned) == pytest.approx(analyze.spectral_norm(w), rel=1e-12)


# -- accuracy -----------------------------------------------------------------------------------------------

ACCURACIES = {
    "classes": ([[2, 1, 0], [0, 2, 1], [1, 2, 0]], [0, 1, 2], 2 / 3),
    "a column of classes": ([[2, 1, 0], [0, 2, 1]], [[0], [2]], 1 / 2),
    "one-hot labels": ([[2, 1, 0], [0, 2, 1]], [[1, 0, 0], [0, 0, 1]], 1 / 2),
    "soft labels": ([[2.0, 1, 0], [0, 2, 1]], [[0.6, 0.3, 0.1], [0.1, 0.8, 0.1]], 1.0),
    "ignored labels": ([[2, 1], [2, 1], [2, 1]], [0, -100, 1], 1 / 2),
    "all ignored": ([[2, 1]], [-100], NAN),
    "no datapoints": (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), NAN),
    "pixels": (torch.tensor([[[0.0, 9], [5, 1]]]), [[1, 1]], 1 / 2),
    "words, classes last": (torch.eye(3).expand(2, 3, 3)[:, :2], [[0, 1], [0, 2]], 3 / 4),
    "one datapoint": ([0.1, 0.9], 1, 1.0),
    "logits of a yes/no question": ([3.0, -1.0, 0.5, -2.0], [1, 0, 0, 1], 1 / 2),
    "a column of logits": ([[3.0], [-1.0]], [1.0, 1.0], 1 / 2),
    "two columns of logits": ([[3.0], [-1.0]], [[1.0], [0.0]], 1.0),
    "yes/no pixels": (torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[1, 1]]]), 1 / 2),
    "ties go to the first class": ([[1, 1], [1, 1]], [0, 1], 1 / 2),
    "NaN scores are not correct": ([[NAN, 1], [2, 1]], [0, 0], 1 / 2),
    "half precision": (torch.tensor([[0.1, 0.9]]).bfloat16(), [1], 1.0),
    "booleans": (torch.tensor([True, False]), torch.tensor([True, True]), 1 / 2),
}


@pytest.mark.parametrize(("output", "labels", "exact"), ACCURACIES.values(), ids=ACCURACIES)
def test_accuracy(output: Any, labels: Any, exact: float) -> None:
    """Every form of outputs and labels that PyTorch's losses take."""
    assert same(analyze.accuracy(output, labels), exact)
    assert same(analyze.test_accuracy([(output, labels)]), exact)
    ((_, step, value),) = numbers(analyze.TrainAccuracy().compute(pair(3, output, labels)))
    assert step == 3
    assert same(value, exact)


def test_accuracy_of_probabilities() -> None:
    """For probabilities of yes, the threshold is a half."""
    assert analyze.accuracy([0.4, 0.6], [0, 1]) == 0.5
    assert analyze.accuracy([0.4, 0.6], [0, 1], threshold=0.5) == 1


@pytest.mark.parametrize(
    ("output", "labels"),
    [([[1, 2], [3, 4]], [0, 1, 0]), ([1.0, 2.0], [[0, 1, 2]]), (torch.zeros(2, 0), [0, 1]), ([1j], [1])],
)
def test_labels_that_do_not_fit(output: Any, labels: Any) -> None:
    """Shapes that do not fit are an error of the pure function, and NaN in a replay, which goes on."""
    with pytest.raises(MessageError):
        analyze.accuracy(output, labels)
    for metric in (analyze.TrainAccuracy(), analyze.TestAccuracy()):
        said = numbers([*metric.compute(pair(0, output, labels)), *metric.conclude()])
        assert len(said) == 1
        assert math.isnan(said[0][2])


def test_test_accuracy_pools_batches() -> None:
    """Batches of 64 and 3: the accuracy of the 67, one answer a pass and tag, with the counters of the pass."""
    metric = analyze.TestAccuracy()
    rng = np.random.default_rng(0)
    said, exact = [], []
    for step in (0, 10):
        for tag in ("eval", "probe"):
            outputs, labels = rng.standard_normal((67, 4)), rng.integers(0, 4, 67)
            exact.append((tag, step, float((outputs.argmax(1) == labels).mean())))
            for call, batch in enumerate((slice(0, 64), slice(64, 67))):
                said += metric.compute(pair(step, outputs[batch], labels[batch], tag, call))
        if step == 0:
            assert not said  # nothing is over yet
    said += metric.conclude()
    assert sorted((one.tag, one.global_step, float(one.data)) for one in said) == sorted(exact)
    assert {(type(one), one.kind, one.call) for one in said} == {(NetworkMessage, "test_accuracy", 0)}
    assert not list(metric.conclude())


def test_test_accuracy_hears_no_training() -> None:
    """By default it takes every tag but that of training passes."""
    metric = analyze.TestAccuracy()
    assert [metric.wants("network_output", None, tag, 0) for tag in ("default", "eval", "probe")] == [False, True, True]


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


@pytest.mark.parametrize(
    "wrong", [{"bins": 0}, {"bins": 2.5}, {"low": NAN}, {"high": INF}, {"low": 1.0, "high": 1.0}, {"low": "a"}]
)
def test_histogram_parameters_are_checked(wrong: dict[str, Any]) -> None:
    """Bins are a positive integer, the ends finite and in order."""
    with pytest.raises(MessageError):
        analyze.Histogram(**wrong)
    with pytest.raises(MessageError):
        analyze.histogram([1.0], **wrong)


def test_message_mean_of_a_chain() -> None:
    """The mean over modules of what another subscriber answers, one for each step, the last one at the end."""
    bus, heard = MessageBus(), Collect("*_message_mean")
    for receiver in (analyze.Norm(), analyze.MessageMean("weights_norm2"), heard):
        bus.register(receiver)
    for step, module in itertools.product(range(3), ("a", "b", "c")):
        bus.publish(module_message("weights", [float(ord(module) - 96 + step)], module, step))
    bus.finish()
    assert numbers(heard) == [("weights_norm2_message_mean", step, 2.0 + step) for step in range(3)]
    assert all(isinstance(one, NetworkMessage) for one in heard)


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


# -- SVCCA --------------------------------------------------------------------------------------------------


def reference(x: Any, y: Any, threshold: float) -> tuple[float, Any, int, int]:
    """SVCCA as in section 2 of the paper, written naively: SVD, truncation by variance, principal angles of SciPy."""
    kept = []
    for data in (x, y):
        centred = np.asarray(data, dtype=np.float64)
        centred = centred - centred.mean(0)
        left, singular, _ = np.linalg.svd(centred, full_matrices=False)
        share = np.cumsum(singular**2) / np.sum(singular**2)
        kept.append(left[:, : int(np.argmax(share >= threshold * (1 - 1e-12))) + 1])
    rho = np.sort(np.cos(scipy.linalg.subspace_angles(*kept)))[::-1]
    return float(rho.mean()), rho, kept[0].shape[1], kept[1].shape[1]


def digits() -> tuple[Any, Any]:
    """The left and the right halves of real images of digits: 1797 datapoints, 32 and 32 pixels."""
    images = load_digits().images
    return images[:, :, :4].reshape(-1, 32), images[:, :, 4:].reshape(-1, 32)


@pytest.mark.parametrize(
    ("threshold", "value", "kept"),
    [(0.9, 0.461428813131925, (10, 13)), (0.99, 0.388487144464583, (20, 23)), (0.999, 0.365482719458374, (23, 27))],
)
def test_svcca_of_digits(threshold: float, value: float, kept: tuple[int, int]) -> None:
    """Real images with constant columns, against three independent routes that agree to 7e-15."""
    left, right = digits()
    found = analyze.svcca(left, right, threshold)
    assert float(found) == pytest.approx(value, abs=1e-12)
    assert ((found.k, found.m), found.status, found.n) == (kept, "ok", 1797)
    by_angles = reference(left, right, threshold)
    bases = []
    for half, k in zip((left, right), kept, strict=True):
        bases.append(np.linalg.svd(half - half.mean(0), full_matrices=False)[0][:, :k])
    by_svd = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False).mean()
    assert by_angles[0] == pytest.approx(by_svd, abs=7e-15)
    assert float(found) == pytest.approx(by_svd, abs=7e-15)
    if threshold == 0.99:
        assert found.rho[0] == pytest.approx(0.812065102635, abs=1e-11)
        assert found.rho[-1] == pytest.approx(0.029226967045, abs=1e-11)
    assert float(found) > 3 * found.null_baseline


def test_cca_of_published_data() -> None:
    """All directions kept (threshold 1): plain CCA, with 20 digits of mpmath; the first is in the SAS manual."""
    data = load_linnerud()
    exact = [0.79560815441999178599, 0.20055604110712326285, 0.072570286210367160538]
    np.testing.assert_allclose(analyze.svcca(data.data, data.target, 1.0).rho, exact, atol=1e-14)
    iris = load_iris().data
    exact = [0.94096899697574949303, 0.12393688120540402527]
    np.testing.assert_allclose(analyze.svcca(iris[:, :2], iris[:, 2:], 1.0).rho, exact, atol=1e-14)


def test_svcca_of_integers() -> None:
    """A small example with 20 digits of mpmath, where 0.99 keeps every direction."""
    x = [[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]]
    y = [[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]]
    exact = [0.99413012089961007899, 0.91592805071318879217]
    for threshold in (0.99, 1.0):
        found = analyze.svcca(torch.tensor(x), y, threshold)
        np.testing.assert_allclose(found.rho, exact, atol=1e-13)
        assert float(found) == pytest.approx(sum(exact) / 2, abs=1e-13)


def test_cca_of_laeuchli() -> None:
    """Columns that are nearly parallel, where the covariance loses all digits: the SVD route keeps them."""
    e = 1e-6
    x = [[1, 1, 1], [e, 0, 0], [0, e, 0], [0, 0, e], [0, 0, 0], [1, 2, 3]]
    y = [[1, 0], [2, 1], [0, 3], [1, 1], [4, 2], [2, 5]]
    exact = [0.99981919861607321092, 0.47244892838000064511]
    np.testing.assert_allclose(analyze.svcca(x, y, 1.0).rho, exact, atol=1e-6)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e9])
def test_constructed_correlations(condition: float) -> None:
    """Data built to have given canonical correlations, seen through ill-conditioned maps."""
    rng = np.random.default_rng(0)
    n, exact = 200, np.array([1, 0.9, 0.5, 0.1, 1e-6, 0])
    k = len(exact)
    random = rng.standard_normal((n, 2 * k))
    q = np.linalg.qr(random - random.mean(0))[0]
    left, right = (np.linalg.qr(rng.standard_normal((k, k)))[0] for _ in range(2))
    bend = left @ np.diag(np.geomspace(1, 1 / condition, k)) @ right
    x = q[:, :k] @ bend
    y = (q[:, :k] * exact + q[:, k:] * np.sqrt(1 - exact**2)) @ rng.standard_normal((k, k))
    np.testing.assert_allclose(analyze.svcca(x, y, 1.0).rho, exact, atol=max(1e-14, 1e-15 * condition))


def test_truncation_includes_the_crossing_direction() -> None:
    """The fewest directions that reach the share of the variance, the one that reaches it included."""
    n = 1001
    rng = np.random.default_rng(0)
    random = rng.standard_normal((n, 4))
    q = np.linalg.qr(random - random.mean(0))[0]
    for spectrum, k in (([0.995, 0.005], 1), ([0.97, 0.025, 0.005], 2), ([0.25] * 4, 4), ([0.99, 0.01], 1)):
        x = q[:, : len(spectrum)] * np.sqrt(spectrum)
        assert basis(x, 0.99).k == k
        assert basis(x[:, ::-1].T.copy().T, 0.99).k == k
        assert basis(np.pad(x, ((0, 0), (0, n))), 0.99).k == k  # more neurons than datapoints: the Gram route


def test_routes_agree() -> None:
    """Covariance, Gram and SVD give the same correlations, also with an offset of 1e4 in float32."""
    rng = np.random.default_rng(3)
    z = rng.standard_normal((300, 40)) * np.geomspace(1, 1e-3, 40)
    x, y = z @ rng.standard_normal((40, 60)), np.maximum(z @ rng.standard_normal((40, 50)), 0)
    value, rho, k, m = reference(x, y, 0.99)
    found = analyze.svcca(x, y)
    assert (found.k, found.m) == (k, m)
    np.testing.assert_allclose(found.rho, rho, atol=1e-10)
    assert float(found) == pytest.approx(value, abs=1e-11)
    wide = analyze.svcca(np.pad(x, ((0, 0), (0, 400))), np.pad(y, ((0, 0), (0, 400))))
    assert float(wide) == pytest.approx(value, abs=1e-11)
    assert wide.k == k
    closest = 1 - 1e-7  # closer to 1 than the covariance is good for
    assert float(analyze.svcca(x, y, closest)) == pytest.approx(reference(x, y, closest)[0], abs=1e-9)
    shifted = [(data + 1e4).astype(np.float32) for data in (x, y)]
    assert float(analyze.svcca(*shifted)) == pytest.approx(reference(*shifted, 0.99)[0], abs=1e-10)


@settings(max_examples=examples(25))
@given(st.integers(0, 2**31), st.integers(2, 12), st.integers(2, 12), st.sampled_from([1e-20, 1.0, 1e20, 1e200]))
def test_invariances_of_svcca(seed: int, d: int, e: int, scale: float) -> None:
    """Unchanged by orthogonal maps, scales, offsets, dead neurons, common permutations; symmetric; 1 with itself."""
    rng = np.random.default_rng(seed)
    # spectra with gaps, so that no rounding decides how many directions are kept
    z = rng.standard_normal((80, max(d, e)))
    x = z[:, :d] * 0.5 ** np.arange(d)
    y = (z[:, :e] + rng.standard_normal((80, e))) * 0.6 ** np.arange(e)
    value = float(analyze.svcca(x, y))
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
    order = rng.permutation(80)
    for same_x, same_y in (
        (x @ turn * scale, y),
        (x + 3, y - 5),
        (np.pad(x, ((0, 0), (2, 1))), y),
        (x[order], y[order]),
        (x[:, rng.permutation(d)], y),
    ):
        assert float(analyze.svcca(same_x, same_y)) == pytest.approx(value, abs=1e-9)
    assert float(analyze.svcca(y, x)) == pytest.approx(value, abs=1e-12)
    assert float(analyze.svcca(x, x @ turn)) == pytest.approx(1, abs=1e-9)
    assert 0 <= value <= 1


def test_single_neurons_are_correlated_by_pearson() -> None:
    """With one neuron on each side SVCCA is the absolute correlation coefficient."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 100))
    exact = abs(np.corrcoef(x, y)[0, 1])
    assert (
        float(analyze.svcca(x, y)) == float(analyze.svcca(x[:, None], -y[:, None])) == pytest.approx(exact, abs=1e-14)
    )


def test_degenerate_activations() -> None:
    """Dead layers, NaN, infinity and few datapoints: a status and the documented value, never an error."""
    x = np.random.default_rng(0).standard_normal((50, 5))
    for broken, status in (
        (np.zeros((50, 3)), "zero_variance"),
        (np.full((50, 3), 0.1), "zero_variance"),
        (np.full((50, 300), 1e20), "zero_variance"),
        (np.full((50, 3), NAN), "nonfinite"),
        (np.where(np.arange(250).reshape(50, 5) == 7, INF, x), "nonfinite"),
        (np.zeros((50, 0)), "mismatch"),
    ):
        if status != "mismatch":
            for found in (analyze.svcca(x, broken), analyze.svcca(broken, x)):
                assert math.isnan(float(found))
                assert found.status == status
        assert basis(broken).k == 0
        assert basis(broken).status == status
    assert math.isnan(float(compare(basis(x), basis(x[:40]))))
    assert compare(basis(x), basis(x[:40])).status == "mismatch"
    few = analyze.svcca(x[:6], x[:6, ::-1] ** 3, 1.0)
    assert (few.status, few.forced_ones, few.k) == ("few_samples", 5, 5)
    assert float(few) == pytest.approx(1, abs=1e-12)
    assert few.null_baseline == 1
    two = analyze.svcca(x[:2], x[2:4])
    assert (two.k, two.m, two.status) == (1, 1, "few_samples")
    assert float(two) == pytest.approx(1)


def test_an_outlier_is_visible_in_k() -> None:
    """One extreme value takes all the variance: the value is as defined, and k says why."""
    x = np.random.default_rng(0).standard_normal((100, 8))
    spoiled = x.copy()
    spoiled[3, 2] = 1e6
    assert analyze.svcca(spoiled, x).k == 1
    assert analyze.svcca(x, x).k == 8


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        ([[1.0]], [[1.0]], "at least two datapoints"),
        ([[1.0], [2.0]], [[1.0], [2.0], [3.0]], "x has 2 and y has 3"),
        ([[1j], [2.0]], [[1.0], [2.0]], "real activations"),
        (torch.zeros(4, 0), [[1.0]] * 4, "at least two datapoints"),
    ],
)
def test_what_cannot_be_compared(x: Any, y: Any, sentence: str) -> None:
    """The pure function refuses what the caller could have known."""
    with pytest.raises(MessageError, match=sentence):
        analyze.svcca(x, y)


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": 0}, {"threshold": 1.1}, {"threshold": NAN}, {"lag": 0}, {"lag": 1.5}, {"channels": "second"}],
)
def test_svcca_parameters_are_checked(wrong: dict[str, Any]) -> None:
    """A parameter out of its range is an error before the replay begins."""
    with pytest.raises(MessageError):
        analyze.SVCCA(**wrong)


def test_which_axis_is_the_neurons() -> None:
    """Channels of convolutions, features of sequences: all other axes are datapoints, in the same order for both."""
    x = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    np.testing.assert_array_equal(neurons(x), x.transpose(0, 2, 3, 1).reshape(-1, 3))
    np.testing.assert_array_equal(neurons(x, "last"), x.reshape(-1, 5))
    np.testing.assert_array_equal(neurons(x[0]), x[0].reshape(-1, 5))
    np.testing.assert_array_equal(neurons(x[0], "first"), x[0].transpose(0, 2, 1).reshape(-1, 4))
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 700, 6, 5, 7))  # larger than one chunk
    b = a + b
    flat = float(analyze.svcca(neurons(a), neurons(b)))
    assert float(analyze.svcca(a, b)) == pytest.approx(flat, abs=1e-12)
    assert flat == pytest.approx(reference(neurons(a), neurons(b), 0.99)[0], abs=1e-12)


def test_null_baseline_equals_simulation() -> None:
    """The value to expect of unrelated data, against unrelated data."""
    rng = np.random.default_rng(0)
    for n, k, m in ((100, 10, 20), (60, 20, 20), (50, 1, 8), (40, 1, 1), (50, 30, 30)):
        found = []
        for _ in range(200):
            x, y = (rng.standard_normal((n, width)) for width in (k, m))
            bases = [np.linalg.qr(data - data.mean(0))[0] for data in (x, y)]
            found.append(np.linalg.svd(bases[0].T @ bases[1], compute_uv=False).mean())
        error = np.std(found) / math.sqrt(len(found))
        assert null_baseline(n, k, m) == pytest.approx(np.mean(found), abs=4 * error + 0.3 / min(k, m) ** 2 * (k > 1))
    assert null_baseline(10000, 500, 500) == pytest.approx(0.1908, abs=1e-4)  # the value in google/svcca's tutorial
    assert null_baseline(10, 9, 3) == 1
    assert math.isnan(null_baseline(10, 0, 3))


def probes(count: int) -> list[ModuleMessage]:
    """Activations of a layer that moves a little at each probe, and of another, called twice."""
    rng = np.random.default_rng(5)
    start, drift = rng.standard_normal((2, 60, 8))
    return [
        module_message("activations", start + 0.3 * t * (1 + call) * drift, module, 10 * t, tag="probe", call=call)
        for t in range(count)
        for module, call in (("a", 0), ("b", 0), ("b", 1))
    ]


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_svcca_of_a_layer_with_its_past(lag: int) -> None:
    """Each probe is compared with the one `lag` before of the same module and call; the first ones have no answer."""
    metric = analyze.SVCCA(lag=lag, details=False)
    messages = probes(5)
    said = [one for message in messages for one in metric.compute(message)]
    assert len(said) == 3 * (5 - lag)
    for one in said:
        now, past = (
            next(m for m in messages if (m.module, m.call, m.global_step) == (one.key, one.call, step))
            for step in (one.global_step, one.global_step - 10 * lag)
        )
        assert float(one.data) == pytest.approx(reference(now.data, past.data, 0.99)[0], abs=1e-11)
    assert sum(metric.statuses.values()) == len(said)


def test_svcca_with_details() -> None:
    """Beside the value it says what it kept, the value to expect of unrelated layers, and how well posed it is."""
    metric = analyze.SVCCA(rho=True)
    first, second = (message for message in probes(2) if message.module == "a")
    said = [*metric.compute(first), *metric.compute(second)]
    found = analyze.svcca(second.data, first.data)
    *numbered, rho = said
    np.testing.assert_allclose([float(one.data) for one in numbered[:1]], [float(found)], atol=1e-14)
    assert [(one.kind, float(one.data)) for one in numbered[1:5]] == [
        ("activations_svcca_k", found.k),
        ("activations_svcca_m", found.m),
        ("activations_svcca_null", found.null_baseline),
        ("activations_svcca_forced_ones", 0),
    ]
    np.testing.assert_allclose([float(one.data) for one in numbered[5:7]], [found.cut_gap, found.tau_margin])
    assert (numbered[7].kind, float(numbered[7].data)) == ("activations_svcca_status", 0)
    np.testing.assert_allclose(rho.data, found.rho, atol=1e-14)
    assert metric.produces == tuple(one.kind for one in said)


def test_svcca_goes_on_after_trouble() -> None:
    """A probe with NaN, or with other datapoints, gives NaN twice, and then values again."""
    metric = analyze.SVCCA(details=False)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    said = [
        float(one.data)
        for step, data in enumerate([x, x * NAN, x, x[:30], x, x])
        for one in metric.compute(module_message("activations", data, step=step, tag="probe"))
    ]
    assert [math.isnan(value) for value in said] == [True, True, True, True, False]
    assert metric.statuses == {"nonfinite": 2, "mismatch": 2, "ok": 1}


def test_svcca_keeps_bases_not_activations() -> None:
    """What is remembered is n by k, however many neurons the layer has, and goes on bit for bit elsewhere."""
    narrow = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(3, 2000)
    metric = analyze.SVCCA()
    list(metric.compute(module_message("activations", narrow, tag="probe")))
    (stream,) = metric.state_dict()["past"]
    assert stream["kept"][0]["u_nk"].shape == (50, 3)
    messages = probes(6)
    whole, first, second = analyze.SVCCA(lag=2), analyze.SVCCA(lag=2), analyze.SVCCA(lag=2)
    expected = [float(one.data) for message in messages for one in whole.compute(message)]
    said = [float(one.data) for message in messages[:10] for one in first.compute(message)]
    second.load_state_dict(first.state_dict())
    said += [float(one.data) for message in messages[10:] for one in second.compute(message)]
    assert said == expected
    assert second.statuses == whole.statuses
