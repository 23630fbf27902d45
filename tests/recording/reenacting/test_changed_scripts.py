"""Scripts that were changed since the run: each change is told, refused, or in what the verdict calls not compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tracer
from tests.recording.launching.recorded_programs import Ended, trace
from tests.recording.reenacting.test_reenact import values
from tracer.observing.profiles import settings_of
from tracer.observing.reductions import hash_of
from tracer.recording.reenacting.comparison import Covered, Verdict
from tracer.recording.reenacting.recorded import COMPARABLE

SCRIPT = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
changed = os.environ.get("CHANGED", "")
torch.set_num_threads(2 if changed == "threads" else 1)
torch.manual_seed(1 if changed == "seed" else 0)
x = torch.randn(128, 8)
y = x[:, :4].argmax(1)
if changed == "data":
    x[::3] *= 1.01
if changed == "labels":
    y[::7] = (y[::7] + 1) % 4
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.drop = nn.Dropout(0.3 if changed == "dropout" else 0.2)
        self.norm = nn.BatchNorm1d(64, momentum=0.2 if changed == "batch norm" else 0.1)
    def forward(self, x):
        hidden = self.norm(self.b(self.drop(torch.relu(self.a(x)))))
        hidden = F.gelu(hidden) if changed == "activation" else torch.relu(hidden)
        return self.c(hidden * (1 + 1e-7) if changed == "hidden" else hidden)
model = Net()
def criterion(out, labels):
    if changed == "own loss":
        return -torch.log_softmax(out, 1).gather(1, labels[:, None]).mean()
    loss = F.cross_entropy(out, labels, label_smoothing=0.1 if changed == "smoothing" else 0.0)
    if changed == "penalty":
        loss = loss + 1e-4 * sum((one ** 2).sum() for one in model.parameters())
    return loss * 2 if changed == "scaled loss" else loss
if changed == "momentum":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=2e-2 if changed == "learning rate" else 1e-2,
        betas=(0.8, 0.99) if changed == "betas" else (0.9, 0.999),
        eps=1e-7 if changed == "eps" else 1e-8,
        weight_decay=0.05 if changed == "weight decay" else 0.01,
        fused=True if changed == "fused" else None,
        foreach=True if changed == "foreach" else None,
    )
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20 if changed == "schedule" else 60)
loader = DataLoader(TensorDataset(x, y), 8 if changed == "batch size" else 16, shuffle=changed != "order")
step = 0
for _ in range(4):
    for inputs, labels in loader:
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if changed == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if changed == "one gradient" and step == 6:
            model.b.weight.grad *= 1.0001
        if changed == "last step" and step == 7:
            with torch.no_grad():
                model.c.weight.grad += 1e-3
        if changed == "weight" and step == 5:
            with torch.no_grad():
                model.b.weight[0, 0] += 1e-3
        optimizer.step()
        schedule.step()
        step += 1
"""
"""A script of 32 steps. The environment variable CHANGED names what is otherwise than in the run."""
CHANGES = (
    *("smoothing", "own loss", "penalty", "scaled loss", "clipping", "activation", "hidden", "dropout", "order"),
    *("batch size", "data", "labels", "seed", "threads", "one gradient", "last step", "weight", "learning rate"),
    *("weight decay", "betas", "eps", "momentum", "schedule", "fused", "foreach", "batch norm"),
)
PUT_BACK = {
    "learning rate": "AdamW's lr is 0.02 in step 0 of the script, and was 0.01 in the run; the recorded value took",
    "weight decay": "AdamW's weight_decay is 0.05 in step 0 of the script, and was 0.01 in the run; the recorded",
    "betas": "AdamW's betas.0 is 0.8 in step 0 of the script, and was 0.9 in the run; the recorded value took",
    "eps": "AdamW's eps is 1e-07 in step 0 of the script, and was 1e-08 in the run; the recorded value took",
    "fused": "AdamW's fused is 1.0 in step 0 of the script, and was not set in the run",
    "foreach": "AdamW's foreach is 1.0 in step 0 of the script, and was not set in the run",
    "schedule": "AdamW's lr is 0.00993",
    "threads": "PyTorch computes with 2 threads, and did with 1 in the run",
    "data": "inputs of the datapoints of step",
    "labels": "labels of the datapoints of step",
    "seed": "inputs of the datapoints of step",
    "order": "given as recorded, and so not compared: inputs, labels, the order of the data,",
    "batch size": "given as recorded, and so not compared: inputs, labels, the order of the data,",
}
"""What a re-enactment says of changes that the recorded values undo."""
REFUSED = {"momentum": "the optimizer has no hyperparameter 'betas.0'"}
AT_ONCE = ("smoothing", "penalty", "scaled loss", "clipping", "activation", "hidden", "dropout")
"""Changes that every step shows, so that the step of the keyframe shows them, if it has hashes."""
IN_ONE_STEP = {"one gradient": 6, "last step": 7, "weight": 5}
"""Changes of one step: the step."""
WINDOWS = {"batch norm": (8, 10)}
"""Steps to run again, in which no tensor but buffers is another; the keyframe after them has the buffers."""

_STANDARD = settings_of("standard")
_KEYFRAMES = [{**one, "every": 10} if one.get("every", 1) > 1 else one for one in _STANDARD]
RUNS: Mapping[str, Any] = {
    "hashes": [one for one in _KEYFRAMES if one.get("reduce") in (None, "hash")],
    "keyframes": [one for one in _KEYFRAMES if one.get("reduce") is None or "keyframe" in one["kinds"]],
    # as recorded before keyframes had hashes
    "old": [one for one in _KEYFRAMES if one.get("reduce") is None],
}
"""What was recorded besides what the steps need: every hash, those of the steps with a keyframe, or none."""


class Runs(NamedTuple):
    """The recorded runs of the unchanged script.

    Attributes
    ----------
    folder : Path
        With a trace for each of `RUNS`.
    full : dict
        By place, the hash of each tensor of the same training, recorded in full.
    """

    folder: Path
    full: Mapping[tuple[Any, ...], int]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Record the script in each way, and in full."""
    folder = tmp_path_factory.mktemp("changed")
    (folder / "train.py").write_text(SCRIPT)
    for name, captures in RUNS.items():
        (folder / f"{name}.json").write_text(json.dumps(captures))
        done = trace(folder, "record", "--config", f"{name}.json", "--out", f"{name}.zarr", "train.py")
        assert done.returncode == 0, done.stderr
    done = trace(folder, "record", "--profile", "full", "--out", "full.zarr", "train.py")
    assert done.returncode == 0, done.stderr
    return Runs(folder, _hashes(folder / "full.zarr", (0, 99)))


def _hashes(path: Path, steps: tuple[int, int]) -> dict[tuple[Any, ...], int]:
    """The hash of each comparable tensor of some steps, by kind, module, leaf, step and call."""
    found = values(path, steps)
    return {(*place[:4], place[6]): hash_of(data) for place, data in found.items() if place[0] in COMPARABLE}


def _again(runs: Runs, run: str, steps: str, changed: str) -> Ended:
    words = ("--steps", steps, "--overwrite", "--out", "again.zarr", "--allow-different")
    return trace(runs.folder, "reenact", f"{run}.zarr", *words, "train.py", CHANGED=changed)


def _verdict(runs: Runs) -> dict[str, Any]:
    with tracer.open(runs.folder / "again.zarr") as reader:
        (told,) = [note["reenacted"] for note in reader.notes if "reenacted" in note]
    return told


@pytest.mark.parametrize("steps", ["10:12", "12:14"])
@pytest.mark.parametrize("run", RUNS)
def test_the_unchanged_script(run: str, steps: str, runs: Runs) -> None:
    """Identical where every value has a hash; elsewhere the verdict names the rest, and is another one."""
    done = _again(runs, run, steps, "")
    assert done.returncode == (0 if run == "hashes" else 7), done.stdout + done.stderr
    assert "in the run" not in done.stdout  # nothing was replaced, although the schedule is at another step
    told = _verdict(runs)
    assert told["identical"] == (run == "hashes")
    assert told["outcome"] == ("identical" if run == "hashes" else "partial")
    uncompared = {(one["kind"], step) for one in told["coverage"] if one["how"] == "none" for step in _steps_of(one)}
    first, stop = map(int, steps.split(":"))
    hashed = {"hashes": range(first, stop), "keyframes": {10}, "old": ()}[run]
    computed = {kind for kind in COMPARABLE if kind not in ("input_data", "input_labels", "loss", "loss_terms")}
    for step in range(first, stop):
        left = {kind for kind in computed if (kind, step) in uncompared}
        given = {"weights", "biases"} if step == 10 else set()
        expected = set() if step in hashed else computed - {"layer_inputs", "input_gradients"} - given
        assert left == expected, step
    for kind, step in uncompared:
        assert kind in done.stdout
        assert str(step) in done.stdout
    assert "not compared: buffers and optimizer states, which only keyframes hold" in done.stdout
    assert f"step {stop}, which shows the last update, was run too" in done.stdout
    assert _hashes(runs.folder / "again.zarr", (first, stop)) == {
        place: found for place, found in runs.full.items() if first <= place[3] < stop
    }


def _steps_of(coverage: Mapping[str, Any]) -> set[int]:
    return {step for start, stop in coverage["steps"] for step in range(start, stop)}


@pytest.mark.parametrize(
    ("run", "changed"),
    [
        (run, one)
        for run in RUNS
        for one in (CHANGES if run != "old" else ("hidden", "clipping", "last step", "batch norm"))
    ],
)
def test_a_changed_script(run: str, changed: str, runs: Runs) -> None:
    """No verdict is green without a word: what differs from a full recording of the run is found, or named."""
    # a change in a step of the script's own count is met from step 0, where the two counts agree
    first, stop = (5, 8) if changed in IN_ONE_STEP else WINDOWS.get(changed, (12, 14))
    done = _again(runs, run, f"{first}:{stop}", changed)
    if changed in REFUSED:
        assert done.returncode == 2, done.stdout
        assert REFUSED[changed] in done.stderr
        return
    told = _verdict(runs)
    assert {"identical": 0, "different": 5, "partial": 7}[told["outcome"]] == done.returncode, done.stderr
    if changed in PUT_BACK:
        assert PUT_BACK[changed] in done.stdout
    else:
        assert told["outcome"] != "identical", done.stdout
    found_at = (
        IN_ONE_STEP.get(changed) if run == "hashes" else 10 if changed in AT_ONCE and run == "keyframes" else None
    )
    if found_at is not None:
        assert (told["outcome"], told["first"]["step"]) == ("different", found_at)
    if changed == "last step" and run != "hashes":  # the requested steps do not show it, but the next loss does
        assert (told["outcome"], told["first"]["step"]) == ("different", stop)
    if changed == "batch norm":
        assert (told["outcome"], told["first"]["step"], told["first"]["kind"]) == ("different", 10, "buffers")
    again = _hashes(runs.folder / "again.zarr", (first, stop))
    different = {(place[0], place[3]) for place, found in again.items() if runs.full[place] != found}
    if told["outcome"] == "partial":
        named = {
            (one["kind"], step) for one in told["coverage"] if one["how"] in ("none", "some") for step in _steps_of(one)
        }
        assert different <= named
    elif told["outcome"] == "identical":
        assert not different


def test_an_earlier_verdict_proves_nothing_more() -> None:
    """A note from before verdicts told what was compared, although it called the steps identical."""
    told = {"keyframe": 0, "steps": [3, 5], "compared": 31, "equal": 31, "complete": True, "identical": True}
    verdict = Verdict.of(told)
    assert (verdict.outcome, verdict.identical) == ("partial", False)
    assert Verdict.of({**verdict.describe(), "complete": False}).outcome == "unfinished"


def test_a_verdict_is_the_same_in_a_trace() -> None:
    """Through JSON, with all that it tells."""
    coverage = (
        Covered("loss", ((3, 5),), "all"), Covered("weights", ((3, 4),), "given"),
        Covered("weights", ((4, 5),), "none"), Covered("activations", ((3, 5),), "some"),
    )  # fmt: skip
    verdict = Verdict(0, (3, 5), 9, 9, True, None, coverage, 2, 4, ("AdamW's lr is 0.02 …",))
    assert Verdict.of(json.loads(json.dumps(verdict.describe()))) == verdict
    assert str(verdict) == (
        "steps 3 to 4, run again from the keyframe of step 0: verified only in part; all 9 compared values are equal "
        "to the bit, but nothing was compared of weights in step 4; not all was compared of activations in steps 3 to 4"
    )
    assert verdict.about({"loss"}).identical
    assert not verdict.about({"sample_ids"}).identical
