"""Pulses: the hashes and the statistics of a step as the rows of one message each."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import analyze
import tracer
from tracer import Capture, Message, NetworkMessage, TraceWriter
from tracer.errors import CaptureError, TraceCorruptError
from tracer.format.journal import Column
from tracer.messaging.bus import MessageBus
from tracer.messaging.pulses import PULSE, PulseRow, messages_of, rows_of, sampling_of
from tracer.messaging.receiver import Collect
from tracer.numbers.gathered import GatheredTensors, statistics_of_many
from tracer.numbers.statistics import ENTRIES, statistics_of
from tracer.observing.clock import At, Clock, Problems, StreamKey
from tracer.observing.pulses import Pulses, RowKind
from tracer.observing.reductions import hash_of

KEPT = [
    Capture(kinds=("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates"), reduce=name)
    for name in ("statistics", "hash")
]
STEPS = 12


class Net(nn.Module):
    """A layer that is called once or twice, one that changes its input in place, and an output of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.rectify = nn.Linear(6, 5), nn.Linear(5, 5), nn.ReLU(inplace=True)
        self.wide = nn.Linear(5, 3000)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.rectify(self.first(x))
        for _ in range(1 + (self.calls % 4 == 0)):
            x = self.again(x)
        return self.wide(x).mean()


def train(path: Path, capture: Any, steps: int = STEPS, **options: Any) -> list[torch.Tensor]:
    """The parameters after a recorded training."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tracer.record(path, model, optimizer, capture=capture, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).backward()
            optimizer.step()
    return [one.detach() for one in model.parameters()]


def key(message: Message) -> tuple[Any, ...]:
    """What tells a message apart."""
    return message.kind, message.key, message.leaf, message.global_step, message.call


def same(one: Message, other: Message) -> bool:
    """Whether two messages are equal, data bit by bit."""
    if key(one) != key(other) or one.sampling != other.sampling or (one.data is None) != (other.data is None):
        return False
    if one.data is None or other.data is None:
        return True
    return one.data.dtype == other.data.dtype and one.data.numpy().tobytes() == other.data.numpy().tobytes()


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_rows_are_messages_of_their_own(tmp_path: Path, suffix: str) -> None:
    """Of every tensor those of the data: of small and large ones, changed in place later, of several calls."""
    full = train(tmp_path / f"full{suffix}", Capture(kinds=KEPT[0].kinds))
    kept = train(tmp_path / f"kept{suffix}", KEPT)
    assert all(map(torch.equal, full, kept))
    with tracer.open(tmp_path / f"full{suffix}") as data, tracer.open(tmp_path / f"kept{suffix}") as rows:
        found = {key(one): one for one in rows}
        assert len(found) == len(rows) == 2 * len(data)
        for message in data:
            kind, *rest = key(message)
            assert message.data is not None
            of_hash, of_numbers = found[f"{kind}_hash", *rest], found[f"{kind}_statistics", *rest]
            assert of_hash.data is not None
            assert of_numbers.data is not None
            assert int(of_hash.data) == hash_of(message.data)
            assert of_hash.data.shape == ()
            assert np.array_equal(of_numbers.data.numpy(), statistics_of(message.data).numpy(), equal_nan=True)
        assert {one.kind for one in rows.streams} == {
            f"{kind}_{name}" for kind in KEPT[0].kinds for name in ("hash", "statistics")
        }
        assert (
            sum(one.count for one in rows.streams) == rows.info["messages"] == rows.attempts[0]["messages"] == len(rows)
        )
        written = rows.folded()
        assert {one.kind for one in written.streams} == {PULSE}
        # a step with another number of calls has other rows
        assert len(written) == 2 * STEPS
        assert len(written.streams) == 4
        with pytest.raises(CaptureError, match="a folded reader is not pickled"):
            written.__reduce__()


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_other_programs_read_a_plain_array(tmp_path: Path, suffix: str) -> None:
    """Step by stream by number."""
    path = tmp_path / f"run{suffix}"
    train(path, KEPT, steps=3)
    with tracer.open(path) as trace:
        (numbers, hashes) = sorted((one for one in trace.folded().streams), key=lambda one: one.leaf, reverse=True)
        names = "rank0/pulse/%~network#statistics", "rank0/pulse/%~network#hash"
        if suffix == ".zarr":
            import zarr

            root: Any = zarr.open_group(path, mode="r")
            arrays = [root[name][:] for name in names]
        else:
            import h5py

            with h5py.File(path, "r") as file:
                arrays = [file[name][:] for name in names]
        assert numbers.sampling is not None
        assert hashes.sampling is not None
        rows = numbers.sampling["rows"]
        assert arrays[0].shape == (3, len(rows), len(ENTRIES))
        assert arrays[1].shape == (3, len(rows))
        assert numbers.sampling["numbers"] == list(ENTRIES)
        for place, (kind, module, leaf, call, _) in enumerate(rows):
            _, data = trace.array(kind, module, leaf=leaf, call=call)
            assert np.array_equal(np.asarray(data), arrays[0][:, place], equal_nan=True)
        for place, (kind, module, leaf, call, _) in enumerate(hashes.sampling["rows"]):
            assert np.array_equal(np.asarray(trace.array(kind, module, leaf=leaf, call=call)[1]), arrays[1][:, place])


def test_flipped_bits_of_rows_are_damage(tmp_path: Path) -> None:
    """Rows have no checksum of their own; no reader returns a wrong number."""
    path = tmp_path / "run.zarr"
    train(path, KEPT, steps=3)
    with tracer.open(path) as trace:
        right = {key(message): message for message in trace}
    told = 0
    for file in sorted((path / "rank0" / "pulse").rglob("c/**/*")):
        if not file.is_file():
            continue
        whole = file.read_bytes()
        for at in range(len(whole) - 600, len(whole), 50):  # behind the indexes
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
            try:
                with tracer.open(path) as trace:
                    assert all(same(message, right[key(message)]) for message in trace)
            except TraceCorruptError:
                told += 1
        file.write_bytes(whole)
    assert told == 24


def test_live_is_replay(tmp_path: Path) -> None:
    """Subscribers hear the rows, in the same order and equal to the bit, whether or not others take pulses."""
    asked = "norm:kind=weights", "mean:kind=activations", "norm:kind=weight_updates"
    kinds = ("weights_norm2", "activations_mean", "weight_updates_norm2", "weights_statistics", "activations_hash")
    live = [*map(analyze.parse, asked), Collect(*kinds)]
    train(tmp_path / "run.zarr", KEPT, receivers=live)
    again = [*map(analyze.parse, asked), Collect(*kinds)]
    with tracer.open(tmp_path / "run.zarr") as trace:
        tracer.replay(trace, *again)
        heard, once_more = live[-1], again[-1]
        assert isinstance(heard, Collect)
        assert isinstance(once_more, Collect)
        assert {one.kind for one in heard} == set(kinds)
        assert len(heard) == len(once_more)
        assert all(same(one, other) for one, other in zip(heard, once_more, strict=True))


@pytest.mark.parametrize("window", [1, 7, 100, 10**6])
def test_windows_end_between_pulses(tmp_path: Path, window: int) -> None:
    """However long they are; a section of steps has its rows."""
    train(tmp_path / "run.zarr", KEPT)
    with tracer.open(tmp_path / "run.zarr") as trace:
        whole = list(trace)
        found = [one for part in trace.windows(window) for one in part]
        assert len(found) == len(whole)
        assert all(map(same, found, whole))
        some = list(trace.messages(steps=(3, 5)))
        assert len(some) == sum(3 <= one.global_step < 5 for one in whole)
        assert [trace.before(count) for count in (0, 1, len(trace))] == [0, 0, len(trace)]


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_copies_are_as_compact(tmp_path: Path, suffix: str) -> None:
    """Also of some steps; of some kinds, only their rows are copied."""
    path = tmp_path / "run.zarr"
    train(path, KEPT)
    told = tracer.convert(path, tmp_path / f"all{suffix}")
    some = tracer.convert(path, tmp_path / f"some{suffix}", steps=(2, 6))
    chosen = tracer.convert(path, tmp_path / f"chosen{suffix}", kinds="weights_hash")
    with (
        tracer.open(path) as trace, tracer.open(tmp_path / f"all{suffix}") as copy,
        tracer.open(tmp_path / f"some{suffix}") as part, tracer.open(tmp_path / f"chosen{suffix}") as few,
    ):  # fmt: skip
        assert told["messages"] == len(trace) == len(copy)
        assert told["left_out"] == 0
        assert all(map(same, trace, copy))
        assert len(copy.folded()) == len(trace.folded())
        assert some["messages"] == len(part)
        assert some["left_out"] == len(trace) - len(part)
        assert all(map(same, trace.messages(steps=(2, 6)), part))
        assert chosen["messages"] == len(few) == 3 * STEPS
        assert all(map(same, trace.messages("weights_hash"), few))


def test_the_rows_of_a_step_that_never_ended(tmp_path: Path) -> None:
    """They are there, as are whole tensors that were seen."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RuntimeError, match="the program's own"),
        tracer.record(tmp_path / "run.zarr", model, optimizer, capture=KEPT),
    ):
        model(torch.randn(4, 3))
        raise RuntimeError("the program's own")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.kind for one in trace] == ["activations_statistics", "activations_hash"]


KILLED = """
import sys, os, signal
sys.path.insert(0, {folder!r})
from test_pulses import KEPT, Net
import torch, tracer
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = tracer.record({path!r}, model, optimizer, capture=KEPT, commit_steps=1).start()
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 6)).backward()
    optimizer.step()
    if step == 40:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_a_killed_run_has_whole_steps(tmp_path: Path, suffix: str) -> None:
    """A step has all its rows, or none."""
    path = tmp_path / f"run{suffix}"
    script = KILLED.format(folder=str(Path(__file__).parent), path=str(path))
    subprocess.run([sys.executable, "-c", script], check=False, timeout=300)
    with tracer.open(path) as trace:
        assert trace.status == "interrupted"
        steps = [one.global_step for one in trace.folded()]
        assert len(steps) > 20
        assert steps == sorted(steps)
        for one in trace:
            assert one.data is not None
        assert not tracer.verify(path).problems


# -- damage -------------------------------------------------------------------------------------------------------


def pulse(rows: int, sampling: dict[str, Any]) -> Message:
    """A pulse of zeros."""
    where = {"global_step": 0, "train_step": 0, "epoch": 0}
    return NetworkMessage(kind=PULSE, data=torch.zeros(rows, 3, dtype=torch.float64), sampling=sampling, **where)


TOLD = sampling_of(
    [PulseRow("weights_norms", "0", "", 0, None), PulseRow("weights_norms", "1", "", 2, {"reduce": "x"})], ["a"]
)


@pytest.mark.parametrize(
    "sampling",
    [
        {}, {"rows": TOLD["rows"]}, {**TOLD, "rows": 3}, {**TOLD, "rows": []}, {**TOLD, "rows": [[1, 2]]},
        {**TOLD, "rows": [["weights", "0", "", -1, 0]]}, {**TOLD, "rows": [["weights", "0", "", 0, 7]]},
        {**TOLD, "rows": [["", "0", "", 0, 0]]}, {**TOLD, "rows": [["weights", 5, "", 0, 0]]},
        {**TOLD, "samplings": [5, {}]}, {**TOLD, "samplings": None},
        {**TOLD, "samplings": [None, {"placement": 3}]},
    ],
)  # fmt: skip
def test_a_declaration_that_is_none_of_rows_is_damage(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """It is found when the trace is opened."""
    with TraceWriter(tmp_path / "run.zarr") as writer:
        writer.write(pulse(2, sampling))
    with pytest.raises(TraceCorruptError, match="declaration is damaged"):
        tracer.open(tmp_path / "run.zarr")


@pytest.mark.parametrize("rows", [1, 3])
def test_data_of_another_number_of_rows_is_damage(tmp_path: Path, rows: int) -> None:
    """It is found when the journal or its summary is read."""
    with TraceWriter(tmp_path / "run.zarr") as writer:
        writer.write(pulse(rows, TOLD))
    with tracer.open(tmp_path / "run.zarr") as trace, pytest.raises(TraceCorruptError, match="declared as 2 rows"):
        list(trace)
    with tracer.open(tmp_path / "run.zarr") as trace, pytest.raises(TraceCorruptError, match="declared as 2 rows"):
        _ = trace.streams


def test_many_sets_of_rows_share_an_array(tmp_path: Path) -> None:
    """A program whose steps all differ has few arrays."""
    with TraceWriter(tmp_path / "run.zarr") as writer:
        for count in range(1, 60):
            told = sampling_of(
                [PulseRow("weights_norms", str(number), "", 0, None) for number in range(count)], ["a", "b", "c"]
            )
            writer.write(pulse(count, told))
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert len(trace) == sum(range(1, 60))
        assert len(trace.streams) == 59
        assert len(set(trace.journal[:, Column.POOL].tolist())) == 17
        assert all(one.data is not None and one.data.shape == (3,) for one in trace)


# -- the bus ------------------------------------------------------------------------------------------------------


class Whole(Collect):
    """Takes pulses."""

    takes_pulses = True


def test_each_receiver_gets_rows_or_pulses() -> None:
    """As it `takes_pulses`."""
    bus = MessageBus()
    bus.register_topic(PULSE, "network")
    bus.register_topic("weights_norms", "module")
    whole, rows, others = Whole(), Collect("weights_norms"), Collect("loss")
    for one in (rows, whole, others):
        bus.register(one)
    assert bus.takes_pulses
    bus.publish(pulse(2, TOLD))
    assert [one.kind for one in whole] == [PULSE]
    assert not len(others)
    assert [(one.key, one.call, one.sampling) for one in rows] == [("0", 0, None), ("1", 2, {"reduce": "x"})]
    assert list(map(key, messages_of(whole.messages[0], enumerate(rows_of(TOLD))))) == list(map(key, rows))


def test_a_number_of_the_users_own_may_have_that_name(tmp_path: Path) -> None:
    """It is an ordinary message, for all receivers."""
    model, heard = nn.Linear(3, 2), Collect("pulse")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=KEPT, receivers=[heard]) as run:
        for step in range(3):
            model(torch.randn(4, 3)).sum().backward()
            run.log("pulse", 60.0 + step)
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.array("pulse")[1].tolist() == [60, 61, 62]  # type: ignore[union-attr]
        assert len([one for one in trace if one.kind == "weights_hash"]) == 3
    assert [float(one.data) for one in heard if one.data is not None] == [60, 61, 62]


def test_rows_on_a_device_stay_there() -> None:
    """All of them in one message of their own, so that nothing waits for the device; here, one without numbers."""
    bus, whole = MessageBus(), Whole()
    bus.register_topic(PULSE, "network")
    bus.register(whole)
    pulses, at = Pulses(bus, Problems(Clock(), strict=True)), At(3, 3, 0)
    for number in range(4):
        stream, device = StreamKey("weights", str(number), "default", ""), "meta" if number % 2 else "cpu"
        hashed = torch.zeros((), dtype=torch.int64, device=device)
        pulses.add(RowKind("hash", "weights_hash", None), stream, hashed, 0, at, 0)
        pulses.add(RowKind("statistics", "weights_statistics", None), stream, torch.zeros(16, device=device), 0, at, 0)
    pulses.step_over()
    found = [(one.leaf, one.call, one.data.device.type, len(one.data)) for one in whole if one.data is not None]
    assert found == [
        (leaf, call, device, 2) for call, device in enumerate(("cpu", "meta")) for leaf in ("hash", "statistics")
    ]


# -- the numbers --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 2**32), st.sampled_from([0.0, 1e3, 1e8]),
    st.sampled_from(["float32", "float16", "int64", "uint8", "bool"]),
)  # fmt: skip
def test_numbers_read_together_are_those_of_each(sizes: list[int], seed: int, far: float, dtype: str) -> None:
    """Equal bit by bit to those of one array; against sums in extended precision."""
    random = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        arrays = [(far + 10 * random.standard_normal(size)).astype(dtype) for size in sizes]
    arrays[0][:] = arrays[0][0]
    gathered = GatheredTensors()
    assert [gathered.add(one) for one in arrays] == list(range(len(arrays)))
    for array, row in zip(arrays, gathered.statistics(), strict=True):
        alone = statistics_of_many(array.astype(np.float64), np.zeros(1, np.int64))[0]
        assert row.tobytes() == alone.tobytes() == statistics_of(torch.from_numpy(array)).numpy().tobytes()
        wide = array.astype(np.longdouble)
        if np.isfinite(wide).all():
            named = dict(zip(ENTRIES, row.tolist(), strict=True))
            assert named["mean"] == pytest.approx(float(wide.mean()), rel=1e-12)
            assert named["norm"] == pytest.approx(float(np.sqrt((wide * wide).sum())), rel=1e-12)
            assert named["std"] == pytest.approx(
                float(wide.std(ddof=1)) if len(wide) > 1 else math.nan, rel=1e-9, abs=1e-9, nan_ok=True
            )
            assert (named["min"], named["max"]) == (float(wide.min()), float(wide.max()))
            assert named["zero"] == np.count_nonzero(wide == 0)


def test_more_than_the_buffer_holds() -> None:
    """Also with NaN and infinities."""
    arrays = [np.full(8000, number, np.float32) for number in range(40)]
    arrays[3][5], arrays[30][7] = np.nan, -np.inf
    gathered = GatheredTensors()
    for one in arrays:
        gathered.add(one)
    found = gathered.statistics()
    assert found.shape == (40, len(ENTRIES))
    assert gathered.count == 40
    assert found[[3, 30], 5:7].tolist() == [[1, 0], [0, 1]]
    assert found[:3, 0].tolist() == [0, 1, 2]
    gathered.clear()
    assert gathered.count == 0
    assert gathered.statistics().shape == (0, len(ENTRIES))
