"""``trace diff --reenact``: two runs that kept hashes part somewhere, and are run again around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tracer
from analyze.comparing.diff import diff
from tests import processes
from tests.analyze.comparing.test_diff import partings, place
from tests.recording.reenacting.test_reenact import KEYFRAMES, trace
from tests.tracereel.command_line import run
from tracer.observing.capture import DEFAULT_KINDS

SCRIPT = """
import argparse, random, numpy, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--below", type=float, default=0.0)
parser.add_argument("--at", type=int, default=-1)
options = parser.parse_args()
torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
x, y = torch.randn(64, 6), torch.arange(64) % 3
for step in range(30):
    rows = torch.randint(0, 64, (16,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    with torch.no_grad():
        if step == options.at or loss.item() < options.below:
            model[3].weight.grad[2, 7] += 1e-3
    print("step", step)
    optimizer.step()
"""
HASHES = [*KEYFRAMES[:2], {"reduce": "statistics", "tags": ["default"]}, *KEYFRAMES[2:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs by hashes, one of them twice, two also in full and light; b has a fault from a loss, c from a step."""
    found = tmp_path_factory.mktemp("bisecting")
    (found / "train.py").write_text(SCRIPT)
    (found / "hashes.json").write_text(json.dumps(HASHES))
    for name, words in {"a": [], "b": ["--below", "0.95"], "c": ["--at", "23"], "same": []}.items():
        by_hashes, *others = (
            (f"{name}.zarr", ["--config", "hashes.json"]),
            (f"{name}-full.zarr", []),
            (f"{name}-light.zarr", ["--profile", "light"]),
        )
        for out, config in (by_hashes, *(others if name in "ab" else ())):
            done = trace(found, "record", *config, "--out", out, "train.py", *words)
            assert done.returncode == 0, done.stderr
    return found


def told(folder: Path, *words: str) -> Any:
    """What the command says in JSON, and its exit code."""
    done = trace(folder, "diff", *words, "--json")
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout), done.returncode


def test_both_runs_are_run_again_around_the_step(folder: Path) -> None:
    """The step, kind and module are those of full recordings, and so are the elements."""
    expected = diff(folder / "a-full.zarr", folder / "b-full.zarr")
    assert expected.first is not None
    words = ["a.zarr", "b.zarr", "--reenact", "train.py", "--reenact", "train.py --below 0.95"]
    found, code = told(folder, *words)
    assert code == 1
    step = expected.first.step
    assert step > 1
    first = partings(folder / "a-full.zarr", folder / "b-full.zarr")[0]
    assert place(expected) == first
    keys = ("kind", "module", "tag", "leaf", "rank", "step", "call")
    assert tuple(found["first"][key] for key in keys) == first
    assert (found["first"]["kind"], found["first"]["module"], found["first"]["by"]) == ("weight_gradients", "3", "hash")
    again = found["reenacted"]
    assert again["steps"] == [step - 1, step + 1]
    assert all(
        again[one]["outcome"] == "partial" and "equal to the bit" in again[one]["verdict"] for one in ("one", "other")
    )
    amount = expected.first.amount
    whole = again["difference"]["first"]
    assert (whole["elements"], whole["of"], whole["place"], whole["relative"]) == (
        1, 36, [2, 7], amount.relative
    )  # fmt: skip
    assert tuple(whole[key] for key in keys) == first
    for name in ("a", "b"):
        steps = (step - 1, step + 1)
        with tracer.open(folder / f"{name}.steps-{step - 1}-{step + 1}.zarr") as reader:
            kinds = {one.kind for one in reader.messages(steps=steps) if one.data is not None}
        assert {"layer_inputs", "input_gradients", *DEFAULT_KINDS} - kinds <= {
            *("batch_started", "batch_finished", "epoch_started", "epoch_finished", "eval_mode", "train_mode")
        }
        same = diff(
            folder / f"{name}.steps-{step - 1}-{step + 1}.zarr", folder / f"{name}-full.zarr", steps=(*steps, 1)
        )
        assert not same.differing
        assert same.compared > 50
    refused = trace(folder, "diff", *words)
    assert refused.returncode != 0
    assert f"a.steps-{step - 1}-{step + 1}.zarr is already there; --overwrite replaces it" in refused.stderr
    printed = trace(folder, "diff", *words, "--overwrite")
    assert printed.returncode == 1
    assert "Run again around it:" in printed.stdout
    assert f"A and B part at step {step}: weight_gradients of 3: 1 of 36 elements differ" in printed.stdout
    assert "step 3\n" not in printed.stdout  # what the scripts print


def test_a_script_that_does_something_else_is_told(folder: Path) -> None:
    """A fault at the 23rd step of a script does not come where the script goes on from a keyframe: 5, and where."""
    words = ["--reenact", "train.py", "--reenact", "train.py --at 23", "--overwrite"]
    found, code = told(folder, "a.zarr", "c.zarr", *words)
    assert code == 5
    assert (found["first"]["step"], found["first"]["kind"], found["first"]["module"]) == (23, "weight_gradients", "3")
    again = found["reenacted"]
    assert [again[one]["outcome"] for one in ("one", "other")] == ["partial", "different"]
    assert "first, weight_gradients of 3" in again["other"]["verdict"].replace("'", "")


def test_runs_that_do_not_part_are_not_run_again(folder: Path) -> None:
    """Nothing is written, and the code is that of equal runs."""
    before = set(folder.iterdir())
    done = trace(folder, "diff", "a.zarr", "same.zarr", "--reenact", "train.py")
    assert done.returncode == 0
    assert "no step is run again, because the runs do not part" in done.stderr
    assert "are bit-identical" in done.stdout
    assert set(folder.iterdir()) == before


def test_refusals_are_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be done is said in one sentence."""
    monkeypatch.chdir(folder)
    for light, script, sentences in (
        ("-light", "train.py", ["of A cannot be run again", "no keyframe"]),
        ("", "-m no_such_module", ["of A cannot be run again"]),
    ):
        with processes.forked():
            done = run("diff", f"a{light}.zarr", f"b{light}.zarr", "--reenact", script, "--overwrite")
        assert done.exit_code in (1, 2)
        (line,) = (one for one in done.stderr.splitlines() if one.startswith("Error"))
        assert all(sentence in line for sentence in sentences), line
        assert "Traceback" not in done.stderr
