"""`runs`: facts about runs beside each other: the settings that differ, losses, the best accuracy, the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final, overload

import numpy as np

from analyze.tables.settings import Setting, differing, name_of, settings_of
from analyze.tables.writing import pandas
from analyze.traces import find_traces
from tracer.errors import TracerError, UnknownNameError
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.shown import table
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader


@final
@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is worth knowing of a run beside others.

    Attributes
    ----------
    trace, name, status : str
    tags : tuple of str
    steps : int
        How many training steps there were, recorded or not.
    bytes : int
        Of the trace on the disk.
    settings : mapping of str to (str, int, float, bool or None)
        As `analyze.tables.settings.settings_of`; ``lr`` is the first learning rate, if no setting has that name.
    loss, best_loss : float or None
        The loss of the last recorded step, and the lowest of all: the mean, where a step has several.
    best_loss_step : int or None
    accuracy : float or None
        The highest accuracy of an evaluation, from its outputs and labels, or as the program logged it.
    accuracy_step : int or None
    verdict : str
        The most severe finding of `analyze.check`, or that nothing was found.
    findings : int
    problem : str
        Why some of this is missing; empty if nothing is.
    """

    trace: str
    name: str
    status: str
    tags: tuple[str, ...] = ()
    steps: int = 0
    bytes: int = 0
    settings: Mapping[str, Setting] = field(default_factory=dict)
    loss: float | None = None
    best_loss: float | None = None
    best_loss_step: int | None = None
    accuracy: float | None = None
    accuracy_step: int | None = None
    verdict: str = ""
    findings: int = 0
    problem: str = ""

    def cells(self, settings: Sequence[str]) -> dict[str, Any]:
        """The row of a table with a column for each of these settings."""
        return {
            "run": self.name,
            **{name: self.settings.get(name) for name in settings},
            "status": self.status,
            "steps": self.steps or None,
            "loss": self.loss,
            "best loss": self.best_loss,
            "at": self.best_loss_step,
            "accuracy": self.accuracy,
            "on disk": self.bytes or None,
            "verdict": self.verdict,
            "trace": self.trace,
        }


def facts_of(trace: str, *, quick: bool = False) -> RunFacts:
    """The facts about a run; of a trace that cannot be read, why.

    Parameters
    ----------
    trace : str
        Path or URL.
    quick : bool
        Whether losses, accuracies and the verdict are left out, for which data is read.
    """
    try:
        with TraceReader(trace) as reader:
            return _facts(reader, trace, quick=quick)
    except TracerError as error:
        return RunFacts(trace=trace, name=name_of({}, trace), status="unreadable", problem=str(error))


def facts_of_losses(trace: str, info: Mapping[str, Any], losses: Mapping[int, float]) -> RunFacts:
    """The facts about a run whose losses are known already; ``info`` is `TraceReader.info`."""
    return RunFacts(**_of_header(trace, info) | _of_losses(losses) | {"bytes": 0})


def _of_header(trace: str, info: Mapping[str, Any]) -> dict[str, Any]:
    header = info["header"]
    tags = header.get("tags")
    return {
        "trace": trace,
        "name": name_of(header, trace),
        "status": info["status"],
        "tags": tuple(map(str, tags)) if isinstance(tags, list) else (),
        "steps": info["steps"][1] + 1 if info["steps"] else 0,
        "bytes": info["stored_bytes"],
        "settings": settings_of(header),
    }


def _facts(reader: TraceReader, trace: str, *, quick: bool) -> RunFacts:
    found = _of_header(trace, reader.info)
    if quick:
        return RunFacts(**found)
    try:
        found["settings"] = _learning_rate(reader) | found["settings"]
        found |= _of_losses(_means(reader, "loss", DEFAULT_TAG)) | _of_accuracies(_accuracies(reader))
        found |= _of_rules(reader)
    except TracerError as error:
        found["problem"] = str(error)
    return RunFacts(**found)


def _of_losses(losses: Mapping[int, float]) -> dict[str, Any]:
    finite = {step: value for step, value in losses.items() if np.isfinite(value)}
    if not finite:
        return {"loss": list(losses.values())[-1]} if losses else {}
    best = min(finite, key=finite.__getitem__)
    return {"loss": list(losses.values())[-1], "best_loss": finite[best], "best_loss_step": best}


def _of_accuracies(accuracies: Mapping[int, float]) -> dict[str, Any]:
    best = max(accuracies, key=accuracies.__getitem__, default=None)
    return {} if best is None else {"accuracy": accuracies[best], "accuracy_step": best}


def _of_rules(reader: TraceReader) -> dict[str, Any]:
    from analyze.seeing.check import check  # imported here, because it needs torch

    checked = check(reader)
    verdict = checked.verdict if checked.worst is None else checked.worst.title
    return {"verdict": verdict, "findings": len(checked.findings), "problem": checked.damage}


def _means(reader: TraceReader, kind: str, tag: str) -> dict[int, float]:
    """The mean of a number of the network in each step, in the order of the steps."""
    numbers: dict[int, list[float]] = {}
    for steps, values in _numbers(reader, kind, tag):
        for step, value in zip(steps, values, strict=True):
            numbers.setdefault(step, []).append(value)
    return {step: float(np.mean(numbers[step])) for step in sorted(numbers)}


def _numbers(reader: TraceReader, kind: str, tag: str) -> Iterator[tuple[list[int], list[float]]]:
    for window in reader.windows():
        for group in window.arrays(
            kinds=kind,
            tags=tag,
        ):
            if group.data.ndim == 1:
                yield window.journal[group.rows, Column.GLOBAL_STEP].tolist(), group.data.astype(float).tolist()


def _learning_rate(reader: TraceReader) -> dict[str, Setting]:
    """The first learning rate, called ``lr``; nothing if none was recorded, or groups of parameters differ in it."""
    for message in reader.messages(kinds="hyperparameters"):
        names = (message.sampling or {}).get("entries", [])
        assert message.data is not None  # events are of other kinds
        rates = {float(value) for name, value in zip(names, message.data.tolist(), strict=False) if name == "lr"}
        return {"lr": rates.pop()} if len(rates) == 1 else {}
    return {}


def _accuracies(reader: TraceReader) -> dict[int, float]:
    """The accuracy of each evaluation, by its step."""
    there = {(stream.kind, stream.tag) for stream in reader.streams if stream.module is None}
    evaluated = {tag for kind, tag in there if kind == "network_output" and tag != DEFAULT_TAG}
    if any(("input_labels", tag) in there for tag in evaluated):
        from analyze.asking import analyze  # imported here, because it needs torch

        rows = analyze(reader, "test_accuracy")
        found = {row.global_step: row.value for row in rows if np.isfinite(row.value)}
        if found:
            return found
    logged = [kind for kind, _ in there if kind not in KINDS and "acc" in kind.lower()]
    return {
        step: value
        for kind in sorted(logged)[:1]
        for step, value in _means(reader, kind, DEFAULT_TAG).items()
        if np.isfinite(value)
    }


@final
class Runs(Sequence[RunFacts]):
    """Runs beside each other, as `runs` returns them.

    Examples
    --------
    >>> each = (("a", {"lr": 0.1, "seed": 0}), ("b", {"lr": 0.2, "seed": 0}))
    >>> found = Runs([RunFacts(trace=f"{name}.zarr", name=name, status="finished", settings=of) for name, of in each])
    >>> for row in found.rows():
    ...     print(row)
    {'run': 'a', 'lr': 0.1, 'status': 'finished', 'trace': 'a.zarr'}
    {'run': 'b', 'lr': 0.2, 'status': 'finished', 'trace': 'b.zarr'}
    >>> found.sorted("lr", descending=True)[0].name
    'b'
    """

    def __init__(self, runs: Iterable[RunFacts]) -> None:
        self._runs = tuple(runs)

    @overload
    def __getitem__(self, which: int) -> RunFacts: ...
    @overload
    def __getitem__(self, which: slice) -> Runs: ...
    def __getitem__(self, which: int | slice) -> RunFacts | Runs:
        return Runs(self._runs[which]) if isinstance(which, slice) else self._runs[which]

    def __len__(self) -> int:
        return len(self._runs)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each run: its name, the settings that differ, and what came of it; no column without values."""
        names = differing(one.settings for one in self if one.status != "unreadable")
        rows = [one.cells(names) for one in self]
        kept = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)] if rows else []
        return [{name: row[name] for name in kept} for row in rows]

    def sorted(self, column: str, *, descending: bool = False) -> Runs:
        """The runs by a column of `rows`, the smallest first; runs without a value come last.

        Raises
        ------
        UnknownNameError
            If there is no such column.
        """
        rows = self.rows()
        if rows and column not in rows[0]:
            raise UnknownNameError.of("column", column, rows[0])
        there = [number for number, row in enumerate(rows) if not _is_missing(row[column])]
        numbers = all(isinstance(rows[number][column], int | float) for number in there)
        key: Any = (lambda number: rows[number][column]) if numbers else (lambda number: str(rows[number][column]))
        there.sort(key=key, reverse=descending)
        return Runs([self[number] for number in dict.fromkeys([*there, *range(len(rows))])])

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`; raises `TracerError` if pandas is not installed."""
        return pandas().DataFrame(self.rows())

    def __repr__(self) -> str:
        return f"Runs({len(self)} runs)"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        rows = self.rows()
        return table(list(rows[0]) if rows else [], [list(row.values()) for row in rows], repr(self))


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or value != value


def runs(traces: Anywhere | Iterable[Anywhere], *, quick: bool = False) -> Runs:
    """Facts about runs beside each other: which settings differ, and what came of it.

    Parameters
    ----------
    traces : path, URL, glob or folder, or several
        As in `analyze.batch`.
    quick : bool
        Whether losses, accuracies and verdicts are left out, for which data is read.

    Raises
    ------
    TracerError
        If there is no trace. A trace that cannot be read is a row that says so.
    """
    return Runs(facts_of(trace, quick=quick) for trace in find_traces(traces))
