"""A page in a browser with a server: the panels of a report, replaced when there is something new."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, final

from bokeh.application import Application
from bokeh.application.handlers import FunctionHandler
from bokeh.core.properties import String
from bokeh.document import Document
from bokeh.embed.elements import script_for_render_items
from bokeh.embed.util import RenderItem
from bokeh.layouts import column
from bokeh.model import DataModel
from jinja2 import Template

from analyze.seeing.gathered import Gathered
from analyze.seeing.page import asking_panel, bounds_of, data_of, header_of, html_of, panels_of, steps_of
from analyze.seeing.panel import Panel
from analyze.seeing.view import RUNNING, Job, View
from tracer.errors import MessageError, TracerError

TICK_MILLISECONDS = 400
"""How often a page checks for something new."""
PAUSE_SECONDS = 2.0
"""While a run or a metric goes on, a page is redrawn at most this often."""
SHARE = 4.0
"""A page also waits this many times as long as its last drawing took."""
WHOLE = 400
"""Pictures show every step of a run of at most this many steps; see `curves.COLUMNS`."""


class Link(DataModel):  # type: ignore[misc] # Bokeh gives its metaclass no types
    """The channel between a page and its server, in JSON.

    `wish`: what the page requests. `told`: new contents of the page. `state`: what is going on.
    """

    wish = String(default="")
    told = String(default="")
    state = String(default="")


def application(view: View) -> Application:
    """A Bokeh application that makes a session for each browser page."""

    def fill(document: Document) -> None:
        Session(view, document)

    return Application(FunctionHandler(fill))


@final
class Session:
    """One page in a browser, with its zoom and its requests.

    Parameters
    ----------
    view : View
    document : bokeh.document.Document
        An empty document, which the session fills.
    """

    def __init__(self, view: View, document: Document) -> None:
        self.view, self.document = view, document
        self.follows, self.trouble = True, ""
        self._closer: Gathered | None = None
        self._window: tuple[int, int] | None = None
        self._looking: tuple[Job, list[Gathered]] | None = None
        self._mark: tuple[object, ...] = ()
        self._drawn = self._cost = 0.0
        view.refresh()
        with view.turns.reading():
            self.steps = steps_of(view.found)
        self.link = Link(name="link")
        self.places = {}
        self.panels = {one.name: one for one in self._draw()}
        for name, one in self.panels.items():
            pictures = [] if one.picture is None else [one.picture]
            self.places[name] = column(*pictures, name=f"{name}-place", sizing_mode="stretch_width")
            document.add_root(self.places[name])
        # as roots, they would need elements in the page; a run that has just begun has no picture with the steps
        self.places["loss"].tags = [self.link, self.steps]
        self.link.state = json.dumps(self.state())
        document.template = Template("{{ page(docs[0]) }}")
        document.template_variables["page"] = self.html
        self.link.on_change("wish", lambda _, __, wish: self.do(json.loads(wish)))
        document.add_periodic_callback(self.tick, TICK_MILLISECONDS)

    # -- the contents of the page -------------------------------------------------------------------------------

    def _draw(self) -> list[Panel]:
        """Draw the panels for the present data."""
        began = time.monotonic()
        self._mark = self.view.mark
        with self.view.turns.reading():
            panels = panels_of(self.view.found, self.view.references, self.steps, self._closer)
        self._drawn = time.monotonic()
        self._cost = self._drawn - began
        return panels

    def html(self, item: RenderItem) -> str:
        """The HTML of the page when it opens."""
        panels = list(self.panels.values())
        at = next(number for number, one in enumerate(panels) if one.name == "curves")
        panels.insert(at, asking_panel(self.view.metrics_to_ask()))
        places = {}
        for root in item.roots:
            element = f'<div id="{root.elementid}" data-root-id="{root.id}" class="place"></div>'
            places[root.name.removesuffix("-place")] = element
        script = script_for_render_items({}, [item])
        with self.view.turns.reading():
            return html_of(self.view.found, self.view.references, panels, places, script, connects="'self'")

    def update(self) -> None:
        """Replace the contents of the page."""
        with self.view.turns.reading():
            start, end = bounds_of(self.view.found)
            header = header_of(self.view.found, self.view.references)
            span = self.view.found.span or (0, 0)
        low, high = self.steps.bounds
        if (start, end) != (low, high):
            whole = self.steps.start <= low and self.steps.end >= high
            self.steps.update(bounds=(start, end), **({"start": start, "end": end} if whole else {}))
        panels = {one.name: one for one in self._draw()}
        changed = {}
        self.document.hold("combine")
        try:
            for name, one in panels.items():
                self.places[name].children = [] if one.picture is None else [one.picture]
                changed[name] = {
                    "title": one.title, "before": one.before, "alternative": one.alternative,
                    "drawn": one.picture is not None,
                }  # fmt: skip
            self.panels = panels
            told = {"header": header, "parts": changed, "data": data_of(panels.values()), "span": span}
            self.link.told = json.dumps(told)
        finally:
            self.document.unhold()

    def state(self) -> dict[str, Any]:
        """Progress, jobs and trouble, for the page's script."""
        view = self.view
        last = max(1, (view.found.span or (0, 1))[1])
        jobs = [
            {
                "number": number, "title": one.title, "state": one.job.state, "error": one.job.error,
                "share": 1.0 if one.job.state != RUNNING else min(1.0, max(0, one.job.reached) / last),
            }
            for number, one in enumerate(view.asked)
        ]  # fmt: skip
        closer = ""
        if self._looking is not None and self._window is not None:
            closer = "Looks closer at steps {} to {}.".format(*self._window)
        elif self._closer is not None and self._window is not None:
            closer = "The pictures show all that was recorded of steps {} to {}.".format(*self._window)
        progress = view.progress or ("Draws what is new." if self.follows and self._outdated else "")
        told = " ".join(one for one in (progress, view.unread, closer) if one)
        return {"told": told, "following": view.following, "trouble": self.trouble, "jobs": jobs}

    def tick(self) -> None:
        """Show what is new, if a redraw is due."""
        self.view.refresh()
        looked = self._looked()
        if looked or (self.follows and self._outdated and time.monotonic() >= self._due):
            self.update()
        state = json.dumps(self.state())
        if state != self.link.state:
            self.link.state = state

    @property
    def _outdated(self) -> bool:
        """Whether there is data that the page does not show yet."""
        return self._mark != self.view.mark

    @property
    def _due(self) -> float:
        """The earliest time of the next redraw; at once if nothing is going on."""
        return self._drawn + (max(PAUSE_SECONDS, SHARE * self._cost) if self.view.progress else 0.0)

    # -- requests of the page -----------------------------------------------------------------------------------

    def do(self, wish: Mapping[str, Any]) -> None:
        """Handle a request of the page's script. These four are all that a page can do."""
        try:
            match wish:
                case {"compute": [str(name), str(options)]}:
                    self.trouble = ""
                    self.view.compute(name, options)
                case {"cancel": int(number)}:
                    self.view.cancel(number)
                    self.update()
                case {"follow": bool(follows)}:
                    self.follows = follows
                case {"look": [int(start), int(end)]}:
                    self._look(start, end)
                case _:
                    raise MessageError(f"a page wishes to compute, cancel, follow or look, not {sorted(wish)}")
        except TracerError as error:
            self.trouble = str(error)
        self.link.state = json.dumps(self.state())

    def _look(self, start: int, end: int) -> None:
        """Show the steps from `start` to `end` in detail, with a margin; or the whole run, if zoomed out."""
        with self.view.turns.reading():
            first, last = self.view.found.span or (0, 0)
        start, end = max(first, start), min(last, end)
        if self._window is not None:
            low, high = self._window
            if low <= start and end <= high and end - start >= (high - low) / 8:
                return  # the detail in the page covers these steps
        if self._looking is not None:
            self._looking[0].cancel()
            self._looking = None
        had = self._closer is not None
        self._closer = self._window = None
        width = end - start + 1
        if last - first + 1 > WHOLE and width <= (last - first + 1) / 2:
            self._window = (max(first, start - width // 2), min(last, end + width // 2))
            with self.view.turns.reading():
                self._closer = self.view.closer(*self._window)
            if self._closer is None:
                into: list[Gathered] = []
                self._looking = self.view.look(*self._window, into), into
        if had or self._closer is not None:
            self.update()

    def _looked(self) -> bool:
        """Take over a closer look that has ended; return whether there is something new to show."""
        if self._looking is None or self._looking[0].state == RUNNING:
            return False
        job, into = self._looking
        self._looking = None
        self.trouble = job.error or self.trouble
        self._closer = into[0] if into else None
        return bool(into)
