"""``max_overhead``: by clocks that are made up the share is kept to; by real ones, every change is told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tracer
from tests.recording.pacing.trainings import NOT_SCHEDULED, PROGRAMS, recorded, scheduled, train
from tracer import NetworkMessage, profile
from tracer.messaging.bus import MessageBus
from tracer.observing.pytorch.gate import Meter
from tracer.recording import bounds
from tracer.recording.bounds import OverheadBound
from tracer.recording.pacer import Pacer
from tracer.recording.schedule import Schedule


class MadeUp:
    """A training and its recorder whose costs are given; it moves the clocks by hand.

    Parameters
    ----------
    bare : float
        Seconds of a step without a recorder.
    costs : dict
        Seconds that each group takes of the training's thread.
    writer : float
        Seconds that the writer takes for a second of the training's thread.
    noise : float
        How much each of them varies, as a share.
    """

    def __init__(self, bare: float, costs: dict[str, float], writer: float, noise: float) -> None:
        self.bare, self.costs, self.writer_share, self.noise = bare, costs, writer, noise
        self.thread = self.own = self.cpu_seconds = self.lag = 0.0
        self.seen = self.seen_bytes = 0
        self.random = random.Random(0)
        self.closed = False
        self.notes: list[Any] = []
        self.clock = SimpleNamespace(last=None, step=0)
        self.message_bus = MessageBus()
        problems = SimpleNamespace(note=lambda *about, warn: self.notes.append(about))
        self.dues = SimpleNamespace(at=lambda step: 1)
        self.parts = SimpleNamespace(clock=self.clock, problems=problems, demand=SimpleNamespace(dues=self.dues))

    def varied(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self.random.uniform(-1, 1))

    def set_schedule(self, captures: Any) -> None:
        pass

    def note(self, note: Any) -> None:
        self.notes.append(note)

    def wake(self) -> None:
        pass

    def seconds(self) -> float:
        return self.own

    def step(self, due: tuple[str, ...]) -> None:
        """Let the clocks tell of a step in which these groups are due. The writer is late by a step."""
        taken = sum(self.varied(self.costs.get(group, 0.0)) for group in due)
        self.own += taken
        self.thread += taken + self.varied(self.bare)
        self.cpu_seconds, self.lag = self.cpu_seconds + self.lag, self.writer_share * taken
        self.seen += 10 * len(due)
        self.clock.last, self.clock.step = SimpleNamespace(global_step=self.clock.step), self.clock.step + 1


def paced(run: MadeUp, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[Schedule, Pacer]:
    """What bounds a made-up training that records the profile ``standard`` to 5 %, by its own clocks."""
    made_up: Any = run
    monkeypatch.setattr(bounds, "thread_time", lambda: run.thread)
    monkeypatch.setattr(bounds, "process_time", lambda: run.thread + run.cpu_seconds)
    schedule = Schedule(profile("standard"))
    run.dues.at = lambda step: len(schedule.due(step))
    bound = OverheadBound(0.05, schedule, made_up, made_up, **{"probes": SimpleNamespace(seconds=0.0), **more})
    return schedule, Pacer(schedule, made_up, made_up, [bound], bound)


@pytest.mark.parametrize(
    ("tensors", "writer", "noise"),
    [(0.001, 0.0, 0.3), (0.001, 1.0, 0.0), (0.05, 0.0, 0.0), (0.05, 1.0, 0.3), (0.3, 0.0, 0.3), (0.3, 1.0, 0.0)],
)
def test_the_share_is_kept_to(tensors: float, writer: float, noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one per cent over 2,000 steps of a tenth of a second, with the keyframes."""
    costs = {"losses": 0.0005, "inputs": 0.0005, "keyframes": 0.05, "tensors": tensors}
    run: Any = MadeUp(0.1, costs, writer, noise)
    schedule, pacer = paced(run, monkeypatch)
    for step in range(2002):
        run.step(schedule.due(step))
        if step == 1:
            begin = run.own + run.cpu_seconds + run.lag, run.thread - run.own
        pacer.step_over()
    taken, bare = run.own + run.cpu_seconds + run.lag - begin[0], run.thread - run.own - begin[1]
    assert taken / bare < 0.06
    if tensors == 0.001 and not writer:
        assert not run.notes  # there is room for all
    else:
        assert taken / bare > 0.02  # and it is used
    assert len(run.notes) < 30


def test_a_program_that_becomes_dearer_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule becomes narrower when the steps take longer, and wider again when they take less."""
    run: Any = MadeUp(0.02, {"losses": 0.0002, "tensors": 0.05}, 0.0, 0.1)
    schedule, pacer = paced(run, monkeypatch)
    factors = []
    for bare in (0.02, 0.5, 0.02):
        run.bare = bare
        for _ in range(2000):
            run.step(schedule.due(run.clock.step))
            pacer.step_over()
        factors.append(schedule.factors["tensors"])
    assert factors[0] >= 48
    assert factors[1] <= 4
    assert factors[2] >= 48


def test_everything_becomes_rarer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and inputs, too, evenly; and never nothing at all, though hooks alone take what is allowed."""
    for idle, most in ((0.0, 0.055), (0.002, 0.26)):
        run: Any = MadeUp(0.01, {"losses": 0.001, "inputs": 0.002, "keyframes": 0.01, "tensors": 0.01}, 0.0, 0.1)
        schedule, pacer = paced(run, monkeypatch)
        due = []
        for step in range(20_000):
            if step == 10_000:
                begin = run.own, run.thread - run.own
            due.append(schedule.due(step))
            run.step(due[-1])
            run.own, run.thread = run.own + idle, run.thread + idle
            pacer.step_over()
        late = [step for step in range(15_000, 20_000) if due[step]]
        assert all({"losses", "inputs", "tensors"} <= set(due[step]) for step in late)
        assert max(after - before for before, after in itertools.pairwise(late)) <= 512
        assert (run.own - begin[0]) / (run.thread - run.own - begin[1]) < most


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("capture", ["full", "standard"])
def test_every_change_is_in_the_trace(capture: str, program: str, tmp_path: Path) -> None:
    """What is there, step by step, follows from header and notes alone; and the training is the same to the bit."""
    path = tmp_path / "run.zarr"
    steps = 60
    model = train(path, PROGRAMS[program], steps, capture=profile(capture), max_overhead="1%")
    with tracer.open(path) as trace:
        notes = [note["schedule"] for note in trace.notes if "schedule" in note]
        expected, found = scheduled(trace, steps), recorded(trace)
        assert trace.header["recording"]["max_overhead"] == 0.01
        assert not [one for one in trace.notes if "problem" in one and one["problem"]["what"] != "max_overhead"]
    assert notes
    assert all(note["why"].startswith("max_overhead 1%: ") for note in notes)
    for kind in {*expected, *found} - NOT_SCHEDULED:
        assert found.get(kind, set()) == expected.get(kind, set()), kind
    assert found["loss"] == found["input_data"]
    plain = train(None, PROGRAMS[program], steps)
    for (name, value), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_a_meter_counts_what_is_inside_once() -> None:
    """Whoever holds it already is not counted again; and it is a lock."""
    gate = Exporting().gate
    meter = gate.measured()
    assert gate.measured() is meter
    assert not gate.held
    with meter:
        assert gate.held
        inside = meter.seconds()
        with meter:
            sum(range(100_000))
        assert meter.seconds() > inside
    after = meter.seconds()
    sum(range(100_000))
    assert meter.seconds() == after


class Exporting:
    """An exporter's gate."""

    def __init__(self) -> None:
        self.gate = tracer.Exporter().parts.gate
        assert not isinstance(self.gate.lock, Meter)


def test_an_evaluation_before_a_step_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a hundred times as long as a step, once in 300 steps."""
    run: Any = MadeUp(0.02, {"losses": 0.0002, "tensors": 0.05}, 0.0, 0.1)
    schedule, pacer = paced(run, monkeypatch)
    for step in range(3000):
        run.step(schedule.due(run.clock.step))
        if step % 300 == 299:
            run.thread += 2.0
        pacer.step_over()
        assert step < 100 or schedule.factors["tensors"] >= 48


def test_probes_are_not_what_inputs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are paid for by what can be made rarer, and change nothing of what is told of the rest."""
    run: Any = MadeUp(0.02, {"inputs": 0.0004, "tensors": 0.05}, 0.0, 0.0)
    probes = SimpleNamespace(seconds=0.0)
    schedule, pacer = paced(run, monkeypatch, probes=probes)
    for step in range(1000):
        run.step(schedule.due(run.clock.step))
        if step % 50 == 49:
            run.own, run.thread, probes.seconds = run.own + 0.015, run.thread + 0.015, probes.seconds + 0.015
        pacer.step_over()
    assert not [note for note in run.notes if isinstance(note, tuple)]
    assert run.own / (run.thread - run.own) < 0.06


def test_a_credit_is_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is recorded until the recording has taken so many seconds."""
    run: Any = MadeUp(0.02, {"losses": 0.0002, "tensors": 0.05}, 0.0, 0.0)
    schedule, pacer = paced(run, monkeypatch, credit=1.0)
    taken = []
    for _ in range(100):
        run.step(due := schedule.due(run.clock.step))
        taken.append("tensors" in due)
        pacer.step_over()
    assert 20 <= taken.index(False) <= 24
    assert not any(taken[30:60])


@pytest.mark.parametrize("sign", ["loss", "gradients", "nan", "infinite gradient"])
def test_the_steps_after_a_sign_of_trouble_are_recorded(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the schedule is; once, and the share is kept to in the long run."""
    run: Any = MadeUp(0.02, {"losses": 0.0002, "tensors": 0.01}, 0.0, 0.0)
    schedule, pacer = paced(run, monkeypatch)
    trouble, recorded = None, []
    for step in range(4000):
        due = schedule.due(step)
        run.step(due)
        if due:
            recorded.append(step)
            bad = trouble is None and step >= 2000
            trouble = step if bad else trouble
            where = {"global_step": step, "train_step": step, "epoch": 0}
            loss = {"loss": 50.0, "nan": torch.nan}.get(sign, 1.0) if bad else 1.0 + 0.01 * (step % 7)
            run.message_bus.publish(NetworkMessage(kind="loss", data=torch.tensor(loss), **where))
            factor = {"gradients": 1000.0, "infinite gradient": torch.inf}.get(sign, 1.0) if bad else 1.0
            norms = torch.tensor([5.0 * factor, 1.0], dtype=torch.float64)  # before clipping and after it
            run.message_bus.publish(NetworkMessage(kind="gradient_norms", data=norms, **where))
        pacer.step_over()
    assert trouble is not None
    after = [step for step in recorded if step > trouble]
    assert after[:16] == list(range(trouble + 1, trouble + 17))
    assert after[17] - after[16] > 4
    told = [note["schedule"]["why"] for note in run.notes if "schedule" in note]
    expected = {
        "loss": "the loss was 50, where 1.0",
        "gradients": "the norm of all gradients was 5000, where 5 was usual",
        "nan": "the loss was nan",
        "infinite gradient": "the norm of all gradients was inf",
    }
    assert sum(one.startswith(expected[sign]) for one in told) == 1
    assert run.own / (run.thread - run.own) < 0.06
    pacer.end()
    assert not run.message_bus.receivers


def test_a_training_that_says_late_where_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps before its first one are not measured, as of a trainer that loads a checkpoint."""
    measured: list[tuple[int, int]] = []
    plainly = OverheadBound.step_over

    def step_over(bound: OverheadBound, step: int, due: Sequence[str], steps: int) -> None:
        measured.append((step, steps))
        plainly(bound, step, due, steps)

    monkeypatch.setattr(OverheadBound, "step_over", step_over)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, max_overhead=0.05) as run:
        run.exporter.start_at(5000, 0, 0)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert measured == [(5000, 1), (5001, 1), (5002, 1)]
