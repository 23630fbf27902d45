"""Numbers of every dtype, and stores that are read by their format's own library, for the tests of stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

FORMATS = (".zarr", ".h5")
DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


every_format = pytest.mark.parametrize("suffix", FORMATS)


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0, *, below: int = 120) -> np.ndarray[Any, Any]:
    """Numbers of any dtype that differ from place to place; of fewer values they can be compressed."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    values = rng.integers(0, below, shape).astype(dtype)
    return values * np.array(1 - 2j).astype(dtype) if dtype.startswith("complex") else values


def plainly(path: Path, name: str) -> np.ndarray[Any, Any]:
    """An array as the format's own library reads it."""
    if path.suffix == ".zarr":
        return np.asarray(zarr.open_group(path, mode="r")[name][...])
    with h5py.File(path, "r") as file:
        return np.asarray(file[name][...])


def recorded_in(path: Path) -> Path:
    """The Zarr trace in which the trace at a path is recorded: an HDF5 file is made when it is closed."""
    return path if path.suffix == ".zarr" else path.with_name(f"{path.name}.zarr")
