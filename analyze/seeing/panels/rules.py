"""Panel of the rules: findings, what each rule judged, and rules that could not judge."""

from __future__ import annotations

from collections.abc import Sequence

from analyze.rules.coverage import in_table
from analyze.rules.finding import Finding
from analyze.seeing.findings import Checked
from analyze.seeing.panels.panel import Panel
from analyze.seeing.words import text

SHOWN = 200
"""How many findings are listed, at most."""


def panel(checked: Checked) -> Panel:
    """The panel of the findings and the rules."""
    parts = []
    if checked.findings:
        rows = "".join(map(_row, checked.findings[:SHOWN]))
        more = len(checked.findings) - SHOWN
        left_out = f"<p>{more:,} more findings are left out.</p>" if more > 0 else ""
        parts.append(
            '<div class="wide" id="findings" tabindex="0" role="region" aria-label="Findings"><table><thead><tr>'
            '<th scope="col">severity</th><th scope="col">rule</th><th scope="col">where</th>'
            '<th scope="col">steps</th><th scope="col">evidence, and what to try</th>'
            f"</tr></thead><tbody>{rows}</tbody></table></div>{left_out}"
        )
    if checked.coverage:
        columns, told = in_table(checked.coverage, (one.rule for one in checked.findings))
        head = "".join(f'<th scope="col">{text(one)}</th>' for one in columns)
        body = "".join(_row_of_coverage(columns, row) for row in told)
        parts.append(
            "<h3>What each rule judged</h3>"
            '<div class="wide" id="judged" tabindex="0" role="region" aria-label="What each rule judged">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )
    if checked.unjudged:
        reasons = "".join(f"<dt>{text(rule)}</dt><dd>{text(why)}</dd>" for rule, why in checked.unjudged.items())
        parts.append(
            f"<details><summary>{len(checked.unjudged)} rules could not judge, and why</summary>"
            f"<dl>{reasons}</dl></details>"
        )
    return Panel(name="rules", title="Rules", before="".join(parts))


def _row_of_coverage(columns: Sequence[str], row: Sequence[object]) -> str:
    """A row of the table of coverage; in a narrow window, where the head is not shown, its cells name their columns."""
    rule, *cells = row
    named = zip(columns[1:], cells, strict=True)
    told = "".join(f'<td data-name="{text(name)}">{text(one)}</td>' for name, one in named)
    return f"<tr><td>{text(rule)}</td>{told}</tr>"


def _row(one: Finding) -> str:
    steps = f"{one.first}" if one.first == one.last else f"{one.first} to {one.last}, worst at {one.worst}"
    return (
        f'<tr class="severity-{int(one.severity)}"><td>{text(one.severity)}</td><td>{text(one.rule)}</td>'
        f'<td class="name">{text(one.place)}</td><td>{steps}</td>'
        f"<td>{text(one.evidence)}.<br><span class=note>{text(one.advice)}.</span></td></tr>"
    )
