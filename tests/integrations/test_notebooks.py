"""The notebooks of docs/ in a real kernel, and what becomes of a recording whose kernel is interrupted or restarted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tracer

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
manager = pytest.importorskip("jupyter_client.manager")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.ipynb"))
SEEN = {
    "first_hour": ["text/html"] * 7 + ["text/html", "image/png", "text/html", "image/png"],
    "similarity_over_time": ["text/html", "text/html", "image/png", "text/html", "image/png"],
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_tables_pages_and_figures(path: Path, tmp_path: Path) -> None:
    """In order; each figure is there without ``%matplotlib inline``."""
    pytest.importorskip("sklearn")
    book = nbformat.read(path, 4)
    assert not any(cell.get("outputs") for cell in book.cells), "notebooks are kept without outputs"
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [one for cell in book.cells for one in cell.get("outputs", ()) if "data" in one]
    shown = [next((kind for kind in ("image/png", "text/html") if kind in one["data"]), "") for one in outputs]
    assert shown == SEEN[path.stem]
    assert not any(one.get("name") == "stderr" for cell in book.cells for one in cell.get("outputs", ()))
    if path.stem == "first_hour":
        page = next(one["data"]["text/html"] for one in outputs if "<iframe" in one["data"].get("text/html", ""))
        assert page.startswith("<p>warning: norm_drift in weights of 2")


BEGIN = """
import torch, tracereel
from torch import nn

def begin():
    global model, optimizer, run
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tracereel.record("run.zarr", model, optimizer, commit_seconds=0.1, overwrite=True).start()

def step():
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()

begin()
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Any]:
    """A kernel, in the folder of the test."""
    of_kernel, client = manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    of_kernel.client_here = client
    yield of_kernel
    client.stop_channels()
    of_kernel.shutdown_kernel(now=True)


def execute(kernel: Any, code: str) -> str:
    """Run a cell; the name of its error, if it had one."""
    content = kernel.client_here.execute_interactive(code, timeout=120, output_hook=lambda message: None)["content"]
    return str(content.get("ename", ""))


def test_an_interrupted_cell_leaves_a_recording_that_goes_on(kernel: Any, tmp_path: Path) -> None:
    """The steps before the interrupt and after it are in one finished trace."""
    assert execute(kernel, BEGIN) == ""
    message = kernel.client_here.execute("while True: step()")
    path = tmp_path / "run.zarr"
    await_steps(path, 3)
    kernel.interrupt_kernel()
    while kernel.client_here.get_shell_msg(timeout=60)["parent_header"]["msg_id"] != message:
        pass
    assert execute(kernel, "before = run.global_step\nfor _ in range(5): step()") == ""
    assert execute(kernel, "run.close()\nassert run.global_step >= before + 5") == ""
    found = tracer.open(path)
    assert found.status == "finished"
    steps = [one.global_step for one in found.messages(kinds="loss")]
    # an interrupt after a backward leaves a step with a second loss
    assert list(dict.fromkeys(steps)) == list(range(steps[-1] + 1))


def test_a_cell_that_runs_again_and_a_restart_leave_traces_that_open(kernel: Any, tmp_path: Path) -> None:
    """A second beginning ends the first; what was committed before a restart is there, and the path can be used."""
    path = tmp_path / "run.zarr"
    assert execute(kernel, BEGIN) == ""
    assert execute(kernel, "for _ in range(3): step()\nbegin()\nfor _ in range(2): step()") == ""
    await_steps(path, 2)
    kernel.restart_kernel(now=True)
    kernel.client_here.wait_for_ready(timeout=120)
    found = tracer.open(path)
    assert found.status == "interrupted"
    assert [one.global_step for one in found.messages(kinds="loss")] == [0, 1]
    assert execute(kernel, BEGIN + "step()\nrun.close()") == ""
    assert tracer.open(path).status == "finished"


def await_steps(path: Path, steps: int) -> None:
    """Wait until a trace holds the losses of so many steps."""
    for _ in range(600):
        time.sleep(0.1)
        if path.exists() and len({one.global_step for one in tracer.open(path).messages(kinds="loss")}) >= steps:
            return
    raise AssertionError(f"{path} never held {steps} steps")
