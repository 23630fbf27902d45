"""The pulse of a step: the hashes, or the statistics, of all tensors of a step, as the rows of one message.

A message of the kind `PULSE` stands for a message of each of its rows. A `Receiver` gets the messages of the rows,
unless it `takes_pulses`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tracer.messaging.messages import Message, checked

PULSE: Final = "pulse"
"""The kind of a message whose data is a row for each of several messages, along the first axis."""


class PulseRow(NamedTuple):
    """What the message of a row has besides the counters, tag and rank of its pulse.

    Attributes
    ----------
    kind : str
    module : str or None
    leaf : str
    call : int
    sampling : mapping or None
    """

    kind: str
    module: str | None
    leaf: str
    call: int
    sampling: Mapping[str, Any] | None


def is_pulse(message: Message) -> bool:
    """Whether a message is a pulse, and not a number of the user's own with that name."""
    return message.kind == PULSE and message.sampling is not None


def sampling_of(rows: Sequence[PulseRow], numbers: Sequence[str]) -> dict[str, Any]:
    """The sampling of a pulse with these rows (JSON values); `numbers` names the elements of a row.

    Examples
    --------
    >>> told = sampling_of([PulseRow("weights_hash", "0", "", 0, {"reduce": "hash"})], [])
    >>> told
    {'rows': [['weights_hash', '0', '', 0, 0]], 'samplings': [{'reduce': 'hash'}], 'numbers': []}
    >>> rows_of(told)
    (PulseRow(kind='weights_hash', module='0', leaf='', call=0, sampling={'reduce': 'hash'}),)
    """
    samplings: list[Mapping[str, Any] | None] = []
    told = []
    for row in rows:
        if row.sampling not in samplings:
            samplings.append(row.sampling)
        told.append([row.kind, row.module, row.leaf, row.call, samplings.index(row.sampling)])
    return {"rows": told, "samplings": samplings, "numbers": list(numbers)}


def rows_of(sampling: Mapping[str, Any]) -> tuple[PulseRow, ...]:
    """The rows of a pulse with this sampling.

    Raises
    ------
    KeyError, TypeError, ValueError
        If the sampling is not one of a pulse.
    """
    samplings = sampling["samplings"]
    if not isinstance(samplings, list) or not all(one is None or isinstance(one, Mapping) for one in samplings):
        raise TypeError("the samplings of a pulse are no list of objects")
    found = []
    for kind, module, leaf, call, number in sampling["rows"]:
        named = isinstance(kind, str) and kind and isinstance(leaf, str) and isinstance(module or "", str)
        if not named or type(call) is not int or type(number) is not int or call < 0 or number < 0:
            raise ValueError(f"a row of a pulse is {[kind, module, leaf, call, number]}")
        if number >= len(samplings):
            raise ValueError(f"a row of a pulse has the sampling {number} of {len(samplings)}")
        found.append(PulseRow(kind, module, leaf, call, samplings[number]))
    if not found:
        raise ValueError("a pulse has no rows")
    return tuple(found)


def messages_of(pulse: Message, rows: Iterable[tuple[int, PulseRow]]) -> Iterator[Message]:
    """The messages of some rows of a pulse, each given with its index."""
    assert pulse.data is not None
    table = pulse.data.unbind()
    step, train_step, epoch, tag, rank = pulse.global_step, pulse.train_step, pulse.epoch, pulse.tag, pulse.rank
    for place, (kind, module, leaf, call, sampling) in rows:
        yield checked(kind, module, step, train_step, epoch, tag, call, leaf, rank, table[place], sampling)
