"""Disks of which every write fails from some moment on: the training ends well, and acknowledged data is there.

The failing calls are those of the C library, so HDF5's own writes fail, too (`tests/faults/failing_calls.c`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import failing
from tracer import TraceReader
from tracer.errors import TracerError
from tracer.upkeep.verify import verify

VARIANTS = [
    (".h5", "none", False),
    (".h5", "none", True),
    (".h5", "zstd", False),
    (".h5", "zstd", True),
    (".zarr", "none", True),
    (".zarr", "zstd", False),
]


def messages(path: Path) -> list[tuple[Any, ...]]:
    """What the messages of a trace say; of tensors their bytes."""
    with TraceReader(path) as reader:
        return [
            (one.kind, one.key, one.global_step, one.call, None if one.data is None else one.data.numpy().tobytes())
            for one in reader.messages()
        ]


def losses(folder: Path) -> list[float]:
    """The losses of the same training without a recorder."""
    torch.manual_seed(0)
    done = failing.run("recording.py", folder, recorded=False, name="", first=0, stop=0, error="EIO")
    assert done.code == 0, done.errors
    found: list[float] = done.said["losses"]
    return found


def check(done: failing.Done, path: Path, whole: list[tuple[Any, ...]], right: list[float]) -> None:
    """Check how a training ended whose disk failed, and what is there of its trace."""
    assert done.code in (0, 1), f"the process ended with {done.code}: {done.errors}"
    if done.code == 0:
        assert done.said["losses"] == right
        # a warning, unless the failing call was one of little use, such as the removal of a temporary file
        said = "incomplete" in done.errors or "no longer listens" in done.errors
        assert said or messages(path) == whole
    else:  # the trace could not be begun, which the documentation calls an error before the training
        assert "began" not in done.said
        assert "TraceError: cannot write" in done.errors
    safe = done.said.get("safe", 0)
    try:
        found = messages(path)
    except TracerError:
        assert safe == 0
        return
    assert len(found) >= safe
    assert found == whole[: len(found)]
    if done.code == 0:  # nor can the file of a trace that was never begun be removed while each write fails
        assert verify(path).problems == []


def sweep(folder: Path, variant: tuple[str, str, bool], error: str, chosen: Any, lasting: bool = True) -> int:
    """Record with the first failing call at each chosen number; returns how many recordings there were."""
    suffix, compression, durable = variant
    settings = {"recorded": True, "name": f"run{suffix}", "compression": compression, "durable": durable}
    (folder / "whole").mkdir()
    done = failing.run("recording.py", folder / "whole", first=0, stop=0, error=error, **settings)
    assert (done.code, done.errors) == (0, "")
    whole, right = messages(folder / "whole" / f"run{suffix}"), losses(folder / "whole")
    assert done.said["safe"] == len(whole) > 50
    assert done.said["losses"] == right
    recorded = 0
    for first in chosen(done.said["calls"]):
        at = folder / str(first)
        at.mkdir()
        stop = failing.FOR_EVER if lasting else first + 1
        done = failing.run("recording.py", at, first=first, stop=stop, error=error, **settings)
        check(done, at / f"run{suffix}", whole, right)
        recorded += 1
    return recorded


def some(calls: int) -> Iterator[int]:
    """Some of the calls, with one from each of four parts."""
    draw = random.Random(calls)
    return (draw.randrange(calls * part // 4, calls * (part + 1) // 4) for part in range(4))


@pytest.mark.parametrize(
    ("variant", "error"),
    # the slow suite lets every call of every variant fail
    [(VARIANTS[3], "EIO"), (VARIANTS[4], "ENOSPC"), (VARIANTS[5], "EROFS")],
)
def test_every_write_fails_from_some_moment_on(tmp_path: Path, variant: tuple[str, str, bool], error: str) -> None:
    """The process lives, trains to the end with the right losses, and what was acknowledged is there, undamaged."""
    assert sweep(tmp_path, variant, error, some) == 4


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EROFS"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_write_fails(tmp_path: Path, variant: tuple[str, str, bool], error: str, lasting: bool) -> None:
    """The same for each call of a whole recording, which fails alone or as the first of all."""
    assert sweep(tmp_path, variant, error, range, lasting) > 100
