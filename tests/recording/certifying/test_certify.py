"""The non-interference certificate for loops of one's own; also where the verdict is a bad one."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tracer
from tracer import Capture, CaptureError, Certificate, Message
from tracer.recording.certifying.certify import RehearsedSteps, Step, compare, fingerprint
from tracereel.main import main


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


def looping(
    steps: int = 4,
    after: Callable[[nn.Module, int], object] = lambda model, step: None,
    factor: Callable[[int], float] = lambda step: 1.0,
    **settings: Any,
) -> Any:
    """A training that takes some steps, and does something after each; its losses have a factor."""

    def train(record: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer, **settings):
            for step in range(steps):
                optimizer.zero_grad()
                (model(torch.randn(5, 4)).sum() * factor(step)).backward()
                optimizer.step()
                after(model, step)

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
    count = itertools.count()  # of all steps, of which each run takes four
    certificate = tracer.certify(looping(factor=lambda step: 1 + next(count) // 4 * (step == 2)), steps=4)
    assert (certificate.verdict, certificate.step) == ("nondeterministic", 2), certificate
    assert any(one.startswith("parameter") for one in certificate.differing)
    assert "two runs without a recorder differ" in certificate.reason


def test_what_the_recorder_changes_before_that_is_different_all_the_same() -> None:
    """A difference that comes before any between runs without a recorder is the recorder's."""
    one, noisy = [{"a": str(step)} for step in range(4)], [{"a": "0"}, {"a": "1"}, {"a": "2"}, {"a": "x"}]
    changed = [{"a": "0"}, {"a": "y"}, {"a": "2"}, {"a": "3"}]

    def steps(hashes: list[dict[str, str]]) -> RehearsedSteps:
        return RehearsedSteps([Step(one, cpu=0.0, wall=0.0, recorded=True) for one in hashes])

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

    def fail(model: nn.Module, step: int) -> None:
        raise RuntimeError("out of data")

    certificate = tracer.certify(looping(after=fail))
    assert certificate.verdict == "failed"
    assert certificate.reason == "without a recorder the training failed after step 0: RuntimeError: out of data"

    def notice(model: Any, step: int) -> None:
        if step == 1 and model[0]._forward_hooks:
            raise RuntimeError("I am watched")

    certificate = tracer.certify(looping(3, notice))
    assert certificate.verdict == "different"
    assert "with a recorder the training failed after step 1" in certificate.reason
    assert "I am watched" in certificate.reason

    assert tracer.certify(lambda record: None).verdict == "failed"
    certificate = tracer.certify(looping(capture=Capture(modules="encoder.*")))
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
        looping(2)(record)
        sys.exit(code)

    certificate = tracer.certify(train, steps=5)
    assert (certificate.verdict, certificate.steps) == (verdict, 2), certificate


@pytest.mark.filterwarnings("ignore:the recording to")
def test_steps_that_a_bound_leaves_out_do_not_count_as_recorded() -> None:
    """The overhead would be said to be that of recorded steps."""
    certificate = tracer.certify(looping(stop_at_bytes=1000), steps=4)
    assert certificate.identical, certificate
    assert (certificate.overhead["steps"], certificate.overhead["recorded_steps"]) == (3, 0)


def test_mean_where_only_some_steps_are_recorded() -> None:
    """A median would leave out the recorded steps: then the means are compared, and how many they are is told."""
    overhead = tracer.certify(looping(8, capture=Capture(every=3)), steps=8).overhead
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
