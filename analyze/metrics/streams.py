"""What metrics with a memory remember by: the stream a message belongs to, and how that is written into a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from tracer.messaging.messages import Message, MessageBundle

Stream: TypeAlias = tuple[str | None, str, int, str, int]
"""Module (None for the network), tag, call, leaf and rank: what tells the streams of one kind apart."""

_FIELDS = ("module", "tag", "call", "leaf", "rank")


def stream_of(source: Message | MessageBundle) -> Stream:
    """The stream of a message or bundle.

    Examples
    --------
    >>> import torch
    >>> from tracer.messaging.messages import ModuleMessage
    >>> where = dict(module="fc", global_step=3, train_step=3, epoch=0)
    >>> stream_of(ModuleMessage(kind="weights", data=torch.ones(2), **where))
    ('fc', 'default', 0, '', 0)
    """
    return source.key, source.tag, source.call, source.leaf, source.rank


def packed(memory: Mapping[Stream, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A memory by stream as plain values: one dictionary for each stream.

    Examples
    --------
    >>> packed({("fc", "default", 0, "", 0): {"length": 2.5}})
    [{'module': 'fc', 'tag': 'default', 'call': 0, 'leaf': '', 'rank': 0, 'length': 2.5}]
    """
    return [{**dict(zip(_FIELDS, stream, strict=True)), **values} for stream, values in memory.items()]


def unpacked(state: Iterable[Mapping[str, Any]]) -> dict[Stream, dict[str, Any]]:
    """What `packed` has packed.

    Examples
    --------
    >>> unpacked([{"module": "fc", "tag": "default", "call": 0, "leaf": "", "rank": 0, "length": 2.5}])
    {('fc', 'default', 0, '', 0): {'length': 2.5}}
    """
    return {
        (one["module"], one["tag"], one["call"], one["leaf"], one["rank"]): {
            name: value for name, value in one.items() if name not in _FIELDS
        }
        for one in state
    }
