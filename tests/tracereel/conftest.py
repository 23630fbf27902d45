"""The trace that several files of these tests ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tracereel.command_line import write


@pytest.fixture(scope="module", params=[".zarr", ".h5"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the small run, in each format."""
    return write(tmp_path_factory.mktemp("cli") / f"run{request.param}")
