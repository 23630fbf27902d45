"""Similarities of layers in runs: what is compared with what, live, in replays, in pairs and between two traces."""

from __future__ import annotations

import copy
import io
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import analyze
import tracer
from analyze.comparing.pairs import Bases
from analyze.metrics.similarity import similarity
from analyze.metrics.similarity.bases import basis
from analyze.metrics.similarity.canonical import compare
from analyze.metrics.similarity.datapoints import STATUSES
from analyze.metrics.similarity.similarity import Similarity
from analyze.registry import parse
from tests.analyze.metrics.layers import FUNCTIONS, NAMES, NAN, images, layers, message, said, value_of
from tracer import Capture, Collect, MessageError, ModuleMessage
from tracer.errors import CaptureError

# -- subscribers ----------------------------------------------------------------------------------------------


def run_of(steps: int, calls: int = 1) -> list[ModuleMessage]:
    """Activations of three layers at some steps, in the order in which a network would give them."""
    random = np.random.default_rng(5)
    start, drift = random.standard_normal((2, 60, 8))
    found = []
    for step in range(steps):
        whole = {
            "a": start + 0.3 * step * drift,
            "b": np.tanh(start + 0.2 * step * drift)[:, :5],
            "c": np.maximum(start - step * drift, 0),
        }
        for call, rows in enumerate(np.array_split(np.arange(60), calls)):
            found += [message(data[rows], module, 10 * step, call=call) for module, data in whole.items()]
    return found


def whole_of(messages: list[ModuleMessage], module: str, step: int) -> Any:
    """All datapoints of a layer at a step."""
    return np.concatenate([m.data.numpy() for m in messages if (m.module, m.global_step) == (module, step)])  # type: ignore[union-attr] # activations have data


def in_turns(*calls: Any) -> list[Any]:
    """Each similarity with each mode, and with one way to take calls, in turns; with the other it is slow."""
    return [
        pytest.param(name, against, way, marks=[] if at == (number + mode) % len(calls) else [pytest.mark.slow])
        for number, name in enumerate(NAMES)
        for mode, against in enumerate(("past", "final", "layers"))
        for at, way in enumerate(calls)
    ]


@pytest.mark.parametrize(("name", "against", "calls"), in_turns(1, 3))
def test_what_is_compared(name: str, against: str, calls: int) -> None:
    """Each mode gives the function's value of the two states it names, whether or not they come in batches."""
    messages = run_of(4, calls)
    metric = parse(f"{name}:against={against},details=false,calls={'together' if calls > 1 else 'apart'}")
    assert isinstance(metric, Similarity)
    answers = said(metric, messages)
    expected = {}
    function = FUNCTIONS[name]
    for step in (0, 10, 20, 30):
        for module in "abc":
            now = whole_of(messages, module, step)
            if against == "past" and step:
                expected[module, step] = function(now, whole_of(messages, module, step - 10))
            elif against == "final":
                expected[module, step] = function(now, whole_of(messages, module, 30))
        if against == "layers":
            for one, other in itertools.permutations("abc", 2):
                if one < other or name == "pwcca":
                    found = function(whole_of(messages, one, step), whole_of(messages, other, step))
                    expected[f"{one}|{other}", step] = found
    assert len(answers) == len(expected)
    for answer in answers:
        assert value_of(answer) == pytest.approx(float(expected[answer[1], answer[2]]), abs=1e-10), answer[:4]
    assert {answer[0] for answer in answers} == {f"activations_{name}"}
    assert vars(metric)["scope"] == ("step" if against == "layers" else "stream")


@pytest.mark.parametrize(("name", "against", "calls"), in_turns("apart", "together"))
def test_modes_go_on_from_their_state(name: str, against: str, calls: str) -> None:
    """With the state of one, taken anywhere, another goes on to the bit; the state is tensors and plain values."""
    messages = run_of(3, 2)
    make = lambda: parse(f"{name}:against={against},calls={calls}")  # noqa: E731 - a maker of equals
    expected = said(make(), messages)  # type: ignore[arg-type] # a similarity
    assert expected
    for cut in (1, 4, 7, 13):
        first, second = make(), make()
        answers = said(first, messages[:cut], end=False)  # type: ignore[arg-type]
        buffer = io.BytesIO()
        torch.save(first.state_dict(), buffer)
        buffer.seek(0)
        second.load_state_dict(copy.deepcopy(torch.load(buffer, weights_only=True)))
        assert answers + said(second, messages[cut:]) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_many_neurons_are_not_multiplied_with_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the products of all neurons would take too much, a step's datapoints are kept; the answers are the same."""
    messages = run_of(3, 3)
    wish = f"{name}:against=layers,calls=together"
    added_up = said(parse(wish), messages)  # type: ignore[arg-type] # a similarity
    monkeypatch.setattr(similarity, "WIDE", 20)  # of 21
    kept: list[tuple[Any, ...]] = []
    metric = parse(wish)
    for number, one in enumerate(messages):
        kept += said(metric, [one], end=False)  # type: ignore[arg-type]
        if number == 14:
            (state,) = metric.state_dict()["gathered"].values()
            assert all("parts" in group["gathering"] for group in state["groups"])
            metric, old = parse(wish), metric
            metric.load_state_dict(old.state_dict())
    kept += said(metric, [])  # type: ignore[arg-type]
    assert [answer[:-1] for answer in kept] == [answer[:-1] for answer in added_up]
    drawn = ("activations_procrustes_null", "activations_angular_null")  # another order of the datapoints, or noise
    pairs = [(value_of(a), value_of(b)) for a, b in zip(kept, added_up, strict=True) if a[0] not in drawn]
    np.testing.assert_allclose(*zip(*pairs, strict=True), atol=1e-9)


def test_options_of_cka_in_a_run() -> None:
    """Kernel and estimator reach every mode; together, each call is a batch."""
    messages = run_of(1, 3)
    whole = {module: whole_of(messages, module, 0) for module in "ab"}
    for options, expected in (
        ("estimator=debiased", analyze.cka(*whole.values(), estimator="debiased")),
        ("kernel=rbf,bandwidth=0.8", analyze.cka(*whole.values(), kernel="rbf", bandwidth=0.8)),
        ("estimator=minibatch", analyze.cka(*whole.values(), estimator="minibatch", batch_size=20)),
    ):
        metric = parse(f"cka:{options},against=layers,calls=together,details=false,modules=a+b")
        (answer,) = said(metric, messages)  # type: ignore[arg-type] # a similarity
        assert value_of(answer) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("name", ["svcca", "cca", "r2_cca"])
def test_fourier_in_a_run(name: str) -> None:
    """Frequencies in every mode."""
    x, y = images(0, 3, (6, 4)), images(2, 4, (4, 4))
    expected = float(FUNCTIONS[name](x, y, positions="fourier"))
    for calls in ("apart", "together"):
        metric = parse(f"{name}:positions=fourier,against=layers,details=false,calls={calls}")
        answers = said(metric, [message(x, "a"), message(y, "b")])  # type: ignore[arg-type] # a similarity
        assert value_of(answers[0]) == pytest.approx(expected, abs=1e-12)
    metric = parse(f"{name}:positions=fourier,details=false")
    answers = said(metric, [message(x, "a", 0), message(x + y[:, :1].mean(), "a", 1)])  # type: ignore[arg-type]
    assert value_of(answers[0]) == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize(("name", "against", "calls"), in_turns("apart", "together"))
def test_trouble_in_a_run(name: str, against: str, calls: str) -> None:
    """NaN, constants, other datapoints and scalars in a stream: NaN with a status, and then values again."""
    x, y = layers(0, 40)
    troubles: list[Any] = [x, x * NAN, x, np.zeros((40, 3)), x, x[:30], np.float64(3.0), np.zeros((0, 4)), x * 1j, x, x]
    messages = []
    for step, trouble in enumerate(troubles):
        messages += [message(trouble, "a", step), message(y, "b", step)]
    metric = parse(f"{name}:against={against},calls={calls}")
    assert isinstance(metric, Similarity)
    answers = said(metric, messages)
    status = {(a[1], a[2]): STATUSES[int(value_of(a))] for a in answers if a[0].endswith("_status")}
    values = {(a[1], a[2]): value_of(a) for a in answers if a[0] == f"activations_{name}"}
    assert {key: math.isnan(value) for key, value in values.items()} == {
        key: word in ("nonfinite", "zero_variance", "mismatch") for key, word in status.items()
    }
    assert {"nonfinite", "zero_variance", "mismatch", "ok"} <= set(status.values())
    assert sum(metric.statuses.values()) == len(status)


def test_names_of_layers() -> None:
    """Leaves and calls of a step are layers of their own, and named."""
    x, y = layers(0, 40)
    messages = [message(x, "lstm", leaf="1.0"), message(y, "relu"), message(y * 2, "relu", call=1)]
    answers = said(parse("svcca:against=layers,details=false"), messages)  # type: ignore[arg-type] # a similarity
    assert [answer[1] for answer in answers] == ["lstm[1.0]|relu", "lstm[1.0]|relu#1", "relu|relu#1"]


def test_calls_that_do_not_go_together() -> None:
    """A layer that is called less often than the others has other datapoints, and is said to have."""
    messages = [one for one in run_of(1, 3) if not (one.module == "b" and one.call == 1)]
    metric = parse("svcca:against=layers,calls=together")
    answers = said(metric, messages)  # type: ignore[arg-type] # a similarity
    status = {a[1]: STATUSES[int(value_of(a))] for a in answers if a[0].endswith("_status")}
    assert set(status) == {"a|b", "a|c", "b|c"}
    assert status["a|b"] == status["b|c"] == "mismatch"


@pytest.mark.parametrize("wish", ["svcca", "cca", "cka", "sketched_cka:k=16", "sketched_svcca:k=32"])
def test_datapoints_on_several_axes(wish: str) -> None:
    """Rows (10, 5) and (50,) can be the same datapoints, (10, 5) and (5, 10) cannot: in a call, and in several."""
    random = np.random.default_rng(0)
    parts = {
        name: [random.standard_normal((*rows, 24)) for _ in range(2)]
        for name, rows in {"flat": (50,), "sequence": (10, 5), "other": (5, 10), "fewer": (40,)}.items()
    }
    mode = "," if ":" in wish else ":"
    apart, together, resumed = (
        parse(f"{wish}{mode}against=layers,details=false,calls={calls}") for calls in ("apart", "together", "together")
    )
    expected = {
        answer[1]: value_of(answer)
        for answer in said(apart, [message(np.concatenate(both), name) for name, both in parts.items()])  # type: ignore[arg-type] # a similarity
    }
    assert {key for key, value in expected.items() if not math.isnan(value)} == {"flat|sequence", "flat|other"}
    messages = [message(both[call], name, call=call) for call in range(2) for name, both in parts.items()]
    assert not [answer for one in messages[:5] for answer in together.receive(one)]
    resumed.load_state_dict(together.state_dict())
    found = {answer[1]: value_of(answer) for answer in said(resumed, messages[5:])}  # type: ignore[arg-type] # a similarity
    assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("average", ["mean", "square"])
def test_all_pairs_of_datapoints_on_several_axes(average: Any) -> None:
    """All pairs say of each pair what it says by itself, whichever axes the datapoints are on."""
    random = np.random.default_rng(0)
    z = random.standard_normal((50, 4))
    parts = [z, np.tanh(z).reshape(10, 5, 4), np.sin(z).reshape(5, 10, 4), z[:40], z.reshape(10, 5, 4) * 2]
    bases = Bases(1.0, average=average)
    for place, x in enumerate(parts):
        bases.add(place, x)
    found = bases.similarities()
    metric = parse("cca" if average == "mean" else "r2_cca")
    assert isinstance(metric, Similarity)
    kept = [metric.represent(x) for x in parts]
    for i in range(5):
        for j in range(5):
            one = metric.compare(kept[i], kept[j])
            assert found.status(i, j) == one.status, (i, j)
            assert found.values[i, j] == pytest.approx(float(one), abs=1e-12, nan_ok=True), (i, j)


# -- traces ---------------------------------------------------------------------------------------------------


def record(path: Path, seed: int, labels: int = 0, steps: int = 5, **capture: Any) -> Path:
    """A training of a small network, with a probe in each step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    y = (x.sum(1) > 0).long() + labels
    with tracer.record(
        path, model, optimizer, capture=Capture(kinds=["activations", "input_labels"], **capture)
    ) as run:
        run.probe("probe", x, y)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs from other seeds over the same probe."""
    folder = tmp_path_factory.mktemp("similarity")
    return record(folder / "one.zarr", 1), record(folder / "other.h5", 2)


MODES = [f"{name}:against={against},as={against}" for name in NAMES for against in ("final", "layers")]


def test_live_equals_replay(tmp_path: Path) -> None:
    """The modes that are no default say on replay, to the bit, what they said live."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    live, heard = Collect("activations_*"), Collect("activations_*")
    receivers = [*map(parse, MODES), live]
    with tracer.record(tmp_path / "run.zarr", model, optimizer, receivers=receivers, capture=tracer.Capture()) as run:
        run.probe("probe", torch.randn(40, 6), batch_size=16)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 6)).square().mean().backward()
            optimizer.step()
    tracer.replay(tmp_path / "run.zarr", *map(parse, MODES), heard)
    told = [
        sorted((m.kind, m.key, m.global_step, m.call, m.data.numpy().tobytes()) for m in some if m.data is not None)
        for some in (live, heard)
    ]
    assert told[0] == told[1]
    assert {kind for kind, *_ in told[0]} == {kind for wish in MODES for kind in parse(wish).produces}


@pytest.mark.parametrize("wish", ["svcca", "cca", "r2_cca", "cka", "procrustes", "svcca:threshold=0.9,modules=0"])
def test_all_pairs(wish: str, traces: tuple[Path, Path], tmp_path: Path) -> None:
    """Each pair of layers and steps of two runs has the function's value, in memory and out of it."""
    found = analyze.pairs(traces, wish)
    name, _, options = wish.partition(":")
    threshold = {"threshold": 0.9} if options else {}
    assert len(found.items) == (1 if options else 3) * 2 * 6
    data = {}
    for path in traces:
        with tracer.open(path) as reader:
            for one in reader.messages(kinds="activations", tags="probe"):
                data[str(path), one.key, one.global_step] = one.data
    for i, j in itertools.combinations_with_replacement(range(0, len(found.items), 5), 2):
        x, y = (data[item.trace, item.module, item.global_step] for item in (found.items[i], found.items[j]))
        expected = FUNCTIONS[name](x, y, **threshold)
        # in float32 a layer of rank 6 has noise in its other directions, which CCA keeps: 1e-9 is rounding there
        assert found.values[i, j] == found.values[j, i] == pytest.approx(float(expected), abs=1e-8)
        assert found.status(i, j) == expected.status
        if name in ("svcca", "cca"):
            assert (found.k[i], found.k[j]) == (expected.k, expected.m)
            assert found.null(i, j) == expected.null_baseline
    part = found.of("0")
    assert len(part.items) == 12
    assert np.array_equal(part.values, part.values.T)
    if name in ("svcca", "cca", "r2_cca"):
        for dtype, tolerance in (("float64", 0.0), ("float32", 4e-7)):
            other = analyze.pairs(traces, wish, scratch=tmp_path, dtype=dtype)  # type: ignore[arg-type] # a word
            np.testing.assert_allclose(other.values, found.values, atol=tolerance)
        quick = analyze.pairs(traces, wish, quick=True)
        np.testing.assert_allclose(quick.values, found.values, atol=1e-7)
    rows = list(part.rows())
    assert len(rows) == 12 * 13 // 2
    assert rows[1]["value"] == part.values[0, 1]


def test_pairs_in_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However small the blocks, and whatever has no basis, each pair has its value and its status."""
    random = np.random.default_rng(0)
    z = random.standard_normal((80, 6))
    data: list[Any] = [np.tanh(z @ random.standard_normal((6, width))) for width in (3, 5, 6, 9, 4)]
    data += [
        np.zeros((80, 2)),
        data[0] * NAN,
        data[0][:70],
        data[1][:70],
        np.zeros(0),
        random.standard_normal((80, 40)),
    ]
    monkeypatch.setattr(sys.modules["analyze.comparing.pairs"], "_BLOCK", 80 * 8 * 7)
    for scratch in (None, tmp_path):
        bases = Bases(0.95, scratch=scratch)
        for number, one in enumerate(data):
            bases.add(number, one)
        found = bases.similarities()
        assert len(bases) == len(found.items) == len(data)
        for i, j in itertools.product(range(len(data)), repeat=2):
            expected = compare(basis(data[i], 0.95), basis(data[j], 0.95))
            np.testing.assert_allclose(found.values[i, j], expected.value, atol=1e-12)
            assert found.status(i, j) == expected.status, (i, j)
    for wrong in ({"threshold": 2}, {"average": "median"}, {"dtype": "int8"}, {"positions": "fourier"}):
        with pytest.raises(MessageError):
            Bases(**wrong)


def test_two_runs(traces: tuple[Path, Path]) -> None:
    """The same layer at the same step of two runs; a row of the table for each number."""
    found = analyze.compare(*traces, ["svcca", "pwcca:details=false"])
    rows = [row for row in found if row.kind == "activations_svcca"]
    assert [(row.module, row.global_step) for row in rows] == [(str(m), s) for s in range(6) for m in range(3)]
    data = []
    for path in traces:
        with tracer.open(path) as reader:
            data.append({(m.key, m.global_step): m.data for m in reader.messages(kinds="activations", tags="probe")})
    for name in ("svcca", "pwcca"):
        for row in (row for row in found if row.kind == f"activations_{name}"):
            expected = FUNCTIONS[name](*(one[row.module, row.global_step] for one in data))
            assert row.value == pytest.approx(float(expected), abs=1e-8 if name == "pwcca" else 1e-12)
            assert row.trace == "|".join(map(str, traces))
    assert {row.kind for row in found} > {"activations_svcca_null", "activations_svcca_status", "activations_pwcca"}
    some = analyze.compare(*traces, "svcca:details=false,modules=0", steps=(1, 4, 2))
    assert [(row.module, row.global_step) for row in some] == [("0", 1), ("0", 3)]


def test_runs_that_cannot_be_compared(traces: tuple[Path, Path], tmp_path: Path) -> None:
    """Other labels, other samples, nothing in common, or no similarity: a sentence, before any number."""
    labelled = record(tmp_path / "labels.zarr", 1, labels=1, steps=1)
    with pytest.raises(CaptureError, match="not the same: their labels differ"):
        analyze.compare(traces[0], labelled)
    with pytest.raises(CaptureError, match="labels differ"):
        analyze.pairs([traces[0], labelled])
    sampled = record(tmp_path / "rows.zarr", 1, steps=1, rows=32)
    with pytest.raises(CaptureError, match="not of the same datapoints"):
        analyze.compare(traces[0], sampled)
    with pytest.raises(CaptureError, match="needs activations"):
        analyze.compare(*traces, "svcca:tag=other")
    with pytest.raises(CaptureError, match="no step of a layer in common"):
        analyze.compare(*traces, steps=(100, None))
    with pytest.raises(CaptureError, match="no step"):
        analyze.pairs(traces, steps=(100, None))
    with pytest.raises(MessageError, match="compares layers"):
        analyze.compare(*traces, "norm")
    with pytest.raises(MessageError, match="compares layers"):
        analyze.pairs(traces, "norm")
    with pytest.raises(MessageError, match="not symmetric"):
        analyze.pairs(traces, "pwcca")


def test_kept_positions_of_convolutions_are_no_neurons(tmp_path: Path) -> None:
    """Of images of which some positions were kept, in one axis, the channels are the neurons, whoever is asked."""
    path = tmp_path / "run.zarr"
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 12, 3), torch.nn.ReLU())
    capture = Capture(kinds=["activations"], tags=["probe"], positions=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(path, model, optimizer, capture=capture) as run:
        run.probe("probe", torch.randn(20, 1, 8, 8), every=1)
        model(torch.randn(4, 1, 8, 8)).square().mean().backward()
        optimizer.step()
    told = {}
    for spec in (
        "svcca:against=layers",
        "cka:against=layers",
        "sketched_cka:k=16,against=layers",
        "saturation:tag=probe",
        "effective_rank:kind=activations,tag=probe",
        "statistics:kind=activations,per=channel,which=mean,tag=probe",
    ):
        auto, first, last = (
            [np.asarray(row.value) for row in analyze.analyze(path, f"{spec},channels={word}")]
            for word in ("auto", "first", "last")
        )
        assert len(auto) == len(first) > 0
        for one, other in zip(auto, first, strict=True):
            np.testing.assert_array_equal(one, other)
        told[spec] = any(
            one.shape != other.shape or (one != other).any() for one, other in zip(auto, last, strict=True)
        )
    assert all(told.values()), told
    (one, other) = (analyze.pairs(path, f"cka:channels={word}").values for word in ("auto", "first"))
    np.testing.assert_array_equal(one, other)
