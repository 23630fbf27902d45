"""`TraceReader.dataset`: each datapoint once, aligned, shared out, resumed, exported; the truth is what zarr reads."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

import tracer
from tests import processes
from tracer import (
    CaptureError,
    ModuleMessage,
    NetworkMessage,
    TraceExistsError,
    TraceWriter,
    UnknownNameError,
)
from tracer.format.journal import Column
from tracer.trace import datasets
from tracer.trace.datasets import TraceDataset

ROOT = Path(__file__).parents[2]
STEPS, BATCH, WIDTH = 60, 300, 64
"""A message is 75 KiB, so that each layer has an array of its own."""


def where(step: int, **more: Any) -> dict[str, Any]:
    """The counters of a message."""
    return {"global_step": step, "train_step": step, "epoch": 0, **more}


@pytest.fixture(scope="module", params=[".zarr", ".h5"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two layers, and of labels at every second step; the first number of a row is its identity."""
    generator = torch.Generator().manual_seed(0)
    path: Path = tmp_path_factory.mktemp("datasets") / f"run{request.param}"
    with TraceWriter(path) as writer:
        for step in range(STEPS):
            identity = torch.arange(step * BATCH, (step + 1) * BATCH)
            for module in ("a", "b"):
                data = torch.randn(BATCH, WIDTH, generator=generator)
                data[:, 0] = identity
                writer.write(ModuleMessage(kind="activations", module=module, data=data, **where(step)))
            if step % 2:
                writer.write(NetworkMessage(kind="input_labels", data=identity, **where(step)))
    return path


def truth(path: Path, module: str = "a") -> NDArray[np.float32]:
    """All rows of a layer, in order, as another library reads them."""
    name = f"rank0/activations/{module}"
    if path.suffix == ".zarr":
        return np.asarray(zarr.open_group(path, mode="r")[name]).reshape(-1, WIDTH)
    with h5py.File(path) as file:
        return np.asarray(file[name]).reshape(-1, WIDTH)


def same_rows(found: Tensor, wanted: NDArray[Any]) -> bool:
    """Whether the rows are the same, in any order, each as often."""
    return sorted(map(bytes, found.numpy())) == sorted(map(bytes, wanted))


def together(items: Iterator[Any] | TraceDataset | DataLoader[Any]) -> Tensor:
    """The rows of all batches."""
    return torch.cat(list(items))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few messages, so that this small trace has many."""
    monkeypatch.setattr(datasets, "BLOCK_BYTES", 200_000)


@pytest.mark.parametrize("shuffle", [False, True, 1000])
@pytest.mark.parametrize("size", [None, 7, 300, 1000, 100_000])
def test_each_datapoint_comes_once(path: Path, size: int | None, shuffle: bool | int, small_blocks: None) -> None:
    """In batches that are full but for the last, in the recorded order or in another."""
    with tracer.open(path) as trace:
        data = trace.dataset("activations", "a", batch_size=size, shuffle=shuffle)
    items = list(data)  # of a reader of its own
    found = torch.stack(items) if size is None else torch.cat(items)
    assert same_rows(found, truth(path))
    assert bool((found.numpy() == truth(path)).all()) is not bool(shuffle)
    assert data.datapoints == len(found)
    if size is not None:
        trace = tracer.open(path)
        assert {len(one) for one in items[:-1]} <= {size}
        whole = list(trace.dataset("activations", "a", batch_size=size, shuffle=shuffle, drop_last=True))
        assert [len(one) for one in whole] == [size] * (len(found) // size)


@pytest.mark.parametrize("size", [16, 600])
def test_the_order_is_random_and_repeatable(path: Path, size: int, small_blocks: None) -> None:
    """It follows from seed and epoch, batches are samples of the whole, and neighbours are seldom neighbours."""
    trace = tracer.open(path)
    data = trace.dataset("activations", "a", batch_size=size, shuffle=True, seed=1)
    first = together(data)[:, 0]
    assert torch.equal(first, together(data)[:, 0])
    data.set_epoch(1)
    others = [together(data)[:, 0], together(trace.dataset("activations", "a", batch_size=size, shuffle=True))[:, 0]]
    for other in others:
        assert (first == other).float().mean() < 0.01
    batches = torch.stack(first.split(size)[:-1])
    spread = batches.std(1) / first.std()
    assert 0.8 < spread.median() < 1.2
    assert (first[1:] - first[:-1] == 1).float().mean() < 0.1
    # a buffer of 1,200 datapoints mixes what lies in few blocks
    buffered = together(trace.dataset("activations", "a", batch_size=size, shuffle=1200))[:, 0]
    assert len(torch.unique(buffered[:1200] // BATCH)) < STEPS / 2 < len(torch.unique(first[:1200] // BATCH))


def test_layers_and_labels_are_aligned(path: Path, small_blocks: None) -> None:
    """Each row of a batch is the same datapoint in all tensors, and says where it is from."""
    with tracer.open(path) as trace:
        data = trace.dataset(["activations", "input_labels"], batch_size=1000, shuffle=True, numbered=True)
        assert (data.names, data.left_out) == (["a", "b", "input_labels"], STEPS)
        identities = []
        for batch in data:
            assert list(batch) == ["a", "b", "input_labels", "global_step", "message", "row"]
            labels = batch["input_labels"]
            assert labels.dtype == torch.int64
            assert torch.equal(batch["a"][:, 0].long(), labels)
            assert torch.equal(batch["b"][:, 0].long(), labels)
            assert torch.equal(batch["global_step"] * BATCH + batch["row"], labels)
            rows = trace.journal[batch["message"].numpy()]
            assert (rows[:, Column.GLOBAL_STEP] == batch["global_step"].numpy()).all()
            identities += labels.tolist()
    assert sorted(identities) == [one for one in range(STEPS * BATCH) if one // BATCH % 2]


def test_datapoints_of_several_axes(tmp_path: Path) -> None:
    """Entries of the batch, positions of sequences with their labels, pixels, and sequences with the time first."""
    tokens, images = torch.randn(3, 4, 5, 6).bfloat16(), torch.randn(3, 4, 5, 2, 2)
    labels = torch.arange(60).reshape(3, 4, 5)
    with TraceWriter(tmp_path / "run.zarr") as writer:
        for step in range(3):
            writer.write(ModuleMessage(kind="activations", module="tokens", data=tokens[step], **where(step)))
            writer.write(ModuleMessage(kind="activations", module="images", data=images[step], **where(step)))
            later = tokens[step].transpose(0, 1).contiguous()
            told = {"sampling": {"datapoints": 1}}
            writer.write(ModuleMessage(kind="activations", module="rnn", data=later, **where(step), **told))
            writer.write(NetworkMessage(kind="input_labels", data=labels[step], **where(step)))
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where(step)))
    trace = tracer.open(tmp_path / "run.zarr")

    def read(kinds: Any, modules: Any = None, **how: Any) -> Any:
        (batch,) = trace.dataset(kinds, modules, batch_size=1000, **how)
        return batch

    assert torch.equal(read("activations", "tokens"), tokens.reshape(12, 5, 6))
    assert torch.equal(read("activations", "rnn"), tokens.reshape(12, 5, 6))
    assert torch.equal(read("activations", "images", features=1), images.movedim(2, -1).reshape(-1, 5))
    assert torch.equal(read("loss"), torch.arange(3.0))
    both = read(["activations", "input_labels"], ["tokens", "rnn"], features=-1)
    assert torch.equal(both["input_labels"], labels.reshape(-1))
    assert torch.equal(both["tokens"], tokens.reshape(-1, 6))
    assert torch.equal(both["rnn"], both["tokens"])
    for features in (0, 3, -3):
        with pytest.raises(CaptureError, match="not an axis of tensors with 3 axes"):
            read("activations", "tokens", features=features)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    """With a sentence that names what was found."""
    with TraceWriter(tmp_path / "run.zarr") as writer:
        for step, length in ((0, 4), (1, 3)):
            writer.write(ModuleMessage(kind="activations", module="a", data=torch.ones(2, length, 5), **where(step)))
        writer.write(NetworkMessage(kind="input_labels", data=torch.ones(7), **where(0)))
        writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), **where(2)))
        writer.write(ModuleMessage(kind="weights_hash", module="a", data=torch.zeros(2, dtype=torch.int64), **where(2)))
    trace = tracer.open(tmp_path / "run.zarr")
    with pytest.raises(CaptureError, match=r"a state of a dataset is what `state_dict` returns, not \{\}"):
        trace.dataset("loss").load_state_dict({})
    assert trace.dataset("activations", features=-1).datapoints == 14
    labelled = ["activations", "input_labels"]
    for error, says, kinds, modules, how in (
        (UnknownNameError, "did you mean 'activations'", "activation", None, {}),
        (UnknownNameError, "known: a", "activations", "b", {}),
        (UnknownNameError, "recorded tag 'eval'.*known: default", "activations", None, {"tags": "eval"}),
        (CaptureError, r"\[4, 5\] in step 0 and float32 \[3, 5\] in step 1.*features=-1", "activations", None, {}),
        (CaptureError, "a has 8 datapoints and input_labels 7", labelled, None, {"features": -1}),
        (CaptureError, "no step that is selected has a and loss", ["activations", "loss"], None, {}),
        (CaptureError, "batch_size is a positive number", "loss", None, {"batch_size": 0}),
        (CaptureError, "share is", "loss", None, {"share": (2, 2)}),
        (CaptureError, "name of a module at least", "activations", [], {}),
        (CaptureError, "name of a kind at least", [], None, {}),
        (UnknownNameError, "no rank '1'.*known: 0", "loss", None, {"ranks": 1}),
        (CaptureError, "only weights_hash of weights.*`trace record -k weights`.*trace reenact", "weights", None, {}),
        (CaptureError, "from 0, not None, -1, 0", "loss", None, {"shuffle": -1}),
    ):
        with pytest.raises(error, match=says):
            trace.dataset(kinds, modules, **how)
    with pytest.raises(CaptureError, match="the rows of this trace are 0 to 4"):
        trace.select(at=np.array([5]))
    steps = [one.global_step for one in trace.messages("activations", at=np.array([3, 1, 2, 0]))]
    assert steps == [1, 0]


@pytest.mark.parametrize("shuffle", [False, 2000])
def test_ranks_and_workers_share_the_datapoints(
    path: Path, shuffle: bool | int, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each datapoint comes to one worker of one rank; all have about as many."""
    trace = tracer.open(path)
    parts = []
    for rank in range(3):
        data = trace.dataset("activations", "a", batch_size=100, shuffle=shuffle, share=(rank, 3))
        parts.append(together(DataLoader(data, batch_size=None, num_workers=2)))
        assert abs(len(parts[-1]) - STEPS * BATCH / 3) < 4 * BATCH
        with monkeypatch.context() as distributed:
            distributed.setattr(torch.distributed, "is_initialized", lambda: True)
            distributed.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            distributed.setattr(torch.distributed, "get_world_size", lambda: 3)
            pickled = pickle.dumps(trace.dataset("activations", "a", batch_size=100, shuffle=shuffle))
        # a process that is started knows its parent's rank
        assert same_rows(together(pickle.loads(pickled)), parts[-1].numpy())
    assert same_rows(torch.cat(parts), truth(path))


@pytest.mark.parametrize("size", [None, 64, 700])
@pytest.mark.parametrize("shuffle", [False, True, 1500])
def test_an_epoch_goes_on_where_it_stopped(
    path: Path, size: int | None, shuffle: bool | int, small_blocks: None
) -> None:
    """With the batches that would have come, also where the state went through JSON to another program."""
    trace = tracer.open(path)

    def make() -> TraceDataset:
        return trace.dataset("activations", "b", batch_size=size, shuffle=shuffle, steps=(0, 30), numbered=True)

    data = make()
    data.set_epoch(3)
    whole = [batch["b"] for batch in data]
    for stop in (0, 1, len(whole) // 2, len(whole)):
        given = iter(data)
        for _ in range(stop):
            next(given)
        state = json.loads(json.dumps(data.state_dict()))
        again = make()
        again.load_state_dict(state)
        rest = [batch["b"] for batch in again]
        assert len(rest) == len(whole) - stop
        assert all(map(torch.equal, rest, whole[stop:]))
        assert len(list(again)) == len(whole)  # the next epoch is a whole one
    other = trace.dataset("activations", "b", batch_size=5, shuffle=shuffle, steps=(0, 20))
    other.load_state_dict(state)
    with pytest.raises(CaptureError, match="of a dataset with another trace, batch size"):
        iter(other)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_resumes_it(path: Path, workers: int, small_blocks: None) -> None:
    """A `StatefulDataLoader` goes on with the same batches, and its next epoch is a whole one."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    trace = tracer.open(path)

    def make() -> Any:
        data = trace.dataset("activations", "a", batch_size=500, shuffle=2000)
        return loaders.StatefulDataLoader(data, batch_size=None, num_workers=workers)

    loader = make()
    given = iter(loader)
    for _ in range(11):
        next(given)
    state, rest = loader.state_dict(), list(given)
    again = make()
    again.load_state_dict(state)
    resumed = list(again)
    assert len(resumed) == len(rest) > 11
    assert all(map(torch.equal, resumed, rest))
    assert same_rows(together(again), truth(path))


def test_workers_that_live_on_hear_of_the_epoch(path: Path, small_blocks: None) -> None:
    """Their next epoch has another order, and again all datapoints."""
    data = tracer.open(path).dataset("activations", "a", batch_size=500, shuffle=True)
    loader = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True)
    first = together(loader)
    data.set_epoch(1)
    second = together(loader)
    assert not torch.equal(first, second)
    assert same_rows(first, second.numpy())


def test_a_trace_that_changed_is_refused(tmp_path: Path) -> None:
    """What grows at its end does not matter; another run in the same place does."""
    path = tmp_path / "run.zarr"

    def write(writer: TraceWriter, steps: range) -> None:
        for step in steps:
            writer.write(ModuleMessage(kind="biases", module="a", data=torch.ones(3), **where(step)))
        writer.commit()

    with TraceWriter(path) as writer:
        write(writer, range(3))
        pickled = pickle.dumps(tracer.open(path).dataset("biases", "a", batch_size=9))
        write(writer, range(3, 5))
        assert torch.equal(together(pickle.loads(pickled)), torch.ones(9))
    for steps in (range(3), range(2)):
        with TraceWriter(path, overwrite=True) as writer:
            write(writer, steps)
        with pytest.raises(CaptureError, match="has changed since this dataset was made"):
            list(pickle.loads(pickled))


def test_arrow_folders(path: Path, tmp_path: Path, small_blocks: None) -> None:
    """Pyarrow and Hugging Face read the rows that were recorded, with their types and where they are from."""
    pa = pytest.importorskip("pyarrow")
    trace = tracer.open(path)
    data = trace.dataset(["activations", "input_labels"], "a", batch_size=7, shuffle=True, drop_last=True)
    folder = data.to_datasets(tmp_path / "rows")
    table = pa.ipc.open_stream(folder / "data-00000-of-00001.arrow").read_all()
    assert table.schema.field("a").type == pa.list_(pa.float32(), WIDTH)
    rows = np.stack(table["a"].to_numpy())
    wanted = truth(path).reshape(STEPS, BATCH, WIDTH)
    assert same_rows(torch.from_numpy(rows), wanted[1::2].reshape(-1, WIDTH))
    assert (wanted[table["global_step"].to_numpy(), table["row"].to_numpy()] == rows).all()
    assert (rows[:, 0] == table["input_labels"].to_numpy()).all()
    with pytest.raises(TraceExistsError, match="give another folder"):
        data.to_datasets(folder)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rows"]

    hugging_face = pytest.importorskip("datasets")
    loaded = hugging_face.load_from_disk(str(folder)).with_format("numpy")
    assert loaded.num_rows == len(rows) == data.datapoints
    assert (loaded[:100]["a"] == rows[:100]).all()


def test_arrow_folders_of_other_types(tmp_path: Path) -> None:
    """bfloat16 becomes float32, matrices become lists of lists; complex numbers are refused, and leave nothing."""
    pa = pytest.importorskip("pyarrow")
    with TraceWriter(tmp_path / "run.zarr") as writer:
        writer.write(ModuleMessage(kind="activations", module="a", data=torch.ones(2, 3, 4).bfloat16(), **where(0)))
        writer.write(ModuleMessage(kind="activations", module="b", data=torch.ones(2, 2).cfloat(), **where(0)))
    trace = tracer.open(tmp_path / "run.zarr")
    folder = trace.dataset("activations", "a").to_datasets(tmp_path / "rows")
    table = pa.ipc.open_stream(folder / "data-00000-of-00001.arrow").read_all()
    assert table["a"].to_pylist() == torch.ones(2, 3, 4).tolist()
    with pytest.raises(CaptureError, match="b is complex"):
        trace.dataset("activations", "b").to_datasets(tmp_path / "complex")
    assert not list(tmp_path.glob("*complex*"))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_is_bounded(tmp_path: Path) -> None:
    """A trace of 256 MB is shuffled in a buffer of 16 MB, and the process never holds more than a part of the trace."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(256):
            writer.write(ModuleMessage(kind="activations", module="a", data=torch.rand(1000, 256), **where(step)))
    program = (
        "import re, torch, tracer\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) >> 10\n"
        f"data = tracer.open({str(path)!r}).dataset('activations', 'a', batch_size=4096, shuffle=16384)\n"
        "next(iter(data)); before = peak()\n"
        "print(sum(len(batch) for batch in data), peak() - before)"
    )
    done = processes.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 256_000
    assert grown < 64


def test_the_example_explains_activations(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``examples/sae.py``: its autoencoder explains most of the variance, by few features."""
    pytest.importorskip("sklearn")
    specification = importlib.util.spec_from_file_location("sae", ROOT / "examples" / "sae.py")
    assert specification is not None
    assert specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", ["sae.py", "--epochs", "3"])
    example.main()
    numbers = [list(map(float, one)) for one in re.findall(r"variance (\S+), L0 (\S+)", capsys.readouterr().out)]
    (explained_before, used_before), (explained_after, used_after) = numbers
    assert explained_before < 0.2 < 0.6 < explained_after
    assert used_after < used_before / 2
