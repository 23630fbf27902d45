"""Tables of answers that are made without pandas are those that pyarrow makes by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analyze.batching import parquet
from analyze.batching.engines import environment
from analyze.batching.parquet import table_of
from analyze.tables.columns import COLUMNS, WHOLE
from analyze.tables.writing import arrow_table
from tests import processes
from tracer import NetworkMessage, TraceWriter

TEXTS = ["ä", "", "b\udcff", "x", "y", "ä", "z'\n", "🙂"]
NUMBERS: dict[str, Any] = {
    "array": np.array([1.0, np.nan, np.inf, -0.0, 5e-324, -np.inf, 3.0, 4.0]),
    "list": [1.0, float("nan"), 2.5, -0.0, 3.0, 4.0, 5.0, 6.0],
    "nulls": [None, 1.0, float("nan"), None, -0.0, 2.0, 3.0, None],
}


@pytest.mark.parametrize("rows", [0, 1, 3, 8])
@pytest.mark.parametrize("values", NUMBERS)
def test_a_table_is_the_one_that_pyarrow_makes(values: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of any characters, whole numbers, numbers and nulls, in one array or in several: the same to the bit."""
    columns: dict[str, Any] = dict.fromkeys((*COLUMNS, "spec"), TEXTS[:rows])
    columns |= {name: np.arange(8)[:rows] * 7 - 2**62 for name in WHOLE}
    columns |= {"value": NUMBERS[values][:rows], "rank": list(range(8))[:rows]}
    expected = arrow_table(columns, "spec")
    for most in (3, 1 << 20):
        monkeypatch.setattr(parquet, "ROWS", most)
        found = table_of(columns, "spec")
        assert found.schema.equals(expected.schema)
        assert repr(found.to_pylist()) == repr(expected.to_pylist())
        found.validate(full=True)


def test_a_batch_imports_no_pandas(tmp_path: Path) -> None:
    """Neither to compute answers, nor to write them, nor to give them as rows."""
    with TraceWriter(tmp_path / "run.zarr") as writer:
        writer.write(NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.tensor(1.0)))
    program = f"""
import sys, analyze
results = analyze.batch({str(tmp_path / "run.zarr")!r}, "loss", {str(tmp_path / "out")!r})
print(len(list(results)), results.computed, "pandas" in sys.modules)
"""
    done = processes.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "1 1 False\n"
