"""What a report costs: CPU time beside the replay of its metrics, size of the page, and how fast a browser shows it.

First a run is recorded: ``--steps`` steps of a network of eight linear layers, with six kinds of each: 48 streams. Each
round takes turns, in one process: a replay of the rules and of the metrics that a report shows (`ratio`, three norms,
`activation_rate`) into `Results`; a check by the rules alone; and a report, from the path of the trace to the file. CPU
time of all threads, medians of the rounds.

Then a page is made of ``--series`` series of ``--long`` steps, as a replay would give them one by one, and shown by an
installed Chromium (left out where there is none, or no Playwright): from the navigation to the first contentful paint,
to the last picture, and from a click that zooms to the frame in which all pictures are painted.

    python benchmarks/report.py [--rounds 5] [--steps 435] [--series 10000] [--long 10000] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tracer
from analyze.registry import instances
from analyze.rules import RULES
from analyze.seeing.check import Checked, check
from analyze.seeing.course import Course, Grid
from analyze.seeing.gathered import GRADIENT, LONGEST, RATIO, Gathered, Key
from analyze.seeing.page import page
from analyze.seeing.report import POINTS, report
from analyze.tables.results import Results

METRICS = ("ratio", "norm:kind=weights", "norm:kind=weight_gradients,as=g", "norm:kind=layer_gradients,as=s",
           "activation_rate")  # fmt: skip
TURNS = ("replay", "check", "report")
KINDS = ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates", "biases", "loss")


def record(path: Path, steps: int) -> None:
    """Train a network of eight layers, and record six kinds of each."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(64, 128)]
    for _ in range(6):
        layers += [nn.ReLU(), nn.Linear(128, 128)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = nn.CrossEntropyLoss()
    names = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    capture = tracer.Capture(kinds=KINDS, modules=names)
    with tracer.record(path, model, optimizer, loss=loss, capture=capture):
        for _ in range(steps):
            x = torch.randn(64, 64)
            optimizer.zero_grad()
            loss(model(x), (x[:, :10]).argmax(dim=1)).backward()
            optimizer.step()


def cpu_of_replay(path: Path) -> float:
    """CPU time of a replay of the rules and the metrics into results."""
    began = time.process_time()
    results = Results()
    with tracer.open(path) as reader:
        asked = instances([*METRICS, *RULES])
        able = [one for one in asked if not tracer.plan(reader, one).missing]
        tracer.replay(reader, *able, results.sink(able, str(path)))
    return time.process_time() - began


def cpu_of_check(path: Path) -> float:
    """CPU time of the rules alone."""
    began = time.process_time()
    check(path)
    return time.process_time() - began


def cpu_of_report(path: Path, out: Path) -> float:
    """CPU time of a report."""
    began = time.process_time()
    report(path, out, overwrite=True)
    return time.process_time() - began


def made(series: int, steps: int) -> Gathered:
    """Series as a replay would give them, one of them with a spike of a single step."""
    grid = Grid.over(0, steps - 1)
    header = {"argv": ["train.py"], "versions": {"torch": torch.__version__}}
    info: dict[str, Any] = {
        "path": "synthetic.zarr",
        "store": "zarr",
        "version": 1,
        "status": "finished",
        "run_id": "0",
        "created": "",
        "ended": None,
        "messages": series * steps,
        "streams": series,
        "bytes": 0,
        "attempts": [],
        "dropped": {},
        "problems": [],
        "notes": [],
        "header": header,
    }
    layers = [f"encoder.layers.{number // 8}.block.{number % 8}.dense" for number in range(series // 2)]
    found = Gathered(
        Checked("synthetic.zarr", "finished", (), steps=steps), info, 0, (0, steps - 1), grid, layers=layers
    )
    found.limit = min(LONGEST, max(512, POINTS // series))
    draw = np.random.default_rng(0)
    for number, layer in enumerate(layers):
        for what in (RATIO, GRADIENT):
            course = found.courses[Key(what, layer, "default", 0)] = found.course()
            values = 1e-3 * np.exp(0.3 * draw.normal(size=steps))
            if number == len(layers) // 3:
                values[steps // 2] *= 500
            for step, value in enumerate(values.tolist()):
                course.add(step, value)
            course.points()
    loss = found.losses["loss", "default"] = Course(LONGEST, [], grid)
    for step in range(steps):
        loss.add(step, 2.0 / (1 + step / 100))
    return found


def browsed(path: Path, rounds: int) -> dict[str, float]:
    """What a browser takes for a page, in milliseconds; nothing where there is none."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or find_spec("playwright") is None:
        return {}
    from playwright.sync_api import sync_playwright

    painted = (
        "() => new Promise(done => { const began = performance.now(); document.getElementById(BUTTON).click();"
        "requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began))); })"
    )
    first, ready, zooms = [], [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for _ in range(rounds):
            window = browser.new_page(viewport={"width": 1280, "height": 900})
            window.goto(path.as_uri())
            window.wait_for_function("document.documentElement.dataset.ready === 'yes'", timeout=120_000)
            ready.append(window.evaluate("performance.now()"))
            window.wait_for_timeout(500)
            first.append(window.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            zooms += [window.evaluate(painted.replace("BUTTON", repr(one))) for one in ("closer", "later", "farther")]
            window.close()
        browser.close()
    return {
        "first_paint_ms": statistics.median(first),
        "all_pictures_ms": statistics.median(ready),
        "zoom_ms": statistics.median(zooms),
        "longest_zoom_ms": max(zooms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=435)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--long", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    told: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        trace, out = Path(folder) / "run.zarr", Path(folder) / "run.html"
        record(trace, options.steps)
        with tracer.open(trace) as reader:
            told["streams"] = len(reader.streams)
        cpu_of_replay(trace), cpu_of_report(trace, out)  # everything is imported and in the system's cache
        turns = [(cpu_of_replay(trace), cpu_of_check(trace), cpu_of_report(trace, out)) for _ in range(options.rounds)]
        told |= {f"{name}_s": statistics.median(one) for name, one in zip(TURNS, zip(*turns, strict=True), strict=True)}
        told["report_over_replay"] = statistics.median(report_s / replay_s for replay_s, _, report_s in turns)
        told["report_over_check"] = statistics.median(report_s / check_s for _, check_s, report_s in turns)
        told["page_mb"] = out.stat().st_size / 1e6
        told |= {f"run_{name}": value for name, value in browsed(out, options.rounds).items()}

        began = time.process_time()
        found = made(options.series, options.long)
        told["gathering_us_per_value"] = 1e6 * (time.process_time() - began) / (options.series * options.long)
        told["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        began = time.process_time()
        out.write_text(page(found), encoding="utf-8")
        told["long_page_s"] = time.process_time() - began
        told["long_page_mb"] = out.stat().st_size / 1e6
        told |= {f"long_{name}": value for name, value in browsed(out, options.rounds).items()}
    if options.json:
        print(json.dumps(told))
        return
    for name, value in told.items():
        print(f"{name:<26} {value:10.3f}")


if __name__ == "__main__":
    sys.exit(main())
