"""The callbacks without their libraries: nothing is imported unasked, and what is missing is said in a sentence."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tracer.integrations.recording import Recording
from tracer.trace.reader import TraceReader

ROOT = Path(__file__).parents[2]


LIBRARIES = ("lightning", "transformers")


@pytest.fixture(scope="module")
def without_libraries() -> list[str]:
    """What a fresh program prints: which libraries it has after `tracer`, and what callbacks say if there are none."""
    program = (
        "import sys, tracer\n"
        "tracer.record, tracer.Exporter\n"
        "print(sorted({'accelerate', 'lightning', 'transformers', 'tracer.integrations'} & set(sys.modules)))\n"
        f"for library in {LIBRARIES}:\n"
        "    sys.modules[library] = None\n"  # as if it were not installed
    )
    for library in LIBRARIES:
        program += (
            f"from tracer.integrations.{library} import TraceCallback\n"
            "try:\n"
            "    TraceCallback('run.zarr')\n"
            "except tracer.TracerError as error:\n"
            "    print(error)\n"
        )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_is_one_sentence(library: str, without_libraries: list[str]) -> None:
    """The module can be imported; a callback cannot be made."""
    said = without_libraries[1 + LIBRARIES.index(library)]
    assert said.startswith(f"this callback needs {library}, which cannot be imported (")
    assert said.endswith(f"pip install 'tracereel[{library}]'")
    assert len(without_libraries) == 1 + len(LIBRARIES)


def test_tracer_imports_no_library(without_libraries: list[str]) -> None:
    """Neither `tracer` nor what records imports a training library."""
    assert without_libraries[0] == "[]"


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_what_records_do_not_record(tmp_path: Path, way: Callable[[Recording], Recording]) -> None:
    """A trainer may copy or pickle its callbacks at any time; the trace is that of the first."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = Recording(tmp_path / "run.zarr", {"loss": None})
    recording.begin(model, [optimizer], 0, 0)
    other = way(recording)
    assert not other.active
    del other
    gc.collect()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    recording.end()
    with TraceReader(tmp_path / "run.zarr") as reader:
        assert reader.status == "finished"
        assert len([*reader.messages("batch_finished")]) == 1
    assert not way(recording).active


def test_hyperparameters_that_come_too_late_are_told_of(tmp_path: Path) -> None:
    """The header has those from before the recording, below its own settings; one warning tells of the others."""
    model = torch.nn.Linear(4, 3)
    recording = Recording(tmp_path / "run.zarr", {"loss": None, "config": {"lr": 0.2}})
    recording.know_settings({"lr": 0.1, "width": 3})
    recording.begin(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 0, 0)
    with pytest.warns(RuntimeWarning, match="has begun, so its header has no hyperparameters") as told:
        for _ in range(2):
            recording.know_settings({"depth": 2})
    assert len(told) == 1
    recording.end()
    with TraceReader(tmp_path / "run.zarr") as reader:
        assert reader.header["config"] == {"lr": 0.2, "width": 3}
