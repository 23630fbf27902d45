"""Captures: what they refuse, which messages they choose, and how much of each they keep."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tracer
from tests.endings import alike, ended
from tests.examples import examples
from tests.observing.recorded import attached, finished, mlp, observe
from tracer import Capture, CaptureError, Collect, Exporter, Message, UnknownNameError
from tracer.messaging.messages import DATA_KINDS, KINDS
from tracer.observing.capture import DEFAULT_KINDS, DTYPES, choice
from tracer.observing.publisher import Overflows
from tracereel.main import main

# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"kinds": ["wieghts"]}, UnknownNameError, "did you mean 'weights'"),
        ({"kinds": []}, CaptureError, "kinds of a capture is empty"),
        ({"modules": ()}, CaptureError, "modules of a capture is empty"),
        ({"tags": []}, CaptureError, "tags of a capture is empty"),
        ({"types": ["Conv2d"]}, CaptureError, "classes of modules"),
        ({"types": int}, CaptureError, "classes of modules"),
        ({"every": 0}, CaptureError, "every of a capture is an integer of at least 1, not 0"),
        ({"burst": 0}, CaptureError, "burst of a capture is an integer of at least 1, not 0"),
        ({"every": 5, "burst": 6}, CaptureError, r"burst of a capture is at most every \(5\), not 6"),
        ({"every": True}, CaptureError, "not True"),
        ({"every": 1.5}, CaptureError, "not 1.5"),
        ({"start": -1}, CaptureError, "start"),
        ({"stop": True}, CaptureError, "stop"),
        ({"start": 5, "stop": 5}, CaptureError, r"above start \(5\)"),
        ({"rows": 0}, CaptureError, "rows"),
        ({"positions": "3"}, CaptureError, "positions"),
        ({"elements": -4}, CaptureError, "elements"),
        ({"depth": -2}, CaptureError, "depth"),
        ({"positions": 2, "elements": 2}, CaptureError, "not both"),
        ({"dtype": "float15"}, UnknownNameError, "did you mean 'float16'"),
        ({"reduce": "meen"}, UnknownNameError, "did you mean 'mean'"),
        ({"reduce": 3}, CaptureError, "reduce of a capture is a function"),
        ({"condition": "yes"}, CaptureError, "condition of a capture is a function"),
    ],
)
def test_what_is_out_of_range_is_refused(settings: dict[str, Any], error: type[Exception], match: str) -> None:
    """Each wrong value is an error that names the setting, what was found and what is allowed."""
    with pytest.raises(error, match=match):
        Capture(**settings)


def test_a_capture_is_a_frozen_value() -> None:
    """It cannot be changed, and equals another with the same settings."""
    one = Capture(kinds="weights", modules=iter(["a.*"]), types=nn.Conv2d)
    assert (one.kinds, one.modules, one.types) == (("weights",), ("a.*",), (nn.Conv2d,))
    assert one == Capture(kinds=["weights"], modules=["a.*"], types=[nn.Conv2d])
    with pytest.raises(AttributeError):
        one.every = 3  # type: ignore[misc]


def test_the_default_kinds_are_all_but_four_and_state() -> None:
    """Everything is observed but two kinds that repeat a neighbour's, the norms of gradients, sample ids and state."""
    assert set(DATA_KINDS) - set(Capture().kinds) == {
        *("layer_inputs", "input_gradients", "gradient_norms", "sample_ids")
    }
    assert set(Capture().kinds) <= set(DATA_KINDS)
    assert Capture().kinds == DEFAULT_KINDS


def test_describing_gives_json() -> None:
    """The settings go into the header of a trace: plain JSON, functions and classes by name."""
    capture = Capture(
        kinds=["weights"], types=nn.Linear, every=3, condition=lambda _: True, reduce=torch.mean, tags="!eval"
    )
    told = json.loads(json.dumps(capture.describe(), allow_nan=False))
    assert (told["kinds"], told["every"], told["tags"]) == (["weights"], 3, ["!eval"])
    assert told["types"] == ["torch.nn.modules.linear.Linear"]
    assert "lambda" in told["condition"]
    assert set(told) == set(Capture.__dataclass_fields__)


def test_from_a_mapping() -> None:
    """A configuration file's settings make the same capture; types are names in torch.nn."""
    values = {"kinds": ["activations"], "types": ["Conv2d", "Linear"], "every": 2, "reduce": "norm"}
    expected = Capture(kinds=["activations"], types=[nn.Conv2d, nn.Linear], every=2, reduce="norm")
    assert Capture.from_mapping(values) == expected
    assert Capture.from_mapping({"types": "Linear"}).types == (nn.Linear,)
    with pytest.raises(UnknownNameError, match="did you mean 'modules'"):
        Capture.from_mapping({"module": "a"})
    with pytest.raises(UnknownNameError, match="did you mean 'Linear'"):
        Capture.from_mapping({"types": ["Liner"]})
    with pytest.raises(UnknownNameError, match="no capture setting 'condition'"):
        Capture.from_mapping({"condition": "print"})
    with pytest.raises(UnknownNameError, match="module type"):
        Capture.from_mapping({"types": ["functional"]})


# -- which ----------------------------------------------------------------------------------------------------


@given(
    every=st.integers(1, 7),
    start=st.integers(0, 9),
    length=st.one_of(st.none(), st.integers(1, 9)),
    step=st.integers(0, 40),
    batch=st.integers(0, 40),
)
def test_due_steps_are_multiples_in_a_range(every: int, start: int, length: int | None, step: int, batch: int) -> None:
    """A step is due if it is a multiple of `every` from `start` (inclusive) to `stop` (exclusive).

    Of an evaluation at any step in this range, the passes whose numbers are multiples are.
    """
    stop = None if length is None else start + length
    capture = Capture(every=every, start=start, stop=stop)
    expected = step in range(start, 1000 if stop is None else stop) and step in range(0, 1000, every)
    assert capture.due_step(step) == expected
    assert capture.next_step(step) == next((one for one in range(step, 200) if capture.due_step(one)), None)
    assert capture.due("weights", "default", step) == expected
    assert capture.due("epoch_finished", "default", step)
    in_range = step in range(start, 1000 if stop is None else stop)
    assert capture.due("activations", "eval", step, batch) == (in_range and batch in range(0, 1000, every))


def test_every_start_and_stop_thin_out_steps() -> None:
    """Steps are chosen of the training; of evaluations only the range is asked for, and epochs are all there."""
    model = mlp()
    exporter, heard = attached(Exporter(capture=Capture(every=3, start=2, stop=9)), Collect("*"), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter.set_optimizer(optimizer)
    for _ in range(12):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(5, 3))
    exporter.epoch_finished()
    exporter.detach()
    for kind in ("activations", "layer_gradients", "weights", "weight_updates", "batch_started", "network_output"):
        steps = {one.global_step for one in heard.of(kind) if one.tag == "default"}
        assert steps == {3, 6}, kind
    assert {one.global_step for one in heard.of("activations") if one.tag == "eval"} == set(range(2, 9))
    assert len(heard.of("epoch_started")) == len(heard.of("epoch_finished")) == 1


@pytest.mark.parametrize(("start", "stop"), [(0, None), (4, 23), (13, 15), (17, 18)])
def test_a_burst_is_of_steps_in_a_row(start: int, stop: int | None) -> None:
    """And of passes in a row; each step says which is the next one."""
    capture = Capture(every=10, burst=4, start=start, stop=stop)
    expected = [step for step in range(start, 60 if stop is None else stop) if step % 10 < 4]
    assert [step for step in range(60) if capture.due_step(step)] == expected
    for step in range(50):
        assert capture.next_step(step) == next((one for one in expected if one >= step), None)
    assert [batch for batch in range(25) if capture.due_batch(start, batch)] == [
        *range(4),
        *range(10, 14),
        *range(20, 24),
    ]


def nested() -> nn.Module:
    """Modules of three levels."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    return nn.Sequential(nn.Sequential(inner, nn.Linear(3, 3)), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"0.0.0", "0.0.1", "0.1", "1"}),
        ({"modules": "*"}, {"", "0", "0.0", "0.0.0", "0.0.1", "0.1", "1"}),
        ({"modules": ["0.?", "1"]}, {"0.0", "0.1", "1"}),
        ({"modules": "0.*"}, {"0.0", "0.0.0", "0.0.1", "0.1"}),
        ({"types": nn.Linear}, {"0.0.0", "0.1", "1"}),
        ({"types": nn.Linear, "modules": "0.*"}, {"0.0.0", "0.1"}),
        ({"types": [nn.ReLU, nn.Sequential]}, {"", "0", "0.0", "0.0.1"}),
        ({"depth": 0}, {""}),
        ({"depth": 1}, {"0", "1"}),
        ({"depth": 2}, {"0.0", "0.1", "1"}),
        ({"depth": -1}, {"0.0.0", "0.0.1", "0.1", "1"}),
        ({"depth": 9}, {"0.0.0", "0.0.1", "0.1", "1"}),
        ({"depth": 1, "types": nn.Linear}, {"1"}),
    ],
)
def test_which_modules(settings: dict[str, Any], expected: set[str]) -> None:
    """Globs, types and depth choose modules together; by default leaves and whoever has parameters."""
    heard = observe(nested(), Capture(kinds=["activations"], **settings), steps=1)
    assert {one.key for one in heard} == expected


def test_which_parameters() -> None:
    """Parameters follow the module that owns them, or their own path."""
    model = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3)
    everything = {one.key for one in observe(model, Capture(kinds=["weights"]), x, 1)}
    assert everything == {"weight_ih_l0", "weight_hh_l0"}
    assert {one.key for one in observe(model, Capture(kinds=["weights"], modules="*hh*"), x, 1)} == {"weight_hh_l0"}
    heard = observe(nested(), Capture(kinds=["weights", "biases"], modules=["1"]), steps=1)
    assert {(one.kind, one.key) for one in heard} == {("weights", "1"), ("biases", "1")}


def test_which_tags() -> None:
    """A capture of the evaluation observes nothing of the training, and the other way round."""
    for tags, expected in (("eval", {"eval"}), ("!eval", {"default"}), (None, {"default", "eval"})):
        model = mlp()
        exporter, heard = attached(Exporter(capture=Capture(kinds=["activations"], tags=tags)), Collect("*"), model)
        model(torch.randn(2, 3))
        model.eval()
        model(torch.randn(2, 3))
        exporter.detach()
        assert {one.tag for one in heard} == expected


def test_the_first_capture_that_matches_decides() -> None:
    """Of several captures the first that takes a stream decides on it, even where a later one would give more."""
    captures = (
        Capture(kinds=["activations"], modules=["0"], every=2, reduce="mean"),
        Capture(kinds=["activations", "weights"], types=nn.Linear, dtype="float64"),
        Capture(kinds=["activations"]),
    )
    heard = observe(mlp(), captures, steps=3)
    shapes = {(one.kind, one.key): (one.data.ndim, one.data.dtype) for one in heard if one.data is not None}
    assert shapes == {
        ("activations", "0"): (0, torch.float64),
        ("activations", "1"): (2, torch.float32),
        ("activations", "2"): (2, torch.float64),
        ("weights", "0"): (2, torch.float64),
        ("weights", "2"): (2, torch.float64),
    }
    assert [one.global_step for one in heard if one.kind == "activations" and one.key == "0"] == [0, 2]
    assert [one.global_step for one in heard if one.kind == "activations" and one.key == "1"] == [0, 1, 2]


def test_a_condition_leaves_messages_out() -> None:
    """The condition sees each message and decides; what it refuses is not published."""
    seen: list[Message] = []

    def condition(message: Message) -> bool:
        seen.append(message)
        return message.kind != "weights" or (message.global_step == 1 and bool(message.data.any()))

    heard = observe(mlp(), Capture(kinds=["weights", "activations"], condition=condition))
    assert [(one.global_step, one.key) for one in heard.of("weights")] == [(1, "0"), (1, "2")]
    assert len(heard.of("activations")) == 9
    assert len(seen) == 15


def test_a_capture_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    """No module of the model matches: an error that shows what there is, before any file is created."""
    for chosen in ({"modules": "features.*"}, {"types": nn.Conv2d}):
        with pytest.raises(CaptureError, match="matches no module; there are '', '0', '1', '2'"):
            tracer.record(tmp_path / "run.zarr", mlp(), capture=Capture(**chosen)).__enter__()
    assert not list(tmp_path.iterdir())
    # kinds of the network need no module
    with tracer.record(tmp_path / "run.zarr", mlp(), capture=Capture(kinds=["loss"], modules="features.*")):
        pass


# -- how much -------------------------------------------------------------------------------------------------


@given(of=st.integers(1, 400), share=st.floats(0, 1), seed=st.integers(0, 2**31))
@settings(max_examples=examples(30))
def test_a_choice_is_fixed(of: int, share: float, seed: int) -> None:
    """A choice is ascending, without repetition, the same every time, and that of a generator anyone can build."""
    count = max(1, int(share * of))
    indices = choice(of, count, seed)
    assert indices.tolist() == choice(of, count, seed).tolist() == sorted(set(indices.tolist()))
    assert len(indices) == count
    assert 0 <= indices.min() <= indices.max() < of
    generator = np.random.Generator(np.random.PCG64([seed, of, count]))
    assert indices.tolist() == sorted(generator.choice(of, size=count, replace=False).tolist())


def test_a_choice_disturbs_no_generator() -> None:
    """Neither torch's nor NumPy's generators are drawn from, whatever is sampled."""
    before = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
    Capture(elements=3).select("weights", torch.arange(100.0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == repr(np.random.get_state())  # noqa: NPY002


def test_elements_keep_weights_gradients_and_updates_aligned() -> None:
    """Element i of the recorded weight, gradient and update are those of the same parameter."""
    model = nn.Sequential(nn.Linear(30, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    exporter, heard = attached(
        Exporter(capture=Capture(elements=17, seed=5), strict=True), Collect("*"), model, optimizer
    )
    model(torch.randn(4, 30)).square().sum().backward()
    before, gradient = model[0].weight.detach().clone(), model[0].weight.grad.clone()
    optimizer.step()
    exporter.detach()
    indices = choice(600, 17, 5)
    after = model[0].weight.detach()
    for kind, whole in (("weights", before), ("weight_gradients", gradient), ("weight_updates", after - before)):
        (one,) = heard.of(kind)
        assert one.data.numpy().tolist() == whole.numpy().reshape(-1)[indices].tolist()
    (activation,) = heard.of("activations")
    assert activation.data.shape == (17,)
    (bias,) = heard.of("biases")
    assert bias.data.shape == (17,)  # of 20
    (output,) = heard.of("network_output")
    assert output.data.shape == (4, 20)


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2d(2, 3, 1), (4, 2, 5, 6), (4, 3, 7)),
        (nn.Conv1d(2, 3, 1), (4, 2, 9), (4, 3, 7)),
        (nn.Linear(5, 3), (4, 9, 5), (4, 7, 3)),
        (nn.Linear(5, 3), (4, 5), (4, 3)),
        (nn.Conv1d(2, 3, 1), (4, 2, 6), (4, 3, 6)),
    ],
)
def test_positions_are_chosen_in_space_or_sequence(layer: nn.Module, shape: Any, expected: Any) -> None:
    """Positions are a fixed choice along space (images, 1-d convolutions) or sequence; channels and features stay."""
    (message,) = observe(nn.Sequential(layer), Capture(kinds=["activations"], positions=7), torch.randn(shape), 1)
    assert tuple(message.data.shape) == expected


def test_positions_pick_the_chosen_indices() -> None:
    """The kept positions are those of `choice` over the flattened space, in the exact values."""
    data = torch.arange(4 * 2 * 5 * 6.0).reshape(4, 2, 5, 6)
    kept = Capture(positions=7, seed=3).select("activations", data, nn.Conv2d(2, 2, 1))
    assert np.array_equal(kept.numpy(), data.numpy().reshape(4, 2, 30)[:, :, choice(30, 7, 3)])
    sequence = torch.arange(4 * 9 * 5.0).reshape(4, 9, 5)
    kept = Capture(positions=7, seed=3).select("activations", sequence, nn.Linear(5, 5))
    assert np.array_equal(kept.numpy(), sequence.numpy()[:, choice(9, 7, 3)])
    weight = torch.randn(4, 9, 5)
    assert Capture(positions=7).select("weights", weight) is weight


def test_rows_keep_the_first_datapoints() -> None:
    """Of a batch the first rows stay, of everything that has datapoints, and of nothing else."""
    heard = observe(mlp(), Capture(kinds=DATA_KINDS, rows=2), steps=1)
    assert {one.data.shape[0] for one in heard if one.data is not None and KINDS[one.kind].batched} == {2}
    assert {tuple(one.data.shape) for one in heard.of("weights")} == {(4, 3), (2, 4)}
    data = torch.arange(12.0).reshape(6, 2)
    assert Capture(rows=4).select("input_labels", data).tolist() == data.tolist()[:4]
    assert Capture(rows=9).select("activations", data) is data


@pytest.mark.parametrize("name", DTYPES)
def test_casts(name: str) -> None:
    """Floating-point data is cast as torch casts it; integers and the loss stay."""
    capture = Capture(dtype=name)
    data = torch.tensor([1 / 3, 1e-7, 7e4, float("nan")])
    got = finished(capture, "activations", data)
    assert got.dtype is getattr(torch, name)
    assert torch.equal(got, data.to(getattr(torch, name))) or got.isnan().any()
    assert finished(capture, "input_labels", torch.tensor([1, 2])).dtype is torch.int64
    assert finished(capture, "loss", torch.tensor(0.1)).dtype is torch.float32
    assert finished(capture, "activations", torch.tensor([1j])).dtype is torch.complex64


def test_the_trace_says_how_it_was_thinned_out(tmp_path: Path) -> None:
    """A stream's sampling and the indices of the fixed choices stand in the trace; the values are those."""
    model, heard = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(2 * 36, 3)), Collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captures = (
        Capture(kinds=["activations"], types=nn.Conv2d, rows=2, positions=5, seed=1, dtype="float64"),
        Capture(kinds=["weights", "weight_updates"], elements=11, seed=1),
        Capture(kinds=["layer_gradients"], reduce="rms"),
        Capture(kinds=["biases"]),
    )
    x = torch.randn(4, 1, 6, 6)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=captures, receivers=[heard], strict=True):
        whole = model(x)
        expected = model[0](x).detach()
        whole.sum().backward()
        optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        sampling = {(one.kind, one.module): one.sampling for one in trace.streams}
        notes = {
            (note["indices"]["of"], note["indices"]["count"], note["indices"]["seed"]): note["indices"]["values"]
            for note in trace.notes
            if "indices" in note
        }
        assert sampling["biases", "0"] is None
        assert sampling["weights", "0"] is None  # it has fewer elements than would be kept
        assert sampling["layer_gradients", "2"] == {"reduce": "rms"}
        assert sampling["weights", "2"] == {"shape": [3, 72], "elements": {"count": 11, "of": 216, "seed": 1}}
        told = sampling["activations", "0"]
        assert told["positions"] == {"count": 5, "of": 36, "axis": 2, "seed": 1}
        assert (told["shape"], told["rows"], told["dtype"]) == ([4, 2, 6, 6], 2, "float64")
        assert notes == {(36, 5, 1): choice(36, 5, 1).tolist(), (216, 11, 1): choice(216, 11, 1).tolist()}
        _, recorded = trace.array("activations", "0")
    by_hand = expected.numpy().reshape(4, 2, 36)[:2, :, notes[36, 5, 1]].astype(np.float64)
    assert np.array_equal(recorded[0], by_hand)


def test_settings_for_notebooks() -> None:
    """Those that are not as by default, and the kinds; names are text, and functions have their names."""
    told = Capture(kinds=["weights"], modules=["<b>*", "a\x1b"], every=10, reduce=torch.maximum)._repr_html_()
    assert "<td>kinds</td><td>weights</td>" in told
    assert "<td>modules</td><td>&lt;b&gt;*, a\\x1b</td>" in told
    assert "<td>every</td><td>10</td>" in told
    assert "maximum" in told
    assert told.count("<tr>") == 1 + 4
    assert Capture()._repr_html_().count("<tr>") == 1 + 1


# -- a capture's conditions and reductions may write into what they get, and copy only what they loo----------


def by_numpy(x: Tensor) -> None:
    """Write past torch, which does not count it as a version."""
    x.numpy()[...] = 7


def by_autograd(x: Tensor) -> None:
    """Differentiate, and write the gradient over the numbers."""
    with torch.enable_grad():  # a backward that calls this goes without
        x.requires_grad_()
        x.square().sum().backward()
    x.data.copy_(x.grad)


VANDALS: dict[str, Callable[[Tensor], Any]] = {
    "abs_": lambda x: x.abs_(),
    "a view": lambda x: x.view(-1)[:1].fill_(7),
    "data": lambda x: x.data.zero_(),
    "numpy": by_numpy,
    "set_": lambda x: x.set_(torch.zeros(1)),
    "resize_": lambda x: x.resize_(1),
    "its memory": lambda x: x.untyped_storage().fill_(7),
    "less memory": lambda x: x.untyped_storage().resize_(0),
    "autograd": by_autograd,
    "under no_grad": torch.no_grad()(lambda x: x.mul_(2)),
}


def trained(capture: Capture | None, with_optimizer: bool) -> tuple[Any, list[Message]]:
    """How a training ends that is recorded by this capture, or by none, and what is heard of it."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.Tanh())
    optimizer, heard = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Collect("*")
    batches = torch.randn(3, 5, 3).requires_grad_()
    exporter = Exporter(capture=capture or Capture(), strict=True)
    if capture is not None:
        exporter.message_bus.register(heard)
        exporter.set_model(model)
        exporter.set_optimizer(optimizer if with_optimizer else None)
        exporter.set_loss("mse_loss")
    ends: list[Any] = []
    for x in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), torch.ones(5, 2))
        loss.backward()
        optimizer.step()
        ends += [loss.item(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
    exporter.finish()
    exporter.detach()
    ends += [batches.grad, batches.detach()]
    return [*ends, *ended(model, [optimizer]).items()], heard.messages


def fields_of(messages: list[Message]) -> list[Any]:
    """All that is to be equal of two recordings."""
    return [
        [one.kind, one.key, one.tag, one.leaf, one.call, one.global_step, one.data]
        for one in messages
        if one.data is not None
    ]


HONEST: tuple[dict[str, Any], ...] = (
    {},
    {"reduce": lambda x: x.reshape(-1)[0].clone()},
    {"reduce": lambda so_far, x: (so_far.sum() + x.sum()).reshape(1)},
    {"reduce": lambda x: x.reshape(-1)[0].clone(), "elements": 3},
    {"reduce": lambda x: x.reshape(-1)[0].clone(), "rows": 2},
)
"""Captures whose functions leave alone what they get."""


@functools.cache
def of_honest(number: int | None, with_optimizer: bool) -> tuple[Any, list[Message]]:
    """A training that nobody records, or that one of these captures does."""
    return trained(None if number is None else Capture(kinds=DATA_KINDS, **HONEST[number]), with_optimizer)


@pytest.mark.parametrize(
    ("vandal", "with_optimizer"),
    [
        pytest.param(vandal, with_optimizer, marks=[] if with_optimizer == number % 2 else [pytest.mark.slow])
        for number, vandal in enumerate(VANDALS)
        for with_optimizer in (True, False)
    ],
)
def test_a_function_may_write_into_what_it_gets(vandal: str, with_optimizer: bool) -> None:
    """Whatever a condition or a reduction does to a tensor, of any kind, the training and what is recorded stay."""
    spoil = VANDALS[vandal]

    def condition(message: Message) -> bool:
        if message.data is not None:
            spoil(message.data)
        return message.call == 0

    def first(x: Tensor) -> Tensor:
        result = x.reshape(-1)[0].clone()
        spoil(x)
        return result

    def running(so_far: Tensor, x: Tensor) -> Tensor:
        result = (so_far.sum() + x.sum()).reshape(1)
        spoil(so_far)
        spoil(x)
        return result

    plain, _ = of_honest(None, with_optimizer)
    spoiling: tuple[dict[str, Any], ...] = ({"condition": condition}, {"reduce": first}, {"reduce": running})
    for number, functions in enumerate((*spoiling, {"reduce": first}, {"reduce": first, "condition": condition})):
        end, messages = trained(Capture(kinds=DATA_KINDS, **{**HONEST[number], **functions}), with_optimizer)
        assert alike(end, plain)
        _, meant = of_honest(number, with_optimizer)
        assert {one.kind for one in messages} >= set(DATA_KINDS) - {
            "epoch_finished",
            "eval_mode",
            "train_mode",
            "sample_ids",
            *([] if with_optimizer else ["gradient_norms"]),
        }
        assert alike(fields_of(messages), fields_of(meant))


def test_a_condition_that_looks_at_no_data_copies_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data is copied for a condition that looks at it, and for the message; it is gone when the condition is over."""
    made: list[Tensor] = []
    copying = [sys.modules["tracer.observing.publisher"]]
    real = copying[0].copied

    def counted(*args: Any) -> Tensor:
        made.append(real(*args))
        return made[-1]

    for module in copying:
        monkeypatch.setattr(module, "copied", counted)
    observe(mlp(), Capture(kinds=["activations"], condition=lambda message: message.global_step > 5))
    assert not made
    kept: list[Message] = []
    observe(mlp(), Capture(kinds=["activations"], condition=lambda message: kept.append(message) is not None))
    assert (len(made), len(kept)) == (0, 9)
    with pytest.raises(tracer.MessageError, match="only until the condition has answered"):
        _ = kept[0].data
    observe(mlp(), Capture(kinds=["activations"], condition=lambda message: bool(message.data.sum() > 1e9)))
    assert len(made) == 9


# -- numbers that a capture's dtype cannot hold are counted, and the trace tells how many --------------------


EDGES = (0.0, 1e-40, 65504.0, 65519.9, 65520.0, 65536.0, 3.3895e38, 3.3961e38, 3.4028e38, 3.4029e38, 1e300)


@settings(max_examples=examples(200))
@given(
    numbers=st.lists(
        st.one_of(st.floats(), st.sampled_from(EDGES), st.sampled_from(EDGES).map(lambda x: -x)), max_size=9
    ),
    source=st.sampled_from(["float32", "float64"]),
    target=st.sampled_from(["float16", "float32"]),
)
def test_overflows_are_counted_as_numpy_casts(numbers: list[float], source: str, target: str) -> None:
    """What is finite before the cast and infinite after it is counted, and nothing else."""
    with np.errstate(over="ignore"):
        before = np.array(numbers).astype(source)
        after = before.astype(target)
    expected = int((np.isfinite(before) & ~np.isfinite(after)).sum())
    overflows, one = Overflows(), torch.from_numpy(before)
    for _ in range(2):
        overflows.count(("weights", "fc", "eval", "0"), one, one.to(DTYPES[target]))
    told = {"kind": "weights", "module": "fc", "tag": "eval", "leaf": "0", "dtype": target}
    assert list(overflows.told()) == ([{**told, "count": 2 * expected, "of": 2 * len(numbers)}] if expected else [])


@pytest.mark.parametrize(
    ("source", "target", "numbers", "expected"),
    [
        (torch.float32, torch.bfloat16, [3.3895e38, 3.4e38, -3.4e38, torch.inf], 2),
        (torch.bfloat16, torch.float16, [65280.0, 65536.0, -1e38, torch.nan], 2),
        (torch.float8_e5m2, torch.float16, [57344.0, -57344.0], 0),
        (torch.float16, torch.bfloat16, [65504.0, torch.inf], 0),
    ],
)
def test_overflows_of_other_dtypes(
    source: torch.dtype, target: torch.dtype, numbers: list[float], expected: int
) -> None:
    """The same between the dtypes that numpy does not have."""
    overflows, before = Overflows(), torch.tensor(numbers).to(source)
    overflows.count(("loss", None, "default", ""), before, before.to(target))
    assert [one["count"] for one in overflows.told()] == [expected] * bool(expected)


def test_a_trace_tells_what_overflowed(tmp_path: Path) -> None:
    """A note for each stream with how many of its numbers overflowed; `trace info` shows it, a copy keeps it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1e5, 1.0], [torch.inf, 1.0]]))
        model[0].bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    path = tmp_path / "run.zarr"
    x = torch.tensor([[1.0, 0.0], [0.1, 0.0], [-9.0, 5.0]])
    captures = [
        Capture(kinds=["weights"], dtype="float16"),
        Capture(kinds=["activations"], modules="0", dtype="float16", reduce=lambda x: x[:, 0]),
        Capture(kinds=["loss", "biases"], dtype="float16"),
    ]
    with tracer.record(path, model, optimizer, capture=captures, strict=True) as run:
        for _ in range(3):
            model(x)
            run.log("loss", torch.tensor(1e6))
            optimizer.step()
    CliRunner().invoke(main, ["convert", str(path), str(tmp_path / "copy.zarr")], catch_exceptions=False)
    streams = {
        ("weights", "0"): (3, 12),  # 1e5 in each step; inf was there before
        ("activations", "0"): (6, 9),  # 1e5 and -9e5, but not 1e4
    }
    for one in (path, tmp_path / "copy.zarr"):
        with tracer.open(one) as trace:
            found = [note["overflowed"] for note in trace.notes if "overflowed" in note]
            assert [float(m.data) for m in trace.messages(kinds=["loss"]) if m.data is not None] == [1e6] * 3
        assert {(n["kind"], n["module"]): (n["count"], n["of"]) for n in found} == streams
        assert {(n["tag"], n["leaf"], n["dtype"]) for n in found} == {("default", "", "float16")}
    told = CliRunner().invoke(main, ["info", str(path)], catch_exceptions=False).output
    said = " ".join(told.split())
    assert "weights of '0': 3 of 12 numbers were beyond float16 and are recorded as infinite" in said
    assert "activations of '0': 6 of 9 numbers were beyond float16 and are recorded as infinite" in said
