"""Hands numbers, findings and pages of runs to programs that show runs: TensorBoard, wandb, MLflow and Trackio."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, final

import numpy as np

from analyze.tables.columns import AnswerColumns, AnswerStream, positions
from analyze.tables.settings import Setting, header_of, run_names, settings_of
from analyze.tables.writing import Clock, needed
from tracer.errors import MessageError, TracerError, UnknownNameError

if TYPE_CHECKING:
    from analyze.rules.finding import Finding


class TrackedRun(NamedTuple):
    """What a tracker is told of a run when it begins; `rank` only if the ranks have runs of their own."""

    trace: str
    name: str
    settings: Mapping[str, Setting]
    tags: Sequence[Any]
    recording: str
    """What tells the recording from others of this name; empty if it is not known."""
    rank: int | None = None

    @property
    def called(self) -> str:
        """The name of the run, with the rank."""
        return self.name if self.rank is None else f"{self.name}/rank{self.rank}"


class Bins(NamedTuple):
    """A histogram: the counts of (bins,), and the edges of (bins + 1,), which are finite."""

    counts: Sequence[float]
    edges: Sequence[float]


Numbers = Mapping[str, float | Bins]


class Tracker(ABC):
    """A run in a program that shows runs, from ``with`` to the end of its block.

    Parameters
    ----------
    package : module
        The program's package.
    where : str
        The project or folder; may be empty, unless `lacking` says otherwise.
    run : TrackedRun
    """

    module: ClassVar[str]
    """The name of `package`."""
    lacking: ClassVar = ""
    """What is wrong if `where` is empty."""
    unless: ClassVar = ""
    """The environment variable that says `where` otherwise."""
    form: ClassVar = ".*"
    """A pattern of what `where` may be."""
    usage: ClassVar = ""
    """What `where` is, for who gives something else."""
    histograms: ClassVar = True
    """Whether `log` takes `Bins`."""
    root: ClassVar = ""
    """The root of the network in the names of numbers."""

    def __init__(self, package: Any, where: str, run: TrackedRun) -> None:
        self.package = package
        self.until_end = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.until_end.__exit__(*error)

    @abstractmethod
    def log(self, step: int, numbers: Numbers, when: float | None) -> None:
        """Take all numbers of a global step; `when`: in seconds since 1970, if it is known."""

    @abstractmethod
    def tell(self, verdict: str, findings: Sequence[Finding]) -> None:
        """Take the verdict of rules, and what they found."""

    @abstractmethod
    def show(self, name: str, page: str) -> None:
        """Take a page of HTML."""


@final
class TensorBoardRun(Tracker):
    """Event files in a folder below `where`, named like the trace's path; pages lie beside them."""

    module = "torch.utils.tensorboard"
    lacking = usage = "TensorBoard shows the event files of a folder, so name one: tensorboard:DIR"
    form = "(?!.*://).*"

    def __init__(self, package: Any, where: str, run: TrackedRun) -> None:
        super().__init__(package, where, run)
        self._folder = Path(where, folder_of(run.trace), "" if run.rank is None else f"rank{run.rank}")
        self._writer = self.until_end.enter_context(package.SummaryWriter(os.fspath(self._folder)))
        if run.settings:
            rows = (f"|{name}|{value}|" for name, value in run.settings.items())
            self._writer.add_text("settings", "\n".join(("|setting|value|", "|---|---|", *rows)), 0)

    def log(self, step: int, numbers: Numbers, when: float | None) -> None:
        """Write scalars and histograms."""
        for name, value in numbers.items():
            if not isinstance(value, Bins):
                self._writer.add_scalar(name, value, step, when)
                continue
            counts, edges = np.asarray(value.counts), np.asarray(value.edges)
            centres = (edges[:-1] + edges[1:]) / 2
            self._writer.add_histogram_raw(
                name,
                min=float(edges[0]),
                max=float(edges[-1]),
                num=int(counts.sum()),
                sum=float(counts @ centres),
                sum_squares=float(counts @ centres**2),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
                walltime=when,
            )

    def tell(self, verdict: str, findings: Sequence[Finding]) -> None:
        """Write the verdict as a text, and each finding at its first step."""
        self._writer.add_text("verdict", verdict, 0)
        for one in findings:
            told = f"{one.severity}: {one.title}: {one.evidence}; {one.advice}"
            self._writer.add_text(f"findings/{one.rule}", told, one.first)

    def show(self, name: str, page: str) -> None:
        """Write the page beside the event files; TensorBoard has no place for pages."""
        (self._folder / f"{name}.html").write_text(page, encoding="utf-8", errors="backslashreplace")


@final
class WandbRun(Tracker):
    """A new run of Weights & Biases in the project `where` (``PROJECT`` or ``ENTITY/PROJECT``), by wandb's settings.

    The x axis is ``global_step``: wandb's own steps may not go back, so a run that is continued would lose numbers.
    """

    module = "wandb"
    usage = "name a project, wandb:PROJECT or wandb:ENTITY/PROJECT"
    form = "[^/]+(/[^/]+)?"

    def __init__(self, package: Any, where: str, run: TrackedRun) -> None:
        super().__init__(package, where, run)
        entity, _, project = where.rpartition("/")
        told = {"name": run.called, "config": dict(run.settings), "tags": [*map(str, run.tags)] or None}
        quiet = package.Settings(console="off", x_disable_stats=True)
        # "create_new": a run of the program's own goes on
        self._run = package.init(entity or None, project or None, reinit="create_new", settings=quiet, **told)
        self.until_end.callback(self._run.finish)
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def log(self, step: int, numbers: Numbers, when: float | None) -> None:
        """Log all in one call."""
        self._run.log({"global_step": step} | _with_histograms(numbers, self.package.Histogram))

    def tell(self, verdict: str, findings: Sequence[Finding]) -> None:
        """Put the verdict into the summary, and the findings into a table."""
        self._run.summary["verdict"] = verdict
        columns = ["first", "severity", "rule", "place", "steps", "evidence", "advice"]
        rows = [[one.first, str(one.severity), *(getattr(one, name) for name in columns[2:])] for one in findings]
        self._run.log({"findings": self.package.Table(columns=columns, data=rows)})

    def show(self, name: str, page: str) -> None:
        """Log the page as media."""
        self._run.log({name: self.package.Html(page, inject=False, data_is_not_path=True)})


@final
class MlflowRun(Tracker):
    """The run of this name in an experiment of MLflow, unless it is of another recording, or a new one.

    `where` is a folder or a tracking URI.

    The experiment is that of ``MLFLOW_EXPERIMENT_NAME``, else "Default".
    """

    module = "mlflow"
    lacking = (
        "MLflow keeps runs in a folder or on a server, so name it: mlflow:FOLDER, mlflow:URI or MLFLOW_TRACKING_URI"
    )
    unless = "MLFLOW_TRACKING_URI"
    histograms = False
    root = "root"  # a file store has a folder for the numbers of modules, and a file cannot have its name

    _AT_ONCE: ClassVar = 1000
    """The most numbers that MLflow takes at once."""

    def __init__(self, package: Any, where: str, run: TrackedRun) -> None:
        super().__init__(package, where, run)
        if where and "://" not in where:
            where = os.path.abspath(where)  # it remembers stores by their paths
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # or it takes no folder
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its 7 take minutes, in which it says nothing
        self._client = package.MlflowClient(where or None)
        called = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(called)
        number = self._client.create_experiment(called) if experiment is None else experiment.experiment_id
        named = self._client.search_runs([number], f"attributes.run_name = {run.called!r}", max_results=1000)
        # a run that the training made itself has no such tag; a run of another recording of this name has another
        known = [one for own in (run.recording, "") for one in named if one.data.tags.get("recording", "") == own]
        found = known[0] if known else self._client.create_run(number, run_name=run.called)
        self._id = found.info.run_id
        if not known:  # a training that still runs under this name ends by itself
            self.until_end.callback(self._client.set_terminated, self._id)
        self._waiting: list[Any] = []
        self.until_end.callback(self._flush, 1)
        for name, value in (("trace", run.trace), ("recording", run.recording)):
            self._client.set_tag(self._id, name, value)
        if run.tags:
            self._client.set_tag(self._id, "tags", ", ".join(map(str, run.tags)))
        settings = {_for_mlflow(name): str(value) for name, value in run.settings.items()}
        new = [package.entities.Param(*one) for one in settings.items() if one[0] not in found.data.params]
        for first in range(0, len(new), 100):  # at most so many at once
            self._client.log_batch(self._id, params=new[first : first + 100])

    def log(self, step: int, numbers: Numbers, when: float | None) -> None:
        """Log as many as MLflow takes at once."""
        milliseconds = int(1000 * (time.time() if when is None else when))
        for name, value in numbers.items():
            self._waiting.append(self.package.entities.Metric(_for_mlflow(name), value, milliseconds, step))
        self._flush(self._AT_ONCE)

    def _flush(self, least: int) -> None:
        while len(self._waiting) >= least:
            now, self._waiting = self._waiting[: self._AT_ONCE], self._waiting[self._AT_ONCE :]
            self._client.log_batch(self._id, metrics=now)

    def tell(self, verdict: str, findings: Sequence[Finding]) -> None:
        """Set the verdict as a tag, and log the findings as a file."""
        self._client.set_tag(self._id, "verdict", verdict)
        self._client.log_text(self._id, json.dumps([one.as_json() for one in findings], indent=1), "findings.json")

    def show(self, name: str, page: str) -> None:
        """Log the page as a file, which MLflow shows."""
        self._client.log_text(self._id, page, f"{name}.html")


def _for_mlflow(name: str) -> str:
    """A name in the characters that MLflow allows.

    Examples
    --------
    >>> _for_mlflow("weights_pair/lstm#1.0@probe:1[0, 2]")
    'weights_pair/lstm_1.0_probe:1-0-2'
    """
    return re.sub(r"[^/\w.\- :]", "_", name.replace("[", "-").replace(", ", "-").removesuffix("]"))


@final
class TrackioRun(Tracker):
    """The run of this name in a project of Trackio, or a new one."""

    module = "trackio"
    lacking = "Trackio keeps runs in projects, so name one: trackio:PROJECT"

    def __init__(self, package: Any, where: str, run: TrackedRun) -> None:
        super().__init__(package, where, run)
        config: dict[str, Any] = {name.lstrip("_"): value for name, value in run.settings.items()}  # _NAME is its own
        config |= {"tags": list(run.tags)} if run.tags else {}
        told = {"name": run.called, "config": config}
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        with redirect_stdout(sys.stderr):  # it tells what it does on stdout, where a command's JSON is
            self._run = package.init(where, resume="allow", **told, **quiet)
        self.until_end.enter_context(redirect_stdout(sys.stderr))
        self.until_end.callback(package.finish)

    def log(self, step: int, numbers: Numbers, when: float | None) -> None:
        """Log all in one call."""
        self._run.log(_with_histograms(numbers, self.package.Histogram), step=step)

    def tell(self, verdict: str, findings: Sequence[Finding]) -> None:
        """Log the verdict as a text, and each finding as an alert."""
        self._run.log({"verdict": self.package.Markdown(verdict)})
        levels = self.package.AlertLevel
        for one in findings:
            level = (levels.INFO, levels.WARN, levels.ERROR)[one.severity - 1]
            self._run.alert(one.title, f"{one.evidence}; {one.advice}", level=level, step=one.first)

    def show(self, name: str, page: str) -> None:
        """Log the page as media."""
        self._run.log({name: self.package.Html(page, inject=False)})


def _with_histograms(numbers: Numbers, histogram: Callable[..., Any]) -> dict[str, Any]:
    """The numbers, with each of `Bins` as a program's own histogram."""
    return {
        name: histogram(np_histogram=tuple(map(np.asarray, value))) if isinstance(value, Bins) else value
        for name, value in numbers.items()
    }


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardRun,
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "trackio": TrackioRun,
}
"""The trackers by their names in a target such as ``wandb:vision``."""


def tracker_of(target: str) -> Callable[[TrackedRun], Tracker]:
    """What begins a run in the tracker that a target names: ``wandb[:PROJECT]``, ``mlflow[:FOLDER]``, ….

    Raises
    ------
    UnknownNameError
        If there is no such tracker.
    MessageError
        If the tracker needs a project or folder.
    TracerError
        If the tracker is not installed.
    """
    name, _, where = target.partition(":")
    if name not in TRACKERS:
        raise UnknownNameError.of("tracker", name, TRACKERS)
    tracker = TRACKERS[name]
    if tracker.lacking and not where and not os.environ.get(tracker.unless):
        raise MessageError(tracker.lacking)
    if where and not re.fullmatch(tracker.form, where):
        raise MessageError(f"{target}: {name} takes no {where!r}; {tracker.usage}")
    return partial(tracker, needed(f"handing runs to {name}", name, name, tracker.module), where)


@contextmanager
def _begun(target: str, run: TrackedRun) -> Iterator[Tracker]:
    """A run in a tracker; what a tracker raises becomes a sentence."""
    try:
        with tracker_of(target)(run) as tracker:
            yield tracker
    except TracerError:
        raise
    except Exception as error:  # each tracker has errors of its own
        told = " ".join(str(error).split())
        raise TracerError(f"{target} did not take the run {run.called!r}: {type(error).__name__}: {told}") from error


def _runs(traces: Sequence[str]) -> Iterator[tuple[str, TrackedRun]]:
    """What trackers are told of the run of each trace."""
    for trace, name in run_names(traces).items():
        header = header_of(trace)
        tags = header.get("tags")
        tags = tags if isinstance(tags, list) else ()
        yield trace, TrackedRun(trace, name, settings_of(header), tags, str(header.get("run_id", "")))


def hand_over_numbers(answers: AnswerColumns, target: str, times: Mapping[str, Clock]) -> None:
    """Hand answers to a tracker: see `analyze.Results.to_tracker`."""
    tracker_of(target)  # also if there are no answers
    places: dict[tuple[str, int], list[int]] = {}
    for position, number in enumerate(answers.stream_ids):
        places.setdefault((answers.streams[number].trace, answers.streams[number].rank), []).append(position)
    runs = dict(_runs(list(dict.fromkeys(trace for trace, _ in places))))
    several_ranks = len({rank for _, rank in places}) > 1
    step_of = answers.counters["global_step"].__getitem__
    for (trace, rank), own in places.items():
        when = times.get(trace)
        with _begun(target, runs[trace]._replace(rank=rank if several_ranks else None)) as tracker:
            named = _Named(answers, tracker)
            for step, some in groupby(sorted(own, key=step_of), key=step_of):
                tracker.log(step, named.numbers(list(some)), None if when is None else when(step))


def hand_over_findings(
    target: str, trace: str, verdict: str, findings: Sequence[Finding], pages: Mapping[str, str]
) -> None:
    """Hand the verdict on a trace, its findings, and pages by their names to a tracker."""
    inside = "" if "://" in trace else os.path.relpath(trace)
    trace = trace if not inside or inside.startswith(os.pardir) else inside  # as a user types it
    ((_, run),) = _runs([trace])
    with _begun(target, run) as tracker:
        tracker.tell(verdict, findings)
        for name, page in pages.items():
            tracker.show(name, page)


def folder_of(trace: str) -> str:
    """The relative folder of a trace's run in TensorBoard.

    Examples
    --------
    >>> folder_of("runs/a.zarr"), folder_of("/data/../b.h5"), folder_of("../c.zarr"), folder_of("s3://bucket/d.zarr")
    ('runs/a', 'b', 'c', 'bucket/d')
    """
    _, _, path = trace.rpartition("://")
    parts = Path(os.path.normpath(path)).with_suffix("").parts if path else ()
    return os.path.join("", *(part for part in parts if part not in (os.sep, "..")))


@final
class _Named:
    """The numbers of a step by their names for a tracker: ``kind/module``, with the tag, the call and the index."""

    def __init__(self, answers: AnswerColumns, tracker: Tracker) -> None:
        self._answers = answers
        self._names = [_name(stream, tracker.root) for stream in answers.streams]
        # the kind of edges may end in a label: weights_histogram_edges_fine
        kinds = {one.kind for one in answers.streams if "_edges" in one.kind and tracker.histograms}
        self._edges_of = {kind.replace("_edges", "", 1): kind for kind in kinds}

    def numbers(self, places: Sequence[int]) -> dict[str, float | Bins]:
        """The numbers of the messages of a step, by their positions."""
        answers = self._answers
        by_key = {self._key(place): place for place in places} if self._edges_of else {}
        edges = {place: by_key[key] for place in places if (key := self._key(place, self._edges_of)) in by_key}
        found: dict[str, float | Bins] = {}
        for place in places:
            call = answers.counters["call"][place]
            name = self._names[answers.stream_ids[place]] + (f":{call}" if call else "")
            numbers = answers.numbers(place)
            if place in edges:
                limits = answers.numbers(edges[place])
                found |= {name: Bins(numbers, limits)} if np.isfinite(limits).all() else {}
            elif place not in edges.values():
                found |= zip(map(name.__add__, positions(answers.shapes[place])), numbers, strict=True)
        return found

    def _key(self, place: int, kind_of: Mapping[str, str] | None = None) -> tuple[str | None, ...] | None:
        """What tells a message from others of its step; with `kind_of`, what tells the edges that belong to it."""
        stream = self._answers.streams[self._answers.stream_ids[place]]
        kind = stream.kind if kind_of is None else kind_of.get(stream.kind)
        return kind, stream.module, stream.leaf, stream.tag, str(self._answers.counters["call"][place])


def _name(stream: AnswerStream, root: str) -> str:
    """The name of a series, such as ``weights_norm2/fc@probe``."""
    place = stream.place or (root if stream.module is not None else "")
    tag = "" if stream.tag == "default" else f"@{stream.tag}"
    return "/".join(filter(None, (stream.kind, place))) + tag
