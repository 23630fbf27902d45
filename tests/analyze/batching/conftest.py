"""The traces and the subscribers of several files of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analyze.batching.batches import TROUBLE, write


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with three traces."""
    folder = tmp_path / "runs"
    folder.mkdir()
    for seed, suffix in enumerate(("zarr", "h5", "zarr")):
        write(folder / f"run{seed}.{suffix}", seed=seed)
    return folder


@pytest.fixture
def trouble(tmp_path: Path) -> str:
    """A file with subscribers that misbehave."""
    file = tmp_path / "trouble.py"
    file.write_text(TROUBLE)
    return str(file)
