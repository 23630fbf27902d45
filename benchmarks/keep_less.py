"""What the profile `standard` keeps of a training, beside a recording of everything; and what steps run again cost.

Eight programs: the CNN of `overhead.py` (images of 32x32 in batches of 64), a perceptron on vectors, a transformer
with dropout, AdamW and tokens, and others. Inputs are noise, so nothing of them can be compressed. Of each, the bytes
a step by what they are of, before compression; the same of the profile `full`; and the CPU time of steps run again,
ten or more as the last keyframe has it, with everything recorded and compared, over that of as many bare steps.

    python benchmarks/keep_less.py [--steps 150] [--only cnn] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from overhead import Net
from torch import Tensor, nn

import tracer
from tracer.observing.capture import observed

PARTS = {
    "input_data": "inputs and labels",
    "input_labels": "inputs and labels",
    "sample_ids": "sample ids",
    "generators": "generators, hyperparameters",
    "hyperparameters": "generators, hyperparameters",
    "weights": "keyframes",
    "biases": "keyframes",
    "buffers": "keyframes",
    "optimizer_state": "keyframes",
}
Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[], tuple[Tensor, Tensor]]]


class Transformer(nn.Module):
    """Tokens to the tokens that come next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens))).flatten(0, 1)


def cnn() -> Made:
    """The CNN of the comparison."""
    model = Net()
    return model, torch.optim.Adam(model.parameters()), lambda: (torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))


def perceptron() -> Made:
    """Layers that are wide for their batches."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return model, optimizer, lambda: (torch.randn(64, 256), torch.randint(10, (64,)))


def transformer() -> Made:
    """Small, with dropout."""
    model = Transformer()

    def batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(512, (16, 65))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

    return model, torch.optim.AdamW(model.parameters()), batch


class Recurrent(nn.Module):
    """Two layers of an LSTM, and a head on the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(64, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


def lstm() -> Made:
    """Sequences of vectors."""
    model = Recurrent()
    return model, torch.optim.Adam(model.parameters()), lambda: (torch.randn(32, 40, 64), torch.randint(10, (32,)))


def bag() -> Made:
    """A large table of embeddings."""
    model = nn.Sequential(nn.EmbeddingBag(20_000, 128), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, lambda: (torch.randint(20_000, (64, 50)), torch.randint(10, (64,)))


def bottleneck() -> Made:
    """Wide inputs and narrow layers."""
    sizes = (784, 512, 64, 512)
    layers = [one for pair in itertools.pairwise(sizes) for one in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    return model, torch.optim.Adam(model.parameters()), lambda: (torch.randn(128, 784), torch.randint(10, (128,)))


def signal() -> Made:
    """Convolutions along a signal."""
    layers = [nn.Conv1d(8, 64, 5), nn.ReLU(), nn.Conv1d(64, 128, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    return model, torch.optim.Adam(model.parameters()), lambda: (torch.randn(32, 8, 256), torch.randint(10, (32,)))


def channels() -> Made:
    """Convolutions of many channels, with batch norm."""
    layers = [
        one for width in (3, 128) for one in (nn.Conv2d(width, 128, 3, padding=1), nn.BatchNorm2d(128), nn.GELU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return model, torch.optim.Adam(model.parameters()), lambda: (torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))


PROGRAMS = {one.__name__: one for one in (cnn, perceptron, transformer, lstm, bag, bottleneck, signal, channels)}


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """One step of a training."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def parts_of(path: Path, steps: int) -> dict[str, float]:
    """The bytes a step of a trace, by what they are of."""
    found: Counter[str] = Counter()
    with tracer.open(path) as reader:
        for stream in reader.streams:
            kind = observed(stream.kind)
            beside = stream.kind.removeprefix(kind).lstrip("_")
            part = "probes" if stream.tag != "default" else beside or PARTS.get(kind, "everything else")
            found[part] += stream.bytes
        found["rows of the journal"] = len(reader) * 96
    return {name: size / steps for name, size in found.items()}


def measured(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """What is told of one program."""
    torch.manual_seed(0)
    model, optimizer, batch = PROGRAMS[name]()
    loss = nn.functional.cross_entropy
    with tracer.record(folder / f"{name}.zarr", model, optimizer, loss=loss, capture="standard") as run:
        for _ in range(steps):
            x, y = batch()
            run.samples(range(len(x)))
            step(model, optimizer, x, y)
    few = 5
    with tracer.record(folder / f"{name}-full.zarr", model, optimizer, loss=loss, capture="full"):
        for _ in range(few):
            step(model, optimizer, *batch())
    full = {**parts_of(folder / f"{name}-full.zarr", few)}
    standard = parts_of(folder / f"{name}.zarr", steps)
    first = (steps - 1) // 50 * 50
    stop = min(first + 10, steps)
    batches = [batch() for _ in range(20)]
    bare = cpu(lambda: [step(model, optimizer, *one) for one in batches]) / len(batches)
    again = PROGRAMS[name]()
    verdicts: list[Any] = []

    def run_again() -> None:
        out = folder / f"{name}-again.zarr"
        verdicts.append(
            tracer.reenact(folder / f"{name}.zarr", *again[:2], step, steps=(first, stop), out=out, loss=loss)
        )

    seconds = cpu(run_again)
    return {
        "program": name,
        "standard": standard,
        "full": sum(full.values()),
        "share": sum(standard.values()) / sum(full.values()),
        "again": seconds / bare / (stop - verdicts[0].keyframe),
        "identical": verdicts[0].identical,
        "compared": verdicts[0].compared,
    }


def cpu(work: Callable[[], object]) -> float:
    """Seconds of the processor that work takes, in all threads."""
    before = time.process_time()
    work()
    return time.process_time() - before


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="keep-less-") as folder:
        told = list(_told(asked, Path(folder)))
    if asked.json:
        print(json.dumps(told))


def _told(asked: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    for name in [asked.only] if asked.only else PROGRAMS:
        found = measured(name, asked.steps, folder)
        if not asked.json:
            kept = sum(found["standard"].values())
            print(f"{name}: {kept:,.0f} bytes a step, {found['share']:.4f} of {found['full']:,.0f}")
            for part, size in sorted(found["standard"].items(), key=lambda one: -one[1]):
                print(f"  {part:<28} {size:>12,.0f}")
            same = "all equal" if found["identical"] else "NOT EQUAL"
            cost = f"steps run again: {found['again']:.2f} of the CPU of bare ones"
            print(f"  {cost}; {found['compared']} values compared, {same}")
        yield found


if __name__ == "__main__":
    main()
