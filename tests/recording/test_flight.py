"""A flight recorder: the trace has the steps around its reason to write in full and no others, beside all else."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests import processes
from tests.recording.flight_runs import ALL, FORMATS, LIGHT, ROOT, flights, is_full, key, network, same, train
from tracer import Capture, CaptureError, Collect, Flight, Message, UnknownNameError
from tracer.errors import StopTraining
from tracer.recording.recording import Run

# -- a NaN in a training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 20))])
def test_a_nan_is_written_with_the_steps_around_it(seed: int, tmp_path: Path) -> None:
    """Those before and after are there in full and in order, equal to a full recording's, and no other step is."""
    chance = random.Random(seed)
    bad, before, after = chance.randrange(30), chance.randrange(6), chance.randrange(5)
    light = chance.choice([LIGHT, Capture(kinds=["loss"], every=3), Capture(kinds=["weights", "loss"], every=4)])
    suffix = FORMATS[seed % 2]
    path, whole = tmp_path / f"run.{suffix}", tmp_path / f"whole.{suffix}"
    train(whole, seed=seed, bad=bad, capture=ALL)
    flight = Flight(before=before, after=after, when=["non_finite"])
    train(path, seed=seed, bad=bad, capture=light, flight=flight)
    with tracer.open(path) as trace:
        (told,) = flights(trace)
    first = max(0, bad - before)
    assert told == {
        "trigger": "non_finite",
        "why": "activations of '0' had NaN or infinities",
        "global_step": bad,
        "first_step": first,
        "last_step": bad + after,
    }
    is_full(path, whole, range(first, min(30, bad + after + 1)), light)


def test_without_a_reason_nothing_is_written(tmp_path: Path) -> None:
    """The trace is the one that there is without a flight recorder, but for what the header says of it."""
    train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight())
    train(tmp_path / "plain.zarr", capture=LIGHT)
    with tracer.open(tmp_path / "run.zarr") as trace, tracer.open(tmp_path / "plain.zarr") as plain:
        assert [key(one) for one in trace] == [key(one) for one in plain]
        assert all(same(one.data, other.data) for one, other in zip(trace, plain, strict=True))
        assert flights(trace) == []
        told = trace.header["flight"]
        assert (told["before"], told["after"], told["bytes"]) == (8, 4, 1 << 30)
        assert told["when"] == ["non_finite", "loss", "exception", "signal"]
        assert "flight" not in plain.header


@pytest.mark.parametrize("bad", [None, 12])
def test_training_is_the_same_to_the_bit(bad: int | None, tmp_path: Path) -> None:
    """With a flight recorder that writes or does not, and without a recorder."""
    bare = train(None, bad=bad)
    state = torch.random.get_rng_state()
    seen = train(
        tmp_path / "run.zarr", bad=bad, capture=LIGHT, flight=Flight(when=["non_finite", "loss", "norm", "exception"])
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in bare.state_dict().items():
        assert same(value, seen.state_dict()[name]), name
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in seen.modules())


# -- the end, and what else a recording does -----------------------------------------------------------------------

PROGRAM = """
    import os, sys, time, torch, tracer
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    capture = tracer.Capture(kinds=["loss"])
    flight = tracer.Flight(before=5, after=2)
    with tracer.record("run.zarr", model, optimizer, capture=capture, flight=flight, commit_steps=1) as run:
        for step in range(40):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            if step == 10:
                run.keep("look")
        run.recorder.wait_until_written()
        print("written", flush=True)
        time.sleep(60)
"""


def test_kill_loses_the_ring_alone(tmp_path: Path) -> None:
    """What was recorded, and what was written of the ring before, is there."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "program.py"]
    with processes.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and committed(tmp_path / "run.zarr") < 40:
            time.sleep(0.1)
        process.kill()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "interrupted"
        assert [one.global_step for one in trace if one.kind == "loss"] == list(range(40))
        assert sorted({one.global_step for one in trace if one.kind == "weights"}) == list(range(5, 13))
        assert [one["why"] for one in flights(trace)] == ["look"]


def committed(path: Path) -> int:
    """How many losses are safe."""
    with tracer.open(path) as trace:
        return sum(stream.count for stream in trace.streams if stream.kind == "loss")


def test_a_bound_of_the_trace_holds(tmp_path: Path) -> None:
    """What the ring writes counts; once the recording ends, nothing is held, and the training goes on."""
    rings: list[int] = []

    def ask(run: Run, step: int) -> None:
        assert run.flight is not None
        rings.append(run.flight._ring.nbytes)
        if step == 12:
            run.keep("look")

    with pytest.warns(RuntimeWarning, match="stop_at_bytes"):
        train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(), stop_at_bytes=700_000, each=ask)
    with tracer.open(tmp_path / "run.zarr") as trace:
        (stopped,) = [note["stopped"] for note in trace.notes if "stopped" in note]
        assert stopped["global_step"] in (12, 13)
        assert trace.info["stored_bytes"] <= 700_000
    assert rings[11] > 0
    assert not any(rings[14:])


def test_live_receivers_hear_what_the_trace_has(tmp_path: Path) -> None:
    """In its order: so a replay says what they said."""
    live, later = Collect("*"), Collect("*")
    train(tmp_path / "run.zarr", bad=9, capture=LIGHT, flight=Flight(before=2, after=2), receivers=[live])
    tracer.replay(tmp_path / "run.zarr", later)
    assert [key(one) for one in live] == [key(one) for one in later]
    assert all(same(one.data, other.data) for one, other in zip(live, later, strict=True))
    assert {one.global_step for one in live.of("weights")} == {7, 8, 9, 10, 11}


def test_receivers_cannot_ask_for_what_is_only_held(tmp_path: Path) -> None:
    """As they would not hear it in most steps."""
    norm = tracer.CallbackSubscriber(["weights"], lambda message: None)
    with pytest.raises(CaptureError, match="weights"):
        train(tmp_path / "run.zarr", capture=LIGHT, flight=Flight(), receivers=[norm])


def test_hashes_beside_what_is_held(tmp_path: Path) -> None:
    """The data of a stream is held where a capture takes its hashes or its statistics alone."""
    captures = [Capture(kinds=["weights"], reduce="hash"), Capture(kinds=["activations"], reduce="statistics")]
    train(tmp_path / "run.zarr", bad=9, capture=captures, flight=Flight(before=1, after=0, when="non_finite"))
    train(tmp_path / "whole.zarr", bad=9, capture=ALL)
    with tracer.open(tmp_path / "run.zarr") as trace, tracer.open(tmp_path / "whole.zarr") as whole:
        full = {key(one): one for one in whole}
        data = [one for one in trace if one.kind in ("weights", "activations")]
        assert {key(one) for one in data} == {
            one for one in full if one[0] in (8, 9) and one[1] in ("weights", "activations")
        }
        assert all(same(one.data, full[key(one)].data) for one in data)
        # whoever takes statistics in place of data is told that they are there
        assert all((one.sampling or {}).get("beside") == ["statistics"] for one in data if one.kind == "activations")
        assert [one.global_step for one in trace if one.kind == "weights_hash" and one.key == "0"] == list(range(30))


def test_what_else_may_be_held(tmp_path: Path) -> None:
    """A capture of its own, of some kinds and every second step."""
    capture = Capture(kinds=["weights"], every=2)
    train(
        tmp_path / "run.zarr", bad=9, capture=LIGHT, flight=Flight(before=4, after=0, capture=capture, when="exception")
    )
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert not any(one.kind == "weights" for one in trace)
    train(
        tmp_path / "again.zarr",
        capture=LIGHT,
        flight=Flight(before=4, after=1, capture=capture),
        each=lambda run, step: run.keep("now") if step == 9 else None,
    )
    with tracer.open(tmp_path / "again.zarr") as trace:
        assert {one.global_step for one in trace if one.kind == "weights"} == {6, 8, 10}


def test_a_stop_while_it_writes_loses_nothing(tmp_path: Path) -> None:
    """A receiver that hears what is written stops the training: all of it is in the trace, and nothing twice."""

    class Stopping(Collect):
        def receive(self, message: Message) -> list[Message]:
            if message.kind == "weights":
                raise StopTraining("enough")
            return []

    capture = Capture(kinds=["loss", "batch_finished"])
    train(tmp_path / "whole.zarr", bad=8, capture=ALL)
    with pytest.raises(StopTraining):
        train(
            tmp_path / "run.zarr",
            bad=8,
            capture=capture,
            flight=Flight(before=2, when="non_finite"),
            receivers=[Stopping()],
        )
    is_full(tmp_path / "run.zarr", tmp_path / "whole.zarr", range(6, 9), replace(capture, stop=9))


def test_another_rank_records_weights(tmp_path: Path) -> None:
    """What another rank has alike is not held here."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=LIGHT, flight=Flight(before=0)) as run:
        assert run.recorder is not None
        run.recorder._elsewhere = {("weights", "0")}
        run.exporter.parts.rewire()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
        run.keep("look")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert {one.key for one in trace if one.kind == "weights"} == {"1", "4"}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bad", [None, 12])
def test_on_a_device(bad: int | None, tmp_path: Path) -> None:
    """What is held is copied from the device, and is what a full recording has."""

    def go(name: str, **options: Any) -> None:
        torch.manual_seed(0)
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tracer.record(tmp_path / name, model, optimizer, **{"capture": tracer.Capture(), **options}) as run:
            for step in range(20):
                inputs = torch.randn(8, 6, device="cuda")
                if step == bad:
                    inputs[0, 0] = float("nan")
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            if bad is None and run.flight is not None:
                run.keep("the last")

    go("whole.zarr", capture=ALL)
    go("run.zarr", capture=Capture(kinds=["loss"]), flight=Flight(before=3, after=2))
    steps = range(16, 20) if bad is None else range(9, 15)
    is_full(tmp_path / "run.zarr", tmp_path / "whole.zarr", steps, Capture(kinds=["loss"]))


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"before": -1}, CaptureError, "before of a flight recorder is a whole number from 0, not -1"),
        ({"after": 1.5}, CaptureError, "after of a flight recorder"),
        ({"when": ["nan"]}, UnknownNameError, "reason to write .* 'nan'"),
        ({"when": [3]}, CaptureError, "names and receivers, not 3"),
        ({"bytes": "much"}, CaptureError, "'much' is not a size"),
        ({"bytes": "100TB"}, CaptureError, "100,000,000,000,000 bytes does not fit into the memory of this machine"),
        ({"capture": "weights"}, CaptureError, "capture of a flight recorder is a tracer.Capture"),
        ({"capture": Capture(reduce=torch.maximum)}, CaptureError, "no running reductions"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_is_no_flight_recorder(given: dict[str, Any], error: type[Exception], sentence: str) -> None:
    """Each is told in one sentence, before anything is recorded."""
    with pytest.raises(error, match=sentence):
        Flight(**given)


def test_a_recording_is_given_a_flight(tmp_path: Path) -> None:
    """And nothing else."""
    with pytest.raises(CaptureError, match=r"flight is a tracer\.Flight, not True"):
        train(tmp_path / "run.zarr", flight=True)
