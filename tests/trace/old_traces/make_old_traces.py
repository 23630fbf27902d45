"""Makes the old traces: small ones of every sort, as one release wrote them, with a digest of what it read in them.

    python make_old_traces.py FOLDER

FOLDER then has ``old_traces.tar.xz`` and, for each trace in it, ``digests/{trace}.jsonl.gz``. The traces in this
repository were made with commit 5b16f7c and are never made again: later code must read these very files, message for
message. ``test_old_traces.py`` does, with `digest` from here. Nothing but public names of `tracer` is used.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tracer

FORMATS = (".zarr", ".h5")
WHEN = 1_735_689_600  # in the archive no file is new: then a trace without a status is one that nobody writes any more
PROCESS = {"pid": 0, "hostname": "sample", "start": None}
HEADER = {"run_id": "sample", "created": "2026-01-01T00:00:00+00:00", "process": PROCESS}

# ---- what is read of a trace --------------------------------------------------------------------------------------


def digest(path: Path) -> Iterator[dict[str, Any]]:
    """What a reader gets of a trace: first what is told of it, then each message, then what else is made of them.

    Left out is what depends on the place (`path`) alone. Where data is damaged, a line says so instead of the rest.
    """
    path = path.absolute()
    with tracer.open(path) as reader:
        info = {key: value for key, value in reader.info.items() if key != "path"}
        info["problems"] = [_without(path, problem) for problem in reader.problems]
        yield _plain({"info": info})
        yield _plain({"streams": [dataclasses.asdict(stream) for stream in reader.streams]})
        yield _plain({"verify": _verified(path)})
        yield from lines(reader.messages())
        yield {"view": "mapped", "sum": _sum(lines(reader.messages()))}  # as earlier versions could read them, too
        yield {"view": "every second step", "sum": _sum(lines(reader.messages(steps=(1, None, 2))))}
        yield {"view": "some", "sum": _sum(lines(reader.messages(kinds="weights", tags="!eval")))}
        yield {"view": "arrays", "sum": _sum(_arrays(reader))}
        yield {"view": "histories", "sum": _sum(_histories(reader))}
        ranks = reader.ranks
    with tracer.open(path, verify=False) as reader:
        yield {"view": "not verified", "sum": _sum(lines(reader.messages()))}
    with tracer.open(path, assemble=False) as reader:
        yield {"view": "not assembled", "sum": _sum(lines(reader.messages()))}
    for rank in ranks:
        with tracer.open(path, ranks=[rank]) as reader:
            yield {"view": f"of rank {rank}", "sum": _sum(lines(reader.messages()))}
        yield {"view": f"replay of rank {rank}", "sum": _sum(_replayed(path, rank))}


def lines(messages: Iterator[tracer.Message]) -> Iterator[dict[str, Any]]:
    """A line for each message that can be read; a last one says why the others cannot."""
    try:
        yield from map(_line, messages)
    except tracer.TraceError as error:
        yield {"error": type(error).__name__}


def _line(message: tracer.Message) -> dict[str, Any]:
    """A message as JSON, its data as a hash of its bytes."""
    data = message.data
    return {
        "class": type(message).__name__,
        "kind": message.kind,
        "module": message.key,
        "tag": message.tag,
        "leaf": message.leaf,
        "global_step": message.global_step,
        "train_step": message.train_step,
        "epoch": message.epoch,
        "call": message.call,
        "rank": message.rank,
        "dtype": None if data is None else str(data.dtype).removeprefix("torch."),
        "shape": None if data is None else list(data.shape),
        "sha256": None if data is None else _hash(_bytes(data)),
    }


def _bytes(data: Tensor) -> bytes:
    return data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""


def _sum(lines: Iterable[Any]) -> list[Any]:
    """How many there are, and one hash of all."""
    count, whole = 0, hashlib.sha256()
    for line in lines:
        whole.update(json.dumps(_plain(line)).encode() + b"\n")
        count += 1
    return [count, whole.hexdigest()[:32]]


def _arrays(reader: tracer.TraceReader) -> list[list[Any]]:
    """The data of each row of the journal that has some, as `TraceReader.arrays` gives it."""
    found: list[list[Any]] = []
    try:
        for batch in reader.arrays():
            for row, data in zip(batch.rows.tolist(), batch.data, strict=True):
                found.append([row, str(batch.data.dtype), list(batch.data.shape[1:]), _hash(data.tobytes())])
    except tracer.TraceError as error:
        return [[type(error).__name__]]
    return sorted(found)


def _histories(reader: tracer.TraceReader) -> Iterator[list[Any]]:
    """The steps and numbers of each stream of weights, as `TraceReader.array` gives them."""
    for stream in reader.streams:
        if stream.kind == "weights" and stream.module is not None and len(reader.ranks) == 1:
            try:
                steps, data = reader.array(stream.kind, stream.module, tag=stream.tag, leaf=stream.leaf)
            except tracer.TracerError as error:
                yield [str(stream), type(error).__name__]
                continue
            parts = data if isinstance(data, list) else [data]
            yield [str(stream), steps.tolist(), *([str(one.dtype), one.shape, _hash(one.tobytes())] for one in parts)]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


class Bundled(tracer.Subscriber):
    """Notes the bundles that it gets, and answers each."""

    def __init__(self, *kinds: str) -> None:
        subscription = tracer.SynchronizedSubscription(kinds, tag=None, incomplete="partial")
        super().__init__(subscription, produces=f"{kinds[0]}_bundled")
        self.heard: list[list[Any]] = []

    def compute(self, message: Any) -> Iterator[tracer.Message]:
        """The number of messages in the bundle."""
        self.heard.append([message.kinds, message.missing, [_line(one) for one in message.messages.values()]])
        yield tracer.derived(message, self.produces[0], float(len(message.messages)))


def _replayed(path: Path, rank: int) -> list[Any]:
    """What a replay publishes, with the answers of subscribers to bundles, and those bundles."""
    bundled = [Bundled("weights", "weight_gradients", "weight_updates"), Bundled("activations", "layer_gradients")]
    heard = tracer.Collect()
    found: list[Any] = []
    try:
        tracer.replay(path, heard, rank=rank)
    except tracer.TraceError as error:
        return [[type(error).__name__]]
    found += map(_line, heard)
    for one in bundled:
        answers = tracer.Collect(*one.produces)
        try:
            tracer.replay(path, one, answers, rank=rank)
        except tracer.CaptureError as error:  # there are no such kinds
            found.append([type(error).__name__])
        found += [*map(_line, answers), *one.heard]
    return found


def _verified(path: Path) -> dict[str, Any]:
    report = tracer.verify(path).describe()
    report["problems"] = [
        {key: _without(path, value) if isinstance(value, str) else value for key, value in problem.items()}
        for problem in report["problems"]
    ]
    if not report["holes"]:
        del report["holes"]  # which the digests of older versions do not know
    return {key: value for key, value in report.items() if key not in ("path", "checks")}


def _without(path: Path, text: str) -> str:
    return text.replace(str(path), path.name).replace(str(path.parent), "…")


def _plain(value: Any) -> Any:
    """As it is when it was written as JSON and read again."""
    return json.loads(json.dumps(value))


# ---- traces that are written message by message --------------------------------------------------------------------


def _at(step: int, epoch: int = 0) -> dict[str, int]:
    return {"global_step": step, "train_step": step - 4 * epoch, "epoch": epoch}


def _module(kind: str, module: str, data: Tensor, step: int = 0, **fields: Any) -> tracer.Message:
    return tracer.ModuleMessage(kind=kind, module=module, data=data, **{**_at(step), **fields})


def _network(kind: str, data: Tensor | None = None, step: int = 0, **fields: Any) -> tracer.Message:
    return tracer.NetworkMessage(kind=kind, data=data, **{**_at(step), **fields})


DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
ODD_NAMES = ("", "../x", "a b%", "__init__", "zarr.json", "Fc", "fC", "ä.ö", "x" * 300, ".hidden.", "journal")


def of_types() -> Iterator[tracer.Message]:
    """Every dtype, in vectors, scalars and nothing at all; what is not finite; odd names, tags, calls and leaves."""
    yield _network("epoch_started")
    yield _network("batch_started")
    for name in DTYPES:
        dtype = getattr(torch, name)
        bits = torch.arange(48, dtype=torch.uint8)
        data = bits.remainder(2).bool() if dtype is torch.bool else bits.view(dtype)
        whole = data[:4].reshape(2, 2) if len(data) >= 4 else data
        for step, part in enumerate((whole, data[0], data[:0].reshape(3, 0), whole)):
            yield _module("activations", f"of.{name}", part.clone(), step)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        yield _module("weights", f"not.finite.{str(dtype)[6:]}", odd.to(dtype))
    for number, name in enumerate(ODD_NAMES):
        yield _module("weights", name, torch.full((2,), float(number)))
        yield _module("journal", name, torch.full((2,), float(number)), tag="Übung/1", leaf='logits.["a.b"]', call=3)
    last = 2**40
    yield _module("weights", "late", torch.ones(2, 1, 1, 3), last, train_step=5, epoch=2**33, call=2**31)
    yield _network("learning_rate", torch.tensor(0.01, dtype=torch.float64), last)
    yield _network("epoch_finished", None, last)


def of_shapes() -> Iterator[tracer.Message]:
    """Large tensors, with pools of their own, small ones, those that change their shape or dtype, and many scalars."""
    for step in range(4):
        rows = (3, 3, 2, 0)[step]
        yield _network("batch_started", None, step)
        yield _module("weights", "large", torch.full((150, 120), float(step)), step)
        yield _module("activations", "large", torch.arange(20000).remainder(7 + step), step, tag="probe", leaf="1.0")
        yield _module("activations", "ragged", torch.full((rows, 2), step / 8), step)
        yield _module("layer_gradients", "large.ragged", torch.full((rows, 9000), step / 8), step)
        yield _module("biases", "other.dtype", torch.ones(3, dtype=(torch.float32, torch.bfloat16)[step % 2]), step)
        for call in range(30):
            yield _network("loss", torch.tensor(1 / (call + 1) + step), step, call=call)
        yield _network("batch_finished", None, step)


def write_sampled(writer: Any, message: tracer.Message, sampling: dict[str, Any] | None) -> None:
    """Write a message with its sampling, which was no part of it once."""
    if hasattr(message, "sampling"):
        writer.write(dataclasses.replace(message, sampling=sampling))
    else:
        writer.write(message, sampling)


def write(path: Path, messages: Iterable[tracer.Message], **options: Any) -> None:
    """A trace of these messages, with a commit for each global step and a note."""
    with tracer.TraceWriter(path, header={**HEADER, "argv": ["old.py"], "extra": [1, None]}, **options) as writer:
        step = 0
        for message in messages:
            if message.global_step != step:
                writer.commit()
                step = message.global_step
            write_sampled(writer, message, {"rows": 2} if message.key == "ragged" else None)
        writer.note({"remark": "ä", "values": [1, 2.5, float("inf")]})


def write_parts(path: Path) -> None:
    """Two ranks, of which the first was restarted twice; the second one's second attempt has nothing."""
    for rank, attempt, steps, first in ((0, 0, 6, 0), (1, 0, 6, 0), (0, 1, 3, 4), (1, 1, 2, 4), (0, 2, 2, 6)):
        part = f"rank{rank}.attempt{attempt}" if attempt else f"rank{rank}"
        created = HEADER | {"created": f"2026-01-01T0{attempt}:00:00+00:00"}
        header = created | {"ranks": [0, 1], "attempt": attempt, "first_step": first}
        with tracer.TraceWriter(path, header=header, part=part) as writer:
            for step in range(first, first + steps):
                value = torch.tensor([step, rank, attempt])
                writer.write(_network("loss", value, step, rank=rank))
                writer.write(_module("weights", "fc", value.expand(6000, 3).contiguous(), step, rank=rank))
            writer.write(_network("loss", value, step + 1, rank=rank, tag="eval"))


# ---- traces of trainings -------------------------------------------------------------------------------------------


class Network(nn.Module):
    """A large table that never changes, a layer that is used twice, two outputs, a parameter with a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2100)
        nn.init.constant_(self.table.weight, 0.5)
        self.table.weight.requires_grad_(False)
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.rnn = nn.LSTM(4, 3, batch_first=True)
        self.shared = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.25)
        self.scale = nn.Parameter(torch.ones(3))
        self.late = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (n, 2)."""
        self.calls += 1
        x = x + self.table(torch.zeros((), dtype=torch.int64)).mean()
        h, _ = self.rnn(self.conv(x.transpose(1, 2)[:, :2]).transpose(1, 2).repeat(1, 1, 2)[..., :4])
        h = self.drop(self.shared(torch.tanh(self.shared(h[:, -1]))) * self.scale)
        if self.calls > 2:
            h = h + self.late(h)
        logits: Tensor = self.head(h)
        return logits


def seeded(width: int = 3) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A small model and an optimizer that counts its steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, width: int = 3) -> None:
    """Train so many steps."""
    for _ in range(count):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, width)), torch.randint(2, (4,))).backward()
        optimizer.step()


def whole_run(path: Path, **options: Any) -> None:
    """Two epochs of every kind: accumulated gradients, an evaluation, a probe, values of the loop's own."""
    torch.manual_seed(0)
    model, criterion = Network(), nn.CrossEntropyLoss()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    every_kind = tracer.Capture(kinds=[*tracer.KINDS])
    with tracer.record(
        path, model, optimizer, loss=criterion, capture=every_kind, logs=["learning_rate"], commit_steps=1, **options
    ) as run:
        run.probe("probe", torch.linspace(-1, 1, 24).reshape(2, 3, 4), torch.arange(2), every=2)
        for epoch in range(2):
            for step in range(2):
                optimizer.zero_grad()
                for _ in range(1 + step):
                    criterion(model(torch.randn(3, 3, 4)), torch.randint(2, (3,))).backward()
                optimizer.step()
                run.log("learning_rate", 0.1 / (epoch + 1))
                run.log("counts", torch.tensor([epoch, step]))
            model.eval()
            with torch.no_grad():
                criterion(model(torch.randn(3, 3, 4)), torch.randint(2, (3,)))
            model.train()
            with run.tag("augmented"), torch.no_grad():
                model(torch.randn(1, 3, 4))
            run.epoch_finished()


def sampled_run(path: Path) -> None:
    """Rows, positions, elements, other precisions and statistics of what is observed, of some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = (
        tracer.Capture(kinds=["weights", "weight_gradients", "weight_updates"], elements=5, dtype="bfloat16"),
        tracer.Capture(kinds=["activations"], modules=["0"], rows=2, positions=3, dtype="float16", seed=7),
        tracer.Capture(kinds=["activations", "layer_gradients"], reduce="norm", every=2),
        tracer.Capture(kinds=["biases"], reduce=torch.maximum),
        tracer.Capture(kinds=["input_data", "network_output", "input_labels", "loss"], rows=1, start=1, stop=4),
    )
    criterion = nn.CrossEntropyLoss()
    with tracer.record(path, model, optimizer, loss=criterion, capture=capture, commit_steps=2, durable=True) as run:
        for _ in range(5):
            optimizer.zero_grad()
            criterion(model(torch.randn(4, 1, 6, 6, dtype=torch.float64)), torch.randint(3, (4,))).backward()
            optimizer.step()
        run.epoch_finished()


def compressed_run(path: Path, choice: Any) -> None:
    """With this choice of compression; large tensors and small ones, integers and floats, some commits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(600, 40), nn.Flatten(), nn.Linear(320, 2))
    nn.init.constant_(model[0].weight, 0.25)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    capture = tracer.Capture(kinds=["weights", "weight_updates", "biases", "input_data", "loss", "input_labels"])
    criterion = nn.CrossEntropyLoss()
    with tracer.record(path, model, optimizer, loss=criterion, capture=capture, compression=choice) as run:
        for step in range(4):
            optimizer.zero_grad()
            tokens = torch.arange(1024 * 8).remainder(90 + step).reshape(-1, 8)
            criterion(model(tokens), torch.arange(1024) % 2).backward()
            optimizer.step()
            if step < 2 and run.recorder is not None and run.recorder.writer is not None:
                run.recorder.wait_until_written()
                run.recorder.writer.commit()


def resumed_run(path: Path) -> None:
    """Interrupted after six steps, gone on from the fourth, failed after two, gone on from there; two epochs."""
    model, optimizer = seeded()
    kept: dict[str, Any] = {}
    for last, count in ((False, 6), (False, 2), (True, 3)):
        try:
            with tracer.record(
                path, model, optimizer, resume=True, loss=nn.functional.cross_entropy, capture=tracer.Capture()
            ) as run:
                for step in range(count):
                    steps(model, optimizer, 1)
                    if step == 3:
                        run.epoch_finished()
                        kept = _copy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
                if not last:
                    raise RuntimeError("the node has failed")
        except RuntimeError:
            if count == 6:
                model.load_state_dict(kept["model"])
                optimizer.load_state_dict(kept["optimizer"])


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def ranks_run(path: Path, *, resume: bool = False) -> None:
    """Processes of one run, one after the other, without a process group; with `resume`, each was restarted."""
    size = 2 if resume else 3
    for attempt in range(1 + resume):
        runs = []
        for rank in range(size):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(29500 + attempt)}
            model, optimizer = seeded()
            options: dict[str, Any] = {"resume": True, "first_step": 2 * attempt} if resume else {}
            options |= {"loss": nn.functional.cross_entropy, "capture": tracer.Capture()}
            recording = tracer.record(path, model, optimizer, **options)
            runs.append((recording, recording.__enter__(), model, optimizer))
        for rank, (recording, run, model, optimizer) in enumerate(runs):
            torch.manual_seed(rank)
            steps(model, optimizer, 3)
            run.epoch_finished()
            recording.__exit__(None, None, None)
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            del os.environ[name]


def failed_run(path: Path) -> None:
    """A training that raises an exception in the midst of a step."""
    model, optimizer = seeded()
    try:
        with tracer.record(path, model, optimizer, capture=tracer.Capture()):
            steps(model, optimizer, 2)
            model(torch.randn(4, 3))
            raise ValueError("loss is not finite: ä")
    except ValueError:
        pass


def bounded_run(path: Path) -> None:
    """A recording that ends at a bound."""
    model, optimizer = seeded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        capture = tracer.Capture(kinds=["weights", "biases"])
        with tracer.record(path, model, optimizer, stop_at_bytes=600_000, capture=capture):
            steps(model, optimizer, 400)


def dropping_run(path: Path) -> None:
    """A queue that is full, and messages that are dropped; a hook that fails, and a layer that is never called."""
    model, optimizer = seeded(900)
    model.append(nn.Identity())
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    capture = tracer.Capture(kinds=["weights", "activations"], reduce=_fails_once())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tracer.record(path, model, optimizer, capture=capture, on_full="drop", queue_bytes=600):
            steps(model, optimizer, 3, 900)


def _fails_once() -> Callable[[Tensor], Tensor]:
    def mean(data: Tensor) -> Tensor:
        if data.shape == (4, 2):
            raise ValueError("not this one")
        return data.mean()

    return mean


def killed_run(path: Path, committed: int) -> None:
    """A training that is killed when so many steps are committed, in the midst of another."""
    model, optimizer = seeded()
    with tracer.record(
        path, model, optimizer, loss=nn.functional.cross_entropy, commit_seconds=1e6, capture=tracer.Capture()
    ) as run:
        recorder = run.recorder
        assert recorder is not None
        assert recorder.writer is not None
        for _ in range(committed):
            steps(model, optimizer, 1)
            recorder.wait_until_written()
            recorder.writer.commit()
        model(torch.randn(4, 3))
        recorder.wait_until_written()
        os.kill(os.getpid(), signal.SIGKILL)


def distributed_run(folder: Path) -> None:
    """What each of two processes under torchrun does: DistributedDataParallel, FSDP, HSDP and tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def fsdp(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for child in model.children():
            if isinstance(child, nn.Linear):
                fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def tensor_parallel(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    wraps: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = {
        "ddp": (nn.parallel.DistributedDataParallel, {}),
        "ddp-every": (nn.parallel.DistributedDataParallel, {"replicated": "every"}),
        "fsdp": (lambda model: fsdp(model, (2,)), {}),
        "hsdp": (lambda model: fsdp(model, (2, 1)), {}),
        "tensor-parallel": (tensor_parallel, {}),
    }
    torch.distributed.init_process_group("gloo")
    for name, (wrap, options) in wraps.items():
        for suffix in FORMATS:
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
            model = wrap(plain)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(0 if name == "tensor-parallel" else torch.distributed.get_rank())
            path = folder / f"{name}{suffix}"
            options |= {"loss": nn.functional.cross_entropy, "capture": tracer.Capture()}
            with tracer.record(path, model, optimizer, **options) as run:
                steps(model, optimizer, 2)
                run.epoch_finished()
            torch.distributed.barrier()
    torch.distributed.destroy_process_group()


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randint(2, (12,)))
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in torch.utils.data.DataLoader(data, batch_size=4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def scripted_run(path: Path) -> None:
    """A script that ``trace record`` ran, after it had certified that recording changes nothing."""
    script = path.parent / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "cli", "record", "--certify", "2", "--out", str(path), "train.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(tracer.__file__).parent.parent)}
    subprocess.run(command, check=True, cwd=path.parent, env=environment, capture_output=True)
    script.unlink()


def answers(source: Path, path: Path) -> None:
    """The answers of a subscriber, as a trace."""
    subscriber = Bundled("weights", "weight_updates")
    heard = tracer.Collect(*subscriber.produces)
    tracer.replay(source, subscriber, heard)
    write(path, heard)


def make(folder: Path) -> None:
    """Every trace, in both formats."""
    itself = [sys.executable, __file__]
    for suffix in FORMATS:
        write(folder / f"types{suffix}", of_types())
        write(folder / f"shapes{suffix}", of_shapes())
        write(folder / f"small-chunks{suffix}", of_shapes(), chunk_bytes=2048, own_pool_bytes=512, compression="zstd")
        write_parts(folder / f"parts{suffix}")
        whole_run(folder / f"run{suffix}")
        with tracer.open(folder / f"run{suffix}") as reader:
            recorded = {stream.kind for stream in reader.streams}
            assert recorded >= {name for name, kind in tracer.KINDS.items() if not kind.state}
        sampled_run(folder / f"sampled{suffix}")
        compressed_run(folder / f"lz4{suffix}", "lz4")
        compressed_run(folder / f"zstd{suffix}", "zstd")
        compressed_run(folder / f"mixed{suffix}", {"weights": "zstd", "input_data": "lz4", "weight_updates": "none"})
        resumed_run(folder / f"resumed{suffix}")
        ranks_run(folder / f"ranks{suffix}")
        ranks_run(folder / f"ranks-resumed{suffix}", resume=True)
        failed_run(folder / f"failed{suffix}")
        bounded_run(folder / f"bounded{suffix}")
        dropping_run(folder / f"dropping{suffix}")
        scripted_run(folder / f"scripted{suffix}")
        for name, committed in (("killed", 3), ("killed-early", 0)):
            command = [*itself, "--killed", str(folder / f"{name}{suffix}"), str(committed)]
            assert subprocess.run(command).returncode == -signal.SIGKILL
        tracer.convert(folder / f"parts{suffix}", folder / f"converted{suffix}", compression="lz4", steps=(1, None))
        tracer.recover(folder / f"killed{suffix}", folder / f"recovered{suffix}")
        answers(folder / f"run{suffix}", folder / f"answers{suffix}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, __file__, "--distributed", str(folder)], check=True)
    # of three ranks one is gone
    shutil.copytree(folder / "ranks.zarr", folder / "rank-missing.zarr")
    shutil.rmtree(folder / "rank-missing.zarr" / "rank1")
    for name in ("ranks.h5", "ranks.rank2.h5"):
        shutil.copy(folder / name, folder / name.replace("ranks", "rank-missing"))
    # and of this one a chunk is damaged
    shutil.copytree(folder / "run.zarr", folder / "damaged.zarr")
    chunk = folder / "damaged.zarr" / "rank0" / "pools" / "biases" / "float32" / "c" / "0"
    data = bytearray(chunk.read_bytes())
    with tracer.open(folder / "run.zarr") as reader:
        value = next(message.data for message in reader.messages("biases") if message.data is not None)
    data[data.rindex(_bytes(value))] ^= 1
    chunk.write_bytes(data)


# ---- the archive ---------------------------------------------------------------------------------------------------


def traces_in(folder: Path) -> list[Path]:
    """The traces of a folder; further parts of HDF5 traces are none by themselves."""
    found = [path for path in folder.iterdir() if path.suffix in FORMATS and not path.name.startswith(".")]
    return sorted(path for path in found if ".rank" not in path.name)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the traces; their files are as old as the archive says."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


def pack(folder: Path, archive: Path) -> None:
    """All files of a folder, in one order, as of one time."""

    def plainly(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = WHEN
        return member

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name, filter=plainly)


def read_digest(path: Path) -> list[dict[str, Any]]:
    """What `write_digest` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_digest(trace: Path, path: Path) -> None:
    """What this release reads in a trace."""
    text = "".join(json.dumps(line) + "\n" for line in digest(trace))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def main(arguments: list[str]) -> None:
    """Make all traces, or be one of the processes of which some are."""
    platform.node = lambda: "sample"
    torch.set_num_threads(1)
    sys.argv = ["make_old_traces.py"]
    if arguments[0] == "--killed":
        killed_run(Path(arguments[1]), int(arguments[2]))
    elif arguments[0] == "--distributed":
        distributed_run(Path(arguments[1]))
    else:
        target = Path(arguments[0])
        made, unpacked = target / "made", target / "unpacked"
        made.mkdir(parents=True)
        make(made)
        pack(made, target / "old_traces.tar.xz")
        # what is read is what others will unpack, not what this machine just wrote
        unpack(target / "old_traces.tar.xz", unpacked)
        (target / "digests").mkdir()
        for trace in traces_in(unpacked):
            write_digest(trace, target / "digests" / f"{trace.name}.jsonl.gz")
        shutil.rmtree(made)
        shutil.rmtree(unpacked)


if __name__ == "__main__":
    main(sys.argv[1:])
