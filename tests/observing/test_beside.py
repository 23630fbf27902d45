"""Hashes and statistics that are kept beside the data, or in its place."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor, nn

import analyze
import tracer
from analyze.registry import parse
from tracer import Capture, Collect, ModuleMessage
from tracer.errors import CaptureError
from tracer.messaging.messages import DATA_KINDS, Message
from tracer.messaging.stacks import Stretch
from tracer.messaging.subscription import Subscription, is_doubled
from tracer.numbers.statistics import ENTRIES, are_statistics, statistics_of
from tracer.observing.reductions import PIECE, hash_of

LAYOUTS = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "one number": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[:, :1].expand(-1, 300),
    "one number, expanded": lambda x: x[0, 0].expand(1, 1),
    "a column, expanded": lambda x: x[0, :, None].clone().as_strided((x.shape[1], 1), (1, 0)),
}
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "complex64", "complex128"),
    *("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"),
)


def numbers(dtype: str, rows: int = 70, columns: int = 600) -> Tensor:
    """Numbers of a dtype, some of them zero, NaN or infinite."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 3
    x[3], x[5, 7], x[6, 8], x[9, 9] = 0.0, torch.nan, torch.inf, -torch.inf
    kind = getattr(torch, dtype)
    if not (kind.is_floating_point or kind.is_complex):
        x = x.nan_to_num(0, 1, 0).abs()
    return x.to(kind)


def in_c_order(x: Tensor) -> bytes:
    """The bytes of a tensor, by way of nothing that `hash_of` uses."""
    whole = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    return ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.nbytes else b""


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hash_is_what_its_definition_says(dtype: str) -> None:
    """XXH3-64 of dtype, shape and the hashes of pieces, as anybody computes it."""
    whole = numbers(dtype, 300)
    for name, layout in LAYOUTS.items():
        x = layout(whole)
        data = in_c_order(x)
        digests = b"".join(xxhash.xxh3_64(data[at : at + PIECE]).digest() for at in range(0, len(data), PIECE))
        expected = xxhash.xxh3_64(f"{dtype} {list(x.shape)}\n".encode() + digests).digest()
        assert hash_of(x) == int.from_bytes(expected, "big", signed=True), name


def test_hashes_of_large_tensors_that_lie_elsewhere() -> None:
    """Of tensors that are copied a few megabytes at a time, whatever their axes are; and of marked numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 700, 1111, generator=generator)
    for one in (x.permute(2, 0, 1), x.permute(1, 2, 0), x.transpose(0, 1), x[:, :, 3:-7], x.flatten()[1:]):
        assert hash_of(one) == hash_of(one.contiguous())
    marked = torch.view_as_complex(x[..., :1110].contiguous().reshape(3, 700, 555, 2)).conj()
    assert hash_of(marked) == hash_of(marked.resolve_conj())
    assert hash_of(marked) != hash_of(marked.conj())


@pytest.mark.parametrize("dtype", [one for one in DTYPES if not one.startswith("complex")])
@pytest.mark.parametrize("finite", [True, False])
def test_statistics_are_those_of_numpy(dtype: str, finite: bool) -> None:
    """Mean, deviation, norm, extremes and counts, of whole tensors."""
    whole = numbers(dtype)
    if finite and whole.is_floating_point():
        whole = whole.double().nan_to_num(0, 1, -1).to(whole.dtype)
    for layout in LAYOUTS.values():
        like_numpy(layout(whole))


def like_numpy(x: Tensor) -> None:
    """The statistics of a tensor are those that NumPy finds."""
    found = dict(zip(ENTRIES, statistics_of(x).tolist(), strict=True))
    values = x.double().numpy().ravel()
    counts = np.isnan(values).sum(), np.isinf(values).sum(), (values == 0).sum(), values.size
    assert tuple(found[name] for name in ("nan", "inf", "zero", "count")) == counts
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = {"norm": np.linalg.norm(values), "mean": values.mean(), "std": values.std(ddof=1)}
        if values.size:
            expected |= {"min": values.min(), "max": values.max()}
    for name, value in expected.items():
        if name == "std" and not np.isfinite(values).all():
            assert np.isnan(found[name])
        else:
            np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


def network() -> nn.Module:
    """A network with two branches of the same part, dropout and normalisation."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))


def train(path: Path, capture: Any, *receivers: Any, steps: int = 5, scaled: bool = False) -> list[Tensor]:
    """Train and record; the weights at the end."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0)
    torch.manual_seed(2)
    with tracer.record(path, model, optimizer, capture=capture, receivers=receivers, strict=True):
        for step in range(steps):
            for _ in range(2):  # accumulates
                x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
                scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 2:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(4, 6))
                model.train()
    return [one.detach().clone() for one in model.parameters()]


ALL = DATA_KINDS


def told(path: Path) -> Iterator[tuple[tuple[Any, ...], tracer.Message]]:
    """The messages of a trace, by what tells them apart."""
    with tracer.open(path) as reader:
        for one in reader.messages():
            yield (one.kind, one.key, one.leaf, one.tag, one.global_step, one.call), one


def is_data(name: str, kind: str, message: tracer.Message) -> bool:
    """Whether messages of a kind are kept as they are: losses and events by captures of hashes, too."""
    return name == "both" or message.data is None or kind in AS_THEY_ARE


AS_THEY_ARE = ("loss", "loss_terms", "gradient_norms")
"""Kinds of few numbers, of which no hash and no statistics are kept."""


@pytest.mark.parametrize(("suffix", "scaled"), [(".zarr", True), (".h5", False)])
def test_they_are_those_of_the_data(tmp_path: Path, suffix: str, scaled: bool) -> None:
    """Of every kind, at every step; and data that is kept at some steps is what it is without them."""
    beside = [Capture(kinds=ALL, reduce="hash"), Capture(kinds=ALL, reduce="statistics")]
    weights = [
        train(tmp_path / f"{name}{suffix}", capture, scaled=scaled)
        for name, capture in (
            ("full", Capture(kinds=ALL)), ("alone", beside), ("both", [Capture(kinds=ALL, every=2), *beside])
        )
    ]  # fmt: skip
    for one in weights[1:]:
        assert all(map(torch.equal, one, weights[0]))
    full = dict(told(tmp_path / f"full{suffix}"))
    for name in ("alone", "both"):
        found = dict(told(tmp_path / f"{name}{suffix}"))
        for (kind, *rest), message in full.items():
            if message.data is None or kind in AS_THEY_ARE:
                continue
            assert int(found[f"{kind}_hash", *rest].data) == hash_of(message.data), (name, kind, rest)
            assert (
                torch.equal(found[f"{kind}_statistics", *rest].data, statistics_of(message.data))
                or message.data.isnan().any()
            )
        data = {key: one for key, one in found.items() if key[0] in ALL}
        expected = {key: one for key, one in full.items() if is_data(name, key[0], one)}
        if name == "both":  # the first capture decides, whatever it keeps
            expected = {key: one for key, one in expected.items() if key[4] % 2 == 0 or key[3] != "default"}
        assert data.keys() == expected.keys()
        for key, one in data.items():
            assert one.data is None or torch.equal(one.data, expected[key].data), key
            doubled = one.data is not None and key[0] not in AS_THEY_ARE
            assert (one.sampling or {}).get("beside") == (["statistics"] if doubled else None)


SPECS = (
    *("norm:kind=weights", "norm:kind=weight_gradients,order=1", "norm:kind=activations,order=inf", "mean", "sum"),
    *("variance:kind=activations", "statistics:kind=activations", "ratio", "statistics:which=nan+inf+zeros+rms"),
)


@pytest.fixture(scope="module")
def of_data(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What the metrics say of a trace that holds all data."""
    path = tmp_path_factory.mktemp("full") / "full.zarr"
    expected = Collect(*{kind for one in map(parse, SPECS) for kind in one.produces})
    train(path, Capture())
    tracer.replay(path, *map(parse, SPECS), expected)
    return rows(expected)


@pytest.mark.parametrize("name", ["statistics", "both", "data"])
def test_metrics_take_statistics(tmp_path: Path, name: str, of_data: list[tuple[Any, ...]]) -> None:
    """Live and on replay they say, to the bit and once each, the same; and to 12 digits what they say of the data."""
    captures = {
        "data": [Capture()],
        "statistics": [Capture(reduce="statistics")],
        "both": [Capture(every=2), Capture(reduce="statistics")],
    }
    live = [parse(spec) for spec in SPECS]
    heard = Collect(*{kind for one in live for kind in one.produces})
    train(tmp_path / "run.zarr", captures[name], *live, heard)
    replayed = Collect(*{kind for one in live for kind in one.produces})
    tracer.replay(tmp_path / "run.zarr", *map(parse, SPECS), replayed)
    assert len(of_data) > 100
    assert rows(heard) == rows(replayed)
    assert [one[:-1] for one in rows(heard)] == [one[:-1] for one in of_data]
    for (*where, found), (*_, right) in zip(rows(heard), of_data, strict=True):
        np.testing.assert_allclose(np.frombuffer(found), np.frombuffer(right), 1e-12, 1e-15, err_msg=str(where))


def rows(found: Collect) -> list[tuple[Any, ...]]:
    """What answers say, in an order of their own."""
    return sorted(
        (one.kind, one.key or "", one.tag, one.global_step, one.call, one.data.numpy().tobytes()) for one in found
    )


def test_a_filter_of_the_data_lets_its_statistics_pass(tmp_path: Path) -> None:
    """Who asks for the weights alone gets the answers that follow from their statistics."""
    train(tmp_path / "run.zarr", [Capture(every=2), Capture(reduce="statistics")])
    found = analyze.analyze(tmp_path / "run.zarr", ["norm:kind=weights"], kinds="weights")
    assert {row.global_step for row in found} == {0, 1, 2, 3, 4}
    with pytest.raises(CaptureError, match="spectral_norm needs weights"):
        train(tmp_path / "other.zarr", [Capture(reduce="statistics")], parse("spectral_norm"))


@pytest.mark.parametrize("reduce", ["hash", "statistics"])
@pytest.mark.parametrize("setting", [{"dtype": "float16"}, {"elements": 3}, {"positions": 2}, {"condition": bool}])
def test_they_are_of_whole_tensors(reduce: str, setting: dict[str, Any]) -> None:
    """What would make them of something else is refused, and named."""
    with pytest.raises(CaptureError, match=f'reduce="{reduce}" is of whole tensors as they are: leave out'):
        Capture(reduce=reduce, **setting)


def test_updates_are_not_told_twice(tmp_path: Path) -> None:
    """Where the trace has statistics of updates, none are made of consecutive weights."""
    kinds = ["weights", "weight_updates"]
    train(tmp_path / "run.zarr", [Capture(kinds=["weights"]), Capture(kinds=kinds, reduce="statistics")])
    heard = Collect("weight_updates_norm2")
    tracer.replay(tmp_path / "run.zarr", parse("norm:kind=weight_updates"), heard)
    assert len(heard) == len({(one.key, one.global_step) for one in heard}) == 15


def test_a_message_that_is_made_by_hand() -> None:
    """Statistics stand for data wherever a subscription says so, and nowhere else."""
    data = torch.tensor([3.0, -4.0])
    where = {"module": "fc", "global_step": 0, "train_step": 0, "epoch": 0}
    sampling = Capture(reduce="statistics").sampling("weights", data.shape)
    message = ModuleMessage(kind="weights_statistics", data=statistics_of(data), sampling=sampling, **where)
    norm = parse("norm:kind=weights")
    assert norm.wants("weights_statistics", "fc", "default", 0)
    assert [float(one.data) for one in norm.receive(message)] == [5.0]
    assert not parse("norm:kind=weights,order=3").wants("weights_statistics", "fc", "default", 0)


@pytest.mark.parametrize("statistics", [False, True, "too"])
def test_what_a_subscription_takes_of_both(statistics: bool | Literal["too"], tmp_path: Path) -> None:
    """The data, its statistics in place of it, or both; singly and by the thousand."""
    train(tmp_path / "run.zarr", [Capture(kinds=["weights"], every=2), Capture(kinds=["weights"], reduce="statistics")])
    some = Subscription("weights", statistics=statistics)
    with tracer.open(tmp_path / "run.zarr") as reader:
        messages = [one for one in reader.messages() if some.wants(one.kind, one.key, one.tag, one.step)]
        taken = [one for message in messages for one in some.take(message)]
        assert {one.kind for one in taken} == {"weights"}
        held = {
            (are_statistics(one.sampling), one.key, one.global_step): is_doubled(one.sampling)
            for one in taken
            if isinstance(one, Message)
        }
        steps = {step for _, _, step in held}
        of_data = {step for of_statistics, _, step in held if not of_statistics}
        every = set(range(max(steps) + 1))
        assert of_data == (set() if statistics is True else {step for step in every if step % 2 == 0})
        assert {step for of_statistics, _, step in held if of_statistics} == (every if statistics else set())
        assert all(doubled is not of_statistics for (of_statistics, *_), doubled in held.items())
        stretches = [
            one for one in reader.stretches(np.ones(len(reader.journal), np.bool_)) if isinstance(one, Stretch)
        ]
        for stack in (one for stretch in stretches for one in stretch.stacks):
            if some.stands_for(stack.kind):
                assert some.takes(stack).tolist() == [bool(list(some.take(one))) for one in stack]


@pytest.mark.parametrize("size", [1, 2, 2049, 1 << 16, (1 << 16) + 1, 300_000])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "bool"])
@pytest.mark.parametrize("centre", [0.0, 200.0])
def test_statistics_are_those_of_extended_precision(size: int, dtype: str, centre: float) -> None:
    """Also of numbers far from zero, with zeros among them, and of more numbers than are converted at once."""
    torch.manual_seed(size)
    tensor = (torch.randn(size) + centre).mul_(torch.rand(size) > 0.1).to(getattr(torch, dtype))
    exact = (tensor.double() if dtype == "bfloat16" else tensor).numpy().astype(np.longdouble)
    found = dict(zip(ENTRIES, statistics_of(tensor).tolist(), strict=True))
    assert (found["count"], found["zero"]) == (size, int((exact == 0).sum()))
    assert (found["min"], found["max"], found["nan"], found["inf"]) == (exact.min(), exact.max(), 0, 0)
    digits = 1e-6 if size > 1 << 16 and dtype in ("float32", "bfloat16") else 1e-12
    scale = float(np.abs(exact).mean())
    assert abs(found["mean"] - float(exact.mean())) <= digits * scale
    assert found["norm"] == pytest.approx(float(np.sqrt(np.square(exact).sum())), rel=digits)
    assert found["absolute"] == pytest.approx(float(np.abs(exact).sum()), rel=digits)
    if size > 1:
        assert found["std"] == pytest.approx(float(exact.std(ddof=1)), rel=digits, abs=digits * scale)
    else:
        assert math.isnan(found["std"])
