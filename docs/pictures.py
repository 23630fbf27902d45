"""Makes the pictures of faults in docs/pictures/: trains small networks that have them, records and draws.

It needs the extra `dev` and an installed Chromium: ``python docs/pictures.py [NAME...]``. All of them take 160 s of CPU
time. Trainings differ from one machine to another in the last digits, and so do the numbers in the pictures.
"""

from __future__ import annotations

import collections
import contextlib
import html
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from sklearn.datasets import load_digits
from torch import nn

import tracer

HERE = Path(__file__).parent / "pictures"
WIDTH = 1024
TERMINAL = "margin:0;padding:14px 18px;font:15px/1.45 'DejaVu Sans Mono',monospace;color:#222;white-space:pre-wrap"
LINES = 25
"""How many lines of a terminal are shown."""


def network(last: nn.Module | None = None) -> nn.Sequential:
    """A network of five layers for digits of 8 x 8 pixels."""
    torch.manual_seed(0)
    widths, layers = (64, 64, 64, 64, 64), []
    for width in widths:
        layers += [nn.Linear(width, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10), *([] if last is None else [last]))


def train(
    path: Path,
    model: nn.Module,
    rate: float = 0.1,
    steps: int = 200,
    before_step: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
    probe: bool = False,
    autocast: bool = False,
    image_shape: tuple[int, ...] = (64,),
    apart: str = "no layer",
) -> Path:
    """Train a network on digits with SGD, and record everything; the layer `apart` has a group of parameters."""
    torch.manual_seed(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float() / 8 - 1, torch.tensor(digits.target)
    images = images.reshape(-1, *image_shape)
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in model.named_parameters():
        groups[name.startswith(apart)].append(parameter)
    optimizer = torch.optim.SGD([{"params": group} for group in groups if group], lr=rate, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    capture = [tracer.Capture(tags=["default"]), tracer.Capture(kinds=["activations"], tags=["probe"])]
    with tracer.record(path, model, optimizer, loss=loss, capture=capture, overwrite=True) as run:
        if probe:
            run.probe("probe", images[:256], every=10)
        for step in range(steps):
            before_step(step, optimizer)
            batch = torch.randint(0, len(images), (64,))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                error = loss(model(images[batch]), labels[batch])
            error.backward()
            optimizer.step()
    return path


def trace(folder: Path, *words: str) -> str:
    """What the command prints."""
    done = subprocess.run([sys.executable, "-m", "tracereel", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def save(picture: bytes, name: str) -> None:
    """Write a PNG with at most 256 colours, which is half as large."""
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    HERE.mkdir(exist_ok=True)
    image.save(HERE / f"{name}.png", optimize=True)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser that shows what is on the disk."""
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        path = shutil.which("chromium") or shutil.which("google-chrome")
        with playwright.chromium.launch(executable_path=path, args=flags) as chromium:
            yield chromium.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")


def draw_report(name: str, folder: Path, run: str, *panels: str, options: tuple[str, ...] = ()) -> None:
    """The verdict and some panels of a report, one below the other."""
    trace(folder, "report", run, *options, "--out", "report.html", "--overwrite")
    with browser() as page:
        page.goto((folder / "report.html").as_uri())
        page.wait_for_function("document.documentElement.dataset.ready === 'yes'", polling=100)
        shown = ", ".join(f"#{one}" for one in panels)
        page.add_style_tag(
            content=f"section:not({shown}), nav, #theme, .bar[role=group] {{ display: none !important }}"
        )
        page.wait_for_timeout(500)
        bottom = page.locator(f"#{panels[-1]}").bounding_box() or {}
        page.set_viewport_size({"width": WIDTH, "height": int(bottom["y"] + bottom["height"]) + 10})
        page.wait_for_timeout(300)
        save(page.screenshot(), name)


def draw_text(name: str, command: str, told: str) -> None:
    """What a terminal shows."""
    lines = told.splitlines()
    text = html.escape("\n".join([f"$ {command}", *lines[:LINES], *(["…"] if len(lines) > LINES else [])]))
    with browser() as page:
        page.set_content(f'<body style="margin:0"><pre style="{TERMINAL}">{text}</pre></body>')
        save(page.locator("pre").screenshot(), name)


def dead(folder: Path) -> None:
    """A learning rate that is too large from the beginning, which kills ReLUs."""
    train(folder / "train.zarr", network(), rate=1.0)
    draw_report("dead", folder, "train.zarr", "loss", "layers")


def exploding(folder: Path) -> None:
    """Gradients that explode after three steps at a learning rate twenty times as large."""

    def jump(step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 2.0 if 80 <= step < 83 else 0.1

    train(folder / "train.zarr", network(), before_step=jump)
    draw_report("exploding", folder, "train.zarr", "loss")


def softmax(folder: Path) -> None:
    """A softmax before a loss that has one."""
    train(folder / "train.zarr", network(nn.Softmax(dim=1)))
    draw_report("softmax", folder, "train.zarr", "loss")


def report(folder: Path) -> None:
    """A layer of a convolutional network that learns forty times as fast for three steps, beside a run without."""

    def convolutions() -> nn.Sequential:
        torch.manual_seed(0)
        layers: dict[str, nn.Module] = {}
        for number, width in enumerate((1, 16, 16, 16), 1):
            layers[f"conv{number}"] = nn.Conv2d(width, 16, 3, padding=1)
            layers |= {f"norm{number}": nn.BatchNorm2d(16), f"relu{number}": nn.ReLU()}
        layers |= {"flat": nn.Flatten(), "fc1": nn.Linear(1024, 64), "relu5": nn.ReLU(), "fc2": nn.Linear(64, 10)}
        return nn.Sequential(collections.OrderedDict(layers))

    def jump(step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[1]["lr"] = 0.4 if 150 <= step < 153 else 0.01

    shared: dict[str, Any] = {"rate": 0.01, "steps": 240, "image_shape": (1, 8, 8), "apart": "conv3"}
    train(folder / "good.zarr", convolutions(), **shared)
    train(folder / "train.zarr", convolutions(), before_step=jump, **shared)
    draw_report("report", folder, "train.zarr", "loss", "heat", options=("good.zarr",))


def rates(folder: Path) -> None:
    """The norm of all gradients at three learning rates."""
    runs = [train(folder / f"lr{rate}.zarr", network(), rate=rate).name for rate in (0.01, 0.1, 0.5)]
    trace(folder, "plot", *runs, "-s", "total_norm", "--out", "plot.png")
    save((folder / "plot.png").read_bytes(), "rates")


def rounding(folder: Path) -> None:
    """A run in bfloat16 against the same run in float32."""
    train(folder / "fp32.zarr", network(), steps=40)
    train(folder / "bf16.zarr", network(), steps=40, autocast=True)
    told = trace(folder, "diff", "fp32.zarr", "bf16.zarr")
    draw_text("rounding", "trace diff fp32.zarr bf16.zarr", told)


def similarity(folder: Path) -> None:
    """How alike the layers are, at the end of a training."""
    train(folder / "run.zarr", network(), probe=True)
    draw_report("similarity", folder, "run.zarr", "similarity", options=("-s", "cka:against=layers"))


PICTURES: dict[str, Callable[[Path], Any]] = {
    one.__name__: one for one in (report, dead, exploding, softmax, rates, rounding, similarity)
}

if __name__ == "__main__":
    for chosen in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as made:
            PICTURES[chosen](Path(made))
