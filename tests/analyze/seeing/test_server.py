"""A page with a server."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from tests.analyze.seeing.browsing import Opened, colours, needs_chromium, started
from tests.analyze.seeing.runs import HOSTILE, messages, write
from tracer.trace.writer import TraceWriter

pytest.importorskip("bokeh")


class Served:
    """`trace view` in a process of its own."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "tracereel", "view", "--no-open", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.place = urlparse(self.address)

    def get(self, path: str, headers: dict[str, str] | None = None) -> int:
        """The status of a request."""
        connection = http.client.HTTPConnection(str(self.place.hostname), int(self.place.port or 0), timeout=20)
        connection.request("GET", path, headers=headers or {})
        status = connection.getresponse().status
        connection.close()
        return status

    def end(self) -> tuple[int, str]:
        """Interrupt it; its exit code, and what it complained of."""
        self.process.send_signal(signal.SIGINT)
        _, complaints = self.process.communicate(timeout=30)
        return self.process.returncode, complaints


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for all tests of this file."""
    yield from started()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A run of 600 steps with a spike, served."""
    made = messages(("enc.fc", "dec.fc"), 600, spike=("dec.fc", 444))
    path = tmp_path_factory.mktemp("served") / "run.zarr"
    write(path, [one for one in made if one.kind != "activations"])
    found = Served(path)
    yield found
    code, complaints = found.end()
    assert code == 0, complaints
    assert "Traceback" not in complaints


@pytest.fixture(scope="module")
def window(browser: Any, served: Served) -> Iterator[Opened]:
    """Its page in the window of a phone, in which one test comes after the other."""
    found = Opened(browser, served.address, 390, "dark")
    found.wait("document.getElementById('state').textContent === ''")
    found.settle()
    yield found
    found.context.close()


@pytest.fixture
def opened(window: Opened, served: Served) -> Iterator[Opened]:
    """That window with all steps in it; nothing is asked but of its own server, and nothing in it fails."""
    yield window
    window.page.click("#all")
    window.wait("document.getElementById('state').textContent === ''")
    window.settle()
    assert window.complaints == []
    assert {urlparse(one).netloc for one in window.requests if not one.startswith(("data:", "blob:"))} == {
        served.place.netloc
    }


def wait_for_width(page: Opened, width: int) -> None:
    """Wait until so many steps share a column of the heat map."""
    columns = "const {dw, image} = model('heat-value').data_source.data"
    page.until(f"{columns}; return dw[0] === {width} * image[0].shape[1];")


@needs_chromium
def test_the_page_is_that_of_a_report(opened: Opened) -> None:
    """The verdict, and every picture painted, on a phone in the dark."""
    assert "of dec.fc at step 444" in opened.page.inner_text("h1")
    for name in ("loss", "heat", "zoom", "curves"):
        assert colours(opened.painted(name)) > 12, name
    assert opened.run("return document.documentElement.scrollWidth") <= 390


@needs_chromium
def test_steps_that_are_zoomed_into_are_shown_whole(opened: Opened) -> None:
    """In the map of 600 steps two share a column, and curves have the extremes of bins; of 30 steps all are drawn."""
    wait_for_width(opened, 2)
    opened.page.fill("#from", "430")
    opened.page.fill("#to", "460")
    opened.page.keyboard.press("Enter")
    opened.wait("document.getElementById('state').textContent.includes('all that was')")
    wait_for_width(opened, 1)
    steps = opened.run("return [...model('curve-log-0').data.x]")
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[0] <= 430
    assert steps[-1] >= 460
    assert colours(opened.painted("heat")) > 3
    opened.page.click("#all")
    opened.wait("document.getElementById('state').textContent === ''")
    wait_for_width(opened, 2)


@needs_chromium
def test_a_metric_is_computed_when_it_is_picked(opened: Opened) -> None:
    """Its curve comes, chosen; one that is refused says why, and names no file."""
    opened.page.select_option("#metric-name", "norm")
    opened.page.fill("#metric-options", "kind=weight_gradients")
    opened.page.click("#metric-ask")
    opened.wait("document.getElementById('curve-measure').selectedOptions[0].text === 'weight_gradients_norm2'")
    opened.wait("document.getElementById('jobs').textContent.includes('done')")
    assert colours(opened.painted("curves")) > 12
    opened.page.fill("#metric-options", "colour=red")
    opened.page.click("#metric-ask")
    opened.wait("!document.getElementById('asking-trouble').hidden")
    assert "colour" in opened.page.inner_text("#asking-trouble")
    opened.run("model('link').wish = JSON.stringify({number: 'x', compute: ['/tmp/mine.py:Metric', '']});")
    opened.wait("document.getElementById('asking-trouble').textContent.includes('mine.py')")
    opened.run("model('link').wish = JSON.stringify({number: 'y', erase: 'all'});")
    opened.wait("document.getElementById('asking-trouble').textContent.includes('wishes to compute')")


def test_nobody_else_is_let_in(served: Served) -> None:
    """Without the secret there is nothing; a page of another origin gets no connection."""
    assert served.get(served.place.path) == 200
    for path in ("/", "/ws", "/static/js/bokeh.min.js", served.place.path[:-4] + "/", "/" + "a" * 32 + "/"):
        assert served.get(path) == 404, path

    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    for origin in ("http://example.org", f"http://127.0.0.1:{int(served.place.port or 0) + 1}", "null"):
        assert served.get(f"{served.place.path}ws", upgrade | {"Origin": origin}) == 403, origin


@needs_chromium
def test_a_run_is_followed(browser: Any, tmp_path: Path) -> None:
    """The page of a run that is being recorded grows with it, and keeps what is chosen in it; its end is told."""
    names = ("first", HOSTILE[0], HOSTILE[5])
    made = messages(names, 120, spike=("first", 90))
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        writer.commit()
        served = Served(path)
        page = Opened(browser, served.address)  # before there is anything to draw
        page.wait("document.getElementById('state').textContent.includes('Waits for the run')")
        for message in made:
            if message.global_step < 40:
                writer.write(message)
        writer.commit()
        page.wait("document.getElementById('to').value === '39'")
        page.wait("document.getElementById('state').textContent.includes('Follows the run')")
        page.page.check('input[name="heat-mode"][value="value"]')
        page.page.click("#select-none")
        for message in made:
            if message.global_step >= 40:
                writer.write(message)
        writer.commit()
        page.wait("document.getElementById('to').value === '119'")
        page.wait("document.querySelector('h1').textContent.includes('at step 90')")
        assert page.run("return model('heat-value').visible") is True
        assert page.page.locator("#layer-table input:checked").count() == 0
    page.wait("document.getElementById('state').textContent === ''")
    page.wait("document.querySelector('header').textContent.includes('is finished')")
    assert colours(page.painted("heat")) > 6
    assert page.page.title() != "owned"
    assert page.complaints == []
    served.end()
    page.wait("document.getElementById('state').textContent.includes('server has ended')")
    page.context.close()
