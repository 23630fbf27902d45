"""Compares the layers of two recorded runs, step by step, on the same datapoints."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from analyze.comparing.matching import both_ranks, none_in_both
from analyze.metrics.similarity.similarity import Origin, Similarity
from analyze.registry import instances
from analyze.tables.results import Results
from tracer.errors import CaptureError, MessageError
from tracer.messaging.messages import Message
from tracer.messaging.subscriber import unmet
from tracer.replaying.filters import Audience
from tracer.replaying.wanted import opened
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Steps, StreamInfo


def compare(
    one: Anywhere | TraceReader,
    other: Anywhere | TraceReader,
    subscribers: str | Similarity | Iterable[str | Similarity] = "svcca",
    *,
    steps: Steps | None = None,
) -> Results:
    """The similarity of each layer of a run to the same layer of another run, at each common step.

    Parameters
    ----------
    one, other : path, URL or TraceReader
        Two traces with activations of the same datapoints in the same order, such as those of a probe.
    subscribers : str or subscriber, or several
        The similarities, with their kind, tag and modules: ``"svcca:threshold=0.9"``. Their `against` is ignored,
        because each layer is compared with the same layer of the other run.
    steps : (start, stop) or (start, stop, stride), optional
        The global steps to compare; by default all.

    Returns
    -------
    Results
        A row for each number, at each common step, module, call and leaf; the trace is called ``one|other``. If the
        runs have several ranks, each common rank is compared.

    Raises
    ------
    CaptureError
        If a trace lacks what a subscriber takes, if the labels or the sampling of the traces differ, so that their
        datapoints differ, or if the traces have no step of a layer in common.
    MessageError
        If a subscriber does not compare layers.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> paths = [tempfile.mkdtemp() + "/run.zarr" for _ in range(2)]
    >>> for number, path in enumerate(paths):
    ...     with tracer.TraceWriter(path) as writer:
    ...         for step in range(2):
    ...             where = dict(global_step=step, train_step=step, epoch=0, tag="probe")
    ...             x = torch.linspace(0, 1, 60).reshape(20, 3) ** (step * number + 1)
    ...             writer.write(tracer.ModuleMessage(kind="activations", module="fc", data=x, **where))
    >>> found = compare(*paths, "svcca:details=false")
    >>> [(row.kind, row.module, row.global_step, round(row.value, 6)) for row in found]
    [('activations_svcca', 'fc', 0, 1.0), ('activations_svcca', 'fc', 1, 0.967569)]
    """
    asked = instances(subscribers)
    for measure in asked:
        if not isinstance(measure, Similarity):
            raise MessageError(f"compare compares layers, and {type(measure).__name__} does not")
    results = Results()
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(opened(trace, None)) for trace in (one, other))
        for measure in asked:
            sink = results.sink([measure], f"{first.path}|{second.path}")
            met = 0
            for a, b in _ranks(first, second, measure):
                with aligned([first.of_rank(a), second.of_rank(b)], measure) as (mine, theirs):
                    for x, y in _matched(observed(mine, measure, steps), observed(theirs, measure, steps)):
                        found = measure.compare(measure.represent(x.data), measure.represent(y.data))
                        for answer in measure.answers(Origin.of(x), found):
                            sink.receive(answer)
                        met += 1
            if not met:
                raise CaptureError(f"{first.path} and {second.path} have no step of a layer in common")
    return results


def _ranks(one: TraceReader, other: TraceReader, measure: Similarity) -> list[tuple[int, int]]:
    """The pairs of ranks that are compared.

    If no rank of a trace has all that the subscriber needs, the first rank is taken, so that `aligned` raises an error
    that says what is missing.

    Raises
    ------
    CaptureError
        If there are no two ranks to compare.
    """
    having = [
        [rank for rank in reader.ranks if not _lacking(reader.of_rank(rank), measure)] or reader.ranks[:1]
        for reader in (one, other)
    ]
    both = both_ranks(*having)
    if not both:
        why = none_in_both(one.path, having[0], other.path, having[1])
        raise CaptureError(f"{why}; compare TraceReader(path).of_rank(number) of each")
    return both


def _lacking(reader: TraceReader, measure: Similarity) -> list[str]:
    """Sentences about what a subscriber needs and a trace lacks."""
    offered = [(stream.kind, stream.module, stream.tag) for stream in reader.streams]
    return unmet([measure], offered, str(reader.path))


def observed(reader: TraceReader, measure: Similarity, steps: Steps | None) -> Iterator[Message]:
    """The messages of a trace that a subscriber takes, reduced to the data that it keeps."""
    subscription = measure.subscriptions[0]
    chosen = _taken(reader, measure)
    for message in reader.messages(streams=[stream.id for stream in chosen], steps=steps):
        if subscription.wants(message.kind, message.key, message.tag, message.step):
            yield measure.taken(message)


def _taken(reader: TraceReader, measure: Similarity) -> list[StreamInfo]:
    wants = measure.subscriptions[0].wants
    return [stream for stream in reader.streams if wants(stream.kind, stream.module, stream.tag, None)]


_Key = tuple[str | None, str, int, str, int]


def _matched(one: Iterator[Message], other: Iterator[Message]) -> Iterator[tuple[Message, Message]]:
    """Pairs of messages of the same layer and step; only messages of the current steps are held in memory."""
    waiting: tuple[dict[_Key, Message], dict[_Key, Message]] = ({}, {})
    sources, ended, at = (one, other), [False, False], [-1, -1]
    while not all(ended):
        # read the source that is behind, so that both stay at about the same step
        side = 0 if ended[1] or (not ended[0] and at[0] <= at[1]) else 1
        message = next(sources[side], None)
        if message is None:
            ended[side] = True
            continue
        if message.global_step != at[side]:
            at[side] = message.global_step
            for held in waiting:
                for key in [key for key in held if key[2] < min(at)]:
                    del held[key]
        key = (message.key, message.tag, message.global_step, message.leaf, message.call)
        partner = waiting[1 - side].pop(key, None)
        if partner is None:
            waiting[side][key] = message
        else:
            yield (message, partner) if side == 0 else (partner, message)


@contextlib.contextmanager
def aligned(traces: Sequence[Anywhere | TraceReader], measure: Similarity) -> Iterator[list[TraceReader]]:
    """Open traces, and check that they have what a subscriber takes and that labels and sampling agree.

    Raises
    ------
    CaptureError
        If a trace lacks what the subscriber takes or has several ranks, or if the datapoints differ.
    """
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(opened(trace, None)) for trace in traces]
        for reader in readers:
            missing = _lacking(reader, measure)
            if missing:
                raise CaptureError("; ".join(missing))
            if len(reader.ranks) > 1:
                raise CaptureError(
                    f"{reader.path} has the ranks {', '.join(map(str, reader.ranks))}: give one of them, as "
                    f"TraceReader(path).of_rank({reader.ranks[0]})"
                )
            for sentence in Audience([measure]).spoiled(_taken(reader, measure)):
                warnings.warn(f"{reader.path}: {sentence}", RuntimeWarning, stacklevel=2)
        for other in readers[1:]:
            _check_alike(readers[0], other, measure)
        yield readers


def _samplings(reader: TraceReader, measure: Similarity) -> dict[tuple[str, str | None, str, str], set[str]]:
    """The samplings, in words, of each kind, module, tag and leaf that a subscriber takes.

    There are several if a recording was resumed with another capture.
    """
    found: dict[tuple[str, str | None, str, str], set[str]] = {}
    for one in _taken(reader, measure):
        told = one.sampling or {}
        beside = ("dtype",) if "rows" in told else ("dtype", "datapoints")
        sampled = {name: value for name, value in told.items() if name not in beside}
        found.setdefault((one.kind, one.module, one.tag, one.leaf), set()).add(str(sampled or "no sampling"))
    return found


def _check_alike(one: TraceReader, other: TraceReader, measure: Similarity) -> None:
    """Raise `CaptureError` if the sampling of two traces differs, or the labels of their datapoints."""
    mine, theirs = _samplings(one, measure), _samplings(other, measure)
    tags = set()
    for (kind, module, tag, leaf), sampled in mine.items():
        found = theirs.get((kind, module, tag, leaf))
        if found is None:
            continue
        tags.add(tag)
        if found != sampled:
            raise CaptureError(
                f"{kind} of {module} are not of the same datapoints: {one.path} recorded them with "
                f"{' and '.join(sorted(sampled))}, {other.path} with {' and '.join(sorted(found))}"
            )
    for tag in sorted(tags):
        first, second = (_labels(reader, tag) for reader in (one, other))
        if first is not None and second is not None and not torch.equal(first, second):
            raise CaptureError(
                f"the datapoints under the tag {tag!r} are not the same: their labels differ in {one.path} and "
                f"{other.path}"
            )


def _labels(reader: TraceReader, tag: str) -> torch.Tensor | None:
    """The labels of a probe, from its first run; None if they are not recorded."""
    chosen = [stream.id for stream in reader.streams if stream.kind == "input_labels" and stream.tag == tag]
    message = next(reader.messages(streams=chosen), None) if chosen else None
    return None if message is None else message.data
