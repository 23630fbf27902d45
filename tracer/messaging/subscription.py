"""Which messages a subscriber takes: single messages (`Subscription`) or bundles (`SynchronizedSubscription`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG, KINDS, STATISTICS_SUFFIX, Message, MessageBundle, of_kind
from tracer.messaging.stacks import Stack, has_own_methods

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Incomplete = Literal["strict", "drop", "partial"]


class Subscription:
    """Takes messages one by one.

    Whether it takes a message depends on that message alone, never on earlier messages. So a replay of some steps, or
    of one module, gives the same messages as a full replay does for these.

    Parameters
    ----------
    kinds : str or iterable of str
    tag : str or None
        A glob over tags; ``"!default"`` means every tag except ``"default"``; None means every tag.
    subsample : int
        Take only messages whose clock is a multiple of this number; the clock is the epoch for epoch kinds, and the
        global step for all others.
    modules : str, iterable of str, or None
        Globs over dotted module paths; None means all. Network messages have no module and always pass.
    statistics : bool or "too"
        Whether recorded statistics (``weights_statistics``) are taken in place of the data. They come as messages of
        the data's kind. If a tensor has both, True takes the statistics, and ``"too"`` takes both; see `is_doubled`.
    optional : bool
        Whether the subscriber can answer without these messages, so that a trace without them lacks nothing.

    Raises
    ------
    MessageError
        If there are no kinds, or `subsample` is not a positive integer.

    Examples
    --------
    >>> some = Subscription("weights", subsample=3, modules="features.*")
    >>> [step for step in range(10) if some.wants("weights", "features.0", "default", step)]
    [0, 3, 6, 9]
    >>> some.wants("weights", "head", "default", 0), some.wants("biases", "features.0", "default", 0)
    (False, False)
    """

    def __init__(
        self,
        kinds: str | Iterable[str],
        tag: str | None = DEFAULT_TAG,
        subsample: int = 1,
        modules: str | Iterable[str] | None = None,
        *,
        statistics: bool | Literal["too"] = False,
        optional: bool = False,
    ) -> None:
        self.kinds: tuple[str, ...] = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if not self.kinds or not all(isinstance(kind, str) and kind for kind in self.kinds):
            raise MessageError(f"a subscription needs at least one kind, each a non-empty string, not {kinds!r}")
        if len(set(self.kinds)) != len(self.kinds):
            raise MessageError(f"a subscription names each kind once, not {', '.join(self.kinds)}")
        if isinstance(subsample, bool) or not isinstance(subsample, int) or subsample < 1:
            raise MessageError(f"subsample is a positive integer, not {subsample!r}")
        self.tag = tag
        self.subsample = subsample
        self.modules = (modules,) if isinstance(modules, str) else None if modules is None else tuple(modules)
        self.statistics = statistics
        self.optional = optional
        self._module_matches: dict[str, bool] = {}

    def stands_for(self, kind: str) -> str | None:
        """The kind under which messages of `kind` are taken; None if they are not taken."""
        if kind in self.kinds:
            return kind
        data = kind.removesuffix(STATISTICS_SUFFIX)
        return data if self.statistics and data != kind and data in self.kinds else None

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether it takes such a message; a `tag` or `step` of None means any."""
        return (
            self.stands_for(kind) is not None
            and (step is None or step % self.subsample == 0)
            and (tag is None or matches_tag(self.tag, tag))
            and (module is None or self.modules is None or self._matches_module(module))
        )

    @property
    def is_plain(self) -> bool:
        """Whether `wants` is not overridden, so that the parameters alone decide."""
        return type(self).wants is Subscription.wants and not has_own_methods(self)

    def takes(self, stack: Stack) -> NDArray[np.bool_]:
        """Which messages of a stack it takes."""
        taken = stack.of_sources(self.wants)
        import numpy as np

        if self.statistics is True and stack.samplings is not None and stack.kind in self.kinds:
            doubled = np.array([is_doubled(one) for one in stack.samplings], np.bool_)
            taken = taken & ~doubled[stack.heads.source_ids]
        return taken if self.subsample == 1 else taken & (stack.steps % self.subsample == 0)

    def take(self, message: Message) -> Iterator[Message | MessageBundle]:
        """What to pass to the subscriber for a wanted message.

        Statistics are passed as messages of the data's kind.
        """
        found = self._as_data(message) if self.statistics else message
        if found is not None:
            yield found

    def _as_data(self, message: Message) -> Message | None:
        """The message under a kind of `kinds`; None for data whose statistics are taken in its place."""
        if message.kind in self.kinds:
            return None if self.statistics is True and is_doubled(message.sampling) else message
        kind = self.stands_for(message.kind)
        return None if kind is None else of_kind(message, kind)

    def finish(self) -> Iterator[Message | MessageBundle]:
        """What to pass to the subscriber at the end."""
        return iter(())

    def _matches_module(self, module: str) -> bool:
        known = self._module_matches.get(module)
        if known is None:
            known = any(fnmatchcase(module, pattern) for pattern in self.modules or ())
            self._module_matches[module] = known
        return known

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.kinds)}; tag={self.tag}, subsample={self.subsample})"


@dataclass
class _Round:
    """The messages of one key and tag in one step: once-a-step messages, and the messages of each call."""

    of_step: dict[str, Message] = field(default_factory=dict)
    of_call: dict[tuple[int, str], dict[str, Message]] = field(default_factory=dict)
    delivered: set[tuple[int, str]] = field(default_factory=set)


class SynchronizedSubscription(Subscription):
    """Takes complete bundles: one message of each kind, all of the same key (module or network) and step.

    A bundle is delivered as soon as it is complete. A module that is called several times in a step gives a bundle for
    each call (and for each leaf of a structured output). Kinds with one message a step, such as ``weights``, are part
    of every call's bundle.

    Parameters
    ----------
    kinds, tag, subsample, modules, statistics
        As in `Subscription`.
    incomplete : {"strict", "drop", "partial"}
        What happens to a bundle that is incomplete when its step is over: ``"strict"`` raises `MessageError`,
        ``"drop"`` ignores it, ``"partial"`` delivers it (see `MessageBundle.missing`).
    """

    def __init__(
        self,
        kinds: str | Iterable[str],
        tag: str | None = DEFAULT_TAG,
        subsample: int = 1,
        modules: str | Iterable[str] | None = None,
        *,
        incomplete: Incomplete = "strict",
        statistics: bool = False,
    ) -> None:
        super().__init__(kinds, tag, subsample, modules, statistics=statistics)
        if incomplete not in ("strict", "drop", "partial"):
            raise MessageError(f"incomplete is 'strict', 'drop' or 'partial', not {incomplete!r}")
        self.incomplete = incomplete
        once = {kind for kind in self.kinds if kind in KINDS and not KINDS[kind].per_call}
        # if all kinds come once a step, there is one bundle a step and nothing to share between calls
        self._shared = frozenset(once) if len(once) < len(self.kinds) else frozenset[str]()
        self._step: int | None = None
        self._rounds: dict[tuple[str | None, str], _Round] = {}

    def take(self, message: Message) -> Iterator[Message | MessageBundle]:
        """The bundles that a message completes; at the first message of a new step, first the result of `finish`.

        Raises
        ------
        MessageError
            If a kind comes twice for the same key, call and step; or if `incomplete` is ``"strict"`` and the previous
            step leaves a bundle incomplete.
        """
        if self._step is not None and message.global_step != self._step:
            yield from self.finish()
        self._step = message.global_step
        found = self._as_data(message) if self.statistics else message
        if found is None:
            return
        message, kind = found, found.kind
        group = self._rounds.setdefault((message.key, message.tag), _Round())
        call = (message.call, message.leaf)
        slot = group.of_step if kind in self._shared else group.of_call.setdefault(call, {})
        if kind in slot or (slot is not group.of_step and call in group.delivered):
            raise MessageError(
                f"two {message.kind} messages of {message.key!r}, call {message.call}, in step {message.global_step}"
            )
        slot[kind] = message
        for ready in list(group.of_call) if slot is group.of_step else [call]:
            if len(group.of_step) + len(group.of_call[ready]) == len(self.kinds):
                yield self._bundle(group, ready)
                group.delivered.add(ready)
                del group.of_call[ready]

    def finish(self) -> Iterator[Message | MessageBundle]:
        """Apply `incomplete` to the bundles that are still incomplete."""
        rounds, self._rounds = self._rounds, {}
        for (key, _), group in rounds.items():
            alone = [(0, "")] if group.of_step and not group.of_call and not group.delivered else []
            for call in [*group.of_call, *alone]:
                bundle = self._bundle(group, call)
                if self.incomplete == "strict":
                    raise MessageError(
                        f"global step {self._step} is over, but the bundle of {key!r} still lacks "
                        f"{', '.join(bundle.missing)}"
                    )
                if self.incomplete == "partial":
                    yield bundle

    def _bundle(self, group: _Round, call: tuple[int, str]) -> MessageBundle:
        there = {**group.of_step, **group.of_call.get(call, {})}
        bundle = MessageBundle(self.kinds)
        for kind in self.kinds:
            if kind in there:
                bundle.add(there[kind])
        return bundle


def is_doubled(sampling: Mapping[str, Any] | None) -> bool:
    """Whether the sampling of a message with data says that its statistics come as another message."""
    beside = None if sampling is None else sampling.get("beside")
    return isinstance(beside, list) and "statistics" in beside


def matches_tag(pattern: str | None, tag: str) -> bool:
    """Whether a tag matches a glob or a negated glob (``"!eval"``); a `pattern` of None matches every tag.

    Examples
    --------
    >>> matches_tag("probe*", "probe_2"), matches_tag("!default", "eval"), matches_tag(None, "eval")
    (True, True, True)
    """
    if pattern is None or pattern == tag:
        return True
    if pattern.startswith("!"):
        return not fnmatchcase(tag, pattern[1:])
    return fnmatchcase(tag, pattern)


class Named(Protocol):
    """Anything with a kind, a module (None: the network) and a tag, such as a stream of a trace."""

    @property
    def kind(self) -> str: ...
    @property
    def module(self) -> str | None: ...
    @property
    def tag(self) -> str: ...


def passes(
    stream: Named, kinds: Collection[str] | None, modules: Collection[str] | None, tags: Collection[str] | None
) -> bool:
    """Whether a stream passes all filters that are not None; it passes a filter if it matches one entry.

    Parameters
    ----------
    stream : Named
    kinds : collection of str, optional
    modules : collection of str, optional
        Globs over dotted paths. A stream of the network has no module and passes only without this filter.
    tags : collection of str, optional
        As in `matches_tag`.
    """
    return (
        (kinds is None or stream.kind in kinds)
        and (tags is None or any(matches_tag(pattern, stream.tag) for pattern in tags))
        and (
            modules is None
            or (stream.module is not None and any(fnmatchcase(stream.module, pattern) for pattern in modules))
        )
    )
