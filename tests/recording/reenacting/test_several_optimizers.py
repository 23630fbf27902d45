"""Trainings with several optimizers, run again from their first step on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tests.recording.launching.recorded_programs import trace
from tests.recording.reenacting.conftest import KEYFRAMES
from tests.recording.reenacting.scripts import HEAD
from tests.recording.reenacting.test_reenact import again, values
from tracer.messaging.messages import STATE_KINDS
from tracer.observing.reductions import hash_of

MODELS = {
    "two models": """
generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
""",
    "one container": """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
both = Both()
generator, critic = both.generator, both.critic
""",
}
MAKES = "makes = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))\n"
JUDGES = "judges = torch.optim.SGD(critic.parameters(), lr=0.02, momentum=0.9)\n"
MADE = {"generator's made first": MAKES + JUDGES, "critic's made first": JUDGES + MAKES}
DATA = "data, criterion = torch.randn(45, 6), nn.BCEWithLogitsLoss()\n"
LOADED = """
slower = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (makes, judges)]
for epoch in range(3):
    for (real,) in DataLoader(TensorDataset(data), 8, shuffle=True):
"""
DRAWN = """
slower = []
for step in range(18):
    if True:
        real = data[torch.randint(0, 45, (8,))]
"""
JUDGED = """
        judges.zero_grad()
        criterion(critic(real), torch.ones(len(real), 1)).backward()
        criterion(critic(fake.detach()), torch.zeros(len(real), 1)).backward()
        judges.step()
"""
MADE_UP = "        fake = generator(torch.randn(len(real), 3))\n"
MAKING = """
        makes.zero_grad()
        criterion(critic(fake), torch.ones(len(real), 1)).backward()
        makes.step()
"""
SLOWER = "        for one in slower: one.step()\n"
STEPPING = {
    "critic first, one forward": LOADED + MADE_UP + JUDGED + MAKING + SLOWER,
    "critic first, a forward each": DRAWN + MADE_UP + JUDGED + MADE_UP + MAKING,
    "generator first": LOADED + MADE_UP + MAKING + JUDGED + SLOWER,
}


def recorded(folder: Path, text: str, *words: str) -> None:
    """Record a script once as the words say and once in full."""
    (folder / "train.py").write_text(HEAD + text)
    for out, how in (("run.zarr", words), ("full.zarr", ())):
        done = trace(folder, "record", *how, "--out", out, "train.py")
        assert done.returncode == 0, done.stderr


def keyframes(folder: Path) -> list[int]:
    """The steps that have one."""
    with tracer.open(folder / "run.zarr") as reader:
        return [one.global_step for one in reader.messages("keyframe")]


def run_again(folder: Path, steps: tuple[int, int]) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """The verdict of steps run again, the hashes of what a full recording has of them, and of what they gave."""
    done = again(folder, "--steps", "{}:{}".format(*steps), "--out", "again.zarr", "--json", "train.py")
    assert done.returncode in (0, 7), done.stdout + done.stderr
    hashes = [
        {place: hash_of(data) for place, data in values(folder / name, steps).items()}
        for name in ("full.zarr", "again.zarr")
    ]
    return json.loads(done.stdout), *hashes


@pytest.mark.parametrize(
    ("models", "made", "stepping"),
    [  # each with each other once
        (models, [*MADE][(place + number) % 2], stepping)
        for place, models in enumerate(MODELS)
        for number, stepping in enumerate(STEPPING)
    ],
)
def test_steps_come_back_from_the_first_one_on(models: str, made: str, stepping: str, tmp_path: Path) -> None:
    """Whichever optimizer was made first, and whichever steps first; every value is that of a full recording."""
    (tmp_path / "keyframes.json").write_text(json.dumps(KEYFRAMES))
    recorded(tmp_path, DATA + MODELS[models] + MADE[made] + STEPPING[stepping], "--config", "keyframes.json")
    assert keyframes(tmp_path) == [0, 10]
    with tracer.open(tmp_path / "full.zarr") as reader:
        steppers = {step: set() for step in range(18)}
        for one in reader.messages("weight_updates"):
            steppers[one.global_step].add(one.key.partition(".")[0])
        assert all(there == {"generator", "critic"} for there in steppers.values()), "an iteration is a step"
    for steps, keyframe in (((0, 5), 0), ((12, 14), 10)):
        verdict, expected, found = run_again(tmp_path, steps)
        assert verdict["identical"]
        assert verdict["keyframe"] == keyframe
        assert verdict["compared"] == verdict["equal"] >= 40 * (steps[1] - keyframe)
        assert found == expected


def test_the_default_brings_back_the_first_steps(tmp_path: Path) -> None:
    """What ``trace record`` keeps without options, of optimizers that step in another order than they were made."""
    text = MODELS["one container"] + MADE["generator's made first"] + STEPPING["critic first, one forward"]
    recorded(tmp_path, DATA + text, "--profile", "standard")
    verdict, expected, found = run_again(tmp_path, (0, 12))
    assert verdict["outcome"] in ("identical", "partial")  # on a busy machine, some steps have no hashes
    assert verdict["keyframe"] == 0
    assert found == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("both = Both()", "    def forward(self, noise): return self.generator(noise)\nboth = Both()"),
        ("both = Both()", "        self.scale = nn.Parameter(torch.ones(()))\nboth = Both()"),
    ],
    ids=["a forward that is not called", "a parameter of its own"],
)
def test_parts_that_are_called_beside_the_model_are_a_sentence(old: str, new: str, tmp_path: Path) -> None:
    """What they were given is not recorded, so no step can be run again."""
    text = MODELS["one container"].replace(old, new) + MADE["critic's made first"]
    recorded(tmp_path, DATA + text + STEPPING["critic first, one forward"], "--profile", "standard")
    done = again(tmp_path, "--steps", "0:2", "train.py")
    assert done.returncode == 2
    assert "has no input_data: the model itself was never called, only parts of it" in done.stderr


CRITICS = """
for step in range(18):
    real = data[torch.randint(0, 45, (8,))]
    judges.zero_grad()
    fake = generator(torch.randn(8, 3)).detach()
    (critic(fake).mean() - critic(real).mean()).backward()
    judges.step()
    if step % 3 == 2:
        makes.zero_grad()
        (-critic(generator(torch.randn(8, 3))).mean()).backward()
        makes.step()
"""


@pytest.mark.parametrize("made", MADE)
def test_a_keyframe_has_what_did_not_step(made: str, tmp_path: Path) -> None:
    """Where the generator steps now and then; its weights and states are compared where they were kept."""
    (tmp_path / "keyframes.json").write_text(json.dumps(KEYFRAMES))
    recorded(tmp_path, DATA + MODELS["two models"] + MADE[made] + CRITICS, "--config", "keyframes.json")
    assert keyframes(tmp_path)[0] == 0
    with tracer.open(tmp_path / "run.zarr") as reader:
        kept = {one.key for one in reader.messages("weights", steps=(0, 1)) if one.key is not None}
        moved = {one.key for one in reader.messages("weight_updates_hash", steps=(0, 1))}
    assert kept == {"generator.0", "generator.1", "generator.3", "critic.0", "critic.3"}
    assert moved == {"critic.0", "critic.3"}
    verdict, expected, found = run_again(tmp_path, (0, 4))
    assert verdict["identical"]
    assert verdict["compared"] == verdict["equal"] > 100
    assert expected.items() <= found.items()
    assert {place[1] for place in found.keys() - expected.keys()} <= kept - moved


def gan() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
    """A generator and a critic, and an optimizer of each, in the order in which they step."""
    generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    judges = torch.optim.SGD(critic.parameters(), lr=0.02, momentum=0.9)
    makes = torch.optim.Adam(generator.parameters(), lr=0.01)
    return nn.ModuleDict({"generator": generator, "critic": critic}), [judges, makes]


def iteration(criterion: Callable[..., Any]) -> Callable[..., None]:
    """A step of a GAN, which gets noise and real datapoints."""

    def step(both: Any, optimizers: Any, inputs: dict[str, torch.Tensor], _: Any) -> None:
        judges, makes = optimizers
        noise, real = inputs["generator"], inputs["critic"]
        judges.zero_grad()
        criterion(both["critic"](real), torch.ones(len(real), 1)).backward()
        fake = both["generator"](noise)
        criterion(both["critic"](fake.detach()), torch.zeros(len(real), 1)).backward()
        judges.step()
        makes.zero_grad()
        criterion(both["critic"](fake), torch.ones(len(real), 1)).backward()
        makes.step()

    return step


def test_a_function_takes_the_first_steps_of_two_optimizers_again(tmp_path: Path) -> None:
    """By `tracer.record` and `tracer.reenact`, of models in a dictionary that is never called."""
    criterion = nn.BCEWithLogitsLoss()
    step = iteration(criterion)
    for path, capture in (("run.zarr", "standard"), ("full.zarr", "full")):
        torch.manual_seed(0)
        both, optimizers = gan()
        with tracer.record(tmp_path / path, both, optimizers, loss=criterion, capture=capture):
            for _ in range(6):
                step(both, optimizers, {"generator": torch.randn(5, 3), "critic": torch.randn(5, 6)}, None)
    verdict = tracer.reenact(
        tmp_path / "run.zarr", *gan(), step, steps=(0, 5), loss=criterion, out=tmp_path / "again.zarr"
    )
    assert verdict.identical
    assert verdict.keyframe == 0
    assert verdict.compared == verdict.equal > 40
    expected, found = (values(tmp_path / name, (0, 5)) for name in ("full.zarr", "again.zarr"))
    assert found.keys() == expected.keys()
    assert all(hash_of(found[place]) == hash_of(data) for place, data in expected.items())


def test_a_keyframe_of_optimizers_that_were_given_in_another_order(tmp_path: Path) -> None:
    """A step ends with the one that was given last. What the other would have stepped from is in the keyframe."""
    criterion = nn.BCEWithLogitsLoss()
    both, (judges, makes) = gan()
    before = {name: one.detach().clone() for name, one in both.named_parameters()}
    captures = [tracer.Capture(kinds=["weights", "biases", *STATE_KINDS]), tracer.Capture(kinds=["input_data"])]
    with tracer.record(tmp_path / "run.zarr", both, [makes, judges], loss=criterion, capture=captures):
        for _ in range(2):
            inputs = {"generator": torch.randn(5, 3), "critic": torch.randn(5, 6)}
            iteration(criterion)(both, [judges, makes], inputs, None)
    with tracer.open(tmp_path / "run.zarr") as reader:
        assert [one.global_step for one in reader.messages("keyframe")][:2] == [0, 1]
        parts = {"weights": "weight", "biases": "bias"}
        kept = {f"{one.key}.{parts[one.kind]}": one.data for one in reader.messages(list(parts), steps=(0, 1))}
        rates = {
            one.leaf: dict(zip(one.sampling["entries"], one.data.tolist(), strict=True))["lr"]
            for one in reader.messages("hyperparameters", steps=(0, 1))
        }
    assert kept.keys() == before.keys()
    assert all(torch.equal(data, before[name]) for name, data in kept.items())
    assert rates == {"0.0": 0.01, "1.0": 0.02}
