"""What the tests of docs/semantics.md compare recorded values with, and the small models and loops that they train.

`unchanged` trains a second time without a recorder, and compares parameters, gradients, optimizers, random generators,
hooks and what the loop itself returned, bit for bit. `situation` compares what is recorded with what a `Witness` sees:
plain hooks of the test's own on a training that nobody records, perhaps without what makes the situation special.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tracer
from tests.endings import alike, ended, optimizers_of, same
from tests.observing.random_parts import arguments, tensors
from tests.observing.recorded import descend, sgd, watch
from tracer import Capture, Collect, Exporter, Message
from tracer.messaging.messages import DATA_KINDS

GRADIENT_KINDS = ("layer_gradients", "input_gradients")
OF_CALLS = ("layer_inputs", "activations", *GRADIENT_KINDS)


class Nobody:
    """In the place of an exporter in a training that is not recorded: it takes every call, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def hooks_of_all() -> dict[str, int]:
    """How many hooks there are for all modules, and for all optimizers."""
    places = [vars(sys.modules[name]) for name in ("torch.nn.modules.module", "torch.optim.optimizer")]
    hooks = {name: value for place in places for name, value in place.items() if name.startswith("_global_")}
    found = {name: len(value) for name, value in hooks.items() if isinstance(value, dict)}
    assert {"_global_forward_hooks", "_global_optimizer_post_hooks"} <= found.keys()
    return found


def unchanged(
    make: Callable[[], nn.Module],
    train: Callable[..., Any],
    optimizer: Callable[[nn.Module], Any] = sgd,
    given: Callable[[Any], Any] = lambda optimizer: optimizer,
    path: Path | None = None,
    calls: bool = False,
    **settings: Any,
) -> tuple[nn.Module, Exporter, Collect]:
    """Train with and without an exporter from one state; all that `ended` tells of both trainings is the same.

    So is what `train` returns. With a `path` the second is recorded there, and the trace has what was heard, to the
    bit. With `calls` the loop has calls of the recorder's in it: it gets the exporter, or `Nobody`, to call.
    """
    ends: list[dict[str, Any]] = []
    for watched in (False, True):
        torch.manual_seed(5)
        model = make()
        chosen = optimizer(model)
        if not watched:
            returned = train(model, chosen, *([Nobody()] if calls else []))
        elif path is None:
            exporter, heard = watch(model, given(chosen), **settings)
            returned = train(model, chosen, *([exporter] if calls else []))
            exporter.finish()
            exporter.detach()
        else:
            strict, heard = settings.pop("strict", True), Collect("*")
            capture = Capture(**{"kinds": DATA_KINDS, **settings})
            with tracer.record(
                path, model, given(chosen), capture=capture, receivers=[heard], strict=strict
            ) as recording:
                exporter = recording.exporter
                returned = train(model, chosen, *([exporter] if calls else []))
            written(path, heard)
        ends.append(ended(model, optimizers_of(chosen)))
        ends[-1] |= {"what the loop returned": returned, "hooks of all": hooks_of_all()}
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        assert alike(value, ends[1][name]), name
    return model, exporter, heard


def written(path: Path, heard: Collect) -> None:
    """A trace has the messages that were heard, and no others, with their data."""
    with tracer.open(path) as trace:
        read = list(trace.messages())
    assert len(read) == len(heard)
    for one, other in zip(read, heard, strict=True):
        told_of = [(m.kind, m.key, m.global_step, m.tag, m.call, m.leaf, m.data is None) for m in (one, other)]
        assert told_of[0] == told_of[1]
        assert one.data is None or other.data is None or same(one.data, other.data)


def batches(number: int, shape: tuple[int, ...] = (4, 3)) -> list[Tensor]:
    """The same batches in every call, without a global generator."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(shape, generator=generator) for _ in range(number)]


def simple(model: nn.Module, optimizer: Any, number: int = 2) -> None:
    """A plain loop."""
    descend(optimizer, lambda x: model(x).square().sum(), batches(number))


def mlp() -> nn.Sequential:
    """Linear, Tanh, Linear."""
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def squares(output: Tensor) -> Tensor:
    """The loss of most trainings here, in at least float32."""
    return output.to(torch.promote_types(output.dtype, torch.float32)).square().sum()


class Witness:
    """Hooks of the test's own on a training that nobody records: what they see of it, by kind and place.

    It hangs hooks on modules before each forward of the model, so what is made meanwhile is seen from the next one on.
    """

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], everything: bool) -> None:
        self.seen: dict[Place, Tensor] = {}
        self.model, self.everything, self.step = model, everything, 0
        self.calls: Counter[Any] = Counter()
        self.before: dict[str, Tensor] = {}
        self.hung: set[nn.Module] = set()
        self.hang()
        model.register_forward_pre_hook(lambda *_: self.hang())
        for one in optimizers:
            one.register_step_pre_hook(lambda *_: self.begin())
            one.register_step_post_hook(lambda one, *_: self.moved(one, optimizers[-1]))

    def hang(self) -> None:
        """Hang a hook on each module that has none."""
        for name, module in self.model.named_modules():
            if module not in self.hung:
                self.hung.add(module)
                module.register_forward_hook(functools.partial(self.called, name), with_kwargs=True)

    def called(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note what a call got and gave, and the gradients of both when they come."""
        tag = "default" if self.model.training and torch.is_grad_enabled() else "eval"
        place = self.step, tag, self.calls[name, self.step, tag]
        self.calls[name, self.step, tag] += 1
        inputs = arguments(*args, **kwargs)
        if module is self.model:
            self.note("input_data", None, place, inputs)
            self.note("network_output", None, place, output)
        if self.everything or not [*module.children()] or any(one is not None for one in module._parameters.values()):
            self.note("layer_inputs", name, place, inputs, "input_gradients")
            self.note("activations", name, place, output, "layer_gradients")

    def note(self, kind: str, name: str | None, place: Any, value: Any, slopes: str | None = None) -> None:
        """Keep the tensors of a structure, and if told so their gradients: each further one has a leaf of its own."""
        for leaf, tensor in tensors(value).items():
            self.seen[kind, name, *place, leaf] = dense(tensor)
            if slopes is not None and tensor.requires_grad:
                numbers = iter(range(100))

                def keep(slope: Tensor | None, leaf: str = leaf, numbers: Any = numbers) -> None:
                    if slope is not None:
                        number = next(numbers)
                        further = f"{leaf}.backward.{number}".lstrip(".") if number else leaf
                        self.seen[slopes, name, *place, further] = dense(slope)

                tensor.register_hook(keep)

    def begin(self) -> None:
        """Keep the parameters as they are before an optimizer has moved any in this step."""
        for name, one in self.model.named_parameters():
            self.before.setdefault(name, dense(one))

    def moved(self, optimizer: torch.optim.Optimizer, last: torch.optim.Optimizer) -> None:
        """Note the gradients of an optimizer's parameters; after the last one all parameters and their updates."""
        if not self.before:  # an outer step, of which an inner one was the whole
            return
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for name, one in self.model.named_parameters():
            if id(one) in own and one.grad is not None:
                self.seen[*stream(name, "gradients"), self.step, "default", 0, ""] = dense(one.grad)
            if optimizer is last:
                before = self.before[name]
                self.seen[*stream(name, ""), self.step, "default", 0, ""] = before
                if before.dtype.itemsize > 1:  # of others torch has no differences
                    self.seen[*stream(name, "updates"), self.step, "default", 0, ""] = dense(one) - before
        if optimizer is last:
            self.before, self.step = {}, self.step + 1


Place = tuple[str, str | None, int, str, int, str]
"""Kind, module, step, tag, call, leaf."""
OF_PARAMETERS = tuple(
    f"{sort}_{of}" for sort in ("weight", "bias") for of in ("gradients", "updates")
) + ("weights", "biases")  # fmt: skip
SEEN = ("input_data", "network_output", *OF_CALLS, *OF_PARAMETERS)
"""The kinds that a witness sees."""


def dense(tensor: Tensor) -> Tensor:
    """A copy as a plain tensor."""
    found = tensor.detach().resolve_conj()
    return (found if found.layout is torch.strided else found.to_dense()).clone()


def stream(name: str, of: str) -> tuple[str, str]:
    """The kind and the key of a parameter's values, gradients or updates."""
    module, _, attribute = name.rpartition(".")
    sort = "bias" if "bias" in attribute else "weight"
    kind = f"{sort}_{of}" if of else {"bias": "biases", "weight": "weights"}[sort]
    return kind, module if attribute in ("weight", "bias") else name


def by_place(heard: Iterable[Message], kinds: Iterable[str] = SEEN) -> dict[Place, Tensor]:
    """The data of the messages of these kinds; each place has one."""
    found: dict[Place, Tensor] = {}
    for one in heard:
        if one.kind in kinds and one.data is not None:
            place = one.kind, one.key, one.global_step, one.tag, one.call, one.leaf
            assert place not in found, place
            found[place] = one.data
    return found


def equal(found: dict[Place, Tensor], expected: dict[Place, Tensor], close: float | None = None) -> None:
    """The same places, with the same bits, or with numbers that are so close: with 0 in any dtype that holds them."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for place, value in expected.items():
        if close is None:
            assert same(found[place], value), place
        else:
            torch.testing.assert_close(
                *(found[place], value), rtol=close, atol=close, check_dtype=close > 0,
                msg=lambda text, place=place: f"{place}: {text}",
            )  # fmt: skip


def witnessed(
    make: Callable[[], nn.Module],
    train: Callable[..., Any],
    optimizer: Callable[[nn.Module], Any] = sgd,
    given: Callable[[Any], Any] = lambda optimizer: optimizer,
    calls: bool = False,
    everything: bool = False,
) -> dict[Place, Tensor]:
    """What a witness sees of a training from the state that `unchanged` begins with."""
    torch.manual_seed(5)
    model = make()
    chosen = optimizer(model)
    witness = Witness(model, optimizers_of(given(chosen)), everything)
    train(model, chosen, *([Nobody()] if calls else []))
    return witness.seen


def situation(
    make: Callable[[], nn.Module],
    train: Callable[..., Any],
    optimizer: Callable[[nn.Module], Any] = sgd,
    *,
    plain: tuple[Callable[[], nn.Module], Callable[..., Any]] | None = None,
    close: float | None = None,
    but: Callable[[Place], bool] = lambda place: False,
    kinds: tuple[str, ...] = SEEN,
    given: Callable[[Any], Any] = lambda optimizer: optimizer,
    calls: bool = False,
    **settings: Any,
) -> tuple[nn.Module, Exporter, Collect]:
    """Train as `unchanged` does; what is recorded is what a witness sees: no more, no less, to the bit, or `close`.

    The witness sees the same training, or with `plain` that of another model or loop, without what makes the situation
    special. Places of which `but` is true, and other kinds than `kinds`, are left to the test.
    """
    model, exporter, heard = unchanged(make, train, optimizer, given, calls=calls, **settings)
    seen = witnessed(*(plain or (make, train)), optimizer, given, calls, settings.get("modules") == "*")
    every = settings.get("every", 1)
    expected = {place: one for place, one in seen.items() if place[0] in kinds and place[2] % every == 0}
    found = by_place(heard, kinds)
    equal(*({place: one for place, one in each.items() if not but(place)} for each in (found, expected)), close)
    assert expected
    return model, exporter, heard


class GAN(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.critic(self.generator(z))
