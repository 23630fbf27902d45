"""Makes the sample traces of the current format version, each as ``.zarr`` and ``.h5`` with its meaning in JSON.

    python sample_traces/make.py

The samples of a released version are never made again: a later release must read these very files. So this refuses to
overwrite; a new version of the format gets a folder of its own. ``tests/trace/test_sample_traces.py`` reads them all.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tracer
from tracer.format.names import VERSION
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage

HEADER = {
    "run_id": "sample",
    "created": "2026-01-01T00:00:00+00:00",
    "process": {"pid": 0, "hostname": "sample", "start": None},
    "argv": ["sample_traces/make.py"],
    "seeds": {"torch": 0},
    "versions": {"torch": "2.13.0"},
}
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def of_every_type() -> Iterator[Message]:
    """Every dtype, scalars, empty and ragged tensors, non-finite numbers, events, tags, calls, leaves, odd names."""
    at = {"global_step": 0, "train_step": 0, "epoch": 0}
    yield NetworkMessage(kind="epoch_started", **at)
    yield NetworkMessage(kind="batch_started", **at)
    for dtype in DTYPES:
        data = torch.arange(6).reshape(2, 3).to(dtype)
        yield ModuleMessage(kind="activations", module=f"of.{str(dtype).removeprefix('torch.')}", data=data, **at)
    for step in range(4):  # a smaller last batch, and then no datapoint at all
        rows = (3, 3, 2, 0)[step]
        here = {"global_step": step, "train_step": step % 2, "epoch": step // 2}
        yield NetworkMessage(kind="loss", data=torch.tensor(1 / (step + 1), dtype=torch.float64), **here)
        yield NetworkMessage(kind="input_labels", data=torch.arange(rows), **here)
        yield ModuleMessage(kind="activations", module="ragged", data=torch.full((rows, 2), step / 8), **here)
        yield ModuleMessage(kind="weights", module="fixed", data=torch.full((40, 5), step / 4), **here)
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    yield ModuleMessage(kind="weights", module="not.finite", data=odd, **at)
    yield ModuleMessage(kind="activations", module="", data=torch.tensor([1.5]), tag="probe", call=2, leaf="1.0", **at)
    yield ModuleMessage(kind="activations", module="a/b%c", data=torch.tensor([2.5]), tag="probe", **at)
    yield NetworkMessage(kind="learning_rate", data=torch.tensor(0.01, dtype=torch.float64), **at)
    yield NetworkMessage(kind="batch_finished", **at)


def of_a_run() -> Iterator[Message]:
    """Two epochs of two batches of a real training, everything observed, with a probe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    heard = tracer.Collect()
    exporter = tracer.Exporter()
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    exporter.set_loss(criterion)
    exporter.probe("probe", torch.linspace(-1, 1, 24).reshape(8, 3), torch.arange(8) % 2, every=2)
    for _ in range(2):
        for _ in range(2):
            optimizer.zero_grad()
            criterion(model(torch.randn(6, 3)), torch.randint(2, (6,))).backward()
            optimizer.step()
        exporter.epoch_finished()
    exporter.finish()
    exporter.detach()
    yield from heard


def meaning(message: Message) -> dict[str, Any]:
    """A message as JSON; numbers that JSON lacks are strings, complex numbers are pairs."""
    data = message.data
    return {
        "class": type(message).__name__,
        "kind": message.kind,
        "module": message.key,
        "global_step": message.global_step,
        "train_step": message.train_step,
        "epoch": message.epoch,
        "tag": message.tag,
        "call": message.call,
        "leaf": message.leaf,
        "dtype": None if data is None else str(data.dtype).removeprefix("torch."),
        "shape": None if data is None else list(data.shape),
        "values": None if data is None else [_plain(value) for value in data.flatten().tolist()],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, complex):
        return [value.real, value.imag]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def main() -> int:
    """Write the samples of this version, unless they are there."""
    folder = Path(__file__).parent / f"v{VERSION}"
    if folder.exists():
        print(f"{folder} is there already, and samples are never made again", file=sys.stderr)
        return 1
    folder.mkdir()
    for name, make in (("types", of_every_type), ("run", of_a_run)):
        messages = list(make())
        for suffix in (".zarr", ".h5"):
            path = folder / f"{name}{suffix}"
            with tracer.TraceWriter(path, header=HEADER, chunk_bytes=1024, own_pool_bytes=512) as writer:
                for message in messages:
                    writer.write(message)
        lines = ",\n".join(json.dumps(meaning(message)) for message in messages)
        (folder / f"{name}.json").write_text(f"[\n{lines}\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
