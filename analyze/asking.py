"""One trace asked: replayed through subscribers, whose answers are gathered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from analyze.registry import instances
from analyze.tables.results import Results
from analyze.tables.writing import PathLike
from tracer.errors import MessageError

if TYPE_CHECKING:
    from tracer.messaging.subscriber import Subscriber
    from tracer.trace.reader import TraceReader


def analyze(
    path: PathLike | TraceReader,
    subscribers: str | Subscriber | Iterable[str | Subscriber],
    *,
    kinds: Any = None,
    modules: Any = None,
    steps: Any = None,
    tags: Any = None,
    rank: int | None = None,
) -> Results:
    """Replay a trace through subscribers and gather their answers.

    Parameters
    ----------
    path : path of a trace, or TraceReader
    subscribers : subscriber or str, or several
        As instances, or as `parse` reads them: ``"svcca:threshold=0.9"``.
    kinds, modules, steps, tags, rank
        What is replayed, as in `tracer.replay`; subscribers remember what they heard, so each rank needs its own.

    Returns
    -------
    Results

    Raises
    ------
    TracerError
        What `parse` and `tracer.replay` raise; also if nothing is asked.
    """
    from tracer.replaying.replay import replay

    asked = instances(subscribers)
    if not asked:
        raise MessageError("analyze needs at least one subscriber, but got none")
    results = Results()
    sink = results.sink(asked, str(getattr(path, "path", path)))
    replay(path, *asked, sink, kinds=kinds, modules=modules, steps=steps, tags=tags, rank=rank)
    return results
