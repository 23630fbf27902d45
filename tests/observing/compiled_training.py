"""What the tests of ``torch.compile`` share: models, their training with and without a recorder, and comparisons."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.endings import alike, ended, optimizers_of
from tests.observing import recorded
from tracer import Collect, Exporter, Message

FORWARD = ("input_data", "layer_inputs", "activations", "network_output")
KINDS = (*FORWARD, "layer_gradients", "weights", "weight_gradients", "weight_updates")


def no_compiler() -> str | None:
    """Why inductor cannot build anything here, or None."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # noqa: BLE001 - torch's own, of a class that moved between versions
        return f"inductor finds no C++ compiler: {type(error).__name__}"
    return None


NO_COMPILER = no_compiler()
# its graph is the one that aot_eager is given, which makes more of it
EAGER = pytest.param("eager", marks=pytest.mark.slow)
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER)))


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """Compilation begins and ends without what others compiled."""
    forget()
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # of torch's own compiler
            warnings.simplefilter("ignore", category)
        yield
    forget()


def forget() -> None:
    """Forget what was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """How many graphs were compiled; a test that asks has no graph breaks."""
    assert not torch._dynamo.utils.counters["graph_break"]
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Residual(nn.Module):
    """In-place ReLU, dropout that does nothing, `h += x`, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.relu = nn.ReLU(inplace=True)
        self.shared = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        h = self.shared(x)
        h += x
        return self.last(self.shared(self.norm(h)))


class Convolutions(nn.Module):
    """Batch norm, an in-place ReLU that is called twice, and a residual that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x.view(-1, 1, 2, 4))))
        y = self.second(x)
        y += x
        return self.last(self.relu(y).mean((2, 3)))


class Attention(nn.Module):
    """A transformer's encoder, whose modules return tuples and views."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x.view(2, -1, 8)))


def watch(model: nn.Module, optimizer: Any = None, *, strict: bool = True, **settings: Any) -> tuple[Exporter, Collect]:
    """An exporter with a capture of these settings, and what is heard of it."""
    return recorded.watch(model, optimizer, strict=strict, **{"kinds": KINDS, **settings})


@dataclasses.dataclass
class Trained:
    """A model after its training, what was heard of it, how it ended, and what the loop returned."""

    model: nn.Module
    exporter: Exporter | None
    heard: list[Message]
    end: dict[str, Any]
    returned: Any = None

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    @property
    def data(self) -> dict[Any, Tensor]:
        return {identity(one): one.data for one in self.heard if one.data is not None}


def loop(run: Any, optimizer: Any, steps: int) -> list[list[Tensor]]:
    """A training loop; of each step the output, and the gradient of each parameter."""
    had = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = run(torch.randn(16, 8))
        output.square().mean().backward()
        optimizer.step()
        had.append([output.detach().clone(), *(p.grad.clone() for p in optimizer.param_groups[0]["params"])])
    return had


def adam(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of most trainings."""
    return torch.optim.AdamW(model.parameters(), 1e-2)


def train(
    make: Callable[[], nn.Module],
    backend: str | None,
    *,
    record: bool = True,
    steps: int = 10,
    optimizer: Callable[[nn.Module], Any] = adam,
    loop: Callable[..., Any] = loop,
    calls: bool = False,
    **settings: Any,
) -> Trained:
    """Train a model from one seed: eagerly, or compiled with a backend; for more steps than recompiles are allowed.

    With `calls` the loop has calls of the recorder's in it: it gets the exporter, or None.
    """
    if not record:
        return alone(make, backend, steps, optimizer, loop, calls, torch.get_default_dtype())
    return trained(make, backend, steps, optimizer, loop, calls, settings)


@functools.cache
def alone(
    make: Callable[[], nn.Module],
    backend: str | None,
    steps: int,
    optimizer: Any,
    loop: Any,
    calls: bool,
    _: torch.dtype,
) -> Trained:
    """A training that nobody records; several recorded ones may be compared with it."""
    return trained(make, backend, steps, optimizer, loop, calls, None)


def trained(
    make: Callable[[], nn.Module],
    backend: str | None,
    steps: int,
    optimizer: Callable[[nn.Module], Any],
    loop: Callable[..., Any],
    calls: bool,
    settings: dict[str, Any] | None,
) -> Trained:
    """A training from one seed, recorded with these settings, or by nobody."""
    forget()
    torch.manual_seed(3)
    model = make()
    chosen = optimizer(model)
    exporter, heard = (None, Collect("*")) if settings is None else watch(model, optimizers_of(chosen), **settings)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    returned = loop(run, chosen, steps, *([exporter] if calls else []))
    if exporter is not None:
        exporter.finish()
        exporter.detach()
    return Trained(model, exporter, list(heard), ended(model, optimizers_of(chosen)), returned)


def assert_same_end(one: Trained, other: Trained) -> None:
    """Tensors, gradients, the optimizers' state, generators and hooks are those of the other training, to the bit.

    So is what the loop returned.
    """
    assert one.end.keys() == other.end.keys()
    for name, value in one.end.items():
        assert alike(value, other.end[name]), name
    assert alike(one.returned, other.returned)


def unchanged(make: Callable[[], nn.Module], backend: str | None, **settings: Any) -> Trained:
    """Trained with a recorder; the same, compiled as well but without a recorder, ends the same."""
    unwatched = train(make, backend, record=False, **settings)
    watched = train(make, backend, **settings)
    assert_same_end(watched, unwatched)
    return watched


def assert_as_the_loop_had_it(recorded: Trained, last: str) -> None:
    """Outputs, the last layer's and its gradients, and gradients of weights, as `loop` had them itself in each step."""
    names = [name.replace("_orig_mod.", "") for name, _ in recorded.model.named_parameters()]
    for step, (output, *gradients) in enumerate(recorded.returned):
        place = step, "default", 0, ""
        assert torch.equal(recorded.data["activations", last, *place], output)
        assert torch.equal(recorded.data["network_output", None, *place], output)
        torch.testing.assert_close(recorded.data["layer_gradients", last, *place], 2 * output / output.numel())
        for name, gradient in zip(names, gradients, strict=True):
            module, _, attribute = name.rpartition(".")
            if attribute == "weight":
                assert torch.equal(recorded.data["weight_gradients", module, *place], gradient), name


def identity(message: Message) -> tuple[Any, ...]:
    """What tells a message from all others."""
    return message.kind, message.key, message.global_step, message.tag, message.call, message.leaf


def assert_close(found: dict[Any, Tensor], expected: dict[Any, Tensor], backend: str) -> None:
    """Equal to eager's, bit for bit where the backend runs eager's kernels."""
    assert found.keys() == expected.keys()
    near = {"rtol": 1e-9, "atol": 1e-11} if backend == "inductor" else {"rtol": 0, "atol": 0}
    for key, value in found.items():
        torch.testing.assert_close(
            value, expected[key], **near, equal_nan=True, msg=lambda text, key=key: f"{key}: {text}"
        )
