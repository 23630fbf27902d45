"""Of messages that are read together, right are those of which no byte is changed, or that cannot be told from them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tracer.format.journal import NONE, Column
from tracer.messaging.messages import ModuleMessage
from tracer.stores.opening import open_parts
from tracer.trace.writer import TraceWriter
from tracer.upkeep.damage import DAMAGED
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_data import SurveyedData, readable

COUNT = 150
CHUNK = 32
"""Elements of a chunk."""


def size(number: int) -> int:
    """Elements of a message: runs of one size, others each of its own, and some without any."""
    return 4 if number < 40 else 0 if number % 29 == 0 else 1 + number % 50


def elements(number: int) -> torch.Tensor:
    """Of a message, unlike those of all others."""
    return torch.arange(size(number), dtype=torch.float32) + 1000 * number + 0.5


def write(path: Path) -> Path:
    """Messages in one pool."""
    with TraceWriter(path, chunk_bytes=4 * CHUNK) as writer:
        for number in range(COUNT):
            counters = {"global_step": number, "train_step": 0, "epoch": 0}
            writer.write(ModuleMessage(kind="biases", module="fc", data=elements(number), **counters))
    return path


def change(path: Path, number: int) -> None:
    """A bit of a message, in the file that it is in."""
    needle = elements(number).numpy().tobytes()
    for file in [path] if path.is_file() else sorted((path / "rank0/pools").rglob("c/0")):
        data = bytearray(file.read_bytes())
        # a message may lie in two chunks, and its last element then in the second one
        place = data.find(needle[-4:])
        assert place >= 0
        data[place] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize(("changed", "range_bytes"), [(0, 300), (3, 1), (3, 1 << 20), (40, 300)])
@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_what_is_right(
    tmp_path: Path, suffix: str, changed: int, range_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any messages of a pool, a few or many read at once, some without a checksum."""
    monkeypatch.setattr("tracer.trace.data.RANGE_BYTES", range_bytes)
    path = write(tmp_path / f"run{suffix}")
    rng = random.Random(changed)
    wrong = set(rng.sample([number for number in range(COUNT) if size(number)], changed))
    for number in wrong:
        change(path, number)
    for share in (1.0, 0.4):
        [(name, store)], _ = open_parts(path, damaged=True)
        survey = Survey(path, name, store)
        reader, lost = readable([survey])
        merged = reader._rows().data.merged
        rows = merged.journal.copy()
        chosen = [number for number in range(COUNT) if rng.random() < share]
        unchecked = {number for number in chosen if rng.random() < 0.2}
        rows[list(unchecked), Column.CRC32C] = NONE
        data = SurveyedData(lost, path, replace(merged, journal=rows), [store], True)
        found = {}
        for group in data.read(np.array(chosen), None).data:
            found |= zip(group.rows.tolist(), group.data, strict=True)
        offsets = rows[:, Column.OFFSET].tolist()
        ends = [offset + size(number) for number, offset in enumerate(offsets)]
        # where a message has no checksum, that of its chunks tells, if they have one
        bad = {(ends[number] - 1) // CHUNK for number in wrong} if suffix == ".zarr" else set()
        touched = [{*range(offsets[k] // CHUNK, (ends[k] - 1) // CHUNK + 1)} if size(k) else set() for k in chosen]
        right = [
            not (bad & chunks) if number in unchecked else number not in wrong
            for number, chunks in zip(chosen, touched, strict=True)
        ]
        assert [place in found for place in range(len(chosen))] == right
        for place, elements_found in found.items():
            if chosen[place] not in wrong:
                assert (elements_found == elements(chosen[place]).numpy()).all()
        array = survey.array_of(f"{name}/pools/biases/float32")
        assert array is not None
        for number in range(len(array.state)):
            survey.chunks.read(array, *array.rows_of(number))
        assert array.touching(rows[chosen], DAMAGED).tolist() == [bool(bad & chunks) for chunks in touched]
        lost.tell()
        assert (len(survey.problems) > 0) == (len(bad) > 0 or not all(right))
        store.close()
