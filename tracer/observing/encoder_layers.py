"""Hooks step aside for layers that torch may compute in a single function (see `pytorch/fast_path.py`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from tracer.observing.part import Ground, Part
from tracer.observing.passes import Passes
from tracer.observing.pytorch.fast_path import may_take_it
from tracer.observing.pytorch.hanging import before_forward
from tracer.observing.pytorch.hooks import Hook, Role, Site

_INNER = ("activations", "layer_inputs", "layer_gradients", "input_gradients")
"""The kinds of messages about the calls of modules."""


class EncoderLayers(Part):
    """Observes calls of ``nn.TransformerEncoderLayer``."""

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes

    def hang(self) -> None:
        """Hang a hook on each such layer that has other hooks on it or inside."""
        asides = self.wiring.asides
        asides.layers = {}
        for path, one in self.models.parts():
            is_layer = isinstance(one, nn.TransformerEncoderLayer)
            if is_layer and self.wiring.hung_inside(one) and self.wiring.takes_hooks(path, one):
                self.wiring.hang(Site(one, Role.BEFORE_LAYER, path, before_forward, self.before, self.quiet_before))
                asides.layers[id(one)] = self.wiring.hung_inside(one)

    def quiet_before(self, args: tuple[Any, ...]) -> bool:
        """Whether a layer does not take its fast path, because it is in training mode."""
        return bool(args[0].training)

    def before(self, path: str, module: Any, args: Any, kwargs: Any) -> None:
        """Step aside for a layer that may take torch's fast path, unless a capture names what is inside."""
        asides = self.wiring.asides
        asides.end_last()
        if self.publisher.collecting is not None or not may_take_it(module, args, kwargs):
            return  # probes observe the inside anyway
        running = self.passes.enter_at(path, module)
        hung = asides.inside(module)
        inside = {hanging.hook.name for on, hanging in hung if on is not module and isinstance(hanging.hook, Hook)}
        tag = running.tag
        heard = running.listening or running.counts is not None  # all passes of an evaluation must take the same path
        streams = [(kind, one) for kind in _INNER for one in inside] if heard else []
        if any(self.demand.named(kind, one, tag) for kind, one in streams):
            why = (
                f"passes tagged {tag!r} do not take it, because a capture that names their tag takes what is inside; "
                "their results may differ in rounding from unwatched ones"
            )
            self.problems.note(f"torch's fast path in {path!r}", why)
            return
        if any(self.demand.stream(kind, one, tag).asked for kind, one in streams):
            why = f"torch's fast path calls nothing inside; a capture whose tags name {tag!r} switches it off"
            self.problems.note(f"the inside of {path!r} in passes tagged {tag!r}", why, warn=False)
        asides.begin(module)
