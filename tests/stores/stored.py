"""Numbers of every dtype, and stores that are read by their format's own library, for the tests of stores."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from tracer.stores.codecs import HDF5_FILTER

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
    return all_plainly(path, [name])[name]


def all_plainly(path: Path, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays as the format's own library reads them, with the plugin that HDF5 needs for those that are compressed."""
    if path.suffix == ".zarr":
        root: Any = zarr.open_group(path, mode="r")
        return {name: np.asarray(root[name][...]) for name in names}
    with h5py.File(path, "r") as file:
        packed = any(file[name].id.get_create_plist().get_nfilters() for name in names)
    if packed:
        import hdf5plugin

        assert hdf5plugin.BLOSC_ID == HDF5_FILTER
        gc.collect()  # a filter is replaced only where no open file uses it, and failures keep files in their frames
        hdf5plugin.register("blosc", force=True)
    try:
        with h5py.File(path, "r") as file:
            return {name: np.asarray(file[name][...]) for name in names}
    finally:
        if packed:
            # it is not to help where there is none; files that other tests left open may still use it
            gc.collect()
            with contextlib.suppress(RuntimeError):
                h5py.h5z.unregister_filter(HDF5_FILTER)


def recorded_in(path: Path) -> Path:
    """The Zarr trace in which the trace at a path is recorded: an HDF5 file is made when it is closed."""
    return path if path.suffix == ".zarr" else path.with_name(f"{path.name}.zarr")
