"""Trackers, each with its own package and no network: what they are given is what their own readers find."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import analyze
import tracer
from tests import processes

ROOT = Path(__file__).parents[3]
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.filterwarnings("ignore")  # the trackers' own


def needs(package: str) -> Any:
    """Import a tracker, or skip the test."""
    return pytest.importorskip(package, reason=f"needs {package}: pip install 'tracereel[{package}]'")


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a name, tags and settings: weights of the root and of a layer, with a NaN and an infinity."""
    monkeypatch.chdir(tmp_path)
    config = {"lr": 0.1, "_target_": "nets.Small", "net": {"width": 3}}
    with tracer.TraceWriter("run.zarr", header={"name": "it's one", "tags": ["small"], "config": config}) as writer:
        for step in range(4):
            where = {"kind": "weights", "global_step": step, "train_step": step, "epoch": 0}
            writer.write(tracer.ModuleMessage(module="", data=torch.tensor([3.0, 4.0]) * step, **where))
            values = torch.tensor([1.0, {2: NAN, 3: -INF}.get(step, 2.0), 4.0 + step])
            writer.write(tracer.ModuleMessage(module="fc", data=values, **where))
            probed = where | {"tag": "probe", "kind": "activations"}
            writer.write(tracer.ModuleMessage(module="fc", data=torch.ones(2, 2), **probed))
    return tmp_path / "run.zarr"


def command(*words: str, **environment: str) -> str:
    """What ``trace WORDS`` prints."""
    done = processes.run(
        [sys.executable, str(ROOT / "cli.py"), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def norms(root: str = "") -> dict[tuple[str, int], float]:
    """The norms of the trace's weights, from the table of answers, by the names for a tracker."""
    rows = analyze.analyze("run.zarr", ["norm"])
    return {("/".join(filter(None, (row.kind, row.module or root))), row.global_step): row.value for row in rows}


def test_tensorboard(trace: Path) -> None:
    """Scalars, histograms, the settings and the findings are where TensorBoard's reader looks."""
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command("replay", "run.zarr", "-s", "norm", "-s", "histogram:bins=3", "--to", "tensorboard:events")
    command("check", "run.zarr", "--rule", "not_finite", "--to", "tensorboard:events")
    read = EventAccumulator("events/run", size_guidance={"histograms": 0}).Reload()  # 0: all
    tags = read.Tags()
    found = {(tag, one.step): one.value for tag in tags["scalars"] for one in read.Scalars(tag)}
    assert found == pytest.approx(norms(), nan_ok=True)
    counts = read.Histograms("weights_histogram/fc")[0].histogram_value
    assert (counts.num, counts.bucket_limit[-1], sum(counts.bucket)) == (3, 4.0, 3)
    texts = {tag.removesuffix("/text_summary"): read.Tensors(tag)[0] for tag in tags["tensors"]}
    assert b"|net.width|3|" in texts["settings"].tensor_proto.string_val[0]
    finding = texts["findings/not_finite"]
    assert (finding.step, b"not_finite in weight_updates of fc" in finding.tensor_proto.string_val[0]) == (1, True)


def records(path: Path) -> Iterator[Any]:
    """The records of wandb's offline file: messages of protobuf in the log format of LevelDB, after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:  # the rest of a block
            at += left
            continue
        _, size, part = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # it is whole, or its last part
            yield Record.FromString(whole)
            whole = b""


def test_wandb(trace: Path) -> None:
    """An offline run has the name, tags and settings, each number at its step, the findings and the page."""
    needs("wandb")
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(trace.parent), "WANDB_ERROR_REPORTING": "false"}
    command("replay", "run.zarr", "-s", "norm", "-s", "histogram:bins=3", "--to", "wandb:team/vision", **offline)
    (file,) = trace.parent.glob("wandb/offline-run-*/*.wandb")
    told = [*records(file)]
    (run,) = (one.run for one in told if one.HasField("run"))
    assert (run.project, run.entity, run.display_name, [*run.tags]) == ("vision", "team", "it's one", ["small"])
    config = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in run.config.update}
    assert config == config | {"lr": 0.1, "_target_": "nets.Small", "net.width": 3}
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
        for one in told
        if one.HasField("history")
    ]
    assert [row["global_step"] for row in rows] == [0, 1, 2, 3]
    found = {(name, row["global_step"]): float(value) for row in rows for name, value in row.items() if "norm2" in name}
    assert found == pytest.approx(norms(), nan_ok=True, rel=1e-15)
    counts = [rows[0][f"weights_histogram/fc.{part}"] for part in ("_type", "values", "bins")]
    assert (counts[0], sum(counts[1]), counts[2][-1]) == ("histogram", 3, 4.0)

    command("report", "run.zarr", "--to", "wandb:team/vision", **offline)
    (table,) = trace.parent.glob("wandb/offline-run-*/files/media/table/findings*")
    assert ["not_finite", "weight_updates of fc"] in [row[2:4] for row in json.loads(table.read_text())["data"]]
    (page,) = trace.parent.glob("wandb/offline-run-*/files/media/html/report*")
    assert page.read_text() == Path("run.html").read_text()


def test_mlflow(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a folder has the name, tags and settings, each number at its step, the findings and the page."""
    mlflow = needs("mlflow")
    command("replay", "run.zarr", "-s", "norm", "-s", "histogram:bins=3", "--to", "mlflow:runs")
    command("report", "run.zarr", "--to", "mlflow:runs")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient("runs")
    (run,) = client.search_runs(["0"])  # one, though two commands handed something over
    assert (run.info.run_name, run.info.status, run.data.tags["tags"]) == ("it's one", "FINISHED", "small")
    assert run.data.params == {"lr": "0.1", "_target_": "nets.Small", "net.width": "3"}
    names = sorted(run.data.metrics)
    found = {(name, one.step): one.value for name in names for one in client.get_metric_history(run.info.run_id, name)}
    assert {key: value for key, value in found.items() if "norm2" in key[0]} == pytest.approx(
        norms("root"), nan_ok=True, rel=1e-15
    )
    assert sum(found[f"weights_histogram/fc-{index}", 0] for index in range(3)) == 3
    folder = Path(run.info.artifact_uri)
    assert (folder / "report.html").read_text() == Path("run.html").read_text()
    rules = {(one["rule"], one["module"]) for one in json.loads((folder / "findings.json").read_text())}
    assert ("not_finite", "fc") in rules
    assert "not_finite in weight_updates of fc at step 1" in run.data.tags["verdict"]
    Path("other").mkdir()
    for path, header in (("other/run.zarr", {"name": "it's one"}), ("own.zarr", {})):
        with tracer.TraceWriter(path, header=header):
            pass
    client.set_tag(client.create_run("0", run_name="own").info.run_id, "tags", "of the training")
    for one in ("other/run.zarr", "own.zarr"):
        analyze.check(one).to_tracker("mlflow:runs")
    # another recording of the same name has a run of its own; the run that a training made itself goes on
    assert sorted(one.info.run_name for one in client.search_runs(["0"])) == ["it's one", "it's one", "own"]
    assert client.get_run(run.info.run_id).data.tags["trace"] == "run.zarr"


def test_trackio(trace: Path) -> None:
    """Its database has the name and settings, each number at its step, findings as alerts, and the page."""
    needs("trackio")
    local = {"TRACKIO_DIR": str(trace.parent / "trackio"), "HF_HUB_OFFLINE": "1"}
    printed = command("replay", "run.zarr", "-s", "norm", "--json", "--to", "trackio:vision", **local)
    assert {json.loads(line)["kind"] for line in printed.splitlines()} == {"weights_norm2"}
    command("report", "run.zarr", "--to", "trackio:vision", **local)
    with sqlite3.connect(trace.parent / "trackio" / "vision.db") as base:
        (config,) = (json.loads(text) for (text,) in base.execute("select config from configs"))
        assert config == config | {"lr": 0.1, "target_": "nets.Small", "net.width": 3, "tags": ["small"]}
        rows = [
            (name, step, json.loads(text))
            for name, step, text in base.execute("select run_name, step, metrics from metrics")
        ]
        alerts = {*base.execute("select title, level, step from alerts")}
    assert {name for name, _, _ in rows} == {"it's one"}
    found = {(name, step): float(value) for _, step, row in rows for name, value in row.items() if "norm2" in name}
    assert found == pytest.approx(norms(), nan_ok=True, rel=1e-15)
    assert ("not_finite in weight_updates of fc at step 1", "error", 1) in alerts
    (page,) = trace.parent.glob("trackio/media/vision/*/*/*.html")
    assert page.read_text() == Path("run.html").read_text()


def test_ranks_are_runs_of_their_own(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More numbers than MLflow takes at once arrive, in the order of steps."""
    mlflow = needs("mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "several")
    results = analyze.Results()
    for step in reversed(range(3)):
        for rank in range(2):
            where = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
            data = torch.arange(700.0) + 1000 * step + 0.5 * rank
            results.add(tracer.NetworkMessage(kind="many", data=data, **where), "run.zarr", "mine")
    results.to_tracker("mlflow:runs")
    client = mlflow.MlflowClient("runs")
    runs = client.search_runs([client.get_experiment_by_name("several").experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["it's one/rank0", "it's one/rank1"]
    for run in runs:
        rank = int(run.info.run_name[-1])
        history = client.get_metric_history(run.info.run_id, "many-699")
        assert [(one.step, one.value) for one in history] == [
            (step, 699 + 1000 * step + 0.5 * rank) for step in range(3)
        ]


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        ("wand:x", tracer.UnknownNameError, "did you mean 'wandb'"),
        ("tensorboard", tracer.MessageError, "name one: tensorboard:DIR"),
        ("trackio:", tracer.MessageError, "name one: trackio:PROJECT"),
        ("mlflow", tracer.MessageError, "mlflow:FOLDER, mlflow:URI or MLFLOW_TRACKING_URI"),
        ("tensorboard:s3://bucket/events", tracer.MessageError, "takes no 's3://bucket/events'.*a folder"),
        ("wandb:a/b/c", tracer.MessageError, "wandb:ENTITY/PROJECT"),
    ],
)
def test_targets_that_are_none(target: str, error: type[Exception], said: str) -> None:
    """A sentence says what is missing."""
    with pytest.raises(error, match=said):
        analyze.Results().to_tracker(target)
