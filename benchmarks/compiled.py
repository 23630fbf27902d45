"""What recording costs a training that ``torch.compile`` compiled, as ratios to the same training without.

Three models (an MLP of four layers, a CNN of four convolutions with batch norm and in-place ReLU, a transformer of two
layers), each compiled whole, trained with AdamW. Recorded are activations and their gradients of every leaf: what is
seen inside the graph. What is published is dropped, since writing is the same as for an eager training
(``overhead.py``). "Nothing recorded" has the operators in the graph, and nobody who wants anything of these steps.

The variants take turns in a random order, several rounds in one process, after they were compiled and run; each round
gives ratios of wall time to that round's bare run; what is printed is their median. Weights that differ from the bare
run's are an error. Compiling takes longer than all rounds.

    python benchmarks/compiled.py [--steps 50] [--rounds 7] [--only MLP,CNN,transformer] [--threads 1]
                                  [--backend inductor] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tracer import Capture, Exporter, Receiver

KINDS = ("activations", "layer_gradients")
NEVER = 1 << 40
# bare comes last: models of one class share what is compiled, and what was compiled without hooks calls none
VARIANTS: dict[str, int | None] = {"nothing recorded": NEVER, "1 step in 10": 10, "every step": 1, "bare": None}


class Forgetful(Receiver):
    """A receiver that wants everything and keeps nothing."""

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return True

    def receive(self, message: Any) -> tuple[()]:
        return ()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (128, 256)),
    "CNN": (cnn, (32, 3, 32, 32)),
    "transformer": (transformer, (16, 64, 128)),
}


class Training:
    """A compiled model in training, watched or not."""

    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...], backend: str, every: int | None) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.batches = [torch.randn(*shape) for _ in range(4)]
        self.exporter: Exporter | None = None
        if every is not None:
            exporter = Exporter(capture=Capture(kinds=KINDS, every=every, depth=-1), strict=True)
            exporter.message_bus.register(Forgetful())
            exporter.set_model(self.model)
            exporter.set_optimizer(self.optimizer)
            self.exporter = exporter
        self.run = torch.compile(self.model, backend=backend, fullgraph=True)

    def steps(self, count: int) -> float:
        """Seconds that so many steps take."""
        begin = time.perf_counter()
        for number in range(count):
            self.optimizer.zero_grad()
            self.run(self.batches[number % len(self.batches)]).square().mean().backward()
            self.optimizer.step()
        return time.perf_counter() - begin

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def measure(name: str, options: argparse.Namespace) -> tuple[float, dict[str, list[float]]] | None:
    """Milliseconds of a bare step, and the ratios of each variant; None if one of them changed the training."""
    make, shape = MODELS[name]
    torch._dynamo.reset()
    trainings = {}
    for variant, every in VARIANTS.items():
        trainings[variant] = Training(make, shape, options.backend, every)
        trainings[variant].steps(10)
    bare_ms: list[float] = []
    ratios: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    turns = random.Random(0)
    for _ in range(options.rounds):
        taken = {one: trainings[one].steps(options.steps) for one in turns.sample(list(trainings), len(trainings))}
        bare_ms.append(1e3 * taken["bare"] / options.steps)
        for variant, seconds in taken.items():
            ratios[variant].append(seconds / taken["bare"])
    expected = trainings["bare"].weights()
    for variant, training in trainings.items():
        if not torch.equal(training.weights(), expected):
            print(f"{variant} changed the training of the {name}: the weights differ", file=sys.stderr)
            return None
        if training.exporter is not None:
            training.exporter.detach()
            if any("inside of the model" in problem["what"] for problem in training.exporter.problems):
                print(f"{variant} of the {name} saw nothing: it was compiled too early", file=sys.stderr)
                return None
    return statistics.median(bare_ms), ratios


def main() -> int:
    """Run all models and variants and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"there is no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    torch.set_num_threads(options.threads)
    # that an output which is its own input has no gradient inside a graph is known
    warnings.filterwarnings("ignore", ".*inside torch.compile cannot be watched", RuntimeWarning)
    rows = []
    if not options.json:
        print(
            f"{options.backend}: ratios to a bare step, median (min-max) of {options.rounds} rounds of {options.steps}"
        )
        told = [f"{variant:>22}" for variant in VARIANTS if variant != "bare"]
        print(f"{'model':12} {'bare ms':>8}", *told, flush=True)
    for name in names:
        measured = measure(name, options)
        if measured is None:
            return 1
        bare_ms, ratios = measured
        medians = {variant: statistics.median(each) for variant, each in ratios.items()}
        spans = {variant: (min(each), max(each)) for variant, each in ratios.items()}
        rows.append({"model": name, "bare_ms": bare_ms, "ratios": medians, "spans": spans})
        if not options.json:
            told = [
                f"{medians[variant]:.3f} ({spans[variant][0]:.2f}-{spans[variant][1]:.2f})"
                for variant in VARIANTS
                if variant != "bare"
            ]
            print(f"{name:12} {bare_ms:8.2f}", *(f"{one:>22}" for one in told), flush=True)
    if options.json:
        print(json.dumps({"backend": options.backend, "steps": options.steps, "rounds": options.rounds, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
