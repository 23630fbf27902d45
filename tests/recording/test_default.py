"""What is recorded where nobody says what is to be recorded: the profile ``standard``."""

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import tracer
from tests.recording.launching.recorded_programs import Ended, trace
from tracer import Capture, CaptureError
from tracer.observing.probes import ProbePlan
from tracer.observing.profiles import options_of
from tracer.recording.checks import seconds_of
from tracer.recording.options import Options
from tracer.stores.locations import location
from tracereel.recording import _say_what_was_recorded

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randint(3, (64,))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer, loss = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
for step in range(104):
    optimizer.zero_grad()
    loss(model(x[step % 4 * 16:][:16]), y[step % 4 * 16:][:16]).backward()
    optimizer.step()
"""


def train(path: Path, steps: int = 4, **options: Any) -> tracer.TraceReader:
    """A recorded training of a small network, and its trace."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    with tracer.record(path, model, optimizer, loss=nn.functional.cross_entropy, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return tracer.open(path)


def command(folder: Path, *arguments: str, **environment: str) -> Ended:
    """The exit code, stdout and stderr of ``trace``, in an environment that names no profile."""
    with mock.patch.dict(os.environ):
        os.environ.pop("TRACE_RECORD_PROFILE", None)
        return trace(folder, *arguments, **environment)


def test_record_without_a_capture_is_standard(tmp_path: Path) -> None:
    """With its captures and its bound, and without a forward of its own."""
    with train(tmp_path / "run.zarr") as trace:
        assert trace.header["capture"] == [one.describe() for one in tracer.profile("standard")]
        assert trace.header["recording"]["max_overhead"] == 0.05
        kinds = {(one.kind, one.tag) for one in trace.streams}
    assert {("weights_hash", "default"), ("keyframe", "default")} <= kinds
    assert ("activations", "default") not in kinds
    assert {tag for _, tag in kinds} == {"default"}


def test_what_is_given_is_all_that_is_recorded(tmp_path: Path) -> None:
    """A capture of one's own has no bound and no probe."""
    with train(tmp_path / "run.zarr", capture=Capture()) as trace:
        assert trace.header["recording"]["max_overhead"] is None
        assert {one.tag for one in trace.streams} == {"default"}
        assert trace.array("activations", "0")[1].shape == (4, 16, 8)


def test_a_bound_that_is_given_holds_from_the_first_second() -> None:
    """Only the profile's own has a credit."""
    assert Options().of_profile("standard").overhead_credit == options_of("standard")["overhead_credit"] > 0
    given = Options(max_overhead=0.03).of_profile("standard")
    assert (given.max_overhead, given.overhead_credit) == (0.03, None)
    assert Options().of_profile("full") == Options().of_profile("light") == Options()


def test_a_probe_of_the_users_own_takes_the_place_of_the_defaults(tmp_path: Path) -> None:
    """It has the same tag."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = torch.randn(5, 6)
    with tracer.record(tmp_path / "run.zarr", model, optimizer) as run:
        run.probe("probe", mine, torch.zeros(5, dtype=torch.int64), every=1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(7, 6)).sum().backward()
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps, kept = trace.array("activations", "", tag="probe")
        assert kept.shape == (4, 5, 3)
        assert trace.array("input_labels", None, tag="probe")[1].shape == (4, 5)
        assert len(steps) == 4


# -- large tensors ------------------------------------------------------------------------------------------------


def test_of_a_large_tensor_the_hash_is_kept(tmp_path: Path) -> None:
    """Of small ones of the same stream, the data."""
    import xxhash

    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(rows, 6) for rows in (4, 5, 4)]
    capture = Capture(kinds=["input_data"], hash_above=4 * 6 * 4)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture):
        for batch in batches:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps, kept = trace.array("input_data", None)
        assert (steps.tolist(), kept.shape) == ([0, 2], (2, 4, 6))
        steps, hashes = trace.array("input_data_hash", None)
    whole = xxhash.xxh3_64(b"float32 [5, 6]\n")
    whole.update(xxhash.xxh3_64_digest(batches[1].numpy().tobytes()))
    assert steps.tolist() == [1]
    assert hashes.tolist() == [int.from_bytes(whole.digest(), "big", signed=True)]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kinds": ["weights"]}, "hash_above is of input_data, input_labels, network_output, not of weights"),
        ({"kinds": ["input_data"], "reduce": "norm"}, "leave out reduce"),
        ({"kinds": ["input_data"], "condition": bool}, "leave out condition"),
        ({"kinds": ["input_data"], "hash_above": -1}, "hash_above of a capture is an integer of at least 0, not -1"),
    ],
)
def test_bad_limits(given: dict[str, Any], sentence: str) -> None:
    """A sentence that names what is wrong."""
    with pytest.raises(CaptureError, match=sentence):
        Capture(**{"hash_above": 100, **given})


def test_a_flight_recorder_holds_tensors_whole() -> None:
    """So no hash can stand in for them."""
    with pytest.raises(CaptureError, match="leave out hash_above"):
        tracer.Flight(capture=Capture(kinds=["input_data"], hash_above=100))


# -- the command --------------------------------------------------------------------------------------------------


def test_the_advice_at_the_end_can_be_typed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The credit that every step would take is a time that `--overhead-credit` reads, however long it is."""
    with tracer.TraceWriter(tmp_path / "run.zarr") as writer:
        for step in range(1000):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(tracer.NetworkMessage(kind="loss", data=torch.tensor(1.0), **where))
            if step % 100 == 0:
                data = torch.ones(16, dtype=torch.float64)
                writer.write(tracer.ModuleMessage(kind="weights_statistics", module="fc", data=data, **where))
        bound = {"max_overhead": 0.05, "overhead_credit": 30.0}
        writer.note({"overhead": {"recording_seconds": 2000.0, "process_seconds": 9000.0, **bound}})
    _say_what_was_recorded(location(tmp_path / "run.zarr"), "run.zarr")
    (advice,) = re.findall(r"add --overhead-credit (\S+);", capfd.readouterr().err)
    assert seconds_of(advice) == pytest.approx(1.2 * 2000 * 1000 / 10)


def test_the_missions_commands(tmp_path: Path) -> None:
    """``trace record`` without options; what is asked of its trace later has an answer."""
    (tmp_path / "train.py").write_text(SCRIPT)
    code, _, errors = command(tmp_path, "record", "train.py")
    assert code == 0
    assert errors.startswith("recording the profile standard: ")
    assert "as many steps as 5% of the training's time allow" in errors
    said = re.search(
        r"recorded 104 steps; numbers of every layer at (every step|\d+ of them); recording took [\d.]+ of [\d.]+ s "
        r"of CPU time \(the first 30 s are free\)(; for every step, add --overhead-credit \d+s)?; .* trace info train",
        errors,
    )
    assert said, errors
    with tracer.open(tmp_path / "train.zarr") as trace:
        steps = max(one.count for one in trace.streams if one.kind == "weights_statistics")
        (spent,) = [note["overhead"] for note in trace.notes if "overhead" in note]
    assert said[1] == ("every step" if steps == 104 else f"{steps} of them")
    assert (said[2] is None) == (steps == 104)
    assert 0 < spent["recording_seconds"] < spent["process_seconds"]
    assert (spent["max_overhead"], spent["overhead_credit"]) == (0.05, 30.0)
    spectral = _values(tmp_path, "spectral_norm")
    assert {one["global_step"] for one in spectral} == {
        step for step in (0, 50, 100) if step % _apart(tmp_path, step) == 0
    }
    for metric in ("ratio", "norm", "activation_rate"):
        assert _values(tmp_path, metric)
    code, _, errors = command(tmp_path, "replay", "train.zarr", "-s", "svcca")
    assert code == 2
    assert "trace record --probe N" in errors
    code, _, errors = command(tmp_path, "record", "--overwrite", "--probe", "64", "--probe-every", "50", "train.py")
    assert code == 0, errors
    alike = [one for one in _values(tmp_path, "svcca") if one["kind"] == "activations_svcca"]
    assert {one["global_step"] for one in alike} == {100, 104}


def _apart(folder: Path, step: int) -> int:
    """How far apart keyframes' weights are at a step, by the trace's own notes: a busy machine widens the 50."""
    with tracer.open(folder / "train.zarr") as trace:
        (place,) = [number for number, one in enumerate(trace.header["capture"]) if "optimizer_state" in one["kinds"]]
        told = [note["schedule"] for note in trace.notes if "schedule" in note]
    changes = [(one["global_step"], change) for one in told for change in one.get("captures", ())]
    return [50, *(one["every"][1] for at, one in changes if one["capture"] == place and at <= step)][-1]


def _values(folder: Path, metric: str) -> list[dict[str, Any]]:
    code, out, errors = command(folder, "replay", "train.zarr", "-s", metric, "--json")
    assert code == 0, errors
    return [json.loads(line) for line in out.splitlines()]


def test_what_options_say_is_recorded_takes_the_place_of_the_default(tmp_path: Path) -> None:
    """Also that of a profile that the environment names."""
    (tmp_path / "train.py").write_text(SCRIPT)
    for number, environment in enumerate(({}, {"TRACE_RECORD_PROFILE": "light"})):
        path = f"{number}.zarr"
        code, _, errors = command(tmp_path, "record", "--out", path, "-k", "weights", "train.py", **environment)
        assert code == 0, errors
        with tracer.open(tmp_path / path) as trace:
            assert {one.kind for one in trace.streams} == {"weights"}
    code, _, errors = command(tmp_path, "record", "--profile", "light", "-k", "weights", "train.py")
    assert code == 2
    assert "--profile light says what is recorded, and --kind does, too" in errors


def test_no_probe(tmp_path: Path) -> None:
    """``--probe 0``."""
    (tmp_path / "train.py").write_text(SCRIPT)
    code, _, errors = command(tmp_path, "record", "--probe", "0", "train.py")
    assert code == 0, errors
    with tracer.open(tmp_path / "train.zarr") as trace:
        assert {one.tag for one in trace.streams} == {"default"}
    assert not ProbePlan(0)


def test_a_probe_ends_no_epoch(tmp_path: Path) -> None:
    """Of a script that draws a batch ahead, epochs end when the model has had as many batches; a probe has none."""
    (tmp_path / "train.py").write_text(AHEAD)
    code, _, errors = command(tmp_path, "record", "--probe", "4", "--probe-every", "3", "train.py")
    assert code == 0, errors
    with tracer.open(tmp_path / "train.zarr") as trace:
        ends = [one.global_step for one in trace.messages(kinds=["epoch_finished"])]
        assert [one for one in trace.streams if one.tag == "probe"]
    assert ends == [4, 9, 14]


AHEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(40, 6))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def ahead(loader):
    before = None
    for batch in loader:
        if before is not None:
            yield before
        before = batch
    yield before
for epoch in range(3):
    for (x,) in ahead(DataLoader(data, 8)):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""


class Zeros(tracer.Subscriber):
    """The share of zeros in activations."""

    scope = "message"

    def __init__(self, tag: str) -> None:
        super().__init__(tracer.Subscription("activations", tag), produces="zeros")

    def compute(self, message: tracer.Message) -> Any:
        yield tracer.derived(message, "zeros", (message.data == 0).double().mean())


def test_a_receiver_that_would_hear_nothing_is_refused(tmp_path: Path) -> None:
    """Of activations the default has data of probes only, if there is a probe."""
    with pytest.raises(CaptureError, match=r"Zeros needs activations \(tag default; there is tag probe\)"):
        train(tmp_path / "run.zarr", receivers=[Zeros("default")])
    for number, tag in enumerate(("probe", "probe*")):
        heard = tracer.Collect("zeros")
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tracer.record(tmp_path / f"{number}.zarr", model, optimizer, receivers=[Zeros(tag), heard]) as run:
            run.probe("probe", torch.randn(4, 6))
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
        assert {one.tag for one in heard} == {"probe"}
    heard = tracer.Collect("zeros")
    train(tmp_path / "all.zarr", receivers=[Zeros("default"), heard], capture=Capture())
    assert len(heard) == 12


def test_a_dry_run_tells_of_the_bound(tmp_path: Path) -> None:
    """Its estimate is of what was asked for, and bounds come on top of that."""
    (tmp_path / "train.py").write_text(SCRIPT)
    code, out, errors = command(tmp_path, "record", "--dry-run", "train.py")
    assert code == 0, errors
    assert "--max-overhead 5%: if that is more, some steps are left out" in out
    assert 'reduce = "sketch:k=256"' in out
    settings = out.split("as a file for --config:")[1]
    (tmp_path / "own.toml").write_text(settings)
    code, _, errors = command(tmp_path, "record", "--config", "own.toml", "train.py")
    assert code == 0, errors
    with tracer.open(tmp_path / "train.zarr") as trace:
        assert trace.header["capture"] == [one.describe() for one in tracer.profile("standard")]


@pytest.mark.parametrize("profile", ["light", "standard", "full"])
def test_hooks_of_the_program_hear_its_forwards_only(tmp_path: Path, profile: str) -> None:
    """No profile calls the model, before, within or after the training."""
    lengths = []
    for recorded in (False, True):
        heard: list[bool] = []
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        for one in model.modules():
            one.register_forward_hook(lambda module, args, output, heard=heard: heard.append(module.training))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=profile) if recorded else nullcontext():
            for _ in range(60):  # with two keyframes
                optimizer.zero_grad()
                model(torch.randn(7, 6)).sum().backward()
                optimizer.step()
            model.eval()
            model(torch.randn(7, 6))
        lengths.append(heard)
    assert lengths[0] == lengths[1]
    assert len(lengths[0]) == 61 * 3
