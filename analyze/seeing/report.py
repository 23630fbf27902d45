"""Writes the report of a trace: what went wrong, where and since when, in one HTML file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from analyze.seeing.check import Wanted, check, rules_of, together
from analyze.seeing.gather import gather, reference
from analyze.seeing.gathered import Gathered
from analyze.tables.writing import needed, new_file
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
    """Write a report of a run: one HTML file that needs no network.

    The trace is read once, through rules and metrics together. Memory is bounded: long series keep only their extremes.
    Of a distributed run, the pictures show one rank, and the findings cover all.

    Parameters
    ----------
    path : path, URL or TraceReader
    out : path
        The file to write.
    against : path or URL, or several
        Runs to compare with: the losses of all are drawn, and the heat map can show the run against the first.
    metrics : subscriber or str, or several
        Further metrics, as `parse` reads them.
    rules : Rule or str, or several
        By default all.
    rank : int, optional
        Of a distributed run, the rank that is drawn; by default the lowest.
    overwrite : bool
        Whether an existing file may be replaced.

    Returns
    -------
    Gathered
        What the page shows: ``.checked`` is the verdict of the rules, ``.damage`` why the trace could not be read to
        its end.

    Raises
    ------
    TraceExistsError
        If the file exists and `overwrite` is false.
    TracerError
        If a trace cannot be opened, a name is unknown, or Bokeh is not installed.
    """
    needed("a report", "bokeh", "report")
    from analyze.seeing.page import page

    others = [against] if isinstance(against, str | os.PathLike | Url) else list(against)
    with new_file(out, overwrite=overwrite) as temporary:
        with nullcontext(path) if isinstance(path, TraceReader) else TraceReader(path) as reader:
            found = gather(reader, metrics, rules=rules, rank=rank)
            _judge_other_ranks(found, reader, rules)
        references = [reference(one, found.grid, rank) for one in others]
        Path(temporary).write_text(page(found, references), encoding="utf-8", errors="backslashreplace")
    return found


def _judge_other_ranks(found: Gathered, reader: TraceReader, rules: Wanted | None) -> None:
    """Add the findings of the other ranks to those of the rank that is drawn."""
    others = [rank for rank in reader.ranks if rank != found.rank]
    if others:
        asked = rules_of(rules)
        found.checked = together(reader, asked, [found.checked, check(reader, asked, ranks=others)])
        found.damage = found.checked.damage
        found.remarks[0] = f"the pictures are of rank {found.rank} of {len(reader.ranks)}; --rank chooses another"
        found.remarks.insert(0, "the findings are of all ranks; one that names no rank is of rank 0")
