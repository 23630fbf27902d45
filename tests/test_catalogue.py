"""The catalogue: the page is up to date, every metric says what it must, and every old name has its new one."""

from __future__ import annotations

from pathlib import Path

import pytest

import analyze
from analyze import catalogue, registry
from analyze.invariances import INVARIANCES
from tracer import Subscriber

ROOT = Path(__file__).parent.parent


def test_the_page_is_up_to_date() -> None:
    """docs/metrics.md is what `make docs` would write."""
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == catalogue.markdown(), "run `make docs`"


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_headings_stand_in_their_order(name: str) -> None:
    """The Notes of each metric have the headings that the page is made of, each once and in one order."""
    said = list(catalogue.headings(registry.describe(name)["docstring"]))
    assert said == [heading for heading in catalogue.HEADINGS if heading in said]
    assert {"Invariant to", "Edge values", "Source"} <= set(said)
    assert catalogue.example(getattr(analyze, name)), f"the function {name} shows no example"


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_class_data_is_known(name: str) -> None:
    """Scopes and invariances are words that this project knows."""
    cls = registry.find(name)
    assert cls.scope in catalogue.SCOPES
    assert set(cls.invariances) <= set(INVARIANCES)
    assert cls.mergeable == (cls.merge is not Subscriber.merge)


PENDING = {"condition_number"}
"""Counterparts that the table names and the registry does not have yet."""


@pytest.mark.parametrize("row", catalogue.FORMER, ids=lambda row: f"{row.system}-{row.name}")
def test_every_old_name_has_a_new_one(row: catalogue.Former) -> None:
    """What the table of old names offers can be asked; where nothing asks the same, a remark says why or what to do."""
    if not row.wish:
        assert row.remark
        return
    name = row.wish.partition(":")[0]
    if name in registry.BUILT_IN:
        assert registry.parse(row.wish).produces
    else:
        assert name in PENDING


def test_the_table_of_old_names_is_complete() -> None:
    """All that ikkuna and monitorch offer is in it, once."""
    names = [(row.system, row.name) for row in catalogue.FORMER]
    assert len(set(names)) == len(names)
    ikkuna = "Mean Variance Norm Sum SpectralNorm ConditionNumber Ratio Histogram Loss MessageMean TrainAccuracy"
    ikkuna += " TestAccuracy BatchedSVCCA SVCCA HessianEigen Callback Plot"
    monitorch = "OutputActivation OutputNorm OutputGradientGeometry GradientGeometry GradientActivation"
    monitorch += " ParameterDifferenceGeometry ParameterNorm ParameterCond LossModule ExplicitCall"
    assert {("ikkuna", f"{name}Subscriber") for name in ikkuna.split()} <= set(names)
    assert {("monitorch", name) for name in monitorch.split()} <= set(names)
