"""`import tracereel` offers what the packages `tracer` and `analyze` do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import analyze
import tracer
import tracereel
from tracereel import own


def test_all_public_names() -> None:
    """Each is the object that its package has."""
    assert {name: getattr(tracereel, name) for name in tracer.__all__} == {
        name: getattr(tracer, name) for name in tracer.__all__
    }
    assert tracereel.analyze is analyze
    assert tracereel.__version__ == tracer.__version__
    assert {*tracer.__all__, "analyze"} <= {*dir(tracereel)} == {*tracereel.__all__}
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        tracereel.recrod  # noqa: B018


def test_a_hidden_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of another module of the same name is run, and nothing is taken from it."""
    other = tmp_path / "tracer.py"
    other.write_text("record = 1; raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name == "tracer" or name.startswith("tracer.")]:
        monkeypatch.delitem(sys.modules, name)
    assert str(other) in str(own.hidden("tracer"))
    with pytest.raises(ImportError, match=f"Python finds {other} for the module tracer"):
        tracereel.record  # noqa: B018
