"""The golden traces of every format version: this release and every later one must read them as they were meant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import tracer

SAMPLES = sorted((Path(__file__).parents[2] / "sample_traces").glob("v*/*.json"))
TRACES = [(path.with_suffix(suffix), path) for path in SAMPLES for suffix in (".zarr", ".h5")]


def expected_tensor(meant: dict[str, Any]) -> torch.Tensor:
    """The tensor that a line of JSON stands for."""
    dtype = getattr(torch, meant["dtype"])
    values = [complex(*v) if isinstance(v, list) else float(v) if isinstance(v, str) else v for v in meant["values"]]
    return torch.tensor(values, dtype=dtype).reshape(meant["shape"])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal down to NaN and the sign of zero."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return (
        one.contiguous().view(-1).view(torch.uint8).tolist() == other.contiguous().view(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize(("trace", "meaning"), TRACES, ids=[f"{t.parent.name}/{t.name}" for t, _ in TRACES])
def test_sample_reads_as_it_was_meant(trace: Path, meaning: Path) -> None:
    """Every message of a golden trace has the place, the fields and the very bits that its JSON says."""
    meant = json.loads(meaning.read_text())
    if trace.suffix == ".h5" and h5py.version.hdf5_version_tuple < (2,):
        pytest.skip("HDF5 2.0 wrote this sample, in formats that no library before it reads")
    with tracer.open(trace) as reader:
        assert reader.status == "finished"
        messages = list(reader.messages())
    assert len(messages) == len(meant)
    for message, expected in zip(messages, meant, strict=True):
        for field in ("kind", "global_step", "train_step", "epoch", "tag", "call", "leaf"):
            assert getattr(message, field) == expected[field]
        assert (type(message).__name__, message.key) == (expected["class"], expected["module"])
        if expected["dtype"] is None:
            assert message.data is None
        else:
            assert message.data is not None
            assert same_bits(message.data, expected_tensor(expected)), expected


def test_there_are_samples_of_this_version() -> None:
    """The version that this release writes has its samples, in both formats, each under 200 kB."""
    from tracer.format.names import VERSION

    assert {meaning.parent.name for meaning in SAMPLES} >= {f"v{VERSION}"}
    for trace, _ in TRACES:
        files = [trace] if trace.is_file() else [path for path in trace.rglob("*") if path.is_file()]
        assert 0 < sum(path.stat().st_size for path in files) < 200_000, trace


def test_samples_hold_what_they_are_for() -> None:
    """The samples contain NaN, infinities, empty tensors, events, calls, leaves, tags and every dtype."""
    lines = [line for path in SAMPLES for line in json.loads(path.read_text())]
    assert {"bool", "int64", "float16", "bfloat16", "complex64", "complex128"} <= {line["dtype"] for line in lines}
    assert any(line["shape"] == [0, 2] for line in lines)
    assert any(line["shape"] == [] for line in lines)
    assert any("nan" in (line["values"] or ()) for line in lines)
    assert any(line["call"] and line["leaf"] and line["tag"] == "probe" for line in lines)
    assert None in {line["dtype"] for line in lines}


def test_making_samples_again_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script does not touch samples that are there."""
    monkeypatch.syspath_prepend(str(SAMPLES[0].parent.parent))
    import make

    before = SAMPLES[0].read_bytes()
    assert make.main() == 1
    assert "never made again" in capsys.readouterr().err
    assert SAMPLES[0].read_bytes() == before
    sys.modules.pop("make", None)
