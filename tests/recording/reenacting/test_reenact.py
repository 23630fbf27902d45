"""Steps of recorded runs, run again by the scripts that trained."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tracer
from analyze import HessianTrace
from tests.recording.launching.recorded_programs import ENVIRONMENT, Ended, begin, trace
from tests.recording.reenacting.conftest import KEYFRAMES
from tests.recording.reenacting.scripts import DATA_SETS, HEAD, SCRIPTS, TWO_RANKS
from tracer import CaptureError, Collect
from tracer.observing.capture import DEFAULT_KINDS
from tracer.observing.reductions import hash_of
from tracer.recording.bounds import OverheadBound
from tracer.recording.schedule import Wish
from tracereel.agents import MCPTools, OpenFolders

WINDOWS = {name: (20, 21) if place % 2 else (13, 23) for place, name in enumerate(SCRIPTS) if name not in DATA_SETS}
"""Scripts, and their steps to run again: from a keyframe on, or from before one until after it."""


def values(path: Path, steps: tuple[int, int]) -> dict[tuple[Any, ...], torch.Tensor]:
    """What a trace holds of the training in some steps, but for hashes and state."""
    with tracer.open(path) as reader:
        return {
            (one.kind, one.key, one.leaf, one.global_step, one.train_step, one.epoch, one.call): one.data
            for one in reader.messages(kinds=DEFAULT_KINDS, steps=steps, tags="default")
            if one.data is not None
        }


def again(folder: Path, *words: str, **environment: str) -> Ended:
    """Run steps of the recorded run again."""
    return trace(folder, "reenact", "run.zarr", "--overwrite", *words, **environment)


@pytest.mark.parametrize(("name", "steps"), [*WINDOWS.items(), ("cnn", (20, 21))])
def test_steps_come_back_bit_for_bit(name: str, steps: tuple[int, int], recorded: Any) -> None:
    """Every activation, gradient, weight and update is that of a full recording of the same run."""
    if name in ("lightning", "transformers"):
        pytest.importorskip(name)
    folder = recorded(name)
    start, stop = steps
    done = again(folder, "--steps", f"{start}:{stop}", "--out", f"{start}.zarr", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["identical"]
    assert verdict["compared"] == verdict["equal"] >= 20 * (stop - verdict["keyframe"])
    assert verdict["keyframe"] == start // 10 * 10
    expected, found = values(folder / "full.zarr", steps), values(folder / f"{start}.zarr", steps)
    assert found.keys() == expected.keys()
    for place, tensor in found.items():
        assert hash_of(tensor) == hash_of(expected[place]), place


def test_another_seed_changes_nothing_that_was_recorded(recorded: Any) -> None:
    """State, inputs and generators are those of the run, whatever the script draws before its first step."""
    assert again(recorded("cnn"), "--steps", "13:16", "train.py", "5").returncode == 0


def test_a_changed_line_is_found(recorded: Any) -> None:
    """Another bound of the norm of gradients shows at the first step, in the gradients; exit code 5."""
    folder = recorded("cnn")
    done = again(folder, "--steps", "13:16", "--out", "other.zarr", "train.py", "0", "0.5")
    assert done.returncode == 5
    assert "weight_gradients of '0' of step 10 is different" in done.stdout
    with tracer.open(folder / "other.zarr") as reader:
        (verdict,) = (note["reenacted"] for note in reader.info["notes"] if "reenacted" in note)
        about = reader.header["reenacts"]
        assert (about["run"], about["keyframe"], about["steps"]) == (str(folder / "run.zarr"), 10, [13, 16])
        assert reader.info["status"] == "finished"
    assert verdict["first"]["step"] == 10
    assert not verdict["identical"]
    assert verdict["compared"] > verdict["equal"] > 0
    shown = trace(folder, "info", "other.zarr").stdout
    assert "run.zarr, from the keyframe of step 10" in " ".join(shown.split())
    assert "the first other one is weight_gradients of '0' in step 10" in shown
    on = again(folder, "--steps", "13:16", "--out", "other.zarr", "--allow-different", "train.py", "0", "0.5")
    assert on.returncode == 5
    assert "first, weight_gradients of '0' of step 10" in on.stdout
    assert {place[3] for place in values(folder / "other.zarr", (0, 99)) if place[0] == "weights"} == {13, 14, 15}


def test_another_number_of_threads_is_found_or_changes_nothing(recorded: Any) -> None:
    """The header tells with how many threads the run was recorded."""
    with tracer.open(recorded("cnn") / "run.zarr") as reader:
        assert reader.header["threads"] == 1


def test_the_script_can_tell(recorded: Any) -> None:
    """While it runs again, its environment says so; and it ends before what comes after the last step."""
    folder = recorded("lbfgs")
    (folder / "telling.py").write_text(
        (folder / "train.py").read_text() + "\nprint('came to the end')\n"
        "import os; print(os.environ.get('TRACE_REHEARSAL'))\n"
    )
    ended = again(folder, "--steps", "12", "telling.py")
    assert ended.returncode == 0
    assert "came to the end" not in ended.stdout
    last = again(folder, "--steps", "29", "telling.py")
    assert last.returncode == 0
    assert "came to the end" not in last.stdout
    (folder / "asking.py").write_text("import os; print(os.environ.get('TRACE_REHEARSAL'))\n")
    assert "reenact" in again(folder, "--steps", "12", "asking.py").stdout


def test_only_what_is_asked_is_recorded(recorded: Any) -> None:
    """A kind and a module may be asked for that the run was not recorded with."""
    folder = recorded("transformer")
    words = ("-k", "input_gradients", "-m", "encoder.layers.1.linear1", "--out", "some.h5", "train.py")
    done = again(folder, "--steps", "21:23", *words)
    assert done.returncode == 7, done.stderr
    assert "nothing was compared of input_gradients in steps 21 to 22" in done.stdout
    with tracer.open(folder / "some.h5") as reader:
        found = [one for one in reader.messages() if one.kind == "input_gradients"]
    assert {(one.key, one.global_step, one.call) for one in found} == {
        ("encoder.layers.1.linear1", step, call) for step in (21, 22) for call in (0, 1)
    }


def recorded_with(folder: Path, captures: list[Mapping[str, Any]]) -> None:
    """A recording with other captures."""
    (folder / "train.py").write_text(HEAD + SCRIPTS["noisy"])
    (folder / "captures.json").write_text(json.dumps(captures))
    done = trace(folder, "record", "--config", "captures.json", "--out", "run.zarr", "train.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("captures", "sentence"),
    [
        ([KEYFRAMES[0], KEYFRAMES[2]], "has no keyframe at or before step 5, .*; it has none"),
        (
            [KEYFRAMES[0], {**KEYFRAMES[1], "start": 8}],
            "has no keyframe at or before step 5, .* first one is at step 10",
        ),
        ([KEYFRAMES[1]], "has no input_data of step 0|has no generators of step 1"),
        (
            [{"kinds": ["generators", "hyperparameters"]}, {"kinds": ["input_data"], "rows": 2}, KEYFRAMES[1]],
            "has no input_data of step 0, but only a part of each tensor",
        ),
    ],
)
def test_what_is_not_there_is_a_sentence(captures: Any, sentence: str, tmp_path: Path) -> None:
    """Before the script begins."""
    recorded_with(tmp_path, captures)
    (tmp_path / "train.py").write_text("print('it began')")
    done = again(tmp_path, "--steps", "5", "train.py")
    assert done.returncode == 2
    assert "it began" not in done.stdout
    assert re.search(sentence, done.stderr), done.stderr
    assert not (tmp_path / "run.steps-5-6.zarr").exists()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("nn.Linear(144, 4)", "nn.Linear(144, 5)", "another model"),
        ("nn.BatchNorm2d(4)", "nn.GroupNorm(2, 4)", None),
        (
            "nn.Flatten(), nn.Dropout(0.3)",
            "nn.Flatten(), nn.Identity(), nn.Dropout(0.3)",
            "that the keyframe .* has not",
        ),
        (
            "torch.optim.AdamW(model.parameters(), lr=0.01)",
            "torch.optim.SGD(model.parameters(), 0.01)",
            "'betas.0'|betas",
        ),
    ],
)
def test_another_script_is_a_sentence(old: str, new: str, sentence: str | None, recorded: Any, tmp_path: Path) -> None:
    """One that has another model, other data or another optimizer than the run had; else it is found different."""
    folder = recorded("cnn")
    text = (folder / "train.py").read_text()
    assert old in text
    (folder / "other.py").write_text(text.replace(old, new))
    done = again(folder, "--steps", "13:16", "--out", str(tmp_path / "other.zarr"), "other.py")
    if sentence is None:
        assert done.returncode == 5, done.stderr
    else:
        assert done.returncode == 2, done.stdout
        assert re.search(sentence, done.stderr), done.stderr


def test_other_inputs_are_a_sentence(recorded: Any) -> None:
    """A script whose model gets numbers of another dtype than the run's is not the script of the run."""
    folder = recorded("transformer")
    text = (folder / "train.py").read_text()
    (folder / "other.py").write_text(text.replace("model(tokens)", "model(tokens.int())"))
    done = again(folder, "--steps", "13", "other.py")
    assert done.returncode == 2, done.stdout
    assert "is int32 of shape (5, 6), and was int64 of shape (5, 6)" in done.stderr


def test_steps_that_are_not_there(recorded: Any) -> None:
    """Past the end of the run; no range; a stride."""
    folder = recorded("lbfgs")
    assert "has nothing of step 30" in again(folder, "--steps", "25:33", "train.py").stderr
    assert again(folder, "--steps", "5:", "train.py").returncode == 2
    assert again(folder, "--steps", "5:9:2", "train.py").returncode == 2
    assert "there is no script" in again(folder, "--steps", "5").stderr
    assert "epoch_finished" in again(folder, "--steps", "5", "-k", "epoch_finished", "train.py").stderr


def test_a_script_that_fails(recorded: Any) -> None:
    """Its traceback and its exit status are its own; that the steps were not run is said."""
    folder = recorded("lbfgs")
    text = (
        (folder / "train.py")
        .read_text()
        .replace("optimizer.step(closure)", "optimizer.step(closure); step < 1 or 1 / 0")
    )
    (folder / "failing.py").write_text(text)
    done = again(folder, "--steps", "15", "failing.py")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "the script ended before the last of them was over" in done.stdout


# -- several attempts -----------------------------------------------------------------------------------------


RESUMED = """
first, stop, seed = map(int, sys.argv[1:4])
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if first:
    states = torch.load("checkpoint.pt")
    model.load_state_dict(states[0]), optimizer.load_state_dict(states[1])
torch.manual_seed(seed)
for step in range(first, stop):
    if step == 12:
        torch.save([model.state_dict(), optimizer.state_dict()], "checkpoint.pt")
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(5, 6)), torch.randint(0, 3, (5,))).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was resumed from its checkpoint of step 12 when it was at step 18, and drew other data then."""
    folder = tmp_path_factory.mktemp("resumed")
    (folder / "train.py").write_text(HEAD.replace("sys.argv", "['train.py']") + RESUMED)
    (folder / "keyframes.json").write_text(json.dumps(KEYFRAMES))
    for out, config in (("run.zarr", ["--config", "keyframes.json"]), ("full.zarr", [])):
        for words, script in (([], ["0", "18", "1"]), (["--resume", "--first-step", "12"], ["12", "24", "2"])):
            done = trace(folder, "record", *config, "--out", out, *words, "train.py", *script)
            assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("attempt", [None, 0, 1])
def test_steps_of_an_attempt_come_back(attempt: int | None, resumed: Path) -> None:
    """As that attempt left them, from the keyframe of the one before; by default as the last did."""
    words = [] if attempt is None else ["--attempt", str(attempt)]
    done = again(resumed, "--steps", "11:16", *words, "--out", "some.zarr", "--json", "train.py", "0", "30", "3")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["identical"]
    assert verdict["keyframe"] == 10
    with tracer.open(resumed / "full.zarr") as reader:
        messages = reader.until_attempt(1 if attempt is None else attempt).messages(
            kinds=DEFAULT_KINDS, steps=(11, 16), tags="default"
        )
        expected = {
            (one.kind, one.key, one.leaf, one.global_step, one.call): hash_of(one.data)
            for one in messages
            if one.data is not None
        }
    found = values(resumed / "some.zarr", (11, 16))
    assert {(*place[:4], place[6]): hash_of(data) for place, data in found.items()} == expected
    shown = " ".join(trace(resumed, "info", "some.zarr").stdout.split())
    assert f"run.zarr in attempt {1 if attempt is None else attempt}, from the keyframe of step 10" in shown


def test_a_replay_runs_the_steps_of_an_attempt(resumed: Path, tmp_path: Path) -> None:
    """Each attempt's are kept apart; of a run that was resumed since, the steps are run again."""
    folder = shutil.copytree(resumed, tmp_path / "copy")
    script = ("--reenact", "train.py 0 30 3")
    words = ("replay", "run.zarr", "-s", "norm:kind=layer_gradients", "--steps", "13:15", *script, "--json")
    last = trace(folder, *words)
    first = trace(folder, *words, "--attempt", "0")
    assert (last.returncode, first.returncode) == (0, 0), first.stderr
    assert "running steps 13:15 of run.zarr again, into run.attempt-0.steps-13-15.zarr" in first.stderr
    norms = [[json.loads(line)["value"] for line in done.stdout.splitlines()] for done in (last, first)]
    assert len(norms[0]) == len(norms[1]) > 0
    assert norms[0] != norms[1]
    told = json.loads(trace(folder, *words, "--attempt", "0", "--plan").stdout)
    runs = {"trace": "run.zarr", "keyframe": 10, "steps": [13, 15], "runs": 6, "out": "run.attempt-0.steps-13-15.zarr"}
    assert told == runs
    tool = MCPTools(OpenFolders([str(folder)])).reenact_plan("run.zarr", "13:15", attempt=0)["answer"]
    assert tool == {**runs, **{name: f"{folder}/{runs[name]}" for name in ("trace", "out")}}
    planned = trace(folder, *words[:-1], "--attempt", "0", "--plan")
    assert planned.stdout.endswith("and ask run.attempt-0.steps-13-15.zarr\n")
    more = (
        "--config",
        "keyframes.json",
        "--out",
        "run.zarr",
        "--resume",
        "--first-step",
        "12",
        "train.py",
        "12",
        "16",
        "4",
    )
    assert trace(folder, "record", *more).returncode == 0
    assert "running steps" in trace(folder, *words).stderr
    assert "running steps" not in trace(folder, *words).stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("reenact", "run.zarr", "--steps", "3", "--attempt", "7", "train.py"), "has no attempt 7; it has 0, 1"),
        (("reenact", "run.zarr", "--steps", "3", "--attempt", "-1", "train.py"), "'--attempt': -1 is not in the range"),
        (("reenact", "run.zarr", "--steps", "22", "--attempt", "0", "train.py"), "has nothing of step 18"),
        (("replay", "run.zarr", "-s", "norm", "--attempt", "0"), "--attempt goes with --reenact"),
    ],
)
def test_attempts_that_are_not_there(words: tuple[str, ...], sentence: str, resumed: Path) -> None:
    """One sentence, and exit code 2."""
    done = trace(resumed, *words)
    assert done.returncode == 2
    assert sentence in done.stderr


# -- launchers ------------------------------------------------------------------------------------------------


def test_a_launcher_hides_no_difference(recorded: Any) -> None:
    """Torchrun ends with 1 whatever its processes end with; the command ends with 5, or as the script that fails."""
    folder = recorded("cnn")
    torchrun = ("torchrun", "--standalone", "--nproc-per-node", "1")
    words = ("--steps", "13:16", "--out", "launched.zarr", *torchrun)
    reenact = ("-m", "tracereel", "reenact", "run.zarr", "--overwrite", *words)
    other = begin(folder, *reenact, "train.py", "0", "0.5")
    assert other.returncode == 5, other.stderr
    assert "weight_gradients of '0' of step 10 is different" in other.stdout
    (folder / "raising.py").write_text("1 / 0")
    failed = begin(folder, *reenact, "raising.py")
    assert failed.returncode == 1, failed.stderr
    assert "ZeroDivisionError" in failed.stderr


# -- two ranks ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_run_again(tmp_path: Path) -> None:
    """Each rank runs its own steps again; the weights are those that one of them recorded for both."""
    (tmp_path / "train.py").write_text(HEAD + TWO_RANKS)
    (tmp_path / "keyframes.json").write_text(json.dumps(KEYFRAMES))
    torchrun = ("torchrun", "--nproc-per-node", "2", "train.py")
    environment = {**ENVIRONMENT, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tracereel", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )

    for done in (
        run("record", "--config", "keyframes.json", "--out", "run.zarr", *torchrun),
        run("record", "--out", "full.zarr", *torchrun),
    ):
        assert done.returncode == 0, done.stderr
    done = run("reenact", "run.zarr", "--steps", "13:16", "--out", "again.zarr", *torchrun)
    assert done.returncode == 0, done.stderr
    assert {line.partition(":")[0] for line in done.stdout.splitlines() if "equal to the bit" in line} == {
        "rank 0", "rank 1",
    }  # fmt: skip

    def told(path: str) -> dict[tuple[Any, ...], int]:
        with tracer.open(tmp_path / path) as reader:
            return {
                (one.kind, one.key, one.leaf, one.global_step, one.rank, one.call): hash_of(one.data)
                for one in reader.messages(kinds=DEFAULT_KINDS, steps=(13, 16), tags="default")
                if one.data is not None
            }

    assert told("again.zarr") == told("full.zarr")
    (tmp_path / "other.py").write_text(
        (HEAD + TWO_RANKS).replace("(model(a), b)", "(model(a), b).mul(1 + dist.get_rank())")
    )
    other = run("reenact", "run.zarr", "--steps", "13:16", "--out", "other.zarr", *torchrun[:-1], "other.py")
    assert other.returncode == 5, other.stderr
    assert "is different" in other.stdout
    alone = run("reenact", "run.zarr", "--steps", "13:16", "train.py")
    assert alone.returncode == 2
    assert "is of 2 ranks, and this is rank 0 of 1" in alone.stderr


# -- asked while they run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "gan"])
def test_metrics_say_what_a_replay_of_everything_says(name: str, recorded: Any) -> None:
    """To the bit, of the steps that were asked for and of no others."""
    folder = recorded(name)
    specs = ("-s", "spectral_norm", "-s", "ratio", "-s", "norm:kind=layer_gradients")
    done = again(folder, "--steps", "13:16", *specs, "--answers", "again.csv", "train.py")
    assert done.returncode == 0, done.stderr
    full = trace(folder, "replay", "full.zarr", "--steps", "13:16", *specs, "--out", "full.csv", "--overwrite")
    assert full.returncode == 0, full.stderr
    rows = [(folder / f"{one}.csv").read_text().splitlines() for one in ("again", "full")]
    (folder / "again.csv").unlink()
    without_trace = [sorted(re.sub(r"[^,]*\.(zarr|h5)", "", line) for line in lines) for lines in rows]
    assert without_trace[0] == without_trace[1]
    assert len(rows[0]) > 20


def test_a_replay_runs_steps_again(recorded: Any) -> None:
    """`replay --reenact` runs the steps once, asks them as often as one likes, and says what it would do."""
    folder = recorded("transformer")
    words = ("replay", "run.zarr", "-s", "norm:kind=layer_gradients", "--steps", "21:23")
    planned = trace(folder, *words, "--reenact", "train.py", "--plan")
    assert planned.stdout == "would run 4 steps, from the keyframe of step 20, and ask run.steps-21-23.zarr\n"
    for _ in range(2):
        done = trace(folder, *words, "--reenact", "train.py", "--out", "asked.jsonl", "--overwrite")
        assert done.returncode == 0, done.stderr
    assert "running steps" not in done.stderr
    full = trace(folder, "replay", "full.zarr", *words[2:], "--out", "full.jsonl", "--overwrite")
    assert full.returncode == 0, full.stderr
    rows = [
        sorted(
            json.dumps({name: value for name, value in json.loads(line).items() if name != "trace"})
            for line in (folder / name).read_text().splitlines()
        )
        for name in ("asked.jsonl", "full.jsonl")
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) > 10
    assert "needs --steps A:B" in trace(folder, *words[:4], "--reenact", "train.py").stderr
    (folder / "other.py").write_text((folder / "train.py").read_text().replace("div(2)", "div(3)"))
    other = trace(folder, *words[:-1], "23:25", "--reenact", "other.py")
    assert other.returncode == 5
    assert "is different" in other.stderr


def test_metrics_that_need_the_model(recorded: Any) -> None:
    """What a replay refuses with a sentence that names this command, this command gives; as a live run did."""
    folder = recorded("own loss")
    refused = trace(folder, "replay", "run.zarr", "-s", "hessian_trace")
    assert refused.returncode == 2
    assert "trace reenact run.zarr --steps 20:30 -s hessian_trace train.py" in refused.stderr
    done = again(folder, "--steps", "13:15", "--subscriber", "hessian_trace", "--answers", "trace.jsonl", "train.py")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert {one["global_step"] for one in found} == {13, 14}
    live = Collect("loss_hessian_trace")
    namespace: dict[str, Any] = {}
    body = HEAD.replace("sys.argv", "['train.py']") + SCRIPTS["own loss"]
    setup, loop = body.split("for step in range(30):")
    exec(setup, namespace)
    with tracer.record(
        folder / "live.zarr",
        namespace["model"],
        namespace["optimizer"],
        receivers=[HessianTrace(), live],
        capture=tracer.Capture(),
    ):
        exec("for step in range(15):" + loop, namespace)
    expected = {one.global_step: float(one.data) for one in live}
    assert {one["global_step"]: one["value"] for one in found if one["kind"] == "loss_hessian_trace"} == {
        step: expected[step] for step in (13, 14)
    }


# -- late probes ----------------------------------------------------------------------------------------------


def test_late_probes_are_those_of_a_live_run(recorded: Any) -> None:
    """The same inputs, run live at the same steps, gave the same activations to the bit, and so the same SVCCA."""
    folder = recorded("own loss")
    inputs = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", np.arange(20) % 3)
    (folder / "more.py").write_text(
        "import numpy, torch\ndef inputs(): return torch.from_numpy(numpy.load('inputs.npy'))"
    )
    words = ("--every-keyframe", "--out", "late.zarr", "train.py")
    done = again(folder, "--probe", "inputs.npy", "--probe-labels", "labels.npy", *words)
    assert done.returncode == 0, done.stderr
    assert "3 keyframes, of steps 0 to 20" in done.stdout
    assert done.stderr.startswith("recorded in late.zarr")
    one = again(folder, "--probe", "more.py:inputs", "--steps", "5:15", "--out", "one.h5", "train.py")
    assert one.returncode == 0, one.stderr
    setup, loop = (HEAD.replace("sys.argv", "['train.py']") + SCRIPTS["own loss"]).split("for step in range(30):")
    namespace: dict[str, Any] = {}
    exec(setup, namespace)
    with tracer.record(
        folder / "probed.zarr", namespace["model"], namespace["optimizer"], overwrite=True, capture=tracer.Capture()
    ) as run:
        run.probe("probe", torch.from_numpy(inputs), torch.arange(20) % 3, every=10)
        exec("for step in range(29):" + loop, namespace)

    def probed(path: str, steps: tuple[int, int]) -> dict[tuple[Any, ...], int]:
        with tracer.open(folder / path) as reader:
            return {
                (message.kind, message.key, message.global_step, message.epoch): hash_of(message.data)
                for message in reader.messages(tags="probe", steps=steps)
            }

    late = probed("late.zarr", (0, 29))
    assert late == probed("probed.zarr", (0, 29))
    assert {place[2] for place in late} == {0, 10, 20}
    assert {place[0] for place in late} == {"activations", "network_output", "input_labels"}
    without_labels = {place: found for place, found in late.items() if place[0] != "input_labels" and place[2] == 10}
    assert probed("one.h5", (0, 29)) == without_labels


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--probe", "inputs.npy", "train.py"), "give one"),
        (("--probe", "gone.npy", "--every-keyframe", "train.py"), "gone.npy: inputs of a probe are a file .npy"),
        (("--probe", "more.py:nothing", "--every-keyframe", "train.py"), "has no function 'nothing'"),
        (("--probe", "inputs.npy", "--steps", "3:9", "train.py"), "no keyframe among these steps; it has them at 3"),
        (("--probe", "wrong.npy", "--every-keyframe", "train.py"), "the model does not take the inputs of the probe"),
        (("--probe", "inputs.npy", "--every-keyframe", "empty.py"), "took no training step"),
        (("--probe", "inputs.npy", "--every-keyframe", "-k", "weights", "train.py"), "no kind of a probe 'weights'"),
        (("--probe-labels", "inputs.npy", "--steps", "3", "train.py"), "--probe-labels goes with --probe"),
        (("train.py",), "--steps A:B says which steps"),
    ],
)
def test_probes_that_cannot_be_run(words: tuple[str, ...], sentence: str, recorded: Any) -> None:
    """One sentence each, and exit code 2 or 1."""
    folder = recorded("own loss")
    np.save(folder / "inputs.npy", np.zeros((3, 6), np.float32))
    np.save(folder / "wrong.npy", np.zeros((3, 5), np.float32))
    (folder / "empty.py").write_text("print('nothing')")
    (folder / "more.py").write_text("def inputs():\n    return None\n")
    done = again(folder, "--out", "never.zarr", *words)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr


# -- by a function --------------------------------------------------------------------------------------------


def test_steps_are_run_again_by_a_function(tmp_path: Path) -> None:
    """A new model and optimizer take the recorded steps; a function that trains otherwise is found."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    criterion = nn.CrossEntropyLoss()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    def doubled(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        (2 * criterion(model(x), y)).backward()
        optimizer.step()

    model, optimizer = made()
    with tracer.record(tmp_path / "run.zarr", model, optimizer, loss=criterion, capture="standard"):
        for _ in range(6):
            step(model, optimizer, torch.randn(5, 6), torch.randint(0, 3, (5,)))
    heard, about = Collect("weights"), {"steps": (3, 5), "loss": criterion, "receivers": []}
    verdict = tracer.reenact(
        tmp_path / "run.zarr", *made(), step, **{**about, "receivers": [heard]}, out=tmp_path / "again.zarr"
    )
    assert verdict.identical
    assert [one.global_step for one in heard] == [3, 3, 4, 4]
    other = tracer.reenact(tmp_path / "run.zarr", *made(), doubled, **about, out=tmp_path / "other.zarr")
    assert (other.first.step, other.first.kind) == (0, "loss")
    assert not other.complete
    whole = tracer.reenact(
        tmp_path / "run.zarr", *made(), doubled, **about, out=tmp_path / "whole.zarr", allow_different=True
    )
    assert whole.complete
    assert whole.first == other.first
    with pytest.raises(CaptureError, match="has nothing of step 6"):
        tracer.reenact(tmp_path / "run.zarr", *made(), step, steps=(4, 9), out=tmp_path / "never.zarr")
    with pytest.raises(CaptureError, match="has no attempt 1; it has 0"):
        tracer.reenact(tmp_path / "run.zarr", *made(), step, steps=(3, 5), out=tmp_path / "never.zarr", attempt=1)
    assert tracer.reenact(
        tmp_path / "run.zarr", *made(), step, **about, out=tmp_path / "first.zarr", attempt=0
    ).identical


def test_steps_before_the_schedule_became_wider_can_be_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where a bound made steps rarer, those before can be run again, and those after say so."""
    factors = {"losses": 4, "inputs": 4, "keyframes": 4, "tensors": 4}
    wish = Wish(factors, factors, "made up")
    monkeypatch.setattr(OverheadBound, "wish", lambda bound: wish if bound._steps >= 60 else None)
    criterion = nn.MSELoss()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    model, optimizer = made()
    with tracer.record(tmp_path / "run.zarr", model, optimizer, loss=criterion):
        for _ in range(230):
            step(model, optimizer, torch.randn(5, 6), torch.randn(5, 3))
    with tracer.open(tmp_path / "run.zarr") as trace:
        inputs = trace.array("input_data", None)[0].tolist()
        assert inputs == [*range(60), *range(60, 230, 4)]
        assert trace.array("loss", None)[0].tolist() == inputs
    for steps in ((40, 50), (52, 58)):
        out = tmp_path / f"{steps[0]}.zarr"
        verdict = tracer.reenact(tmp_path / "run.zarr", *made(), step, steps=steps, loss=criterion, out=out)
        assert verdict.outcome == "identical"
        assert verdict.compared == verdict.equal > 0
    with pytest.raises(CaptureError, match="has nothing of step 61, so it cannot be run again"):
        tracer.reenact(tmp_path / "run.zarr", *made(), step, steps=(70, 71), out=tmp_path / "never.zarr")


def test_the_default_is_enough(tmp_path: Path) -> None:
    """What ``trace record`` keeps without options brings back every value of steps behind its second keyframe."""
    (tmp_path / "train.py").write_text(HEAD + SCRIPTS["transformer"].replace("range(30)", "range(60)"))
    for path, profile in (("run.zarr", "standard"), ("full.zarr", "full")):
        done = trace(tmp_path, "record", "--out", path, "train.py", TRACE_RECORD_PROFILE=profile)
        assert done.returncode == 0, done.stderr
    done = again(tmp_path, "--steps", "53:57", "--out", "some.zarr", "--json", "train.py")
    verdict = json.loads(done.stdout)
    # hashes of these steps may be left out on a busy machine
    assert (verdict["outcome"], done.returncode) in (("identical", 0), ("partial", 7)), done.stderr
    assert verdict["compared"] == verdict["equal"] > 0
    assert verdict["keyframe"] in (0, 50)  # the second one may be left out on a busy machine
    expected, found = values(tmp_path / "full.zarr", (53, 57)), values(tmp_path / "some.zarr", (53, 57))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], data) for key, data in expected.items())
