"""A finding as people see it."""

from __future__ import annotations

from dataclasses import replace

from analyze.rules.finding import Finding, Severity

FOUND = Finding(
    rule="dead_units", severity=Severity.WARNING, module="<b>", kind="activations", tag="default", leaf="", rank=0,
    epoch=0, first=3, worst=5, last=1200, steps=9, value=0.123456, threshold=0.1, numbers={"units": 7.0},
    evidence="a\x1b[31m of <i>", advice="less",
)  # fmt: skip


def test_a_finding_for_notebooks() -> None:
    """Where, when, by how much, why and what to try; names are text."""
    told = FOUND._repr_html_()
    assert "<caption>warning: dead_units in activations of &lt;b&gt; at step 3</caption>" in told
    assert "<td>steps</td><td>3 to 1200, 9 of them recorded; the worst is 5</td>" in told
    assert "<td>value</td><td>0.1235, beside a threshold of 0.1</td>" in told
    assert "<td>numbers</td><td>units 7</td>" in told
    assert "<td>evidence</td><td>a\\x1b[31m of &lt;i&gt;</td>" in told
    once = replace(FOUND, steps=1, last=3, worst=3, numbers={})._repr_html_()
    assert "<td>steps</td><td>3</td>" in once
    assert "numbers" not in once
