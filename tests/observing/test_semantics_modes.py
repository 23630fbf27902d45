"""What is recorded of a training whose model is in eval mode, and of evaluations with gradients.

The oracle is the same training in train mode: the mode changes nothing in a model without dropout and batch
normalisation, so all messages are the same but for the event that tells the mode. For evaluations it is the same
evaluation under ``torch.no_grad()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.observing.oracles import batches, mlp, simple, unchanged
from tracer import Collect
from tracer.messaging.messages import KINDS


def rows(heard: Collect, without: Sequence[str] = ("eval_mode",)) -> list[tuple[Any, ...]]:
    """All messages with their data, in the order of step, tag, kind and call."""
    found = [
        (one.global_step, one.tag, one.kind, one.key or "", one.leaf, one.call, str(one.data))
        for one in heard
        if one.kind not in without
    ]
    return sorted(found)


def accumulating(model: nn.Module, optimizer: Any) -> None:
    """Two backwards a step."""
    for x in batches(4):
        model(x).square().sum().backward()
        model(-x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def contrasting(model: nn.Module, optimizer: Any) -> None:
    """Two forwards, of which the sum is differentiated."""
    for x in batches(3):
        optimizer.zero_grad()
        first = model(x).square().sum()
        (first - model(2 * x).sum()).backward()
        optimizer.step()


def with_closure(model: nn.Module, optimizer: Any) -> None:
    """The forward is inside the optimizer's step."""
    (x,) = batches(1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def by_hand(model: nn.Module, optimizer: Any) -> None:
    """Gradients from ``autograd.grad``."""
    for x in batches(3):
        parameters = list(model.parameters())
        for one, gradient in zip(parameters, torch.autograd.grad(model(x).square().sum(), parameters), strict=True):
            one.grad = gradient
        optimizer.step()


def checkpointed(model: nn.Module, optimizer: Any) -> None:
    """The model in a reentrant checkpoint, whose first forward has no gradients."""
    for x in batches(3):
        optimizer.zero_grad()
        checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum().backward()
        optimizer.step()


def lbfgs(model: nn.Module) -> torch.optim.LBFGS:
    """A few evaluations of the closure each step."""
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("train", [simple, accumulating, contrasting, with_closure, by_hand, checkpointed])
@pytest.mark.parametrize("kinds", [tuple(KINDS), ("activations", "layer_inputs", "weights", "eval_mode")])
def test_training_in_eval_mode(train: Callable[[nn.Module, Any], None], kinds: Sequence[str]) -> None:
    """Passes that are differentiated are of the training, whatever the mode is; the mode is told at each step."""
    optimizer = {"optimizer": lbfgs} if train is with_closure else {}
    _, _, expected = unchanged(mlp, train, kinds=kinds, **optimizer)
    _, exporter, heard = unchanged(lambda: mlp().eval(), train, kinds=kinds, **optimizer)
    assert rows(heard) == rows(expected)
    assert [one.global_step for one in heard.of("eval_mode")] == [*range(exporter.global_step)]
    assert not expected.of("eval_mode")
    (noted,) = (one["why"] for one in exporter.problems if one["what"] == "the mode of the model")
    assert noted.startswith("step 0 was trained while the model was in eval() mode")


@pytest.mark.parametrize("evaluating_first", [True, False])
@pytest.mark.parametrize("eval_mode", [True, False])
def test_evaluations_with_gradients(evaluating_first: bool, eval_mode: bool) -> None:
    """Without a backward they are evaluations, also where the training is in eval mode, and where outputs live on."""
    kept: list[Tensor] = []

    def loop(context: Callable[[], Any]) -> Callable[[nn.Module, Any], None]:
        def train(model: nn.Module, optimizer: Any) -> None:
            for x in batches(3):
                for evaluated in (True, False) if evaluating_first else (False, True):
                    model.train(not evaluated and not eval_mode)
                    if evaluated:
                        with context():
                            for _ in range(2):
                                model(x + 1)
                            kept.append(model(x - 1))
                    else:
                        optimizer.zero_grad()
                        model(x).square().sum().backward()
                        optimizer.step()

        return train

    _, _, expected = unchanged(mlp, loop(torch.no_grad))
    _, _, heard = unchanged(mlp, loop(contextlib.nullcontext))
    assert rows(heard) == rows(expected)
    assert len(heard.of("eval_mode")) == (3 if eval_mode else 0)


def layered(probability: float = 0.5) -> nn.Module:
    """A network with a dropout and no batch normalisation."""
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(probability), nn.Linear(8, 4))


def frozen() -> nn.Module:
    """A network in train mode whose batch normalisation is in eval mode."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].eval()
    return model


def one_loss(model: nn.Module, x: Tensor) -> None:
    """A loss for each pass."""
    for rows in x.split(2):
        F.mse_loss(model(rows), torch.zeros(len(rows), 4))


def masks(model: nn.Module, x: Tensor) -> None:
    """The loss of the mean over several dropout masks."""
    F.mse_loss(torch.stack([model(x) for _ in range(4)]).mean(0), torch.zeros(len(x), 4))


def statistics(model: nn.Module, x: Tensor) -> None:
    """Passes without a loss, as those that recompute the statistics of a batch normalisation."""
    for _ in range(3):
        model(x)


def judged(model: nn.Module, x: Tensor) -> None:
    """The loss of a pass in eval mode, after another in train mode."""
    model(x)
    model.eval()
    F.mse_loss(model(x), torch.zeros(len(x), 4))
    model.train()


@pytest.mark.parametrize(
    ("make", "evaluate", "told"),
    [
        (layered, one_loss, [1, 2, 3]),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), one_loss, [1, 2, 3]),
        (lambda: layered(0.0), one_loss, []),
        (frozen, one_loss, []),
        (layered, masks, []),
        (layered, statistics, []),
        (layered, judged, []),
    ],
)
def test_an_evaluation_in_train_mode(
    make: Callable[[], nn.Module], evaluate: Callable[[nn.Module, Tensor], None], told: Sequence[int]
) -> None:
    """It is told once a step, where the loss of one pass depends on the mode."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            F.mse_loss(model(x), torch.zeros(8, 4)).backward()
            optimizer.step()
            with torch.no_grad():
                evaluate(model, x)

    _, _, heard = unchanged(make, train, kinds=("train_mode", "loss"), loss=F.mse_loss)
    assert [(one.global_step, one.tag) for one in heard.of("train_mode")] == [(step, "eval") for step in told]
