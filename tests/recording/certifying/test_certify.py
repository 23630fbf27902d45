"""The non-interference certificate: for loops of one's own, and for scripts; also where the verdict is a bad one.

One rehearsal, of a script that draws from all generators, is of a fresh interpreter, the others are of forked ones
(`tests.processes`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tracer
from tests import processes
from tracer import Capture, CaptureError, Certificate, Message
from tracer.recording.certifying.fingerprint import fingerprint
from tracer.recording.certifying.rehearsal import Request, certify_script, rehearse
from tracer.recording.certifying.verdict import Step, Steps, compare
from tracer.recording.launching.program import Program
from tracer.recording.options import Options
from tracereel.main import main

ROOT = Path(__file__).parents[3]


class Listener(tracer.Receiver):
    """A receiver that does something of its own with each message of a kind."""

    def __init__(self, work: Callable[[Message], object], kind: str = "activations") -> None:
        self._work = work
        self._kind = kind

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return kind == self._kind

    def receive(self, message: Message) -> Iterable[Message]:
        self._work(message)
        return ()


def net() -> nn.Sequential:
    """A network with an in-place operation, random numbers and buffers."""
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


def trainer(work: Callable[[Message, nn.Module], object] | None = None, kind: str = "activations") -> Any:
    """A training with shuffled data whose receiver does some work."""

    def train(record: Any) -> None:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loss = nn.CrossEntropyLoss()
        loader = DataLoader(TensorDataset(torch.randn(20, 4), torch.arange(20) % 3), batch_size=5, shuffle=True)
        receivers = [] if work is None else [Listener(lambda message: work(message, model), kind)]
        with record(model, optimizer, loss=loss, receivers=receivers) as run:
            run.probe("probe", torch.zeros(2, 4), every=2)
            for _ in range(3):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss(model(x), y).backward()
                    optimizer.step()
                    run.log("rate", 0.01)
                run.epoch_finished()

    return train


def test_recording_changes_nothing() -> None:
    """Everything is compared after each step; the overhead is measured; the generators are as they were."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    certificate = tracer.certify(trainer(), steps=5)
    assert (certificate.verdict, certificate.steps, certificate.step) == ("identical", 5, None), certificate
    assert certificate.identical
    overhead = certificate.overhead
    assert (overhead["steps"], overhead["recorded_steps"], overhead["average"]) == (4, 4, "median")
    assert overhead["cpu_ratio"] == overhead["recorded_cpu_seconds"] / overhead["bare_cpu_seconds"]
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])
    assert json.loads(json.dumps(certificate.describe()))["differing"] == []


def test_an_optimizer_around_another() -> None:
    """One that only wraps another, as accelerate's, takes no hooks: the other's steps are compared."""

    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

    def train(record: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, Around(optimizer)):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(5, 4)).sum().backward()
                optimizer.step()

    certificate = tracer.certify(train, steps=3)
    assert (certificate.verdict, certificate.steps) == ("identical", 3), certificate


def _draw(message: Message, model: nn.Module) -> None:
    if message.global_step == 2:
        torch.rand(1)


def _draw_numpy(message: Message, model: nn.Module) -> None:
    if message.global_step == 1:
        np.random.rand()  # noqa: NPY002


def _draw_python(message: Message, model: nn.Module) -> None:
    random.random()


def _write(message: Message, model: nn.Module) -> None:
    if message.global_step == 3:
        with torch.no_grad():
            model[4].bias[1] += 1e-6  # type: ignore[index, union-attr, operator]


def _write_buffer(message: Message, model: nn.Module) -> None:
    model[2].running_var.mul_(1 + 1e-6)  # type: ignore[union-attr, operator]


def _evaluate(message: Message, model: nn.Module) -> None:
    model.eval()


@pytest.mark.parametrize(
    ("work", "step", "first"),
    [
        (_draw, 2, "random generator of torch"),
        (_draw_numpy, 1, "random generator of numpy"),
        (_draw_python, 0, "random generator of python"),
        (_write, 3, "parameter '4.bias'"),
        (_write_buffer, 0, "buffer '2.running_var'"),
        (_evaluate, 0, "modes"),
    ],
)
def test_a_receiver_that_changes_the_training_is_found_out(
    work: Callable[[Message, nn.Module], None], step: int, first: str
) -> None:
    """Whatever it changes: the verdict names the step after which, and what."""
    certificate = tracer.certify(trainer(work, "batch_finished"), steps=5)
    assert (certificate.verdict, certificate.step) == ("different", step), certificate
    assert certificate.differing[0] == first
    assert not certificate.identical
    assert f"after step {step}" in certificate.reason


def test_a_receiver_that_changes_the_optimizer_is_found_out() -> None:
    """Its settings and its states are compared too."""

    def train(record: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def slow(message: Message) -> None:
            if message.global_step == 1:
                optimizer.param_groups[0]["lr"] = 0.05
            if message.global_step == 2:
                optimizer.state[model[0].weight]["momentum_buffer"].zero_()

        with record(model, optimizer, receivers=[Listener(slow, "batch_finished")]):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(5, 4)).sum().backward()
                optimizer.step()

    certificate = tracer.certify(train, steps=2)
    assert (certificate.verdict, certificate.step) == ("different", 1)
    assert certificate.differing == ("settings of the optimizer",)
    longer = tracer.certify(train, steps=3)
    assert (longer.step, longer.differing) == (1, ("settings of the optimizer",))


def test_a_training_that_differs_by_itself_is_nondeterministic() -> None:
    """It is no fault of the recorder's, and the verdict says so, and from which step on."""
    count = itertools.count()

    def train(record: Any) -> None:
        model, number = net(), next(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for step in range(4):
                optimizer.zero_grad()
                (model(torch.randn(5, 4)).sum() * (1 + number * (step == 2))).backward()
                optimizer.step()

    certificate = tracer.certify(train, steps=4)
    assert (certificate.verdict, certificate.step) == ("nondeterministic", 2), certificate
    assert any(one.startswith("parameter") for one in certificate.differing)
    assert "two runs without a recorder differ" in certificate.reason


def test_what_the_recorder_changes_before_that_is_different_all_the_same() -> None:
    """A difference that comes before any between runs without a recorder is the recorder's."""
    one, noisy = [{"a": str(step)} for step in range(4)], [{"a": "0"}, {"a": "1"}, {"a": "2"}, {"a": "x"}]
    changed = [{"a": "0"}, {"a": "y"}, {"a": "2"}, {"a": "3"}]

    def steps(hashes: list[dict[str, str]]) -> Steps:
        return Steps([Step(one, cpu=0.0, wall=0.0, recorded=True) for one in hashes])

    assert compare(steps(one), steps(changed), steps(noisy)).verdict == "different"
    assert compare(steps(one), steps(one), steps(noisy)).verdict == "nondeterministic"
    assert compare(steps(one), steps(one), steps(one)).verdict == "identical"
    short = compare(steps(one), steps(one[:2]), steps(one))
    assert (short.verdict, short.step, short.differing) == ("different", 2, ("the number of steps",))


def test_a_run_that_is_shorter() -> None:
    """It is compared as far as it goes; a single step has no overhead that could be told."""
    certificate = tracer.certify(trainer(), steps=1000)
    assert (certificate.verdict, certificate.steps) == ("identical", 12)
    one = tracer.certify(trainer(), steps=1)
    assert (one.verdict, one.steps, one.overhead) == ("identical", 1, {})


def test_a_training_that_fails() -> None:
    """Without a recorder: that is told. With one only: it is a difference. Without a step: nothing is compared."""

    def failing(record: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            raise RuntimeError("out of data")

    certificate = tracer.certify(failing)
    assert certificate.verdict == "failed"
    assert certificate.reason == "without a recorder the training failed after step 0: RuntimeError: out of data"

    def sensitive(record: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for step in range(3):
                model(torch.randn(5, 4)).sum().backward()
                optimizer.step()
                if step == 1 and model[0]._forward_hooks:
                    raise RuntimeError("I am watched")

    certificate = tracer.certify(sensitive)
    assert certificate.verdict == "different"
    assert "with a recorder the training failed after step 1" in certificate.reason
    assert "I am watched" in certificate.reason

    assert tracer.certify(lambda record: None).verdict == "failed"

    def unmatched(record: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer, capture=Capture(modules="encoder.*")):
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()

    certificate = tracer.certify(unmatched)
    assert certificate.verdict == "failed"
    assert "matches no module" in certificate.reason


@pytest.mark.parametrize("way", ["closure", "no optimizer", "run.step", "two optimizers"])
def test_loops_of_every_making(way: str) -> None:
    """Steps are those of the recording, also in loops that end them otherwise."""
    seen: list[int] = []

    def train(record: Any) -> None:
        model = net()
        parts = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[4].parameters(), lr=0.1)]
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        given = {"closure": lbfgs, "no optimizer": None, "run.step": (), "two optimizers": parts}[way]
        data = torch.randn(5, 4)

        def closure() -> Tensor:
            lbfgs.zero_grad()
            loss: Tensor = model(data).square().sum()
            loss.backward()
            return loss

        with record(model, given) as run:
            for step in range(6):
                if way == "closure":
                    lbfgs.step(closure)
                    assert run.global_step == step + 1
                    continue
                model.zero_grad()
                model(data).square().sum().backward()
                if way == "no optimizer" or way == "run.step":
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter -= 0.1 * parameter.grad
                    if way == "run.step":
                        run.step()
                        assert run.global_step == step + 1
                else:
                    for part in parts:
                        part.step()
        seen.append(1)

    certificate = tracer.certify(train, steps=4)
    assert (certificate.verdict, certificate.steps) == ("identical", 4), certificate
    whole = tracer.certify(train, steps=9)
    assert (whole.verdict, whole.steps) == ("identical", 6), whole
    assert len(seen) == 3


@pytest.mark.parametrize(("code", "verdict"), [(0, "identical"), (None, "identical"), (3, "failed")])
def test_a_training_that_exits_does_not_end_its_caller(code: int | None, verdict: str) -> None:
    """As scripts do: status 0 is an end, another one a failure."""

    def train(record: Any) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for _ in range(2):
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
        sys.exit(code)

    certificate = tracer.certify(train, steps=5)
    assert (certificate.verdict, certificate.steps) == (verdict, 2), certificate


@pytest.mark.filterwarnings("ignore:the recording to")
def test_steps_that_a_bound_leaves_out_do_not_count_as_recorded() -> None:
    """The overhead would be said to be that of recorded steps."""

    def train(record: Any) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer, stop_at_bytes=1000):
            for _ in range(4):
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()

    certificate = tracer.certify(train, steps=4)
    assert certificate.identical, certificate
    assert (certificate.overhead["steps"], certificate.overhead["recorded_steps"]) == (3, 0)


def test_mean_where_only_some_steps_are_recorded() -> None:
    """A median would leave out the recorded steps: then the means are compared, and how many they are is told."""

    def train(record: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer, capture=Capture(every=3)):
            for _ in range(8):
                optimizer.zero_grad()
                model(torch.randn(5, 4)).sum().backward()
                optimizer.step()

    overhead = tracer.certify(train, steps=8).overhead
    assert (overhead["steps"], overhead["recorded_steps"], overhead["average"]) == (7, 2, "mean")


def test_the_certificate_stands_in_the_trace(tmp_path: Path) -> None:
    """`tracer.record` keeps it, and ``info`` shows it, for people and as JSON."""
    certificate = tracer.certify(trainer(), steps=3)
    path = tmp_path / "run.zarr"
    trainer()(
        lambda *given, **more: tracer.record(
            path, *given, certificate=certificate, **{"capture": tracer.Capture(), **more}
        )
    )
    runner = CliRunner()
    told = json.loads(runner.invoke(main, ["info", str(path), "--json"]).stdout)["header"]["certificate"]
    assert told == certificate.describe()
    lines = runner.invoke(main, ["info", str(path)]).stdout.splitlines()
    (line,) = [one for one in lines if one.startswith("certified")]
    assert "identical: after each of 3 steps" in line
    assert f"CPU time ×{certificate.overhead['cpu_ratio']:.3f} over 2 steps, 2 of them recorded" in line


def test_info_shows_the_certificate_of_every_attempt(tmp_path: Path) -> None:
    """A resumed run that was not certified again does not hide what was said of the attempt before it."""
    path = tmp_path / "run.zarr"
    for certificate in (Certificate(verdict="identical", reason="so it was"), None):
        trainer()(
            lambda *given, one=certificate, **more: tracer.record(
                path, *given, certificate=one, resume=True, first_step=0, first_epoch=0, **more
            )
        )
    runner = CliRunner()
    told = json.loads(runner.invoke(main, ["info", str(path), "--json"]).stdout)
    assert told["header"].get("certificate") is None
    first, second = (one["certificate"] for one in told["attempts"])
    assert (first["verdict"], first["reason"], second) == ("identical", "so it was", None)
    lines = runner.invoke(main, ["info", str(path)]).stdout.splitlines()
    assert [one for one in lines if "so it was" in one] == ["certified   attempt 0: identical: so it was"]


def test_a_fingerprint_is_of_all_bits() -> None:
    """Signed zeros, dtypes, shapes and tensors of every sort count, and equal models have equal ones."""

    def told(value: Tensor) -> dict[str, str]:
        model = nn.Module()
        model.register_buffer("state", value)
        return fingerprint({"": model}, [])

    some: list[Tensor] = [
        torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor(0.0), torch.zeros(1, 1), torch.zeros(0),
        torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bfloat16), torch.tensor([True]),
        torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(), torch.ones(3).expand(2, 3), torch.eye(2).to_sparse(),
        torch.full((2,), float("nan")),
    ]  # fmt: skip
    hashes = [told(one)["buffer 'state'"] for one in some]
    assert len(set(hashes)) == len(some)
    assert hashes == [told(one.clone())["buffer 'state'"] for one in some]
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert [name for name in fingerprint({"": tied}, []) if "weight" in name] == ["parameter '0.weight'"]


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_how_many_steps(steps: Any) -> None:
    """A whole number from 1."""
    with pytest.raises(CaptureError, match="whole number from 1"):
        tracer.certify(trainer(), steps=steps)


# -- scripts ----------------------------------------------------------------------------------------------------------

HEAD = """
import os, random, sys, numpy, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
def train(after=lambda step: None):
    step = 0
    for epoch in range(2):
        for a, b in DataLoader(data, batch_size=8, shuffle=True):
            opt.zero_grad(); F.cross_entropy(net(a) * random.uniform(1, 2), b).backward(); opt.step()
            after(step)
            step += 1
"""


def record(
    folder: Path, body: str, *options: str, head: str = HEAD, fresh: bool = False
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    """Run ``trace record`` on a script; what it did, and the certificate in the trace."""
    (folder / "train.py").write_text(head + textwrap.dedent(body))
    run = subprocess.run if fresh else processes.run
    done = run(
        [sys.executable, "-m", "tracereel", "record", "--out", "run.zarr", *options, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if not (folder / "run.zarr").exists():
        return done, None
    with tracer.open(folder / "run.zarr") as trace:
        return done, trace.header.get("certificate")


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_script_without_seeds_is_certified(tmp_path: Path, fresh: bool) -> None:
    """It draws from all generators; the rehearsals begin alike, and print nothing; the real run is as without."""
    body = """
    train()
    numpy.random.rand()
    with open("ran", "a") as file: file.write(os.environ.get("TRACE_REHEARSAL", "real") + " ")
    print("done"); sys.exit(3)
    """
    done, told = record(tmp_path, body, "--certify", "4", "--every", "2", fresh=fresh)
    assert (done.returncode, done.stdout) == (3, "done\n"), done.stderr
    assert told is not None
    assert (told["verdict"], told["steps"], told["differing"]) == ("identical", 4, []), told
    assert (told["overhead"]["steps"], told["overhead"]["recorded_steps"]) == (3, 1)
    assert "certificate: identical: after each of 4 steps" in done.stderr
    assert (tmp_path / "ran").read_text() == "real "  # the rehearsals were left before that
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.info["steps"] == [0, 4]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ran", "run.zarr", "train.py"]


def test_a_rehearsal_begins_in_a_fresh_interpreter_as_in_a_forked_one(tmp_path: Path) -> None:
    """With the same generators and the same hash seed: what the script is like after each step is the same."""
    body = """
    begun = [hash("seeded"), random.random(), numpy.random.rand(), float(torch.rand(1))]
    with open("begun", "a") as file: print(begun, file=file)
    train()
    """
    (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(body).replace('"begun"', repr(str(tmp_path / "begun"))))
    program = Program(script=str(tmp_path / "train.py"))
    request = Request(program=program, settings=[{}], options=Options(), purpose="certify", steps=4)
    found = []
    for way in (contextlib.nullcontext, processes.forked):
        with way():
            steps, told = rehearse(request, tmp_path, recorded=way is not processes.forked)
        assert (steps.error, len(steps.taken), "left" in told) == (None, 4, True)
        found.append([one.hashes for one in steps.taken])
    assert found[0] == found[1]
    begun = (tmp_path / "begun").read_text().splitlines()
    assert (len(begun), len(set(begun))) == (2, 1)


def test_a_script_that_ends_before(tmp_path: Path) -> None:
    """It is compared as far as it goes."""
    done, told = record(tmp_path, "train()", "--certify", "100", "--require-identical")
    assert done.returncode == 0, done.stderr
    assert told is not None
    assert (told["verdict"], told["steps"]) == ("identical", 6)


def test_a_script_that_notices_the_recorder(tmp_path: Path) -> None:
    """It is recorded with a warning; or, if that was asked for, not run at all."""
    body = """
    def notice(step):
        if step == 1 and net[0]._forward_hooks: torch.rand(1)
    train(notice)
    """
    done, told = record(tmp_path, body, "--certify", "3")
    assert done.returncode == 0
    assert told is not None
    assert (told["verdict"], told["step"], told["differing"][0]) == ("different", 2, "random generator of torch")
    assert "Warning: certificate: different: with a recorder, after step 2 there differs random" in done.stderr
    done, _ = record(tmp_path, body + "open('ran', 'w')", "--certify", "4", "--require-identical", "--overwrite")
    assert done.returncode == 1
    assert "not run" in done.stderr
    assert not (tmp_path / "ran").exists()


def rehearsed(folder: Path, body: str, steps: int) -> Certificate:
    """The certificate of a script that is not run for real."""
    (folder / "train.py").write_text(HEAD + textwrap.dedent(body))
    with processes.forked():
        return certify_script(Program(script=str(folder / "train.py")), [{}], Options(), steps)


def test_a_script_that_differs_by_itself(tmp_path: Path) -> None:
    """Which seeds with the clock: no verdict is possible, and the sentence says why."""
    certificate = rehearsed(tmp_path, "import time; torch.manual_seed(time.time_ns()); train()", 2)
    assert (certificate.verdict, certificate.step) == ("nondeterministic", 0)
    assert "two runs without a recorder differ after step 0" in certificate.reason


def test_a_script_that_fails(tmp_path: Path) -> None:
    """The verdict says what came of the rehearsal, and of the script that goes on after it was told to end."""
    body = """
    def fail(step):
        if step == 1: raise ValueError("bad data")
    try: train()
    except SystemExit: pass
    train(fail)
    """
    certificate = rehearsed(tmp_path, body, 4)
    assert (certificate.verdict, certificate.steps) == ("identical", 4)
    certificate = rehearsed(tmp_path, body, 100)
    assert certificate.verdict == "failed"
    assert certificate.reason.endswith("failed after step 7: ValueError: bad data (exit status 1)")


@pytest.mark.parametrize("changed", [False, True])
def test_a_script_that_updates_by_hand(tmp_path: Path, changed: bool) -> None:
    """Without an optimizer each backward is a step; what it differentiated is compared, and its gradients."""
    body = f"""
    import torch
    weight, bias = torch.ones(4, 3, requires_grad=True), torch.nn.Parameter(torch.zeros(3))
    watched = hasattr(getattr(torch.Tensor.backward, "__wrapped__", None), "__wrapped__")
    for _ in range(4):
        loss = (torch.ones(5, 4) @ weight * (1.5 if watched and {changed} else 1.0) + bias).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for one in (weight, bias): one -= 0.01 * one.grad; one.grad = None
    """
    done, certificate = record(tmp_path, body, "--certify", "3", head="")
    assert certificate is not None, done.stderr
    assert (certificate["verdict"], certificate["steps"]) == ("different" if changed else "identical", 3), certificate
    if changed:
        assert certificate["step"] == 0
        assert certificate["differing"] == [f"buffer 'gradient of parameters.{number}'" for number in range(2)]


def test_a_script_that_trains_nothing(tmp_path: Path) -> None:
    """Nothing can be compared, and the real run says so too."""
    certificate = rehearsed(tmp_path, "print(1)", 2)
    assert certificate.verdict == "failed"
    assert certificate.reason.startswith("no training step was seen: ")
    assert "its optimizer never stepped" in certificate.reason


def test_options_that_do_not_go_together() -> None:
    """Wrong usage is a sentence, before anything runs."""
    script = str(ROOT / "examples/digits.py")
    for arguments, sentence in (
        (["--require-identical"], "--certify N"),
        (["--certify", "0"], "0 is not in the range"),
        (["--run-steps", "5"], "--dry-run"),
        (["--json"], "--dry-run"),
        (["--dry-run", "--certify", "2"], "--certify or --dry-run"),
    ):
        done = CliRunner().invoke(main, ["record", *arguments, script])
        assert (done.exit_code, sentence in done.output) == (2, True), done.output


def test_a_dry_run_of_torchrun_is_refused_before_it_is_started() -> None:
    """One sentence, and not one of each rank."""
    done = CliRunner().invoke(main, ["record", "--dry-run", "torchrun", "--nproc-per-node", "2", "train.py"])
    assert (done.exit_code, "give it without torchrun" in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    ("number", "begin"),
    [
        (signal.SIGTERM, processes.Popen),
        (signal.SIGINT, processes.Popen),
        pytest.param(signal.SIGTERM, subprocess.Popen, marks=pytest.mark.slow),
    ],
)
def test_who_ends_a_rehearsal_ends_its_process(number: signal.Signals, begin: Any, tmp_path: Path) -> None:
    """The script's process does not go on by itself, and nothing is left behind."""
    body = "import time; open('pid', 'w').write(str(os.getpid())); time.sleep(300)"
    (tmp_path / "train.py").write_text(HEAD + body)
    (tmp_path / "temporary").mkdir()
    asked = begin(
        [sys.executable, "-m", "tracereel", "record", "--certify", "3", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")},
        start_new_session=True,
    )
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()) and asked.poll() is None:
        time.sleep(0.05)
    asked.send_signal(number)
    assert asked.wait(60) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not [*(tmp_path / "temporary").glob("trace-*")]
    assert not (tmp_path / "train.zarr").exists()


RANKS = """
import os, sys, torch, tracer, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
def train(record=None):
    if record: torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2))
    model = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    def steps():
        for step in range(6):
            opt.zero_grad()
            model(torch.full((2, 3), float(rank + step))).square().mean().backward()
            opt.step()
            if "notice" in sys.argv and rank == 1 and step == 1 and net[0]._forward_hooks: torch.rand(1)
            if "fail" in sys.argv and rank == 1 and step == 1 and net[0]._forward_hooks: raise ValueError("bad data")
    if record is None: return steps()
    with record(model, opt): steps()
if "inside" in sys.argv:
    certificate = tracer.certify(train, steps=3)
    train(lambda *given: tracer.record("run.zarr", *given, certificate=certificate, capture=tracer.Capture()))
else:
    train()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
@pytest.mark.parametrize(
    ("way", "verdict", "sentence"),
    [
        (
            "alike",
            "identical",
            "after each of 4 steps all bits were the same with and without a recorder, on each of 2 ",
        ),
        ("inside", "identical", "after each of 3 steps all bits were the same with and without a recorder"),
        pytest.param("notice", "different", "on rank 1, with a recorder, after step 2 ", marks=pytest.mark.slow),
        pytest.param("fail", "different", "on rank 1, with a recorder the training failed ", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_are_certified_together(tmp_path: Path, way: str, verdict: str, sentence: str) -> None:
    """Each rehearses with the other, and all say the worst; ranks can also certify a training of their own."""
    (tmp_path / "train.py").write_text(RANKS)
    required = ["--require-identical"] if way == "fail" else []
    record = ["-m", "tracereel", "record", "--out", "run.zarr", "--certify", "4", *required]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = processes.run(
        [sys.executable, *launch, *(record if way != "inside" else []), "train.py", way],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if way == "fail":
        assert (done.returncode, (tmp_path / "run.zarr").exists()) == (1, False), done.stderr
        assert f"certificate: {verdict}: {sentence}after step 1, and without it did not: ValueError" in done.stderr
        assert "the script is not run" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert (trace.ranks, trace.problems) == ([0, 1], [])
        certificate = trace.attempts[0]["certificate"]
        assert certificate["verdict"] == verdict, certificate
        assert certificate["reason"].startswith(sentence), certificate
        if way == "notice":
            assert certificate["differing"][0] == "random generator of torch"


def test_what_is_certified_is_the_run_that_follows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rehearsal has all options of the recording, those too that say how much is written, and by which rank."""
    (tmp_path / "train.py").write_text(HEAD)
    certificate = Certificate(verdict="identical", reason="", steps=2)
    asked: list[Options] = []

    def certify(program: Program, settings: Any, options: Options, steps: int) -> Certificate:
        asked.append(options)
        return certificate

    def run(program: Program, *, options: Options, **_: Any) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr("tracer.recording.certifying.rehearsal.certify_script", certify)
    monkeypatch.setattr("tracer.recording.launching.script.run", run)
    options = ["--replicated", "every", "--max-bytes", "5MB", "--on-full", "drop", "--commit-steps", "3", "--durable"]
    given = {"replicated": "every", "max_bytes": 5_000_000, "on_full": "drop", "commit_steps": 3, "durable": True}
    arguments = ["record", "--certify", "2", *options, str(tmp_path / "train.py")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    rehearsed, run_afterwards = asked
    assert {name: getattr(rehearsed, name) for name in given} == given
    assert run_afterwards == replace(rehearsed, certificate=certificate)


def test_one_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the ranks cannot meet, rehearsals would wait for each other: what to do instead is said."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HEAD)
    for arguments, instead in ((["--certify", "2"], "start it with torchrun"), (["--dry-run"], "a run of one process")):
        done = CliRunner().invoke(main, ["record", *arguments, "train.py"])
        assert done.exit_code == 2
        assert "this is rank 1 of 2" in done.output
        assert instead in " ".join(done.output.split())


def test_a_certificate_as_a_sentence() -> None:
    """The verdict, the reason, and what it costs if that was measured."""
    bare = Certificate(verdict="failed", reason="no")
    assert str(bare) == "failed: no"
    assert "×2.000 over 3 steps" in str(
        Certificate(
            verdict="identical",
            reason="yes",
            overhead={"cpu_ratio": 2.0, "steps": 3, "recorded_steps": 3, "bare_ratio": 1.0},
        )
    )
