"""The seeded trainings that `same_bytes.py` records with each checkout, by the names of their traces."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMATS = (".zarr", ".h5")


def write_sampled(writer: Any, message: Any, sampling: dict[str, Any]) -> None:
    """Write a message with its sampling, which was no part of it once."""
    if hasattr(message, "sampling"):
        writer.write(dataclasses.replace(message, sampling=sampling))
    else:
        writer.write(message, sampling)


def safe(run: Any) -> None:
    """Let the writer's thread write all that waits, and commit."""
    if run.recorder is not None:
        run.recorder.wait_until_written()
        run.recorder.writer.commit()


def mlp(record: Callable[..., Any]) -> None:
    """Two epochs with evaluations, a probe, values of the loop's own, a tag, commits."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    with record(model, optimizer, loss=criterion, logs=["learning_rate"]) as run:
        run.probe("probe", torch.linspace(-1, 1, 24).reshape(4, 6), torch.arange(4) % 3, every=2)
        for _ in range(2):
            for step in range(3):
                optimizer.zero_grad()
                criterion(model(torch.randn(5 - step, 6)), torch.randint(3, (5 - step,))).backward()
                optimizer.step()
                run.log("learning_rate", 0.01)
                run.log("counts", torch.tensor([step, 1]))
            model.eval()
            with torch.no_grad():
                criterion(model(torch.randn(4, 6)), torch.randint(3, (4,)))
            model.train()
            with run.tag("augmented"), torch.no_grad():
                model(torch.randn(2, 6))
            run.epoch_finished()
            safe(run)


def cnn(record: Callable[..., Any]) -> None:
    """Convolutions, normalisation, pooling; activations large enough for pools of their own."""
    import torch
    from torch import nn

    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, stride=2), nn.Flatten(), nn.Linear(72, 5)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record(model, optimizer, loss=nn.functional.cross_entropy) as run:
        for step in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(32, 1, 16, 16)), torch.randint(5, (32,))).backward()
            optimizer.step()
            if step == 1:
                safe(run)


def transformer(record: Callable[..., Any]) -> None:
    """Embedded tokens, attention, dropout."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(20, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with record(model, optimizer, loss=nn.functional.cross_entropy) as run:
        for _ in range(3):
            tokens = torch.randint(20, (3, 7))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        run.epoch_finished()


def autocast(record: Callable[..., Any]) -> None:
    """In bfloat16, with a scaler of gradients."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with record(model, optimizer, loss=nn.functional.mse_loss):
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(model(torch.randn(4, 6)), torch.zeros(4, 2))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def accumulated(record: Callable[..., Any]) -> None:
    """Gradients of three micro-batches, in double precision."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, loss=nn.functional.mse_loss):
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(3):
                x = torch.randn(4, 6, dtype=torch.float64)
                (nn.functional.mse_loss(model(x), torch.zeros(4, 2, dtype=torch.float64)) / 3).backward()
            optimizer.step()


def checkpointed(record: Callable[..., Any]) -> None:
    """Layers that are computed again in the backward, in both ways."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
            self.drop = nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.first(x))
            h = h + checkpoint(lambda y: self.drop(self.second(y)), h, use_reentrant=False)
            h = h + checkpoint(lambda y: self.drop(self.second(y)), h, use_reentrant=True)
            out: torch.Tensor = self.last(h)
            return out

    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, loss=nn.functional.mse_loss):
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(4, 6)), torch.zeros(4, 2)).backward()
            optimizer.step()


def two_optimizers(record: Callable[..., Any]) -> None:
    """A generator and a critic."""
    import torch
    from torch import nn

    model = nn.ModuleDict(
        {"make": nn.Linear(3, 4), "judge": nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))}
    )
    first = torch.optim.Adam(model["judge"].parameters(), lr=0.01)
    second = torch.optim.SGD(model["make"].parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    with record(model, [first, second], loss=criterion):
        for _ in range(3):
            fake = model["make"](torch.randn(4, 3))
            judge_loss = criterion(model["judge"](torch.randn(4, 4)), torch.ones(4, 1))
            first.zero_grad()
            (judge_loss + criterion(model["judge"](fake.detach()), torch.zeros(4, 1))).backward()
            first.step()
            second.zero_grad()
            make_loss = criterion(model["judge"](fake), torch.ones(4, 1))
            make_loss.backward()
            second.step()


def recurrent(record: Callable[..., Any]) -> None:
    """Several outputs of a layer, one layer used twice, a parameter that is no weight, a layer that is never called."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.shared, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 4), nn.Linear(4, 2)
            self.scale, self.unused = nn.Parameter(torch.ones(4)), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            h, (_, c) = self.rnn(x)
            h = self.shared(torch.tanh(self.shared(h[:, -1]))) * self.scale
            return {"logits": self.head(h), "state": c}

    model = Network()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    with record(model, optimizer, loss=nn.functional.cross_entropy):
        for step in range(3):
            optimizer.zero_grad()
            logits = model(torch.randn(4, 3 + step, 3))["logits"]
            nn.functional.cross_entropy(logits, torch.randint(2, (4,))).backward()
            optimizer.step()


TRAININGS = (mlp, cnn, transformer, autocast, accumulated, checkpointed, two_optimizers, recurrent)


def cases() -> dict[str, Callable[[Path], None]]:
    """Each case by the name of its trace."""
    import tracer

    found: dict[str, Callable[[Path], None]] = {}
    of_steps = [name for name, kind in tracer.KINDS.items() if not getattr(kind, "state", False)]  # old ones have none
    every = tracer.Capture(kinds=of_steps)
    some = (
        tracer.Capture(kinds=["weights", "weight_gradients", "weight_updates"], elements=7, dtype="bfloat16"),
        tracer.Capture(kinds=["activations"], rows=3, positions=4, dtype="float16", seed=3),
        tracer.Capture(kinds=["layer_gradients"], reduce="norm", every=2),
        tracer.Capture(kinds=["loss", "input_labels", "network_output", "biases"], start=1),
    )
    options: dict[str, dict[str, Any]] = {
        "": {"capture": every},
        "-zstd": {"capture": every, "compression": "zstd"},
        "-lz4": {"capture": every, "compression": "lz4"},
    }
    special: dict[str, dict[str, Any]] = {
        "mlp-plain": {"compression": "none"},
        "mlp-mixed": {"capture": every, "compression": {"weights": "lz4", "activations": "zstd", "loss": "none"}},
        "cnn-sampled": {"capture": some},
        "cnn-durable": {"durable": True},
    }
    named = {one.__name__: one for one in TRAININGS}
    for suffix in FORMATS:
        for name, training in named.items():
            for ending, settings in options.items():
                found[f"{name}{ending}{suffix}"] = recorded(training, settings)
        for name, settings in special.items():
            found[f"{name}{suffix}"] = recorded(named[name.partition("-")[0]], settings)
        for name, case in {
            "direct": direct, "small-chunks": small_chunks, "failed": failed, "bounded": bounded, "resumed": resumed,
            "ranks": ranks, "converted": converted, "recovered": recovered,
        }.items():  # fmt: skip
            found[f"{name}{suffix}"] = case
    return found


def recorded(training: Callable[[Callable[..., Any]], None], settings: dict[str, Any]) -> Callable[[Path], None]:
    """A training that `tracer.record` records."""
    import tracer

    def record(path: Path) -> None:
        def begin(*arguments: Any, **more: Any) -> Any:
            recording = tracer.record(
                path, *arguments, commit_seconds=1e6, **{"capture": tracer.Capture(), **more, **settings}
            )
            return Rested(recording)

        training(begin)

    return record


class Rested:
    """A recording whose thread has begun to wait when the training begins."""

    def __init__(self, recording: Any) -> None:
        self.recording = recording

    def __enter__(self) -> Any:
        run = self.recording.__enter__()
        time.sleep(0.05)
        return run

    def __exit__(self, *error: Any) -> None:
        self.recording.__exit__(*error)


def direct(path: Path) -> None:
    """Messages of every dtype and of many names, written one by one, with commits and a large and a ragged stream."""
    writes(path)


def small_chunks(path: Path) -> None:
    """The same in small chunks, compressed."""
    writes(path, chunk_bytes=2048, own_pool_bytes=512, compression="zstd")


def writes(path: Path, **options: Any) -> None:
    """Messages without a training."""
    import torch

    import tracer

    names = (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
        *("float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
    with tracer.TraceWriter(path, header={"argv": ["x"]}, commit_seconds=1e6, **options) as writer:
        for step in range(4):
            at: dict[str, Any] = {"global_step": step, "train_step": step % 2, "epoch": step // 2}
            writer.write(tracer.NetworkMessage(kind="batch_started", **at))
            for name in names:
                bits = torch.arange(64, dtype=torch.uint8)
                data = bits.remainder(2).bool() if name == "bool" else bits.view(getattr(torch, name))
                for leaf, part in (("", data[:4]), ("0", data[0]), ('["a.b"]', data[:0].reshape(2, 0))):
                    writer.write(tracer.ModuleMessage(kind="activations", module=name, leaf=leaf, data=part, **at))
            for module in ("", "../x", "Fc", "fC", "ä", "x" * 300, "__init__"):
                data = torch.full((2,), float(step))
                writer.write(tracer.ModuleMessage(kind="journal", module=module, tag="a/b", data=data, **at))
            large = torch.arange(40000).remainder(97 + step).float()
            writer.write(tracer.ModuleMessage(kind="weights", module="large", data=large.reshape(200, 200), **at))
            ragged = torch.full((3 - step, 9000), step / 8)
            write_sampled(writer, tracer.ModuleMessage(kind="weights", module="ragged", data=ragged, **at), {"rows": 3})
            for call in range(300):
                data = torch.tensor(call / (step + 1))
                writer.write(tracer.NetworkMessage(kind="loss", data=data, call=call, **at))
            writer.note({"remark": step})
            if step < 3:
                writer.commit()


def small() -> tuple[Any, Any]:
    """A model and an optimizer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, count: int) -> None:
    """So many steps."""
    import torch
    from torch import nn

    for _ in range(count):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, 3)), torch.randint(2, (4,))).backward()
        optimizer.step()


def failed(path: Path) -> None:
    """A training that fails in the midst of a step."""
    import tracer

    model, optimizer = small()
    try:
        with Rested(tracer.record(path, model, optimizer, commit_seconds=1e6, capture=tracer.Capture())):
            train(model, optimizer, 2)
            raise ValueError("not finite: ä")
    except ValueError:
        pass


def bounded(path: Path) -> None:
    """A recording that ends at a bound, before the training does."""
    import tracer

    model, optimizer = small()
    capture = tracer.Capture(kinds=["weights", "biases"])
    with Rested(tracer.record(path, model, optimizer, commit_seconds=1e6, stop_at_bytes=600_000, capture=capture)):
        train(model, optimizer, 100)


def resumed(path: Path) -> None:
    """Three attempts."""
    import tracer

    model, optimizer = small()
    for first in (0, 3, 4):
        with Rested(
            tracer.record(
                path, model, optimizer, resume=True, first_step=first, commit_seconds=1e6, capture=tracer.Capture()
            )
        ) as run:
            train(model, optimizer, 4)
            run.epoch_finished()


def ranks(path: Path) -> None:
    """Two ranks, without a process group."""
    import tracer

    for rank in range(2):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "same"}
        model, optimizer = small()
        with Rested(tracer.record(path, model, optimizer, commit_seconds=1e6, capture=tracer.Capture())):
            train(model, optimizer, 3)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]


def converted(path: Path) -> None:
    """A part of a trace of several ranks, from the other format."""
    import tracer

    source = path.parent / f"source{FORMATS[FORMATS.index(path.suffix) - 1]}"
    ranks(source)
    tracer.convert(source, path, kinds=["weights", "activations", "biases"], compression="lz4", chunk_bytes=4096)
    remove(source)


def recovered(path: Path) -> None:
    """A trace of which all could be saved."""
    import tracer

    source = path.parent / f"source{path.suffix}"
    failed(source)
    tracer.recover(source, path)
    remove(source)


def remove(trace: Path) -> None:
    """Files of a trace."""
    for one in trace.parent.glob(f"{trace.stem}*"):
        shutil.rmtree(one) if one.is_dir() else one.unlink()
