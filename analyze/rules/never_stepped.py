"""Weights that get gradients, and that no optimizer's step ever changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

from analyze.metrics.checks import check, is_whole
from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding, Severity
from analyze.rules.header import entries
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message


class _Weight:
    """A weight of which no update is recorded.

    Attributes
    ----------
    first : Place
        Where it was recorded first.
    numbers : tuple of float
        Its statistics there.
    steps : int
        At how many recorded steps since then a gradient came to its layer's outputs.
    """

    def __init__(self, message: Message, numbers: tuple[float, ...]) -> None:
        self.first = Place.of(message)
        self.numbers = numbers
        self.steps = 0


@final
class NeverStepped(Rule):
    """Weights that get gradients and stay as they are, because no optimizer that steps has them.

    Parameters
    ----------
    steps : int
        At how many recorded steps gradients must have come.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where a weight that asks for gradients is the same at two recorded steps, no update of it is recorded, and
    at `steps` steps or more between them the outputs of its layer had a gradient while other weights were changed. It
    is a warning if more than half of the network's weights were changed, else a note: a part may be trained alone on
    purpose. Weights whose updates are recorded are judged by `unchanged`.
    *Needs* ``weights`` at two steps, ``layer_gradients`` and ``weight_updates``, and a header that names the
    parameters.
    *Source*: PyTorch's documentation of ``torch.optim``: an optimizer's step updates the parameters that it was given.
    """

    name = "never_stepped"
    takes_statistics = True
    memory = ("kept", "changed", "updated", "reached")
    judges = "weights, the gradients of their layers, and updates"
    numbers = ("steps",)
    advice = "give these parameters to an optimizer, and call its step() after each backward"

    def __init__(self, *, steps: int = 10, **where: Unpack[Looking]) -> None:
        check(is_whole(steps, 1), "steps are a positive integer", steps)
        super().__init__(["weights", "layer_gradients", "weight_updates"], **where)
        self.steps = steps
        self.learnable: set[str] = set()  # the modules whose weight asks for gradients
        self.kept: dict[str, _Weight] = {}
        self.updated: set[str] = set()  # modules of which an update is recorded
        self.changed: set[str] = set()  # modules whose weight an update has changed
        self.reached: set[str] = set()  # modules whose outputs have a gradient in this step

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the weights that ask for gradients."""
        for one in entries(model, "parameters"):
            module, _, name = str(one.get("name")).rpartition(".")
            if name == "weight" and one.get("requires_grad") is True:
                self.learnable.add(module)

    def look(self, message: Message) -> Iterator[Message]:
        """Compare a weight with what it was; note gradients and updates."""
        extent, module = Extent.of(message), message.key
        if module not in self.learnable or extent is None or not extent.count or not extent.floating:
            return
        if message.kind == "layer_gradients":
            if shared(message, "norm2") > 0:
                self.reached.add(module)
        elif message.kind == "weight_updates":
            self.updated.add(module)
            self.kept.pop(module, None)
            if shared(message, "zeros") < extent.count:
                self.changed.add(module)
        else:
            self.judged(message)
            if module not in self.updated:
                yield from self._compare(module, message)

    def _compare(self, module: str, message: Message) -> Iterator[Message]:
        """Judge a weight of which no update is recorded."""
        numbers = tuple(shared(message, name) for name in ("sum", "norm2", "min", "max"))
        kept = self.kept.get(module)
        if kept is None or kept.numbers != numbers:  # the program may change it by itself
            self.kept[module] = _Weight(message, numbers)
        elif kept.steps >= self.steps:
            most = 2 * len(self.changed) > len(self.learnable)
            severity = Severity.WARNING if most else Severity.NOTE
            place, steps = Place.of(message), kept.steps
            yield from self.judge(place, True, steps, self.steps, steps, since=kept.first, severity=severity)

    def look_back(self) -> Iterator[Message]:
        """Count a step in which gradients came while other weights were changed."""
        if self.changed:
            for module in self.reached & self.kept.keys():
                self.kept[module].steps += 1
        self.reached = set()
        yield from ()

    def evidence(self, found: Finding) -> str:
        return (
            f"it is in step {found.last:,} what it was in step {found.first:,}, though its layer had gradients at "
            f"{found.numbers['steps']:.0f} recorded steps between them"
        )
