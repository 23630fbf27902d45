"""How two messages differ: by their data, and by what was kept in its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

import tracer
from analyze.comparing.amounts import amount
from analyze.comparing.diff import diff
from analyze.comparing.difference import Difference
from tests.analyze.comparing.test_diff import Gradient, Label, Masks, Nudge, partings, place, write
from tests.analyze.rules.trainings import Fault, Training
from tracer.messaging.messages import Message, ModuleMessage
from tracer.numbers.statistics import ENTRIES, statistics_of
from tracer.observing.capture import DEFAULT_KINDS, Capture
from tracer.observing.reductions import hash_of

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 1e-30, 1e30, -1e30, math.nan, math.inf, -math.inf])


@given(
    arrays.arrays(np.float32, st.integers(1, 12), elements=st.sampled_from([0.0, 1.0, math.nan])).flatmap(
        lambda x: st.tuples(
            arrays.arrays(np.float32, x.shape, elements=NUMBERS.map(np.float32)),
            arrays.arrays(np.float32, x.shape, elements=NUMBERS.map(np.float32)),
        )
    ),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 1.0]),
)
def test_against_python(pair: tuple[Any, Any], rtol: float, atol: float) -> None:
    """Counts, the largest difference, its place, the relative difference and the tolerance are those of exact sums."""
    one, other = pair
    differing, apart = [], []
    for index, (x, y) in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
        if (math.isnan(x) and math.isnan(y)) or (x == y and math.copysign(1, x) == math.copysign(1, y)):
            continue
        differing.append(index)
        apart.append(abs(Fraction(x) - Fraction(y)) if math.isfinite(x) and math.isfinite(y) else math.inf)
    found = amount(one, other, rtol, atol)
    if not differing:
        assert found is None
        return
    assert found is not None
    assert (found.elements, found.of) == (len(differing), len(one))
    assert found.largest == float(max(apart))
    # of differences that float64 cannot tell apart, any place will do
    assert float(apart[differing.index(found.place[0])]) == float(max(apart))
    limits = [atol + rtol * abs(one[index].item()) for index in differing]
    too_far = [x == math.inf or not float(x) <= limit for x, limit in zip(apart, limits, strict=True)]
    assert found.beyond == (any(too_far) if rtol or atol else True)
    assert found.signs == (max(apart) == 0)
    if math.inf in apart:
        assert found.relative == math.inf
    else:
        scale = math.sqrt(sum(Fraction(x) ** 2 for x in one.tolist() if math.isfinite(x)))
        size = math.sqrt(sum(x**2 for x in apart))  # type: ignore[arg-type] # fractions
        assert found.relative == pytest.approx(size / scale if scale else (math.inf if size else 0.0), rel=1e-9)


def test_large_numbers() -> None:
    """Squares that float64 cannot hold are no infinite difference."""
    one, other = np.full(4, 1e200), np.full(4, 2e200)
    found = amount(one, other)
    assert found is not None
    assert found.relative == pytest.approx(1.0)
    tiny = amount(np.full(4, 1e-200), np.full(4, 3e-200))
    assert tiny is not None
    assert tiny.relative == pytest.approx(2.0)


def test_a_unit_that_is_switched() -> None:
    """Few elements carry the difference, and each is exactly zero in one array only."""
    draw = np.random.default_rng(0)
    one = draw.normal(size=1000).astype(np.float32)
    other = (one * (1 + draw.normal(size=1000) * 1e-7)).astype(np.float32)
    one[17] = 0.0
    found = amount(one, other)
    assert found is not None
    assert found.switched
    dense = amount(one, (one * (1 + draw.normal(size=1000) * 1e-3)).astype(np.float32))
    assert dense is not None
    assert not dense.switched
    one[17] = other[17] + 1.0
    shifted = amount(one, other)
    assert shifted is not None
    assert not shifted.switched


BASE = Training("mlp", "mlp", steps=8)
HASH, STATISTICS = Capture(reduce="hash"), Capture(reduce="statistics")
STANDARD = tracer.profile("standard")
WAYS: dict[str, Sequence[Capture]] = {
    "data": [Capture()],
    "hash": [HASH],
    "both": [STATISTICS, HASH],
    "standard": STANDARD,
}


class Later(Fault):
    """A weight is moved by a little before the step of the optimizer, after three steps."""

    def before_step(self, step: int, model: nn.Module) -> None:
        if step == 3:
            model.get_parameter("4.weight").data[2, 3] += 1e-3


FAULTS = {"nudge": Nudge(), "label": Label(), "masks": Masks(), "gradient": Gradient(), "later": Later()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Records a training in a way, once."""
    folder = tmp_path_factory.mktemp("runs")

    def run(way: str, fault: str = "") -> Path:
        path = folder / f"{way}{fault}.zarr"
        if not path.exists():
            training = replace(BASE, fault=FAULTS[fault]) if fault else BASE
            training.run(path, capture=WAYS[way])
        return path

    return run


def seen(found: Difference) -> set[tuple[Any, ...]]:
    """How many messages of each stream differ, and where they part first."""
    return {(one.name, one.differing, one.first.step if one.first else None) for one in found.streams}


PAIRS = (("both", "both"), ("hash", "both"), ("data", "hash"), ("both", "data"))


@pytest.mark.parametrize(
    ("fault", "ways"),
    [
        pytest.param(fault, ways, marks=() if (number + at) % 4 == 0 else pytest.mark.slow)
        for number, fault in enumerate(FAULTS)
        for at, ways in enumerate(PAIRS)
    ],
)
def test_runs_part_where_their_data_does(fault: str, ways: tuple[str, str], runs: Any) -> None:
    """The first message, and how many differ in each stream, are those of a comparison of all data."""
    expected = partings(runs("data"), runs("data", fault))
    whole = diff(runs("data"), runs("data", fault))
    found = diff(runs(ways[0]), runs(ways[1], fault))
    assert place(found) == expected[0] == place(whole)
    assert found.differing == found.parted_messages == len(expected)
    assert seen(found) == seen(whole)
    assert (found.compared, found.complete) == (whole.compared, True)
    assert 0 < found.by_hash < found.compared
    assert {one.name.kind for one in found.streams} <= set(DEFAULT_KINDS)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_hashes_and_statistics_tell_of_the_size(fault: str, runs: Any) -> None:
    """Statistics bound the relative difference from below, and their norms are those of numpy."""
    whole = {one.name: one for one in diff(runs("data"), runs("data", fault)).streams}
    found = diff(runs("both"), runs("both", fault))
    assert found.first is not None
    for one in found.streams:
        if one.largest.amount.by == "hash":
            assert 0 <= one.largest.amount.relative <= whole[one.name].largest.amount.relative * (1 + 1e-9)
    name, step, call = found.first.name, found.first.step, found.first.call
    if found.first.amount.by == "hash":
        norms = []
        for path in (runs("data"), runs("data", fault)):
            with tracer.open(path) as reader:
                (data,) = (
                    one.data
                    for one in reader.messages(name.kind, steps=(step, step + 1))
                    if (one.key, one.call, one.leaf) == (name.module, call, name.leaf)
                )
                assert data is not None
                norms.append(np.linalg.norm(data.double().numpy()))
        told = {one: both for one, *both in found.first.amount.statistics}
        if norms[0] != norms[1]:
            assert told["norm"] == pytest.approx(norms, rel=1e-12)
    assert all(one.largest.amount.by != "data" or one.name.kind.startswith("loss") for one in found.streams)
    alone = diff(runs("hash"), runs("hash", fault))
    of_hashes = [one.largest.amount for one in alone.streams if one.largest.amount.by == "hash"]
    assert of_hashes
    assert all(math.isnan(one.relative) and not one.statistics for one in of_hashes)


@pytest.mark.parametrize("ways", [("standard", "standard"), ("both", "data"), ("data", "hash"), ("standard", "data")])
def test_equal_runs_are_identical(ways: tuple[str, str], runs: Any, tmp_path: Path) -> None:
    """The same training, recorded in two ways, is bit-identical as far as both have it; the verdict says by what."""
    path = tmp_path / "b.zarr"
    BASE.run(path, capture=WAYS[ways[1]])
    for one, other in ((runs(ways[0]), path), (path, runs(ways[0]))):
        found = diff(one, other)
        assert not found.differing
        assert found.identical is found.complete
        assert f"{found.by_hash:,} by hash" in found.verdict
        assert "are bit-identical" in found.verdict
        apart = {"hyperparameters", "optimizer_state", "keyframe", "gradient_norms"}
        assert {one.name.kind for one in found.uncompared} <= apart


def test_unused_generators_do_not_make_runs_part(tmp_path: Path) -> None:
    """Their states are compared by checksum, and told with the structure; asked for, they are compared."""
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"{number}.zarr")
        np.random.seed(number)  # noqa: NPY002 - the generator whose state is recorded
        BASE.run(paths[-1], capture=STANDARD)
    found = diff(*paths)
    assert not found.parted
    assert [(one.what, one.name) for one in found.structure if one.what == "generator"] == [
        ("generator", "numpy from step 0 on")
    ]
    asked = diff(*paths, kinds="generators")
    assert asked.first is not None
    assert (asked.first.step, asked.first.name.leaf) == (0, "numpy")


def test_filters_take_what_stands_for_a_kind(runs: Any) -> None:
    """A kind brings its hashes and statistics; one of these alone can be asked for."""
    one, other = runs("both"), runs("both", "gradient")
    found = diff(one, other, kinds="weight_gradients", modules="2")
    assert {one.name.kind for one in found.streams} == {"weight_gradients"}
    assert found.compared == found.by_hash == BASE.steps
    alone = diff(one, other, kinds="weight_gradients_statistics", modules="2")
    assert alone.compared == alone.by_statistics == BASE.steps
    assert seen(alone) == seen(found)


@pytest.mark.parametrize(("rtol", "atol"), [(1e-6, 0.0), (1e-3, 0.0), (0.0, 1e-7), (0.0, 0.1), (10.0, 10.0)])
def test_a_tolerance_is_decided_only_where_it_can_be(rtol: float, atol: float, runs: Any) -> None:
    """What parts by statistics parts by its data, too; what statistics leave open is told, and is no agreement."""
    pair = runs("both"), runs("both", "gradient")
    whole = diff(runs("data"), runs("data", "gradient"), rtol=rtol, atol=atol)
    found = diff(*pair, rtol=rtol, atol=atol)
    beyond = {one.name for one in whole.streams if one.parted}
    assert {one.name for one in found.streams if one.parted} <= beyond
    parted = {one.name: one.parted for one in whole.streams}
    assert all(one.parted <= parted[one.name] for one in found.streams)
    if found.first is None:
        assert found.undecided
        assert "do not tell whether within" in found.verdict
    assert not found.identical
    alone = diff(runs("hash"), runs("hash", "gradient"), rtol=rtol, atol=atol)
    assert alone.undecided > 0


def test_noise_does_not_judge_hashes(runs: Any) -> None:
    """Noise is about sizes; what differs by its hash alone is told, and undecided."""
    found = diff(runs("hash"), runs("hash", "gradient"), noise=[runs("data", "later")])
    assert found.undecided > 0


# -- by hand ------------------------------------------------------------------------------------------------------


def message(kind: str, step: int, data: Tensor, sampling: dict[str, Any] | None = None, module: str = "fc") -> Message:
    """A message of a module."""
    where = {"global_step": step, "train_step": step, "epoch": 0}
    return ModuleMessage(kind=kind, module=module, data=data, sampling=sampling, **where)


def hashed(step: int, data: Tensor, rows: int | None = None) -> Message:
    """The hash of a weight, or of rows of activations."""
    kind = "weights" if rows is None else "activations"
    capture = Capture(reduce="hash", rows=rows)
    kept = data if rows is None else data[:rows]
    return message(f"{kind}_hash", step, torch.tensor(hash_of(kept)), capture.sampling(kind, data.shape))


def summarised(step: int, data: Tensor) -> Message:
    """The statistics of a weight."""
    return message("weights_statistics", step, statistics_of(data), STATISTICS.sampling("weights", data.shape))


ODD = {
    "bfloat16": torch.linspace(-3, 3, 35).reshape(5, 7).to(torch.bfloat16),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "nan": torch.tensor([1.0, math.nan, -math.inf]),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "integers": torch.arange(5),
    "complex": torch.tensor([1 + 2j, 3j]),
}


@pytest.mark.parametrize("name", ODD)
def test_data_of_any_sort_is_hashed(name: str, tmp_path: Path) -> None:
    """Data in one trace has the hash that the other has kept, and another hash if a bit is another."""
    data = ODD[name]
    one = write(tmp_path / "a.zarr", [message("weights", 0, data)])
    other = write(tmp_path / "b.h5", [hashed(0, data)])
    assert diff(one, other).identical
    assert diff(other, one).identical
    if data.numel():
        changed = data.clone(memory_format=torch.contiguous_format)
        changed.reshape(-1)[0] += 1
        third = write(tmp_path / "c.zarr", [hashed(0, changed)])
        assert diff(one, third).parted
        assert diff(other, third).parted


def test_statistics_alone(tmp_path: Path) -> None:
    """They tell what differs, and never that two tensors are the same."""
    x, y = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4)
    y[1, 2] = 9.0
    one = write(tmp_path / "a.zarr", [summarised(step, x) for step in range(4)])
    other = write(tmp_path / "b.zarr", [summarised(step, y if step == 2 else x) for step in range(4)])
    found = diff(one, other)
    assert found.first is not None
    assert (found.first.step, found.first.name.kind, found.by_statistics) == (2, "weights", 4)
    told = {name: both for name, *both in found.first.amount.statistics}
    assert told["norm"] == pytest.approx([np.linalg.norm(x), np.linalg.norm(y)])
    assert told["mean"] == pytest.approx([float(x.mean()), float(y.mean())])
    exact = np.linalg.norm(x - y) / np.linalg.norm(x)
    assert 0.1 * exact < found.first.amount.relative <= exact
    assert "the statistics differ: norm" in str(found.first)
    same = diff(one, one)
    assert not same.differing
    assert not same.identical
    assert "the same as far as was recorded" in same.verdict
    data = write(tmp_path / "c.zarr", [message("weights", step, x) for step in range(4)])
    assert diff(data, other).first == diff(one, other).first
    hashes = write(tmp_path / "d.zarr", [hashed(step, x) for step in range(4)])
    (uncompared,) = diff(hashes, one).uncompared
    assert (uncompared.why, uncompared.count) == ("hash in A and statistics in B", 4)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_for_random_tensors(seed: int) -> None:
    """The bound from below of the relative difference, and what is beyond a tolerance for sure."""
    from analyze.comparing.amounts import Summaries

    draw = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 50, (1,), generator=draw))
    x = torch.randn(size, generator=draw, dtype=torch.float64) * 10 ** float(torch.randn(1, generator=draw))
    y = x + torch.randn(size, generator=draw, dtype=torch.float64) * 10 ** float(torch.randn(1, generator=draw) - 2)
    both = Summaries(statistics_of(x).numpy()[None], statistics_of(y).numpy()[None])
    exact = float(np.linalg.norm(x - y) / np.linalg.norm(x))
    assert 0 <= float(both.relative()[0]) <= exact * (1 + 1e-9)
    for rtol, atol in ((1e-3, 0.0), (0.1, 0.0), (0.0, 0.01), (0.0, 1.0), (0.05, 0.05)):
        outside = bool(((x - y).abs() > atol + rtol * x.abs()).any())
        assert outside or not both.beyond(rtol, atol)[0]
    assert not both.same()[0]
    assert len(both.told(0)) <= len(ENTRIES)
    finite = Summaries(both.one, statistics_of(torch.cat([y[1:], torch.tensor([math.nan])])).numpy()[None])
    assert finite.relative()[0] == math.inf
    assert finite.beyond(1e9, 1e9)[0]


def test_parts_of_tensors_have_hashes_of_their_own(tmp_path: Path) -> None:
    """The hash of the first rows is compared with that of as many, and with no other."""
    x = torch.arange(12.0).reshape(4, 3)
    rows = write(tmp_path / "a.zarr", [hashed(0, x, rows=2)])
    assert diff(rows, write(tmp_path / "b.zarr", [hashed(0, x, rows=2)])).identical
    whole = write(tmp_path / "c.zarr", [message("activations", 0, x)])
    (uncompared,) = diff(rows, whole).uncompared
    assert uncompared.why == "recorded with another sampling"
    cut = message("activations", 0, x[:2], Capture(rows=2).sampling("activations", x.shape))
    assert diff(rows, write(tmp_path / "d.zarr", [cut])).identical


def test_samples_of_hashes_are_not_aligned(tmp_path: Path) -> None:
    """A hash tells nothing of the samples of a batch; weights have none."""
    x = torch.arange(6.0).reshape(3, 2)
    where = {"global_step": 0, "train_step": 0, "epoch": 0}
    inputs = tracer.NetworkMessage(kind="input_data", data=x, **where)
    one = write(tmp_path / "a.zarr", [inputs, hashed(0, x, rows=2), hashed(0, x)])
    found = diff(one, one, align="sample")
    assert found.compared == 2
    (uncompared,) = found.uncompared
    assert (uncompared.name.kind, "samples" in uncompared.why) == ("activations", True)


def test_the_first_step_is_first_wherever_it_was_written(tmp_path: Path) -> None:
    """What a flight recorder held of early steps comes late in the trace."""
    x, y = torch.ones(3), torch.ones(3) + 1
    order = [0, 1, 4, 5, 2, 3]
    one = write(tmp_path / "a.zarr", [message("weights", step, x) for step in order])
    other = write(tmp_path / "b.zarr", [message("weights", step, y if step >= 3 else x) for step in order])
    found = diff(one, other)
    assert found.first is not None
    assert found.first.step == 3
    assert [one for one in found.structure if one.what == "order"] == []
