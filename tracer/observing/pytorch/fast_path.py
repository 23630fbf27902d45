"""Hooks step aside for torch's fast path in evaluations, where nobody wants what is inside.

In evaluations, `nn.TransformerEncoderLayer` computes everything in one function, unless it or a module inside has a
hook. To leave evaluations unchanged, an exporter's hooks are removed while such a layer runs. Meanwhile two global
module hooks wait for the layer's end, or for a call of a module inside, which shows that torch does not take the fast
path.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tracer import walking
from tracer.observing.pytorch.hooks import Hanging, Hook, Role

Layer = nn.TransformerEncoderLayer
Hung = tuple[Any, Hanging]


def may_take_it(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch may take a layer's fast path in this call. If False, it surely does not."""
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
    """The hooks on a layer and inside it, while they are removed for one call.

    Parameters
    ----------
    layer : Layer
        The layer, whose hooks before its forward are running.
    hung : sequence of (Module, Hanging)
        Our hooks on the layer and inside it, each with its owner.
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
        self.end()  # a module inside is called, so torch does not take the fast path
        self._call(module, Role.BEFORE_FORWARD, args, {})

    def _after_any(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.over or module is not self._layer or threading.get_ident() != self._thread:
            return
        if output is None:  # the forward raised; torch calls the layer's own hooks afterwards
            self._put_back()
            return
        self.end()
        for role in (Role.AFTER_FORWARD, Role.AFTER_ROOT):
            self._call(module, role, args, {}, output)

    def _call(self, module: nn.Module, role: Role, *arguments: Any) -> None:
        """Call our hooks on a module, which torch no longer finds in this call."""
        for on, hanging in self._hung:
            if on is module and isinstance(hanging.hook, Hook) and hanging.hook.role is role:
                hanging.hook(module, *arguments)

    def _put_back(self) -> None:
        if not self.over:
            self.over = True
            for on, hanging in self._hung:
                hanging.hang_again(on)

    def end(self) -> None:
        """Put the hooks back, and stop waiting."""
        self._put_back()
        for one in self._waiting:
            one.remove()
        self._waiting = []


class Asides:
    """The layers for which hooks step aside.

    Attributes
    ----------
    layers : dict
        By id, the layers that have a fast path: our hooks on them and inside them.
    """

    def __init__(self) -> None:
        self.layers: dict[int, list[Hung]] = {}
        self._last: dict[int, Aside] = {}  # the last one of each thread

    @property
    def over(self) -> bool:
        """Whether all hooks are back."""
        return all(one.over for one in self._last.values())

    def begin(self, layer: Layer) -> None:
        """Remove a layer's hooks for the call that begins."""
        self._last[threading.get_ident()] = Aside(layer, self.inside(layer))

    def inside(self, layer: Layer) -> list[Hung]:
        """Our hooks on a layer and inside it, each with its owner."""
        return self.layers.get(id(layer), [])

    def end_last(self) -> None:
        """Put back the hooks that this thread has removed."""
        last = self._last.pop(threading.get_ident(), None)
        if last is not None:
            last.end()

    def end(self) -> None:
        """Put back all hooks."""
        for one in self._last.values():
            one.end()
        self._last = {}
