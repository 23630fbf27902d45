"""Statistics in one pass, of channels and of parts, against NumPy, SciPy, exact fractions and closed forms."""

from __future__ import annotations

import itertools
import math
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import analyze
from analyze.metrics import moments as shared_pass
from analyze.metrics.counts import sketch
from analyze.metrics.moments import FORMULAS, derive, needs_of
from analyze.metrics.statistics import channel_axis
from tests.analyze.metrics.invariances import ELEMENTWISE, INVARIANCES, SUMS
from tests.analyze.metrics.messages import INF, NAN, exactly, message, of
from tests.examples import examples
from tracer import Collect, MessageBus, MessageError
from tracer.numbers import moments as moments_module
from tracer.numbers.moments import BLOCK, ROW, Moments, has, moments, moments_of_channels

NEEDS = {name: formula.need for name, formula in FORMULAS.items()}
EVERYTHING = (*NEEDS, "norm3", "norm0.5", "median", "q0.1", "q1")


DATA = {
    "a number": torch.tensor(2.5),
    "two": torch.tensor([1.0, -3.0]),
    "less than a row": of(ROW - 1),
    "a row": of(ROW),
    "a row and one": of(ROW + 1),
    "a block": of(BLOCK),
    "several blocks and a bit": of(2 * BLOCK + ROW + 17),
    "not about zero": of(3 * ROW + 5) + 7,
    "float64": of(5 * ROW + 3).double() * math.pi,
    "bfloat16": of(3000).bfloat16(),
    "float16": of(70000).half() + 3,
    "integers": torch.arange(-5, 4000),
    "booleans": of(5000) > 0,
    "channels last": of(2, 64, 16, 17).to(memory_format=torch.channels_last),
    "strided": of(100000)[::7],
}


# -- one pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("x", DATA.values(), ids=DATA)
def test_all_statistics_equal_numpy(x: torch.Tensor, ddof: int) -> None:
    """Every statistic of every dtype, layout and size is that of NumPy on float64 copies."""
    exact = exactly(x.double().numpy(), ddof)
    found = analyze.statistics(x, EVERYTHING, ddof=ddof)
    assert tuple(found) == EVERYTHING
    for name, value in found.items():
        loose = 1e-9 if name in ("skewness", "kurtosis") else 1e-11
        assert value == pytest.approx(exact[name], rel=loose, abs=1e-12, nan_ok=True), name
    for name in ("count", "min", "max", "zeros", "sparsity", "nan", "inf", "norminf"):
        assert found[name] == exact[name], name


@pytest.mark.parametrize("x", DATA.values(), ids=DATA)
def test_single_precision_is_good_to_a_millionth(x: torch.Tensor) -> None:
    """With float32 sums of short pieces, statistics keep six digits; extremes and counts are exact."""
    exact = exactly(x.double().numpy())
    found = analyze.statistics(x, EVERYTHING, precision="single")
    for name, value in found.items():
        if name in ("mean", "sum"):
            assert value == pytest.approx(
                exact[name], abs=1e-7 * exact["norm1"] / (exact["count"] if name == "mean" else 1)
            )
        else:
            assert value == pytest.approx(exact[name], rel=1e-6, abs=1e-12, nan_ok=True), name
    for name in ("min", "max", "zeros", "norminf"):
        assert found[name] == exact[name], name


@pytest.mark.parametrize("precision", ["double", "single"])
def test_constant_tensor_of_2_to_the_24(precision: Any) -> None:
    """The norm of 2^24 float32 ones times 0.1, within 1e-7; torch's float32 norm is off by more."""
    x = torch.full((2**24,), 0.1)
    tenth = float(np.float32(0.1))
    found = analyze.statistics(x, "norm2+mean+variance", precision=precision)
    assert found.norm2 == pytest.approx(4096 * tenth, rel=1e-7)
    assert found.mean == pytest.approx(tenth, rel=1e-7)
    assert found.variance == pytest.approx(0, abs=1e-30)


@pytest.mark.parametrize("offset", [1.0, 1e2, 1e4, 1e6])
def test_offsets_do_no_harm_in_single_precision(offset: float) -> None:
    """The variance of float32 numbers far from zero is that of the numbers as they are rounded, within 1e-6."""
    x = of(3 * ROW * 100 + 7) + offset
    exact = np.var(x.double().numpy(), ddof=1)
    assert analyze.statistics(x, "variance", precision="single").variance == pytest.approx(exact, rel=1e-6)


def about(rest: list[float]) -> dict[str, float]:
    """Variance, skewness and kurtosis by exactly rounded sums."""
    n, mean = len(rest), math.fsum(rest) / len(rest)
    second, third, fourth = (math.fsum((one - mean) ** power for one in rest) / n for power in (2, 3, 4))
    return {
        "variance": second * n / (n - 1),
        "std": math.sqrt(second * n / (n - 1)),
        "skewness": third / second**1.5,
        "kurtosis": fourth / second**2 - 3,
    }


@pytest.mark.parametrize(
    ("size", "offset"),
    [(size, offset) for size in (1000, ROW + 1, 5 * ROW) for offset in (0.0, 1e4, 1e8, -1e8, 1e12)]
    + [
        pytest.param(2 * BLOCK + 77, offset, marks=[] if offset in (0.0, 1e12) else [pytest.mark.slow])
        for offset in (0.0, 1e4, 1e8, -1e8, 1e12)
    ],
)
def test_sums_over_pieces_lose_nothing_to_an_offset(size: int, offset: float) -> None:
    """Of a tensor, of channels, of complex numbers, of windows and of merged parts: 1e-13, far from zero as near it."""
    x = np.random.default_rng(size).standard_normal(size) + offset
    exact = about((x - offset).tolist())  # the difference is exact
    close = {name: pytest.approx(value, rel=1e-13, abs=1e-13) for name, value in exact.items()}
    assert analyze.statistics(x, tuple(exact)) == close
    assert analyze.variance(x) == close["variance"]
    by_channel = analyze.statistics(np.stack([x, -x, x - offset]), tuple(exact), per="channel")
    for name, value in exact.items():
        signs = (1, -1, 1) if name == "skewness" else (1, 1, 1)
        np.testing.assert_allclose(by_channel[name], np.multiply(signs, value), rtol=1e-13, atol=1e-13)
    assert analyze.variance(x + 1j * x[::-1]) == pytest.approx(2 * exact["variance"], rel=1e-13)
    need = needs_of(exact)
    merged = Moments.empty(need, 1)
    for part in np.array_split(x, 7):
        merged = merged.merge(Moments.of_state(moments(part, need).state()))
    assert {name: float(value[0]) for name, value in derive(merged, exact).items()} == close
    windows = analyze.Aggregate(over="run", which=tuple(exact))
    for step, part in enumerate(np.array_split(x, 3)):
        assert not list(windows.compute(message(torch.from_numpy(part), "loss", step)))
    told = {said.kind.rpartition("_")[2]: float(said.data) for said in windows.conclude() if said.data is not None}
    assert told == close


@pytest.mark.parametrize("size", [3, 5000], ids=["short", "long"])
def test_small_numbers_beside_large_ones_are_not_zero(size: int) -> None:
    """Numbers that are scaled down for their powers are counted as they were."""
    x = np.ones(size)
    x[:3] = 1e70, 1e-290, 0
    assert derive(moments(x, needs_of(["zeros"])), ["zeros"])["zeros"][0] == 1


@pytest.mark.parametrize("precision", ["double", "single"])
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e18, 1e37])
def test_scales_of_float32(scale: float, precision: Any) -> None:
    """Numbers whose squares are no float32 numbers have all statistics all the same, of small and large tensors."""
    for size in (100, 10 * ROW):
        x = of(size) * scale
        exact = exactly(x.double().numpy())
        for name, value in analyze.statistics(x, SUMS, precision=precision).items():
            assert value == pytest.approx(exact[name], rel=1e-5 if name in ("mean", "sum") else 1e-6), name


@pytest.mark.parametrize("exponent", [-1000, -600, -300, 300, 600, 1000])
def test_scales_of_float64(exponent: int) -> None:
    """A power of two taken off the data changes no statistic but by that power, as far as float64 holds it."""
    for size in (100, 3 * ROW + 1):
        x = of(size).double().numpy() + 0.1
        scaled = np.ldexp(x, exponent)
        one, other = analyze.statistics(x, SUMS), analyze.statistics(scaled, SUMS)
        for name in SUMS:
            power = {"variance": 2, "skewness": 0, "kurtosis": 0}.get(name, 1)
            with np.errstate(over="ignore", under="ignore"):
                expected = float(np.ldexp(one[name], power * exponent))
            assert other[name] == pytest.approx(expected, rel=1e-12), name
    x = np.array([1e300, 1.0, -1e300, 1e-300])
    assert analyze.statistics(x, "norm2").norm2 == pytest.approx(math.sqrt(2) * 1e300)


@settings(max_examples=examples(60))
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40))
def test_statistics_equal_exact_fractions(values: list[float]) -> None:
    """Mean, variance and moments equal those computed without any rounding."""
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    second = sum((value - mean) ** 2 for value in exact)
    found = analyze.statistics(values, "mean+variance+norm1")
    size = max(map(abs, values)) + 1e-300
    assert found.mean == pytest.approx(float(mean), rel=1e-12, abs=1e-14 * size)
    assert found.variance == pytest.approx(float(second / (len(exact) - 1)), rel=1e-9, abs=1e-20 * size**2)
    assert found.norm1 == pytest.approx(float(sum(map(abs, exact))), rel=1e-13)


@pytest.mark.parametrize("x", DATA.values(), ids=DATA)
def test_what_else_is_asked_changes_no_bit(x: torch.Tensor) -> None:
    """Each statistic is the same to the bit alone, among all others, and as its own function."""
    together = analyze.statistics(x, EVERYTHING)
    for name in EVERYTHING:
        alone = analyze.statistics(x, name)[name]
        assert (alone == together[name]) or (math.isnan(alone) and math.isnan(together[name])), name
    assert analyze.mean(x) == together.mean
    assert analyze.sum(x) == together.sum
    assert (analyze.variance(x) == together.variance) or together.count == 1
    for order in (1, 2, INF, 3):
        assert analyze.norm(x, order) == together[f"norm{order:g}"]


def test_norms_take_no_second_moments() -> None:
    """What a norm needs is less than what a variance needs, and a variance has what a norm needs."""
    assert has(NEEDS["variance"], NEEDS["norm2"])
    assert not has(NEEDS["norm2"], NEEDS["variance"])
    assert all(has(NEEDS[name], NEEDS["std"]) for name in ("variance", "skewness", "kurtosis"))


@pytest.mark.parametrize("precision", ["double", "single"])
@pytest.mark.parametrize("size", [7, ROW, 3 * ROW + 5])
def test_data_is_left_alone(size: int, precision: Any) -> None:
    """No statistic writes into the data, of whatever size and dtype; data that cannot be written to is as good."""
    for dtype in (np.float32, np.float64):
        x = (of(size).numpy() + 5).astype(dtype)
        before = x.copy()
        once = analyze.statistics(x, EVERYTHING, precision=precision)
        per_channel = analyze.statistics(x.reshape(1, -1), EVERYTHING, per="channel")
        sketch(x), analyze.quantiles(x), analyze.histogram(x), analyze.histogram(x, method="sketch")
        np.testing.assert_array_equal(x, before)
        x.flags.writeable = False
        assert analyze.statistics(x, EVERYTHING, precision=precision) == once
        assert per_channel.max[0] == once.max
        assert analyze.statistics(x[::-1], "max+min") == {"max": once.max, "min": once.min}
        assert analyze.statistics(x.astype(x.dtype.newbyteorder()), EVERYTHING) == analyze.statistics(x, EVERYTHING)


def test_without_vecdot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NumPy has no vecdot, einsum stands in for it."""
    x = of(3 * ROW + 5) + 3
    once = analyze.statistics(x, EVERYTHING)
    once_single = analyze.statistics(x, precision="single")
    monkeypatch.setattr(moments_module, "_dots", moments_module._einsum_dots)
    assert analyze.statistics(x, EVERYTHING) == pytest.approx(once, rel=1e-12)
    assert analyze.statistics(x, precision="single") == pytest.approx(once_single, rel=1e-5)


def test_layouts_and_threads_change_no_bit() -> None:
    """The same elements in another memory layout, or with more threads, give the same bits."""
    x = of(8, 16, 32, 33)
    once = analyze.statistics(x, EVERYTHING)
    assert analyze.statistics(x.to(memory_format=torch.channels_last), EVERYTHING) == once
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert analyze.statistics(x, EVERYTHING) == once
    finally:
        torch.set_num_threads(before)
    found: list[Any] = []
    others = [threading.Thread(target=lambda: found.append(analyze.statistics(x, EVERYTHING))) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert found == [once] * 3


def test_edge_values() -> None:
    """Empty, single, equal, NaN, infinite and complex data, as the documentation says; never a warning."""
    empty = analyze.statistics(torch.zeros(0, 3), EVERYTHING)
    zero = ("count", "sum", "norm1", "norm2", "norminf", "zeros", "nan", "inf", "norm3", "norm0.5")
    assert {name: empty[name] for name in zero} == dict.fromkeys(zero, 0.0)
    assert all(math.isnan(empty[name]) for name in EVERYTHING if name not in zero)
    one = analyze.statistics([3.0], EVERYTHING)
    assert [name for name in EVERYTHING if math.isnan(one[name])] == ["variance", "std", "skewness", "kurtosis"]
    assert analyze.statistics([3.0], "variance", ddof=0).variance == 0
    for size in (4, 3 * ROW):
        equal = analyze.statistics(np.full(size, 0.1), "variance+skewness+kurtosis+std")
        assert equal.variance == pytest.approx(0, abs=1e-30)
        with_nan = torch.ones(size)
        with_nan[1], with_nan[2] = NAN, 0
        found = analyze.statistics(with_nan, EVERYTHING)
        sound = {"count": size, "zeros": 1.0, "sparsity": 1 / size, "nan": 1.0, "inf": 0.0}
        assert {name: found[name] for name in EVERYTHING if not math.isnan(found[name])} == sound
        with_inf = torch.ones(size)
        with_inf[1] = -INF
        found = analyze.statistics(with_inf, EVERYTHING)
        assert (found.mean, found.sum, found.min, found.max, found.norm2, found.rms) == (-INF, -INF, -INF, 1, INF, INF)
        assert (found.nan, found.inf, found.norm1, found.absmean, found.norminf) == (0, 1, INF, INF, INF)
        assert math.isnan(found.variance)
        assert math.isnan(found.skewness)
        assert math.isnan(analyze.statistics([INF, -INF] * size, "mean").mean)
    z = analyze.statistics(torch.tensor([3 + 4j, 0, NAN]), EVERYTHING)
    assert (z.count, z.zeros, z.nan) == (3, 1, 1)
    z = analyze.statistics(torch.tensor([3 + 4j, 0]), EVERYTHING)
    assert (z.norm1, z.norm2, z.norminf, z.sparsity) == (5, 5, 5, 0.5)
    assert math.isnan(z.mean)
    assert math.copysign(1, analyze.statistics([-0.0, 0.0], "min").min) == 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"which": "meen"}, "no statistic 'meen'; there are count, mean"),
        ({"which": "q1.5"}, "no statistic 'q1.5'"),
        ({"which": "norm0"}, "no statistic 'norm0'"),
        ({"which": ()}, "at least one, not none"),
        ({"which": "mean+mean"}, "named once each"),
        ({"which": (3,)}, "no statistic 3"),
        ({"ddof": -1}, "ddof is an integer from 0 on, not -1"),
        ({"ddof": True}, "ddof"),
        ({"per": "row"}, "'tensor' or 'channel', not 'row'"),
        ({"precision": "half"}, "'double' or 'single', not 'half'"),
    ],
)
def test_wrong_wishes(wrong: dict[str, Any], sentence: str) -> None:
    """The function and the subscriber refuse them with a sentence."""
    with pytest.raises(MessageError, match=sentence):
        analyze.statistics([1.0, 2.0], **wrong)
    with pytest.raises(MessageError, match=sentence):
        analyze.Statistics("weights", **wrong)
    with pytest.raises(MessageError, match="no axis 3"):
        analyze.statistics([1.0], per="channel", axis=3)
    with pytest.raises(MessageError, match="'auto', 'outputs', 'first' or 'last', not 'middle'"):
        analyze.Statistics(channels="middle")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="these statistics are mean; there is no 'std'"):
        _ = analyze.statistics([1.0], "mean").std


# -- channels, and many tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((7,), 0),
        ((), 0),
        ((5, 300), 0),
        ((300, 5), 1),
        ((ROW * 3 + 1, 2), 1),
        ((2, ROW * 3 + 1), 0),
        ((3, 5, 40, 41), 1),
        ((3, 5, 64, 65), -3),
        ((2, 7, 6), 2),
        ((1, BLOCK + 3), 1),
        ((BLOCK // ROW + 2, ROW + 5), 0),
        ((300 * ROW, 1), 1),
        ((4, 0), 0),
        ((0, 4), 1),
    ],
)
def test_channels_equal_the_statistics_of_slices(shape: tuple[int, ...], axis: int) -> None:
    """Statistics of channels are those of each slice along the axis."""
    x = of(*shape) + 0.5
    slices = list(np.moveaxis(x.numpy(), axis, 0)) if shape else [x.numpy()]
    # those of each channel by itself take a while
    wanted = EVERYTHING if len(slices) < 10_000 else ["count", "mean", "variance", "min", "max", "norm1", "skewness"]
    found = analyze.statistics(x, wanted, per="channel", axis=axis)
    for name in wanted:
        assert found[name].dtype == np.float64
        assert found[name].shape == (len(slices),)
    for number, one in list(enumerate(slices))[:: max(1, len(slices) // 20)]:
        alone = analyze.statistics(one, wanted)
        for name in wanted:
            assert found[name][number] == pytest.approx(alone[name], rel=1e-9, abs=1e-12, nan_ok=True), name


def test_channels_of_extreme_scales() -> None:
    """Each channel has its own scale, its own NaN and its own infinity."""
    x = np.stack([np.full(300, 1e-200), np.full(300, 1e200), np.ones(300), np.ones(300), np.zeros(300)])
    x[2, 5], x[3, 7] = NAN, INF
    found = analyze.statistics(x, "norm2+nan+inf+mean+variance", per="channel")
    np.testing.assert_allclose(found.norm2, [math.sqrt(300) * 1e-200, math.sqrt(300) * 1e200, NAN, INF, 0], rtol=1e-14)
    assert found.nan.tolist() == [0, 0, 1, 0, 0]
    assert found.inf.tolist() == [0, 0, 0, 1, 0]
    np.testing.assert_allclose(found.mean, [1e-200, 1e200, NAN, INF, 0], rtol=1e-14)


def test_which_axis_is_the_channels() -> None:
    """Outputs of parameters; the second axis of convolutions; the last of linear layers and sequences."""
    conv, sequence, linear = (8, 16, 5, 5), (8, 20, 32), (8, 10)
    assert [channel_axis("weight_gradients", shape, "auto") for shape in (conv, sequence, linear, (3,), ())] == [0] * 5
    assert [channel_axis("activations", shape, "auto") for shape in (conv, sequence, linear, (3,))] == [1, 2, 1, 0]
    assert [channel_axis("activations", sequence, how) for how in ("outputs", "first", "last")] == [0, 1, 2]
    said = list(
        analyze.Statistics("activations", which="mean+max", per="channel").compute(
            message(of(4, 3, 5, 5), "activations")
        )
    )
    assert [(one.kind, tuple(one.data.shape)) for one in said if one.data is not None] == [
        ("activations_statistics_mean", (3,)),
        ("activations_statistics_max", (3,)),
    ]


def test_what_is_no_array_of_tensors() -> None:
    """A number and complex data are refused with a sentence."""
    for wrong in (torch.tensor(1.0), torch.tensor([1j])):
        with pytest.raises(MessageError, match=r"need a real array \(tensors, ...\)"):
            analyze.statistics_of_tensors(wrong)


# -- merging ------------------------------------------------------------------------------------------------------


def assert_merged(whole: Moments, merged: Moments) -> None:
    """All statistics of two accumulators agree to 1e-12."""
    one, other = derive(whole, NEEDS), derive(merged, NEEDS)
    for name in NEEDS:
        np.testing.assert_allclose(
            other[name], one[name], rtol=1e-12, atol=1e-12 if name in ("skewness", "kurtosis") else 1e-13
        )


@settings(max_examples=examples(40))
@given(
    st.lists(st.integers(0, 3 * ROW), min_size=2, max_size=5),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1e4, 1e-200, 1e200]),
)
def test_moments_of_parts_merge_to_those_of_the_whole(sizes: list[int], seed: int, scale: float) -> None:
    """However data is cut, and in whatever order the parts are merged, the whole comes out, to 1e-12."""
    generator = np.random.default_rng(seed)
    parts = [(generator.standard_normal(size) + 3) * scale for size in sizes]
    need = needs_of(NEEDS)
    whole = moments(np.concatenate(parts), need)
    found = [moments(part, need) for part in parts]
    for order in itertools.islice(itertools.permutations(found), 6):
        merged = order[0]
        for other in order[1:]:
            merged = merged.merge(Moments.of_state(other.state()))
        if sum(sizes):
            assert_merged(whole, merged)
        assert derive(merged, ("count",))["count"][0] == sum(sizes)


def test_scales_merge() -> None:
    """Parts of very different scales have the norm of the whole."""
    tiny, huge = np.full(10, 1e-250), np.full(10, 1e250)
    need = NEEDS["norm2"] | NEEDS["norm1"]
    merged = moments(tiny, need).merge(moments(huge, need))
    assert derive(merged, ("norm2", "norm1"))["norm2"][0] == pytest.approx(math.sqrt(10) * 1e250)
    channels = moments_of_channels(np.stack([tiny, huge]), need, 0)
    np.testing.assert_allclose(derive(channels, ("norm1",))["norm1"], [1e-249, 1e251], rtol=1e-14)


# -- one pass for several subscribers ------------------------------------------------------------------------------


def test_single_statistics_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean, variance and norms that are asked together go through each tensor once, from the second message on."""
    passes: list[int] = []
    original = shared_pass.moments

    def counted(x: Any, need: int) -> Moments:
        passes.append(x.size)
        return original(x, need)

    monkeypatch.setattr(shared_pass, "moments", counted)
    bus, heard = MessageBus(), Collect("weights_*")
    asked = [
        analyze.Mean("weights"),
        analyze.Variance("weights"),
        analyze.Norm("weights"),
        analyze.Norm("weights", order=1),
        analyze.Sum("weights"),
    ]
    for receiver in (*asked, heard):
        bus.register(receiver)
    data = [of(100 + step) for step in range(3)]
    for step, x in enumerate(data):
        bus.publish(message(x, step=step))
    assert passes.count(101) == passes.count(102) == 1
    assert passes.count(100) > 1
    for step, x in enumerate(data):
        said = {one.kind: float(one.data) for one in heard if one.global_step == step and one.data is not None}
        assert said["weights_mean"] == analyze.mean(x)
        assert said["weights_variance"] == analyze.variance(x)
        assert said["weights_norm1"] == analyze.norm(x, 1)


def test_shared_passes_see_changes() -> None:
    """A tensor that was changed in place, or another one, is gone through anew."""
    mean, x = analyze.Mean("weights"), torch.ones(5)
    (first,) = mean.compute(message(x))
    x += 1
    (second,) = mean.compute(message(x))
    (third,) = mean.compute(message(torch.zeros(5)))
    with torch.inference_mode():
        y = torch.ones(3)
        (fourth,) = mean.compute(message(y))
        y.mul_(5)
        (fifth,) = mean.compute(message(y))
    assert [float(one.data) for one in (first, second, third, fourth, fifth) if one.data is not None] == [1, 2, 0, 1, 5]


# -- what changes nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("subscriber", ELEMENTWISE, ids=lambda one: "-".join(one.produces[:1]))
def test_declared_invariances_hold(subscriber: Any) -> None:
    """Each change of the data that a class declares harmless changes none of its answers beyond rounding."""
    assert subscriber.invariances

    @settings(max_examples=examples(15))
    @given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 120))
    def check(seed: int, rows: int, columns: int) -> None:
        random = np.random.default_rng(seed)
        x = random.standard_normal((rows, columns)) * (random.random((rows, columns)) > 0.2)
        for word in subscriber.invariances:
            changed = INVARIANCES[word](x, random)
            one, other = (
                [
                    answer.data.numpy()
                    for answer in (*subscriber.receive(message(torch.from_numpy(data.copy()))), *subscriber.finish())
                ]
                for data in (x, changed)
            )
            for before, after in zip(one, other, strict=True):
                np.testing.assert_allclose(after, before, rtol=1e-9, atol=1e-9, err_msg=word)

    check()
