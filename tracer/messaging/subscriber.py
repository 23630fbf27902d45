"""`Subscriber`: the base of every metric; and what a subscriber needs that a trace or run does not have."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self, TypeAlias

from tracer.errors import MessageError, did_you_mean
from tracer.messaging.messages import DEFAULT_TAG, KINDS, Message, MessageBundle, kept_of
from tracer.messaging.receiver import Receiver, Rerun, describe
from tracer.messaging.stacks import Stack, Stretch, gathered, has_own_methods, is_newer
from tracer.messaging.subscription import Subscription, SynchronizedSubscription, matches_tag

Offered: TypeAlias = Sequence[tuple[str, str | None, str | None]]
"""The available streams, each as kind, module and tag; a tag of None means that messages of any tag may come."""
Lost: TypeAlias = Sequence[tuple[str, Subscription]]
"""The kinds that a subscriber lacks, each with the subscription that asks for it."""
_PROBES = "a probe records them: run.probe(name, inputs, every=N), or trace record --probe N"


class Subscriber(Receiver):
    """Turns messages into answers: messages of derived kinds.

    A subclass passes its subscriptions and the kinds of its answers to this constructor and implements `compute`, which
    yields the answers; the bus publishes them. So ``list(metric.compute(message))`` tests a metric, and a live run and
    a replay use the same code.

    Parameters
    ----------
    subscriptions : Subscription or iterable of Subscription
    produces : str or iterable of str
        The kinds of its answers; by convention ``f"{kind}_{metric}"``.

    Attributes
    ----------
    scope : Scope
        The unit of its memory; the default is the whole run, in its order. An instance may have a smaller scope than
        its class if its parameters allow that.
    mergeable : bool
        Whether `merge` can combine the states of two instances that got different messages.
    version : int
        Increased whenever the same messages would give other answers than before, so that stored results are renewed.
    invariances : tuple of str
        Transformations of the data that change no answer beyond rounding; each word is a function in
        ``tests/analyze/metrics/invariances.py``, which tests the class for it.
    same_inputs : bool
        Whether answers compare the same inputs, such as a probe, at several steps. An instance may not need this even
        if its class does.
    spoiled_by : tuple of str
        Options of `tracer.Capture` (``"elements"``, ``"reduce"``) that keep only a part of a tensor and so change the
        meaning of the answers. A plan reports streams recorded with them, and a replay warns.
    takes_many : bool
        Whether a replay may pass it many small messages at once, which saves the overhead of each message. Allowed for
        a class without memory (``scope = "message"``) that takes single messages (by a `Subscription`) and gives the
        same answers when it gets the same messages again. `compute_many` answers them; by default, it loops over
        `compute`.
    reduction : str
        The ``reduce`` of `tracer.Capture` that is made for this subscriber and does not spoil its answers.

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
        """Append ``_{label}`` to the kinds of all answers, so that two instances of a class can be used together.

        On a command line: ``name:as=LABEL``.

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
            If the label has other characters, would give a kind that exists already, or if there is a label already.

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
        """Yield the answers to many messages: a stack for each answer that `compute` yields.

        The answers must equal those of `compute` to the bit, because a live run calls only `compute`. By default, a
        loop over `compute`.
        """
        return gathered(stack, map(self.compute, stack))

    def conclude(self) -> Iterable[Message]:
        """Yield the last answers when the run or the replay ends; for metrics that wait until a step is over."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Its memory, so that a replay can continue where another stopped; empty if it has none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state_dict` of an instance with the same class and parameters.

        Raises
        ------
        MessageError
            If the state is not empty, but this class has no memory.
        """
        if state:
            raise MessageError(f"{type(self).__name__} has no memory, but got a state with {', '.join(state)}")

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the state of an instance with the same class and parameters that got other messages (see `mergeable`).

        Parameters
        ----------
        state : mapping
            The other's `state_dict`. If order matters, the other got the later messages.

        Raises
        ------
        MessageError
            If states of this class cannot be merged.
        """
        raise MessageError(f"what two {type(self).__name__} remember cannot be put together")

    @property
    def needs(self) -> frozenset[str]:
        """The kinds of all its subscriptions that are not optional."""
        return frozenset(kind for one in self.subscriptions if not one.optional for kind in one.kinds)

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of its subscriptions takes such a message."""
        return any(subscription.wants(kind, module, tag, step) for subscription in self.subscriptions)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None:
        """The strides of its subscriptions; None if `wants` is overridden in a subclass or a subscription."""
        if not is_newer(type(self), "strides", "wants") or has_own_methods(self):
            return None
        wanting = [one for one in self.subscriptions if one.wants(kind, module, tag, None)]
        return {one.subsample for one in wanting} if all(one.is_plain for one in wanting) else None

    def awake(self, step: int) -> bool:
        """Whether some subscription may take messages of the training passes of this global step."""
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
        """Whether `takes_many` holds, and it takes single messages and answers them without a memory."""
        return (
            bool(self.produces)
            and all(type(one) is Subscription for one in self.subscriptions)
            and super().can_take_many()
        )

    def finish(self) -> Iterator[Message]:
        """Answer the bundles that subscriptions still hold, then conclude."""
        for subscription in self.subscriptions:
            for taken in subscription.finish():
                yield from self._as_labelled(self.compute(taken))
        yield from self._as_labelled(self.conclude())

    def _as_labelled(self, answers: Iterable[Message] | None) -> Iterable[Message]:
        """The answers under their labelled kinds; for classes that do not take the kinds from `produces`."""
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
        What happens to an incomplete bundle: it is ignored, or a `MessageError` is raised.

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


def unmet(receivers: Iterable[Receiver], offered: Offered, source: str, again: Rerun | None = None) -> list[str]:
    """A sentence for each of the receivers that needs something that is not available; the last says how to get it.

    A `SynchronizedSubscription` needs all of its kinds from at least one module; a plain `Subscription` needs one kind.

    Parameters
    ----------
    receivers : iterable of Receiver
    offered : Offered
        The available streams.
    source : str
        The name of the trace or run that offers them, for the sentences.
    again : Rerun, optional
        What to type to run steps of it again, if it has what that takes.
    """
    receivers = tuple(receivers)
    answers = {kind for receiver in receivers for kind in receiver.produces}
    sentences = []
    again = again or Rerun()
    of_steps: set[str] = set()
    for receiver in receivers:
        lacking: dict[str, None] = {}
        hints: dict[str, str] = {}
        lost: list[tuple[str, Subscription]] = []
        others = answers - set(receiver.produces)
        for subscription in receiver.subscriptions:
            if subscription.optional:
                continue
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
                        hints[
                            did_you_mean(kind, (others | {kept_of(known)[0] for known, _, _ in offered}) - {kind})
                        ] = kind
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
                told += f"but {source} has {summary(offered)}"
            known = _of_steps(receiver, lost, offered)
            remedies = list(_remedies(receiver, lost, offered, None if known else again))
            of_steps |= known
            # a kind that a remedy mentions is not misspelled
            told_of = [*known, *remedies]
            meant = [hint for hint, kind in hints.items() if not kind or not any(kind in one for one in told_of)]
            sentences.append(told + "".join(dict.fromkeys([*meant, *remedies])))
    if of_steps:
        sentences[-1] += f"; {again.hint(of_steps)}"
    return sentences


def can_run_again(kinds: Collection[str]) -> bool:
    """Whether a run that recorded these kinds can be run again from a keyframe, as far as kinds tell.

    Examples
    --------
    >>> can_run_again(["keyframe", "generators", "input_data"]), can_run_again(["keyframe", "generators"])
    (True, False)
    """
    inputs = "input_data" in kinds or {"sample_ids", "input_data_hash"}.issubset(kinds)
    return inputs and {"keyframe", "generators"}.issubset(kinds)


def _places(kind: str, subscription: Subscription, offered: Offered) -> Iterator[tuple[str | None, str | None]]:
    """The modules and tags of the streams that a subscription takes as messages of one of its kinds."""
    for known, module, tag in offered:
        if subscription.stands_for(known) == kind and subscription.wants(known, module, tag, None):
            yield module, tag


def _stand_ins(kind: str, subscription: Subscription, offered: Offered) -> set[str]:
    """What is available in place of the data that a subscription lacks: hashes or statistics."""
    found = set()
    for known, module, tag in offered:
        base, held = kept_of(known)
        if base == kind != known and subscription.wants(kind, module, tag, None):
            found.add("hashes" if held == "hash" else held)
    return found


def _of_steps(receiver: Receiver, lost: Lost, offered: Offered) -> set[str]:
    """The kinds that a subscriber needs, if steps that are run again have what it lacks."""
    observed = any(kind in KINDS and matches_tag(one.tag, DEFAULT_TAG) for kind, one in lost)
    return set(receiver.needs) if observed and can_run_again({known for known, _, _ in offered}) else set()


def _remedies(receiver: Receiver, lost: Lost, offered: Offered, again: Rerun | None) -> Iterator[str]:
    """Hints how to get what a subscriber lacks by a probe, unless `again` is None, and from another subscriber."""
    observed = any(kind in KINDS and not matches_tag(one.tag, DEFAULT_TAG) for kind, one in lost)
    if again is not None and receiver.same_inputs and observed:
        late = f"; {again.probing()} makes one of this run"
        yield f"; {_PROBES}" + (late if can_run_again({known for known, _, _ in offered}) else "")
    for kind in dict.fromkeys(kind for kind, _ in lost if kind not in KINDS and offered):
        base, _, name = kind.rpartition("_")
        if any(base == one or base.startswith(f"{one}_") for one in KINDS):
            yield f"; {kind} is by its name an answer of {name}, so ask {name}, too"


def _other_modules(patterns: Iterable[str], modules: Iterable[str | None]) -> Iterator[str]:
    """For each pattern that matches no module, a hint with similar module names."""
    there = [module for module in modules if module is not None]
    for pattern in patterns:
        if not any(fnmatchcase(module, pattern) for module in there):
            yield did_you_mean(pattern, there)


def _other_tags(receiver: Receiver, wanted: str | None, tags: Sequence[str]) -> str:
    """A hint how to make a subscriber take messages of another tag, and what the answers then mean."""
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


def summary(offered: Offered) -> str:
    """The offered kinds with their tags (unless only the training's), then the hashes and statistics without data."""
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
