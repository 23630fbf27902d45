"""A page in an installed Chromium (``apt-get install chromium``), driven by Playwright; nothing is downloaded."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


# Bokeh's own look-up knows pictures that were replaced until it forgets them, a moment later.
_MODEL = (
    "const model = name => Bokeh.documents[0].roots().flatMap(root => [...root.references()])"
    ".find(one => one.name === name)"
)


class Opened:
    """A page in a browser, with what it said and what it asked for."""

    def __init__(self, browser: Any, address: str, width: int = 1024, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda one: self.complaints.append(one.text) if one.type != "log" else None)
        self.page.on("pageerror", lambda one: self.complaints.append(str(one)))
        self.page.on("dialog", lambda one: (self.complaints.append(one.message), one.dismiss()))
        self.page.on("request", lambda one: self.requests.append(one.url))
        self.page.goto(address)
        self.wait("document.documentElement.dataset.ready === 'yes'")
        self.settle()

    def wait(self, expression: str) -> None:
        """Wait until an expression of JavaScript is true, in a minute."""
        # by default it is computed whenever the page is painted: many times a second, or never where nothing is painted
        try:
            self.page.wait_for_function(expression, polling=100, timeout=60_000)
        except sync_api.TimeoutError:
            state = self.page.evaluate("() => (document.getElementById('state') ?? document.body).textContent")
            pytest.fail(f"not so in a minute: {expression}; the page says {state!r}, and complains: {self.complaints}")

    def settle(self) -> None:
        """Wait until what was changed is painted."""
        self.page.evaluate(
            "() => new Promise(done => { setTimeout(done, 5000);"
            " requestAnimationFrame(() => requestAnimationFrame(done)); })"
        )
        self.page.wait_for_timeout(60)

    def run(self, script: str) -> Any:
        """What a script says, with `model` for the parts of the pictures."""
        return self.page.evaluate(f"() => {{ {_MODEL}; {script} }}")

    def until(self, script: str) -> None:
        """Wait until a script says yes, with `model` as in `run`, and it is painted."""
        self.wait(f"() => {{ {_MODEL}; {script} }}")
        self.settle()

    def painted(self, name: str) -> np.ndarray:
        """The pixels of a picture."""
        self.settle()
        return pixels_of(self.page.locator(f"#{name}-picture").screenshot())

    def steps(self) -> tuple[float, float]:
        """What is shown of the run."""
        start, end = self.run("const one = model('steps'); return [one.start, one.end];")
        return start, end


def started() -> Iterator[Any]:
    """A browser, for a fixture."""
    with sync_api.sync_playwright() as playwright:
        # a container's root may not use the sandbox, and has a small /dev/shm
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def pixels_of(picture: bytes) -> np.ndarray:
    """A screenshot as numbers."""
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), np.int16)


def colours(pixels: np.ndarray) -> int:
    """How many different colours are painted in at least four pixels each."""
    # as one number each: NumPy sorts rows of three far more slowly
    _, counts = np.unique(pixels.reshape(-1, 3).astype(np.int64) @ (1 << 16, 1 << 8, 1), return_counts=True)
    return int((counts >= 4).sum())
