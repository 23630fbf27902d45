"""Random networks: trained with and without a recorder, and computed a third time by pure functions.

A seed makes a small network out of what real ones are made of (parts used again, residuals, in-place operations, tuples
and dicts, casts, frozen and tied parameters, checkpoints, passages without gradients, recurrences, attention), an
optimizer and a loop. Its training ends with the same parameters, buffers and random generator whether it is recorded or
not. The oracle computes each step again without modules, hooks or in-place operations, from the parameters of the
training that was not recorded, and takes all gradients by ``autograd.grad``. What is recorded must be just what the
oracle has: the same messages, no more, with the same data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, SequenceKey, tree_flatten_with_path
from torch.utils.checkpoint import checkpoint

import tracer
from tracer import Capture, Collect, Exporter, Message
from tracer.messaging.messages import DATA_KINDS

WIDTH = 4
WORDS = 7
Key = tuple[str, str | None, str, int, str]  # kind, module, tag, call, leaf


# -- the third computation ------------------------------------------------------------------------------------


class Tape:
    """Forwards of one step as pure functions of named parameters, with all that each module gets and gives."""

    def __init__(self, model: nn.Module, values: dict[str, Tensor], buffers: dict[str, Tensor], tag: str) -> None:
        self.modules = {id(one): name for name, one in model.named_modules()}
        self.names = {id(one): name for name, one in model.named_parameters()}
        self.values, self.buffers, self.tag = values, buffers, tag
        self.calls: Counter[str] = Counter()
        self.noted: dict[Key, Tensor] = {}
        self.watched: dict[Key, Tensor] = {}

    @property
    def training(self) -> bool:
        return self.tag == "default"

    def parameter(self, module: nn.Module, name: str = "weight") -> Any:
        """The value of a parameter, or None if the module has none of this name."""
        own = module._parameters[name]
        return None if own is None else self.values[self.names[id(own)]]

    def buffer(self, module: nn.Module, name: str) -> Tensor:
        return self.buffers[f"{self.modules[id(module)]}.{name}".lstrip(".")]

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What ``module(*args, **kwargs)`` returns."""
        path = self.modules[id(module)]
        output = PURE[type(module)](self, module, *args, **kwargs)
        number = self.calls[path]
        self.calls[path] += 1
        self.note(("layer_inputs", "input_gradients"), path, number, arguments(*args, **kwargs))
        self.note(("activations", "layer_gradients"), path, number, output)
        return output

    def note(self, kinds: tuple[str, str], path: str | None, number: int, value: Any) -> None:
        found = tensors(value)
        for leaf, tensor in found.items():
            self.noted[kinds[0], path, self.tag, number, leaf] = tensor.detach()
            if torch.is_grad_enabled() and tensor.requires_grad:
                self.watched[kinds[1], path, self.tag, number, leaf] = tensor


def arguments(*args: Any, **kwargs: Any) -> Any:
    """What a call gets, as one structure; a tensor that is all of it is none."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return args[0]
    return {str(index): one for index, one in enumerate(args)} | kwargs


def tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of a structure by their dotted paths; one that is no structure has an empty path."""
    if isinstance(value, Answer):
        value = vars(value)
    found = {}
    for keys, one in tree_flatten_with_path(value)[0]:
        if isinstance(one, Tensor):
            parts = [str(key.key if isinstance(key, MappingKey) else key.idx) for key in keys if key]
            assert all(isinstance(key, MappingKey | SequenceKey) for key in keys)
            found[".".join(parts)] = one
    return found


def added(value: Any, all_of_it: bool = True) -> Tensor:
    """The sum of the tensors of a structure, or the first of them."""
    found = list(tensors(value).values())
    return functools.reduce(torch.add, found) if all_of_it else found[0]


# -- parts ----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """An in-place ReLU, and ``h += x``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(WIDTH, 5), nn.ReLU(inplace=True), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.relu(self.first(x)))
        h += x
        return h

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.second, tape.call(self.relu, tape.call(self.first, x))) + x


class Writing(nn.Module):
    """Writes into parts of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h[:, :2] *= 0.5
        h[:, 3] = x[:, 0]
        return h

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        h = tape.call(self.inner, x)
        return torch.cat([h[:, :2] * 0.5, h[:, 2:3], x[:, :1]], 1)


class Normed(nn.Module):
    """Normalisation, an activation with a parameter, and an in-place dropout."""

    def __init__(self, batch: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if batch else nn.LayerNorm(WIDTH)
        self.bend = nn.PReLU()
        self.drop = nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.bend(self.norm(x)))

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.drop, tape.call(self.bend, tape.call(self.norm, x)))


class Casting(nn.Module):
    """A layer in another precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).float()

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.inner, x.to(self.dtype)).float()


class Convolved(nn.Module):
    """A convolution over the features, and an in-place ReLU on a view of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, None]).flatten(1).relu_()[:, :WIDTH]

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.inner, x[:, None]).flatten(1).relu()[:, :WIDTH]


class Tied(nn.Module):
    """Two layers with one weight, and a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) - self.again(x)

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.second, tape.call(self.first, x).tanh()) - tape.call(self.first, x)


class Still(nn.Module):
    """A layer that is called without gradients, in the middle of a training pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.inner(x)
        return x + shift

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = tape.call(self.inner, x)
        return x + shift


class Nest(nn.Module):
    """Parts one after another, one of them perhaps in a checkpoint."""

    def __init__(self, parts: list[nn.Module], how: str | None) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.how = how  # None, "reentrant" or "saved"

    def forward(self, x: Tensor) -> Tensor:
        if self.how is None or not x.requires_grad:
            return self.parts(x)
        return checkpoint(self.parts, x, use_reentrant=self.how == "reentrant")

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        if self.how == "reentrant" and x.requires_grad and torch.is_grad_enabled():
            x = x.view_as(x)  # what is inside gets a tensor of its own
            return tape.call(self.parts, x).clone()
        return tape.call(self.parts, x)


class Halves(nn.Module):
    """A tuple of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x).split(WIDTH, 1)

    def pure(self, tape: Tape, x: Tensor) -> tuple[Tensor, ...]:
        return tape.call(self.inner, x).split(WIDTH, 1)


class Named(nn.Module):
    """A nested dict with what is no tensor, and with its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"main": self.inner(x), "no": None, "number": 3, "rest": [x, (x.detach() * 2, "text")]}

    def pure(self, tape: Tape, x: Tensor) -> dict[str, Any]:
        return {"main": tape.call(self.inner, x), "no": None, "number": 3, "rest": [x, (x.detach() * 2, "text")]}


@dataclasses.dataclass
class Answer:
    """An output with fields."""

    logits: Tensor
    hidden: Tensor | None = None


class Answering(nn.Module):
    """A dataclass, and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.my_bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, *, shift: Tensor) -> Answer:
        return Answer(x * self.scale + shift, self.my_bias + x)

    def pure(self, tape: Tape, x: Tensor, *, shift: Tensor) -> Answer:
        return Answer(x * tape.parameter(self, "scale") + shift, tape.parameter(self, "my_bias") + x)


class Recurrent(nn.Module):
    """A recurrence over the features; of its states, only one is used."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.inner = kind(1, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.inner(x[:, :, None])
        return output.sum(2)

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        output, _ = tape.call(self.inner, x[:, :, None])
        return output.sum(2)


class Attended(nn.Module):
    """Attention between the two halves of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(2, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z = x.view(-1, 2, 2)
        return self.inner(z, z, z)[0].reshape(-1, WIDTH)

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        z = x.view(-1, 2, 2)
        return tape.call(self.inner, z, z, z)[0].reshape(-1, WIDTH)


def pure_batch_norm(tape: Tape, one: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """With the batch's own mean and variance in training, else with those that were counted."""
    weight, bias = tape.parameter(one), tape.parameter(one, "bias")
    if tape.training:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, one.eps)
    mean, variance = tape.buffer(one, "running_mean"), tape.buffer(one, "running_var")
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, one.eps)


def pure_recurrence(tape: Tape, one: nn.LSTM | nn.GRU, x: Tensor) -> Any:
    """Cell by cell, by the formulas in torch's documentation."""
    wi, wh, bi, bh = (tape.parameter(one, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    h = c = x.new_zeros(len(x), one.hidden_size)
    outputs = []
    for step in x.unbind(1):
        if isinstance(one, nn.LSTM):
            i, f, g, o = (step @ wi.T + bi + h @ wh.T + bh).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            (ri, zi, ni), (rh, zh, nh) = (step @ wi.T + bi).chunk(3, 1), (h @ wh.T + bh).chunk(3, 1)
            z = (zi + zh).sigmoid()
            h = (1 - z) * (ni + (ri + rh).sigmoid() * nh).tanh() + z * h
        outputs.append(h)
    last = (h.view(1, *h.shape), c.view(1, *c.shape)) if isinstance(one, nn.LSTM) else h.view(1, *h.shape)
    return torch.stack(outputs, 1), last


def pure_attention(tape: Tape, one: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Softmax of scaled products, head by head."""
    weights, biases = tape.parameter(one, "in_proj_weight").chunk(3), tape.parameter(one, "in_proj_bias").chunk(3)
    q, k, v = (
        (x @ w.T + b).unflatten(2, (one.num_heads, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    attention = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
    out = (attention @ v).transpose(1, 2).flatten(2)
    return out @ tape.parameter(one.out_proj).T + tape.parameter(one.out_proj, "bias"), attention.mean(1)


def pure_sequence(tape: Tape, one: nn.Sequential, x: Any) -> Any:
    """One after another."""
    for part in one:
        x = tape.call(part, x)
    return x


PURE: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: lambda tape, one, x: F.linear(x, tape.parameter(one), tape.parameter(one, "bias")),
    nn.Conv1d: lambda tape, one, x: F.conv1d(x, tape.parameter(one), tape.parameter(one, "bias"), padding=one.padding),
    nn.Embedding: lambda tape, one, x: F.embedding(x, tape.parameter(one)),
    nn.LayerNorm: lambda tape, one, x: F.layer_norm(x, [WIDTH], tape.parameter(one), tape.parameter(one, "bias")),
    nn.PReLU: lambda tape, one, x: F.prelu(x, tape.parameter(one)),
    nn.Dropout: lambda tape, one, x: F.dropout(x, one.p, tape.training),
    nn.ReLU: lambda tape, one, x: x.relu(),
    nn.Tanh: lambda tape, one, x: x.tanh(),
    nn.GELU: lambda tape, one, x: F.gelu(x),
    nn.Softsign: lambda tape, one, x: F.softsign(x),
    nn.Identity: lambda tape, one, x: x,
    nn.BatchNorm1d: pure_batch_norm,
    nn.LSTM: pure_recurrence,
    nn.GRU: pure_recurrence,
    nn.MultiheadAttention: pure_attention,
    nn.Sequential: pure_sequence,
    **{
        one: lambda tape, one, *args, **kwargs: one.pure(tape, *args, **kwargs)
        for one in (
            Residual, Writing, Normed, Casting, Convolved, Tied, Still, Nest, Halves, Named, Answering, Recurrent,
            Attended,
        )
    },
}  # fmt: skip


# -- networks -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Use:
    """One use of a part in a network: of which earlier result, and what becomes of what it gives."""

    part: int
    source: int
    other: int
    whole: bool = True  # all tensors of its output, or only the first
    detached: bool = False
    then: str | None = None  # an in-place operation on its output


class Network(nn.Module):
    """Parts in any order, some several times, some never, each fed with any earlier result."""

    def __init__(self, parts: list[nn.Module], uses: list[Use], form: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.uses, self.form = uses, form

    def forward(self, x: Tensor, words: Tensor | None = None) -> Any:
        results = [x, self.words(words).mean(1) if words is not None else x * 2]
        for use in self.uses:
            part, source, other = self.parts[use.part], results[use.source], results[use.other]
            source = source.detach() if use.detached else source
            result = added(part(source, shift=other) if isinstance(part, Answering) else part(source), use.whole)
            if use.then == "add":
                result += other
            elif use.then == "relu":
                result.relu_()
            elif use.then == "fresh":
                result = result * 1.5
                result[1:] += other[1:]
                result.clamp_(-3, 3)
            results.append(result)
        return self.shaped(results)

    def shaped(self, results: list[Tensor]) -> Any:
        last, before = results[-1], results[-2]
        forms = {
            "tensor": last, "tuple": (last, before), "dict": {"a": last, "b": [before, None]},
            "answer": Answer(last), "sum": last + before,
        }  # fmt: skip
        return forms[self.form]

    def pure(self, tape: Tape, x: Tensor, words: Tensor | None = None) -> Any:
        results = [x, tape.call(self.words, words).mean(1) if words is not None else x * 2]
        for use in self.uses:
            part, source, other = self.parts[use.part], results[use.source], results[use.other]
            source = source.detach() if use.detached else source
            given = {"shift": other} if isinstance(part, Answering) else {}
            result = added(tape.call(part, source, **given), use.whole)
            if use.then == "add":
                result = result + other
            elif use.then == "relu":
                result = result.relu()
            elif use.then == "fresh":
                result = result * 1.5
                result = torch.cat([result[:1], result[1:] + other[1:]]).clamp(-3, 3)
            results.append(result)
        return self.shaped(results)


PURE[Network] = lambda tape, one, *args: one.pure(tape, *args)


@dataclasses.dataclass
class Plan:
    """What a seed stands for."""

    seed: int
    make: Callable[[], Network]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    exact: bool
    words: bool
    frozen: list[int]
    thawed_at: int
    micro: int
    every: int
    clip: float | None
    to_none: bool
    evaluates: bool
    with_loss: bool
    steps: int = 3

    def batch(self, step: int, number: int) -> tuple[tuple[Tensor, ...], Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + number)
        rows = 3 + (step + number) % 3
        x = torch.randn(rows, WIDTH, generator=generator)
        words = torch.randint(0, WORDS, (rows, 3), generator=generator)
        return (x, words) if self.words else (x,), torch.randn(rows, WIDTH, generator=generator)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        if self.with_loss:
            return F.mse_loss(added(output), target)
        return functools.reduce(torch.add, [one.square().mean() for one in tensors(output).values()])


def part_of(draw: random.Random, exact: bool, depth: int = 0) -> nn.Module:
    """A part from tensor to tensor, or of any output if it is not inside another."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7), nn.Tanh,
        # which rounds tensors of other strides, as an operation in place leaves them, in another way on some processors
        nn.Softsign if exact else nn.GELU,
        nn.Identity, Residual, Writing,
        lambda: Normed(batch=draw.random() < 0.5), lambda: nn.Dropout(0.5), Convolved, Tied, Still,
        lambda: Casting(draw.choice([torch.float64, torch.bfloat16] if exact else [torch.float64])),
    ]  # fmt: skip
    if depth < 2:
        inside = draw.randint(1, 3)
        how = draw.choice([None, "reentrant", "saved"]) if depth == 0 else None
        makers += [lambda: Nest([part_of(draw, exact, depth + 1) for _ in range(inside)], how)] * 3
    if depth == 0:
        makers += [Halves, Named, Answering]
    if not exact:
        makers += [lambda: Recurrent(draw.choice([nn.LSTM, nn.GRU])), Attended] * 2
    return draw.choice(makers)()


def in_place_after(part: nn.Module) -> list[str | None]:
    """The in-place operations that autograd allows on the output of a part."""
    fresh: list[str | None] = [None, None, "fresh"]
    return [*fresh, "add", "relu"] if isinstance(part, nn.Linear | Residual | Casting) else fresh


def plan(seed: int) -> Plan:
    """The network, the optimizer and the loop that a seed stands for."""
    draw = random.Random(seed)
    exact, number = draw.random() < 0.7, draw.randint(1, 4)
    inner = draw.randint(0, 2**31)

    def make() -> Network:
        choose = random.Random(inner)
        torch.manual_seed(seed)
        parts = [part_of(choose, exact) for _ in range(number)]
        uses = []
        for index in range(choose.randint(number, number + 3)):
            one = choose.randrange(number)
            uses.append(
                Use(
                    one,
                    source=choose.choice([index + 1, choose.randrange(index + 2)]),
                    other=choose.randrange(index + 2),
                    whole=choose.random() < 0.7,
                    detached=choose.random() < 0.1,
                    then=choose.choice(in_place_after(parts[one])),
                )
            )
        return Network(parts, uses, choose.choice(["tensor", "tuple", "dict", "answer", "sum"]))

    optimizers: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
        lambda model: torch.optim.SGD(model.parameters(), 0.05),
        lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), 0.01),
        lambda model: torch.optim.RMSprop(model.parameters(), 0.01),
    ]
    return Plan(
        seed, make, draw.choice(optimizers), exact, words=draw.random() < 0.6,
        frozen=[index for index in range(number) if draw.random() < 0.15], thawed_at=draw.randint(1, 4),
        micro=draw.choice([1, 1, 2]), every=draw.choice([1, 1, 2]), clip=draw.choice([None, None, 0.5]),
        to_none=draw.random() < 0.8, evaluates=draw.random() < 0.3, with_loss=draw.random() < 0.5,
    )  # fmt: skip


# -- trainings ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Before:
    """What the training that is not recorded was like when a step began, and what it did to the parameters."""

    values: dict[str, Tensor]
    trained: dict[str, bool]
    generator: Tensor
    after: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # as an evaluation after the step finds them


def copies(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Detached copies."""
    return {name: one.detach().clone() for name, one in named}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()


Watch = Callable[[nn.Module, torch.optim.Optimizer], contextlib.AbstractContextManager[Any]]


def train(plan: Plan, watch: Watch = lambda *_: contextlib.nullcontext()) -> tuple[Network, list[Before]]:
    """Train the network of a plan, watched or not."""
    model = plan.make()
    optimizer = plan.optimizer(model)
    with watch(model, optimizer):
        return model, loop(plan, model, optimizer)


def loop(plan: Plan, model: Network, optimizer: torch.optim.Optimizer) -> list[Before]:
    """Every step, from freezing to the evaluation after it."""
    for index in plan.frozen:
        model.parts[index].requires_grad_(False)
    torch.manual_seed(plan.seed + 1)
    steps = []
    for step in range(plan.steps):
        if step == plan.thawed_at:
            model.requires_grad_(True)
        trained = {name: one.requires_grad for name, one in model.named_parameters()}
        steps.append(Before(copies(model.named_parameters()), trained, torch.get_rng_state()))
        optimizer.zero_grad(set_to_none=plan.to_none)
        for number in range(plan.micro):
            inputs, target = plan.batch(step, number)
            loss = plan.loss(model(*inputs), target)
            if loss.requires_grad:
                loss.backward()
        if plan.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        steps[-1].after = copies(model.named_parameters())
        steps[-1].buffers = copies(model.named_buffers())
        if plan.evaluates:
            with evaluating(model):
                plan.loss(model(*plan.batch(step, 0)[0]), plan.batch(step, 0)[1])
    return steps


def oracle(plan: Plan, model: Network, steps: list[Before]) -> list[dict[Key, Tensor]]:
    """For each step, what is to be recorded of it, in the order of the forwards and then of the parameters."""
    expected: list[dict[Key, Tensor]] = []
    gradients: dict[str, Tensor] = {}
    aside: dict[Key, Tensor] = {}
    for step, before in enumerate(steps):
        values = {name: one.clone().requires_grad_(before.trained[name]) for name, one in before.values.items()}
        gradients = {} if plan.to_none else {name: torch.zeros_like(one) for name, one in gradients.items()}
        tape, found = Tape(model, values, {}, "default"), aside
        torch.set_rng_state(before.generator)
        for number in range(plan.micro):
            loss = noted_pass(plan, tape, model, plan.batch(step, number), number, aside)
            wanted = {**tape.watched, **{name: one for name, one in values.items() if one.requires_grad}}
            tape.watched = {}
            if not loss.requires_grad:
                continue
            for key, one in zip(
                wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True), strict=True
            ):
                if isinstance(key, tuple) and one is not None:
                    tape.noted[key] = one
                elif one is not None:
                    gradients[key] = gradients[key] + one if key in gradients else one
        found.update(tape.noted)
        if plan.clip is not None and gradients:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients.values()]))
            gradients = {name: one * (plan.clip / (norm + 1e-6)).clamp(max=1.0) for name, one in gradients.items()}
        for name in before.values:
            owner, _, attribute = name.rpartition(".")
            stream, sort = (
                owner if attribute in ("weight", "bias") else name,
                "bias" if "bias" in attribute else "weight",
            )
            found["biases" if sort == "bias" else "weights", stream, "default", 0, ""] = before.values[name]
            if name in gradients:
                found[f"{sort}_gradients", stream, "default", 0, ""] = gradients[name]
            found[f"{sort}_updates", stream, "default", 0, ""] = before.after[name] - before.values[name]
        if step % plan.every:
            found = {key: one for key, one in found.items() if key[2] == "eval"}
        expected.append(found)
        aside = {}
        if plan.evaluates:
            tape = Tape(model, before.after, before.buffers, "eval")
            with torch.no_grad():
                noted_pass(plan, tape, model, plan.batch(step, 0), 0, {})
            aside = tape.noted
    return [*expected, aside]


def noted_pass(
    plan: Plan, tape: Tape, model: Network, batch: tuple[Any, Tensor], number: int, before: dict[Key, Tensor]
) -> Tensor:
    """A forward and its loss, with what the network gets and gives; `before` was noted earlier of the same step."""
    inputs, target = batch
    tape.note(("input_data", ""), None, number, arguments(*inputs))
    output = tape.call(model, *inputs)
    loss = plan.loss(output, target)
    seen: dict[str, Any] = {"network_output": output}
    if loss.requires_grad:  # what `backward` is called on, whatever made it
        seen["loss"] = loss
    tag = tape.tag
    if plan.with_loss:
        # nothing is made of what the loss function gives, so its only term is the loss
        terms = {"mse_loss": loss}
        seen = {"network_output": added(output), "input_labels": target, "loss_terms": terms, "loss": loss}
        if not loss.requires_grad:  # all that it depends on is frozen: as the loss of an evaluation
            tape.tag, number = "eval", sum(key[0] == "loss" and key[2] == "eval" for key in {**tape.noted, **before})
    for kind, value in seen.items():
        tape.note((kind, ""), None, number, value)
    tape.tag = tag
    tape.watched = {key: one for key, one in tape.watched.items() if key[0]}
    return loss


def heard(plan: Plan) -> tuple[Network, list[Message]]:
    """Train under an exporter; what a receiver heard."""
    exporter, collect = Exporter(capture=capture(plan)), Collect("*")
    exporter.message_bus.register(collect)

    @contextlib.contextmanager
    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        exporter.set_model(model)
        exporter.set_optimizer(optimizer)
        exporter.watch_backward()
        if plan.with_loss:
            exporter.set_loss(F.mse_loss)
        yield
        exporter.finish()
        exporter.detach()

    model, _ = train(plan, watch)
    assert all("fast path" in problem["why"] for problem in exporter.problems), (plan.seed, exporter.problems)
    return model, list(collect)


def stored(plan: Plan, path: Path) -> tuple[Network, list[Message]]:
    """Train under `tracer.record`; what stands in the trace."""
    loss = F.mse_loss if plan.with_loss else None
    model, _ = train(plan, lambda *parts: tracer.record(path, *parts, loss=loss, capture=capture(plan)))
    with tracer.open(path) as trace:
        assert trace.status == "finished", plan.seed
        return model, list(trace.messages())


def capture(plan: Plan) -> Capture:
    """All kinds, of all modules, those that only contain others included."""
    return Capture(kinds=DATA_KINDS, modules="*", every=plan.every)


def check(seed: int, folder: Path) -> None:
    """A training is the same with and without a recorder, and what is recorded is what the oracle says."""
    one = plan(seed)
    plain, steps = train(one)
    ended = torch.get_rng_state()
    recorded, messages = stored(one, folder / f"{seed}.zarr") if seed % 5 == 0 else heard(one)
    assert torch.equal(ended, torch.get_rng_state()), seed
    for (name, left), right in zip(plain.state_dict().items(), recorded.state_dict().values(), strict=True):
        equal(right, left, 0.0, (seed, name))
    messages = [message for message in messages if message.data is not None]
    coarse = any(value.dtype is torch.bfloat16 for value in steps[0].values.values())
    for step, expected in enumerate(oracle(one, plain, steps)):
        keys = [key_of(message) for message in messages if message.global_step == step]
        found = {key_of(message): message.data for message in messages if message.global_step == step}
        assert len(found) == len(keys), seed
        assert set(found) == set(expected), (seed, step, set(found) ^ set(expected))
        ordered = ("layer_inputs", "activations")
        assert [key for key in keys if key[0] in ordered] == [key for key in expected if key[0] in ordered], (
            seed,
            step,
        )
        for key, value in expected.items():
            rounding = 0.0 if one.exact or key[0] in EXACT else 1e-4
            if key[0] in ("weight_gradients", "bias_gradients"):  # which may be summed in another order
                rounding = 0.1 if coarse else 1e-4
            equal(found[key], value, rounding, (seed, step, key))
    for module in recorded.modules():
        assert not module._forward_hooks, seed
        assert not module._forward_pre_hooks, seed


EXACT = ("input_data", "input_labels", "weights", "biases", "weight_updates", "bias_updates")
"""What does not depend on how something is computed."""


def equal(found: Tensor | None, expected: Tensor, rounding: float, where: Any) -> None:
    """Up to the rounding of another order or formula, or to the last bit; a training that explodes has NaN."""
    torch.testing.assert_close(
        found, expected, rtol=rounding, atol=rounding / 10, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )


def key_of(message: Message) -> Key:
    """What tells a message from the others of its step."""
    return message.kind, message.key, message.tag, message.call, message.leaf


@pytest.mark.parametrize("part", [*range(3), *(pytest.param(part, marks=pytest.mark.slow) for part in range(3, 8))])
def test_random_models(part: int, tmp_path: Path) -> None:
    """Two hundred networks, twenty-five at a time; seventy-five in each `make test`."""
    for seed in range(25 * part, 25 * part + 25):
        check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_random_models(part: int, tmp_path: Path) -> None:
    """Two thousand more."""
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        check(seed, tmp_path)
