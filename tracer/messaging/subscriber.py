"""The base of every metric: what it takes, what it answers."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self, TypeAlias

from tracer.errors import MessageError, did_you_mean
from tracer.messaging.messages import DEFAULT_TAG, KINDS, Message, MessageBundle, kept_of
from tracer.messaging.receiver import Receiver, describe
from tracer.messaging.stacks import Stack, Stretch, gathered, has_own_methods, is_newer
from tracer.messaging.subscription import Subscription, SynchronizedSubscription, matches_tag

Offered: TypeAlias = Sequence[tuple[str, str | None, str | None]]
"""Streams that can be had, each by its kind, module and tag; a tag of None means that any tag may still come."""
_PROBES = "a probe records them: run.probe(name, inputs, every=N), or trace record --probe N"


class Subscriber(Receiver):
    """Turns messages into answers: messages of derived kinds.

    A subclass passes its subscriptions and the kinds of its answers to this constructor and implements `compute`, which
    yields the answers; the bus publishes them. So a metric is tested by ``list(metric.compute(message))``, and it is
    the same object, doing the same work, in a live run and on replay.

    Parameters
    ----------
    subscriptions : Subscription or iterable of Subscription
    produces : str or iterable of str
        The kinds of its answers; by custom ``f"{kind}_{metric}"``.

    Attributes
    ----------
    scope : Scope
        What it remembers across. A class that says nothing is taken to need the whole run in its order; an object may
        say less than its class where its parameters allow it.
    mergeable : bool
        Whether the memories of two that heard different messages can be put together, by `merge`.
    version : int
        Raised whenever the same messages would give other answers than before, so that stored results are renewed.
    invariances : tuple of str
        What can be done to the data of its messages without changing an answer beyond rounding; each word is a
        function in ``tests/analyze/metrics/invariances.py``, which holds the class to it.
    same_inputs : bool
        Whether answers compare what is said of the same inputs at several steps, as of a probe. An object may need
        less than its class.
    spoiled_by : tuple of str
        What a recorder may keep of a tensor (``"elements"``, ``"reduce"``; see `tracer.Capture`) that makes an answer
        one about something else. A plan tells where a trace holds that, and a replay warns.
    takes_many : bool
        Whether a replay may hand it many small messages at once, which saves what a message costs by itself. It may be
        said by a class that remembers nothing (``scope = "message"``), takes messages singly (by a `Subscription`), and
        does not mind to be asked the same again. `compute_many` then answers them; its default loops over `compute`.
    reduction : str
        The one ``reduce`` of `tracer.Capture` that does not spoil its answers, because it is made for it.

    Examples
    --------
    >>> import torch
    >>> from tracer.messaging.messages import NetworkMessage, derived
    >>> class Doubled(Subscriber):
    ...     def __init__(self):
    ...         super().__init__(Subscription("loss"), produces="loss_doubled")
    ...     def compute(self, message):
    ...         yield derived(message, "loss_doubled", 2 * message.data)
    >>> loss = NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.tensor(1.5))
    >>> [float(answer.data) for answer in Doubled().compute(loss)]
    [3.0]
    """

    mergeable: ClassVar[bool] = False
    version: ClassVar[int] = 1
    invariances: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, subscriptions: Subscription | Iterable[Subscription], produces: str | Iterable[str] = ()
    ) -> None:
        self.subscriptions: tuple[Subscription, ...] = (
            (subscriptions,) if isinstance(subscriptions, Subscription) else tuple(subscriptions)
        )
        if not self.subscriptions or not all(isinstance(one, Subscription) for one in self.subscriptions):
            raise MessageError(f"{type(self).__name__} needs at least one Subscription, not {subscriptions!r}")
        self.produces: tuple[str, ...] = (produces,) if isinstance(produces, str) else tuple(produces)
        self._labels: dict[str, str] = {}

    def labelled(self, label: str) -> Self:
        """Append ``_{label}`` to the kinds of all its answers, so that two of one class can be asked at once.

        On a command line, ``name:as=LABEL``.

        Parameters
        ----------
        label : str
            Letters, digits and ``_ . + -``.

        Returns
        -------
        Subscriber
            Itself.

        Raises
        ------
        MessageError
            If the label is no such word, makes a kind that it has already, or if there is a label already.

        Examples
        --------
        >>> CallbackSubscriber("loss", print).labelled("printed").produces
        ()
        """
        if not isinstance(label, str) or not re.fullmatch(r"[\w.+-]+", label):
            raise MessageError(f"a label is a word of letters, digits and _ . + -, not {label!r}")
        if self._labels:
            raise MessageError(f"{describe(self)} has a label already: it produces {', '.join(self.produces)}")
        labels = {kind: f"{kind}_{label}" for kind in self.produces}
        taken = sorted(labels.keys() & labels.values())
        if taken:
            raise MessageError(
                f"without the label {label!r} {describe(self)} produces {', '.join(taken)}: take another"
            )
        self._labels, self.produces = labels, tuple(labels.values())
        return self

    @abstractmethod
    def compute(self, message_or_bundle: Any) -> Iterable[Message] | None:
        """Yield the answers to one message (of a `Subscription`) or bundle (of a `SynchronizedSubscription`)."""

    def compute_many(self, stack: Stack) -> Iterable[Stack]:
        """Yield the answers to many messages: for each answer that `compute` yields, a stack of them.

        What a class says here must be what `compute` says of each message by itself, to the bit; a live run gets only
        that. This default loops.
        """
        return gathered(stack, map(self.compute, stack))

    def conclude(self) -> Iterable[Message]:
        """Yield the last answers, when the run or the replay ends; for metrics that wait for a step to be over."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, so that a replay can go on where another stopped; empty for those without memory."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what another one of the same class and parameters remembered.

        Raises
        ------
        MessageError
            If there is something to remember, but this class has no memory.
        """
        if state:
            raise MessageError(f"{type(self).__name__} has no memory, but got a state with {', '.join(state)}")

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what another one of the same class and parameters remembers of other messages (see `mergeable`).

        Parameters
        ----------
        state : mapping
            The other's `state_dict`. Where order matters, the other heard what came later.

        Raises
        ------
        MessageError
            If memories of this class cannot be put together.
        """
        raise MessageError(f"what two {type(self).__name__} remember cannot be put together")

    @property
    def needs(self) -> frozenset[str]:
        """The kinds without which it cannot work."""
        return frozenset(kind for subscription in self.subscriptions for kind in subscription.kinds)

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of its subscriptions takes such a message."""
        return any(subscription.wants(kind, module, tag, step) for subscription in self.subscriptions)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None:
        """Those of its subscriptions; None if one of them, or a subclass, has a `wants` of its own."""
        if not is_newer(type(self), "strides", "wants") or has_own_methods(self):
            return None
        wanting = [one for one in self.subscriptions if one.wants(kind, module, tag, None)]
        return {one.subsample for one in wanting} if all(one.is_plain for one in wanting) else None

    def awake(self, step: int) -> bool:
        """Whether it may want something of the training passes of this global step."""
        return any(
            step % subscription.subsample == 0 and matches_tag(subscription.tag, DEFAULT_TAG)
            for subscription in self.subscriptions
        )

    def receive(self, message: Message) -> Iterator[Message]:
        """Answer a message, through every subscription that takes it."""
        for subscription in self.subscriptions:
            if subscription.wants(message.kind, message.key, message.tag, message.step):
                for taken in subscription.take(message):
                    yield from self._as_labelled(self.compute(taken))

    def receive_many(self, stretch: Stretch) -> Iterator[Stack]:
        """Answer many messages, through every subscription that takes them."""
        late = is_newer(type(self), "compute_many", "compute")
        for subscription in self.subscriptions:
            for stack in stretch.stacks:
                taken = stack.only(subscription.takes(stack))
                if taken is not None:
                    data_kind = subscription.stands_for(stack.kind) or stack.kind
                    taken = taken if data_kind == stack.kind else replace(taken, kind=data_kind)
                    many = self.compute_many(taken) if late else gathered(taken, map(self.compute, taken))
                    for answers in many:
                        kind = self._labels.get(answers.kind, answers.kind)
                        yield answers if kind == answers.kind else replace(answers, kind=kind)

    def can_take_many(self) -> bool:
        """Whether it says that it takes many messages, and takes them singly and answers them without a memory."""
        return (
            bool(self.produces)
            and all(type(one) is Subscription for one in self.subscriptions)
            and super().can_take_many()
        )

    def finish(self) -> Iterator[Message]:
        """Answer what the subscriptions still held back, then conclude."""
        for subscription in self.subscriptions:
            for taken in subscription.finish():
                yield from self._as_labelled(self.compute(taken))
        yield from self._as_labelled(self.conclude())

    def _as_labelled(self, answers: Iterable[Message] | None) -> Iterable[Message]:
        """The same answers; of a class that does not take the kinds from `produces`, under those that it is to have."""
        if not answers or not self._labels:
            return answers or ()
        return (
            replace(answer, kind=self._labels[answer.kind]) if answer.kind in self._labels else answer
            for answer in answers
        )


class CallbackSubscriber(Subscriber):
    """Calls a function with the data of each complete bundle.

    Parameters
    ----------
    kinds : str or iterable of str
    callback : callable
        Called as ``callback(*data, global_step, train_step, epoch, key)``: a tensor (or None, for events) for each of
        the `kinds` in their order, the counters, and the module's path (None for network kinds).
    tag, subsample, modules
        As in `Subscription`.
    incomplete : {"drop", "strict"}
        What happens to incomplete bundles.

    Examples
    --------
    >>> import torch
    >>> from tracer.messaging.bus import MessageBus
    >>> bus = MessageBus()
    >>> bus.register(CallbackSubscriber("loss", lambda loss, step, *_: print(step, float(loss))))
    >>> bus.publish_network_message(4, 4, 0, "loss", torch.tensor(0.25))
    4 0.25
    """

    def __init__(
        self,
        kinds: str | Iterable[str],
        callback: Callable[..., object],
        tag: str | None = DEFAULT_TAG,
        subsample: int = 1,
        modules: str | Iterable[str] | None = None,
        *,
        incomplete: Any = "drop",
    ) -> None:
        super().__init__(SynchronizedSubscription(kinds, tag, subsample, modules, incomplete=incomplete))
        self.callback = callback

    def compute(self, message_or_bundle: MessageBundle) -> None:
        """Call the function."""
        bundle = message_or_bundle
        data = [bundle.data.get(kind) for kind in bundle.kinds]
        self.callback(*data, bundle.global_step, bundle.train_step, bundle.epoch, bundle.key)


def unmet(receivers: Iterable[Receiver], offered: Offered, source: str) -> list[str]:
    """What the subscribers among `receivers` need and cannot get: one sentence for each of them, or nothing.

    A `SynchronizedSubscription` needs all of its kinds, of one module at least; a plain `Subscription` one of them.

    Parameters
    ----------
    receivers : iterable of Receiver
    offered : Offered
        The streams that can be had.
    source : str
        What offers them, for the sentence.
    """
    receivers = tuple(receivers)
    answers = {kind for receiver in receivers for kind in receiver.produces}
    sentences = []
    for receiver in receivers:
        lacking: dict[str, None] = {}
        hints: dict[str, str] = {}
        lost: list[tuple[str, Subscription]] = []
        others = answers - set(receiver.produces)
        for subscription in receiver.subscriptions:
            absent = [
                kind
                for kind in subscription.kinds
                if kind not in answers and next(_places(kind, subscription, offered), None) is None
            ]
            needs_all = isinstance(subscription, SynchronizedSubscription)
            if absent and (needs_all or len(absent) == len(subscription.kinds)):
                modules = "" if subscription.modules is None else f" of modules {', '.join(subscription.modules)}"
                of_kind = {kind: {module for known, module, _ in offered if known == kind} for kind in absent}
                for kind in absent:
                    tags = sorted({tag for known, _, tag in offered if known == kind and tag is not None})
                    elsewhere = tags and not any(matches_tag(subscription.tag, tag) for tag in tags)
                    there = f"; there is tag {', '.join(tags)}" if elsewhere else ""
                    instead = _stand_ins(kind, subscription, offered)
                    if not of_kind[kind] and not instead:
                        hints[did_you_mean(kind, others | {kept_of(known)[0] for known, _, _ in offered})] = kind
                    elif of_kind[kind] and subscription.modules is not None:
                        hints |= dict.fromkeys(_other_modules(subscription.modules, of_kind[kind]), "")
                    if elsewhere and not instead:
                        hints[_other_tags(receiver, subscription.tag, tags)] = ""
                    else:
                        lost.append((kind, subscription))
                    tag = "" if subscription.tag is None else f" (tag {subscription.tag}{there})"
                    lacking[f"{kind}{tag}{modules}"] = None
            elif needs_all and len(observed := [kind for kind in subscription.kinds if kind not in answers]) > 1:
                places = [set(_places(kind, subscription, offered)) for kind in observed]
                if not set.intersection(*places):
                    lacking[f"{' and '.join(observed)} of one and the same module"] = None
        if lacking:
            stand_ins = [_stand_ins(kind, one, offered) for kind, one in lost]
            told = f"{describe(receiver)} needs {', '.join(lacking)}, "
            if len(stand_ins) == len(lacking) and all(stand_ins):
                told += f"of which {source} has only {' and '.join(sorted(set.union(*stand_ins)))}"
            else:
                told += f"but {source} has {_summary(offered)}"
            remedies = list(_remedies(receiver, lost, offered))
            # a name of which a remedy speaks was meant as it is
            meant = [hint for hint, kind in hints.items() if not kind or not any(kind in one for one in remedies)]
            sentences.append(told + "".join(dict.fromkeys([*meant, *remedies])))
    return sentences


def run_again(kinds: Iterable[str], steps: str = "A:B") -> str:
    """How kinds that a run with keyframes has not kept can be had, in words.

    Examples
    --------
    >>> run_again(["weights", "weights_doubled"], "5:6")
    'trace reenact RUN --steps 5:6 -k weights SCRIPT.py gives a trace of some steps that has it'
    """
    named = "".join(f" -k {kind}" for kind in sorted(kinds) if kind in KINDS)
    return f"trace reenact RUN --steps {steps}{named} SCRIPT.py gives a trace of some steps that has it"


def _places(kind: str, subscription: Subscription, offered: Offered) -> Iterator[tuple[str | None, str | None]]:
    """The modules and tags of the streams that a subscription takes as messages of one of its kinds."""
    for known, module, tag in offered:
        if subscription.stands_for(known) == kind and subscription.wants(known, module, tag, None):
            yield module, tag


def _stand_ins(kind: str, subscription: Subscription, offered: Offered) -> set[str]:
    """What is there in place of the data that a subscription lacks: hashes or statistics."""
    found = set()
    for known, module, tag in offered:
        base, held = kept_of(known)
        if base == kind != known and subscription.wants(kind, module, tag, None):
            found.add("hashes" if held == "hash" else held)
    return found


def _remedies(receiver: Receiver, lost: Sequence[tuple[str, Subscription]], offered: Offered) -> Iterator[str]:
    """How what a subscriber lacks can be had, of a run or by another one."""
    again = any(known == "keyframe" for known, _, _ in offered)
    observed = [(kind, subscription) for kind, subscription in lost if kind in KINDS]
    if again and any(matches_tag(subscription.tag, DEFAULT_TAG) for _, subscription in observed):
        yield f"; {run_again(receiver.needs)}"
    elif receiver.same_inputs and any(not matches_tag(one.tag, DEFAULT_TAG) for _, one in observed):
        late = "; trace reenact RUN --probe FILE --every-keyframe SCRIPT.py makes one of this run"
        yield f"; {_PROBES}" + (late if again else "")
    for kind in dict.fromkeys(kind for kind, _ in lost if kind not in KINDS and offered):
        base, _, name = kind.rpartition("_")
        if any(base == one or base.startswith(f"{one}_") for one in KINDS):
            yield f"; {kind} is by its name an answer of {name}, so ask {name}, too"


def _other_modules(patterns: Iterable[str], modules: Iterable[str | None]) -> Iterator[str]:
    """For each pattern that matches no module, those that may be meant."""
    there = [module for module in modules if module is not None]
    for pattern in patterns:
        if not any(fnmatchcase(module, pattern) for module in there):
            yield did_you_mean(pattern, there)


def _other_tags(receiver: Receiver, wanted: str | None, tags: Sequence[str]) -> str:
    """How a subscriber takes messages of another tag than it asks for, and what that means."""
    hint = did_you_mean(wanted or "", tags)
    if hint and not set("!*?[").intersection(wanted or ""):
        return hint
    name, tag = describe(receiver), next((tag for tag in tags if tag != DEFAULT_TAG), DEFAULT_TAG)
    if not receiver.same_inputs:
        return f"; {name}:tag={tag} takes what is there"
    if tag == DEFAULT_TAG:
        other = "different inputs at each step, so it means something only where every step sees the same batch"
    else:
        other = f"passes tagged {tag}, so it means something only where these see the same inputs in the same order"
    return f"; {name} compares the same inputs at different steps, as {_PROBES}; {name}:tag={tag} compares {other}"


def _summary(offered: Offered) -> str:
    """The kinds that are there, each with its tags unless that is just the training's; then what stands in for data."""
    tags: dict[str, dict[str, None]] = {}
    held: dict[str, dict[str, None]] = {}
    for kind, _, tag in offered:
        base, what = kept_of(kind)
        if what == "data":
            tags.setdefault(kind, {}).update({} if tag is None else {tag: None})
        else:
            held.setdefault(base, {})["hashes" if what == "hash" else what] = None
    told = [
        f"{kind} (tag {', '.join(of)})" if list(of) not in ([], [DEFAULT_TAG]) else kind for kind, of in tags.items()
    ]
    without_data = {
        kind: " and ".join(sorted(of)) for kind, of in held.items() if DEFAULT_TAG not in tags.get(kind, ())
    }
    told += [
        f"{words} of {', '.join(kind for kind, of in without_data.items() if of == words)}"
        for words in dict.fromkeys(without_data.values())
    ]
    return "only " + ", ".join(told) if told else "nothing"
