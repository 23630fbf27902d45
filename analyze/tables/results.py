"""The table of answers: collected from a replay, and written to files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from numpy.typing import NDArray

from analyze.tables import arrays, trackers, writing
from analyze.tables.columns import COLUMNS, AnswerColumns, Answers, Row
from analyze.tables.companions import companions_of, statuses_of
from analyze.tables.layout import TextTable
from analyze.tables.plotting import FORMATS, figure_of
from analyze.tables.series import Series, place_of, series_of, table_of
from analyze.tables.settings import columns_of
from tracer.errors import UnknownNameError
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver, describe
from tracer.messaging.stacks import Stack, Stretch
from tracer.shown import table


class Results:
    """A table of answers: one row for each number, in the order in which they came.

    ==============  ==============================================================================================
    trace           the path of the trace that was replayed
    subscriber      the registry name of the subscriber that answered (its class, if it has none)
    kind            the kind of the answer, such as ``weights_spectral_norm``
    module          dotted path; empty for the network; ``lstm#1.0`` for the leaf ``1.0`` of a structured output
    tag             ``default`` for training passes
    rank            of the process that recorded the messages; 0 if the run was not distributed
    epoch           from 0
    train_step      from 0, in the epoch
    global_step     from 0
    call            from 0, in the step
    index           empty for a single number, else its position in an array as JSON: ``[3]``, ``[0, 2]``
    value           float64
    ==============  ==============================================================================================

    In memory, a number takes about 60 bytes.

    Parameters
    ----------
    answers : Answers, optional
        Storage that holds answers already. They are read from there; the first call that needs all of them at once
        loads them into memory, where they stay.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> results = Results()
    >>> where = dict(module="fc", global_step=3, train_step=1, epoch=1)
    >>> results.add(ModuleMessage(kind="weights_norm2", data=torch.tensor(0.5), **where), "run.zarr", "norm")
    >>> results.add(ModuleMessage(kind="weights_counts", data=torch.tensor([4, 2]), **where), "run.zarr", "counts")
    >>> for row in results:
    ...     print(row.kind, row.module, row.global_step, repr(row.index), row.value)
    weights_norm2 fc 3 '' 0.5
    weights_counts fc 3 '[0]' 4.0
    weights_counts fc 3 '[1]' 2.0
    """

    def __init__(self, answers: Answers | None = None) -> None:
        self._answers: Answers = AnswerColumns() if answers is None else answers

    def _gathered(self) -> AnswerColumns:
        """Load the answers into memory, where they stay."""
        self._answers = found = self._answers.gathered()
        return found

    # -- filling --------------------------------------------------------------------------------------------

    def add(self, message: Message, trace: str = "", subscriber: str = "") -> None:
        """Append an answer: one row per number.

        Raises
        ------
        MessageError
            If the data is complex, which no table of numbers can hold.
        """
        self._gathered().add(message, trace, subscriber)

    def add_many(self, stretch: Stretch, trace: str, subscribers: Mapping[str, str]) -> None:
        """Append many answers in order; equal to `add` on each.

        Parameters
        ----------
        stretch : Stretch
        trace : str
        subscribers : mapping of str to str
            Kind → the subscriber that answered.

        Raises
        ------
        MessageError
            If data is complex; then nothing is appended.
        """
        self._gathered().add_many(stretch, trace, subscribers)

    def extend(self, other: Results) -> None:
        """Append all rows of other results, such as those of another trace."""
        self._gathered().extend(other._gathered())

    def structure(self) -> dict[str, Any]:
        """What `restored` needs besides the rows to restore the answers, as JSON values."""
        return self._gathered().structure()

    @classmethod
    def restored(cls, columns: Mapping[str, Sequence[Any]], structure: Mapping[str, Any]) -> Results:
        """Restore results from their `columns` and `structure`.

        Examples
        --------
        >>> import torch
        >>> from tracer import NetworkMessage
        >>> results = Results()
        >>> where = dict(global_step=0, train_step=0, epoch=0)
        >>> results.add(NetworkMessage(kind="loss_counts", data=torch.tensor([[4, 2]]), **where))
        >>> [message.data for message in Results.restored(results.columns(), results.structure()).messages()]
        [tensor([[4, 2]])]
        """
        return Results(AnswerColumns.of(columns, structure))

    def sink(self, subscribers: Iterable[Receiver], trace: str = "") -> Sink:
        """A receiver, for a bus or a replay, that adds the subscribers' answers to these results."""
        return Sink(self, subscribers, trace)

    # -- reading --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many rows."""
        return len(self._answers)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._answers)

    def __repr__(self) -> str:
        return f"Results({len(self)} rows, {len(self._gathered().streams)} series)"

    def __str__(self) -> str:
        """The text of `to_table`, in the width of the terminal."""
        return str(self.to_table()) if len(self) else repr(self)

    @property
    def traces(self) -> tuple[str, ...]:
        """The traces that were replayed, in order."""
        return tuple(dict.fromkeys(stream.trace for stream in self._gathered().streams))

    @property
    def subscribers(self) -> tuple[str, ...]:
        """The subscribers that answered, in order of their first answers."""
        return tuple(dict.fromkeys(stream.subscriber for stream in self._gathered().streams))

    def messages(self) -> Iterator[Message]:
        """The answers as messages, with their shape and dtype."""
        return self._answers.messages()

    def columns(self) -> dict[str, list[str] | NDArray[Any]]:
        """The table as columns: lists of strings, and arrays of int64 and (``value``) float64."""
        return self._gathered().table()

    def plot(self, path: writing.PathLike | None = None, *, log: bool | None = None, overwrite: bool = False) -> Any:
        """Draw the answers over their steps: a panel per kind, with a line per series, or a map beyond eight series.

        Parameters
        ----------
        path : path, optional
            File to write: ``.png``, ``.svg`` or ``.pdf``.
        log : bool, optional
            Whether the value axis is logarithmic. By default, if all values are positive and span two decades.
        overwrite : bool
            Whether a file at `path` may be replaced.

        Returns
        -------
        matplotlib.figure.Figure
            No window is opened; a notebook shows it.

        Raises
        ------
        MessageError
            If there are no answers.
        TraceExistsError
            If the file exists and `overwrite` is false.
        UnknownNameError
            If the suffix of `path` is none of these.
        TracerError
            If matplotlib is not installed.
        """
        if path is not None and Path(path).suffix not in FORMATS:
            raise UnknownNameError.of("format of figures", Path(path).suffix, FORMATS)
        figure = figure_of(self._gathered(), log=log)
        if path is not None:
            with writing.new_file(path, overwrite=overwrite) as temporary:
                figure.savefig(temporary, format=Path(path).suffix[1:], dpi=150)
        return figure

    def _repr_html_(self) -> str:
        """The summary, for notebooks."""
        columns = ("kind", "module", "tag", "n", "first", "last", "min", "at", "max", "at", "trend", "status")
        hidden, (told, _) = companions_of(self.kinds), statuses_of(self._gathered())
        rows = [
            (one.kind, one.module, one.tag, one.n, one.first, one.last)
            + (one.min, one.min_step, one.max, one.max_step, one.trend, told.get(place_of(one), ""))
            for one in self.summary()
            if one.kind not in hidden
        ]
        kept = [at for at, name in enumerate(columns) if name != "status" or any(row[at] for row in rows)]
        return table([columns[at] for at in kept], [[row[at] for at in kept] for row in rows], repr(self))

    def summary(self) -> list[Series]:
        """A summary per series: the number of answers, first, last, least and greatest value, and a sparkline.

        In first, last and the sparkline, an array answer counts as the mean of its finite numbers.
        """
        return series_of(self._gathered())

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the answers, in order of their first answers."""
        return tuple(dict.fromkeys(stream.kind for stream in self._gathered().streams))

    def to_table(self, rows: int = 40, *, companions: bool = False) -> TextTable:
        """A table for a terminal, by kind: every row if there are at most `rows`, else a line per series.

        Names that the tables shorten are complete in `summary` and in the files.

        Parameters
        ----------
        rows : int
        companions : bool
            Whether to show nulls, residuals and statuses, which stand beside other answers. Without them, a status
            that is not as it should be stands as a word beside its answer.
        """
        hidden = {} if companions else companions_of(self.kinds)
        of_series, of_answers = ({}, {}) if companions else statuses_of(self._gathered())
        if len(self) <= rows:
            return table_of([row for row in self if row.kind not in hidden], of_answers)
        return table_of([one for one in self.summary() if one.kind not in hidden], of_series)

    # -- writing --------------------------------------------------------------------------------------------

    def write(self, path: writing.PathLike, *, overwrite: bool = False) -> None:
        """Write a file in the format that the suffix names: ``.csv .jsonl .parquet .zarr .h5``.

        A file appears complete or not at all.

        Raises
        ------
        UnknownNameError
            If the suffix is none of these.
        TraceExistsError
            If the file exists and `overwrite` is false.
        TraceError
            If the file cannot be written.
        """
        writers = {
            ".csv": self.to_csv,
            ".jsonl": self.to_jsonl,
            ".parquet": self.to_parquet,
            ".zarr": self.to_trace,
            ".h5": self.to_trace,
        }
        suffix = Path(path).suffix
        if suffix not in writers:
            raise UnknownNameError.of("format of results", suffix, writers)
        writers[suffix](path, overwrite=overwrite)

    def to_csv(self, path: writing.PathLike, *, overwrite: bool = False) -> None:
        """Write comma-separated values, UTF-8, with a header line.

        Values read back as the same float64, including ``nan``, ``inf`` and ``-inf``. Texts that a spreadsheet would
        compute (``=1+1``) get an apostrophe before them, see `tracer.shown.in_cell`; a reader removes the
        first apostrophe of a text.
        """
        writing.write_csv(self, path, overwrite=overwrite)

    def to_jsonl(self, path: writing.PathLike, *, overwrite: bool = False) -> None:
        """Write JSON lines, UTF-8: one object with all columns per row.

        Values read back as the same float64. JSON has no non-finite numbers: they become the strings ``"NaN"``,
        ``"Infinity"`` and ``"-Infinity"``, which Python's ``float`` and JavaScript's ``Number`` parse.
        """
        writing.write_jsonl(self, path, overwrite=overwrite)

    def to_parquet(self, path: writing.PathLike, *, overwrite: bool = False) -> None:
        """Write Parquet: strings, counters as int64, ``value`` as double.

        Raises
        ------
        TracerError
            If pyarrow is not installed.
        """
        writing.write_parquet(self.columns(), path, overwrite=overwrite)

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`; of several runs with their names, and a column per setting that differs.

        Raises
        ------
        TracerError
            If pandas is not installed.
        """
        table: dict[str, Any] = self.columns()
        frame = writing.pandas().DataFrame(table, columns=list(COLUMNS))
        for place, (name, values) in enumerate(columns_of(self.traces, COLUMNS).items(), 1):
            frame.insert(place, name, [values[trace] for trace in table["trace"]])
        return frame

    def to_xarray(self, kinds: str | Iterable[str] | None = None) -> Any:
        """The answers as an `xarray.Dataset`: a variable per kind, with the axes ``step`` and ``layer``.

        What all answers of a kind share (trace, subscriber, tag, rank, call) is in the attributes of the variable; a
        field that differs becomes an axis. Kinds with other steps than most have an axis ``step_KIND`` of their own.
        Kinds that only the network has lack the axis ``layer``. Array answers have further axes, as long as the longest
        array. Missing answers are NaN.

        Parameters
        ----------
        kinds : str or iterable of str, optional
            The kinds of answers to include; by default all.

        Returns
        -------
        xarray.Dataset
            Of float64. ``epoch`` and ``train_step`` are coordinates along ``step`` if all answers of a step agree. The
            attribute ``units`` is set where the unit does not depend on what was recorded; 1 is dimensionless.

        Raises
        ------
        UnknownNameError
            If no answer has one of the kinds.
        MessageError
            If answers of a kind have different numbers of axes, if several answers have the same place, or if an array
            would take more than 1 GiB to hold few answers.
        TracerError
            If xarray is not installed.
        """
        return arrays.dataset_of(self._gathered(), kinds)

    def to_trace(self, path: writing.PathLike, *, overwrite: bool = False) -> None:
        """Write the answers as a trace (``.zarr`` or ``.h5``) that can be replayed like a recorded one.

        Raises
        ------
        TraceError
            If the results come from several traces, whose steps would be mixed up.
        """
        writing.write_trace(self.messages(), self.traces, self.subscribers, path, overwrite=overwrite)

    def to_tensorboard(self, logdir: writing.PathLike, *, times: Mapping[str, writing.Clock] | None = None) -> None:
        """Write TensorBoard event files: `to_tracker` with ``tensorboard:LOGDIR``.

        Each trace is a run in a folder below `logdir`, named like the trace's path without its suffix, with a subfolder
        per rank if there are several.

        Parameters
        ----------
        logdir : path
        times : mapping of str to callable, optional
            As in `to_tracker`.

        Raises
        ------
        TracerError
            If tensorboard is not installed.
        """
        self.to_tracker(f"tensorboard:{os.fspath(logdir)}", times=times)

    def to_tracker(self, target: str, *, times: Mapping[str, writing.Clock] | None = None) -> None:
        """Hand the answers to a program that shows runs: each number is ``kind/module`` at its global step.

        Each trace is a run, with its name and settings; each rank is one, if there are several. The name of a number
        also has the tag unless it is ``default``, and its position in an array. Counts with edges (of ``histogram``)
        become histograms, which MLflow has not. Whether a server is contacted is up to the settings of the tracker.

        Parameters
        ----------
        target : str
            ``wandb[:PROJECT]``, ``mlflow[:FOLDER]`` (or a tracking URI), ``trackio:PROJECT`` or ``tensorboard:DIR``.
            Without a project or folder, that of the tracker's own settings.
        times : mapping of str to callable, optional
            Trace → the time of a global step, in seconds since 1970; see `analyze.tables.writing.times_of`. By
            default, the time of writing. TensorBoard and MLflow take it.

        Raises
        ------
        UnknownNameError
            If there is no such tracker.
        MessageError
            If `target` must name a project or folder.
        TracerError
            If the tracker is not installed, or does not take the run.
        """
        trackers.hand_over_numbers(self._gathered(), target, times or {})


@final
class Sink(Receiver):
    """A receiver that adds the answers of some subscribers to results; it requests no messages itself.

    Parameters
    ----------
    results : Results
    subscribers : iterable
        The subscribers whose answers are kept: all messages of the kinds that they produce.
    trace : str
        The content of the column ``trace``.
    """

    passive = True
    scope = "message"
    name = "results"
    takes_many = True

    def __init__(self, results: Results, subscribers: Iterable[Receiver], trace: str = "") -> None:
        self.results = results
        self.trace = trace
        self.producers: dict[str, str] = {
            kind: describe(subscriber) for subscriber in subscribers for kind in subscriber.produces
        }

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of the subscribers produces this kind."""
        return kind in self.producers

    def receive(self, message: Message) -> Iterable[Message]:
        """Add the message to the results."""
        self.results.add(message, self.trace, self.producers[message.kind])
        return ()

    def receive_many(self, stretch: Stretch) -> Iterable[Stack]:
        """Add the messages to the results."""
        self.results.add_many(stretch, self.trace, self.producers)
        return ()
