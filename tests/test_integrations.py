"""The callbacks without their libraries: nothing is imported unasked, and what is missing is said in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_missing_library_is_one_sentence(library: str) -> None:
    """The module can be imported; a callback cannot be made."""
    program = (
        "import sys\n"
        f"sys.modules[{library!r}] = None\n"  # as if it were not installed
        "import tracer\n"
        f"from tracer.integrations.{library} import TraceCallback\n"
        "try:\n"
        "    TraceCallback('run.zarr')\n"
        "except tracer.TracerError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith(f"this callback needs {library}, which cannot be imported (")
    assert done.stdout.endswith(f"pip install 'tracereel[{library}]'\n")


def test_tracer_imports_no_library() -> None:
    """Neither `tracer` nor what records imports a training library."""
    program = (
        "import sys, tracer\n"
        "tracer.record, tracer.Exporter\n"
        "print(sorted({'accelerate', 'lightning', 'transformers', 'tracer.integrations'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
