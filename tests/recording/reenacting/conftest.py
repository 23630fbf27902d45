"""Recorded runs that the tests of re-enactments share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recording.launching.recorded_programs import trace
from tests.recording.reenacting.scripts import HEAD, SCRIPTS
from tracer.messaging.messages import STATE_KINDS

STATE = {"kinds": ["weights", "biases", *STATE_KINDS], "every": 10, "tags": ["default"]}
HASHES = {"reduce": "hash", "tags": ["default"]}
KEYFRAMES: list[Any] = [
    {"kinds": ["generators", "hyperparameters", "input_data", "input_labels"], "tags": ["default"]}, STATE, HASHES,
]  # fmt: skip
IDS: list[Any] = [{"kinds": ["generators", "hyperparameters", "sample_ids"], "tags": ["default"]}, STATE, HASHES]
CAPTURES = {"run": KEYFRAMES, "ids": IDS}

Recorded = Callable[..., Path]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Records a script once in each way that is asked for, and once in full, and gives the folder.

    ``run.zarr`` has keyframes and inputs, ``ids.zarr`` keyframes and sample ids, and ``full.zarr`` everything.
    """

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        (folder / "train.py").write_text(HEAD + SCRIPTS[name])
        done = trace(folder, "record", "--out", "full.zarr", "train.py")
        assert done.returncode == 0, done.stderr
        return folder

    @functools.cache
    def record(name: str, way: str = "run") -> Path:
        folder = folder_of(name)
        (folder / f"{way}.json").write_text(json.dumps(CAPTURES[way]))
        done = trace(folder, "record", "--config", f"{way}.json", "--out", f"{way}.zarr", "train.py")
        assert done.returncode == 0, done.stderr
        return folder

    return record
