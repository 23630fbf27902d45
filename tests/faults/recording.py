"""A training that is recorded while calls fail: says its losses, what was acknowledged, and how many calls it made."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import tracer
from tests.faults import failing
from tracer.trace.commits import Commits


def main(settings: dict[str, Any]) -> None:
    """Train with a recorder."""
    path = Path(settings["folder"]) / settings["name"]
    publish = Commits.publish

    def published(commits: Commits) -> None:
        publish(commits)
        say(safe=commits.committed)

    Commits.publish = published  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(150, 120), torch.nn.ReLU(), torch.nn.Linear(120, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, recording, run = [], contextlib.nullcontext(), None
    failing.arm(str(path.parent), failing.WRITES, settings["first"], settings["stop"], settings["error"])
    if settings["recorded"]:
        options = {"compression": settings["compression"], "durable": settings["durable"]}
        recording = tracer.record(
            path, model, optimizer, capture=tracer.Capture(), commit_steps=1, min_free_disk=0, **options
        )
    try:
        with recording as run:
            say(began=True)
            for step in range(4):
                optimizer.zero_grad()
                loss = model(torch.full((4, 150), float(step))).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if run is not None and run.recorder is not None:
                    run.recorder.wait_until_written()
            say(losses=losses)
    finally:
        say(calls=failing.count())


def say(**what: Any) -> None:
    """Write at once, because the process may die; and not into a file below the folder."""
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
