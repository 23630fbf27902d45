"""An exporter leaves compilers alone: a compiled model trains on, and torch.jit finds what is there without it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from tests.observing.recorded import mlp, watch

# -- torch.jit ------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """Computes its loss itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.inner(x), y)


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_models_are_compiled_for_elsewhere_while_they_are_watched(how: str, tmp_path: Path) -> None:
    """``torch.jit`` finds the model as it is alone, and what is trained afterwards is observed as before."""
    torch.manual_seed(0)
    model, given = WithLoss(), (torch.ones(4, 3), torch.zeros(4, 2))

    def compiled() -> Any:
        return torch.jit.script(model) if how == "script" else torch.jit.trace(model, given)

    alone = compiled()
    exporter, heard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=["mse_loss"])
    found = compiled()
    graphs = [re.sub(r"___torch_mangle_\d+\.", "", str(one.inlined_graph)) for one in (alone, found)]
    assert graphs[0] == graphs[1]
    found.save(str(tmp_path / "model.pt"))
    assert torch.equal(torch.jit.load(str(tmp_path / "model.pt"))(*given), model(*given))
    before = len(heard.of("activations")), len(heard.of("loss"))
    model(*given).backward()
    exporter.detach()
    assert (len(heard.of("activations")), len(heard.of("loss"))) == (before[0] + 1, before[1] + 1)
    assert not hasattr(vars(torch.jit._script)["_script_impl"], "__wrapped__")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_and_classes_are_scripted_while_a_model_is_watched() -> None:
    """Which torch does in libraries that are imported meanwhile: names are found where they are used."""
    exporter, _ = watch(mlp())

    @torch.jit.script
    def times(x: Tensor) -> Tensor:
        return torch.multiply(x, 3)

    def thrice(x: Tensor) -> Tensor:
        return times(x) + 3

    @torch.jit.script
    class Doubling:
        def __init__(self, by: int) -> None:
            self.by = by

        def of(self, x: Tensor) -> Tensor:
            return times(x) * self.by

    assert torch.equal(torch.jit.script(thrice)(torch.ones(2)), torch.full((2,), 6.0))
    assert torch.equal(Doubling(2).of(torch.ones(2)), torch.full((2,), 6.0))
    exporter.detach()


# -- torch.compile --------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Compilation begins and ends without what others compiled."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own compiler
        warnings.simplefilter("ignore", FutureWarning)
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_trains_on(fullgraph: bool, tmp_path: Path, dynamo: None) -> None:
    """Compiled training is unchanged and recorded; more of it in ``test_compiled*.py``."""
    results = []
    for watched in (False, True):
        torch.manual_seed(1)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        loss = nn.MSELoss()

        def steps(model: Any = compiled, optimizer: Any = optimizer, loss: Any = loss) -> None:
            for _ in range(10):  # more than the limit of recompilations
                optimizer.zero_grad()
                loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
                optimizer.step()

        if watched:
            with tracer.record(
                tmp_path / "run.zarr", compiled, optimizer, loss=loss, strict=True, capture=tracer.Capture()
            ):
                steps()
        else:
            steps()
        results.append([p.detach().clone() for p in model.parameters()])
        torch._dynamo.reset()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.array("weights", "0")[1].shape == (10, 4, 3)
        assert trace.array("weight_updates", "2")[0].tolist() == list(range(10))
        assert len(trace.array("loss")[0]) == 10
        assert trace.array("activations", "1")[1].shape == (10, 5, 4)
        assert not [note for note in trace.notes if "silent" in note]
