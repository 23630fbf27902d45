"""Torch's fast path in evaluations: hooks step aside for it where nobody asked for what is inside.

`nn.TransformerEncoderLayer` computes all of itself in one function in evaluations, unless a hook hangs on it or on a
module inside. So that evaluations are what they are unwatched, an exporter's hooks are off while such a layer runs, and
two hooks of all modules wait for what it does: for its end, or for a call of something inside, with which torch shows
that it goes the other way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tracer import walking
from tracer.observing.pytorch.hanging import Hanging
from tracer.observing.pytorch.hooks import Hook, Role

Layer = nn.TransformerEncoderLayer
Hung = tuple[Any, Hanging]


def may_take_it(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch may take the fast path of a layer in this call, as far as that is easily told; else it does not."""
    source = args[0] if args else kwargs.get("src")
    attention = layer.self_attn
    return (
        not layer.training
        and isinstance(source, Tensor)
        and source.dim() == 3
        and attention.batch_first
        and attention.in_proj_bias is not None
        and attention.num_heads % 2 == 0
        and not torch.is_autocast_enabled()
        and torch.backends.mha.get_fastpath_enabled()
        and not (
            torch.is_grad_enabled()
            and (source.requires_grad or any(one.requires_grad for one in walking.parameters(layer)))
        )
        and not any(
            not isinstance(hook, Hook)
            for one in walking.modules(layer)
            for hooks in (one._forward_hooks, one._forward_pre_hooks)
            for hook in hooks.values()
        )
    )


class Aside:
    """The hooks on a layer and inside, while they are off for one call of it.

    Parameters
    ----------
    layer : Layer
        The layer, whose hooks before its forward are running.
    hung : sequence of (Module, Hanging)
        Our hooks on it and on what is inside, each with what it hangs on.
    """

    def __init__(self, layer: Layer, hung: Sequence[Hung]) -> None:
        self.over = False
        self._layer = layer
        self._hung = hung
        self._thread = threading.get_ident()
        for _, hanging in hung:
            hanging.take_off()
        every = sys.modules[nn.Module.__module__]
        always = ("_global_forward_hooks_always_called",)
        self._waiting = [
            Hanging(every, "_global_forward_pre_hooks", self._before_any),
            Hanging(every, "_global_forward_hooks", self._after_any, always),
        ]

    def _before_any(self, module: nn.Module, args: Any) -> None:
        if self.over or threading.get_ident() != self._thread:
            return
        self.end()  # something inside is called, so torch does not take the fast path
        self._call(module, Role.BEFORE_FORWARD, args, {})

    def _after_any(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.over or module is not self._layer or threading.get_ident() != self._thread:
            return
        if output is None:  # the forward raised; torch calls what hangs on the layer itself after this
            self._put_back()
            return
        self.end()
        for role in (Role.AFTER_FORWARD, Role.AFTER_ROOT):
            self._call(module, role, args, {}, output)

    def _call(self, module: nn.Module, role: Role, *arguments: Any) -> None:
        """Call our hooks on a module, which torch does not find any more in this call."""
        for on, hanging in self._hung:
            if on is module and isinstance(hanging.hook, Hook) and hanging.hook.role is role:
                hanging.hook(module, *arguments)

    def _put_back(self) -> None:
        if not self.over:
            self.over = True
            for on, hanging in self._hung:
                hanging.hang_again(on)

    def end(self) -> None:
        """Put the hooks back, and wait no longer."""
        self._put_back()
        for one in self._waiting:
            one.remove()
        self._waiting = []


class Asides:
    """The layers for which hooks step aside.

    Attributes
    ----------
    layers : dict
        By id, the layers that have a fast path: what of ours hangs on them and inside.
    """

    def __init__(self) -> None:
        self.layers: dict[int, list[Hung]] = {}
        self._last: dict[int, Aside] = {}  # by thread, the last one

    @property
    def over(self) -> bool:
        """Whether all hooks are back."""
        return all(one.over for one in self._last.values())

    def begin(self, layer: Layer) -> None:
        """Take the hooks of a layer off for the call that begins."""
        self._last[threading.get_ident()] = Aside(layer, self.inside(layer))

    def inside(self, layer: Layer) -> list[Hung]:
        """Our hooks on a layer and in it, each with what it hangs on."""
        return self.layers.get(id(layer), [])

    def end_last(self) -> None:
        """Put back what this thread has taken off."""
        last = self._last.pop(threading.get_ident(), None)
        if last is not None:
            last.end()

    def end(self) -> None:
        """Put back all hooks."""
        for one in self._last.values():
            one.end()
        self._last = {}
