"""The environment variables of launchers: what they change, and the sentences where they cannot be understood."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tracer
from tracer import CaptureError
from tracereel.main import main
from tracereel.recording import record


def train(path: Path, steps: int = 3, **settings: object) -> int:
    """Train and record; the step that the run says comes next."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(path, model, optimizer, **{"capture": tracer.Capture(), **settings}) as run:  # type: ignore[arg-type]
        run.probe("probe", torch.ones(2, 3))
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(5, 3)).sum().backward()
            optimizer.step()
            run.log("rate", 0.1)
        run.epoch_finished()
    return run.global_step


def test_trace_disable_turns_recording_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loop runs, counts its steps, and leaves nothing; `resume` counts on, so that checkpoints are right."""
    monkeypatch.setenv("TRACE_DISABLE", "1")
    assert train(tmp_path / "run.zarr") == 3
    assert train(tmp_path / "run.zarr", resume=True, first_step=40) == 43
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("TRACE_DISABLE", "0")
    assert train(tmp_path / "run.zarr") == 3
    assert tracer.open(tmp_path / "run.zarr").info["steps"] == [0, 2]
    monkeypatch.setenv("TRACE_DISABLE", "maybe")
    with pytest.raises(CaptureError, match="the environment variable TRACE_DISABLE is 'maybe'; 1 turns recording off"):
        train(tmp_path / "other.zarr")


def test_nothing_is_certified_when_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No training is run for it, and the certificate says why."""
    monkeypatch.setenv("TRACE_DISABLE", "yes")
    certificate = tracer.certify(lambda record: pytest.fail("it was run"))
    assert (certificate.verdict, "TRACE_DISABLE" in certificate.reason) == ("failed", True)


def test_trace_path_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's path takes the place of the script's; a certificate leaves it alone."""
    monkeypatch.setenv("TRACE_PATH", str(tmp_path / "job.h5"))
    train(tmp_path / "run.zarr")
    assert [one.name for one in tmp_path.iterdir()] == ["job.h5"]
    assert tracer.open(tmp_path / "job.h5").status == "finished"

    def training(record: object) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):  # type: ignore[operator]
            model(torch.ones(5, 3)).sum().backward()
            optimizer.step()

    before = (tmp_path / "job.h5").read_bytes()
    assert tracer.certify(training).identical
    assert (tmp_path / "job.h5").read_bytes() == before


def test_trace_max_bytes_bounds_what_the_script_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller bound holds; one that is none is told by the variable's name."""
    monkeypatch.setenv("TRACE_MAX_BYTES", "20MB")
    for given, expected in ((None, 20_000_000), ("1GB", 20_000_000), (5_000_000, 5_000_000)):
        train(tmp_path / "run.zarr", overwrite=True, max_bytes=given)
        assert tracer.open(tmp_path / "run.zarr").header["recording"]["max_bytes"] == expected
    monkeypatch.setenv("TRACE_MAX_BYTES", "plenty")
    with pytest.raises(CaptureError, match="variable TRACE_MAX_BYTES is no bound: 'plenty' is not a size"):
        train(tmp_path / "other.zarr")


# -- trace record -----------------------------------------------------------------------------------------------------


def options() -> list[click.Option]:
    """The options of ``trace record``."""
    return [one for one in record.params if isinstance(one, click.Option)]


def test_every_option_of_trace_record_has_a_variable() -> None:
    """Its name is that of the option, and the help text tells the rule."""
    for one in options():
        long = next(name for name in one.opts if name.startswith("--"))
        assert one.envvar == "TRACE_RECORD_" + long[2:].replace("-", "_").upper()
    names = [one.envvar for one in options()]
    assert len(set(names)) == len(names) > 25
    shown = CliRunner().invoke(main, ["record", "--help"]).output
    for word in ("TRACE_RECORD_EVERY=10", "TRACE_RECORD_KIND", "TRACE_DISABLE=1", "TRACE_REHEARSAL"):
        assert word in shown


def test_variables_are_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They choose what is recorded, several values are separated by spaces, and the command line wins."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nnet = torch.nn.Linear(3, 2)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(6):\n    net(torch.ones(4, 3)).sum().backward(); opt.step()\n"
    )
    for name, value in {
        "OUT": str(tmp_path / "there.zarr"),
        "KIND": "weights loss",
        "EVERY": "2",
        "MAX_BYTES": "30MB",
        "COMPRESSION": "weights=lz4 loss=zstd",
        "DURABLE": "1",
    }.items():
        monkeypatch.setenv(f"TRACE_RECORD_{name}", value)
    done = CliRunner().invoke(main, ["record", "--every", "3", str(script)])
    assert done.exit_code == 0, done.output
    with tracer.open(tmp_path / "there.zarr") as trace:
        assert {(one.kind, one.count) for one in trace.streams} == {("weights", 2), ("loss", 2)}
        recording = trace.header["recording"]
        assert (recording["durable"], recording["max_bytes"]) == (True, 30_000_000)

    monkeypatch.setenv("TRACE_DISABLE", "1")
    done = CliRunner().invoke(main, ["record", "--out", str(tmp_path / "never.zarr"), str(script)])
    assert (done.exit_code, (tmp_path / "never.zarr").exists()) == (0, False)
    assert "TRACE_DISABLE is set: the script runs without being recorded" in done.output


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("TRACE_RECORD_EVERY", "often", "'often' is not a valid integer"),
        ("TRACE_RECORD_EVERY", "0", "0 is not in the range"),
        ("TRACE_RECORD_MAX_BYTES", "much", "'much' is not a size such as"),
        ("TRACE_RECORD_ON_FULL", "explode", "'explode' is not one of 'wait', 'drop'"),
        ("TRACE_RECORD_DURABLE", "perhaps", "'perhaps' is not a valid boolean"),
        ("TRACE_RECORD_KIND", "wieghts", "did you mean 'weights'?"),
        ("TRACE_RECORD_DTYPE", "float17", "did you mean 'float16'"),
        ("TRACE_RECORD_COMPRESSION", "gzip", "auto, lz4, lz4hc, none, zstd"),
        ("TRACE_DISABLE", "sometimes", "1 turns recording off"),
    ],
)
def test_a_bad_value_is_told_by_its_variable(
    name: str, value: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong usage, before anything runs, with the variable's name, as it does not stand on the command line."""
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    done = CliRunner().invoke(main, ["record", "train.py"])
    assert done.exit_code == 2, done.output
    assert name in done.output
    assert sentence in done.output
    assert not (tmp_path / "train.zarr").exists()


def test_a_bad_option_is_told_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line says is not blamed on the environment."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.setenv("TRACE_RECORD_EVERY", "2")
    done = CliRunner().invoke(main, ["record", "--every", "x", str(tmp_path / "train.py")])
    assert done.exit_code == 2
    assert "TRACE_RECORD" not in done.output
    assert json.dumps("--every")[1:-1] in done.output
