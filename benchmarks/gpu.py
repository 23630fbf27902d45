"""What recording costs on a CUDA device: a step of a ResNet-50 and of a GPT-2 (small), as they are and recorded.

Both are written out here, in the sizes of their papers: bottlenecks (3, 4, 6, 3) on 224x224 images in batches of 64;
12 blocks of width 768 with 12 heads on 512 tokens in batches of 8, AdamW, under autocast in bfloat16.

The variants take turns in segments, several rounds in one process; a segment ends when the device has done its work and
the writer has written all of it. What is printed is the median over the rounds of the ratio to the same round's bare
segment, of wall time, because the host's processor mostly waits; and how much more memory of the device was taken at
most. Kernels are deterministic ones where there are such, and the weights of all variants are compared at the end.

    python benchmarks/gpu.py [--steps 20] [--rounds 7] [--only resnet,gpt] [--folder /tmp] [--json]

Without a CUDA device it says so and ends with status 2; ``--device cpu --tiny`` runs it on small networks all the same,
to see that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a residual, with in-place ReLUs as usual."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inner == out
        down = nn.Sequential(nn.Conv2d(inner, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.downsample = nn.Identity() if same else down

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        h += self.downsample(x)
        return self.relu(h)


def resnet(tiny: bool) -> tuple[nn.Module, Tensor, Tensor]:
    depths, width, size, batch = ((1, 1, 1, 1), 8, 32, 2) if tiny else ((3, 4, 6, 3), 64, 224, 64)
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    inner = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            own = width << stage
            layers.append(Bottleneck(inner, own, 2 if stage and not block else 1))
            inner = 4 * own
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000)]
    return nn.Sequential(*layers), torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind a layer norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.c_proj(h)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder whose last layer is its first one, transposed."""

    def __init__(self, words: int, length: int, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.lm_head(self.ln_f(self.h(self.wte(tokens) + self.wpe(places)))).flatten(0, 1)


def gpt(tiny: bool) -> tuple[nn.Module, Tensor, Tensor]:
    words, length, depth, width, heads, batch = (101, 16, 2, 32, 4, 2) if tiny else (50257, 512, 12, 768, 12, 8)
    tokens = torch.randint(words, (batch, length + 1))
    return GPT(words, length, depth, width, heads), tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


# -- variants ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def idle(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Iterator[None]:
    """A forward hook on each leaf, and the optimizer's two, that do nothing."""

    def nothing(*_: Any) -> None:
        return None

    found = [one for one in model.modules() if next(one.children(), None) is None]
    handles: list[Any] = [one.register_forward_hook(nothing) for one in found]
    handles += [optimizer.register_step_pre_hook(nothing), optimizer.register_step_post_hook(nothing)]
    yield
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def recorded(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **options: Any
) -> Iterator[Callable[[], None]]:
    """`tracer.record`; what is given waits until all that was recorded is written."""
    with tracer.record(folder / "run.zarr", model, optimizer, **options) as run:
        yield run.recorder.wait_until_written


FIRST = 3
"""Steps of each variant that are not measured."""
OBSERVED = ("activations", "layer_gradients", "weight_gradients", "weight_updates")
VARIANTS: dict[str, Any] = {
    "bare": None,
    "hooks that do nothing": idle,
    "tracer, nothing recorded": functools.partial(recorded, capture=tracer.Capture(every=10**9, start=1)),
    "tracer, norms, every step": functools.partial(recorded, capture=tracer.Capture(kinds=OBSERVED, reduce="norm")),
    "tracer, statistics and hashes, every step": functools.partial(
        recorded, capture=[tracer.Capture(kinds=OBSERVED, reduce=name) for name in ("statistics", "hash")]
    ),
    "tracer, profile standard, at most 5 %": functools.partial(recorded, capture="standard", max_overhead=0.05),
    "tracer, 4096 elements, every step": functools.partial(
        recorded, capture=tracer.Capture(kinds=OBSERVED, elements=4096)
    ),
    "tracer, 4096 elements, 1 in 10": functools.partial(
        recorded, capture=tracer.Capture(kinds=OBSERVED, elements=4096, every=10)
    ),
    "tracer, gradients whole, 1 in 10": functools.partial(
        recorded, capture=tracer.Capture(kinds=("weight_gradients", "bias_gradients"), dtype="bfloat16", every=10)
    ),
}


def steps_with_statistics(path: Path) -> int | None:
    """At how many steps a trace has statistics; None if it has no such streams."""
    if not path.exists():
        return None
    with tracer.open(path) as trace:
        found = {message.global_step for message in trace.messages("weight_gradients_statistics")}
    return len(found) or None


class Training:
    """One variant of one network."""

    def __init__(self, make: Any, watch: Any, folder: Path, device: str, tiny: bool) -> None:
        torch.manual_seed(0)
        model, inputs, labels = make(tiny)
        self.model, self.inputs, self.labels = model.to(device), inputs.to(device), labels.to(device)
        self.device = device
        self.held = self.peak = 0  # bytes on the device: before a segment, and at most in it besides them
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.stack = contextlib.ExitStack()
        self.settle = None
        if watch is not None:
            self.settle = self.stack.enter_context(watch(self.model, self.optimizer, folder))

    def segment(self, steps: int) -> float:
        """Wall seconds until the device has done its work, and the writer its own."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            with torch.autocast(self.device, torch.bfloat16):
                loss = F.cross_entropy(self.model(self.inputs), self.labels)
            loss.backward()
            self.optimizer.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - self.held
        if self.settle is not None:
            self.settle()
        return time.perf_counter() - begin

    def fingerprint(self) -> str:
        """Of the trained weights."""
        parts = [one.detach().cpu().numpy().tobytes() for one in self.model.parameters()]
        return hashlib.sha256(b"".join(parts)).hexdigest()


def measure(part: str, make: Any, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows of one network."""
    trainings = {}
    words = options.variants.split(",")
    variants = {name: one for name, one in VARIANTS.items() if one is None or any(word in name for word in words)}
    for number, (name, watch) in enumerate(variants.items()):
        own = folder / f"{part}{number}"
        own.mkdir()
        trainings[name] = Training(make, watch, own, options.device, options.tiny)
        trainings[name].segment(FIRST)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    order = random.Random(0)
    for _ in range(options.rounds):
        turns = list(variants)
        order.shuffle(turns)
        for name in turns:
            seconds[name].append(trainings[name].segment(options.steps))
    prints = {one.fingerprint() for one in trainings.values()}
    kept = {}
    for number, (name, one) in enumerate(trainings.items()):
        one.stack.close()
        kept[name] = steps_with_statistics(folder / f"{part}{number}" / "run.zarr")
    if len(prints) > 1:
        print(
            f"{part}: the weights of the variants differ, though all kernels should be deterministic", file=sys.stderr
        )
    rows = []
    for name, found in seconds.items():
        own_ratios = [one / bare for one, bare in zip(found, seconds["bare"], strict=True)]
        span = {"median": statistics.median(own_ratios), "low": min(own_ratios), "high": max(own_ratios)}
        more = (trainings[name].peak - trainings["bare"].peak) / 1e6
        step = 1e3 * statistics.median(found) / options.steps
        steps = {"steps": FIRST + options.rounds * options.steps, "steps_with_statistics": kept[name]}
        rows.append({"part": part, "variant": name, "ms": step, "more_device_mb": more, **span, **steps})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one network."""
    for row in rows:
        if row["variant"] == "bare":
            what = "wall ratio to the bare step of"
            print(f"\n{row['part']}, {what} {row['ms']:.2f} ms: median (min-max), more memory")
        else:
            span = f"{row['median']:7.3f} ({row['low']:.3f}-{row['high']:.3f})"
            steps = row["steps_with_statistics"]
            of = "" if steps is None else f"  statistics of {steps} of {row['steps']} steps"
            print(f"{row['variant']:42} {span} {row['more_device_mb']:+8.0f} MB{of}", flush=True)


def main() -> int:
    """Run the networks that were asked for and print tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="resnet,gpt")
    parser.add_argument("--variants", default="", help="only those with one of these words in their names: norms,bare")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small networks, to see that it works")
    parser.add_argument("--folder", type=Path, default=None, help="where the traces are written (some GB)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here, so nothing was measured (--device cpu --tiny tries it)", file=sys.stderr)
        return 2
    # so that the weights of all variants can be compared; what this fills with NaN, no training needs
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    if not options.json:
        print(f"{where}, torch {torch.__version__}{', tiny networks' if options.tiny else ''}", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for part, make in (("resnet", resnet), ("gpt", gpt)):
            if part in options.only.split(","):
                found = measure(part, make, options, Path(name))
                rows += found
                if not options.json:
                    show(found)
    if options.json:
        print(json.dumps({"device": where, "tiny": options.tiny, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
