"""Ranks: the parts that they write are put together, and what is damaged or makes no sense never is."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tracer
from tests.recording.ranks import values
from tracer import ModuleMessage, TraceReader, TraceWriter
from tracer.errors import TraceCorruptError, TraceError
from tracer.format.names import part_name
from tracer.format.placement import Placement, cover
from tracer.trace import assembly
from tracereel.main import main


def write_parts(
    path: Path,
    boxes: list[tuple[list[int], list[int]]],
    shape: list[int],
    *,
    steps: int = 2,
    missing: int | None = None,
) -> np.ndarray[Any, Any]:
    """A trace whose ranks hold these parts (offsets, sizes) of a matrix of the numbers from 0; the matrix.

    `missing`: a rank that was killed before its last step.
    """
    whole = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    for rank, (offsets, sizes) in enumerate(boxes):
        at = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        placement = {"replicas": [rank], "shape": shape, "offsets": offsets, "sizes": sizes}
        header = {"ranks": [*range(len(boxes))]}
        with TraceWriter(path, header=header, part=part_name(rank)) as writer:
            for step in range(steps - (rank == missing)):
                where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
                data = whole[at] + 100 * step
                where["sampling"] = {"placement": placement}
                writer.write(ModuleMessage(kind="weights", module="fc", data=data.contiguous(), **where))
    found: np.ndarray[Any, Any] = whole.numpy()
    return found


@pytest.mark.parametrize("lost", ["missing", "torn"])
def test_a_copy_says_what_the_original_had_lost(tmp_path: Path, lost: str) -> None:
    """The ranks that can be read are copied; the command tells, exits with 3, and the copy, of one part, has a note."""
    path, copy = tmp_path / "run.zarr", tmp_path / "copy.h5"
    write_parts(path, [([0, 0], [2, 3]), ([2, 0], [1, 3])], [3, 3])
    if lost == "missing":
        shutil.rmtree(path / "rank1")
    else:
        (journal,) = (path / "rank1" / "journal" / "c").glob("*/*")
        journal.write_bytes(journal.read_bytes()[:100])
    sentence = "nothing of rank 1" if lost == "missing" else "rank 1 cannot be read"
    told = CliRunner().invoke(main, ["cat", str(path)])
    assert (told.exit_code, sentence in told.stderr) == (0, True), told.output
    told = CliRunner().invoke(main, ["convert", str(path), str(copy)])
    assert (told.exit_code, sentence in told.stderr) == (3, True), told.output
    with TraceReader(copy) as reader:
        notes = [note["problem"]["why"] for note in reader.notes if "problem" in note]
        assert any(sentence in why for why in notes)
        assert len(reader) == 2
    told = CliRunner().invoke(main, ["convert", "--json", str(path), str(tmp_path / "other.zarr")])
    assert (told.exit_code, json.loads(told.stdout)["problems"]) == (3, notes), told.output


def splits(shape: list[int], generator: np.random.Generator) -> Iterator[tuple[list[int], list[int]]]:
    """A random grid of blocks, some empty."""
    cuts = [sorted([0, size, *generator.integers(0, size + 1, 2).tolist()]) for size in shape]
    spans = [list(itertools.pairwise(one)) for one in cuts]
    for block in np.ndindex(*(len(one) for one in spans)):
        chosen = [spans[axis][place] for axis, place in enumerate(block)]
        yield [begin for begin, _ in chosen], [end - begin for begin, end in chosen]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))])
def test_any_blocks_are_put_together(tmp_path: Path, seed: int) -> None:
    """Random grids of up to 9 ranks, in any order, empty blocks and copies among them; read in every way."""
    generator = np.random.default_rng(seed)
    shape = generator.integers(1, 7, 2).tolist()
    boxes = list(splits(shape, generator))
    boxes = [boxes[place] for place in generator.permutation(len(boxes))]
    path = tmp_path / "run.zarr"
    whole = write_parts(path, boxes, shape)
    with TraceReader(path) as reader:
        assert reader.problems == []
        steps, data = reader.array("weights", "fc")
        assert steps.tolist() == [0, 1]
        assert isinstance(data, np.ndarray)
        np.testing.assert_array_equal(data, [whole, whole + 100])
        for batch in reader.arrays():
            np.testing.assert_array_equal(batch.data[0], whole + 100 * reader.journal[batch.rows[0], 5])
        assert len(reader) == 2
    last = len(boxes) - 1
    with TraceReader(path, ranks=[last]) as reader:
        assert [(one.rank, one.global_step) for one in reader] == [(last, 0), (last, 1)]
    with TraceReader(path, assemble=False) as reader:
        assert len(reader) == 2 * len(boxes)


def test_ranks_that_change_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has parts of its own, as after restarts with more or fewer ranks; in several goes."""
    monkeypatch.setattr(assembly, "TABLE", 50)
    path, size, steps = tmp_path / "run.zarr", 12, 30
    with TraceWriter(path) as writer:
        for step in range(steps):
            cuts = [0, *range(1 + step % 5, size, 1 + step % 5), size]
            for rank, (begin, end) in enumerate(itertools.pairwise(cuts)):
                placement = {"replicas": [rank], "shape": [size], "offsets": [begin], "sizes": [end - begin]}
                where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
                data = torch.arange(float(begin), float(end)) + 100 * step
                where["sampling"] = {"placement": placement}
                writer.write(ModuleMessage(kind="weights", module="fc", data=data, **where))
    with TraceReader(path) as reader:
        assert reader.problems == []
        found, data = reader.array("weights", "fc")
        assert found.tolist() == [*range(steps)]
        np.testing.assert_array_equal(data, np.arange(12.0) + 100 * np.arange(steps)[:, None])


def test_a_step_that_a_killed_rank_did_not_finish(tmp_path: Path) -> None:
    """It is left out and told, and the steps before it are whole."""
    path = tmp_path / "run.zarr"
    write_parts(path, [([0, 0], [3, 4]), ([3, 0], [2, 4])], [5, 4], steps=3, missing=1)
    with TraceReader(path) as reader:
        assert reader.array("weights", "fc")[0].tolist() == [0, 1]
        assert reader.problems == [
            f"{path}: 1 messages of weights are of distributed tensors of which not all ranks' parts are there"
        ]
    with TraceReader(path, assemble=False) as reader:
        assert len(reader) == 5


@pytest.mark.parametrize(
    "boxes", [[([0, 0], [3, 4]), ([2, 0], [3, 4])], [([0, 0], [3, 4])], [([0, 0], [5, 2]), ([0, 0], [3, 4])]]
)
def test_overlaps_and_gaps_are_never_put_together(tmp_path: Path, boxes: list[tuple[list[int], list[int]]]) -> None:
    """They stay parts, and a problem says so."""
    path = tmp_path / "run.zarr"
    write_parts(path, boxes, [5, 4])
    with TraceReader(path) as reader:
        assert len(reader) == 2 * len(boxes)
        assert "not all ranks' parts are there" in reader.problems[0]


HOSTILE: list[Any] = [
    *(3, [], "Shard(0)", {}, {"replicas": []}, {"replicas": [-1]}, {"replicas": [True]}, {"replicas": "01"}),
    {"replicas": [0], "shape": [5, 4], "offsets": [-1, 0], "sizes": [3, 4]},
    {"replicas": [0], "shape": [5, 4], "offsets": [3, 0], "sizes": [3, 4]},
    {"replicas": [0], "shape": [5, 4], "offsets": [0], "sizes": [3, 4]},
    {"replicas": [0], "shape": [5, 4], "offsets": [0, 0]},
    {"replicas": [0], "offsets": [0, 0], "sizes": [3, 4]},
    {"replicas": [0], "shape": [2**40, 2**40], "offsets": [0, 0], "sizes": [3, 4]},
    {"replicas": [0], "shape": [1.5, 4], "offsets": [0, 0], "sizes": [1, 4]},
    {"replicas": [0], "shape": [1] * 65, "offsets": [0] * 65, "sizes": [1] * 65},
]


@pytest.mark.parametrize("placement", HOSTILE, ids=repr)
def test_placements_that_make_no_sense_are_damage(tmp_path: Path, placement: Any) -> None:
    """A typed error when the trace is opened; `verify` names it."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        where: dict[str, Any] = {"global_step": 0, "train_step": 0, "epoch": 0}
        where["sampling"] = {"placement": placement}
        writer.write(ModuleMessage(kind="weights", module="fc", data=torch.ones(3, 4), **where))
    with pytest.raises(TraceCorruptError, match="a declaration is damaged"):
        TraceReader(path)
    assert {one.check for one in tracer.verify(path).problems} >= {"declaration"}


def test_a_huge_whole_takes_no_memory(tmp_path: Path) -> None:
    """A part that says it is one of 2**59 elements, or lies about its own size, allocates nothing."""
    path = tmp_path / "run.zarr"
    for rank, size in enumerate((2**58, 2**58)):
        placement = {"replicas": [rank], "shape": [2**59], "offsets": [rank * size], "sizes": [size]}
        with TraceWriter(path, header={"ranks": [0, 1]}, part=part_name(rank)) as writer:
            where: dict[str, Any] = {"global_step": 0, "train_step": 0, "epoch": 0, "rank": rank}
            where["sampling"] = {"placement": placement}
            writer.write(ModuleMessage(kind="weights", module="fc", data=torch.ones(8), **where))
    with TraceReader(path) as reader:
        assert [one.data.shape for one in reader if one.data is not None] == [(8,), (8,)]
        assert "not all ranks' parts are there" in reader.problems[0]


def test_parts_in_the_same_place_are_refused(tmp_path: Path) -> None:
    """A small pool that many parts claim would be blown up to a large whole."""
    path = tmp_path / "run.h5"
    write_parts(path, [([0], [4]), ([4], [4])], [8], steps=1)
    with TraceReader(path) as reader:
        recorded = reader._rows().data.merged.recorded
        recorded[1] = recorded[0]
        with pytest.raises(TraceCorruptError, match="in the same place of a pool"):
            next(iter(reader.messages()))


def test_too_many_parts_are_not_put_together() -> None:
    """A bound on the work: no run has so many ranks that hold parts of one tensor."""
    assert cover([5000], [((one,), (1,)) for one in range(5000)]) is None
    assert cover([4096], [((one,), (1,)) for one in range(4096)]) == [*range(4096)]


def test_samples_of_parts_stay_parts(tmp_path: Path) -> None:
    """What was chosen among the elements of each part is not a part of the whole."""
    path = tmp_path / "run.zarr"
    for rank in (0, 1):
        placement = {"replicas": [rank], "shape": [8], "offsets": [4 * rank], "sizes": [4]}
        for_stream = {"placement": placement, "shape": [4], "elements": {"count": 2, "of": 4, "seed": 0}}
        with TraceWriter(path, header={"ranks": [0, 1]}, part=part_name(rank)) as writer:
            where: dict[str, Any] = {"global_step": 0, "train_step": 0, "epoch": 0, "rank": rank}
            writer.write(ModuleMessage(kind="weights", module="fc", data=torch.ones(2), sampling=for_stream, **where))
    with TraceReader(path) as reader:
        assert (len(reader), reader.problems) == (2, [])


def test_placements_round_trip() -> None:
    """What is written is what is read; the rest of it is for people."""
    told = {"replicas": [3, 1], "shape": [5, 4], "offsets": [3, 0], "sizes": [2, 4], "mesh": {"names": ["x"]}}
    assert Placement.parse(told) == Placement((1, 3), (5, 4), (3, 0), (2, 4))
    assert Placement.parse({"replicas": [0, 1]}) == Placement((0, 1))


def test_an_error_is_of_this_project(tmp_path: Path) -> None:
    """Of a trace whose other rank is damaged, one rank is still read."""
    path = tmp_path / "run.h5"
    write_parts(path, [([0], [4]), ([4], [4])], [8])
    other = tmp_path / "run.rank1.h5"
    other.write_bytes(other.read_bytes()[:100])
    with TraceReader(path, ranks=[0]) as reader:
        assert [one.shape for one in values(reader, "weights", "fc")] == [(4,), (4,)]
        assert reader.problems
    path.unlink()
    with pytest.raises(TraceError):
        TraceReader(path)
