"""Batches that compare runs: each layer of one with the same layer of another."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from analyze.batching.batch import batch
from tests.analyze.batching.batches import counted, said
from tracer import ModuleMessage, NetworkMessage, TraceWriter
from tracer.errors import CaptureError, MessageError
from tracer.format.names import part_name

module = pytest.importorskip("analyze.comparing.similarities", reason="there is no comparison of two runs to partition")
SPECS = ["svcca", "cka"]


def write(path: Path, seed: int, steps: int = 6, *, labels: int = 0, rank: int = 0) -> Path:
    """A run whose layers drift from what all runs began with, with a probe of the same datapoints; or a rank of one."""
    start = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(seed + 1)
    first = {name: torch.randn(40, 5, generator=start) for name in ("conv", "fc")}
    with TraceWriter(path, part=part_name(rank, 0)) as writer:
        for step in range(steps):
            at: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "tag": "probe", "rank": rank}
            kinds = torch.arange(40) % (2 + labels)
            writer.write(NetworkMessage(kind="input_labels", data=kinds, **at))
            for name, x_nd in first.items():
                data = x_nd + 0.2 * step * torch.randn(40, 5, generator=own)
                writer.write(ModuleMessage(kind="activations", module=name, data=data, **at))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three runs, the last of which is shorter."""
    return [write(tmp_path / f"run{seed}.zarr", seed, 6 - seed // 2) for seed in range(3)]


@pytest.mark.parametrize("part_bytes", [1, 1 << 30])
def test_each_two_runs_are_compared(part_bytes: int, runs: list[Path], tmp_path: Path) -> None:
    """However finely it is cut, a batch says what comparing each two runs says, and never twice."""
    out = tmp_path / "out"
    asked: dict[str, Any] = {"pairs": "all", "workers": 0, "part_bytes": part_bytes}
    results = batch(runs, SPECS, out, **asked)
    assert not results.failures
    expected = [row for one, other in combinations(runs, 2) for row in module.compare(one, other, SPECS)]
    assert said(results) == said(expected)
    steps = 6 + 5 + 5
    assert results.computed == (len(SPECS) * steps if part_bytes == 1 else len(SPECS) * 3)
    assert {row.trace for row in results} == {f"{one}|{other}" for one, other in combinations(runs, 2)}
    assert counted(batch(runs, SPECS, out, **asked)) == (0, results.computed, 0)
    again = batch(runs, [*SPECS, "svcca:threshold=0.9"], out, **asked)
    assert again.cached == results.computed
    assert again.computed == results.computed // len(SPECS)


def test_each_run_with_the_first(runs: list[Path], tmp_path: Path) -> None:
    """One star of pairs, of the steps that are asked; the table says both runs."""
    results = batch(runs, "svcca", tmp_path / "out", pairs="first", workers=0, steps=(2, 4))
    frame = results.to_pandas()
    assert set(frame["trace"]) == {f"{runs[0]}|{runs[1]}", f"{runs[0]}|{runs[2]}"}
    assert set(frame["global_step"]) == {2, 3}
    assert set(frame["status"]) == {"finished"}
    assert all("|" in run_id for run_id in frame["run_id"])


def test_runs_of_several_ranks(tmp_path: Path) -> None:
    """Each rank is compared with that of the same number, as far as both have it, and stands in the table."""
    runs = [tmp_path / name for name in ("a.zarr", "b.h5", "c.zarr", "d.zarr")]
    for seed, (path, ranks) in enumerate(zip(runs, ((0, 1), (0, 1), (1,), (2,)), strict=True)):
        for rank in ranks:
            write(path, 10 * seed + rank, rank=rank)
    a, b, c, d = (tracer.open(path) for path in runs)
    expected = [
        row
        for one, other, rank in ((a, b, 0), (a, b, 1), (a, c, 1), (b, c, 1))
        for row in module.compare(one.of_rank(rank), other.of_rank(rank), SPECS)
    ]
    # of runs of one rank each, whatever its number, these are compared
    expected += list(module.compare(c, d, SPECS))
    assert {row.rank for row in expected} == {0, 1}
    for part_bytes in (1, 1 << 30):
        results = batch(runs, SPECS, tmp_path / f"out{part_bytes}", pairs="all", workers=0, part_bytes=part_bytes)
        assert said(results) == said(expected)
        told = {(failure.status, failure.trace): failure.reason for failure in results.failures}
        assert set(told) == {("unplanned", f"{one}|{runs[3]}") for one in runs[:2]}
        assert told["unplanned", f"{runs[0]}|{runs[3]}"].endswith(
            "ranks 0, 1, in " + f"{runs[3]} of 2: none is in both"
        )
    with pytest.raises(CaptureError, match=r"of the ranks 0, 1, in .* of 2: none is in both"):
        module.compare(a, d)
    for reader in (a, b, c, d):
        reader.close()


def test_a_rank_without_a_probe_is_left_out(tmp_path: Path) -> None:
    """Often only one rank evaluates; if none does, what is missing is told."""
    paths = [tmp_path / f"{name}.zarr" for name in ("one", "other")]
    for seed, path in enumerate(paths):
        write(path, seed)
        with TraceWriter(path, part=part_name(1, 0)) as writer:
            at: dict[str, Any] = {"global_step": 0, "train_step": 0, "epoch": 0, "rank": 1, "module": "fc"}
            writer.write(ModuleMessage(kind="weights", data=torch.randn(40, 5), **at))
    results = batch(paths, "svcca", tmp_path / "out", pairs="all", workers=0)
    assert not results.failures
    assert {row.rank for row in results} == {0}
    assert said(results) == said(module.compare(*paths, "svcca"))
    lacking = batch(paths, "svcca:kind=gradients", tmp_path / "out", pairs="all", workers=0)
    assert ["svcca needs gradients" in failure.reason for failure in lacking.failures] == [True, True]


def test_runs_that_cannot_be_compared_are_told(runs: list[Path], tmp_path: Path) -> None:
    """Other datapoints, no step in common, no trace at all: each pair is told, and the others are compared."""
    other = write(tmp_path / "other.zarr", 9, labels=3)
    broken = tmp_path / "broken.zarr"
    broken.mkdir()
    (broken / "zarr.json").write_text("{")
    late = tmp_path / "late.zarr"
    with TraceWriter(late) as writer:
        at: dict[str, Any] = {"global_step": 900, "train_step": 0, "epoch": 0, "tag": "probe", "module": "fc"}
        writer.write(ModuleMessage(kind="activations", data=torch.randn(40, 5), **at))
    results = batch([*runs[:2], other, broken, late], "svcca", tmp_path / "out", pairs="first", workers=0)
    assert results.computed == 1
    told = {(failure.status, Path(failure.trace).name): failure.reason for failure in results.failures}
    assert set(told) == {("failed", "other.zarr"), ("unplanned", "broken.zarr"), ("unplanned", "late.zarr")}
    assert "labels differ" in told["failed", "other.zarr"]
    assert "no step of a layer in common" in told["unplanned", "late.zarr"]


def test_what_is_asked_wrongly_is_refused(runs: list[Path], tmp_path: Path) -> None:
    """Each is one sentence, before any work."""
    wrong: list[tuple[Any, str, dict[str, Any], type[Exception], str]] = [
        (runs, "norm", {"pairs": "all"}, MessageError, "norm compares no layers"),
        (runs[:1], "svcca", {"pairs": "all"}, CaptureError, "at least two traces, and not 1"),
        (runs, "svcca", {"pairs": "some"}, CaptureError, "pairs is 'all' or 'first'"),
        (runs, "svcca", {"pairs": "all", "modules": "fc"}, CaptureError, "chosen in the subscriber"),
    ]
    for traces, spec, asked, error, sentence in wrong:
        with pytest.raises(error, match=sentence):
            batch(traces, spec, tmp_path / "out", workers=0, **asked)
