"""Many small messages at once: `Stack`, messages of one kind; `Stretch`, consecutive messages of a trace.

The overhead of a single message equals the arithmetic of thousands of numbers. So a replay passes small messages by the
thousand, with their data in one tensor, to receivers with `takes_many`. NumPy is imported inside functions, because
this module is imported wherever messages are.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

from tracer.errors import MessageError
from tracer.messaging.messages import Message, checked, clock_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

COUNTERS: Final = ("global_step", "train_step", "epoch", "call")
"""The columns of `Heads.counters`."""
_KEPT: Final = 64
"""Messages that share one block of memory: a message that is kept keeps the whole block in memory."""

Wants: TypeAlias = "Callable[[str, str | None, str | None, int | None], bool]"
"""The signature of `Receiver.wants`: kind, module, tag and step."""


class Source(NamedTuple):
    """What distinguishes streams of one kind; the fields are those of a `Message`."""

    module: str | None
    tag: str
    leaf: str
    rank: int


@final
@dataclass(frozen=True, eq=False)
class Heads:
    """The fields of many messages except kind and data; a stack shares them with the stacks of its answers.

    Attributes
    ----------
    sources : sequence of Source
        The sources that `source_ids` refer to; a source may have no message here.
    source_ids : ndarray of int64, (n,)
        The index of each message's source in `sources`.
    counters : ndarray of int64, (n, 4)
        The columns are `COUNTERS`.
    places : ndarray of int64, (n,)
        The position of each message in its stretch, ascending. An answer has the place of the message it answers.
    """

    sources: Sequence[Source]
    source_ids: NDArray[np.int64]
    counters: NDArray[np.int64]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def present(self) -> list[int]:
        """The indices of the sources that have a message here, ascending."""
        import numpy as np

        present: list[int] = np.flatnonzero(np.bincount(self.source_ids)).tolist()
        return present

    def only(self, chosen: NDArray[np.int64] | slice) -> Heads:
        """The heads of the `chosen` messages."""
        return Heads(self.sources, self.source_ids[chosen], self.counters[chosen], self.places[chosen])


@final
@dataclass(frozen=True, eq=False)
class Stack:
    """Many small messages of one kind, dtype and shape, in order.

    Attributes
    ----------
    kind : str
    heads : Heads
        The module, tag and counters of each message.
    data : torch.Tensor or None, (n, ...)
        The data of each message; None for events. All receivers get the same tensor, as with a `Message`.
    samplings : sequence of mapping or None
        `Message.sampling` of each source's messages. None: no message has a sampling, as in answers.

    Examples
    --------
    >>> import numpy as np, torch
    >>> sources = [Source("fc", "default", "", 0), Source("head", "default", "", 0)]
    >>> counters = np.array([[7, 7, 0, 0], [7, 7, 0, 0], [8, 8, 0, 0]])
    >>> heads = Heads(sources, np.array([0, 1, 0]), counters, np.arange(3))
    >>> stack = Stack("weights_norm2", heads, torch.tensor([1.0, 2.0, 3.0]))
    >>> doubled = stack.answered("weights_norm2_doubled", 2 * stack.data)
    >>> [(message.key, message.global_step, float(message.data)) for message in doubled]
    [('fc', 7, 2.0), ('head', 7, 4.0), ('fc', 8, 6.0)]
    """

    kind: str
    heads: Heads
    data: Tensor | None
    samplings: Sequence[Mapping[str, Any] | None] | None = None

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def steps(self) -> NDArray[np.int64]:
        """`Message.step` of each message."""
        column: NDArray[np.int64] = self.heads.counters[:, COUNTERS.index(clock_of(self.kind))]
        return column

    def answered(self, kind: str, data: Tensor | NDArray[np.float64]) -> Stack:
        """An answer to each message: a message of `kind` with the same counters, tag and module; see `derived`.

        Raises
        ------
        MessageError
            If the number of answers differs from the number of messages.
        """
        import torch

        data = data.detach() if isinstance(data, torch.Tensor) else torch.from_numpy(data)
        if data.ndim == 0 or len(data) != len(self):
            raise MessageError(f"{len(self)} {self.kind} messages have an answer each, not {tuple(data.shape)} numbers")
        return Stack(kind, self.heads, data)

    def only(self, chosen: NDArray[np.bool_]) -> Stack | None:
        """The `chosen` messages; the stack itself if all are chosen, None if none is."""
        import numpy as np

        if chosen.all():
            return self
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return None
        data = None if self.data is None else _rows(self.data, rows)
        return Stack(self.kind, self.heads.only(rows), data, self.samplings)

    def sliced(self, begin: int, end: int) -> Stack:
        """The messages from `begin` up to, not including, `end`, without a copy."""
        data = None if self.data is None else self.data[begin:end]
        return Stack(self.kind, self.heads.only(slice(begin, end)), data, self.samplings)

    def of_sources(self, wants: Wants) -> NDArray[np.bool_]:
        """The messages whose source is wanted in some step."""
        import numpy as np

        sources, present = self.heads.sources, self.heads.present
        wanted = [wants(self.kind, sources[one].module, sources[one].tag, None) for one in present]
        if all(wanted):
            return np.ones(len(self), np.bool_)
        of_source = np.zeros(present[-1] + 1, np.bool_)
        of_source[present] = wanted
        return of_source[self.heads.source_ids]

    def __iter__(self) -> Iterator[Message]:
        """The messages one by one, each with a copy of its data."""
        kind, sources, samplings = self.kind, self.heads.sources, self.samplings
        counters = self.heads.counters.tolist()
        for number, (global_step, train_step, epoch, call), data in zip(
            self.heads.source_ids.tolist(), counters, self._tensors(), strict=False
        ):
            module, tag, leaf, rank = sources[number]
            sampling = None if samplings is None else samplings[number]
            yield checked(kind, module, global_step, train_step, epoch, tag, call, leaf, rank, data, sampling)

    def _tensors(self) -> Iterator[Tensor | None]:
        if self.data is None:
            yield from itertools.repeat(None, len(self))
            return
        for begin in range(0, len(self), _KEPT):
            # rows of one tensor share its version counter; `.data` gives each row its own
            yield from (row.data for row in self.data[begin : begin + _KEPT].clone().unbind())


@final
class Stretch:
    """Messages as stacks, in the order in which they are published.

    Parameters
    ----------
    stacks : sequence of Stack
        Messages with the same place are ordered by their stacks.

    Examples
    --------
    >>> import numpy as np, torch
    >>> heads = Heads([Source(None, "default", "", 0)], np.zeros(2, np.int64), np.zeros((2, 4), np.int64), np.arange(2))
    >>> losses = Stack("loss", heads, torch.tensor([1.0, 2.0]))
    >>> answers = losses.answered("loss_doubled", 2 * losses.data)
    >>> [(message.kind, float(message.data)) for message in Stretch([losses, answers])]
    [('loss', 1.0), ('loss_doubled', 2.0), ('loss', 2.0), ('loss_doubled', 4.0)]
    """

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self.stacks = tuple(stacks)

    def __len__(self) -> int:
        return sum(map(len, self.stacks))

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The order of publication, as indices into the concatenated stacks."""
        import numpy as np

        if not self.stacks:
            return np.zeros(0, np.int64)
        return np.argsort(np.concatenate([one.heads.places for one in self.stacks]), kind="stable")

    @property
    def owners(self) -> NDArray[np.int64]:
        """The index of each message's stack, in the order of publication."""
        import numpy as np

        return np.repeat(np.arange(len(self.stacks)), [len(one) for one in self.stacks])[self.order]

    def wanted(self, wants: Wants) -> Stretch | None:
        """The messages whose source is wanted in some step; None if there are none."""
        return self._chosen([one.of_sources(wants) for one in self.stacks])

    def parted(self, alone: Wants) -> tuple[Stretch | None, Stretch | None]:
        """The messages split into those that may be published together and those that must be published `alone`."""
        chosen = [one.of_sources(alone) for one in self.stacks]
        return self._chosen([~one for one in chosen]), self._chosen(chosen)

    def _chosen(self, rows: Iterable[NDArray[np.bool_]]) -> Stretch | None:
        each = zip(self.stacks, rows, strict=True)
        found = [chosen for one, of_one in each if (chosen := one.only(of_one)) is not None]
        if len(found) == len(self.stacks) and all(map(operator.is_, found, self.stacks)):
            return self
        return Stretch(found) if found else None

    def between(self, others: Stretch) -> Iterator[tuple[Stretch | None, Message | None]]:
        """Merge by place: yield the messages of this stretch before each message of `others`, and that message.

        The last pair holds the remaining messages, and None.
        """
        import numpy as np

        places = np.concatenate([one.heads.places for one in others.stacks])[others.order]
        # for each stack, the index of the first message at or after each place
        cuts = [[0, *np.searchsorted(one.heads.places, places).tolist(), len(one)] for one in self.stacks]
        for number, message in enumerate(itertools.chain(others, [None])):
            found = [
                one.sliced(begin, end)
                for one, cut in zip(self.stacks, cuts, strict=True)
                if (begin := cut[number]) < (end := cut[number + 1])
            ]
            yield Stretch(found) if found else None, message

    def __iter__(self) -> Iterator[Message]:
        each = [iter(one) for one in self.stacks]
        return (next(each[number]) for number in self.owners.tolist())


def _rows(data: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Some rows of a tensor, selected as integers, because torch cannot index tensors of every dtype."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(data.itemsize, data.dtype)
    return data.view(bits).index_select(0, torch.from_numpy(rows)).view(data.dtype)


def gathered(stack: Stack, answers: Iterable[Iterable[Message] | None]) -> list[Stack]:
    """Stack answers that were given one by one.

    Parameters
    ----------
    stack : Stack
    answers : iterable of iterable of Message
        The answers to each message of the stack, in order.
    """
    import torch

    found: dict[tuple[int, str, object, object], tuple[list[int], list[Message]]] = {}
    for row, given in enumerate(answers):
        for number, answer in enumerate(given or ()):
            data = answer.data
            key = (number, answer.kind, None if data is None else data.dtype, None if data is None else data.shape)
            rows, messages = found.setdefault(key, ([], []))
            rows.append(row)
            messages.append(answer)
    # sorted, so that the second answer to a message is in a later stack than the first
    stacks = []
    for (_, kind, dtype, _), (rows, messages) in sorted(found.items(), key=lambda one: one[0][0]):
        data = None if dtype is None else torch.stack([one.data for one in messages if one.data is not None])
        heads, samplings = _heads(messages, stack.heads.places[rows])
        stacks.append(Stack(kind, heads, data, samplings))
    return stacks


def _heads(
    messages: Sequence[Message], places: NDArray[np.int64]
) -> tuple[Heads, list[Mapping[str, Any] | None] | None]:
    """The heads of some messages, and the samplings of their sources; None if no source has a sampling."""
    import numpy as np

    ids: dict[tuple[Source, int], int] = {}
    samplings: list[Mapping[str, Any] | None] = []
    source_ids = []
    for one in messages:
        source = Source(one.key, one.tag, one.leaf, one.rank)
        source_ids.append(ids.setdefault((source, id(one.sampling)), len(ids)))
        if len(ids) > len(samplings):
            samplings.append(one.sampling)
    counters = [(one.global_step, one.train_step, one.epoch, one.call) for one in messages]
    heads = Heads([source for source, _ in ids], np.array(source_ids, np.int64), np.array(counters, np.int64), places)
    return heads, samplings if any(one is not None for one in samplings) else None


@cache
def is_newer(cls: type, many: str, *single: str) -> bool:
    """Whether `many` is defined no further up the class hierarchy than any of the methods `single`.

    A subclass that overrides how a single message is answered, but not how many are, must get messages one by one.

    Examples
    --------
    >>> class Base:
    ...     def one(self): ...
    ...     def many(self): ...
    >>> class Changed(Base):
    ...     def one(self): ...
    >>> is_newer(Base, "many", "one"), is_newer(Changed, "many", "one")
    (True, False)
    """
    homes = {
        name: next(number for number, one in enumerate(cls.__mro__) if name in vars(one))
        for name in (many, *single)
        if hasattr(cls, name)
    }
    return all(homes[many] <= home for home in homes.values())


def has_own_methods(one: object) -> bool:
    """Whether an instance overrides a method of its class, as a profiler may do.

    Examples
    --------
    >>> class Plain:
    ...     def one(self): ...
    >>> plain, changed = Plain(), Plain()
    >>> changed.one = print
    >>> has_own_methods(plain), has_own_methods(changed)
    (False, True)
    """
    return any(callable(getattr(type(one), name, None)) for name in vars(one))
