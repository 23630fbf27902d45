"""The run that most tests of the page read, and what is gathered of it: written once for all files."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyze.seeing.gathered import Gathered
from analyze.seeing.report import gather
from tests.analyze.seeing.runs import messages, write


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace in which the update of a layer is too large once. Nobody writes to it."""
    return write(tmp_path_factory.mktemp("spike") / "run.zarr", messages(spike=("fc1", 44)), seeds={"torch": 7})


@pytest.fixture(scope="session")
def gathered(run: Path) -> Gathered:
    """What a report shows of it. Nobody changes it."""
    return gather(run)
