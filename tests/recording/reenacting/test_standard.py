"""What a trace of the profile ``standard`` answers, and what it says of what it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import analyze
import tracer
from analyze.registry import parse, subscribers
from tracer import CaptureError, Collect, UnknownNameError


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short training, recorded by ``standard``."""
    path = tmp_path_factory.mktemp("standard") / "run.zarr"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    with tracer.record(path, model, optimizer, loss=criterion, capture="standard") as run:
        for _ in range(2):
            for _ in range(30):
                optimizer.zero_grad()
                criterion(model(torch.randn(9, 6)), torch.randint(0, 3, (9,))).backward()
                optimizer.step()
            run.epoch_finished()
            model.eval()
            with torch.no_grad():
                criterion(model(torch.randn(20, 6)), torch.randint(0, 3, (20,)))
            model.train()
    return path


@pytest.mark.parametrize("name", sorted(subscribers()))
def test_every_metric_answers_or_says_what_makes_it_answer(name: str, standard: Path) -> None:
    """From statistics, or from the keyframes; else one sentence names the command."""
    heard, sentence = Collect(), ""
    try:
        tracer.replay(standard, parse(name), heard)
    except (CaptureError, UnknownNameError) as error:
        sentence = str(error)
    if sentence:
        assert re.search(
            "trace reenact RUN|trace reenact .*run.zarr|by its name an answer of|train_accuracy:tag=eval", sentence
        ), sentence
        assert "_hash" not in sentence
    else:
        assert {one.kind for one in heard} & set(parse(name).produces), f"{name} answers nothing"


def test_the_missions_question_is_answered_from_keyframes(standard: Path) -> None:
    """The spectral norms of the keyframes' weights, at their steps."""
    heard = Collect("weights_spectral_norm")
    tracer.replay(standard, parse("spectral_norm"), heard)
    with tracer.open(standard) as reader:
        expected = {
            (one.key, one.global_step): float(torch.linalg.matrix_norm(one.data.double(), 2))
            for one in reader.messages("weights")
        }
    assert {step for _, step in expected} == {0, 50}
    assert {(one.key, one.global_step): float(one.data) for one in heard} == pytest.approx(expected, rel=1e-9)


def test_a_check_judges_what_it_can(standard: Path) -> None:
    """Rules that take statistics look; each of the others says what it needs, and what brings that back."""
    found = analyze.check(standard)
    assert {"not_finite", "exploding_gradient", "update_ratio", "norm_drift"} <= set(found.looked)
    brought_back = {name for name, why in found.unjudged.items() if "trace reenact RUN --steps A:B" in why}
    assert brought_back >= {"changed_between_steps", "rank_collapse", "dead_units", "noisy_gradient"}


def test_weights_of_few_steps_give_no_updates(tmp_path: Path) -> None:
    """A check of a trace that has weights now and then, and no updates, leaves out rules that need them."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture(kinds=["weights"], every=3)):
        for _ in range(9):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert "changed_between_steps" in analyze.check(tmp_path / "run.zarr").unjudged
