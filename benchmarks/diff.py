"""Whether `analyze.diff` tells a fault from rounding: runs that differ by rounding alone, and runs with a small fault.

Twenty seeded trainings (an MLP, a CNN with Adam and with momentum, a transformer, an LSTM; four seeds each) are
recorded as A: one thread, a for-loop optimizer. Each is repeated with two threads, with a fused optimizer, and with the
instructions of an older processor (`ATEN_CPU_CAPABILITY=default`, `MKL_CBWR=COMPATIBLE`), alone and together: these
differ from A by rounding alone. And each is repeated with a fault: from a random step on, the gradient of one weight,
taken at random, has an error of 1e-4 of its norm in a random direction.

B with other threads is judged by three noise runs without threads, B with a fused optimizer by three that are not
fused, so that no noise run has B's own rounding. Printed for each: whether B is within the estimated tolerance, and
whether B with the fault parts at the fault's step or within five steps.

With `--noise 0` they are judged by repeated steps: A is resumed from a checkpoint of a third of its steps, with the
instructions of an older processor, and differences are judged by what of A was trained twice.

The traces of one seed take 2 GB, and are removed before the next seed unless they are kept.

    python benchmarks/diff.py [--seeds 4] [--steps 30] [--first-seed 0] [--noise 3 1 0] [--keep DIR] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tracer
from analyze.comparing.diff import REPEATS, diff
from analyze.comparing.difference import Difference

ERROR = 1e-4
WITHIN = 5
OLDER = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
"""An older processor's instructions: they are chosen when a process begins."""


class Transformer(nn.Module):
    """One encoder layer over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 48)
        self.layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(self.words(x)).mean(dim=1))
        return found


class Recurrent(nn.Module):
    """Normalised inputs, an LSTM, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(24)
        self.cells, self.head = nn.LSTM(24, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.cells(self.before(x))[0][:, -1])
        return found


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(48, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(256, 8),
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 8),
    )  # fmt: skip


NETWORKS = {"mlp": mlp, "cnn": cnn, "transformer": Transformer, "lstm": Recurrent}
SHAPES = {"mlp": (48,), "cnn": (1, 8, 8), "transformer": (16,), "lstm": (12, 24)}
BATCHES = {"mlp": 64, "cnn": 32, "transformer": 32, "lstm": 32}
KINDS = (("mlp", "adam"), ("cnn", "adam"), ("cnn", "momentum"), ("transformer", "adamw"), ("lstm", "adam"))


@dataclass(frozen=True)
class Case:
    """One of the trainings, with the step and the weight of its fault."""

    network: str
    optimizer: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.network}-{self.optimizer}-{self.seed}"

    @property
    def fault_step(self) -> int:
        draw = torch.Generator().manual_seed(7000 + self.seed)
        return int(torch.randint(self.steps // 5, self.steps // 2, (), generator=draw))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        world, draw = torch.Generator().manual_seed(4321), torch.Generator().manual_seed(self.seed)
        shape = SHAPES[self.network]
        centres = torch.randn(8, *shape, generator=world)
        for _ in range(self.steps):
            labels = torch.randint(0, 8, (BATCHES[self.network],), generator=draw)
            if self.network == "transformer":
                words = torch.randint(0, 32, (len(labels), *shape), generator=draw)
                yield words, words.sum(dim=1) % 8
            else:
                yield centres[labels] + torch.randn(len(labels), *shape, generator=draw), labels

    @property
    def resumed_at(self) -> int:
        """The step of the checkpoint."""
        return self.steps // 3

    def train(self, path: Path, *, threads: int, fused: bool, fault: bool, checkpoint: Path, resume: bool) -> None:
        """Train, and record all of it; leave a checkpoint, or go on with it."""
        torch.set_num_threads(threads)
        torch.manual_seed(self.seed)
        model = NETWORKS[self.network]()
        parameters = list(model.parameters())
        how = {"fused": True} if fused else {"foreach": False}
        optimizer: torch.optim.Optimizer
        if self.optimizer == "momentum":
            optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **how)
        elif self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(parameters, lr=2e-3, **how)
        else:
            optimizer = torch.optim.Adam(parameters, lr=2e-3, **how)
        draw = torch.Generator().manual_seed(9000 + self.seed)
        weights = [one for one in parameters if one.dim() > 1]
        wrong = weights[int(torch.randint(0, len(weights), (), generator=draw))]
        first = self.resumed_at if resume else 0
        if resume:
            state = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["draws"])
        going_on: dict[str, Any] = {"resume": True, "first_step": first} if resume else {}
        with tracer.record(path, model, optimizer, loss=F.cross_entropy, **going_on):
            for step, (x, y) in enumerate(self.batches()):
                if step < first:
                    continue
                if step == self.resumed_at and not resume:
                    draws = torch.get_rng_state()
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "draws": draws}
                    torch.save(state, checkpoint)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if fault and step >= self.fault_step:
                    assert wrong.grad is not None
                    error = torch.randn(wrong.shape, generator=draw)
                    wrong.grad.add_(error, alpha=float(ERROR * wrong.grad.norm() / error.norm()))
                optimizer.step()
        torch.set_num_threads(1)


RESUMED = "resumed"
VARIANTS: dict[str, tuple[int, bool, bool, bool]] = {
    "a": (1, False, False, False),
    "threads": (2, False, False, False),
    "fused": (1, True, False, False),
    "older": (1, False, True, False),
    "older-fused": (1, True, True, False),
    "older-threads": (2, False, True, False),
    "threads-fault": (2, False, False, True),
    "fused-fault": (1, True, False, True),
    RESUMED: (1, False, True, False),
}
"""Threads, whether the optimizer is fused, whether the instructions are older ones, whether there is the fault."""
NOISE = {"threads": ("fused", "older", "older-fused"), "fused": ("threads", "older", "older-threads")}
"""By which noise runs each is judged."""


def cases(seed: int, steps: int) -> list[Case]:
    return [Case(*kind, seed, steps) for kind in KINDS]


def train_all(folder: Path, variant: str, seed: int, options: argparse.Namespace) -> None:
    """Train all cases of a seed in a process whose instructions are those of the variant."""
    threads, fused, older, fault = VARIANTS[variant]
    if bool(options.variant) is older or not older:
        for case in cases(seed, options.steps):
            path, checkpoint = folder / f"{case.name}.{variant}.zarr", folder / f"{case.name}.{variant}.pt"
            if path.exists():
                continue
            if variant == RESUMED:
                checkpoint = folder / f"{case.name}.a.pt"
                shutil.copytree(folder / f"{case.name}.a.zarr", path)
            case.train(
                path, threads=threads, fused=fused, fault=fault, checkpoint=checkpoint, resume=variant == RESUMED
            )
        return
    if all((folder / f"{case.name}.{variant}.zarr").exists() for case in cases(seed, options.steps)):
        return
    given = ["--steps", options.steps, "--first-seed", seed]
    command = [sys.executable, __file__, "--variant", variant, "--keep", folder, *given]
    subprocess.run([str(word) for word in command], check=True, env={**os.environ, **OLDER})


def told(found: Difference, case: Case) -> bool:
    """Whether the fault is seen when it comes, or up to five steps later."""
    return found.first is not None and case.fault_step <= found.first.step <= case.fault_step + WITHIN


def judged(folder: Path, case: Case, kind: str, count: int) -> dict[str, object]:
    """What `diff` says of B with one kind of rounding, without and with the fault."""
    noise = [folder / f"{case.name}.{name}.zarr" for name in NOISE[kind][:count]] or REPEATS
    first = "a" if count else RESUMED
    a, b, wrong = (folder / f"{case.name}.{name}.zarr" for name in (first, kind, f"{kind}-fault"))
    began = time.process_time()
    clean, faulty = diff(a, b, noise=noise), diff(a, wrong, noise=noise)
    return {
        "case": case.name,
        "rounding": kind,
        "noise": count,
        "differing": clean.differing,
        "within": not clean.parted,
        "first": None if clean.first is None else str(clean.first),
        "fault_step": case.fault_step,
        "told": told(faulty, case),
        "parted": None if faulty.first is None else str(faulty.first),
        "remarks": len(clean.remarks),
        "seconds": time.process_time() - began,
    }


def line(row: dict[str, object]) -> str:
    where = row["parted"] if row["told"] or row["within"] else row["first"]
    within, seen = ("yes" if row[key] else "NO" for key in ("within", "told"))
    return (
        f"{row['case']:22} {row['rounding']:8} {row['noise']:2} {row['differing']:7}  {within:6} "
        f"{row['fault_step']:5}  {seen:5} {str(where)[:110]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="seeds of each of the five trainings")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--noise",
        type=int,
        nargs="+",
        default=[3, 1, 0],
        choices=(0, 1, 2, 3),
        help="noise runs by which each is judged; 0: the repeated steps of A",
    )
    parser.add_argument("--keep", type=Path, help="a folder for the traces; those that are there are not made again")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.variant:
        train_all(options.keep, options.variant, options.first_seed, options)
        return
    if not options.json:
        print(f"{'training':22} {'rounding':8} by {'differ':>7}  within fault  told  first too large", flush=True)
    rows = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            folder.mkdir(exist_ok=True)
            for variant in VARIANTS:
                train_all(folder, variant, seed, options)
            for case, kind, count in itertools.product(cases(seed, options.steps), NOISE, options.noise):
                rows.append(judged(folder, case, kind, count))
                if not options.json:
                    print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows))
        return
    for count in options.noise:
        for kind in NOISE:
            mine = [row for row in rows if (row["rounding"], row["noise"]) == (kind, count)]
            rounded = sum(bool(row["differing"]) for row in mine)
            by = f"judged by {count or 'repeated steps'}"
            print(
                f"{kind}, {by}: {sum(bool(row['within']) for row in mine)} of {len(mine)} within the "
                f"tolerance ({rounded} of them differ from A at all), {sum(bool(row['told']) for row in mine)} of "
                f"{len(mine)} faults told within {WITHIN} steps"
            )


if __name__ == "__main__":
    main()
