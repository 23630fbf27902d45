"""A trace as a page: what went wrong, where and since when, in one file that opens anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from analyze.seeing.check import Wanted
from analyze.seeing.gather import gather, reference
from analyze.seeing.gathered import Gathered
from analyze.tables.writing import new_file, not_installed
from tracer.messaging.subscriber import Subscriber
from tracer.stores.locations import Anywhere, Url
from tracer.trace.reader import TraceReader


def report(
    path: Anywhere | TraceReader,
    out: str | os.PathLike[str],
    *,
    against: Anywhere | Sequence[Anywhere] = (),
    metrics: str | Subscriber | Iterable[str | Subscriber] = (),
    rules: Wanted | None = None,
    rank: int | None = None,
    overwrite: bool = False,
) -> Gathered:
    """Write a page that shows a run: one file of HTML that needs no network.

    The trace is read once, through rules and metrics together. Memory is bounded: of long series the extremes are
    kept.

    Parameters
    ----------
    path : path, URL or TraceReader
    out : path
        The file to write.
    against : path or URL, or several
        Runs to compare it with: the losses of all are drawn, and the heat map can show the run against the first.
    metrics : subscriber or str, or several
        What is asked besides, as `parse` reads it.
    rules : Rule or str, or several
        By default all.
    rank : int, optional
        Of a distributed run; by default the lowest.
    overwrite : bool
        Whether a file that is there may be replaced.

    Returns
    -------
    Gathered
        What the page shows: ``.checked`` is what the rules say, ``.damage`` why the trace could not be read to its
        end.

    Raises
    ------
    TraceExistsError
        If there is such a file.
    TracerError
        If a trace cannot be opened, a name is unknown, or Bokeh is not installed.
    """
    if find_spec("bokeh") is None:
        raise not_installed("a report", "bokeh", "report")
    from analyze.seeing.page import page

    others = [against] if isinstance(against, str | os.PathLike | Url) else list(against)
    with new_file(out, overwrite=overwrite) as temporary:
        found = gather(path, metrics, rules=rules, rank=rank)
        references = [reference(one, found.grid, rank) for one in others]
        Path(temporary).write_text(page(found, references), encoding="utf-8", errors="backslashreplace")
    return found
