"""Runs beside each other: names, settings that differ, losses, accuracies, verdicts."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import analyze
import tracer
from analyze.tables.settings import arguments_of, settings_of
from tracer.errors import CaptureError, UnknownNameError
from tracereel.main import main


def train(path: Path, lr: float, evaluated: bool = True, **options: Any) -> list[float]:
    """Train a small classifier, record it with `config`, and return the accuracies of its evaluations."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(60, 8), torch.arange(60) % 3
    inputs[:, 0] += labels
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=lr), nn.CrossEntropyLoss()
    found = []
    with tracer.record(path, model, optimizer, loss=loss, **options):
        for _ in range(3):
            for batch, expected in zip(inputs[:40].split(10), labels[:40].split(10), strict=True):
                optimizer.zero_grad()
                loss(model(batch), expected).backward()
                optimizer.step()
            if evaluated:
                model.eval()
                with torch.no_grad():
                    scores = model(inputs[40:])
                    loss(scores, labels[40:])
                found.append(float((scores.argmax(1) == labels[40:]).double().mean()))
                model.train()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs that differ in the learning rate, and a file that is no trace."""
    folder = tmp_path_factory.mktemp("sweep")
    for number, lr in enumerate((0.01, 0.3, 1e6)):
        train(folder / f"{number}.zarr", lr, name=f"lr {lr}", tags="sweep", config={"lr": lr, "net": {"width": 16}})
    (folder / "broken.zarr").mkdir()
    return folder


def test_runs_differ_in_a_setting_and_say_what_came_of_it(folder: Path, tmp_path: Path) -> None:
    """Losses and accuracies are those of the trainings; of what all have in common there is no column."""
    found = analyze.runs([folder / f"{number}.zarr" for number in range(3)])
    accuracies = train(tmp_path / "again.zarr", 0.3)
    losses = [
        float(message.data)
        for message in tracer.open(tmp_path / "again.zarr").messages(kinds="loss", tags="default")
        if message.data is not None
    ]
    assert found[1].accuracy == pytest.approx(max(accuracies))
    assert (found[1].loss, found[1].best_loss) == (losses[-1], min(losses))
    assert found[1].best_loss_step == losses.index(min(losses))
    assert found[1].tags == ("sweep",)
    assert found[1].settings == {"lr": 0.3, "net.width": 16} | found[1].settings
    rows = found.rows()
    assert [row["run"] for row in rows] == ["lr 0.01", "lr 0.3", "lr 1000000.0"]
    assert [row["lr"] for row in rows] == [0.01, 0.3, 1e6]
    assert "net.width" not in rows[0]
    assert rows[2]["verdict"].startswith(("not_finite", "loss_spike", "exploding", "norm_drift"))
    assert next(row["run"] for row in found.sorted("accuracy", descending=True).rows()) == "lr 0.3"
    with pytest.raises(UnknownNameError, match="no column 'accurcy'"):
        found.sorted("accurcy")
    frame = found.to_pandas()
    assert list(frame["lr"]) == [0.01, 0.3, 1e6]
    assert "lr 0.3" in found._repr_html_()


def test_the_command_lists_a_folder(folder: Path) -> None:
    """The best run is the first line; a trace that cannot be read has a line, and the exit code says so."""
    told = CliRunner().invoke(main, ["info", str(folder), "--sort=-accuracy"])
    assert told.exit_code == 4
    lines = told.stdout.splitlines()
    assert lines[0].split()[:2] == ["run", "lr"]
    assert "lr 0.3" in lines[1]
    assert any("unreadable" in line for line in lines)
    told = CliRunner().invoke(main, ["info", str(folder / "0.zarr"), str(folder / "1.zarr"), "--quick", "--json"])
    first, second = json.loads(told.stdout)
    assert (first["run"]["name"], second["run"]["settings"]["lr"]) == ("lr 0.01", 0.3)
    assert first["run"]["loss"] is None
    assert first["status"] == "finished"
    told = CliRunner().invoke(main, ["info", str(folder / "0.zarr")])
    assert "lr 0.01" in told.stdout
    assert "lr 0.01, net" in told.stdout


def test_tables_of_answers_have_the_settings_that_differ(folder: Path) -> None:
    """As columns of a data frame and of a batch's Parquet file; a single run has no such columns."""
    traces = [str(folder / "0.zarr"), str(folder / "1.zarr")]
    results = analyze.analyze(traces[0], "total_norm")
    assert "run" not in results.to_pandas()
    results.extend(analyze.analyze(traces[1], "total_norm"))
    frame = results.to_pandas()
    assert set(zip(frame["trace"], frame["run"], frame["lr"], strict=True)) == {
        (traces[0], "lr 0.01", 0.01),
        (traces[1], "lr 0.3", 0.3),
    }
    table = folder / "answers.parquet"
    analyze.batch(traces, "total_norm", folder / "answers", table=table, workers=1)
    read = pd.read_parquet(table)
    assert sorted(set(zip(read["run"], read["lr"], strict=True))) == [("lr 0.01", 0.01), ("lr 0.3", 0.3)]


def test_commands_take_or_refuse_several(folder: Path) -> None:
    """`trace plot` draws runs beside each other; `trace replay` names what takes a folder."""
    traces = [str(folder / "0.zarr"), str(folder / "1.zarr")]
    out = folder / "norms.svg"
    told = CliRunner().invoke(main, ["plot", *traces, "-s", "total_norm", "--out", str(out)])
    assert told.exit_code == 0, told.output
    told = CliRunner().invoke(main, ["replay", str(folder), "-s", "total_norm"])
    assert told.exit_code == 2
    assert "is a folder" in told.stderr
    assert "trace info" in told.stderr


def test_a_report_of_several_runs_lists_them(folder: Path) -> None:
    """The run whose loss explodes does not flatten the others, and the page says that it goes on."""
    out = folder / "page.html"
    analyze.report(folder / "1.zarr", out, against=[folder / "2.zarr", folder / "0.zarr"])
    page = out.read_text()
    assert "<td>lr 0.01</td>" in page
    assert "loss of lr 0.01" in page
    assert "The axis leaves out high losses" in page


@dataclasses.dataclass
class Settings:
    """Settings of a program."""

    lr: float = 0.1
    path: Path = Path("data")


class Interpolated(dict[str, Any]):
    """As OmegaConf: a mapping whose values may not resolve."""

    def __getitem__(self, key: str) -> Any:
        if key == "missing":
            raise ValueError("Missing mandatory value: missing")
        return super().__getitem__(key)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"a": {"b": [1, (2.5, None)]}, 3: torch.float32}, {"a": {"b": [1, [2.5, None]]}, "3": "torch.float32"}),
        (argparse.Namespace(lr=0.1, api_key="abc"), {"lr": 0.1, "api_key": "***"}),
        (SimpleNamespace(nested=Settings()), {"nested": {"lr": 0.1, "path": "data"}}),
        (Settings(), {"lr": 0.1, "path": "data"}),
        (Interpolated(x=1, missing=2), {"x": 1, "missing": "ValueError: Missing mandatory value: missing"}),
        ({"rate": torch.tensor(0.5), "net": nn.Linear(2, 1)}, {"rate": 0.5, "net": str(nn.Linear(2, 1))}),
    ],
    ids=["mapping", "namespace", "nested", "dataclass", "unresolved", "objects"],
)
def test_settings_of_all_forms_are_in_the_header(given: Any, kept: dict[str, Any], tmp_path: Path) -> None:
    """As JSON, and without secrets."""
    train(tmp_path / "run.zarr", 0.1, evaluated=False, config=given)
    assert tracer.open(tmp_path / "run.zarr").header["config"] == kept


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("config", 3, "config is a mapping, an argparse.Namespace, a dataclass or OmegaConf's DictConfig, not 3"),
        ("name", "two\nlines", "name is text on one line"),
        ("tags", ["a", ""], "tags is text on one line"),
    ],
)
def test_wrong_names_and_settings_are_refused(option: str, value: Any, sentence: str, tmp_path: Path) -> None:
    """Before anything is recorded."""
    with pytest.raises(CaptureError, match=sentence):
        train(tmp_path / "run.zarr", 0.1, **{option: value})
    assert not (tmp_path / "run.zarr").exists()


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["t.py"], {}),
        (["t.py", "--lr", "-0.5", "--name=a=b", "-j4"], {"lr": -0.5, "name": "a=b", "j4": True}),
        (["t.py", "train", "--", "x=1e-3", "+y=null", "../data"], {
            "argument 1": "train", "x": 1e-3, "y": None, "argument 2": "../data",
        }),
        (["t.py", "--api-key", "abc"], {"api-key": "***"}),
    ],
)  # fmt: skip
def test_arguments_of_a_script_are_fields(words: list[str], fields: dict[str, Any]) -> None:
    """Of a trace that has no `config`; secrets are masked."""
    assert settings_of({"argv": words}) == fields
    assert set(arguments_of(words)) == set(fields)


def test_what_the_program_says_wins_over_the_command_line() -> None:
    """One setting under two spellings is one column."""
    found = settings_of({"config": {"batch_size": 64}, "argv": ["t.py", "--batch-size", "32", "--fast"]})
    assert found == {"batch_size": 64, "fast": True}
