"""What the first-order board costs from a trace, against per-sample gradients by torch.func; one core, one run.

For each network and batch: the board from recorded layer inputs and output gradients (`GradientNoise`, float64), and
the same numbers from per-sample gradients of ``torch.func.vmap(grad(...))``, in float64 as ours and in float32 as one
would train. The reference needs the model and the batch; ours has only what a trace holds. Beside them one forward and
backward of the training. Medians of interleaved repetitions; the largest relative difference to the float64 reference;
and the memory that per-sample gradients take.

    python benchmarks/metrics_dynamics.py [--full]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import analyze
import tracer
from tracer import Capture, Message, TraceReader

KINDS = ("layer_inputs", "layer_gradients", "weight_gradients", "bias_gradients", "loss")
SHARED = ("norm_test", "inner_product_test", "orthogonality_test", "noise_scale", "gsnr", "early_stopping", "cabs")


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def convolutional(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, 10),
    )  # fmt: skip


def recorded(model: nn.Module, x: Tensor, y: Tensor) -> list[Message]:
    """The messages of one step, as a trace gives them back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.zarr"
        optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.0), nn.CrossEntropyLoss()
        with tracer.record(path, model, optimizer, loss=loss, capture=Capture(kinds=KINDS), strict=True):
            loss(model(x), y).backward()
            optimizer.step()
        with TraceReader(path) as reader:
            return list(reader.messages(kinds=KINDS))


def from_trace(messages: list[Message]) -> dict[str, float]:
    rule = analyze.GradientNoise()
    for message in messages:
        assert not list(rule.receive(message))
    return {one.kind.removeprefix("layer_gradients_"): float(one.data) for one in rule.finish()}


def from_gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """The board as cockpit defines it, from per-sample gradients that torch.func makes."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, dict(parameters), (x[None],)), y[None])

    g_bp = torch.cat([one.flatten(1) for one in vmap(grad(of_one), (None, 0, 0))(parameters, x, y).values()], dim=1)
    b = len(g_bp)
    g = g_bp.mean(0)
    square = g @ g
    squares, products = g_bp.square().sum(1), g_bp @ g
    apart = squares.sum() - b * square
    second = g_bp.square().mean(0)
    spread = second - g.square()
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    return {
        "norm_test": float((apart / (b * (b - 1)) / square).sqrt()),
        "inner_product_test": float((products.var() / b).sqrt() / square),
        "orthogonality_test": float(((squares - products.square() / square).sum() / (b * (b - 1)) / square).sqrt()),
        "noise_scale": float(apart / (b - 1) / square),
        "gsnr": float((g.square() / (spread + 1e-5)).mean()),
        "early_stopping": float(1 - b * (g.square() / (spread * (b / (b - 1)) + 1e-5)).mean()),
        "cabs": float(apart / b / loss),
    }


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def seconds(thing: Callable[[], object]) -> float:
    start = time.perf_counter()
    thing()
    return time.perf_counter() - start


def cases(full: bool) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    yield "MLP 784-256-256-10, batch 128", mlp(256), (128, 784)
    yield "MLP 784-512-512-10, batch 128", mlp(512), (128, 784)
    yield "conv 3-16-16-32 on 16×16, batch 64", convolutional(16), (64, 3, 16, 16)
    yield "conv 3-32-32-64 on 16×16, batch 64", convolutional(32), (64, 3, 16, 16)
    if full:
        yield "MLP 784-1024-1024-10, batch 256", mlp(1024), (256, 784)
        yield "conv 3-32-32-64 on 32×32, batch 128", convolutional(32), (128, 3, 32, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="bigger networks too")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = (
        f"{'':38s} {'trace':>8s} {'func f64':>9s} {'func f32':>9s} {'step f32':>9s}  {'f64/ours':>8s} {'f32/ours':>8s}"
    )
    print(head + "  difference  per-sample gradients")
    for name, model, shape in cases(options.full):
        x, y = torch.randn(shape), torch.randint(10, shape[:1])
        model64 = type(model)(*model)
        messages = recorded(model, x, y)
        exact = recorded(model64.double(), x.double(), y)
        ours, reference = from_trace(exact), from_gradients(model64, x.double(), y)
        difference = max(abs(ours[what] / reference[what] - 1) for what in SHARED)
        assert ours["coverage"] == 1, ours
        times = []
        double = x.double()
        for _ in range(options.repetitions):  # interleaved, so that a busy moment hits all alike
            round_ = [seconds(partial(from_trace, messages))]
            model64.double()  # one object: cast before each turn, outside of what is timed
            round_.append(seconds(partial(from_gradients, model64, double, y)))
            model64.float()
            times.append([*round_, *(seconds(partial(what, model64, x, y)) for what in (from_gradients, step))])
        trace, func64, func32, plain = (statistics.median(column) for column in zip(*times, strict=True))
        size = sum(p.numel() for p in model.parameters()) * len(x) * 8 / 1e6
        print(
            f"{name:38s}"
            + "".join(f"{one * 1e3:8.1f}ms" for one in (trace, func64, func32, plain))
            + f"{func64 / trace:9.1f}×{func32 / trace:9.1f}×  {difference:10.1e}  {size:6.0f} MB in f64"
        )


if __name__ == "__main__":
    main()
