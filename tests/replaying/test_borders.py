"""Windows of a few messages: plans, replays and batches say what they say of whole traces, wherever windows end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from analyze.batching.planning import plan_trace
from analyze.batching.units import questions
from analyze.registry import parse
from tests.trace.small_summaries import rows_looked_at, small_summaries
from tracer import Collect, ModuleMessage, NetworkMessage, TraceWriter
from tracer.replaying.filters import Filters

ASKED = ["norm:kind=weight_updates", "norm:kind=weights,subsample=2", "mean:kind=loss"]


def write(path: Path, chance: random.Random) -> None:
    """A trace of which some modules lack some steps, some steps have many more messages, and some are not there."""
    every = {f"m{number}": chance.choice([1, 1, 1, 2, 3]) for number in range(chance.randint(1, 5))}
    with TraceWriter(path) as writer:
        for step in range(chance.randint(4, 12)):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
            if chance.random() < 0.15:
                continue
            for module, stride in every.items():
                if step % stride == 0 and chance.random() < 0.9:
                    data = torch.full((3,), float(chance.randrange(100)))
                    writer.write(ModuleMessage(kind="weights", module=module, data=data, **where))
            for call in range(chance.randint(0, 8)):
                writer.write(ModuleMessage(kind="activations", module="m0", call=call, data=torch.ones(2, 2), **where))
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where))


def said(path: Path, steps: tuple[int, int | None] | None) -> list[Any]:
    """What a plan, a replay and the plan of a batch say."""
    asked = [parse(one) for one in ASKED]
    heard = Collect()
    planned = tracer.plan(path, *asked, steps=steps)
    if not planned.missing:
        tracer.replay(path, *asked, heard, steps=steps)
    units = plan_trace(path, questions(ASKED), Filters(steps=steps), part_bytes=300).units
    return [
        planned.describe(),
        [(one.kind, one.key, one.global_step, None if one.data is None else one.data.tolist()) for one in heard],
        [(unit.id, unit.messages, unit.bytes) for unit in units],
    ]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_where_windows_end_changes_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a window is shorter than the rows that are left over of the one before it."""
    chance = random.Random(seed)
    path = tmp_path / "run.zarr"
    with monkeypatch.context() as patches:
        small_summaries(patches, rows=5)
        write(path, chance)
    for steps in (None, (1, 9), (3, None)):
        whole = said(path, steps)
        assert whole[1] or whole[0]["missing"]
        for rows in (3, chance.randint(4, 12)):
            with monkeypatch.context() as patches:
                small_summaries(patches, rows=rows)
                assert said(path, steps) == whole, (steps, rows)


def test_weights_may_come_steps_after_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of an evaluation that carries an earlier step waits for the next one, as every weight does."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(14):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="batch_started", **where))
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), **where))
            if step >= 2:
                where |= {"global_step": step - 2, "train_step": step - 2}
                data = torch.full((4,), float(step**2))
                writer.write(ModuleMessage(kind="weights", module="fc", tag="eval", data=data, **where))
    expected = [2.0 * ((step + 3) ** 2 - (step + 2) ** 2) for step in range(11)]
    for rows in (1 << 18, 3, 5, 8):
        with monkeypatch.context() as patches:
            small_summaries(patches, rows=rows)
            heard, updates = Collect("*_norm2"), parse("norm:kind=weight_updates,tag=eval")
            tracer.replay(path, heard, updates)
            assert [float(one.data) for one in heard] == expected, rows  # type: ignore[arg-type] # a number
            assert tracer.plan(path, updates).messages == 11


def test_what_is_there_at_other_steps_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps without two weights in a row nothing is derived; it is an error only if there are none anywhere."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in (0, 1, 2, 10, 20):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(ModuleMessage(kind="weights", module="fc", data=torch.full((4,), float(step)), **where))
    small_summaries(monkeypatch, rows=2)
    for steps, found in (((10, None), []), ((20, None), []), ((0, 2), [0, 1]), (None, [0, 1])):
        heard, updates = Collect("*_norm2"), parse("norm:kind=weight_updates")
        tracer.replay(path, heard, updates, steps=steps)
        assert [one.global_step for one in heard] == found
        planned = tracer.plan(path, updates, steps=steps)
        assert (planned.missing, planned.messages) == ([], len(found))
        assert [one.count for one in planned.derived] == ([len(found)] if found else [])
    with pytest.raises(tracer.CaptureError, match="needs bias_updates"):
        tracer.replay(path, parse("norm:kind=bias_updates"), steps=(10, None))


def test_few_rows_are_read_to_derive_few_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a stream never has two weights in a row; what is there is not looked through for them."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=20)
    with TraceWriter(path, commit_rows=20) as writer:
        for step in range(400):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
            for module, stride in (("a", 1), ("b", 5)):
                if step % stride == 0:
                    writer.write(ModuleMessage(kind="weights", module=module, data=torch.ones(2), **where))
    looked = rows_looked_at(monkeypatch)
    for action in (tracer.plan, tracer.replay):
        looked.clear()
        action(path, parse("norm:kind=weight_updates"), steps=(390, 394))
        assert sum(looked) < 200, action


@pytest.mark.parametrize("subsample", [1, 2, 3])
def test_what_is_wanted_at_some_steps(subsample: int, tmp_path: Path) -> None:
    """Subscriptions, which are asked together, and receivers that are asked of each step, get what they want."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(12):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": step // 4}
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), **where))
            if step % 4 == 0:
                writer.write(NetworkMessage(kind="epoch_started", **where))

    class Odd(Collect):
        """Wants odd steps."""

        def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
            return kind == "loss" and (step is None or step % 2 == 1)

    heard: list[int] = []
    plain = tracer.CallbackSubscriber(
        "loss", lambda data, step, *_: heard.append(step), subsample=subsample, incomplete="strict"
    )
    epochs: list[int] = []
    by_epoch = tracer.CallbackSubscriber("epoch_started", lambda *of: epochs.append(of[3]), subsample=subsample)
    odd = Odd("loss")
    planned = tracer.plan(path, plain, by_epoch)
    tracer.replay(path, plain, by_epoch)
    assert heard == list(range(0, 12, subsample))
    assert epochs == list(range(0, 3, subsample))
    assert planned.read == len(heard) + len(epochs)
    tracer.replay(path, odd, tracer.CallbackSubscriber("loss", lambda *_: None, subsample=5))
    assert [one.global_step for one in odd] == [1, 3, 5, 7, 9, 11]
