"""Random networks: what a seed stands for, a network of parts, an optimizer and a loop."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.observing.random_parts import (
    PURE,
    WIDTH,
    WORDS,
    Answer,
    Answering,
    Attended,
    Casting,
    Convolved,
    Halves,
    Named,
    Nest,
    Normed,
    Recurrent,
    Residual,
    Still,
    Tape,
    Tied,
    Writing,
    added,
    tensors,
)


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
