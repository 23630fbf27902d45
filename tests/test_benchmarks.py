"""The benchmarks run as they are described, at the smallest size that they take; what they measure is not looked at."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import processes

FOLDER = Path(__file__).parent.parent / "benchmarks"
CASES = {
    "batch": "--rounds 1 --traces 2 --few 2 --scale 0.1 --tasks 2 --json",
    "compiled": "--rounds 1 --steps 2 --only MLP --backend eager --json",
    "compression": "--rounds 1 --megabytes 1 --json",
    "dataset": "--rounds 1 --megabytes 8 --widths 64,512 --json",
    "keep_less": "--steps 3 --only cnn --json",
    "hooks": "--rounds 2 --steps 10 --only calls,mlp --json",
    "memory": "--queue 4 --megabytes 16 --rate 50 --rows 4096 --steps 2 --json",
    "objects": "--rounds 1 --scale 0.01 --latency 0 --json",
    "overhead": "--rounds 2 --steps 10 --json",
    "report": "--rounds 1 --steps 10 --series 20 --long 600 --json",
    "scale_asking": "--messages 3000 --times 2 --json",
    "scale_replay": "--rounds 1 --messages 1200 --json",
    "scale_upkeep": "--messages 3000 --ratio 1000 --json",
    "startup": "--rounds 1 --json",
    "storage": "--rounds 1 --scale 0.05 --only scalars,open --json",
}
LONG = tuple(name for name in CASES if name not in ("memory", "objects"))
"""Their smallest sizes take too long for each `make test`: there it is only seen that they begin."""
ELSEWHERE = {
    "budget": "it trains nine networks for a minute each",
    "diff": "its smallest size trains forty networks, and takes a minute",
    "families": "it is how two of the others run programs",
    "gpu": "it needs one, and tests/observing/test_cuda*.py are for that",
    "least": "it is what two of the others compare with",
    "metrics": "it calls the four others of metrics",
    "metrics_dynamics": "it trains networks for a minute",
    "metrics_similarity": "its smallest size takes half a minute",
    "metrics_spectra": "its smallest size takes half a minute",
    "metrics_statistics": "its smallest size takes half a minute",
    "scale": "it calls the four others of scale",
    "scale_similarity": "its smallest size takes a minute",
    "train": "verdicts calls it",
    "turns": "it is what two of the others share",
    "verdicts": "tests/analyze/rules/test_verdicts.py runs a selection of it; the whole takes some minutes",
    "way": "it counts files, and measures nothing",
}
"""Why some are not run."""


def numbers(found: Any) -> list[float]:
    """All numbers in what a benchmark printed."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        return [number for one in found for number in numbers(one)]
    return [found] if type(found) in (int, float) else []


def test_all_are_run() -> None:
    """Each benchmark is run here, or it stands here why not."""
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted([*CASES, *ELSEWHERE])


def run(name: str, arguments: str, folder: Path) -> str:
    """What a benchmark prints, which ends as it should."""
    done = processes.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *arguments.split()],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # 1 says that a bar is missed, which means nothing at this size
    assert done.returncode in (0, 1) and not done.stderr.startswith("Traceback"), done.stderr  # noqa: PT018 - one text
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow) if one in LONG else one for one in CASES])
def test_runs(name: str, tmp_path: Path) -> None:
    """It ends well, and what it prints are numbers."""
    found = numbers(json.loads(run(name, CASES[name], tmp_path)))
    assert len(found) > 3
    assert all(math.isfinite(number) for number in found)


@pytest.mark.parametrize("name", LONG)
def test_begins(name: str, tmp_path: Path) -> None:
    """What it imports is there, and it says what it measures."""
    assert "--json" in run(name, "--help", tmp_path)


def test_bars_of_similarity_that_are_missed_end_it_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow ratio, or intervals that lie, are an error that names them; what is as it should be ends well."""
    specification = importlib.util.spec_from_file_location("scale_similarity", FOLDER / "scale_similarity.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    bars = module.Bars()
    module.trials(2, bars, n=40, d=60, k=16)
    assert bars.missed == []
    assert "100.0% (0%)" in capsys.readouterr().out  # an interval that says nothing is not only right
    monkeypatch.setattr(module.analyze, "participation_ratio", lambda x, centre: 1e6)
    module.trials(2, bars, n=40, d=60, k=16)
    assert "PR of unrelated, k = 16: 0 of 2 intervals are right, wanted >= 99 %" in bars.missed
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["scale_similarity.py"])
    monkeypatch.setattr(module, "pwcca", lambda rounds, bars: None)
    for ratio in (1.02, 1.04):
        monkeypatch.setattr(module, "cka", lambda rounds, bars, ratio=ratio: bars.at_most("CKA", ratio, 1.0, 0.03))
        if ratio < 1.03:
            module.main()
            continue
        with pytest.raises(SystemExit, match=r"CKA: 1\.04, wanted <= 1"):
            module.main()
