"""Answers as TensorBoard event files."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

from analyze.tables.columns import Columns, Stream, positions
from analyze.tables.writing import PathLike, needed
from tracer.messaging.messages import Message

if TYPE_CHECKING:
    import torch

    from tracer.trace.reader import TraceReader

Clock: TypeAlias = Callable[[int], float]
"""A function from a global step to its time, in seconds since 1970."""


def write_events(answers: Columns, logdir: PathLike, times: Mapping[str, Clock]) -> None:
    """Write event files below a folder: see `analyze.Results.to_tensorboard`.

    Raises
    ------
    TracerError
        If tensorboard is not installed.
    """
    writers = needed("writing for TensorBoard", "tensorboard", "tensorboard", "torch.utils.tensorboard")
    several_ranks = len({stream.rank for stream in answers.streams}) > 1
    with contextlib.ExitStack() as stack:
        events: dict[tuple[str, int], _Events] = {}
        for number, message in zip(answers.stream_ids, answers.messages(), strict=True):
            stream = answers.streams[number]
            key = stream.trace, stream.rank
            if key not in events:
                folder = Path(logdir, _run_of(stream.trace), f"rank{stream.rank}" if several_ranks else "")
                writer = stack.enter_context(writers.SummaryWriter(os.fspath(folder)))
                events[key] = _Events(writer, answers.streams, times.get(stream.trace))
            events[key].add(stream, message)


def times_of(reader: TraceReader) -> Clock | None:
    """The estimated time of each global step of a trace, in seconds since 1970; None if the run has not ended.

    A trace has the times when its run began and ended, but not those of its steps: they are spread evenly between.
    """
    info = reader.info
    if info["created"] is None or info["ended"] is None or info["steps"] is None:
        return None
    try:
        began, ended = (dt.datetime.fromisoformat(info[name]).timestamp() for name in ("created", "ended"))
    except (TypeError, ValueError):  # another writer may use these names for anything
        return None
    first, last = info["steps"]
    return lambda step: began + (ended - began) * (step - first + 1) / (last - first + 1)


def _run_of(trace: str) -> str:
    """The name of a trace's run in TensorBoard, which is a relative folder.

    Examples
    --------
    >>> _run_of("runs/a.zarr"), _run_of("/data/../b.h5"), _run_of("../c.zarr"), _run_of("s3://bucket/d.zarr")
    ('runs/a', 'b', 'c', 'bucket/d')
    """
    _, _, path = trace.rpartition("://")
    parts = Path(os.path.normpath(path)).with_suffix("").parts if path else ()
    return os.path.join("", *(part for part in parts if part not in (os.sep, "..")))


@final
class _Events:
    """Writes the answers of one rank of a trace as events; histogram counts wait for their edges."""

    def __init__(self, writer: Any, streams: Iterable[Stream], when: Clock | None) -> None:
        self._writer = writer
        self._when = when
        # the kind of edges may end in a label: weights_histogram_edges_fine
        self._edges_of = {
            (stream.trace, stream.kind.replace("_edges", "", 1)): stream.kind
            for stream in streams
            if "_edges" in stream.kind
        }
        self._counted: dict[tuple[Any, ...], torch.Tensor] = {}

    def add(self, stream: Stream, message: Message) -> None:
        """Write an answer."""
        if message.data is None:
            return
        name = "/".join(filter(None, (stream.kind, stream.place)))
        if stream.tag != "default":
            name += f"@{stream.tag}"
        if message.call:
            name += f":{message.call}"
        step = message.global_step
        when = None if self._when is None else self._when(step)
        place = (stream.module, stream.tag, stream.leaf, message.call, step)
        if (stream.trace, stream.kind) in self._edges_of:
            self._counted[(*place, self._edges_of[stream.trace, stream.kind], name)] = message.data
            return
        waiting = next((key for key in self._counted if key[:-1] == (*place, stream.kind)), None)
        if waiting is not None:
            _add_histogram(self._writer, waiting[-1], self._counted.pop(waiting), message.data, step, when)
            return
        for index, value in zip(positions(tuple(message.data.shape)), message.data.reshape(-1).tolist(), strict=True):
            self._writer.add_scalar(name + index, value, step, when)


def _add_histogram(
    writer: Any, name: str, counts: torch.Tensor, edges: torch.Tensor, step: int, when: float | None
) -> None:
    if not bool(edges.isfinite().all()):
        return
    centres = (edges[:-1] + edges[1:]) / 2
    writer.add_histogram_raw(
        name,
        min=float(edges[0]),
        max=float(edges[-1]),
        num=int(counts.sum()),
        sum=float((centres * counts).sum()),
        sum_squares=float((centres * centres * counts).sum()),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
        walltime=when,
    )
