"""Computes statistics of recorded tensors over time: in batches of tensors, without a message for each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.statistics import SEVEN, StatisticsResult, check_names, statistics_of_tensors
from analyze.tables.writing import pandas
from tracer.errors import CaptureError
from tracer.format.journal import Column
from tracer.replaying.wanted import opened
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Steps, StreamInfo


@dataclass(frozen=True, eq=False)
class StreamStatistics:
    """Statistics of one stream over time.

    Attributes
    ----------
    stream : StreamInfo
        The kind, module, tag, leaf and rank.
    global_steps : ndarray of int64, (n,)
        The step of each message.
    calls : ndarray of int64, (n,)
        The call of each message in its step.
    statistics : StatisticsResult
        A float64 array (n,) for each name.
    """

    stream: StreamInfo
    global_steps: NDArray[np.int64]
    calls: NDArray[np.int64]
    statistics: StatisticsResult

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with the columns ``global_step``, ``call`` and a column for each statistic.

        Raises
        ------
        TracerError
            If pandas is not installed.
        """
        return pandas().DataFrame({"global_step": self.global_steps, "call": self.calls, **self.statistics})


def statistics_over_time(
    trace: Anywhere | TraceReader,
    kind: str,
    which: str | Iterable[str] = SEVEN,
    *,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    ddof: int = 1,
    precision: Literal["double", "single"] = "double",
) -> list[StreamStatistics]:
    """Statistics of every recorded tensor of a kind: like `Statistics`, but much faster for small tensors.

    Parameters
    ----------
    trace : path, URL or TraceReader
    kind : str
        A kind with data of real dtype.
    which, ddof, precision
        As in `statistics`.
    modules, steps, tags
        As in `TraceReader.messages`.

    Returns
    -------
    list of StreamStatistics
        One for each stream, in the order of the trace; bitwise the same numbers as a replay through `Statistics`.

    Raises
    ------
    CaptureError
        If the trace has no such stream, or its messages are events or complex.
    MessageError
        If a statistic is unknown.

    Examples
    --------
    >>> import tempfile, torch
    >>> from tracer import ModuleMessage, TraceWriter
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with TraceWriter(path) as writer:
    ...     for step in range(3):
    ...         where = {"global_step": step, "train_step": step, "epoch": 0}
    ...         writer.write(ModuleMessage(kind="biases", module="fc", data=torch.full((2,), float(step)), **where))
    >>> (found,) = statistics_over_time(path, "biases", "mean+norm1")
    >>> found.stream.module, found.global_steps.tolist(), found.statistics.norm1.tolist()
    ('fc', [0, 1, 2], [0.0, 2.0, 4.0])
    """
    names = check_names(which)
    with opened(trace, None) as reader:
        rows = reader.select(kind, modules, steps, tags)
        streams = {stream.id: stream for stream in reader.streams if stream.kind == kind}
        chosen = np.unique(reader.journal[rows, Column.STREAM]).tolist()
        if not chosen:
            raise CaptureError(f"{reader.path} has no {kind} messages that pass these filters")
        for number in chosen:
            dtype = streams[number].dtype
            if dtype is None or "complex" in dtype:
                raise CaptureError(f"statistics need real numbers, but {streams[number]} of {reader.path} has {dtype}")
        columns = np.full((len(names), len(reader.journal)), np.nan)
        for batch in reader.arrays(kind, modules, steps, tags):
            data = batch.data.reshape(len(batch.rows), math.prod(batch.data.shape[1:]))
            of_batch = statistics_of_tensors(data, names, ddof=ddof, precision=precision)
            columns[:, batch.rows] = list(of_batch.values())
        found = []
        for number in chosen:
            of_stream = rows[reader.journal[rows, Column.STREAM] == number]
            found.append(
                StreamStatistics(
                    streams[number],
                    reader.journal[of_stream, Column.GLOBAL_STEP],
                    reader.journal[of_stream, Column.CALL],
                    StatisticsResult(zip(names, columns[:, of_stream], strict=True)),
                )
            )
        return found
