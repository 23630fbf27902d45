"""What a flight recorder holds: whole steps, the newest, in a bounded number of bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import tracer
from tests.recording.flight_runs import ALL, LIGHT, flights, is_full, train
from tracer import Flight, Message
from tracer.messaging.messages import NetworkMessage, checked, with_data
from tracer.recording.flight_recorder import Ring, bytes_in_memory
from tracer.recording.recording import Run
from tracer.recording.transfers import ELSEWHERE, PER_MESSAGE, Copy


def message(step: int, elements: int) -> Message:
    """A message with so many numbers of four bytes."""
    return NetworkMessage(kind="loss", global_step=step, train_step=step, epoch=0, data=torch.zeros(elements))


def test_a_ring_stays_below_its_bound() -> None:
    """Whatever comes, the oldest steps leave first, and all messages of a step together."""
    chance = random.Random(7)
    ring = Ring(100_000)
    held: dict[int, list[Message]] = {}
    for step in range(200):
        for _ in range(chance.randrange(1, 6)):
            one = message(step, chance.choice([1, 10, 1000, 4000, 9000]))
            ring.hold(one)
            held.setdefault(step, []).append(one)
            assert ring.nbytes <= 100_000
    first = ring.whole_from
    assert 0 < first < 200
    assert sum(bytes_in_memory(one) for step in range(first, 200) for one in held[step]) == ring.nbytes
    found = list(ring.emptied())
    assert [id(one) for one in found] == [id(one) for step in range(first, 200) for one in held[step]]
    assert ring.nbytes == 0


def test_a_step_above_the_bound_is_not_held() -> None:
    """Nor what comes of it later; the next step is."""
    ring = Ring(10_000)
    for elements in (1000, 1000, 1000, 1):
        ring.hold(message(0, elements))
    assert (ring.nbytes, ring.too_large, ring.whole_from) == (0, 0, 1)
    ring.hold(message(1, 1000))
    assert (ring.nbytes, ring.too_large) == (4000 + PER_MESSAGE, 0)


def test_data_on_its_way() -> None:
    """It counts from the beginning, is there when it is waited for, and is left out if somebody changed it."""
    ring = Ring(10_000)
    copies = [Copy.made(torch.full((100,), float(number))) for number in range(4)]
    for number, copy in enumerate(copies):
        ring.hold(with_data(message(number, 1), ELSEWHERE), copy)
        ring.hold(message(number, 2))
    assert ring.nbytes == 4 * (400 + 8 + 2 * PER_MESSAGE)
    ring.drop_before(1)
    ring.settle(lambda copy: None if copy is copies[2] else copy.host)
    assert ring.nbytes == 3 * (8 + PER_MESSAGE) + 2 * (400 + PER_MESSAGE)
    data = [one.data for one in ring.emptied()]
    assert [None if one is None else (len(one), float(one[0])) for one in data] == [
        *((100, 1.0), (2, 0.0)),
        *((2, 0.0),),
        *((100, 3.0), (2, 0.0)),
    ]
    assert ring.nbytes == 0


def test_a_view_counts_as_what_it_keeps_alive() -> None:
    """The memory behind the data is held, not only the data."""
    part = checked("loss", None, 0, 0, 0, "default", 0, "", 0, torch.zeros(1000)[:2])
    assert bytes_in_memory(part) == PER_MESSAGE + 4000


def test_a_bound_shortens_what_is_there(tmp_path: Path) -> None:
    """The note says from which step on all is there, and it is; the ring was never above its bound."""
    train(tmp_path / "whole.zarr", bad=20, capture=ALL)
    peaks: list[int] = []

    def look(run: Run, step: int) -> None:
        assert run.flight is not None
        peaks.append(run.flight._ring.nbytes)

    flight = Flight(before=10, after=0, bytes=100_000, when=["non_finite"])
    train(tmp_path / "run.zarr", bad=20, capture=LIGHT, flight=flight, each=look)
    assert 70_000 < max(peaks) <= 100_000
    with tracer.open(tmp_path / "run.zarr") as trace:
        (told,) = flights(trace)
    assert 10 < told["first_step"] < 20
    is_full(tmp_path / "run.zarr", tmp_path / "whole.zarr", range(told["first_step"], 21))


def test_a_step_that_is_too_large_is_told(tmp_path: Path) -> None:
    """In one sentence, once; nothing of it reaches the trace, and those after a trigger do all the same."""
    with pytest.warns(RuntimeWarning, match="more than the 5,000 bytes"):
        train(
            tmp_path / "run.zarr", bad=5, capture=LIGHT, flight=Flight(before=3, after=2, bytes=5000, when="non_finite")
        )
    with tracer.open(tmp_path / "run.zarr") as trace:
        (problem,) = [note["problem"] for note in trace.notes if "problem" in note]
        assert problem["why"] == "a step has more than the 5,000 bytes that may be held, so nothing of it is held"
        (told,) = flights(trace)
        assert (told["first_step"], told["last_step"]) == (6, 7)
        assert {one.global_step for one in trace if one.kind == "weights"} == {6, 7}
