"""The tag of passes of which it is not known yet what they are for."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from tracer.messaging.messages import EVAL_TAG
from tracer.observing.numbers import StreamKey

_NUMBERS = itertools.count()


class Held(NamedTuple):
    """A tensor of an undecided pass: its stream, a copy, and the number of its call within the pass, if it has any."""

    stream: StreamKey
    data: Tensor
    call: int | None


class UndecidedTag(str):
    """Stands for the tag of one pass until the pass is decided. No two passes have equal ones.

    Attributes
    ----------
    held : list of Held
        What was observed of the pass so far.
    losses : list of (str, Tensor)
        What its loss functions gave, by name; the name is empty if the model gave it as its whole loss.
    decided : str
        The tag that the pass turned out to have; empty before.
    shift : dict of str to int
        By path, how many calls of a module with that tag came before the first one of the pass.
    """

    decided: str
    shift: dict[str, int]
    held: list[Held]
    losses: list[tuple[str, Tensor]]

    def __new__(cls) -> UndecidedTag:
        new = super().__new__(cls, f"\0undecided {next(_NUMBERS)}")
        new.held, new.losses, new.decided, new.shift = [], [], "", {}
        return new

    def decide(self, tag: str, shift: dict[str, int]) -> None:
        """Give the pass its tag."""
        self.decided, self.shift = tag, shift


def decided(tag: str) -> str:
    """The tag itself, or what an undecided pass turned out to have; an evaluation's as long as nothing is known."""
    return (tag.decided or EVAL_TAG) if type(tag) is UndecidedTag else tag
