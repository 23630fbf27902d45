"""Of messages that are read together, right are those of which no byte is changed, or that cannot be told from them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tracer.format.journal import NONE, Column
from tracer.messaging.messages import ModuleMessage
from tracer.stores.opening import open_parts
from tracer.trace.writer import TraceWriter
from tracer.upkeep import survey_data
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_data import pieces, touches_damage, unread

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


@pytest.mark.parametrize("run_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("changed", [0, 3, 40])
@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_what_is_right(
    tmp_path: Path, suffix: str, changed: int, run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any messages of a pool, in the order of their places, a few or many read at once, some without a checksum."""
    monkeypatch.setattr(survey_data, "RUN_BYTES", run_bytes)
    path = write(tmp_path / f"run{suffix}")
    rng = random.Random(changed)
    wrong = set(rng.sample([number for number in range(COUNT) if size(number)], changed))
    for number in wrong:
        change(path, number)
    for share in (1.0, 0.4):
        [(name, store)], _ = open_parts(path, damaged=True)
        survey = Survey(path, name, store)
        array = survey.pool(0)
        assert array is not None
        [window] = survey.journal.windows()
        chosen = [number for number in range(COUNT) if rng.random() < share]
        rows = window.journal[chosen].copy()
        unchecked = np.array([rng.random() < 0.2 for _ in chosen])
        rows[unchecked, Column.CRC32C] = NONE
        found = np.zeros(len(chosen), bool)
        last = 0
        for piece in pieces(survey.chunks, array, rows):
            assert piece.begin == last
            last, at = piece.end, 0
            found[piece.begin : piece.end] = piece.right
            for number, right in zip(chosen[piece.begin : piece.end], piece.right.tolist(), strict=True):
                if right and (number not in wrong or not unchecked[chosen.index(number)]):
                    expected = elements(number).numpy()
                    assert (piece.elements[at : at + size(number)] == expected).all()
                at += size(number)
        assert last == len(chosen)
        offsets = window.journal[:, Column.OFFSET].tolist()
        bad = {(offsets[number] + size(number) - 1) // CHUNK for number in wrong} if suffix == ".zarr" else set()
        ends = [offset + size(number) for number, offset in enumerate(offsets)]
        mine = [
            {*range(offsets[number] // CHUNK, (ends[number] - 1) // CHUNK + 1)} if size(number) else set()
            for number in chosen
        ]
        # where a message has no checksum, that of its chunks tells, if they have one
        expected_right = [
            (not bad & touched) if is_unchecked else number not in wrong
            for number, is_unchecked, touched in zip(chosen, unchecked.tolist(), mine, strict=True)
        ]
        assert found.tolist() == expected_right
        for number in unread(array, rows):
            survey.chunks.read(array, number)
        assert touches_damage(array, rows).tolist() == [bool(bad & touched) for touched in mine]
        store.close()
