"""Tables of answers: what is gathered, one by one or many at once, and that every format gives it back."""

from __future__ import annotations

import csv
import datetime as dt
import itertools
import json
import math
import os
import random
import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import analyze
import tracer
from analyze.tables.columns import COLUMNS, AnswerColumns, Row, as_json
from analyze.tables.results import Results
from analyze.tables.series import series_of, sparkline
from analyze.tables.writing import times_of
from tracer import (
    MessageBus,
    MessageError,
    ModuleMessage,
    NetworkMessage,
    TraceError,
    TraceExistsError,
    TraceNotFoundError,
    TracerError,
    TraceWriter,
    UnknownNameError,
)
from tracer.messaging.stacks import Heads, Source, Stack, Stretch

INF, NAN = float("inf"), float("nan")
FORMATS = (".csv", ".jsonl", ".parquet", ".zarr", ".h5")


def message(kind: str, data: Any, step: int = 0, module: str | None = "fc", **more: Any) -> tracer.Message:
    """An answer in some step."""
    data = data if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=torch.float64)
    fields: dict[str, Any] = {
        "kind": kind,
        "data": data,
        "global_step": step,
        "train_step": step % 4,
        "epoch": step // 4,
    }
    fields |= more
    return NetworkMessage(**fields) if module is None else ModuleMessage(module=module, **fields)


@pytest.fixture
def results() -> analyze.Results:
    """Answers of every shape: numbers, an array, a structured output's leaf, the network, awkward words and values."""
    filled = analyze.Results()
    for step, value in enumerate([0.1, NAN, INF, -INF, 5e-324, -0.0, 1 / 3, 1.7976931348623157e308]):
        filled.add(message("weights_norm2", value, step), "run.zarr", "norm")
    filled.add(message("weights_histogram", torch.tensor([[1, 2, 3], [4, 5, 2**53]]), 8), "run.zarr", "histogram")
    filled.add(message("activations_mean", 2.0, 9, "lstm", leaf="1.0", call=2, tag="probe"), "run.zarr", "mean")
    filled.add(message("train_accuracy", 0.5, 9, None), "run.zarr", "train_accuracy")
    filled.add(message('odd, "kind"\n', 1.5, 10, "a;b,ü"), "run.zarr", "mine")
    return filled


def same(one: Any, other: Any) -> bool:
    """The same tuple, comparing floats bit for bit (all NaN are the same)."""
    plain = [
        tuple(struct.pack("d", NAN if math.isnan(x) else x) if isinstance(x, float) else x for x in values)
        for values in (one, other)
    ]
    return plain[0] == plain[1]


# -- the table ----------------------------------------------------------------------------------------------


def test_rows(results: analyze.Results) -> None:
    """One row a number; positions in arrays as JSON; the network has no module, a leaf stands behind its module."""
    rows = list(results)
    assert len(rows) == len(results) == 8 + 6 + 3
    assert rows[0] == Row("run.zarr", "norm", "weights_norm2", "fc", "default", 0, 0, 0, 0, 0, "", 0.1)
    assert [row.index for row in rows[8:14]] == ["[0, 0]", "[0, 1]", "[0, 2]", "[1, 0]", "[1, 1]", "[1, 2]"]
    assert [json.loads(row.index) for row in rows[8:10]] == [[0, 0], [0, 1]]
    assert rows[13].value == 2.0**53
    leaf, network, odd = rows[14:]
    assert (leaf.module, leaf.tag, leaf.call) == ("lstm#1.0", "probe", 2)
    assert (network.module, network.epoch, network.train_step, network.global_step) == ("", 2, 1, 9)
    assert odd.kind == 'odd, "kind"\n'
    assert results.traces == ("run.zarr",)
    assert repr(results) == "Results(17 rows, 5 series)"
    assert rows[0].kind in str(results)


def test_columns_equal_rows(results: analyze.Results) -> None:
    """The table by columns and by rows is one table."""
    columns = results.columns()
    expected = "trace subscriber kind module tag rank epoch train_step global_step call index value"
    assert " ".join(columns) == " ".join(COLUMNS) == expected
    for row, other in zip(results, zip(*columns.values(), strict=True), strict=True):
        assert same(tuple(row), tuple(x.item() if isinstance(x, np.generic) else x for x in other))
    assert columns["value"].dtype == np.float64
    assert columns["epoch"].dtype == np.int64


def test_messages_come_back(results: analyze.Results) -> None:
    """What was added comes back as messages, with shape, dtype and every field."""
    again = analyze.Results()
    for one in results.messages():
        again.add(one, "run.zarr", "whoever")
    assert [row[2:-1] for row in again] == [row[2:-1] for row in results]
    counts = next(one for one in results.messages() if one.kind == "weights_histogram")
    assert counts.data is not None
    assert counts.data.dtype == torch.int64
    assert counts.data.tolist() == [[1, 2, 3], [4, 5, 2**53]]


def test_extend() -> None:
    """Results of several traces make one table; a trace cannot be made of it."""
    both = analyze.Results()
    for trace in ("a.zarr", "b.zarr"):
        one = analyze.Results()
        one.add(message("loss_value", 1.0, 3, None), trace, "loss")
        both.extend(one)
    assert [(row.trace, row.subscriber, row.global_step) for row in both] == [
        ("a.zarr", "loss", 3),
        ("b.zarr", "loss", 3),
    ]
    with pytest.raises(TraceError, match="these are of 2"):
        both.to_trace("unused.zarr")


def test_data_of_all_kinds() -> None:
    """float32, bfloat16, booleans, empty arrays and events have rows or none; complex numbers are refused."""
    results = analyze.Results()
    for data in (torch.tensor(0.1), torch.ones(2).bfloat16(), torch.tensor([True]), torch.zeros(0, 3)):
        results.add(message("x", data))
    results.add(NetworkMessage(kind="event", global_step=0, train_step=0, epoch=0))
    assert [row.value for row in results] == [float(np.float32(0.1)), 1.0, 1.0, 1.0]
    assert [one.data if one.data is None else tuple(one.data.shape) for one in results.messages()] == [
        (), (2,), (1,), (0, 3), None,
    ]  # fmt: skip
    with pytest.raises(MessageError, match="real numbers"):
        results.add(message("x", torch.tensor(1j)))


# -- asking a trace -----------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A small recording: weights of two modules and a loss, over six steps."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(6):
            writer.write(message("loss", torch.tensor(1 / (step + 1)), step, None))
            for module in ("a", "b"):
                writer.write(message("weights", torch.full((2, 2), float(step + 1)), step, module))
    return path


def test_analyze(trace: Path) -> None:
    """A trace is asked by instances and by words; the answers stand in the order of the recording."""
    results = analyze.analyze(trace, ["norm:order=inf", analyze.Loss()])
    assert [(row.subscriber, row.kind, row.module, row.global_step) for row in results][:4] == [
        ("loss", "loss_value", "", 0),
        ("norm", "weights_norminf", "a", 0),
        ("norm", "weights_norminf", "b", 0),
        ("loss", "loss_value", "", 1),
    ]
    assert {row.trace for row in results} == {str(trace)}
    assert len(results) == 18
    assert [row.value for row in results if row.module == "b"] == [1.0, 2, 3, 4, 5, 6]


def test_analyze_a_part(trace: Path) -> None:
    """Filters are those of a replay; a subscriber alone need not be in a list; a reader may be given."""
    some = analyze.analyze(trace, "norm", modules="a", steps=(1, 6, 2))
    assert [(row.module, row.global_step) for row in some] == [("a", 1), ("a", 3), ("a", 5)]
    with tracer.open(trace) as reader:
        again = analyze.analyze(reader, analyze.Norm(modules="a"), kinds="weights", tags="default", steps=(1, 6, 2))
    assert list(again) == list(some)


def test_analyze_asks_for_no_more_than_its_subscribers(trace: Path) -> None:
    """Gathering answers reads nothing; what nobody produces is not in the table."""
    sink = analyze.Results().sink([analyze.Norm()], "run")
    assert sink.passive
    assert not sink.wants("loss", None, None, None)
    assert sink.wants("weights_norm2", "a", "t", 1)
    assert tracer.plan(trace, analyze.Norm(), sink).messages == 12


def test_analyze_without_a_question(trace: Path) -> None:
    """Nothing asked, an unknown name, a missing stream: a sentence each."""
    with pytest.raises(MessageError, match="at least one subscriber"):
        analyze.analyze(trace, [])
    with pytest.raises(UnknownNameError, match="did you mean 'norm'"):
        analyze.analyze(trace, "nrom")
    with pytest.raises(TracerError, match="activations"):
        analyze.analyze(trace, "mean")


def test_live_equals_replay() -> None:
    """A sink on a bus of a live run gathers the same."""
    live, metric = analyze.Results(), analyze.Norm()
    bus = MessageBus()
    for receiver in (metric, live.sink([metric], "run")):
        bus.register(receiver)
    bus.publish(message("weights", [3.0, 4.0]))
    bus.finish()
    bus.close()
    assert [tuple(row) for row in live] == [("run", "norm", "weights_norm2", "fc", "default", 0, 0, 0, 0, 0, "", 5.0)]


def test_results_can_be_asked_again(trace: Path, tmp_path: Path) -> None:
    """Answers written as a trace are the streams of a later replay."""
    for suffix in (".zarr", ".h5"):
        path = tmp_path / f"norms{suffix}"
        analyze.analyze(trace, "norm").write(path)
        means = analyze.analyze(path, "message_mean:kind=weights_norm2")
        assert [(row.global_step, row.value) for row in means] == [(step, 2.0 * (step + 1)) for step in range(6)]
        with tracer.open(path) as reader:
            assert reader.info["header"]["subscribers"] == ["norm"]
            assert reader.info["header"]["results_of"] == str(trace)


# -- files --------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[tuple[Any, ...]]:
    """The rows of a CSV file, by Python's reader."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == COLUMNS
    return [(*row[:5], *map(int, row[5:10]), row[10], float(row[11])) for row in rows]


def read_jsonl(path: Path) -> list[tuple[Any, ...]]:
    """The rows of a file of JSON lines, by a strict reader."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line, parse_constant=refuse) for line in file]
    assert all(tuple(row) == COLUMNS for row in rows)
    return [(*list(row.values())[:-1], float(row["value"])) for row in rows]


def read_parquet(path: Path) -> list[tuple[Any, ...]]:
    """The rows of a Parquet file, by Arrow."""
    table = pyarrow.parquet.read_table(path)
    assert tuple(table.column_names) == COLUMNS
    assert [str(field.type) for field in table.schema] == ["string"] * 5 + ["int64"] * 5 + ["string", "double"]
    return [tuple(row.values()) for row in table.to_pylist()]


READERS: dict[str, Callable[[Path], list[tuple[Any, ...]]]] = {
    ".csv": read_csv,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}


@pytest.mark.parametrize("suffix", READERS)
def test_tables_read_back(results: analyze.Results, tmp_path: Path, suffix: str) -> None:
    """Every number, also NaN, infinities, -0.0 and the smallest denormal, and every word reads back the same."""
    path = tmp_path / f"table{suffix}"
    results.write(path)
    rows = READERS[suffix](path)
    assert len(rows) == len(results)
    assert all(same(tuple(row), other) for row, other in zip(results, rows, strict=True))
    assert os.listdir(tmp_path) == [path.name]


ODD_NAMES = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "'=1", "'", "＝1", "fc.0", "a=b", " =1", "")


def test_a_spreadsheet_computes_no_name(tmp_path: Path) -> None:
    """No text of a CSV file begins as a formula; without the first apostrophe it is what it was; numbers stay so."""
    results = analyze.Results()
    for name in ODD_NAMES:
        results.add(message("=kind", -1.5, 3, name, tag=name), f"{name}.zarr", f"{name}norm")
    results.write(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    for row, original in zip(rows, results, strict=True):
        assert not any(cell[:1] in ("=", "+", "@", "\t", "\r", "\n", "＝") for cell in row)
        assert not any(cell.startswith("-") for cell in row[:-1])
        assert row[5:] == ["0", "0", "3", "3", "0", "", "-1.5"]
        assert [cell.removeprefix("'") for cell in row[:5]] == list(original[:5])


@settings(max_examples=50)
@given(st.lists(st.floats(), max_size=20))
def test_floats_read_back(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    """Any float64 whatsoever survives CSV and JSON lines."""
    results = analyze.Results()
    results.add(message("x", torch.tensor(values, dtype=torch.float64)))
    folder = tmp_path_factory.mktemp("floats")
    for suffix in (".csv", ".jsonl"):
        results.write(folder / f"t{suffix}")
        rows = READERS[suffix](folder / f"t{suffix}")
        assert same([row[-1] for row in rows], values)


def test_empty_tables(tmp_path: Path) -> None:
    """No answers make an empty table of the right columns, in every format."""
    for suffix in FORMATS:
        analyze.Results().write(tmp_path / f"empty{suffix}")
    for suffix, read in READERS.items():
        assert read(tmp_path / f"empty{suffix}") == []
    assert list(analyze.Results().to_pandas().columns) == list(COLUMNS)
    assert analyze.Results().to_table().plain().split()[0] == "kind"
    assert len(analyze.Results().to_table().plain().splitlines()) == 1


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_traces_read_back(results: analyze.Results, tmp_path: Path, suffix: str) -> None:
    """A trace of answers holds them with shape, dtype, counters, leaf and call."""
    path = tmp_path / f"answers{suffix}"
    results.write(path)
    assert os.listdir(tmp_path) == [path.name]
    with tracer.open(path) as reader:
        read = list(reader.messages())
    for one, other in zip(read, results.messages(), strict=True):
        fields = ("kind", "key", "tag", "epoch", "train_step", "global_step", "call", "leaf")
        assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]
        assert one.data is not None
        assert other.data is not None
        assert one.data.dtype == other.data.dtype
        assert torch.equal(one.data.nan_to_num(nan=12.5), other.data.nan_to_num(nan=12.5))


def test_data_frame(results: analyze.Results) -> None:
    """A data frame has the columns and the rows."""
    frame = results.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert tuple(frame.columns) == COLUMNS
    assert all(
        same(tuple(row), other) for row, other in zip(results, frame.itertuples(index=False, name=None), strict=True)
    )


@pytest.mark.parametrize("suffix", FORMATS)
def test_nothing_is_overwritten_unasked(results: analyze.Results, tmp_path: Path, suffix: str) -> None:
    """What is there stays, until overwriting is asked for; then it is replaced as a whole; a folder always stays.

    The name may be the longest that there is: what is written beside a file has a name of its own.
    """
    path = tmp_path / ("x" * (255 - len(suffix)) + suffix)
    results.write(path)
    before = path.stat().st_mtime_ns
    with pytest.raises(TraceExistsError, match="already"):
        results.write(path)
    assert path.stat().st_mtime_ns == before
    fewer = analyze.Results()
    fewer.add(message("x", 1.0))
    fewer.write(path, overwrite=True)
    if suffix in READERS:
        assert len(READERS[suffix](path)) == 1
    else:
        with tracer.open(path) as reader:
            assert len(list(reader.messages())) == 1
    assert os.listdir(tmp_path) == [path.name]
    folder = tmp_path / f"out{suffix}"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years")
    with pytest.raises(TraceExistsError):
        results.write(folder, overwrite=True)
    assert (folder / "thesis.tex").read_text() == "years"
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, folder.name])


def test_a_failure_leaves_nothing(results: analyze.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing fails half-way, what was there before is still there, and no half of a file."""
    path = tmp_path / "out.csv"
    path.write_text("before")
    monkeypatch.setattr(analyze.Results, "__iter__", lambda _: iter([("fine",), object()]))
    with pytest.raises(TypeError):
        results.write(path, overwrite=True)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.csv"]


def test_wrong_paths_get_a_sentence(results: analyze.Results, tmp_path: Path) -> None:
    """An unknown suffix and a missing folder are named."""
    with pytest.raises(UnknownNameError, match=r"format of results '.xlsx'.*known: .csv"):
        results.write(tmp_path / "out.xlsx")
    with pytest.raises(TraceNotFoundError, match="no folder"):
        results.write(tmp_path / "nowhere" / "out.csv")


@pytest.mark.parametrize(
    ("package", "write"),
    [
        ("pyarrow", lambda results, path: results.to_parquet(path)),
        ("pandas", lambda results, path: results.to_pandas()),
        ("torch.utils.tensorboard", lambda results, path: results.to_tensorboard(path)),
    ],
)
def test_missing_packages_get_a_sentence(
    results: analyze.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, write: Any
) -> None:
    """Without an optional package the sentence says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TracerError, match=r"not installed: pip install 'tracereel\["):
        write(results, tmp_path / "out")


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What TensorBoard's writer is called with."""
    calls: list[tuple[Any, ...]] = []

    class SummaryWriter:
        """Stands in for TensorBoard's, which is an optional package."""

        def __init__(self, logdir: str) -> None:
            calls.append(("open", logdir))

        def __enter__(self) -> SummaryWriter:
            return self

        def __exit__(self, *_: object) -> None:
            calls.append(("close",))

        def add_scalar(self, name: str, value: float, step: int, walltime: float | None) -> None:
            calls.append((name, value, step) if walltime is None else (name, value, step, walltime))

        def add_histogram_raw(self, name: str, **fields: Any) -> None:
            calls.append((name, fields["num"], fields["bucket_limits"], fields["bucket_counts"], fields["global_step"]))

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    return calls


def test_tensorboard(tensorboard: list[tuple[Any, ...]], tmp_path: Path) -> None:
    """Numbers become scalars, counts with edges become histograms, at their global steps."""
    answers = analyze.Results()
    answers.add(message("loss_value", 0.5, 3, None))
    answers.add(message("activations_mean", 2.0, 4, "lstm", leaf="1", call=1, tag="probe"))
    answers.add(message("pair", [1.0, 2.0], 5))
    for histogram in (analyze.Histogram(bins=2), analyze.Histogram(bins=2).labelled("fine")):
        for one in histogram.compute(message("weights", [0.0, 1.0, 4.0], 6)):
            answers.add(one)
    answers.to_tensorboard(tmp_path)
    assert tensorboard == [
        ("open", str(tmp_path)),
        ("loss_value", 0.5, 3),
        ("activations_mean/lstm#1@probe:1", 2.0, 4),
        ("pair/fc[0]", 1.0, 5),
        ("pair/fc[1]", 2.0, 5),
        ("weights_histogram/fc", 3, [2.0, 4.0], [2, 1], 6),
        ("weights_histogram_fine/fc", 3, [2.0, 4.0], [2, 1], 6),
        ("close",),
    ]


def test_tensorboard_keeps_ranks_apart(tensorboard: list[tuple[Any, ...]], tmp_path: Path) -> None:
    """Each rank has curves of its own, and its counts have its own edges."""
    answers = analyze.Results()
    told = [
        [*analyze.Histogram(bins=2).compute(message("weights", [0.0, 1.0, 4.0 + 4 * rank], 6, rank=rank))]
        for rank in range(2)
    ]
    for rank in range(2):
        answers.add(message("loss_value", 10.0 * rank, 3, None, rank=rank))
    for ones in zip(*told, strict=True):
        for one in ones:
            answers.add(one)
    answers.to_tensorboard(tmp_path)
    assert tensorboard == [
        ("open", str(tmp_path / "rank0")),
        ("loss_value", 0.0, 3),
        ("weights_histogram/fc", 3, [2.0, 4.0], [2, 1], 6),
        ("close",),
        ("open", str(tmp_path / "rank1")),
        ("loss_value", 10.0, 3),
        ("weights_histogram/fc", 3, [4.0, 8.0], [2, 1], 6),
        ("close",),
    ]


def test_tensorboard_has_a_run_for_each_trace(tensorboard: list[tuple[Any, ...]], tmp_path: Path) -> None:
    """Its folder has the trace's path, and its steps lie between the beginning and the end of the run."""
    answers = analyze.Results()
    for name in ("a", "b"):
        with tracer.TraceWriter(
            tmp_path / name / "run.zarr", header={"created": "2026-01-02T03:00:00+00:00"}
        ) as writer:
            for step in range(4):
                writer.write(message("loss", float(step), step, None))
                answers.add(message("loss_value", float(step), step, None), f"{name}/run.zarr", "loss")
    with tracer.open(tmp_path / "a" / "run.zarr") as reader:
        times = times_of(reader)
        ended = dt.datetime.fromisoformat(reader.info["ended"]).timestamp()
    assert times is not None
    began = dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC).timestamp()
    quarter = (ended - began) / 4
    answers.to_tensorboard(tmp_path / "events", times={"a/run.zarr": times})
    of_a = [("loss_value", float(step), step, pytest.approx(began + (step + 1) * quarter)) for step in range(4)]
    assert tensorboard == [
        ("open", str(tmp_path / "events" / "a" / "run")), *of_a, ("close",),
        ("open", str(tmp_path / "events" / "b" / "run")), *(("loss_value", float(step), step) for step in range(4)),
        ("close",),
    ]  # fmt: skip


def test_the_steps_of_a_run_that_is_being_recorded_end_now(tmp_path: Path) -> None:
    """They are spread evenly until now; of a run whose beginning is unknown, nothing is."""
    began = dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC)
    for name, header in (("run", {"created": began.isoformat()}), ("unknown", {"created": "then"})):
        with tracer.TraceWriter(tmp_path / f"{name}.zarr", header=header) as writer:
            for step in range(2):
                writer.write(message("loss", 1.0, step, None))
            writer.commit()
            with tracer.open(tmp_path / f"{name}.zarr") as reader:
                times = times_of(reader)
                assert (times is None) == (name == "unknown")
                if times is not None:
                    now = dt.datetime.now(dt.UTC)
                    assert times(1) == pytest.approx(now.timestamp(), abs=60)
                    assert times(0) == pytest.approx((began.timestamp() + now.timestamp()) / 2, abs=60)


# -- for people ---------------------------------------------------------------------------------------------


def printed(results: analyze.Results, width: int = 200, **more: Any) -> list[str]:
    """The lines of the table on a terminal of so many columns."""
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - a sink for the terminal
    with console.file:
        console.print(results.to_table(**more))
        return console.export_text().splitlines()


def test_short_tables_show_every_row() -> None:
    """Few rows are shown as they are, without columns that say nothing; several traces are told apart."""
    results = analyze.Results()
    for step in range(3):
        results.add(message("weights_norm2", 1 / (step + 3), step, "[bold]odd[/bold]"), "run.zarr", "norm")
    header, _, *rows = printed(results)
    assert header.split() == ["kind", "module", "epoch", "step", "value"]
    assert [line.split() for line in rows] == [
        ["weights_norm2", "[bold]odd[/bold]", "0", str(step), f"{1 / (step + 3):.4g}"] for step in range(3)
    ]
    results.add(message("weights_norm2", [1.0, 2.0], 3, "a"), "b.zarr", "norm")
    for lines in (printed(results), printed(results, rows=1)):
        assert [sum(f"weights_norm2 of {name}.zarr" in line for line in lines) > 0 for name in ("run", "b")] == [
            True
        ] * 2
    assert printed(results)[0].split() == ["kind", "module", "epoch", "step", "index", "value"]


def test_long_tables_are_summed_up(results: analyze.Results) -> None:
    """Many rows become a line for each series: how many, first, last, least, greatest, and the course."""
    for step in range(100):
        results.add(message("weights_norm2", float(step), step, "conv"), "run.zarr", "norm")
    lines = printed(results)
    columns = ["kind", "module", "n", "first", "last", "min", "at", "max", "at", "trend"]
    assert lines[0].split("  not finite")[0].split() == columns
    (conv,) = [line.split()[1:] for line in lines if " conv " in line]
    assert conv == ["conv", "100", "0", "99", "0", "@0", "99", "@99", "▁▁▂▃▃▄▅▆▇▇██"]
    assert len(results.summary()) == 6


def deep_and_strange() -> analyze.Results:
    """A spike of one step in a layer with a long path, a constant, numbers of all sizes, and what is not finite."""
    results = analyze.Results()
    for step in range(400):
        spiked = 1.0 + step % 7 / 1000 + (50.0 if step == 217 else 0.0)
        results.add(message("weights_norm2", spiked, step, "features.denseblock3.denselayer16.conv2"), "a.zarr", "norm")
        results.add(message("weights_norm2", -1234567.8 * (step + 1) * 1e-200, step, "b"), "a.zarr", "norm")
        results.add(message("weights_norm2", 1.0, step, "constant", tag="probe"), "a.zarr", "norm")
        results.add(
            message("a_kind_of_which_the_name_is_rather_long_and_goes_on_for_a_while", 1.0, step, None), "a.zarr"
        )
        strange = INF if step >= 123 and step % 3 == 0 else NAN if step >= 350 else -1e-9 * step
        results.add(message("weight_gradients_mean", strange, step, "head"), "a.zarr", "mean")
    return results


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_tables_fit_the_terminal(width: int) -> None:
    """No line is wider, no word or heading is broken, and no row takes more than four lines."""
    lines = printed(deep_and_strange(), width)
    assert max(map(len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    assert {"module", "first", "last", "min", "max", "at", "trend"} <= set(words)
    assert "weight_gradients_mean" in lines
    assert any(line.startswith("a_kind_of_which_the_name_is_") for line in lines)
    starts = [at for at, line in enumerate(lines) if line[:3].rstrip() and line[:2] == "  "]
    rows = {lines[at].split()[0]: lines[at : at + 4] for at in starts[1:]}
    assert max(after - at for at, after in itertools.pairwise(starts[1:])) <= 5  # with the heading of the next kind
    (deep,) = [" ".join(row[: 1 if width > 80 else 3]).split() for name, row in rows.items() if name.endswith("conv2")]
    assert ("…" in deep[0]) is (width == 120)
    assert {"1", "51", "@0", "@217", "▁▁▁▁▁▁█▁▁▁▁▁"} <= set(deep)
    told = " ".join(" ".join(rows["head"]).split())
    steps = range(123, 400)
    infinite = sum(step % 3 == 0 for step in steps)
    nans = sum(step >= 350 and step % 3 != 0 for step in steps)
    for fact in (f"{nans} NaN, {infinite} inf from @123", "-3.49e-7", "@349"):
        assert fact in told


def test_series_say_where_they_are_extreme() -> None:
    """The steps of the least and greatest number are the first ones; what is not finite is counted, in arrays too."""
    results = analyze.Results()
    for step, values in enumerate([[2.0, 1.0], [5.0, 1.0], [NAN, 5.0], [INF, -INF]]):
        results.add(message("x", values, step, "a"))
    (one,) = results.summary()
    assert (one.min, one.min_step, one.max, one.max_step) == (1.0, 0, 5.0, 1)
    assert (one.nans, one.infs, one.first_strange) == (1, 2, 2)


def test_summary_of_strange_values(results: analyze.Results) -> None:
    """Minimum and maximum are of the finite values; first and last as they are; arrays by their means."""
    by_kind = {one.kind: one for one in results.summary()}
    norm = by_kind["weights_norm2"]
    assert (norm.n, norm.first, norm.min, norm.max) == (8, 0.1, -0.0, 1.7976931348623157e308)
    assert by_kind["weights_histogram"].n == 1
    assert by_kind["weights_histogram"].max == 2.0**53
    nothing = analyze.Results()
    nothing.add(message("x", [NAN, INF]))
    (one,) = nothing.summary()
    assert math.isnan(one.first)
    assert math.isnan(one.min)
    assert one.trend == " "
    assert as_json(one)["min"] == "NaN"


def test_sparkline() -> None:
    """Gaps for what is not finite, one height for what is constant, and no overflow."""
    assert sparkline([]) == ""
    assert sparkline([NAN]) == " "
    assert sparkline([2, 2, INF, 2]) == "▄▄ ▄"
    # of 0.1 the mean of three is another number than that of ten
    assert sparkline([0.1] * 100) == "▄" * 12
    assert sparkline([0.1 + 0.2, 0.3] * 50) == "▄" * 12
    assert sparkline([1.0] * 700 + [-1.0] + [1.0] * 299) == "████████▁███"
    assert sparkline([-1.7e308, 1.7e308]) == "▁█"
    assert len(sparkline(range(1000))) == 12
    assert sparkline(range(1000))[0] == "▁"
    assert sparkline(range(1000))[-1] == "█"


def test_ten_thousand_rows(tmp_path: Path) -> None:
    """A table of many rows is kept by columns and written in little time; its rows are those that were added."""
    values = random.Random(0)
    results = analyze.Results()
    for step in range(2_500):
        results.add(message("weights_norm2", values.random(), step, f"layer{step % 7}"), "run.zarr", "norm")
    results.add(message("weights_histogram", torch.arange(7_500), 0), "run.zarr", "histogram")
    results.write(tmp_path / "t.csv")
    rows = read_csv(tmp_path / "t.csv")
    assert len(rows) == len(results) == 10_000
    assert rows[-1][-2:] == ("[7499]", 7499.0)
    kept = results._gathered()
    assert sum(len(array) for array in (kept.values, kept.counters["call"])) < 13_000


SOURCES = [Source(None, "default", "", 0), Source("a", "eval", "", 0), Source("a", "default", "1.0", 1)]
WHO = {"one": "norm", "two": "counts", "event": "log"}
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (2, 2), (0,)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def stretch_of(seed: int, count: int) -> Stretch:
    """Answers of several kinds, shapes and dtypes, of which some answer the same message."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    stacks = []
    for kind in random.Random(seed).choices(("one", "two", "event"), k=count):
        rows = int(rng.integers(1, 9))
        places = np.sort(rng.choice(20, rows, replace=False))
        heads = Heads(SOURCES, rng.integers(0, 3, rows), rng.integers(0, 50, (rows, 4)), places)
        shape, dtype = SHAPES[rng.integers(len(SHAPES))], DTYPES[rng.integers(len(DTYPES))]
        data = None if kind == "event" else (torch.randn(rows, *shape, generator=generator) * 3).to(dtype)
        if kind == "event":  # only the network has events
            heads = Heads(SOURCES, np.zeros(rows, np.int64), heads.counters, places)
        stacks.append(Stack(kind, heads, data))
    return Stretch(stacks)


def held(columns: AnswerColumns) -> tuple[Any, ...]:
    """All that is kept."""
    arrays = (columns.stream_ids, *columns.counters.values(), columns.starts, columns.values)
    return (columns.streams, columns.shapes, [one.tobytes() for one in arrays])


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 6)), min_size=1, max_size=3))
def test_many_are_appended_as_one_by_one(made: list[tuple[int, int]]) -> None:
    """Series in the order of their first answers, numbers in the order of the answers, whatever the shapes."""
    many, alone = AnswerColumns(), AnswerColumns()
    for seed, count in made:
        stretch = stretch_of(seed, count)
        many.add_many(stretch, "run", WHO)
        for message in stretch:
            alone.add(message, "run", WHO[message.kind])
    assert held(many) == held(alone)


def test_complex_answers_are_refused_before_anything_is_kept() -> None:
    """The sentence names the answer, and the results are what they were."""
    results = Results()
    heads = Heads(SOURCES, np.array([1, 2]), np.zeros((2, 4), np.int64), np.arange(2))
    good, wrong = Stack("one", heads, torch.ones(2)), Stack("two", heads, torch.ones(2, dtype=torch.complex64))
    results.add_many(Stretch([good]), "run", WHO)
    with pytest.raises(MessageError, match=r"results hold real numbers, but two of 'a' is torch\.complex64"):
        results.add_many(Stretch([good, wrong]), "run", WHO)
    assert [(row.kind, row.subscriber, row.value) for row in results] == [("one", "norm", 1.0)] * 2


def test_a_series_of_single_numbers_is_summed_up_as_one_of_arrays() -> None:
    """A series at a glance says the same of numbers whether each is a scalar or an array of one."""
    numbers = torch.tensor([3.0, float("nan"), -1.0, float("inf"), 2.5, -1.0])
    counters = np.arange(6)[:, None] * np.array([[1, 1, 0, 0]])
    found = []
    for data in (numbers, numbers[:, None].expand(6, 2)):
        columns = AnswerColumns()
        columns.add_many(
            Stretch([Stack("one", Heads(SOURCES, np.ones(6, np.int64), counters, np.arange(6)), data)]), "", WHO
        )
        found.append(series_of(columns)[0])
    scalars, pairs = found
    assert (scalars.n, scalars.first, scalars.last, scalars.min, scalars.max) == (6, 3.0, -1.0, -1.0, 3.0)
    assert (scalars.min_step, scalars.max_step, scalars.nans, scalars.infs, scalars.first_strange) == (2, 0, 1, 1, 1)
    assert (pairs.n, pairs.min_step, pairs.max_step, pairs.nans, pairs.infs) == (6, 2, 0, 2, 2)
    assert (pairs.first, pairs.last, pairs.min, pairs.max, pairs.first_strange) == (3.0, -1.0, -1.0, 3.0, 1)
