"""Conditions of captures: user functions that see each message before it is published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tracer.errors import MessageError
from tracer.memory import Memory
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.observing.pytorch.tensors import copied


class _Shown(Message):
    """A message whose data is copied on first access. The copy may be modified."""

    __slots__ = ()

    @property
    def data(self) -> Tensor | None:
        """The copy."""
        given, source, memory = self.about  # type: ignore[attr-defined]
        if given is None:
            if source is None:
                raise MessageError("the data of this message is there only until the condition has answered")
            given = copied(source, memory)
            object.__setattr__(self, "about", (given, source, memory))
        return given  # type: ignore[no-any-return]


class _ShownOfNetwork(_Shown, NetworkMessage):
    __slots__ = ("about",)


class _ShownOfModule(_Shown, ModuleMessage):
    __slots__ = ("about",)


_FIELDS = ("kind", "global_step", "train_step", "epoch", "tag", "call", "leaf", "rank", "sampling")


def meets(condition: Callable[[Message], bool], message: Message, memory: Memory) -> bool:
    """Whether a message meets a user's condition, which gets a copy of the data on access."""
    shown: Any = object.__new__(_ShownOfNetwork if message.key is None else _ShownOfModule)
    put = object.__setattr__  # messages are frozen
    for name in _FIELDS:
        put(shown, name, getattr(message, name))
    if message.key is not None:
        put(shown, "module", message.key)
    put(shown, "about", (None, message.data, memory))
    try:
        return bool(condition(shown))
    finally:
        given, _, _ = shown.about
        put(shown, "about", (given, None, memory))
