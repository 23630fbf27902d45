"""What compressing each kind of message gains and costs: the figures behind the defaults of `tracer.trace.compression`.

A small convolutional network is trained on scikit-learn's handwritten digits, and recorded in full. The messages of
each kind are then written again with each codec, by `TraceWriter.write_many` as the recorder's thread does it, and read
back as arrays. Beside the data as it was observed stand two that such a network lacks: activations as bfloat16, and
token numbers as language has them (few are frequent, made up).

For each kind and codec:

- ratio: bytes of data for each byte of the trace;
- encode, decode: MB of data per CPU second of the codec alone, on the chunks that the store makes;
- write, read: CPU seconds of writing and reading the trace, as a multiple of those without compression.

The codecs take turns, several rounds in one process; what is printed is the median of the rounds, and multiples are
formed within a round. Times are CPU time of the process, system time included; reads come from the page cache.

    python benchmarks/compression.py [--rounds 3] [--megabytes 64] [--format .zarr] [--folder /tmp] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tracer
from tracer.format import encodings
from tracer.messaging.messages import Message, ModuleMessage
from tracer.stores.chunks import RowChunks
from tracer.stores.codecs import CODECS, Codec, decode, encode
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

STEPS = 60
BATCH = 1000
OWN_POOL_BYTES = CHUNK_BYTES = 65536


def record(folder: Path) -> Path:
    """A trace of some steps in the midst of a training."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10)),
    )
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters())
    capture = tracer.Capture(
        kinds=[
            *("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates", "biases"),
            *("input_data", "input_labels", "network_output"),
        ],
        start=100,
    )
    path = folder / "run.zarr"
    with tracer.record(path, model, optimizer, loss=loss, capture=capture, compression="none"):
        for _ in range(100 + STEPS):
            chosen = torch.randint(len(images), (128,))
            optimizer.zero_grad()
            loss(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return path


def kinds_of(path: Path) -> dict[str, list[Message]]:
    """The messages of a trace, by what they are."""
    found: dict[str, list[Message]] = {}
    with TraceReader(path) as reader:
        for message in reader:
            name = message.kind
            if message.kind == "activations":
                name += ", after ReLU" if message.key in ("1", "3", "7") else ", others"
            found.setdefault(name, []).append(replace(message, data=message.data.clone()))
    relu = found["activations, after ReLU"]
    found["the same as bfloat16"] = [replace(message, data=message.data.bfloat16()) for message in relu]
    tokens = (torch.distributions.Exponential(1.0).sample((STEPS, 8, 1024)).mul(1.6).exp() % 50257).long()
    found["token numbers (made up)"] = [
        ModuleMessage(kind="input_data", module="m", data=one, global_step=step, train_step=step, epoch=0)
        for step, one in enumerate(tokens)
    ]
    return found


def repeated(messages: list[Message], nbytes: int) -> list[Message]:
    """So many bytes of messages, again and again: far more apart than a codec looks back."""
    found, size = [], 0
    for message in itertools.cycle(messages):
        assert message.data is not None
        found.append(message)
        size += message.data.nbytes
        if size >= nbytes:
            return found
    return found


def clocked(action: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    result = action()
    return time.process_time() - begin, result


def chunks_of(messages: list[Message]) -> list[tuple[NDArray[np.uint8], int]]:
    """The chunks that a store makes of messages, and the size of their items."""
    cut: dict[tuple[Any, ...], RowChunks] = {}
    found: list[tuple[NDArray[np.uint8], int]] = []
    for message in messages:
        assert isinstance(message.data, Tensor)
        rows = encodings.encode(message.data)[None]
        own = rows.nbytes >= OWN_POOL_BYTES
        shape = rows.shape[1:] if own else ()
        key = (message.key, shape) if own else (rows.dtype,)
        if key not in cut:
            cut[key] = RowChunks("", rows.dtype.name, shape, 1 if own else CHUNK_BYTES)
        item = rows.dtype.itemsize
        cut[key].append(
            rows if own else rows.reshape(-1),
            lambda _, pieces, item=item: found.extend(  # type: ignore[misc]
                (np.frombuffer(bytes(data), np.uint8), item) for data in pieces
            ),
        )
    return found


def codec_alone(codec: Codec, chunks: list[tuple[NDArray[np.uint8], int]]) -> dict[str, float]:
    total = sum(len(chunk) for chunk, _ in chunks) / 1e6
    if not chunks:
        return {"encode": float("nan"), "decode": float("nan")}
    encoding, encoded = clocked(lambda: [encode(codec, chunk.data, item) for chunk, item in chunks])
    buffers = [np.frombuffer(one, np.uint8) for one in encoded]
    outs = {len(chunk): np.empty(len(chunk), np.uint8) for chunk, _ in chunks}

    def decode_all() -> None:
        for buffer, (chunk, item) in zip(buffers, chunks, strict=True):
            assert decode(codec, buffer, outs[len(chunk)], item)

    decoding, _ = clocked(decode_all)
    return {"encode": total / encoding, "decode": total / decoding}


def whole_trace(path: Path, messages: list[Message], compression: str) -> dict[str, float]:
    def write() -> None:
        with TraceWriter(path, compression=compression) as writer:
            for begin in range(0, len(messages), BATCH):
                writer.write_many(messages[begin : begin + BATCH])

    def read() -> None:
        with TraceReader(path) as reader:
            for batch in reader.arrays():
                del batch

    if path.exists():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    writing, _ = clocked(write)
    reading, _ = clocked(read)
    with TraceReader(path) as reader:
        info = reader.info
    return {"write": writing, "read": reading, "ratio": info["bytes"] / info["stored_bytes"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=64, help="of each kind")
    parser.add_argument("--format", default=".zarr", choices=[".zarr", ".h5"])
    parser.add_argument("--folder", help="where the traces are written; by default where temporary files are")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    encode(CODECS["lz4"], memoryview(bytes(8)), 8)  # so that no round imports Blosc
    result: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        for kind, some in kinds_of(record(folder)).items():
            messages = repeated(some, int(arguments.megabytes * 1e6))
            chunks = chunks_of(messages)
            rounds: list[dict[str, dict[str, float]]] = []
            for _ in range(arguments.rounds):
                plain = whole_trace(folder / f"copy{arguments.format}", messages, "none")
                found = {"none": {**plain, "write": 1.0, "read": 1.0}}
                for name, codec in CODECS.items():
                    told = whole_trace(folder / f"copy{arguments.format}", messages, name)
                    multiples = {what: told[what] / plain[what] for what in ("write", "read")}
                    found[name] = {"ratio": told["ratio"], **codec_alone(codec, chunks), **multiples}
                rounds.append(found)
            result[kind] = {
                codec: {what: statistics.median(one[codec][what] for one in rounds) for what in rounds[0][codec]}
                for codec in rounds[0]
            }
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"| {'kind':24} | codec | ratio | encode MB/s | decode MB/s | write | read |")
    print("|---|---|---|---|---|---|---|")
    for kind, codecs in result.items():
        for codec, found in codecs.items():
            speeds = [f"{found[what]:.0f}" if what in found else "" for what in ("encode", "decode")]
            multiples = f"{found['write']:.2f} | {found['read']:.2f}"
            print(f"| {kind:24} | {codec:5} | {found['ratio']:5.2f} | {' | '.join(speeds)} | {multiples} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
