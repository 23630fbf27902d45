"""Numbers that a capture's dtype cannot hold are counted, and the trace tells how many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tracer
from tests.examples import examples
from tracer import Capture
from tracer.observing.capture import DTYPES
from tracer.observing.overflows import Overflows
from tracereel.main import main

EDGES = (0.0, 1e-40, 65504.0, 65519.9, 65520.0, 65536.0, 3.3895e38, 3.3961e38, 3.4028e38, 3.4029e38, 1e300)


@settings(max_examples=examples(200))
@given(
    numbers=st.lists(
        st.one_of(st.floats(), st.sampled_from(EDGES), st.sampled_from(EDGES).map(lambda x: -x)), max_size=9
    ),
    source=st.sampled_from(["float32", "float64"]),
    target=st.sampled_from(["float16", "float32"]),
)
def test_overflows_are_counted_as_numpy_casts(numbers: list[float], source: str, target: str) -> None:
    """What is finite before the cast and infinite after it is counted, and nothing else."""
    with np.errstate(over="ignore"):
        before = np.array(numbers).astype(source)
        after = before.astype(target)
    expected = int((np.isfinite(before) & ~np.isfinite(after)).sum())
    overflows, one = Overflows(), torch.from_numpy(before)
    for _ in range(2):
        overflows.count(("weights", "fc", "eval", "0"), one, one.to(DTYPES[target]))
    told = {"kind": "weights", "module": "fc", "tag": "eval", "leaf": "0", "dtype": target}
    assert list(overflows.told()) == ([{**told, "count": 2 * expected, "of": 2 * len(numbers)}] if expected else [])


@pytest.mark.parametrize(
    ("source", "target", "numbers", "expected"),
    [
        (torch.float32, torch.bfloat16, [3.3895e38, 3.4e38, -3.4e38, torch.inf], 2),
        (torch.bfloat16, torch.float16, [65280.0, 65536.0, -1e38, torch.nan], 2),
        (torch.float8_e5m2, torch.float16, [57344.0, -57344.0], 0),
        (torch.float16, torch.bfloat16, [65504.0, torch.inf], 0),
    ],
)
def test_overflows_of_other_dtypes(
    source: torch.dtype, target: torch.dtype, numbers: list[float], expected: int
) -> None:
    """The same between the dtypes that numpy does not have."""
    overflows, before = Overflows(), torch.tensor(numbers).to(source)
    overflows.count(("loss", None, "default", ""), before, before.to(target))
    assert [one["count"] for one in overflows.told()] == [expected] * bool(expected)


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_a_trace_tells_what_overflowed(suffix: str, tmp_path: Path) -> None:
    """A note for each stream with how many of its numbers overflowed; `trace info` shows it, a copy keeps it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1e5, 1.0], [torch.inf, 1.0]]))
        model[0].bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    path = tmp_path / f"run.{suffix}"
    x = torch.tensor([[1.0, 0.0], [0.1, 0.0], [-9.0, 5.0]])
    captures = [
        Capture(kinds=["weights"], dtype="float16"),
        Capture(kinds=["activations"], modules="0", dtype="float16", reduce=lambda x: x[:, 0]),
        Capture(kinds=["loss", "biases"], dtype="float16"),
    ]
    with tracer.record(path, model, optimizer, capture=captures, strict=True) as run:
        for _ in range(3):
            model(x)
            run.log("loss", torch.tensor(1e6))
            optimizer.step()
    CliRunner().invoke(main, ["convert", str(path), str(tmp_path / "copy.zarr")], catch_exceptions=False)
    streams = {
        ("weights", "0"): (3, 12),  # 1e5 in each step; inf was there before
        ("activations", "0"): (6, 9),  # 1e5 and -9e5, but not 1e4
    }
    for one in (path, tmp_path / "copy.zarr"):
        with tracer.open(one) as trace:
            found = [note["overflowed"] for note in trace.notes if "overflowed" in note]
            assert [float(m.data) for m in trace.messages(kinds=["loss"]) if m.data is not None] == [1e6] * 3
        assert {(n["kind"], n["module"]): (n["count"], n["of"]) for n in found} == streams
        assert {(n["tag"], n["leaf"], n["dtype"]) for n in found} == {("default", "", "float16")}
    told = CliRunner().invoke(main, ["info", str(path)], catch_exceptions=False).output
    said = " ".join(told.split())
    assert "weights of '0': 3 of 12 numbers were beyond float16 and are recorded as infinite" in said
    assert "activations of '0': 6 of 9 numbers were beyond float16 and are recorded as infinite" in said
