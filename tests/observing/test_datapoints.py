"""The axis of the datapoints: of torch's own layers, of those around them, and what rows are kept along it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import analyze
import tracer
from tracer import Capture
from tracer.messaging.messages import DATA_KINDS, KINDS

T, B, F = 7, 16, 6
BATCHED = [name for name, kind in KINDS.items() if kind.batched]


class Around(nn.Module):
    """A layer of torch between linear layers, whose output for the last time step is classified."""

    def __init__(self, layer: nn.Module, *, first: bool, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.before, self.layer, self.after, self.head = nn.Linear(F, F), layer, nn.Linear(F, F), nn.Linear(F, 3)
        self.first, self.call = first, call

    def forward(self, x: Tensor) -> Tensor:
        """(t, n, F), or with `first` (n, t, F), → (n, 3)."""
        out = self.after(self.call(self.layer, torch.tanh(self.before(x))))
        return self.head(out[:, -1] if self.first else out[-1])  # type: ignore[no-any-return]


LAYERS: dict[str, tuple[Callable[[bool], nn.Module], Callable[..., Tensor]]] = {
    "lstm": (lambda first: nn.LSTM(F, F, batch_first=first), lambda layer, x: layer(x)[0]),
    "gru, with states": (
        lambda first: nn.GRU(F, F, batch_first=first),
        lambda layer, x: layer(x, torch.zeros(1, B, F))[0],
    ),
    "attention": (
        lambda first: nn.MultiheadAttention(F, 2, batch_first=first),
        lambda layer, x: layer(x, key=x, value=x)[0],
    ),
    "encoder": (
        lambda first: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(F, 2, 8, 0.0, batch_first=first), 1, enable_nested_tensor=False
        ),
        lambda layer, x: layer(x),
    ),
    "decoder": (
        lambda first: nn.TransformerDecoderLayer(F, 2, 8, 0.0, batch_first=first),
        lambda layer, x: layer(x, x),
    ),
    "linear": (lambda first: nn.Linear(F, F), lambda layer, x: layer(x)),
}


def record(path: Path, model: nn.Module, x: Tensor, y: Tensor, *, steps: int = 2, **capture: Any) -> None:
    """Train some steps on one batch, at a rate of 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = nn.functional.cross_entropy
    with tracer.record(path, model, optimizer, capture=Capture(**capture), loss=loss):
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def messages(path: Path, step: int) -> dict[tuple[str, str | None, str], tracer.Message]:
    """The messages with data of a step."""
    with tracer.open(path) as reader:
        return {
            (one.kind, one.key, one.leaf): one for one in reader if one.global_step == step and one.data is not None
        }


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:.*of the first datapoints:RuntimeWarning")
def test_rows_are_datapoints(name: str, first: bool, tmp_path: Path) -> None:
    """The rows of each tensor are the first datapoints of the whole one: those on the axis that has the batch."""
    torch.manual_seed(0)
    make, call = LAYERS[name]
    model = Around(make(first), first=first, call=call)
    x, y = torch.randn(*((B, T) if first else (T, B)), F), torch.randint(3, (B,))
    record(tmp_path / "whole.zarr", model, x, y, kinds=BATCHED)
    record(tmp_path / "rows.zarr", model, x, y, kinds=BATCHED, rows=4)
    whole, rows = messages(tmp_path / "whole.zarr", 1), messages(tmp_path / "rows.zarr", 1)
    assert whole.keys() == rows.keys()
    assert len(whole) > 12
    for key, one in whole.items():
        assert one.data is not None
        shape = tuple(one.data.shape)
        (axis,) = [at for at, size in enumerate(shape) if size == B]  # only the batch is so long
        kept = rows[key]
        assert kept.data is not None, key
        assert torch.equal(kept.data, one.data.narrow(axis, 0, 4)), (key, shape, kept.data.shape)
        assert kept.sampling is not None
        assert (kept.sampling["rows"], kept.sampling.get("datapoints", 0)) == (4, axis), key
        assert (one.sampling or {}).get("datapoints", 0) == axis, key
    # the gradients of layers with parameters tell the axis from the first step on, 0 included
    for key, one in messages(tmp_path / "whole.zarr", 0).items():
        if key[0] == "layer_gradients" and key[1] in ("before", "after", "layer"):
            assert one.sampling == {"datapoints": 0 if first else 1}, key


def test_rows_that_were_cut_too_early_are_told(tmp_path: Path) -> None:
    """Before the first labels nothing tells the axis of an input; the trace says so, and later rows are right."""
    model = Around(nn.Identity(), first=False, call=lambda layer, x: layer(x))
    x, y = torch.randn(T, B, F), torch.randint(3, (B,))
    with pytest.warns(RuntimeWarning, match="cut along axis 0"):
        record(tmp_path / "run.zarr", model, x, y, kinds=["input_data", "input_labels"], rows=4)
    with tracer.open(tmp_path / "run.zarr") as reader:
        shapes = [tuple(one.data.shape) for one in reader if one.kind == "input_data" and one.data is not None]
        (problem,) = [note for note in reader.notes if "problem" in note]
    assert shapes == [(4, B, F), (T, 4, F)]
    assert "input_data of the first datapoints" in str(problem)


def test_what_nothing_tells_is_told(tmp_path: Path) -> None:
    """Labels of all positions tell no axis: rows are of axis 0, with a note, and no message tells an axis."""
    model = nn.Sequential(nn.Linear(F, 3), nn.Flatten(0, 1))
    x, y = torch.randn(T, B, F), torch.randint(3, (T * B,))
    record(tmp_path / "run.zarr", model, x, y, kinds=BATCHED, rows=4)
    with tracer.open(tmp_path / "run.zarr") as reader:
        (problem,) = [note for note in reader.notes if "problem" in note]
        shapes = {one.kind: tuple(one.data.shape) for one in reader if one.data is not None and one.key in (None, "0")}
        assert not any("datapoints" in (one.sampling or {}) for one in reader.streams)
    assert "the axis along which rows are cut" in str(problem)
    assert shapes["activations"] == (4, B, 3)


@pytest.mark.filterwarnings("ignore:.*of the first datapoints:RuntimeWarning")
def test_ids_tell_the_axis(tmp_path: Path) -> None:
    """Without labels and losses, the ids of a batch do; they are known before the forward, so no row is cut wrongly."""
    model = nn.Linear(F, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kinds = ["input_data", "sample_ids", "activations", "layer_gradients"]
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=Capture(kinds=kinds)) as run:
        for _ in range(2):
            run.samples(range(B))
            model(torch.randn(T, B, F)).square().mean().backward()
            optimizer.step()
    found = messages(tmp_path / "run.zarr", 1)
    assert {one.sampling["datapoints"] for key, one in found.items() if key[0] != "sample_ids" and one.sampling} == {1}
    assert (found["layer_gradients", "", ""].sampling or {}).get("datapoints") == 1


def test_positions_of_a_sequence_are_not_its_datapoints(tmp_path: Path) -> None:
    """Of (time, batch, features) some time steps are kept, of all datapoints."""
    model = Around(nn.LSTM(F, F), first=False, call=lambda layer, x: layer(x)[0])
    x, y = torch.randn(T, B, F), torch.randint(3, (B,))
    record(tmp_path / "run.zarr", model, x, y, kinds=["activations"], positions=3)
    kept = messages(tmp_path / "run.zarr", 1)["activations", "layer", "0"]
    assert kept.data is not None
    assert tuple(kept.data.shape) == (3, B, F)
    assert kept.sampling is not None
    assert kept.sampling["positions"]["axis"] == 0


def test_a_batch_as_wide_as_its_layers_is_no_time(tmp_path: Path) -> None:
    """As many channels as datapoints, or windows with as many tokens, do not hide that the datapoints are in axis 0."""
    windows = nn.Sequential(
        nn.Conv1d(3, B, 1), nn.Conv1d(B, B, 1), nn.ReLU(), nn.Unflatten(2, (B, 2)), nn.Flatten(1, 2),
        nn.Flatten(), nn.Linear(B * B * 2, 3),
    )  # fmt: skip
    record(tmp_path / "run.zarr", windows, torch.randn(B, 3, 2 * B), torch.randint(3, (B,)), kinds=list(DATA_KINDS))
    with tracer.open(tmp_path / "run.zarr") as reader:
        assert {(one.sampling or {}).get("datapoints", 0) for one in reader.streams} == {0}
        assert not [note for note in reader.notes if "problem" in note]


def test_metrics_of_datapoints_take_the_told_axis(tmp_path: Path) -> None:
    """`sample_norm` is that of a datapoint over all of its time steps; similarities take the same datapoints."""
    model = Around(nn.LSTM(F, F), first=False, call=lambda layer, x: layer(x)[0])
    x, y = torch.randn(T, B, F), torch.randint(3, (B,))
    record(tmp_path / "run.zarr", model, x, y, kinds=["activations"])
    whole = messages(tmp_path / "run.zarr", 1)["activations", "layer", "0"].data
    assert whole is not None
    heard = tracer.Collect("activations_sample_norm")
    tracer.replay(tmp_path / "run.zarr", analyze.SampleNorm(), heard)
    (found,) = [
        float(one.data)
        for one in heard
        if (one.key, one.leaf, one.global_step) == ("layer", "0", 1) and one.data is not None
    ]
    expected = whole.double().transpose(0, 1).flatten(1).norm(dim=1).mean()
    assert found == pytest.approx(float(expected), rel=1e-12)
    message = tracer.ModuleMessage(
        kind="activations", module="m", data=whole, global_step=0, train_step=0, epoch=0, sampling={"datapoints": 1}
    )
    pooled, answers = analyze.CKA(against="layers", positions="pooled", tag=None), []
    for module, data in (("m", whole), ("mean", whole.mean(0))):
        told = message.sampling if module == "m" else None
        one = tracer.ModuleMessage(
            kind="activations", module=module, data=data, global_step=0, train_step=0, epoch=0, sampling=told
        )
        answers += list(pooled.receive(one))
    answers += list(pooled.finish())
    values = [float(one.data) for one in answers if one.kind == "activations_cka" and one.data is not None]
    assert values == [pytest.approx(1.0, abs=1e-6)]
