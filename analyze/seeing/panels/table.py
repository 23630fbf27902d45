"""Panel of the sortable table of layers, where the user selects layers for all pictures."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from analyze.seeing.layers import Layer
from analyze.seeing.panels.panel import SLOTS, Panel
from analyze.seeing.words import number, text

ROWS = 300
"""How many layers the table has, at most: the most anomalous."""

COLUMNS = (
    ("layer", "in recorded order"),
    ("first odd step", "of a finding, else where the ratio was 8 times its past or an eighth of it, after 20 steps"),
    ("why", "the rule, or how far the ratio was from its past"),
    ("max ratio", "the greatest update/weight ratio"),
    ("at step", "where the ratio was greatest"),
    ("dead share", "units that gave zeros for a whole batch as recorded; the least of the last ten batches"),
    ("max gradient norm", "the greatest norm of the gradient of its weights"),
    ("not finite", "how many recorded numbers are NaN or infinite"),
)
"""The headings and their tooltips."""


def panel(order: Sequence[Layer], drawn: Collection[str], selected: Collection[str]) -> Panel:
    """The panel of the table of layers.

    Parameters
    ----------
    order : sequence of Layer
        The most anomalous first.
    drawn : collection of str
        The layers whose curves are in the page.
    selected : collection of str
        The layers that are selected at first.
    """
    if not order:
        return Panel(name="layers", title="Layers", before="<p>Nothing was recorded of any layer.</p>")
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" title="{text(told)}">{text(name)}</button></th>'
        for name, told in COLUMNS
    )
    rows = "".join(_row(layer, layer.name in drawn, layer.name in selected) for layer in order[:ROWS])
    left_out = f"; of {len(order):,} layers the {ROWS} most anomalous are listed" if len(order) > ROWS else ""
    return Panel(
        name="layers",
        title="Layers",
        before=f'<p class="note">The most anomalous first{left_out}. A heading sorts; a tick shows the layer in all '
        f'pictures, at most {SLOTS} at once. <button type="button" id="select-none">Untick all</button></p>'
        f'<div class="wide" tabindex="0" role="region" aria-label="Table of layers"><table id="layer-table"><thead><tr>'
        f'<th scope="col"><span class="unseen">show</span></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>',
    )


def _row(layer: Layer, drawn: bool, selected: bool) -> str:
    name = text(layer.name)
    state = " checked" if selected else ""
    if not drawn:
        state = ' disabled title="its curves are left out"'
    tick = f'<input type="checkbox" data-layer="{name}" aria-label="show {name}"{state}>'
    cells = [
        _cell(name, layer.place, "name"),
        _cell("" if layer.odd is None else str(layer.odd), layer.odd),
        _cell(text(layer.why), layer.why, "word"),
        _cell(number(layer.ratio), layer.ratio),
        _cell("" if layer.ratio_step is None else str(layer.ratio_step), layer.ratio_step),
        _cell("" if layer.dead is None else f"{layer.dead:.0%}", layer.dead),
        _cell(number(layer.gradient), layer.gradient),
        _cell(f"{layer.bad:,}" if layer.bad else "", layer.bad),
    ]
    severity = f' class="severity-{layer.severity}"' if layer.severity else ""
    return f"<tr{severity}><td>{tick}</td>{''.join(cells)}</tr>"


def _cell(shown: str, value: object, kind: str = "") -> str:
    """A cell with its sort key; a missing value has an empty key."""
    known = value is not None and value != ""
    if isinstance(value, float) and value != value:
        value = "Infinity"
    key = text({float("inf"): "Infinity", float("-inf"): "-Infinity"}.get(value, value)) if known else ""  # type: ignore[call-overload] # any value
    title = f' title="{shown}"' if kind == "name" else ""
    return f'<td data-key="{key}"{f" class={kind}" if kind else ""}{title}>{shown}</td>'
