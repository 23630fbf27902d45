"""Which datapoints a batch is made of: the data says it itself, because each datapoint is its own index."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

import analyze
import tracer
from tests.endings import alike, ended
from tests.observing.recorded import descend, find, sgd, watch
from tracer import Capture, Collect
from tracer.errors import MessageError
from tracer.messaging.messages import DATA_KINDS, KINDS
from tracer.observing.capture import DEFAULT_KINDS
from tracer.observing.exporter import Exporter
from tracer.observing.guesses.batches import Pulled

COUNT = 22
OF_BATCHES = ("input_data", "sample_ids")


def numbers() -> Tensor:
    """Of shape (datapoints, features): each row starts with its own index."""
    return torch.arange(COUNT * 3, dtype=torch.float32).reshape(COUNT, 3) / 3


def data() -> TensorDataset:
    """Datapoints and labels."""
    return TensorDataset(numbers(), torch.arange(COUNT) % 2)


class Training:
    """A model in training, and what is heard of it."""

    def __init__(self, **settings: Any) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = sgd(self.model, 1e-4)
        self.exporter, self.heard = watch(self.model, self.optimizer, **{"kinds": OF_BATCHES, **settings})

    def step(self, *inputs: Tensor) -> None:
        """A step of gradient descent."""
        step(self.model, self.optimizer, *inputs)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
    """A step of gradient descent."""
    optimizer.zero_grad()
    for one in inputs:
        model(one).square().mean().backward()
    optimizer.step()


def ids(heard: Collect, tag: str = "default") -> list[tuple[int, int, list[int]]]:
    """The steps, the calls and the ids that were published."""
    return [(one.global_step, one.call, one.data.tolist()) for one in find(heard, "sample_ids", tag=tag)]


def expected(heard: Collect, scale: float = 1.0, tag: str = "default") -> list[tuple[int, int, list[int]]]:
    """The same, as the model's inputs say it."""
    return [
        (one.global_step, one.call, one.data.reshape(len(one.data), -1)[:, 0].mul(scale).int().tolist())
        for one in find(heard, "input_data", tag=tag)
    ]


class Keyed(Dataset[Tensor]):
    """Datapoints that are called by names; the last one cannot be had."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, key: str | int) -> Tensor:
        if key == COUNT - 1:
            raise ValueError("it cannot be had")
        return numbers()[int(key)]


class Stream(IterableDataset[Tensor]):
    """Datapoints that come one after the other."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(numbers())


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(data(), 5),
    "shuffled": lambda: DataLoader(data(), 5, shuffle=True),
    "two workers": lambda: DataLoader(data(), 5, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(data(), 5, shuffle=True, num_workers=2, persistent_workers=True),
    "a batch sampler": lambda: DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data()), 5, drop_last=True)),
    "indices as one": lambda: DataLoader(
        data(), batch_size=None, sampler=BatchSampler(RandomSampler(data()), 5, drop_last=False)
    ),
    "indices as tensors": lambda: DataLoader(data(), batch_sampler=[torch.tensor([4, 2, 7]), torch.tensor([1, 9])]),
    "indices as arrays": lambda: DataLoader(data(), batch_sampler=[np.array([4, 2, 7]), [np.int64(1), np.int64(9)]]),
    "a dictionary": lambda: DataLoader([{"x": one} for one in numbers()], 5, shuffle=True),
}
MADE: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "as it is": (lambda x: x, 1.0),
    "a view": (lambda x: x.view(-1, 1, 3), 1.0),
    "a copy": (lambda x: x.double().float(), 1.0),
    "computed": (lambda x: x / 2 + 1, 2.0),
}


def inputs_of(batch: Any) -> Tensor:
    """What the model is given of a batch."""
    return batch["x"] if isinstance(batch, dict) else batch[0]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("made", MADE)
def test_ids_are_those_of_the_batch(loader: str, made: str) -> None:
    """In two epochs, whatever becomes of the batch before the model gets it."""
    make, scale = MADE[made]
    training = Training()
    one = LOADERS[loader]()
    for _ in range(2):
        for batch in one:
            training.step(make(inputs_of(batch)))
    found = ids(training.heard)
    offset = 2 if made == "computed" else 0
    assert found == [
        (at, call, [number - offset for number in row]) for at, call, row in expected(training.heard, scale)
    ]
    assert len(found) == 2 * len(one)
    assert find(training.heard, "sample_ids")[0].data.dtype is torch.int64


def ahead(loader: Iterable[Any], move: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Batches, of which the next one is drawn before each is given; as accelerate and prefetchers do."""
    before: Tensor | None = None
    for batch in loader:
        after = move(batch[0])
        if before is not None:
            yield before
        before = after
    assert before is not None
    yield before


@pytest.mark.parametrize("in_turn", [False, True])
def test_copies_are_looked_at_once(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at numbers on a device is to wait for it. Which batch comes next is known from the one before."""
    looked: list[int] = []
    is_copied = Pulled.is_copied
    monkeypatch.setattr(Pulled, "is_copied", lambda self, *rest: looked.append(self.number) or is_copied(self, *rest))
    training = Training()
    loader, move = DataLoader(data(), 2, shuffle=True), MADE["a copy"][0]
    for x in (move(x) for x, _ in loader) if in_turn else ahead(loader, move):
        training.step(x)
    assert ids(training.heard) == expected(training.heard)
    # of batches that are drawn ahead, the first one of two, and the last one, after which none is drawn
    assert len(looked) == (1 if in_turn else 2 + 11)


def test_what_is_not_known_is_not_said() -> None:
    """What was computed from a batch, where batches are drawn ahead or left out: nobody knows from which."""
    training = Training()
    for x in ahead(DataLoader(data(), 4), lambda x: x / 2):
        training.step(x)
    for number, (x, _) in enumerate(DataLoader(data(), 4)):
        if number > 2:
            training.step(x / 2)
    assert ids(training.heard) == []
    for number, (x, _) in enumerate(DataLoader(data(), 4)):
        if number > 2:
            training.step(x.double().float())
    assert [row for _, _, row in ids(training.heard)] == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21]]


def drawn_ahead(training: Training, made: str, workers: int = 0) -> None:
    """Two epochs of batches of which the next one is drawn before each is given."""
    for _ in range(2):
        for x in ahead(DataLoader(data(), 4, shuffle=True, num_workers=workers), MADE[made][0]):
            training.step(x)


def two_loaders(training: Training) -> None:
    """Each forward has the ids of the loader that its input is from."""
    for (a, _), (b, _) in zip(DataLoader(data(), 3, shuffle=True), DataLoader(data(), 4, shuffle=True), strict=False):
        training.step(b, a)


def accumulated(training: Training) -> None:
    """Several batches a step."""
    drawn = iter(DataLoader(data(), 2, shuffle=True))
    for first, _ in drawn:
        training.step(first, next(drawn, (first,))[0].double().float())


def compiled(training: Training) -> None:
    """The inputs that its graph gets are those of the batch."""
    torch.compiler.reset()
    model = torch.compile(training.model, backend="eager")
    for x, y in DataLoader(data(), 4, shuffle=True):
        training.optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        training.optimizer.step()


LOOPS: dict[str, tuple[Callable[[Training], None], dict[str, Any], list[int]]] = {
    **{
        f"drawn ahead, {made}, {workers} workers": (
            functools.partial(drawn_ahead, made=made, workers=workers), {}, [*range(12)]
        )
        for made in ("as it is", "a view", "a copy")
        for workers in (0, 2)
        if made != "a view" or not workers
    },
    "two loaders": (two_loaders, {}, [step for step in range(6) for _ in range(2)]),
    "steps left out": (accumulated, {"every": 3}, [0, 0, 3, 3]),
    "compiled": (compiled, {}, [*range(6)]),
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_batches_that_are_drawn_ahead(loop: str) -> None:
    """Each forward has the ids of its own batch, and not of the one that was drawn last; calls are of the inputs."""
    run, settings, steps = LOOPS[loop]
    training = Training(**settings)
    run(training)
    assert ids(training.heard) == expected(training.heard)
    assert [at for at, _, _ in ids(training.heard)] == steps


def test_a_mixture_of_batches_has_no_ids() -> None:
    """Of an input that is made of those of two loaders nothing is said."""
    training = Training()
    for (a, _), (b, _) in zip(DataLoader(data(), 3), DataLoader(data(), 4), strict=False):
        training.step(torch.cat((a, b)))
        training.step(b.double().float())
    assert [at for at, _, _ in ids(training.heard)] == [
        one.global_step for one in find(training.heard, "input_data") if len(one.data) <= 4
    ]


def test_parts_of_a_batch() -> None:
    """Gradients accumulated over parts: each forward has the ids of the whole batch, as the sampler gave them."""
    training = Training()
    for x, _ in DataLoader(data(), 8, shuffle=True):
        training.step(*x.split(4))
    whole: dict[int, list[int]] = {}
    for at, _, row in expected(training.heard):
        whole.setdefault(at, []).extend(row)
    assert ids(training.heard) == [(at, call, whole[at]) for at, call, _ in expected(training.heard)]
    assert [call for _, call, _ in ids(training.heard)] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("copied", [False, True])
def test_an_evaluation_between(copied: bool) -> None:
    """Its ids have its tag, and do not disturb those of the training."""
    training = Training()
    make = MADE["a copy" if copied else "as it is"][0]
    other = DataLoader(data(), 6, shuffle=True)
    for number, x in enumerate(ahead(DataLoader(data(), 4, shuffle=True), make)):
        training.step(x)
        if number == 2:
            training.model.eval()
            with torch.no_grad():
                for one, _ in other:
                    training.model(make(one))
            training.model.train()
    for tag, count in (("default", 6), ("eval", 4)):
        assert ids(training.heard, tag) == expected(training.heard, tag=tag)
        assert len(ids(training.heard, tag)) == count


def test_what_has_no_indices() -> None:
    """Data that comes as a stream, and keys that are no numbers: no ids, and no problem."""
    training = Training()
    for x in DataLoader(Stream(), 4):
        training.step(x)
    for x in DataLoader(Keyed(), batch_sampler=[["1", "2"], ["0"]]):
        training.step(x)
    assert len(find(training.heard, "input_data")) == 8
    assert ids(training.heard) == []
    assert training.exporter.problems == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_fails(workers: int) -> None:
    """What the loop leaves out leaves no trace in the ids of the others."""
    training = Training()
    order = [[1, 2], [COUNT - 1, 3], [4, 5], [6, 7]]
    iterator = iter(DataLoader(Keyed(), batch_sampler=order, num_workers=workers))
    for _ in range(len(order) + 1):
        try:
            x = next(iterator)
        except (ValueError, StopIteration):
            continue
        training.step(x.double().float())
    assert [row for _, _, row in ids(training.heard)] == [[1, 2], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.complex32],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_any_numbers(dtype: torch.dtype) -> None:
    """Of every dtype, and beside tensors of none, of one number and sparse ones."""
    training = Training()
    batches = [(x, x.to(dtype), torch.zeros(0), torch.tensor(3.0), x.to_sparse()) for x in numbers().split(2)]
    for x, *_ in DataLoader(batches, batch_size=None):
        training.step(x.double().float())
    assert [row for _, _, row in ids(training.heard)] == [[number] for number in range(11)]
    assert training.exporter.problems == []


def test_several_models() -> None:
    """Each has its own calls; what a model is given that is no batch has no ids."""
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    exporter, heard = Exporter(capture=Capture(kinds=OF_BATCHES), strict=True), Collect("*")
    exporter.message_bus.register(heard)
    for name, model in (("one", one), ("other", other)):
        exporter.add_modules((name, model))
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], 1e-4)
    exporter.set_optimizer(optimizer)
    seen = []
    for x, _ in DataLoader(data(), 8, shuffle=True):
        seen.append(x[:, 0].int().tolist())
        (one(torch.ones(8, 3)).sum() + other(x).sum() + one(x).sum()).backward()
        optimizer.step()
    found = [(m.global_step, m.leaf, m.call, m.data.tolist()) for m in find(heard, "sample_ids")]
    assert found == [at for step, row in enumerate(seen) for at in ((step, "other", 0, row), (step, "one", 1, row))]


def test_ids_by_hand() -> None:
    """They take the place of a loader's, for one forward; those of a step that is over are dropped."""
    training = Training()
    for number, (x, _) in enumerate(DataLoader(data(), 4)):
        if number == 1:
            training.exporter.samples(np.array([70, 71, 72, 73], np.uint8))
        if number == 2:
            training.exporter.samples(torch.tensor([5, 6]))
            training.exporter.samples([7, 8])
        training.step(x)
    rows = [row for _, _, row in ids(training.heard)]
    assert rows[:4] == [[0, 1, 2, 3], [70, 71, 72, 73], [7, 8], [12, 13, 14, 15]]


def test_ids_by_hand_without_a_loader(tmp_path: Path) -> None:
    """`run.samples`, of a step that is recorded and of one that is not, in a trace of the first two datapoints."""
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    capture = Capture(kinds=("sample_ids", "loss"), rows=2, every=2)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture) as run:
        for number in range(4):
            if number != 2:
                run.samples([number, 10, 20])
            step(model, optimizer, torch.ones(3, 3))
    with tracer.open(tmp_path / "run.zarr") as reader:
        (message,) = reader.messages("sample_ids")
        assert (message.global_step, message.data.tolist()) == (0, [0, 10])
        assert message.sampling == {"rows": 2}


def test_ids_by_hand_without_an_optimizer() -> None:
    """Where each forward is a step, and of several models, of which the one that comes next has them."""
    training = Training()
    training.exporter.set_optimizer(None)
    for number in range(3):
        training.exporter.samples([number])
        training.model(torch.ones(1, 3))
    training.exporter.finish()
    assert ids(training.heard) == [(0, 0, [0]), (1, 0, [1]), (2, 0, [2])]
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    exporter, heard = Exporter(capture=Capture(kinds=OF_BATCHES, every=2), strict=True), Collect("*")
    exporter.message_bus.register(heard)
    for name, model in (("one", one), ("other", other)):
        exporter.add_modules((name, model))
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], 1e-4)
    exporter.set_optimizer(optimizer)
    for number in range(4):
        if number != 2:
            exporter.samples([number])
        (one(torch.ones(1, 3)) + other(torch.ones(1, 3))).sum().backward()
        optimizer.step()
    assert [(m.global_step, m.leaf, m.data.tolist()) for m in find(heard, "sample_ids")] == [(0, "one", [0])]


class OfList(nn.Module):
    """Takes images as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, images: list[Tensor]) -> Tensor:
        found: Tensor = self.layer(torch.stack(images))
        return found


def test_a_batch_of_many_tensors() -> None:
    """A list of 20 images, of which some are compared."""
    model = OfList()
    optimizer = sgd(model, 1e-4)
    exporter, heard = watch(model, optimizer, kinds=("sample_ids",))
    batches = torch.arange(6 * 20 * 3.0).reshape(6, 20, 3)
    order = [3, 5, 0, 1, 2, 4]
    loader = DataLoader([[one, 0] for one in batches], batch_size=None, sampler=order)
    descend(optimizer, lambda images: model(list(images)).sum(), ahead(loader, lambda images: images.double().float()))
    assert ids(heard) == []  # what was computed from a batch
    listed = DataLoader([list(one) for one in batches], batch_size=None, sampler=order)
    descend(
        optimizer,
        lambda images: model(images).sum(),
        ahead([[one] for one in listed], lambda images: [one.double().float() for one in images]),
    )
    assert [row for _, _, row in ids(heard)] == [[one] for one in order]
    exporter.detach()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (3, r"int64 of shape \(\)"),
        ([[1, 2]], r"int64 of shape \(1, 2\)"),
        ([0.5], r"float64 of shape \(1,\)"),
        (torch.tensor([True]), r"bool of shape \(1,\)"),
        (["a"], "<U1"),
        ([[1], [2, 3]], "list"),
        (np.array([2**64 - 1], np.uint64), "below"),
    ],
)
def test_ids_that_are_none(given: Any, found: str) -> None:
    """A sentence says what was given."""
    training = Training()
    with pytest.raises(MessageError, match=found):
        training.exporter.samples(given)


# -- watching changes nothing ---------------------------------------------------------------------------------

PATCHED = (
    (_BaseDataLoaderIter, "_next_index"),
    (_SingleProcessDataLoaderIter, "_next_data"),
    (_MultiProcessingDataLoaderIter, "_next_data"),
)


def test_loaders_stand_as_they_were() -> None:
    """What is replaced in torch is there while ids are asked for, and no longer."""
    gc.collect()  # of the tests before
    before = [vars(owner)[name] for owner, name in PATCHED]
    assert not any(hasattr(one, "__wrapped__") for one in before)
    training = Training(kinds=("input_data",))
    assert [vars(owner)[name] for owner, name in PATCHED] == before
    other = Training()
    assert all(vars(owner)[name] is not one for (owner, name), one in zip(PATCHED, before, strict=True))
    training.exporter.detach()
    other.exporter.detach()
    assert [vars(owner)[name] for owner, name in PATCHED] == before
    Training()
    gc.collect()
    assert [vars(owner)[name] for owner, name in PATCHED] == before


def test_a_plain_capture_takes_none() -> None:
    """They are asked for by name, or by the profile ``standard``."""
    assert "sample_ids" not in DEFAULT_KINDS
    assert any("sample_ids" in (one.kinds or ()) for one in tracer.profile("standard"))


def test_batches_are_not_kept() -> None:
    """A batch is gone as soon as the program has dropped it."""
    training = Training()
    kept = []
    for x, _ in DataLoader(data(), 4):
        kept.append(weakref.ref(x))
        training.step(x)
    del x
    gc.collect()
    assert all(one() is None for one in kept)


@pytest.mark.parametrize("loader", ["shuffled", "two workers", "indices as one"])
def test_the_training_is_the_same(loader: str) -> None:
    """Weights and generators, to the bit."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        optimizer = sgd(model, 1e-4)
        exporter, _ = watch(model, optimizer, kinds=OF_BATCHES) if watched else (None, None)
        batches = LOADERS[loader]()
        for _ in range(2):
            for batch in batches:
                step(model, optimizer, inputs_of(batch).double().float())
        if exporter is not None:
            exporter.detach()
        ends.append(list(ended(model, [optimizer]).items()))
    assert alike(*ends)


# -- the axis of the datapoints: of torch's own layers, of those around them, and what rows are kept----------


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
        descend(optimizer, lambda _: nn.functional.cross_entropy(model(x), y), range(steps))


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
