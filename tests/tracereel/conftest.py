"""The trace that several files of these tests ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tracereel.command_line import write


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the small run."""
    return write(tmp_path_factory.mktemp("cli") / "run.zarr")


@pytest.fixture(scope="session", params=[".zarr", ".h5"])
def each_trace(request: pytest.FixtureRequest, trace: Path) -> Path:
    """A trace of the small run, in each format."""
    return trace if request.param == ".zarr" else write(trace.with_suffix(request.param))
