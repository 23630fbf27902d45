"""The names of modules and parameters inside wrappers: those of the bare model, without collisions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.observing.recorded import attached, descend
from tracer import Capture, Collect, Exporter
from tracer.observing.pytorch.structure import compiled_parts, named_parts, unwrap, wrapped_by


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """Compilation begins and ends without what others compiled; torch's own compiler warns of itself."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def model() -> nn.Sequential:
    """Layers in a block, and one behind it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Linear(3, 2))


def checkpointed(inner: nn.Module) -> nn.Module:
    """In the wrapper of torch that computes it again in the backward."""
    wrapped: nn.Module = checkpoint_wrapper(inner)  # type: ignore[no-untyped-call]  # torch has no types there
    return wrapped


def compiled(inner: nn.Module) -> nn.Module:
    """Compiled, in as much as graphs are made."""
    wrapped: nn.Module = torch.compile(inner, backend="eager")  # type: ignore[assignment]  # a module gives a module
    return wrapped


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "compiled checkpoint": lambda inner: compiled(checkpointed(inner)),
    "DataParallel of compiled": lambda inner: nn.DataParallel(compiled(inner)),
}


def streams(network: nn.Module, wrapped: nn.Module) -> dict[tuple[str, str | None], list[torch.Tensor]]:
    """What two steps of a training publish, by kind and module."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    exporter, heard = attached(Exporter(capture=Capture(), strict=True), Collect("*"), wrapped, optimizer)
    descend(optimizer, lambda step: wrapped(torch.full((2, 4), step + 1.0)).sum(), range(2))
    told = exporter.parts.models.structure()
    exporter.detach()
    assert not any(word in str(told) for word in ("_orig_mod", "_checkpoint_wrapped_module", "module."))
    assert [one["name"] for one in told["parameters"]] == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
    found: dict[tuple[str, str | None], list[torch.Tensor]] = {}
    for one in heard:
        if one.data is not None:
            found.setdefault((one.kind, one.key), []).append(one.data)
    return found


@functools.cache
def of_bare_model() -> dict[tuple[str, str | None], list[torch.Tensor]]:
    """What is published of the model without a wrapper."""
    bare = model()
    return streams(bare, bare)


@pytest.mark.parametrize("where", ["around the model", "around a part"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_streams_have_the_names_of_the_bare_model(wrapper: str, where: str) -> None:
    """Each stream of the bare model is there under its own name, with the same values, and no other."""
    expected, network = of_bare_model(), model()
    if where == "around a part":
        network[0] = WRAPPERS[wrapper](network[0])
        found = streams(network, network)
    else:
        found = streams(network, WRAPPERS[wrapper](network))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert len(found[name]) == len(values), name
        for one, other in zip(found[name], values, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_paths_are_those_of_named_modules() -> None:
    """Without wrappers the list is torch's own, shared and repeated modules included."""
    shared = nn.Linear(2, 2)
    network = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU()), "c": nn.Bilinear(2, 2, 2)})
    assert list(named_parts(network)) == list(network.named_modules())
    assert list(named_parts(network, "x")) == list(network.named_modules(prefix="x"))
    assert list(named_parts(network, repeat=True)) == list(network.named_modules(remove_duplicate=False))


def test_what_is_called_like_a_wrapper_keeps_its_name() -> None:
    """A user's own attribute `module` is no wrapper."""
    network = nn.Sequential()
    network.module = nn.Linear(2, 2)  # type: ignore[assignment]  # Sequential says that its children are Sequentials
    assert wrapped_by(network) is None
    assert [path for path, _ in named_parts(network)] == ["", "module"]


def test_colliding_names() -> None:
    """A wrapper with children of its own, called as those of what is inside."""

    class Wide(nn.DataParallel[Any]):
        pass

    inner = nn.Sequential(nn.Linear(2, 2))
    outer = Wide(inner)
    outer.add_module("0", nn.Linear(2, 2))
    network = nn.Sequential(outer)
    parts = dict(named_parts(network))
    assert list(parts) == ["", "0", "0.0", "0.0_"]
    assert parts["0.0"] is inner[0]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    exporter, heard = attached(Exporter(strict=True), Collect("weights"), network, optimizer)
    network(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    exporter.detach()
    assert [one.key for one in heard] == ["0.0", "0.0_"]


def test_unwrap_and_compiled_parts() -> None:
    """All wrappers are looked through, in any order; parts that are compiled by themselves are found."""
    bare = model()
    for name, wrap in WRAPPERS.items():
        # the forward of what is in a checkpoint runs twice, that of the wrapper once
        assert (unwrap(wrap(bare)) is bare) is ("checkpoint" not in name)
        assert [path for path, _ in named_parts(wrap(bare))] == ["", "0", "0.0", "0.1", "1"]
    bare[0] = compiled(bare[0])
    assert compiled_parts(bare) == ["0"]
    assert compiled_parts(compiled(model())) == []
