"""Metrics that answer many messages at once say what they say of each by itself, to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from analyze.metrics.metric import PerMessage
from analyze.metrics.moments import FORMULAS
from analyze.metrics.norm import Norm
from analyze.metrics.statistics import Statistics
from analyze.registry import parse, subscribers
from tests.examples import examples
from tracer import Message, ModuleMessage
from tracer.messaging.stacks import Heads, Source, Stack, Stretch

EVERY = "+".join((*FORMULAS, "median", "q0.05", "norm3", "norm0.5"))
SPECS = (
    *("norm", "norm:order=1", "norm:order=inf", "norm:order=3", "mean:kind=weights", "sum:kind=weights"),
    *("variance:kind=weights", "variance:kind=weights,ddof=0", "statistics", f"statistics:which={EVERY}"),
    *("statistics:precision=single,which=mean+variance+norm1+min+nan", "statistics:per=channel,which=mean+std"),
    *("histogram:bins=4,details=true", "quantiles", "quantiles:probabilities=0.3", "sample_norm:kind=weights"),
    "loss:kind=weights",
)
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("bool", "int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "complex64", "complex128"),
)
# around the lengths at which sums are cut into rows (2048), short pieces (512), and those of numpy and of vector units
SIZES = (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049)


def stack_of(data: Tensor) -> Stack:
    """Messages of weights with this data, each of a step of its own."""
    count = len(data)
    counters = np.arange(count)[:, None] * np.array([[1, 1, 0, 0]])
    sources = [Source("fc", "default", "", 0), Source("head", "default", "", 0)]
    return Stack("weights", Heads(sources, np.arange(count) % 2, counters, np.arange(count)), data)


def said(message: Message) -> tuple[object, ...]:
    """All that an answer says, to the bit."""
    data = message.data
    assert data is not None
    values = str(data.dtype), tuple(data.shape), data.numpy().tobytes()
    return (message.kind, message.key, message.global_step, message.tag, *values)


def compare(metric: PerMessage, data: Tensor) -> None:
    """Compare the answers to many messages with those to each."""
    stack = stack_of(data)
    assert metric.can_take_many()
    many = list(Stretch(list(metric.receive_many(Stretch([stack])))))
    alone = []
    for message in stack:
        assert message.data is not None
        # memory of its own, as a live run's messages have; where it begins must not matter
        own = ModuleMessage(
            kind="weights",
            module=message.key or "",
            data=message.data.clone(),
            global_step=message.global_step,
            train_step=message.train_step,
            epoch=0,
        )
        alone += list(metric.receive(own))
    assert [said(one) for one in many] == [said(one) for one in alone]


def values(dtype: str, count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Numbers of several magnitudes, some of them zero, NaN, infinite or far from zero."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((count, *shape)) * 10.0 ** rng.integers(-3, 4, (count, *(1 for _ in shape)))
    numbers[1::5] += 1e6  # where squares lose digits
    if numbers.size:
        rows = numbers.reshape(count, -1)
        rows[2::7, 0] = 0.0
        rows[3::11, -1] = np.nan
        rows[4::13, rows.shape[1] // 2] = np.inf
        rows[5::17, 0] = -np.inf
        rows[6::19] = -0.0
    if dtype.startswith("complex"):
        return torch.complex(torch.from_numpy(numbers), torch.from_numpy(numbers[::-1].copy())).to(
            getattr(torch, dtype)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if dtype in ("uint16", "uint32", "uint64"):  # to which torch converts no NaN
            return torch.from_numpy(np.abs(np.nan_to_num(numbers, posinf=7, neginf=3)).astype(dtype))
        whole = np.nan_to_num(numbers, posinf=7, neginf=3) if "int" in dtype or dtype == "bool" else numbers
    return torch.from_numpy(whole).to(getattr(torch, dtype))


@pytest.mark.parametrize("spec", SPECS)
def test_many_are_each_of_every_dtype(spec: str) -> None:
    """Scalars, arrays of several axes, and empty ones, of every dtype that a trace can hold."""
    metric = parse(spec)
    assert isinstance(metric, PerMessage)
    loops = type(metric).measure_many is PerMessage.measure_many or "channel" in spec
    for dtype in DTYPES[::5] if loops else DTYPES[::3] if spec == SPECS[9] else DTYPES:  # moments have all of them
        for shape in ((), (3, 2), (1, 1, 5)) if loops else ((), (0,), (3, 2), (1, 1, 5)):
            compare(metric, values(dtype, 20, shape))


@pytest.mark.parametrize("spec", ["norm", "norm:order=1", "variance:kind=weights", "statistics", SPECS[9], SPECS[10]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_many_are_each_of_every_size(dtype: str, spec: str) -> None:
    """Also around the sizes at which sums are cut: they must not be taken in another order."""
    metric = parse(spec)
    assert isinstance(metric, PerMessage)
    for size in SIZES:
        compare(metric, values(dtype, 5, (size,), seed=size))


def test_many_are_each_beyond_a_block() -> None:
    """So many messages that they are taken in several blocks: 64 rows of 2048 numbers."""
    which = ["mean", "variance", "skewness", "kurtosis", "norm1", "median"]
    compare(Statistics(which=which), values("float32", 131, (1025,)))
    compare(Norm(), values("float64", 131, (1025,)))


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e-80, 1e80, 1e200, 1e300])
def test_many_are_each_of_extreme_numbers(scale: float) -> None:
    """Where powers leave float64, each message is scaled by itself."""
    data = values("float64", 24, (9,))
    data[::2] *= scale
    for metric in (Norm(), Norm(order=1), Statistics(which=[*FORMULAS])):
        compare(metric, data)


def test_many_are_each_of_any_bits() -> None:
    """NaN of either sign and with any payload, and denormals: what random bits are."""
    bits = np.random.default_rng(1).integers(0, 2**64, (90, 3), dtype=np.uint64)
    bits[::3, 0] |= np.uint64(0x7FF0000000000000)
    for data in (torch.from_numpy(bits.view(np.float64)), torch.from_numpy(bits.view(np.float32))):
        for metric in (Norm(), Norm(order=float("inf")), Statistics(which=[*FORMULAS])):
            compare(metric, data)


@st.composite
def stacks(draw: st.DrawFn) -> Tensor:
    """Any few numbers in any few messages."""
    count, size = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    numbers = st.floats(width=64, allow_nan=True) | st.sampled_from((0.0, -0.0, 1.0))
    rows = draw(st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=count, max_size=count))
    return torch.tensor(rows, dtype=draw(st.sampled_from((torch.float64, torch.float32)))).reshape(count, size)


@settings(max_examples=examples(100))
@given(stacks())
def test_many_are_each_of_any_numbers(data: Tensor) -> None:
    """Any numbers, NaN and infinities among them."""
    for metric in (Norm(), Norm(order=1), Statistics(which=[*FORMULAS])):
        compare(metric, data)


def test_those_who_share_a_pass_say_what_each_says_alone() -> None:
    """Whoever else asks, and in which order, changes no bit."""
    stretch = Stretch([stack_of(values("float32", 50, (64,)))])
    specs = ("mean:kind=weights", "norm", "variance:kind=weights", "sum:kind=weights", "norm:order=1")
    alone = {spec: [said(one) for one in Stretch(list(_fresh(spec).receive_many(stretch)))] for spec in specs}
    for order in (specs, specs[::-1]):
        metrics = {spec: _fresh(spec) for spec in order}
        for _ in range(2):  # what was asked once is taken to be asked again
            for spec, metric in metrics.items():
                assert [said(one) for one in Stretch(list(metric.receive_many(stretch)))] == alone[spec]


def _fresh(spec: str) -> PerMessage:
    metric = parse(spec)
    assert isinstance(metric, PerMessage)
    return metric


def test_a_subclass_that_measures_otherwise_is_asked_one_by_one() -> None:
    """What a class says of many holds for its subclasses only as long as they do not say anew what they say of one."""

    class Halved(Norm):  # type: ignore[misc] # a user may do it
        def value(self, message: Message) -> float:
            return super().value(message) / 2

    compare(Halved(), values("float32", 12, (5,)))


def test_who_declares_it_remembers_nothing() -> None:
    """Each registered metric that takes many takes messages singly, answers each by itself, and is seen to be able."""
    able = [name for name in subscribers() if parse(name).takes_many]
    assert {"norm", "mean", "sum", "variance", "statistics"} <= set(able)
    for name in able:
        assert parse(name).scope == "message", name
        assert parse(name).can_take_many(), name


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
