"""Traces that an earlier release wrote are read as it read them: message for message, whatever became of the code.

``old_traces/`` has an archive of them, the digests of what that release read (commit 5b16f7c), and the script that made
both. They are never made again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tracer
from tests.trace.old_traces.make_old_traces import FORMATS, digest, lines, read_digest, unpack
from tracer.messaging.messages import DATA_KINDS

FOLDER = Path(__file__).parent / "old_traces"
DIGESTS = {path.name.removesuffix(".jsonl.gz"): path for path in sorted((FOLDER / "digests").glob("*.jsonl.gz"))}
LOST = {"rank-missing.zarr", "rank-missing.h5", "parts.zarr", "parts.h5", "damaged.zarr"}

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the traces, unpacked."""
    folder = tmp_path_factory.mktemp("old")
    unpack(FOLDER / "old_traces.tar.xz", folder)
    yield folder
    shutil.rmtree(folder)


def messages_in(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a digest that stand for a message."""
    return [line for line in told if "kind" in line]


def trained(told: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The first and the last step and epoch of the training; that release counted what came after its end, too."""
    unended = [note["unended"]["global_step"] for note in told[0]["info"]["notes"] if "unended" in note]
    training = [line for line in messages_in(told) if line["tag"] == "default" and line["global_step"] not in unended]
    steps, epochs = ([line[name] for line in training] for name in ("global_step", "epoch"))
    return {"steps": [min(steps), max(steps)], "epochs": [min(epochs), max(epochs)]} if training else {}


@pytest.mark.parametrize("name", DIGESTS)
def test_an_old_trace_is_read_as_it_was(name: str, traces: Path) -> None:
    """Header, notes, status, streams, verdict, each message, and what else is made of them: all that was told then."""
    expected = read_digest(DIGESTS[name])
    whole = "run.zarr" if name == "damaged.zarr" else name  # a copy, of which no message can be read
    expected[0]["info"].update(trained(read_digest(DIGESTS[whole])))
    found = list(digest(traces / name))
    for line, other in zip(found, expected, strict=False):
        assert line == other
    assert len(found) == len(expected)


@pytest.mark.parametrize("name", DIGESTS)
def test_an_old_trace_is_found_intact(name: str, traces: Path) -> None:
    """But for those of which something was taken away."""
    report = tracer.verify(traces / name)
    assert report.intact is (name not in LOST), report.problems
    assert report.complete is (report.intact and not re.match("killed|recovered", name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DIGESTS if name != "damaged.zarr"])
def test_an_old_trace_is_copied_into_the_other_format(name: str, traces: Path, tmp_path: Path) -> None:
    """Message for message; ranks and attempts are put together, and parts of tensors stay parts."""
    expected = messages_in(read_digest(DIGESTS[name]))
    copy = tmp_path / f"copy{FORMATS[FORMATS.index(Path(name).suffix) - 1]}"
    tracer.convert(traces / name, copy)
    with tracer.open(copy) as reader:
        assert list(lines(reader.messages())) == expected
    assert tracer.verify(copy).intact


def test_old_traces_hold_what_they_are_for() -> None:
    """Both formats; every kind, dtypes, endings, sampling and placement, notes, attempts, ranks, empty and 0-d data."""
    told = {name: read_digest(path) for name, path in DIGESTS.items()}
    assert {Path(name).stem for name in DIGESTS if name.endswith(".h5")} == {
        Path(name).stem for name in DIGESTS if name.endswith(".zarr") and name != "damaged.zarr"
    }
    messages = [line for one in told.values() for line in messages_in(one)]
    later = {"loss_terms", "sample_ids", "eval_mode", "train_mode", "gradient_norms"}
    assert {line["kind"] for line in messages} >= {*DATA_KINDS} - later
    dtypes = {str(line["dtype"]).partition("_")[0] for line in messages}
    assert dtypes >= {"bool", "int8", "uint64", "float16", "bfloat16", "float64", "float8", "complex32", "complex128"}
    assert {(), (3, 0)} <= {tuple(line["shape"]) for line in messages if line["shape"] is not None}
    assert {line["tag"] for line in messages} >= {"default", "eval", "probe", "augmented"}
    infos = [one[0]["info"] for one in told.values()]
    assert {info["status"].partition(":")[0] for info in infos} == {"finished", "failed", "interrupted"}
    assert {len(info["attempts"]) for info in infos} == {1, 2, 3}
    assert {tuple(info["ranks"]) for info in infos} == {(0,), (0, 1), (0, 1, 2), (0, 2)}
    notes = {key for info in infos for note in info["notes"] for key in note}
    assert notes >= {"indices", "problem", "dropped", "silent", "stopped", "converted", "recovered"}
    sampling = {key for one in told.values() for stream in one[1]["streams"] for key in stream["sampling"] or ()}
    assert sampling >= {"rows", "positions", "elements", "reduce", "dtype", "placement", "shape"}
