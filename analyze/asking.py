"""Replays one trace through subscribers and gathers their answers."""

from __future__ import annotations

from collections.abc import Iterable

from analyze.registry import instances
from analyze.tables.results import Results
from tracer.errors import MessageError
from tracer.messaging.subscriber import Subscriber
from tracer.replaying.replay import replay
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Steps


def analyze(
    path: Anywhere | TraceReader,
    subscribers: str | Subscriber | Iterable[str | Subscriber],
    *,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    rank: int | None = None,
) -> Results:
    """Replay a trace through subscribers and gather their answers.

    Parameters
    ----------
    path : path, URL or TraceReader
    subscribers : subscriber or str, or several
        As instances, or as `parse` reads them: ``"svcca:threshold=0.9"``.
    kinds, modules, steps, tags, rank
        What is replayed, as in `tracer.replay`. Subscribers keep state between messages, so each rank needs its own.

    Returns
    -------
    Results

    Raises
    ------
    TracerError
        What `parse` and `tracer.replay` raise; also if there is no subscriber.
    """
    asked = instances(subscribers)
    if not asked:
        raise MessageError("analyze needs at least one subscriber, but got none")
    results = Results()
    sink = results.sink(asked, str(path.path if isinstance(path, TraceReader) else path))
    replay(path, *asked, sink, kinds=kinds, modules=modules, steps=steps, tags=tags, rank=rank)
    return results
