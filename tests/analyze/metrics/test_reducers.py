"""Aggregates, moving averages and statistics over modules and time, against NumPy, pandas and closed forms."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import analyze
from analyze.metrics.aggregate import KEPT, Reducer
from tests.analyze.metrics.messages import INF, NAN, exactly
from tests.examples import examples
from tracer import (
    CaptureError,
    Collect,
    Message,
    MessageBus,
    MessageError,
    ModuleMessage,
    NetworkMessage,
    TraceReader,
    TraceWriter,
    replay,
)

NAMES = ("mean", "std", "variance", "min", "q0.25", "median", "q0.75", "max", "iqr", "sum", "count", "first", "last")


def loss(value: Any, step: int, epoch: int = 0, **more: Any) -> NetworkMessage:
    """A loss in some step."""
    data = torch.as_tensor(value, dtype=torch.float64)
    return NetworkMessage(kind="loss", data=data, global_step=step, train_step=step, epoch=epoch, **more)


def values_of(answers: Any) -> list[tuple[str, int, float]]:
    """Kind, step and value."""
    return [(said.kind, said.global_step, float(said.data)) for said in answers]


# -- reductions ---------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(st.lists(st.floats(-1e6, 1e6).map(lambda one: round(one, 6)), min_size=1, max_size=50))
def test_reductions_equal_numpy(values: list[float]) -> None:
    """Mean, deviation, extremes, quartiles and the rest are those of NumPy."""
    found = analyze.aggregate(values, NAMES)
    size, exact = max(map(abs, values)), exactly(values)
    for name in NAMES:
        assert found[name] == pytest.approx(exact[name], rel=1e-9, abs=1e-12 * size**2 + 1e-13 * size, nan_ok=True), (
            name
        )


@settings(max_examples=examples(40))
@given(
    st.lists(st.integers(0, KEPT + 100), min_size=2, max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1.0, 1e3]),
)
@example(sizes=[722, 4196], seed=1781, offset=0.0)  # a median between a negative and a positive number
def test_reducers_merge(sizes: list[int], seed: int, offset: float) -> None:
    """Parts that are merged, also through their states, give what the whole gives: exact, or counted, to 1e-12."""
    generator = np.random.default_rng(seed)
    parts = [generator.standard_normal(size) + offset for size in sizes]
    whole, merged, joined = Reducer(), Reducer(), np.concatenate(parts)
    for start in range(0, len(joined), 1000):
        whole.add(joined[start : start + 1000])
    for part in parts:
        other = Reducer()
        other.add(part[: len(part) // 2])
        other.add(part[len(part) // 2 :])
        merged.merge(Reducer.of_state(other.state()))
    one, other_one = whole.answer(NAMES), merged.answer(NAMES)
    assert merged.count == len(joined)
    for name in NAMES:
        assert other_one[name] == pytest.approx(one[name], rel=1e-11, abs=1e-12 * (1 + offset), nan_ok=True), name
    if len(joined):
        # quantiles of more numbers than are kept are good to 0.05 % of the numbers that they lie between
        low, middle, high = (
            2**-11 * max(abs(np.quantile(joined, share, method=method)) for method in ("lower", "higher"))
            for share in (0.25, 0.5, 0.75)
        )
        loose = {"q0.25": low, "median": middle, "q0.75": high, "iqr": low + high} if len(joined) > KEPT else {}
        exact = exactly(joined)
        for name in NAMES:
            assert one[name] == pytest.approx(exact[name], rel=1e-9, abs=1e-9 + loose.get(name, 0.0), nan_ok=True), name


def test_counted_quantiles_of_all_kinds_of_numbers() -> None:
    """Zeros, signs, scales and infinities survive the counting; NaN gives NaN."""
    reducer = Reducer()
    x = np.concatenate([np.zeros(3000), -np.logspace(-300, 300, 3001), np.logspace(-300, 300, 3001)])
    reducer.add(np.random.default_rng(0).permutation(x))
    probabilities = np.linspace(0, 1, 41)
    found = reducer.answer([f"q{one:g}" for one in probabilities])
    ordered = np.sort(x)
    for one in probabilities.tolist():
        place = one * (x.size - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        assert min(low * (1 + math.copysign(2**-11, -low)), low) <= found[f"q{one:g}"]
        assert found[f"q{one:g}"] <= max(high * (1 + math.copysign(2**-11, high)), high)
    assert found["q0.5"] == 0
    reducer.add([INF, -INF])
    found = reducer.answer(("min", "max", "q0.5", "q1", "q0"))
    assert found == {"min": -INF, "max": INF, "q0.5": 0, "q1": INF, "q0": -INF}
    reducer.add([NAN])
    found = reducer.answer(("median", "mean", "nan", "count", "min"))
    assert (found["nan"], found["count"]) == (1, x.size + 3)
    assert all(math.isnan(found[name]) for name in ("median", "mean", "min"))


def test_reductions_of_odd_numbers() -> None:
    """Of nothing, of NaN, of one number, of complex numbers."""
    empty = analyze.aggregate([], NAMES)
    assert (empty["count"], empty["sum"]) == (0, 0)
    assert all(math.isnan(empty[name]) for name in NAMES if name not in ("count", "sum"))
    one = analyze.aggregate([2.0], NAMES)
    assert math.isnan(one["std"])
    assert (one["median"], one["iqr"], one["last"]) == (2, 0, 2)
    assert math.isnan(analyze.aggregate([1.0, NAN, 2.0], "median").median)
    assert math.isnan(analyze.aggregate(torch.tensor([1j]), "mean").mean)
    for wrong in ("men", "q1.5", "q", (), "mean+mean", ("mean", 3)):
        with pytest.raises(MessageError, match="reduction"):
            analyze.aggregate([1.0], wrong)  # type: ignore[arg-type]
        with pytest.raises(MessageError, match="reduction"):
            analyze.MessageMean(which=wrong)  # type: ignore[arg-type]


# -- over epochs, windows and the run --------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["epoch", "run", 1, 4, 100])
def test_aggregates_over_windows(over: Any) -> None:
    """Each window of each stream is answered once, when it is over, with the step of its last message."""
    generator = np.random.default_rng(0)
    messages = [
        ModuleMessage(
            kind="weights_norm2",
            module=module,
            data=torch.tensor(generator.standard_normal()),
            global_step=step,
            train_step=step % 5,
            epoch=step // 5,
        )
        for step in range(0, 23, 2)
        for module in ("a", "b")
    ]
    subscriber = analyze.Aggregate("weights_norm2", over=over, which="mean+q0.75+count")
    said = [answer for message in messages for answer in subscriber.receive(message)]
    before = len(said)
    said += subscriber.finish()
    assert len(said) - before == 6
    expected = {}
    window = {"epoch": lambda one: one.epoch, "run": lambda one: 0}.get(over, lambda one: one.global_step // over)
    for module in ("a", "b"):
        for _, group in itertools.groupby((one for one in messages if one.module == module), window):
            heard = list(group)
            exact = exactly([float(one.data) for one in heard])  # type: ignore[arg-type]
            for name in ("mean", "q0.75", "count"):
                expected[(module, heard[-1].global_step, heard[-1].epoch, name)] = exact[name]
    found = {
        (one.key, one.global_step, one.epoch, one.kind.removeprefix("weights_norm2_aggregate_")): float(one.data)
        for one in said
        if one.data is not None
    }
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(said) == len(found)


def test_every_element_counts() -> None:
    """Losses of all datapoints of an epoch, in batches of 64 and 3, have the mean of 67 numbers, not of two means."""
    subscriber = analyze.Aggregate(which="mean+median+count")
    assert list(subscriber.receive(loss(np.ones(64), 0))) == []
    list(subscriber.receive(loss(np.full(3, 100.0), 1, call=1)))
    list(subscriber.receive(loss([], 2)))
    found = {kind: value for kind, _, value in values_of(subscriber.finish())}
    assert found == {
        "loss_aggregate_mean": pytest.approx(364 / 67),
        "loss_aggregate_median": 1.0,
        "loss_aggregate_count": 67.0,
    }
    list(subscriber.receive(loss([], 3)))
    assert list(subscriber.finish()) == []
    assert analyze.parse("aggregate:over=10").over == 10  # type: ignore[attr-defined]
    assert analyze.parse("aggregate:over=run,which=iqr").produces == ("loss_aggregate_iqr",)


# -- over modules ----------------------------------------------------------------------------------------------------


def test_statistics_over_modules() -> None:
    """The maximum, the median and the mean over the modules of a step; the mean to the last bit in any order."""
    bus, heard = MessageBus(), Collect("weights_norm2_message_*")
    for receiver in (analyze.Norm(), analyze.MessageMean("weights_norm2", which="max+median+mean"), heard):
        bus.register(receiver)
    for step, (number, module) in itertools.product(range(2), enumerate("abcd")):
        data = torch.tensor([float(number**2 + step)])
        bus.publish(ModuleMessage(kind="weights", module=module, data=data, global_step=step, train_step=step, epoch=0))
    bus.finish()
    expected = [
        ("max", 0, 9),
        ("median", 0, 2.5),
        ("mean", 0, 3.5),
        ("max", 1, 10),
        ("median", 1, 3.5),
        ("mean", 1, 4.5),
    ]
    assert values_of(heard) == [(f"weights_norm2_message_{name}", step, value) for name, step, value in expected]


# -- moving averages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_moving_average_equals_pandas(decay: float, bias_correction: bool) -> None:
    """The two forms are those of pandas' ``ewm`` with and without ``adjust``."""
    pandas = pytest.importorskip("pandas")
    x = np.random.default_rng(0).standard_normal(300) + 5
    exact = pandas.Series(x).ewm(alpha=1 - decay, adjust=bias_correction).mean().to_numpy()
    found = analyze.ema(x, decay, bias_correction)
    np.testing.assert_allclose(found, exact, rtol=1e-9 if decay < 0.9999 else 1e-6)
    subscriber = analyze.EMA(decay=decay, bias_correction=bias_correction)
    said = [float(answer.data) for step, value in enumerate(x) for answer in subscriber.receive(loss(value, step))]  # type: ignore[arg-type]
    np.testing.assert_array_equal(said, found)


def test_moving_average_of_odd_numbers() -> None:
    """A number that is not finite is answered by NaN and forgotten; each element has its own average."""
    assert analyze.ema([1.0, NAN, 3.0], 0.5).round(12).tolist()[::2] == [1.0, round(7 / 3, 12)]
    assert np.isnan(analyze.ema([NAN, INF, 1j.real / 1 + NAN], 0.5)).all()
    assert analyze.ema([NAN, 2.0], 0.5, bias_correction=False).tolist()[1] == 2
    assert analyze.ema([[1.0, 10.0], [3.0, NAN]], 0.0)[0].tolist() == [1, 10]
    assert analyze.ema(5.0).tolist() == [5]
    assert np.isnan(analyze.ema(torch.tensor([1j]))).all()
    subscriber = analyze.EMA(decay=0.5)
    list(subscriber.receive(loss([1.0, 2.0], 0)))
    (said,) = subscriber.receive(loss([5.0], 1))
    assert said.data is not None
    assert said.data.tolist() == [5.0]


# -- over time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
@pytest.mark.parametrize("precision", ["double", "single"])
def test_statistics_over_time_are_those_of_a_replay(tmp_path: Path, suffix: str, precision: Any) -> None:
    """Reading blocks of steps gives, to the bit, what a replay message by message gives: of all sizes and dtypes."""
    path, generator = tmp_path / f"run.{suffix}", torch.Generator().manual_seed(0)
    sizes = {"a": (3, 5), "b": (40, 70), "c": (), "d": (0, 3)}
    with TraceWriter(path) as writer:
        for step in range(12):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            for module, size in sizes.items():
                data = torch.randn(size, generator=generator)
                data = data.bfloat16() if module == "b" else data
                writer.write(ModuleMessage(kind="weights", module=module, data=data, **where))
            shape = (step % 3 + 1, 4)
            for call in range(2):
                data = torch.randn(shape, generator=generator).double()
                writer.write(ModuleMessage(kind="weights", module="e", tag="eval", call=call, data=data, **where))
            writer.write(NetworkMessage(kind="batch_finished", **where))
            writer.write(ModuleMessage(kind="biases", module="z", data=torch.tensor([1j]), **where))
    which = ("mean", "variance", "norm2", "min", "max", "sparsity", "median")
    heard = Collect("weights_statistics_*")
    replay(path, analyze.Statistics(which=which, precision=precision, tag=None), heard)
    with TraceReader(path) as reader:
        found = analyze.statistics_over_time(reader, "weights", which, precision=precision)
    assert [one.stream.module for one in found] == [*sizes, "e"]
    for one in found:
        for name in which:
            said = [
                message
                for message in heard.of(f"weights_statistics_{name}")
                if (message.key, message.tag) == (one.stream.module, one.stream.tag)
            ]
            assert [message.global_step for message in said] == one.global_steps.tolist()
            assert [message.call for message in said] == one.calls.tolist()
            np.testing.assert_array_equal([float(message.data) for message in said], one.statistics[name])  # type: ignore[arg-type]
    (some,) = analyze.statistics_over_time(path, "weights", "mean", modules="a", steps=(2, 9, 3))
    assert some.global_steps.tolist() == [2, 5, 8]
    pytest.importorskip("pandas")
    frame = some.to_pandas()
    assert list(frame.columns) == ["global_step", "call", "mean"]
    np.testing.assert_array_equal(frame["mean"], some.statistics["mean"])
    with pytest.raises(CaptureError, match="has no activations messages"):
        analyze.statistics_over_time(path, "activations")
    with pytest.raises(CaptureError, match="need real numbers, but batch_finished"):
        analyze.statistics_over_time(path, "batch_finished")
    with pytest.raises(CaptureError, match=r"need real numbers, but biases of z .* has complex64"):
        analyze.statistics_over_time(path, "biases")
    with pytest.raises(MessageError, match="no statistic"):
        analyze.statistics_over_time(path, "weights", "meen")


def test_answers_of_reducers_are_messages() -> None:
    """An aggregate of a module is of that module, tag, leaf and rank; one of the network is of the network."""
    subscriber = analyze.Aggregate("weights", which="sum", tag=None)
    where: dict[str, Any] = {"global_step": 3, "train_step": 1, "epoch": 1, "tag": "eval", "leaf": "0", "rank": 2}
    list(subscriber.receive(ModuleMessage(kind="weights", module="fc", data=torch.ones(3), call=4, **where)))
    said: list[Message] = list(subscriber.finish())
    assert [(one.key, one.tag, one.leaf, one.rank, one.call) for one in said] == [("fc", "eval", "0", 2, 0)]
    assert [(one.global_step, one.train_step, one.epoch) for one in said] == [(3, 1, 1)]
