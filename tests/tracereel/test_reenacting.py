"""`trace reenact`: where the answers of the steps go."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from tracer.messaging.messages import ModuleMessage
from tracereel.outputs import Outputs
from tracereel.reenacting import _AskedMetrics

RUN = Path(__file__).parents[2] / "sample_traces" / "v1" / "run.zarr"


def test_answers_go_where_they_were_asked_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a new folder, too, and into the one in which the command began, though the script has left that."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    asked = _AskedMetrics(("norm",), Outputs("new/answers.csv", None, False), str(RUN), "again.zarr")
    norm, sink = asked.receivers
    monkeypatch.chdir(tmp_path / "elsewhere")
    where = {"module": "fc", "train_step": 0, "epoch": 0, "kind": "weights"}
    for answer in norm.receive(ModuleMessage(data=torch.ones(4), global_step=3, **where)):
        sink.receive(answer)
    asked.give()
    with (tmp_path / "new/answers.csv").open(newline="") as file:
        assert [row["value"] for row in csv.DictReader(file)] == ["2.0"]
