"""Panel to request a metric, for a page with a server."""

from __future__ import annotations

from collections.abc import Mapping

from analyze.seeing.panels.panel import Panel
from analyze.seeing.words import text


def panel(metrics: Mapping[str, str]) -> Panel:
    """The panel with which a user requests a metric.

    Parameters
    ----------
    metrics : mapping of str to str
        Name of a metric → what it needs that the trace lacks; empty if nothing.
    """
    choices = "".join(
        f'<option value="{text(name)}"{f" disabled title={chr(34)}{text(lacks)}{chr(34)}" if lacks else ""}>'
        f"{text(name)}</option>"
        for name, lacks in metrics.items()
    )
    return Panel(
        name="asking",
        title="Ask for a metric",
        before=f'<label>Metric <select id="metric-name">{choices}</select></label> '
        '<label>options <input id="metric-options" placeholder="key=value,key=value" size="26" spellcheck="false" '
        'autocomplete="off"></label> <button type="button" id="metric-ask">Compute</button>'
        '<p class="note">It is replayed in the background; its answers come to the curves, or to the histograms and '
        "spectra. A metric that is greyed out needs something that was not recorded.</p>"
        '<p id="asking-trouble" class="problem" role="alert" hidden></p><ul id="jobs"></ul>',
    )
