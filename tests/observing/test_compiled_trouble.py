"""What must not break inside ``torch.compile``: failing operators, copies, exported models, ``vmap``."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.endings import ended
from tests.observing.compiled_training import (
    Residual,
    Trained,
    assert_same_end,
    dynamo,
    forget,
    loop,
    train,
    unchanged,
    watch,
)
from tests.observing.recorded import sgd
from tracer import Collect, Message
from tracer.observing.pytorch.compiled import SUPPORTED

pytestmark = [
    pytest.mark.skipif(not SUPPORTED, reason="this torch has no operators with effects"),
    pytest.mark.usefixtures(dynamo.__name__),
]


@functools.cache
def alone() -> Trained:
    """A training that several recorded ones are compared with: ten steps by aot_eager that nobody watches."""
    return train(Residual, "aot_eager", record=False)


@pytest.mark.parametrize("kind", ["activations", pytest.param("layer_gradients", marks=pytest.mark.slow)])
def test_what_fails_in_an_operator_stays_there(kind: str) -> None:
    """The stream is given up with a warning, and the training is the same; strict, the error reaches the loop."""

    def condition(message: Message) -> bool:
        if message.kind == kind and message.global_step >= 1:
            raise RuntimeError("no luck")
        return True

    with pytest.warns(RuntimeWarning, match="no luck"):
        recorded = train(Residual, "aot_eager", strict=False, condition=condition)
    assert_same_end(recorded, alone())
    assert {key[2] for key in recorded.data if key[0] == kind} == {0}
    assert {key[2] for key in recorded.data if key[0] == "weights"} == set(range(10))
    with pytest.raises(RuntimeError, match="no luck"):
        train(Residual, "aot_eager", condition=condition)


def test_copies_are_not_watched() -> None:
    """A copy or a pickle of the model, compiled, tells nobody; nor does a graph whose exporter is gone."""
    trained = []
    for record in (False, True):
        forget()
        torch.manual_seed(3)
        model = Residual()
        optimizer = sgd(model)
        exporter, heard = watch(model, optimizer) if record else (None, Collect("*"))
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        had = [*loop(run, optimizer, 1)]
        count = len(list(heard))
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
            output = torch.compile(other, backend="aot_eager", fullgraph=True)(torch.ones(2, 8))
            output.sum().backward()
            had.append([output.detach(), *(p.grad for p in other.parameters())])
        assert len(list(heard)) == count
        if exporter is not None:
            exporter.message_bus.unregister(heard)
            exporter.message_bus.unwatch(exporter.parts.rewire)
        del exporter
        had += loop(run, optimizer, 2)
        assert len(list(heard)) == count
        trained.append(Trained(model, None, [], ended(model, [optimizer]), had))
        del trained[-1].end["hooks"]  # some of an exporter that was never detached are still there, and do nothing
    assert_same_end(*trained)


def test_an_exported_model_has_no_operators() -> None:
    """It is used without the exporter, perhaps without this package; it is the program that is exported without."""
    trained = []
    for record in (False, True):
        forget()
        torch.manual_seed(3)
        model = Residual()
        exporter, heard = watch(model) if record else (None, Collect("*"))
        had: list[Any] = []
        for strict in (False, True):
            program = torch.export.export(model, (torch.ones(2, 8),), strict=strict)
            assert "tracereel" not in str(program.graph)
            output = program.module()(torch.randn(2, 8))
            output.sum().backward()
            had += [str(program.graph), output.detach()]
        if exporter is not None:
            exporter.detach()
        assert not list(heard)
        trained.append(Trained(model, None, [], ended(model, []), had))
    assert_same_end(*trained)


class Branches(nn.Module):
    """One layer or another, as the input has it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.one, self.other, (x,))


def test_where_operators_cannot_be_modules_are_silent() -> None:
    """Under vmap, and in a branch of ``torch.cond``, the graph is compiled as without, and the modules are reported."""

    def compiling(model: nn.Module, optimizer: Any, steps: int) -> list[list[Tensor]]:
        run = model if isinstance(model, Branches) else torch.vmap(model)
        return loop(torch.compile(lambda x: run(x), backend="aot_eager", fullgraph=True), optimizer, steps)

    for make in (Branches, lambda: nn.Sequential(nn.Linear(8, 8))):
        settings = {"steps": 2, "kinds": ["activations", "layer_gradients"]}
        recorded = unchanged(make, None, loop=compiling, **settings)
        assert not recorded.heard
        assert recorded.exporter is not None
        assert recorded.exporter.silent == [name for name, _ in recorded.exporter.named_modules]
        eager = train(make, None, record=False, steps=2)
        torch.testing.assert_close(recorded.returned, eager.returned)
