"""Completion in a shell: names of this project, and of the trace that stands on the line; never an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from analyze import registry
from tests.tracereel.command_line import damage
from tracer.messaging.messages import KINDS
from tracereel.main import main


def completed(line: str, begun: str = "") -> list[str]:
    """What a shell would offer behind a line."""
    shell = ShellComplete(main, {}, "trace", "_TRACE_COMPLETE")
    return [one.value for one in shell.get_completions(line.split(), begun)]


def test_names_of_this_project() -> None:
    """Commands, metrics, rules, profiles and kinds."""
    assert completed("", "sub") == ["subscribers"]
    assert completed("replay run.zarr -s", "sp") == ["spectral_norm"]
    assert completed("subscribers") == sorted(registry.subscribers())
    assert completed("check --rule") == completed("record --rule") == completed("rules") == sorted(registry.rules())
    assert completed("record --profile") == ["light", "standard", "full"]
    assert completed("record -k") == sorted(KINDS)


@pytest.mark.parametrize("before", [True, False])
def test_names_of_the_trace_on_the_line(each_trace: Path, before: bool) -> None:
    """Its layers, kinds and tags, with other options before it or behind."""
    for command in ("cat", "ls", "replay", "batch", "reenact"):
        line = f"{command} -k loss {each_trace}" if before and command != "reenact" else f"{command} {each_trace}"
        assert completed(f"{line} -m") == ["conv1", "fc.0"]
        assert completed(f"{line} -m", "fc") == ["fc.0"]
    assert completed(f"cat {each_trace} -k", "weight") == ["weight_updates", "weights"]
    assert completed(f"diff {each_trace} other.zarr --tag") == ["default", "probe"]
    assert completed(f"plot {each_trace} -m conv1 -m") == ["conv1", "fc.0"]


def test_nothing_is_offered_and_nothing_said_where_nothing_can_be_read(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No trace, one that is none, a damaged one, a URL."""
    (tmp_path / "text.zarr").write_text("text")
    (tmp_path / "empty.zarr").mkdir()
    torn = shutil.copytree(trace, tmp_path / "torn.zarr")
    damage(torn, b"conv1")
    for name in ("none.zarr", "text.zarr", "empty.zarr", "torn.zarr"):
        assert completed(f"cat {tmp_path / name} -m") in ([], ["conv1", "fc.0"])
    assert completed(f"cat {tmp_path / 'none.zarr'} -m") == completed("cat s3://bucket/run.zarr -m") == []
    assert completed(f"cat {tmp_path / 'none.zarr'} -k", "los") == ["loss", "loss_terms"]
    assert capfd.readouterr() == ("", "")
