"""`trace check` and `trace rules`: the verdict, the exit codes, several traces, bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from analyze.seeing.check import check
from tracer.messaging.messages import Message, message_of
from tracer.trace.writer import TraceWriter
from tracereel.main import main

RULE = """
from analyze.rules.rule import Rule

class TooHigh(Rule):
    name, judges, advice = "too_high", "a loss", "look at it"

    def __init__(self, bound: float = 1.0):
        super().__init__(["loss"])
        self.bound = bound

    def look(self, message):
        yield from self.judge(message, float(message.data) > self.bound, float(message.data), self.bound)

    def evidence(self, found):
        return f"the loss was {found.value:g}"
"""


def run(*arguments: object) -> Result:
    """Call the command line in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="trace")


def write(path: Path, losses: list[float], size: int = 3) -> Path:
    """A trace of losses, and of activations that change from step to step."""
    with TraceWriter(path) as writer:
        for step, loss in enumerate(losses):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            made: list[Message] = [
                message_of("fc", kind="activations", data=torch.randn(4, size) + step, **where),
                message_of(None, kind="loss", data=torch.tensor(loss), **where),
            ]
            for message in made:
                writer.write(message)
    return path


def test_nothing_found(tmp_path: Path) -> None:
    """The verdict counts rules and steps; who could not judge is said with what it needs."""
    found = run("check", write(tmp_path / "run.zarr", [1.0] * 30))
    assert found.exit_code == 0
    first, *others = found.stdout.splitlines()
    assert first == "nothing found by 4 rules, of which 3 judged all 30 steps"
    judged = [line.split() for line in others if " of 30 " in line or " all 30 " in line]
    assert judged == [
        ["not_finite", "0", "all", "30", "2"],
        ["loss_spike", "0", "14", "of", "30", "1", "before", "step", "16"],
        ["all_zeros", "0", "all", "30", "1"],
        ["rank_collapse", "0", "all", "30", "1"],
    ]
    assert "could not judge: update_ratio: it needs weights, weight_updates" in others


def test_no_run_is_called_clean_beyond_what_was_judged(tmp_path: Path) -> None:
    """Activations of 15 of 240 steps: their rules judge 15. A step that only an evaluation has is none of the run's."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(241):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            tag = "default" if step < 240 else "eval"
            writer.write(message_of(None, kind="loss", data=torch.tensor(2 - step / 240), tag=tag, **where))
            if step < 15:
                writer.write(message_of("fc", kind="activations", data=torch.randn(4, 3), **where))
    found = run("check", path, "-s", "rank_collapse")
    assert found.stdout.splitlines()[0] == "nothing found by 1 rule, which judged 15 of 240 steps"
    assert " ".join(found.stdout.split()[-9:]) == "rank_collapse 0 15 of 240 1 after step 14"
    told = json.loads(run("check", path, "--json").stdout)
    assert (told["steps"], told["span"]) == (240, [0, 239])
    assert told["verdict"] == "nothing found by 5 rules, of which 1 judged all 240 steps"
    part, whole = told["coverage"]["rank_collapse"], told["coverage"]["not_finite"]
    assert (part["steps"], part["of"], part["first"], part["last"], part["after"]) == (15, 240, 0, 14, 14)
    assert (whole["steps"], whole["aside"], whole["ended"]) == (240, {"eval": 1}, {"activations of fc": 14})
    checked = check(path, "rank_collapse")
    assert "<td>15 of 240</td><td>1</td><td>after step 14</td>" in checked._repr_html_()


def test_a_finding(tmp_path: Path) -> None:
    """The first line is the verdict, the table has the findings in order of time."""
    path = write(tmp_path / "run.h5", [1.0, 2.0, math.nan, 1.0])
    found = run("check", path)
    assert found.exit_code == 0
    assert found.stdout.splitlines()[0] == "error: not_finite in loss at step 2: 1 NaN"
    told = json.loads(run("check", path, "--json").stdout)
    assert (told["severity"], told["steps"], told["trace"]) == ("error", 4, str(path))
    (one,) = told["findings"]
    assert (one["rule"], one["first"], one["kind"], one["module"], one["numbers"]["nan"]) == (
        "not_finite", 2, "loss", None, 1.0,
    )  # fmt: skip


@pytest.mark.parametrize(("losses", "severity", "code"), [
    ([1.0, math.nan], "error", 6), ([1.0, math.nan], "note", 6), ([1.0, 1.0], "note", 0),
])  # fmt: skip
def test_a_check_that_fails(tmp_path: Path, losses: list[float], severity: str, code: int) -> None:
    """`--fail-on` ends with 6 where there is a finding as severe."""
    assert run("check", write(tmp_path / "run.zarr", losses), "--fail-on", severity).exit_code == code


def test_chosen_rules_and_steps(tmp_path: Path) -> None:
    """Also a rule of the user's own, in a file, with its parameter."""
    path = write(tmp_path / "run.zarr", [1.0, 2.0, 5.0, math.nan])
    (tmp_path / "mine.py").write_text(RULE)
    found = run("check", path, "-s", f"{tmp_path}/mine.py:TooHigh:bound=1.5")
    assert found.stdout.splitlines()[0] == "warning: too_high in loss at step 1: the loss was 5"
    assert found.exit_code == 0
    assert run("check", path, "--steps", "0:3", "-s", "not_finite").stdout.startswith(
        "nothing found by 1 rule over 3 steps"
    )


def test_several(tmp_path: Path) -> None:
    """A line each; what cannot be read is said, and is exit code 4."""
    write(tmp_path / "runs" / "a.zarr", [1.0, math.inf])
    write(tmp_path / "runs" / "b.h5", [1.0, 1.0])
    found = run("check", tmp_path / "runs", "-s", "not_finite")
    assert found.exit_code == 0
    assert [line.rpartition("/")[2] for line in found.stdout.splitlines()] == [
        "a.zarr: error: not_finite in loss at step 1: 1 infinite",
        "b.h5: nothing found by 1 rule over 2 steps",
    ]
    (tmp_path / "runs" / "c.h5").write_bytes(b"no trace at all")
    damaged = run("check", tmp_path / "runs", "-s", "not_finite", "--fail-on", "error")
    assert damaged.exit_code == 6
    assert run("check", tmp_path / "runs", "-s", "not_finite").exit_code == 4
    told = json.loads(run("check", tmp_path / "runs", "--json").stdout)
    assert [one["verdict"].split()[0] for one in told] == ["error:", "nothing", "unreadable:"]


def test_an_empty_trace(tmp_path: Path) -> None:
    """Nothing could be judged, and that is what is said."""
    with TraceWriter(tmp_path / "run.zarr"):
        pass
    found = run("check", tmp_path / "run.zarr")
    assert found.exit_code == 0
    assert found.stdout.startswith("nothing could be judged in 0 steps")


def test_a_damaged_trace(tmp_path: Path) -> None:
    """What comes before the damage is judged, and the exit code is 3."""
    path = write(tmp_path / "run.zarr", [math.nan] + [1.0] * 40, size=100_000)
    last = max((one for one in path.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    assert "activations" in str(last)
    content = bytearray(last.read_bytes())
    content[len(content) * 9 // 10] ^= 1
    last.write_bytes(content)
    found = run("check", path)
    assert found.exit_code == 3
    assert found.stdout.splitlines()[0].startswith("error: not_finite in loss at step 0")
    assert "the answer is to what comes before that" in found.stderr


def test_the_list_of_rules() -> None:
    """All of them, one in full, and what is no rule."""
    listed = run("rules").stdout
    assert "not_finite" in listed
    assert "noisy_gradient" in listed
    assert "*Fires*" in run("rules", "dead_units").stdout
    assert len(json.loads(run("rules", "--json").stdout)) == listed.count("\n") - 1
    assert json.loads(run("rules", "loss_spike", "--json").stdout)["severity"] == "warning"
    assert run("rules", "norm").exit_code == 2
    assert run("rules", "dead_units", "--markdown").exit_code == 2
