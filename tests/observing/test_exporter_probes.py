"""A probe is a forward in eval mode that leaves the training as it was."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

import tracer
from analyze.metrics.accuracy import TrainAccuracy
from tests.observing.recorded import data_of, descend, find, train, watch
from tracer import CaptureError, Collect, Exporter


def probed() -> nn.Sequential:
    """A network whose eval mode is another than its training mode."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize("batch_size", [None, 3, 100])
def test_a_probe_is_a_forward_in_eval_mode(batch_size: int | None) -> None:
    """A probe gives what the model in eval mode gives at that moment: at first, every n steps, and at last."""
    model, inputs, labels = probed(), torch.randn(7, 3), torch.arange(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    expected = {}

    def note(step: int) -> None:
        other = copy.deepcopy(model).eval()
        first = other[0](inputs).detach()
        expected[step] = (first, other(inputs).detach())

    note(0)
    exporter.probe("probe", inputs, labels, every=2, batch_size=batch_size)
    for step in range(5):
        train(model, optimizer, 1)
        note(step + 1)
    exporter.finish()
    exporter.detach()
    steps = [one.global_step for one in find(heard, "activations", "0", tag="probe")]
    assert steps == [0, 2, 4, 5]
    for kind, module, place in (("activations", "0", 0), ("network_output", None, 1)):
        for one in find(heard, kind, module, tag="probe"):
            torch.testing.assert_close(one.data, expected[one.global_step][place], rtol=1e-6, atol=1e-7)
            if batch_size is None:
                assert torch.equal(one.data, expected[one.global_step][place])
    assert [torch.equal(one, labels) for one in data_of(heard, "input_labels", tag="probe")] == [True] * 4
    assert {one.tag for one in heard.of("activations")} == {"default", "probe"}
    assert {one.call for one in heard if one.tag == "probe"} == {0}


@pytest.mark.parametrize("made", [lambda x: {"logits": x}, lambda x: (x,), lambda x: x])
def test_labels_of_a_probe_join_the_output_in_a_structure(made: Callable[[Tensor], Any]) -> None:
    """Labels have the leaf of the only output, so an accuracy is computed of them whatever the output lies in."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            return made(self.layer(x))

    model, inputs = Wrapped(), torch.randn(8, 3)
    labels = model.layer(inputs).argmax(1)
    labels[0] = 1 - labels[0]
    exporter, heard = watch(model)
    bus, answers = tracer.MessageBus(), Collect("train_accuracy")
    bus.register(TrainAccuracy(tag="probe"))
    bus.register(answers)
    exporter.probe("probe", inputs, labels)
    for message in heard:
        bus.publish(message)
    assert [float(one.data) for one in answers.messages] == [7 / 8]


def test_a_probe_leaves_everything_as_it_was() -> None:
    """Modes (mixed ones too), buffers, random numbers and the inputs are after a probe what they were before."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.layer(x.sub_(0.5)) + torch.randn(3)

    class Stubborn(nn.BatchNorm1d):
        """What a norm that is always trained does in an evaluation: torch writes to its buffers unversioned."""

        def train(self, mode: bool = True) -> Any:
            return super().train(True)

    model = nn.Sequential(Noisy(), Stubborn(3), probed())
    model[2][1].eval()
    exporter, heard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    before = inputs.clone()
    modes, generator = [one.training for one in model.modules()], torch.get_rng_state()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    exporter.probe("probe", inputs)
    exporter.probe("in parts", inputs[:4], batch_size=2)
    exporter.finish()
    exporter.detach()
    assert find(heard, "activations", "0.layer", tag="probe")
    assert [one.training for one in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert torch.equal(inputs, before)
    assert torch.is_grad_enabled()


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a collator may give."""

    x: Tensor
    name: str = "batch"


class Pair(NamedTuple):
    """Two arguments in one."""

    first: Any
    second: Any


def test_inputs_of_a_probe_keep_their_classes() -> None:
    """A model gets copies of the same structure, of which it may ask for fields and attributes."""

    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, batch: Batch, pair: Pair, found: Any, *more: Any) -> Tensor:
            assert batch.name == "batch"
            assert found.default_factory is list
            assert more == ([1, None],)
            return self.layer(batch.x.sub_(1.0) + pair.first.mul_(0.0) + found["x"].add_(pair.second))

    model, x = Fields(), torch.randn(4, 3)
    before = x.clone()
    exporter, heard = watch(model)
    inputs = (Batch(x), Pair(x, 2.0), collections.defaultdict(list, x=x), [1, None])
    exporter.probe("whole", inputs)
    exporter.probe("parts", inputs, batch_size=3)
    exporter.detach()
    assert torch.equal(x, before)
    with torch.no_grad():
        expected = model.layer((x - 1.0) + (x * 0.0) + (x + 2.0))
    for tag in ("whole", "parts"):
        torch.testing.assert_close(data_of(heard, "network_output", tag=tag)[0], expected)


def test_a_lazy_model_is_not_probed() -> None:
    """A probe that made the parameters would draw what the training is to draw."""
    model = nn.Sequential(nn.LazyLinear(2), nn.Dropout())
    exporter, _ = watch(model)
    with pytest.raises(CaptureError, match=r"probe 'p' would make the parameters of a lazy model.*run the model once"):
        exporter.probe("p", torch.randn(4, 3))
    model(torch.randn(4, 3))
    exporter.probe("p", torch.randn(4, 3))
    exporter.detach()


def test_a_batched_probe_leaves_out_what_it_cannot_put_together() -> None:
    """Hidden states have their datapoints elsewhere than along the first axis: told as a problem, not told wrongly."""
    model, x = nn.LSTM(3, 4, batch_first=True), torch.randn(5, 2, 3)
    exporter, heard = watch(model)
    exporter.probe("whole", x)
    with pytest.warns(RuntimeWarning, match="in probe 'parts' is not recorded: its first axis is not the datapoints"):
        exporter.probe("parts", x, batch_size=2)
    exporter.detach()
    assert [one.leaf for one in find(heard, "activations", "", tag="whole")] == ["0", "1.0", "1.1"]
    (one,) = find(heard, "activations", "", tag="parts")
    assert one.leaf == "0"
    torch.testing.assert_close(one.data, find(heard, "activations", "", tag="whole", leaf="0")[0].data)


def test_a_probe_of_a_model_with_subclasses_of_tensors() -> None:
    """A mask that does its work in ``__torch_function__`` does it in a probe, too, at every step."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.out = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            query = self.query(x).unsqueeze(1)
            mask = causal_lower_right(x.shape[1], x.shape[1])
            return self.out(nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask))

    model, x = Masked(), torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter, heard = Exporter(), Collect("activations")
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    exporter.message_bus.register(heard)
    exporter.probe("fixed", x)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    exporter.detach()
    found = [one.data for one in heard if (one.key, one.tag) == ("out", "fixed")]
    assert len(found) == 3
    assert exporter.problems == []
    assert all(one is not None and torch.allclose(one, expected) for one in found)


def test_probes_of_several_arguments_and_wrong_ones() -> None:
    """Tuples and dictionaries are arguments; a probe that cannot run, or has no name of its own, is an error."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.layer(x) * scale

    model = Two()
    exporter, heard = watch(model)
    x, scale = torch.randn(4, 3), torch.full((4, 1), 2.0)
    exporter.probe("a", (x, scale))
    exporter.probe("b", {"x": x, "scale": scale}, batch_size=3)
    expected = model(x, scale).detach()
    for name in ("a", "b"):
        torch.testing.assert_close(data_of(heard, "network_output", tag=name)[0], expected)
    for name in ("a", "default", "eval", "", 3):
        with pytest.raises(CaptureError, match="tag of its own"):
            exporter.probe(name, (x, scale))
    with pytest.raises(CaptureError, match="every of probe 'c'"):
        exporter.probe("c", x, every=0)
    with pytest.raises(TypeError):
        exporter.probe("d", x)
    with pytest.raises(CaptureError, match="needs the model"):
        Exporter().probe("e", x)
    model(x, scale)
    exporter.detach()
    assert find(heard, "activations", "layer", tag="default")


class Remembering(nn.Module):
    """What its forward leaves in lists, dictionaries, sets, tensors, and in those that they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[float] = []
        self.last: collections.deque[float] = collections.deque(maxlen=2)
        self.cache: dict[str, Any] = {"sums": [], "calls": 0}
        self.sizes: set[int] = set()
        self.mean = torch.zeros(3)
        self.pair = ([], torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Remember x."""
        out = self.layer(x)
        self.seen.append(float(x.sum()))
        self.last.append(float(x.sum()))
        self.cache["sums"].append(out.detach())
        self.cache["calls"] += 1
        self.cache.setdefault(len(x), True)
        self.sizes.add(len(x))
        self.mean.lerp_(out.detach().mean(0), 0.1)
        self.pair[0].append(x)
        self.pair[1].add_(1)
        return out

    def remembered(self) -> list[Any]:
        """All of it, to be compared."""
        sums = [one.tolist() for one in self.cache["sums"]]
        rest = [sorted(map(str, self.cache)), self.cache["calls"], sorted(self.sizes), self.mean.tolist()]
        return [self.seen, [*self.last], sums, *rest, len(self.pair[0]), float(self.pair[1])]


def test_what_a_model_remembers_is_put_back(tmp_path: Path) -> None:
    """A pass of a probe leaves nothing in it: also of the default, for which nobody asked."""
    found = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = Remembering()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recording: Any = (
            tracer.record(tmp_path / "run.zarr", model, optimizer) if recorded else contextlib.nullcontext()
        )
        with recording as run:
            if recorded:
                run.probe("other", torch.ones(9, 4), every=1)
            descend(optimizer, lambda _, model=model: model(torch.randn(3, 4)).sum(), range(5))
        found.append(model.remembered())
    assert found[0] == found[1]
    assert len(found[0][0]) == 5
